"""``pytest -m gpu tests/gpu``: selected without a device, these fail rather than skip."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
for folder in (ROOT / "tests" / "callback", ROOT / "benchmarks" / "gpu"):
    sys.path.insert(0, str(folder))


@pytest.fixture
def cuda() -> Any:
    """The first CUDA device."""
    import torch

    if not torch.cuda.is_available():
        pytest.fail("needs an NVIDIA GPU that torch can use; deselect with -m 'not gpu'")
    return torch.device("cuda:0")
