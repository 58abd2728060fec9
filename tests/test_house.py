"""The house rules that a tool does not check: what is public, and what an import may load."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "wandb", "trackio", "plotly", "rich", "pynvml")

PUBLIC = {
    "costmodel": [
        "CostModelError",
        "Estimate",
        "GpuSpec",
        "Job",
        "Lengths",
        "ModelSpec",
        "Price",
        "compare",
        "estimate",
        "find_gpu",
        "find_model_config",
        "find_price",
        "list_gpus",
        "list_models",
        "list_prices",
        "model_spec_from_config",
        "optimize",
    ],
    "ftcost_callback": ["FTCostCallback", "FTCostMonitor", "attach", "estimate_trainer"],
}


def loaded_after(statement: str) -> list[str]:
    """The heavy packages in ``sys.modules`` after ``statement`` in a fresh interpreter."""
    script = f"import json, sys; {statement}; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_these_and_sorted(package: str) -> None:
    assert importlib.import_module(package).__all__ == PUBLIC[package]
    assert sorted(PUBLIC[package]) == PUBLIC[package]


@pytest.mark.parametrize(("package", "name"), [(package, name) for package, names in PUBLIC.items() for name in names])
def test_every_public_name_resolves_to_the_thing_of_that_name(package: str, name: str) -> None:
    assert getattr(importlib.import_module(package), name).__name__ == name


@pytest.mark.parametrize("package", PUBLIC)
def test_a_name_that_is_not_public_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = importlib.import_module(package).no_such_name


@pytest.mark.parametrize("package", PUBLIC)
def test_import_alone_loads_nothing_heavy(package: str) -> None:
    assert loaded_after(f"import {package}") == []


def test_an_estimate_loads_nothing_heavy() -> None:
    estimate = (
        "from costmodel import estimate; "
        "estimate(model='mistralai/Mixtral-8x7B-v0.1', gpu='NVIDIA A40', method='qlora', quantization='nf4', "
        "max_length=512, framework='trl', per_device_train_batch_size=1)"
    )
    assert loaded_after(estimate) == []


def test_the_check_itself_sees_a_heavy_import() -> None:
    assert loaded_after("import rich") == ["rich"]
