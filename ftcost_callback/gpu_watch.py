"""The GPU sampler of one session, and what its windows add up to."""

from __future__ import annotations

import logging
from typing import Any

from ftcost_callback.boundary import Boundary
from ftcost_callback.gpu_sampler import GpuSampler, GpuUnavailableError, TorchDevice
from ftcost_callback.records import GpuSample

_log = logging.getLogger("ftcost_callback")


class GpuWatch:
    """``start`` on a CUDA device, ``take_window`` at each report. Without a GPU every figure stays unknown."""

    def __init__(self, boundary: Boundary, *, energy_joules: float | None = None) -> None:
        """``energy_joules``: of the sessions before."""
        self._boundary = boundary
        self._sampler: GpuSampler | None = None
        self._num_notes = 0
        self.window = GpuSample()  # the last one taken
        self.energy_joules = energy_joules
        self.throttle_reasons: int | None = None  # OR over the windows

    def start(self, device: Any, *, period_seconds: float, notes: list[str]) -> None:
        """``notes``: what is not measured, and why, is added to them."""
        sampler = GpuSampler(TorchDevice.of(device), period_seconds=period_seconds)
        try:
            sampler.open()
        except GpuUnavailableError as unavailable:
            notes.append(str(unavailable))
            _log.info("ftcost: %s", unavailable)
            return
        notes.extend(sampler.notes)
        self._num_notes = len(sampler.notes)
        sampler.start()
        self._sampler = sampler
        self._boundary.on_failure("GPU sampler", sampler.close)

    def take_window(self) -> None:
        """What was sampled since the last call."""
        if self._sampler is None:
            return
        self.window = window = self._sampler.take_window()
        if window.energy_joules is not None:
            self.energy_joules = (self.energy_joules or 0.0) + window.energy_joules
        if window.throttle_reasons is not None:
            self.throttle_reasons = (self.throttle_reasons or 0) | window.throttle_reasons
        for note in self._sampler.notes[self._num_notes :]:
            _log.info("ftcost: %s", note)
        self._num_notes = len(self._sampler.notes)

    def close(self) -> None:
        """The thread is gone. May be called more than once."""
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.close()
