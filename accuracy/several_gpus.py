"""Eight GPUs, fully sharded: public rows that no constant was fitted on, held against the model's step.

llm-foundry's benchmark of MPT-7B, one machine of 8 cards with NVLink. Each row prints batch, length and precision; the other
sizes of MPT are not in the catalogue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from log_errors import summary
from runs import FOLDER, Run, make_run, model_of, read_rows

from costmodel.step_time import step_time


def several_gpu_runs() -> Iterator[Run]:
    """Seconds are of one optimizer step. The PURE rows reduce gradients in bf16, which the model does not tell apart."""
    for row in read_rows(FOLDER / "data" / "llm_foundry_8gpu.csv"):
        if (
            row["model_id"] != "mosaicml/mpt-7b (llm-foundry yaml)"
            or row["n_gpus"] != "8"
            or "bf16" not in row["compute_precision"]
        ):
            continue
        size, length, accumulation = int(row["micro_batch"]), int(row["seq_len_max"]), int(row["grad_accum"])
        fields = {
            "method": "full",
            "dtype": "float32",
            "bf16": True,
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": accumulation,
            "gradient_checkpointing": row["grad_checkpointing"] == "yes",
            "attn_implementation": "flash_attention_2",
            "optim": "adamw_torch",
            "max_length": length,
            "lengths": {"fixed": length},
            "framework": "other",
            "num_gpus": 8,
            "fsdp": "full_shard",
        }
        seconds = size * accumulation * length / float(row["tokens_per_s"])  # tokens/s is of one GPU
        yield make_run(
            row["row_id"], "llm_foundry", "full", model_of("mosaicml/mpt-7b"), row["gpu"], fields, seconds=seconds
        )


def log_error(run: Run) -> float:
    """log(predicted / measured) of one optimizer step."""
    step = step_time(run.model, run.job, run.gpu, run.batch)
    assert step is not None
    assert run.seconds is not None
    return math.log(step.step_seconds / run.seconds)


def several_gpus_section() -> list[str]:
    """The lines of the document."""
    runs = list(several_gpu_runs())
    lines = [
        "MPT-7B, full fine-tuning, FSDP `full_shard` on 8 cards with NVLink (llm-foundry). No constant was fitted on them.",
        "",
        "| card | n | median % | p90 % | within 20 % | bias % |",
        "|---|---|---|---|---|---|",
    ]
    for gpu in dict.fromkeys(run.gpu.name for run in runs):
        lines.append(f"| 8 x {gpu} | {summary([log_error(run) for run in runs if run.gpu.name == gpu])} |")
    steps = [step_time(run.model, run.job, run.gpu, run.batch) for run in runs]
    shares = [step.by_group_seconds.get("communication", 0.0) / step.step_seconds for step in steps if step]
    return [
        *lines,
        f"| all | {summary([log_error(run) for run in runs])} |",
        "",
        f"They say little about the link: in the model at most {100 * max(shares):.1f} % of such a step waits for it. PCIe,",
        "DDP, ZeRO-1 and 2, LoRA, several machines and expert parallelism have no run here: the interval of several GPUs is",
        "half as wide again, and a warning says what it rests on.",
    ]
