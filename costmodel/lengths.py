"""Tokens per sample -> tokens per micro-batch: padded, packed, padding-free, grouped by length.

A batch is padded to its longest sample, so the work of a step is the expected maximum of ``b`` draws, not the mean.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from costmodel.defaults import ResolvedJob
from costmodel.grouped_batches import grouped_maximum
from costmodel.length_distribution import LengthDistribution, expected_maximum, means, rounded
from costmodel.packed_rows import joins_and_cuts, packed_samples, pads_packed_rows
from costmodel.workload import Batch


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """One micro-batch in expectation, and its longest possible form."""

    expected: Batch  # what the step time is made of
    num_non_padding_tokens: float
    num_supervised_tokens: float | None
    longest: Batch  # what the memory peak is made of
    is_padded: bool  # whether sequences of one batch differ in length
    num_samples: float  # samples in a micro-batch (a packed row holds several)


def cut_at(job: ResolvedJob) -> int:
    """Tokens that a sample of this job is cut to."""
    return sys.maxsize if joins_and_cuts(job) else job.max_length


def batch_tokens(job: ResolvedJob, dist: LengthDistribution, *, evaluates: bool = False) -> BatchTokens:
    """The expected and the longest micro-batch of this job, or where it ``evaluates``, of an evaluation.

    Positions that reach the head: all, or with TRL's loss only the supervised ones.
    """
    size = job.per_device_eval_batch_size if evaluates else job.per_device_train_batch_size
    num_samples = job.num_eval_samples if evaluates else job.num_samples
    supervised = job.supervised_fraction
    mean, mean_square = means(dist)
    longest = longest_batch(job, size, *longest_sequence(job, dist))
    if job.packing:
        # rows of max_length; attention stays inside each document when the rows are padding-free
        rows = size
        samples = packed_samples(job, dist, rows, num_samples)
        real = samples * mean
        is_computed_whole = not job.padding_free or pads_packed_rows(job)
        computed = float(rows * job.max_length) if is_computed_whole else real
        inside = pairs = samples * mean_square if job.padding_free else computed * job.max_length
        if job.attends_across_documents:
            pairs = computed * computed
        return BatchTokens(
            Batch(rows, computed, pairs, _head_positions(job, rows, computed), num_masked_pairs=pairs - inside),
            real,
            None if supervised is None else real * supervised,
            longest,
            False,
            samples,
        )
    if job.padding_free:
        tokens = size * mean
        inside = pairs = size * mean_square
        if job.attends_across_documents:
            pairs = inside + size * (size - 1) * mean * mean  # the mean square of a sum of lengths
        return BatchTokens(
            Batch(size, tokens, pairs, _head_positions(job, size, tokens), num_masked_pairs=pairs - inside),
            tokens,
            None if supervised is None else tokens * supervised,
            longest,
            False,
            float(size),
        )
    padded = rounded(dist, job.pad_to_multiple_of)
    if job.padding == "max_length":
        row_mean, row_square = float(job.max_length), float(job.max_length) ** 2
    else:
        if job.train_sampling_strategy == "group_by_length" and size > 1:  # an evaluation too, by batches
            group = size if evaluates else size * job.gradient_accumulation_steps
            row_mean, row_square = grouped_maximum(padded, size, group, num_samples)
        else:
            row_mean, row_square = expected_maximum(padded, size)
    real = size * mean
    computed = size * row_mean
    # padding is never supervised
    reached = real if job.supervised_positions_only and supervised is not None else computed
    head = _head_positions(job, size, reached)
    return BatchTokens(
        Batch(size, computed, size * row_square, head, max(0.0, computed - real)),
        real,
        None if supervised is None else real * supervised,
        longest,
        len(dist.lengths) > 1 or job.padding == "max_length",
        float(size),
    )


def _head_positions(job: ResolvedJob, num_sequences: float, num_tokens: float) -> float:
    """Positions that reach the output head: all, the last ``logits_to_keep`` of each sequence, or the supervised ones."""
    if job.logits_to_keep:
        return min(num_tokens, num_sequences * job.logits_to_keep)
    if job.supervised_positions_only and job.supervised_fraction is not None:
        return num_tokens * job.supervised_fraction
    return num_tokens


def longest_sequence(job: ResolvedJob, dist: LengthDistribution | None) -> tuple[int, int]:
    """(tokens of the longest row, tokens that each of them attends to at most): by the data, else by ``max_length``."""
    if job.packing and job.attends_across_documents:
        # A row of one long document carries no mask, a row of several does, so the shortest document decides.
        return job.max_length, 1 if dist is None else dist.lengths[0]
    if dist is None:
        row = padded_row(job, job.max_length)
        return row, row
    if job.packing:  # attention stays inside each document when the rows are padding-free
        return job.max_length, dist.longest_tokens if job.padding_free else job.max_length
    if job.padding_free:
        return dist.longest_tokens, dist.longest_tokens
    row = job.max_length if job.padding == "max_length" else padded_row(job, dist.longest_tokens)
    return row, row


def padded_row(job: ResolvedJob, tokens: int) -> int:
    """``tokens`` up to the next multiple that rows are padded to."""
    multiple = row_multiple(job)
    return -(-tokens // multiple) * multiple


def row_multiple(job: ResolvedJob) -> int:
    """What the length of a padded row is a multiple of, in tokens; rows of ``max_length`` and rows without padding: 1."""
    is_rounded = job.padding != "max_length" and not (job.packing or job.padding_free)
    return job.pad_to_multiple_of if is_rounded else 1


def longest_batch(job: ResolvedJob, size: int, sequence_tokens: int, attended_tokens: int | None = None) -> Batch:
    """The batch that decides whether the job fits: ``size`` rows of ``sequence_tokens`` each.

    ``attended_tokens``: what a token attends to at most, where a row holds several documents that the kernel keeps apart.
    """
    tokens = float(size * sequence_tokens)
    attended = sequence_tokens if attended_tokens is None else min(attended_tokens, sequence_tokens)
    masked = tokens * (tokens - attended) if job.attends_across_documents else 0.0
    return Batch(size, tokens, tokens * attended + masked, _head_positions(job, size, tokens), num_masked_pairs=masked)
