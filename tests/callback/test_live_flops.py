"""MFU and HFU of real runs: the FLOPs of the tokens really seen, over the peak of the device.

The expected FLOPs are counted by hand on the shapes of the tiny models: 2 a weight and token forward, as much again for
the gradient of the input, and as much again for that of a weight that is trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import LENGTHS, VOCABULARY, TickingClock, tiny_llama, tiny_mixtral, tiny_trainer

from costmodel.gpu_catalog import find_gpu
from ftcost_callback import FTCostCallback
from ftcost_callback.live_flops import FlopsCounter
from ftcost_callback.recorder import StepAggregate
from ftcost_callback.run_file import RunRecord, read_run
from ftcost_callback.sinks import InMemorySink

PEAK = 1e9
HIDDEN, MLP, LAYERS, KEY_VALUE = 32, 48, 2, 16
ATTENTION_WEIGHTS = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEY_VALUE
MLP_WEIGHTS = 3 * HIDDEN * MLP
HEAD_WEIGHTS = HIDDEN * VOCABULARY
# Forward 4 a pair of tokens and channel (scores and values); the fused kernel's backward, without its second look at the
# scores, twice that.
PAIR_FLOPS = 12 * HIDDEN * LAYERS


def trained(output_dir: Path, model: Any, **arguments: Any) -> tuple[RunRecord, InMemorySink]:
    sink = InMemorySink()
    measuring = FTCostCallback(sinks=[sink], peak_flops_per_second=PEAK, skip_first_steps=0)
    measuring._clock = TickingClock()
    tiny_trainer(output_dir, [measuring], model=model, **({"max_steps": 6, "logging_steps": 6} | arguments)).train()
    return read_run(output_dir), sink


def squares(lengths: tuple[int, ...] = LENGTHS) -> int:
    """Pairs in an epoch of padded batches of two."""
    return sum(2 * max(pair) ** 2 for pair in zip(lengths[::2], lengths[1::2], strict=True))


def padded(lengths: tuple[int, ...] = LENGTHS) -> int:
    return sum(2 * max(pair) for pair in zip(lengths[::2], lengths[1::2], strict=True))


DENSE_FLOPS = 6 * (LAYERS * (ATTENTION_WEIGHTS + MLP_WEIGHTS) + HEAD_WEIGHTS) * padded() + PAIR_FLOPS * squares()  # an epoch


def mfu_of(record: RunRecord, flops: float) -> float:
    return flops / sum(step.step_seconds for step in record.steps) / PEAK


def test_full_fine_tuning(tmp_path: Path) -> None:
    record, sink = trained(tmp_path, tiny_llama())
    (window,) = sink.windows
    assert window.mfu == pytest.approx(mfu_of(record, DENSE_FLOPS))
    assert window.hfu == pytest.approx(window.mfu, rel=0.05)  # the fused kernel looks at the scores a second time
    device = record.sessions[0].device
    assert device is not None
    assert (device["peak_source"], device["attention_convention"]) == ("given", "full")


def test_accumulation_counts_all_micro_batches_over_all_their_time(tmp_path: Path) -> None:
    record, sink = trained(tmp_path, tiny_llama(), gradient_accumulation_steps=3, max_steps=2, logging_steps=2)
    assert sum(step.num_micro_batches or 0 for step in record.steps) == 6
    assert sink.windows[0].mfu == pytest.approx(mfu_of(record, DENSE_FLOPS))


def test_checkpointing_raises_hfu_by_a_third_and_leaves_the_flops_of_mfu(tmp_path: Path) -> None:
    record, sink = trained(tmp_path, tiny_llama(), gradient_checkpointing=True)
    (window,) = sink.windows
    assert window.mfu == pytest.approx(mfu_of(record, DENSE_FLOPS))
    assert window.hfu is not None
    assert window.mfu is not None
    # The head is not computed again, which is 8 % of this tiny model's forward.
    assert 1.2 < window.hfu / window.mfu < 1.4


def lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def test_lora_leaves_out_the_gradients_of_frozen_weights(tmp_path: Path) -> None:
    record, sink = trained(tmp_path, lora(tiny_llama()))
    frozen = LAYERS * (ATTENTION_WEIGHTS + MLP_WEIGHTS) + HEAD_WEIGHTS
    adapters = LAYERS * 4 * (HIDDEN + HIDDEN + HIDDEN + KEY_VALUE)
    # Nobody needs the gradient of the first layer's input: neither through q, k and v nor through the adapters' A.
    first_input = 2 * (HIDDEN * HIDDEN + 2 * HIDDEN * KEY_VALUE) + 2 * 4 * (HIDDEN + HIDDEN)
    flops = (4 * frozen + 6 * adapters - first_input) * padded() + PAIR_FLOPS * squares()
    assert sink.windows[0].mfu == pytest.approx(mfu_of(record, flops))
    assert record.sessions[0].job is not None
    assert record.sessions[0].job["method"] == "lora"


def test_weights_in_four_bits_need_the_flops_of_their_true_shape() -> None:
    """QLoRA multiplies in 16 bits after taking the weights apart, which is no FLOP of the model."""
    job = {
        "model": "meta-llama/Llama-2-7b-hf", "method": "lora", "dtype": "bfloat16", "max_length": 512,
        "lora_target_modules": "all-linear", "gradient_checkpointing": True,
    }  # fmt: skip
    quantised = job | {"method": "qlora"}
    steps = StepAggregate(
        num_steps=2, step_seconds_sum=4.0, num_micro_batches=2, num_tokens=2048, num_samples=4,
        num_supervised_tokens=2044, sum_squared_sequence_tokens=4 * 512.0**2,
    )  # fmt: skip
    plain, in_four_bits = FlopsCounter(job).per_second(steps), FlopsCounter(quantised).per_second(steps)
    assert plain is not None
    assert in_four_bits is not None
    assert in_four_bits[0] == plain[0] > 0


def test_a_mixture_counts_the_experts_that_are_chosen(tmp_path: Path) -> None:
    record, sink = trained(tmp_path, tiny_mixtral())
    router, chosen = HIDDEN * 4, 2 * 3 * HIDDEN * MLP
    flops = 6 * (LAYERS * (ATTENTION_WEIGHTS + router + chosen) + HEAD_WEIGHTS) * padded() + PAIR_FLOPS * squares()
    assert sink.windows[0].mfu == pytest.approx(mfu_of(record, flops))


@pytest.mark.slow
def test_packed_sequences_attend_within_themselves(tmp_path: Path) -> None:
    from test_callback_tokens import SFT_LENGTHS, SFT_SUPERVISED, SFT_TOKENS, sft_trainer

    sink = InMemorySink()
    measuring = FTCostCallback(sinks=[sink], peak_flops_per_second=PEAK, skip_first_steps=0)
    measuring._clock = TickingClock()
    sft_trainer(tmp_path, measuring, tiny_llama(), packing=True, max_length=24, logging_steps=100).train()
    record = read_run(tmp_path)
    weights = LAYERS * (ATTENTION_WEIGHTS + MLP_WEIGHTS)
    assert record.predictions
    for head_tokens in (SFT_TOKENS, SFT_SUPERVISED):  # TRL's loss may skip the positions without a label
        flops = (
            6 * weights * SFT_TOKENS + 6 * HEAD_WEIGHTS * head_tokens + PAIR_FLOPS * sum(length**2 for length in SFT_LENGTHS)
        )
        if sink.windows[-1].mfu == pytest.approx(mfu_of(record, flops)):
            return
    pytest.fail(f"MFU {sink.windows[-1].mfu} fits neither count of head positions")


def test_lengths_that_no_one_knows_beforehand_are_no_hindrance(tmp_path: Path) -> None:
    record, _ = trained(tmp_path, tiny_llama())
    assert record.sessions[0].job is not None
    assert "lengths" not in record.sessions[0].job  # a data set of the user's own class
    assert record.summary is not None
    assert record.summary.mfu == pytest.approx(mfu_of(record, DENSE_FLOPS))


def test_an_unknown_device_has_no_mfu(tmp_path: Path) -> None:
    sink = InMemorySink()
    measuring = FTCostCallback(sinks=[sink])
    measuring._clock = TickingClock()
    tiny_trainer(tmp_path, [measuring]).train()
    assert [(window.mfu, window.hfu) for window in sink.windows] == [(None, None)] * 3
    device = read_run(tmp_path).sessions[0].device
    assert device is not None
    assert "peak_flops_per_second" not in device


def test_above_one_is_shown_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = InMemorySink()
    measuring = FTCostCallback(sinks=[sink], peak_flops_per_second=1.0)
    measuring._clock = TickingClock()
    tiny_trainer(tmp_path, [measuring]).train()
    assert all(window.mfu is not None and window.mfu > 1 for window in sink.windows)
    assert sum("which cannot be" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    ("arguments", "peak"),
    [
        # NVIDIA's data sheet of the A100: 312 TFLOP/s dense bf16, 19.5 in fp32.
        ({"bf16": True}, 312e12),
        ({}, 19.5e12),
    ],
    ids=["bf16", "fp32"],
)
def test_the_peak_is_that_of_the_type_the_products_run_in(tmp_path: Path, arguments: dict[str, Any], peak: float) -> None:
    # Described, as a card that trains would be; one that is only named is not what trains here.
    described = find_gpu("NVIDIA A100 80GB PCIe").model_dump(exclude_none=True)
    measuring = FTCostCallback(sinks=[], gpu=described)
    measuring._clock = TickingClock()
    tiny_trainer(tmp_path, [measuring], max_steps=2, **arguments).train()
    device = read_run(tmp_path).sessions[0].device
    assert device is not None
    assert device["peak_flops_per_second"] == peak
