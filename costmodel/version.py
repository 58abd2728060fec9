"""The version of the installed package."""

from __future__ import annotations

import functools


@functools.lru_cache(maxsize=1)
def ftcost_version() -> str:
    """``"0+unknown"`` where it runs from a source tree that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ftcost")
    except PackageNotFoundError:
        return "0+unknown"
