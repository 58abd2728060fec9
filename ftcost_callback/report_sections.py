# ruff: noqa: RUF001 - dashes between numbers and the multiplication sign are meant
"""One run's part of the page: its heading and cards, where the money went, cost, speed, predicted beside measured."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable
from html import escape
from typing import Final

from ftcost_callback.report_breakdown import breakdown_html
from ftcost_callback.report_figures import Figure, cost_figure, rate_figure
from ftcost_callback.report_hardware import experts_html, gpu_html, memory_html
from ftcost_callback.report_job import job_html, notes_html
from ftcost_callback.report_markup import (
    absent_html,
    chart_html,
    legend_html,
    range_html,
    range_text,
    section_html,
    swatch_html,
    table_html,
)
from ftcost_callback.report_numbers import count, duration, gib, iso_time, percent, usd
from ftcost_callback.report_run import ReportedRun, plan_ratio, predicted_memory, savings
from ftcost_callback.report_series import finite

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


def run_html(run: ReportedRun, figures: dict[str, Figure]) -> str:
    return "".join(
        (
            _head_html(run),
            _cards_html(run),
            f'<div class="columns">{_buckets_html(run)}{_savings_html(run)}</div>',
            _cost_html(run, figures),
            _speed_html(run, figures),
            _predictions_html(run),
            breakdown_html(run),
            f'<div class="columns">{memory_html(run)}{gpu_html(run, figures)}</div>',
            experts_html(run, figures),
            job_html(run),
            notes_html(run),
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
    if cost is None or not predicted or not run.compares_dollars:
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


def _with_unit(text: str) -> str:
    """The same text with its units set small; the text holds no markup."""
    return re.sub(r"( [a-zA-Z%/]+)( ?)", r"<small>\1\2</small>", escape(text))


def _cards_html(run: ReportedRun) -> str:
    series, sums, before = run.series, run.totals, run.before
    device = series.session("device")
    spent = usd(sums.spent_usd) if sums.spent_usd is not None else None
    rate = run.prices_text
    projected = series.last("projected_total_usd")
    if run.is_complete or projected is None:
        spent_note = ("final, " if run.is_complete and spent else "") + rate
    else:
        band = range_text(series.last("projected_total_usd_low"), series.last("projected_total_usd_high"), usd)
        spent_note = f"projected total {usd(projected)}" + (f" ({band})" if band else "")
    if spent is None:
        spent_note = "give usd_per_gpu_hour, or cloud and tier"

    level = finite(before.get("interval_level"))
    interval = f"{level:.0%} interval ".replace("%", " %") if level else ""
    predicted_usd, predicted_seconds = finite(before.get("total_usd")), finite(before.get("total_seconds"))
    if predicted_usd is not None and spent is not None:
        predicted: str | None = usd(predicted_usd)
        predicted_note = range_text(before.get("total_usd_low"), before.get("total_usd_high"), usd)
    else:
        predicted = duration(predicted_seconds) if predicted_seconds is not None else None
        predicted_note = range_text(before.get("total_seconds_low"), before.get("total_seconds_high"), duration)
    predicted_note = predicted_note and interval + predicted_note
    if not run.compares_dollars and spent is not None and predicted is not None:
        predicted_note += ", all at the last price" if predicted_note else "all at the last price"
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
        _card(f"Predicted {run.basis_of_before}", predicted, predicted_note, absent=no_prediction),
        _card(
            "Total, measured over predicted" if run.is_complete else "Total, projected over predicted",
            f"{ratio:.2f}" if ratio else None,
            ratio_note,
            absent="no prediction" if predicted is None else "not comparable" if run.predicted_gpu else "not known yet",
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
        return section_html(title, "", absent_html("No time has been measured yet."))
    shown = [(index, name, sums.bucket_seconds[name]) for index, name in enumerate(BUCKET_NAMES, start=1)]
    bar = "".join(
        f'<i class="part-{part}" style="width:{100 * seconds / sums.wall_seconds:.3f}%" '
        f'title="{BUCKET_NAMES[name]}: {percent(seconds / sums.wall_seconds)}"></i>'
        for part, name, seconds in shown
        if seconds > 0
    )

    def row(label: str, seconds: float, dollars: float | None) -> list[str]:
        cost = [usd(dollars or 0.0, of=sums.spent_usd)] if priced else []
        return [label, duration(seconds), percent(seconds / sums.wall_seconds), *cost]

    rows = [
        row(swatch_html(part) + BUCKET_NAMES[name], seconds, run.bucket_usd.get(name))
        for part, name, seconds in shown
        if seconds > 0
    ]
    head = ["Bucket", "Time", "Share", *(["Cost"] if priced else [])]
    waste = (
        f'<p class="sub">Of this, {escape(duration(sums.wasted_seconds))} was done twice after a resume.</p>'
        if sums.wasted_seconds > 0
        else ""
    )
    table = table_html(head, rows, total=row("Wall time", sums.wall_seconds, sums.spent_usd))
    explanation = "" if run.compares_dollars else "Each session at its own price."
    return section_html(title, explanation, f'<div class="bar">{bar}</div>{table}{waste}')


def _savings_html(run: ReportedRun) -> str:
    title = "What to change next time"
    found = savings(run)
    missing = "" if run.padding_share is not None else absent_html("Padding: the record holds no token counts.")
    if not found:
        return section_html(title, "", absent_html("Nothing in the record is worth 1 % of the run.") + missing)
    items = ""
    for saving in found:
        time, of_bucket = escape(duration(saving.seconds)), run.totals.bucket_seconds[saving.bucket]
        if saving.bucket in run.bucket_usd and of_bucket > 0:
            dollars = run.bucket_usd[saving.bucket] * saving.seconds / of_bucket
            time = f"{usd(dollars, of=run.totals.spent_usd)}<small>{time}</small>"
        why = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(saving.advice, quote=False))
        items += (
            f'<li><div class="saved">{time}</div>'
            f'<div><strong>{escape(saving.title)}</strong><div class="why">{why}</div></div></li>'
        )
    explanation = "At most this much in a run like this one. Savings overlap: they do not add up."
    return section_html(title, explanation, f'<ul class="savings">{items}</ul>{missing}')


def _cost_html(run: ReportedRun, figures: dict[str, Figure]) -> str:
    found = cost_figure(run)
    title = "Cost over time" if run.totals.spent_usd is not None else "Time over steps"
    if found is None:
        return section_html(title, "", absent_html("The step rows say neither dollars nor elapsed time."))
    figure, legend = found
    notes = [] if run.before else ["There is no prediction in this record to compare with."]
    if figure["layout"]["shapes"]:
        notes.append("A dotted vertical line marks a resume.")
    return section_html(title, " ".join(notes), legend_html(legend) + chart_html(run, "cost", figure, figures, title))


def _speed_html(run: ReportedRun, figures: dict[str, Figure]) -> str:
    seconds = run.series.columns["step_seconds"]
    if not run.series.measured("step_seconds"):
        return section_html("Speed", "", absent_html("No step has been measured."))
    notes = ["Pauses are left out of both curves."]
    if any(finite(session.get("resumed_from_step")) is not None for session in run.series.sessions):
        notes.append("A dotted line marks a resume; shaded steps ran twice.")
    figure, legend = rate_figure(run, seconds, "step_seconds", with_pauses=True)
    content = (
        legend_html(legend) + "<h3>Seconds per step</h3>" + chart_html(run, "step", figure, figures, "Seconds per step")
    )
    content += "<h3>Tokens per second, padding left out</h3>"
    speed = array(
        "d",
        (
            tokens / step if step > 0 else math.nan
            for tokens, step in zip(run.series.columns["num_non_padding_tokens"], seconds, strict=True)
        ),
    )
    if any(value == value for value in speed):
        figure, _ = rate_figure(run, speed, "non_padding_tokens_per_second", with_pauses=False)
        content += chart_html(run, "tokens", figure, figures, "Tokens per second over steps", low=True)
    else:
        content += absent_html(run.reason("token") or "The step rows hold no token counts: this trainer does not show them.")
    return section_html("Speed", " ".join(notes), content)


def _predictions_html(run: ReportedRun) -> str:
    title = "Predicted and measured"
    if not run.series.predictions:
        said = run.reason("predict", "estimate") or "There is no prediction in this record."
        return section_html(title, "", absent_html(said))
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
    bases = [(run.before, run.basis_of_before), (run.tokens_seen, "on the tokens seen")]
    bases = [(prediction, text) for prediction, text in bases if prediction]
    rows, is_predicted = [], False
    for name, key, value, text in measured:
        cells, known = [], value is not None
        for prediction, _ in bases:
            source = prediction if key in prediction else predicted_memory(prediction)
            predicted = finite(source.get(key))
            known, is_predicted = known or predicted is not None, is_predicted or predicted is not None
            span = range_text(source.get(key + "_low"), source.get(key + "_high"), text)
            cells.append("–" if predicted is None else escape(text(predicted)) + range_html(span))
            comparable = value is not None and predicted and run.predicted_gpu is None
            comparable = comparable and (run.compares_dollars or key != "total_usd")
            cells.append(f"{value / predicted:.2f}" if comparable and value and predicted else "–")
        if known:
            rows.append([name, escape(text(value)) if value is not None else "–", *cells])
    if not is_predicted:  # on a CPU only the tokens of a step are
        return section_html(title, "", absent_html("Neither time nor memory was predicted: the notes below say why."))
    head = ["", "Measured" if run.is_complete else "Measured so far"]
    for _, text_of_basis in bases:
        head += [f"Predicted {text_of_basis}", "Measured over predicted"]
    bound = run.best_prediction.get("step")
    bound = bound.get("bound_by") if isinstance(bound, dict) else None
    bound_text = f" The step was expected to be bound by {escape(str(bound)).replace('_', ' ')}." if bound else ""
    explanation = "1.00 is on plan. "
    if run.predicted_gpu is not None:
        explanation = f"The prediction is for {escape(run.predicted_gpu)}, which did not train: it is not comparable. "
    if not run.compares_dollars:
        explanation += "The price changed, and predicted dollars are all at the last one: times are compared. "
    explanation += "Step time and rates leave out the first step of each session and all pauses."
    if run.sessions_in_rates:
        explanation += f" They are of the {run.sessions_in_rates}, on one machine."
    return section_html(title, explanation + bound_text, table_html(head, rows))
