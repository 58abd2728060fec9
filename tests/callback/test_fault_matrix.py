"""The fault matrix: what can go wrong around a callback, injected below it. Training ends as without it, at most a second
of rows is lost, at most one warning is given, and hooks and threads are gone. The table is printed at the end
(``pytest -m slow tests/callback/test_fault_matrix.py``).
"""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu_sampler import SOURCE
from tiny_runs import TickingClock, TokenRows, num_hooks, tiny_llama, tiny_mixtral, tiny_trainer
from transformers import TrainerCallback

from ftcost_callback import FTCostCallback
from ftcost_callback.live_run import FLUSH_SECONDS, LiveRun
from ftcost_callback.run_file import RunRecord, read_run
from ftcost_callback.sinks import InMemorySink

pytestmark = pytest.mark.slow

STEPS = 12


class InjectedError(Exception):
    """What is thrown below us."""


@functools.cache
def losses_without_us(arguments: str) -> tuple[float, ...]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return _train(Path(folder), [], tiny_llama, json.loads(arguments))


def _train(output_dir: Path, callbacks: list[Any], factory: Any, arguments: dict[str, Any]) -> tuple[float, ...]:
    torch.manual_seed(5)
    model = factory() if callable(factory) else factory
    fields = {"max_steps": STEPS, "logging_steps": 4, "eval_strategy": "steps", "eval_steps": 6} | arguments
    trainer = tiny_trainer(output_dir, callbacks, model=model, eval_dataset=TokenRows(), **fields)
    trainer.train()
    assert trainer.state.global_step == fields["max_steps"]
    assert num_hooks(model) == 0
    return tuple(row["loss"] for row in trainer.state.log_history if "loss" in row)


@dataclass
class Bench:
    """One training with a fault in it, held against the same training without us."""

    tmp_path: Path
    patch: pytest.MonkeyPatch
    sink: InMemorySink = field(default_factory=InMemorySink)
    clock: Callable[[], float] = field(default_factory=TickingClock)

    def callback(self, **settings: Any) -> FTCostCallback:
        measuring = FTCostCallback(**({"sinks": [self.sink], "predict": False, "usd_per_gpu_hour": 1.0} | settings))
        measuring._clock = self.clock
        return measuring

    def train(self, *callbacks: Any, factory: Any = tiny_llama, **arguments: Any) -> RunRecord | None:
        """With these callbacks (default: ours), as without; what the record holds, ``None`` where there is none."""
        given = list(callbacks) if callbacks else [self.callback()]
        losses = _train(self.tmp_path, given, factory, arguments)
        assert losses == losses_without_us(json.dumps(arguments))
        return self.record()

    def record(self) -> RunRecord | None:
        try:
            return read_run(self.tmp_path)
        except Exception:
            return None


def complete(record: RunRecord | None, steps: int = STEPS) -> str:
    assert record is not None
    assert [step.global_step for step in record.steps] == list(range(1, steps + 1))
    assert record.summary is not None
    return f"{steps} of {steps} rows"


class At(TrainerCallback):
    """Calls a function at the end of one step, behind our callback."""

    def __init__(self, global_step: int, function: Callable[..., Any]) -> None:
        self.global_step, self.function = global_step, function

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.global_step:
            self.function(**kwargs)


# --- the faults -------------------------------------------------------------------------------------------------------


def in_event(method: str, only: str | None = None) -> Callable[[Bench], str]:
    """The work behind one Trainer event throws."""

    def inject(bench: Bench) -> str:
        original = getattr(LiveRun, method)

        def fail(self: LiveRun, *args: Any, **kwargs: Any) -> Any:
            if only is None or only in args:
                raise InjectedError(method)
            return original(self, *args, **kwargs)

        bench.patch.setattr(LiveRun, method, fail)
        measuring = bench.callback(profile_steps=(2, 3))
        bench.train(measuring, save_strategy="steps", save_steps=6, gradient_accumulation_steps=2)
        return "measuring off, training to the end"

    return inject


def in_init_end(bench: Bench) -> str:
    def fail(args: Any) -> None:
        raise InjectedError("on_init_end")

    bench.patch.setattr("ftcost_callback.callback.open_run_or_offline", fail)
    return "guard off, " + complete(bench.train(bench.callback(wandb_guard=True)))


def full_device(bench: Bench) -> str:
    record = bench.tmp_path / "_ftcost" / "run.jsonl"
    record.parent.mkdir()
    record.symlink_to("/dev/full")  # every write(2) is ENOSPC
    bench.train()
    assert bench.sink.summary is not None
    return "record off, reports go on"


def full_tmpfs(bench: Bench) -> str:
    folder = bench.tmp_path / "_ftcost"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        with file_size_limit(4096):  # not root: the next best refusal of the kernel's
            bench.train()
        return "no right to mount here: a file size limit in its place; record off"
    try:
        (folder / "ballast").write_bytes(bytes(12288))
        bench.train()
        record = read_run(folder)
        assert len(record.steps) <= STEPS
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert bench.sink.summary is not None
    return f"record off after {len(record.steps)} rows, reports go on"


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def over_the_file_size_limit(bench: Bench) -> str:
    with file_size_limit(4608):
        bench.train()
    record = bench.record()
    assert record is not None  # what was written before the limit can be read
    return f"record off after {len(record.steps)} rows, reports go on"


def read_only_folder(bench: Bench) -> str:
    if os.geteuid() == 0:  # no permission stops root; /proc takes no folder from anybody
        bench.train(bench.callback(output_dir="/proc"))
    else:
        folder = bench.tmp_path / "locked"
        folder.mkdir(mode=0o500)
        bench.train(bench.callback(output_dir=folder))
    assert bench.sink.summary is not None
    return "no record, reports go on"


def folder_is_a_file(bench: Bench) -> str:
    (bench.tmp_path / "_ftcost").write_text("in the way")
    bench.train()
    return "no record, reports go on"


def record_is_a_folder(bench: Bench) -> str:
    (bench.tmp_path / "_ftcost" / "run.jsonl").mkdir(parents=True)
    bench.train()
    return "no record, reports go on"


def foreign_bytes_in_the_record(bench: Bench) -> str:
    record = bench.tmp_path / "_ftcost" / "run.jsonl"
    record.parent.mkdir()
    record.write_bytes(b'\x00\xff not json\n{"type": "step"')
    return complete(bench.train())


def record_deleted(bench: Bench) -> str:
    record = bench.train(bench.callback(), At(5, lambda **kwargs: shutil.rmtree(bench.tmp_path / "_ftcost")))
    assert record is not None
    assert [step.global_step for step in record.steps][-1] == STEPS
    assert record.summary is not None
    return "the record begins again, rows before are gone"


def descriptor_closed(bench: Bench) -> str:
    measuring = bench.callback()

    def close_it(**kwargs: Any) -> None:
        assert measuring._run is not None
        assert measuring._run.record.file is not None
        os.close(os.dup2(os.open(os.devnull, os.O_RDONLY), measuring._run.record.file._descriptor or -1))

    bench.train(measuring, At(5, close_it))
    record = bench.record()
    assert record is not None
    assert len(record.steps) >= 4
    return f"record off after {len(record.steps)} rows, reports go on"


def ledger_in_the_way(bench: Bench) -> str:
    save = LiveRun.save_ledger

    def blocked(self: LiveRun, folder: Path) -> None:
        (folder / "ftcost_ledger.tmp").mkdir()
        save(self, folder)

    bench.patch.setattr(LiveRun, "save_ledger", blocked)
    return "ledgers off, " + complete(bench.train(save_strategy="steps", save_steps=6))


def clock(ticks: Callable[[int], float]) -> Callable[[Bench], str]:
    def inject(bench: Bench) -> str:
        count = [0]

        def patched() -> float:
            count[0] += 1
            return ticks(count[0])

        bench.clock = patched
        record = bench.train()
        if record is not None and record.summary is not None:
            assert record.totals.wall_seconds >= 0
            assert all(step.step_seconds >= 0 for step in record.steps)
            return complete(record)
        return "measuring off, training to the end"

    return inject


def clock_that_throws(count: int) -> float:
    if count > 40:
        raise InjectedError("no clock")
    return count * 0.01


def wall_clock_in_1970(bench: Bench) -> str:
    bench.patch.setattr(time, "time", lambda: 0.0)
    measuring = bench.callback()
    measuring._wall_clock = lambda: 0.0
    return complete(bench.train(measuring))


class ThrowingSink:
    def __getattr__(self, name: str) -> Any:
        raise InjectedError(name)


def sink_throws(bench: Bench) -> str:
    return complete(bench.train(bench.callback(sinks=[ThrowingSink(), bench.sink])))


def sensor_throws(target: str) -> Callable[[Bench], str]:
    def inject(bench: Bench) -> str:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise InjectedError(target)

        bench.patch.setattr(target, fail)
        return "that sensor off, " + complete(bench.train())

    return inject


def resume_without_our_ledger(bench: Bench) -> str:
    tiny_trainer(bench.tmp_path, [], save_strategy="steps", save_steps=4, max_steps=4).train()
    trainer = tiny_trainer(bench.tmp_path, [bench.callback()], save_strategy="steps", save_steps=2, max_steps=8)
    trainer.train(resume_from_checkpoint=True)
    record = bench.record()
    assert record is not None
    assert [step.global_step for step in record.steps] == [5, 6, 7, 8]
    return "counts from the resume on, and says so"


def older_checkpoint(bench: Bench) -> str:
    trainer = tiny_trainer(bench.tmp_path, [bench.callback()], save_strategy="steps", save_steps=2, max_steps=6)
    trainer.train()
    again = tiny_trainer(bench.tmp_path, [bench.callback()], max_steps=8)
    again.train(resume_from_checkpoint=str(bench.tmp_path / "checkpoint-2"))
    record = bench.record()
    assert record is not None
    assert [step.global_step for step in record.steps if step.repeated] == [3, 4, 5, 6]
    return "4 repeated steps are waste"


def broken_ledger(bench: Bench) -> str:
    tiny_trainer(bench.tmp_path, [bench.callback()], save_strategy="steps", save_steps=2, max_steps=2).train()
    (bench.tmp_path / "checkpoint-2" / "ftcost_ledger.json").write_bytes(b"\xff\xfe{")
    tiny_trainer(bench.tmp_path, [bench.callback()], max_steps=4).train(resume_from_checkpoint=True)
    record = bench.record()
    assert record is not None
    assert [step.global_step for step in record.steps] == [3, 4]
    return "counts from the resume on, and says so"


def folder_used_again(bench: Bench) -> str:
    first = bench.train()
    assert first is not None
    second = bench.train()
    assert second is not None
    assert first.run_id != second.run_id
    return complete(second)


def callback_twice(bench: Bench) -> str:
    return complete(bench.train(bench.callback(), bench.callback(sinks=[])))


def callback_as_class(bench: Bench) -> str:
    bench.patch.setenv("WANDB_MODE", "disabled")
    return complete(bench.train(FTCostCallback))


def one_instance_in_two_trainers(bench: Bench) -> str:
    measuring = bench.callback()
    bench.train(measuring)
    return complete(bench.train(measuring))


def second_train(bench: Bench) -> str:
    model = tiny_llama()
    trainer = tiny_trainer(bench.tmp_path, [bench.callback()], model=model, max_steps=STEPS)
    trainer.train()
    trainer.train()
    assert num_hooks(model) == 0
    return complete(bench.record())


def out_of_memory_retry(bench: Bench) -> str:
    model = tiny_llama()

    def too_large(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[0] > 6:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    handle = model.register_forward_pre_hook(too_large, with_kwargs=True)
    tiny_trainer(
        bench.tmp_path, [bench.callback()], model=model, per_device_train_batch_size=7, auto_find_batch_size=True,
        max_steps=STEPS,
    ).train()  # fmt: skip
    handle.remove()
    assert num_hooks(model) == 0
    record = bench.record()
    assert record is not None
    assert len(record.out_of_memory) == 1
    return "explained, " + complete(record)


def users_error(bench: Bench) -> str:
    def fail(**kwargs: Any) -> None:
        raise InjectedError("the user's")

    model = tiny_mixtral()
    measuring = bench.callback()
    with pytest.raises(InjectedError):
        tiny_trainer(bench.tmp_path, [measuring, At(5, fail)], model=model, logging_steps=100, max_steps=STEPS).train()
    del measuring
    tiny_trainer(bench.tmp_path, [bench.callback()], model=model, max_steps=2).train()
    assert num_hooks(model) == 0
    return "the error passes, the next training begins clean"


def copies_while_training(bench: Bench) -> str:
    def copy_it(model: Any, **kwargs: Any) -> None:
        twin = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        for each in (twin, loaded):
            each(input_ids=torch.ones(1, 4, dtype=torch.long))

    return complete(bench.train(bench.callback(), At(5, copy_it)))


def odd_batches(bench: Bench) -> str:
    """Arguments of a forward that no counter expects."""
    from ftcost_callback.forward_window import ForwardWindow

    opens = ForwardWindow.opens

    def odd(self: Any, args: Any, kwargs: Any) -> None:
        strange = {"attention_mask": torch.ones(3), "labels": torch.ones(2, 2, 2), "position_ids": "x"}
        opens(self, args, {**kwargs, **strange})

    bench.patch.setattr(ForwardWindow, "opens", odd)
    return complete(bench.train())


# --- faults that end the process, or need one of their own ------------------------------------------------------------

CHILD = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch
from tiny_runs import FakeClock, tiny_llama, tiny_trainer
from transformers import TrainerCallback
from ftcost_callback import FTCostCallback
from ftcost_callback.gpu_sampler import TorchDevice
from ftcost_callback.live_run import LiveRun
import ftcost_callback.gpu_watch as gpu_watch

clock = FakeClock()

class Work(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        clock.pass_seconds(0.3)
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 10:
            at_step_10()

def at_step_10():
    pass

def with_nvml():
    gpu_watch.TorchDevice.of = classmethod(lambda cls, device: TorchDevice(uuid="7"))
    begin = LiveRun._attach_counters
    def begin_with_sampler(self, model, notes):
        begin(self, model, notes)
        self._gpu.start(None, period_seconds=0.5, notes=notes)
    LiveRun._attach_counters = begin_with_sampler

{code}

measuring = FTCostCallback(sinks=SINKS if "SINKS" in globals() else [], predict=False)
measuring._clock = clock
trainer = tiny_trainer(Path({output!r}), [measuring, Work()], max_steps=12, logging_steps=100)
trainer.train()
print("TRAINED", trainer.state.global_step)
"""


def child(bench: Bench, code: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], float]:
    program = CHILD.format(tests=str(Path(__file__).parent), output=str(bench.tmp_path), code=code)
    begun = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true", **environment},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    return ended, time.monotonic() - begun


def killed_by(number: int) -> Callable[[Bench], str]:
    def inject(bench: Bench) -> str:
        code = f"def at_step_10():\n    os.kill(os.getpid(), {number})"
        ended, _ = child(bench, code)
        assert ended.returncode == -number, ended.stderr
        record = bench.record()
        assert record is not None
        lost = (10 - len(record.steps)) * 0.3
        assert lost <= FLUSH_SECONDS
        assert record.num_unread_lines == 0
        return f"{lost:.1f} s of rows lost"

    return inject


def nvml(script: str, note: str | None, at_step_10: str = "") -> Callable[[Bench], str]:
    """The real nvidia-ml-py on the stand-in library."""

    def inject(bench: Bench) -> str:
        library = bench.tmp_path / "library"
        library.mkdir()
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library / "libnvidia-ml.so.1"), str(SOURCE)], check=True)
        file = bench.tmp_path / "script"
        file.write_text(script.replace(";", "\n"))
        code = "with_nvml()"
        if at_step_10:
            changed = at_step_10.replace(";", "\n")
            code += (
                f"\ndef at_step_10():\n    import time\n    open({str(file)!r}, 'w').write({changed!r})\n    time.sleep(1.2)"
            )
        ended, seconds = child(
            bench, code, LD_LIBRARY_PATH=str(library), NVML_SCRIPT=str(file), NVML_CALLS=str(bench.tmp_path / "calls")
        )
        assert "TRAINED 12" in ended.stdout, ended.stderr
        assert ended.returncode == 0
        assert seconds < 240  # the hang is 300 s; a busy machine takes a minute to import torch
        if note is not None:
            said = (read_run(bench.tmp_path).sessions[0].notes or []) + ended.stderr.splitlines()
            assert any(note in line for line in said), said
        return complete(bench.record())

    return inject


def no_nvml(bench: Bench) -> str:
    ended, _ = child(bench, "with_nvml()", LD_LIBRARY_PATH=str(bench.tmp_path))
    assert "TRAINED 12" in ended.stdout, ended.stderr
    (note,) = read_run(bench.tmp_path).sessions[0].notes or []
    assert note.startswith("no GPU figures: NVML does not start")
    return complete(bench.record())


KILLED_CORE = """
import wandb
from ftcost_callback.sinks import WandbSink
wandb.init(mode="offline", dir={folder!r})
SINKS = [WandbSink()]

def at_step_10():
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name = (entry / "comm").read_text().strip()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if name.startswith("wandb-core") and parent == os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)
                print("KILLED", flush=True)
"""


def killed_wandb_core(bench: Bench) -> str:
    pytest.importorskip("wandb")
    ended, _ = child(
        bench, KILLED_CORE.format(folder=str(bench.tmp_path)), WANDB_MODE="offline", WANDB_ERROR_REPORTING="false"
    )
    assert "KILLED" in ended.stdout, ended.stderr
    assert "TRAINED 12" in ended.stdout, ended.stderr
    return complete(bench.record())


@dataclass(frozen=True)
class Fault:
    name: str
    where: str
    inject: Callable[[Bench], str]
    most_warnings: int = 1


READINGS = "uuid 7;busy 50;memory 1e9;power_mw 3e5;energy_mj 1e6"
FAULTS = [
    Fault("exception in on_init_end", "open_run_or_offline", in_init_end),
    Fault("exception in on_train_begin", "LiveRun.begin", in_event("begin")),
    Fault("exception in on_step_begin", "LiveRun.step_begins", in_event("step_begins")),
    Fault("exception in on_substep_end", "LiveRun.micro_batch_ends", in_event("micro_batch_ends")),
    Fault("exception in on_pre_optimizer_step", "LiveRun.optimizer_begins", in_event("optimizer_begins")),
    Fault("exception in on_optimizer_step", "LiveRun.optimizer_ends", in_event("optimizer_ends")),
    Fault("exception in on_step_end", "LiveRun.step_ends", in_event("step_ends")),
    Fault("exception in on_epoch_end", "LiveRun.wait_for_steps", in_event("wait_for_steps")),
    Fault("exception in on_log", "LiveRun.pause", in_event("pause", "log")),
    Fault("exception in on_evaluate", "LiveRun.pause", in_event("pause", "eval")),
    Fault("exception in on_save", "LiveRun.pause", in_event("pause", "save")),
    Fault("exception in on_train_end", "LiveRun.end", in_event("end")),
    Fault("device full", "write(2) to /dev/full", full_device),
    Fault("tmpfs full", "16 KiB tmpfs", full_tmpfs),
    Fault("file size limit", "RLIMIT_FSIZE", over_the_file_size_limit),
    Fault("read-only folder", "mkdir(2)", read_only_folder),
    Fault("_ftcost is a file", "mkdir(2)", folder_is_a_file),
    Fault("run.jsonl is a folder", "open(2)", record_is_a_folder),
    Fault("foreign bytes in run.jsonl", "the file", foreign_bytes_in_the_record, 0),
    Fault("record deleted in mid-run", "unlink(2)", record_deleted),
    Fault("descriptor closed under us", "close(2)", descriptor_closed),
    Fault("ledger cannot be written", "the checkpoint", ledger_in_the_way),
    Fault("clock runs backwards", "the clock", clock(lambda count: 1e6 - count * 10.0), 0),
    Fault("clock stands still", "the clock", clock(lambda count: 7.0), 0),
    Fault("clock jumps by a year", "the clock", clock(lambda count: count * 0.01 + (3e7 if count > 60 else 0)), 0),
    Fault("clock throws", "the clock", clock(clock_that_throws), 2),  # the part that read it first, then measuring itself
    Fault("wall clock in 1970", "time.time", wall_clock_in_1970, 0),
    Fault("sink throws", "the sink", sink_throws, 2),  # what failed, and that the sink is off
    Fault("token tensors fail", "torch.count_nonzero", sensor_throws("torch.count_nonzero")),
    Fault("forward with odd arguments", "the model's kwargs", odd_batches),
    Fault("NVML missing", "the loader", no_nvml, 0),
    Fault("NVML hangs for 300 s", "nvmlDeviceGetUtilizationRates", nvml(f"{READINGS};hang 300", None), 0),
    Fault(
        "GPU is lost in mid-run",
        "every NVML call",
        nvml(READINGS, "GPU is lost", f"{READINGS};nvmlDeviceGetUtilizationRates 15;nvmlDeviceGetMemoryInfo 15"),
        0,
    ),
    Fault(
        "utilisation not supported", "nvmlDeviceGetUtilizationRates",
        nvml(f"{READINGS};nvmlDeviceGetUtilizationRates 3", None), 0,
    ),
    Fault("wandb-core killed", "SIGKILL to its process", killed_wandb_core, 0),
    Fault("SIGINT", "the process", killed_by(signal.SIGINT), 0),
    Fault("SIGTERM", "the process", killed_by(signal.SIGTERM), 0),
    Fault("SIGKILL", "the process", killed_by(signal.SIGKILL), 0),
    Fault("out of memory, retried", "the model's forward", out_of_memory_retry),
    Fault("the user's own error", "another callback", users_error),  # what it had cost is said
    Fault("resume without our ledger", "the checkpoint", resume_without_our_ledger),
    Fault("resume from an older checkpoint", "the checkpoint", older_checkpoint, 0),
    Fault("broken ledger", "the checkpoint", broken_ledger),
    Fault("folder used again for a new run", "output_dir", folder_used_again, 0),
    Fault("callback given twice", "callbacks=", callback_twice),
    Fault("callback given as a class", "callbacks=", callback_as_class, 0),
    Fault("one instance in two Trainers", "callbacks=", one_instance_in_two_trainers, 0),
    Fault("second train()", "the Trainer", second_train, 0),
    Fault("model copied and pickled while training", "the model", copies_while_training, 0),
]  # fmt: skip


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[tuple[str, str, str]]]:
    rows: list[tuple[str, str, str]] = []
    yield rows
    widths = [max((len(row[place]) for row in rows), default=0) for place in range(3)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("", *lines, sep="\n")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_training_ends_as_without_us(
    fault: Fault,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    table: list[tuple[str, str, str]],
) -> None:
    threads = {thread.name for thread in threading.enumerate()}
    result = fault.inject(Bench(tmp_path, monkeypatch))
    monkeypatch.undo()
    warnings = [each.getMessage() for each in caplog.records if each.name.startswith("ftcost") and each.levelno >= 30]
    assert len(warnings) <= fault.most_warnings, warnings
    assert not {thread.name for thread in threading.enumerate() if thread.name.startswith("ftcost")} - threads
    table.append((fault.name, fault.where, result))


def test_the_matrix_has_forty_rows_with_a_name_each() -> None:
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
