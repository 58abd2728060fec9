"""A run record, read line by line into what a page can hold: columns of numbers, thinned series, expert-load frames.

A record of a million steps is never held as rows: each step is one number in each column (8 bytes), and expert loads
are added up into at most a few dozen frames while they are read. What cannot be read is skipped and remarked on.
"""

from __future__ import annotations

import json
import math
import statistics
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from costmodel.errors import CostModelError
from ftcost_callback.ranks import RankRows, last_session
from ftcost_callback.records import MAX_NUMBER, ROW_TYPES, SCHEMA_VERSION

MAX_POINTS: Final = 2000
"""Points of one drawn series; beyond that a browser shows no more and the page only grows."""

MAX_FRAME_CELLS: Final = 250_000
"""Cells of all expert-load frames of one run together, at about five characters each."""

MAX_FRAMES: Final = 60

NOT_MEASURED: Final = math.nan
"""Inside a column only; :meth:`RunSeries.value` and the thinning functions turn it into ``None`` or leave it out."""

STEP_COLUMNS: Final = (
    "global_step",
    "session_index",
    "num_steps",
    "step_seconds",
    "data_wait_seconds",
    "rollout_seconds",
    "num_tokens",
    "num_non_padding_tokens",
    "num_supervised_tokens",
    "forward_seconds",
    "backward_seconds",
    "optimizer_seconds",
    "is_profiled",
    "repeated",
    "busy_fraction",
    "sm_active_fraction",
    "memory_used_bytes",
    "power_watts",
    "energy_joules",
    "throttle_reasons",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "mfu",
    "hfu",
    "elapsed_seconds",
    "spent_usd",
    "projected_total_usd",
    "projected_total_usd_low",
    "projected_total_usd_high",
    "projected_total_seconds",
    "projected_total_seconds_low",
    "projected_total_seconds_high",
)

PAUSE_KINDS: Final = ("eval", "save", "log", "other")
DRAWN_PAUSE_KINDS: Final = ("eval", "save")

_NUMBERS: Final = frozenset({int, float, bool})


def finite(value: object) -> float | None:
    """``value`` as a float, or ``None`` when it is no finite number, or one so large that sums of it are not."""
    if isinstance(value, (int, float)) and -MAX_NUMBER < value < MAX_NUMBER:
        return float(value)
    return None


@dataclass
class ExpertFrames:
    """Expert loads over time, added up into at most ``MAX_FRAMES`` frames of equally many rows."""

    layer_names: list[str] = field(default_factory=list)
    frames: list[tuple[int, int, list[list[float]]]] = field(default_factory=list)  # first step, last step, tokens
    reasons: list[str] = field(default_factory=list)  # why loads are partial or missing
    global_step: array[float] = field(default_factory=lambda: array("d"))
    mean_max_over_mean: array[float] = field(default_factory=lambda: array("d"))  # mean over layers
    worst_max_over_mean: array[float] = field(default_factory=lambda: array("d"))  # the worst layer
    _rows_per_frame: int = 1
    _rows_in_last: int = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Take one ``expert_load`` row. Raises ``ValueError`` when its fields do not have the contract's shape."""
        status, reason = row.get("status", "recorded"), row.get("reason")
        if status != "recorded":
            said = str(reason or f"status {status}, no reason in the record")
            if said not in self.reasons:
                self.reasons.append(said)
        matrix = _matrix(row.get("tokens_per_expert"))
        step = finite(row.get("global_step"))
        if status == "not_recorded" or not matrix or step is None:
            return
        ratios = [max(layer) * len(layer) / sum(layer) for layer in matrix if sum(layer) > 0]
        if not ratios:
            return
        if not self.frames:
            names = row.get("layer_names") or []
            self.layer_names = [str(name) for name in names] if len(names) == len(matrix) else []
            self.layer_names = self.layer_names or [f"layer {index}" for index in range(len(matrix))]
        elif [len(layer) for layer in matrix] != [len(layer) for layer in self.frames[0][2]]:
            raise ValueError("expert_load rows of different shapes")
        self.global_step.append(step)
        self.mean_max_over_mean.append(statistics.fmean(ratios))
        self.worst_max_over_mean.append(max(ratios))
        self._merge(int(step), matrix)

    def _merge(self, step: int, matrix: list[list[float]]) -> None:
        if self.frames and self._rows_in_last < self._rows_per_frame:
            first, _, tokens = self.frames[-1]
            self.frames[-1] = (first, step, _sum(tokens, matrix))
            self._rows_in_last += 1
            return
        self.frames.append((step, step, matrix))
        self._rows_in_last = 1
        cells = sum(len(layer) for layer in matrix)
        limit = max(2, min(MAX_FRAMES, MAX_FRAME_CELLS // max(1, cells)))
        if len(self.frames) > limit:
            pairs = [self.frames[index : index + 2] for index in range(0, len(self.frames), 2)]
            self._rows_in_last += self._rows_per_frame if len(pairs[-1]) == 2 else 0
            self._rows_per_frame *= 2
            self.frames = [
                (pair[0][0], pair[-1][1], _sum(pair[0][2], pair[1][2]) if len(pair) == 2 else pair[0][2]) for pair in pairs
            ]


def _matrix(value: object) -> list[list[float]]:
    if not isinstance(value, list) or not all(isinstance(layer, list) for layer in value):
        return []
    matrix = [[finite(tokens) for tokens in layer] for layer in value]
    if any(tokens is None or tokens < 0 for layer in matrix for tokens in layer):
        raise ValueError("expert_load counts that are no numbers")
    return [[float(tokens or 0) for tokens in layer] for layer in matrix if layer]


def _sum(left: list[list[float]], right: list[list[float]]) -> list[list[float]]:
    return [[a + b for a, b in zip(one, other, strict=True)] for one, other in zip(left, right, strict=True)]


@dataclass
class RunSeries:
    """One run, all its sessions that this file holds."""

    path: Path
    run_id: str | None = None
    sessions: list[dict[str, Any]] = field(default_factory=list)
    predictions: list[dict[str, Any]] = field(default_factory=list)
    budgets: list[dict[str, Any]] = field(default_factory=list)
    profiles: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    columns: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in STEP_COLUMNS})
    pause_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PAUSE_KINDS, 0.0))
    pauses: dict[str, list[tuple[int, float]]] = field(  # kind -> (global_step, seconds)
        default_factory=lambda: {kind: [] for kind in DRAWN_PAUSE_KINDS}
    )
    experts: ExpertFrames = field(default_factory=ExpertFrames)
    remarks: list[str] = field(default_factory=list)  # what of the file could not be read

    @property
    def num_step_rows(self) -> int:
        return len(self.columns["global_step"])

    @property
    def has_rows(self) -> bool:
        return bool(self.num_step_rows or self.sessions or self.predictions or self.summary)

    def session(self, name: str) -> dict[str, Any]:
        """The latest session's mapping of that name, empty when no session has it."""
        for session in reversed(self.sessions):
            if isinstance(session.get(name), dict) and session[name]:
                return dict(session[name])
        return {}

    def session_value(self, name: str) -> Any:
        return next((one[name] for one in reversed(self.sessions) if one.get(name) is not None), None)

    def prediction(self, basis: str) -> dict[str, Any]:
        """The first prediction ``before`` the run, or the latest on the ``tokens_seen``; empty when there is none."""
        found = [row for row in self.predictions if row.get("basis") == basis]
        return {} if not found else found[0] if basis == "before" else found[-1]

    def measured(self, name: str) -> list[float]:
        """The measured values of one column, in file order."""
        return [value for value in self.columns[name] if value == value]

    def last(self, name: str) -> float | None:
        return next((value for value in reversed(self.columns[name]) if value == value), None)

    def total(self, name: str) -> float | None:
        """Sum over the steps; a row of a very long run stands for ``num_steps`` of them, with their mean."""
        column, counts = self.columns[name], self.columns["num_steps"]
        values = [value * count for value, count in zip(column, counts, strict=True) if value == value]
        return math.fsum(values) if values else None

    def summary_value(self, name: str) -> float | None:
        """The summary's figure of that name."""
        return finite((self.summary or {}).get(name))


@dataclass(frozen=True)
class Totals:
    """Seconds of a run over all its sessions; the buckets sum to ``wall_seconds``. ``spent_usd`` None: no price."""

    wall_seconds: float
    bucket_seconds: dict[str, float]  # train (data_wait left out), data_wait, rollout, eval, save, log, startup, other
    wasted_seconds: float
    spent_usd: float | None
    finished: bool

    def usd(self, seconds: float) -> float | None:
        """What that many seconds of this run cost, at the run's own mean rate."""
        if self.spent_usd is None or self.wall_seconds <= 0:
            return None
        return self.spent_usd / self.wall_seconds * seconds


def totals(run: RunSeries) -> Totals:
    """From the summary; for a run that has none (killed, still going) from its rows."""
    train = run.total("step_seconds") or 0.0
    seconds = {
        "train": train,
        "data_wait": run.total("data_wait_seconds") or 0.0,
        **run.pause_seconds,
        "rollout": run.total("rollout_seconds") or 0.0,
        "startup": sum(finite(session.get("startup_seconds")) or 0.0 for session in run.sessions),
    }
    earlier = run.sessions[0].get("earlier_seconds") if run.sessions else None
    for bucket, value in (earlier if isinstance(earlier, dict) else {}).items():
        name = str(bucket).removesuffix("_seconds")
        if name in seconds:
            seconds[name] += finite(value) or 0.0
    wall = max(run.last("elapsed_seconds") or 0.0, sum(seconds.values()) - seconds["data_wait"])
    columns = (run.columns[name] for name in ("step_seconds", "num_steps", "repeated"))
    wasted = math.fsum(
        value * count for value, count, repeated in zip(*columns, strict=True) if repeated == 1 and value == value
    )
    spent = run.last("spent_usd")
    elapsed = run.last("elapsed_seconds")
    if spent is not None and elapsed:
        spent *= wall / elapsed
    if run.summary is not None:
        wall = run.summary_value("wall_seconds") or wall
        seconds = {name: _or(run.summary_value(f"{name}_seconds"), value) for name, value in seconds.items()}
        wasted = _or(run.summary_value("wasted_seconds"), wasted)
        spent = run.summary_value("spent_usd") if run.summary_value("spent_usd") is not None else spent
    seconds["train"] = max(0.0, seconds["train"] - seconds["data_wait"])
    # Whatever no row accounts for is billed as well: it is "other", so that the buckets sum to the wall time.
    rest = wall - (sum(seconds.values()) - seconds["other"])
    seconds["other"] = rest if rest > 1e-9 * wall else 0.0  # below that it is rounding
    order = ("train", "data_wait", "rollout", "eval", "save", "log", "startup", "other")
    finished = run.summary is not None and run.summary.get("status", "finished") == "finished"
    return Totals(wall, {name: seconds[name] for name in order}, wasted, spent, finished)


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


# Reading


def find_record(path: Path) -> Path:
    """The ``run.jsonl`` that ``path`` means: the file, its ``_ftcost`` folder, or the run's output folder."""
    if not path.is_dir():
        if not path.exists():
            raise CostModelError(f"{path}: no such file; give a run.jsonl or the output folder of a run")
        return path
    for candidate in (path / "_ftcost" / "run.jsonl", path / "run.jsonl"):
        if candidate.is_file():
            return candidate
    raise CostModelError(f"{path}: holds no _ftcost/run.jsonl; give a run.jsonl or the output folder of a run")


def read_series(path: Path) -> RunSeries:
    """Read a record as far as it goes. Raises :class:`CostModelError` when it holds nothing that can be shown."""
    file = find_record(Path(path))
    reader = _Reader(file)
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
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

    def read(self, lines: Iterable[str]) -> None:
        for self.num_lines, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and isinstance(row.get("type"), str):
                self._take(row)
            else:
                self.damaged.append(self.num_lines)

    def _take(self, row: dict[str, Any]) -> None:
        kind = row["type"]
        if kind == "session" and self.ranks is None and str(row.get("run_id")) == self.latest_run_id:
            self.ranks = RankRows(self.path, self.latest_run_id)
        if self.ranks is not None:
            merged = self.ranks.merged(row)
            row = merged if isinstance(merged, dict) else dict(merged)
        if kind == "step":
            self._take_step(row)
        elif kind == "pause":
            seconds, step = finite(row.get("seconds")), finite(row.get("global_step"))
            if seconds is not None and row.get("kind") in PAUSE_KINDS:
                self.run.pause_seconds[row["kind"]] += seconds
                if row["kind"] in DRAWN_PAUSE_KINDS and step is not None:
                    self.run.pauses[row["kind"]].append((int(step), seconds))
        elif kind == "session":
            self._take_session(row)
        elif kind == "prediction":
            self.run.predictions.append(row)
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

    def _take_step(self, row: dict[str, Any]) -> None:
        if not (_is_finite(row.get("global_step")) and _is_finite(row.get("step_seconds"))):
            self.faults.add("some step rows have no global_step or step_seconds and were left out")
            return
        columns = self.run.columns
        count = len(columns["global_step"])
        for name, value in row.items():
            column = columns.get(name)
            if column is None or not _is_finite(value):
                continue  # a row has some ten fields, of more than thirty columns
            if len(column) < count:
                _pad(name, column, count)
            column.append(value)

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
        if not run.sessions:
            remarks.append("there is no session row: job, device, price and versions are not known")
        if self.earlier_run_ids:
            remarks.append(
                f"the file holds {len(self.earlier_run_ids)} earlier runs too "
                f"({', '.join(self.earlier_run_ids[-5:])}); this is the latest"
            )
        run.remarks = remarks
        for name, column in run.columns.items():
            _pad(name, column, run.num_step_rows)
        return run


def _is_finite(value: Any) -> bool:
    """As :func:`finite`, for millions of values of JSON."""
    return type(value) in _NUMBERS and -MAX_NUMBER < value < MAX_NUMBER


def _pad(name: str, column: array[float], count: int) -> None:
    """Fill the rows that did not have this field."""
    column.extend(array("d", [1.0 if name == "num_steps" else NOT_MEASURED]) * (count - len(column)))


# Thinning


def shorten(value: float) -> float | int:
    """Six significant digits, whole numbers without a point: what a chart needs and no more."""
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _buckets(count: int, parts: int) -> Iterator[tuple[int, int]]:
    parts = max(1, min(parts, count))
    for index in range(parts):
        yield index * count // parts, (index + 1) * count // parts


def pairs_of(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    """The points where both are measured."""
    return [(a, b) for a, b in zip(x, y, strict=True) if a == a and b == b]


def thin_min_max(points: Sequence[tuple[float, float]], max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most ``max_points``: the lowest and the highest of each stretch, in order, so that no outlier is lost."""
    if len(points) <= max_points:
        return list(points)
    kept: list[tuple[float, float]] = []
    for start, end in _buckets(len(points), max_points // 2):
        low = min(range(start, end), key=lambda index: points[index][1])
        high = max(range(start, end), key=lambda index: points[index][1])
        kept.extend(points[index] for index in sorted({low, high}))
    return kept


def running_median(points: Sequence[tuple[float, float]], max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """The median around each point; for a long series the median of each of ``max_points / 2`` stretches."""
    count = len(points)
    if count > max_points:
        return [
            (points[(start + end) // 2][0], statistics.median(y for _, y in points[start:end]))
            for start, end in _buckets(count, max_points // 2)
        ]
    half = max(2, min(25, count // 40))
    return [
        (x, statistics.median(y for _, y in points[max(0, index - half) : index + half + 1]))
        for index, (x, _) in enumerate(points)
    ]


def stretch_ends(count: int, max_points: int = MAX_POINTS) -> list[int]:
    """At most ``max_points`` places, the last of each stretch: for curves that belong together (a value, its band)."""
    return [end - 1 for _, end in _buckets(count, max_points)] if count else []
