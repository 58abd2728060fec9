"""The real trackio, local: our rows in a run of our own, in the Trainer's run, and by the Trainer's logs alone."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from costmodel.errors import MissingExtraError
from ftcost_callback.run_file import RunRecord, read_run
from ftcost_callback.sinks import TrackioSink

pytest.importorskip("trackio")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trackio")
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("TRACKIO_", "HF_"))}
    variables |= {
        "TRACKIO_DIR": str(folder / "db"),
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    script = str(Path(__file__).parent / "trackio_training.py")
    done = subprocess.run([sys.executable, script, str(folder)], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def rows(folder: Path, project: str) -> list[tuple[str, int, dict[str, Any]]]:
    """(run, step, metrics) of a project, in the order they were logged."""
    with sqlite3.connect(folder / "db" / f"{project}.db") as database:
        found = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    return [(run, step, json.loads(metrics)) for run, step, metrics in found]


def reported(record: RunRecord) -> list[Any]:
    return [step for step in record.steps if step.projected_total_usd is not None]


@pytest.mark.slow
def test_a_run_of_our_own_has_every_report_at_its_step(trained: Path) -> None:
    record = read_run(trained / "own")
    found = rows(trained, "own")
    assert {run for run, _, _ in found} == {f"ftcost-{record.run_id}"}
    reports = [(step, row) for _, step, row in found if "ftcost/cost/spent_usd" in row]
    assert [step for step, _ in reports] == [step.global_step for step in reported(record)] == [2, 4, 6]
    for (_, row), step, load in zip(reports, reported(record), record.expert_loads, strict=True):
        assert row["ftcost/cost/projected_usd"] == pytest.approx(step.projected_total_usd)
        assert row["ftcost/speed/mfu"] == pytest.approx(step.mfu)
        histogram = row["ftcost/moe/load/layer_00"]
        tokens = load.tokens_per_expert[0]
        assert histogram["values"] == pytest.approx([count / sum(tokens) for count in tokens])
    summary = found[-1][2]
    assert record.summary is not None
    assert summary["ftcost/summary/spent_usd"] == pytest.approx(record.summary.spent_usd)
    with sqlite3.connect(trained / "db" / "own.db") as database:
        (config,) = database.execute("select config from configs").fetchone()
        alerts = database.execute("select title, level, step from alerts order by id").fetchall()
    assert json.loads(config)["ftcost"]["price"]["usd_per_gpu_hour"] == 3600.0
    assert alerts == [(f"ftcost: budget, {each.threshold}", "warn", each.global_step) for each in record.budgets]


@pytest.mark.slow
def test_beside_the_trainers_callback_one_run_holds_both_and_no_value_twice(trained: Path) -> None:
    found = rows(trained, "shared")
    assert len({run for run, _, _ in found}) == 1
    assert [row["train/global_step"] for _, _, row in found if "ftcost/cost/spent_usd" in row] == [2, 4, 6]
    assert [row["train/global_step"] for _, _, row in found if "train/loss" in row] == [2, 4, 6]
    assert not any(key.startswith("train/ftcost") for _, _, row in found for key in row)
    assert found[-1][2]["ftcost/summary/global_step"] == 6  # though the Trainer's callback had finished the run


@pytest.mark.slow
def test_without_a_sink_the_main_figures_come_by_the_logs(trained: Path) -> None:
    found = [row for _, _, row in rows(trained, "logs") if "train/loss" in row]
    record = read_run(trained / "logs")
    assert [row["train/global_step"] for row in found] == [2, 4, 6]
    assert [row["train/ftcost/cost/projected_usd"] for row in found] == pytest.approx(
        [step.projected_total_usd for step in reported(record)]
    )


def test_a_missing_trackio_is_said_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ftcost\[trackio\]'"):
        TrackioSink()
