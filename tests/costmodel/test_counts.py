"""Parameters, total and active: against numbers from the real modules, and against the modules themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from real_modules import TINY_CONFIGS, build

from costmodel.errors import CostModelError, UnsupportedModelError
from costmodel.families import FAMILIES
from costmodel.hf_config import model_spec_from_config
from costmodel.model_catalog import find_model_config

_GOLDEN = Path(__file__).parents[1] / "golden" / "model_counts.jsonl"
GOLDEN = [json.loads(line) for line in _GOLDEN.read_text().splitlines()]
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32}


def _config(row: dict[str, Any]) -> dict[str, Any]:
    return {**find_model_config(row["model"]), **row["overrides"]}


def _name(row: dict[str, Any]) -> str:
    changed = ",".join(f"{name}={value}" for name, value in row["overrides"].items() if not isinstance(value, list))
    return f"{row['model']}[{changed}]" if changed else row["model"]


def test_golden_holds_every_catalogued_model_and_forty_changed_ones() -> None:
    catalogued = [row for row in GOLDEN if not row["overrides"]]
    assert len({row["model"] for row in catalogued}) == 160
    assert len(GOLDEN) - len(catalogued) == 40


@pytest.mark.parametrize("row", GOLDEN, ids=_name)
def test_total_and_active_parameters(row: dict[str, Any]) -> None:
    model = model_spec_from_config(_config(row))
    assert (model.num_params, model.num_active_params) == (row["num_params"], row["num_active_params"])


@pytest.mark.parametrize("config", TINY_CONFIGS.values(), ids=TINY_CONFIGS)
def test_named_parameters_sum_to_the_count(config: dict[str, Any]) -> None:
    model = model_spec_from_config(config)
    named = list(model.parameters())
    assert len({name for name, _ in named}) == len(named)
    assert sum(size for _, size in named) == model.num_params


@pytest.mark.parametrize("config", TINY_CONFIGS.values(), ids=TINY_CONFIGS)
def test_named_parameters_are_those_of_the_real_modules(config: dict[str, Any]) -> None:
    real = {name: parameter.numel() for name, parameter in build(config).named_parameters()}
    assert dict(model_spec_from_config(config).parameters()) == real


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in GOLDEN if row["source"] == "modules"], ids=_name)
def test_golden_counts_are_those_of_the_real_modules(row: dict[str, Any]) -> None:
    config = _config(row)
    real = {name: parameter.numel() for name, parameter in build(config).named_parameters()}
    assert sum(real.values()) == row["num_params"]
    assert dict(model_spec_from_config(config).parameters()) == real


def test_every_family_of_the_catalogue_is_known() -> None:
    assert {find_model_config(row["model"])["model_type"] for row in GOLDEN} - {"kimi_k2"} <= set(FAMILIES)


def test_class_defaults_fill_what_a_config_leaves_out() -> None:
    # LlamaForCausalLM(LlamaConfig()) on the meta device, transformers 5.24.0: Llama-2-7B
    assert model_spec_from_config(LLAMA).num_params == 6_738_415_616


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_class_defaults_are_those_of_the_config_class(model_type: str) -> None:
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        assert model_type in {"baichuan", "blackmamba", "deepseek", "internlm2", "qwen"}  # remote code
        return
    if model_type in {"qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}:
        return  # no causal model of their own: test_towers.py
    defaults = transformers.CONFIG_MAPPING[model_type]()
    given: dict[str, Any] = {"model_type": model_type}
    # what a class leaves open although it needs it: its own defaults build nothing
    given |= {
        "dbrx": {"attn_config": {"kv_n_heads": 1, "rope_theta": 10_000.0}},
        "deepseek_v2": {"num_experts_per_tok": 6},
        "dots1": {
            "num_experts_per_tok": 6,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "intermediate_size": 128,
        },
        "hunyuan_v1_dense": {"head_dim": 128},
        "hunyuan_v1_moe": {"head_dim": 128},
        "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
        "ministral": {"head_dim": 128},
        "nemotron": {"head_dim": 128, "num_key_value_heads": 48},
    }.get(model_type, {})
    real = build(given)
    given |= {"hidden_size": defaults.hidden_size, "num_hidden_layers": defaults.num_hidden_layers}
    counted = {name: size for name, size in model_spec_from_config(given).parameters() if size}
    assert counted == {name: parameter.numel() for name, parameter in real.named_parameters() if parameter.numel()}


def test_a_multimodal_config_is_its_language_model() -> None:
    text = find_model_config("google/gemma-3-12b-it")
    wrapped = {"model_type": "gemma3", "vision_config": {"hidden_size": 1152}, "text_config": text}
    assert model_spec_from_config(wrapped).num_params == model_spec_from_config(text).num_params
    unnamed = {name: value for name, value in text.items() if name != "model_type"}
    assert model_spec_from_config({**wrapped, "text_config": unnamed}).family == "gemma3_text"


def test_published_bytes() -> None:
    # openai/gpt-oss-120b as stored (MXFP4 experts): 65,248,815,744 bytes (hf-mem issue 60)
    assert model_spec_from_config(find_model_config("openai/gpt-oss-120b")).checkpoint_bytes == 65_248_815_744
    llama = model_spec_from_config(find_model_config("meta-llama/Llama-3.1-8B"))
    assert llama.checkpoint_bytes == 2 * 8_030_261_248


def test_head_and_embedding_of_gpt2_are_one() -> None:
    # transformers issue 14960: the tied head (38,597,376) must not be added
    model = model_spec_from_config(find_model_config("openai-community/gpt2"))
    assert (model.num_params, model.head_params, model.embedding_params) == (124_439_808, 0, 38_597_376)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "no model_type"),
        ({"model_type": "llama", "num_hidden_layers": 2}, "lacks hidden_size"),
        ({**LLAMA, "hidden_size": 0}, "hidden_size must be a positive whole number, got 0"),
        ({**LLAMA, "hidden_size": True}, "hidden_size must be a positive whole number, got True"),
        ({**LLAMA, "num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple of num_key_value_heads 5"),
        ({**LLAMA, "model_type": "mixtral", "num_experts_per_tok": 9}, "above the 8 experts"),
        (
            {**LLAMA, "model_type": "gemma2", "layer_types": ["full_attention"]},
            "layer_types names 1 layers of 32; give one entry for each layer",
        ),
    ],
)
def test_what_cannot_be_counted_is_said(config: dict[str, Any], says: str) -> None:
    with pytest.raises(CostModelError, match=says):
        model_spec_from_config(config)


def test_an_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'llama5' is not modelled yet; nearest: llama"):
        model_spec_from_config({**LLAMA, "model_type": "llama5"})
