"""How long the samples are: what the user says of the lengths -> their distribution, cut at ``max_length``."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Final

from costmodel.arguments import plain_digits
from costmodel.errors import CostModelError, short_path
from costmodel.length_datasets import length_histogram
from costmodel.specs import Lengths, check_histogram
from costmodel.strict_json import parse_json

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
    num_samples: int | None = None  # whose lengths these are; None: a shape

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


def distribution(lengths: Lengths, max_length: int) -> LengthDistribution:
    """The samples' lengths cut at ``max_length`` tokens.

    Raises :class:`CostModelError` for a data set that is not built in or a file that holds no lengths.
    """
    if lengths.histogram is None and lengths.values is None and lengths.file is None:
        return _named_distribution(lengths.fixed, lengths.mean, lengths.max, lengths.dataset, max_length)
    return _cut(_counts(lengths), max_length, is_counted=True)


@functools.lru_cache(maxsize=64)
def _named_distribution(
    fixed: int | None, mean: float | None, longest: int | None, dataset: str | None, max_length: int
) -> LengthDistribution:
    """Of lengths that a few numbers or a name say: many jobs ask for the same."""
    lengths = Lengths(fixed=fixed, mean=mean, max=longest, dataset=dataset)
    return _cut(_counts(lengths), max_length, is_counted=dataset is not None)


def _cut(counts: Mapping[int, float], max_length: int, *, is_counted: bool) -> LengthDistribution:
    """``is_counted``: the counts are of samples, not of a shape."""
    total = float(sum(counts.values()))
    num_samples = int(total) if is_counted and all(float(count).is_integer() for count in counts.values()) else None
    cut: Counter[int] = Counter()
    above = 0.0
    for length, count in counts.items():
        cut[min(length, max_length)] += count  # type: ignore[assignment]
        above += count if length > max_length else 0
    ordered = sorted(cut)
    return LengthDistribution(tuple(ordered), tuple(cut[length] / total for length in ordered), above / total, num_samples)


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
        text = path.read_text(encoding="utf-8-sig").strip()
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
    return LengthDistribution(tuple(merged), tuple(merged.values()), dist.share_cut, dist.num_samples)


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


@functools.lru_cache(maxsize=64)
def means(dist: LengthDistribution) -> tuple[float, float]:
    """Mean length and mean squared length."""
    return dist.mean_tokens, dist.mean_squared_tokens
