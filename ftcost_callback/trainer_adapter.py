"""Live model, optimizer, ``TrainingArguments`` and device -> the plain job mapping of :func:`costmodel.estimate`.

Reads only: nothing here moves a tensor, draws a random number, waits for a device or changes an object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costmodel.estimation import Estimate


def job_from_objects(
    *,
    model: Any,
    args: Any,
    optimizer: Any = None,
    state: Any = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    processing_class: Any = None,
    gpu: str | Mapping[str, Any] | None = None,
    framework: str | None = None,
) -> dict[str, Any]:
    """The job mapping, without the fields that the live objects do not show. ``gpu`` overrides the device found."""
    raise NotImplementedError


def model_facts(model: Any) -> dict[str, Any]:
    """``num_params``, ``num_active_params``, ``num_trainable_params`` (logical counts), ``class``, ``model_type``, ..."""
    raise NotImplementedError


def device_facts(device: Any = None, *, gpu: str | Mapping[str, Any] | None = None) -> dict[str, Any]:
    """``kind`` ("cuda", "cpu", ...), ``name``, ``memory_bytes``, ``compute_capability``, ``uuid``, ``gpu`` (for the job),
    ``peak_flops_per_second`` and ``peak_source``; a field that is not known is absent."""
    raise NotImplementedError


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a run costs; only those that are installed."""
    raise NotImplementedError


def estimate_trainer(trainer: Any, **overrides: Any) -> Estimate:
    """The estimate of the run ``trainer`` is about to do; ``overrides`` are job fields that win over what was read."""
    raise NotImplementedError
