"""Errors a user can cause and mend. Each message says what was wrong and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

SHOWN_CHARACTERS: Final = 80
PATH_CHARACTERS: Final = 300
LINE_CHARACTERS: Final = 2000


def shown(value: object, limit: int = SHOWN_CHARACTERS) -> str:
    """``repr(value)``, cut: a message that echoes a value stays one line that a person can read."""
    if isinstance(value, str):  # before repr, which would copy all of a long text
        value = value[: 2 * limit]
    elif isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a whole number of about {round(value.bit_length() * 0.30103)} digits"
    try:
        text = repr(value)
    except ValueError:  # somewhere inside it, a whole number too long to print
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def short(name: str, limit: int = SHOWN_CHARACTERS) -> str:
    """A name as it is, but cut where it is long and with its control characters escaped."""
    return name if name.isprintable() and len(name) <= limit else shown(name, limit).strip("'\"")


def short_path(path: str) -> str:
    """The same of a path that may be none: a real one stands there whole."""
    return short(path, PATH_CHARACTERS)


def one_line(message: str) -> str:
    """A sentence for a terminal: white space run together, control characters escaped, cut where it is very long."""
    line = "".join(each if each.isprintable() else repr(each)[1:-1] for each in " ".join(message.split()))
    return line if len(line) <= LINE_CHARACTERS else line[: LINE_CHARACTERS - 4] + " ..."


def first_line(error: BaseException) -> str:
    """What another library's error says, in one line; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class CostModelError(ValueError):
    """Wrong input: the message names the value and the way out. The command line turns it into exit code 2."""


class UnknownNameError(CostModelError):
    """A model, GPU, cloud, optimizer or field that nothing here knows."""

    def __init__(
        self, kind: str, name: object, known: Iterable[str], way_out: str = "", nearest: Iterable[str] | None = None
    ) -> None:
        """``nearest``: as found by what knows the names better; by default, by their letters."""
        known = list(known)
        if nearest is None:
            by_lower_name = {option.lower(): option for option in known}
            close = difflib.get_close_matches(str(name)[:SHOWN_CHARACTERS].lower(), list(by_lower_name), n=3, cutoff=0.55)
            nearest = [by_lower_name[match] for match in close]
        nearest = list(nearest)
        message = f"no {kind} matches {shown(name)}"
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

    def __init__(self, kind: str, name: object, candidates: Iterable[str], way_out: str = "") -> None:
        self.candidates = list(candidates)
        listed = ", ".join(self.candidates)
        message = f"{shown(name)} names more than one {kind}; choose one of: {listed}"
        if len(self.candidates) == 1:
            message = f"{shown(name)} names more than one {kind}, of which only {listed} is known here"
        super().__init__(f"{message}; {way_out}" if way_out else message)


class UnsupportedModelError(CostModelError):
    """A model family whose layers are not modelled yet: refused by name, never approximated."""


class MissingExtraError(CostModelError):
    """An optional package is not installed; the message says which extra brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}: pip install 'ftcost[{extra}]'")
