"""What is reported, from what is known: pure functions from records to records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from costmodel.described_job import TokensSeen
from ftcost_callback.comparison import Comparison, Measured, compare
from ftcost_callback.expert_balance import BalanceStanding
from ftcost_callback.projection import Projection
from ftcost_callback.recorder import BUCKETS, StepAggregate, Totals
from ftcost_callback.records import GpuSample, Prediction, Step, Summary, Window

_MILLION: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Everything that is known at one moment of a run. ``None``: not measured."""

    global_step: int
    max_steps: int | None
    steps: StepAggregate  # what the report is about: those since the last one, or the session's
    totals: Totals
    elapsed_seconds: float
    num_replicas: int = 1  # processes with a batch of their own; ``steps`` and ``totals`` hold the main one's tokens
    spent_usd: float | None = None
    predicted_usd: float | None = None
    projection: Projection = field(default_factory=Projection)
    comparison: Comparison = field(default_factory=Comparison)
    gpu: GpuSample = field(default_factory=GpuSample)
    experts: BalanceStanding = field(default_factory=BalanceStanding)
    imbalance_usd: float | None = None  # so far, over this session
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    loading_peak_allocated_bytes: int | None = None
    loading_peak_reserved_bytes: int | None = None
    mfu: float | None = None
    hfu: float | None = None


def mfu_and_hfu(
    flops_per_second: tuple[float, float] | None, peak_flops_per_second: float | None
) -> tuple[float | None, float | None]:
    """(model, hardware) FLOPs a second over one device's peak; ``None`` where either is unknown."""
    if flops_per_second is None or not peak_flops_per_second:
        return None, None
    model, hardware = flops_per_second
    return model / peak_flops_per_second, hardware / peak_flops_per_second


def measured_of(
    standing: Standing,
    *,
    throttle_reasons: int | None = None,
    dataloader_num_workers: int | None = None,
    processor_wait_fraction: float | None = None,
    median_step_seconds: float | None = None,
    predicted_gpu: str | None = None,
    profiled_group_seconds: Mapping[str, float] | None = None,
) -> Measured:
    """What :func:`compare` holds against an estimate."""
    steps, replicas = standing.steps, standing.num_replicas
    return Measured(
        num_steps=steps.num_steps,
        step_seconds=steps.step_seconds,
        data_wait_seconds=steps.data_wait_seconds,
        num_tokens_per_step=_times(replicas, steps.per_step(steps.num_tokens)),
        num_non_padding_tokens_per_step=_times(replicas, steps.per_step(steps.num_non_padding_tokens)),
        tokens_per_second=_times(replicas, steps.per_second(steps.num_tokens)),
        non_padding_tokens_per_second=_times(replicas, steps.per_second(steps.num_non_padding_tokens)),
        peak_allocated_bytes=standing.peak_allocated_bytes,
        peak_reserved_bytes=standing.peak_reserved_bytes,
        load_max_over_mean=standing.experts.window.load_max_over_mean if standing.experts.window is not None else None,
        imbalance_step_seconds=standing.experts.imbalance_step_seconds,
        throttle_reasons=throttle_reasons,
        busy_fraction=standing.gpu.busy_fraction,
        processor_wait_fraction=processor_wait_fraction,
        mfu=standing.mfu,
        dataloader_num_workers=dataloader_num_workers,
        median_step_seconds=median_step_seconds,
        predicted_gpu=predicted_gpu,
        profiled_group_seconds=profiled_group_seconds,
    )


def _times(replicas: int, value: float | None) -> float | None:
    return value * replicas if value is not None else None


def summary_of_all(summary: Summary, num_replicas: int) -> Summary:
    """With the tokens of all processes, taken to be as many on each as on the main one: what is shown as training ends.

    The record keeps what the main process counted; readers add what the others did.
    """
    if num_replicas == 1:
        return summary
    names = (*_TOKENS, "tokens_per_second", "non_padding_tokens_per_second")
    scaled: dict[str, Any] = {name: _times(num_replicas, getattr(summary, name)) for name in names}
    return dataclasses.replace(summary, **scaled)


def tokens_seen(steps: StepAggregate) -> TokensSeen | None:
    """The mean micro-batch of the measured steps, for a second prediction; ``None`` when its tokens were not shown."""
    real, computed, samples = steps.num_non_padding_tokens, steps.num_tokens, steps.num_samples
    squares, longest = steps.sum_squared_sequence_tokens, steps.longest_sequence_tokens
    batches = steps.num_micro_batches
    if not (batches and real and computed and samples and squares) or longest is None:
        return None
    supervised = steps.num_supervised_tokens
    return TokensSeen(
        num_sequences=samples / batches,
        num_tokens=computed / batches,
        num_non_padding_tokens=real / batches,
        sum_squared_sequence_tokens=squares / batches,
        longest_tokens=longest,
        num_supervised_tokens=supervised / batches if supervised is not None else None,
    )


_GPU: Final = ("busy_fraction", "sm_active_fraction", "memory_used_bytes", "power_watts")
_PEAKS: Final = ("peak_allocated_bytes", "peak_reserved_bytes")
_LOADING_PEAKS: Final = ("loading_peak_allocated_bytes", "loading_peak_reserved_bytes")
_TOKENS: Final = ("num_tokens", "num_non_padding_tokens", "num_supervised_tokens")
_COUNTED: Final = ("data_wait_seconds", "wasted_seconds", "num_steps", *_TOKENS)
_BALANCE: Final = (
    "load_max_over_mean",
    "load_cv",
    "dead_expert_fraction",
    "num_dead_experts",
    "load_entropy",
    "worst_layer_load_max_over_mean",
)


def _same(source: Any, names: Sequence[str]) -> dict[str, Any]:
    """Figures that have one name on both sides; all ``None`` without a source."""
    return {name: getattr(source, name) if source is not None else None for name in names}


def _phase_seconds(steps: StepAggregate, ending: str = "") -> dict[str, Any]:
    """Means of a step."""
    phases = _same(steps.phases, ("forward", "backward", "optimizer"))
    return {f"{phase}_seconds{ending}": seconds for phase, seconds in phases.items()}


def _projected(projection: Projection) -> dict[str, Any]:
    """By the names of rows."""
    seconds = ("projected_total_seconds", "projected_total_seconds_low", "projected_total_seconds_high")
    return {
        **_same(projection, seconds),
        "projected_total_usd": projection.projected_usd,
        "projected_total_usd_low": projection.projected_usd_low,
        "projected_total_usd_high": projection.projected_usd_high,
    }


def window_of(standing: Standing) -> Window:
    """What sinks are given."""
    steps, totals, projection = standing.steps, standing.totals, standing.projection
    ratios = standing.comparison.ratios
    replicas = standing.num_replicas
    per_million: float | None = None
    if standing.spent_usd is not None and totals.num_supervised_tokens:
        per_million = standing.spent_usd / (totals.num_supervised_tokens * replicas) * _MILLION
    return Window(
        global_step=standing.global_step,
        max_steps=standing.max_steps,
        num_steps=steps.num_steps,
        step_seconds=steps.step_seconds,
        tokens_per_second=_times(replicas, steps.per_second(steps.num_tokens)),
        non_padding_tokens_per_second=_times(replicas, steps.per_second(steps.num_non_padding_tokens)),
        supervised_tokens_per_second=_times(replicas, steps.per_second(steps.num_supervised_tokens)),
        samples_per_second=_times(replicas, steps.per_second(steps.num_samples)),
        data_wait_fraction=steps.data_wait_fraction,
        mfu=standing.mfu,
        hfu=standing.hfu,
        step_seconds_measured_over_predicted=ratios.get("step_seconds"),
        spent_usd=standing.spent_usd,
        **_same(projection, ("projected_usd", "projected_usd_low", "projected_usd_high")),
        predicted_usd=standing.predicted_usd,
        usd_per_million_supervised_tokens=per_million,
        elapsed_seconds=standing.elapsed_seconds,
        remaining_seconds=projection.remaining_seconds,
        projected_total_seconds=projection.projected_total_seconds,
        **_same(totals, ("eval_seconds", "save_seconds", "other_seconds")),
        rollout_seconds=totals.rollout_seconds or None,
        **_same(standing.gpu, _GPU),
        peak_allocated_bytes=standing.peak_allocated_bytes,
        peak_memory_measured_over_predicted=ratios.get("peak_allocated_bytes"),
        **_same(standing.experts.window, _BALANCE),
        load_max_over_mean_vs_first_steps=standing.experts.vs_first_steps,
        imbalance_step_seconds=standing.experts.imbalance_step_seconds,
        imbalance_usd=standing.imbalance_usd,
        **_phase_seconds(steps),
        verdict=standing.comparison.verdict,
    )


def completed_row(row: Step, standing: Standing) -> Step:
    """The row of the step that a report follows, with what is known only at a report."""
    return dataclasses.replace(
        row,
        **_same(standing.gpu, (*_GPU, "energy_joules", "throttle_reasons")),
        **_same(standing, (*_PEAKS, "mfu", "hfu")),
        **_projected(standing.projection),
    )


def summary_of(
    standing: Standing,
    *,
    num_sessions: int,
    num_sessions_in_rates: int,
    first_step_seconds: float | None,
    energy_joules: float | None,
    predictions: Sequence[Prediction],
    measured: Measured,
    stopped_at_budget: bool,
    is_one_rate: bool = True,
    error: BaseException | None = None,
    expert_balance: dict[str, Any] | None = None,
) -> Summary:
    """The last row of a session: totals over the run; rates over ``standing.steps``, those of ``num_sessions_in_rates``.

    ``is_one_rate``: whether the run's dollars were all paid at the price of the predictions. ``error``: what ended a loop.
    """
    totals, steps = standing.totals, standing.steps
    finished = standing.max_steps is not None and standing.global_step >= standing.max_steps
    status: Literal["finished", "failed", "stopped_at_budget", "stopped"] = "stopped"
    if finished:
        status = "finished"
    elif isinstance(error, Exception):  # the others are a keyboard's, or a call to end
        status = "failed"
    elif stopped_at_budget:
        status = "stopped_at_budget"
    return Summary(
        global_step=standing.global_step,
        num_sessions=num_sessions,
        wall_seconds=totals.wall_seconds,
        **_same(totals, BUCKETS) | {"rollout_seconds": totals.rollout_seconds or None},
        **_same(totals, _COUNTED),
        num_uncounted_steps=totals.num_uncounted_steps if 0 < totals.num_uncounted_steps < totals.num_steps else None,
        spent_usd=standing.spent_usd,
        num_sessions_in_rates=num_sessions_in_rates,
        step_seconds_mean=steps.step_seconds,
        first_step_seconds=first_step_seconds,
        tokens_per_second=steps.per_second(steps.num_tokens),
        non_padding_tokens_per_second=steps.per_second(steps.num_non_padding_tokens),
        **_phase_seconds(steps, "_mean"),
        mfu=standing.mfu,
        expert_balance=expert_balance,
        **_same(standing, (*_PEAKS, *_LOADING_PEAKS)),
        energy_joules=energy_joules,
        **_projected(standing.projection if not finished else Projection()),
        measured_over_predicted={
            each.basis: _ratios(
                each.estimate,
                standing,
                measured,
                with_totals=finished and measured.predicted_gpu is None,
                is_one_rate=is_one_rate,
            )
            for each in predictions
        }
        or None,
        verdict=standing.comparison.verdict,
        status=status,
        error=type(error).__name__ if error is not None else None,
    )


def _ratios(
    estimate: Mapping[str, Any], standing: Standing, measured: Measured, *, with_totals: bool, is_one_rate: bool
) -> dict[str, float]:
    ratios = dict(compare(estimate, measured).ratios)
    if with_totals:
        spent_usd = standing.spent_usd if is_one_rate else None  # predicted dollars are all at the last price
        for name, value in (("total_seconds", standing.totals.wall_seconds), ("total_usd", spent_usd)):
            predicted = estimate.get(name)
            if value is not None and predicted:
                ratios[name] = value / predicted
    return ratios
