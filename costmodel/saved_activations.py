"""What each layer keeps for its backward pass, and what that pass holds at its worst moments. Bytes for each token.

Counted from what autograd saves for each operator of the real modules (transformers 5.24, peft 0.21); ``docs/formulas.md``
derives each term and ``tests`` holds them against traces of those modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from costmodel.adapters import LayerAdapters
from costmodel.defaults import BITSANDBYTES, ResolvedJob
from costmodel.held_memory import ElementBytes
from costmodel.model_spec import Experts, Layer, Linear, ModelSpec, Norm
from costmodel.workload import Batch, attention_kernel, reaches_window


@dataclass(frozen=True, slots=True)
class Instant:
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
class Rows:
    """What decides which masks the rows of a batch need, whatever their number."""

    is_padded: bool = False  # they differ in length
    reached_window: int = 0  # the widest sliding window that they reach, in tokens


def rows_of(model: ModelSpec, batch: Batch, *, is_padded: bool) -> Rows:
    """``is_padded``: whether the sequences of ``batch`` differ in length."""
    windows = {layer.attention.sliding_window for layer, _ in model.layers} - {None}
    return Rows(is_padded, max((each for each in windows if each and reaches_window(batch.row_tokens, each)), default=0))


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What one layer keeps for its backward, and the moments of that backward that may be its worst.

    ``per_token`` bytes for each token, ``per_pair`` for each (token, attended key), ``fixed`` whatever the batch.
    """

    per_token: float
    per_pair: float
    fixed: float
    input_norm_per_token: float  # part of per_token that a checkpointed fp32 stream already holds
    first_layer_saving_per_token: float  # not kept in the first layer when nothing below it is trained
    instants: tuple[Instant, ...]
    gradients: float  # bytes of all gradients of the layer
    escapes_checkpoint_per_token: float = 0.0  # held by every layer although it is checkpointed


def _adapter_input_bytes(types: ElementBytes, job: ResolvedJob) -> float:
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


# Families whose norms and gated MLPs Liger 0.8 replaces (transformers/monkey_patch.py); of stacked experts, the norms.
_LIGER_FAMILIES = frozenset(
    {"exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "hunyuan_v1_dense", "llama", "ministral", "mistral", "mixtral"}
    | {"olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"}
)


_LIGER_HEAD_NORM_FAMILIES = frozenset({"exaone4", "gemma3_text"})  # where it replaces those of queries and keys as well


def has_liger_norms(model: ModelSpec, job: ResolvedJob) -> bool:
    """Whether Liger computes the norms of hidden states and the products of gated MLPs."""
    return job.use_liger_kernel and model.family in _LIGER_FAMILIES


def _norm_bytes(norm: Norm, stream: int, full: bool, autocast: bool, is_liger: bool) -> float:
    """What the backward of one norm keeps for each token. A trained weight also needs the normalised input.

    Liger's keeps the very tensor that it reads, and computes the rest again (ops/rms_norm.py).
    """
    rows = norm.width // norm.size if norm.size else 1
    if is_liger and norm.kind in {"rms", "rms_offset"}:
        return stream * norm.width + 4 * rows
    if norm.kind == "layer":  # one kernel: its input, mean and reciprocal deviation; autocast lifts the input to fp32
        return (4 if autocast else stream) * norm.width + 8 * rows
    if norm.kind == "cohere":
        return (12 if full else 8) * norm.width + 4 * rows
    normalised = stream if norm.kind == "rms" else 4
    return 4 * norm.width + 4 * rows + (normalised * norm.width if full and norm.size else 0)


def _attention_bytes(layer: Layer, kernel: str, job: ResolvedJob, compute: int, rows: Rows) -> tuple[float, float]:
    """(bytes a token, bytes a pair of token and attended key) that attention keeps, its output aside in the eager form."""
    attention = layer.attention
    heads, query, keys = attention.num_heads, attention.query_width, attention.kv_width
    output = attention.output_width
    values = attention.num_kv_heads * (attention.value_dim or attention.head_dim)
    held_values = values + attention.fused_extra_width  # a view keeps the whole projection alive
    if job.framework == "litgpt":  # one projection for all three; the values are a view of it
        held_values = query + keys + values
    if kernel == "fused":
        # a batch of unequal lengths needs a mask, and so does a window that the rows reach
        reaches_window = attention.sliding_window is not None and attention.sliding_window <= rows.reached_window
        is_masked = (rows.is_padded and job.framework != "litgpt") or reaches_window
        if is_masked and job.attn_implementation == "sdpa":
            # memory-efficient kernel: keys and values repeated for each query head; the 16-bit mask of each sequence
            is_repeated = attention.num_kv_heads != heads
            return 2 * (query + output + (query + output if is_repeated else keys + held_values)) + 4 * heads, 2.0
        return 2 * (query + keys + held_values + output) + 4 * heads, 0.0
    if kernel == "math":
        # scaled queries and keys, values, the output: all as wide as the queries; in 16 bit the unscaled ones and a mask
        # stay too. One fp32 or two 16-bit score matrices.
        return compute * query * (4 if compute == 4 else 6), 4.0 * heads + (0 if compute == 4 else compute)
    is_grouped = attention.num_kv_heads != heads
    repeated = query + output if is_grouped else keys + held_values
    sinks = (8 + compute) * heads if attention.score == "sinks" else 0  # where the largest score is, and a column more
    return compute * (query + repeated) + sinks, attention.eager_score_bytes(compute) * heads


def _mlp_widths(is_gated: bool, activation: str, keeps_product: bool, is_liger: bool = False) -> int:
    """Tensors as wide as an MLP that it keeps: the branches and, where ``down`` needs its input, the product.

    Liger's product of the two branches computes the activation again (ops/swiglu.py, geglu.py).
    """
    if is_liger and is_gated:
        return 2 + (1 if keeps_product else 0)
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
    if layer.scan.kind == "mamba2":
        # mamba_ssm 2.2 MambaSplitConv1dScanCombinedFn: the projection, the scan's result, one fp32 number of its norm
        return compute * (projections + results) + 4
    return compute * (projections + 2 * layer.scan.channels + 2 * results)


def _experts_bytes(experts: Experts, adapted: LayerAdapters, full: bool, activation: str) -> float:
    """What routed experts keep for each token, in 16 bit: what a trained or adapted stack reads (the gathered inputs, the
    product), the branches, and the results, which the routing weights multiply."""
    names = {parameter.name for parameter in adapted.parameters}
    reads_all = full or bool(adapted.expert_linears)
    reads_product = reads_all or any(stack.name in names for stack in experts.stacks[-1:])
    reads_input = reads_all or any(stack.name in names for stack in experts.stacks[:-1])
    rows, hidden = experts.num_experts_computed, experts.hidden_size
    widths = 6 + reads_product if experts.clamps else _mlp_widths(experts.is_gated, activation, reads_product)
    kept = 2.0 * rows * (widths * experts.intermediate_size + hidden + (hidden if reads_input else 0))
    # router probabilities; indices and permutations
    return kept + 4.0 * experts.num_experts + 40.0 * experts.num_experts_per_tok


def _looped_experts_bytes(experts: Experts, job: ResolvedJob, types: ElementBytes) -> float:
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
    types: ElementBytes,
    copy_bytes: float,
    dense: float,
    holds_inputs: bool,
) -> tuple[Instant, ...]:
    """The moments of a layer's backward around its feed-forward (of a layer without one: around its mixer).

    Read off the traces of the real modules (``tests/tracing``). ``dense``: bytes a token that the dense MLP keeps.
    """
    full, hidden, stream, mlp, compute = not job.is_peft, model.hidden_size, types.stream, types.mlp, types.compute
    weight_bytes = types.weights if full else 0
    experts, width = layer.experts, layer.mlp_width
    if experts:
        stack_rows = 2.0 * experts.num_experts_per_tok
        down_params = experts.num_experts * experts.hidden_size * experts.intermediate_size
        stacks = [each.base_params for each in adapted.parameters if each.num_matrices > 1]
        if full:
            stacks = [2 * down_params, down_params]
        if stacks and job.experts_implementation == "eager" and job.fused_experts:
            # a loop that picks one expert of the stack after the other: each gives a gradient as large as the stack, most
            # of it zero (select_backward), beside what has been added up of each; an adapter's is of its merged copy
            through = stack_rows * (hidden + 4 * experts.intermediate_size) / experts.num_experts  # the first expert
            fixed = float(weight_bytes if full else compute) * (sum(stacks) + max(stacks))
            return (Instant(freed_per_token=through, extra_per_token=stream * hidden, extra_fixed=fixed),)
        if full:  # gate_up: its gradient is being built, down's is done
            return (
                # the activation: the gradients of the product and of both branches
                Instant(
                    done=float(weight_bytes * down_params),
                    freed_per_token=stack_rows * (hidden + experts.intermediate_size),
                    extra_per_token=3 * stack_rows * experts.intermediate_size + stream * hidden,
                ),
                Instant(
                    done=float(weight_bytes * down_params),
                    freed_per_token=stack_rows * (hidden + 4 * experts.intermediate_size),
                    extra_per_token=stack_rows * (2 * experts.intermediate_size + hidden) + stream * hidden,
                    extra_fixed=2.0 * weight_bytes * down_params,
                ),
            )
        adapts_down = any(stack.name == each.name for stack in experts.stacks[-1:] for each in adapted.parameters)
        if adapted.parameters and not adapts_down:
            # gate_up alone. The activation: the gradients of the product and of both branches. Then, all but its own input
            # let go, the full gradient of its merged stack.
            return (
                Instant(
                    freed_per_token=stack_rows * hidden,
                    extra_per_token=3 * stack_rows * experts.intermediate_size + stream * hidden,
                ),
                Instant(
                    freed_per_token=stack_rows * (hidden + 3 * experts.intermediate_size),
                    extra_per_token=stack_rows * (2 * experts.intermediate_size + hidden) + stream * hidden,
                    extra_fixed=2.0 * compute * down_params,
                ),
                Instant(extra_per_token=3 * stack_rows * hidden + stream * hidden),
            )
        if adapted.parameters:  # down: the full gradient of the merged stack, while all but its result is still there
            return (
                Instant(
                    freed_per_token=stack_rows * hidden,
                    extra_per_token=stack_rows * (hidden + experts.intermediate_size) + stream * hidden,
                    extra_fixed=compute * float(down_params),
                ),
                # the gradients of the experts' results before and after the routing weights, and of those weights
                Instant(extra_per_token=3 * stack_rows * hidden + stream * hidden),
            )
        return (Instant(extra_per_token=stack_rows * (hidden + 2 * experts.intermediate_size) + 2 * stream * hidden),)
    if not width:  # a layer of one mixer
        widest = max((each for each in layer.linears), key=lambda each: each.out_features, default=None)
        if widest is None:
            return (Instant(),)
        return (
            Instant(
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
    is_liger = has_liger_norms(model, job)
    branches = 3.0 if layer.is_gated else 2.0
    if is_liger and layer.is_gated:
        branches = 1.0  # the branches' gradients take their own place
    moments = [Instant(done=down_bytes, freed_per_token=own_input, extra_per_token=branches * mlp * width + stream * hidden)]
    if full and not is_liger:  # the norm before the MLP: its weights are through; five fp32 copies of a hidden state
        through = float(weight_bytes * sum(each.in_features * each.out_features for each in layer.at("mlp_in", "mlp_out")))
        moments.append(
            Instant(done=through, freed_per_token=dense + 2 * stream * hidden, extra_per_token=(20.0 + stream) * hidden)
        )
    # results of A and B, and the gradients through them: in the adapters' own type without autocast
    branch = 4.0 if not types.autocast and types.adapter == 4 else 2.0
    if down_adapted:  # A's input gradient, before down's own
        moments.append(Instant(extra_per_token=branch * width + 2 * stream * hidden))
    if into_adapted and job.gradient_checkpointing:
        # the layer runs again: B's result and the scaled one, before down has its input; the residual and the MLP's input
        # are still at hand
        moments.append(
            Instant(freed_per_token=own_input, extra_per_token=2 * branch * width + (4.0 * stream + branch) * hidden)
        )
    if down_adapted and job.gradient_checkpointing and types.autocast and types.adapter == 4 and not job.quantization:
        # ... and peft lifts down's input to fp32, which autocast takes down again
        moments.append(Instant(extra_per_token=(mlp + 4.0) * width + 5.0 * stream * hidden))
    if job.quantization:  # down's weight in 16 bit (32 without autocast), the product with it, A's gradient
        # GPTQ's is kept with the layer; while it is unpacked, its codes are there in 32 and in 8 bit (auto-gptq 0.4, 0.5)
        per_weight = 4 + 1 - 2 if job.quantization == "gptq-int4" else compute
        moments.append(
            Instant(
                freed_per_token=own_input,
                extra_per_token=float(mlp + compute) * width + (compute + stream) * hidden,
                extra_fixed=float(per_weight * down.in_features * down.out_features),
            )
        )
    if any(adapted_by_name[each.name].dora for each in into_adapted):
        # a branch's scale: three gradients and a copy in the adapters' type, the branch and its gradient
        freed = own_input + 2 * mlp * width + (mlp + branch) * hidden
        moments.append(Instant(freed_per_token=freed, extra_per_token=(4 * branch + 2 * mlp) * width + stream * hidden))
    return tuple(moments)


def layer_bytes(
    model: ModelSpec, layer: Layer, adapted: LayerAdapters, job: ResolvedJob, types: ElementBytes, rows: Rows
) -> LayerBytes:
    full, is_liger = not job.is_peft, has_liger_norms(model, job)
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

    norms_of_heads = is_liger and model.family in _LIGER_HEAD_NORM_FAMILIES

    def norm_bytes(norms: Iterable[Norm]) -> float:
        return sum(
            _norm_bytes(norm, stream, full, types.autocast, is_liger and (norms_of_heads or norm.size == hidden))
            for norm in norms
        )

    inside_scan = ("mamba.norm", "mixer.norm") if layer.scan is not None and layer.scan.kind == "mamba2" else ()
    norms = norm_bytes(norm for norm in layer.norms if not norm.name.endswith(inside_scan))
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
        scores, per_pair = _attention_bytes(layer, kernel, job, compute, rows)
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
        dense += mlp * down.in_features * _mlp_widths(layer.is_gated, model.hidden_act, keeps, is_liger)
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
        if not is_loop:
            moe += experts.num_experts_computed * sum(
                copy_bytes * a.linear.in_features + rank_bytes * a.r for a in adapted.expert_linears
            )
        if experts.router_in_fp32:
            fixed += 4.0 * experts.router_params if stream != 4 else 0.0
            moe += 4.0 * experts.num_experts + ((4.0 if stream != 4 else 0.0) * hidden if router_trained else 0.0)
    for parameter in adapted.parameters:
        if parameter.num_matrices > 1:  # the merged copy, and the 16-bit copies of A and B
            fixed += compute * parameter.base_params + (2.0 * parameter.num_params if types.adapter == 4 else 0.0)

    if not is_liger:
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
            held_input = 4.0 * hidden if stream == 4 or model.residual_in_fp32 else 2.0 * hidden if is_liger else 0.0
    if not inputs and mixer_read:
        held_input = float(stream * hidden)
    # the input of the first layer needs no gradient where nothing below is trained
    saved_in_first = norm_bytes(inputs)

    gradients = float(types.weights * layer.num_params) if full else float(types.adapter * adapted.num_params)
    instants = _mlp_instants(model, layer, adapted, job, types, copy_bytes, dense, holds_inputs)
    if attention.num_heads and kernel in {"eager", "math"}:
        # the gradient of the scores before and after the softmax, in fp32; the 16-bit copy of the softmax is gone, and so
        # is the MLP. With sinks three score matrices in the compute type, when they are built and when they are undone.
        heads = attention.num_heads
        with_sinks = attention.score == "sinks"
        after_mlp = dense + moe + norm_bytes(inputs[1:])
        instants += (
            Instant(
                done=float(types.weights * sum(each.num_params for each in layer.linears if not each.is_mixer))
                if full
                else 0.0,
                freed_per_token=after_mlp,
                freed_per_pair=float(compute * heads) if compute == 2 or with_sinks else 0.0,
                extra_per_token=float(stream * hidden),
                extra_per_pair=float(3 * compute if with_sinks else 8) * heads,
            ),
        )
    return LayerBytes(
        per_token=per_token,
        per_pair=per_pair,
        fixed=fixed,
        input_norm_per_token=held_input,
        first_layer_saving_per_token=saved_in_first if job.is_peft and not job.gradient_checkpointing else 0.0,
        instants=instants,
        gradients=gradients,
        escapes_checkpoint_per_token=_escaping_bytes(layer, adapted, job, types),
    )


def _escaping_bytes(layer: Layer, adapted: LayerAdapters, job: ResolvedJob, types: ElementBytes) -> float:
    """Inputs of 4-bit linears that non-reentrant checkpointing does not give up, for each token.

    ``MatMul4Bit`` of bitsandbytes before 0.44 holds its input as a plain attribute of the autograd node, out of reach of
    the saved-tensor hooks that this kind of checkpointing works with. A linear that has to cast its input holds a copy of
    its own; otherwise those that read one tensor share it.
    """
    if not inputs_escape_checkpoints(job):
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


def inputs_escape_checkpoints(job: ResolvedJob) -> bool:
    """Whether 4-bit linears hold their inputs although their layer is checkpointed; see :func:`_escaping_bytes`."""
    return job.gradient_checkpointing and job.four_bit_keeps_inputs and not job.reentrant_checkpointing
