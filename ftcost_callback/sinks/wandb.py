"""Weights & Biases: rows into the run that is open. Never opens, closes or renames one.

Rows carry ``train/global_step`` and go through ``run.log`` without ``step=``. A row that is closed moves W&B's own step on
by one, and W&B drops what somebody then logs with a lower ``step=``. So ours goes into the row that is open, where the
Trainer closes that one in a moment, and is closed by us only while W&B's step stays at or below the training's, or where
nobody has ever logged with ``step=`` and the next of ours would take its place. Only
scalars, histograms, config, summary and alerts are sent: they are queued; tables and artifacts wait for the server.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any, Final, Literal

from ftcost_callback.metrics import (
    BY_COST_PREFIX,
    COST_AXIS_KEY,
    PREFIX,
    STEP_KEY,
    TIME_AXIS_KEY,
    Detail,
    metrics_for,
    window_metrics,
)
from ftcost_callback.records import Budget, Prediction, Session, Summary, TrainerLog, Window
from ftcost_callback.sinks.console import budget_line
from ftcost_callback.sinks.tracker_rows import bounded, closing_values, expert_histograms, session_config, summary_values

_log = logging.getLogger(__name__)

_CONFIG_KEY: Final = "ftcost"
PROBE_SECONDS: Final = 5.0
"""How long a server has to show that it is there before an alert is given to the client."""


class WandbSink:
    """Writes to ``wandb.run``. Absent, and said once, where wandb is not installed or no run is open.

    A run that is opened later (by a ``WandbCallback`` that comes after us) is found at the next log. Each MoE layer gets
    a histogram of its experts' load at logging steps (16 layers, evenly spread); ``detail="full"`` adds the rest of the
    keys and up to 64 layers.
    """

    def __init__(
        self,
        detail: Detail = "default",
        *,
        now: Callable[[], datetime] | None = None,
        is_reachable: Callable[[str], bool] | None = None,
    ) -> None:
        metrics_for(detail)  # refuses an unknown detail here rather than at the first log
        self._detail: Detail = detail
        self._now = now if now is not None else _utc_now
        self._is_reachable = is_reachable if is_reachable is not None else server_answers
        self._run: Any = None
        self._config: dict[str, Any] = {}
        self._alerted: set[tuple[str, str]] = set()
        self._alerting: list[threading.Thread] = []
        self._with_axis: set[str] = set()
        self._said_absent = False
        self._run_id: str | None = None
        self._left_open: tuple[int, frozenset[str]] = (-1, frozenset())  # W&B's step of a row left open, our keys in it
        self._said_ahead = False
        self.trainer_writes: Literal["before", "after"] | None = None
        """Whether transformers' ``WandbCallback`` is in the training, told its events before us or after us."""

    def open(self, session: Session, prediction: Prediction | None) -> None:
        self._config = session_config(session)
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
        row |= _histograms(extra.get("expert_load"), self._detail)
        if row:
            row_follows = self.trainer_writes is not None and bool(extra.get("trainer_logs_next"))
            self._write(run, row, window.global_step, highest_step=window.global_step - 1, is_closed_by_trainer=row_follows)

    def _write(
        self, run: Any, row: Mapping[str, Any], global_step: int, *, highest_step: int, is_closed_by_trainer: bool
    ) -> None:
        """Into the row that is open; closed at once where W&B's step is no higher than ``highest_step``."""
        if run.disabled:
            return
        if run.settings.mode == "shared":  # several processes write, and none of them counts W&B's steps
            run.log({**row, STEP_KEY: global_step})
            return
        step = run.step
        left_at, left_keys = self._left_open
        if left_at == step and not left_keys.isdisjoint(row):  # nobody has closed it since
            if step < global_step or not _is_steered(run):
                run.log({}, commit=True)
                step += 1
            else:
                self._say_ahead(step, global_step)
        is_closed = not is_closed_by_trainer and step <= highest_step
        run.log({**row, STEP_KEY: global_step}, commit=is_closed)
        left_keys = left_keys if left_at == step else frozenset()
        self._left_open = (-1, frozenset()) if is_closed else (step, left_keys | row.keys())

    def _say_ahead(self, step: int, global_step: int) -> None:
        if not self._said_ahead:
            self._said_ahead = True
            _log.warning(
                "ftcost: W&B's own step (%d) is not behind the training's (%d), so figures between two rows of others are "
                "replaced by the next; the run record has all",
                step,
                global_step,
            )

    def trainer_logged(self, entry: TrainerLog) -> None:
        """Losses once more, on the axis of what the run had cost by then (hours where there is no price).

        W&B draws one series against another only where both stand in one row, and the losses' own row is the Trainer's.
        """
        run = self._find_run()
        losses = entry.losses()
        if run is None or not losses:
            return
        axis_key, axis = (
            (COST_AXIS_KEY, entry.spent_usd)
            if entry.spent_usd is not None
            else (TIME_AXIS_KEY, entry.elapsed_seconds / 3600)
        )
        row: dict[str, Any] = {f"{BY_COST_PREFIX}{name}": value for name, value in losses.items()}
        for key in row.keys() - self._with_axis:
            # An exact name goes before every pattern, WandbCallback's "*" included.
            run.define_metric(key, step_metric=axis_key, step_sync=False)
            self._with_axis.add(key)
        # On its axis it stands right in any row, so it leaves a step to the reports.
        self._write(
            run,
            {**row, axis_key: axis},
            entry.global_step,
            highest_step=entry.global_step - 2,
            is_closed_by_trainer=self.trainer_writes == "after",
        )

    def alert(self, budget: Budget) -> None:
        run = self._find_run()
        if run is None or run.disabled or (budget.kind, budget.threshold) in self._alerted:
            return
        self._alerted.add((budget.kind, budget.threshold))  # the client does not de-duplicate
        # Step and time stand in the text: an alert of an offline run arrives when it is synced.
        fields = {
            "title": f"ftcost: budget, {budget.threshold}"[:63],
            "text": f"{budget_line(budget)} [{self._now():%Y-%m-%d %H:%M} UTC]",
            "level": "ERROR" if budget.action == "stopped" else "WARN",
        }
        if run.offline:
            run.alert(**fields)
            return
        # One alert that waits for a server which is away makes wandb.finish() ignore its own time limit.
        before = self._alerting[-1] if self._alerting else None
        arguments = (run, fields, before)
        thread = threading.Thread(target=self._alert_if_reachable, args=arguments, name="ftcost-alert", daemon=True)
        self._alerting.append(thread)
        thread.start()

    def close(self, summary: Summary) -> None:
        waiting, self._alerting = self._alerting, []
        if waiting:
            waiting[-1].join(timeout=2 * PROBE_SECONDS)
        run = self._find_run()
        if run is None:
            return
        is_open = self._left_open[0] >= 0 and self._left_open[0] == run.step
        if is_open and (self._left_open[0] < summary.global_step or not _is_steered(run)):
            run.log({}, commit=True)
        self._left_open = (-1, frozenset())
        run.summary.update(summary_values(summary) | closing_values(summary))

    def _alert_if_reachable(self, run: Any, fields: dict[str, Any], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()  # in the order they were crossed
        try:
            if self._is_reachable(run.settings.base_url):
                run.alert(**fields)
            else:
                _log.warning("ftcost: W&B does not answer, so it gets no alert: %s", fields["text"])
        except Exception:
            _log.warning("ftcost: the alert did not reach W&B: %s", fields["text"], exc_info=True)

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
            self._with_axis.clear()
            self._left_open = (-1, frozenset())
            self._send_config()
        self._run = run
        return run

    def _send_config(self) -> None:
        values = {name: bounded(value) for name, value in self._config.items() if value is not None}
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


def _is_steered(run: Any) -> bool:
    """Whether somebody has logged with ``step=``, and could lose a row where W&B's own step is moved on."""
    try:
        return bool(run._telemetry_obj.feature.set_step_log)  # wandb 0.31 notes it with the first such row
    except AttributeError:
        return True


def _utc_now() -> datetime:
    return datetime.now(timezone.utc)


def server_answers(base_url: str) -> bool:
    """Whether a W&B server answers at all within :data:`PROBE_SECONDS`. A refusal is an answer, a fault of it is not."""
    import ssl
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"{base_url.rstrip('/')}/healthz", timeout=PROBE_SECONDS):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # it is there; whom the client trusts is the client's affair
    except (OSError, ValueError):
        return False


def _histograms(load: Any, detail: Detail) -> dict[str, Any]:
    """Key -> ``wandb.Histogram`` of the share of tokens by expert."""
    histograms = expert_histograms(load, detail)
    if not histograms:
        return {}
    import wandb

    return {
        key: wandb.Histogram(np_histogram=(shares, edges))  # type: ignore[arg-type]  # lists do as well
        for key, (shares, edges) in histograms.items()
    }
