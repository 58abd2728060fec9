"""A dozen real trainings, each predicted and measured: random weights, random tokens, a stock ``Trainer``."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from dataclasses import dataclass, field
from typing import Any, Final

# Shapes of published models; weights are random, since neither time nor memory depends on their values.
LLAMA_1B: Final[dict[str, Any]] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip
SMALL_MOE: Final[dict[str, Any]] = {
    "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 768, "max_position_embeddings": 8192,
}  # fmt: skip
TINY: Final[dict[str, Any]] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16, "max_position_embeddings": 256,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GpuJob:
    """``dtype``: of the weights; ``arguments``: of ``TrainingArguments``."""

    name: str
    family: str = "llama"
    lora: bool = False
    dtype: str = "bfloat16"
    batch_size: int = 4
    length: int = 1024
    arguments: dict[str, Any] = field(default_factory=dict)

    def shrunk(self) -> GpuJob:
        """Small enough for any CPU, with every switch as it is."""
        return dataclasses.replace(self, batch_size=2, length=16)


CHECKPOINTING: Final = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}

JOBS: Final = (
    GpuJob(name="llama-1b full bf16"),
    GpuJob(name="llama-1b full bf16, batch 1", batch_size=1),
    GpuJob(name="llama-1b full bf16, batch 8 x 512", batch_size=8, length=512),
    GpuJob(name="llama-1b full bf16, checkpointing", arguments=CHECKPOINTING),
    GpuJob(name="llama-1b full bf16, length 4096, checkpointing", batch_size=1, length=4096, arguments=CHECKPOINTING),
    GpuJob(name="llama-1b full, fp32 weights under autocast", dtype="float32", batch_size=2, arguments={"bf16": True}),
    GpuJob(name="llama-1b full bf16, accumulation 4", batch_size=1, arguments={"gradient_accumulation_steps": 4}),
    GpuJob(name="llama-1b LoRA", lora=True),
    GpuJob(name="llama-1b LoRA, batch 1", lora=True, batch_size=1),
    GpuJob(name="llama-1b LoRA, checkpointing, batch 16", lora=True, batch_size=16, arguments=CHECKPOINTING),
    GpuJob(name="moe full bf16", family="qwen3_moe"),
    GpuJob(name="moe full bf16, checkpointing", family="qwen3_moe", arguments=CHECKPOINTING),
    GpuJob(name="moe LoRA", family="qwen3_moe", lora=True),
)


def make_model(job: GpuJob, device: str, *, tiny: bool) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    if job.family == "qwen3_moe":
        shape = (SMALL_MOE | TINY | {"num_experts": 4, "num_experts_per_tok": 2}) if tiny else SMALL_MOE
        config: Any = transformers.Qwen3MoeConfig(**shape)
    else:
        config = transformers.LlamaConfig(**(LLAMA_1B | TINY if tiny else LLAMA_1B))
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, job.dtype))
    if not job.lora:
        return model
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] + ([] if job.family == "qwen3_moe" else ["up_proj", "down_proj"])
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets))


def rows(job: GpuJob, count: int, vocabulary: int) -> list[dict[str, list[int]]]:
    """Random tokens, all supervised."""
    import random

    chance = random.Random(0)
    ids = [[chance.randrange(vocabulary) for _ in range(job.length)] for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in ids]


def measured(job: GpuJob, *, device: str, tiny: bool, steps: int, gpu: Any = None) -> dict[str, Any]:
    """Train ``steps`` steps; what was predicted before the first one, and what the run record says.

    ``gpu``: describes a device that is in no catalogue. Raises what training raises.
    """
    import torch
    from transformers import Trainer, TrainingArguments, default_data_collator

    from ftcost_callback import FTCostCallback
    from ftcost_callback.run_file import read_run

    used_before = _used_bytes(device)
    model = make_model(job, device, tiny=tiny)
    vocabulary = model.config.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        fields: dict[str, Any] = {
            "output_dir": folder, "per_device_train_batch_size": job.batch_size, "max_steps": steps, "report_to": "none",
            "logging_steps": steps, "save_strategy": "no", "disable_tqdm": True, "use_cpu": device == "cpu",
        }  # fmt: skip
        arguments = TrainingArguments(**(fields | job.arguments))
        trainer = Trainer(
            model=model, args=arguments, train_dataset=rows(job, 4 * job.batch_size, vocabulary),
            data_collator=default_data_collator, callbacks=[FTCostCallback(sinks=[], gpu=gpu, skip_first_steps=3)],
        )  # fmt: skip
        trainer.train()
        used_after = _used_bytes(device)
        record = read_run(folder)
    steps_measured = record.steps[3:]
    before = record.predictions[0].estimate if record.predictions else {}
    memory = before.get("memory") or {}
    summary = record.summary
    is_cuda = device != "cpu"
    return {
        "name": job.name,
        "job": {name: value for name, value in (record.sessions[0].job or {}).items() if name != "gpu"},
        "notes": record.sessions[0].notes,
        "measured": {
            "step_seconds_median": statistics.median(step.step_seconds for step in steps_measured),
            "step_seconds": [round(step.step_seconds, 6) for step in record.steps],
            "num_tokens_per_step": steps_measured[-1].num_tokens,
            "peak_allocated_bytes": summary.peak_allocated_bytes if summary else None,
            "peak_reserved_bytes": summary.peak_reserved_bytes if summary else None,
            "peak_allocated_bytes_whole_process": torch.cuda.max_memory_allocated() if is_cuda else None,
            "loading_peak_allocated_bytes": summary.loading_peak_allocated_bytes if summary else None,
            # Blocks that torch keeps stay taken, so the end is the peak of the device but for the allocator's returns.
            "device_bytes": used_after - used_before if used_after is not None and used_before is not None else None,
            "mfu": summary.mfu if summary else None,
            "verdict": summary.verdict if summary else None,
        },
        "predicted": {
            "step_seconds": before.get("step_seconds"),
            "step_seconds_low": before.get("step_seconds_low"),
            "step_seconds_high": before.get("step_seconds_high"),
            "mfu": before.get("mfu"),
            "by_group_seconds": (before.get("step") or {}).get("by_group_seconds"),
            "peak_allocated_bytes": memory.get("peak_allocated_bytes"),
            "peak_reserved_bytes": memory.get("peak_reserved_bytes"),
            "peak_device_bytes": memory.get("peak_device_bytes"),
            "context_bytes": memory.get("context_bytes"),
        },
    }


def _used_bytes(device: str) -> int | None:
    """On the whole card, all processes."""
    if device == "cpu":
        return None
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free
