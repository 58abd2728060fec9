"""What each session of a run took and cost, at its own price. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from costmodel.units import SECONDS_PER_HOUR
from ftcost_callback.report_numbers import usd
from ftcost_callback.report_series import (
    RunSeries,
    Totals,
    finite,
    price_of,
    seconds_before,
    spent_points,
    usd_per_hour_of_sessions,
)
from ftcost_callback.spending import SAME_RATE

_MOST_NAMED: Final = 3


@dataclass(frozen=True)
class SessionCost:
    """``begins_at``: seconds of the run before it. ``bucket_seconds``: as those of :class:`Totals`. ``None``: no price."""

    begins_at: float
    seconds: float
    bucket_seconds: dict[str, float]
    usd_per_gpu_hour: float | None = None
    usd_per_hour: float | None = None  # of the whole job
    usd: float | None = None
    is_recorded: bool = True  # false: of all sessions before the record's first, on another machine


def session_costs(run: RunSeries, totals: Totals) -> list[SessionCost]:
    """One for each session of the record, in order, whose seconds and dollars sum to the run's.

    In front of them one for what came before the record, where its first session went on with a run. Empty where a session
    does not say what those before it took: the run's time cannot be shared out then.
    """
    begins = [_buckets_before(session) for session in run.sessions]
    if not begins or not all(begins[1:]):
        return []
    goes_on = sum(begins[0].values()) > 0
    parts = [_difference(end, begin) for begin, end in zip(begins, [*begins[1:], totals.bucket_seconds], strict=True)]
    rates = usd_per_hour_of_sessions(run)
    if goes_on:
        parts.insert(0, begins[0])
        rates.insert(0, _usd_per_hour_before(run, sum(begins[0].values()), rates[0]))
    seconds = [math.fsum(part.values()) for part in parts]
    at_own_rate = [
        taken / SECONDS_PER_HOUR * rate if rate is not None else None for taken, rate in zip(seconds, rates, strict=True)
    ]
    factor: float | None = 1.0  # the last session has no price: what is known of those before it
    if totals.spent_usd is not None:
        # What rows and ledgers round away is spread over the sessions, so that they sum to what was spent.
        known = [usd for usd in at_own_rate if usd is not None]
        factor = totals.spent_usd / math.fsum(known) if len(known) == len(parts) and math.fsum(known) > 0 else None
    prices = [*([None] if goes_on else []), *map(price_of, run.sessions)]
    return [
        SessionCost(
            begins_at=math.fsum(seconds[:place]),
            seconds=seconds[place],
            bucket_seconds=parts[place],
            usd_per_gpu_hour=prices[place],
            usd_per_hour=rates[place],
            usd=usd * factor if usd is not None and factor is not None else None,
            is_recorded=place > 0 or not goes_on,
        )
        for place, usd in enumerate(at_own_rate)
    ]


def _difference(end: Mapping[str, float], begin: Mapping[str, float]) -> dict[str, float]:
    return {name: max(0.0, seconds - begin.get(name, 0.0)) for name, seconds in end.items()}


def _buckets_before(session: dict[str, Any]) -> dict[str, float]:
    """Seconds that the sessions before took, by the names of :class:`Totals`; empty where the row does not say."""
    seconds = seconds_before(session)
    if not seconds:
        return {}
    waited = finite(session.get("earlier_data_wait_seconds")) or 0.0
    return seconds | {"data_wait": waited, "train": max(0.0, seconds.get("train", 0.0) - waited)}


def _usd_per_hour_before(run: RunSeries, seconds: float, usd_per_hour: float | None) -> float | None:
    """Of the ``seconds`` before the record: what its first row had spent, less the first session's own part."""
    points = spent_points(run, 0, run.num_step_rows)
    if not points or usd_per_hour is None:
        return usd_per_hour
    elapsed, spent = points[0]
    return max(0.0, spent * SECONDS_PER_HOUR - (elapsed - seconds) * usd_per_hour) / seconds


def bucket_usd(sessions: Sequence[SessionCost], totals: Totals) -> dict[str, float]:
    """Dollars of each time bucket, each session's at its own rate; empty without a price."""
    if totals.spent_usd is None or totals.wall_seconds <= 0:
        return {}
    if not sessions or any(session.usd is None for session in sessions):
        return {name: totals.spent_usd * seconds / totals.wall_seconds for name, seconds in totals.bucket_seconds.items()}
    return {
        name: math.fsum(
            (session.usd or 0.0) * session.bucket_seconds.get(name, 0.0) / session.seconds
            for session in sessions
            if session.seconds > 0
        )
        for name in totals.bucket_seconds
    }


def is_one_rate(sessions: Sequence[SessionCost]) -> bool:
    """Every hour of the run cost the same, so that its dollars can be held against a prediction's."""
    rates = [session.usd_per_hour for session in sessions if session.usd_per_hour is not None]
    return not rates or max(rates) - min(rates) <= SAME_RATE * max(rates)


def prices_paid(run: RunSeries) -> list[float]:
    """Dollars an hour of one GPU, in the order they were paid, each once."""
    return list(dict.fromkeys(price for session in run.sessions if (price := price_of(session)) is not None))


def prices_text(prices: Sequence[float]) -> str:
    """``at $3.60, then $7.20 per GPU hour``; empty without a price."""
    if not prices:
        return ""
    if len(prices) > _MOST_NAMED:
        return f"at {usd(min(prices))} to {usd(max(prices))} per GPU hour"
    return f"at {', then '.join(usd(price) for price in prices)} per GPU hour"
