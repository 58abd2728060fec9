"""A fine-tuning loop of your own (accelerate, no Trainer) with its live cost: five lines are ftcost's, marked with # <-

    python examples/plain_accelerate_loop.py
    accelerate launch --num_processes 2 examples/plain_accelerate_loop.py

Without arguments: a small randomly initialised Mixtral on random tokens; no account, no network.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from ftcost_callback import FTCostMonitor  # <-

TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or folder; without it a tiny random Mixtral is made")
    parser.add_argument("--num-samples", type=int, default=320)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--usd-per-gpu-hour", type=float, default=2.10, help="what this machine costs (default %(default)s)")
    parser.add_argument("--output-dir", default="loop_output")
    options = parser.parse_args(argv)

    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(17)
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **TINY))
    samples = [
        {"input_ids": torch.randint(3, model.config.vocab_size, (length,)).tolist()}
        for length in torch.randint(16, 65, (options.num_samples,)).tolist()
    ]
    loader = DataLoader(samples, batch_size=4, shuffle=True, collate_fn=pad)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps_per_epoch = -(-len(loader) // accelerator.gradient_accumulation_steps)

    with FTCostMonitor(  # <-
        model,
        optimizer,
        accelerator=accelerator,
        train_loader=loader,
        num_epochs=options.epochs,
        eval_every=steps_per_epoch,
        usd_per_gpu_hour=options.usd_per_gpu_hour,
        output_dir=options.output_dir,
        profile_steps=(5, 7),
    ) as monitor:
        for _ in range(options.epochs):
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
    accelerator.print(f"ftcost report {options.output_dir} draws {options.output_dir}/_ftcost/run.jsonl")
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
    raise SystemExit(main())
