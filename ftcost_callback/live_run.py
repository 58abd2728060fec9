"""One session of a measured run: its parts, put together. Told what happens by the callback; knows no Trainer event.

Every part (tokens, experts, GPU, record, prediction, projection, sinks) is called through :class:`Boundary`, so that a
part that fails is switched off alone.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from costmodel.errors import CostModelError
from costmodel.specs import Price
from costmodel.units import SECONDS_PER_HOUR
from ftcost_callback.boundary import Boundary
from ftcost_callback.budget import BudgetWatch
from ftcost_callback.comparison import Comparison, Measured, compare
from ftcost_callback.dry_run import LONGEST_STEPS, dry_run_lines, say
from ftcost_callback.expert_balance import ExpertBalance, expert_balance
from ftcost_callback.expert_load import ExpertLoadCounter
from ftcost_callback.forward_window import ForwardWindow, TrainingForward
from ftcost_callback.gpu_sampler import GpuSampler, GpuUnavailableError, TorchDevice
from ftcost_callback.host_load import ProcessorWait
from ftcost_callback.live_flops import ATTENTION_CONVENTION, FlopsCounter
from ftcost_callback.out_of_memory import Failure, explained, is_out_of_memory
from ftcost_callback.peak_memory import PeakMemory
from ftcost_callback.projection import Projection, ProjectionInput, project
from ftcost_callback.recorder import Pace, StepAggregate, StepRecorder, StepTiming, Totals
from ftcost_callback.records import (
    GpuSample,
    Pause,
    PauseKind,
    Prediction,
    Row,
    Session,
    Step,
    Summary,
    TokenCounts,
    TrainerLog,
)
from ftcost_callback.reporting import (
    Standing,
    completed_row,
    measured_of,
    mfu_and_hfu,
    summary_of,
    tokens_seen,
    window_of,
)
from ftcost_callback.run_file import Ledger, RunFile, StepThinner, run_file_path, write_ledger
from ftcost_callback.session_plan import Identity, Plan, Settings
from ftcost_callback.sinks.base import FanOut, Sink
from ftcost_callback.sinks.console import budget_line
from ftcost_callback.step_clock import CudaStepClock, HostStepClock
from ftcost_callback.token_counter import PendingTokens, TokenCounter, label_rule

_log = logging.getLogger("ftcost_callback")

FLUSH_SECONDS: Final = 1.0  # a kill loses no more of the record than this
REPORT_SECONDS: Final = 10.0  # a report at least this often, also between logging steps
STEPS_BEFORE_SECOND_PREDICTION: Final = 20
MIN_STEPS_FOR_PACE: Final = 5
_SCHEDULED_PAUSES: Final[tuple[PauseKind, ...]] = ("eval", "save", "log")


@dataclass(slots=True)
class _PendingStep:
    """A step whose end the device has not told yet."""

    global_step: int
    mark: Any
    tokens: PendingTokens
    data_wait_seconds: float
    num_micro_batches: int
    forward_backward_seconds: float | None
    optimizer_seconds: float | None


class LiveRun:
    """One session. The callback calls the methods in the order of the Trainer's events."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        plan: Plan,
        boundary: Boundary,
        *,
        sinks: Iterable[Sink],
        output_dir: str | os.PathLike[str],
        clock: Callable[[], float] = time.monotonic,
        order_note: str | None = None,
    ) -> None:
        """``order_note``: why the longest batch does not come first in a dry run."""
        self._order_note = order_note
        self._settings = settings
        self._plan = plan
        self._boundary = boundary
        self._clock = clock
        self._output_dir = Path(output_dir)
        self.identity = identity
        skipped = settings.skip_first_steps
        if settings.dry_run_steps is not None and order_note is None:
            skipped = max(skipped, LONGEST_STEPS)  # they are not what steps usually are
        self.recorder = StepRecorder(clock, window_steps=settings.window_steps, skip_first_steps=skipped)
        self.window = ForwardWindow(self._open_forward, self._close_forward, self.failed)
        self.experts: ExpertLoadCounter | None = None
        self.tokens: TokenCounter | None = None
        self.sampler: GpuSampler | None = None
        self.file: RunFile | None = None
        self._thinner = StepThinner()
        self._log_seconds = 0.0
        self._sinks = FanOut(sinks)
        self._budget = BudgetWatch(crossed=identity.crossed_thresholds)
        self._step_clock: HostStepClock | CudaStepClock = HostStepClock(clock)
        self._device: Any = None
        self._is_cuda = False
        self._pending: deque[_PendingStep] = deque()
        self._host_mark = 0.0
        self._in_step = False
        self._pauses_to_come: frozenset[PauseKind] = frozenset()
        self._data_wait = 0.0
        self._num_micro_batches = 0
        self._phase_times: list[float] = []
        self._num_profiled = 0
        self._reported_at = self._flushed_at = self._step_ended_at = 0.0
        self._last_report_step = 0
        self._last_step = 0
        self._first_prediction: Prediction | None = None
        self._prediction: Prediction | None = None
        self._has_predicted_again = False
        self._job: dict[str, Any] | None = None
        self._expected_tokens_per_step: float | None = None
        self._peak_flops_per_second: float | None = None
        self._flops: FlopsCounter | None = None
        self._said_mfu_above_1 = False
        self._usd_per_hour: float | None = None
        self._machine: str | None = None
        self._peaks = PeakMemory()
        self._processor_wait: ProcessorWait | None = None
        self._energy_joules: float | None = identity.earlier_energy_joules
        self._throttle_reasons: int | None = None
        self._gpu = GpuSample()
        self._balance: ExpertBalance | None = None
        self._expert_tokens: int | None = 0
        self._not_recorded_reason: str | None = None
        self._comparison = Comparison()
        self._projection = Projection()
        self._stopped_at_budget = False
        self._num_sampler_notes = 0
        self._said_no_tokens = False
        self._forward_shape: tuple[int, int] | None = None  # of the last training forward
        self._said_out_of_memory = False

    # --- the session begins -------------------------------------------------------------------------------------------

    def begin(self, objects: Mapping[str, Any], *, startup_seconds: float, started_at: float) -> None:
        """Attach to the live objects and write the first rows.

        ``objects``: what :func:`trainer_adapter.job_from_objects` takes. ``started_at``: epoch seconds, where the bill
        begins.
        """
        call = self._boundary.call
        earlier = self.identity.earlier
        self.recorder.start(startup_seconds=startup_seconds, earlier=earlier, furthest_step=self.identity.furthest_step)
        self._last_step = self._last_report_step = objects["state"].global_step
        notes = list(self.identity.notes)
        self._find_device(objects["args"])
        call("peak memory", self._peaks.loading_ends)
        call("token counter", lambda: self._attach_counters(objects["model"], notes))
        call("GPU sampler", lambda: self._start_sampler(notes))
        model_facts = call("model facts", lambda: _trainer_adapter().model_facts(objects["model"]))
        self._job = call("job", lambda: self._read_job(objects, notes))
        device_facts = call("device facts", lambda: self._device_facts(notes))
        self._flops = call("FLOPs", self._flops_counter)
        if self._settings.predict and self._job is not None:
            self._first_prediction = self._prediction = call("prediction", lambda: self._predict("before", notes))
        price = call("price", lambda: self._resolve_price(notes))
        self._watch_budget(notes)
        session = Session(
            run_id=self.identity.run_id,
            session_index=self.identity.session_index,
            resumed_from_step=self.identity.resumed_from_step,
            started_at=datetime.datetime.fromtimestamp(started_at, datetime.timezone.utc).isoformat(),
            startup_seconds=startup_seconds,
            earlier_seconds=earlier.seconds if earlier is not None else None,
            earlier_tokens=_token_totals(earlier) if earlier is not None else None,
            max_steps=self._plan.max_steps,
            loading_peak_allocated_bytes=self._peaks.loading_allocated_bytes,
            loading_peak_reserved_bytes=self._peaks.loading_reserved_bytes,
            job=self._job,
            model=model_facts,
            device=device_facts,
            price=price.model_dump() if price is not None else None,
            budget=self._settings.budget_row(),
            versions=call("versions", lambda: _trainer_adapter().versions()),
            notes=notes or None,
        )
        call("run record", self._open_file)
        self._write(session)
        if self._prediction is not None:
            self._write(self._prediction)
        self._flush()
        self._sinks.open(session, self._prediction)
        self._reported_at = self._step_ended_at = self._clock()
        self._processor_wait = self._boundary.call("processor wait", ProcessorWait)
        atexit.register(self._interpreter_exits)
        self.pause("other")  # our own preparations

    def _find_device(self, args: Any) -> None:
        self._device = args.device
        self._is_cuda = args.device.type == "cuda"
        if self._is_cuda:
            clock = self._boundary.call("CUDA step clock", lambda: CudaStepClock.on(self._device, self._clock))
            self._step_clock = clock if clock is not None else HostStepClock(self._clock)
            self._peaks = PeakMemory(self._device)

    def _attach_counters(self, model: Any, notes: list[str]) -> None:
        if self._plan.is_data_parallel:
            notes.append("tokens and expert load are not counted under torch's DataParallel; launch one process per GPU")
            return
        if self._plan.num_processes > 1:
            notes.append(f"{self._plan.num_processes} processes: tokens and experts are those of the main process")
        self.tokens = TokenCounter(label_rule(model), use_num_items_in_batch=self._plan.num_processes == 1)
        self._boundary.on_failure("token counter", self._drop_tokens)
        self.window.attach(model)
        if self._settings.expert_load:
            self._boundary.on_failure("expert load", self._drop_experts)
            self.experts = self._boundary.call("expert load", lambda: self._attach_experts(model))

    def _attach_experts(self, model: Any) -> ExpertLoadCounter:
        experts = ExpertLoadCounter(functools.partial(self._boundary.call, "expert load"))
        experts.attach(model)
        return experts

    def _drop_tokens(self) -> None:
        self.tokens = None

    def _drop_experts(self) -> None:
        experts, self.experts = self.experts, None
        if experts is not None:
            experts.detach()

    def _open_forward(self, forward: TrainingForward) -> None:
        self._forward_shape = forward.batch_shape
        if self.tokens is not None:
            tokens = self.tokens
            self._boundary.call("token counter", lambda: tokens.open_forward(forward))
        if self.experts is not None:
            experts = self.experts
            self._boundary.call("expert load", lambda: experts.open_forward(forward))

    def _close_forward(self) -> None:
        if self.experts is not None:
            self._boundary.call("expert load", self.experts.close_forward)

    def failed(self, error: BaseException | None, *, retried_with: int | None = None) -> None:
        """Training broke off with ``error``. When memory ran out, the record says why; the error itself goes on."""
        if self._said_out_of_memory or not (is_out_of_memory(error) or retried_with is not None):
            return
        self._said_out_of_memory = True

        def explain() -> None:
            failure = Failure(
                global_step=self._last_step + 1,
                message=str(error) if error is not None else "",
                batch_shape=self._forward_shape,
                job=self._job,
                retried_with=retried_with,
            )
            row = explained(failure)
            self._write(row)
            self._flush()
            _log.warning("ftcost: %s", row.verdict)

        self._boundary.call("out of memory", explain)

    def _start_sampler(self, notes: list[str]) -> None:
        if not self._is_cuda:
            return
        sampler = GpuSampler(TorchDevice.of(self._device), period_seconds=self._settings.sample_period_seconds)
        try:
            sampler.open()
        except GpuUnavailableError as unavailable:
            notes.append(str(unavailable))
            _log.info("ftcost: %s", unavailable)
            return
        notes.extend(sampler.notes)
        self._num_sampler_notes = len(sampler.notes)
        sampler.start()
        self.sampler = sampler
        self._boundary.on_failure("GPU sampler", sampler.close)

    def _flops_counter(self) -> FlopsCounter | None:
        if self._job is None or self._peak_flops_per_second is None:
            return None
        try:
            return FlopsCounter(self._job)
        except CostModelError:
            return None  # said already, by the prediction

    def _device_facts(self, notes: list[str]) -> dict[str, Any]:
        dtype = None
        if self._job is not None:  # the type its matrix products run in decides the peak
            autocast = "bfloat16" if self._job.get("bf16") else "float16" if self._job.get("fp16") else None
            dtype = autocast or self._job.get("dtype")
        facts = dict(_trainer_adapter().device_facts(self._device, gpu=self._settings.gpu, dtype=dtype))
        if self._settings.peak_flops_per_second is not None:
            facts |= {"peak_flops_per_second": self._settings.peak_flops_per_second, "peak_source": "given"}
        self._peak_flops_per_second = facts.get("peak_flops_per_second")
        if self._peak_flops_per_second is not None:
            facts["attention_convention"] = ATTENTION_CONVENTION
        elif self._is_cuda:
            name = facts.get("name", "this device")
            notes.append(f"no MFU: the peak of {name} is not known; give it as peak_flops_per_second= or gpu=")
        self._machine = f"{self._plan.num_devices} x {facts.get('name', facts['kind'])}"
        return facts

    def _read_job(self, objects: Mapping[str, Any], notes: list[str]) -> dict[str, Any] | None:
        try:
            job = dict(_trainer_adapter().job_from_objects(**objects))
        except CostModelError as refusal:
            notes.append(f"no prediction: {refusal}")
            return None
        if self._settings.price is not None:
            job["usd_per_gpu_hour"] = self._settings.price.usd_per_gpu_hour
        elif self._settings.cloud is not None:
            job["cloud"] = self._settings.cloud
            if self._settings.tier is not None:
                job["tier"] = self._settings.tier
        return job

    def _predict(self, basis: Literal["before", "tokens_seen"], notes: list[str]) -> Prediction | None:
        from costmodel.estimation import estimate, estimate_from_tokens

        assert self._job is not None
        job = dict(self._job)
        if self._settings.calibration is not None:
            job["calibration"] = self._settings.calibration
        try:
            if basis == "tokens_seen":
                seen = tokens_seen(self.recorder.session)
                if seen is None:
                    return None
                answer: dict[str, Any] = estimate_from_tokens(job, seen).to_dict()
            else:
                answer = estimate(job).to_dict()
        except CostModelError as refusal:
            notes.append(f"no prediction: {refusal}")
            return None
        if basis == "before" and job.get("lengths") is not None:
            self._expected_tokens_per_step = answer.get("num_tokens_per_step")
        return Prediction(basis=basis, global_step=self._last_step, estimate=answer)

    def _resolve_price(self, notes: list[str]) -> Price | None:
        from costmodel.catalog import bill_usd_per_hour, find_price

        price = self._settings.price
        if price is None and self._settings.cloud is not None:
            gpu = self._job.get("gpu") if self._job is not None else None
            try:
                if gpu is None:
                    raise CostModelError("the training device is no GPU of the catalogue")
                price = find_price(
                    gpu, cloud=self._settings.cloud, tier=self._settings.tier, num_gpus=self._plan.num_devices
                )
            except CostModelError as refusal:
                notes.append(f"no price: {refusal}")
                return None
        if price is not None:
            self._usd_per_hour = bill_usd_per_hour(price, self._plan.num_devices)
        return price

    def _watch_budget(self, notes: list[str]) -> None:
        budget_usd = self._settings.budget_usd
        if budget_usd is not None and self._usd_per_hour is None:
            notes.append("budget_usd is not watched: there is no price; give usd_per_gpu_hour or cloud")
            _log.warning("ftcost: %s", notes[-1])
            budget_usd = None
        stop = self._settings.stop_at_budget
        if stop and self._plan.num_processes > 1:
            # The processes' clocks differ: one would stop a step before the others, which then wait for it for ever.
            notes.append("stop_at_budget only warns with several processes, which would not stop at the same step")
            _log.warning("ftcost: %s", notes[-1])
            stop = False
        self._budget = BudgetWatch(
            budget_usd=budget_usd,
            budget_hours=self._settings.budget_hours,
            stop_at_budget=stop,
            crossed=self.identity.crossed_thresholds,
        )

    def _open_file(self) -> None:
        self.file = RunFile(run_file_path(self._output_dir))

    # --- one step -----------------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """The batches of the next step have arrived."""
        now = self._clock()
        self._data_wait = max(0.0, now - self._host_mark)
        self._in_step = True
        self._num_micro_batches = 1
        self._phase_times = [now] if self._num_profiled < self._settings.profile_steps else []
        self._wait_if_profiling()

    def micro_batch_ends(self) -> None:
        """A micro-batch that is not the step's last has ended."""
        self._num_micro_batches += 1

    def phase_ends(self) -> None:
        """Backward or optimizer has ended; waits for the device while profiling."""
        if self._phase_times:
            self._wait_if_profiling()
            self._phase_times.append(self._clock())

    def _wait_if_profiling(self) -> None:
        if self._phase_times and self._is_cuda:
            import torch

            torch.cuda.synchronize(self._device)

    @property
    def in_step(self) -> bool:
        """Between the begin and the end of a step: what is logged there is the user's own affair."""
        return self._in_step

    def step_ends(self, global_step: int, *, pauses_to_come: frozenset[PauseKind] = frozenset()) -> bool:
        """The optimizer has stepped; ``pauses_to_come`` follow it. True: training should stop (and save)."""
        log_follows = "log" in pauses_to_come
        self._pauses_to_come = pauses_to_come
        tokens = None
        if self.tokens is not None:
            tokens = self._boundary.call("token counter", self.tokens.take_step)
        self._pending.append(
            _PendingStep(
                global_step=global_step,
                tokens=tokens if tokens is not None else PendingTokens(TokenCounts()),
                mark=self._step_clock.mark(),
                data_wait_seconds=self._data_wait,
                num_micro_batches=self._num_micro_batches,
                forward_backward_seconds=self._phase(0),
                optimizer_seconds=self._phase(1),
            )
        )
        self._num_profiled += bool(self._phase_times)
        self._in_step = False
        self._last_step = global_step
        now = self._clock()
        step_seconds, self._step_ended_at = now - self._step_ended_at, now
        # Steps are settled some at once, which costs a fraction of doing it for each; early enough that what waits never
        # stands for more than the allowed time when the next step ends.
        is_due = now + step_seconds - self._flushed_at >= FLUSH_SECONDS or self._settings.wandb_every == "step"
        stop = reported = False
        if pauses_to_come or is_due:
            stop, reported = self._settle_steps(wait=bool(pauses_to_come), log_follows=log_follows)
        if pauses_to_come:
            self._boundary.call("peak memory", self._peaks.step_ends)
        self._host_mark = self._clock()
        if reported and not log_follows:
            self.pause("log")  # our own report, which no pause of the Trainer follows
        return stop

    def _phase(self, index: int) -> float | None:
        times = self._phase_times
        return times[index + 1] - times[index] if len(times) > index + 1 else None

    def _resolve_steps(self, *, wait: bool) -> list[Step]:
        """Hand the steps whose end is known to the recorder, in order."""
        rows = []
        while self._pending:
            step = self._pending[0]
            ended_at = self._ended_at(step.mark, wait=wait)
            if ended_at is None:
                break
            self._pending.popleft()
            counts = self._boundary.call("token counter", step.tokens.read)
            timing = self.recorder.step(
                step.global_step,
                data_wait_seconds=step.data_wait_seconds,
                tokens=counts,
                ended_at=ended_at,
                num_micro_batches=step.num_micro_batches,
            )
            self._note_missing_tokens(timing.tokens)
            if self._expert_tokens is not None:
                real = timing.tokens.num_non_padding_tokens
                self._expert_tokens = self._expert_tokens + real if real is not None else None
            rows.append(self._step_row(step, timing))
        return rows

    def _ended_at(self, mark: Any, *, wait: bool) -> float | None:
        # A device without an event clock of ours is only read where the Trainer reads it too.
        if not self._is_cuda and self._device.type != "cpu" and not wait:
            return None
        return self._step_clock.ended_at(mark, wait=wait)

    def _note_missing_tokens(self, tokens: TokenCounts) -> None:
        if self.tokens is None or self._said_no_tokens or tokens.num_tokens is not None:
            return
        self._said_no_tokens = True
        if self.tokens.saw_forward:
            _log.warning("ftcost: the model is not given input_ids, so samples are counted and tokens are not")
        else:
            _log.warning(
                "ftcost: no training forward of the model was seen (compiled before the callback attached?); "
                "tokens are not counted"
            )

    def _step_row(self, step: _PendingStep, timing: StepTiming) -> Step:
        return Step(
            global_step=timing.global_step,
            session_index=self.identity.session_index,
            step_seconds=timing.step_seconds,
            data_wait_seconds=timing.data_wait_seconds,
            num_micro_batches=step.num_micro_batches,
            num_tokens=timing.tokens.num_tokens,
            num_non_padding_tokens=timing.tokens.num_non_padding_tokens,
            num_supervised_tokens=timing.tokens.num_supervised_tokens,
            num_samples=timing.tokens.num_samples,
            longest_sequence_tokens=timing.tokens.longest_sequence_tokens,
            forward_backward_seconds=step.forward_backward_seconds,
            optimizer_seconds=step.optimizer_seconds,
            repeated=True if timing.repeated else None,
            elapsed_seconds=timing.elapsed_seconds,
            spent_usd=self._spent_usd(timing.elapsed_seconds),
        )

    def _settle_steps(self, *, wait: bool, log_follows: bool) -> tuple[bool, bool]:
        """Take in the steps that have ended, report if that is due, write the rows, watch the budget.

        (Stop training, a report was made.)
        """
        rows = self._resolve_steps(wait=wait)
        report_due = (
            bool(rows)
            and self.recorder.num_measured_steps > 0
            and (log_follows or self._settings.wandb_every == "step" or self._clock() - self._reported_at >= REPORT_SECONDS)
        )
        if report_due:
            last = rows[-1]
            completed = self._boundary.call("report", lambda: self._report(last, with_experts=log_follows))
            rows[-1] = completed if completed is not None else last
        for row in rows:
            self._write_step(row)
        self._flush()
        return self._check_budget(), report_due

    # --- pauses -------------------------------------------------------------------------------------------------------

    def trainer_logged(self, values: Mapping[str, Any]) -> None:
        """The Trainer has logged ``values``: for the sinks that show them against what the run has cost."""
        elapsed = self.recorder.elapsed_seconds
        self._sinks.trainer_logged(
            TrainerLog(
                global_step=self._last_step,
                elapsed_seconds=elapsed,
                spent_usd=self._spent_usd(elapsed),
                values=values,
            )
        )

    def wait_for_steps(self) -> None:
        """A pause begins: the steps before it are over, or are waited for."""
        if self._pending:
            for row in self._resolve_steps(wait=True):
                self._write_step(row)
            self._boundary.call("peak memory", self._peaks.step_ends)
            self._flush()

    def pause(self, kind: PauseKind) -> None:
        """What passed since the last step or pause was a pause of this kind."""
        self.wait_for_steps()
        seconds = self.recorder.pause(kind, global_step=self._last_step)
        self._write_pause(kind, seconds)
        self._pauses_to_come -= {kind}
        self._boundary.call("peak memory", self._peaks.pause_ends)
        self._host_mark = self._clock()

    def save_ledger(self, checkpoint_dir: Path) -> None:
        """Beside the checkpoint just written."""

        def write() -> None:
            if checkpoint_dir.is_dir():
                write_ledger(checkpoint_dir, self.ledger())

        self._write_what_waits()  # the ledger and the record agree
        self._flush()
        self._boundary.call("checkpoint ledger", write)

    def ledger(self) -> Ledger:
        totals = self.recorder.totals
        return Ledger(
            run_id=self.identity.run_id,
            session_index=self.identity.session_index,
            global_step=self._last_step,
            totals=totals,
            spent_usd=self._spent_usd(totals.wall_seconds),
            energy_joules=self._energy_joules,
            crossed_thresholds=self._budget.crossed,
            pace=self._pace(),
        )

    def _pace(self) -> Pace | None:
        """Of this session, or of the one before while this one has measured next to nothing."""
        if self._machine is None:
            return None
        seconds = self.recorder.recent_step_seconds
        if len(seconds) < MIN_STEPS_FOR_PACE:
            return self.identity.earlier_pace
        return Pace(machine=self._machine, step_seconds=seconds, num_tokens=self.recorder.recent_num_tokens)

    def _earlier_pace(self) -> Pace | None:
        """Of the session before, if it ran on a machine like this one."""
        pace = self.identity.earlier_pace
        return pace if pace is not None and pace.machine == self._machine else None

    # --- the session ends ---------------------------------------------------------------------------------------------

    def end(self) -> None:
        """In order: the last report, the summary, then everything is let go."""
        self.wait_for_steps()
        if self._last_step > self._last_report_step:
            self._boundary.call("report", lambda: self._report(None, with_experts=True))
        seconds = self.recorder.close()
        self._write_what_waits()
        self._write(Pause(kind="other", global_step=self._last_step, seconds=seconds))
        summary = self._boundary.call("summary", self._summary)
        if summary is not None:
            self._write(summary)
            self._flush()
            self._sinks.close(summary)
            if self._settings.dry_run_steps is not None:
                self._boundary.call("dry run", lambda: self._say_dry_run(summary))
        self.release()

    def _say_dry_run(self, summary: Summary) -> None:
        memory = (self._prediction.estimate.get("memory") or {}) if self._prediction is not None else {}
        lines = dry_run_lines(
            summary,
            self._projection,
            max_steps=self._plan.max_steps,
            order_note=self._order_note,
            predicted_peak_bytes=memory.get("peak_allocated_bytes"),
            is_cuda=self._is_cuda,
        )
        say(lines)

    def abandon(self, *, retried_with: int | None = None) -> Identity:
        """Training was broken off without an end; the identity of a session that goes on with the same run.

        ``retried_with``: the batch that ``auto_find_batch_size`` tries next, since this one did not fit.
        """
        self.failed(None, retried_with=retried_with)
        self.wait_for_steps()
        seconds = self.recorder.close()
        self._write_what_waits()
        self._write(Pause(kind="other", global_step=self._last_step, seconds=seconds))
        self.release()
        return Identity(
            run_id=self.identity.run_id,
            session_index=self.identity.session_index + 1,
            earlier=self.recorder.totals,
            earlier_spent_usd=self._spent_usd(self.recorder.totals.wall_seconds),
            earlier_energy_joules=self._energy_joules,
            furthest_step=max(self.identity.furthest_step, self._last_step),
            crossed_thresholds=self._budget.crossed,
            earlier_pace=self._pace() if retried_with is None else None,  # another batch has another pace
        )

    def _interpreter_exits(self) -> None:
        """Training never ended in order: look at what ended the program, which was told to no callback."""

        def write() -> None:
            for row in self._resolve_steps(wait=False):
                self._write_step(row)
            self._write_what_waits()
            self.failed(getattr(sys, "last_value", None))
            self._flush()

        self._boundary.call("end of the program", write)

    def release(self) -> None:
        """Hooks, thread and file are gone. May be called at any time, more than once."""
        atexit.unregister(self._interpreter_exits)
        for let_go in (
            self.window.detach,
            self._drop_experts,
            *((self.sampler.close,) if self.sampler is not None else ()),
            *((self.file.close,) if self.file is not None else ()),
        ):
            try:
                let_go()
            except Exception:
                _log.debug("ftcost: letting go failed", exc_info=True)
        self.sampler = self.file = None

    # --- reports ------------------------------------------------------------------------------------------------------

    def _report(self, row: Step | None, *, with_experts: bool) -> Step | None:
        """Take stock, tell the sinks, and complete the last step's row with what is known only now."""
        extra: dict[str, Any] = {}
        if with_experts:
            self._boundary.call("expert load", lambda: self._take_experts(extra))
        self._boundary.call("GPU sampler", self._take_gpu)
        self._boundary.call("peak memory", self._peaks.step_ends)
        if self._second_prediction_is_due():
            self._boundary.call("prediction", self._predict_again)
        compared = self._boundary.call("comparison", self._compare)
        self._comparison = compared if compared is not None else Comparison()
        projected = self._boundary.call("projection", lambda: project(self._known()))
        self._projection = projected if projected is not None else Projection()
        self._reported_at, self._last_report_step = self._clock(), self._last_step
        standing = self._standing(self.recorder.take_report())
        self._sinks.log(window_of(standing), extra)
        return completed_row(row, standing) if row is not None else None

    def _standing(self, steps: StepAggregate) -> Standing:
        flops = self._flops
        per_second = self._boundary.call("FLOPs", lambda: flops.per_second(steps)) if flops is not None else None
        mfu, hfu = mfu_and_hfu(per_second, self._peak_flops_per_second)
        if mfu is not None and mfu > 1 and not self._said_mfu_above_1:
            self._said_mfu_above_1 = True
            _log.warning(
                "ftcost: MFU is %.2f, which cannot be: the device is faster than the peak taken for it; "
                "give the right one as peak_flops_per_second=",
                mfu,
            )
        elapsed = self.recorder.elapsed_seconds
        return Standing(
            global_step=self._last_step,
            max_steps=self._plan.max_steps,
            steps=steps,
            totals=self.recorder.totals,
            elapsed_seconds=elapsed,
            spent_usd=self._spent_usd(elapsed),
            predicted_usd=self._first_prediction.estimate.get("total_usd") if self._first_prediction else None,
            projection=self._projection,
            comparison=self._comparison,
            gpu=self._gpu,
            balance=self._balance,
            peak_allocated_bytes=self._peaks.allocated_bytes,
            peak_reserved_bytes=self._peaks.reserved_bytes,
            loading_peak_allocated_bytes=self._peaks.loading_allocated_bytes,
            loading_peak_reserved_bytes=self._peaks.loading_reserved_bytes,
            mfu=mfu,
            hfu=hfu,
        )

    def _compare(self) -> Comparison:
        estimate = self._prediction.estimate if self._prediction is not None else None
        return compare(estimate, self._measured(self._standing(self.recorder.session)))

    def _measured(self, standing: Standing) -> Measured:
        return measured_of(
            standing,
            throttle_reasons=self._throttle_reasons,
            dataloader_num_workers=self._plan.dataloader_num_workers,
            processor_wait_fraction=self._processor_wait.fraction() if self._processor_wait is not None else None,
        )

    def _take_experts(self, extra: dict[str, Any]) -> None:
        if self.experts is None:
            return
        expected, self._expert_tokens = self._expert_tokens, 0
        self._balance = None
        load = self.experts.take(self._last_step, num_non_padding_tokens=expected)
        if load is None or (load.status == "not_recorded" and load.reason == self._not_recorded_reason):
            return
        if load.status == "not_recorded":
            self._not_recorded_reason = load.reason
            _log.warning("ftcost: expert load is not recorded: %s", load.reason)
        else:
            self._balance = expert_balance(load.tokens_per_expert)
            extra["expert_load"] = load
        self._write(load)

    def _take_gpu(self) -> None:
        if self.sampler is None:
            return
        self._gpu = self.sampler.take_window()
        if self._gpu.energy_joules is not None:
            self._energy_joules = (self._energy_joules or 0.0) + self._gpu.energy_joules
        if self._gpu.throttle_reasons is not None:
            self._throttle_reasons = (self._throttle_reasons or 0) | self._gpu.throttle_reasons
        for note in self.sampler.notes[self._num_sampler_notes :]:
            _log.info("ftcost: %s", note)
        self._num_sampler_notes = len(self.sampler.notes)

    def _second_prediction_is_due(self) -> bool:
        return (
            self._settings.predict
            and self._job is not None
            and not self._has_predicted_again
            and self.recorder.num_measured_steps >= self._steps_before_second_prediction
            and tokens_seen(self.recorder.session) is not None
        )

    @property
    def _steps_before_second_prediction(self) -> int:
        dry_run_steps = self._settings.dry_run_steps
        if dry_run_steps is None:
            return STEPS_BEFORE_SECOND_PREDICTION
        return min(STEPS_BEFORE_SECOND_PREDICTION, max(1, dry_run_steps - LONGEST_STEPS))

    def _predict_again(self) -> None:
        self._has_predicted_again = True
        prediction = self._predict("tokens_seen", [])
        if prediction is not None:
            self._prediction = prediction
            self._write(prediction)
            self._sinks.prediction(prediction)

    def _known(self) -> ProjectionInput:
        recorder = self.recorder
        before = self._first_prediction.estimate if self._first_prediction is not None else {}
        elapsed = recorder.elapsed_seconds
        earlier = self._earlier_pace()
        return ProjectionInput(
            steps_done=self._last_step,
            max_steps=self._plan.max_steps,
            elapsed_seconds=elapsed,
            moments=recorder.moments,
            recent_step_seconds=recorder.recent_step_seconds,
            recent_num_tokens=recorder.recent_num_tokens,
            earlier_step_seconds=earlier.step_seconds if earlier is not None else (),
            earlier_num_tokens=earlier.num_tokens if earlier is not None else (),
            expected_tokens_per_step=self._expected_tokens_per_step,
            pauses=tuple(
                self._plan.pause_plan(
                    kind,
                    steps_done=self._last_step,
                    is_pending=kind in self._pauses_to_come,
                    measured_seconds=recorder.pause_seconds(kind),
                    predicted_total_seconds=before.get(f"{kind}_seconds"),
                )
                for kind in _SCHEDULED_PAUSES
            ),
            spent_usd=self._spent_usd(elapsed),
            usd_per_hour=self._usd_per_hour,
            predicted_total_seconds=before.get("total_seconds"),
            predicted_total_seconds_low=before.get("total_seconds_low"),
            predicted_total_seconds_high=before.get("total_seconds_high"),
            predicted_startup_seconds=before.get("startup_seconds"),
            predicted_step_seconds=before.get("step_seconds"),
        )

    def _spent_usd(self, elapsed_seconds: float) -> float | None:
        """Dollars of the run after ``elapsed_seconds``; earlier sessions at what they had cost."""
        if self._usd_per_hour is None:
            return None
        earlier = self.identity.earlier
        if earlier is None or self.identity.earlier_spent_usd is None:
            return elapsed_seconds / SECONDS_PER_HOUR * self._usd_per_hour
        since = elapsed_seconds - earlier.wall_seconds
        return self.identity.earlier_spent_usd + since / SECONDS_PER_HOUR * self._usd_per_hour

    def _check_budget(self) -> bool:
        if not self._budget.is_limited:
            return False
        elapsed = self.recorder.elapsed_seconds
        projection = self._projection
        crossed = self._boundary.call(
            "budget",
            lambda: self._budget.check(
                global_step=self._last_step,
                elapsed_seconds=elapsed,
                spent_usd=self._spent_usd(elapsed),
                projected_seconds=projection.projected_total_seconds,
                projected_seconds_low=projection.projected_total_seconds_low,
                projected_usd=projection.projected_usd,
                projected_usd_low=projection.projected_usd_low,
                num_measured_steps=self.recorder.num_measured_steps,
            ),
        )
        for row in crossed or ():
            self._write(row)
            self._sinks.alert(row)
            if not self._sinks.active:
                _log.warning("ftcost: %s", budget_line(row))
            self._stopped_at_budget = self._stopped_at_budget or row.action == "stopped"
        return self._stopped_at_budget

    def _summary(self) -> Summary:
        standing = self._standing(self.recorder.session)
        predictions = {each.basis: each for each in (self._first_prediction, self._prediction) if each is not None}
        return summary_of(
            standing,
            num_sessions=self.identity.session_index + 1,
            first_step_seconds=self.recorder.first_step_seconds,
            energy_joules=self._energy_joules,
            predictions=list(predictions.values()),
            measured=self._measured(standing),
            stopped_at_budget=self._stopped_at_budget,
        )

    def _write(self, row: Row) -> None:
        if self.file is not None:
            file = self.file
            self._boundary.call("run record", lambda: file.append(row))

    def _write_step(self, row: Step) -> None:
        thinned = self._thinner.add(row)
        if thinned is not None:
            self._write(thinned)

    def _write_pause(self, kind: PauseKind, seconds: float) -> None:
        """Log pauses of a very long run wait for the next step row that is written."""
        if kind == "log" and self._thinner.is_thinning:
            self._log_seconds += seconds
            return
        self._write(Pause(kind=kind, global_step=self._last_step, seconds=seconds))

    def _write_what_waits(self) -> None:
        """The steps and log pauses that a thinned record has not said yet."""
        row = self._thinner.take()
        if row is not None:
            self._write(row)
        if self._log_seconds:
            self._write(Pause(kind="log", global_step=self._last_step, seconds=self._log_seconds))
            self._log_seconds = 0.0

    def _flush(self) -> None:
        self._flushed_at = self._clock()
        if self.file is not None:
            self._boundary.call("run record", self.file.flush)


def _token_totals(totals: Totals) -> dict[str, int]:
    names = ("num_tokens", "num_non_padding_tokens", "num_supervised_tokens")
    return {name: value for name in names if (value := getattr(totals, name)) is not None}


def _trainer_adapter() -> Any:
    from ftcost_callback import trainer_adapter

    return trainer_adapter
