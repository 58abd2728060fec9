"""A real Trainer with W&B offline: every report of the run record is in the ``.wandb`` file, at its own step."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_runs import listed_rows, priced_callback, stop_at, tiny_mixtral, tiny_trainer
from wandb_files import history, merged, records

from ftcost_callback.metrics import METRICS
from ftcost_callback.records import Pause, Step
from ftcost_callback.run_file import RunRecord, read_run
from ftcost_callback.sinks import InMemorySink, WandbSink

wandb = pytest.importorskip("wandb")

pytestmark = pytest.mark.usefixtures("wandb_offline")

USD_PER_HOUR = 3600.0  # a dollar a second
KEYS = {metric.key: metric for metric in METRICS}


def measuring(**arguments: Any) -> Any:
    return priced_callback(**({"detail": "full"} | arguments))


def trainer(folder: Path, callbacks: list[Any], **changes: Any) -> Any:
    fields: dict[str, Any] = {"max_steps": 10, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    fields |= {"save_strategy": "steps", "save_steps": 4, "report_to": ["wandb"]}
    fields |= {"train_dataset": listed_rows(), "eval_dataset": listed_rows()}
    return tiny_trainer(folder / "out", callbacks, **(fields | changes))


def reported_rows(record: RunRecord) -> list[Step]:
    """The step rows that a report completed: a projection stands in no other."""
    return [step for step in record.steps if step.projected_total_usd is not None]


def window_figures(record: RunRecord) -> list[dict[str, float]]:
    """The speed of each report, counted again from the step rows: those since the last report, warm-up left out."""
    figures: list[dict[str, float]] = []
    since: list[Step] = []
    session = None
    for step in record.steps:
        if step.session_index != session:
            session, since = step.session_index, []  # the first step of a session is warm-up
        else:
            since.append(step)
        if step.projected_total_usd is None:
            continue
        seconds = math.fsum(each.step_seconds for each in since)
        counts = {
            "tokens_per_second": sum(each.num_tokens or 0 for each in since),
            "non_padding_tokens_per_second": sum(each.num_non_padding_tokens or 0 for each in since),
            "supervised_tokens_per_second": sum(each.num_supervised_tokens or 0 for each in since),
            "samples_per_second": sum(each.num_samples or 0 for each in since),
        }
        figures.append(
            {
                "step_seconds": seconds / len(since),
                "data_wait_fraction": math.fsum(each.data_wait_seconds or 0.0 for each in since) / seconds,
                **{name: count / seconds for name, count in counts.items()},
            }
        )
        since = []
    return figures


def ours(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of reports."""
    return [row for row in rows if "ftcost/cost/spent_usd" in row]


def named(row: Mapping[str, Any]) -> dict[str, float]:
    """The row by the fields of a window, in their units."""
    return {KEYS[key].field: value * KEYS[key].divisor for key, value in row.items() if key in KEYS}


def assert_rows_equal_the_record(rows: list[dict[str, Any]], record: RunRecord) -> None:
    completed, figures = reported_rows(record), window_figures(record)
    assert [row["train/global_step"] for row in rows] == [step.global_step for step in completed]
    log_pauses = {(pause.global_step, index): pause for index, pause in enumerate(record.pauses) if pause.kind == "log"}
    for row, step, counted in zip(rows, completed, figures, strict=True):
        window = named(row)
        assert {name: window[name] for name in counted} == pytest.approx(counted, rel=1e-12)
        assert window["projected_usd"] == pytest.approx(step.projected_total_usd, rel=1e-12)
        assert window["projected_usd_low"] == pytest.approx(step.projected_total_usd_low, rel=1e-12)
        assert window["projected_usd_high"] == pytest.approx(step.projected_total_usd_high, rel=1e-12)
        assert window["projected_total_seconds"] == pytest.approx(step.projected_total_seconds, rel=1e-12)
        assert window["mfu"] == pytest.approx(step.mfu, rel=1e-12)
        assert window["hfu"] == pytest.approx(step.hfu, rel=1e-12)
        # A report is made a moment after its step has ended, within the pause that follows.
        following = [pause for (at, _), pause in log_pauses.items() if at == step.global_step]
        assert step.spent_usd is not None
        most = max(pause.seconds for pause in following) * USD_PER_HOUR / 3600
        assert step.spent_usd <= window["spent_usd"] <= step.spent_usd + most


class OwnLogging:
    """Somebody else who logs to the same run, without an axis, in the middle of a step and at its end."""

    def __new__(cls) -> Any:
        from transformers import TrainerCallback

        class Logs(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                wandb.log({"user/in_step": state.global_step})

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                wandb.log({"user/own": state.global_step})

        return Logs()


def test_evaluations_saves_a_resume_and_others_logging_lose_and_move_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = trainer(tmp_path, [OwnLogging(), measuring(), stop_at(6)])
    first.train()
    assert wandb.run is not None
    run_id = wandb.run.id
    second = trainer(tmp_path, [OwnLogging(), measuring()])
    with caplog.at_level(logging.WARNING):
        second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert wandb.run.id == run_id
    wandb.finish()

    record = read_run(tmp_path / "out")
    assert [step.global_step for step in record.steps] == [*range(1, 7), *range(5, 11)]
    rows = history(tmp_path)
    reported = ours(rows)
    assert [row["train/global_step"] for row in reported] == [2, 4, 6, 6, 8, 10]
    assert_rows_equal_the_record(reported, record)
    # Nobody else lost a row either.
    assert [row["train/global_step"] for row in rows if "train/loss" in row] == [2, 4, 6, 6, 8, 10]
    assert [row["train/global_step"] for row in rows if "eval/loss" in row] == [3, 6, 6, 9, 10]
    assert [row["user/own"] for row in rows if "user/own" in row] == [*range(1, 7), *range(5, 11)]
    assert not any("step" in message and "ignored" in message for message in caplog.messages)
    # The summary is that of the whole run, and agrees with the record to the last digit that JSON keeps.
    summary, written = merged(tmp_path, "summary"), record.summary
    assert written is not None
    for name in ("spent_usd", "wall_seconds", "num_steps", "num_tokens", "eval_seconds", "save_seconds", "num_sessions"):
        assert summary[f"ftcost/summary/{name}"] == pytest.approx(getattr(written, name), rel=1e-12)
    config = merged(tmp_path, "config")["ftcost"]
    assert config["run_id"] == record.run_id
    assert config["session_index"] == 1
    assert config["price"]["usd_per_gpu_hour"] == USD_PER_HOUR
    assert config["prediction"]["step_seconds"] == pytest.approx(record.predictions[0].estimate["step_seconds"])
    assert {"torch", "transformers"} <= set(config["versions"])


def test_every_step_is_there_when_asked(tmp_path: Path) -> None:
    trainer(tmp_path, [measuring(wandb_every="step")]).train()
    wandb.finish()
    record = read_run(tmp_path / "out")
    rows = ours(history(tmp_path))
    assert [row["train/global_step"] for row in rows] == list(range(2, 11))  # the first step is warm-up
    assert [row["ftcost/speed/step_seconds"] for row in rows] == pytest.approx(
        [step.step_seconds for step in record.steps[1:]], rel=1e-12
    )


def test_an_end_between_logging_steps_is_reported_too(tmp_path: Path) -> None:
    memory = InMemorySink()
    trainer(tmp_path, [measuring(sinks=[memory, WandbSink("full")])], max_steps=7, logging_steps=3).train()
    wandb.finish()
    rows = ours(history(tmp_path))
    assert [row["train/global_step"] for row in rows] == [3, 6, 7]
    assert [window.global_step for window in memory.windows] == [3, 6, 7]
    for row, window in zip(rows, memory.windows, strict=True):
        for field, value in named(row).items():
            assert value == pytest.approx(getattr(window, field), rel=1e-12)


def test_what_a_mixture_of_experts_shows(tmp_path: Path) -> None:
    """The dozen keys, a histogram a layer at logging steps equal to the record's rows, losses against dollars."""
    callback = measuring(detail="default", budget_usd=0.001)
    trainer(tmp_path, [callback], model=tiny_mixtral(), max_steps=4, eval_strategy="no").train()
    wandb.finish()
    record, rows = read_run(tmp_path / "out"), history(tmp_path)
    reported = ours(rows)
    # The Trainer's own figures of the step stand in the same row, and the loss before on its axis of dollars.
    others = ("train/", "ftcost/by_cost/", "ftcost/moe/load/")
    assert {"train/global_step"} | {key for key in reported[-1] if not key.startswith(others)} == {
        "train/global_step",
        "ftcost/cost/spent_usd",
        "ftcost/cost/projected_usd",
        "ftcost/cost/projected_usd_low",
        "ftcost/cost/projected_usd_high",
        "ftcost/time/remaining_seconds",
        "ftcost/speed/step_seconds",
        "ftcost/speed/non_padding_tokens_per_second",
        "ftcost/speed/mfu",
        "ftcost/speed/data_wait_fraction",
        "ftcost/speed/step_seconds_measured_over_predicted",
        "ftcost/moe/load_max_over_mean",
    }
    assert [load.global_step for load in record.expert_loads] == [2, 4]
    for row, load in zip(reported, record.expert_loads, strict=True):
        for layer, tokens in enumerate(load.tokens_per_expert):
            shares = row[f"ftcost/moe/load/layer_{layer:02d}.values"]
            assert shares == pytest.approx([count / sum(tokens) for count in tokens])
    by_cost = [row for row in rows if "ftcost/by_cost/loss" in row]
    losses = [row for row in rows if "train/loss" in row]
    assert [row["ftcost/by_cost/loss"] for row in by_cost] == [row["train/loss"] for row in losses]
    spent = [row["ftcost/by_cost/spent_usd"] for row in by_cost]
    assert spent == sorted(spent)
    # Each threshold once, with step and time in the text.
    alerts = [each["alert"] for each in records(tmp_path) if each["type"] == "alert"]
    assert [alert["title"] for alert in alerts] == [f"ftcost: budget, {budget.threshold}" for budget in record.budgets]
    assert all("spent at step" in alert["text"] and "UTC]" in alert["text"] for alert in alerts)


def test_pauses_are_kept_apart_from_reports(tmp_path: Path) -> None:
    """The equality above leans on a pause row after each report."""
    trainer(tmp_path, [measuring()]).train()
    record = read_run(tmp_path / "out")
    assert {pause.global_step for pause in record.pauses if isinstance(pause, Pause) and pause.kind == "log"} >= {
        step.global_step for step in reported_rows(record)
    }
