"""What the run that the guard opens is like: the one ``WandbCallback`` would have opened, with limits to every wait."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_runs import tiny_trainer
from wandb_files import history

from ftcost_callback import FTCostCallback, attach
from ftcost_callback.run_file import read_run
from ftcost_callback.wandb_guard import LIMITS

wandb = pytest.importorskip("wandb")

pytestmark = pytest.mark.usefixtures("wandb_offline")


def guarded(folder: Path, **changes: Any) -> Any:
    callback = FTCostCallback(wandb_guard=True, predict=False)
    return tiny_trainer(folder / "out", [callback], **({"report_to": ["wandb"]} | changes))


def test_every_limit_is_one_that_this_client_knows() -> None:
    assert set(LIMITS) <= set(wandb.Settings.model_fields)


def test_the_run_is_opened_with_the_limits_and_the_trainers_name(tmp_path: Path) -> None:
    guarded(tmp_path, run_name="a name")
    assert wandb.run is not None
    settings = wandb.run.settings
    assert (wandb.run.name, wandb.run.project) == ("a name", "huggingface")
    assert {name: getattr(settings, name) for name in LIMITS} == LIMITS


def test_the_environment_is_honoured_as_wandbcallback_honours_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "WANDB_PROJECT": "my-project",
        "WANDB_ENTITY": "my-team",
        "WANDB_NAME": "my-name",
        "WANDB_RUN_ID": "run1",
        "WANDB_RUN_GROUP": "my-group",
        "WANDB_TAGS": "a,b",
        "WANDB_NOTES": "a note",
        "WANDB_INIT_TIMEOUT": "7",
        "WANDB_FINISH_TIMEOUT": "11",
        "WANDB_X_GRAPHQL_RETRY_MAX": "2",
        "WANDB__TRANSACTION_LOG_FLUSH_INTERVAL": "0.5",
        "WANDB_HTTP_TIMEOUT": "9",
    }.items():
        monkeypatch.setenv(name, value)
    guarded(tmp_path)
    run = wandb.run
    assert run is not None
    assert (run.project, run.entity, run.name, run.id) == ("my-project", "my-team", "my-name", "run1")
    assert (run.group, run.tags, run.notes) == ("my-group", ("a", "b"), "a note")
    settings = run.settings
    assert (settings.init_timeout, settings.finish_timeout, settings.x_graphql_retry_max) == (7, 11, 2)
    assert (settings.x_transaction_log_flush_interval, settings.x_graphql_timeout_seconds) == (0.5, 9)
    assert settings.x_graphql_retry_wait_max_seconds == LIMITS["x_graphql_retry_wait_max_seconds"]


def test_a_run_of_the_users_is_left_as_it_is(tmp_path: Path) -> None:
    own = wandb.init(project="own", name="mine")
    log, finish = own.log, own.finish
    guarded(tmp_path, run_name="another").train()
    assert wandb.run is own
    assert (own.name, own.project, own.log, own.finish) == ("mine", "own", log, finish)
    assert own.settings.finish_timeout == 0


def test_disabled_stays_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    made = guarded(tmp_path)
    made.train()
    assert made.state.global_step == 4
    assert list(tmp_path.glob("wandb/*run-*")) == []


def test_a_server_that_cannot_be_reached_leaves_an_offline_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    start = wandb.init
    modes: list[Any] = []

    def dead_server(*arguments: Any, mode: str | None = None, **named: Any) -> Any:
        modes.append(mode)
        if mode != "offline":
            raise wandb.errors.CommError("connection refused")
        assert named["settings"].finish_timeout == LIMITS["finish_timeout"]
        return start(*arguments, mode=mode, **named)

    monkeypatch.setattr(wandb, "init", dead_server)
    made = guarded(tmp_path)
    assert wandb.run is not None
    assert wandb.run.settings.mode == "offline"
    run_id = wandb.run.id
    made.train()
    assert modes == [None, "offline"]  # WandbCallback took the run that was open
    assert wandb.run.id == run_id
    assert len(read_run(tmp_path / "out").steps) == 4
    assert sum("wandb sync" in message for message in caplog.messages) == 1


def test_without_the_guard_or_a_report_nothing_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("wandb.init was called")

    monkeypatch.setattr(wandb, "init", never)
    tiny_trainer(tmp_path / "plain", [FTCostCallback(predict=False)]).train()
    guarded(tmp_path, report_to="none").train()
    assert wandb.run is None


def test_both_sides_config_and_rows_are_complete(tmp_path: Path) -> None:
    guarded(tmp_path, logging_steps=2).train()
    assert wandb.run is not None
    assert wandb.run.config["max_steps"] == 4
    assert wandb.run.config["ftcost"]["max_steps"] == 4
    wandb.finish()
    rows = history(tmp_path)
    assert [row["train/global_step"] for row in rows if "train/loss" in row] == [2, 4]
    assert [row["train/global_step"] for row in rows if "ftcost/speed/step_seconds" in row] == [2, 4]


def test_attach_guards_too(tmp_path: Path) -> None:
    made = tiny_trainer(tmp_path / "out", [], report_to=["wandb"])
    assert wandb.run is None
    attach(made, wandb_guard=True, predict=False)
    assert wandb.run is not None
    assert wandb.run.settings.finish_timeout == LIMITS["finish_timeout"]


def test_the_callers_own_mistakes_are_still_raised(tmp_path: Path) -> None:
    guarded(tmp_path)
    with pytest.raises((TypeError, ValueError)):
        wandb.log("no mapping")


def test_without_a_disk_or_a_server_the_run_is_disabled_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = wandb.init

    def nothing_works(*arguments: Any, mode: str | None = None, **named: Any) -> Any:
        if mode != "disabled":
            raise OSError("no space left on device")
        return start(*arguments, mode=mode, **named)

    monkeypatch.setattr(wandb, "init", nothing_works)
    made = guarded(tmp_path)
    made.train()
    assert made.state.global_step == 4
    assert sum("neither online" in message for message in caplog.messages) == 1
