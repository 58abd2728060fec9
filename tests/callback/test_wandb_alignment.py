"""What becomes of rows logged beside ``WandbCallback``, by how they are logged: why ours go in as they do.

A real Trainer and the real client, offline, read back with wandb's own reader; a loss and an evaluation at steps 5 and 10.
Should a client or a Trainer change one of these, the way that :class:`~ftcost_callback.sinks.WandbSink` logs is due for
another look.

| our way | what becomes of the row | used |
|---|---|---|
| ``log({..., "train/global_step": g})`` at the end of each step | kept, at its step; moves W&B's own step on | reports |
| the same in ``on_log`` | kept; evaluations and the end fire it too | |
| ``log(d)`` without an axis | kept, at the last step that somebody named | |
| an axis of ours by a pattern | kept, with a stale ``train/global_step`` beside | |
| an axis of ours by exact names, ``step_sync=False`` | kept, nothing added | loss by cost |
| ``log(d, step=g)`` | dropped once an evaluation has moved the client's own step on | |
| ``log(d, commit=False)`` | only the last of each logging interval is left, in the Trainer's row | reports at a log |
| keys added to the Trainer's ``logs`` before ``WandbCallback`` | in the loss's row, below ``train/`` | ``attach`` |
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_runs import TokenRows, tiny_trainer
from wandb_files import history

wandb = pytest.importorskip("wandb")

pytestmark = pytest.mark.usefixtures("wandb_offline")

STEP = "train/global_step"
STEPS = list(range(1, 11))
Rows = list[dict[str, Any]]


def train_with(folder: Path, *, begins: Callable[[], None] = lambda: None, **events: Callable[..., None]) -> Rows:
    """Train ten steps with a callback of these events (``on_step_end=function(step, logs)``); the rows, in order."""
    from transformers import TrainerCallback

    class Logs(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *arguments: Any, **named: Any) -> None:
            begins()

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            events.get("on_step_end", lambda step: None)(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
            events.get("on_log", lambda step, logs: None)(state.global_step, logs)

    fields: dict[str, Any] = {"max_steps": 10, "logging_steps": 5, "eval_strategy": "steps", "eval_steps": 5}
    trainer = tiny_trainer(folder / "out", [Logs()], report_to=["wandb"], eval_dataset=TokenRows(), **fields)
    if events.get("stands_first"):
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop(next(place for place, each in enumerate(callbacks) if isinstance(each, Logs))))
    trainer.train()
    wandb.finish()
    return history(folder)


def trainers_own(rows: Rows) -> list[tuple[str, int]]:
    """What of the Trainer's own rows is there, and where."""
    kinds = ("train/loss", "eval/loss")
    return [(kind, row[STEP]) for row in rows for kind in kinds if kind in row]


ALL_OF_THE_TRAINERS = [("train/loss", 5), ("eval/loss", 5), ("train/loss", 10), ("eval/loss", 10)]


def test_a_row_that_names_its_step_is_kept_at_its_step(tmp_path: Path) -> None:
    rows = train_with(tmp_path, on_step_end=lambda step: wandb.log({"own": step, STEP: step}))
    assert [(row["own"], row[STEP]) for row in rows if "own" in row] == [(step, step) for step in STEPS]
    assert trainers_own(rows) == ALL_OF_THE_TRAINERS


def test_on_log_is_fired_for_evaluations_and_the_end_too(tmp_path: Path) -> None:
    fired: list[tuple[int, bool]] = []

    def log(step: int, logs: dict[str, Any]) -> None:
        fired.append((step, "loss" in logs))
        if "loss" in logs:
            wandb.log({"own": step, STEP: step})

    rows = train_with(tmp_path, on_log=log)
    assert fired == [(5, True), (5, False), (10, True), (10, False), (10, False)]
    assert [(row["own"], row[STEP]) for row in rows if "own" in row] == [(5, 5), (10, 10)]


def test_a_row_without_an_axis_stands_at_the_last_step_that_was_named(tmp_path: Path) -> None:
    rows = train_with(tmp_path, on_step_end=lambda step: wandb.log({"own": step}))
    assert [(row["own"], row[STEP]) for row in rows if "own" in row] == [(step, 5 if step > 5 else 0) for step in STEPS]


def test_an_axis_by_a_pattern_may_get_a_stale_step_beside_it(tmp_path: Path) -> None:
    def define() -> None:
        wandb.define_metric("own/axis")
        wandb.define_metric("own/*", step_metric="own/axis")

    rows = train_with(tmp_path, begins=define, on_step_end=lambda step: wandb.log({"own/value": step, "own/axis": step}))
    found = [(row["own/axis"], row.get(STEP)) for row in rows if "own/value" in row]
    # Two patterns fit the name, this one and WandbCallback's "*": on a busy machine the client takes the other now and then.
    assert found in ([(step, 5 if step > 5 else 0) for step in STEPS], [(step, None) for step in STEPS])


def test_an_axis_by_exact_names_stays_alone(tmp_path: Path) -> None:
    def define() -> None:
        for name in ("own/value", "own/axis"):
            wandb.define_metric(name, step_metric="own/axis", step_sync=False)

    rows = train_with(tmp_path, begins=define, on_step_end=lambda step: wandb.log({"own/value": step, "own/axis": step}))
    assert [row for row in rows if "own/value" in row] == [{"own/value": step, "own/axis": step} for step in STEPS]


def test_a_row_with_step_is_dropped_after_an_evaluation(tmp_path: Path) -> None:
    rows = train_with(tmp_path, on_step_end=lambda step: wandb.log({"own": step}, step=step))
    kept = [row["own"] for row in rows if "own" in row]
    assert kept == [step for step in STEPS if step != 6]


def test_rows_without_commit_are_merged_into_the_trainers(tmp_path: Path) -> None:
    rows = train_with(tmp_path, on_step_end=lambda step: wandb.log({"own": step}, commit=False))
    assert [(row["own"], row[STEP]) for row in rows if "own" in row] == [(5, 5), (10, 10)]


def test_keys_added_to_the_trainers_logs_before_the_reporter_are_in_its_row(tmp_path: Path) -> None:
    def add(step: int, logs: dict[str, Any]) -> None:
        if "loss" in logs:
            logs["own"] = step

    rows = train_with(tmp_path, on_log=add, stands_first=lambda: None)
    assert [(row["train/own"], row[STEP]) for row in rows if "train/loss" in row] == [(5, 5), (10, 10)]


@pytest.mark.parametrize(("every", "reports_to_wandb"), [("log", True), ("step", False)])
@pytest.mark.parametrize("place", ["on_step_end before us", "on_step_end", "on_log", "compute_loss"])
def test_a_user_who_steers_the_step_loses_no_row_and_neither_do_we(
    tmp_path: Path, every: Any, reports_to_wandb: bool, place: str
) -> None:
    """W&B drops what is logged with a lower ``step=`` than its own, which each row moves on that somebody closes."""
    from tiny_runs import priced_callback
    from transformers import TrainerCallback

    from ftcost_callback.run_file import read_run

    class User(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if place.startswith("on_step_end"):
                wandb.log({"user": state.global_step}, step=state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
            if place == "on_log" and "loss" in logs:
                wandb.log({"user": state.global_step}, step=state.global_step)

    if not reports_to_wandb:
        wandb.init(project="ftcost-test")
    ours = priced_callback(wandb_every=every)
    callbacks = [User(), ours] if place.endswith("before us") else [ours, User()]
    report_to = ["wandb"] if reports_to_wandb else []
    trainer = tiny_trainer(tmp_path / "out", callbacks, max_steps=10, logging_steps=2, report_to=report_to)
    compute_loss = trainer.compute_loss

    def logging_loss(*arguments: Any, **named: Any) -> Any:
        if place == "compute_loss":
            wandb.log({"user": trainer.state.global_step}, step=trainer.state.global_step)
        return compute_loss(*arguments, **named)

    trainer.compute_loss = logging_loss
    trainer.train()
    wandb.finish()
    rows = history(tmp_path)
    expected = {"on_log": list(range(2, 11, 2)), "compute_loss": list(range(10))}.get(place, STEPS)
    assert [row["user"] for row in rows if "user" in row] == expected
    reported = [step.global_step for step in read_run(tmp_path / "out").steps if step.projected_total_usd is not None]
    assert reported == (list(range(2, 11, 2)) if every == "log" else list(range(2, 11)))
    assert [row[STEP] for row in rows if "ftcost/cost/spent_usd" in row] == reported
    losses = [row["ftcost/by_cost/loss"] for row in rows if "ftcost/by_cost/loss" in row]
    assert losses == [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
