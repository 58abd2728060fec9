"""Stated outcomes - a run went through, ran out of memory, a largest batch - against our verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memory_errors import run_memory, with_memory
from paper_points import paper_max_batch
from runs import Run, chosen_rows_of, model_of

from costmodel import xia2024
from costmodel.capacity import max_batch_size
from costmodel.defaults import resolve
from costmodel.errors import CostModelError
from costmodel.gpu_catalog import find_gpu
from costmodel.hf_config import model_spec_from_config
from costmodel.lengths import longest_batch
from costmodel.memory import peak_device_bytes
from costmodel.model_catalog import find_model_config
from costmodel.specs import parse_job


@dataclass(frozen=True)
class Verdict:
    """One stated outcome: a run that went through or ran out of memory, or a largest batch and the next one."""

    name: str
    source: str
    fits: bool
    we_say_fits: bool

    @property
    def is_right(self) -> bool:
        return self.fits is self.we_say_fits


# arXiv:2408.04693, figures 8, 13, 14, 15 and Table IV: (model, density, card, tokens, largest batch).
PAPER_LARGEST = (
    ("Mixtral", "sparse", "A40", 512, 8),
    ("Mixtral", "dense", "A40", 512, 2),
    ("Mixtral", "sparse", "A40", 1024, 4),
    ("Mixtral", "dense", "A40", 1024, 1),
    ("Mixtral", "sparse", "A100-SXM4-40GB", 1024, 3),
    ("Mixtral", "dense", "A100-SXM4-40GB", 1024, 1),
    ("Mixtral", "sparse", "A100-SXM4-80GB", 1024, 17),
    ("Mixtral", "dense", "A100-SXM4-80GB", 1024, 5),
    ("Mixtral", "sparse", "H100 SXM", 1024, 17),
    ("Mixtral", "dense", "H100 SXM", 1024, 5),
    ("Mixtral", "sparse", "A100-SXM4-40GB", 512, 6),
    ("Mixtral", "sparse", "A100-SXM4-80GB", 512, 27),
    ("Mixtral", "sparse", "A40", 128, 32),
    ("Mixtral", "dense", "A40", 128, 10),
    ("BlackMamba", "sparse", "A40", 512, 20),
    ("BlackMamba", "dense", "A40", 512, 6),
    ("BlackMamba", "sparse", "A40", 1024, 10),
    ("BlackMamba", "dense", "A40", 1024, 3),
    ("BlackMamba", "sparse", "A40", 128, 84),
    ("BlackMamba", "dense", "A40", 128, 30),
)


def run_verdicts(runs: Sequence[Run]) -> list[Verdict]:
    """Every run with a memory figure went through."""
    return [
        Verdict(run.run_id, run.source, True, run_memory(run).peak_device_bytes <= run.gpu.memory_bytes)
        for run in with_memory(runs)
    ]


def litgpt_oom_verdicts(runs: Sequence[Run]) -> list[Verdict]:
    """litgpt's rows that ran out of memory: Llama 2 at a larger batch of a run that is there; Falcon 40B at batch one."""
    verdicts = []
    templates = {(run.model.name, run.job.quantization): run for run in runs if run.source == "litgpt"}
    for row in chosen_rows_of("litgpt_resource_tables", lambda each: each["outcome"] == "oom" and each["n_gpus"] == "1"):
        if row["row_id"] == "litgpt_resource_tables-037":
            continue  # the card is not named
        template = templates[("meta-llama/Llama-2-7b-hf", "nf4" if row["method"] == "qlora" else None)]
        job = replace(
            template.job,
            per_device_train_batch_size=int(row["micro_batch"]),
            double_quant=row["weight_precision"] == "nf4-dq",
            max_length=int(row["seq_len_max"]),
        )
        if "llama" in row["model_id"]:
            model = templates[(row["model_id"], None)].model
        else:
            model = model_spec_from_config(find_model_config(row["model_id"]), name=row["model_id"])
            job = replace(job, lora_target_modules=("query_key_value",))
        batch = longest_batch(job, job.per_device_train_batch_size, job.max_length)
        needed = peak_device_bytes(model, job, batch, is_padded=False)
        verdicts.append(Verdict(row["row_id"], "litgpt", False, needed <= find_gpu(row["gpu"]).memory_bytes))
    return verdicts


def h2o_verdicts() -> list[Verdict]:
    """H2O LLM Studio on one card: Llama 2, 512 tokens, batch two, LoRA r 4 on the linears, checkpointed, mixed precision."""
    verdicts = []
    for row in chosen_rows_of("h2o_llmstudio", lambda each: each["n_gpus"] == "1"):
        size = row["model_id"].rpartition("-")[2]
        name = f"meta-llama/Llama-2-{size}-hf"
        try:
            model = model_of(name)
        except CostModelError:
            continue
        fields = {
            "model": name,
            "method": row["method"],
            "dtype": "bfloat16",
            "bf16": True,
            "lora_r": 4,
            "lora_target_modules": "all-linear",
            "per_device_train_batch_size": int(row["micro_batch"]),
            "gradient_checkpointing": True,
            "max_length": 512,
            "lengths": {"fixed": 512},
            "framework": "transformers",
            "framework_version": "4.32",
        }
        if row["method"] == "qlora":
            fields["quantization"] = "nf4"
        job, _ = resolve(parse_job(fields), model)
        largest = max_batch_size(
            model, job, find_gpu(row["gpu"].replace("A100-80GB", "A100-SXM4-80GB")).memory_bytes, 512, is_padded=True
        )
        verdicts.append(Verdict(row["row_id"], "h2o_llmstudio", row["outcome"] == "ok", largest >= int(row["micro_batch"])))
    return verdicts


def paper_verdicts() -> list[Verdict]:
    """The largest batch fits, the next one does not."""
    verdicts = []
    for model, density, gpu, tokens, largest in PAPER_LARGEST:
        ours = paper_max_batch(model, density, gpu, tokens)
        if ours is None:
            continue
        name = f"{model} {density} {gpu} {tokens} tokens"
        source = f"paper {model}"
        verdicts.append(Verdict(f"{name}, batch {largest}", source, True, ours >= largest))
        verdicts.append(Verdict(f"{name}, batch {largest + 1}", source, False, ours >= largest + 1))
    return verdicts


def all_verdicts(runs: Sequence[Run]) -> list[Verdict]:
    return [*run_verdicts(runs), *litgpt_oom_verdicts(runs), *h2o_verdicts(), *paper_verdicts()]


def share_right(verdicts: Sequence[Verdict]) -> float:
    return sum(each.is_right for each in verdicts) / len(verdicts)


def verdict_table(verdicts: Sequence[Verdict]) -> list[str]:
    lines = ["| source | stated: fits | right | stated: does not fit | right |", "|---|---|---|---|---|"]

    def row(name: str, some: Sequence[Verdict]) -> str:
        fit, not_fit = [each for each in some if each.fits], [each for each in some if not each.fits]
        return (
            f"| {name} | {len(fit)} | {sum(v.is_right for v in fit)} | {len(not_fit)} | {sum(v.is_right for v in not_fit)} |"
        )

    for source in dict.fromkeys(each.source for each in verdicts):
        lines.append(row(source, [each for each in verdicts if each.source == source]))
    lines.append(row("all", verdicts))
    return lines


def largest_batch_table() -> list[str]:
    """Eq. 1 of the paper beside ours, and what the four readings of the settings that it does not print would give."""
    lines = ["| model, density | card | tokens | measured | Eq. 1 | ours |", "|---|---|---|---|---|---|"]
    marketed = {"A40": 48, "A100-SXM4-40GB": 40, "A100-SXM4-80GB": 80, "H100 SXM": 80}
    for model, density, gpu, tokens, largest in PAPER_LARGEST:
        eq1 = ""
        if model == "Mixtral":
            sparsity = xia2024.DENSE if density == "dense" else xia2024.SPARSE
            eq1 = str(math.floor(xia2024.max_batch_size(marketed[gpu], xia2024.MIXTRAL_MODEL_MEMORY_GB, tokens, sparsity)))
        ours = paper_max_batch(model, density, gpu, tokens)
        lines.append(f"| {model} {density} | {gpu} | {tokens} | {largest} | {eq1} | {'' if ours is None else ours} |")
    return lines


def mean_log_error_of_largest(**changes: object) -> float:
    """Of the fourteen Mixtral batches, for one reading of the settings."""
    errors = []
    for model, density, gpu, tokens, largest in PAPER_LARGEST:
        if model == "Mixtral":
            ours = paper_max_batch(model, density, gpu, tokens, **changes)
            errors.append(abs(math.log(max(ours or 0, 0.5) / largest)))
    return statistics.mean(errors)


def readings_table() -> list[str]:
    lines = ["| hidden states | checkpointing | mean of the log errors |", "|---|---|---|"]
    for prepares, stream in ((False, "16 bit"), (True, "fp32 (peft's k-bit preparation)")):
        for reenters, name in ((False, "does not re-enter"), (True, "re-enters")):
            error = mean_log_error_of_largest(
                prepare_model_for_kbit_training=prepares, gradient_checkpointing_kwargs={"use_reentrant": reenters}
            )
            lines.append(f"| {stream} | {name} | {error:.2f} |")
    return lines
