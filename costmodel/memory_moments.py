"""The moments of a training step and of an evaluation that may be the worst for memory: what comes and goes, in bytes.

What is held throughout stands in ``held_memory.py``, what each layer keeps in ``saved_activations.py``. All of one GPU, in
the steady state: the optimizer has taken its first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from costmodel.adapters import Adapters, plan_adapters
from costmodel.defaults import ResolvedJob
from costmodel.evaluation_memory import Work, moments_at_work
from costmodel.head_memory import FusedHead, chunked_head, liger_head, tiled_head
from costmodel.held_memory import ElementBytes, Held, element_bytes, held_bytes, on_one_gpu, optimizer_temporary_bytes
from costmodel.layer_kernels import Rows, has_liger_norms
from costmodel.model_spec import ModelSpec
from costmodel.saved_activations import LayerBytes, layer_bytes
from costmodel.workload import Batch


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Everything about the peak that does not depend on the batch."""

    held: Held
    types: ElementBytes
    rows: Rows
    runs: tuple[tuple[LayerBytes, int], ...]
    head_trained: bool
    head_gradient_bytes: float
    tied_gradient_bytes: float  # the head's, where it is the embedding: held until the embedding's backward
    embedding_gradient_bytes: float
    head_copy_bytes: float
    optimizer_temporary_bytes: float
    autocast_copies_bytes: float
    embedding_is_trained: bool
    gathered_bytes: float  # of sharded weights that a pass puts together again, and of buckets of gradients


@lru_cache(maxsize=512)
def memory_plan(model: ModelSpec, job: ResolvedJob, rows: Rows) -> MemoryPlan:
    types = element_bytes(job)
    adapters: Adapters = plan_adapters(model, job)
    full = not job.is_peft
    saved_leaves = {name.rpartition(".")[2] for name in job.lora_modules_to_save}
    head_trained = full or "lm_head" in saved_leaves
    embedding_trained = full or "embed_tokens" in saved_leaves
    # an fp32 head under autocast leaves its 16-bit copy behind until its own backward is through
    head_copy = 2.0 * model.vocab_size * model.hidden_size if types.autocast and types.stream == 4 else 0.0
    head_gradient = float(types.weights * model.embedding_params) if head_trained else 0.0
    return MemoryPlan(
        held=on_one_gpu(held_bytes(model, job), job),
        types=types,
        rows=rows,
        runs=tuple((layer_bytes(model, layer, adapted, job, types, rows), count) for layer, adapted, count in adapters.runs),
        head_trained=head_trained,
        head_gradient_bytes=head_gradient,
        tied_gradient_bytes=head_gradient if model.tied_embeddings else 0.0,
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
    stored = held_bytes(model, job).weights_bytes / (model.num_params + model.tower_params)
    per_param = stored if job.quantization else float(types.compute)
    if not job.sharding.wraps_layers:
        return per_param * model.num_params
    layers = [layer.num_params for layer, count in model.layers for _ in range(min(count, 2))]
    in_layers = sum(layer.num_params * count for layer, count in model.layers)
    return per_param * (model.num_params - in_layers + sum(sorted(layers)[-2:]))


class Moment(NamedTuple):
    """What comes and goes at one moment, in bytes. A tuple, because each try of a search makes a dozen."""

    phase: str
    gradients: float
    activations: float
    logits: float
    temporary: float

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.logits + self.temporary


def training_moments(
    model: ModelSpec,
    job: ResolvedJob,
    plan: MemoryPlan,
    batch: Batch,
    keeps_logits: bool = False,
    loss_in_fp32: bool = True,
) -> list[Moment]:
    """The moments of a training step that may be its worst."""
    head = _fused_head(model, job, plan, batch.num_head_tokens)
    step = _step(model, job, plan, batch, head, keeps_logits)
    moments = _loss_moments(model, job, plan, batch, step, head, keeps_logits, loss_in_fp32)
    moments += _backward_moments(model, job, plan, batch, step)
    if plan.embedding_is_trained:  # every other gradient is there, its own is being built
        of_embedding = plan.embedding_gradient_bytes
        others = step.all_gradients if step.accumulates else step.all_gradients - of_embedding / step.parts
        temporary = step.gathered + of_embedding + plan.tied_gradient_bytes
        temporary += plan.types.stream * model.hidden_size * batch.num_tokens
        moments.append(Moment("embedding", others, step.kept_cache, 0.0, temporary + step.outputs))
    at_the_end = plan.optimizer_temporary_bytes + step.outputs
    moments.append(Moment("optimizer", step.reduced_gradients, step.kept_cache, 0.0, at_the_end))
    return moments


class _Step(NamedTuple):
    """What a training step holds through more than one of its moments, in bytes."""

    stored: float  # by all layers, for their backward
    final: float  # by the final norm and the head's input
    accumulates: bool
    all_gradients: float  # of all layers; while they accumulate
    reduced_gradients: float  # once each GPU has its part
    parts: int  # GPUs that share a gradient while the backward runs
    gathered: float
    # of a loop that keeps the model's outputs: logits, and keys and values
    outputs: float
    kept_cache: float
    kept_beside: float  # of kept_cache, what attention does not keep anyway
    kv_beside: float  # the same at the end of the forward, whoever keeps the outputs


def _step(
    model: ModelSpec, job: ResolvedJob, plan: MemoryPlan, batch: Batch, head: FusedHead | None, keeps_logits: bool
) -> _Step:
    types, tokens = plan.types, batch.num_tokens
    accumulates = job.gradient_accumulation_steps > 1
    # FSDP reduces gradients at the last micro-batch only (accelerate's no_sync): while they accumulate they are whole
    reduces_late = accumulates and job.sharding.by == "fsdp"
    reduced_gradients = float(plan.held.gradients_bytes)
    stored = 0.0
    if not job.activation_offloading:
        stored = sum(_kept_bytes(model, job, plan, batch, each) * count for each, count in plan.runs)
        stored -= plan.runs[0][0].first_layer_saving_per_token * tokens
    if batch.num_masked_pairs:  # the mask of the whole row, which all layers read: of bools, or added to the scores
        stored += batch.num_attended_pairs * (1.0 if job.attn_implementation == "sdpa" else types.compute)
    # keys and values in the model's outputs; attention keeps these very tensors, unless it keeps repeated ones
    kv_cache = kv_beside = 0.0
    if job.use_cache and not job.gradient_checkpointing:
        for (layer, count), (each, _) in zip(model.layers, plan.runs, strict=True):
            of_run = 2.0 * types.compute * layer.attention.kv_width * count * tokens
            kv_cache += of_run
            kv_beside += of_run if layer.attention.num_heads > layer.attention.num_kv_heads and each.per_pair else 0.0
    # a Trainer lets go of the model's outputs before the backward
    of_logits = (4.0 if job.upcasts_logits else types.compute) * model.vocab_size * batch.num_head_tokens
    return _Step(
        stored=stored,
        final=_final_bytes(model, job, plan, batch, head),
        accumulates=accumulates,
        all_gradients=float(held_bytes(model, job).gradients_bytes) if reduces_late else reduced_gradients,
        reduced_gradients=reduced_gradients,
        parts=1 if reduces_late else job.sharding.parts(2),
        gathered=plan.gathered_bytes,
        outputs=float(of_logits) if keeps_logits else 0.0,
        kept_cache=kv_cache if keeps_logits else 0.0,
        kept_beside=kv_beside if keeps_logits else 0.0,
        kv_beside=kv_beside,
    )


def _final_bytes(model: ModelSpec, job: ResolvedJob, plan: MemoryPlan, batch: Batch, head: FusedHead | None) -> float:
    """The final norm's fp32 input; trained, also the normalised input; the head's input where that is trained or cast."""
    types, hidden = plan.types, model.hidden_size
    is_stock = head is None or not head.kept_bytes  # the head is a linear of its own, or one of chunks of its input
    if has_liger_norms(model, job):
        final_norm = types.stream * hidden + 4.0
    else:
        final_norm = 4.0 * hidden + 4 + (types.stream * hidden if not job.is_peft else 0)
    if is_stock and not job.is_peft:
        final_norm += 2.0 * hidden if types.autocast and types.stream == 4 else types.stream * hidden
    return final_norm * batch.num_tokens + (plan.head_copy_bytes if is_stock else 0.0)


def _layer_bytes(each: LayerBytes, batch: Batch) -> float:
    return each.per_token * batch.num_tokens + each.per_pair * batch.num_attended_pairs + each.fixed


def _kept_bytes(model: ModelSpec, job: ResolvedJob, plan: MemoryPlan, batch: Batch, each: LayerBytes) -> float:
    """What one layer keeps until its backward: its own set, or its checkpoint. What is offloaded waits on the host."""
    if job.activation_offloading:
        return 0.0
    if not job.gradient_checkpointing:
        return _layer_bytes(each, batch)
    checkpoint = (4 if model.residual_in_fp32 else plan.types.stream) * model.hidden_size * batch.num_tokens
    return checkpoint + each.escapes_checkpoint_per_token * batch.num_tokens


def _loss_moments(
    model: ModelSpec,
    job: ResolvedJob,
    plan: MemoryPlan,
    batch: Batch,
    step: _Step,
    head: FusedHead | None,
    keeps_logits: bool,
    loss_in_fp32: bool,
) -> list[Moment]:
    """The end of the forward, the loss and its backward.

    log-softmax is saved (4 B a logit), its backward holds the gradient of the loss and the result (4 + 4).
    """
    types, gathered, vocab, head_tokens = plan.types, step.gathered, model.vocab_size, batch.num_head_tokens
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
    if model.caps_logits and not job.fused_loss:  # the tanh of the logits, in their own type
        logits += types.compute * vocab * head_tokens
    stored, copies = step.stored + step.final, plan.autocast_copies_bytes if job.gradient_checkpointing else 0.0
    waiting = head.kept_bytes + head.kept_gradient_bytes if head is not None else 0.0
    base_gradients = step.all_gradients if step.accumulates else 0.0

    def moment(gradients: float, activations: float, logits: float, temporary: float) -> Moment:
        return Moment("loss", gradients, stored + activations, logits, temporary + gathered)

    moments = [moment(base_gradients, waiting + step.kept_beside, logits, loss_temporary)]
    if head is not None:  # the end of the forward; and the final norm, whose backward holds five fp32 copies of its input
        moments.append(moment(base_gradients, waiting + step.kv_beside, 0.0, head.in_forward_bytes + copies))
        if not has_liger_norms(model, job):
            gradients = base_gradients
            if plan.head_trained:
                gradients = max(plan.head_gradient_bytes, gradients)
            moments.append(moment(gradients, step.kept_beside, 0.0, 20.0 * model.hidden_size * batch.num_tokens))
    if not job.fused_loss and job.framework != "litgpt":
        # only the end of the forward holds the cache and, besides the log-softmax, the logits in both types
        second = 4.0 if loss_in_fp32 else 2.0  # remote code that shifts the logits copies them
        # and autocast's 16-bit copies of the weights, which checkpointing lets go of only then
        at_end = (types.compute + (second if types.compute == 2 else 0.0)) * vocab * head_tokens
        moments.append(moment(base_gradients, step.kv_beside, logits, at_end + copies))
        if plan.head_trained:  # the head's weight gradient, with the gradient of the logits
            held = plan.head_gradient_bytes + types.compute * vocab * head_tokens + step.outputs
            moments.append(moment(base_gradients, step.kept_beside, 0.0, held))
    return moments


def _backward_moments(model: ModelSpec, job: ResolvedJob, plan: MemoryPlan, batch: Batch, step: _Step) -> list[Moment]:
    """The backward of the layers: at the top of each run (everything below is stored) and at its bottom."""
    tokens, pairs = batch.num_tokens, batch.num_attended_pairs
    moments: list[Moment] = []
    gradients_above = plan.head_gradient_bytes * (0 if model.tied_embeddings else 1) + (
        plan.types.weights * model.hidden_size if not job.is_peft else 0
    )
    below = step.stored + step.kept_beside
    for each, count in reversed(plan.runs):
        kept = _kept_bytes(model, job, plan, batch, each)
        recomputed = 0.0
        if job.activation_offloading:  # the layer at work is whole again
            recomputed = _layer_bytes(each, batch)
        elif job.gradient_checkpointing:
            recomputed = _layer_bytes(each, batch) - each.input_norm_per_token * tokens
        for position in (0, count - 1) if count > 1 else (0,):
            finished = gradients_above + position * each.gradients / step.parts
            rest = below - position * kept
            for now in each.instants:
                # a sharded gradient is whole until the layer is through
                in_flight = each.gradients - (0.0 if step.accumulates else now.done) if step.parts > 1 else 0.0
                extra = now.extra_per_token * tokens + now.extra_per_pair * pairs + now.extra_fixed
                # with accumulation a finished weight gradient is a temporary until it is added to what is there
                moments.append(
                    Moment(
                        "backward",
                        step.all_gradients if step.accumulates else finished + now.done,
                        rest + recomputed - now.freed_per_token * tokens - now.freed_per_pair * pairs,
                        0.0,
                        extra + plan.tied_gradient_bytes + in_flight + step.gathered + step.outputs,
                    )
                )
        gradients_above += count * each.gradients / step.parts
        below -= count * kept
    return moments


def _fused_head(model: ModelSpec, job: ResolvedJob, plan: MemoryPlan, num_positions: float) -> FusedHead | None:
    """What a head that never builds all logits holds; ``None`` for one that does, and for litgpt's."""
    if job.fused_loss is None:
        return None
    build = liger_head if job.fused_loss == "fused" else tiled_head if job.framework == "trl" else chunked_head
    return build(model, plan.types, num_positions, plan.head_gradient_bytes)


def evaluation_moments(model: ModelSpec, job: ResolvedJob, plan: MemoryPlan, batch: Batch) -> list[Moment]:
    """A forward without gradients on ``batch``: nothing is kept, one layer is at work, then the logits and their loss.

    It comes when the gradients are gone.

    The loss holds the logits as they come from the head, their fp32 copy where they are not fp32 already, and the
    log-softmax: 2 + 4 + 4 or 4 + 4 bytes each (``ForCausalLMLoss``, transformers 5.24). A chunked loss (TRL) holds one
    chunk. Liger's fused loss is for training only: an evaluation builds the logits. Unsloth's is taken wherever there are
    labels (models/llama.py, 2026.10.9).
    """
    types, tokens = plan.types, batch.num_tokens
    stream = types.stream * model.hidden_size * tokens
    is_fused = job.fused_loss == "chunked" or job.framework == "unsloth"
    head = _fused_head(model, job, plan, batch.num_head_tokens) if is_fused else None
    # under autocast the 16-bit copies of trained fp32 weights are cached through the whole forward, those of frozen ones not
    copies = plan.autocast_copies_bytes
    at_work = max(
        each.per_token * tokens + each.per_pair * batch.num_attended_pairs + each.fixed
        for each in _at_work(model, job, plan.rows)
    )
    fixed = plan.gathered_bytes
    if head is not None:
        logits, loss = 0.0, head.in_forward_bytes + head.kept_bytes
    else:
        elements = model.vocab_size * batch.num_head_tokens
        logits, loss = float(types.compute * elements), (8.0 if types.compute == 2 else 4.0) * elements
    is_stock = head is None or not head.kept_bytes
    if is_stock and plan.head_trained:
        loss += plan.head_copy_bytes
    return [
        Moment("evaluation", 0.0, stream, 0.0, at_work + copies + fixed),
        Moment("evaluation", 0.0, stream, logits, loss + copies + fixed),
    ]


@lru_cache(maxsize=512)
def _at_work(model: ModelSpec, job: ResolvedJob, rows: Rows) -> tuple[Work, ...]:
    """A layer at work, the model's input aside; one whose forward was not read counts as what it keeps in training."""
    moments: list[Work] = []
    plan = memory_plan(model, job, rows)
    for (layer, adapted, _), (kept, _) in zip(plan_adapters(model, job).runs, plan.runs, strict=True):
        read = moments_at_work(model, layer, adapted, job, plan.types, rows)
        moments += read or (Work(kept.per_token, kept.per_pair),)
    return tuple(moments)
