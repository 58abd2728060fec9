from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_runs import FakeClock
from wandb_files import OFFLINE_ENVIRONMENT
from wandb_server import WandbServer

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: threads only wait for each other


@pytest.fixture
def fake_clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def wandb_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A client that has seen no other test, writing below ``tmp_path``."""
    for name, value in {**OFFLINE_ENVIRONMENT, "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    yield from _new_wandb_client()


@pytest.fixture
def wandb_online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WandbServer]:
    """A client as above that talks to a server of this test, which knew every request in the end."""
    with WandbServer() as server:
        for name, value in server.environment(str(tmp_path)).items():
            monkeypatch.setenv(name, value)
        for _ in _new_wandb_client():
            yield server
    assert server.unknown_operations == set()


def _new_wandb_client() -> Iterator[None]:
    import wandb

    wandb.teardown()  # the client keeps the first environment it saw
    yield
    if wandb.run is not None:
        wandb.finish()
    wandb.teardown()
