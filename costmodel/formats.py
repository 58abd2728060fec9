"""Numbers as a person reads them: bytes in GiB, seconds in hours, dollars, billions. ``None`` is "unknown"."""

from __future__ import annotations

import math
from typing import Final

from costmodel.units import GIB, SECONDS_PER_HOUR

UNKNOWN: Final = "unknown"


def format_gib(num_bytes: float | None) -> str:
    """``41231686041`` -> ``"38.4 GiB"``; two decimals below 10 GiB."""
    if num_bytes is None:
        return UNKNOWN
    gib = num_bytes / GIB
    return f"{gib:,.1f} GiB" if abs(gib) >= 9.95 else f"{gib:.2f} GiB"


def format_seconds(seconds: float | None, like: float | None = None) -> str:
    """Milliseconds, seconds, minutes or hours, as a person would choose for ``like`` (default: the value itself)."""
    if seconds is None:
        return UNKNOWN
    size = seconds if like is None else like
    if size < 1:
        return f"{_digits(seconds * 1000)} ms"
    if size < 120:
        return f"{_digits(seconds)} s"
    if size < 2 * SECONDS_PER_HOUR:
        return f"{_digits(seconds / 60)} min"
    return f"{_digits(seconds / SECONDS_PER_HOUR)} h"


def format_hours(seconds: float | None) -> str:
    """Hours and nothing else, for a column or a sentence that compares; two digits below six minutes."""
    if seconds is None:
        return UNKNOWN
    hours = seconds / SECONDS_PER_HOUR
    if abs(hours) >= 999.5:
        return f"{hours:,.0f} h"
    decimals = 2 if abs(hours) >= 0.0995 or hours == 0 else 1 - math.floor(math.log10(abs(hours)))
    return f"{hours:.{decimals}f} h"


def _digits(value: float) -> str:
    """Three digits, never an exponent."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def format_usd(usd: float | None) -> str:
    """Cents, three digits below a dollar where cents do not show them, whole dollars from a thousand."""
    if usd is None:
        return UNKNOWN
    if usd >= 1000:
        return f"${usd:,.0f}"
    return f"${usd:.2f}" if usd >= 1 or usd == round(usd, 2) else f"${usd:.3g}"


def format_count(count: float | None) -> str:
    """``46702792704`` -> ``"46.70 B"`` (10^9, not 2^30); exact below 10,000."""
    if count is None:
        return UNKNOWN
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.2f} {letter}"
    return f"{count:,.0f}" if count >= 100 or count == int(count) else f"{count:.3g}"


def format_percent(fraction: float | None) -> str:
    return UNKNOWN if fraction is None else f"{100 * fraction:.1f} %"
