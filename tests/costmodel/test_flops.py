"""FLOPs against torch's own counter on the real modules, and against the traces of full-size ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_modules import TINY_CONFIGS, build, runs_eager, without_dropout

from costmodel.defaults import ResolvedJob, resolve
from costmodel.hf_config import model_spec_from_config
from costmodel.model_catalog import find_model_config
from costmodel.model_spec import ModelSpec
from costmodel.specs import parse_job
from costmodel.workload import GROUPS, Batch, Flops, attention_kernel, flops, hardware_flops, model_flops

TRACES = [json.loads(line) for line in (Path(__file__).parents[1] / "golden" / "traces.jsonl").read_text().splitlines()]
TRACED = [row for row in TRACES if not row["skip"]]

QUICK = ("llama", "gpt_neox", "qwen2_moe", "deepseek_v2")
CHUNKED = {"granitemoehybrid", "nemotron_h", "qwen3_next", "qwen3_5_text", "kimi_linear", "minimax"}
SCANS = CHUNKED | {"mamba", "jamba", "lfm2_moe"}
NO_LORA_ON_OUTPUT = {"mamba", "nemotron_h"}  # peft refuses it
RUN_BY_NAME = {"llama4_text", "phimoe"}  # peft's all-linear takes the router, which then cannot run
NO_CHECKPOINTING = {"jetmoe"}


def _job(config: dict[str, Any], sequence: int, **fields: Any) -> tuple[ModelSpec, ResolvedJob]:
    model = model_spec_from_config(config)
    kernel = "eager" if runs_eager(config) else "sdpa"
    job = {"model": config, "dtype": "bfloat16", "bf16": False, "max_length": sequence, "attn_implementation": kernel}
    return model, resolve(parse_job({**job, **fields}), model)[0]


def _counter() -> Any:
    """A FlopCounterMode that knows what torch's lacks: grouped products, the CPU's flash kernel, depthwise gradients."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    aten = torch.ops.aten

    def grouped(left: Any, right: Any, *_: Any, **__: Any) -> int:
        return 2 * left[0] * left[1] * right[-1]

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        batch, heads, length, width = query
        return 2 * batch * heads * length * key[2] * (width + value[-1])

    def attention_backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
        batch, heads, length, width = query
        return 2 * batch * heads * length * key[2] * (3 * width + 2 * value[-1])

    def convolution_backward(gradient: Any, given: Any, weight: Any, *_: Any, **__: Any) -> int:
        return 2 * 2 * gradient[0] * gradient[1] * given[2] * weight[1] * weight[2]

    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten._grouped_mm: grouped,
            aten._scaled_dot_product_flash_attention_for_cpu: attention,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
            aten.convolution_backward: convolution_backward,
        },
    )


def _measured(config: dict[str, Any], sequence: int, targets: Any, checkpointing: bool) -> tuple[int, int]:
    """(forward, backward and recompute) FLOPs of one step of two sequences."""
    import peft
    import torch

    model = build(config, device="cpu", **({"attn_implementation": "eager"} if runs_eager(config) else {}))
    if targets:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if targets:
            model.enable_input_require_grads()
    tokens = torch.randint(3, config["vocab_size"], (2, sequence))
    with _counter() as forward:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    with _counter() as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def _compare(family: str, method: str, checkpointing: bool) -> None:
    config = TINY_CONFIGS[family]
    # chunks of a scan are whole, and its first and last chunk, which do less, weigh little
    sequence = 192 if family in CHUNKED else 64
    targets: Any = None
    if method == "lora":
        by_name = family in NO_LORA_ON_OUTPUT | RUN_BY_NAME
        targets = ["q_proj", "k_proj", "o_proj", "in_proj", "x_proj"] if by_name else "all-linear"
    forward, backward = _measured(config, sequence, targets, checkpointing)
    fields = {"lora_r": 4, "lora_target_modules": targets} if targets else {}
    model, job = _job(without_dropout(config), sequence, method=method, gradient_checkpointing=checkpointing, **fields)
    counted = flops(model, job, Batch.of(2, sequence))
    tolerance = 0.01 if family in SCANS else 1e-9
    assert counted.forward_total == pytest.approx(forward, rel=tolerance)
    assert counted.backward_total + counted.recompute_total == pytest.approx(backward, rel=tolerance)


SETTINGS = [
    pytest.param("full", False, id="full"),
    pytest.param("full", True, id="full-checkpointed"),
    pytest.param("lora", False, id="lora"),
    pytest.param("lora", True, id="lora-checkpointed"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "checkpointing"), SETTINGS[1:3])
@pytest.mark.parametrize("family", QUICK)
def test_flops_equal_those_of_the_real_modules(family: str, method: str, checkpointing: bool) -> None:
    _compare(family, method, checkpointing)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "checkpointing"), SETTINGS)
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_flops_of_every_architecture(family: str, method: str, checkpointing: bool) -> None:
    if checkpointing and family in NO_CHECKPOINTING:
        pytest.skip("the real module has no gradient checkpointing")
    _compare(family, method, checkpointing)


@pytest.mark.filterwarnings("ignore")
def test_nothing_flows_back_below_the_first_adapter() -> None:
    """Adapters on the last MLP alone: frozen layers below it have a forward and no backward (calflops issue 30)."""
    import peft
    import torch

    config = TINY_CONFIGS["llama"]
    last = config["num_hidden_layers"] - 1
    targets = rf".*\.layers\.{last}\.mlp\.down_proj"
    real = peft.get_peft_model(build(config, device="cpu"), peft.LoraConfig(r=4, target_modules=targets))
    tokens = torch.randint(3, config["vocab_size"], (2, 64))
    loss = real(input_ids=tokens, labels=tokens, use_cache=False).loss
    with _counter() as backward:
        loss.backward()
    model, job = _job(config, 64, method="lora", lora_r=4, lora_target_modules=targets)
    assert flops(model, job, Batch.of(2, 64)).backward_total == backward.get_total_flops()


def _traced(row: dict[str, Any]) -> Flops:
    model = model_spec_from_config(find_model_config(row["job"]["model"]), name=row["job"]["model"])
    job, _ = resolve(parse_job(row["job"]), model)
    return flops(model, job, Batch.of(job.per_device_train_batch_size, job.max_length))


@pytest.mark.parametrize("row", TRACED, ids=lambda row: row["name"])
def test_flops_equal_those_of_the_trace(row: dict[str, Any]) -> None:
    counted = _traced(row)
    # the variants force one kernel onto every row; the count of a backward differs between kernels
    if "math" in row["name"] or "eager" in row["name"]:
        pytest.skip("another attention kernel than the job's")
    assert counted.forward_total == row["forward_flops"]
    assert counted.backward_total == row["backward_flops"]
    assert counted.recompute_total == row["recompute_flops"]


@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(["llama", "qwen2_moe", "gemma3_text", "mamba", "jetmoe", "llama4_text", "opt"]),
    method=st.sampled_from(["full", "lora"]),
    checkpointing=st.booleans(),
    size=st.integers(1, 8),
    sequence=st.integers(8, 512),
)
def test_groups_sum_and_bounds_hold(family: str, method: str, checkpointing: bool, size: int, sequence: int) -> None:
    targets = ["q_proj", "o_proj", "kv_proj", "in_proj"]
    fields = {"lora_target_modules": targets} if method == "lora" else {}
    model, job = _job(TINY_CONFIGS[family], 512, method=method, gradient_checkpointing=checkpointing, **fields)
    batch = Batch.of(size, sequence)
    counted = flops(model, job, batch)
    for part in (counted.forward, counted.backward, counted.recompute):
        assert set(part) == set(GROUPS)
        assert min(part.values()) >= 0
    assert 0 <= counted.recompute_total <= counted.forward_total
    assert counted.recompute_total == 0 or checkpointing
    total = counted.forward_total + counted.backward_total + counted.recompute_total
    scores = sum(part["attention_scores"] for part in (counted.forward, counted.backward, counted.recompute))
    # a causal fused kernel computes half of the square, and all of it under the mask of a window that the rows reach
    skip = [
        attention_kernel(job, layer) == "fused" and (layer.attention.sliding_window or sequence + 1) > sequence
        for layer, _ in model.layers
        if layer.attention.num_heads
    ]
    skipped = 0.5 * scores if all(skip) else 0.0 if not any(skip) else None
    if skipped is not None:
        assert hardware_flops(model, job, batch) == pytest.approx(total - skipped)
    assert total - 0.5 * scores <= hardware_flops(model, job, batch) * (1 + 1e-12) <= total * (1 + 1e-9)
    assert 0 < model_flops(model, job, batch) <= total


def test_a_frozen_base_costs_two_thirds() -> None:
    """Llama-3.x-70B LoRA: 175,636,480 trained of 70.6 B: factor (1 + 1 + 0.0025) / 3, not 1 (Automodel issue 786)."""
    model = model_spec_from_config(find_model_config("meta-llama/Llama-3.1-70B"))
    batch = Batch.of(1, 16)
    spent = {}
    for method in ("full", "lora"):
        fields: dict[str, Any] = {"model": "x", "method": method, "max_length": 16, "dtype": "bfloat16", "bf16": False}
        if method == "lora":
            fields |= {"lora_r": 16, "lora_target_modules": "all-linear"}
        job, _ = resolve(parse_job(fields), model)
        spent[method] = model_flops(model, job, batch)
    assert spent["lora"] / spent["full"] == pytest.approx(0.6675, abs=0.003)


def test_a_tied_head_costs_as_much_as_an_untied_one() -> None:
    # trl issue 6708: the head is 2·V·h a token, the look-up 0
    config = TINY_CONFIGS["llama"]
    spent = []
    for tied in (False, True):
        model, job = _job({**config, "tie_word_embeddings": tied}, 64, method="full")
        spent.append(flops(model, job, Batch.of(1, 64)).forward_total)
    assert spent[0] == spent[1]


def test_a_sliding_window_bounds_what_is_needed_not_what_a_mask_hides() -> None:
    config = {**TINY_CONFIGS["gemma3_text"], "sliding_window": 32}
    batch = Batch.of(1, 256)
    model, masked = _job(config, 256, method="full")
    _, skipped = _job(config, 256, method="full", attn_implementation="flash_attention_2")
    assert model_flops(model, masked, batch) == model_flops(model, skipped, batch)
    assert flops(model, skipped, batch).forward_total < flops(model, masked, batch).forward_total
