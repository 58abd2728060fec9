"""Which trackers our figures reach, and how: by a sink of ours, or (``attach``) by the Trainer's own logs. Never by both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

from ftcost_callback.sinks.base import Sink
from ftcost_callback.sinks.in_memory import LatestWindowSink

# Name of a sink -> the same tracker's name in ``report_to`` and the class of transformers that reports to it.
_TRACKERS: Final = {"WandbSink": ("wandb", "WandbCallback"), "TrackioSink": ("trackio", "TrackioCallback")}


def served_callback_names(sinks: Iterable[Sink]) -> frozenset[str]:
    """Reporting callbacks of transformers whose tracker a sink of ours writes to."""
    return frozenset(_TRACKERS[name][1] for sink in sinks if (name := type(sink).__name__) in _TRACKERS)


def trackers_without_figures(report_to: str | Sequence[str] | None, sinks: Sequence[Sink]) -> list[str]:
    """The names in ``report_to`` that get nothing of ours: no sink writes to them, and nothing is added to the logs."""
    if any(isinstance(sink, LatestWindowSink) for sink in sinks):
        return []
    served = {_TRACKERS[name][0] for sink in sinks if (name := type(sink).__name__) in _TRACKERS}
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    return [name for name in names if name != "none" and name not in served]


def is_named(instance: Any, names: Iterable[str]) -> bool:
    """Whether it is of a class of one of these names, or of one derived from it."""
    wanted = set(names)
    return any(each.__name__ in wanted for each in type(instance).__mro__)


def place_of_wandb_callback(callbacks: Iterable[Any], own: Any) -> Literal["before", "after"] | None:
    """Whether transformers' ``WandbCallback`` is told of an event before ``own`` is, or after it; ``None`` without one."""
    place: Literal["before", "after"] = "before"
    for each in callbacks:
        if each is own:
            place = "after"
        elif is_named(each, ["WandbCallback"]):
            return place
    return None


def tell_who_else_writes(sinks: Iterable[Any], callbacks: Iterable[Any], own: Any) -> None:
    """To the sinks of W&B, whose rows share a run with the Trainer's."""
    place = place_of_wandb_callback(callbacks, own)
    for sink in sinks:
        if is_named(sink, ["WandbSink"]):
            sink.trainer_writes = place
