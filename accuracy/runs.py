"""Public measured runs -> jobs of the cost model: one function a source, one record a run.

A row becomes a run only where ``rows.csv`` says so. What a source does not print and its own code or data set fixes is
filled in here, beside the reason.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from costmodel import xia2024
from costmodel.catalog import find_gpu, find_model_config
from costmodel.defaults import ResolvedJob, resolve
from costmodel.errors import CostModelError
from costmodel.hf_config import model_spec_from_config
from costmodel.lengths import batch_tokens, distribution, longest_batch
from costmodel.model_spec import Linear, ModelSpec
from costmodel.specs import GpuSpec, Job, parse_job
from costmodel.workload import Batch

FOLDER = Path(__file__).parent
GPU_NAMES = {
    "A100-80GB": "A100-SXM4-80GB",  # SXM or PCIe is not said; rented single cards of that size are mostly SXM
    "RTX PRO 6000 Blackwell (variant not stated)": "RTX PRO 6000 Blackwell Workstation",
    "A40": "A40",
    "A100-40GB": "A100-SXM4-40GB",
}


@dataclass(frozen=True)
class Run:
    """One measured run, ready for the model. Seconds are of one micro-batch, its share of the optimizer step included."""

    run_id: str
    source: str
    group: str  # source and kind of job: equal weight in a fit, one line in a table
    series: str  # what is left out together when the paper's curves are judged one by one
    model: ModelSpec
    job: ResolvedJob
    gpu: GpuSpec
    batch: Batch
    seconds: float | None
    memory: tuple[str, float] | None = None  # (allocated | reserved | device | other, GiB)
    longest: Batch | None = None  # what the memory peak is made of
    is_padded: bool = False
    keeps_logits: bool = False  # a loop of its own that holds the model's outputs through the backward

    @property
    def is_moe(self) -> bool:
        return self.model.is_moe


def read_rows(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def decisions() -> dict[str, dict[str, str]]:
    """``rows.csv`` by run id: which rows are used, written down before anything was fitted."""
    return {row["row_id"]: row for row in read_rows(FOLDER / "rows.csv")}


def all_runs() -> tuple[Run, ...]:
    """Every usable run, in the order of the sources."""
    return tuple(run for source in (*SOURCES, paper_runs) for run in source())


# --- models that the catalogue does not hold in the shape that ran ------------------------------------------------------


def with_fused_qkv(model: ModelSpec) -> ModelSpec:
    """The same weights with query, key and value in one linear (Qwen 1, litgpt): a third of the calls."""

    def fuse(linears: tuple[Linear, ...]) -> tuple[Linear, ...]:
        parts = [each for each in linears if each.leaf in {"q_proj", "k_proj", "v_proj"}]
        rest = tuple(each for each in linears if each not in parts)
        fused = Linear("self_attn.qkv_proj", parts[0].in_features, sum(each.out_features for each in parts), parts[0].bias)
        return (fused, *rest)

    layers = tuple((replace(layer, linears=fuse(layer.linears)), count) for layer, count in model.layers)
    return replace(model, layers=layers)


@cache
def model_of(name: str) -> ModelSpec:
    """The counted model of a row; two that the catalogue lacks are written out."""
    name = re.sub(r"-Chat$", "", name)
    if name == "microsoft/phi-1_5":
        return with_fused_qkv(model_spec_from_config(find_model_config(name), name=name))  # as litgpt runs it
    if name == "stabilityai/stablelm-base-alpha-3b":
        config = {
            "model_type": "gpt_neox",
            "hidden_size": 4096,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "intermediate_size": 16_384,
            "vocab_size": 50_688,
            "use_parallel_residual": False,
        }
        return model_spec_from_config(config, name=name)
    if name.startswith("Llama2-1B"):  # torchao's benchmark script: TinyLlama-sized Llama 2
        return model_spec_from_config(find_model_config("TinyLlama/TinyLlama-1.1B-Chat-v1.0"), name=name)
    return model_spec_from_config(find_model_config(name), name=name)


# --- a row, a job, a run ---------------------------------------------------------------------------------------------------


def make_run(
    row_id: str,
    source: str,
    group: str,
    model: ModelSpec,
    gpu_name: str,
    fields: Mapping[str, Any],
    *,
    seconds: float | None = None,
    memory: tuple[str, float] | None = None,
    series: str = "",
    resolved_changes: Mapping[str, Any] | None = None,
    longest_tokens: int | None = None,
    keeps_logits: bool = False,
) -> Run:
    """The run behind a row: its job with the framework's defaults, its expected batch and the longest one."""
    job: Job = parse_job({"model": model.name, **fields})
    resolved, _ = resolve(job, model)
    resolved = replace(resolved, **(resolved_changes or {}))
    assert job.lengths is not None
    tokens = batch_tokens(resolved, distribution(job.lengths, resolved.max_length))
    longest = tokens.longest
    if longest_tokens is not None:
        longest = longest_batch(resolved, resolved.per_device_train_batch_size, longest_tokens)
    return Run(
        run_id=row_id,
        source=source,
        group=f"{source} {group}",
        series=series or source,
        model=model,
        job=resolved,
        gpu=find_gpu(GPU_NAMES.get(gpu_name, gpu_name)),
        batch=tokens.expected,
        seconds=seconds,
        memory=memory,
        longest=longest,
        is_padded=tokens.is_padded and resolved.per_device_train_batch_size > 1,
        keeps_logits=keeps_logits,
    )


def _rows(source: str) -> Iterator[dict[str, str]]:
    for row in read_rows(FOLDER / "data" / f"{source}.csv"):
        decision = decisions()[row["row_id"]]
        if decision["time"] == "yes" or decision["memory"] == "yes":
            yield row


def _seconds(row: Mapping[str, str], value: float) -> float | None:
    return value if decisions()[row["row_id"]]["time"] == "yes" else None


def _memory(row: Mapping[str, str], kind: str, gib: float | str | None) -> tuple[str, float] | None:
    return (kind, float(gib)) if gib and decisions()[row["row_id"]]["memory"] == "yes" else None


PEFT_LONGEST_TOKENS = 656


def peft_runs() -> Iterator[Run]:
    """PEFT's own comparison on an L40S: bf16 weights, fp32 adapters without autocast, no checkpointing, a plain loop.

    Samples are sorted by length inside buckets of 80, so a batch of 4 holds nearly equal lengths. The loop keeps the KV
    cache and the logits alive through the backward. Its longest sample is not published; 656 tokens is what a trace of the
    same loop needs for the reserved peak of LoRA r 32, and is in line with the comparison's limit of 1,300 characters.
    """
    for row in _rows("peft_metamathqa"):
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
            seconds=_seconds(row, float(row["s_per_step"])),
            memory=_memory(row, "reserved", row["peak_reserved_gib"]),
            longest_tokens=PEFT_LONGEST_TOKENS,
            keeps_logits=True,
        )


# Alpaca with litgpt's prompt: the tables give its longest sample only. A round figure; the rows are host-bound.
ALPACA_MEAN_TOKENS = 130


def litgpt_runs() -> Iterator[Run]:
    """litgpt's resource tables of October 2023: bf16-true, LoRA r 8 on query and value inside one fused linear."""
    for row in _rows("litgpt_resource_tables"):
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
            seconds=_seconds(row, float(row["s_per_step"] or 0)),
            memory=_memory(row, "allocated", row["peak_alloc_gib"]),
        )


def qwen_runs() -> Iterator[Run]:
    """Qwen 1's profiling tables on an A100 80 GB: HF Trainer, flash attention, checkpointing, 8 micro-batches of one."""
    for row in _rows("qwen1_profiling"):
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
            seconds=_seconds(row, float(row["s_per_step"]) / 8),
            memory=_memory(row, "other", row["peak_other_gib"]),
        )


def swift_runs() -> Iterator[Run]:
    """ms-swift's benchmark on an A100 80 GB, memory only: over-long samples are deleted, so the mean length is unknown."""
    for row in _rows("ms_swift_benchmark"):
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
            memory=_memory(row, "reserved", row["peak_reserved_gib"]),
        )


def llmq_runs() -> Iterator[Run]:
    """llmq, a C++ trainer with CUDA graphs and fused kernels, packed rows of 1,024 tokens, bf16 matmuls."""
    for row in _rows("llmq_single_gpu"):
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
        rate = float(row["tokens_per_s"])
        yield make_run(
            row["row_id"],
            "llmq",
            "full",
            model_of(row["model_id"]),
            row["gpu"],
            fields,
            seconds=_seconds(row, int(row["micro_batch"]) * 1024 / rate),
        )


def torchao_runs() -> Iterator[Run]:
    """torchao's quantized-training table: TinyLlama-sized model, torchao's AdamW (compiled, so one pass over the states)."""
    for row in _rows("torchao"):
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
            row["row_id"], "torchao", "full", model_of(row["model_id"]), row["gpu"], fields, seconds=_seconds(row, seconds)
        )


def nemo_runs() -> Iterator[Run]:
    """NeMo AutoModel's LoRA rows on one H100: Transformer Engine layers, Triton LoRA kernels, mock data without padding."""
    for row in _rows("nemo_automodel"):
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
            seconds=_seconds(row, float(row["s_per_step"] or 0) / int(row["grad_accum"] or 1)),
        )


def fsdp_qlora_runs() -> Iterator[Run]:
    """fsdp_qlora's data-parallel rows: two cards, a full copy each, adapter gradients only, clocked over the whole run."""
    for row in _rows("fsdp_qlora"):
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
            fields["quantization"] = "nf4"
        yield make_run(
            row["row_id"],
            "fsdp_qlora",
            "QLoRA" if quantized else "LoRA",
            model_of(row["model_id"]),
            row["gpu"],
            fields,
            seconds=_seconds(row, size * 2048 / float(row["tokens_per_s"])),
            memory=_memory(row, "reserved", row["peak_reserved_gib"]),
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


# --- the paper -------------------------------------------------------------------------------------------------------------

PAPER_DATASETS = {"CS": ("commonsense_15k", 512), "MATH": ("math_14k", 1024)}
PAPER_SOURCE = {"Mixtral": "paper Mixtral", "BlackMamba": "paper BlackMamba"}


def paper_model(name: str, density: str) -> ModelSpec | None:
    """The paper's two models; dense means that every token visits all eight experts. ``None`` while not modelled."""
    catalogued = {"Mixtral": "mistralai/Mixtral-8x7B-v0.1", "BlackMamba": "Zyphra/BlackMamba-2.8B"}[name]
    config = dict(find_model_config(catalogued))
    active = 8 if density == "dense" else 2
    config["topk" if name == "BlackMamba" else "num_experts_per_tok"] = active
    try:
        return model_spec_from_config(config, name=f"{catalogued} {density}")
    except CostModelError:
        return None


def paper_fields(name: str, batch_size: int, lengths: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    """The paper's setting: transformers 4.40, bitsandbytes; Mixtral by QLoRA r 16 on the experts and the router.

    BlackMamba is trained whole, in bf16. Both with gradient checkpointing.
    """
    common = {
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": 1,
        "optim": "adamw_torch",
        "max_length": max_length,
        "lengths": dict(lengths),
        "framework": "transformers",
        "framework_version": "4.40",
        "gradient_checkpointing": True,
    }
    if name == "BlackMamba":
        return {**common, "method": "full", "dtype": "bfloat16", "gradient_checkpointing": False}
    return {
        **common,
        "method": "qlora",
        "quantization": "nf4",
        "double_quant": True,
        "dtype": "bfloat16",
        "bf16": True,
        "lora_r": 16,
        "lora_alpha": 16,
        "lora_target_modules": ("w1", "w2", "w3", "gate"),
    }


def paper_run(name: str, density: str, gpu: str, batch_size: int, dataset: str, seconds: float | None) -> Run | None:
    """One point of the paper; ``dataset`` is CS, MATH or a fixed number of tokens."""
    model = paper_model(name, density)
    if model is None:
        return None
    catalogued, max_length = PAPER_DATASETS.get(dataset, ("", 128))
    lengths = {"dataset": catalogued} if catalogued else {"fixed": 128}
    source = PAPER_SOURCE[name]
    return make_run(
        f"paper-{name}-{dataset}-{gpu}-{density}-{batch_size}",
        source,
        {"A40": "A40"}.get(gpu, gpu) + (" profile" if not catalogued else ""),
        model,
        gpu,
        paper_fields(name, batch_size, lengths, max_length),
        seconds=seconds,
        series=f"{name} {dataset} {gpu}",
    )


def paper_runs() -> Iterator[Run]:
    """All points of Figs. 14 and 15 and the step totals of Fig. 4."""
    for row in xia2024.read_table("throughput"):
        size = int(row["batch_size"])
        run = paper_run(row["model"], row["density"], row["gpu"], size, row["dataset"], size / float(row["queries_per_s"]))
        if run:
            yield run
    stages: dict[tuple[str, str, int], float] = {}
    for row in xia2024.read_table("latency_breakdown"):
        if row["level"] == "stage":
            key = (row["model"], row["density"], int(row["batch_size"]))
            stages[key] = stages.get(key, 0.0) + float(row["value"])
    for (name, density, size), seconds in stages.items():
        run = paper_run(name, density, "A40", size, "128 tokens", seconds)
        if run:
            yield run
