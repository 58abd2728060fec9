"""The same job elsewhere or otherwise: on other GPUs (``compare``) and with other settings (``optimize``).

Both keep what the job trains on and for how long. The samples in an optimizer step stay the same: a larger micro-batch
means fewer of them. Only what fits the card is suggested; where the upper end of the interval is over it, only if nothing
else fits.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from costmodel.alternatives import alternatives, changes_what_is_learned, needs, other_checkpointing
from costmodel.catalog import TIERS, bill_usd_per_hour, find_cloud, find_gpu, find_price, list_prices, stale_price_warning
from costmodel.errors import CostModelError, UnknownNameError
from costmodel.estimation import PRICE_VARIABLE, Estimate, estimate
from costmodel.lengths import distribution
from costmodel.specs import GpuSpec, Job, Lengths, Price, parse_job
from costmodel.spot import SPOT_WITHOUT_RATE, SpotRun, SpotTerms, spot_run
from costmodel.units import SECONDS_PER_HOUR

ORDERS: Final = ("usd", "time")

# Two settings whose times differ by less are the same to this model: then the one that changes less is taken.
INDIFFERENT: Final = 0.005
# A packed row holds a whole number of samples only on average: so far may the samples of a step move.
EFFECTIVE_BATCH_TOLERANCE: Final = 0.25
_NO_EFFECT: Final = 0.002
# Below this share of time and memory a change is not worth a line of its own.
_WORTH_A_LINE: Final = 0.01
_MAX_GPUS_IN_DEPTH: Final = 4

BATCH: Final = "batch"
_BATCH_FIELDS: Final = ("per_device_train_batch_size", "gradient_accumulation_steps")
_QUANTIZATION_FIELDS: Final = ("method", "quantization", "double_quant", "dtype")
_UNPRICED: Final[Mapping[str, Any]] = {"usd_per_gpu_hour": None, "cloud": None, "tier": None}


@dataclass(frozen=True, slots=True)
class Candidate:
    """The job on one GPU at one price. ``estimate`` is ``None`` where the job cannot run there: ``error`` says why.

    ``settings`` are the fields that differ from the job as it was given. With ``spot`` (interruptions counted in), the
    totals are expected ones.
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

    @property
    def fits(self) -> bool:
        """Fits or is tight, as for the exit code."""
        return self.estimate is not None and self.estimate.verdict in ("fits", "tight")

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
            "error": self.error or None,
            "estimate": self.estimate.to_dict() if self.estimate else None,
        }


@dataclass(frozen=True, slots=True)
class Change:
    """One change to the job and what it alone saves (negative: costs), against the job as given on the same GPU.

    ``held`` names the fields among ``settings`` that stay unless freed (given in the job, or trained weights in 16 bit):
    told, but not part of the best combination. ``only_with_others``: alone it moves less than 1 % or does not
    fit, but it is part of the best.
    Dollars and seconds are ``None`` where a total is unknown or the job as given does not run at all.
    """

    settings: Mapping[str, Any]
    estimate: Estimate
    saves_usd: float | None
    saves_seconds: float | None
    saves_bytes: int
    held: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    only_with_others: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "settings": dict(self.settings),
            "verdict": self.estimate.verdict,
            "saves_usd": self.saves_usd,
            "saves_seconds": self.saves_seconds,
            "saves_bytes": self.saves_bytes,
            "held": list(self.held),
            "needs": list(self.needs),
            "only_with_others": self.only_with_others,
        }


@dataclass(frozen=True, slots=True)
class OptimizeResult:
    """The job as given (``start``), each change alone, and the best combination that fits and meets the limits.

    ``others``: the best on each other GPU that was searched. ``unmet``: a sentence for each limit that ``best`` does not
    keep. ``effective_batch_size``: samples of an optimizer step before and after, where lengths are known.
    """

    start: Candidate
    changes: tuple[Change, ...]
    best: Candidate
    saves_usd: float | None
    saves_seconds: float | None
    saves_bytes: int
    needs: tuple[str, ...]
    effective_batch_size: tuple[float | None, float | None]
    others: tuple[Candidate, ...]
    unmet: tuple[str, ...]
    num_estimates: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "start": self.start.to_dict(),
            "changes": [change.to_dict() for change in self.changes],
            "best": self.best.to_dict(),
            "saves_usd": self.saves_usd,
            "saves_seconds": self.saves_seconds,
            "saves_bytes": self.saves_bytes,
            "needs": list(self.needs),
            "effective_batch_size": list(self.effective_batch_size),
            "others": [candidate.to_dict() for candidate in self.others],
            "unmet": list(self.unmet),
            "num_estimates": self.num_estimates,
        }


# --- compare ----------------------------------------------------------------------------------------------------------


def compare(
    job: Job | Mapping[str, Any],
    gpus: Iterable[str | GpuSpec] | None = None,
    tiers: Sequence[str] | None = None,
    *,
    by: str = "usd",
    as_is: bool = False,
    spot: SpotTerms | None = None,
    today: datetime.date | None = None,
) -> tuple[Candidate, ...]:
    """The job on each of ``gpus`` (default: all with a dated price), at each cloud's cheapest price of each tier.

    On each GPU with its own best micro-batch (at the same samples per optimizer step) and checkpointing, unless
    ``as_is``. Fitting candidates come first, by total dollars or ``by="time"`` (by the bill of a step, or its time, where
    totals are unknown). ``tiers``: default the job's, else on demand. A named GPU without a price is compared in hours.
    ``job.usd_per_gpu_hour`` is the price of the job's own GPU and of no other; ``job.cloud`` restricts the others to that
    cloud. ``spot`` counts interruptions into spot candidates; ``today`` gives stale prices a warning.
    Raises :class:`CostModelError` where the job runs on none.
    """
    if by not in ORDERS:
        raise UnknownNameError("order", by, ORDERS)
    job = parse_job(job)
    tiers = tuple(tiers) if tiers else (job.tier or "on_demand",)
    for tier in tiers:
        if tier not in TIERS:
            raise UnknownNameError("tier", tier, TIERS)
    named = _named_gpus(gpus) if gpus is not None else None
    counted = _with_counted_lengths(job)
    candidates: list[Candidate] = []
    for gpu in named if named is not None else _priced_gpus(tiers, job):
        offers = _offers(gpu, job, tiers)
        if not offers and named is None:
            continue
        settings = {} if as_is else _best_batch_and_checkpointing(counted, gpu)
        for terms, price in offers or [(_UNPRICED, None)]:
            candidates.append(_candidate(job, gpu, terms, price, settings, spot, today))
    if not candidates:
        raise CostModelError(f"no GPU has a dated {' or '.join(tiers)} price" + (f" at {job.cloud}" if job.cloud else ""))
    if all(candidate.estimate is None for candidate in candidates):
        raise CostModelError(candidates[0].error)
    return _with_pareto_front(sorted(candidates, key=lambda each: _rank(each, by)))


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


def _priced_gpus(tiers: Sequence[str], job: Job) -> list[GpuSpec]:
    names = dict.fromkeys(price.gpu for price in list_prices() if price.tier in tiers)
    own = _own_gpu_name(job)
    if own and job.usd_per_gpu_hour is not None and not isinstance(job.gpu, GpuSpec):
        names.setdefault(own)
    return [find_gpu(name) for name in names]


def _offers(gpu: GpuSpec, job: Job, tiers: Sequence[str]) -> list[tuple[Mapping[str, Any], Price | None]]:
    """The terms to put into the job and the price they lead to: its own price, or each cloud's cheapest of each tier."""
    if gpu.name == _own_gpu_name(job) and _has_own_price(job):
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


def _candidate(
    job: Job,
    gpu: GpuSpec,
    terms: Mapping[str, Any],
    price: Price | None,
    settings: Mapping[str, Any],
    spot: SpotTerms | None,
    today: datetime.date | None,
) -> Candidate:
    try:
        answer = estimate(job.model_copy(update={"gpu": _as_job_field(gpu), **terms, **settings}))
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


def _known(value: float | None) -> float:
    return math.inf if value is None else value


def _rank(candidate: Candidate, by: str) -> tuple[float | str, ...]:
    step_seconds = _known(candidate.estimate.step_seconds if candidate.estimate else None)
    dollars = (_known(candidate.total_usd), step_seconds * _known(candidate.bill_usd_per_hour))
    times = (_known(candidate.total_seconds), step_seconds)
    cloud = candidate.price.cloud if candidate.price else ""
    order = (*times, *dollars) if by == "time" else (*dollars, *times)
    return (0 if candidate.fits else 1 if candidate.estimate else 2, *order, candidate.gpu, cloud)


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


# --- trying settings --------------------------------------------------------------------------------------------------


def _with_counted_lengths(job: Job) -> Job:
    """The job with its lengths counted once: a file is not read, and a shape not fitted, for each of many estimates."""
    if job.lengths is None or job.lengths.histogram is not None or job.lengths.fixed is not None:
        return job
    counted = distribution(job.lengths, sys.maxsize)
    histogram = dict(zip(counted.lengths, counted.shares, strict=True))
    return job.model_copy(update={"lengths": Lengths(histogram=histogram)})


class _Trials:
    """Estimates of one job on one GPU under changed settings, each asked for once."""

    def __init__(self, job: Job, gpu: GpuSpec) -> None:
        self._job = job.model_copy(update={"gpu": _as_job_field(gpu), **_UNPRICED})
        self._answers: dict[frozenset[tuple[str, Any]], Estimate | None] = {}

    def __call__(self, settings: Mapping[str, Any]) -> Estimate | None:
        """``None`` where these settings cannot run."""
        key = frozenset(settings.items())
        if key not in self._answers:
            try:
                self._answers[key] = estimate(self._job.model_copy(update=dict(settings)))
            except CostModelError:
                self._answers[key] = None
        return self._answers[key]

    @property
    def count(self) -> int:
        return len(self._answers)


def _time_of(answer: Estimate) -> float:
    """What is to be small, at any batch size: seconds of the run, of a sample where the total is unknown; else infinity."""
    if answer.total_seconds is not None:
        return answer.total_seconds
    return 1 / answer.samples_per_second if answer.samples_per_second else math.inf


_VERDICTS: Final = {"fits": 0, "tight": 1}


def _worth(answer: Estimate) -> tuple[int, float]:
    """Smaller is better: what surely fits, then what is faster."""
    return _VERDICTS.get(answer.verdict or "", 2), _time_of(answer)


def _best(tried: Iterable[tuple[Mapping[str, Any], Estimate]]) -> tuple[Mapping[str, Any], Estimate]:
    """The fastest that fits; of those that are as fast, the one that changes least, then the smallest in memory."""
    tried = list(tried)
    verdict, seconds = min(_worth(answer) for _, answer in tried)
    as_good = [
        (settings, answer)
        for settings, answer in tried
        if _worth(answer)[0] == verdict and _time_of(answer) <= seconds * (1 + INDIFFERENT)
    ]
    return min(as_good, key=lambda each: (_num_changes(each[0]), -(each[1].headroom_bytes or 0), _time_of(each[1])))


def _num_changes(settings: Mapping[str, Any]) -> int:
    """Fields changed; micro-batch and accumulation are one change."""
    return len({"batch" if name in _BATCH_FIELDS else name for name in settings})


def _batch_settings(start: Mapping[str, Any], product: int) -> Iterator[dict[str, int]]:
    """Each micro-batch times accumulation that makes ``product``, small micro-batches first; only what differs."""
    small = [size for size in range(1, math.isqrt(product) + 1) if product % size == 0]
    for size in sorted({*small, *(product // size for size in small)}):
        yield _batch(start, size, product // size)


def _batch(start: Mapping[str, Any], size: int, accumulation: int) -> dict[str, int]:
    chosen = dict(zip(_BATCH_FIELDS, (size, accumulation), strict=True))
    return {} if all(start.get(name) == value for name, value in chosen.items()) else chosen


def _fitting_batches(
    trials: _Trials, settings: Mapping[str, Any], batches: Iterable[Mapping[str, int]]
) -> Iterator[tuple[Mapping[str, Any], Estimate]]:
    """What fits of ``settings`` with each of ``batches`` (small first): memory only grows, so the first failure ends it."""
    for batch in batches:
        tried = {**settings, **batch}
        answer = trials(tried)
        if answer is None or answer.verdict not in _VERDICTS:
            return
        yield tried, answer


def _best_batch_and_checkpointing(job: Job, gpu: GpuSpec) -> Mapping[str, Any]:
    """Micro-batch and checkpointing that make this GPU fastest at the same samples per step. ``{}``: as it is."""
    trials = _Trials(job, gpu)
    base = trials({})
    if base is None:
        return {}
    start = base.job
    tried: list[tuple[Mapping[str, Any], Estimate]] = [({}, base)]
    both: tuple[Mapping[str, Any], ...] = (other_checkpointing(start), {})
    for checkpointing in both:
        tried += _fitting_batches(trials, checkpointing, _batch_settings(start, _product(start)))
    if any(answer.verdict in _VERDICTS for _, answer in tried):
        return _best(tried)[0]
    # Nothing fits: where it comes closest.
    smallest = next(_batch_settings(start, _product(start)))
    tried += [(each, answer) for one in both if (answer := trials(each := {**one, **smallest})) is not None]
    return max(tried, key=lambda each: each[1].headroom_bytes or 0)[0]  # below 0 here


def _product(start: Mapping[str, Any]) -> int:
    return int(start.get(_BATCH_FIELDS[0]) or 1) * int(start.get(_BATCH_FIELDS[1]) or 1)


# --- optimize ---------------------------------------------------------------------------------------------------------


def optimize(
    job: Job | Mapping[str, Any],
    gpus: Iterable[str | GpuSpec] | None = None,
    tiers: Sequence[str] | None = None,
    *,
    budget_usd: float | None = None,
    deadline_hours: float | None = None,
    free: Iterable[str] = (),
    free_batch: bool = False,
    allow_quantization: bool = False,
    not_given: Iterable[str] = (),
    spot: SpotTerms | None = None,
    today: datetime.date | None = None,
) -> OptimizeResult:
    """Which settings make this job cheaper: each alone, and the best combination that fits the card.

    Searched: micro-batch x accumulation (at the same samples per optimizer step, unless ``free_batch``), checkpointing,
    packing / padding-free / grouping, 16 bit in place of float32, Liger, attention, optimizer within its family, experts,
    and with ``allow_quantization`` how the base is stored. Fields given in the job stay as they are unless named in
    ``free`` (``"all"``: every one), and so does the type of weights that are trained; what that costs is told all the
    same. ``not_given``: fields of ``job`` that are another tool's defaults (``ImportedJob.assumed``), so not fixed. GPUs:
    ``gpus``, else the job's, else those on the Pareto front of :func:`compare`. With a
    deadline the cheapest that keeps it wins, with a budget alone the fastest within it. On ties, the fewest changes.
    Raises :class:`CostModelError` as :func:`compare` does.
    """
    job = parse_job(job)
    free = frozenset(free)
    unknown = free - set(Job.model_fields) - {"all"}
    if unknown:
        raise UnknownNameError("Job field", sorted(unknown)[0], [*Job.model_fields, "all"])
    tiers = tuple(tiers) if tiers else (job.tier or "on_demand",)
    for tier in tiers:
        if tier not in TIERS:
            raise UnknownNameError("tier", tier, TIERS)
    given = {name for name in job.model_fields_set if getattr(job, name) is not None} - set(not_given)
    held = frozenset() if "all" in free else frozenset(given) - free - set(_BATCH_FIELDS)
    if allow_quantization:
        held -= set(_QUANTIZATION_FIELDS)
    counted = _with_counted_lengths(job)
    searches = []
    for gpu in _gpus_to_optimize(job, gpus, tiers):
        trials = _Trials(counted, gpu)
        base = trials({})
        if base is None:
            searches.append(_GpuSearch(gpu, _priced(job, gpu, tiers, {}, spot, today), (), {}, 0))
            continue
        rules: dict[str, Any] = {"allow_quantization": allow_quantization, "held": held, "free": free}
        changes = _single_changes(trials, base, gpu, **rules)
        settings = _best_combination(trials, base, gpu, **rules, free_batch=free_batch)
        start = _priced(job, gpu, tiers, {}, spot, today)
        searches.append(_GpuSearch(gpu, start, changes, settings, trials.count))
    found = [(each, _priced(job, each.gpu, tiers, each.settings, spot, today)) for each in searches]
    if all(candidate.estimate is None for _, candidate in found):
        raise CostModelError(found[0][1].error)
    found.sort(key=lambda each: _rank_with_limits(each[1], budget_usd, deadline_hours))
    chosen, best = found[0]
    return _result(chosen, best, [other for _, other in found[1:]], found, budget_usd, deadline_hours)


@dataclass(frozen=True, slots=True)
class _Alternative:
    """Other values for one group of fields, and the answer with them alone.

    ``shown`` is what a person may do: where the change alone does not fit, or moves the samples of a step, with the
    micro-batch that mends it; ``None`` where none does.
    """

    group: str
    settings: Mapping[str, Any]
    answer: Estimate
    held: tuple[str, ...]
    base: Estimate
    shown: tuple[Mapping[str, Any], Estimate] | None


@dataclass(frozen=True, slots=True)
class _GpuSearch:
    gpu: GpuSpec
    start: Candidate
    alternatives: tuple[_Alternative, ...]
    settings: Mapping[str, Any]
    num_estimates: int


def _named_gpus(gpus: Iterable[str | GpuSpec]) -> list[GpuSpec]:
    """Each product once, however often and by whatever names it is asked for."""
    named: list[GpuSpec] = []
    for gpu in gpus:
        spec = gpu if isinstance(gpu, GpuSpec) else find_gpu(gpu)
        if spec not in named:
            named.append(spec)
    return named


def _gpus_to_optimize(job: Job, gpus: Iterable[str | GpuSpec] | None, tiers: Sequence[str]) -> list[GpuSpec]:
    if gpus is not None:
        return _named_gpus(gpus)
    if job.gpu is not None:
        return [job.gpu if isinstance(job.gpu, GpuSpec) else find_gpu(job.gpu)]
    ranked = compare(job, tiers=tiers)
    front = [each.gpu for each in ranked if each.on_pareto_front] or [ranked[0].gpu]
    return [find_gpu(name) for name in list(dict.fromkeys(front))[:_MAX_GPUS_IN_DEPTH]]


def _priced(
    job: Job,
    gpu: GpuSpec,
    tiers: Sequence[str],
    settings: Mapping[str, Any],
    spot: SpotTerms | None,
    today: datetime.date | None,
) -> Candidate:
    """The job with ``settings`` on this GPU at its cheapest offer."""
    offers = _offers(gpu, job, tiers) or [(_UNPRICED, None)]
    terms, price = min(offers, key=lambda each: bill_usd_per_hour(each[1], job.num_gpus) if each[1] else 0.0)
    return _candidate(job, gpu, terms, price, settings, spot, today)


def _single_changes(
    trials: _Trials,
    base: Estimate,
    gpu: GpuSpec,
    *,
    allow_quantization: bool,
    held: frozenset[str],
    free: frozenset[str],
) -> tuple[_Alternative, ...]:
    """Every change on its own, with the fields in it that stay unless freed."""
    found = []
    for group, different in alternatives(base.job, gpu, allow_quantization=allow_quantization):
        answer = trials(different)
        if answer is None:
            continue
        fixed = tuple(sorted(_held_in(different, base, held, free)))
        shown = _mended(trials, base, different, answer) if _differ(base, answer) else (different, answer)
        found.append(_Alternative(group, different, answer, fixed, base, shown))
    batches = list(_fitting_batches(trials, {}, _batch_settings(base.job, _product(base.job))))
    if batches:
        best_batch, answer = _best([({}, base), *batches])
        if best_batch:
            found.append(_Alternative(BATCH, best_batch, answer, (), base, (best_batch, answer)))
    return tuple(found)


def _held_in(settings: Mapping[str, Any], base: Estimate, held: frozenset[str], free: frozenset[str]) -> frozenset[str]:
    """Fields of a change that stay unless freed. Settings name only what they change: what was given alike is not there."""
    learned = frozenset() if "all" in free else changes_what_is_learned(settings, base.job) - free
    return (held & set(settings)) | learned


def _mended(
    trials: _Trials, base: Estimate, settings: Mapping[str, Any], answer: Estimate
) -> tuple[Mapping[str, Any], Estimate] | None:
    """The change as it is where it fits and keeps the samples of a step, else with the best micro-batch that makes it so."""
    before, after = samples_per_step(base), samples_per_step(answer)
    keeps = before is None or after is None or abs(after / before - 1) <= EFFECTIVE_BATCH_TOLERANCE
    if keeps and answer.verdict in _VERDICTS:
        return settings, answer
    fitting = list(_fitting_batches(trials, settings, _batches(base, answer, free_batch=False)))
    if not fitting:
        return None
    mended, mended_answer = _best(fitting)
    batch_alone = trials({name: mended[name] for name in _BATCH_FIELDS if name in mended})
    return (mended, mended_answer) if batch_alone is None or _differ(batch_alone, mended_answer) else None


def _differ(one: Estimate, other: Estimate, share: float = _NO_EFFECT) -> bool:
    """Whether time or memory moves by more than ``share`` of it, by default more than nothing."""
    before, after = _time_of(one), _time_of(other)
    moved = not math.isinf(before) and abs(after - before) > share * before
    peak = one.memory.peak_device_bytes
    return moved or abs(other.memory.peak_device_bytes - peak) > share * peak


def _best_combination(
    trials: _Trials,
    base: Estimate,
    gpu: GpuSpec,
    *,
    allow_quantization: bool,
    held: frozenset[str],
    free: frozenset[str],
    free_batch: bool,
) -> Mapping[str, Any]:
    """The best of every combination of free changes, each with the micro-batches that fit.

    What is no slower and no larger is taken beforehand, and what is neither faster nor smaller left out: only changes that
    trade time for memory are combined, else the combinations would be thousands.
    """

    def open_changes(answer: Estimate) -> Iterator[tuple[str, dict[str, Any]]]:
        for group, settings in alternatives(answer.job, gpu, allow_quantization=allow_quantization, given=base.job):
            if not _held_in(settings, answer, held, free):
                yield group, settings

    taken: list[Mapping[str, Any]] = []
    current = base
    for one_sided in _ONE_SIDED:
        for group, settings in open_changes(current):
            answer = trials(_united([*taken, settings])) if group == one_sided else None
            if answer is not None and _moves(current, answer) == (True, True):
                current = answer
                taken.append(settings)
    groups: dict[str, list[list[Mapping[str, Any]]]] = {}
    for group, settings in open_changes(current):
        answer = trials(_united([*taken, settings]))
        if answer is not None and (group not in _ONE_SIDED or _moves(current, answer) != (False, False)):
            groups.setdefault(group, [[]]).append([settings])
    tried: list[tuple[Mapping[str, Any], Estimate]] = [({}, base)]
    changes_of: dict[frozenset[tuple[str, Any]], list[Mapping[str, Any]]] = {}
    for choice in itertools.product(*groups.values()):
        changes = [*taken, *itertools.chain.from_iterable(choice)]
        combined = _united(changes)
        first = trials(combined)
        if first is not None:
            some = _spaced(base.job, _batches(base, first, free_batch=free_batch))
            for each in _fitting_batches(trials, combined, some):
                tried.append(each)
                changes_of[frozenset(each[0].items())] = changes
    best = _best(tried)
    changes = changes_of.get(frozenset(best[0].items()), [])
    if changes:  # now with every micro-batch
        combined = _united(changes)
        first = trials(combined)
        every = _batches(base, first, free_batch=free_batch) if first is not None else ()
        best = _best([best, *_fitting_batches(trials, combined, every)])
    return _without_idle_changes(trials, *best, changes)


def _spaced(start: Mapping[str, Any], batches: Iterable[Mapping[str, int]]) -> Iterator[Mapping[str, int]]:
    """Micro-batches (small first) at least half as large again as the one before: enough to tell combinations apart."""
    last = 0.0
    for batch in batches:
        size = batch.get(_BATCH_FIELDS[0]) or start.get(_BATCH_FIELDS[0]) or 1
        if size >= _SPACING * last:
            last = size
            yield batch


_SPACING: Final = 1.5


# Groups whose changes mostly help in time and memory alike, or in neither; 16 bit first, which decides what others may run.
_ONE_SIDED: Final = ("precision", "kernels", "attention", "experts", "optimizer")


def _moves(before: Estimate, after: Estimate) -> tuple[bool, bool]:
    """Whether time and memory are no larger than before, by more than what counts as nothing."""
    memory = after.memory.peak_device_bytes <= before.memory.peak_device_bytes * (1 + _NO_EFFECT)
    return _time_of(after) <= _time_of(before) * (1 + _NO_EFFECT), memory


def _united(changes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for change in changes for name, value in change.items()}


def _without_idle_changes(
    trials: _Trials, settings: Mapping[str, Any], answer: Estimate, changes: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """The same without each whole change that is worth less than half a percent beside the others."""
    limit = _time_of(answer) * (1 + INDIFFERENT)
    batch = {name: value for name, value in settings.items() if name in _BATCH_FIELDS}
    for change in changes:
        others = [other for other in changes if other is not change]
        fewer = {**_united(others), **batch}
        without = trials(fewer)
        if without is not None and without.verdict == answer.verdict and _time_of(without) <= limit:
            settings, changes = fewer, others
    return settings


def _batches(base: Estimate, answer: Estimate, *, free_batch: bool) -> Iterator[Mapping[str, int]]:
    """Micro-batches to try with the settings of ``answer``, small ones first."""
    start = base.job
    if free_batch:
        sizes = {2**power for power in range(11)}
        sizes |= {int(start.get(_BATCH_FIELDS[0]) or 1), max(1, answer.max_batch_size or 1)}
        yield from (_batch(start, size, 1) for size in sorted(sizes))
        return
    before, after = samples_per_step(base), samples_per_step(answer)
    rows = _product(start)
    if before is not None and after is not None:
        samples_per_row = after / rows
        rows = max(1, round(before / samples_per_row))
        if abs(rows * samples_per_row / before - 1) > EFFECTIVE_BATCH_TOLERANCE:
            return
    yield from _batch_settings(start, rows)


def samples_per_step(answer: Estimate) -> float | None:
    """Samples of one optimizer step, on one GPU or all: as the answer counts them; ``None`` where lengths are unknown."""
    if answer.samples_per_second is None or answer.step_seconds is None:
        return None
    return answer.samples_per_second * answer.step_seconds


def _rank_with_limits(candidate: Candidate, budget_usd: float | None, deadline_hours: float | None) -> tuple[Any, ...]:
    by = "time" if budget_usd is not None and deadline_hours is None else "usd"
    fits, *order = _rank(candidate, by)
    return (fits, len(_unmet(candidate, budget_usd, deadline_hours)), *order)


def _unmet(candidate: Candidate, budget_usd: float | None, deadline_hours: float | None) -> tuple[str, ...]:
    unmet = []
    if budget_usd is not None and _known(candidate.total_usd) > budget_usd:
        unmet.append("budget_usd")
    if deadline_hours is not None and _known(candidate.total_seconds) > deadline_hours * SECONDS_PER_HOUR:
        unmet.append("deadline_hours")
    return tuple(unmet)


def _result(
    chosen: _GpuSearch,
    best: Candidate,
    others: Sequence[Candidate],
    found: Sequence[tuple[_GpuSearch, Candidate]],
    budget_usd: float | None,
    deadline_hours: float | None,
) -> OptimizeResult:
    start = chosen.start
    usd_per_second = None
    if start.total_usd is not None and start.total_seconds:
        usd_per_second = start.total_usd / start.total_seconds

    def saved(before: float | None, after: float | None) -> float | None:
        return before - after if start.fits and before is not None and after is not None else None

    shown = [(each, *(each.shown or (each.settings, each.answer))) for each in chosen.alternatives]
    idle = [each.shown is None or not _differ(each.base, answer, _WORTH_A_LINE) for each, _, answer in shown]
    told: set[str] = set()  # fields of the best that a line names
    changes = []
    for only_with_others, (each, settings, answer) in sorted(zip(idle, shown, strict=True), key=lambda pair: pair[0]):
        is_in_best = best.settings.items() >= each.settings.items()
        if only_with_others and (not is_in_best or told >= set(each.settings)):
            continue
        told |= set(each.settings) if is_in_best else set()
        seconds = saved(each.base.total_seconds, answer.total_seconds)
        changes.append(
            Change(
                settings=settings,
                estimate=answer,
                saves_usd=seconds * usd_per_second if seconds is not None and usd_per_second is not None else None,
                saves_seconds=seconds,
                saves_bytes=each.base.memory.peak_device_bytes - answer.memory.peak_device_bytes,
                held=each.held,
                needs=needs(settings, each.base.job),
                only_with_others=only_with_others,
            )
        )
    changes.sort(key=lambda change: (-(change.saves_seconds or 0.0), -change.saves_bytes))
    peak = start.estimate.memory.peak_device_bytes if start.estimate else 0
    best_peak = best.estimate.memory.peak_device_bytes if best.estimate else 0
    return OptimizeResult(
        start=start,
        changes=tuple(changes),
        best=best,
        saves_usd=saved(start.total_usd, best.total_usd),
        saves_seconds=saved(start.total_seconds, best.total_seconds),
        saves_bytes=peak - best_peak,
        needs=needs(best.settings, start.estimate.job) if start.estimate else (),
        effective_batch_size=tuple(  # type: ignore[arg-type]
            samples_per_step(each.estimate) if each.estimate else None for each in (start, best)
        ),
        others=tuple(others),
        unmet=_unmet(best, budget_usd, deadline_hours),
        num_estimates=sum(search.num_estimates for search, _ in found),
    )
