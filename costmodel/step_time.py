"""Seconds of one optimizer step: a roofline by operator group, the host's floor under it, and Python expert loops on top.

    step / accumulation = (t_device^3 + t_host^3)^(1/3) + t_loop
    t_device = matrix products + head and loss + attention + element-wise traffic + dequantisation + optimizer / accumulation
    t_host   = operators * seconds an operator + calls into 4- and 8-bit kernels * seconds a call

The third-power sum is a smooth maximum: an eager step runs as fast as the slower of device and host. On a CPU both are the
same processor, so they add. Every constant stands in ``constants.py``; ``docs/formulas.md`` derives the terms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypedDict

from costmodel import constants as c
from costmodel.adapters import plan_adapters
from costmodel.communication import Communication, communication, exposed_seconds
from costmodel.defaults import ResolvedJob
from costmodel.device_rates import compute_dtype, matmul_ceiling
from costmodel.device_time import PASSES, DeviceSums, add_device_seconds, expert_passes, expert_rows
from costmodel.expert_load import ExpertLoad
from costmodel.model_spec import ModelSpec
from costmodel.operators import Operators, operators
from costmodel.specs import GpuSpec, ProbedRates
from costmodel.workload import Batch


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
    slowest: Batch | None = None,
) -> StepTime | None:
    """Seconds of one optimizer step of ``micro_batches`` (default: the accumulation steps) batches like ``batch``.

    ``slowest``: the mean micro-batch of the rank with most tokens (:mod:`costmodel.slowest_gpu`), which the others wait for;
    ``None``: all ranks have batches like ``batch``.

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
    sums = DeviceSums(device_factor=device_factor, host_factor=host_factor)
    load = expert_load if expert_load is not None else job.expert_imbalance
    add_device_seconds(sums, model, job, gpu, batch, rate, accumulation, is_cpu, load, expert_ranks)

    per_operator = (gpu.seconds_per_operator or c.SECONDS_PER_OPERATOR) * host_factor
    stack_factor = _stack_factor(job)
    counted = operators(model, job, batch)
    from_python, from_autograd = per_operator, per_operator
    if probed.forward_seconds_per_operator and probed.backward_seconds_per_operator:
        from_python = probed.forward_seconds_per_operator * host_factor
        from_autograd = probed.backward_seconds_per_operator * host_factor
    host_by_pass = {
        "forward": counted.forward * from_python * stack_factor,
        "recompute": counted.recompute * from_python * stack_factor,
        "backward": counted.backward * from_autograd * stack_factor,
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
    for which in ("forward", "backward") if passes == 2 else PASSES:
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
    alike = StepTime(
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
    if slowest is None:
        return alike
    longer = step_time(
        model,
        job,
        gpu,
        slowest,
        micro_batches=micro_batches,
        device_factor=device_factor,
        host_factor=host_factor,
        expert_load=expert_load,
        expert_ranks=expert_ranks,
    )
    return _waiting(alike, longer) if longer else alike


def _waiting(mean: StepTime, longest: StepTime) -> StepTime:
    """The step of a ``mean`` rank that waits in the passes for the one with the ``longest``."""
    waited = longest.step_seconds - mean.step_seconds
    if waited <= 0.0:
        return mean
    return replace(
        mean,
        step_seconds=longest.step_seconds,
        forward_seconds=longest.forward_seconds,
        backward_seconds=longest.backward_seconds,
        optimizer_seconds=longest.optimizer_seconds,
        by_group_seconds={**mean.by_group_seconds, "waiting_for_slowest_gpu": waited},
    )


def imbalance_seconds(
    model: ModelSpec,
    job: ResolvedJob,
    gpu: GpuSpec,
    batch: Batch,
    load: ExpertLoad,
    *,
    expert_ranks: int = 1,
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
    uneven = step_time(model, job, gpu, batch, expert_load=load, expert_ranks=expert_ranks)
    even = step_time(model, job, gpu, batch, expert_load=1.0)
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


def _bound_by(sums: DeviceSums, device: float, host: float, loop: float, communicating: float, is_cpu: bool) -> str:
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
    groups = dict.fromkeys(PASSES, 0.0)
    if job.experts_implementation == "eager":
        return groups
    for layer, adapted, count in plan_adapters(model, job).runs:
        for experts in layer.all_experts:
            hit, _ = expert_rows(experts, batch, model.family)
            for which, times in expert_passes(job, adapted).items():
                groups[which] += 2.0 * times * count * hit  # into the experts in one product, out of them in another
    return groups
