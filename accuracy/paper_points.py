"""The points of arXiv:2408.04693 -> jobs of the cost model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runs import Run, make_run

from costmodel import xia2024
from costmodel.capacity import max_batch_size
from costmodel.defaults import resolve
from costmodel.errors import CostModelError
from costmodel.gpu_catalog import find_gpu
from costmodel.hf_config import model_spec_from_config
from costmodel.length_datasets import length_histogram
from costmodel.model_catalog import find_model_config
from costmodel.model_spec import ModelSpec
from costmodel.specs import parse_job

# The histogram holds the samples themselves: the shortest, 42 tokens, is a yes-or-no question and its answer. What is
# trained on is taken to stand in the prompt of the data sets' authors ("Below is an instruction that describes a task
# ..."): about 35 tokens more. Against the 128-token profile of the same paper, 30 to 50 tokens more explain both of
# Mixtral's data sets, dense and sparse (a regression on the paper's points alone).
PROMPT_TOKENS = 35
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


# What the paper does not print and its largest batches tell apart, of two settings either way: no peft preparation (the
# hidden states stay in 16 bit), and checkpointing that does not re-enter, past which bitsandbytes of that time kept inputs.
PAPER_MEMORY_FIELDS: dict[str, Any] = {
    "prepare_model_for_kbit_training": False,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}


def paper_max_batch(name: str, density: str, gpu: str, sequence_tokens: int, **changes: Any) -> int | None:
    """Our largest batch of one of the paper's settings, by what the card's driver reports."""
    model = paper_model(name, density)
    if model is None:
        return None
    fields = paper_fields(name, 1, {"fixed": sequence_tokens}, sequence_tokens)
    if name == "Mixtral":
        fields |= PAPER_MEMORY_FIELDS | changes
    job, _ = resolve(parse_job({"model": model.name, **fields}), model)
    return max_batch_size(model, job, find_gpu(gpu).memory_bytes, sequence_tokens, is_padded=True)


def paper_run(name: str, density: str, gpu: str, batch_size: int, dataset: str, seconds: float | None) -> Run | None:
    """One point of the paper; ``dataset`` is CS, MATH or a fixed number of tokens."""
    model = paper_model(name, density)
    if model is None:
        return None
    catalogued, max_length = PAPER_DATASETS.get(dataset, ("", 128))
    lengths: dict[str, Any] = {"fixed": 128}
    if catalogued:
        lengths = {"histogram": {length + PROMPT_TOKENS: count for length, count in length_histogram(catalogued).items()}}
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
    for row in xia2024.paper_table("throughput"):
        size = int(row["batch_size"])
        run = paper_run(row["model"], row["density"], row["gpu"], size, row["dataset"], size / float(row["queries_per_s"]))
        if run:
            yield run
    stages: dict[tuple[str, str, int], float] = {}
    for row in xia2024.paper_table("latency_breakdown"):
        if row["level"] == "stage":
            key = (row["model"], row["density"], int(row["batch_size"]))
            stages[key] = stages.get(key, 0.0) + float(row["value"])
    for (name, density, size), seconds in stages.items():
        run = paper_run(name, density, "A40", size, "128 tokens", seconds)
        if run:
            yield run
