"""The tracker keys are the contract's, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest

from costmodel.errors import CostModelError
from ftcost_callback.metrics import METRICS, window_metrics
from ftcost_callback.records import Window

# The contract's table: section -> (shown by default, only with detail="full").
CONTRACT = {
    "cost": (
        ["spent_usd", "projected_usd", "projected_usd_low", "projected_usd_high"],
        ["predicted_usd", "usd_per_million_supervised_tokens"],
    ),
    "time": (
        ["remaining_seconds"],
        ["elapsed_seconds", "projected_total_seconds", "eval_seconds", "save_seconds", "other_seconds", "rollout_seconds"],
    ),
    "speed": (
        [
            "step_seconds",
            "non_padding_tokens_per_second",
            "mfu",
            "data_wait_fraction",
            "step_seconds_measured_over_predicted",
        ],
        [
            "forward_seconds",
            "backward_seconds",
            "optimizer_seconds",
            "tokens_per_second",
            "supervised_tokens_per_second",
            "samples_per_second",
            "hfu",
        ],
    ),
    "gpu": (
        ["busy_fraction", "peak_allocated_gib"],
        ["sm_active_fraction", "memory_used_gib", "power_watts", "peak_memory_measured_over_predicted"],
    ),
    "moe": (
        ["load_max_over_mean"],
        [
            "load_cv",
            "dead_expert_fraction",
            "num_dead_experts",
            "load_entropy",
            "worst_layer_load_max_over_mean",
            "load_max_over_mean_vs_first_steps",
            "imbalance_step_seconds",
            "imbalance_usd",
        ],
    ),
}


def keys(*, default: bool) -> set[str]:
    return {f"ftcost/{section}/{name}" for section, names in CONTRACT.items() for name in names[0 if default else 1]}


def test_keys_are_those_of_the_contract() -> None:
    assert {metric.key for metric in METRICS if metric.default} == keys(default=True)
    assert {metric.key for metric in METRICS if not metric.default} == keys(default=False)


def test_each_key_and_each_field_stands_once_and_every_field_exists() -> None:
    assert len({metric.key for metric in METRICS}) == len({metric.field for metric in METRICS}) == len(METRICS)
    fields = {field.name for field in dataclasses.fields(Window)}
    assert {metric.field for metric in METRICS} <= fields
    # Everything a window holds is reported, but for what is no figure of its own.
    assert fields - {metric.field for metric in METRICS} == {"global_step", "max_steps", "num_steps", "verdict"}


def test_what_was_not_measured_is_absent() -> None:
    assert window_metrics(Window(global_step=3), "full") == {}
    assert window_metrics(Window(global_step=3, mfu=float("nan"), hfu=float("inf")), "full") == {}


def test_values_in_their_units() -> None:
    window = Window(global_step=3, spent_usd=1.5, mfu=0.41, hfu=0.5, peak_allocated_bytes=3 * 2**30, memory_used_bytes=2**29)
    assert window_metrics(window) == {
        "ftcost/cost/spent_usd": 1.5,
        "ftcost/speed/mfu": 0.41,
        "ftcost/gpu/peak_allocated_gib": 3.0,
    }
    assert window_metrics(window, "full") == {
        "ftcost/cost/spent_usd": 1.5,
        "ftcost/speed/mfu": 0.41,
        "ftcost/speed/hfu": 0.5,
        "ftcost/gpu/peak_allocated_gib": 3.0,
        "ftcost/gpu/memory_used_gib": 0.5,
    }


def test_zero_is_a_measurement() -> None:
    assert window_metrics(Window(global_step=1, data_wait_fraction=0.0)) == {"ftcost/speed/data_wait_fraction": 0.0}


def test_an_unknown_detail_is_refused() -> None:
    with pytest.raises(CostModelError, match="'default' or 'full', got 'all'"):
        window_metrics(Window(global_step=1), "all")  # type: ignore[arg-type]
