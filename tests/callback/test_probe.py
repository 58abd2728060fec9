"""The probe: rates from hand-fed times, and nothing left changed behind it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from costmodel.specs import parse_gpu
from ftcost_callback.probe import probe_cpu


def ticking(seconds: float) -> Callable[[], float]:
    """A clock that moves by ``seconds`` each time it is read."""
    now = [0.0]

    def clock() -> float:
        now[0] += seconds
        return now[0]

    return clock


def test_rates_follow_from_the_seconds_measured() -> None:
    lines: list[str] = []
    spec = probe_cpu(seconds=0.0, clock=ticking(0.5), say=lines.append)  # every repeat takes 0.5 s
    assert spec["measured_fp32_matmul_flops_per_second"] == pytest.approx(2 * 1024**3 / 0.5)
    assert spec["measured_bf16_matmul_flops_per_second"] == pytest.approx(2 * 1024**3 / 0.5)
    assert spec["memory_bandwidth_bytes_per_second"] == pytest.approx(2 * 2**28 / 0.5)
    assert spec["seconds_per_operator"] == pytest.approx(0.5 / (50 * 6))
    assert spec["vendor"] == "CPU"
    assert lines[0].startswith("ftcost: probing ")
    assert lines[1].startswith("ftcost: 4.3 GFLOP/s in fp32, 4.3 in bf16, 1.1 GB/s, 1666.67 us an operator")


def test_a_probed_cpu_is_a_device_the_estimate_accepts() -> None:
    spec = parse_gpu(probe_cpu(seconds=0.0, say=lambda line: None))
    assert spec.peak_fp32_flops_per_second is None  # measured, not a data sheet
    # Any CPU that runs torch: 1 GFLOP/s to 100 TFLOP/s, 0.1 GB/s to 10 TB/s, 0.05 us to 1 ms.
    assert spec.measured_fp32_matmul_flops_per_second is not None
    assert 1e9 < spec.measured_fp32_matmul_flops_per_second < 1e14
    assert 1e8 < spec.memory_bandwidth_bytes_per_second < 1e13
    assert spec.seconds_per_operator is not None
    assert 5e-8 < spec.seconds_per_operator < 1e-3


def test_threads_random_state_and_gradients_are_as_before() -> None:
    threads, torch_state, python_state = torch.get_num_threads(), torch.random.get_rng_state(), random.getstate()
    spec = probe_cpu(seconds=0.0, num_threads=1, clock=ticking(0.5), say=lambda line: None)
    assert spec["name"].endswith("(1 threads)")
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert torch.is_grad_enabled()


def test_threads_are_put_back_when_the_probe_is_interrupted() -> None:
    threads = torch.get_num_threads()

    def interrupted() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe_cpu(num_threads=1, clock=interrupted, say=lambda line: None)
    assert torch.get_num_threads() == threads
