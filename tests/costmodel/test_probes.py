"""A stored probe: the round trip, which one is meant, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from costmodel import CostModelError, estimate, probes
from costmodel.cli import run
from costmodel.specs import parse_gpu

DEVICE: dict[str, Any] = {
    "name": "Some CPU (2 threads)",
    "vendor": "CPU",
    "memory_bytes": 16 * 2**30,
    "memory_bandwidth_bytes_per_second": 20e9,
    "measured_fp32_matmul_flops_per_second": 80e9,
    "seconds_per_operator": 2e-6,
    "source": "ftcost probe",
    "probed": {
        "matmul_flops_per_second": 60e9,
        "matmul_half_size": 20.0,
        "elementwise_bytes_per_second": [[2**18, 40e9], [2**24, 20e9]],
        "dequantisation_seconds_per_weight": {"nf4": 1e-10},
    },
}
JOB: dict[str, Any] = {
    "model": "Qwen/Qwen2.5-0.5B",
    "method": "lora",
    "dtype": "float32",
    "max_length": 128,
    "lengths": {"fixed": 128},
    "num_samples": 10,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTCOST_CONFIG_DIR", str(tmp_path))
    return tmp_path / "probes"


def store(created_on: str = "2026-08-17", **changes: Any) -> Path:
    device = {**DEVICE, **changes}
    path = probes.default_path(device["name"])
    probes.write_probe(path, device, created_on=created_on)
    return Path(path)


def of_another_machine(path: Path) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "machine": "another processor, 64 processors, 256 GiB"}))


def test_what_is_stored_is_what_the_estimate_rests_on(folder: Path) -> None:
    assert store() == folder / "some-cpu-2-threads.json"
    answer = estimate(JOB, gpu="probe")
    assert answer.job["gpu"]["name"] == "Some CPU (2 threads), probed 2026-08-17"
    assert answer.step_seconds == estimate(JOB, gpu=DEVICE).step_seconds
    assert parse_gpu(probes.probed_device("probe")) == parse_gpu({**DEVICE, "name": answer.job["gpu"]["name"]})


def test_the_newest_of_this_machine_is_meant_and_any_by_its_name_or_file() -> None:
    of_another_machine(store(created_on="2026-09-30", name="Other CPU (8 threads)"))
    store(created_on="2026-08-17", name="Some CPU (1 threads)")
    newest = store(created_on="2026-08-18")
    assert probes.probed_device("probe")["name"] == "Some CPU (2 threads), probed 2026-08-18"
    assert probes.probed_device("probe:some cpu (1 threads)")["name"] == "Some CPU (1 threads), probed 2026-08-17"
    assert probes.probed_device("probe:Other")["name"] == "Other CPU (8 threads), probed 2026-09-30"
    assert probes.probed_device(f"probe:{newest}")["name"] == "Some CPU (2 threads), probed 2026-08-18"
    with pytest.raises(CostModelError, match=r"names more than one probe; choose one of: Some CPU \(1 threads\), Some CPU"):
        probes.probed_device("probe:Some CPU")


def test_a_card_and_a_processor_are_told_apart_by_name_only() -> None:
    store()
    store(name="Some card", vendor="NVIDIA")
    with pytest.raises(CostModelError, match=r"choose one of: probe:Some card, probe:Some CPU \(2 threads\)"):
        probes.probed_device("probe")


def test_without_a_probe_of_this_machine_the_way_out_is_said(folder: Path) -> None:
    with pytest.raises(CostModelError, match=r"no probe in .*; ftcost probe measures this one"):
        estimate(JOB, gpu="probe")
    of_another_machine(store())
    with pytest.raises(CostModelError, match=r"only of others \(Some CPU \(2 threads\)\); ftcost probe measures this one"):
        estimate(JOB, gpu="probe")
    with pytest.raises(CostModelError, match=r"no probe matches 'H100'.*ftcost probe"):
        estimate(JOB, gpu="probe:H100")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param("{", "is not valid JSON", id="cut off"),
        pytest.param("[1]", "holds no probe", id="not a mapping"),
        pytest.param('{"device_factor": 1.0}', "holds no probe", id="a calibration, say"),
        pytest.param('{"kind": "ftcost probe", "device": {}, "schema_version": 2}', "is a probe of version 2", id="newer"),
        pytest.param('{"kind": "ftcost probe", "device": {}, "schema_version": 1}', "created_on is missing", id="no date"),
    ],
)
def test_a_file_that_is_no_probe_is_refused_with_the_way_out(folder: Path, content: str, said: str) -> None:
    path = store()
    path.write_text(content)
    with pytest.raises(CostModelError, match=f"{said}.*delete {path} and run ftcost probe again"):
        estimate(JOB, gpu="probe")


def test_rates_that_cannot_be_are_refused(folder: Path) -> None:
    store(probed={"elementwise_bytes_per_second": [[2**24, 20e9], [2**18, 40e9]]})
    with pytest.raises(CostModelError, match="the sizes must ascend"):
        estimate(JOB, gpu="probe")


def test_the_command_line_takes_a_probe(capsys: pytest.CaptureFixture[str]) -> None:
    store()
    flags = ["--model", "Qwen/Qwen2.5-0.5B", "--gpu", "probe", "--method", "lora", "--dtype", "float32"]
    assert run(["estimate", *flags, "--max-length", "128", "--lengths", "fixed:128", "--num-samples", "10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["gpu"]["name"] == "Some CPU (2 threads), probed 2026-08-17"
    assert run(["estimate", *flags, "--gpu", "probe:none"]) == 2
    assert "no probe matches 'none'" in capsys.readouterr().err
