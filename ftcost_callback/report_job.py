# ruff: noqa: RUF001 - dashes between numbers and the multiplication sign are meant
"""The report's sections on what was run: the job, model, device and versions, sessions, budget, notes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from html import escape
from operator import mul
from typing import Any, Final

from costmodel.units import SECONDS_PER_HOUR
from ftcost_callback.report_markup import absent_html, section_html, table_html
from ftcost_callback.report_numbers import duration, gib, iso_time, usd
from ftcost_callback.report_run import ReportedRun
from ftcost_callback.report_series import finite


def job_html(run: ReportedRun) -> str:
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
        content = absent_html("The record has no session row that describes the job.")
    if series.sessions:
        content += "<h3>Sessions</h3>" + _sessions_table(run)
    if series.budgets:
        content += "<h3>Budget</h3>" + _budget_list(run)
    return section_html("The run", "", content)


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
    by_session: dict[float, tuple[float, float]] = {}  # session_index -> number of steps, seconds in them
    for start, end in run.series.sessions_rows():
        counts, seconds = columns["num_steps"][start:end], columns["step_seconds"][start:end]
        by_session[columns["session_index"][start]] = (math.fsum(counts), math.fsum(map(mul, counts, seconds)))
    rows = []
    costs = [each for each in run.sessions if each.is_recorded]
    for position, session in enumerate(run.series.sessions):
        index = _number_of(session, position)
        num_steps, trained_seconds = by_session.get(index, (0.0, 0.0))
        resumed, startup = finite(session.get("resumed_from_step")), finite(session.get("startup_seconds"))
        device = session.get("device")
        cost = costs[position] if costs else None
        price = cost.usd_per_gpu_hour if cost is not None else None
        rows.append(
            [
                f"{index + 1:.0f}",
                escape(iso_time(session.get("started_at"))),
                f"{resumed:,.0f}" if resumed is not None else "–",
                f"{num_steps:,.0f}",
                escape(duration(trained_seconds)),
                escape(duration(startup)) if startup is not None else "–",
                escape(duration(cost.seconds)) if cost is not None else "–",
                f"{escape(usd(price))}/h" if price is not None else "–",
                escape(usd(cost.usd, of=run.totals.spent_usd)) if cost is not None and cost.usd is not None else "–",
                escape(str(device.get("name", "–"))) if isinstance(device, dict) else "–",
            ]
        )
    head = ["Session", "Started", "Resumed from step", "Steps", "In steps", "Start-up"]
    head += ["Wall time", "Per GPU", "Cost", "Device"]
    return table_html(head, rows)


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


def notes_html(run: ReportedRun) -> str:
    notes: list[str] = []
    for session in run.series.sessions:
        for note in session.get("notes") or [] if isinstance(session.get("notes"), list) else []:
            if str(note) not in notes:
                notes.append(str(note))
    for prediction in (run.before, run.tokens_seen):
        warnings = prediction.get("warnings")
        for warning in warnings if isinstance(warnings, list) else []:
            said = f"prediction: {warning}"
            if said not in notes and str(warning) not in notes:
                notes.append(said)
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return section_html("Not measured, and other notes", "", f'<ul class="notes">{items}</ul>')
