"""Units of the project: bytes, seconds, dollars. A name carries its unit; only reports convert."""

from __future__ import annotations

from typing import Final

MIB: Final = 2**20
GIB: Final = 2**30
TERA: Final = 10**12
GIGA: Final = 10**9
SECONDS_PER_HOUR: Final = 3600.0

BYTES_PER_ELEMENT: Final[dict[str, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
}
"""Bytes of one element of each training dtype, by its torch name."""
