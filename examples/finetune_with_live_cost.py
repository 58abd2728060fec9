"""Estimate a fine-tune, run it with its live cost in W&B, be interrupted, resume, and read the report.

Without arguments: a small randomly initialised Mixtral on text that ships with Python; no account, no network.

    python examples/finetune_with_live_cost.py

With a real model and your own data (hub ids or local paths):

    python examples/finetune_with_live_cost.py --model Qwen/Qwen3-0.6B --dataset train.jsonl --usd-per-gpu-hour 2.10

No GPU has run that line yet.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

# A demo needs no account: WANDB_MODE=online sends the run to yours. Read when wandb is imported.
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # without a GPU it says at import which kernels it lacks

import torch
import wandb
from datasets import Dataset, disable_progress_bars, load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils.logging import set_verbosity_error

from costmodel import CostModelError, Estimate, estimate
from ftcost_callback import FTCostCallback, estimate_trainer
from ftcost_callback.probe import probe_cpu
from ftcost_callback.report_html import write_report

SEED = 17
GIB = 2**30

# The tiny random models: a shape each family shares, and what is its own.
SHARED_SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
OWN_SHAPE: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4},
    "llama": {"intermediate_size": 1024},
}
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]

# Xia et al. 2024, arXiv:2408.04693, section V: Mixtral-8x7B with QLoRA on mathematics questions.
PAPER_JOB: dict[str, Any] = {
    "model": "mistralai/Mixtral-8x7B-v0.1",
    "method": "qlora",
    "quantization": "nf4",
    "double_quant": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_target_modules": ["w1", "w2", "w3", "gate"],
    "bf16": True,
    "dtype": "bfloat16",
    "gradient_checkpointing": True,
    "attn_implementation": "flash_attention_2",
    "max_length": 1024,
    "lengths": {"dataset": "math_14k"},
    "num_samples": 15_000,
    "num_train_epochs": 10,
    "framework": "transformers",
    "framework_version": "4.40",
}
# GPU -> (their batch size, the samples per second they measured): table IV.
PAPER_GPUS = {"NVIDIA A40": (4, 1.01), "A100-SXM4-80GB": (17, 2.74), "H100 SXM": (17, 4.90)}
PAPER_PRICES = {"cloud": "RunPod", "tier": "on_demand"}  # rents each of the three by the single GPU


class StopAtFirstCheckpoint(TrainerCallback):
    """Ends training right after its first checkpoint, as a reclaimed spot machine would."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    run_file = options.output_dir / "_ftcost" / "run.jsonl"
    if run_file.exists():
        print(f"{options.output_dir} already holds a run: delete it, or give another --output-dir", file=sys.stderr)
        return 2
    options.output_dir.mkdir(parents=True, exist_ok=True)
    set_verbosity_error()
    disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # peft uses a renamed property

    print_heading("1. What it will cost")
    gpu = None
    if not torch.cuda.is_available():
        print("No GPU here: measuring this CPU's matmul rate, memory bandwidth and cost per operator instead.")
        gpu = probe_cpu(seconds=options.probe_seconds, say=print)
    tokenizer = load_tokenizer(options)
    samples = load_samples(options, tokenizer)
    trainer = build_trainer(options, tokenizer, samples, gpu)
    print("This job, on this machine:")
    print_estimate("here", estimate_trainer(trainer, gpu=gpu, usd_per_gpu_hour=options.usd_per_gpu_hour))
    print("\nThe paper's job, Mixtral-8x7B QLoRA for 10 epochs on 15,000 mathematics questions, at dated list prices:")
    for name, (batch_size, measured_samples_per_second) in PAPER_GPUS.items():
        answer = estimate(PAPER_JOB, gpu=name, per_device_train_batch_size=batch_size, **PAPER_PRICES)
        print_estimate(name, answer)
        print(f"  {'':<16} they measured {15_000 * 10 / measured_samples_per_second / 3600:.1f} h at batch {batch_size}")

    print_heading("2. What it costs while it runs")
    with wandb.init(project="ftcost-demo", dir=options.output_dir) as wandb_run:
        if not options.uninterrupted:
            trainer.add_callback(StopAtFirstCheckpoint())
            trainer.train()
            checkpoint = options.output_dir / f"checkpoint-{trainer.state.global_step}"
            print(f"\nstopped at step {trainer.state.global_step}; a new Trainer resumes from {checkpoint}\n")
            trainer = build_trainer(options, tokenizer, samples, gpu)
            trainer.train(resume_from_checkpoint=str(checkpoint))
        else:
            trainer.train()
        wandb_folder = Path(wandb_run.dir).parent

    print_heading("3. What it cost")
    report = write_report([run_file], options.output_dir / "report.html")
    print_outcome(run_file)
    print(f"\nrun record  {run_file}\nW&B run     {wandb_folder}\nreport      {report}")
    return 0


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or folder; without it a tiny random model is made")
    parser.add_argument("--architecture", choices=sorted(OWN_SHAPE), default="mixtral", help="of the tiny model")
    parser.add_argument("--dataset", help="hub id, or a JSONL file with a 'text' or 'messages' field in each line")
    parser.add_argument("--trainer", choices=["trainer", "sft"], default="trainer", help="transformers' or TRL's")
    parser.add_argument("--usd-per-gpu-hour", type=float, default=2.10, help="what this machine costs (default %(default)s)")
    parser.add_argument("--max-steps", type=int, help="optimizer steps (default: one epoch)")
    parser.add_argument("--max-length", type=int, default=256, help="tokens; longer samples are cut (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="samples a micro-batch (default %(default)s)")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches a step (default %(default)s)")
    parser.add_argument("--output-dir", type=Path, default=Path("demo_output"))
    parser.add_argument("--uninterrupted", action="store_true", help="do not stop at the first checkpoint and resume")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that everything works")
    options = parser.parse_args(argv)
    options.max_steps = options.max_steps or (8 if options.quick else None)
    options.probe_seconds = 1.0 if options.quick else 10.0
    return options


# --- data, model, trainer: what your own script has already --------------------------------------------------------


def load_tokenizer(options: argparse.Namespace) -> Any:
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer
    return train_tokenizer(paragraphs_of_python_help())


def paragraphs_of_python_help() -> list[str]:
    """The paragraphs of ``help()``: about 1,700 pieces of English and Python of very different lengths."""
    from pydoc_data.topics import topics

    paragraphs = (text.strip() for topic in topics.values() for text in re.split(r"\n\s*\n", topic))
    return [text for text in paragraphs if len(text) >= 60]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the tiny models' vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=SHARED_SHAPE["vocab_size"], special_tokens=list(special.values()), show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def load_samples(options: argparse.Namespace, tokenizer: Any) -> dict[str, Dataset]:
    """``train`` and ``test`` sets of token ids, each sample at its natural length."""
    if options.dataset is None:
        rows = Dataset.from_dict({"text": paragraphs_of_python_help()}).shuffle(seed=SEED).select(range(704))
    elif Path(options.dataset).suffix in {".json", ".jsonl"}:
        rows = load_dataset("json", data_files=options.dataset, split="train")
    else:
        rows = load_dataset(options.dataset, split="train")
    if not {"text", "messages"} & set(rows.column_names):
        raise SystemExit(f"{options.dataset} has neither a 'text' nor a 'messages' column: {', '.join(rows.column_names)}")

    def tokenize(row: dict[str, Any]) -> dict[str, list[int]]:
        text = row["text"] if "text" in row else tokenizer.apply_chat_template(row["messages"], tokenize=False)
        ids = tokenizer(text + tokenizer.eos_token, truncation=True, max_length=options.max_length)["input_ids"]
        return {"input_ids": ids}

    tokenized = rows.map(tokenize, remove_columns=rows.column_names)
    return dict(tokenized.train_test_split(test_size=min(64, len(tokenized) // 10), seed=SEED))


def load_model(options: argparse.Namespace, tokenizer: Any) -> Any:
    """The base model with LoRA on its attention. The seed makes both sessions start from the same random base."""
    set_seed(SEED)
    if options.model:
        base = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    else:
        special_ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        shape = SHARED_SHAPE | OWN_SHAPE[options.architecture] | special_ids
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(options.architecture, **shape))
    return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=LORA_TARGETS))


def build_trainer(
    options: argparse.Namespace, tokenizer: Any, samples: dict[str, Dataset], gpu: dict[str, Any] | None
) -> Trainer:
    """An ordinary Trainer (or TRL's SFTTrainer); the last argument of each is all that ftcost adds."""
    epoch_steps = -(-len(samples["train"]) // (options.batch_size * options.accumulation))
    max_steps = options.max_steps or epoch_steps
    settings: dict[str, Any] = {
        "output_dir": str(options.output_dir),
        "per_device_train_batch_size": options.batch_size,
        "gradient_accumulation_steps": options.accumulation,
        "max_steps": max_steps,
        "learning_rate": 1e-3,
        "bf16": torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        "eval_strategy": "steps",
        "eval_steps": -(-max_steps // 4),
        "save_strategy": "steps",
        "save_steps": -(-max_steps // 2),
        "logging_steps": 5,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "report_to": "wandb",
        "disable_tqdm": True,
        "seed": SEED,
    }
    common: dict[str, Any] = {
        "model": load_model(options, tokenizer),
        "processing_class": tokenizer,
        "train_dataset": samples["train"],
        "eval_dataset": samples["test"],
        "callbacks": [FTCostCallback(usd_per_gpu_hour=options.usd_per_gpu_hour, gpu=gpu)],
    }
    if options.trainer == "sft":
        from trl import SFTConfig, SFTTrainer

        return SFTTrainer(args=SFTConfig(**settings, max_length=options.max_length), **common)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)  # pads each batch to its longest sample
    return Trainer(args=TrainingArguments(**settings), data_collator=collator, **common)


# --- what is printed ------------------------------------------------------------------------------------------


def print_heading(title: str) -> None:
    print(f"\n{title}\n{'=' * len(title)}")


def print_estimate(name: str, answer: Estimate) -> None:
    """One line: does it fit, how long is a step, how long and how much is the run; each with its interval."""
    text = f"  {name:<16} {answer.verdict:<12} peak {answer.memory.peak_device_bytes / GIB:5.1f} GiB"
    if answer.step_seconds is not None:
        text += f"  step {answer.step_seconds:6.2f} s ({answer.step_seconds_low:.2f} to {answer.step_seconds_high:.2f})"
    if answer.total_seconds is not None:
        hours = answer.total_seconds / 3600
        text += f"  run {hours:5.1f} h" if hours >= 1 else f"  run {hours * 60:5.1f} min"
    if answer.total_usd is not None and answer.price is not None:
        text += f"  ${answer.total_usd:.2f} (${answer.total_usd_low:.2f} to ${answer.total_usd_high:.2f})"
        text += f" at ${answer.price.usd_per_gpu_hour:.2f}/h"
        text += f", {answer.price.cloud} {answer.price.as_of}" if answer.price.as_of else ""
    print(text)


def print_outcome(run_file: Path) -> None:
    """Dollars over all sessions, and each prediction beside what was measured, from the run record."""
    rows = [json.loads(line) for line in run_file.read_text().splitlines()]
    summary = [row for row in rows if row["type"] == "summary"][-1]
    predictions = {row["basis"]: row for row in rows if row["type"] == "prediction"}
    num_sessions, wall_seconds = summary["num_sessions"], summary["wall_seconds"]
    print(f"${summary['spent_usd']:.4f} for {wall_seconds:.0f} s of wall time in {num_sessions} sessions")
    measured = {
        "step_seconds": summary.get("step_seconds_mean"),
        "num_tokens_per_step": summary["num_tokens"] / summary["num_steps"],
        "total_seconds": wall_seconds,
        "total_usd": summary["spent_usd"],
    }
    columns = [
        ("predicted before", predictions.get("before", {})),
        ("on tokens seen", predictions.get("tokens_seen", {})),
    ]
    print(f"\n{'':<22}" + "".join(f"{title:>18}" for title, _ in [*columns, ("measured", measured)]))
    for name in measured:
        values = [column.get(name) for _, column in [*columns, ("", measured)]]
        print(f"{name:<22}" + "".join(f"{'-' if value is None else f'{value:.4g}':>18}" for value in values))
    print(f"\n{summary.get('verdict', '')}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CostModelError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
