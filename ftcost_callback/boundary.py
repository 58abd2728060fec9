"""The one place where an error of ours ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

_log = logging.getLogger("ftcost_callback")

_T = TypeVar("_T")


class Boundary:
    """Calls parts by name. One that fails is off from then on; that is said once, with its traceback in the log."""

    def __init__(self) -> None:
        self.off: set[str] = set()  # parts that have failed
        self._on_failure: dict[str, Callable[[], None]] = {}

    def on_failure(self, part: str, clean_up: Callable[[], None]) -> None:
        """What to undo when ``part`` fails."""
        self._on_failure[part] = clean_up

    def call(self, part: str, function: Callable[[], _T]) -> _T | None:
        """``function()``, or ``None`` when the part is off or fails now."""
        if part in self.off:
            return None
        try:
            return function()
        except Exception as error:
            self.failed(part, error)
            return None

    def failed(self, part: str, error: Exception) -> None:
        if part in self.off:
            return
        self.off.add(part)
        _log.warning(
            "ftcost: %s switched off for this run (%s: %s); training goes on",
            part,
            type(error).__name__,
            error,
            exc_info=error,
        )
        clean_up = self._on_failure.get(part)
        if clean_up is not None:
            try:
                clean_up()
            except Exception:
                _log.debug("ftcost: cleaning up %s failed", part, exc_info=True)
