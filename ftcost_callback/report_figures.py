"""The charts of the report as plain plotly mappings: data, layout, and what stands in the legend.

A colour is the name of a CSS variable ("--accent"); the page's script puts in its value, light or dark. No series has
more than ``MAX_POINTS`` points. A chart for which nothing was measured is ``None``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from costmodel.units import SECONDS_PER_HOUR
from ftcost_callback.report_numbers import duration, usd
from ftcost_callback.report_run import ReportedRun
from ftcost_callback.report_series import finite, is_complete, pairs_of
from ftcost_callback.report_thinning import MAX_POINTS, running_median, shorten, stretch_ends, thin_min_max

MAX_BUDGET_HEIGHT: Final = 1.5
"""Times the highest curve: a budget above that is not drawn, since its line would press the curves flat."""

Figure = dict[str, Any]
Point = tuple[float, ...]
LegendEntry = tuple[str, str, str]
"""Mark (line, dash, dot, band, points), colour, text."""


# Curves


def line(points: Sequence[Point], colour: str, *, name: str, column: int = 1, **more: Any) -> Figure:
    """A curve through ``points`` (x, y, ...). A nan breaks it. A handful of points are marked as well."""
    few = len(points) < 12
    trace: Figure = {
        "type": "scatter",
        "mode": "lines+markers" if few else "lines",
        "name": name,
        "x": [_plain(point[0]) for point in points],
        "y": [_plain(point[column]) for point in points],
        "line": {"color": colour, "width": 2},
    }
    return trace | more


def level(ends: tuple[float, float], value: float, colour: str, *, name: str, dash: str = "dash") -> Figure:
    """A level line from the first to the second of ``ends``."""
    style = {"color": colour, "width": 1.5, "dash": dash}
    return line([(x, value) for x in ends], colour, name=name, mode="lines", line=style)


def band(points: Sequence[Point], colour: str, *, low: int, high: int) -> list[Figure]:
    """The area between two columns of ``points``."""
    edge: Figure = {"hoverinfo": "skip", "mode": "lines", "line": {"width": 0}}
    return [
        line(points, colour, name="", column=low, **edge),
        line(points, colour, name="", column=high, fill="tonexty", fillcolor=colour, **edge),
    ]


def _plain(value: float) -> float | int | None:
    return shorten(value) if math.isfinite(value) else None


def _resume_lines(positions: Sequence[float]) -> list[Figure]:
    style = {"color": "--muted", "width": 1.2, "dash": "dot"}
    return [
        {"type": "line", "x0": shorten(x), "x1": shorten(x), "yref": "paper", "y0": 0, "y1": 1, "line": style}
        for x in positions
    ]


def _resume_steps(run: ReportedRun) -> list[float]:
    steps = (finite(session.get("resumed_from_step")) for session in run.series.sessions)
    return [step for step in steps if step is not None]


def _resume_times(run: ReportedRun) -> list[float]:
    """Seconds of the run at which each later session began: its start-up is behind the line."""
    if run.sessions:
        return [session.begins_at for session in run.sessions[1:]]  # of what came before the record too
    elapsed = run.series.columns["elapsed_seconds"]
    return [elapsed[place] for place in run.series.session_starts[1:] if elapsed[place] == elapsed[place]]


def _repeated_spans(run: ReportedRun) -> list[Figure]:
    """A shaded stretch for each session's steps that an earlier one had done."""
    columns = run.series.columns
    spans: dict[float, tuple[float, float]] = {}
    if not run.series.measured("repeated"):
        return []
    rows = zip(columns["session_index"], columns["global_step"], columns["repeated"], strict=True)
    for session, step, repeated in rows:
        if repeated == 1:
            first, last = spans.get(session, (step, step))
            spans[session] = (min(first, step), max(last, step))
    shape = {"type": "rect", "layer": "below", "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 0}}
    return [shape | {"x0": first - 0.5, "x1": last + 0.5, "fillcolor": "--grey-wash"} for first, last in spans.values()]


def points_and_median(run: ReportedRun, y: Sequence[float]) -> tuple[list[Point], list[Point]]:
    """Thinned raw points (global_step, y), and their running median with a gap between sessions."""
    steps = run.series.columns["global_step"]
    sessions: list[tuple[Sequence[float], Sequence[float]]] = []  # x, y
    for start, end in run.series.sessions_rows():
        of_session: tuple[Sequence[float], Sequence[float]] = (steps[start:end], y[start:end])
        if not is_complete(of_session[1]):
            known = pairs_of(*of_session)
            of_session = ([x for x, _ in known], [value for _, value in known])
        sessions.append(of_session)
    total = sum(len(of_session[1]) for of_session in sessions)
    raw: list[Point] = []
    median: list[Point] = []
    for of_session in sessions:
        if of_session[1]:
            share = max(2, MAX_POINTS * len(of_session[1]) // total - 1)
            raw += thin_min_max(*of_session, share)
            median += [*running_median(*of_session, share), (math.nan, math.nan)]
    return raw, median[:-1]


def _axis_top(values: Sequence[float], *more: float | None) -> float:
    """An upper end that a few outliers do not stretch."""
    ordered = sorted(values)
    usual = ordered[min(len(ordered) - 1, int(0.985 * len(ordered)))]
    return 1.15 * max([usual, *(value for value in more if value is not None)])


def _step_axis(run: ReportedRun) -> Figure:
    """The same axis below each chart over steps: all steps of the run, done or not."""
    steps = run.series.columns["global_step"]
    first, last = min(steps, default=0.0), max(max(steps, default=0.0), run.max_steps or 0)
    margin = max(0.5, 0.01 * (last - first))
    ends = [shorten(first - margin), shorten(last + margin)]
    whole = {"dtick": 1} if last - first < 10 else {}
    return {"title": {"text": "step"}, "range": ends, "separatethousands": True, **whole}


# Charts


def cost_figure(run: ReportedRun) -> tuple[Figure, list[LegendEntry]] | None:
    """Spent and projected dollars over wall time against the prediction; hours over steps when there was no price."""
    columns, priced = run.series.columns, run.totals.spent_usd is not None
    end_seconds = run.totals.wall_seconds
    unit_seconds, unit = _time_unit(end_seconds)
    quantity, spent_name = ("usd", "spent_usd") if priced else ("seconds", "elapsed_seconds")
    y_unit = 1.0 if priced else unit_seconds
    over_time = priced and bool(run.series.measured("elapsed_seconds"))
    x_column, x_unit = (columns["elapsed_seconds"], unit_seconds) if over_time else (columns["global_step"], 1.0)
    names = [spent_name, *(f"projected_total_{quantity}{end}" for end in ("", "_low", "_high"))]
    rows: list[Point] = [
        (x_column[place] / x_unit, *(columns[name][place] / y_unit for name in names))
        for place in stretch_ends(len(x_column), MAX_POINTS - 2)
    ]
    rows = [row for row in rows if row[0] == row[0]]
    if not any(row[1] == row[1] for row in rows):
        return None
    still_to_come = _still_to_come(run, x_unit) if over_time else []
    if over_time:
        ends = (0.0, max(rows[-1][0], end_seconds / x_unit, *(time for time, _ in still_to_come)))
    else:
        ends = (rows[0][0], max(rows[-1][0], float(run.max_steps or 0)))

    traces: list[Figure] = []
    legend: list[LegendEntry] = [("line", "--accent", "spent" if priced else "elapsed")]
    projected = [row for row in rows if row[2] == row[2]]
    banded = [row for row in projected if row[3] == row[3] and row[4] == row[4]]
    if projected:
        legend.append(("dot", "--accent", "projected total"))
    if banded:
        traces += band(banded, "--accent-wash", low=3, high=4)
        legend.append(("band", "--accent-wash", "its band"))
    predicted_name, basis = f"total_{quantity}", run.basis_of_before
    traces_of_prediction, legend_of_prediction = _prediction(run.before, predicted_name, ends, y_unit, basis)
    traces += traces_of_prediction
    legend += legend_of_prediction
    if projected:
        style = {"color": "--accent", "width": 1.6, "dash": "dot"}
        traces.append(line(projected, "--accent", name="projected total", column=2, line=style))
    spent = [row for row in rows if row[1] == row[1]]
    if over_time and not any(session.get("earlier_seconds") for session in run.series.sessions[:1]):
        spent.insert(0, (0.0, 0.0))
    if over_time and run.is_over and run.totals.spent_usd is not None:
        spent.append((end_seconds / x_unit, run.totals.spent_usd))
    traces.append(line(spent, "--accent", name=legend[0][2], line={"color": "--accent", "width": 2.6}))
    if still_to_come:
        style = {"color": "--accent", "width": 1.6, "dash": "dash"}
        traces.append(line(still_to_come, "--accent", name="still to spend", mode="lines", line=style))
        legend.insert(1, ("dash", "--accent", "still to spend, as projected"))
    top = _add_budget(run, traces, legend, ends, None if priced else y_unit)
    positions = [time / x_unit for time in _resume_times(run)] if over_time else _resume_steps(run)
    layout = {
        "xaxis": _run_axis(ends, unit if over_time else None),
        "yaxis": _dollar_axis(top) if priced else {"rangemode": "tozero", "ticksuffix": f" {unit}", "hoverformat": ".4~g"},
        "shapes": _resume_lines(positions),
    }
    return {"data": traces, "layout": layout}, legend


def _still_to_come(run: ReportedRun, unit_seconds: float) -> list[Point]:
    """What is spent now and at the end, as projected; nothing of a run that is over."""
    total_usd, total_seconds = (run.series.last(f"projected_total_{name}") for name in ("usd", "seconds"))
    spent_usd, elapsed = run.series.last("spent_usd"), run.series.last("elapsed_seconds")
    if run.is_over or not (total_usd and total_seconds and spent_usd and elapsed):
        return []
    return [(elapsed / unit_seconds, spent_usd), (total_seconds / unit_seconds, total_usd)]


def _add_budget(
    run: ReportedRun, traces: list[Figure], legend: list[LegendEntry], ends: tuple[float, float], unit_seconds: float | None
) -> float:
    """Draws the limit, unless the chart ends far below it; returns the chart's highest value. ``None``: it is of dollars."""
    top: float = max(value for trace in traces for value in trace["y"] if value is not None)
    limit = _budget_limit(run, "usd" if unit_seconds is None else "hours")
    if limit is None:
        return top
    value = limit if unit_seconds is None else limit * SECONDS_PER_HOUR / unit_seconds
    text = usd(limit) if unit_seconds is None else duration(limit * SECONDS_PER_HOUR)
    if value > MAX_BUDGET_HEIGHT * top:
        legend.append(("line", "--text", f"budget {text}, above this chart"))
        return top
    traces.append(level(ends, value, "--text", name="budget", dash="solid"))
    legend.append(("line", "--text", f"budget {text}"))
    return max(top, value)


def _dollar_axis(top: float) -> Figure:
    """From 0, with as many digits as the highest value needs."""
    digits = 0 if top >= 10 else 2 if top >= 0.2 else min(6, 2 - math.floor(math.log10(top or 1.0)))
    return {
        "rangemode": "tozero",
        "tickprefix": "$",
        "tickformat": f",.{digits}f",
        "hoverformat": f",.{digits + 2}f",
    }


def _run_axis(ends: tuple[float, float], time_unit: str | None) -> Figure:
    """Over wall time in ``time_unit``, or over steps."""
    margin = 0.01 * (ends[1] - ends[0]) or 0.5
    axis: Figure = {"range": [shorten(ends[0]), shorten(ends[1] + margin)], "separatethousands": True}
    if time_unit is None:
        return axis | {"title": {"text": "step"}}
    return axis | {"title": {"text": f"wall time, {time_unit}"}, "hoverformat": ".1f", "ticksuffix": ""}


def _time_unit(seconds: float) -> tuple[float, str]:
    if seconds < 180:
        return 1.0, "s"
    return (60.0, "min") if seconds < 3 * SECONDS_PER_HOUR else (SECONDS_PER_HOUR, "h")


def _prediction(
    prediction: Mapping[str, Any], name: str, ends: tuple[float, float], unit: float, basis: str
) -> tuple[list[Figure], list[LegendEntry]]:
    """A predicted figure as a level line with its interval behind it; nothing when it was not predicted."""
    value, low, high = (finite(prediction.get(name + end)) for end in ("", "_low", "_high"))
    traces: list[Figure] = []
    legend: list[LegendEntry] = []
    if value is not None:
        traces.append(level(ends, value / unit, "--grey", name="predicted"))
        legend.append(("dash", "--grey", f"predicted {basis}"))
    if low is not None and high is not None:
        traces = band([(x, low / unit, high / unit) for x in ends], "--grey-wash", low=1, high=2) + traces
        legend.append(("band", "--grey-wash", "its interval"))
    return traces, legend


def _budget_limit(run: ReportedRun, kind: str) -> float | None:
    budget = run.series.session("budget")
    said = finite(budget.get(kind))
    crossed = (finite(row.get("limit")) for row in run.series.budgets if row.get("kind") == kind)
    return said if said is not None else next((limit for limit in crossed if limit is not None), None)


def rate_figure(
    run: ReportedRun, y: Sequence[float], predicted_name: str, *, with_pauses: bool
) -> tuple[Figure, list[LegendEntry]]:
    """One rate over steps, with its prediction behind it and evaluations and saves in a strip below.

    ``y``: one value for each step row, nan where it was not measured; at least one is.
    """
    raw, median = points_and_median(run, y)
    axis = _step_axis(run)
    ends = (axis["range"][0], axis["range"][1])
    basis = "on the tokens seen" if run.tokens_seen else run.basis_of_before
    traces, predicted_legend = _prediction(run.best_prediction, predicted_name, ends, 1.0, basis)
    few = len(raw) < 12
    marker = {"color": "--accent" if few else "--accent-dots", "size": 7 if few else 4}
    traces.append(line(raw, "--accent", name="step", mode="markers", marker=marker))
    measured = [value for value in y if value == value]
    stretch = math.ceil(2 * len(measured) / max(1, len(raw)))
    thinned = f", the lowest and highest of every {stretch:,}" if len(raw) < len(measured) else ""
    legend: list[LegendEntry] = [("points", "--accent-dots", f"steps{thinned}")]
    if not few:
        traces.append(line(median, "--accent", name="running median", line={"color": "--accent", "width": 2.2}))
        legend.append(("line", "--accent", "running median"))
    top = _axis_top(measured, finite(run.best_prediction.get(predicted_name)))
    suffix = " s" if predicted_name == "step_seconds" else ""
    layout: Figure = {
        "xaxis": axis,
        "yaxis": {"range": [0, shorten(top)], "ticksuffix": suffix, "hoverformat": ".4~g", "separatethousands": True},
        "shapes": _resume_lines(_resume_steps(run)) + _repeated_spans(run),
    }
    pauses = [(kind, run.series.pauses[kind]) for kind in ("save", "eval") if run.series.pauses[kind]]
    if with_pauses and pauses:
        strip = 0.075 * len(pauses)
        axis["anchor"] = "y2"
        layout["yaxis"]["domain"] = [strip + 0.05, 1]
        layout["yaxis2"] = {
            "domain": [0, strip],
            "range": [-0.6, len(pauses) - 0.4],
            "tickvals": list(range(len(pauses))),
            "ticktext": [kind for kind, _ in pauses],
            "showgrid": False,
            "fixedrange": True,
        }
        for height, (kind, found) in enumerate(pauses):
            points = thin_min_max([float(step) for step, _ in found], [seconds for _, seconds in found])
            marks = {"symbol": "line-ns-open", "size": 9, "color": "--text", "line": {"width": 1.8, "color": "--text"}}
            trace = line([(x, float(height)) for x, _ in points], "--text", name=kind, mode="markers", marker=marks)
            texts = [duration(seconds) for _, seconds in points]
            traces.append(trace | {"yaxis": "y2", "customdata": texts, "hovertemplate": "%{customdata}"})
    return {"data": traces, "layout": layout}, legend + predicted_legend


def use_figure(run: ReportedRun) -> tuple[Figure, list[LegendEntry]] | None:
    """Share of the time in which the GPU was busy, and its multiprocessors active."""
    traces: list[Figure] = []
    legend: list[LegendEntry] = []
    for name, text, colour in (
        ("busy_fraction", "a kernel was running", "--accent"),
        ("sm_active_fraction", "multiprocessors active", "--grey"),
    ):
        if run.series.measured(name):
            _, median = points_and_median(run, run.series.columns[name])
            traces.append(line([(x, 100 * y) for x, y in median], colour, name=text))
            legend.append(("line", colour, text))
    axis = {"range": [0, 102], "ticksuffix": " %", "hoverformat": ".1f"}
    return ({"data": traces, "layout": {"xaxis": _step_axis(run), "yaxis": axis}}, legend) if traces else None


def power_figure(run: ReportedRun) -> tuple[Figure, list[LegendEntry]] | None:
    """Watts over steps, with the card's rated power."""
    measured = run.series.measured("power_watts")
    if not measured:
        return None
    _, median = points_and_median(run, run.series.columns["power_watts"])
    traces = [line(median, "--accent", name="power")]
    legend: list[LegendEntry] = [("line", "--accent", "power")]
    axis = _step_axis(run)
    rated = finite(run.series.session("device").get("tdp_watts"))
    if rated is not None:
        traces.append(level((axis["range"][0], axis["range"][1]), rated, "--grey", name="rated"))
        legend.append(("dash", "--grey", "the card's rated power"))
    y_axis = {"range": [0, shorten(_axis_top(measured, rated))], "ticksuffix": " W", "hoverformat": ".0f"}
    return {"data": traces, "layout": {"xaxis": axis, "yaxis": y_axis}}, legend


def heat_figure(run: ReportedRun) -> Figure:
    """[layer x expert] in frames over time: tokens over the mean of the layer. The run has at least one frame."""
    experts = run.series.experts
    frames: list[Figure] = []
    peak = 2.0
    for first, last, tokens in experts.frames:
        shares = [[load * len(layer) / sum(layer) if sum(layer) else None for load in layer] for layer in tokens]
        known = [
            (share, row, column)
            for row, layer in enumerate(shares)
            for column, share in enumerate(layer)
            if share is not None
        ]
        largest, row, column = max(known)
        peak = max(peak, largest)
        steps = f"step {last:,}" if first == last else f"steps {first:,} to {last:,}"
        steps = f"Only the tokens of the window{'' if first == last else 's'} that ended at {steps}"
        label = f"{steps}. Largest: {largest:.2f} × in layer {layer_label(experts.layer_names, row)}, expert {column}."
        frames.append({"label": label, "z": [[_rounded(share) for share in layer] for layer in shares]})
    num_layers, num_experts = len(experts.layer_names), max(len(layer) for layer in experts.frames[0][2])
    labels = [layer_label(experts.layer_names, row) for row in range(num_layers)]
    every = max(1, math.ceil(num_layers / 16))
    heat = {
        "type": "heatmap",
        "z": [],
        "zmin": 0,
        "zmax": shorten(peak),
        "colorscale": [[0, "--heat-low"], [1 / peak, "--heat-mid"], [1, "--accent"]],
        "xgap": 1 if num_experts <= 64 else 0,
        "ygap": 1,
        "customdata": [[escape(name)] * num_experts for name in experts.layer_names],
        "hovertemplate": "%{customdata}<br>expert %{x}: %{z:.2f} × the mean<extra></extra>",
        "colorbar": {"thickness": 10, "outlinewidth": 0, "len": 1, "ticksuffix": " ×", "nticks": 6},
    }
    bare = {"showgrid": False, "ticks": ""}
    x_axis = {"title": {"text": "expert"}, "nticks": min(num_experts, 16) + 1, **bare}
    y_axis = {"title": {"text": "layer"}, "autorange": "reversed", **bare}
    y_axis |= {"tickvals": list(range(0, num_layers, every)), "ticktext": labels[::every]}
    height = max(230, min(640, 74 + 13 * num_layers))
    layout = {"hovermode": "closest", "xaxis": x_axis, "yaxis": y_axis}
    return {"height": height, "frames": frames, "data": [heat], "layout": layout}


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 3)


def layer_label(names: Sequence[str], row: int) -> str:
    """The first number in each name when that tells the layers apart, else their position."""
    numbers = [re.search(r"\d+", name) for name in names]
    found = [number[0] for number in numbers if number]
    return found[row] if len(set(found)) == len(names) else str(row)


def load_figure(run: ReportedRun) -> tuple[Figure, list[LegendEntry]]:
    """The busiest expert's tokens over its layer's mean, over steps: mean over layers and worst layer."""
    experts = run.series.experts
    curves: list[Figure] = []
    for values, colour, name in (
        (experts.worst_max_over_mean, "--grey", "worst layer"),
        (experts.mean_max_over_mean, "--accent", "mean over layers"),
    ):
        steps = experts.global_step
        points = list(zip(steps, values, strict=True))
        drawn = points if len(points) <= MAX_POINTS else running_median(steps, values)
        curves.append(line(_broken_where_x_goes_back(drawn), colour, name=name))
    y_axis = {"ticksuffix": " ×", "hoverformat": ".2f"}
    legend = [("line", "--accent", "mean over layers"), ("line", "--grey", "worst layer")]
    return {"data": curves, "layout": {"xaxis": _step_axis(run), "yaxis": y_axis}}, legend


def _broken_where_x_goes_back(points: Sequence[Point]) -> list[Point]:
    """With a nan between two points where a resumed session begins again at an earlier step."""
    broken: list[Point] = []
    for point in points:
        if broken and point[0] <= broken[-1][0]:
            broken.append((math.nan, math.nan))
        broken.append(point)
    return broken
