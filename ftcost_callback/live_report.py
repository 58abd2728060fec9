"""The reports of one session: takes stock of every part, holds it against the prediction, tells the sinks."""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ftcost_callback.boundary import Boundary
from ftcost_callback.budget import BudgetWatch
from ftcost_callback.comparison import Comparison, Measured, compare
from ftcost_callback.expert_balance import BalanceHistory, imbalance_usd
from ftcost_callback.forward_counters import ForwardCounters
from ftcost_callback.gpu_watch import GpuWatch
from ftcost_callback.host_load import ProcessorWait
from ftcost_callback.peak_memory import PeakMemory
from ftcost_callback.projection import Projection, ProjectionInput, project
from ftcost_callback.record_writer import RecordWriter
from ftcost_callback.recorder import Pace, StepAggregate, StepRecorder, StepTiming
from ftcost_callback.records import ExpertLoad, PauseKind, Profile, Step, Summary
from ftcost_callback.reporting import Standing, completed_row, measured_of, mfu_and_hfu, summary_of, window_of
from ftcost_callback.session_opening import Opened
from ftcost_callback.session_plan import Identity, Plan
from ftcost_callback.sinks.base import FanOut
from ftcost_callback.sinks.console import budget_line
from ftcost_callback.spending import Spending

_log = logging.getLogger("ftcost_callback")

MIN_STEPS_FOR_PACE: Final = 5
_SCHEDULED_PAUSES: Final[tuple[PauseKind, ...]] = ("eval", "save", "log")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a session measures with."""

    identity: Identity
    plan: Plan
    boundary: Boundary
    clock: Callable[[], float]
    recorder: StepRecorder
    counters: ForwardCounters
    gpu: GpuWatch
    peaks: PeakMemory
    record: RecordWriter
    sinks: FanOut


class LiveReport:
    """``make`` at logging steps, ``over_budget`` after each settling, ``summary`` at the end."""

    def __init__(self, parts: Parts, opened: Opened, *, steps_done: int) -> None:
        self._parts = parts
        self._opened = opened
        self._last_step = steps_done
        self._processor_wait = parts.boundary.call("processor wait", ProcessorWait)
        self._waited: float | None = None  # share of the time, as of the last report
        self._comparison = Comparison()
        self._balance = BalanceHistory(self._imbalance_seconds)
        self._experts_taken_at = steps_done
        self._layer_names: list[str] = []
        self._stopped_at_budget = False
        self._said_mfu_above_1 = False
        self.profile: Profile | None = None  # of the steps under the profiler, once there is one
        self.projection = Projection()
        self.made_at = parts.clock()
        self.last_report_step = steps_done

    @property
    def budget(self) -> BudgetWatch:
        return self._opened.budget

    @property
    def spending(self) -> Spending:
        return self._opened.spending

    def spent_usd(self, elapsed_seconds: float) -> float | None:
        return self._opened.spending.usd(elapsed_seconds)

    def plan_changes(self, plan: Plan) -> None:
        self._parts = dataclasses.replace(self._parts, plan=plan)

    def steps_are_over(self, steps: Sequence[StepTiming]) -> None:
        planned = self._opened.planned_tokens
        if planned is not None:
            for step in (each for each in steps if not each.tokens.shows_nothing):
                planned.seen(step.global_step, step.tokens.num_tokens)

    def make(
        self, row: Step | None, *, global_step: int, with_experts: bool, pauses_to_come: frozenset[PauseKind] = frozenset()
    ) -> Step | None:
        """Take stock, tell the sinks, and complete the last step's row with what is known only now."""
        parts, call = self._parts, self._parts.boundary.call
        self._last_step = global_step
        extra: dict[str, Any] = {"trainer_logs_next": not pauses_to_come.isdisjoint(("log", "eval"))}
        if with_experts:
            call("expert load", lambda: self._take_experts(extra))
        call("GPU sampler", parts.gpu.take_window)
        call("peak memory", parts.peaks.step_ends)
        self._look_at_processor_wait()
        if self._opened.prediction.second_is_due(parts.recorder.num_measured_steps):
            call("prediction", self._predict_again)
        compared = call("comparison", self._compare)
        self._comparison = compared if compared is not None else Comparison()
        projected = call("projection", lambda: project(self._known(pauses_to_come)))
        self.projection = projected if projected is not None else Projection()
        self.made_at, self.last_report_step = parts.clock(), global_step
        standing = self._standing(parts.recorder.take_report())
        parts.sinks.log(window_of(standing), extra)
        return completed_row(row, standing) if row is not None else None

    def _look_at_processor_wait(self) -> None:
        wait = self._processor_wait
        self._waited = self._parts.boundary.call("processor wait", wait.fraction) if wait is not None else None

    def _take_experts(self, extra: dict[str, Any]) -> None:
        load = self._parts.counters.take_experts(self._last_step)
        num_steps, self._experts_taken_at = self._last_step - self._experts_taken_at, self._last_step
        self._balance.no_window()
        if load is None:
            return
        if load.status != "not_recorded":
            extra["expert_load"] = load = self._with_meaning(load, num_steps)
        self._parts.record.write_experts(load)

    def _with_meaning(self, load: ExpertLoad, num_steps: int) -> ExpertLoad:
        """The row with how even the load is, how that has changed, and what it costs."""
        balance = self._balance.add(load.tokens_per_expert, num_steps=num_steps)
        if balance is None:
            return load
        self._layer_names = load.layer_names
        return dataclasses.replace(
            load,
            load_max_over_mean=balance.load_max_over_mean,
            worst_layer=load.layer_names[balance.worst_layer],
            worst_layer_load_max_over_mean=balance.worst_layer_load_max_over_mean,
            num_dead_experts=balance.num_dead_experts,
            load_max_over_mean_vs_first_steps=self._balance.vs_first_steps,
            imbalance_step_seconds=self._balance.standing.imbalance_step_seconds,
        )

    def _imbalance_seconds(self, load: Sequence[Sequence[int]]) -> float | None:
        prediction, steps = self._opened.prediction, self._parts.recorder.session
        return self._parts.boundary.call("cost of imbalance", lambda: prediction.imbalance_seconds(load, steps))

    def _predict_again(self) -> None:
        recorder = self._parts.recorder
        prediction = self._opened.prediction.predict_again(
            self._last_step, recorder.session, startup_seconds=recorder.totals.startup_seconds
        )
        if prediction is not None:
            self._parts.record.write(prediction)
            self._parts.sinks.prediction(prediction)

    def _standing(self, steps: StepAggregate) -> Standing:
        parts, opened = self._parts, self._opened
        flops, peak = opened.flops, opened.peak_flops_per_second
        per_second = parts.boundary.call("FLOPs", lambda: flops.per_second(steps)) if flops is not None else None
        mfu, hfu = mfu_and_hfu(per_second, peak)
        if mfu is not None and mfu > 1 and not self._said_mfu_above_1:
            self._said_mfu_above_1 = True
            _log.warning(
                "ftcost: MFU is %.2f, which cannot be: the device is faster than the peak taken for it; "
                "give the right one as peak_flops_per_second=",
                mfu,
            )
        elapsed = parts.recorder.elapsed_seconds
        first = opened.prediction.first
        return Standing(
            global_step=self._last_step,
            max_steps=parts.plan.max_steps,
            steps=steps,
            totals=parts.recorder.totals,
            num_replicas=parts.plan.num_replicas,
            elapsed_seconds=elapsed,
            spent_usd=self.spent_usd(elapsed),
            predicted_usd=first.estimate.get("total_usd") if first is not None else None,
            projection=self.projection,
            comparison=self._comparison,
            gpu=parts.gpu.window,
            experts=self._balance.standing,
            imbalance_usd=imbalance_usd(self._balance.imbalance_seconds, opened.spending.usd_per_hour),
            peak_allocated_bytes=parts.peaks.allocated_bytes,
            peak_reserved_bytes=parts.peaks.reserved_bytes,
            loading_peak_allocated_bytes=parts.peaks.loading_allocated_bytes,
            loading_peak_reserved_bytes=parts.peaks.loading_reserved_bytes,
            mfu=mfu,
            hfu=hfu,
        )

    def _compare(self) -> Comparison:
        return self._compared(self._measured(self._standing(self._parts.recorder.session)))

    def _compared(self, measured: Measured) -> Comparison:
        latest = self._opened.prediction.latest
        return compare(latest.estimate if latest is not None else None, measured)

    def _measured(self, standing: Standing) -> Measured:
        return measured_of(
            standing,
            throttle_reasons=self._parts.gpu.throttle_reasons,
            dataloader_num_workers=self._parts.plan.dataloader_num_workers,
            processor_wait_fraction=self._waited,
            median_step_seconds=self._median_step_seconds(standing.steps),
            predicted_gpu=self._opened.predicted_gpu,
            profiled_group_seconds=self.profile.by_group_seconds if self.profile is not None else None,
        )

    def _median_step_seconds(self, steps: StepAggregate) -> float | None:
        """Of the last steps of this session and the one before it, brought to the mean step's tokens."""
        recorder, earlier = self._parts.recorder, self._earlier_pace()
        if recorder.totals.rollout_seconds:
            return None  # the steps kept hold the rollouts, which a prediction does not
        seconds, tokens = recorder.recent_step_seconds, recorder.recent_num_tokens
        if earlier is not None:
            tokens = earlier.num_tokens + tokens if len(earlier.num_tokens) == len(earlier.step_seconds) else ()
            seconds = earlier.step_seconds + seconds
        if not seconds:
            return None
        median, mean_tokens = statistics.median(seconds), steps.per_step(steps.num_tokens)
        if len(tokens) == len(seconds) and mean_tokens and (median_tokens := statistics.median(tokens)):
            median *= mean_tokens / median_tokens
        return median

    def _known(self, pauses_to_come: frozenset[PauseKind]) -> ProjectionInput:
        recorder, plan, prediction = self._parts.recorder, self._parts.plan, self._opened.prediction
        # Another device's prediction says nothing about the time to come.
        known = prediction.first is not None and self._opened.predicted_gpu is None
        before = prediction.first.estimate if prediction.first is not None and known else {}
        elapsed = recorder.elapsed_seconds
        earlier = self._earlier_pace()
        pause_seconds = self._pause_seconds(earlier)
        planned = self._opened.planned_tokens
        to_come = planned.mean_to_come(self._last_step, plan.max_steps) if planned is not None and plan.max_steps else None
        expected = prediction.expected_tokens_per_step  # of all processes; what is measured is the main one's
        return ProjectionInput(
            steps_done=self._last_step,
            max_steps=plan.max_steps,
            elapsed_seconds=elapsed,
            moments=recorder.moments,
            recent_step_seconds=recorder.recent_step_seconds,
            recent_num_tokens=recorder.recent_num_tokens,
            window_means=recorder.windows.means,
            earlier_step_seconds=earlier.step_seconds if earlier is not None else (),
            earlier_num_tokens=earlier.num_tokens if earlier is not None else (),
            expected_tokens_per_step=expected / plan.num_replicas if expected is not None else None,
            tokens_per_step_to_come=to_come[0] if to_come is not None else None,
            tokens_to_come_spread=to_come[1] if to_come is not None else 0.0,
            pauses=tuple(
                plan.pause_plan(
                    kind,
                    steps_done=self._last_step,
                    is_pending=kind in pauses_to_come,
                    measured_seconds=pause_seconds.get(kind, ()),
                    predicted_total_seconds=before.get(f"{kind}_seconds"),
                )
                for kind in _SCHEDULED_PAUSES
            ),
            spent_usd=self.spent_usd(elapsed),
            usd_per_hour=self._opened.spending.usd_per_hour,
            predicted_total_seconds=before.get("total_seconds"),
            predicted_total_seconds_low=before.get("total_seconds_low"),
            predicted_total_seconds_high=before.get("total_seconds_high"),
            predicted_startup_seconds=before.get("startup_seconds"),
            predicted_step_seconds=before.get("step_seconds"),
            processor_wait_fraction=self._felt_processor_wait(),
        )

    def _felt_processor_wait(self) -> float | None:
        """Share of the time that steps may have been longer for it: while a GPU is busy, a waiting host holds up nothing."""
        waited = self._waited
        busy = self._parts.gpu.window.busy_fraction
        return waited * (1 - busy) if waited is not None and busy is not None else waited

    def _earlier_pace(self) -> Pace | None:
        """Of the session before, if it ran on a machine like this one."""
        pace = self._parts.identity.earlier_pace
        return pace if pace is not None and pace.machine == self._opened.machine else None

    def _pause_seconds(self, earlier: Pace | None) -> dict[PauseKind, tuple[float, ...]]:
        """Of this session; of the one before where this one had none of a kind yet."""
        return {**(earlier.pause_seconds if earlier is not None else {}), **self._parts.recorder.pause_seconds}

    def pace(self) -> Pace | None:
        """Of this session, or of the one before while this one has measured next to nothing."""
        machine, recorder = self._opened.machine, self._parts.recorder
        if machine is None:
            return None
        steps, num_sessions = self._steps_of_all_sessions()
        seconds, tokens, earlier = (
            recorder.recent_step_seconds,
            recorder.recent_num_tokens,
            self._parts.identity.earlier_pace,
        )
        if len(seconds) >= MIN_STEPS_FOR_PACE or earlier is None:
            if len(seconds) < MIN_STEPS_FOR_PACE:
                seconds, tokens = (), ()
            pauses = self._pause_seconds(self._earlier_pace())
            return Pace(
                machine=machine, step_seconds=seconds, num_tokens=tokens, pause_seconds=pauses, steps=steps,
                num_sessions=num_sessions,
            )  # fmt: skip
        if earlier.machine != machine:  # no longer the latest sessions on that machine
            return dataclasses.replace(earlier, steps=StepAggregate(), num_sessions=0)
        return dataclasses.replace(
            earlier, steps=steps, num_sessions=num_sessions, pause_seconds=self._pause_seconds(earlier)
        )

    def _steps_of_all_sessions(self) -> tuple[StepAggregate, int]:
        """The measured steps of this session and of those right before it on the same machine; how many sessions that is."""
        earlier, session = self._earlier_pace(), self._parts.recorder.session
        return (earlier.steps.plus(session), earlier.num_sessions + 1) if earlier is not None else (session, 1)

    def over_budget(self, *, global_step: int, can_stop: bool = True) -> bool:
        """Say which limits were crossed. True: training should stop. ``can_stop=False``: it has ended already."""
        budget, parts = self._opened.budget, self._parts
        if not budget.is_limited:
            return False
        elapsed, projection = parts.recorder.elapsed_seconds, self.projection if can_stop else Projection()
        crossed = parts.boundary.call(
            "budget",
            lambda: budget.check(
                global_step=global_step,
                elapsed_seconds=elapsed,
                spent_usd=self.spent_usd(elapsed),
                projected_seconds=projection.projected_total_seconds,
                projected_seconds_low=projection.projected_total_seconds_low,
                projected_usd=projection.projected_usd,
                projected_usd_low=projection.projected_usd_low,
                num_measured_steps=parts.recorder.num_measured_steps,
            ),
        )
        for row in crossed or ():
            if not can_stop:
                row = dataclasses.replace(row, action="warned")
            parts.record.write(row)
            parts.sinks.alert(row)
            if not parts.sinks.active:
                _log.warning("ftcost: %s", budget_line(row))
            self._stopped_at_budget = self._stopped_at_budget or row.action == "stopped"
        return self._stopped_at_budget

    def summary(self, *, global_step: int, error: BaseException | None = None) -> Summary:
        parts = self._parts
        self._last_step = global_step
        self._look_at_processor_wait()
        steps, num_sessions_in_rates = self._steps_of_all_sessions()
        standing = self._standing(steps)
        measured = self._measured(standing)
        compared = parts.boundary.call("comparison", lambda: self._compared(measured))
        if compared is not None:
            standing = dataclasses.replace(standing, comparison=compared)
        return summary_of(
            standing,
            num_sessions=parts.identity.session_index + 1,
            num_sessions_in_rates=num_sessions_in_rates,
            first_step_seconds=parts.recorder.first_step_seconds,
            energy_joules=parts.gpu.energy_joules,
            predictions=self._opened.prediction.different,
            measured=measured,
            stopped_at_budget=self._stopped_at_budget,
            is_one_rate=self._opened.spending.is_one_rate,
            error=error,
            expert_balance=self._balance.summary(self._layer_names, usd_per_hour=self._opened.spending.usd_per_hour),
        )
