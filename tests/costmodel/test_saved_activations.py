"""Bytes that a layer keeps for its backward, against what autograd saves in the real modules on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from real_modules import TINY_CONFIGS, build, runs_eager, without_dropout

from costmodel.adapters import plan_adapters
from costmodel.defaults import resolve
from costmodel.held_memory import element_bytes
from costmodel.hf_config import model_spec_from_config
from costmodel.layer_kernels import Rows
from costmodel.saved_activations import layer_bytes
from costmodel.specs import parse_job

SEQUENCE = 64
CHECKED = [name for name, config in TINY_CONFIGS.items() if model_spec_from_config(config).activations_checked]
LISTS = ("layer_types", "moe_topk", "no_rope_layers")
SETTINGS = [
    pytest.param(None, "float32", id="full"),
    pytest.param("all-linear", "float32", id="lora"),
    pytest.param("all-linear", "bfloat16", id="lora-16-bit-adapters"),
]
# Of a tiny layer, whose vectors and indices weigh 64 times what they do in a published one. The CPU's layer norm keeps mean
# and deviation in 16 bit, a GPU's in 32: 4 bytes a norm and token.
TOLERANCE = 0.025


def _doubled(config: dict[str, Any]) -> dict[str, Any]:
    """The same model with twice the layers: the difference is layers alone."""
    key = next(name for name in ("num_hidden_layers", "n_layer", "n_layers") if name in config)
    lists = {name: config[name] * 2 for name in LISTS if isinstance(config.get(name), list)}
    return {**config, **lists, key: 2 * config[key]}


def _saved_bytes(config: dict[str, Any], targets: str | None, adapter_dtype: str) -> int:
    """Bytes of the storages that autograd saves in one forward, weights aside."""
    import peft
    import torch

    model = build(config, device="cpu", **({"attn_implementation": "eager"} if runs_eager(config) else {}))
    if targets:
        lora = peft.LoraConfig(r=4, target_modules=targets)
        model = peft.get_peft_model(model, lora, autocast_adapter_dtype=adapter_dtype == "float32")
        model.enable_input_require_grads()
    weights = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}
    alive = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.numel():
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no address is used twice
        return tensor

    tokens = torch.randint(3, config["vocab_size"], (1, SEQUENCE))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    assert loss.requires_grad
    return sum(saved.values())


def _counted_bytes(config: dict[str, Any], targets: str | None, adapter_dtype: str) -> float:
    model = model_spec_from_config(without_dropout(config))
    job = {
        "model": config,
        "method": "lora" if targets else "full",
        "dtype": "bfloat16",
        "bf16": False,
        "max_length": SEQUENCE,
        "attn_implementation": "eager" if runs_eager(config) else "sdpa",
    }
    if targets:
        job |= {"lora_r": 4, "lora_target_modules": targets, "adapter_dtype": adapter_dtype}
    resolved, _ = resolve(parse_job(job), model)
    total = 0.0
    for layer, adapted, count in plan_adapters(model, resolved).runs:
        each = layer_bytes(model, layer, adapted, resolved, element_bytes(resolved), Rows())
        total += count * (each.per_token * SEQUENCE + each.per_pair * SEQUENCE**2 + each.fixed)
    return total


def test_what_is_checked() -> None:
    assert len(CHECKED) >= 28
    assert {"mamba", "jamba", "qwen3_next", "gemma4_text", "deepseek_v32"}.isdisjoint(CHECKED)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("targets", "adapter_dtype"), SETTINGS)
@pytest.mark.parametrize("family", CHECKED)
def test_layers_keep_what_autograd_saves(family: str, targets: str | None, adapter_dtype: str) -> None:
    if targets and family in {"llama4_text", "phimoe"}:
        pytest.skip("peft's all-linear takes the router, which then cannot run")
    config = TINY_CONFIGS[family]
    larger = _doubled(config)
    real = _saved_bytes(larger, targets, adapter_dtype) - _saved_bytes(config, targets, adapter_dtype)
    counted = _counted_bytes(larger, targets, adapter_dtype) - _counted_bytes(config, targets, adapter_dtype)
    assert counted == pytest.approx(real, rel=TOLERANCE)
