"""``attach(trainer)``: the callback, and a few of its figures in the Trainer's own logs.

A callback given as ``callbacks=[FTCostCallback()]`` stands behind the reporting callbacks, so nothing it adds to the
logs reaches them. ``attach`` puts a small one in front of them that adds the figures of the last report to each log: they
reach TensorBoard, MLflow, trackio, every other integration, and ``state.log_history``. A tracker that a sink of ours
writes to (W&B; trackio with ``TrackioSink``) is moved in front of that and gets them by the sink alone, so no value
appears twice.
"""

from __future__ import annotations

import logging
from typing import Any

from transformers import DefaultFlowCallback, TrainerCallback

from costmodel.errors import CostModelError
from ftcost_callback.callback import FTCostCallback
from ftcost_callback.metrics import logged_metrics
from ftcost_callback.sinks.console import ConsoleSink
from ftcost_callback.sinks.in_memory import LatestWindowSink
from ftcost_callback.sinks.routes import is_named, served_callback_names

_log = logging.getLogger("ftcost_callback")

_DISPLAYS = ("ProgressCallback", "PrinterCallback", "NotebookProgressCallback")


def attach(trainer: Any, callback: FTCostCallback | None = None, /, **arguments: Any) -> FTCostCallback:
    """Measure ``trainer`` and add the main figures to its logs. Returns the callback.

    ``callback``: one made before; without it, the trainer's own one if it has one, else a new ``FTCostCallback`` with
    ``arguments``. Call it before ``train()`` and after the trainer has its other callbacks; a second call changes
    nothing. Raises :class:`CostModelError` for wrong arguments and for something that is no ``Trainer``.
    """
    handler = getattr(trainer, "callback_handler", None)
    if handler is None or not isinstance(getattr(handler, "callbacks", None), list):
        raise CostModelError(f"attach takes a transformers Trainer, got {type(trainer).__name__}")
    measuring = next((each for each in handler.callbacks if isinstance(each, FTCostCallback)), None)
    if arguments and (callback is not None or measuring is not None):
        raise CostModelError("the trainer has an FTCostCallback already, or is given one: leave the arguments out")
    if callback is not None and measuring is not None and callback is not measuring:
        raise CostModelError("the trainer has another FTCostCallback already: give that one, or none")
    if measuring is None:
        measuring = callback if callback is not None else FTCostCallback(**arguments)
        trainer.add_callback(measuring)
        measuring.on_init_end(trainer.args, trainer.state, trainer.control)  # the Trainer's own call has passed
    if not any(isinstance(each, LogFigures) for each in handler.callbacks):
        latest = LatestWindowSink()
        measuring.sinks.append(latest)
        _insert(handler.callbacks, LogFigures(latest, measuring), measuring)
    return measuring


def _insert(callbacks: list[Any], figures: LogFigures, measuring: FTCostCallback) -> None:
    """``figures`` before every reporter but those that a sink serves; taken out again before the terminal's line."""
    served_names = served_callback_names(measuring.sinks)
    served = [each for each in callbacks if is_named(each, served_names)]
    others = [each for each in callbacks if not is_named(each, served_names)]
    reporters = _reporter_types()
    after_flow = next((place + 1 for place, each in enumerate(others) if isinstance(each, DefaultFlowCallback)), 0)
    place = next((place for place, each in enumerate(others) if isinstance(each, reporters)), after_flow)
    others[place:place] = [*served, figures]
    if any(isinstance(sink, ConsoleSink) for sink in measuring.sinks):
        display = next((place for place, each in enumerate(others) if is_named(each, _DISPLAYS)), len(others))
        others.insert(display, HideFigures(figures))
    callbacks[:] = others


def _reporter_types() -> tuple[type, ...]:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    return tuple(INTEGRATION_TO_CALLBACK.values())


class LogFigures(TrainerCallback):
    """Adds the figures of the report of this step to ``logs`` and to ``state.log_history``."""

    def __init__(self, latest: LatestWindowSink, measuring: FTCostCallback) -> None:
        self.added: dict[str, float] = {}
        self._measuring = measuring
        self._latest: LatestWindowSink | None = latest

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.added = {}
        if logs is None or self._latest is None:
            return
        try:
            if "train_runtime" in logs:  # the Trainer's last, also of a run that is stopped between two logs
                self._measuring.report_last_steps()
            window = self._latest.take(state.global_step)
            if window is None:
                return
            self.added = {key: value for key, value in logged_metrics(window).items() if key not in logs}
            if state.log_history:  # the Trainer has made its entry before this event
                state.log_history[-1].update(self.added)
            logs.update(self.added)
        except Exception:
            _log.warning(
                "ftcost: nothing was added to the Trainer's logs, from step %s on", state.global_step, exc_info=True
            )
            self._latest = None


class HideFigures(TrainerCallback):
    """Takes the added figures out again, so that the terminal shows them once: on our own line."""

    def __init__(self, figures: LogFigures) -> None:
        self._figures = figures

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        for key in self._figures.added if logs is not None else ():
            logs.pop(key, None)  # type: ignore[union-attr]
