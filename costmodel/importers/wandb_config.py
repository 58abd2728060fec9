"""The config of a W&B run -> a job.

``config.yaml`` of a run's files (each key wraps its ``value``), or the same as JSON, wrapped or plain (``run.config``).
transformers' ``WandbCallback`` writes ``TrainingArguments``, the model's whole config.json and peft's config into one flat
mapping; the arguments win where a name is in two of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from costmodel.errors import CostModelError
from costmodel.importers import checkpoint, llamafactory, training_arguments, trl
from costmodel.importers.reading import (
    ATTENTION_KERNELS,
    ConfigReader,
    ImportedJob,
    Origin,
    dtype_name,
    quantization_fields,
    read_mapping,
)

# Written by W&B itself and by its integrations.
_OWN_KEYS: Final = frozenset({"_wandb", "wandb_version"})
_METADATA_FILE: Final = "wandb-metadata.json"


def unwrapped(config: Mapping[str, Any]) -> dict[str, Any]:
    """``{"lr": {"desc": null, "value": 1}}`` -> ``{"lr": 1}``; keys that wrap nothing stay as they are."""
    return {
        name: value["value"] if isinstance(value, dict) and "value" in value and set(value) <= {"value", "desc"} else value
        for name, value in config.items()
    }


def is_wrapped(config: Mapping[str, Any]) -> bool:
    """Whether this looks like a run's ``config.yaml``."""
    wrapped = [value for value in config.values() if isinstance(value, dict) and set(value) <= {"value", "desc"} and value]
    return "_wandb" in config or (bool(wrapped) and len(wrapped) * 2 > len(config))


def is_flat(config: Mapping[str, Any]) -> bool:
    """Whether this is ``run.config``: a model's shape and a Trainer's arguments in one mapping."""
    return "model/num_parameters" in config or ("model_type" in config and "per_device_train_batch_size" in config)


def read(config: Mapping[str, Any], where: str) -> ImportedJob:
    """The job that the run's config describes, and the GPU if ``wandb-metadata.json`` lies beside it."""
    flat = unwrapped(config)
    own = {key: flat.pop(key) for key in list(flat) if key in _OWN_KEYS or key.startswith("model/")}
    adapter = flat.pop("peft_config", None)
    model, arguments = _split(flat)
    read_arguments = llamafactory.read if "finetuning_type" in arguments else trl.read
    imported = read_arguments(arguments, where)
    fields, origins, warnings = dict(imported.read_fields), dict(imported.origins), list(imported.warnings)

    def set_field(field: str, value: Any, key: str) -> None:
        if value is not None:
            fields[field] = value
            origins[field] = Origin("file", f"{key} in {where}")

    if "hidden_size" in model:
        inline = {name: value for name, value in model.items() if name != "quantization_config"}
        set_field("model", inline, "the model's own keys")
    elif model.get("_name_or_path"):
        set_field("model", model["_name_or_path"], "_name_or_path")
    if "dtype" not in fields or origins["dtype"].kind == "tool_default":
        for key in ("dtype", "torch_dtype"):
            set_field("dtype", dtype_name(model[key]) if key in model else None, key)
    quantization = model.get("quantization_config")
    if isinstance(quantization, dict):
        for field, value in quantization_fields(quantization, warnings.append).items():
            set_field(field, value, "quantization_config")
    for field, value in _adapter_fields(adapter, where, warnings).items():
        set_field(field, value, "peft_config")
    if adapter is not None:
        set_field("method", "qlora" if "quantization" in fields else "lora", "peft_config")
    elif "method" in origins and origins["method"].kind == "tool_default":
        set_field("method", "full", "no peft_config")
    attention = model.get("_attn_implementation") or model.get("_attn_implementation_autoset")
    if isinstance(attention, str) and "attn_implementation" not in fields:
        set_field("attn_implementation", attention if attention in ATTENTION_KERNELS else None, "model")
    _software(model, fields, set_field, warnings)
    for field, value in _machine(where).items():
        if field not in fields:
            fields[field] = value
            origins[field] = Origin("file", f"{_METADATA_FILE} beside {where}")
    return replace(
        imported,
        tool="wandb",
        read_fields=fields,
        origins=origins,
        understood=(*imported.understood, *model, *(["peft_config"] if adapter is not None else [])),
        harmless=(*imported.harmless, *own),
        warnings=tuple(warnings),
    )


def _split(flat: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's config, and the rest. A key that a training tool knows belongs to the tool."""
    if "model_type" not in flat:
        return {name: value for name, value in flat.items() if name == "_name_or_path"}, {
            name: value for name, value in flat.items() if name != "_name_or_path"
        }
    arguments = {name: value for name, value in flat.items() if _is_argument(name, flat)}
    return {name: value for name, value in flat.items() if name not in arguments}, arguments


def _is_argument(name: str, flat: Mapping[str, Any]) -> bool:
    is_sft = "dataset_text_field" in flat or "packing" in flat
    if name in ("max_length", "dtype", "torch_dtype", "temperature", "use_cache", "attn_implementation", "epsilon"):
        # Also a model's: transformers 4 wrote max_length 20 into every config.
        return name == "max_length" and is_sft
    return (
        name in trl.UNDERSTOOD
        or name in trl.HARMLESS
        or name in trl.NOT_MODELLED
        or name in trl.OTHER_TRAINING_KEYS
        or name in trl.TRL_MARKERS
        or name in llamafactory.MARKERS
        or name.startswith(training_arguments.HARMLESS_PREFIXES)
    )


def _adapter_fields(adapter: Any, where: str, warnings: list[str]) -> dict[str, Any]:
    """peft's config of the run's adapter (``{"default": {...}}``)."""
    if not isinstance(adapter, Mapping) or not adapter:
        return {}
    config = adapter if "r" in adapter else next(iter(adapter.values()))
    if not isinstance(config, Mapping):
        return {}
    reader = ConfigReader(config, f"peft_config in {where}", "peft", "")
    kind = str(reader.value("peft_type") or "LORA").upper().rpartition(".")[2]
    if kind != "LORA":
        raise CostModelError(f"peft_config in {where}: adapters of type {kind} are not modelled; only LoRA is")
    reader.copy_lora_fields(prefix="")
    for key, reason in checkpoint.NOT_MODELLED_ADAPTER_KEYS.items():
        if config.get(key):
            warnings.append(f"peft_config.{key}: {reason}")
    return reader.fields


def _software(model: Mapping[str, Any], fields: dict[str, Any], set_field: Any, warnings: list[str]) -> None:
    """transformers writes its version into every config; it decides which generation ran."""
    version = model.get("transformers_version")
    if not isinstance(version, str) or not version[:1].isdigit() or fields.get("framework") == "llamafactory":
        return
    if fields.get("framework") == "trl":
        if int(version.partition(".")[0]) < 5:
            set_field("framework_version", "0", "transformers_version")
            warnings.append(f"the run does not say which TRL it used; transformers {version} means one before 1.0")
        return
    set_field("framework_version", version, "transformers_version")


def _machine(where: str) -> dict[str, Any]:
    """GPU and count from the run's metadata, which W&B writes beside its config."""
    path = os.path.join(os.path.dirname(where), _METADATA_FILE)
    if not os.path.isfile(path):
        return {}
    metadata = read_mapping(path)
    machine: dict[str, Any] = {}
    gpu = metadata.get("gpu")
    if isinstance(gpu, str) and gpu and not gpu.startswith("["):
        machine["gpu"] = gpu
    count = metadata.get("gpu_count")
    if isinstance(count, int) and count > 0:
        machine["num_gpus"] = count
    return machine
