"""Triton kernels of TRL, Liger and mamba_ssm on fake tensors: what is around a kernel runs, the kernel itself does nothing.

The kernels write into tensors that their callers have made, so memory is what it is on a GPU. Their products are not seen.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def _does_nothing(*_: Any, **__: Any) -> None:
    return None


def _all_positions_count(self: torch.Tensor) -> float:
    """``item()`` of a fake tensor, which has no value: Liger counts the labels that are not masked."""
    return 1.0


_MAMBA2_MIXERS = {"mamba2": "mamba2", "granitemoehybrid": "granitemoehybrid", "nemotron_h": "nemotron_h"}


def _mamba_ssm_scan() -> Any:
    """``mamba_split_conv1d_scan_combined`` of mamba_ssm, its sources without the compiled extensions."""
    if "mamba_ssm" not in sys.modules:
        package = ModuleType("mamba_ssm")  # its own __init__ imports the extensions
        found = importlib.util.find_spec("mamba_ssm")
        assert found is not None, "mamba_ssm is not installed: MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps mamba-ssm"
        package.__path__ = list(found.submodule_search_locations or ())
        convolution, extension = ModuleType("causal_conv1d"), ModuleType("causal_conv1d_cuda")
        convolution.causal_conv1d_fn = None  # type: ignore[attr-defined]
        extension.causal_conv1d_fwd = lambda rows, *_: torch.empty_like(rows)  # type: ignore[attr-defined]
        extension.causal_conv1d_bwd = lambda rows, weight, bias, gradient, a, b, c, into, *_: (  # type: ignore[attr-defined]
            into,
            torch.empty_like(weight),
            torch.empty_like(bias),
            None,
        )
        sys.modules |= {"mamba_ssm": package, "causal_conv1d": convolution, "causal_conv1d_cuda": extension}
    scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_split_conv1d_scan_combined
    known = inspect.signature(scan).parameters
    return lambda *args, **kwargs: scan(*args, **{name: value for name, value in kwargs.items() if name in known})


@contextlib.contextmanager
def kernels_that_do_nothing(job: Mapping[str, Any], model_type: str = "") -> Iterator[None]:
    """For the length of a ``with`` block; nothing changes for a job without such kernels."""
    replaced: list[tuple[Any, str, Any]] = []
    if model_type in _MAMBA2_MIXERS:
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import KernelInterface

        name = _MAMBA2_MIXERS[model_type]
        modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        replaced += [
            (modeling, "mamba2_split_conv1d_scan_combined", _mamba_ssm_scan()),
            (KernelInterface, "__getitem__", lambda kernel, grid: _does_nothing),
            (Autotuner, "best_config", property(lambda kernel: kernel.configs[0])),
            (torch.cuda, "device", lambda index: contextlib.nullcontext()),
            (torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=108)),
        ]
    if job.get("use_liger_kernel"):
        from triton.runtime.jit import KernelInterface

        replaced += [
            (KernelInterface, "__getitem__", lambda kernel, grid: _does_nothing),
            (torch.Tensor, "item", _all_positions_count),
            (torch, "equal", lambda first, second: False),  # Liger's backward scales what it has; in place
        ]
    if job.get("framework") == "trl":
        from trl.kernels import chunked_logprob
        from trl.trainer import utils

        # With Triton TRL picks the supervised rows by a mask, whose size a fake tensor does not have; without, it copies
        # all rows of a batch, which is as much where none is masked.
        replaced += [
            (chunked_logprob, "_forward_tile", _does_nothing),
            (chunked_logprob, "_backward_tile", _does_nothing),
            (chunked_logprob, "_addmm_fp32", _does_nothing),
            (chunked_logprob, "_use_triton", lambda device: False),
            (utils, "_use_triton", lambda device: False),
        ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            if hasattr(owner, name):
                stack.callback(setattr, owner, name, getattr(owner, name))
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, value)
        yield


def fuse_kernels(model: Any, job: Mapping[str, Any]) -> None:
    """Puts the job's kernels into a model, as its Trainer does."""
    if job.get("use_liger_kernel"):
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        # it replaces the classes too, for models that are built later; a Trainer's model is there already
        module = vars(sys.modules[type(model).__module__])
        classes = {name: value for name, value in module.items() if isinstance(value, type)}
        _apply_liger_kernel_to_instance(model=model)
        module.update(classes)
    if job.get("framework") == "trl":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))


def library_versions(job: Mapping[str, Any], model_type: str) -> dict[str, str]:
    """Of what this row needs besides torch, transformers and peft."""
    names = ["trl"] if job.get("framework") == "trl" else []
    if job.get("use_liger_kernel"):
        names += ["liger_kernel", "triton"]
    if model_type in _MAMBA2_MIXERS:
        names += ["mamba_ssm", "triton"]
    return {name: importlib.metadata.version(name) for name in names}
