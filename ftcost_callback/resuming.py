"""Which run a session goes on with, and what it had taken: from a ledger, and from the record where that is at hand."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

from costmodel.errors import CostModelError
from ftcost_callback.budget import crossing
from ftcost_callback.ranks import rank_file_path, tokens_counted
from ftcost_callback.recorder import Totals
from ftcost_callback.records import TokenCounts
from ftcost_callback.run_file import Ledger, RunRecord, ranks_with_ledger, read_ledger, read_run, run_file_path
from ftcost_callback.session_plan import Identity, new_run_id

_log = logging.getLogger("ftcost_callback")


def identity_after(ledger: Ledger, *, from_step: int) -> Identity:
    """Of a session that goes on at ``from_step`` of the ledger's run."""
    return Identity(
        run_id=ledger.run_id,
        session_index=ledger.session_index + 1,
        resumed_from_step=from_step,
        earlier=ledger.totals,
        earlier_spent_usd=ledger.spent_usd,
        earlier_spent_seconds=ledger.spent_seconds if ledger.spent_seconds is not None else ledger.totals.wall_seconds,
        earlier_energy_joules=ledger.energy_joules,
        furthest_step=ledger.global_step,
        crossed_thresholds=ledger.crossed_thresholds,
        earlier_pace=ledger.pace,
    )


def with_unsaved_tail(identity: Identity, run_file: Path) -> Identity:
    """Add what the run did after the checkpoint was written, where its record is at hand."""
    try:
        record = read_run(run_file, run_id=identity.run_id, all_ranks=False)
    except (CostModelError, OSError):
        return identity
    except Exception as error:
        _log.debug("ftcost: the record was not read", exc_info=True)
        note = f"{run_file} cannot be read ({type(error).__name__}: {error}): what was counted goes on from the checkpoint"
        return dataclasses.replace(identity, notes=(*identity.notes, note))
    earlier = identity.earlier
    if earlier is None or record.totals.wall_seconds <= earlier.wall_seconds:
        return identity
    said = (crossing(row.kind, row.limit, row.threshold) for row in record.budgets)
    spent_usd, spent_seconds = identity.earlier_spent_usd, identity.earlier_spent_seconds
    if record.spent_usd is not None:
        spent_usd, spent_seconds = record.spent_usd, record.spent_seconds
    return dataclasses.replace(
        identity,
        session_index=max(session.session_index for session in record.sessions) + 1,
        earlier=record.totals,
        earlier_spent_usd=spent_usd,
        earlier_spent_seconds=spent_seconds,
        furthest_step=max(identity.furthest_step, record.last_step),
        crossed_thresholds=tuple(sorted({*identity.crossed_thresholds, *said})),
    )


def with_tokens_of_ranks_gone(identity: Identity, checkpoint_dir: Path, *, num_processes: int) -> Identity:
    """Add what processes had counted that this session no longer has."""
    earlier = identity.earlier
    for rank in ranks_with_ledger(checkpoint_dir):
        ledger = read_ledger(checkpoint_dir, rank=rank) if rank >= num_processes else None
        if ledger is not None and earlier is not None:
            earlier = earlier.plus_tokens(TokenCounts(num_samples=0, **ledger.totals.tokens))
    return dataclasses.replace(identity, earlier=earlier)


def rank_identity_after(ledger: Ledger, rank: int, run_file: Path) -> Identity:
    """What a process that is not the main one had counted; which run it was is read from the main record."""
    earlier = ledger.totals
    counted = tokens_counted(rank_file_path(run_file, rank), ledger.run_id)
    if counted is not None and (counted.num_tokens or 0) > (earlier.num_tokens or 0):
        earlier = dataclasses.replace(earlier, **dataclasses.asdict(counted))  # with the unsaved tail
    return Identity(
        run_id=ledger.run_id, session_index=ledger.session_index + 1, earlier=earlier, furthest_step=ledger.global_step
    )


# --- a loop of the user's own, which says from which step it goes on --------------------------------------------------


def loop_identity(
    output_dir: str | os.PathLike[str], *, from_step: int, checkpoint_dir: str | os.PathLike[str] | None, num_processes: int
) -> Identity:
    """By the ledger beside the checkpoint, or else by the last run recorded in ``output_dir``, if it reached that step."""
    if from_step == 0:
        return Identity(run_id=new_run_id())
    run_file = run_file_path(output_dir)
    folder = checkpoint_dir if checkpoint_dir is not None else run_file.parent
    ledger, why = None, f"which the run recorded in {output_dir} did not reach"
    try:
        ledger = read_ledger(folder)
    except CostModelError as error:
        why = str(error)
    if checkpoint_dir is None:
        record, why_none = _last_run(run_file)
        if record is None:
            ledger, why = None, why_none
        elif ledger is None or ledger.run_id != record.run_id:  # it was ended before its first ledger
            ledger = Ledger(run_id=record.run_id, session_index=-1, global_step=0, totals=Totals())
    if ledger is not None:
        identity = with_unsaved_tail(identity_after(ledger, from_step=from_step), run_file)
        if identity.furthest_step >= from_step:
            return with_tokens_of_ranks_gone(identity, Path(folder), num_processes=num_processes)
    note = f"goes on from step {from_step}, {why}: time, tokens and dollars begin here"
    _log.warning("ftcost: %s", note)
    return Identity(run_id=new_run_id(), resumed_from_step=from_step, notes=(note,))


def loop_rank_identity(
    output_dir: str | os.PathLike[str], *, rank: int, from_step: int, checkpoint_dir: str | os.PathLike[str] | None
) -> Identity:
    """As :func:`loop_identity`, of a process that is not the main one: by its own ledger beside the main one's."""
    run_file = run_file_path(output_dir)
    try:
        ledger = read_ledger(checkpoint_dir if checkpoint_dir is not None else run_file.parent, rank=rank)
    except CostModelError:
        ledger = None
    if ledger is None or ledger.global_step < from_step or from_step == 0:
        return Identity(run_id="")
    return rank_identity_after(ledger, rank, run_file)


def _last_run(run_file: Path) -> tuple[RunRecord | None, str]:
    """(the record, why there is none)."""
    if not run_file.exists():
        return None, f"no run is recorded in {run_file.parent.parent}"
    try:
        return read_run(run_file, all_ranks=False), ""
    except CostModelError as error:
        return None, str(error)
    except Exception as error:
        _log.debug("ftcost: the record was not read", exc_info=True)
        return None, f"{run_file} cannot be read ({type(error).__name__}: {error})"
