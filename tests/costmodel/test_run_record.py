"""A recorded run as the job of ``estimate``, ``compare`` and ``optimize``: which job, what the run measured, whose price."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from costmodel import cli
from costmodel.cli_input import read_job
from costmodel.errors import CostModelError
from costmodel.importers import import_config, recognise

JOB: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B", "gpu": "NVIDIA A10", "num_gpus": 1, "method": "lora", "dtype": "bfloat16",
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_length": 512, "gradient_checkpointing": True,
    "lengths": {"histogram": {"100": 300, "300": 100}}, "num_samples": 400, "num_train_epochs": 2.0,
    "framework": "transformers", "framework_version": "5.24.0", "usd_per_gpu_hour": 0.75,
}  # fmt: skip


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in JOB.items() if name not in names}


def _session(job: dict[str, Any] | None, index: int = 0, **fields: Any) -> dict[str, Any]:
    row = {"type": "session", "run_id": "r1", "session_index": index, "max_steps": 100, "job": job} | fields
    return {name: value for name, value in row.items() if value is not None}


def _step(**fields: Any) -> dict[str, Any]:
    counts = {"num_samples": 8, "num_non_padding_tokens": 1200, "longest_sequence_tokens": 310, "num_supervised_tokens": 600}
    return {"type": "step", "global_step": 1, "session_index": 0, "step_seconds": 1.0} | counts | fields


def _record(folder: Path, *rows: dict[str, Any], after: str = "") -> Path:
    file = folder / "_ftcost" / "run.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + after)
    return file


def _answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert cli.run([*map(str, arguments), "--json"]) in (0, 3)
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize("place", [".", "_ftcost", "_ftcost/run.jsonl"])
def test_a_run_on_another_gpu_is_its_job_there(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _record(tmp_path, _session(JOB), _step())
    (tmp_path / "job.json").write_text(json.dumps(_without("usd_per_gpu_hour") | {"supervised_fraction": 0.5}))
    asked = ["-g", "H100 SXM", "--cloud", "runpod"]
    of_the_job = _answer(capsys, "estimate", tmp_path / "job.json", *asked)
    of_the_run = _answer(capsys, "estimate", tmp_path / place, *asked)
    assert recognise(tmp_path / place) == "run record"
    assert of_the_run == of_the_job
    assert of_the_run["total_usd"] is not None


def test_its_price_is_that_of_its_own_gpu(tmp_path: Path) -> None:
    path = str(_record(tmp_path, _session(JOB | {"calibration": {"of": "the A10"}})))
    assert read_job(path, {}).fields["usd_per_gpu_hour"] == 0.75
    assert read_job(path, {"gpu": "A10"}).fields["usd_per_gpu_hour"] == 0.75  # the same card by another of its names
    elsewhere = read_job(path, {"gpu": "H100 SXM"})
    assert not elsewhere.fields.keys() & {"usd_per_gpu_hour", "calibration"}
    assert [warning for warning in elsewhere.warnings if "$0.75 for a GPU-hour, is of its own GPU" in warning]
    assert read_job(path, {"gpu": "H100 SXM", "usd_per_gpu_hour": 2.0}).warnings == ()
    own = read_job(path, {"gpu": "H100 SXM", "usd_per_gpu_hour": 2.0, "calibration": "auto"}).fields
    assert (own["usd_per_gpu_hour"], own["calibration"]) == (2.0, "auto")


def test_what_nobody_said_before_the_run_is_taken_from_its_steps(tmp_path: Path) -> None:
    job = _without("lengths", "num_samples", "num_train_epochs", "max_length")
    steps = [_step(), _step(num_steps=3, num_non_padding_tokens=2000, longest_sequence_tokens=420), {"type": "step"}]
    imported = import_config(_record(tmp_path, _session(job), *steps))
    # (1200 + 3 * 2000) tokens in (8 + 3 * 8) samples; 4 * 600 of the tokens in the loss
    assert imported.fields["lengths"] == {"mean": 225.0, "max": 420}
    assert imported.fields["max_length"] == 420
    assert imported.fields["max_steps"] == 100
    assert imported.fields["supervised_fraction"] == 2400 / 7200
    assert imported.origins["lengths"].text.startswith("measured over 4 steps in ")
    assert imported.origins["max_steps"].text.startswith("steps of the run, at its batch, in ")
    assert any(warning.startswith("lengths: the data set's were not recorded") for warning in imported.warnings)
    assert imported.job.max_length == 420
    given = read_job(imported.where, {"lengths": {"fixed": 64}, "max_length": 64})
    assert (given.fields["lengths"], given.fields["max_length"], given.warnings) == ({"fixed": 64}, 64, ())


def test_what_the_job_said_stays(tmp_path: Path) -> None:
    imported = import_config(_record(tmp_path, _session(JOB), _step()))
    assert {name: imported.fields[name] for name in JOB} == JOB
    assert "max_steps" not in imported.fields
    assert imported.warnings == ()


def test_the_load_of_its_experts_is_that_of_its_own_model(tmp_path: Path) -> None:
    balance = {"type": "summary", "expert_balance": {"load_max_over_mean": 1.75}}
    path = str(_record(tmp_path, _session(JOB | {"model": "mistralai/Mixtral-8x7B-v0.1"}), balance))
    assert read_job(path, {}).fields["expert_imbalance"] == 1.75
    assert "expert_imbalance" not in read_job(path, {"model": "meta-llama/Llama-3.1-8B"}).fields


def test_the_last_session_of_the_last_run_counts(tmp_path: Path) -> None:
    rows = [
        _session(JOB | {"lora_r": 4}, run_id="r0"), _step(num_supervised_tokens=1),
        _session(JOB | {"lora_r": 8}), _step(),
        _session(JOB | {"lora_r": 16, "field_of_tomorrow": 1}, index=1), _step(),
    ]  # fmt: skip
    imported = import_config(_record(tmp_path, *rows, after='{"type": "step", "global_'))
    assert imported.fields["lora_r"] == 16
    assert imported.origins["lora_r"].text.startswith("the job of session 2 in ")
    assert imported.fields["supervised_fraction"] == 0.5  # the earlier run's steps are not in it
    assert imported.unknown == ("field_of_tomorrow",)
    without = import_config(_record(tmp_path, *rows, _session(None, index=2)))
    assert without.fields["lora_r"] == 16
    assert "session 3 was recorded without its job; session 2's is taken" in without.warnings[0]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([_session(None)], "recorded without its job; give the configuration that it was trained with"),
        ([_session(None, notes=["no prediction: DPO is not modelled"])], r"without its job \(DPO is not modelled\); give"),
        ([_step()], "is no run record: it holds no session row"),
        ([{"type": "rank_session", "rank": 1}], "is no run record: it holds no session row"),
    ],
)
def test_a_record_without_a_job_says_the_way_out(rows: list[dict[str, Any]], said: str, tmp_path: Path) -> None:
    with pytest.raises(CostModelError, match=said):
        import_config(_record(tmp_path, *rows))


def test_the_other_commands_read_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _record(tmp_path, _session(JOB), _step())
    candidates = {each["gpu"]: each for each in _answer(capsys, "compare", path, "--gpus", "A10,L40S")}  # type: ignore[attr-defined]
    assert candidates["A10"]["price"]["usd_per_gpu_hour"] == 0.75
    assert candidates["L40S"]["price"]["source"] != candidates["A10"]["price"]["source"]
    best = _answer(capsys, "optimize", path)["best"]
    assert (best["gpu"], best["price"]["usd_per_gpu_hour"]) == ("A10", 0.75)


def test_jobs_a_line_and_checkpoints_stay_what_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _record(tmp_path, _session(JOB))
    lines = tmp_path / "jobs.jsonl"
    lines.write_text(json.dumps(JOB) + "\n" + json.dumps(JOB) + "\n")
    assert cli.run(["estimate", str(lines)]) in (0, 3)
    assert len(capsys.readouterr().out.splitlines()) == 2
    checkpoint = tmp_path / "checkpoint-60"
    checkpoint.mkdir()
    (checkpoint / "adapter_config.json").write_text('{"base_model_name_or_path": "meta-llama/Llama-3.1-8B", "r": 4}')
    assert (recognise(checkpoint), import_config(checkpoint).fields["lora_r"]) == ("checkpoint", 4)


def test_a_larger_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _record(tmp_path, _session(JOB))
    monkeypatch.setattr("costmodel.importers.run_record.MAX_BYTES", path.stat().st_size - 1)
    with pytest.raises(CostModelError, match="not a run record"):
        import_config(tmp_path)
