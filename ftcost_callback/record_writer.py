"""Writes the rows of one session: bounded in very long runs, and through the boundary, so that a full disk ends the
record and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable

from ftcost_callback.boundary import Boundary
from ftcost_callback.ranks import rank_file_path
from ftcost_callback.records import Pause, PauseKind, Row, Step
from ftcost_callback.run_file import RunFile, StepThinner, run_file_path


class RecordWriter:
    """``open`` once; rows given before it, or after ``close``, go nowhere."""

    def __init__(self, boundary: Boundary, clock: Callable[[], float]) -> None:
        self._boundary = boundary
        self._clock = clock
        self._steps = StepThinner()
        self._log_seconds = 0.0
        self.file: RunFile | None = None
        self.flushed_at = 0.0  # clock time

    def open(self, output_dir: str | os.PathLike[str], *, rank: int = 0) -> None:
        """The run record, or the file beside it of a process other than the main one."""

        def open_file() -> None:
            record = run_file_path(output_dir)
            self.file = RunFile(rank_file_path(record, rank) if rank else record)

        self._boundary.call("run record", open_file)

    def write(self, row: Row) -> None:
        if self.file is not None:
            file = self.file
            self._boundary.call("run record", lambda: file.append(row))

    def write_step(self, row: Step) -> None:
        thinned = self._steps.add(row)
        if thinned is not None:
            self.write(thinned)

    def write_pause(self, kind: PauseKind, seconds: float, *, global_step: int) -> None:
        """Log pauses of a very long run wait for the next step row that is written."""
        if kind == "log" and self._steps.is_thinning:
            self._log_seconds += seconds
            return
        self.write(Pause(kind=kind, global_step=global_step, seconds=seconds))

    def write_what_waits(self, *, global_step: int) -> None:
        """The steps and log pauses that a thinned record has not said yet."""
        row = self._steps.take()
        if row is not None:
            self.write(row)
        if self._log_seconds:
            self.write(Pause(kind="log", global_step=global_step, seconds=self._log_seconds))
            self._log_seconds = 0.0

    def flush(self) -> None:
        self.flushed_at = self._clock()
        if self.file is not None:
            self._boundary.call("run record", self.file.flush)

    def close(self) -> None:
        """May raise ``OSError``; the file is let go all the same."""
        file, self.file = self.file, None
        if file is not None:
            file.close()
