"""The traced steps: a job of ours each, and the shallow stacks from which its trace is extrapolated."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """One step to trace. ``depths``: two numbers of layers, whole periods of the stack apart, as is the full depth."""

    name: str
    job: dict[str, Any]
    depths: tuple[int, int] = (4, 6)
    is_padded: bool = False
    keeps_logits: bool = False  # the loop keeps the model's outputs alive through the backward
    has_evaluation: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _case(
    name: str,
    model: str,
    method: str = "full",
    *,
    checkpointed: bool = False,
    size: int = 1,
    length: int = 2048,
    depths: tuple[int, int] = (4, 6),
    is_padded: bool = False,
    keeps_logits: bool = False,
    has_evaluation: bool = False,
    **fields: Any,
) -> Case:
    job = {
        "model": model,
        "method": method,
        "dtype": "bfloat16",
        "bf16": False,
        "gradient_checkpointing": checkpointed,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "per_device_train_batch_size": size,
        "max_length": length,
    }
    if method != "full":
        job |= {"lora_r": 16, "lora_target_modules": "all-linear"}
    if method == "qlora":
        job |= {"quantization": "nf4", "double_quant": True, "prepare_model_for_kbit_training": True, "bf16": True}
    return Case(name, job | fields, depths, is_padded, keeps_logits, has_evaluation)


_1B, _8B, _QWEN = "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-0.5B"
_GRANITE = "ibm-granite/granite-4.0-h-micro"
_MISTRAL, _OLMOE, _MIXTRAL = "mistralai/Mistral-7B-v0.1", "allenai/OLMoE-1B-7B-0924", "mistralai/Mixtral-8x7B-v0.1"

CASES: tuple[Case, ...] = (
    # full tuning of dense models
    _case("llama 1b full", _1B, has_evaluation=True),
    _case("llama 1b full checkpointed", _1B, checkpointed=True),
    _case(
        "llama 1b full reentrant",
        _1B,
        checkpointed=True,
        gradient_checkpointing_kwargs={"use_reentrant": True},
    ),
    _case("llama 1b full padded", _1B, is_padded=True, size=4, length=512, has_evaluation=True),
    _case("llama 1b full eager", _1B, attn_implementation="eager", length=1024),
    _case("llama 1b full fp32", _1B, dtype="float32", length=1024),
    _case("llama 1b full fp32 autocast", _1B, dtype="float32", bf16=True, has_evaluation=True),
    _case("llama 1b full fp32 autocast checkpointed", _1B, dtype="float32", bf16=True, checkpointed=True),
    _case("llama 1b full accumulating", _1B, gradient_accumulation_steps=2, size=2),
    _case("llama 1b full accumulating checkpointed", _1B, gradient_accumulation_steps=2, checkpointed=True, length=512),
    _case("llama 1b full foreach, short", _1B, optim="adamw_torch", length=64),
    _case("llama 1b full sgd", _1B, optim="sgd", length=64),
    _case("llama 1b full adagrad", _1B, optim="adagrad", length=64),
    _case("llama 1b full rmsprop", _1B, optim="rmsprop", length=64),
    _case("llama 1b full adafactor", _1B, optim="adafactor", length=64),
    _case("llama 1b full padded, cache kept", _1B, use_cache=True, keeps_logits=True, is_padded=True, size=4, length=512),
    _case("llama 1b full, logits kept", _1B, keeps_logits=True),
    _case("llama 1b full, cache kept", _1B, use_cache=True, keeps_logits=True),
    _case("mistral 7b full", _MISTRAL),
    _case("mistral 7b full checkpointed", _MISTRAL, checkpointed=True, size=8),
    _case("mistral 7b full beyond the window", _MISTRAL, length=6144, checkpointed=True),
    _case("qwen2.5 0.5b full, batch 8", _QWEN, size=8, length=1024, checkpointed=True),
    _case("qwen3 4b full", "Qwen/Qwen3-4B", checkpointed=True, size=4),
    _case("gemma 2b full", "google/gemma-2b", length=1024),
    _case("gemma2 2b full", "google/gemma-2-2b", length=1024),
    _case("olmo2 7b full checkpointed", "allenai/OLMo-2-1124-7B", checkpointed=True, size=8),
    _case("phi-3 mini full", "microsoft/Phi-3-mini-4k-instruct", checkpointed=True, size=8, length=2000),
    _case("glm4 9b full checkpointed", "zai-org/GLM-4-9B-0414", checkpointed=True),
    # adapters on dense models
    _case("llama 1b lora", _1B, "lora"),
    _case("llama 1b lora autocast", _1B, "lora", bf16=True),
    _case("llama 1b lora, 16-bit adapters", _1B, "lora", adapter_dtype="bfloat16"),
    _case("llama 1b lora dropout", _1B, "lora", lora_dropout=0.05),
    _case("llama 1b dora", _1B, "lora", use_dora=True),
    _case("llama 1b lora q and v", _1B, "lora", lora_target_modules=["q_proj", "v_proj"]),
    _case("llama 1b lora, embeddings saved", _1B, "lora", lora_modules_to_save=["embed_tokens"], checkpointed=True),
    _case("llama 8b lora checkpointed", _8B, "lora", checkpointed=True, size=4, length=1024, has_evaluation=True),
    _case("llama 8b lora autocast", _8B, "lora", bf16=True),
    _case("mistral 7b lora checkpointed", _MISTRAL, "lora", checkpointed=True, size=8, length=512),
    _case("mistral 7b lora autocast checkpointed", _MISTRAL, "lora", checkpointed=True, bf16=True, size=8, length=512),
    _case("qwen2.5 0.5b lora padded", _QWEN, "lora", is_padded=True, size=4, length=512),
    _case("gemma2 2b lora checkpointed", "google/gemma-2-2b", "lora", checkpointed=True, length=1024),
    _case("gemma3 1b lora", "google/gemma-3-1b-it", "lora", depths=(8, 14), length=1024),
    # 4 bit
    _case("llama 1b qlora checkpointed", _1B, "qlora", checkpointed=True, has_evaluation=True),
    _case("llama 1b qlora", _1B, "qlora"),
    _case("llama 8b qlora checkpointed", _8B, "qlora", checkpointed=True, size=4, length=1024),
    _case("llama 1b qlora, not prepared", _1B, "qlora", checkpointed=True, prepare_model_for_kbit_training=False),
    _case("llama 1b qlora, not prepared nor checkpointed", _1B, "qlora", prepare_model_for_kbit_training=False),
    _case("mistral 7b qlora checkpointed", _MISTRAL, "qlora", checkpointed=True, size=4),
    _case(
        "llama 1b qlora short, rank 128", _1B, "qlora", checkpointed=True, length=64, lora_r=128
    ),  # autocast's copies of adapters
    # experts
    _case("olmoe full", _OLMOE, depths=(4, 6)),
    _case("olmoe lora", _OLMOE, "lora"),
    _case("olmoe lora checkpointed", _OLMOE, "lora", checkpointed=True, size=4),
    _case("mixtral lora checkpointed", _MIXTRAL, "lora", checkpointed=True),
    _case(
        "mixtral lora on attention", _MIXTRAL, "lora", checkpointed=True, lora_target_modules=["q_proj", "v_proj"], size=4
    ),
    _case("qwen3 30b full checkpointed", "Qwen/Qwen3-30B-A3B", checkpointed=True),
    _case("qwen3 30b lora checkpointed", "Qwen/Qwen3-30B-A3B", "lora", checkpointed=True),
    _case("qwen1.5 moe lora", "Qwen/Qwen1.5-MoE-A2.7B", "lora"),
    _case("gpt-oss 20b lora checkpointed", "openai/gpt-oss-20b", "lora", checkpointed=True),
    # latent attention
    _case("deepseek v2 lite full", "deepseek-ai/DeepSeek-V2-Lite", depths=(5, 7)),
    _case("deepseek v2 lite lora checkpointed", "deepseek-ai/DeepSeek-V2-Lite", "lora", checkpointed=True, depths=(5, 7)),
    _case("moonlight 16b lora", "moonshotai/Moonlight-16B-A3B", "lora", depths=(5, 7), bf16=True),
    # a head that never builds the logits (TRL 1.15 and later), one of chunks, and fused norms and branches (Liger)
    _case("llama 1b full trl", _1B, size=4, has_evaluation=True, framework="trl"),
    _case("llama 1b full trl checkpointed", _1B, size=4, checkpointed=True, framework="trl"),
    _case(
        "llama 1b full fp32 autocast trl",
        _1B,
        dtype="float32",
        bf16=True,
        size=2,
        checkpointed=True,
        has_evaluation=True,
        framework="trl",
    ),
    _case(
        "llama 8b lora trl checkpointed",
        _8B,
        "lora",
        size=4,
        bf16=True,
        checkpointed=True,
        has_evaluation=True,
        framework="trl",
    ),
    _case("qwen2.5 0.5b lora trl", _QWEN, "lora", size=8, length=1024, has_evaluation=True, framework="trl"),
    # evaluations in which a layer at work holds more than the head
    _case("llama 8b full trl padded", _8B, size=8, length=512, is_padded=True, has_evaluation=True, framework="trl"),
    _case("llama 8b lora trl", _8B, "lora", size=4, length=1024, has_evaluation=True, framework="trl"),
    _case(
        "llama 8b lora fp32 autocast trl",
        _8B,
        "lora",
        dtype="float32",
        bf16=True,
        size=2,
        checkpointed=True,
        has_evaluation=True,
        framework="trl",
    ),
    _case(
        "llama 8b qlora trl checkpointed",
        _8B,
        "qlora",
        adapter_dtype="float32",  # peft makes them so beside the bytes of the stand-in; TRL casts them to bf16
        prepare_model_for_kbit_training=False,
        size=4,
        checkpointed=True,
        has_evaluation=True,
        framework="trl",
    ),
    _case("phi 4 lora trl checkpointed", "microsoft/phi-4", "lora", checkpointed=True, has_evaluation=True, framework="trl"),
    _case("llama 1b full liger", _1B, size=2, use_liger_kernel=True),
    _case("llama 1b full liger checkpointed", _1B, size=4, checkpointed=True, use_liger_kernel=True),
    _case("llama 8b lora liger checkpointed", _8B, "lora", size=4, bf16=True, checkpointed=True, use_liger_kernel=True),
    _case("llama 8b lora liger", _8B, "lora", size=2, bf16=True, use_liger_kernel=True),
    _case("qwen3 4b lora liger", "Qwen/Qwen3-4B", "lora", size=2, use_liger_kernel=True),
    # a recurrent mixer, its fused kernel stood in for
    _case("mamba 2.8b full", "state-spaces/mamba-2.8b-hf"),
    _case("mamba 2.8b full checkpointed", "state-spaces/mamba-2.8b-hf", checkpointed=True),
    _case("granite 4 micro full", _GRANITE, depths=(10, 20), length=1024),
    _case("granite 4 micro full checkpointed", _GRANITE, depths=(10, 20), checkpointed=True, size=4),
    _case(
        "granite 4 micro lora",
        _GRANITE,
        "lora",
        depths=(10, 20),
        lora_target_modules=["in_proj", "input_linear"],
    ),
    _case("mamba 2.8b lora", "state-spaces/mamba-2.8b-hf", "lora", lora_target_modules=["in_proj"]),
)
