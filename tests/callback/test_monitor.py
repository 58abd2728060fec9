"""``FTCostMonitor`` around real loops on tiny models, most of them on a clock that only their work moves."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import FakeClock, TokenRows, num_hooks, pad_right, supervised_tokens, tiny_llama, tiny_mixtral
from torch.utils.data import DataLoader

from costmodel.errors import CostModelError
from ftcost_callback import FTCostMonitor
from ftcost_callback.arguments import BillingStart
from ftcost_callback.report_rows import summary_row, summary_text
from ftcost_callback.run_file import read_run, run_file_path
from ftcost_callback.sinks import InMemorySink

BATCH_SECONDS, FORWARD_SECONDS, BACKWARD_SECONDS, OPTIMIZER_SECONDS, EVAL_SECONDS = 0.25, 1.0, 3.0, 5.0, 10.0
REAL_TOKENS = sum(TokenRows().lengths)


class Loop:
    """12 rows, 2 a micro-batch; its work takes the seconds above."""

    def __init__(self, clock: FakeClock, output_dir: Path, *, model: Any = None, **settings: Any) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.clock = clock
        self.model = model if model is not None else tiny_llama()
        self.model.train().register_forward_hook(self._forward)
        self.model.get_input_embeddings().weight.register_hook(lambda gradient: clock.pass_seconds(BACKWARD_SECONDS))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.optimizer.register_step_post_hook(lambda *_: clock.pass_seconds(OPTIMIZER_SECONDS))
        rows = TokenRows()
        self.loader = DataLoader([rows[place] for place in range(len(rows))], batch_size=2, collate_fn=self._collate)
        self.sink = InMemorySink()
        fields: dict[str, Any] = {"train_loader": self.loader, "sinks": [self.sink], "predict": False}
        self.monitor = FTCostMonitor(self.model, self.optimizer, output_dir=output_dir, **(fields | settings))
        self.monitor._clock = clock

    def _forward(self, module: Any, args: Any, output: Any) -> None:
        self.clock.pass_seconds(FORWARD_SECONDS if module.training else EVAL_SECONDS)

    def _collate(self, samples: list[Any]) -> Any:
        self.clock.pass_seconds(BATCH_SECONDS)
        return pad_right(samples)

    def train(self, *, accumulation: int = 1, watch: bool = True, each_step: Callable[[], None] = lambda: None) -> None:
        batches = self.monitor.watch(self.loader) if watch else self.loader
        for number, batch in enumerate(batches, start=1):
            (self.model(**batch).loss / accumulation).backward()
            if number % accumulation == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.monitor.step(batch)
                each_step()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(**pad_right([TokenRows()[0]]))
        self.model.train()


@pytest.mark.parametrize("watch", [True, False])
def test_each_second_and_each_token_of_a_loop(tmp_path: Path, fake_clock: FakeClock, watch: bool) -> None:
    loop = Loop(fake_clock, tmp_path, num_epochs=1)
    with loop.monitor as monitor:
        loop.train(watch=watch)
        assert monitor.global_step == 6
    record = read_run(tmp_path)
    work = FORWARD_SECONDS + BACKWARD_SECONDS + OPTIMIZER_SECONDS
    assert [step.step_seconds for step in record.steps] == [work + BATCH_SECONDS] * 6
    assert [step.data_wait_seconds for step in record.steps] == [BATCH_SECONDS] * 6
    assert {step.num_micro_batches for step in record.steps} == {1}
    phases = {(step.forward_seconds, step.backward_seconds, step.optimizer_seconds) for step in record.steps}
    assert phases == {(FORWARD_SECONDS, BACKWARD_SECONDS, OPTIMIZER_SECONDS)}
    summary = record.summary
    assert summary is not None
    assert (summary.status, summary.num_steps) == ("finished", 6)
    assert (summary.num_non_padding_tokens, summary.num_supervised_tokens) == (REAL_TOKENS, supervised_tokens())


@pytest.mark.parametrize("watch", [True, False])
def test_gradient_accumulation_is_one_step(tmp_path: Path, fake_clock: FakeClock, watch: bool) -> None:
    loop = Loop(fake_clock, tmp_path, num_epochs=1, gradient_accumulation_steps=2)
    with loop.monitor:
        loop.train(accumulation=2, watch=watch)
    record = read_run(tmp_path)
    assert record.sessions[0].max_steps == 3
    assert [step.num_micro_batches for step in record.steps] == [2, 2, 2]
    assert {(step.forward_seconds, step.optimizer_seconds) for step in record.steps} == {
        (2 * FORWARD_SECONDS, OPTIMIZER_SECONDS)
    }
    # Only a watched loader tells the wait for the second micro-batch from the backward before it.
    waits, backward = (2, 0) if watch else (1, BATCH_SECONDS)
    assert {step.data_wait_seconds for step in record.steps} == {waits * BATCH_SECONDS}
    assert {step.backward_seconds for step in record.steps} == {2 * BACKWARD_SECONDS + backward}
    assert record.summary is not None
    assert record.summary.num_supervised_tokens == supervised_tokens()


def test_pauses_are_billed_and_left_out_of_speed(tmp_path: Path, fake_clock: FakeClock) -> None:
    loop = Loop(fake_clock, tmp_path, num_epochs=2, eval_every=3, report_every_steps=3, usd_per_gpu_hour=3600.0)

    def after_step() -> None:
        if loop.monitor.global_step % 3 == 0:
            fake_clock.pass_seconds(2.0)  # the loop's own affairs
            with loop.monitor.pause("eval"):
                loop.evaluate()

    started_at = fake_clock.now
    with loop.monitor:
        for _ in range(2):
            loop.train(each_step=after_step)
    summary = read_run(tmp_path).summary
    assert summary is not None
    assert summary.eval_seconds == 4 * EVAL_SECONDS
    assert summary.other_seconds == 4 * 2.0
    assert summary.step_seconds_mean == FORWARD_SECONDS + BACKWARD_SECONDS + OPTIMIZER_SECONDS + BATCH_SECONDS
    assert summary.wall_seconds - summary.startup_seconds == fake_clock.now - started_at
    # At step 6 of 12 two evaluations are to come, and the one of step 6.
    window = next(window for window in loop.sink.windows if window.global_step == 6)
    assert window.remaining_seconds is not None
    assert window.remaining_seconds == pytest.approx(6 * summary.step_seconds_mean + 3 * EVAL_SECONDS, abs=1.0)


def test_a_budget_stops_the_loop(tmp_path: Path, fake_clock: FakeClock) -> None:
    # A dollar a second; a step takes 9.25 seconds.
    loop = Loop(
        fake_clock, tmp_path, num_epochs=1, usd_per_gpu_hour=3600.0, budget_usd=20.0, stop_at_budget=True,
        billing_started_at=1e18,
    )  # fmt: skip
    steps = []
    with loop.monitor as monitor:
        for batch in monitor.watch(loop.loader):
            loop.model(**batch).loss.backward()
            loop.optimizer.step()
            steps.append(monitor.step(batch))
            if monitor.should_stop:
                break
    assert steps == [False, False, True]
    record = read_run(tmp_path)
    assert record.summary is not None
    assert record.summary.status == "stopped_at_budget"
    assert record.budgets[-1].action == "stopped"


def test_a_budget_spent_by_the_last_step_leaves_the_run_finished(tmp_path: Path, fake_clock: FakeClock) -> None:
    loop = Loop(
        fake_clock, tmp_path, num_epochs=1, usd_per_gpu_hour=3600.0, budget_usd=52.0, stop_at_budget=True,
        billing_started_at=1e18,
    )  # fmt: skip
    with loop.monitor:
        loop.train()
    record = read_run(tmp_path)
    assert record.summary is not None
    assert record.summary.global_step == 6
    assert record.summary.status == "finished"
    assert record.budgets[-1].threshold == "100 %"


@pytest.mark.parametrize("first_beyond", [4, 10])
def test_steps_beyond_the_plan_are_said_and_nothing_is_projected(
    tmp_path: Path, fake_clock: FakeClock, caplog: pytest.LogCaptureFixture, first_beyond: int
) -> None:
    if first_beyond == 10:
        loop = Loop(fake_clock, tmp_path, num_epochs=1, start_step=10)  # of 6
    else:
        loop = Loop(fake_clock, tmp_path, num_steps=3)
    with loop.monitor:
        loop.train()
    said = [record.message for record in caplog.records if "beyond the" in record.message]
    assert len(said) == 1
    assert f"step {first_beyond} is beyond the {6 if first_beyond == 10 else 3} steps" in said[0]
    record = read_run(tmp_path)
    assert len(record.steps) == 6
    assert all(step.projected_total_seconds is None for step in record.steps if step.global_step >= first_beyond)
    windows = [window for window in loop.sink.windows if window.global_step >= first_beyond]
    assert windows
    assert all(window.max_steps is None and window.projected_total_seconds is None for window in windows)


STEP_SECONDS = BATCH_SECONDS + FORWARD_SECONDS + BACKWARD_SECONDS + OPTIMIZER_SECONDS


def stopped_after_six_of_twelve(clock: FakeClock, folder: Path, ledger_dir: Path | None = None) -> Loop:
    """A dollar a second; the checkpoint was written after step 4 and took two seconds."""
    loop = Loop(clock, folder, num_steps=12, usd_per_gpu_hour=3600.0, budget_usd=100.0, billing_started_at=1e18)

    def save() -> None:
        if loop.monitor.global_step == 4:
            with loop.monitor.pause("save"):
                clock.pass_seconds(2.0)
            if ledger_dir is not None:
                loop.monitor.save_ledger(ledger_dir)

    with loop.monitor:
        loop.train(each_step=save)
    return loop


@pytest.mark.parametrize("ended", ["in order", "killed after the checkpoint", "killed before any ledger"])
def test_a_loop_that_goes_on_continues_its_record(tmp_path: Path, fake_clock: FakeClock, ended: str) -> None:
    first = stopped_after_six_of_twelve(fake_clock, tmp_path, tmp_path)
    own = tmp_path / "_ftcost" / "ftcost_ledger.json"
    if ended != "in order":
        rows = (tmp_path / "_ftcost" / "run.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "_ftcost" / "run.jsonl").write_text("".join(row for row in rows if '"summary"' not in row))
        own.unlink()
    if ended == "killed after the checkpoint":
        own.write_text((tmp_path / "ftcost_ledger.json").read_text())
    again = Loop(fake_clock, tmp_path, num_steps=12, usd_per_gpu_hour=3600.0, budget_usd=100.0, start_step=4)
    with again.monitor as monitor:
        assert monitor.global_step == 4
        again.train()
        assert monitor.global_step == 10
    record = read_run(tmp_path)
    assert [(session.session_index, session.resumed_from_step) for session in record.sessions] == [(0, None), (1, 4)]
    assert len({session.run_id for session in record.sessions}) == 1
    summary = record.summary
    assert summary is not None
    assert (summary.num_sessions, summary.num_steps, summary.global_step) == (2, 12, 10)
    assert summary.train_seconds == 12 * STEP_SECONDS
    assert summary.wasted_seconds == 2 * STEP_SECONDS  # steps 5 and 6 are done again
    assert summary.save_seconds == 2.0
    assert summary.num_supervised_tokens == 2 * supervised_tokens()
    assert summary.spent_usd == pytest.approx(12 * STEP_SECONDS + 2.0)
    # What was said is not said again: half the budget was spent in the first session.
    assert [row.threshold for row in record.budgets].count("50 %") == 1
    if ended == "in order":
        assert summary.num_sessions_in_rates == 2
    assert first.monitor.global_step == 6


def test_a_loop_goes_on_elsewhere_by_the_ledger_beside_its_checkpoint(tmp_path: Path, fake_clock: FakeClock) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    stopped_after_six_of_twelve(fake_clock, tmp_path / "here", checkpoint)
    there = Loop(fake_clock, tmp_path / "there", num_steps=12, usd_per_gpu_hour=7200.0, resume_from=checkpoint)
    with there.monitor as monitor:
        assert monitor.global_step == 4
        there.train()
    summary = read_run(tmp_path / "there").summary
    assert summary is not None
    assert (summary.num_sessions, summary.num_steps, summary.wasted_seconds) == (2, 10, 0.0)
    assert summary.train_seconds == 10 * STEP_SECONDS
    assert summary.spent_usd == pytest.approx((4 * STEP_SECONDS + 2.0) + 2 * 6 * STEP_SECONDS)  # each at its own price


def test_a_resume_at_another_price_is_held_against_its_plan_in_time(tmp_path: Path, fake_clock: FakeClock) -> None:
    """A dollar a second for six steps and a save; killed; two dollars a second for the rest."""
    stopped_after_six_of_twelve(fake_clock, tmp_path)
    rows = (tmp_path / "_ftcost" / "run.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "_ftcost" / "run.jsonl").write_text("".join(row for row in rows if '"summary"' not in row))
    price, seconds = 7200.0, 30.0
    again = Loop(fake_clock, tmp_path, num_steps=10, usd_per_gpu_hour=price, start_step=4)
    again.monitor._billing = BillingStart(1e9)
    again.monitor._wall_clock = lambda: 1e9 + seconds  # of starting up
    with again.monitor:
        again.train()
    row = summary_row(tmp_path)
    first, second = 6 * STEP_SECONDS + 2.0, seconds + 6 * STEP_SECONDS
    assert row["status"] == "finished"
    assert row["spent_usd"] == pytest.approx(first + 2 * second)
    assert row["usd_per_gpu_hour_paid"] == [3600.0, 7200.0]
    assert [each["spent_usd"] for each in row["sessions"]] == pytest.approx([first, 2 * second])
    assert [each["seconds"] for each in row["sessions"]] == pytest.approx([first, second])
    assert "(at $3,600, then $7,200 per GPU hour)" in summary_text(row)


def test_what_a_killed_session_took_after_its_last_step_is_billed(tmp_path: Path, fake_clock: FakeClock) -> None:
    stopped_after_six_of_twelve(fake_clock, tmp_path)
    file = tmp_path / "_ftcost" / "run.jsonl"
    rows = [row for row in file.read_text().splitlines(keepends=True) if '"summary"' not in row]
    pause = '{"type": "pause", "kind": "eval", "global_step": 6, "seconds": 50.0}'
    file.write_text("".join(rows) + f"{pause}\n")
    assert read_run(tmp_path).spent_usd == pytest.approx(6 * STEP_SECONDS + 2.0 + 50.0)


def test_a_loop_that_goes_on_over_its_budget_may_stop_before_its_first_step(tmp_path: Path, fake_clock: FakeClock) -> None:
    stopped_after_six_of_twelve(fake_clock, tmp_path)  # with 57.50 spent
    fields: dict[str, Any] = {"budget_usd": 50.0, "stop_at_budget": True, "start_step": 6, "num_steps": 12}
    again = Loop(fake_clock, tmp_path, usd_per_gpu_hour=3600.0, **fields)
    with again.monitor as monitor:
        assert monitor.should_stop
    (budget,) = [row for row in read_run(tmp_path).budgets if row.limit == 50.0 and row.action == "stopped"]
    assert (budget.global_step, budget.spent) == (6, pytest.approx(6 * STEP_SECONDS + 2.0, abs=0.5))
    assert budget in again.sink.budgets
    summary = read_run(tmp_path).summary
    assert summary is not None
    assert summary.status == "stopped_at_budget"


@pytest.mark.parametrize("recorded", ["nothing", "another run", "no session", "nested deep"])
def test_a_step_that_no_record_reaches_begins_a_run_and_says_so(
    tmp_path: Path, fake_clock: FakeClock, recorded: str, caplog: pytest.LogCaptureFixture
) -> None:
    if recorded == "another run":
        stopped_after_six_of_twelve(fake_clock, tmp_path)
    elif recorded != "nothing":
        run_file_path(tmp_path).parent.mkdir()
        line = '{"type": "step"}' if recorded == "no session" else "[" * 100_000
        run_file_path(tmp_path).write_text(f"{line}\n", encoding="utf-8")
    loop = Loop(fake_clock, tmp_path, num_steps=12, start_step=8)
    with loop.monitor:
        loop.train()
    record = read_run(tmp_path)
    assert [session.resumed_from_step for session in record.sessions] == [8]
    said = {"nothing": "no run is recorded in", "another run": "did not reach"}.get(
        recorded, "run.jsonl is no ftcost run record (it holds no session row)"
    )
    assert [note for note in record.sessions[0].notes or [] if said in note and "begin here" in note]
    assert "goes on from step 8" in caplog.text
    assert record.summary is not None
    assert record.summary.num_steps == 6


def test_a_ledger_without_a_folder_is_said(tmp_path: Path, fake_clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(fake_clock, tmp_path, num_epochs=1)
    with loop.monitor as monitor:
        loop.train(each_step=lambda: monitor.save_ledger(tmp_path / "gone"))
    assert "save the checkpoint first" in caplog.text
    assert not (tmp_path / "gone").exists()


def test_a_folder_to_resume_from_is_checked_at_once(tmp_path: Path, fake_clock: FakeClock) -> None:
    stopped_after_six_of_twelve(fake_clock, tmp_path, tmp_path)
    with pytest.raises(CostModelError, match=r"start_step is 5, and the ledger in .* is of step 4; leave one of them out"):
        FTCostMonitor(torch.nn.Linear(2, 2), start_step=5, resume_from=tmp_path)
    with pytest.raises(CostModelError, match=r"there is no ledger of ours in .*empty.*monitor.save_ledger writes one"):
        FTCostMonitor(torch.nn.Linear(2, 2), resume_from=tmp_path / "empty")
    (tmp_path / "ftcost_ledger.json").write_text("{")
    with pytest.raises(CostModelError, match="cannot be read as a ledger"):
        FTCostMonitor(torch.nn.Linear(2, 2), resume_from=tmp_path)


@pytest.mark.parametrize(("error", "status"), [(ValueError("mine"), "failed"), (KeyboardInterrupt(), "stopped")])
def test_the_loops_own_exception_goes_on_and_leaves_a_readable_record(
    tmp_path: Path, fake_clock: FakeClock, error: BaseException, status: str
) -> None:
    loop = Loop(fake_clock, tmp_path, num_epochs=1)

    def break_off() -> None:
        if loop.monitor.global_step == 4:
            raise error

    with pytest.raises(type(error)), loop.monitor:
        loop.train(each_step=break_off)
    record = read_run(tmp_path)
    assert len(record.steps) == 4
    assert record.summary is not None
    assert (record.summary.status, record.summary.error) == (status, type(error).__name__)
    assert f"{status} ({type(error).__name__}) at step 4" in summary_text(summary_row(tmp_path))
    assert num_hooks(loop.model) == 1  # the loop's own


def test_memory_that_ran_out_is_explained(tmp_path: Path, fake_clock: FakeClock) -> None:
    loop = Loop(fake_clock, tmp_path, num_epochs=1, predict=True)

    def run_out() -> None:
        if loop.monitor.global_step == 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(torch.OutOfMemoryError), loop.monitor:
        loop.train(each_step=run_out)
    assert [row.global_step for row in read_run(tmp_path).out_of_memory] == [7]


def test_memory_that_ran_out_in_a_pause_is_the_pauses(tmp_path: Path, fake_clock: FakeClock) -> None:
    loop = Loop(fake_clock, tmp_path, num_epochs=1)
    ran_out = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def pauses() -> None:
        with contextlib.suppress(ValueError), loop.monitor.pause("eval"):
            raise ValueError  # which the loop survives
        if loop.monitor.global_step == 2:
            with loop.monitor.pause("save"):
                raise ran_out

    with pytest.raises(torch.OutOfMemoryError), loop.monitor:
        loop.train(each_step=pauses)
    (row,) = read_run(tmp_path).out_of_memory
    assert row.verdict.startswith("out of memory while saving after step 2: 2.0 GiB were asked for")


@pytest.mark.parametrize(("in_pause", "verdict"), [(False, "at step 3"), (True, "while evaluating after step 2")])
def test_memory_that_ran_out_after_a_pause_is_the_steps(
    tmp_path: Path, fake_clock: FakeClock, in_pause: bool, verdict: str
) -> None:
    """An evaluation that the loop survived, or a pause that had another one inside."""
    loop = Loop(fake_clock, tmp_path, num_epochs=1)
    ran_out = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def runs_out() -> None:
        if loop.monitor.global_step != 2:
            return
        with contextlib.suppress(ValueError), loop.monitor.pause("eval"):
            with loop.monitor.pause("log"):
                pass
            raise ran_out if in_pause else ValueError
        raise ran_out

    with pytest.raises(torch.OutOfMemoryError), loop.monitor:
        loop.train(each_step=runs_out)
    (row,) = read_run(tmp_path).out_of_memory
    assert row.verdict.startswith(f"out of memory {verdict}")


def test_experts_and_labels_of_a_model_that_is_not_given_them(tmp_path: Path, fake_clock: FakeClock) -> None:
    model = tiny_mixtral()
    loop = Loop(
        fake_clock, tmp_path, model=model, num_epochs=1, report_every_steps=2, predict=True, gpu="A40", usd_per_gpu_hour=100
    )
    with loop.monitor as monitor:
        for batch in loop.loader:
            labels = batch.pop("labels")
            logits = model(**batch).logits[:, :-1]
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).backward()
            loop.optimizer.step()
            monitor.step({"labels": labels})
    record = read_run(tmp_path)
    assert record.summary is not None
    assert record.summary.num_supervised_tokens == supervised_tokens()
    assert [row.status for row in record.expert_loads] == ["recorded"] * 3
    assert sum(sum(map(sum, row.tokens_per_expert)) for row in record.expert_loads) == REAL_TOKENS * 2 * 2
    balance = record.summary.expert_balance
    assert balance is not None
    assert balance["load_max_over_mean"] >= 1.0
    # By the cost model, for the GPU that was named.
    assert balance["imbalance_seconds"] >= 0.0
    assert balance["imbalance_usd"] == balance["imbalance_seconds"] / 36
    assert [window.imbalance_usd is not None for window in loop.sink.windows] == [True] * 3


def test_the_labels_of_a_batch_that_the_loop_skips_are_not_trained_on(tmp_path: Path, fake_clock: FakeClock) -> None:
    model = tiny_mixtral()
    loop = Loop(fake_clock, tmp_path, model=model, num_epochs=1)
    expected = 0
    with loop.monitor as monitor:
        for place, batch in enumerate(monitor.watch(loop.loader)):
            if place in (0, 3):
                continue
            labels = batch["labels"]
            expected += int((labels[:, 1:] != -100).sum())
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).backward()
            loop.optimizer.step()
            monitor.step()
    summary = read_run(tmp_path).summary
    assert summary is not None
    assert summary.num_steps == 4
    assert summary.num_supervised_tokens == expected


def test_a_job_is_read_from_the_live_objects_and_predicted(tmp_path: Path, fake_clock: FakeClock) -> None:
    loop = Loop(fake_clock, tmp_path, num_steps=40, gradient_accumulation_steps=3, predict=True, gpu="A40")
    with loop.monitor:
        loop.train()
    record = read_run(tmp_path)
    job = record.sessions[0].job
    assert job is not None
    assert (job["per_device_train_batch_size"], job["gradient_accumulation_steps"], job["max_steps"]) == (2, 3, 40)
    assert (job["method"], job["optim"], job["gpu"]) == ("full", "adamw_torch", "A40")
    assert job["num_samples"] == 12
    assert record.predictions[0].estimate["num_steps"] == 40
    assert record.predictions[0].estimate["step_seconds"] > 0


def test_training_is_bit_for_bit_the_same(tmp_path: Path, fake_clock: FakeClock) -> None:
    def trained(*, measured: bool) -> dict[str, Any]:
        loop = Loop(fake_clock, tmp_path / str(measured), model=None, num_epochs=1, profile_steps=(2, 3))
        if measured:
            with loop.monitor:
                loop.train()
        else:
            loop.monitor.step = lambda batch=None: False  # type: ignore[method-assign]
            loop.train(watch=False)
        return {**loop.model.state_dict(), "random": torch.get_rng_state()}

    plain, measured = trained(measured=False), trained(measured=True)
    assert all(torch.equal(plain[name], measured[name]) for name in plain)


def test_a_monitor_that_fails_leaves_the_loop_alone(
    tmp_path: Path, fake_clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr("ftcost_callback.live_run.LiveRun.step_ends", broken)
    loop = Loop(fake_clock, tmp_path, num_epochs=1)
    with caplog.at_level(logging.WARNING, logger="ftcost_callback"), loop.monitor as monitor:
        loop.train()
    assert monitor.global_step == 6
    assert len([message for message in caplog.messages if "switched off" in message]) == 1
    assert num_hooks(loop.model) == 1


def test_a_pause_inside_a_step_is_said_once(tmp_path: Path, fake_clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(fake_clock, tmp_path, num_steps=2)
    with caplog.at_level(logging.WARNING, logger="ftcost_callback"), loop.monitor as monitor:
        for batch in list(loop.loader)[:2]:
            loop.model(**batch).loss.backward()
            with monitor.pause("eval"):
                fake_clock.pass_seconds(7.0)
            loop.optimizer.step()
            monitor.step(batch)
    assert len([message for message in caplog.messages if "counts as a part of that step" in message]) == 1
    summary = read_run(tmp_path).summary
    assert summary is not None
    assert summary.eval_seconds == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_steps": 0}, "num_steps must be a whole number from 1 on"),
        ({"num_epochs": float("nan")}, "num_epochs must be a number above 0"),
        ({"mixed_precision": "fp8"}, "mixed_precision must be one of"),
        ({"resume_from": 7}, "resume_from must be the path of a folder"),
        ({"start_step": -1}, "start_step must be a whole number from 0 on"),
        ({"usd_per_gpu_hour": -1.0}, "usd_per_gpu_hour must be"),
        ({"stop_at_budget": True}, "stop_at_budget must be"),
        ({"profile_steps": (5, 2)}, "profile_steps must be"),
        ({"num_epochs": "x"}, "num_epochs must be a number above 0"),
        ({"num_steps": True}, "num_steps must be a whole number from 1 on"),
        ({"output_dir": None}, "output_dir must be the path of a folder"),
        ({"accelerator": 5}, "accelerator must be accelerate's Accelerator"),
    ],
)
def test_a_wrong_argument_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(CostModelError, match=said):
        FTCostMonitor(torch.nn.Linear(2, 2), **settings)


def test_a_wrong_pause_is_refused(tmp_path: Path, fake_clock: FakeClock) -> None:
    loop = Loop(fake_clock, tmp_path)
    with loop.monitor as monitor, pytest.raises(CostModelError, match="pause takes one of eval"), monitor.pause("meal"):  # type: ignore[arg-type]
        pass


def test_a_plain_torch_model_is_measured_without_a_prediction(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FTCostMonitor(model, optimizer, num_steps=3, batch_size=8, output_dir=tmp_path, sinks=[]) as monitor:
        for _ in range(3):
            model(torch.ones(8, 4)).sum().backward()
            optimizer.step()
            monitor.step()
    record = read_run(tmp_path)
    assert len(record.steps) == 3
    assert record.predictions == []
    assert any("no Hugging Face config" in note for note in record.sessions[0].notes or [])


PROGRAM_THAT_DIES_WHILE_PROFILED = """
import sys, torch
sys.path.insert(0, {tests!r})
from tiny_runs import TokenRows, pad_right, tiny_llama
from ftcost_callback import FTCostMonitor
model = tiny_llama().train()
monitor = FTCostMonitor(model, sinks=[], predict=False, profile_steps=(1, 5), output_dir={output!r})
monitor.__enter__()
model(**pad_right([TokenRows()[0]])).loss.backward()
monitor.step()
model(**pad_right([TokenRows()[0]])).loss.backward()
raise SystemExit(3)
"""


def test_a_program_that_ends_inside_the_profilers_window_ends_as_without_us(tmp_path: Path) -> None:
    """A torch profiler that still runs at the end of the interpreter is a segmentation fault."""
    program = PROGRAM_THAT_DIES_WHILE_PROFILED.format(tests=str(Path(__file__).parent), output=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert len(read_run(tmp_path).steps) == 1


@pytest.mark.parametrize(
    ("launched", "rank_files"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, ["run.rank1.jsonl"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, ["run.jsonl"]),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ["run.jsonl"]),  # a cluster's, of machines
        ({"RANK": "1", "WORLD_SIZE": "two", "LOCAL_RANK": "1"}, ["run.jsonl"]),
    ],
)
def test_processes_that_nothing_joins_write_a_file_each_and_it_is_said(
    tmp_path: Path,
    fake_clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    launched: dict[str, str],
    rank_files: list[str],
) -> None:
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    loop = Loop(fake_clock, tmp_path, num_epochs=1)
    with loop.monitor:
        loop.train()
    assert [path.name for path in sorted(tmp_path.rglob("*.jsonl"))] == rank_files
    if rank_files == ["run.jsonl"]:
        session = read_run(tmp_path).sessions[0]
        is_said = any(
            "2 processes were launched (WORLD_SIZE) and nothing joins them" in note for note in session.notes or ()
        )
        assert is_said == ("LOCAL_RANK" in launched and launched["WORLD_SIZE"] == "2")
        assert session.num_processes == (2 if is_said else None)


def test_a_step_outside_of_the_context_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    monitor = FTCostMonitor(torch.nn.Linear(2, 2), sinks=[])
    assert [monitor.step(), monitor.step()] == [False, False]
    assert len([message for message in caplog.messages if "outside of the context measures nothing" in message]) == 1


def test_a_monitor_is_entered_once_at_a_time(tmp_path: Path, fake_clock: FakeClock) -> None:
    loop = Loop(fake_clock, tmp_path, model=tiny_mixtral(), num_epochs=1)
    before = num_hooks(loop.model)
    with loop.monitor:
        with pytest.raises(CostModelError, match="measures a loop already; leave its context first"), loop.monitor:
            pass
        loop.train()
    assert num_hooks(loop.model) == before
    assert read_run(tmp_path).last_step == 6
    with loop.monitor:  # one after the other is a run each
        loop.train()
    assert num_hooks(loop.model) == before
    assert len(read_run(tmp_path).steps) == 6


@pytest.mark.parametrize("family", [tiny_llama, tiny_mixtral])
@pytest.mark.parametrize("watch", [True, False])
def test_a_batch_that_is_skipped_because_its_forward_failed_counts_nowhere(
    tmp_path: Path, fake_clock: FakeClock, watch: bool, family: Callable[[], Any]
) -> None:
    loop = Loop(fake_clock, tmp_path, model=family(), num_epochs=1, report_every_steps=1)
    fails = [False]

    def boom(module: Any, args: Any) -> None:
        if fails[0]:
            raise RuntimeError("no")

    loop.model.model.layers[1].register_forward_pre_hook(boom)  # the first layer's experts have been chosen
    kept = []
    with loop.monitor as monitor:
        for place, batch in enumerate(monitor.watch(loop.loader) if watch else loop.loader):
            fails[0] = place in (0, 3)
            try:
                loop.model(**batch).loss.backward()
            except RuntimeError:
                continue
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            monitor.step(batch)
            kept.append((batch["input_ids"].numel(), int(batch["attention_mask"].sum())))
    record = read_run(tmp_path)
    assert [(step.num_tokens, step.num_non_padding_tokens) for step in record.steps] == kept
    assert [step.num_micro_batches for step in record.steps] == [1] * 4
    if family is tiny_mixtral:
        assert {load.status for load in record.expert_loads} == {"recorded"}
        for layer in range(2):
            of_layer = sum(sum((load.tokens_per_expert or [])[layer]) for load in record.expert_loads)
            assert of_layer == 2 * sum(real for _, real in kept)
