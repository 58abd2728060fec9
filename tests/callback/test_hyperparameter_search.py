"""``trainer.hyperparameter_search``: each trial is a run of its own, in its own folder and in a W&B run of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer
from transformers.trainer_utils import HPSearchBackend

sys.path.insert(0, str(Path(__file__).parent))

from tiny_runs import listed_rows, pad_right, priced_callback, tiny_llama, training_arguments
from wandb_files import merged_updates, records_by_run

from ftcost_callback import attach
from ftcost_callback.run_file import RunRecord, read_run

wandb = pytest.importorskip("wandb")

pytestmark = pytest.mark.usefixtures("wandb_offline")

RATES = (1e-4, 2e-4, 3e-4)


def searching(folder: Path, **arguments: Any) -> Any:
    import torch

    torch.set_num_threads(1)
    fields: dict[str, Any] = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "report_to": ["wandb"]}
    fields |= {"save_strategy": "steps", "save_steps": 2}
    trainer = Trainer(
        model_init=lambda trial=None: tiny_llama(),
        args=training_arguments(folder / "out", **fields),
        train_dataset=listed_rows(),
        eval_dataset=listed_rows(),
        data_collator=pad_right,
    )
    attach(trainer, priced_callback(budget_usd=1e-6, **arguments))
    return trainer


def assert_each_trial_is_a_run_of_its_own(folder: Path, names: list[str]) -> list[RunRecord]:
    """In the records and in W&B, with nothing of one in another."""
    found = [read_run(folder / "out" / name) for name in names]
    assert len({record.run_id for record in found}) == len(names)
    assert not (folder / "out" / "_ftcost").exists()
    for record in found:
        assert len(record.sessions) == 1
        assert [step.global_step for step in record.steps] == [1, 2, 3, 4]
        assert [budget.threshold for budget in record.budgets] == ["50 %", "80 %", "100 %"]
        assert record.summary is not None
        assert record.summary.status == "finished"
        assert (record.path.parent.parent / "checkpoint-2" / "ftcost_ledger.json").is_file()
    return found


def assert_wandb_agrees(folder: Path, found: list[RunRecord]) -> None:
    runs = [run for run in records_by_run(folder) if any(each["type"] == "history" for each in run)]
    assert [merged_updates(run, "config")["ftcost"]["run_id"] for run in runs] == [record.run_id for record in found]
    for run, record in zip(runs, found, strict=True):
        rows = [each["history"]["item"] for each in run if each["type"] == "history"]
        assert [row["train/global_step"] for row in rows if "ftcost/cost/spent_usd" in row] == [2, 4]
        assert [row["train/global_step"] for row in rows if "train/loss" in row] == [2, 4]
        assert len([1 for each in run if each["type"] == "alert"]) == 3
        assert record.summary is not None
        assert merged_updates(run, "summary")["ftcost/summary/spent_usd"] == pytest.approx(record.summary.spent_usd)


def test_trainings_as_a_search_makes_them(tmp_path: Path) -> None:
    """Without a library for searches: what the Trainer does for each trial of a W&B sweep."""
    trainer = searching(tmp_path)
    trainer.hp_search_backend = HPSearchBackend.WANDB
    trainer.hp_space = lambda trial: trial
    trainer.hp_name = lambda trial: f"rate {trial['learning_rate']}"
    trainer.compute_objective = lambda metrics: metrics["eval_loss"]
    for rate in RATES:
        trainer.objective = None
        trainer.train(trial={"learning_rate": rate})
    wandb.finish()
    found = assert_each_trial_is_a_run_of_its_own(tmp_path, [f"rate {rate}" for rate in RATES])
    assert_wandb_agrees(tmp_path, found)


@pytest.mark.slow
@pytest.mark.parametrize("guard", [False, True])
def test_a_search_with_optuna(guard: bool, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    trainer = searching(tmp_path, wandb_guard=guard)
    trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-3)},
        compute_objective=lambda metrics: metrics["eval_loss"],
        n_trials=3,
        backend="optuna",
    )
    wandb.finish()
    found = assert_each_trial_is_a_run_of_its_own(tmp_path, ["run-0", "run-1", "run-2"])
    assert_wandb_agrees(tmp_path, found)
