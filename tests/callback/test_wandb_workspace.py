"""The saved W&B workspace: its spec as W&B gets it, and the command that sends it."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from wandb_server import Fault, WandbServer

from costmodel.cli import run
from ftcost_callback.cli import app
from ftcost_callback.metrics import COST_AXIS_KEY, EXPERT_HISTOGRAM_KEY, METRICS, TIME_AXIS_KEY

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
        (
            "Step and its parts",
            STEP,
            [
                "ftcost/speed/step_seconds",
                "ftcost/speed/forward_seconds",
                "ftcost/speed/backward_seconds",
                "ftcost/speed/optimizer_seconds",
            ],
        ),
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
        (
            "Busiest expert over the mean (1 = balanced)",
            STEP,
            ["ftcost/moe/load_max_over_mean", "ftcost/moe/worst_layer_load_max_over_mean"],
        ),
        ("Against the first steps (above 1 = less even)", STEP, ["ftcost/moe/load_max_over_mean_vs_first_steps"]),
        ("What the uneven load has cost", STEP, ["ftcost/moe/imbalance_usd"]),
        ("Spread and entropy of the load", STEP, ["ftcost/moe/load_cv", "ftcost/moe/load_entropy"]),
        ("Experts without a token", STEP, ["ftcost/moe/dead_expert_fraction"]),
    ],
}


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


def test_the_command_saves_the_workspace(wandb_online: WandbServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["wandb-workspace", "tester/wire"], application=app) == 0
    (view,) = wandb_online.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("tester", "wire", "ftcost: cost and speed")
    spec = json.loads(view["spec"])
    assert charts(spec) == GOLDEN
    # Automatic sections of the other keys: by the key up to its last slash.
    assert spec["section"]["panelBankConfig"]["settings"]["autoOrganizePrefix"] == 2
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith(f"{wandb_online.url}/tester/wire?nw=")


def test_every_key_is_one_that_is_logged() -> None:
    keys = {key for panels in GOLDEN.values() for _, _, y in panels for key in y if not key.startswith("ftcost/by_cost/")}
    assert keys <= {metric.key for metric in METRICS}


def test_keys_group_well_by_their_first_and_by_their_last_slash() -> None:
    """The two ways W&B has (``WorkspaceSettings.group_by_prefix``), and the default of the installed package."""
    from wandb_workspaces.workspaces import WorkspaceSettings

    assert WorkspaceSettings().group_by_prefix == "last"
    shown = [metric.key for metric in METRICS if metric.default]
    everything = [metric.key for metric in METRICS] + [EXPERT_HISTOGRAM_KEY, COST_AXIS_KEY, TIME_AXIS_KEY]
    assert {key.partition("/")[0] for key in everything} == {"ftcost"}  # one section, of a screen in the default detail
    assert len(shown) <= 13
    by_last = Counter(key.rpartition("/")[0] for key in everything)
    assert by_last.keys() == {f"ftcost/{name}" for name in ("cost", "time", "speed", "gpu", "moe", "moe/load", "by_cost")}
    assert max(by_last.values()) <= 12


@pytest.mark.parametrize("path", ["tester", "tester/", "a/b/c"])
def test_a_wrong_path_is_said(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["wandb-workspace", path], application=app) == 2
    assert "give ENTITY/PROJECT" in capsys.readouterr().err


def test_a_server_that_refuses_is_said(wandb_online: WandbServer, capsys: pytest.CaptureFixture[str]) -> None:
    wandb_online.faults["graphql"] = Fault(status=401)
    assert run(["wandb-workspace", "tester/wire"], application=app) == 2
    assert "W&B did not take the workspace for tester/wire" in capsys.readouterr().err


def test_the_drawing_of_the_docs_holds_every_chart_and_says_that_it_is_one() -> None:
    path = Path(__file__).parents[2] / "docs" / "draw_wandb_workspace.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = [{STEP: step, "ftcost/cost/spent_usd": 0.1 * step, "ftcost/speed/mfu": 0.4} for step in (1, 2, 3)]
    picture = script.drawing(rows, "three steps")
    parsed = ElementTree.fromstring(picture)
    shown = " ".join(text for text in parsed.itertext())
    assert "not a screenshot of wandb.ai" in shown
    assert [title for charts in GOLDEN.values() for title, _, _ in charts if title not in shown] == []
    assert picture.count('stroke-width="1.6"') == 2  # a curve for each of the two figures that the rows hold
    assert "no data in this run: A kernel ran" in shown
