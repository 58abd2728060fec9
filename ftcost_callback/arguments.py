"""The arguments of the callback and of the monitor, checked, and when the bill began."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from costmodel.errors import CostModelError
from costmodel.specs import MAX_USD_PER_GPU_HOUR, GpuSpec, Price, parse_gpu
from ftcost_callback.records import is_number
from ftcost_callback.session_plan import Settings
from ftcost_callback.sinks.base import Sink

_log = logging.getLogger("ftcost_callback")

PRICE_VARIABLE: Final = "FTCOST_USD_PER_GPU_HOUR"
BILLING_VARIABLE: Final = "FTCOST_BILLING_STARTED_AT"
MAX_PROFILED_STEPS: Final = 50  # a trace of more fills the host's memory
_MAX_PROCESS_AGE_SECONDS: Final = 30 * 24 * 3600.0

SECONDS_PER_DAY: Final = 24 * 3600.0
_OLD_BILL_DAYS: Final = 90  # a machine rented longer than that is rare, a wrong date is not

_imported_at = time.time()
_first_session_begun = False


def checked_settings(given: Mapping[str, Any]) -> Settings:
    """From the arguments of the callback or the monitor, by name; one that is not taken there has its default.

    Raises :class:`CostModelError` for a wrong one.
    """
    settings = {each.name: given.get(each.name, each.default) for each in dataclasses.fields(Settings)}
    for name in ("window_steps", "dry_run_steps"):
        value = settings[name]
        _require(value is None or is_whole(value, at_least=1), name, value, "a whole number from 1 on")
    skipped = settings["skip_first_steps"]
    _require(is_whole(skipped, at_least=0), "skip_first_steps", skipped, "a whole number from 0 on")
    for name in ("budget_usd", "budget_hours", "peak_flops_per_second", "sample_period_seconds"):
        number = settings[name]
        is_absent = number is None and name != "sample_period_seconds"
        _require(is_absent or (is_number(number) and number > 0), name, number, "a number above 0")
    for name in ("stop_at_budget", "predict", "expert_load"):
        _require(isinstance(settings[name], bool), name, settings[name], "True or False")
    for name, choices in (("wandb_every", ("log", "step")), ("detail", ("default", "full"))):
        value = given[name]
        _require(value in choices, name, value, " or ".join(map(repr, choices)))
    has_budget = settings["budget_usd"] is not None or settings["budget_hours"] is not None
    stops = settings["stop_at_budget"]
    _require(has_budget or not stops, "stop_at_budget", stops, "given together with budget_usd or budget_hours")
    tier, cloud = settings["tier"], settings["cloud"]
    if tier is not None:
        from costmodel.price_catalog import TIERS

        _require(tier in TIERS, "tier", tier, f"one of {', '.join(TIERS)}")
    if cloud is not None:
        from costmodel.price_catalog import find_cloud

        _require(isinstance(cloud, str), "cloud", cloud, "a name such as 'RunPod' (ftcost prices lists them)")
        cloud = find_cloud(cloud)
    checked = {
        "price": _given_price(given["usd_per_gpu_hour"], look_in_environment=cloud is None),
        "cloud": cloud,
        "calibration": _given_calibration(settings["calibration"]),
        "profile_steps": _given_profile_steps(settings["profile_steps"], skipped),
        "gpu": _given_gpu(settings["gpu"]),
    }
    return Settings(**settings | checked)


class BillingStart:
    """``given``: when the machine's bill began; ``None``: when this process started, for its first training."""

    def __init__(self, given: str | float | datetime.datetime | None) -> None:
        self.given = epoch_seconds(given if given is not None else os.environ.get(BILLING_VARIABLE) or None)
        self._has_begun = False

    def seconds_until(self, now: float) -> tuple[float, float]:
        """(seconds from the start of the bill to ``now``, epoch seconds of that start)."""
        global _first_session_begun
        is_first, _first_session_begun = not _first_session_begun, True
        if self.given is not None and not self._has_begun:
            started_at = self.given
            if started_at > now:
                _log.warning("ftcost: billing_started_at lies in the future; the bill starts now")
                started_at = now
            elif now - started_at > _OLD_BILL_DAYS * SECONDS_PER_DAY:
                day = datetime.datetime.fromtimestamp(started_at, datetime.timezone.utc).date()
                _log.warning(
                    "ftcost: the bill runs since %s, %.0f days before this training; if that is not meant, give "
                    "billing_started_at the moment this machine was rented",
                    day,
                    (now - started_at) / SECONDS_PER_DAY,
                )
        elif is_first:
            started_at = now - process_age_seconds(now)
        else:
            started_at = now  # a later training in one process: what lay between is not this run's
        self._has_begun = True
        return now - started_at, started_at


def process_age_seconds(now: float) -> float:
    """Seconds since this process started; where the system does not say, since this module was imported.

    ``now``: epoch seconds. Linux: field 22 of /proc/self/stat, clock ticks since boot (proc(5)).
    """
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        started_ticks = int(stat.rpartition(")")[2].split()[19])  # the name in brackets may hold spaces
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        age = -1.0
    return age if 0 <= age <= _MAX_PROCESS_AGE_SECONDS else max(0.0, now - _imported_at)


def is_whole(value: object, *, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def given_sinks(sinks: Any) -> list[Sink]:
    """Raises :class:`CostModelError` for what rows cannot be sent to."""
    is_list = isinstance(sinks, Iterable) and not isinstance(sinks, (str, Mapping))
    given = list(sinks) if is_list else []
    is_right = is_list and not any(each is None or isinstance(each, (str, int, float, type)) for each in given)
    _require(is_right, "sinks", sinks, "a list of sinks, such as [ConsoleSink()], or [] for none")
    return given


def given_folder(folder: Any, name: str = "output_dir") -> str | os.PathLike[str]:
    """Raises :class:`CostModelError` for what is no path."""
    is_path = isinstance(folder, (str, os.PathLike)) and "\0" not in os.fspath(folder)
    _require(is_path, name, folder, "the path of a folder")
    return folder  # type: ignore[no-any-return]


def _given_calibration(calibration: Any) -> Any:
    """Read here once, so that a wrong file is said before the training starts. Raises :class:`CostModelError`."""
    from costmodel.stored_calibrations import check_calibration

    if isinstance(calibration, os.PathLike):
        calibration = os.fspath(calibration)
    is_right = calibration is None or isinstance(calibration, (str, Mapping))
    _require(is_right, "calibration", calibration, "'auto', or the path of a file that ftcost calibrate wrote")
    if calibration is not None:
        check_calibration(calibration)
    return calibration


def _require(is_right: bool, name: str, value: object, wanted: str) -> None:
    if not is_right:
        raise CostModelError(f"{name} must be {wanted}, got {value!r}")


def _given_profile_steps(steps: Any, skip_first_steps: int) -> tuple[int, int] | None:
    """(first, last), both inside; a number stands for so many steps after the warm-up. Raises :class:`CostModelError`."""
    if steps is None or (steps == 0 and steps is not False):
        return None
    if isinstance(steps, int) and not isinstance(steps, bool):
        steps = (skip_first_steps + 1, skip_first_steps + steps)
    wanted = f"(first step, last step), such as (20, 25), of at most {MAX_PROFILED_STEPS} steps"
    is_pair = isinstance(steps, (tuple, list)) and len(steps) == 2 and all(is_whole(each, at_least=1) for each in steps)
    _require(is_pair, "profile_steps", steps, wanted)
    first, last = steps
    _require(1 <= first <= last < first + MAX_PROFILED_STEPS, "profile_steps", steps, wanted)
    return first, last


def _given_gpu(gpu: str | Mapping[str, Any] | GpuSpec | None) -> str | Mapping[str, Any] | None:
    """Checked here, so that a wrong name is said before the training starts. Raises :class:`CostModelError`."""
    if gpu is None:
        return None
    if isinstance(gpu, str):
        from costmodel.gpu_catalog import find_gpu
        from costmodel.probes import asks_for_probe, probed_device

        if asks_for_probe(gpu):
            return parse_gpu(probed_device(gpu)).model_dump(exclude_none=True)

        return find_gpu(gpu).name
    return parse_gpu(gpu).model_dump(exclude_none=True)


def _given_price(usd_per_gpu_hour: float | None, *, look_in_environment: bool) -> Price | None:
    value: Any = usd_per_gpu_hour
    source = "given"
    if value is None and look_in_environment:
        value, source = os.environ.get(PRICE_VARIABLE) or None, PRICE_VARIABLE
    if value is None:
        return None
    name = "usd_per_gpu_hour" if source == "given" else source
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    _require(
        0 < number <= MAX_USD_PER_GPU_HOUR, name, value, "a positive number of dollars an hour (leave it out for hours)"
    )
    return Price(usd_per_gpu_hour=number, usd_per_instance_hour=number, source=source)


def epoch_seconds(moment: str | float | datetime.datetime | None) -> float | None:
    """Epoch seconds of a moment; a time without a zone is UTC."""
    if moment is None:
        return None
    if isinstance(moment, str):
        moment = _moment_from_text(moment)
    if isinstance(moment, datetime.datetime):
        zoned = moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.timezone.utc)
        return zoned.timestamp()
    wanted = "ISO 8601 (2026-08-17T09:30:00Z), epoch seconds or a datetime"
    _require(is_number(moment) and moment >= 0, "billing_started_at", moment, wanted)
    return float(moment)


def _moment_from_text(text: str) -> float | datetime.datetime:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))  # Python 3.10 does not read the Z
    except ValueError:
        raise CostModelError(
            f"billing_started_at must be ISO 8601 (2026-08-17T09:30:00Z) or epoch seconds, got {text!r}"
        ) from None


def default_sinks(detail: Literal["default", "full"]) -> list[Sink]:
    from ftcost_callback.sinks import ConsoleSink, WandbSink

    return [ConsoleSink(), WandbSink(detail)]
