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


@pytest.mark.parametrize(
    ("measured", "sentence"),
    [
        pytest.param(Measured(step_seconds=1.04), "step 1.04x the prediction: on plan", id="on-plan"),
        pytest.param(
            Measured(step_seconds=1.42, data_wait_seconds=0.426),
            "step 1.42x the prediction: 30% of it is waiting for data; raise dataloader_num_workers",
            id="data-wait",
        ),
        pytest.param(
            Measured(step_seconds=1.42, data_wait_seconds=0.426, dataloader_num_workers=2),
            "step 1.42x the prediction: 30% of it is waiting for data; raise dataloader_num_workers (now 2) or prepare "
            "the data before training",
            id="data-wait-with-workers",
        ),
        pytest.param(
            Measured(step_seconds=1.5, num_tokens_per_step=5600.0),
            "step 1.50x the prediction: steps hold 40% more tokens than expected; give the data set's real lengths, or "
            "expect this cost",
            id="more-tokens",
        ),
        pytest.param(
            Measured(step_seconds=0.7, num_tokens_per_step=2800.0),
            "step 0.70x the prediction: steps hold 30% fewer tokens than expected",
            id="fewer-tokens",
        ),
        pytest.param(
            Measured(step_seconds=1.6, throttle_reasons=0x20 | 0x04, busy_fraction=1.0),
            "step 1.60x the prediction: the GPU lowered its clocks for heat; check its cooling",
            id="heat",
        ),
        pytest.param(
            Measured(step_seconds=1.6, throttle_reasons=0x04, busy_fraction=0.55),
            "step 1.60x the prediction: the GPU idles 45% of the time waiting for the host; a larger "
            "per_device_train_batch_size gives it more work for each launch, torch_compile=True fewer launches",
            id="host-bound-before-power-cap",
        ),
        pytest.param(
            Measured(step_seconds=1.6, throttle_reasons=0x04, busy_fraction=0.99),
            "step 1.60x the prediction: the GPU ran at its power cap; raise the limit (nvidia-smi -pl) or expect this speed",
            id="power-cap",
        ),
        pytest.param(
            Measured(step_seconds=1.6),
            "step 1.60x the prediction: training itself is slower than modelled; `ftcost calibrate` on this run makes "
            "the next estimate closer",
            id="unexplained",
        ),
        pytest.param(
            Measured(step_seconds=0.5),
            "step 0.50x the prediction: faster than modelled; `ftcost calibrate` on this run makes the next estimate closer",
            id="faster",
        ),
        pytest.param(
            Measured(step_seconds=1.0, peak_allocated_bytes=12 * 2**30),
            "peak memory 1.50x the prediction, speed on plan; keep that much free before raising the batch size",
            id="memory",
        ),
    ],
)
def test_the_sentence_names_the_largest_cause_and_a_way_out(measured: Measured, sentence: str) -> None:
    assert compare(ESTIMATE, measured).verdict == sentence


@pytest.mark.parametrize(
    ("measured", "sentence"),
    [
        pytest.param(
            # A wait of 43 % of the time makes a step at most 1 / (1 - 0.43) = 1.75 times as long.
            Measured(step_seconds=15.73, processor_wait_fraction=0.43),
            "step 15.73x the prediction: the training thread waited 43% of the time for a processor that others used; free "
            "the machine or give the job more cores; that explains 1.75x of it, the rest is not explained by anything "
            "measured",
            id="a-wait-that-explains-a-part",
        ),
        pytest.param(
            Measured(step_seconds=15.73, processor_wait_fraction=0.05),
            "step 15.73x the prediction: nothing measured explains it, and it is too much for one term of the estimate; "
            "look for other work on the machine before `ftcost calibrate`",
            id="far-off-and-unexplained",
        ),
        pytest.param(
            Measured(step_seconds=0.7, median_step_seconds=1.0),
            "step 0.70x the prediction: the median step is on plan (1.00x), so it is single steps that differ and not the "
            "model of the time",
            id="fast-mean-median-on-plan",
        ),
        pytest.param(
            Measured(step_seconds=1.6, median_step_seconds=1.05),
            "step 1.60x the prediction: the median step is on plan (1.05x), so it is single steps that differ and not the "
            "model of the time",
            id="slow-mean-median-on-plan",
        ),
        pytest.param(
            Measured(step_seconds=1.6, median_step_seconds=1.3),
            "step 1.60x the prediction: training itself is slower than modelled; `ftcost calibrate` on this run, which goes "
            "by the median step (1.30x), makes the next estimate closer",
            id="calibrate-will-say-another-number",
        ),
        pytest.param(
            Measured(step_seconds=15.73, processor_wait_fraction=0.43, predicted_gpu="H100 SXM"),
            "the prediction is for H100 SXM, which is not the device that trains: time and memory are not comparable",
            id="another-card",
        ),
    ],
)
def test_a_sentence_claims_no_more_than_it_explains(measured: Measured, sentence: str) -> None:
    assert compare(ESTIMATE, measured).verdict == sentence


def test_a_prediction_for_another_card_is_held_against_tokens_alone() -> None:
    measured = Measured(step_seconds=1.0, num_tokens_per_step=4400.0, mfu=0.1, predicted_gpu="H100 SXM")
    assert compare(ESTIMATE, measured).ratios == {"num_tokens_per_step": pytest.approx(1.1)}


def test_without_a_prediction_a_slow_loader_is_still_named() -> None:
    measured = Measured(step_seconds=0.11, data_wait_seconds=0.08)
    assert compare(None, measured).verdict == "73% of each step is waiting for data; raise dataloader_num_workers"
    assert compare(None, Measured(step_seconds=0.11, data_wait_seconds=0.001)).verdict is None


def test_a_small_wait_is_not_blamed() -> None:
    verdict = compare(ESTIMATE, Measured(step_seconds=1.5, data_wait_seconds=0.02)).verdict
    assert verdict is not None
    assert "waiting" not in verdict


def estimate_of(groups: dict[str, float], **job: Any) -> dict[str, Any]:
    """A step of one second; ``groups``: seconds of its parts."""
    return {**ESTIMATE, "step": {"bound_by": "compute", "by_group_seconds": groups}, "job": job}


MOE = {"attention_linears": 0.2, "experts": 0.5, "elementwise": 0.2, "host": 0.1}


@pytest.mark.parametrize(
    ("estimate", "measured", "sentence"),
    [
        pytest.param(
            estimate_of(MOE, experts_implementation="eager"),
            Measured(step_seconds=1.6, load_max_over_mean=2.25, imbalance_step_seconds=0.5),
            "step 1.60x the prediction: the busiest expert gets 2.2x the average tokens, which adds 0.5 s to each step; a "
            "larger router_aux_loss_coef, where the model has one, evens the load out",
            id="uneven-experts-that-cost",
        ),
        pytest.param(
            # The run that was blamed on its experts: a busy CPU, experts together, and a small share of the step.
            estimate_of(MOE, experts_implementation="grouped_mm"),
            Measured(step_seconds=1.6, load_max_over_mean=2.5, processor_wait_fraction=0.4),
            "step 1.60x the prediction: the training thread waited 40% of the time for a processor that others used; free "
            "the machine or give the job more cores",
            id="busy-machine-not-uneven-experts",
        ),
        pytest.param(
            estimate_of(MOE, experts_implementation="grouped_mm"),
            Measured(step_seconds=1.6, load_max_over_mean=2.5, imbalance_step_seconds=0.0),
            "step 1.60x the prediction: most likely the expert products (50% of the predicted step); `ftcost calibrate` on "
            "this run makes the next estimate closer",
            id="uneven-experts-that-cost-nothing",
        ),
        pytest.param(
            estimate_of({"mlp": 0.9, "experts": 0.05, "host": 0.05}, experts_implementation="eager"),
            Measured(step_seconds=1.6, load_max_over_mean=3.0, imbalance_step_seconds=0.1),
            "step 1.60x the prediction: most likely the MLP products (90% of the predicted step); `ftcost calibrate` on "
            "this run makes the next estimate closer",
            id="uneven-experts-that-cost-little",
        ),
        pytest.param(
            estimate_of({"mlp": 0.3, "host": 0.7}, torch_compile=False),
            Measured(step_seconds=1.6),
            "step 1.60x the prediction: most likely Python and kernel launches (70% of the predicted step); a larger "
            "per_device_train_batch_size gives it more work for each launch, torch_compile=True fewer launches",
            id="host",
        ),
        pytest.param(
            estimate_of({"mlp": 0.3, "host": 0.7}, torch_compile=True),
            Measured(step_seconds=1.6, busy_fraction=0.5),
            "step 1.60x the prediction: most likely the MLP products (30% of the predicted step); `ftcost calibrate` on "
            "this run makes the next estimate closer",
            id="the-gpu-idles-no-more-than-was-predicted",
        ),
        pytest.param(
            estimate_of({"mlp": 0.9, "host": 0.1}, torch_compile=True),
            Measured(step_seconds=1.6, busy_fraction=0.5),
            "step 1.60x the prediction: the GPU idles 50% of the time waiting for the host; a larger "
            "per_device_train_batch_size gives it more work for each launch",
            id="torch-compile-is-not-advised-where-it-is-on",
        ),
        pytest.param(
            estimate_of({"attention_scores": 0.6, "mlp": 0.4}, attn_implementation="eager"),
            Measured(step_seconds=1.6),
            "step 1.60x the prediction: most likely attention scores (60% of the predicted step); "
            "attn_implementation='sdpa' keeps the score matrix out of memory",
            id="eager-attention",
        ),
        pytest.param(
            estimate_of({"expert_loop": 0.6, "experts": 0.4}, experts_implementation="eager"),
            Measured(step_seconds=1.6),
            "step 1.60x the prediction: most likely the Python loop over experts (60% of the predicted step); "
            "experts_implementation='grouped_mm' removes it",
            id="expert-loop",
        ),
        pytest.param(
            {**estimate_of({"mlp": 0.9}), "step_seconds_high": 1.7},
            Measured(step_seconds=1.6),
            "step 1.60x the prediction: inside the estimate's own band (up to 1.70x), most likely the MLP products (90% of "
            "the predicted step); `ftcost calibrate` on this run makes the next estimate closer",
            id="inside-the-band",
        ),
        pytest.param(
            estimate_of({"mlp": 0.2, "attention_linears": 0.25, "elementwise": 0.25, "head_and_loss": 0.25}),
            Measured(step_seconds=1.6, processor_wait_fraction=0.01),
            "step 1.60x the prediction: kernels are slower than modelled, none of them more than another; `ftcost "
            "calibrate` on this run makes the next estimate closer",
            id="no-term-stands-out",
        ),
        pytest.param(
            estimate_of({"mlp": 0.9}),
            Measured(step_seconds=2.0, processor_wait_fraction=0.1, throttle_reasons=0x20),
            "step 2.00x the prediction: the GPU lowered its clocks for heat; check its cooling",
            id="what-explains-little-is-not-named",
        ),
    ],
)
def test_the_predicted_parts_and_settings_decide_what_is_named(
    estimate: dict[str, Any], measured: Measured, sentence: str
) -> None:
    assert compare(estimate, measured).verdict == sentence


def test_time_waited_for_a_processor() -> None:
    waited, now = [3.0], [100.0]
    wait = ProcessorWait(lambda: now[0], lambda: waited[0])
    assert wait.fraction() is None  # no time has passed
    now[0], waited[0] = 110.0, 5.5
    assert wait.fraction() == 0.25
    assert ProcessorWait(lambda: now[0], lambda: None).fraction() is None
