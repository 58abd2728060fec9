"""Reads what an offline run wrote, with wandb-core's own reader."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

OFFLINE_ENVIRONMENT = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_X_DISABLE_STATS": "true",
}


def records(directory: Path) -> list[dict[str, Any]]:
    """Every record of the runs below ``directory``, in the order the runs began."""
    from wandb.util import get_core_path

    found: list[dict[str, Any]] = []
    for run_file in sorted(directory.glob("wandb/*run-*/run-*.wandb")):
        reader = [get_core_path(), "leet", "inspect", "--json", "--no-observability", "--run-file", str(run_file)]
        output = subprocess.run([*reader, str(run_file.parent)], capture_output=True, text=True, check=True).stdout
        found += [json.loads(line) for line in output.splitlines()]
    return found


def history(directory: Path) -> list[dict[str, Any]]:
    """The rows, without wandb's own columns."""
    rows = [record["history"]["item"] for record in records(directory) if record["type"] == "history"]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


def merged(directory: Path, kind: str) -> dict[str, Any]:
    """What config or summary hold in the end."""
    values: dict[str, Any] = {}
    for record in records(directory):
        if record["type"] == kind:
            values |= record[kind].get("update", {})
    return values
