"""Measured over predicted, and the sentence that names the term that is off."""

from __future__ import annotations

from typing import Any

import pytest

from ftcost_callback.comparison import Comparison, Measured, compare
from ftcost_callback.host_load import ProcessorWait

ESTIMATE: dict[str, Any] = {
    "step_seconds": 1.0,
    "num_tokens_per_step": 4000.0,
    "num_non_padding_tokens_per_step": 3000.0,
    "tokens_per_second": 4000.0,
    "non_padding_tokens_per_second": None,
    "mfu": 0.4,
    "memory": {"peak_allocated_bytes": 8 * 2**30, "peak_reserved_bytes": 10 * 2**30, "peak_device_bytes": 11 * 2**30},
}


def test_ratios_by_term_and_only_where_both_sides_know() -> None:
    measured = Measured(
        num_steps=20,
        step_seconds=1.25,
        data_wait_seconds=0.25,
        num_tokens_per_step=4400.0,
        tokens_per_second=3520.0,
        non_padding_tokens_per_second=2000.0,
        mfu=0.3,
        peak_allocated_bytes=6 * 2**30,
        peak_reserved_bytes=12 * 2**30,
    )
    assert compare(ESTIMATE, measured).ratios == pytest.approx(
        {
            "step_seconds": 1.25,
            "step_seconds_without_data_wait": 1.0,
            "num_tokens_per_step": 1.1,
            "tokens_per_second": 0.88,
            "mfu": 0.75,
            "peak_allocated_bytes": 0.75,
            "peak_reserved_bytes": 1.2,
        }
    )


def test_nothing_predicted_and_nothing_measured() -> None:
    assert compare(None, Measured()) == Comparison()
    assert compare(ESTIMATE, Measured()) == Comparison()
    assert compare({"step_seconds": 0.0, "memory": None}, Measured(step_seconds=1.0)).ratios == {}


def estimate_of(groups: dict[str, float], **job: Any) -> dict[str, Any]:
    """A step of one second; ``groups``: seconds of its parts."""
    return {**ESTIMATE, "step": {"bound_by": "compute", "by_group_seconds": groups}, "job": job}


MOE = {"attention_linears": 0.2, "experts": 0.5, "elementwise": 0.2, "host": 0.1}
EVEN = {"mlp": 0.2, "attention_linears": 0.25, "elementwise": 0.25, "head_and_loss": 0.25}
CALIBRATE = "`ftcost calibrate` on this run makes the next estimate closer"
LARGER_BATCH = "a larger per_device_train_batch_size gives it more work for each launch"
FEWER_LAUNCHES = f"{LARGER_BATCH}, torch_compile=True fewer launches"
WAITED = "of the time for a processor that others used; free the machine or give the job more cores"
MEDIAN_ON_PLAN = "so it is single steps that differ and not the model of the time"


def case(name: str, step: float, why: str, *, estimate: dict[str, Any] = ESTIMATE, **measured: Any) -> Any:
    """A step of ``step`` seconds where one was predicted, and what is said of it."""
    sentence = f"step {step:.2f}x the prediction: {why}"
    return pytest.param(estimate, Measured(step_seconds=step, **measured), sentence, id=name)


@pytest.mark.parametrize(
    ("estimate", "measured", "sentence"),
    [
        case("on-plan", 1.04, "on plan"),
        case(
            "data-wait", 1.42, "30% of it is waiting for data; raise dataloader_num_workers", data_wait_seconds=0.426
        ),
        case(
            "data-wait-with-workers", 1.42,
            "30% of it is waiting for data; raise dataloader_num_workers (now 2) or prepare the data before training",
            data_wait_seconds=0.426, dataloader_num_workers=2,
        ),
        case(
            "more-tokens", 1.5,
            "steps hold 40% more tokens than expected; give the data set's real lengths, or expect this cost",
            num_tokens_per_step=5600.0,
        ),
        case("fewer-tokens", 0.7, "steps hold 30% fewer tokens than expected", num_tokens_per_step=2800.0),
        case(
            "fewer-tokens-and-faster",
            0.6,
            "steps hold 20% fewer tokens than expected; that explains 0.80x of it, "
            f"the rest (0.75x) is faster than modelled; {CALIBRATE}",
            num_tokens_per_step=3200.0,
        ),
        case(
            "heat", 1.6, "the GPU lowered its clocks for heat; check its cooling",
            throttle_reasons=0x20 | 0x04, busy_fraction=1.0,
        ),
        case(
            "host-bound-before-power-cap", 1.6, f"the GPU idles 45% of the time waiting for the host; {FEWER_LAUNCHES}",
            throttle_reasons=0x04, busy_fraction=0.55,
        ),
        case(
            "power-cap", 1.6, "the GPU ran at its power cap; raise the limit (nvidia-smi -pl) or expect this speed",
            throttle_reasons=0x04, busy_fraction=0.99,
        ),
        case("unexplained", 1.6, f"training itself is slower than modelled; {CALIBRATE}"),
        case("faster", 0.5, f"faster than modelled; {CALIBRATE}"),
        # --- it claims no more than it explains ---
        # A wait of 43 % of the time makes a step at most 1 / (1 - 0.43) = 1.75 times as long.
        case(
            "a-wait-that-explains-a-part", 15.73,
            f"the training thread waited 43% {WAITED}; that explains 1.75x of it, the rest (8.97x) "
            "is not explained by anything measured",
            processor_wait_fraction=0.43,
        ),
        # Less than half of the excess is left, and it is still named.
        case(
            "a-rest-that-is-smaller", 3.61,
            f"the training thread waited 51% {WAITED}; that explains 2.04x of it, the rest (1.77x) is not explained by "
            "anything measured",
            processor_wait_fraction=0.51,
        ),
        case(
            "a-rest-with-another-cause", 3.0,
            f"the training thread waited 40% {WAITED}; that explains 1.67x of it; of the rest (1.80x): 30% of it is waiting "
            "for data; raise dataloader_num_workers",
            processor_wait_fraction=0.4, data_wait_seconds=0.9,
        ),
        # Half of the time is waited, so every group takes twice its prediction: 1 s of 1 s is left, 0.8 s of it the MLP's.
        case(
            "a-rest-that-the-profile-shows", 3.0,
            f"the training thread waited 50% {WAITED}; that explains 2.00x of it, and most of the rest (1.50x) is the MLP "
            "products, by the profile 1.4 s of each step with 0.3 s predicted",
            estimate=estimate_of({"mlp": 0.3, "experts": 0.7}), processor_wait_fraction=0.5,
            profiled_group_seconds={"mlp": 2.8, "experts": 3.2},
        ),
        case(
            "the-profile-shows-the-group", 2.0,
            "most of the excess is the expert products, by the profile 1.5 s of each step with 0.6 s predicted; "
            f"{CALIBRATE}",
            estimate=estimate_of({"mlp": 0.4, "experts": 0.6}),
            profiled_group_seconds={"mlp": 0.5, "experts": 1.5},
        ),
        case(
            "the-profile-shows-what-was-not-predicted", 2.0,
            f"most of the excess is the router, by the profile 1 s of each step with none predicted; {CALIBRATE}",
            estimate=estimate_of({"mlp": 0.4, "experts": 0.6}),
            profiled_group_seconds={"mlp": 0.4, "experts": 0.6, "router": 1.0},
        ),
        case(
            "the-profile-shows-no-one-group", 1.6,
            f"training is slower than modelled, no one part of it alone by the profile; {CALIBRATE}",
            estimate=estimate_of(EVEN), profiled_group_seconds={name: 1.6 * each for name, each in EVEN.items()},
        ),
        case("a-small-wait-gets-no-advice", 1.15, "6% of it is waiting for data", data_wait_seconds=0.069),
        case(
            "far-off-and-unexplained", 15.73,
            "nothing measured explains it, and it is too much for one term of the estimate; look for other work on the "
            "machine before `ftcost calibrate`",
            processor_wait_fraction=0.05,
        ),
        case(
            "fast-mean-median-on-plan", 0.7, f"the median step is on plan (1.00x), {MEDIAN_ON_PLAN}", median_step_seconds=1.0
        ),
        case(
            "slow-mean-median-on-plan", 1.6,
            f"the median step is on plan (1.05x), {MEDIAN_ON_PLAN}", median_step_seconds=1.05
        ),
        case(
            "calibrate-will-say-another-number", 1.6,
            "training itself is slower than modelled; `ftcost calibrate` on this run, which leaves out steps of over twice "
            "the typical (the median is 1.30x), makes the next estimate closer",
            median_step_seconds=1.3,
        ),
        # --- the predicted parts and the settings decide what is named ---
        case(
            "uneven-experts-that-cost", 1.6,
            "the busiest expert gets 2.2x the average tokens, which adds 0.5 s to each step; a larger router_aux_loss_coef, "
            "where the model has one, evens the load out",
            estimate=estimate_of(MOE, experts_implementation="eager"), load_max_over_mean=2.25, imbalance_step_seconds=0.5,
        ),
        # The run that was blamed on its experts: a busy CPU, experts together, and a small share of the step.
        case(
            "busy-machine-not-uneven-experts", 1.6, f"the training thread waited 40% {WAITED}",
            estimate=estimate_of(MOE, experts_implementation="grouped_mm"), load_max_over_mean=2.5,
            processor_wait_fraction=0.4,
        ),
        case(
            "uneven-experts-that-cost-nothing", 1.6,
            f"most likely the expert products (50% of the predicted step); {CALIBRATE}",
            estimate=estimate_of(MOE, experts_implementation="grouped_mm"), load_max_over_mean=2.5,
            imbalance_step_seconds=0.0,
        ),
        case(
            "uneven-experts-that-cost-little", 1.6, f"most likely the MLP products (90% of the predicted step); {CALIBRATE}",
            estimate=estimate_of({"mlp": 0.9, "experts": 0.05, "host": 0.05}, experts_implementation="eager"),
            load_max_over_mean=3.0, imbalance_step_seconds=0.1,
        ),
        case(
            "host", 1.6, f"most likely Python and kernel launches (70% of the predicted step); {FEWER_LAUNCHES}",
            estimate=estimate_of({"mlp": 0.3, "host": 0.7}, torch_compile=False),
        ),
        case(
            "the-gpu-idles-no-more-than-was-predicted", 1.6,
            f"most likely the MLP products (30% of the predicted step); {CALIBRATE}",
            estimate=estimate_of({"mlp": 0.3, "host": 0.7}, torch_compile=True), busy_fraction=0.5,
        ),
        case(
            "torch-compile-is-not-advised-where-it-is-on", 1.6,
            f"the GPU idles 50% of the time waiting for the host; {LARGER_BATCH}",
            estimate=estimate_of({"mlp": 0.9, "host": 0.1}, torch_compile=True), busy_fraction=0.5,
        ),
        case(
            "eager-attention", 1.6,
            "most likely attention scores (60% of the predicted step); attn_implementation='sdpa' keeps the score matrix "
            "out of memory",
            estimate=estimate_of({"attention_scores": 0.6, "mlp": 0.4}, attn_implementation="eager"),
        ),
        case(
            "expert-loop", 1.6,
            "most likely the Python loop over experts (60% of the predicted step); experts_implementation='grouped_mm' "
            "removes it",
            estimate=estimate_of({"expert_loop": 0.6, "experts": 0.4}, experts_implementation="eager"),
        ),
        case(
            "inside-the-band", 1.6,
            "inside the estimate's own band (up to 1.70x), most likely the MLP products (90% of the predicted step); "
            f"{CALIBRATE}",
            estimate={**estimate_of({"mlp": 0.9}), "step_seconds_high": 1.7},
        ),
        case(
            "no-term-stands-out", 1.6,
            f"training is slower than modelled, which part of it was not measured (profile_steps= shows it); {CALIBRATE}",
            estimate=estimate_of(EVEN), processor_wait_fraction=0.01,
        ),
        case(
            "what-explains-little-is-not-named", 2.0, "the GPU lowered its clocks for heat; check its cooling",
            estimate=estimate_of({"mlp": 0.9}), processor_wait_fraction=0.1, throttle_reasons=0x20,
        ),
    ],
)  # fmt: skip
def test_the_sentence_names_the_largest_cause_and_a_way_out(
    estimate: dict[str, Any], measured: Measured, sentence: str
) -> None:
    assert compare(estimate, measured).verdict == sentence


def test_memory_is_named_where_speed_is_on_plan() -> None:
    assert compare(ESTIMATE, Measured(step_seconds=1.0, peak_allocated_bytes=12 * 2**30)).verdict == (
        "peak memory 1.50x the prediction, speed on plan; keep that much free before raising the batch size"
    )


def test_another_card_is_no_yardstick() -> None:
    measured = Measured(step_seconds=15.73, processor_wait_fraction=0.43, predicted_gpu="H100 SXM")
    assert compare(ESTIMATE, measured).verdict == (
        "the prediction is for H100 SXM, which is not the device that trains: time and memory are not comparable"
    )


def test_a_prediction_for_another_card_is_held_against_tokens_alone() -> None:
    measured = Measured(step_seconds=1.0, num_tokens_per_step=4400.0, mfu=0.1, predicted_gpu="H100 SXM")
    assert compare(ESTIMATE, measured).ratios == {"num_tokens_per_step": pytest.approx(1.1)}


def test_without_a_prediction_a_slow_loader_is_still_named() -> None:
    measured = Measured(step_seconds=0.11, data_wait_seconds=0.08)
    assert compare(None, measured).verdict == "73% of each step is waiting for data; raise dataloader_num_workers"
    assert compare(None, Measured(step_seconds=0.11, data_wait_seconds=0.001)).verdict is None
    assert compare(None, Measured(step_seconds=0.11, data_wait_seconds=0.0065)).verdict is None  # 6 %: not worth a change


def test_a_small_wait_is_not_blamed() -> None:
    verdict = compare(ESTIMATE, Measured(step_seconds=1.5, data_wait_seconds=0.02)).verdict
    assert verdict is not None
    assert "waiting" not in verdict


def test_time_waited_for_a_processor() -> None:
    waited, now = [3.0], [100.0]
    wait = ProcessorWait(lambda: now[0], lambda: waited[0])
    assert wait.fraction() is None  # no time has passed
    now[0], waited[0] = 110.0, 5.5
    assert wait.fraction() == 0.25
    assert ProcessorWait(lambda: now[0], lambda: None).fraction() is None
