"""The tables that ship with the package, in ``costmodel/data`` (its ``SOURCES.md`` says where each is from)."""

from __future__ import annotations

import csv
import os
from typing import Final

DATA_FOLDER: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")


def read_table(*path: str) -> list[dict[str, str]]:
    with open(os.path.join(DATA_FOLDER, *path), encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
