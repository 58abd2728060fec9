"""The formulas of arXiv:2408.04693 against the digits that the paper prints and the figures' own points."""

from __future__ import annotations

import math

import pytest

from costmodel import xia2024
from costmodel.errors import CostModelError
from costmodel.xia2024 import DENSE, SPARSE, Series, ThroughputCoefficients, ThroughputPoint

SERIES = {(each.model, each.dataset, each.gpu): each for each in xia2024.throughput_series()}
ROWS = {(row["model"], row["dataset"], row["gpu"]): row for row in xia2024.paper_table("fit_coefficients")}


@pytest.fixture(params=sorted(SERIES), ids="-".join)
def series(request: pytest.FixtureRequest) -> Series:
    return SERIES[request.param]


def published(series: Series, column: str) -> float:
    return float(ROWS[series.model, series.dataset, series.gpu][column])


def test_the_series_hold_all_58_points() -> None:
    assert {key: len(each.points) for key, each in SERIES.items()} == {
        ("Mixtral", "CS", "A40"): 10,
        ("BlackMamba", "CS", "A40"): 26,
        ("Mixtral", "MATH", "A40"): 5,
        ("BlackMamba", "MATH", "A40"): 13,
        ("Mixtral", "MATH", "A100-40GB"): 4,
    }


# --- Eq. 1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu_memory_gb", "sequence_tokens", "sparsity", "bar"),
    [
        # Figs. 8 and 13: the bars' labels; the sequence is the longest after the cut.
        pytest.param(48, 512, DENSE, 2, id="a40-commonsense-dense"),
        pytest.param(48, 512, SPARSE, 8, id="a40-commonsense-sparse"),
        pytest.param(40, 512, SPARSE, 6, id="a100-40-commonsense-sparse"),
        pytest.param(48, 1024, DENSE, 1, id="a40-math-dense"),
        pytest.param(48, 1024, SPARSE, 4, id="a40-math-sparse"),
        pytest.param(40, 1024, DENSE, 1, id="a100-40-math-dense"),
        pytest.param(40, 1024, SPARSE, 3, id="a100-40-math-sparse"),
        pytest.param(120, 512, SPARSE, 35, id="projection-120"),
    ],
)
def test_eq1_floored_is_the_papers_bar(gpu_memory_gb: int, sequence_tokens: int, sparsity: float, bar: int) -> None:
    batch = xia2024.max_batch_size(gpu_memory_gb, xia2024.MIXTRAL_MODEL_MEMORY_GB, sequence_tokens, sparsity)
    assert math.floor(batch) == bar


def test_the_projection_for_100_gb_is_printed_rounded_not_floored() -> None:
    batch = xia2024.max_batch_size(100, xia2024.MIXTRAL_MODEL_MEMORY_GB, 512, SPARSE)
    assert batch == pytest.approx(27.915, abs=0.001)
    assert (round(batch), math.floor(batch)) == (28, 27)


@pytest.mark.parametrize(
    ("sequence_tokens", "sparsity", "measured"), [(512, SPARSE, 27), (1024, SPARSE, 17), (1024, DENSE, 5)]
)
def test_eq1_is_a_quarter_to_four_tenths_low_on_80_gb(sequence_tokens: int, sparsity: float, measured: int) -> None:
    batch = math.floor(xia2024.max_batch_size(80, xia2024.MIXTRAL_MODEL_MEMORY_GB, sequence_tokens, sparsity))
    assert batch == {27: 20, 17: 10, 5: 3}[measured]
    assert 0.24 < 1 - batch / measured < 0.42


def test_a_model_that_fills_the_card_leaves_no_batch() -> None:
    assert xia2024.max_batch_size(24, 23.35 + 0.65, 512, DENSE) == 0.0
    assert xia2024.max_batch_size(16, 23.35, 512, DENSE) == 0.0


# --- Eq. 2 ------------------------------------------------------------------------------------------------------------


def test_the_fit_of_the_coded_form_gives_the_published_coefficients(series: Series) -> None:
    fitted = xia2024.fit_as_coded(series.points, series.coefficients.c3)
    assert fitted.c2 == pytest.approx(series.coefficients.c2, abs=5e-7)
    assert fitted.c4 == pytest.approx(series.coefficients.c4, abs=5e-7)


def test_the_fit_of_the_printed_form_gives_other_coefficients(series: Series) -> None:
    fitted = xia2024.fit_as_printed(series.points, series.coefficients.c3)
    assert fitted.c2 == pytest.approx(published(series, "printed_eq2_C2"), abs=5e-7)
    shift = fitted.c4 - fitted.c2 * math.log(fitted.c3)
    assert shift == pytest.approx(published(series, "printed_eq2_C4_minus_C2lnC3"), abs=5e-7)
    error = xia2024.root_mean_square_error(series.points, fitted, xia2024.samples_per_second_as_printed)
    assert error == pytest.approx(published(series, "printed_eq2_rmse"), abs=5e-5)


@pytest.mark.parametrize(
    ("key", "printed"),
    [
        # The RMSE that the paper states, to its two decimals.
        (("Mixtral", "CS", "A40"), 0.05),
        (("BlackMamba", "CS", "A40"), 0.79),
        (("Mixtral", "MATH", "A40"), 0.02),
        (("BlackMamba", "MATH", "A40"), 0.42),
        (("Mixtral", "MATH", "A100-40GB"), 0.03),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_the_stated_rmse_is_that_of_the_scoring_transform(key: tuple[str, str, str], printed: float) -> None:
    each = SERIES[key]
    scored = xia2024.root_mean_square_error(each.points, each.coefficients, xia2024.samples_per_second_as_scored)
    assert round(scored, 2) == printed
    assert scored == pytest.approx(published(each, "rmse_as_paper_code"), abs=5e-5)


def test_the_fits_own_rmse_is_larger_where_there_are_several_dense_points(series: Series) -> None:
    consistent = xia2024.root_mean_square_error(series.points, series.coefficients, xia2024.samples_per_second_as_coded)
    assert consistent == pytest.approx(published(series, "rmse_consistent_with_fit"), abs=5e-5)
    relative = xia2024.mean_absolute_relative_error(series.points, series.coefficients, xia2024.samples_per_second_as_coded)
    assert 100 * relative == pytest.approx(published(series, "mape_pct_consistent"), abs=0.005)
    scored = xia2024.root_mean_square_error(series.points, series.coefficients, xia2024.samples_per_second_as_scored)
    has_several_dense = sum(point.sparsity == DENSE for point in series.points) > 1
    assert (consistent > scored * 1.1) == has_several_dense


def test_the_two_forms_differ_where_it_matters() -> None:
    coefficients = ThroughputCoefficients(0.280836, 1.8, 0.316874)
    at_one = [xia2024.samples_per_second_as_coded(1, sparsity, coefficients) for sparsity in (DENSE, SPARSE)]
    assert at_one == [coefficients.c4, coefficients.c4]
    slopes = [
        xia2024.samples_per_second_as_coded(math.e, sparsity, coefficients) - coefficients.c4 for sparsity in (DENSE, SPARSE)
    ]
    assert slopes == pytest.approx([0.280836 / 1.8, 4 * 0.280836 / 1.8])
    printed = xia2024.samples_per_second_as_printed(4, SPARSE, coefficients)
    assert printed == pytest.approx(0.280836 * math.log(4 / 0.45) + 0.316874)


def test_a_fit_needs_two_batch_sizes() -> None:
    with pytest.raises(CostModelError, match="two batch sizes"):
        xia2024.fit_as_coded([ThroughputPoint(1, DENSE, 0.3), ThroughputPoint(1, DENSE, 0.4)], 1.8)


# --- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured_samples_per_second", "usd_per_hour", "printed"),
    [
        # Table IV: math_14k counted as 15,000 samples, 10 epochs. A40 from the figure's point, the others as printed.
        pytest.param(1.005476933, 0.79, 32.7, id="a40"),
        pytest.param(2.74, 1.67, 25.4, id="a100"),
        pytest.param(4.90, 2.10, 17.9, id="h100"),
    ],
)
def test_table_4(measured_samples_per_second: float, usd_per_hour: float, printed: float) -> None:
    assert round(xia2024.training_usd(15_000, 10, measured_samples_per_second, usd_per_hour), 1) == printed


def test_the_openorca_figure_is_for_2_9_million_samples_not_for_2_million() -> None:
    assert round(xia2024.training_usd(2_905_671, 10, 4.90, 2.10)) == 3459
    assert round(xia2024.training_usd(2_000_000, 10, 4.90, 2.10)) == 2381
