"""docs/ci.md does what it says: its YAML parses, its commands run and end with the codes it lists."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from costmodel import cli

TEXT = (Path(__file__).parent.parent / "docs" / "ci.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
JOB: dict[str, Any] = {
    "model": "meta-llama/Llama-2-7b-hf",
    "gpu": "A40",
    "method": "lora",
    "bf16": True,
    "framework": "trl",
    "per_device_train_batch_size": 4,
    "lengths": {"dataset": "math_14k"},
    "num_samples": 15_000,
    "usd_per_gpu_hour": 0.79,
}


def _commands(value: Any) -> list[str]:
    """Every ``entry`` and ``run`` line that calls ftcost."""
    if isinstance(value, dict):
        lines = [line for name in ("entry", "run") for line in str(value.get(name, "")).splitlines()]
        return [line.strip() for line in lines if line.strip().startswith("ftcost")] + [
            command for part in value.values() for command in _commands(part)
        ]
    return [command for part in value for command in _commands(part)] if isinstance(value, list) else []


COMMANDS = [command for block in BLOCKS for command in _commands(yaml.safe_load(block))]


def test_there_are_a_hook_and_a_step() -> None:
    hooks, workflow = (yaml.safe_load(block) for block in BLOCKS[:2])
    assert hooks["repos"][0]["hooks"][0]["entry"] == "ftcost estimate job.json --budget-usd 50"
    assert any("ftcost estimate" in step.get("run", "") for step in workflow["jobs"]["cost"]["steps"])
    assert len(COMMANDS) == 4


@pytest.mark.parametrize(
    ("changes", "code"),
    [({}, 0), ({"per_device_train_batch_size": 64}, 3), ({"num_train_epochs": 300}, 4), ({"gpu": "A41"}, 2)],
)
def test_the_command_ends_with_the_codes_of_the_table(
    changes: dict[str, Any], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.json").write_text(json.dumps({**JOB, **changes}))
    (command, *_) = COMMANDS
    assert cli.run(shlex.split(command)[1:]) == code
    out, err = capsys.readouterr()
    assert err.count("\n") == (0 if code == 0 else 1)
    assert (out == "") == (code == 2)
    assert re.search(rf"^\| {code} \| ", TEXT, re.MULTILINE)


def test_one_sentence_with_the_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.json").write_text(json.dumps({**JOB, "per_device_train_batch_size": 64}))
    cli.run(["estimate", "job.json"])
    sentence = (
        r"ftcost: does not fit: needs [\d.]+ GiB, an A40 has 45\.0: largest batch that fits is \d+, "
        "(smallest card that holds it is .*|no catalogued card holds it)\n$"
    )
    assert re.match(sentence, capsys.readouterr().err)
