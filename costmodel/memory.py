"""Device memory of one training step: what is held, and its peak as a maximum over phases.

The tensors are counted from what autograd saves for each operator of the real modules (transformers 5.24, peft 0.21);
``docs/formulas.md`` derives each term and ``tests`` holds them against traces of those modules. All figures in bytes,
all of one GPU, in the steady state (the optimizer has taken its first step).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from costmodel.adapters import Adapters, LayerAdapters, experts_are_stacked, plan_adapters
from costmodel.constants import (
    ALLOCATOR_OVERHEAD,
    CUBLAS_WORKSPACE_BYTES,
    CUDA_CONTEXT_BYTES,
    LOSS_CHUNK_TOKENS,
)
from costmodel.defaults import BITSANDBYTES, ResolvedJob
from costmodel.hf_config import Experts, Layer, Linear, ModelSpec, Norm
from costmodel.units import BYTES_PER_ELEMENT
from costmodel.workload import Batch, attention_kernel, num_trainable_params, stream_dtype

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
    "lion_32bit": 4.0,
    "paged_lion_32bit": 4.0,
    "lion_8bit": 1 + 4 / 256,
    "paged_lion_8bit": 1 + 4 / 256,
    "adamw_anyprecision": 4.0,
}


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
    device_bytes_by_phase: Mapping[str, int] | None = None  # what the card shows at the worst moment of each phase


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


@dataclass(frozen=True, slots=True)
class _Types:
    """Bytes of an element in the places where a step keeps tensors."""

    weights: int  # loaded, unquantised weights
    stream: int  # residual stream
    compute: int  # what matmuls run in
    adapter: int
    mlp: int  # outputs of the base linears
    autocast: bool


def _types(job: ResolvedJob) -> _Types:
    stream = BYTES_PER_ELEMENT[stream_dtype(job)]
    compute = 2 if job.autocast_dtype else stream
    # bitsandbytes casts the result of a 4- or 8-bit linear back to the type that came in.
    mlp = stream if job.quantization in BITSANDBYTES else compute
    return _Types(
        weights=BYTES_PER_ELEMENT[job.dtype],
        stream=stream,
        compute=compute,
        adapter=BYTES_PER_ELEMENT[job.adapter_dtype],
        mlp=mlp,
        autocast=job.autocast_dtype is not None,
    )


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


@lru_cache(maxsize=512)
def held_bytes(model: ModelSpec, job: ResolvedJob) -> Held:
    """Weights, adapters, optimizer states and gradients. Source: ``docs/formulas.md``, section memory."""
    quantized = quantized_params(model, job)
    rest = model.num_params - quantized
    rest_bytes = BYTES_PER_ELEMENT[stream_dtype(job)]
    weights = rest * rest_bytes
    if job.quantization:
        storage = f"{job.quantization}-double" if job.double_quant else job.quantization
        weights += int(quantized * _QUANTIZED_BYTES[storage])
        if job.quantization == "int8":
            weights += 4 * sum(linear.out_features * count for layer, count in model.layers for linear in layer.linears)
    trained_bytes = trained_parameter_bytes(model, job)
    return Held(
        weights_bytes=weights,
        adapters_bytes=trained_bytes if job.is_peft else 0,
        optimizer_bytes=_optimizer_bytes(model, job, trained_bytes) + _master_bytes(model, job, trained_bytes),
        gradients_bytes=trained_bytes,
    )


def _master_bytes(model: ModelSpec, job: ResolvedJob, trained_bytes: int) -> int:
    """fp32 copies of 16-bit trained weights, and fp32 states for them, that FSDP and DeepSpeed make in mixed precision.

    Counted as DeepSpeed's (2 + 2 + 4 + 8 bytes a weight with AdamW); FSDP's fp32 shards, gradients and states are as many.
    """
    trained = num_trainable_params(model, job)
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


def _optimizer_bytes(model: ModelSpec, job: ResolvedJob, trained_bytes: int) -> int:
    if job.optim in _STATE_OWN_COPIES:
        return _STATE_OWN_COPIES[job.optim] * trained_bytes
    trained = num_trainable_params(model, job)
    if job.optim == "adafactor":
        return 4 * _rows_and_columns(model, job)
    state = int(_STATE_BYTES[job.optim] * trained)
    if "8bit" in job.optim and not job.is_peft:
        # transformers registers every nn.Embedding for 32-bit states (Trainer.create_optimizer).
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


# --- activations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Instant:
    """A moment in the backward of one layer: what the layer has let go by then, and what is held in addition.

    Bytes for each token, for each (token, attended key), and whatever the batch. ``done``: its finished gradients.
    """

    done: float = 0.0
    freed_per_token: float = 0.0
    freed_per_pair: float = 0.0
    extra_per_token: float = 0.0
    extra_per_pair: float = 0.0
    extra_fixed: float = 0.0


@dataclass(frozen=True, slots=True)
class _LayerBytes:
    """What one layer keeps for its backward, and the moments of that backward that may be its worst.

    ``per_token`` bytes for each token, ``per_pair`` for each (token, attended key), ``fixed`` whatever the batch.
    """

    per_token: float
    per_pair: float
    fixed: float
    input_norm_per_token: float  # part of per_token that a checkpointed fp32 stream already holds
    first_layer_saving_per_token: float  # not kept in the first layer when nothing below it is trained
    instants: tuple[_Instant, ...]
    gradients: float  # bytes of all gradients of the layer
    escapes_checkpoint_per_token: float = 0.0  # held by every layer although it is checkpointed


def _adapter_input_bytes(types: _Types, job: ResolvedJob) -> float:
    """Bytes kept for each input element of an adapted linear: A's own copy of the input, and the dropout mask."""
    dropout = job.lora_dropout
    if types.autocast and types.stream == 2 and job.quantization in BITSANDBYTES:
        own_copy = 0.0  # peft's quantised layers leave the cast to autocast, which finds 16 bit
    elif types.adapter == types.stream and not (types.autocast and types.compute != types.adapter):
        own_copy = 0.0  # A reads the very tensor that is there
    elif types.autocast:
        own_copy = 2.0
    else:
        own_copy = float(types.adapter)
    if dropout > 0:
        kept = own_copy or float(types.compute)
        return kept + 1.0
    return own_copy


# Tensors as wide as the MLP that an activation keeps for its backward (what it reads and what its steps need), and whether
# the result is among them. Counted from activations.py of transformers 5.24, where gelu_new and gelu_fast are plain Python.
_KEPT_BY_ACTIVATION = {
    "gelu_new": (4, False),
    "gelu_accurate": (4, False),
    "gelu_fast": (7, False),
    "relu": (1, True),
    "relu2": (1, False),
    "quick_gelu": (2, False),
    "xielu": (4, False),
}


def _norm_bytes(norm: Norm, stream: int, full: bool, autocast: bool) -> float:
    """What the backward of one norm keeps for each token. A trained weight also needs the normalised input."""
    rows = norm.width // norm.size if norm.size else 1
    if norm.kind == "layer":  # one kernel: its input, mean and reciprocal deviation; autocast lifts the input to fp32
        return (4 if autocast else stream) * norm.width + 8 * rows
    if norm.kind == "cohere":
        return (12 if full else 8) * norm.width + 4 * rows
    normalised = stream if norm.kind == "rms" else 4
    return 4 * norm.width + 4 * rows + (normalised * norm.width if full and norm.size else 0)


def _attention_bytes(layer: Layer, kernel: str, job: ResolvedJob, compute: int, is_padded: bool) -> tuple[float, float]:
    """(bytes a token, bytes a pair of token and attended key) that attention keeps, its output aside in the eager form."""
    attention = layer.attention
    heads, query, keys = attention.num_heads, attention.query_width, attention.kv_width
    output = attention.output_width
    values = attention.num_kv_heads * (attention.value_dim or attention.head_dim)
    held_values = values + attention.fused_extra_width  # a view keeps the whole projection alive
    if job.framework == "litgpt":  # one projection for all three; the values are a view of it
        held_values = query + keys + values
    if kernel == "fused":
        # a batch of unequal lengths needs a mask, and so does a window that the sequences exceed
        exceeds_window = attention.sliding_window is not None and job.max_length > attention.sliding_window
        is_masked = (is_padded and job.framework != "litgpt") or exceeds_window
        if is_masked and job.attn_implementation == "sdpa":
            # memory-efficient kernel: keys and values repeated for each query head; the 16-bit mask of each sequence
            return 2 * (2 * query + 2 * output) + 4 * heads, 2.0
        return 2 * (query + keys + held_values + output) + 4 * heads, 0.0
    if kernel == "math":
        # scaled queries and keys, values, the output: all as wide as the queries; in 16 bit the unscaled ones and a mask
        # stay too. One fp32 or two 16-bit score matrices.
        return compute * query * (4 if compute == 4 else 6), 4.0 * heads + (0 if compute == 4 else compute)
    is_grouped = attention.num_kv_heads != heads
    repeated = query + output if is_grouped else keys + held_values
    sinks = (8 + compute) * heads if attention.score == "sinks" else 0  # where the largest score is, and a column more
    return compute * (query + repeated) + sinks, attention.eager_score_bytes(compute) * heads


def _mlp_widths(is_gated: bool, activation: str, keeps_product: bool) -> int:
    """Tensors as wide as an MLP that it keeps: the branches and, where ``down`` needs its input, the product."""
    kept, holds_result = _KEPT_BY_ACTIVATION.get(activation, (1, False))
    if is_gated:
        return kept + (0 if holds_result else 1) + 1 + (1 if keeps_product else 0)
    return kept + (1 if keeps_product and not holds_result else 0)


def _is_one_function(layer: Layer) -> bool:
    """Whether a mixer is Mamba's fused function, which reads the weights of its inner linears itself.

    Families that normalise between those linears (Jamba) run them one by one.
    """
    return layer.scan is not None and layer.scan.kind == "mamba" and all(norm.reads_layer_input for norm in layer.norms)


def _scan_bytes(layer: Layer, compute: int) -> float:
    """A recurrent mixer with fused kernels: its projections, the convolution's result, the scan's inputs and its result.

    Counted from the layer's widths; states are kept once a chunk and left out.
    """
    assert layer.scan is not None
    if _is_one_function(layer):
        # mamba_ssm 2.2 MambaInnerFn: the projection, what the scan reads of the token, the scan's result before its gate;
        # the convolution and the time steps are computed again. A pair of fp32 states for each 2,048 tokens.
        wide = next(each for each in layer.linears if each.place == "mixer_in")
        inner = next(each for each in layer.linears if each.leaf == "x_proj")
        state = layer.scan.state_flops // (2 * layer.scan.channels)
        return compute * (wide.out_features + inner.out_features + 2 * state + layer.scan.channels) + (
            8 * state * layer.scan.channels / 2048
        )
    projections = sum(each.out_features for each in layer.at("mixer_in", "mixer_inner"))
    results = sum(each.in_features for each in layer.at("mixer_out"))
    return compute * (projections + 2 * layer.scan.channels + 2 * results)


def _experts_bytes(experts: Experts, adapted: LayerAdapters, full: bool, activation: str) -> float:
    """What routed experts keep for each token, in 16 bit: gathered inputs where the stack is trained, the branches, and the
    results, which the routing weights multiply."""
    trained = full or bool(adapted.parameters) or bool(adapted.expert_linears)
    rows, hidden = experts.num_experts_computed, experts.hidden_size
    widths = 6 + trained if experts.clamps else _mlp_widths(experts.is_gated, activation, trained)
    kept = 2.0 * rows * (widths * experts.intermediate_size + hidden + (hidden if trained else 0))
    # router probabilities; indices and permutations
    return kept + 4.0 * experts.num_experts + 40.0 * experts.num_experts_per_tok


def _looped_experts_bytes(experts: Experts, job: ResolvedJob, types: _Types) -> float:
    """What adapted, quantised experts in a Python loop (transformers 4) hold for each token.

    A row of one expert keeps its gathered input, both branches, the activation and their product, its result, and the
    weighted result that ``index_add_`` scatters. Where the stream is fp32, the input and the product stay as 16-bit copies
    instead, one for each adapter and, before bitsandbytes 0.44, one for each base linear. Equal to a trace of that loop.
    """
    readers = experts.num_matrices - 1
    if types.stream == 2:
        inputs, product = 2.0, 2.0
    else:
        copies = 4.0 if job.four_bit_keeps_inputs else 2.0
        inputs, product = copies * readers, copies
    per_row = (3.0 * types.mlp + product) * experts.intermediate_size + (inputs + 2.0 * types.mlp) * experts.hidden_size
    return experts.num_experts_computed * per_row


def _mlp_instants(
    model: ModelSpec,
    layer: Layer,
    adapted: LayerAdapters,
    job: ResolvedJob,
    types: _Types,
    copy_bytes: float,
    dense: float,
    holds_inputs: bool,
) -> tuple[_Instant, ...]:
    """The moments of a layer's backward around its feed-forward (of a layer without one: around its mixer).

    Read off the traces of the real modules (``tests/tracing``). ``dense``: bytes a token that the dense MLP keeps.
    """
    full, hidden, stream, mlp, compute = not job.is_peft, model.hidden_size, types.stream, types.mlp, types.compute
    weight_bytes = types.weights if full else 0
    experts, width = layer.experts, layer.mlp_width
    if experts:
        stack_rows = 2.0 * experts.num_experts_per_tok
        down_params = experts.num_experts * experts.hidden_size * experts.intermediate_size
        if full:  # gate_up: its gradient is being built, down's is done
            return (
                _Instant(
                    done=float(weight_bytes * down_params),
                    freed_per_token=stack_rows * (hidden + 4 * experts.intermediate_size),
                    extra_per_token=stack_rows * (2 * experts.intermediate_size + hidden) + stream * hidden,
                    extra_fixed=2.0 * weight_bytes * down_params,
                ),
            )
        if adapted.parameters:  # down: the full gradient of the merged stack, while all but its result is still there
            return (
                _Instant(
                    freed_per_token=stack_rows * hidden,
                    extra_per_token=stack_rows * (hidden + experts.intermediate_size) + stream * hidden,
                    extra_fixed=compute * float(down_params),
                ),
                # the gradients of the experts' results before and after the routing weights, and of those weights
                _Instant(extra_per_token=3 * stack_rows * hidden + stream * hidden),
            )
        return (_Instant(extra_per_token=stack_rows * (hidden + 2 * experts.intermediate_size) + 2 * stream * hidden),)
    if not width:  # a layer of one mixer
        widest = max((each for each in layer.linears), key=lambda each: each.out_features, default=None)
        if widest is None:
            return (_Instant(),)
        return (
            _Instant(
                extra_per_token=2.0 * compute * widest.out_features + 2 * stream * hidden,
                extra_fixed=float((weight_bytes or (compute if job.quantization else 0)) * widest.num_params),
            ),
        )
    down = max(layer.at("mlp_out"), key=lambda each: each.in_features)
    down_bytes = float(weight_bytes * down.in_features * down.out_features)
    adapted_by_name = {each.linear.name: each for each in adapted.linears}
    down_adapted, into_adapted = (
        down.name in adapted_by_name,
        [each for each in layer.at("mlp_in") if each.name in adapted_by_name],
    )
    holds_result = _KEPT_BY_ACTIVATION.get(model.hidden_act, (1, False))[1]
    own_input = 0.0  # what down, or its A, keeps of its input
    if (full or down_adapted) and not (holds_result and not layer.is_gated):
        own_input = float((mlp if full or copy_bytes == 0.0 else copy_bytes) * width)
    if holds_inputs and copy_bytes != 0.0:
        own_input += mlp * width
    # the activation: down is through; the gradients of the product and of both branches, or before and after the activation
    branches = 3.0 if layer.is_gated else 2.0
    moments = [
        _Instant(done=down_bytes, freed_per_token=own_input, extra_per_token=branches * mlp * width + stream * hidden)
    ]
    if full:  # the norm before the MLP: its weights are through; five fp32 copies of a hidden state
        through = float(weight_bytes * sum(each.in_features * each.out_features for each in layer.at("mlp_in", "mlp_out")))
        moments.append(
            _Instant(done=through, freed_per_token=dense + 2 * stream * hidden, extra_per_token=(20.0 + stream) * hidden)
        )
    # results of A and B, and the gradients through them: in the adapters' own type without autocast
    branch = 4.0 if not types.autocast and types.adapter == 4 else 2.0
    if down_adapted:  # A's input gradient, before down's own
        moments.append(_Instant(extra_per_token=branch * width + 2 * stream * hidden))
    if into_adapted and job.gradient_checkpointing:
        # the layer runs again: B's result and the scaled one, before down has its input; the residual and the MLP's input
        # are still at hand
        moments.append(
            _Instant(freed_per_token=own_input, extra_per_token=2 * branch * width + (4.0 * stream + branch) * hidden)
        )
    if down_adapted and job.gradient_checkpointing and types.autocast and types.adapter == 4 and not job.quantization:
        # ... and peft lifts down's input to fp32, which autocast takes down again
        moments.append(_Instant(extra_per_token=(mlp + 4.0) * width + 5.0 * stream * hidden))
    if job.quantization:  # down's weight in 16 bit (32 without autocast), the product with it, A's gradient
        moments.append(
            _Instant(
                freed_per_token=own_input,
                extra_per_token=float(mlp + compute) * width + (compute + stream) * hidden,
                extra_fixed=float(compute * down.in_features * down.out_features),
            )
        )
    if any(adapted_by_name[each.name].dora for each in into_adapted):
        # a branch's scale: three gradients and a copy in the adapters' type, the branch and its gradient
        freed = own_input + 2 * mlp * width + (mlp + branch) * hidden
        moments.append(_Instant(freed_per_token=freed, extra_per_token=(4 * branch + 2 * mlp) * width + stream * hidden))
    return tuple(moments)


def _layer_bytes(
    model: ModelSpec, layer: Layer, adapted: LayerAdapters, job: ResolvedJob, types: _Types, is_padded: bool
) -> _LayerBytes:
    full = not job.is_peft
    hidden, attention = model.hidden_size, layer.attention
    compute, stream, mlp = types.compute, types.stream, types.mlp
    adapted_names = {each.linear.name for each in adapted.linears}
    adapted_parameters = {each.name for each in adapted.parameters}
    casts_input = types.autocast and stream != compute  # every linear casts its own copy of a norm's output
    copy_bytes = _adapter_input_bytes(types, job)
    rank_bytes = 4.0 if not types.autocast and types.adapter == 4 else 2.0

    holds_inputs = job.four_bit_keeps_inputs and not casts_input  # of its 4-bit linears; a cast is counted below

    def reads(linear: Linear) -> bool:
        """Whether the backward needs the very tensor that this linear reads."""
        needs = (full and linear.differentiable) or (linear.name in adapted_names and copy_bytes == 0.0)
        return needs or (holds_inputs and linear.differentiable)

    norms = sum(_norm_bytes(norm, stream, full, types.autocast) for norm in layer.norms)
    inputs = [norm for norm in layer.norms if norm.reads_layer_input]
    if len(inputs) > 1 and inputs[0].kind == "layer" and not types.autocast:
        norms -= (len(inputs) - 1) * stream * hidden  # one and the same tensor
    # what a block's linears and its router read: one tensor for all of them
    of_mixer, of_mlp = layer.at("mixer_in"), layer.at("mlp_in", "router", "mlp_gate")
    router_trained = any(full or f"{each.router}.weight" in adapted_parameters for each in layer.all_experts)
    mixer_read = any(reads(each) for each in of_mixer)
    routes = layer.experts is not None and layer.experts.router_params > 0 and not layer.experts.router_in_fp32
    mlp_read = any(reads(each) for each in of_mlp) or (router_trained and routes)
    if casts_input:
        cast_reads = [each for each in (*of_mixer, *of_mlp) if full]
        shared_reads = 2.0 * sum(each.in_features for each in cast_reads)
        if layer.experts and (full or router_trained):
            shared_reads += 2.0 * hidden if full else stream * hidden
        if not full:
            shared_reads += stream * hidden * (mixer_read + (any(reads(each) for each in of_mlp)))
    else:
        shared_reads = float(stream * hidden * (mixer_read + (mlp_read and not (layer.shares_input and mixer_read))))
    inner_reads = 2.0 if casts_input else float(compute)
    own_reads = inner_reads * sum(each.in_features for each in layer.at("mixer_inner", "side_in", "side_out") if reads(each))
    if _is_one_function(layer):
        own_reads = 0.0
    adapter_copies = sum(copy_bytes * each.linear.in_features + rank_bytes * each.r for each in adapted.linears)
    # DoRA scales the base's result and the adapter's, and keeps both for the gradient of its magnitude
    dora_results = mlp + (4 if rank_bytes == 4.0 else 2)
    adapter_copies += sum(dora_results * each.linear.out_features for each in adapted.linears if each.dora)
    if job.framework == "litgpt":  # one adapter for query and value: one input; index_copy holds what its convolution gave
        fused = [each.linear for each in adapted.linears if each.linear.place == "mixer_in"]
        adapter_copies -= copy_bytes * sum(each.in_features for each in fused[1:])
        adapted_width = attention.query_width + attention.kv_width  # litgpt adapts these two by default
        adapter_copies += sum(compute * min(each.out_features, adapted_width) for each in fused)
    if job.four_bit_keeps_inputs and casts_input:  # each 4-bit linear holds a 16-bit copy of its own
        adapter_copies += 2.0 * sum(each.in_features for each in layer.linears if each.differentiable)

    # attention; the output linear reads its result, which a fused kernel keeps anyway
    kernel = attention_kernel(job, layer)
    scores = per_pair = 0.0
    if attention.num_heads:
        scores, per_pair = _attention_bytes(layer, kernel, job, compute, is_padded)
        output = next((each for each in layer.linears if each.place == "mixer_out"), None)
        is_copied = kernel == "eager" or attention.has_output_gate or attention.copies_output or job.framework == "litgpt"
        if output is not None and reads(output) and is_copied:
            scores += compute * output.in_features
        if attention.has_output_gate:  # the sigmoid, and what it multiplies
            scores += compute * attention.output_width
            scores += compute * attention.output_width if kernel == "eager" else 0
    if layer.scan:
        scores += _scan_bytes(layer, compute)

    # dense and shared MLP
    dense = fixed = 0.0
    for down in layer.at("mlp_out"):
        keeps = (full and mlp == compute) or (down.name in adapted_names and copy_bytes == 0.0) or holds_inputs
        dense += mlp * down.in_features * _mlp_widths(layer.is_gated, model.hidden_act, keeps)
        if full and not keeps:
            dense += 2.0 * down.in_features
    for gate in layer.at("mlp_gate"):  # the gate's sigmoid and the shared result that it weighs
        dense += compute * (hidden + gate.out_features)
    if layer.has_dropout:
        dense += 2.0 * hidden  # the masks after attention and MLP
    # routed experts
    experts = layer.experts
    is_loop = bool(adapted.expert_linears) and job.quantization in BITSANDBYTES
    if is_loop:
        moe = sum(_looped_experts_bytes(each, job, types) for each in layer.all_experts)
    else:
        moe = sum(_experts_bytes(each, adapted, full, model.hidden_act) for each in layer.all_experts)
    if experts:
        rows = experts.num_experts_computed
        if not is_loop:
            moe += rows * sum(copy_bytes * a.linear.in_features + rank_bytes * a.r for a in adapted.expert_linears)
        if experts.router_in_fp32:
            fixed += 4.0 * experts.router_params if stream != 4 else 0.0
            moe += 4.0 * experts.num_experts + ((4.0 if stream != 4 else 0.0) * hidden if router_trained else 0.0)
    for parameter in adapted.parameters:
        if parameter.num_matrices > 1:  # the merged copy, and the 16-bit copies of A and B
            fixed += compute * parameter.base_params + (2.0 * parameter.num_params if types.adapter == 4 else 0.0)

    fixed += sum(4.0 * norm.size for norm in layer.norms if norm.kind == "rms_offset")  # weight + 1
    if job.quantization == "gptq-int4":  # a plain matmul with the unpacked weight, which autograd keeps (auto-gptq 0.4, 0.5)
        fixed += 2.0 * sum(each.in_features * each.out_features for each in layer.linears)
    # autocast's 16-bit copies of fp32 weights, kept for the input gradient (under checkpointing: of one layer at a time)
    if types.autocast and stream == 4 and job.quantization is None:
        fixed += 2.0 * sum(each.in_features * each.out_features for each in layer.linears)
        fixed += 2.0 * sum(each.num_params for each in layer.all_experts)
    if types.autocast and types.adapter == 4 and not job.gradient_checkpointing:
        fixed += 2.0 * sum(each.num_params for each in adapted.linears)

    per_token = norms + shared_reads + own_reads + adapter_copies + scores + dense + moe
    # a checkpoint already holds the layer's input: what a norm or a linear keeps of it is not held twice
    held_input = 0.0
    for norm in inputs[:1]:
        if norm.kind == "layer":
            held_input = 0.0 if types.autocast and stream == 2 else float(stream * hidden)
        else:
            held_input = 4.0 * hidden if stream == 4 or model.residual_in_fp32 else 0.0
    if not inputs and mixer_read:
        held_input = float(stream * hidden)
    # the input of the first layer needs no gradient where nothing below is trained
    saved_in_first = sum(_norm_bytes(norm, stream, full, types.autocast) for norm in inputs)

    gradients = float(types.weights * layer.num_params) if full else float(types.adapter * adapted.num_params)
    instants = _mlp_instants(model, layer, adapted, job, types, copy_bytes, dense, holds_inputs)
    if attention.num_heads and kernel in {"eager", "math"}:
        # the gradient of the scores before and after the softmax, in fp32; the 16-bit copy of the softmax is gone, and so
        # is the MLP. With sinks three score matrices in the compute type, when they are built and when they are undone.
        heads = attention.num_heads
        with_sinks = attention.score == "sinks"
        after_mlp = dense + moe + sum(_norm_bytes(norm, stream, full, types.autocast) for norm in inputs[1:])
        instants += (
            _Instant(
                done=float(types.weights * sum(each.num_params for each in layer.linears if not each.is_mixer))
                if full
                else 0.0,
                freed_per_token=after_mlp,
                freed_per_pair=float(compute * heads) if compute == 2 or with_sinks else 0.0,
                extra_per_token=float(stream * hidden),
                extra_per_pair=float(3 * compute if with_sinks else 8) * heads,
            ),
        )
    return _LayerBytes(
        per_token=per_token,
        per_pair=per_pair,
        fixed=fixed,
        input_norm_per_token=held_input,
        first_layer_saving_per_token=saved_in_first if job.is_peft and not job.gradient_checkpointing else 0.0,
        instants=instants,
        gradients=gradients,
        escapes_checkpoint_per_token=_escaping_bytes(layer, adapted, job, types),
    )


def _escaping_bytes(layer: Layer, adapted: LayerAdapters, job: ResolvedJob, types: _Types) -> float:
    """Inputs of 4-bit linears that non-reentrant checkpointing does not give up, for each token.

    ``MatMul4Bit`` of bitsandbytes before 0.44 holds its input as a plain attribute of the autograd node, out of reach of
    the saved-tensor hooks that this kind of checkpointing works with. A linear that has to cast its input holds a copy of
    its own; otherwise those that read one tensor share it.
    """
    if not _inputs_escape_checkpoints(job):
        return 0.0
    casts = types.stream != 2
    alone = layer.at("mixer_inner", "mixer_out", "mlp_out", "side_in", "side_out")
    width = sum(each.in_features for each in alone if each.differentiable)
    for read_together in (layer.at("mixer_in"), layer.at("mlp_in")):
        widths = [each.in_features for each in read_together if each.differentiable]
        width += sum(widths) if casts else max(widths, default=0)
    if adapted.expert_linears:
        for experts in layer.all_experts:
            branches = experts.num_matrices - 1 if casts else 1
            width += experts.num_experts_computed * (branches * experts.hidden_size + experts.intermediate_size)
    return 2.0 * width


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything about the peak that does not depend on the batch."""

    held: Held
    types: _Types
    runs: tuple[tuple[_LayerBytes, int], ...]
    head_trained: bool
    head_gradient_bytes: float
    embedding_gradient_bytes: float
    head_copy_bytes: float
    optimizer_temporary_bytes: float
    autocast_copies_bytes: float
    embedding_is_trained: bool
    gathered_bytes: float  # of sharded weights that a pass puts together again, and of buckets of gradients


@lru_cache(maxsize=512)
def _plan(model: ModelSpec, job: ResolvedJob, is_padded: bool) -> _Plan:
    types = _types(job)
    adapters: Adapters = plan_adapters(model, job)
    full = not job.is_peft
    saved_leaves = {name.rpartition(".")[2] for name in job.lora_modules_to_save}
    head_trained = full or "lm_head" in saved_leaves
    embedding_trained = full or "embed_tokens" in saved_leaves
    # an fp32 head under autocast leaves its 16-bit copy behind until its own backward is through
    head_copy = 2.0 * model.vocab_size * model.hidden_size if types.autocast and types.stream == 4 else 0.0
    return _Plan(
        held=_on_one_gpu(held_bytes(model, job), job),
        types=types,
        runs=tuple(
            (_layer_bytes(model, layer, adapted, job, types, is_padded), count) for layer, adapted, count in adapters.runs
        ),
        head_trained=head_trained,
        head_gradient_bytes=float(types.weights * model.embedding_params) if head_trained else 0.0,
        embedding_gradient_bytes=float(types.weights * model.embedding_params) if embedding_trained else 0.0,
        head_copy_bytes=head_copy,
        # torch's foreach kernels build one temporary the size of everything trained; fused kernels and bitsandbytes none.
        optimizer_temporary_bytes=_optimizer_temporary_bytes(model, job),
        autocast_copies_bytes=_autocast_copies_bytes(model, job, types),
        embedding_is_trained=embedding_trained,
        gathered_bytes=_gathered_bytes(model, job, types) + 2.0 * job.sharding.bucket_elements,
    )


def _optimizer_temporary_bytes(model: ModelSpec, job: ResolvedJob) -> float:
    """What foreach kernels build; with fp32 masters they work on those, beside DeepSpeed's flat gradients in both types.

    Adafactor works on one parameter at a time: its update and the negated one in fp32, and fp32 copies of a 16-bit weight
    and of its gradient (transformers 5.24, optimization.py).
    """
    if job.optim == "adafactor":
        trained_type = job.adapter_dtype if job.is_peft else job.dtype
        return (2.0 if trained_type == "float32" else 4.0) * 4.0 * _largest_trained(model, job)
    trained_bytes = trained_parameter_bytes(model, job)
    masters = _master_bytes(model, job, trained_bytes) > 0
    of_kernels = (2.0 if masters else 1.0) * trained_bytes * _STEP_COPIES.get(job.optim, 0)
    of_deepspeed = 3.0 * trained_bytes if masters and job.sharding.by == "deepspeed" else 0.0
    return (of_kernels + of_deepspeed) / job.sharding.parts(1)


def _autocast_copies_bytes(model: ModelSpec, job: ResolvedJob, types: _Types) -> float:
    """16-bit copies of trained fp32 weights of the layers: autocast keeps each until its context is left."""
    if not (types.autocast and types.stream == 4) or job.is_peft:
        return 0.0
    return 2.0 * sum(
        count * (sum(each.num_params for each in layer.linears) + sum(each.num_params for each in layer.all_experts))
        for layer, count in model.layers
    )


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


def _on_one_gpu(held: Held, job: ResolvedJob) -> Held:
    """One GPU's part of what a sharded run holds between its passes."""
    sharding = job.sharding
    return Held(
        weights_bytes=-(-held.weights_bytes // sharding.parts(3)),
        adapters_bytes=-(-held.adapters_bytes // sharding.parts(3)),
        optimizer_bytes=-(-held.optimizer_bytes // sharding.parts(1)),
        gradients_bytes=-(-held.gradients_bytes // sharding.parts(2)),
    )


def _gathered_bytes(model: ModelSpec, job: ResolvedJob, types: _Types) -> float:
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
) -> MemoryBreakdown:
    """Peak of one training step on ``batch``; ``is_padded`` says whether its sequences differ in length.

    The peak is the largest of: the loss at the end of the forward, the backward of the last and of the first layer of each
    run, the embedding's backward, the optimizer step, the forward on ``evaluation`` where the run evaluates. A ``Trainer``
    drops the logits' reference before the backward; a loop that keeps ``outputs`` alive (``keeps_logits``) holds them too.
    ``loss_in_fp32`` is false for remote code that leaves the loss in the model's type where no autocast lifts it.
    """
    plan = _plan(model, job, is_padded)
    moments = _moments(model, job, plan, batch, keeps_logits, evaluation, loss_in_fp32)
    worst = max(moments, key=lambda moment: moment.total)
    held = plan.held
    fixed = held.static_bytes + (0 if on_cpu else CUBLAS_WORKSPACE_BYTES)
    context = 0 if on_cpu else CUDA_CONTEXT_BYTES
    # weights and states lie densely; the gaps are between what comes and goes
    overhead = 0.0 if on_cpu else ALLOCATOR_OVERHEAD[job_class(job)]
    allocated, reserved = fixed + worst.total, fixed + worst.total * (1 + overhead)
    by_phase: dict[str, float] = {}
    for moment in moments:
        by_phase[moment.phase] = max(moment.total, by_phase.get(moment.phase, 0.0))
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
        peak_reserved_bytes=int(reserved),
        peak_device_bytes=int(reserved) + context,
        device_bytes_by_phase={phase: int(fixed + total * (1 + overhead)) + context for phase, total in by_phase.items()},
    )


def peak_device_bytes(
    model: ModelSpec,
    job: ResolvedJob,
    batch: Batch,
    *,
    is_padded: bool = False,
    on_cpu: bool = False,
    evaluation: Batch | None = None,
) -> int:
    """``peak_memory(...).peak_device_bytes`` alone, for searches."""
    plan = _plan(model, job, is_padded)
    worst = max(moment.total for moment in _moments(model, job, plan, batch, evaluation=evaluation))
    if on_cpu:
        return int(plan.held.static_bytes + worst)
    allocated = plan.held.static_bytes + worst + CUBLAS_WORKSPACE_BYTES
    return int(allocated + ALLOCATOR_OVERHEAD[job_class(job)] * worst) + CUDA_CONTEXT_BYTES


def loss_bytes(model: ModelSpec, job: ResolvedJob, batch: Batch) -> float:
    """What the loss of a batch holds at once: the blocks whose size changes with the length of the batch the most."""
    if job.fused_loss or job.framework == "litgpt":
        return 0.0
    return 12.0 * model.vocab_size * batch.num_head_tokens


def job_class(job: ResolvedJob) -> str:
    """The class of job that decides how much the caching allocator holds beyond what is allocated."""
    if not job.is_peft:
        return "full"
    return "lora_checkpointed" if job.gradient_checkpointing and not _inputs_escape_checkpoints(job) else "lora"


def _inputs_escape_checkpoints(job: ResolvedJob) -> bool:
    """Whether 4-bit linears hold their inputs although their layer is checkpointed; see :func:`_escaping_bytes`."""
    return job.gradient_checkpointing and job.four_bit_keeps_inputs and not job.reentrant_checkpointing


def _moments(
    model: ModelSpec,
    job: ResolvedJob,
    plan: _Plan,
    batch: Batch,
    keeps_logits: bool = False,
    evaluation: Batch | None = None,
    loss_in_fp32: bool = True,
) -> list[_Moment]:
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

    def layer_bytes(each: _LayerBytes) -> float:
        return each.per_token * tokens + each.per_pair * pairs + each.fixed

    def kept(each: _LayerBytes) -> float:
        if is_away:
            return 0.0
        if not job.gradient_checkpointing:
            return layer_bytes(each)
        return checkpoint + each.escapes_checkpoint_per_token * tokens

    first = plan.runs[0][0]
    stored = 0.0
    if not is_away:
        stored = sum(kept(each) * count for each, count in plan.runs) - first.first_layer_saving_per_token * tokens
    # final norm: its fp32 input; trained, also the normalised input; and the head's input where that is trained or cast
    final_norm = 4.0 * hidden + 4 + (2 * types.stream * hidden if not job.is_peft else 0)
    if types.autocast and types.stream == 4 and not job.is_peft:
        final_norm += 2.0 * hidden - types.stream * hidden
    final = final_norm * tokens + plan.head_copy_bytes

    # keys and values in the model's outputs; attention keeps these very tensors, unless it keeps repeated ones
    kv_cache = kv_beside = 0.0
    if job.use_cache and not job.gradient_checkpointing:
        for (layer, count), (each, _) in zip(model.layers, plan.runs, strict=True):
            of_run = 2.0 * types.compute * layer.attention.kv_width * count * tokens
            kv_cache += of_run
            kv_beside += of_run if layer.attention.num_heads > layer.attention.num_kv_heads and each.per_pair else 0.0

    # 1. the loss. log-softmax is saved (4 B a logit), its backward holds the gradient of the loss and the result (4 + 4).
    head_tokens = batch.num_head_tokens
    if job.fused_loss == "fused":
        chunk = min(head_tokens, LOSS_CHUNK_TOKENS["fused"])
        logits, loss_temporary = 0.0, 16.0 * vocab * chunk + types.compute * hidden * head_tokens
    elif job.fused_loss == "chunked":
        chunk = min(head_tokens, LOSS_CHUNK_TOKENS["chunked"])
        logits, loss_temporary = 0.0, 16.0 * vocab * chunk + types.compute * hidden * head_tokens
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
    if job.fused_loss and plan.head_trained:
        logits, loss_temporary = 0.0, loss_temporary + plan.head_gradient_bytes
    # a Trainer lets go of the model's outputs before the backward
    outputs = float((4.0 if job.upcasts_logits else types.compute) * vocab * head_tokens) if keeps_logits else 0.0
    kept_cache, kept_beside = (kv_cache, kv_beside) if keeps_logits else (0.0, 0.0)
    moments = [_Moment("loss", base_gradients, stored + final + kept_beside, logits, loss_temporary)]
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
    # 4. an evaluation, after the gradients are gone
    if evaluation is not None:
        moments += _evaluation_moments(model, job, plan, evaluation)
    # 5. the optimizer
    moments.append(_Moment("optimizer", reduced_gradients, kept_cache, 0.0, plan.optimizer_temporary_bytes + outputs))
    return moments


def _evaluation_moments(model: ModelSpec, job: ResolvedJob, plan: _Plan, batch: Batch) -> list[_Moment]:
    """A forward without gradients on ``batch``: nothing is kept, one layer is at work, then the logits and their loss.

    The loss holds the logits as they come from the head, their fp32 copy where they are not fp32 already, and the
    log-softmax: 2 + 4 + 4 or 4 + 4 bytes each (``ForCausalLMLoss``, transformers 5.24). A chunked loss (TRL) holds one
    chunk. Liger's fused loss is for training only: an evaluation builds the logits.
    """
    types, tokens = plan.types, batch.num_tokens
    stream = types.stream * model.hidden_size * tokens
    # under autocast the 16-bit copies of trained fp32 weights are cached through the whole forward, those of frozen ones not
    copies = plan.autocast_copies_bytes
    at_work = max(each.per_token * tokens + each.per_pair * batch.num_attended_pairs for each, _ in plan.runs)
    fixed = plan.gathered_bytes
    if job.fused_loss == "chunked":
        logits, loss = 0.0, 8.0 * model.vocab_size * min(batch.num_head_tokens, LOSS_CHUNK_TOKENS["chunked"])
    else:
        elements = model.vocab_size * batch.num_head_tokens
        logits, loss = float(types.compute * elements), (8.0 if types.compute == 2 else 4.0) * elements
    return [
        _Moment("evaluation", 0.0, stream, 0.0, at_work + copies + fixed),
        _Moment(
            "evaluation", 0.0, stream, logits, loss + (plan.head_copy_bytes if plan.head_trained else 0.0) + copies + fixed
        ),
    ]
