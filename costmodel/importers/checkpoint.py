"""A saved folder -> a job: a model, an adapter, or a Trainer's checkpoint.

Reads adapter_config.json (peft), config.json (transformers) and trainer_state.json, all JSON. ``training_args.bin`` is a
pickle, which can run code when it is opened: it is never opened, and what only it knows is left to flags.
"""

from __future__ import annotations

import os
from typing import Any, Final

from costmodel.errors import CostModelError
from costmodel.importers.reading import (
    MAX_CONFIG_BYTES,
    ConfigReader,
    ImportedJob,
    Origin,
    dtype_name,
    quantization_fields,
    read_mapping,
)

ADAPTER_FILE: Final = "adapter_config.json"
MODEL_FILE: Final = "config.json"
STATE_FILE: Final = "trainer_state.json"
MAX_STATE_BYTES: Final = 200 * 1000 * 1000  # it holds the whole log: some 200 bytes for each logged step

# peft 0.21, LoraConfig and PeftConfig: nothing of these costs memory or time.
HARMLESS_ADAPTER_KEYS: Final = frozenset(
    {
        "task_type",
        "peft_type",
        "peft_version",
        "auto_mapping",
        "revision",
        "inference_mode",
        "fan_in_fan_out",
        "init_lora_weights",
        "alpha_pattern",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "arrow_config",
        "runtime_config",
        "megatron_config",
        "megatron_core",
        "layers_pattern",
        "ensure_weight_tying",
        "bias",
        "use_qalora",
        "qalora_group_size",
    }
)
NOT_MODELLED_ADAPTER_KEYS: Final[dict[str, str]] = {
    "rank_pattern": "ranks that differ by module are not modelled; r is used everywhere",
    "layers_to_transform": "adapters in some layers only are not modelled; every layer is counted",
    "layer_replication": "replicated layers are not counted",
    "trainable_token_indices": "trained rows of the embedding are not counted",
    "exclude_modules": "excluded modules are not modelled; every target is counted",
    "lora_bias": "biases of adapters are not counted",
    "alora_invocation_tokens": "activated LoRA is estimated as LoRA",
    "use_bdlora": "block-diagonal LoRA is estimated as LoRA",
    "kasa_config": "KaSA is estimated as LoRA",
    "velora_config": "VeLoRA is estimated as LoRA",
    "monteclora_config": "MonteCLoRA is estimated as LoRA",
}
_HARMLESS_STATE_KEYS: Final = frozenset(
    {
        "best_global_step",
        "best_metric",
        "best_model_checkpoint",
        "epoch",
        "global_step",
        "is_hyper_param_search",
        "is_local_process_zero",
        "is_world_process_zero",
        "log_history",
        "logging_steps",
        "num_input_tokens_seen",
        "stateful_callbacks",
        "total_flos",
        "trial_name",
        "trial_params",
    }
)


def read(folder: str) -> ImportedJob:
    """The job whose checkpoint this is, as far as its JSON files tell. Raises :class:`CostModelError`."""
    found = [name for name in (ADAPTER_FILE, MODEL_FILE, STATE_FILE) if os.path.isfile(os.path.join(folder, name))]
    if ADAPTER_FILE not in found and MODEL_FILE not in found:
        raise CostModelError(f"{folder} is a folder; {_inside(folder)}")
    fields: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    understood: list[str] = []
    harmless: list[str] = []
    unknown: list[str] = []
    warnings: list[str] = []
    # The state first: the adapter says more about the method, the model's config about its precision.
    readers = {STATE_FILE: _read_state, MODEL_FILE: _read_model, ADAPTER_FILE: _read_adapter}
    for name, read_file in readers.items():
        if name in found:
            max_bytes = MAX_STATE_BYTES if name == STATE_FILE else MAX_CONFIG_BYTES
            part = read_file(folder, read_mapping(os.path.join(folder, name), max_bytes))
            fields.update(part.fields)
            origins.update(part.origins)
            understood += [f"{name}: {key}" for key in part.understood]
            harmless += [f"{name}: {key}" for key in part.harmless]
            unknown += [f"{name}: {key}" for key in part.unknown]
            warnings += part.warnings
    if ADAPTER_FILE in found:
        quantized = "quantization" in fields
        fields["method"] = "qlora" if quantized else "lora"
        origins["method"] = Origin("file", f"{ADAPTER_FILE} in {folder}")
        if not quantized:
            warnings.append("the checkpoint does not say whether its base was quantised: give --quantization if it was")
    elif STATE_FILE in found:
        fields["method"] = "full"
        origins["method"] = Origin("file", f"{STATE_FILE} without {ADAPTER_FILE} in {folder}")
    if os.path.exists(os.path.join(folder, "training_args.bin")):
        warnings.append("training_args.bin is a pickle and is not opened: what only it knows takes the framework's defaults")
    return ImportedJob(
        tool="checkpoint",
        tool_version="",
        where=folder,
        read_fields=fields,
        origins=origins,
        understood=tuple(understood),
        harmless=tuple(harmless),
        unknown=tuple(unknown),
        warnings=tuple(warnings),
    )


def _inside(folder: str) -> str:
    """The way out for a folder without a config: its checkpoints, if it has any."""
    try:
        checkpoints = sorted(
            (name for name in os.listdir(folder) if name.startswith("checkpoint-")), key=lambda name: (len(name), name)
        )
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    if checkpoints:
        return f"give one of its checkpoints, such as {checkpoints[-1]}"
    way_out = "give a job file (.json, .yaml or .jsonl), or the output folder of a recorded run"
    return f"it holds neither {ADAPTER_FILE} nor {MODEL_FILE}; {way_out}"


def _read_state(folder: str, state: dict[str, Any]) -> ImportedJob:
    reader = ConfigReader(state, f"{STATE_FILE} in {folder}", "checkpoint", "")
    for field, key in (
        ("per_device_train_batch_size", "train_batch_size"),
        ("max_steps", "max_steps"),
        ("num_train_epochs", "num_train_epochs"),
        ("eval_steps", "eval_steps"),
        ("save_steps", "save_steps"),
    ):
        number = reader.number(key)
        if number is not None and number > 0:
            reader.set(field, number, key)
    history = state.get("log_history")
    entries = [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
    if "eval_steps" in reader.fields:
        evaluated = any("eval_loss" in entry for entry in entries)
        reader.set("eval_strategy", "steps" if evaluated else "no", "log_history")
    if any("mean_token_accuracy" in entry for entry in entries):  # logged by TRL's SFTTrainer alone
        reader.set("framework", "trl", "log_history")
    return reader.finish(harmless=_HARMLESS_STATE_KEYS, not_modelled={})


def _read_model(folder: str, config: dict[str, Any]) -> ImportedJob:
    where = f"{MODEL_FILE} in {folder}"
    reader = ConfigReader(config, where, "checkpoint", "")
    reader.fields["model"] = folder
    reader.origins["model"] = Origin("file", where)
    name = dtype_name(reader.value("dtype", "torch_dtype"))
    if name is not None:
        reader.set("dtype", name, reader.key_of("dtype", "torch_dtype"))
    quantization = reader.value("quantization_config")
    if isinstance(quantization, dict):
        for field, value in quantization_fields(quantization, reader.warn).items():
            reader.set(field, value, "quantization_config")
    # The rest is the model's shape, which the model's own reader checks.
    return reader.finish(harmless=frozenset(config), not_modelled={})


def _read_adapter(folder: str, config: dict[str, Any]) -> ImportedJob:
    where = f"{ADAPTER_FILE} in {folder}"
    reader = ConfigReader(config, where, "checkpoint", "")
    kind = str(reader.value("peft_type") or "LORA").upper()
    if kind != "LORA":
        raise CostModelError(f"{where}: adapters of type {kind} are not modelled; only LoRA is")
    base = reader.value("base_model_name_or_path")
    # A folder that also holds the model's config is a merged or a full save; its own config is the exact one.
    if base and not os.path.isfile(os.path.join(folder, MODEL_FILE)):
        reader.set("model", str(base), "base_model_name_or_path")
    reader.copy_lora_fields(prefix="")
    return reader.finish(harmless=HARMLESS_ADAPTER_KEYS, not_modelled=NOT_MODELLED_ADAPTER_KEYS)
