"""What the caching allocator reserves for a step, by class of job: traces of the real modules, replayed. Writes replays.csv.

    python accuracy/build_replays.py       a quarter of an hour; needs torch, transformers and peft

Each job is traced at two lengths (fake tensors, ``tests/tracing``); every storage is linear in the length, so the log of
any length follows. Three steps of one length give the gaps; sixty of varying lengths the blocks that later lengths do not
fit into. The stacks are 12 or 16 layers deep.
"""

from __future__ import annotations

import contextlib
import csv
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "tests" / "tracing"))

from allocator import CachingAllocator  # noqa: E402

WORKSPACE_BYTES = 8_519_680  # of cuBLAS
# hidden, MLP, layers, heads, key/value heads, words, further fields
_SHAPES: dict[str, tuple[int, int, int, int, int, int, dict[str, Any]]] = {
    "llama-8b": (4096, 14_336, 12, 32, 8, 128_256, {}),
    "llama-1b": (2048, 8192, 16, 32, 8, 128_256, {"head_dim": 64, "tie_word_embeddings": True}),
    "llama2-7b": (4096, 11_008, 12, 32, 32, 32_000, {}),
    "qwen-14b": (5120, 13_696, 12, 40, 40, 151_936, {"model_type": "qwen2"}),
}
MODELS: dict[str, dict[str, Any]] = {
    name: {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": words,
        "tie_word_embeddings": False,
        **more,
    }
    for name, (hidden, width, layers, heads, kv_heads, words, more) in _SHAPES.items()
}
JOBS: dict[str, dict[str, Any]] = {
    "lora checkpointed": {"method": "lora", "bf16": True, "gradient_checkpointing": True},
    "lora": {"method": "lora", "bf16": True, "gradient_checkpointing": False},
    "qlora checkpointed": {
        "method": "qlora",
        "bf16": True,
        "gradient_checkpointing": True,
        "quantization": "nf4",
        "double_quant": True,
        "prepare_model_for_kbit_training": True,
    },
    "full bf16 checkpointed": {"method": "full", "gradient_checkpointing": True},
    "full bf16": {"method": "full", "gradient_checkpointing": False, "optim": "adamw_torch"},
    "full fp32 checkpointed": {"method": "full", "dtype": "float32", "bf16": True, "gradient_checkpointing": True},
}
COMMON = {
    "dtype": "bfloat16",
    "optim": "adamw_torch_fused",
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "lora_r": 16,
    "lora_target_modules": "all-linear",
    "lora_dropout": 0.05,
}
CLASS_OF = {"lora": "lora", "lora checkpointed": "lora_checkpointed", "qlora checkpointed": "lora_checkpointed"}
FIXED = ((1, 512), (1, 2048), (4, 2048))  # batch, tokens of a sequence
LONGEST, NUM_BATCHES, ORDERS = 2048, 60, 4
COLUMNS = ["model", "job", "class", "batch", "tokens", "lengths", "order", "dynamic_gib", "gap_share", "holes_per_loss"]


@dataclass(frozen=True)
class StepLog:
    """One step: (birth 1 or death -1, storage, bytes whatever the length, bytes a token, window)."""

    events: Sequence[tuple[int, int, float, float, str]]
    weights: Sequence[int]
    states: Sequence[int]
    vocab_size: int

    @property
    def static_bytes(self) -> int:
        return sum(self.weights) + sum(self.states)


def trace(config: Mapping[str, Any], job: Mapping[str, Any], length: int) -> tuple[Any, list[int], list[int]]:
    """(log, bytes of weights and adapters, bytes of optimizer states) of one traced step."""
    import torch
    from allocations import AllocationLog
    from fake_step import FakeTensorMode, build_model, create_states, gpu_choices, make_optimizer, watch

    with FakeTensorMode(), gpu_choices():
        model = build_model(config, job, num_layers=None)
        optimizer = make_optimizer(model, job)
        create_states(model, optimizer)
        log = AllocationLog()
        undo = watch(model, optimizer, log)
        first = len(log._storages)
        states = [
            value.nbytes
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        ]
        autocast = torch.autocast("cpu", torch.bfloat16) if job.get("bf16") else contextlib.nullcontext()
        with log:
            tokens = torch.zeros(1, length, dtype=torch.int64)
            log.enter("forward")
            with autocast:
                loss = model(input_ids=tokens, labels=tokens).loss
            log.enter("loss")
            loss.backward()
            del loss
            log.enter("optimizer")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        undo()
        log._flush()
        sizes = [storage.nbytes for storage in log._storages]
        events = [
            (1 if event.kind == "birth" else -1, event.storage - first, sizes[event.storage], event.window)
            for event in log._events
            if event.kind in {"birth", "death"} and event.storage >= first
        ]
        weights = sizes[:first]
        for size in states:
            weights.remove(size)
        return events, weights, states


def step_log(config: Mapping[str, Any], job: Mapping[str, Any], shorter: int = 512, longer: int = 1024) -> StepLog:
    first, weights, states = trace(config, job, shorter)
    second, _, _ = trace(config, job, longer)
    sizes = {storage: size for sign, storage, size, _ in second if sign == 1}
    events = []
    for sign, storage, size, window in first:
        slope = (sizes[storage] - size) / (longer - shorter)
        events.append((sign, storage, size - slope * shorter, slope, window))
    return StepLog(events, weights, states, config["vocab_size"])


def replay(log: StepLog, batches: Sequence[int]) -> CachingAllocator:
    """Steps of so many tokens each, from the loaded model on; the optimizer's states come with its first step."""
    allocator = CachingAllocator()
    for number, size in enumerate(log.weights):
        allocator.allocate(("weight", number), size)
    allocator.allocate("workspace", WORKSPACE_BYTES)
    has_states = False
    for tokens in batches:
        for sign, storage, fixed, per_token, window in log.events:
            if window == "optimizer" and not has_states:
                has_states = True
                for number, size in enumerate(log.states):
                    allocator.allocate(("state", number), size)
            if sign == 1:
                allocator.allocate(storage, round(fixed + per_token * tokens))
            else:
                allocator.free(storage)
    return allocator


def varying_lengths(kind: str, order: int) -> list[int]:
    """Lengths of a log-normal data set in some order; one batch of :data:`LONGEST` comes somewhere in between.

    *tail*: the mean is a third of the limit, what is longer is cut. *bulk*: the mean is half as much again as the limit,
    what is longer is dropped, so that many lengths are near the limit (as in the rows of ms_swift).
    """
    source = random.Random(order)
    mean, spread = {"tail": (LONGEST / 3, 0.7), "bulk": (LONGEST * 1.5, 0.8)}[kind]
    sigma = math.sqrt(math.log(1 + spread**2))
    lengths: list[int] = []
    while len(lengths) < NUM_BATCHES:
        drawn = int(source.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))
        if kind == "tail" or drawn <= LONGEST:
            lengths.append(min(LONGEST, max(10, drawn)))
    lengths[source.randrange(NUM_BATCHES)] = LONGEST
    return lengths


def rows(model: str, job: str, log: StepLog) -> Iterator[dict[str, Any]]:
    common = {"model": model, "job": job, "class": CLASS_OF.get(job, "full")}
    for batch, tokens in FIXED:
        done = replay(log, [batch * tokens] * 3)
        dynamic = done.most_allocated - log.static_bytes
        share = (done.most_reserved - done.most_allocated) / dynamic
        yield {
            **common,
            "batch": batch,
            "tokens": tokens,
            "dynamic_gib": f"{dynamic / 2**30:.2f}",
            "gap_share": f"{share:.3f}",
        }
    steady = replay(log, [LONGEST] * 3)
    loss = 12 * log.vocab_size * LONGEST
    for kind in ("tail", "bulk"):
        for order in range(ORDERS):
            done = replay(log, varying_lengths(kind, order))
            holes = (done.most_reserved - steady.most_reserved) / loss
            mixed = {"batch": 1, "tokens": LONGEST, "lengths": kind, "order": order}
            yield {**common, **mixed, "holes_per_loss": f"{holes:.2f}"}


def main() -> None:
    with open(FOLDER / "replays.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for job, fields in JOBS.items():
            for model, config in MODELS.items():
                log = step_log(config, {**COMMON, **fields})
                writer.writerows(rows(model, job, log))
                file.flush()


if __name__ == "__main__":
    main()
