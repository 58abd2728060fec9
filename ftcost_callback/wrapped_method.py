"""A method of one object, wrapped while training lasts, where the Trainer has no event for what is to be seen."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Final

_ABSENT: Final = object()


class WrappedMethod:
    """``owner.name`` is ``wrap`` of what it was, until :meth:`undo`. Nothing, where ``owner`` has no such method."""

    def __init__(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner: Any = None
        self._name = name
        method = getattr(owner, name, None)
        if callable(method):
            self._owner = owner
            self._former = vars(owner).get(name, _ABSENT)  # what the user himself has put on the object
            self._stand_in = _StandIn(method, wrap(method))
            setattr(owner, name, self._stand_in)

    def undo(self) -> None:
        """The object is as it was, unless somebody else has wrapped the method since. May be called more than once."""
        owner, self._owner = self._owner, None
        if owner is not None and vars(owner).get(self._name) is self._stand_in:
            if self._former is _ABSENT:
                delattr(owner, self._name)
            else:
                setattr(owner, self._name, self._former)
        self._former = None


class _StandIn:
    """Stands in the method's place on the one object. In a copy of the object, and in a pickle, the method itself does: that
    of the copy, or what the user had put there."""

    def __init__(self, method: Callable[..., Any], wrapped: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self._method = method
        self._wrapped = wrapped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._method, memo)  # a bound method's copy is bound to the copy of its object

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_it_is, (self._method,)


def _as_it_is(method: Callable[..., Any]) -> Callable[..., Any]:
    return method
