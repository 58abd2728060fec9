"""A run record as one self-contained HTML page, or several runs side by side.

The page opens from disk with no network: style, script and plotly.js stand inside, and its content policy forbids
loading anything else. Every name that comes from a record is escaped. What was not measured is said, never drawn.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from costmodel.errors import CostModelError, MissingExtraError
from costmodel.units import GIB, SECONDS_PER_HOUR
from ftcost_callback.report_series import (
    RunSeries,
    Totals,
    finite,
    pairs_of,
    read_series,
    running_median,
    shorten,
    thin_min_max,
    thin_rows,
    totals,
)

Figure = dict[str, Any]
Point = tuple[float, ...]

BUCKET_NAMES: Final = {
    "train": "Training",
    "data_wait": "Waiting for data",
    "eval": "Evaluation",
    "save": "Saving checkpoints",
    "log": "Logging",
    "startup": "Start-up",
    "other": "Everything else",
}

MEMORY_NAMES: Final = {
    "weights_bytes": "Weights",
    "adapters_bytes": "Adapters",
    "gradients_bytes": "Gradients",
    "optimizer_bytes": "Optimizer",
    "activations_bytes": "Activations",
    "logits_bytes": "Logits",
    "temporary_bytes": "Temporary",
    "context_bytes": "CUDA context",
}

# Bits of nvmlClocksEventReasons that slow a card down. Source: nvml.h, "Clocks event reasons".
THROTTLE_NAMES: Final = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "temperature (driver)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}

LEAST_SHARE_WORTH_SAYING: Final = 0.01
"""A saving below this share of the wall time is not proposed."""


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
    plotly_js = _plotly_js()
    figures: dict[str, Figure] = {}
    runs = [_Run(record, totals(record), f"r{index}") for index, record in enumerate(records)]
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
            '<button id="theme" class="needs-js" type="button" title="Switch between light and dark">Dark</button></div>',
            body,
            f"<footer>Made from {escape(', '.join(_short_path(run.series.path) for run in runs))}. "
            "Measured over predicted: 1.00 is on plan. The page needs no network.</footer>",
            f"<script>{plotly_js}</script>",
            f'<script type="application/json" id="figures">{data}</script>',
            f"<script>{(assets / 'report.js').read_text(encoding='utf-8')}</script>",
            "</body></html>\n",
        )
    )


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise MissingExtraError("plotly", "report", "the HTML report") from None
    return str(get_plotlyjs())


@dataclass(frozen=True)
class _Run:
    """One run with the figures that several sections share."""

    series: RunSeries
    totals: Totals
    id: str

    @property
    def name(self) -> str:
        model = self.series.session("job").get("model")
        if isinstance(model, dict):
            model = model.get("_name_or_path") or model.get("model_type")
        model = model or self.series.session("model").get("class")
        return str(model) if model else f"run {self.series.run_id or self.series.path.stem}"

    @property
    def before(self) -> dict[str, Any]:
        return self.series.prediction("before")

    @property
    def tokens_seen(self) -> dict[str, Any]:
        return self.series.prediction("tokens_seen")

    @property
    def best_prediction(self) -> dict[str, Any]:
        return self.tokens_seen or self.before

    @property
    def num_steps_done(self) -> int | None:
        last = self.series.summary_value("global_step") or max(self.series.measured("global_step"), default=0)
        return int(last) or None

    @property
    def max_steps(self) -> int | None:
        steps = finite(self.series.session_value("max_steps"))
        return int(steps) if steps and steps > 0 else None

    @property
    def status(self) -> str:
        if self.series.summary is None:
            of = f" of {self.max_steps:,}" if self.max_steps else ""
            done = f"step {self.num_steps_done:,}{of}" if self.num_steps_done else "no step was finished"
            return f"no summary yet (running or killed), {done}"
        status = str(self.series.summary.get("status", "finished")).replace("_", " ")
        return f"{status} at step {self.num_steps_done:,}" if self.num_steps_done else status

    @property
    def final_usd(self) -> float | None:
        """Dollars of the whole run: spent when it is over, else projected."""
        return self.totals.spent_usd if self.is_over else self.series.last("projected_total_usd")

    @property
    def final_seconds(self) -> float | None:
        return self.totals.wall_seconds if self.is_over else self.series.last("projected_total_seconds")

    @property
    def is_over(self) -> bool:
        return self.totals.finished

    @property
    def steady_step_seconds(self) -> float | None:
        """Mean step, the first step of each session left out; the summary's own figure where there is one."""
        said = self.series.summary_value("step_seconds_mean")
        if said is not None:
            return said
        columns = self.series.columns
        rows = zip(columns["session_index"], columns["step_seconds"], strict=True)
        kept = [seconds for _, group in groupby(rows, key=lambda row: str(row[0])) for _, seconds in list(group)[1:]]
        kept = kept or self.series.measured("step_seconds")
        return statistics.fmean(kept) if kept else None

    def tokens_per_second(self, name: str) -> float | None:
        """Tokens of that kind over training time (data wait inside, pauses outside), the whole run."""
        said = self.series.summary_value(name.removeprefix("num_") + "_per_second")
        tokens = _first(self.series.summary_value(name), self.series.total(name))
        seconds = _first(self.series.summary_value("train_seconds"), self.series.total("step_seconds"))
        return said if said is not None else tokens / seconds if tokens and seconds else None

    @property
    def mfu(self) -> float | None:
        said = self.series.summary_value("mfu")
        pairs = pairs_of(self.series.columns["step_seconds"], self.series.columns["mfu"])
        seconds = math.fsum(pair[0] for pair in pairs)
        return said if said is not None else math.fsum(a * b for a, b in pairs) / seconds if seconds else None

    def peak_bytes(self, name: str) -> float | None:
        return _first(self.series.summary_value(name), max(self.series.measured(name), default=None))

    @property
    def padding_share(self) -> float | None:
        computed = _first(self.series.summary_value("num_tokens"), self.series.total("num_tokens"))
        kept = _first(self.series.summary_value("num_non_padding_tokens"), self.series.total("num_non_padding_tokens"))
        return max(0.0, 1.0 - kept / computed) if computed and kept is not None else None

    def reason(self, *words: str) -> str | None:
        """The note of the record that says why something is absent."""
        notes = self.series.session_value("notes")
        for note in notes if isinstance(notes, list) else []:
            if any(word in str(note).lower() for word in words):
                return str(note)
        return None


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _memory(prediction: Mapping[str, Any]) -> dict[str, float]:
    memory = prediction.get("memory")
    found = {str(key): finite(value) for key, value in memory.items()} if isinstance(memory, dict) else {}
    return {key: value for key, value in found.items() if value is not None}


# Numbers as people read them. The only place that rounds.


def usd(value: float, *, of: float | None = None) -> str:
    """``$1,234``, ``$12.34``, ``$0.79``, ``$0.0123``: cents, or three significant digits of a smaller sum.

    ``of``: the whole that this is a part of. The parts of one whole then have the same decimals, one more than it.
    """
    size = abs(value if of is None else of)
    if size == 0:
        return "$0"
    digits = 0 if size >= 1000 else 2 if size >= 0.0995 else min(8, 2 - math.floor(math.log10(size)))
    if of is not None and size < 10:
        digits += 1
    return f"{'−' if value < 0 else ''}${abs(value):,.{digits}f}"


def duration(seconds: float) -> str:
    """``850 ms``, ``12.3 s``, ``4 min 05 s``, ``3 h 07 min``, ``2 d 4 h``."""
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def percent(share: float) -> str:
    value = 100 * share
    return (
        "0 %"
        if value == 0
        else "< 0.1 %"
        if 0 < value < 0.1
        else f"{value:.1f} %"
        if value < 99.95
        else f"{value:.0f} %"
    )


def count(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= 0.995 * GIB else f"{num_bytes / 2**20:.0f} MiB"


def _with_unit(text: str) -> str:
    """The same text with its trailing units set small; the text holds no markup."""
    return re.sub(r" ([a-zA-Z%/]+)", r" <small>\1</small>", escape(text))


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


def _legend(*entries: tuple[str, str, str]) -> str:
    """Each entry: mark, colour variable, text (HTML)."""
    items = "".join(
        f'<span><svg width="22" height="12" aria-hidden="true">{_LEGEND_MARKS[mark].format(colour)}</svg>{text}</span>'
        for mark, colour, text in entries
    )
    return f'<div class="legend">{items}</div>'


def _chart(run: _Run, name: str, figure: Figure, figures: dict[str, Figure], label: str, *, low: bool = False) -> str:
    figures[f"{run.id}-{name}"] = figure
    height = f' style="height:{figure["height"]}px"' if "height" in figure else ""
    return (
        f'<div class="chart{" low" if low else ""}" id="{run.id}-{name}" role="img" aria-label="{escape(label)}"{height}>'
        "<noscript>The charts need JavaScript; the numbers on this page do not.</noscript></div>"
    )


def _line(
    points: Sequence[Point],
    colour: str,
    *,
    name: str,
    dash: str = "solid",
    width: float = 2.0,
    column: int = 1,
    **more: Any,
) -> Figure:
    """A curve of ``points`` (x, y, ...). A nan in a point breaks the curve."""
    few = sum(1 for point in points if point[0] == point[0]) < 20
    trace: Figure = {
        "type": "scatter",
        "mode": "lines+markers" if few and dash == "solid" and width else "lines",
        "name": name,
        "x": [_plain(point[0]) for point in points],
        "y": [_plain(point[column]) for point in points],
        "line": {"color": colour, "width": width, "dash": dash},
    }
    return trace | more


def _plain(value: float) -> float | int | None:
    return shorten(value) if math.isfinite(value) else None


def _band(points: Sequence[Point], colour: str, *, low: int, high: int) -> list[Figure]:
    edge = {"hoverinfo": "skip", "name": ""}
    return [
        _line(points, colour, column=low, width=0, **edge),
        _line(points, colour, column=high, width=0, fill="tonexty", fillcolor=colour, **edge),
    ]


# Sections


def _run_html(run: _Run, figures: dict[str, Figure]) -> str:
    return "".join(
        (
            _head_html(run),
            _cards_html(run),
            f'<div class="columns">{_buckets_html(run)}{_savings_html(run)}</div>',
            _cost_html(run, figures),
            _speed_html(run, figures),
            _predictions_html(run),
            f'<div class="columns">{_memory_html(run)}{_gpu_html(run, figures)}</div>',
            _experts_html(run, figures),
            _job_html(run),
            _notes_html(run),
        )
    )


def _head_html(run: _Run) -> str:
    job, device = run.series.session("job"), run.series.session("device")
    gpus = finite(job.get("num_gpus")) or 1
    card = device.get("name") or job.get("gpu")
    method = " ".join(str(part) for part in (job.get("method"), job.get("quantization")) if part)
    facts = [
        method,
        f"{gpus:g} × {card}" if card and gpus > 1 else str(card or ""),
        f"run {run.series.run_id}" if run.series.run_id else "",
        f"{len(run.series.sessions)} sessions" if len(run.series.sessions) > 1 else "",
        f"started {_time(run.series.sessions[0].get('started_at'))}" if run.series.sessions else "",
        run.status,
    ]
    verdict = (run.series.summary or {}).get("verdict") or _verdict(run)
    remarks = "; ".join(run.series.remarks)
    return (
        f'<h1>{escape(run.name)}</h1><p class="facts">{escape(" · ".join(fact for fact in facts if fact))}</p>'
        + (f'<p class="verdict">{escape(str(verdict))}</p>' if verdict else "")
        + (f'<p class="remarks">About this record: {escape(remarks)}.</p>' if remarks else "")
    )


def _time(value: object) -> str:
    """``2026-08-17 09:00 UTC`` from an ISO 8601 time; other text as it stands."""
    text = str(value or "")
    match = re.fullmatch(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)(:\d\d(\.\d+)?)?(Z|\+00:00)", text)
    return f"{match[1]} {match[2]} UTC" if match else text


def _verdict(run: _Run) -> str | None:
    """One sentence for a run that wrote none."""
    cost, predicted = run.final_usd, finite(run.before.get("total_usd"))
    text: Callable[[float], str] = usd
    if cost is None or not predicted:
        cost, predicted, text = run.final_seconds, finite(run.before.get("total_seconds")), duration
    if cost is None or not predicted:
        return None
    verb = "The run took" if run.is_over else "The run is heading for"
    return f"{verb} {text(cost)} against {text(predicted)} predicted: {cost / predicted:.2f} of the plan."


def _card(name: str, value: str | None, note: str = "", *, first: bool = False, absent: str = "not measured") -> str:
    """``value`` is plain text; ``note`` too."""
    shown = (
        f'<div class="value">{_with_unit(value)}</div>' if value else f'<div class="value none">{escape(absent)}</div>'
    )
    return (
        f'<div class="card{" first" if first else ""}"><div class="name">{escape(name)}</div>{shown}'
        f'<div class="note">{escape(note)}</div></div>'
    )


def _range(low: object, high: object, text: Callable[[float], str]) -> str:
    a, b = finite(low), finite(high)
    return f"{text(a)} – {text(b)}" if a is not None and b is not None else ""


def _cards_html(run: _Run) -> str:
    series, sums, before = run.series, run.totals, run.before
    device, price = series.session("device"), series.session("price")
    spent = usd(sums.spent_usd) if sums.spent_usd is not None else None
    hourly = finite(price.get("usd_per_gpu_hour"))
    rate = f"at {usd(hourly)} per GPU hour" if hourly else ""
    projected = series.last("projected_total_usd")
    if run.is_over or projected is None:
        spent_note = ("final, " if run.is_over and spent else "") + rate
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
    ratio, ratio_note = _plan_ratio(run)
    step = run.steady_step_seconds
    tokens, mfu = run.tokens_per_second("num_non_padding_tokens"), run.mfu
    peak_name = "peak_reserved_bytes" if run.peak_bytes("peak_reserved_bytes") else "peak_allocated_bytes"
    peak, peak_predicted = run.peak_bytes(peak_name), _memory(before).get(peak_name)
    peak_flops = finite(device.get("peak_flops_per_second"))
    no_prediction = "none in the record"

    def was_predicted(key: str, text: Callable[[float], str]) -> str:
        value = finite(before.get(key))
        return f"predicted {text(value)}" if value is not None else ""

    cards = (
        _card("Spent" if run.is_over else "Spent so far", spent, spent_note, first=True, absent="no price"),
        _card(
            "Predicted before the run", predicted, predicted_note and interval + predicted_note, absent=no_prediction
        ),
        _card(
            "Measured over predicted" if run.is_over else "Projected over predicted",
            f"{ratio:.2f}" if ratio else None,
            ratio_note,
            absent="no prediction" if not before else "not known yet",
        ),
        _card(
            "Wall time" if run.is_over else "Wall time so far",
            duration(sums.wall_seconds),
            was_predicted("total_seconds", duration),
        ),
        _card(
            "Tokens per second, padding left out",
            count(tokens) if tokens else None,
            was_predicted("non_padding_tokens_per_second", count),
        ),
        _card("Step time, mean", duration(step) if step else None, was_predicted("step_seconds", duration)),
        _card(
            "MFU",
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


def _plan_ratio(run: _Run) -> tuple[float | None, str]:
    """Whole-run cost (dollars, else time) over the prediction before the run, and a note on the later prediction."""

    def ratio(prediction: Mapping[str, Any]) -> float | None:
        predicted_usd, predicted_seconds = finite(prediction.get("total_usd")), finite(prediction.get("total_seconds"))
        if run.final_usd is not None and predicted_usd:
            return run.final_usd / predicted_usd
        return run.final_seconds / predicted_seconds if run.final_seconds is not None and predicted_seconds else None

    first, later = ratio(run.before), ratio(run.tokens_seen)
    return first, f"{later:.2f} on the tokens really seen" if later else "1.00 is on plan" if first else ""


def _buckets_html(run: _Run) -> str:
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


def _savings_html(run: _Run) -> str:
    sums, buckets = run.totals, run.totals.bucket_seconds
    evals, saves = len(run.series.pauses["eval"]), len(run.series.pauses["save"])
    padding = run.padding_share
    found = [
        (
            buckets["data_wait"],
            "Feed the GPU sooner",
            "Each step waited for its batch. More <code>dataloader_num_workers</code>, or tokenise before the run.",
        ),
        (
            (padding or 0.0) * buckets["train"],
            "Compute less padding",
            f"{percent(padding or 0.0)} of the computed tokens were padding. "
            '<code>train_sampling_strategy="group_by_length"</code>, <code>packing</code> or <code>padding_free</code>.',
        ),
        (
            sums.wasted_seconds,
            "Lose fewer steps to an interruption",
            "Steps after the last checkpoint ran twice. A smaller <code>save_steps</code> loses fewer.",
        ),
        (
            buckets["eval"],
            "Evaluate less",
            f"{evals or 'The'} evaluations. Fewer, on fewer samples, or with a larger <code>per_device_eval_batch_size</code>.",
        ),
        (
            buckets["save"],
            "Save less each time",
            f"{saves or 'The'} checkpoints. <code>save_only_model</code>, a larger <code>save_steps</code> or a faster disk.",
        ),
        (
            buckets["startup"],
            "Start faster",
            "Paid before the first step. Keep the model and the tokenised data on a disk of the machine.",
        ),
    ]
    worth = sorted(
        (one for one in found if sums.wall_seconds and one[0] >= LEAST_SHARE_WORTH_SAYING * sums.wall_seconds),
        key=lambda one: -one[0],
    )
    not_counted = "" if padding is not None else _absent("Padding: the record holds no token counts.")
    if not worth:
        return _section("What to change next time", "", _absent("Nothing here is worth 1 % of the run.") + not_counted)

    def saved(seconds: float) -> str:
        dollars = sums.usd(seconds)
        time = escape(duration(seconds))
        return f"{usd(dollars, of=sums.spent_usd)}<small>{time}</small>" if dollars is not None else time

    items = "".join(
        f'<li><div class="saved">{saved(seconds)}</div><div><strong>{title}</strong><div class="why">{why}</div></div></li>'
        for seconds, title, why in worth
    )
    return _section(
        "What to change next time",
        "At most this much in a run like this one. Savings overlap: they do not add up.",
        f'<ul class="savings">{items}</ul>{not_counted}',
    )


def _cost_html(run: _Run, figures: dict[str, Figure]) -> str:
    """Spent, projected with its band and predicted with its band: dollars, or hours when there was no price."""
    columns = run.series.columns
    priced = bool(run.series.measured("spent_usd"))
    names = ("spent_usd", "projected_total_usd") if priced else ("elapsed_seconds", "projected_total_seconds")
    title = "Cost over time" if priced else "Time over steps"
    end = run.totals.wall_seconds
    unit_seconds, unit = (1.0, "s") if end < 180 else (60.0, "min") if end < 3 * 3600 else (SECONDS_PER_HOUR, "h")
    x_name = "elapsed_seconds" if priced and run.series.measured("elapsed_seconds") else "global_step"
    x_unit = unit_seconds if x_name == "elapsed_seconds" else 1.0
    y_unit = 1.0 if priced else unit_seconds
    wanted = (names[0], names[1], names[1] + "_low", names[1] + "_high")
    rows = [
        (x / x_unit, *(value / y_unit for value in values))
        for x, *values in zip(columns[x_name], *(columns[name] for name in wanted), strict=True)
        if x == x
    ]
    rows = thin_rows(rows)
    if not any(row[1] == row[1] for row in rows):
        return _section(title, "", _absent("The step rows say neither dollars nor elapsed time."))

    traces: list[Figure] = []
    legend: list[tuple[str, str, str]] = []
    total_name = "total_usd" if priced else "total_seconds"
    predicted = _scaled(run.before, total_name, y_unit)
    x_end = max(rows[-1][0], end / x_unit) if x_name == "elapsed_seconds" else max(rows[-1][0], run.max_steps or 0)
    x_start = 0.0 if x_name == "elapsed_seconds" else min(rows[0][0], x_end)
    if predicted is not None:
        low, high = _scaled(run.before, total_name + "_low", y_unit), _scaled(run.before, total_name + "_high", y_unit)
        if low is not None and high is not None:
            traces += _band([(x_start, low, high), (x_end, low, high)], "--grey-wash", low=1, high=2)
        traces.append(
            _line([(x_start, predicted), (x_end, predicted)], "--grey", name="predicted", dash="dash", width=1.5)
        )
        legend += [("dash", "--grey", "predicted before the run"), ("band", "--grey-wash", "its interval")]
    if any(row[2] == row[2] for row in rows):
        traces += _band(rows, "--accent-wash", low=3, high=4)
        traces.append(_line(rows, "--accent", name="projected total", column=2, dash="dot", width=1.5))
        legend += [("dot", "--accent", "projected total"), ("band", "--accent-wash", "its band")]
    ends = [*rows]
    if priced and x_name == "elapsed_seconds" and run.series.summary and run.totals.spent_usd is not None:
        ends.append((end / x_unit, run.totals.spent_usd))
    traces.append(_line(ends, "--accent", name="spent" if priced else "elapsed", width=2.5))
    legend.insert(0, ("line", "--accent", "spent" if priced else "elapsed"))
    limit = _budget_limit(run, "usd" if priced else "hours")
    if limit is not None:
        limit = limit if priced else limit * SECONDS_PER_HOUR / y_unit
        traces.append(_line([(x_start, limit), (x_end, limit)], "--text", name="budget", width=1.0, mode="lines"))
        legend.append(("line", "--text", "budget"))
    axis: Figure = {"rangemode": "tozero"}
    axis |= {"tickprefix": "$", "tickformat": _dollar_format(end_usd), "hoverformat": ",.4~f"} if priced else {"ticksuffix": f" {unit}", "hoverformat": ".3~f"}
    x_title = f"wall time, {unit}" if x_name == "elapsed_seconds" else "step"
    figure = {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": x_title}, "range": [x_start, x_end * 1.01 or 1], "hoverformat": ".2~f"},
            "yaxis": axis,
            "shapes": [_resume_line(x) for x in _resume_positions(run, x_name, x_unit)],
        },
    }
    notes = []
    if not run.before:
        notes.append("There is no prediction in this record to compare with.")
    if len(figure["layout"]["shapes"]):
        notes.append("A vertical line marks each resume.")
    chart = _chart(run, "cost", figure, figures, title)
    return _section(title, " ".join(notes), _legend(*legend) + chart)


def _scaled(prediction: Mapping[str, Any], name: str, unit: float) -> float | None:
    value = finite(prediction.get(name))
    return None if value is None else value / unit


def _budget_limit(run: _Run, kind: str) -> float | None:
    said = finite((run.series.session_value("budget") or {}).get(f"budget_{kind}"))
    crossed = [finite(row.get("limit")) for row in run.series.budgets if row.get("kind") == kind]
    return said if said is not None else next((limit for limit in crossed if limit is not None), None)


def _resume_line(x: float) -> Figure:
    line = {"color": "--text", "width": 1, "dash": "dot"}
    return {"type": "line", "x0": shorten(x), "x1": shorten(x), "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _resume_positions(run: _Run, x_name: str, unit: float) -> list[float]:
    """Where a later session begins: at its checkpoint's step, or at its first row's time."""
    if x_name == "global_step":
        steps = (finite(session.get("resumed_from_step")) for session in run.series.sessions)
        return [step / unit for step in steps if step is not None]
    columns = run.series.columns
    starts, previous = [], None
    for session, x in zip(columns["session_index"], columns[x_name], strict=True):
        if previous is not None and session == session and session != previous and x == x:
            starts.append(x / unit)
        previous = session if session == session else previous
    return starts


def _by_session(run: _Run, y: Sequence[float]) -> list[list[tuple[float, float]]]:
    """The measured points (global_step, y), one list for each session that has any."""
    columns = run.series.columns
    groups: list[list[tuple[float, float]]] = []
    previous: float | None = None
    for session, step, value in zip(columns["session_index"], columns["global_step"], y, strict=True):
        if not groups or session != previous:
            groups.append([])
        previous = session
        if value == value:
            groups[-1].append((step, value))
    return [group for group in groups if group]


def _points_and_median(run: _Run, y: Sequence[float]) -> tuple[list[Point], list[Point]]:
    """Thinned raw points, and the running median with a gap between sessions."""
    groups = _by_session(run, y)
    total = sum(len(group) for group in groups)
    raw: list[Point] = []
    median: list[Point] = []
    for group in groups:
        share = max(4, 2000 * len(group) // total)
        raw += thin_min_max(group, share)
        median += running_median(group, share)
        median.append((math.nan, math.nan))
    return raw, median[:-1]


def _axis_top(values: Sequence[float], *more: float | None) -> float:
    """An upper end that single outliers do not stretch."""
    ordered = sorted(values)
    usual = ordered[min(len(ordered) - 1, int(0.985 * len(ordered)))]
    return 1.15 * max([usual, *(value for value in more if value is not None)])


def _speed_html(run: _Run, figures: dict[str, Figure]) -> str:
    columns = run.series.columns
    steps = columns["step_seconds"]
    if not run.series.measured("step_seconds"):
        return _section("Speed", "", _absent("No step has been measured."))
    speed = [
        tokens / seconds if tokens == tokens and seconds > 0 else math.nan
        for tokens, seconds in zip(columns["num_non_padding_tokens"], steps, strict=True)
    ]
    events = bool(run.series.pauses["eval"] or run.series.pauses["save"])
    legend = [("points", "--accent-dots", "steps"), ("line", "--accent", "running median")]
    if finite(run.best_prediction.get("step_seconds")) is not None:
        basis = "on the tokens seen" if run.tokens_seen else "before the run"
        legend += [("dash", "--grey", f"predicted {basis}"), ("band", "--grey-wash", "its interval")]
    notes = ["Pauses are left out of both curves."]
    if any(finite(session.get("resumed_from_step")) is not None for session in run.series.sessions):
        notes.append("A dotted line marks a resume, the shaded steps ran twice.")
    content = _legend(*legend)
    content += "<h3>Seconds per step</h3>" + _chart(
        run, "step", _speed_figure(run, steps, "step_seconds", " s", events=events), figures, "Seconds per step"
    )
    content += "<h3>Tokens per second, padding left out</h3>"
    if any(value == value for value in speed):
        figure = _speed_figure(run, speed, "non_padding_tokens_per_second", "", events=False)
        content += _chart(run, "tokens", figure, figures, "Tokens per second over steps", low=True)
    else:
        content += _absent(
            run.reason("token") or "The step rows hold no token counts: this trainer does not show them."
        )
    return _section("Speed", " ".join(notes), content)


def _speed_figure(run: _Run, y: Sequence[float], predicted_name: str, suffix: str, *, events: bool) -> Figure:
    """One rate over steps with the prediction behind it and, when asked, evaluations and saves in a strip below."""
    raw, median = _points_and_median(run, y)
    prediction = run.best_prediction
    predicted, low, high = (finite(prediction.get(predicted_name + end)) for end in ("", "_low", "_high"))
    last = max(raw[-1][0], run.max_steps or 0)
    first = min(1.0, raw[0][0])
    ends = (first, last)
    traces: list[Figure] = []
    if low is not None and high is not None:
        traces += _band([(x, low, high) for x in ends], "--grey-wash", low=1, high=2)
    if predicted is not None:
        traces.append(_line([(x, predicted) for x in ends], "--grey", name="predicted", dash="dash", width=1.5))
    marker = {"color": "--accent-dots", "size": 4}
    traces.append(_line(raw, "--accent", name="step", mode="markers", marker=marker, width=1))
    if len(raw) >= 5:
        traces.append(_line(median, "--accent", name="running median", width=2.2, mode="lines"))
    top = _axis_top([value for value in y if value == value], high if predicted is not None else None)
    layout: Figure = {
        "xaxis": {"title": {"text": "step"}, "range": [first - 0.01 * (last - first) - 0.5, last + 0.5]},
        "yaxis": {"range": [0, shorten(top)], "ticksuffix": suffix, "hoverformat": ".4~g", "separatethousands": True},
        "shapes": [_resume_line(x) for x in _resume_positions(run, "global_step", 1.0)] + _repeated_shapes(run),
    }
    if events:
        layout["yaxis"]["domain"] = [0.2, 1]
        layout["xaxis"]["anchor"] = "y2"
        layout["yaxis2"] = {
            "domain": [0, 0.12], "range": [-0.6, 1.6], "tickvals": [0, 1], "ticktext": ["save", "eval"],
            "showgrid": False, "fixedrange": True,
        }  # fmt: skip
        for row, kind in enumerate(("save", "eval")):
            points = thin_min_max([(float(step), seconds) for step, seconds in run.series.pauses[kind]])
            traces.append(
                {
                    "type": "scatter", "mode": "markers", "name": kind, "yaxis": "y2",
                    "x": [int(step) for step, _ in points], "y": [row] * len(points),
                    "customdata": [duration(seconds) for _, seconds in points],
                    "hovertemplate": "%{customdata}",
                    "marker": {"symbol": "line-ns-open", "size": 10, "color": "--muted", "line": {"width": 1.6}},
                }
            )  # fmt: skip
    return {"data": traces, "layout": layout}


def _repeated_shapes(run: _Run) -> list[Figure]:
    """A shaded stretch for each session's steps that had been done before."""
    columns = run.series.columns
    spans: dict[float, tuple[float, float]] = {}
    for session, step, repeated in zip(
        columns["session_index"], columns["global_step"], columns["repeated"], strict=True
    ):
        if repeated == 1:
            first, last = spans.get(session, (step, step))
            spans[session] = (min(first, step), max(last, step))
    return [
        {"type": "rect", "layer": "below", "yref": "paper", "y0": 0, "y1": 1, "x0": first - 0.5, "x1": last + 0.5,
         "fillcolor": "--grey-wash", "line": {"width": 0}}
        for first, last in spans.values()
    ]  # fmt: skip


def _predictions_html(run: _Run) -> str:
    title = "Predicted and measured"
    if not run.series.predictions:
        said = run.reason("predict", "estimate") or "There is no prediction in this record."
        return _section(title, "", _absent(said))
    whole = "Whole run" if run.is_over else "Whole run, projected"
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
            source = prediction if key in prediction else _memory(prediction)
            predicted = finite(source.get(key))
            known = known or predicted is not None
            span = _range(source.get(key + "_low"), source.get(key + "_high"), text)
            cells.append("–" if predicted is None else escape(text(predicted)) + _range_html(span))
            cells.append(f"{value / predicted:.2f}" if value is not None and predicted else "–")
        if known:
            rows.append([name, escape(text(value)) if value is not None else "–", *cells])
    head = ["", "Measured" if run.is_over else "Measured so far"]
    for _, text_of_basis in bases:
        head += [f"Predicted {text_of_basis}", "Measured over predicted"]
    bound = run.best_prediction.get("step")
    bound = bound.get("bound_by") if isinstance(bound, dict) else None
    bound_text = f" The step was expected to be bound by {escape(str(bound)).replace('_', ' ')}." if bound else ""
    return _section(title, f"1.00 is on plan.{bound_text}", _table(head, rows))


def _range_html(span: str) -> str:
    return f'<span class="range">{escape(span)}</span>' if span else ""


def _memory_html(run: _Run) -> str:
    prediction = run.before or run.tokens_seen
    memory = _memory(prediction)
    parts = [(index, key, memory[key]) for index, key in enumerate(MEMORY_NAMES, start=1) if memory.get(key)]
    measured = [
        (text, value)
        for text, value in (
            ("Reserved", run.peak_bytes("peak_reserved_bytes")),
            ("Allocated", run.peak_bytes("peak_allocated_bytes")),
            ("Device, in use", max(run.series.measured("memory_used_bytes"), default=None)),
        )
        if value
    ]
    absent = "" if measured else _absent(
        run.reason("memory", "gpu", "nvml") or "Peak memory was not measured: torch keeps no peaks on this device."
    )  # fmt: skip
    if not parts and not measured:
        return _section("Memory", "", absent)
    capacity = memory.get("capacity_bytes") or finite(run.series.session("device").get("memory_bytes"))
    predicted = memory.get("peak_device_bytes") or sum(value for _, _, value in parts)
    low, high = memory.get("peak_device_bytes_low"), memory.get("peak_device_bytes_high")
    scale = 1.02 * max([capacity or 0.0, predicted, high or 0.0, *(value for _, value in measured)])

    def at(value: float) -> str:
        return f"{100 * value / scale:.2f}%"

    limit = f'<i class="limit" style="left:{at(capacity)}"></i>' if capacity else ""
    gauge = ""
    if parts:
        bar = "".join(
            f'<i class="part-{part}" style="width:{at(value)}" title="{MEMORY_NAMES[key]}: {gib(value)}"></i>'
            for part, key, value in parts
        )
        whisker = (
            f'<i class="whisker" style="left:{at(low)};width:{at(high - low)}" title="{escape(_range(low, high, gib))}"></i>'
            if low and high and high > low
            else ""
        )
        gauge += f'<div class="row"><div>Predicted</div><div class="track"><div class="bar">{bar}</div>{whisker}{limit}</div></div>'
    for text, value in measured:
        wide = value > 0.6 * scale
        place = f"right:{100 - 100 * value / scale:.2f}%" if wide else f"left:{at(value)}"
        gauge += (
            f'<div class="row"><div>{text}</div><div class="track"><div class="bar">'
            f'<i class="part-1" style="width:{at(value)}"></i></div>'
            f'<span class="value{" inside" if wide else ""}" style="{place}">{gib(value)}</span>{limit}</div></div>'
        )
    if capacity:
        gauge += (
            '<div class="row"><div></div><div class="axis">'
            f'<span style="left:{at(capacity)}">the card: {gib(capacity)}</span></div></div>'
        )
    explanation = "Peak of the run against the prediction"
    phase = prediction.get("memory", {}).get("peak_phase") if parts else None
    explanation += f", which expected it in the {escape(str(phase))} phase." if phase else "."
    rows = [[_swatch(part) + MEMORY_NAMES[key], gib(value)] for part, key, value in parts]
    table = _table(["Predicted at the peak", "Size"], rows, total=["On the device", gib(predicted)]) if parts else _absent(
        "There is no prediction in this record to split the peak by category."
    )  # fmt: skip
    return _section("Memory", explanation, f'<div class="gauge">{gauge}</div>{table}{absent}')


def _gpu_html(run: _Run, figures: dict[str, Figure]) -> str:
    curves = [
        ("busy_fraction", "a kernel was running", "--accent", "solid"),
        ("sm_active_fraction", "multiprocessors active", "--grey", "solid"),
    ]
    content = ""
    have = [curve for curve in curves if run.series.measured(curve[0])]
    if have:
        traces = []
        for name, text, colour, dash in have:
            _, median = _points_and_median(run, run.series.columns[name])
            points = [(x, 100 * y) for x, y in median]
            traces.append(_line(points, colour, name=text, dash=dash))
        axis = {"range": [0, 102], "ticksuffix": " %", "hoverformat": ".1f"}
        figure: Figure = {"data": traces, "layout": {"xaxis": {"title": {"text": "step"}}, "yaxis": axis}}
        content += "<h3>In use, running median</h3>" + _legend(
            *((("line"), colour, text) for _, text, colour, _ in have)
        )
        content += _chart(run, "gpu", figure, figures, "GPU use over steps", low=True)
    if run.series.measured("power_watts"):
        _, median = _points_and_median(run, run.series.columns["power_watts"])
        limit = finite(run.series.session("device").get("tdp_watts"))
        traces = [_line(median, "--accent", name="power")]
        top = _axis_top(run.series.measured("power_watts"), limit and limit / 1.1)
        if limit:
            ends = [(x, limit) for x in (median[0][0], median[-1][0])]
            traces.append(_line(ends, "--grey", name="rated", dash="dash", width=1.5))
        axis = {"range": [0, shorten(top)], "ticksuffix": " W", "hoverformat": ".0f"}
        figure = {"data": traces, "layout": {"xaxis": {"title": {"text": "step"}}, "yaxis": axis}}
        rated = [("dash", "--grey", "the card's rated power")] if limit else []
        content += "<h3>Power, running median</h3>" + _legend(("line", "--accent", "power"), *rated)
        content += _chart(run, "power", figure, figures, "Power over steps", low=True)
    if not content:
        said = (
            run.reason("gpu", "nvml", "nvidia")
            or "The record holds no GPU samples (no NVIDIA driver, or no permission)."
        )
        return _section("GPU", "", _absent(said))
    facts = []
    energy = _first(run.series.summary_value("energy_joules"), run.series.total("energy_joules"))
    if energy:
        facts.append(f"Energy of the training steps: {energy / 3.6e6:.3g} kWh.")
    throttled = [int(value) for value in run.series.measured("throttle_reasons")]
    for bit, name in THROTTLE_NAMES.items():
        slowed = sum(1 for value in throttled if value & bit)
        if slowed:
            facts.append(f"Slowed down by {name} in {percent(slowed / run.series.num_step_rows)} of the steps.")
    return _section("GPU", " ".join(facts), content)


def _experts_html(run: _Run, figures: dict[str, Figure]) -> str:
    experts = run.series.experts
    reasons = "; ".join(experts.reasons)
    if not experts.frames:
        has_experts = finite(run.series.session("model").get("num_experts"))
        why = reasons or run.reason("expert", "router")
        if not why and has_experts is None:
            why = "No expert loads in this record: the model is dense, or they were switched off."
        return _section("Expert load", "", _absent(why or "The model has experts, but their loads were not recorded."))
    frames, peak = _heat_frames(run)
    num_experts = max(len(layer) for layer in experts.frames[0][2])
    top = max(2.0, peak)
    height = max(230, min(640, 74 + 13 * len(experts.layer_names)))
    numbers = [re.search(r"\d+", name) for name in experts.layer_names]
    labels = [match[0] if match else str(index) for index, match in enumerate(numbers)]
    if len(set(labels)) < len(labels):
        labels = [str(index) for index in range(len(labels))]
    every = max(1, math.ceil(len(labels) / 16))
    figure: Figure = {
        "height": height,
        "frames": frames,
        "data": [
            {
                "type": "heatmap",
                "z": [],
                "zmin": 0,
                "zmax": shorten(top),
                "colorscale": [[0, "--heat-low"], [1 / top, "--heat-mid"], [1, "--accent"]],
                "xgap": 1 if num_experts <= 64 else 0,
                "ygap": 1,
                "customdata": [[escape(name)] * num_experts for name in experts.layer_names],
                "hovertemplate": "%{customdata}<br>expert %{x}: %{z:.2f} × the layer's mean<extra></extra>",
                "colorbar": {"thickness": 10, "outlinewidth": 0, "len": 1, "ticksuffix": " ×", "nticks": 6},
            }
        ],
        "layout": {
            "hovermode": "closest",
            "xaxis": {"title": {"text": "expert"}, "showgrid": False, "ticks": "", "nticks": min(num_experts, 16) + 1},
            "yaxis": {
                "title": {"text": "layer"}, "autorange": "reversed", "showgrid": False, "ticks": "",
                "tickvals": list(range(0, len(labels), every)), "ticktext": labels[::every],
            },
        },
    }  # fmt: skip
    last = len(frames) - 1
    slider = (
        f'<div class="slider needs-js"><label for="{run.id}-time">Time</label><input type="range" id="{run.id}-time" '
        f'min="0" max="{last}" value="{last}" step="1" data-chart="{run.id}-experts"><output></output></div>'
    )
    mean = pairs_of(experts.global_step, experts.mean_max_over_mean)
    worst = pairs_of(experts.global_step, experts.worst_max_over_mean)
    curves = [
        _line(running_or_raw(worst), "--grey", name="worst layer", width=1.6),
        _line(running_or_raw(mean), "--accent", name="mean over layers"),
    ]
    curve_figure: Figure = {
        "data": curves,
        "layout": {"xaxis": {"title": {"text": "step"}}, "yaxis": {"ticksuffix": " ×", "hoverformat": ".2f"}},
    }
    legend = _legend(("line", "--accent", "mean over layers"), ("line", "--grey", "worst layer"))
    partial = _absent(f"Partly recorded: {reasons}") if reasons else ""
    heat = "<h3>Tokens of each expert, over its layer's mean</h3>" + slider
    heat += _chart(run, "experts", figure, figures, "Expert load by layer and expert")
    curve = "<h3>Largest load over mean load</h3>" + legend
    curve += _chart(run, "load", curve_figure, figures, "Largest over mean expert load over steps")
    explanation = "1 × is an even share; the busiest expert of a layer sets the pace where experts run side by side."
    return _section(
        "Expert load", explanation, f'{partial}<div class="inner-columns"><div>{heat}</div><div>{curve}</div></div>'
    )


def running_or_raw(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points as they are while they can be drawn, their running median beyond."""
    return points if len(points) <= 2000 else running_median(points)


def _heat_frames(run: _Run) -> tuple[list[Figure], float]:
    """One frame for each stretch of steps: load over the layer's mean, and what its label says. And the largest load."""
    experts = run.series.experts
    frames: list[Figure] = []
    peak = 0.0
    for first, last, tokens in experts.frames:
        ratios = [[load * len(layer) / sum(layer) if sum(layer) else None for load in layer] for layer in tokens]
        known = [
            (ratio, row, column) for row, layer in enumerate(ratios) for column, ratio in enumerate(layer) if ratio
        ]
        largest, row, column = max(known, default=(0.0, 0, 0))
        peak = max(peak, largest)
        steps = f"Up to step {last:,}" if first == last else f"Up to steps {first:,} – {last:,}"
        label = f"{steps}. Largest: {largest:.2f} × in {experts.layer_names[row]}, expert {column}."
        z = [[None if ratio is None else round(ratio, 3) for ratio in layer] for layer in ratios]
        frames.append({"label": label, "z": z})
    return frames, peak


def _job_html(run: _Run) -> str:
    series = run.series
    groups = [
        ("Job", _flat(series.session("job"))),
        ("Model", _flat(series.session("model"))),
        ("Device", _flat(series.session("device"))),
        ("Price", _flat(series.session("price"))),
        ("Versions", _flat(series.session("versions"))),
    ]
    columns = ["", ""]
    for title, pairs in groups:
        if pairs:
            rows = "".join(
                f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in pairs
            )
            table = f'<h3>{title}</h3><div class="scroll"><table class="keys"><tbody>{rows}</tbody></table></div>'
            columns[0 if title == "Job" else 1] += table
    content = f'<div class="inner-columns"><div>{columns[0]}</div><div>{columns[1]}</div></div>'
    if not any(columns):
        content = _absent("The record has no session row that describes the job.")
    if series.sessions:
        content += "<h3>Sessions</h3>" + _sessions_table(run)
    if series.budgets:
        content += "<h3>Budget</h3>" + _budget_list(run)
    return _section("The run", "", content)


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
        elif item is not None and item != {}:
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


def _sessions_table(run: _Run) -> str:
    columns = run.series.columns
    by_session: dict[float, list[float]] = {}  # session_index -> number of steps, seconds
    for index, seconds in zip(columns["session_index"], columns["step_seconds"], strict=True):
        held = by_session.setdefault(index, [0, 0.0])
        held[0] += 1
        held[1] += seconds
    rows = []
    for position, session in enumerate(run.series.sessions):
        index = finite(session.get("session_index"))
        steps, seconds = by_session.get(position if index is None else index, [0, 0.0])
        resumed, startup = finite(session.get("resumed_from_step")), finite(session.get("startup_seconds"))
        device = session.get("device")
        rows.append(
            [
                str(int(index if index is not None else position) + 1),
                escape(_time(session.get("started_at"))),
                f"{resumed:,.0f}" if resumed is not None else "–",
                f"{steps:,.0f}",
                escape(duration(seconds)),
                escape(duration(startup)) if startup is not None else "–",
                escape(str(device.get("name", "–"))) if isinstance(device, dict) else "–",
            ]
        )
    return _table(["Session", "Started", "Resumed from step", "Steps", "In steps", "Start-up", "Device"], rows)


def _budget_list(run: _Run) -> str:
    items = []
    for row in run.series.budgets:
        text = usd if row.get("kind") == "usd" else lambda hours: duration(hours * SECONDS_PER_HOUR)
        limit, spent = finite(row.get("limit")), finite(row.get("spent"))
        said = f"{row.get('threshold', '')} of {text(limit) if limit is not None else 'the budget'}"
        said += f" crossed at step {row.get('global_step', '?')}"
        said += f" with {text(spent)} spent" if spent is not None else ""
        items.append(f"<li>{escape(said)}: {escape(str(row.get('action', '')))}</li>")
    return f'<ul class="notes">{"".join(items)}</ul>'


def _notes_html(run: _Run) -> str:
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


def _comparison_html(runs: Sequence[_Run]) -> str:
    rows = []
    for run in runs:
        ratio, _ = _plan_ratio(run)
        spent, final, predicted = run.totals.spent_usd, run.final_usd, finite(run.before.get("total_usd"))
        step, tokens, mfu = run.steady_step_seconds, run.tokens_per_second("num_non_padding_tokens"), run.mfu
        peak = _first(run.peak_bytes("peak_reserved_bytes"), run.peak_bytes("peak_allocated_bytes"))
        device = run.series.session("device").get("name") or run.series.session("job").get("gpu")
        shown = [
            usd(spent) if spent is not None else None,
            usd(final) if final is not None else None,
            usd(predicted) if predicted is not None else None,
            f"{ratio:.2f}" if ratio is not None else None,
            duration(run.totals.wall_seconds),
            f"{run.num_steps_done:,}" if run.num_steps_done else None,
            duration(step) if step else None,
            count(tokens) if tokens else None,
            percent(mfu) if mfu is not None else None,
            gib(peak) if peak else None,
            str(device) if device else None,
        ]
        name = (
            f'{escape(run.name)}<span class="range">{escape(run.series.run_id or _short_path(run.series.path))}</span>'
        )
        rows.append([name, *(escape(cell) if cell is not None else "–" for cell in shown)])
    head = ["Run", "Spent", "Final or projected", "Predicted", "Over predicted", "Wall time", "Steps", "Step time",
            "Tokens/s", "MFU", "Peak memory", "Device"]  # fmt: skip
    explanation = "Tokens per second leave padding out. A dash: not measured in that run."
    return f"<h1>{len(runs)} runs side by side</h1>" + _section("Comparison", explanation, _table(head, rows))


def _tabs_html(runs: Sequence[_Run]) -> str:
    buttons = "".join(
        f'<button type="button" role="tab" aria-selected="{str(index == 0).lower()}" aria-controls="{run.id}" '
        f'id="{run.id}-tab">{escape(run.name)}{" · " + escape(run.series.run_id) if run.series.run_id else ""}</button>'
        for index, run in enumerate(runs)
    )
    return f'<div class="tabs needs-js" role="tablist" aria-label="Runs">{buttons}</div>'


def _panels_html(runs: Sequence[_Run], parts: Sequence[str]) -> str:
    return "".join(
        f'<div id="{run.id}" role="tabpanel" aria-labelledby="{run.id}-tab">{part}</div>'
        for run, part in zip(runs, parts, strict=True)
    )
