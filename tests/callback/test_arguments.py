"""Callback and monitor take the same arguments, each with the default of the one settings record."""

from __future__ import annotations

import dataclasses
import inspect

from ftcost_callback import FTCostCallback, FTCostMonitor
from ftcost_callback.arguments import checked_settings
from ftcost_callback.session_plan import Settings

CALLBACK = inspect.signature(FTCostCallback).parameters
MONITOR = inspect.signature(FTCostMonitor).parameters
ONLY_OF_THE_CALLBACK = {"dry_run_steps", "wandb_guard"}  # a Trainer's


def test_both_take_the_same_arguments_with_the_same_defaults() -> None:
    shared = set(CALLBACK) - ONLY_OF_THE_CALLBACK
    assert shared <= set(MONITOR)
    for name in shared - {"output_dir"}:  # the Trainer's own is the callback's default
        assert CALLBACK[name].default == MONITOR[name].default, name
        assert CALLBACK[name].annotation == MONITOR[name].annotation, name


def test_the_defaults_are_the_settings_record_s() -> None:
    fields = {each.name: each.default for each in dataclasses.fields(Settings)}
    for name, default in fields.items():
        if name != "price":  # made of usd_per_gpu_hour
            assert CALLBACK[name].default == default, name
    nothing_given = {name: parameter.default for name, parameter in CALLBACK.items()}
    assert checked_settings(nothing_given) == Settings()


def test_each_setting_that_is_given_arrives() -> None:
    given = {
        "budget_usd": 5.0, "budget_hours": 2.0, "stop_at_budget": True, "window_steps": 7, "skip_first_steps": 3,
        "predict": False, "dry_run_steps": 9, "sample_period_seconds": 0.25, "expert_load": False, "wandb_every": "step",
        "peak_flops_per_second": 1e12, "tier": "spot",
    }  # fmt: skip
    settings = FTCostCallback(3.0, profile_steps=4, gpu="H100 SXM", cloud=None, **given)._settings  # type: ignore[arg-type]
    assert {name: getattr(settings, name) for name in given} == given
    assert settings.price is not None
    assert settings.price.usd_per_gpu_hour == 3.0
    assert settings.profile_steps == (4, 7)
    assert settings.gpu == "H100 SXM"
