"""A budget that is kept: warned at 50 and 80 %, saved and stopped at 100 %.

python examples/stop_at_budget.py --dataset train.jsonl --usd-per-gpu-hour 2.10 --budget-usd 25  # no GPU has run this yet
python examples/stop_at_budget.py --tiny
"""

from __future__ import annotations

import sys
import time

import torch
from tiny import data_of, options, tiny_model, tokenizer_of, tokens_of
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments

from ftcost_callback import FTCostCallback


def main() -> int:
    parser = options(__doc__, model="Qwen/Qwen3-0.6B")
    parser.add_argument("--budget-usd", type=float, default=25.0)
    given = parser.parse_args()
    price = given.usd_per_gpu_hour
    if given.tiny:
        given.budget_usd, price = 1.0, 900.0  # a dollar is four seconds
    tokenizer = tokenizer_of(given)
    model = tiny_model("llama", tokenizer) if given.tiny else AutoModelForCausalLM.from_pretrained(given.model, dtype="auto")
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(given.output_dir),
            per_device_train_batch_size=4,
            num_train_epochs=10_000 if given.tiny else 3,
            bf16=torch.cuda.is_available(),
            logging_steps=10,
            report_to="none" if given.tiny else "wandb",
            disable_tqdm=given.tiny,
        ),
        train_dataset=tokens_of(data_of(given), tokenizer, max_length=128 if given.tiny else 1024),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[
            FTCostCallback(
                usd_per_gpu_hour=price,
                budget_usd=given.budget_usd,
                stop_at_budget=True,
                # When the bill began. Left out: the start of this process; for a machine rented earlier, its start.
                billing_started_at=time.time() if given.tiny else None,
            )
        ],
    )
    trainer.train()
    print(f"stopped at step {trainer.state.global_step}; trainer.train(resume_from_checkpoint=True) goes on from there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
