"""Live cost of a Hugging Face ``Trainer`` run, held against the prediction.

from ftcost_callback import FTCostCallback
trainer = Trainer(..., callbacks=[FTCostCallback(usd_per_gpu_hour=2.10, budget_usd=40)])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftcost_callback.callback import FTCostCallback
    from ftcost_callback.monitor import FTCostMonitor
    from ftcost_callback.trainer_adapter import estimate_trainer
    from ftcost_callback.trainer_logs import attach

__all__ = ["FTCostCallback", "FTCostMonitor", "attach", "estimate_trainer"]

_HOMES = {
    "FTCostCallback": "ftcost_callback.callback",
    "FTCostMonitor": "ftcost_callback.monitor",
    "attach": "ftcost_callback.trainer_logs",
    "estimate_trainer": "ftcost_callback.trainer_adapter",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``import ftcost_callback`` needs neither torch nor transformers."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
