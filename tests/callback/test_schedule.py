"""Steps, evaluations and saves: the estimate's and the live plan's, against what a real Trainer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from costmodel.cost import schedule
from costmodel.described_job import describe
from costmodel.specs import parse_job
from ftcost_callback.session_plan import Plan

CASES: tuple[dict[str, Any], ...] = (
    {"rows": 12, "eval_strategy": "steps", "eval_steps": 2},
    {"rows": 12, "eval_strategy": "steps", "eval_steps": 4},  # 6 steps: once more at the end
    {"rows": 12, "eval_strategy": "steps", "eval_steps": 20},  # only at the end
    {"rows": 12, "eval_strategy": "steps", "eval_steps": 0.34, "num_train_epochs": 1.7},
    {"rows": 12, "eval_strategy": "steps", "eval_steps": 2, "eval_delay": 5},
    {"rows": 12, "eval_strategy": "steps", "eval_steps": 4, "eval_delay": 5},
    {"rows": 12, "eval_strategy": "steps", "eval_steps": 4, "eval_delay": 7},  # later than the end
    {"rows": 12, "eval_strategy": "steps", "eval_steps": 2, "eval_delay": 4},
    {"rows": 12, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
    {"rows": 12, "eval_strategy": "epoch", "eval_on_start": True, "num_train_epochs": 2},
    {"rows": 12, "eval_strategy": "no", "eval_on_start": True},
    {"rows": 12, "eval_strategy": "epoch", "num_train_epochs": 2.25},
    {"rows": 12, "eval_strategy": "epoch", "num_train_epochs": 3, "eval_delay": 2},
    {"rows": 12, "eval_strategy": "epoch", "num_train_epochs": 2.25, "eval_delay": 3},
    {"rows": 12, "eval_strategy": "epoch", "num_train_epochs": 2.5, "eval_delay": 2.5},
    {
        "rows": 5,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2.25,  # three steps of one epoch each
        "eval_strategy": "epoch",
        "eval_delay": 3,
    },
    {"rows": 23, "save_strategy": "steps", "save_steps": 5, "gradient_accumulation_steps": 3, "num_train_epochs": 2},
    {"rows": 23, "save_strategy": "steps", "save_steps": 0.34, "max_steps": 10},
    {"rows": 12, "per_device_train_batch_size": 5, "num_train_epochs": 2},
    {"rows": 12, "per_device_train_batch_size": 5, "num_train_epochs": 2, "dataloader_drop_last": True},
    {"rows": 12, "per_device_train_batch_size": 6, "num_train_epochs": 2, "dataloader_drop_last": True},
)


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(1), "labels": torch.ones(1)}


class Least(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(x).mean(), "logits": self.linear(x)}


class Counts(TrainerCallback):
    def __init__(self) -> None:
        self.evaluated_at: list[int] = []
        self.saves = self.micro_batches = 0
        self.plan: Plan | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.plan = Plan.of(args, state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluated_at.append(state.global_step)

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self.saves += 1

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self.micro_batches += 1

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.micro_batches += 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: ",".join(f"{name}={value}" for name, value in case.items()))
def test_a_real_trainer_does_what_was_planned(case: dict[str, Any], tmp_path: Path) -> None:
    fields: dict[str, Any] = {"per_device_train_batch_size": 2, "num_train_epochs": 1, "eval_strategy": "no", **case}
    fields = {"save_strategy": "no", **fields}
    num_rows, counts = fields.pop("rows"), Counts()
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, **fields)
    trainer = Trainer(
        model=Least(),
        args=arguments,
        train_dataset=Rows(num_rows),
        eval_dataset=Rows(4),
        data_collator=default_data_collator,
        callbacks=[counts],
    )
    trainer._save_checkpoint = lambda *args, **kwargs: None  # type: ignore[method-assign]
    trainer.train()

    job = {"model": "meta-llama/Llama-2-7b-hf", "max_length": 8, "lengths": {"fixed": 8}, "num_samples": num_rows}
    described = describe(parse_job({**job, "num_eval_samples": 4, **fields}))
    assert described.tokens is not None
    planned = schedule(described.job, described.tokens)
    assert planned is not None
    assert planned.num_steps == trainer.state.global_step
    assert planned.num_micro_batches == counts.micro_batches
    assert planned.num_evaluations == len(counts.evaluated_at)
    assert planned.num_saves == counts.saves
    assert counts.plan is not None
    assert counts.plan.num_remaining("eval", 0) + arguments.eval_on_start == len(counts.evaluated_at)
    assert counts.plan.num_remaining("save", 0) == counts.saves
    # and half way, as many as came after
    done = trainer.state.global_step // 2
    assert counts.plan.num_remaining("eval", done) == sum(step > done for step in counts.evaluated_at)


@pytest.mark.parametrize(("version", "evaluations"), [("4.57", 1), ("5.3", 1), ("5.4", 2), ("5.24", 2)])
def test_the_last_step_is_evaluated_since_transformers_5_4(version: str, evaluations: int) -> None:
    job = {"model": "meta-llama/Llama-2-7b-hf", "max_length": 8, "lengths": {"fixed": 8}, "max_steps": 6}
    job |= {"eval_strategy": "steps", "eval_steps": 4, "num_eval_samples": 4, "framework_version": version}
    described = describe(parse_job(job))
    assert described.tokens is not None
    planned = schedule(described.job, described.tokens)
    assert planned is not None
    assert planned.num_evaluations == evaluations
