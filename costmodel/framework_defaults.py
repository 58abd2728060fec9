"""What frameworks and peft fill in themselves, read from their source: facts only, each with the file it stands in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

READ_VERSIONS: Final[dict[str, str]] = {"llamafactory": "0.9.5", "litgpt": "0.5.13", "unsloth": "2026.10.9"}
"""The versions whose own defaults stand below. What they leave to the Trainer underneath is transformers'."""

QUERY_AND_VALUE: Final = ("q_proj", "v_proj")

_EVERY: Final[dict[str, dict[str, Any]]] = {
    "llamafactory": {
        # model/model_utils/checkpointing.py: on unless disable_gradient_checkpointing; peft's preparation is not called
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},  # hparams/model_args.py: use_reentrant_gc
        "prepare_model_for_kbit_training": False,
        "double_quant": True,  # hparams/model_args.py: double_quantization
        "max_length": 2048,  # hparams/data_args.py: cutoff_len
        "pad_to_multiple_of": 8,  # train/sft/workflow.py
    },
    "litgpt": {
        "gradient_checkpointing": False,  # finetune/lora.py: one device runs plainly
        "prepare_model_for_kbit_training": False,  # nothing of peft is called
        "optim": "adamw_torch",  # finetune/lora.py: torch.optim.AdamW without arguments
        "per_device_train_batch_size": 1,  # finetune/lora.py: TrainArgs(micro_batch_size=1, global_batch_size=16, epochs=5)
        "num_train_epochs": 5.0,
    },
    "unsloth": {
        "gradient_checkpointing": True,  # models/loader.py, models/llama.py: use_gradient_checkpointing
        "prepare_model_for_kbit_training": False,  # unsloth_zoo/training_utils.py lifts what is trained, and nothing else
        "double_quant": True,  # models/loader.py, models/llama.py: bnb_4bit_use_double_quant
        "max_length": 2048,  # models/loader.py: max_seq_length
        # models/rl.py, the replacements in TRL's configurations
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 4,
        "optim": "adamw_8bit",
    },
}

_OF_ADAPTERS: Final[dict[str, dict[str, Any]]] = {
    "llamafactory": {"lora_target_modules": "all-linear"},  # hparams/finetuning_args.py: lora_target is all
    # finetune/lora.py: lora_query and lora_value; of a family that has them fused, peft's targets stand in
    "litgpt": {"lora_alpha": 16, "lora_dropout": 0.05, "lora_target_modules": QUERY_AND_VALUE},
    "unsloth": {  # models/llama.py: get_peft_model
        "lora_r": 16,
        "lora_alpha": 16,
        "lora_target_modules": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    },
}


_LITGPT_GLOBAL_BATCH_SIZE: Final = 16  # finetune/lora.py, over all devices


def own_defaults(
    framework: str, *, is_peft: bool, lora_r: int | None, num_gpus: int = 1, batch_size: int | None = None
) -> Mapping[str, Any]:
    """The job fields that ``framework`` fills by itself, where they differ from transformers' and peft's.

    ``batch_size``: of a GPU, as the job gives it.
    """
    fields = dict(_EVERY.get(framework, {}))
    if framework == "litgpt":  # args.py: TrainArgs.gradient_accumulation_iters
        of_each = batch_size or fields["per_device_train_batch_size"]
        fields["gradient_accumulation_steps"] = max(1, _LITGPT_GLOBAL_BATCH_SIZE // num_gpus // of_each)
    if is_peft:
        fields |= _OF_ADAPTERS.get(framework, {})
        if framework == "llamafactory":
            fields["lora_alpha"] = 2 * (lora_r or 8)  # hparams/finetuning_args.py
    return fields


# peft 0.21, utils/constants.py, of the families modelled here. It knows no other: `get_peft_model` then stops and asks.
_PEFT_TARGETS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma4_text", "gptj", "llama", "llama4_text"), QUERY_AND_VALUE),
    **dict.fromkeys(("mistral", "mixtral", "opt", "qwen2", "qwen3", "stablelm"), QUERY_AND_VALUE),
    **dict.fromkeys(("bloom", "falcon", "gpt_neox"), ("query_key_value",)),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    "mpt": ("Wqkv",),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
}


def peft_targets(family: str) -> tuple[str, ...] | None:
    """``lora_target_modules`` that peft takes for a family when none are given; ``None``: it takes none, and refuses."""
    return _PEFT_TARGETS.get(family)
