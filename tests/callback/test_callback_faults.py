"""Whatever of ours fails, training ends as without us, and the log says once what was switched off."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TickingClock, TokenRows, num_hooks, tiny_mixtral, tiny_trainer

from ftcost_callback import FTCostCallback
from ftcost_callback.run_file import read_run
from ftcost_callback.sinks import InMemorySink


class SabotageError(Exception):
    pass


def losses_of(output_dir: Path, callbacks: list[Any]) -> list[float]:
    import torch

    torch.manual_seed(5)
    model = tiny_mixtral()
    trainer = tiny_trainer(
        output_dir, callbacks, model=model, max_steps=24, logging_steps=6, gradient_checkpointing=True,
        save_strategy="steps", save_steps=12, eval_strategy="steps", eval_steps=12, eval_dataset=TokenRows(),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 24
    assert num_hooks(model) == 0
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.fixture(scope="module")
def losses_without_us(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses_of(tmp_path_factory.mktemp("without"), [])


FAULTS = {
    "token counter": [
        "token_counter.TokenCounter.open_forward",
        "token_counter.TokenCounter.take_step",
        "token_counter.PendingTokens.read",
        "token_counter.TokenCounter.__init__",
    ],
    "expert load": [
        "expert_load.ExpertLoadCounter.attach",
        "expert_load.ExpertLoadCounter.open_forward",
        "expert_load.ExpertLoadCounter.seen",
        "expert_load.ExpertLoadCounter.close_forward",
        "expert_load.ExpertLoadCounter.take",
    ],
    "run record": ["run_file.RunFile.__init__", "run_file.RunFile.append"],
    "checkpoint ledger": ["process_run.write_ledger"],
    "model facts": ["trainer_adapter.model_facts"],
    "job": ["trainer_adapter.job_from_objects"],
    "device facts": ["session_opening.read_device"],
    "versions": ["trainer_adapter.versions"],
    "price": ["session_opening.find_price"],
    "prediction": ["live_prediction.LivePrediction.predict"],
    "comparison": ["live_report.compare"],
    "projection": ["live_report.project"],
    "report": ["live_report.window_of"],
    "budget": ["budget.BudgetWatch.check"],
    "summary": ["live_report.summary_of"],
    "callback": [
        "recorder.StepRecorder.start",
        "recorder.StepRecorder.step",
        "recorder.StepRecorder.pause",
        "recorder.StepRecorder.close",
        "live_run.LiveRun.begin",
        "live_run.LiveRun.step_begins",
        "live_run.LiveRun.step_ends",
        "live_run.LiveRun.end",
    ],
}
CASES = [pytest.param(part, target, id=target) for part, targets in FAULTS.items() for target in targets]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "target"), CASES)
def test_a_part_that_fails_is_switched_off_and_training_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    losses_without_us: list[float],
    part: str,
    target: str,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise SabotageError("sabotage")

    monkeypatch.setattr(f"ftcost_callback.{target}", fail)
    measuring = FTCostCallback(usd_per_gpu_hour=1.0, budget_usd=10.0, sinks=[InMemorySink()])
    measuring._clock = TickingClock()
    assert losses_of(tmp_path, [measuring]) == losses_without_us
    said = [record for record in caplog.records if "switched off" in record.getMessage()]
    assert [record.getMessage() for record in said] == [
        f"ftcost: {part} switched off for this run (SabotageError: sabotage); training goes on"
    ]
    assert said[0].exc_info is not None


def test_a_full_disk_ends_the_record_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses_without_us: list[float]
) -> None:
    from ftcost_callback.run_file import RunFile

    write, num_rows = RunFile.append, 0

    def full_after_ten_rows(file: RunFile, row: Any) -> None:
        nonlocal num_rows
        num_rows += 1
        if num_rows > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, row)

    monkeypatch.setattr(RunFile, "append", full_after_ten_rows)
    sink = InMemorySink()
    measuring = FTCostCallback(sinks=[sink], predict=False)
    measuring._clock = TickingClock()
    assert losses_of(tmp_path, [measuring]) == losses_without_us
    assert num_rows == 11
    assert len(sink.windows) == 4
    assert sink.summary is not None
    assert len(read_run(tmp_path).steps) > 0


class FailingSink:
    """Raises in the method it is told."""

    def __init__(self, method: str) -> None:
        for name in ("open", "prediction", "log", "alert", "close"):
            setattr(self, name, self._fail if name == method else lambda *args: None)

    def _fail(self, *args: Any) -> None:
        raise SabotageError("sabotage")


@pytest.mark.parametrize("method", ["open", "log", "alert", "close"])
def test_a_sink_that_fails_leaves_the_others_and_the_record(
    tmp_path: Path, losses_without_us: list[float], method: str
) -> None:
    sink = InMemorySink()
    measuring = FTCostCallback(usd_per_gpu_hour=1e4, budget_usd=1e-8, sinks=[FailingSink(method), sink], predict=False)
    measuring._clock = TickingClock()
    assert losses_of(tmp_path, [measuring]) == losses_without_us
    assert len(sink.windows) == 4
    assert sink.summary is not None
    assert len(read_run(tmp_path).steps) == 24
