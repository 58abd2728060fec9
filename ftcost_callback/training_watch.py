"""Sees that a Trainer's loop was left by an exception, of which no callback is told.

Looked at when the iterator of its batches dies, which the loop holds; while ``closely`` says so at garbage collections too,
since a notebook keeps the frames of its last exception; and whenever :func:`let_go_of_left_trainings` is called.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

LOOP: Final = "_inner_training_loop"
_BATCHES: Final = "epoch_iterator"  # the loop's local variable

_watches: weakref.WeakSet[TrainingWatch] = weakref.WeakSet()


class TrainingWatch:
    """``gone``: called once, when ``trainer`` no longer trains and :meth:`close` was not called. It must not raise."""

    def __init__(self, trainer: Any, gone: Callable[[], None], *, closely: Callable[[], bool]) -> None:
        self._trainer = weakref.ref(trainer)
        self._gone = weakref.WeakMethod(gone)
        self._closely = weakref.WeakMethod(closely)
        self._thread = threading.get_ident()
        self.is_following = False
        self._is_over = False
        self._at_collection = _AtCollection(self)
        gc.callbacks.append(self._at_collection)
        _watches.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy watches nothing

    def epoch_begins(self) -> None:
        self.is_following = False

    def step_begins(self) -> None:
        """In the loop: its batches are followed, those of each epoch."""
        if self.is_following or self._is_over:
            return
        self.is_following = True
        frame: Any = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name in (LOOP, "_run_epoch") and _BATCHES in frame.f_locals:
                try:
                    weakref.finalize(frame.f_locals[_BATCHES], _look, weakref.ref(self)).atexit = False
                except TypeError:
                    return  # of a kind that cannot be followed
                return
            frame = frame.f_back

    def holds_another(self, trainer: Any) -> bool:
        """Whether ``trainer`` begins inside the training that is watched."""
        return (
            not self._is_over
            and self._thread == threading.get_ident()
            and self._trainer() is not trainer
            and self._is_training()
        )

    def look(self) -> None:
        """Call ``gone`` if training was left."""
        if self._is_over or self._is_training():
            return
        self.close()
        gone = self._gone()
        if gone is not None:
            gone()

    def look_closely(self) -> None:
        closely = self._closely()
        if closely is not None and closely():
            self.look()

    def close(self) -> None:
        """Training has ended, or is no longer measured. May be called more than once."""
        self._is_over = True
        if self._at_collection in gc.callbacks:
            gc.callbacks.remove(self._at_collection)
        _watches.discard(self)

    def _is_training(self) -> bool:
        trainer, stacks = self._trainer(), sys._current_frames()
        if self._thread != threading.get_ident() and self._thread in stacks:
            return True  # that thread will look for itself: a profiler is stopped where it was started
        frame: Any = None
        try:
            while stacks:
                frame = stacks.popitem()[1]
                while frame is not None:
                    if frame.f_code.co_name == LOOP and frame.f_locals.get("self") is trainer is not None:
                        return True
                    frame = frame.f_back
            return False
        finally:
            stacks.clear()  # this very frame is among them, and would keep the loop's alive
            del frame


class _AtCollection:
    """Keeps no watch alive."""

    def __init__(self, watch: TrainingWatch) -> None:
        self._watch = weakref.ref(watch)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        watch = self._watch()
        if watch is None:
            gc.callbacks.remove(self)
        elif phase == "stop" and info["generation"] > 0:
            watch.look_closely()


def _look(watch: weakref.ref[TrainingWatch]) -> None:
    found = watch()
    if found is not None:
        found.look()


def let_go_of_left_trainings() -> None:
    """Of any callback in this process."""
    for watch in list(_watches):
        watch.look()
