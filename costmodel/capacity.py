"""The largest batch and the longest sequence that fit a card: exact, by search on the monotone peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from costmodel.defaults import ResolvedJob
from costmodel.hf_config import ModelSpec
from costmodel.lengths import LengthDistribution, longest_batch
from costmodel.memory import peak_device_bytes

MAX_BATCH_SIZE: Final = 65_536
MAX_SEQUENCE_TOKENS: Final = 4_194_304


def largest_that_fits(peak: Callable[[int], int], capacity_bytes: int, upper: int) -> int:
    """The largest whole number ``n`` in 0..upper with ``peak(n) <= capacity_bytes``; ``peak`` must not decrease.

    The peak is nearly a straight line, so each step guesses from the line through the bracket before it halves.
    """
    low, low_peak = 1, peak(1)
    if low_peak > capacity_bytes:
        return 0
    high, high_peak = 2, 0
    while high <= upper and (high_peak := peak(high)) <= capacity_bytes:
        low, low_peak = high, high_peak
        high *= 8
    if high > upper:
        high, high_peak = upper, peak(upper)
        if high_peak <= capacity_bytes:
            return upper
    while high - low > 1:
        slope = (high_peak - low_peak) / (high - low)
        guess = low + int((capacity_bytes - low_peak) / slope) if slope > 0 else (low + high) // 2
        for candidate in (guess, guess + 1):  # on a straight line these two close the bracket
            if low < candidate < high:
                value = peak(candidate)
                if value <= capacity_bytes:
                    low, low_peak = candidate, value
                else:
                    high, high_peak = candidate, value
        if high - low > 1:
            middle = (low + high) // 2
            value = peak(middle)
            if value <= capacity_bytes:
                low, low_peak = middle, value
            else:
                high, high_peak = middle, value
    return low


def max_batch_size(
    model: ModelSpec,
    job: ResolvedJob,
    capacity_bytes: int,
    sequence_tokens: int,
    *,
    is_padded: bool,
    on_cpu: bool = False,
) -> int:
    """The largest ``per_device_train_batch_size`` whose longest batch fits; 0 when not even one sequence does."""

    def peak(size: int) -> int:
        return peak_device_bytes(
            model, job, longest_batch(job, size, sequence_tokens), is_padded=is_padded and size > 1, on_cpu=on_cpu
        )

    return largest_that_fits(peak, capacity_bytes, MAX_BATCH_SIZE)


def max_length_that_fits(
    model: ModelSpec, job: ResolvedJob, capacity_bytes: int, *, is_padded: bool, on_cpu: bool = False
) -> int:
    """The longest padded sequence, in tokens, that fits at this job's batch size."""

    def peak(tokens: int) -> int:
        batch = longest_batch(job, job.per_device_train_batch_size, tokens)
        return peak_device_bytes(model, job, batch, is_padded=is_padded, on_cpu=on_cpu)

    return largest_that_fits(peak, capacity_bytes, MAX_SEQUENCE_TOKENS)


def share_of_batches_that_fit(dist: LengthDistribution, batch_size: int, longest_tokens_that_fit: int) -> float:
    """Chance that a random batch holds no sample longer than what fits: F(longest)^b."""
    if longest_tokens_that_fit >= dist.longest_tokens:
        return 1.0
    cumulative = sum(
        share for length, share in zip(dist.lengths, dist.shares, strict=False) if length <= longest_tokens_that_fit
    )
    return float(min(1.0, cumulative) ** batch_size)
