"""Begin, end, break off, resume, stop: what the Trainer does to a callback."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import pickle
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import (
    FakeClock,
    TickingClock,
    TokenRows,
    num_hooks,
    pad_right,
    tiny_llama,
    tiny_mixtral,
    tiny_trainer,
    training_arguments,
)
from transformers import TrainerCallback

from costmodel.errors import CostModelError
from ftcost_callback import FTCostCallback
from ftcost_callback.arguments import BillingStart, process_age_seconds
from ftcost_callback.report_html import render_report
from ftcost_callback.report_reading import read_series
from ftcost_callback.run_file import read_ledger, read_run
from ftcost_callback.sinks import ConsoleSink, InMemorySink


def callback(**settings: Any) -> FTCostCallback:
    measuring = FTCostCallback(**({"sinks": [], "predict": False} | settings))
    measuring._clock = TickingClock()
    return measuring


class At(TrainerCallback):
    """Calls a function at the end of one step."""

    def __init__(self, global_step: int, function: Any) -> None:
        self.global_step = global_step
        self.function = function

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.global_step:
            self.function()


class BrokenOffError(Exception):
    pass


def break_off() -> None:
    raise BrokenOffError


def test_hooks_and_threads_are_there_during_training_and_gone_after_it(tmp_path: Path) -> None:
    model = tiny_mixtral()
    during: list[int] = []
    threads = threading.active_count()
    trainer = tiny_trainer(tmp_path, [callback(), At(2, lambda: during.append(num_hooks(model)))], model=model)
    trainer.train()
    assert during == [4]  # two on the model, one on each layer's experts
    assert num_hooks(model) == 0
    assert threading.active_count() == threads


def test_given_as_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tiny_trainer(tmp_path, [FTCostCallback]).train()
    record = read_run(tmp_path)
    assert len(record.steps) == 4
    assert record.sessions[0].price is None
    assert record.summary is not None
    assert record.summary.spent_usd is None


def test_given_twice_the_second_does_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = InMemorySink(), InMemorySink()
    tiny_trainer(tmp_path, [callback(sinks=[first]), callback(sinks=[second])]).train()
    assert len(first.windows) == 3
    assert second.sessions == []
    assert sum("two FTCostCallbacks" in message for message in caplog.messages) == 1
    assert len(read_run(tmp_path).sessions) == 1


def test_a_second_training_is_a_new_run_beside_the_first(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, [callback()])
    trainer.train()
    first = read_run(tmp_path)
    trainer.train()
    second = read_run(tmp_path)
    assert first.run_id != second.run_id
    assert len(second.steps) == 4
    assert read_run(tmp_path, run_id=first.run_id).steps == first.steps


def test_training_that_was_broken_off_leaves_its_rows_and_the_next_begins_clean(tmp_path: Path) -> None:
    model = tiny_mixtral()
    measuring = callback()
    with pytest.raises(BrokenOffError):
        tiny_trainer(tmp_path, [measuring, At(2, break_off)], model=model).train()
    broken = read_run(tmp_path)
    assert [step.global_step for step in broken.steps] == [1, 2]
    assert broken.summary is None
    tiny_trainer(tmp_path, [measuring], model=model).train()
    assert [step.global_step for step in read_run(tmp_path).steps] == [1, 2, 3, 4]
    assert num_hooks(model) == 0


def test_a_fresh_callback_takes_over_a_model_whose_training_was_broken_off(tmp_path: Path) -> None:
    model = tiny_mixtral()
    with pytest.raises(BrokenOffError):
        tiny_trainer(tmp_path, [callback(), At(2, break_off)], model=model).train()
    tiny_trainer(tmp_path, [callback()], model=model).train()
    record = read_run(tmp_path)
    assert len(record.steps) == 4
    assert {sum(layer) for load in record.expert_loads for layer in load.tokens_per_expert} == {
        2 * (step.num_non_padding_tokens or 0) for step in record.steps[2:]
    } | {2 * sum(step.num_non_padding_tokens or 0 for step in record.steps[:2])}
    assert num_hooks(model) == 0


def test_a_batch_size_that_shrinks_is_one_run_with_one_session_for_each_attempt(tmp_path: Path) -> None:
    model = tiny_llama()

    def too_large(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[0] > 5:
            raise RuntimeError("CUDA out of memory. Tried to allocate")

    users_hook = model.register_forward_pre_hook(too_large, with_kwargs=True)
    tiny_trainer(
        tmp_path, [callback()], model=model, per_device_train_batch_size=8, auto_find_batch_size=True, max_steps=3
    ).train()
    record = read_run(tmp_path)
    assert len({session.run_id for session in record.sessions}) == 1
    assert [session.session_index for session in record.sessions] == [0, 1, 2, 3]  # batches of 8, 7, 6, 5
    assert [step.global_step for step in record.steps] == [1, 2, 3]
    assert record.summary is not None
    assert record.summary.num_sessions == 4
    assert record.summary.wall_seconds == pytest.approx(record.totals.wall_seconds)
    users_hook.remove()
    assert num_hooks(model) == 0


def save_run(output_dir: Path, **changes: Any) -> None:
    tiny_trainer(
        output_dir, [callback(usd_per_gpu_hour=3.6)], save_strategy="steps", save_steps=2, max_steps=4, **changes
    ).train()


def test_a_resume_goes_on_with_the_run(tmp_path: Path) -> None:
    save_run(tmp_path)
    first = read_run(tmp_path)
    ledger = read_ledger(tmp_path / "checkpoint-2")
    assert ledger is not None
    assert (ledger.run_id, ledger.global_step, ledger.totals.num_steps) == (first.run_id, 2, 2)
    tiny_trainer(tmp_path, [callback(usd_per_gpu_hour=3.6)], max_steps=6).train(resume_from_checkpoint=True)
    record = read_run(tmp_path)
    assert record.run_id == first.run_id
    assert [session.resumed_from_step for session in record.sessions] == [None, 4]
    assert [step.global_step for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert not any(step.repeated for step in record.steps)
    summary = record.summary
    assert summary is not None
    assert summary.num_sessions == 2
    assert summary.num_tokens == sum(step.num_tokens or 0 for step in record.steps)
    assert summary.train_seconds == pytest.approx(sum(step.step_seconds for step in record.steps))
    assert summary.spent_usd == pytest.approx(summary.wall_seconds / 1000)
    # Rates are of all sessions, the first step of each left out, on one basis.
    measured = [step for step in record.steps if step.global_step not in (1, 5)]
    seconds = sum(step.step_seconds for step in measured)
    assert summary.num_sessions_in_rates == 2
    assert summary.step_seconds_mean == pytest.approx(seconds / 4)
    assert summary.tokens_per_second == pytest.approx(sum(step.num_tokens or 0 for step in measured) / seconds)
    assert summary.non_padding_tokens_per_second == pytest.approx(
        sum(step.num_non_padding_tokens or 0 for step in measured) / seconds
    )


def test_rates_leave_out_sessions_on_another_machine(tmp_path: Path) -> None:
    save_run(tmp_path)
    path = tmp_path / "checkpoint-4" / "ftcost_ledger.json"
    ledger = json.loads(path.read_text())
    assert (ledger["pace"]["num_sessions"], ledger["pace"]["steps"]["num_steps"]) == (1, 3)
    ledger["pace"]["machine"] = "8 x another"
    path.write_text(json.dumps(ledger))
    tiny_trainer(tmp_path, [callback()], max_steps=6).train(resume_from_checkpoint=True)
    record = read_run(tmp_path)
    assert record.summary is not None
    assert (record.summary.num_sessions, record.summary.num_sessions_in_rates) == (2, 1)
    assert record.summary.step_seconds_mean == pytest.approx(record.steps[-1].step_seconds)
    assert record.summary.num_steps == 6  # totals are of both


def test_steps_done_again_after_an_older_checkpoint_are_waste(tmp_path: Path) -> None:
    save_run(tmp_path)
    tiny_trainer(tmp_path, [callback()], max_steps=6).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    record = read_run(tmp_path)
    assert [(step.global_step, step.repeated) for step in record.steps[4:]] == [
        (3, True), (4, True), (5, None), (6, None),
    ]  # fmt: skip
    assert record.summary is not None
    assert record.summary.wasted_seconds == pytest.approx(sum(step.step_seconds for step in record.steps[4:6]))
    assert record.summary.num_steps == 8


def test_totals_survive_another_machine(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    save_run(here)
    before = read_ledger(here / "checkpoint-2")
    assert before is not None
    moved = there / "somewhere" / "checkpoint-2"
    shutil.copytree(here / "checkpoint-2", moved)
    tiny_trainer(there, [callback(usd_per_gpu_hour=7.2)], max_steps=4).train(resume_from_checkpoint=str(moved))
    record = read_run(there)
    assert record.run_id == before.run_id
    assert record.sessions[0].earlier_seconds == before.totals.seconds
    assert record.summary is not None
    assert record.summary.num_steps == 4
    # The first machine at its price, this one at its own.
    this_session = record.summary.wall_seconds - before.totals.wall_seconds
    assert record.summary.spent_usd == pytest.approx((before.spent_usd or 0.0) + this_session * 7.2 / 3600)


@pytest.mark.parametrize("with_record", [True, False])
def test_a_session_without_a_price_counts_at_the_next_one(with_record: bool, tmp_path: Path) -> None:
    """Three machines that share the record, or hand on the checkpoint alone; the second was given no price."""
    wall_seconds = []
    for number, price in enumerate((3.6, None, 7.2), start=1):
        folder = tmp_path if with_record else tmp_path / str(number)
        if not with_record and number > 1:
            name = f"checkpoint-{2 * number - 2}"
            shutil.copytree(tmp_path / str(number - 1) / name, folder / name)
        trainer = tiny_trainer(
            folder, [callback(usd_per_gpu_hour=price)], max_steps=2 * number, save_strategy="steps", save_steps=2
        )
        trainer.train(resume_from_checkpoint=number > 1)
        record = read_run(folder)
        assert record.summary is not None
        wall_seconds.append(record.summary.wall_seconds)
        assert (record.summary.spent_usd is None) == (price is None)
    first = wall_seconds[0]
    if not with_record:  # a ledger ends at its checkpoint
        ledger = read_ledger(tmp_path / "1" / "checkpoint-2")
        assert ledger is not None
        first = ledger.totals.wall_seconds
    expected = first * 3.6 / 3600 + (wall_seconds[2] - first) * 7.2 / 3600
    assert record.summary is not None
    assert record.summary.spent_usd == pytest.approx(expected)
    assert record.spent_usd == pytest.approx(expected)


def test_a_checkpoint_without_our_ledger_resumes_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_trainer(tmp_path, [], save_strategy="steps", save_steps=2, max_steps=2).train()
    sink = InMemorySink()
    trainer = tiny_trainer(tmp_path, [callback(sinks=[sink])], max_steps=4, save_strategy="steps", save_steps=2)
    trainer.train(resume_from_checkpoint=True)
    assert sum("holds no ledger of ours" in message for message in caplog.messages) == 1
    assert sink.session is not None
    assert (sink.session.resumed_from_step, sink.session.earlier_seconds) == (2, None)
    assert [step.global_step for step in read_run(tmp_path).steps] == [3, 4]
    assert read_ledger(tmp_path / "checkpoint-4") is not None


def test_a_broken_ledger_does_not_stop_a_resume(tmp_path: Path) -> None:
    save_run(tmp_path)
    (tmp_path / "checkpoint-4" / "ftcost_ledger.json").write_text("{")
    tiny_trainer(tmp_path, [callback()], max_steps=5).train(resume_from_checkpoint=True)
    assert [step.global_step for step in read_run(tmp_path).steps] == [5]


def test_a_budget_stops_and_saves(tmp_path: Path) -> None:
    sink = InMemorySink()
    measuring = callback(sinks=[sink], usd_per_gpu_hour=3600.0, budget_usd=0.05, stop_at_budget=True)
    measuring._billing = BillingStart(1000.0)
    measuring._wall_clock = lambda: 1000.0
    trainer = tiny_trainer(tmp_path, [measuring], max_steps=50)
    trainer.train()
    record = read_run(tmp_path)
    stopped_at = record.steps[-1].global_step
    assert 1 < stopped_at < 50
    assert trainer.state.global_step == stopped_at
    assert (tmp_path / f"checkpoint-{stopped_at}" / "ftcost_ledger.json").exists()
    assert [(budget.threshold, budget.action) for budget in record.budgets if budget.threshold != "projected"] == [
        ("50 %", "warned"), ("80 %", "warned"), ("100 %", "stopped"),
    ]  # fmt: skip
    assert sink.budgets == record.budgets
    assert record.summary is not None
    assert record.summary.status == "stopped_at_budget"


def test_a_resume_over_the_budget_says_so_before_its_first_step(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"usd_per_gpu_hour": 3600.0, "budget_usd": 1e-6, "stop_at_budget": True}
    tiny_trainer(tmp_path, [callback(**settings)], max_steps=50).train()
    first = read_run(tmp_path).steps[-1].global_step
    again = tiny_trainer(tmp_path, [callback(**settings)], max_steps=50)
    again.train(resume_from_checkpoint=True)
    record = read_run(tmp_path)
    stopped = [row.global_step for row in record.budgets if row.action == "stopped"]
    assert stopped == [first, first]  # the second before the step that the Trainer does in any case
    assert again.state.global_step == first + 1


class BreakingOff(TrainerCallback):
    """Spends ten seconds in one event, and leaves it by an exception."""

    def __init__(self, event: str, clock: FakeClock) -> None:
        def breaks_off(*arguments: Any, **named: Any) -> None:
            clock.pass_seconds(10.0)
            raise BrokenOffError

        setattr(self, event, breaks_off)


@pytest.mark.parametrize(
    ("event", "kind", "fields"),
    [
        ("on_step_begin", "other", {}),
        ("on_log", "log", {}),
        ("on_evaluate", "eval", {"eval_strategy": "steps", "eval_steps": 2}),
        ("on_evaluate", "eval", {"eval_on_start": True}),
        ("on_evaluate", "eval", {"eval_strategy": "epoch"}),
        ("on_save", "save", {"save_strategy": "steps", "save_steps": 2}),
        ("on_train_end", "other", {}),
    ],
)
def test_the_record_bills_what_a_training_that_breaks_off_was_doing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, event: str, kind: str, fields: dict[str, Any]
) -> None:
    clock = FakeClock()
    measuring = callback(usd_per_gpu_hour=3600.0, billing_started_at=1000.0)
    measuring._clock, measuring._wall_clock = clock, lambda: 1000.0
    trainer = tiny_trainer(
        tmp_path, [BreakingOff(event, clock), measuring], **{"logging_steps": 2, "eval_dataset": TokenRows(), **fields}
    )
    with pytest.raises(BrokenOffError):
        trainer.train()
    record = read_run(tmp_path)
    assert [(pause.kind, pause.seconds) for pause in record.pauses if pause.seconds] == [(kind, 10.0)]
    assert record.spent_usd == pytest.approx(10.0)
    (said,) = [entry.message for entry in caplog.records if "training ended with" in entry.message]
    assert "BrokenOffError" in said
    assert "$10.00" in said


def test_the_second_of_two_evaluations_that_breaks_off_is_billed_as_one(tmp_path: Path) -> None:
    measuring, clock = callback(), FakeClock()
    measuring._clock = clock
    data = {"first": TokenRows(), "second": TokenRows()}
    fields: dict[str, Any] = {"eval_strategy": "steps", "save_strategy": "steps", "save_steps": 2}
    trainer = tiny_trainer(tmp_path, [measuring], eval_dataset=data, eval_steps=2, **fields)
    evaluation_loop = trainer.evaluation_loop

    def breaks_off_later(*arguments: Any, metric_key_prefix: str, **named: Any) -> Any:
        if metric_key_prefix == "eval_second":
            clock.pass_seconds(10.0)
            raise BrokenOffError
        return evaluation_loop(*arguments, metric_key_prefix=metric_key_prefix, **named)

    trainer.evaluation_loop = breaks_off_later
    with pytest.raises(BrokenOffError):
        trainer.train()
    assert [(pause.kind, pause.seconds) for pause in read_run(tmp_path).pauses if pause.seconds] == [("eval", 10.0)]


def test_a_callback_that_is_removed_when_all_is_over_ends_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Removing(TrainerCallback):
        def on_train_end(self, *arguments: Any, **named: Any) -> None:
            trainer.remove_callback(measuring)

    sink = InMemorySink()
    measuring = callback(sinks=[sink])
    trainer = tiny_trainer(tmp_path, [measuring, Removing()])
    trainer.train()
    assert not [entry for entry in caplog.records if "removed while training" in entry.message]
    assert len(read_run(tmp_path).summaries) == 1


def test_a_training_that_was_left_writes_nothing_among_another_ones_rows(tmp_path: Path) -> None:
    def train(trainer: Any) -> Any:
        trainer.train()
        return read_run(tmp_path)

    first = tiny_trainer(tmp_path, [callback(), At(2, break_off)])
    with pytest.raises(BrokenOffError):
        first.train()
    second = train(tiny_trainer(tmp_path, [callback()]))
    first.pop_callback(At)
    third = train(first)
    assert third.run_id != second.run_id
    assert read_run(tmp_path, run_id=second.run_id) == second


def test_a_device_that_tells_no_more_leaves_the_closing_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    measuring = callback(usd_per_gpu_hour=1.0)

    def breaks() -> None:
        monkeypatch.setattr(measuring._run, "wait_for_steps", fails)
        break_off()

    with pytest.raises(BrokenOffError):
        tiny_trainer(tmp_path, [At(2, breaks), measuring]).train()
    assert [entry for entry in caplog.records if "training ended with BrokenOffError" in entry.message]


def test_an_evaluation_that_fails_and_is_survived_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    trainer = tiny_trainer(tmp_path, [callback()], eval_dataset=TokenRows(), **fields)
    evaluate, at_steps = trainer._evaluate, []

    def surviving(*arguments: Any, **named: Any) -> Any:
        at_steps.append(trainer.state.global_step)
        with contextlib.suppress(BrokenOffError):
            if trainer.state.global_step:
                break_off()
            return evaluate(*arguments, **named)

    trainer._evaluate = surviving
    trainer.train()
    record = read_run(tmp_path)
    assert at_steps == [0, 2, 4, 4]  # what was asked for is still to be done when the epoch ends
    assert record.summary is not None
    assert record.summary.status == "finished"
    assert not [entry for entry in caplog.records if "training ended with" in entry.message]
    assert trainer._evaluate is surviving


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_a_training_that_breaks_off_says_what_it_cost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    from transformers import TrainerCallback

    class BreakOff(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise error

    with pytest.raises(type(error)):
        tiny_trainer(tmp_path, [callback(usd_per_gpu_hour=3600.0), BreakOff()]).train()
    said = [record.message for record in caplog.records if "training ended with" in record.message]
    assert len(said) == 1
    assert re.match(rf"ftcost: training ended with {type(error).__name__} after step 2: \$[\d,.]+, [\d.]+ ?(s|min)", said[0])


def test_a_budget_in_dollars_without_a_price_is_said_to_be_unwatched(tmp_path: Path) -> None:
    tiny_trainer(tmp_path, [callback(budget_usd=0.001, stop_at_budget=True)]).train()
    record = read_run(tmp_path)
    assert len(record.steps) == 4
    assert record.sessions[0].notes == ["budget_usd is not watched: there is no price; give usd_per_gpu_hour or cloud"]


@pytest.mark.parametrize("with_console", [True, False])
def test_an_unwatched_budget_is_said_once(with_console: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    sinks = [ConsoleSink(stream)] if with_console else []
    tiny_trainer(tmp_path, [callback(budget_usd=0.001, sinks=sinks)]).train()
    assert stream.getvalue().count("budget_usd is not watched") == int(with_console)
    assert sum("budget_usd is not watched" in message for message in caplog.messages) == int(not with_console)


def test_a_prediction_for_a_card_that_does_not_train_is_no_yardstick(tmp_path: Path) -> None:
    sink = InMemorySink()
    measuring = callback(predict=True, gpu="H100 SXM", usd_per_gpu_hour=2.0, sinks=[sink])
    tiny_trainer(tmp_path, [measuring], max_steps=24, logging_steps=8).train()
    record = read_run(tmp_path)
    said = "the prediction is for H100 SXM, which is not the device that trains: time and memory are not comparable"
    (prediction,) = record.predictions
    assert prediction.estimate["step_seconds"] > 0
    assert any(note.startswith(said) for note in record.sessions[0].notes or [])
    assert record.summary is not None
    assert record.summary.verdict == said
    assert record.summary.measured_over_predicted is not None
    assert set(record.summary.measured_over_predicted["tokens_seen"]) == {
        "num_tokens_per_step", "num_non_padding_tokens_per_step",
    }  # fmt: skip
    assert {window.step_seconds_measured_over_predicted for window in sink.windows} == {None}
    # Nor for MFU: a processor has no share of that card's peak.
    assert {window.mfu for window in sink.windows} | {record.summary.mfu} == {None}
    assert "peak_flops_per_second" not in (record.sessions[0].device or {})
    page = render_report([read_series(tmp_path)])
    assert "The prediction is for H100 SXM, which did not train" in page
    assert "not comparable" in page


def test_a_dry_run_ends_early(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, [callback(dry_run_steps=3)], max_steps=50)
    trainer.train()
    record = read_run(tmp_path)
    assert trainer.state.global_step == 3
    assert record.summary is not None
    assert record.summary.status == "stopped"
    assert not list(tmp_path.glob("checkpoint-*"))


def test_the_second_prediction_comes_on_the_tokens_seen(tmp_path: Path) -> None:
    sink = InMemorySink()
    tiny_trainer(tmp_path, [callback(sinks=[sink], predict=True)], max_steps=24, logging_steps=8).train()
    record = read_run(tmp_path)
    (prediction,) = [each for each in record.predictions if each.basis == "tokens_seen"]
    assert prediction.global_step == 24
    assert (sink.predictions[-1].basis, sink.predictions[-1].global_step) == ("tokens_seen", 24)
    measured = record.steps[1:]  # the first step is warm-up
    for name in ("num_tokens", "num_non_padding_tokens", "num_supervised_tokens"):
        mean = sum(getattr(step, name) for step in measured) / len(measured)
        assert prediction.estimate[f"{name}_per_step"] == pytest.approx(mean)


@pytest.mark.parametrize(("process_index", "files"), [(1, ["run.rank1.jsonl"]), (0, [])])
def test_another_process_than_the_main_one_has_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process_index: int, files: list[str]
) -> None:
    """Under SageMaker's model parallelism several processes may have index 0: only the main one writes then."""
    sink = InMemorySink()
    trainer = tiny_trainer(tmp_path, [callback(sinks=[sink], dry_run_steps=2)], max_steps=9)
    trainer.state.is_world_process_zero = False
    trainer.is_world_process_zero = lambda: False
    monkeypatch.setattr(type(trainer.args), "process_index", process_index)
    trainer.train()
    assert trainer.state.global_step == 2  # a dry run ends on every process
    assert sink.sessions == []
    assert sorted(path.name for path in (tmp_path / "_ftcost").glob("*")) == files


def test_the_record_can_stand_elsewhere(tmp_path: Path) -> None:
    tiny_trainer(tmp_path / "run", [callback(output_dir=tmp_path / "record")]).train()
    assert len(read_run(tmp_path / "record").steps) == 4
    assert not (tmp_path / "run" / "_ftcost").exists()


def test_a_row_for_each_step_on_request(tmp_path: Path) -> None:
    sink = InMemorySink()
    tiny_trainer(tmp_path, [callback(sinks=[sink], wandb_every="step")], max_steps=6, logging_steps=6).train()
    assert [window.global_step for window in sink.windows] == [2, 3, 4, 5, 6]
    assert [window.num_steps for window in sink.windows] == [1] * 5


def test_steps_between_two_logs_are_one_window(tmp_path: Path) -> None:
    sink = InMemorySink()
    tiny_trainer(tmp_path, [callback(sinks=[sink])], max_steps=7, logging_steps=3).train()
    assert [(window.global_step, window.num_steps) for window in sink.windows] == [(3, 2), (6, 3), (7, 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"usd_per_gpu_hour": 0.0}, "usd_per_gpu_hour must be a positive number of dollars"),
        ({"usd_per_gpu_hour": float("nan")}, "usd_per_gpu_hour must be a positive number of dollars"),
        ({"budget_usd": -1.0}, "budget_usd must be a number above 0, got -1.0"),
        ({"window_steps": 0}, "window_steps must be a whole number from 1 on, got 0"),
        ({"wandb_every": "epoch"}, "wandb_every must be 'log' or 'step', got 'epoch'"),
        ({"stop_at_budget": True}, "stop_at_budget must be given together with budget_usd or budget_hours"),
        ({"billing_started_at": "yesterday"}, "billing_started_at must be ISO 8601"),
        ({"cloud": "no-such-cloud"}, "no-such-cloud"),
        ({"cloud": 5}, "cloud must be a name"),
        ({"cloud": "AWS", "tier": "nonsense"}, "tier must be one of on_demand"),
        ({"budget_usd": "5"}, "budget_usd must be a number above 0, got '5'"),
        ({"budget_hours": "1"}, "budget_hours must be a number above 0, got '1'"),
        ({"budget_usd": True}, "budget_usd must be a number above 0"),
        ({"usd_per_gpu_hour": True}, "usd_per_gpu_hour must be a positive number"),
        ({"window_steps": True}, "window_steps must be a whole number from 1 on"),
        ({"skip_first_steps": False}, "skip_first_steps must be a whole number from 0 on"),
        ({"profile_steps": True}, "profile_steps must be"),
        ({"sample_period_seconds": None}, "sample_period_seconds must be a number above 0"),
        ({"expert_load": "x"}, "expert_load must be True or False"),
        ({"billing_started_at": []}, "billing_started_at must be ISO 8601"),
        ({"billing_started_at": True}, "billing_started_at must be ISO 8601"),
        ({"sinks": 5}, "sinks must be a list of sinks"),
        ({"sinks": [None]}, "sinks must be a list of sinks"),
        ({"output_dir": 5}, "output_dir must be the path of a folder"),
        ({"calibration": "nofile"}, "no calibration at nofile"),
        ({"calibration": 5}, "calibration must be 'auto'"),
    ],
)
def test_a_wrong_argument_is_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CostModelError, match=message):
        FTCostCallback(**({"sinks": []} | arguments))


def test_price_and_billing_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCOST_USD_PER_GPU_HOUR", "1.25")
    monkeypatch.setenv("FTCOST_BILLING_STARTED_AT", "1970-01-01T01:00:00Z")
    measuring = FTCostCallback(sinks=[])
    assert measuring._settings.price is not None
    assert measuring._settings.price.usd_per_gpu_hour == 1.25
    assert measuring._billing.given == 3600.0
    assert FTCostCallback(3.0, sinks=[])._settings.price.usd_per_gpu_hour == 3.0  # type: ignore[union-attr]
    monkeypatch.setenv("FTCOST_USD_PER_GPU_HOUR", "cheap")
    with pytest.raises(CostModelError, match="FTCOST_USD_PER_GPU_HOUR must be a positive number"):
        FTCostCallback(sinks=[])


def test_the_age_of_this_process() -> None:
    import time

    age = process_age_seconds(time.time())
    assert 0 < age < 24 * 3600


def test_two_trainings_with_different_prices_do_not_share_a_run(tmp_path: Path) -> None:
    for price in (1.0, 2.0):
        tiny_trainer(tmp_path, [callback(usd_per_gpu_hour=price)], max_steps=2).train()
    lines = (tmp_path / "_ftcost" / "run.jsonl").read_text().splitlines()
    sessions = [row for row in map(json.loads, lines) if row["type"] == "session"]
    assert [row["price"]["usd_per_gpu_hour"] for row in sessions] == [1.0, 2.0]
    assert len({row["run_id"] for row in sessions}) == 2


def test_arguments_of_the_trainer_are_left_alone(tmp_path: Path) -> None:
    arguments = training_arguments(tmp_path)
    before = arguments.to_dict()
    trainer = tiny_trainer(tmp_path, [callback()])
    trainer.train()
    after = trainer.args.to_dict()
    assert {name for name in before if before[name] != after[name]} <= {"logging_dir", "run_name"}
    assert not torch.is_inference_mode_enabled()


def test_the_evaluation_to_come_is_in_the_job(tmp_path: Path) -> None:
    """The loader that callbacks are handed is only made at the first evaluation; the data set is known from the start."""
    trainer = tiny_trainer(tmp_path, [callback(predict=True)], eval_dataset=TokenRows(), eval_strategy="steps", eval_steps=2)
    trainer.train()
    job = read_run(tmp_path).sessions[0].job
    assert job is not None
    assert job["num_eval_samples"] == len(TokenRows())


@pytest.mark.parametrize("price", [0, -1, float("nan"), float("inf"), 1e6])
def test_an_absurd_price_is_refused_in_one_line(price: float) -> None:
    with pytest.raises(CostModelError, match="usd_per_gpu_hour"):
        FTCostCallback(usd_per_gpu_hour=price)


def test_a_training_left_by_an_exception_takes_its_profiler_and_hooks_along(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measuring = callback(profile_steps=(3, 5))
    trainer = tiny_trainer(tmp_path / "left", [measuring, At(3, break_off)], model=tiny_mixtral(), max_steps=8)
    with contextlib.suppress(BrokenOffError):
        trainer.train()
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    assert num_hooks(trainer.model) == 0
    assert [step.global_step for step in read_run(tmp_path / "left").steps] == [1, 2, 3]
    tiny_trainer(tmp_path / "next", [callback(profile_steps=(3, 5))], max_steps=6).train()
    assert [row.num_steps for row in read_run(tmp_path / "next").profiles] == [3]
    assert not [message for message in caplog.messages if "switched off" in message]


@pytest.mark.parametrize("next_is", ["a forward of the model", "a garbage collection", "another training of ours"])
def test_so_does_one_whose_frames_are_still_held(tmp_path: Path, next_is: str) -> None:
    """As in a notebook, which keeps the last exception."""
    trainer = tiny_trainer(tmp_path / "left", [callback(profile_steps=(3, 5)), At(3, break_off)], max_steps=8)
    with pytest.raises(BrokenOffError) as held:
        trainer.train()
    gc.disable()
    try:
        if next_is == "a forward of the model":
            trainer.model.train()
            trainer.model(**pad_right([TokenRows()[0]]))
        elif next_is == "a garbage collection":
            gc.enable()
            gc.collect()
        else:
            tiny_trainer(tmp_path / "next", [callback()], max_steps=2)
    finally:
        gc.enable()
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    assert num_hooks(trainer.model) == 0
    assert held.tb is not None


def test_a_training_of_several_epochs_keeps_its_hooks(tmp_path: Path) -> None:
    tiny_trainer(tmp_path, [callback()], max_steps=14).train()  # six steps an epoch
    assert [step.num_tokens is not None for step in read_run(tmp_path).steps] == [True] * 14


def test_a_training_inside_the_one_that_is_measured_is_left_alone_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measuring = callback()
    inner = At(3, lambda: tiny_trainer(tmp_path / "inner", [measuring], max_steps=3).train())
    tiny_trainer(tmp_path / "outer", [measuring, inner], max_steps=6).train()
    record = read_run(tmp_path / "outer")
    assert [step.global_step for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert record.summary is not None
    assert not (tmp_path / "inner" / "_ftcost").exists()
    assert len([message for message in caplog.messages if "measures the training around this one" in message]) == 1


def test_steps_of_sessions_on_other_machines_are_counted_once_each(tmp_path: Path) -> None:
    save_run(tmp_path / "first")
    shutil.copytree(tmp_path / "first" / "checkpoint-4", tmp_path / "second" / "checkpoint-4")
    for executed in (8, 12):
        trainer = tiny_trainer(tmp_path / "second", [callback()], max_steps=8)
        trainer.train(resume_from_checkpoint=str(tmp_path / "second" / "checkpoint-4"))
        record = read_run(tmp_path / "second")
        assert record.summary is not None
        assert record.summary.num_steps == record.totals.num_steps == executed
    assert record.totals.data_wait_seconds == pytest.approx(record.summary.data_wait_seconds)
    assert record.totals.wasted_seconds == pytest.approx(record.summary.wasted_seconds or 0)


@pytest.mark.parametrize(
    "strange",
    [
        {"type": "pause", "kind": "defragment", "global_step": 2, "seconds": 1.0},
        {"type": "pause", "kind": "eval", "global_step": 2, "seconds": None},
        {"type": "step", "global_step": 9, "session_index": 0, "step_seconds": 1.0, "data_wait_seconds": "x"},
    ],
)
def test_a_row_that_is_not_known_does_not_stop_a_resume(tmp_path: Path, strange: dict[str, Any]) -> None:
    save_run(tmp_path)
    with (tmp_path / "_ftcost" / "run.jsonl").open("a") as file:
        file.write(json.dumps(strange) + "\n")
    trainer = tiny_trainer(tmp_path, [callback()], max_steps=6)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    record = read_run(tmp_path)
    assert record.summary is not None
    assert (record.summary.num_steps, record.num_unread_lines) == (6, 1)


def test_a_record_that_cannot_be_read_leaves_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_run(tmp_path)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("damaged")

    monkeypatch.setattr("ftcost_callback.resuming.read_run", fail)
    trainer = tiny_trainer(tmp_path, [callback()], max_steps=6)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    monkeypatch.undo()
    record = read_run(tmp_path)
    assert record.summary is not None
    assert record.summary.num_steps == 6
    assert "goes on from the checkpoint" in str(record.sessions[-1].notes)


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_record_that_is_taken_away_begins_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str) -> None:
    def take_away() -> None:
        shutil.rmtree(tmp_path)
        if how == "replaced":
            (tmp_path / "_ftcost").mkdir(parents=True)
            (tmp_path / "_ftcost" / "run.jsonl").write_text("")

    tiny_trainer(tmp_path, [callback(), At(3, take_away)], max_steps=8).train()
    record = read_run(tmp_path)
    assert len(record.sessions) == 1
    assert [step.global_step for step in record.steps] == [4, 5, 6, 7, 8]
    assert record.summary is not None
    assert record.summary.num_steps == 8
    assert len([message for message in caplog.messages if "deleted or replaced while training" in message]) == 1


def test_a_budget_crossed_at_the_very_end_is_recorded(tmp_path: Path) -> None:
    measuring = callback(usd_per_gpu_hour=3600.0, budget_usd=1e-6, billing_started_at=time.time())
    measuring._clock = FakeClock()
    later = At(4, lambda: measuring._clock.pass_seconds(5))  # type: ignore[attr-defined]
    tiny_trainer(tmp_path, [measuring, later], logging_steps=100).train()
    assert {row.threshold for row in read_run(tmp_path).budgets} >= {"50 %", "80 %", "100 %"}


def test_a_bill_that_began_long_ago_is_doubted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_trainer(tmp_path, [callback(billing_started_at="2020-01-01")], max_steps=2).train()
    assert len([message for message in caplog.messages if "runs since 2020-01-01" in message]) == 1


def test_a_callback_can_be_pickled_and_copied_while_it_trains(tmp_path: Path) -> None:
    """The copy measures a training of its own; the one that trains goes on."""
    made: list[FTCostCallback] = []

    class Copies(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            made.append(pickle.loads(pickle.dumps(measuring)))
            made.append(copy.deepcopy(measuring))

    measuring = callback(sinks=FTCostCallback().sinks)  # the usual ones
    tiny_trainer(tmp_path / "first", [measuring, Copies()]).train()
    assert read_run(tmp_path / "first").summary is not None
    assert len(made) == 8
    for place, each in enumerate(made[-2:]):
        tiny_trainer(tmp_path / str(place), [each]).train()
        assert len(read_run(tmp_path / str(place)).steps) == 4
    assert len(read_run(tmp_path / "first").steps) == 4


def test_what_evaluations_took_before_a_resume_is_what_the_next_ones_are_taken_to_take(tmp_path: Path) -> None:
    evaluating: dict[str, Any] = {
        "eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1, "eval_dataset": TokenRows(),
    }  # fmt: skip
    save_run(tmp_path, **evaluating)
    path = tmp_path / "checkpoint-4" / "ftcost_ledger.json"
    ledger = json.loads(path.read_text())
    known = ledger["pace"]["pause_seconds"]["eval"]
    assert known == [pause.seconds for pause in read_run(tmp_path).pauses if pause.kind == "eval"]
    ledger["pace"]["pause_seconds"]["eval"] = [1000.0, 1000.0]
    path.write_text(json.dumps(ledger))
    tiny_trainer(tmp_path, [callback()], max_steps=8, **evaluating).train(resume_from_checkpoint=True)
    projected = {step.global_step: step.projected_total_seconds for step in read_run(tmp_path).steps}
    assert projected[6] == pytest.approx(2000, abs=200)  # the one that follows, and that at step 8
    assert projected[7] is not None
    assert projected[7] < 200  # this session's own evaluation took no time
