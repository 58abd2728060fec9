"""Faults once found in the estimate before a run: each with the value that is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from costmodel import CostModelError, estimate
from costmodel.constants import ALLOCATOR_OVERHEAD
from costmodel.cost import run_time, schedule
from costmodel.defaults import resolve
from costmodel.hf_config import model_spec_from_config
from costmodel.length_distribution import distribution
from costmodel.lengths import batch_tokens
from costmodel.memory import peak_memory
from costmodel.model_catalog import find_model_config
from costmodel.sharding import Sharding, read_sharding
from costmodel.specs import Lengths, parse_job
from costmodel.step_time import StepTime
from costmodel.workload import Batch

NUM_PARAMS = 1_235_814_400  # of Llama-3.2-1B, as the real module counts it
VOCAB, HIDDEN = 128_256, 2048
FULL_JOB: dict[str, Any] = {
    "model": "meta-llama/Llama-3.2-1B",
    "gpu": "L40S",
    "method": "full",
    "dtype": "float32",
    "max_length": 512,
    "lengths": {"fixed": 512},
    "per_device_train_batch_size": 1,
    "num_samples": 800,
    "num_train_epochs": 1,
    "usd_per_gpu_hour": 1.0,
}
LORA_JOB = {**FULL_JOB, "method": "lora", "dtype": "bfloat16", "bf16": True}


def _said(answer: Any, words: str) -> bool:
    return any(words in warning for warning in answer.warnings)


def _resolved(fields: dict[str, Any]) -> Any:
    model = model_spec_from_config(find_model_config(fields["model"]), name=fields["model"])
    return model, resolve(parse_job(fields), model)[0]


# --- sharding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "stage"),
    [
        ({"fsdp": "full_shard auto_wrap"}, 3),
        ({"fsdp": "shard_grad_op"}, 2),
        ({"fsdp": "no_shard"}, 0),
        ({"fsdp": {"fsdp_sharding_strategy": "FULL_SHARD"}}, 3),
        ({"fsdp": {"sharding_strategy": 2}}, 2),
        ({"fsdp": {"fsdp_version": 2, "reshard_after_forward": False}}, 2),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}}, 1),
        ({"deepspeed": '{"zero_optimization": {"stage": 3}}'}, 3),
        ({"deepspeed": {}}, 0),
        ({}, 0),
    ],
)
def test_the_stage_is_read_from_fsdp_and_deepspeed(fields: dict[str, Any], stage: int) -> None:
    assert read_sharding(fields.get("fsdp"), fields.get("deepspeed"), 8).stage == stage


@pytest.mark.parametrize(
    ("sharding", "weights", "optimizer", "gradients"),
    [
        # fp32 AdamW: 4 bytes of weights, 4 of gradients, 8 of states (arXiv:1910.02054, figure 1)
        pytest.param({}, 4, 8, 4, id="plain"),
        pytest.param({"deepspeed": {"zero_optimization": {"stage": 1}}}, 4, 1, 4, id="zero-1"),
        pytest.param({"deepspeed": {"zero_optimization": {"stage": 2}}}, 4, 1, 0.5, id="zero-2"),
        pytest.param({"deepspeed": {"zero_optimization": {"stage": 3}}}, 0.5, 1, 0.5, id="zero-3"),
        pytest.param({"fsdp": "full_shard"}, 0.5, 1, 0.5, id="fsdp"),
    ],
)
def test_eight_gpus_split_what_the_stage_says(
    sharding: dict[str, Any], weights: float, optimizer: float, gradients: float
) -> None:
    model, job = _resolved({**FULL_JOB, **sharding, "num_gpus": 8})
    # sixteen tokens: the optimizer step is the peak, and every gradient is there
    memory = peak_memory(model, job, Batch.of(1, 16))
    assert memory.weights_bytes == weights * NUM_PARAMS
    assert memory.optimizer_bytes == optimizer * NUM_PARAMS
    if memory.peak_phase == "optimizer":
        assert memory.gradients_bytes == gradients * NUM_PARAMS
    plain = peak_memory(model, _resolved({**FULL_JOB, "num_gpus": 8})[1], Batch.of(1, 16))
    assert (memory.peak_device_bytes < plain.peak_device_bytes) is bool(sharding)


def test_zero_3_gathers_the_layers_at_work_and_what_is_outside_them() -> None:
    sharded, plain = (
        peak_memory(*_resolved({**FULL_JOB, "num_gpus": 8, **fields}), Batch.of(4, 2048))
        for fields in ({"fsdp": "full_shard"}, {})
    )
    layer = 60_821_504  # 4 * 2048 * 2048 with 8 of 32 heads for keys and values, 3 * 2048 * 8192, two norms
    gathered = 4 * (2 * layer + VOCAB * HIDDEN + HIDDEN)
    assert plain.peak_phase == sharded.peak_phase == "loss"
    assert sharded.temporary_bytes - plain.temporary_bytes == gathered


def test_sixteen_bit_weights_under_autocast_are_sharded_with_their_fp32_masters() -> None:
    # DeepSpeed in mixed precision: 2 + 2 + (4 + 4 + 4) bytes a weight, the last over the GPUs
    job = {**FULL_JOB, "dtype": "bfloat16", "bf16": True, "num_gpus": 4, "deepspeed": {"zero_optimization": {"stage": 1}}}
    assert peak_memory(*_resolved(job), Batch.of(1, 16)).optimizer_bytes == 12 * NUM_PARAMS // 4


def test_fsdp_holds_whole_gradients_while_they_accumulate() -> None:
    """accelerate's no_sync: gradients are reduced, and split, at the last micro-batch only."""
    once, twice = (
        estimate(
            FULL_JOB, num_gpus=8, fsdp="full_shard", gradient_accumulation_steps=n, max_length=64, lengths={"fixed": 64}
        )
        for n in (1, 2)
    )
    assert twice.memory.peak_allocated_bytes - once.memory.peak_allocated_bytes > 0.5 * 4 * NUM_PARAMS


def test_sharding_is_said_to_be_less_certain_and_one_gpu_splits_nothing() -> None:
    assert _said(estimate(FULL_JOB, num_gpus=8, fsdp="full_shard"), "less certain")
    one = estimate(FULL_JOB, fsdp="full_shard")
    assert _said(one, "nothing is split")
    assert one.memory == estimate(FULL_JOB).memory
    assert _said(estimate(FULL_JOB, num_gpus=8, fsdp="full_shard offload"), "not modelled")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"deepspeed": "missing_ds.json"}, "missing_ds.json"),
        ({"deepspeed": "{not json"}, "not JSON"),
        ({"deepspeed": {"zero_optimization": {"stage": 4}}}, "0, 1, 2 or 3"),
        ({"fsdp": "full_shrad"}, "full_shard"),
        ({"fsdp": "full_shard", "deepspeed": {"zero_optimization": {"stage": 1}}}, "both"),
    ],
)
def test_sharding_that_cannot_be_read_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CostModelError, match=words):
        estimate(FULL_JOB, num_gpus=2, **fields)


def test_a_deepspeed_path_is_read(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}))
    # without a reduce_bucket_size DeepSpeed takes 5e8 elements
    assert read_sharding(None, str(file), 2) == Sharding(2, 2, offloads=True, by="deepspeed", bucket_elements=500_000_000)
    file.write_text(json.dumps({"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}))
    assert read_sharding(None, str(file), 2) == Sharding(2, 2, by="deepspeed")


# --- activations on the host -------------------------------------------------------------------------------------------


def test_offloaded_activations_leave_one_layer_on_the_device() -> None:
    job = {**LORA_JOB, "model": "meta-llama/Llama-2-7b-hf", "max_length": 2048, "per_device_train_batch_size": 8}
    job |= {"lengths": {"fixed": 2048}, "fused_loss": "fused"}
    kept, offloaded = (estimate(job, activation_offloading=flag) for flag in (False, True))
    # the final norm's backward comes while all layers are kept, or while none is
    assert (kept.memory.peak_phase, offloaded.memory.peak_phase) == ("loss", "backward")
    assert kept.memory.device_bytes_by_phase is not None
    assert offloaded.memory.device_bytes_by_phase is not None
    # 32 equal layers, of which one is left
    moved = kept.memory.device_bytes_by_phase["backward"] - offloaded.memory.device_bytes_by_phase["backward"]
    assert moved == pytest.approx((1 + ALLOCATOR_OVERHEAD["lora"]) * kept.memory.activations_bytes * 31 / 32, rel=0.01)
    assert _said(offloaded, "PCIe")
    assert not _said(kept, "PCIe")


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_an_evaluation_of_large_batches_is_the_peak() -> None:
    job = {**LORA_JOB, "lora_target_modules": ["q_proj", "v_proj"], "num_eval_samples": 64, "per_device_eval_batch_size": 16}
    plain = estimate(job)
    evaluated = estimate(job, eval_strategy="steps", eval_steps=100)
    tokens = 16 * 512
    # the logits in bf16, their fp32 copy and the log-softmax; the last hidden state; no gradients
    memory = evaluated.memory
    assert memory.peak_phase == "evaluation"
    assert memory.logits_bytes == 2 * VOCAB * tokens
    assert memory.activations_bytes == 2 * HIDDEN * tokens
    assert memory.gradients_bytes == 0
    assert memory.temporary_bytes - 8 * VOCAB * tokens < 64 * 2**20  # cuBLAS
    assert plain.memory.peak_phase != "evaluation"
    assert plain.memory.peak_allocated_bytes < memory.peak_allocated_bytes


def test_an_evaluation_in_fp32_has_no_copy_of_its_logits() -> None:
    model, job = _resolved({**FULL_JOB, "method": "lora"})
    memory = peak_memory(model, job, Batch.of(1, 16), evaluation=Batch.of(8, 512))
    assert (memory.peak_phase, memory.logits_bytes) == ("evaluation", 4 * VOCAB * 4096)


def test_an_evaluation_that_never_fits_is_named() -> None:
    answer = estimate(LORA_JOB, eval_strategy="epoch", num_eval_samples=500, per_device_eval_batch_size=256)
    assert (answer.verdict, answer.max_batch_size) == ("does_not_fit", 0)
    assert _said(answer, "per_device_eval_batch_size (256)")
    assert not _said(estimate(LORA_JOB, eval_strategy="epoch", num_eval_samples=500), "evaluation alone")


# --- the run ---------------------------------------------------------------------------------------------------------


def test_the_warm_up_is_of_one_micro_batch_and_one_optimizer_step() -> None:
    model, job = _resolved({**FULL_JOB, "gradient_accumulation_steps": 128, "max_steps": 16, "save_strategy": "no"})
    step = StepTime(128.5, "compute", 40.0, 88.0, 0.5, {}, 128.5, 1.0, 0.0, "device")
    tokens = batch_tokens(job, distribution(Lengths(fixed=512), 512))
    plan = schedule(
        _resolved({**FULL_JOB, "gradient_accumulation_steps": 128, "max_steps": 16, "num_samples": None})[1], tokens
    )
    assert plan is not None
    # 16 steps of 128 micro-batches of 1 s and an optimizer of 0.5 s; the first of each takes five times as long
    assert run_time(model, job, plan, step, None).train_seconds == pytest.approx(16 * 128.5 + 4 * 1.5)


def test_what_happens_by_epoch_is_not_known_without_num_samples() -> None:
    job = {**FULL_JOB, "num_samples": None, "max_steps": 100}
    answer = estimate(job, eval_strategy="epoch", num_eval_samples=64, save_strategy="epoch")
    assert answer.eval_seconds is answer.save_seconds is None
    assert answer.total_seconds == pytest.approx(answer.train_seconds + answer.startup_seconds)
    assert answer.total_seconds_low < answer.total_seconds < answer.total_seconds_high
    assert _said(answer, "evaluations by epoch need num_samples")
    assert _said(answer, "saves by epoch need num_samples")


def test_evaluations_of_an_unknown_size_have_no_time() -> None:
    answer = estimate(FULL_JOB, eval_strategy="steps", eval_steps=100)
    assert answer.eval_seconds is None
    assert answer.save_seconds is not None
    assert _said(answer, "give num_eval_samples")
    # none comes before the run ends: that is known, of a transformers that does not evaluate at the end
    never = {"eval_strategy": "steps", "eval_steps": 10_000}
    assert estimate(FULL_JOB, **never, framework_version="5.3").eval_seconds == 0
    assert estimate(FULL_JOB, **never).eval_seconds is None


# --- capacity and verdict --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batches",
    [
        pytest.param({"packing": True}, id="packing"),
        pytest.param({"packing": True, "padding_free": False}, id="packing-one-mask"),
        pytest.param({"padding_free": True, "pad_to_multiple_of": 64}, id="padding-free"),
        pytest.param({"padding": "max_length"}, id="max-length"),
        pytest.param({"train_sampling_strategy": "group_by_length", "pad_to_multiple_of": 64}, id="grouped"),
        pytest.param({"eval_strategy": "steps", "per_device_eval_batch_size": 2}, id="evaluated"),
    ],
)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_largest_batch_is_the_last_that_the_verdict_lets_through(batches: dict[str, Any], attention: str) -> None:
    job = {
        **LORA_JOB,
        "gpu": "RTX 4090",
        "max_length": 256,
        "lengths": {"histogram": {"90": 3, "201": 1}},
        "attn_implementation": attention,
        **batches,
    }
    largest = estimate(job).max_batch_size
    assert largest is not None
    # eager holds the scores of the whole flattened batch, which grow with its square
    is_flattened = batches.get("padding_free", batches.get("packing", False))
    assert (5 if attention == "eager" and is_flattened else 20) < largest < 1000
    verdicts = {
        size: estimate(job, per_device_train_batch_size=size).verdict for size in (1, largest - 1, largest, largest + 1)
    }
    assert verdicts.pop(largest + 1) == "does_not_fit"
    assert "does_not_fit" not in verdicts.values()


# --- what cannot run, is not used, or contradicts ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": "T4", "attn_implementation": "flash_attention_2"}, "needs compute capability 8.0"),
        ({"gpu": "A100-SXM4-80GB", "attn_implementation": "flash_attention_3"}, "needs compute capability 9.0"),
        ({"gpu": "A100-SXM4-80GB", "quantization": "fp8"}, "fp8 needs compute capability 8.9"),
        ({"method": "full", "dtype": "float16", "bf16": False, "fp16": True}, "Attempting to unscale FP16 gradients"),
        ({"adapter_dtype": "float16", "bf16": False, "fp16": True}, "use adapter_dtype float32"),
        ({"max_length": 131_073, "gpu": None}, "above the 131072 positions"),
        ({"quantization": "int8", "double_quant": True}, "double_quant is not used"),
        ({"num_eval_samples": 100}, "num_eval_samples is not used"),
        ({"cloud": "RunPod"}, "no catalogue price is looked up"),
        ({"framework": "unsloth"}, "its own kernels are not modelled"),
        ({"framework": "torchtune"}, "its own kernels and defaults are not modelled"),
        (
            {"model": "Qwen/Qwen3-30B-A3B", "lora_target_modules": None, "max_length": 1024},
            "peft has no default lora_target_modules for qwen3_moe",
        ),
    ],
)
def test_a_warning_names_the_way_out(changes: dict[str, Any], words: str) -> None:
    assert sum(words in warning for warning in estimate({**LORA_JOB, **changes}).warnings) == 1


def test_a_plain_job_has_no_warning() -> None:
    for changes in ({}, {"gpu": "H100 SXM", "attn_implementation": "flash_attention_3", "max_length": 131_072}):
        assert estimate(LORA_JOB, **changes).warnings == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"padding_free": True, "padding": "max_length"}, "padding_free"),
        ({"save_strategy": "best"}, "eval_strategy"),
        ({"method": "full", "lora_r": 8, "lora_dropout": 0.1}, "lora_r, lora_dropout"),
        ({"model_overrides": {"hidden_size": 3}}, "hidden_size 3 is not a multiple of num_attention_heads 32"),
        ({"model_overrides": {"num_hidden_layers": 10**9}}, "num_hidden_layers"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CostModelError, match=words):
        estimate({**LORA_JOB, **changes})


def test_a_head_narrower_than_one_is_refused_in_every_family_that_divides() -> None:
    config = {**find_model_config("mistralai/Mistral-7B-v0.1"), "hidden_size": 3, "num_attention_heads": 8}
    config.pop("head_dim", None)
    with pytest.raises(CostModelError, match="not a multiple of num_attention_heads"):
        estimate(FULL_JOB, model={**config, "num_key_value_heads": 8})


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({"framework": "unsloth"}, "unsloth 2026.10.9 over transformers 5.24"),
        (
            {"framework": "unsloth", "framework_version": "2026.1.2"},
            "unsloth 2026.10.9 over transformers 5.24 (for unsloth 2026.1.2)",
        ),
        ({"framework": "torchtune"}, "transformers 5.24 (for torchtune)"),
        ({"framework": "axolotl"}, "axolotl 0.19.0 over transformers 5.24"),
        ({"framework": "axolotl", "framework_version": "0.13.2"}, "axolotl 0.19.0 over transformers 4 (for axolotl 0.13.2)"),
        ({"framework": "other", "framework_version": "0.1"}, "transformers 5.24 (for other 0.1)"),
        ({"framework": "trl"}, "trl 1.16"),
    ],
)
def test_no_version_is_named_that_was_not_read(fields: dict[str, Any], source: str) -> None:
    answer = estimate({**LORA_JOB, **fields})
    assert answer.defaults_of == source
    named = source.split()[:2]
    assert answer.job.get("framework_version") == (
        fields.get("framework_version") or (named[1] if named[0] == fields["framework"] else None)
    )
    assert estimate(answer.job).defaults_of == source


def test_qlora_in_float32_takes_nf4() -> None:
    answer = estimate({**LORA_JOB, "method": "qlora", "dtype": "float32"})
    assert answer.job["quantization"] == "nf4"
    assert "quantization" in answer.assumed


def test_a_price_given_with_the_job_has_the_jobs_tier_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert estimate(LORA_JOB).price.tier == "given"
    assert estimate(LORA_JOB, tier="spot").price.tier == "spot"
    monkeypatch.setenv("FTCOST_USD_PER_GPU_HOUR", "2")
    assert estimate({**LORA_JOB, "usd_per_gpu_hour": None}).price.tier == "given"
