"""Against the real wandb client, offline, read back with wandb's own reader."""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ftcost_callback.records import Budget, ExpertLoad, Prediction, Session, Summary, Window
from ftcost_callback.sinks import FanOut, WandbSink

wandb = pytest.importorskip("wandb")

SESSION = Session(
    run_id="r1",
    session_index=0,
    started_at="2026-08-17T10:00:00Z",
    device={"name": "NVIDIA A40", "peak_flops_per_second": 149.7e12},
    price={"usd_per_gpu_hour": 0.79},
    versions={"torch": "2.13.0"},
    job={"model": "x/y", "lengths": {"values": list(range(1, 2000))}},
)
PREDICTION = Prediction(basis="before", estimate={"total_usd": 6.65, "step": {"bound_by": "compute"}, "mfu": None})
SUMMARY = Summary(
    global_step=8,
    num_sessions=1,
    wall_seconds=10.0,
    train_seconds=8.0,
    data_wait_seconds=1.0,
    eval_seconds=1.0,
    save_seconds=0.0,
    log_seconds=0.0,
    startup_seconds=1.0,
    other_seconds=0.0,
    spent_usd=0.25,
    measured_over_predicted={"before": {"step_seconds": 1.04}},
    verdict="on plan",
)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
        "WANDB_X_DISABLE_STATS": "true",
    }.items():
        monkeypatch.setenv(name, value)
    yield
    if wandb.run is not None:
        wandb.finish()
    wandb.teardown()  # the client keeps the first environment it saw


def records(directory: Path) -> list[dict[str, Any]]:
    """Every record of the one run below ``directory``, by wandb-core's own reader."""
    from wandb.util import get_core_path

    (run_file,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    reader = [get_core_path(), "leet", "inspect", "--json", "--no-observability", "--run-file", str(run_file)]
    output = subprocess.run([*reader, str(run_file.parent)], capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def history(directory: Path) -> list[dict[str, Any]]:
    """The rows, without wandb's own columns."""
    rows = [record["history"]["item"] for record in records(directory) if record["type"] == "history"]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


def merged(directory: Path, kind: str) -> dict[str, Any]:
    """What config or summary hold in the end."""
    values: dict[str, Any] = {}
    for record in records(directory):
        if record["type"] == kind:
            values |= record[kind].get("update", {})
    return values


def test_rows_config_summary_and_alert(tmp_path: Path) -> None:
    wandb.init(project="ftcost-test")
    sink = WandbSink(now=lambda: datetime(2026, 8, 17, 12, 30, tzinfo=timezone.utc))
    sink.open(SESSION, PREDICTION)
    sink.log(Window(global_step=2, spent_usd=0.5, mfu=0.25, hfu=0.5, tokens_per_second=100.0), {})
    sink.log(Window(global_step=3), {})  # nothing measured: no row
    budget = Budget(threshold="80 %", kind="usd", limit=1.0, spent=0.85, global_step=4, action="warned")
    sink.alert(budget)
    sink.alert(budget)
    sink.alert(Budget(threshold="100 %", kind="usd", limit=1.0, spent=1.0, global_step=5, action="stopped"))
    sink.close(SUMMARY)
    assert wandb.run is not None  # the user's run stays open
    wandb.finish()

    assert history(tmp_path) == [
        {"ftcost/cost/spent_usd": 0.5, "ftcost/speed/mfu": 0.25, "train/global_step": 2},
    ]
    assert merged(tmp_path, "config")["ftcost"] == {
        "run_id": "r1",
        "session_index": 0,
        "device": {"name": "NVIDIA A40", "peak_flops_per_second": 149.7e12},
        "price": {"usd_per_gpu_hour": 0.79},
        "versions": {"torch": "2.13.0"},
        "job": {"model": "x/y", "lengths": {"values": "(1999 entries)"}},
        "prediction": {"total_usd": 6.65, "step": {"bound_by": "compute"}},
    }
    summary = merged(tmp_path, "summary")
    assert summary["ftcost/summary/spent_usd"] == 0.25
    assert summary["ftcost/summary/measured_over_predicted/before/step_seconds"] == 1.04
    assert summary["ftcost/summary/verdict"] == "on plan"
    assert [record["alert"] for record in records(tmp_path) if record["type"] == "alert"] == [
        {
            "title": "ftcost: budget, 80 %",
            "text": "budget $1.00: 80 % used ($0.85 spent at step 4) [2026-08-17 12:30 UTC]",
            "level": "WARN",
            "wait_duration": "60000",
        },
        {
            "title": "ftcost: budget, 100 %",
            "text": "budget $1.00: 100 % used ($1.00 spent at step 5); saving and stopping [2026-08-17 12:30 UTC]",
            "level": "ERROR",
            "wait_duration": "60000",
        },
    ]


def test_full_detail_adds_keys_and_a_histogram_for_at_most_16_layers(tmp_path: Path) -> None:
    wandb.init(project="ftcost-test")
    sink = WandbSink(detail="full")
    sink.open(SESSION, None)
    layers = 48
    load = ExpertLoad(
        global_step=2,
        layer_names=[f"model.layers.{layer}.mlp.experts" for layer in range(layers)],
        tokens_per_expert=[[layer + 1, 0, 3 * (layer + 1), 0] for layer in range(layers)],
        num_experts_per_tok=2,
    )
    sink.log(Window(global_step=2, hfu=0.5, load_cv=1.0), {"expert_load": load})
    sink.log(
        Window(global_step=4, hfu=0.5),
        {"expert_load": ExpertLoad(global_step=4, status="not_recorded", reason="hooks did not fire")},
    )
    wandb.finish()
    first, second = history(tmp_path)
    assert second == {"ftcost/speed/hfu": 0.5, "train/global_step": 4}
    assert first["ftcost/moe/load/layer_00.values"] == [0.25, 0, 0.75, 0]
    assert first["ftcost/moe/load/layer_00.bins"] == [0, 1, 2, 3, 4]
    assert first["ftcost/moe/load_cv"] == 1.0
    shown = sorted(key for key in first if key.endswith(".values"))
    assert len(shown) == 16
    assert shown[-1] == "ftcost/moe/load/layer_47.values"


def test_more_experts_than_a_histogram_holds_are_summed_in_bins(tmp_path: Path) -> None:
    wandb.init(project="ftcost-test")
    sink = WandbSink(detail="full")
    load = ExpertLoad(global_step=1, layer_names=["moe"], tokens_per_expert=[[1] * 1000])
    sink.log(Window(global_step=1), {"expert_load": load})
    wandb.finish()
    (row,) = history(tmp_path)
    assert len(row["ftcost/moe/load/moe.values"]) == 500
    assert row["ftcost/moe/load/moe.values"][0] == 0.002
    assert row["ftcost/moe/load/moe.bins"][-1] == 1000


def test_a_run_that_opens_later_is_found_and_greeted(tmp_path: Path) -> None:
    sink = WandbSink()
    sink.open(SESSION, PREDICTION)
    sink.log(Window(global_step=1, mfu=0.1), {})  # lost: no run yet
    wandb.init(project="ftcost-test")
    sink.log(Window(global_step=2, mfu=0.2), {})
    wandb.finish()
    sink.log(Window(global_step=3, mfu=0.3), {})  # lost: closed by its owner
    sink.close(SUMMARY)
    assert history(tmp_path) == [{"ftcost/speed/mfu": 0.2, "train/global_step": 2}]
    assert merged(tmp_path, "config")["ftcost"]["run_id"] == "r1"


def test_no_run_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    sink = WandbSink()
    with caplog.at_level(logging.INFO, logger="ftcost_callback"):
        sink.open(SESSION, PREDICTION)
        for step in (1, 2, 3):
            sink.log(Window(global_step=step, mfu=0.1), {})
        sink.alert(Budget(threshold="80 %", kind="usd", limit=1.0, spent=0.85, global_step=4, action="warned"))
        sink.close(SUMMARY)
    assert [record.getMessage() for record in caplog.records] == [
        "ftcost: nothing goes to Weights & Biases: no run is open (report_to=['wandb'] or wandb.init() opens one)"
    ]


def test_wandb_not_installed_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    sink = WandbSink()
    with caplog.at_level(logging.INFO, logger="ftcost_callback"):
        sink.open(SESSION, None)
        sink.log(Window(global_step=1, mfu=0.1), {})
        sink.log(Window(global_step=2, mfu=0.1), {})
    assert [record.getMessage() for record in caplog.records] == [
        "ftcost: nothing goes to Weights & Biases: it is not installed (pip install 'ftcost[wandb]')"
    ]


def test_disabled_mode_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    wandb.init(project="ftcost-test")
    sink = WandbSink(detail="full")
    sink.open(SESSION, PREDICTION)
    sink.log(Window(global_step=1, mfu=0.1), {})
    sink.close(SUMMARY)
    assert list(tmp_path.glob("wandb/offline-run-*")) == []


def test_a_dying_client_ends_the_sink_and_not_the_training() -> None:
    run = wandb.init(project="ftcost-test")
    said: list[str] = []
    fan_out = FanOut([WandbSink()], warn=said.append)
    fan_out.open(SESSION, PREDICTION)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ConnectionResetError("Connection lost")  # what Run.log raises once wandb-core has been killed

    run.log = broken
    for step in range(1, 6):
        fan_out.log(Window(global_step=step, mfu=0.1))
    assert fan_out.active == []
    assert said == [
        "ftcost: WandbSink.log failed (ConnectionResetError: Connection lost); training goes on",
        "ftcost: WandbSink is switched off for this run",
    ]


def test_beside_wandbcallback_every_row_is_kept_at_its_own_step(tmp_path: Path) -> None:
    from torch.utils.data import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Rows(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> dict[str, list[int]]:
            return {"input_ids": [1 + index % 7] * 8, "labels": [1] * 8}

    class Reports(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.sink = WandbSink()

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.sink.open(SESSION, PREDICTION)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.sink.log(Window(global_step=state.global_step, mfu=state.global_step / 100), {})
            wandb.log({"user/own": 1.0})  # somebody else who logs without an axis

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.sink.close(SUMMARY)

    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir=str(tmp_path / "out"), max_steps=10, per_device_train_batch_size=2, logging_steps=5,
            eval_strategy="steps", eval_steps=3, save_strategy="no", report_to=["wandb"], use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=[Reports()],
    )  # fmt: skip
    trainer.train()
    wandb.finish()

    rows = [row for row in history(tmp_path) if "ftcost/speed/mfu" in row]
    assert [row["train/global_step"] for row in rows] == list(range(1, 11))
    assert [row["ftcost/speed/mfu"] for row in rows] == pytest.approx([step / 100 for step in range(1, 11)])
    losses = [row["train/global_step"] for row in history(tmp_path) if "train/loss" in row]
    assert losses == [5, 10]
    axes = {
        record["metric"].get("glob_name"): record["metric"].get("step_metric")
        for record in records(tmp_path)
        if record["type"] == "metric" and record["metric"].get("glob_name")
    }
    assert axes == {"*": "train/global_step", "ftcost/*": "train/global_step"}
