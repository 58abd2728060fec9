"""A replay of torch's caching allocator: what it reserves for a log of allocations.

Rules of ``CUDACachingAllocator`` (torch 2.x, defaults): sizes are rounded to 512 bytes; up to 1 MiB comes from segments
of 2 MiB, below 10 MiB from segments of 20 MiB, above from a segment of its own, rounded to 2 MiB. The smallest free block
that is large enough is taken, and split where 512 bytes (small) or more than 1 MiB (large) remain. Freed neighbours merge. A
segment is never given back unless memory runs out. One stream; ``expandable_segments`` is not modelled.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable
from dataclasses import dataclass, field

MIB = 2**20
ROUNDING = 512
SMALL_LIMIT, SMALL_SEGMENT = MIB, 2 * MIB
MIDDLE_LIMIT, MIDDLE_SEGMENT = 10 * MIB, 20 * MIB
LARGE_ROUNDING = 2 * MIB


@dataclass(eq=False)
class _Block:
    size: int
    number: int  # in the order of creation, where the real one compares addresses
    is_small: bool
    is_free: bool = False
    before: _Block | None = None
    after: _Block | None = None


@dataclass
class CachingAllocator:
    """Bytes reserved and allocated now and at most."""

    reserved: int = 0
    allocated: int = 0
    most_reserved: int = 0
    most_allocated: int = 0
    _free: dict[bool, list[tuple[int, int, _Block]]] = field(default_factory=lambda: {True: [], False: []})
    _used: dict[Hashable, _Block] = field(default_factory=dict)
    _blocks: int = 0

    def allocate(self, name: Hashable, num_bytes: int) -> None:
        """A tensor's storage is born; nothing happens for an empty one."""
        if num_bytes <= 0:
            return
        size = max(ROUNDING, -(-num_bytes // ROUNDING) * ROUNDING)
        is_small = size <= SMALL_LIMIT
        free = self._free[is_small]
        position = bisect.bisect_left(free, (size, -1))
        block = free.pop(position)[2] if position < len(free) else self._new_segment(size, is_small)
        remaining = block.size - size
        if remaining >= ROUNDING if is_small else remaining > MIB:
            rest = self._new_block(remaining, is_small)
            rest.before, rest.after = block, block.after
            if block.after:
                block.after.before = rest
            block.after, block.size = rest, size
            self._put_back(rest)
        block.is_free = False
        self._used[name] = block
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)

    def free(self, name: Hashable) -> None:
        """A tensor's storage dies."""
        block = self._used.pop(name, None)
        if block is None:
            return
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._take_out(neighbour)
                block = self._merge(*((neighbour, block) if neighbour is block.before else (block, neighbour)))
        self._put_back(block)

    def empty_cache(self) -> None:
        """Gives back the segments that nothing lies in (``torch.cuda.empty_cache``)."""
        for is_small, free in self._free.items():
            whole = [entry for entry in free if entry[2].before is None and entry[2].after is None]
            self.reserved -= sum(size for size, _, _ in whole)
            self._free[is_small] = [entry for entry in free if entry not in whole]

    def _new_segment(self, size: int, is_small: bool) -> _Block:
        if is_small:
            segment = SMALL_SEGMENT
        elif size < MIDDLE_LIMIT:
            segment = MIDDLE_SEGMENT
        else:
            segment = -(-size // LARGE_ROUNDING) * LARGE_ROUNDING
        self.reserved += segment
        self.most_reserved = max(self.most_reserved, self.reserved)
        return self._new_block(segment, is_small)

    def _new_block(self, size: int, is_small: bool) -> _Block:
        self._blocks += 1
        return _Block(size, self._blocks, is_small)

    def _merge(self, first: _Block, second: _Block) -> _Block:
        first.size += second.size
        first.after = second.after
        if second.after:
            second.after.before = first
        return first

    def _put_back(self, block: _Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.is_small], (block.size, block.number, block))

    def _take_out(self, block: _Block) -> None:
        free = self._free[block.is_small]
        free.pop(bisect.bisect_left(free, (block.size, block.number)))
