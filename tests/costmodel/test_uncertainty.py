"""Intervals and evidence: coverage on left-out sources, widening, the nearest measured runs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from costmodel import constants as c
from costmodel.defaults import ResolvedJob, resolve
from costmodel.gpu_catalog import find_gpu, list_gpus
from costmodel.hf_config import model_spec_from_config
from costmodel.model_catalog import find_model_config
from costmodel.model_spec import ModelSpec
from costmodel.specs import GpuSpec, parse_job
from costmodel.step_time import step_time
from costmodel.uncertainty import measured_runs, nearest_runs, step_interval_factor
from costmodel.workload import Batch


def prepared(model_name: str, **fields: Any) -> tuple[ModelSpec, ResolvedJob]:
    model = model_spec_from_config(find_model_config(model_name), name=model_name)
    job, _ = resolve(parse_job({"model": model_name, "max_length": 2048, **fields}), model)
    return model, job


QWEN_LORA = {
    "method": "lora",
    "dtype": "bfloat16",
    "bf16": True,
    "lora_target_modules": ("c_attn",),
    "gradient_checkpointing": True,
    "framework": "transformers",
    "framework_version": "4.32",
}


def width(job: ResolvedJob, gpu: GpuSpec, model: ModelSpec, distance: float = 0.0) -> float:
    step = step_time(model, job, gpu, Batch.of(1, 2048))
    assert step is not None
    return math.log(step_interval_factor(model, job, gpu, step, distance))


def test_the_evidence_is_178_runs_on_catalogued_cards() -> None:
    runs = measured_runs()
    assert len({run.run for run in runs}) == len(runs) == 178
    assert {run.gpu for run in runs} <= {gpu.name for gpu in list_gpus()}
    assert {run.gpu for run in runs} == set(c.MEASURED_CARDS)


def test_a_measured_run_is_its_own_nearest_evidence() -> None:
    model, job = prepared("Qwen/Qwen-7B", **QWEN_LORA)
    nearest = nearest_runs(model, job, find_gpu("A100-SXM4-80GB"), Batch.of(1, 2048))
    assert [set(entry) for entry in nearest] == [{"run", "model", "gpu", "kind", "measured", "estimated", "distance"}] * 3
    assert (nearest[0]["model"], nearest[0]["gpu"], nearest[0]["kind"]) == ("Qwen/Qwen-7B", "A100-SXM4-80GB", "lora")
    # qwen1_profiling.csv: 5.2 s (LoRA) and 5.3 s (with trained embeddings) for 8 micro-batches of 2,048 tokens
    assert {entry["run"]: entry["measured"] for entry in nearest[:2]} == {
        "qwen1_profiling-028": 5.2,
        "qwen1_profiling-034": 5.3,
    }
    assert nearest[0]["distance"] == 0.0
    assert nearest[0]["distance"] <= nearest[1]["distance"] <= nearest[2]["distance"]


def test_a_mixture_of_experts_finds_mixtures_of_experts() -> None:
    model, job = prepared(
        "mistralai/Mixtral-8x7B-v0.1",
        method="qlora",
        quantization="nf4",
        framework="transformers",
        framework_version="4.40",
        gradient_checkpointing=True,
    )
    nearest = nearest_runs(model, job, find_gpu("A40"), Batch.of(4, 256), count=5)
    assert all(entry["run"].startswith("paper-Mixtral") for entry in nearest)


def test_the_interval_is_wider_on_an_unmeasured_card_and_far_from_evidence() -> None:
    model, job = prepared("Qwen/Qwen-7B", **QWEN_LORA)
    measured, unmeasured = find_gpu("A100-SXM4-80GB"), find_gpu("RTX 6000 Ada")
    usual = width(job, measured, model)
    assert usual == pytest.approx(c.STEP_INTERVAL["device"])
    assert width(job, measured, model, distance=1.0) == pytest.approx(usual)
    assert width(job, measured, model, distance=3.0) == pytest.approx(usual * 1.3)
    assert width(job, measured, model, distance=50.0) == pytest.approx(usual * c.MAX_DISTANCE_FACTOR)
    assert width(job, unmeasured, model) == pytest.approx(usual * c.UNMEASURED_CARD_FACTOR)
    two = prepared("Qwen/Qwen-7B", **QWEN_LORA, num_gpus=2)[1]
    assert width(two, measured, model) == pytest.approx(usual * c.SEVERAL_GPUS_FACTOR)
    compiled = prepared("Qwen/Qwen-7B", **QWEN_LORA, torch_compile=True)[1]
    assert width(compiled, measured, model) == pytest.approx(usual * c.UNKNOWN_STACK_FACTOR)


def test_only_the_loops_over_experts_that_were_measured_have_the_width_of_the_measured() -> None:
    fields = {"method": "full", "dtype": "bfloat16", "framework": "transformers"}
    card = find_gpu("A40")
    mixtral, looped = prepared("mistralai/Mixtral-8x7B-v0.1", **fields, framework_version="4.40")
    grouped = prepared("mistralai/Mixtral-8x7B-v0.1", **fields)[1]
    other, other_loop = prepared("allenai/OLMoE-1B-7B-0924", **fields, framework_version="4.45")
    for model, job, factor in (
        (mixtral, looped, 1.0),
        (mixtral, grouped, c.UNKNOWN_STACK_FACTOR),
        (other, other_loop, c.UNKNOWN_STACK_FACTOR),
    ):
        step = step_time(model, job, card, Batch.of(1, 2048))
        assert step is not None
        assert width(job, card, model) == pytest.approx(c.STEP_INTERVAL[step.regime] * factor)
