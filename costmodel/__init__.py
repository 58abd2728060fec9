"""What will this LLM fine-tuning run cost? Memory, step time, hours and dollars from a model's config and a data sheet.

from costmodel import estimate
answer = estimate(model="mistralai/Mixtral-8x7B-v0.1", gpu="NVIDIA A40", method="qlora", ...)
answer.verdict, answer.step_seconds, answer.total_usd
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costmodel.answer import Estimate
    from costmodel.comparison import compare
    from costmodel.errors import CostModelError
    from costmodel.estimation import estimate
    from costmodel.gpu_catalog import find_gpu, list_gpus
    from costmodel.hf_config import model_spec_from_config
    from costmodel.model_catalog import find_model_config, list_models
    from costmodel.model_spec import ModelSpec
    from costmodel.optimization import optimize
    from costmodel.price_catalog import find_price, list_prices
    from costmodel.specs import GpuSpec, Job, Lengths, Price

__all__ = [
    "CostModelError",
    "Estimate",
    "GpuSpec",
    "Job",
    "Lengths",
    "ModelSpec",
    "Price",
    "compare",
    "estimate",
    "find_gpu",
    "find_model_config",
    "find_price",
    "list_gpus",
    "list_models",
    "list_prices",
    "model_spec_from_config",
    "optimize",
]

_HOMES = {
    "CostModelError": "errors",
    "Estimate": "answer",
    "GpuSpec": "specs",
    "Job": "specs",
    "Lengths": "specs",
    "ModelSpec": "model_spec",
    "Price": "specs",
    "compare": "comparison",
    "estimate": "estimation",
    "find_gpu": "gpu_catalog",
    "find_model_config": "model_catalog",
    "find_price": "price_catalog",
    "list_gpus": "gpu_catalog",
    "list_models": "model_catalog",
    "list_prices": "price_catalog",
    "model_spec_from_config": "hf_config",
    "optimize": "optimization",
}


def __getattr__(name: str) -> Any:
    """Import on first use: ``import costmodel`` alone loads nothing heavy."""
    if name in _HOMES:
        import importlib

        value = getattr(importlib.import_module(f"costmodel.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
