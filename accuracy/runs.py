"""A measured run, ready for the model: one record, and how a row of a source becomes one.

The sources are in ``sources.py``, the points of arXiv:2408.04693 in ``paper_points.py``.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from costmodel.defaults import ResolvedJob, resolve
from costmodel.gpu_catalog import find_gpu
from costmodel.hf_config import model_spec_from_config
from costmodel.length_distribution import distribution
from costmodel.lengths import batch_tokens, longest_batch
from costmodel.model_catalog import find_model_config
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
    loss_in_fp32: bool = True  # False: remote code that leaves the loss in the model's type, and no autocast

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
    from paper_points import paper_runs
    from sources import SOURCES

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
    loss_in_fp32: bool = True,
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
        loss_in_fp32=loss_in_fp32,
    )


def chosen_rows(source: str) -> Iterator[dict[str, str]]:
    for row in read_rows(FOLDER / "data" / f"{source}.csv"):
        decision = decisions()[row["row_id"]]
        if decision["time"] == "yes" or decision["memory"] == "yes":
            yield row


def chosen_rows_of(source: str, keep: Callable[[Mapping[str, str]], bool]) -> list[dict[str, str]]:
    """Rows of a source by a condition of their own, whatever ``rows.csv`` says of their figures."""
    return [row for row in read_rows(FOLDER / "data" / f"{source}.csv") if keep(row)]


def seconds_of(row: Mapping[str, str], value: float) -> float | None:
    return value if decisions()[row["row_id"]]["time"] == "yes" else None


def memory_of(row: Mapping[str, str], kind: str, gib: float | str | None) -> tuple[str, float] | None:
    return (kind, float(gib)) if gib and decisions()[row["row_id"]]["memory"] == "yes" else None
