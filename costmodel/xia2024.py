"""The closed forms of Xia et al. 2024 (IISWC, arXiv:2408.04693), as published: largest batch, throughput, cost.

Their words, translated: a "query" is a sample; "sparsity" is ``num_experts_per_tok / num_experts`` (1 is dense, 0.25 is two
experts of eight); memory is in the GB that the card is sold with. None of this enters our own estimates; ``docs/paper.md``
sets both beside what the paper measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from costmodel.data_files import read_table
from costmodel.errors import CostModelError

DENSE: Final = 1.0
SPARSE: Final = 0.25  # two experts of eight


# --- Eq. 1: the largest batch -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchCoefficients:
    """C0 in token-samples a GB, C1 the share of a sample's memory that scales with sparsity."""

    c0: float
    c1: float


# Mixtral QLoRA, from the plotting script of Fig. 13.
MIXTRAL_BATCH: Final = BatchCoefficients(c0=62.0, c1=0.89)
# Table I: "memory consumption" of the loaded weights, GB.
MIXTRAL_MODEL_MEMORY_GB: Final = 23.35


def max_batch_size(
    gpu_memory_gb: float,
    model_memory_gb: float,
    sequence_tokens: int,
    sparsity: float,
    coefficients: BatchCoefficients = MIXTRAL_BATCH,
) -> float:
    """Eq. 1 before its floor: C0 · (GPU − model) / (s · ((1 − C1) + C1 · sparsity)), in samples.

    ``sequence_tokens`` is the longest sample after the cut (512 for commonsense_15k, 1024 for math_14k): only that
    reproduces the paper's bars, not the medians of its Table II. The text floors it; Fig. 13 prints it rounded (27.9 as 28).
    """
    if gpu_memory_gb <= model_memory_gb:
        return 0.0
    share = (1 - coefficients.c1) + coefficients.c1 * sparsity
    return coefficients.c0 * (gpu_memory_gb - model_memory_gb) / (sequence_tokens * share)


# --- Eq. 2: throughput ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ThroughputCoefficients:
    """Eq. 2's constants: C2 and C4 in samples a second, C3 a number set by hand (1.8 Mixtral, 2.5 BlackMamba)."""

    c2: float
    c3: float
    c4: float


@dataclass(frozen=True, slots=True)
class ThroughputPoint:
    """One measured point of Figs. 14 and 15."""

    batch_size: int
    sparsity: float
    samples_per_second: float

    @property
    def step_seconds(self) -> float:
        return self.batch_size / self.samples_per_second


def samples_per_second_as_printed(batch_size: float, sparsity: float, coefficients: ThroughputCoefficients) -> float:
    """Eq. 2 as the paper prints it: C2 · ln(batch / (sparsity · C3)) + C4.

    C3 only shifts the curve here, so a fit cannot tell it from C4.
    """
    return coefficients.c2 * math.log(batch_size / (sparsity * coefficients.c3)) + coefficients.c4


def samples_per_second_as_coded(batch_size: float, sparsity: float, coefficients: ThroughputCoefficients) -> float:
    """Eq. 2 as the paper's script computes it: C2 · ln(batch) / (sparsity · C3) + C4.

    Sparsity divides the slope, C3 only rescales C2; at batch 1 dense and sparse are equal, C4. This is the form behind the
    paper's figures and its stated errors.
    """
    return coefficients.c2 * math.log(batch_size) / (sparsity * coefficients.c3) + coefficients.c4


def samples_per_second_as_scored(batch_size: float, sparsity: float, coefficients: ThroughputCoefficients) -> float:
    """What the paper's script subtracts when it states its RMSE: the coded form, without C3 for dense points."""
    c3 = coefficients.c3 if sparsity < 1 else 1.0
    return coefficients.c2 * math.log(batch_size) / (sparsity * c3) + coefficients.c4


Predictor = Callable[[float, float, ThroughputCoefficients], float]


def fit_as_coded(points: Sequence[ThroughputPoint], c3: float) -> ThroughputCoefficients:
    """Least squares on samples a second for the coded form, ``c3`` fixed: linear in C2 and C4, so exact."""
    slope, intercept = _line([math.log(p.batch_size) / (p.sparsity * c3) for p in points], _rates(points))
    return ThroughputCoefficients(slope, c3, intercept)


def fit_as_printed(points: Sequence[ThroughputPoint], c3: float) -> ThroughputCoefficients:
    """Least squares for the printed form. Only C2 and C4 − C2·ln C3 are determined; ``c3`` is a free choice."""
    slope, intercept = _line([math.log(p.batch_size / p.sparsity) for p in points], _rates(points))
    return ThroughputCoefficients(slope, c3, intercept + slope * math.log(c3))


def root_mean_square_error(
    points: Sequence[ThroughputPoint], coefficients: ThroughputCoefficients, predict: Predictor
) -> float:
    """RMSE in samples a second, the error measure of the paper."""
    squares = [(predict(p.batch_size, p.sparsity, coefficients) - p.samples_per_second) ** 2 for p in points]
    return math.sqrt(sum(squares) / len(squares))


def mean_absolute_relative_error(
    points: Sequence[ThroughputPoint], coefficients: ThroughputCoefficients, predict: Predictor
) -> float:
    """Mean of |predicted − measured| / measured over the points, as a share."""
    errors = [abs(predict(p.batch_size, p.sparsity, coefficients) / p.samples_per_second - 1) for p in points]
    return sum(errors) / len(errors)


def _rates(points: Iterable[ThroughputPoint]) -> list[float]:
    return [point.samples_per_second for point in points]


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept of the least-squares line. Raises :class:`CostModelError` if the xs do not differ."""
    if len(set(xs)) < 2:
        raise CostModelError("a fit of Eq. 2 needs points of at least two batch sizes")
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    return slope, mean_y - slope * mean_x


# --- cost -------------------------------------------------------------------------------------------------------------


def training_usd(num_samples: float, num_epochs: float, samples_per_second: float, usd_per_hour: float) -> float:
    """Table IV: samples · epochs / throughput, in hours, times the price. No start-up, no saves, no padding twice."""
    return num_samples * num_epochs / samples_per_second / 3600.0 * usd_per_hour


# --- the published numbers --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Series:
    """One curve of Figs. 14 and 15: model, data set and card, dense and sparse points together as Eq. 2 fits them."""

    model: str
    dataset: str
    gpu: str
    points: tuple[ThroughputPoint, ...]
    coefficients: ThroughputCoefficients  # of the coded form, as published


def paper_table(name: str) -> list[dict[str, str]]:
    """The rows of one of the paper's tables, as text."""
    return read_table("paper", f"{name}.csv")


@cache
def throughput_series() -> tuple[Series, ...]:
    """The five published series with their published coefficients."""
    points: dict[tuple[str, str, str], list[ThroughputPoint]] = {}
    for row in paper_table("throughput"):
        sparsity = DENSE if row["density"] == "dense" else SPARSE
        points.setdefault((row["model"], row["dataset"], row["gpu"]), []).append(
            ThroughputPoint(int(row["batch_size"]), sparsity, float(row["queries_per_s"]))
        )
    return tuple(
        Series(
            *(key := (row["model"], row["dataset"], row["gpu"])),
            tuple(points[key]),
            ThroughputCoefficients(float(row["C2"]), float(row["C3_fixed_by_hand"]), float(row["C4"])),
        )
        for row in paper_table("fit_coefficients")
    )
