"""Several processes: files of their own, added up by readers. Real runs on two gloo processes, and made-up files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_runs import FakeClock, tiny_mixtral, tiny_trainer, training_arguments

from costmodel.errors import CostModelError
from costmodel.specs import Price
from ftcost_callback import FTCostCallback, estimate_trainer
from ftcost_callback.boundary import Boundary
from ftcost_callback.calibrating import steps_of_run
from ftcost_callback.comparison import compare
from ftcost_callback.rank_run import LOOK_SECONDS, RankRun
from ftcost_callback.ranks import RankRows, last_session, rank_file_path, rank_file_paths
from ftcost_callback.recorder import StepAggregate, Totals
from ftcost_callback.records import TokenCounts
from ftcost_callback.report_html import write_report
from ftcost_callback.report_rows import summary_row
from ftcost_callback.reporting import Standing, measured_of, window_of
from ftcost_callback.run_file import (
    Ledger,
    RunRecord,
    ranks_with_ledger,
    read_ledger,
    read_run,
    run_file_path,
    write_ledger,
)
from ftcost_callback.session_opening import find_price
from ftcost_callback.session_plan import Identity, Plan, Settings, num_machines

COUNTS = ("num_tokens", "num_non_padding_tokens", "num_supervised_tokens", "num_samples")


# --- real runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every distributed training of this module, in one launch: starting processes takes longer than all of them."""
    folder = tmp_path_factory.mktemp("ranks")
    here = Path(__file__).parent
    names = ["ddp", "resumed", "fsdp", "expert_parallel", "shrunk", "killed"]  # "killed" ends the launch
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    options = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    # By the name of the host, which a runner may not resolve, gloo finds no interface.
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    done = subprocess.run(
        [*launch, *options, str(here / "ranks_training.py"), str(folder), *names],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **loopback},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    assert done.returncode != 0, "the launcher does not say that a process was killed"
    assert (folder / "killed").is_dir(), done.stderr[-3000:]
    return folder


def truth(folder: Path) -> dict[str, int]:
    """What the processes' own batches held, summed over them."""
    counted = [json.loads((folder / f"truth.rank{rank}.json").read_text()) for rank in (0, 1)]
    return {name: sum(each[name] for each in counted) for name in COUNTS}


def sums(record: RunRecord) -> dict[str, int]:
    return {name: sum(getattr(step, name) for step in record.steps) for name in COUNTS}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["ddp", "resumed", "fsdp", "expert_parallel", "shrunk"])
def test_tokens_and_experts_of_all_processes_are_exact(launched: Path, name: str) -> None:
    record = read_run(launched / name)
    expected = truth(launched / name)
    assert sums(record) == expected
    assert record.remarks == []
    assert {step.num_ranks for step in record.steps} == {2}
    loads = record.expert_loads
    assert {load.status for load in loads} == {"recorded"}
    layers = [sum(map(sum, (load.tokens_per_expert[layer] for load in loads))) for layer in (0, 1)]
    assert layers == [2 * expected["num_non_padding_tokens"]] * 2
    assert loads[0].layer_names[0] == "model.layers.0.mlp.experts"  # no wrapper's prefix
    if name == "fsdp":
        assert (record.sessions[0].job or {})["fsdp"] == "full_shard"
    if name == "expert_parallel":
        assert "expert parallelism is not modelled (ep_size 2)" in " ".join(record.sessions[0].notes or [])
    alone = read_run(launched / name, all_ranks=False)
    assert 0 < sums(alone)["num_tokens"] < expected["num_tokens"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_totals_summary_and_report_hold_all_processes(launched: Path) -> None:
    expected = truth(launched / "ddp")
    record = read_run(launched / "ddp")
    summary, row = record.summary, summary_row(launched / "ddp")
    assert summary is not None
    for name in COUNTS[:3]:
        assert getattr(record.totals, name) == getattr(summary, name) == row[name] == expected[name]
    # Both processes are billed: 2 x $2 an hour.
    assert summary.spent_usd == pytest.approx(4.0 * summary.wall_seconds / 3600, rel=1e-6)
    assert record.sessions[0].num_processes == 2
    write_report([launched / "ddp"], launched / "report.html")
    assert "<html" in (launched / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_resume_in_another_folder_takes_up_what_each_process_had_counted(launched: Path) -> None:
    first = read_run(launched / "ddp")
    until_the_checkpoint = sum(step.num_tokens or 0 for step in first.steps if step.global_step <= 2)
    resumed = read_run(launched / "resumed")
    assert resumed.run_id == first.run_id
    assert resumed.totals.num_tokens == until_the_checkpoint + truth(launched / "resumed")["num_tokens"]
    assert resumed.summary is not None
    assert resumed.summary.num_tokens == resumed.totals.num_tokens
    assert sorted(path.name for path in (launched / "ddp" / "checkpoint-2").glob("ftcost_ledger*")) == [
        "ftcost_ledger.json",
        "ftcost_ledger.rank1.json",
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_process_leaves_a_record_of_what_was_done(launched: Path) -> None:
    record = read_run(launched / "killed")
    assert record.summary is None
    assert [step.global_step for step in record.steps] == [1, 2, 3]
    assert sums(record)["num_tokens"] > sums(read_run(launched / "killed", all_ranks=False))["num_tokens"]
    row = summary_row(launched / "killed")
    assert row["status"] == "running_or_killed"
    assert row["num_tokens"] == sums(record)["num_tokens"]
    write_report([launched / "killed"], launched / "killed.html")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_only_the_main_process_shows_figures(launched: Path) -> None:
    lines = (launched / "output.txt").read_text().splitlines()
    finished = [line for line in lines if "ftcost: finished at step" in line]
    assert len(finished) == 5  # one for each training that ended
    assert any("ftcost: about" in line and "tokens/s" in line for line in lines)


# --- readers ----------------------------------------------------------------------------------------------------------


def session(run_id: str = "r", index: int = 0, processes: int = 2, **fields: Any) -> dict[str, Any]:
    row = {"type": "session", "run_id": run_id, "session_index": index, "started_at": "2026-01-01T00:00:00+00:00"}
    return {**row, "num_processes": processes, "device": {"kind": "cuda"}, **fields}


def rank_session(run_id: str = "r", index: int = 0, rank: int = 1, **fields: Any) -> dict[str, Any]:
    row = {"type": "rank_session", "rank": rank, "num_processes": 2, "run_id": run_id, "session_index": index}
    return {**row, **fields}


def step(number: int, tokens: int | None, index: int = 0, **fields: Any) -> dict[str, Any]:
    row = {"type": "step", "global_step": number, "session_index": index, "step_seconds": 1.0, "num_micro_batches": 1}
    counts = {} if tokens is None else dict.fromkeys(COUNTS[:3], tokens) | {"num_samples": 2}
    return {**row, **counts, **fields}


def experts(number: int, *matrix: list[int], **fields: Any) -> dict[str, Any]:
    row = {"type": "expert_load", "global_step": number, "layer_names": ["a"], "status": "recorded"}
    return {**row, "tokens_per_expert": list(matrix), "num_experts_per_tok": 1, **fields}


def write(folder: Path, rows: list[dict[str, Any]], rank: int = 0, cut: str = "") -> Path:
    path = run_file_path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path = rank_file_path(path, rank) if rank else path
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + cut)
    return path


def test_a_cut_file_gives_what_it_holds_and_a_remark(tmp_path: Path) -> None:
    write(tmp_path, [session(), step(1, 10), step(2, 10), step(3, 10)])
    write(tmp_path, [rank_session(), step(1, 5), step(2, 6)], rank=1, cut='{"type": "step", "glo')
    record = read_run(tmp_path)
    assert [row.num_tokens for row in record.steps] == [15, 16, 10]
    assert [row.num_ranks for row in record.steps] == [2, 2, 1]
    assert record.remarks == ["run.rank1.jsonl lacks 1 of 3 steps, the first is step 3: its tokens are missing there"]
    assert summary_row(tmp_path)["remarks"] == record.remarks


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    write(tmp_path, [session(processes=3), step(1, 10)])
    write(tmp_path, [rank_session(rank=2), step(1, 5)], rank=2)
    record = read_run(tmp_path)
    assert record.steps[0].num_tokens == 15
    assert record.remarks == ["there is no run.rank1.jsonl: tokens and expert loads of process 1 are missing"]


def test_rows_of_another_run_or_of_no_known_run_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, [session("old"), step(1, 1), session("new"), step(1, 10)])
    write(tmp_path, [rank_session("old"), step(1, 2), rank_session("new"), step(1, 20)], rank=1)
    assert read_run(tmp_path).steps[0].num_tokens == 30
    assert read_run(tmp_path, run_id="old").steps[0].num_tokens == 3
    assert summary_row(tmp_path)["num_tokens"] == 30
    write(tmp_path, [rank_session(None), step(1, 20)], rank=1)  # type: ignore[arg-type]
    assert read_run(tmp_path).steps[0].num_tokens == 10
    assert len(read_run(tmp_path).remarks) == 1


def test_a_count_that_one_process_does_not_show_is_unknown(tmp_path: Path) -> None:
    write(tmp_path, [session(), step(1, 10)])
    write(tmp_path, [rank_session(), step(1, None)], rank=1)
    assert read_run(tmp_path).steps[0].num_tokens is None


def test_sessions_keep_apart_and_a_smaller_world_keeps_the_tokens_of_those_gone(tmp_path: Path) -> None:
    first = [session(), step(1, 10), step(2, 10)]
    # Resumed from step 1 on one process, whose ledger was given what process 1 had counted until there.
    resumed = [session(index=1, processes=1, earlier_tokens={"num_tokens": 15}, earlier_seconds={}), step(2, 7, 1)]
    write(tmp_path, [*first, *resumed])
    write(tmp_path, [rank_session(), step(1, 5), step(2, 5)], rank=1)
    record = read_run(tmp_path)
    assert [row.num_tokens for row in record.steps] == [15, 15, 7]
    assert record.totals.num_tokens == 22


def test_earlier_tokens_of_a_process_come_from_its_ledger_or_from_its_rows(tmp_path: Path) -> None:
    resumed = session(index=1, earlier_tokens={"num_tokens": 10}, earlier_seconds={})
    write(tmp_path, [session(), step(1, 10), resumed, step(2, 1, 1)])
    write(tmp_path, [rank_session(), step(1, 5), rank_session(index=1), step(2, 1, 1)], rank=1)
    assert read_run(tmp_path).totals.num_tokens == 17
    ledger = rank_session(index=1, earlier_tokens={"num_tokens": 100})
    write(tmp_path, [rank_session(), step(1, 5), ledger, step(2, 1, 1)], rank=1)
    assert read_run(tmp_path).totals.num_tokens == 112


def test_processes_with_the_same_batch_are_counted_once(tmp_path: Path) -> None:
    write(tmp_path, [session(tensor_parallel_size=2), experts(1, [3, 7]), step(1, 10)])
    write(tmp_path, [rank_session(), experts(1, [3, 7]), step(1, 10)], rank=1)
    record = read_run(tmp_path)
    assert record.steps[0].num_tokens == 10
    assert record.expert_loads[0].tokens_per_expert == [[3, 7]]
    assert Plan(num_processes=4, tensor_parallel_size=2).num_replicas == 2


def test_expert_loads_are_added_over_the_steps_since_the_last_row(tmp_path: Path) -> None:
    write(tmp_path, [session(), experts(2, [4, 6]), step(2, 10), experts(3, [1, 1]), step(3, 2)])
    write(tmp_path, [rank_session(), experts(1, [1, 2]), experts(2, [3, 4]), experts(3, [5, 5])], rank=1)
    first, second = read_run(tmp_path).expert_loads
    assert (first.load_max_over_mean, first.worst_layer, first.num_dead_experts) == (1.2, "a", 0)
    assert (first.tokens_per_expert, first.status) == ([[8, 12]], "recorded")
    assert (second.tokens_per_expert, second.status) == ([[6, 6]], "recorded")


@pytest.mark.parametrize(
    ("other", "total", "status", "reason"),
    [
        pytest.param([], [[4, 6]], "partial", "counted on 1 of 2 processes", id="none"),
        pytest.param([experts(1, [1, 1])], [[5, 7]], "partial", "its last row is that of step 1", id="ends-early"),
        pytest.param(
            [experts(2, status="not_recorded", reason="a graph replay")], [[4, 6]], "partial", "a graph replay", id="unseen"
        ),
        pytest.param([experts(2, [1, 1], [1, 1])], [], "not_recorded", "differ in number", id="other-shape"),
        pytest.param(
            [experts(2, [1, 1], status="partial", reason="odd")], [[5, 7]], "partial", "process 1: odd", id="partial"
        ),
    ],
)
def test_an_expert_load_that_not_all_processes_counted_is_partial_with_the_reason(
    tmp_path: Path, other: list[dict[str, Any]], total: list[list[int]], status: str, reason: str
) -> None:
    write(tmp_path, [session(), experts(2, [4, 6]), step(2, 10)])
    write(tmp_path, [rank_session(), *other], rank=1)
    (load,) = read_run(tmp_path).expert_loads
    assert (load.tokens_per_expert, load.status) == (total, status)
    assert reason in (load.reason or "")


def test_thinned_rows_are_joined_only_where_they_stand_for_the_same_steps(tmp_path: Path) -> None:
    write(tmp_path, [session(), step(2, 10, num_steps=2), step(4, 10, num_steps=2)])
    write(tmp_path, [rank_session(), step(2, 5, num_steps=2), step(4, 5)], rank=1)
    record = read_run(tmp_path)
    assert [row.num_tokens for row in record.steps] == [15, 10]
    assert record.totals.num_tokens == 2 * 15 + 2 * 10


def test_a_run_of_one_process_is_read_as_before(tmp_path: Path) -> None:
    write(tmp_path, [session(processes=1), step(1, 10)])
    write(tmp_path, [rank_session(), step(1, 5)], rank=1)  # left over from a launch on two
    record = read_run(tmp_path)
    assert (record.steps[0].num_tokens, record.steps[0].num_ranks, record.remarks) == (10, None, [])


def test_calibration_takes_one_devices_micro_batch(tmp_path: Path) -> None:
    job = {"model": "meta-llama/Llama-3.1-8B", "gpu": "NVIDIA A40", "num_gpus": 2, "max_length": 512}
    rows = [step(number, 1000, num_samples=2) for number in range(1, 9)]
    described = session(job=job, device={"kind": "cuda", "name": "NVIDIA A40"})
    write(tmp_path / "two", [described, *rows])
    write(tmp_path / "two", [rank_session(), *rows], rank=1)
    write(tmp_path / "one", [{**described, "num_processes": 1}, *rows])
    two, one = (steps_of_run(read_run(tmp_path / name)) for name in ("two", "one"))
    assert two == one


def test_files_beside_the_record(tmp_path: Path) -> None:
    record = write(tmp_path, [session()])
    for rank in (1, 2, 10):
        write(tmp_path, [rank_session(rank=rank)], rank=rank)
    (record.parent / "run.rankx.jsonl").touch()
    assert sorted(rank_file_paths(record)) == [1, 2, 10]
    assert last_session(record.parent / "none.jsonl") is None
    assert RankRows(record, "r").merged({"type": "pause"}) == {"type": "pause"}


# --- what a process writes --------------------------------------------------------------------------------------------


def rank_run(folder: Path, clock: FakeClock, **changes: Any) -> RankRun:
    fields: dict[str, Any] = {"identity": Identity(run_id=""), "plan": Plan(num_processes=2), "process_started_at": 0.0}
    return RankRun(Settings(), boundary=Boundary(), rank=1, output_dir=folder, clock=clock, **(fields | changes))


def begun(run: RankRun, **changes: Any) -> RankRun:
    import torch

    from ftcost_callback.session_opening import Training

    run.begin(Training(model=tiny_mixtral(), device=torch.device("cpu"), **changes))
    return run


def do_step(run: RankRun, clock: FakeClock, number: int) -> None:
    run.step_begins()
    clock.pass_seconds(1.5)
    run.step_ends(number)


def rank_rows(folder: Path) -> list[dict[str, Any]]:
    path = rank_file_path(run_file_path(folder), 1)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_wait_for_the_main_processs_record_and_then_name_its_run(tmp_path: Path, fake_clock: FakeClock) -> None:
    run = begun(rank_run(tmp_path, fake_clock))
    do_step(run, fake_clock, 1)
    assert rank_rows(tmp_path) == []
    write(tmp_path, [session("mine", 3)])
    do_step(run, fake_clock, 2)
    run.end()
    head, *steps = rank_rows(tmp_path)
    assert (head["run_id"], head["session_index"]) == ("mine", 3)
    assert [(row["global_step"], row["session_index"]) for row in steps] == [(1, 3), (2, 3)]


def test_a_record_of_an_earlier_launch_is_not_taken_for_this_one(tmp_path: Path, fake_clock: FakeClock) -> None:
    path = write(tmp_path, [session("old")])
    run = begun(rank_run(tmp_path, fake_clock, process_started_at=path.stat().st_mtime + 5))
    do_step(run, fake_clock, 1)
    assert rank_rows(tmp_path) == []
    fake_clock.pass_seconds(LOOK_SECONDS)
    do_step(run, fake_clock, 2)  # what was counted is kept all the same
    run.end()
    head, *steps = rank_rows(tmp_path)
    assert "run_id" not in head
    assert [row["global_step"] for row in steps] == [1, 2]


def test_a_process_has_a_ledger_of_its_own(tmp_path: Path, fake_clock: FakeClock) -> None:
    checkpoint = tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    write(tmp_path, [session("mine")])
    earlier = Totals().plus_tokens(TokenCounts(num_tokens=7, num_non_padding_tokens=7, num_supervised_tokens=7))
    run = begun(rank_run(tmp_path, fake_clock, identity=Identity(run_id="mine", earlier=earlier)))
    do_step(run, fake_clock, 1)
    run.pause("save")
    run.save_ledger(checkpoint)
    run.end()
    ledger = read_ledger(checkpoint, rank=1)
    assert ledger is not None
    assert (ledger.run_id, ledger.global_step) == ("mine", 1)
    assert ranks_with_ledger(checkpoint) == [1]
    assert read_ledger(checkpoint) is None
    assert rank_rows(tmp_path)[0]["earlier_tokens"]["num_tokens"] == 7


def test_a_run_that_goes_on_alone_takes_on_what_the_others_had_counted(tmp_path: Path) -> None:
    tiny_trainer(tmp_path, [FTCostCallback(sinks=[], predict=False)], save_strategy="steps", save_steps=2).train()
    before = read_run(tmp_path)
    at_checkpoint = read_ledger(tmp_path / "checkpoint-2")
    assert at_checkpoint is not None
    others = Totals().plus_tokens(TokenCounts(num_tokens=1000, num_non_padding_tokens=1000, num_supervised_tokens=1000))
    ledger = Ledger(run_id=before.run_id, session_index=0, global_step=2, totals=others)
    write_ledger(tmp_path / "checkpoint-2", ledger, rank=1)
    resumed = tmp_path / "elsewhere"
    trainer = tiny_trainer(resumed, [FTCostCallback(sinks=[], predict=False)])
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert read_run(resumed).totals.num_tokens == 1000 + (before.totals.num_tokens or 0)


# --- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "machines", "per_instance", "hourly"),
    [
        pytest.param(2, 1, 1, 4.0, id="by-the-gpu"),
        pytest.param(2, 1, 8, 16.0, id="a-whole-machine"),
        pytest.param(16, 2, 8, 32.0, id="two-whole-machines"),
        pytest.param(8, 2, 8, 32.0, id="two-machines-half-used"),
        pytest.param(8, 2, 1, 16.0, id="two-machines-by-the-gpu"),
    ],
)
def test_one_bill_for_all_processes(devices: int, machines: int, per_instance: int, hourly: float) -> None:
    price = Price(
        usd_per_gpu_hour=2.0, usd_per_instance_hour=2.0 * per_instance, gpus_per_instance=per_instance, source="given"
    )
    plan = Plan(num_processes=devices, num_devices=devices, num_machines=machines)
    found = find_price(Settings(price=price), plan, None, [])
    assert found == (price, hourly)


@pytest.mark.parametrize(("name", "what"), [("tp_size", "tensor"), ("pp_size", "pipeline"), ("ep_size", "expert")])
def test_a_parallelism_that_is_not_modelled_is_refused_rather_than_predicted(tmp_path: Path, name: str, what: str) -> None:
    trainer = tiny_trainer(tmp_path, [])
    estimate_trainer(trainer, max_length=16)
    trainer.model.config.distributed_config = SimpleNamespace(**{name: 2})
    with pytest.raises(CostModelError, match=f"{what} parallelism is not modelled"):
        estimate_trainer(trainer, max_length=16)


@pytest.mark.parametrize(("said", "machines"), [(None, 1), ("4", 2), ("8", 1), ("many", 1), ("0", 1)])
def test_machines_of_a_launch(monkeypatch: pytest.MonkeyPatch, said: str | None, machines: int) -> None:
    if said is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    assert num_machines(8) == machines


# --- figures while training -------------------------------------------------------------------------------------------


def test_live_rates_are_the_main_processs_times_the_number_of_them() -> None:
    steps = StepAggregate(
        num_steps=2, step_seconds_sum=4.0, num_tokens=80, num_non_padding_tokens=60, num_supervised_tokens=40, num_samples=8
    )
    totals = Totals(num_supervised_tokens=40)
    standing = Standing(
        global_step=2, max_steps=4, steps=steps, totals=totals, elapsed_seconds=4.0, spent_usd=1.0, num_replicas=4
    )
    window, measured = window_of(standing), measured_of(standing)
    assert (window.tokens_per_second, window.non_padding_tokens_per_second) == (80.0, 60.0)
    assert window.usd_per_million_supervised_tokens == pytest.approx(1.0 / 160 * 1e6)
    # The estimate's tokens are those of all GPUs too.
    assert compare({"num_tokens_per_step": 160.0}, measured).ratios["num_tokens_per_step"] == pytest.approx(1.0)


def test_the_plan_of_a_launch(tmp_path: Path) -> None:
    class State:
        max_steps, num_train_epochs = 4, 1
        eval_steps = save_steps = logging_steps = 1

    plan = Plan.of(training_arguments(tmp_path), State(), tensor_parallel_size=1)
    assert (plan.num_processes, plan.num_devices, plan.num_replicas) == (1, 1, 1)
