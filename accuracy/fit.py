"""Refit the constants of the step time, and say how well they transfer.

    python accuracy/fit.py            in-sample fit, then every source, card and series of the paper left out in turn
    python accuracy/fit.py --quick    the in-sample fit alone

Every class (source and kind of job) weighs the same, the error is that of the logarithm, and its size counts almost
linearly, so a row that the form cannot explain does not pull. What is fitted: :data:`FREE`. A constant that only the
left-out runs witness stays at its neutral value.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from runs import Run, all_runs

from costmodel import constants
from costmodel.step_time import StepTime, step_time

FOLDER = Path(__file__).parent
Constants = Mapping[str, float]

# name: (neutral value for a fit that has no witness, low, high). A dotted name is an entry of a table.
FREE: dict[str, tuple[float, float, float]] = {
    "ELEMENTWISE_FACTOR": (1.2, 0.5, 3.0),
    "SECONDS_PER_OPERATOR": (3.25e-6, 1e-6, 10e-6),
    "LOOP_OPERATOR_FACTOR": (1.0, 0.5, 10.0),
    "EXPERTS_OF_PADDING.blackmamba": (1.0, 0.5, 8.0),
    "DEQUANTISATION_BYTES.gptq-int4": (16.5, 2.5, 60.0),
    "HOST_FACTOR.litgpt": (1.0, 0.7, 2.5),
}
FULL_WEIGHT_RUNS = 3  # a class of fewer runs weighs less: one run is no evidence of a class
ROBUST_SCALE = 0.03  # log errors below this count by their square


def set_constants(values: Constants) -> None:
    """Put values into :mod:`costmodel.constants` (this process only)."""
    for name, value in values.items():
        table, _, entry = name.partition(".")
        if entry:
            getattr(constants, table)[entry] = value
        else:
            setattr(constants, table, value)


def current_constants() -> dict[str, float]:
    """The shipped values of :data:`FREE`."""
    values = {}
    for name in FREE:
        table, _, entry = name.partition(".")
        values[name] = getattr(constants, table)[entry] if entry else getattr(constants, table)
    return values


def predict(run: Run) -> StepTime:
    """Our step of one micro-batch; its optimizer share is inside."""
    step = step_time(run.model, run.job, run.gpu, run.batch)
    assert step is not None, run.run_id
    return step


def log_error(run: Run) -> float:
    """log(predicted / measured) of one micro-batch."""
    assert run.seconds is not None
    return math.log(predict(run).step_seconds / run.job.gradient_accumulation_steps / run.seconds)


def witnessed(name: str, runs: Sequence[Run]) -> bool:
    """Whether any run's time depends on the constant."""
    if name == "HOST_FACTOR.litgpt":
        return any(run.job.framework == "litgpt" for run in runs)
    if name.startswith("DEQUANTISATION"):
        return any(run.job.quantization == name.partition(".")[2] for run in runs)
    if name.startswith("EXPERTS_OF_PADDING"):
        return any(run.model.family == "blackmamba" and run.batch.num_padding_tokens > 0 for run in runs)
    if name.startswith("LOOP_OPERATOR"):
        return any(run.is_moe for run in runs)
    return True


def loss(runs: Sequence[Run], weights: Mapping[str, float]) -> float:
    total = 0.0
    for run in runs:
        error = log_error(run)
        total += weights[run.group] * (math.sqrt(error * error + ROBUST_SCALE**2) - ROBUST_SCALE)
    return total


def group_weights(runs: Sequence[Run]) -> dict[str, float]:
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.group] = counts.get(run.group, 0) + 1
    classes = {group: min(count, FULL_WEIGHT_RUNS) / FULL_WEIGHT_RUNS for group, count in counts.items()}
    return {group: weight / counts[group] / sum(classes.values()) for group, weight in classes.items()}


def fit(runs: Sequence[Run], start: Constants | None = None) -> dict[str, float]:
    """The constants with the smallest loss: cyclic search along each logarithm, the step halved when none improves."""
    values = dict(start or current_constants())
    for name, (neutral, _, _) in FREE.items():
        if not witnessed(name, runs):
            values[name] = neutral
    names = [name for name in FREE if witnessed(name, runs)]
    weights = group_weights(runs)

    def at(candidate: Constants) -> float:
        set_constants(candidate)
        return loss(runs, weights)

    return search(values, names, at)


def search(values: dict[str, float], names: Sequence[str], at: Callable[[Constants], float]) -> dict[str, float]:
    best, steps = at(values), dict.fromkeys(names, 0.25)
    while max(steps.values()) > 0.01:
        for name in names:
            if steps[name] <= 0.01:
                continue
            _, low, high = FREE[name]
            for sign in (1, -1):
                candidate = {**values, name: min(high, max(low, values[name] * math.exp(sign * steps[name])))}
                score = at(candidate)
                if score < best - 1e-7:
                    best, values = score, candidate
                    break
            else:
                steps[name] /= 2
    set_constants(values)
    return values


def timed_runs() -> list[Run]:
    return [run for run in all_runs() if run.seconds is not None]


def leave_out(runs: Sequence[Run], key: Callable[[Run], str], start: Constants) -> dict[str, tuple[float, Constants]]:
    """run id -> (log error when everything with the same key was left out, the constants of that fit)."""
    result: dict[str, tuple[float, Constants]] = {}
    for value in sorted({key(run) for run in runs}):
        fitted = fit([run for run in runs if key(run) != value], start)
        for run in runs:
            if key(run) == value:
                result[run.run_id] = (log_error(run), fitted)
    set_constants(start)
    return result


LEFT_OUT: dict[str, Callable[[Run], str]] = {
    "source": lambda run: run.source,
    "card": lambda run: run.gpu.name,
    "series": lambda run: run.series,
}


def main() -> None:
    runs = timed_runs()
    fitted = fit(runs)
    report: dict[str, object] = {"fitted": fitted, "num_runs": len(runs)}
    print(json.dumps(fitted, indent=1))
    if "--quick" not in sys.argv:
        for name, key in LEFT_OUT.items():
            left = leave_out(runs, key, fitted)
            report[name] = {run_id: {"log_error": error} for run_id, (error, _) in left.items()}
            constants_by_key = {key(run): left[run.run_id][1] for run in runs}
            report[f"{name}_constants"] = constants_by_key
    (FOLDER / "fit.json").write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
