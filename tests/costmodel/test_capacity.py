"""The largest batch and length are exact: equal to a scan."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from costmodel.answer import Estimate
from costmodel.capacity import expected_step_that_does_not_fit, largest_that_fits, share_of_batches_that_fit
from costmodel.estimation import estimate
from costmodel.hf_config import model_spec_from_config
from costmodel.length_distribution import LengthDistribution
from costmodel.model_catalog import find_model_config


@pytest.mark.parametrize("capacity", [0, 9, 10, 11, 57, 999, 1000, 5_000])
def test_search_equals_a_scan_on_a_line_with_a_kink(capacity: int) -> None:
    def peak(n: int) -> int:
        return 10 * n if n < 50 else 10 * 50 + 3 * (n - 50) + (n // 7)

    scanned = max((n for n in range(1, 1000) if peak(n) <= capacity), default=0)
    assert largest_that_fits(peak, capacity, 999) == scanned


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "lora", "lora_r": 16, "gradient_checkpointing": True},
        {"method": "full", "gradient_checkpointing": False, "gpu": "H100 SXM"},
        {"method": "qlora", "bf16": True, "framework": "trl", "supervised_fraction": 0.5},
    ],
    ids=["lora", "full", "qlora-trl"],
)
def test_largest_batch_and_length_equal_a_scan(changes: dict) -> None:
    job = {
        "model": "meta-llama/Llama-3.2-3B",
        "gpu": "RTX 4090",
        "dtype": "bfloat16",
        "max_length": 1024,
        "lengths": {"histogram": {"100": 5, "1024": 1}},
        **changes,
    }
    answer = estimate(job, per_device_train_batch_size=4)
    fits = [size for size in range(1, 120) if estimate(job, per_device_train_batch_size=size).headroom_bytes >= 0]
    # a scan that stops at its own end proves nothing
    assert 0 < len(fits) < 119
    assert answer.max_batch_size == max(fits)
    at_limit = {"histogram": {"100": 5, str(answer.max_length_that_fits): 1}}
    above = {"histogram": {"100": 5, str(answer.max_length_that_fits + 1): 1}}
    longest = {"per_device_train_batch_size": 4, "max_length": 10**6}
    assert estimate(job, **longest | {"lengths": at_limit}).headroom_bytes >= 0
    assert estimate(job, **longest | {"lengths": above}).headroom_bytes < 0


def test_share_of_batches_that_fit_is_the_cumulative_share_to_the_power_of_the_batch() -> None:
    dist = LengthDistribution((10, 20, 30), (0.5, 0.4, 0.1), 0.0)
    assert share_of_batches_that_fit(dist, 4, 29) == pytest.approx(0.9**4)
    assert share_of_batches_that_fit(dist, 4, 30) == 1.0
    assert share_of_batches_that_fit(dist, 4, 5) == 0.0


def test_one_long_sample_decides_and_the_warning_says_when_it_comes() -> None:
    """LoRA with a single very long sample ran until step 128 and died there (LlamaFactory issue 10367)."""
    answer = estimate(
        model="meta-llama/Llama-3.1-8B",
        gpu="RTX 4090",
        method="lora",
        dtype="bfloat16",
        bf16=True,
        gradient_checkpointing=True,
        per_device_train_batch_size=1,
        max_length=32768,
        lengths={"histogram": {"512": 127, "32768": 1}},
        num_samples=1000,
    )
    assert answer.verdict == "does_not_fit"
    assert answer.share_of_batches_that_fit == pytest.approx(127 / 128)
    assert any("one in 128" in warning and "about step 128;" in warning for warning in answer.warnings)


@pytest.mark.parametrize(("share", "micro_batches"), [(0.9, 1), (0.98, 8), (127 / 128, 16)])
def test_the_step_at_which_an_oom_is_expected_is_that_of_a_simulation(share: float, micro_batches: int) -> None:
    random = Random(7)
    first = []
    for _ in range(4000):
        step = 1
        while all(random.random() < share for _ in range(micro_batches)):
            step += 1
        first.append(step)
    assert sum(first) / len(first) == pytest.approx(expected_step_that_does_not_fit(share, micro_batches), rel=0.06)


@pytest.mark.parametrize("multiple", [1, 64, 100])
@pytest.mark.parametrize(
    "lengths_up_to",
    [lambda longest: None, lambda longest: {"fixed": longest}, lambda longest: {"histogram": {"100": 5, str(longest): 1}}],
    ids=["unknown", "fixed", "histogram"],
)
def test_the_longest_sequence_is_a_multiple_that_fits(lengths_up_to: Callable[[int], dict | None], multiple: int) -> None:
    job = {
        "model": "Qwen/Qwen2.5-0.5B",
        "gpu": "L4",
        "dtype": "bfloat16",
        "eval_strategy": "epoch",
        "pad_to_multiple_of": multiple,
    }

    def at(tokens: int) -> Estimate:
        return estimate(job, max_length=tokens, lengths=lengths_up_to(tokens))

    longest = at(1024).max_length_that_fits
    assert longest
    assert longest % multiple == 0
    assert at(longest).headroom_bytes >= 0
    assert at(longest + 1).headroom_bytes < 0  # is padded to the next multiple


def test_where_not_even_one_multiple_fits_no_length_does() -> None:
    job = {"model": "Qwen/Qwen2.5-0.5B", "gpu": "L4", "dtype": "bfloat16", "max_length": 512}
    assert estimate(job).max_length_that_fits
    assert estimate(job, pad_to_multiple_of=50_000).max_length_that_fits == 0


@pytest.mark.parametrize("model", ["mistralai/Mistral-7B-v0.1", "google/gemma-3-1b-pt", "microsoft/Phi-3-mini-4k-instruct"])
def test_a_sliding_window_is_a_mask_from_the_row_that_reaches_it_on(model: str) -> None:
    """``max_length`` decides nothing: the rows that come do. transformers 5.24 masks a row as long as the window."""
    fields = {"model": model, "gpu": "A100-SXM4-80GB", "method": "lora", "lora_target_modules": "all-linear", "bf16": True}
    fields |= {"dtype": "bfloat16", "attn_implementation": "sdpa", "per_device_train_batch_size": 2}

    def needs(tokens: int, max_length: int | None = None) -> Estimate:
        return estimate({**fields, "max_length": max_length or tokens, "lengths": {"fixed": tokens}})

    window = max(layer.attention.sliding_window or 0 for layer, _ in model_spec_from_config(find_model_config(model)).layers)
    assert needs(256).memory == needs(256, 8192).memory
    before, at, after = (needs(window + more).memory.peak_device_bytes for more in (-1, 0, 1))
    assert after - at < 0.01 * at
    assert at - before > 3 * (after - at)  # keys and values repeated, and the mask
    # the longest that fits is found across that step, from either side of it
    found = {needs(tokens).max_length_that_fits for tokens in (256, window - 1, window, 2 * window)}
    assert len(found) == 1
    longest = found.pop()
    assert longest is not None
    capacity = needs(256).memory.capacity_bytes
    assert capacity is not None
    assert needs(longest).memory.peak_device_bytes <= capacity < needs(longest + 1).memory.peak_device_bytes


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize("longest_document", [300, 1024])
def test_the_mask_of_a_packed_row_is_counted_whatever_its_longest_document(attention: str, longest_document: int) -> None:
    """One document may fill a row and needs no mask; others do, at the longest row that fits as well."""
    job = {"model": "Qwen/Qwen2.5-0.5B", "gpu": "A100-SXM4-80GB", "method": "lora", "dtype": "bfloat16", "bf16": True}
    job |= {"packing": True, "per_device_train_batch_size": 1, "attn_implementation": attention}
    job |= {"lengths": {"histogram": {"100": 9, str(longest_document): 1}}, "gradient_checkpointing": True}

    def at(row: int, **changed: Any) -> Estimate:
        return estimate({**job, "max_length": row, **changed})

    masked, shorter = at(1024), at(1024, lengths={"histogram": {"100": 9, "300": 1}})
    assert masked.memory.peak_allocated_bytes == shorter.memory.peak_allocated_bytes
    assert masked.memory.peak_allocated_bytes == at(1024, lengths=None).memory.peak_allocated_bytes
    longest = masked.max_length_that_fits
    assert longest
    assert at(longest).verdict != "does_not_fit"
    assert at(longest + 1).verdict == "does_not_fit"
    alone = at(1024, lengths={"fixed": 1024})
    bytes_a_pair = {"sdpa": 1, "eager": 2, "flash_attention_2": 0}[attention]
    mask = masked.memory.peak_allocated_bytes - alone.memory.peak_allocated_bytes
    assert mask == pytest.approx(bytes_a_pair * 1024**2, abs=64)


def test_documents_that_nothing_cuts_stay_as_long_in_longer_rows() -> None:
    """Unsloth keeps the documents of a row apart: a longer row holds more of them, and none attends further."""
    job = {"model": "mistralai/Mistral-7B-v0.1", "gpu": "H100 NVL", "method": "lora", "framework": "unsloth"}
    job |= {"packing": True, "per_device_train_batch_size": 1, "lengths": {"values": [100, 400, 1024]}}
    longest = estimate(job, max_length=1024).max_length_that_fits
    assert longest
    assert estimate(job, max_length=longest).verdict != "does_not_fit"
    assert estimate(job, max_length=longest + 1).verdict == "does_not_fit"


@pytest.mark.parametrize("max_length", [256, 2048])
def test_unsloths_longest_row_fits_with_the_offloading_that_comes_with_it(max_length: int) -> None:
    """It keeps the inputs of the layers on the host from 512 tokens on, and on the card below."""
    job = {"model": "EleutherAI/gpt-neox-20b", "gpu": "P100-PCIE-16GB", "method": "qlora", "framework": "unsloth"}
    job |= {"per_device_train_batch_size": 16, "lora_target_modules": "all-linear"}
    longest = estimate(job, max_length=max_length).max_length_that_fits
    assert longest
    assert longest < 512
    assert estimate(job, max_length=longest).verdict != "does_not_fit"
    assert estimate(job, max_length=longest + 1).verdict == "does_not_fit"


def test_litgpts_largest_batch_fits_with_the_accumulation_that_comes_with_it() -> None:
    """A batch of 16 takes one to a step, a smaller one several, whose gradients are held meanwhile."""
    job = {"model": "google/gemma-4-E4B-it", "gpu": "MI300X", "method": "full", "framework": "litgpt", "max_length": 1024}
    asked = estimate(job, per_device_train_batch_size=16)
    assert asked.job["gradient_accumulation_steps"] == 1
    assert asked.max_batch_size
    assert estimate(job, per_device_train_batch_size=asked.max_batch_size).verdict != "does_not_fit"
    assert estimate(job, per_device_train_batch_size=asked.max_batch_size + 1).verdict == "does_not_fit"


def test_an_evaluation_of_several_rows_is_padded_whatever_the_training_batch() -> None:
    """The memory of a job does not fall as its batch grows from one."""
    job = {"model": "EleutherAI/gpt-neox-20b", "method": "qlora", "quantization": "nf4", "max_length": 2048, "gpu": "A40"}
    job |= {"lengths": {"values": [100, 900, 2048]}, "eval_strategy": "steps", "per_device_eval_batch_size": 8}
    one, two = (estimate({**job, "per_device_train_batch_size": size}) for size in (1, 2))
    assert one.memory.device_bytes_by_phase is not None
    assert two.memory.device_bytes_by_phase is not None
    assert one.memory.device_bytes_by_phase["evaluation"] == two.memory.device_bytes_by_phase["evaluation"]
    assert one.memory.peak_device_bytes <= two.memory.peak_device_bytes
    assert one.max_batch_size == two.max_batch_size
