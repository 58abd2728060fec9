"""What a process other than the main one records: its tokens and expert load, in a small file beside the run record.

The same events as of a :class:`LiveRun`, and no more than that: no price, prediction, projection, sink, GPU sampler or
console. Nothing is exchanged with the other processes. Which run the rows belong to stands in the main process's record,
which is read once, after the first step: every process has taken part in that, so the main one has begun its session.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ftcost_callback.boundary import Boundary
from ftcost_callback.forward_counters import ForwardCounters
from ftcost_callback.ranks import last_session
from ftcost_callback.record_writer import RecordWriter
from ftcost_callback.recorder import StepRecorder
from ftcost_callback.records import ExpertLoad, PauseKind, RankSession, Row, Step
from ftcost_callback.run_file import Ledger, run_file_path, write_ledger
from ftcost_callback.session_opening import Training
from ftcost_callback.session_plan import Identity, Plan, Settings
from ftcost_callback.step_resolution import StepResolution, step_row
from ftcost_callback.training_watch import TrainingWatch

_log = logging.getLogger("ftcost_callback")

FLUSH_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 60.0
"""A shared disk may show the main process's rows late; after this, rows are written without the name of their run."""


class RankRun:
    """``identity.run_id`` is that of the checkpoint that is resumed, or empty. ``process_started_at``: epoch seconds."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        plan: Plan,
        boundary: Boundary,
        *,
        rank: int,
        output_dir: str | os.PathLike[str],
        process_started_at: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity
        self._settings = settings
        self._plan = plan
        self._boundary = boundary
        self._clock = clock
        self._rank = rank
        self._output_dir = output_dir
        self._process_started_at = process_started_at
        self._session: Mapping[str, Any] | None = None  # the main process's row, once it is found
        self._first_step_ended_at: float | None = None
        self._is_named = False  # whose rows they are has been written
        self._held: list[Row] = []  # until then
        self.recorder = StepRecorder(clock, window_steps=1, skip_first_steps=settings.skip_first_steps)
        self.counters = ForwardCounters(boundary, lambda error: None)
        self.record = RecordWriter(boundary, clock)
        self._steps = StepResolution(self.recorder, self.counters, boundary, clock)
        self._watch: TrainingWatch | None = None

    def begin(self, training: Training) -> None:
        self.recorder.start(earlier=self.identity.earlier, furthest_step=self.identity.furthest_step)
        self._steps.start(
            training.device, steps_done=training.steps_done, counts_forwards=training.forwards_are_micro_batches
        )
        if not self._plan.is_data_parallel:
            self._boundary.call(
                "token counter",
                lambda: self.counters.attach(
                    training.model, num_processes=self._plan.num_processes, expert_load=self._settings.expert_load
                ),
            )
        self.record.open(self._output_dir, rank=self._rank)
        atexit.register(self._interpreter_exits)
        self.recorder.pause("other")
        self._steps.host_goes_on()

    def watch_training(self, trainer: Any) -> None:
        """As :meth:`LiveRun.watch_training`."""
        self._watch = TrainingWatch(trainer, self.left, closely=self._is_profiling)

    def holds_another(self, trainer: Any) -> bool:
        """Whether ``trainer`` begins inside this training."""
        return self._watch is not None and self._watch.holds_another(trainer)

    def epoch_begins(self) -> None:
        if self._watch is not None:
            self._boundary.call("training watch", self._watch.epoch_begins)

    def _is_profiling(self) -> bool:
        return False  # the main process does

    # --- steps --------------------------------------------------------------------------------------------------------

    def step_begins(self, *, awaits_batch: bool = False) -> None:
        self._steps.begins(awaits_batch=awaits_batch)
        if self._watch is not None:
            self._boundary.call("training watch", self._watch.step_begins)

    def micro_batch_ends(self) -> None:
        self._steps.micro_batch_ends()

    def waited_for_data(self, seconds: float) -> None:
        self._steps.waited_for_data(seconds)

    @property
    def num_micro_batches(self) -> int:
        """Of the step that is being done, so far."""
        return self._steps.num_micro_batches

    def labels_seen(self, labels: Sequence[Any]) -> None:
        self._boundary.call("token counter", lambda: self.counters.labels_seen(labels))

    def optimizer_begins(self) -> None:
        self._steps.phase_begins("optimizer")

    def optimizer_ends(self) -> None:
        self._steps.phase_begins("other")

    def rollout_begins(self) -> None:
        self._boundary.call("rollouts", self._steps.rollout_begins)

    def rollout_ends(self) -> None:
        self._boundary.call("rollouts", self._steps.rollout_ends)

    @property
    def in_step(self) -> bool:
        return self._steps.in_step

    def step_ends(self, global_step: int, *, pauses_to_come: frozenset[PauseKind] = frozenset()) -> bool:
        """As :meth:`LiveRun.step_ends`; a process never stops training on its own."""
        self._steps.ends(global_step)
        now = self._clock()
        if self._first_step_ended_at is None:
            self._first_step_ended_at = now
        if pauses_to_come or now - self.record.flushed_at >= FLUSH_SECONDS:
            self._take_steps(wait=bool(pauses_to_come))
            if "log" in pauses_to_come and self.recorder.num_measured_steps > 0:  # as the main process does
                self._take_experts()
            self._flush()
        self._steps.host_goes_on()
        return False

    def _take_steps(self, *, wait: bool) -> None:
        for step, timing in self._steps.resolve(wait=wait):
            self._write(step_row(step, timing, session_index=self._session_index, spent_usd=None))

    def _take_experts(self) -> None:
        load = self._boundary.call("expert load", lambda: self.counters.take_experts(self._steps.last_step))
        if load is not None:
            self._write(load)

    @property
    def _session_index(self) -> int:
        index = self._session.get("session_index") if self._session is not None else None
        return index if isinstance(index, int) else self.identity.session_index

    def _write(self, row: Row) -> None:
        if not self._is_named:
            self._held.append(row)
        elif isinstance(row, Step):
            self.record.write_step(dataclasses.replace(row, session_index=self._session_index))
        elif isinstance(row, ExpertLoad):
            self.record.write_experts(row)
        else:
            self.record.write(row)

    def _flush(self, *, is_last: bool = False) -> None:
        if not self._is_named and not self._name(is_last=is_last):
            return
        self.record.flush()

    def _name(self, *, is_last: bool) -> bool:
        """Write whose rows they are, and those that waited for it. False: that is not known yet."""
        if self._first_step_ended_at is None:
            return False
        self._session = self._main_session()
        waited = self._clock() - self._first_step_ended_at
        if self._session is None and waited < LOOK_SECONDS and not is_last:
            return False
        self._is_named = True
        earlier = self.identity.earlier
        row = RankSession(
            rank=self._rank,
            num_processes=self._plan.num_processes,
            run_id=str(self._session["run_id"]) if self._session is not None else None,
            session_index=self._session_index,
            earlier_tokens=earlier.tokens if earlier is not None else None,
        )
        held, self._held = self._held, []
        for each in (row, *held):
            self._write(each)
        return True

    def _main_session(self) -> dict[str, Any] | None:
        """The main process's session row of this very launch."""
        main = run_file_path(self._output_dir)
        try:
            is_of_this_launch = main.stat().st_mtime >= self._process_started_at
        except OSError:
            return None
        return last_session(main) if is_of_this_launch else None

    # --- pauses -------------------------------------------------------------------------------------------------------

    def trainer_logged(self, values: Mapping[str, Any]) -> None:
        """Figures are shown by the main process."""

    def wait_for_steps(self) -> None:
        if self._steps.any_pending:
            self._take_steps(wait=True)
            self._flush()

    def pause(self, kind: PauseKind) -> None:
        self.wait_for_steps()
        self.recorder.pause(kind, global_step=self._steps.last_step)
        self._steps.host_goes_on()

    def save_ledger(self, checkpoint_dir: Path) -> None:
        """Its own, beside the checkpoint just written."""

        def write() -> None:
            if checkpoint_dir.is_dir() and self._session is not None:
                ledger = Ledger(
                    run_id=str(self._session["run_id"]),
                    session_index=self._session_index,
                    global_step=self._steps.last_step,
                    totals=self.recorder.totals,
                )
                write_ledger(checkpoint_dir, ledger, rank=self._rank)

        self._flush()
        self.record.write_what_waits(global_step=self._steps.last_step)
        self.record.flush()
        self._boundary.call("checkpoint ledger", write)

    # --- the session ends ---------------------------------------------------------------------------------------------

    def end(self) -> None:
        self.wait_for_steps()
        self._take_experts()
        self._close()

    def left(self) -> None:
        """As :meth:`LiveRun.left`."""
        self._boundary.call("token counter", self.counters.detach)
        self._interpreter_exits()

    def abandon(self, *, retried_with: int | None = None) -> Identity:
        """As :meth:`LiveRun.abandon`."""
        self.wait_for_steps()
        self._close()
        return Identity(
            run_id=self.identity.run_id,
            session_index=self.identity.session_index + 1,
            earlier=self.recorder.totals,
            furthest_step=max(self.identity.furthest_step, self._steps.last_step),
        )

    def _close(self) -> None:
        self._flush(is_last=True)
        self.record.write_what_waits(global_step=self._steps.last_step)
        self.record.flush()
        self.release()

    def _interpreter_exits(self) -> None:
        def write() -> None:
            self._take_steps(wait=False)
            self._flush(is_last=True)
            self.record.write_what_waits(global_step=self._steps.last_step)
            self.record.flush()

        self._boundary.call("end of the program", write)

    def release(self) -> None:
        """Hooks and file are gone. May be called at any time, more than once."""
        atexit.unregister(self._interpreter_exits)
        if self._watch is not None:
            self._watch.close()
        for let_go in (self.counters.detach, self.record.close):
            try:
                let_go()
            except Exception:
                _log.debug("ftcost: letting go failed", exc_info=True)
