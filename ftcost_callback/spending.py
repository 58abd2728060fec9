"""Dollars of a run so far. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from costmodel.units import SECONDS_PER_HOUR

SAME_RATE: Final = 0.01  # relative: less than that is no other price, and what rows round away is not either


@dataclass(frozen=True, slots=True)
class Spending:
    """``usd_per_hour``: of the whole job; ``None``: no price. Earlier sessions count at what they had cost.

    ``earlier_seconds``: of the run, that ``earlier_usd`` is for. What came after them without a price counts at this one.
    """

    usd_per_hour: float | None = None
    earlier_seconds: float | None = None
    earlier_usd: float | None = None

    def usd(self, elapsed_seconds: float) -> float | None:
        """Of the run after ``elapsed_seconds`` over all its sessions."""
        if self.usd_per_hour is None:
            return None
        if self.earlier_seconds is None or self.earlier_usd is None:
            return elapsed_seconds / SECONDS_PER_HOUR * self.usd_per_hour
        return self.earlier_usd + (elapsed_seconds - self.earlier_seconds) / SECONDS_PER_HOUR * self.usd_per_hour

    def known(self, elapsed_seconds: float) -> tuple[float | None, float | None]:
        """(Dollars, seconds of the run that they are for): without a price now, those of earlier sessions."""
        usd = self.usd(elapsed_seconds)
        if usd is not None:
            return usd, elapsed_seconds
        return self.earlier_usd, self.earlier_seconds if self.earlier_usd is not None else None

    @property
    def is_one_rate(self) -> bool:
        """Earlier sessions cost the same an hour: dollars can be held against those of a prediction at this price."""
        if self.usd_per_hour is None or not self.earlier_seconds or self.earlier_usd is None:
            return True
        earlier = self.earlier_usd / self.earlier_seconds * SECONDS_PER_HOUR
        return abs(earlier - self.usd_per_hour) <= SAME_RATE * self.usd_per_hour
