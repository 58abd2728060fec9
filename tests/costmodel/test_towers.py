"""Multimodal models: what lies beside the language model is counted as the real classes hold it, adapted as peft does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from costmodel import estimate, model_spec_from_config
from costmodel.data_files import DATA_FOLDER
from costmodel.errors import CostModelError
from costmodel.model_catalog import find_model_config, find_towers
from costmodel.model_spec import ModelSpec
from costmodel.towers import _COUNTED

# Weights that a published checkpoint holds beside its language model: its tensors, less those of the language model, of
# multi-token prediction and of buffers.
PUBLISHED = {
    "google/gemma-3-4b-it": 419_816_304,
    "google/gemma-3-12b-it": 421_290_864,
    "google/gemma-3-27b-it": 423_060_336,
    "google/gemma-4-26B-A4B-it": 572_792_112,
    "google/gemma-4-31B-it": 575_741_232,
    "google/gemma-4-E2B-it": 475_728_160,
    "google/gemma-4-E4B-it": 478_087_456,
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": 871_932_416,
    "meta-llama/Llama-4-Scout-17B-16E": 871_932_416,
    "Qwen/Qwen3.5-0.8B": 100_592_896,
    "Qwen/Qwen3.5-122B-A10B": 451_290_864,
    "Qwen/Qwen3.5-27B": 460_730_096,
    "Qwen/Qwen3.5-2B": 331_416_576,
    "Qwen/Qwen3.5-35B-A3B": 446_571_248,
    "Qwen/Qwen3.5-397B-A17B": 456_010_480,
    "Qwen/Qwen3.5-4B": 333_514_240,
    "Qwen/Qwen3.5-9B": 456_010_480,
    "Qwen/Qwen3.6-27B": 460_730_096,
    "Qwen/Qwen3.6-35B-A3B": 446_571_248,
}

TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 300,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**TEXT, "model_type": "gemma3_text"},
        "vision_config": {
            "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
            "image_size": 56, "patch_size": 14, "vision_use_head": False,
        },
    },
    "gemma3 with a pooling head": {
        "text_config": {**TEXT, "model_type": "gemma3_text"},
        "vision_config": {
            "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 56,
            "patch_size": 14,
        },
    },
    "gemma4": {
        "text_config": {
            **TEXT, "model_type": "gemma4_text", "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300,
            "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
        },
        "vision_config": {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 32, "patch_size": 8,
        },
        "audio_config": {
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "output_proj_dims": 48,
            "subsampling_conv_channels": [16, 8],
        },
    },
    "qwen3_5": {
        "text_config": {**TEXT, "model_type": "qwen3_5_text"},
        "vision_config": {
            "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64, "patch_size": 8,
        },
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, "model_type": "qwen2_5_vl_text"},
        "vision_config": {
            "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64, "patch_size": 8,
        },
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "model_type": "qwen3_vl_text"},
        "vision_config": {
            "depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64, "patch_size": 8,
            "deepstack_visual_indexes": [0, 2],
        },
    },
    "qwen3_vl_moe": {
        "text_config": {
            **TEXT, "model_type": "qwen3_vl_moe_text", "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        "vision_config": {
            "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64, "patch_size": 8,
            "deepstack_visual_indexes": [1],
        },
    },
    "llama4": {
        "text_config": {**TEXT, "model_type": "llama4_text", "num_local_experts": 2},
        "vision_config": {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56,
            "patch_size": 14, "vision_output_dim": 40, "projector_input_dim": 40, "projector_output_dim": 40,
        },
    },
    "mistral3": {
        "tie_word_embeddings": False,  # as its checkpoints are, which hold both; the class of the whole would tie them
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "head_dim": 16, "patch_size": 8,
        },
    },
}  # fmt: skip


def real_model(case: str) -> Any:
    """The real class, on torch's meta device."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(case.partition(" ")[0], **TINY[case])
    with torch.device("meta"):
        return transformers.AutoModelForImageTextToText.from_config(config)


def spec_of(case: str, model: Any) -> ModelSpec:
    return model_spec_from_config(json.loads(json.dumps(model.config.to_dict(), default=str)), name=case)


def is_of_tower(name: str) -> bool:
    return "language_model" not in name and not name.startswith("lm_head")


@pytest.mark.parametrize("case", TINY)
def test_every_weight_is_where_the_real_class_has_it(case: str) -> None:
    model = real_model(case)
    spec = spec_of(case, model)
    real = {name: math.prod(each.shape) for name, each in model.named_parameters()}
    assert {name: size for tower in spec.towers for name, size in tower.parameters()} == {
        name: size for name, size in real.items() if is_of_tower(name)
    }
    assert spec.num_params + spec.tower_params == sum(real.values())
    assert dict(spec.parameters()) == {name: size for name, size in real.items() if not is_of_tower(name)}


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("case", [case for case in TINY if " " not in case])
def test_the_head_is_tied_as_the_whole_class_ties_it(case: str, outer: bool, nested: bool) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    text = {**TINY[case]["text_config"], "tie_word_embeddings": nested}
    config = {**TINY[case], "tie_word_embeddings": outer, "text_config": text}
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.for_model(case, **config))
    model.tie_weights()
    spec = spec_of(case, model)
    assert spec.num_params + spec.tower_params == sum(each.numel() for each in model.parameters())
    alone = model_spec_from_config({**config, "model_type": case}, load_towers=False)
    assert alone.tied_embeddings is nested  # the class of the language model has that config only


@pytest.mark.parametrize("case", TINY)
def test_bitsandbytes_would_replace_these_linears(case: str) -> None:
    torch = pytest.importorskip("torch")
    model = real_model(case)
    real = {name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear) and is_of_tower(name)}
    assert {linear.name for tower in spec_of(case, model).towers for linear in tower.linears()} == real


@pytest.mark.parametrize(
    "targets",
    [
        ["q_proj", "v_proj"],
        "all-linear",
        r".*language_model.*\.(q_proj|o_proj)",
        r"model\.language_model\.layers\.0\.self_attn\.(q|k|v|o)_proj",
        ["o_proj", "fc1"],
    ],
    ids=str,
)
@pytest.mark.parametrize("case", [case for case in TINY if " " not in case])
def test_adapters_are_those_of_peft_there_too(case: str, targets: Any) -> None:
    peft = pytest.importorskip("peft")
    model = real_model(case)
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    job = {
        "model": {**config, "model_type": case},
        "framework": "transformers",
        "load_towers": True,
        "method": "lora",
        "lora_r": 4,
        "lora_target_modules": targets,
        "max_length": 64,
    }
    try:
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))
    except ValueError as error:
        with pytest.raises(CostModelError, match="no linear layer" if "not supported" in str(error) else "no weight of"):
            estimate(job)
        return
    assert estimate(job).num_trainable_params == adapted.get_nb_trainable_parameters()[0]


@pytest.mark.parametrize(
    ("case", "target"),
    [("gemma3", "patch_embedding"), ("qwen3_5", "proj"), ("llama4", "patch_embedding"), ("gemma4", "q_proj")],
)
def test_modules_there_that_are_no_linears_are_refused(case: str, target: str) -> None:
    """peft adapts a convolution, which is not counted, and refuses what stands around a linear."""
    job = {"model": {**TINY[case], "model_type": case}, "load_towers": True, "method": "lora", "max_length": 64}
    with pytest.raises(CostModelError, match=rf"names \S*{target} too, which is no linear layer"):
        estimate(job, lora_target_modules=["o_proj", target])
    assert estimate(job, lora_target_modules="all-linear").num_trainable_params > 0


def test_the_catalogue_has_the_towers_that_were_published() -> None:
    path = Path(DATA_FOLDER) / "models" / "towers.json"
    assert set(json.loads(path.read_text())) == set(PUBLISHED)
    for name, size in PUBLISHED.items():
        towers = find_towers(name)
        assert towers is not None
        spec = model_spec_from_config({**towers, "text_config": find_model_config(name)}, name=name)
        assert spec.tower_params == size, name


def test_defaults_are_those_of_the_config_classes() -> None:
    transformers = pytest.importorskip("transformers")
    classes = {
        ("gemma3", "vision_config"): transformers.SiglipVisionConfig,
        ("gemma4", "vision_config"): transformers.Gemma4VisionConfig,
        ("gemma4", "audio_config"): transformers.Gemma4AudioConfig,
        ("qwen3_5", "vision_config"): type(transformers.Qwen3_5Config().vision_config),
        ("qwen3_5_moe", "vision_config"): type(transformers.Qwen3_5MoeConfig().vision_config),
        ("qwen2_5_vl", "vision_config"): type(transformers.Qwen2_5_VLConfig().vision_config),
        ("qwen3_vl", "vision_config"): type(transformers.Qwen3VLConfig().vision_config),
        ("qwen3_vl_moe", "vision_config"): type(transformers.Qwen3VLMoeConfig().vision_config),
        ("llama4", "vision_config"): transformers.Llama4VisionConfig,
        ("mistral3", "vision_config"): transformers.PixtralVisionConfig,
    }
    assert {(wrapper, name) for wrapper, encoders in _COUNTED.items() for name in encoders} == set(classes)
    for (wrapper, name), config_class in classes.items():
        defaults = {"vision_use_head": True, **config_class().to_dict()}
        of_wrapper = transformers.Mistral3Config().to_dict() if wrapper == "mistral3" else {}
        for field, value in _COUNTED[wrapper][name].defaults.items():
            real = defaults.get(field, of_wrapper.get(field))
            assert (tuple(real) if isinstance(real, list) else real) == value, (wrapper, name, field)


@pytest.mark.parametrize("wrapper", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_defaults_of_language_models_without_a_class_of_their_own(wrapper: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(wrapper)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    text = {
        "model_type": f"{wrapper}_text", "hidden_size": config.text_config.hidden_size,
        "num_hidden_layers": config.text_config.num_hidden_layers,
    }  # fmt: skip
    spec = model_spec_from_config({"model_type": wrapper, "text_config": text, "vision_config": {}})
    assert {**dict(spec.parameters()), **{name: size for tower in spec.towers for name, size in tower.parameters()}} == {
        name: each.numel() for name, each in model.named_parameters()
    }


@pytest.mark.parametrize("tied", [True, False])
def test_a_config_that_was_published_flat_is_nested_as_its_class_does(tied: bool) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    case = TINY["qwen2_5_vl"]
    flat = {**TEXT, "vision_config": case["vision_config"], "tie_word_embeddings": tied}
    flat.pop("head_dim")
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.for_model("qwen2_5_vl", **flat))
    config = {**flat, "model_type": "qwen2_5_vl"}
    whole = estimate(model=config, max_length=64)
    assert whole.num_params == sum(each.numel() for each in model.parameters())
    assert whole.job["load_towers"] is True
    four_layers = estimate(model=config, max_length=64, model_overrides={"num_hidden_layers": 4}).num_params
    assert four_layers > whole.num_params
    # one that was saved before transformers 5: the tie stands with the language model
    nested = {**case, "model_type": "qwen2_5_vl", "text_config": {**case["text_config"], "tie_word_embeddings": tied}}
    assert model_spec_from_config({**nested, "tie_word_embeddings": False}).tied_embeddings is tied


def test_each_framework_loads_what_its_loader_does() -> None:
    """AutoModelForCausalLM of transformers has the whole of some and the language model of others; TRL reads config.json."""
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    trl_utils = pytest.importorskip("trl.trainer.utils")
    for model in PUBLISHED:
        towers = find_towers(model)
        assert towers is not None
        job = {"model": model, "max_length": 64, "num_gpus": 1, "method": "full"}
        causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[towers["model_type"]]
        assert estimate(job, framework="transformers").job["load_towers"] == causal.endswith("ConditionalGeneration")
        assert estimate(job, framework="trl").job["load_towers"] is True
        assert estimate(job, framework="litgpt", max_length=64).job["load_towers"] is False
    import inspect

    assert "getattr(transformers, config.architectures[0]" in inspect.getsource(trl_utils.create_model_from_path)


def test_what_they_take_is_their_weights_and_nothing_else() -> None:
    job = {
        "model": "google/gemma-3-4b-it", "framework": "trl", "method": "lora", "lora_target_modules": ["down_proj"],
        "gpu": "A100-SXM4-80GB", "max_length": 512, "lengths": {"fixed": 512}, "max_steps": 10,
    }  # fmt: skip
    whole, alone = estimate(job), estimate(job, load_towers=False)
    width = 4  # TRL loads in fp32
    assert whole.memory.weights_bytes - alone.memory.weights_bytes == width * PUBLISHED["google/gemma-3-4b-it"]
    assert whole.memory.peak_allocated_bytes - alone.memory.peak_allocated_bytes == pytest.approx(
        width * PUBLISHED["google/gemma-3-4b-it"], rel=1e-6
    )
    assert whole.step_seconds == alone.step_seconds
    assert whole.num_params - alone.num_params == PUBLISHED["google/gemma-3-4b-it"]
    assert whole.num_active_params == alone.num_active_params
    assert [each for each in whole.warnings if "420 million weights of gemma3 encode images and sound" in each]
    assert not [each for each in alone.warnings if "images" in each]


def test_bitsandbytes_packs_their_linears_but_unsloth_does_not() -> None:
    job = {"model": "google/gemma-3-4b-it", "method": "qlora", "lora_target_modules": "all-linear", "max_length": 512}

    def of_towers(framework: str) -> int:
        job_there = {**job, "framework": framework}
        return estimate(job_there).memory.weights_bytes - estimate(job_there, load_towers=False).memory.weights_bytes

    linears = 27 * (4 * 1152 * 1152 + 2 * 1152 * 4304)
    rest = PUBLISHED["google/gemma-3-4b-it"] - linears
    assert of_towers("unsloth") == 2 * PUBLISHED["google/gemma-3-4b-it"]
    assert of_towers("trl") == pytest.approx(2 * rest + (0.5 + 4 / 64) * linears, abs=1)


def test_weights_of_full_training_have_no_gradient_and_no_state_there() -> None:
    job = {"model": "google/gemma-3-4b-it", "framework": "trl", "max_length": 512, "method": "full"}
    whole, alone = estimate(job), estimate(job, load_towers=False)
    towers = PUBLISHED["google/gemma-3-4b-it"]
    assert whole.num_trainable_params - alone.num_trainable_params == towers
    assert whole.memory.optimizer_bytes == alone.memory.optimizer_bytes
    assert whole.memory.gradients_bytes == alone.memory.gradients_bytes
    # LLaMA-Factory freezes them
    frozen = estimate(job, framework="llamafactory")
    assert frozen.num_params - frozen.num_trainable_params == towers
    mixed = estimate(job | {"framework": "llamafactory", "bf16": True})
    assert mixed.memory.weights_bytes == 4 * mixed.num_trainable_params + 2 * towers


def test_deepspeed_makes_masters_and_states_for_them_too() -> None:
    job: dict[str, Any] = {
        "model": "google/gemma-3-4b-it", "framework": "trl", "max_length": 512, "method": "full", "num_gpus": 4,
        "bf16": True, "dtype": "bfloat16",
    }  # fmt: skip
    towers = PUBLISHED["google/gemma-3-4b-it"]
    for sharded, width in (
        ({"fsdp": "full_shard"}, 0),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, 12),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, 12),
    ):
        whole, alone = (estimate(job | sharded, load_towers=each).memory.optimizer_bytes for each in (True, False))
        assert whole - alone == pytest.approx(width * towers / 4, abs=1)


def test_several_gpus_stop_at_weights_without_gradient_where_trainer_does_not_look_for_them() -> None:
    job: dict[str, Any] = {
        "model": "google/gemma-3-4b-it", "framework": "transformers", "max_length": 512, "method": "full", "num_gpus": 2,
        "gradient_checkpointing": True,
    }  # fmt: skip

    def is_said(**changes: Any) -> bool:
        return any("set ddp_find_unused_parameters true" in each for each in estimate(job | changes).warnings)

    assert is_said()
    assert not any(
        is_said(**changes)
        for changes in (
            {"num_gpus": 1},
            {"gradient_checkpointing": False},
            {"method": "lora"},
            {"load_towers": False},
            {"fsdp": "full_shard"},
            {"framework": "trl"},  # looks for them itself
        )
    )


@pytest.mark.parametrize(
    ("wrapper", "text", "beside"),
    [
        ("llava", "llama", {"vision_config": "clip_vision_model"}),
        ("blip-2", "opt", {"vision_config": "blip_2_vision_model", "qformer_config": "blip_2_qformer"}),
        ("granite_speech", "granite", {"encoder_config": "granite_speech_encoder", "projector_config": "blip_2_qformer"}),
        ("mistral3", "mistral", {"vision_config": "siglip_vision_model"}),  # only Pixtral's is counted
    ],
)
def test_encoders_that_are_not_known_are_named(wrapper: str, text: str, beside: dict[str, str]) -> None:
    config: dict[str, Any] = {"model_type": wrapper, "text_config": {**TEXT, "model_type": text, "num_key_value_heads": 4}}
    config |= {name: {"model_type": kind, "hidden_size": 64} for name, kind in beside.items()}
    answer = estimate(model=config, max_length=64)
    named = f"the weights of {' and '.join(beside.values())}, which {wrapper} has"
    assert [each for each in answer.warnings if named in each]
    assert not [each for each in answer.warnings if "encode images" in each]


def test_overrides_reach_the_language_model_that_a_config_nests() -> None:
    config = {**TINY["gemma3"], "model_type": "gemma3", "tie_word_embeddings": True}
    job: dict[str, Any] = {"model": config, "max_length": 64, "framework": "trl"}
    four_layers = estimate(job, model_overrides={"num_hidden_layers": 4}).num_params
    assert (
        four_layers
        == estimate(job | {"model": {**config, "text_config": {**config["text_config"], "num_hidden_layers": 4}}}).num_params
    )
    untied = estimate(job, model_overrides={"tie_word_embeddings": False}).num_params
    assert untied - estimate(job).num_params == TEXT["vocab_size"] * TEXT["hidden_size"]
    with pytest.raises(CostModelError, match=r"'layers' is no field .* num_hidden_layers"):
        estimate(job, model_overrides={"layers": 4})


@pytest.mark.parametrize(
    ("model", "framework", "without_default"),
    [
        ("google/gemma-3-4b-it", "trl", "gemma3"),
        ("google/gemma-4-E2B-it", "trl", None),  # a pattern
        ("meta-llama/Llama-4-Scout-17B-16E", "trl", None),
        ("meta-llama/Llama-4-Scout-17B-16E", "transformers", "llama4_text"),
        ("Qwen/Qwen3.5-9B", "trl", "qwen3_5"),
    ],
)
def test_targets_that_peft_would_ask_for_are_said(model: str, framework: str, without_default: str | None) -> None:
    mapping = pytest.importorskip("peft").utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    assert without_default is None or without_default not in mapping
    warnings = estimate(model=model, framework=framework, method="lora", max_length=64).warnings
    said = [each for each in warnings if "peft has no default lora_target_modules" in each]
    assert len(said) == (without_default is not None)
    assert all(f"for {without_default} and stops without: q_proj and v_proj are assumed" in each for each in said)


def test_load_towers_of_a_model_without_is_refused() -> None:
    with pytest.raises(CostModelError, match="load_towers is for multimodal models"):
        estimate(model="Qwen/Qwen3-4B", load_towers=True, max_length=64)
    assert "load_towers" not in estimate(model="Qwen/Qwen3-4B", max_length=64).assumed
