"""How many whole samples a packed row holds, as the framework's own packer fills it."""

from __future__ import annotations

import bisect
import functools
import math
import random
from typing import Final

from costmodel.defaults import ResolvedJob
from costmodel.length_distribution import LengthDistribution, means

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


def joins_and_cuts(job: ResolvedJob) -> bool:
    """Whether packing joins all samples and cuts them anywhere: rows are full, and ``max_length`` cuts nothing off."""
    return job.packing and not job.padding_free and job.framework in _JOIN_AND_CUT


def pads_packed_rows(job: ResolvedJob) -> bool:
    """Whether a packed row is padded to ``max_length``."""
    return job.framework in _PAD_PACKED_ROWS


def packed_samples(job: ResolvedJob, dist: LengthDistribution, rows: int, num_samples: int | None) -> float:
    """Samples in ``rows`` packed rows of ``max_length``, as the framework packs a set of ``num_samples``."""
    if joins_and_cuts(job):
        return rows * job.max_length / means(dist)[0]
    if job.framework == "axolotl" and job.padding_free:  # packs into one row as long as the batch (core/trainers/base.py)
        return _samples_per_row(dist, rows * job.max_length, num_samples, job.framework)
    return rows * _samples_per_row(dist, job.max_length, num_samples, job.framework)


@functools.lru_cache(maxsize=256)
def _samples_per_row(dist: LengthDistribution, row_tokens: int, num_samples: int | None, framework: str) -> float:
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
    return min(number / rows, row_tokens / means(dist)[0])  # the mean of the quantiles may be a little lower


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
