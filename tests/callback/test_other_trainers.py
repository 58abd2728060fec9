"""Trainers that do more than train on their batch, run for real: Seq2SeqTrainer, TRL's DPO, reward and GRPO trainers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import VOCABULARY, tiny_llama, tiny_mixtral, word_tokenizer

from costmodel.errors import CostModelError
from ftcost_callback import FTCostCallback, estimate_trainer
from ftcost_callback.report_html import write_report
from ftcost_callback.report_rows import summary_row
from ftcost_callback.rollouts import METHOD, MethodWatch
from ftcost_callback.run_file import RunRecord, read_run

REWARD_SECONDS = 0.1


def words(number: int, first: int = 0) -> str:
    return " ".join(f"w{3 + (first + place) % 60}" for place in range(number))


def settings(output_dir: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "seed": 7,
    } | changes


def trained(trainer: Any, output_dir: Path) -> RunRecord:
    """The record of the whole training, which also makes a report; its buckets are the wall time."""
    trainer.train()
    record = read_run(output_dir)
    assert record.summary is not None
    assert record.summary.status == "finished"
    assert record.totals.wall_seconds == pytest.approx(record.summary.wall_seconds, rel=1e-6)
    write_report([output_dir], output_dir / "report.html")
    return record


def total(record: RunRecord, name: str) -> int:
    return sum(getattr(step, name) for step in record.steps)


def notes(record: RunRecord) -> str:
    return " ".join(record.sessions[0].notes or [])


@pytest.mark.slow
def test_an_encoder_decoder_with_generating_evaluation(tmp_path: Path) -> None:
    from transformers import (
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )

    tokenizer = word_tokenizer()
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0,
            pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    rows = [{"input_ids": list(range(3, 6 + place)), "labels": list(range(5, 7 + place % 3))} for place in range(6)]
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            **settings(tmp_path, predict_with_generate=True, generation_max_length=6, eval_strategy="steps", eval_steps=2)
        ),
        train_dataset=rows,
        eval_dataset=rows[:4],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        callbacks=[FTCostCallback(sinks=[], usd_per_gpu_hour=1.0)],
    )
    record = trained(trainer, tmp_path)
    read, written = sum(len(row["input_ids"]) for row in rows), sum(len(row["labels"]) for row in rows)
    # What evaluation generates is no training.
    assert total(record, "num_non_padding_tokens") == read + written
    assert total(record, "num_supervised_tokens") == written
    assert total(record, "num_samples") == 6
    assert record.summary is not None
    assert record.summary.eval_seconds > 0
    assert record.predictions == []
    assert "model family 't5' is not modelled" in notes(record)


PAIRS = [
    {"prompt": words(2, place), "chosen": " " + words(3 + place, place), "rejected": " " + words(5, place)}
    for place in range(6)
]
# Prompt, completion and <eos>, of the chosen and of the rejected answer.
PAIR_TOKENS = sum((2 + 3 + place + 1) + (2 + 5 + 1) for place in range(6))


def dpo_trainer(output_dir: Path, callback: FTCostCallback, model: Any, **changes: Any) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer(
        model=model,
        args=DPOConfig(**settings(output_dir, max_length=64, gradient_checkpointing=False)),
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=word_tokenizer(),
        callbacks=[callback],
        **changes,
    )


def tokens_of_experts(record: RunRecord) -> list[int]:
    """Choices in each layer, over the whole run."""
    loads = record.expert_loads
    assert {(load.status, load.reason) for load in loads} == {("recorded", None)}
    return [sum(map(sum, layers)) for layers in zip(*(load.tokens_per_expert for load in loads), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["another model", "the same without its adapter"])
def test_preference_training_counts_both_answers_and_not_the_reference(tmp_path: Path, reference: str) -> None:
    changes: dict[str, Any] = {"ref_model": tiny_mixtral()}
    if reference == "the same without its adapter":
        from peft import LoraConfig

        changes = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
    trainer = dpo_trainer(tmp_path, FTCostCallback(sinks=[], usd_per_gpu_hour=1.0), tiny_mixtral(), **changes)
    with pytest.raises(CostModelError, match=r"training with TRL's DPO is not modelled: .* reference model"):
        estimate_trainer(trainer)
    record = trained(trainer, tmp_path)
    assert total(record, "num_non_padding_tokens") == PAIR_TOKENS
    assert total(record, "num_supervised_tokens") == PAIR_TOKENS - 2 * 2 * 6
    assert total(record, "num_samples") == 2 * 6
    assert tokens_of_experts(record) == [2 * PAIR_TOKENS] * 2
    assert record.predictions == []
    assert record.summary is not None
    assert record.summary.measured_over_predicted is None
    assert record.summary.mfu is None
    assert "DPO is not modelled" in notes(record)


@pytest.mark.slow
def test_reward_training_counts_both_answers_and_is_not_predicted_as_plain_training(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    fields = tiny_llama().config.to_dict()
    model = LlamaForSequenceClassification(LlamaConfig(**{**fields, "id2label": {0: "reward"}, "label2id": {"reward": 0}}))
    pairs = [{"chosen": words(3 + place, place), "rejected": words(5, place)} for place in range(6)]
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(**settings(tmp_path, max_length=64, gradient_checkpointing=False)),
        train_dataset=Dataset.from_list(pairs),
        processing_class=word_tokenizer(),
        callbacks=[FTCostCallback(sinks=[], usd_per_gpu_hour=1.0)],
    )
    record = trained(trainer, tmp_path)
    assert total(record, "num_non_padding_tokens") == sum((3 + place + 1) + (5 + 1) for place in range(6))
    assert [step.num_supervised_tokens for step in record.steps] == [None] * 3  # there are no labels
    assert record.predictions == []
    assert "Reward is not modelled" in notes(record)


def slow_reward(completions: list[str], **fields: Any) -> list[float]:
    time.sleep(REWARD_SECONDS)
    return [float(len(each)) for each in completions]


@pytest.mark.slow
def test_rollouts_are_a_bucket_of_their_own(tmp_path: Path) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    class Counting(GRPOTrainer):  # type: ignore[misc]
        """Counts what it trains on, as its loss sees it."""

        trained_tokens = 0

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            if model.training:
                self.trained_tokens += int(inputs["prompt_mask"].sum() + inputs["completion_mask"].sum())
            return super()._compute_loss(model, inputs)

    prompts = Dataset.from_list([{"prompt": words(3 + place % 3, place)} for place in range(8)])
    trainer = Counting(
        model=tiny_mixtral(),
        reward_funcs=slow_reward,
        args=GRPOConfig(
            **settings(
                tmp_path, max_steps=4, max_completion_length=8, num_generations=2, gradient_checkpointing=False, beta=0.1,
                gradient_accumulation_steps=2, num_iterations=2, eval_strategy="steps", eval_steps=2,
                per_device_eval_batch_size=2,
            )
        ),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(2)),
        processing_class=word_tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj"]),  # the reference is the model without it
        callbacks=[FTCostCallback(sinks=[], usd_per_gpu_hour=1.0)],
    )  # fmt: skip
    record = trained(trainer, tmp_path)
    # A rollout serves num_iterations = 2 optimizer steps: the first and the third.
    rolled_out = [step.rollout_seconds for step in record.steps]
    assert [seconds is not None for seconds in rolled_out] == [True, False, True, False]
    assert all(seconds >= REWARD_SECONDS for seconds in rolled_out if seconds is not None)
    assert all(step.step_seconds > 0 for step in record.steps)
    assert all((step.data_wait_seconds or 0.0) < REWARD_SECONDS for step in record.steps[1:])
    summary = record.summary
    assert summary is not None
    assert summary.rollout_seconds == pytest.approx(sum(seconds or 0.0 for seconds in rolled_out))
    buckets = ("train", "eval", "save", "log", "startup", "other", "rollout")
    assert sum(getattr(summary, f"{name}_seconds") for name in buckets) == pytest.approx(summary.wall_seconds)
    assert summary.eval_seconds >= 2 * REWARD_SECONDS  # what evaluation generates stays evaluation
    # Generating, the reference model and the old log-probabilities are no training.
    assert total(record, "num_non_padding_tokens") == trainer.trained_tokens
    assert tokens_of_experts(record) == [2 * trainer.trained_tokens] * 2
    assert summary_row(tmp_path)["rollout_seconds"] == pytest.approx(summary.rollout_seconds)
    assert "Rollouts" in (tmp_path / "report.html").read_text()
    assert record.predictions == []
    assert "GRPO is not modelled" in notes(record)
    assert METHOD not in vars(trainer)  # as it was


class Generating:
    def __init__(self) -> None:
        self.number = 0

    def _generate_and_score_completions(self, inputs: int) -> int:
        if inputs < 0:
            raise ValueError("no inputs")
        self.number += 1
        return inputs + self.number


def test_a_rollout_is_seen_and_the_trainer_gets_what_it_asked_for() -> None:
    seen: list[str] = []
    watch = MethodWatch(lambda: seen.append("begin"), lambda: seen.append("end"))
    trainer = Generating()
    watch.attach(trainer)
    assert trainer._generate_and_score_completions(10) == 11
    with pytest.raises(ValueError, match="no inputs"):
        trainer._generate_and_score_completions(-1)
    assert seen == ["begin", "end"] * 2
    watch.detach()
    watch.detach()
    assert trainer._generate_and_score_completions(10) == 12
    assert len(seen) == 4
    assert vars(trainer) == {"number": 2}


def test_a_method_that_somebody_else_has_wrapped_since_is_left_alone() -> None:
    trainer = Generating()
    watch = MethodWatch(lambda: None, lambda: None)
    watch.attach(trainer)
    ours = trainer._generate_and_score_completions

    def theirs(inputs: int) -> int:
        return ours(inputs)

    trainer._generate_and_score_completions = theirs  # type: ignore[method-assign]
    watch.detach()
    assert trainer._generate_and_score_completions is theirs
    watch.attach(object())  # a trainer without rollouts
    watch.detach()
