"""Step time: the parts against the whole, the kernels that the paper timed, and measured runs of each kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import constants as c
from costmodel.catalog import find_gpu, find_model_config
from costmodel.defaults import ResolvedJob, resolve
from costmodel.hf_config import model_spec_from_config
from costmodel.model_spec import ModelSpec
from costmodel.specs import parse_job
from costmodel.step_time import StepTime, _dequantisation_seconds_per_weight, matmul_ceiling, step_time
from costmodel.workload import Batch

LLAMA = "meta-llama/Llama-3.2-3B"
MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"


def prepared(model_name: str, **fields: Any) -> tuple[ModelSpec, ResolvedJob]:
    model = model_spec_from_config(find_model_config(model_name), name=model_name)
    job, _ = resolve(parse_job({"model": model_name, "max_length": 4096, "framework": "transformers", **fields}), model)
    return model, job


def timed(model_name: str, gpu: str, batch_size: int, tokens: int, **fields: Any) -> StepTime:
    model, job = prepared(model_name, per_device_train_batch_size=batch_size, **fields)
    step = step_time(model, job, find_gpu(gpu), Batch.of(batch_size, tokens))
    assert step is not None
    return step


LORA = {"method": "lora", "dtype": "bfloat16", "bf16": True, "lora_r": 16, "lora_target_modules": "all-linear"}
QLORA = {**LORA, "method": "qlora", "quantization": "nf4", "framework_version": "4.40", "lora_target_modules": ("q_proj",)}


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 16),
    tokens=st.integers(16, 4096),
    kind=st.sampled_from(["full", "lora", "qlora", "moe"]),
    checkpointing=st.booleans(),
    accumulation=st.integers(1, 8),
)
def test_the_groups_and_the_passes_sum_to_the_step(
    batch: int, tokens: int, kind: str, checkpointing: bool, accumulation: int
) -> None:
    fields: dict[str, Any] = {"full": {"method": "full", "dtype": "bfloat16"}, "lora": LORA, "qlora": QLORA, "moe": QLORA}[
        kind
    ]
    step = timed(
        MIXTRAL if kind == "moe" else LLAMA,
        "A100-SXM4-80GB",
        batch,
        tokens,
        gradient_checkpointing=checkpointing,
        gradient_accumulation_steps=accumulation,
        **fields,
    )
    assert sum(step.by_group_seconds.values()) == pytest.approx(step.step_seconds)
    passes = step.forward_seconds + step.backward_seconds + step.optimizer_seconds
    assert passes == pytest.approx(step.step_seconds)
    assert step.step_seconds >= max(step.device_seconds, step.host_seconds)
    assert all(seconds >= 0 for seconds in step.by_group_seconds.values())


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(16, 4000), gpu=st.sampled_from(["A40", "H100 SXM", "RTX 4090", "T4"]))
def test_more_tokens_never_take_less_time(tokens: int, gpu: str) -> None:
    fields = {**LORA, "dtype": "float16", "bf16": False, "fp16": True}
    shorter, longer = (timed(LLAMA, gpu, 2, length, **fields).step_seconds for length in (tokens, tokens + 64))
    assert longer >= shorter


def test_a_short_batch_costs_the_host_and_a_long_one_the_device() -> None:
    short, long = (timed(LLAMA, "H100 SXM", size, 64 * size**2, **LORA) for size in (1, 8))
    assert (short.regime, short.bound_by) == ("host", "host")
    assert long.regime == "device"
    assert short.step_seconds == pytest.approx(short.host_seconds, rel=0.01)


def test_an_unknown_rate_is_no_step_time() -> None:
    model, job = prepared(LLAMA, **LORA)
    assert matmul_ceiling(find_gpu("T4"), "bfloat16") is None
    assert step_time(model, job, find_gpu("T4"), Batch.of(1, 128)) is None


def test_dequantisation_of_nf4_is_that_of_the_timed_kernels() -> None:
    """arXiv:2408.04693, Fig. 6 data: 359 us for one 4096 x 14336 expert matrix on an A40, at every batch size."""
    seconds = _dequantisation_seconds_per_weight("nf4", find_gpu("A40")) * 4096 * 14336
    assert seconds == pytest.approx(359e-6, rel=0.01)


def test_dequantisation_of_nf4_is_bound_by_bytes_where_integers_are_cheap() -> None:
    gpu = find_gpu("RTX 4090")
    by_bytes = 2.56 / (gpu.memory_bandwidth_bytes_per_second * c.BANDWIDTH_EFFICIENCY)
    assert _dequantisation_seconds_per_weight("nf4", gpu) == by_bytes
    assert _dequantisation_seconds_per_weight("nf4", find_gpu("A100-SXM4-40GB")) > 2.5 * by_bytes * 1008 / 1555


@pytest.mark.parametrize(
    ("rows", "microseconds"),
    [
        # arXiv:2408.04693, Fig. 6 data: the product w1 of one Mixtral expert (4096 x 14336) on an A40.
        pytest.param(32, 239, id="memory-bound"),
        pytest.param(320, 485, id="320"),
        pytest.param(1024, 1262, id="1024"),
        pytest.param(1280, 1490, id="1280"),
    ],
)
def test_expert_products_are_those_of_the_timed_kernels(rows: int, microseconds: float) -> None:
    gpu = find_gpu("A40")
    ceiling = matmul_ceiling(gpu, "bfloat16")
    assert ceiling is not None
    by_flops = 2 * 4096 * 14336 * (rows + c.GEMM_HALF_ROWS) / (ceiling * c.GEMM_EFFICIENCY)
    moved = 2 * (4096 * 14336 + rows * (4096 + 14336))
    by_bytes = moved / (gpu.memory_bandwidth_bytes_per_second * c.BANDWIDTH_EFFICIENCY)
    assert 1e6 * max(by_flops, by_bytes) == pytest.approx(microseconds, rel=0.15)


def test_an_fp32_adapter_beside_a_16_bit_linear_costs_casts_and_a_16_bit_one_does_not() -> None:
    slow = timed(LLAMA, "L40S", 4, 1024, **{**LORA, "adapter_dtype": "float32", "bf16": False})
    fast = timed(LLAMA, "L40S", 4, 1024, **{**LORA, "adapter_dtype": "bfloat16", "bf16": False})
    assert slow.by_group_seconds["elementwise"] > 1.3 * fast.by_group_seconds["elementwise"]


def test_experts_in_a_loop_wait_whatever_the_batch() -> None:
    small, large = (timed(MIXTRAL, "A40", size, 128, **QLORA) for size in (4, 32))
    assert small.expert_loop_seconds == pytest.approx(large.expert_loop_seconds, rel=0.01)
    assert small.expert_loop_seconds > 256 * c.SECONDS_PER_EXPERT_VISIT["transformers"]


def test_a_stack_that_waits_adds_host_and_device() -> None:
    fields = {**LORA, "adapter_dtype": "bfloat16"}
    model, job = prepared(LLAMA, **fields)
    waiting = replace(job, framework="litgpt")
    gpu, batch = find_gpu("A100-SXM4-40GB"), Batch.of(1, 256)
    usual, slow = step_time(model, job, gpu, batch), step_time(model, waiting, gpu, batch)
    assert usual is not None
    assert slow is not None
    assert slow.step_seconds == pytest.approx(slow.device_seconds + slow.host_seconds)
    assert usual.step_seconds < usual.device_seconds + usual.host_seconds


def test_compiled_layers_move_fewer_bytes() -> None:
    eager, compiled = (timed(LLAMA, "RTX 4090", 4, 1024, torch_compile=flag, **LORA) for flag in (False, True))
    assert compiled.by_group_seconds["elementwise"] < 0.5 * eager.by_group_seconds["elementwise"]
    # the optimizer stays as it was
    assert c.COMPILED_HOST_SHARE < compiled.host_seconds / eager.host_seconds < c.COMPILED_HOST_SHARE + 0.05


@pytest.mark.parametrize("unknown", ["", "8.x", "x", "8", "sm_86"])
def test_a_described_gpu_without_a_compute_capability_is_taken_for_a_newer_card(unknown: str) -> None:
    ada = find_gpu("L40S").model_copy(update={"memory_bandwidth_bytes_per_second": 1e14})  # so that instructions decide
    described = ada.model_copy(update={"compute_capability": unknown})
    assert _dequantisation_seconds_per_weight("nf4", described) == _dequantisation_seconds_per_weight("nf4", ada)
    turing = ada.model_copy(update={"compute_capability": "7.5"})
    assert 2 * _dequantisation_seconds_per_weight("nf4", turing) == _dequantisation_seconds_per_weight("nf4", ada)
