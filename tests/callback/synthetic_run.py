"""Run records of made-up runs, the same on every machine: what the report and other readers are tested on.

No figure here was measured. The shapes are those of :mod:`ftcost_callback.records`; the sizes are near those of a
Mixtral-8x7B QLoRA run on an A40 and of a small dense LoRA run. Time is bookkept exactly, so that the buckets of each
summary sum to its wall time.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from costmodel.units import GIB, SECONDS_PER_HOUR
from ftcost_callback.records import Budget, ExpertLoad, Pause, Prediction, Session, Step, Summary

Row = dict[str, Any]

A40_USD_PER_HOUR = 0.79
BUDGET_USD = 1.5
MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"
NUM_LAYERS = 32
NUM_EXPERTS = 8
NUM_EXPERTS_PER_TOK = 2
MOE_STEPS = 600
RESUMED_FROM = 300
KILLED_AT = 330
BUCKETS = ("train", "eval", "save", "log", "startup", "other")


@dataclass
class Ledger:
    """Seconds by bucket and tokens so far, over all sessions of the run."""

    usd_per_hour: float | None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))
    data_wait_seconds: float = 0.0
    wasted_seconds: float = 0.0
    num_tokens: int = 0
    num_non_padding_tokens: int = 0
    num_supervised_tokens: int = 0
    num_steps: int = 0
    trained_seconds: list[float] = field(default_factory=list)

    @property
    def wall_seconds(self) -> float:
        return sum(self.seconds.values())

    def usd(self, seconds: float) -> float | None:
        return None if self.usd_per_hour is None else seconds / SECONDS_PER_HOUR * self.usd_per_hour

    def summary(self, **fields: Any) -> Row:
        return Summary(
            wall_seconds=self.wall_seconds,
            **{f"{bucket}_seconds": seconds for bucket, seconds in self.seconds.items()},
            data_wait_seconds=self.data_wait_seconds,
            wasted_seconds=self.wasted_seconds,
            num_steps=self.num_steps,
            num_tokens=self.num_tokens,
            num_non_padding_tokens=self.num_non_padding_tokens,
            num_supervised_tokens=self.num_supervised_tokens,
            spent_usd=self.usd(self.wall_seconds),
            num_sessions_in_rates=fields["num_sessions"],
            step_seconds_mean=sum(self.trained_seconds[1:]) / max(1, len(self.trained_seconds) - 1),
            first_step_seconds=self.trained_seconds[0],
            tokens_per_second=self.num_tokens / self.seconds["train"],
            non_padding_tokens_per_second=self.num_non_padding_tokens / self.seconds["train"],
            **fields,
        ).to_row()


def moe_prediction(total_seconds: float = 7000.0, basis: str = "before", step: int = 0) -> Row:
    """An answer of the contract's shape for the Mixtral job, with every figure the report reads."""
    total_usd = total_seconds / SECONDS_PER_HOUR * A40_USD_PER_HOUR
    spread = 0.25 if basis == "before" else 0.06
    estimate = {
        "schema_version": 1,
        "version": "0.1.0",
        "job": {"model": MIXTRAL, "gpu": "NVIDIA A40", "method": "qlora"},
        "assumed": ["optim"],
        "num_params": 46_702_792_704,
        "num_active_params": 12_748_587_008,
        "num_trainable_params": 121_110_528,
        "memory": {
            "weights_bytes": int(25.1 * GIB),
            "adapters_bytes": int(0.45 * GIB),
            "gradients_bytes": int(0.45 * GIB),
            "optimizer_bytes": int(0.9 * GIB),
            "activations_bytes": int(4.2 * GIB),
            "logits_bytes": int(1.1 * GIB),
            "temporary_bytes": int(0.7 * GIB),
            "context_bytes": int(0.5 * GIB),
            "peak_phase": "backward",
            "peak_allocated_bytes": int(32.9 * GIB),
            "peak_reserved_bytes": int(35.0 * GIB),
            "peak_device_bytes": int(35.5 * GIB),
            "peak_device_bytes_low": int(33.6 * GIB),
            "peak_device_bytes_high": int(38.0 * GIB),
            "capacity_bytes": int(44.5 * GIB),
        },
        "verdict": "fits",
        "interval_level": 0.8,
        "step_seconds": total_seconds / MOE_STEPS * 0.93,
        "step_seconds_low": total_seconds / MOE_STEPS * 0.93 * (1 - spread),
        "step_seconds_high": total_seconds / MOE_STEPS * 0.93 * (1 + spread),
        "step": {"bound_by": "dequantisation", "forward_seconds": 3.1, "backward_seconds": 7.6},
        "num_tokens_per_step": 3300.0,
        "num_non_padding_tokens_per_step": 2790.0,
        "tokens_per_second": 3300.0 / (total_seconds / MOE_STEPS * 0.93),
        "non_padding_tokens_per_second": 2790.0 / (total_seconds / MOE_STEPS * 0.93),
        "mfu": 0.087,
        "num_steps": MOE_STEPS,
        "total_seconds": total_seconds,
        "total_seconds_low": total_seconds * (1 - spread),
        "total_seconds_high": total_seconds * (1 + spread),
        "total_usd": total_usd,
        "total_usd_low": total_usd * (1 - spread),
        "total_usd_high": total_usd * (1 + spread),
    }
    return Prediction(basis=basis, global_step=step, estimate=estimate).to_row()  # type: ignore[arg-type]


def moe_session(index: int, started_at: str, ledger: Ledger, *, model: str, max_steps: int = MOE_STEPS) -> Row:
    return Session(
        run_id="moe-7f3a",
        session_index=index,
        resumed_from_step=None if index == 0 else RESUMED_FROM,
        started_at=started_at,
        startup_seconds=190.0 if index == 0 else 240.0,
        max_steps=max_steps,
        job={
            "model": model,
            "gpu": "NVIDIA A40",
            "method": "qlora",
            "quantization": "nf4",
            "lora_r": 16,
            "lora_target_modules": ["w1", "w2", "w3", "gate"],
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 4,
            "gradient_checkpointing": True,
            "max_length": 1024,
            "lengths": {"histogram": {str(length): 10 for length in range(64, 1024, 8)}},
            "optim": "adamw_torch",
        },
        model={
            "class": "MixtralForCausalLM",
            "num_params": 46_702_792_704,
            "num_active_params": 12_748_587_008,
            "num_trainable_params": 121_110_528,
            "num_experts": NUM_EXPERTS,
        },
        device={
            "name": "NVIDIA A40",
            "memory_bytes": int(44.5 * GIB),
            "peak_flops_per_second": 149.7e12,
            "peak_source": "data sheet, dense bf16",
            "tdp_watts": 300,
        },
        price={
            "usd_per_gpu_hour": A40_USD_PER_HOUR,
            "usd_per_instance_hour": A40_USD_PER_HOUR,
            "gpus_per_instance": 1,
            "source": "usd_per_gpu_hour argument",
            "as_of": "2026-08-17",
        },
        budget={"usd": BUDGET_USD, "stop_at_budget": False},
        versions={"ftcost": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "peft": "0.21.2"},
        notes=["hfu: gradient checkpointing of this model is not modelled"],
    ).to_row()


def expert_tokens(rng: random.Random, step: int, num_tokens: int) -> list[list[int]]:
    """Routed tokens (layers x experts): balanced at first, then experts 2 and 5 of the upper layers take over."""
    drift = step / MOE_STEPS
    layers = []
    for layer in range(NUM_LAYERS):
        depth = layer / (NUM_LAYERS - 1)
        weights = [
            (1.0 + 0.25 * math.sin(1.7 * expert + 0.6 * layer)) * rng.uniform(0.95, 1.05) for expert in range(NUM_EXPERTS)
        ]
        for expert in (2, 5):
            weights[expert] *= 1.0 + 2.4 * drift * depth
        routed = num_tokens * NUM_EXPERTS_PER_TOK
        tokens = [int(routed * weight / sum(weights)) for weight in weights]
        tokens[0] += routed - sum(tokens)
        layers.append(tokens)
    return layers


def _moe_steps(
    rng: random.Random, ledger: Ledger, first: int, last: int, *, session_index: int, done_before: int
) -> Iterator[Row]:
    """Steps ``first`` to ``last`` with their evaluations, saves and expert loads; adds all of it to ``ledger``."""
    since_last_load = 0
    for step in range(first, last + 1):
        num_tokens = rng.randrange(2600, 4000)
        num_non_padding_tokens = int(num_tokens * rng.uniform(0.78, 0.92))
        compute = 2.2 + num_tokens * 0.00245 * (1.0 + 0.06 * step / MOE_STEPS)
        compute += 9.0 if step == first else 0.0  # kernels are chosen, the allocator grows
        compute += rng.choice([0.0] * 40 + [2.5])
        wait = 0.35 + rng.expovariate(4.0)
        seconds = compute + wait
        repeated = step <= done_before
        ledger.seconds["train"] += seconds
        ledger.data_wait_seconds += wait
        ledger.wasted_seconds += seconds if repeated else 0.0
        ledger.num_tokens += num_tokens
        ledger.num_non_padding_tokens += num_non_padding_tokens
        ledger.num_supervised_tokens += num_non_padding_tokens * 6 // 10
        ledger.num_steps += 1
        ledger.trained_seconds.append(seconds)
        since_last_load += num_non_padding_tokens

        done = step / MOE_STEPS
        total_seconds = ledger.wall_seconds + (MOE_STEPS - step) * 11.35 + 250.0 * (1.0 - done)
        spread = (0.18 / math.sqrt(max(1, step))) * (1.0 - done)
        yield Step(
            global_step=step,
            session_index=session_index,
            step_seconds=seconds,
            data_wait_seconds=wait,
            num_micro_batches=4,
            num_tokens=num_tokens,
            num_non_padding_tokens=num_non_padding_tokens,
            num_supervised_tokens=num_non_padding_tokens * 6 // 10,
            num_samples=16,
            repeated=True if repeated else None,
            busy_fraction=min(1.0, compute / seconds * rng.uniform(0.96, 1.0)),
            sm_active_fraction=0.62 * compute / seconds * rng.uniform(0.95, 1.05),
            memory_used_bytes=int(36.4 * GIB),
            power_watts=238.0 + 20.0 * rng.random(),
            energy_joules=248.0 * seconds,
            throttle_reasons=4 if step % 9 == 0 else None,
            peak_allocated_bytes=int((33.1 + 0.9 * min(1.0, step / 80)) * GIB),
            peak_reserved_bytes=int((34.8 + 1.1 * min(1.0, step / 80)) * GIB),
            mfu=6 * 9.1e9 * num_non_padding_tokens / seconds / 149.7e12,
            elapsed_seconds=ledger.wall_seconds,
            spent_usd=ledger.usd(ledger.wall_seconds),
            projected_total_usd=ledger.usd(total_seconds),
            projected_total_usd_low=ledger.usd(total_seconds * (1 - spread)),
            projected_total_usd_high=ledger.usd(total_seconds * (1 + spread)),
            projected_total_seconds=total_seconds,
            projected_total_seconds_low=total_seconds * (1 - spread),
            projected_total_seconds_high=total_seconds * (1 + spread),
        ).to_row()

        if step % 10 == 0:
            yield ExpertLoad(
                global_step=step,
                layer_names=[f"model.layers.{layer}.mlp.experts" for layer in range(NUM_LAYERS)],
                tokens_per_expert=expert_tokens(rng, step, since_last_load),
                num_experts_per_tok=NUM_EXPERTS_PER_TOK,
            ).to_row()
            since_last_load = 0
            yield _pause(ledger, "log", step, 0.4)
        if step % 100 == 0:
            yield _pause(ledger, "eval", step, 48.0 + rng.random())
            yield _pause(ledger, "save", step, 11.0 + rng.random())


def _pause(ledger: Ledger, kind: str, step: int, seconds: float) -> Row:
    ledger.seconds[kind] += seconds
    return Pause(kind=kind, global_step=step, seconds=seconds).to_row()  # type: ignore[arg-type]


def moe_run(*, model: str = MIXTRAL, finished: bool = True) -> Iterator[Row]:
    """Two sessions of a QLoRA run: killed at step 330, resumed from the checkpoint of step 300, run to its end.

    ``finished=False`` leaves out the summary, as after a kill at the last step.
    """
    rng = random.Random(7)
    ledger = Ledger(usd_per_hour=A40_USD_PER_HOUR)
    yield moe_session(0, "2026-08-17T09:00:00Z", ledger, model=model)
    ledger.seconds["startup"] += 190.0
    yield moe_prediction()
    for row in _moe_steps(rng, ledger, 1, KILLED_AT, session_index=0, done_before=0):
        yield row
        if row["type"] == "step" and row["global_step"] == 20:
            yield moe_prediction(7480.0, basis="tokens_seen", step=20)
    yield moe_session(1, "2026-08-17T11:30:00Z", ledger, model=model)
    ledger.seconds["startup"] += 240.0
    for row in _moe_steps(rng, ledger, RESUMED_FROM + 1, MOE_STEPS, session_index=1, done_before=KILLED_AT):
        yield row
        if row["type"] == "step" and row["global_step"] == 420:
            yield Budget(
                threshold="80 %", kind="usd", limit=BUDGET_USD, spent=1.2, projected=1.7, global_step=420, action="warned"
            ).to_row()
    ledger.seconds["other"] += 21.0
    if finished:
        yield ledger.summary(
            global_step=MOE_STEPS,
            num_sessions=2,
            mfu=0.083,
            peak_allocated_bytes=int(34.0 * GIB),
            peak_reserved_bytes=int(35.9 * GIB),
            energy_joules=248.0 * ledger.seconds["train"],
            measured_over_predicted={
                "before": {"total_usd": ledger.wall_seconds / 7000.0, "peak_reserved_bytes": 35.9 / 35.0},
                "tokens_seen": {"total_usd": ledger.wall_seconds / 7480.0},
            },
            verdict="Cost 13 % more than predicted: 30 steps ran twice, and data wait grew.",
        )


def dense_run(*, num_steps: int = 180) -> Iterator[Row]:
    """A dense LoRA run without a price, without NVML and without a prediction: much is absent, on purpose."""
    rng = random.Random(11)
    ledger = Ledger(usd_per_hour=None)
    yield Session(
        run_id="dense-02",
        session_index=0,
        started_at="2026-08-18T08:00:00Z",
        startup_seconds=14.0,
        max_steps=num_steps,
        job={"model": "Qwen/Qwen3-0.6B", "method": "lora", "per_device_train_batch_size": 8, "max_length": 512},
        model={"class": "Qwen3ForCausalLM", "num_params": 596_049_920},
        device={"name": "cpu"},
        versions={"ftcost": "0.1.0", "torch": "2.13.0"},
        notes=["GPU: no NVIDIA driver on this machine", "dollars: no price was given"],
    ).to_row()
    ledger.seconds["startup"] += 14.0
    for step in range(1, num_steps + 1):
        seconds = 0.81 + 0.05 * rng.random()
        ledger.seconds["train"] += seconds
        ledger.data_wait_seconds += 0.004
        ledger.num_tokens += 4096
        ledger.num_non_padding_tokens += 3000
        ledger.num_supervised_tokens += 2000
        ledger.num_steps += 1
        ledger.trained_seconds.append(seconds)
        yield Step(
            global_step=step,
            session_index=0,
            step_seconds=seconds,
            data_wait_seconds=0.004,
            num_micro_batches=1,
            num_tokens=4096,
            num_non_padding_tokens=3000,
            num_supervised_tokens=2000,
            elapsed_seconds=ledger.wall_seconds,
        ).to_row()
    yield ledger.summary(global_step=num_steps, num_sessions=1)


def one_step_run() -> Iterator[Row]:
    """A session and a single step: the least that can be shown."""
    yield Session(
        run_id="one", session_index=0, started_at="2026-08-18T08:00:00Z", job={"model": "tiny"}, startup_seconds=2.0
    ).to_row()
    yield Step(global_step=1, session_index=0, step_seconds=1.5).to_row()


def long_run(num_steps: int) -> Iterator[Row]:
    """Steps only, as many as asked for, with one evaluation every thousand: for the test of size and speed."""
    yield Session(run_id="long", session_index=0, started_at="2026-08-18T08:00:00Z", job={"model": "long"}).to_row()
    elapsed = 0.0
    for step in range(1, num_steps + 1):
        seconds = 0.05 + 0.01 * (step % 17) / 17 + (1.0 if step == 777 else 0.0)
        elapsed += seconds
        yield {
            "type": "step",
            "global_step": step,
            "session_index": 0,
            "step_seconds": seconds,
            "num_tokens": 2048,
            "num_non_padding_tokens": 1800,
            "elapsed_seconds": elapsed,
            "spent_usd": elapsed / SECONDS_PER_HOUR,
            "projected_total_usd": 20.0,
        }
        if step % 1000 == 0:
            yield {"type": "pause", "kind": "eval", "global_step": step, "seconds": 2.0}
            elapsed += 2.0


def write_rows(path: Path, rows: Iterable[Row]) -> Path:
    """Write a record as the callback does: one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, allow_nan=False) + "\n")
    return path


def write_truncated(path: Path, rows: Iterable[Row], *, keep_rows: int) -> Path:
    """The first ``keep_rows`` rows and half of the next: what a killed process or a full disk leaves."""
    lines = [json.dumps(row) + "\n" for row in rows]
    half = lines[keep_rows][: len(lines[keep_rows]) // 2]
    path.write_text("".join(lines[:keep_rows]) + half, encoding="utf-8")
    return path
