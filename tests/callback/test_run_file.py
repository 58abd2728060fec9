from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_runs import FakeClock

from costmodel.errors import CostModelError
from ftcost_callback.boundary import Boundary
from ftcost_callback.record_writer import RecordWriter
from ftcost_callback.recorder import Pace, PhaseSeconds, StepAggregate, Totals
from ftcost_callback.records import ExpertLoad, Pause, Prediction, Session, Step
from ftcost_callback.run_file import (
    Ledger,
    RunFile,
    StepThinner,
    ledger_path,
    read_ledger,
    read_run,
    run_file_path,
    write_ledger,
)


def session(run_id: str = "aaa", session_index: int = 0, **fields: Any) -> Session:
    return Session(
        run_id=run_id, session_index=session_index, started_at="2026-01-01T00:00:00+00:00", startup_seconds=4.0, **fields
    )


def step(global_step: int, session_index: int = 0, **fields: Any) -> Step:
    return Step(global_step=global_step, session_index=session_index, step_seconds=2.0, num_tokens=10, **fields)


def write(output_dir: Path, *rows: Any) -> Path:
    file = RunFile(run_file_path(output_dir))
    for row in rows:
        file.append(row)
    file.close()
    return file.path


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    load = ExpertLoad(global_step=1, layer_names=["a"], tokens_per_expert=[[1, 2]], num_experts_per_tok=1)
    rows = [
        session(),
        Prediction(basis="before", global_step=0, estimate={"step_seconds": 0.5}),
        step(1, spent_usd=0.25),
        Pause(kind="eval", global_step=1, seconds=3.0),
        load,
    ]
    path = write(tmp_path, *rows)
    for given in (tmp_path, tmp_path / "_ftcost", path):
        record = read_run(given)
        assert record.sessions == [rows[0]]
        assert record.predictions == [rows[1]]
        assert record.steps == [rows[2]]
        assert record.pauses == [rows[3]]
        assert record.expert_loads == [load]
    assert record.summary is None


def test_rows_are_with_the_operating_system_when_flush_returns(tmp_path: Path) -> None:
    file = RunFile(run_file_path(tmp_path))
    file.append(session())
    assert file.path.read_text() == ""
    file.flush()
    assert json.loads(file.path.read_text())["type"] == "session"
    file.close()


def test_a_forked_child_leaves_its_parents_rows_alone(tmp_path: Path) -> None:
    file = RunFile(run_file_path(tmp_path))
    file.append(session())
    child = os.fork()
    if child == 0:
        try:
            file.flush()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert file.path.read_text() == ""
    file.close()
    assert len(file.path.read_text().splitlines()) == 1


def test_rows_that_wait_are_written_when_nobody_holds_the_file_any_more(tmp_path: Path) -> None:
    file = RunFile(run_file_path(tmp_path))
    path = file.path
    file.append(session())
    del file
    assert json.loads(path.read_text())["type"] == "session"


def test_no_nan_reaches_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, session(), step(1, mfu=float("nan"), data_wait_seconds=float("inf")))
    row = json.loads(path.read_text().splitlines()[1])
    assert "mfu" not in row
    assert "data_wait_seconds" not in row


def test_a_line_cut_off_by_a_kill_is_passed_over_and_the_next_session_begins_a_new_line(tmp_path: Path) -> None:
    path = write(tmp_path, session(), step(1), step(2))
    path.write_bytes(path.read_bytes()[:-20])
    assert read_run(tmp_path).num_unread_lines == 1
    write(tmp_path, session(session_index=1), step(2, session_index=1))
    record = read_run(tmp_path)
    assert [each.global_step for each in record.steps] == [1, 2]
    assert len(record.sessions) == 2


def test_unknown_types_and_fields_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path, session())
    with path.open("a") as file:
        file.write('{"type": "weather", "rain": 1}\n')
        file.write('{"type": "step", "global_step": 1, "session_index": 0, "step_seconds": 1.0, "mood": "good"}\n')
        file.write('{"type": "pause"}\n')
    record = read_run(path)
    assert record.steps == [Step(global_step=1, session_index=0, step_seconds=1.0)]
    assert record.num_unread_lines == 2


def test_the_last_run_in_a_folder_is_read(tmp_path: Path) -> None:
    write(tmp_path, session("aaa"), step(1), step(2))
    write(tmp_path, session("bbb"), step(1))
    assert read_run(tmp_path).run_id == "bbb"
    assert len(read_run(tmp_path).steps) == 1
    assert len(read_run(tmp_path, run_id="aaa").steps) == 2
    with pytest.raises(CostModelError, match="no run 'ccc'; it holds aaa, bbb"):
        read_run(tmp_path, run_id="ccc")


@pytest.mark.parametrize("content", ["", "hello\n", '{"loss": 1.0}\n', "[1, 2]\n", "\x00\xff\n"])
def test_a_foreign_file_is_refused_with_the_way_out(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(CostModelError, match=r"is no ftcost run record.*give the output_dir"):
        read_run(path)


def test_two_processes_at_once_write_two_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows do not say of which run they are; it is told by their order."""
    other = "import sys; from ftcost_callback.run_file import RunFile; RunFile(sys.argv[1]); print(flush=True); input()"
    path = run_file_path(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", other, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has the file
        writer = RecordWriter(Boundary(), FakeClock())
        writer.open(tmp_path)
        writer.write(session(run_id="second"))
        writer.close()
        process.communicate("\n", timeout=60)
    assert "another training writes to" in caplog.text
    assert path.read_bytes() == b""
    assert read_run(path.with_name("run.2.jsonl")).run_id == "second"
    writer.open(tmp_path)  # the other has ended
    assert writer.file is not None
    assert writer.file.path == path
    writer.close()


def test_a_disk_that_refuses_every_lock_is_asked_so_often_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*arguments: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "refused")

    monkeypatch.setattr("fcntl.lockf", refuses)
    file = RunFile(run_file_path(tmp_path))
    file.append(session())
    file.close()
    assert read_run(file.path).run_id == "aaa"


def test_who_reads_the_record_while_it_is_written_leaves_it_locked(tmp_path: Path) -> None:
    other = "import sys; from ftcost_callback.run_file import RunFile; print(RunFile(sys.argv[1]).path.name)"
    command = [sys.executable, "-c", other, str(run_file_path(tmp_path))]
    file = RunFile(run_file_path(tmp_path))
    file.append(session())
    file.flush()
    read_run(tmp_path)
    file.append(step(1))
    file.flush()
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    assert found == "run.2.jsonl"
    file.close()


def test_a_training_that_was_left_keeps_its_record_from_nobody(tmp_path: Path) -> None:
    """A notebook goes on living after the exception; the resume may be a process of its own."""
    other = "import sys; from ftcost_callback.run_file import RunFile; print(RunFile(sys.argv[1]).path.name)"
    command = [sys.executable, "-c", other, str(run_file_path(tmp_path))]
    file = RunFile(run_file_path(tmp_path))
    found = []
    for let_go in (lambda: None, file.unlock):
        let_go()
        found.append(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip())
    assert found == ["run.2.jsonl", "run.jsonl"]
    file.append(session())
    file.flush()
    file.append(step(1))  # nobody else has written
    file.flush()
    assert len(read_run(tmp_path).steps) == 1
    another = RunFile(run_file_path(tmp_path))
    another.append(session(run_id="another"))
    another.flush()
    file.append(step(2))
    del file, found, let_go  # as the interpreter's exit does: what waited would be written
    gc.collect()
    another.close()
    assert read_run(tmp_path).steps == []


def test_a_missing_record_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(CostModelError, match=r"(no such file|holds no _ftcost).*give the output_dir"):
        read_run(tmp_path)


def test_totals_of_a_killed_run_are_the_sums_of_its_rows(tmp_path: Path) -> None:
    write(
        tmp_path,
        session(),
        step(1, data_wait_seconds=0.5),
        Pause(kind="save", global_step=1, seconds=3.0),
        step(2, spent_usd=0.125),
    )
    record = read_run(tmp_path)
    assert record.totals == Totals(
        train_seconds=4.0,
        save_seconds=3.0,
        startup_seconds=4.0,
        data_wait_seconds=0.5,
        num_steps=2,
        num_tokens=20,
        num_non_padding_tokens=None,
        num_supervised_tokens=None,
        num_samples=None,
    )
    assert record.spent_usd == 0.125
    assert record.last_step == 2


def test_a_session_on_another_machine_begins_from_what_its_row_says(tmp_path: Path) -> None:
    earlier = Totals(train_seconds=100.0, startup_seconds=10.0, num_tokens=50)
    write(
        tmp_path,
        session(session_index=1, earlier_seconds=earlier.seconds, earlier_tokens={"num_tokens": 50}),
        step(51, session_index=1),
    )
    totals = read_run(tmp_path).totals
    assert (totals.train_seconds, totals.startup_seconds, totals.num_tokens) == (102.0, 14.0, 60)


def test_the_ledger_of_a_checkpoint(tmp_path: Path) -> None:
    ledger = Ledger(
        run_id="aaa",
        session_index=2,
        global_step=500,
        totals=Totals(train_seconds=10.0, num_steps=500, num_tokens=None),
        spent_usd=1.5,
        crossed_thresholds=("usd 10 50 %",),
        pace=Pace(
            machine="1 x A40",
            step_seconds=(1.0, 1.5),
            num_tokens=(100, 150),
            num_sessions=2,
            steps=StepAggregate(
                num_steps=2,
                step_seconds_sum=2.5,
                num_tokens=250,
                num_non_padding_tokens=None,
                phases=PhaseSeconds(forward=0.5, backward=0.5, optimizer=0.1),
            ),
        ),
    )
    write_ledger(tmp_path, ledger)
    assert read_ledger(tmp_path) == ledger
    assert [path.name for path in tmp_path.iterdir()] == ["ftcost_ledger.json"]


def test_a_checkpoint_without_a_ledger_and_one_that_is_broken(tmp_path: Path) -> None:
    assert read_ledger(tmp_path) is None
    (tmp_path / "ftcost_ledger.json").write_text('{"run_id": "a"')
    with pytest.raises(CostModelError, match="cannot be read as a ledger"):
        read_ledger(tmp_path)


def test_a_very_long_run_has_a_row_for_several_steps_and_the_same_totals(tmp_path: Path) -> None:
    thinner = StepThinner(full_steps=4)
    rows = [
        thinner.add(step(number, elapsed_seconds=2.0 * number, data_wait_seconds=number / 10)) for number in range(1, 31)
    ]
    written = [row for row in rows if row is not None]
    last = thinner.take()
    assert last is not None
    # 1 to 4 alone, then 2 at a time up to 8, 4 up to 16, 8 from there on.
    assert [row.global_step for row in (*written, last)] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 30]
    assert [row.num_steps for row in written] == [None] * 4 + [2, 2, 4, 4, 8]
    assert (written[4].step_seconds, written[4].data_wait_seconds, written[4].elapsed_seconds) == (2.0, 0.55, 12.0)
    write(tmp_path, session(), *written, last)
    totals = read_run(tmp_path).totals
    assert (totals.num_steps, totals.train_seconds, totals.num_tokens) == (30, 60.0, 300)
    assert totals.data_wait_seconds == pytest.approx(sum(range(1, 31)) / 10)


@pytest.mark.parametrize(
    "strange",
    [
        {"type": "step", "global_step": 2, "session_index": 0, "step_seconds": {}},
        {"type": "step", "global_step": 2, "session_index": 0, "step_seconds": 1.0, "data_wait_seconds": "x"},
        {"type": "step", "global_step": 2, "session_index": 0, "step_seconds": 1.0, "num_tokens": [1]},
        {"type": "pause", "kind": "eval", "global_step": 2, "seconds": None},
        {"type": "pause", "kind": True, "global_step": 2, "seconds": 1.0},
        {"type": "pause", "kind": [], "global_step": 2, "seconds": 1.0},
        {"type": "pause", "kind": "eval", "global_step": 2, "seconds": 1e308},
        {"type": "summary", "global_step": 2, "num_sessions": "two"},
        {"type": ["step"]},
    ],
)
def test_a_row_of_another_kind_is_counted_as_unread(tmp_path: Path, strange: dict[str, Any]) -> None:
    write(tmp_path, session(), step(1))
    file = run_file_path(tmp_path)
    file.write_text(file.read_text() + json.dumps(strange) + "\n")
    record = read_run(tmp_path)
    assert (len(record.steps), record.num_unread_lines) == (1, 1)
    assert record.totals.num_steps == 1
    assert record.totals.wall_seconds == record.steps[0].step_seconds + (record.sessions[0].startup_seconds or 0)


def test_null_is_as_absent(tmp_path: Path) -> None:
    write(tmp_path, session(), step(1))
    file = run_file_path(tmp_path)
    row = {"type": "step", "global_step": 2, "session_index": 0, "step_seconds": 1.0, "data_wait_seconds": None}
    file.write_text(file.read_text() + json.dumps(row) + "\n")
    record = read_run(tmp_path)
    assert (len(record.steps), record.num_unread_lines) == (2, 0)


def test_a_ledger_with_what_is_no_number_is_refused(tmp_path: Path) -> None:
    write_ledger(tmp_path, Ledger(run_id="aaa", session_index=0, global_step=4, totals=Totals()))
    fields = json.loads(ledger_path(tmp_path).read_text())
    fields["totals"]["train_seconds"] = "x"
    ledger_path(tmp_path).write_text(json.dumps(fields))
    with pytest.raises(CostModelError, match="cannot be read as a ledger"):
        read_ledger(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("global_step", -1),
        ("global_step", 1.5),
        ("global_step", None),
        ("session_index", 10**30),
        ("session_index", 1e30),
        ("session_index", "1"),
        ("session_index", True),
        ("spent_usd", -1e9),
        ("energy_joules", -1.0),
        ("run_id", 5),
        ("totals", {"train_seconds": -3.0}),
        ("totals", {"num_steps": -3}),
    ],
)
def test_a_ledger_with_edited_values_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    write_ledger(tmp_path, Ledger(run_id="a", session_index=1, global_step=4, totals=Totals(num_steps=4), spent_usd=1.0))
    fields = json.loads(ledger_path(tmp_path).read_text(encoding="utf-8"))
    ledger_path(tmp_path).write_text(json.dumps(fields | {name: value}), encoding="utf-8")
    with pytest.raises(CostModelError, match="cannot be read as a ledger"):
        read_ledger(tmp_path)


def test_a_line_and_a_ledger_nested_deeper_than_anything_are_passed_over(tmp_path: Path) -> None:
    deep = "[" * 200_000 + "]" * 200_000
    path = write(tmp_path, session("a"))
    with path.open("a", encoding="utf-8") as file:
        file.write(f'{{"type": {deep}}}\n{deep}\n')
    record = read_run(path)
    assert (record.run_id, record.num_unread_lines) == ("a", 2)
    ledger_path(tmp_path).write_text(deep, encoding="utf-8")
    with pytest.raises(CostModelError, match="cannot be read as a ledger"):
        read_ledger(tmp_path)
