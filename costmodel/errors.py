"""Errors a user can cause and mend. Each message says what was wrong and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CostModelError(ValueError):
    """Wrong input: the message names the value and the way out. The command line turns it into exit code 2."""


class UnknownNameError(CostModelError):
    """A model, GPU, cloud, optimizer or field that nothing here knows."""

    def __init__(self, kind: str, name: object, known: Iterable[str], way_out: str = "") -> None:
        known = list(known)
        by_lower_name = {option.lower(): option for option in known}
        close = difflib.get_close_matches(str(name).lower(), list(by_lower_name), n=3, cutoff=0.5)
        nearest = [by_lower_name[match] for match in close]
        message = f"no {kind} matches {name!r}"
        if nearest:
            message += f"; nearest: {', '.join(nearest)}"
        elif len(known) <= 20:
            message += f"; known: {', '.join(sorted(known))}"
        if way_out:
            message += f"; {way_out}"
        super().__init__(message)
        self.kind = kind
        self.name = name
        self.nearest = nearest


class AmbiguousNameError(CostModelError):
    """A name that several products carry ("A100" is three): the list is in the message."""

    def __init__(self, kind: str, name: object, candidates: Iterable[str]) -> None:
        self.candidates = list(candidates)
        super().__init__(f"{name!r} names more than one {kind}; choose one of: {', '.join(self.candidates)}")


class UnsupportedModelError(CostModelError):
    """A model family whose layers are not modelled yet: refused by name, never approximated."""


class MissingExtraError(CostModelError):
    """An optional package is not installed; the message says which extra brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}: pip install 'ftcost[{extra}]'")
