"""JSON that holds numbers only where it says so, and every key once."""

from __future__ import annotations

import json
import os
from typing import Any, Final

from costmodel.errors import CostModelError, shown

MAX_BYTES: Final = 10 * 1000 * 1000


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
