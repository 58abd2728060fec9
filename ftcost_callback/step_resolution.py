"""From "a step begins, a micro-batch ends, the step ends", as the host sees it, to steps whose end the device has told."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ftcost_callback.boundary import Boundary
from ftcost_callback.forward_counters import ForwardCounters
from ftcost_callback.recorder import Phase, PhaseSeconds, StepRecorder, StepTiming
from ftcost_callback.records import Step
from ftcost_callback.step_clock import CudaStepClock, HostStepClock
from ftcost_callback.token_counter import PendingTokens

_log = logging.getLogger("ftcost_callback")


@dataclass(slots=True)
class PendingStep:
    """A step whose end the device has not told yet."""

    global_step: int
    mark: Any
    tokens: PendingTokens
    data_wait_seconds: float
    num_micro_batches: int
    is_profiled: bool = False
    phase_marks: list[tuple[Phase, Any]] = field(default_factory=list)  # what begins there
    phase_times: list[tuple[Phase, float]] = field(default_factory=list)  # clock times of the first of them, as far as told

    def phase_seconds(self, ended_at: float) -> dict[Phase, float]:
        """Phase -> seconds, each from its mark to the next one, or to the step's end."""
        seconds: dict[Phase, float] = {}
        for phase, began_at in reversed(self.phase_times):
            seconds[phase] = seconds.get(phase, 0.0) + ended_at - began_at
            ended_at = began_at
        return seconds


class StepResolution:
    """``begins``, ``phase_begins``, ``micro_batch_ends`` and ``ends`` follow a step; ``resolve`` hands those that are over
    to the recorder.

    Forward, backward, optimizer, and what is no part of the step (a rollout, an evaluation) are told apart by marks on the
    device's own clock, which wait for nothing.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        counters: ForwardCounters,
        boundary: Boundary,
        clock: Callable[[], float],
    ) -> None:
        self._recorder = recorder
        self._counters = counters
        self._boundary = boundary
        self._clock = clock
        self._step_clock: HostStepClock | CudaStepClock = HostStepClock(clock)
        self._mark: Callable[[], Any] = self._step_clock.mark
        self._device: Any = None
        self._is_cuda = False
        self._pending: deque[PendingStep] = deque()
        self._host_mark = 0.0
        self._data_wait = 0.0
        self.num_micro_batches = 0
        self._phase_marks: list[tuple[Phase, Any]] = []
        self._tells_phases = False
        self._aside: Phase | None = None  # what is being done that is no part of the step
        self._awaits_batch = False
        self._counts_forwards = False
        counters.on_phase = self.phase_begins
        counters.on_failed = self._forward_failed
        self.any_forward = False  # of the step that is being done, failed ones too
        self.in_step = False  # between the begin and the end of a step
        self.last_step = 0

    def start(self, device: Any, *, steps_done: int, counts_forwards: bool = False) -> None:
        """``device``: a ``torch.device``. ``counts_forwards``: each training forward is a micro-batch; else
        ``micro_batch_ends`` tells."""
        self._counts_forwards = counts_forwards
        # Elsewhere the host's clock says when work was asked for, not when it was done.
        self._tells_phases = device.type in ("cpu", "cuda")
        self._device = device
        self._is_cuda = device.type == "cuda"
        self.last_step = steps_done
        if self._is_cuda:
            clock = self._boundary.call("CUDA step clock", lambda: CudaStepClock.on(device, self._clock))
            self._step_clock = clock if clock is not None else HostStepClock(self._clock)
            self._mark = self._step_clock.mark

    @property
    def any_pending(self) -> bool:
        return bool(self._pending)

    def begins(self, *, awaits_batch: bool = False) -> None:
        """The batches of the next step have arrived; ``awaits_batch``: they are waited for until its first forward."""
        now = self._clock()
        self._data_wait = max(0.0, now - self._host_mark)
        self.in_step = True
        self.num_micro_batches = 0 if self._counts_forwards else 1
        self.any_forward = False
        self._awaits_batch = awaits_batch
        self._phase_marks = []
        self._aside = None

    def micro_batch_ends(self) -> None:
        self.num_micro_batches += not self._counts_forwards
        self.phase_begins("other")

    def waited_for_data(self, seconds: float) -> None:
        """For a batch that is not the first of its step."""
        self._data_wait += seconds

    def phase_begins(self, phase: Phase) -> None:
        """What runs from here to the next mark, or to the step's end. Never raises: it is called inside the forward."""
        if phase == "forward":
            self.num_micro_batches += self._counts_forwards
            self.any_forward = True
            if self._awaits_batch:
                self._awaits_batch = False
                self._data_wait = max(0.0, self._clock() - self._host_mark)
        if self._tells_phases and self._aside is None and not (self._is_cuda and self._is_captured()):
            try:
                self._phase_marks.append((phase, self._mark()))
            except Exception:  # the clock's, which the end of the step meets again, and says
                self._tells_phases = False
                _log.debug("ftcost: phases are not told apart", exc_info=True)

    def _forward_failed(self) -> None:
        """Its batch is skipped, or training ends."""
        self.num_micro_batches -= self._counts_forwards
        self.phase_begins("other")

    def _is_captured(self) -> bool:
        """The user records a CUDA graph: an event of ours would end that with an error."""
        import torch

        return bool(torch.cuda.is_current_stream_capturing())

    def rollout_begins(self) -> None:
        """What the step trains on is being generated, and then scored."""
        self._aside_begins("rollout")

    def rollout_ends(self) -> None:
        self._aside_ends("rollout")

    def evaluation_begins(self) -> None:
        """Somebody evaluates in the middle of a step."""
        self._aside_begins("eval")

    def evaluation_ends(self) -> None:
        self._aside_ends("eval")

    def _aside_begins(self, phase: Phase) -> None:
        if self.in_step and self._aside is None:
            self._aside = phase
            self._phase_marks.append((phase, self._mark()))

    def _aside_ends(self, phase: Phase) -> None:
        if self._aside == phase:
            self._aside = None
            self._phase_marks.append(("other", self._mark()))

    def ends(self, global_step: int, *, is_profiled: bool = False) -> None:
        """The optimizer has stepped. ``is_profiled``: a profiler slowed the step down."""
        marks, self._phase_marks, self._aside = self._phase_marks, [], None
        if marks and marks[-1][0] in ("rollout", "eval"):
            marks.pop()  # nobody said that it ended
        self._pending.append(
            PendingStep(
                global_step=global_step,
                tokens=self._counters.take_step(),
                mark=self._mark(),
                data_wait_seconds=self._data_wait,
                num_micro_batches=self.num_micro_batches or 1,
                is_profiled=is_profiled,
                phase_marks=marks,
            )
        )
        self.in_step = False
        self.last_step = global_step

    def host_goes_on(self) -> None:
        """A step's bookkeeping, or a pause, ends here: from now on the host waits for the next batches."""
        self._host_mark = self._clock()

    def resolve(self, *, wait: bool) -> list[tuple[PendingStep, StepTiming]]:
        """Hand the steps whose end is known to the recorder, in order."""
        resolved = []
        while self._pending:
            step = self._pending[0]
            ended_at = self._all_ended_at(step, wait=wait)
            if ended_at is None:
                break
            self._pending.popleft()
            phases = step.phase_seconds(ended_at)
            timing = self._recorder.step(
                step.global_step,
                data_wait_seconds=step.data_wait_seconds,
                tokens=self._counters.read(step.tokens),
                ended_at=ended_at,
                num_micro_batches=step.num_micro_batches,
                rollout_seconds=phases.get("rollout", 0.0),
                eval_seconds=phases.get("eval", 0.0),
                phases=PhaseSeconds.of(phases),
                is_profiled=step.is_profiled,
            )
            resolved.append((step, timing))
        return resolved

    def _all_ended_at(self, step: PendingStep, *, wait: bool) -> float | None:
        """When the step ended; its marks are asked for in the order they were made, each once."""
        # A device without an event clock of ours is only read where the Trainer reads it too.
        if not self._is_cuda and self._device.type != "cpu" and not wait:
            return None
        if isinstance(self._step_clock, HostStepClock):  # whose marks are the times
            step.phase_times = step.phase_marks
            at: float = step.mark
            return at
        ended_at = self._step_clock.ended_at
        for phase, mark in step.phase_marks[len(step.phase_times) :]:
            passed_at = ended_at(mark, wait=wait)
            if passed_at is None:
                return None
            step.phase_times.append((phase, passed_at))
        return ended_at(step.mark, wait=wait)


def step_row(step: PendingStep, timing: StepTiming, *, session_index: int, spent_usd: float | None) -> Step:
    """The row of a resolved step."""
    phases = timing.phases
    return Step(
        global_step=timing.global_step,
        session_index=session_index,
        step_seconds=timing.step_seconds,
        data_wait_seconds=timing.data_wait_seconds,
        rollout_seconds=timing.rollout_seconds or None,
        num_micro_batches=step.num_micro_batches,
        num_tokens=timing.tokens.num_tokens,
        num_non_padding_tokens=timing.tokens.num_non_padding_tokens,
        num_supervised_tokens=timing.tokens.num_supervised_tokens,
        num_samples=timing.tokens.num_samples,
        longest_sequence_tokens=timing.tokens.longest_sequence_tokens,
        forward_seconds=phases.forward if phases is not None else None,
        backward_seconds=phases.backward if phases is not None else None,
        optimizer_seconds=phases.optimizer if phases is not None else None,
        is_profiled=True if step.is_profiled else None,
        repeated=True if timing.repeated else None,
        elapsed_seconds=timing.elapsed_seconds,
        spent_usd=spent_usd,
    )
