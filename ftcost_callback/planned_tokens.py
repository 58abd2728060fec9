"""The tokens of the steps still to come, where data set and order are known beforehand.

Which rows come when is known for a sequential sampler, and for accelerate's seedable one, which the Trainer uses by
default: it begins each epoch from a seed of its own, so that the order can be drawn beside it from a generator of ours. How
a collator makes tokens of rows is not asked but seen: of the laws below those are kept that gave each step's tokens so far.

What was seen says nothing beyond it: a collator may cut a row that is longer than all so far, and may fill up a micro-batch
that is shorter. So what is to come is known within a range, over the laws that are left and these two changes of each.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ftcost_callback.dataset_lengths import MAX_ROWS_FOR_ORDER, num_rows, row_lengths

MAX_PLANNED_ROWS: Final = 300_000  # over all epochs: at the worst about a second of the training thread, once or twice
_MIN_STEPS_SEEN: Final = 3
_MAX_RANGE: Final = 0.1  # of the mean: where it is known no better, the steps seen say as much
_ENDLESS: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Law:
    """How many tokens a micro-batch has: padded to its longest row and up to a ``multiple``; ``None``: flattened."""

    multiple: int | None
    at_most: int = _ENDLESS  # tokens that a row is cut at
    at_least: int = 0  # tokens that each row is padded to

    def tokens(self, lengths: Sequence[int]) -> int:
        """Of a micro-batch with rows of these lengths."""
        if self.multiple is None:
            return sum(lengths) if max(lengths) <= self.at_most else sum(min(each, self.at_most) for each in lengths)
        longest = max(min(max(lengths), self.at_most), self.at_least)
        return len(lengths) * (-(-longest // self.multiple) * self.multiple)


# The plain ones first. Padding to a multiple of 8 and more is for tensor cores; odd lengths tell the multiples apart.
_LAWS: Final = (_Law(1), _Law(None), *(_Law(2**power) for power in range(1, 10)))


class PlannedTokens:
    """``lengths``: tokens of the run's rows, in their order, as they lie in the data set. ``starts``: where each step begins
    among them, and where the last ends; ``batch_size``: rows of a micro-batch, the last of a step may have fewer.
    ``max_length``: tokens that a row is known to be cut at; ``None``: not known."""

    def __init__(self, lengths: Sequence[int], starts: Sequence[int], batch_size: int, *, max_length: int | None) -> None:
        self._lengths, self._starts, self._batch_size = array("q", lengths), array("q", starts), batch_size
        self._is_cut_known = max_length is not None
        self._longest_of_all, self._shortest_of_all = max(lengths), min(lengths)
        distinct = set(lengths)
        laws = [law for law in _LAWS if law.multiple in (None, 1) or any(each % law.multiple for each in distinct)]
        self._laws = [replace(law, at_most=max_length) for law in laws] if max_length is not None else laws
        self._num_seen = 0
        self._longest_row, self._shortest_batch = 0, _ENDLESS  # seen so far; of a micro-batch its longest row
        self._rest: dict[_Law, tuple[int, int, int]] = {}  # law -> (first step, end step, tokens between)

    def seen(self, global_step: int, num_tokens: int | None) -> None:
        """A step is over. A law that says another number of tokens for it is wrong."""
        if not 0 < global_step < len(self._starts):
            self._laws = []
            return
        if not self._laws:
            return
        self._num_seen += 1
        self._laws = [law for law in self._laws if self._tokens(law, global_step - 1, global_step) == num_tokens]
        longest = [max(rows) for rows in self._micro_batches(global_step - 1, global_step)]
        self._longest_row = max(self._longest_row, *longest)
        self._shortest_batch = min(self._shortest_batch, *longest)

    def mean_to_come(self, steps_done: int, max_steps: int) -> tuple[float, float] | None:
        """(tokens of a step behind ``steps_done``, by how many they may be off); ``None`` where they are not known."""
        if self._num_seen < _MIN_STEPS_SEEN or not self._laws or not 0 <= steps_done < max_steps < len(self._starts):
            return None
        laws = dict.fromkeys(changed for law in self._laws for changed in self._as_far_as_seen(law))
        self._rest = {law: self._tokens_between(law, steps_done, max_steps) for law in laws}
        means = [tokens / (max_steps - steps_done) for _, _, tokens in self._rest.values()]
        off = max(abs(mean - means[0]) for mean in means)
        return (means[0], off) if off <= _MAX_RANGE * means[0] else None

    def _as_far_as_seen(self, law: _Law) -> list[_Law]:
        """The law, and those that differ from it only where nothing has been seen."""
        changed = [law]
        if not self._is_cut_known and self._longest_row < self._longest_of_all:
            changed.append(replace(law, at_most=self._longest_row))
        if law.multiple is not None and self._shortest_batch > self._shortest_of_all:
            changed.append(replace(law, at_least=min(self._shortest_batch, law.at_most)))
        return changed

    def _tokens_between(self, law: _Law, first: int, end: int) -> tuple[int, int, int]:
        """(first, end, tokens); from what was known a step before, where it was."""
        known = self._rest.get(law)
        if known is not None and known[0] <= first and known[1] == end:
            return first, end, known[2] - self._tokens(law, known[0], first)
        return first, end, self._tokens(law, first, end)

    def _tokens(self, law: _Law, first: int, end: int) -> int:
        """Of the steps from ``first`` to before ``end``, the run's first being 0."""
        return sum(map(law.tokens, self._micro_batches(first, end)))

    def _micro_batches(self, first: int, end: int) -> Iterator[array[int]]:
        size = self._batch_size
        for start, stop in itertools.pairwise(self._starts[first : end + 1]):
            for at in range(start, stop, size):
                yield self._lengths[at : min(at + size, stop)]


def planned_tokens(
    loader: Any, *, accumulation: int, max_steps: int | None, num_processes: int, max_length: int | None = None
) -> PlannedTokens | None:
    """From a ``DataLoader``; ``None`` where rows or order are not known. No random state is touched, no sample made.

    ``max_length``: tokens that a row is known to be cut at, whatever its length in the data set.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    dataset = getattr(loader, "dataset", None)
    sampler, batch_size = getattr(batches, "sampler", None), getattr(batches, "batch_size", None)
    count = num_rows(dataset)
    if type(batches).__name__ != "BatchSampler" or num_processes != 1 or max_steps is None or not count or not batch_size:
        return None
    if count > MAX_ROWS_FOR_ORDER or not _is_known(sampler, count):
        return None
    in_epoch = count - count % batch_size if batches.drop_last else count
    group = batch_size * accumulation
    if not in_epoch or -(-max_steps * group // in_epoch) * in_epoch > MAX_PLANNED_ROWS:
        return None
    lengths = row_lengths(dataset)
    if lengths is None or len(lengths) != count:
        return None
    in_order, starts = array("q"), array("q", [0])
    for epoch in range(max_steps):
        in_order.extend(lengths[row] for row in _order(sampler, count, epoch)[:in_epoch])
        starts.extend([*range(starts[-1] + group, len(in_order), group), len(in_order)])
        if len(starts) > max_steps:
            break
    return PlannedTokens(in_order, starts, batch_size, max_length=max_length)


def _is_known(sampler: Any, count: int) -> bool:
    kind = type(sampler).__name__
    if kind == "SeedableRandomSampler":
        return not sampler.replacement and sampler.num_samples == count
    return kind == "SequentialSampler"


def _order(sampler: Any, count: int, epoch: int) -> Sequence[int]:
    """Rows of an epoch. accelerate 1.15, data_loader.py: the epoch is added to the seed."""
    if type(sampler).__name__ == "SequentialSampler":
        return range(count)
    import torch

    generator = torch.Generator().manual_seed(sampler.initial_seed + epoch)
    order: list[int] = torch.randperm(count, generator=generator, device="cpu").tolist()
    return order
