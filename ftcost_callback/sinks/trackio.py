"""trackio: rows, experts, config and alerts in a local project, seen live with ``trackio show``. No account, no network.

Beside ``report_to="trackio"`` the rows go into the run that the Trainer has open, wherever that one is; otherwise a run of
our own is opened, which stays on this machine whatever ``TRACKIO_SPACE_ID`` and ``TRACKIO_SERVER_URL`` say.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from costmodel.errors import MissingExtraError
from ftcost_callback.metrics import STEP_KEY, Detail, metrics_for, window_metrics
from ftcost_callback.records import Budget, Prediction, Session, Summary, Window
from ftcost_callback.sinks.console import budget_line
from ftcost_callback.sinks.tracker_rows import bounded, expert_histograms, session_config, summary_values

_CONFIG_KEY: Final = "ftcost"
_REMOTE_VARIABLES: Final = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID")


class TrackioSink:
    """``project``: of a run of our own, which is named after the run record and goes on when that is resumed.

    Raises :class:`MissingExtraError` where trackio is not installed. ``detail`` as for :class:`WandbSink`.
    """

    def __init__(self, project: str = "ftcost", *, detail: Detail = "default") -> None:
        metrics_for(detail)  # refuses an unknown detail here rather than at the first log
        if importlib.util.find_spec("trackio") is None:
            raise MissingExtraError("trackio", "trackio", "TrackioSink")
        self._project = project
        self._detail: Detail = detail
        self._run: Any = None
        self._is_own = False
        self._alerted: set[tuple[str, str]] = set()
        self._run_id: str | None = None

    def open(self, session: Session, prediction: Prediction | None) -> None:
        if session.run_id != self._run_id:
            self._run_id = session.run_id
            self._alerted.clear()
        config = session_config(session)
        if prediction is not None:
            config["prediction"] = prediction.estimate
        import trackio

        self._run = trackio.context_vars.current_run.get()
        self._is_own = self._run is None
        if self._is_own:
            with _on_this_machine():
                self._run = trackio.init(project=self._project, name=f"ftcost-{session.run_id}", resume="allow", embed=False)
        # Sent with the first row of the run.
        self._run.config[_CONFIG_KEY] = bounded(config)

    def prediction(self, prediction: Prediction) -> None:
        values = {
            f"ftcost/{prediction.basis}/{name}": float(value)
            for name in ("total_usd", "total_seconds", "step_seconds")
            if (value := prediction.estimate.get(name)) is not None
        }
        if values:
            self._log(values, prediction.global_step)

    def log(self, window: Window, extra: Mapping[str, Any]) -> None:
        row: dict[str, Any] = dict(window_metrics(window, self._detail))
        histograms = expert_histograms(extra.get("expert_load"), self._detail)
        if histograms:
            import trackio

            row |= {key: trackio.Histogram(np_histogram=histogram) for key, histogram in histograms.items()}
        if row:
            self._log(row, window.global_step)

    def alert(self, budget: Budget) -> None:
        if (budget.kind, budget.threshold) in self._alerted:
            return
        self._alerted.add((budget.kind, budget.threshold))
        from trackio import AlertLevel

        self._run.alert(
            title=f"ftcost: budget, {budget.threshold}",
            text=budget_line(budget),
            level=AlertLevel.ERROR if budget.action == "stopped" else AlertLevel.WARN,
            step=budget.global_step if self._is_own else None,
        )

    def close(self, summary: Summary) -> None:
        # trackio has no summary: the numbers are a last row. A run that the Trainer has finished by now takes it too.
        values = {key: value for key, value in summary_values(summary).items() if isinstance(value, (int, float))}
        self._log(values, summary.global_step)
        if self._is_own:
            import trackio

            self._run.finish()
            if trackio.context_vars.current_run.get() is self._run:
                trackio.context_vars.current_run.set(None)
        self._run = None

    def _log(self, row: Mapping[str, Any], global_step: int) -> None:
        # In the Trainer's run its rows count the steps by themselves; in our own, the step is the optimizer's.
        self._run.log({**row, STEP_KEY: global_step}, step=global_step if self._is_own else None)


@contextlib.contextmanager
def _on_this_machine() -> Iterator[None]:
    """Without the variables that make trackio log elsewhere."""
    kept = {name: os.environ.pop(name) for name in _REMOTE_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
