"""Numbers as the report prints them: the only place there that rounds."""

from __future__ import annotations

import math
import re

from costmodel.units import GIB, MIB


def usd(value: float, *, of: float | None = None) -> str:
    """``$1,234``, ``$12.34``, ``$0.79``, ``$0.0123``: cents, or three significant digits of a smaller sum.

    ``of``: the whole that this is a part of. The parts of one whole then have the same decimals, one more than it.
    """
    size = abs(value if of is None else of)
    if size == 0:
        return "$0"
    digits = 0 if size >= 1000 else 2 if size >= 0.0995 else min(8, 2 - math.floor(math.log10(size)))
    if of is not None and size < 10:
        digits += 1
    return f"{'−' if value < 0 else ''}${abs(value):,.{digits}f}"


def duration(seconds: float) -> str:
    """``850 ms``, ``12.3 s``, ``4 min 05 s``, ``3 h 07 min``, ``2 d 4 h``."""
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def percent(share: float) -> str:
    value = 100 * share
    return "0 %" if value == 0 else "< 0.1 %" if 0 < value < 0.1 else f"{value:.1f} %" if value < 99.95 else f"{value:.0f} %"


def count(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= 0.995 * GIB else f"{num_bytes / MIB:.0f} MiB"


def iso_time(value: object) -> str:
    """``2026-08-17 09:00 UTC`` from an ISO 8601 time; other text as it stands."""
    text = str(value or "")
    match = re.fullmatch(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)(:\d\d(\.\d+)?)?(Z|\+00:00)", text)
    return f"{match[1]} {match[2]} UTC" if match else text
