"""Other estimators on the same rows, inside whatever environment has them: JSON lines in, JSON lines out.

    python benchmarks/peers.py ftuneai < rows.jsonl

Each line in is a job in neutral words (``speed.neutral_row``); each line out holds ``memory_gib``, ``held_gib`` (the tool's
allowance for CUDA, fragmentation and safety left out) and ``micro_batch_seconds``, or ``error``. Model shapes, parameter
counts and card rates are handed over, so nothing is fetched and nobody is wrong for lack of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def _shape(row: dict[str, Any]) -> dict[str, Any]:
    """By the names that ftuneai and fitcheck share."""
    same = ("hidden_size", "num_layers", "num_kv_heads", "intermediate_size", "vocab_size")
    return {name: row[name] for name in same} | {"num_attention_heads": row["num_heads"]}


def ftuneai(row: dict[str, Any]) -> dict[str, Any]:
    from ftuneai.core.memory import MemoryEstimator
    from ftuneai.core.models import (
        FineTuneMethod,
        GPUSpec,
        LoRATarget,
        ModelSpec,
        OptimizerType,
        Quantization,
        TrainingConfig,
    )
    from ftuneai.core.time import TimeEstimator

    model = ModelSpec(
        name=row["model"],
        parameters=row["num_params"],
        **_shape(row),
        max_seq_length=65_536,
    )
    config = TrainingConfig(
        model=row["model"],
        method=FineTuneMethod(row["method"]),
        quantization=Quantization.INT4 if row["method"] == "qlora" else Quantization.NONE,
        batch_size=row["batch_size"],
        seq_length=row["longest_tokens"],
        gradient_checkpointing=row["gradient_checkpointing"],
        optimizer=OptimizerType.ADAMW,
        lora_rank=row["lora_r"] or 16,
        lora_target=LoRATarget.ALL_LINEAR if row["adapts_mlp"] else LoRATarget.ATTENTION,
        flash_attention=row["flash_attention"],
    )
    memory = MemoryEstimator(model, config).estimate()
    tflops = row["peak_flops_per_second"] / 1e12
    gpu = GPUSpec(row["gpu"], row["vram_gib"], tflops, tflops, tflops / 8, row["bandwidth"] / 1e9)
    tokens = max(1, round(row["num_tokens"] / row["batch_size"]))
    samples = 100_000 * row["batch_size"]
    timed = TimeEstimator(model, config).estimate(gpu, dataset_size=samples, epochs=1, avg_seq_length=tokens)
    return {
        "memory_gib": memory.total_gb,
        "held_gib": memory.total_gb - memory.overhead_gb,
        "micro_batch_seconds": timed.total_hours * 3600 / 100_000,
    }


def fitcheck(row: dict[str, Any]) -> dict[str, Any]:
    from fitcheck.config_parser import ModelConfig
    from fitcheck.estimator import TrainingConfig, estimate
    from fitcheck.gpu_db import GpuSpec

    model = ModelConfig(
        name=row["model"],
        num_params=row["num_params"],
        **_shape(row),
        head_dim=row["head_dim"],
        tie_word_embeddings=row["tied_embeddings"],
    )
    attention = ["q_proj", "v_proj"]
    everything = [*attention, "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    training = TrainingConfig(
        precision="bf16",
        quantization="nf4" if row["method"] == "qlora" else "none",
        double_quant=row["double_quant"],
        optimizer="adamw",
        optimizer_dtype="bf16" if row["trained_in_16_bit"] else "fp32",
        batch_size=row["batch_size"],
        seq_len=row["longest_tokens"],
        lora_rank=None if row["method"] == "full" else row["lora_r"],
        lora_targets=everything if row["adapts_mlp"] else attention,
        grad_checkpoint=row["gradient_checkpointing"],
        flash_attn=row["flash_attention"],
    )
    mib = round(row["vram_gib"] * 1024)
    report = estimate(model, training, GpuSpec(row["gpu"], mib, mib))
    held = report.total_mib - report.overhead_mib
    return {"memory_gib": report.total_mib / 1024, "held_gib": held / 1024, "micro_batch_seconds": None}


def canifinetune(row: dict[str, Any]) -> dict[str, Any]:
    from canifinetune.estimator.memory import EstimateRequest, estimate

    shape = {
        "hidden_size": row["hidden_size"],
        "num_hidden_layers": row["num_layers"],
        "num_attention_heads": row["num_heads"],
        "num_key_value_heads": row["num_kv_heads"],
        "intermediate_size": row["intermediate_size"],
        "vocab_size": row["vocab_size"],
        "tie_word_embeddings": row["tied_embeddings"],
        "total_params": row["num_params"],
    }
    answer = estimate(
        EstimateRequest(
            model_id=row["model"],
            override=shape,
            use_network=False,
            local_files_only=True,
            method=row["method"],
            gpu_vram_gb=row["vram_gib"],
            seq_len=row["longest_tokens"],
            micro_batch_size=row["batch_size"],
            lora_rank=row["lora_r"] or 16,
            lora_target_scope="all_linear" if row["adapts_mlp"] else "attention",
            quantization="nf4_double_quant" if row["double_quant"] else "nf4" if row["method"] == "qlora" else "none",
            base_dtype="bf16",
            optimizer="adamw_torch",
            gradient_checkpointing=row["gradient_checkpointing"],
            attention_implementation="flash_attention_2" if row["flash_attention"] else "sdpa",
        )
    )
    memory = answer.memory
    total = memory.total_estimated_gb - memory.safety_margin_gb
    return {"memory_gib": total, "held_gib": total - memory.cuda_overhead_gb, "micro_batch_seconds": None}


def accelerate(row: dict[str, Any]) -> dict[str, Any]:
    """What ``accelerate estimate-memory`` prints as "Training using Adam": four times the model. Full fine-tuning only."""
    if row["method"] != "full":
        raise ValueError("no adapters in this tool")
    total = 4 * row["num_params"] * row["weights_bytes"] / 2**30
    return {"memory_gib": total, "held_gib": total, "micro_batch_seconds": None}


PEERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "ftuneai": ftuneai,
    "fitcheck-llm": fitcheck,
    "canifinetune": canifinetune,
    "accelerate": accelerate,
}


def main() -> None:
    peer = PEERS[sys.argv[1]]
    for line in sys.stdin:
        try:
            answer = peer(json.loads(line))
        except Exception as error:  # one refused row is a result, too
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        print(json.dumps(answer))


if __name__ == "__main__":
    main()
