"""The estimates that a run is held against: one before its first step, one on the tokens of the first steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from costmodel.errors import CostModelError
from ftcost_callback.dry_run import LONGEST_STEPS
from ftcost_callback.recorder import StepAggregate
from ftcost_callback.records import Prediction
from ftcost_callback.reporting import tokens_seen
from ftcost_callback.session_plan import Settings

STEPS_BEFORE_SECOND_PREDICTION: Final = 20
UNDESCRIBED_CPU: Final = (
    "trained on a CPU: neither its memory nor its time is predicted; gpu='H100 SXM' (say) predicts for that card, "
    "gpu='probe' after `ftcost probe` for this processor"
)


class LivePrediction:
    """``job``: the plain mapping of :func:`costmodel.estimate`; ``None`` where it could not be read. ``on_cpu``: it trains
    on a processor; what a card would need is then no prediction of this run."""

    def __init__(self, settings: Settings, job: dict[str, Any] | None, *, on_cpu: bool = False) -> None:
        self._settings = settings
        self._job = job
        self._is_undescribed_cpu = on_cpu and job is not None and job.get("gpu") is None
        self._has_predicted_again = False
        self.first: Prediction | None = None
        self.latest: Prediction | None = None
        # Over the whole run, where the lengths were known before it began.
        self.expected_tokens_per_step: float | None = None

    @property
    def different(self) -> list[Prediction]:
        """The first and the latest, without one that stands for both."""
        return list({each.basis: each for each in (self.first, self.latest) if each is not None}.values())

    def predict(self, global_step: int, notes: list[str]) -> None:
        """Before the first step. ``notes``: why there is none is added to them."""
        from costmodel.estimation import estimate

        if not self._settings.predict or self._job is None:
            return
        try:
            answer = estimate(self._job_to_ask()).to_dict()
        except CostModelError as refusal:
            lacks_only_max_length = self._lacks_only_max_length()
            if self._is_undescribed_cpu and lacks_only_max_length:
                notes.append(UNDESCRIBED_CPU)  # nothing would be predicted with it either
            elif lacks_only_max_length:
                notes.append(f"no prediction before step {self._steps_before_second} (then on the tokens seen): {refusal}")
            else:
                notes.append(f"no prediction: {refusal}")
            return
        if self._is_undescribed_cpu:
            notes.append(UNDESCRIBED_CPU)
        elif self._job.get("lengths") is None:
            notes.append(
                f"time and cost are not predicted before step {self._steps_before_second} (then on the tokens seen): the "
                "data set's lengths could not be read; memory is for sequences of max_length"
            )
        if self._job.get("lengths") is not None:
            self.expected_tokens_per_step = answer.get("num_tokens_per_step")
        self.first = self.latest = self._prediction("before", global_step, answer)

    def _lacks_only_max_length(self) -> bool:
        """Which the longest sequence seen stands in for."""
        from costmodel.estimation import estimate

        job = self._job_to_ask()
        if job.get("max_length") is not None:
            return False
        try:
            estimate({**job, "max_length": 1})
        except CostModelError:
            return False
        return True

    def second_is_due(self, num_measured_steps: int) -> bool:
        return (
            self._settings.predict
            and self._job is not None
            and not self._has_predicted_again
            and num_measured_steps >= self._steps_before_second
        )

    @property
    def _steps_before_second(self) -> int:
        dry_run_steps = self._settings.dry_run_steps
        if dry_run_steps is None:
            return STEPS_BEFORE_SECOND_PREDICTION
        return min(STEPS_BEFORE_SECOND_PREDICTION, max(1, dry_run_steps - LONGEST_STEPS))

    def predict_again(
        self, global_step: int, steps: StepAggregate, *, startup_seconds: float | None = None
    ) -> Prediction | None:
        """On the tokens of ``steps``; ``None`` where they were not shown or cannot be asked about.

        ``startup_seconds``: what starting up has taken, over all sessions, in place of a rule of thumb.
        """
        from costmodel.answer import with_startup
        from costmodel.estimation import estimate_from_tokens

        seen = tokens_seen(steps)
        if seen is None:
            return None
        self._has_predicted_again = True
        try:
            estimated = estimate_from_tokens(self._job_to_ask(), seen)
            answer = (with_startup(estimated, startup_seconds) if startup_seconds is not None else estimated).to_dict()
        except CostModelError:
            return None
        self.latest = self._prediction("tokens_seen", global_step, answer)
        return self.latest

    def imbalance_seconds(self, load: Sequence[Sequence[int]], steps: StepAggregate) -> float | None:
        """Seconds that the experts' ``load`` adds to an optimizer step; ``None`` where that cannot be told.

        On the tokens of ``steps`` where they were shown. Every GPU is taken to hold all experts.
        """
        from costmodel.estimation import estimated_imbalance_seconds

        if not self._settings.predict or self._job is None:
            return None
        try:
            return estimated_imbalance_seconds(self._job_to_ask(), load, tokens_seen(steps))
        except CostModelError:
            return None  # no lengths, or experts that the model's shape does not know

    def _job_to_ask(self) -> dict[str, Any]:
        calibration = {"calibration": self._settings.calibration} if self._settings.calibration is not None else {}
        return {**(self._job or {}), **calibration}

    def _prediction(self, basis: Literal["before", "tokens_seen"], global_step: int, answer: dict[str, Any]) -> Prediction:
        if self._is_undescribed_cpu:
            others = [each for each in answer["warnings"] if not each.startswith("no gpu is given")]
            answer = {**answer, "memory": None, "warnings": [UNDESCRIBED_CPU, *others]}
        return Prediction(basis=basis, global_step=global_step, estimate=answer)
