"""Tokens per sample -> tokens per micro-batch: padded, packed, padding-free, grouped by length.

A batch is padded to its longest sample, so the work of a step is the expected maximum of ``b`` draws, not the mean.
"""

from __future__ import annotations

import bisect
import functools
import math
import random
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Final

from costmodel.arguments import plain_digits
from costmodel.defaults import ResolvedJob
from costmodel.errors import CostModelError, short_path
from costmodel.length_datasets import length_histogram
from costmodel.specs import Lengths, check_histogram
from costmodel.strict_json import parse_json
from costmodel.workload import Batch

# Samples that are packed at a time: TRL 1.16 and LLaMA-Factory 0.9.5 pack each batch of ``datasets.map`` by itself, so each
# thousand leaves a last row partly filled.
SAMPLES_PACKED_AT_A_TIME: Final = 1000
# These pack all samples at once (Axolotl 0.19 utils/samplers/multipack.py: 100,000; torchtune 0.6.1 datasets/_packed.py).
_PACK_ALL_AT_ONCE: Final = frozenset({"axolotl", "torchtune"})
# Rows are padded to ``max_length`` and computed whole (the two above, Axolotl by default: utils/schemas/validation.py;
# LLaMA-Factory data/processor/supervised.py).
_PAD_PACKED_ROWS: Final = frozenset({"axolotl", "llamafactory", "torchtune"})
# Where these do not keep samples apart, they join all and cut anywhere: TRL's "wrapped", ``block_size`` of transformers'
# scripts.
_JOIN_AND_CUT: Final = frozenset({"transformers", "trl", "unsloth"})
# transformers' length-grouped sampler sorts inside megabatches of at most this many groups (trainer_pt_utils.py).
MEGABATCH_GROUPS: Final = 50
# Shape assumed when only a mean and a maximum are given: log-normal with this sigma (coefficient of variation 0.53,
# between the two instruction sets of arXiv:2408.04693: 0.42 and 0.73), cut at the maximum.
ASSUMED_LOG_SIGMA: Final = 0.5
# Of 1,000 samples of the assumed shape, how many have the longest length where the shape does not reach it.
LONGEST_SAMPLE_COUNT: Final = 0.1
_MAX_FILE_BYTES: Final = 512 * 2**20


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Sample lengths after the cut at ``max_length``: ascending lengths and the share of samples of each (sums to 1)."""

    lengths: tuple[int, ...]
    shares: tuple[float, ...]
    share_cut: float  # of samples that were longer than max_length

    def __hash__(self) -> int:
        """Of a few fields: distributions are keys of caches, and there may be thousands of lengths."""
        return hash((len(self.lengths), self.lengths[-1], self.shares[0], self.share_cut))

    @property
    def mean_tokens(self) -> float:
        return sum(length * share for length, share in zip(self.lengths, self.shares, strict=False))

    @property
    def mean_squared_tokens(self) -> float:
        return sum(length * length * share for length, share in zip(self.lengths, self.shares, strict=False))

    @property
    def longest_tokens(self) -> int:
        return self.lengths[-1]


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """One micro-batch in expectation, and its longest possible form."""

    expected: Batch  # what the step time is made of
    num_non_padding_tokens: float
    num_supervised_tokens: float | None
    longest: Batch  # what the memory peak is made of
    is_padded: bool  # whether sequences of one batch differ in length
    num_samples: float  # samples in a micro-batch (a packed row holds several)


def distribution(lengths: Lengths, max_length: int) -> LengthDistribution:
    """The samples' lengths cut at ``max_length`` tokens.

    Raises :class:`CostModelError` for a data set that is not built in or a file that holds no lengths.
    """
    if lengths.histogram is None and lengths.values is None and lengths.file is None:
        return _named_distribution(lengths.fixed, lengths.mean, lengths.max, lengths.dataset, max_length)
    return _cut(_counts(lengths), max_length)


@functools.lru_cache(maxsize=64)
def _named_distribution(
    fixed: int | None, mean: float | None, longest: int | None, dataset: str | None, max_length: int
) -> LengthDistribution:
    """Of lengths that a few numbers or a name say: many jobs ask for the same."""
    lengths = Lengths(fixed=fixed, mean=mean, max=longest, dataset=dataset)
    return _cut(_counts(lengths), max_length)


def _cut(counts: Mapping[int, float], max_length: int) -> LengthDistribution:
    total = float(sum(counts.values()))
    cut: Counter[int] = Counter()
    above = 0.0
    for length, count in counts.items():
        cut[min(length, max_length)] += count  # type: ignore[assignment]
        above += count if length > max_length else 0
    ordered = sorted(cut)
    return LengthDistribution(tuple(ordered), tuple(cut[length] / total for length in ordered), above / total)


def _counts(lengths: Lengths) -> Mapping[int, float]:
    if lengths.fixed is not None:
        return {lengths.fixed: 1.0}
    if lengths.histogram is not None:
        return {length: count for length, count in lengths.histogram.items() if count > 0}
    if lengths.values is not None:
        return Counter(lengths.values)
    if lengths.dataset is not None:
        return length_histogram(lengths.dataset)
    if lengths.file is not None:
        return {length: count for length, count in _counts_in_file(Path(lengths.file)).items() if count > 0}
    assert lengths.mean is not None
    assert lengths.max is not None
    return _log_normal(lengths.mean, lengths.max)


@functools.lru_cache(maxsize=64)
def _log_normal(mean: float, longest: int) -> Mapping[int, float]:
    """1,000 equally likely quantiles of the assumed shape, scaled so that the cut distribution has the given mean."""
    normal = NormalDist()
    quantiles = [math.exp(ASSUMED_LOG_SIGMA * normal.inv_cdf((i + 0.5) / 1000)) for i in range(1000)]

    def cut_mean(scale: float) -> float:
        return sum(min(longest, scale * q) for q in quantiles) / len(quantiles)

    low, high = 0.0, float(longest) * 10
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)
    counts: dict[int, float] = dict(Counter(max(1, min(longest, round(high * q))) for q in quantiles))
    # the longest sample is there, however rare: it decides the memory
    counts.setdefault(longest, LONGEST_SAMPLE_COUNT)
    return counts


def _counts_in_file(path: Path) -> Mapping[int, float]:
    """A file of lengths: one whole number a line, or a JSON list, or a JSON mapping length -> count."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise CostModelError(
                f"lengths file {path} is larger than {_MAX_FILE_BYTES // 2**20} MiB; give a histogram instead"
            )
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CostModelError(f"lengths file {short_path(str(path))} cannot be read: {reason}") from None
    try:
        if text.startswith("{"):
            counts = {int(plain_digits(length)): _count(count) for length, count in parse_json(text, str(path)).items()}
        elif text.startswith("["):
            counts = dict(Counter(map(_whole_number, parse_json(text, str(path)))))
        else:
            counts = dict(Counter(map(int, plain_digits(text).split())))
    except (ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        raise CostModelError(
            f"lengths file {path} must hold one whole number of tokens a line, a JSON list, or a JSON mapping length: count"
        ) from None
    if not counts:
        raise CostModelError(f"lengths file {path} holds no lengths")
    try:
        check_histogram(counts)
    except CostModelError as error:
        raise CostModelError(f"lengths file {path}: {error}") from None
    return counts


def _whole_number(value: object) -> int:
    """A JSON value that is one; ``true`` and 5.9 are none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _count(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


@functools.lru_cache(maxsize=64)
def rounded(dist: LengthDistribution, multiple: int) -> LengthDistribution:
    """The lengths up to the next multiple of ``multiple``."""
    if multiple <= 1:
        return dist
    merged: dict[int, float] = {}
    for length, share in zip(dist.lengths, dist.shares, strict=False):
        padded = -(-length // multiple) * multiple
        merged[padded] = merged.get(padded, 0.0) + share
    return LengthDistribution(tuple(merged), tuple(merged.values()), dist.share_cut)


@functools.lru_cache(maxsize=256)
def expected_maximum(dist: LengthDistribution, draws: int) -> tuple[float, float]:
    """Mean and mean square of the longest of ``draws`` samples: sums over F(s)^b, F the cumulative share."""
    cumulative = previous = mean = square = 0.0
    for length, share in zip(dist.lengths, dist.shares, strict=False):
        cumulative = min(1.0, cumulative + share)
        power = cumulative**draws
        mean += length * (power - previous)
        square += length * length * (power - previous)
        previous = power
    tail = 1.0 - previous  # rounding of the shares
    return mean + tail * dist.longest_tokens, square + tail * dist.longest_tokens**2


@functools.lru_cache(maxsize=256)
def _grouped_maximum(
    dist: LengthDistribution, batch_size: int, group_size: int, num_samples: int | None
) -> tuple[float, float]:
    """Mean and mean square of what the length-grouped sampler pads a row to.

    The sampler shuffles, cuts the samples into megabatches of :data:`MEGABATCH_GROUPS` groups, or of a quarter of the data
    where that is less, and sorts each of them. ``group_size``: the samples of one GPU's optimizer step. ``num_samples``
    ``None``: as of a large data set. Source: transformers 5.24 ``get_length_grouped_indices``,
    ``Trainer._get_train_sampler``.
    """
    groups = MEGABATCH_GROUPS if num_samples is None else min(num_samples // (4 * group_size), MEGABATCH_GROUPS)
    megabatch = max(1, groups) * group_size
    num_samples = num_samples or megabatch
    num_megabatches, rest = divmod(num_samples, megabatch)
    mean = square = 0.0
    for count, size in ((num_megabatches, megabatch), (1, rest)):
        if count and size:
            first, second = _sums_over_sorted_rows(dist, size, batch_size)
            mean, square = mean + count * first, square + count * second
    return mean / num_samples, square / num_samples


def _sums_over_sorted_rows(dist: LengthDistribution, num_rows: int, batch_size: int) -> tuple[float, float]:
    """Padded lengths, and their squares, summed over ``num_rows`` random samples that are sorted and cut into batches.

    The samples of a length or above come first: so many batches as they begin are padded to it or above.
    """
    share = mean = square = previous = 0.0
    for length, of_length in zip(reversed(dist.lengths), reversed(dist.shares), strict=True):
        share = min(1.0, share + of_length)
        rows = _rows_begun(num_rows, share, batch_size) if length > dist.lengths[0] else num_rows
        mean += length * (rows - previous)
        square += length * length * (rows - previous)
        previous = rows
    return mean, square


def _rows_begun(num_rows: int, share: float, batch_size: int) -> float:
    """Expected rows of the batches that the first N of ``num_rows`` rows begin; N is binomial with ``share``.

    Batch j is begun where N > j · ``batch_size``. For j = 0 that is exact, else N counts as normal; spread over more than a
    batch it leaves half a batch open on average.
    """
    mean, deviation = num_rows * share, math.sqrt(num_rows * share * (1 - share))

    def is_begun(batch: int) -> float:
        if batch == 0:
            return 1 - (1 - share) ** num_rows
        above = batch * batch_size + 0.5 - mean
        return 0.5 * math.erfc(above / (math.sqrt(2) * deviation)) if deviation > 0 else float(above < 0)

    last = math.ceil(num_rows / batch_size) - 1
    if deviation >= batch_size:
        begun = (mean + (batch_size - 1) / 2) / batch_size
    else:
        surely = max(0, math.floor((mean - 6 * deviation) / batch_size))
        at_most = min(last, math.ceil((mean + 6 * deviation) / batch_size))
        begun = is_begun(0) + surely + sum(map(is_begun, range(surely + 1, at_most + 1)))
    missing = (last + 1) * batch_size - num_rows  # the last batch is smaller
    return begun * batch_size - missing * is_begun(last)


@functools.lru_cache(maxsize=64)
def _means(dist: LengthDistribution) -> tuple[float, float]:
    """Mean length and mean squared length."""
    return dist.mean_tokens, dist.mean_squared_tokens


def joins_and_cuts(job: ResolvedJob) -> bool:
    """Whether packing joins all samples and cuts them anywhere: rows are full, and ``max_length`` cuts nothing off."""
    return job.packing and not job.padding_free and job.framework in _JOIN_AND_CUT


def cut_at(job: ResolvedJob) -> int:
    """Tokens that a sample of this job is cut to."""
    return sys.maxsize if joins_and_cuts(job) else job.max_length


def _packed_samples(job: ResolvedJob, dist: LengthDistribution, rows: int) -> float:
    """Samples in ``rows`` packed rows of ``max_length``, as the framework packs them."""
    if joins_and_cuts(job):
        return rows * job.max_length / _means(dist)[0]
    if job.framework == "axolotl" and job.padding_free:  # packs into one row as long as the batch (core/trainers/base.py)
        return packed_samples_per_row(dist, rows * job.max_length, job.num_samples, job.framework)
    return rows * packed_samples_per_row(dist, job.max_length, job.num_samples, job.framework)


@functools.lru_cache(maxsize=256)
def packed_samples_per_row(dist: LengthDistribution, row_tokens: int, num_samples: int | None, framework: str) -> float:
    """Samples in a row of ``row_tokens`` that takes whole samples only, by packing quantiles of ``dist``: as many as are
    packed at a time, at most :data:`SAMPLES_PACKED_AT_A_TIME`.

    By best fit, longest first: a sample goes into the row with the least room that takes it (TRL ``_pack_bfd``); first fit
    (Axolotl; LLaMA-Factory's knapsacks come to the same) fills rows alike. Torchtune takes samples as they come and closes a
    row with the first that does not fit: the quantiles are shuffled, always in the same way.
    """
    number = min(num_samples or SAMPLES_PACKED_AT_A_TIME, SAMPLES_PACKED_AT_A_TIME)
    samples = _quantiles(dist, number)
    if framework == "torchtune":
        random.Random(0).shuffle(samples)
        whole_rows, room = _rows_as_they_come(samples, row_tokens)
    else:
        whole_rows, room = _rows_of_best_fit(samples, row_tokens)
    rows = float(whole_rows)
    if framework in _PACK_ALL_AT_ONCE and num_samples != number:
        rows -= room / row_tokens  # of many more samples, which would fill the last row too
    return min(number / rows, row_tokens / _means(dist)[0])  # the mean of the quantiles may be a little lower


def _quantiles(dist: LengthDistribution, number: int) -> list[int]:
    """``number`` equally likely lengths, the longest first."""
    found: list[int] = []
    cumulative = 0.0
    for length, share in zip(dist.lengths, dist.shares, strict=True):
        cumulative += share
        found += [length] * (math.floor(number * cumulative + 0.5) - len(found))
    found += [dist.longest_tokens] * (number - len(found))  # rounding of the shares
    return found[::-1]


def _rows_of_best_fit(samples: list[int], row_tokens: int) -> tuple[int, int]:
    """(rows, room in the emptiest of those that take another sample) for samples with the longest first."""
    rows, shortest = 0, samples[-1]
    rooms: list[int] = []  # of rows that take at least the shortest sample, ascending
    for length in samples:
        place = bisect.bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms.pop(place) - length
        else:
            rows, room = rows + 1, row_tokens - length
        if room >= shortest:
            bisect.insort(rooms, room)
    return rows, rooms[-1] if rooms else 0


def _rows_as_they_come(samples: list[int], row_tokens: int) -> tuple[int, int]:
    """(rows, room in the last) where a row is closed by the first sample that does not fit."""
    rows, room = 1, row_tokens
    for length in samples:
        if length > room:
            rows, room = rows + 1, row_tokens
        room -= length
    return rows, room


def batch_tokens(job: ResolvedJob, dist: LengthDistribution, *, evaluates: bool = False) -> BatchTokens:
    """The expected and the longest micro-batch of this job, or where it ``evaluates``, of an evaluation.

    Positions that reach the head: all, or with TRL's loss only the supervised ones.
    """
    size = job.per_device_eval_batch_size if evaluates else job.per_device_train_batch_size
    supervised = job.supervised_fraction
    mean, mean_square = _means(dist)
    longest = longest_batch(job, size, *longest_sequence(job, dist))
    if job.packing:
        # rows of max_length; attention stays inside each document when the rows are padding-free
        rows = size
        samples = _packed_samples(job, dist, rows)
        real = samples * mean
        is_computed_whole = not job.padding_free or job.framework in _PAD_PACKED_ROWS
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
            num_samples = job.num_eval_samples if evaluates else job.num_samples
            row_mean, row_square = _grouped_maximum(padded, size, group, num_samples)
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
