"""Where reports go: console, memory, Weights & Biases, trackio. Any object with the methods of :class:`Sink` will do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftcost_callback.sinks.base import FanOut, Sink
    from ftcost_callback.sinks.console import ConsoleSink
    from ftcost_callback.sinks.in_memory import InMemorySink
    from ftcost_callback.sinks.trackio import TrackioSink
    from ftcost_callback.sinks.wandb import WandbSink

__all__ = ["ConsoleSink", "FanOut", "InMemorySink", "Sink", "TrackioSink", "WandbSink"]

_HOMES = {
    "ConsoleSink": "console",
    "FanOut": "base",
    "InMemorySink": "in_memory",
    "Sink": "base",
    "TrackioSink": "trackio",
    "WandbSink": "wandb",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"ftcost_callback.sinks.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
