"""An Axolotl YAML (``axolotl train FILE``) -> a job.

Keys and defaults: Axolotl 0.19.0 (utils/schemas/*.py, utils/config/__init__.py, core/builders/*.py, loaders/model.py,
integrations/*/args.py), which pins transformers 5.16. Legacy keys of earlier versions are read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from costmodel.errors import CostModelError, short, shown
from costmodel.importers.reading import (
    ConfigReader,
    ImportedJob,
    attention_name,
    deepspeed_setting,
    dtype_name,
    fsdp_words,
    is_mixture_of_experts,
    is_on,
    listed_names,
    names,
    optimizer_name,
)

VERSION: Final = "0.19.0"

MARKERS: Final = frozenset(
    {
        "base_model",
        "micro_batch_size",
        "sequence_len",
        "num_epochs",
        "sample_packing",
        "val_set_size",
        "lora_target_linear",
        "dataset_prepared_path",
        "adapter",
        "pad_to_sequence_len",
        "train_on_inputs",
        "evals_per_epoch",
        "saves_per_epoch",
        "datasets",
        "optimizer",
        "plugins",
        "strict",
    }
)

# Read into the job, or into what a data set does to it.
UNDERSTOOD: Final = frozenset(
    {
        "activation_offloading",
        "adapter",
        "attn_implementation",
        "base_model",
        "batch_flattening",
        "batch_size",
        "bf16",
        "bfloat16",
        "bnb_config_kwargs",
        "chunked_cross_entropy",
        "chunked_cross_entropy_num_chunks",
        "context_parallel_size",
        "curriculum_sampling",
        "cut_cross_entropy",
        "dataloader_drop_last",
        "datasets",
        "deepspeed",
        "dp_replicate_size",
        "dp_shard_size",
        "eager_attention",
        "eval_batch_size",
        "eval_steps",
        "eval_strategy",
        "evals_per_epoch",
        "evaluation_strategy",
        "excess_length_strategy",
        "experts_implementation",
        "flash_attention",
        "flex_attention",
        "float16",
        "float32",
        "fp16",
        "fsdp",
        "fsdp_config",
        "fsdp_version",
        "gptq",
        "gptq_disable_exllama",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "group_by_length",
        "load_in_4bit",
        "load_in_8bit",
        "lora_alpha",
        "lora_dropout",
        "lora_exclude_modules",
        "lora_modules_to_save",
        "lora_r",
        "lora_target_linear",
        "lora_target_modules",
        "lora_target_parameters",
        "max_packed_sequence_len",
        "max_steps",
        "micro_batch_size",
        "model_config",
        "num_epochs",
        "optimizer",
        "overrides_of_model_config",
        "pad_to_multiple_of",
        "pad_to_sequence_len",
        "peft_autocast_adapter_dtype",
        "peft_use_dora",
        "peft_use_rslora",
        "plugins",
        "pretrain_multipack_attn",
        "pretraining_dataset",
        "pretraining_sample_concatenation",
        "ray_num_workers",
        "rl",
        "sage_attention",
        "sample_packing",
        "save_only_model",
        "save_steps",
        "save_strategy",
        "saves_per_epoch",
        "sdp_attention",
        "sequence_len",
        "sequence_parallel_degree",
        "tensor_parallel_size",
        "test_datasets",
        "tf32",
        "tiled_mlp_use_original_mlp",
        "torch_compile",
        "torch_dtype",
        "train_on_inputs",
        "val_set_size",
        "xformers_attention",
    }
)
HARMLESS: Final = frozenset(
    {
        # model and tokenizer files, output
        "base_model_config",
        "base_model_ignore_patterns",
        "model_type",
        "type_of_model",
        "cls_model_config",
        "revision_of_model",
        "model_revision",
        "model_kwargs",
        "overrides_of_model_kwargs",
        "trust_remote_code",
        "processor_type",
        "processor_kwargs",
        "special_tokens",
        "tokens",
        "added_tokens_overrides",
        "chat_template",
        "chat_template_jinja",
        "chat_template_kwargs",
        "eot_tokens",
        "default_system_message",
        "default_system_prompt",
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
        "additional_special_tokens",
        "fix_untrained_tokens",
        "resize_token_embeddings_to_32x",
        "mean_resizing_embeddings",
        "shrink_embeddings",
        "output_dir",
        "save_safetensors",
        "save_total_limit",
        "strict",
        "debug",
        "axolotl_config_path",
        "env",
        "capabilities",
        "env_capabilities",
        "is_preprocess",
        "is_falcon_derived_model",
        "is_llama_derived_model",
        "is_mistral_derived_model",
        "is_qwen_derived_model",
        "rope_scaling",
        "rope_theta",
        "low_cpu_mem_usage",
        "max_memory",
        "gpu_memory_limit",
        "lora_on_cpu",
        "device",
        "device_map",
        "world_size",
        "local_rank",
        "rank",
        "experimental_skip_move_to_device",
        "qlora_sharded_model_loading",
        # data
        "shuffle_merged_datasets",
        "shuffle_before_merging_datasets",
        "dataset_prepared_path",
        "dataset_shard_num",
        "dataset_shard_idx",
        "dataset_processes",
        "dataset_num_proc",
        "dataset_exact_deduplication",
        "dataset_keep_in_memory",
        "dataset_type",
        "skip_prepare_dataset",
        "num_dataset_shards_to_save",
        "push_dataset_to_hub",
        "preprocess_iterable",
        "pretrain_multipack_buffer_size",
        "streaming",
        "streaming_multipack_buffer_size",
        "sample_packing_group_size",
        "sample_packing_bin_size",
        "sample_packing_sequentially",
        "sample_packing_mp_start_method",
        "sample_packing_eff_est",
        "sample_packing_seq_len_multiplier",
        "eval_sample_packing",
        "eval_sequence_len",
        "total_num_tokens",
        "total_supervised_tokens",
        "min_sample_len",
        "max_prompt_len",
        "remove_unused_columns",
        "dataloader_pin_memory",
        "dataloader_num_workers",
        "dataloader_prefetch_factor",
        "roles_to_train",
        "role_boundaries",
        # what is learned, not what it costs
        "learning_rate",
        "embedding_lr",
        "embedding_lr_scale",
        "weight_decay",
        "lr_scheduler",
        "lr_scheduler_kwargs",
        "lr_quadratic_warmup",
        "lr_groups",
        "cosine_min_lr_ratio",
        "cosine_constant_lr_ratio",
        "lr_div_factor",
        "optim_args",
        "torchdistx_path",
        "adam_epsilon",
        "adam_epsilon2",
        "adam_beta1",
        "adam_beta2",
        "adam_beta3",
        "max_grad_norm",
        "warmup_steps",
        "warmup_ratio",
        "neftune_noise_alpha",
        "noisy_embedding_alpha",
        "seed",
        "loss_watchdog_threshold",
        "loss_watchdog_patience",
        "early_stopping_patience",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "lora_fan_in_fan_out",
        "lora_model_dir",
        "lora_alpha_pattern",
        "merge_lora",
        "merge_method",
        "peft_init_lora_weights",
        "peft_ensure_weight_tying",
        "loraplus_lr_ratio",
        "loraplus_lr_embedding",
        "reinit_weights",
        "num_labels",
        "dion_lr",
        "dion_momentum",
        "dion_rank_fraction",
        "dion_rank_multiple_of",
        "use_eaft",
        "eaft_alpha",
        "eaft_k",
        # logging, evaluation by generation, launching
        "logging_steps",
        "save_first_step",
        "use_wandb",
        "use_mlflow",
        "hf_mlflow_log_artifacts",
        "use_comet",
        "use_trackio",
        "use_tensorboard",
        "use_otel_metrics",
        "profiler_steps",
        "profiler_steps_start",
        "include_tokens_per_second",
        "include_tkps",
        "eval_causal_lm_metrics",
        "eval_table_size",
        "eval_max_new_tokens",
        "accelerator_config",
        "hf_use_auth_token",
        "ddp",
        "ddp_timeout",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_find_unused_parameters",
        "resources_per_worker",
        "ray_run_name",
        "use_ray",
        "fsdp_final_state_dict_type",
        "auto_resume_from_checkpoints",
        "trainer_cls",
        "image_size",
        "image_resize_algorithm",
        "torch_compile_backend",
        "torch_compile_mode",
        "torch_compile_options",
        "flex_attn_compile_kwargs",
        "sequence_parallel_mode",
        "heads_k_stride",
        "ring_attn_func",
        "deepcompile",
        "dynamic_checkpoint",
    }
)
HARMLESS_PREFIXES: Final = (
    "wandb_",
    "mlflow_",
    "comet_",
    "trackio_",
    "otel_",
    "swanlab_",
    "use_swanlab",
    "hub_",
    "gradio_",
    "tokenizer_",
    "lm_eval_",
    "generation_",
    "generate_samples",
    "num_generation_samples",
    "bench_",
    "qgalore_",
    "nemo_gym_",
    "dsv4_",
    "hatchery",
)

_WITHOUT_RL: Final = "of preference and reinforcement learning, which only rl switches on; not used"
_KERNELS: Final = "this kernel is not modelled; the run needs no more memory or time than estimated"
NOT_MODELLED: Final[dict[str, str]] = {
    **dict.fromkeys(
        (
            "trl",
            "vllm",
            "ebft",
            "center_rewards_coefficient",
            "dpo_use_weighting",
            "dpo_label_smoothing",
            "dpo_use_liger_kernel",
            "dpo_padding_free",
            "dpo_loss_type",
            "dpo_loss_weights",
            "dpo_beta",
            "dpo_use_logits_to_keep",
            "dpo_generate_during_eval",
            "dpo_norm_loss",
            "rpo_alpha",
            "precompute_ref_log_probs",
            "orpo_alpha",
            "simpo_gamma",
            "cpo_alpha",
            "kto_desirable_weight",
            "kto_undesirable_weight",
            "rl_beta",
        ),
        _WITHOUT_RL,
    ),
    "qat": "quantisation-aware training is not modelled",
    "quantization": "quantisation after training is not part of the estimate",
    "kd_trainer": "the teacher of knowledge distillation is not counted",
    **dict.fromkeys(
        (
            "kd_ce_alpha",
            "kd_alpha",
            "kd_temperature",
            "kd_beta",
            "kd_normalize_topk",
            "kd_online_server_base_url",
            "kd_online_topk",
            "kd_online_server",
            "kd_online_timeout",
            "kd_temperature_min",
        ),
        "the teacher of knowledge distillation is not counted",
    ),
    "relora": "ReLoRA's restarts are not modelled",
    "relora_steps": "ReLoRA's restarts are not modelled",
    "relora_warmup_steps": "ReLoRA's restarts are not modelled",
    "relora_anneal_steps": "ReLoRA's restarts are not modelled",
    "relora_prune_ratio": "ReLoRA's restarts are not modelled",
    "relora_prune_method": "ReLoRA's restarts are not modelled",
    "relora_cpu_offload": "ReLoRA's restarts are not modelled",
    "jagged_restart_steps": "restarts are not modelled",
    "jagged_restart_warmup_steps": "restarts are not modelled",
    "jagged_restart_anneal_steps": "restarts are not modelled",
    "lisa_n_layers": "LISA trains a few layers at a time; every layer is counted",
    "lisa_step_interval": "LISA trains a few layers at a time; every layer is counted",
    "lisa_layers_attribute": "LISA trains a few layers at a time; every layer is counted",
    "unfrozen_parameters": "only these are trained; the estimate is of full fine-tuning, which needs more",
    "spectrum_top_fraction": "Spectrum trains a part of the layers; the estimate is of full fine-tuning, which needs more",
    "spectrum_model_name": "Spectrum trains a part of the layers; the estimate is of full fine-tuning, which needs more",
    "optim_target_modules": "low-rank projected gradients are not modelled; full gradients and states are counted",
    "peft": "LoftQ's initialisation is not part of the estimate",
    "peft_layers_to_transform": "adapters in some layers only are not modelled; every layer is counted",
    "peft_layers_pattern": "adapters in some layers only are not modelled; every layer is counted",
    "peft_layer_replication": "replicated layers are not counted",
    "peft_trainable_token_indices": "trained rows of the embedding are not counted",
    "lora_rank_pattern": "ranks that differ by module are not modelled; lora_r is used everywhere",
    "embeddings_skip_upcast": "the embeddings are estimated in the type the weights are loaded in",
    "fp32_norms": "norms in fp32 are not counted",
    "fp32_norm_classes": "norms in fp32 are not counted",
    "mora": "MoRA is not modelled; LoRA is",
    "use_mora": "MoRA is not modelled; LoRA is",
    "fp8": "FP8 training is not modelled; bf16 matmuls are counted",
    "fp8_config": "FP8 training is not modelled",
    "fp8_enable_fsdp_float8_all_gather": "FP8 training is not modelled",
    "model_quantization_config": "a quantised checkpoint's own format is not modelled here; give --quantization",
    "model_quantization_config_kwargs": "a quantised checkpoint's own format is not modelled here; give --quantization",
    "use_onebitllms": "1-bit training is not modelled",
    "quantize_moe_experts": "quantised experts are not modelled; they are estimated as kept in 16 bit",
    "llama4_linearized_experts": "experts as single linears are not modelled here",
    "selective_checkpointing": "selective checkpointing is estimated as full checkpointing, which needs less memory",
    "layer_offloading": "offloaded layers are not modelled; they need less GPU memory and more time",
    "ple_cpu_offload": "an offloaded per-layer embedding is not modelled",
    "torch_empty_cache_steps": "emptying the allocator's cache is not modelled",
    "gc_steps": "emptying the allocator's cache is not modelled",
    "gc_collect_steps": "emptying the allocator's cache is not modelled",
    "auto_find_batch_size": "the batch may be halved while it runs; the estimate is of the batch that is written",
    "resume_from_checkpoint": "the estimate is of the whole run, from its first step",
    "use_pose": "PoSE is not modelled; sequences of sequence_len are",
    "pose_split_on_token_ids": "PoSE is not modelled",
    "pose_max_context_len": "PoSE is not modelled",
    "pose_num_chunks": "PoSE is not modelled",
    "tiled_mlp": "a tiled MLP is not modelled; it needs less memory",
    "tiled_mlp_num_shards": "a tiled MLP is not modelled; it needs less memory",
    "s2_attention": "shifted sparse attention is not modelled; full attention is counted",
    "scaling_softmax": "scaled softmax is not modelled",
    "scaling_softmax_factor": "scaled softmax is not modelled",
    "scaling_softmax_bias": "scaled softmax is not modelled",
    "gemma4_hybrid_attn_impl": _KERNELS,
    "large_head_attention": _KERNELS,
    "flash_attn_d512": _KERNELS,
    "sdpa_varlen": _KERNELS,
    "fused_attn_kernel": _KERNELS,
    "flash_optimum": _KERNELS,
    "flash_attn_fuse_mlp": _KERNELS,
    "flash_attn_fuse_qkv": _KERNELS,
    "flash_attn_rms_norm": _KERNELS,
    "flash_attn_cross_entropy": _KERNELS,
    "lora_mlp_kernel": _KERNELS,
    "lora_qkv_kernel": _KERNELS,
    "lora_o_kernel": _KERNELS,
    "lora_embedding_kernel": _KERNELS,
    "unsloth_lora_mlp": _KERNELS,
    "unsloth_lora_qkv": _KERNELS,
    "unsloth_lora_o": _KERNELS,
    "unsloth_cross_entropy_loss": _KERNELS,
    "unsloth_rms_norm": _KERNELS,
    "unsloth_rope": _KERNELS,
    "use_kernels": _KERNELS,
    "expert_backend": _KERNELS,
    "moe_grouped_backend": _KERNELS,
    "moe_dequant_chunk_size": _KERNELS,
    "moe_bnb_fast": _KERNELS,
    "use_scattermoe": _KERNELS,
    "use_sonicmoe": _KERNELS,
    "use_dsv4_kernels": _KERNELS,
    "use_glm_dsa_kernels": _KERNELS,
    "nvfp4_merge_aware": _KERNELS,
    "nvfp4_merge_aware_start_step": _KERNELS,
    "nonexpert_quantization": "quantised non-expert weights are not modelled",
    "gemma4_fp8_nonexpert": "quantised non-expert weights are not modelled",
    "gemma4_nf4_nonexpert": "quantised non-expert weights are not modelled",
    "dense_mixer": "DenseMixer computes every expert; only the routed ones are counted",
    "diffusion": "diffusion language models are not modelled",
    "llmcompressor": "sparse training is not modelled",
    "grokfast_alpha": "Grokfast keeps a second copy of the gradients, which is not counted",
    "grokfast_lamb": "Grokfast keeps a second copy of the gradients, which is not counted",
    "expert_parallel_size": "experts spread over GPUs are not modelled",
    "expert_parallel_backend": "experts spread over GPUs are not modelled",
    "expert_parallel_num_nvl_bytes": "experts spread over GPUs are not modelled",
    "expert_parallel_num_rdma_bytes": "experts spread over GPUs are not modelled",
    "expert_parallel_token_capacity": "experts spread over GPUs are not modelled",
    "expert_parallel_fallback_on_unsupported": "experts spread over GPUs are not modelled",
    "do_causal_lm_eval": "evaluation by generation is not counted",
    "do_bench_eval": "the benchmark evaluation is not counted",
    "freeze_mm_modules": "encoders of images and sound are counted as trainable, which rows of text do not reach",
    "multipack_real_batches": "packed rows stay apart; each is counted at sequence_len",
}

# utils/schemas/enums.py, LEGACY_ATTN_FLAG_TO_IMPL: the first that is true wins.
_ATTENTION_FLAGS: Final = {
    "xformers_attention": "xformers",
    "sage_attention": "sage",
    "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}


def read(config: Mapping[str, Any], where: str) -> ImportedJob:
    """The job that ``axolotl train`` would run with this file."""
    reader = ConfigReader(config, where, "axolotl", VERSION, UNDERSTOOD)
    reader.recognised("axolotl")
    reader.default("framework_version", VERSION, "the version whose defaults are used")
    reader.copy("model", "base_model")
    overrides = reader.mapping("overrides_of_model_config", "model_config")
    if overrides:
        _model_overrides(reader, overrides)
    _training(reader)
    _precision(reader)
    _method(reader)
    _batch(reader)
    _checkpointing(reader)
    _kernels(reader)
    _data(reader)
    _evaluation_and_saving(reader)
    _sharding(reader)
    strategy = str(reader.value("excess_length_strategy") or "drop").lower()
    datasets = reader.value("datasets", "pretraining_dataset")
    for each in datasets if isinstance(datasets, list) else []:
        split = each.get("split") if isinstance(each, Mapping) else None
        if isinstance(split, str) and "[" in split:
            reader.warn(f"datasets: split {short(split)} takes a part of its data: give num_samples of that part")
    val_size = reader.number("val_set_size")
    return reader.finish(
        harmless=HARMLESS,
        harmless_prefixes=HARMLESS_PREFIXES,
        not_modelled=NOT_MODELLED,
        num_datasets=max(1, len(datasets)) if isinstance(datasets, list) else 1,
        eval_split=val_size,
        drops_long_samples=strategy == "drop",
        loss_on="all" if reader.flag("train_on_inputs") or reader.value("pretraining_dataset") else "completion",
    )


def _training(reader: ConfigReader) -> None:
    """Whether the file is for preferences or rewards: ``rl``, or one of two switches for reward models."""
    rl = reader.value("rl")
    if is_on(rl):
        reader.is_not_fine_tuning(str(rl), f"rl: {short(str(rl))}", "leave out rl")
    for key in ("reward_model", "process_reward_model"):
        if reader.flag(key):
            reader.is_not_fine_tuning("reward modelling", f"{key}: true", f"leave out {key}")


def _model_overrides(reader: ConfigReader, overrides: Mapping[str, Any]) -> None:
    """Fields that change a model's shape; rope settings and the like cost nothing."""
    shape = {
        name: value
        for name, value in overrides.items()
        if name
        in (
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "num_experts_per_tok",
            "num_local_experts",
            "sliding_window",
            "vocab_size",
        )
    }
    if shape:
        reader.set("model_overrides", shape, "overrides_of_model_config")


def _precision(reader: ConfigReader) -> None:
    """``resolve_dtype`` of utils/config/__init__.py, on a GPU that has bf16."""
    bf16_written = "bf16" in reader.config
    bf16, fp16 = reader.value("bf16"), bool(reader.flag("fp16"))
    if bf16 is not None and str(bf16).lower() not in ("auto", "full"):
        bf16 = reader.flag("bf16")
    half, brain = bool(reader.flag("float16")), bool(reader.flag("bfloat16"))
    if not bf16_written or str(bf16).lower() == "auto":
        is_bf16 = not fp16
        if not bf16_written and not fp16:
            reader.default("bf16", True, "utils/schemas/config.py: bf16 is auto, true where the GPU has it")
    else:
        is_bf16 = is_on(bf16)
    in_full = str(bf16).lower() == "full"
    autocasts = (is_bf16 or brain) and not in_full
    if bf16_written:
        reader.set("bf16", autocasts, "bf16")
    elif brain:
        reader.set("bf16", True, "bfloat16")
    if fp16:
        reader.set("fp16", not is_bf16, "fp16")
    if is_bf16 or brain:
        dtype = "bfloat16"
    elif is_on(reader.value("load_in_8bit")) or fp16 or half:
        dtype = "float16"
    else:
        dtype = "float32"
    reader.default("dtype", dtype, "utils/config/__init__.py: torch_dtype follows bf16 and fp16")
    written = dtype_name(reader.value("torch_dtype"))
    if written is not None:
        reader.set("dtype", written, "torch_dtype")
    if is_on(reader.value("tf32")) and str(reader.value("tf32")).lower() != "auto" and not (is_bf16 or fp16 or brain):
        reader.warn("tf32: fp32 matmuls are estimated at the GPU's fp32 rate")


def _method(reader: ConfigReader) -> None:
    adapter = reader.value("adapter")
    four, eight = bool(reader.flag("load_in_4bit")), bool(reader.flag("load_in_8bit"))
    settings = reader.mapping("bnb_config_kwargs") or {}
    gptq = reader.flag("gptq")
    if not is_on(adapter):
        reader.default("method", "full", "utils/schemas/peft.py: adapter")
        if four or eight:
            reader.warn("load_in_4bit and load_in_8bit do nothing without an adapter")
        return
    if adapter not in ("lora", "qlora"):
        reader.warn(f"adapter: {adapter} is not modelled; estimated as LoRA")
    if gptq:
        reader.set("quantization", "gptq-int4", "gptq")
    elif adapter == "qlora":
        # loaders/model.py: nf4 with double quantisation unless bnb_config_kwargs say otherwise.
        key = "load_in_4bit" if four else "adapter"
        quant_type = settings.get("bnb_4bit_quant_type")
        reader.set("quantization", quant_type or "nf4", "bnb_config_kwargs" if quant_type else key)
        double = settings.get("bnb_4bit_use_double_quant")
        if double is not None:
            reader.set("double_quant", double, "bnb_config_kwargs")
        reader.default("double_quant", True, "loaders/model.py: bnb_4bit_use_double_quant")
    elif eight:
        reader.set("quantization", "int8", "load_in_8bit")
    elif four:
        reader.warn(
            "load_in_4bit does nothing with adapter: lora; Axolotl stores the base in 4 bits only for adapter: qlora"
        )
    quantized = "quantization" in reader.fields
    reader.set("method", "qlora" if quantized else "lora", "adapter")
    if reader.flag("peft_autocast_adapter_dtype") is False:
        reader.set("adapter_dtype", reader.fields["dtype"], "peft_autocast_adapter_dtype")
    if quantized and not gptq:
        # peft's preparation lifts everything to fp32, then embeddings, head and norms are taken back to 16 bit
        # (loaders/model.py, _configure_embedding_dtypes); stacked experts stay lifted.
        lifted = is_mixture_of_experts(reader.fields.get("model"))
        reader.default("prepare_model_for_kbit_training", lifted, "loaders/model.py: _configure_embedding_dtypes")
    reader.copy("lora_r", "lora_r")
    reader.default("lora_r", 8, "peft LoraConfig: r")
    reader.copy("lora_alpha", "lora_alpha")
    reader.default("lora_alpha", 8, "peft LoraConfig: lora_alpha")
    reader.copy("lora_dropout", "lora_dropout")
    reader.default("lora_dropout", 0.0, "utils/schemas/peft.py")
    reader.copy("lora_target_modules", "lora_target_modules", convert=names)
    if reader.flag("lora_target_linear"):
        reader.set("lora_target_modules", "all-linear", "lora_target_linear")
    reader.copy("lora_target_parameters", "lora_target_parameters", convert=listed_names)
    reader.copy("lora_modules_to_save", "lora_modules_to_save", convert=listed_names)
    if is_on(reader.value("lora_exclude_modules")):
        reader.warn("lora_exclude_modules: excluded modules are not modelled; every target is counted")
    reader.set("use_dora", reader.flag("peft_use_dora"), "peft_use_dora")
    reader.set("use_rslora", reader.flag("peft_use_rslora"), "peft_use_rslora")


def _batch(reader: ConfigReader) -> None:
    reader.copy("per_device_train_batch_size", "micro_batch_size")
    reader.default("per_device_train_batch_size", 1, "utils/schemas/training.py: micro_batch_size")
    reader.copy("gradient_accumulation_steps", "gradient_accumulation_steps")
    total = reader.number("batch_size")
    if total and "gradient_accumulation_steps" not in reader.fields:
        accumulated = max(1, int(total) // int(reader.fields["per_device_train_batch_size"]))
        reader.set("gradient_accumulation_steps", accumulated, "batch_size", note="batch_size / micro_batch_size")
    reader.default("gradient_accumulation_steps", 1, "utils/schemas/training.py")
    reader.copy("per_device_eval_batch_size", "eval_batch_size")
    micro = reader.fields["per_device_train_batch_size"]
    reader.default("per_device_eval_batch_size", micro, "utils/config/__init__.py: eval_batch_size is micro_batch_size")
    reader.copy("num_train_epochs", "num_epochs")
    reader.default("num_train_epochs", 1.0, "utils/schemas/training.py: num_epochs")
    steps = reader.number("max_steps", at_least=-1)
    if steps is not None and steps > 0:
        reader.set("max_steps", steps, "max_steps")
    optimizer = reader.value("optimizer")
    if optimizer is not None:
        reader.set("optim", optimizer_name(reader, optimizer, "optimizer"), "optimizer")
    reader.default("optim", "adamw_torch_fused", "utils/schemas/training.py: optimizer")


def _checkpointing(reader: ConfigReader) -> None:
    written, kwargs = reader.value("gradient_checkpointing"), reader.mapping("gradient_checkpointing_kwargs")
    offloading = reader.value("activation_offloading")
    # "offload" and "unsloth" are earlier spellings of checkpointing with offloaded boundaries.
    offload_words = ("offload", "offload_disk", "unsloth")
    checkpoints = written in offload_words or (written is not None and bool(reader.flag("gradient_checkpointing")))
    offloads = is_on(offloading) or written in offload_words
    has_adapter = reader.fields["method"] != "full"
    if offloads:
        reader.set("activation_offloading", True, "activation_offloading" if is_on(offloading) else "gradient_checkpointing")
    if offloads and has_adapter and offloading != "hidden_states" and written != "unsloth":
        # With adapters the offloader replaces recomputing (core/builders/base.py).
        reader.set("gradient_checkpointing", False, "activation_offloading", note="offloaded instead of recomputed")
        return
    if written is not None:
        reader.set("gradient_checkpointing", checkpoints, "gradient_checkpointing")
    reader.default("gradient_checkpointing", False, "utils/schemas/config.py")
    if kwargs is not None:
        reader.set("gradient_checkpointing_kwargs", kwargs, "gradient_checkpointing_kwargs")
    elif checkpoints and reader.value("unfrozen_parameters") is None and not is_on(reader.value("rl")):
        reader.default("gradient_checkpointing_kwargs", {"use_reentrant": True}, "utils/config/__init__.py")
    elif checkpoints:
        reader.default("gradient_checkpointing_kwargs", {"use_reentrant": False}, "core/builders/base.py")


def _kernels(reader: ConfigReader) -> None:
    written = reader.value("attn_implementation")
    flag = next((key for key in _ATTENTION_FLAGS if reader.flag(key)), None)
    if written is not None:
        reader.set("attn_implementation", attention_name(reader, written, "attn_implementation"), "attn_implementation")
    elif flag is not None:
        reader.set("attn_implementation", attention_name(reader, _ATTENTION_FLAGS[flag], flag), flag)
    compiles = reader.value("torch_compile")
    if compiles is not None:
        reader.set("torch_compile", is_on(compiles), "torch_compile")
    experts = reader.value("experts_implementation")
    if experts in ("eager", "grouped_mm", "batched_mm"):
        reader.set("experts_implementation", experts, "experts_implementation")
    elif experts is not None:
        reader.set("experts_implementation", "grouped_mm", "experts_implementation", note=f"{experts} is not modelled")
    _loss_kernels(reader)


def _loss_kernels(reader: ConfigReader) -> None:
    """The plugins that keep the logits out of memory, and Liger's other kernels."""
    listed = reader.value("plugins")
    plugins = [str(plugin).lower() for plugin in listed] if isinstance(listed, list) else []
    if listed is not None and not isinstance(listed, list):
        raise CostModelError(f"{reader.where}: plugins must be a list, got {shown(listed)}")
    liger_keys = [key for key in reader.config if key.startswith("liger_")]
    for key in liger_keys:
        reader.value(key)
    has_liger = any("liger" in plugin for plugin in plugins)
    if liger_keys and not has_liger:
        reader.warn("liger_* keys do nothing without the plugin axolotl.integrations.liger.LigerPlugin")
    if has_liger and is_on(reader.value("liger_fused_linear_cross_entropy")):
        reader.set("fused_loss", "fused", "liger_fused_linear_cross_entropy")
    if has_liger and any(is_on(reader.config[key]) for key in liger_keys if "cross_entropy" not in key):
        if "fused_loss" in reader.fields:
            reader.set("use_liger_kernel", True, "plugins")
        else:
            reader.warn("liger_*: Liger's norm, rope and MLP kernels without its fused loss are not modelled")
    cuts = reader.value("cut_cross_entropy")
    if any("cut_cross_entropy" in plugin for plugin in plugins) and (cuts is None or is_on(cuts)):
        reader.set("fused_loss", "fused", "plugins", note="cut cross-entropy")
    if is_on(reader.value("chunked_cross_entropy")):
        reader.set("fused_loss", "chunked", "chunked_cross_entropy")
    known = ("liger", "cut_cross_entropy", "spectrum", "lm_eval", "swanlab", "kernels", "densemixer", "kd", "grokfast")
    for plugin in plugins:
        if not any(name in plugin for name in known):
            reader.warn(f"plugins: {plugin} is not modelled")


def _data(reader: ConfigReader) -> None:
    reader.copy("max_length", "sequence_len", "max_packed_sequence_len")
    reader.default("max_length", 512, "utils/schemas/config.py: sequence_len")
    packing = reader.flag("sample_packing")
    if packing is None and reader.value("max_packed_sequence_len"):
        packing = True
    pads_full = reader.flag("pad_to_sequence_len")
    multiple = reader.number("pad_to_multiple_of")
    if packing:
        reader.set("packing", True, "sample_packing" if "sample_packing" in reader.config else "max_packed_sequence_len")
        reader.default("padding_free", _keeps_samples_apart(reader), "core/builders/causal.py: multipack_real_batches")
        return
    if packing is not None:
        reader.set("packing", False, "sample_packing")
    reader.default("packing", False, "utils/schemas/config.py: sample_packing")
    flattens = reader.value("batch_flattening")
    if is_on(flattens) and (flattens != "auto" or _keeps_samples_apart(reader)):
        reader.set("padding_free", True, "batch_flattening")
    if pads_full:
        reader.set("padding", "max_length", "pad_to_sequence_len")
    elif pads_full is None:
        if multiple:
            reader.set("pad_to_multiple_of", int(multiple), "pad_to_multiple_of")
        reader.default("pad_to_multiple_of", 64, "core/builders/causal.py")
    if reader.flag("group_by_length"):
        reader.set("train_sampling_strategy", "group_by_length", "group_by_length")
    elif reader.flag("curriculum_sampling"):
        reader.set("train_sampling_strategy", "sequential", "curriculum_sampling")


def _keeps_samples_apart(reader: ConfigReader) -> bool:
    """Without a mask over the row; other kernels attend across packed samples (utils/schemas/enums.py)."""
    return reader.fields.get("attn_implementation") in ("flash_attention_2", "flash_attention_3", "flex_attention")


def _evaluation_and_saving(reader: ConfigReader) -> None:
    """``normalize_config`` and ``_configure_save_and_eval_strategy``: a share of the run, or an epoch."""
    epochs = float(reader.fields["num_train_epochs"])
    per_epoch = {name: reader.number(f"{name}s_per_epoch") for name in ("eval", "save")}
    steps = {name: reader.number(f"{name}_steps") for name in ("eval", "save")}
    strategy = {
        "eval": reader.value("eval_strategy", "evaluation_strategy"),
        "save": reader.value("save_strategy"),
    }
    keys = {"eval": "eval_steps", "save": "save_steps"}
    for name, often in per_epoch.items():
        if often:
            share = 1.0 / (often * epochs)
            if share < 1.0:  # 1 would mean every step; Axolotl then leaves the steps alone
                steps[name], keys[name] = share, f"{name}s_per_epoch"
    held_out = is_on(reader.value("val_set_size")) or is_on(reader.value("test_datasets"))
    if not held_out:
        reader.default("eval_strategy", "no", "core/builders/base.py: nothing is held out")
    elif steps["eval"]:
        reader.set("eval_strategy", "steps", keys["eval"])
        reader.set("eval_steps", steps["eval"], keys["eval"])
    elif strategy["eval"] is not None:
        reader.set("eval_strategy", strategy["eval"], reader.key_of("eval_strategy", "evaluation_strategy"))
    reader.default("eval_strategy", "no", "core/builders/base.py")
    val_size = reader.number("val_set_size")
    if val_size is not None and val_size > 1:
        reader.set("num_eval_samples", int(val_size), "val_set_size")
    if steps["save"]:
        reader.set("save_strategy", "steps", keys["save"])
        reader.set("save_steps", steps["save"], keys["save"])
    elif strategy["save"] is not None:
        reader.set("save_strategy", strategy["save"], "save_strategy")
    reader.default("save_strategy", "epoch", "core/builders/base.py")
    reader.set("save_only_model", reader.flag("save_only_model"), "save_only_model")
    if reader.flag("dataloader_drop_last"):
        reader.set("dataloader_drop_last", True, "dataloader_drop_last")


def _sharding(reader: ConfigReader) -> None:
    deepspeed = reader.value("deepspeed")
    if deepspeed is not None:
        reader.set("deepspeed", deepspeed_setting(reader, deepspeed, "deepspeed"), "deepspeed")
    config = reader.mapping("fsdp_config")
    words = reader.converted(reader.value("fsdp"), "fsdp", lambda value: fsdp_words(value, config))
    if words is not None:
        reader.set("fsdp", words, reader.key_of("fsdp", "fsdp_config"))
    sizes = {}
    for key in ("dp_shard_size", "dp_replicate_size", "tensor_parallel_size", "context_parallel_size"):
        size = reader.number(key)
        if size and size > 1:
            sizes[key] = int(size)
    legacy = reader.number("sequence_parallel_degree")
    if legacy and legacy > 1:
        sizes.setdefault("context_parallel_size", int(legacy))
    total = 1
    for size in sizes.values():
        total *= size
    if total > 1:
        reader.set("num_gpus", total, *sizes)
    elif (workers := reader.number("ray_num_workers")) and workers > 1:
        reader.set("num_gpus", int(workers), "ray_num_workers")
    for key in ("tensor_parallel_size", "context_parallel_size"):
        if key in sizes:
            reader.warn(f"{key}: parallelism inside a sequence or a layer is not modelled; {total} data-parallel GPUs are")
    if "dp_shard_size" in sizes and "fsdp" not in reader.fields and "deepspeed" not in reader.fields:
        reader.set("fsdp", "full_shard", "dp_shard_size")
