"""What W&B's failures do to a training with ``wandb_guard=True``: nothing. The real client against a local server.

Each case is a process of its own, as a training is: the client's behaviour at the end of one is part of what is tested.

| what fails | training | the server got | on disk | test |
|---|---|---|---|---|
| no key, a wrong one, 401, refused, 500, no answer at first | to the end | nothing | all | ``..._cannot_be_opened_...`` |
| the same without the guard | the client's error ends it | nothing | our record | ``..._without_the_guard_...`` |
| rows refused for a while (500 twice, 3 dropped) | to the end | all | all | ``..._cannot_be_sent_...`` |
| rows refused for ever (500, no answer, 401, 404) | to the end | nothing | all | ``..._cannot_be_sent_...`` |
| the server dies and returns | to the end | all, in order | all | ``..._comes_back_...`` |
| the server dies for good | to the end | up to then | all | ``..._dies_for_good_...`` |
| wandb-core is killed | to the end | up to then | up to the last flush | ``..._clients_own_process_...`` |
| SIGKILL, SIGTERM of the training | ends | up to then | all but the last second | ``..._killed_training_...`` |
| the disk is full | to the end | those that did not have to wait | cut | ``..._full_disk_...`` |
| ``WANDB_DIR`` cannot be written | to the end | all | in a temporary folder | ``..._cannot_be_written_...`` |
| ``WANDB_MODE=disabled`` | to the end | nothing | nothing | ``test_wandb_guard.py::test_disabled_stays_disabled`` |
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from wandb_files import history
from wandb_server import Fault, WandbServer

from ftcost_callback.run_file import read_run

pytest.importorskip("wandb")

NUM_STEPS = 6
AWAY_AT_THE_END: dict[str, str | None] = {"WANDB_FINISH_TIMEOUT": "4"}
# Short, so that a case takes seconds; the guard leaves what the environment sets. The first two are long enough for a busy
# machine that gets an answer.
LIMITS = {
    "WANDB_INIT_TIMEOUT": "20",
    "WANDB_FINISH_TIMEOUT": "20",
    "WANDB_X_GRAPHQL_RETRY_MAX": "1",
    "WANDB_X_GRAPHQL_RETRY_WAIT_MAX_SECONDS": "1",
    "WANDB_X_GRAPHQL_TIMEOUT_SECONDS": "2",
    "WANDB_X_FILE_STREAM_RETRY_WAIT_MIN_SECONDS": "1",
    "WANDB_X_FILE_STREAM_RETRY_WAIT_MAX_SECONDS": "1",
    "WANDB_X_FILE_STREAM_TIMEOUT_SECONDS": "2",
}


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with WandbServer() as listening:
        yield listening
    assert listening.unknown_operations == set()


@dataclass
class Training:
    """What a training in a process of its own left."""

    said: str  # stderr
    result: dict[str, Any]
    folder: Path

    @property
    def rows_on_disk(self) -> list[int]:
        """The steps of our rows in the client's own file."""
        return [row["train/global_step"] for row in history(self.folder) if "ftcost/speed/step_seconds" in row]


def train(
    server: WandbServer,
    folder: Path,
    *,
    environment: dict[str, str | None] | None = None,
    events: dict[str, tuple[int, Callable[[int], None]]] | None = None,
    ends_with: int | None = 0,
    is_guarded: bool = True,
) -> Training:
    """Train; ``events``: name -> (step after which the training waits, what happens then, given its process id).

    ``ends_with``: the exit code; ``None``: any but 0, and then there is no result.
    """
    variables: dict[str, str] = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    variables |= server.environment(str(folder)) | LIMITS | {"OMP_NUM_THREADS": "1"}
    for name, value in (environment or {}).items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value
    happen = events or {}
    script = [sys.executable, str(Path(__file__).parent / "wandb_training.py"), str(folder), str(NUM_STEPS)]
    script += [f"{name}={step}" for name, (step, _) in happen.items()] + ([] if is_guarded else ["unguarded"])
    process = subprocess.Popen(
        script, env=variables, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    last = ""
    for line in process.stdout:
        last = line
        if line.strip() in happen:
            happen[line.strip()][1](process.pid)
            with contextlib.suppress(BrokenPipeError):  # it may have been killed
                _answer(process.stdin)
    _, said = process.communicate(timeout=120)
    assert process.returncode == ends_with or (ends_with is None and process.returncode != 0), said
    return Training(said, json.loads(last) if process.returncode == 0 else {}, folder)


def _answer(stdin: IO[str]) -> None:
    stdin.write("\n")
    stdin.flush()


def assert_trained_to_the_end(training: Training) -> None:
    """Everything that does not need the server: the training, the record, the bound on ``finish``."""
    assert training.result["trained"] == NUM_STEPS
    record = read_run(training.folder / "out")
    assert [step.global_step for step in record.steps] == list(range(1, NUM_STEPS + 1))
    assert record.summary is not None
    assert training.result["finish_seconds"] < 25


def on_server(server: WandbServer) -> list[int]:
    return [row["train/global_step"] for row in server.run.rows() if "ftcost/speed/step_seconds" in row]


ALL = list(range(2, NUM_STEPS + 1))  # the first step is warm-up


def dead(server: WandbServer) -> None:
    server.die()


def hanging(server: WandbServer) -> None:
    server.faults["graphql"] = Fault(hang=True)


def failing(server: WandbServer) -> None:
    server.faults["graphql"] = Fault(status=500)


def refusing(server: WandbServer) -> None:
    server.faults["graphql"] = Fault(status=401)


def healthy(server: WandbServer) -> None:
    """As it is."""


NO_KEY: dict[str, str | None] = {"WANDB_API_KEY": None}


@pytest.mark.parametrize(
    ("prepare", "environment", "error"),
    [
        pytest.param(healthy, NO_KEY, "UsageError", id="no key and no terminal"),
        pytest.param(healthy, {"WANDB_API_KEY": "short"}, "AuthenticationError", id="no key's form", marks=pytest.mark.slow),
        pytest.param(refusing, {}, "(Comm)?Error", id="401"),
        pytest.param(dead, {}, "(Comm)?Error", id="nobody listens"),
        pytest.param(failing, {}, "(Comm)?Error", id="500", marks=pytest.mark.slow),
        pytest.param(hanging, {}, "(Comm)?Error", id="no answer", marks=pytest.mark.slow),
        pytest.param(
            dead,
            {"WANDB_RUN_ID": "again", "WANDB_RESUME": "allow"},
            "(Comm)?Error",
            id="nobody listens, a run to go on with",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_that_cannot_be_opened_is_kept_offline(
    prepare: Callable[[WandbServer], None],
    environment: dict[str, str | None],
    error: str,
    server: WandbServer,
    tmp_path: Path,
) -> None:
    prepare(server)
    training = train(server, tmp_path, environment=environment)
    assert_trained_to_the_end(training)
    assert training.result["mode"] == "offline"
    assert re.search(rf"W&B cannot be reached \({error}: ", training.said)
    assert training.rows_on_disk == ALL
    folder = Path(sync_command(training)[-1])
    assert folder.is_dir()
    assert len(list(folder.glob("run-*.wandb"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [healthy, refusing], ids=["no key", "401"])
def test_without_the_guard_the_clients_error_ends_the_training(
    prepare: Callable[[WandbServer], None], server: WandbServer, tmp_path: Path
) -> None:
    """What the guard is for: should a newer client or Trainer go on here, nobody needs it."""
    prepare(server)
    training = train(server, tmp_path, environment=NO_KEY if prepare is healthy else {}, ends_with=None, is_guarded=False)
    assert "WandbCallback" in training.said or "integration_utils.py" in training.said
    assert "ftcost_callback/" not in training.said.rpartition("Traceback")[2]


@pytest.mark.slow
def test_the_line_that_is_said_delivers_the_run_later(server: WandbServer, tmp_path: Path) -> None:
    server.die()
    training = train(server, tmp_path)
    server.start()
    sync(server, tmp_path, *sync_command(training)[1:])
    assert on_server(server) == ALL
    assert server.run.summary["ftcost/summary/global_step"] == NUM_STEPS


def sync(server: WandbServer, folder: Path, *arguments: str) -> None:
    """``wandb sync ...`` as it is typed."""
    command = [str(Path(sys.executable).parent / "wandb"), *arguments]
    subprocess.run(command, env=os.environ | server.environment(str(folder)), check=True, capture_output=True, timeout=120)


def sync_command(training: Training) -> list[str]:
    """As it stands in the one line."""
    (line,) = [each for each in training.said.splitlines() if "wandb sync" in each]
    return shlex.split(line[line.index("wandb sync") :])


@pytest.mark.parametrize(
    ("fault", "delivered"),
    [
        pytest.param(Fault(status=500, times=2), True, id="500 twice"),
        pytest.param(Fault(drop=True, times=3), True, id="3 dropped connections", marks=pytest.mark.slow),
        pytest.param(Fault(status=500), False, id="500 for ever", marks=pytest.mark.slow),
        pytest.param(Fault(hang=True), False, id="no answer for ever", marks=pytest.mark.slow),
        pytest.param(Fault(status=401), False, id="401", marks=pytest.mark.slow),
        pytest.param(Fault(status=404), False, id="404", marks=pytest.mark.slow),
    ],
)
def test_rows_that_cannot_be_sent_stay_on_disk(fault: Fault, delivered: bool, server: WandbServer, tmp_path: Path) -> None:
    server.faults["file_stream"] = fault
    training = train(server, tmp_path, environment=None if delivered else AWAY_AT_THE_END)
    assert_trained_to_the_end(training)
    assert training.result["mode"] == "online"
    assert training.rows_on_disk == ALL
    assert on_server(server) == (ALL if delivered else [])


def test_a_server_that_dies_and_comes_back_gets_everything_in_order(server: WandbServer, tmp_path: Path) -> None:
    events = {"dies": (3, lambda pid: server.die()), "returns": (5, lambda pid: server.start())}
    training = train(server, tmp_path, events=events)
    assert_trained_to_the_end(training)
    assert training.rows_on_disk == on_server(server) == ALL


def test_a_server_that_dies_for_good_gets_no_alert_and_holds_nothing_up(server: WandbServer, tmp_path: Path) -> None:
    events = {"dies": (0, lambda pid: server.die())}  # the first step may end late enough for its alert to arrive
    training = train(server, tmp_path, environment=AWAY_AT_THE_END, events=events)
    assert_trained_to_the_end(training)
    assert training.rows_on_disk == ALL
    assert on_server(server) == []  # it died before the first row
    assert "W&B does not answer, so it gets no alert" in training.said


@pytest.mark.slow
def test_the_death_of_the_clients_own_process_ends_the_rows_alone(server: WandbServer, tmp_path: Path) -> None:
    def kill_core(pid: int) -> None:
        (core,) = children(pid, "wandb-core")
        os.kill(core, signal.SIGKILL)

    training = train(server, tmp_path, events={"dies": (3, kill_core)})
    assert_trained_to_the_end(training)
    assert sum("W&B takes no more rows" in line for line in training.said.splitlines()) == 1
    assert training.rows_on_disk == ALL[: len(training.rows_on_disk)] != ALL
    assert on_server(server) == ALL[: len(on_server(server))] != ALL


def kill_after_a_flush(number: signal.Signals) -> dict[str, tuple[int, Callable[[int], None]]]:
    def kill(pid: int) -> None:
        time.sleep(2.0)  # the client writes each second
        os.kill(pid, number)

    return {"dies": (5, kill)}


@pytest.mark.slow
def test_a_killed_training_loses_the_last_second_alone(server: WandbServer, tmp_path: Path) -> None:
    training = train(server, tmp_path, events=kill_after_a_flush(signal.SIGKILL), ends_with=-signal.SIGKILL)
    # the figures of step 5 wait in the row that the Trainer closes when it logs, which it was killed before
    assert training.rows_on_disk == on_server(server) == [2, 3, 4]
    assert [step.global_step for step in read_run(tmp_path / "out").steps] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_killed_training_can_be_sent_whole_from_the_disk(server: WandbServer, tmp_path: Path) -> None:
    server.faults["file_stream"] = Fault(status=500)
    train(server, tmp_path, events=kill_after_a_flush(signal.SIGTERM), ends_with=-signal.SIGTERM)
    assert on_server(server) == []
    del server.faults["file_stream"]
    (folder,) = tmp_path.glob("wandb/run-*")
    sync(server, tmp_path, "sync", "--include-online", str(folder))
    assert on_server(server) == [2, 3, 4]


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A file system of its own, of 512 KiB. Skips where mounting is refused: it takes root."""
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"needs a file system of its own, and mount says: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_does_not_stop_the_training_and_what_the_server_got_is_in_order(
    server: WandbServer, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk") as disk:

        def fill(pid: int) -> None:
            with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
                while True:
                    filler.write(bytes(4096))

        training = train(server, tmp_path, environment={"WANDB_DIR": str(disk)}, events={"fills": (3, fill)})
        assert_trained_to_the_end(training)
        assert training.result["mode"] == "online"
        on_disk = Training(training.said, {}, disk).rows_on_disk
    # Rows that the client cannot send at once wait on the disk; where that is full they are gone for W&B. How many do not
    # have to wait is a matter of speed. The run record, on another disk, has all (looked at above).
    arrived = on_server(server)
    assert arrived[:2] == ALL[:2]  # of before the disk was full
    assert arrived == [step for step in ALL if step in arrived]
    assert on_disk == ALL[: len(on_disk)] != ALL


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_replaced_by_a_temporary_one(server: WandbServer, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with small_disk(tmp_path / "disk") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        training = train(server, tmp_path, environment={"WANDB_DIR": str(disk), "TMPDIR": str(temporary)})
    assert_trained_to_the_end(training)
    assert training.result["mode"] == "online"
    assert on_server(server) == ALL
    assert Training(training.said, {}, temporary).rows_on_disk == ALL


def children(pid: int, name: str) -> list[int]:
    """Processes started by ``pid`` whose program has this name. Linux."""
    found = []
    for each in Path("/proc").iterdir():
        if not each.name.isdigit():
            continue
        try:
            stat, command = (each / "stat").read_text(), (each / "cmdline").read_text()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == pid and name in command.split("\0")[0]:
            found.append(int(each.name))
    return found
