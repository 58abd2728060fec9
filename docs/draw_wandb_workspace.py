"""Draws what ``ftcost wandb-workspace`` saves, from the rows that an offline run holds for W&B.

    python docs/draw_wandb_workspace.py demo_output/wandb/latest-run docs/images/wandb_workspace.svg

Sections, panels, titles, keys and axes are those of ``build_workspace``; the rows are read by W&B's own client. The drawing
is ours and says so: W&B's site looks different. Needs the extras wandb and workspace.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from ftcost_callback.wandb_workspace import build_workspace

COLUMNS: Final = 3  # of a section, as W&B lays them out
WIDTH, HEIGHT, GAP, HEAD = 320, 200, 12, 36
COLOURS: Final = ("#2a6fbb", "#d1603d", "#e3a857", "#8f5fa8", "#4c9a6a")


def history(run: Path) -> list[dict[str, Any]]:
    command = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", run.resolve()]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    records = (json.loads(line) for line in said.splitlines() if line.startswith("{"))
    return [record["history"]["item"] for record in records if record.get("type") == "history"]


def text(x: float, y: float, content: str, size: int = 11, colour: str = "#666", anchor: str = "start") -> str:
    """``content`` is SVG. The darkest colour is bold."""
    weight = 600 if colour == "#222" else 400
    style = f'font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{content}</text>'


def panel(x: float, y: float, plot: Any, rows: Sequence[dict[str, Any]]) -> str:
    """One line plot at (x, y), ``WIDTH`` by ``HEIGHT``."""
    curves = {key: [(row[plot.x], row[key]) for row in rows if plot.x in row and key in row] for key in plot.y}
    curves = {key: points for key, points in curves.items() if points}
    parts = [
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#fff" stroke="#ddd"/>',
        text(x + 12, y + 20, escape(plot.title), 12, "#222"),
    ]
    if not curves:
        parts += [text(x + WIDTH / 2, y + HEIGHT / 2, "no data in this run", anchor="middle")]
        parts += [text(x + WIDTH / 2, y + HEIGHT / 2 + 18, escape(plot.y[0]), 10, "#999", "middle")]
        return "".join(parts)
    place = y + 34
    for key, colour in zip(plot.y, COLOURS, strict=False):
        if key in curves:
            parts += [f'<rect x="{x + 12}" y="{place - 4}" width="12" height="3" fill="{colour}"/>']
            parts += [text(x + 29, place, escape(key.removeprefix("ftcost/")), 10)]
            place += 13
    left, right, top, bottom = x + 52, x + WIDTH - 14, place + 4, y + HEIGHT - 34
    at_least, at_most = plot.range_y or (None, None)
    values = [value for points in curves.values() for _, value in points]
    low, high = min(values), max(values)
    margin = 0.06 * (high - low or abs(high) or 1.0)
    low, high = (low - margin if at_least is None else at_least), (high + margin if at_most is None else at_most)
    steps = [step for points in curves.values() for step, _ in points]
    first, last = min(steps), max(steps)
    for share in (0.0, 0.5, 1.0):
        across, level = left + share * (right - left), bottom - share * (bottom - top)
        parts += [
            f'<path d="M{left} {level:.1f}H{right}" stroke="#eee"/>',
            text(left - 6, level + 3, f"{low + share * (high - low):.3g}", 10, "#888", "end"),
            text(across, bottom + 13, f"{first + share * (last - first):.3g}", 10, "#888", "middle"),
        ]
    axes = escape(f"{plot.title_x}; y: {plot.title_y}")
    parts += [text((left + right) / 2, y + HEIGHT - 8, axes, 10, "#888", "middle")]
    for key, colour in zip(plot.y, COLOURS, strict=False):
        path = "L".join(
            f"{left + (step - first) / (last - first or 1) * (right - left):.1f} "
            f"{bottom - (value - low) / (high - low) * (bottom - top):.1f}"
            for step, value in curves.get(key, [])
        )
        if path:
            parts += [f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>']
    return "".join(parts)


def drawing(rows: Sequence[dict[str, Any]], caption: str) -> str:
    parts, y = [], 58
    width = COLUMNS * (WIDTH + GAP) + GAP
    for section in build_workspace("entity", "project").sections:
        parts += [text(GAP, y + 24, escape(f"{section.name}  ({len(section.panels)})"), 15, "#222")]
        y += HEAD
        if not any(key in row for plot in section.panels for key in plot.y for row in rows):
            titles = "; ".join(plot.title for plot in section.panels)
            parts += [text(GAP, y + 8, escape(f"no data in this run: {titles}"))]
            y += HEAD
            continue
        for index, plot in enumerate(section.panels):
            row, column = divmod(index, COLUMNS)
            parts += [panel(GAP + column * (WIDTH + GAP), y + row * (HEIGHT + GAP), plot, rows)]
        y += math.ceil(len(section.panels) / COLUMNS) * (HEIGHT + GAP) + 6
    said = "Drawn by ftcost from a real run's record in the layout of its W&amp;B workspace; not a screenshot of wandb.ai"
    head = text(GAP, 26, said, 14, "#a33")
    head += text(GAP, 45, escape(caption), 12)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" font-family="Helvetica, Arial, sans-serif">'
        f'<rect width="{width}" height="{y}" fill="#f6f6f6"/>{head}{"".join(parts)}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="an offline run's folder, or its .wandb file")
    parser.add_argument("svg", type=Path)
    parser.add_argument("--caption", default="", help="what the run was")
    given = parser.parse_args()
    given.svg.write_text(drawing(history(given.run), given.caption), encoding="utf-8")


if __name__ == "__main__":
    main()
