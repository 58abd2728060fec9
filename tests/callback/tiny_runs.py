"""Tiny models and data for the live part. Everything runs on the CPU in fractions of a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 64
PAD = 0
IGNORED = -100


class FakeClock:
    """A clock that moves when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds


class TickingClock(FakeClock):
    """Moves on by a millisecond whenever it is read, so that no time is zero and no test waits."""

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def tiny_llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_sizes(), **changes))


def tiny_mixtral(**changes: Any) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    fields = _sizes() | {"num_local_experts": 4, "num_experts_per_tok": 2} | changes
    return MixtralForCausalLM(MixtralConfig(**fields))


def tiny_qwen3_moe(**changes: Any) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    fields = _sizes() | {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(fields | changes)))


def tiny_olmoe(**changes: Any) -> Any:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    fields = _sizes() | {"num_experts": 6, "num_experts_per_tok": 2} | changes
    return OlmoeForCausalLM(OlmoeConfig(**fields))


MOE_FACTORIES: dict[str, Callable[..., Any]] = {
    "mixtral": tiny_mixtral,
    "qwen3_moe": tiny_qwen3_moe,
    "olmoe": tiny_olmoe,
}


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": PAD,
    }


LENGTHS = (5, 9, 3, 12, 7, 4, 10, 6, 8, 11, 2, 13)
"""Tokens of each sample; the first two of each are a prompt without loss."""


class TokenRows:
    """A data set of ``LENGTHS``; the labels of a sample's first two tokens are ignored."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, place: int) -> dict[str, list[int]]:
        length = self.lengths[place]
        ids = [1 + (7 * place + 3 * position) % (VOCABULARY - 1) for position in range(length)]
        labels = [IGNORED if position < 2 else token for position, token in enumerate(ids)]
        return {"input_ids": ids, "labels": labels}


def listed_rows() -> list[dict[str, list[int]]]:
    """The rows as a list, whose lengths are read for the prediction."""
    rows = TokenRows()
    return [rows[place] for place in range(len(rows))]


def word_tokenizer() -> Any:
    """Of the words w3 ... w63, one token each."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=128
    )


def pad_right(samples: list[dict[str, list[int]]]) -> dict[str, Any]:
    """A collator: pads ids, mask and labels to the longest sample of the batch."""
    import torch

    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(name: str, fill: int) -> Any:
        return torch.tensor([sample[name] + [fill] * (longest - len(sample[name])) for sample in samples])

    return {
        "input_ids": padded("input_ids", PAD),
        "labels": padded("labels", IGNORED),
        "attention_mask": torch.tensor(
            [[1] * len(sample["input_ids"]) + [0] * (longest - len(sample["input_ids"])) for sample in samples]
        ),
    }


def supervised_tokens(lengths: tuple[int, ...] = LENGTHS) -> int:
    """Positions that enter the shifted loss: all but the first two of each sample."""
    return sum(max(0, length - 2) for length in lengths)


def training_arguments(output_dir: Path, **changes: Any) -> Any:
    from transformers import TrainingArguments

    fields: dict[str, Any] = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 7,
        "train_sampling_strategy": "sequential",
    }
    return TrainingArguments(**(fields | changes))


def tiny_trainer(output_dir: Path, callbacks: list[Any], *, model: Any = None, **changes: Any) -> Any:
    """A real Trainer on a tiny model and the rows of ``TokenRows``."""
    import torch
    from transformers import Trainer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer_fields = {
        name: changes.pop(name)
        for name in ("data_collator", "train_dataset", "eval_dataset", "compute_loss_func")
        if name in changes
    }
    return Trainer(
        model=model if model is not None else tiny_llama(),
        args=training_arguments(output_dir, **changes),
        callbacks=callbacks,
        **({"train_dataset": TokenRows(), "data_collator": pad_right} | trainer_fields),
    )


# A prediction for a card would not be comparable with a training on a processor.
A_PROCESSOR: dict[str, Any] = {
    "name": "a processor",
    "vendor": "CPU",
    "memory_bytes": 16 * 2**30,
    "memory_bandwidth_bytes_per_second": 1e10,
    "measured_fp32_matmul_flops_per_second": 5e10,
    "measured_bf16_matmul_flops_per_second": 5e10,
    "seconds_per_operator": 3e-6,
}


def priced_callback(**arguments: Any) -> Any:
    """An ``FTCostCallback`` at a dollar a second, with a prediction for this device, on a clock that ticks by itself."""
    from ftcost_callback import FTCostCallback

    callback = FTCostCallback(
        **({"usd_per_gpu_hour": 3600.0, "gpu": A_PROCESSOR, "peak_flops_per_second": 1e11} | arguments)
    )
    callback._clock = TickingClock()
    return callback


def num_hooks(model: Any) -> int:
    """Hooks on the model and on its experts."""
    from ftcost_callback.expert_sites import find_expert_sites

    sites = find_expert_sites(model)
    return (
        len(model._forward_hooks)
        + len(model._forward_pre_hooks)
        + sum(len(site.module._forward_pre_hooks) for site in sites)
    )


def stop_at(step: int) -> Any:
    """A callback that ends the training after ``step``, as somebody's early stopping would."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step >= step:
                control.should_training_stop = True

    return Stop()
