"""Estimates of one job on one GPU under other settings, and which of them is best: what fits, then what is fast."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from costmodel.answer import Estimate
from costmodel.candidates import FITTING_VERDICTS, UNPRICED, as_job_field
from costmodel.errors import CostModelError
from costmodel.estimation import estimate
from costmodel.length_distribution import distribution
from costmodel.specs import GpuSpec, Job, Lengths

# Two settings whose times differ by less are the same to this model: then the one that changes less is taken.
INDIFFERENT: Final = 0.005
BATCH_FIELDS: Final = ("per_device_train_batch_size", "gradient_accumulation_steps")


def with_counted_lengths(job: Job) -> Job:
    """The job with its lengths counted once: a file is not read, and a shape not fitted, for each of many estimates."""
    if job.lengths is None or job.lengths.histogram is not None or job.lengths.fixed is not None:
        return job
    counted = distribution(job.lengths, sys.maxsize)
    shares = zip(counted.lengths, counted.shares, strict=True)
    number = counted.num_samples  # of the samples, where they are known one by one: counts stay counts
    histogram = {length: float(round(number * share)) if number else share for length, share in shares}
    return job.model_copy(update={"lengths": Lengths(histogram=histogram)})


class Trials:
    """Estimates of one job on one GPU under changed settings, each asked for once."""

    def __init__(self, job: Job, gpu: GpuSpec) -> None:
        self._job = job.model_copy(update={"gpu": as_job_field(gpu), **UNPRICED})
        self._answers: dict[frozenset[tuple[str, Any]], Estimate | None] = {}

    def __call__(self, settings: Mapping[str, Any]) -> Estimate | None:
        """``None`` where these settings cannot run."""
        key = frozenset(settings.items())
        if key not in self._answers:
            try:
                self._answers[key] = estimate(self._job.model_copy(update=dict(settings)))
            except CostModelError:
                self._answers[key] = None
        return self._answers[key]

    @property
    def count(self) -> int:
        return len(self._answers)


def time_of(answer: Estimate) -> float:
    """What is to be small, at any batch size: seconds of the run, of a sample where the total is unknown; else infinity."""
    if answer.total_seconds is not None:
        return answer.total_seconds
    return 1 / answer.samples_per_second if answer.samples_per_second else math.inf


def _worth(answer: Estimate) -> tuple[int, float]:
    """Smaller is better: what surely fits, then what is faster."""
    return FITTING_VERDICTS.get(answer.verdict or "", 2), time_of(answer)


def best_of(tried: Iterable[tuple[Mapping[str, Any], Estimate]]) -> tuple[Mapping[str, Any], Estimate]:
    """The fastest that fits; of those that are as fast, the one that changes least, then the smallest in memory."""
    tried = list(tried)
    verdict, seconds = min(_worth(answer) for _, answer in tried)
    as_good = [
        (settings, answer)
        for settings, answer in tried
        if _worth(answer)[0] == verdict and time_of(answer) <= seconds * (1 + INDIFFERENT)
    ]
    return min(as_good, key=lambda each: (_num_changes(each[0]), -(each[1].headroom_bytes or 0), time_of(each[1])))


def _num_changes(settings: Mapping[str, Any]) -> int:
    """Fields changed; micro-batch and accumulation are one change."""
    return len({"batch" if name in BATCH_FIELDS else name for name in settings})


def batch_settings(start: Mapping[str, Any], product: int) -> Iterator[dict[str, int]]:
    """Each micro-batch times accumulation that makes ``product``, small micro-batches first; only what differs."""
    small = [size for size in range(1, math.isqrt(product) + 1) if product % size == 0]
    for size in sorted({*small, *(product // size for size in small)}):
        yield batch_change(start, size, product // size)


def batch_change(start: Mapping[str, Any], size: int, accumulation: int) -> dict[str, int]:
    chosen = dict(zip(BATCH_FIELDS, (size, accumulation), strict=True))
    return {} if all(start.get(name) == value for name, value in chosen.items()) else chosen


def fitting_batches(
    trials: Trials, settings: Mapping[str, Any], batches: Iterable[Mapping[str, int]]
) -> Iterator[tuple[Mapping[str, Any], Estimate]]:
    """What fits of ``settings`` with each of ``batches`` (small first): memory only grows, so the first failure ends it."""
    for batch in batches:
        tried = {**settings, **batch}
        answer = trials(tried)
        if answer is None or answer.verdict not in FITTING_VERDICTS:
            return
        yield tried, answer


def rows_per_step(start: Mapping[str, Any]) -> int:
    return int(start.get(BATCH_FIELDS[0]) or 1) * int(start.get(BATCH_FIELDS[1]) or 1)
