from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.estimation import estimated_imbalance_seconds
from ftcost_callback.expert_balance import STRETCH_STEPS, BalanceHistory, expert_balance, imbalance_usd


def test_a_uniform_load_of_128_experts() -> None:
    balance = expert_balance([[8] * 128])
    assert balance is not None
    assert (balance.load_max_over_mean, balance.load_cv, balance.dead_expert_fraction) == (1.0, 0.0, 0.0)
    assert balance.load_entropy == pytest.approx(1.0, abs=1e-12)


def test_one_expert_does_all() -> None:
    balance = expert_balance([[12, 0, 0, 0]])
    assert balance is not None
    assert (balance.load_max_over_mean, balance.dead_expert_fraction, balance.load_entropy) == (4.0, 0.75, 0.0)
    assert balance.load_cv == pytest.approx(3**0.5)


def test_layers_are_averaged_and_an_empty_one_is_left_out() -> None:
    balance = expert_balance([[1, 1], [2, 0], [0, 0]])
    assert balance is not None
    assert (balance.load_max_over_mean, balance.dead_expert_fraction) == (1.5, 0.25)


def test_no_token_is_not_measured_rather_than_zero() -> None:
    assert expert_balance([[0, 0]]) is None
    assert expert_balance([]) is None


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=64))
def test_bounds(tokens: list[int]) -> None:
    balance = expert_balance([tokens])
    if balance is not None:
        assert 1 - 1e-9 <= balance.load_max_over_mean <= len(tokens) + 1e-9
        assert -1e-9 <= balance.load_entropy <= 1 + 1e-9
        assert 0 <= balance.dead_expert_fraction < 1


def test_the_least_even_layer_and_the_dead_experts() -> None:
    balance = expert_balance([[5, 5, 5, 5], [0, 0, 0, 0], [9, 0, 1, 0]])
    assert balance is not None
    assert (balance.worst_layer, balance.worst_layer_load_max_over_mean, balance.num_dead_experts) == (2, 3.6, 2)


EVEN, UNEVEN = [[10, 10]], [[15, 5]]  # busiest over mean: 1.0 and 1.5


def test_the_trend_is_the_latest_whole_stretch_against_the_first() -> None:
    history = BalanceHistory()
    history.add(EVEN, num_steps=STRETCH_STEPS - 1)
    assert history.vs_first_steps is None
    history.add(EVEN, num_steps=1)  # the first stretch is whole
    history.add(UNEVEN, num_steps=STRETCH_STEPS - 1)
    assert history.vs_first_steps is None
    history.add(UNEVEN, num_steps=1)
    assert history.vs_first_steps == 1.5
    history.add(EVEN, num_steps=STRETCH_STEPS)
    assert history.vs_first_steps == 1.0


def test_what_imbalance_costs_is_summed_over_the_steps() -> None:
    asked: list[list[list[int]]] = []

    def seconds(load: list[list[int]]) -> float:
        asked.append(load)
        return max(load[0]) / sum(load[0]) - 0.5  # 0 for an even load of two

    history = BalanceHistory(seconds)  # type: ignore[arg-type]
    assert history.standing.imbalance_step_seconds is None
    history.add(EVEN, num_steps=5)
    assert (history.standing.imbalance_step_seconds, history.imbalance_seconds) == (0.0, 0.0)
    history.add(EVEN, num_steps=STRETCH_STEPS - 5)
    history.add(UNEVEN, num_steps=STRETCH_STEPS)
    assert history.standing.imbalance_step_seconds == 0.25
    history.add(EVEN, num_steps=4)  # not a stretch yet: at the rate of the one before
    assert history.imbalance_seconds == 0.25 * STRETCH_STEPS + 0.25 * 4
    assert len(asked) == 3
    summary = history.summary(["layers.0"], usd_per_hour=3600.0)
    assert summary is not None
    assert (summary["imbalance_seconds"], summary["imbalance_usd"]) == (6.0, 6.0)
    assert (summary["worst_layer"], summary["vs_first_steps"], summary["num_dead_experts"]) == ("layers.0", 1.5, 0)


def test_what_is_not_known_stays_unknown() -> None:
    history = BalanceHistory(lambda load: None)
    assert history.summary([], usd_per_hour=1.0) is None
    history.add(UNEVEN, num_steps=STRETCH_STEPS)
    summary = history.summary(["layers.0"], usd_per_hour=1.0)
    assert summary is not None
    assert {"imbalance_seconds", "imbalance_usd", "vs_first_steps"} & summary.keys() == set()
    assert imbalance_usd(2.0, None) is None


def test_no_load_in_a_window_is_no_balance_of_it() -> None:
    history = BalanceHistory()
    history.add(EVEN, num_steps=1)
    history.no_window()
    assert history.standing.window is None


def test_an_even_load_costs_nothing_and_an_uneven_one_never_less() -> None:
    """The cost model's function on the shape that the record holds: (layers, experts) counts."""
    job = {
        "model": "mistralai/Mixtral-8x7B-v0.1", "gpu": "NVIDIA A40", "method": "qlora", "quantization": "nf4",
        "framework": "transformers", "max_length": 512, "lengths": {"fixed": 512}, "per_device_train_batch_size": 1,
    }  # fmt: skip
    layers = 32
    even = estimated_imbalance_seconds(job, [[64] * 8] * layers)
    uneven = estimated_imbalance_seconds(job, [[400, 50, 20, 20, 10, 6, 4, 2]] * layers)
    assert even == 0.0
    assert uneven is not None
    assert uneven >= 0.0
    assert estimated_imbalance_seconds({**job, "gpu": None}, [[64] * 8] * layers) is None
