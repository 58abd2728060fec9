"""``attach``: the figures in the Trainer's own logs, each tracker by one route, and what a plain callback leaves out."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_runs import listed_rows, priced_callback, stop_at, tiny_trainer
from wandb_files import history

from costmodel.errors import CostModelError
from ftcost_callback import FTCostCallback, attach
from ftcost_callback.metrics import METRICS
from ftcost_callback.run_file import read_run
from ftcost_callback.sinks import ConsoleSink, InMemorySink, WandbSink

wandb = pytest.importorskip("wandb")

pytestmark = pytest.mark.usefixtures("wandb_offline")

LOGGED = {
    "ftcost/cost/spent_usd",
    "ftcost/cost/projected_usd",
    "ftcost/time/remaining_seconds",
    "ftcost/speed/step_seconds",
    "ftcost/speed/non_padding_tokens_per_second",
    "ftcost/speed/mfu",
    "ftcost/speed/step_seconds_measured_over_predicted",
}  # and ftcost/gpu/peak_allocated_gib, on a GPU


def trainer(folder: Path, callbacks: list[Any] | None = None, **changes: Any) -> Any:
    fields: dict[str, Any] = {"max_steps": 6, "logging_steps": 2}
    fields |= {"train_dataset": listed_rows(), "eval_dataset": listed_rows()}
    return tiny_trainer(folder / "out", callbacks or [], **(fields | changes))


def recording() -> Any:
    """A reporter of another tracker, as far as the Trainer can tell, that keeps what it is told."""
    from transformers.integrations import TensorBoardCallback

    class Recording(TensorBoardCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.told: list[dict[str, Any]] = []

        def on_train_begin(self, *arguments: Any, **named: Any) -> None: ...

        def on_train_end(self, *arguments: Any, **named: Any) -> None: ...

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
            self.told.append({"step": state.global_step, **logs})

    return Recording()


def names(made: Any) -> list[str]:
    return [type(each).__name__ for each in made.callback_handler.callbacks]


def test_the_figures_reach_reporters_and_the_history_and_equal_the_report(tmp_path: Path) -> None:
    reporter, memory = recording(), InMemorySink()
    made = trainer(tmp_path, [reporter], eval_strategy="steps", eval_steps=3)
    callback = attach(made, priced_callback(sinks=[memory]))
    made.train()
    assert isinstance(callback, FTCostCallback)
    # A log of a report has them; the evaluations' logs and the last one do not.
    told = {entry["step"]: entry for entry in reporter.told if "loss" in entry}
    assert sorted(told) == [2, 4, 6]
    for window in memory.windows:
        entry = told[window.global_step]
        assert {key for key in entry if key.startswith("ftcost/")} == LOGGED
        for metric in METRICS:
            if metric.key in entry:
                assert entry[metric.key] == getattr(window, metric.field) / metric.divisor
    assert not any(key.startswith("ftcost/") for entry in reporter.told if "loss" not in entry for key in entry)
    kept = {entry["step"]: entry for entry in made.state.log_history if "loss" in entry}
    assert {step: {key: entry[key] for key in LOGGED} for step, entry in kept.items()} == {
        step: {key: entry[key] for key in LOGGED} for step, entry in told.items()
    }


def test_a_run_that_is_stopped_between_two_logs_ends_with_its_final_figures(tmp_path: Path) -> None:
    reporter, memory = recording(), InMemorySink()
    made = trainer(tmp_path, [reporter, stop_at(3)])
    attach(made, priced_callback(sinks=[memory]))
    made.train()
    assert [(entry["step"], "train_runtime" in entry) for entry in reporter.told] == [(2, False), (3, True)]
    last, window = reporter.told[-1], memory.windows[-1]
    assert [each.global_step for each in memory.windows] == [2, 3]
    assert last["ftcost/cost/spent_usd"] == window.spent_usd > reporter.told[0]["ftcost/cost/spent_usd"]
    assert window.spent_usd <= memory.summaries[0].spent_usd


def test_wandb_gets_each_value_once_and_others_by_the_logs(tmp_path: Path) -> None:
    reporter = recording()
    made = trainer(tmp_path, [reporter], report_to=["wandb"])
    attach(made, priced_callback())
    assert names(made) == [
        "DefaultFlowCallback",
        "WandbCallback",
        "LogFigures",
        "Recording",
        "HideFigures",
        "PrinterCallback",
        "FTCostCallback",
    ]
    made.train()
    wandb.finish()
    rows = history(tmp_path)
    assert not any(key.startswith("train/ftcost") for row in rows for key in row)
    assert [row["train/global_step"] for row in rows if "ftcost/cost/spent_usd" in row] == [2, 4, 6]
    assert [entry["step"] for entry in reporter.told if "ftcost/cost/spent_usd" in entry] == [2, 4, 6]


def test_without_a_wandb_sink_wandb_gets_them_by_the_logs(tmp_path: Path) -> None:
    made = trainer(tmp_path, report_to=["wandb"])
    attach(made, priced_callback(sinks=[InMemorySink()]))
    assert names(made)[:3] == ["DefaultFlowCallback", "LogFigures", "WandbCallback"]
    made.train()
    wandb.finish()
    rows = history(tmp_path)
    assert [row["train/global_step"] for row in rows if "train/ftcost/cost/spent_usd" in row] == [2, 4, 6]


@pytest.mark.parametrize(("sinks", "printed"), [([ConsoleSink()], False), ([], True)], ids=["our line", "no sink"])
def test_the_terminal_shows_each_figure_once(
    sinks: list[Any], printed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trainer(tmp_path)
    attach(made, priced_callback(sinks=sinks))
    made.train()
    shown = capsys.readouterr()
    assert ("ftcost/cost/spent_usd" in shown.out) is printed
    assert ("ftcost: step 4/6: $" in shown.err) is not printed


def test_it_takes_the_trainers_own_callback_a_given_one_or_makes_one(tmp_path: Path) -> None:
    own = priced_callback()
    made = trainer(tmp_path, [own])
    assert attach(made) is own
    assert attach(made) is own  # a second call changes nothing
    assert names(made).count("LogFigures") == names(made).count("FTCostCallback") == 1
    new = trainer(tmp_path)
    assert attach(new, usd_per_gpu_hour=2.0, budget_usd=40)._settings.budget_usd == 40
    with pytest.raises(CostModelError, match="leave the arguments out"):
        attach(new, usd_per_gpu_hour=3.0)
    with pytest.raises(CostModelError, match="another FTCostCallback"):
        attach(new, priced_callback())
    with pytest.raises(CostModelError, match="takes a transformers Trainer, got str"):
        attach("trainer")
    with pytest.raises(CostModelError, match="usd_per_gpu_hour"):
        attach(trainer(tmp_path), usd_per_gpu_hour=-1.0)


def test_attaching_changes_no_weight_and_no_loss(tmp_path: Path) -> None:
    import torch

    plain = trainer(tmp_path / "plain")
    plain.train()
    measured = trainer(tmp_path / "measured")
    attach(measured, priced_callback(sinks=[InMemorySink()]))
    measured.train()
    for left, right in zip(plain.model.parameters(), measured.model.parameters(), strict=True):
        assert torch.equal(left, right)
    assert [entry["loss"] for entry in plain.state.log_history if "loss" in entry] == [
        entry["loss"] for entry in measured.state.log_history if "loss" in entry
    ]


def test_a_failure_of_ours_leaves_the_logs_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(window: Any) -> dict[str, float]:
        raise RuntimeError("no figures today")

    monkeypatch.setattr("ftcost_callback.trainer_logs.logged_metrics", broken)
    made = trainer(tmp_path)
    attach(made, priced_callback(sinks=[]))
    with caplog.at_level(logging.WARNING):
        made.train()
    assert made.state.global_step == 6
    assert sum("nothing was added to the Trainer's logs" in message for message in caplog.messages) == 1


def test_a_plain_callback_works_and_says_who_gets_nothing(tmp_path: Path) -> None:
    made = trainer(tmp_path, [priced_callback(sinks=[WandbSink()])])
    made.args.report_to = ["tensorboard", "wandb", "mlflow"]  # as if those were installed
    made.train()
    (session,) = read_run(tmp_path / "out").sessions
    assert "tensorboard, mlflow: no figures of ours; ftcost_callback.attach(trainer) brings the main ones there" in (
        session.notes or []
    )


def test_an_attached_one_has_nothing_to_say(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    attach(made, priced_callback(sinks=[]))
    made.args.report_to = ["tensorboard"]
    made.train()
    (session,) = read_run(tmp_path / "out").sessions
    assert not any("no figures of ours" in note for note in session.notes or [])
