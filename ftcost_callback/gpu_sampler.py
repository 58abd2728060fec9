"""Utilisation, memory, power and energy of the training GPU, by NVML in a daemon thread. Sole user of nvidia-ml-py.

The device is found by the UUID of torch's device, never by index: CUDA counts the fastest card first and honours
``CUDA_VISIBLE_DEVICES``, NVML counts by PCI address. Each reading is guarded on its own: one that the driver does not
support is asked once and then left out; a GPU that is gone ends the sampling; nothing raises into training, and a call
that hangs holds up neither a report nor the end of the run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from ftcost_callback.records import GpuSample

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_SECONDS: Final = 2.0
_MIN_GPM_SECONDS: Final = 0.1  # two GPM samples closer than this say nothing (NVIDIA's nvml.h)
_MILLI: Final = 1e-3

# nvmlReturn_t (NVIDIA's nvml.h). What this card or driver does not answer:
_NOT_HERE: Final = {
    2,  # invalid argument
    3,  # not supported
    4,  # no permission
    6,  # not found
    13,  # function not found
    25,  # argument version mismatch
    26,  # deprecated
}
# ... and what ends every reading:
_GONE: Final = {
    1,  # uninitialized
    9,  # driver not loaded
    12,  # library not found
    15,  # GPU is lost
    16,  # reset required
    18,  # driver and library do not match
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDevice:
    """What torch says about its device: enough to find it in NVML."""

    uuid: str | None = None  # without prefix
    pci_bus_id: str | None = None  # "00000000:3B:00.0"

    @classmethod
    def of(cls, device: Any) -> TorchDevice:
        """From a ``torch.device`` of type cuda."""
        import torch

        properties = torch.cuda.get_device_properties(device)
        uuid = getattr(properties, "uuid", None)
        bus, slot = getattr(properties, "pci_bus_id", None), getattr(properties, "pci_device_id", None)
        domain = getattr(properties, "pci_domain_id", 0)
        pci = f"{domain:08X}:{bus:02X}:{slot:02X}.0" if isinstance(bus, int) and isinstance(slot, int) else None
        return cls(uuid=str(uuid) if uuid is not None else None, pci_bus_id=pci)


class GpuUnavailableError(Exception):
    """NVML or the device in it cannot be reached; the message is the one note for the run."""


@dataclass(slots=True)
class _Window:
    """Sums since the last report. A reading holds for the time since the reading before it."""

    weighted: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    integrated_joules: float | None = None
    counted_joules: float | None = None
    throttle_reasons: int | None = None
    num_samples: int = 0

    def add(self, name: str, value: float, seconds: float) -> None:
        self.weighted[name] = self.weighted.get(name, 0.0) + value * seconds
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def mean(self, name: str) -> float | None:
        seconds = self.seconds.get(name, 0.0)
        return self.weighted[name] / seconds if seconds > 0 else None


class GpuSampler:
    """``start``, then ``take_window`` at each report, then ``close``.

    ``sample`` takes one sample by hand (the thread calls it every ``period_seconds``). ``notes`` says, in words, what
    is not measured and why.
    """

    def __init__(
        self, device: TorchDevice, *, period_seconds: float = 0.5, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._device = device
        self._period_seconds = period_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._window = _Window()
        self._nvml: Any = None
        self._handle: Any = None
        self._readings: dict[str, Callable[[], None]] = {}
        self._sampled_at: float | None = None
        self._elapsed = 0.0  # since the sample before
        self._last_energy_joules: float | None = None
        self._gpm: _Gpm | None = None
        self.is_mig = False
        self.notes: list[str] = []

    def open(self) -> None:
        """Find the device in NVML. Raises :class:`GpuUnavailableError` with the note for the run."""
        try:
            import pynvml
        except ImportError as error:
            raise GpuUnavailableError(f"no GPU figures: nvidia-ml-py is not installed ({error})") from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise GpuUnavailableError(f"no GPU figures: NVML does not start ({error})") from None
        try:
            self._handle = self._find_device()
        except GpuUnavailableError:
            self._shut_down()
            raise
        self._readings = self._available_readings()

    def start(self) -> None:
        """Sample in a daemon thread until ``close``."""
        self._thread = threading.Thread(target=self._run, name="ftcost-gpu-sampler", daemon=True)
        self._thread.start()

    def sample(self) -> None:
        """Take one sample now. Never raises."""
        try:
            now = self._clock()
            self._elapsed = now - self._sampled_at if self._sampled_at is not None else 0.0
            self._sampled_at = now
            for name in list(self._readings):
                if self._stop.is_set() or name not in self._readings:
                    return
                self._read(name)
            with self._lock:
                self._window.num_samples += 1
        except Exception:
            self._give_up("the sampler failed", exc_info=True)

    def take_window(self) -> GpuSample:
        """Time-weighted means since the last call. Touches no driver, so it cannot hang."""
        with self._lock:
            window, self._window = self._window, _Window()
        if window.num_samples == 0:
            return GpuSample()
        busy, memory = window.mean("busy"), window.mean("memory")
        energy = window.counted_joules if window.counted_joules is not None else window.integrated_joules
        source = "counter" if window.counted_joules is not None else "integrated_power"
        return GpuSample(
            busy_fraction=busy,
            sm_active_fraction=window.mean("sm_active"),
            tensor_active_fraction=window.mean("tensor_active"),
            dram_active_fraction=window.mean("dram_active"),
            memory_used_bytes=round(memory) if memory is not None else None,
            power_watts=window.mean("power"),
            energy_joules=energy,
            energy_source=source if energy is not None else None,
            throttle_reasons=window.throttle_reasons,
            num_samples=window.num_samples,
        )

    def close(self, timeout_seconds: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Stop the thread and leave NVML. A driver call that hangs is left to the daemon thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                self.notes.append(f"NVML did not answer within {timeout_seconds:g} s at the end of the run")
                return
        self._shut_down()

    @property
    def is_sampling(self) -> bool:
        return bool(self._readings)

    def _run(self) -> None:
        while self._readings:
            self.sample()
            if self._stop.wait(self._period_seconds):
                return

    def _find_device(self) -> Any:
        nvml = self._nvml
        attempts: list[tuple[Callable[[Any], Any], str]] = []
        if self._device.uuid is not None:
            bare = self._device.uuid.removeprefix("GPU-").removeprefix("MIG-")
            attempts += [(nvml.nvmlDeviceGetHandleByUUID, prefix + bare) for prefix in ("GPU-", "MIG-")]
        if self._device.pci_bus_id is not None:
            attempts.append((nvml.nvmlDeviceGetHandleByPciBusId, self._device.pci_bus_id))
        error: Exception | None = None
        for look_up, name in attempts:
            try:
                return look_up(name)
            except nvml.NVMLError as failure:
                error = failure
        asked = ", ".join(name for _, name in attempts) or "nothing: torch names neither UUID nor PCI address"
        raise GpuUnavailableError(f"no GPU figures: NVML does not know torch's device (asked for {asked}; {error})")

    def _available_readings(self) -> dict[str, Callable[[], None]]:
        readings: dict[str, Callable[[], None]] = {
            "busy": self._read_busy,
            "memory": self._read_memory,
            "power": self._read_power,
            "energy": self._read_energy,
            "throttle reasons": self._read_throttle_reasons,
        }
        try:
            self.is_mig = bool(self._nvml.nvmlDeviceIsMigDeviceHandle(self._handle).value)
        except self._nvml.NVMLError:
            self.is_mig = False
        if self.is_mig:
            # The driver counts these for the card, not for its slices.
            self.notes.append("MIG slice: no utilisation, power or energy; memory is the slice's")
            readings = {"memory": self._read_memory}
        try:
            self._gpm = _Gpm(self._nvml, self._handle)
            readings["GPM"] = self._read_gpm
        except (self._nvml.NVMLError, _NoGpmError):
            self._gpm = None  # cards before Hopper have none: nothing to say
        return readings

    def _read(self, name: str) -> None:
        nvml = self._nvml
        try:
            self._readings[name]()
        except nvml.NVMLError as error:
            code = getattr(error, "value", None)
            if code in _NOT_HERE:
                del self._readings[name]
                self.notes.append(f"GPU {name}: not available here ({error})")
            elif code in _GONE:
                self._give_up(f"sampling ended: {error}")
            # All else may pass: the reading is missing this time and tried again.

    def _give_up(self, why: str, *, exc_info: bool = False) -> None:
        self._readings = {}
        self.notes.append(f"GPU {why}")
        _log.warning("ftcost: GPU %s", why, exc_info=exc_info)

    def _shut_down(self) -> None:
        try:
            if self._gpm is not None:
                self._gpm.free()
            if self._nvml is not None:
                self._nvml.nvmlShutdown()
        except Exception:
            _log.debug("NVML shutdown failed", exc_info=True)

    def _add(self, name: str, value: float) -> None:
        with self._lock:
            self._window.add(name, value, self._elapsed)

    def _read_busy(self) -> None:
        self._add("busy", self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100)

    def _read_memory(self) -> None:
        self._add("memory", self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def _read_power(self) -> None:
        watts = self._nvml.nvmlDeviceGetPowerUsage(self._handle) * _MILLI
        with self._lock:
            self._window.add("power", watts, self._elapsed)
            self._window.integrated_joules = (self._window.integrated_joules or 0.0) + watts * self._elapsed

    def _read_energy(self) -> None:
        joules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) * _MILLI
        last, self._last_energy_joules = self._last_energy_joules, joules
        if last is not None and joules >= last:  # the counter starts again when the driver is loaded again
            with self._lock:
                self._window.counted_joules = (self._window.counted_joules or 0.0) + joules - last

    def _read_throttle_reasons(self) -> None:
        nvml = self._nvml
        read = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        read = read if read is not None else nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        reasons = int(read(self._handle))
        with self._lock:
            self._window.throttle_reasons = (self._window.throttle_reasons or 0) | reasons

    def _read_gpm(self) -> None:
        assert self._gpm is not None
        if self._sampled_at is not None:
            for name, fraction in self._gpm.read(self._sampled_at).items():
                self._add(name, fraction)


class _NoGpmError(Exception):
    """This device has no GPM metrics."""


class _Gpm:
    """Activity between two samples, where the card measures it (documented for Hopper and newer)."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        if not hasattr(nvml, "nvmlGpmQueryDeviceSupport"):
            raise _NoGpmError
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise _NoGpmError
        self._nvml, self._handle = nvml, handle
        self._metrics = {
            "sm_active": nvml.NVML_GPM_METRIC_SM_UTIL,
            "tensor_active": nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
            "dram_active": nvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
        }
        self._earlier, self._later = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._earlier_at: float | None = None

    def read(self, now: float) -> dict[str, float]:
        """Fractions since the sample before; empty on the first call and on calls too close together."""
        if self._earlier_at is None:
            self._sample(self._earlier)
            self._earlier_at = now
            return {}
        if now - self._earlier_at < _MIN_GPM_SECONDS:
            return {}
        self._sample(self._later)
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(self._metrics)
        request.sample1, request.sample2 = self._earlier, self._later
        for place, metric_id in enumerate(self._metrics.values()):
            request.metrics[place].metricId = metric_id
        self._nvml.nvmlGpmMetricsGet(request)
        self._earlier, self._later, self._earlier_at = self._later, self._earlier, now
        return {
            name: request.metrics[place].value / 100
            for place, name in enumerate(self._metrics)
            if request.metrics[place].nvmlReturn == self._nvml.NVML_SUCCESS
        }

    def _sample(self, into: Any) -> None:
        self._nvml.nvmlGpmSampleGet(self._handle, into)

    def free(self) -> None:
        for sample in (self._earlier, self._later):
            self._nvml.nvmlGpmSampleFree(sample)
