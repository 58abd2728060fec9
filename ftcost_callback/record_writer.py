"""Writes the rows of one session: bounded in very long runs, and through the boundary, so that a full disk ends the
record and nothing else."""

from __future__ import annotations

import dataclasses
import logging
import operator
import os
from collections.abc import Callable, Sequence
from typing import Final

from ftcost_callback.boundary import Boundary
from ftcost_callback.expert_balance import expert_balance
from ftcost_callback.ranks import rank_file_path
from ftcost_callback.records import ExpertLoad, Pause, PauseKind, RankSession, Row, Session, Step
from ftcost_callback.run_file import RunFile, StepThinner, run_file_path

_log = logging.getLogger("ftcost_callback")

FULL_EXPERT_COUNTS: Final = 500_000  # numbers, about 3 MB


class ExpertThinner:
    """Keeps the expert loads of a very long run bounded: up to ``full_counts`` numbers a row at each report, then a row for
    each 2, 4, 8, ... of them, doubling as their number doubles. Such a row holds the sums, and loses no token.
    """

    def __init__(self, full_counts: int = FULL_EXPERT_COUNTS) -> None:
        self._full_counts = full_counts
        self._num_loads = 0
        self._waiting: ExpertLoad | None = None
        self._num_waiting = 0

    def add(self, load: ExpertLoad) -> ExpertLoad | None:
        """The row to write now, if any."""
        num_counts = sum(map(len, load.tokens_per_expert))
        if num_counts == 0:
            return load  # it says why nothing is counted
        self._num_loads += 1
        full = max(1, self._full_counts // num_counts)
        if self._num_loads <= full:
            return load
        self._waiting = load if self._waiting is None else _summed(self._waiting, load)
        self._num_waiting += 1
        stride = 2 << ((self._num_loads - 1) // full).bit_length() - 1
        return self.take() if self._num_waiting >= stride else None

    def take(self) -> ExpertLoad | None:
        """What waits, as one row; ``None`` if nothing does."""
        waiting, self._waiting, self._num_waiting = self._waiting, None, 0
        return waiting


def _summed(earlier: ExpertLoad, later: ExpertLoad) -> ExpertLoad:
    """Of both stretches of steps; what is a state is the later one's."""
    counts = [
        list(map(operator.add, *layers)) for layers in zip(earlier.tokens_per_expert, later.tokens_per_expert, strict=True)
    ]
    doubtful = later if later.status != "recorded" else earlier
    load = dataclasses.replace(later, tokens_per_expert=counts, status=doubtful.status, reason=doubtful.reason)
    balance = expert_balance(counts)
    if balance is None or later.load_max_over_mean is None:
        return load
    return dataclasses.replace(
        load,
        load_max_over_mean=balance.load_max_over_mean,
        worst_layer=load.layer_names[balance.worst_layer],
        worst_layer_load_max_over_mean=balance.worst_layer_load_max_over_mean,
        num_dead_experts=balance.num_dead_experts,
    )


class RecordWriter:
    """``open`` once; rows given before it, or after ``close``, go nowhere."""

    def __init__(self, boundary: Boundary, clock: Callable[[], float]) -> None:
        self._boundary = boundary
        self._clock = clock
        self._steps = StepThinner()
        self._experts = ExpertThinner()
        self._log_seconds = 0.0
        self._session: Row | None = None  # whose rows these are
        self._said_replaced = False
        self.file: RunFile | None = None
        self.flushed_at = 0.0  # clock time

    def open(self, output_dir: str | os.PathLike[str], *, rank: int = 0) -> None:
        """The run record, or the file beside it of a process other than the main one."""

        def open_file() -> None:
            record = run_file_path(output_dir)
            path = rank_file_path(record, rank) if rank else record
            self.file = RunFile(path)
            if self.file.path != path:
                _log.warning(
                    "ftcost: another training writes to %s: the record of this one is %s beside it; "
                    "give each an output_dir of its own",
                    path,
                    self.file.path.name,
                )

        self._boundary.call("run record", open_file)

    def write(self, row: Row) -> None:
        if isinstance(row, (Session, RankSession)):
            self._session = row
        if self.file is not None:
            file = self.file
            self._boundary.call("run record", lambda: file.append(row))

    def write_step(self, row: Step) -> None:
        self.write_steps([row])

    def write_steps(self, rows: Sequence[Step]) -> None:
        thinned = [each for row in rows if (each := self._steps.add(row)) is not None]
        if thinned and self.file is not None:
            file = self.file
            self._boundary.call("run record", lambda: file.extend(thinned))

    def write_experts(self, load: ExpertLoad) -> None:
        thinned = self._experts.add(load)
        if thinned is not None:
            self.write(thinned)

    def write_pause(self, kind: PauseKind, seconds: float, *, global_step: int) -> None:
        """Log pauses of a very long run wait for the next step row that is written."""
        if kind == "log" and self._steps.is_thinning:
            self._log_seconds += seconds
            return
        self.write(Pause(kind=kind, global_step=global_step, seconds=seconds))

    def write_what_waits(self, *, global_step: int) -> None:
        """The steps, expert loads and log pauses that a thinned record has not said yet."""
        for row in (self._steps.take(), self._experts.take()):
            if row is not None:
                self.write(row)
        if self._log_seconds:
            self.write(Pause(kind="log", global_step=global_step, seconds=self._log_seconds))
            self._log_seconds = 0.0

    def unlock(self) -> None:
        """As :meth:`RunFile.unlock`."""
        self.flush()
        if self.file is not None:
            self.file.unlock()

    def flush(self) -> None:
        self.flushed_at = self._clock()
        if self.file is not None:
            self._boundary.call("run record", self._flush)

    def _flush(self) -> None:
        if self.file is None:
            return
        if self.file.is_replaced:
            self.file = self.file.reopened(self._session)
            if not self._said_replaced:
                self._said_replaced = True
                _log.warning(
                    "ftcost: %s was deleted or replaced while training; the record goes on there, the rows before are gone",
                    self.file.path,
                )
        self.file.flush()

    def close(self) -> None:
        """May raise ``OSError``; the file is let go all the same."""
        try:
            self._flush()
        finally:
            file, self.file = self.file, None
            if file is not None:
                file.close()
