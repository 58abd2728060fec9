"""What a run is held against, by where it trains."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_runs import tiny_llama

from ftcost_callback.live_prediction import UNDESCRIBED_CPU, LivePrediction
from ftcost_callback.recorder import StepAggregate
from ftcost_callback.session_plan import Settings

JOB: dict[str, Any] = {"model": tiny_llama().config.to_dict(), "max_length": 64, "lengths": {"fixed": 32}}
STEPS = StepAggregate(
    num_steps=20, step_seconds_sum=2.0, num_micro_batches=20, num_tokens=2560, num_non_padding_tokens=2560, num_samples=80,
    sum_squared_sequence_tokens=81920.0, longest_sequence_tokens=32,
)  # fmt: skip


def predicted(gpu: str | None, *, on_cpu: bool) -> tuple[LivePrediction, list[str]]:
    notes: list[str] = []
    prediction = LivePrediction(Settings(), {**JOB, **({"gpu": gpu} if gpu else {})}, on_cpu=on_cpu)
    prediction.predict(0, notes)
    return prediction, notes


def test_a_cpu_that_nobody_described_has_no_cuda_context_predicted() -> None:
    prediction, notes = predicted(None, on_cpu=True)
    assert notes == [UNDESCRIBED_CPU]
    again = prediction.predict_again(20, STEPS)
    for each in (prediction.first, again):
        assert each is not None
        assert each.estimate["memory"] is None
        assert each.estimate["warnings"][0] == UNDESCRIBED_CPU
        assert not any(warning.startswith("no gpu is given") for warning in each.estimate["warnings"])
    assert prediction.expected_tokens_per_step is not None  # what is known of the data stays


@pytest.mark.parametrize(("gpu", "on_cpu"), [("H100-SXM-80GB", True), (None, False)])
def test_a_card_that_is_asked_for_or_not_known_has_its_memory_predicted(gpu: str | None, on_cpu: bool) -> None:
    prediction, notes = predicted(gpu, on_cpu=on_cpu)
    assert notes == []
    assert prediction.first is not None
    assert prediction.first.estimate["memory"]["context_bytes"] > 0
