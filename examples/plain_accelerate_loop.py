"""A fine-tuning loop of your own (accelerate, no Trainer) with its live cost: five lines are ftcost's, marked with # <-

python examples/plain_accelerate_loop.py --dataset train.jsonl --usd-per-gpu-hour 2.10   # no GPU has run this line yet
python examples/plain_accelerate_loop.py --tiny
accelerate launch --num_processes 2 examples/plain_accelerate_loop.py --tiny   # two GPUs; no GPU has run it
ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 examples/plain_accelerate_loop.py --tiny   # on a CPU
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from tiny import data_of, options, tiny_model, tokenizer_of, tokens_of
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from ftcost_callback import FTCostMonitor  # <-


def main() -> int:
    parser = options(__doc__, model="Qwen/Qwen3-0.6B")
    parser.add_argument("--num-samples", type=int, default=160, help="at tiny size (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=1)
    given = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    tokenizer = tokenizer_of(given)
    if given.tiny:
        model = tiny_model("mixtral", tokenizer)
    else:
        model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto")
    samples = tokens_of(data_of(given, given.num_samples), tokenizer, max_length=128 if given.tiny else 1024)
    loader = DataLoader(samples, batch_size=4, shuffle=True, collate_fn=pad)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps_per_epoch = -(-len(loader) // accelerator.gradient_accumulation_steps)

    with FTCostMonitor(  # <-
        model,
        optimizer,
        accelerator=accelerator,
        train_loader=loader,
        num_epochs=given.epochs,
        eval_every=steps_per_epoch,
        usd_per_gpu_hour=given.usd_per_gpu_hour,
        output_dir=given.output_dir,
        profile_steps=(5, 7),
    ) as monitor:
        for _ in range(given.epochs):
            model.train()
            for batch in monitor.watch(loader):  # <-
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    monitor.step(batch)  # <-
            with monitor.pause("eval"), torch.no_grad():  # <-
                model.eval()
                loss = model(**batch).loss
            accelerator.print(f"loss {loss:.3f}")
    accelerator.print(f"ftcost report {given.output_dir} draws {given.output_dir}/_ftcost/run.jsonl")
    return 0


def pad(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Ids, mask and labels, padded to the longest sample of the batch."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(fill: int, values: list[list[int]]) -> torch.Tensor:
        return torch.tensor([row + [fill] * (longest - len(row)) for row in values])

    ids = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": padded(0, ids),
        "attention_mask": padded(0, [[1] * len(row) for row in ids]),
        "labels": padded(-100, ids),
    }


if __name__ == "__main__":
    sys.exit(main())
