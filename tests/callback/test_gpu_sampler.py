"""The unmodified nvidia-ml-py on a stand-in library, compiled here, in a process of its own: no GPU, real ctypes paths.

A process loads libnvidia-ml.so.1 once and by name only, so each case is a child whose LD_LIBRARY_PATH leads to the
stand-in (or to nothing).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parent / "nvml_stand_in" / "nvml.c"

CHILD_BEGINS = """
import json, os, sys
from ftcost_callback.gpu_sampler import GpuSampler, GpuUnavailableError, TorchDevice

def script(**values):
    with open(os.environ["NVML_SCRIPT"], "w") as file:
        for name, value in values.items():
            print(name, value, file=file)

def calls(name):
    return open(os.environ["NVML_CALLS"]).read().split().count(name)

class Clock:
    now = 100.0
    def __call__(self):
        return self.now

def window(sampler):
    sample = sampler.take_window()
    return {name: getattr(sample, name) for name in sample.__slots__ if getattr(sample, name) is not None}

clock = Clock()
DEVICE = TorchDevice(uuid="7", pci_bus_id="00000000:3B:00.0")
ALL = dict(uuid=7, busy=50, memory=2**30, power_mw=300000, energy_mj=1000000, throttle=0)
"""


@pytest.fixture(scope="module")
def library_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc to build the stand-in for libnvidia-ml.so.1")
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)], check=True
    )
    return folder


def run_child(code: str, tmp_path: Path, library_dir: Path | None, **variables: str) -> Any:
    """Run ``code`` with nvidia-ml-py on the stand-in; what it prints, as JSON."""
    (tmp_path / "calls").touch()
    environment = {
        **os.environ,
        "NVML_SCRIPT": str(tmp_path / "script"),
        "NVML_CALLS": str(tmp_path / "calls"),
        "LD_LIBRARY_PATH": str(library_dir if library_dir is not None else tmp_path),
        **variables,
    }
    child = subprocess.run(
        [sys.executable, "-c", CHILD_BEGINS + code],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def test_readings_are_weighted_by_the_time_they_stand_for(tmp_path: Path, library_dir: Path) -> None:
    result = run_child(
        """
script(**ALL)
sampler = GpuSampler(DEVICE, clock=clock)
sampler.open()
sampler.sample()                       # begins the first interval
clock.now += 1.0
script(**ALL | dict(busy=100, power_mw=400000, energy_mj=1350000, throttle=4)); sampler.sample()
clock.now += 3.0
script(**ALL | dict(busy=20, power_mw=200000, energy_mj=2000000, throttle=32)); sampler.sample()
first = window(sampler)
clock.now += 1.0
script(**ALL | dict(energy_mj=2300000, throttle=0)); sampler.sample()
print(json.dumps([first, window(sampler), window(sampler), sampler.notes]))
""",
        tmp_path,
        library_dir,
    )
    first, second, empty, notes = result
    assert first == {
        "busy_fraction": pytest.approx((1.0 * 1 + 0.2 * 3) / 4),
        "memory_used_bytes": 2**30,
        "power_watts": pytest.approx((400 * 1 + 200 * 3) / 4),
        "energy_joules": pytest.approx(1000.0),
        "energy_source": "counter",
        "throttle_reasons": 4 | 32,
        "num_samples": 3,
    }
    assert (second["energy_joules"], second["num_samples"], second["throttle_reasons"]) == (pytest.approx(300.0), 1, 0)
    assert empty == {}
    assert notes == []


def test_what_the_driver_does_not_support_is_asked_once_and_the_rest_stays(tmp_path: Path, library_dir: Path) -> None:
    first, busy_calls, notes = run_child(
        """
script(**ALL | dict(nvmlDeviceGetUtilizationRates=3, nvmlDeviceGetTotalEnergyConsumption=3))
sampler = GpuSampler(DEVICE, clock=clock)
sampler.open()
for _ in range(3):
    sampler.sample()
    clock.now += 1.0
print(json.dumps([window(sampler), calls("nvmlDeviceGetUtilizationRates"), sampler.notes]))
""",
        tmp_path,
        library_dir,
    )
    assert "busy_fraction" not in first
    assert first["memory_used_bytes"] == 2**30
    # Without a counter, energy is the integral of power.
    assert (first["energy_joules"], first["energy_source"]) == (pytest.approx(600.0), "integrated_power")
    assert busy_calls == 1
    assert notes == ["GPU busy: not available here (Not Supported)", "GPU energy: not available here (Not Supported)"]


def test_an_unknown_error_is_tried_again(tmp_path: Path, library_dir: Path) -> None:
    during, after = run_child(
        """
script(**ALL | dict(nvmlDeviceGetUtilizationRates=999))
sampler = GpuSampler(DEVICE, clock=clock)
sampler.open()
sampler.sample(); clock.now += 1.0; sampler.sample()
during = window(sampler)
script(**ALL); clock.now += 1.0; sampler.sample()
print(json.dumps([during, window(sampler)]))
""",
        tmp_path,
        library_dir,
    )
    assert "busy_fraction" not in during
    assert after["busy_fraction"] == 0.5


def test_a_lost_gpu_ends_the_sampling(tmp_path: Path, library_dir: Path) -> None:
    still_sampling, power_calls, notes = run_child(
        """
script(**ALL)
sampler = GpuSampler(DEVICE, clock=clock)
sampler.open()
sampler.sample()
script(**ALL | dict(nvmlDeviceGetUtilizationRates=15, nvmlDeviceGetPowerUsage=15))
before = calls("nvmlDeviceGetPowerUsage")
for _ in range(3):
    clock.now += 1.0
    sampler.sample()
sampler.close()
print(json.dumps([sampler.is_sampling, calls("nvmlDeviceGetPowerUsage") - before, sampler.notes]))
""",
        tmp_path,
        library_dir,
    )
    assert not still_sampling
    assert power_calls == 0
    assert notes == ["GPU sampling ended: GPU is lost"]


OPEN_AND_SAY = """
sampler = GpuSampler(DEVICE, clock=clock)
try:
    sampler.open()
    print(json.dumps("open"))
except GpuUnavailableError as error:
    print(json.dumps(str(error)))
"""


def test_no_driver_is_one_note(tmp_path: Path) -> None:
    if shutil.which("nvidia-smi") is not None:
        pytest.skip("this machine has the driver")
    assert run_child(OPEN_AND_SAY, tmp_path, None) == "no GPU figures: NVML does not start (NVML Shared Library Not Found)"


def test_a_driver_that_was_upgraded_under_a_running_container_is_one_note(tmp_path: Path, library_dir: Path) -> None:
    said = run_child("script(nvmlInitWithFlags=18)" + OPEN_AND_SAY, tmp_path, library_dir)
    assert said.startswith("no GPU figures: NVML does not start (")


def test_the_pci_address_is_the_second_way_and_an_unknown_device_is_never_guessed(tmp_path: Path, library_dir: Path) -> None:
    assert run_child("script(uuid=8)" + OPEN_AND_SAY, tmp_path, library_dir) == "open"
    said = run_child(
        'script(uuid=8)\nDEVICE = TorchDevice(uuid="7", pci_bus_id="00000000:AA:00.0")' + OPEN_AND_SAY,
        tmp_path,
        library_dir,
    )
    assert said == (
        "no GPU figures: NVML does not know torch's device (asked for GPU-7, MIG-7, 00000000:AA:00.0; Not Found)"
    )


def test_a_mig_slice_has_its_memory_and_no_utilisation(tmp_path: Path, library_dir: Path) -> None:
    sampled, notes, busy_calls = run_child(
        """
script(**ALL | dict(mig=1, memory=2**29))
sampler = GpuSampler(DEVICE, clock=clock)
sampler.open()
sampler.sample(); clock.now += 1.0; sampler.sample()
print(json.dumps([window(sampler), sampler.notes, calls("nvmlDeviceGetUtilizationRates")]))
""",
        tmp_path,
        library_dir,
    )
    assert sampled == {"memory_used_bytes": 2**29, "num_samples": 2}
    assert notes == ["MIG slice: no utilisation, power or energy; memory is the slice's"]
    assert busy_calls == 0


def test_activity_where_the_card_measures_it(tmp_path: Path, library_dir: Path) -> None:
    with_gpm, without = run_child(
        """
results = []
for gpm in (1, 0):
    script(**ALL | dict(gpm=gpm, sm=62.5, tensor=25, dram=12.5))
    sampler = GpuSampler(DEVICE, clock=clock)
    sampler.open()
    for _ in range(3):
        sampler.sample()
        clock.now += 0.5
    results.append(window(sampler))
    sampler.close()
print(json.dumps(results))
""",
        tmp_path,
        library_dir,
    )
    names = ("sm_active_fraction", "tensor_active_fraction", "dram_active_fraction")
    assert [with_gpm[name] for name in names] == [0.625, 0.25, 0.125]
    assert not any(name in without for name in names)


def test_a_call_that_hangs_holds_up_neither_a_report_nor_the_end(tmp_path: Path, library_dir: Path) -> None:
    alive, notes = run_child(
        """
import threading
script(**ALL | dict(hang=30))
sampler = GpuSampler(DEVICE, period_seconds=0.01)
sampler.open()
sampler.start()
assert sampler.take_window().num_samples is None
sampler.close(timeout_seconds=0.2)
print(json.dumps([any(t.name == "ftcost-gpu-sampler" for t in threading.enumerate()), sampler.notes]))
sys.stdout.flush()
""",
        tmp_path,
        library_dir,
    )
    assert alive  # a daemon: the process ended all the same, long before the 30 s of the call
    assert notes == ["NVML did not answer within 0.2 s at the end of the run"]


def test_the_thread_is_gone_after_close_and_nvml_is_left_as_often_as_entered(tmp_path: Path, library_dir: Path) -> None:
    threads, entered, left = run_child(
        """
import threading
script(**ALL)
sampler = GpuSampler(DEVICE, period_seconds=0.01)
sampler.open()
sampler.start()
sampler.close()
threads = [t.name for t in threading.enumerate() if t.name.startswith("ftcost")]
print(json.dumps([threads, calls("nvmlInitWithFlags"), calls("nvmlShutdown")]))
""",
        tmp_path,
        library_dir,
    )
    assert threads == []
    assert (entered, left) == (1, 1)


# cases_live: the form of CUDA_VISIBLE_DEVICES never matters, since torch itself says which card it has.
@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"CUDA_VISIBLE_DEVICES": "1"}, id="case-41-index"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "1,0"}, id="case-41-order"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "GPU-9"}, id="case-42-uuid"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "GPU-"}, id="case-42-shortened-uuid"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, id="case-42-cuda-order"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, id="case-42-pci-order"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "MIG-9"}, id="case-43-mig-uuid"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "MIG-GPU-7/1/0"}, id="case-43-old-mig-name"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "-1"}, id="none-visible"),
        pytest.param({"CUDA_VISIBLE_DEVICES": ""}, id="empty"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "void"}, id="case-47-void"),
        pytest.param({}, id="unset"),
    ],
)
def test_the_card_that_torch_trains_on_is_read_whatever_is_visible(
    tmp_path: Path, library_dir: Path, variables: dict[str, str]
) -> None:
    sampled = run_child(
        """
script(**ALL | dict(uuid1=9, busy1=77, memory1=2**31))
sampler = GpuSampler(TorchDevice(uuid="9"), clock=clock)
sampler.open()
sampler.sample(); clock.now += 1.0; sampler.sample()
print(json.dumps(window(sampler)))
""",
        tmp_path,
        library_dir,
        **variables,
    )
    assert (sampled["busy_fraction"], sampled["memory_used_bytes"]) == (0.77, 2**31)


def test_what_torch_says_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    import torch

    from ftcost_callback.gpu_sampler import TorchDevice

    class Uuid:  # torch's own type has no prefix
        def __str__(self) -> str:
            return "5c0ff8e4-0000-1111-2222-333344445555"

    properties = SimpleNamespace(uuid=Uuid(), pci_bus_id=0x3B, pci_device_id=0, pci_domain_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert TorchDevice.of(torch.device("cuda:0")) == TorchDevice(
        uuid="5c0ff8e4-0000-1111-2222-333344445555", pci_bus_id="00000000:3B:00.0"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())  # an old torch
    assert TorchDevice.of(torch.device("cuda:0")) == TorchDevice()


@pytest.mark.parametrize("prefix", ["", "GPU-", "MIG-"])
def test_a_uuid_may_come_with_its_prefix(tmp_path: Path, library_dir: Path, prefix: str) -> None:
    code = f"script(**ALL)\nDEVICE = TorchDevice(uuid={prefix + '7'!r})" + OPEN_AND_SAY
    assert run_child(code, tmp_path, library_dir) == "open"


def test_case_43_a_mig_slice_with_activity_shows_that(tmp_path: Path, library_dir: Path) -> None:
    sampled = run_child(
        """
script(**ALL | dict(mig=1, gpm=1, sm=40, tensor=20, dram=10, memory=2**29))
sampler = GpuSampler(DEVICE, clock=clock)
sampler.open()
for _ in range(3):
    sampler.sample()
    clock.now += 0.5
print(json.dumps(window(sampler)))
""",
        tmp_path,
        library_dir,
    )
    assert sampled == {
        "memory_used_bytes": 2**29,
        "sm_active_fraction": 0.4,
        "tensor_active_fraction": 0.2,
        "dram_active_fraction": 0.1,
        "num_samples": 3,
    }


DROPPED = {2, 3, 4, 6, 13, 25, 26}  # this card or driver does not answer
GONE = {1, 9, 12, 15, 16, 18}  # the card or the library is gone
# nvmlReturn_t, nvml.h 13.
CODES = [*range(1, 30), 999]


def test_case_45_every_error_code_leaves_the_other_readings_or_ends_the_sampling(tmp_path: Path, library_dir: Path) -> None:
    results = run_child(
        f"""
results = []
for code in {CODES}:
    script(**ALL | dict(nvmlDeviceGetPowerUsage=code))
    sampler = GpuSampler(DEVICE, clock=clock)
    sampler.open()
    before = calls("nvmlDeviceGetPowerUsage")
    for _ in range(4):
        sampler.sample()
        clock.now += 1.0
    sample = window(sampler)
    results.append([
        code, calls("nvmlDeviceGetPowerUsage") - before, sampler.is_sampling, "power_watts" in sample,
        sample.get("busy_fraction"), len(sampler.notes),
    ])
    sampler.close()
print(json.dumps(results))
""",
        tmp_path,
        library_dir,
    )
    for code, power_calls, is_sampling, has_power, busy, num_notes in results:
        assert not has_power
        if code in DROPPED:
            assert (power_calls, is_sampling, busy, num_notes) == (1, True, 0.5, 1), code
        elif code in GONE:
            assert (power_calls, is_sampling, num_notes) == (1, False, 1), code
        else:  # may pass
            assert (power_calls, is_sampling, busy, num_notes) == (4, True, 0.5, 0), code


def test_calls_of_one_sample_and_none_at_a_report(tmp_path: Path, library_dir: Path) -> None:
    at_open, by_sample, by_report = run_child(
        """
from collections import Counter
def all_calls():
    return Counter(open(os.environ["NVML_CALLS"]).read().split())
script(**ALL | dict(gpm=1))
sampler = GpuSampler(DEVICE, clock=clock)
sampler.open()
at_open = all_calls()
for _ in range(10):
    sampler.sample()
    clock.now += 0.5
by_sample = all_calls() - at_open
sampler.take_window()
print(json.dumps([at_open, by_sample, all_calls() - at_open - by_sample]))
""",
        tmp_path,
        library_dir,
    )
    assert at_open == {
        "nvmlInitWithFlags": 1,
        "nvmlDeviceGetHandleByUUID": 1,
        "nvmlDeviceIsMigDeviceHandle": 1,
        "nvmlGpmQueryDeviceSupport": 1,
        "nvmlGpmSampleAlloc": 2,
    }
    assert by_sample == {
        "nvmlDeviceGetUtilizationRates": 10,
        "nvmlDeviceGetMemoryInfo": 10,
        "nvmlDeviceGetPowerUsage": 10,
        "nvmlDeviceGetTotalEnergyConsumption": 10,
        "nvmlDeviceGetCurrentClocksEventReasons": 10,
        "nvmlGpmSampleGet": 10,
        "nvmlGpmMetricsGet": 9,
    }
    assert by_report == {}


def test_case_51_what_was_never_read_is_absent_and_not_zero(tmp_path: Path, library_dir: Path) -> None:
    everything_fails = "nvmlDeviceGetUtilizationRates nvmlDeviceGetMemoryInfo nvmlDeviceGetPowerUsage " + (
        "nvmlDeviceGetTotalEnergyConsumption nvmlDeviceGetCurrentClocksEventReasons"
    )
    sampled = run_child(
        f"""
script(**ALL | dict.fromkeys({everything_fails.split()}, 3))
sampler = GpuSampler(DEVICE, clock=clock)
sampler.open()
sampler.sample(); clock.now += 1.0; sampler.sample()
print(json.dumps(window(sampler)))
""",
        tmp_path,
        library_dir,
    )
    assert {name for name in sampled if name != "num_samples"} == set()
