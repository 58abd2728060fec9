"""Multimodal models trained on text, for real: the prediction holds what lies beside the language model as torch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from costmodel import estimate
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
QWEN_TEXT = {**TEXT, "layer_types": ["linear_attention", "full_attention"]}
QWEN = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64, "patch_size": 8}


def gemma3() -> Any:
    return transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(text_config=TEXT, vision_config=SIGLIP))


def qwen3_5() -> Any:
    return transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(text_config=QWEN_TEXT, vision_config=QWEN)
    )


def qwen3_5_language_model() -> Any:
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5Config(text_config=QWEN_TEXT, vision_config=QWEN).text_config)


def trainer_of(model: Any, tmp_path: Path, **changes: Any) -> Any:
    torch.manual_seed(0)
    rows = [
        {"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in torch.randint(3, 300, (12, 24))
    ]
    if "Gemma3" in type(model).__name__:
        rows = [{**row, "token_type_ids": torch.zeros_like(row["input_ids"])} for row in rows]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, max_steps=3, per_device_train_batch_size=2,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    return transformers.Trainer(model=model, args=args, train_dataset=rows, **changes)


@pytest.mark.parametrize("build", [gemma3, qwen3_5, qwen3_5_language_model])
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
