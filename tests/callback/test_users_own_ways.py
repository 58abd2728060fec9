"""What users do in their own callbacks and losses while a real Trainer trains: it costs neither them nor us a figure."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import LENGTHS, TokenRows, num_hooks, tiny_llama, tiny_mixtral, tiny_trainer

from ftcost_callback import FTCostCallback
from ftcost_callback.run_file import read_run

EVALUATION_SECONDS = 100.0  # on the clock of these tests


class Clock:
    """Ten milliseconds a look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


def measuring(**arguments: Any) -> Any:
    callback = FTCostCallback(sinks=[], predict=False, **arguments)
    callback._clock = Clock()
    return callback


def doing(event: str, what: Callable[[Any], None], *, at: int | None = None) -> Any:
    """A callback of the user's: ``what(state)`` in ``event``, at one step or at each."""
    from transformers import TrainerCallback

    class User(TrainerCallback):  # type: ignore[misc]
        pass

    def do(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if at is None or state.global_step == at:
            what(state)

    setattr(User, event, do)
    return User()


@pytest.mark.parametrize("comes_first", [True, False])
@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_an_evaluation_in_a_users_callback_is_no_training_time(tmp_path: Path, name: str, comes_first: bool) -> None:
    ours = measuring()

    def evaluate(state: Any) -> None:
        getattr(trainer, name)(TokenRows())

    def slow(*args: Any, **kwargs: Any) -> Any:
        ours._clock.now += EVALUATION_SECONDS
        return loop(*args, **kwargs)

    user = doing("on_step_end", evaluate, at=3)
    trainer = tiny_trainer(tmp_path, [user, ours] if comes_first else [ours, user], max_steps=6)
    loop, trainer.evaluation_loop = trainer.evaluation_loop, slow
    trainer.train()
    assert not {"evaluate", "predict", "_run_epoch", "_finalize_training", "_evaluate"} & vars(trainer).keys()
    record = read_run(tmp_path)
    assert record.summary is not None
    assert record.summary.eval_seconds == pytest.approx(EVALUATION_SECONDS, abs=1.0)
    assert record.summary.train_seconds < 10.0
    assert max(step.step_seconds for step in record.steps) < 2.0
    assert record.totals.eval_seconds == pytest.approx(record.summary.eval_seconds)  # by the rows alone


def test_one_skipped_batch_is_one_step_without_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = tiny_trainer(tmp_path, [measuring()], max_steps=6)
    training_step = trainer.training_step

    def skipping(*args: Any, **kwargs: Any) -> Any:
        return torch.tensor(0.0) if trainer.state.global_step == 2 else training_step(*args, **kwargs)

    trainer.training_step = skipping
    with caplog.at_level(logging.WARNING, logger="ftcost_callback"):
        trainer.train()
    record = read_run(tmp_path)
    per_step = [2 * max(LENGTHS[place : place + 2]) for place in range(0, 12, 2)]
    assert [step.num_tokens for step in record.steps] == [*per_step[:2], None, *per_step[3:]]
    assert record.summary is not None
    assert (record.summary.num_tokens, record.summary.num_uncounted_steps) == (sum(per_step) - per_step[2], 1)
    assert record.totals.num_tokens == record.summary.num_tokens
    said = [message for message in caplog.messages if "forward" in message]
    assert said == [
        "ftcost: no training forward of the model was seen in a step (its batch was skipped?); token counts leave it out"
    ]


def test_odd_ids_are_called_what_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def forward(self, input_ids: Any) -> Any:
            return (self.linear(input_ids.float()).mean() ** 2,)

    rows = [{"input_ids": torch.full((6, 4), place)} for place in range(12)]

    def collate(samples: Any) -> Any:
        return {"input_ids": torch.stack([sample["input_ids"] for sample in samples])}

    with caplog.at_level(logging.WARNING, logger="ftcost_callback"):
        tiny_trainer(tmp_path, [measuring()], model=Model(), max_steps=3, train_dataset=rows, data_collator=collate).train()
    assert "ftcost: input_ids has the shape (2, 6, 4) and not (rows, length), so samples are counted and tokens are not" in (
        caplog.messages
    )
    assert not [message for message in caplog.messages if "not given" in message]


def test_forwards_that_are_not_of_the_steps_own_batches_count_nothing(tmp_path: Path) -> None:
    model = tiny_mixtral()

    def look(state: Any) -> None:
        model(input_ids=torch.ones(3, 5, dtype=torch.long), labels=torch.ones(3, 5, dtype=torch.long)).loss.backward()
        model.zero_grad()

    users = [doing("on_step_end", look), doing("on_step_begin", look)]
    tiny_trainer(tmp_path, [*users, measuring()], model=model, max_steps=6).train()
    record = read_run(tmp_path)
    assert record.totals.num_tokens == sum(2 * max(LENGTHS[place : place + 2]) for place in range(0, 12, 2))
    assert {load.status for load in record.expert_loads} == {"recorded"}


def test_an_exported_mixture_of_experts_holds_no_operator_of_ours(tmp_path: Path) -> None:
    model = tiny_mixtral()
    operators: list[str] = []

    def export(state: Any) -> None:
        program = torch.export.export(
            model, (), {"input_ids": torch.ones(1, 4, dtype=torch.long), "use_cache": False}, strict=False
        )
        operators.extend(str(node.target) for node in program.graph.nodes)

    tiny_trainer(tmp_path, [doing("on_step_end", export, at=2), measuring()], model=model, max_steps=4).train()
    assert operators
    assert not [name for name in operators if "ftcost" in name]
    assert {load.status for load in read_run(tmp_path).expert_loads} == {"recorded"}


@pytest.mark.parametrize("comes_first", [False, True])
@pytest.mark.parametrize("event", ["on_step_end", "on_step_begin", "on_pre_optimizer_step"])
def test_a_callback_that_is_removed_leaves_nothing_behind(tmp_path: Path, event: str, comes_first: bool) -> None:
    callbacks = [measuring(), doing(event, lambda state: trainer.remove_callback(FTCostCallback), at=3)]
    trainer = tiny_trainer(tmp_path, callbacks if comes_first else callbacks[::-1], max_steps=6)
    trainer.train()
    assert num_hooks(trainer.model) == 0
    assert not {"evaluate", "predict", "_run_epoch", "_finalize_training", "_evaluate"} & vars(trainer).keys()
    record = read_run(tmp_path)
    assert record.summary is not None
    assert record.summary.status == "stopped"
    assert record.summary.global_step in (2, 3)
    trainer.train()
    assert len(read_run(tmp_path).sessions) == 1


def test_a_relative_folder_is_the_one_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    user = doing("on_step_end", lambda state: os.chdir(tmp_path / "elsewhere"), at=2)
    tiny_trainer(Path("relative"), [user, measuring()], max_steps=5, logging_steps=1).train()
    assert [step.global_step for step in read_run(tmp_path / "relative").steps] == [1, 2, 3, 4, 5]
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert not [message for message in caplog.messages if "deleted or replaced" in message]


def test_a_training_that_is_shortened_is_finished_at_its_new_end(tmp_path: Path) -> None:
    def shorten(state: Any) -> None:
        state.max_steps = 4

    tiny_trainer(tmp_path, [measuring(), doing("on_step_end", shorten, at=2)], max_steps=8).train()
    summary = read_run(tmp_path).summary
    assert summary is not None
    assert (summary.global_step, summary.status) == (4, "finished")


def test_an_order_that_is_not_modelled_is_said(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from ftcost_callback.trainer_adapter import estimate_trainer, unmodelled_order

    trainer = tiny_trainer(tmp_path, [])
    trainer.args.train_sampling_strategy = "batch_rebalance"
    assert estimate_trainer(trainer, gpu="H100 SXM", max_length=64).warnings[-1] == unmodelled_order(trainer.args)

    assert unmodelled_order(SimpleNamespace(train_sampling_strategy="batch_rebalance")) == (
        "train_sampling_strategy: 'batch_rebalance' is not modelled; a random order is assumed"
    )
    assert unmodelled_order(SimpleNamespace(train_sampling_strategy="random")) is None
    assert unmodelled_order(SimpleNamespace()) is None


def test_a_mask_given_by_position_keeps_padding_out(tmp_path: Path) -> None:
    model = tiny_llama()
    trainer = tiny_trainer(tmp_path, [measuring()], model=model, max_steps=6)
    trainer.compute_loss = lambda model, inputs, *args, **kwargs: (
        model(inputs["input_ids"], inputs["attention_mask"], labels=inputs["labels"]).loss
    )
    trainer.train()
    assert read_run(tmp_path).totals.num_non_padding_tokens == sum(LENGTHS)


def test_a_byte_order_mark_costs_no_row(tmp_path: Path) -> None:
    from ftcost_callback.report_rows import summary_row

    tiny_trainer(tmp_path, [measuring()], max_steps=3).train()
    file = tmp_path / "_ftcost" / "run.jsonl"
    before = summary_row(tmp_path)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert summary_row(tmp_path) == before
    assert read_run(tmp_path).num_unread_lines == 0
