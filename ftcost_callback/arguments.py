"""The arguments of the callback and of the monitor, checked, and when the bill began."""

from __future__ import annotations

import datetime
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from costmodel.errors import CostModelError
from costmodel.specs import MAX_USD_PER_GPU_HOUR, GpuSpec, Price, parse_gpu
from ftcost_callback.session_plan import Settings
from ftcost_callback.sinks.base import Sink

_log = logging.getLogger("ftcost_callback")

PRICE_VARIABLE: Final = "FTCOST_USD_PER_GPU_HOUR"
BILLING_VARIABLE: Final = "FTCOST_BILLING_STARTED_AT"
MAX_PROFILED_STEPS: Final = 50  # a trace of more fills the host's memory
_MAX_PROCESS_AGE_SECONDS: Final = 30 * 24 * 3600.0

_imported_at = time.time()
_first_session_begun = False


def checked_settings(
    *,
    usd_per_gpu_hour: float | None,
    cloud: str | None,
    tier: Literal["on_demand", "spot", "reserved", "community"] | None,
    budget_usd: float | None,
    budget_hours: float | None,
    stop_at_budget: bool,
    window_steps: int,
    skip_first_steps: int,
    predict: bool,
    calibration: Any,
    dry_run_steps: int | None = None,
    profile_steps: tuple[int, int] | int | None,
    sample_period_seconds: float,
    expert_load: bool,
    wandb_every: Literal["log", "step"],
    detail: Literal["default", "full"],
    peak_flops_per_second: float | None,
    gpu: str | Mapping[str, Any] | GpuSpec | None,
) -> Settings:
    """Raises :class:`CostModelError` for a wrong one."""
    for name, value in (("window_steps", window_steps), ("dry_run_steps", dry_run_steps)):
        _require(value is None or (isinstance(value, int) and value >= 1), name, value, "a whole number from 1 on")
    is_count = isinstance(skip_first_steps, int) and skip_first_steps >= 0
    _require(is_count, "skip_first_steps", skip_first_steps, "a whole number from 0 on")
    for name, number in (
        ("budget_usd", budget_usd),
        ("budget_hours", budget_hours),
        ("peak_flops_per_second", peak_flops_per_second),
        ("sample_period_seconds", sample_period_seconds),
    ):
        _require(number is None or (math.isfinite(number) and number > 0), name, number, "a number above 0")
    _require(wandb_every in ("log", "step"), "wandb_every", wandb_every, "'log' or 'step'")
    _require(detail in ("default", "full"), "detail", detail, "'default' or 'full'")
    _require(
        not (stop_at_budget and budget_usd is None and budget_hours is None),
        "stop_at_budget",
        stop_at_budget,
        "given together with budget_usd or budget_hours",
    )
    if cloud is not None:
        from costmodel.catalog import find_cloud

        cloud = find_cloud(cloud)
    return Settings(
        price=_given_price(usd_per_gpu_hour, look_in_environment=cloud is None),
        cloud=cloud,
        tier=tier,
        budget_usd=budget_usd,
        budget_hours=budget_hours,
        stop_at_budget=stop_at_budget,
        window_steps=window_steps,
        skip_first_steps=skip_first_steps,
        predict=predict,
        calibration=calibration,
        dry_run_steps=dry_run_steps,
        profile_steps=_given_profile_steps(profile_steps, skip_first_steps),
        sample_period_seconds=sample_period_seconds,
        expert_load=expert_load,
        wandb_every=wandb_every,
        peak_flops_per_second=peak_flops_per_second,
        gpu=_given_gpu(gpu),
    )


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


def _require(is_right: bool, name: str, value: object, wanted: str) -> None:
    if not is_right:
        raise CostModelError(f"{name} must be {wanted}, got {value!r}")


def _given_profile_steps(steps: Any, skip_first_steps: int) -> tuple[int, int] | None:
    """(first, last), both inside; a number stands for so many steps after the warm-up. Raises :class:`CostModelError`."""
    if steps is None or steps == 0:
        return None
    if isinstance(steps, int):
        steps = (skip_first_steps + 1, skip_first_steps + steps)
    wanted = f"(first step, last step), such as (20, 25), of at most {MAX_PROFILED_STEPS} steps"
    is_pair = isinstance(steps, (tuple, list)) and len(steps) == 2 and all(isinstance(each, int) for each in steps)
    _require(is_pair, "profile_steps", steps, wanted)
    first, last = steps
    _require(1 <= first <= last < first + MAX_PROFILED_STEPS, "profile_steps", steps, wanted)
    return first, last


def _given_gpu(gpu: str | Mapping[str, Any] | GpuSpec | None) -> str | Mapping[str, Any] | None:
    """Checked here, so that a wrong name is said before the training starts. Raises :class:`CostModelError`."""
    if gpu is None:
        return None
    if isinstance(gpu, str):
        from costmodel.catalog import find_gpu
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
        number = float(value)
    except (TypeError, ValueError):
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
    _require(math.isfinite(moment), "billing_started_at", moment, "a moment")
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
