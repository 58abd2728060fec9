"""The real online client and the real ``wandb.Api`` over a local server: what is read back is what the record says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_runs import listed_rows, priced_callback, stop_at, tiny_mixtral, tiny_trainer
from wandb_server import ENTITY, WandbServer

from costmodel.errors import CostModelError
from ftcost_callback.run_file import read_run
from ftcost_callback.wandb_reader import read_wandb_run, read_wandb_runs

wandb = pytest.importorskip("wandb")

PROJECT = "wire"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, wandb_online: WandbServer) -> WandbServer:
    monkeypatch.setenv("WANDB_PROJECT", PROJECT)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    return wandb_online


def train(folder: Path, *, resume: str | None = None, until: int = 6, **changes: Any) -> None:
    callback = priced_callback(detail="full", budget_usd=0.001)
    fields: dict[str, Any] = {"max_steps": 6, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    fields |= {"save_strategy": "steps", "save_steps": 4, "report_to": ["wandb"], "run_name": "tiny"}
    fields |= {"train_dataset": listed_rows(), "eval_dataset": listed_rows(), "model": tiny_mixtral()}
    tiny_trainer(folder / "out", [callback, stop_at(until)], **(fields | changes)).train(resume_from_checkpoint=resume)
    wandb.finish()


def test_read_back_equals_the_run_record(server: WandbServer, tmp_path: Path) -> None:
    train(tmp_path)
    record = read_run(tmp_path / "out")
    run = server.run
    assert (run.entity, run.project, run.display_name, run.state) == (ENTITY, PROJECT, "tiny", "finished")
    # As the server got it: each threshold once, files uploaded, both sides' config.
    titles = [f"ftcost: budget, {each.threshold}" for each in record.budgets]
    assert sorted(alert["title"] for alert in run.alerts) == sorted(titles)
    assert "wandb-summary.json" in run.files
    assert run.plain_config()["max_steps"] == 6
    # As wandb.Api gives it.
    back = read_wandb_run(f"wandb:{ENTITY}/{PROJECT}/{run.name}")
    reported = [step for step in record.steps if step.projected_total_usd is not None]
    assert [step.global_step for step in back.steps] == [step.global_step for step in reported] == [2, 4, 6]
    for read, written in zip(back.steps, reported, strict=True):
        for name in ("mfu", "hfu", "projected_total_usd", "projected_total_usd_low", "projected_total_usd_high"):
            assert getattr(read, name) == pytest.approx(getattr(written, name), rel=1e-12)
    # The first report is about step 2 alone (step 1 is warm-up), so its counts are that step's.
    for name in ("step_seconds", "data_wait_seconds", "num_tokens", "num_non_padding_tokens", "num_supervised_tokens"):
        assert getattr(back.steps[0], name) == pytest.approx(getattr(record.steps[1], name), rel=1e-12)
    assert back.run_id == record.run_id
    assert back.sessions[0].job == record.sessions[0].job
    assert back.sessions[0].device == record.sessions[0].device
    assert back.sessions[0].versions == record.sessions[0].versions
    assert back.predictions[0].estimate["step_seconds"] == pytest.approx(record.predictions[0].estimate["step_seconds"])
    assert record.summary is not None
    assert back.summary == record.summary
    assert back.totals.wall_seconds == pytest.approx(record.totals.wall_seconds)


def test_a_resume_in_a_new_session_of_the_client_goes_on_in_the_same_run(
    server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "again1")
    monkeypatch.setenv("WANDB_RESUME", "allow")
    train(tmp_path, until=4)
    before = len(server.run.history)
    train(tmp_path, resume=str(tmp_path / "out" / "checkpoint-4"))
    run = server.run  # still the only one
    assert len(run.history) > before
    steps = [row["train/global_step"] for row in run.rows() if "ftcost/cost/spent_usd" in row]
    assert steps == [2, 4, 6]
    record = read_run(tmp_path / "out")
    assert record.summary is not None
    assert run.summary["ftcost/summary/num_sessions"] == 2
    assert run.summary["ftcost/summary/spent_usd"] == pytest.approx(record.summary.spent_usd)
    # what a table of runs shows, which would be the last report's otherwise: from before the last evaluation and save
    for name in ("spent_usd", "projected_usd", "projected_usd_low", "projected_usd_high"):
        assert run.summary[f"ftcost/cost/{name}"] == pytest.approx(record.summary.spent_usd)


def test_a_project_gives_the_runs_that_are_ours(server: WandbServer, tmp_path: Path) -> None:
    wandb.init(project=PROJECT, name="somebody else's").log({"x": 1.0})
    wandb.finish()
    train(tmp_path, eval_strategy="no", save_strategy="no")
    assert len(server.runs) == 2
    (record,) = read_wandb_runs(f"wandb:{ENTITY}/{PROJECT}")
    assert record.run_id == read_run(tmp_path / "out").run_id
    other = next(run for run in server.runs.values() if run.display_name != "tiny")
    with pytest.raises(CostModelError, match="holds nothing of ftcost"):
        read_wandb_run(f"{ENTITY}/{PROJECT}/{other.name}")


def test_what_is_not_there_is_said(server: WandbServer) -> None:
    with pytest.raises(CostModelError, match="W&B gives no run tester/wire/nothing"):
        read_wandb_run(f"wandb:{ENTITY}/{PROJECT}/nothing")
    with pytest.raises(CostModelError, match="W&B gives no runs of tester/wire"):
        read_wandb_runs(f"wandb:{ENTITY}/{PROJECT}")
    for path in ("wandb:", "wandb:only", "wandb:a/b/c/d", "wandb:a//c"):
        with pytest.raises(CostModelError, match="is no W&B path"):
            read_wandb_runs(path)
    with pytest.raises(CostModelError, match="names no run"):
        read_wandb_run("wandb:a/b")
