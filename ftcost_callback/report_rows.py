"""One summary row for each recorded run: what ``ftcost report --json`` prints, and the same in a few readable lines."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from costmodel.tables import table_as_text
from ftcost_callback.report_breakdown import profile_sentence, profile_tables, profile_title, step_figures
from ftcost_callback.report_numbers import duration, percent, usd
from ftcost_callback.report_reading import read_series
from ftcost_callback.report_run import ReportedRun, plan_ratio
from ftcost_callback.report_series import finite, totals
from ftcost_callback.report_sessions import prices_paid, prices_text

BUCKETS: Final = ("train", "rollout", "eval", "save", "log", "startup", "other")
_BUCKET_NAMES: Final = {
    "train": "training",
    "rollout": "rolling out",
    "eval": "evaluating",
    "save": "saving",
    "log": "logging",
    "startup": "starting up",
    "other": "other",
}
_COUNTS: Final = ("num_tokens", "num_non_padding_tokens", "num_supervised_tokens")


def summary_row(path: str | Path) -> dict[str, Any]:
    """The run's summary row (see ``docs/run_record.md``) with what identifies the run in front of it.

    A run without a summary (killed, still going, resumed and not yet ended) gets the same fields from its rows and the
    status ``running_or_killed``. What was not measured is absent. Raises :class:`CostModelError` for what is no record.
    """
    series = read_series(Path(path))
    run = ReportedRun(series, totals(series), "r0")
    inside = {name: value for name, value in step_figures(run).items() if name == "profile"}  # the passes are in the figures
    return _present(_identity(run)) | _figures(run) | inside | ({"remarks": list(series.remarks)} if series.remarks else {})


def summary_text(row: Mapping[str, Any]) -> str:
    """The row for a person: one line that says what and how much, then where the time went and what was predicted."""
    of = f" of {row['max_steps']}" if row.get("max_steps") else ""
    status = str(row["status"]).replace("_", " ") + (f" ({row['error']})" if row.get("error") else "")
    prices = row.get("usd_per_gpu_hour_paid")  # only where there were several
    paid = f" ({prices_text(prices)})" if prices else ""
    spent = f"{usd(row['spent_usd'])}{paid}, " if row.get("spent_usd") is not None else ""
    lines = [f"{row['name']}: {status} at step {row.get('global_step', 0)}{of}: {spent}{duration(row['wall_seconds'])}"]
    shares = [
        f"{_BUCKET_NAMES[name]} {duration(row[f'{name}_seconds'])}"
        for name in BUCKETS
        if row[f"{name}_seconds"] >= 0.01 * row["wall_seconds"] > 0
    ]
    if row.get("data_wait_seconds", 0.0) >= 0.01 * row["wall_seconds"] > 0:
        shares.append(f"of the training {duration(row['data_wait_seconds'])} waiting for data")
    if row.get("wasted_seconds"):
        shares.append(f"of the training {duration(row['wasted_seconds'])} done twice or lost")
    rates = []
    if row.get("non_padding_tokens_per_second") is not None:
        number, of_sessions = row.get("num_sessions_in_rates"), ""
        if number is not None and number < (row.get("num_sessions") or 1):
            of_sessions = f" (last {'session' if number == 1 else f'{number} sessions'})"
        rates.append(f"{row['non_padding_tokens_per_second']:,.0f} tokens/s without padding{of_sessions}")
    if row.get("mfu") is not None:
        rates.append(f"MFU {percent(row['mfu'])}")
    predicted, is_of_time = [], row.get("is_one_rate") is False
    if row.get("predicted_usd") is not None:
        predicted.append(usd(row["predicted_usd"]) + (" all at the last price" if is_of_time else ""))
    if row.get("predicted_seconds") is not None:
        predicted.append(duration(row["predicted_seconds"]))
    if predicted:
        ratio, of_time = row.get("total_measured_over_predicted"), " the time" if is_of_time else ""
        took = f" (took {ratio:.2f}x{of_time})" if ratio is not None else ""
        rates.append(f"predicted {', '.join(predicted)}{took}")
    passes = [
        f"{name} {duration(row[f'{name}_seconds_mean'])}"
        for name in ("forward", "backward", "optimizer")
        if row.get(f"{name}_seconds_mean") is not None
    ]
    lines += [f"  {', '.join(each)}" for each in (shares, rates) if each]
    lines += [f"  a step: {', '.join(passes)}"] if passes else []
    lines += [f"  {text}" for text in (row.get("verdict"), *row.get("remarks", ())) if text]
    if "profile" in row:
        lines += [f"  {profile_title(row)}. {profile_sentence(row, row.get('step_seconds_mean'))}"]
        lines += [f"  {row['profile']['reason']}"] if row["profile"].get("reason") else []
        lines += [textwrap.indent(table_as_text(table), "  ") for table in profile_tables(row)]
    return "\n".join(lines)


def _identity(run: ReportedRun) -> dict[str, Any]:
    series = run.series
    price = series.session("price")
    before = run.before
    ratio, _ = plan_ratio(run)
    prices = prices_paid(series)
    return {
        "run": str(series.path),
        "run_id": series.run_id,
        "name": run.name,
        "gpu": series.session("device").get("name"),
        "num_sessions": len(series.sessions) or None,
        "started_at": series.sessions[0].get("started_at") if series.sessions else None,
        "max_steps": run.max_steps,
        "usd_per_gpu_hour": finite(price.get("usd_per_gpu_hour")),
        "usd_per_gpu_hour_paid": prices if len(prices) > 1 else None,
        "is_one_rate": None if run.compares_dollars else False,
        "sessions": _sessions(run),
        "predicted_usd": finite(before.get("total_usd")),
        "predicted_seconds": finite(before.get("total_seconds")),
        "projected_usd": None if run.is_over else series.projected("projected_total_usd"),
        "projected_seconds": None if run.is_over else series.projected("projected_total_seconds"),
        "total_measured_over_predicted": ratio if run.is_complete else None,
    }


def _sessions(run: ReportedRun) -> list[dict[str, Any]] | None:
    """What each of several took and cost."""
    if len(run.sessions) < 2:
        return None
    return [
        _present({"seconds": each.seconds, "usd_per_gpu_hour": each.usd_per_gpu_hour, "spent_usd": each.usd})
        for each in run.sessions
    ]


def _figures(run: ReportedRun) -> dict[str, Any]:
    series, sums = run.series, run.totals
    bucket = sums.bucket_seconds
    own: dict[str, Any] = {
        "status": "running_or_killed",
        "global_step": run.num_steps_done,
        "wall_seconds": sums.wall_seconds,
        "train_seconds": bucket["train"] + bucket["data_wait"],
        "data_wait_seconds": bucket["data_wait"],
        **{f"{name}_seconds": bucket[name] for name in BUCKETS if name != "train"},
        "wasted_seconds": sums.wasted_seconds,
        "spent_usd": sums.spent_usd,
        "step_seconds_mean": run.steady_step_seconds,
        "non_padding_tokens_per_second": run.tokens_per_second("num_non_padding_tokens"),
        "mfu": run.mfu,
        "peak_allocated_bytes": run.peak_bytes("peak_allocated_bytes"),
        "peak_reserved_bytes": run.peak_bytes("peak_reserved_bytes"),
        **{name: round(count) for name in _COUNTS if (count := series.num_tokens(name)) is not None},
    }
    written = {
        name: value
        for name, value in _present(dict(series.summary or {})).items()
        # A figure that is no number does not replace the one counted from the rows.
        if name not in ("type", "step_seconds_mean", "non_padding_tokens_per_second")  # own, of all sessions
        and (name == "status" or name not in own or finite(value) is not None)
    }
    return _present(own) | written


def _present(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}
