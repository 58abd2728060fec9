"""The answer as a whole: the contract's names, the paper's job, what an unknown leaves open, what wrong input says."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from costmodel import CostModelError, estimate
from costmodel.estimation import estimated_imbalance_seconds
from costmodel.specs import parse_job

PAPER_JOB = {
    "model": "mistralai/Mixtral-8x7B-v0.1",
    "gpu": "NVIDIA A40",
    "method": "qlora",
    "quantization": "nf4",
    "double_quant": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_target_modules": ["w1", "w2", "w3", "gate"],
    "dtype": "bfloat16",
    "bf16": True,
    "per_device_train_batch_size": 4,
    "gradient_checkpointing": True,
    "attn_implementation": "flash_attention_2",
    "optim": "adamw_torch",
    "max_length": 1024,
    "pad_to_multiple_of": 8,
    "lengths": {"dataset": "math_14k"},
    "num_samples": 15_000,
    "num_train_epochs": 10,
    "framework": "transformers",
    "framework_version": "4.40",
    "usd_per_gpu_hour": 0.79,
}
DENSE_JOB = {
    "model": "meta-llama/Llama-3.2-1B",
    "gpu": "L40S",
    "method": "lora",
    "lora_r": 16,
    "lora_target_modules": "all-linear",
    "dtype": "bfloat16",
    "bf16": True,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_length": 1024,
    "lengths": {"mean": 300, "max": 1024},
    "num_samples": 4_000,
    "num_train_epochs": 1,
    "usd_per_gpu_hour": 1.0,
}

# The answer of the design, field by field.
ANSWER_FIELDS = [
    "schema_version",
    "version",
    "job",
    "assumed",
    "defaults_of",
    "num_params",
    "num_active_params",
    "num_trainable_params",
    "memory",
    "verdict",
    "headroom_bytes",
    "share_of_batches_that_fit",
    "max_batch_size",
    "max_length_that_fits",
    "interval_level",
    "step_seconds",
    "step_seconds_low",
    "step_seconds_high",
    "step",
    "num_tokens_per_step",
    "num_non_padding_tokens_per_step",
    "num_supervised_tokens_per_step",
    "tokens_per_second",
    "non_padding_tokens_per_second",
    "samples_per_second",
    "model_flops_per_step",
    "hardware_flops_per_step",
    "mfu",
    "hfu",
    "num_steps",
    "train_seconds",
    "eval_seconds",
    "save_seconds",
    "startup_seconds",
    "total_seconds",
    "total_seconds_low",
    "total_seconds_high",
    "total_usd",
    "total_usd_low",
    "total_usd_high",
    "price",
    "evidence",
    "calibration",
    "warnings",
]
MEMORY_FIELDS = [
    "weights_bytes",
    "adapters_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "activations_bytes",
    "logits_bytes",
    "temporary_bytes",
    "context_bytes",
    "peak_phase",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_device_bytes",
    "peak_device_bytes_low",
    "peak_device_bytes_high",
    "capacity_bytes",
]


def test_the_answer_has_every_field_of_the_contract_and_is_plain_json() -> None:
    answer = estimate(PAPER_JOB).to_dict()
    assert set(ANSWER_FIELDS) <= set(answer)
    assert set(MEMORY_FIELDS) <= set(answer["memory"])
    parts = {"bound_by", "forward_seconds", "backward_seconds", "optimizer_seconds", "by_group_seconds"}
    assert set(answer["step"]) == parts
    assert json.loads(json.dumps(answer, allow_nan=False))["num_trainable_params"] == 228_593_664


def test_the_papers_job_costs_what_the_paper_measured() -> None:
    """Table IV: 32.7 dollars for ten epochs at 1.01 samples a second on an A40, batch 4."""
    answer = estimate(PAPER_JOB)
    assert answer.samples_per_second == pytest.approx(1.01, rel=0.15)
    assert answer.total_usd == pytest.approx(32.7, rel=0.15)
    assert answer.total_usd_low < 32.7 < answer.total_usd_high
    assert answer.verdict in {"fits", "tight"}  # it ran


def test_parts_sum_to_the_whole() -> None:
    for job in (PAPER_JOB, DENSE_JOB):
        answer = estimate(job)
        assert sum(answer.step.by_group_seconds.values()) == pytest.approx(answer.step_seconds)
        phases = answer.step.forward_seconds + answer.step.backward_seconds + answer.step.optimizer_seconds
        assert phases == pytest.approx(answer.step_seconds)
        total = answer.train_seconds + answer.eval_seconds + answer.save_seconds + answer.startup_seconds
        assert total == pytest.approx(answer.total_seconds)
        assert answer.total_usd == pytest.approx(answer.total_seconds / 3600 * answer.price.usd_per_gpu_hour)
        assert answer.step_seconds_low < answer.step_seconds < answer.step_seconds_high
        assert answer.total_usd_low < answer.total_usd < answer.total_usd_high
        assert answer.memory.peak_device_bytes_low < answer.memory.peak_device_bytes < answer.memory.peak_device_bytes_high


def test_the_resolved_job_estimates_to_the_same_answer() -> None:
    for job in (PAPER_JOB, DENSE_JOB):
        first = estimate(job)
        again = estimate(first.job)
        assert again.step_seconds == first.step_seconds
        assert again.memory == first.memory
        assert again.total_usd == first.total_usd


def test_accumulation_multiplies_the_micro_batches() -> None:
    one, eight = (estimate(DENSE_JOB, gradient_accumulation_steps=n) for n in (1, 8))
    assert eight.num_tokens_per_step == pytest.approx(8 * one.num_tokens_per_step)
    assert eight.model_flops_per_step == pytest.approx(8 * one.model_flops_per_step)
    assert 7.5 * one.step_seconds < eight.step_seconds < 8 * one.step_seconds
    assert (one.num_steps, eight.num_steps) == (1000, 125)


def test_a_partial_last_group_is_a_step_in_transformers_5_and_dropped_in_4() -> None:
    # 10 batches an epoch in groups of 4: three steps an epoch, or two
    job = {**DENSE_JOB, "num_samples": 40, "gradient_accumulation_steps": 4, "num_train_epochs": 3}
    assert estimate(job, framework_version="5.24").num_steps == 9
    assert estimate(job, framework_version="4.40").num_steps == 6


def test_checkpointing_leaves_model_flops_and_raises_hardware_flops_by_about_a_third() -> None:
    job = {**DENSE_JOB, "method": "full"}
    for name in ("lora_r", "lora_target_modules"):
        job.pop(name)
    plain, checkpointed = (estimate(job, gradient_checkpointing=flag) for flag in (False, True))
    assert checkpointed.model_flops_per_step == plain.model_flops_per_step
    assert 1.15 < checkpointed.hardware_flops_per_step / plain.hardware_flops_per_step < 1.34


def test_lora_needs_two_thirds_of_the_flops_of_full_tuning() -> None:
    # NeMo Automodel 786: (1 + 1 + ratio) / 3
    full = {name: value for name, value in DENSE_JOB.items() if not name.startswith("lora")} | {"method": "full"}
    ratio = estimate(DENSE_JOB).model_flops_per_step / estimate(full).model_flops_per_step
    assert 0.66 < ratio < 0.70


def test_an_evaluation_and_a_save_are_in_the_bill() -> None:
    plain = estimate(DENSE_JOB, save_strategy="no")
    evaluated = estimate(DENSE_JOB, save_strategy="no", eval_strategy="steps", eval_steps=100, num_eval_samples=800)
    assert plain.eval_seconds == 0
    assert plain.save_seconds == 0
    assert evaluated.eval_seconds > 10
    assert estimate(DENSE_JOB, save_strategy="steps", save_steps=100).save_seconds > 0


def test_what_is_not_known_is_null_and_said() -> None:
    without_lengths = {name: value for name, value in DENSE_JOB.items() if name != "lengths"}
    answer = estimate(without_lengths)
    assert answer.step_seconds is answer.total_usd is answer.mfu is None
    assert answer.memory.peak_device_bytes > 0
    assert any("lengths" in warning for warning in answer.warnings)
    without_samples = {name: value for name, value in DENSE_JOB.items() if name != "num_samples"}
    answer = estimate(without_samples)
    assert answer.step_seconds is not None
    assert answer.total_seconds is answer.total_usd is None
    without_price = {name: value for name, value in DENSE_JOB.items() if name != "usd_per_gpu_hour"}
    answer = estimate(without_price)
    assert answer.total_seconds is not None
    assert answer.total_usd is answer.price is None
    without_gpu = {name: value for name, value in DENSE_JOB.items() if name != "gpu"}
    answer = estimate(without_gpu)
    assert answer.memory.peak_allocated_bytes > 0
    assert answer.verdict is answer.step_seconds is None


def test_bf16_on_a_card_without_it_has_no_step_time() -> None:
    answer = estimate(DENSE_JOB, gpu="T4")
    assert answer.step_seconds is None
    assert any("no known rate for bfloat16" in warning for warning in answer.warnings)


def test_the_price_may_come_from_the_environment_or_the_dated_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {name: value for name, value in DENSE_JOB.items() if name != "usd_per_gpu_hour"}
    monkeypatch.setenv("FTCOST_USD_PER_GPU_HOUR", "2.5")
    assert estimate(job).price.usd_per_gpu_hour == 2.5
    monkeypatch.setenv("FTCOST_USD_PER_GPU_HOUR", "cheap")
    with pytest.raises(CostModelError, match="FTCOST_USD_PER_GPU_HOUR"):
        estimate(job)
    monkeypatch.delenv("FTCOST_USD_PER_GPU_HOUR")
    # p4d rents eight A100 at once: a one-GPU job pays for the whole machine
    rented = estimate(job, gpu="A100-SXM4-40GB", cloud="AWS")
    assert rented.price.gpus_per_instance == 8
    assert rented.total_usd == pytest.approx(rented.total_seconds / 3600 * 21.9576)


def test_the_papers_dense_mixtral_is_an_override() -> None:
    sparse, dense = estimate(PAPER_JOB), estimate(PAPER_JOB, model_overrides={"num_experts_per_tok": 8})
    assert dense.num_params == sparse.num_params
    assert dense.num_active_params == pytest.approx(sparse.num_params - 32_000 * 4096)
    assert dense.step_seconds > 1.2 * sparse.step_seconds


def test_a_quantised_moe_on_transformers_5_warns_that_its_experts_stay_16_bit() -> None:
    job = {**PAPER_JOB, "framework_version": "5.24", "lora_target_modules": ["q_proj", "v_proj"]}
    answer = estimate(job)
    assert answer.verdict == "does_not_fit"
    assert any("does not quantise the stacked experts" in warning for warning in answer.warnings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"model": "meta-lama/Llama-3.2-1B"}, ["meta-lama/Llama-3.2-1B", "Llama-3.2-1B"], id="model"),
        pytest.param({"gpu": "RTX 4091"}, ["RTX 4091", "RTX 4090"], id="gpu"),
        pytest.param({"gpu": "A100"}, ["A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIE-40GB"], id="ambiguous-gpu"),
        pytest.param({"optim": "adamw_torchh"}, ["adamw_torchh", "adamw_torch"], id="optimizer"),
        pytest.param({"lora_rank": 8}, ["lora_rank", "lora_r"], id="field"),
        pytest.param({"per_device_train_batch_size": 0}, ["per_device_train_batch_size"], id="batch-0"),
        pytest.param({"usd_per_gpu_hour": math.nan}, ["usd_per_gpu_hour"], id="price-nan"),
        pytest.param({"usd_per_gpu_hour": -1}, ["usd_per_gpu_hour"], id="price-negative"),
        pytest.param({"bf16": True, "fp16": True}, ["bf16", "fp16"], id="two-autocasts"),
        pytest.param({"lengths": {"mean": 10}}, ["max"], id="mean-without-max"),
        pytest.param({"lengths": {"fixed": 10, "values": [1]}}, ["exactly one"], id="two-lengths"),
        pytest.param({"lengths": {"histogram": {"-3": 1}}}, ["at least 1"], id="negative-length"),
        pytest.param({"lora_target_modules": ["nothing"]}, ["nothing", "q_proj"], id="targets"),
        pytest.param({"model_overrides": {"num_expert": 4}}, ["num_expert"], id="override"),
        pytest.param({"model": {"model_type": "llama"}}, ["hidden_size"], id="config-without-sizes"),
        pytest.param({"model": {"hidden_size": 8}}, ["model_type"], id="config-without-type"),
        pytest.param({"method": "full", "quantization": "nf4"}, ["qlora"], id="full-4-bit"),
    ],
)
def test_wrong_input_is_one_line_with_the_way_out(changes: dict, words: list[str]) -> None:
    with pytest.raises(CostModelError) as caught:
        estimate({**DENSE_JOB, **changes})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_an_unknown_family_is_refused_by_name() -> None:
    config = {"model_type": "madeup", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
    with pytest.raises(CostModelError, match="madeup"):
        estimate({**DENSE_JOB, "model": config})


def test_bitsandbytes_names_are_read() -> None:
    job = parse_job(
        {
            "model": "x",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "torch_dtype": "bf16",
        }
    )
    assert (job.quantization, job.double_quant, job.dtype) == ("nf4", True, "bfloat16")


def test_a_field_that_is_null_is_not_said_beside_its_other_name() -> None:
    job = parse_job({"model": "x", "quantization": None, "load_in_4bit": True, "dtype": None, "torch_dtype": "bf16"})
    assert (job.quantization, job.dtype) == ("fp4", "bfloat16")
    with pytest.raises(CostModelError, match="load_in_4bit must be true or false, got 'false'"):
        parse_job({"model": "x", "load_in_4bit": "false"})


@pytest.mark.parametrize(
    ("framework", "version", "expected"),
    [
        # TrainingArguments and SFTConfig, read from the sources of the versions named
        pytest.param("transformers", "5.24", ("adamw_torch_fused", False, False, "bfloat16"), id="transformers-5"),
        pytest.param("transformers", "4.40", ("adamw_torch", False, False, "float32"), id="transformers-4"),
        pytest.param("trl", "1.16", ("adamw_torch_fused", True, True, "float32"), id="trl-1"),
    ],
)
def test_defaults_are_the_frameworks_own_and_named(framework: str, version: str, expected: tuple) -> None:
    fields = {"model": "meta-llama/Llama-3.2-1B", "method": "full", "max_length": 512}
    answer = estimate(fields, framework=framework, framework_version=version)
    job = answer.job
    assert (job["optim"], job["gradient_checkpointing"], job["bf16"], job["dtype"]) == expected
    assert {"optim", "gradient_checkpointing", "bf16", "dtype", "per_device_train_batch_size"} <= set(answer.assumed)
    assert answer.defaults_of == f"{framework} {version}"


def test_max_length_has_a_default_only_where_the_framework_has_one() -> None:
    with pytest.raises(CostModelError, match="max_length is required"):
        estimate(model="meta-llama/Llama-3.2-1B", method="full")
    assert estimate(model="meta-llama/Llama-3.2-1B", method="full", framework="trl").job["max_length"] == 1024


def test_a_job_without_a_model_says_how_to_name_one() -> None:
    with pytest.raises(CostModelError, match=r"no model is named: give a catalogue id, .* \(-m on the command line\)"):
        estimate(gpu="A40", max_length=512)


def test_gpt_oss_has_no_sdpa_and_is_counted_as_eager() -> None:
    answer = estimate(model="openai/gpt-oss-20b", gpu="H100 SXM", method="lora", dtype="bfloat16", max_length=512)
    assert any("no sdpa kernel" in warning for warning in answer.warnings)


def test_evaluation_samples_are_packed_like_training_samples() -> None:
    job = {**DENSE_JOB, "lengths": {"fixed": 128}, "packing": True, "max_length": 1024}
    evaluated = {"eval_strategy": "epoch", "num_eval_samples": 800, "per_device_eval_batch_size": 4}
    packed = estimate(job, **evaluated)
    padded = estimate({**job, "packing": False}, **evaluated)
    # eight samples a row: about the same tokens either way, not eight times as many
    assert packed.eval_seconds == pytest.approx(padded.eval_seconds, rel=0.5)


def test_evaluation_samples_are_packed_among_themselves() -> None:
    """One training sample fills no row; the eighty of the evaluation do, ten to a row of 1,024."""
    job = {**DENSE_JOB, "packing": True, "max_length": 1024, "lengths": {"fixed": 100}, "max_steps": 1}
    job |= {"eval_strategy": "epoch", "num_eval_samples": 80, "per_device_eval_batch_size": 2}
    few, many = (estimate(job, num_samples=number, num_train_epochs=1) for number in (1, 10_000))
    once = estimate(job, num_samples=1, num_eval_samples=20)  # one batch of two rows
    assert few.eval_seconds == pytest.approx(many.eval_seconds)
    assert few.eval_seconds == pytest.approx(4 * once.eval_seconds)


def test_float32_weights_that_nobody_asked_for_are_said() -> None:
    answer = estimate(model="Qwen/Qwen3-8B", gpu="H100 SXM", method="lora", framework="trl")
    assert answer.job["dtype"] == "float32"
    assert any("dtype bfloat16" in warning for warning in answer.warnings)


def test_several_gpus_communicate_and_say_what_that_rests_on() -> None:
    one, eight = (estimate(DENSE_JOB, method="full", lora_r=None, lora_target_modules=None, num_gpus=n) for n in (1, 8))
    assert one.step is not None
    assert eight.step is not None
    assert "communication" not in one.step.by_group_seconds
    waited = eight.step.by_group_seconds["communication"]
    waited += eight.step.by_group_seconds["waiting_for_slowest_gpu"]
    assert eight.step_seconds == pytest.approx(one.step_seconds + waited)
    said = [warning for warning in eight.warnings if "communication is computed for PCIe at 31.5 GB/s" in warning]
    assert len(said) == 1
    assert "no measured run stands behind that" in said[0]
    assert not any("communication" in warning for warning in one.warnings)
    ratios = [answer.step_seconds_high / answer.step_seconds for answer in (one, eight)]
    assert ratios[1] > ratios[0]


def test_a_gpu_whose_link_is_not_known_leaves_communication_out_and_says_so() -> None:
    described = {
        "name": "mine",
        "memory_bytes": 48 * 2**30,
        "memory_bandwidth_bytes_per_second": 8e11,
        "peak_bf16_flops_per_second": 2e14,
    }
    assumed = estimate(DENSE_JOB, gpu={**described, "architecture": "Ada"}, num_gpus=8)
    assert any("PCIe at 31.5 GB/s a direction (assumed from its architecture)" in each for each in assumed.warnings)
    eight = estimate(DENSE_JOB, gpu=described, num_gpus=8)
    assert eight.step is not None
    assert "communication" not in eight.step.by_group_seconds
    assert any("communication is not in the step time" in warning for warning in eight.warnings)


def test_more_gpus_than_a_machine_holds_are_doubted() -> None:
    many = estimate(DENSE_JOB, gpu="H100 SXM", num_gpus=16)
    assert any("several machines, whose network is slower" in warning for warning in many.warnings)


def test_seconds_of_uneven_experts_follow_from_a_job() -> None:
    job = {**PAPER_JOB, "lengths": {"fixed": 256}, "max_length": 256, "gpu": "H100 SXM"}
    even, uneven = (estimated_imbalance_seconds(job, load) for load in ([1] * 8, [13, 1, 1, 1, 1, 1, 1, 1]))
    assert even == 0.0
    assert uneven is not None
    assert uneven > 0
    through_job = estimate(job, expert_imbalance=13 / 2.5)
    assert through_job.step is not None
    assert through_job.step.by_group_seconds["expert_imbalance"] > 0
    assert estimated_imbalance_seconds({**job, "lengths": None}, 2.0) is None


def test_an_answer_prints_as_a_line_and_shows_as_a_table_in_a_notebook() -> None:
    answer = estimate(
        model="meta-llama/Llama-2-7b-hf",
        gpu="A40",
        method="qlora",
        max_length=512,
        lengths={"fixed": 512},
        num_samples=1000,
        usd_per_gpu_hour=0.5,
    )
    line = str(answer)
    assert line.startswith("meta-llama/Llama-2-7b-hf qlora nf4 on 1 x A40, verdict: fits, memory: ")
    assert re.search(r" GiB of 45\.0 GiB, step: [\d.]+ m?s, total: [\d.]+ \w+, cost: \$[\d.]+$", line)
    assert "\n" not in line
    assert len(line) < 200
    assert repr(answer).startswith("Estimate(schema_version=1, ")
    page = answer._repr_html_()
    assert page.count("<tr>") == 6
    inline = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "x": "<script>"}
    bare = estimate(model={**inline, "intermediate_size": 64, "vocab_size": 64}, max_length=8)
    assert str(bare).startswith("llama full, memory: ")
    assert "unknown" not in str(bare)
    assert "<script>" not in bare._repr_html_()


def test_fsdp_says_that_accumulated_gradients_are_whole() -> None:
    job = {"model": "meta-llama/Llama-3.1-8B", "gpu": "H100 SXM", "num_gpus": 8, "max_length": 512, "framework": "trl"}

    def warned(**fields: Any) -> bool:
        return any("no_sync" in each for each in estimate(job, **fields).warnings)

    assert warned(fsdp="full_shard", gradient_accumulation_steps=4)
    assert not warned(fsdp="full_shard", gradient_accumulation_steps=1)
    assert not warned(deepspeed={"zero_optimization": {"stage": 3}}, gradient_accumulation_steps=4)


def test_what_unsloth_may_save_is_in_the_low_end() -> None:
    job = {"model": "meta-llama/Llama-3.1-8B", "gpu": "L4", "method": "lora", "max_length": 2048}
    job |= {"dtype": "bfloat16", "gradient_checkpointing": True}
    plain, unsloth = (estimate(job, framework=name) for name in ("transformers", "unsloth"))
    assert plain.memory.peak_device_bytes_low is not None
    assert unsloth.memory.peak_device_bytes_low is not None
    held = unsloth.memory.weights_bytes + unsloth.memory.adapters_bytes
    assert held < unsloth.memory.peak_device_bytes_low < 0.8 * plain.memory.peak_device_bytes_low
    assert set(unsloth.assumed) <= set(unsloth.job)  # none without a value


@pytest.mark.parametrize("attention", ["flash_attention_2", "sdpa", "eager"])
@pytest.mark.parametrize("gpu", ["RTX 5090", "A100-SXM4-80GB"])
@pytest.mark.parametrize("tokens", [2048, 131_072, 1_000_000])
def test_hfu_is_a_share_however_long_the_sequence(gpu: str, attention: str, tokens: int) -> None:
    answer = estimate(
        model="Qwen/Qwen2.5-0.5B",
        gpu=gpu,
        method="full",
        dtype="bfloat16",
        bf16=True,
        gradient_checkpointing=True,
        attn_implementation=attention,
        per_device_train_batch_size=1,
        max_length=tokens,
        lengths={"fixed": tokens},
    )
    assert answer.hfu is not None
    assert 0 < answer.hfu <= 1


@pytest.mark.parametrize("version", ["5.24", "4.40"])
@pytest.mark.parametrize("accumulation", [1, 16, 64])
@pytest.mark.parametrize(
    "duration", [{"num_train_epochs": 0.001}, {"num_train_epochs": 1.5}, {"max_steps": 1}, {"max_steps": 40}]
)
def test_the_run_takes_its_steps_whole(duration: dict[str, Any], accumulation: int, version: str) -> None:
    """Only what an epoch leaves over is a smaller step, in transformers 5: 1,000 batches are 62 of 16 and one of 8."""
    job = {**DENSE_JOB, "per_device_train_batch_size": 1, "num_samples": 1000, "gradient_accumulation_steps": accumulation}
    answer = estimate({**job, "num_train_epochs": None, **duration}, framework_version=version)
    assert answer.num_steps is not None
    assert answer.step_seconds is not None
    assert answer.train_seconds is not None
    left_over = 1000 % accumulation if version == "5.24" else 0
    per_epoch = 1000 // accumulation + bool(left_over)
    smaller_steps = answer.num_steps // per_epoch if left_over else 0
    assert answer.train_seconds > (answer.num_steps - smaller_steps) * answer.step_seconds


def test_packed_rows_padded_to_the_full_length_are_estimated_again_from_the_answer() -> None:
    first = estimate(DENSE_JOB, packing=True, padding="max_length").to_dict()
    again = estimate(first["job"]).to_dict()
    assert again["job"] == first["job"]
    assert again["step_seconds"] == first["step_seconds"]
    assert again["memory"] == first["memory"]


@pytest.mark.parametrize("calibration", ["no/such/file.json", {"device_factor": 1.0}])
@pytest.mark.parametrize("missing", ["gpu", "lengths"])
def test_a_wrong_calibration_is_refused_where_there_is_no_step_time_either(calibration: Any, missing: str) -> None:
    with pytest.raises(CostModelError, match="calibration"):
        estimate({**DENSE_JOB, missing: None}, calibration=calibration)


def test_an_even_load_has_no_imbalance_to_the_last_digit() -> None:
    for gpu in ("H100 SXM", "RTX 4090"):
        for imbalance in (1.0 + 1e-12, 1.0 + 1e-15):
            answer = estimate(
                model="Qwen/Qwen3-30B-A3B",
                gpu=gpu,
                method="full",
                dtype="bfloat16",
                max_length=4096,
                per_device_train_batch_size=16,
                lengths={"fixed": 4096},
                expert_imbalance=imbalance,
            )
            assert answer.step is not None
            assert answer.step.by_group_seconds.get("expert_imbalance", 0.0) == 0.0


@pytest.mark.parametrize("framework", ["transformers", "trl", "axolotl", "llamafactory"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_the_low_end_of_the_memory_holds_the_tensors_of_a_stack_that_was_read(framework: str, method: str) -> None:
    for size, tokens in ((1, 64), (8, 2048)):
        memory = estimate(
            model="meta-llama/Llama-3.1-8B",
            method=method,
            max_length=tokens,
            per_device_train_batch_size=size,
            framework=framework,
        ).memory
        assert memory.peak_device_bytes_low is not None
        assert memory.peak_device_bytes_low >= memory.peak_allocated_bytes


@pytest.mark.parametrize(
    ("width", "heads", "layers", "gpu", "size", "length"),
    [
        (7168, 56, 48, "H100 SXM", 6, 1024),
        (7168, 56, 48, "A100-SXM4-80GB", 1, 8192),
        (5120, 40, 40, "A100-SXM4-40GB", 16, 512),
    ],
    ids=["30B-h100", "30B-a100", "13B-a100-40gb"],
)
def test_sharded_mixed_precision_computes_on_16_bit_weights(
    width: int, heads: int, layers: int, gpu: str, size: int, length: int
) -> None:
    """llm-foundry trained MPT 30B on 8 cards of 80 GB, and 13B on 8 of 40, with FSDP's full_shard and bf16.

    FSDP gathers 16-bit weights, so autocast copies none (it would have been 56 GiB of 30B on each card), and what was
    loaded in fp32 is the masters: 2 + 4 + 8 bytes a weight, split.
    """
    job: dict[str, Any] = {
        "model": "mosaicml/mpt-7b",
        "model_overrides": {"d_model": width, "n_heads": heads, "n_layers": layers},
        "gpu": gpu,
        "num_gpus": 8,
        "fsdp": "full_shard",
        "method": "full",
        "bf16": True,
        "per_device_train_batch_size": size,
        "gradient_checkpointing": True,
        "attn_implementation": "flash_attention_2",
        "fused_loss": "fused",  # llm-foundry's own, of flash-attn
        "max_length": length,
        "lengths": {"fixed": length},
        "framework": "other",
    }
    loaded = {dtype: estimate(job, dtype=dtype) for dtype in ("float32", "bfloat16")}
    wide = loaded["float32"]
    assert wide.verdict in ("fits", "tight")
    assert wide.memory == loaded["bfloat16"].memory
    assert wide.memory.weights_bytes + wide.memory.optimizer_bytes == pytest.approx(14 * wide.num_params / 8, rel=1e-6)
    assert wide.job["dtype"] == "float32"
    assert estimate(wide.job).memory == wide.memory
    # plain data parallelism keeps fp32 weights, which autocast copies
    assert estimate(job, dtype="float32", fsdp=None).memory.weights_bytes == 4 * wide.num_params


def test_the_number_of_steps_needs_neither_a_gpu_nor_lengths() -> None:
    job = {"model": "Qwen/Qwen3-4B", "max_length": 512, "num_samples": 1_000, "num_train_epochs": 2}
    with_time = estimate(job, gpu="L4", lengths={"fixed": 100})
    assert estimate(job).num_steps == estimate(job, lengths={"fixed": 100}).num_steps == with_time.num_steps == 250
    assert estimate(job, max_steps=7).num_steps == 7
    # how many samples a packed row holds is not known
    assert estimate(job, packing=True).num_steps is None
    assert estimate(job, packing=True, lengths={"fixed": 100}).num_steps is not None
