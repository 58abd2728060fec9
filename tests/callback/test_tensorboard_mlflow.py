"""TensorBoard and MLflow for real, beside W&B in one training: each gets the main figures, by one route, once a log."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_runs import listed_rows, priced_callback, tiny_trainer
from wandb_files import history

from ftcost_callback import attach
from ftcost_callback.metrics import METRICS
from ftcost_callback.sinks import InMemorySink, WandbSink

wandb = pytest.importorskip("wandb")
mlflow = pytest.importorskip("mlflow")
pytest.importorskip("tensorboard")

pytestmark = [
    pytest.mark.usefixtures("wandb_offline"),
    pytest.mark.slow,  # the imports
    pytest.mark.filterwarnings("ignore::FutureWarning:mlflow"),
]

Points = dict[str, list[tuple[int, float]]]
"""Tracker key -> (step, value) of each logged value, in order."""


def in_mlflow() -> Points:
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
    histories = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    return {key: [(point.step, point.value) for point in points] for key, points in histories.items()}


def in_tensorboard(folder: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = folder.rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events.parent))
    accumulator.Reload()
    return {key: [(point.step, point.value) for point in accumulator.Scalars(key)] for key in accumulator.Tags()["scalars"]}


def in_wandb(folder: Path) -> Points:
    points: Points = {}
    for row in history(folder):
        for key, value in row.items():
            points.setdefault(key, []).append((row.get("train/global_step", -1), value))
    return points


def test_each_tracker_has_each_figure_of_each_report_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a data base would take SQLAlchemy; only the test asks for it
    memory = InMemorySink()
    fields: dict[str, Any] = {"max_steps": 6, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    fields |= {"train_dataset": listed_rows(), "eval_dataset": listed_rows()}
    trainer = tiny_trainer(tmp_path / "out", [], report_to=["tensorboard", "wandb", "mlflow"], **fields)
    attach(trainer, priced_callback(sinks=[memory, WandbSink()]))
    trainer.train()
    wandb.finish()

    reported: Points = {}
    for metric in METRICS:
        values = [
            (window.global_step, value / metric.divisor)
            for window in memory.windows
            if (value := getattr(window, metric.field)) is not None
        ]
        if values:
            reported[metric.key] = values
    assert [window.global_step for window in memory.windows] == [2, 4, 6]

    found = {"mlflow": in_mlflow(), "tensorboard": in_tensorboard(tmp_path / "out"), "wandb": in_wandb(tmp_path)}
    prefixes = {"mlflow": "", "tensorboard": "train/", "wandb": ""}
    for tracker, points in found.items():
        prefix = prefixes[tracker]
        ours = {key: each for key, each in points.items() if "ftcost/" in key and "/by_cost/" not in key}
        assert {key.removeprefix(prefix) for key in ours} <= set(reported), tracker
        assert len(ours) >= 7, tracker
        for key, each in ours.items():
            # TensorBoard keeps single precision.
            wanted = reported[key.removeprefix(prefix)]
            assert [step for step, _ in each] == [step for step, _ in wanted], (tracker, key)
            assert [value for _, value in each] == pytest.approx([value for _, value in wanted], rel=1e-6), (tracker, key)
        # One route: no figure under two names.
        names = Counter(key.rpartition("/ftcost/")[2].removeprefix("ftcost/") for key in ours)
        assert set(names.values()) == {1}, tracker
    # What the Trainer itself reports is where it was.
    assert [step for step, _ in found["mlflow"]["loss"]] == [2, 4, 6]
    assert [step for step, _ in found["tensorboard"]["train/loss"]] == [2, 4, 6]
    assert [step for step, _ in found["tensorboard"]["eval/loss"]] == [3, 6]
    assert [step for step, _ in found["wandb"]["train/loss"]] == [2, 4, 6]
