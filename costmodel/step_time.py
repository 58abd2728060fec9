"""Seconds of one optimizer step: a roofline by operator group, the host's floor under it, and Python expert loops on top.

    step / accumulation = (t_device^3 + t_host^3)^(1/3) + t_loop
    t_device = matrix products + head and loss + attention + element-wise traffic + dequantisation + optimizer / accumulation
    t_host   = operators * seconds an operator + calls into 4- and 8-bit kernels * seconds a call

The third-power sum is a smooth maximum: an eager step runs as fast as the slower of device and host. On a CPU both are the
same processor, so they add. Every constant stands in ``constants.py``; ``docs/formulas.md`` derives the terms.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from costmodel import constants as c
from costmodel.adapters import AdaptedLinear, plan_adapters
from costmodel.defaults import ResolvedJob
from costmodel.hf_config import ModelSpec
from costmodel.specs import GpuSpec
from costmodel.units import BYTES_PER_ELEMENT
from costmodel.workload import (
    Batch,
    attention_kernel,
    expected_experts_hit,
    flops,
    num_trainable_params,
    operators,
    stream_dtype,
)

_PASSES = ("forward", "recompute", "backward")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step and where they go. ``by_group_seconds`` sums to ``step_seconds``."""

    step_seconds: float
    bound_by: str  # compute | memory | host | expert_loop | dequantisation
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
    """Device seconds by pass and group, of one micro-batch."""

    by_pass: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*_PASSES, "optimizer"), 0.0))
    by_group: dict[str, float] = field(default_factory=dict)
    memory_bound: float = 0.0

    def add(self, which: str, group: str, seconds: float, *, memory_bound: bool = False) -> None:
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
    max_load_over_mean: float = 1.0,
) -> StepTime | None:
    """Seconds of one optimizer step of ``micro_batches`` (default: the accumulation steps) batches like ``batch``.

    ``None`` when the device's rate for the compute type is not known. ``max_load_over_mean`` is how much the busiest expert
    exceeds the mean, which costs where experts run one after another in tiles.
    """
    dtype = compute_dtype(job)
    ceiling = matmul_ceiling(gpu, dtype)
    if ceiling is None:
        return None
    accumulation = micro_batches if micro_batches is not None else float(job.gradient_accumulation_steps)
    is_cpu = gpu.vendor == "CPU"
    rate = ceiling * (1.0 if is_cpu else c.GEMM_EFFICIENCY)
    sums = _device_seconds(model, job, gpu, batch, rate, accumulation, is_cpu)

    per_operator = gpu.seconds_per_operator or c.SECONDS_PER_OPERATOR
    host_factor = _host_factor(job)
    counted = operators(model, job, batch)
    host_by_pass = {
        "forward": counted.forward * per_operator * host_factor,
        "recompute": counted.recompute * per_operator * host_factor,
        "backward": counted.backward * per_operator * host_factor,
        "optimizer": counted.optimizer * per_operator / accumulation,
    }
    loop_seconds = counted.expert_visits * c.SECONDS_PER_EXPERT_VISIT + counted.expert_operators * per_operator
    if is_cpu:
        loop_seconds = counted.expert_operators * per_operator
    expert_calls = 0.0
    if counted.expert_visits and job.quantization and not job.fused_experts:
        recomputes = 1 if job.gradient_checkpointing else 0
        expert_calls = counted.expert_visits / (1 + recomputes) * 3 * (2 + recomputes)
        loop_seconds += expert_calls * c.OPERATORS_PER_QUANTIZED_CALL * per_operator
    calls = max(0.0, counted.quantized_linear_calls - expert_calls) * c.OPERATORS_PER_QUANTIZED_CALL * per_operator
    passes = 3 if job.gradient_checkpointing else 2
    for which in ("forward", "backward") if passes == 2 else _PASSES:
        host_by_pass[which] += calls / passes

    device = sum(sums.by_pass.values())
    host = sum(host_by_pass.values())
    waits = is_cpu or job.framework in c.WAITING_FRAMEWORKS
    micro = _smooth_maximum(device, host, waits) + loop_seconds
    loop_by_pass = {"forward": 0.4, "recompute": 0.0, "backward": 0.6, "optimizer": 0.0}
    if job.gradient_checkpointing:
        loop_by_pass = {"forward": 0.3, "recompute": 0.3, "backward": 0.4, "optimizer": 0.0}
    raw = {
        which: _smooth_maximum(sums.by_pass[which], host_by_pass[which], waits) + loop_seconds * loop_by_pass[which]
        for which in sums.by_pass
    }
    scale = micro * accumulation / sum(raw.values())
    groups = {name: seconds * accumulation for name, seconds in sums.by_group.items()}
    groups["host"] = max(0.0, micro - loop_seconds - device) * accumulation
    if loop_seconds:
        groups["expert_loop"] = loop_seconds * accumulation
    return StepTime(
        step_seconds=micro * accumulation,
        bound_by=_bound_by(sums, device, host, loop_seconds, is_cpu),
        forward_seconds=raw["forward"] * scale,
        backward_seconds=(raw["recompute"] + raw["backward"]) * scale,
        optimizer_seconds=raw["optimizer"] * scale,
        by_group_seconds=groups,
        device_seconds=device * accumulation,
        host_seconds=host * accumulation,
        expert_loop_seconds=loop_seconds * accumulation,
        regime=_regime(model, device, host, loop_seconds),
    )


def _smooth_maximum(device: float, host: float, waits: bool) -> float:
    """Host and device side by side; one after the other where they are one processor or each waits for the other."""
    return (
        device + host
        if waits
        else float((device**c.OVERLAP_EXPONENT + host**c.OVERLAP_EXPONENT) ** (1 / c.OVERLAP_EXPONENT))
    )


def _host_factor(job: ResolvedJob) -> float:
    factor = c.HOST_FACTOR.get(job.framework, 1.0)
    return factor * (c.COMPILED_HOST_SHARE if job.torch_compile else 1.0)


def _regime(model: ModelSpec, device: float, host: float, loop: float) -> str:
    ratio = (host + loop) / device if device else 99.0
    regime = "device" if ratio < 0.33 else "mixed" if ratio < 1.0 else "host"
    return f"moe_{regime}" if model.is_moe else regime


def _bound_by(sums: _Sums, device: float, host: float, loop: float, is_cpu: bool) -> str:
    dequantisation = sums.by_group.get("dequantisation", 0.0)
    candidates = {
        "compute": device - sums.memory_bound - dequantisation,
        "memory": sums.memory_bound,
        "dequantisation": dequantisation,
        "expert_loop": loop,
        "host": host if host > device or is_cpu else 0.0,
    }
    return max(candidates, key=lambda name: candidates[name])


def _device_seconds(
    model: ModelSpec, job: ResolvedJob, gpu: GpuSpec, batch: Batch, rate: float, accumulation: float, is_cpu: bool
) -> _Sums:
    sums = _Sums()
    tokens = batch.num_tokens
    bandwidth = gpu.memory_bandwidth_bytes_per_second * (1.0 if is_cpu else c.BANDWIDTH_EFFICIENCY)
    compute_bytes = BYTES_PER_ELEMENT[compute_dtype(job)]
    full = not job.is_peft
    checkpointing = job.gradient_checkpointing
    half_rows = 0.0 if is_cpu else c.GEMM_HALF_ROWS
    work = flops(model, job, batch)
    adapters = plan_adapters(model, job)

    def product(which: str, group: str, rows: float, width_in: int, width_out: int, times: float) -> None:
        """``times`` matrix products (rows x in) · (in x out): by FLOPs or by bytes, whichever is longer."""
        by_flops = 2.0 * rows * width_in * width_out / (rate * rows / (rows + half_rows))
        by_bytes = compute_bytes * (width_in * width_out + rows * (width_in + width_out)) / bandwidth
        sums.add(which, group, times * max(by_flops, by_bytes), memory_bound=by_bytes > by_flops)

    def passes_of(skipped_in_recompute: bool, trained: bool) -> tuple[tuple[str, int], ...]:
        recompute = ("recompute", 0 if skipped_in_recompute or not checkpointing else 1)
        return (("forward", 1), recompute, ("backward", 2 if trained else 1))

    stream_scale = BYTES_PER_ELEMENT[stream_dtype(job)] / 2
    cache = gpu.l2_cache_bytes or 0

    def cache_share(rows: float) -> float:
        """Share of the traffic of ``rows`` tokens' tensors that leaves the cache."""
        working_set = 4.0 * rows * model.hidden_size
        return 1.0 if is_cpu else max(c.L2_FLOOR, working_set / (working_set + c.L2_SHARE * cache))

    quantized_weights = 0.0
    for layer, adapted, count in adapters.runs:
        for linear in layer.linears:
            group = "attention_linears" if linear.name.startswith("self_attn.") else "mlp"
            skipped = full and linear.leaf == "down_proj" and not layer.experts and not job.reentrant_checkpointing
            for which, times in passes_of(skipped, full):
                if times:
                    product(which, group, tokens, linear.in_features, linear.out_features, float(times * count))
            quantized_weights += count * linear.in_features * linear.out_features
        attention = layer.attention
        experts = layer.experts
        hit = 1.0
        if experts:
            hit = expected_experts_hit(experts.num_experts, experts.num_experts_per_tok, tokens)
            rows = tokens * experts.num_experts_per_tok / hit
            trains_stack = full or any(p.num_matrices > 1 for p in adapted.parameters)
            for which, times in passes_of(False, trains_stack):
                if times:
                    for width_in, width_out, matrices in (
                        (experts.hidden_size, experts.intermediate_size, 2),
                        (experts.intermediate_size, experts.hidden_size, 1),
                    ):
                        product(which, "experts", rows, width_in, width_out, float(times * count * matrices) * hit)
                    product(which, "router", tokens, experts.hidden_size, experts.num_experts, float(times * count))
            if not job.fused_experts:
                quantized_weights += count * hit * experts.params_per_expert
            stacks = sum(p.base_params for p in adapted.parameters if p.num_matrices > 1)
            if stacks:
                # the merged copy: read the stack, write and read B·A in the adapter's type, write the sum (12 B a weight),
                # twice in the forward; its full gradient is written and read for A and for B in the backward
                for which, visits in (("forward", 2), ("recompute", 2 if checkpointing else 0), ("backward", 1)):
                    sums.add(which, "adapter_merge", count * visits * 12.0 * stacks / bandwidth, memory_bound=True)
        fused = job.torch_compile or job.use_liger_kernel
        width = attention.query_width + attention.kv_width
        if fused:
            moved = 14.0 * model.hidden_size + 8.0 * width + 6.0 * layer.mlp_width
        else:
            moved = 84.0 * model.hidden_size + 22.0 * width + 10.0 * layer.mlp_width
        moved *= stream_scale
        forward_only, backward_only = _adapter_traffic(job, adapted.linears)
        share = count * c.ELEMENTWISE_FACTOR * cache_share(tokens) * tokens / bandwidth
        traffic = {"forward": share * (moved + forward_only), "backward": share * (2 * moved + backward_only)}
        if experts:
            per_row = (6.0 if fused else 10.0) * experts.intermediate_size + 24.0 * experts.hidden_size
            forward_only, backward_only = _adapter_traffic(job, adapted.expert_linears)
            rows = tokens * experts.num_experts_per_tok
            share = count * c.ELEMENTWISE_FACTOR * cache_share(rows / hit) * rows / bandwidth
            traffic["forward"] += share * (per_row + forward_only)
            traffic["backward"] += share * (2 * per_row + backward_only)
        sums.add("forward", "elementwise", traffic["forward"], memory_bound=True)
        if checkpointing:
            sums.add("recompute", "elementwise", traffic["forward"], memory_bound=True)
        sums.add("backward", "elementwise", traffic["backward"], memory_bound=True)
        if attention_kernel(job, layer) != "fused":
            # the score matrix goes through memory: product, scale, mask, softmax, cast, product
            moved = 24.0 * attention.num_heads * batch.num_attended_pairs
            for which, times in (("forward", 1.0), ("recompute", 1.0 if checkpointing else 0.0), ("backward", 2.0)):
                sums.add(which, "attention_scores", count * times * moved / bandwidth, memory_bound=True)

    causal = 0.5  # half of the square that the FLOP count holds
    attention_rate = rate * (1.0 if is_cpu else c.ATTENTION_EFFICIENCY)
    for which, counted in (("forward", work.forward), ("recompute", work.recompute), ("backward", work.backward)):
        sums.add(which, "attention_scores", causal * counted["attention_scores"] / attention_rate)
        sums.add(which, "adapters", counted["adapters"] / rate)
        if counted["adapter_merge"]:
            sums.add(which, "adapter_merge", counted["adapter_merge"] / rate)
    sums.add("forward", "head_and_loss", work.forward["head"] / rate)
    sums.add("backward", "head_and_loss", work.backward["head"] / rate)
    per_logit = c.LOSS_BYTES_PER_LOGIT[job.fused_loss or "stock"]
    loss = per_logit * batch.num_head_tokens * model.vocab_size / bandwidth
    sums.add("forward", "head_and_loss", loss * 0.4, memory_bound=True)
    sums.add("backward", "head_and_loss", loss * 0.6, memory_bound=True)

    if job.quantization:
        per_weight = _dequantisation_seconds_per_weight(job.quantization, gpu)
        for which in ("forward", "backward", *(("recompute",) if checkpointing else ())):
            sums.add(which, "dequantisation", quantized_weights * per_weight)

    trained = num_trainable_params(model, job)
    trained_bytes = BYTES_PER_ELEMENT[job.adapter_dtype if job.is_peft else job.dtype]
    per_element = (c.OPTIMIZER_BYTES_FOREACH if job.optim == "adamw_torch" else c.OPTIMIZER_BYTES_FUSED)[trained_bytes == 4]
    sums.add("optimizer", "optimizer", trained * per_element / bandwidth / accumulation, memory_bound=True)
    return sums


def _dequantisation_seconds_per_weight(quantization: str, gpu: GpuSpec) -> float:
    """One weight from its codes to 16 bits: by the bytes it moves or by the integer instructions it takes."""
    by_bytes = c.DEQUANTISATION_BYTES[quantization] / (gpu.memory_bandwidth_bytes_per_second * c.BANDWIDTH_EFFICIENCY)
    instructions = c.DEQUANTISATION_INSTRUCTIONS.get(quantization)
    if instructions is None or gpu.peak_fp32_flops_per_second is None or gpu.vendor != "NVIDIA":
        return by_bytes
    # A multiply-add is two FLOPs. From compute capability 8.6 on, and on Hopper, half of the fp32 lanes do integers;
    # before, there were as many lanes of each.
    has_shared_lanes = tuple(int(part) for part in gpu.compute_capability.split(".")) >= (8, 6)
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
    if job.lora_dropout:
        per_in, back_in = per_in + dropout, back_in + dropout
    width_in = sum(each.linear.in_features for each in adapted)
    width_out = sum(each.linear.out_features for each in adapted)
    return per_in * width_in + per_out * width_out, back_in * width_in + back_out * width_out
