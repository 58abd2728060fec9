"""What interruptions cost: the formula by hand, and its limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_answer import answer

from costmodel.errors import CostModelError
from costmodel.spot import SpotTerms, best_save_interval_seconds, expected_seconds, spot_run


def test_by_hand() -> None:
    # 10 h of work, 1 min saved every 30 min: 10 h 20 min. One interruption in 5 h: 2.0667 of them,
    # each losing 15 min of work and 5 min of restart.
    expected = expected_seconds(
        36_000, save_seconds=60, save_interval_seconds=1800, interruptions_per_hour=0.2, restart_seconds=300
    )
    assert expected == pytest.approx(37_200 + 0.2 * 37_200 / 3600 * (900 + 300))


def test_youngs_interval_is_where_the_expected_time_is_least() -> None:
    best = best_save_interval_seconds(60, 0.2)
    assert best == pytest.approx(math.sqrt(2 * 60 * 3600 / 0.2))

    def expected(interval: float) -> float:
        return expected_seconds(
            36_000, save_seconds=60, save_interval_seconds=interval, interruptions_per_hour=0.2, restart_seconds=0
        )

    assert best is not None
    assert expected(best) < expected(0.8 * best)
    assert expected(best) < expected(1.25 * best)
    assert best_save_interval_seconds(0, 0.2) is None
    assert best_save_interval_seconds(60, 0) is None


@given(st.floats(60, 1e6), st.floats(0, 600), st.floats(60, 1e5), st.floats(0, 5), st.floats(0, 5), st.floats(0, 3600))
def test_more_interruptions_never_cost_less(
    useful: float, save: float, interval: float, rate: float, more: float, restart: float
) -> None:
    def expected(interruptions_per_hour: float) -> float:
        return expected_seconds(
            useful,
            save_seconds=save,
            save_interval_seconds=interval,
            interruptions_per_hour=interruptions_per_hour,
            restart_seconds=restart,
        )

    assert expected(rate + more) >= expected(rate) >= useful


def _answer(**job: Any) -> dict[str, Any]:
    # 75,000 s of training in 37,500 steps, 500 s of saves, 90 s of start-up
    return answer(job={"save_strategy": "steps", "save_steps": 500, "num_train_epochs": 10, **job})


def test_of_an_answer() -> None:
    run = spot_run(_answer(), SpotTerms(0.1, restart_seconds=200))
    assert run is not None
    assert run.save_interval_seconds == 1000
    assert run.num_interruptions == pytest.approx(0.1 * 75_600 / 3600)
    assert run.lost_seconds == pytest.approx(2.1 * 500)
    assert run.restarting_seconds == pytest.approx(2.1 * 200)
    assert run.expected_seconds == pytest.approx(75_600 + 2.1 * 700)
    assert run.expected_usd == pytest.approx(9.24 * (75_600 + 2.1 * 700) / 75_600)
    assert run.warnings == ()


def test_without_interruptions_it_is_the_answer() -> None:
    run = spot_run(_answer(), SpotTerms(0))
    assert run is not None
    assert run.expected_seconds == pytest.approx(75_600)
    assert run.expected_usd == pytest.approx(9.24)
    assert run.best_save_interval_seconds is None


@pytest.mark.parametrize(
    ("job", "interval"),
    [
        ({"save_steps": 0.1}, 7500.0),
        ({"save_strategy": "epoch"}, 7500.0),
        ({"save_strategy": "no"}, 75_000.0),
        ({"save_steps": 100_000}, 75_000.0),
        ({"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 50}, 100.0),
    ],
)
def test_interval_between_saves(job: dict[str, Any], interval: float) -> None:
    run = spot_run(_answer(**job), SpotTerms(0.01))
    assert run is not None
    assert run.save_interval_seconds == pytest.approx(interval)
    assert run.restart_seconds == 90  # the answer's own start-up


def test_warnings_ask_for_checkpoints() -> None:
    never = spot_run(_answer(save_strategy="no"), SpotTerms(0.01))
    assert never is not None
    assert never.warnings == ("no checkpoint is saved: each interruption loses the run so far; set save_strategy",)
    often = spot_run(_answer(), SpotTerms(6))
    assert often is not None
    assert "save more often" in often.warnings[0]


def test_an_unknown_total_stays_unknown() -> None:
    assert spot_run(answer(total_seconds=None), SpotTerms(0.1)) is None
    run = spot_run(_answer() | {"total_usd": None}, SpotTerms(0.1))
    assert run is not None
    assert run.expected_usd is None


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf])
def test_impossible_terms(rate: float) -> None:
    with pytest.raises(CostModelError, match="interruptions_per_hour must be"):
        SpotTerms(rate)
    with pytest.raises(CostModelError, match="restart_seconds must be"):
        SpotTerms(0.1, rate)


def test_a_run_that_does_not_get_on_has_no_cost() -> None:
    """Interruptions every second, with restarts of 47: to first order each loses more than the time to the next."""
    run = spot_run(_answer(), SpotTerms(3600, restart_seconds=47))
    assert run is not None
    assert (run.expected_seconds, run.expected_usd, run.num_interruptions) == (None, None, None)
    assert (run.lost_seconds, run.restarting_seconds) == (None, None)
    assert "does not get on" in run.warnings[0]
    # 1,000 s between saves and 200 s of restart: 700 s an interruption
    for seconds_between, gets_on in ((699, False), (701, True)):
        run = spot_run(_answer(), SpotTerms(3600 / seconds_between, restart_seconds=200))
        assert run is not None
        assert (run.expected_seconds is not None, run.expected_usd is not None) == (gets_on, gets_on)
