# ruff: noqa: RUF001 - dashes between numbers and the multiplication sign are meant
"""The pieces that the page is made of: sections, tables, legends, the places of charts, all as HTML.

Titles, explanations, contents and cells are HTML already: whoever takes a name from a record escapes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Final

from ftcost_callback.report_figures import Figure, LegendEntry
from ftcost_callback.report_run import ReportedRun
from ftcost_callback.report_series import finite


def section_html(title: str, explanation: str, content: str) -> str:
    sub = f'<p class="sub">{explanation}</p>' if explanation else ""
    return f"<section><h2>{title}</h2>{sub}{content}</section>"


def absent_html(reason: str) -> str:
    return f'<p class="absent">{escape(reason)}</p>'


def table_html(head: Sequence[str], rows: Iterable[Sequence[str]], *, total: Sequence[str] | None = None) -> str:
    """``head`` and cells are HTML. The first column is a heading, the others hold numbers."""
    heads = "".join(f'<th scope="col"{" class=number" if index else ""}>{cell}</th>' for index, cell in enumerate(head))

    def row_html(row: Sequence[str], kind: str = "") -> str:
        cells = "".join(f'<td class="number">{cell}</td>' for cell in row[1:])
        return f'<tr{kind}><th scope="row">{row[0]}</th>{cells}</tr>'

    body = "".join(row_html(row) for row in rows) + (row_html(total, ' class="total"') if total else "")
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def swatch_html(part: int) -> str:
    return f'<span class="swatch part-{part}"></span>'


_LEGEND_MARKS: Final = {
    "line": '<path d="M1 6h20" stroke="var({0})" stroke-width="2.5"/>',
    "dash": '<path d="M1 6h20" stroke="var({0})" stroke-width="2" stroke-dasharray="5 3"/>',
    "dot": '<path d="M1 6h20" stroke="var({0})" stroke-width="2" stroke-dasharray="2 3"/>',
    "band": '<rect x="1" y="1" width="20" height="10" fill="var({0})"/>',
    "points": '<g fill="var({0})"><circle cx="4" cy="8" r="2"/><circle cx="11" cy="4" r="2"/>'
    '<circle cx="18" cy="7" r="2"/></g>',
}


def legend_html(entries: Sequence[LegendEntry]) -> str:
    """Each entry: mark, colour variable, text (HTML)."""
    items = "".join(
        f'<span><svg width="22" height="12" aria-hidden="true">{_LEGEND_MARKS[mark].format(colour)}</svg>{text}</span>'
        for mark, colour, text in entries
    )
    return f'<div class="legend">{items}</div>'


def chart_html(
    run: ReportedRun, name: str, figure: Figure, figures: dict[str, Figure], label: str, *, low: bool = False
) -> str:
    """The place of a chart, which the page's script draws from ``figures``."""
    chart_id = f"{run.id}-{name}"
    figures[chart_id] = figure
    kind = "chart low" if low else "chart"
    height = f' style="height:{figure["height"]}px"' if "height" in figure else ""
    return (
        f'<div class="{kind}" id="{chart_id}" role="img" aria-label="{escape(label)}"{height}>'
        "<noscript>The charts need JavaScript; the numbers on this page do not.</noscript></div>"
    )


def range_text(low: object, high: object, text: Callable[[float], str]) -> str:
    a, b = finite(low), finite(high)
    return f"{text(a)} – {text(b)}" if a is not None and b is not None else ""


def range_html(span: str) -> str:
    return f'<span class="range">{escape(span)}</span>' if span else ""


def short_path(path: Path) -> str:
    return "/".join(path.parts[-3:]) if len(path.parts) > 3 else str(path)
