"""How the tools hold up on very large inputs: wall seconds and peak memory of each, in a process of its own.

    python benchmarks/scale.py [--steps 1000000] [--jobs 10000] [--lengths 10000000] [--write docs/scale.md]

``report``: one HTML page of a run whose record has a row for every step (the callback itself writes some 50,000 step rows
at most). ``report, experts``: a page of 200 expert-load rows of 100 layers x 512 experts. ``sweep``: ``ftcost estimate
jobs.jsonl``. ``lengths``: ``--lengths file:...`` with a sample a line. ``expert counter``: counting in one forward of a
model of 100 layers x 512 experts whose layers do nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "callback"), str(ROOT / "benchmarks")]

NUM_LAYERS, NUM_EXPERTS, EXPERTS_PER_TOKEN, NUM_TOKENS = 100, 512, 10, 4096
NUM_EXPERT_ROWS = 200
REPORT_TARGET_SECONDS = 10.0
FTCOST = "from ftcost_callback.cli import main; main()"


@dataclass(frozen=True, slots=True)
class Measured:
    """One task: what it was given, what it took, and the bar if it has one."""

    name: str
    size: str
    wall_seconds: float
    processor_seconds: float
    peak_bytes: int
    note: str = ""
    target_seconds: float | None = None

    def row(self) -> str:
        target = f"{self.target_seconds:g} s" if self.target_seconds is not None else ""
        peak = f"{self.peak_bytes / 2**20:,.0f} MiB"
        took = f"{self.wall_seconds:.1f} s | {self.processor_seconds:.1f} s"
        return f"| {self.name} | {self.size} | {took} | {target} | {peak} | {self.note} |"


def in_child(code: str, arguments: Sequence[str] = ()) -> tuple[float, float, int, str]:
    """(wall seconds, processor seconds, peak bytes, stdout) of a Python child that runs ``code``. Raises where it fails."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.perf_counter()
        child = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=out, stderr=err, cwd=ROOT)
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - start
        out.seek(0)
        err.seek(0)
        if os.waitstatus_to_exitcode(status) != 0:
            raise SystemExit(f"{arguments} failed:\n{err.read().decode()}")
        return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, out.read().decode()


def report_of_steps(folder: Path, num_steps: int) -> Measured:
    from synthetic_run import long_run, write_rows  # type: ignore[import-not-found]

    record, page = write_rows(folder / "steps.jsonl", long_run(num_steps)), folder / "steps.html"
    wall, processor, peak, _ = in_child(FTCOST, ["report", str(record), "--html", str(page)])
    note = f"record {record.stat().st_size / 2**20:.0f} MiB, page {page.stat().st_size / 2**20:.1f} MiB"
    return Measured("`ftcost report --html`", f"{num_steps:,} steps", wall, processor, peak, note, REPORT_TARGET_SECONDS)


def expert_rows(num_rows: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(0)
    yield {
        "type": "session", "run_id": "experts", "session_index": 0, "started_at": "2026-08-18T08:00:00Z",
        "job": {"model": "experts"}, "startup_seconds": 2.0,
    }  # fmt: skip
    for place in range(1, num_rows + 1):
        step = 10 * place
        yield {"type": "step", "global_step": step, "session_index": 0, "step_seconds": 1.0, "num_tokens": NUM_TOKENS}
        yield {
            "type": "expert_load", "global_step": step, "num_experts_per_tok": EXPERTS_PER_TOKEN, "status": "recorded",
            "layer_names": [f"layers.{layer}.mlp.experts" for layer in range(NUM_LAYERS)],
            "tokens_per_expert": [[rng.randrange(160) for _ in range(NUM_EXPERTS)] for _ in range(NUM_LAYERS)],
        }  # fmt: skip


def report_of_experts(folder: Path) -> Measured:
    from synthetic_run import write_rows

    record, page = write_rows(folder / "experts.jsonl", expert_rows(NUM_EXPERT_ROWS)), folder / "experts.html"
    wall, processor, peak, _ = in_child(FTCOST, ["report", str(record), "--html", str(page)])
    note = f"record {record.stat().st_size / 2**20:.0f} MiB, page {page.stat().st_size / 2**20:.1f} MiB"
    size = f"{NUM_EXPERT_ROWS} x {NUM_LAYERS} layers x {NUM_EXPERTS} experts"
    return Measured("`ftcost report --html`, expert load", size, wall, processor, peak, note, REPORT_TARGET_SECONDS)


def sweep(folder: Path, num_jobs: int) -> Measured:
    from speed import jobs  # type: ignore[import-not-found]

    distinct = jobs(min(num_jobs, 2_000))
    path = folder / "jobs.jsonl"
    with path.open("w") as file:
        for place in range(num_jobs):
            job = distinct[place % len(distinct)]
            file.write(json.dumps({**job, "num_samples": 1000 + place}) + "\n")
    wall, processor, peak, out = in_child(FTCOST, ["estimate", str(path)])
    answers = [json.loads(line) for line in out.splitlines()]
    assert len(answers) == num_jobs
    assert not any("error" in answer for answer in answers)
    return Measured(
        "`ftcost estimate jobs.jsonl`", f"{num_jobs:,} jobs", wall, processor, peak, f"{1e3 * wall / num_jobs:.2f} ms a job"
    )


def length_file(folder: Path, num_lengths: int) -> Measured:
    rng = random.Random(0)
    path = folder / "lengths.txt"
    some = [min(2048, max(8, round(rng.lognormvariate(5.8, 0.6)))) for _ in range(100_000)]
    block = "".join(f"{length}\n" for length in some)
    with path.open("w") as file:
        for _ in range(num_lengths // len(some)):
            file.write(block)
    job = ["-m", "meta-llama/Llama-2-7b-hf", "-g", "L40S", "--method", "lora", "--bf16", "-b", "8", "--seq-len", "2048"]
    arguments = [
        "estimate",
        *job,
        "--gradient-checkpointing",
        "--lengths",
        f"file:{path}",
        "--framework",
        "transformers",
        "--json",
    ]
    wall, processor, peak, out = in_child(FTCOST, arguments)
    assert json.loads(out)["step_seconds"] > 0
    return Measured(
        "`--lengths file:...`",
        f"{num_lengths:,} samples",
        wall,
        processor,
        peak,
        f"file {path.stat().st_size / 2**20:.0f} MiB",
    )


COUNTER = f"""
import json, resource, time
import torch
from torch import nn
torch.set_num_threads(1)
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from ftcost_callback.expert_load import ExpertLoadCounter
from ftcost_callback.forward_window import ForwardWindow

config = Qwen3MoeConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, moe_intermediate_size=4, num_hidden_layers={NUM_LAYERS},
    num_attention_heads=1, num_key_value_heads=1, head_dim=16, num_experts={NUM_EXPERTS},
    num_experts_per_tok={EXPERTS_PER_TOKEN}, decoder_sparse_step=1, mlp_only_layers=[],
)
model = Qwen3MoeForCausalLM(config)
ids = torch.randint(0, 64, (4, {NUM_TOKENS} // 4))

def forward():
    start = time.process_time()
    model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss.backward()
    return time.process_time() - start

forward()
without = min(forward() for _ in range(2))
counter = ExpertLoadCounter()
window = ForwardWindow(counter.open_forward, counter.close_forward, lambda error: None)
counter.attach(model)
window.attach(model)
with_it = min(forward() for _ in range(2))
load = counter.take(4)
assert load.status == "recorded", load
assert all(sum(row) == 2 * {NUM_TOKENS} * {EXPERTS_PER_TOKEN} for row in load.tokens_per_expert), "counts"
held = sum(
    each.element_size() * each.nelement() for each in vars(counter).values() if isinstance(each, torch.Tensor)
)
print(json.dumps({{"without": without, "with": with_it, "held": held}}))
"""


def expert_counter() -> Measured:
    wall, processor, peak, out = in_child(COUNTER)
    said = json.loads(out.splitlines()[-1])
    share = said["with"] / said["without"] - 1
    note = f"step {said['without']:.1f} s of processor time without, {said['with']:.1f} s with ({share:+.0%}); on a CPU"
    size = f"{NUM_TOKENS:,} tokens, {NUM_LAYERS} layers x {NUM_EXPERTS} experts"
    return Measured("expert counter", size, wall, processor, peak, note)


def document(results: Sequence[Measured]) -> str:
    load = f"load {os.getloadavg()[0]:.1f}"
    return "\n".join(
        [
            "# Scale",
            "",
            "Written by `python benchmarks/scale.py --write docs/scale.md`: very large inputs, each in its own process.",
            f"{datetime.date.today().isoformat()}; {os.cpu_count()} cores, {platform.machine()}, {load}; "
            f"Python {platform.python_version()}.",
            "",
            "| what | size | wall | processor | target | peak memory | |",
            "|---|---|---|---|---|---|---|",
            *(each.row() for each in results),
            "",
            "The record of the first row has a row for each step, which the callback never writes: after 50,000 steps a row",
            "stands for several.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--lengths", type=int, default=10_000_000)
    parser.add_argument("--write", type=Path, help="write the table here too")
    given = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for task in (
            lambda: report_of_steps(folder, given.steps),
            lambda: report_of_experts(folder),
            lambda: sweep(folder, given.jobs),
            lambda: length_file(folder, given.lengths),
            expert_counter,
        ):
            results.append(task())
            print(results[-1].row(), flush=True)
    if given.write is not None:
        given.write.write_text(document(results), encoding="utf-8")


if __name__ == "__main__":
    main()
