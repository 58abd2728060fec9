"""The report's tables of where a step's seconds went: by pass, and of profiled steps by layer type and operator, beside the
prediction for the same groups; and what an uneven expert load meant. As data, for the page, the text and the JSON alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from costmodel.tables import Table
from ftcost_callback.comparison import GROUP_NAMES
from ftcost_callback.report_markup import section_html, table_html
from ftcost_callback.report_numbers import duration, percent, usd
from ftcost_callback.report_run import ReportedRun
from ftcost_callback.report_series import finite

_PASSES: Final = ("forward", "backward", "optimizer")
_BESIDE: Final = ("Measured", "Predicted", "Measured over predicted")
_GROUPS_TITLE: Final = "Beside the prediction"
_TOTAL: Final = "Step"
_OF_ROWS: Final = ("type", "run_id", "session_index")

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


def step_figures(run: ReportedRun) -> dict[str, Any]:
    """What is known of the inside of a step, in seconds; what is not known is absent.

    ``passes``: ``{"forward": (measured, predicted or None), ...}``, means without the profiled steps. ``profile``: the last
    profiled window: the fields of its row, ``predicted_step_seconds`` and ``predicted_by_group_seconds``.
    """
    prediction = run.best_prediction if run.predicted_gpu is None else {}  # of another device: nothing to hold beside
    predicted = _mapping(prediction.get("step"))
    passes = {}
    for name in _PASSES:
        key = f"{name}_seconds"
        measured = run.series.summary_value(f"{key}_mean")
        if measured is None:
            values = run.series.measured(key)
            measured = sum(values) / len(values) if values else None
        if measured is not None:
            passes[name] = (measured, finite(predicted.get(key)))
    found: dict[str, Any] = {"passes": passes} if passes else {}
    for profile in run.series.profiles[-1:]:
        if not all(finite(profile.get(name)) for name in ("step_seconds", "num_steps", "global_step")):
            continue
        found["profile"] = {name: value for name, value in profile.items() if name not in _OF_ROWS}
        found["profile"]["predicted_step_seconds"] = finite(prediction.get("step_seconds"))
        found["profile"]["predicted_by_group_seconds"] = dict(_mapping(predicted.get("by_group_seconds")))
    return found


def pass_table(figures: Mapping[str, Any]) -> Table | None:
    """Forward, backward and optimizer, beside the prediction where there is one."""
    passes = figures.get("passes") or {}
    rows = [
        (_name(name), duration(measured), *_against(measured, predicted)) for name, (measured, predicted) in passes.items()
    ]
    if not rows:
        return None
    if not any(predicted for _, predicted in passes.values()):
        return Table("Inside a step", tuple(row[:2] for row in rows), ("", "Measured"), (1,))
    return Table("Inside a step", tuple(rows), ("", *_BESIDE), (1, 2, 3))


def profile_tables(figures: Mapping[str, Any]) -> list[Table]:
    """Layer types, operators, and the groups of the estimate beside the prediction; the last row of each is the step."""
    profile = figures.get("profile")
    if not profile:
        return []
    step = float(profile["step_seconds"])
    tables = [
        _shares("Layer type", _mapping(profile.get("layer_type_seconds")), step),
        _shares("Operator", _mapping(profile.get("operator_seconds")), step),
        _groups(profile, step),
    ]
    return [table for table in tables if table is not None]


def profile_title(figures: Mapping[str, Any]) -> str:
    profile = figures["profile"]
    first = profile["global_step"] - profile["num_steps"] + 1
    return f"Steps {first:.0f} to {profile['global_step']:.0f} under the profiler"


def profile_sentence(figures: Mapping[str, Any], steady_seconds: float | None) -> str:
    """The mean of the profiled steps, beside that of a step as it is: profiling costs time itself."""
    slower = f"; a step without the profiler takes {duration(steady_seconds)}" if steady_seconds else ""
    return f"Means of a step of {duration(figures['profile']['step_seconds'])}{slower}."


def breakdown_html(run: ReportedRun) -> str:
    """Empty: not measured."""
    figures = step_figures(run)
    passes = pass_table(figures)
    content = _table_html(passes) if passes else ""
    if "profile" in figures:
        content += f"<h3>{profile_title(figures)}</h3>"
        content += f'<p class="sub">{escape(profile_sentence(figures, run.steady_step_seconds))}</p>'
        if reason := figures["profile"].get("reason"):
            content += f'<p class="absent">{escape(str(reason))}</p>'
        shares = [_table_html(table) for table in profile_tables(figures) if table.title != _GROUPS_TITLE]
        content += '<div class="inner-columns">' + "".join(f"<div>{each}</div>" for each in shares) + "</div>"
        for table in profile_tables(figures):
            if table.title == _GROUPS_TITLE:
                content += f"<h3>{table.title}</h3>" + _table_html(table)
    explanation = "Data wait is left out." if content else ""
    return section_html("Inside a step", explanation, content) if content else ""


def _table_html(table: Table) -> str:
    rows = [[escape(cell) for cell in row] for row in table.rows]
    total = rows.pop() if rows[-1][0] == _TOTAL else None
    return table_html([escape(column) for column in table.columns], rows, total=total)


def _against(measured: float, predicted: float | None) -> tuple[str, str]:
    if not predicted:
        return ("–", "–")  # noqa: RUF001 - a dash for what is not known
    return (duration(predicted), f"{measured / predicted:.2f}")


def _shares(head: str, seconds: Mapping[str, Any], step: float) -> Table | None:
    known = _by_size(seconds)
    if not known:
        return None
    rows = [(_name(name), duration(value), percent(value / step)) for name, value in known]
    total = (_TOTAL, duration(step), percent(sum(value for _, value in known) / step))
    return Table(f"By {head.lower()}", (*rows, total), (head, "Time", "Share"), (1, 2))


def _groups(profile: Mapping[str, Any], step: float) -> Table | None:
    """Measured beside predicted, group by group; a group that one side does not have is a dash."""
    predicted = dict(_by_size(_mapping(profile.get("predicted_by_group_seconds"))))
    found = dict(_by_size(_mapping(profile.get("by_group_seconds"))))
    if not found or not predicted:
        return None
    rows = []
    for name in [*found, *(name for name in predicted if name not in found)]:
        value = found.get(name)
        cells = (duration(value), *_against(value, predicted.get(name))) if value is not None else None
        cells = cells or ("–", duration(predicted[name]), "–")  # noqa: RUF001
        rows.append((GROUP_NAMES.get(name, name.replace("_", " ")).removeprefix("the "), *cells))
    total = (_TOTAL, duration(step), *_against(step, profile.get("predicted_step_seconds")))
    return Table(_GROUPS_TITLE, (*rows, total), ("Group of the estimate", *_BESIDE), (1, 2, 3))


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
    return text[:1].upper() + text[1:]
