from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _nothing_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prices, probes and calibrations of the person who runs the tests stay out of them."""
    monkeypatch.setenv("FTCOST_CONFIG_DIR", str(tmp_path / "config"))
    for name in ("FTCOST_USD_PER_GPU_HOUR", "FTCOST_PRICE_FILE", "GPUHUNT_CATALOG_DIR"):
        monkeypatch.delenv(name, raising=False)
