"""A run record -> one row of public measured runs (the columns of ``accuracy/data``), without what names its owner.

Only a fixed list of facts goes in. Left out: paths, run and user names, the data set, prices and dates, the machine's
name, and the model's name unless it is a public one of the catalogue; another model is given by the numbers of its config.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from costmodel.errors import CostModelError
from costmodel.hf_config import model_spec_from_config
from costmodel.model_catalog import find_model_config, find_model_id
from costmodel.units import GIB
from ftcost_callback.calibrating import steady_steps
from ftcost_callback.records import OutOfMemory, Step
from ftcost_callback.run_file import RunRecord

COLUMNS: Final = (
    "row_id", "source", "source_ref", "locator", "confidence", "model_id", "is_moe", "gpu", "gpu_mem_gb", "n_gpus",
    "method", "method_detail", "lora_rank", "lora_targets", "trainable_params_m", "weight_precision",
    "compute_precision", "optimizer", "optimizer_detail", "dataset", "seq_len_max", "avg_tokens_per_sample", "batching",
    "micro_batch", "grad_accum", "grad_checkpointing", "attention", "compile", "kernels", "framework",
    "framework_version", "torch_version", "n_samples", "n_steps", "epochs", "tokens_per_s", "tokens_basis",
    "samples_per_s", "s_per_step", "step_unit", "runtime_s", "runtime_scope", "total_tokens", "peak_alloc_gib",
    "peak_reserved_gib", "peak_device_gib", "peak_other_gib", "mem_unit_as_printed", "mem_scope", "outcome", "cost_usd",
    "price_usd_per_h", "price_basis", "reported_mfu_pct", "reported_tflops", "notes",
)  # fmt: skip
"""The header of every file in ``accuracy/data``, in its order."""

_FEW_STEPS: Final = 10  # below this a mean says little


def contributed_row(record: RunRecord) -> dict[str, str]:
    """The row of one run, ``""`` where something was not measured.

    Seconds a step are the median of the steady steps (the first two of each session left out), waiting for data taken
    off. Raises :class:`CostModelError` for a run without its job or device, on a CPU, or with fewer than ten such steps
    (unless it ran out of memory, which is worth a row of its own).
    """
    described = next((each for each in reversed(record.sessions) if each.job and each.device), None)
    if described is None or described.job is None or described.device is None:
        raise CostModelError(f"run {record.run_id} was recorded without its job or device: nothing to compare it with")
    if described.device.get("kind") != "cuda":
        raise CostModelError("only runs on a GPU are of use to others: this one trained on a CPU")
    steps = steady_steps(record.steps)
    ran_out = bool(record.out_of_memory) and record.summary is None
    if len(steps) < _FEW_STEPS and not ran_out:
        raise CostModelError(
            f"run {record.run_id} holds {len(steps)} steady steps; at least {_FEW_STEPS} make a figure worth sharing"
        )
    job = _resolved_job(record) or described.job
    num_gpus = int(job.get("num_gpus") or 1)
    model = described.model or {}
    versions = described.versions or {}
    config = job.get("model")
    facts: dict[str, object] = {
        "source": "contributed",
        "source_ref": f"ftcost {versions.get('ftcost', '')} run record",
        "confidence": "A",
        "model_id": _public_model_id(config),
        "is_moe": _is_moe(config),
        "gpu": described.device.get("name"),
        "gpu_mem_gb": _rounded(described.device.get("memory_bytes"), GIB),
        "n_gpus": num_gpus,
        "method": job.get("method"),
        "method_detail": "dora" if job.get("use_dora") else None,
        "lora_rank": job.get("lora_r"),
        "lora_targets": _words(job.get("lora_target_modules")),
        "trainable_params_m": _rounded(model.get("num_trainable_params"), 1e6),
        "weight_precision": job.get("quantization") or job.get("dtype"),
        "compute_precision": _compute_precision(job),
        "optimizer": job.get("optim"),
        "seq_len_max": job.get("max_length"),
        "avg_tokens_per_sample": _ratio(steps, "num_non_padding_tokens", "num_samples"),
        "batching": _batching(job),
        "micro_batch": job.get("per_device_train_batch_size"),
        "grad_accum": job.get("gradient_accumulation_steps"),
        "grad_checkpointing": "yes" if job.get("gradient_checkpointing") else "no",
        "attention": job.get("attn_implementation"),
        "compile": "yes" if job.get("torch_compile") else "no",
        "kernels": "liger" if job.get("use_liger_kernel") else None,
        "framework": job.get("framework"),
        "framework_version": ", ".join(
            f"{name} {versions[name]}" for name in ("transformers", "peft", "trl") if name in versions
        ),
        "torch_version": versions.get("torch"),
        "n_steps": record.last_step,
        "outcome": "oom" if ran_out else "ok",
        "notes": _notes(job, config, steps, record.out_of_memory if ran_out else ()),
    }
    facts |= _speed(record, steps, num_gpus) if not ran_out else {}
    facts |= _memory(record)
    return {name: "" if (value := facts.get(name)) is None else str(value) for name in COLUMNS}


def as_csv(rows: list[dict[str, str]]) -> str:
    """Header and rows, as the files of ``accuracy/data`` have them."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _resolved_job(record: RunRecord) -> dict[str, Any] | None:
    """The job with every default filled, as the first prediction has it."""
    job = record.predictions[0].estimate.get("job") if record.predictions else None
    return job if isinstance(job, dict) else None


def _speed(record: RunRecord, steps: list[Step], num_gpus: int) -> dict[str, object]:
    seconds = statistics.median(each.step_seconds - (each.data_wait_seconds or 0.0) for each in steps)
    total = sum(each.step_seconds * (each.num_steps or 1) for each in steps)

    def per_second(name: str) -> float | None:
        values: list[int | None] = [getattr(each, name) for each in steps]
        if any(value is None for value in values):
            return None
        done = sum((value or 0) * (each.num_steps or 1) for value, each in zip(values, steps, strict=True))
        return round(done / total / num_gpus, 3)

    summary = record.summary
    return {
        "s_per_step": round(seconds, 6),
        "step_unit": "optimizer step (median; data wait and the first two steps of a session left out)",
        "tokens_per_s": per_second("num_non_padding_tokens"),
        "tokens_basis": "real",
        "samples_per_s": per_second("num_samples"),
        "runtime_s": round(record.totals.wall_seconds, 1),
        "runtime_scope": "all sessions, start-up, evaluations and saves inside",
        "total_tokens": record.totals.num_non_padding_tokens,
        "reported_mfu_pct": round(100 * summary.mfu, 2) if summary is not None and summary.mfu is not None else None,
    }


def _memory(record: RunRecord) -> dict[str, object]:
    def highest(name: str) -> float | None:
        values = [value for each in record.steps if (value := getattr(each, name)) is not None]
        return _rounded(max(values), GIB, 4) if values else None

    return {
        "peak_alloc_gib": highest("peak_allocated_bytes"),
        "peak_reserved_gib": highest("peak_reserved_bytes"),
        "peak_device_gib": highest("memory_used_bytes"),
        "mem_unit_as_printed": "bytes",
        "mem_scope": "training steps; the device's figure sampled, all processes inside",
    }


def _notes(job: Mapping[str, Any], config: object, steps: list[Step], failures: Sequence[OutOfMemory]) -> str:
    notes = [f"experts {job['experts_implementation']}"] if job.get("experts_implementation") else []
    computed = _ratio(steps, "num_tokens", "num_samples")
    if computed is not None:
        notes.append(f"{computed} computed tokens a sample")
    for failure in failures:
        notes.append(
            f"ran out at step {failure.global_step} with {failure.batch_size} rows of {failure.batch_length} tokens"
        )
    if isinstance(config, Mapping) and _public_model_id(config) is None:
        notes.append(f"config {json.dumps(_shape(config), separators=(',', ':'))}")
    return "; ".join(notes)


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a config.json decides cost: its numbers, its switches and its type. Names and other free text stay here."""
    kept: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and name.endswith("_config"):
            kept[name] = _shape(value)
        elif name in {"model_type", "hidden_act", "layer_types"} or isinstance(value, bool | int | float):
            kept[name] = value
    return kept


def _public_model_id(config: object) -> str | None:
    name = config.get("_name_or_path") if isinstance(config, Mapping) else config
    return find_model_id(name) if isinstance(name, str) and name else None


def _is_moe(config: object) -> str | None:
    """Read from the config: counts do not tell, since look-up tables are in no model's active parameters."""
    try:
        spec = model_spec_from_config(find_model_config(config) if isinstance(config, str | Mapping) else {})
    except CostModelError:
        return None
    return "yes" if spec.is_moe else "no"


def _compute_precision(job: Mapping[str, Any]) -> str:
    autocast = "bf16" if job.get("bf16") else "fp16" if job.get("fp16") else None
    return f"{autocast} autocast" if autocast else f"pure {job.get('dtype')}"


def _batching(job: Mapping[str, Any]) -> str:
    if job.get("packing"):
        return "packed"
    if job.get("padding_free"):
        return "padding_free"
    grouped = " (grouped by length)" if job.get("train_sampling_strategy") == "group_by_length" else ""
    return ("padded_max" if job.get("padding") == "max_length" else "padded_longest") + grouped


def _words(value: object) -> str | None:
    return (
        " ".join(str(each) for each in value)
        if isinstance(value, list | tuple)
        else value
        if isinstance(value, str)
        else None
    )


def _ratio(steps: list[Step], above: str, below: str) -> float | None:
    pairs = [(getattr(each, above), getattr(each, below)) for each in steps]
    known = [(a, b) for a, b in pairs if a is not None and b]
    return round(sum(a for a, _ in known) / sum(b for _, b in known), 3) if known else None


def _rounded(value: float | None, unit: float, digits: int = 2) -> float | None:
    return round(value / unit, digits) if value is not None else None
