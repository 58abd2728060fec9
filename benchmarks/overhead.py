"""What the callback costs, measured on this machine: by part, in pairs with and without it, and beside other tools.

    python benchmarks/overhead.py [--model moe|dense] [--steps 200] [--pairs 4] [--json FILE] [--million]

``parts``: processor time of the training thread inside our events and hooks, one training in the middle of everything
else, mean a step. It is what the target is about: under 0.5 % of a 50 ms step, 250 us, with every sensor on.
``of_which_timing_itself``: what the same calls show in a training of its own where they do nothing; it is not taken off.
``pairs``: whole trainings in the order A B A B ..., median difference a step; a shared machine moves this by more than
the effect. ``sampler``: processor time of one GPU sample on the stand-in NVML library, at the default two a second.
``host_reads``: operators that wait for a device, with and without the callback. ``--million``: a million steps through
recorder and run record. Other tools are measured where they are installed (codecarbon, trackio, nvitop).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

TARGET_STEP_SECONDS = 0.05
TARGET_SHARE = 0.005
VOCABULARY = 128
STAND_IN = Path(__file__).parent.parent / "tests" / "callback" / "nvml_stand_in" / "nvml.c"
EVENTS = (
    "on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log",
)  # fmt: skip


def make_model(kind: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "moe":
        return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=8, num_experts_per_tok=2))
    return LlamaForCausalLM(LlamaConfig(**sizes))


class Rows:
    """Sequences of 8 to 39 tokens."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, place: int) -> dict[str, list[int]]:
        length = 8 + place % 32
        ids = [1 + (7 * place + position) % (VOCABULARY - 1) for position in range(length)]
        return {"input_ids": ids, "labels": ids}


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    import torch

    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, fill: int) -> Any:
        return torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def make_trainer(kind: str, steps: int, folder: str, callbacks: list[Any], **arguments: Any) -> Any:
    import torch
    from transformers import Trainer, TrainingArguments

    torch.set_num_threads(1)
    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": 4, "max_steps": steps, "logging_steps": 50,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    return Trainer(
        model=make_model(kind), args=TrainingArguments(**(fields | arguments)), train_dataset=Rows(), data_collator=collate,
        callbacks=callbacks,
    )  # fmt: skip


def our_callback(**settings: Any) -> Any:
    from ftcost_callback import FTCostCallback
    from ftcost_callback.sinks import InMemorySink

    return FTCostCallback(**({"usd_per_gpu_hour": 2.0, "budget_usd": 100.0, "sinks": [InMemorySink()]} | settings))


# --- by part ----------------------------------------------------------------------------------------------------------


@contextmanager
def timed(targets: list[tuple[Any, str, str]]) -> Iterator[dict[str, list[int]]]:
    """Nanoseconds of the calling thread in each call of the methods (owner, name, part)."""
    calls: dict[str, list[int]] = defaultdict(list)
    originals = [(owner, name, owner.__dict__[name]) for owner, name, _ in targets]

    def wrap(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        into, clock = calls[part], time.thread_time_ns

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begun = clock()
            try:
                return function(*args, **kwargs)
            finally:
                into.append(clock() - begun)

        return wrapped

    for owner, name, part in targets:
        setattr(owner, name, wrap(getattr(owner, name), part))
    try:
        yield calls
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def microseconds_by_part(calls: dict[str, list[int]], steps: int) -> dict[str, float]:
    """Means of a step, since steps are settled some at once and reports come now and then; the first call of each part
    warms up."""
    return {part: sum(each[1:]) / 1e3 / (steps - 1) for part, each in calls.items() if len(each) > 1}


def timing_itself(kind: str, steps: int) -> float:
    """Microseconds a step that timing shows of as many calls that do nothing, in the same places, with nothing of ours."""
    from transformers import TrainerCallback

    from ftcost_callback.expert_sites import find_expert_sites

    class Nothing(TrainerCallback):
        """The events, and the hooks' calls."""

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None: ...

    class Hook:
        __call__ = nothing

    for event in EVENTS:
        setattr(Nothing, event, nothing)
    targets = [(Nothing, event, event) for event in EVENTS] + [(Hook, "__call__", "hooks")]
    with tempfile.TemporaryDirectory() as folder, timed(targets) as calls:
        trainer = make_trainer(kind, steps, folder, [Nothing()])
        trainer.model.register_forward_pre_hook(Hook(), with_kwargs=True)
        trainer.model.register_forward_hook(Hook(), always_call=True)
        for site in find_expert_sites(trainer.model):
            site.hooked.register_forward_pre_hook(Hook(), with_kwargs=True)
        trainer.train()
    return sum(microseconds_by_part(calls, steps).values())


def by_part(kind: str, steps: int) -> dict[str, Any]:
    from ftcost_callback import FTCostCallback
    from ftcost_callback.expert_load import ArgumentHook
    from ftcost_callback.forward_window import _CloseHook, _OpenHook

    targets: list[tuple[Any, str, str]] = [(FTCostCallback, event, event) for event in EVENTS]
    targets += [(_OpenHook, "__call__", "forward opens"), (_CloseHook, "__call__", "forward closes")]
    targets += [(ArgumentHook, "__call__", "experts (a hook of each layer)")]
    with tempfile.TemporaryDirectory() as folder, timed(targets) as calls:
        trainer = make_trainer(kind, steps, folder, [our_callback(predict=False)])
        begun = time.process_time()
        trainer.train()
        step_seconds = (time.process_time() - begun) / steps
    mean = microseconds_by_part(calls, steps)
    total = sum(mean.values())
    return {
        "microseconds_per_step": {part: round(each, 1) for part, each in mean.items()},
        "total_microseconds_per_step": round(total, 1),
        "of_which_timing_itself": round(timing_itself(kind, steps), 1),
        "share_of_a_50_ms_step": round(total / 1e6 / TARGET_STEP_SECONDS, 5),
        "target_share": TARGET_SHARE,
        "step_processor_seconds": round(step_seconds, 5),
        "microseconds_of_a_small_torch_addition_here": round(reference_microseconds(), 2),
        "predictions_milliseconds_once": round(prediction_milliseconds(trainer), 1),
    }


def prediction_milliseconds(trainer: Any) -> float:
    """One estimate of this job: it is asked twice in a run."""
    from costmodel.estimation import estimate
    from ftcost_callback.trainer_adapter import job_from_objects

    job = job_from_objects(model=trainer.model, args=trainer.args, optimizer=trainer.optimizer, state=trainer.state)
    job["max_length"] = 64
    begun = time.thread_time()
    estimate(job)
    return (time.thread_time() - begun) * 1e3


def reference_microseconds() -> float:
    """How fast this machine is now: one addition of 8 x 8 numbers, to hold other machines' figures against."""
    import torch

    first = torch.ones(8, 8)
    samples = []
    for _ in range(20):
        begun = time.thread_time_ns()
        for _ in range(1000):
            torch.add(first, first)
        samples.append((time.thread_time_ns() - begun) / 1e6)
    return statistics.median(samples)


# --- in pairs ---------------------------------------------------------------------------------------------------------


def contenders() -> dict[str, Callable[[], tuple[list[Any], dict[str, Any]]]]:
    """Name -> (callbacks, arguments); only what is installed."""
    found: dict[str, Callable[[], tuple[list[Any], dict[str, Any]]]] = {
        "ftcost": lambda: ([our_callback()], {}),
        "include_num_input_tokens_seen": lambda: ([], {"include_num_input_tokens_seen": "all"}),
    }
    if importlib.util.find_spec("codecarbon"):
        found["codecarbon"] = lambda: ([], {"report_to": "codecarbon"})
    if importlib.util.find_spec("trackio"):
        found["trackio"] = lambda: ([], {"report_to": "trackio", "trackio_static_space_id": False})
    if importlib.util.find_spec("nvitop"):
        found["nvitop"] = lambda: ([nvitop_callback()], {})
    return found


def nvitop_callback() -> Any:
    """nvitop's collector in its own thread, as its documentation uses it: of the host alone where there is no GPU."""
    from nvitop import ResourceMetricCollector
    from transformers import TrainerCallback

    class Collect(TrainerCallback):
        is_on = True

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.daemon = ResourceMetricCollector(interval=0.5).daemonize(lambda metrics: self.is_on)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.is_on = False  # or it goes on into the runs that are to have nothing
            self.daemon.join()

    return Collect()


def in_pairs(kind: str, steps: int, pairs: int) -> dict[str, Any]:
    """Processor seconds of the process a step: each contender against nothing, in turn."""

    def seconds(callbacks: list[Any], arguments: dict[str, Any]) -> float:
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(kind, steps, folder, callbacks, **arguments)
            begun = time.process_time()
            trainer.train()
            return (time.process_time() - begun) / steps

    seconds([], {})  # warms up
    results = {}
    for name, make in contenders().items():
        differences, without = [], []
        try:
            for _ in range(pairs):
                without.append(seconds([], {}))
                differences.append(seconds(*make()) - without[-1])
        except Exception as error:  # another tool that does not run here is no reason to lose the rest
            results[name] = {"failed": f"{type(error).__name__}: {error}"}
            continue
        results[name] = {
            "microseconds_per_step": round(statistics.median(differences) * 1e6, 1),
            "range": [round(each * 1e6, 1) for each in (min(differences), max(differences))],
            "of_a_step_of_microseconds": round(statistics.median(without) * 1e6, 1),
        }
    return results


# --- sampler, host reads, a million steps -----------------------------------------------------------------------------

SAMPLER_CHILD = """
import time
from ftcost_callback.gpu_sampler import GpuSampler, TorchDevice
sampler = GpuSampler(TorchDevice(uuid="7"))
sampler.open()
sampler.sample()
begun = time.thread_time()
for _ in range(500):
    sampler.sample()
print((time.thread_time() - begun) / 500)
"""


def sampler_share() -> dict[str, Any] | None:
    """Share of one core that sampling takes, on the stand-in library (whose script file costs more than a driver call)."""
    if shutil.which("gcc") is None or not STAND_IN.exists():
        return None
    with tempfile.TemporaryDirectory() as folder:
        library, script = Path(folder) / "libnvidia-ml.so.1", Path(folder) / "script"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(STAND_IN)], check=True)
        script.write_text("uuid 7\ngpm 1\n")
        environment = {**os.environ, "LD_LIBRARY_PATH": folder, "NVML_SCRIPT": str(script)}
        said = subprocess.run(
            [sys.executable, "-c", SAMPLER_CHILD], env=environment, capture_output=True, text=True, check=True
        )
    seconds = float(said.stdout)
    return {"microseconds_per_sample": round(seconds * 1e6, 1), "share_of_a_core": round(2 * seconds, 6), "target": 0.002}


def host_reads(kind: str) -> dict[str, int]:
    """Operators that wait for a device in eight steps, without and with us."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Spy(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            waiting = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "bincount", "masked_select")
            self.count += function.overloadpacket.__name__ in waiting
            return function(*args, **(kwargs or {}))

    counts = {}
    for name, callbacks in (("without", []), ("with", [our_callback()])):
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(kind, 8, folder, callbacks)
            with Spy() as spy:
                trainer.train()
        counts[name] = spy.count
    return counts


def many_steps(steps: int) -> dict[str, Any]:
    """Recorder and run record over many steps: memory held, bytes written, microseconds a step."""
    from ftcost_callback.recorder import StepRecorder
    from ftcost_callback.records import Step, TokenCounts
    from ftcost_callback.run_file import RunFile, StepThinner, run_file_path

    now = [0.0]
    recorder, tokens = StepRecorder(lambda: now[0]), TokenCounts(num_tokens=4096, num_non_padding_tokens=3000, num_samples=4)
    recorder.start()
    held: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        file, thinner = RunFile(run_file_path(folder)), StepThinner()
        tracemalloc.start()
        begun = time.process_time()
        for global_step in range(1, steps + 1):
            now[0] += 0.05
            timing = recorder.step(global_step, tokens=tokens)
            row = thinner.add(
                Step(
                    global_step=global_step, session_index=0, step_seconds=timing.step_seconds, num_tokens=4096,
                    elapsed_seconds=timing.elapsed_seconds,
                )
            )  # fmt: skip
            if row is not None:
                file.append(row)
            if global_step % 20 == 0:
                file.flush()
            if global_step in (steps // 10, steps):
                held[global_step] = tracemalloc.get_traced_memory()[0]
        seconds = time.process_time() - begun
        tracemalloc.stop()
        file.close()
        size = file.path.stat().st_size
    return {
        "steps": steps,
        "bytes_held_after_a_tenth_and_all": list(held.values()),
        "file_bytes": size,
        "microseconds_per_step_traced": round(seconds / steps * 1e6, 1),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("moe", "dense"), default="moe")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--million", action="store_true", help="also a million steps through recorder and record")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    given = parser.parse_args(arguments)
    results: dict[str, Any] = {
        "model": given.model,
        "parts": by_part(given.model, given.steps),
        "pairs": in_pairs(given.model, given.steps, given.pairs) if given.pairs else None,
        "sampler": sampler_share(),
        "host_reads": host_reads(given.model),
        "many_steps": many_steps(1_000_000 if given.million else 20_000),
    }
    text = json.dumps(results, indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
