"""One run as the report shows it: the figures that more than one section uses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ftcost_callback.report_numbers import percent
from ftcost_callback.report_series import RunSeries, Totals, finite, pairs_of
from ftcost_callback.report_sessions import SessionCost, bucket_usd, is_one_rate, prices_paid, prices_text, session_costs

LEAST_SHARE: Final = 0.01
"""A saving below this share of the wall time is not proposed."""


@dataclass(frozen=True)
class ReportedRun:
    """One run with the figures that several sections share."""

    series: RunSeries
    totals: Totals
    id: str

    @property
    def name(self) -> str:
        model = self.series.session("job").get("model")
        if isinstance(model, dict):
            model = model.get("_name_or_path") or model.get("model_type")
        model = model or self.series.session("model").get("class")
        return str(model) if model else f"run {self.series.run_id or self.series.path.stem}"

    @cached_property
    def sessions(self) -> list[SessionCost]:
        return session_costs(self.series, self.totals)

    @cached_property
    def bucket_usd(self) -> dict[str, float]:
        """Dollars of each time bucket; empty without a price."""
        return bucket_usd(self.sessions, self.totals)

    @cached_property
    def compares_dollars(self) -> bool:
        """One rate was paid all along. Else the prediction's dollars are at the last one, and only times are compared."""
        return is_one_rate(self.sessions)

    @property
    def prices_text(self) -> str:
        return prices_text(prices_paid(self.series))

    @property
    def before(self) -> dict[str, Any]:
        """The prediction that the run is held against: before its first step, or of the last resume, which it follows where
        the plan has changed."""
        return self.series.prediction("before")

    @property
    def basis_of_before(self) -> str:
        """When that was predicted: a resume with the same plan at the same price says nothing new."""
        first = next((row for row in self.series.predictions if row.get("basis") == "before"), {})
        figures = ("total_seconds", "total_usd", "step_seconds")
        is_first = all(_alike(finite(first.get(name)), finite(self.before.get(name))) for name in figures)
        return "before the run" if is_first else "at the last resume"

    @property
    def tokens_seen(self) -> dict[str, Any]:
        return self.series.prediction("tokens_seen")

    @property
    def best_prediction(self) -> dict[str, Any]:
        return self.tokens_seen or self.before

    @property
    def num_steps_done(self) -> int | None:
        last = self.series.summary_value("global_step") or max(self.series.measured("global_step"), default=0)
        return int(last) or None

    @property
    def max_steps(self) -> int | None:
        steps = finite(self.series.session_value("max_steps"))
        return int(steps) if steps and steps > 0 else None

    @property
    def status(self) -> str:
        if self.series.summary is None:
            of = f" of {self.max_steps:,}" if self.max_steps else ""
            done = f"step {self.num_steps_done:,}{of}" if self.num_steps_done else "no step was finished"
            return f"no summary yet (running or killed), {done}"
        status = str(self.series.summary.get("status", "finished")).replace("_", " ")
        error = self.series.summary.get("error")
        status += f" ({error})" if error else ""
        return f"{status} at step {self.num_steps_done:,}" if self.num_steps_done else status

    @property
    def final_usd(self) -> float | None:
        """Dollars of the whole run: spent when it is complete, else projected."""
        return self.totals.spent_usd if self.is_complete else self.series.projected("projected_total_usd")

    @property
    def final_seconds(self) -> float | None:
        return self.totals.wall_seconds if self.is_complete else self.series.projected("projected_total_seconds")

    @property
    def is_over(self) -> bool:
        """A summary was written: nothing is spent on this run any more."""
        return self.series.summary is not None

    @property
    def is_complete(self) -> bool:
        """It ran to its end, so that its cost can be held against the prediction of the whole."""
        return self.totals.finished

    @property
    def sessions_in_rates(self) -> str:
        """Which sessions the rates hold; empty where it is all of them."""
        number, of = self.series.summary_value("num_sessions_in_rates"), self.series.summary_value("num_sessions")
        if number is None or of is None or number >= of:
            return ""
        return "last session" if number == 1 else f"last {number:.0f} sessions"

    def _said_rate(self, name: str) -> float | None:
        """The summary's, where it holds all steps of the run: older records hold the last session's."""
        of_one_session = self.series.summary_value("num_sessions") in (None, 1.0)
        if of_one_session or self.series.summary_value("num_sessions_in_rates") is not None:
            return self.series.summary_value(name)
        return None

    def _per_step(self, name: str) -> tuple[float, float] | None:
        """(sum, steps) of a column over the rows that know it, the first row of each session and profiled steps left out."""
        profiled = []
        if self.series.measured("is_profiled"):
            profiled = [place for place, value in enumerate(self.series.columns["is_profiled"]) if value == 1]
        return self.series.sums(name, [*self.series.session_starts, *profiled]) or self.series.sums(name)

    @property
    def steady_step_seconds(self) -> float | None:
        """Mean step of all sessions, the first step of each left out; the summary's own figure where there is one."""
        said, sums = self._said_rate("step_seconds_mean"), self._per_step("step_seconds")
        return said if said is not None else sums[0] / sums[1] if sums is not None else None

    def tokens_per_second(self, name: str) -> float | None:
        """Tokens of that kind over the seconds of the same steps: data wait inside, pauses and first steps outside."""
        said = self._said_rate(name.removeprefix("num_") + "_per_second")
        if said is not None:
            return said
        tokens, step = self._per_step(name), self.steady_step_seconds
        return tokens[0] / tokens[1] / step if tokens is not None and tokens[0] and step else None

    @property
    def predicted_gpu(self) -> str | None:
        """The card that was predicted for, where it is not the device that trained."""
        name = self.series.session("device").get("predicted_gpu")
        return str(name) if name else None

    @property
    def mfu(self) -> float | None:
        said = self.series.summary_value("mfu")
        pairs = pairs_of(self.series.columns["step_seconds"], self.series.columns["mfu"])
        seconds = math.fsum(pair[0] for pair in pairs)
        return said if said is not None else math.fsum(a * b for a, b in pairs) / seconds if seconds else None

    def peak_bytes(self, name: str) -> float | None:
        return first_known(self.series.summary_value(name), max(self.series.measured(name), default=None))

    @property
    def padding_share(self) -> float | None:
        """Share of the computed tokens that were padding."""
        computed, kept = (
            first_known(self.series.summary_value(name), self.series.total(name))
            for name in ("num_tokens", "num_non_padding_tokens")
        )
        return max(0.0, 1.0 - kept / computed) if computed and kept is not None else None

    def reason(self, *words: str) -> str | None:
        """The note of the record that says why something is absent."""
        notes = self.series.session_value("notes")
        for note in notes if isinstance(notes, list) else []:
            text = str(note).lower()
            # A note on predicting names memory and cards too, and says nothing of why they were not measured.
            if any(word in text for word in words) and ("predict" not in text or "predict" in words):
                return str(note)
        return None


def first_known(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def predicted_memory(prediction: Mapping[str, Any]) -> dict[str, float]:
    memory = prediction.get("memory")
    found = {str(key): finite(value) for key, value in memory.items()} if isinstance(memory, dict) else {}
    return {key: value for key, value in found.items() if value is not None}


def plan_ratio(run: ReportedRun) -> tuple[float | None, str]:
    """Whole run over the prediction that it is held against, and a note on the later prediction.

    In dollars where one price was paid all along, else in time.
    """

    def ratio(prediction: Mapping[str, Any]) -> float | None:
        predicted_usd, predicted_seconds = finite(prediction.get("total_usd")), finite(prediction.get("total_seconds"))
        if run.final_usd is not None and predicted_usd and run.compares_dollars:
            return run.final_usd / predicted_usd
        return run.final_seconds / predicted_seconds if run.final_seconds is not None and predicted_seconds else None

    if run.predicted_gpu is not None:
        return None, f"the prediction is for {run.predicted_gpu}, not the device that trained"
    first, later = ratio(run.before), ratio(run.tokens_seen)
    of_time = "" if run.compares_dollars or first is None else "of time: the price changed; "
    return first, of_time + (f"{later:.2f} on the tokens really seen" if later else "1.00 is on plan" if first else "")


def _alike(one: float | None, other: float | None) -> bool:
    return one == other if one is None or other is None else math.isclose(one, other, rel_tol=1e-6)


def _counted(number: int) -> str:
    return f"{number:,}" if number else "The"


@dataclass(frozen=True)
class Saving:
    """Time that a run like this one need not take again, at most. In ``advice``, code stands in backticks."""

    seconds: float
    title: str
    advice: str
    bucket: str  # of the time that it is part of


def savings(run: ReportedRun) -> list[Saving]:
    """What of the record's time could be saved, the most first; nothing below 1 % of the wall time.

    Padding is counted as its share of the tokens times the training time, data wait left out: an upper bound, since
    attention and the optimizer do not shrink in step with the tokens.
    """
    sums, seconds = run.totals, run.totals.bucket_seconds
    evals, saves = (_counted(len(run.series.pauses[kind])) for kind in ("eval", "save"))
    padding = run.padding_share or 0.0
    found = [
        Saving(
            seconds["data_wait"],
            "Feed the GPU sooner",
            "Steps waited for their batch. More `dataloader_num_workers`, or tokenise before the run.",
            "data_wait",
        ),
        Saving(
            padding * seconds["train"],
            "Compute less padding",
            f"{percent(padding)} of the computed tokens were padding. "
            'Try `train_sampling_strategy="group_by_length"`, `packing` or `padding_free`.',
            "train",
        ),
        Saving(
            sums.wasted_seconds,
            "Lose fewer steps to an interruption",
            "Steps after the last checkpoint ran twice. A smaller `save_steps` loses fewer.",
            "train",
        ),
        Saving(
            seconds["eval"],
            "Evaluate less",
            f"{evals} evaluations. Fewer, on fewer samples, or with a larger `per_device_eval_batch_size`.",
            "eval",
        ),
        Saving(
            seconds["save"],
            "Save less",
            f"{saves} checkpoints. Try `save_only_model`, a larger `save_steps` or a faster disk.",
            "save",
        ),
        Saving(
            seconds["startup"],
            "Start faster",
            "Paid before the first step. Keep the model and the tokenised data on a disk of the machine.",
            "startup",
        ),
    ]
    worth = [saving for saving in found if saving.seconds > 0 and saving.seconds >= LEAST_SHARE * sums.wall_seconds]
    return sorted(worth, key=lambda saving: -saving.seconds)
