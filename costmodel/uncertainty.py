"""80 % intervals: by regime and class of job, wider where nothing was measured; and the measured runs that are nearest."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Final

from costmodel import constants as c
from costmodel.data_files import read_table
from costmodel.defaults import ResolvedJob
from costmodel.framework_defaults import READ_STACKS, is_not_modelled
from costmodel.memory import MemoryBreakdown, job_class
from costmodel.model_spec import ModelSpec
from costmodel.specs import GpuSpec
from costmodel.step_time import StepTime
from costmodel.workload import Batch

INTERVAL_LEVEL: Final = 0.8


def step_interval_factor(model: ModelSpec, job: ResolvedJob, gpu: GpuSpec, step: StepTime, distance: float = 0.0) -> float:
    """The step takes between ``seconds / factor`` and ``seconds * factor``.

    The half width of the log is that of the regime (errors with a whole source left out). It is wider on a card, a stack or
    a way to run experts that no measured run covers, on several GPUs, and with the ``distance`` of the nearest measured run
    (:func:`nearest_runs`).
    """
    width = c.STEP_INTERVAL[step.regime]
    if gpu.name not in c.MEASURED_CARDS:
        width *= c.UNMEASURED_CARD_FACTOR
    own_experts = model.is_moe and not (step.expert_loop_seconds and model.family in c.MEASURED_EXPERT_LOOPS)
    if job.framework not in READ_STACKS or job.torch_compile or job.use_liger_kernel or own_experts:
        width *= c.UNKNOWN_STACK_FACTOR
    if job.num_gpus > 1:
        width *= c.SEVERAL_GPUS_FACTOR
    width *= min(c.MAX_DISTANCE_FACTOR, 1.0 + c.WIDENING_PER_DISTANCE * max(0.0, distance - 1.0))
    return math.exp(width)


def memory_interval(
    model: ModelSpec,
    job: ResolvedJob,
    memory: MemoryBreakdown,
    *,
    on_cpu: bool = False,
    varying_loss_bytes: float = 0.0,
    capacity_bytes: int | None = None,
) -> tuple[int, int]:
    """(low, high) of what the card shows, in bytes. Wider where the activations were held against no real module.

    ``varying_loss_bytes``: the loss of the longest batch where batches differ in length. The allocator then keeps blocks
    that the next batch does not fit into, up to what the card has; it gives them back when memory is short, so the high
    end goes beyond ``capacity_bytes`` only where the job itself may.
    """
    low_share, high_share = c.MEMORY_INTERVAL[memory_class(job)]
    low_context, high_context = (0, 0) if on_cpu else c.CUDA_CONTEXT_INTERVAL_BYTES
    low = max(memory.peak_allocated_bytes, int(memory.peak_reserved_bytes * low_share))
    high = int(memory.peak_reserved_bytes * high_share)
    if not model.activations_checked:
        doubt = int(c.UNCHECKED_ACTIVATIONS_SHARE * memory.activations_bytes)
        low, high = low - doubt, high + doubt
    if is_not_modelled(job.framework):
        saved = memory.activations_bytes + memory.logits_bytes + memory.temporary_bytes
        low = min(low, memory.peak_reserved_bytes - int(c.OWN_KERNELS_SAVE_AT_MOST * saved))
    low, high = low + low_context, high + high_context
    if varying_loss_bytes > 0 and not on_cpu:
        shown = high + int(c.VARIABLE_LENGTH_HOLES[job_class(job)] * varying_loss_bytes)
        high = max(high, shown if capacity_bytes is None else min(shown, capacity_bytes))
    return low, high


def memory_class(job: ResolvedJob) -> str:
    """What decides how far the memory may be off: a stack whose code was not read, else whether the base is quantised."""
    if job.framework not in READ_STACKS:
        return "unread"
    return "quantised" if job.quantization else "plain"


# --- the nearest measured runs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One public run: what decides how like another it is, its step, and our estimate with its source left out."""

    run: str
    model: str
    kind: str  # full | lora | the quantisation of the base
    is_moe: bool
    is_checkpointed: bool
    gpu: str
    framework: str
    log_active_params: float
    log_tokens: float  # of a micro-batch, padding included
    measured_seconds: float  # of one optimizer step
    estimated_seconds: float


@functools.cache
def measured_runs() -> tuple[MeasuredRun, ...]:
    """The public runs of ``data/evidence.csv``."""
    return tuple(
        MeasuredRun(
            row["run"],
            row["model"],
            row["kind"],
            row["is_moe"] == "yes",
            row["is_checkpointed"] == "yes",
            row["gpu"],
            row["framework"],
            math.log(float(row["active_params"])),
            math.log(float(row["tokens"])),
            float(row["measured_seconds"]),
            float(row["estimated_seconds"]),
        )
        for row in read_table("evidence.csv")
    )


def job_kind(job: ResolvedJob) -> str:
    """Full, LoRA, or what the base under the adapters is quantised to."""
    return job.quantization or ("lora" if job.is_peft else "full")


def nearest_runs(
    model: ModelSpec, job: ResolvedJob, gpu: GpuSpec, batch: Batch, count: int = 3
) -> tuple[dict[str, Any], ...]:
    """The ``count`` measured runs most like this job, nearest first, as the answer's ``evidence``.

    ``measured`` and ``estimated`` are seconds of one optimizer step of that run; the estimate was made without any run of
    its source. ``distance``: 1 for a factor of four in active parameters or in tokens, for another kind of method, or for
    another card and stack; 2 between a dense model and a mixture of experts; the root of the sum of squares.
    """
    size, tokens = math.log(model.num_active_params), math.log(max(1.0, batch.num_tokens))
    alike = _runs_by_likeness(job_kind(job), model.is_moe, gpu.name, job.framework, job.gradient_checkpointing)
    nearest: list[tuple[float, str, MeasuredRun]] = []
    for squares, run in alike:
        if len(nearest) == count and squares > nearest[-1][0]:
            break  # what comes now is less alike already before its size is looked at
        squares += ((size - run.log_active_params) ** 2 + (tokens - run.log_tokens) ** 2) / _LOG_FOUR_SQUARED
        nearest.append((squares, run.run, run))
        nearest.sort(key=lambda entry: entry[:2])
        del nearest[count:]
    return tuple(
        {
            "run": run.run,
            "model": run.model,
            "gpu": run.gpu,
            "kind": run.kind,
            "measured": run.measured_seconds,
            "estimated": run.estimated_seconds,
            "distance": math.sqrt(squares),
        }
        for squares, _, run in nearest
    )


@functools.lru_cache(maxsize=256)
def _runs_by_likeness(
    kind: str, is_moe: bool, gpu: str, framework: str, is_checkpointed: bool
) -> tuple[tuple[float, MeasuredRun], ...]:
    """Each run with its squared distance in everything but size, nearest first."""
    ranked = []
    for run in measured_runs():
        squares = (kind != run.kind) + 4.0 * (is_moe != run.is_moe)
        squares += 0.5 * (gpu != run.gpu) + 0.5 * (framework != run.framework)
        squares += 0.25 * (is_checkpointed != run.is_checkpointed)
        ranked.append((squares, run))
    return tuple(sorted(ranked, key=lambda entry: entry[0]))


_LOG_FOUR_SQUARED: Final = math.log(4.0) ** 2
