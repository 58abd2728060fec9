"""A LLaMA-Factory YAML or JSON (``llamafactory-cli train FILE``) -> a job.

Keys and defaults: LLaMA-Factory 0.9.5 (hparams/*.py, model/adapter.py, model/model_utils/, train/sft/workflow.py), which
reads every key of ``Seq2SeqTrainingArguments`` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from costmodel.errors import shown
from costmodel.importers import training_arguments
from costmodel.importers.reading import ConfigReader, ImportedJob, is_on, listed_names, names
from costmodel.importers.training_arguments import read_training_arguments

VERSION: Final = "0.9.5"

MARKERS: Final = frozenset(
    {
        "stage",
        "finetuning_type",
        "template",
        "cutoff_len",
        "lora_rank",
        "lora_target",
        "dataset_dir",
        "quantization_bit",
        "flash_attn",
        "neat_packing",
        "val_size",
        "additional_target",
        "use_unsloth",
        "enable_liger_kernel",
        "pure_bf16",
        "freeze_trainable_layers",
        "use_galore",
        "plot_loss",
    }
)

# Read into the job, or into what a data set does to it.
UNDERSTOOD: Final = training_arguments.UNDERSTOOD | frozenset(
    {
        "additional_target",
        "cutoff_len",
        "dataset",
        "disable_gradient_checkpointing",
        "double_quantization",
        "enable_liger_kernel",
        "eval_dataset",
        "finetuning_type",
        "flash_attn",
        "freeze_trainable_layers",
        "freeze_vision_tower",
        "lora_alpha",
        "lora_dropout",
        "lora_rank",
        "lora_target",
        "max_samples",
        "model_name_or_path",
        "neat_packing",
        "packing",
        "pure_bf16",
        "quantization_bit",
        "quantization_method",
        "quantization_type",
        "ray_num_workers",
        "stage",
        "train_on_prompt",
        "use_dora",
        "use_reentrant_gc",
        "use_rslora",
        "use_unsloth_gc",
        "val_size",
    }
)
HARMLESS: Final = training_arguments.HARMLESS | frozenset(
    {
        # data
        "template",
        "dataset_dir",
        "media_dir",
        "buffer_size",
        "mix_strategy",
        "interleave_probs",
        "overwrite_cache",
        "preprocessing_batch_size",
        "preprocessing_num_workers",
        "eval_num_beams",
        "ignore_pad_token_for_loss",
        "eval_on_each_dataset",
        "tool_format",
        "default_system",
        "enable_thinking",
        "preserve_thinking",
        "tokenized_path",
        "data_shared_file_system",
        "streaming",
        "disable_shuffling",
        # model
        "adapter_name_or_path",
        "adapter_folder",
        "cache_dir",
        "use_fast_tokenizer",
        "use_fast",
        "split_special_tokens",
        "add_tokens",
        "add_special_tokens",
        "new_special_tokens_config",
        "init_special_tokens",
        "model_revision",
        "low_cpu_mem_usage",
        "rope_scaling",
        "moe_aux_loss_coef",
        "train_from_scratch",
        "infer_backend",
        "infer_dtype",
        "offload_folder",
        "use_kv_cache",
        "hf_hub_token",
        "ms_hub_token",
        "om_hub_token",
        "print_param_status",
        "trust_remote_code",
        "quantization_device_map",
        "compute_dtype",
        "device_map",
        "model_max_length",
        "block_diag_attn",
        # what is learned, not what it costs
        "loraplus_lr_ratio",
        "loraplus_lr_embedding",
        "pissa_init",
        "pissa_iter",
        "pissa_convert",
        "create_new_adapter",
        "use_dft_loss",
        "use_eaft_loss",
        "eaft_alpha",
        "asft_alpha",
        "compute_accuracy",
        "early_stopping_steps",
        "plot_loss",
        "include_effective_tokens_per_second",
        "freeze_trainable_modules",
        "freeze_extra_modules",
        "mask_history",
        # generation, evaluation, export, launching
        "do_sample",
        "temperature",
        "top_p",
        "top_k",
        "num_beams",
        "max_length",
        "max_new_tokens",
        "repetition_penalty",
        "length_penalty",
        "skip_special_tokens",
        "task",
        "task_dir",
        "lang",
        "n_shot",
        "save_dir",
        "download_mode",
        "ray_init_kwargs",
        "ray_run_name",
        "ray_storage_path",
        "ray_storage_filesystem",
        "placement_strategy",
        "resources_per_worker",
        "master_addr",
        "master_port",
        "reward_model_type",
        "dpo_label_smoothing",
        "kto_chosen_weight",
        "kto_rejected_weight",
        "simpo_gamma",
        "ld_alpha",
        "ppo_buffer_size",
        "ppo_epochs",
        "ppo_score_norm",
        "ppo_target",
        "ppo_whiten_rewards",
        "pref_beta",
        "pref_ftx",
        "pref_bco_weight",
        "pref_loss",
        "audio_sampling_rate",
        "image_do_pan_and_scan",
        "crop_to_patches",
        "video_fps",
        "use_audio_in_video",
        "freeze_multi_modal_projector",
    }
)
HARMLESS_PREFIXES: Final = (
    *training_arguments.HARMLESS_PREFIXES,
    "export_",
    "vllm_",
    "sglang_",
    "profiler_",
    "galore_",
    "apollo_",
    "badam_",
    "kt_",
)

NOT_MODELLED: Final[dict[str, str]] = {
    **training_arguments.NOT_MODELLED,
    "ref_model": "the reference model is not counted",
    "ref_model_adapters": "the reference model is not counted",
    "ref_model_quantization_bit": "the reference model is not counted",
    "reward_model": "the reward model is not counted",
    "reward_model_adapters": "the reward model is not counted",
    "reward_model_quantization_bit": "the reward model is not counted",
    "use_asft_loss": "the reference model of the ASFT loss is not counted",
    "use_galore": "GaLore is not modelled; full gradients and AdamW states are counted",
    "use_apollo": "APOLLO is not modelled; full gradients and AdamW states are counted",
    "use_badam": "BAdam is not modelled; gradients and states of every layer are counted",
    "use_adam_mini": "Adam-mini is not modelled; AdamW's states are counted",
    "use_muon": "Muon is not modelled; AdamW's states are counted",
    "use_llama_pro": "LLaMA Pro's choice of blocks is not modelled",
    "use_unsloth": "Unsloth's kernels inside LLaMA-Factory are not modelled; they need less memory and time",
    "use_mca": "the Megatron backend is not modelled",
    "use_hyper_parallel": "the HyperParallel backend is not modelled",
    "hyper_parallel_args": "the HyperParallel backend is not modelled",
    "use_kt": "KTransformers (experts on the CPU) is not modelled",
    "use_v1_kernels": "these kernels are not modelled",
    "mixture_of_depths": "mixture of depths is not modelled",
    "shift_attn": "shifted sparse attention is not modelled; full attention is counted",
    "resize_vocab": "the trained embeddings of a resized vocabulary are not counted; name them in additional_target",
    "upcast_layernorm": "norms in fp32 are not counted",
    "upcast_lmhead_output": "logits in fp32 before the loss are not counted apart",
    "freeze_language_model": "freezing the language model is not modelled",
    "fp8": "FP8 training is not modelled; bf16 matmuls are counted",
    "fp8_backend": "FP8 training is not modelled",
    "fp8_enable_fsdp_float8_all_gather": "FP8 training is not modelled",
    "enable_torch_profiler": "the profiler's own time is not counted",
    "oft_rank": "OFT is estimated as LoRA",
    "oft_block_size": "OFT is estimated as LoRA",
    "oft_target": "OFT is estimated as LoRA",
    "module_dropout": "OFT is estimated as LoRA",
    "image_max_pixels": "image tokens are not counted",
    "image_min_pixels": "image tokens are not counted",
    "video_max_pixels": "video tokens are not counted",
    "video_min_pixels": "video tokens are not counted",
    "video_maxlen": "video tokens are not counted",
    "profile_modules": "the profiler's own time is not counted",
}

_STAGES: Final = {"rm": "reward modelling", "ppo": "PPO", "dpo": "DPO", "kto": "KTO"}
_LOSSES: Final = {"orpo": "ORPO", "simpo": "SimPO", "ipo": "IPO"}  # pref_loss, which stage dpo also runs


def read(config: Mapping[str, Any], where: str) -> ImportedJob:
    """The job that ``llamafactory-cli train`` would run with this file."""
    reader = ConfigReader(config, where, "llamafactory", VERSION, UNDERSTOOD)
    reader.recognised("llamafactory")
    reader.default("framework_version", VERSION, "the version whose defaults are used")
    read_training_arguments(reader)
    reader.copy("model", "model_name_or_path")
    stage = str(reader.value("stage") or "sft").lower()
    if stage in _STAGES:
        loss = _LOSSES.get(str(reader.config.get("pref_loss")).lower()) if stage == "dpo" else None
        reader.is_not_fine_tuning(loss or _STAGES[stage], f"stage: {stage}", "set stage: sft")
    _method(reader)
    _quantization(reader)
    _precision(reader)
    _checkpointing(reader)
    _kernels(reader)
    _data(reader, stage)
    reader.set("num_gpus", _whole(reader, "ray_num_workers"), "ray_num_workers")
    datasets = reader.value("dataset")
    listed = (reader.converted(datasets, "dataset", listed_names) or ()) if datasets else ()
    train_on_prompt = reader.flag("train_on_prompt")
    return reader.finish(
        harmless=HARMLESS,
        harmless_prefixes=HARMLESS_PREFIXES,
        not_modelled=NOT_MODELLED,
        max_samples=_whole(reader, "max_samples"),
        num_datasets=max(1, len(listed)),
        eval_split=reader.number("val_size"),
        loss_on="all" if stage == "pt" or train_on_prompt else "completion",
    )


def _whole(reader: ConfigReader, key: str) -> int | None:
    number = reader.number(key)
    return int(number) if number else None


def _method(reader: ConfigReader) -> None:
    written = reader.value("finetuning_type")
    kind = str(written or "lora").lower()
    if kind == "freeze":
        reader.warn("finetuning_type: freeze trains a few layers; the estimate is of full fine-tuning, which needs more")
    elif kind == "oft":
        reader.warn("finetuning_type: OFT is estimated as LoRA")
    if reader.flag("freeze_vision_tower") is False:  # on unless it is turned off
        reader.warn("freeze_vision_tower: the encoder of images is counted as frozen")
    method = "full" if kind in ("full", "freeze") else "lora"
    if written is None:
        reader.default("method", method, "hparams/finetuning_args.py: finetuning_type")
    else:
        reader.set("method", method, "finetuning_type")
    if method == "full":
        return
    reader.copy("lora_r", "lora_rank")
    reader.default("lora_r", 8, "hparams/finetuning_args.py: lora_rank")
    if reader.number("lora_alpha"):  # 0 counts as not said (hparams/finetuning_args.py, __post_init__)
        reader.copy("lora_alpha", "lora_alpha")
    reader.default("lora_alpha", 2 * int(reader.fields["lora_r"]), "hparams/finetuning_args.py: lora_alpha is 2 x lora_rank")
    reader.copy("lora_dropout", "lora_dropout")
    reader.default("lora_dropout", 0.0, "hparams/finetuning_args.py")
    reader.copy("lora_target_modules", "lora_target", convert=_targets)
    reader.default("lora_target_modules", "all-linear", "hparams/finetuning_args.py: lora_target is all")
    reader.copy("lora_modules_to_save", "additional_target", convert=listed_names)
    reader.set("use_rslora", reader.flag("use_rslora"), "use_rslora")
    reader.set("use_dora", reader.flag("use_dora"), "use_dora")


def _targets(value: Any) -> tuple[str, ...] | str | None:
    found = names(value)
    return "all-linear" if found in ("all", ("all",)) else found


def _quantization(reader: ConfigReader) -> None:
    bits = _whole(reader, "quantization_bit")
    if bits is None:
        return
    how = str(reader.value("quantization_method") or "bnb").lower()
    if how not in ("bnb", "bitsandbytes"):
        reader.warn(f"quantization_method: {how} is not modelled; estimated as {8 if bits > 4 else 4}-bit bitsandbytes")
    elif bits not in (4, 8):
        reader.warn(f"quantization_bit: bitsandbytes knows 4 and 8, not {bits}; estimated as {8 if bits > 4 else 4}")
    reader.set("method", "qlora", "quantization_bit")
    # hparams/model_args.py: quantization_type nf4, double_quantization true; model/model_utils/quantization.py.
    if bits > 4:
        reader.set("quantization", "int8", "quantization_bit")
    else:
        reader.set("quantization", str(reader.value("quantization_type") or "nf4"), "quantization_bit")
        if (double := reader.flag("double_quantization")) is not None:
            reader.set("double_quant", double, "double_quantization")
        reader.default("double_quant", True, "hparams/model_args.py: double_quantization")
    # peft's preparation is not called; only norms, and only with upcast_layernorm (model/model_utils/checkpointing.py).
    reader.default("prepare_model_for_kbit_training", False, "model/model_utils/checkpointing.py")


def _precision(reader: ConfigReader) -> None:
    pure = bool(reader.flag("pure_bf16"))
    reader.default("bf16", False, "transformers training_args.py")
    trained_in = "bfloat16" if pure else "float32"
    if reader.fields["method"] == "full":
        # Trained weights are lifted to fp32 unless pure_bf16 (model/adapter.py); DeepSpeed takes them back to 16 bit.
        if pure:
            reader.set("dtype", "bfloat16", "pure_bf16")
        elif "deepspeed" in reader.fields and (reader.fields.get("bf16") or reader.fields.get("fp16")):
            reader.set("dtype", "bfloat16" if reader.fields["bf16"] else "float16", "deepspeed")
        else:
            reader.default("dtype", "float32", "model/adapter.py: trained weights are lifted to fp32")
        return
    loaded_in = "float16" if reader.fields.get("fp16") and not pure else "bfloat16"
    reader.default("dtype", loaded_in, "hparams/parser.py: compute_dtype")
    reader.default("adapter_dtype", trained_in, "model/adapter.py")


def _checkpointing(reader: ConfigReader) -> None:
    """On unless ``disable_gradient_checkpointing``, whatever ``gradient_checkpointing`` says (checkpointing.py)."""
    disabled = reader.flag("disable_gradient_checkpointing")
    reentrant = reader.flag("use_reentrant_gc")
    for field in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
        reader.fields.pop(field, None)
        reader.origins.pop(field, None)
    if disabled:
        reader.set("gradient_checkpointing", False, "disable_gradient_checkpointing")
        return
    reader.default("gradient_checkpointing", True, "model/model_utils/checkpointing.py")
    if reentrant is not None:
        reader.set("gradient_checkpointing_kwargs", {"use_reentrant": reentrant}, "use_reentrant_gc")
    reader.default("gradient_checkpointing_kwargs", {"use_reentrant": True}, "hparams/model_args.py: use_reentrant_gc")
    if reader.flag("use_unsloth_gc"):
        reader.set("activation_offloading", True, "use_unsloth_gc")


def _kernels(reader: ConfigReader) -> None:
    attention = reader.value("flash_attn")
    # YAML reads a bare off or on as a flag.
    word = {True: "fa2", False: "disabled"}.get(attention, attention) if isinstance(attention, bool) else attention
    name = {"disabled": "eager", "off": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}.get(
        str(word).lower()
    )
    if name is not None:
        reader.set("attn_implementation", name, "flash_attn")
    elif attention is not None and str(word).lower() != "auto":
        reader.warn(f"flash_attn: {shown(attention)} is not one of auto, disabled, sdpa, fa2, fa3, and is not used")
    if (liger := reader.flag("enable_liger_kernel")) is not None:
        reader.set("use_liger_kernel", liger, "enable_liger_kernel")


def _data(reader: ConfigReader, stage: str) -> None:
    reader.copy("max_length", "cutoff_len")
    reader.default("max_length", 2048, "hparams/data_args.py: cutoff_len")
    neat = bool(reader.flag("neat_packing"))
    packing = reader.flag("packing")
    if neat:
        reader.set("packing", True, "neat_packing")
        reader.set("padding_free", True, "neat_packing")
    elif packing is not None:
        reader.set("packing", packing, "packing")
    reader.default("packing", stage == "pt", "hparams/parser.py: packing only in pre-training")
    # Rows packed without neat_packing attend across their samples (data/processor/supervised.py).
    reader.default("padding_free", False, "train/sft/workflow.py")
    reader.default("pad_to_multiple_of", 8, "train/sft/workflow.py")
    if is_on(reader.value("eval_dataset")) or is_on(reader.value("val_size")):
        return
    if reader.fields.get("eval_strategy") not in (None, "no"):
        reader.warn("eval_strategy: there is neither an eval_dataset nor a val_size to evaluate on")
