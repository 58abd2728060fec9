"""What a run is held against, by where it trains."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tiny_runs import tiny_llama

from ftcost_callback import FTCostCallback
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


def test_without_max_length_the_reason_is_the_device_or_when_one_comes() -> None:
    """A CPU has no prediction with it either; elsewhere the tokens seen stand in for it."""
    job = {name: value for name, value in JOB.items() if name != "max_length"}
    notes: list[str] = []
    LivePrediction(Settings(), job, on_cpu=True).predict(0, notes)
    assert notes == [UNDESCRIBED_CPU]
    notes.clear()
    prediction = LivePrediction(Settings(), {**job, "gpu": "H100 SXM"})
    prediction.predict(0, notes)
    assert len(notes) == 1
    assert notes[0].startswith("no prediction before step 20 (then on the tokens seen): max_length is required")
    assert prediction.first is None
    again = prediction.predict_again(20, STEPS)
    assert again is not None
    assert again.estimate["step_seconds"] > 0
    notes.clear()
    LivePrediction(Settings(), {**job, "gpu": "no such card"}).predict(0, notes)
    assert notes[0].startswith("no prediction: ")


def test_lengths_that_could_not_be_read_are_said() -> None:
    notes: list[str] = []
    job = {name: value for name, value in JOB.items() if name != "lengths"}
    prediction = LivePrediction(Settings(), {**job, "gpu": "H100 SXM"})
    prediction.predict(0, notes)
    assert len(notes) == 1
    assert "the data set's lengths could not be read" in notes[0]
    assert prediction.first is not None
    assert prediction.first.estimate["step_seconds"] is None


def test_the_hint_for_a_cpu_names_a_card_that_the_callback_takes() -> None:
    (card,) = re.findall(r"gpu='([^']*)' \(say\)", UNDESCRIBED_CPU)
    FTCostCallback(gpu=card)


def test_a_start_up_that_was_measured_replaces_the_rule_of_thumb() -> None:
    prediction = LivePrediction(Settings(), {**JOB, "gpu": "H100 SXM", "max_steps": 100, "usd_per_gpu_hour": 3600.0})
    assumed, measured = prediction.predict_again(20, STEPS), prediction.predict_again(20, STEPS, startup_seconds=5.98)
    assert assumed is not None
    assert measured is not None
    before, after = assumed.estimate, measured.estimate
    assert after["startup_seconds"] == 5.98
    difference = before["startup_seconds"] - 5.98
    assert difference > 1
    for kind, factor in (("", 1.0), ("_low", 0.5), ("_high", 2.0)):  # the band halves and doubles only what is assumed
        moved = factor * before["startup_seconds"] - 5.98
        assert before[f"total_seconds{kind}"] - after[f"total_seconds{kind}"] == pytest.approx(moved)
        assert after[f"total_usd{kind}"] == pytest.approx(after[f"total_seconds{kind}"])  # a dollar a second
