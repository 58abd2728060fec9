"""Weights & Biases: rows into the run that is open. Never opens, closes or renames one.

Rows carry ``train/global_step`` and go through ``run.log`` without ``step=`` and without ``commit=``: beside
transformers' own ``WandbCallback`` that is the only way in which every row is kept and stands at its own step. Only
scalars, histograms, config, summary and alerts are sent: they are queued; tables and artifacts wait for the server.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, Final

from ftcost_callback.metrics import EXPERT_HISTOGRAM_KEY, PREFIX, STEP_KEY, Detail, metrics_for, window_metrics
from ftcost_callback.records import Budget, ExpertLoad, Prediction, Session, Summary, Window
from ftcost_callback.sinks.console import budget_line

_log = logging.getLogger(__name__)

MAX_HISTOGRAM_LAYERS: Final = 16
MAX_HISTOGRAM_BINS: Final = 512  # wandb.Histogram refuses more
_MAX_CONFIG_ENTRIES: Final = 64  # of one list or mapping; a histogram of lengths has thousands
_CONFIG_KEY: Final = "ftcost"


class WandbSink:
    """Writes to ``wandb.run``. Absent, and said once, where wandb is not installed or no run is open.

    A run that is opened later (by a ``WandbCallback`` that comes after us) is found at the next log. ``detail="full"``
    adds the rest of the keys and a histogram for each MoE layer (at most 16 layers, evenly spread).
    """

    def __init__(self, detail: Detail = "default", *, now: Callable[[], datetime] | None = None) -> None:
        metrics_for(detail)  # refuses an unknown detail here rather than at the first log
        self._detail = detail
        self._now = now if now is not None else lambda: datetime.now(timezone.utc)
        self._run: Any = None
        self._config: dict[str, Any] = {}
        self._alerted: set[tuple[str, str]] = set()
        self._said_absent = False
        self._run_id: str | None = None

    def open(self, session: Session, prediction: Prediction | None) -> None:
        self._config = {
            "run_id": session.run_id,
            "session_index": session.session_index,
            "model": session.model,
            "device": session.device,
            "price": session.price,
            "budget": session.budget,
            "versions": session.versions,
            "job": session.job,
        }
        if prediction is not None:
            self._config["prediction"] = prediction.estimate
        if session.run_id != self._run_id:
            self._run_id = session.run_id
            self._alerted.clear()
        self._run = None
        self._find_run()

    def prediction(self, prediction: Prediction) -> None:
        self._config["prediction" if prediction.basis == "before" else "prediction_on_tokens_seen"] = prediction.estimate
        if self._find_run() is not None:
            self._send_config()

    def log(self, window: Window, extra: Mapping[str, Any]) -> None:
        run = self._find_run()
        if run is None:
            self._say_absent()
            return
        row: dict[str, Any] = dict(window_metrics(window, self._detail))
        if self._detail == "full":
            row |= _histograms(extra.get("expert_load"))
        if row:
            run.log({**row, STEP_KEY: window.global_step})

    def alert(self, budget: Budget) -> None:
        run = self._find_run()
        if run is None or (budget.kind, budget.threshold) in self._alerted:
            return
        self._alerted.add((budget.kind, budget.threshold))  # the client does not de-duplicate
        # Step and time stand in the text: an alert of an offline run arrives when it is synced.
        text = f"{budget_line(budget)} [{self._now():%Y-%m-%d %H:%M} UTC]"
        run.alert(
            title=f"ftcost: budget, {budget.threshold}"[:63],
            text=text,
            level="ERROR" if budget.action == "stopped" else "WARN",
        )

    def close(self, summary: Summary) -> None:
        run = self._find_run()
        if run is None:
            return
        values = {f"{PREFIX}summary/{name}": value for name, value in _flat(summary.to_row()) if name != "type"}
        run.summary.update(values)

    def _find_run(self) -> Any:
        """The open run, greeted with axis and config when it is a new one."""
        # Who opened a run has imported wandb; importing it here would cost a second for nothing.
        wandb = sys.modules.get("wandb")
        run = getattr(wandb, "run", None)
        if run is not None and run is not self._run:
            # The axis that WandbCallback gives every key, for ours alone; without it x would be the row's number.
            run.define_metric(STEP_KEY)
            run.define_metric(f"{PREFIX}*", step_metric=STEP_KEY)
            self._run = run
            self._send_config()
        self._run = run
        return run

    def _send_config(self) -> None:
        values = {name: _bounded(value) for name, value in self._config.items() if value is not None}
        if values and self._run is not None:
            self._run.config.update({_CONFIG_KEY: values}, allow_val_change=True)

    def _say_absent(self) -> None:
        if self._said_absent:
            return
        self._said_absent = True
        installed = importlib.util.find_spec("wandb") is not None
        reason = (
            "no run is open (report_to=['wandb'] or wandb.init() opens one)"
            if installed
            else "it is not installed (pip install 'ftcost[wandb]')"
        )
        _log.info("ftcost: nothing goes to Weights & Biases: %s", reason)


def _histograms(load: Any) -> dict[str, Any]:
    """Key -> ``wandb.Histogram`` of the share of tokens by expert, for at most 16 layers."""
    if not isinstance(load, ExpertLoad) or load.status == "not_recorded":
        return {}
    import wandb

    names = _layer_labels(load.layer_names, len(load.tokens_per_expert))
    histograms: dict[str, Any] = {}
    for index in _evenly_spread(len(load.tokens_per_expert), MAX_HISTOGRAM_LAYERS):
        tokens = load.tokens_per_expert[index]
        total = sum(tokens)
        if total <= 0:
            continue
        per_bin = -(-len(tokens) // MAX_HISTOGRAM_BINS)
        edges = [*range(0, len(tokens), per_bin), len(tokens)]
        shares = [sum(tokens[start : start + per_bin]) / total for start in edges[:-1]]
        key = EXPERT_HISTOGRAM_KEY.format(layer=names[index])
        histograms[key] = wandb.Histogram(np_histogram=(shares, edges))  # type: ignore[arg-type]  # lists do as well
    return histograms


def _layer_labels(names: Sequence[str], count: int) -> list[str]:
    """``layer_07`` from the layer's number where that tells the layers apart, else the module's name."""
    if len(names) != count:
        return [f"layer_{index:02d}" for index in range(count)]
    numbers = [match.group(1) if (match := re.search(r"\.(\d+)(?:\.|$)", name)) else None for name in names]
    if None in numbers or len(set(numbers)) != count:
        return list(names)
    return [f"layer_{int(number or 0):02d}" for number in numbers]


def _evenly_spread(count: int, most: int) -> list[int]:
    """Indices of at most ``most`` of ``count`` items, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


def _bounded(value: Any) -> Any:
    """A copy for the run's config; a mapping or list too long to be read there becomes a note of its length."""
    if isinstance(value, Mapping):
        if len(value) > _MAX_CONFIG_ENTRIES:
            return f"({len(value)} entries)"
        return {str(key): _bounded(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return f"({len(value)} entries)" if len(value) > _MAX_CONFIG_ENTRIES else [_bounded(item) for item in value]
    return value


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            flat += _flat(value, f"{prefix}{name}/")
        else:
            flat.append((prefix + name, value))
    return flat
