"""Runs that a :class:`WandbSink` wrote, read back from a W&B server as run records: for calibration without the files.

A tracker holds one row a report, so a :class:`~ftcost_callback.records.Step` here is the mean step of one report. What W&B
was not given (pauses, expert loads) is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from costmodel.errors import CostModelError, MissingExtraError
from ftcost_callback.metrics import METRICS, PREFIX, STEP_KEY
from ftcost_callback.recorder import Totals
from ftcost_callback.records import Prediction, Session, Step, Summary
from ftcost_callback.run_file import RunRecord

SCHEME: Final = "wandb:"
_SUMMARY_PREFIX: Final = f"{PREFIX}summary/"
_RATES: Final = {
    "num_tokens": "tokens_per_second",
    "num_non_padding_tokens": "non_padding_tokens_per_second",
    "num_supervised_tokens": "supervised_tokens_per_second",
    "num_samples": "samples_per_second",
}
_STEP_FIELDS: Final = (
    "step_seconds",
    "busy_fraction",
    "sm_active_fraction",
    "power_watts",
    "mfu",
    "hfu",
    "elapsed_seconds",
    "spent_usd",
)
_SUMMARY_REQUIRED: Final = ("global_step", "num_sessions", "wall_seconds", "train_seconds")


def read_wandb_run(path: str) -> RunRecord:
    """The run at ``ENTITY/PROJECT/RUN`` (``wandb:`` in front is taken too).

    Raises :class:`CostModelError` when there is no such run or it holds nothing of ours.
    """
    parts = _parts(path)
    if len(parts) != 3:
        raise CostModelError(f"{path!r} names no run; give wandb:ENTITY/PROJECT/RUN")
    api = _api()
    try:
        run = api.run("/".join(parts))
    except Exception as error:
        raise CostModelError(f"W&B gives no run {'/'.join(parts)}: {_said(error)}") from None
    record = _record(run)
    if record is None:
        raise CostModelError(f"the W&B run {'/'.join(parts)} holds nothing of ftcost (FTCostCallback writes it)")
    return record


def read_wandb_runs(path: str) -> list[RunRecord]:
    """The run at ``ENTITY/PROJECT/RUN``, or every run of ``ENTITY/PROJECT`` that an ``FTCostCallback`` wrote to.

    Raises :class:`CostModelError` when there is none.
    """
    parts = _parts(path)
    if len(parts) == 3:
        return [read_wandb_run(path)]
    api = _api()
    try:
        found = list(api.runs("/".join(parts)))
    except Exception as error:
        raise CostModelError(f"W&B gives no runs of {'/'.join(parts)}: {_said(error)}") from None
    records = [record for run in found if (record := _record(run)) is not None]
    if not records:
        raise CostModelError(f"none of the {len(found)} runs of {'/'.join(parts)} holds anything of ftcost")
    return records


def _parts(path: str) -> list[str]:
    parts = path.removeprefix(SCHEME).strip("/").split("/")
    if len(parts) not in (2, 3) or not all(parts):
        raise CostModelError(f"{path!r} is no W&B path; give wandb:ENTITY/PROJECT or wandb:ENTITY/PROJECT/RUN")
    return parts


def _api() -> Any:
    try:
        import wandb
    except ImportError:
        raise MissingExtraError("wandb", "wandb", "reading runs from W&B") from None
    try:
        return wandb.Api(timeout=30)
    except Exception as error:
        raise CostModelError(f"W&B cannot be used: {_said(error)}; run `wandb login` first") from None


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _record(run: Any) -> RunRecord | None:
    """``None`` when the run's config holds nothing of ours."""
    config = run.config.get("ftcost")
    if not isinstance(config, Mapping) or "run_id" not in config:
        return None
    index = int(config.get("session_index", 0))
    session = Session(
        run_id=str(config["run_id"]),
        session_index=index,
        started_at=str(config.get("started_at", "")),
        **{
            name: config[name]
            for name in ("max_steps", "job", "model", "device", "price", "budget", "versions")
            if config.get(name) is not None
        },
    )
    names: tuple[tuple[Literal["before", "tokens_seen"], str], ...] = (
        ("before", "prediction"),
        ("tokens_seen", "prediction_on_tokens_seen"),
    )
    predictions = [
        Prediction(basis=basis, estimate=dict(config[name]))
        for basis, name in names
        if isinstance(config.get(name), Mapping)
    ]
    steps = _steps(run, index)
    summary = _summary(dict(run.summary))
    return RunRecord(
        path=Path(f"{SCHEME}{'/'.join(run.path)}"),
        run_id=session.run_id,
        sessions=[session],
        predictions=predictions,
        steps=steps,
        summaries=[summary] if summary is not None else [],
        totals=_totals(summary),
        spent_usd=summary.spent_usd if summary is not None else (steps[-1].spent_usd if steps else None),
    )


def _steps(run: Any, session_index: int) -> list[Step]:
    steps = []
    for row in run.scan_history():
        figures = {metric.field: row[metric.key] * metric.divisor for metric in METRICS if _is_number(row.get(metric.key))}
        if "step_seconds" not in figures or not _is_number(row.get(STEP_KEY)):
            continue
        seconds = float(figures["step_seconds"])
        fields: dict[str, Any] = {name: figures[name] for name in _STEP_FIELDS if name in figures}
        fields |= {name: round(figures[rate] * seconds) for name, rate in _RATES.items() if rate in figures}
        fields |= {name: round(figures[name]) for name in ("memory_used_bytes", "peak_allocated_bytes") if name in figures}
        if "data_wait_fraction" in figures:
            fields["data_wait_seconds"] = figures["data_wait_fraction"] * seconds
        for end in ("", "_low", "_high"):
            if f"projected_usd{end}" in figures:
                fields[f"projected_total_usd{end}"] = figures[f"projected_usd{end}"]
        steps.append(Step(global_step=int(row[STEP_KEY]), session_index=session_index, **fields))
    return steps


def _summary(values: Mapping[str, Any]) -> Summary | None:
    flat = {key.removeprefix(_SUMMARY_PREFIX): value for key, value in values.items() if key.startswith(_SUMMARY_PREFIX)}
    if not all(name in flat for name in _SUMMARY_REQUIRED):
        return None
    fields: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split("/")  # a mapping of the summary was sent as one key a value
        if (path or [last])[0] not in Summary.__dataclass_fields__:
            continue
        inside = fields
        for part in path:
            inside = inside.setdefault(part, {})
        # The service gives 2.0 back as 2; every figure inside measured_over_predicted is a ratio.
        inside[last] = float(value) if path[:1] == ["measured_over_predicted"] else value
    missing = {
        name: 0.0
        for name in ("data_wait_seconds", "eval_seconds", "save_seconds", "log_seconds", "startup_seconds", "other_seconds")
        if name not in fields
    }
    return Summary(**(missing | fields))


def _totals(summary: Summary | None) -> Totals:
    if summary is None:
        return Totals()
    fields = Totals.__dataclass_fields__
    return Totals(**{name: value for name in fields if (value := getattr(summary, name, None)) is not None})


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
