"""Device memory of one training step: its peak as a maximum over moments, and what the card shows of it.

The moments stand in ``memory_moments.py``, what loading holds before the first step in ``load_memory.py``. All in bytes, all
of one GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from costmodel.constants import ALLOCATOR_OVERHEAD, CUBLAS_WORKSPACE_BYTES, CUDA_CONTEXT_BYTES, GPTQ_ALLOCATOR_OVERHEAD
from costmodel.defaults import ResolvedJob
from costmodel.held_memory import with_16_bit_weights
from costmodel.layer_kernels import rows_of
from costmodel.load_memory import load_peak_bytes
from costmodel.memory_moments import Moment, evaluation_moments, memory_plan, training_moments
from costmodel.model_spec import ModelSpec
from costmodel.saved_activations import inputs_escape_checkpoints
from costmodel.workload import Batch


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """Peak memory of one GPU and what it is made of. The parts are those alive at the peak and sum to the allocated peak."""

    weights_bytes: int
    adapters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    temporary_bytes: int
    context_bytes: int
    peak_phase: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_device_bytes: int
    peak_device_bytes_low: int | None = None
    peak_device_bytes_high: int | None = None
    capacity_bytes: int | None = None
    # what the card shows at the worst moment of each phase; the largest is peak_device_bytes
    device_bytes_by_phase: Mapping[str, int] | None = None
    # what the card shows at most while the weights are loaded onto it, before the first step; given back before that
    load_device_bytes: int | None = None


def peak_memory(
    model: ModelSpec,
    job: ResolvedJob,
    batch: Batch,
    *,
    is_padded: bool = False,
    on_cpu: bool = False,
    keeps_logits: bool = False,
    loss_in_fp32: bool = True,
    evaluation: Batch | None = None,
    evaluation_is_padded: bool | None = None,
) -> MemoryBreakdown:
    """Peak of one training step on ``batch``; ``is_padded`` says whether its sequences differ in length.

    ``evaluation_is_padded`` says it of the batch of ``evaluation``; ``None``: as in training.

    The peak is the largest of: the loss at the end of the forward, the backward of the last and of the first layer of each
    run, the embedding's backward, the optimizer step, the forward on ``evaluation`` where the run evaluates. A ``Trainer``
    drops the logits' reference before the backward; a loop that keeps ``outputs`` alive (``keeps_logits``) holds them too.
    ``loss_in_fp32`` is false for remote code that leaves the loss in the model's type where no autocast lifts it.
    """
    loaded, job = job, with_16_bit_weights(job)
    plan = memory_plan(model, job, rows_of(model, batch, is_padded=is_padded))
    moments = training_moments(model, job, plan, batch, keeps_logits, loss_in_fp32)
    moments += _moments_of_evaluation(model, job, evaluation, is_padded, evaluation_is_padded)
    worst = max(moments, key=lambda moment: moment.total)
    held = plan.held
    fixed = held.static_bytes + (0 if on_cpu else CUBLAS_WORKSPACE_BYTES)
    context = 0 if on_cpu else CUDA_CONTEXT_BYTES
    by_phase: dict[str, float] = {}  # what is reserved at its worst moment
    shares = (0.0, 0.0) if on_cpu else _gap_shares(job)
    for moment in moments:
        reserved = _reserved_bytes(fixed, moment, shares)
        by_phase[moment.phase] = max(reserved, by_phase.get(moment.phase, 0.0))
    allocated, most_reserved = fixed + worst.total, max(by_phase.values())
    loading = load_peak_bytes(model, loaded)
    return MemoryBreakdown(
        weights_bytes=held.weights_bytes,
        adapters_bytes=held.adapters_bytes,
        gradients_bytes=int(worst.gradients),
        optimizer_bytes=held.optimizer_bytes,
        activations_bytes=int(worst.activations),
        logits_bytes=int(worst.logits),
        temporary_bytes=int(worst.temporary) + (0 if on_cpu else CUBLAS_WORKSPACE_BYTES),
        context_bytes=context,
        peak_phase=worst.phase,
        peak_allocated_bytes=int(allocated),
        peak_reserved_bytes=int(most_reserved),
        peak_device_bytes=int(most_reserved) + context,
        device_bytes_by_phase={phase: int(reserved) + context for phase, reserved in by_phase.items()},
        load_device_bytes=None if loading is None else loading + context,
    )


def peak_device_bytes(
    model: ModelSpec,
    job: ResolvedJob,
    batch: Batch,
    *,
    is_padded: bool = False,
    on_cpu: bool = False,
    evaluation: Batch | None = None,
    evaluation_is_padded: bool | None = None,
) -> int:
    """``peak_memory(...).peak_device_bytes`` alone, for searches."""
    job = with_16_bit_weights(job)
    plan = memory_plan(model, job, rows_of(model, batch, is_padded=is_padded))
    moments = training_moments(model, job, plan, batch)
    moments += _moments_of_evaluation(model, job, evaluation, is_padded, evaluation_is_padded)
    if on_cpu:
        return int(plan.held.static_bytes + max(moment.total for moment in moments))
    fixed = plan.held.static_bytes + CUBLAS_WORKSPACE_BYTES
    shares = _gap_shares(job)
    return int(max(_reserved_bytes(fixed, moment, shares) for moment in moments)) + CUDA_CONTEXT_BYTES


def _moments_of_evaluation(
    model: ModelSpec, job: ResolvedJob, evaluation: Batch | None, is_padded: bool, evaluation_is_padded: bool | None
) -> list[Moment]:
    """The moments of an evaluation that may be the worst; without a batch there is none."""
    if evaluation is None:
        return []
    rows = rows_of(model, evaluation, is_padded=is_padded if evaluation_is_padded is None else evaluation_is_padded)
    return evaluation_moments(model, job, memory_plan(model, job, rows), evaluation)


def loss_bytes(model: ModelSpec, job: ResolvedJob, batch: Batch) -> float:
    """What the loss of a batch holds at once: the blocks whose size changes with the length of the batch the most."""
    if job.fused_loss or job.framework == "litgpt":
        return 0.0
    return 12.0 * model.vocab_size * batch.num_head_tokens


def job_class(job: ResolvedJob) -> str:
    """The class of job that decides how much the caching allocator holds beyond what is allocated."""
    if not job.is_peft:
        return "full"
    return "lora_checkpointed" if job.gradient_checkpointing and not inputs_escape_checkpoints(job) else "lora"


def _reserved_bytes(fixed: float, moment: Moment, gap_shares: tuple[float, float]) -> float:
    in_training, in_evaluation = gap_shares
    return fixed + moment.total * (1.0 + (in_evaluation if moment.phase == "evaluation" else in_training))


def _gap_shares(job: ResolvedJob) -> tuple[float, float]:
    """What the caching allocator holds beyond what is allocated, as a share of what comes and goes: in a training step, and
    in an evaluation.

    Weights and states lie densely. An evaluation has no backward and computes nothing again, so it leaves the gaps of a job
    without checkpointing.
    """
    name = job_class(job)
    in_training = ALLOCATOR_OVERHEAD[name]
    if name == "lora_checkpointed" and job.quantization == "gptq-int4":
        in_training = GPTQ_ALLOCATOR_OVERHEAD
    return in_training, ALLOCATOR_OVERHEAD["lora" if name == "lora_checkpointed" else name]
