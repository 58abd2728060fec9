"""Seconds that the device works on one micro-batch, by pass and group: a roofline by operator group.

Matrix products by FLOPs or bytes, attention and head by FLOPs, the rest by the bytes it moves. Every constant stands in
``constants.py``; ``docs/formulas.md`` derives the terms.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from costmodel import constants as c
from costmodel import processor
from costmodel.adapters import AdaptedLinear, LayerAdapters, plan_adapters
from costmodel.defaults import ResolvedJob
from costmodel.device_rates import compute_dtype, dequantisation_seconds_per_weight
from costmodel.expert_load import ExpertLoad, relative_loads, split_over_ranks
from costmodel.gpu_catalog import l2_cache_bytes
from costmodel.model_spec import Experts, Layer, ModelSpec
from costmodel.specs import Curve, GpuSpec, ProbedRates
from costmodel.units import BYTES_PER_ELEMENT
from costmodel.workload import (
    Batch,
    attention_kernel,
    expected_experts_hit,
    flops,
    num_trainable_params,
    share_of_scores_computed,
    stream_dtype,
)

PASSES = ("forward", "recompute", "backward")
# Device work of a step that stays the same however few tokens it has.
_FIXED_GROUPS = frozenset({"optimizer", "dequantisation", "adapter_merge"})


@dataclass(slots=True)
class DeviceSums:
    """Device seconds by pass and group, of one micro-batch, times the factors of a calibration."""

    device_factor: float = 1.0
    host_factor: float = 1.0
    by_pass: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PASSES, "optimizer"), 0.0))
    by_group: dict[str, float] = field(default_factory=dict)
    memory_bound: float = 0.0

    def add(self, which: str, group: str, seconds: float, *, memory_bound: bool = False) -> None:
        seconds *= self.host_factor if group in _FIXED_GROUPS else self.device_factor
        self.by_pass[which] += seconds
        self.by_group[group] = self.by_group.get(group, 0.0) + seconds
        if memory_bound:
            self.memory_bound += seconds


def add_device_seconds(
    sums: DeviceSums,
    model: ModelSpec,
    job: ResolvedJob,
    gpu: GpuSpec,
    batch: Batch,
    rate: float,
    accumulation: float,
    is_cpu: bool,
    load: ExpertLoad | None,
    expert_ranks: int,
) -> None:
    bandwidth = gpu.memory_bandwidth_bytes_per_second * (1.0 if is_cpu else c.BANDWIDTH_EFFICIENCY)
    probed = (gpu.probed if is_cpu else None) or ProbedRates()
    half_rows, half_width = c.GEMM_HALF_ROWS, 0.0
    if probed.matmul_half_size is not None:
        half_rows = half_width = probed.matmul_half_size
    device = _Device(sums, rate, bandwidth, half_rows, half_width, BYTES_PER_ELEMENT[compute_dtype(job)])
    family = model.family
    cache = None if is_cpu else (l2_cache_bytes(gpu) or 0)
    for layer, adapted, count in plan_adapters(model, job).runs:
        _add_products(device, job, layer, adapted, count, batch, family)
        if load is not None and load != 1.0:
            _add_imbalance(device, job, layer, adapted, count, batch, family, load, expert_ranks)
        if probed.elementwise_bytes_per_second and _is_eager_fp32(job):
            _add_processor_elementwise(device, model, job, layer, adapted, count, batch, probed.elementwise_bytes_per_second)
        else:
            _add_elementwise(device, model, job, layer, adapted, count, batch, cache)
        kernel = attention_kernel(job, layer)
        if kernel == "eager" or (kernel == "math" and not probed.attention_flops_per_second):
            # the score matrix goes through memory: product, scale, mask, softmax, cast, product
            moved = count * 24.0 * layer.attention.num_heads * batch.num_attended_pairs
            _add_traffic(device, job, "attention_scores", moved, 2 * moved)
    attention_rate = rate if is_cpu else rate * c.ATTENTION_EFFICIENCY
    if job.attn_implementation in c.FLASH_2_IMPLEMENTATIONS.get(gpu.compute_capability, frozenset()):
        attention_rate = min(attention_rate, c.FLASH_2_ON_HOPPER_FLOPS_PER_SECOND)
    if probed.attention_flops_per_second:
        attention_rate = processor.at(probed.attention_flops_per_second, batch.context_tokens)
    _add_counted_flops(device, model, job, batch, attention_rate, is_flash=probed.attention_flops_per_second is not None)
    num_logits = batch.num_head_tokens * model.vocab_size
    loss = c.LOSS_BYTES_PER_LOGIT[job.fused_loss or "stock"] * num_logits / bandwidth
    if probed.loss_seconds_per_logit and job.fused_loss is None:
        loss = num_logits * processor.at(probed.loss_seconds_per_logit, 4.0 * num_logits)
    sums.add("forward", "head_and_loss", loss * 0.4, memory_bound=True)
    sums.add("backward", "head_and_loss", loss * 0.6, memory_bound=True)
    if job.quantization:
        one = dequantisation_seconds_per_weight(job.quantization, gpu, by_table=job.dequantises_by_table)
        seconds = device.quantized_weights * one
        for which in ("forward", "backward", *(("recompute",) if job.gradient_checkpointing else ())):
            sums.add(which, "dequantisation", seconds)
    trained = num_trainable_params(model, job)
    trained_bytes = BYTES_PER_ELEMENT[job.adapter_dtype if job.is_peft else job.dtype]
    own = {"adamw_torch": c.OPTIMIZER_BYTES_FOREACH, "adafactor": c.OPTIMIZER_BYTES_ADAFACTOR}
    moves = own.get(job.optim, c.OPTIMIZER_BYTES_FUSED)
    per_parameter = moves[trained_bytes == 4] / bandwidth
    if probed.optimizer_seconds_per_parameter and trained_bytes == 4 and job.optim == "adamw_torch_fused":
        per_parameter = probed.optimizer_seconds_per_parameter
    seconds = trained * per_parameter / accumulation / job.sharding.parts(1)
    sums.add("optimizer", "optimizer", seconds, memory_bound=True)


@dataclass(slots=True)
class _Device:
    """The rates of the device, and what has been put on it so far."""

    sums: DeviceSums
    flops_per_second: float
    bytes_per_second: float
    half_rows: float
    half_width: float  # the same of the two other dimensions; 0: not known, they are taken to be wide
    compute_bytes: int
    quantized_weights: float = 0.0  # that one pass dequantises

    def product(self, which: str, group: str, rows: float, width_in: int, width_out: int, times: float) -> None:
        """``times`` matrix products (rows x in) · (in x out): by FLOPs or by bytes, whichever is longer."""
        by_flops, by_bytes = self.product_seconds(rows, width_in, width_out)
        if times:
            self.sums.add(which, group, times * max(by_flops, by_bytes), memory_bound=by_bytes > by_flops)

    def product_seconds(self, rows: float, width_in: int, width_out: int) -> tuple[float, float]:
        """Seconds of one matrix product: (by its FLOPs, by its bytes)."""
        wide_in, wide_out = width_in + self.half_width, width_out + self.half_width
        by_flops = 2.0 * wide_in * wide_out * (rows + self.half_rows) / self.flops_per_second
        by_bytes = self.compute_bytes * (width_in * width_out + rows * (width_in + width_out)) / self.bytes_per_second
        return by_flops, by_bytes


def _add_products(
    device: _Device, job: ResolvedJob, layer: Layer, adapted: LayerAdapters, count: int, batch: Batch, family: str
) -> None:
    """Linears, experts and routers of ``count`` equal layers, each pass."""
    tokens = batch.num_tokens
    full, checkpointing = not job.is_peft, job.gradient_checkpointing
    adapted_names = {each.linear.name for each in adapted.linears}
    for linear in layer.linears:
        group = "attention_linears" if linear.is_mixer else "router" if linear.place == "router" else "mlp"
        # without re-entering, the recompute stops at the last saved tensor, and nothing is saved after the last linear;
        # where it is adapted, its base product comes before tensors that are
        is_last = linear.name == layer.last_linear and linear.name not in adapted_names
        skipped = is_last and not job.reentrant_checkpointing
        passes = {"forward": 1, "recompute": int(checkpointing and not skipped), "backward": 2 if full else 1}
        for which, times in passes.items():
            device.product(which, group, tokens, linear.in_features, linear.out_features, float(times * count))
        device.quantized_weights += count * linear.in_features * linear.out_features
    for experts in layer.all_experts:
        hit, rows = expert_rows(experts, batch, family)
        passes = expert_passes(job, adapted)
        hidden, width = experts.hidden_size, experts.intermediate_size
        for which, times in passes.items():
            device.product(which, "experts", rows, hidden, width, times * count * (experts.num_matrices - 1) * hit)
            device.product(which, "experts", rows, width, hidden, times * count * hit)
            if experts.router_params:
                device.product(which, "router", tokens, hidden, experts.num_experts, float(times * count))
        if not job.fused_experts:
            device.quantized_weights += count * hit * experts.params_per_expert
    stacks = sum(each.base_params for each in adapted.parameters if each.num_matrices > 1)
    if stacks:
        # peft's merged copy: read the stack, write and read B·A in the adapter's type, write the sum (12 B a weight), twice
        # in the forward; the stack's full gradient is written and read for A and for B in the backward
        _add_traffic(device, job, "adapter_merge", count * 24.0 * stacks, count * 12.0 * stacks)


def expert_passes(job: ResolvedJob, adapted: LayerAdapters) -> dict[str, int]:
    """How often each pass multiplies by the experts' weights."""
    trains_stack = not job.is_peft or any(each.num_matrices > 1 for each in adapted.parameters)
    return {"forward": 1, "recompute": int(job.gradient_checkpointing), "backward": 2 if trains_stack else 1}


def _add_imbalance(
    device: _Device,
    job: ResolvedJob,
    layer: Layer,
    adapted: LayerAdapters,
    count: int,
    batch: Batch,
    family: str,
    load: ExpertLoad,
    num_ranks: int,
) -> None:
    """What the experts of ``count`` layers take beyond an even load, each expert by its own rows, or the busiest rank's."""
    for experts in layer.all_experts:
        if experts.runs_all:
            continue
        hit, rows = expert_rows(experts, batch, family, num_ranks)
        loads = relative_loads(load, experts.num_experts)

        def seconds(rows: float, hidden: int, width: int, num_matrices: int) -> float:
            into, out = device.product_seconds(rows, hidden, width), device.product_seconds(rows, width, hidden)
            return (num_matrices - 1) * max(into) + max(out)

        hidden, width, number = experts.hidden_size, experts.intermediate_size, experts.num_matrices
        even = seconds(rows, hidden, width, number)
        extra = 0.0
        for row in loads:
            ranks = split_over_ranks(row, num_ranks, dealt=isinstance(load, float | int))
            extra += max(sum(seconds(rows * each, hidden, width, number) - even for each in rank) for rank in ranks)
        if extra <= 1e-9 * even * len(loads):  # what rounding leaves of a sum that is nothing
            extra = 0.0
        extra *= count * hit / experts.num_experts / len(loads)
        for which, times in expert_passes(job, adapted).items():
            device.sums.add(which, "expert_imbalance", times * extra)


def expert_rows(experts: Experts, batch: Batch, family: str, num_ranks: int = 1) -> tuple[float, float]:
    """(experts that are visited, tokens in each), over the batches of all ranks that share the experts."""
    tokens, visits = batch.num_tokens * num_ranks, experts.num_experts_computed
    hit = expected_experts_hit(experts.num_experts, visits, tokens)
    of_padding = min(float(experts.num_experts), c.EXPERTS_OF_PADDING.get(family, 0.0))
    extra = max(0.0, of_padding - visits) * batch.num_padding_tokens * num_ranks
    return hit, (tokens * visits + extra) / hit


def _add_traffic(device: _Device, job: ResolvedJob, group: str, forward_bytes: float, backward_bytes: float) -> None:
    device.sums.add("forward", group, forward_bytes / device.bytes_per_second, memory_bound=True)
    if job.gradient_checkpointing:
        device.sums.add("recompute", group, forward_bytes / device.bytes_per_second, memory_bound=True)
    device.sums.add("backward", group, backward_bytes / device.bytes_per_second, memory_bound=True)


def _is_eager_fp32(job: ResolvedJob) -> bool:
    is_fused = job.torch_compile or job.use_liger_kernel
    return stream_dtype(job) == "float32" and job.autocast_dtype is None and not is_fused


def _add_processor_elementwise(
    device: _Device,
    model: ModelSpec,
    job: ResolvedJob,
    layer: Layer,
    adapted: LayerAdapters,
    count: int,
    batch: Batch,
    curve: Curve,
) -> None:
    """The same work on a probed processor: each operator by the rate at its tensor's size."""
    tokens, has_dropout = batch.num_tokens, bool(job.lora_dropout)
    moved = processor.moved_by_layer(
        layer, tokens, model.hidden_size, trains_norms=not job.is_peft, keeps_keys=job.use_cache
    )
    moved += processor.moved_by_adapters(adapted.linears, tokens, has_dropout=has_dropout)
    forward, backward = processor.seconds(moved, curve)
    for experts in layer.all_experts:
        hit, rows = expert_rows(experts, batch, model.family)
        # stacked experts are one tensor, a loop has one for each expert
        times, together = (hit, rows) if job.experts_implementation == "eager" else (1.0, hit * rows)
        moved = processor.moved_by_experts(experts, together)
        moved += processor.moved_by_adapters(adapted.expert_linears, together, has_dropout=has_dropout)
        if not job.is_peft and times == 1.0:
            moved += processor.moved_by_expert_gradients(experts)
        into, back = processor.seconds(moved, curve)
        forward, backward = forward + times * into, backward + times * back
    device.sums.add("forward", "elementwise", count * forward, memory_bound=True)
    if job.gradient_checkpointing:
        device.sums.add("recompute", "elementwise", count * forward, memory_bound=True)
    device.sums.add("backward", "elementwise", count * backward, memory_bound=True)


def _add_elementwise(
    device: _Device,
    model: ModelSpec,
    job: ResolvedJob,
    layer: Layer,
    adapted: LayerAdapters,
    count: int,
    batch: Batch,
    cache_bytes: int | None,
) -> None:
    """Norms, rotations, activations, residuals, adapters: bytes a token counted by hand, less what stays in the cache."""
    tokens = batch.num_tokens

    def leaving_cache(rows: float) -> float:
        """Bytes that ``rows`` rows of one byte each send to memory: their share of the working set beside the cache's."""
        if cache_bytes is None:
            return rows
        working_set = 4.0 * rows * model.hidden_size
        return rows * max(c.L2_FLOOR, working_set / (working_set + c.L2_SHARE * cache_bytes))

    moved = _layer_traffic(model, job, layer)
    adapters_forward, adapters_backward = _adapter_traffic(job, adapted.linears)
    scale = count * c.ELEMENTWISE_FACTOR * leaving_cache(tokens)
    forward, backward = scale * (moved + adapters_forward), scale * (2 * moved + adapters_backward)
    is_fused = job.torch_compile or job.use_liger_kernel
    for experts in layer.all_experts:
        hit, rows = expert_rows(experts, batch, model.family)
        moved = _activation_bytes(is_fused, experts.is_gated) * experts.intermediate_size + 24.0 * experts.hidden_size
        adapters_forward, adapters_backward = _adapter_traffic(job, adapted.expert_linears)
        scale = count * c.ELEMENTWISE_FACTOR * hit * leaving_cache(rows)
        forward += scale * (moved + adapters_forward)
        backward += scale * (2 * moved + adapters_backward)
    _add_traffic(device, job, "elementwise", forward, backward)


# Bytes that a norm moves for each element of a 16-bit tensor, forward: in Python it goes through fp32 (cast, square, mean,
# scale, cast back, weight), in one kernel it is read and written once.
_NORM_BYTES = {"rms": 36.0, "rms_offset": 40.0, "layer": 4.0, "cohere": 36.0}


def _activation_bytes(is_fused: bool, is_gated: bool) -> float:
    if is_gated:
        return 6.0 if is_fused else 10.0
    return 4.0 if is_fused else 6.0


def _layer_traffic(model: ModelSpec, job: ResolvedJob, layer: Layer) -> float:
    """Element-wise bytes of one layer for each token, forward, outside routed experts and adapters."""
    is_fused = job.torch_compile or job.use_liger_kernel
    attention = layer.attention
    has_mixer = bool(attention.num_heads or layer.scan)
    has_feed_forward = bool(layer.mlp_width or layer.experts)
    num_residuals = has_mixer + has_feed_forward
    norms = sum((4.0 if is_fused else _NORM_BYTES.get(norm.kind, 36.0)) * norm.width for norm in layer.norms)
    residuals = (3.0 if is_fused else 6.0) * model.hidden_size * num_residuals
    rotation = (8.0 if is_fused else 22.0) * (attention.query_width + attention.kv_width)
    # convolution, gate and scan, each in one kernel (the mixers' own libraries)
    scan = 24.0 * layer.scan.channels if layer.scan else 0.0
    mlp = _activation_bytes(is_fused, layer.is_gated) * layer.mlp_width
    return (norms + residuals + rotation + scan + mlp) * BYTES_PER_ELEMENT[stream_dtype(job)] / 2


def _add_counted_flops(
    device: _Device, model: ModelSpec, job: ResolvedJob, batch: Batch, attention_rate: float, *, is_flash: bool = False
) -> None:
    """Attention, adapters and head, from the FLOP count. A causal kernel does half of the square that the count holds, one
    under a mask all of it (:func:`costmodel.workload.share_of_scores_computed`).

    ``is_flash``: whatever the count takes, as torch's CPU kernel, which also runs grouped heads in fp32 without a score
    matrix; its backward computes the scores again, five products beside two. It takes as long for a pair under a mask as for
    a causal one (own measurement: 8 rows of 512 causal 203 ms, one masked row of 4,096, with 8 times the pairs, 1,730 ms).
    """
    rate, sums = device.flops_per_second, device.sums
    work = flops(model, job, batch)
    done = 0.5 if is_flash else share_of_scores_computed(model, job, batch)
    head_factor, adapters_factor = _narrow_factors(device, model, job, batch)
    for which, counted in (("forward", work.forward), ("recompute", work.recompute), ("backward", work.backward)):
        scores = counted["attention_scores"]
        if is_flash and which == "backward":
            scores = 2.5 * work.forward["attention_scores"]
        sums.add(which, "attention_scores", done * scores / attention_rate)
        sums.add(which, "adapters", adapters_factor * counted["adapters"] / rate)
        if counted["adapter_merge"]:
            sums.add(which, "adapter_merge", counted["adapter_merge"] / rate)
        if counted["head"]:
            sums.add(which, "head_and_loss", head_factor * counted["head"] / rate)


def _narrow_factors(device: _Device, model: ModelSpec, job: ResolvedJob, batch: Batch) -> tuple[float, float]:
    """How much longer than their FLOPs say the products of (the head, the adapters) take, for their few rows or columns.

    1 where ``half_width`` is not known. An adapter's rank of 8 makes the narrowest products of a step.
    """
    half = device.half_width
    if not half:
        return 1.0, 1.0
    head = processor.narrow_factor(half, batch.num_head_tokens, model.head_width, model.vocab_size)
    plan = plan_adapters(model, job)
    pairs = [(float(count), batch.num_tokens, each) for _, adapted, count in plan.runs for each in adapted.linears]
    for layer, adapted, count in plan.runs:
        for experts in layer.all_experts if adapted.expert_linears else ():
            hit, rows = expert_rows(experts, batch, model.family)
            pairs += [(count * hit, rows, each) for each in adapted.expert_linears]
    pairs += [(1.0, batch.num_tokens, each) for each in plan.outside]
    work = longer = 0.0
    for times, rows, each in pairs:
        for width in (each.linear.in_features, each.linear.out_features):
            product = times * rows * width * each.r
            work += product
            longer += product * processor.narrow_factor(half, rows, width, each.r)
    return head, longer / work if work else 1.0


def _adapter_traffic(job: ResolvedJob, adapted: tuple[AdaptedLinear, ...]) -> tuple[float, float]:
    """Bytes a token that the eager LoRA pairs move beside the base linear: (forward, backward). Counted by hand.

    Forward: A reads the input; B's output is written, scaled and added to the base's. Backward: the gradient is scaled and
    read for A and B; the input's gradient is written and added. peft casts the input of an fp32 adapter to fp32, under
    autocast too (and autocast casts it back); its 4- and 8-bit layers leave that to autocast. Dropout reads, writes and
    keeps a byte of mask. Source: peft 0.21, ``tuners/lora/layer.py`` and ``bnb.py``.
    """
    fp32_adapters = job.adapter_dtype == "float32" and stream_dtype(job) != "float32"
    per_in, per_out, back_in, back_out, dropout = 4.0, 12.0, 10.0, 8.0, 5.0
    if job.torch_compile:
        per_in, per_out, back_in, back_out, dropout = 2.0, 6.0, 4.0, 6.0, 0.0
    elif fp32_adapters and job.autocast_dtype is None:
        per_in, per_out, back_in, back_out, dropout = 10.0, 22.0, 20.0, 22.0, 9.0
    elif fp32_adapters and not job.quantization:
        per_in, per_out, back_in, back_out, dropout = 14.0, 12.0, 22.0, 8.0, 9.0
    elif stream_dtype(job) == "float32" and job.autocast_dtype is not None:
        # Autocast casts an fp32 input for A, and A's gradient of it back to fp32, where it is added to the base's.
        per_in, back_in, dropout = 8.0, 22.0, 9.0
    if job.lora_dropout:
        per_in, back_in = per_in + dropout, back_in + dropout
    width_in = sum(each.linear.in_features for each in adapted)
    width_out = sum(each.linear.out_features for each in adapted)
    return per_in * width_in + per_out * width_out, back_in * width_in + back_out * width_out
