"""When a step ended on the GPU, on the host's clock. Without it, a host that runs ahead charges work to the pauses."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any


class HostStepClock:
    """For devices whose work is done when the call returns: a step ended when the host says so."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.mark = clock  # the step ends here

    def ended_at(self, mark: Any, *, wait: bool) -> float | None:
        """Clock time of the step's end."""
        return mark  # type: ignore[no-any-return]


class CudaStepClock:
    """Records one event for each step end and reads it later, when it has passed; waits only where asked to.

    Times are chained from event to event, since ``elapsed_time`` is float32 milliseconds and a long distance is coarse.
    A step cannot have ended before the host issued it nor after the host saw it ended: this bounds the drift between
    the two clocks.

    Written from torch's documentation. Not yet run on a GPU.
    """

    def __init__(self, new_event: Callable[[], Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._new_event = new_event
        self._clock = clock
        self._last_event = new_event()
        self._last_event.record()
        self._last_event.synchronize()  # once, before the first step
        self._last_at = clock()

    @classmethod
    def on(cls, device: Any, clock: Callable[[], float] = time.monotonic) -> CudaStepClock:
        """On the current stream of a CUDA device."""
        import torch

        with torch.cuda.device(device):
            return cls(functools.partial(torch.cuda.Event, enable_timing=True), clock)

    def mark(self) -> tuple[Any, float]:
        """The step ends here, in the stream's order."""
        event = self._new_event()
        event.record()
        return event, self._clock()

    def ended_at(self, mark: tuple[Any, float], *, wait: bool) -> float | None:
        """Clock time of the step's end; ``None`` while it has not passed. Ask in the order of the marks."""
        event, issued_at = mark
        if wait:
            event.synchronize()
        elif not event.query():
            return None
        by_device = self._last_at + float(self._last_event.elapsed_time(event)) / 1000
        ended_at: float = min(max(by_device, issued_at, self._last_at), self._clock())
        self._last_event, self._last_at = event, ended_at
        return ended_at
