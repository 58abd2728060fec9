"""Keeps everything in lists: for tests and notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftcost_callback.records import Budget, Prediction, Session, Summary, Window


class InMemorySink:
    """``session``, ``predictions``, ``windows``, ``extras`` (one per window), ``budgets``, ``summary``.

    A second session of the same object (``train()`` called twice) is appended; ``session`` is the latest.
    """

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.predictions: list[Prediction] = []
        self.windows: list[Window] = []
        self.extras: list[dict[str, Any]] = []
        self.budgets: list[Budget] = []
        self.summaries: list[Summary] = []

    @property
    def session(self) -> Session | None:
        return self.sessions[-1] if self.sessions else None

    @property
    def summary(self) -> Summary | None:
        return self.summaries[-1] if self.summaries else None

    def open(self, session: Session, prediction: Prediction | None) -> None:
        self.sessions.append(session)
        if prediction is not None:
            self.predictions.append(prediction)

    def prediction(self, prediction: Prediction) -> None:
        self.predictions.append(prediction)

    def log(self, window: Window, extra: Mapping[str, Any]) -> None:
        self.windows.append(window)
        self.extras.append(dict(extra))

    def alert(self, budget: Budget) -> None:
        self.budgets.append(budget)

    def close(self, summary: Summary) -> None:
        self.summaries.append(summary)


class LatestWindowSink:
    """Keeps the last report until it is taken: for what is added to the Trainer's own logs."""

    def __init__(self) -> None:
        self._window: Window | None = None

    def take(self, global_step: int) -> Window | None:
        """The report of this step, once."""
        window = self._window
        if window is None or window.global_step != global_step:
            return None
        self._window = None
        return window

    def open(self, session: Session, prediction: Prediction | None) -> None:
        self._window = None

    def prediction(self, prediction: Prediction) -> None:
        """Not a figure of the logs."""

    def log(self, window: Window, extra: Mapping[str, Any]) -> None:
        self._window = window

    def alert(self, budget: Budget) -> None:
        """Not a figure of the logs."""

    def close(self, summary: Summary) -> None:
        """The Trainer logs nothing after it."""
