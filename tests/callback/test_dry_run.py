"""A dry run: the longest batch first, a few steps, and what the whole run would need and cost."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import LENGTHS, TickingClock, TokenRows, tiny_trainer

from ftcost_callback import FTCostCallback
from ftcost_callback.dry_run import LongestFirst, dry_run_lines
from ftcost_callback.projection import Projection
from ftcost_callback.records import Summary
from ftcost_callback.run_file import read_run

ROWS = [TokenRows()[place] for place in range(len(LENGTHS))]


def arrow_rows() -> Any:
    from datasets import Dataset

    return Dataset.from_list(ROWS)


def dry_run(output_dir: Path, dataset: Any, **arguments: Any) -> Any:
    measuring = FTCostCallback(usd_per_gpu_hour=3600.0, dry_run_steps=6, sinks=[], predict=False)
    measuring._clock = TickingClock()
    trainer = tiny_trainer(
        output_dir,
        [measuring],
        train_dataset=dataset,
        **({"max_steps": 60, "logging_steps": 60, "train_sampling_strategy": "random"} | arguments),
    )
    trainer.train()
    assert trainer.state.global_step == 6
    return read_run(output_dir)


@pytest.mark.parametrize("rows", [lambda: ROWS, arrow_rows], ids=["list", "arrow"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_first_steps_hold_the_longest_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: Any, accumulation: int
) -> None:
    record = dry_run(tmp_path, rows(), gradient_accumulation_steps=accumulation)
    longest, second = sorted(LENGTHS, reverse=True)[:2]
    assert [(step.num_tokens, step.num_non_padding_tokens) for step in record.steps[:2]] == [
        (accumulation * 2 * longest, accumulation * (longest + second))
    ] * 2
    # From then on the batches are those of the run.
    assert len({step.num_tokens for step in record.steps[2:]}) > 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "ftcost: dry run of 6 steps: the longest batch first"
    assert said[1].startswith("ftcost: peak memory of the process: ")
    assert said[2].startswith("ftcost: the whole run of 60 steps: ")
    summary = record.summary
    assert summary is not None
    assert (summary.status, summary.global_step) == ("stopped", 6)
    # What is left is projected from the four usual steps.
    usual = sum(step.step_seconds for step in record.steps[2:]) / 4
    assert summary.step_seconds_mean == pytest.approx(usual)
    assert summary.projected_total_seconds is not None
    assert summary.projected_total_usd is not None
    assert summary.projected_total_seconds == pytest.approx(summary.wall_seconds + 54 * usual, rel=0.2)
    assert summary.projected_total_usd == pytest.approx(summary.projected_total_seconds, rel=0.2)


@pytest.mark.parametrize(
    ("dataset", "arguments", "reason"),
    [
        pytest.param(TokenRows(), {}, "cannot be read without running its code", id="own-class"),
        pytest.param(ROWS, {"train_sampling_strategy": "group_by_length"}, None, id="grouped"),
    ],
)
def test_where_it_cannot_be_done_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dataset: Any, arguments: dict[str, Any], reason: str | None
) -> None:
    record = dry_run(tmp_path, dataset, **arguments)
    first = capsys.readouterr().err.splitlines()[0]
    assert (reason is None) == first.endswith("the longest batch first")
    assert reason is None or reason in first
    assert len(record.steps) == 6


def test_a_resumed_dry_run_says_that_the_order_is_the_usual_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_trainer(tmp_path, [], train_dataset=ROWS, save_strategy="steps", save_steps=2, max_steps=2).train()
    measuring = FTCostCallback(dry_run_steps=2, sinks=[], predict=False)
    trainer = tiny_trainer(tmp_path, [measuring], train_dataset=ROWS, max_steps=20)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    assert "a resumed run skips the batches it has done" in capsys.readouterr().err


def test_without_a_dry_run_the_sampler_is_left_alone(tmp_path: Path) -> None:
    measuring = FTCostCallback(sinks=[], predict=False)
    tiny_trainer(tmp_path, [measuring], train_dataset=ROWS, max_steps=2).train()
    assert [step.num_tokens for step in read_run(tmp_path).steps] == [2 * 9, 2 * 12]


def test_the_sampler_gives_the_longest_once_and_then_all() -> None:
    class Base(list[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    base = Base([0, 1, 2])
    sampler = LongestFirst(base, [2, 2])
    assert (list(sampler), list(sampler), len(sampler)) == ([2, 2, 0, 1, 2], [0, 1, 2], 3)
    sampler.set_epoch(4)
    assert base.epoch == 4


SUMMARY = Summary(
    global_step=20, num_sessions=1, wall_seconds=60.0, train_seconds=40.0, data_wait_seconds=0.0, eval_seconds=0.0,
    save_seconds=0.0, log_seconds=0.0, startup_seconds=20.0, other_seconds=0.0,
    peak_allocated_bytes=12 * 2**30, peak_reserved_bytes=14 * 2**30, loading_peak_allocated_bytes=13 * 2**30,
)  # fmt: skip


def lines(summary: Summary, projection: Projection, **changes: Any) -> list[str]:
    settings: dict[str, Any] = {
        "max_steps": 1500, "order_note": None, "predicted_peak_bytes": 11 * 2**30, "is_cuda": True,
    }  # fmt: skip
    return dry_run_lines(summary, projection, **(settings | changes))


def test_what_is_said_on_a_gpu() -> None:
    projection = Projection(
        projected_total_seconds=18420.0, projected_total_seconds_low=18000.0, projected_total_seconds_high=18900.0,
        projected_usd=12.3, projected_usd_low=12.0, projected_usd_high=12.6, basis="measured",
        notes=("no save pause measured yet",),
    )  # fmt: skip
    assert lines(SUMMARY, projection) == [
        "dry run of 20 steps: the longest batch first",
        "peak memory over the steps: 12.00 GiB allocated (predicted 11.00 GiB), 14.00 GiB reserved",
        "the whole run of 1,500 steps: 5 h 07 min (5 h 00 min to 5 h 15 min), $12.30 ($12.00 to $12.60)",
        "not certain yet: no save pause measured yet",
    ]
    wide = dataclasses.replace(projection, projected_total_seconds_high=25000.0)
    assert lines(SUMMARY, wide)[-1] == "the band is wide: no save pause measured yet"


def test_what_is_said_when_the_end_is_not_known_or_loading_needed_more() -> None:
    hidden = dataclasses.replace(SUMMARY, peak_allocated_bytes=None)
    assert lines(hidden, Projection(notes=("the number of steps is not known",)), max_steps=None)[1:] == [
        "peak memory over the steps: below 13.00 GiB, which loading needed",
        "the whole run cannot be projected: the number of steps is not known",
    ]
