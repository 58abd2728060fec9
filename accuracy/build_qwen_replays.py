"""What Qwen 1's own stack of late 2023 allocates and reserves: its step traced and replayed. Writes qwen_replays.csv.

    python accuracy/build_qwen_replays.py       five minutes; needs torch and transformers

Qwen 1 ran as remote code, so the layer is written out here as it computes: one linear for query, key and value, rotary
angles and norms in fp32, a loss on a shifted copy of the logits. Round it stand what its finetune.py ran on: peft 0.6 (an
adapter reads an fp32 copy of its input), accelerate 0.23 (the outputs copied to fp32), checkpointing that re-enters; for
Q-LoRA auto-gptq 0.5.1 (``qlinear_cuda_old``: weights unpacked by operators of torch) and DeepSpeed 0.12.6, ZeRO 2. Nothing
is fitted. What the published figure holds beyond the replay is what is outside torch's allocator, or not known.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from build_replays import FOLDER, StepLog, replay
from runs import read_rows
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

COLUMNS = ["row_id", "model", "method", "tokens", "static_gib", "allocated_gib", "reserved_gib"]
RANK, DROPOUT = 64, 0.05
BUCKETS_BYTES = (400_000_000, 400_000_000)  # DeepSpeed: two of 2e8 fp16 elements, overlap_comm
STEPS = 4
aten = torch.ops.aten


@dataclass(frozen=True)
class Shape:
    hidden: int
    width: int
    layers: int
    heads: int
    words: int


SHAPES = {
    "Qwen/Qwen-1_8B": Shape(2048, 5504, 24, 16, 151_936),
    "Qwen/Qwen-7B": Shape(4096, 11_008, 32, 32, 151_936),
    "Qwen/Qwen-14B": Shape(5120, 13_696, 40, 40, 152_064),
    "Qwen/Qwen-72B": Shape(8192, 24_576, 80, 64, 152_064),
}


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))

    def forward(self, rows: Any) -> Any:
        lifted = rows.float()
        return (lifted * torch.rsqrt(lifted.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(rows) * self.weight


class UnpackedLinear(nn.Module):
    """A GPTQ linear: 32-bit words of eight codes, shifted apart in 32 bit, kept in 8, scaled to 16."""

    def __init__(self, width_in: int, width_out: int, bias: bool) -> None:
        super().__init__()
        self.register_buffer("codes", torch.empty(width_in // 8, width_out, dtype=torch.int32))
        self.register_buffer("zeros", torch.empty(width_in // 128, width_out // 8, dtype=torch.int32))
        self.register_buffer("scales", torch.empty(width_in // 128, width_out, dtype=torch.float16))
        self.register_buffer("shifts", torch.empty(1, 8, dtype=torch.int32))
        self.bias = nn.Parameter(torch.empty(width_out)) if bias else None

    def forward(self, rows: Any) -> Any:
        zeros = torch.bitwise_right_shift(self.zeros.unsqueeze(2).expand(-1, -1, 8), self.shifts.unsqueeze(0)).to(torch.int8)
        zeros = (torch.bitwise_and(zeros, 15) + 1).reshape(self.scales.shape[0], 1, -1)
        weight = torch.bitwise_right_shift(self.codes.unsqueeze(1).expand(-1, 8, -1), self.shifts.unsqueeze(-1)).to(
            torch.int8
        )
        weight = torch.bitwise_and(weight, 15).reshape(self.scales.shape[0], -1, self.scales.shape[1])
        weight = self.scales.unsqueeze(1) * (weight - zeros)
        result = rows @ weight.reshape(-1, weight.shape[2])
        return result + self.bias if self.bias is not None else result


class Adapted(nn.Module):
    def __init__(self, base: nn.Module, width_in: int, width_out: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(width_in, RANK, bias=False, dtype=dtype)
        self.lora_b = nn.Linear(RANK, width_out, bias=False, dtype=dtype)

    def forward(self, rows: Any) -> Any:
        result = self.base(rows)
        added = self.lora_b(self.lora_a(functional.dropout(rows.to(self.lora_a.weight.dtype), DROPOUT)))
        if not torch.is_autocast_enabled("cpu"):
            added = added.to(result.dtype)
        result += added * 0.25
        return result


class Layer(nn.Module):
    def __init__(self, shape: Shape, is_gptq: bool) -> None:
        super().__init__()

        def linear(width_in: int, width_out: int, *, bias: bool = False, adapted: bool = True) -> nn.Module:
            base = UnpackedLinear(width_in, width_out, bias) if is_gptq else nn.Linear(width_in, width_out, bias=bias)
            dtype = torch.float16 if is_gptq else torch.float32
            return Adapted(base, width_in, width_out, dtype) if adapted else base

        hidden, width = shape.hidden, shape.width
        self.heads = shape.heads
        self.ln_1, self.ln_2 = Norm(hidden), Norm(hidden)
        self.c_attn, self.c_proj = linear(hidden, 3 * hidden, bias=True), linear(hidden, hidden)
        self.w1, self.w2 = linear(hidden, width), linear(hidden, width)
        self.down = linear(width, hidden, adapted=False)

    def forward(self, rows: Any, cos: Any, sin: Any) -> Any:
        size, length, hidden = rows.shape
        parts = self.c_attn(self.ln_1(rows)).split(hidden, dim=2)
        query, key, value = (part.view(size, length, self.heads, hidden // self.heads) for part in parts)

        def rotated(part: Any) -> Any:
            lifted = part.float()
            first, second = lifted.chunk(2, -1)
            return (lifted * cos + torch.cat((-second, first), -1) * sin).type_as(part)

        heads = (part.transpose(1, 2) for part in (rotated(query), rotated(key), value))
        mixed = aten._scaled_dot_product_flash_attention(*heads, 0.0, True, False)[0]
        rows = self.c_proj(mixed.transpose(1, 2).reshape(size, length, hidden)) + rows
        read = self.ln_2(rows)
        return rows + self.down(self.w1(read) * functional.silu(self.w2(read)))


class Qwen(nn.Module):
    def __init__(self, shape: Shape, is_gptq: bool) -> None:
        super().__init__()
        self.head_width = shape.hidden // shape.heads
        self.wte = nn.Embedding(shape.words, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, is_gptq) for _ in range(shape.layers))
        self.ln_f = Norm(shape.hidden)
        self.lm_head = nn.Linear(shape.hidden, shape.words, bias=False)

    def forward(self, tokens: Any) -> tuple[Any, Any]:
        rows = self.wte(tokens)
        if not rows.requires_grad:
            rows.requires_grad_(True)  # enable_input_require_grads
        cos, sin = (torch.empty(1, tokens.shape[1], 1, self.head_width) for _ in range(2))
        for layer in self.layers:
            rows = checkpoint(layer, rows, cos, sin, use_reentrant=True)
        logits = self.lm_head(self.ln_f(rows))
        shifted = logits[..., :-1, :].contiguous().view(-1, logits.shape[-1])
        labels = tokens[..., 1:].contiguous().view(-1)
        if torch.is_autocast_enabled("cpu"):  # which lifts a loss to fp32
            return aten.nll_loss(functional.log_softmax(shifted.float(), -1), labels), logits
        return aten.nll_loss(functional.log_softmax(shifted, -1), labels), logits


def build(shape: Shape, is_gptq: bool, trains_embeddings: bool) -> Qwen:
    torch.set_default_dtype(torch.float16 if is_gptq else torch.bfloat16)
    try:
        model = Qwen(shape, is_gptq)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():
        of_embeddings = trains_embeddings and name in {"wte.weight", "lm_head.weight"}
        parameter.requires_grad_("lora_" in name or of_embeddings)
    return model.train()


def trace(shape: Shape, length: int, *, is_gptq: bool, trains_embeddings: bool) -> tuple[Any, list[int], list[int]]:
    """(log, bytes of weights, bytes of optimizer states) of two micro-batches and an optimizer step."""
    from allocations import AllocationLog
    from fake_step import FakeTensorMode, create_states, gpu_choices

    with FakeTensorMode(), gpu_choices():
        model = build(shape, is_gptq, trains_embeddings)
        trained = [each for each in model.parameters() if each.requires_grad]
        count = sum(each.numel() for each in trained)
        optimizer = None if is_gptq else torch.optim.AdamW(trained, lr=1e-4, foreach=True)
        log = AllocationLog()
        for each in (*model.parameters(), *model.buffers()):
            log.add_static(each, "weights")
        weights = [storage.nbytes for storage in log._storages]
        states: list[int] = []
        if optimizer is not None:
            create_states(model, optimizer)
            held = [value for state in optimizer.state.values() for value in state.values()]
            for each in held:
                log.add_static(each, "optimizer")
            states = [each.nbytes for each in held if each.numel() > 1]
        first = len(log._storages)
        with log:
            for micro_batch in range(2):
                log.enter(f"forward {micro_batch}")
                autocast = contextlib.nullcontext() if is_gptq else torch.autocast("cpu", torch.bfloat16)
                with autocast:
                    loss, logits = model(torch.zeros(1, length, dtype=torch.int64))
                if not is_gptq:
                    loss, logits = loss.float(), logits.float()  # convert_outputs_to_fp32
                del logits
                log.enter(f"backward {micro_batch}")
                (loss / 8).backward()
                del loss
            log.enter("optimizer")
            if optimizer is not None:
                optimizer.step()
            else:  # the gradients laid end to end, and in fp32; a fused kernel
                flat = torch.empty(count, dtype=torch.float16), torch.empty(count)
                del flat
            for each in trained:
                each.grad = None
        log._flush()
        sizes = [storage.nbytes for storage in log._storages]
        events = [
            (1 if event.kind == "birth" else -1, event.storage - first, sizes[event.storage], event.window)
            for event in log._events
            if event.kind in {"birth", "death"} and event.storage >= first
        ]
        if is_gptq:  # buckets and fp32 masters, and the states with the first step
            weights += [*BUCKETS_BYTES, 4 * count]
            states = [4 * count, 4 * count]
        if trains_embeddings:  # peft trains copies of the two
            weights += 2 * [2 * shape.words * shape.hidden]
        return events, weights, states


def step_log(shape: Shape, shorter: int = 512, longer: int = 1024, **kind: bool) -> StepLog:
    """Every storage is linear in the length, as in ``build_replays``."""
    first, weights, states = trace(shape, shorter, **kind)
    second, _, _ = trace(shape, longer, **kind)
    sizes = {storage: size for sign, storage, size, _ in second if sign == 1}
    events = []
    for sign, storage, size, window in first:
        slope = (sizes[storage] - size) / (longer - shorter)
        events.append((sign, storage, size - slope * shorter, slope, window))
    return StepLog(events, weights, states, shape.words)


def replayed(row: Mapping[str, str], log: StepLog) -> dict[str, Any]:
    done = replay(log, [int(row["seq_len_max"])] * STEPS)
    return {
        "row_id": row["row_id"],
        "model": row["model_id"],
        "method": row["method_detail"].partition(" ")[0]
        if row["method"] == "qlora"
        else row["method_detail"][:10] or "LoRA",
        "tokens": row["seq_len_max"],
        "static_gib": f"{log.static_bytes / 2**30:.2f}",
        "allocated_gib": f"{done.most_allocated / 2**30:.2f}",
        "reserved_gib": f"{done.most_reserved / 2**30:.2f}",
    }


def main() -> None:
    rows = [
        row for row in read_rows(FOLDER / "data" / "qwen1_profiling.csv") if row["n_gpus"] == "1" and row["method"] != "full"
    ]
    logs: dict[tuple[str, bool, bool], StepLog] = {}
    with open(FOLDER / "qwen_replays.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            is_gptq, trains_embeddings = row["method"] == "qlora", "emb" in row["method_detail"]
            key = (row["model_id"], is_gptq, trains_embeddings)
            if key not in logs:
                logs.clear()
                logs[key] = step_log(SHAPES[row["model_id"]], is_gptq=is_gptq, trains_embeddings=trains_embeddings)
            writer.writerow(replayed(row, logs[key]))
            file.flush()


if __name__ == "__main__":
    main()
