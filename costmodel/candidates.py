"""The same job on one GPU at one price, and which of two such candidates comes first."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from costmodel.answer import Estimate
from costmodel.arguments import as_names, must_be
from costmodel.errors import CostModelError, UnknownNameError
from costmodel.estimation import PRICE_VARIABLE, estimate
from costmodel.formats import format_seconds, format_usd
from costmodel.gpu_catalog import find_gpu
from costmodel.price_catalog import TIERS, bill_usd_per_hour, find_cloud, find_price, list_prices, stale_price_warning
from costmodel.specs import GpuSpec, Job, Price
from costmodel.spot import SPOT_WITHOUT_RATE, SpotRun, SpotTerms, spot_run

# The better one first; for the exit code, tight fits.
FITTING_VERDICTS: Final = {"fits": 0, "tight": 1}
UNPRICED: Final[Mapping[str, Any]] = {"usd_per_gpu_hour": None, "cloud": None, "tier": None}


@dataclass(frozen=True, slots=True)
class Candidate:
    """The job on one GPU at one price. ``estimate`` is ``None`` where the job cannot run there: ``error`` says why.

    ``settings`` are the fields that differ from the job as it was given. With ``spot`` (interruptions counted in), the
    totals are expected ones. ``unmet``: the limits of a search that it does not keep, by name.
    """

    gpu: str
    num_gpus: int
    price: Price | None
    estimate: Estimate | None
    error: str = ""
    on_pareto_front: bool = False  # no other fitting candidate is both cheaper and faster
    settings: Mapping[str, Any] = field(default_factory=dict)
    spot: SpotRun | None = None
    warnings: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.estimate is not None and self.estimate.verdict in FITTING_VERDICTS

    @property
    def total_usd(self) -> float | None:
        if self.spot is not None:
            return self.spot.expected_usd
        return self.estimate.total_usd if self.estimate else None

    @property
    def total_seconds(self) -> float | None:
        if self.spot is not None:
            return self.spot.expected_seconds
        return self.estimate.total_seconds if self.estimate else None

    def __repr__(self) -> str:
        """In a line, for a notebook; ``to_dict`` and ``estimate`` hold the rest."""
        where = f" at {self.price.cloud} {self.price.tier}".rstrip() if self.price else ""
        facts = [self.estimate.verdict.replace("_", " ") if self.estimate and self.estimate.verdict else self.error]
        if self.total_seconds is not None:
            facts.append(format_seconds(self.total_seconds))
        if self.total_usd is not None:
            facts.append(format_usd(self.total_usd))
        settings = f", with {dict(self.settings)}" if self.settings else ""
        return f"<Candidate {self.num_gpus} x {self.gpu}{where}: {', '.join(filter(None, facts))}{settings}>"

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
            "settings": dict(self.settings),
            "total_usd": self.total_usd,
            "total_seconds": self.total_seconds,
            "spot": self.spot.to_dict() if self.spot else None,
            "warnings": list(self.warnings),
            "unmet": list(self.unmet),
            "error": self.error or None,
            "estimate": self.estimate.to_dict() if self.estimate else None,
        }


def tiers_to_search(job: Job, tiers: str | Iterable[str] | None) -> tuple[str, ...]:
    """``tiers``, by default the job's, else on demand. Raises :class:`CostModelError`."""
    if tiers is None:
        return (job.tier or "on_demand",)
    wanted = tuple(as_names(tiers, "tiers", '["on_demand", "spot"]'))
    if not wanted:
        raise CostModelError("tiers is empty; leave it out for the job's own, else on demand")
    for tier in wanted:
        if not isinstance(tier, str) or tier not in TIERS:
            raise UnknownNameError("tier", tier, TIERS)
    return wanted


def own_gpu_name(job: Job) -> str | None:
    if job.gpu is None:
        return None
    return job.gpu.name if isinstance(job.gpu, GpuSpec) else find_gpu(job.gpu).name


def as_job_field(gpu: GpuSpec) -> str | GpuSpec:
    """A catalogued product by its name, so that the answer's job stays readable."""
    try:
        return gpu.name if find_gpu(gpu.name) == gpu else gpu
    except CostModelError:
        return gpu


def offers_of(gpu: GpuSpec, job: Job, tiers: Sequence[str]) -> list[tuple[Mapping[str, Any], Price | None]]:
    """The terms to put into the job and the price they lead to: its own price, or each cloud's cheapest of each tier."""
    if gpu.name == own_gpu_name(job) and _has_own_price(job):
        return [({}, None)]
    wanted_cloud = find_cloud(job.cloud) if job.cloud else None
    offered = dict.fromkeys(
        (price.cloud, price.tier)
        for price in list_prices()
        if price.gpu == gpu.name and price.tier in tiers and wanted_cloud in (None, price.cloud)
    )
    offers: list[tuple[Mapping[str, Any], Price | None]] = []
    for cloud, tier in offered:
        price = find_price(gpu, cloud=cloud, tier=tier, num_gpus=job.num_gpus)
        offers.append(({"usd_per_gpu_hour": None, "cloud": price.cloud, "tier": price.tier}, price))
    return offers


def _has_own_price(job: Job) -> bool:
    says_where = job.cloud is not None or job.tier is not None
    return job.usd_per_gpu_hour is not None or (not says_where and bool(os.environ.get(PRICE_VARIABLE)))


def candidate_at(
    job: Job,
    gpu: GpuSpec,
    terms: Mapping[str, Any],
    price: Price | None,
    settings: Mapping[str, Any],
    spot: SpotTerms | None,
    today: datetime.date | None,
) -> Candidate:
    try:
        answer = estimate(job.model_copy(update={"gpu": as_job_field(gpu), **terms, **settings}))
    except CostModelError as error:
        return Candidate(gpu.name, job.num_gpus, price, None, error=str(error))
    price = price or answer.price
    warnings = [stale_price_warning(price, today)] if price and today else []
    warnings += [warning for warning in answer.warnings if "calibration" in warning]  # asked for, and not used everywhere
    interrupted = None
    if price is not None and terms.get("tier", job.tier) == "spot":
        interrupted = spot_run(answer.to_dict(), spot) if spot else None
        warnings.append(SPOT_WITHOUT_RATE if spot is None else None)
        warnings += interrupted.warnings if interrupted else ()
    return Candidate(
        gpu.name,
        job.num_gpus,
        price,
        answer,
        settings=settings,
        spot=interrupted,
        warnings=tuple(warning for warning in warnings if warning),
    )


def or_infinity(value: float | None) -> float:
    return math.inf if value is None else value


def rank(candidate: Candidate, by: str) -> tuple[float | str, ...]:
    step_seconds = or_infinity(candidate.estimate.step_seconds if candidate.estimate else None)
    dollars = (or_infinity(candidate.total_usd), step_seconds * or_infinity(candidate.bill_usd_per_hour))
    times = (or_infinity(candidate.total_seconds), step_seconds)
    cloud = candidate.price.cloud if candidate.price else ""
    order = (*times, *dollars) if by == "time" else (*dollars, *times)
    return (0 if candidate.fits else 1 if candidate.estimate else 2, *order, candidate.gpu, cloud)


def with_pareto_front(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The same in the same order, each with whether it is on the front."""

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


def spot_terms_or_none(spot: object) -> SpotTerms | None:
    if spot is not None and not isinstance(spot, SpotTerms):
        raise must_be("spot", "a costmodel.spot.SpotTerms(interruptions_per_hour=...)", spot)
    return spot


def named_gpus(gpus: str | GpuSpec | Iterable[str | GpuSpec]) -> list[GpuSpec]:
    """Each product once, however often and by whatever names it is asked for. Raises :class:`CostModelError`."""
    wanted = [gpus] if isinstance(gpus, GpuSpec) else as_names(gpus, "gpus", '["L4", "H100 SXM"]')
    if not wanted:
        raise CostModelError("gpus is empty; leave it out for all that are to be compared")
    named: list[GpuSpec] = []
    for gpu in wanted:
        spec = gpu if isinstance(gpu, GpuSpec) else find_gpu(gpu)
        if spec not in named:
            named.append(spec)
    return named
