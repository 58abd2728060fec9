"""The batch of the GPU that the others wait for: with random batches of varying length, the one with most tokens.

Data-parallel ranks meet where gradients or weights are exchanged, so a step lasts as long as that of the rank with most
tokens. Its expected tokens are an order statistic of the lengths. Leaves out: the scatter of the cards themselves.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from statistics import NormalDist
from typing import Final

from costmodel.defaults import ResolvedJob
from costmodel.length_distribution import LengthDistribution, expected_maximum, rounded
from costmodel.workload import Batch

_NORMAL_GRID: Final = tuple(i / 100 for i in range(-800, 801))  # standard deviations


def slowest_batch(job: ResolvedJob, dist: LengthDistribution, batch: Batch, num_micro_batches: int) -> Batch | None:
    """The mean micro-batch of the rank with most tokens, where ``batch`` is that of a mean rank.

    ``num_micro_batches``: of one optimizer step; ranks that shard gradients or weights meet in each of them, others once a
    step. ``None`` where nobody waits: one GPU, or batches that are alike (fixed or grouped lengths, packed rows, padding to
    ``max_length``).
    """
    if not waits_where_lengths_differ(job) or len(dist.lengths) == 1:
        return None
    num_draws = 1 if job.sharding.stage >= 2 else num_micro_batches
    if job.padding_free:
        of_row, each = dist, 1  # a micro-batch is the sum of its samples
        num_draws *= job.per_device_train_batch_size
    else:
        of_row, each = rounded(dist, job.pad_to_multiple_of), job.per_device_train_batch_size
    tokens, pairs = most_over_mean(of_row, each, num_draws, job.num_gpus)
    return replace(
        batch,
        num_tokens=batch.num_tokens * tokens,
        num_attended_pairs=batch.num_attended_pairs * pairs,
        num_head_tokens=batch.num_head_tokens * (1.0 if job.logits_to_keep else tokens),
        num_padding_tokens=batch.num_padding_tokens * tokens,
        num_masked_pairs=batch.num_masked_pairs * pairs,
    )


def waits_where_lengths_differ(job: ResolvedJob) -> bool:
    """Whether lengths that differ would make one GPU's batch larger than the mean one's."""
    is_alike = job.packing or job.padding == "max_length" or job.train_sampling_strategy == "group_by_length"
    return job.num_gpus > 1 and not is_alike


@functools.lru_cache(maxsize=256)
def most_over_mean(dist: LengthDistribution, longest_of: int, num_draws: int, num_ranks: int) -> tuple[float, float]:
    """How much more than the mean rank the one with most tokens holds: (tokens, pairs of tokens).

    A rank holds the sum of ``num_draws`` rows, each the longest of ``longest_of`` samples. One row: exact, the longest of
    all ranks' samples. More: the largest of normal variables, corrected for the skewness of the sum (the first term of
    Cornish and Fisher 1938), and no more than the longest sample allows; the pairs by their regression on the tokens.
    """
    first, second, third = _moments(dist, longest_of)
    variance = second - first * first
    if variance <= 1e-9 * second:
        return 1.0, 1.0
    if num_draws == 1:
        most, most_squared = expected_maximum(dist, longest_of * num_ranks)
        return most / first, most_squared / second
    skewness = (third - 3 * first * variance - first**3) / variance**1.5 / math.sqrt(num_draws)
    mean, square = _largest_normal(num_ranks)
    deviations = mean + skewness / 6 * (square - 1)
    most = first + math.sqrt(variance / num_draws) * deviations
    most = min(max(most, first), dist.longest_tokens)
    slope = (third - first * second) / variance  # of squared length on length
    return most / first, (second + slope * (most - first)) / second


@functools.lru_cache(maxsize=256)
def _moments(dist: LengthDistribution, longest_of: int) -> tuple[float, float, float]:
    """Mean, mean square and mean cube of the longest of ``longest_of`` samples."""
    cumulative = previous = 0.0
    sums = [0.0, 0.0, 0.0]
    for length, share in zip(dist.lengths, dist.shares, strict=True):
        cumulative = min(1.0, cumulative + share)
        power = 1.0 if length == dist.longest_tokens else cumulative**longest_of
        for i in range(3):
            sums[i] += length ** (i + 1) * (power - previous)
        previous = power
    return sums[0], sums[1], sums[2]


@functools.lru_cache(maxsize=64)
def _largest_normal(number: int) -> tuple[float, float]:
    """Mean and mean square of the largest of ``number`` standard normal variables, summed over a grid."""
    normal = NormalDist()
    mean = square = previous = 0.0
    for value in _NORMAL_GRID:
        cumulative = normal.cdf(value) ** number
        middle = value - 0.005
        mean += middle * (cumulative - previous)
        square += middle * middle * (cumulative - previous)
        previous = cumulative
    return mean, square
