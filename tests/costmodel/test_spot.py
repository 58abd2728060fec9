"""What interruptions cost: the formula by hand, and its limits."""

from __future__ import annotations

import math
import re
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_answer import answer

from costmodel.errors import CostModelError
from costmodel.estimation import estimate
from costmodel.spot import SpotTerms, best_save_interval_seconds, expected_seconds, spot_run


def test_by_hand() -> None:
    # 10 h of work, 1 min saved every 30 min: 20 times 1,860 s. One interruption in 5 h, restarts of 5 min:
    # 20 · 18,000 · e^(300 / 18,000) · (e^(1,860 / 18,000) - 1)
    fields = {"save_seconds": 60, "save_interval_seconds": 1800, "restart_seconds": 300}
    expected = expected_seconds(36_000, interruptions_per_hour=0.2, **fields)
    assert expected == pytest.approx(20 * 18_000 * 1.0168063 * 0.1088613, rel=1e-5)
    # rare ones lose half an interval and a restart each: 1 in 1,000 h
    rare = expected_seconds(36_000, interruptions_per_hour=0.001, **fields)
    assert rare == pytest.approx(37_200 + 0.001 * 37_200 / 3600 * (930 + 300), rel=1e-6)


@pytest.mark.parametrize("rate", [0.2, 1.0, 3.0])
def test_the_formula_is_what_a_simulation_takes(rate: float) -> None:
    """Interruptions at random, in work that is repeated and in restarts too."""
    random = Random(11)
    mean, way, restart = 3600 / rate, 1860.0, 300.0

    def one_way() -> float:
        spent, needed = 0.0, way
        while (until := random.expovariate(1 / mean)) < needed:
            spent, needed = spent + until, restart + way  # what it goes on with
        return spent + needed

    simulated = sum(one_way() for _ in range(20_000)) / 20_000
    # a restart that is interrupted begins again, as in the simulation
    of_one = expected_seconds(
        1800, save_seconds=60, save_interval_seconds=1800, interruptions_per_hour=rate, restart_seconds=restart
    )
    assert simulated == pytest.approx(of_one, rel=0.03)


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

    assert expected(rate + more) * (1 + 1e-12) >= expected(rate) >= useful  # but for rounding


def _answer(**job: Any) -> dict[str, Any]:
    # 75,000 s of training in 37,500 steps, 500 s of saves, 90 s of start-up
    return answer(job={"save_strategy": "steps", "save_steps": 500, "num_train_epochs": 10, **job})


def test_of_an_answer() -> None:
    run = spot_run(_answer(), SpotTerms(0.1, restart_seconds=200))
    assert run is not None
    assert run.save_interval_seconds == 1000
    # 2.1 interruptions, each losing half of 1,000 s and 200 s of restart, and a little more for those in repeated work
    assert run.num_interruptions == pytest.approx(2.1, rel=0.03)
    assert run.lost_seconds == pytest.approx(2.1 * 500, rel=0.05)
    assert run.restarting_seconds == pytest.approx(2.1 * 200, rel=0.03)
    assert run.expected_seconds == pytest.approx(75_600 + run.lost_seconds + run.restarting_seconds)
    assert run.expected_usd == pytest.approx(9.24 * run.expected_seconds / 75_600)
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
    assert re.fullmatch(r"interruptions take \d\d% of the time: save more often", often.warnings[0])


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
    """Interruptions every second, with restarts of 47: no checkpoint is reached in a thousand tries."""
    run = spot_run(_answer(), SpotTerms(3600, restart_seconds=47))
    assert run is not None
    assert (run.expected_seconds, run.expected_usd, run.num_interruptions) == (None, None, None)
    assert (run.lost_seconds, run.restarting_seconds) == (None, None)
    assert "does not get on" in run.warnings[0]
    # 1,000 s between saves, one of 6.7 s and 200 s of restart: e^(1,206.7 / mean) tries
    for seconds_between, gets_on in ((174, False), (175, True)):
        run = spot_run(_answer(), SpotTerms(3600 / seconds_between, restart_seconds=200))
        assert run is not None
        assert (run.expected_seconds is not None, run.expected_usd is not None) == (gets_on, gets_on)


def test_epochs_of_a_run_that_max_steps_ends() -> None:
    """100 samples, 8 a step, 130 steps: ten epochs and a half, whatever num_train_epochs says."""
    job = {"model": "Qwen/Qwen2.5-0.5B", "gpu": "L4", "method": "lora", "max_length": 64, "lengths": {"fixed": 64}}
    job |= {"num_samples": 100, "max_steps": 130, "num_train_epochs": 3, "save_strategy": "epoch"}
    told = estimate(job)
    run = spot_run(told.to_dict(), SpotTerms(0.1))
    assert run is not None
    assert told.train_seconds is not None
    assert run.save_interval_seconds == pytest.approx(told.train_seconds / 10.4)
