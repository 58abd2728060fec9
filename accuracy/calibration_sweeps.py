"""Calibration on two measured batches, on the public series: the paper's batch sweeps and Qwen 1's lengths.

Of each series the smallest batch and the middle one are measured, or the largest where those two do not give two factors;
the errors are those of all other batches.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from log_errors import quantile
from runs import Run

from costmodel.calibration import Calibration, MeasuredStep, fit
from costmodel.errors import CostModelError

Series = dict[tuple[Any, ...], list[MeasuredStep]]
KINDS: Mapping[str, str] = {"sweep": "batch sizes of one length, the paper's sweeps", "lengths": "lengths, Qwen 1's tables"}


def measured_series(runs: Sequence[Run]) -> Series:
    """Source, model and settings -> its steps by number of tokens; at least three of them."""
    found: Series = {}
    for run in runs:
        if run.seconds is None or not (run.source == "qwen1" or run.source.startswith("paper")):
            continue
        key = ("lengths" if run.source == "qwen1" else "sweep", run.series, run.model.name, run.job.method)
        key += (run.job.lora_modules_to_save,)
        seconds = run.seconds * run.job.gradient_accumulation_steps
        found.setdefault(key, []).append(MeasuredStep(run.model, run.job, run.gpu, run.batch, seconds, run.run_id))
    return {key: sorted(steps, key=lambda step: step.batch.num_tokens) for key, steps in found.items() if len(steps) >= 3}


def fitted(*steps: MeasuredStep) -> Calibration:
    return fit(steps, created_on="2026-09-30", ftcost_version="0")


def error(step: MeasuredStep, calibration: Calibration) -> float:
    """Relative to the measured step."""
    return abs(step.predicted_seconds(calibration.device_factor, calibration.host_factor) / step.seconds - 1)


def two_batches(steps: Sequence[MeasuredStep]) -> tuple[int, int] | None:
    """Smallest and middle; smallest and largest where those do not give two factors; ``None`` where neither pair does."""
    for place in (len(steps) // 2, len(steps) - 1):
        try:
            if fitted(steps[0], steps[place]).num_factors == 2:
                return 0, place
        except CostModelError:
            continue
    return None


def errors_of_the_rest(series: Series, kind: str) -> list[float]:
    """Of every step of the series of one kind that is not one of its two measured ones."""
    errors = []
    for key, steps in series.items():
        if key[0] == kind and (pair := two_batches(steps)) is not None:
            calibration = fitted(*(steps[place] for place in pair))
            errors += [error(step, calibration) for place, step in enumerate(steps) if place not in pair]
    return errors


def calibration_section(runs: Sequence[Run]) -> list[str]:
    """The lines of the document."""
    series = measured_series(runs)
    lines = [
        "Two steps of each series are measured: of the smallest batch and of the middle one, or of the largest where those",
        "two are too alike. A host factor and a device factor are fitted on them; the errors are of the rest.",
        "",
        "| series over | series | batches | median % | p90 % | the model alone, median % | goal |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, goal in (("sweep", 3.0), ("lengths", 6.0)):
        used = [steps for key, steps in series.items() if key[0] == kind and two_batches(steps) is not None]
        errors = errors_of_the_rest(series, kind)
        alone = [abs(step.predicted_seconds() / step.seconds - 1) for steps in used for step in steps]
        median = 100 * statistics.median(errors)
        lines.append(
            f"| {KINDS[kind]} | {len(used)} | {len(errors)} | {median:.1f} | {100 * quantile(errors, 0.9):.1f} | "
            f"{100 * statistics.median(alone):.1f} | {goal:.0f} %: {'met' if median <= goal else '**not met**'} |"
        )
    refused = sorted({key[1] for key, steps in series.items() if two_batches(steps) is None})
    if refused:
        lines += ["", f"Left aside, because no pair of it tells host and device apart: {', '.join(refused)}."]
    return lines
