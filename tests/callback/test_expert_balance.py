from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcost_callback.expert_balance import expert_balance


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
