"""Records real runs for ``test_projection_recorded.py``: a tiny model on a CPU, interrupted at 40 % and resumed.

    python tests/callback/record_runs.py tests/golden/recorded_runs.json

On the "wall" clock seconds are of the machine it runs on, with whatever else runs there; the file says how busy that was. On
the "processor" clock they are the process's own processor time: about what the same steps take on a machine of their own.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tiny_runs import pad_right
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Trainer, TrainerCallback
from transformers import TrainingArguments as Arguments

from ftcost_callback import FTCostCallback
from ftcost_callback.host_load import ProcessorWait
from ftcost_callback.live_device import device_facts, versions
from ftcost_callback.run_file import RunRecord, read_run

STEPS, BATCH_SIZE, EVERY_EVAL, EVERY_SAVE = 300, 4, 50, 100
RESUME_AT = STEPS * 2 // 5
RUNS = (
    ("dense", "random", 1, "processor"),
    ("dense", "random", 2, "processor"),
    ("moe", "random", 3, "processor"),
    ("moe", "random", 4, "processor"),
    ("dense", "growing", 5, "processor"),
    ("dense", "random", 1, "wall"),
    ("moe", "random", 3, "wall"),
    ("dense", "growing", 5, "wall"),
)


def make_model(kind: str) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "moe":
        return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))
    return LlamaForCausalLM(LlamaConfig(**sizes))


def make_rows(order: str, seed: int) -> list[dict[str, list[int]]]:
    """Log-normal lengths, as instruction data has them."""
    draw = random.Random(seed)
    lengths = [min(400, max(4, round(draw.lognormvariate(3.7, 0.7)))) for _ in range(STEPS * BATCH_SIZE)]
    if order == "growing":
        lengths.sort()
    return [{"input_ids": (ids := [draw.randrange(1, 64) for _ in range(length)]), "labels": ids} for length in lengths]


class StopAt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == RESUME_AT:
            control.should_training_stop = True


def record(kind: str, order: str, seed: int, clock: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rows, load = make_rows(order, seed), os.getloadavg()[0]
    waited: list[float | None] = []
    sessions: list[RunRecord] = []  # the record after each of them
    with tempfile.TemporaryDirectory() as folder:
        for session in range(2):
            arguments = Arguments(
                output_dir=folder, per_device_train_batch_size=BATCH_SIZE, max_steps=STEPS, logging_steps=10, seed=seed,
                eval_strategy="steps", eval_steps=EVERY_EVAL, save_strategy="steps", save_steps=EVERY_SAVE,
                report_to="none", disable_tqdm=True, use_cpu=True,
                train_sampling_strategy="sequential" if order == "growing" else "random",
            )  # fmt: skip
            measuring = FTCostCallback(sinks=[])
            if clock == "processor":
                measuring._clock = time.process_time
            trainer = Trainer(
                model=make_model(kind), args=arguments, train_dataset=rows, eval_dataset=rows[::30], data_collator=pad_right,
                callbacks=[measuring, *([StopAt()] if session == 0 else [])],
            )  # fmt: skip
            wait = ProcessorWait()
            trainer.train(resume_from_checkpoint=session == 1)
            waited.append(wait.fraction())
            sessions.append(read_run(folder))
        run = sessions[-1]
    return {
        "model": kind,
        "order": order,
        "seed": seed,
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
        "processor_wait_fraction": [round(each, 3) if each is not None and clock == "wall" else None for each in waited],
        "clock": clock,
        "resumed_at": RESUME_AT,
        "expected_tokens_per_step": run.predictions[0].estimate["num_tokens_per_step"],
        "startup_seconds": [session.startup_seconds for session in run.sessions],
        "total_seconds": run.totals.wall_seconds,
        "global_steps": [step.global_step for step in run.steps],
        "step_seconds": [round(step.step_seconds, 5) for step in run.steps],
        "num_tokens": [step.num_tokens for step in run.steps],
        "pauses": [
            [[pause.kind, pause.global_step, round(pause.seconds, 5)] for pause in pauses]
            for pauses in (sessions[0].pauses, run.pauses[len(sessions[0].pauses) :])
        ],
    }


def main(target: str) -> None:
    facts = device_facts("cpu")
    recorded = {
        "what": "tiny models trained on a shared CPU, whose other users take a varying share of it",
        "machine": f"{os.cpu_count()} cores, {facts.get('name', 'unknown')}",
        "versions": versions(),
        "plan": {"max_steps": STEPS, "eval_steps": EVERY_EVAL, "save_steps": EVERY_SAVE, "logging_steps": 10},
        "runs": [record(*run) for run in RUNS],
    }
    text = json.dumps(recorded, indent=1)
    Path(target).write_text(_one_line_lists(text) + "\n", encoding="utf-8")


def _one_line_lists(text: str) -> str:
    """Numbers beside each other."""
    import re

    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda match: "[" + re.sub(r"\s*\n\s*", " ", match[1]) + "]", text)


if __name__ == "__main__":
    main(sys.argv[1])
