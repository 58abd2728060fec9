"""README.md and the pages of docs/ do what they say: blocks marked ``runnable`` are run, output shown below is compared.

A shown output that ends with a line ``...`` is the beginning of the real one.
``UPDATE_README=1 pytest tests/test_readme.py`` writes the real output into the pages instead.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
# A block marked runnable and, if one follows directly, the block with its output.
RUNNABLE = re.compile(
    r"^<!-- runnable -->\n```(?P<language>bash|python)\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
PAGES = (README, *sorted((README.parent / "docs").glob("*.md")))
BLOCKS = [(page, block) for page in PAGES for block in RUNNABLE.finditer(page.read_text())]


def run_block(language: str, code: str, folder: Path) -> str:
    """The block's stdout, run in ``folder`` with this interpreter's console scripts first. It must not fail."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    fixed = {"PATH": path, "NO_COLOR": "1", "COLUMNS": "110", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    command = ["bash", "-euo", "pipefail", "-c", code] if language == "bash" else [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=os.environ | fixed, check=False)
    assert done.returncode == 0, f"{code}\nended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def as_shown(printed: str, shown: str) -> str:
    """``printed`` without trailing blanks, cut after as many lines as ``shown`` has before its ``...``."""
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    if shown.endswith("\n...\n"):
        lines = [*lines[: len(shown.splitlines()) - 1], "..."]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("page", "block"), BLOCKS, ids=[f"{page.name}: {block['code'].splitlines()[0][:40]}" for page, block in BLOCKS]
)
def test_block_runs_and_prints_what_is_shown(page: Path, block: re.Match[str], tmp_path: Path) -> None:
    printed = run_block(block["language"], block["code"], tmp_path)
    if block["output"] is None:
        return
    real = as_shown(printed, block["output"])
    if os.environ.get("UPDATE_README"):
        text = page.read_text()
        page.write_text(text.replace(block[0], block[0].replace(f"```text\n{block['output']}```", f"```text\n{real}```")))
        return
    assert real == block["output"]


def test_the_readme_shows_at_least_one_command_with_its_output() -> None:
    assert any(page == README and block["language"] == "bash" and block["output"] for page, block in BLOCKS)


def test_the_two_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    makefile = (README.parent / "Makefile").read_text()
    commands = re.findall(r"^make (\w+)", README.read_text(), re.MULTILINE)
    assert {"demo", "test"} <= set(commands)
    assert [target for target in commands if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_every_local_link_and_picture_of_the_readme_exists() -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", README.read_text())
    assert [target for target in targets if not (README.parent / target).exists()] == []
