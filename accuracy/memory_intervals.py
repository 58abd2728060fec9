"""Whether the interval of a predicted peak holds the measured one, with the run's own source left out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from log_errors import weighted_quantile
from memory_errors import NOT_KNOWN, VARIABLE_LENGTHS, memory_errors, run_memory, with_memory
from runs import Run

from costmodel import constants as c
from costmodel.memory import job_class, loss_bytes
from costmodel.units import GIB


def interval_class(run: Run) -> str:
    if run.source in NOT_KNOWN and run.source not in VARIABLE_LENGTHS:
        return "unread"
    return "quantised" if run.job.quantization else "plain"


def is_covered(run: Run, low_share: float, high_share: float) -> bool:
    """Whether the measured figure lies between the ends for its own basis."""
    assert run.memory is not None
    kind, gib = run.memory
    peak = run_memory(run)
    measured = gib * GIB
    if kind == "allocated":
        return peak.peak_allocated_bytes * low_share <= measured <= peak.peak_allocated_bytes * high_share
    low, high = peak.peak_reserved_bytes * low_share, peak.peak_reserved_bytes * high_share
    if kind == "other":  # torch's figure or the driver's
        high += c.CUDA_CONTEXT_INTERVAL_BYTES[1]
    if run.source in VARIABLE_LENGTHS:
        assert run.longest is not None
        holes = c.VARIABLE_LENGTH_HOLES[job_class(run.job)] * loss_bytes(run.model, run.job, run.longest)
        high = max(high, min(high + holes, run.gpu.memory_bytes))
    return low <= measured <= high


def quantiles_by_source(rows: Sequence[tuple[Run, float]], share: float) -> float:
    counts: dict[str, int] = {}
    for run, _ in rows:
        counts[run.source] = counts.get(run.source, 0) + 1
    return weighted_quantile([(value, 1.0 / counts[run.source]) for run, value in rows], share)


def residual_interval(runs: Sequence[Run]) -> tuple[float, float]:
    """(10 %, 90 %) of measured over predicted, each source weighing the same."""
    ratios = [(run, math.exp(-error)) for run, _, error in memory_errors(runs, holes=None)]
    return quantiles_by_source(ratios, 0.1), quantiles_by_source(ratios, 0.9)


def nested_memory_coverage(runs: Sequence[Run]) -> dict[str, bool]:
    """Each source against an interval that the other sources of fixed length alone give.

    Variable lengths take their holes from replays, and their width from the sources of fixed length.
    """
    fixed = [run for run in with_memory(runs) if run.source not in VARIABLE_LENGTHS]
    result = {}
    for source in dict.fromkeys(run.source for run in with_memory(runs)):
        low, high = residual_interval([run for run in fixed if run.source != source])
        result.update({run.run_id: is_covered(run, low, high) for run in with_memory(runs) if run.source == source})
    return result


def shipped_memory_coverage(runs: Sequence[Run]) -> dict[str, bool]:
    return {run.run_id: is_covered(run, *c.MEMORY_INTERVAL[interval_class(run)]) for run in with_memory(runs)}


def coverage_without_unread(runs: Sequence[Run]) -> float:
    nested = nested_memory_coverage(runs)
    some = [run for run in with_memory(runs) if interval_class(run) != "unread"]
    return sum(nested[run.run_id] for run in some) / len(some)


def coverage_table(runs: Sequence[Run]) -> list[str]:
    nested, shipped = nested_memory_coverage(runs), shipped_memory_coverage(runs)
    lines = ["| | n | left out | shipped |", "|---|---|---|---|"]

    def row(name: str, some: Sequence[Run]) -> str:
        shares = [100 * sum(flags[run.run_id] for run in some) / len(some) for flags in (nested, shipped)]
        return f"| {name} | {len(some)} | {shares[0]:.0f} % | {shares[1]:.0f} % |"

    all_of_them = with_memory(runs)
    for source in dict.fromkeys(run.source for run in all_of_them):
        lines.append(row(source, [run for run in all_of_them if run.source == source]))
    lines.append(row("all rows", all_of_them))
    shares = [source_weighted_share(all_of_them, flags) for flags in (nested, shipped)]
    lines.append(
        f"| each source weighing the same | {len(all_of_them)} | {100 * shares[0]:.0f} % | {100 * shares[1]:.0f} % |"
    )
    return lines


def source_weighted_share(runs: Sequence[Run], flags: Mapping[str, bool]) -> float:
    by_source: dict[str, list[bool]] = {}
    for run in runs:
        by_source.setdefault(run.source, []).append(flags[run.run_id])
    return statistics.mean(sum(each) / len(each) for each in by_source.values())
