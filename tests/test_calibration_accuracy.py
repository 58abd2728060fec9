"""Calibration on two measured batches, on the public series: ``accuracy/calibration_sweeps.py``, docs/accuracy.md."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from costmodel import constants
from costmodel.errors import CostModelError

ROOT = Path(__file__).parent.parent
ACCURACY = ROOT / "accuracy"


@pytest.fixture(scope="module", autouse=True)
def _accuracy_on_the_path() -> Iterator[None]:
    sys.path.insert(0, str(ACCURACY))
    yield
    sys.path.remove(str(ACCURACY))


@pytest.fixture(scope="module")
def sweeps(_accuracy_on_the_path: None) -> Any:
    import calibration_sweeps

    return calibration_sweeps


@pytest.fixture(scope="module")
def series(sweeps: Any) -> Any:
    """Source, model and settings -> its steps by number of tokens; at least three of them."""
    from runs import all_runs

    return sweeps.measured_series(all_runs())


def test_the_rest_of_a_batch_sweep_is_within_3_percent(sweeps: Any, series: Any) -> None:
    errors = sweeps.errors_of_the_rest(series, "sweep")
    assert len(errors) == 41
    assert statistics.median(errors) <= 0.02
    assert sum(each <= 0.11 for each in errors) >= 0.9 * len(errors)


def test_other_lengths_are_within_6_percent(sweeps: Any, series: Any) -> None:
    errors = sweeps.errors_of_the_rest(series, "lengths")
    assert len(errors) == 39
    assert statistics.median(errors) <= 0.05
    assert sum(each <= 0.17 for each in errors) >= 0.9 * len(errors)


def test_calibration_is_closer_than_the_model_alone(sweeps: Any, series: Any) -> None:
    """On the sweeps, although the constants were fitted on them; on the lengths two points are no better than those."""
    alone = [
        abs(step.predicted_seconds() / step.seconds - 1)
        for key, steps in series.items()
        if key[0] == "sweep"
        for step in steps
    ]
    assert statistics.median(sweeps.errors_of_the_rest(series, "sweep")) < 0.75 * statistics.median(alone)


def test_two_neighbouring_small_batches_are_refused_with_what_to_measure(sweeps: Any, series: Any) -> None:
    """In every series whose batches are neighbours; two profiles of the paper jump from 128 to 1,280 and 3,840 tokens."""
    refused = 0
    for steps in series.values():
        if steps[1].batch.num_tokens / steps[0].batch.num_tokens > 3:
            continue
        with pytest.raises(CostModelError, match=r"neighbours.*measure the smallest batch and one of at least \d+ tokens"):
            sweeps.fitted(steps[0], steps[1])
        refused += 1
    assert refused == 17


def test_the_shipped_interval_holds_80_percent_between_two_batches(sweeps: Any, series: Any) -> None:
    """Every pair that is allowed, the steps between them; each series weighs the same."""
    weighted: list[tuple[float, float]] = []
    for steps in series.values():
        missed = []
        for low, high in itertools.combinations(range(len(steps)), 2):
            if high - low < 2 or (len(steps) > 10 and (low > 2 or high % 3)):  # long sweeps: a part of the pairs
                continue
            try:
                calibration = sweeps.fitted(steps[low], steps[high])
            except CostModelError:
                continue
            if calibration.num_factors == 2:
                missed += [math.log1p(sweeps.error(step, calibration)) for step in steps[low + 1 : high]]
        weighted += [(each, 1 / len(missed)) for each in missed]
    total = sum(weight for _, weight in weighted)
    share = sum(weight for each, weight in weighted if each <= constants.CALIBRATED_STEP_INTERVAL) / total
    assert 0.78 <= share <= 0.90


def test_whole_sweeps_keep_the_errors_they_state(sweeps: Any, series: Any) -> None:
    """80 % of the steps lie within what their calibration says, each series weighing the same."""
    shares = []
    for steps in series.values():
        calibration = sweeps.fitted(*steps) if sweeps.two_batches(steps) else None
        if calibration is not None:
            assert calibration.error is not None
            shares.append(sum(sweeps.error(step, calibration) <= calibration.error for step in steps) / len(steps))
    assert len(shares) == 18
    assert statistics.mean(shares) >= 0.8
    assert min(shares) >= 0.6


def test_the_document_states_these_errors(sweeps: Any, series: Any) -> None:
    text = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    for kind in ("sweep", "lengths"):
        errors = sweeps.errors_of_the_rest(series, kind)
        assert f"| {len(errors)} | {100 * statistics.median(errors):.1f} |" in text
