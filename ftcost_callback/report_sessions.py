"""What each session of a run took and cost, at its own price. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from costmodel.units import SECONDS_PER_HOUR
from ftcost_callback.report_numbers import usd
from ftcost_callback.report_series import RunSeries, Totals, finite
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
    rates = _usd_per_hour(run)
    if goes_on:
        parts.insert(0, begins[0])
        rates.insert(0, _usd_per_hour_before(run, sum(begins[0].values()), rates[0]))
    seconds = [math.fsum(part.values()) for part in parts]
    at_own_rate = [taken * rate for taken, rate in zip(seconds, rates, strict=True) if rate is not None]
    factor = None
    if totals.spent_usd is not None and len(at_own_rate) == len(parts) and math.fsum(at_own_rate) > 0:
        # What rows and ledgers round away is spread over the sessions, so that they sum to what was spent.
        factor = totals.spent_usd / math.fsum(at_own_rate)
    prices = [*([None] if goes_on else []), *map(_price, run.sessions)]
    return [
        SessionCost(
            begins_at=math.fsum(seconds[:place]),
            seconds=seconds[place],
            bucket_seconds=parts[place],
            usd_per_gpu_hour=prices[place],
            usd_per_hour=rates[place],
            usd=at_own_rate[place] * factor if factor is not None else None,
            is_recorded=place > 0 or not goes_on,
        )
        for place in range(len(parts))
    ]


def _difference(end: Mapping[str, float], begin: Mapping[str, float]) -> dict[str, float]:
    return {name: max(0.0, seconds - begin.get(name, 0.0)) for name, seconds in end.items()}


def _buckets_before(session: dict[str, Any]) -> dict[str, float]:
    """Seconds that the sessions before took, by the names of :class:`Totals`; empty where the row does not say."""
    earlier = session.get("earlier_seconds")
    if not isinstance(earlier, dict):
        return {}
    seconds = {str(name).removesuffix("_seconds"): finite(value) or 0.0 for name, value in earlier.items()}
    waited = finite(session.get("earlier_data_wait_seconds")) or 0.0
    return seconds | {"data_wait": waited, "train": max(0.0, seconds.get("train", 0.0) - waited)}


def _price(session: dict[str, Any]) -> float | None:
    price = session.get("price")
    return finite(price.get("usd_per_gpu_hour")) if isinstance(price, dict) else None


def _usd_per_hour(run: RunSeries) -> list[float | None]:
    """Of the whole job in each session; of older records by their step rows. What had no price counts at the next one's."""
    by_rows: dict[float, float] = {}
    for start, end in run.sessions_rows():
        points = _points(run, start, end)
        if points and (seconds := points[-1][0] - points[0][0]) > 0:
            by_rows[run.columns["session_index"][start]] = (points[-1][1] - points[0][1]) / seconds * SECONDS_PER_HOUR
    rates: list[float | None] = []
    for place, session in enumerate(run.sessions):
        said, number = finite(session.get("usd_per_hour")), finite(session.get("session_index"))
        price, job = _price(session), session.get("job")
        num_gpus = finite(job.get("num_gpus")) if isinstance(job, dict) else None
        at_price = price * (num_gpus or 1.0) if price is not None else None
        rates.append(said if said is not None else by_rows.get(float(place) if number is None else number, at_price))
    for place in reversed(range(len(rates) - 1)):
        rates[place] = rates[place + 1] if rates[place] is None else rates[place]
    return rates


def _usd_per_hour_before(run: RunSeries, seconds: float, usd_per_hour: float | None) -> float | None:
    """Of the ``seconds`` before the record: what its first row had spent, less the first session's own part."""
    points = _points(run, 0, run.num_step_rows)
    if not points or usd_per_hour is None:
        return usd_per_hour
    elapsed, spent = points[0]
    return max(0.0, spent * SECONDS_PER_HOUR - (elapsed - seconds) * usd_per_hour) / seconds


def _points(run: RunSeries, start: int, end: int) -> list[tuple[float, float]]:
    """(elapsed seconds, dollars spent) of the first and the last of these rows that say both."""
    elapsed, spent = run.columns["elapsed_seconds"], run.columns["spent_usd"]

    def is_known(place: int) -> bool:
        return elapsed[place] == elapsed[place] and spent[place] == spent[place]

    ends = (next(filter(is_known, order), None) for order in (range(start, end), range(end - 1, start - 1, -1)))
    return [(elapsed[place], spent[place]) for place in ends if place is not None]


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
    return list(dict.fromkeys(price for session in run.sessions if (price := _price(session)) is not None))


def prices_text(prices: Sequence[float]) -> str:
    """``at $3.60, then $7.20 per GPU hour``; empty without a price."""
    if not prices:
        return ""
    if len(prices) > _MOST_NAMED:
        return f"at {usd(min(prices))} to {usd(max(prices))} per GPU hour"
    return f"at {', then '.join(usd(price) for price in prices)} per GPU hour"
