"""The same job with other settings: what each change saves, and the best combination that fits.

What the job trains on and for how long stays. The samples in an optimizer step stay the same: a larger micro-batch means
fewer of them. Only what fits the card is suggested; where the upper end of the interval is over it, only if nothing else
fits.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from costmodel.alternatives import alternatives, changes_what_is_learned, needs
from costmodel.answer import Estimate
from costmodel.arguments import as_day, as_flag, as_limit, as_names
from costmodel.candidates import (
    FITTING_VERDICTS,
    UNPRICED,
    Candidate,
    candidate_at,
    named_gpus,
    offers_of,
    or_infinity,
    rank,
    spot_terms_or_none,
    tiers_to_search,
    with_pareto_front,
)
from costmodel.comparison import compare
from costmodel.errors import CostModelError, UnknownNameError
from costmodel.estimation import merged_job
from costmodel.formats import format_usd
from costmodel.gpu_catalog import find_gpu
from costmodel.price_catalog import bill_usd_per_hour
from costmodel.specs import GpuSpec, Job, parse_job
from costmodel.spot import SpotTerms
from costmodel.trials import (
    BATCH_FIELDS,
    INDIFFERENT,
    Trials,
    batch_change,
    batch_settings,
    best_of,
    fitting_batches,
    rows_per_step,
    time_of,
    with_counted_lengths,
)
from costmodel.units import SECONDS_PER_HOUR

# A packed row holds a whole number of samples only on average: so far may the samples of a step move.
EFFECTIVE_BATCH_TOLERANCE: Final = 0.25
_NO_EFFECT: Final = 0.002
# Below this share of time and memory a change is not worth a line of its own.
_WORTH_A_LINE: Final = 0.01
_MAX_GPUS_IN_DEPTH: Final = 4

BATCH: Final = "batch"
_QUANTIZATION_FIELDS: Final = ("method", "quantization", "double_quant", "dtype")


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

    def __repr__(self) -> str:
        saved = self.saves_usd
        usd = "" if saved is None else f", {'saves' if saved >= 0 else 'costs'} {format_usd(abs(saved))}"
        held = f", held: {', '.join(self.held)}" if self.held else ""
        return f"<Change {dict(self.settings)}: {str(self.estimate.verdict).replace('_', ' ')}{usd}{held}>"

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
    """The job as given (``start``), each change that saves time or memory alone, and the best combination within the limits.

    ``others``: the best on each other GPU that was searched: those that keep the limits first, then by ``ranked_by``
    ("usd", or "time" with a budget alone). ``unmet``: the limits that ``best`` does not keep, by name.
    ``effective_batch_size``: samples of an optimizer step before and after, where lengths are known.
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
    ranked_by: str = "usd"

    def __repr__(self) -> str:
        """A few lines, for a notebook; the fields hold the rest."""
        lines = [f"start: {self.start!r}", f"best: {self.best!r}", *(f"  {change!r}" for change in self.changes)]
        return "\n".join(["<OptimizeResult", *lines, *(f"other: {other!r}" for other in self.others)]) + ">"

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
            "ranked_by": self.ranked_by,
        }


def optimize(
    job: Job | Mapping[str, Any] | None = None,
    gpus: str | GpuSpec | Iterable[str | GpuSpec] | None = None,
    tiers: str | Sequence[str] | None = None,
    *,
    budget_usd: float | None = None,
    deadline_hours: float | None = None,
    free: str | Iterable[str] = (),
    free_batch: bool = False,
    allow_quantization: bool = False,
    not_given: str | Iterable[str] = (),
    spot: SpotTerms | None = None,
    today: datetime.date | None = None,
    **fields: Any,
) -> OptimizeResult:
    """Which settings make this job cheaper: each alone, and the best combination that fits the card.

    Keyword ``fields`` come on top of ``job``, as :func:`costmodel.estimate` takes them.

    Searched: micro-batch x accumulation (at the same samples per optimizer step, unless ``free_batch``), checkpointing,
    packing / padding-free / grouping, 16 bit in place of float32, Liger, attention, optimizer within its family, experts,
    and with ``allow_quantization`` how the base is stored. Fields given in the job stay as they are unless named in
    ``free`` (``"all"``: every one), and so does the type of weights that are trained; what that costs is told all the
    same. ``not_given``: fields of ``job`` that are another tool's defaults (``ImportedJob.assumed``), so not fixed. GPUs:
    ``gpus``, else the job's, else those on the Pareto front of :func:`compare`. With a
    deadline the cheapest that keeps it wins, with a budget alone the fastest within it. On ties, the fewest changes.
    Raises :class:`CostModelError` as :func:`compare` does.
    """
    job = parse_job(merged_job(job, fields))
    free = _job_fields(free, "free", also=("all",))
    not_given = _job_fields(not_given, "not_given")
    free_batch = as_flag(free_batch, "free_batch")
    allow_quantization = as_flag(allow_quantization, "allow_quantization")
    budget_usd = as_limit(budget_usd, "budget_usd", "dollars")
    deadline_hours = as_limit(deadline_hours, "deadline_hours", "hours")
    spot, today = spot_terms_or_none(spot), as_day(today, "today")
    tiers = tiers_to_search(job, tiers)
    given = {name for name in job.model_fields_set if getattr(job, name) is not None} - not_given
    held = frozenset() if "all" in free else frozenset(given) - free - set(BATCH_FIELDS)
    if allow_quantization:
        held -= set(_QUANTIZATION_FIELDS)
    rules = _Rules(held, free, free_batch=free_batch, allow_quantization=allow_quantization)
    counted = with_counted_lengths(job)
    searches = []
    for gpu in _gpus_to_optimize(job, gpus, tiers):
        trials = Trials(counted, gpu)
        base = trials({})
        if base is None:
            searches.append(_GpuSearch(gpu, _priced(job, gpu, tiers, {}, spot, today), (), {}, 0))
            continue
        changes = _single_changes(trials, base, gpu, rules)
        settings = _best_combination(trials, base, gpu, rules)
        start = _priced(job, gpu, tiers, {}, spot, today)
        searches.append(_GpuSearch(gpu, start, changes, settings, trials.count))
    priced = with_pareto_front([_priced(job, each.gpu, tiers, each.settings, spot, today) for each in searches])
    if all(candidate.estimate is None for candidate in priced):
        raise CostModelError(priced[0].error)
    held_against = [dataclasses.replace(each, unmet=_unmet(each, budget_usd, deadline_hours)) for each in priced]
    by = "time" if budget_usd is not None and deadline_hours is None else "usd"
    found = sorted(zip(searches, held_against, strict=True), key=lambda each: _rank_with_limits(each[1], by))
    return _result(found, by)


@dataclass(frozen=True, slots=True)
class _Rules:
    """What may change: ``held`` fields stay as given, ``free`` ones may change though given or learned from."""

    held: frozenset[str]
    free: frozenset[str]
    free_batch: bool
    allow_quantization: bool

    def held_in(self, settings: Mapping[str, Any], base: Estimate) -> frozenset[str]:
        """Fields of a change that stay unless freed. Settings name only what they change, not what was given alike."""
        learned = frozenset() if "all" in self.free else changes_what_is_learned(settings, base.job) - self.free
        return (self.held & set(settings)) | learned


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


def _job_fields(names: str | Iterable[str], argument: str, also: Sequence[str] = ()) -> frozenset[str]:
    """The named fields of a job. Raises :class:`CostModelError` for a name that is none, nor one of ``also``."""
    known = [*Job.model_fields, *also]
    wanted = as_names(names, argument, '["optim"]')
    for name in wanted:
        if not isinstance(name, str) or name not in known:
            raise UnknownNameError("Job field", name, known, way_out=f"{argument} names fields of the job")
    return frozenset(wanted)


def _gpus_to_optimize(job: Job, gpus: str | GpuSpec | Iterable[str | GpuSpec] | None, tiers: Sequence[str]) -> list[GpuSpec]:
    if gpus is not None:
        return named_gpus(gpus)
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
    offers = offers_of(gpu, job, tiers) or [(UNPRICED, None)]
    terms, price = min(offers, key=lambda each: bill_usd_per_hour(each[1], job.num_gpus) if each[1] else 0.0)
    return candidate_at(job, gpu, terms, price, settings, spot, today)


def _single_changes(
    trials: Trials,
    base: Estimate,
    gpu: GpuSpec,
    rules: _Rules,
) -> tuple[_Alternative, ...]:
    """Every change on its own, with the fields in it that stay unless freed."""
    found = []
    for group, different in alternatives(base.job, gpu, allow_quantization=rules.allow_quantization):
        answer = trials(different)
        if answer is None:
            continue
        fixed = tuple(sorted(rules.held_in(different, base)))
        shown = _mended(trials, base, different, answer) if _differ(base, answer) else (different, answer)
        found.append(_Alternative(group, different, answer, fixed, base, shown))
    batches = list(fitting_batches(trials, {}, batch_settings(base.job, rows_per_step(base.job))))
    if batches:
        best_batch, answer = best_of([({}, base), *batches])
        if best_batch:
            found.append(_Alternative(BATCH, best_batch, answer, (), base, (best_batch, answer)))
    return tuple(found)


def _mended(
    trials: Trials, base: Estimate, settings: Mapping[str, Any], answer: Estimate
) -> tuple[Mapping[str, Any], Estimate] | None:
    """The change as it is where it fits and keeps the samples of a step, else with the best micro-batch that makes it so."""
    before, after = samples_per_step(base), samples_per_step(answer)
    keeps = before is None or after is None or abs(after / before - 1) <= EFFECTIVE_BATCH_TOLERANCE
    if keeps and answer.verdict in FITTING_VERDICTS:
        return settings, answer
    fitting = list(fitting_batches(trials, settings, _batches(base, answer, free_batch=False)))
    if not fitting:
        return None
    mended, mended_answer = best_of(fitting)
    batch_alone = trials({name: mended[name] for name in BATCH_FIELDS if name in mended})
    return (mended, mended_answer) if batch_alone is None or _differ(batch_alone, mended_answer) else None


def _differ(one: Estimate, other: Estimate, share: float = _NO_EFFECT) -> bool:
    """Whether time or memory moves by more than ``share`` of it, by default more than nothing."""
    before, after = time_of(one), time_of(other)
    moved = not math.isinf(before) and abs(after - before) > share * before
    peak = one.memory.peak_device_bytes
    return moved or abs(other.memory.peak_device_bytes - peak) > share * peak


def _saves(before: Estimate, after: Estimate) -> bool:
    """Whether time or memory is less by as much as is worth a line: a change that only costs is no proposal."""
    faster = time_of(after) < (1 - _WORTH_A_LINE) * time_of(before)
    return faster or after.memory.peak_device_bytes < (1 - _WORTH_A_LINE) * before.memory.peak_device_bytes


def _best_combination(
    trials: Trials,
    base: Estimate,
    gpu: GpuSpec,
    rules: _Rules,
) -> Mapping[str, Any]:
    """The best of every combination of free changes, each with the micro-batches that fit.

    What is no slower and no larger is taken beforehand, and what is neither faster nor smaller left out: only changes that
    trade time for memory are combined, else the combinations would be thousands.
    """

    def open_changes(answer: Estimate) -> Iterator[tuple[str, dict[str, Any]]]:
        for group, settings in alternatives(answer.job, gpu, allow_quantization=rules.allow_quantization, given=base.job):
            if not rules.held_in(settings, answer):
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
            some = _spaced(base.job, _batches(base, first, free_batch=rules.free_batch))
            for each in fitting_batches(trials, combined, some):
                tried.append(each)
                changes_of[frozenset(each[0].items())] = changes
    best = best_of(tried)
    changes = changes_of.get(frozenset(best[0].items()), [])
    if changes:  # now with every micro-batch
        combined = _united(changes)
        first = trials(combined)
        every = _batches(base, first, free_batch=rules.free_batch) if first is not None else ()
        best = best_of([best, *fitting_batches(trials, combined, every)])
    return _without_idle_changes(trials, *best, changes)


def _spaced(start: Mapping[str, Any], batches: Iterable[Mapping[str, int]]) -> Iterator[Mapping[str, int]]:
    """Micro-batches (small first) at least half as large again as the one before: enough to tell combinations apart."""
    last = 0.0
    for batch in batches:
        size = batch.get(BATCH_FIELDS[0]) or start.get(BATCH_FIELDS[0]) or 1
        if size >= _SPACING * last:
            last = size
            yield batch


_SPACING: Final = 1.5

# Groups whose changes mostly help in time and memory alike, or in neither; 16 bit first, which decides what others may run.
_ONE_SIDED: Final = ("precision", "kernels", "attention", "experts", "optimizer")


def _moves(before: Estimate, after: Estimate) -> tuple[bool, bool]:
    """Whether time and memory are no larger than before, by more than what counts as nothing."""
    memory = after.memory.peak_device_bytes <= before.memory.peak_device_bytes * (1 + _NO_EFFECT)
    return time_of(after) <= time_of(before) * (1 + _NO_EFFECT), memory


def _united(changes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for change in changes for name, value in change.items()}


def _without_idle_changes(
    trials: Trials, settings: Mapping[str, Any], answer: Estimate, changes: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """The same without each whole change that is worth less than half a percent beside the others."""
    limit = time_of(answer) * (1 + INDIFFERENT)
    batch = {name: value for name, value in settings.items() if name in BATCH_FIELDS}
    for change in changes:
        others = [other for other in changes if other is not change]
        fewer = {**_united(others), **batch}
        without = trials(fewer)
        if without is not None and without.verdict == answer.verdict and time_of(without) <= limit:
            settings, changes = fewer, others
    return settings


def _batches(base: Estimate, answer: Estimate, *, free_batch: bool) -> Iterator[Mapping[str, int]]:
    """Micro-batches to try with the settings of ``answer``, small ones first."""
    start = base.job
    if free_batch:
        sizes = {2**power for power in range(11)}
        sizes |= {int(start.get(BATCH_FIELDS[0]) or 1), max(1, answer.max_batch_size or 1)}
        yield from (batch_change(start, size, 1) for size in sorted(sizes))
        return
    before, after = samples_per_step(base), samples_per_step(answer)
    rows = rows_per_step(start)
    if before is not None and after is not None:
        samples_per_row = after / rows
        rows = max(1, round(before / samples_per_row))
        if abs(rows * samples_per_row / before - 1) > EFFECTIVE_BATCH_TOLERANCE:
            return
    yield from batch_settings(start, rows)


def samples_per_step(answer: Estimate) -> float | None:
    """Samples of one optimizer step, on one GPU or all: as the answer counts them; ``None`` where lengths are unknown."""
    if answer.samples_per_second is None or answer.step_seconds is None:
        return None
    return answer.samples_per_second * answer.step_seconds


def _rank_with_limits(candidate: Candidate, by: str) -> tuple[Any, ...]:
    fits, *order = rank(candidate, by)
    return (fits, len(candidate.unmet), *order)


def _unmet(candidate: Candidate, budget_usd: float | None, deadline_hours: float | None) -> tuple[str, ...]:
    unmet = []
    if budget_usd is not None and or_infinity(candidate.total_usd) > budget_usd:
        unmet.append("budget_usd")
    if deadline_hours is not None and or_infinity(candidate.total_seconds) > deadline_hours * SECONDS_PER_HOUR:
        unmet.append("deadline_hours")
    return tuple(unmet)


def _result(found: Sequence[tuple[_GpuSearch, Candidate]], by: str) -> OptimizeResult:
    """``found``: each search with the best that it found, best first."""
    chosen, best = found[0]
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
        if not is_in_best and not _saves(each.base, answer):
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
        others=tuple(other for _, other in found[1:]),
        unmet=best.unmet,
        num_estimates=sum(search.num_estimates for search, _ in found),
        ranked_by=by,
    )
