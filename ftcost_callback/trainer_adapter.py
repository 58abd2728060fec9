"""Live model, optimizer, ``TrainingArguments`` and device -> the plain job mapping of :func:`costmodel.estimate`.

Reads only: nothing here moves a tensor, draws a random number, waits for a device or changes an object. What the live
objects do not show is left out of the job, and the estimate fills it with the framework's default and says so.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from costmodel.errors import CostModelError, shown
from costmodel.specs import OPTIMIZERS, GpuSpec, is_fine_tuning_loss
from costmodel.towers import TOWER_MODULES, counts_towers, tower_configs
from ftcost_callback.dataset_lengths import dataset_lengths, num_documents
from ftcost_callback.live_device import device_facts, versions
from ftcost_callback.live_model import (
    checkpointing_is_reentrant,
    has_routed_experts,
    method_fields,
    model_facts,
    parallel_size,
    quantization_fields,
    unwrapped,
    uses_gradient_checkpointing,
    weights_dtype_fields,
)

if TYPE_CHECKING:
    from costmodel.answer import Estimate

__all__ = ["device_facts", "estimate_trainer", "job_from_objects", "model_facts", "versions"]

_ATTENTION: Final = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_ORDERS: Final = ("random", "sequential", "group_by_length")
_EXPERTS: Final = ("eager", "grouped_mm", "batched_mm")
# TRL's trainers whose step is more than one forward and backward of the batch, by the name of their arguments.
_UNMODELLED_TRL: Final = {
    "DPOConfig": "each step also runs a reference model over the pairs",
    "KTOConfig": "each step also runs a reference model over the batch",
    "RewardConfig": "each sample is a pair of sequences under a head of one number",
    "GRPOConfig": "each step also generates and scores what it trains on",
    "RLOOConfig": "each step also generates and scores what it trains on",
}
_TORCH_OPTIMIZERS: Final = {"SGD": "sgd", "Adagrad": "adagrad", "RMSprop": "rmsprop"}


def estimate_trainer(trainer: Any, **overrides: Any) -> Estimate:
    """The estimate of the run that ``trainer`` is about to do: before ``trainer.train()``, nothing is trained.

    ``overrides`` are job fields that win over what was read, such as ``usd_per_gpu_hour``, ``lengths``, or ``gpu`` (a
    catalogue name or a :class:`GpuSpec`) to ask for another machine. Raises :class:`CostModelError` for a model,
    method or setting that is not modelled.
    """
    from costmodel.estimation import estimate

    job = job_from_objects(
        model=trainer.model,
        args=trainer.args,
        optimizer=trainer.optimizer,
        state=trainer.state,
        train_dataset=trainer.train_dataset,
        eval_dataset=trainer.eval_dataset,
        processing_class=getattr(trainer, "processing_class", None),
        data_collator=getattr(trainer, "data_collator", None),
        gpu=overrides.pop("gpu", None),
    )
    answer = estimate(job | overrides)
    note = unmodelled_order(trainer.args) if "train_sampling_strategy" not in overrides else None
    return dataclasses.replace(answer, warnings=(*answer.warnings, note)) if note is not None else answer


def job_from_objects(
    *,
    model: Any,
    args: Any,
    optimizer: Any = None,
    state: Any = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    processing_class: Any = None,
    data_collator: Any = None,
    gpu: str | Mapping[str, Any] | GpuSpec | None = None,
    framework: str | None = None,
) -> dict[str, Any]:
    """The job mapping, without the fields that the live objects do not show. ``gpu`` overrides the device found.

    On a CPU ``gpu`` is absent unless given (``ftcost_callback.probe`` measures one): memory is then predicted, time
    is not. ``processing_class`` is not read: lengths come from what has been tokenised. Raises
    :class:`CostModelError` where no job field describes what is there (another kind of adapter, an unknown optimizer).
    """
    model = unwrapped(model)
    _require_modelled_training(model, args)
    fields: dict[str, Any] = {
        **_model_fields(model),
        **_device_fields(args, gpu),
        **method_fields(model),
        **quantization_fields(model),
        **weights_dtype_fields(model),
        **_framework_fields(args, framework),
        **_batch_fields(model, args, state),
        **_kernel_fields(model, args),
        "optim": _optimizer_name(optimizer, args),
        **_checkpointing_fields(model, args),
        **_schedule_fields(args, eval_dataset),
        **_data_fields(args, train_dataset, data_collator),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _require_modelled_training(model: Any, args: Any) -> None:
    """Raises :class:`CostModelError` for a step that is no plain forward, backward and update of the batch."""
    names = [each.__name__ for each in type(args).__mro__ if each.__module__.startswith("trl.")]
    if names and "SFTConfig" not in names:
        why = next((_UNMODELLED_TRL[name] for name in names if name in _UNMODELLED_TRL), "only TRL's SFT is")
        raise CostModelError(f"training with TRL's {names[0].removesuffix('Config')} is not modelled: {why}")
    for name, what in (("tp_size", "tensor"), ("pp_size", "pipeline"), ("ep_size", "expert")):
        if parallel_size(model, args, name) > 1:
            raise CostModelError(f"{what} parallelism is not modelled ({name} {parallel_size(model, args, name)})")


# --- model, device, software ------------------------------------------------------------------------------------------


def _model_config(model: Any) -> dict[str, Any]:
    """The live config as a plain mapping: what was loaded counts, not what stands on the hub."""
    config = getattr(model, "config", None)
    to_dict = getattr(config, "to_dict", None)
    if to_dict is None:
        raise CostModelError(f"{type(model).__name__} has no Hugging Face config, so its size is not known")
    fields = {name: value for name, value in to_dict().items() if name != "quantization_config"}
    plain: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    return plain


def _model_fields(model: Any) -> dict[str, Any]:
    config = _model_config(model)
    fields: dict[str, Any] = {"model": config}
    if tower_configs(config):
        modules = {part for name, _ in model.named_modules() for part in name.split(".")}
        # what the modules of an encoder that is not counted are called is not known
        fields["load_towers"] = not counts_towers(config) or not modules.isdisjoint(TOWER_MODULES)
        tied = getattr(model, "all_tied_weights_keys", None)
        if isinstance(tied, Mapping):  # a checkpoint that holds both is not tied, whatever its config says
            config["tie_word_embeddings"] = any(name.endswith("lm_head.weight") for name in tied)
    return fields


def _device_fields(args: Any, gpu: str | Mapping[str, Any] | GpuSpec | None) -> dict[str, Any]:
    num_gpus = int(args.world_size) * max(1, int(args.n_gpu)) if args.device.type != "cpu" else int(args.world_size)
    if gpu is None:
        gpu = device_facts(args.device).get("gpu")
    elif isinstance(gpu, GpuSpec):
        gpu = gpu.model_dump(exclude_none=True)
    return {"gpu": gpu, "num_gpus": max(1, num_gpus)}


def _framework_fields(args: Any, framework: str | None) -> dict[str, Any]:
    if framework is None:
        framework = "trl" if any(each.__module__.startswith("trl.") for each in type(args).__mro__) else "transformers"
    package = {"trl": "trl", "transformers": "transformers", "unsloth": "unsloth"}.get(framework)
    try:
        version = importlib.metadata.version(package) if package is not None else None
    except importlib.metadata.PackageNotFoundError:
        version = None
    return {"framework": framework, "framework_version": version}


# --- batch, kernels, optimizer ----------------------------------------------------------------------------------------


def _batch_fields(model: Any, args: Any, state: Any) -> dict[str, Any]:
    # args keep the batch that was asked for; the state knows what auto_find_batch_size made of it.
    live = getattr(state, "train_batch_size", None)
    per_device = int(live) // max(1, int(args.n_gpu)) if live else int(args.per_device_train_batch_size)
    return {
        "per_device_train_batch_size": max(1, per_device),
        "gradient_accumulation_steps": int(args.gradient_accumulation_steps),
        "bf16": bool(args.bf16),
        "fp16": bool(args.fp16),
        "fsdp": _plain_setting(getattr(args, "fsdp", None)) or _loaded_sharding(model),
        "deepspeed": _plain_setting(getattr(args, "deepspeed", None)),
    }


def _loaded_sharding(model: Any) -> str | None:
    """FSDP2 of a model that was loaded with transformers' ``DistributedConfig``."""
    return "full_shard" if parallel_size(model, None, "fsdp_size") > 1 else None


def _plain_setting(value: Any) -> str | dict[str, Any] | None:
    """``fsdp`` and ``deepspeed`` come as a name, a list of options, a mapping or a flag."""
    if not value:
        return None
    if isinstance(value, (str, dict)):
        return value
    if isinstance(value, (list, tuple)):
        return " ".join(str(getattr(each, "value", each)) for each in value)
    return "full_shard" if value is True else str(value)


def _kernel_fields(model: Any, args: Any) -> dict[str, Any]:
    config = model.config
    attention = str(getattr(config, "_attn_implementation", None) or "")
    if attention not in _ATTENTION:  # a kernel from the hub, such as kernels-community/flash-attn3
        attention = (
            "flash_attention_3" if "flash-attn3" in attention else "flash_attention_2" if "flash-attn" in attention else ""
        )
    experts = getattr(config, "_experts_implementation", None) if has_routed_experts(model) else None
    loss = getattr(args, "loss_type", None)
    return {
        "attn_implementation": attention or None,
        "experts_implementation": experts if experts in _EXPERTS else None,
        "torch_compile": bool(args.torch_compile),
        "use_liger_kernel": bool(getattr(args, "use_liger_kernel", False)),
        "activation_offloading": getattr(args, "activation_offloading", None),
        "loss_type": loss if is_fine_tuning_loss(loss) else None,
    }


def _optimizer_name(optimizer: Any, args: Any) -> str:
    """transformers' name of the live optimizer; that of the arguments before there is one.

    Raises :class:`CostModelError` for an optimizer whose memory and time are not modelled.
    """
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    asked = str(getattr(args.optim, "value", args.optim))
    if inner is None or type(inner).__name__ in {"DummyOptim", "DummyOptimizer"}:
        name = asked
    else:
        name = _name_by_class(inner, asked)
    if name not in OPTIMIZERS:
        raise CostModelError(f"optimizer {name} is not modelled; those that are: {', '.join(OPTIMIZERS)}")
    return name


def _name_by_class(optimizer: Any, asked: str) -> str:
    kind, home = type(optimizer).__name__, type(optimizer).__module__
    if home.startswith("torch.optim"):
        if kind in {"Adam", "AdamW"}:
            fused = any(group.get("fused") for group in optimizer.param_groups)
            return "adamw_torch_fused" if fused else "adamw_torch"
        return _TORCH_OPTIMIZERS.get(kind, kind)
    if home.startswith("bitsandbytes"):
        bits = getattr(getattr(optimizer, "args", None), "optim_bits", 8 if kind.endswith("8bit") else 32)
        paged = "paged_" if getattr(optimizer, "is_paged", False) or kind.startswith("Paged") else ""
        family = "lion" if "Lion" in kind else "adamw" if "Adam" in kind else kind
        if family == "adamw" and not paged:
            return "adamw_bnb_8bit" if bits == 8 else "adamw_torch"
        return f"{paged}{family}_{bits}bit"
    if home.startswith("torchao") and kind in {"AdamW8bit", "AdamW4bit"}:
        return f"adamw_torch_{kind[-4:]}"
    if kind == "Adafactor":
        return "adafactor"
    # Made by the Trainer from its own name (apex, anyprecision), or brought by the user.
    return asked if "adamw" in kind.lower() or kind.lower() in asked.replace("_", "") else kind


def _checkpointing_fields(model: Any, args: Any) -> dict[str, Any]:
    # The Trainer switches it on in train(); before that only the arguments know.
    asked = bool(getattr(args, "gradient_checkpointing", False) or getattr(args, "activation_checkpointing", False))
    if not (asked or uses_gradient_checkpointing(model)):
        return {"gradient_checkpointing": False}
    reentrant = checkpointing_is_reentrant(model)
    if reentrant is None:
        for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
            kwargs = getattr(args, name, None)
            if isinstance(kwargs, Mapping) and isinstance(kwargs.get("use_reentrant"), bool):
                reentrant = kwargs["use_reentrant"]
    return {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant} if reentrant is not None else None,
    }


# --- schedule and data ------------------------------------------------------------------------------------------------


def _schedule_fields(args: Any, eval_dataset: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "eval_strategy": _strategy(args.eval_strategy),
        "save_strategy": _strategy(args.save_strategy),
        "save_only_model": bool(args.save_only_model),
        "dataloader_drop_last": bool(args.dataloader_drop_last) or None,
    }
    if args.max_steps and args.max_steps > 0:
        fields["max_steps"] = int(args.max_steps)
    else:
        fields["num_train_epochs"] = float(args.num_train_epochs)
    fields["eval_on_start"] = getattr(args, "eval_on_start", False) or None
    if fields["eval_strategy"] != "no":
        fields["eval_steps"] = args.eval_steps
        fields["eval_delay"] = getattr(args, "eval_delay", None) or None
    if fields["eval_strategy"] != "no" or fields["eval_on_start"]:
        fields["per_device_eval_batch_size"] = int(args.per_device_eval_batch_size)
        fields["num_eval_samples"] = num_documents(eval_dataset) or None
    if fields["save_strategy"] == "steps":
        fields["save_steps"] = args.save_steps
    return fields


def _strategy(value: Any) -> str:
    return str(getattr(value, "value", value))


def _data_fields(args: Any, train_dataset: Any, data_collator: Any) -> dict[str, Any]:
    found = dataset_lengths(train_dataset)
    fields: dict[str, Any] = {
        "max_length": getattr(args, "max_length", None),
        "train_sampling_strategy": _sampling(args),
        **_padding_fields(args, data_collator),
    }
    if found is None:
        fields["num_samples"] = num_documents(train_dataset) or None
        return fields
    fields |= {
        "lengths": {"histogram": found.histogram},
        "num_samples": found.num_samples,
        "supervised_fraction": found.supervised_fraction,
    }
    if fields["max_length"] is None:
        fields["max_length"] = found.longest_tokens  # nothing is cut, so the longest sample is the bound
    return fields


def _sampling(args: Any) -> str | None:
    if getattr(args, "group_by_length", False):  # transformers 4
        return "group_by_length"
    strategy = getattr(args, "train_sampling_strategy", None)
    return strategy if strategy in _ORDERS else None


def unmodelled_order(args: Any) -> str | None:
    """What to say of an order of samples that no job field describes; ``None`` for the others."""
    strategy = getattr(args, "train_sampling_strategy", None)
    if strategy is None or strategy in _ORDERS:
        return None
    return f"train_sampling_strategy: {shown(strategy)} is not modelled; a random order is assumed"


def _padding_fields(args: Any, data_collator: Any) -> dict[str, Any]:
    """From TRL's arguments, else from the collator where it is one of transformers'."""
    packing = getattr(args, "packing", None)
    padding_free = getattr(args, "padding_free", None)
    if packing and str(getattr(args, "packing_strategy", "bfd")).startswith("bfd"):
        padding_free = True  # TRL flattens what it packs by best fit
    if padding_free is None and data_collator is not None:
        padding_free = True if type(data_collator).__name__ == "DataCollatorWithFlattening" else None
    multiple = getattr(args, "pad_to_multiple_of", None) or getattr(data_collator, "pad_to_multiple_of", None)
    padding = getattr(data_collator, "padding", None)
    padding = str(getattr(padding, "value", padding)) if padding is not None else None
    return {
        "packing": bool(packing) if packing is not None else None,
        "padding_free": bool(padding_free) if padding_free is not None else None,
        "pad_to_multiple_of": multiple if isinstance(multiple, int) else None,
        "padding": {"max_length": "max_length", "longest": "longest", "True": "longest"}.get(padding or ""),
    }
