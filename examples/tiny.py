"""Stand-ins for the examples at tiny size: random models, a tokenizer trained on the spot, the text of Python's ``help()``.

Nothing here is needed in your own script: with a real model and your data, ``AutoModelForCausalLM.from_pretrained`` and
``load_dataset`` take their place.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # without a GPU it says at import which kernels it lacks

from datasets import Dataset, disable_progress_bars, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, set_seed

VOCABULARY_SIZE = 512
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 128},
    "mixtral": {"intermediate_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4},
}


def options(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The flags that every example has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=defaults.get("model"), help="hub id or folder (default %(default)s)")
    parser.add_argument("--dataset", help="a JSONL file with a 'text' field in each line")
    parser.add_argument("--usd-per-gpu-hour", type=float, default=2.0, help="what this machine costs (default %(default)s)")
    parser.add_argument("--output-dir", type=Path, default=Path("output"))
    parser.add_argument("--tiny", action="store_true", help="a small random model, to see that everything works")
    return parser


def texts() -> list[str]:
    """Paragraphs of very different lengths."""
    from pydoc_data.topics import topics

    paragraphs = (text.strip() for topic in topics.values() for text in re.split(r"\n\s*\n", topic))
    return [text for text in paragraphs if len(text) >= 60]


def tokenizer_of(given: argparse.Namespace) -> Any:
    """The model's tokenizer; at tiny size one that is trained here, in a second."""
    if not given.tiny:
        tokenizer = AutoTokenizer.from_pretrained(given.model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY_SIZE, special_tokens=list(special.values()), show_progress=False)
    tokenizer.train_from_iterator(texts()[:300], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def data_of(given: argparse.Namespace, num_samples: int = 160) -> Dataset:
    """Rows with a ``text``; at tiny size paragraphs of Python's own help."""
    disable_progress_bars()
    if not given.tiny:
        if given.dataset is None:
            raise SystemExit("--dataset FILE: a JSONL file with a 'text' field in each line (or --tiny)")
        return load_dataset("json", data_files=given.dataset, split="train")
    return Dataset.from_dict({"text": texts()[:num_samples]})


def tokens_of(rows: Dataset, tokenizer: Any, max_length: int) -> Dataset:
    """``input_ids`` of each row, at its natural length."""

    def tokenize(row: dict[str, Any]) -> dict[str, list[int]]:
        return {
            "input_ids": tokenizer(row["text"] + tokenizer.eos_token, truncation=True, max_length=max_length)["input_ids"]
        }

    return rows.map(tokenize, remove_columns=rows.column_names)


def tiny_model(architecture: str, tokenizer: Any, **shape: Any) -> Any:
    """A random model of some 100,000 weights."""
    set_seed(17)
    shape = {
        "vocab_size": VOCABULARY_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
    } | SHAPES[architecture] | shape  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **shape))
