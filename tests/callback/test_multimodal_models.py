"""Multimodal models trained on text, for real: the prediction holds what lies beside the language model as torch does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from costmodel import estimate
from costmodel.errors import CostModelError
from ftcost_callback import FTCostCallback
from ftcost_callback.run_file import read_run
from ftcost_callback.trainer_adapter import job_from_objects

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 56,
    "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
GEMMA4_TEXT = {
    **TEXT, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300, "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
GEMMA4_VISION = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "position_embedding_size": 32, "patch_size": 8,
}  # fmt: skip
PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 16, "patch_size": 8,
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "image_size": 28, "patch_size": 14,
}  # fmt: skip
QWEN_TEXT = {**TEXT, "layer_types": ["linear_attention", "full_attention"]}
QWEN = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64, "patch_size": 8}


def gemma3() -> Any:
    return transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(text_config=TEXT, vision_config=SIGLIP))


def gemma4() -> Any:
    return transformers.Gemma4ForConditionalGeneration(
        transformers.Gemma4Config(text_config=GEMMA4_TEXT, vision_config=GEMMA4_VISION)
    )


def qwen3_5() -> Any:
    return transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(text_config=QWEN_TEXT, vision_config=QWEN)
    )


def qwen2_5_vl() -> Any:
    text = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}}
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(text_config=text, vision_config=QWEN)
    )


def qwen3_vl() -> Any:
    vision = {**QWEN, "deepstack_visual_indexes": [1]}
    return transformers.Qwen3VLForConditionalGeneration(transformers.Qwen3VLConfig(text_config=TEXT, vision_config=vision))


def qwen3_vl_moe() -> Any:
    text = {**TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    vision = {**QWEN, "deepstack_visual_indexes": [1]}
    return transformers.Qwen3VLMoeForConditionalGeneration(
        transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    )


def qwen3_5_language_model() -> Any:
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5Config(text_config=QWEN_TEXT, vision_config=QWEN).text_config)


TOKEN_KINDS = {"Gemma3": "token_type_ids", "Gemma4": "mm_token_type_ids"}


def trainer_of(model: Any, tmp_path: Path, beside: dict[str, Any] | None = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    rows = [
        {"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in torch.randint(3, 300, (12, 24))
    ]
    kinds = next((name for kind, name in TOKEN_KINDS.items() if kind in type(model).__name__), None)
    if kinds is not None:
        rows = [{**row, kinds: torch.zeros_like(row["input_ids"])} for row in rows]
    rows = [{**row, **(beside or {})} for row in rows]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, max_steps=3, per_device_train_batch_size=2,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    return transformers.Trainer(model=model, args=args, train_dataset=rows, **changes)


@pytest.mark.parametrize("build", [gemma3, gemma4, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_language_model])
def test_the_prediction_holds_what_torch_holds(build: Any, tmp_path: Path) -> None:
    model = build()
    trainer = trainer_of(model, tmp_path, callbacks=[FTCostCallback(gpu="L4", usd_per_gpu_hour=1.0)])
    trainer.train()
    predicted = read_run(tmp_path).predictions[0]
    assert predicted.estimate["num_params"] == sum(each.numel() for each in model.parameters())
    job = job_from_objects(model=model, args=trainer.args, optimizer=trainer.optimizer, state=trainer.state)
    answer = estimate(job, max_length=24)
    parameters = list(model.parameters())
    assert answer.num_params == sum(each.numel() for each in parameters)
    assert answer.num_trainable_params == answer.num_params
    assert answer.memory.weights_bytes == sum(each.numel() * each.element_size() for each in parameters)
    # no gradient, so no state: AdamW made its two moments for the language model alone
    states = trainer.optimizer.optimizer.state if hasattr(trainer.optimizer, "optimizer") else trainer.optimizer.state
    moments = [each for state in states.values() for name, each in state.items() if name in ("exp_avg", "exp_avg_sq")]
    assert answer.memory.optimizer_bytes == sum(each.numel() * each.element_size() for each in moments)
    facts = read_run(tmp_path).sessions[0].model
    assert facts is not None
    # what works on one token of text
    assert facts["num_active_params"] == answer.num_active_params
    assert job.get("load_towers") is (None if build is qwen3_5_language_model else True)


def test_a_head_that_the_checkpoint_did_not_tie_is_counted(tmp_path: Path) -> None:
    """transformers 5 leaves both where a checkpoint holds both, though the config still says that they are tied."""
    config = transformers.Mistral3Config(
        text_config={**TEXT, "model_type": "mistral"}, vision_config=PIXTRAL, tie_word_embeddings=False
    )
    transformers.Mistral3ForConditionalGeneration(config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**saved, "tie_word_embeddings": True}))
    model = transformers.Mistral3ForConditionalGeneration.from_pretrained(tmp_path)
    assert model.config.tie_word_embeddings
    args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    answer = estimate(job_from_objects(model=model, args=args), max_length=24)
    assert answer.num_params == sum(each.numel() for each in model.parameters())


def llava() -> Any:
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config={**TEXT, "model_type": "llama"}, vision_config=CLIP, image_token_index=299)
    )


def test_images_train_as_without_us_and_are_said_not_to_be_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pictures = {"input_ids": torch.tensor([5, 299, 299, 299, 299, *range(10, 29)]), "pixel_values": torch.ones(3, 28, 28)}
    trained = []
    for callbacks in ([], [FTCostCallback(gpu="L4", usd_per_gpu_hour=1.0)]):
        torch.manual_seed(0)
        model = llava()
        trainer_of(model, tmp_path, pictures, callbacks=callbacks).train()
        trained.append(model.state_dict())
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())
    run = read_run(tmp_path)
    assert [each for each in caplog.messages if "batches hold images or sound" in each]
    assert [
        each for each in run.predictions[0].estimate["warnings"] if "the weights of clip_vision_model, which llava" in each
    ]
    assert {step.num_tokens for step in run.steps} == {48}


@pytest.mark.parametrize(
    "fewer",
    [{"exclude_modules": r".*vision_tower.*"}, {"layers_to_transform": [0]}, {"exclude_modules": ["o_proj", "fc1"]}],
    ids=str,
)
def test_modules_that_peft_leaves_out_are_not_counted(fewer: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "o_proj", "fc1"] if "layers_to_transform" in fewer else "all-linear"
    model = peft.get_peft_model(gemma3(), peft.LoraConfig(r=4, target_modules=targets, **fewer))
    args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    answer = estimate(job_from_objects(model=model, args=args), max_length=24)
    assert answer.num_trainable_params == model.get_nb_trainable_parameters()[0]


def test_encoders_that_are_frozen_by_hand_take_the_same_memory(tmp_path: Path) -> None:
    model = gemma3()
    args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    whole = estimate(job_from_objects(model=model, args=args), max_length=24)
    model.model.vision_tower.requires_grad_(False)
    assert estimate(job_from_objects(model=model, args=args), max_length=24).memory == whole.memory
    model.model.language_model.requires_grad_(False)
    with pytest.raises(CostModelError, match="of the weights are frozen"):
        job_from_objects(model=model, args=args)
