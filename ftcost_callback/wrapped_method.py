"""A method of one object, wrapped while training lasts, where the Trainer has no event for what is to be seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class WrappedMethod:
    """``owner.name`` is ``wrap`` of what it was, until :meth:`undo`. Nothing, where ``owner`` has no such method."""

    def __init__(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner: Any = None
        self._name = name
        method = getattr(owner, name, None)
        if callable(method):
            self._owner, self._wrapped = owner, wrap(method)
            setattr(owner, name, self._wrapped)

    def undo(self) -> None:
        """The object is as it was, unless somebody else has wrapped the method since. May be called more than once."""
        owner, self._owner = self._owner, None
        if owner is not None and vars(owner).get(self._name) is self._wrapped:
            delattr(owner, self._name)
