"""Pictures of an answer and of a comparison: SVG text from pure functions, without a drawing package.

Light and dark by the viewer's own setting (a media query in the style sheet). A page is the same picture in HTML; PNG needs
resvg-py (extra ``plots``), a wheel without system libraries, and is always the light one. Widths of text are estimated,
generously, from its characters.
"""

from __future__ import annotations

import html
import importlib
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from costmodel.errors import CostModelError, MissingExtraError
from costmodel.formats import format_gib, format_seconds, format_usd
from costmodel.report import MEMORY_TERMS, as_answer, gpu_name, headline
from costmodel.units import GIB, SECONDS_PER_HOUR

if TYPE_CHECKING:
    from costmodel.answer import Estimate
    from costmodel.candidates import Candidate

WIDTH: Final = 760
_MARGIN: Final = 24
_FONT: Final = 13
_LINE: Final = 20
_NUM_TICKS: Final = 6
_BOLD: Final = 1.12  # how much wider a bold word is

# Distinct in hue and in lightness, each at least 3:1 on its background; the second of a pair is for the dark one.
_SERIES: Final = (
    ("#1f5fa8", "#6ea8e8"),
    ("#c05a12", "#f0a060"),
    ("#2d7d46", "#6cc48a"),
    ("#8a3f94", "#cf8fd8"),
    ("#00757a", "#5cc5c9"),
    ("#5b6472", "#a9b3c1"),
    ("#7a6a00", "#d8c552"),
    ("#8c4a2f", "#d9a38c"),
)  # no red: that is the limit's
_LIGHT: Final = {"paper": "#ffffff", "ink": "#1a1c20", "muted": "#545a66", "rule": "#d5d9e0", "alarm": "#b00020"}
_DARK: Final = {"paper": "#15171b", "ink": "#eceef2", "muted": "#a9b0bd", "rule": "#3a3f49", "alarm": "#ff8a9a"}


def _style() -> str:
    def rules(tones: Mapping[str, str], shade: int) -> str:
        text = (
            f".paper{{fill:{tones['paper']}}}.ink{{fill:{tones['ink']}}}.muted{{fill:{tones['muted']}}}"
            f".alarm{{fill:{tones['alarm']}}}.rule{{stroke:{tones['rule']}}}.line{{stroke:{tones['ink']}}}"
            f".limit{{stroke:{tones['alarm']}}}.halo{{stroke:{tones['paper']}}}"
            f".idle{{fill:{tones['rule']}}}.hollow{{fill:{tones['paper']};stroke:{_SERIES[0][shade]}}}"
        )
        return text + "".join(f".s{index}{{fill:{pair[shade]}}}" for index, pair in enumerate(_SERIES))

    base = (
        f"text{{font-family:system-ui,'Segoe UI',Helvetica,Arial,sans-serif;font-size:{_FONT}px}}.title{{font-weight:600}}"
    )
    return f"<style>{base}{rules(_LIGHT, 0)}@media (prefers-color-scheme:dark){{{rules(_DARK, 1)}}}</style>"


def text_width(text: str) -> float:
    """Pixels that ``text`` takes in a common sans-serif font, rather too many than too few."""
    return _FONT * sum(
        0.34 if character in "iljtfrI.,:;'|() " else 0.86 if character in "MWmw@%" else 0.62 for character in text
    )


def shortened(text: str, width: float) -> str:
    """``text``, cut with an ellipsis where it is wider than ``width`` pixels."""
    if text_width(text) <= width:
        return text
    while text and text_width(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"


def _text(x: float, y: float, text: str, kind: str = "ink", anchor: str = "start") -> str:
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{where}>{html.escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, kind: str, tooltip: str = "") -> str:
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" class="{kind}"'
    return f"{shape}><title>{html.escape(tooltip)}</title></rect>" if tooltip else f"{shape}/>"


def _line(x1: float, y1: float, x2: float, y2: float, kind: str = "rule", width: float = 1) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" class="{kind}" stroke-width="{width:g}" fill="none"/>'


def _document(height: float, description: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" '
        f'role="img"><title>{html.escape(description)}</title>{_style()}'
        f'<rect width="{WIDTH}" height="{height:.0f}" class="paper"/>{"".join(parts)}</svg>\n'
    )


def nice_ticks(upper: float) -> list[float]:
    """About :data:`_NUM_TICKS` round values from 0 up to ``upper``: multiples of 1, 2 or 5 times a power of ten."""
    if not upper > 0:
        return [0.0]
    step = 10 ** math.floor(math.log10(upper / _NUM_TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if upper / (step * factor) <= _NUM_TICKS)
    return [step * index for index in range(math.floor(upper / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten inside ``low``..``high``; only powers of ten over more than three decades."""
    factors = (1, 2, 5) if high / low <= 1000 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [factor * 10.0**decade for decade in decades for factor in factors if low <= factor * 10.0**decade <= high]


# --- one estimate -----------------------------------------------------------------------------------------------------


def estimate_svg(estimate: Estimate | Mapping[str, Any]) -> str:
    """Memory at the peak by category and of each phase, against the card, and one step by group."""
    answer = as_answer(estimate)
    title = headline(answer)
    parts = [_text(_MARGIN, 34, shortened(title, WIDTH - 2 * _MARGIN), "ink title")]
    memory, y = _memory_panel(answer, 66)
    time, y = _time_panel(answer, y + 20)
    return _document(y + 12, title, [*parts, *memory, *time])


def _memory_panel(answer: Mapping[str, Any], top: float) -> tuple[list[str], float]:
    memory = answer["memory"]
    peak, capacity = memory["peak_device_bytes"], memory.get("capacity_bytes")
    low, high = memory.get("peak_device_bytes_low") or peak, memory.get("peak_device_bytes_high") or peak
    phase = f" (in {memory['peak_phase']})" if memory.get("peak_phase") else ""
    parts = [_text(_MARGIN, top, f"Memory at the peak{phase}: {format_gib(peak)}", "ink title")]
    left, right = _MARGIN, WIDTH - _MARGIN
    upper = max(high, capacity or 0) * 1.04
    scale = (right - left) / upper

    terms = [(label, memory[name], f"s{index}") for index, (name, label) in enumerate(MEMORY_TERMS) if memory.get(name)]
    rest = peak - sum(size for _, size, _ in terms)
    if rest > 0.001 * peak:  # what torch reserves beyond what it hands out
        terms.append(("reserved, not in use", rest, "idle"))
    y = top + 46
    for tick in nice_ticks(upper / GIB):
        x = left + tick * GIB * scale
        parts.append(_line(x, y - 6, x, y + 38))
        anchor = "start" if x < left + 10 else "end" if x > right - 20 else "middle"
        parts.append(_text(x, y + 54, f"{tick:g}" + (" GiB" if not tick else ""), "muted", anchor))
    x = float(left)
    for label, size, kind in terms:
        parts.append(_rect(x, y, size * scale, 26, kind, f"{label}: {format_gib(size)}"))
        x += size * scale
    if high > low:
        parts.append(_line(left + low * scale, y + 32, left + high * scale, y + 32, "line", 2))
        parts += [_line(left + end * scale, y + 28, left + end * scale, y + 36, "line", 2) for end in (low, high)]
    if capacity:
        at = left + capacity * scale
        parts.append(_line(at, y - 10, at, y + 40, "halo", 7))  # sets it off from the bar it may cross
        parts.append(_line(at, y - 10, at, y + 40, "limit", 3))
        label = f"{gpu_name(answer)}: {format_gib(capacity)}"
        fits_right = at + 4 + text_width(label) < right
        parts.append(_text(at + 4 if fits_right else at, y - 14, label, "alarm", "start" if fits_right else "end"))
    y += 72
    if high > low:
        parts.append(_text(left, y, f"bracket: {format_gib(low)} to {format_gib(high)}, 80 % of runs", "muted"))
        y += _LINE + 6
    column = (WIDTH - 2 * _MARGIN) / 2
    for place, (label, size, kind) in enumerate(sorted(terms, key=lambda term: -term[1])):
        cx, cy = left + place % 2 * column, y + place // 2 * _LINE
        parts.append(_rect(cx, cy - 10, 11, 11, kind))
        parts.append(_text(cx + 17, cy, shortened(label, column - 120)))
        parts.append(_text(cx + column - 30, cy, format_gib(size), "muted", "end"))
    y += (len(terms) + 1) // 2 * _LINE
    by_phase = memory.get("device_bytes_by_phase") or {}
    if (loading := memory.get("load_device_bytes")) is not None:
        by_phase = {"load": loading, **by_phase}
    return (parts, y) if len(by_phase) < 2 else _phases(parts, by_phase, capacity, y + 14)


def _phases(parts: list[str], by_phase: Mapping[str, int], capacity: int | None, top: float) -> tuple[list[str], float]:
    """A bar for the worst moment of each phase of a step, against the card."""
    parts.append(_text(_MARGIN, top, "At the worst moment of each phase", "ink title"))
    left = _MARGIN + max(map(text_width, by_phase)) + 10
    scale = (WIDTH - _MARGIN - 90 - left) / max(*by_phase.values(), capacity or 0)
    y = top + 12
    for phase, size in by_phase.items():
        parts.append(_text(left - 10, y + 14, phase, "ink", "end"))
        parts.append(_rect(left, y + 2, size * scale, 15, "s0", f"{phase}: {format_gib(size)}"))
        parts.append(_text(WIDTH - _MARGIN, y + 14, format_gib(size), "muted", "end"))
        y += 22
    if capacity:
        at = left + capacity * scale
        parts.append(_line(at, top + 10, at, y, "halo", 7))
        parts.append(_line(at, top + 10, at, y, "limit", 3))
    return parts, y + 8


def _time_panel(answer: Mapping[str, Any], top: float) -> tuple[list[str], float]:
    seconds, step = answer.get("step_seconds"), answer.get("step") or {}
    groups = {name: value for name, value in (step.get("by_group_seconds") or {}).items() if value}
    if not seconds or not groups:
        return [_text(_MARGIN, top, "Time of a step: unknown (give the GPU and the lengths)", "muted")], top + _LINE
    bound = f", bound by {str(step['bound_by']).replace('_', ' ')}" if step.get("bound_by") else ""
    parts = [_text(_MARGIN, top, f"One step: {format_seconds(seconds)}{bound}", "ink title")]
    shown = sorted(groups.items(), key=lambda item: -item[1])
    small = [item for item in shown if item[1] < 0.005 * seconds]
    if len(small) > 1:
        shown = [item for item in shown if item not in small] + [("all else", sum(value for _, value in small))]
    labels = [name.replace("_", " ") for name, _ in shown]
    left = _MARGIN + max(map(text_width, labels)) + 10
    scale = (WIDTH - _MARGIN - 130 - left) / shown[0][1]
    y = top + 12
    for label, (_, value) in zip(labels, shown, strict=True):
        parts.append(_text(left - 10, y + 14, label, "ink", "end"))
        parts.append(_rect(left, y + 2, max(value * scale, 1), 15, "s0", f"{label}: {format_seconds(value)}"))
        share = f"{format_seconds(value)}, {100 * value / seconds:.1f} %"
        parts.append(_text(left + value * scale + 6, y + 14, share, "muted"))
        y += 22
    return parts, y


# --- a comparison -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Box:
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: _Box) -> bool:
        return self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom

    def inside(self, other: _Box) -> bool:
        return (
            self.left >= other.left and self.right <= other.right and self.top >= other.top and self.bottom <= other.bottom
        )


@dataclass(frozen=True, slots=True)
class _Point:
    x: float
    y: float
    label: str
    tooltip: str
    on_front: bool
    is_shared: bool  # rented as a machine of more GPUs than the job uses


def comparison_svg(candidates: Sequence[Candidate]) -> str:
    """Dollars against hours of every candidate that fits, both logarithmic; the Pareto front as a line.

    Raises :class:`CostModelError` where no candidate has both totals.
    """
    known = [each for each in candidates if each.fits and each.total_usd and each.total_seconds]
    if not known:
        raise CostModelError(
            "nothing to draw: no candidate that fits has a total in hours and dollars; give the lengths and num_samples"
        )
    hours = [(each.total_seconds or 0.0) / SECONDS_PER_HOUR for each in known]
    dollars = [each.total_usd or 0.0 for each in known]
    height = 520
    frame = _Box(78, 76, WIDTH - _MARGIN, height - 62)
    x_of, x_ticks = _log_axis(hours, frame.left, frame.right)
    y_of, y_ticks = _log_axis(dollars, frame.bottom, frame.top)
    title = "Dollars against hours, same job"
    parts = [
        _text(_MARGIN, 34, title, "ink title"),
        _text(
            _MARGIN,
            54,
            "orange, joined: nothing is both cheaper and faster; hollow: more GPUs are billed than used",
            "muted",
        ),
    ]
    for tick in x_ticks:
        parts.append(_line(x_of(tick), frame.top, x_of(tick), frame.bottom))
        parts.append(_text(x_of(tick), frame.bottom + 18, f"{tick:g}", "muted", "middle"))
    for tick in y_ticks:
        parts.append(_line(frame.left, y_of(tick), frame.right, y_of(tick)))
        parts.append(_text(frame.left - 8, y_of(tick) + 4, f"${tick:g}", "muted", "end"))
    middle = (frame.left + frame.right) / 2
    parts.append(_text(middle, frame.bottom + 40, "hours (both axes are logarithmic)", "muted", "middle"))

    points = []
    for each, hour, usd in sorted(
        zip(known, hours, dollars, strict=True), key=lambda item: (not item[0].on_pareto_front, item[2])
    ):
        where = f"{each.price.cloud} {each.price.tier}".strip() if each.price else "no price"
        shared = each.price is not None and each.price.gpus_per_instance > each.num_gpus
        tooltip = f"{each.gpu}, {where}: {format_usd(usd)}, {format_seconds(hour * SECONDS_PER_HOUR)}"
        points.append(_Point(x_of(hour), y_of(usd), each.gpu, tooltip, each.on_pareto_front, shared))
    front = sorted((point.x, point.y) for point in points if point.on_front)
    walls = []
    for (x1, y1), (x2, y2) in itertools.pairwise(front):  # along, then down
        walls += [_Box(x1, y1 - 1, x2, y1 + 1), _Box(x2 - 1, min(y1, y2), x2 + 1, max(y1, y2))]
    if len(front) > 1:
        steps = "".join(f"H{x:.1f}V{y:.1f}" for x, y in front[1:])
        parts.append(f'<path d="M{front[0][0]:.1f} {front[0][1]:.1f}{steps}" class="line" stroke-width="1.5" fill="none"/>')
    for point in sorted(points, key=lambda point: point.on_front):
        radius, kind = (5.5, "s1") if point.on_front else (3.5, "hollow" if point.is_shared else "s0")
        parts.append(
            f'<circle cx="{point.x:.1f}" cy="{point.y:.1f}" r="{radius}" class="{kind}">'
            f"<title>{html.escape(point.tooltip)}</title></circle>"
        )
    parts += _labels(points, walls, frame)
    return _document(height, title, parts)


def _log_axis(values: Sequence[float], start: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    """The place of a value between ``start`` and ``end`` pixels, with some air around the data, and the ticks."""
    low, high = min(values) / 1.25, max(values) * 1.25

    def place(value: float) -> float:
        return start + (end - start) * math.log(value / low) / math.log(high / low)

    return place, log_ticks(low, high)


def _labels(points: Sequence[_Point], walls: Sequence[_Box], frame: _Box) -> Iterator[str]:
    """Names beside their points where no name, point or line is in the way; those on the front choose first.

    A name on the front may, if there is no other place, cover a point that is not. Off the front a name stands once, at the
    first of its points (cheapest first) that has room.
    """
    dots = [_Box(point.x - 4, point.y - 4, point.x + 4, point.y + 4) for point in points]
    taken: list[_Box] = []
    named: set[str] = set()
    for index, point in enumerate(points):
        if point.label in named and not point.on_front:
            continue
        width = text_width(point.label) * (_BOLD if point.on_front else 1.0)
        places = [
            (point.x + 9, point.y + 4, "start"),
            (point.x - 9, point.y + 4, "end"),
            (point.x + 7, point.y - 8, "start"),
            (point.x + 7, point.y + 17, "start"),
            (point.x - 7, point.y - 8, "end"),
            (point.x - 7, point.y + 17, "end"),
        ]
        if point.on_front:  # always named: further away, if need be
            places += [(point.x, point.y + away, "middle") for away in (-14, 22, -30, 38, -46, 54)]
        others = [dot for number, dot in enumerate(dots) if number != index]
        for obstacles in ((*taken, *walls, *others), (*taken, *walls)) if point.on_front else ((*taken, *walls, *others),):
            place = _free_place(places, width, obstacles, frame)
            if place is not None:
                x, y, anchor, box = place
                taken.append(box)
                named.add(point.label)
                yield _text(x, y, point.label, "ink title" if point.on_front else "muted", anchor)
                break


def _free_place(
    places: Sequence[tuple[float, float, str]], width: float, obstacles: Sequence[_Box], frame: _Box
) -> tuple[float, float, str, _Box] | None:
    """The first place where a text so wide stays inside the frame and touches nothing."""
    for x, y, anchor in places:
        left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
        box = _Box(left - 4, y - 11, left + width + 4, y + 4)
        if box.inside(frame) and not any(box.overlaps(obstacle) for obstacle in obstacles):
            return x, y, anchor, box
    return None


# --- files ------------------------------------------------------------------------------------------------------------


def as_page(svg: str, title: str) -> str:
    """The picture in a self-contained HTML page."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        "<style>body{margin:0;background:#fff}svg{display:block;max-width:100%;height:auto;margin:auto}"
        "@media (prefers-color-scheme:dark){body{background:#15171b}}</style></head>"
        f"<body>{svg}</body></html>\n"
    )


def write_picture(path: str, svg: str, *, title: str) -> None:
    """``svg`` as the kind of file that ``path`` ends in: ``.svg``, ``.html`` or ``.png``.

    Raises :class:`CostModelError` for another ending, a file that cannot be written, or a PNG on a machine without any font,
    :class:`MissingExtraError` for PNG without resvg-py.
    """
    kind = os.path.splitext(path)[1].lower()
    if kind == ".svg":
        content = svg.encode()
    elif kind in (".html", ".htm"):
        content = as_page(svg, title).encode()
    elif kind == ".png":
        content = _png(svg)
    else:
        raise CostModelError(f"cannot draw {path}: a picture ends in .svg, .html or .png")
    folder = os.path.dirname(path)
    if folder and not os.path.isdir(folder):
        raise CostModelError(f"cannot write {path}: there is no folder {folder}; make it first")
    try:
        with open(path, "wb") as file:
            file.write(content)
    except OSError as error:
        raise CostModelError(f"cannot write {path}: {error.strerror or error}") from None


def _png(svg: str) -> bytes:
    try:
        resvg: Any = importlib.import_module("resvg_py")
    except ImportError:
        raise MissingExtraError("resvg-py", "plots", "a .png (.svg and .html need nothing)") from None
    picture = bytes(resvg.svg_to_bytes(svg_string=svg, width=2 * WIDTH))
    # Without a font it draws no text, and says nothing: then the picture is the same with the text taken out.
    if "<text" in svg and picture == bytes(resvg.svg_to_bytes(svg_string=_TEXT.sub("", svg), width=2 * WIDTH)):
        raise CostModelError(
            "a .png needs a font, and this machine has none: install one (a package such as fonts-dejavu-core), or draw .svg"
        )
    return picture


_TEXT: Final = re.compile(r"<text\b.*?</text>", re.DOTALL)
