"""What a process other than the main one records: its tokens and expert load, in a small file beside the run record.

The same events as of a :class:`LiveRun`, and no more than that: no price, prediction, projection, sink, GPU sampler or
console. Nothing is exchanged with the other processes. Which run the rows belong to stands in the main process's record,
which is read once, after the first step: every process has taken part in that, so the main one has begun its session.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ftcost_callback.boundary import Boundary
from ftcost_callback.process_run import FLUSH_SECONDS, ProcessRun
from ftcost_callback.ranks import last_session
from ftcost_callback.records import ExpertLoad, PauseKind, RankSession, Row, Step
from ftcost_callback.run_file import Ledger, run_file_path
from ftcost_callback.session_opening import Training
from ftcost_callback.session_plan import Identity, Plan, Settings
from ftcost_callback.step_resolution import step_row

_log = logging.getLogger("ftcost_callback")

LOOK_SECONDS: Final = 60.0
"""A shared disk may show the main process's rows late; after this, rows are written without the name of their run."""


class RankRun(ProcessRun):
    """``identity.run_id`` is that of the checkpoint that is resumed, or empty. ``process_started_at``: epoch seconds."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        plan: Plan,
        boundary: Boundary,
        *,
        rank: int,
        output_dir: str | os.PathLike[str],
        process_started_at: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            settings, identity, plan, boundary, output_dir=output_dir, clock=clock,
            window_steps=1, skip_first_steps=settings.skip_first_steps,
        )  # fmt: skip
        self._rank = rank
        self._process_started_at = process_started_at
        self._session: Mapping[str, Any] | None = None  # the main process's row, once it is found
        self._first_step_ended_at: float | None = None
        self._is_named = False  # whose rows they are has been written
        self._held: list[Row] = []  # until then

    def begin(self, training: Training) -> None:
        self.recorder.start(earlier=self.identity.earlier, furthest_step=self.identity.furthest_step)
        self._steps.start(
            training.device, steps_done=training.steps_done, counts_forwards=training.forwards_are_micro_batches
        )
        if not self._plan.is_data_parallel:
            self._boundary.call(
                "token counter",
                lambda: self.counters.attach(
                    training.model, num_processes=self._plan.num_processes, expert_load=self._settings.expert_load
                ),
            )
        self.record.open(self._output_dir, rank=self._rank)
        atexit.register(self._interpreter_exits)
        self.recorder.pause("other")
        self._steps.host_goes_on()

    # --- steps --------------------------------------------------------------------------------------------------------

    def step_ends(self, global_step: int, *, pauses_to_come: frozenset[PauseKind] = frozenset()) -> bool:
        """As :meth:`LiveRun.step_ends`; a process never stops training on its own."""
        self._steps.ends(global_step)
        self._batches_are_over()
        now = self._clock()
        if self._first_step_ended_at is None:
            self._first_step_ended_at = now
        if pauses_to_come or now - self.record.flushed_at >= FLUSH_SECONDS:
            self._take_steps(wait=bool(pauses_to_come))
            if "log" in pauses_to_come and self.recorder.num_measured_steps > 0:  # as the main process does
                self._take_experts()
            self._flush()
        self._steps.host_goes_on()
        return False

    def _take_steps(self, *, wait: bool) -> None:
        for step, timing in self._steps.resolve(wait=wait):
            self._write(step_row(step, timing, session_index=self._session_index, spent_usd=None))

    def _take_experts(self) -> None:
        load = self._boundary.call("expert load", lambda: self.counters.take_experts(self._steps.last_step))
        if load is not None:
            self._write(load)

    @property
    def _session_index(self) -> int:
        index = self._session.get("session_index") if self._session is not None else None
        return index if isinstance(index, int) else self.identity.session_index

    def _write(self, row: Row) -> None:
        if not self._is_named:
            self._held.append(row)
        elif isinstance(row, Step):
            self.record.write_step(dataclasses.replace(row, session_index=self._session_index))
        elif isinstance(row, ExpertLoad):
            self.record.write_experts(row)
        else:
            self.record.write(row)

    def _flush(self, *, is_last: bool = False) -> None:
        if not self._is_named and not self._name(is_last=is_last):
            return
        self.record.flush()

    def _name(self, *, is_last: bool) -> bool:
        """Write whose rows they are, and those that waited for it. False: that is not known yet."""
        if self._first_step_ended_at is None:
            return False
        self._session = self._main_session()
        waited = self._clock() - self._first_step_ended_at
        if self._session is None and waited < LOOK_SECONDS and not is_last:
            return False
        self._is_named = True
        earlier = self.identity.earlier
        row = RankSession(
            rank=self._rank,
            num_processes=self._plan.num_processes,
            run_id=str(self._session["run_id"]) if self._session is not None else None,
            session_index=self._session_index,
            earlier_tokens=earlier.tokens if earlier is not None else None,
        )
        held, self._held = self._held, []
        for each in (row, *held):
            self._write(each)
        return True

    def _main_session(self) -> dict[str, Any] | None:
        """The main process's session row of this very launch."""
        main = run_file_path(self._output_dir)
        try:
            is_of_this_launch = main.stat().st_mtime >= self._process_started_at
        except OSError:
            return None
        return last_session(main) if is_of_this_launch else None

    # --- pauses -------------------------------------------------------------------------------------------------------

    def trainer_logged(self, values: Mapping[str, Any]) -> None:
        """Figures are shown by the main process."""

    def wait_for_steps(self) -> None:
        if self._steps.any_pending:
            self._take_steps(wait=True)
            self._flush()

    def pause(self, kind: PauseKind) -> None:
        self.wait_for_steps()
        self.recorder.pause(kind, global_step=self._steps.last_step)
        self._steps.host_goes_on()

    def save_ledger(self, checkpoint_dir: Path) -> None:
        """Its own, beside the checkpoint just written."""

        def ledger() -> Ledger | None:
            if self._session is None:
                return None
            return Ledger(
                run_id=str(self._session["run_id"]),
                session_index=self._session_index,
                global_step=self._steps.last_step,
                totals=self.recorder.totals,
            )

        self._flush()
        self._write_ledger(checkpoint_dir, ledger, rank=self._rank)

    # --- the session ends ---------------------------------------------------------------------------------------------

    def end(self) -> None:
        self.wait_for_steps()
        self._take_experts()
        self._close()

    def left(self) -> None:
        """As :meth:`LiveRun.left`."""
        self._let_go_of_epochs()
        self._boundary.call("token counter", self.counters.detach)
        self._interpreter_exits()

    def abandon(self, *, retried_with: int | None = None) -> Identity:
        """As :meth:`LiveRun.abandon`."""
        self.wait_for_steps()
        self._close()
        return Identity(
            run_id=self.identity.run_id,
            session_index=self.identity.session_index + 1,
            earlier=self.recorder.totals,
            furthest_step=max(self.identity.furthest_step, self._steps.last_step),
        )

    def _close(self) -> None:
        self._flush(is_last=True)
        self.record.write_what_waits(global_step=self._steps.last_step)
        self.record.flush()
        self.release()

    def _interpreter_exits(self) -> None:
        def write() -> None:
            self._take_steps(wait=False)
            self._flush(is_last=True)
            self.record.write_what_waits(global_step=self._steps.last_step)
            self.record.flush()

        self._boundary.call("end of the program", write)
