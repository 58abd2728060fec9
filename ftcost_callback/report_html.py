# ruff: noqa: RUF001 - dashes between numbers and the multiplication sign are meant
"""A run record as one self-contained HTML page, or several runs side by side.

The page opens from disk with no network: style, script and plotly.js (compressed: 2 MB in place of 5) stand inside, and
its content policy forbids loading anything else. Every name that comes from a record is escaped. What was not measured is
said, never drawn.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, Final

from costmodel.errors import CostModelError, MissingExtraError
from costmodel.units import SECONDS_PER_HOUR
from ftcost_callback.report_breakdown import balance_html, breakdown_html
from ftcost_callback.report_figures import (
    Figure,
    LegendEntry,
    cost_figure,
    heat_figure,
    layer_label,
    load_figure,
    power_figure,
    rate_figure,
    use_figure,
)
from ftcost_callback.report_numbers import count, duration, gib, iso_time, percent, usd
from ftcost_callback.report_run import ReportedRun, first_known, plan_ratio, predicted_memory, savings
from ftcost_callback.report_series import RunSeries, finite, read_series, totals

BUCKET_NAMES: Final = {
    "train": "Training",
    "data_wait": "Data wait",
    "eval": "Evaluation",
    "save": "Saving",
    "log": "Logging",
    "startup": "Start-up",
    "other": "Other",
    "rollout": "Rollouts",
}

MEMORY_NAMES: Final = {
    "weights_bytes": "Weights",
    "adapters_bytes": "Adapters",
    "gradients_bytes": "Gradients",
    "optimizer_bytes": "Optimizer",
    "activations_bytes": "Activations",
    "logits_bytes": "Logits",
    "temporary_bytes": "Temporary",
    "context_bytes": "Device context",
}

# Bits of nvmlClocksEventReasons that slow a card down. Source: nvml.h, "Clocks event reasons".
THROTTLE_NAMES: Final = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "temperature (driver)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Read the records ``runs`` (files or output folders) and write the page to ``out``, which is returned.

    Raises :class:`CostModelError` when there is nothing to show, a record cannot be read, or ``out`` cannot be written.
    """
    if not runs:
        raise CostModelError("no run to report on; give a run.jsonl or the output folder of a run")
    page = render_report([read_series(path) for path in runs])
    out = Path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise CostModelError(f"{out}: cannot be written: {error.strerror or error}") from None
    return out


def render_report(records: Sequence[RunSeries]) -> str:
    """The page for these runs. Raises :class:`MissingExtraError` when plotly is not installed."""
    plotly_js = _packed_plotly_js()
    figures: dict[str, Figure] = {}
    runs = [ReportedRun(record, totals(record), f"r{index}") for index, record in enumerate(records)]
    parts = [_run_html(run, figures) for run in runs]
    if len(runs) == 1:
        body = f"<main>{parts[0]}</main>"
    else:
        body = f"<main>{_comparison_html(runs)}{_tabs_html(runs)}{_panels_html(runs, parts)}</main>"
    assets = resources.files("ftcost_callback") / "report_assets"
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    # "<" never stands in the data block, so that no name can close it.
    data = json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:\">",
            f"<title>{escape(title)} · ftcost report</title>",
            f"<style>{(assets / 'report.css').read_text(encoding='utf-8')}</style></head><body>",
            '<div class="page-head"><div class="brand">ftcost <span>run report</span></div>'
            '<button id="theme" class="needs-js" type="button" title="Light or dark">Dark</button></div>',
            body,
            f"<footer>Made from {escape(', '.join(_short_path(run.series.path) for run in runs))}. "
            "Measured over predicted: 1.00 is on plan. The page needs no network.</footer>",
            f'<script type="text/plain" id="plotly">{plotly_js}</script>',
            f'<script type="application/json" id="figures">{data}</script>',
            f"<script>{(assets / 'report.js').read_text(encoding='utf-8')}</script>",
            "</body></html>\n",
        )
    )


def _packed_plotly_js() -> str:
    """plotly.js with its licence, gzip in base64, which the page's script unpacks. The package has no smaller build."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise MissingExtraError("plotly", "report", "the HTML report") from None
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), compresslevel=6, mtime=0)).decode("ascii")


def _with_unit(text: str) -> str:
    """The same text with its units set small; the text holds no markup."""
    return re.sub(r"( [a-zA-Z%/]+)( ?)", r"<small>\1\2</small>", escape(text))


def _short_path(path: Path) -> str:
    return "/".join(path.parts[-3:]) if len(path.parts) > 3 else str(path)


# Small pieces of HTML


def _section(title: str, explanation: str, content: str) -> str:
    sub = f'<p class="sub">{explanation}</p>' if explanation else ""
    return f"<section><h2>{title}</h2>{sub}{content}</section>"


def _absent(reason: str) -> str:
    return f'<p class="absent">{escape(reason)}</p>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, total: Sequence[str] | None = None) -> str:
    """``head`` and cells are HTML. The first column is a heading, the others hold numbers."""
    heads = "".join(f'<th scope="col"{" class=number" if index else ""}>{cell}</th>' for index, cell in enumerate(head))

    def row_html(row: Sequence[str], kind: str = "") -> str:
        cells = "".join(f'<td class="number">{cell}</td>' for cell in row[1:])
        return f'<tr{kind}><th scope="row">{row[0]}</th>{cells}</tr>'

    body = "".join(row_html(row) for row in rows) + (row_html(total, ' class="total"') if total else "")
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _swatch(part: int) -> str:
    return f'<span class="swatch part-{part}"></span>'


_LEGEND_MARKS: Final = {
    "line": '<path d="M1 6h20" stroke="var({0})" stroke-width="2.5"/>',
    "dash": '<path d="M1 6h20" stroke="var({0})" stroke-width="2" stroke-dasharray="5 3"/>',
    "dot": '<path d="M1 6h20" stroke="var({0})" stroke-width="2" stroke-dasharray="2 3"/>',
    "band": '<rect x="1" y="1" width="20" height="10" fill="var({0})"/>',
    "points": '<g fill="var({0})"><circle cx="4" cy="8" r="2"/><circle cx="11" cy="4" r="2"/>'
    '<circle cx="18" cy="7" r="2"/></g>',
}


def _legend(entries: Sequence[LegendEntry]) -> str:
    """Each entry: mark, colour variable, text (HTML)."""
    items = "".join(
        f'<span><svg width="22" height="12" aria-hidden="true">{_LEGEND_MARKS[mark].format(colour)}</svg>{text}</span>'
        for mark, colour, text in entries
    )
    return f'<div class="legend">{items}</div>'


def _chart(run: ReportedRun, name: str, figure: Figure, figures: dict[str, Figure], label: str, *, low: bool = False) -> str:
    """The place of a chart, which the page's script draws from ``figures``."""
    chart_id = f"{run.id}-{name}"
    figures[chart_id] = figure
    kind = "chart low" if low else "chart"
    height = f' style="height:{figure["height"]}px"' if "height" in figure else ""
    return (
        f'<div class="{kind}" id="{chart_id}" role="img" aria-label="{escape(label)}"{height}>'
        "<noscript>The charts need JavaScript; the numbers on this page do not.</noscript></div>"
    )


# Sections


def _run_html(run: ReportedRun, figures: dict[str, Figure]) -> str:
    return "".join(
        (
            _head_html(run),
            _cards_html(run),
            f'<div class="columns">{_buckets_html(run)}{_savings_html(run)}</div>',
            _cost_html(run, figures),
            _speed_html(run, figures),
            _predictions_html(run),
            breakdown_html(run, _section, _table),
            f'<div class="columns">{_memory_html(run)}{_gpu_html(run, figures)}</div>',
            _experts_html(run, figures),
            _job_html(run),
            _notes_html(run),
        )
    )


def _head_html(run: ReportedRun) -> str:
    job, device = run.series.session("job"), run.series.session("device")
    gpus = finite(job.get("num_gpus")) or 1
    card = device.get("name") or job.get("gpu")
    method = " ".join(str(part) for part in (job.get("method"), job.get("quantization")) if part)
    facts = [
        method,
        f"{gpus:g} × {card}" if card and gpus > 1 else str(card or ""),
        f"run {run.series.run_id}" if run.series.run_id else "",
        f"{len(run.series.sessions)} sessions" if len(run.series.sessions) > 1 else "",
        f"started {iso_time(run.series.sessions[0].get('started_at'))}" if run.series.sessions else "",
        run.status,
    ]
    verdict = (run.series.summary or {}).get("verdict") or _verdict(run)
    remarks = "; ".join(run.series.remarks)
    return (
        f'<h1>{escape(run.name)}</h1><p class="facts">{escape(" · ".join(fact for fact in facts if fact))}</p>'
        + (f'<p class="verdict">{escape(str(verdict))}</p>' if verdict else "")
        + (f'<p class="remarks">About this record: {escape(remarks)}.</p>' if remarks else "")
    )


def _verdict(run: ReportedRun) -> str | None:
    """One sentence for a run that wrote none."""
    cost, predicted = run.final_usd, finite(run.before.get("total_usd"))
    text: Callable[[float], str] = usd
    if cost is None or not predicted:
        cost, predicted, text = run.final_seconds, finite(run.before.get("total_seconds")), duration
    if cost is None or not predicted:
        return None
    verb = "The run took" if run.is_complete else "The run is heading for"
    return f"{verb} {text(cost)} against {text(predicted)} predicted: {cost / predicted:.2f} of the plan."


def _card(name: str, value: str | None, note: str = "", *, first: bool = False, absent: str = "not measured") -> str:
    """``value`` is plain text; ``note`` too."""
    shown = f'<div class="value">{_with_unit(value)}</div>' if value else f'<div class="value none">{escape(absent)}</div>'
    return (
        f'<div class="card{" first" if first else ""}"><div class="name">{escape(name)}</div>{shown}'
        f'<div class="note">{escape(note)}</div></div>'
    )


def _range(low: object, high: object, text: Callable[[float], str]) -> str:
    a, b = finite(low), finite(high)
    return f"{text(a)} – {text(b)}" if a is not None and b is not None else ""


def _cards_html(run: ReportedRun) -> str:
    series, sums, before = run.series, run.totals, run.before
    device, price = series.session("device"), series.session("price")
    spent = usd(sums.spent_usd) if sums.spent_usd is not None else None
    hourly = finite(price.get("usd_per_gpu_hour"))
    rate = f"at {usd(hourly)} per GPU hour" if hourly else ""
    projected = series.last("projected_total_usd")
    if run.is_complete or projected is None:
        spent_note = ("final, " if run.is_complete and spent else "") + rate
    else:
        band = _range(series.last("projected_total_usd_low"), series.last("projected_total_usd_high"), usd)
        spent_note = f"projected total {usd(projected)}" + (f" ({band})" if band else "")
    if spent is None:
        spent_note = "give usd_per_gpu_hour, or cloud and tier"

    level = finite(before.get("interval_level"))
    interval = f"{level:.0%} interval ".replace("%", " %") if level else ""
    predicted_usd, predicted_seconds = finite(before.get("total_usd")), finite(before.get("total_seconds"))
    if predicted_usd is not None and spent is not None:
        predicted: str | None = usd(predicted_usd)
        predicted_note = _range(before.get("total_usd_low"), before.get("total_usd_high"), usd)
    else:
        predicted = duration(predicted_seconds) if predicted_seconds is not None else None
        predicted_note = _range(before.get("total_seconds_low"), before.get("total_seconds_high"), duration)
    ratio, ratio_note = plan_ratio(run)
    step = run.steady_step_seconds
    tokens, mfu = run.tokens_per_second("num_non_padding_tokens"), run.mfu
    peak_name = "peak_reserved_bytes" if run.peak_bytes("peak_reserved_bytes") else "peak_allocated_bytes"
    peak, peak_predicted = run.peak_bytes(peak_name), predicted_memory(before).get(peak_name)
    peak_flops = finite(device.get("peak_flops_per_second"))
    no_prediction = "none in the record"
    of_sessions = f", {run.sessions_in_rates}" if run.sessions_in_rates else ""

    def was_predicted(key: str, text: Callable[[float], str]) -> str:
        value = finite(before.get(key))
        return f"predicted {text(value)}" if value is not None else ""

    cards = (
        _card("Spent" if run.is_over else "Spent so far", spent, spent_note, first=True, absent="no price"),
        _card("Predicted before the run", predicted, predicted_note and interval + predicted_note, absent=no_prediction),
        _card(
            "Total, measured over predicted" if run.is_complete else "Total, projected over predicted",
            f"{ratio:.2f}" if ratio else None,
            ratio_note,
            absent="no prediction" if not before else "not comparable" if run.predicted_gpu else "not known yet",
        ),
        _card(
            "Wall time" if run.is_over else "Wall time so far",
            duration(sums.wall_seconds),
            was_predicted("total_seconds", duration),
        ),
        _card(
            "Tokens/s, padding left out" + of_sessions,
            count(tokens) if tokens else None,
            was_predicted("non_padding_tokens_per_second", count),
        ),
        _card("Step time, mean" + of_sessions, duration(step) if step else None, was_predicted("step_seconds", duration)),
        _card(
            "MFU" + of_sessions,
            percent(mfu) if mfu is not None else None,
            f"of {peak_flops / 1e12:,.4g} TFLOP/s"
            if peak_flops and mfu is not None
            else ""
            if mfu is not None
            else run.reason("mfu", "peak") or "the device's peak is not known",
        ),
        _card(
            "Peak memory, " + ("reserved" if peak_name == "peak_reserved_bytes" else "allocated"),
            gib(peak) if peak else None,
            f"predicted {gib(peak_predicted)}" if peak_predicted else "",
        ),
    )
    return f'<div class="cards">{"".join(cards)}</div>'


def _buckets_html(run: ReportedRun) -> str:
    sums = run.totals
    priced = sums.spent_usd is not None
    title = "Where the dollars went" if priced else "Where the time went"
    if sums.wall_seconds <= 0:
        return _section(title, "", _absent("No time has been measured yet."))
    shown = [(index, name, sums.bucket_seconds[name]) for index, name in enumerate(BUCKET_NAMES, start=1)]
    bar = "".join(
        f'<i class="part-{part}" style="width:{100 * seconds / sums.wall_seconds:.3f}%" '
        f'title="{BUCKET_NAMES[name]}: {percent(seconds / sums.wall_seconds)}"></i>'
        for part, name, seconds in shown
        if seconds > 0
    )

    def row(label: str, seconds: float) -> list[str]:
        dollars = [usd(sums.usd(seconds) or 0.0, of=sums.spent_usd)] if priced else []
        return [label, duration(seconds), percent(seconds / sums.wall_seconds), *dollars]

    rows = [row(_swatch(part) + BUCKET_NAMES[name], seconds) for part, name, seconds in shown if seconds > 0]
    head = ["Bucket", "Time", "Share", *(["Cost"] if priced else [])]
    waste = (
        f'<p class="sub">Of this, {escape(duration(sums.wasted_seconds))} was done twice after a resume.</p>'
        if sums.wasted_seconds > 0
        else ""
    )
    table = _table(head, rows, total=row("Wall time", sums.wall_seconds))
    return _section(title, "", f'<div class="bar">{bar}</div>{table}{waste}')


def _savings_html(run: ReportedRun) -> str:
    title = "What to change next time"
    found = savings(run)
    missing = "" if run.padding_share is not None else _absent("Padding: the record holds no token counts.")
    if not found:
        return _section(title, "", _absent("Nothing in the record is worth 1 % of the run.") + missing)
    items = ""
    for saving in found:
        dollars, time = run.totals.usd(saving.seconds), escape(duration(saving.seconds))
        if dollars is not None:
            time = f"{usd(dollars, of=run.totals.spent_usd)}<small>{time}</small>"
        why = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(saving.advice, quote=False))
        items += (
            f'<li><div class="saved">{time}</div>'
            f'<div><strong>{escape(saving.title)}</strong><div class="why">{why}</div></div></li>'
        )
    explanation = "At most this much in a run like this one. Savings overlap: they do not add up."
    return _section(title, explanation, f'<ul class="savings">{items}</ul>{missing}')


def _cost_html(run: ReportedRun, figures: dict[str, Figure]) -> str:
    found = cost_figure(run)
    title = "Cost over time" if run.totals.spent_usd is not None else "Time over steps"
    if found is None:
        return _section(title, "", _absent("The step rows say neither dollars nor elapsed time."))
    figure, legend = found
    notes = [] if run.before else ["There is no prediction in this record to compare with."]
    if figure["layout"]["shapes"]:
        notes.append("A dotted vertical line marks a resume.")
    return _section(title, " ".join(notes), _legend(legend) + _chart(run, "cost", figure, figures, title))


def _speed_html(run: ReportedRun, figures: dict[str, Figure]) -> str:
    seconds = run.series.columns["step_seconds"]
    if not run.series.measured("step_seconds"):
        return _section("Speed", "", _absent("No step has been measured."))
    notes = ["Pauses are left out of both curves."]
    if any(finite(session.get("resumed_from_step")) is not None for session in run.series.sessions):
        notes.append("A dotted line marks a resume; shaded steps ran twice.")
    figure, legend = rate_figure(run, seconds, "step_seconds", with_pauses=True)
    content = _legend(legend) + "<h3>Seconds per step</h3>" + _chart(run, "step", figure, figures, "Seconds per step")
    content += "<h3>Tokens per second, padding left out</h3>"
    speed = [
        tokens / step if tokens == tokens and step > 0 else math.nan
        for tokens, step in zip(run.series.columns["num_non_padding_tokens"], seconds, strict=True)
    ]
    if any(value == value for value in speed):
        figure, _ = rate_figure(run, speed, "non_padding_tokens_per_second", with_pauses=False)
        content += _chart(run, "tokens", figure, figures, "Tokens per second over steps", low=True)
    else:
        content += _absent(run.reason("token") or "The step rows hold no token counts: this trainer does not show them.")
    return _section("Speed", " ".join(notes), content)


def _predictions_html(run: ReportedRun) -> str:
    title = "Predicted and measured"
    if not run.series.predictions:
        said = run.reason("predict", "estimate") or "There is no prediction in this record."
        return _section(title, "", _absent(said))
    whole = "Whole run" if run.is_complete else "Whole run, projected"
    measured: list[tuple[str, str, float | None, Callable[[float], str]]] = [
        (f"{whole}, cost", "total_usd", run.final_usd, usd),
        (f"{whole}, time", "total_seconds", run.final_seconds, duration),
        ("Step time", "step_seconds", run.steady_step_seconds, duration),
        ("Tokens per second", "tokens_per_second", run.tokens_per_second("num_tokens"), count),
        ("… padding left out", "non_padding_tokens_per_second", run.tokens_per_second("num_non_padding_tokens"), count),
        ("MFU", "mfu", run.mfu, percent),
        ("Peak memory, allocated", "peak_allocated_bytes", run.peak_bytes("peak_allocated_bytes"), gib),
        ("Peak memory, reserved", "peak_reserved_bytes", run.peak_bytes("peak_reserved_bytes"), gib),
    ]
    bases = [(run.before, "before the run"), (run.tokens_seen, "on the tokens seen")]
    bases = [(prediction, text) for prediction, text in bases if prediction]
    rows = []
    for name, key, value, text in measured:
        cells, known = [], value is not None
        for prediction, _ in bases:
            source = prediction if key in prediction else predicted_memory(prediction)
            predicted = finite(source.get(key))
            known = known or predicted is not None
            span = _range(source.get(key + "_low"), source.get(key + "_high"), text)
            cells.append("–" if predicted is None else escape(text(predicted)) + _range_html(span))
            comparable = value is not None and predicted and run.predicted_gpu is None
            cells.append(f"{value / predicted:.2f}" if comparable and value and predicted else "–")
        if known:
            rows.append([name, escape(text(value)) if value is not None else "–", *cells])
    head = ["", "Measured" if run.is_complete else "Measured so far"]
    for _, text_of_basis in bases:
        head += [f"Predicted {text_of_basis}", "Measured over predicted"]
    bound = run.best_prediction.get("step")
    bound = bound.get("bound_by") if isinstance(bound, dict) else None
    bound_text = f" The step was expected to be bound by {escape(str(bound)).replace('_', ' ')}." if bound else ""
    explanation = "1.00 is on plan. "
    if run.predicted_gpu is not None:
        explanation = f"The prediction is for {escape(run.predicted_gpu)}, which did not train: it is not comparable. "
    explanation += "Step time and rates leave out the first step of each session and all pauses."
    if run.sessions_in_rates:
        explanation += f" They are of the {run.sessions_in_rates}, on one machine."
    return _section(title, explanation + bound_text, _table(head, rows))


def _range_html(span: str) -> str:
    return f'<span class="range">{escape(span)}</span>' if span else ""


def _memory_html(run: ReportedRun) -> str:
    prediction = run.before or run.tokens_seen
    memory = predicted_memory(prediction)
    parts = [(f"part-{place}", name, memory.get(key, 0.0)) for place, (key, name) in enumerate(MEMORY_NAMES.items(), 1)]
    parts = [part for part in parts if part[2] > 0]
    named = sum(num_bytes for _, _, num_bytes in parts)
    predicted = memory.get("peak_device_bytes") or named
    if parts and predicted > named:
        parts.append(("part-9", "Held, not in use", predicted - named))
    measured = [
        (text, num_bytes)
        for text, num_bytes in (
            ("Reserved", run.peak_bytes("peak_reserved_bytes")),
            ("Allocated", run.peak_bytes("peak_allocated_bytes")),
            ("Device, in use", max(run.series.measured("memory_used_bytes"), default=None)),
        )
        if num_bytes
    ]
    content = ""
    if parts or measured:
        content += _memory_gauge(run, memory, parts, measured)
    if not measured:
        said = run.reason("memory", "gpu", "nvml")
        content += _absent(said or "Peak memory was not measured: torch keeps no peaks on this device.")
    if parts:
        rows = [
            [f'<span class="swatch {part}"></span>{name}', gib(num_bytes), percent(num_bytes / predicted)]
            for part, name, num_bytes in parts
        ]
        total = ["On the device", gib(predicted), percent(1.0)]
        content += _table(["Predicted at the peak", "Size", "Share"], rows, total=total)
    elif measured:
        content += _absent("There is no prediction in this record to split the peak by category.")
    memory_record = prediction.get("memory")
    phase = memory_record.get("peak_phase") if isinstance(memory_record, dict) else None
    expected = f", which expected it in the {escape(str(phase))} phase" if phase else ""
    explanation = f"Peak of the run against the prediction{expected}." if parts else ""
    return _section("Memory", explanation, content)


def _memory_gauge(
    run: ReportedRun,
    memory: Mapping[str, float],
    parts: Sequence[tuple[str, str, float]],
    measured: Sequence[tuple[str, float]],
) -> str:
    """Bars on one scale: predicted by category with its interval, measured, and the card's capacity."""
    capacity = first_known(memory.get("capacity_bytes"), finite(run.series.session("device").get("memory_bytes")))
    low, high = memory.get("peak_device_bytes_low", 0.0), memory.get("peak_device_bytes_high", 0.0)
    named = sum(num_bytes for _, _, num_bytes in parts)
    full = 1.02 * max([capacity or 0.0, named, high, *(num_bytes for _, num_bytes in measured)])

    def at(num_bytes: float) -> str:
        return f"{100 * num_bytes / full:.2f}%"

    def row(text: str, segments: str, more: str) -> str:
        track = f'<div class="track"><div class="bar">{segments}</div>{more}{limit}</div>'
        return f'<div class="row"><div>{text}</div>{track}</div>'

    limit = f'<i class="limit" style="left:{at(capacity)}"></i>' if capacity else ""
    rows = ""
    if parts:
        segments = "".join(
            f'<i class="{part}" style="width:{at(num_bytes)}" title="{name}: {gib(num_bytes)}"></i>'
            for part, name, num_bytes in parts
        )
        span = f'title="{escape(_range(low, high, gib))}"'
        interval = f'<i class="whisker" style="left:{at(low)};width:{at(high - low)}" {span}></i>' if high > low > 0 else ""
        rows += row("Predicted", segments, interval)
    for text, num_bytes in measured:
        inside = num_bytes > 0.5 * full
        place = f"right:{at(full - num_bytes)}" if inside else f"left:{at(num_bytes)}"
        label = f'<span class="value{" inside" if inside else ""}" style="{place}">{gib(num_bytes)}</span>'
        rows += row(text, f'<i class="part-1" style="width:{at(num_bytes)}"></i>', label)
    if capacity:
        mark = f'<span style="left:{at(capacity)}">capacity {gib(capacity)}</span>'
        rows += f'<div class="row"><div></div><div class="axis">{mark}</div></div>'
    return f'<div class="gauge">{rows}</div>'


def _gpu_html(run: ReportedRun, figures: dict[str, Figure]) -> str:
    content = ""
    for name, title, found in (("use", "In use", use_figure(run)), ("power", "Power", power_figure(run))):
        if found is not None:
            figure, legend = found
            content += f"<h3>{title}, running median</h3>{_legend(legend)}"
            content += _chart(run, name, figure, figures, f"{title} of the GPU over steps", low=True)
    if not content:
        said = run.reason("gpu", "nvml", "nvidia")
        return _section("GPU", "", _absent(said or "The record holds no GPU samples: no NVIDIA driver, or switched off."))
    facts = []
    energy = first_known(run.series.summary_value("energy_joules"), run.series.total("energy_joules"))
    if energy:
        facts.append(f"Energy: {energy / 3.6e6:.3g} kWh.")
    throttled = [int(value) for value in run.series.measured("throttle_reasons")]
    for bit, name in THROTTLE_NAMES.items():
        slowed = sum(1 for value in throttled if value & bit)
        if slowed:
            facts.append(f"Slowed down by {name} in {percent(slowed / run.series.num_step_rows)} of the steps.")
    return _section("GPU", " ".join(facts), content)


def _experts_html(run: ReportedRun, figures: dict[str, Figure]) -> str:
    experts = run.series.experts
    reasons = "; ".join(experts.reasons)
    if not experts.frames:
        why = reasons or run.reason("expert", "router")
        if not why and finite(run.series.session("model").get("num_experts")) is None:
            why = "No expert loads in this record: the model is dense, or they were switched off."
        return _section("Expert load", "", _absent(why or "The model has experts, but their loads were not recorded."))
    figure = heat_figure(run)
    last = len(figure["frames"]) - 1
    slider = (
        f'<div class="slider needs-js"><label for="{run.id}-time">Time</label><input type="range" id="{run.id}-time" '
        f'min="0" max="{last}" value="{last}" step="1" data-chart="{run.id}-experts"><output></output></div>'
    )
    heat = "<h3>Tokens of each expert over the mean of its layer</h3>" + slider
    heat += _chart(run, "experts", figure, figures, "Expert load by layer and expert")
    curves, legend = load_figure(run)
    curve = "<h3>Busiest expert over the mean of its layer</h3>" + _legend(legend)
    curve += _chart(run, "load", curves, figures, "Largest over mean expert load over steps")
    curve += "<h3>Most uneven layers at the end</h3>" + _uneven_layers(run)
    partial = _absent(f"Partly recorded: {reasons}") if reasons else ""
    return _section(
        "Expert load",
        "1 × is an even share. Where experts run side by side, the busiest one sets the pace.",
        f'{partial}{balance_html(run)}<div class="inner-columns"><div>{heat}</div><div>{curve}</div></div>',
    )


def _uneven_layers(run: ReportedRun) -> str:
    """The layers of the last frame with the largest load over their mean."""
    names, (_, _, tokens) = run.series.experts.layer_names, run.series.experts.frames[-1]
    layers = [(max(layer) * len(layer) / sum(layer), row, layer) for row, layer in enumerate(tokens) if sum(layer) > 0]
    rows = []
    for largest, row, layer in sorted(layers, key=lambda one: -one[0])[:5]:
        least = min(layer)
        rows.append(
            [
                escape(layer_label(names, row)),
                f"expert {layer.index(max(layer))}",
                f"{largest:.2f} ×",
                f"expert {layer.index(least)}",
                f"{least * len(layer) / sum(layer):.2f} ×",
            ]
        )
    return _table(["Layer", "Busiest", "Load", "Idlest", "Load"], rows)


def _job_html(run: ReportedRun) -> str:
    series = run.series
    groups = [
        ("Job", _flat(_summarised(series.session("job")))),
        ("Model", _flat(series.session("model"))),
        ("Device", _flat(_summarised(series.session("device")))),
        ("Price", _flat(series.session("price"))),
        ("Versions", _flat(series.session("versions"))),
    ]
    columns = ["", ""]
    for title, pairs in groups:
        if pairs:
            rows = "".join(
                f'<tr><th scope="row">{escape(name).replace("_", "_<wbr>")}</th><td>{escape(value)}</td></tr>'
                for name, value in pairs
            )
            table = f'<h3>{title}</h3><div class="scroll"><table class="keys"><tbody>{rows}</tbody></table></div>'
            columns[0 if title == "Job" or not columns[0] else 1] += table
    content = f'<div class="inner-columns"><div>{columns[0]}</div><div>{columns[1]}</div></div>'
    if not any(columns):
        content = _absent("The record has no session row that describes the job.")
    if series.sessions:
        content += "<h3>Sessions</h3>" + _sessions_table(run)
    if series.budgets:
        content += "<h3>Budget</h3>" + _budget_list(run)
    return _section("The run", "", content)


_MODEL_SIZES: Final = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_local_experts",
    "num_experts",
    "num_experts_per_tok",
    "vocab_size",
)


def _summarised(row: Mapping[str, Any]) -> dict[str, Any]:
    """With the model's type and sizes in place of its whole config, and a described card's name in place of its rates."""
    model, gpu = row.get("model"), row.get("gpu")
    shown = dict(row)
    if isinstance(model, dict) and model.get("model_type"):
        sizes = [f"{name} {model[name]}" for name in _MODEL_SIZES if model.get(name) is not None]
        shown["model"] = ", ".join([str(model.get("_name_or_path") or model["model_type"]), *sizes])
    if isinstance(gpu, dict) and gpu.get("name"):
        shown["gpu"] = gpu["name"]
    return shown


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Names and values for reading: nested names joined by points, long collections by their size."""
    pairs: list[tuple[str, str]] = []
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, dict) and 0 < len(item) <= 8:
            pairs += _flat(item, f"{name}.")
        elif isinstance(item, (dict, list)) and len(item) > 8:
            pairs.append((name, f"{len(item):,} entries"))
        elif isinstance(item, list):
            pairs.append((name, ", ".join(_readable(name, one) for one in item)))
        elif item not in (None, "", {}):
            pairs.append((name, _readable(name, item)))
    return pairs


def _readable(name: str, value: object) -> str:
    number = finite(value)
    if isinstance(value, bool) or number is None:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return text if len(text) <= 200 else f"{text[:200]}…"
    if name.endswith("_bytes"):
        return gib(number)
    if name.endswith("flops_per_second"):
        return f"{number / 1e12:,.4g} TFLOP/s"
    if name.endswith("bytes_per_second"):
        return f"{number / 1e9:,.4g} GB/s"
    if "usd_per" in name:
        return usd(number)
    return f"{value:,}" if isinstance(value, int) else f"{number:g}"


def _sessions_table(run: ReportedRun) -> str:
    columns = run.series.columns
    by_session: dict[float, list[float]] = {}  # session_index -> number of steps, seconds
    for index, seconds in zip(columns["session_index"], columns["step_seconds"], strict=True):
        held = by_session.setdefault(index, [0.0, 0.0])
        held[0] += 1
        held[1] += seconds
    rows = []
    for position, session in enumerate(run.series.sessions):
        index = _number_of(session, position)
        num_steps, trained_seconds = by_session.get(index, [0.0, 0.0])
        resumed, startup = finite(session.get("resumed_from_step")), finite(session.get("startup_seconds"))
        device = session.get("device")
        rows.append(
            [
                f"{index + 1:.0f}",
                escape(iso_time(session.get("started_at"))),
                f"{resumed:,.0f}" if resumed is not None else "–",
                f"{num_steps:,.0f}",
                escape(duration(trained_seconds)),
                escape(duration(startup)) if startup is not None else "–",
                escape(str(device.get("name", "–"))) if isinstance(device, dict) else "–",
            ]
        )
    return _table(["Session", "Started", "Resumed from step", "Steps", "In steps", "Start-up", "Device"], rows)


def _number_of(session: Mapping[str, Any], position: int) -> float:
    index = finite(session.get("session_index"))
    return float(position) if index is None else index


def _hours(hours: float) -> str:
    return duration(hours * SECONDS_PER_HOUR)


def _budget_list(run: ReportedRun) -> str:
    items = []
    for row in run.series.budgets:
        text: Callable[[float], str] = usd if row.get("kind") == "usd" else _hours
        limit, spent = finite(row.get("limit")), finite(row.get("spent"))
        said = f"{row.get('threshold', '')} of {text(limit) if limit is not None else 'the budget'}"
        said += f" crossed at step {row.get('global_step', '?')}"
        said += f" with {text(spent)} spent" if spent is not None else ""
        items.append(f"<li>{escape(said)}: {escape(str(row.get('action', '')))}</li>")
    return f'<ul class="notes">{"".join(items)}</ul>'


def _notes_html(run: ReportedRun) -> str:
    notes: list[str] = []
    for session in run.series.sessions:
        for note in session.get("notes") or [] if isinstance(session.get("notes"), list) else []:
            if str(note) not in notes:
                notes.append(str(note))
    for prediction in (run.before, run.tokens_seen):
        warnings = prediction.get("warnings")
        for warning in warnings if isinstance(warnings, list) else []:
            said = f"prediction: {warning}"
            if said not in notes:
                notes.append(said)
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return _section("Not measured, and other notes", "", f'<ul class="notes">{items}</ul>')


# Several runs


def _comparison_html(runs: Sequence[ReportedRun]) -> str:
    head = ["Run", "Spent", "Final or projected", "Predicted", "Over predicted", "Wall time"]
    head += ["Steps", "Step time", "Tokens/s", "MFU", "Peak memory", "Device"]
    rows = [_comparison_row(number, run) for number, run in enumerate(runs, start=1)]
    explanation = "Tokens per second leave padding out. A dash: not measured in that run."
    return f"<h1>{len(runs)} runs side by side</h1>" + _section("Comparison", explanation, _table(head, rows))


def _comparison_row(number: int, run: ReportedRun) -> list[str]:
    predicted, (ratio, _) = finite(run.before.get("total_usd")), plan_ratio(run)
    tokens_per_second = run.tokens_per_second("num_non_padding_tokens")
    peak_bytes = first_known(run.peak_bytes("peak_reserved_bytes"), run.peak_bytes("peak_allocated_bytes"))
    device = run.series.session("device").get("name") or run.series.session("job").get("gpu")
    figures: list[tuple[float | None, Callable[[float], str]]] = [
        (run.totals.spent_usd, usd),
        (run.final_usd, usd),
        (predicted, usd),
        (ratio, "{:.2f}".format),
        (run.totals.wall_seconds, duration),
        (run.num_steps_done, "{:,}".format),
        (run.steady_step_seconds, duration),
        (tokens_per_second, count),
        (run.mfu, percent),
        (peak_bytes, gib),
    ]
    name = escape(run.name) + _range_html(run.series.run_id or _short_path(run.series.path))
    cells = [escape(text(value)) if value is not None else "–" for value, text in figures]
    return [f"{number}. {name}", *cells, escape(str(device)) if device else "–"]


def _tabs_html(runs: Sequence[ReportedRun]) -> str:
    buttons = ""
    for number, run in enumerate(runs, start=1):
        name = " · ".join(part for part in (f"{number}. {run.name}", run.series.run_id) if part)
        buttons += (
            f'<button type="button" role="tab" id="{run.id}-tab" aria-controls="{run.id}" '
            f'aria-selected="{str(number == 1).lower()}">{escape(name)}</button>'
        )
    return f'<div class="tabs needs-js" role="tablist" aria-label="Runs">{buttons}</div>'


def _panels_html(runs: Sequence[ReportedRun], parts: Sequence[str]) -> str:
    return "".join(
        f'<div id="{run.id}" role="tabpanel" aria-labelledby="{run.id}-tab">{part}</div>'
        for run, part in zip(runs, parts, strict=True)
    )
