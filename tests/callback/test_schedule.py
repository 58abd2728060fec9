"""Steps, evaluations and saves: the estimate's and the live plan's, against what a real Trainer does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from tiny_runs import FakeClock, TokenRows, tiny_trainer
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from costmodel.cost import schedule
from costmodel.described_job import describe
from costmodel.errors import CostModelError
from costmodel.estimation import estimate
from costmodel.specs import parse_job
from ftcost_callback import FTCostCallback
from ftcost_callback.session_plan import Plan
from ftcost_callback.sinks import InMemorySink

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
    {"rows": 20, "eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": 11},  # after steps 10 and 11
    {"rows": 20, "eval_strategy": "epoch", "max_steps": 4},
    {"rows": 12, "eval_strategy": "epoch", "num_train_epochs": 0.5, "eval_delay": 0.7},  # later than the end
    {"rows": 12, "eval_strategy": "epoch", "num_train_epochs": 0.5, "eval_delay": 0.5},
    {"rows": 12, "eval_strategy": "epoch", "max_steps": 15, "eval_delay": 2.6},  # the end is at 2.5
    {"rows": 12, "eval_strategy": "epoch", "max_steps": 15, "eval_delay": 1.5},
    {
        "rows": 6,
        "gradient_accumulation_steps": 2,
        "max_steps": 5,  # two steps of an epoch, of two batches and of one: the end is at 2.67
        "eval_strategy": "epoch",
        "eval_delay": 2.6,
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
        self.plan = Plan.of(args, state, train_dataloader=kwargs["train_dataloader"])

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
    # and after each step, as many as came after it
    steps = range(1, trainer.state.global_step + 1)
    left = [sum(at > step for at in counts.evaluated_at) for step in steps]
    assert [counts.plan.num_remaining("eval", step) for step in steps] == left


def test_less_than_a_batch_with_drop_last_trains_nothing_and_is_refused(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"per_device_train_batch_size": 5, "dataloader_drop_last": True, "max_steps": 4}
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, **fields)
    trainer = Trainer(model=Least(), args=arguments, train_dataset=Rows(3), data_collator=default_data_collator)
    trainer.train()
    assert trainer.state.global_step == 0
    job = {"model": "meta-llama/Llama-2-7b-hf", "max_length": 8, "lengths": {"fixed": 8}, "num_samples": 3, **fields}
    with pytest.raises(CostModelError, match="the 3 samples do not fill one batch of 5 over all GPUs"):
        estimate(job, gpu="A100-SXM4-80GB")
    assert estimate(job, gpu="A100-SXM4-80GB", per_device_train_batch_size=3).num_steps == 4


def test_what_ends_an_epoch_is_known_with_its_last_step(tmp_path: Path) -> None:
    """The Trainer says it only after that step's end: the report of its log, and the evaluation in what is projected."""
    clock = FakeClock()

    class Time(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.pass_seconds(1.0)

        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            clock.pass_seconds(4.0)

    sink = InMemorySink()
    measuring = FTCostCallback(sinks=[sink], predict=False)
    measuring._clock = clock
    strategies = dict.fromkeys(("eval_strategy", "save_strategy", "logging_strategy"), "epoch")
    trainer = tiny_trainer(tmp_path, [Time(), measuring], max_steps=15, eval_dataset=TokenRows(), **strategies)
    trainer.train()
    assert [window.global_step for window in sink.windows] == [6, 12, 15]
    assert [extra["trainer_logs_next"] for extra in sink.extras] == [True] * 3
    # no evaluation was measured at step 6; three steps and two evaluations, then one evaluation
    assert [window.remaining_seconds for window in sink.windows] == pytest.approx([9.0, 11.0, 4.0])


class EndsEpochs(TrainerCallback):  # type: ignore[misc]
    """After the fourth step, and after ours was told of that step's end."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step == 4


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        rows = TokenRows()
        return (rows[place] for place in range(8))


@pytest.mark.parametrize("is_stream", [True, False], ids=["a stream", "ended by another callback"])
def test_the_log_of_an_epoch_that_nobody_saw_coming_has_a_report_too(is_stream: bool, tmp_path: Path) -> None:
    sink = InMemorySink()
    callbacks = [FTCostCallback(sinks=[sink], predict=False), *([] if is_stream else [EndsEpochs()])]
    data = {"train_dataset": Stream()} if is_stream else {}
    tiny_trainer(tmp_path, callbacks, max_steps=8, logging_strategy="epoch", **data).train()
    assert [window.global_step for window in sink.windows] == [4, 8]
    assert all(extra["trainer_logs_next"] for extra in sink.extras)


def test_data_without_a_length_is_evaluated_by_epoch_at_the_end_at_least() -> None:
    plan = Plan(max_steps=15, eval_strategy="epoch")
    assert [plan.num_remaining("eval", step) for step in (0, 14, 15)] == [1, 1, 0]


@pytest.mark.parametrize(("version", "evaluations"), [("4.57", 1), ("5.3", 1), ("5.4", 2), ("5.24", 2)])
def test_the_last_step_is_evaluated_since_transformers_5_4(version: str, evaluations: int) -> None:
    job = {"model": "meta-llama/Llama-2-7b-hf", "max_length": 8, "lengths": {"fixed": 8}, "max_steps": 6}
    job |= {"eval_strategy": "steps", "eval_steps": 4, "num_eval_samples": 4, "framework_version": version}
    described = describe(parse_job(job))
    assert described.tokens is not None
    planned = schedule(described.job, described.tokens)
    assert planned is not None
    assert planned.num_evaluations == evaluations
