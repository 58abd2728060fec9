"""How evenly the experts are used, whether tuning the router changes that, and what it costs. Pure arithmetic on counts.

The paper saw tuning make Mixtral's load less even (Xia et al. 2024, arXiv:2408.04693, section VI): so each stretch of steps
is held against the run's first ones. Stretches are of equally many steps, since a maximum over few tokens is larger by
chance alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from costmodel.units import SECONDS_PER_HOUR

STRETCH_STEPS: Final = 20  # steps that are looked at together

Matrix = Sequence[Sequence[int]]  # (num_layers, num_experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBalance:
    """Means over the layers that saw a token, and the least even of them. A uniform load: 1.0, 0.0, 0.0, 1.0, 0, 1.0."""

    load_max_over_mean: float
    load_cv: float  # standard deviation over mean
    dead_expert_fraction: float  # share of experts that saw no token
    load_entropy: float  # of the shares, over log(num_experts): 0 = one expert does all, 1 = uniform
    num_dead_experts: int  # over those layers
    worst_layer: int  # its row
    worst_layer_load_max_over_mean: float


def expert_balance(tokens_per_expert: Matrix) -> ExpertBalance | None:
    """``tokens_per_expert``: (num_layers, num_experts). ``None`` when no layer saw a token."""
    layers = [(row, layer) for row, tokens in enumerate(tokens_per_expert) if (layer := _layer_balance(tokens)) is not None]
    if not layers:
        return None
    count = len(layers)
    worst_row, worst = max(layers, key=lambda pair: pair[1].load_max_over_mean)
    return ExpertBalance(
        load_max_over_mean=sum(layer.load_max_over_mean for _, layer in layers) / count,
        load_cv=sum(layer.load_cv for _, layer in layers) / count,
        dead_expert_fraction=sum(layer.dead_expert_fraction for _, layer in layers) / count,
        load_entropy=sum(layer.load_entropy for _, layer in layers) / count,
        num_dead_experts=sum(layer.num_dead_experts for _, layer in layers),
        worst_layer=worst_row,
        worst_layer_load_max_over_mean=worst.load_max_over_mean,
    )


def _layer_balance(tokens: Sequence[int]) -> ExpertBalance | None:
    total, num_experts = sum(tokens), len(tokens)
    if total <= 0:
        return None
    mean = total / num_experts
    # In whole numbers, so that an even load is exactly 0: num_experts^2 times the variance.
    spread = num_experts * sum(map(operator.mul, tokens, tokens)) - total * total
    entropy = -sum(count / total * math.log(count / total) for count in tokens if count > 0)
    num_dead = tokens.count(0)
    return ExpertBalance(
        load_max_over_mean=max(tokens) / mean,
        load_cv=math.sqrt(spread) / total,
        dead_expert_fraction=num_dead / num_experts,
        load_entropy=entropy / math.log(num_experts) if num_experts > 1 else 1.0,
        num_dead_experts=num_dead,
        worst_layer=0,
        worst_layer_load_max_over_mean=max(tokens) / mean,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceStanding:
    """What is known of a session's experts at one moment. ``None``: not known (yet)."""

    window: ExpertBalance | None = None  # since the last report
    vs_first_steps: float | None = None  # load_max_over_mean of the latest stretch over the first one's; above 1 = less even
    imbalance_step_seconds: float | None = None  # what the latest stretch's uneven load adds to a step
    imbalance_seconds: float | None = None  # that, over all steps of the session


class BalanceHistory:
    """A session's loads, kept as two matrices of counts whatever its length.

    ``imbalance_seconds(load)``: seconds that a load adds to one optimizer step, ``None`` where that is not known. Asked
    once a stretch.
    """

    def __init__(self, imbalance_seconds: Callable[[Matrix], float | None] = lambda load: None) -> None:
        self._imbalance_seconds = imbalance_seconds
        self._total: list[list[int]] = []  # of whole stretches
        self._stretch: list[list[int]] = []
        self._stretch_steps = 0
        self._num_steps = 0
        self._first: ExpertBalance | None = None
        self._latest: ExpertBalance | None = None
        self._window: ExpertBalance | None = None
        self._step_seconds: float | None = None  # of the latest whole stretch
        self._seconds: float | None = 0.0  # over whole stretches
        self._costed_steps = 0

    def add(self, tokens_per_expert: Matrix, *, num_steps: int) -> ExpertBalance | None:
        """Take the load of the last ``num_steps`` steps; its balance."""
        self._window = expert_balance(tokens_per_expert)
        if self._window is None:
            return None
        self._stretch = _sum(self._stretch, tokens_per_expert)
        self._stretch_steps += num_steps
        self._num_steps += num_steps
        if self._stretch_steps >= STRETCH_STEPS:
            self._stretch_ends(self._window if self._stretch_steps == num_steps else expert_balance(self._stretch))
        elif self._costed_steps == 0 and self._step_seconds is None:
            self._step_seconds = self._imbalance_seconds(self._stretch)  # a first figure, before a stretch is whole
        return self._window

    def _stretch_ends(self, balance: ExpertBalance | None) -> None:
        if self._first is None:
            self._first = balance
        else:
            self._latest = balance
        self._step_seconds = self._imbalance_seconds(self._stretch)
        known = self._step_seconds is not None and self._seconds is not None
        self._seconds = self._seconds + self._step_seconds * self._stretch_steps if known else None  # type: ignore[operator]
        self._costed_steps += self._stretch_steps
        self._total = _sum(self._total, self._stretch)
        self._stretch, self._stretch_steps = [], 0

    def no_window(self) -> None:
        """The last report's steps showed no load."""
        self._window = None

    @property
    def standing(self) -> BalanceStanding:
        return BalanceStanding(
            window=self._window,
            vs_first_steps=self.vs_first_steps,
            imbalance_step_seconds=self._step_seconds,
            imbalance_seconds=self.imbalance_seconds,
        )

    @property
    def vs_first_steps(self) -> float | None:
        """Above 1: less even than in the first steps."""
        if self._first is None or self._latest is None:
            return None
        return self._latest.load_max_over_mean / self._first.load_max_over_mean

    @property
    def imbalance_seconds(self) -> float | None:
        """Over the session so far; the stretch that is not whole yet at the rate of the one before."""
        if self._seconds is None or self._step_seconds is None:
            return None
        return self._seconds + self._step_seconds * (self._num_steps - self._costed_steps)

    def summary(self, layer_names: Sequence[str], *, usd_per_hour: float | None) -> dict[str, Any] | None:
        """The session's balance for the summary row, over all its tokens. ``None`` when none was seen."""
        balance = expert_balance(_sum(self._total, self._stretch) if self._stretch else self._total)
        if balance is None:
            return None
        seconds = self.imbalance_seconds
        row = balance.worst_layer
        found: dict[str, Any] = {
            "load_max_over_mean": balance.load_max_over_mean,
            "load_cv": balance.load_cv,
            "load_entropy": balance.load_entropy,
            "worst_layer": layer_names[row] if row < len(layer_names) else str(row),
            "worst_layer_load_max_over_mean": balance.worst_layer_load_max_over_mean,
            "num_dead_experts": balance.num_dead_experts,
            "first_steps_load_max_over_mean": self._first.load_max_over_mean if self._first else None,
            "last_steps_load_max_over_mean": self._latest.load_max_over_mean if self._latest else None,
            "vs_first_steps": self.vs_first_steps,
            "imbalance_step_seconds": seconds / self._num_steps if seconds is not None and self._num_steps else None,
            "imbalance_seconds": seconds,
            "imbalance_usd": imbalance_usd(seconds, usd_per_hour),
        }
        return {name: value for name, value in found.items() if value is not None}


def imbalance_usd(seconds: float | None, usd_per_hour: float | None) -> float | None:
    """``usd_per_hour``: of all GPUs."""
    return seconds / SECONDS_PER_HOUR * usd_per_hour if seconds is not None and usd_per_hour is not None else None


def _sum(left: list[list[int]], right: Matrix) -> list[list[int]]:
    if not left:
        return [list(row) for row in right]
    return [list(map(operator.add, one, other)) for one, other in zip(left, right, strict=True)]
