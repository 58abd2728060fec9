"""The console script ``ftcost``: the pre-flight commands of :mod:`costmodel.cli` and those that read run records.

A command here imports what it needs inside itself, so that ``ftcost estimate`` stays fast.
"""

from __future__ import annotations

import sys

from costmodel.cli import app, run

__all__ = ["app", "main"]


# Commands over recorded runs are added below, each with @app.command(...): `report` and `calibrate`.


def main() -> None:
    """Entry point of the console script; the exit code is that of :func:`costmodel.cli.run`."""
    sys.exit(run(application=app))
