"""Twenty steps before the real run: the longest batches first, then the peak memory and what the whole run would cost.

    python examples/twenty_step_check.py --dataset train.jsonl --usd-per-gpu-hour 2.10     # no GPU has run this line yet
    python examples/twenty_step_check.py --tiny

What does not fit crashes in the first minute, not in the sixth hour. Nothing is saved; take ``dry_run_steps`` out and run.
"""

from __future__ import annotations

import sys

import torch
from tiny import data_of, options, tiny_model, tokenizer_of, tokens_of
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments

from ftcost_callback import FTCostCallback


def main() -> int:
    given = options(__doc__, model="Qwen/Qwen3-0.6B").parse_args()
    tokenizer = tokenizer_of(given)
    model = tiny_model("llama", tokenizer) if given.tiny else AutoModelForCausalLM.from_pretrained(given.model, dtype="auto")
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(given.output_dir),
            per_device_train_batch_size=4,
            num_train_epochs=3,
            bf16=torch.cuda.is_available(),
            logging_steps=10,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=tokens_of(data_of(given), tokenizer, max_length=128 if given.tiny else 1024),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[FTCostCallback(usd_per_gpu_hour=given.usd_per_gpu_hour, dry_run_steps=20)],
    )
    trainer.train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
