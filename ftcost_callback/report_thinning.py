"""Series of any length as what a chart can show: few points that keep the extremes and the order."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Final

MAX_POINTS: Final = 2000
"""Points of one drawn series; beyond that a browser shows no more and the page only grows."""


def shorten(value: float) -> float | int:
    """Six significant digits, whole numbers without a point: what a chart needs and no more."""
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _buckets(count: int, parts: int) -> Iterator[tuple[int, int]]:
    parts = max(1, min(parts, count))
    for index in range(parts):
        yield index * count // parts, (index + 1) * count // parts


def thin_min_max(x: Sequence[float], y: Sequence[float], max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most ``max_points``: the lowest and the highest of each stretch, in order, so that no outlier is lost."""
    if len(y) <= max_points:
        return list(zip(x, y, strict=True))
    kept: list[tuple[float, float]] = []
    for start, end in _buckets(len(y), max_points // 2):
        stretch = list(y[start:end])
        places = {start + stretch.index(min(stretch)), start + stretch.index(max(stretch))}
        kept.extend((x[place], y[place]) for place in sorted(places))
    return kept


def running_median(x: Sequence[float], y: Sequence[float], max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """The median around each point; for a long series the median of each of ``max_points / 2`` stretches."""
    count = len(y)
    if count > max_points:
        return [(x[(start + end) // 2], statistics.median(y[start:end])) for start, end in _buckets(count, max_points // 2)]
    half = max(2, min(25, count // 40))
    return [(at, statistics.median(y[max(0, place - half) : place + half + 1])) for place, at in enumerate(x)]


def stretch_ends(count: int, max_points: int = MAX_POINTS) -> list[int]:
    """At most ``max_points`` places, the last of each stretch: for curves that belong together (a value, its band)."""
    return [end - 1 for _, end in _buckets(count, max_points)] if count else []
