"""What a training step holds from its beginning to its end: weights, adapters, gradients, the optimizer's states.

All figures in bytes, all of one GPU, in the steady state (the optimizer has taken its first step).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from costmodel.adapters import experts_are_stacked, plan_adapters
from costmodel.defaults import BITSANDBYTES, ResolvedJob
from costmodel.model_spec import ModelSpec
from costmodel.units import BYTES_PER_ELEMENT
from costmodel.workload import num_idle_params, num_trainable_params, stream_dtype

# Bytes of one parameter in each storage; the scales are inside.
# nf4 / fp4: 4 bit and one fp32 scale for 64 weights; double quantisation keeps the scales in 8 bit, with one fp32 for 256
# of them (bitsandbytes functional.py). int8: one fp32 a row is added apart. gptq, awq: groups of 128 with a 16-bit scale
# and a 4-bit zero. mxfp4: one 8-bit scale for 32 weights.
_QUANTIZED_BYTES = {
    "nf4": 0.5 + 4 / 64,
    "fp4": 0.5 + 4 / 64,
    "nf4-double": 0.5 + 1 / 64 + 4 / (64 * 256),
    "fp4-double": 0.5 + 1 / 64 + 4 / (64 * 256),
    "int8": 1.0,
    "gptq-int4": 0.5 + 2.5 / 128,
    "awq-int4": 0.5 + 2.5 / 128,
    "mxfp4": 0.5 + 1 / 32,
    "fp8": 1.0,
}

# Optimizer state for each trained element, in units of the parameter's own bytes ("own") or in bytes.
_STATE_OWN_COPIES = {
    "adamw_torch": 2,
    "adamw_torch_fused": 2,
    "adamw_apex_fused": 2,
    "adagrad": 1,
    "rmsprop": 1,
    "sgd": 0,
}
# Copies of everything trained that the foreach kernels of one optimizer step hold at once (torch 2.13, optim/*.py: the
# square root of the second moment; Adagrad's scaled gradients besides). SGD works in place.
_STEP_COPIES = {"adamw_torch": 1, "adagrad": 2, "rmsprop": 1}
_STATE_BYTES = {
    "paged_adamw_32bit": 8.0,
    "adamw_8bit": 2 + 2 * 4 / 256,  # one fp32 scale for 256 elements of each state (bitsandbytes)
    "adamw_bnb_8bit": 2 + 2 * 4 / 256,
    "paged_adamw_8bit": 2 + 2 * 4 / 256,
    "adamw_torch_8bit": 2 + 2 * 4 / 256,  # torchao 0.18 optim/, in blocks of 256 (transformers 5.24 trainer_optimizer.py)
    "adamw_torch_4bit": 2 * 0.5 + 2 * 4 / 256,
    "lion_32bit": 4.0,
    "paged_lion_32bit": 4.0,
    "lion_8bit": 1 + 4 / 256,
    "paged_lion_8bit": 1 + 4 / 256,
    "adamw_anyprecision": 4.0,
}
_BITSANDBYTES_8BIT = frozenset({"adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit", "paged_lion_8bit"})


@dataclass(frozen=True, slots=True)
class Held:
    """What lives through the whole step."""

    weights_bytes: int
    adapters_bytes: int
    optimizer_bytes: int
    gradients_bytes: int  # of every trained parameter, once the backward is through

    @property
    def static_bytes(self) -> int:
        return self.weights_bytes + self.adapters_bytes + self.optimizer_bytes


@lru_cache(maxsize=512)
def with_16_bit_weights(job: ResolvedJob) -> ResolvedJob:
    """The job as FSDP's and DeepSpeed's mixed precision hold it: 16-bit weights, with what was loaded as their fp32 masters.

    They compute on 16-bit weights of their own (accelerate 1.15, utils/dataclasses.py, ``set_mixed_precision``), so autocast
    finds nothing to cast and copies nothing. Other jobs come back as they are. The step time does not do this: with 16-bit
    traffic the 15 public runs of MPT-7B on 8 cards come out 12 % too short in place of 1 %, which nothing here explains.
    """
    is_mixed = job.autocast_dtype is not None and job.dtype == "float32" and not job.is_peft
    if not (is_mixed and job.sharding.keeps_masters):
        return job
    return replace(job, dtype=str(job.autocast_dtype))


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes of an element in the places where a step keeps tensors."""

    weights: int  # loaded, unquantised weights
    stream: int  # residual stream
    compute: int  # what matmuls run in
    adapter: int
    mlp: int  # outputs of the base linears
    autocast: bool


def element_bytes(job: ResolvedJob) -> ElementBytes:
    stream = BYTES_PER_ELEMENT[stream_dtype(job)]
    compute = 2 if job.autocast_dtype else stream
    # bitsandbytes casts the result of a 4- or 8-bit linear back to the type that came in.
    mlp = stream if job.quantization in BITSANDBYTES else compute
    return ElementBytes(
        weights=BYTES_PER_ELEMENT[job.dtype],
        stream=stream,
        compute=compute,
        adapter=BYTES_PER_ELEMENT[job.adapter_dtype],
        mlp=mlp,
        autocast=job.autocast_dtype is not None,
    )


def quantized_element_bytes(quantization: str | None, *, double_quant: bool) -> float:
    """Bytes of a quantised parameter, its share of the scales inside. ``KeyError`` where nothing is quantised."""
    return _QUANTIZED_BYTES[f"{quantization}-double" if double_quant else str(quantization)]


def quantized_params(model: ModelSpec, job: ResolvedJob) -> int:
    """Parameters that the quantisation reaches: the linears of the layers, and routed experts where they are linears too.

    bitsandbytes replaces ``nn.Linear`` alone, so the stacked experts of transformers 5 stay in 16 bit. MXFP4 packs the
    routed experts and nothing else.
    """
    if job.quantization is None:
        return 0
    is_bitsandbytes, only_experts = job.quantization in BITSANDBYTES, job.quantization == "mxfp4" and model.is_moe
    total = 0 if only_experts else sum(each.in_features * each.out_features for each in model.linears)
    for layer, count in model.layers:
        if not only_experts:
            total += count * sum(linear.in_features * linear.out_features for linear in layer.linears)
        for experts in layer.all_experts:
            stacked = experts_are_stacked(experts, job.fused_experts)
            if stacked and is_bitsandbytes:
                continue
            total += count * experts.num_experts * experts.num_matrices * experts.hidden_size * experts.intermediate_size
            if not stacked and experts.router_was_linear and not only_experts:
                total += count * experts.num_experts * experts.router_features_or_hidden
    return total


def _tower_bytes(model: ModelSpec, job: ResolvedJob) -> int:
    """Encoders of images and sound. bitsandbytes replaces their linears too; Unsloth's 4-bit models keep them in 16 bit."""
    if not model.towers:
        return 0
    width = BYTES_PER_ELEMENT[stream_dtype(job)]
    if job.framework == "llamafactory" and not job.is_peft and job.autocast_dtype:
        width = 2  # it lifts to fp32 what it trains, and freezes these (0.9.5, model/adapter.py)
    if job.quantization not in BITSANDBYTES or job.framework == "unsloth":
        return width * model.tower_params
    linears = [counted for tower in model.towers for counted in tower.counted_linears()]
    quantized = sum(linear.in_features * linear.out_features * count for linear, count in linears)
    of_rows = 4 * sum(linear.out_features * count for linear, count in linears) if job.quantization == "int8" else 0
    of_each = quantized_element_bytes(job.quantization, double_quant=job.double_quant)
    return width * (model.tower_params - quantized) + int(of_each * quantized) + of_rows


@lru_cache(maxsize=512)
def held_bytes(model: ModelSpec, job: ResolvedJob) -> Held:
    """Weights, adapters, optimizer states and gradients. Source: ``docs/formulas.md``, section memory."""
    quantized = quantized_params(model, job)
    rest = model.num_params - quantized
    rest_bytes = BYTES_PER_ELEMENT[stream_dtype(job)]
    weights = rest * rest_bytes
    if job.quantization:
        weights += int(quantized * quantized_element_bytes(job.quantization, double_quant=job.double_quant))
        if job.quantization == "int8":
            weights += 4 * sum(linear.out_features * count for layer, count in model.layers for linear in layer.linears)
    trained_bytes = trained_parameter_bytes(model, job)
    idle_bytes = num_idle_params(model, job) * BYTES_PER_ELEMENT[job.adapter_dtype] if job.is_peft else 0
    return Held(
        weights_bytes=weights + _tower_bytes(model, job),
        adapters_bytes=trained_bytes + idle_bytes if job.is_peft else 0,
        optimizer_bytes=_optimizer_bytes(model, job) + _master_bytes(model, job),
        gradients_bytes=trained_bytes,
    )


def _stepped(model: ModelSpec, job: ResolvedJob) -> tuple[int, int]:
    """(parameters, bytes) of what the optimizer steps over: what is trained.

    DeepSpeed's flat buffers hold what never has a gradient too, and its optimizer makes states for all of them
    (``initialize_optimizer_states``).
    """
    idle = num_idle_params(model, job) if job.sharding.by == "deepspeed" and job.sharding.stage > 0 else 0
    width = BYTES_PER_ELEMENT[job.adapter_dtype if job.is_peft else job.dtype]
    return num_trainable_params(model, job) + idle, trained_parameter_bytes(model, job) + width * idle


def _master_bytes(model: ModelSpec, job: ResolvedJob) -> int:
    """fp32 copies of 16-bit trained weights, and fp32 states for them, that FSDP and DeepSpeed make in mixed precision.

    Counted as DeepSpeed's (2 + 2 + 4 + 8 bytes a weight with AdamW); FSDP's fp32 shards, gradients and states are as many.
    """
    trained, trained_bytes = _stepped(model, job)
    if not (job.sharding.keeps_masters and job.autocast_dtype and trained_bytes == 2 * trained):
        return 0
    return 4 * trained + _STATE_OWN_COPIES.get(job.optim, 0) * trained_bytes


def trained_parameter_bytes(model: ModelSpec, job: ResolvedJob) -> int:
    """Bytes of what is trained, each in its own type.

    peft lifts adapters to their own type, but copies ``modules_to_save`` as they are (``cast_adapter_dtype``, peft 0.21).
    """
    if not job.is_peft:
        return model.num_params * BYTES_PER_ELEMENT[job.dtype]
    adapters = plan_adapters(model, job)
    copied = adapters.saved_modules_params
    adapter_bytes, copied_bytes = BYTES_PER_ELEMENT[job.adapter_dtype], BYTES_PER_ELEMENT[stream_dtype(job)]
    return (adapters.num_params - copied) * adapter_bytes + copied * copied_bytes


def _optimizer_bytes(model: ModelSpec, job: ResolvedJob) -> int:
    trained, trained_bytes = _stepped(model, job)
    if job.optim in _STATE_OWN_COPIES:
        return _STATE_OWN_COPIES[job.optim] * trained_bytes
    if job.optim == "adafactor":
        return 4 * _rows_and_columns(model, job)
    state = int(_STATE_BYTES[job.optim] * trained)
    if job.optim in _BITSANDBYTES_8BIT and not job.is_peft:
        # transformers registers every nn.Embedding for 32-bit states (Trainer.create_optimizer), of bitsandbytes alone.
        state += int((8 - _STATE_BYTES[job.optim]) * model.embedding_params)
    return state


def _rows_and_columns(model: ModelSpec, job: ResolvedJob) -> int:
    """Elements of Adafactor's factored second moment: one row and one column vector for each trained matrix."""
    adapters = plan_adapters(model, job)
    total = 0
    for layer, adapted, count in adapters.runs:
        if job.is_peft:
            pairs = [(a.r, a.linear.in_features, a.linear.out_features, 1) for a in adapted.linears]
            pairs += [
                (a.r, a.linear.in_features, a.linear.out_features, adapted.num_experts) for a in adapted.expert_linears
            ]
            pairs += [(p.r * p.num_matrices, p.in_features, p.out_features, 1) for p in adapted.parameters]
            total += count * sum(copies * (2 * r + width_in + width_out) for r, width_in, width_out, copies in pairs)
        else:
            total += count * sum(linear.in_features + linear.out_features for linear in layer.linears)
            total += count * sum(norm.size for norm in layer.norms)
            if layer.experts:
                experts = layer.experts
                per_expert = 3 * (experts.hidden_size + experts.intermediate_size)
                total += count * (experts.num_experts * per_expert + experts.num_experts + experts.hidden_size)
    if not job.is_peft:
        total += (1 if model.tied_embeddings else 2) * (model.vocab_size + model.hidden_size) + model.hidden_size
    return total


def optimizer_temporary_bytes(model: ModelSpec, job: ResolvedJob) -> float:
    """What foreach kernels build; with fp32 masters they work on those, beside DeepSpeed's flat gradients in both types.

    Adafactor works on one parameter at a time: its update and the negated one in fp32, and fp32 copies of a 16-bit weight
    and of its gradient (transformers 5.24, optimization.py).
    """
    if job.optim == "adafactor":
        trained_type = job.adapter_dtype if job.is_peft else job.dtype
        return (2.0 if trained_type == "float32" else 4.0) * 4.0 * _largest_trained(model, job)
    _, trained_bytes = _stepped(model, job)
    masters = _master_bytes(model, job) > 0
    of_kernels = (2.0 if masters else 1.0) * trained_bytes * _STEP_COPIES.get(job.optim, 0)
    of_deepspeed = 3.0 * trained_bytes if masters and job.sharding.by == "deepspeed" else 0.0
    return (of_kernels + of_deepspeed) / job.sharding.parts(1)


def _largest_trained(model: ModelSpec, job: ResolvedJob) -> int:
    """Elements of the largest single parameter that is trained."""
    if job.is_peft:
        runs = [adapted for _, adapted, _ in plan_adapters(model, job).runs]
        linears = [each for adapted in runs for each in (*adapted.linears, *adapted.expert_linears)]
        sizes = [each.r * max(each.linear.in_features, each.linear.out_features) for each in linears]
        return max([*sizes, *(each.num_params for adapted in runs for each in adapted.parameters)], default=0)
    sizes = [each.in_features * each.out_features for layer, _ in model.layers for each in layer.linears]
    sizes += [stack.num_params for layer, _ in model.layers for each in layer.all_experts for stack in each.stacks]
    return max(model.embedding_params, *sizes)


def on_one_gpu(held: Held, job: ResolvedJob) -> Held:
    """One GPU's part of what a sharded run holds between its passes."""
    sharding = job.sharding
    return Held(
        weights_bytes=-(-held.weights_bytes // sharding.parts(3)),
        adapters_bytes=-(-held.adapters_bytes // sharding.parts(3)),
        optimizer_bytes=-(-held.optimizer_bytes // sharding.parts(1)),
        gradients_bytes=-(-held.gradients_bytes // sharding.parts(2)),
    )
