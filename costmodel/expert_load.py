"""How a router spreads its tokens over the experts, as numbers around 1: what uneven load means to step time.

A load is one number (tokens of the busiest expert over the mean, 1 is even), tokens or shares for each expert, or a row of
those for each layer. Only proportions count.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from costmodel.errors import CostModelError, shown

ExpertLoad = float | Sequence[float] | Sequence[Sequence[float]]
RelativeLoads = tuple[tuple[float, ...], ...]  # a row a layer: tokens of each expert over the mean of its layer


def relative_loads(load: ExpertLoad, num_experts: int) -> RelativeLoads:
    """(layers, num_experts): tokens of each expert over its layer's mean. Layers that saw no token are left out.

    One number is taken for a geometric profile, busiest expert first: routers' sorted loads fall off about so.
    Raises :class:`CostModelError` for another number of experts, negative tokens, or a busiest expert below the mean or
    above all of the tokens.
    """
    if isinstance(load, (int, float)):
        return (_geometric_profile(float(load), num_experts),)
    rows = [load] if load and isinstance(load[0], (int, float)) else load
    found = tuple(relative for row in rows if (relative := _relative(row, num_experts)))  # type: ignore[arg-type]
    if not found:
        raise CostModelError("expert load: no expert saw a token; leave the load out")
    return found


def _relative(tokens: Sequence[float], num_experts: int) -> tuple[float, ...] | None:
    if len(tokens) != num_experts:
        raise CostModelError(
            f"expert load: {len(tokens)} numbers for {num_experts} experts; give one for each expert, or the busiest "
            "expert's tokens over the mean"
        )
    if not all(0 <= each < float("inf") for each in tokens):
        raise CostModelError(f"expert load: tokens must be 0 or more, got {shown(list(tokens))}")
    mean = sum(tokens) / num_experts
    return tuple(each / mean for each in tokens) if mean > 0 else None


@functools.lru_cache(maxsize=256)
def _geometric_profile(max_over_mean: float, num_experts: int) -> tuple[float, ...]:
    """Loads that fall by the same ratio from expert to expert, with the wanted maximum over the mean."""
    if not 1.0 <= max_over_mean <= num_experts:
        raise CostModelError(
            f"expert_imbalance is the busiest expert's tokens over the mean: 1 (even) to {num_experts} (one expert takes "
            f"all), got {shown(max_over_mean)}"
        )
    low, high = 0.0, 1.0  # of the ratio; the larger, the more even
    for _ in range(60):
        ratio = (low + high) / 2
        powers = [ratio**each for each in range(num_experts)]
        if num_experts / sum(powers) > max_over_mean:
            low = ratio
        else:
            high = ratio
    powers = [high**each for each in range(num_experts)]
    return tuple(each * num_experts / sum(powers) for each in powers)


def split_over_ranks(row: Sequence[float], num_ranks: int, *, dealt: bool = False) -> list[tuple[float, ...]]:
    """The experts that each GPU holds: consecutive blocks, or dealt in turns.

    Raises :class:`CostModelError` where they cannot be split evenly.
    """
    if num_ranks < 1 or len(row) % num_ranks:
        raise CostModelError(f"{len(row)} experts cannot be split evenly over {num_ranks} GPUs; use a divisor of {len(row)}")
    size = len(row) // num_ranks
    return [tuple(row[rank::num_ranks] if dealt else row[rank * size : (rank + 1) * size]) for rank in range(num_ranks)]


def dropped_token_fraction(load: ExpertLoad, num_experts: int, capacity_factor: float) -> float:
    """Share of the (token, expert) visits that experts of a fixed capacity leave out; each takes ``capacity_factor`` means.

    transformers' own models drop nothing; Switch-style and Megatron's ``moe_expert_capacity_factor`` do. A fixed
    capacity is computed full whatever the load, so uneven load costs no seconds there but these tokens' training.
    """
    if not capacity_factor > 0:
        raise CostModelError(f"capacity_factor must be positive, got {shown(capacity_factor)}")
    rows = relative_loads(load, num_experts)
    return sum(max(0.0, each - capacity_factor) for row in rows for each in row) / (num_experts * len(rows))
