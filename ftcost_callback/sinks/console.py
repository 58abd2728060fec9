"""One readable line at each log, a line at the start, a block at the end. Plain text without colour.

In a terminal on stderr, above the Trainer's progress bar. In a notebook, where stderr is shown as an error and lines pile up
under the Trainer's table, on stdout, with the line of the last log in one place that is written over.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any, Final, TextIO

from costmodel.units import GIB
from ftcost_callback.records import Budget, Prediction, Session, Summary, Window
from ftcost_callback.report_numbers import gib

PREFIX: Final = "ftcost: "
WITHOUT_PADDING: Final = "without padding"


class ConsoleSink:
    """Writes to ``stream`` (default: stderr, or a notebook's output), above the Trainer's progress bar."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._live: Any = None  # a notebook's place for the line of the last log
        self._num_processes = 1
        self._said: set[str] = set()  # why nothing was predicted

    def open(self, session: Session, prediction: Prediction | None) -> None:
        self._live = None
        self._said = set()
        self._num_processes = session.num_processes or 1
        if session.resumed_from_step:
            earlier = sum((session.earlier_seconds or {}).values())
            self._write(f"resumed at step {session.resumed_from_step}, {duration(earlier)} spent before")
        if prediction is not None:
            self.prediction(prediction)
        for note in session.notes or []:
            if note not in self._said:
                self._said.add(note)
                self._write(note)

    def prediction(self, prediction: Prediction) -> None:
        figures = prediction_figures(prediction)
        missing = None if figures else what_is_missing(prediction)
        if missing is None or missing not in self._said:  # a second prediction that lacks the same says nothing new
            self._write(prediction_line(prediction))
        if missing is not None:
            self._said.add(missing)
        for warning in [] if missing is not None else warnings_to_say(prediction):
            if warning not in self._said:
                self._said.add(warning)
                self._write(warning)

    def log(self, window: Window, extra: Mapping[str, Any]) -> None:
        line = window_line(window)
        if line is None:
            return
        display = notebook_display() if self._stream is None else None
        if display is None:
            self._write(line)
            return
        content = {"text/plain": PREFIX + line}
        if self._live is None:
            self._live = display(content, raw=True, display_id=True)
        else:
            self._live.update(content, raw=True)

    def alert(self, budget: Budget) -> None:
        self._write(budget_line(budget))

    def close(self, summary: Summary) -> None:
        for line in summary_lines(summary, self._num_processes):
            self._write(line)

    def _write(self, line: str) -> None:
        if self._stream is None and notebook_display() is not None:
            print(PREFIX + line, flush=True)
            return
        stream = self._stream if self._stream is not None else sys.stderr
        tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if tqdm is not None and getattr(tqdm, "_instances", None):
            tqdm.write(PREFIX + line, file=stream)
        else:
            stream.write(PREFIX + line + "\n")
            stream.flush()


def notebook_display() -> Any:
    """IPython's ``display`` in a kernel (Jupyter, Colab, VS Code); ``None`` in a terminal, IPython's own too."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or "IPKernelApp" not in shell.config:
        return None
    return importlib.import_module("IPython.display").display


def prediction_line(prediction: Prediction) -> str:
    """What the run was predicted to take; where that is not known, what is missing."""
    basis = "predicted" if prediction.basis == "before" else "predicted on the tokens seen"
    basis += ", calibrated" if prediction.estimate.get("calibration") else ""
    figures = prediction_figures(prediction)
    return f"{basis}: {', '.join(figures)}" if figures else f"not {basis}: {what_is_missing(prediction)}"


def what_is_missing(prediction: Prediction) -> str:
    """Of a prediction without figures, with the way out: the estimate's own words where it has some."""
    answer = prediction.estimate
    warnings = [str(each) for each in answer.get("warnings") or []]
    if (answer.get("job") or {}).get("gpu") is None:
        known = [each for each in warnings if each.startswith(("trained on a CPU", "no gpu is given"))]
        return known[0] if known else "no GPU is known; name one, gpu='H100 SXM' (say)"
    return "; ".join(warnings) or "the estimate gives no reason"


def warnings_to_say(prediction: Prediction) -> list[str]:
    """Why a calibration that was asked for is not used; the others stand in the report."""
    warnings = [str(each) for each in prediction.estimate.get("warnings") or []]
    return [each for each in warnings if each.startswith(("calibration auto", "the calibration"))]


def prediction_figures(prediction: Prediction) -> list[str]:
    """Dollars, time and memory, as far as they are known."""
    answer = prediction.estimate
    total, usd = answer.get("total_seconds"), answer.get("total_usd")
    parts = []
    if usd is not None:
        parts.append(dollars(usd) + _band(answer.get("total_usd_low"), answer.get("total_usd_high"), dollars))
    if total is not None:
        parts.append(duration(total) + _band(answer.get("total_seconds_low"), answer.get("total_seconds_high"), duration))
    if answer.get("step_seconds") is not None:
        parts.append(f"{_seconds(answer['step_seconds'])} a step")
    memory = answer.get("memory") or {}
    if memory.get("peak_device_bytes") is not None:
        peak, capacity = memory["peak_device_bytes"], memory.get("capacity_bytes")
        verdict = f" ({str(answer['verdict']).replace('_', ' ')})" if answer.get("verdict") else ""
        if capacity and peak >= GIB:  # one unit for both
            parts.append(f"peak {peak / GIB:.1f} of {capacity / GIB:.1f} GiB{verdict}")
        else:
            parts.append(f"peak {gib(peak)}" + (f" of {gib(capacity)}" if capacity else "") + verdict)
    return parts


def window_line(window: Window) -> str | None:
    """Where the run is; ``None`` while there is nothing to say."""
    parts = []
    if window.spent_usd is not None:
        spent = dollars(window.spent_usd)
        if window.projected_usd is not None:
            spent += f" of {dollars(window.projected_usd)}"
            spent += _band(window.projected_usd_low, window.projected_usd_high, dollars)
        parts.append(spent)
    elif window.elapsed_seconds is not None:
        spent = duration(window.elapsed_seconds)
        if window.projected_total_seconds is not None:
            spent += f" of {duration(window.projected_total_seconds)}"
        parts.append(spent)
    if window.remaining_seconds is not None:
        parts.append(f"{duration(window.remaining_seconds)} left")
    if window.non_padding_tokens_per_second is not None:
        parts.append(f"{window.non_padding_tokens_per_second:,.0f} tokens/s {WITHOUT_PADDING}")
    elif window.tokens_per_second is not None:
        parts.append(f"{window.tokens_per_second:,.0f} tokens/s")
    elif window.samples_per_second is not None:
        parts.append(f"{window.samples_per_second:.3g} samples/s")
    if window.mfu is not None:
        parts.append(f"MFU {window.mfu:.1%}")
    if window.data_wait_fraction is not None and window.data_wait_fraction >= 0.05:
        parts.append(f"{window.data_wait_fraction:.0%} waiting for data")
    if window.step_seconds_measured_over_predicted is not None:
        parts.append(f"step {window.step_seconds_measured_over_predicted:.2f}x predicted")
    if not parts:
        return None
    of = f"/{window.max_steps}" if window.max_steps else ""
    return f"step {window.global_step}{of}: {', '.join(parts)}"


def budget_line(budget: Budget) -> str:
    """Which threshold was crossed, where, and what happens."""
    amount = dollars if budget.kind == "usd" else _hours
    limit = amount(budget.limit)
    if budget.threshold == "projected" and budget.projected is not None:
        projected = amount(budget.projected)
        if projected == limit:
            unit = "${:,.6g}" if budget.kind == "usd" else "{:.6g} h"
            limit, projected = unit.format(budget.limit), unit.format(budget.projected)
        line = f"budget {limit}: the run is heading for {projected}"
    else:
        line = f"budget {limit}: {budget.threshold} used"
    line += f" ({amount(budget.spent)} spent at step {budget.global_step})"
    return line + ("; saving and stopping" if budget.action == "stopped" else "")


def summary_lines(summary: Summary, num_processes: int = 1) -> list[str]:
    """The end block: what it took, where the time went, and how that compares.

    With several processes the tokens are an estimate from the main one's.
    """
    about = "about " if num_processes > 1 else ""
    bill = f"{dollars(summary.spent_usd)}, " if summary.spent_usd is not None else ""
    sessions = f" in {summary.num_sessions} sessions" if summary.num_sessions > 1 else ""
    status = summary.status.replace("_", " ") + (f" ({summary.error})" if summary.error else "")
    lines = [f"{status} at step {summary.global_step}: {bill}{duration(summary.wall_seconds)}{sessions}"]
    buckets = (
        ("training", summary.train_seconds),
        ("rolling out", summary.rollout_seconds or 0.0),
        ("evaluating", summary.eval_seconds),
        ("saving", summary.save_seconds),
        ("logging", summary.log_seconds),
        ("starting up", summary.startup_seconds),
        ("other", summary.other_seconds),
    )
    shares = [f"{name} {duration(seconds)}" for name, seconds in buckets if seconds >= 0.01 * summary.wall_seconds > 0]
    if summary.data_wait_seconds >= 0.01 * summary.wall_seconds > 0:
        shares.append(f"of the training {duration(summary.data_wait_seconds)} waiting for data")
    if summary.wasted_seconds:
        shares.append(f"of the training {duration(summary.wasted_seconds)} done twice or lost")
    if shares:
        lines.append(", ".join(shares))
    facts = []
    if summary.num_non_padding_tokens is not None:
        facts.append(f"{about}{summary.num_non_padding_tokens:,} tokens {WITHOUT_PADDING}")
    if summary.non_padding_tokens_per_second is not None:
        # Said once: the two stand side by side.
        which = "" if summary.num_non_padding_tokens is not None else f" {WITHOUT_PADDING}"
        facts.append(f"{about}{summary.non_padding_tokens_per_second:,.0f} tokens/s{which}{rates_of(summary)}")
    if summary.mfu is not None:
        facts.append(f"MFU {summary.mfu:.1%}")
    if summary.peak_allocated_bytes is not None:
        peak = summary.peak_allocated_bytes
        facts.append(f"peak {f'{peak / GIB:.2f} GiB' if peak >= GIB else gib(peak)} allocated")
    if facts:
        lines.append(", ".join(facts))
    if summary.verdict:
        lines.append(summary.verdict)
    return lines


def rates_of(summary: Summary) -> str:
    """Which sessions the rates hold, where it is not all of them."""
    number = summary.num_sessions_in_rates
    if number is None or number >= summary.num_sessions:
        return ""
    return " (this session)" if number == 1 else f" (the last {number} sessions)"


def duration(seconds: float) -> str:
    """``0.42 s``, ``42 s``, ``3 min 20 s``, ``5 h 07 min``."""
    if seconds < 10:
        return _seconds(seconds)
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def dollars(usd: float) -> str:
    """Cents from a dollar on, three digits below."""
    if usd >= 1 or usd == 0:
        return f"${usd:,.2f}"
    return f"${usd:.3g}" if usd >= 1e-4 else f"${usd:.1e}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


def _hours(hours: float) -> str:
    return f"{hours:.3g} h"


def _band(low: float | None, high: float | None, show: Any) -> str:
    return "" if low is None or high is None else f" ({show(low)} to {show(high)})"
