"""The rows of a run record (``run.jsonl``) and what travels between recorder, projection and sinks.

Frozen records of plain numbers. A value that was not measured is ``None`` here and absent in the file (``to_row``).
``metrics.py`` says what each figure is called in trackers; ``docs/run_record.md`` describes the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from math import isfinite
from typing import Any, ClassVar, Final, Literal, get_args

SCHEMA_VERSION: Final = 1
MAX_NUMBER: Final = 1e90
"""No measured figure comes near; what is beyond counts as not measured."""

PauseKind = Literal["eval", "save", "log", "other"]
ExpertStatus = Literal["recorded", "partial", "not_recorded"]


def _plain(value: Any) -> Any:
    """JSON-ready copy without nan or infinity: those count as not measured."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: plain for key, item in value.items() if (plain := _plain(item)) is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the run record."""

    TYPE: ClassVar[str] = ""

    def to_row(self) -> dict[str, Any]:
        """``{"type": ..., field: value, ...}`` without the fields that were not measured."""
        row: dict[str, Any] = {"type": self.TYPE}
        names: tuple[str, ...] = type(self).__slots__  # the fields of this row, in order
        for name in names:
            value = getattr(self, name)
            if value is None:
                continue
            kind = type(value)  # most are numbers, which _plain is not asked about: this is done each step
            if kind is int or (kind is float and isfinite(value)) or (value := _plain(value)) is not None:
                row[name] = value
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Session(Row):
    """One process that trains this run. The first row of each session."""

    TYPE: ClassVar[str] = "session"

    schema_version: int = SCHEMA_VERSION
    run_id: str
    session_index: int
    resumed_from_step: int | None = None
    started_at: str  # ISO 8601, UTC: when the bill of this session starts
    startup_seconds: float | None = None  # from started_at to the first training event
    # What the run had spent before this session, by the ledger of the checkpoint it resumed from.
    earlier_seconds: dict[str, float] | None = None  # bucket -> seconds over earlier sessions
    earlier_tokens: dict[str, int] | None = None  # num_tokens, num_non_padding_tokens, num_supervised_tokens
    earlier_num_steps: int | None = None  # executed by earlier sessions, repeated ones included
    earlier_num_uncounted_steps: int | None = None  # of them, those whose tokens nobody saw
    earlier_data_wait_seconds: float | None = None  # part of their training seconds
    earlier_wasted_seconds: float | None = None  # of their repeated steps
    max_steps: int | None = None
    num_processes: int | None = None  # that train this run; tokens and experts in this file are the main one's
    tensor_parallel_size: int | None = None  # processes that are given the same batch
    loading_peak_allocated_bytes: int | None = None  # torch's high-water marks before the first step
    loading_peak_reserved_bytes: int | None = None
    job: dict[str, Any] | None = None
    model: dict[str, Any] | None = None  # num_params, num_active_params, num_trainable_params, class, ...
    device: dict[str, Any] | None = None  # name, uuid, peak_flops_per_second, peak_source, ...
    price: dict[str, Any] | None = None
    usd_per_hour: float | None = None  # of the whole job, at that price
    budget: dict[str, Any] | None = None
    versions: dict[str, str] | None = None
    notes: list[str] | None = None  # what is not measured in this run, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSession(Row):
    """One process other than the main one, in a file of its own (``run.rank1.jsonl``): whose rows follow."""

    TYPE: ClassVar[str] = "rank_session"

    rank: int
    num_processes: int
    run_id: str | None = None  # read from the main record; None: it could not be found
    session_index: int | None = None
    earlier_tokens: dict[str, int] | None = None  # of this rank in earlier sessions, by the ledger of the checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Row):
    """The estimate the run is held against: ``before`` the first step, then on the ``tokens_seen``."""

    TYPE: ClassVar[str] = "prediction"

    basis: Literal["before", "tokens_seen"]
    global_step: int = 0
    estimate: dict[str, Any]

    def to_row(self) -> dict[str, Any]:
        row = {"type": self.TYPE, "basis": self.basis, "global_step": self.global_step}
        return row | {key: _plain(value) for key, value in self.estimate.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens of one optimizer step. ``None``: this trainer does not show them."""

    num_tokens: int | None = None  # computed, padding included
    num_non_padding_tokens: int | None = None
    num_supervised_tokens: int | None = None  # positions that enter the loss
    num_samples: int | None = None
    longest_sequence_tokens: int | None = None
    sum_squared_sequence_tokens: float | None = None  # sum over samples of the padded length squared, for attention

    @property
    def shows_nothing(self) -> bool:
        """No forward of the step was seen."""
        return self.num_tokens is None and self.num_samples is None and self.num_supervised_tokens is None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """NVML, as a time-weighted mean over one window."""

    busy_fraction: float | None = None  # share of time some kernel ran (NVML utilization.gpu)
    sm_active_fraction: float | None = None  # GPM, where the card has it
    tensor_active_fraction: float | None = None
    dram_active_fraction: float | None = None
    memory_used_bytes: int | None = None  # the device's, all processes
    power_watts: float | None = None
    energy_joules: float | None = None
    energy_source: str | None = None  # "counter" or "integrated_power"
    throttle_reasons: int | None = None  # bit mask, OR over the window
    num_samples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Row):
    """One optimizer step, end to end: data wait inside, pauses outside."""

    TYPE: ClassVar[str] = "step"

    global_step: int
    session_index: int
    step_seconds: float
    num_steps: int | None = None  # in a very long run a row stands for several steps: seconds and tokens are their means
    data_wait_seconds: float | None = None
    rollout_seconds: float | None = None  # generating and scoring what the step trains on (GRPO); outside step_seconds
    num_micro_batches: int | None = None
    num_ranks: int | None = None  # set by readers: the processes whose tokens are summed here
    num_tokens: int | None = None
    num_non_padding_tokens: int | None = None
    num_supervised_tokens: int | None = None
    num_samples: int | None = None
    longest_sequence_tokens: int | None = None
    forward_seconds: float | None = None  # of its micro-batches together
    backward_seconds: float | None = None  # recomputation and gradient clipping inside
    optimizer_seconds: float | None = None
    is_profiled: bool | None = None  # true: slowed by a profiler, and left out of speed and projection
    repeated: bool | None = None  # true: this global_step had been done before the resume (waste)
    busy_fraction: float | None = None
    sm_active_fraction: float | None = None
    memory_used_bytes: int | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    throttle_reasons: int | None = None
    peak_allocated_bytes: int | None = None  # torch, over the training steps so far
    peak_reserved_bytes: int | None = None
    mfu: float | None = None
    hfu: float | None = None
    elapsed_seconds: float | None = None  # wall time of the run over all sessions, at this row
    spent_usd: float | None = None
    projected_total_usd: float | None = None
    projected_total_usd_low: float | None = None
    projected_total_usd_high: float | None = None
    projected_total_seconds: float | None = None
    projected_total_seconds_low: float | None = None
    projected_total_seconds_high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(Row):
    """Time between steps that is billed but does not train."""

    TYPE: ClassVar[str] = "pause"

    kind: PauseKind
    global_step: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad(Row):
    """Non-padding training tokens routed to each expert since the last such row. No row for a dense model."""

    TYPE: ClassVar[str] = "expert_load"

    global_step: int
    layer_names: list[str] = field(default_factory=list)
    tokens_per_expert: list[list[int]] = field(default_factory=list)  # (num_layers, num_experts)
    num_experts_per_tok: int | None = None
    status: ExpertStatus = "recorded"
    reason: str | None = None  # why it is not whole; of a whole one, what to know about it
    # What it means, from this row's counts and those of the stretches of steps before it.
    load_max_over_mean: float | None = None  # mean over layers; 1 = balanced
    worst_layer: str | None = None
    worst_layer_load_max_over_mean: float | None = None
    num_dead_experts: int | None = None  # without a token since the last such row
    load_max_over_mean_vs_first_steps: float | None = None  # above 1: less even than in the run's first steps
    imbalance_step_seconds: float | None = None  # what uneven load adds to a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Row):
    """A few steps under ``torch.profiler``: means over them. Each of the mappings sums to ``step_seconds``."""

    TYPE: ClassVar[str] = "profile"

    global_step: int  # the last of them
    num_steps: int
    step_seconds: float  # without data wait; with what the profiler itself costs
    layer_type_seconds: dict[str, float] | None = None  # attention, experts, router, norms, ..., other; idle of a GPU
    operator_seconds: dict[str, float] | None = None  # matmul, dequantisation, softmax, top_k, elementwise, ..., host
    phase_seconds: dict[str, float] | None = None  # forward, recompute, backward, optimizer, other
    by_group_seconds: dict[str, float] | None = None  # the estimate's groups, to hold against its by_group_seconds
    cells: list[dict[str, Any]] | None = None  # layer_type x operator x phase -> seconds, num_calls
    top_operators: list[dict[str, Any]] | None = None  # torch's or the kernels' own names, the longest first
    reason: str | None = None  # why layer types are not told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(Row):
    """A threshold that was crossed: written once for each threshold."""

    TYPE: ClassVar[str] = "budget"

    threshold: str  # "50 %", "80 %", "100 %", "projected"
    kind: Literal["usd", "hours"]
    limit: float
    spent: float
    projected: float | None = None
    global_step: int
    action: Literal["warned", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory(Row):
    """A training step ran out of device memory. ``term``: what took it; ``would_fit``: settings that fit, each alone."""

    TYPE: ClassVar[str] = "out_of_memory"

    global_step: int  # the step that was being done
    batch_size: int | None = None  # rows of the micro-batch
    batch_length: int | None = None  # its padded length in tokens
    requested_bytes: int | None = None
    allocated_bytes: int | None = None  # by torch, when it failed
    capacity_bytes: int | None = None
    predicted_peak_device_bytes: int | None = None  # of this very batch
    term: str
    would_fit: dict[str, int] | None = None
    retried_with: int | None = None  # auto_find_batch_size went on with this batch
    verdict: str  # one sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(Row):
    """Totals of the run over all its sessions. The buckets sum to ``wall_seconds``."""

    TYPE: ClassVar[str] = "summary"

    global_step: int
    num_sessions: int
    wall_seconds: float
    train_seconds: float
    data_wait_seconds: float
    eval_seconds: float
    save_seconds: float
    log_seconds: float
    startup_seconds: float
    other_seconds: float
    rollout_seconds: float | None = None  # None: nothing is generated in training
    wasted_seconds: float | None = None  # repeated steps and the unsaved tail of crashed sessions, part of the above
    num_steps: int | None = None
    num_uncounted_steps: int | None = None  # of them, those whose tokens nobody saw: the counts are of the others
    num_tokens: int | None = None  # of the main process; readers replace it by the sum over all of them
    num_non_padding_tokens: int | None = None
    num_supervised_tokens: int | None = None
    spent_usd: float | None = None
    # Means and rates: over the steps of all sessions, the first of each left out; over those of the latest
    # ``num_sessions_in_rates`` where the machine changed before them, or the sessions before left no count of their steps.
    num_sessions_in_rates: int | None = None
    step_seconds_mean: float | None = None
    first_step_seconds: float | None = None  # of this session
    tokens_per_second: float | None = None  # computed, padding inside
    non_padding_tokens_per_second: float | None = None
    forward_seconds_mean: float | None = None  # of a step, warm-up left out
    backward_seconds_mean: float | None = None
    optimizer_seconds_mean: float | None = None
    mfu: float | None = None
    expert_balance: dict[str, Any] | None = None  # of this session: mean, worst layer, dead experts, trend, what it costs
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    loading_peak_allocated_bytes: int | None = None
    loading_peak_reserved_bytes: int | None = None
    energy_joules: float | None = None
    projected_total_seconds: float | None = None  # of the whole run, where a dry run or a budget ended it early
    projected_total_seconds_low: float | None = None
    projected_total_seconds_high: float | None = None
    projected_total_usd: float | None = None
    projected_total_usd_low: float | None = None
    projected_total_usd_high: float | None = None
    measured_over_predicted: dict[str, dict[str, float]] | None = None  # basis -> figure -> ratio
    verdict: str | None = None  # one sentence
    status: Literal["finished", "failed", "stopped_at_budget", "stopped"] = "finished"
    error: str | None = None  # type of the exception that ended a loop


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLog:
    """What the Trainer itself logged, and what the run had taken by then."""

    global_step: int
    elapsed_seconds: float
    spent_usd: float | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    def losses(self) -> dict[str, float]:
        """``loss`` and every ``eval_..._loss`` that is a finite number."""
        return {
            name: float(value)
            for name, value in self.values.items()
            if (name == "loss" or (name.startswith("eval_") and name.endswith("loss")))
            and isinstance(value, (int, float))
            and math.isfinite(value)
        }


ROW_TYPES: Final = {kind.TYPE: kind for kind in (Session, Step, Pause, ExpertLoad, Profile, Budget, OutOfMemory, Summary)}


def is_readable(row: Mapping[str, Any]) -> bool:
    """Whether this version can count with a row of JSON: each field is of its declared kind, or is null or absent where it
    may be. A row of a type whose figures are not added up always is."""
    fields_of_row = _FIELDS.get(row["type"]) if isinstance(row.get("type"), str) else None
    if fields_of_row is None:
        return True
    for name, value in row.items():
        is_right = fields_of_row.get(name)
        if is_right is not None and value is not None and not is_right(value):
            return False
    return all(row.get(name) is not None for name in _NEEDED[row["type"]])


def is_number(value: object) -> bool:
    """Finite, so far from the largest float that sums and products of a record stay finite, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -MAX_NUMBER < value < MAX_NUMBER


def _check_of(declared: str) -> Callable[[Any], bool] | None:
    """Of a field of that declared type; ``None``: anything will do."""
    kind = declared.removesuffix(" | None")
    if set(kind.split(" | ")) <= {"int", "float"}:
        return is_number
    if kind in ("dict[str, float]", "dict[str, int]"):
        return lambda value: isinstance(value, Mapping) and all(map(is_number, value.values()))
    if kind.startswith("dict["):
        return lambda value: isinstance(value, Mapping)
    if kind.startswith("list["):
        return lambda value: isinstance(value, list)
    if kind == "PauseKind":
        return lambda value: value in get_args(PauseKind)
    return None


def _is_needed(each: Field[Any]) -> bool:
    """A number without which the row says nothing."""
    is_counted = _check_of(str(each.type)) is is_number or each.type == "PauseKind"
    return is_counted and each.default is MISSING and each.default_factory is MISSING


_READ: Final = (*ROW_TYPES.values(), RankSession)
_FIELDS: Final = {row.TYPE: {each.name: _check_of(str(each.type)) for each in fields(row)} for row in _READ}
_NEEDED: Final = {row.TYPE: [each.name for each in fields(row) if _is_needed(each)] for row in _READ}


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Aggregate over the steps since the last report: what sinks are given. ``None``: not measured."""

    global_step: int
    max_steps: int | None = None
    num_steps: int = 0
    # speed (pauses left out)
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    non_padding_tokens_per_second: float | None = None
    supervised_tokens_per_second: float | None = None
    samples_per_second: float | None = None
    data_wait_fraction: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    step_seconds_measured_over_predicted: float | None = None
    # money and time (pauses and start-up inside)
    spent_usd: float | None = None
    projected_usd: float | None = None
    projected_usd_low: float | None = None
    projected_usd_high: float | None = None
    predicted_usd: float | None = None
    usd_per_million_supervised_tokens: float | None = None
    elapsed_seconds: float | None = None
    remaining_seconds: float | None = None
    projected_total_seconds: float | None = None
    eval_seconds: float | None = None
    save_seconds: float | None = None
    other_seconds: float | None = None
    rollout_seconds: float | None = None
    # GPU
    busy_fraction: float | None = None
    sm_active_fraction: float | None = None
    memory_used_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    power_watts: float | None = None
    peak_memory_measured_over_predicted: float | None = None
    # experts
    load_max_over_mean: float | None = None
    load_cv: float | None = None
    dead_expert_fraction: float | None = None
    num_dead_experts: int | None = None
    load_entropy: float | None = None
    worst_layer_load_max_over_mean: float | None = None
    load_max_over_mean_vs_first_steps: float | None = None
    imbalance_step_seconds: float | None = None
    imbalance_usd: float | None = None
    forward_seconds: float | None = None  # means of a step
    backward_seconds: float | None = None
    optimizer_seconds: float | None = None
    verdict: str | None = None
