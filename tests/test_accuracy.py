"""The measured runs: every row decided on, the leave-one-out errors as stated, the intervals' coverage."""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
ACCURACY = ROOT / "accuracy"


@pytest.fixture(scope="module", autouse=True)
def _accuracy_on_the_path() -> Iterator[None]:
    sys.path.insert(0, str(ACCURACY))
    yield
    sys.path.remove(str(ACCURACY))


@pytest.fixture(scope="module")
def runs() -> list[Any]:
    from runs import all_runs

    return [run for run in all_runs() if run.seconds is not None]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((ACCURACY / "fit.json").read_text(encoding="utf-8"))
    return read


@pytest.fixture(scope="module")
def by_source(report: dict[str, Any]) -> dict[str, float]:
    return {run_id: entry["log_error"] for run_id, entry in report["source"].items()}


def test_every_row_is_used_or_says_why_not() -> None:
    rows = {}
    for path in sorted((ACCURACY / "data").glob("*.csv")):
        with open(path, encoding="utf-8", newline="") as file:
            rows.update({row["row_id"]: row for row in csv.DictReader(file)})
    with open(ACCURACY / "rows.csv", encoding="utf-8", newline="") as file:
        decisions = list(csv.DictReader(file))
    assert len(rows) == 655
    assert {decision["row_id"] for decision in decisions} == set(rows)
    assert len(decisions) == 655
    assert all(decision["reason"] for decision in decisions if decision["time"] == decision["memory"] == "no")


def test_the_left_out_errors_belong_to_these_runs(runs: list[Any], by_source: dict[str, float]) -> None:
    assert {run.run_id for run in runs} == set(by_source)


def test_dense_runs_with_their_source_left_out(runs: list[Any], by_source: dict[str, float]) -> None:
    """The bars of docs/accuracy.md that are met: median 6 %, 90 % of the runs within 20 %."""
    errors = [abs(math.exp(by_source[run.run_id]) - 1) for run in runs if not run.is_moe]
    assert statistics.median(errors) <= 0.06
    assert sum(error <= 0.20 for error in errors) >= 0.90 * len(errors)


def test_mixtures_of_experts_with_their_source_left_out(runs: list[Any], by_source: dict[str, float]) -> None:
    """The bar: median 10 %. One loop over experts is predicted from the other."""
    errors = [abs(math.exp(by_source[run.run_id]) - 1) for run in runs if run.is_moe]
    assert statistics.median(errors) <= 0.10


def test_every_series_of_the_paper_left_out_is_below_its_own_formula(runs: list[Any], report: dict[str, Any]) -> None:
    """The bars: median 10 %, and a mean below that of Eq. 2 with the paper's coefficients on the points it was fitted to."""
    from costmodel import xia2024

    series = xia2024.throughput_series()
    assert len(series) == 5
    for each in series:
        name = f"{each.model} {each.dataset} {each.gpu}"
        ours = [abs(math.exp(report["series"][run.run_id]["log_error"]) - 1) for run in runs if run.series == name]
        assert len(ours) == len(each.points)
        assert statistics.median(ours) <= 0.10, name
        theirs = xia2024.mean_absolute_relative_error(each.points, each.coefficients, xia2024.samples_per_second_as_coded)
        assert statistics.mean(ours) < theirs, name


def test_no_constant_ships_as_a_point_that_leaving_a_source_out_moves_by_more_than_two(report: dict[str, Any]) -> None:
    """Over the fits with one source, card or series left out that still witness it."""
    from fit import FREE

    for name, (neutral, _, _) in FREE.items():
        values = [
            constants[name]
            for which in ("source", "card", "series")
            for constants in report[f"{which}_constants"].values()
            if constants[name] != neutral
        ]
        assert len(values) >= 10, name
        assert max(values) <= 2 * min(values), (name, min(values), max(values))


def test_eight_gpus_fully_sharded_are_predicted_without_having_been_fitted_on() -> None:
    """MPT-7B on three cards, 15 public rows."""
    from several_gpus import log_error, several_gpu_runs

    errors = [abs(math.exp(log_error(run)) - 1) for run in several_gpu_runs()]
    assert len(errors) == 15
    assert statistics.median(errors) <= 0.08
    assert max(errors) <= 0.20


def test_shipped_constants_are_the_fitted_ones_within_their_rounding() -> None:
    from fit import current_constants

    fitted = json.loads((ACCURACY / "fit.json").read_text(encoding="utf-8"))["fitted"]
    shipped = current_constants()
    assert set(shipped) == set(fitted)
    for name, value in shipped.items():
        assert value == pytest.approx(fitted[name], rel=0.06), name


def test_shipped_step_times_are_those_of_the_evidence_in_kind(runs: list[Any]) -> None:
    """In sample: each class's median error, as a guard against a change that was not meant."""
    from fit import log_error

    groups: dict[str, list[float]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(abs(math.exp(log_error(run)) - 1))
    medians = {group: statistics.median(errors) for group, errors in groups.items()}
    assert max(medians.values()) <= 0.125, medians
    assert statistics.median(medians.values()) <= 0.08


def test_intervals_cover_70_to_90_percent_of_left_out_runs(runs: list[Any], by_source: dict[str, float]) -> None:
    """The width of each run's interval comes from the other sources alone."""
    from evaluate import nested_coverage

    for widened in (False, True):  # True: as the answer widens for a stack or a card that only the left-out source has
        inside = nested_coverage(runs, by_source, widened=widened)
        assert 0.70 <= sum(inside.values()) / len(inside) <= 0.90


def test_shipped_widths_are_not_below_the_residuals(runs: list[Any], by_source: dict[str, float]) -> None:
    from evaluate import covered, interval_widths

    from costmodel import constants

    for regime, width in interval_widths(runs, by_source).items():
        assert width <= constants.STEP_INTERVAL[regime] <= 1.4 * width, regime
    inside = covered(runs, by_source, constants.STEP_INTERVAL)
    assert 0.70 <= sum(inside.values()) / len(inside) <= 0.90


def test_the_document_states_the_computed_errors(runs: list[Any], by_source: dict[str, float]) -> None:
    text = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    errors = [100 * abs(math.exp(by_source[run.run_id]) - 1) for run in runs if not run.is_moe]
    assert f"| dense | {len(errors)} | {statistics.median(errors):.1f} |" in text
    of_experts = [100 * abs(math.exp(by_source[run.run_id]) - 1) for run in runs if run.is_moe]
    assert f"| mixture of experts | {len(of_experts)} | {statistics.median(of_experts):.1f} |" in text
