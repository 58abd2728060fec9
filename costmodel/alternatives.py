"""Other settings that may be suggested for a job on a card: those that run there, and what each needs.

Which is better is not decided here (:mod:`costmodel.optimization`). Fields that a job fixes are among them too.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from costmodel.described_job import overridden_config
from costmodel.hf_config import model_spec_from_config
from costmodel.model_catalog import find_model_config
from costmodel.specs import GpuSpec

_FLATTENING_FRAMEWORKS: Final = frozenset({"trl", "axolotl", "llamafactory", "unsloth", "transformers"})
_PACKING_FRAMEWORKS: Final = frozenset({"trl", "axolotl", "llamafactory", "unsloth", "torchtune"})
_FLASH: Final = ("flash_attention_2", "flash_attention_3")
_OLDEST_FLASH: Final = (8, 0)  # compute capability; Triton's kernels run on older cards too, but nobody tests Liger there

# Frameworks with a switch for Liger, and transformers' first release that has it (TrainingArguments.use_liger_kernel).
_LIGER_FRAMEWORKS: Final = frozenset({"trl", "axolotl", "llamafactory", "transformers"})
_FIRST_TRANSFORMERS_WITH_LIGER: Final = (4, 45)
# model_type of the families that liger-kernel 0.8.5 patches (its MODEL_TYPE_TO_APPLY_LIGER_FN); others run as they are.
LIGER_FAMILIES: Final = frozenset(
    {
        *("deepseek_v2", "deepseek_v3", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4"),
        *("gemma4_text", "glm4", "glm4v", "glm4v_moe", "gpt_oss", "granite", "hunyuan_v1_dense", "hunyuan_v1_moe"),
        *("internvl", "llama", "llama4", "llama4_text", "llava", "ministral", "mistral", "mixtral", "mllama"),
        *("mllama_text_model", "nemotron", "olmo2", "olmo3", "paligemma", "phi3", "pixtral", "qwen2", "qwen2_5_vl"),
        *("qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_vl_text"),
        *("smollm3", "smolvlm"),
    }
)

# Same algorithm, other storage of its states or another kernel; changing the algorithm is the user's own decision.
_OPTIMIZER_FAMILIES: Final = (
    (
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_apex_fused",
        "adamw_anyprecision",
        "paged_adamw_32bit",
        "adamw_bnb_8bit",
        "adamw_8bit",
        "paged_adamw_8bit",
        "adamw_torch_8bit",
        "adamw_torch_4bit",
    ),
    ("lion_32bit", "paged_lion_32bit", "lion_8bit", "paged_lion_8bit"),
)
_SUGGESTED_OPTIMIZERS: Final = frozenset(
    {"adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit", "paged_lion_8bit"}
)


def alternatives(
    start: Mapping[str, Any], gpu: GpuSpec, *, allow_quantization: bool, given: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(group, settings) of each change that may be suggested for this job on this card; only fields that change.

    ``start``: the job of an answer, with every default filled. ``given`` (default: ``start``): the job that the settings
    are to change, where ``start`` is it with some changes made already.
    """
    given = start if given is None else given

    def changed(**settings: Any) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if given.get(name) != value}

    yield "checkpointing", other_checkpointing(start)
    for settings in _precisions(start, gpu):
        if different := changed(**settings):
            yield "precision", different
    if _liger_runs(start, gpu):
        yield "kernels", {"use_liger_kernel": True}
    attention = str(start.get("attn_implementation"))
    flash = attention if attention in _FLASH else "flash_attention_2" if _runs_flash_attention(start, gpu) else None
    for settings in _ways_to_pad_less(start, flash):
        if different := changed(**settings):
            yield "data", different
    kernels = (["sdpa"] if attention == "eager" else []) + ([flash] if flash else [])
    for kernel in kernels:
        if kernel != attention:
            yield "attention", {"attn_implementation": kernel}
    for family in _OPTIMIZER_FAMILIES:
        if start.get("optim") in family:
            for name in family:
                if name in _SUGGESTED_OPTIMIZERS and name != start.get("optim"):
                    yield "optimizer", {"optim": name}
    # batched_mm is left out: it copies the weights of the experts for each token and never pays in training.
    for implementation in ("grouped_mm", "eager"):
        if implementation != start.get("experts_implementation"):
            yield "experts", {"experts_implementation": implementation}
    if allow_quantization and start.get("method") in ("lora", "qlora"):
        if start.get("quantization") != "nf4":
            yield "quantization", changed(method="qlora", quantization="nf4", double_quant=True)
        if start.get("quantization"):
            # The type is said, so that the framework's default (fp32 in TRL) does not come in by the back door.
            yield "quantization", {**changed(method="lora"), "quantization": None, "dtype": start.get("dtype")}


def other_checkpointing(start: Mapping[str, Any]) -> dict[str, Any]:
    return {"gradient_checkpointing": not start.get("gradient_checkpointing")}


def changes_what_is_learned(settings: Mapping[str, Any], start: Mapping[str, Any]) -> frozenset[str]:
    """Fields that stay unless they are freed by name, whether the job gives them or not.

    Weights that are trained themselves: in 16 bit, small updates are rounded away.
    """
    return frozenset({"dtype"} & set(settings)) if start.get("method") == "full" else frozenset()


def _in_16_bit(start: Mapping[str, Any]) -> bool:
    return bool(start.get("bf16") or start.get("fp16") or start.get("dtype") in ("bfloat16", "float16"))


def _precisions(start: Mapping[str, Any], gpu: GpuSpec) -> Iterator[dict[str, Any]]:
    """16 bit where the job computes or stores in float32: TRL loads weights in float32 unless told otherwise."""
    if start.get("dtype") != "float32":
        return
    half = "float16" if start.get("fp16") or not gpu.peak_bf16_flops_per_second else "bfloat16"
    autocast = {"bf16": half == "bfloat16", "fp16": half == "float16"}  # both said: one is turned on, the other off
    if not _in_16_bit(start):
        yield autocast
    if half == "float16" and start.get("method") == "full":
        return  # a gradient scaler refuses float16 weights that are trained
    yield {"dtype": half, **autocast}


def _liger_runs(start: Mapping[str, Any], gpu: GpuSpec) -> bool:
    """Whether the framework has the switch, Liger knows the family, and its Triton kernels run on the card."""
    framework, version = start.get("framework"), str(start.get("framework_version"))
    if start.get("use_liger_kernel") or start.get("torch_compile") or framework not in _LIGER_FRAMEWORKS:
        return False
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if framework == "transformers" and numbers < _FIRST_TRANSFORMERS_WITH_LIGER:
        return False
    return _is_new_enough(gpu) and _family(start) in LIGER_FAMILIES


def _family(start: Mapping[str, Any]) -> str:
    return _family_of(json.dumps([start.get("model"), start.get("model_overrides") or {}], sort_keys=True))


@functools.lru_cache(maxsize=64)
def _family_of(described: str) -> str:
    model, overrides = json.loads(described)
    return model_spec_from_config(overridden_config(find_model_config(model), overrides)).family


def _ways_to_pad_less(start: Mapping[str, Any], flash: str | None) -> Iterator[dict[str, Any]]:
    """Ways to spend less on padding. Rows without padding need a flash kernel to keep their samples apart."""
    if not start.get("lengths"):
        return
    packs, flattens = bool(start.get("packing")), bool(start.get("padding_free"))
    if not packs and not flattens:
        if start.get("padding") == "max_length":
            yield {"padding": "longest"}
        yield {"train_sampling_strategy": "group_by_length", "padding": "longest"}
    if flash is None:
        return
    if start.get("framework") in _FLATTENING_FRAMEWORKS:
        yield {"packing": False, "padding_free": True, "attn_implementation": flash}
    if start.get("framework") in _PACKING_FRAMEWORKS:
        yield {"packing": True, "padding_free": True, "attn_implementation": flash}


def _runs_flash_attention(start: Mapping[str, Any], gpu: GpuSpec) -> bool:
    """FlashAttention 2 runs in 16 bit on NVIDIA cards since Ampere and on AMD's CDNA."""
    return _in_16_bit(start) and _is_new_enough(gpu)


def _is_new_enough(gpu: GpuSpec) -> bool:
    if gpu.vendor == "NVIDIA":
        numbers = tuple(int(part) for part in gpu.compute_capability.split(".") if part.isdigit())
        return numbers >= _OLDEST_FLASH
    return gpu.vendor == "AMD"


def needs(settings: Mapping[str, Any], start: Mapping[str, Any]) -> tuple[str, ...]:
    """What must be installed for these settings, or should be known before they are used."""
    needed = []
    kernel = settings.get("attn_implementation")
    if kernel in _FLASH:
        needed.append("the package flash-attn")
    if settings.get("use_liger_kernel"):
        of_axolotl = ", as plugin axolotl.integrations.liger.LigerPlugin" if start.get("framework") == "axolotl" else ""
        needed.append(f"the package liger-kernel{of_axolotl}")
    if "dtype" in settings and start.get("method") == "full":
        needed.append("trained weights in 16 bit: updates below 1/256 of a weight are lost")
    if "8bit" in str(settings.get("optim")):
        needed.append("the package bitsandbytes; optimizer states in 8 bit")
    if settings.get("quantization"):
        needed.append("the package bitsandbytes; another base changes the result")
    elif "quantization" in settings:
        needed.append("an unquantised base changes the result")
    if settings.get("padding_free") and not settings.get("packing") and start.get("framework") == "transformers":
        needed.append("DataCollatorWithFlattening as data_collator")
    return tuple(needed)
