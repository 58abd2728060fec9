"""A spot machine is taken away; another one, at another price, goes on from the checkpoint. One bill for both.

    python examples/resume_elsewhere.py --dataset train.jsonl                              # no GPU has run this line yet
    python examples/resume_elsewhere.py --tiny

What carries the bill over is a small ledger in the checkpoint's folder: copy the checkpoint, and nothing else. It holds what
the first machine cost up to that checkpoint; what it did afterwards is on no bill, so copy the newest checkpoint.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

import torch
from tiny import data_of, options, tiny_model, tokenizer_of, tokens_of
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments

from ftcost_callback import FTCostCallback
from ftcost_callback.run_file import read_run


def train_on_this_machine(given: argparse.Namespace) -> None:
    """The script as it runs on each machine: it resumes if there is a checkpoint."""
    tokenizer = tokenizer_of(given)
    model = tiny_model("llama", tokenizer) if given.tiny else AutoModelForCausalLM.from_pretrained(given.model, dtype="auto")
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(given.output_dir),
            per_device_train_batch_size=4,
            max_steps=12 if given.tiny else 2_000,
            bf16=torch.cuda.is_available(),
            logging_steps=3 if given.tiny else 10,
            save_strategy="steps",
            save_steps=6 if given.tiny else 250,
            report_to="none" if given.tiny else "wandb",
            disable_tqdm=True,
        ),
        train_dataset=tokens_of(data_of(given), tokenizer, max_length=128 if given.tiny else 1024),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[FTCostCallback(usd_per_gpu_hour=given.usd_per_gpu_hour)],
    )
    trainer.train(resume_from_checkpoint=bool(list(given.output_dir.glob("checkpoint-*"))))


def main() -> int:
    parser = options(__doc__, model="Qwen/Qwen3-0.6B")
    parser.add_argument("--one-machine", action="store_true", help="train here, resuming if there is a checkpoint")
    given = parser.parse_args()
    if given.one_machine:
        train_on_this_machine(given)
        return 0
    first, second = given.output_dir / "machine_a", given.output_dir / "machine_b"
    script = [sys.executable, __file__, "--one-machine", "--model", given.model, *(["--tiny"] if given.tiny else [])]
    if given.dataset:
        script += ["--dataset", given.dataset]
    subprocess.run([*script, "--output-dir", str(first), "--usd-per-gpu-hour", "2.00"], check=True)
    # What a bucket would hold of the first machine: its oldest checkpoint, say, because the rest was not yet copied.
    checkpoint = min(first.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    shutil.copytree(checkpoint, second / checkpoint.name)
    subprocess.run([*script, "--output-dir", str(second), "--usd-per-gpu-hour", "0.90"], check=True)
    run = read_run(second)
    print(f"\nresumed at step {run.sessions[0].resumed_from_step} with the bill of the first machine on board:")
    print(f"{run.last_step} steps, {run.totals.wall_seconds:.0f} s on both machines, ${run.spent_usd:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
