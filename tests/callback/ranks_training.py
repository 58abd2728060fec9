"""Trainings on two gloo processes, one launch for all of them: ``accelerate launch ... ranks_training.py FOLDER NAME...``.

Each writes what its process really trained on into ``truth.rankN.json``, counted from the batches and not by our hooks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from tiny_runs import IGNORED, LENGTHS, TokenRows, pad_right, tiny_mixtral, training_arguments
from transformers import MixtralForCausalLM, Trainer, TrainerCallback

from ftcost_callback import FTCostCallback

ROWS = TokenRows((*LENGTHS, 6, 9))  # 14 rows: the last batches of two processes are not full


class CountingTrainer(Trainer):  # type: ignore[misc]
    """Counts the batches it trains on. ``largest_rows``: a batch with more of them does not fit."""

    largest_rows = 100

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self.truth = {"num_tokens": 0, "num_non_padding_tokens": 0, "num_supervised_tokens": 0, "num_samples": 0}

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if len(inputs["input_ids"]) > self.largest_rows:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
        counted = {
            "num_tokens": inputs["input_ids"].numel(),
            "num_non_padding_tokens": int(inputs["attention_mask"].sum()),
            "num_supervised_tokens": int((inputs["labels"][:, 1:] != IGNORED).sum()),
            "num_samples": len(inputs["input_ids"]),
        }
        self.truth = {name: count + counted[name] for name, count in self.truth.items()}
        return super().training_step(model, inputs, num_items_in_batch)


class KillAfter(TrainerCallback):  # type: ignore[misc]
    """SIGKILL, as the system sends it when memory runs out: to one process, in the step after ``step``."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == 1 and state.global_step >= self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: Path,
    *,
    model: Any = None,
    resume: Path | None = None,
    callbacks: tuple[Any, ...] = (),
    largest_rows: int = 100,
    **changes: Any,
) -> None:
    torch.manual_seed(0)
    fields: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 2, "logging_steps": 2}
    trainer = CountingTrainer(
        model=model if model is not None else tiny_mixtral(),
        args=training_arguments(folder, **(fields | changes)),
        callbacks=[FTCostCallback(usd_per_gpu_hour=2.0), *callbacks],
        train_dataset=ROWS,
        eval_dataset=ROWS,
        data_collator=pad_right,
    )
    trainer.largest_rows = largest_rows
    trainer.train(resume_from_checkpoint=str(resume) if resume is not None else None)
    (folder / f"truth.rank{trainer.args.process_index}.json").write_text(json.dumps(trainer.truth))


def sharded_mixtral(folder: Path, **parallel: int) -> Any:
    """Loaded with transformers' own sharding, which the Trainer leaves as it is."""
    from transformers import DistributedConfig

    plain = folder / "plain_model"
    if int(os.environ["RANK"]) == 0 and not plain.exists():
        torch.manual_seed(0)
        tiny_mixtral().save_pretrained(plain)
    torch.distributed.barrier()
    return MixtralForCausalLM.from_pretrained(plain, distributed_config=DistributedConfig(**parallel))


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    for name in names:
        out = folder / name
        if name == "ddp":
            train(out, gradient_accumulation_steps=2, **saving)
        elif name == "resumed":
            train(out, gradient_accumulation_steps=2, resume=folder / "ddp" / "checkpoint-2")
        elif name == "fsdp":
            train(out, model=sharded_mixtral(folder, fsdp_size=2), gradient_checkpointing=True)
        elif name == "expert_parallel":
            train(out, model=sharded_mixtral(folder, fsdp_size=2, ep_size=2))
        elif name == "shrunk":
            train(out, largest_rows=3, per_device_train_batch_size=4, auto_find_batch_size=True, logging_steps=1)
        elif name == "killed":
            train(out, logging_steps=1, callbacks=(KillAfter(3),))
        else:
            raise ValueError(name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
