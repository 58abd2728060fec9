"""Arguments of the public functions: what cannot be one is refused by name, with what it must be.

A job's own fields are checked by :mod:`costmodel.specs`.
"""

from __future__ import annotations

import datetime
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from costmodel.errors import CostModelError, shown


def must_be(name: str, what: str, value: object) -> CostModelError:
    return CostModelError(f"{name} must be {what}, got {shown(value)}")


def as_text(value: object, name: str, what: str = "text") -> str:
    """Raises :class:`CostModelError` for anything but text."""
    if not isinstance(value, str):
        raise must_be(name, what, value)
    return value


def as_names(value: object, name: str, example: str) -> list[Any]:
    """The names of a list; one text is one name. Raises :class:`CostModelError` where it is no list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, (Mapping, bytes)) or not isinstance(value, Iterable):
        raise must_be(name, f"a list of names such as {example}", value)
    return list(value)


def as_flag(value: object, name: str) -> bool:
    """Raises :class:`CostModelError` for anything but a truth value: the text "no" would count as true."""
    if not isinstance(value, bool):
        raise must_be(name, "True or False", value)
    return value


def as_number(value: object, name: str, what: str, *, low: float = 0.0, high: float = math.inf) -> float:
    """A finite number from ``low`` to ``high``. Raises :class:`CostModelError`; ``what`` says what it must be."""
    try:
        is_one = isinstance(value, numbers.Real) and not isinstance(value, bool)
        number = float(value) if is_one else math.nan  # type: ignore[arg-type]
    except OverflowError:
        number = math.nan
    if not (math.isfinite(number) and low <= number <= high):
        raise must_be(name, what, value)
    return number


def as_limit(value: object, name: str, unit: str) -> float | None:
    """A limit that a run is to keep, ``None`` for none. Raises :class:`CostModelError` where nothing could keep it."""
    if value is None:
        return None
    return as_number(value, name, f"a positive number of {unit} (leave it out for no limit)", low=math.ulp(0.0))


def as_day(value: object, name: str) -> datetime.date | None:
    """A day or a moment of it. Raises :class:`CostModelError` for anything else."""
    if isinstance(value, datetime.datetime):
        return value.date()
    if value is not None and not isinstance(value, datetime.date):
        raise must_be(name, "a datetime.date", value)
    return value


def plain_digits(text: str) -> str:
    """The text of a number as people write it. Raises ``ValueError`` for "1_0", which Python reads as 10."""
    if "_" in text:
        raise ValueError(f"{shown(text)} is not a number: write it without _")
    return text
