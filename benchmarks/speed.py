"""How fast an estimate is, beside other estimators, and their errors beside ours on the same public measured runs.

    python benchmarks/speed.py [--peers PYTHON] [--write docs/benchmarks.md]

``--peers``: a Python that has (some of) ftuneai, fitcheck-llm and canifinetune: python -m venv peers, then
peers/bin/pip install ftuneai fitcheck-llm canifinetune. Nothing is fetched while it runs.

Warm: ``ftcost estimate jobs.jsonl``, 1,000 different jobs against 100, so that starting cancels. Cold: each command in turn,
round after round, least wall time, beside the same Python doing nothing. Processor time stands beside, since other work on
the machine stretches the wall's. Errors: ``accuracy/``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "accuracy"))

TARGET_WARM_SECONDS = 1e-3
TARGET_COLD_SECONDS = 0.3
PACKAGES = {"ftuneai": "ftuneai", "fitcheck-llm": "fitcheck", "canifinetune": "canifinetune"}
# pip compiles what it installs: where this shell forbids Python to keep bytecode, every start would compile all of ftcost.
OFFLINE = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {"HF_HUB_OFFLINE": "1"}


# --- speed ------------------------------------------------------------------------------------------------------------


def jobs(number: int) -> list[dict[str, Any]]:
    """Different jobs: models, cards, methods, batches, ways to say the lengths."""
    models = (
        ("meta-llama/Llama-2-7b-hf", ("q_proj", "v_proj")),
        ("meta-llama/Llama-3.2-3B", "all-linear"),
        ("mistralai/Mistral-7B-v0.1", "all-linear"),
        ("mistralai/Mixtral-8x7B-v0.1", ("w1", "w2", "w3", "gate")),
        ("Qwen/Qwen-7B", ("c_attn",)),
    )
    gpus = ("A40", "A100-SXM4-80GB", "H100 SXM", "L40S", "RTX 4090")
    lengths = ({"dataset": "commonsense_15k"}, {"dataset": "math_14k"}, {"mean": 300, "max": 1500}, {"fixed": 512})
    grid = itertools.product(range(1, 21), models, gpus, lengths)
    return [
        {
            "model": model,
            "gpu": gpu,
            "method": "qlora",
            "quantization": "nf4",
            "lora_target_modules": targets,
            "bf16": True,
            "per_device_train_batch_size": size,
            "max_length": 1024,
            "lengths": said,
            "num_samples": 15_000,
            "framework": "transformers",
            "framework_version": "4.40",
        }
        for size, (model, targets), gpu, said in itertools.islice(grid, number)
    ]


def clocked(command: Sequence[str]) -> tuple[float, float]:
    """(wall, processor) seconds of a command. Raises where it fails."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=OFFLINE, cwd=ROOT, check=False)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.decode()[-500:]}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def least(commands: dict[str, Sequence[str]], rounds: int) -> dict[str, tuple[float, float]]:
    """Least wall and least processor seconds of each command; the rounds take turns, so that all meet the same machine."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            seen[name].append(clocked(command))
    return {name: (min(wall for wall, _ in times), min(cpu for _, cpu in times)) for name, times in seen.items()}


def ftcost(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from ftcost_callback.cli import main; main()", *arguments]


def warm_seconds_per_job(rounds: int) -> tuple[float, float]:
    few, many = 100, 1000
    with tempfile.TemporaryDirectory() as folder:
        commands = {}
        for number in (few, many):
            path = Path(folder) / f"{number}.jsonl"
            path.write_text("\n".join(map(json.dumps, jobs(number))) + "\n", encoding="utf-8")
            commands[str(number)] = ftcost("estimate", str(path))
        times = least(commands, rounds)
    wall, processor = (times[str(many)][which] - times[str(few)][which] for which in (0, 1))
    return wall / (many - few), processor / (many - few)


ONE_JOB = (
    *("estimate", "-m", "meta-llama/Llama-3.1-8B", "-g", "A100-SXM4-80GB", "--method", "lora", "--lora-r", "16", "--bf16"),
    *("-b", "4", "--seq-len", "2048", "--lengths", "fixed:2048", "--samples", "10000", "--gradient-checkpointing"),
)
# accelerate estimate-memory asks the hub for the model even offline: its own calculation on a local config instead.
ACCELERATE = """
from accelerate import init_empty_weights
from accelerate.utils import calculate_maximum_sizes
from transformers import AutoModelForCausalLM, LlamaConfig
shape = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
with init_empty_weights():
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=128256, **shape))
print(calculate_maximum_sizes(model))
"""


def cold_commands(peers: str | None) -> dict[str, Sequence[str]]:
    commands: dict[str, Sequence[str]] = {
        "python (nothing)": [sys.executable, "-c", "pass"],
        "ftcost estimate": ftcost(*ONE_JOB),
        "ftcost estimate --json": ftcost(*ONE_JOB, "--json"),
    }
    if version("accelerate") and version("transformers"):
        commands["accelerate (calculation only)"] = [sys.executable, "-c", ACCELERATE]
    if peers is not None:
        folder = Path(peers).parent
        commands["python of the peers (nothing)"] = [peers, "-c", "pass"]
        if peer_version(peers, "ftuneai"):
            arguments = ("-m", "meta-llama/Llama-3.1-8B", "--method", "lora", "-q", "none", "-b", "4", "-s", "2048")
            commands["ftune estimate"] = [str(folder / "ftune"), "estimate", *arguments, "-o", "json"]
        if peer_version(peers, "canifinetune"):
            arguments = ("--model", "Qwen/Qwen2.5-1.5B-Instruct", "--gpu-vram-gb", "80", "--method", "lora", "--offline")
            commands["canifinetune estimate"] = [str(folder / "canifinetune"), "estimate", *arguments, "--json"]
    return commands


# --- errors on the same rows --------------------------------------------------------------------------------------------


def neutral_row(run: Any) -> dict[str, Any]:
    """A measured run in words that every tool can be told; its model's true shape and the card's true rates inside."""
    from costmodel.device_rates import peak_flops_per_second
    from costmodel.units import BYTES_PER_ELEMENT, GIB

    layer, job = run.model.layers[0][0], run.job
    attention = layer.attention
    trained = job.adapter_dtype if job.is_peft else job.dtype
    targets = job.lora_target_modules
    mlp_names = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
    return {
        "model": run.model.name,
        "num_params": run.model.num_params,
        "hidden_size": run.model.hidden_size,
        "num_layers": run.model.num_layers,
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.query_width // attention.num_heads,
        "intermediate_size": layer.mlp_width,
        "vocab_size": run.model.vocab_size,
        "tied_embeddings": run.model.tied_embeddings,
        "method": job.method,
        "double_quant": job.double_quant,
        "weights_bytes": BYTES_PER_ELEMENT[job.dtype],
        "trained_in_16_bit": BYTES_PER_ELEMENT[trained] == 2,
        "adapts_mlp": targets == "all-linear" or (not isinstance(targets, str) and bool(mlp_names & set(targets))),
        "lora_r": job.lora_r,
        "batch_size": job.per_device_train_batch_size,
        "longest_tokens": round(run.longest.num_tokens / job.per_device_train_batch_size) if run.longest else 0,
        "num_tokens": run.batch.num_tokens,
        "gradient_checkpointing": job.gradient_checkpointing,
        "flash_attention": True,
        "gpu": run.gpu.name,
        "vram_gib": run.gpu.memory_bytes / GIB,
        "bandwidth": run.gpu.memory_bandwidth_bytes_per_second,
        "peak_flops_per_second": peak_flops_per_second(run.gpu, job),
    }


def answers(python: str, peer: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    text = "\n".join(map(json.dumps, rows)) + "\n"
    command = [python, str(Path(__file__).parent / "peers.py"), peer]
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=OFFLINE, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def error_tables(pythons: dict[str, str]) -> list[str]:
    """Absolute errors in percent. Dense transformer runs whose source allows full fine-tuning, LoRA or 4-bit LoRA."""
    from memory_errors import memory_errors
    from runs import all_runs

    runs = [run for run in all_runs() if not run.is_moe and run.model.layers[0][0].attention.num_heads]
    fit = json.loads((ROOT / "accuracy" / "fit.json").read_text(encoding="utf-8"))
    lines = ["### Memory", ""]
    ours = {run.run_id: (run, kind, error) for run, kind, error in memory_errors(runs)}
    rows = [neutral_row(run) for run, _, _ in ours.values()]
    errors: dict[str, dict[str, float]] = {"ftcost": {name: error for name, (_, _, error) in ours.items()}}
    for peer, python in pythons.items():
        errors[peer] = {}
        for (name, (run, kind, _)), answer in zip(ours.items(), answers(python, peer, rows), strict=True):
            if "error" not in answer:
                gib = answer["held_gib"] if kind == "allocated" else answer["memory_gib"]
                errors[peer][name] = math.log(gib / run.memory[1])
    methods = {name: run.job.method for name, (run, _, _) in ours.items()}
    lines += table(errors, methods)
    timed = [run for run in runs if run.seconds is not None]
    lines += ["", "### Step time", ""]
    errors = {
        "ftcost (the run's source left out)": {run.run_id: fit["source"][run.run_id]["log_error"] for run in timed},
    }
    if "ftuneai" in pythons:
        rows = [neutral_row(run) for run in timed]
        found = answers(pythons["ftuneai"], "ftuneai", rows)
        errors["ftuneai"] = {
            run.run_id: math.log(answer["micro_batch_seconds"] / run.seconds)
            for run, answer in zip(timed, found, strict=True)
            if "error" not in answer
        }
    return lines + table(errors, {run.run_id: run.job.method for run in timed})


def table(errors: dict[str, dict[str, float]], methods: dict[str, str]) -> list[str]:
    """Per method, on the rows that every tool with any answer for the method answers."""
    lines = ["| method | tool | n | median % | 90 % within % | bias % |", "|---|---|---|---|---|---|"]
    for method in ("full", "lora", "qlora"):
        names = [name for name, each in methods.items() if each == method]
        able = {tool: known for tool, known in errors.items() if any(name in known for name in names)}
        common = [name for name in names if all(name in known for known in able.values())]
        for tool, known in able.items():
            signed = [100 * math.expm1(known[name]) for name in common]
            if signed:
                size = sorted(map(abs, signed))
                ninety = size[min(len(size) - 1, math.ceil(0.9 * len(size)) - 1)]
                middle = statistics.median(size)
                lines.append(
                    f"| {method} | {tool} | {len(size)} | {middle:.1f} | {ninety:.0f} | {statistics.median(signed):+.0f} |"
                )
    return lines


# --- the page ---------------------------------------------------------------------------------------------------------


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def peer_version(python: str, package: str) -> str | None:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def page(peers: str | None, rounds: int) -> str:
    wall, processor = warm_seconds_per_job(min(rounds, 3))
    cold = least(cold_commands(peers), rounds)
    pythons = {}
    if peers is not None:
        pythons = {peer: peers for peer in PACKAGES if peer_version(peers, peer)}
    if version("accelerate"):
        pythons["accelerate"] = sys.executable
    versions = [f"{name} {version(name)}" for name in ("ftcost", "pydantic", "typer", "accelerate") if version(name)]
    versions += [f"{peer} {peer_version(python, peer)}" for peer, python in pythons.items() if peer != "accelerate"]
    bare = cold["python (nothing)"]
    extra = cold["ftcost estimate"][0] - bare[0]
    lines = [
        "# Benchmarks",
        "",
        "Written by `python benchmarks/speed.py --peers PYTHON --write docs/benchmarks.md`.",
        "",
        f"{datetime.date.today().isoformat()}; {os.cpu_count()} cores, {platform.machine()}, shared with other work (load "
        f"{os.getloadavg()[0]:.1f});",
        f"Python {platform.python_version()}; {', '.join(versions)}.",
        "",
        "## Speed",
        "",
        "| what | wall | processor | target |",
        "|---|---|---|---|",
        f"| one more job in a `.jsonl` (1,000 different ones) | {1e3 * wall:.2f} ms | {1e3 * processor:.2f} ms | "
        f"{1e3 * TARGET_WARM_SECONDS:.0f} ms |",
        f"| cold `ftcost estimate`, over the same Python doing nothing | {extra:.2f} s | "
        f"{cold['ftcost estimate'][1] - bare[1]:.2f} s | {TARGET_COLD_SECONDS:.1f} s |",
        "",
        f"Cold, the least of {rounds} rounds that take turns; the ratio is to the same Python doing nothing.",
        "",
        "| command | wall s | processor s | ratio |",
        "|---|---|---|---|",
    ]
    of_peers = cold.get("python of the peers (nothing)", bare)
    for name, (wall_seconds, processor_seconds) in cold.items():
        base = bare if name.startswith(("ftcost", "accelerate", "python (")) else of_peers
        lines.append(f"| {name} | {wall_seconds:.3f} | {processor_seconds:.3f} | {wall_seconds / base[0]:.0f} |")
    lines += [
        "",
        "hf-mem and `accelerate estimate-memory` as a command ask the hub for the model, fitcheck for its config: they are",
        "not clocked, because nothing here goes over the network. hf-mem is about inference, so it has no row below.",
        "",
        "## Errors on the same public runs",
        "",
        "Dense models, absolute error in percent of the measured value. Every tool is handed the model's true shape, its",
        "parameter count and the card's rates; where it knows fewer target modules, its nearest choice. Memory: allocated",
        "against allocated (the tool's allowance for CUDA and safety left out), else its total, without a safety margin.",
        "accelerate knows full fine-tuning only; ftuneai alone predicts time, by a constant share of the peak. qlora is",
        "every 4-bit base, GPTQ too, which the others do not tell apart. Our memory figures were not fitted; our step times",
        "are those with the run's source left out.",
        "",
        *error_tables(pythons),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="PYTHON", help="a Python that has other estimators")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", metavar="FILE", help="also write the page there")
    arguments = parser.parse_args()
    text = page(arguments.peers, arguments.rounds)
    print(text, end="")
    if arguments.write:
        Path(arguments.write).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
