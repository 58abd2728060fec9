"""An answer of the contract's shape with figures chosen by hand, and an estimate that returns it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from costmodel.price_catalog import find_price
from costmodel.specs import GpuSpec, Job, Price, parse_job

GIB = 2**30

ANSWER: dict[str, Any] = {
    "schema_version": 1,
    "version": "0.1.0",
    "job": {
        "model": "mistralai/Mixtral-8x7B-v0.1",
        "gpu": "NVIDIA A40",
        "num_gpus": 1,
        "method": "qlora",
        "quantization": "nf4",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_length": 1024,
        "optim": "adamw_torch",
        "lora_target_modules": ["q_proj", "v_proj"],
    },
    "assumed": ["optim", "lora_target_modules"],
    "defaults_of": "transformers 4.40",
    "num_params": 46_702_792_704,
    "num_active_params": 12_879_925_248,
    "num_trainable_params": 4_194_304,
    "memory": {
        "weights_bytes": 24 * GIB,
        "adapters_bytes": GIB // 2,
        "gradients_bytes": GIB // 2,
        "optimizer_bytes": GIB,
        "activations_bytes": 6 * GIB,
        "logits_bytes": GIB,
        "temporary_bytes": GIB // 2,
        "context_bytes": GIB // 2,
        "peak_phase": "backward",
        "peak_allocated_bytes": 33 * GIB,
        "peak_reserved_bytes": 33 * GIB + GIB // 2,
        "peak_device_bytes": 34 * GIB,
        "peak_device_bytes_low": 32 * GIB,
        "peak_device_bytes_high": 36 * GIB,
        "capacity_bytes": 45 * GIB,
    },
    "verdict": "fits",
    "headroom_bytes": 11 * GIB,
    "share_of_batches_that_fit": 1.0,
    "max_batch_size": 6,
    "max_length_that_fits": 1536,
    "interval_level": 0.8,
    "step_seconds": 2.0,
    "step_seconds_low": 1.5,
    "step_seconds_high": 2.75,
    "step": {
        "bound_by": "expert_loop",
        "forward_seconds": 0.5,
        "backward_seconds": 1.4,
        "optimizer_seconds": 0.1,
        "by_group_seconds": {"experts": 1.2, "attention": 0.3},
    },
    "num_tokens_per_step": 800.0,
    "num_non_padding_tokens_per_step": 600.0,
    "num_supervised_tokens_per_step": None,
    "tokens_per_second": 400.0,
    "tokens_per_second_low": 290.0,
    "tokens_per_second_high": 533.0,
    "non_padding_tokens_per_second": 300.0,
    "samples_per_second": 2.0,
    "model_flops_per_step": 1,
    "hardware_flops_per_step": 1,
    "mfu": 0.1234,
    "hfu": None,
    "num_steps": 37_500,
    "train_seconds": 75_000.0,
    "eval_seconds": 0.0,
    "save_seconds": 500.0,
    "startup_seconds": 90.0,
    "total_seconds": 75_600.0,
    "total_seconds_low": 56_700.0,
    "total_seconds_high": 103_950.0,
    "total_usd": 9.24,
    "total_usd_low": 6.93,
    "total_usd_high": 12.705,
    "price": {
        "usd_per_gpu_hour": 0.44,
        "usd_per_instance_hour": 0.44,
        "gpus_per_instance": 1,
        "cloud": "RunPod",
        "product": "Secure A40",
        "tier": "on_demand",
        "source": "a feed",
        "as_of": "2026-08-19",
    },
    "evidence": [
        {
            "run": "paper A40 batch 4",
            "model": "Mixtral",
            "kind": "nf4",
            "gpu": "A40",
            "measured": 2.125,
            "estimated": 2.0,
            "distance": 0.1,
        }
    ],
    "calibration": None,
    "warnings": ["lengths above max_length are cut: 12 samples"],
}


def answer(**changes: Any) -> dict[str, Any]:
    """A copy of :data:`ANSWER`; ``memory={...}`` and the like change single entries of a mapping."""
    changed = copy.deepcopy(ANSWER)
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(changed[name], dict):
            changed[name].update(value)
        else:
            changed[name] = value
    return changed


LLAMA: dict[str, Any] = {
    "model": "meta-llama/Llama-2-7b-hf",
    "method": "lora",
    "bf16": True,
    "framework": "trl",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "max_length": 1024,
    "lengths": {"dataset": "math_14k"},
    "num_samples": 15_000,
}
"""A job whose lengths and samples are known, for the real estimate."""


@dataclass(frozen=True)
class StandInEstimate:
    """What ``costmodel.estimation.estimate`` returns, as far as compare, report and the command line look at it."""

    values: dict[str, Any]
    price: Price | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.values)


def estimate_with(monkeypatch: pytest.MonkeyPatch, estimator: Callable[[Any], StandInEstimate]) -> None:
    """compare and optimize ask ``estimator`` in place of ``costmodel.estimate``."""
    for module in ("candidates", "trials"):
        monkeypatch.setattr(f"costmodel.{module}.estimate", estimator)


class StandInEstimator:
    """Called like ``estimate``: validates the job, remembers it, answers with the given changes to the sample."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        self.jobs: list[Job] = []

    def __call__(self, job: Any) -> StandInEstimate:
        job = parse_job(job)
        self.jobs.append(job)
        values = answer(**self.changes)
        gpu = job.gpu.name if isinstance(job.gpu, GpuSpec) else job.gpu
        values["job"]["gpu"] = gpu or values["job"]["gpu"]
        price = find_price(gpu, cloud=job.cloud, tier=job.tier) if gpu and job.cloud else None
        return StandInEstimate(values, price)
