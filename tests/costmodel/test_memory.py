"""Peak memory against traces of the real modules, and what must hold for every job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.defaults import resolve
from costmodel.estimation import estimate
from costmodel.families import FAMILIES
from costmodel.held_memory import held_bytes
from costmodel.hf_config import model_spec_from_config
from costmodel.load_memory import load_peak_bytes
from costmodel.memory import peak_device_bytes, peak_memory
from costmodel.model_catalog import find_model_config, list_models
from costmodel.specs import parse_job
from costmodel.units import GIB
from costmodel.workload import Batch

TRACES = [json.loads(line) for line in (Path(__file__).parents[1] / "golden" / "traces.jsonl").read_text().splitlines()]
COMPARED = [row for row in TRACES if not row["skip"] and find_model_config(row["job"]["model"])["model_type"] in FAMILIES]


def _resolved(fields: dict, **changes):
    fields = {**fields, **changes}
    model = model_spec_from_config(find_model_config(fields["model"]), name=fields["model"])
    return model, resolve(parse_job(fields), model)[0]


def _a_linear_of(name: str) -> str:
    """A linear that peft may adapt."""
    spec = model_spec_from_config(find_model_config(name), name=name)
    leaves = (linear.leaf for layer, _ in spec.layers for linear in layer.linears)
    return next(leaf for leaf in leaves if leaf not in ("out_proj", "gate"))


def test_enough_traces_are_compared() -> None:
    assert len(COMPARED) >= 78


@pytest.mark.parametrize("row", COMPARED, ids=lambda row: row["name"])
def test_peak_allocated_is_within_two_percent_of_the_trace(row: dict) -> None:
    model, job = _resolved(row["job"])
    batch = Batch.of(job.per_device_train_batch_size, job.max_length)
    memory = peak_memory(model, job, batch, is_padded=row["is_padded"], on_cpu=True, keeps_logits=row["keeps_logits"])
    assert memory.peak_allocated_bytes == pytest.approx(row["peak_allocated_bytes"], rel=0.02)
    assert held_bytes(model, job).static_bytes / GIB == pytest.approx(row["static_gib"], rel=0.002)


def test_median_error_against_the_traces_is_below_half_a_percent() -> None:
    errors = []
    for row in COMPARED:
        model, job = _resolved(row["job"])
        batch = Batch.of(job.per_device_train_batch_size, job.max_length)
        memory = peak_memory(model, job, batch, is_padded=row["is_padded"], on_cpu=True)
        errors.append(abs(memory.peak_allocated_bytes / row["peak_allocated_bytes"] - 1))
    assert sorted(errors)[len(errors) // 2] < 0.005


@pytest.mark.parametrize(
    ("quantization", "double_quant", "linears_bytes"),
    [
        # Llama-3.1-8B, 6,979,321,856 weights in linears: 4 bit + fp32 scale of 64 = 4.5 bit; nested scales 4.127 bit
        pytest.param("nf4", False, 3_925_868_544, id="nf4"),
        pytest.param("nf4", True, 3_600_416_768, id="nf4-double"),
    ],
)
def test_quantised_weights(quantization: str, double_quant: bool, linears_bytes: int) -> None:
    fields = {
        "model": "meta-llama/Llama-3.1-8B",
        "method": "qlora",
        "quantization": quantization,
        "double_quant": double_quant,
        "dtype": "bfloat16",
        "max_length": 2048,
    }
    model, plain = _resolved(fields, prepare_model_for_kbit_training=False)
    rest = model.num_params - 6_979_321_856
    assert held_bytes(model, plain).weights_bytes == pytest.approx(linears_bytes + 2 * rest, abs=10_000)
    # peft's preparation lifts everything that is not 4-bit to fp32: embedding and head from 2.10 to 4.20 GB
    model, prepared = _resolved(fields, prepare_model_for_kbit_training=True)
    assert held_bytes(model, prepared).weights_bytes == pytest.approx(linears_bytes + 4 * rest, abs=10_000)


@pytest.mark.parametrize(
    ("optim", "bytes_of_a_weight", "embedding_bytes_of_a_weight"),
    [
        # codes and an fp32 scale of 256, two states; only bitsandbytes' embeddings are registered for 32-bit states
        pytest.param("adamw_bnb_8bit", 2 * (1 + 4 / 256), 8.0, id="bitsandbytes"),
        pytest.param("adamw_torch_8bit", 2 * (1 + 4 / 256), 2 * (1 + 4 / 256), id="torchao"),
        pytest.param("adamw_torch_4bit", 2 * (0.5 + 4 / 256), 2 * (0.5 + 4 / 256), id="torchao-4-bit"),
    ],
)
def test_states_of_8_and_4_bit_optimizers(optim: str, bytes_of_a_weight: float, embedding_bytes_of_a_weight: float) -> None:
    fields = {"model": "Qwen/Qwen2.5-7B", "method": "full", "dtype": "bfloat16", "max_length": 256, "optim": optim}
    model, job = _resolved(fields)
    embedding = 152_064 * 3_584
    expected = bytes_of_a_weight * (model.num_params - embedding) + embedding_bytes_of_a_weight * embedding
    assert held_bytes(model, job).optimizer_bytes == pytest.approx(expected, abs=16)


@pytest.mark.parametrize("version", ["4.45", "5.24"])
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_loading_holds_no_more_than_the_weights_and_one_tensor_in_the_making(quantization: str, version: str) -> None:
    """Of every catalogued model, so the experts too are quantised one by one where training holds them quantised."""
    for name in list_models():
        fields = {"model": name, "method": "qlora", "quantization": quantization, "max_length": 64}
        model, job = _resolved(fields, framework_version=version, lora_target_modules=[_a_linear_of(name)])
        largest = max(size for _, size in model.parameters())
        weights, peak = held_bytes(model, job).weights_bytes, load_peak_bytes(model, job)
        assert peak is not None
        assert 0.99 * weights <= peak <= weights + 4 * largest, name


def test_mixtral_4_bit_weights_differ_by_generation() -> None:
    """transformers 4 quantises each expert's linears (the paper's 23.35 GiB Mixtral); stacked experts stay 16-bit."""
    fields = {
        "model": "mistralai/Mixtral-8x7B-v0.1",
        "method": "qlora",
        "quantization": "nf4",
        "double_quant": True,
        "dtype": "bfloat16",
        "max_length": 1024,
        "prepare_model_for_kbit_training": False,
    }
    model, old = _resolved(fields, framework="transformers", framework_version="4.40")
    assert held_bytes(model, old).weights_bytes / GIB == pytest.approx(22.8, abs=0.1)
    model, new = _resolved(fields, framework="transformers", framework_version="5.24")
    assert held_bytes(model, new).weights_bytes / GIB == pytest.approx(85.0, abs=0.2)


def test_loss_spike_of_a_masked_batch_is_the_heads_positions() -> None:
    # 2 x 256 positions over 151,665 words: 310,609,920 bytes of fp32 logits (trl issue 3678)
    fields = {"model": "Qwen/Qwen2.5-0.5B", "method": "full", "dtype": "bfloat16", "max_length": 256}
    model, job = _resolved(fields)
    batch = Batch.of(2, 256)
    memory = peak_memory(model, job, batch)
    assert memory.logits_bytes == 4 * 512 * model.vocab_size
    assert 4 * 512 * 151_665 == 310_609_920


jobs = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["meta-llama/Llama-3.2-1B", "Qwen/Qwen3-0.6B", "allenai/OLMoE-1B-7B-0924"]),
        "method": st.sampled_from(["full", "lora", "qlora"]),
        "gradient_checkpointing": st.booleans(),
        "bf16": st.booleans(),
        "gradient_accumulation_steps": st.sampled_from([1, 4]),
        "optim": st.sampled_from(["adamw_torch", "adamw_torch_fused", "adamw_8bit", "sgd", "adafactor"]),
        "attn_implementation": st.sampled_from(["sdpa", "eager", "flash_attention_2"]),
        "max_length": st.just(512),
    }
)


@settings(max_examples=60, deadline=None)
@given(fields=jobs, size=st.integers(1, 64), sequence=st.integers(8, 4096))
def test_more_tokens_never_need_less_and_parts_sum_to_the_peak(fields: dict, size: int, sequence: int) -> None:
    model, job = _resolved(fields)
    memory = peak_memory(model, job, Batch.of(size, sequence))
    parts = (
        memory.weights_bytes
        + memory.adapters_bytes
        + memory.gradients_bytes
        + memory.optimizer_bytes
        + memory.activations_bytes
        + memory.logits_bytes
        + memory.temporary_bytes
    )
    assert parts == pytest.approx(memory.peak_allocated_bytes, abs=8)
    assert memory.peak_allocated_bytes <= memory.peak_reserved_bytes <= memory.peak_device_bytes
    assert peak_device_bytes(model, job, Batch.of(size, sequence)) == pytest.approx(memory.peak_device_bytes, abs=2)
    assert peak_device_bytes(model, job, Batch.of(size + 1, sequence)) >= memory.peak_device_bytes
    assert peak_device_bytes(model, job, Batch.of(size, sequence + 1)) >= memory.peak_device_bytes


def test_checkpointing_never_needs_more() -> None:
    for name in ("meta-llama/Llama-3.1-8B", "allenai/OLMoE-1B-7B-0924"):
        for method in ("full", "lora", "qlora"):
            fields = {"model": name, "method": method, "dtype": "bfloat16", "max_length": 2048}
            batch = Batch.of(4, 2048)
            peaks = []
            for checkpointing in (True, False):
                model, job = _resolved(fields, gradient_checkpointing=checkpointing)
                peaks.append(peak_memory(model, job, batch).peak_allocated_bytes)
            assert peaks[0] <= peaks[1]


def test_modules_to_save_stay_in_the_bases_type() -> None:
    """peft lifts adapters to fp32, but copies modules_to_save as they are (cast_adapter_dtype)."""
    fields = {"model": "meta-llama/Llama-3.2-1B", "method": "lora", "lora_r": 8, "dtype": "bfloat16", "max_length": 512}
    model, plain = _resolved(fields)
    model, saved = _resolved(fields, lora_modules_to_save=["embed_tokens"])
    copied = held_bytes(model, saved).adapters_bytes - held_bytes(model, plain).adapters_bytes
    assert copied == 2 * model.vocab_size * model.hidden_size


@pytest.mark.parametrize(
    ("gpu", "max_length", "experts", "measured"),
    [
        # arXiv:2408.04693, figures 8, 13, 14, 15 and table IV: the largest batch of Mixtral QLoRA (2 sparse, 8 dense)
        pytest.param("A40", 512, 2, 8, id="a40-cs-sparse"),
        pytest.param("A40", 512, 8, 2, id="a40-cs-dense"),
        pytest.param("A40", 1024, 2, 4, id="a40-math-sparse"),
        pytest.param("A40", 1024, 8, 1, id="a40-math-dense"),
        pytest.param("A100-SXM4-40GB", 1024, 2, 3, id="a100-40-math-sparse"),
        pytest.param("A100-SXM4-80GB", 1024, 2, 17, id="a100-80-math-sparse"),
        pytest.param("A100-SXM4-80GB", 1024, 8, 5, id="a100-80-math-dense"),
        pytest.param("A100-SXM4-40GB", 1024, 8, 1, id="a100-40-math-dense"),
        pytest.param("A100-SXM4-40GB", 512, 2, 6, id="a100-40-cs-sparse"),
        pytest.param("A100-SXM4-80GB", 512, 2, 27, id="a100-80-cs-sparse"),
        pytest.param("H100 SXM", 1024, 2, 17, id="h100-math-sparse"),
        pytest.param("H100 SXM", 1024, 8, 5, id="h100-math-dense"),
        pytest.param("A40", 128, 2, 32, id="a40-128-tokens-sparse"),
        pytest.param("A40", 128, 8, 10, id="a40-128-tokens-dense"),
    ],
)
def test_largest_batches_of_the_paper_are_within_35_percent(gpu: str, max_length: int, experts: int, measured: int) -> None:
    """Tensors alone, no fitted factor; two settings that the paper does not print were told apart by these fourteen.

    Within one, or within 35 %; the mean of the log errors is held by ``tests/test_accuracy_memory.py``.
    """
    from costmodel import estimate

    answer = estimate(
        model="mistralai/Mixtral-8x7B-v0.1",
        model_overrides={"num_experts_per_tok": experts},
        gpu=gpu,
        method="qlora",
        quantization="nf4",
        double_quant=True,
        lora_r=16,
        lora_target_modules=["w1", "w2", "w3", "gate"],
        dtype="bfloat16",
        bf16=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        prepare_model_for_kbit_training=False,
        attn_implementation="flash_attention_2",
        max_length=max_length,
        lengths={"fixed": max_length},
        framework="transformers",
        framework_version="4.40",
    )
    assert abs(answer.max_batch_size - measured) <= max(1, 0.35 * measured)


@pytest.mark.parametrize("changes", [{}, {"use_dora": True}, {"method": "qlora", "prepare_model_for_kbit_training": False}])
@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-7B", "google/gemma-3-1b-pt", "meta-llama/Llama-2-7b-hf"])
@pytest.mark.parametrize("tokens", [512, 2048])
def test_checkpointing_leaves_the_evaluation_as_it_is_and_the_peak_no_higher(
    model: str, tokens: int, changes: dict[str, Any]
) -> None:
    job = {
        "model": model,
        "gpu": "L40S",
        "method": "lora",
        "lora_r": 16,
        "lora_target_modules": "all-linear",
        "dtype": "bfloat16",
        "bf16": True,
        "per_device_train_batch_size": 1,
        "max_length": tokens,
        "eval_strategy": "epoch",
        **changes,
    }
    plain, checkpointed = (estimate(job, gradient_checkpointing=flag) for flag in (False, True))
    by_phase, again = plain.memory.device_bytes_by_phase, checkpointed.memory.device_bytes_by_phase
    assert by_phase is not None
    assert again is not None
    assert by_phase["evaluation"] == again["evaluation"]
    assert max(again.values()) == checkpointed.memory.peak_device_bytes <= plain.memory.peak_device_bytes
    assert checkpointed.max_batch_size is not None
    assert plain.max_batch_size is not None
    assert checkpointed.max_batch_size >= plain.max_batch_size
