"""What each layer keeps for its backward pass. Bytes for each token.

Counted from what autograd saves for each operator of the real modules (transformers 5.24, peft 0.21); ``docs/formulas.md``
derives each term and ``tests`` holds them against traces of those modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from costmodel.adapters import LayerAdapters
from costmodel.backward_instants import Instant, feed_forward_instants, of_scores
from costmodel.defaults import BITSANDBYTES, ResolvedJob
from costmodel.held_memory import ElementBytes
from costmodel.layer_kernels import (
    KEPT_BY_ACTIVATION,
    LIGER_HEAD_NORM_FAMILIES,
    Rows,
    attention_is_masked,
    has_liger_norms,
)
from costmodel.model_spec import Experts, Layer, Linear, ModelSpec, Norm
from costmodel.workload import attention_kernel


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
        if attention_is_masked(layer, job, rows):
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
    kept, holds_result = KEPT_BY_ACTIVATION.get(activation, (1, False))
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


def layer_bytes(
    model: ModelSpec, layer: Layer, adapted: LayerAdapters, job: ResolvedJob, types: ElementBytes, rows: Rows
) -> LayerBytes:
    saved = _Saved(model, layer, adapted, job, types)
    full, hidden_bytes, kernel = not job.is_peft, float(types.stream * model.hidden_size), attention_kernel(job, layer)
    inputs = [norm for norm in layer.norms if norm.reads_layer_input]
    dense, experts, per_pair = saved.dense_mlp(), saved.experts(), 0.0
    mixer = _scan_bytes(layer, types.compute) if layer.scan else 0.0
    if layer.attention.num_heads:
        scores, per_pair = saved.attention(kernel, rows)
        mixer += scores
    instants = feed_forward_instants(model, layer, adapted, job, types, saved.copy_bytes, dense, saved.holds_inputs)
    if layer.attention.num_heads and kernel in {"eager", "math"}:
        after_mlp = dense + experts + saved.of_norms(inputs[1:])
        instants += (of_scores(layer, types, full=full, hidden_bytes=hidden_bytes, after_mlp=after_mlp),)
    return LayerBytes(
        per_token=saved.norms()
        + saved.shared_reads()
        + saved.own_reads()
        + saved.adapter_copies()
        + mixer
        + dense
        + experts,
        per_pair=per_pair,
        fixed=saved.whatever_the_batch(),
        input_norm_per_token=saved.held_by_a_checkpoint(),
        # the input of the first layer needs no gradient where nothing below is trained
        first_layer_saving_per_token=saved.of_norms(inputs) if job.is_peft and not job.gradient_checkpointing else 0.0,
        instants=instants,
        gradients=float(types.weights * layer.num_params) if full else float(types.adapter * adapted.num_params),
        escapes_checkpoint_per_token=_escaping_bytes(layer, adapted, job, types),
    )


class _Saved:
    """What one layer saves for its backward, group by group."""

    def __init__(
        self, model: ModelSpec, layer: Layer, adapted: LayerAdapters, job: ResolvedJob, types: ElementBytes
    ) -> None:
        self.model, self.layer, self.adapted, self.job, self.types = model, layer, adapted, job, types
        self.full, self.is_liger, self.hidden = not job.is_peft, has_liger_norms(model, job), model.hidden_size
        # every linear casts its own copy of a norm's output
        self.casts_input = types.autocast and types.stream != types.compute
        self.copy_bytes = _adapter_input_bytes(types, job)
        self.rank_bytes = 4.0 if not types.autocast and types.adapter == 4 else 2.0
        # of its 4-bit linears; a cast is counted with the adapters' copies
        self.holds_inputs = job.four_bit_keeps_inputs and not self.casts_input
        self.adapted_names = {each.linear.name for each in adapted.linears}
        trained = {each.name for each in adapted.parameters}
        self.trains_router = any(self.full or f"{each.router}.weight" in trained for each in layer.all_experts)
        self.mixer_is_read = any(self.reads(each) for each in layer.at("mixer_in"))

    def reads(self, linear: Linear) -> bool:
        """Whether the backward needs the very tensor that this linear reads."""
        is_shared = linear.name in self.adapted_names and self.copy_bytes == 0.0
        return is_shared or ((self.full or self.holds_inputs) and linear.differentiable)

    def of_norms(self, norms: Iterable[Norm]) -> float:
        of_heads = self.model.family in LIGER_HEAD_NORM_FAMILIES
        return sum(
            _norm_bytes(
                norm,
                self.types.stream,
                self.full,
                self.types.autocast,
                self.is_liger and (of_heads or norm.size == self.hidden),
            )
            for norm in norms
        )

    def norms(self) -> float:
        layer, types = self.layer, self.types
        inside_scan = ("mamba.norm", "mixer.norm") if layer.scan is not None and layer.scan.kind == "mamba2" else ()
        found = self.of_norms(norm for norm in layer.norms if not norm.name.endswith(inside_scan))
        inputs = [norm for norm in layer.norms if norm.reads_layer_input]
        if len(inputs) > 1 and inputs[0].kind == "layer" and not types.autocast:
            found -= (len(inputs) - 1) * types.stream * self.hidden  # one and the same tensor
        return found

    def shared_reads(self) -> float:
        """What a block's linears and its router read: one tensor for all of them."""
        layer, hidden_bytes = self.layer, self.types.stream * self.hidden
        of_mixer, of_mlp = layer.at("mixer_in"), layer.at("mlp_in", "router", "mlp_gate")
        mlp_is_read = any(self.reads(each) for each in of_mlp)
        if self.casts_input:
            found = 2.0 * sum(each.in_features for each in (*of_mixer, *of_mlp) if self.full)
            if layer.experts and (self.full or self.trains_router):
                found += 2.0 * self.hidden if self.full else hidden_bytes
            return found + (0.0 if self.full else hidden_bytes * (self.mixer_is_read + mlp_is_read))
        routes = layer.experts is not None and layer.experts.router_params > 0 and not layer.experts.router_in_fp32
        mlp_is_read = mlp_is_read or (self.trains_router and routes)
        is_another = mlp_is_read and not (layer.shares_input and self.mixer_is_read)
        return float(hidden_bytes * (self.mixer_is_read + is_another))

    def own_reads(self) -> float:
        if _is_one_function(self.layer):
            return 0.0
        alone = self.layer.at("mixer_inner", "side_in", "side_out")
        per_element = 2.0 if self.casts_input else float(self.types.compute)
        return per_element * sum(each.in_features for each in alone if self.reads(each))

    def adapter_copies(self) -> float:
        linears, attention, types = self.adapted.linears, self.layer.attention, self.types
        found = sum(self.copy_bytes * each.linear.in_features + self.rank_bytes * each.r for each in linears)
        # DoRA scales the base's result and the adapter's, and keeps both for the gradient of its magnitude
        dora_results = types.mlp + (4 if self.rank_bytes == 4.0 else 2)
        found += sum(dora_results * each.linear.out_features for each in linears if each.dora)
        if self.job.framework == "litgpt":
            # one adapter for query and value: one input; index_copy holds what its convolution gave
            fused = [each.linear for each in linears if each.linear.place == "mixer_in"]
            found -= self.copy_bytes * sum(each.in_features for each in fused[1:])
            adapted_width = attention.query_width + attention.kv_width  # litgpt adapts these two by default
            found += sum(types.compute * min(each.out_features, adapted_width) for each in fused)
        if self.job.four_bit_keeps_inputs and self.casts_input:  # each 4-bit linear holds a 16-bit copy of its own
            found += 2.0 * sum(each.in_features for each in self.layer.linears if each.differentiable)
        return found

    def attention(self, kernel: str, rows: Rows) -> tuple[float, float]:
        """For each token, and for each (token, attended key). The output linear reads its result, which a fused kernel keeps
        anyway."""
        attention, compute = self.layer.attention, self.types.compute
        scores, per_pair = _attention_bytes(self.layer, kernel, self.job, compute, rows)
        output = next((each for each in self.layer.linears if each.place == "mixer_out"), None)
        is_copied = (
            kernel == "eager" or attention.has_output_gate or attention.copies_output or self.job.framework == "litgpt"
        )
        if output is not None and self.reads(output) and is_copied:
            scores += compute * output.in_features
        if attention.has_output_gate:  # the sigmoid, and what it multiplies
            scores += compute * attention.output_width
            scores += compute * attention.output_width if kernel == "eager" else 0
        return scores, per_pair

    def dense_mlp(self) -> float:
        """The dense and the shared MLP."""
        layer, types, found = self.layer, self.types, 0.0
        for down in layer.at("mlp_out"):
            is_shared = down.name in self.adapted_names and self.copy_bytes == 0.0
            keeps = (self.full and types.mlp == types.compute) or is_shared or self.holds_inputs
            widths = _mlp_widths(layer.is_gated, self.model.hidden_act, keeps, self.is_liger)
            found += types.mlp * down.in_features * widths
            if self.full and not keeps:
                found += 2.0 * down.in_features
        for gate in layer.at("mlp_gate"):  # the gate's sigmoid and the shared result that it weighs
            found += types.compute * (self.hidden + gate.out_features)
        if layer.has_dropout:
            found += 2.0 * self.hidden  # the masks after attention and MLP
        return found

    def experts(self) -> float:
        layer, adapted, types = self.layer, self.adapted, self.types
        is_loop = bool(adapted.expert_linears) and self.job.quantization in BITSANDBYTES
        if is_loop:
            found = sum(_looped_experts_bytes(each, self.job, types) for each in layer.all_experts)
        else:
            found = sum(_experts_bytes(each, adapted, self.full, self.model.hidden_act) for each in layer.all_experts)
        experts = layer.experts
        if experts is None:
            return found
        if not is_loop:
            found += experts.num_experts_computed * sum(
                self.copy_bytes * each.linear.in_features + self.rank_bytes * each.r for each in adapted.expert_linears
            )
        if experts.router_in_fp32:
            lifted = 4.0 if types.stream != 4 else 0.0
            found += 4.0 * experts.num_experts + (lifted * self.hidden if self.trains_router else 0.0)
        return found

    def whatever_the_batch(self) -> float:
        layer, adapted, job, types = self.layer, self.adapted, self.job, self.types
        found, in_linears = 0.0, sum(each.in_features * each.out_features for each in layer.linears)
        if layer.experts and layer.experts.router_in_fp32 and types.stream != 4:
            found += 4.0 * layer.experts.router_params
        for parameter in adapted.parameters:
            if parameter.num_matrices > 1:  # the merged copy, and the 16-bit copies of A and B
                found += types.compute * parameter.base_params + (2.0 * parameter.num_params if types.adapter == 4 else 0.0)
        if not self.is_liger:
            found += sum(4.0 * norm.size for norm in layer.norms if norm.kind == "rms_offset")  # weight + 1
        if job.quantization == "gptq-int4":
            # a plain matmul with the unpacked weight, which autograd keeps (auto-gptq 0.4, 0.5)
            found += 2.0 * in_linears
        # autocast's 16-bit copies of fp32 weights, kept for the input gradient (under checkpointing: of one layer at a time)
        if types.autocast and types.stream == 4 and job.quantization is None:
            found += 2.0 * (in_linears + sum(each.num_params for each in layer.all_experts))
        if types.autocast and types.adapter == 4 and not job.gradient_checkpointing:
            found += 2.0 * sum(each.num_params for each in adapted.linears)
        return found

    def held_by_a_checkpoint(self) -> float:
        """The layer's input: what a norm or a linear keeps of it is not held twice."""
        types, hidden_bytes = self.types, float(self.types.stream * self.hidden)
        first = next((norm for norm in self.layer.norms if norm.reads_layer_input), None)
        if first is None:
            return hidden_bytes if self.mixer_is_read else 0.0
        if first.kind == "layer":
            return 0.0 if types.autocast and types.stream == 2 else hidden_bytes
        if types.stream == 4 or self.model.residual_in_fp32:
            return 4.0 * self.hidden
        return 2.0 * self.hidden if self.is_liger else 0.0


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
