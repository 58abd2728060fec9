"""A dry run: a few steps, the longest batch first, and what the whole run would need and cost."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from costmodel.units import GIB
from ftcost_callback.dataset_lengths import row_lengths
from ftcost_callback.projection import Projection
from ftcost_callback.records import Summary
from ftcost_callback.sinks.console import PREFIX, dollars, duration

# In the first step the optimizer has no states yet; in the second they stand beside the longest batch.
LONGEST_STEPS: Final = 2
_WIDE_SHARE: Final = 0.2  # of the total, from the low to the high end


class LongestFirst:
    """A sampler that gives ``first`` once, and from then on what ``sampler`` gives."""

    def __init__(self, sampler: Any, first: Sequence[int]) -> None:
        self._sampler = sampler
        self._first = list(first)

    def __iter__(self) -> Iterator[int]:
        first, self._first = self._first, []
        yield from first
        yield from self._sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)


def put_longest_first(loader: Any, *, accumulation: int, num_processes: int, resumes: bool) -> str | None:
    """Make the first steps of ``loader`` hold its longest samples; every process does the same. Returns why not.

    The Trainer makes a loader for each ``train()``, so nothing is to be put back afterwards.
    """
    if resumes:
        return "a resumed run skips the batches it has done, so the longest batch does not come first"
    batch_sampler: Any = getattr(loader, "batch_sampler", None)
    batch_sampler = getattr(batch_sampler, "batch_sampler", batch_sampler)  # accelerate's shard for each process
    batch_size = getattr(batch_sampler, "batch_size", None)
    if type(batch_sampler).__name__ != "BatchSampler" or not isinstance(batch_size, int):
        return "the batches come from no plain sampler (a stream, or a sampler of your own), so they come in their own order"
    lengths = row_lengths(getattr(loader, "dataset", None))
    if not lengths:
        return (
            "the data set's lengths cannot be read without running its code (a list of mappings or a datasets.Dataset with "
            "input_ids can), so the batches come in their usual order and a longer one may follow"
        )
    longest = sorted(lengths, key=lambda row: lengths[row], reverse=True)[:batch_size]
    first = longest * (LONGEST_STEPS * accumulation * num_processes)
    batch_sampler.sampler = LongestFirst(batch_sampler.sampler, first)
    return None


def dry_run_lines(
    summary: Summary,
    projection: Projection,
    *,
    max_steps: int | None,
    order_note: str | None,
    predicted_peak_bytes: int | None,
    is_cuda: bool,
) -> list[str]:
    """What the whole run would need and cost, for the console."""
    order = "the longest batch first" if order_note is None else order_note
    lines = [f"dry run of {summary.global_step} steps: {order}"]
    if summary.peak_allocated_bytes is not None:
        predicted = f" (predicted {_gib(predicted_peak_bytes)})" if predicted_peak_bytes is not None else ""
        reserved = f", {_gib(summary.peak_reserved_bytes)} reserved" if summary.peak_reserved_bytes is not None else ""
        lines.append(f"peak memory over the steps: {_gib(summary.peak_allocated_bytes)} allocated{predicted}{reserved}")
    elif is_cuda and summary.loading_peak_allocated_bytes is not None:
        lines.append(f"peak memory over the steps: below {_gib(summary.loading_peak_allocated_bytes)}, which loading needed")
    elif (resident := peak_resident_bytes()) is not None:
        lines.append(f"peak memory of the process: {_gib(resident)} resident")
    total = projection.projected_total_seconds
    if total is None:
        lines.append(f"the whole run cannot be projected: {', '.join(projection.notes) or 'no step was measured'}")
        return lines
    of = f" of {max_steps:,} steps" if max_steps else ""
    low, high = projection.projected_total_seconds_low, projection.projected_total_seconds_high
    whole = f"the whole run{of}: {duration(total)}{_band(low, high, duration)}"
    if projection.projected_usd is not None:
        band = _band(projection.projected_usd_low, projection.projected_usd_high, dollars)
        whole += f", {dollars(projection.projected_usd)}{band}"
    lines.append(whole)
    if projection.notes:
        is_wide = low is None or high is None or high - low > _WIDE_SHARE * total
        lines.append(f"{'the band is wide' if is_wide else 'not certain yet'}: {', '.join(projection.notes)}")
    return lines


def say(lines: Sequence[str]) -> None:
    """On stderr, whatever the sinks: a dry run is asked for to be read."""
    for line in lines:
        print(PREFIX + line, file=sys.stderr, flush=True)


def peak_resident_bytes() -> int | None:
    """Of this process since its start (getrusage; kibibytes on Linux, bytes on macOS)."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _gib(amount: float) -> str:
    return f"{amount / GIB:.2f} GiB"


def _band(low: float | None, high: float | None, show: Any) -> str:
    return "" if low is None or high is None else f" ({show(low)} to {show(high)})"
