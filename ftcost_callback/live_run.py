"""One session of a measured run: its parts, put together, and told what happens in training. Knows no Trainer.

    session_opening   what is found out at the start: job, device, prediction, price, limits
    forward_counters  tokens and expert load of the training forwards
    step_resolution   steps, from what the host sees to what the device has done
    live_report       stock-taking: projection, comparison, sinks, budget, summary
    record_writer     the rows of the run record

Every part is called through :class:`Boundary`, so that one that fails is switched off alone.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from ftcost_callback.boundary import Boundary
from ftcost_callback.dry_run import LONGEST_STEPS, dry_run_lines, say
from ftcost_callback.gpu_watch import GpuWatch
from ftcost_callback.live_report import LiveReport, Parts
from ftcost_callback.out_of_memory import Failure, explained, is_out_of_memory, left_aside
from ftcost_callback.peak_memory import PeakMemory
from ftcost_callback.process_run import FLUSH_SECONDS, ProcessRun
from ftcost_callback.profiler_window import ProfilerWindow
from ftcost_callback.records import Pause, PauseKind, Profile, Step, Summary, TrainerLog
from ftcost_callback.reporting import summary_of_all
from ftcost_callback.run_file import Ledger
from ftcost_callback.session_opening import Opened, Training, open_session
from ftcost_callback.session_plan import Identity, Plan, Settings
from ftcost_callback.sinks.base import FanOut, Sink
from ftcost_callback.sinks.console import ConsoleSink, dollars, duration
from ftcost_callback.step_resolution import step_row

_log = logging.getLogger("ftcost_callback")

_IN_ORDER: Final[tuple[PauseKind, ...]] = ("log", "eval", "save")  # as the Trainer makes them after a step
REPORT_SECONDS: Final = 10.0  # a report at least this often, also between logging steps


class LiveRun(ProcessRun):
    """``begin``; then as :class:`ProcessRun`.

    Training that breaks off is told by ``failed`` and ``abandon``.
    """

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
        skipped = settings.skip_first_steps
        if settings.dry_run_steps is not None and order_note is None:
            skipped = max(skipped, LONGEST_STEPS)  # they are not what steps usually are
        super().__init__(
            settings, identity, plan, boundary, output_dir=output_dir, clock=clock,
            window_steps=settings.window_steps, skip_first_steps=skipped,
        )  # fmt: skip
        self._order_note = order_note
        self._profiler: ProfilerWindow | None = None
        self._gpu = GpuWatch(boundary, energy_joules=identity.earlier_energy_joules)
        self._peaks = PeakMemory()
        self._sinks = FanOut(sinks)
        self._opened: Opened | None = None
        self._report: LiveReport | None = None  # from begin on
        self._is_cuda = self._is_over_budget = False
        self._pauses_to_come: frozenset[PauseKind] = frozenset()
        self._step_ended_at = 0.0
        self._said_out_of_memory = False
        self._ran_out_with: str | None = None  # torch's message, until it is known whether a smaller batch is tried

    # --- the session begins -------------------------------------------------------------------------------------------

    def begin(self, training: Training, *, startup_seconds: float, started_at: float) -> None:
        """Attach to the model and write the first rows. ``started_at``: epoch seconds, where the bill begins."""
        call, plan = self._boundary.call, self._plan
        self.recorder.start(
            startup_seconds=startup_seconds, earlier=self.identity.earlier, furthest_step=self.identity.furthest_step
        )
        notes = list(self.identity.notes)
        self._is_cuda = training.device.type == "cuda"
        if self._settings.profile_steps is not None:
            self._profiler = ProfilerWindow(training.model, *self._settings.profile_steps, device=training.device)
            self._boundary.on_failure("profiler", self._profiler.close)
        self._steps.start(
            training.device, steps_done=training.steps_done, counts_forwards=training.forwards_are_micro_batches
        )
        if self._is_cuda:
            self._peaks = PeakMemory(training.device)
        call("peak memory", self._peaks.loading_ends)
        call("token counter", lambda: self._attach_counters(training.model, notes))
        if self._is_cuda:
            period = self._settings.sample_period_seconds
            call("GPU sampler", lambda: self._gpu.start(training.device, period_seconds=period, notes=notes))
        self._opened = opened = open_session(
            training, self._settings, self.identity, plan, self._boundary, self._peaks,
            startup_seconds=startup_seconds, started_at=started_at, notes=notes,
        )  # fmt: skip
        prediction = opened.prediction.first
        self.record.open(self._output_dir)
        self.record.write(opened.session)
        if prediction is not None:
            self.record.write(prediction)
        self.record.flush()
        self._sinks.open(opened.session, prediction)
        if not any(isinstance(each, ConsoleSink) for each in self._sinks.active):  # it shows the session's notes
            for note in opened.unwatched:
                _log.warning("ftcost: %s", note)
        parts = Parts(
            identity=self.identity, plan=plan, boundary=self._boundary, clock=self._clock, recorder=self.recorder,
            counters=self.counters, gpu=self._gpu, peaks=self._peaks, record=self.record, sinks=self._sinks,
        )  # fmt: skip
        self._report = LiveReport(parts, opened, steps_done=training.steps_done)
        self._step_ended_at = self._clock()
        atexit.register(self._interpreter_exits)
        self.pause("other")  # our own preparations
        if self.identity.earlier is not None:  # resumed with the budget spent already
            self._is_over_budget = self._report.over_budget(global_step=training.steps_done)

    @property
    def is_over_budget(self) -> bool:
        """What came before this session has spent the budget: training should stop. Known from ``begin`` on."""
        return self._is_over_budget

    def _looks_closely(self) -> bool:
        """A profiler that is left running slows down whatever comes next."""
        return not self._steps.in_step or (self._profiler is not None and self._profiler.is_profiling)

    def _attach_counters(self, model: Any, notes: list[str]) -> None:
        num_processes = self._plan.num_processes
        if self._plan.is_data_parallel:
            notes.append("tokens and expert load are not counted under torch's DataParallel; launch one process per GPU")
            return
        if num_processes > 1:
            notes.append(
                f"{num_processes} processes: tokens shown while training are those of the main process times "
                f"{self._plan.num_replicas}, expert load is the main process's; reports add up what each process counted"
            )
        self.counters.attach(model, num_processes=num_processes, expert_load=self._settings.expert_load)

    @property
    def _begun(self) -> LiveReport:
        if self._report is None:
            raise RuntimeError("LiveRun.begin was not called")
        return self._report

    # --- one step -----------------------------------------------------------------------------------------------------

    def step_begins(self, *, awaits_batch: bool = False) -> None:
        super().step_begins(awaits_batch=awaits_batch)
        if self._profiler is not None and not self._profiler.is_over:
            profiler, step = self._profiler, self._steps.last_step + 1
            self._boundary.call("profiler", lambda: profiler.step_begins(step))
            self.counters.window.is_expected = False  # whether it is left running is asked at each forward

    def step_ends(self, global_step: int, *, pauses_to_come: frozenset[PauseKind] = frozenset()) -> bool:
        """The optimizer has stepped; ``pauses_to_come`` follow it. True: training should stop (and save)."""
        log_follows = "log" in pauses_to_come
        self._pauses_to_come = pauses_to_come
        profiler = self._profiler if self._profiler is not None and self._profiler.is_profiling else None
        self._steps.ends(global_step, is_profiled=profiler is not None)
        self._batches_are_over()
        profile = self._boundary.call("profiler", lambda: profiler.step_ends(global_step)) if profiler is not None else None
        if profile is not None:
            self._keep_profile(profile)
        now = self._clock()
        step_seconds, self._step_ended_at = now - self._step_ended_at, now
        # Steps are settled some at once, which costs a fraction of doing it for each; early enough that what waits never
        # stands for more than the allowed time when the next step ends.
        is_due = now + step_seconds - self.record.flushed_at >= FLUSH_SECONDS or self._settings.wandb_every == "step"
        stop = reported = False
        if pauses_to_come or is_due:
            stop, reported = self._settle_steps(wait=bool(pauses_to_come), log_follows=log_follows)
        if pauses_to_come:
            self._boundary.call("peak memory", self._peaks.step_ends)
        self._steps.host_goes_on()
        if profile is not None:
            self.pause("other")  # reading the trace takes a while
        if reported and not log_follows:
            self.pause("log")  # our own report, which no pause of the Trainer follows
        return stop

    def _settle_steps(self, *, wait: bool, log_follows: bool) -> tuple[bool, bool]:
        """Take in the steps that have ended, report if that is due, write the rows, watch the budget.

        (Stop training, a report was made.)
        """
        report = self._begun
        rows = self._resolved_rows(wait=wait)
        report_due = (
            bool(rows)
            and self.recorder.num_measured_steps > 0
            and (log_follows or self._settings.wandb_every == "step" or self._clock() - report.made_at >= REPORT_SECONDS)
        )
        if report_due:
            last = rows[-1]
            completed = self._make_report(last, with_experts=log_follows)
            rows[-1] = completed if completed is not None else last
        self.record.write_steps(rows)
        self.record.flush()
        return report.over_budget(global_step=self._steps.last_step), report_due

    def _make_report(self, row: Step | None, *, with_experts: bool) -> Step | None:
        report = self._begun
        return self._boundary.call(
            "report",
            lambda: report.make(
                row,
                global_step=self._steps.last_step,
                with_experts=with_experts,
                pauses_to_come=self._pauses_to_come,
            ),
        )

    def _resolved_rows(self, *, wait: bool) -> list[Step]:
        report, resolved = self._begun, self._steps.resolve(wait=wait)
        report.steps_are_over([timing for _, timing in resolved])
        spent_usd = report.spent_usd
        for _, timing in resolved:
            if timing.eval_seconds:
                self.record.write_pause("eval", timing.eval_seconds, global_step=timing.global_step)
        return [
            step_row(
                step, timing, session_index=self.identity.session_index, spent_usd=spent_usd(timing.elapsed_seconds)
            )
            for step, timing in resolved
        ]  # fmt: skip

    # --- pauses -------------------------------------------------------------------------------------------------------

    def evaluation_begins(self) -> None:
        if self.in_step:
            self._boundary.call("peak memory", self._peaks.step_ends)
        super().evaluation_begins()

    def evaluation_ends(self) -> None:
        super().evaluation_ends()
        if self.in_step:
            self._boundary.call("peak memory", self._peaks.pause_ends)

    def trainer_logged(self, values: Mapping[str, Any]) -> None:
        """The Trainer has logged ``values``: for the sinks that show them against what the run has cost."""
        elapsed = self.recorder.elapsed_seconds
        self._sinks.trainer_logged(
            TrainerLog(
                global_step=self._steps.last_step,
                elapsed_seconds=elapsed,
                spent_usd=self._begun.spent_usd(elapsed),
                values=values,
            )
        )

    def wait_for_steps(self) -> None:
        """A pause begins: the steps before it are over, or are waited for."""
        if self._steps.any_pending:
            self.record.write_steps(self._resolved_rows(wait=True))
            self._boundary.call("peak memory", self._peaks.step_ends)
            self.record.flush()

    def epoch_ends(self, pauses_to_come: frozenset[PauseKind]) -> None:
        super().epoch_ends(pauses_to_come)
        is_unreported = self._steps.last_step > self._begun.last_report_step and self.recorder.num_measured_steps > 0
        if "log" in pauses_to_come and is_unreported:
            self._pauses_to_come = pauses_to_come
            self._make_report(None, with_experts=True)

    def pause(self, kind: PauseKind) -> None:
        """What passed since the last step or pause was a pause of this kind."""
        self.wait_for_steps()
        last_step = self._steps.last_step
        seconds = self.recorder.pause(kind, global_step=last_step)
        self.record.write_pause(kind, seconds, global_step=last_step)
        self._pauses_to_come -= {kind}
        self._boundary.call("peak memory", self._peaks.pause_ends)
        self._steps.host_goes_on()

    def save_ledger(self, checkpoint_dir: Path) -> None:
        """Beside the checkpoint just written."""
        self._write_ledger(checkpoint_dir, self.ledger)

    def ledger(self) -> Ledger:
        report, totals = self._begun, self.recorder.totals
        spent_usd, spent_seconds = report.spending.known(totals.wall_seconds)
        return Ledger(
            run_id=self.identity.run_id,
            session_index=self.identity.session_index,
            global_step=self._steps.last_step,
            totals=totals,
            spent_usd=spent_usd,
            spent_seconds=spent_seconds,
            energy_joules=self._gpu.energy_joules,
            crossed_thresholds=report.budget.crossed,
            pace=report.pace(),
        )

    # --- the session ends ---------------------------------------------------------------------------------------------

    def report_last_steps(self) -> None:
        """No step follows those done: the last report, where one is due."""
        self.wait_for_steps()
        self._finish_profile()
        if self._steps.last_step > self._begun.last_report_step:
            self._make_report(None, with_experts=True)

    def end(self, *, error: BaseException | None = None) -> None:
        """In order: the last report, the summary, then everything is let go. ``error``: what ended a loop."""
        self.report_last_steps()
        report, last_step = self._begun, self._steps.last_step
        self._close_recorder()
        report.over_budget(global_step=last_step, can_stop=False)
        summary = self._boundary.call("summary", lambda: report.summary(global_step=last_step, error=error))
        if summary is not None:
            self.record.write(summary)
            self.record.flush()
            self._sinks.close(summary_of_all(summary, self._plan.num_replicas))
            if self._settings.dry_run_steps is not None:
                self._boundary.call("dry run", lambda: self._say_dry_run(summary, report))
        self.release()

    def _finish_profile(self) -> None:
        """Training ended inside the profiler's window: what was seen so far counts."""
        if self._profiler is not None and self._profiler.is_profiling:
            profiler, last_step = self._profiler, self._steps.last_step
            profile = self._boundary.call("profiler", lambda: profiler.finish(last_step))
            if profile is not None:
                self._keep_profile(profile)

    def _keep_profile(self, profile: Profile) -> None:
        self.record.write(profile)
        self._begun.profile = profile

    def _close_recorder(self) -> None:
        seconds = self.recorder.close()
        self.record.write_what_waits(global_step=self._steps.last_step)
        self.record.write(Pause(kind="other", global_step=self._steps.last_step, seconds=seconds))

    def _say_dry_run(self, summary: Summary, report: LiveReport) -> None:
        latest = self._opened.prediction.latest if self._opened is not None else None
        memory = (latest.estimate.get("memory") or {}) if latest is not None else {}
        lines = dry_run_lines(
            summary,
            report.projection,
            max_steps=self._plan.max_steps,
            order_note=self._order_note,
            predicted_peak_bytes=memory.get("peak_allocated_bytes"),
            is_cuda=self._is_cuda,
        )
        say(lines)

    def plan_changes(self, max_steps: int) -> None:
        super().plan_changes(max_steps)
        self._begun.plan_changes(self._plan)

    def epoch_failed(self, error: BaseException) -> None:
        if self._may_be_retried and is_out_of_memory(error):
            self._ran_out_with = str(error)  # not the error, whose frames hold the memory that the next try needs
        else:
            self.failed(error)

    def _breaks_off(self, error: BaseException) -> None:
        if self._epochs and not (self._may_be_retried and is_out_of_memory(error)):  # a run that has ended holds none
            self._boundary.call("steps of a broken run", lambda: self._bill(error))
            self._boundary.call("closing line", lambda: self._say_what_it_cost(error))

    def _bill(self, error: BaseException) -> None:
        """What was done when ``error`` came. A device in a fault may not say when its last steps ended."""
        unfinished = [kind for kind in _IN_ORDER if kind in self._pauses_to_come] or ["other"]
        self.pause("other" if self.in_step else left_aside(error) or unfinished[0])
        self.record.write_what_waits(global_step=self._steps.last_step)
        self.record.flush()

    def _say_what_it_cost(self, error: BaseException) -> None:
        """No summary follows. A warning, since it may be the last that is heard of the run. The record says as much."""
        elapsed = self.recorder.elapsed_seconds
        spent = self._begun.spent_usd(elapsed)
        bill = f"{dollars(spent)}, " if spent is not None else ""
        what, step = type(error).__name__, self._steps.last_step
        _log.warning("ftcost: training ended with %s after step %d: %s%s", what, step, bill, duration(elapsed))

    def failed(self, error: BaseException | None, *, retried_with: int | None = None) -> None:
        """Training broke off with ``error``. When memory ran out, the record says why; the error itself goes on."""
        if self._profiler is not None:
            self._boundary.call("profiler", self._profiler.close)  # who catches the error goes on without it
        message = str(error) if is_out_of_memory(error) else self._ran_out_with
        if self._said_out_of_memory or (message is None and retried_with is None):
            return
        self._said_out_of_memory = True
        during = left_aside(error)

        def explain() -> None:
            failure = Failure(
                global_step=self._steps.last_step + 1,
                message=message or "",
                batch_shape=self.counters.batch_shape,
                job=self._opened.job if self._opened is not None else None,
                retried_with=retried_with,
                during=during,
            )
            row = explained(failure)
            self.record.write(row)
            self.record.flush()
            _log.warning("ftcost: %s", row.verdict)

        self._boundary.call("out of memory", explain)

    def left(self) -> None:
        """Training was left without a word: nothing of ours stays in the process but the record, for :meth:`abandon`."""
        if self._profiler is not None:
            self._boundary.call("profiler", self._profiler.close)
        self._let_go_of_epochs()
        self._boundary.call("token counter", self.counters.detach)
        self._boundary.call("GPU sampler", self._gpu.close)
        self._boundary.call("end of training", self._write_what_is_known)

    def _write_what_is_known(self) -> None:
        self.record.write_steps(self._resolved_rows(wait=False))
        self.record.write_what_waits(global_step=self._steps.last_step)
        self.record.flush()

    def abandon(self, *, retried_with: int | None = None) -> Identity:
        """Training was broken off without an end; the identity of a session that goes on with the same run.

        ``retried_with``: the batch that ``auto_find_batch_size`` tries next, since this one did not fit.
        """
        report = self._begun
        self.failed(None, retried_with=retried_with)
        self.wait_for_steps()
        self._close_recorder()
        self.release()
        totals = self.recorder.totals
        spent_usd, spent_seconds = report.spending.known(totals.wall_seconds)
        return Identity(
            run_id=self.identity.run_id,
            session_index=self.identity.session_index + 1,
            earlier=totals,
            earlier_spent_usd=spent_usd,
            earlier_spent_seconds=spent_seconds,
            earlier_energy_joules=self._gpu.energy_joules,
            furthest_step=max(self.identity.furthest_step, self._steps.last_step),
            crossed_thresholds=report.budget.crossed,
            earlier_pace=report.pace() if retried_with is None else None,  # another batch has another pace
        )

    def _interpreter_exits(self) -> None:
        """Training never ended in order: look at what ended the program, which was told to no callback."""

        if self._profiler is not None:
            self._boundary.call("profiler", self._profiler.close)

        def write() -> None:
            self.record.write_steps(self._resolved_rows(wait=False))
            self.record.write_what_waits(global_step=self._steps.last_step)
            self.failed(getattr(sys, "last_value", None))
            self.record.flush()

        self._boundary.call("end of the program", write)

    def _releases(self) -> list[Callable[[], None]]:
        stop_profiler = [self._profiler.close] if self._profiler is not None else []
        return [*super()._releases(), self._gpu.close, *stop_profiler]
