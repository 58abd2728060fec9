"""The report's tables of where a step's seconds went: by pass, and of profiled steps by layer type and operator, beside the
prediction for the same groups; and what an uneven expert load meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from ftcost_callback.comparison import GROUP_NAMES
from ftcost_callback.report_markup import section_html, table_html
from ftcost_callback.report_numbers import duration, percent, usd
from ftcost_callback.report_run import ReportedRun
from ftcost_callback.report_series import finite

_PHASES: Final = (("Forward", "forward_seconds"), ("Backward", "backward_seconds"), ("Optimizer", "optimizer_seconds"))

_LIKE: Final = 0.05  # what two stretches of steps differ by without a change

_NAMES: Final = {  # layer types and operators whose own name says too little
    "mlp": "MLP",
    "head_and_loss": "head and loss",
    "adapters": "LoRA adapters",
    "adapter_merge": "merging LoRA into the experts",
    "mixers": "mixers (Mamba, linear attention)",
    "host": "Python, launches, views",
    "idle": "the GPU waits for the host",
    "matmul": "matrix products",
    "top_k": "top-k and sorting",
    "copy_and_cast": "copies and casts",
    "gather_scatter": "gather and scatter",
}


def breakdown_html(run: ReportedRun) -> str:
    """Empty: not measured."""
    content = _phases(run)
    for profile in run.series.profiles[-1:]:
        content += _profile(run, profile)
    explanation = "Data wait is left out." if content else ""
    return section_html("Inside a step", explanation, content) if content else ""


def _phases(run: ReportedRun) -> str:
    predicted = _mapping(run.best_prediction.get("step"))
    rows = []
    for name, key in _PHASES:
        measured = run.series.summary_value(f"{key}_mean")
        if measured is None:
            values = run.series.measured(key)
            measured = sum(values) / len(values) if values else None
        if measured is not None:
            rows.append([name, escape(duration(measured)), *_against(measured, finite(predicted.get(key)))])
    if not rows:
        return ""
    if not any(finite(predicted.get(key)) for _, key in _PHASES):
        return table_html(["", "Measured"], [row[:2] for row in rows])
    return table_html(["", "Measured", "Predicted", "Measured over predicted"], rows)


def _against(measured: float, predicted: float | None) -> list[str]:
    if not predicted:
        return ["–", "–"]  # noqa: RUF001 - a dash for what is not known
    return [escape(duration(predicted)), f"{measured / predicted:.2f}"]


def _profile(run: ReportedRun, profile: Mapping[str, Any]) -> str:
    step, count, last = (finite(profile.get(name)) for name in ("step_seconds", "num_steps", "global_step"))
    if not step or not count or last is None:
        return ""
    first = last - count + 1
    title = f"Steps {first:.0f} to {last:.0f} under the profiler"
    content = f"<h3>{title}</h3>"
    steady = run.steady_step_seconds
    slower = f"; a step without the profiler takes {escape(duration(steady))}" if steady else ""
    content += f'<p class="sub">Means of a step of {escape(duration(step))}{slower}.</p>'
    if profile.get("reason"):
        content += f'<p class="absent">{escape(str(profile["reason"]))}</p>'
    columns = [
        _shares("Layer type", _mapping(profile.get("layer_type_seconds")), step),
        _shares("Operator", _mapping(profile.get("operator_seconds")), step),
    ]
    content += '<div class="inner-columns">' + "".join(f"<div>{column}</div>" for column in columns if column) + "</div>"
    return content + _groups(run, _mapping(profile.get("by_group_seconds")), step)


def _shares(head: str, seconds: Mapping[str, Any], step: float) -> str:
    known = _by_size(seconds)
    rows = [[_name(name), escape(duration(value)), escape(percent(value / step))] for name, value in known]
    total = ["Step", escape(duration(step)), escape(percent(sum(value for _, value in known) / step))]
    return table_html([head, "Time", "Share"], rows, total=total) if rows else ""


def _groups(run: ReportedRun, measured: Mapping[str, Any], step: float) -> str:
    """Measured beside predicted, group by group; a group that one side does not have is a dash."""
    predicted_step = _mapping(run.best_prediction.get("step"))
    predicted = dict(_by_size(_mapping(predicted_step.get("by_group_seconds"))))
    found = dict(_by_size(measured))
    if not found or not predicted:
        return ""
    names = [*found, *(name for name in predicted if name not in found)]
    rows = []
    for name in names:
        value = found.get(name)
        cells = [escape(duration(value)), *_against(value, predicted.get(name))] if value is not None else None
        cells = cells or ["–", escape(duration(predicted[name])), "–"]  # noqa: RUF001
        rows.append([escape(GROUP_NAMES.get(name, name.replace("_", " ")).removeprefix("the ")), *cells])
    whole = finite(run.best_prediction.get("step_seconds"))
    total = ["Step", escape(duration(step)), *_against(step, whole)]
    head = ["Group of the estimate", "Measured", "Predicted", "Measured over predicted"]
    return "<h3>Beside the prediction</h3>" + table_html(head, rows, total=total)


def balance_html(run: ReportedRun) -> str:
    """One sentence a fact: the least even layer, dead experts, the trend, and what it cost. Empty without a balance."""
    balance = _mapping((run.series.summary or {}).get("expert_balance"))
    if not balance:
        return ""
    facts = []
    mean, worst = (finite(balance.get(name)) for name in ("load_max_over_mean", "worst_layer_load_max_over_mean"))
    if mean is not None and worst is not None:
        layer = escape(str(balance.get("worst_layer") or "one layer"))
        facts.append(f"The busiest expert got {mean:.2f} × its share, {worst:.2f} × in the least even layer ({layer}).")
    dead = finite(balance.get("num_dead_experts"))
    if dead is not None:
        facts.append("Every expert got tokens." if dead == 0 else f"{dead:.0f} experts got no token.")
    trend = finite(balance.get("vs_first_steps"))
    if trend is not None:
        word = "less even than" if trend > 1 + _LIKE else "more even than" if trend < 1 - _LIKE else "about as even as"
        facts.append(f"At the end the load was {word} in the first steps ({trend:.2f} ×).")
    seconds, dollars = finite(balance.get("imbalance_seconds")), finite(balance.get("imbalance_usd"))
    if seconds is not None:
        cost = f" ({escape(usd(dollars))})" if dollars is not None else ""
        added = f"about {escape(duration(seconds))}{cost}" if seconds > 0 else "nothing"
        facts.append(f"By the cost model the uneven load added {added} to this session.")
    return f'<p class="sub">{" ".join(facts)}</p>' if facts else ""


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _by_size(seconds: Mapping[str, Any]) -> Sequence[tuple[str, float]]:
    known = [(str(name), value) for name, each in seconds.items() if (value := finite(each)) is not None and value > 0]
    return sorted(known, key=lambda item: -item[1])


def _name(name: str) -> str:
    text = _NAMES.get(name, name.replace("_", " "))
    return escape(text[:1].upper() + text[1:])
