"""Qwen3-MoE, LoRA on attention, experts as one grouped product a layer, expert load and cost in the tracker.

    python examples/qwen3_moe_lora.py --dataset train.jsonl --usd-per-gpu-hour 3.50        # no GPU has run this line yet
    python examples/qwen3_moe_lora.py --tiny

``grouped_mm`` computes all experts of a layer in one call; the loop (``eager``) calls each expert from Python. With 128
experts a layer that decides the speed: the estimate shows both.
"""

from __future__ import annotations

import sys

import torch
from peft import LoraConfig, get_peft_model
from tiny import data_of, options, tiny_model, tokenizer_of, tokens_of
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments

from costmodel import estimate
from ftcost_callback import FTCostCallback


def compare_loop_with_grouped(model: str, usd_per_gpu_hour: float) -> None:
    """What the implementation of the experts costs, before a GPU is rented."""
    for experts_implementation in ("grouped_mm", "eager"):
        answer = estimate(
            model=model,
            gpu="H100 SXM",
            method="lora",
            dtype="bfloat16",
            bf16=True,
            gradient_checkpointing=True,
            experts_implementation=experts_implementation,
            per_device_train_batch_size=4,
            max_length=1024,
            lengths={"mean": 400, "max": 1024},
            num_samples=10_000,
            num_train_epochs=1,
            framework="transformers",
            usd_per_gpu_hour=usd_per_gpu_hour,
        )
        print(f"{experts_implementation:>10}: {answer.step_seconds:.2f} s a step, ${answer.total_usd:.2f} for the run")


def main() -> int:
    given = options(__doc__, model="Qwen/Qwen3-30B-A3B").parse_args()
    compare_loop_with_grouped("Qwen/Qwen3-30B-A3B", given.usd_per_gpu_hour)
    tokenizer = tokenizer_of(given)
    if given.tiny:
        base = tiny_model("qwen3_moe", tokenizer)
    else:
        base = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16, experts_implementation="grouped_mm")
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(given.output_dir),
            per_device_train_batch_size=4,
            max_steps=6 if given.tiny else -1,
            num_train_epochs=1,
            bf16=torch.cuda.is_available(),
            gradient_checkpointing=not given.tiny,
            logging_steps=2 if given.tiny else 10,
            save_strategy="no" if given.tiny else "epoch",
            report_to="none" if given.tiny else "wandb",
        ),
        train_dataset=tokens_of(data_of(given), tokenizer, max_length=128 if given.tiny else 1024),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[FTCostCallback(usd_per_gpu_hour=given.usd_per_gpu_hour)],  # expert load is counted by default
    )
    trainer.train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
