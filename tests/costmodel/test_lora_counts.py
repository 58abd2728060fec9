"""Trainable parameters against real peft on the meta device: the same targets on the same small models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from real_modules import TINY_CONFIGS, build

from costmodel.adapters import plan_adapters
from costmodel.defaults import resolve
from costmodel.errors import CostModelError
from costmodel.hf_config import model_spec_from_config
from costmodel.model_catalog import find_model_config
from costmodel.specs import parse_job

ALL = {"target_modules": "all-linear"}
QUERY_VALUE = {"target_modules": ["q_proj", "v_proj"]}
# fmt: off
CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, ALL) for family in (
        "llama", "gpt2", "opt", "phi3", "gemma4_text", "deepseek_v2", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next",
        "gpt_oss", "glm4_moe", "hunyuan_v1_moe", "dbrx", "jetmoe", "jamba", "granitemoehybrid", "minimax_m2", "llama4_text",
    )),
    *((family, {**ALL, "use_dora": True}) for family in ("llama", "gpt2", "gpt_oss")),
    *((family, QUERY_VALUE) for family in ("llama", "mixtral", "nemotron_h")),
    ("gpt_neox", {"target_modules": ["query_key_value", "dense_4h_to_h"]}),
    ("falcon", {"target_modules": ["query_key_value"]}),
    ("mixtral", {"target_modules": ["w1", "w2", "w3", "gate"]}),
    ("mixtral", {"target_modules": ["w2"]}),
    ("qwen3_moe", {"target_modules": ["gate_proj", "up_proj", "down_proj"]}),
    ("deepseek_v2", {"target_modules": ["q_b_proj", "kv_b_proj", "o_proj"]}),
    ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    ("qwen2_moe", {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}),
    ("dbrx", {"target_modules": [], "target_parameters": ["experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2"]}),
    ("llama", {**QUERY_VALUE, "modules_to_save": ["embed_tokens", "lm_head"]}),
    ("qwen3", {**QUERY_VALUE, "modules_to_save": ["embed_tokens", "lm_head"]}),  # tied: two copies
    ("llama", {**QUERY_VALUE, "modules_to_save": ["norm"]}),
    ("llama", {**ALL, "modules_to_save": ["o_proj"]}),
    ("llama", {"target_modules": ["q_proj", "lm_head"]}),
    ("llama", {"target_modules": ["embed_tokens"]}),
    ("llama", {"target_modules": r".*\.layers\.(0|2)\..*\.(q_proj|up_proj)"}),
    ("gpt2", {"target_modules": r"transformer\.h\.1\.attn\.c_attn"}),
    ("mixtral", {"target_modules": r".*\.experts\.(w1|w2|w3)"}),
    ("qwen3_moe", {"target_modules": r".*(q_proj|mlp\.experts\.(gate_proj|up_proj|down_proj))"}),
]
# fmt: on


def _trainable(config: dict[str, Any], fields: dict[str, Any]) -> int:
    names = {"target_modules", "target_parameters", "modules_to_save"}
    job = {f"lora_{name}" if name in names else name: value for name, value in fields.items()}
    model = model_spec_from_config(config)
    resolved, _ = resolve(parse_job({"model": config, "method": "lora", "lora_r": 4, "max_length": 64, **job}), model)
    return plan_adapters(model, resolved).num_params


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "fields"), CASES, ids=lambda value: str(value))
def test_trainable_parameters_equal_those_of_peft(family: str, fields: dict[str, Any]) -> None:
    import peft
    import torch

    config = TINY_CONFIGS[family]
    with torch.device("meta"):
        adapted = peft.get_peft_model(build(config), peft.LoraConfig(r=4, **copy.deepcopy(fields)))
    real = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert _trainable(config, fields) == real


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mixtral", {"target_modules": ["w1"]}),  # gate and up are one stack
        ("qwen3_moe", {**ALL, "use_dora": True}),  # no DoRA on stacked parameters
        ("qwen2_moe", {"target_modules": ["gate"]}),  # the router is no linear
        ("mamba", ALL),  # fused kernels read out_proj
        ("llama", {"target_modules": ["c_attn"]}),  # nothing matches
    ],
    ids=lambda value: str(value),
)
def test_what_peft_refuses_is_refused(family: str, fields: dict[str, Any]) -> None:
    import peft
    import torch

    config = TINY_CONFIGS[family]
    with torch.device("meta"), pytest.raises(ValueError):  # noqa: PT011 (each of them has its own words)
        peft.get_peft_model(build(config), peft.LoraConfig(r=4, **copy.deepcopy(fields)))
    with pytest.raises(CostModelError):
        _trainable(config, fields)


@pytest.mark.parametrize(
    ("model", "fields", "trainable"),
    [
        # litgpt and peft print these
        ("meta-llama/Llama-2-7b-hf", {"lora_r": 8, "lora_target_modules": ["q_proj", "v_proj"]}, 4_194_304),
        ("meta-llama/Llama-3.1-8B", {"lora_r": 16, "lora_target_modules": "all-linear"}, 41_943_040),
        # transformers 4: one adapter for each of three linears of each expert, router and attention not among the targets
        (
            "mistralai/Mixtral-8x7B-v0.1",
            {"lora_r": 16, "lora_target_modules": ["w1", "w2", "w3"], "framework_version": "4.40"},
            32 * 8 * 3 * 16 * (4096 + 14336),
        ),
    ],
)
def test_published_counts(model: str, fields: dict[str, Any], trainable: int) -> None:
    spec = model_spec_from_config(find_model_config(model))
    job, _ = resolve(parse_job({"model": model, "method": "lora", "max_length": 64, **fields}), spec)
    assert plan_adapters(spec, job).num_params == trainable
