"""``transformers.TrainingArguments`` keys -> job fields: shared by TRL, LLaMA-Factory and W&B.

Names and defaults: transformers 5.24, training_args.py and training_args_seq2seq.py; the names that 4.x had are read too.
"""

from __future__ import annotations

from typing import Any, Final

from costmodel.errors import CostModelError, shown
from costmodel.importers.reading import ConfigReader, deepspeed_setting, fsdp_words, is_on, optimizer_name

# Read into the job.
UNDERSTOOD: Final = frozenset(
    {
        "activation_checkpointing",
        "activation_checkpointing_kwargs",
        "adafactor",
        "bf16",
        "dataloader_drop_last",
        "deepspeed",
        "eval_delay",
        "eval_on_start",
        "eval_steps",
        "eval_strategy",
        "evaluation_strategy",
        "fp16",
        "fsdp",
        "fsdp_config",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "group_by_length",
        "max_steps",
        "num_train_epochs",
        "optim",
        "per_device_eval_batch_size",
        "per_device_train_batch_size",
        "per_gpu_eval_batch_size",
        "per_gpu_train_batch_size",
        "save_only_model",
        "save_steps",
        "save_strategy",
        "tf32",
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
        "train_sampling_strategy",
        "use_cache",
        "use_liger",
        "use_liger_kernel",
    }
)

# Nothing here moves memory, time or money: what is learned, what is logged, where files go.
HARMLESS: Final = frozenset(
    {
        "output_dir",
        "overwrite_output_dir",
        "do_train",
        "do_eval",
        "do_predict",
        "prediction_loss_only",
        "learning_rate",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_ratio",
        "warmup_steps",
        "optim_args",
        "log_level",
        "log_level_replica",
        "log_on_each_node",
        "logging_dir",
        "logging_strategy",
        "logging_first_step",
        "logging_nan_inf_filter",
        "save_total_limit",
        "save_safetensors",
        "save_on_each_node",
        "restore_callback_states_from_checkpoint",
        "enable_jit_checkpoint",
        "seed",
        "data_seed",
        "bf16_full_eval",
        "fp16_full_eval",
        "fp16_opt_level",
        "fp16_backend",
        "half_precision_backend",
        "eval_do_concat_batches",
        "eval_use_gather_object",
        "eval_accumulation_steps",
        "include_for_metrics",
        "include_inputs_for_metrics",
        "batch_eval_metrics",
        "local_rank",
        "ddp_backend",
        "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_static_graph",
        "ddp_timeout",
        "debug",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context",
        "dataloader_in_order",
        "run_name",
        "disable_tqdm",
        "remove_unused_columns",
        "label_names",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "ignore_data_skip",
        "accelerator_config",
        "length_column_name",
        "report_to",
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
        "push_to_hub",
        "push_to_hub_model_id",
        "push_to_hub_organization",
        "push_to_hub_token",
        "skip_memory_metrics",
        "average_tokens_across_devices",
        "include_num_input_tokens_seen",
        "include_tokens_per_second",
        "neftune_noise_alpha",
        "liger_kernel_config",
        "use_legacy_prediction_loop",
        "dispatch_batches",
        "split_batches",
        "past_index",
        "tpu_num_cores",
        "tpu_metrics_debug",
        "mp_parameters",
        "jit_mode_eval",
        "ray_scope",
        "xpu_backend",
        "sharded_ddp",
        "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_min_num_params",
        "sortish_sampler",
        "generation_max_length",
        "generation_num_beams",
        "generation_config",
        "logging_steps",
        "_n_gpu",
    }
)
HARMLESS_PREFIXES: Final = ("hub_", "wandb_", "mlflow_", "comet_", "swanlab_", "use_swanlab", "trackio_")

_NOT_ON_A_CARD: Final = (
    "the estimate is of the device that --gpu names; for this processor run ftcost probe, then give --gpu probe"
)

# Read, and said when switched on: they move cost and the model does not follow them.
NOT_MODELLED: Final[dict[str, str]] = {
    "auto_find_batch_size": "the batch may be halved while it runs; the estimate is of the batch that is written",
    "optim_target_modules": "low-rank projected gradients are not modelled; full gradients and states are counted",
    "label_smoothing_factor": "the second pass over the logits for label smoothing is not counted",
    "parallelism_config": "parallelism other than over the data is not modelled",
    "full_determinism": "deterministic kernels are slower than the estimate",
    "use_cpu": _NOT_ON_A_CARD,
    "no_cuda": _NOT_ON_A_CARD,
    "use_mps_device": "the estimate is of the GPU that --gpu names; an Apple GPU is not modelled",
    "use_ipex": _NOT_ON_A_CARD,
    "resume_from_checkpoint": "the estimate is of the whole run, from its first step",
    "torch_empty_cache_steps": "emptying the allocator's cache is not modelled",
    "torchdynamo": "a torchdynamo backend is not modelled; torch_compile is",
    "predict_with_generate": "generation in evaluations is not counted",
}


def read_training_arguments(reader: ConfigReader, *, logging_steps: float = 500) -> None:
    """Batch, precision, kernels, schedule and sharding into the job. ``logging_steps``: the tool's default."""
    reader.copy("per_device_train_batch_size", "per_device_train_batch_size", "per_gpu_train_batch_size")
    reader.copy("gradient_accumulation_steps", "gradient_accumulation_steps")
    reader.copy("num_train_epochs", "num_train_epochs")
    max_steps = reader.number("max_steps", at_least=-1)
    if max_steps is not None and max_steps > 0:
        reader.set("max_steps", max_steps, "max_steps")
    reader.set("bf16", reader.flag("bf16"), "bf16")
    reader.set("fp16", reader.flag("fp16"), "fp16")
    reader.set("torch_compile", _compiles(reader), "torch_compile")
    reader.set("use_cache", reader.flag("use_cache"), "use_cache")
    reader.set("use_liger_kernel", reader.flag("use_liger_kernel", "use_liger"), "use_liger_kernel")
    _checkpointing(reader)
    _optimizer(reader)
    _sampling(reader)
    _evaluation_and_saving(reader, logging_steps)
    fsdp = reader.value("fsdp")
    config = reader.value("fsdp_config")
    if not isinstance(config, str):  # text is the path of a file, which is not read
        config = reader.mapping("fsdp_config")
    words = reader.converted(fsdp, "fsdp", lambda value: fsdp_words(value, config))
    if is_on(fsdp):  # fsdp_config alone switches nothing on
        reader.set("fsdp", words, "fsdp")
    deepspeed = reader.value("deepspeed")
    if deepspeed is not None:
        reader.set("deepspeed", deepspeed_setting(reader, deepspeed, "deepspeed"), "deepspeed")
    if is_on(reader.value("tf32")) and not (reader.fields.get("bf16") or reader.fields.get("fp16")):
        reader.warn("tf32: fp32 matmuls are estimated at the GPU's fp32 rate")


def _compiles(reader: ConfigReader) -> bool | None:
    asked = reader.flag("torch_compile")
    # A backend or a mode alone switches it on (training_args.py, __post_init__).
    return True if is_on(reader.config.get("torch_compile_backend") or reader.config.get("torch_compile_mode")) else asked


def _checkpointing(reader: ConfigReader) -> None:
    # activation_checkpointing is the newer name and wins (training_args.py, __post_init__).
    names = ("activation_checkpointing", "gradient_checkpointing")
    reader.set("gradient_checkpointing", reader.flag(*names), reader.key_of(*names))
    details = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    kwargs = reader.mapping(*details)
    if kwargs is not None:
        reader.set("gradient_checkpointing_kwargs", kwargs, reader.key_of(*details))


def _optimizer(reader: ConfigReader) -> None:
    name = reader.value("optim")
    if name is not None:
        reader.set("optim", optimizer_name(reader, name, "optim"), "optim")
    if reader.flag("adafactor"):
        reader.set("optim", "adafactor", "adafactor")


def _sampling(reader: ConfigReader) -> None:
    strategy = reader.value("train_sampling_strategy")
    if strategy in ("random", "sequential", "group_by_length"):
        reader.set("train_sampling_strategy", strategy, "train_sampling_strategy")
    elif strategy is not None:
        reader.warn(f"train_sampling_strategy: {shown(strategy)} is not modelled; a random order is assumed")
    if reader.flag("group_by_length"):  # transformers 4
        reader.set("train_sampling_strategy", "group_by_length", "group_by_length")


def _evaluation_and_saving(reader: ConfigReader, logging_steps: float) -> None:
    names = ("eval_strategy", "evaluation_strategy")
    strategy = _strategy(reader.value(*names))
    reader.set("eval_strategy", strategy, reader.key_of(*names))
    steps = reader.number("eval_steps")
    if steps is not None and steps > 0:
        reader.set("eval_steps", steps, "eval_steps")
    elif strategy == "steps":
        if steps == 0:
            reader.warn("eval_steps: 0 counts as not said; the Trainer then evaluates every logging_steps")
        # eval_steps follows logging_steps (training_args.py, __post_init__).
        written = reader.number("logging_steps")
        if written == 0:
            raise CostModelError(f"{reader.where}: eval_strategy steps needs an eval_steps or logging_steps above 0")
        if written:
            reader.set("eval_steps", written, "logging_steps")
        else:
            reader.default("eval_steps", logging_steps, "eval_steps follows logging_steps")
    delay = reader.number("eval_delay")
    if delay:
        reader.set("eval_delay", delay, "eval_delay")
    for name in ("eval_on_start", "dataloader_drop_last"):
        if reader.flag(name):
            reader.set(name, True, name)
    reader.copy("per_device_eval_batch_size", "per_device_eval_batch_size", "per_gpu_eval_batch_size")
    reader.set("save_strategy", _strategy(reader.value("save_strategy")), "save_strategy")
    steps = reader.number("save_steps")
    if steps is not None and steps > 0:
        reader.set("save_steps", steps, "save_steps")
    reader.set("save_only_model", reader.flag("save_only_model"), "save_only_model")


def _strategy(value: Any) -> str | None:
    """``IntervalStrategy.STEPS``, ``steps``, or YAML's false for ``no``."""
    if value is None:
        return None
    return "no" if value is False else str(value).lower().rpartition(".")[2]
