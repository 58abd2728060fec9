"""How long the training thread waited for a processor that others were using. Linux only; else unknown."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

_NANO: Final = 1e-9


class ProcessorWait:
    """Share of the time since it was made that this process's main thread could have run and did not.

    The kernel counts it in the second field of /proc/self/schedstat (nanoseconds on a run queue, proc(5) and
    Documentation/scheduler/sched-stats): other processes, other containers and a CPU quota all show there.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, read: Callable[[], float | None] = lambda: _waited_seconds()
    ) -> None:
        self._clock, self._read = clock, read
        self._begun_at, self._at_begin = clock(), read()

    def fraction(self) -> float | None:
        """In [0, 1]; ``None`` where the system does not say."""
        waited, seconds = self._read(), self._clock() - self._begun_at
        if waited is None or self._at_begin is None or seconds <= 0:
            return None
        return min(1.0, max(0.0, (waited - self._at_begin) / seconds))


def _waited_seconds() -> float | None:
    try:
        return int(Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1]) * _NANO
    except (OSError, ValueError, IndexError):
        return None
