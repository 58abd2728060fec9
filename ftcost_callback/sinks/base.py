"""What a sink is, and the container that keeps one sink's failure away from the others and from training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol, runtime_checkable

from ftcost_callback.records import Budget, Prediction, Session, Summary, TrainerLog, Window

_log = logging.getLogger(__name__)

MAX_FAILURES: Final = 3


@runtime_checkable
class Sink(Protocol):
    """Where reports go. Called on the training thread of the main process, at logging steps: be quick, touch no device.

    ``extra`` of :meth:`log` holds what is no scalar, by name: ``"expert_load"`` is an
    :class:`~ftcost_callback.records.ExpertLoad`, ``"trainer_logs_next"`` is true where the Trainer's own log (of the step,
    or of an evaluation) follows at once. A sink ignores names it does not know. A sink that also has
    ``trainer_logged(entry: TrainerLog)`` is told what the Trainer logs.
    """

    def open(self, session: Session, prediction: Prediction | None) -> None: ...

    def prediction(self, prediction: Prediction) -> None:
        """A later prediction (``basis`` ``tokens_seen``)."""

    def log(self, window: Window, extra: Mapping[str, Any]) -> None: ...

    def alert(self, budget: Budget) -> None: ...

    def close(self, summary: Summary) -> None: ...


class FanOut:
    """Passes every call to each sink, and never raises.

    A sink that fails is reported once (through ``warn``) with its traceback in the log, and switched off after
    :data:`MAX_FAILURES` failures; one whose ``open`` fails is switched off at once.
    """

    def __init__(self, sinks: Iterable[Sink], warn: Callable[[str], None] | None = None) -> None:
        self._sinks = list(sinks)
        self._warn = warn if warn is not None else _log.warning
        self._num_failures: dict[int, int] = {}

    @property
    def active(self) -> list[Sink]:
        """The sinks that are still on."""
        return list(self._sinks)

    def open(self, session: Session, prediction: Prediction | None) -> None:
        self._call("open", session, prediction)

    def prediction(self, prediction: Prediction) -> None:
        self._call("prediction", prediction)

    def log(self, window: Window, extra: Mapping[str, Any] | None = None) -> None:
        self._call("log", window, extra if extra is not None else {})

    def trainer_logged(self, entry: TrainerLog) -> None:
        """To the sinks that want it."""
        self._call("trainer_logged", entry, is_optional=True)

    def alert(self, budget: Budget) -> None:
        self._call("alert", budget)

    def close(self, summary: Summary) -> None:
        self._call("close", summary)

    def _call(self, method: str, *arguments: Any, is_optional: bool = False) -> None:
        for sink in list(self._sinks):
            if is_optional and not hasattr(sink, method):
                continue
            try:
                getattr(sink, method)(*arguments)
            except Exception as error:
                self._failed(sink, method, error)

    def _failed(self, sink: Sink, method: str, error: Exception) -> None:
        name = type(sink).__name__
        failures = self._num_failures.get(id(sink), 0) + 1
        self._num_failures[id(sink)] = failures
        _log.debug("%s.%s failed", name, method, exc_info=error)
        if failures == 1:
            self._warn(f"ftcost: {name}.{method} failed ({type(error).__name__}: {error}); training goes on")
        if failures >= MAX_FAILURES or method == "open":
            self._sinks = [each for each in self._sinks if each is not sink]
            self._warn(f"ftcost: {name} is switched off for this run")
