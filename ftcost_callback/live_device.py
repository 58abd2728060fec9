"""The device a model trains on, as the catalogue knows it, and the versions of the software. Reads only."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from costmodel.errors import AmbiguousNameError, UnknownNameError
from costmodel.gpu_catalog import find_gpu, list_gpus
from costmodel.specs import GpuSpec, parse_gpu

# The driver reports a little less than the marketed capacity; a MIG slice or a vGPU reports much less.
_SAME_MEMORY: Final = 0.15

_PACKAGES: Final = (
    "ftcost",
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "bitsandbytes",
    "datasets",
    "flash-attn",
    "liger-kernel",
    "unsloth",
    "deepspeed",
    "wandb",
)


def device_facts(
    device: Any = None, *, gpu: str | Mapping[str, Any] | GpuSpec | None = None, dtype: str | None = None
) -> dict[str, Any]:
    """``kind`` ("cuda", "cpu", ...), ``name``, ``memory_bytes``, ``compute_capability``, ``uuid``, ``gpu`` (for the job),
    ``peak_flops_per_second`` of dense ``dtype`` matmuls and ``peak_source``. A field that is not known is absent.

    ``device``: a ``torch.device``, its name, or ``None`` for the default one. ``gpu`` (a catalogue name or a spec)
    overrides what was recognised; a device that is not in the catalogue never gets another one's peak. ``dtype`` is the
    type the run's matrix products have; not given: bfloat16, or float16 on a GPU that is too old for bfloat16.
    """
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    facts: dict[str, Any] = {"kind": device.type}
    spec: GpuSpec | None = None
    if gpu is not None:
        spec = find_gpu(gpu) if isinstance(gpu, str) else parse_gpu(gpu)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"{properties.major}.{properties.minor}"
        facts |= {
            "name": properties.name,
            "memory_bytes": int(properties.total_memory),
            "compute_capability": capability,
            "uuid": str(properties.uuid) if hasattr(properties, "uuid") else None,
        }
        if spec is None:
            spec = recognise_gpu(properties.name, int(properties.total_memory), capability)
    elif device.type == "cpu":
        facts |= {"name": _cpu_name(), "memory_bytes": _host_memory_bytes()}
    if spec is not None:
        facts["gpu"] = spec.name if _is_catalogued(spec) else spec.model_dump(exclude_none=True)
        facts |= _peak(spec, dtype)
    return {name: value for name, value in facts.items() if value is not None}


def recognise_gpu(name: str, memory_bytes: int, compute_capability: str) -> GpuSpec | None:
    """The catalogue's product that has this name *and* this memory and compute capability; ``None`` for any doubt."""
    try:
        candidates = [find_gpu(name)]
    except AmbiguousNameError as error:
        candidates = [find_gpu(each) for each in error.candidates]
    except UnknownNameError:
        return None
    fitting = [
        spec
        for spec in candidates
        if abs(memory_bytes / spec.memory_bytes - 1) <= _SAME_MEMORY and spec.compute_capability in ("", compute_capability)
    ]
    return fitting[0] if len(fitting) == 1 else None


def _is_catalogued(spec: GpuSpec) -> bool:
    return any(each == spec for each in list_gpus())


def _peak(spec: GpuSpec, dtype: str | None) -> dict[str, Any]:
    peaks = {
        "bfloat16": spec.peak_bf16_flops_per_second,
        "float16": spec.peak_fp16_flops_per_second,
        "float32": spec.peak_fp32_flops_per_second,
    }
    if dtype is None:
        dtype = "bfloat16" if peaks["bfloat16"] is not None else "float16"
    peak = peaks.get(dtype)
    if peak is None:
        return {}
    source = f"{spec.name}, dense {dtype}"
    return {"peak_flops_per_second": peak, "peak_source": f"{source} ({spec.source})" if spec.source else source}


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine() or None


def _host_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def versions() -> dict[str, str]:
    """Versions of Python, CUDA and of the packages that decide what a run costs; only those that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "torch" in found:
        import torch

        if torch.version.cuda:
            found["cuda"] = str(torch.version.cuda)
    return found
