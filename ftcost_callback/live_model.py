"""What a live model is: logical parameter counts, quantisation, adapters, dtypes. Reads attributes only."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from costmodel.errors import CostModelError
from costmodel.towers import TOWER_CONFIGS, TOWER_PARTS

_WRAPPERS: Final = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
}
_EXPERTS_PER_TOKEN_FIELDS: Final = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
)
_TABLE_OF_LAYERS: Final = "embed_tokens_per_layer"  # Gemma 3n and 4: of each token, some numbers for each layer
_IN_A_LAYER: Final = re.compile(r"(?:[a-z_]+\.)+\d+\.(.+)")  # model.layers.7.self_attn.q_proj
_PARTS_IN_A_LAYER: Final = re.compile(r"((?:[a-z_]\w*\.)*[a-z_]\w*)\.(\d+)\.(.+)")

# Full fine-tuning with this share of the weights frozen is another job than the one that is modelled.
_MAX_FROZEN_SHARE: Final = 0.01


def unwrapped(model: Any) -> Any:
    """The Hugging Face or PEFT model inside torch's wrappers."""
    while (inner := _WRAPPERS.get(type(model).__name__)) is not None and hasattr(model, inner):
        model = getattr(model, inner)
    return model


# --- counts -----------------------------------------------------------------------------------------------------------


def logical_numel(parameter: Any) -> int:
    """Weights that ``parameter`` stands for, also where it is packed (4 bit) or sharded away (DeepSpeed ZeRO-3)."""
    if hasattr(parameter, "ds_numel"):
        return int(parameter.ds_numel)
    shape = getattr(getattr(parameter, "quant_state", None), "shape", None)
    if shape is not None:
        return math.prod(shape)
    if type(parameter).__name__ == "Params4bit":  # packed on loading; not yet quantised on the meta device or the CPU
        packed = not parameter.is_floating_point() or getattr(parameter, "bnb_quantized", False)
        return int(parameter.numel() * parameter.element_size() * 2 if packed else parameter.numel())
    return int(parameter.numel())


def model_facts(model: Any) -> dict[str, Any]:
    """Logical counts and names of the live model.

    ``num_active_params`` are the weights that work on one token of text: routed experts by their top-k share, look-up tables
    (an input embedding that is not also the head) and encoders of images and sound left out. Absent for a MoE whose experts
    are not recognised.
    """
    model = unwrapped(model)
    config = getattr(model, "config", None)
    counts = {name: logical_numel(parameter) for name, parameter in model.named_parameters()}  # tied ones once
    packed = _packed_buffer_weights(model)
    num_params = sum(counts.values()) + packed
    facts: dict[str, Any] = {
        "class": type(_base_model(model)).__name__,
        "num_params": num_params,
        "num_trainable_params": sum(counts[name] for name, parameter in model.named_parameters() if parameter.requires_grad),
        "num_active_params": _num_active_params(model, counts, num_params),
    }
    for name in ("model_type", "_name_or_path"):
        if getattr(config, name, None):
            facts[name.lstrip("_")] = str(getattr(config, name))
    return {name: value for name, value in facts.items() if value is not None}


def _packed_buffer_weights(model: Any) -> int:
    """GPTQ and AWQ keep their weights in integer buffers, several weights in one number."""
    bits = _field(_quantization_config(model), "bits")
    if not bits:
        return 0
    return sum(
        buffer.numel() * buffer.element_size() * 8 // int(bits)
        for name, buffer in model.named_buffers()
        if name.rpartition(".")[2] == "qweight"
    )


def _num_active_params(model: Any, counts: Mapping[str, int], num_params: int) -> int | None:
    idle = _lookup_only_params(model) + _tower_params(model, counts)
    active = float(num_params - idle)
    for prefix, num_experts, top_k in _expert_groups(model):
        if top_k is None:
            return None
        routed = sum(count for name, count in counts.items() if name.startswith(prefix))
        active -= routed * (1 - top_k / num_experts)
    if active == num_params - idle and has_routed_experts(model):
        return None
    return round(active)


def _tower_params(model: Any, counts: Mapping[str, int]) -> int:
    """Encoders of images and sound beside a language model, and what leads from them there."""
    config = getattr(model, "config", None)
    if not any(getattr(config, name, None) is not None for name in TOWER_CONFIGS):
        return 0
    return sum(count for name, count in counts.items() if not TOWER_PARTS.isdisjoint(name.split(".")))


def _lookup_only_params(model: Any) -> int:
    """Weights of an input embedding that is not the output head as well, and of the tables of Gemma's layers."""
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return 0
    tables = [module for name, module in model.named_modules() if name.rpartition(".")[2] == _TABLE_OF_LAYERS]
    weights = [getattr(each, "weight", None) for each in (embedding, *tables)]
    return sum(logical_numel(each) for each in weights if each is not None and each is not getattr(head, "weight", None))


def _expert_groups(model: Any) -> Iterator[tuple[str, int, int | None]]:
    """(name prefix of all its parameters, experts, experts a token visits) of each MoE layer."""
    from ftcost_callback.expert_sites import find_expert_sites

    top_k = _experts_per_token(getattr(model, "config", None))
    sites = [(name, site.num_experts) for site in find_expert_sites(model) for name in site.parameter_modules]
    if not sites:  # transformers 4 keeps a ModuleList of experts
        sites = [
            (name, len(module))
            for name, module in model.named_modules()
            if name.rpartition(".")[2] == "experts" and type(module).__name__ == "ModuleList"
        ]
    for name, num_experts in sites:
        # PEFT wraps the module for each adapted parameter; the adapters inside the wrappers are routed as well.
        while name.endswith(".base_layer"):
            name = name.removesuffix(".base_layer")
        yield f"{name}.", num_experts, top_k


def _experts_per_token(config: Any) -> int | None:
    for each in (config, getattr(config, "text_config", None), getattr(config, "ffn_config", None)):
        for field in _EXPERTS_PER_TOKEN_FIELDS:
            value = getattr(each, field, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def has_routed_experts(model: Any) -> bool:
    """Whether tokens are routed to experts in some layer."""
    from ftcost_callback.expert_sites import moe_class_name

    return moe_class_name(model) is not None


# --- method, quantisation, dtypes -------------------------------------------------------------------------------------


def method_fields(model: Any) -> dict[str, Any]:
    """``method`` and, with LoRA, its settings, from the adapter that is active.

    Raises :class:`CostModelError` for an adapter or a frozen model that no ``method`` describes.
    """
    model = unwrapped(model)
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, Mapping) or not adapters:
        _refuse_partly_frozen(model)
        return {"method": "full"}
    active = getattr(model, "active_adapter", None)
    name = active if isinstance(active, str) and active in adapters else next(iter(adapters))
    config = adapters[name]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise CostModelError(f"adapters of type {kind} are not modelled; LORA is")
    quantized = quantization_fields(model).get("quantization") is not None
    fields: dict[str, Any] = {
        "method": "qlora" if quantized else "lora",
        "lora_r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "use_dora": bool(config.use_dora),
        "use_rslora": bool(config.use_rslora),
        "lora_target_modules": _adapted_only(model, config) or _target_modules(config.target_modules, _num_layers(model)),
        "lora_target_parameters": _names(getattr(config, "target_parameters", None)),
        "lora_modules_to_save": _names(config.modules_to_save),
        "adapter_dtype": _most_common_dtype(parameter for name, parameter in model.named_parameters() if "lora_" in name),
    }
    return {name: value for name, value in fields.items() if value not in (None, [], "")}


def _names(value: Any) -> str | list[str] | None:
    return value if value is None or isinstance(value, str) else sorted(value)


def _target_modules(targets: Any, num_layers: int | None) -> str | list[str] | None:
    """As given; a name for each layer ("all-linear", resolved) becomes one name where every layer has it."""
    names = _names(targets)
    if not isinstance(names, list):
        return names
    in_layers: dict[str, int] = {}
    for name in names:
        match = _IN_A_LAYER.match(name)
        if match is None:
            return names
        in_layers[match[1]] = in_layers.get(match[1], 0) + 1
    return sorted(in_layers) if set(in_layers.values()) == {num_layers} else names


def _adapted_only(model: Any, config: Any) -> str | None:
    """A pattern of the modules that are adapted, where others that the targets name are not; ``None``: all of them are."""
    leaves_out = (getattr(config, name, None) for name in ("exclude_modules", "layers_to_transform"))
    adapted = getattr(getattr(model, "base_model", None), "targeted_module_names", None)
    if all(each is None for each in leaves_out) or not isinstance(adapted, (list, tuple)) or not adapted:
        return None
    layers: dict[tuple[str, str], list[str]] = {}  # (path of the layers, name in one) -> their numbers
    for name in adapted:
        parts = _PARTS_IN_A_LAYER.fullmatch(name)
        layers.setdefault((parts[1], parts[3]) if parts else (name, ""), []).append(parts[2] if parts else "")
    names: dict[tuple[str, str], list[str]] = {}
    for (path, name), numbers in layers.items():
        names.setdefault((path, "|".join(numbers)), []).append(name)
    return "|".join(
        rf"{re.escape(path)}\.({numbers})\.({'|'.join(map(re.escape, inner))})" if numbers else re.escape(path)
        for (path, numbers), inner in names.items()
    )


def _num_layers(model: Any) -> int | None:
    config = getattr(model, "config", None)
    return getattr(getattr(config, "text_config", config), "num_hidden_layers", None)


def _refuse_partly_frozen(model: Any) -> None:
    total = frozen = 0
    for name, parameter in model.named_parameters():
        if not TOWER_PARTS.isdisjoint(name.split(".")):
            continue  # no row of text gives it a gradient: frozen or not, it takes the same
        count = logical_numel(parameter)
        total += count
        frozen += 0 if parameter.requires_grad else count
    if frozen > _MAX_FROZEN_SHARE * total:
        raise CostModelError(
            f"{frozen / total:.0%} of the weights are frozen and there is no adapter; only full fine-tuning and LoRA "
            "are modelled"
        )


def quantization_fields(model: Any) -> dict[str, Any]:
    """``quantization`` and ``double_quant`` of the base; empty for one that is not quantised.

    Raises :class:`CostModelError` for a scheme that is not modelled.
    """
    config = _quantization_config(unwrapped(model))
    if config is None or _field(config, "dequantize"):
        return {}
    kind = str(getattr(_field(config, "quant_method"), "value", _field(config, "quant_method") or "")).lower()
    if kind in {"bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit", ""}:
        if _field(config, "load_in_4bit"):
            return {
                "quantization": _field(config, "bnb_4bit_quant_type") or "fp4",
                "double_quant": bool(_field(config, "bnb_4bit_use_double_quant")),
            }
        if _field(config, "load_in_8bit"):
            return {"quantization": "int8"}
    if kind in {"gptq", "awq"} and _field(config, "bits") == 4:
        return {"quantization": f"{kind}-int4"}
    if kind in {"mxfp4", "fp8"}:
        return {"quantization": kind}
    raise CostModelError(f"a base quantised with {kind or type(config).__name__} is not modelled")


def _quantization_config(model: Any) -> Any:
    return getattr(getattr(model, "config", None), "quantization_config", None)


def _field(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def weights_dtype_fields(model: Any) -> dict[str, Any]:
    """``dtype`` the unquantised base weights were loaded in, and whether peft's fp32 upcast was applied to them."""
    model = unwrapped(model)
    live = _most_common_dtype(
        parameter
        for name, parameter in model.named_parameters()
        if "lora_" not in name and type(parameter).__name__ not in {"Params4bit", "Int8Params"}
    )
    loaded = str(getattr(getattr(model, "config", None), "dtype", None) or "").removeprefix("torch.")
    if quantization_fields(model).get("quantization") in {"nf4", "fp4", "int8"} and live is not None:
        # prepare_model_for_kbit_training leaves config.dtype as it was.
        upcast = live == "float32" and loaded in {"bfloat16", "float16"}
        return {"dtype": loaded if upcast else live, "prepare_model_for_kbit_training": upcast}
    return {"dtype": live} if live is not None else {}


def _most_common_dtype(parameters: Iterator[Any]) -> str | None:
    """The floating dtype that most of the weights have, of those that the estimate knows."""
    weights: dict[str, int] = {}
    for parameter in parameters:
        if parameter.is_floating_point():
            name = str(parameter.dtype).removeprefix("torch.")
            weights[name] = weights.get(name, 0) + logical_numel(parameter)
    known = {name: count for name, count in weights.items() if name in {"float32", "bfloat16", "float16"}}
    return max(known, key=lambda name: known[name]) if known else None


def uses_gradient_checkpointing(model: Any) -> bool:
    """Whether some module recomputes its forward."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in unwrapped(model).modules())


def checkpointing_is_reentrant(model: Any) -> bool | None:
    """The ``use_reentrant`` that the modules were given; ``None`` where none says."""
    for module in unwrapped(model).modules():
        keywords = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", None)
        if isinstance(keywords, Mapping) and isinstance(keywords.get("use_reentrant"), bool):
            return bool(keywords["use_reentrant"])
    return None


def _base_model(model: Any) -> Any:
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


def parallel_size(model: Any, args: Any, name: str) -> int:
    """``tp_size``, ``pp_size``, ``ep_size`` or ``fsdp_size`` as the model was loaded with (transformers'
    ``DistributedConfig``) or as accelerate was told; 1 where nobody says."""
    sources = (
        getattr(getattr(model, "config", None), "distributed_config", None),
        getattr(args, "parallelism_config", None),
        model if name == "tp_size" else None,
    )
    sizes = [getattr(source, name, None) for source in sources]
    return max((size for size in sizes if isinstance(size, int)), default=1)
