"""The saved W&B workspace: its spec as W&B gets it, and the command that sends it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from wandb_server import Fault, WandbServer

from costmodel.cli import run
from ftcost_callback.cli import app
from ftcost_callback.metrics import METRICS

wandb = pytest.importorskip("wandb")
pytest.importorskip("wandb_workspaces")

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style")  # wandb-workspaces' own

# Section -> (title, x, y) of each chart. The keys are the contract's, so this is what a dashboard stands on.
STEP = "train/global_step"
GOLDEN: dict[str, list[tuple[str, str, list[str]]]] = {
    "Cost": [
        (
            "Spent, projected and predicted",
            STEP,
            [
                "ftcost/cost/spent_usd",
                "ftcost/cost/projected_usd",
                "ftcost/cost/projected_usd_low",
                "ftcost/cost/projected_usd_high",
                "ftcost/cost/predicted_usd",
            ],
        ),
        ("Per million supervised tokens", STEP, ["ftcost/cost/usd_per_million_supervised_tokens"]),
        ("Time left", STEP, ["ftcost/time/remaining_seconds"]),
        ("Loss against dollars", "ftcost/by_cost/spent_usd", ["ftcost/by_cost/loss", "ftcost/by_cost/eval_loss"]),
    ],
    "Throughput, measured against predicted": [
        ("Step, measured over predicted (1 = on plan)", STEP, ["ftcost/speed/step_seconds_measured_over_predicted"]),
        (
            "Tokens",
            STEP,
            [
                "ftcost/speed/non_padding_tokens_per_second",
                "ftcost/speed/tokens_per_second",
                "ftcost/speed/supervised_tokens_per_second",
            ],
        ),
        ("Step", STEP, ["ftcost/speed/step_seconds"]),
        ("Share of the GPU's peak", STEP, ["ftcost/speed/mfu", "ftcost/speed/hfu"]),
    ],
    "Where the time goes": [
        ("Waiting for data", STEP, ["ftcost/speed/data_wait_fraction"]),
        (
            "Evaluating, saving and other",
            STEP,
            ["ftcost/time/eval_seconds", "ftcost/time/save_seconds", "ftcost/time/other_seconds"],
        ),
        ("Elapsed and projected", STEP, ["ftcost/time/elapsed_seconds", "ftcost/time/projected_total_seconds"]),
        (
            "Loss against hours (runs without a price)",
            "ftcost/by_cost/elapsed_hours",
            ["ftcost/by_cost/loss", "ftcost/by_cost/eval_loss"],
        ),
    ],
    "GPU": [
        ("A kernel ran; its cores were at work", STEP, ["ftcost/gpu/busy_fraction", "ftcost/gpu/sm_active_fraction"]),
        ("Memory", STEP, ["ftcost/gpu/peak_allocated_gib", "ftcost/gpu/memory_used_gib"]),
        ("Power", STEP, ["ftcost/gpu/power_watts"]),
        (
            "Peak memory, measured over predicted (1 = on plan)",
            STEP,
            ["ftcost/gpu/peak_memory_measured_over_predicted"],
        ),
    ],
    "Experts": [
        ("Busiest expert over the mean (1 = balanced)", STEP, ["ftcost/moe/load_max_over_mean"]),
        ("Spread and entropy of the load", STEP, ["ftcost/moe/load_cv", "ftcost/moe/load_entropy"]),
        ("Experts without a token", STEP, ["ftcost/moe/dead_expert_fraction"]),
    ],
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WandbServer]:
    with WandbServer() as listening:
        for name, value in listening.environment(str(tmp_path)).items():
            monkeypatch.setenv(name, value)
        wandb.teardown()
        yield listening
        wandb.teardown()
    assert listening.unknown_operations == set()


def charts(spec: dict[str, Any]) -> dict[str, list[tuple[str, str, list[str]]]]:
    sections = spec["section"]["panelBankConfig"]["sections"]
    return {
        section["name"]: [
            (panel["config"]["chartTitle"], panel["config"]["xAxis"], panel["config"]["metrics"])
            for panel in section["panels"]
        ]
        for section in sections
        if section["panels"]
    }


def test_the_command_saves_the_workspace(server: WandbServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["wandb-workspace", "tester/wire"], application=app) == 0
    (view,) = server.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("tester", "wire", "ftcost: cost and speed")
    spec = json.loads(view["spec"])
    assert charts(spec) == GOLDEN
    # Automatic sections of the other keys: by the key up to its last slash.
    assert spec["section"]["panelBankConfig"]["settings"]["autoOrganizePrefix"] == 2
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith(f"{server.url}/tester/wire?nw=")


def test_every_key_is_one_that_is_logged() -> None:
    keys = {key for panels in GOLDEN.values() for _, _, y in panels for key in y if not key.startswith("ftcost/by_cost/")}
    assert keys <= {metric.key for metric in METRICS}


@pytest.mark.parametrize("path", ["tester", "tester/", "a/b/c"])
def test_a_wrong_path_is_said(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["wandb-workspace", path], application=app) == 2
    assert "give ENTITY/PROJECT" in capsys.readouterr().err


def test_a_server_that_refuses_is_said(server: WandbServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.faults["graphql"] = Fault(status=401)
    assert run(["wandb-workspace", "tester/wire"], application=app) == 2
    assert "W&B did not take the workspace for tester/wire" in capsys.readouterr().err
