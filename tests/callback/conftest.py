from __future__ import annotations

import os

import pytest
from tiny_runs import FakeClock

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: threads only wait for each other


@pytest.fixture
def fake_clock() -> FakeClock:
    return FakeClock()
