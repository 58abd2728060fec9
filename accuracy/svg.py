"""A small chart writer: points and lines on linear or logarithmic axes, as SVG text. No package needed."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

COLOURS = ("#1f5fa8", "#c05a12", "#2d7d46", "#8a3f94", "#00757a", "#5b6472", "#7a6a00", "#b0304a", "#404040")
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 190, 30, 48
_FONT = 'font-family="sans-serif" font-size="12"'


@dataclass(frozen=True)
class Mark:
    """One series: points, or a line through them."""

    label: str
    points: Sequence[tuple[float, float]]
    is_line: bool = False
    dash: str = ""
    colour: str | None = None


def _ticks(low: float, high: float, is_log: bool) -> list[float]:
    if is_log:
        steps = [factor * 10.0**power for power in range(-4, 5) for factor in (1, 2, 5)]
        return [step for step in steps if low <= step <= high]
    span = high - low
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
    first = math.ceil(low / step)
    return [index * step for index in range(first, math.floor(high / step) + 1)]


def chart(
    title: str,
    x_label: str,
    y_label: str,
    marks: Sequence[Mark],
    *,
    is_log: bool = False,
    width: int = 760,
    height: int = 460,
    diagonal_bands: Sequence[float] = (),
) -> str:
    """The picture. ``diagonal_bands``: y = x and, dotted, y = x times and over each factor."""
    xs = [x for mark in marks for x, _ in mark.points]
    ys = [y for mark in marks for _, y in mark.points]
    if diagonal_bands:
        xs = ys = xs + ys
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)
    if is_log:
        low_x, high_x, low_y, high_y = low_x / 1.2, high_x * 1.2, low_y / 1.2, high_y * 1.2
    else:
        low_x, low_y, high_x, high_y = min(0.0, low_x), min(0.0, low_y), high_x * 1.04, high_y * 1.08

    def place(value: float, low: float, high: float, start: float, end: float) -> float:
        if is_log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return start + (value - low) / (high - low) * (end - start)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            place(x, low_x, high_x, _LEFT, width - _RIGHT),
            place(y, low_y, high_y, height - _BOTTOM, _TOP),
        )

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="18" {_FONT} font-weight="bold" fill="#222">{html.escape(title)}</text>',
    ]
    for tick in _ticks(low_x, high_x, is_log):
        x, _ = at(tick, low_y)
        out.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{height - _BOTTOM}" stroke="#e3e3e3"/>')
        out.append(f'<text x="{x:.1f}" y="{height - _BOTTOM + 16}" {_FONT} text-anchor="middle" fill="#444">{tick:g}</text>')
    for tick in _ticks(low_y, high_y, is_log):
        _, y = at(low_x, tick)
        out.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{width - _RIGHT}" y2="{y:.1f}" stroke="#e3e3e3"/>')
        out.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" {_FONT} text-anchor="end" fill="#444">{tick:g}</text>')
    middle_x, middle_y = (_LEFT + width - _RIGHT) / 2, (_TOP + height - _BOTTOM) / 2
    out.append(
        f'<text x="{middle_x}" y="{height - 10}" {_FONT} text-anchor="middle" fill="#222">{html.escape(x_label)}</text>'
    )
    out.append(
        f'<text x="16" y="{middle_y}" {_FONT} text-anchor="middle" fill="#222" '
        f'transform="rotate(-90 16 {middle_y})">{html.escape(y_label)}</text>'
    )
    out.append(
        f'<clipPath id="frame"><rect x="{_LEFT}" y="{_TOP}" width="{width - _RIGHT - _LEFT}" '
        f'height="{height - _BOTTOM - _TOP}"/></clipPath><g clip-path="url(#frame)">'
    )
    if diagonal_bands:
        for factor in (1.0, *diagonal_bands, *(1 / band for band in diagonal_bands)):
            (x1, y1), (x2, y2) = at(low_x, low_x * factor), at(high_x, high_x * factor)
            dash = "" if factor == 1.0 else ' stroke-dasharray="3 4"'
            out.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#888"{dash}/>')
    legend = []
    for index, mark in enumerate(marks):
        colour = mark.colour or COLOURS[index % len(COLOURS)]
        placed = [at(x, y) for x, y in mark.points]
        y = _TOP + 8 + 18 * index
        if mark.is_line:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            dash = f' stroke-dasharray="{mark.dash}"' if mark.dash else ""
            out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
            legend.append(
                f'<line x1="{width - _RIGHT + 8}" y1="{y}" x2="{width - _RIGHT + 26}" y2="{y}" stroke="{colour}" '
                f'stroke-width="2"{dash}/>'
            )
        else:
            out += [f'<circle cx="{x:.1f}" cy="{cy:.1f}" r="3.4" fill="{colour}" fill-opacity="0.65"/>' for x, cy in placed]
            legend.append(f'<circle cx="{width - _RIGHT + 17}" cy="{y}" r="3.4" fill="{colour}"/>')
        legend.append(f'<text x="{width - _RIGHT + 32}" y="{y + 4}" {_FONT} fill="#222">{html.escape(mark.label)}</text>')
    return "\n".join([*out, "</g>", *legend, "</svg>"]) + "\n"
