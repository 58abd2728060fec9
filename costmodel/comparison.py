"""The same job on other GPUs, each with its best micro-batch and checkpointing.

What the job trains on and for how long stays, and so do the samples in an optimizer step: a larger micro-batch means fewer
of them.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from costmodel.alternatives import other_checkpointing
from costmodel.answer import Estimate
from costmodel.arguments import as_day, as_flag
from costmodel.candidates import (
    FITTING_VERDICTS,
    UNPRICED,
    Candidate,
    candidate_at,
    named_gpus,
    offers_of,
    own_gpu_name,
    rank,
    spot_terms_or_none,
    tiers_to_search,
    with_pareto_front,
)
from costmodel.errors import CostModelError, UnknownNameError
from costmodel.estimation import merged_job
from costmodel.gpu_catalog import find_gpu
from costmodel.price_catalog import list_prices
from costmodel.specs import GpuSpec, Job, parse_job
from costmodel.spot import SpotTerms
from costmodel.trials import (
    Trials,
    batch_settings,
    best_of,
    fitting_batches,
    rows_per_step,
    with_counted_lengths,
)

ORDERS: Final = ("usd", "time")


def compare(
    job: Job | Mapping[str, Any] | None = None,
    gpus: str | GpuSpec | Iterable[str | GpuSpec] | None = None,
    tiers: str | Sequence[str] | None = None,
    *,
    by: str = "usd",
    as_is: bool = False,
    spot: SpotTerms | None = None,
    today: datetime.date | None = None,
    **fields: Any,
) -> tuple[Candidate, ...]:
    """The job on each of ``gpus`` (default: all with a dated price), at each cloud's cheapest price of each tier.

    Keyword ``fields`` come on top of ``job``, as :func:`costmodel.estimate` takes them.

    On each GPU with its own best micro-batch (at the same samples per optimizer step) and checkpointing, unless
    ``as_is``. Fitting candidates come first, by total dollars or ``by="time"`` (by the bill of a step, or its time, where
    totals are unknown). ``tiers``: default the job's, else on demand. A named GPU without a price is compared in hours.
    ``job.usd_per_gpu_hour`` is the price of the job's own GPU and of no other; ``job.cloud`` restricts the others to that
    cloud. ``spot`` counts interruptions into spot candidates; ``today`` gives stale prices a warning.
    Raises :class:`CostModelError` where the job runs on none.
    """
    if not isinstance(by, str) or by not in ORDERS:
        raise UnknownNameError("order", by, ORDERS)
    as_is, spot, today = as_flag(as_is, "as_is"), spot_terms_or_none(spot), as_day(today, "today")
    job = parse_job(merged_job(job, fields))
    tiers = tiers_to_search(job, tiers)
    named = named_gpus(gpus) if gpus is not None else None
    counted = with_counted_lengths(job)
    candidates: list[Candidate] = []
    for gpu in named if named is not None else _priced_gpus(tiers, job):
        offers = offers_of(gpu, job, tiers)
        if not offers and named is None:
            continue
        settings = {} if as_is else _best_batch_and_checkpointing(counted, gpu)
        for terms, price in offers or [(UNPRICED, None)]:
            candidates.append(candidate_at(job, gpu, terms, price, settings, spot, today))
    if not candidates:
        raise CostModelError(f"no GPU has a dated {' or '.join(tiers)} price" + (f" at {job.cloud}" if job.cloud else ""))
    if all(candidate.estimate is None for candidate in candidates):
        raise CostModelError(candidates[0].error)
    return with_pareto_front(sorted(candidates, key=lambda each: rank(each, by)))


def _priced_gpus(tiers: Sequence[str], job: Job) -> list[GpuSpec]:
    names = dict.fromkeys(price.gpu for price in list_prices() if price.tier in tiers)
    own = own_gpu_name(job)
    if own and job.usd_per_gpu_hour is not None and not isinstance(job.gpu, GpuSpec):
        names.setdefault(own)
    return [find_gpu(name) for name in names]


def _best_batch_and_checkpointing(job: Job, gpu: GpuSpec) -> Mapping[str, Any]:
    """Micro-batch and checkpointing that make this GPU fastest at the same samples per step. ``{}``: as it is."""
    trials = Trials(job, gpu)
    base = trials({})
    if base is None:
        return {}
    start = base.job
    tried: list[tuple[Mapping[str, Any], Estimate]] = [({}, base)]
    both: tuple[Mapping[str, Any], ...] = (other_checkpointing(start), {})
    for checkpointing in both:
        tried += fitting_batches(trials, checkpointing, batch_settings(start, rows_per_step(start)))
    if any(answer.verdict in FITTING_VERDICTS for _, answer in tried):
        return best_of(tried)[0]
    # Nothing fits: where it comes closest.
    smallest = next(batch_settings(start, rows_per_step(start)))
    tried += [(each, answer) for one in both if (answer := trials(each := {**one, **smallest})) is not None]
    return max(tried, key=lambda each: each[1].headroom_bytes or 0)[0]  # below 0 here
