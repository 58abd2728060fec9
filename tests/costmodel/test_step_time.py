"""Step time: the parts against the whole, the kernels that the paper timed, and measured runs of each kind."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import constants as c
from costmodel.defaults import ResolvedJob, resolve
from costmodel.device_rates import dequantisation_seconds_per_weight, matmul_ceiling
from costmodel.errors import CostModelError
from costmodel.estimation import estimate
from costmodel.expert_load import dropped_token_fraction
from costmodel.gpu_catalog import find_gpu
from costmodel.hf_config import model_spec_from_config
from costmodel.links import link_of
from costmodel.model_catalog import find_model_config
from costmodel.model_spec import ModelSpec
from costmodel.operators import operators
from costmodel.optimization import optimize
from costmodel.specs import GpuSpec, parse_job
from costmodel.step_time import StepTime, imbalance_seconds, step_time
from costmodel.workload import Batch, expected_experts_hit, flops

LLAMA = "meta-llama/Llama-3.2-3B"
MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"


def prepared(model_name: str, **fields: Any) -> tuple[ModelSpec, ResolvedJob]:
    model = model_spec_from_config(find_model_config(model_name), name=model_name)
    job, _ = resolve(parse_job({"model": model_name, "max_length": 4096, "framework": "transformers", **fields}), model)
    return model, job


def timed(model_name: str, gpu: str, batch_size: int, tokens: int, **fields: Any) -> StepTime:
    model, job = prepared(model_name, per_device_train_batch_size=batch_size, **fields)
    step = step_time(model, job, find_gpu(gpu), Batch.of(batch_size, tokens))
    assert step is not None
    return step


LORA = {"method": "lora", "dtype": "bfloat16", "bf16": True, "lora_r": 16, "lora_target_modules": "all-linear"}
QLORA = {**LORA, "method": "qlora", "quantization": "nf4", "framework_version": "4.40", "lora_target_modules": ("q_proj",)}


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 16),
    tokens=st.integers(16, 4096),
    kind=st.sampled_from(["full", "lora", "qlora", "moe"]),
    checkpointing=st.booleans(),
    accumulation=st.integers(1, 8),
)
def test_the_groups_and_the_passes_sum_to_the_step(
    batch: int, tokens: int, kind: str, checkpointing: bool, accumulation: int
) -> None:
    fields: dict[str, Any] = {"full": {"method": "full", "dtype": "bfloat16"}, "lora": LORA, "qlora": QLORA, "moe": QLORA}[
        kind
    ]
    step = timed(
        MIXTRAL if kind == "moe" else LLAMA,
        "A100-SXM4-80GB",
        batch,
        tokens,
        gradient_checkpointing=checkpointing,
        gradient_accumulation_steps=accumulation,
        **fields,
    )
    assert sum(step.by_group_seconds.values()) == pytest.approx(step.step_seconds)
    passes = step.forward_seconds + step.backward_seconds + step.optimizer_seconds
    assert passes == pytest.approx(step.step_seconds)
    assert step.step_seconds >= max(step.device_seconds, step.host_seconds)
    assert all(seconds >= 0 for seconds in step.by_group_seconds.values())


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(16, 4000), gpu=st.sampled_from(["A40", "H100 SXM", "RTX 4090", "T4"]))
def test_more_tokens_never_take_less_time(tokens: int, gpu: str) -> None:
    fields = {**LORA, "dtype": "float16", "bf16": False, "fp16": True}
    shorter, longer = (timed(LLAMA, gpu, 2, length, **fields).step_seconds for length in (tokens, tokens + 64))
    assert longer >= shorter


def test_a_short_batch_costs_the_host_and_a_long_one_the_device() -> None:
    short, long = (timed(LLAMA, "H100 SXM", size, 64 * size**2, **LORA) for size in (1, 8))
    assert (short.regime, short.bound_by) == ("host", "host")
    assert long.regime == "device"
    assert short.step_seconds == pytest.approx(short.host_seconds, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "products"),
    [
        ({"method": "full", "dtype": "bfloat16"}, 11 / 12),  # 3 forward, 2 or 3 again, 6 backward
        ({**LORA, "lora_target_modules": ("q_proj", "v_proj")}, 8 / 9),  # the frozen weights have no gradient
        (LORA, 1.0),  # the base product of an adapted last linear comes before what its adapter needs
    ],
)
def test_a_recompute_leaves_the_last_linear_out_unless_it_is_adapted(fields: dict[str, Any], products: float) -> None:
    seconds = {
        reentrant: timed(
            LLAMA, "A40", 8, 1024, gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant}, **fields,
        ).by_group_seconds["mlp"]
        for reentrant in (True, False)
    }  # fmt: skip
    assert seconds[False] / seconds[True] == pytest.approx(products, rel=1e-3)


def test_experts_in_the_mixer_are_visited_too_and_those_that_run_all_are_not_a_loop() -> None:
    batch = Batch.of(1, 256)
    model, job = prepared("jetmoe/jetmoe-8b", method="full", experts_implementation="eager")
    per_stack = sum(
        count * 30 * expected_experts_hit(each.num_experts, each.num_experts_per_tok, batch.num_tokens)
        for layer, count in model.layers
        for each in (layer.mixer_experts, layer.experts)
        if each
    )
    assert operators(model, job, batch).loop_forward == pytest.approx(per_stack)
    model, job = prepared("meta-llama/Llama-4-Scout-17B-16E", method="full", experts_implementation="eager")
    assert operators(model, job, batch).loop_forward == 0.0


def test_an_unknown_rate_is_no_step_time() -> None:
    model, job = prepared(LLAMA, **LORA)
    assert matmul_ceiling(find_gpu("T4"), "bfloat16") is None
    assert step_time(model, job, find_gpu("T4"), Batch.of(1, 128)) is None


def test_a_t4_is_held_down_by_its_70_watts() -> None:
    """No more for a watt than the generation after it: 25 of its 65 TFLOP/s, so the L4 in its place is the faster card."""
    assert matmul_ceiling(find_gpu("T4"), "float16") == pytest.approx(25.2e12, rel=0.01)
    lora = {**LORA, "bf16": None, "dtype": "float16", "fp16": True, "gradient_checkpointing": True}
    t4, l4, a10 = (timed(LLAMA, gpu, 8, 1024, **lora).step_seconds for gpu in ("T4", "L4", "A10G"))
    assert t4 > 1.2 * l4 > 1.2 * a10
    # Turing cards with the power for it keep theirs
    assert matmul_ceiling(find_gpu("RTX 2080 Ti"), "float16") == pytest.approx(c.CEILING_OVER_PEAK * 53.8e12)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        # measured by one and the same programme (stas00/ml-engineering), or what their runs show
        pytest.param("A100-SXM4-80GB", 271.2, id="A100"),
        pytest.param("H100 SXM", 794.5, id="H100"),
        pytest.param("A40", 108.0, id="A40"),
        pytest.param("L40S", 210.0, id="L40S"),
        pytest.param("RTX PRO 6000 Blackwell Workstation", 408.0, id="GB202"),
    ],
)
def test_the_cards_that_the_power_rule_was_made_from_get_their_own_rate(name: str, tflops: float) -> None:
    unmeasured = find_gpu(name).model_copy(update={"measured_bf16_matmul_flops_per_second": None})
    assert matmul_ceiling(unmeasured, "bfloat16") == pytest.approx(tflops * 1e12, rel=2e-3)


def test_half_the_power_is_more_than_half_the_rate() -> None:
    """MI300X and MI325X: one die, 750 and 1,000 W, 668 and 785 TFLOP/s by one programme: an exponent of 0.56."""
    low, high = find_gpu("MI300X"), find_gpu("MI325X")
    assert low.tdp_watts is not None
    assert high.tdp_watts is not None
    assert low.measured_bf16_matmul_flops_per_second is not None
    by_power = low.measured_bf16_matmul_flops_per_second * (high.tdp_watts / low.tdp_watts) ** 0.5
    assert by_power == pytest.approx(high.measured_bf16_matmul_flops_per_second, rel=0.03)
    h100 = find_gpu("H100 SXM").model_copy(update={"measured_bf16_matmul_flops_per_second": None})
    halved = h100.model_copy(update={"tdp_watts": 350.0})
    full_rate, rate = matmul_ceiling(h100, "bfloat16"), matmul_ceiling(halved, "bfloat16")
    assert full_rate is not None
    assert rate is not None
    assert rate == pytest.approx(full_rate * 0.5**0.5)


def test_a_card_with_power_to_spare_is_not_held_down_and_one_of_less_power_is_slower() -> None:
    def ceiling(name: str) -> float:
        rate = matmul_ceiling(find_gpu(name), "bfloat16")
        assert rate is not None
        return rate

    assert ceiling("H20") == pytest.approx(c.CEILING_OVER_PEAK * 148e12)
    for names in (("H100 PCIe", "H100 NVL", "H100 SXM"), ("L4", "A10", "RTX A6000", "L40S"), ("A30", "A100-PCIE-80GB")):
        rates = [ceiling(name) for name in names]
        assert rates == sorted(rates)


def test_a_v100_reaches_two_thirds_of_its_peak() -> None:
    """arXiv:1803.04014: 83 of 125 TFLOP/s in mixed precision."""
    assert matmul_ceiling(find_gpu("V100-SXM2-32GB"), "float16") == pytest.approx(83e12, rel=0.01)


def test_adafactor_goes_through_what_is_trained_many_times() -> None:
    adafactor, fused = (
        timed(LLAMA, "A100-SXM4-80GB", 1, 512, method="full", optim=optim).by_group_seconds["optimizer"]
        for optim in ("adafactor", "adamw_torch_fused")
    )
    assert adafactor / fused == pytest.approx(c.OPTIMIZER_BYTES_ADAFACTOR[0] / c.OPTIMIZER_BYTES_FUSED[0])


def test_flash_attention_2_does_not_use_what_hopper_has() -> None:
    """At most 335 TFLOP/s of an H100's 989 (arXiv:2307.08691); FlashAttention 3 uses its instructions, an A100 has none."""

    def flops_per_second(gpu: str, implementation: str) -> float:
        model, job = prepared(LLAMA, **LORA, attn_implementation=implementation, per_device_train_batch_size=1)
        batch = Batch.of(1, 32_768)
        step = step_time(model, job, find_gpu(gpu), batch)
        assert step is not None
        work = flops(model, job, batch)
        counted = sum(each["attention_scores"] for each in (work.forward, work.backward, work.recompute))
        return 0.5 * counted / step.by_group_seconds["attention_scores"]

    for implementation in ("flash_attention_2", "sdpa"):
        assert flops_per_second("H100 SXM", implementation) == pytest.approx(335e12, rel=0.01)
        assert flops_per_second("A100-SXM4-80GB", implementation) == flops_per_second("A100-SXM4-80GB", "flash_attention_3")
    assert flops_per_second("H100 SXM", "flash_attention_3") > 1.3 * 335e12
    assert flops_per_second("B200", "flash_attention_2") == pytest.approx(335e12, rel=0.01)
    assert flops_per_second("B200", "sdpa") > 1.3 * 335e12
    assert flops_per_second("H20", "sdpa") == flops_per_second("H20", "flash_attention_3") < 100e12  # its peak is cut below


def test_dequantisation_of_nf4_is_that_of_the_timed_kernels() -> None:
    """arXiv:2408.04693, Fig. 6 data: 359 us for one 4096 x 14336 expert matrix on an A40, at every batch size."""
    seconds = dequantisation_seconds_per_weight("nf4", find_gpu("A40"), by_table=False) * 4096 * 14336
    assert seconds == pytest.approx(359e-6, rel=0.01)


def test_dequantisation_of_nf4_is_bound_by_bytes_where_integers_are_cheap() -> None:
    gpu = find_gpu("RTX 4090")
    by_bytes = 2.56 / (gpu.memory_bandwidth_bytes_per_second * c.BANDWIDTH_EFFICIENCY)
    a100 = find_gpu("A100-SXM4-40GB")
    for by_table in (True, False):
        assert dequantisation_seconds_per_weight("nf4", gpu, by_table=by_table) == by_bytes
    assert dequantisation_seconds_per_weight("nf4", a100, by_table=False) > 2.5 * by_bytes * 1008 / 1555


def test_a_table_takes_fewer_instructions_than_a_tree_of_comparisons() -> None:
    """bitsandbytes 0.48 against those before it: 440 machine instructions for 16 weights, not 960 (NF4, sm_80)."""
    a100 = find_gpu("A100-SXM4-80GB")
    table, tree = (dequantisation_seconds_per_weight("nf4", a100, by_table=new) for new in (True, False))
    assert table / tree == pytest.approx(440 / 960, rel=0.02)
    shares = []
    for version in ("4.56", "4.57", None):
        step = timed(LLAMA, "A100-SXM4-80GB", 1, 1024, **{**QLORA, "framework_version": version})
        shares.append(step.by_group_seconds["dequantisation"])
    assert shares[0] / shares[1] == pytest.approx(tree / table)
    assert shares[1] == shares[2]


@pytest.mark.parametrize(
    ("rows", "microseconds"),
    [
        # arXiv:2408.04693, Fig. 6 data: the product w1 of one Mixtral expert (4096 x 14336) on an A40.
        pytest.param(32, 239, id="memory-bound"),
        pytest.param(320, 485, id="320"),
        pytest.param(1024, 1262, id="1024"),
        pytest.param(1280, 1490, id="1280"),
    ],
)
def test_expert_products_are_those_of_the_timed_kernels(rows: int, microseconds: float) -> None:
    gpu = find_gpu("A40")
    ceiling = matmul_ceiling(gpu, "bfloat16")
    assert ceiling is not None
    by_flops = 2 * 4096 * 14336 * (rows + c.GEMM_HALF_ROWS) / (ceiling * c.GEMM_EFFICIENCY)
    moved = 2 * (4096 * 14336 + rows * (4096 + 14336))
    by_bytes = moved / (gpu.memory_bandwidth_bytes_per_second * c.BANDWIDTH_EFFICIENCY)
    assert 1e6 * max(by_flops, by_bytes) == pytest.approx(microseconds, rel=0.15)


def test_an_fp32_adapter_beside_a_16_bit_linear_costs_casts_and_a_16_bit_one_does_not() -> None:
    slow = timed(LLAMA, "L40S", 4, 1024, **{**LORA, "adapter_dtype": "float32", "bf16": False})
    fast = timed(LLAMA, "L40S", 4, 1024, **{**LORA, "adapter_dtype": "bfloat16", "bf16": False})
    assert slow.by_group_seconds["elementwise"] > 1.3 * fast.by_group_seconds["elementwise"]


def test_experts_in_a_loop_wait_whatever_the_batch() -> None:
    small, large = (timed(MIXTRAL, "A40", size, 128, **QLORA) for size in (4, 32))
    assert small.expert_loop_seconds == pytest.approx(large.expert_loop_seconds, rel=0.01)
    # 32 layers of eight experts, at least 30 operators forward, 30 again and 60 backward
    assert small.expert_loop_seconds > 256 * 120 * c.LOOP_OPERATOR_FACTOR * c.SECONDS_PER_OPERATOR


def test_a_stack_that_waits_adds_host_and_device() -> None:
    fields = {**LORA, "adapter_dtype": "bfloat16"}
    model, job = prepared(LLAMA, **fields)
    waiting = replace(job, framework="litgpt")
    gpu, batch = find_gpu("A100-SXM4-40GB"), Batch.of(1, 256)
    usual, slow = step_time(model, job, gpu, batch), step_time(model, waiting, gpu, batch)
    assert usual is not None
    assert slow is not None
    assert slow.step_seconds == pytest.approx(slow.device_seconds + slow.host_seconds)
    assert usual.step_seconds < usual.device_seconds + usual.host_seconds


def test_compiled_layers_move_fewer_bytes() -> None:
    eager, compiled = (timed(LLAMA, "RTX 4090", 4, 1024, torch_compile=flag, **LORA) for flag in (False, True))
    assert compiled.by_group_seconds["elementwise"] < 0.5 * eager.by_group_seconds["elementwise"]
    # the optimizer stays as it was
    assert c.COMPILED_HOST_SHARE < compiled.host_seconds / eager.host_seconds < c.COMPILED_HOST_SHARE + 0.05


@pytest.mark.parametrize("unknown", ["", "8.x", "x", "8", "sm_86"])
def test_a_described_gpu_without_a_compute_capability_is_taken_for_a_newer_card(unknown: str) -> None:
    ada = find_gpu("L40S").model_copy(update={"memory_bandwidth_bytes_per_second": 1e14})  # so that instructions decide
    described = ada.model_copy(update={"compute_capability": unknown})
    assert dequantisation_seconds_per_weight("nf4", described) == dequantisation_seconds_per_weight("nf4", ada)
    turing = ada.model_copy(update={"compute_capability": "7.5", "tdp_watts": None})
    assert 2 * dequantisation_seconds_per_weight("nf4", turing) == dequantisation_seconds_per_weight("nf4", ada)


def test_a_card_that_holds_its_clock_down_dequantises_at_that_clock() -> None:
    """A T4: 25 of 65 TFLOP/s by its power, and its integer units no faster."""
    t4 = find_gpu("T4")
    at_data_sheet_clock = t4.model_copy(update={"tdp_watts": None})
    slow, fast = (dequantisation_seconds_per_weight("nf4", each, by_table=False) for each in (t4, at_data_sheet_clock))
    assert slow / fast == pytest.approx(65 / 25.2, rel=0.02)
    # cards of other generations are held down in matrix products alone
    a40 = find_gpu("A40")
    assert dequantisation_seconds_per_weight("nf4", a40) == dequantisation_seconds_per_weight(
        "nf4", a40.model_copy(update={"tdp_watts": None})
    )


# --- uneven experts ---------------------------------------------------------------------------------------------------

SMALL_EXPERTS = "Qwen/Qwen3-30B-A3B"  # 128 experts
FULL_BF16: dict[str, Any] = {"method": "full", "dtype": "bfloat16"}


@settings(max_examples=30, deadline=None)
@given(
    loads=st.lists(st.integers(0, 50), min_size=8, max_size=8).filter(any),
    tokens=st.sampled_from([64, 512, 2048, 8192]),
    ranks=st.sampled_from([1, 2, 4]),
)
def test_uneven_experts_cost_nothing_when_even_and_never_less_when_further_from_it(
    loads: list[int], tokens: int, ranks: int
) -> None:
    model, job = prepared(MIXTRAL, **FULL_BF16)
    gpu, batch, mean = find_gpu("H100 SXM"), Batch.of(1, tokens), sum(loads) / 8
    mixes = [[mean + share * (each - mean) for each in loads] for share in (0.0, 0.25, 0.5, 1.0)]
    extra = [imbalance_seconds(model, job, gpu, batch, mix, expert_ranks=ranks) for mix in mixes]
    assert extra[0] == pytest.approx(0.0, abs=1e-9)
    for less, more in itertools.pairwise(extra):
        assert less is not None
        assert more is not None
        assert more >= less - 1e-9


def test_the_busiest_expert_over_the_mean_is_enough_and_stands_in_its_own_group() -> None:
    model, job = prepared(SMALL_EXPERTS, **FULL_BF16)
    gpu, batch = find_gpu("H100 SXM"), Batch.of(1, 8192)
    extra = [imbalance_seconds(model, job, gpu, batch, each) for each in (1.0, 2.0, 4.0, 16.0, 128.0)]
    assert extra[0] == 0.0
    assert all(a is not None and b is not None and a < b for a, b in itertools.pairwise(extra))
    step = step_time(model, replace(job, expert_imbalance=4.0), gpu, batch)
    even = step_time(model, job, gpu, batch)
    assert step is not None
    assert even is not None
    assert "expert_imbalance" not in even.by_group_seconds
    assert sum(step.by_group_seconds.values()) == pytest.approx(step.step_seconds)
    assert step.step_seconds - even.step_seconds == pytest.approx(extra[2])


def test_on_one_gpu_large_batches_cost_the_same_whoever_does_the_work_and_over_several_the_busiest_decides() -> None:
    model, job = prepared(MIXTRAL, **FULL_BF16)
    gpu, batch, skewed = find_gpu("H100 SXM"), Batch.of(16, 4096), [3, 1, 1, 1, 1, 1, 1, 1]
    even = step_time(model, job, gpu, batch)
    assert even is not None
    assert imbalance_seconds(model, job, gpu, batch, skewed) == pytest.approx(0.0, abs=1e-6 * even.step_seconds)
    # with one expert a GPU, the busiest has 3 / 1.25 of the mean tokens
    over_eight = imbalance_seconds(model, job, gpu, batch, skewed, expert_ranks=8)
    assert over_eight == pytest.approx((3 / 1.25 - 1) * even.by_group_seconds["experts"], rel=0.05)


def test_a_matrix_of_counts_is_the_mean_of_its_layers_and_skips_those_that_saw_nothing() -> None:
    model, job = prepared(MIXTRAL, **FULL_BF16)
    gpu, batch = find_gpu("H100 SXM"), Batch.of(1, 512)
    rows = [[9, 1, 1, 1, 1, 1, 1, 1], [1] * 8]
    both, skipped = (imbalance_seconds(model, job, gpu, batch, matrix) for matrix in (rows, [*rows, [0] * 8]))
    one = imbalance_seconds(model, job, gpu, batch, rows[0])
    assert one is not None
    assert one > 0
    assert both == skipped == pytest.approx(one / 2, rel=0.05)


@pytest.mark.parametrize(
    ("load", "words"),
    [
        pytest.param([1, 2, 3], "3 numbers for 8 experts", id="another number"),
        pytest.param([-1, *[1] * 7], "0 or more", id="negative"),
        pytest.param([float("nan"), *[1] * 7], "0 or more", id="nan"),
        pytest.param([0] * 8, "no expert saw a token", id="nothing"),
        pytest.param([], "no expert saw a token", id="empty"),
        pytest.param(0.5, "1 \\(even\\) to 8", id="below the mean"),
        pytest.param(9.0, "1 \\(even\\) to 8", id="above all"),
    ],
)
def test_a_load_that_cannot_be_is_refused(load: Any, words: str) -> None:
    model, job = prepared(MIXTRAL, **FULL_BF16)
    with pytest.raises(CostModelError, match=words):
        imbalance_seconds(model, job, find_gpu("H100 SXM"), Batch.of(1, 512), load)


def test_experts_that_do_not_split_evenly_over_gpus_are_refused() -> None:
    model, job = prepared(MIXTRAL, **FULL_BF16)
    with pytest.raises(CostModelError, match="8 experts cannot be split evenly over 3"):
        imbalance_seconds(model, job, find_gpu("H100 SXM"), Batch.of(1, 512), 2.0, expert_ranks=3)


def test_a_dense_model_has_no_imbalance() -> None:
    model, job = prepared(LLAMA, **LORA)
    assert imbalance_seconds(model, job, find_gpu("H100 SXM"), Batch.of(1, 512), 2.0) == 0.0
    with pytest.raises(CostModelError, match="mixtures of experts"):
        prepared(LLAMA, **LORA, expert_imbalance=2.0)


def test_a_fixed_capacity_drops_what_is_above_it() -> None:
    assert dropped_token_fraction([1] * 8, 8, 1.0) == 0.0
    assert dropped_token_fraction([16, *[0] * 7], 8, 1.25) == pytest.approx(1 - 1.25 / 8)
    shares = [dropped_token_fraction(load, 8, 1.25) for load in (1.0, 1.5, 2.0, 4.0, 8.0)]
    assert shares == sorted(shares)
    with pytest.raises(CostModelError, match="capacity_factor"):
        dropped_token_fraction(2.0, 8, 0.0)


def test_padding_of_blackmamba_visits_more_experts_and_that_of_others_does_not() -> None:
    for name, grows in (("Zyphra/BlackMamba-2.8B", True), (MIXTRAL, False)):
        model, job = prepared(name, method="full", dtype="bfloat16", framework_version="4.40")
        plain = Batch.of(8, 256)
        padded = replace(plain, num_padding_tokens=1024.0)
        without, beside = (step_time(model, job, find_gpu("A40"), batch) for batch in (plain, padded))
        assert without is not None
        assert beside is not None
        assert (beside.step_seconds > 1.05 * without.step_seconds) is grows
        assert beside.step_seconds >= without.step_seconds


# --- several GPUs -----------------------------------------------------------------------------------------------------

LLAMA_8B = "meta-llama/Llama-3.1-8B"


def waiting(gpu: str | GpuSpec, num_gpus: int, *, batch_size: int = 2, tokens: int = 1024, **fields: Any) -> float:
    """Seconds of a step of Llama 3.1 8B that go to communication."""
    model, job = prepared(LLAMA_8B, per_device_train_batch_size=batch_size, num_gpus=num_gpus, **fields)
    spec = find_gpu(gpu) if isinstance(gpu, str) else gpu
    step = step_time(model, job, spec, Batch.of(batch_size, tokens))
    assert step is not None
    assert sum(step.by_group_seconds.values()) == pytest.approx(step.step_seconds)
    passes = step.forward_seconds + step.backward_seconds + step.optimizer_seconds
    assert passes == pytest.approx(step.step_seconds)
    return step.by_group_seconds.get("communication", 0.0)


def zero(stage: int) -> dict[str, Any]:
    return {**FULL_BF16, "deepspeed": {"zero_optimization": {"stage": stage}}}


@pytest.mark.parametrize("fields", [FULL_BF16, zero(2), zero(3), {**FULL_BF16, "fsdp": "full_shard"}])
def test_one_gpu_communicates_nothing(fields: dict[str, Any]) -> None:
    assert waiting("L40S", 1, **fields) == 0.0


def test_plain_data_parallelism_sends_the_gradients_of_what_is_trained() -> None:
    """8.03e9 weights in bf16, twice over 7 / 8 of a ring, at half of PCIe 4.0; nothing of it fits beside 64 tokens."""
    seconds = 2 * (7 / 8) * 2 * 8.03e9 / (0.5 * 31.5e9)
    full = waiting("L40S", 8, batch_size=1, tokens=64, **FULL_BF16)
    assert full == pytest.approx(seconds, rel=0.1)
    assert waiting("L40S", 8, batch_size=1, tokens=64, **LORA) < 0.01 * full


def test_gradients_hide_behind_a_long_backward_but_for_the_last_bucket() -> None:
    bucket = 2 * (7 / 8) * 25 * 2**20 / (0.8 * 300e9)
    assert waiting("A100-SXM4-80GB", 8, batch_size=8, tokens=2048, **FULL_BF16) == pytest.approx(bucket)


@pytest.mark.parametrize("fields", [FULL_BF16, zero(1), zero(2), zero(3), {**FULL_BF16, "fsdp": "full_shard"}])
def test_a_faster_link_never_waits_longer_and_more_gpus_never_less(fields: dict[str, Any]) -> None:
    card = find_gpu("L40S")
    links = [card.model_copy(update={"pcie_bytes_per_second": rate * 1e9}) for rate in (8, 16, 32, 64, 450)]
    by_rate = [waiting(each, 8, **fields) for each in links]
    assert by_rate == sorted(by_rate, reverse=True)
    assert by_rate[0] > 2 * by_rate[-1]
    by_number = [waiting(card, number, **fields) for number in (2, 4, 8)]
    assert by_number == sorted(by_number)


@pytest.mark.parametrize("gpu", ["A100-SXM4-80GB", "L40S"])
def test_sharding_the_weights_sends_more_than_sharding_the_gradients(gpu: str) -> None:
    assert waiting(gpu, 8, **zero(3)) > waiting(gpu, 8, **zero(2)) > 0
    fsdp = [waiting(gpu, 8, **FULL_BF16, fsdp=strategy) for strategy in ("full_shard", "shard_grad_op")]
    assert fsdp[0] > fsdp[1]


def test_sharded_states_are_updated_by_all_gpus_together() -> None:
    model, job = prepared(LLAMA_8B, **zero(2), num_gpus=8)
    alone, shared = (
        step_time(model, each, find_gpu("H100 SXM"), Batch.of(1, 512))
        for each in (replace(job, num_gpus=1, sharding=replace(job.sharding, num_gpus=1)), job)
    )
    assert alone is not None
    assert shared is not None
    assert shared.by_group_seconds["optimizer"] == pytest.approx(alone.by_group_seconds["optimizer"] / 8)


def test_every_accumulation_step_gathers_sharded_weights_again() -> None:
    once, four = (waiting("L40S", 8, **zero(3), gradient_accumulation_steps=number) for number in (1, 4))
    assert four == pytest.approx(4 * once, rel=1e-3)  # the optimizer's share hides a little
    plain = [waiting("L40S", 8, **FULL_BF16, gradient_accumulation_steps=number) for number in (1, 4)]
    assert plain[1] == pytest.approx(plain[0], rel=0.25)  # once a step; the last backward hides a little more or less


@pytest.mark.parametrize(
    ("changes", "rate", "is_assumed"),
    [
        pytest.param({"nvlink_bytes_per_second": 1e11}, 1e11, False, id="own links"),
        pytest.param({}, 63e9, False, id="its data sheet"),
        pytest.param({"pcie_bytes_per_second": None}, 63e9, True, id="its generation"),
        pytest.param({"pcie_bytes_per_second": None, "architecture": "?"}, None, False, id="unknown"),
        pytest.param({"pcie_bytes_per_second": None, "vendor": "AMD"}, None, False, id="another vendor"),
    ],
)
def test_a_link_is_known_or_of_the_generation_or_not_known(
    changes: dict[str, Any], rate: float | None, is_assumed: bool
) -> None:
    card = find_gpu("H100 PCIe").model_copy(update=changes)
    link = link_of(card)
    assert (link.bytes_per_second if link else None) == rate
    assert bool(link and link.is_assumed) is is_assumed
    assert (waiting(card, 8, **FULL_BF16) > 0) is (rate is not None)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), "all-linear"], ids=["two", "all"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_liger_and_16_bit_weights_each_make_a_step_faster(method: str, targets: Any) -> None:
    """Under autocast fp32 weights cost casts that 16-bit ones do not, adapters or not; Liger moves fewer bytes in both."""
    fields = {"model": "meta-llama/Llama-2-7b-hf", "method": method, "bf16": True, "max_length": 1024, "framework": "trl"}
    if method == "lora":
        fields["lora_target_modules"] = targets
    seconds = {}
    for dtype in ("float32", "bfloat16"):
        for liger in (False, True):
            job = {**fields, "dtype": dtype, "use_liger_kernel": liger, "gpu": "A100-SXM4-80GB", "lengths": {"fixed": 1024}}
            seconds[dtype, liger] = estimate(job).step_seconds or 0.0
    assert seconds["bfloat16", True] < seconds["bfloat16", False] < seconds["float32", False]
    assert seconds["bfloat16", True] < seconds["float32", True] < seconds["float32", False]


def test_an_unknown_cache_does_not_make_the_newer_card_slower() -> None:
    """B300: 7.75 TB/s and 1,769 TFLOP/s measured, B200: 7.7 and 1,745; its cache is on no sheet."""
    fields: dict[str, Any] = {"method": "lora", "dtype": "bfloat16"}
    assert find_gpu("B300").l2_cache_bytes is None
    assert timed(LLAMA, "B300", 8, 512, **fields).step_seconds < timed(LLAMA, "B200", 8, 512, **fields).step_seconds


def test_packing_without_a_kernel_of_variable_length_pays_for_what_it_masks() -> None:
    """transformers 5.24 gives ``sdpa`` and ``eager`` one dense mask of the flattened micro-batch (masking_utils.py)."""
    job: dict[str, Any] = {
        "model": "meta-llama/Llama-3.1-8B", "gpu": "A100-SXM4-80GB", "framework": "trl", "method": "lora", "bf16": True,
        "dtype": "bfloat16", "packing": True, "max_length": 4096, "lengths": {"mean": 700, "max": 4096},
        "num_samples": 10_000, "per_device_train_batch_size": 8,
    }  # fmt: skip
    flash, sdpa = (estimate(job, attn_implementation=name) for name in ("flash_attention_2", "sdpa"))
    tokens = flash.num_tokens_per_step
    assert flash.step and sdpa.step and flash.mfu and sdpa.mfu and tokens  # noqa: PT018
    # two products forward, as many again, five backward: 4.5 times 4 FLOPs a pair, width and layer, nothing skipped
    at_least = 18 * tokens**2 * 4096 * 32 / 312e12
    assert sdpa.step.by_group_seconds["attention_scores"] > at_least > 10 * flash.step.by_group_seconds["attention_scores"]
    assert sdpa.model_flops_per_step == pytest.approx(flash.model_flops_per_step)  # MFU sees what was needed
    assert sdpa.mfu < flash.mfu
    row = 8 * 4096
    more = sdpa.memory.peak_device_bytes - flash.memory.peak_device_bytes
    assert more > 3 * row**2  # the mask of the row, and the bias that the kernel makes of it
    assert [any("masked" in warning for warning in each.warnings) for each in (flash, sdpa)] == [False, True]
    best = optimize({**job, "attn_implementation": "sdpa"}, free=("attn_implementation",)).best
    assert best.settings["attn_implementation"] == "flash_attention_2"


def test_a_mask_of_padding_costs_sdpa_the_upper_half_and_flash_nothing() -> None:
    seconds = {}
    for attention in ("sdpa", "flash_attention_2"):
        for padding in (0.0, 1000.0):
            model, job = prepared(LLAMA, method="full", dtype="bfloat16", attn_implementation=attention)
            batch = replace(Batch.of(8, 2048), num_padding_tokens=padding)
            step = step_time(model, job, find_gpu("A100-SXM4-80GB"), batch)
            assert step is not None
            seconds[attention, padding > 0] = step.by_group_seconds["attention_scores"]
    assert seconds["sdpa", True] == pytest.approx(2 * seconds["sdpa", False])
    assert seconds["flash_attention_2", True] == seconds["flash_attention_2", False] == seconds["sdpa", False]
