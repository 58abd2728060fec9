"""What older libraries and other stacks hold besides: read from their sources, and traced where said."""

from __future__ import annotations

from typing import Any

import pytest

from costmodel.constants import ALLOCATOR_OVERHEAD, CUDA_CONTEXT_BYTES, CUDA_CONTEXT_INTERVAL_BYTES, VARIABLE_LENGTH_HOLES
from costmodel.defaults import ResolvedJob, resolve
from costmodel.estimation import estimate
from costmodel.head_memory import liger_head, next_power_of_two, tiled_head
from costmodel.held_memory import element_bytes, held_bytes
from costmodel.hf_config import model_spec_from_config
from costmodel.layer_kernels import Rows
from costmodel.memory import MemoryBreakdown, job_class, loss_bytes, peak_memory
from costmodel.memory_moments import memory_plan
from costmodel.model_catalog import find_model_config
from costmodel.model_spec import ModelSpec
from costmodel.specs import parse_job
from costmodel.units import GIB
from costmodel.workload import Batch


def prepared(model_name: str, overrides: dict[str, Any] | None = None, **fields: Any) -> tuple[ModelSpec, ResolvedJob]:
    config = {**find_model_config(model_name), **(overrides or {})}
    model = model_spec_from_config(config, name=model_name)
    return model, resolve(parse_job({"model": model_name, "max_length": 1304, **fields}), model)[0]


def memory(prepared_job: tuple[ModelSpec, ResolvedJob], batch: Batch, **more: Any) -> MemoryBreakdown:
    return peak_memory(*prepared_job, batch, on_cpu=True, **more)


QLORA: dict[str, Any] = {
    "method": "qlora",
    "quantization": "nf4",
    "dtype": "bfloat16",
    "lora_target_modules": ("q_proj", "v_proj"),
    "adapter_dtype": "bfloat16",
    "prepare_model_for_kbit_training": False,
    "framework": "transformers",
}


def test_bitsandbytes_before_0_44_holds_the_inputs_of_its_linears() -> None:
    """Of a layer: what q, k and v read is there for the adapters; one tensor for gate and up, one for down; o's is there."""
    batch = Batch.of(1, 1304)
    fields = {**QLORA, "gradient_checkpointing": False}
    old, new = (prepared("meta-llama/Llama-2-7b-hf", framework_version=version, **fields) for version in ("4.44", "4.45"))
    assert (old[1].four_bit_keeps_inputs, new[1].four_bit_keeps_inputs) == (True, False)
    more = memory(old, batch).activations_bytes - memory(new, batch).activations_bytes
    # the two peaks may fall into moments of the step that differ by a part of one layer of 32
    assert more == pytest.approx(32 * 1304 * 2 * (4096 + 11_008), rel=0.05)


@pytest.mark.parametrize("reenters", [True, False])
def test_checkpointing_that_does_not_reenter_leaves_those_inputs_with_every_layer(reenters: bool) -> None:
    batch = Batch.of(2, 1304)
    fields = {**QLORA, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reenters}}
    old, new = (prepared("meta-llama/Llama-2-7b-hf", framework_version=v, **fields) for v in ("4.44", "4.45"))
    more = memory(old, batch).activations_bytes - memory(new, batch).activations_bytes
    of_all_layers = 32 * batch.num_tokens * 2 * (3 * 4096 + 11_008)
    if reenters:
        assert more < of_all_layers / 16  # the layer at work alone
        assert job_class(old[1]) == "lora_checkpointed"
    else:
        assert more == pytest.approx(of_all_layers, rel=0.05)
        assert job_class(old[1]) == "lora"


def test_litgpt_holds_what_a_trace_of_its_modules_holds() -> None:
    """litgpt 0.2.0's GPT, LoRA r 8 on query and value with dropout, traced on fake tensors: bytes a token and layer.

    176,858 with bf16 linears; 223,450 with linears that hold their input, as bitsandbytes' did then.
    """
    batch = Batch.of(1, 1304)
    for quantized, traced in ((False, 7_559_943_168), (True, 9_504_134_144)):
        fields = {**QLORA, "framework": "litgpt", "lora_dropout": 0.05, "gradient_checkpointing": False}
        fields |= {} if quantized else {"method": "lora", "quantization": None}
        model, job = prepared("meta-llama/Llama-2-7b-hf", **fields)
        if quantized:
            import dataclasses

            job = dataclasses.replace(job, four_bit_keeps_inputs=True)
        peak = memory((model, job), batch)
        step = peak.peak_allocated_bytes - held_bytes(model, job).static_bytes
        assert step == pytest.approx(traced, rel=0.02)


def test_expert_loop_holds_what_a_trace_of_its_operators_holds() -> None:
    """Transformers 4's loop with 4-bit linears and peft, traced: bytes that a routed row of Mixtral keeps in its layer."""
    for prepares, per_row in ((False, 138_332), (True, 297_564)):
        sizes = []
        for experts in (2, 3):
            model, job = prepared(
                "mistralai/Mixtral-8x7B-v0.1",
                {"num_experts_per_tok": experts},
                **{
                    **QLORA,
                    "adapter_dtype": "float32",
                    "bf16": True,
                    "lora_target_modules": ("w1", "w2", "w3"),
                    "prepare_model_for_kbit_training": prepares,
                },
                framework_version="4.40",
                gradient_checkpointing=True,
            )
            sizes.append(memory_plan(model, job, Rows()).runs[0][0].per_token)
        assert sizes[1] - sizes[0] == pytest.approx(per_row, rel=0.02)


def test_gptq_holds_a_layers_unpacked_weights_under_checkpointing_and_all_without() -> None:
    batch = Batch.of(1, 64)
    peaks = []
    for checkpoints in (True, False):
        fields = {**QLORA, "quantization": "gptq-int4", "gradient_checkpointing": checkpoints, "framework_version": "4.36"}
        peaks.append(memory(prepared("meta-llama/Llama-2-7b-hf", **fields), batch).peak_allocated_bytes / GIB)
    in_linears = 32 * (4 * 4096**2 + 3 * 4096 * 11_008)
    assert peaks[1] - peaks[0] == pytest.approx(2 * in_linears * 31 / 32 / GIB, rel=0.05)


def test_deepspeed_keeps_fp32_masters_on_one_gpu_too() -> None:
    fields = {
        "method": "lora",
        "dtype": "float16",
        "fp16": True,
        "adapter_dtype": "float16",
        "lora_target_modules": "all-linear",
        "optim": "adamw_torch",
    }
    plain = held_bytes(*prepared("meta-llama/Llama-2-7b-hf", **fields))
    zero = {"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 2e8}}
    model, job = prepared("meta-llama/Llama-2-7b-hf", **fields, deepspeed=zero)
    trained = plain.adapters_bytes // 2
    assert held_bytes(model, job).optimizer_bytes == 12 * trained
    assert plain.optimizer_bytes == 4 * trained
    assert job.sharding.bucket_elements == 4e8


def test_a_loss_left_in_the_models_type_holds_half() -> None:
    batch = Batch.of(4, 1304)
    each = prepared("meta-llama/Llama-3.2-1B", method="lora", dtype="float16", gradient_checkpointing=True)
    peaks = [memory(each, batch, loss_in_fp32=in_fp32) for in_fp32 in (True, False)]
    assert [peak.peak_phase for peak in peaks] == ["loss", "loss"]
    assert peaks[0].logits_bytes == 2 * peaks[1].logits_bytes == 4 * 128_256 * batch.num_tokens


def test_a_loop_that_keeps_upcast_logits_holds_four_bytes_each() -> None:
    batch = Batch.of(4, 1304)
    logits = 32_000 * batch.num_tokens
    lora = {"method": "lora", "dtype": "bfloat16", "lora_r": 8, "gradient_checkpointing": True, "framework": "transformers"}
    for version, width in (("4.44", 4), ("5.0", 2)):
        each = prepared("meta-llama/Llama-2-7b-hf", framework_version=version, **lora)
        more = memory(each, batch, keeps_logits=True).peak_allocated_bytes - memory(each, batch).peak_allocated_bytes
        assert more == width * logits


@pytest.mark.parametrize(
    ("fields", "fused_loss"),
    [
        pytest.param({"framework_version": "1.16"}, "chunked", id="trl"),
        pytest.param({"framework_version": "1.14"}, None, id="trl-before-1.15"),
        pytest.param({"framework_version": "1.14", "loss_type": "chunked_nll"}, "chunked", id="asked-for-chunks"),
        # SFTTrainer leaves Liger's norms and takes its head away (sft_trainer.py)
        pytest.param({"framework_version": "1.16", "use_liger_kernel": True}, "chunked", id="trl-with-liger"),
        pytest.param({"framework_version": "1.14", "use_liger_kernel": True}, "fused", id="liger-before-1.15"),
        pytest.param({"framework": "transformers", "use_liger_kernel": True}, "fused", id="liger"),
    ],
)
def test_which_head_a_trainer_takes(fields: dict[str, Any], fused_loss: str | None) -> None:
    job = prepared("meta-llama/Llama-3.2-1B", **{"framework": "trl", "method": "lora", "dtype": "bfloat16", **fields})[1]
    assert job.fused_loss == fused_loss
    assert job.supervised_positions_only is (fused_loss == "chunked")


def test_trls_head_copies_the_rows_that_count_and_multiplies_one_tile() -> None:
    """kernels/chunked_logprob.py of TRL 1.16: 4,096 positions by 32,768 words, both gradients in fp32 and cast."""
    model, job = prepared("meta-llama/Llama-3.2-1B", framework="trl", method="full", dtype="bfloat16", bf16=False)
    types, hidden, words = element_bytes(job), 2048, 128_256
    head = tiled_head(model, types, 10_000, 2.0 * words * hidden)
    tile = 2 * 4096 * 32_768
    assert (head.kept_bytes, head.in_forward_bytes) == (2 * hidden * 10_000, tile)
    assert head.in_backward_bytes == tile + 6 * hidden * 10_000 + 6 * words * hidden
    # a fifth of the positions holds a fifth of the rows
    assert tiled_head(model, types, 2000, 0.0).kept_bytes == head.kept_bytes / 5


def test_ligers_head_makes_its_gradients_in_the_forward() -> None:
    """ops/fused_linear_cross_entropy.py of Liger 0.8: 63 chunks of 66 positions, rounded up to 128."""
    model, job = prepared("meta-llama/Llama-3.2-1B", use_liger_kernel=True, method="full", dtype="bfloat16", bf16=False)
    hidden, words = 2048, 128_256
    head = liger_head(model, element_bytes(job), 4096, 2.0 * words * hidden)
    assert (head.kept_bytes, head.kept_gradient_bytes, head.in_backward_bytes) == (
        2 * hidden * 4096,
        2 * words * hidden,
        0.0,
    )
    assert head.in_forward_bytes == 2 * 128 * (words + hidden) + 6 * words * hidden


@pytest.mark.parametrize(("number", "power"), [(1, 1), (2, 2), (3, 4), (65.01, 128), (128, 128), (129, 256)])
def test_next_power_of_two(number: float, power: int) -> None:
    assert next_power_of_two(number) == power


# --- from tensors to the card ----------------------------------------------------------------------------------------------


def test_reserved_is_allocated_and_a_share_of_what_comes_and_goes() -> None:
    model, job = prepared("meta-llama/Llama-2-7b-hf", method="lora", dtype="bfloat16", gradient_checkpointing=False)
    peak = peak_memory(model, job, Batch.of(1, 1304))
    step = peak.peak_allocated_bytes - held_bytes(model, job).static_bytes - 8_519_680
    assert peak.peak_reserved_bytes - peak.peak_allocated_bytes == pytest.approx(ALLOCATOR_OVERHEAD["lora"] * step, abs=2)
    assert peak.peak_device_bytes - peak.peak_reserved_bytes == CUDA_CONTEXT_BYTES


def test_varying_lengths_widen_what_the_card_shows_and_not_the_verdict() -> None:
    job: dict[str, Any] = {
        "model": "Qwen/Qwen-7B",
        "gpu": "A100-SXM4-80GB",
        "method": "lora",
        "dtype": "bfloat16",
        "bf16": True,
        "gradient_checkpointing": True,
        "lora_target_modules": ("c_attn",),
        "per_device_train_batch_size": 1,
        "max_length": 2048,
    }
    same = estimate(job, lengths={"fixed": 2048})
    varied = estimate(job, lengths={"histogram": {"100": 9, "2048": 1}})
    assert (varied.verdict, varied.headroom_bytes) == (same.verdict, same.headroom_bytes) == ("fits", same.headroom_bytes)
    assert varied.memory.peak_device_bytes == same.memory.peak_device_bytes
    cached = varied.memory.peak_device_bytes_high - same.memory.peak_device_bytes_high
    assert cached == pytest.approx(VARIABLE_LENGTH_HOLES["lora_checkpointed"] * 12 * 151_936 * 2048, rel=0.001)
    # on a card without that room the high end stops at the card, and the job still fits
    small = estimate(job, gpu="L4", lengths={"histogram": {"100": 9, "2048": 1}})
    assert small.verdict == "fits"
    assert small.memory.peak_device_bytes_high == small.memory.capacity_bytes


def test_a_loss_in_chunks_leaves_no_holes() -> None:
    model, job = prepared("meta-llama/Llama-2-7b-hf", method="lora", dtype="bfloat16", fused_loss="chunked")
    assert loss_bytes(model, job, Batch.of(1, 1304)) == 0.0


def test_the_context_lies_inside_its_interval() -> None:
    low, high = CUDA_CONTEXT_INTERVAL_BYTES
    assert low < CUDA_CONTEXT_BYTES < high
