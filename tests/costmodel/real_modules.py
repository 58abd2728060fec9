"""The real modules of transformers, to hold the counted ones against: on the meta device, or tiny on the CPU.

``tiny_configs.json`` holds one small config for each architecture (hidden size 64, 2 to 8 layers), in the shape of a
published one of its family.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TINY_CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("tiny_configs.json").read_text())

NO_SDPA = {"bloom", "mpt", "gemma2", "gpt_oss"}
"""Families that transformers runs with eager attention alone (flash apart)."""

_EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
_NO_GROUPED_PRODUCT = {"llama4_text", "dbrx", "jetmoe"}
_NOT_FOR_THE_CLASS = {"model_type", "architectures", "quantization_config", "torch_dtype", "dtype"}


def runs_eager(config: Mapping[str, Any]) -> bool:
    """Whether the test compares the eager form: where there is no other, and latent attention (no fused CPU kernel)."""
    return config["model_type"] in NO_SDPA or "kv_lora_rank" in config


def build(config: Mapping[str, Any], *, device: str = "meta", **changes: Any) -> Any:
    """The causal language model of a config, its weights not initialised to anything in particular."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    model_type = "deepseek_v3" if config["model_type"] == "kimi_k2" else config["model_type"]
    fields = {name: value for name, value in config.items() if name not in _NOT_FOR_THE_CLASS}
    of_class = transformers.CONFIG_MAPPING[model_type](**fields)
    if _EXPERTS.intersection(fields) and model_type not in _NO_GROUPED_PRODUCT:
        of_class._experts_implementation = "grouped_mm"
    if device == "meta":
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(of_class)
    for name in ("resid_pdrop", "attn_pdrop", "embd_pdrop", "dropout"):
        if hasattr(of_class, name):
            setattr(of_class, name, 0.0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(of_class, dtype=torch.bfloat16, **changes)
    return model.train()


def without_dropout(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config as our model reads it, with the dropouts that :func:`build` switches off."""
    return {**config, "resid_pdrop": 0.0, "dropout": 0.0}
