"""FLOPs of the tokens that a run really trained on: the numerators of MFU and HFU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from costmodel.defaults import resolve
from costmodel.described_job import model_of
from costmodel.specs import parse_job
from costmodel.workload import Batch, hardware_flops, model_flops, with_masked_pairs
from ftcost_callback.recorder import StepAggregate

ATTENTION_CONVENTION: Final = "full"
"""Attention counts every pair of a sequence, not the causal half of them."""

_ANY_LENGTH: Final = 1024  # where the job names no max_length; FLOPs do not depend on it


class FlopsCounter:
    """``model_flops``: what training needs in principle (frozen weights without their gradient, chosen experts only, a
    look-up free, no recompute). ``hardware_flops``: with what checkpointing computes again.

    Raises :class:`CostModelError` for a job that is not modelled.
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        parsed = parse_job(job if job.get("max_length") is not None else {**job, "max_length": _ANY_LENGTH})
        self._model = model_of(parsed)
        self._job, _ = resolve(parsed, self._model)

    def per_second(self, steps: StepAggregate) -> tuple[float, float] | None:
        """(model, hardware) FLOPs a second of ``steps``, pauses left out; ``None`` when their tokens were not shown."""
        tokens, squares, batches = steps.num_tokens, steps.sum_squared_sequence_tokens, steps.num_micro_batches
        if not tokens or not squares or not batches or steps.num_samples is None or steps.step_seconds_sum <= 0:
            return None
        head = tokens
        if self._job.supervised_positions_only and steps.num_supervised_tokens is not None:
            head = steps.num_supervised_tokens
        counted = Batch(steps.num_samples / batches, tokens / batches, squares / batches, head / batches)
        mean = with_masked_pairs(self._job, counted)
        scale = batches / steps.step_seconds_sum
        return model_flops(self._model, self._job, mean) * scale, hardware_flops(self._model, self._job, mean) * scale
