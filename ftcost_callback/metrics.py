"""What each reported figure is called in trackers: one table of field, key, unit and meaning.

Keys are a contract: dashboards are built on them. Added, never renamed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from costmodel.errors import CostModelError
from costmodel.units import GIB
from ftcost_callback.records import Window

PREFIX: Final = "ftcost/"
STEP_KEY: Final = "train/global_step"
"""The x axis of every row: what transformers' own reporters use."""

Detail = Literal["default", "full"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a :class:`Window` in a tracker. The tracker's value is the field's divided by ``divisor``."""

    field: str
    key: str
    unit: str
    meaning: str
    default: bool = False  # shown with detail="default"; the others only with "full"
    divisor: float = 1.0


METRICS: Final[tuple[Metric, ...]] = (
    Metric("spent_usd", "ftcost/cost/spent_usd", "USD", "billed so far, over all sessions of the run", default=True),
    Metric("projected_usd", "ftcost/cost/projected_usd", "USD", "expected bill at the end of the run", default=True),
    Metric("projected_usd_low", "ftcost/cost/projected_usd_low", "USD", "lower end of its 80 % band", default=True),
    Metric("projected_usd_high", "ftcost/cost/projected_usd_high", "USD", "upper end of its 80 % band", default=True),
    Metric("predicted_usd", "ftcost/cost/predicted_usd", "USD", "what the estimate said before the first step"),
    Metric(
        "usd_per_million_supervised_tokens",
        "ftcost/cost/usd_per_million_supervised_tokens",
        "USD",
        "bill so far per million tokens that entered the loss",
    ),
    Metric(
        "remaining_seconds",
        "ftcost/time/remaining_seconds",
        "s",
        "to the end of the run, scheduled pauses inside",
        default=True,
    ),
    Metric("elapsed_seconds", "ftcost/time/elapsed_seconds", "s", "wall time so far, over all sessions of the run"),
    Metric("projected_total_seconds", "ftcost/time/projected_total_seconds", "s", "expected wall time of the run"),
    Metric("eval_seconds", "ftcost/time/eval_seconds", "s", "spent evaluating so far"),
    Metric("save_seconds", "ftcost/time/save_seconds", "s", "spent writing checkpoints so far"),
    Metric("other_seconds", "ftcost/time/other_seconds", "s", "neither training, evaluating, saving nor logging"),
    Metric("rollout_seconds", "ftcost/time/rollout_seconds", "s", "spent generating and scoring what is trained on (GRPO)"),
    Metric(
        "step_seconds",
        "ftcost/speed/step_seconds",
        "s",
        "one optimizer step, waiting for data inside, pauses outside",
        default=True,
    ),
    Metric(
        "non_padding_tokens_per_second",
        "ftcost/speed/non_padding_tokens_per_second",
        "1/s",
        "real tokens trained on, all GPUs (the main process's times their number), pauses left out",
        default=True,
    ),
    Metric(
        "mfu",
        "ftcost/speed/mfu",
        "fraction",
        "model FLOPs over the GPU's dense peak (frozen weights and recompute not counted)",
        default=True,
    ),
    Metric(
        "data_wait_fraction",
        "ftcost/speed/data_wait_fraction",
        "fraction",
        "share of the step spent waiting for the next batch",
        default=True,
    ),
    Metric(
        "step_seconds_measured_over_predicted",
        "ftcost/speed/step_seconds_measured_over_predicted",
        "ratio",
        "1.00 = on plan, above = slower",
        default=True,
    ),
    Metric("forward_seconds", "ftcost/speed/forward_seconds", "s", "the forwards of one optimizer step"),
    Metric(
        "backward_seconds",
        "ftcost/speed/backward_seconds",
        "s",
        "its backwards, recomputation and gradient clipping inside",
    ),
    Metric("optimizer_seconds", "ftcost/speed/optimizer_seconds", "s", "the optimizer's own part of a step"),
    Metric("tokens_per_second", "ftcost/speed/tokens_per_second", "1/s", "computed tokens, padding inside"),
    Metric("supervised_tokens_per_second", "ftcost/speed/supervised_tokens_per_second", "1/s", "tokens that enter the loss"),
    Metric("samples_per_second", "ftcost/speed/samples_per_second", "1/s", "sequences trained on"),
    Metric("hfu", "ftcost/speed/hfu", "fraction", "as mfu, with the FLOPs of recomputation"),
    Metric(
        "busy_fraction",
        "ftcost/gpu/busy_fraction",
        "fraction",
        "share of time some kernel ran (NVML utilization.gpu): says nothing about how well",
        default=True,
    ),
    Metric("sm_active_fraction", "ftcost/gpu/sm_active_fraction", "fraction", "share of the GPU's cores at work"),
    Metric(
        "memory_used_bytes",
        "ftcost/gpu/memory_used_gib",
        "GiB",
        "in use on the device, by all processes",
        divisor=GIB,
    ),
    Metric(
        "peak_allocated_bytes",
        "ftcost/gpu/peak_allocated_gib",
        "GiB",
        "torch's high-water mark over the training steps",
        default=True,
        divisor=GIB,
    ),
    Metric("power_watts", "ftcost/gpu/power_watts", "W", "mean power of the GPU board"),
    Metric(
        "peak_memory_measured_over_predicted",
        "ftcost/gpu/peak_memory_measured_over_predicted",
        "ratio",
        "1.00 = on plan, above = more memory",
    ),
    Metric(
        "load_max_over_mean",
        "ftcost/moe/load_max_over_mean",
        "ratio",
        "tokens of the busiest expert over the average expert's, mean over layers; 1 = balanced",
        default=True,
    ),
    Metric("load_cv", "ftcost/moe/load_cv", "ratio", "standard deviation over mean of the experts' tokens"),
    Metric("dead_expert_fraction", "ftcost/moe/dead_expert_fraction", "fraction", "experts that got no token"),
    Metric("num_dead_experts", "ftcost/moe/num_dead_experts", "experts", "that got no token, over all layers"),
    Metric("load_entropy", "ftcost/moe/load_entropy", "fraction", "entropy of the load over its maximum; 1 = balanced"),
    Metric(
        "worst_layer_load_max_over_mean",
        "ftcost/moe/worst_layer_load_max_over_mean",
        "ratio",
        "busiest expert over the mean, in the least even layer",
    ),
    Metric(
        "load_max_over_mean_vs_first_steps",
        "ftcost/moe/load_max_over_mean_vs_first_steps",
        "ratio",
        "the last 20 steps' load_max_over_mean over the first 20 steps'; above 1 = tuning makes the load less even",
    ),
    Metric(
        "imbalance_step_seconds",
        "ftcost/moe/imbalance_step_seconds",
        "s",
        "what the uneven load adds to one optimizer step, by the cost model; 0 = nothing",
    ),
    Metric("imbalance_usd", "ftcost/moe/imbalance_usd", "USD", "what that has cost so far in this session"),
)

EXPERT_HISTOGRAM_KEY: Final = "ftcost/moe/load/{layer}"
"""Per-layer histogram of the share of routed tokens by expert."""

BY_COST_PREFIX: Final = "ftcost/by_cost/"
"""Losses against what the run had cost: copies of the Trainer's losses, on the first axis below that is known."""
COST_AXIS_KEY: Final = "ftcost/by_cost/spent_usd"
TIME_AXIS_KEY: Final = "ftcost/by_cost/elapsed_hours"

LOGGED_FIELDS: Final = (
    "spent_usd",
    "projected_usd",
    "remaining_seconds",
    "step_seconds",
    "non_padding_tokens_per_second",
    "mfu",
    "step_seconds_measured_over_predicted",
    "peak_allocated_bytes",
)
"""The few figures that ``attach`` puts into the Trainer's own logs, for the trackers that have no sink of ours."""


def logged_metrics(window: Window) -> dict[str, float]:
    """Tracker key -> value of :data:`LOGGED_FIELDS`, without what was not measured."""
    keys = {metric.key for metric in METRICS if metric.field in LOGGED_FIELDS}
    return {key: value for key, value in window_metrics(window).items() if key in keys}


def metrics_for(detail: Detail) -> tuple[Metric, ...]:
    """The rows of the table that ``detail`` shows."""
    if detail not in ("default", "full"):
        raise CostModelError(f"detail is 'default' or 'full', got {detail!r}")
    return tuple(metric for metric in METRICS if metric.default or detail == "full")


def window_metrics(window: Window, detail: Detail = "default") -> dict[str, float]:
    """Tracker key -> value, without what was not measured."""
    values: dict[str, float] = {}
    for metric in metrics_for(detail):
        value = getattr(window, metric.field)
        if value is not None and math.isfinite(value):
            values[metric.key] = float(value) / metric.divisor
    return values
