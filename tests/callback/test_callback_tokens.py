"""Tokens and expert load of real Trainer and SFTTrainer runs, against counts done by hand on the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import (
    LENGTHS,
    MOE_FACTORIES,
    TickingClock,
    TokenRows,
    supervised_tokens,
    tiny_llama,
    tiny_mixtral,
    tiny_trainer,
    word_tokenizer,
)

from ftcost_callback import FTCostCallback
from ftcost_callback.run_file import RunRecord, read_run
from ftcost_callback.sinks import InMemorySink

EPOCH_TOKENS, EPOCH_SUPERVISED = sum(LENGTHS), supervised_tokens()


def callback(**settings: Any) -> FTCostCallback:
    measuring = FTCostCallback(**({"sinks": [], "predict": False} | settings))
    measuring._clock = TickingClock()
    return measuring


def total(record: RunRecord, name: str) -> Any:
    values = [getattr(step, name) for step in record.steps]
    return None if any(value is None for value in values) else sum(values)


@pytest.mark.parametrize("accumulation", [1, 4, 5])
def test_an_epoch_with_accumulation(tmp_path: Path, accumulation: int) -> None:
    tiny_trainer(
        tmp_path, [callback()], max_steps=-1, num_train_epochs=1, gradient_accumulation_steps=accumulation,
        eval_strategy="steps", eval_steps=1, eval_dataset=TokenRows(),
    ).train()  # fmt: skip
    record = read_run(tmp_path)
    padded = sum(2 * max(pair) for pair in zip(LENGTHS[::2], LENGTHS[1::2], strict=True))
    assert total(record, "num_tokens") == padded
    assert total(record, "num_non_padding_tokens") == EPOCH_TOKENS
    assert total(record, "num_supervised_tokens") == EPOCH_SUPERVISED
    assert total(record, "num_samples") == len(LENGTHS)
    assert total(record, "num_micro_batches") == 6
    assert record.summary is not None
    assert record.summary.num_non_padding_tokens == EPOCH_TOKENS


def first_token_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return outputs.logits.float().mean()


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"label_smoothing_factor": 0.1}, id="label-smoothing"),
        pytest.param({"compute_loss_func": first_token_loss}, id="own-loss"),
        pytest.param({"bf16": True, "gradient_checkpointing": True}, id="bf16-checkpointing"),
        pytest.param({"dataloader_num_workers": 2}, id="two-workers"),
    ],
)
def test_settings_that_hide_or_repeat_the_labels(tmp_path: Path, arguments: dict[str, Any]) -> None:
    tiny_trainer(
        tmp_path, [callback()], max_steps=-1, num_train_epochs=1, gradient_accumulation_steps=2, **arguments
    ).train()
    record = read_run(tmp_path)
    assert total(record, "num_non_padding_tokens") == EPOCH_TOKENS
    assert total(record, "num_supervised_tokens") == EPOCH_SUPERVISED


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        ("mixtral", None),
        ("mixtral", {"use_reentrant": True}),
        ("olmoe", {"use_reentrant": False}),
        ("qwen3_moe", {"use_reentrant": False}),
    ],
)
def test_expert_load_sums_to_real_tokens_times_top_k(
    tmp_path: Path, family: str, checkpointing: dict[str, bool] | None
) -> None:
    model = MOE_FACTORIES[family]()
    sink = InMemorySink()
    tiny_trainer(
        tmp_path, [callback(sinks=[sink])], model=model, max_steps=6, logging_steps=4, gradient_accumulation_steps=2,
        gradient_checkpointing=checkpointing is not None, gradient_checkpointing_kwargs=checkpointing,
        eval_strategy="steps", eval_steps=2, eval_dataset=TokenRows(),
    ).train()  # fmt: skip
    record = read_run(tmp_path)
    loads = record.expert_loads
    # A row at the logging step, and one for the steps after it at the end.
    assert [(load.global_step, load.status) for load in loads] == [(4, "recorded"), (6, "recorded")]
    top_k = model.config.num_experts_per_tok
    for load, first, last in ((loads[0], 1, 4), (loads[1], 5, 6)):
        real = sum(step.num_non_padding_tokens or 0 for step in record.steps if first <= step.global_step <= last)
        assert [sum(layer) for layer in load.tokens_per_expert] == [real * top_k] * 2
    assert sink.windows[0].load_max_over_mean is not None
    assert sink.extras[0]["expert_load"] == loads[0]


def test_a_dense_model_has_no_expert_rows(tmp_path: Path) -> None:
    tiny_trainer(tmp_path, [callback()]).train()
    assert read_run(tmp_path).expert_loads == []


def test_expert_load_can_be_left_out(tmp_path: Path) -> None:
    tiny_trainer(tmp_path, [callback(expert_load=False)], model=tiny_mixtral()).train()
    assert read_run(tmp_path).expert_loads == []


class ImageModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(pixel_values)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_model_without_token_ids_has_samples_and_one_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"pixel_values": torch.full((4,), float(place)), "labels": place % 2} for place in range(8)]
    sink = InMemorySink()
    tiny_trainer(
        tmp_path, [callback(sinks=[sink], usd_per_gpu_hour=1.0)], model=ImageModel(), train_dataset=rows,
        data_collator=lambda samples: {
            "pixel_values": torch.stack([row["pixel_values"] for row in samples]),
            "labels": torch.tensor([row["labels"] for row in samples]),
        },
    ).train()  # fmt: skip
    record = read_run(tmp_path)
    assert total(record, "num_samples") == 8
    assert record.steps[0].num_tokens is None
    assert sink.windows[-1].samples_per_second is not None
    assert sink.windows[-1].tokens_per_second is None
    assert sink.windows[-1].spent_usd is not None
    assert sum("input_ids" in message for message in caplog.messages) == 1


def sft_trainer(output_dir: Path, measuring: FTCostCallback, model: Any, **settings: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [
        {
            "prompt": " ".join(f"w{3 + (place + word) % 60}" for word in range(2)),
            "completion": " " + " ".join(f"w{3 + (5 * place + word) % 60}" for word in range(length - 3)),
        }
        for place, length in enumerate(length for length in LENGTHS if length > 3)
    ]
    fields: dict[str, Any] = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "max_length": 64,
        "gradient_checkpointing": False,
        "completion_only_loss": True,
    }
    return SFTTrainer(
        model=model,
        args=SFTConfig(**(fields | settings)),
        train_dataset=Dataset.from_list(rows),
        processing_class=word_tokenizer(),
        callbacks=[measuring],
    )


# Two prompt tokens, the completion, and the <eos> that TRL adds; those of LENGTHS above 3.
SFT_LENGTHS = [length for length in LENGTHS if length > 3]
SFT_TOKENS = sum(SFT_LENGTHS)
SFT_SUPERVISED = sum(length - 2 for length in SFT_LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="padded"),
        pytest.param({"gradient_accumulation_steps": 2, "gradient_checkpointing": True}, id="accumulated"),
        pytest.param({"packing": True, "max_length": 24}, id="packed"),
        pytest.param({"padding_free": True, "max_length": None}, id="padding-free"),
        pytest.param({"padding_free": True, "max_length": None, "pad_to_multiple_of": 8}, id="padding-free-multiple"),
    ],
)
def test_sft_trainer_counts_are_those_of_the_data(tmp_path: Path, settings: dict[str, Any]) -> None:
    sft_trainer(tmp_path, callback(), tiny_llama(), **settings).train()
    record = read_run(tmp_path)
    assert total(record, "num_non_padding_tokens") == SFT_TOKENS
    assert total(record, "num_supervised_tokens") == SFT_SUPERVISED
    assert total(record, "num_samples") == len(SFT_LENGTHS)
    assert total(record, "num_tokens") >= SFT_TOKENS
    if "padding_free" in settings and "pad_to_multiple_of" not in settings:
        assert total(record, "num_tokens") == SFT_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"padding_free": True, "max_length": None, "pad_to_multiple_of": 8}], ids=["padded", "padding-free"]
)
def test_sft_trainer_expert_load(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = tiny_mixtral()
    sft_trainer(tmp_path, callback(), model, gradient_checkpointing=True, logging_steps=100, **settings).train()
    loads = read_run(tmp_path).expert_loads
    assert [load.status for load in loads] == ["recorded"]
    assert [sum(layer) for layer in loads[0].tokens_per_expert] == [2 * SFT_TOKENS] * 2
    assert loads[0].reason is None
