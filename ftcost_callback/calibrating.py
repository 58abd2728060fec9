"""Measured steps for :mod:`costmodel.calibration`: from run records, W&B runs and batch-sweep files.

A batch-sweep file is a CSV whose columns are job fields beside ``step_seconds``, one measured batch a row; or JSON: a list
of such rows, or ``{"job": {fields of all rows}, "steps": [rows]}``.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from costmodel.calibration import MeasuredStep
from costmodel.described_job import TokensSeen
from costmodel.errors import CostModelError
from costmodel.estimation import measured_step
from costmodel.specs import Job
from ftcost_callback.comparison import WAIT_SHARE
from ftcost_callback.records import Step
from ftcost_callback.run_file import RunRecord, read_run

WANDB_SCHEME: Final = "wandb:"
SECONDS_COLUMN: Final = "step_seconds"

# NVML's clock event reasons for heat, a failing supply or the power brake. Many cards always run at their power cap (0x04).
_SLOWED_DOWN: Final = 0x08 | 0x20 | 0x40 | 0x80
_WARM_UP_STEPS: Final = 2  # of each session: kernel selection, allocator growth
_MAX_GROUPS: Final = 8  # steps of like token counts, of one run
_MIN_GROUP_STEPS: Final = 5
_FEW_STEPS: Final = 3  # below this a run says nothing
_EVENT: Final = 2.0  # times the typical step, beyond which something else than training took place


def measured_steps(places: Sequence[str], overrides: Mapping[str, Any] | None = None) -> list[MeasuredStep]:
    """The steps of every place: a run record (file or folder), a sweep file (.csv, .json) or ``wandb:ENTITY/PROJECT[/RUN]``.

    ``overrides``: job fields that win over those recorded. Raises :class:`CostModelError` for a place without any.
    """
    steps: list[MeasuredStep] = []
    for place in places:
        if place.startswith(WANDB_SCHEME):
            for record in _wandb_records(place):
                steps += steps_of_run(record, overrides)
        elif Path(place).suffix.lower() in {".csv", ".json"}:
            steps += steps_of_sweep(place, overrides)
        else:
            steps += steps_of_run(read_run(place), overrides)
    return steps


def _wandb_records(place: str) -> list[RunRecord]:
    try:
        from ftcost_callback.wandb_reader import read_wandb_runs
    except ImportError as error:
        raise CostModelError(
            f"{place} cannot be read: this ftcost has no reader of W&B runs ({error}); give the run's output_dir"
        ) from None
    return read_wandb_runs(place)


# --- run records ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Taken:
    """One step of a run, and its mean micro-batch."""

    seconds: float
    data_wait_seconds: float  # in ``seconds``
    num_sequences: float
    num_tokens: float
    num_non_padding_tokens: float
    longest_tokens: float
    num_supervised_tokens: float | None


def steps_of_run(record: RunRecord, overrides: Mapping[str, Any] | None = None) -> list[MeasuredStep]:
    """The run's steps in groups of like token counts, each by its means: what is paid for is the sum of the steps. Left out:
    the first steps of each session, slowed-down GPUs, partial accumulation groups, steps of over twice the typical, and
    the waits of a run that its data holds up.

    Raises :class:`CostModelError` where the record holds no job, or too few steps with their tokens.
    """
    source = record.run_id
    described = next((session for session in reversed(record.sessions) if session.job), None)
    if described is None or described.job is None:
        raise CostModelError(f"run {source} was recorded without its job, so there is nothing to hold its steps against")
    job = {**described.job, **(overrides or {})}
    job.pop("calibration", None)  # factors are on the model itself
    device = described.device or {}
    job.setdefault("gpu", device.get("name"))
    if device.get("kind") == "cpu" and isinstance(job["gpu"], str):
        raise CostModelError(
            f"run {source} trained on a CPU ({device.get('name')}), which says nothing about a card; run ftcost probe, give "
            "the callback what it stored (FTCostCallback(gpu='probe')) and record the run again"
        )
    accumulation = int(job.get("gradient_accumulation_steps") or 1)
    rows = int(job.get("per_device_train_batch_size") or 1)
    taken = [step for step in (_taken(each, accumulation, rows) for each in steady_steps(record.steps)) if step is not None]
    if len(taken) < _FEW_STEPS:
        raise CostModelError(
            f"run {source} holds {len(taken)} steps that can be used of {len(record.steps)}; at least {_FEW_STEPS} are "
            f"needed after the first {_WARM_UP_STEPS} of each session, with their tokens counted"
        )
    taken = _without_long_waits(taken)
    scatter = _scatter(taken)
    return [
        dataclasses.replace(measured_step(job, seconds, source, seen), scatter=scatter / math.sqrt(number))
        for seen, seconds, number in _groups(taken)
    ]


def steady_steps(steps: Iterable[Step]) -> list[Step]:
    """Without the first steps of each session, and those that a profiler slowed down."""
    done: dict[int, int] = {}
    steady = []
    for step in steps:
        done[step.session_index] = done.get(step.session_index, 0) + 1
        if done[step.session_index] > _WARM_UP_STEPS and not step.is_profiled:
            steady.append(step)
    return steady


def _taken(step: Step, accumulation: int, rows: int) -> _Taken | None:
    """``None`` for a step that says nothing about the model."""
    seconds = step.step_seconds - (step.data_wait_seconds or 0.0)
    batches = step.num_micro_batches or accumulation
    if not step.num_tokens or not seconds > 0 or batches != accumulation or (step.throttle_reasons or 0) & _SLOWED_DOWN:
        return None
    per_rank = batches * (step.num_ranks or 1)  # a device's micro-batch, as a mean over the processes
    sequences = (step.num_samples or rows * per_rank) / per_rank
    tokens = step.num_tokens / per_rank
    return _Taken(
        seconds=step.step_seconds,
        data_wait_seconds=step.data_wait_seconds or 0.0,
        num_sequences=sequences,
        num_tokens=tokens,
        num_non_padding_tokens=(step.num_non_padding_tokens or step.num_tokens) / per_rank,
        longest_tokens=step.longest_sequence_tokens or tokens / sequences,
        num_supervised_tokens=step.num_supervised_tokens / per_rank if step.num_supervised_tokens is not None else None,
    )


def _without_long_waits(taken: Sequence[_Taken]) -> list[_Taken]:
    """Every loader takes some time for a batch, which is a part of each step and is paid for. A wait so long that a verdict
    would name it says nothing of the card."""
    waited = sum(step.data_wait_seconds for step in taken)
    if waited <= WAIT_SHARE * sum(step.seconds for step in taken):
        return list(taken)
    return [
        dataclasses.replace(step, seconds=step.seconds - step.data_wait_seconds, data_wait_seconds=0.0) for step in taken
    ]


def _scatter(taken: Sequence[_Taken]) -> float:
    """Standard deviation of a step's seconds about what its tokens ask for, as a share.

    From each step's distance to the line between its two neighbours in tokens.
    """
    ordered = sorted(_without_events(taken), key=lambda step: step.num_tokens)
    squares = []
    for before, step, after in zip(ordered, ordered[1:], ordered[2:], strict=False):
        gap = math.log(after.num_tokens / before.num_tokens)
        share = math.log(step.num_tokens / before.num_tokens) / gap if gap else 0.5
        expected = (1 - share) * math.log(before.seconds) + share * math.log(after.seconds)
        squares.append((math.log(step.seconds) - expected) ** 2 / (1 + (1 - share) ** 2 + share**2))
    return math.sqrt(statistics.mean(squares)) if squares else 0.0


def _groups(taken: Sequence[_Taken]) -> list[tuple[TokensSeen, float, int]]:
    """Means of groups of steps with like token counts, and how many."""
    ordered = sorted(taken, key=lambda step: step.num_tokens)
    number = max(1, min(_MAX_GROUPS, len(ordered) // _MIN_GROUP_STEPS))
    bounds = [round(place * len(ordered) / number) for place in range(number + 1)]
    groups = [_without_events(ordered[low:high]) for low, high in itertools.pairwise(bounds)]
    return [(*_mean(group), len(group)) for group in groups]


def _without_events(steps: Sequence[_Taken]) -> list[_Taken]:
    """A mean holds the small delays that every run has. One long event among few steps would be taken for all of them."""
    seconds = statistics.median(step.seconds for step in steps)
    tokens = statistics.median(step.num_tokens for step in steps)
    return [step for step in steps if step.seconds <= _EVENT * seconds * max(1.0, step.num_tokens / tokens)]


def _mean(steps: Sequence[_Taken]) -> tuple[TokensSeen, float]:
    def mean(name: str) -> float:
        return statistics.fmean(getattr(step, name) for step in steps)

    supervised = [step.num_supervised_tokens for step in steps if step.num_supervised_tokens is not None]
    seen = TokensSeen(
        num_sequences=mean("num_sequences"),
        num_tokens=mean("num_tokens"),
        num_non_padding_tokens=mean("num_non_padding_tokens"),
        # A step's row holds no squares. Exact for padded rows of one micro-batch, a lower bound for packed ones.
        sum_squared_sequence_tokens=statistics.fmean(step.num_tokens**2 / step.num_sequences for step in steps),
        longest_tokens=math.ceil(mean("longest_tokens")),
        num_supervised_tokens=statistics.fmean(supervised) if supervised else None,
    )
    return seen, mean("seconds")


# --- batch sweeps -----------------------------------------------------------------------------------------------------


def steps_of_sweep(path: str, overrides: Mapping[str, Any] | None = None) -> list[MeasuredStep]:
    """One measured step for each row of a sweep file. Raises :class:`CostModelError` with the row that is wrong."""
    steps = []
    for number, row in enumerate(_rows(path), start=1):
        where = f"{path}, row {number}"
        fields = {name: value for name, value in row.items() if name != SECONDS_COLUMN}
        try:
            seconds = float(row[SECONDS_COLUMN])
        except KeyError:
            raise CostModelError(f"{where} has no {SECONDS_COLUMN}, the measured seconds of an optimizer step") from None
        except (TypeError, ValueError):
            raise CostModelError(f"{where}: {SECONDS_COLUMN} must be a number, got {row[SECONDS_COLUMN]!r}") from None
        if not (math.isfinite(seconds) and seconds > 0):
            raise CostModelError(f"{where}: {SECONDS_COLUMN} must be a positive number, got {seconds:g}")
        try:
            steps.append(measured_step({**fields, **(overrides or {})}, seconds, where))
        except CostModelError as error:
            raise CostModelError(f"{where}: {error}" if where not in str(error) else str(error)) from None
    if not steps:
        raise CostModelError(f"{path} holds no measured batch")
    return steps


def _rows(path: str) -> list[dict[str, Any]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            if Path(path).suffix.lower() == ".csv":
                return [_row_from_cells(cells) for cells in csv.DictReader(file)]
            value = json.load(file)
    except OSError as error:
        raise CostModelError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise CostModelError(f"{path} cannot be read as a batch sweep: {error}") from None
    common: Any = {}
    if isinstance(value, dict):
        common, value = value.get("job", {}), value.get("steps")
    if not isinstance(value, list) or not isinstance(common, dict) or not all(isinstance(row, dict) for row in value):
        raise CostModelError(
            f'{path} is no batch sweep; give a list of rows, or {{"job": {{...}}, "steps": [rows]}}, each row with job '
            f"fields and {SECONDS_COLUMN}"
        )
    return [{**common, **row} for row in value]


def _row_from_cells(cells: Mapping[str | None, Any]) -> dict[str, Any]:
    """The cells of one CSV row, read as the flags of the command line are; empty cells are not given."""
    from costmodel.cli_flags import job_fields_from_flags

    if None in cells:
        raise CostModelError("a row of the batch sweep has more cells than columns")
    given = {name.strip(): text.strip() for name, text in cells.items() if name is not None and text and text.strip()}
    known = {name: text for name, text in given.items() if name in Job.model_fields}
    return {**given, **job_fields_from_flags(known)}
