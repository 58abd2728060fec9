"""A real Trainer on a clock that only its work moves: where each second of a run goes, to the second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import FakeClock, TokenRows, pad_right, tiny_llama, tiny_trainer

from ftcost_callback import FTCostCallback
from ftcost_callback.run_file import read_run
from ftcost_callback.sinks import InMemorySink

BATCH_SECONDS, FORWARD_SECONDS, EVAL_SECONDS, SAVE_SECONDS, FINAL_SECONDS = 0.25, 1.0, 10.0, 30.0, 3.0


class WorkMovesTheClock:
    """A model, a collator and a Trainer whose work takes the seconds above."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.model = tiny_llama()
        self.model.register_forward_hook(self._forward)

    def _forward(self, module: Any, args: Any, output: Any) -> None:
        self.clock.pass_seconds(FORWARD_SECONDS if module.training else EVAL_SECONDS)

    def collate(self, samples: list[Any]) -> Any:
        self.clock.pass_seconds(BATCH_SECONDS)
        return pad_right(samples)

    def trainer(self, output_dir: Path, callback: FTCostCallback, **arguments: Any) -> Any:
        callback._clock = self.clock
        trainer = tiny_trainer(output_dir, [callback], model=self.model, data_collator=self.collate, **arguments)
        save_checkpoint = trainer._save_checkpoint

        def save(*args: Any, **kwargs: Any) -> None:
            self.clock.pass_seconds(SAVE_SECONDS)
            save_checkpoint(*args, **kwargs)

        trainer._save_checkpoint = save
        return trainer


def callback(**settings: Any) -> FTCostCallback:
    return FTCostCallback(sinks=[], predict=False, **settings)


def test_every_second_is_in_one_bucket(tmp_path: Path, fake_clock: FakeClock) -> None:
    work = WorkMovesTheClock(fake_clock)
    trainer = work.trainer(
        tmp_path,
        callback(),
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        eval_dataset=TokenRows(),
        per_device_eval_batch_size=6,
    )
    started_at = fake_clock.now
    trainer.train()
    summary = read_run(tmp_path).summary
    assert summary is not None
    # 4 steps of 2 micro-batches, 2 evaluations of 2 batches, 2 checkpoints.
    assert summary.train_seconds - summary.data_wait_seconds == 8 * FORWARD_SECONDS
    assert summary.eval_seconds == 2 * 2 * (EVAL_SECONDS + BATCH_SECONDS)
    assert summary.save_seconds == 2 * SAVE_SECONDS
    # The loader of accelerate fetches one batch ahead.
    assert 8 * BATCH_SECONDS <= summary.data_wait_seconds <= 10 * BATCH_SECONDS
    assert summary.wall_seconds - summary.startup_seconds == fake_clock.now - started_at
    assert (
        summary.train_seconds
        + summary.eval_seconds
        + summary.save_seconds
        + summary.log_seconds
        + summary.startup_seconds
        + summary.other_seconds
    ) == summary.wall_seconds


def test_the_rows_sum_to_the_wall_time(tmp_path: Path, fake_clock: FakeClock) -> None:
    work = WorkMovesTheClock(fake_clock)
    work.trainer(tmp_path, callback(), save_strategy="epoch", eval_strategy="epoch", eval_dataset=TokenRows()).train()
    record = read_run(tmp_path)
    assert record.summary is not None
    in_rows = (
        sum(step.step_seconds for step in record.steps)
        + sum(pause.seconds for pause in record.pauses)
        + sum(session.startup_seconds or 0.0 for session in record.sessions)
    )
    assert in_rows == pytest.approx(record.summary.wall_seconds, abs=1e-9)
    assert record.totals.wall_seconds == pytest.approx(record.summary.wall_seconds, abs=1e-9)


def test_the_step_time_holds_the_data_wait_and_no_pause(tmp_path: Path, fake_clock: FakeClock) -> None:
    work = WorkMovesTheClock(fake_clock)
    work.trainer(
        tmp_path, callback(), eval_strategy="steps", eval_steps=1, eval_dataset=TokenRows(), gradient_accumulation_steps=3
    ).train()
    middle = read_run(tmp_path).steps[1]
    # An epoch has 6 batches: steps 1 and 2 take 3 each.
    assert middle.num_micro_batches == 3
    assert middle.step_seconds == 3 * FORWARD_SECONDS + (middle.data_wait_seconds or 0.0)
    assert middle.data_wait_seconds is not None
    assert 2 * BATCH_SECONDS <= middle.data_wait_seconds <= 3 * BATCH_SECONDS


def test_what_follows_the_last_step_is_other(tmp_path: Path, fake_clock: FakeClock) -> None:
    work = WorkMovesTheClock(fake_clock)
    trainer = work.trainer(
        tmp_path,
        callback(),
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=4,
        eval_dataset=TokenRows(),
    )
    trainer._load_best_model = lambda: fake_clock.pass_seconds(FINAL_SECONDS)
    trainer.train()
    summary = read_run(tmp_path).summary
    assert summary is not None
    assert summary.other_seconds == FINAL_SECONDS


def test_several_evaluation_sets_are_all_evaluation(tmp_path: Path, fake_clock: FakeClock) -> None:
    work = WorkMovesTheClock(fake_clock)
    sets = {"a": TokenRows(), "b": TokenRows()}
    work.trainer(
        tmp_path, callback(), eval_strategy="steps", eval_steps=4, eval_dataset=sets, per_device_eval_batch_size=12,
        eval_on_start=True,
    ).train()  # fmt: skip
    record = read_run(tmp_path)
    assert record.summary is not None
    assert record.summary.eval_seconds == 4 * (EVAL_SECONDS + BATCH_SECONDS)
    assert [(pause.global_step, pause.seconds) for pause in record.pauses if pause.kind == "eval"] == [
        (0, 10.25), (0, 10.25), (4, 10.25), (4, 10.25),
    ]  # fmt: skip


def test_what_the_user_logs_inside_a_step_is_no_pause(tmp_path: Path, fake_clock: FakeClock) -> None:
    work = WorkMovesTheClock(fake_clock)
    trainer = work.trainer(tmp_path, callback(), logging_strategy="no")
    compute_loss = trainer.compute_loss

    def logging_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        trainer.log({"mine": 1.0})
        return compute_loss(*args, **kwargs)

    trainer.compute_loss = logging_loss
    trainer.train()
    record = read_run(tmp_path)
    assert [pause.kind for pause in record.pauses] == ["other", "other"]  # our preparations; the end
    assert record.summary is not None
    assert record.summary.train_seconds - record.summary.data_wait_seconds == 4 * FORWARD_SECONDS


def test_money_is_the_whole_wall_time_times_the_price(tmp_path: Path, fake_clock: FakeClock) -> None:
    work = WorkMovesTheClock(fake_clock)
    measuring = callback(usd_per_gpu_hour=3600.0, billing_started_at=5_000.0)  # a dollar a second
    measuring._wall_clock = lambda: 5_240.0
    sink = InMemorySink()
    measuring._sinks = [sink]
    work.trainer(tmp_path, measuring, save_strategy="steps", save_steps=2).train()
    record = read_run(tmp_path)
    assert record.summary is not None
    assert record.summary.startup_seconds == 240.0
    assert record.sessions[0].started_at == "1970-01-01T01:23:20+00:00"
    assert record.summary.spent_usd == pytest.approx(record.summary.wall_seconds)
    spent = [window.spent_usd for window in sink.windows]
    assert spent == sorted(spent)
    assert spent[0] is not None
    assert spent[0] > 240.0


BACKWARD_SECONDS, OPTIMIZER_SECONDS = 3.0, 5.0


def test_forward_backward_and_optimizer_of_each_step(tmp_path: Path, fake_clock: FakeClock) -> None:
    work = WorkMovesTheClock(fake_clock)
    # The embedding's gradient comes last: the backward is over.
    work.model.model.embed_tokens.weight.register_hook(lambda gradient: fake_clock.pass_seconds(BACKWARD_SECONDS))
    sink = InMemorySink()
    measuring = callback()
    measuring._sinks = [sink]
    trainer = work.trainer(tmp_path, measuring, gradient_accumulation_steps=2)
    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(lambda *_: fake_clock.pass_seconds(OPTIMIZER_SECONDS))
    trainer.train()
    record = read_run(tmp_path)
    phases = (2 * FORWARD_SECONDS, 2 * BACKWARD_SECONDS, OPTIMIZER_SECONDS)
    assert [(step.forward_seconds, step.backward_seconds, step.optimizer_seconds) for step in record.steps] == [phases] * 4
    assert [step.step_seconds - (step.data_wait_seconds or 0.0) for step in record.steps] == [sum(phases)] * 4
    window, summary = sink.windows[-1], record.summary
    assert (window.forward_seconds, window.backward_seconds, window.optimizer_seconds) == phases
    assert summary is not None
    assert (summary.forward_seconds_mean, summary.backward_seconds_mean, summary.optimizer_seconds_mean) == phases
