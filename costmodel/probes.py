"""What ``ftcost probe`` stored: a file for each device in the user's configuration folder, read where a job asks for it.

``gpu="probe"`` is this machine's newest, ``gpu="probe:NAME"`` the one of that device, of any machine, or the file NAME.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from typing import Any, Final

from costmodel.errors import AmbiguousNameError, CostModelError, UnknownNameError, short_path, shown
from costmodel.strict_json import parse_json, read_json_text
from costmodel.whole_file import write_whole

CONFIG_FOLDER_VARIABLE: Final = "FTCOST_CONFIG_DIR"
FOLDER_NAME: Final = "probes"
SCHEMA_VERSION: Final = 1
_NAME: Final = "probe"
_KIND: Final = "ftcost probe"
_WAY_OUT: Final = "ftcost probe measures this one"


def config_folder() -> str:
    """Where this user's own settings live: ``FTCOST_CONFIG_DIR``, else ``ftcost`` in the system's usual place."""
    given = os.environ.get(CONFIG_FOLDER_VARIABLE)
    if given:
        return given
    usual = os.environ.get("APPDATA") if os.name == "nt" else os.environ.get("XDG_CONFIG_HOME")
    return os.path.join(usual or os.path.join(os.path.expanduser("~"), ".config"), "ftcost")


def probes_folder() -> str:
    return os.path.join(config_folder(), FOLDER_NAME)


def default_path(device_name: str) -> str:
    """One file for each device; a newer probe takes the place of an older."""
    return os.path.join(probes_folder(), f"{re.sub(r'[^a-z0-9.]+', '-', device_name.lower()).strip('-')}.json")


def asks_for_probe(gpu: str) -> bool:
    return gpu.partition(":")[0].strip().lower() == _NAME


def this_machine() -> str:
    """What tells one kind of machine from another without naming it: processor, processors, memory."""
    try:
        memory = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (AttributeError, OSError, ValueError):
        memory = "unknown memory"
    return f"{_processor()}, {os.cpu_count()} processors, {memory}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def write_probe(path: str, device: Mapping[str, Any], *, created_on: str) -> None:
    """``device``: a ``GpuSpec`` mapping. Whole or not at all. Raises :class:`CostModelError` where it cannot be written."""
    content = {
        "kind": _KIND,
        "schema_version": SCHEMA_VERSION,
        "created_on": created_on,
        "machine": this_machine(),
        "device": dict(device),
    }
    try:
        write_whole(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise CostModelError(f"cannot write the probe {path}: {error.strerror or error}") from None


def read_probe(path: str) -> dict[str, Any]:
    """The file's mapping. Raises :class:`CostModelError` where it is missing, broken or something else."""
    try:
        text = read_json_text(path)
    except OSError as error:
        raise CostModelError(
            f"no probe at {short_path(path)} ({error.strerror or error}); ftcost probe --out FILE writes one"
        ) from None
    except ValueError as error:
        raise CostModelError(f"{path} cannot be read as a probe: {error}; {_way_out(path)}") from None
    try:
        content = parse_json(text, path)
    except CostModelError as error:
        raise CostModelError(f"{error}; {_way_out(path)}") from None
    if not isinstance(content, dict) or content.get("kind") != _KIND or not isinstance(content.get("device"), dict):
        raise CostModelError(f"{path} holds no probe; {_way_out(path)}")
    if content.get("schema_version") != SCHEMA_VERSION:
        raise CostModelError(
            f"{path} is a probe of version {shown(content.get('schema_version'))}, this ftcost reads {SCHEMA_VERSION}; "
            f"{_way_out(path)}"
        )
    for name in ("created_on", "machine"):
        if not isinstance(content.get(name), str):
            raise CostModelError(f"{path}: {name} is missing or no text; {_way_out(path)}")
    if not isinstance(content["device"].get("name"), str):
        raise CostModelError(f"{path}: the device has no name; {_way_out(path)}")
    return content


def probed_device(gpu: str) -> dict[str, Any]:
    """The ``GpuSpec`` mapping that ``probe`` or ``probe:NAME`` asks for; its name says when it was probed.

    Raises :class:`CostModelError`, with the way out, where there is none, several fit, or it is another machine's.
    """
    wanted = gpu.partition(":")[2].strip()
    if wanted and (wanted.lower().endswith(".json") or os.path.isfile(wanted)):
        return _dated(read_probe(wanted))
    if wanted:
        return _dated(_named(wanted))
    found = [content for content in _stored() if content["machine"] == this_machine()]
    if not found:
        others = ", ".join(content["device"]["name"] for content in _stored())
        if others:
            raise CostModelError(
                f"no probe of this machine in {probes_folder()}, only of others ({others}); {_WAY_OUT}, and gpu probe:NAME "
                "takes another one's"
            )
        raise CostModelError(f"no probe in {probes_folder()}; {_WAY_OUT}")
    kinds = {content["device"].get("vendor") == "CPU" for content in found}
    if len(kinds) > 1:
        names = [f"probe:{content['device']['name']}" for content in found]
        raise AmbiguousNameError("probed device of this machine", gpu, names)
    return _dated(max(found, key=lambda content: (content["created_on"], content["modified"])))


def _named(wanted: str) -> dict[str, Any]:
    stored = _stored()
    names = [content["device"]["name"] for content in stored]
    matches = [content for content in stored if content["device"]["name"].lower() == wanted.lower()]
    matches = matches or [content for content in stored if wanted.lower() in content["device"]["name"].lower()]
    if not matches:
        raise UnknownNameError("probe", wanted, names, way_out=f"{_WAY_OUT} and stores it in {probes_folder()}")
    if len(matches) > 1:
        raise AmbiguousNameError("probe", wanted, [content["device"]["name"] for content in matches])
    return matches[0]


def _stored() -> list[dict[str, Any]]:
    folder = probes_folder()
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    except OSError:
        return []
    paths = [os.path.join(folder, name) for name in names]
    return [{**read_probe(path), "modified": os.path.getmtime(path)} for path in paths]


def _dated(content: Mapping[str, Any]) -> dict[str, Any]:
    device = dict(content["device"])
    return {**device, "name": f"{device['name']}, probed {content['created_on']}"}


def _way_out(path: str) -> str:
    return f"delete {path} and run ftcost probe again"
