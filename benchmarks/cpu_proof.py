"""Probe this CPU, predict small fine-tunings, run them, and hold the two against each other: docs/cpu_proof.md.

    python benchmarks/cpu_proof.py [--steps 40] [--clock processor|wall] [--threads 1] [--json FILE] [--markdown FILE]
                                   [--only llama-full ...] [--most-tokens 4096] [--shapes report|choose]

Each case is a real Trainer with FTCostCallback on a random model. It is predicted with the probe taken just before it, which
never sees the run: ``uncalibrated``. Then the first 20 steps calibrate the model, and the steps after them are predicted:
``after 20 steps``. ``projection`` is what the callback itself expected of the remaining steps at step 20. Lengths vary from
half to the whole of the case's, so that the steps after the first 20 hold other tokens.

``--clock processor`` (default) counts the seconds that a processor worked for us, in the probe and in the run: on a shared
machine the clock on the wall tells about its neighbours. With one thread and no neighbours the two are the same.
``--shapes choose`` are the models that the hand counts and constants were chosen on; the report's are others.
"""

# ruff: noqa: E501 (rows of tables)
from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

CALIBRATION_STEPS = 20
WARM_UP_STEPS = 2  # left out, as ftcost calibrate leaves them out
TARGET_UNCALIBRATED, TARGET_CALIBRATED = 0.20, 0.05
FAMILIES = ("llama", "mixtral", "qwen3_moe")
METHODS = ("full", "lora")
BATCHES, LENGTHS = (1, 4, 16), (64, 256, 512)
MOST_TOKENS = 4096  # of a micro-batch; more takes too long here
SHAPES: dict[str, dict[str, Any]] = {
    "report": {
        "shared": {
            "vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "pad_token_id": 0,
        },
        "llama": {"intermediate_size": 768},
        "mixtral": {"intermediate_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2},
        "qwen3_moe": {"moe_intermediate_size": 192, "num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 768},
    },
    "choose": {
        "shared": {
            "vocab_size": 2048, "hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 6,
            "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 1024, "pad_token_id": 0,
        },
        "llama": {"intermediate_size": 512},
        "mixtral": {"intermediate_size": 384, "num_local_experts": 8, "num_experts_per_tok": 2},
        "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 512},
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    family: str
    method: str
    batch: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.family}-{self.method}"


class Rows:
    """Random token ids, from half of ``length`` to all of it."""

    def __init__(self, length: int, vocabulary: int) -> None:
        chosen = random.Random(17)
        self._lengths = [chosen.randint(length // 2, length) for _ in range(1024)]
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, place: int) -> dict[str, list[int]]:
        ids = [1 + (7 * place + 13 * position) % (self._vocabulary - 1) for position in range(self._lengths[place])]
        return {"input_ids": ids, "labels": ids}


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    import torch

    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, fill: int) -> Any:
        return torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def make_model(case: Case, shapes: dict[str, Any]) -> Any:
    import torch
    import transformers

    torch.manual_seed(17)
    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }[case.family]
    made = model(config(**shapes["shared"], **shapes[case.family]))
    if case.method == "full":
        return made
    from peft import LoraConfig, get_peft_model

    return get_peft_model(made, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))


def run(
    case: Case, shapes: dict[str, Any], probed: dict[str, Any], steps: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """One training, and what was predicted of it."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from costmodel import calibration as calibrations
    from ftcost_callback import FTCostCallback
    from ftcost_callback.calibrating import steady_steps, steps_of_run
    from ftcost_callback.run_file import read_run
    from ftcost_callback.sinks import InMemorySink

    class WallTimes(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self._begun = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self._begun = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds.append(time.perf_counter() - self._begun)

    walls, sink = WallTimes(), InMemorySink()
    with tempfile.TemporaryDirectory() as folder:
        callback = FTCostCallback(gpu=probed, sinks=[sink])
        callback._clock = clock  # the record and the projection are then in the same seconds as the probe
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=case.batch, max_steps=steps, logging_steps=CALIBRATION_STEPS,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, seed=17,
        )  # fmt: skip
        dataset = Rows(case.length, shapes["shared"]["vocab_size"])
        trainer = Trainer(
            model=make_model(case, shapes), args=arguments, train_dataset=dataset, data_collator=collate,
            callbacks=[callback, walls],
        )  # fmt: skip
        trainer.remove_callback(_printer(trainer))
        trainer.train()
        record = read_run(folder)
    first = sink.predictions[0].estimate
    steady = steady_steps(record.steps)
    measured = statistics.mean(step.step_seconds for step in steady)
    # the same tokens: the prediction is of the data set's mean batch, the run of the batches it drew
    seen = estimate_on_tokens(record.sessions[-1].job, steady, case)
    early = dataclasses.replace(record, steps=record.steps[:CALIBRATION_STEPS])
    late = record.steps[CALIBRATION_STEPS:]
    calibration = calibrations.fit(steps_of_run(early), created_on="", ftcost_version="")
    job = {**record.sessions[-1].job, "calibration": calibration.to_dict()}
    after = estimate_on_tokens(job, late, case)
    measured_late = statistics.mean(step.step_seconds for step in late)
    at_20 = next(window for window in sink.windows if window.global_step == CALIBRATION_STEPS)
    remaining = sum(step.step_seconds for step in late)
    projected = at_20.remaining_seconds
    return {
        "family": case.family, "method": case.method, "batch": case.batch, "length": case.length,
        "tokens_per_step": statistics.mean(step.num_tokens or 0 for step in steady),
        "measured_step_seconds": measured,
        "measured_wall_step_seconds": statistics.median(walls.seconds[WARM_UP_STEPS:]),
        "predicted_step_seconds": first["step_seconds"],
        "uncalibrated_error": first["step_seconds"] / measured - 1,
        "uncalibrated_error_on_the_tokens_seen": seen / measured - 1,
        "after_20_steps_error": after / measured_late - 1,
        "projection_error": projected / remaining - 1 if projected else None,
        "by_group_seconds": first["step"]["by_group_seconds"],
        "load_average": os.getloadavg()[0],
    }  # fmt: skip


def estimate_on_tokens(job: dict[str, Any], steps: list[Any], case: Case) -> float:
    from costmodel.estimation import TokensSeen, estimate_from_tokens

    number = len(steps)
    seen = TokensSeen(
        num_sequences=case.batch,
        num_tokens=sum(step.num_tokens for step in steps) / number,
        num_non_padding_tokens=sum(step.num_non_padding_tokens for step in steps) / number,
        sum_squared_sequence_tokens=sum(step.num_tokens**2 for step in steps) / number / case.batch,
        longest_tokens=case.length,
    )
    predicted = estimate_from_tokens(job, seen).step_seconds
    assert predicted is not None
    return predicted


def _printer(trainer: Any) -> Any:
    from transformers import PrinterCallback

    return next((each for each in trainer.callback_handler.callbacks if isinstance(each, PrinterCallback)), PrinterCallback)


def cases(only: list[str] | None, most_tokens: int) -> Iterator[Case]:
    """By size, so that models of each kind are run soon after one probe."""
    for batch, length in sorted(itertools.product(BATCHES, LENGTHS), key=math.prod):
        for family, method in itertools.product(FAMILIES, METHODS):
            case = Case(family, method, batch, length)
            if batch * length <= most_tokens and (not only or case.name in only):
                yield case


def share_within(errors: list[float], limit: float) -> str:
    inside = sum(abs(error) <= limit for error in errors)
    return f"{inside} of {len(errors)}"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = {
        "uncalibrated_error": TARGET_UNCALIBRATED,
        "after_20_steps_error": TARGET_CALIBRATED,
        "projection_error": TARGET_CALIBRATED,
    }
    found = {}
    for kind, limit in kinds.items():
        errors = [row[kind] for row in rows if row[kind] is not None]
        found[kind] = {
            "limit": limit,
            "within": share_within(errors, limit),
            "median_absolute": statistics.median(abs(error) for error in errors),
            "worst": max(errors, key=abs),
            "mean": statistics.mean(errors),
        }
    return found


def markdown(answer: dict[str, Any]) -> str:
    facts, found = answer["machine"], answer["summary"]
    lines = [
        "# Shown on a CPU",
        "",
        "<!-- made by benchmarks/cpu_proof.py --markdown: run it again, do not edit -->",
        "",
        "Small fine-tunings, predicted from [a probe](probe.md) of this processor and then run: a real `Trainer` with",
        f"`FTCostCallback`, {answer['steps']} steps each, lengths from half to the whole of what the row says. The probe is taken",
        "before each group of runs and sees none of them; hand counts and constants were chosen on models of another shape",
        "(`--shapes choose`). **Uncalibrated** is the prediction before the first step, **after 20 steps** that of the steps from",
        "the 21st on, calibrated on the first 20; **projection** is what the callback then expected of the rest.",
        "",
        f"{facts['processor']}, {answer['threads']} thread, torch {facts['torch']}, transformers {facts['transformers']}, "
        f"{answer['date']}. Seconds of the {'processor' if answer['clock'] == 'processor' else 'wall clock'}; load average "
        f"{facts['load_at_begin']:.1f} at the begin and {facts['load_at_end']:.1f} at the end, on {facts['processors']} processors.",
        "",
        "| | bar | within | median | worst | mean |",
        "|---|---|---|---|---|---|",
    ]
    for kind, label in (
        ("uncalibrated_error", "uncalibrated"),
        ("after_20_steps_error", "after 20 steps"),
        ("projection_error", "projection at step 20"),
    ):
        each = found[kind]
        lines.append(
            f"| {label} | {each['limit']:.0%} | {each['within']} | {each['median_absolute']:.1%} | {each['worst']:+.1%} | {each['mean']:+.1%} |"
        )
    lines += [
        "",
        "| model | method | batch | length | measured ms | on the wall ms | predicted ms | uncalibrated | after 20 steps | projection | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in answer["rows"]:
        projection = f"{row['projection_error']:+.1%}" if row["projection_error"] is not None else "-"
        lines.append(
            f"| {row['family']} | {row['method']} | {row['batch']} | {row['length']} | {row['measured_step_seconds'] * 1e3:.1f} "
            f"| {row['measured_wall_step_seconds'] * 1e3:.1f} | {row['predicted_step_seconds'] * 1e3:.1f} "
            f"| {row['uncalibrated_error']:+.1%} | {row['after_20_steps_error']:+.1%} | {projection} | {row['load_average']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--clock", choices=["processor", "wall"], default="processor")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--probe-seconds", type=float, default=8.0)
    parser.add_argument("--shapes", choices=sorted(SHAPES), default="report")
    parser.add_argument("--only", nargs="*", help="such as llama-full")
    parser.add_argument("--most-tokens", type=int, default=MOST_TOKENS, help="of a micro-batch")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if options.clock == "processor" and options.threads != 1:
        parser.error("the processor's time of several threads is their sum: --clock wall, or --threads 1")

    import torch
    import transformers

    from ftcost_callback.live_device import device_facts
    from ftcost_callback.probe import probe_cpu

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.clock == "processor" else time.perf_counter
    load_at_begin = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    probes: list[dict[str, Any]] = []
    probed_for: tuple[int, int] | None = None
    facts = device_facts("cpu")
    for case in cases(options.only, options.most_tokens):
        if probed_for != (case.batch, case.length):
            print(f"probing before batch {case.batch} of {case.length} tokens", file=sys.stderr, flush=True)
            probes.append(
                probe_cpu(seconds=options.probe_seconds, num_threads=options.threads, clock=clock, say=lambda line: None)
            )
            probed_for = (case.batch, case.length)
        row = run(case, SHAPES[options.shapes], probes[-1], options.steps, clock)
        rows.append(row)
        print(
            f"{case.name:16} batch {case.batch:2} length {case.length:3}: measured {row['measured_step_seconds'] * 1e3:7.1f} ms, "
            f"uncalibrated {row['uncalibrated_error']:+.1%}, after 20 steps {row['after_20_steps_error']:+.1%}, "
            f"projection {row['projection_error'] or 0:+.1%}, load {row['load_average']:.1f}",
            file=sys.stderr,
            flush=True,
        )
        answer = {
            "date": datetime.date.today().isoformat(),
            "machine": {
                "processor": facts.get("name", platform.processor()), "processors": os.cpu_count(), "torch": torch.__version__,
                "transformers": transformers.__version__, "load_at_begin": load_at_begin, "load_at_end": os.getloadavg()[0],
            },
            "clock": options.clock, "threads": options.threads, "steps": options.steps, "shapes": options.shapes,
            "summary": summary(rows), "rows": rows, "probes": probes,
        }  # fmt: skip
        if options.json:
            options.json.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
        if options.markdown:  # written after each row: a run that is broken off still tells
            options.markdown.write_text(markdown(answer), encoding="utf-8")
    print(markdown(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
