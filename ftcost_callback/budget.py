"""Watches a limit on dollars or hours. Pure: told what was spent, says which thresholds that crosses, once each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from costmodel.units import SECONDS_PER_HOUR
from ftcost_callback.records import Budget

THRESHOLDS: Final = {"50 %": 0.5, "80 %": 0.8, "100 %": 1.0}
PROJECTED: Final = "projected"
# A projection from fewer steps is only believed when even its lower end is over the limit.
_MIN_STEPS_FOR_PROJECTION: Final = 20


@dataclass(frozen=True, slots=True)
class _Limit:
    kind: Literal["usd", "hours"]
    amount: float


class BudgetWatch:
    """Limits, each optional. ``crossed``: thresholds that earlier sessions have said."""

    def __init__(
        self,
        *,
        budget_usd: float | None = None,
        budget_hours: float | None = None,
        stop_at_budget: bool = False,
        crossed: Iterable[str] = (),
    ) -> None:
        limits = (
            _Limit("usd", budget_usd) if budget_usd is not None else None,
            _Limit("hours", budget_hours) if budget_hours is not None else None,
        )
        self._limits = [limit for limit in limits if limit is not None]
        self._stop_at_budget = stop_at_budget
        # A run that is resumed over its budget stops again.
        self._crossed = {name for name in crossed if not (stop_at_budget and name.endswith(" 100 %"))}

    @property
    def crossed(self) -> tuple[str, ...]:
        """Names of what was said, for the ledger."""
        return tuple(sorted(self._crossed))

    @property
    def is_limited(self) -> bool:
        return bool(self._limits)

    def check(
        self,
        *,
        global_step: int,
        elapsed_seconds: float,
        spent_usd: float | None,
        projected_seconds: float | None = None,
        projected_seconds_low: float | None = None,
        projected_usd: float | None = None,
        projected_usd_low: float | None = None,
        num_measured_steps: int = 0,
    ) -> list[Budget]:
        """The thresholds newly crossed, lowest first; the last has ``action`` "stopped" when training should end."""
        rows: list[Budget] = []
        for limit in self._limits:
            if limit.kind == "usd":
                spent, projected, low = spent_usd, projected_usd, projected_usd_low
            else:
                spent = elapsed_seconds / SECONDS_PER_HOUR
                projected, low = _hours(projected_seconds), _hours(projected_seconds_low)
            if spent is None:
                continue
            over = [name for name, share in THRESHOLDS.items() if spent >= share * limit.amount]
            believed = projected if num_measured_steps >= _MIN_STEPS_FOR_PROJECTION else low
            if believed is not None and believed > limit.amount and spent < limit.amount:
                over.append(PROJECTED)
            for name in over:
                if self._is_new(limit, name):
                    stops = self._stop_at_budget and name == "100 %"
                    rows.append(
                        Budget(
                            threshold=name,
                            kind=limit.kind,
                            limit=limit.amount,
                            spent=spent,
                            projected=projected,
                            global_step=global_step,
                            action="stopped" if stops else "warned",
                        )
                    )
        return rows

    def _is_new(self, limit: _Limit, name: str) -> bool:
        key = crossing(limit.kind, limit.amount, name)
        if key in self._crossed:
            return False
        self._crossed.add(key)
        return True


def crossing(kind: str, limit: float, threshold: str) -> str:
    """Its name in a ledger; a raised budget is watched anew."""
    return f"{kind} {limit:g} {threshold}"


def _hours(seconds: float | None) -> float | None:
    return seconds / SECONDS_PER_HOUR if seconds is not None else None
