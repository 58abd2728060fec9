"""Statistics of log errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence


def percent(log_ratio: float) -> float:
    """A log error as percent of the measured value."""
    return 100.0 * (math.exp(log_ratio) - 1.0)


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def weighted_quantile(values: Sequence[tuple[float, float]], share: float) -> float:
    """Of (value, weight) pairs."""
    total, reached = sum(weight for _, weight in values), 0.0
    for value, weight in sorted(values):
        reached += weight
        if reached >= share * total - 1e-12:
            return value
    return max(value for value, _ in values)


def summary(errors: Sequence[float]) -> str:
    """Count, median, 90th percentile, share within 20 %, bias: cells of a table."""
    sizes = [abs(percent(error)) for error in errors]
    within = sum(size <= 20.0 for size in sizes) / len(sizes)
    return (
        f"{len(sizes)} | {statistics.median(sizes):.1f} | {quantile(sizes, 0.9):.1f} | {100 * within:.0f} | "
        f"{percent(statistics.median(errors)):+.1f}"
    )
