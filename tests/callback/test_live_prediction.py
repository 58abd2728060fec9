"""What a run is held against, by where it trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import listed_rows, priced_callback, tiny_llama, tiny_trainer

from costmodel.estimation import estimate
from costmodel.importers import import_config
from ftcost_callback import FTCostCallback
from ftcost_callback.live_prediction import UNDESCRIBED_CPU, LivePrediction
from ftcost_callback.recorder import StepAggregate
from ftcost_callback.run_file import read_run
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


def test_a_recorded_run_is_the_job_that_was_predicted(tmp_path: Path) -> None:
    """Read back by the pre-flight side, which knows nothing of the callback: the same job, so the same answer."""
    tiny_trainer(tmp_path, [priced_callback()], train_dataset=listed_rows()).train()
    (before, *_) = read_run(tmp_path).predictions
    imported = import_config(tmp_path)
    answer = estimate(imported.job).to_dict()
    names = ("num_trainable_params", "verdict", "step_seconds", "num_steps", "total_seconds", "total_usd")
    assert {name: answer[name] for name in names} == {name: before.estimate[name] for name in names}
    known = {name: value for name, value in answer["memory"].items() if value is not None}
    assert known == before.estimate["memory"]
    elsewhere = estimate(imported.job.model_copy(update={"gpu": "L4", "usd_per_gpu_hour": 0.8}))
    assert elsewhere.total_usd == pytest.approx(elsewhere.total_seconds / 3600 * 0.8)


def test_a_recorded_run_whose_lengths_nobody_knew_is_estimated_on_those_it_had(tmp_path: Path) -> None:
    tiny_trainer(tmp_path, [priced_callback()]).train()
    record, imported = read_run(tmp_path), import_config(tmp_path)
    assert record.predictions == []
    tokens, samples = (
        sum(getattr(step, name) or 0 for step in record.steps) for name in ("num_non_padding_tokens", "num_samples")
    )
    longest = max(step.longest_sequence_tokens or 0 for step in record.steps)
    assert imported.fields["lengths"] == {"mean": tokens / samples, "max": longest}
    assert imported.fields["max_length"] == longest
    assert estimate(imported.job).total_usd is not None
