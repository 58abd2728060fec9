"""Measurements against the estimate: measured over predicted by term, and one sentence to act on. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

ON_PLAN_SHARE: Final = 0.1  # within 10 % of the prediction there is nothing to act on
_WAIT_SHARE: Final = 0.05  # of a step; below it, waiting for data is no cause
_IDLE_BUSY_FRACTION: Final = 0.7
_UNEVEN_LOAD: Final = 1.5

# NVML's clock event reasons (nvml.h): what slowed the clocks, and what to do about it.
_THROTTLE_CAUSES: Final = (
    (0x08 | 0x40, "the GPU slowed down for heat or power (hardware slowdown); check its cooling and power supply"),
    (0x20, "the GPU lowered its clocks for heat; check its cooling"),
    (0x80, "the power brake lowered the GPU's clocks; ask the machine's owner"),
    (0x04, "the GPU ran at its power cap; raise the limit (nvidia-smi -pl) or expect this speed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the steps so far (warm-up left out) showed. ``None``: not measured."""

    num_steps: int = 0
    step_seconds: float | None = None  # mean
    data_wait_seconds: float | None = None  # mean, part of step_seconds
    num_tokens_per_step: float | None = None
    num_non_padding_tokens_per_step: float | None = None
    tokens_per_second: float | None = None
    non_padding_tokens_per_second: float | None = None
    peak_allocated_bytes: int | None = None  # torch's, over training steps
    peak_reserved_bytes: int | None = None
    load_max_over_mean: float | None = None  # expert load, mean over layers
    throttle_reasons: int | None = None  # NVML bit mask, OR over the steps
    busy_fraction: float | None = None
    mfu: float | None = None
    dataloader_num_workers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """``ratios``: term -> measured / predicted, 1.00 = on plan; only terms that both sides know.

    Terms are the answer's names (``step_seconds``, ``num_tokens_per_step``, ``peak_allocated_bytes``, ...), and
    ``step_seconds_without_data_wait``, which tells a slow loader from slow training.
    """

    ratios: dict[str, float] = field(default_factory=dict)
    verdict: str | None = None


def compare(estimate: Mapping[str, Any] | None, measured: Measured) -> Comparison:
    """Ratios and verdict. ``estimate``: the answer's mapping (``Estimate.to_dict()``); ``None``: no prediction."""
    ratios = _ratios(estimate, measured) if estimate is not None else {}
    return Comparison(ratios=ratios, verdict=_verdict(estimate, measured, ratios))


def _ratios(estimate: Mapping[str, Any], measured: Measured) -> dict[str, float]:
    memory = estimate.get("memory") or {}
    without_wait: float | None = None
    if measured.step_seconds is not None and measured.data_wait_seconds is not None:
        without_wait = measured.step_seconds - measured.data_wait_seconds
    terms: tuple[tuple[str, float | None, Any], ...] = (
        ("step_seconds", measured.step_seconds, estimate.get("step_seconds")),
        ("step_seconds_without_data_wait", without_wait, estimate.get("step_seconds")),
        ("num_tokens_per_step", measured.num_tokens_per_step, estimate.get("num_tokens_per_step")),
        (
            "num_non_padding_tokens_per_step",
            measured.num_non_padding_tokens_per_step,
            estimate.get("num_non_padding_tokens_per_step"),
        ),
        ("tokens_per_second", measured.tokens_per_second, estimate.get("tokens_per_second")),
        (
            "non_padding_tokens_per_second",
            measured.non_padding_tokens_per_second,
            estimate.get("non_padding_tokens_per_second"),
        ),
        ("mfu", measured.mfu, estimate.get("mfu")),
        # Like with like: torch's allocated bytes against allocated, reserved against reserved.
        ("peak_allocated_bytes", measured.peak_allocated_bytes, memory.get("peak_allocated_bytes")),
        ("peak_reserved_bytes", measured.peak_reserved_bytes, memory.get("peak_reserved_bytes")),
    )
    return {name: ratio for name, value, predicted in terms if (ratio := _ratio(value, predicted)) is not None}


def _ratio(value: float | None, predicted: Any) -> float | None:
    if value is None or predicted is None or not float(predicted) > 0 or not math.isfinite(float(predicted)):
        return None
    ratio = float(value) / float(predicted)
    return ratio if math.isfinite(ratio) else None


def _verdict(estimate: Mapping[str, Any] | None, measured: Measured, ratios: Mapping[str, float]) -> str | None:
    step = ratios.get("step_seconds")
    if estimate is None or step is None or measured.step_seconds is None:
        share = _wait_share(measured)
        return f"{share:.0%} of each step is waiting for data; {_loader_advice(measured)}" if share else None
    if step > 1 + ON_PLAN_SHARE:
        cause = _cause_of_slowness(estimate, measured, ratios)
    elif step < 1 - ON_PLAN_SHARE:
        cause = _cause_of_speed(ratios)
    else:
        return _memory_verdict(ratios) or f"step {step:.2f}x the prediction: on plan"
    return f"step {step:.2f}x the prediction: {cause}"


def _cause_of_slowness(estimate: Mapping[str, Any], measured: Measured, ratios: Mapping[str, float]) -> str:
    """The largest part of the seconds above the prediction, and what to do about it."""
    assert measured.step_seconds is not None
    predicted = float(estimate["step_seconds"])
    wait = (measured.data_wait_seconds or 0.0) if _wait_share(measured) else 0.0
    more_tokens = max(0.0, ratios.get("num_tokens_per_step", 1.0) - 1.0)
    by_tokens = more_tokens * predicted  # a step's time is near proportional to its tokens
    rest = measured.step_seconds - predicted - wait - by_tokens
    if wait >= max(by_tokens, rest):
        return f"{_wait_share(measured):.0%} of it is waiting for data; {_loader_advice(measured)}"
    if by_tokens >= rest:
        return (
            f"steps hold {more_tokens:.0%} more tokens than expected; give the data set's real lengths, or expect this cost"
        )
    for bits, cause in _THROTTLE_CAUSES[:-1]:
        if (measured.throttle_reasons or 0) & bits:
            return cause
    if measured.busy_fraction is not None and measured.busy_fraction < _IDLE_BUSY_FRACTION:
        return (
            f"the GPU idles {1 - measured.busy_fraction:.0%} of the time waiting for the host; "
            "a larger per_device_train_batch_size or torch_compile keeps it busy"
        )
    if measured.load_max_over_mean is not None and measured.load_max_over_mean > _UNEVEN_LOAD:
        return (
            f"the busiest expert gets {measured.load_max_over_mean:.1f}x the average tokens; "
            "experts_implementation='grouped_mm' suffers least from that"
        )
    power_bits, power_cause = _THROTTLE_CAUSES[-1]
    if (measured.throttle_reasons or 0) & power_bits:
        return power_cause
    return "training itself is slower than modelled; `ftcost calibrate` on this run makes the next estimate closer"


def _cause_of_speed(ratios: Mapping[str, float]) -> str:
    fewer_tokens = 1.0 - ratios.get("num_tokens_per_step", 1.0)
    if fewer_tokens > ON_PLAN_SHARE / 2:
        return f"steps hold {fewer_tokens:.0%} fewer tokens than expected"
    return "faster than modelled; `ftcost calibrate` on this run makes the next estimate closer"


def _memory_verdict(ratios: Mapping[str, float]) -> str | None:
    peak = ratios.get("peak_allocated_bytes")
    if peak is None or peak <= 1 + ON_PLAN_SHARE:
        return None
    return f"peak memory {peak:.2f}x the prediction, speed on plan; keep that much free before raising the batch size"


def _wait_share(measured: Measured) -> float:
    """Share of the step spent waiting for data; 0.0 where it is no cause or not known."""
    if not measured.step_seconds or measured.data_wait_seconds is None:
        return 0.0
    share = measured.data_wait_seconds / measured.step_seconds
    return share if share >= _WAIT_SHARE else 0.0


def _loader_advice(measured: Measured) -> str:
    workers = measured.dataloader_num_workers
    if workers:
        return f"raise dataloader_num_workers (now {workers}) or prepare the data before training"
    return "raise dataloader_num_workers"
