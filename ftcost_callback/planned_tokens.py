"""The tokens of the steps still to come, where data set and order are known beforehand.

Which rows come when is known for a sequential sampler, and for accelerate's seedable one, which the Trainer uses by
default: it begins each epoch from a seed of its own, so that the order can be drawn beside it from a generator of ours. How
a collator makes tokens of rows is not asked but seen: of the laws below those are kept that gave each step's tokens so far.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final

from ftcost_callback.dataset_lengths import MAX_ROWS_FOR_ORDER, num_rows, row_lengths

MAX_PLANNED_ROWS: Final = 2_000_000  # over all epochs: some seconds of work

_LAWS: Final[tuple[Callable[[Sequence[int]], int], ...]] = (
    lambda lengths: len(lengths) * max(lengths),  # padded to the longest of the micro-batch
    sum,  # flattened
)


class PlannedTokens:
    """``tokens_by_law``: for each law, the tokens of every optimizer step of the run, the first at place 0."""

    def __init__(self, tokens_by_law: Sequence[Sequence[int]]) -> None:
        # Sums up to each step, and in front of the first.
        self._sums = [array("q", accumulate(tokens, initial=0)) for tokens in tokens_by_law]
        self._has_seen = False

    def seen(self, global_step: int, num_tokens: int | None) -> None:
        """A step is over. A law that says another number of tokens for it is wrong."""
        self._has_seen = True
        self._sums = [
            sums
            for sums in self._sums
            if 0 < global_step < len(sums) and sums[global_step] - sums[global_step - 1] == num_tokens
        ]

    def mean_to_come(self, steps_done: int, max_steps: int) -> float | None:
        """Tokens of a step behind ``steps_done``; ``None`` where that is not known for certain."""
        if not self._has_seen or not self._sums or not steps_done < max_steps < len(self._sums[0]):
            return None
        means = {(sums[max_steps] - sums[steps_done]) / (max_steps - steps_done) for sums in self._sums}
        return means.pop() if len(means) == 1 else None


def planned_tokens(loader: Any, *, accumulation: int, max_steps: int | None, num_processes: int) -> PlannedTokens | None:
    """From a ``DataLoader``; ``None`` where rows or order are not known. No random state is touched, no sample made."""
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
    tokens: tuple[list[int], ...] = tuple([] for _ in _LAWS)
    for epoch in range(max_steps):
        order = [lengths[row] for row in _order(sampler, count, epoch)[:in_epoch]]
        for start in range(0, in_epoch, group):
            rows = order[start : start + group]
            micro_batches = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
            for of_law, law in zip(tokens, _LAWS, strict=True):
                of_law.append(sum(map(law, micro_batches)))
        if len(tokens[0]) >= max_steps:
            break
    return PlannedTokens(tokens)


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
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order
