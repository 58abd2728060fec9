"""Against the real wandb client, offline, read back with wandb's own reader."""

from __future__ import annotations

import dataclasses
import logging
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ftcost_callback.records import Budget, ExpertLoad, Prediction, Session, Summary, TrainerLog, Window
from ftcost_callback.sinks import FanOut, WandbSink
from ftcost_callback.sinks.tracker_rows import bounded, closing_values
from ftcost_callback.sinks.wandb import server_answers

sys.path.insert(0, str(Path(__file__).parent))

from wandb_files import history, merged, records

wandb = pytest.importorskip("wandb")

pytestmark = pytest.mark.usefixtures("wandb_offline")

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
        "started_at": "2026-08-17T10:00:00Z",
        "device": {"name": "NVIDIA A40", "peak_flops_per_second": 149.7e12},
        "price": {"usd_per_gpu_hour": 0.79},
        "versions": {"torch": "2.13.0"},
        "job": {"model": "x/y", "lengths": {"mean": 1000.0, "max": 1999}},
        "prediction": {"total_usd": 6.65, "step": {"bound_by": "compute"}},
    }
    summary = merged(tmp_path, "summary")
    assert summary["ftcost/summary/spent_usd"] == 0.25
    assert summary["ftcost/cost/spent_usd"] == 0.25
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


@pytest.mark.parametrize(("detail", "shown"), [("default", 16), ("full", 64)])
def test_each_layer_has_a_histogram_of_its_experts_up_to_a_number_of_layers(detail: Any, shown: int, tmp_path: Path) -> None:
    wandb.init(project="ftcost-test")
    sink = WandbSink(detail=detail)
    sink.open(SESSION, None)
    layers = 94
    load = ExpertLoad(
        global_step=2,
        layer_names=[f"model.layers.{layer}.mlp.experts" for layer in range(layers)],
        tokens_per_expert=[[layer + 1, 0, 3 * (layer + 1), 0] for layer in range(layers)],
        num_experts_per_tok=2,
    )
    sink.log(Window(global_step=2, mfu=0.25, hfu=0.5, load_cv=1.0), {"expert_load": load})
    sink.log(
        Window(global_step=4, mfu=0.25, hfu=0.5),
        {"expert_load": ExpertLoad(global_step=4, status="not_recorded", reason="hooks did not fire")},
    )
    wandb.finish()
    first, second = history(tmp_path)
    more = {"ftcost/speed/hfu": 0.5} if detail == "full" else {}
    assert second == {"ftcost/speed/mfu": 0.25, "train/global_step": 4} | more
    assert first["ftcost/moe/load/layer_00.values"] == [0.25, 0, 0.75, 0]
    assert first["ftcost/moe/load/layer_00.bins"] == [0, 1, 2, 3, 4]
    assert first.get("ftcost/moe/load_cv") == (1.0 if detail == "full" else None)
    histograms = sorted(key for key in first if key.endswith(".values"))
    assert len(histograms) == shown
    assert histograms[-1] == "ftcost/moe/load/layer_93.values"


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [
        ({"values": list(range(1, 2000))}, {"mean": 1000.0, "max": 1999}),
        ({"histogram": {str(length): 2 for length in range(1, 100)}}, {"mean": 50.0, "max": 99}),
        ({"histogram": {"79": 4000, "174": 9000}}, {"histogram": {"79": 4000, "174": 9000}}),
        ({"dataset": "math_14k"}, {"dataset": "math_14k"}),
        (None, None),
    ],
)
def test_a_jobs_lengths_stay_ones_that_can_be_estimated(lengths: Any, kept: Any) -> None:
    assert bounded({"job": {"lengths": lengths}}) == {"job": {"lengths": kept} if kept is not None else {}}


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
    asked: list[str] = []
    sink = WandbSink(detail="full", is_reachable=lambda url: bool(asked.append(url)))
    sink.open(SESSION, PREDICTION)
    sink.log(Window(global_step=1, mfu=0.1), {})
    sink.alert(Budget(threshold="80 %", kind="usd", limit=1.0, spent=0.85, global_step=4, action="warned"))
    sink.close(SUMMARY)
    assert asked == []
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


def test_losses_are_shown_once_more_against_dollars(tmp_path: Path) -> None:
    """On an axis of their own, which holds against the pattern that WandbCallback gives every key."""
    wandb.init(project="ftcost-test")
    wandb.define_metric("train/global_step")
    wandb.define_metric("*", step_metric="train/global_step", step_sync=True)
    sink = WandbSink()
    sink.open(SESSION, None)
    sink.trainer_logged(TrainerLog(global_step=2, elapsed_seconds=9.0, spent_usd=0.5, values={"loss": 3.0, "epoch": 0.1}))
    sink.trainer_logged(TrainerLog(global_step=2, elapsed_seconds=9.5, spent_usd=0.6, values={"eval_loss": 3.5}))
    sink.trainer_logged(TrainerLog(global_step=3, elapsed_seconds=9.9, spent_usd=0.7, values={"loss": float("nan")}))
    sink.trainer_logged(TrainerLog(global_step=4, elapsed_seconds=9.9, spent_usd=0.7, values={"train_runtime": 1.0}))
    wandb.finish()
    assert history(tmp_path) == [
        {"ftcost/by_cost/loss": 3.0, "ftcost/by_cost/spent_usd": 0.5, "train/global_step": 2},
        {"ftcost/by_cost/eval_loss": 3.5, "ftcost/by_cost/spent_usd": 0.6, "train/global_step": 2},
    ]
    axes = {
        record["metric"]["name"]: record["metric"].get("step_metric")
        for record in records(tmp_path)
        if record["type"] == "metric" and record["metric"].get("name")
    }
    assert axes["ftcost/by_cost/loss"] == axes["ftcost/by_cost/eval_loss"] == "ftcost/by_cost/spent_usd"


def test_without_a_price_losses_stand_against_hours(tmp_path: Path) -> None:
    wandb.init(project="ftcost-test")
    sink = WandbSink()
    sink.open(SESSION, None)
    sink.trainer_logged(TrainerLog(global_step=2, elapsed_seconds=1800.0, values={"loss": 3.0}))
    wandb.finish()
    assert history(tmp_path) == [{"ftcost/by_cost/loss": 3.0, "ftcost/by_cost/elapsed_hours": 0.5, "train/global_step": 2}]


class OnlineRun:
    """Just enough of an online run to be alerted."""

    offline = disabled = False

    def __init__(self) -> None:
        self.alerts: list[str] = []
        self.settings = type("Settings", (), {"base_url": "http://server.example"})
        self.config = self.summary = {}
        self.define_metric = self.log = lambda *arguments, **named: None

    def alert(self, *, title: str, text: str, level: str) -> None:
        self.alerts.append(title)


@pytest.mark.parametrize("is_there", [True, False])
def test_an_alert_is_given_only_to_a_server_that_answers(
    is_there: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = OnlineRun()
    monkeypatch.setattr(wandb, "run", run)
    asked: list[str] = []
    sink = WandbSink(is_reachable=lambda url: bool(asked.append(url)) or is_there)
    sink.open(SESSION, None)
    sink.alert(Budget(threshold="80 %", kind="usd", limit=1.0, spent=0.85, global_step=4, action="warned"))
    sink.close(SUMMARY)
    monkeypatch.setattr(wandb, "run", None)
    assert asked == ["http://server.example"]
    assert run.alerts == (["ftcost: budget, 80 %"] if is_there else [])
    assert sum("W&B does not answer" in message for message in caplog.messages) == (not is_there)


def test_nobody_listens_there() -> None:
    assert server_answers("http://127.0.0.1:9") is False
    assert server_answers("nonsense") is False


def test_where_wandbs_step_is_ahead_and_nobody_steers_it_every_row_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of somebody's own before the training, then two trainings in one W&B run."""
    run = wandb.init(project="ftcost-test")
    for number in range(5):
        run.log({"user": number})
    with caplog.at_level(logging.WARNING, logger="ftcost_callback"):
        for _ in range(2):
            sink = WandbSink()
            sink.open(SESSION, None)
            for step in (1, 2, 3):
                sink.log(Window(global_step=step, mfu=step / 10), {})
            sink.close(dataclasses.replace(SUMMARY, global_step=3))
    wandb.finish()
    rows = [(row["train/global_step"], row["ftcost/speed/mfu"]) for row in history(tmp_path) if "user" not in row]
    assert rows == [(1, 0.1), (2, 0.2), (3, 0.3)] * 2
    assert not [message for message in caplog.messages if message.startswith("ftcost")]


def test_a_row_is_closed_only_while_wandbs_step_is_behind_the_trainings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = wandb.init(project="ftcost-test")
    sink = WandbSink()
    sink.open(SESSION, None)
    sink.log(Window(global_step=1, mfu=0.1), {})
    assert run.step == 1
    run.log({"user": 2}, step=2)
    sink.log(Window(global_step=2, mfu=0.2), {})  # into the user's row
    assert run.step == 2
    run.log({"user": 3}, step=3)
    with caplog.at_level(logging.WARNING, logger="ftcost_callback"):
        sink.log(Window(global_step=3, mfu=0.3), {})
        sink.log(Window(global_step=3, mfu=0.4), {})  # nobody has closed the row since, and we may not
        sink.log(Window(global_step=3, mfu=0.5), {})
    assert run.step == 3
    assert len([message for message in caplog.messages if "replaced by the next" in message]) == 1
    sink.trainer_writes = "after"
    sink.log(Window(global_step=9, mfu=0.9), {"trainer_logs_next": True})
    assert run.step == 4  # the row before was closed, and this one is the Trainer's to close
    sink.close(SUMMARY)
    assert run.step == 5  # which it did not do
    wandb.finish()
    assert [(row.get("user"), row["ftcost/speed/mfu"], row["train/global_step"]) for row in history(tmp_path)] == [
        (None, 0.1, 1),
        (2, 0.2, 2),
        (3, 0.5, 3),
        (None, 0.9, 9),
    ]


@pytest.mark.parametrize("status", ["finished", "failed", "stopped_at_budget", "stopped"])
def test_only_a_run_that_finished_has_the_bill_for_its_projection(status: Any) -> None:
    projections = {"ftcost/cost/projected_usd", "ftcost/cost/projected_usd_low", "ftcost/cost/projected_usd_high"}
    values = closing_values(dataclasses.replace(SUMMARY, status=status))
    assert values == dict.fromkeys({"ftcost/cost/spent_usd", *(projections if status == "finished" else ())}, 0.25)
    assert closing_values(dataclasses.replace(SUMMARY, status=status, spent_usd=None)) == {}
