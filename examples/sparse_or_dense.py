"""The question of Xia et al. (arXiv:2408.04693): is a mixture of experts better tuned sparse (top 2) or dense (all experts)?

Both run on the same samples; the table says what each reached and what it cost, in loss and dollars.

    python examples/sparse_or_dense.py --dataset train.jsonl --usd-per-gpu-hour 0.79       # no GPU has run this line yet
    python examples/sparse_or_dense.py --tiny
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tiny import data_of, options, tiny_model, tokenizer_of, tokens_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)

from ftcost_callback import FTCostCallback
from ftcost_callback.run_file import read_run


def model_of(given: argparse.Namespace, tokenizer: Any, experts_per_token: int) -> Any:
    """The same weights; only the number of experts that a token visits differs."""
    if given.tiny:
        return tiny_model("mixtral", tokenizer, num_experts_per_tok=experts_per_token)
    config = AutoConfig.from_pretrained(given.model, num_experts_per_tok=experts_per_token)
    return AutoModelForCausalLM.from_pretrained(given.model, config=config, dtype=torch.bfloat16)


def tune(given: argparse.Namespace, tokenizer: Any, rows: dict[str, Any], experts_per_token: int) -> dict[str, float]:
    set_seed(17)
    model = model_of(given, tokenizer, experts_per_token)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    folder = given.output_dir / f"top{experts_per_token}"
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=8,
            max_steps=24 if given.tiny else -1,
            num_train_epochs=1,
            learning_rate=1e-2 if given.tiny else 2e-4,
            bf16=torch.cuda.is_available(),
            logging_steps=4 if given.tiny else 10,
            eval_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[FTCostCallback(usd_per_gpu_hour=given.usd_per_gpu_hour)],
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    run = read_run(folder)
    training_usd = run.totals.train_seconds / 3600 * given.usd_per_gpu_hour
    return {"before": before, "after": after, "seconds": run.totals.train_seconds, "usd": training_usd}


def main() -> int:
    given = options(__doc__, model="mistralai/Mixtral-8x7B-v0.1").parse_args()
    tokenizer = tokenizer_of(given)
    tokens = tokens_of(data_of(given), tokenizer, max_length=128 if given.tiny else 1024)
    rows = dict(tokens.train_test_split(test_size=min(32, len(tokens) // 10), seed=17))
    all_experts = 8
    results = {
        "sparse, top 2": tune(given, tokenizer, rows, 2),
        f"dense, all {all_experts}": tune(given, tokenizer, rows, all_experts),
    }
    print(f"\n{'':<16}{'loss before':>12}{'after':>8}{'training':>11}{'dollars':>10}{'loss saved per dollar':>24}")
    for name, each in results.items():
        saved = (each["before"] - each["after"]) / each["usd"]
        print(
            f"{name:<16}{each['before']:>12.3f}{each['after']:>8.3f}{each['seconds']:>9.1f} s"
            f"{each['usd']:>10.4f}{saved:>24.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
