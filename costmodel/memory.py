"""Device memory of one training step: its peak as a maximum over moments, and what the card shows of it.

What is held throughout stands in ``held_memory.py``, what each layer keeps in ``saved_activations.py``, what loading holds
before the first step in ``load_memory.py``. All in bytes,
all of one GPU, in the steady state (the optimizer has taken its first step).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from costmodel.adapters import Adapters, plan_adapters
from costmodel.constants import ALLOCATOR_OVERHEAD, CUBLAS_WORKSPACE_BYTES, CUDA_CONTEXT_BYTES, GPTQ_ALLOCATOR_OVERHEAD
from costmodel.defaults import ResolvedJob
from costmodel.head_memory import FusedHead, chunked_head, liger_head, tiled_head
from costmodel.held_memory import (
    ElementBytes,
    Held,
    element_bytes,
    held_bytes,
    on_one_gpu,
    optimizer_temporary_bytes,
    with_16_bit_weights,
)
from costmodel.load_memory import load_peak_bytes
from costmodel.model_spec import ModelSpec
from costmodel.saved_activations import LayerBytes, Rows, has_liger_norms, inputs_escape_checkpoints, layer_bytes, rows_of
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


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything about the peak that does not depend on the batch."""

    held: Held
    types: ElementBytes
    runs: tuple[tuple[LayerBytes, int], ...]
    head_trained: bool
    head_gradient_bytes: float
    embedding_gradient_bytes: float
    head_copy_bytes: float
    optimizer_temporary_bytes: float
    autocast_copies_bytes: float
    embedding_is_trained: bool
    gathered_bytes: float  # of sharded weights that a pass puts together again, and of buckets of gradients


@lru_cache(maxsize=512)
def _plan(model: ModelSpec, job: ResolvedJob, rows: Rows) -> _Plan:
    types = element_bytes(job)
    adapters: Adapters = plan_adapters(model, job)
    full = not job.is_peft
    saved_leaves = {name.rpartition(".")[2] for name in job.lora_modules_to_save}
    head_trained = full or "lm_head" in saved_leaves
    embedding_trained = full or "embed_tokens" in saved_leaves
    # an fp32 head under autocast leaves its 16-bit copy behind until its own backward is through
    head_copy = 2.0 * model.vocab_size * model.hidden_size if types.autocast and types.stream == 4 else 0.0
    return _Plan(
        held=on_one_gpu(held_bytes(model, job), job),
        types=types,
        runs=tuple((layer_bytes(model, layer, adapted, job, types, rows), count) for layer, adapted, count in adapters.runs),
        head_trained=head_trained,
        head_gradient_bytes=float(types.weights * model.embedding_params) if head_trained else 0.0,
        embedding_gradient_bytes=float(types.weights * model.embedding_params) if embedding_trained else 0.0,
        head_copy_bytes=head_copy,
        # torch's foreach kernels build one temporary the size of everything trained; fused kernels and bitsandbytes none.
        optimizer_temporary_bytes=optimizer_temporary_bytes(model, job),
        autocast_copies_bytes=_autocast_copies_bytes(model, job, types, adapters),
        embedding_is_trained=embedding_trained,
        gathered_bytes=_gathered_bytes(model, job, types) + 2.0 * job.sharding.bucket_elements,
    )


def _autocast_copies_bytes(model: ModelSpec, job: ResolvedJob, types: ElementBytes, adapters: Adapters) -> float:
    """16-bit copies of trained fp32 weights of the layers: autocast keeps each until its context is left."""
    if job.is_peft and types.autocast and types.adapter == 4:
        return 2.0 * sum(count * sum(each.num_params for each in adapted.linears) for _, adapted, count in adapters.runs)
    if not (types.autocast and types.stream == 4) or job.is_peft:
        return 0.0
    return 2.0 * sum(
        count * (sum(each.num_params for each in layer.linears) + sum(each.num_params for each in layer.all_experts))
        for layer, count in model.layers
    )


def _gathered_bytes(model: ModelSpec, job: ResolvedJob, types: ElementBytes) -> float:
    """Weights that ZeRO-3 holds whole during a pass: all outside the layers, the layer at work and the one fetched ahead."""
    if job.sharding.parts(3) == 1:
        return 0.0
    stored = held_bytes(model, job).weights_bytes / model.num_params
    per_param = stored if job.quantization else float(types.compute)
    if not job.sharding.wraps_layers:
        return per_param * model.num_params
    layers = [layer.num_params for layer, count in model.layers for _ in range(min(count, 2))]
    in_layers = sum(layer.num_params * count for layer, count in model.layers)
    return per_param * (model.num_params - in_layers + sum(sorted(layers)[-2:]))


@dataclass(frozen=True, slots=True)
class _Moment:
    phase: str
    gradients: float
    activations: float
    logits: float
    temporary: float

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.logits + self.temporary


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
    plan = _plan(model, job, rows_of(model, batch, is_padded=is_padded))
    moments = _moments(model, job, plan, batch, keeps_logits, loss_in_fp32)
    moments += _evaluation_moments(
        model, job, evaluation, is_padded if evaluation_is_padded is None else evaluation_is_padded
    )
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
    plan = _plan(model, job, rows_of(model, batch, is_padded=is_padded))
    moments = _moments(model, job, plan, batch)
    moments += _evaluation_moments(
        model, job, evaluation, is_padded if evaluation_is_padded is None else evaluation_is_padded
    )
    if on_cpu:
        return int(plan.held.static_bytes + max(moment.total for moment in moments))
    fixed = plan.held.static_bytes + CUBLAS_WORKSPACE_BYTES
    shares = _gap_shares(job)
    return int(max(_reserved_bytes(fixed, moment, shares) for moment in moments)) + CUDA_CONTEXT_BYTES


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


def _reserved_bytes(fixed: float, moment: _Moment, gap_shares: tuple[float, float]) -> float:
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


def _moments(
    model: ModelSpec,
    job: ResolvedJob,
    plan: _Plan,
    batch: Batch,
    keeps_logits: bool = False,
    loss_in_fp32: bool = True,
) -> list[_Moment]:
    """The moments of a training step that may be its worst."""
    types = plan.types
    tokens, pairs = batch.num_tokens, batch.num_attended_pairs
    hidden, vocab = model.hidden_size, model.vocab_size
    accumulates = job.gradient_accumulation_steps > 1
    # FSDP reduces gradients at the last micro-batch only (accelerate's no_sync): while they accumulate they are whole
    reduces_late = accumulates and job.sharding.by == "fsdp"
    parts, gathered = 1 if reduces_late else job.sharding.parts(2), plan.gathered_bytes
    reduced_gradients = float(plan.held.gradients_bytes)
    all_gradients = float(held_bytes(model, job).gradients_bytes) if reduces_late else reduced_gradients
    # what waits for the backward is on the host, but for the layer at work; the head's is left on the device (TRL)
    is_away = job.activation_offloading
    checkpoint = (4 if model.residual_in_fp32 else types.stream) * hidden * tokens

    def layer_bytes(each: LayerBytes) -> float:
        return each.per_token * tokens + each.per_pair * pairs + each.fixed

    def kept(each: LayerBytes) -> float:
        if is_away:
            return 0.0
        if not job.gradient_checkpointing:
            return layer_bytes(each)
        return checkpoint + each.escapes_checkpoint_per_token * tokens

    first = plan.runs[0][0]
    stored = 0.0
    if not is_away:
        stored = sum(kept(each) * count for each, count in plan.runs) - first.first_layer_saving_per_token * tokens
    if batch.num_masked_pairs:  # the mask of the whole row, which all layers read: of bools, or added to the scores
        stored += pairs * (1.0 if job.attn_implementation == "sdpa" else types.compute)
    # final norm: its fp32 input; trained, also the normalised input; and the head's input where that is trained or cast
    head = _fused_head(model, job, plan, batch.num_head_tokens)
    is_stock = head is None or not head.kept_bytes  # the head is a linear of its own, or one of chunks of its input
    if has_liger_norms(model, job):
        final_norm = types.stream * hidden + 4.0
    else:
        final_norm = 4.0 * hidden + 4 + (types.stream * hidden if not job.is_peft else 0)
    if is_stock and not job.is_peft:
        final_norm += 2.0 * hidden if types.autocast and types.stream == 4 else types.stream * hidden
    final = final_norm * tokens + (plan.head_copy_bytes if is_stock else 0.0)

    # keys and values in the model's outputs; attention keeps these very tensors, unless it keeps repeated ones
    kv_cache = kv_beside = 0.0
    if job.use_cache and not job.gradient_checkpointing:
        for (layer, count), (each, _) in zip(model.layers, plan.runs, strict=True):
            of_run = 2.0 * types.compute * layer.attention.kv_width * count * tokens
            kv_cache += of_run
            kv_beside += of_run if layer.attention.num_heads > layer.attention.num_kv_heads and each.per_pair else 0.0

    # 1. the loss. log-softmax is saved (4 B a logit), its backward holds the gradient of the loss and the result (4 + 4).
    head_tokens = batch.num_head_tokens
    if head is not None:
        logits, loss_temporary = 0.0, head.in_backward_bytes
    elif job.framework == "litgpt":
        # head and loss in chunks of 128 positions, in the weights' type: the chunks' logits and their log-softmax stay
        chunk = min(head_tokens, 128.0 * batch.num_sequences)
        logits, loss_temporary = 2.0 * types.compute * vocab * head_tokens, 2.0 * types.compute * vocab * chunk
    else:
        width = 4.0 if loss_in_fp32 else float(types.compute)
        logits, loss_temporary = width * vocab * head_tokens, 2.0 * width * vocab * head_tokens
        if keeps_logits:
            logits += (4.0 if job.upcasts_logits else types.compute) * vocab * head_tokens
    loss_temporary += gathered
    base_gradients = all_gradients if accumulates else 0.0
    if model.caps_logits and not job.fused_loss:  # the tanh of the logits, in their own type
        logits += types.compute * vocab * head_tokens
    # a Trainer lets go of the model's outputs before the backward
    outputs = float((4.0 if job.upcasts_logits else types.compute) * vocab * head_tokens) if keeps_logits else 0.0
    kept_cache, kept_beside = (kv_cache, kv_beside) if keeps_logits else (0.0, 0.0)
    waiting = head.kept_bytes + head.kept_gradient_bytes if head is not None else 0.0
    moments = [_Moment("loss", base_gradients, stored + final + waiting + kept_beside, logits, loss_temporary)]
    if head is not None:  # the end of the forward; and the final norm, whose backward holds five fp32 copies of its input
        at_end = head.in_forward_bytes + gathered + (plan.autocast_copies_bytes if job.gradient_checkpointing else 0.0)
        moments.append(_Moment("loss", base_gradients, stored + final + waiting + kv_beside, 0.0, at_end))
        if not has_liger_norms(model, job):
            of_head = max(plan.head_gradient_bytes, base_gradients) if plan.head_trained else base_gradients
            moments.append(_Moment("loss", of_head, stored + final + kept_beside, 0.0, 20.0 * hidden * tokens + gathered))
    if not job.fused_loss and job.framework != "litgpt":
        # ... so only the end of the forward holds the cache and, besides the log-softmax, the logits in both types
        second = 4.0 if loss_in_fp32 else 2.0  # remote code that shifts the logits copies them
        # and autocast's 16-bit copies of the weights, which checkpointing lets go of only then
        at_end = (types.compute + (second if types.compute == 2 else 0.0)) * vocab * head_tokens
        if job.gradient_checkpointing:
            at_end += plan.autocast_copies_bytes
        moments.append(_Moment("loss", base_gradients, stored + final + kv_beside, logits, at_end + gathered))
        if plan.head_trained:  # the head's weight gradient, with the gradient of the logits
            held = plan.head_gradient_bytes + types.compute * vocab * head_tokens + outputs
            moments.append(_Moment("loss", base_gradients, stored + final + kept_beside, 0.0, held + gathered))

    # 2. the backward of the layers: at the top of each run (everything below is stored) and at its bottom
    gradients_above = plan.head_gradient_bytes * (0 if model.tied_embeddings else 1) + (
        types.weights * hidden if not job.is_peft else 0
    )
    tied_temporary = plan.head_gradient_bytes if model.tied_embeddings else 0.0
    below = stored + kept_beside
    for each, count in reversed(plan.runs):
        for position in (0, count - 1) if count > 1 else (0,):
            finished = gradients_above + position * each.gradients / parts
            rest = below - position * kept(each)
            recomputed = 0.0
            if job.gradient_checkpointing or is_away:  # the layer at work is whole again
                recomputed = layer_bytes(each) - (0.0 if is_away else each.input_norm_per_token * tokens)
            for now in each.instants:
                # a sharded gradient is whole until the layer is through
                in_flight = each.gradients - (0.0 if accumulates else now.done) if parts > 1 else 0.0
                extra = now.extra_per_token * tokens + now.extra_per_pair * pairs + now.extra_fixed
                # with accumulation a finished weight gradient is a temporary until it is added to what is there
                moments.append(
                    _Moment(
                        "backward",
                        all_gradients if accumulates else finished + now.done,
                        rest + recomputed - now.freed_per_token * tokens - now.freed_per_pair * pairs,
                        0.0,
                        extra + tied_temporary + in_flight + gathered + outputs,
                    )
                )
        gradients_above += count * each.gradients / parts
        below -= count * kept(each)
    # 3. the embedding: every other gradient is there, its own is being built
    if plan.embedding_is_trained:
        others = all_gradients if accumulates else all_gradients - plan.embedding_gradient_bytes / parts
        temporary = gathered + plan.embedding_gradient_bytes + tied_temporary + types.stream * hidden * tokens
        moments.append(_Moment("embedding", others, kept_cache, 0.0, temporary + outputs))
    # 4. the optimizer
    moments.append(_Moment("optimizer", reduced_gradients, kept_cache, 0.0, plan.optimizer_temporary_bytes + outputs))
    return moments


def _fused_head(model: ModelSpec, job: ResolvedJob, plan: _Plan, num_positions: float) -> FusedHead | None:
    """What a head that never builds all logits holds; ``None`` for one that does, and for litgpt's."""
    if job.fused_loss is None:
        return None
    build = liger_head if job.fused_loss == "fused" else tiled_head if job.framework == "trl" else chunked_head
    return build(model, plan.types, num_positions, plan.head_gradient_bytes)


def _evaluation_moments(model: ModelSpec, job: ResolvedJob, batch: Batch | None, is_padded: bool) -> list[_Moment]:
    """A forward without gradients on ``batch``: nothing is kept, one layer is at work, then the logits and their loss.

    It comes when the gradients are gone. Without a batch there is none.

    The loss holds the logits as they come from the head, their fp32 copy where they are not fp32 already, and the
    log-softmax: 2 + 4 + 4 or 4 + 4 bytes each (``ForCausalLMLoss``, transformers 5.24). A chunked loss (TRL) holds one
    chunk. Liger's fused loss is for training only: an evaluation builds the logits.
    """
    if batch is None:
        return []
    plan = _plan(model, job, rows_of(model, batch, is_padded=is_padded))
    types, tokens = plan.types, batch.num_tokens
    stream = types.stream * model.hidden_size * tokens
    head = _fused_head(model, job, plan, batch.num_head_tokens) if job.fused_loss == "chunked" else None
    # under autocast the 16-bit copies of trained fp32 weights are cached through the whole forward, those of frozen ones not
    copies = plan.autocast_copies_bytes
    at_work = max(each.per_token * tokens + each.per_pair * batch.num_attended_pairs for each, _ in plan.runs)
    fixed = plan.gathered_bytes
    if head is not None:
        logits, loss = 0.0, head.in_forward_bytes + head.kept_bytes
    else:
        elements = model.vocab_size * batch.num_head_tokens
        logits, loss = float(types.compute * elements), (8.0 if types.compute == 2 else 4.0) * elements
    return [
        _Moment("evaluation", 0.0, stream, 0.0, at_work + copies + fixed),
        _Moment(
            "evaluation", 0.0, stream, logits, loss + (plan.head_copy_bytes if plan.head_trained else 0.0) + copies + fixed
        ),
    ]
