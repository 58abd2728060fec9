"""Reads what an offline run wrote, with wandb-core's own reader."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

OFFLINE_ENVIRONMENT = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_X_DISABLE_STATS": "true",
}


def records_by_run(directory: Path) -> list[list[dict[str, Any]]]:
    """The records of each run below ``directory``, in the order the runs began.

    The client names a run's folder by the second it began in and then by chance, so the order is the one its record states.
    """
    _wait_until_written()
    return sorted(map(_records_of_file, directory.glob("wandb/*run-*/run-*.wandb")), key=_start_time)


def records(directory: Path) -> list[dict[str, Any]]:
    """Every record of the runs below ``directory``, in the order the runs began."""
    return list(itertools.chain.from_iterable(records_by_run(directory)))


def _wait_until_written() -> None:
    """``wandb.finish()`` asks the client's own process to write the file to its end, and does not wait for it.

    Source: wandb 0.31 ``ServiceConnection.inform_finish``, which has no answer; ``teardown`` waits for the process.
    """
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is None:
        wandb.teardown()


def _records_of_file(run_file: Path) -> list[dict[str, Any]]:
    from wandb.util import get_core_path

    reader = [get_core_path(), "leet", "inspect", "--json", "--no-observability", "--run-file", str(run_file)]
    output = subprocess.run([*reader, str(run_file.parent)], capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def _start_time(found: list[dict[str, Any]]) -> str:
    """ISO 8601 in UTC, so it sorts as text; a file without a run (cut off at its head) comes first."""
    return next((record["run"]["start_time"] for record in found if record["type"] == "run"), "")


def history(directory: Path) -> list[dict[str, Any]]:
    """The rows, without wandb's own columns."""
    rows = [record["history"]["item"] for record in records(directory) if record["type"] == "history"]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


def merged(directory: Path, kind: str) -> dict[str, Any]:
    """What config or summary hold in the end."""
    return merged_updates(records(directory), kind)


def merged_updates(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """What config or summary hold after these records."""
    values: dict[str, Any] = {}
    for record in found:
        if record["type"] == kind:
            values |= record[kind].get("update", {})
    return values
