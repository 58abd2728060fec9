"""What interruptions add to a run on spot machines: work that is lost since the last checkpoint, and starting again.

    expected = useful / interval · mean · exp(restart / mean) · (exp((interval + save) / mean) - 1)

``mean``: between two interruptions, which come independently of each other, in repeated work and in restarts too. Where
they are rare that is half an interval and a restart lost by each. Source: Daly 2006, the complete model,
doi:10.1016/j.future.2004.11.016; Young 1974, "A first order approximation to the optimum checkpoint interval",
doi:10.1145/361147.361115. Leaves out the wait for a new machine unless it is part of ``restart_seconds``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from costmodel.arguments import as_number
from costmodel.cost import steps_between
from costmodel.units import SECONDS_PER_HOUR

# Above this share of the time lost, more checkpoints are worth a sentence.
LARGE_LOSS: Final = 0.2
# Tries for one way from a checkpoint to the next, beyond which a run counts as one that does not get on.
MAX_TRIES: Final = 1000.0

# One a second, and a month: beyond them it is no machine that anybody trains on.
MAX_INTERRUPTIONS_PER_HOUR: Final = 3600.0
MAX_RESTART_SECONDS: Final = 30 * 24 * SECONDS_PER_HOUR

SPOT_WITHOUT_RATE: Final = (
    "the spot price is used as it is: lost work and restarts are not in it; "
    "give interruptions_per_hour (--interruptions-per-hour)"
)


@dataclass(frozen=True, slots=True)
class SpotTerms:
    """How often a machine is taken away, and how long it takes to go on. ``None``: the run's own start-up time."""

    interruptions_per_hour: float
    restart_seconds: float | None = None

    def __post_init__(self) -> None:
        most = f"a number >= 0, at most {MAX_INTERRUPTIONS_PER_HOUR:g}"
        as_number(self.interruptions_per_hour, "interruptions_per_hour", most, high=MAX_INTERRUPTIONS_PER_HOUR)
        if self.restart_seconds is not None:
            most = f"a number >= 0, at most {MAX_RESTART_SECONDS:,.0f}"
            as_number(self.restart_seconds, "restart_seconds", most, high=MAX_RESTART_SECONDS)


@dataclass(frozen=True, slots=True)
class SpotRun:
    """A run with interruptions, in expectation. ``best_save_interval_seconds``: Young's optimum, where a save takes time.

    The figures in expectation are ``None`` where the run hardly ever comes from one checkpoint to the next, and a warning
    says so.
    """

    interruptions_per_hour: float
    restart_seconds: float
    save_interval_seconds: float
    num_interruptions: float | None
    lost_seconds: float | None
    restarting_seconds: float | None
    expected_seconds: float | None
    expected_usd: float | None
    best_save_interval_seconds: float | None
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "warnings": list(self.warnings)}


def expected_seconds(
    useful_seconds: float,
    *,
    save_seconds: float,
    save_interval_seconds: float,
    interruptions_per_hour: float,
    restart_seconds: float,
) -> float:
    """The module's formula; infinite where no float holds it.

    ``save_seconds`` is what one checkpoint takes, ``save_interval_seconds`` the work between two.
    """
    between = save_interval_seconds + save_seconds
    rate = interruptions_per_hour / SECONDS_PER_HOUR
    try:
        of_one = math.exp(rate * restart_seconds) * math.expm1(rate * between) / rate if rate else between
    except OverflowError:
        return math.inf
    # rounding of a tiny rate: never less than without interruptions
    return useful_seconds * max(of_one / save_interval_seconds, 1 + save_seconds / save_interval_seconds)


def best_save_interval_seconds(save_seconds: float, interruptions_per_hour: float) -> float | None:
    """``sqrt(2 · save / rate)`` (Young); ``None`` where saving or being interrupted costs nothing."""
    if save_seconds <= 0 or interruptions_per_hour <= 0:
        return None
    return math.sqrt(2 * save_seconds * SECONDS_PER_HOUR / interruptions_per_hour)


def spot_run(answer: Mapping[str, Any], terms: SpotTerms) -> SpotRun | None:
    """The run of an answer (``Estimate.to_dict()``) with interruptions; ``None`` where its total is not known."""
    total, train, num_steps = answer.get("total_seconds"), answer.get("train_seconds"), answer.get("num_steps")
    if total is None or not train or not num_steps:
        return None
    steps = _steps_between_saves(answer["job"], num_steps, _epochs(answer, num_steps))
    interval = train * (steps or num_steps) / num_steps
    all_saves = answer.get("save_seconds") or 0.0
    restart = terms.restart_seconds if terms.restart_seconds is not None else answer.get("startup_seconds") or 0.0
    save = all_saves * interval / (total - all_saves)  # of one: so that without interruptions the total is the answer's
    expected = expected_seconds(
        total - all_saves,
        save_seconds=save,
        save_interval_seconds=interval,
        interruptions_per_hour=terms.interruptions_per_hour,
        restart_seconds=restart,
    )
    rate = terms.interruptions_per_hour / SECONDS_PER_HOUR
    interruptions = rate * expected
    restarting = -math.expm1(-rate * restart) * expected  # a restart that is interrupted is one in part
    warnings = []
    if steps is None and terms.interruptions_per_hour > 0:
        warnings.append("no checkpoint is saved: each interruption loses the run so far; set save_strategy")
    gets_on = rate * (interval + save + restart) < math.log(MAX_TRIES)
    if not gets_on:
        warnings.append(
            f"the run does not get on: one interruption is due in {1 / rate:,.0f} s, and from one checkpoint to the next it "
            f"takes {interval + save + restart:,.0f} s with a restart; save more often, or take on_demand"
        )
    elif expected > 0 and 1 - total / expected > LARGE_LOSS:
        warnings.append(f"interruptions take {1 - total / expected:.0%} of the time: save more often")
    usd = answer.get("total_usd")
    return SpotRun(
        interruptions_per_hour=terms.interruptions_per_hour,
        restart_seconds=restart,
        save_interval_seconds=interval,
        num_interruptions=interruptions if gets_on else None,
        lost_seconds=max(0.0, expected - total - restarting) if gets_on else None,
        restarting_seconds=restarting if gets_on else None,
        expected_seconds=expected if gets_on else None,
        expected_usd=usd * expected / total if gets_on and usd is not None else None,
        best_save_interval_seconds=best_save_interval_seconds(save, terms.interruptions_per_hour) if steps else None,
        warnings=tuple(warnings),
    )


def _epochs(answer: Mapping[str, Any], num_steps: int) -> float:
    """Passes over the data: as many as are asked for, unless ``max_steps`` ends the run."""
    job = answer["job"]
    samples, per_second, seconds = job.get("num_samples"), answer.get("samples_per_second"), answer.get("step_seconds")
    if (job.get("max_steps") or 0) > 0 and samples and per_second and seconds:
        return float(num_steps * per_second * seconds / samples)
    return float(job.get("num_train_epochs") or 1.0)


def _steps_between_saves(job: Mapping[str, Any], num_steps: int, epochs: float) -> float | None:
    """Optimizer steps from one checkpoint to the next; ``None`` where nothing is saved before the end."""
    strategy = job.get("save_strategy")
    if strategy == "best":
        strategy, setting = job.get("eval_strategy"), job.get("eval_steps") or 500
    else:
        setting = job.get("save_steps") or 500
    if strategy == "steps":
        steps = float(steps_between(setting, num_steps))
    elif strategy == "epoch":
        steps = num_steps / max(1.0, epochs)
    else:
        return None
    return steps if steps < num_steps else None
