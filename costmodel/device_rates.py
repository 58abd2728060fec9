"""What a device computes in a second: large matrix products, its data sheet's peak, weights taken out of 4 and 8 bit."""

from __future__ import annotations

import math

from costmodel import constants as c
from costmodel.defaults import ResolvedJob
from costmodel.specs import GpuSpec
from costmodel.workload import stream_dtype


def compute_dtype(job: ResolvedJob) -> str:
    """The type that matrix products run in."""
    return job.autocast_dtype or stream_dtype(job)


def matmul_ceiling(gpu: GpuSpec, dtype: str) -> float | None:
    """FLOP/s that large matrix products reach on this device; ``None`` where the data sheet has no rate for the type.

    A measured rate where there is one; else a share of the data-sheet peak, or what the power allows if that is less.
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
    if is_geforce and gpu.compute_capability in c.GEFORCE_ABOVE_PEAK:
        return c.GEFORCE_CEILING_OVER_PEAK * peak
    share = c.CEILING_OVER_PEAK_OF_GENERATION.get(gpu.compute_capability, c.CEILING_OVER_PEAK)
    return min(share * peak, _inside_power_limit(gpu, peak))


def _inside_power_limit(gpu: GpuSpec, peak: float) -> float:
    """FLOP/s that the board's power allows; infinite where nothing is known of it."""
    if gpu.tdp_watts is None:
        return math.inf
    if gpu.compute_capability in c.CEILING_FLOPS_PER_SECOND_PER_WATT:
        return c.CEILING_FLOPS_PER_SECOND_PER_WATT[gpu.compute_capability] * gpu.tdp_watts
    per_watt = c.POWER_LIMITED_FLOPS_PER_SECOND_PER_WATT.get(gpu.compute_capability)
    return math.sqrt(peak * gpu.tdp_watts * per_watt) if per_watt else math.inf


def peak_flops_per_second(gpu: GpuSpec, job: ResolvedJob) -> float | None:
    """The data-sheet rate (dense) of the type the matrix products run in: the denominator of MFU and HFU."""
    return {
        "bfloat16": gpu.peak_bf16_flops_per_second,
        "float16": gpu.peak_fp16_flops_per_second,
        "float32": gpu.peak_fp32_flops_per_second,
    }[compute_dtype(job)]


def dequantisation_seconds_per_weight(quantization: str, gpu: GpuSpec, *, by_table: bool = True) -> float:
    """One weight from its codes to 16 bits: as probed, else by the bytes it moves or its integer instructions.

    ``by_table``: bitsandbytes from 0.48 on.
    """
    measured = gpu.probed.dequantisation_seconds_per_weight if gpu.probed else None
    if measured and quantization in measured:
        return measured[quantization]
    by_bytes = c.DEQUANTISATION_BYTES[quantization] / (gpu.memory_bandwidth_bytes_per_second * c.BANDWIDTH_EFFICIENCY)
    kernels = c.TABLE_DEQUANTISATION_INSTRUCTIONS if by_table else c.TREE_DEQUANTISATION_INSTRUCTIONS
    instructions = kernels.get(quantization)
    if instructions is None or gpu.peak_fp32_flops_per_second is None or gpu.vendor != "NVIDIA":
        return by_bytes
    # A multiply-add is two FLOPs. From compute capability 8.6 on, and on Hopper, half of the fp32 lanes do integers;
    # before, there were as many lanes of each.
    # Of a described GPU whose compute capability is not known, the slower of the two is taken: most cards are newer.
    capability = [int(part) for part in gpu.compute_capability.split(".") if part.isdecimal()]
    has_shared_lanes = len(capability) < 2 or tuple(capability) >= (8, 6)
    integer_rate = gpu.peak_fp32_flops_per_second / (4 if has_shared_lanes else 2)
    return max(by_bytes, instructions / (integer_rate * _clock_under_load(gpu)))


def _clock_under_load(gpu: GpuSpec) -> float:
    """Share of the data sheet's clock at which a card does everything: below 1 where its matrix rate is a lower clock's."""
    peak = gpu.peak_fp16_flops_per_second
    if peak is None or gpu.tdp_watts is None or gpu.compute_capability not in c.CEILING_FLOPS_PER_SECOND_PER_WATT:
        return 1.0
    return min(1.0, _inside_power_limit(gpu, peak) / peak)
