"""A run record into a :class:`RunSeries`, a chunk of lines at a time. What cannot be read is skipped and remarked on."""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final, TextIO

from costmodel.errors import CostModelError
from ftcost_callback.ranks import RankRows, last_session
from ftcost_callback.records import MAX_NUMBER, ROW_TYPES, SCHEMA_VERSION
from ftcost_callback.report_series import (
    DRAWN_PAUSE_KINDS,
    NOT_MEASURED,
    PAUSE_KINDS,
    RunSeries,
    finite,
    is_complete,
    price_of,
)
from ftcost_callback.run_file import find_record

CHUNK_CHARACTERS: Final = 1 << 18
"""Of the file, parsed in one call, which takes two thirds of the time of a call for each line: a thousand step rows."""

_NUMBERS: Final = frozenset({int, float, bool})


def read_series(path: Path) -> RunSeries:
    """Read a record as far as it goes. Raises :class:`CostModelError` when it holds nothing that can be shown."""
    file = find_record(Path(path))
    reader = _Reader(file)
    try:
        with file.open(encoding="utf-8-sig", errors="replace") as lines:
            reader.read(lines)
    except OSError as error:
        raise CostModelError(f"{file}: cannot be read: {error.strerror or error}") from None
    return reader.result()


class _Reader:
    """The state of one pass over a file."""

    def __init__(self, path: Path) -> None:
        self.run = RunSeries(path)
        self.path = path
        latest = last_session(path)
        self.latest_run_id = str(latest["run_id"]) if latest is not None and latest.get("run_id") else None
        self.ranks: RankRows | None = None  # of the latest run
        self.earlier_run_ids: list[str] = []
        self.num_lines = 0
        self.damaged: list[int] = []  # line numbers
        self.foreign_types: set[str] = set()
        self.faults: set[str] = set()

    def read(self, lines: TextIO) -> None:
        while chunk := lines.readlines(CHUNK_CHARACTERS):
            steps: list[Mapping[str, Any]] = []
            for row in self._parsed(chunk):
                if row["type"] == "session" and self.ranks is None and str(row.get("run_id")) == self.latest_run_id:
                    self.ranks = RankRows(self.path, self.latest_run_id)
                if self.ranks is not None:
                    row = self.ranks.merged(row)
                if row["type"] == "step":
                    steps.append(row)
                    continue
                if row["type"] == "session":  # steps before it may be of an earlier run
                    self._take_steps(steps)
                    steps = []
                self._take(row if isinstance(row, dict) else dict(row))
            self._take_steps(steps)

    def _parsed(self, lines: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        """The rows of these lines. Lines that are not each one value of JSON are read one by one, the damaged left out."""
        rows: list[Any] = []
        with contextlib.suppress(ValueError, RecursionError):
            rows = json.loads(f"[{',null,'.join(lines)}]")
        # A null stands between lines, so that two halves of a value and a line of two values do not make up for each other.
        if rows[1::2] == [None] * (len(lines) - 1) and len(rows) == 2 * len(lines) - 1:
            rows = rows[::2]
        else:
            rows = [_parsed_line(line) for line in lines]
        for place, row in enumerate(rows, start=self.num_lines + 1):
            if isinstance(row, dict) and isinstance(row.get("type"), str):
                yield row
            elif row is not _BLANK:
                self.damaged.append(place)
        self.num_lines += len(lines)

    def _take(self, row: dict[str, Any]) -> None:
        kind = row["type"]
        if kind == "pause":
            seconds, step = finite(row.get("seconds")), finite(row.get("global_step"))
            if seconds is not None and row.get("kind") in PAUSE_KINDS:
                self.run.pause_seconds[row["kind"]] += seconds
                if row["kind"] in DRAWN_PAUSE_KINDS and step is not None:
                    self.run.pauses[row["kind"]].append((int(step), seconds))
        elif kind == "session":
            self._take_session(row)
        elif kind == "prediction":
            self.run.add_prediction(row)
        elif kind == "expert_load":
            try:
                self.run.experts.add(row)
            except ValueError as error:
                self.faults.add(f"some expert loads were left out: {error}")
        elif kind == "budget":
            self.run.budgets.append(row)
        elif kind == "profile":
            self.run.profiles.append(row)
        elif kind == "summary":
            self.run.summary = row
        elif kind not in ROW_TYPES:
            self.foreign_types.add(kind)

    def _take_steps(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Many at once, column by column: what is right for all of them is checked in one call for each column."""
        needed = {name: [row.get(name) for row in rows] for name in ("global_step", "step_seconds")}
        if not all(_are_finite(values) for values in needed.values()):
            self.faults.add("some step rows have no global_step or step_seconds and were left out")
            self._take_steps([row for row in rows if all(_is_finite(row.get(name)) for name in needed)])
            return
        columns = self.run.columns
        num_before = len(columns["global_step"])
        for name in columns.keys() & set().union(*rows):
            values: list[Any] = needed.get(name) or [row.get(name) for row in rows]
            if name not in needed and not _are_finite(values):
                values = [value if _is_finite(value) else _default(name) for value in values]
            _pad(name, columns[name], num_before)
            columns[name].extend(values)

    def _take_session(self, row: dict[str, Any]) -> None:
        run_id = str(row["run_id"]) if row.get("run_id") is not None else None
        if self.run.has_rows and self.run.run_id is not None and run_id != self.run.run_id:
            self.earlier_run_ids.append(self.run.run_id)
            self.run = RunSeries(self.path)
        self.run.run_id = run_id
        self.run.sessions.append(row)
        # A run that was resumed after its summary goes on: that summary no longer holds.
        self.run.summary = None
        version = finite(row.get("schema_version"))
        if version is not None and version > SCHEMA_VERSION:
            self.faults.add(f"written by a newer version (schema {version:g}, this one reads {SCHEMA_VERSION})")

    def result(self) -> RunSeries:
        run = self.run
        if not run.has_rows:
            held = f"{self.num_lines} lines, none of them a session, step, prediction or summary row"
            raise CostModelError(
                f"{self.path}: not a run record: {'the file is empty' if not self.num_lines else held}; "
                "give the run.jsonl that FTCostCallback writes to OUTPUT_DIR/_ftcost"
            )
        remarks = sorted(self.faults)
        remarks += self.ranks.remarks if self.ranks is not None else []
        if self.damaged == [self.num_lines]:
            remarks.append("the last line is cut off, as after a kill: it was left out")
        elif self.damaged:
            remarks.append(f"{len(self.damaged)} damaged lines were left out, the first is line {self.damaged[0]}")
        if self.foreign_types:
            remarks.append(f"rows of unknown type were left out: {', '.join(sorted(self.foreign_types)[:5])}")
        if run.sessions and price_of(run.sessions[-1]) is None and any(price_of(each) is not None for each in run.sessions):
            remarks.append("the last session has no price: what the run cost is not known")
        if not run.sessions:
            remarks.append("there is no session row: job, device, price and versions are not known")
        if number := len(self.earlier_run_ids):
            remarks.append(
                f"the file holds {number} earlier run{'s' if number > 1 else ''} too "
                f"({', '.join(self.earlier_run_ids[-5:])}); this is the latest"
            )
        run.remarks = remarks
        _pad("num_steps", run.columns["num_steps"], run.num_step_rows)
        _pad("", run.absent, run.num_step_rows)
        for name, column in run.columns.items():
            if column:
                _pad(name, column, run.num_step_rows)
            else:
                run.columns[name] = run.absent
        run.session_starts = _session_starts(run.columns["session_index"])
        return run


_BLANK: Final = object()  # a line with nothing on it


def _parsed_line(line: str) -> Any:
    """``None``: no JSON."""
    if not line.strip():
        return _BLANK
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_finite(value: Any) -> bool:
    """As :func:`finite`, for millions of values of JSON."""
    return type(value) in _NUMBERS and -MAX_NUMBER < value < MAX_NUMBER


def _are_finite(values: Sequence[Any]) -> bool:
    """Whether :func:`_is_finite` holds for each. A nan, which ``max`` may pass over, shows in the sum."""
    if not set(map(type, values)) <= _NUMBERS:
        return False
    return max(map(abs, values), default=0.0) < MAX_NUMBER and is_complete(values)


def _default(name: str) -> float:
    return 1.0 if name == "num_steps" else NOT_MEASURED


def _pad(name: str, column: array[float], count: int) -> None:
    """Fill the rows that did not have this field."""
    if len(column) < count:
        column.extend(array("d", [_default(name)]) * (count - len(column)))


def _session_starts(session_indices: Sequence[float]) -> list[int]:
    """The places at which another session begins; a row that does not say belongs to the one before it."""
    starts: list[int] = []
    place, current = 0, NOT_MEASURED
    for session_index, rows in groupby(session_indices):
        if not starts or (session_index == session_index and session_index != current):
            starts.append(place)
        if session_index == session_index:
            current = session_index
        place += sum(1 for _ in rows)
    return starts
