"""Titled tables of finished text, and their layout: aligned text, Markdown, or rich on a terminal."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TextIO


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table of finished text. ``columns`` is empty for a list of name and value."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    columns: tuple[str, ...] = ()
    numeric: tuple[int, ...] = ()  # columns to align right


def print_table(table: Table, stream: TextIO) -> None:
    """A rich table on a terminal, aligned text anywhere else."""
    if not wants_colour(stream):
        stream.write(table_as_text(table) + "\n")
        return
    from rich.console import Console

    Console(file=stream, highlight=False).print(table_for_rich(table))


def table_as_text(table: Table) -> str:
    lines = [table.columns, *table.rows] if table.columns else list(table.rows)
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))] if lines else []
    text = [table.title]
    for line in lines:
        cells = [
            cell.rjust(width) if index in table.numeric else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(text)


def list_as_text(title: str, lines: Sequence[str], width: int | None = None) -> str:
    return "\n".join([wrapped(title, width), *(wrapped(f"  - {line}", width, indent="    ") for line in lines)])


def wrapped(text: str, width: int | None, indent: str = "") -> str:
    """Broken between words; a word that is longer than the line (a path, a list of modules) stays whole."""
    if width is None or len(text) <= width:
        return text
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def terminal_columns(stream: TextIO) -> int | None:
    """The width of the terminal, or what COLUMNS says; ``None`` for a file or pipe, whose lines nobody breaks."""
    if not (stream.isatty() or os.environ.get("COLUMNS")):
        return None
    return max(_MIN_COLUMNS, shutil.get_terminal_size().columns)


_MIN_COLUMNS: Final = 20


def table_as_markdown(table: Table) -> str:
    num_columns = len(table.columns or table.rows[0])
    columns = table.columns or ("",) * num_columns
    rule = ["---:" if index in table.numeric else "---" for index in range(num_columns)]
    lines = [f"**{escaped(table.title)}**", ""]
    lines += ["| " + " | ".join(map(escaped, line)) + " |" for line in (columns, rule, *table.rows)]
    return "\n".join(lines)


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def table_for_rich(table: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(
        title=Text(table.title), title_justify="left", box=box.SIMPLE_HEAD, show_header=bool(table.columns), padding=0
    )
    for index in range(len(table.columns or table.rows[0])):
        header = table.columns[index] if table.columns else ""
        shown.add_column(header, justify="right" if index in table.numeric else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown


def wants_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
