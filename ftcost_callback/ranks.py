"""The processes of a distributed run: each but the main one has a small file of its own, which readers add to the record.

Nothing is exchanged while training, so nothing of ours can hang: ``run.jsonl`` holds the main process's tokens and expert
load, ``run.rank1.jsonl`` beside it those of process 1, and so on. Rows that belong together have the same session and
step. What a process did not write (it was killed, its file is elsewhere) is missing in the sums, and said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ftcost_callback.expert_balance import expert_balance
from ftcost_callback.records import ExpertLoad, RankSession, Session, Step, Summary, TokenCounts, is_readable

COUNTS: Final = ("num_tokens", "num_non_padding_tokens", "num_supervised_tokens", "num_samples")

_Mapping = Mapping[str, Any]


def rank_file_path(record: Path, rank: int) -> Path:
    """``run.jsonl`` -> ``run.rank1.jsonl``."""
    return record.with_name(f"{record.stem}.rank{rank}{record.suffix}")


def rank_file_paths(record: Path) -> dict[int, Path]:
    """rank -> file, of those that lie beside ``record``."""
    pattern = re.compile(re.escape(record.stem) + r"\.rank([1-9][0-9]*)" + re.escape(record.suffix))
    found = ((pattern.fullmatch(path.name), path) for path in record.parent.iterdir())
    return {int(match[1]): path for match, path in sorted(found, key=lambda pair: pair[1]) if match is not None}


def last_session(record: Path, run_id: str | None = None) -> dict[str, Any] | None:
    """The last session row of a record (of the run named ``run_id``); ``None`` without one, or without the file."""
    last = None
    try:
        with record.open("rb") as lines:
            for line in lines:
                if b'"session"' in line and (row := _row(line)) is not None and row.get("type") == Session.TYPE:
                    last = row if run_id is None or row.get("run_id") == run_id else last
    except OSError:
        return None
    return last


def tokens_counted(path: Path, run_id: str) -> TokenCounts | None:
    """What one process counted in one run, by its own file; ``None`` without that file."""
    if not path.is_file():
        return None
    file = _RankFile(path, run_id)
    file.read_to_the_end()
    return TokenCounts(**file.sums)


class RankRows:
    """Adds the other processes' rows to those of a record, row by row in file order, so that nothing is held in memory.

    Every ``session``, ``step``, ``expert_load`` and ``summary`` row of one run goes through :meth:`merged`.
    """

    def __init__(self, record: Path, run_id: str) -> None:
        self._ranks = {rank: _RankFile(path, run_id) for rank, path in rank_file_paths(record).items()}
        self._num_processes = 1
        self._tensor_parallel_size = 1
        self._session_index = 0
        self._num_steps_without: dict[int, int] = {}  # rank -> steps whose tokens of this rank are missing
        self._first_without: dict[int, int] = {}
        self._num_steps = 0

    def merged(self, row: _Mapping) -> _Mapping:
        """``row`` with what the other processes counted. Rows of other types come back as they are."""
        kind = row.get("type")
        if (kind != Session.TYPE and self._num_processes == 1) or not is_readable(row):
            return row
        if kind == Session.TYPE:
            return self._session(row)
        if kind == Step.TYPE:
            return self._step(row)
        if kind == ExpertLoad.TYPE:
            return self._expert_load(row)
        return self._summary(row) if kind == Summary.TYPE else row

    @property
    def remarks(self) -> list[str]:
        """Which processes' tokens are missing in the sums."""
        remarks = []
        for rank, missing in sorted(self._num_steps_without.items()):
            if rank not in self._ranks:
                remarks.append(f"there is no {_NAME.format(rank)}: tokens and expert loads of process {rank} are missing")
            else:
                remarks.append(
                    f"{_NAME.format(rank)} lacks {missing} of {self._num_steps} steps, the first is step "
                    f"{self._first_without[rank]}: its tokens are missing there"
                )
        return remarks

    def _session(self, row: _Mapping) -> _Mapping:
        self._num_processes = _whole(row.get("num_processes")) or 1
        self._tensor_parallel_size = _whole(row.get("tensor_parallel_size")) or 1
        self._session_index = _whole(row.get("session_index")) or 0
        for rank, file in self._ranks.items():
            if rank < self._num_processes:
                file.begin_session(self._session_index)
            else:
                file.forget()  # the main process took on what it had counted
        earlier = row.get("earlier_tokens")
        return {**row, "earlier_tokens": self._with_sums_of_ranks(earlier)} if earlier is not None else row

    def _step(self, row: _Mapping) -> _Mapping:
        step = _whole(row.get("global_step")) or 0
        self._num_steps += 1
        rows = [row]
        for rank in range(1, self._num_processes):
            file = self._ranks.get(rank)
            other = file.step(_whole(row.get("session_index")) or 0, step) if file is not None else None
            if other is None or other.get("num_steps", 1) != row.get("num_steps", 1):
                self._num_steps_without[rank] = self._num_steps_without.get(rank, 0) + 1
                self._first_without.setdefault(rank, step)
            else:
                rows.append(other)
        sums = {name: self._over_tensor_parallel(_sum([each.get(name) for each in rows])) for name in COUNTS}
        longest = [value for each in rows if (value := each.get("longest_sequence_tokens")) is not None]
        return {**row, **sums, "longest_sequence_tokens": max(longest, default=None), "num_ranks": len(rows)}

    def _expert_load(self, row: _Mapping) -> _Mapping:
        step = _whole(row.get("global_step")) or 0
        rows = {0: row}
        for rank in range(1, self._num_processes):
            file = self._ranks.get(rank)
            others = file.expert_loads(self._session_index, step) if file is not None else []
            if others:
                rows[rank] = _added(others, step)
        counted = {rank: each for rank, each in rows.items() if each.get("tokens_per_expert")}
        doubts = [f"process {rank}: {each.get('reason')}" for rank, each in rows.items() if each.get("status") != "recorded"]
        if len(counted) < self._num_processes:
            doubts.append(f"counted on {len(counted)} of {self._num_processes} processes")
        try:
            total = _sum_of_matrices([each["tokens_per_expert"] for each in counted.values()])
        except (ValueError, TypeError):
            total, doubts = [], ["the processes' experts differ in number"]
        if not total:
            return {**row, "status": "not_recorded", "reason": "; ".join(doubts), "tokens_per_expert": []}
        shared = self._tensor_parallel_size
        total = [[tokens // shared for tokens in layer] for layer in total]
        merged = {**next(iter(counted.values())), "tokens_per_expert": total}
        merged |= _balance(total, merged.get("layer_names") or [])
        return {**merged, "status": "partial", "reason": "; ".join(doubts)} if doubts else merged

    def _summary(self, row: _Mapping) -> _Mapping:
        own = {name: row[name] for name in COUNTS if row.get(name) is not None}
        sums = self._with_sums_of_ranks(own)
        merged = {**row, **sums}
        for name in ("num_tokens", "num_non_padding_tokens"):
            rate_name = f"{name.removeprefix('num_')}_per_second"
            rate, before, after = row.get(rate_name), own.get(name), sums.get(name)
            if rate is not None and before and after is not None:
                merged[rate_name] = rate * after / before
        return merged

    def _with_sums_of_ranks(self, own: _Mapping) -> dict[str, Any]:
        known = [file.sums for file in self._ranks.values()]
        return {
            name: self._over_tensor_parallel(_sum([value, *(sums[name] for sums in known)]))
            for name, value in own.items()
            if name in COUNTS
        }

    def _over_tensor_parallel(self, count: int | None) -> int | None:
        return count // self._tensor_parallel_size if count is not None else None


_NAME: Final = "run.rank{}.jsonl"


class _RankFile:
    """One process's rows of one run, read forward as the record's rows come by."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._steps = _Rows(path, run_id, Step.TYPE)
        self._expert_loads = _Rows(path, run_id, ExpertLoad.TYPE)
        self._sessions = _Rows(path, run_id, RankSession.TYPE)
        self._sums: dict[str, int | None] = dict.fromkeys(COUNTS, 0)
        self._num_steps = self._num_uncounted = 0

    @property
    def sums(self) -> dict[str, int | None]:
        """Over the rows taken so far and what earlier sessions had counted by this rank's ledger; a row that shows nothing
        is left out, as in the main process's sums."""
        return dict.fromkeys(COUNTS, None) if 0 < self._num_steps == self._num_uncounted else self._sums

    def begin_session(self, session_index: int) -> None:
        row = self._sessions.at(session_index, 0)
        if row is not None and (earlier := row.get("earlier_tokens")) is not None:
            self._sums = {name: earlier.get(name) for name in COUNTS}

    def read_to_the_end(self) -> None:
        while (place := self._steps.next_place) is not None:
            self.begin_session(place[0])
            self.step(*place)

    def forget(self) -> None:
        self._sums = dict.fromkeys(COUNTS, 0)

    def step(self, session_index: int, global_step: int) -> _Mapping | None:
        row = self._steps.at(session_index, global_step)
        if row is not None:
            count = row.get("num_steps", 1)
            self._num_steps += 1
            if all(row.get(name) is None for name in COUNTS):
                self._num_uncounted += 1
                return row
            for name in COUNTS:
                value = row.get(name)
                self._sums[name] = _sum([self._sums[name], value * count if value is not None else None])
        return row

    def expert_loads(self, session_index: int, global_step: int) -> list[_Mapping]:
        """Those since the last call: a process may have counted to other steps than the main one."""
        return self._expert_loads.up_to(session_index, global_step)


class _Rows:
    """The rows of one type, each asked for once, in the order of session and step."""

    def __init__(self, path: Path, run_id: str, kind: str) -> None:
        self._rows = _rows_of(path, run_id, kind)
        self._next = next(self._rows, None)

    @property
    def next_place(self) -> tuple[int, int] | None:
        """(session, step) of the row that comes next."""
        return self._next[0] if self._next is not None else None

    def at(self, session_index: int, global_step: int) -> _Mapping | None:
        wanted = (session_index, global_step)
        while self._next is not None and self._next[0] < wanted:
            self._next = next(self._rows, None)
        if self._next is None or self._next[0] != wanted:
            return None
        row = self._next[1]
        self._next = next(self._rows, None)
        return row

    def up_to(self, session_index: int, global_step: int) -> list[_Mapping]:
        rows = []
        while self._next is not None and self._next[0] <= (session_index, global_step):
            if self._next[0][0] == session_index:
                rows.append(self._next[1])
            self._next = next(self._rows, None)
        return rows


def _added(rows: list[_Mapping], global_step: int) -> _Mapping:
    """Expert loads of one process as one row, which should reach to ``global_step``."""
    counted = [row for row in rows if row.get("tokens_per_expert")]
    doubtful = next((row for row in rows if row.get("status") != "recorded"), None)
    merged = dict(rows[-1])
    try:
        merged["tokens_per_expert"] = _sum_of_matrices([row["tokens_per_expert"] for row in counted])
    except (ValueError, TypeError):
        return {**merged, "tokens_per_expert": [], "status": "not_recorded", "reason": "its experts changed in number"}
    if doubtful is not None:
        return {**merged, "status": "partial", "reason": doubtful.get("reason")}
    if rows[-1].get("global_step") != global_step:
        return {**merged, "status": "partial", "reason": f"its last row is that of step {rows[-1].get('global_step')}"}
    return merged


def _rows_of(path: Path, run_id: str, kind: str) -> Iterator[tuple[tuple[int, int], _Mapping]]:
    """((session, step), row), the rows of another run and damaged lines passed over."""
    session_index: int | None = None
    with path.open("rb") as lines:
        for line in lines:
            row = _row(line)
            if row is None:
                continue
            if row["type"] == RankSession.TYPE:
                session_index = _whole(row.get("session_index")) if row.get("run_id") == run_id else None
            if session_index is not None and row["type"] == kind:
                yield (session_index, _whole(row.get("global_step")) or 0), row


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and "type" in row and is_readable(row) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _balance(total: list[list[int]], layer_names: list[str]) -> dict[str, Any]:
    """What a row says of its counts, for those of all processes."""
    balance = expert_balance(total)
    if balance is None:
        return {}
    row = balance.worst_layer
    return {
        "load_max_over_mean": balance.load_max_over_mean,
        "worst_layer": layer_names[row] if row < len(layer_names) else str(row),
        "worst_layer_load_max_over_mean": balance.worst_layer_load_max_over_mean,
        "num_dead_experts": balance.num_dead_experts,
    }


def _sum(values: list[int | None]) -> int | None:
    """``None`` if one is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _sum_of_matrices(matrices: list[list[list[int]]]) -> list[list[int]]:
    """Raises ``ValueError`` for matrices of different shapes."""
    return [[sum(tokens) for tokens in zip(*layers, strict=True)] for layers in zip(*matrices, strict=True)]
