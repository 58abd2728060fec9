"""The probe: rates from hand-fed times, nothing left changed behind it, and the stored file used where it is asked for."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from costmodel import CostModelError
from costmodel.cli import run
from costmodel.operators import LAYER_OPERATORS, MODEL_OPERATORS
from costmodel.specs import parse_gpu
from ftcost_callback import FTCostCallback
from ftcost_callback.cli import app
from ftcost_callback.probe import _half_size, _quiet, probe, probe_cpu


def ticking(seconds: float) -> Callable[[], float]:
    """A clock that moves by ``seconds`` each time it is read."""
    now = [0.0]

    def clock() -> float:
        now[0] += seconds
        return now[0]

    return clock


@pytest.fixture(scope="module")
def half_second_spec() -> dict[str, Any]:
    """Every repeat takes 0.5 s. Nothing of the process is changed by it."""
    threads, torch_state, python_state = torch.get_num_threads(), torch.random.get_rng_state(), random.getstate()
    lines: list[str] = []
    spec = probe_cpu(seconds=0.0, num_threads=1, clock=ticking(0.5), say=lines.append)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert torch.is_grad_enabled()
    assert lines[0].startswith("ftcost: probing ")
    assert any(line.startswith("ftcost: 4.3 GFLOP/s in fp32, 4.3 in bf16, 1.1 GB/s, ") for line in lines)
    return spec


def test_rates_follow_from_the_seconds_measured(half_second_spec: dict[str, Any]) -> None:
    spec, probed = half_second_spec, half_second_spec["probed"]
    assert spec["vendor"] == "CPU"
    assert spec["name"].endswith("(1 threads)")
    assert spec["measured_fp32_matmul_flops_per_second"] == pytest.approx(2 * 1024**3 / 0.5)
    assert spec["measured_bf16_matmul_flops_per_second"] == pytest.approx(2 * 1024**3 / 0.5)
    assert spec["memory_bandwidth_bytes_per_second"] == pytest.approx(2 * 2**28 / 0.5)
    # the clock is read twice before each of the 29 linears, where the half second in between is not counted, and once after
    assert probed["forward_seconds_per_operator"] == pytest.approx(15.0 / (MODEL_OPERATORS[0] + 4 * LAYER_OPERATORS[0]))
    assert probed["backward_seconds_per_operator"] == pytest.approx(0.5 / (MODEL_OPERATORS[1] + 4 * LAYER_OPERATORS[1]))
    assert spec["seconds_per_operator"] == pytest.approx(15.5 / (sum(MODEL_OPERATORS) + 4 * sum(LAYER_OPERATORS)))
    # 48 tensors of a quarter MiB, two read and one written
    assert probed["elementwise_bytes_per_second"][0] == (2**18, pytest.approx(48 * 3 * 2**18 / 0.5))
    # eight heads of 64, eight sequences of 64 tokens, the half of the square, 3.5 forwards
    assert probed["attention_flops_per_second"][0] == (64, pytest.approx(3.5 * 4 * 8 * 8 * 64 * 64**2 / 2 / 0.5))
    assert probed["loss_seconds_per_logit"][0] == (4 * 64 * 2048, pytest.approx(0.5 / (64 * 2048)))
    assert probed["optimizer_seconds_per_parameter"] == pytest.approx(0.5 / (16 * 2**19))
    assert probed["optimizer_seconds_per_tensor"] == pytest.approx(0.5 / 64)
    if "dequantisation_seconds_per_weight" in probed:  # bitsandbytes is optional
        assert probed["dequantisation_seconds_per_weight"] == {"nf4": pytest.approx(0.5 / 2048**2)}


def test_a_probed_cpu_is_a_device_the_estimate_accepts(half_second_spec: dict[str, Any]) -> None:
    spec = parse_gpu(half_second_spec)
    assert spec.peak_fp32_flops_per_second is None  # measured, not a data sheet
    assert spec.probed is not None
    # 96 MiB of operands: 19 products of 1,024 rows and 512 x 512 weights, 90 of 16 rows, 76 of 64, and 384 of 192 rows and
    # 128 x 128 weights; forward and both gradients
    halves = [
        _half_size(19 / number, small, (1024, 512))
        for number, small in ((90, (16, 512)), (76, (64, 512)), (384, (192, 128)))
    ]
    half = sum(halves) / 3
    assert spec.probed.matmul_half_size == pytest.approx(half)
    assert spec.probed.matmul_flops_per_second == pytest.approx(19 * 3 * 2 * (1024 + half) * (512 + half) ** 2 / 0.5)


@pytest.mark.parametrize("half", [0.0, 3.0, 20.0, 150.0])
@pytest.mark.parametrize("small", [(16, 512), (64, 512), (192, 128)])
def test_the_half_size_is_what_makes_a_small_product_slow(half: float, small: tuple[int, int]) -> None:
    def seconds(rows: int, width: int) -> float:
        return (rows + half) * (width + half) * (width + half)

    assert _half_size(seconds(*small) / seconds(1024, 512), small, (1024, 512)) == pytest.approx(half, abs=1e-6)


@pytest.mark.slow
def test_progress_is_told_and_the_rates_are_those_of_a_processor() -> None:
    lines: list[str] = []
    spec = parse_gpu(probe_cpu(seconds=0.5, say=lines.append))
    assert lines[0].startswith("ftcost: probing ")
    assert [line for line in lines if line.startswith("ftcost: memory bandwidth")]
    # Any CPU that runs torch: 1 GFLOP/s to 100 TFLOP/s, 0.1 GB/s to 10 TB/s, 0.05 us to 1 ms.
    assert spec.measured_fp32_matmul_flops_per_second is not None
    assert 1e9 < spec.measured_fp32_matmul_flops_per_second < 1e14
    assert 1e8 < spec.memory_bandwidth_bytes_per_second < 1e13
    assert spec.seconds_per_operator is not None
    assert 5e-8 < spec.seconds_per_operator < 1e-3


def test_threads_are_put_back_when_the_probe_is_interrupted() -> None:
    threads = torch.get_num_threads()

    def interrupted() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe_cpu(num_threads=1, clock=interrupted, say=lambda line: None)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("device", ["tpu", "meta", "nonsense"])
def test_a_device_that_cannot_be_probed_is_refused(device: str) -> None:
    with pytest.raises(CostModelError, match="can be probed: give cpu, cuda or cuda:N"):
        probe(device)


def test_the_command_stores_what_the_callback_then_uses(
    half_second_spec: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FTCOST_CONFIG_DIR", str(tmp_path))
    monkeypatch.setattr("ftcost_callback.probe.probe_cpu", lambda **settings: half_second_spec)
    with pytest.raises(CostModelError, match=r"no probe in .*ftcost probe measures this one"):
        FTCostCallback(gpu="probe")
    assert run(["probe", "--device", "cpu", "--json"], application=app) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["file"].startswith(str(tmp_path / "probes"))
    used = FTCostCallback(gpu="probe")._settings.gpu
    assert isinstance(used, dict)
    assert used["name"].startswith(f"{half_second_spec['name']}, probed 2")
    assert parse_gpu(used) == parse_gpu({**half_second_spec, "name": used["name"]})
    assert run(["probe", "--device", "cpu", "--out", str(tmp_path / "mine.json")], application=app) == 0
    assert capsys.readouterr().err.strip().endswith(f"use it with --gpu probe:{tmp_path / 'mine.json'}")
    assert FTCostCallback(gpu=f"probe:{tmp_path / 'mine.json'}")._settings.gpu == used


def test_a_quiet_import_shows_errors_alone_and_only_while_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("some.library")
    with caplog.at_level(logging.INFO):
        with _quiet("some.library"):
            logger.warning("install more")
            logger.error("broken")
        logger.warning("said again")
    assert [each.getMessage() for each in caplog.records] == ["broken", "said again"]
