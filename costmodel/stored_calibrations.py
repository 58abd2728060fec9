"""Calibrations in small files: write and read them, and find the one that a job's ``calibration`` means.

Used only where a job asks for it, and always named in the answer.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from costmodel import constants as c
from costmodel.calibration import Calibration, Style
from costmodel.defaults import ResolvedJob
from costmodel.errors import CostModelError, short_path, shown
from costmodel.model_spec import ModelSpec
from costmodel.probes import config_folder
from costmodel.specs import GpuSpec
from costmodel.strict_json import read_json_text
from costmodel.whole_file import write_whole
from costmodel.workload import Batch

AUTO: Final = "auto"
FOLDER_NAME: Final = "calibrations"
_FACTOR_LIMITS: Final = (0.02, 50.0)
_FLOATS: Final = (
    *("device_factor", "host_factor", "residual"),
    *("num_tokens_low", "num_tokens_high", "num_sequences_low", "num_sequences_high"),
)
_WHOLE_NUMBERS: Final = ("num_factors", "num_steps", "num_runs", "num_active_params_low", "num_active_params_high")


def calibrations_folder() -> str:
    """Where ``ftcost calibrate`` keeps what it is given no ``--out`` for, and where ``auto`` looks."""
    return os.path.join(config_folder(), FOLDER_NAME)


def default_path(calibration: Calibration) -> str:
    """One file for each card, stack, kind of job and model; a newer calibration takes the place of an older."""
    style = calibration.style
    size = _size_text(calibration.num_active_params_high)
    words = (style.gpu, f"{style.framework} {style.framework_major_version}", style.kind, calibration.model_family, size)
    return os.path.join(calibrations_folder(), f"{re.sub(r'[^a-z0-9.]+', '-', ' '.join(words).lower())}.json")


def _size_text(num_params: int) -> str:
    """``6.6b``, ``0.5b``, ``14m``, ``90k``: never ``0.0b``."""
    if num_params >= 1e8:
        return f"{num_params / 1e9:.1f}b"
    return f"{num_params / 1e6:.0f}m" if num_params >= 1e6 else f"{num_params / 1e3:.0f}k"


def write_calibration(path: str, calibration: Calibration) -> None:
    """Whole or not at all. Raises :class:`CostModelError` where the file cannot be written."""
    try:
        write_whole(path, json.dumps(calibration.to_dict(), indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise CostModelError(f"cannot write the calibration {path}: {error.strerror or error}") from None


def read_calibration(path: str) -> Calibration:
    """Raises :class:`CostModelError` for a file that is missing or holds no calibration."""
    try:
        facts = os.stat(path)
    except (OSError, ValueError) as error:  # a name that no file system takes is a ValueError
        reason = error.strerror if isinstance(error, OSError) else "no file can have this name"
        raise CostModelError(
            f"no calibration at {short_path(path)} ({reason}); ftcost calibrate RUN --out FILE writes one"
        ) from None
    return _read(path, facts.st_mtime_ns, facts.st_size)


@functools.lru_cache(maxsize=64)
def _read(path: str, modified_ns: int, size: int) -> Calibration:
    del modified_ns, size  # only tell one content of the file from the next
    try:
        value = json.loads(read_json_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CostModelError(f"{path} cannot be read as a calibration: {error}") from None
    return calibration_from_mapping(value, path)


def calibration_from_mapping(value: Any, where: str = "the calibration") -> Calibration:
    """Unknown fields are passed over. Raises :class:`CostModelError` for anything that is no calibration."""
    try:
        fields = {each.name: value[each.name] for each in dataclasses.fields(Calibration)}
        fields["style"] = Style(**{each.name: fields["style"][each.name] for each in dataclasses.fields(Style)})
        for name in ("models", "sources"):
            fields[name] = tuple(str(each) for each in fields[name])
        for name in ("model_family", "framework_version", "constants_version", "ftcost_version", "created_on"):
            fields[name] = str(fields[name])
        for name in _FLOATS:
            fields[name] = float(fields[name])
            if not math.isfinite(fields[name]):
                raise ValueError(f"{name} must be a finite number, got {shown(value[name])}")
        for name in _WHOLE_NUMBERS:
            fields[name] = int(fields[name])
        if fields["error"] is not None:
            fields["error"] = float(fields["error"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CostModelError(
            f"{where} holds no calibration ({type(error).__name__}: {error}); ftcost calibrate RUN --out FILE writes one"
        ) from None
    low, high = _FACTOR_LIMITS
    for name in ("device_factor", "host_factor"):
        if not low <= fields[name] <= high:
            raise CostModelError(f"{where}: {name} must lie between {low:g} and {high:g}, got {fields[name]:g}")
    if fields["error"] is not None and not 0 < fields["error"] < 10:
        raise CostModelError(f"{where}: error must be a share between 0 and 10, got {fields['error']:g}")
    return Calibration(**fields)


# --- what a job's calibration means ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Applied:
    """A calibration in use: where it came from, and whether its error is about the job's batch."""

    calibration: Calibration
    file: str | None  # None: given with the job itself
    is_inside: bool

    def interval_factor(self, uncalibrated: float) -> float:
        """The step lies between estimate / factor and estimate * factor: the calibration's error inside its range."""
        error = self.calibration.error
        return min(uncalibrated, math.exp(error)) if self.is_inside and error is not None else uncalibrated

    def to_dict(self) -> dict[str, Any]:
        """The answer's ``calibration``."""
        whole = self.calibration.to_dict()
        names = (
            *("device_factor", "host_factor", "num_factors", "error", "num_tokens_low", "num_tokens_high"),
            *("num_sequences_low", "num_sequences_high", "model_family", "models", "num_runs", "created_on"),
        )
        return {"file": self.file, "is_inside_range": self.is_inside, **{name: whole[name] for name in names}}


def check_calibration(wanted: str | Mapping[str, Any]) -> None:
    """Raises :class:`CostModelError` for a named file, or a content, that is no calibration."""
    if wanted != AUTO:
        read_calibration(wanted) if isinstance(wanted, str) else calibration_from_mapping(wanted)


def find_calibration(
    wanted: str | Mapping[str, Any],
    model: ModelSpec,
    job: ResolvedJob,
    gpu: GpuSpec,
    batch: Batch,
    warn: Callable[[str], None],
) -> Applied | None:
    """What a job's ``calibration`` means for it; ``None``, and a warning, where nothing measured matches.

    ``auto`` takes the user's own file of the same card and style: of the same family before others, with the batch inside
    its range before others, then the newest. Raises :class:`CostModelError` for a named file that is no calibration.
    """
    style = Style.of(model, job, gpu)
    if wanted == AUTO:
        found = []
        for path, calibration in _own(warn):
            if not style.differences(calibration.style):
                is_inside = calibration.covers(model, batch)
                rank = (calibration.model_family == model.family, is_inside, calibration.created_on, path)
                found.append((rank, Applied(calibration, path, is_inside)))
        if not found:
            warn(
                f"calibration auto: none in {calibrations_folder()} was measured on {style.gpu} with {style.framework} "
                f"{style.framework_major_version}, {style.kind}, in this style; ftcost calibrate RUN makes one"
            )
            return None
        applied = max(found, key=lambda entry: entry[0])[1]
    else:
        file = wanted if isinstance(wanted, str) else None
        calibration = read_calibration(wanted) if isinstance(wanted, str) else calibration_from_mapping(wanted)
        if differences := calibration.style.differences(style):
            warn(
                f"the calibration{f' {file}' if file else ''} is not used: what was measured is not what this job runs "
                f"({'; '.join(differences)})"
            )
            return None
        applied = Applied(calibration, file, calibration.covers(model, batch))
    if applied.calibration.constants_version != c.CONSTANTS_VERSION:
        warn(
            f"the calibration was fitted with constants {applied.calibration.constants_version}, these are "
            f"{c.CONSTANTS_VERSION}: run ftcost calibrate again"
        )
    return applied


def _own(warn: Callable[[str], None]) -> Iterator[tuple[str, Calibration]]:
    folder = calibrations_folder()
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    except OSError:
        return
    for name in names:
        path = os.path.join(folder, name)
        try:
            yield path, read_calibration(path)
        except CostModelError as error:
            warn(str(error))
