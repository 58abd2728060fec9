"""80 % intervals: by regime and class of job, wider where nothing was measured."""

from __future__ import annotations

import math
from typing import Final

from costmodel import constants as c
from costmodel.defaults import ResolvedJob
from costmodel.memory import MemoryBreakdown, job_class
from costmodel.specs import GpuSpec
from costmodel.step_time import StepTime

INTERVAL_LEVEL: Final = 0.8
_KNOWN_STACKS: Final = frozenset({"transformers", "trl", "axolotl", "llamafactory", "litgpt"})


def step_interval_factor(job: ResolvedJob, gpu: GpuSpec, step: StepTime) -> float:
    """The step takes between ``seconds / factor`` and ``seconds * factor``.

    The half width of the log is that of the regime (errors with a whole source left out), wider on a card or a stack that no
    measured run covers.
    """
    width = c.STEP_INTERVAL[step.regime]
    if gpu.name not in c.MEASURED_CARDS:
        width *= c.UNMEASURED_CARD_FACTOR
    if job.framework not in _KNOWN_STACKS or job.torch_compile or job.use_liger_kernel:
        width *= c.UNKNOWN_STACK_FACTOR
    return math.exp(width)


def memory_interval(job: ResolvedJob, memory: MemoryBreakdown, *, on_cpu: bool = False) -> tuple[int, int]:
    """(low, high) of what the card shows, in bytes."""
    width = c.MEMORY_INTERVAL[job_class(job)]
    low_context, high_context = (0, 0) if on_cpu else c.CUDA_CONTEXT_INTERVAL_BYTES
    low = max(memory.peak_allocated_bytes, int(memory.peak_reserved_bytes * (1 - width)))
    return low + low_context, int(memory.peak_reserved_bytes * (1 + width)) + high_context
