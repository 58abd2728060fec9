"""Data sets whose distribution of lengths is known."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from costmodel.data_files import DATA_FOLDER, read_table
from costmodel.errors import UnknownNameError

_DATASET_ALIASES: Final = {"cs": "commonsense_15k", "math": "math_14k"}


def list_length_datasets() -> tuple[str, ...]:
    """Data sets whose distribution of lengths is known."""
    return tuple(sorted(file.removesuffix(".csv") for file in os.listdir(os.path.join(DATA_FOLDER, "lengths"))))


@functools.cache
def length_histogram(dataset_name: str) -> Mapping[int, float]:
    """Tokens per sample -> number of samples, of a catalogued data set. Raises :class:`UnknownNameError`."""
    known = list_length_datasets()
    wanted = re.sub(r"[\s-]+", "_", dataset_name.strip().lower())
    wanted = _DATASET_ALIASES.get(wanted, wanted)
    for name in known:
        if wanted in (name, name.replace("_", "")):
            rows = read_table("lengths", f"{name}.csv")
            return MappingProxyType({int(row["length_tokens"]): float(row["num_samples"]) for row in rows})
    raise UnknownNameError("data set", dataset_name, known, way_out="or give a histogram, the lengths, or a file of lengths")
