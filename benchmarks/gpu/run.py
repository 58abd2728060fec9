"""One command for anyone with an NVIDIA card: facts that only a card can tell, and a dozen trainings predicted and measured.

    python benchmarks/gpu/run.py

writes ``accuracy/data/gpu/<card>-<date>.json``: please send it as a pull request. It takes about ten minutes on a card of
24 GB or more; a job that does not fit is recorded as such. ``--device cpu --tiny`` goes through all of it without a card.

Sections (``--only`` takes some of them): ``facts`` NVML's answers, how long each call takes, the energy counter's steps, and
GPM's activity beside the measured FLOP/s of a bf16 product; ``clock`` our event clock against a host that waits after each
step; ``overhead`` steps with and without the callback, A B A B; ``jobs`` the trainings, each in its own process.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

from jobs import JOBS, GpuJob, make_model, measured, rows

ROOT: Final = Path(__file__).resolve().parent.parent.parent
SECTIONS: Final = ("facts", "clock", "overhead", "jobs")
JOB_TIMEOUT_SECONDS: Final = 900


# --- facts ------------------------------------------------------------------------------------------------------------


def facts(device: str, *, tiny: bool) -> dict[str, Any]:
    """Software, device, and what NVML says of it while it works."""
    import torch

    from ftcost_callback.trainer_adapter import device_facts, versions

    found: dict[str, Any] = {"versions": versions(), "device": device_facts(device)}
    found["matmul"] = matmul_rate(device, seconds=0.2 if tiny else 3.0)
    if device == "cpu":
        found["nvml"] = None
        return found
    properties = torch.cuda.get_device_properties(device)
    found["torch_device"] = {
        name: str(getattr(properties, name))
        for name in ("name", "uuid", "pci_bus_id", "pci_device_id", "pci_domain_id", "total_memory", "multi_processor_count")
        if hasattr(properties, name)
    }
    found["environment"] = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")}
    found["nvml"] = nvml_facts(device)
    return found


def matmul_rate(device: str, *, seconds: float) -> dict[str, Any]:
    """FLOP/s of large bf16 products, and what a sampler saw meanwhile."""
    import torch

    size = 512 if device == "cpu" else 8192
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    right = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    sampler = _sampler(device)
    _wait(device)
    begun, count = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        for _ in range(10):
            torch.mm(left, right)
        count += 10
        _wait(device)
    taken = time.monotonic() - begun
    sample = None
    if sampler is not None:
        window = sampler.take_window()
        sample = {name: getattr(window, name) for name in window.__slots__ if getattr(window, name) is not None}
        sampler.close()
    return {"size": size, "flops_per_second": 2 * size**3 * count / taken, "seconds": taken, "sampled": sample}


def _sampler(device: str) -> Any:
    if device == "cpu":
        return None
    import torch

    from ftcost_callback.gpu_sampler import GpuSampler, GpuUnavailableError, TorchDevice

    sampler = GpuSampler(TorchDevice.of(torch.device(device)), period_seconds=0.2)
    try:
        sampler.open()
    except GpuUnavailableError:
        return None
    sampler.start()
    return sampler


def nvml_facts(device: str) -> dict[str, Any]:
    """The look-up by UUID, each reading with its time, and the energy counter's resolution."""
    import pynvml
    import torch

    from ftcost_callback.gpu_sampler import GpuSampler, GpuUnavailableError, TorchDevice

    torch_device = TorchDevice.of(torch.device(device))
    sampler = GpuSampler(torch_device)
    try:
        sampler.open()
    except GpuUnavailableError as unavailable:
        return {"unavailable": str(unavailable)}
    handle = sampler._handle
    calls: dict[str, Callable[[], Any]] = {
        "utilization": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used,
        "power_milliwatts": lambda: pynvml.nvmlDeviceGetPowerUsage(handle),
        "energy_millijoules": lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle),
        "throttle_reasons": lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        "sm_clock": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "power_limit_milliwatts": lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle),
        "gpm_supported": lambda: pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice,
        "utilization_samples": lambda: len(pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, 0)[1]),
        "compute_processes": lambda: len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)),
    }
    readings = {name: _timed_reading(call) for name, call in calls.items()}
    found = {
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "nvidia_ml_py": importlib.metadata.version("nvidia-ml-py"),
        "name": pynvml.nvmlDeviceGetName(handle),
        "uuid": pynvml.nvmlDeviceGetUUID(handle),
        "asked_for": {"uuid": torch_device.uuid, "pci": torch_device.pci_bus_id},
        "is_mig": sampler.is_mig,
        "index": pynvml.nvmlDeviceGetIndex(handle) if not sampler.is_mig else None,
        "readings": readings,
        "sampler_notes": sampler.notes,
        "sample_microseconds": _median_microseconds(sampler.sample, 50),
        "energy_counter": _energy_steps(calls["energy_millijoules"]),
    }
    sampler.close()
    return found


def _timed_reading(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        value = call()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"value": value, "microseconds": _median_microseconds(call, 50)}


def _median_microseconds(call: Callable[[], Any], count: int) -> float:
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return round(statistics.median(times) * 1e6, 2)


def _energy_steps(read: Callable[[], Any]) -> dict[str, Any] | None:
    """How often the counter moves, and by how much."""
    try:
        last = read()
    except Exception:
        return None
    changes: list[tuple[float, int]] = []
    begun = time.monotonic()
    while time.monotonic() - begun < 2.0:
        now = read()
        if now != last:
            changes.append((time.monotonic(), now - last))
            last = now
    gaps = [second[0] - first[0] for first, second in itertools.pairwise(changes)]
    return {
        "changes": len(changes),
        "seconds_between": statistics.median(gaps) if gaps else None,
        "millijoules": statistics.median(change for _, change in changes) if changes else None,
    }


def _wait(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


# --- the clock --------------------------------------------------------------------------------------------------------


def clock(device: str, *, tiny: bool) -> dict[str, Any]:
    """Steps that the host issues without waiting, by our clock, and the same steps by a host that waits for each."""
    import torch

    from ftcost_callback.step_clock import CudaStepClock, HostStepClock

    size, products = (128, 2) if tiny else (4096, 20)
    matrix = torch.randn(size, size, device=device)
    counts = [products * (1 + place % 3) for place in range(12)]  # steps of three lengths

    def work(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    work(products)
    _wait(device)
    waited = []
    for count in counts:
        begun = time.monotonic()
        work(count)
        _wait(device)
        waited.append(time.monotonic() - begun)

    step_clock: Any = HostStepClock() if device == "cpu" else CudaStepClock.on(torch.device(device))
    begun = time.monotonic()
    marks = []
    for count in counts:
        work(count)
        marks.append(step_clock.mark())
    issued_after = time.monotonic() - begun
    ends = [step_clock.ended_at(mark, wait=True) for mark in marks]
    steps = [end - start for start, end in zip([begun, *ends[:-1]], ends, strict=True)]
    return {
        "waited_seconds": waited,
        "clock_seconds": steps,
        "host_issued_all_after": issued_after,
        "total_ratio": sum(steps) / sum(waited),
        "largest_step_error": max(abs(ours / theirs - 1) for ours, theirs in zip(steps[1:], waited[1:], strict=True)),
    }


# --- overhead ---------------------------------------------------------------------------------------------------------


def overhead(device: str, *, tiny: bool) -> dict[str, Any]:
    """Median step of trainings with and without the callback, in turn."""
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    from ftcost_callback import FTCostCallback

    job = GpuJob(name="overhead", batch_size=2, length=16 if tiny else 512)
    steps, pairs = (6, 1) if tiny else (60, 4)
    model = make_model(job, device, tiny=tiny)
    data = rows(job, 16, model.config.vocab_size)

    class Ends(TrainerCallback):
        def __init__(self) -> None:
            self.at: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in (4, steps):
                _wait(device)
                self.at.append(time.monotonic())

    def step_seconds(callbacks: list[Any]) -> float:
        ends = Ends()
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder, per_device_train_batch_size=2, max_steps=steps, logging_steps=20, save_strategy="no",
                report_to="none", disable_tqdm=True, use_cpu=device == "cpu", logging_nan_inf_filter=False,
            )  # fmt: skip
            Trainer(
                model=model, args=arguments, train_dataset=data, data_collator=default_data_collator,
                callbacks=[*callbacks, ends],
            ).train()  # fmt: skip
        return (ends.at[1] - ends.at[0]) / (steps - 4)

    step_seconds([])
    without, with_us = [], []
    for _ in range(pairs):
        without.append(step_seconds([]))
        with_us.append(step_seconds([FTCostCallback(sinks=[], predict=False)]))
    differences = [ours - theirs for ours, theirs in zip(with_us, without, strict=True)]
    return {
        "step_seconds_without": without,
        "step_seconds_with": with_us,
        "median_difference_microseconds": statistics.median(differences) * 1e6,
    }


# --- jobs -------------------------------------------------------------------------------------------------------------


def all_jobs(device: str, *, tiny: bool, names: list[str] | None) -> list[dict[str, Any]]:
    """Each in a process of its own: memory starts from nothing, and one that does not fit harms no other."""
    results = []
    for job in JOBS:
        if names is not None and job.name not in names:
            continue
        command = [sys.executable, __file__, "--device", device, "--job", job.name, *(["--tiny"] if tiny else [])]
        print(f"{job.name} ...", file=sys.stderr, flush=True)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=JOB_TIMEOUT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            results.append({"name": job.name, "failed": f"not done after {JOB_TIMEOUT_SECONDS} s"})
            continue
        if done.returncode == 0:
            results.append(json.loads(done.stdout.splitlines()[-1]))
        else:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            results.append({"name": job.name, "failed": last[0]})
    return results


def one_job(device: str, name: str, *, tiny: bool) -> dict[str, Any]:
    job = next(each for each in JOBS if each.name == name)
    gpu = None
    if device == "cpu":
        from ftcost_callback.probe import probe_cpu

        gpu = probe_cpu(seconds=0.3, say=lambda line: None)
    return measured(job.shrunk() if tiny else job, device=device, tiny=tiny, steps=6 if tiny else 25, gpu=gpu)


def table(results: list[dict[str, Any]]) -> list[str]:
    """Measured over predicted, a line for each job."""
    lines = [f"{'job':52} {'step s':>9} {'x pred':>7} {'alloc GiB':>10} {'x pred':>7} {'reserved':>9} {'x pred':>7}"]
    for each in results:
        if "failed" in each:
            lines.append(f"{each['name']:52} failed: {each['failed']}")
            continue
        was, said = each["measured"], each["predicted"]
        columns = [
            f"{each['name']:52} {was['step_seconds_median']:9.4f}",
            _ratio(was["step_seconds_median"], said["step_seconds"]),
        ]
        for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
            amount = was[name]
            columns.append(f"{amount / 2**30:9.2f}" if amount is not None else f"{'-':>9}")
            columns.append(_ratio(amount, said[name]))
        lines.append(" ".join(columns))
    return lines


def _ratio(value: float | None, predicted: float | None) -> str:
    return f"{value / predicted:7.2f}" if value is not None and predicted else f"{'-':>7}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu")
    parser.add_argument("--tiny", action="store_true", help="shapes for any CPU: tries the command, measures nothing useful")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--jobs", nargs="+", help="names of jobs; default: all")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # the child of one job
    parser.add_argument("--out", type=Path, help="default: accuracy/data/gpu/<card>-<date>.json")
    given = parser.parse_args(arguments)
    import torch

    if given.device != "cpu":
        if not torch.cuda.is_available():
            print("no NVIDIA GPU that torch can use; --device cpu --tiny tries the command without one", file=sys.stderr)
            return 2
        torch.cuda.set_device(torch.device(given.device) if ":" in given.device else torch.device("cuda:0"))
    if given.job is not None:
        print(json.dumps(one_job(given.device, given.job, tiny=given.tiny)))
        return 0
    results: dict[str, Any] = {"schema_version": 1, "date": datetime.date.today().isoformat(), "tiny": given.tiny}
    sections: dict[str, Callable[[], Any]] = {
        "facts": lambda: facts(given.device, tiny=given.tiny),
        "clock": lambda: clock(given.device, tiny=given.tiny),
        "overhead": lambda: overhead(given.device, tiny=given.tiny),
        "jobs": lambda: all_jobs(given.device, tiny=given.tiny, names=given.jobs),
    }
    for name in given.only:
        print(f"--- {name}", file=sys.stderr, flush=True)
        try:
            results[name] = sections[name]()
        except Exception as error:  # what was measured so far is worth keeping
            results[name] = {"failed": f"{type(error).__name__}: {error}"}
    out = given.out if given.out is not None else _default_path(results, given.device)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if isinstance(results.get("jobs"), list):
        print(*table(results["jobs"]), sep="\n")
    print(f"written: {out}", file=sys.stderr)
    return 0


def _default_path(results: dict[str, Any], device: str) -> Path:
    import torch

    name = torch.cuda.get_device_name() if device != "cpu" else "cpu"
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return ROOT / "accuracy" / "data" / "gpu" / f"{plain}-{results['date']}.json"


if __name__ == "__main__":
    sys.exit(main())
