"""What a trainer does inside a training step that is no training, told apart from it: rollouts and evaluations.

Generating and scoring (TRL's GRPO and RLOO): the Trainer fires no event for it. TRL does both in one method of the trainer,
which is wrapped on that one object while training lasts; a trainer without the method has no rollouts. Evaluations and
predictions: their event comes at the end alone, and another callback, or a loss, may call them in the middle of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from ftcost_callback.wrapped_method import WrappedMethod

EVALUATIONS: Final = ("evaluate", "predict")
METHOD: Final = "_generate_and_score_completions"  # TRL 1.16, grpo_trainer.py and rloo_trainer.py


class MethodWatch:
    """``on_begin()`` and ``on_end()`` around each call of one of a trainer's ``methods``. Neither may raise."""

    def __init__(
        self, on_begin: Callable[[], None], on_end: Callable[[], None], methods: tuple[str, ...] = (METHOD,)
    ) -> None:
        self._names = methods
        self._on_begin = on_begin
        self._on_end = on_end
        self._methods: list[WrappedMethod] = []

    def attach(self, trainer: Any) -> None:
        self.detach()
        self._methods = [WrappedMethod(trainer, name, self._measured) for name in self._names]

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
        methods, self._methods = self._methods, []
        for method in methods:
            method.undo()
