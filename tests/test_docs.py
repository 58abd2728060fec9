"""The documentation holds: pages made from code are fresh, and the site builds with every link leading somewhere."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_pages_made_from_code_are_fresh() -> None:
    done = subprocess.run([sys.executable, DOCS / "generate.py", "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def pages_of(navigation: object) -> set[str]:
    if isinstance(navigation, str):
        return {navigation}
    children = navigation.values() if isinstance(navigation, dict) else navigation
    assert isinstance(navigation, dict | list)
    return set().union(*(pages_of(child) for child in children))


def test_every_page_is_in_the_navigation() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert pages_of(navigation) == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}


def test_every_example_s_source_is_on_its_page() -> None:
    page = (DOCS / "examples.md").read_text()
    files = [path.name for path in (ROOT / "examples").iterdir() if path.suffix in {".py", ".sh", ".json"}]
    assert [name for name in files if f'--8<-- "examples/{name}"' not in page] == []


@pytest.mark.slow
def test_the_site_builds_and_no_link_leads_nowhere(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "faq" / "index.html").exists()
