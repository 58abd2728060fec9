"""A recorded run -> its job: "this ran on an A10; what would it cost on an H100?"

Reads ``run.jsonl`` as docs/run_record.md describes it: the job of the last session of the last run in the file, and from
its steps what no job said before the run. The file is JSON, one row a line; a damaged line is passed over.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from costmodel.errors import CostModelError, one_line
from costmodel.importers.reading import ImportedJob, Origin
from costmodel.specs import Job

FOLDER: Final = "_ftcost"
FILE: Final = "run.jsonl"
MAX_BYTES: Final = 256 * 1000 * 1000  # some 15 MB for 50,000 steps, after which rows stand for several
_MAX_ROW_BYTES: Final = 10 * 1000 * 1000
_FIRST_ROWS: Final = frozenset({"session", "rank_session", "prediction", "step"})
_WAY_OUT: Final = "give the configuration that it was trained with, one of its checkpoints, or flags: --model, ..."

# Recorded fields that say nothing once another value is given for what they hang on: a field, or the data set.
_TIED: Final = {
    "usd_per_gpu_hour": "gpu",
    "calibration": "gpu",
    "expert_imbalance": "model",
    "num_samples": "dataset",
    "supervised_fraction": "dataset",
}


def find_record(path: str) -> str | None:
    """The record that ``path`` means: the file, its ``_ftcost`` folder, or the run's output folder; ``None`` if none."""
    if os.path.isdir(path):
        places = (os.path.join(path, FOLDER, FILE), os.path.join(path, FILE))
        return next((place for place in places if os.path.isfile(place)), None)
    return path if path.lower().endswith(".jsonl") and _begins_like_a_record(path) else None


def _begins_like_a_record(path: str) -> bool:
    """Whether the first row says so; a job has no ``type``. A pipe is not looked into: what was read would be gone."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            row = _row(file.readline(_MAX_ROW_BYTES))
    except (OSError, ValueError):  # ValueError: a null byte in the path
        return False
    return row is not None and row["type"] in _FIRST_ROWS


def read(path: str) -> ImportedJob:
    """The job of the record at ``path``, as :func:`find_record` found it. Raises :class:`CostModelError` without one."""
    run = _last_run(path)
    number, session = run.described()
    job: dict[str, Any] = session["job"]
    fields = {name: value for name, value in job.items() if name in Job.model_fields and value is not None}
    where = f"the job of session {number} in {path}" if len(run.sessions) > 1 else f"the job in {path}"
    origins = {name: Origin("file", where) for name in fields}
    warnings: list[str] = []
    if number < len(run.sessions):
        warnings.append(f"{path}: session {len(run.sessions)} was recorded without its job; session {number}'s is taken")

    def add(name: str, value: Any, how: str) -> None:
        if value is not None and name not in fields:
            fields[name] = value
            origins[name] = Origin("file", f"{how} in {path}")

    if not fields.get("num_samples"):
        add("max_steps", _whole(session.get("max_steps")), "steps of the run, at its batch,")
    steps = run.steps
    seen = f"measured over {steps.num_steps:,} steps"
    if "lengths" not in fields and not fields.get("packing") and steps.mean_tokens is not None:
        add("lengths", {"mean": steps.mean_tokens, "max": steps.longest_tokens}, seen)
        warnings.append(
            f"lengths: the data set's were not recorded; a mean of {steps.mean_tokens:,.0f} tokens and a longest of "
            f"{steps.longest_tokens:,} are {seen}"
        )
    if "max_length" not in fields and steps.longest_tokens:
        add("max_length", steps.longest_tokens, f"the longest sequence {seen}")
        warnings.append(
            f"max_length: none was recorded; the longest sequence of its steps is taken, {steps.longest_tokens:,}"
        )
    tied = dict(_TIED)
    if fields.get("framework") != "trl":  # nobody's setting, but the longest sequence that there was
        tied["max_length"] = "lengths"
    add("supervised_fraction", steps.supervised_fraction, seen)
    add("expert_imbalance", run.expert_imbalance, "load_max_over_mean of the run")
    known = set(Job.model_fields)
    return ImportedJob(
        tool="run record",
        tool_version="",
        where=path,
        read_fields=fields,
        origins=origins,
        understood=tuple(name for name in job if name in known),
        unknown=tuple(name for name in job if name not in known),
        warnings=tuple(map(one_line, warnings)),
        tied={name: owner for name, owner in tied.items() if name in fields},
    )


@dataclass
class _Steps:
    """Sums over the steps that say how many samples and tokens they held."""

    num_steps: int = 0
    num_samples: float = 0.0
    num_non_padding_tokens: float = 0.0
    num_supervised_tokens: float = 0.0
    knows_supervised: bool = True
    longest_tokens: int = 0

    def add(self, row: Mapping[str, Any]) -> None:
        names = ("num_samples", "num_non_padding_tokens", "longest_sequence_tokens")
        samples, tokens, longest = (_whole(row.get(name)) for name in names)
        if samples is None or tokens is None or longest is None:
            return
        count, supervised = _whole(row.get("num_steps")) or 1, _number(row.get("num_supervised_tokens"))
        self.num_steps += count
        self.num_samples += count * samples
        self.num_non_padding_tokens += count * tokens
        self.num_supervised_tokens += count * (supervised or 0.0)
        self.knows_supervised &= supervised is not None
        self.longest_tokens = max(self.longest_tokens, longest)

    @property
    def mean_tokens(self) -> float | None:
        return self.num_non_padding_tokens / self.num_samples if self.num_samples else None

    @property
    def supervised_fraction(self) -> float | None:
        if not (self.knows_supervised and self.num_supervised_tokens > 0):
            return None
        return min(1.0, self.num_supervised_tokens / self.num_non_padding_tokens)


@dataclass
class _Run:
    """What is read of one run."""

    path: str
    sessions: list[dict[str, Any]] = field(default_factory=list)
    steps: _Steps = field(default_factory=_Steps)
    expert_imbalance: float | None = None

    def described(self) -> tuple[int, dict[str, Any]]:
        """Number, from 1, and row of the last session with a job. Raises :class:`CostModelError` where there is none."""
        for number, session in reversed(list(enumerate(self.sessions, start=1))):
            if isinstance(session.get("job"), dict) and session["job"]:
                return number, session
        if not self.sessions:
            raise CostModelError(
                f"{self.path} is no run record: it holds no session row; give the output folder of a run or its {FILE}"
            )
        notes = self.sessions[-1].get("notes")
        said = [str(note) for note in notes if str(note).startswith("no prediction: ")] if isinstance(notes, list) else []
        why = f" ({one_line(said[0].removeprefix('no prediction: '))})" if said else ""
        raise CostModelError(f"{self.path}: the run was recorded without its job{why}; {_WAY_OUT}")


def _last_run(path: str) -> _Run:
    """A new run in the same folder appends its rows under its own ``run_id``."""
    run, run_id = _Run(path), None
    for row in _rows(path):
        kind = row["type"]
        if kind == "session":
            if run.sessions and row.get("run_id") != run_id:
                run = _Run(path)
            run_id = row.get("run_id")
            run.sessions.append(row)
        elif kind == "step":
            run.steps.add(row)
        elif kind == "summary" and isinstance(balance := row.get("expert_balance"), dict):
            load = _number(balance.get("load_max_over_mean"))
            run.expert_imbalance = load if load is not None and load >= 1 else run.expert_imbalance
    return run


def _rows(path: str) -> Iterator[dict[str, Any]]:
    try:
        if os.path.getsize(path) > MAX_BYTES:
            raise CostModelError(f"{path} is larger than {MAX_BYTES // 1_000_000} MB: not a run record")
        with open(path, "rb") as file:
            yield from (row for line in file if (row := _row(line)) is not None)
    except OSError as error:
        raise CostModelError(f"cannot read {path}: {error.strerror or error}") from None


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):  # cut off by a kill, or no JSON at all
        return None
    return row if isinstance(row, dict) and isinstance(row.get("type"), str) else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) < 2**53 and math.isfinite(value) else None


def _whole(value: Any) -> int | None:
    """A count above 0."""
    number = _number(value)
    return int(number) if number is not None and number >= 1 else None
