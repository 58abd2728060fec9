"""The guard around W&B's start, with the real client in offline mode and a start that fails as a dead server's does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny_trainer

from ftcost_callback import FTCostCallback
from ftcost_callback.run_file import read_run

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def wandb_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    wandb.teardown()
    yield
    wandb.finish()
    wandb.teardown()


def test_a_server_that_cannot_be_reached_leaves_an_offline_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = wandb.init
    modes: list[Any] = []

    def dead_server(*args: Any, mode: str | None = None, **kwargs: Any) -> Any:
        modes.append(mode)
        if mode != "offline":
            raise wandb.errors.CommError("connection refused")
        assert kwargs["settings"].finish_timeout == 300
        return start(*args, mode=mode, **kwargs)

    monkeypatch.setattr(wandb, "init", dead_server)
    trainer = tiny_trainer(tmp_path, [FTCostCallback(wandb_guard=True, predict=False)], report_to="wandb")
    assert wandb.run is not None
    assert wandb.run.settings.mode == "offline"
    run_id = wandb.run.id
    trainer.train()
    assert modes == [None, "offline"]  # WandbCallback took the run that was open
    assert wandb.run.id == run_id
    assert len(read_run(tmp_path).steps) == 4
    assert sum("wandb sync" in message for message in caplog.messages) == 1


def test_without_the_guard_nothing_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("wandb.init was called")

    monkeypatch.setattr(wandb, "init", never)
    tiny_trainer(tmp_path, [FTCostCallback(predict=False)]).train()
    tiny_trainer(tmp_path, [FTCostCallback(predict=False, wandb_guard=True)]).train()  # report_to is "none"
    assert wandb.run is None
