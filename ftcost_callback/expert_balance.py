"""How evenly the experts are used. Pure arithmetic on counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBalance:
    """Means over the layers that saw a token. A uniform load: 1.0, 0.0, 0.0, 1.0."""

    load_max_over_mean: float
    load_cv: float  # standard deviation over mean
    dead_expert_fraction: float  # share of experts that saw no token
    load_entropy: float  # of the shares, over log(num_experts): 0 = one expert does all, 1 = uniform


def expert_balance(tokens_per_expert: Sequence[Sequence[int]]) -> ExpertBalance | None:
    """``tokens_per_expert``: (num_layers, num_experts). ``None`` when no layer saw a token."""
    layers = [layer for layer in map(_layer_balance, tokens_per_expert) if layer is not None]
    if not layers:
        return None
    count = len(layers)
    return ExpertBalance(
        load_max_over_mean=sum(layer.load_max_over_mean for layer in layers) / count,
        load_cv=sum(layer.load_cv for layer in layers) / count,
        dead_expert_fraction=sum(layer.dead_expert_fraction for layer in layers) / count,
        load_entropy=sum(layer.load_entropy for layer in layers) / count,
    )


def _layer_balance(tokens: Sequence[int]) -> ExpertBalance | None:
    total, num_experts = sum(tokens), len(tokens)
    if total <= 0:
        return None
    mean = total / num_experts
    variance = sum((count - mean) ** 2 for count in tokens) / num_experts
    entropy = -sum(count / total * math.log(count / total) for count in tokens if count > 0)
    return ExpertBalance(
        load_max_over_mean=max(tokens) / mean,
        load_cv=math.sqrt(variance) / mean,
        dead_expert_fraction=sum(count == 0 for count in tokens) / num_experts,
        load_entropy=entropy / math.log(num_experts) if num_experts > 1 else 1.0,
    )
