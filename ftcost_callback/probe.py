"""Measures the CPU this process runs on: a device description for the estimate, where no data sheet helps.

from ftcost_callback.probe import probe_cpu
estimate_trainer(trainer, gpu=probe_cpu())
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Final

from ftcost_callback.live_device import device_facts

_MATMUL_SIZE: Final = 1024  # 2.1 GFLOP: large enough for every core, small enough to repeat
_COPY_BYTES: Final = 2**28  # far beyond any cache
_SMALL_OPERATORS: Final = 6  # dispatched by one pass of `_small_operators`
_PASSES_AT_ONCE: Final = 50
# Shares of the time: matmul in fp32, in bf16, copying, small operators.
_SHARES: Final = (0.35, 0.2, 0.25, 0.2)


def probe_cpu(
    *,
    seconds: float = 10.0,
    num_threads: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """A ``GpuSpec`` mapping of this CPU: matmul rates, memory bandwidth, seconds to dispatch an operator.

    Takes about ``seconds``, with ``num_threads`` (default: as torch is set), which is put back; no random number is drawn.
    The best of the repeats counts: a busy neighbour only ever makes one slower. The spec has no data-sheet peak, so
    there is no MFU on it. ``say`` is given a line for each stage (default: stderr).
    """
    import torch

    say = say if say is not None else _to_stderr
    threads_before = torch.get_num_threads()
    facts = device_facts("cpu")
    name = facts.get("name", "CPU")
    try:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        threads = torch.get_num_threads()
        say(f"ftcost: probing {name} with {threads} threads, about {seconds:.0f} s")
        budgets = [share * seconds for share in _SHARES]
        fp32 = _matmul_rate(torch.float32, budgets[0], clock)
        bf16 = _matmul_rate(torch.bfloat16, budgets[1], clock)
        bandwidth = _copy_rate(budgets[2], clock)
        per_operator = _seconds_per_operator(budgets[3], clock)
    finally:
        torch.set_num_threads(threads_before)
    say(
        f"ftcost: {_giga(fp32)} GFLOP/s in fp32, {_giga(bf16)} in bf16, {bandwidth / 1e9:.1f} GB/s, "
        f"{per_operator * 1e6:.2f} us an operator"
    )
    spec = {
        "name": f"{name} ({threads} threads)",
        "vendor": "CPU",
        "memory_bytes": facts.get("memory_bytes"),
        "memory_bandwidth_bytes_per_second": bandwidth,
        "measured_fp32_matmul_flops_per_second": fp32,
        "measured_bf16_matmul_flops_per_second": bf16,
        "seconds_per_operator": per_operator,
        "source": "probed on this machine",
    }
    return {field: value for field, value in spec.items() if value is not None}


def _best_seconds(work: Callable[[], Any], budget_seconds: float, clock: Callable[[], float]) -> float:
    """Fewest seconds of one ``work()``, repeated until the budget is used; the first one warms up and is left out."""
    start = clock()
    work()
    best = None
    while best is None or clock() - start < budget_seconds:
        before = clock()
        work()
        taken = clock() - before
        best = taken if best is None else min(best, taken)
    return best


def _matmul_rate(dtype: Any, budget_seconds: float, clock: Callable[[], float]) -> float | None:
    """FLOP/s of a square matrix product; ``None`` where the CPU has none for ``dtype``."""
    import torch

    left = torch.full((_MATMUL_SIZE, _MATMUL_SIZE), 0.5, dtype=dtype)
    right = torch.full((_MATMUL_SIZE, _MATMUL_SIZE), 0.25, dtype=dtype)
    out = torch.empty_like(left)
    with torch.no_grad():
        try:
            taken = _best_seconds(lambda: torch.mm(left, right, out=out), budget_seconds, clock)
        except RuntimeError:
            return None
    return 2.0 * _MATMUL_SIZE**3 / taken if taken > 0 else None


def _copy_rate(budget_seconds: float, clock: Callable[[], float]) -> float:
    """Bytes read and written each second by a copy that no cache holds."""
    import torch

    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    taken = _best_seconds(lambda: target.copy_(source), budget_seconds, clock)
    return 2.0 * _COPY_BYTES / max(taken, 1e-9)


def _seconds_per_operator(budget_seconds: float, clock: Callable[[], float]) -> float:
    """Seconds of one operator whose arithmetic is next to nothing, recorded for the backward pass as in training."""
    import torch

    weight = torch.full((8, 8), 0.125, requires_grad=True)
    inputs = torch.full((8, 8), 0.5)

    def work() -> None:
        for _ in range(_PASSES_AT_ONCE):
            _small_operators(inputs, weight)

    with torch.enable_grad():
        taken = _best_seconds(work, budget_seconds, clock)
    return max(taken, 1e-9) / (_PASSES_AT_ONCE * _SMALL_OPERATORS)


def _small_operators(inputs: Any, weight: Any) -> Any:
    """Six operators in the mix of a decoder layer: a product, views and element-wise arithmetic."""
    import torch

    hidden = torch.mm(inputs, weight)
    hidden = hidden.view(2, 4, 8)
    hidden = hidden.transpose(0, 1)
    hidden = hidden * 0.5
    hidden = hidden + 1.0
    return torch.sigmoid(hidden)


def _giga(rate: float | None) -> str:
    return "no" if rate is None else f"{rate / 1e9:.1f}"


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
