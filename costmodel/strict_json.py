"""JSON that holds numbers only where it says so, and every key once."""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Mapping
from typing import Any, Final

from costmodel.errors import CostModelError, short, shown

MAX_BYTES: Final = 10 * 1000 * 1000
MAX_DEPTH: Final = 50
MAX_INTEGER_BITS: Final = 1024  # as large as a float may be


def read_json_text(path: str | os.PathLike[str]) -> str:
    """The text of a small JSON file: a model's config, a DeepSpeed config. Raises ``OSError`` or ``ValueError``."""
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES // 1_000_000} MB")
    return data.decode("utf-8-sig")


def parse_json(text: str, where: str) -> Any:
    """The value, without NaN, infinity and keys that come twice. Raises :class:`CostModelError`."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_second_key)
    except (ValueError, RecursionError) as error:
        raise CostModelError(f"{where} is not valid JSON: {error}") from None


def as_json_value(value: Any, where: str = "", depth: int = 0) -> Any:
    """The value as JSON holds it. Raises :class:`CostModelError` for what it does not hold, with its place inside the value.

    JSON has no infinity and no NaN, and real configs hold them (``"time_step_limit": [0.0, Infinity]``): they become the
    text "Infinity", "-Infinity" or "NaN", which no field that is read takes for a number. A torch type becomes its name.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):
        if int(value).bit_length() > MAX_INTEGER_BITS:
            raise CostModelError(f"{where} is {shown(int(value))}, too long to compute with")
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else json.dumps(number)
    if depth == MAX_DEPTH and isinstance(value, (Mapping, list, tuple)):
        raise CostModelError(f"{where[:80]}... is nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        fields = {}
        for name, each in value.items():
            if not isinstance(name, (str, int)):
                raise CostModelError(f"{where or 'it'} has the key {shown(name)}, which is not text")
            fields[str(name)] = as_json_value(each, f"{where}.{short(str(name))}".lstrip("."), depth + 1)
        return fields
    if isinstance(value, (list, tuple)):
        return [as_json_value(each, f"{where}[{index}]", depth + 1) for index, each in enumerate(value)]
    if type(value).__module__ == "torch":
        return str(value)
    raise CostModelError(f"{where} is of type {type(value).__name__}, which no JSON holds, got {shown(value)}")


def job_mapping(value: Any, where: str) -> dict[str, Any]:
    """A value that was read, as one job. Raises :class:`CostModelError` where it is none."""
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return value
    held = "nothing" if value is None else type(value).__name__
    held = "field names that are not text" if isinstance(value, dict) else held
    raise CostModelError(f"{where} must hold one job, a mapping of field names to values; it holds {held}")


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number")


def _refuse_second_key(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The last value would win in silence, and the first may be the one that was meant."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise ValueError(f"the key {shown(twice)} is there twice")
    return fields
