"""The run record (``<output_dir>/_ftcost/run.jsonl``) and the ledger in each checkpoint: write, read, resume.

The record is append-only, one JSON object a line, handed to the operating system at least once a second of training, so
that a killed process loses no more than that. A new run in the same folder appends its rows under its own ``run_id``;
readers take the last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from costmodel.errors import CostModelError
from costmodel.units import SECONDS_PER_HOUR
from ftcost_callback.ranks import RankRows
from ftcost_callback.recorder import BUCKETS, TOKEN_FIELDS, Pace, Totals
from ftcost_callback.records import (
    ROW_TYPES,
    SCHEMA_VERSION,
    Budget,
    ExpertLoad,
    OutOfMemory,
    Pause,
    Prediction,
    Profile,
    Row,
    Session,
    Step,
    Summary,
    TokenCounts,
    is_number,
    is_readable,
)

FOLDER_NAME: Final = "_ftcost"  # the underscore keeps push_to_hub from publishing it
FILE_NAME: Final = "run.jsonl"
LEDGER_NAME: Final = "ftcost_ledger.json"
RANK_LEDGER_NAME: Final = "ftcost_ledger.rank{}.json"
MAX_COUNT: Final = 2**53  # whole numbers beyond it are no steps and no sessions
_MOST_AT_ONCE: Final = 64  # records in one folder
FULL_STEPS: Final = 50_000  # about 15 MB; a fine-tune rarely has more

_RowType = TypeVar("_RowType", bound=Row)


def run_file_path(output_dir: str | os.PathLike[str]) -> Path:
    return Path(output_dir) / FOLDER_NAME / FILE_NAME


class RunFile:
    """Appends rows, some at once. Raises ``OSError`` when the disk does.

    Rows wait in memory until :meth:`flush`, :meth:`close`, or the end of the process in any way but a kill: encoding and
    writing many together costs a fraction of doing it for each.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Where another process is writing to ``path``, to one beside it: one file does not tell rows of two runs apart."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._waiting: list[Row] = []
        self._process_id = os.getpid()
        for number in range(1, _MOST_AT_ONCE + 1):
            self.path = path if number == 1 else path.with_suffix(f".{number}{path.suffix}")
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            if number == _MOST_AT_ONCE or _lock(descriptor):  # a disk may refuse every lock
                break
            os.close(descriptor)
        self._descriptor: int | None = descriptor
        self._size_left: int | None = None  # bytes of the file when it was unlocked, and our own rows since
        # An exception that ends training is told to no callback; the interpreter's exit is.
        self._at_exit = weakref.finalize(self, _write_rows, self._descriptor, self._waiting, self._process_id)
        if _ends_inside_a_line(descriptor):
            _write(self._descriptor, b"\n")  # the line that a kill cut off stays alone

    def unlock(self) -> None:
        """Others may write to its path from now on: the training is over, though its process may live on. Once another run
        has begun there, rows of this one would count as that one's, and are dropped."""
        if self._descriptor is None or self._process_id != os.getpid():
            return
        with contextlib.suppress(OSError):
            self._size_left = os.fstat(self._descriptor).st_size
            if fcntl is not None:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    @property
    def is_replaced(self) -> bool:
        """Whether its path was deleted, or is another file by now."""
        if self._descriptor is None or self._process_id != os.getpid():
            return False
        try:
            return not os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # a disk that does not answer; writing will say so

    def reopened(self, first: Row | None) -> RunFile:
        """At the same path, its folder made anew: ``first``, then the rows that wait. This one is closed."""
        again = RunFile(self.path)
        waiting, self._waiting[:] = list(self._waiting), ()
        again._waiting += [*(() if first is None or first in waiting else (first,)), *waiting]
        self.close()
        return again

    def append(self, row: Row) -> None:
        """Keep one row for the next :meth:`flush`; after :meth:`unlock` nothing waits."""
        self.extend([row])

    def extend(self, rows: Sequence[Row]) -> None:
        """Keep rows for the next :meth:`flush`; after :meth:`unlock` nothing waits."""
        if self._descriptor is None:
            raise OSError(f"{self.path} is closed")
        self._waiting += rows
        if self._size_left is not None:  # the end of the process writes what waits without a look at the file
            self._write_waiting(self._descriptor)

    def flush(self) -> None:
        """Hand the rows that wait to the operating system, where a kill cannot reach them."""
        if self._descriptor is not None and self._waiting:
            self._write_waiting(self._descriptor)

    def _write_waiting(self, descriptor: int) -> None:
        if self._process_id != os.getpid():
            return
        if self._size_left is None:
            _lock(descriptor)  # anew: whoever reads the file in this process lets the lock go when he closes it
            _write_rows(descriptor, self._waiting, self._process_id)
        elif os.fstat(descriptor).st_size != self._size_left:
            self._waiting.clear()
        else:
            _write_rows(descriptor, self._waiting, self._process_id)
            self._size_left = os.fstat(descriptor).st_size

    def close(self) -> None:
        """Flush, and let the file go even if that fails."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        self._at_exit.detach()
        try:
            self._write_waiting(descriptor)
        finally:
            os.close(descriptor)


class StepThinner:
    """Keeps the record of a very long run bounded: up to ``full_steps`` a row each step, then a row each 2, 4, 8, ...
    steps, doubling as the run doubles.

    Such a row has ``num_steps``; its seconds and tokens are means, and whatever is a state (elapsed time, dollars) is the
    last step's.
    """

    def __init__(self, full_steps: int = FULL_STEPS) -> None:
        self._full_steps = full_steps
        self._num_rows = 0  # of single steps so far
        self._waiting: list[Step] = []

    @property
    def is_thinning(self) -> bool:
        return self._num_rows > self._full_steps

    def add(self, row: Step) -> Step | None:
        """The row to write now, if any."""
        self._num_rows += 1
        if self._num_rows <= self._full_steps:
            return row
        self._waiting.append(row)
        stride = 2 << ((self._num_rows - 1) // self._full_steps).bit_length() - 1
        return self.take() if len(self._waiting) >= stride else None

    def take(self) -> Step | None:
        """What waits, as one row; ``None`` if nothing does."""
        rows, self._waiting = self._waiting, []
        if len(rows) <= 1:
            return rows[0] if rows else None
        fields: dict[str, Any] = {}
        for row in rows:  # a state that only some rows know is the last one known
            fields |= {name: value for name in _STEP_FIELDS if (value := getattr(row, name)) is not None}
        fields |= {name: _mean(rows, name) for name in _STEP_SECONDS}
        fields |= {name: round(mean) if (mean := _mean(rows, name)) is not None else None for name in _STEP_COUNTS}
        fields["longest_sequence_tokens"] = max(row.longest_sequence_tokens or 0 for row in rows) or None
        fields["repeated"] = True if all(row.repeated for row in rows) else None
        return Step(**fields | {"num_steps": len(rows)})


_STEP_FIELDS: Final = tuple(each.name for each in dataclasses.fields(Step))
_STEP_SECONDS: Final = (
    "step_seconds",
    "data_wait_seconds",
    "rollout_seconds",
    "forward_seconds",
    "backward_seconds",
    "optimizer_seconds",
)
_STEP_COUNTS: Final = (*TOKEN_FIELDS, "num_micro_batches")


def _mean(rows: list[Step], name: str) -> float | None:
    values = [getattr(row, name) for row in rows]
    return None if any(value is None for value in values) else sum(values) / len(values)


_encode: Final = json.JSONEncoder(allow_nan=False).encode


def _write_rows(descriptor: int, rows: list[Row], process_id: int) -> None:
    """Encode and write ``rows``, and empty the list; a forked child leaves its parent's rows alone."""
    if process_id != os.getpid():
        return
    if rows:
        content, rows[:] = _lines(rows).encode(), ()
        _write(descriptor, content)


def _lines(rows: list[Row]) -> str:
    """One JSON object a line. Steps that follow each other are encoded in one call, most of which is its beginning."""
    lines = []
    for is_step, group in itertools.groupby(rows, lambda row: type(row) is Step):
        plain = [row.to_row() for row in group]
        if is_step:  # numbers alone, so that this stands between two of them and nowhere else
            lines.append(_encode(plain)[1:-1].replace("}, {", "}\n{"))
        else:
            lines += map(_encode, plain)
    return "\n".join(lines) + "\n"


def _write(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _lock(descriptor: int) -> bool:
    """Take the lock; false where another process writes there.

    It ends with the process, and a forked child, which may outlive it for some seconds, has none.
    """
    if fcntl is None:
        return True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)  # other errors: a disk that knows no locks
    return True


def _ends_inside_a_line(descriptor: int) -> bool:
    if os.fstat(descriptor).st_size == 0:
        return False
    os.lseek(descriptor, -1, os.SEEK_END)  # rows are appended, wherever it stands
    return os.read(descriptor, 1) != b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a run had taken when this checkpoint was written: enough to go on counting on another machine."""

    run_id: str
    session_index: int
    global_step: int
    totals: Totals
    spent_usd: float | None = None
    spent_seconds: float | None = None  # of the run, that those dollars are for, where later ones had no price; None: all
    energy_joules: float | None = None
    crossed_thresholds: tuple[str, ...] = ()
    pace: Pace | None = None

    def to_dict(self) -> dict[str, Any]:
        fields = {name: value for name in _LEDGER_FIELDS if (value := getattr(self, name)) is not None}
        pace = {"pace": self.pace.to_dict()} if self.pace is not None else {}
        return {"schema_version": SCHEMA_VERSION, **fields, "totals": self.totals.to_dict(), **pace}


_ROUNDED_SECONDS: Final = 1e-3  # what rows that stand for many steps may lose
_LEDGER_FIELDS: Final = (
    "run_id",
    "session_index",
    "global_step",
    "spent_usd",
    "spent_seconds",
    "energy_joules",
    "crossed_thresholds",
)


def ledger_path(checkpoint_dir: str | os.PathLike[str], rank: int = 0) -> Path:
    """Of the main process, or of another one."""
    return Path(checkpoint_dir) / (RANK_LEDGER_NAME.format(rank) if rank else LEDGER_NAME)


def ranks_with_ledger(checkpoint_dir: str | os.PathLike[str]) -> list[int]:
    """The processes other than the main one that left a ledger there."""
    prefix, suffix = RANK_LEDGER_NAME.split("{}")
    numbers = (path.name[len(prefix) : -len(suffix)] for path in Path(checkpoint_dir).glob(f"{prefix}*{suffix}"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def write_ledger(checkpoint_dir: str | os.PathLike[str], ledger: Ledger, *, rank: int = 0) -> None:
    """Into the checkpoint's folder, whole or not at all."""
    path = ledger_path(checkpoint_dir, rank)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(ledger.to_dict(), allow_nan=False) + "\n", encoding="utf-8")
    unfinished.replace(path)


def read_ledger(checkpoint_dir: str | os.PathLike[str], *, rank: int = 0) -> Ledger | None:
    """``None``: no ledger there. Raises :class:`CostModelError` when it cannot be read."""
    path = ledger_path(checkpoint_dir, rank)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        spending = {name: fields.get(name) for name in ("spent_usd", "spent_seconds", "energy_joules")}
        for name, value in [*fields["totals"].items(), *spending.items()]:
            if value is not None and not (is_number(value) and value >= 0):
                raise ValueError(f"{name} is {value!r}")
        for name in ("session_index", "global_step"):
            if type(fields[name]) is not int or not 0 <= fields[name] < MAX_COUNT:
                raise ValueError(f"{name} is {fields[name]!r}")
        if not isinstance(fields["run_id"], str):
            raise TypeError(f"run_id is {fields['run_id']!r}")
        return Ledger(
            run_id=fields["run_id"],
            session_index=fields["session_index"],
            global_step=fields["global_step"],
            totals=Totals.from_dict(fields["totals"]),
            spent_usd=fields.get("spent_usd"),
            spent_seconds=fields.get("spent_seconds"),
            energy_joules=fields.get("energy_joules"),
            crossed_thresholds=tuple(fields.get("crossed_thresholds", ())),
            pace=Pace.from_dict(fields.get("pace")),
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise CostModelError(f"{path} cannot be read as a ledger ({type(error).__name__}: {error})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The rows of one run, in the order they were written. ``num_unread_lines``: cut off, of an unknown type, or holding
    what this version does not know."""

    path: Path
    run_id: str
    sessions: list[Session] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    expert_loads: list[ExpertLoad] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)
    budgets: list[Budget] = field(default_factory=list)
    out_of_memory: list[OutOfMemory] = field(default_factory=list)
    summaries: list[Summary] = field(default_factory=list)  # one for each session that ended in order
    totals: Totals = field(default_factory=Totals)  # summed over the rows; what a killed session left is inside
    spent_usd: float | None = None  # of the first spent_seconds of the run; those after them had no price
    spent_seconds: float | None = None
    num_unread_lines: int = 0
    remarks: list[str] = field(default_factory=list)  # processes whose tokens are missing

    @property
    def summary(self) -> Summary | None:
        """Totals over the run; ``None`` while it runs and after a kill."""
        ended = self.summaries[-1] if self.summaries else None
        return ended if ended is not None and ended.num_sessions == self.sessions[-1].session_index + 1 else None

    @property
    def last_step(self) -> int:
        """The furthest optimizer step that any session did."""
        return max((step.global_step for step in self.steps), default=0)


def read_run(path: str | os.PathLike[str], *, run_id: str | None = None, all_ranks: bool = True) -> RunRecord:
    """The last run in a record (or the one named ``run_id``), its tokens and expert loads summed over its processes.

    ``path``: as :func:`find_record` takes it. ``all_ranks=False``: the main process alone. A line that was cut off, a row of
    an unknown type or with a value of the wrong kind, and unknown fields are passed over. Raises :class:`CostModelError` for
    anything that is no run record.
    """
    file = find_record(Path(path))
    rows: list[Mapping[str, Any]] = []
    num_unread_lines = 0
    for row in _read_lines(file):
        if row is None:
            num_unread_lines += 1
        else:
            rows.append(row)
    starts = [place for place, row in enumerate(rows) if row.get("type") == Session.TYPE and row.get("run_id")]
    if not starts:
        raise CostModelError(
            f"{file} is no ftcost run record (it holds no session row); "
            f"give the output_dir of a run, its {FOLDER_NAME} folder or {FILE_NAME}"
        )
    wanted = run_id if run_id is not None else str(rows[starts[-1]]["run_id"])
    record = RunRecord(path=file, run_id=wanted)
    inside = False
    totals = _RowTotals()
    ranks = RankRows(file, wanted) if all_ranks else None
    for row in rows:
        if row.get("type") == Session.TYPE:
            inside = row.get("run_id") == wanted
        if not inside:
            continue
        if not is_readable(row):
            num_unread_lines += 1
            continue
        if ranks is not None:
            row = ranks.merged(row)
        if _add(record, row):
            totals.add(row)
        else:
            num_unread_lines += 1
    totals.bill()
    if not record.sessions:
        known = ", ".join(sorted({str(rows[place]["run_id"]) for place in starts}))
        raise CostModelError(f"{file} holds no run {wanted!r}; it holds {known}")
    return dataclasses.replace(
        record,
        totals=totals.totals.with_known_tokens(),
        spent_usd=totals.spent_usd,
        spent_seconds=totals.spent_at if totals.spent_usd is not None else None,
        num_unread_lines=num_unread_lines,
        remarks=ranks.remarks if ranks is not None else [],
    )


class _RowTotals:
    """Sums the rows of a run. A session begins from what its own row says the sessions before it had taken."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.spent_usd: float | None = None
        self.spent_at = 0.0  # seconds of the run, as of which that is
        self._usd_per_hour: float | None = None  # of the session

    def bill(self) -> None:
        """What the session took since the last row that says what was spent, at its price: it ends, or broke off there.
        What had no price before counts at this one."""
        seconds = self.totals.wall_seconds - self.spent_at
        if self._usd_per_hour is not None and (self.spent_usd is not None or not self.spent_at):
            self.spent_usd = (self.spent_usd or 0.0) + max(0.0, seconds) / SECONDS_PER_HOUR * self._usd_per_hour
            self.spent_at = self.totals.wall_seconds

    def add(self, row: Mapping[str, Any]) -> None:
        """A row that is readable (:func:`is_readable`); null is as absent."""
        row = {name: value for name, value in row.items() if value is not None}
        kind = row["type"]
        if kind == Session.TYPE:
            self.bill()
            if (earlier := row.get("earlier_seconds")) is not None:
                tokens = row.get("earlier_tokens") or {}
                known = {name: earlier.get(name, 0.0) for name in BUCKETS}
                known |= {name: tokens.get(name) for name in TOKEN_FIELDS if name != "num_samples"}
                for name in ("num_steps", "num_uncounted_steps", "data_wait_seconds", "wasted_seconds"):
                    known |= {name: value} if (value := row.get(f"earlier_{name}")) is not None else {}
                if 0 < known.get("num_steps", 0) <= known.get("num_uncounted_steps", 0):
                    known |= dict.fromkeys(TOKEN_FIELDS, 0)  # nothing was counted, and these sums are of what is
                recorded, self.totals = self.totals.wall_seconds, dataclasses.replace(self.totals, **known)
                if abs(self.totals.wall_seconds - recorded) > _ROUNDED_SECONDS:  # the rest stands in a record elsewhere
                    self.spent_at = self.totals.wall_seconds
            self._usd_per_hour = row.get("usd_per_hour")
            self.totals = self.totals.plus(startup_seconds=row.get("startup_seconds", 0.0))
        elif kind == Step.TYPE:
            count = row.get("num_steps") or 1
            seconds = row["step_seconds"] * count
            tokens = {name: value * count if (value := row.get(name)) is not None else None for name in TOKEN_FIELDS}
            self.totals = self.totals.plus(
                train_seconds=seconds,
                data_wait_seconds=row.get("data_wait_seconds", 0.0) * count,
                rollout_seconds=row.get("rollout_seconds", 0.0) * count,
                wasted_seconds=seconds + row.get("rollout_seconds", 0.0) * count if row.get("repeated") else 0.0,
                num_steps=count,
            ).plus_tokens(TokenCounts(**tokens), num_steps=count)
            if "spent_usd" in row:
                self.spent_usd = row["spent_usd"]
                self.spent_at = row.get("elapsed_seconds", self.totals.wall_seconds)
        elif kind == Pause.TYPE:
            self.totals = self.totals.plus(**{f"{row['kind']}_seconds": row["seconds"]})
        elif kind == Summary.TYPE and "spent_usd" in row:
            self.spent_usd, self.spent_at = row["spent_usd"], self.totals.wall_seconds


def find_record(path: Path) -> Path:
    """The record that ``path`` means: the file, its ``_ftcost`` folder, the run's output folder, or a checkpoint in it."""
    places = [path / FOLDER_NAME / FILE_NAME, path / FILE_NAME]
    if is_checkpoint := path.is_dir() and (path.name.startswith("checkpoint-") or (path / "trainer_state.json").is_file()):
        places.append(run_file_path(path.absolute().parent))
    for file in places:
        if file.is_file():
            return file
    way_out = f"give the output_dir of a run, its {FOLDER_NAME} folder or {FILE_NAME}"
    if is_checkpoint:
        raise CostModelError(f"{path} is a checkpoint, and no {FOLDER_NAME}/{FILE_NAME} lies beside it; {way_out}")
    if path.is_dir():
        raise CostModelError(f"{path}: holds no {FOLDER_NAME}/{FILE_NAME}; {way_out}")
    if not path.exists():
        raise CostModelError(f"{path}: no such file; {way_out}")
    return path


def _read_lines(file: Path) -> Iterator[Mapping[str, Any] | None]:
    with file.open("rb") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # RecursionError: nested deeper than anything of ours
                row = None
            yield row if isinstance(row, dict) and "type" in row else None


def _add(record: RunRecord, row: Mapping[str, Any]) -> bool:
    """Put a row into its list; false when its type is unknown or it lacks what its type needs."""
    try:
        kind = row["type"]
        if kind == Prediction.TYPE:
            estimate = {name: value for name, value in row.items() if name not in {"type", "basis", "global_step"}}
            record.predictions.append(
                Prediction(basis=row["basis"], global_step=row.get("global_step", 0), estimate=estimate)
            )
            return True
        lists: dict[type[Row], list[Any]] = {
            Session: record.sessions,
            Step: record.steps,
            Pause: record.pauses,
            ExpertLoad: record.expert_loads,
            Profile: record.profiles,
            Budget: record.budgets,
            OutOfMemory: record.out_of_memory,
            Summary: record.summaries,
        }
        row_type: type[Row] | None = ROW_TYPES.get(kind)
        if row_type is None:
            return False
        lists[row_type].append(_from_row(row_type, row))
    except (KeyError, TypeError):
        return False
    return True


def _from_row(row_type: type[_RowType], row: Mapping[str, Any]) -> _RowType:
    known = {each.name for each in dataclasses.fields(row_type)}
    return row_type(**{name: value for name, value in row.items() if name in known})
