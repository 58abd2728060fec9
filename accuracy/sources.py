"""Public measured runs -> jobs of the cost model, one function a source.

A row becomes a run only where ``rows.csv`` says so. What a source does not print and its own code or data set fixes is
filled in here, beside the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from runs import Run, chosen_rows, make_run, memory_of, model_of, seconds_of, with_fused_qkv

from costmodel.units import GIB, GIGA

PEFT_LONGEST_TOKENS = 656


def peft_runs() -> Iterator[Run]:
    """PEFT's own comparison on an L40S: bf16 weights, fp32 adapters without autocast, no checkpointing, a plain loop.

    Samples are sorted by length inside buckets of 80, so a batch of 4 holds nearly equal lengths. The loop keeps the KV
    cache and the logits alive through the backward. Its longest sample is not published; 656 tokens is what a trace of the
    same loop needs for the reserved peak of LoRA r 32, and is in line with the comparison's limit of 1,300 characters.
    """
    for row in chosen_rows("peft_metamathqa"):
        full = row["method"] == "full"
        version = re.search(r"transformers (\d+\.\d+)", row["framework_version"])
        fields: dict[str, Any] = {
            "method": row["method"],
            "dtype": "bfloat16",
            "per_device_train_batch_size": 4,
            "gradient_checkpointing": False,
            "optim": "adamw_torch",
            "max_length": 768,
            "lengths": {"mean": 209.9, "max": 768},
            "train_sampling_strategy": "group_by_length",
            "use_cache": True,
            "framework": "transformers",
            "framework_version": version[1] if version else "5.0",
        }
        if not full:
            fields |= {
                "lora_r": int(row["lora_rank"]),
                "lora_target_modules": tuple(row["lora_targets"].split()),
                "use_dora": "dora" in row["method_detail"],
                "adapter_dtype": "float32",
            }
        yield make_run(
            row["row_id"],
            "peft",
            "full" if full else "LoRA",
            model_of(row["model_id"]),
            row["gpu"],
            fields,
            seconds=seconds_of(row, float(row["s_per_step"])),
            memory=memory_of(row, "reserved", row["peak_reserved_gib"]),
            longest_tokens=PEFT_LONGEST_TOKENS,
            keeps_logits=True,
        )


# Alpaca with litgpt's prompt: the tables give its longest sample only. A round figure; the rows are host-bound.
ALPACA_MEAN_TOKENS = 130


def litgpt_runs() -> Iterator[Run]:
    """litgpt's resource tables of October 2023: bf16-true, LoRA r 8 on query and value inside one fused linear."""
    for row in chosen_rows("litgpt_resource_tables"):
        model = model_of(row["model_id"])
        if row["model_id"].startswith("meta-llama"):
            model = with_fused_qkv(model)
        quantized = row["weight_precision"].startswith("nf4")
        longest = int(row["seq_len_max"])
        fields: dict[str, Any] = {
            "method": "qlora" if quantized else "lora",
            "dtype": "bfloat16",
            "lora_r": 8,
            "lora_target_modules": ("qkv_proj", "query_key_value"),
            "lora_dropout": 0.05,
            "adapter_dtype": "bfloat16",
            "per_device_train_batch_size": int(row["micro_batch"]),
            "gradient_accumulation_steps": int(row["grad_accum"]),
            "gradient_checkpointing": False,
            "optim": "adamw_torch",
            "max_length": longest,
            "lengths": {"mean": ALPACA_MEAN_TOKENS, "max": longest},
            "framework": "litgpt",
            "prepare_model_for_kbit_training": False,
        }
        if quantized:
            fields |= {"quantization": "nf4", "double_quant": row["weight_precision"] == "nf4-dq"}
        yield make_run(
            row["row_id"],
            "litgpt",
            "QLoRA" if quantized else "LoRA",
            model,
            row["gpu"],
            fields,
            seconds=seconds_of(row, float(row["s_per_step"] or 0)),
            memory=memory_of(row, "allocated", row["peak_alloc_gib"]),
            resolved_changes={"four_bit_keeps_inputs": quantized, "dequantises_by_table": False},  # bitsandbytes 0.41
        )


# The script of Qwen for Q-LoRA on one GPU goes through DeepSpeed stage 2, since fp16 under autocast failed there. It is not
# printed beside the table and was not re-read. DeepSpeed casts adapters to fp16 and keeps fp32 masters; no autocast. That
# the rows grow by 4 to 9 bytes a logit, where bf16 under autocast takes 12 to 16, bears it out.
QWEN_DEEPSPEED = {"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 2e8}}


# Qwen prints "G" without saying which. Read as 1e9 bytes: what the figures hold beyond a replay of their stack is then much
# the same from 1.8B to 72B; read as 2**30 it grows with the model, from 2 to 6 GiB (qwen_replays.csv). Decided by looking.


def qwen_runs() -> Iterator[Run]:
    """Qwen 1's profiling tables on an A100 80 GB: HF Trainer, flash attention, checkpointing, 8 micro-batches of one."""
    for row in chosen_rows("qwen1_profiling"):
        full, quantized = row["method"] == "full", row["method"] == "qlora"
        length = int(row["seq_len_max"])
        fields: dict[str, Any] = {
            "method": row["method"],
            "dtype": "float16" if quantized else "bfloat16",
            "fp16" if quantized else "bf16": True,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 8,
            "gradient_checkpointing": True,
            "attn_implementation": "flash_attention_2",
            "optim": "adamw_torch",
            "max_length": length,
            "lengths": {"fixed": length},
            "framework": "transformers",
            "framework_version": "4.32",
        }
        if quantized:
            fields |= {"adapter_dtype": "float16", "deepspeed": QWEN_DEEPSPEED}
        if not full:
            fields |= {
                "lora_r": 64,
                "lora_target_modules": ("c_attn", "attn.c_proj", "w1", "w2"),
                "lora_dropout": 0.05,
            }
        if quantized:
            fields["quantization"] = "gptq-int4"
        if "emb" in row["method_detail"]:
            fields["lora_modules_to_save"] = ("wte", "lm_head")
        if full:
            fields["deepspeed"] = {"zero_optimization": {"stage": 3}}
        yield make_run(
            row["row_id"],
            "qwen1",
            "full" if full else "GPTQ" if quantized else "LoRA",
            model_of(row["model_id"]),
            row["gpu"],
            fields,
            seconds=seconds_of(row, float(row["s_per_step"]) / 8),
            memory=memory_of(row, "other", float(row["peak_other_gib"]) * GIGA / GIB),
            loss_in_fp32=not quantized,  # the remote code leaves the loss to autocast, and DeepSpeed has none
        )


def swift_runs() -> Iterator[Run]:
    """ms-swift's benchmark on an A100 80 GB, memory only: over-long samples are deleted, so the mean length is unknown."""
    for row in chosen_rows("ms_swift_benchmark"):
        full, length = row["method"] == "full", int(row["seq_len_max"])
        precision = row["weight_precision"]
        fields: dict[str, Any] = {
            "method": row["method"],
            "dtype": "bfloat16",
            "bf16": True,
            "per_device_train_batch_size": int(row["micro_batch"]),
            "gradient_accumulation_steps": 16,
            "gradient_checkpointing": True,
            "attn_implementation": "flash_attention_2",
            "optim": "adamw_torch",
            "max_length": length,
            "lengths": {"fixed": length},
            "framework": "transformers",
            "framework_version": "4.36",
        }
        if not full:
            is_qwen = row["model_id"].startswith("Qwen")
            targets = ("c_attn",) if is_qwen else ("q_proj", "k_proj", "v_proj")
            fields |= {"lora_r": int(row["lora_rank"] or 8), "lora_target_modules": targets, "lora_dropout": 0.05}
        if precision in {"nf4", "gptq-int4"}:
            fields["quantization"] = precision
        yield make_run(
            row["row_id"],
            "ms_swift",
            "full" if full else "QLoRA" if precision != "bf16" else "LoRA",
            model_of(row["model_id"]),
            row["gpu"],
            fields,
            memory=memory_of(row, "reserved", row["peak_reserved_gib"]),
        )


def llmq_runs() -> Iterator[Run]:
    """llmq, a C++ trainer with CUDA graphs and fused kernels, packed rows of 1,024 tokens, bf16 matmuls."""
    for row in chosen_rows("llmq_single_gpu"):
        fields = {
            "method": "full",
            "dtype": "bfloat16",
            "per_device_train_batch_size": int(row["micro_batch"]),
            "gradient_accumulation_steps": int(row["grad_accum"]),
            "gradient_checkpointing": row["grad_checkpointing"] == "yes",
            "optim": "adamw_torch_fused",
            "fused_loss": "fused",
            "torch_compile": True,
            "use_liger_kernel": True,
            "max_length": 1024,
            "lengths": {"fixed": 1024},
            "framework": "other",
        }
        if row["gpu"].startswith("H100"):
            fields["attn_implementation"] = "flash_attention_3"  # stands for cuDNN's, which uses Hopper's instructions
        rate = float(row["tokens_per_s"])
        yield make_run(
            row["row_id"],
            "llmq",
            "full",
            model_of(row["model_id"]),
            row["gpu"],
            fields,
            seconds=seconds_of(row, int(row["micro_batch"]) * 1024 / rate),
        )


def torchao_runs() -> Iterator[Run]:
    """torchao's quantized-training table: TinyLlama-sized model, torchao's AdamW (compiled, so one pass over the states)."""
    for row in chosen_rows("torchao"):
        fields = {
            "method": "full",
            "dtype": "bfloat16",
            "per_device_train_batch_size": int(row["micro_batch"]),
            "gradient_checkpointing": row["grad_checkpointing"] == "yes",
            "optim": "adamw_torch_fused",
            "torch_compile": row["compile"] == "yes",
            "max_length": 2048,
            "lengths": {"fixed": 2048},
            "framework": "other",
        }
        seconds = int(row["micro_batch"]) * 2048 / float(row["tokens_per_s"])
        yield make_run(
            row["row_id"], "torchao", "full", model_of(row["model_id"]), row["gpu"], fields, seconds=seconds_of(row, seconds)
        )


def nemo_runs() -> Iterator[Run]:
    """NeMo AutoModel's LoRA rows on one H100: Transformer Engine layers, Triton LoRA kernels, mock data without padding."""
    for row in chosen_rows("nemo_automodel"):
        fields = {
            "method": "lora",
            "dtype": "bfloat16",
            "lora_r": 16,
            "lora_target_modules": "all-linear",
            "adapter_dtype": "bfloat16",
            "per_device_train_batch_size": int(row["micro_batch"]),
            "gradient_accumulation_steps": int(row["grad_accum"]),
            "gradient_checkpointing": False,
            "optim": "adamw_torch_fused",
            "use_liger_kernel": True,  # stands for fused norms, rope, activation and loss
            "fused_loss": "fused",
            "attn_implementation": "flash_attention_3",  # stands for Transformer Engine's, which uses Hopper's instructions
            "max_length": 4096,
            "lengths": {"fixed": 4096},
            "framework": "other",
        }
        yield make_run(
            row["row_id"],
            "nemo",
            "LoRA",
            model_of(row["model_id"]),
            row["gpu"],
            fields,
            seconds=seconds_of(row, float(row["s_per_step"] or 0) / int(row["grad_accum"] or 1)),
        )


def fsdp_qlora_runs() -> Iterator[Run]:
    """fsdp_qlora's data-parallel rows: two cards, a full copy each, adapter gradients only, clocked over the whole run."""
    for row in chosen_rows("fsdp_qlora"):
        quantized = row["method"] == "qlora"
        size = int(row["micro_batch"])
        fields: dict[str, Any] = {
            "method": row["method"],
            "dtype": "bfloat16",
            "lora_r": 64,
            "lora_target_modules": ("q_proj", "k_proj", "v_proj", "up_proj", "down_proj", "gate_proj"),
            "lora_dropout": 0.1,
            "adapter_dtype": "bfloat16",
            "prepare_model_for_kbit_training": False,
            "per_device_train_batch_size": size,
            "gradient_checkpointing": True,
            "optim": "adamw_torch",
            "max_length": 2048,
            "lengths": {"fixed": 2048},
            "framework": "other",
        }
        if quantized:
            # train.py has a switch for it, to save memory with bitsandbytes; without it the kept inputs alone need 22 GiB,
            # more than was measured in all
            fields |= {"quantization": "nf4", "gradient_checkpointing_kwargs": {"use_reentrant": True}}
        yield make_run(
            row["row_id"],
            "fsdp_qlora",
            "QLoRA" if quantized else "LoRA",
            model_of(row["model_id"]),
            row["gpu"],
            fields,
            seconds=seconds_of(row, size * 2048 / float(row["tokens_per_s"])),
            memory=memory_of(row, "reserved", row["peak_reserved_gib"]),
            keeps_logits=True,  # `output` lives until the next step (train.py)
            # transformers 4.38 and bitsandbytes 0.43 of March 2024
            resolved_changes={"four_bit_keeps_inputs": quantized, "upcasts_logits": True, "dequantises_by_table": False},
        )


SOURCES = (
    peft_runs,
    litgpt_runs,
    qwen_runs,
    swift_runs,
    llmq_runs,
    torchao_runs,
    nemo_runs,
    fsdp_qlora_runs,
)
