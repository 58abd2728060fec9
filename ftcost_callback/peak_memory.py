"""torch's high-water marks over the training steps."""

from __future__ import annotations

from typing import Any


class PeakMemory:
    """Reads the counters of a CUDA device, which belong to the process and are never reset; without one: ``None``.

    A mark that rose during a pause (an evaluation may need more) is not a training step's: it is taken over only once
    a step has raised it further. What was reached before the first step is the loading's, kept apart.
    """

    def __init__(self, device: Any = None) -> None:
        self._device = device
        self._after_pause = (0, 0)
        self.loading_allocated_bytes: int | None = None
        self.loading_reserved_bytes: int | None = None
        self.allocated_bytes: int | None = None
        self.reserved_bytes: int | None = None

    def loading_ends(self) -> None:
        """Call before the first step."""
        if self._device is not None:
            self._after_pause = self.loading_allocated_bytes, self.loading_reserved_bytes = self._read()

    def step_ends(self) -> None:
        """Call before each pause."""
        if self._device is None:
            return
        allocated, reserved = self._read()
        if allocated > self._after_pause[0]:
            self.allocated_bytes = allocated
        if reserved > self._after_pause[1]:
            self.reserved_bytes = reserved

    def pause_ends(self) -> None:
        """Call after each pause."""
        if self._device is not None:
            self._after_pause = self._read()

    def _read(self) -> tuple[int, int]:
        import torch

        return torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)
