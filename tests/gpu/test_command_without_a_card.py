"""The GPU command, gone through on a CPU with tiny shapes: every section, the table, and the file it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import JOBS
from run import SECTIONS, main, table

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_all_of_it_with_tiny_shapes(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    names = ["llama-1b LoRA", "moe full bf16, checkpointing"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu" / "run.py"), "--device", "cpu", "--tiny", "--out", str(out),
         "--jobs", *names],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert set(SECTIONS) < set(result)
    assert not any("failed" in result[section] for section in ("facts", "clock", "overhead")), result
    assert [each["name"] for each in result["jobs"]] == names
    for each in result["jobs"]:
        assert "failed" not in each, each
        assert each["measured"]["num_tokens_per_step"] == 2 * 16
        assert len(each["measured"]["step_seconds"]) == 6
        assert each["predicted"]["step_seconds"] > 0
        assert each["predicted"]["peak_allocated_bytes"] > 0
    assert result["jobs"][0]["job"]["method"] == "lora"
    assert result["jobs"][1]["job"]["gradient_checkpointing"] is True
    assert result["clock"]["total_ratio"] > 0
    printed = done.stdout.splitlines()[-3:]
    assert [line.split()[0] for line in printed] == ["job", "llama-1b", "moe"]


def test_without_a_card_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    assert main([]) == 2
    assert "--device cpu --tiny" in capsys.readouterr().err


def test_there_are_a_dozen_jobs_with_a_name_each() -> None:
    assert len(JOBS) >= 12
    assert len({job.name for job in JOBS}) == len(JOBS)


def test_the_table_holds_measured_over_predicted() -> None:
    row = {
        "name": "a",
        "measured": {"step_seconds_median": 0.3, "peak_allocated_bytes": 2**31, "peak_reserved_bytes": None},
        "predicted": {"step_seconds": 0.2, "peak_allocated_bytes": 2**30, "peak_reserved_bytes": 1},
    }
    lines = table([row, {"name": "b", "failed": "CUDA out of memory"}])
    assert lines[1].split() == ["a", "0.3000", "1.50", "2.00", "2.00", "-", "-"]
    assert lines[2].split(maxsplit=1) == ["b", "failed: CUDA out of memory"]
