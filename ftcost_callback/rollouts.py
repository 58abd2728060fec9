"""Generating and scoring inside a training step (TRL's GRPO and RLOO), told apart from training on it.

The Trainer fires no event for it. TRL does both in one method of the trainer, which is wrapped on that one object while
training lasts; a trainer without the method has no rollouts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from ftcost_callback.wrapped_method import WrappedMethod

METHOD: Final = "_generate_and_score_completions"  # TRL 1.16, grpo_trainer.py and rloo_trainer.py


class RolloutWatch:
    """``on_begin()`` and ``on_end()`` around each rollout of ``trainer``. Neither may raise."""

    def __init__(self, on_begin: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._on_begin = on_begin
        self._on_end = on_end
        self._method: WrappedMethod | None = None

    def attach(self, trainer: Any) -> None:
        self.detach()
        self._method = WrappedMethod(trainer, METHOD, self._measured)

    def _measured(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def measured(*args: Any, **kwargs: Any) -> Any:
            self._on_begin()
            try:
                return method(*args, **kwargs)
            finally:
                self._on_end()

        return measured

    def detach(self) -> None:
        """May be called more than once."""
        method, self._method = self._method, None
        if method is not None:
            method.undo()
