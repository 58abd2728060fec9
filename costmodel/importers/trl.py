"""A TRL SFT configuration (``trl sft --config FILE``) or plain ``TrainingArguments`` -> a job.

Keys and defaults: TRL 1.16 (trainer/sft_config.py, trainer/base_config.py, trainer/model_config.py, scripts/utils.py,
accelerate_configs/) and transformers 5.24 (training_args.py), with the older names of both. Defaults that
:mod:`costmodel.defaults` knows already for the framework are left to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from costmodel.errors import shown
from costmodel.importers import training_arguments
from costmodel.importers.reading import (
    ConfigReader,
    ImportedJob,
    LossOn,
    attention_name,
    dtype_name,
    is_on,
    local_model_config,
    quantization_fields,
    zero_stage,
)
from costmodel.importers.training_arguments import read_training_arguments
from costmodel.specs import is_fine_tuning_loss

TRL_VERSION: Final = "1.16"
TRANSFORMERS_VERSION: Final = "5.24"

# Any of these says that TRL reads the file, not a plain Trainer. The last line: names of TRL before 1.0.
TRL_MARKERS: Final = frozenset(
    {
        "use_peft",
        "lora_r",
        "lora_task_type",
        "use_bnb_nested_quant",
        "dataset_name",
        "dataset_train_split",
        "dataset_text_field",
        "dataset_mixture",
        "datasets",
        "max_length",
        "packing",
        "packing_strategy",
        "padding_free",
        "eval_packing",
        "assistant_only_loss",
        "completion_only_loss",
        "model_init_kwargs",
        "activation_offloading",
        "model_name_or_path",
        "accelerate_config",
        "loss_type",
        "chat_template_path",
        "max_seq_length",
        "num_of_sequences",
        "use_liger",
    }
)
# The example scripts of transformers (run_clm.py) share model_name_or_path; these are theirs alone.
SCRIPT_MARKERS: Final = frozenset({"block_size", "validation_split_percentage", "config_overrides", "train_file"})

# Read into the job, or into what a data set does to it.
UNDERSTOOD: Final = training_arguments.UNDERSTOOD | frozenset(
    {
        "accelerate_config",
        "activation_offloading",
        "assistant_only_loss",
        "attn_implementation",
        "block_size",
        "bnb_4bit_compute_dtype",
        "bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant",
        "completion_only_loss",
        "dtype",
        "experts_implementation",
        "load_in_4bit",
        "load_in_8bit",
        "lora_alpha",
        "lora_dropout",
        "lora_modules_to_save",
        "lora_r",
        "lora_target_modules",
        "lora_target_parameters",
        "loss_type",
        "max_length",
        "max_seq_length",
        "max_train_samples",
        "model_init_kwargs",
        "model_max_length",
        "model_name",
        "model_name_or_path",
        "num_processes",
        "packing",
        "packing_strategy",
        "pad_to_multiple_of",
        "padding_free",
        "quantization_config",
        "test_split_size",
        "torch_dtype",
        "use_bnb_nested_quant",
        "use_dora",
        "use_flash_attention_2",
        "use_flash_attn",
        "use_peft",
        "use_rslora",
        "validation_split_percentage",
    }
)
HARMLESS: Final = training_arguments.HARMLESS | frozenset(
    {
        "model_revision",
        "trust_remote_code",
        "lora_task_type",
        "dataset_name",
        "dataset_config",
        "dataset_config_name",
        "dataset_train_split",
        "dataset_test_split",
        "dataset_streaming",
        "dataset_text_field",
        "dataset_kwargs",
        "dataset_num_proc",
        "dataset_batch_size",
        "dataset_mixture",
        "datasets",
        "streaming",
        "ignore_bias_buffers",
        "gradient_checkpointing_use_reentrant",
        "chat_template_path",
        "eos_token",
        "pad_token",
        "shuffle_dataset",
        "truncation_mode",
        "eval_packing",
        "router_aux_loss_coef",
        "num_of_sequences",
        "chars_per_token",
        "config",
        "env",
        "config_name",
        "tokenizer_name",
        "tokenizer_name_or_path",
        "cache_dir",
        "use_fast_tokenizer",
        "token",
        "use_auth_token",
        "train_file",
        "validation_file",
        "max_eval_samples",
        "overwrite_cache",
        "preprocessing_num_workers",
        "keep_linebreaks",
        "low_cpu_mem_usage",
        "mixed_precision",
        # how RL trainers draw and score completions; that they do is warned of by num_generations and the like
        "cast_lm_head_to_fp32",
        "num_generations_eval",
        "ds3_gather_for_generation",
        "steps_per_generation",
        "top_p",
        "top_k",
        "min_p",
        "generation_kwargs",
        "chat_template_kwargs",
        "repetition_penalty",
        "cache_implementation",
        "delta",
        "epsilon_high",
        "importance_sampling_level",
        "multi_objective_aggregation",
        "mask_truncated_completions",
        "top_entropy_quantile",
        "use_adaptive_entropy",
        "max_tool_calling_iterations",
        "off_policy_mask_threshold",
        "use_bias_correction_kl",
        "log_completions",
        "log_multimodal",
        "log_unique_prompts",
        "log_completions_hub_repo",
        "num_completions_to_print",
        "use_transformers_continuous_batching",
        "transformers_continuous_batching_config",
        "use_transformers_paged",
        "main_process_port",
        "main_process_ip",
        "machine_rank",
        "num_machines",
        "gpu_ids",
    }
)
HARMLESS_PREFIXES: Final = (*training_arguments.HARMLESS_PREFIXES, "vllm_", "sapo_", "vespo_", "entropy_")

# A file does not name its trainer, but has keys that SFTConfig lacks (trainer/*_config.py). The first training that a key
# switches on is it; the last are keys that several of them share.
_OTHER_TRAININGS: Final[dict[str, tuple[str, ...]]] = {
    "GRPO": (
        "num_generations",
        "generation_batch_size",
        "reward_funcs",
        "reward_weights",
        "scale_rewards",
        "use_vllm",
        "vllm_mode",
        "vllm_gpu_memory_utilization",
    ),
    "distillation": (
        "teacher_model_name_or_path",
        "teacher_model_server_url",
        "teacher_server_urls",
        "teacher_model_kind",
        "lmbda",
        "seq_kd",
        "distillation_mode",
    ),
    "CPO": ("cpo_alpha",),
    "SimPO": ("simpo_gamma",),
    "KTO": ("desirable_weight", "undesirable_weight"),
    "PPO": ("reward_model_path",),
    "reward modelling": ("center_rewards_coefficient",),
    "DPO": (
        "loss_weights",
        "f_divergence_type",
        "f_alpha_divergence_coef",
        "use_weighting",
        "discopop_tau",
        "ld_alpha",
    ),
    "preferences or rewards": (
        "beta",
        "ref_model_mixup_alpha",
        "ref_model_sync_steps",
        "sync_ref_model",
        "precompute_ref_log_probs",
        "precompute_ref_batch_size",
        "max_prompt_length",
        "max_completion_length",
        "max_new_tokens",
        "missing_eos_penalty",
        "tpo_alpha",
        "disable_dropout",
    ),
}
OTHER_TRAINING_KEYS: Final = frozenset(key for keys in _OTHER_TRAININGS.values() for key in keys)
# Losses that are none of fine-tuning, and lists of losses, are of other trainers (dpo_config.py, kto_config.py,
# grpo_config.py).
_LOSSES: Final = {
    **dict.fromkeys(("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"), "DPO"),
    **dict.fromkeys(("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm"), "DPO"),
    **dict.fromkeys(("kto", "apo_zero_unpaired"), "KTO"),
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"), "GRPO"),
}

NOT_MODELLED: Final[dict[str, str]] = {
    **training_arguments.NOT_MODELLED,
    # Of such trainings too, but too common a name to tell one.
    **dict.fromkeys(
        ("label_smoothing", "num_iterations", "epsilon", "temperature"), "of preference and reinforcement learning; not used"
    ),
    "bnb_4bit_quant_storage": "the packing of 4-bit weights changes how they are sharded, not their size",
    "config_overrides": "give the changes as --model-overrides",
    "use_kernels": "kernels from the hub are not modelled",
}


def read(config: Mapping[str, Any], where: str) -> ImportedJob:
    """The job that TRL's SFT script (or a plain ``Trainer``) would run with this file."""
    keys = set(config)
    is_trl = bool(keys & TRL_MARKERS) and not keys & SCRIPT_MARKERS
    tool, version = ("trl", TRL_VERSION) if is_trl else ("transformers", TRANSFORMERS_VERSION)
    reader = ConfigReader(config, where, tool, version, UNDERSTOOD)
    reader.recognised(tool)
    read_training_arguments(reader, logging_steps=10 if is_trl else 500)
    reader.copy("model", "model_name_or_path", "model_name")
    init = reader.mapping("model_init_kwargs") or {}
    _weights(reader, init, is_trl)
    _quantization(reader, init)
    _method(reader, is_trl)
    _data(reader, is_trl)
    _launcher(reader)
    _training(reader)
    split = reader.number("test_split_size")
    if split is None and (percent := reader.number("validation_split_percentage")) is not None:
        split = percent / 100
    max_samples = reader.number("max_train_samples")
    return reader.finish(
        harmless=HARMLESS,
        harmless_prefixes=HARMLESS_PREFIXES,
        not_modelled=NOT_MODELLED,
        loss_on=_loss_on(reader, is_trl),
        eval_split=split,
        max_samples=int(max_samples) if max_samples else None,
    )


def _training(reader: ConfigReader) -> None:
    """Whether the file is for a trainer of preferences or rewards, and for which."""
    found = {name: [key for key in keys if is_on(reader.value(key))] for name, keys in _OTHER_TRAININGS.items()}
    loss_type = reader.value("loss_type")
    first = loss_type[0] if isinstance(loss_type, list) and loss_type else loss_type
    if loss_type is not None and not is_fine_tuning_loss(loss_type):
        found[_LOSSES.get(str(first), "preferences or rewards")].append("loss_type")
    if any(found.values()):
        keys = ", ".join(key for listed in found.values() for key in listed)
        reader.is_not_fine_tuning(next(name for name, listed in found.items() if listed), keys, f"leave out {keys}")


def _weights(reader: ConfigReader, init: Mapping[str, Any], is_trl: bool) -> None:
    """Precision of the loaded weights, attention and experts. ``init``: ``model_init_kwargs``, which win."""
    written: tuple[Any, str] | None = None
    for name in ("dtype", "torch_dtype"):
        if init.get(name) is not None:
            written = init[name], f"model_init_kwargs.{name}"
    if written is None and (value := reader.value("dtype", "torch_dtype")) is not None:
        written = value, reader.key_of("dtype", "torch_dtype")
    if written is not None:
        _set_dtype(reader, *written)
    elif is_trl and "model_name_or_path" in reader.config:
        reader.default("dtype", "float32", "trainer/model_config.py: dtype")
    for source, prefix in ((init, "model_init_kwargs."), ({"attn_implementation": reader.value("attn_implementation")}, "")):
        value = source.get("attn_implementation")
        if value is not None and "attn_implementation" not in reader.fields:
            key = f"{prefix}attn_implementation"
            reader.set("attn_implementation", attention_name(reader, value, key), key)
    if is_on(reader.value("use_flash_attention_2", "use_flash_attn")) and "attn_implementation" not in reader.fields:
        reader.set("attn_implementation", "flash_attention_2", reader.key_of("use_flash_attention_2", "use_flash_attn"))
    experts = init.get("experts_implementation") or reader.value("experts_implementation")
    if experts is not None:
        reader.set("experts_implementation", experts, "experts_implementation")
    if init.get("use_cache") is not None:
        reader.set("use_cache", bool(init["use_cache"]), "model_init_kwargs.use_cache")
    known = {"dtype", "torch_dtype", "attn_implementation", "experts_implementation", "use_cache", "quantization_config"}
    harmless = {"revision", "trust_remote_code", "device_map", "low_cpu_mem_usage", "token", "cache_dir", "subfolder"}
    for name in sorted(set(init) - known - harmless):
        reader.warn(f"model_init_kwargs.{name} is not known and not used")


def _set_dtype(reader: ConfigReader, value: Any, key: str) -> None:
    name = dtype_name(value)
    if name is not None:
        reader.set("dtype", name, key)
    elif str(value) == "auto":
        config = local_model_config(reader.fields.get("model") or reader.value("model_name_or_path")) or {}
        stored = dtype_name(config.get("dtype") or config.get("torch_dtype"))
        reader.set("dtype", stored or "bfloat16", key, note="auto: as stored" if stored else "auto: bfloat16 is assumed")
    else:
        reader.warn(f"{key}: {shown(value)} is not float32, bfloat16, float16 or auto, and is not used")


def _quantization(reader: ConfigReader, init: Mapping[str, Any]) -> None:
    quant_type = reader.value("bnb_4bit_quant_type")
    nested = reader.flag("use_bnb_nested_quant", "bnb_4bit_use_double_quant")
    if reader.flag("load_in_4bit"):
        reader.set("quantization", "nf4" if quant_type is None else str(quant_type), "load_in_4bit")
        if nested is None:
            reader.default("double_quant", False, "trainer/model_config.py: use_bnb_nested_quant")
        else:
            reader.set("double_quant", nested, reader.key_of("use_bnb_nested_quant", "bnb_4bit_use_double_quant"))
    elif reader.flag("load_in_8bit"):
        reader.set("quantization", "int8", "load_in_8bit")
    inline = init.get("quantization_config") or reader.value("quantization_config")
    if isinstance(inline, dict):
        for field, value in quantization_fields(inline, reader.warn).items():
            reader.set(field, value, "quantization_config")


def _method(reader: ConfigReader, is_trl: bool) -> None:
    use_peft = reader.flag("use_peft")
    quantized = reader.fields.get("quantization") is not None
    lora_keys = [key for key in reader.config if key.startswith("lora_") and reader.config[key] is not None]
    if use_peft is None and quantized:
        reader.warn("a quantised base is only trained with adapters: use_peft is taken as true")
    trains_adapters = use_peft or (use_peft is None and (quantized or (not is_trl and bool(lora_keys))))
    if not trains_adapters:
        if use_peft is not None:
            reader.set("method", "full", "use_peft")
        elif is_trl:
            reader.default("method", "full", "trainer/model_config.py: use_peft is false")
        if lora_keys:
            reader.warn(f"{', '.join(lora_keys)}: without use_peft: true TRL trains the whole model and these do nothing")
        return
    # A key of "file" origin only where the file has it; a quantised base says qlora by itself.
    key = "use_peft" if use_peft else next(iter(lora_keys), "load_in_4bit")
    reader.set("method", "qlora" if quantized else "lora", key)
    reader.copy_lora_fields(prefix="lora_")
    if is_trl:
        reader.default("lora_r", 16, "trainer/model_config.py")
        reader.default("lora_alpha", 32, "trainer/model_config.py")
        reader.default("lora_dropout", 0.05, "trainer/model_config.py")


def _data(reader: ConfigReader, is_trl: bool) -> None:
    keys = ("max_length", "max_seq_length", "block_size", "model_max_length")
    reader.copy("max_length", *keys)
    written = [key for key in keys if key in reader.config]
    if written and "max_length" not in reader.fields:
        reader.warn(
            f"{written[0]} is null: samples are not cut and the longest one decides the memory; give --max-length, or "
            "--dataset to count it"
        )
    packing = reader.flag("packing")
    if packing is None and "block_size" in reader.config:
        reader.set("packing", True, "block_size", note="texts are joined and cut into blocks")
        reader.set("padding_free", False, "block_size")
    reader.set("packing", packing, "packing")
    strategy = reader.value("packing_strategy")
    padding_free = reader.flag("padding_free")
    if packing and strategy is not None and not str(strategy).startswith("bfd"):
        # "wrapped" cuts anywhere and attends over the whole row (trainer/sft_trainer.py).
        reader.set("padding_free", bool(padding_free), "packing_strategy")
    elif not packing:
        reader.set("padding_free", padding_free, "padding_free")
    multiple = reader.value("pad_to_multiple_of")
    if multiple is not None and multiple != "auto":
        reader.set("pad_to_multiple_of", multiple, "pad_to_multiple_of")
    loss_type = reader.value("loss_type")
    if is_fine_tuning_loss(loss_type):
        reader.set("loss_type", "nll" if loss_type == "chunked_nll" else loss_type, "loss_type")
    reader.set("activation_offloading", reader.flag("activation_offloading"), "activation_offloading")


def _loss_on(reader: ConfigReader, is_trl: bool) -> LossOn | None:
    """Which tokens the loss is over: TRL's own rule needs the data set's format."""
    completion_only, assistant_only = reader.flag("completion_only_loss"), reader.flag("assistant_only_loss")
    if not is_trl:
        return None  # the script decides
    if assistant_only or completion_only:
        return "completion"
    return "all" if completion_only is False else "by_format"


def _launcher(reader: ConfigReader) -> None:
    """``trl sft`` hands these to accelerate; its own profiles are for 8 processes (accelerate_configs/*.yaml)."""
    reader.copy("num_gpus", "num_processes")
    profile = reader.value("accelerate_config")
    if profile is None:
        return
    name = str(profile)
    if match := re.fullmatch(r"zero([123])", name):
        reader.set("deepspeed", zero_stage(int(match[1])), "accelerate_config")
    elif name in ("fsdp1", "fsdp2"):
        reader.set("fsdp", "full_shard auto_wrap", "accelerate_config")
    elif name not in ("multi_gpu", "single_gpu"):
        reader.warn(f"accelerate_config: {name} is not read; say how many GPUs and how they share with --num-gpus, --fsdp")
        return
    reader.default("num_gpus", 1 if name == "single_gpu" else 8, f"accelerate_configs/{name}.yaml: num_processes")
