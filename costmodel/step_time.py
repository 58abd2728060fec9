"""Seconds of one optimizer step: a roofline by operator group, the host's floor under it, and Python expert loops on top.

    step / accumulation = (t_device^3 + t_host^3)^(1/3) + t_loop
    t_device = matrix products + head and loss + attention + element-wise traffic + dequantisation + optimizer / accumulation
    t_host   = operators * seconds an operator + calls into 4- and 8-bit kernels * seconds a call

The third-power sum is a smooth maximum: an eager step runs as fast as the slower of device and host. On a CPU both are the
same processor, so they add. Every constant stands in ``constants.py``; ``docs/formulas.md`` derives the terms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from costmodel import constants as c
from costmodel import processor
from costmodel.adapters import AdaptedLinear, LayerAdapters, plan_adapters
from costmodel.catalog import l2_cache_bytes
from costmodel.communication import Communication, communication, exposed_seconds
from costmodel.defaults import ResolvedJob
from costmodel.expert_load import ExpertLoad, relative_loads, split_over_ranks
from costmodel.model_spec import Experts, Layer, ModelSpec
from costmodel.specs import Curve, GpuSpec, ProbedRates
from costmodel.units import BYTES_PER_ELEMENT
from costmodel.workload import (
    Batch,
    Operators,
    attention_kernel,
    expected_experts_hit,
    flops,
    num_trainable_params,
    operators,
    stream_dtype,
)

_PASSES = ("forward", "recompute", "backward")
# Device work of a step that stays the same however few tokens it has.
_FIXED_GROUPS = frozenset({"optimizer", "dequantisation", "adapter_merge"})


class Factors(TypedDict, total=False):
    """What a calibration puts on the model, as arguments of :func:`step_time`."""

    device_factor: float
    host_factor: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step and where they go. ``by_group_seconds`` sums to ``step_seconds``."""

    step_seconds: float
    bound_by: str  # compute | memory | host | expert_loop | dequantisation | communication
    forward_seconds: float
    backward_seconds: float  # recompute inside
    optimizer_seconds: float
    by_group_seconds: dict[str, float]
    device_seconds: float  # had the host been infinitely fast
    host_seconds: float  # had the device been infinitely fast
    expert_loop_seconds: float
    regime: str  # device | mixed | host, with moe_ before it for a mixture of experts


@dataclass(slots=True)
class _Sums:
    """Device seconds by pass and group, of one micro-batch, times the factors of a calibration."""

    device_factor: float = 1.0
    host_factor: float = 1.0
    by_pass: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*_PASSES, "optimizer"), 0.0))
    by_group: dict[str, float] = field(default_factory=dict)
    memory_bound: float = 0.0

    def add(self, which: str, group: str, seconds: float, *, memory_bound: bool = False) -> None:
        seconds *= self.host_factor if group in _FIXED_GROUPS else self.device_factor
        self.by_pass[which] += seconds
        self.by_group[group] = self.by_group.get(group, 0.0) + seconds
        if memory_bound:
            self.memory_bound += seconds


def compute_dtype(job: ResolvedJob) -> str:
    """The type that matrix products run in."""
    return job.autocast_dtype or stream_dtype(job)


def matmul_ceiling(gpu: GpuSpec, dtype: str) -> float | None:
    """FLOP/s that large matrix products reach on this device; ``None`` where the data sheet has no rate for the type.

    A measured rate where there is one; else the data-sheet peak times a share, or the board's power times a rate for the
    generations that are held down by it.
    """
    if dtype == "float32":
        if gpu.measured_fp32_matmul_flops_per_second:
            return gpu.measured_fp32_matmul_flops_per_second
        return c.CEILING_OVER_PEAK * gpu.peak_fp32_flops_per_second if gpu.peak_fp32_flops_per_second else None
    peak = gpu.peak_bf16_flops_per_second if dtype == "bfloat16" else gpu.peak_fp16_flops_per_second
    if peak is None:
        return gpu.measured_bf16_matmul_flops_per_second if dtype == "bfloat16" else None
    if gpu.measured_bf16_matmul_flops_per_second:
        return gpu.measured_bf16_matmul_flops_per_second
    is_geforce = gpu.vendor == "NVIDIA" and any("GeForce" in name for name in gpu.nvml_names)
    if is_geforce and gpu.compute_capability in c.CEILING_FLOPS_PER_SECOND_PER_WATT:
        return c.GEFORCE_CEILING_OVER_PEAK * peak
    ceiling = c.CEILING_OVER_PEAK * peak
    per_watt = c.CEILING_FLOPS_PER_SECOND_PER_WATT.get(gpu.compute_capability)
    return min(ceiling, per_watt * gpu.tdp_watts) if per_watt and gpu.tdp_watts else ceiling


def peak_flops_per_second(gpu: GpuSpec, job: ResolvedJob) -> float | None:
    """The data-sheet rate (dense) of the type the matrix products run in: the denominator of MFU and HFU."""
    return {
        "bfloat16": gpu.peak_bf16_flops_per_second,
        "float16": gpu.peak_fp16_flops_per_second,
        "float32": gpu.peak_fp32_flops_per_second,
    }[compute_dtype(job)]


def step_time(
    model: ModelSpec,
    job: ResolvedJob,
    gpu: GpuSpec,
    batch: Batch,
    *,
    micro_batches: float | None = None,
    device_factor: float = 1.0,
    host_factor: float = 1.0,
    expert_load: ExpertLoad | None = None,
    expert_ranks: int = 1,
) -> StepTime | None:
    """Seconds of one optimizer step of ``micro_batches`` (default: the accumulation steps) batches like ``batch``.

    ``None`` when the device's rate for the compute type is not known. ``expert_load`` (default: the job's
    ``expert_imbalance``, else even) and ``expert_ranks``: see :func:`imbalance_seconds`.

    The factors of a :class:`costmodel.calibration.Calibration`: ``device_factor`` is on the device time that grows with the
    tokens, ``host_factor`` on what a step takes however few they are (dispatch, expert loops, and the device's optimizer,
    dequantisation and adapter merges). Equal factors scale the step.
    """
    dtype = compute_dtype(job)
    ceiling = matmul_ceiling(gpu, dtype)
    if ceiling is None:
        return None
    accumulation = micro_batches if micro_batches is not None else float(job.gradient_accumulation_steps)
    is_cpu = gpu.vendor == "CPU"
    rate = ceiling * (1.0 if is_cpu else c.GEMM_EFFICIENCY)
    probed = (gpu.probed if is_cpu else None) or ProbedRates()
    if probed.matmul_flops_per_second and dtype == "float32":
        rate = probed.matmul_flops_per_second
    sums = _Sums(device_factor=device_factor, host_factor=host_factor)
    load = expert_load if expert_load is not None else job.expert_imbalance
    _add_device_seconds(sums, model, job, gpu, batch, rate, accumulation, is_cpu, load, expert_ranks)

    per_operator = (gpu.seconds_per_operator or c.SECONDS_PER_OPERATOR) * host_factor
    stack_factor = _stack_factor(job)
    counted = operators(model, job, batch)
    host_by_pass = {
        "forward": counted.forward * per_operator * stack_factor,
        "recompute": counted.recompute * per_operator * stack_factor,
        "backward": counted.backward * per_operator * stack_factor,
        "optimizer": counted.optimizer * per_operator / accumulation,
    }
    loop_by_pass = _loop_seconds(job, counted, per_operator * (1.0 if is_cpu else c.LOOP_OPERATOR_FACTOR))
    loop_seconds = sum(loop_by_pass.values())
    calls = counted.quantized_linear_calls * c.OPERATORS_PER_QUANTIZED_CALL * per_operator
    if gpu.probed and is_cpu:
        trainer = c.TRAINER_OPERATORS * per_operator
        if gpu.probed.optimizer_seconds_per_tensor:
            trainer += _num_trained_tensors(model, job) * gpu.probed.optimizer_seconds_per_tensor * host_factor
        host_by_pass["optimizer"] += trainer / accumulation
        for which, products in _grouped_products(model, job, batch).items():
            host_by_pass[which] += products * c.GROUP_OPERATORS * per_operator
    passes = 3 if job.gradient_checkpointing else 2
    for which in ("forward", "backward") if passes == 2 else _PASSES:
        host_by_pass[which] += calls / passes

    device = sum(sums.by_pass.values())
    host = sum(host_by_pass.values())
    waits = is_cpu or job.framework in c.WAITING_FRAMEWORKS
    micro = _smooth_maximum(device, host, waits) + loop_seconds
    raw = {
        which: _smooth_maximum(sums.by_pass[which], host_by_pass[which], waits) + loop_by_pass[which]
        for which in sums.by_pass
    }
    scale = micro * accumulation / sum(raw.values())
    groups = {name: seconds * accumulation for name, seconds in sums.by_group.items()}
    groups["host"] = max(0.0, micro - loop_seconds - device) * accumulation
    if loop_seconds:
        groups["expert_loop"] = loop_seconds * accumulation
    forward, backward = raw["forward"] * scale, (raw["recompute"] + raw["backward"]) * scale
    sent = communication(model, job, gpu)
    waits_forward, waits_backward = _exposed(sent, forward, backward, accumulation) if sent else (0.0, 0.0)
    communicating = waits_forward + waits_backward
    if communicating:
        groups["communication"] = communicating
    return StepTime(
        step_seconds=micro * accumulation + communicating,
        bound_by=_bound_by(sums, device, host, loop_seconds, communicating / accumulation, is_cpu),
        forward_seconds=forward + waits_forward,
        backward_seconds=backward + waits_backward,
        optimizer_seconds=raw["optimizer"] * scale,
        by_group_seconds=groups,
        device_seconds=device * accumulation,
        host_seconds=host * accumulation,
        expert_loop_seconds=loop_seconds * accumulation,
        regime=_regime(model, device, host, loop_seconds),
    )


def imbalance_seconds(
    model: ModelSpec,
    job: ResolvedJob,
    gpu: GpuSpec,
    batch: Batch,
    load: ExpertLoad,
    *,
    expert_ranks: int = 1,
    device_factor: float = 1.0,
    host_factor: float = 1.0,
) -> float | None:
    """Seconds of one optimizer step that the uneven ``load`` of the experts adds to an even one, all else equal.

    ``load``: tokens of the busiest expert over the mean, or tokens (or shares) of each expert, or a row of those a layer.
    Zero for an even load, and never less for one further from even (a mix of it and of an even one). Zero for a dense model;
    ``None`` where the device's rate is not known.

    On one GPU the products of a layer are the same in sum, in a loop as in a grouped kernel. What unevenness adds is that an
    expert of few tokens is read from memory as whole as one of many, while the busy ones are bound by arithmetic: nothing
    where all are bound by the same. With ``expert_ranks`` GPUs that hold a part of the experts each (expert parallelism),
    all wait for the rank with most tokens. An expert without a token is counted as read: what its rest saves is left out.
    A fixed capacity costs no seconds but tokens: :func:`costmodel.expert_load.dropped_token_fraction`.
    """
    factors = Factors(device_factor=device_factor, host_factor=host_factor)
    uneven = step_time(model, job, gpu, batch, expert_load=load, expert_ranks=expert_ranks, **factors)
    even = step_time(model, job, gpu, batch, expert_load=1.0, **factors)
    return max(0.0, uneven.step_seconds - even.step_seconds) if uneven and even else None


def _exposed(sent: Communication, forward: float, backward: float, accumulation: float) -> tuple[float, float]:
    """Seconds of one optimizer step that the forward and the backward passes wait for other GPUs."""
    piece = sent.first_piece_share
    last = sent.backward_seconds + sent.last_backward_seconds
    one_forward, one_backward = forward / accumulation, backward / accumulation
    waits_forward = accumulation * exposed_seconds(sent.forward_seconds, one_forward, piece)
    waits_backward = (accumulation - 1) * exposed_seconds(sent.backward_seconds, one_backward, piece)
    return waits_forward, max(0.0, waits_backward) + exposed_seconds(last, one_backward, piece)


def _smooth_maximum(device: float, host: float, waits: bool) -> float:
    """Host and device side by side; one after the other where they are one processor or each waits for the other."""
    return (
        device + host
        if waits
        else float((device**c.OVERLAP_EXPONENT + host**c.OVERLAP_EXPONENT) ** (1 / c.OVERLAP_EXPONENT))
    )


def _loop_seconds(job: ResolvedJob, counted: Operators, per_operator: float) -> dict[str, float]:
    """Seconds of a Python loop over experts by pass: each expert waits for its tokens' number, so nothing runs ahead."""
    calls = counted.loop_quantized_calls * c.OPERATORS_PER_QUANTIZED_CALL
    forward = (counted.loop_forward + calls) * per_operator
    return {
        "forward": forward,
        "recompute": forward if job.gradient_checkpointing else 0.0,
        "backward": (counted.loop_backward + calls) * per_operator,
        "optimizer": 0.0,
    }


def _stack_factor(job: ResolvedJob) -> float:
    factor = c.HOST_FACTOR.get(job.framework, 1.0)
    return factor * (c.COMPILED_HOST_SHARE if job.torch_compile else 1.0)


def _regime(model: ModelSpec, device: float, host: float, loop: float) -> str:
    ratio = (host + loop) / device if device else 99.0
    regime = "device" if ratio < 0.33 else "mixed" if ratio < 1.0 else "host"
    return f"moe_{regime}" if model.is_moe else regime


def _bound_by(sums: _Sums, device: float, host: float, loop: float, communicating: float, is_cpu: bool) -> str:
    dequantisation = sums.by_group.get("dequantisation", 0.0)
    candidates = {
        "compute": device - sums.memory_bound - dequantisation,
        "memory": sums.memory_bound,
        "dequantisation": dequantisation,
        "expert_loop": loop,
        "communication": communicating,
        "host": host if host > device or is_cpu else 0.0,
    }
    return max(candidates, key=lambda name: candidates[name])


def _add_device_seconds(
    sums: _Sums,
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
    half_rows = c.GEMM_HALF_ROWS if probed.matmul_half_rows is None else probed.matmul_half_rows
    device = _Device(sums, rate, bandwidth, half_rows, BYTES_PER_ELEMENT[compute_dtype(job)])
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
        seconds = device.quantized_weights * _dequantisation_seconds_per_weight(job.quantization, gpu)
        for which in ("forward", "backward", *(("recompute",) if job.gradient_checkpointing else ())):
            sums.add(which, "dequantisation", seconds)
    trained = num_trainable_params(model, job)
    trained_bytes = BYTES_PER_ELEMENT[job.adapter_dtype if job.is_peft else job.dtype]
    moves = c.OPTIMIZER_BYTES_FOREACH if job.optim == "adamw_torch" else c.OPTIMIZER_BYTES_FUSED
    per_parameter = moves[trained_bytes == 4] / bandwidth
    if probed.optimizer_seconds_per_parameter and trained_bytes == 4 and job.optim == "adamw_torch_fused":
        per_parameter = probed.optimizer_seconds_per_parameter
    seconds = trained * per_parameter / accumulation / job.sharding.parts(1)
    sums.add("optimizer", "optimizer", seconds, memory_bound=True)


@dataclass(slots=True)
class _Device:
    """The rates of the device, and what has been put on it so far."""

    sums: _Sums
    flops_per_second: float
    bytes_per_second: float
    half_rows: float
    compute_bytes: int
    quantized_weights: float = 0.0  # that one pass dequantises

    def product(self, which: str, group: str, rows: float, width_in: int, width_out: int, times: float) -> None:
        """``times`` matrix products (rows x in) · (in x out): by FLOPs or by bytes, whichever is longer."""
        by_flops, by_bytes = self.product_seconds(rows, width_in, width_out)
        if times:
            self.sums.add(which, group, times * max(by_flops, by_bytes), memory_bound=by_bytes > by_flops)

    def product_seconds(self, rows: float, width_in: int, width_out: int) -> tuple[float, float]:
        """Seconds of one matrix product: (by its FLOPs, by its bytes)."""
        by_flops = 2.0 * width_in * width_out * (rows + self.half_rows) / self.flops_per_second
        by_bytes = self.compute_bytes * (width_in * width_out + rows * (width_in + width_out)) / self.bytes_per_second
        return by_flops, by_bytes


def _add_products(
    device: _Device, job: ResolvedJob, layer: Layer, adapted: LayerAdapters, count: int, batch: Batch, family: str
) -> None:
    """Linears, experts and routers of ``count`` equal layers, each pass."""
    tokens = batch.num_tokens
    full, checkpointing = not job.is_peft, job.gradient_checkpointing
    for linear in layer.linears:
        group = "attention_linears" if linear.is_mixer else "router" if linear.place == "router" else "mlp"
        # without re-entering, the recompute stops at the last saved tensor, and nothing is saved after the last linear
        skipped = full and linear.place == "mlp_out" and not layer.experts and not job.reentrant_checkpointing
        passes = {"forward": 1, "recompute": int(checkpointing and not skipped), "backward": 2 if full else 1}
        for which, times in passes.items():
            device.product(which, group, tokens, linear.in_features, linear.out_features, float(times * count))
        device.quantized_weights += count * linear.in_features * linear.out_features
    for experts in layer.all_experts:
        hit, rows = _expert_rows(experts, batch, family)
        passes = _expert_passes(job, adapted)
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


def _expert_passes(job: ResolvedJob, adapted: LayerAdapters) -> dict[str, int]:
    """How often each pass multiplies by the experts' weights."""
    trains_stack = not job.is_peft or any(each.num_matrices > 1 for each in adapted.parameters)
    return {"forward": 1, "recompute": int(job.gradient_checkpointing), "backward": 2 if trains_stack else 1}


def _num_trained_tensors(model: ModelSpec, job: ResolvedJob) -> float:
    """Tensors that the optimizer visits; the embedding, the last norm and the head are taken as three."""
    runs = plan_adapters(model, job).runs
    if job.is_peft:
        pairs = sum(
            count * (len(each.linears) + len(each.parameters) + each.num_experts * len(each.expert_linears))
            for _, each, count in runs
        )
        return 2.0 * pairs
    return 3.0 + sum(count * sum(1 for _ in layer.parameters()) for layer, _, count in runs)


def _grouped_products(model: ModelSpec, job: ResolvedJob, batch: Batch) -> dict[str, float]:
    """Products of one expert inside the grouped products of stacked experts, by pass."""
    groups = dict.fromkeys(_PASSES, 0.0)
    if job.experts_implementation == "eager":
        return groups
    for layer, adapted, count in plan_adapters(model, job).runs:
        for experts in layer.all_experts:
            hit, _ = _expert_rows(experts, batch, model.family)
            for which, times in _expert_passes(job, adapted).items():
                groups[which] += 2.0 * times * count * hit  # into the experts in one product, out of them in another
    return groups


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
        hit, rows = _expert_rows(experts, batch, family, num_ranks)
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
        for which, times in _expert_passes(job, adapted).items():
            device.sums.add(which, "expert_imbalance", times * extra)


def _expert_rows(experts: Experts, batch: Batch, family: str, num_ranks: int = 1) -> tuple[float, float]:
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
        hit, rows = _expert_rows(experts, batch, model.family)
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
        hit, rows = _expert_rows(experts, batch, model.family)
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
    """Attention, adapters and head, from the FLOP count. A causal kernel does half of the square that the count holds.

    ``is_flash``: whatever the count takes, as torch's CPU kernel, which also runs grouped heads in fp32 without a score
    matrix; its backward computes the scores again, five products beside two.
    """
    rate, sums = device.flops_per_second, device.sums
    work = flops(model, job, batch)
    for which, counted in (("forward", work.forward), ("recompute", work.recompute), ("backward", work.backward)):
        scores = counted["attention_scores"]
        if is_flash and which == "backward":
            scores = 2.5 * work.forward["attention_scores"]
        sums.add(which, "attention_scores", 0.5 * scores / attention_rate)
        sums.add(which, "adapters", counted["adapters"] / rate)
        if counted["adapter_merge"]:
            sums.add(which, "adapter_merge", counted["adapter_merge"] / rate)
        if counted["head"]:
            sums.add(which, "head_and_loss", counted["head"] / rate)


def _dequantisation_seconds_per_weight(quantization: str, gpu: GpuSpec) -> float:
    """One weight from its codes to 16 bits: as probed, else by the bytes it moves or its integer instructions."""
    measured = gpu.probed.dequantisation_seconds_per_weight if gpu.probed else None
    if measured and quantization in measured:
        return measured[quantization]
    by_bytes = c.DEQUANTISATION_BYTES[quantization] / (gpu.memory_bandwidth_bytes_per_second * c.BANDWIDTH_EFFICIENCY)
    instructions = c.DEQUANTISATION_INSTRUCTIONS.get(quantization)
    if instructions is None or gpu.peak_fp32_flops_per_second is None or gpu.vendor != "NVIDIA":
        return by_bytes
    # A multiply-add is two FLOPs. From compute capability 8.6 on, and on Hopper, half of the fp32 lanes do integers;
    # before, there were as many lanes of each.
    # Of a described GPU whose compute capability is not known, the slower of the two is taken: most cards are newer.
    capability = [int(part) for part in gpu.compute_capability.split(".") if part.isdecimal()]
    has_shared_lanes = len(capability) < 2 or tuple(capability) >= (8, 6)
    integer_rate = gpu.peak_fp32_flops_per_second / (4 if has_shared_lanes else 2)
    return max(by_bytes, instructions / integer_rate)


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
