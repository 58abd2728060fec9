"""A dense model of 1B weights, all of them trained: which card is enough, and what it costs while it runs.

python examples/full_finetune_1b.py --dataset train.jsonl --usd-per-gpu-hour 0.79      # no GPU has run this line yet
python examples/full_finetune_1b.py --tiny
"""

from __future__ import annotations

import sys

import torch
from tiny import data_of, options, tiny_model, tokenizer_of, tokens_of
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments

from costmodel import estimate
from ftcost_callback import FTCostCallback


def which_card_is_enough() -> None:
    """Full tuning of 1B weights in 32 bits with AdamW needs 16 bytes a weight before a single activation."""
    for gpu in ("RTX 4090", "L40S", "A100-SXM4-80GB"):
        answer = estimate(
            model="meta-llama/Llama-3.2-1B",
            gpu=gpu,
            method="full",
            dtype="float32",
            bf16=True,
            gradient_checkpointing=True,
            per_device_train_batch_size=8,
            max_length=1024,
            lengths={"mean": 400, "max": 1024},
            framework="transformers",
        )
        peak_gib, largest = answer.memory.peak_device_bytes / 2**30, answer.max_batch_size
        print(f"{gpu:>15}: {answer.verdict}, {peak_gib:.1f} GiB at batch 8, largest batch {largest}")


def main() -> int:
    given = options(__doc__, model="meta-llama/Llama-3.2-1B").parse_args()
    which_card_is_enough()
    tokenizer = tokenizer_of(given)
    model = (
        tiny_model("llama", tokenizer)
        if given.tiny
        else AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(given.output_dir),
            per_device_train_batch_size=8,
            max_steps=6 if given.tiny else -1,
            num_train_epochs=1,
            bf16=torch.cuda.is_available(),
            gradient_checkpointing=not given.tiny,
            train_sampling_strategy="group_by_length",  # less padding
            logging_steps=2 if given.tiny else 10,
            save_strategy="no" if given.tiny else "epoch",
            report_to="none" if given.tiny else "wandb",
        ),
        train_dataset=tokens_of(data_of(given), tokenizer, max_length=128 if given.tiny else 1024),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[FTCostCallback(usd_per_gpu_hour=given.usd_per_gpu_hour)],
    )
    trainer.train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
