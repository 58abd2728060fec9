"""Peak memory of the measured runs: predicted against measured, like with like."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from log_errors import percent, quantile, summary
from runs import FOLDER, Run, read_rows

from costmodel import constants as c
from costmodel.memory import MemoryBreakdown, job_class, loss_bytes, peak_memory
from costmodel.units import GIB

# Sources left out of the bar, each with its reason; every figure is also given with them.
NOT_KNOWN: dict[str, str] = {
    "qwen1": "what the figure measures is not stated, nor the size of its unit, and the model's own remote code ran",
    "ms_swift": "batches differ in length, and the order in which lengths came decides what the allocator keeps",
}
VARIABLE_LENGTHS = frozenset({"ms_swift"})


def run_memory(run: Run) -> MemoryBreakdown:
    """Our memory of a run on its longest batch."""
    assert run.longest is not None
    return peak_memory(
        run.model,
        run.job,
        run.longest,
        is_padded=run.is_padded,
        keeps_logits=run.keeps_logits,
        loss_in_fp32=run.loss_in_fp32,
    )


NEWS_MEAN_TOKENS = 3234  # of the samples of ms_swift's rows, before those over the limit are dropped (as the source says)


@cache
def replayed_holes(job_class: str, share: float, lengths: str = "bulk") -> float:
    """A quantile of the replays, in units of the loss's bytes; lengths near the limit (bulk) or mostly far below (tail)."""
    rows = read_rows(FOLDER / "replays.csv")
    return quantile(
        (float(row["holes_per_loss"]) for row in rows if row["class"] == job_class and row["lengths"] == lengths), share
    )


def holes_bytes(run: Run, share: float | None) -> float:
    """Blocks of lengths that came before, for a run whose batches differ in length: a quantile of the replays, or none."""
    assert run.longest is not None
    if share is None or run.source not in VARIABLE_LENGTHS:
        return 0.0
    lengths = "tail" if run.job.max_length > 2 * NEWS_MEAN_TOKENS else "bulk"
    return max(0.0, replayed_holes(job_class(run.job), share, lengths)) * loss_bytes(run.model, run.job, run.longest)


def with_memory(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run.memory is not None and run.longest is not None]


def shown_bytes(run: Run, holes: float | None = 0.5) -> float:
    """What we say that a run's own figure is: torch allocated, torch reserved, or, where it is not said, the device's.

    Cached blocks grow no further than the card.
    """
    assert run.memory is not None
    peak = run_memory(run)
    if run.memory[0] == "allocated":
        return float(peak.peak_allocated_bytes)
    if run.memory[0] == "reserved":
        room = max(peak.peak_reserved_bytes, run.gpu.memory_bytes - c.CUDA_CONTEXT_BYTES)
        return min(peak.peak_reserved_bytes + holes_bytes(run, holes), room)
    return float(peak.peak_device_bytes)


def memory_errors(runs: Sequence[Run], holes: float | None = 0.5) -> list[tuple[Run, str, float]]:
    """(run, what was measured, log error) of every run with a memory figure, like with like."""
    result = []
    for run in with_memory(runs):
        assert run.memory is not None
        kind, gib = run.memory
        result.append((run, kind, math.log(shown_bytes(run, holes) / GIB / gib)))
    return result


def known(rows: Sequence[tuple[Run, str, float]]) -> list[tuple[Run, str, float]]:
    """The rows of the bar: confidence A or B with a known configuration."""
    return [row for row in rows if row[0].source not in NOT_KNOWN]


def memory_table(rows: Sequence[tuple[Run, str, float]], name: str, key: Callable[[Run], str]) -> list[str]:
    lines = [
        f"| {name} | basis | n | median % | p90 % | within 20 % | bias % | within 12 % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[float]] = {}
    for run, kind, error in rows:
        groups.setdefault((key(run), "not said" if kind == "other" else kind), []).append(error)
    for (group, kind), values in groups.items():
        lines.append(f"| {group} | {kind} | {summary(values)} | {100 * within(values, 12):.0f} |")
    return lines


def within(errors: Sequence[float], limit_percent: float) -> float:
    return sum(abs(percent(error)) <= limit_percent for error in errors) / len(errors)
