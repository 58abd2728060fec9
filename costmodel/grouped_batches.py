"""What rows are padded to when samples are grouped by length: the expectation over the orders of transformers' sampler."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Final

from costmodel.length_distribution import LengthDistribution

# transformers' length-grouped sampler sorts inside megabatches of at most this many groups (trainer_pt_utils.py).
MEGABATCH_GROUPS: Final = 50
# Below this standard deviation, in samples, the long ones of a megabatch are counted one by one; above, as normal.
_COUNTED_ONE_BY_ONE: Final = 4.0


@functools.lru_cache(maxsize=256)
def grouped_maximum(
    dist: LengthDistribution, batch_size: int, group_size: int, num_samples: int | None
) -> tuple[float, float]:
    """Mean and mean square of what the length-grouped sampler pads a row to.

    The sampler shuffles, cuts the samples into megabatches of :data:`MEGABATCH_GROUPS` groups, or of a quarter of the data
    where that is less, and sorts each of them, the longest first. Then the longest of all changes places with the first of
    all. So many batches as the samples of a length or above begin are padded to it or above. ``group_size``: the samples of
    one GPU's optimizer step. ``num_samples`` ``None``: as of a large data set. Source: transformers 5.24
    ``get_length_grouped_indices``, ``Trainer._get_train_sampler``.
    """
    groups = MEGABATCH_GROUPS if num_samples is None else min(num_samples // (4 * group_size), MEGABATCH_GROUPS)
    megabatch = max(1, groups) * group_size
    is_drawn = num_samples is None or num_samples != dist.num_samples
    num_samples = num_samples or megabatch
    whole, rest = divmod(num_samples, megabatch)
    megabatches = tuple((size, number) for size, number in ((megabatch, whole), (rest, 1)) if size and number)
    share = mean = square = previous = 0.0
    for length, of_length in zip(reversed(dist.lengths), reversed(dist.shares), strict=True):
        share = min(1.0, share + of_length)
        rows = float(num_samples)
        if length > dist.lengths[0]:
            long = _LongSamples(num_samples, share, is_drawn)
            rows = sum(number * _rows_begun(long, size, batch_size) for size, number in megabatches)
            rows += _rows_begun_by_the_exchange(long, megabatches, batch_size)
        mean += length * (rows - previous)
        square += length * length * (rows - previous)
        previous = rows
    return mean / num_samples, square / num_samples


@dataclass(frozen=True, slots=True)
class _LongSamples:
    """Of ``num_samples`` in random order, those of a length or above.

    Drawn from a larger data set, each is one with chance ``share``; else exactly that share of them is, as when the lengths
    are those of the data set itself.
    """

    num_samples: int
    share: float
    is_drawn: bool

    @property
    def count(self) -> int:
        """How many there are, where they are not drawn."""
        return round(self.num_samples * self.share)

    def deviation_among(self, rows: int) -> float:
        """Standard deviation of their number among ``rows`` of the samples: binomial, or hypergeometric."""
        left = 1.0 if self.is_drawn else (self.num_samples - rows) / max(1, self.num_samples - 1)
        return math.sqrt(rows * self.share * (1 - self.share) * left)

    def numbers_among(self, rows: int, fewest: int, most: int) -> tuple[int, list[float]]:
        """How many of them may be among ``rows``, from ``fewest`` to ``most``: (the first number, weights of it and above).

        Each weight comes from the one below by the ratio of two neighbours of a binomial or hypergeometric distribution.
        """
        weights = [1.0]
        if self.is_drawn:
            most, odds = min(most, rows), self.share / (1 - self.share)
            for number in range(fewest, most):
                weights.append(weights[-1] * odds * (rows - number) / (number + 1))
            return fewest, weights
        count = self.count
        left_out = self.num_samples - count - rows  # of the others, at least so many more than rows
        fewest, most = max(fewest, -left_out), min(most, rows, count)
        for number in range(fewest, most):
            weights.append(weights[-1] * (count - number) * (rows - number) / ((number + 1) * (left_out + number + 1)))
        return fewest, weights

    def chance_of_none_but_the_longest(self, rows: int) -> float:
        """That there are any, and none but perhaps the longest stands among ``rows`` places other than its own."""
        places = self.num_samples - 1
        if self.is_drawn:
            kept = 1 - rows / places
            if kept <= 0:
                return self.num_samples * self.share * (1 - self.share) ** places
            some: float = (1 - self.share * (1 - kept)) ** self.num_samples - (1 - self.share) ** self.num_samples
            return some / kept
        others = self.count - 1
        if others < 0 or rows + others > places:
            return 0.0
        return math.exp(
            math.lgamma(places - rows + 1)
            + math.lgamma(places - others + 1)
            - math.lgamma(places - rows - others + 1)
            - math.lgamma(places + 1)
        )


def _rows_begun(long: _LongSamples, num_rows: int, batch_size: int) -> float:
    """Expected rows of the batches that the long samples begin, when ``num_rows`` of all are sorted, the longest first."""
    mean, deviation = num_rows * long.share, long.deviation_among(num_rows)
    if deviation == 0:
        return float(min(num_rows, -(-round(mean) // batch_size) * batch_size))
    if deviation < _COUNTED_ONE_BY_ONE:
        reach = 6 * deviation + 3
        fewest, weights = long.numbers_among(num_rows, max(0, math.floor(mean - reach)), math.ceil(mean + reach))
        begun_rows = (min(num_rows, -(-number // batch_size) * batch_size) for number in itertools.count(fewest))
        return sum(weight * rows for weight, rows in zip(weights, begun_rows, strict=False)) / sum(weights)

    def is_begun(batch: int) -> float:
        """Chance that more than ``batch`` whole batches are of long samples, whose number counts as normal."""
        return 0.5 * math.erfc((batch * batch_size + 0.5 - mean) / (math.sqrt(2) * deviation))

    last = math.ceil(num_rows / batch_size) - 1
    if deviation >= batch_size:  # spread over more than a batch, they leave half a batch open on average
        begun = (mean + (batch_size - 1) / 2) / batch_size
    else:
        surely = max(0, math.floor((mean - 6 * deviation) / batch_size))
        at_most = min(last, math.ceil((mean + 6 * deviation) / batch_size))
        begun = 1 + surely + sum(map(is_begun, range(surely + 1, at_most + 1)))
    missing = (last + 1) * batch_size - num_rows  # the last batch is smaller
    return begun * batch_size - missing * is_begun(last)


def _rows_begun_by_the_exchange(long: _LongSamples, megabatches: tuple[tuple[int, int], ...], batch_size: int) -> float:
    """Expected rows that become long when the longest of all changes places with the longest of the first megabatch.

    The first batch of all becomes long where the first megabatch had no long sample. That which held the longest stops being
    long where its megabatch had no other long sample and the first had none. ``megabatches``: (samples, how many), with the
    first of them first.
    """
    first = megabatches[0][0]
    if first == long.num_samples or (none := long.chance_of_none_but_the_longest(first)) < 1e-9:
        return 0.0
    rows = 0.0
    for place, (size, number) in enumerate(megabatches):
        holds_longest = size * (number - (place == 0)) / long.num_samples
        stops = long.chance_of_none_but_the_longest(first + size - 1)
        rows += holds_longest * (min(batch_size, first) * none - min(batch_size, size) * stops)
    return rows
