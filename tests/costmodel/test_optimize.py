"""Which settings make a job cheaper: what is searched, what stays, what is suggested."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_answer import LLAMA as LLAMA_JOB

from costmodel import cli, comparison_tables, formats
from costmodel.candidates import Candidate
from costmodel.errors import CostModelError, UnknownNameError
from costmodel.estimation import estimate
from costmodel.optimization import Change, OptimizeResult, optimize, samples_per_step
from costmodel.specs import Lengths, parse_job
from costmodel.spot import SpotTerms
from costmodel.trials import BATCH_FIELDS, with_counted_lengths

LLAMA: dict[str, Any] = {**LLAMA_JOB, "gpu": "A40"}
FULL = {**LLAMA, "gpu": "H100 SXM", "method": "full", "dtype": "bfloat16", "optim": "adamw_torch"}


def change(result: OptimizeResult, **settings: Any) -> Change:
    (found,) = [each for each in result.changes if settings.items() <= each.settings.items()]
    return found


def test_the_best_is_cheaper_fits_and_keeps_the_batch() -> None:
    result = optimize(LLAMA)
    assert result.start.settings == {}
    assert result.start.fits
    assert result.best.estimate is not None
    assert result.best.estimate.verdict == "fits"
    assert result.saves_usd is not None
    assert result.saves_usd > 0.2 * (result.start.total_usd or 0)
    before, after = result.effective_batch_size
    assert before == pytest.approx(16)
    assert after == pytest.approx(16, rel=0.25)
    assert result.unmet == ()


def test_savings_are_the_differences_of_estimates() -> None:
    result = optimize(LLAMA)
    given, best = estimate(LLAMA), estimate({**LLAMA, **result.best.settings})
    assert given.total_seconds is not None
    assert best.total_seconds is not None
    assert result.saves_seconds == pytest.approx(given.total_seconds - best.total_seconds)
    # the A40's cheapest dated price
    assert result.saves_usd == pytest.approx((given.total_seconds - best.total_seconds) / 3600 * 0.44)
    assert result.saves_bytes == given.memory.peak_device_bytes - best.memory.peak_device_bytes
    for each in result.changes:
        alone = estimate({**LLAMA, **each.settings})
        assert alone.total_seconds is not None
        assert each.saves_seconds == pytest.approx(given.total_seconds - alone.total_seconds)
        assert each.saves_bytes == given.memory.peak_device_bytes - alone.memory.peak_device_bytes
        assert alone.verdict in ("fits", "tight")


@pytest.mark.parametrize("framework", ["trl", "transformers"])
def test_no_combination_of_the_changes_beats_the_best(framework: str) -> None:
    """By brute force over what the job leaves open."""
    job = {**LLAMA, "framework": framework}
    result = optimize(job)
    assert result.best.total_seconds is not None
    flash = {"attn_implementation": "flash_attention_2"}
    data: list[dict[str, Any]] = [
        {},
        flash,
        {"train_sampling_strategy": "group_by_length"},
        {"padding_free": True, **flash},
    ]
    for rows, checkpointing, batch, dtype, liger, optim in itertools.product(
        data,
        (True, False),
        (1, 2, 4, 8, 16),
        ("float32", "bfloat16"),
        (True, False),
        ("adamw_torch_fused", "adamw_bnb_8bit"),
    ):
        tried = estimate(
            {
                **job,
                **rows,
                "gradient_checkpointing": checkpointing,
                "per_device_train_batch_size": batch,
                "gradient_accumulation_steps": 16 // batch,
                "dtype": dtype,
                "use_liger_kernel": liger,
                "optim": optim,
            }
        )
        if tried.verdict == "fits":
            assert tried.total_seconds is not None
            assert result.best.total_seconds <= tried.total_seconds * 1.005


def test_the_float32_weights_of_trl_are_the_largest_saving_of_memory() -> None:
    """TRL loads weights in float32 unless told otherwise: 7 B parameters at 2 bytes less."""
    result = optimize(LLAMA)
    assert estimate(LLAMA).job["dtype"] == "float32"
    loaded = change(result, dtype="bfloat16")
    assert loaded.saves_bytes == max(each.saves_bytes for each in result.changes)
    assert loaded.saves_bytes > 0.9 * 2 * 6.74e9
    assert loaded.saves_usd is not None
    assert loaded.saves_usd > 0
    assert result.best.settings["dtype"] == "bfloat16"
    kept = optimize({**LLAMA, "dtype": "float32"})
    assert "dtype" not in kept.best.settings
    assert change(kept, dtype="bfloat16").held == ("dtype",)


def test_a_job_in_float32_alone_is_offered_autocast() -> None:
    job = {name: value for name, value in LLAMA.items() if name != "bf16"} | {
        "framework": "transformers",
        "dtype": "float32",
    }
    result = optimize(job)
    assert not result.start.estimate or not result.start.estimate.job["bf16"]
    assert result.best.settings["bf16"] is True
    # A V100 has no bf16; what it has is float16.
    volta = optimize({**job, "gpu": "V100-SXM2-32GB"}, free=["all"])
    assert not [each for each in volta.changes if each.settings.get("bf16") or each.settings.get("dtype") == "bfloat16"]
    assert [each for each in volta.changes if each.settings.get("fp16")]


def test_float16_in_place_of_bfloat16_says_both_and_keeps_what_is_given() -> None:
    """A P100 has no bf16: fp16 alone, put onto a job with bf16, would be refused."""
    job = {**LLAMA, "model": "Qwen/Qwen3-0.6B", "gpu": "P100-PCIE-16GB", "bf16": True}
    half = {"dtype": "float16", "bf16": False, "fp16": True}
    held = optimize(job)
    assert held.best.settings.keys().isdisjoint(half)
    assert change(held, **half).held == ("bf16",)
    freed = optimize(job, free=["bf16"])
    assert half.items() <= freed.best.settings.items()
    assert estimate({**job, **freed.best.settings}).total_seconds == freed.best.total_seconds
    tables = "\n".join(str(table) for table in comparison_tables.optimization_tables(freed))
    assert "bf16: false" in tables
    assert "fp16: true" in tables


@st.composite
def _jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Jobs of small models whose fields are given, left out or at odds with the card."""
    method = draw(st.sampled_from(["full", "lora", "qlora"]))
    job = {
        "model": draw(st.sampled_from(["Qwen/Qwen3-0.6B", "allenai/OLMoE-1B-7B-0924"])),
        "gpu": draw(st.sampled_from(["P100-PCIE-16GB", "V100-SXM2-32GB", "T4", "L40S", "H100 SXM", "MI300X"])),
        "method": method,
        "max_length": 1024,
        "lengths": draw(st.sampled_from([{"fixed": 1024}, {"mean": 300, "max": 1024}])),
        "num_samples": 1000,
        "usd_per_gpu_hour": 2.0,
    }
    choices: dict[str, list[Any]] = {
        "framework": ["transformers", "trl", "axolotl", "unsloth"],
        "dtype": ["float32", "bfloat16", "float16"],
        "bf16": [True, False],
        "fp16": [True, False],
        "gradient_checkpointing": [True, False],
        "attn_implementation": ["eager", "sdpa", "flash_attention_2"],
        "packing": [True, False],
        "padding_free": [True, False],
        "padding": ["longest", "max_length"],
        "optim": ["adamw_torch", "paged_adamw_8bit", "sgd"],
        "quantization": ["nf4", "int8"] if method == "qlora" else [None],
        "per_device_train_batch_size": [1, 3, 8],
        "gradient_accumulation_steps": [1, 4],
        "num_gpus": [1, 2],
        "fsdp": ["full_shard"],
    }
    return job | {name: draw(st.sampled_from(values)) for name, values in choices.items() if draw(st.booleans())}


@given(
    job=_jobs(),
    free=st.sampled_from([[], ["all"], ["bf16", "dtype"], ["fp16"]]),
    quantises=st.booleans(),
    grows=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_what_is_advised_is_accepted(job: dict[str, Any], free: list[str], quantises: bool, grows: bool) -> None:
    """Every change and the best combination, put onto the job as it was given, make the job that was estimated."""
    try:
        estimate(job)
    except CostModelError:
        return
    result = optimize(job, free=free, allow_quantization=quantises, free_batch=grows)
    for each in result.changes:
        assert estimate({**job, **each.settings}).memory == each.estimate.memory
    advised = estimate({**job, **result.best.settings})
    assert result.best.estimate is not None
    assert advised.step_seconds == result.best.estimate.step_seconds
    given_fields = {name for name, value in job.items() if value is not None} - set(free) - set(BATCH_FIELDS)
    if quantises:
        given_fields -= {"method", "quantization", "double_quant", "dtype"}
    if free != ["all"]:
        assert not given_fields & set(result.best.settings)


def test_trained_weights_stay_in_float32_unless_freed() -> None:
    """In 16 bit small updates are rounded away: another training, not a cheaper one."""
    full = {**FULL, "gpu": "H200 SXM", "optim": "adamw_torch_fused"}
    del full["dtype"]
    result = optimize(full)
    assert "dtype" not in result.best.settings
    loaded = change(result, dtype="bfloat16")
    assert loaded.held == ("dtype",)
    assert any("updates below 1/256" in need for need in loaded.needs)
    assert optimize(full, free=["dtype"]).best.settings["dtype"] == "bfloat16"
    # float16 weights that are trained themselves are refused by the gradient scaler
    volta = {**full, "gpu": "V100-SXM2-32GB", "model": "Qwen/Qwen2.5-0.5B", "bf16": False, "fp16": True}
    assert not [each for each in optimize(volta, free=["all"]).changes if "dtype" in each.settings]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "tiiuae/falcon-7b", "lora_target_modules": "all-linear"},  # a family that Liger does not patch
        {"gpu": "V100-SXM2-32GB", "bf16": False, "fp16": True},  # no card for its kernels
        {"framework": "transformers", "framework_version": "4.40"},  # before the switch came
        {"framework": "torchtune"},
        {"torch_compile": True},
    ],
    ids=["family", "card", "version", "framework", "compiled"],
)
def test_liger_is_suggested_only_where_it_runs(changes: dict[str, Any]) -> None:
    assert change(optimize(LLAMA), use_liger_kernel=True).needs == ("the package liger-kernel",)
    assert not [each for each in optimize({**LLAMA, **changes}).changes if "use_liger_kernel" in each.settings]


def test_rows_without_padding_keep_their_flash_kernel() -> None:
    for job in (LLAMA, {**LLAMA, "gpu": "H100 SXM"}, {**LLAMA, "framework": "transformers", "gpu": "A100-SXM4-80GB"}):
        settings = optimize(job).best.settings
        if settings.get("padding_free"):
            assert settings["attn_implementation"].startswith("flash_attention")


def test_what_would_change_nothing_is_not_asked_for() -> None:
    result = optimize(LLAMA)
    assert result.best.total_seconds is not None
    together = [
        {"packing", "padding_free", "attn_implementation"},
        {"per_device_train_batch_size", "gradient_accumulation_steps"},
    ]
    for name in result.best.settings:
        dropped = next((fields for fields in together if name in fields), {name})
        fewer = {other: value for other, value in result.best.settings.items() if other not in dropped}
        without = estimate({**LLAMA, **fewer})
        assert without.total_seconds is not None
        keeps = (samples_per_step(without) or 0) == pytest.approx(16, rel=0.25)
        assert not keeps or without.verdict != "fits" or without.total_seconds > result.best.total_seconds * 1.0049, name


def test_what_the_job_fixes_stays_and_is_told() -> None:
    result = optimize({**LLAMA, "packing": False, "attn_implementation": "sdpa"})
    assert "packing" not in result.best.settings
    assert "attn_implementation" not in result.best.settings
    packing = change(result, packing=True)
    assert packing.held == ("attn_implementation", "packing")
    assert packing.saves_usd is not None
    assert packing.saves_usd > 0


def test_a_change_that_needs_a_smaller_micro_batch_comes_with_it() -> None:
    # Without checkpointing, 16 samples at once do not fit; packed rows hold five samples each.
    job = {**LLAMA, "gpu": "H100 SXM", "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    result = optimize(job)
    plain = estimate({**job, "gradient_checkpointing": False})
    assert plain.verdict == "does_not_fit"
    without = change(result, gradient_checkpointing=False)
    assert without.estimate.verdict == "fits"
    assert without.settings["per_device_train_batch_size"] * without.settings["gradient_accumulation_steps"] == 16
    packed = change(result, packing=True)
    assert packed.settings["per_device_train_batch_size"] * packed.settings["gradient_accumulation_steps"] == 3
    assert samples_per_step(packed.estimate) == pytest.approx(16, rel=0.25)


def test_a_given_field_may_be_freed() -> None:
    held = optimize({**FULL, "gradient_checkpointing": True})
    assert "optim" not in held.best.settings
    assert change(held, optim="adamw_torch_fused").held == ("optim",)
    freed = optimize({**FULL, "gradient_checkpointing": True}, free=["optim"])
    assert freed.best.settings["optim"] != "adamw_torch"
    assert "gradient_checkpointing" not in freed.best.settings
    everything = optimize({**FULL, "gradient_checkpointing": True}, free=["all"])
    assert everything.best.settings["gradient_checkpointing"] is False
    assert all(each.held == () for each in everything.changes)


def test_the_optimizer_stays_in_its_family() -> None:
    result = optimize({**FULL, "optim": "lion_32bit"}, free=["all"])
    assert {each.settings["optim"] for each in result.changes if "optim" in each.settings} <= {
        "lion_8bit",
        "paged_lion_8bit",
    }
    assert not [each for each in optimize({**FULL, "optim": "sgd"}, free=["all"]).changes if "optim" in each.settings]


def test_the_base_is_requantised_only_if_allowed() -> None:
    job = {**LLAMA, "gpu": "RTX 3090"}
    refused = optimize(job)
    assert not [each for each in refused.changes if "quantization" in each.settings]
    allowed = optimize(job, allow_quantization=True)
    assert refused.start.fits is False
    assert allowed.best.settings["quantization"] == "nf4"
    assert allowed.best.fits
    assert allowed.saves_usd is None  # the job as given never runs, so nothing is saved on it
    assert allowed.saves_bytes > 0
    assert "the package bitsandbytes; another base changes the result" in allowed.needs


def test_a_quantised_base_may_be_loaded_in_16_bit_instead() -> None:
    job = {**LLAMA, "gpu": "H100 SXM", "method": "qlora", "quantization": "nf4", "dtype": "bfloat16"}
    whole = change(optimize(job, allow_quantization=True), quantization=None)
    assert whole.settings == {"method": "lora", "quantization": None, "dtype": "bfloat16"}
    assert whole.saves_bytes < 0


def test_only_a_free_batch_changes_the_samples_of_a_step() -> None:
    job = {**FULL, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    kept = optimize(job)
    assert kept.effective_batch_size[1] == pytest.approx(1)
    freed = optimize(job, free_batch=True)
    assert freed.effective_batch_size[1] is not None
    assert freed.effective_batch_size[1] > 4
    assert (freed.best.total_usd or 0) < (kept.best.total_usd or 0)


def test_no_padding_free_rows_without_a_flash_kernel() -> None:
    # A V100 (compute capability 7.0) has none.
    result = optimize({**LLAMA, "gpu": "V100-SXM2-32GB", "bf16": False, "fp16": True})
    for each in result.changes:
        assert not {"padding_free", "attn_implementation"} & set(each.settings)


def test_stock_transformers_does_not_pack() -> None:
    result = optimize({**LLAMA, "framework": "transformers", "gpu": "A100-SXM4-80GB"})
    assert not [each for each in result.changes if each.settings.get("packing")]
    flattened = change(result, padding_free=True)
    assert "DataCollatorWithFlattening as data_collator" in flattened.needs


def test_experts_in_a_loop_are_slow() -> None:
    job = {
        **LLAMA,
        "model": "allenai/OLMoE-1B-7B-0924",
        "gpu": "A100-SXM4-80GB",
        "experts_implementation": "eager",
        "framework_version": "1.16",
    }
    grouped = change(optimize(job), experts_implementation="grouped_mm")
    assert grouped.held == ("experts_implementation",)
    assert grouped.saves_seconds is not None
    assert grouped.saves_seconds > 0


def test_without_lengths_only_memory_is_weighed() -> None:
    job = {name: value for name, value in LLAMA.items() if name != "lengths"} | {"per_device_train_batch_size": 64}
    result = optimize(job)
    assert not result.start.fits
    assert result.best.fits
    assert result.saves_usd is None
    assert result.effective_batch_size == (None, None)
    settings = result.best.settings
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 256


def _by_gpu(result: OptimizeResult) -> dict[str, Candidate]:
    return {each.gpu: each for each in (result.best, *result.others)}


def test_limits_choose_among_gpus() -> None:
    gpus = ["A40", "H100 SXM"]
    cheap = optimize(LLAMA, gpus)
    assert cheap.others[0].gpu != cheap.best.gpu
    by_gpu = _by_gpu(cheap)
    slow, fast = by_gpu["A40"], by_gpu["H100 SXM"]
    assert slow.total_seconds is not None
    assert fast.total_seconds is not None
    between = (slow.total_seconds + fast.total_seconds) / 2 / 3600
    assert optimize(LLAMA, gpus, deadline_hours=between).best.gpu == "H100 SXM"
    assert optimize(LLAMA, gpus, budget_usd=1000).best.gpu == "H100 SXM"  # the fastest that the money buys
    unmet = optimize(LLAMA, gpus, budget_usd=0.01, deadline_hours=1000)
    assert unmet.unmet == ("budget_usd",)
    assert [each.unmet for each in unmet.others] == [("budget_usd",)]


def _title_and_rows(result: OptimizeResult) -> tuple[str, list[tuple[str, str]]]:
    table = comparison_tables.optimization_tables(result)[-1]
    return table.title, [(row[0], row[1]) for row in table.rows]


def test_the_table_of_gpus_is_in_the_order_that_it_names_and_says_what_misses_a_limit() -> None:
    gpus = ["A40", "H100 SXM", "L4"]
    free = optimize(LLAMA, gpus)
    by_gpu = _by_gpu(free)
    usd = {name: each.total_usd or 0.0 for name, each in by_gpu.items()}
    hours = {name: (each.total_seconds or 0.0) / 3600 for name, each in by_gpu.items()}
    cheapest, fastest = sorted(gpus, key=usd.__getitem__), sorted(gpus, key=hours.__getitem__)
    front = {one for one in gpus if not any(usd[two] <= usd[one] and hours[two] <= hours[one] for two in {*gpus} - {one})}
    assert front < {*gpus}  # else the marks could not fail

    title, rows = _title_and_rows(free)
    assert title.startswith("Same job, cheapest first (*")
    assert rows == [("*" if name in front else "", name) for name in cheapest]

    deadline = sum(sorted(hours.values())[1:]) / 2  # the slowest misses it
    late = max(gpus, key=hours.__getitem__)
    result = optimize(LLAMA, gpus, deadline_hours=deadline)
    title, rows = _title_and_rows(result)
    assert title.startswith("Same job, cheapest first, then what misses a limit (*")
    assert f"\nx = misses the deadline: {late}\n" in title
    assert [name for _, name in rows] == [*(name for name in cheapest if name != late), late]
    assert [mark.endswith("x") for mark, _ in rows] == [False, False, True]
    found = [result.best, *result.others]
    assert [each.to_dict()["unmet"] for each in found] == [[], [], ["deadline_hours"]]
    assert {each.gpu for each in found if each.on_pareto_front} == front

    budget = sum(sorted(usd.values())[1:]) / 2
    dear = max(gpus, key=usd.__getitem__)
    result = optimize(LLAMA, gpus, budget_usd=budget)
    title, rows = _title_and_rows(result)
    assert title.startswith("Same job, fastest first, then what misses a limit (*")
    assert f"\nx = misses the budget: {dear}\n" in title
    assert [name for _, name in rows] == [*(name for name in fastest if name != dear), dear]
    assert (free.to_dict()["ranked_by"], result.to_dict()["ranked_by"]) == ("usd", "time")

    title, rows = _title_and_rows(optimize({**LLAMA, "lengths": None}, gpus, deadline_hours=deadline))
    assert title.startswith("Same job, in no order of time or cost: both are unknown")
    assert {mark for mark, _ in rows} == {""}
    assert "misses" not in title


def test_a_job_without_a_gpu_is_searched_on_the_pareto_front() -> None:
    result = optimize({name: value for name, value in LLAMA.items() if name != "gpu"})
    assert result.best.price is not None
    assert result.best.fits
    assert len(result.others) <= 3


def test_the_jobs_own_price_and_interruptions_are_used() -> None:
    result = optimize({**LLAMA, "usd_per_gpu_hour": 1.0})
    assert result.best.total_usd == pytest.approx((result.best.total_seconds or 0) / 3600)
    spot = optimize({**LLAMA, "tier": "spot"}, spot=SpotTerms(0.2, 300))
    assert spot.best.spot is not None
    assert spot.best.total_usd == spot.best.spot.expected_usd


def test_samples_per_step_counts_all_gpus() -> None:
    assert samples_per_step(estimate({**LLAMA, "num_gpus": 2})) == pytest.approx(32)


def test_errors() -> None:
    with pytest.raises(UnknownNameError, match="no Job field matches 'optimizer'"):
        optimize(LLAMA, free=["optimizer"])
    with pytest.raises(UnknownNameError, match="no GPU matches"):
        optimize(LLAMA, ["A41"])
    with pytest.raises(UnknownNameError, match="no tier matches"):
        optimize(LLAMA, tiers=["preemptible"])
    with pytest.raises(CostModelError, match="max_length is required"):
        optimize({**LLAMA, "framework": "transformers", "max_length": None})


def test_few_enough_estimates_for_two_seconds() -> None:
    # About a millisecond each; the second is the widest search there is.
    assert optimize(LLAMA, allow_quantization=True).num_estimates < 300
    moe = {**LLAMA, "model": "Qwen/Qwen3-30B-A3B", "gpu": "B200", "gradient_accumulation_steps": 60}
    assert optimize(moe, free=["all"], allow_quantization=True).num_estimates < 1200


# --- the command


def _flags(job: dict[str, Any]) -> list[str]:
    return [
        "-m",
        job["model"],
        *("-g", job["gpu"], "--method", job["method"], "--bf16", "--framework", "trl", "-b", "4", "--accum", "4"),
        *("--seq-len", "1024", "--lengths", "dataset:math_14k", "--samples", "15000"),
    ]


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["optimize", *_flags(LLAMA), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["settings"] == dict(optimize(LLAMA).best.settings)
    assert cli.run(["optimize", *_flags(LLAMA)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Each change alone")
    assert "Best on 1 x A40 at $0.44/h (RunPod Secure A40 on_demand, as of 2026-08-19" in shown
    assert "padding_free: true" in shown or "packing: true" in shown
    assert cli.run(["optimize", *_flags(LLAMA), "--markdown"]) == 0
    assert "**Best on 1 x A40 at $0.44/h (" in capsys.readouterr().out


def test_command_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["optimize", *_flags(LLAMA), "--budget-usd", "0.01"]) == 4
    assert "no settings keep --budget-usd 0.01; these come nearest" in capsys.readouterr().err
    large = {**LLAMA, "model": "meta-llama/Llama-2-13b-hf", "gpu": "T4"}
    assert cli.run(["optimize", *_flags(large), "--no-bf16", "--fp16"]) == 3
    assert "--allow-quantization" in capsys.readouterr().err
    assert cli.run(["optimize", *_flags(LLAMA), "--free", "optimizer"]) == 2
    assert capsys.readouterr().out == ""


def test_settings_as_words() -> None:
    settings = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
        "quantization": None,
        "optim": "lion_8bit",
    }
    assert comparison_tables.settings_text(settings) == "batch 8 x 2, checkpointing off, unquantised, optim=lion_8bit"
    assert comparison_tables.settings_text({}) == ""
    assert comparison_tables.format_saving(-3600.0 * 3, formats.format_seconds) == "-3 h"
    assert comparison_tables.format_saving(None, formats.format_usd) == ""


def test_a_default_of_the_tool_whose_file_it_is_is_not_fixed() -> None:
    job = {**LLAMA, "packing": False, "padding_free": False}
    assert not optimize(job).best.settings.get("packing")
    freed = optimize(job, not_given=("packing", "padding_free"))
    assert freed.best.settings["packing"] is True
    assert all("packing" not in each.held for each in freed.changes)


def test_the_command_frees_what_the_file_does_not_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "llamafactory.yaml"
    text = (
        "model_name_or_path: meta-llama/Llama-3.1-8B\nstage: sft\nfinetuning_type: lora\ntemplate: llama3\n"
        "cutoff_len: 1024\nbf16: true\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\n"
    )
    line = ["optimize", str(path), "-g", "A100-SXM4-80GB", "--lengths", "mean:300,max:1000", "--num-samples", "1000"]
    path.write_text(text)
    assert cli.run(line) == 0
    assert "--free packing" not in capsys.readouterr().out
    path.write_text(text + "packing: false\n")
    assert cli.run(line) == 0
    assert "not done without --free packing" in capsys.readouterr().out


def test_a_change_has_a_line_only_where_it_is_worth_one_or_part_of_the_best() -> None:
    result = optimize(
        {**LLAMA, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, "gpu": "A100-SXM4-80GB"}
    )
    assert result.start.estimate is not None
    named: set[str] = set()
    for each in result.changes:
        seconds, peak = each.saves_seconds or 0.0, result.start.estimate.memory.peak_device_bytes
        moves = abs(seconds) > 0.01 * (result.start.total_seconds or 0) or abs(each.saves_bytes) > 0.01 * peak
        assert moves != each.only_with_others, each.settings
        named |= set(each.settings)
    assert set(result.best.settings) <= named


@pytest.mark.parametrize("fields", [{}, {"packing": True, "padding_free": True, "attn_implementation": "flash_attention_2"}])
def test_a_change_that_only_costs_is_no_proposal(fields: dict[str, Any]) -> None:
    result = optimize({**LLAMA, "gpu": "A100-SXM4-80GB", "per_device_train_batch_size": 4, **fields}, free=["all"])
    assert result.changes
    for each in result.changes:
        is_in_best = result.best.settings.items() >= each.settings.items()
        assert is_in_best or (each.saves_seconds or 0.0) > 0 or each.saves_bytes > 0, each.settings


def test_what_pays_only_with_others_is_listed_too() -> None:
    result = optimize({**LLAMA, "gpu": "RTX 4090", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1})
    assert result.start.estimate is not None
    assert result.start.estimate.verdict == "does_not_fit"
    assert set(result.best.settings) <= {name for each in result.changes for name in each.settings}


def test_lengths_that_are_counted_once_for_many_trials_stay_counts() -> None:
    """Of samples, not shares: how they are grouped by length depends on how many there are of each."""
    values = [700, 120, 640, 120, 300]
    job = parse_job({"model": "Qwen/Qwen2.5-0.5B", "max_length": 1024, "lengths": {"values": values}})
    counted = with_counted_lengths(job).lengths
    assert counted == Lengths(histogram={120: 2, 300: 1, 640: 1, 700: 1})
    fields = {"gpu": "L4", "method": "lora", "per_device_train_batch_size": 2, "num_samples": 5}
    fields |= {"train_sampling_strategy": "group_by_length"}
    one, other = (estimate(job, lengths=lengths, **fields) for lengths in (counted, {"values": values}))
    assert one.total_seconds == other.total_seconds
