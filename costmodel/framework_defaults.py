"""What frameworks and peft fill in themselves, and what they stand on, by version: facts only, each with its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from costmodel.errors import CostModelError, shown

READ_VERSIONS: Final[dict[str, str]] = {
    "transformers": "5.24",
    "trl": "1.16",
    "axolotl": "0.19.0",
    "llamafactory": "0.9.5",
    "litgpt": "0.5.13",
    "unsloth": "2026.10.9",
}
"""The versions whose defaults were read; assumed when a job names none. What they leave to the Trainer is transformers'."""

OWN_KERNEL_FRAMEWORKS: Final = frozenset({"unsloth", "litgpt", "torchtune", "other"})
"""Frameworks that bring their own kernels or loops, of which nothing is modelled."""

READ_STACKS: Final = frozenset({"transformers", "trl", "axolotl", "llamafactory", "litgpt"})
"""Frameworks whose code was read or whose runs were measured."""


def is_not_modelled(framework: str) -> bool:
    """Whether it has kernels of its own that were neither read nor measured: it is counted as transformers."""
    return framework in OWN_KERNEL_FRAMEWORKS and framework not in READ_STACKS


def _release(text: str) -> tuple[int, int, int]:
    match = re.match(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", text)
    if not match:
        raise CostModelError(f"framework_version must start with a number such as 5.24 or 4.40, got {shown(text)}")
    return int(match[1]), int(match[2] or 0), int(match[3] or 0)


def major_and_minor(text: str) -> tuple[int, int]:
    return _release(text)[:2]


# The first releases that run on transformers 5, and on 5.4, by the pins in their package metadata: Axolotl 0.13.2 asks for
# 4.57.6, 0.14.0 for 5.0.0, 0.15.0 for 5.3.0, 0.16.1 for 5.5.0; LLaMA-Factory 0.9.4 for 4.57.1 at most, 0.9.5 for 5.6.0.
_ON_TRANSFORMERS_5: Final = {"transformers": (5, 0, 0), "trl": (1, 0, 0), "axolotl": (0, 14, 0), "llamafactory": (0, 9, 5)}
_ON_TRANSFORMERS_5_4: Final = {**_ON_TRANSFORMERS_5, "transformers": (5, 4, 0), "axolotl": (0, 16, 0)}

# The last releases that run on transformers 4, where each expert is a linear and bitsandbytes quantises it.
LAST_ON_TRANSFORMERS_4: Final[Mapping[str, str]] = {
    "transformers": "4.57",
    "trl": "0.24",
    "axolotl": "0.13",
    "llamafactory": "0.9.4",
}


def transformers_major(framework: str, version: str) -> int:
    """Which transformers generation runs underneath: 4 keeps a Linear for each expert, 5 stacks them.

    Of a framework whose pins were not read, the newest is taken.
    """
    if framework == "transformers":
        return major_and_minor(version)[0]
    first = _ON_TRANSFORMERS_5.get(framework)
    return 5 if first is None or _release(version) >= first else 4


def evaluates_at_the_end(framework: str, version: str) -> bool:
    """Whether the Trainer with an ``eval_strategy`` of steps evaluates at the last step too, as it always saved there.

    ``DefaultFlowCallback.on_step_end`` does since transformers 5.4 (sources of 5.3 and 5.4).
    """
    first = _ON_TRANSFORMERS_5_4.get(framework)
    return first is None or _release(version) >= first


def is_before_transformers_45(framework: str, version: str) -> bool:
    """Whether the stack is older than transformers 4.45 and bitsandbytes 0.44, both of September 2024.

    bitsandbytes' ``MatMul4Bit`` kept its input in 0.41.1, 0.42.0 and 0.43.1, and no longer in 0.44.1
    (``autograd/_functions.py``). A stack that names neither is taken as new.
    """
    first_after = {"transformers": (4, 45), "trl": (0, 11)}.get(framework)
    return first_after is not None and major_and_minor(version) < first_after


def four_bit_keeps_inputs(framework: str, version: str) -> bool:
    """Whether 4-bit linears keep their inputs. litgpt 0.4 still pins bitsandbytes 0.42.0 (its package metadata)."""
    if framework == "litgpt":
        return major_and_minor(version) < (0, 5)
    return is_before_transformers_45(framework, version)


# Multimodal models of which ``AutoModelForCausalLM`` gives the language model alone (transformers 5.24, modeling_auto.py).
_CAUSAL_LM_WITHOUT_TOWERS: Final = frozenset({"llama4", "qwen3_5", "qwen3_5_moe"})


def loads_towers(framework: str, wrapper: str) -> bool:
    """Whether a framework by itself loads the encoders of images and sound of a multimodal model.

    ``wrapper``: the ``model_type`` of the whole.

    TRL takes the class that ``config.json`` names (1.16, trainer/utils.py), which is the whole model. litgpt and torchtune
    have language models of their own. The loaders of the others were not read; the whole model is taken.
    """
    if framework in ("litgpt", "torchtune"):
        return False
    return framework != "transformers" or wrapper not in _CAUSAL_LM_WITHOUT_TOWERS


def adapts_towers(framework: str) -> bool:
    """Whether LoRA targets reach those encoders: LLaMA-Factory freezes them, Unsloth has a switch for each part."""
    return framework not in ("llamafactory", "unsloth")


# The first releases after bitsandbytes 0.48 (30 September 2025), or that allow it: litgpt pinned an older one until 0.5.12.
_AFTER_BITSANDBYTES_48: Final = {
    "transformers": (4, 57, 0),
    "trl": (0, 24, 0),
    "axolotl": (0, 13, 0),
    "llamafactory": (0, 9, 4),
    "litgpt": (0, 5, 13),
    "unsloth": (2025, 10, 0),
}


def dequantises_by_table(framework: str, version: str) -> bool:
    """Whether bitsandbytes looks 4-bit values up instead of walking a tree of comparisons, as it did before 0.48.

    Source: the kernels in the wheels of 0.47.0 and 0.48.0. A stack that names neither is taken as new.
    """
    first = _AFTER_BITSANDBYTES_48.get(framework)
    return first is None or _release(version) >= first


QUERY_AND_VALUE: Final = ("q_proj", "v_proj")
FUSED_QUERY_KEY_VALUE: Final = frozenset({"Wqkv", "c_attn", "qkv_proj", "query_key_value"})

_EVERY: Final[dict[str, dict[str, Any]]] = {
    "axolotl": {  # the keys' own sources stand in importers/axolotl.py, which reads its files
        "gradient_checkpointing": False,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "double_quant": True,
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1.0,
        "max_length": 512,
        "save_strategy": "epoch",
    },
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
        # models/llama.py, unsloth_zoo/compiler.py: unsloth_fused_ce_loss, unless UNSLOTH_RETURN_LOGITS is set
        "fused_loss": "fused",
    },
}

_UNSLOTH_OFFLOADS_FROM_LENGTH: Final = 512  # models/_utils.py: apply_unsloth_gradient_checkpointing


def offloads_activations(framework: str, *, gradient_checkpointing: bool, max_length: int) -> bool:
    """Whether its checkpointing moves the inputs of the layers to the host by itself: Unsloth's, unless rows are short."""
    return framework == "unsloth" and gradient_checkpointing and max_length >= _UNSLOTH_OFFLOADS_FROM_LENGTH


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


def default_max_length(framework: str | None) -> int | None:
    """Where it cuts samples by itself, in tokens; ``None``: rows are as long as the data makes them.

    TRL: SFTConfig's ``max_length``.
    """
    own: int | None = 1024 if framework == "trl" else _EVERY.get(framework or "", {}).get("max_length")
    return own


def keeps_packed_samples_apart(framework: str, attn_implementation: str | None) -> bool:
    """Whether packed rows come with their samples' borders: Axolotl's only where the kernel takes them.

    core/builders/causal.py: multipack_real_batches; utils/schemas/enums.py.
    """
    return framework != "axolotl" or attn_implementation in ("flash_attention_2", "flash_attention_3", "flex_attention")


def has_own_defaults(framework: str) -> bool:
    """Whether it fills in fields by itself over transformers'; TRL's stand with the fields (``defaults.resolve``)."""
    return framework in _EVERY


def own_defaults(
    framework: str,
    *,
    is_peft: bool,
    lora_r: int | None,
    num_gpus: int = 1,
    batch_size: int | None = None,
    is_moe: bool = False,
    pads_to_longest: bool = True,
) -> Mapping[str, Any]:
    """The job fields that ``framework`` fills by itself, where they differ from transformers' and peft's.

    ``batch_size``: of a GPU, as the job gives it. ``pads_to_longest``: neither packed nor padded to ``max_length``.
    """
    fields = dict(_EVERY.get(framework, {}))
    if framework == "axolotl":
        fields["per_device_eval_batch_size"] = batch_size or fields["per_device_train_batch_size"]
        fields["prepare_model_for_kbit_training"] = is_moe  # the lift is taken back but for stacked experts
        fields["pad_to_multiple_of"] = 64 if pads_to_longest else 1
    if framework == "litgpt":  # args.py: TrainArgs.gradient_accumulation_iters
        of_each = batch_size or fields["per_device_train_batch_size"]
        fields["gradient_accumulation_steps"] = max(1, _LITGPT_GLOBAL_BATCH_SIZE // num_gpus // of_each)
    if is_peft:
        fields |= _OF_ADAPTERS.get(framework, {})
        if framework == "llamafactory":
            fields["lora_alpha"] = 2 * (lora_r or 8)  # hparams/finetuning_args.py
    return fields


# peft 0.21, utils/constants.py, by the model_type of what is loaded. It knows no other: `get_peft_model` then stops and
# asks.
_PEFT_TARGETS: Final[dict[str, str | tuple[str, ...]]] = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gptj", "llama", "llama4"), QUERY_AND_VALUE),
    "gemma4": r".*language_model\..*\.(q_proj|v_proj)",
    **dict.fromkeys(("mistral", "mixtral", "opt", "qwen2", "qwen3", "stablelm"), QUERY_AND_VALUE),
    **dict.fromkeys(("bloom", "falcon", "gpt_neox"), ("query_key_value",)),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    "mpt": ("Wqkv",),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
}


def peft_targets(model_type: str) -> str | tuple[str, ...] | None:
    """``lora_target_modules`` that peft takes for a model when none are given; ``None``: it takes none, and refuses."""
    return _PEFT_TARGETS.get(model_type)
