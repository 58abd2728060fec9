"""The same job on other GPUs: which fits, how long, how many dollars, and which choices nothing else beats."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from costmodel.catalog import bill_usd_per_hour, find_gpu, find_price, list_prices
from costmodel.errors import CostModelError, UnknownNameError
from costmodel.estimation import Estimate, estimate
from costmodel.specs import GpuSpec, Job, Price, parse_job


@dataclass(frozen=True, slots=True)
class Candidate:
    """The job on one GPU at one price. ``estimate`` is ``None`` where the job cannot run there: ``error`` says why."""

    gpu: str
    num_gpus: int
    price: Price | None
    estimate: Estimate | None
    error: str = ""
    on_pareto_front: bool = False  # no other fitting candidate is both cheaper and faster

    @property
    def fits(self) -> bool:
        """Fits or is tight, as for the exit code."""
        return self.estimate is not None and self.estimate.verdict in ("fits", "tight")

    @property
    def total_usd(self) -> float | None:
        return self.estimate.total_usd if self.estimate else None

    @property
    def total_seconds(self) -> float | None:
        return self.estimate.total_seconds if self.estimate else None

    @property
    def bill_usd_per_hour(self) -> float | None:
        """Whole machines."""
        return bill_usd_per_hour(self.price, self.num_gpus) if self.price else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the choice, and the whole answer under ``estimate``."""
        return {
            "gpu": self.gpu,
            "num_gpus": self.num_gpus,
            "price": self.price.model_dump() if self.price else None,
            "bill_usd_per_hour": self.bill_usd_per_hour,
            "fits": self.fits,
            "on_pareto_front": self.on_pareto_front,
            "error": self.error or None,
            "estimate": self.estimate.to_dict() if self.estimate else None,
        }


def compare(
    job: Job | Mapping[str, Any],
    gpus: Iterable[str | GpuSpec] | None = None,
    tiers: Sequence[str] = ("on_demand",),
) -> tuple[Candidate, ...]:
    """The job on each of ``gpus`` (default: all with a dated price), at the cheapest price of each tier.

    Fitting candidates come first, by total dollars (by the bill of a step where totals are unknown). A named GPU without
    a price is compared in hours. ``job.usd_per_gpu_hour`` is the price of the job's own GPU and of no other;
    ``job.cloud`` restricts the others to that cloud. Raises :class:`CostModelError` where the job runs on none.
    """
    job = parse_job(job)
    own_gpu = _own_gpu_name(job)
    named = [gpu if isinstance(gpu, GpuSpec) else find_gpu(gpu) for gpu in gpus] if gpus is not None else None
    candidates = []
    for gpu in named if named is not None else _priced_gpus(tiers):
        if job.usd_per_gpu_hour is not None and gpu.name == own_gpu:
            candidates.append(_candidate(job, gpu, {}))
            continue
        prices = _prices(gpu, job, tiers)
        for price in prices:
            terms = {"usd_per_gpu_hour": None, "cloud": price.cloud, "tier": price.tier}
            candidates.append(_candidate(job, gpu, terms, price))
        if not prices and named is not None:
            candidates.append(_candidate(job, gpu, {"usd_per_gpu_hour": None, "cloud": None, "tier": None}))
    if not candidates:
        raise CostModelError(f"no GPU has a dated {' or '.join(tiers)} price" + (f" at {job.cloud}" if job.cloud else ""))
    if all(candidate.estimate is None for candidate in candidates):
        raise CostModelError(candidates[0].error)
    return _with_pareto_front(sorted(candidates, key=_rank))


def _own_gpu_name(job: Job) -> str | None:
    if job.gpu is None:
        return None
    return job.gpu.name if isinstance(job.gpu, GpuSpec) else find_gpu(job.gpu).name


def _as_job_field(gpu: GpuSpec) -> str | GpuSpec:
    """A catalogued product by its name, so that the answer's job stays readable."""
    try:
        return gpu.name if find_gpu(gpu.name) == gpu else gpu
    except CostModelError:
        return gpu


def _priced_gpus(tiers: Sequence[str]) -> list[GpuSpec]:
    names = dict.fromkeys(price.gpu for price in list_prices() if price.tier in tiers)
    return [find_gpu(name) for name in names]


def _prices(gpu: GpuSpec, job: Job, tiers: Sequence[str]) -> list[Price]:
    prices = []
    for tier in tiers:
        try:
            prices.append(find_price(gpu, cloud=job.cloud, tier=tier, num_gpus=job.num_gpus))
        except UnknownNameError:  # of the cloud or the tier: the user's mistake
            raise
        except CostModelError:
            continue
    return prices


def _candidate(job: Job, gpu: GpuSpec, terms: dict[str, Any], price: Price | None = None) -> Candidate:
    try:
        answer = estimate(job.model_copy(update={"gpu": _as_job_field(gpu), **terms}))
    except CostModelError as error:
        return Candidate(gpu.name, job.num_gpus, price, None, error=str(error))
    return Candidate(gpu.name, job.num_gpus, price or answer.price, answer)


def _rank(candidate: Candidate) -> tuple[float, ...] | tuple[float | str, ...]:
    def known(value: float | None) -> float:
        return math.inf if value is None else value

    step_seconds = candidate.estimate.step_seconds if candidate.estimate else None
    return (
        0 if candidate.fits else 1 if candidate.estimate else 2,
        known(candidate.total_usd),
        known(step_seconds) * known(candidate.bill_usd_per_hour),
        known(step_seconds),
        candidate.gpu,
    )


def _with_pareto_front(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    def beaten(usd: float, seconds: float) -> bool:
        return any(
            other.fits
            and other.total_usd is not None
            and other.total_seconds is not None
            and other.total_usd <= usd
            and other.total_seconds <= seconds
            and (other.total_usd, other.total_seconds) != (usd, seconds)
            for other in candidates
        )

    marked = []
    for each in candidates:
        usd, seconds = each.total_usd, each.total_seconds
        on_front = each.fits and usd is not None and seconds is not None and not beaten(usd, seconds)
        marked.append(dataclasses.replace(each, on_pareto_front=on_front))
    return tuple(marked)
