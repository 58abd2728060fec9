"""The command line: flags, files, exit codes, one line per error. The estimate is stood in for."""

from __future__ import annotations

import datetime
import importlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sample_answer import ANSWER, GIB, StandInEstimator, estimate_with

from costmodel import cli, cli_flags, cli_lists
from costmodel.errors import CostModelError
from costmodel.specs import Job, Lengths

MODEL = "mistralai/Mixtral-8x7B-v0.1"


@pytest.fixture(autouse=True)
def _day(monkeypatch: pytest.MonkeyPatch) -> None:
    """On which no price of the tests is stale."""
    for module in (cli, cli_lists):
        monkeypatch.setattr(module, "today", lambda: datetime.date(2026, 11, 9))


@pytest.fixture
def estimator(monkeypatch: pytest.MonkeyPatch) -> StandInEstimator:
    return _install(monkeypatch)


def _install(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> StandInEstimator:
    stand_in = StandInEstimator(**changes)
    monkeypatch.setattr(importlib.import_module("costmodel.estimation"), "estimate", stand_in)
    return stand_in


def _wrong_input(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that must end with exit code 2 and say nothing on stdout."""
    assert cli.run(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ftcost: ")
    assert err.count("\n") == 1
    return err


# --- flags

# A value for each field of a job, as typed, and what the job must then hold.
FLAG_VALUES: dict[str, tuple[str | None, Any]] = {
    "schema_version": ("1", 1),
    "model": (MODEL, MODEL),
    "model_overrides": ('{"num_experts_per_tok": 8}', {"num_experts_per_tok": 8}),
    "gpu": ("A40", "A40"),
    "num_gpus": ("2", 2),
    "method": ("lora", "lora"),
    "quantization": ("nf4", "nf4"),
    "double_quant": (None, True),
    "prepare_model_for_kbit_training": (None, True),
    "load_towers": (None, True),
    "lora_r": ("16", 16),
    "lora_alpha": ("32", 32.0),
    "lora_dropout": ("0.05", 0.05),
    "lora_target_modules": ("q_proj, v_proj", ("q_proj", "v_proj")),
    "lora_target_parameters": ("mlp.experts.gate_up_proj", ("mlp.experts.gate_up_proj",)),
    "lora_modules_to_save": ("embed_tokens,lm_head", ("embed_tokens", "lm_head")),
    "use_dora": (None, True),
    "use_rslora": (None, True),
    "adapter_dtype": ("fp32", "float32"),
    "dtype": ("bf16", "bfloat16"),
    "bf16": (None, True),
    "fp16": (None, True),
    "per_device_train_batch_size": ("4", 4),
    "gradient_accumulation_steps": ("8", 8),
    "gradient_checkpointing": (None, True),
    "gradient_checkpointing_kwargs": ('{"use_reentrant": false}', {"use_reentrant": False}),
    "attn_implementation": ("sdpa", "sdpa"),
    "experts_implementation": ("grouped_mm", "grouped_mm"),
    "expert_imbalance": ("1.5", 1.5),
    "optim": ("paged_adamw_8bit", "paged_adamw_8bit"),
    "torch_compile": (None, True),
    "use_liger_kernel": (None, True),
    "fused_loss": ("chunked", "chunked"),
    "loss_type": ("nll", "nll"),
    "use_cache": (None, True),
    "logits_to_keep": ("1", 1),
    "activation_offloading": (None, True),
    "fsdp": ("full_shard", "full_shard"),
    "deepspeed": ('{"zero_optimization": {"stage": 2}}', {"zero_optimization": {"stage": 2}}),
    "max_length": ("1024", 1024),
    "packing": (None, True),
    "padding_free": (None, True),
    "padding": ("longest", "longest"),
    "pad_to_multiple_of": ("8", 8),
    "train_sampling_strategy": ("group_by_length", "group_by_length"),
    "lengths": ("mean:187,max:1470", Lengths(mean=187, max=1470)),
    "supervised_fraction": ("0.6", 0.6),
    "num_samples": ("15_000", 15000),
    "num_train_epochs": ("2.5", 2.5),
    "max_steps": ("100", 100),
    "eval_strategy": ("steps", "steps"),
    "eval_steps": ("50", 50.0),
    "eval_delay": ("20", 20.0),
    "eval_on_start": (None, True),
    "dataloader_drop_last": (None, True),
    "per_device_eval_batch_size": ("8", 8),
    "num_eval_samples": ("500", 500),
    "save_strategy": ("epoch", "epoch"),
    "save_steps": ("500", 500.0),
    "save_only_model": (None, True),
    "framework": ("trl", "trl"),
    "framework_version": ("4.40", "4.40"),  # text: 4.4 would be another version
    "calibration": ("auto", "auto"),
    "usd_per_gpu_hour": ("0.79", 0.79),
    "cloud": ("RunPod", "RunPod"),
    "tier": ("spot", "spot"),
}


@pytest.mark.parametrize("field", Job.model_fields)
def test_every_field_of_a_job_is_a_flag(field: str, estimator: StandInEstimator) -> None:
    text, value = FLAG_VALUES[field]
    for flag in (f"--{field.replace('_', '-')}", f"--{field}"):
        model = [] if field == "model" else ["--model", MODEL]
        assert cli.run(["estimate", *model, flag, *([text] if text is not None else [])]) == 0
        assert getattr(estimator.jobs[-1], field) == value


def test_booleans_can_be_switched_off(estimator: StandInEstimator) -> None:
    assert cli.run(["estimate", "-m", MODEL, "--no-gradient-checkpointing", "--no-bf16"]) == 0
    job = estimator.jobs[-1]
    assert job.gradient_checkpointing is False
    assert job.bf16 is False
    assert job.packing is None  # not given stays "not said"


def test_short_forms(estimator: StandInEstimator) -> None:
    line = f"estimate -m {MODEL} -g A40 -b 4 --seq-len 512 --accum 2 --epochs 3 --samples 100 --lora-r 8"
    assert cli.run(line.split()) == 0
    job = estimator.jobs[-1]
    assert (job.model, job.gpu, job.per_device_train_batch_size, job.max_length) == (MODEL, "A40", 4, 512)
    assert (job.gradient_accumulation_steps, job.num_train_epochs, job.num_samples, job.lora_r) == (2, 3.0, 100, 8)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("79:4000,174:9000", {"histogram": {79: 4000, 174: 9000}}),
        ("mean:187.26,max:1470", {"mean": 187.26, "max": 1470}),
        ("fixed:1024", {"fixed": 1024}),
        ("values:12,80", {"values": [12, 80]}),
        ("dataset:math_14k", {"dataset": "math_14k"}),
        ("file:/data/lengths.csv", {"file": "/data/lengths.csv"}),
        ('{"fixed": 7}', {"fixed": 7}),
    ],
)
def test_lengths_from_text(text: str, lengths: dict[str, Any]) -> None:
    assert cli_flags.lengths_from_text(text) == lengths


@pytest.mark.parametrize("text", ["1024", "79", "a:b:c", "79:", "median:3,max:9", "79:1,79:2", ""])
def test_lengths_that_are_not_understood(text: str) -> None:
    with pytest.raises(CostModelError, match="use 79:4000"):
        cli_flags.lengths_from_text(text)


@pytest.mark.parametrize(
    ("text", "targets"),
    [("all-linear", "all-linear"), ("q_proj", ("q_proj",)), (r".*\.q_proj", r".*\.q_proj"), ("w1,w2", ("w1", "w2"))],
)
def test_target_modules_from_text(text: str, targets: Any) -> None:
    assert cli_flags.job_fields_from_flags({"lora_target_modules": text}) == {"lora_target_modules": targets}


def test_inline_models_and_described_gpus(estimator: StandInEstimator) -> None:
    line = ["estimate", "-m", '{"model_type": "llama"}', "-g", "my card", "--gpu-memory-gib", "24"]
    assert cli.run([*line, "--gpu-bandwidth-gb-per-second", "1000", "--gpu-bf16-tflops", "150"]) == 0
    job = estimator.jobs[-1]
    assert job.model == {"model_type": "llama"}
    assert not isinstance(job.gpu, str)
    assert job.gpu is not None
    assert (job.gpu.name, job.gpu.memory_bytes) == ("my card", 24 * GIB)
    assert job.gpu.memory_bandwidth_bytes_per_second == 1000e9
    assert job.gpu.peak_bf16_flops_per_second == 150e12


def test_half_a_description_of_a_gpu_is_wrong_input(estimator: StandInEstimator, capsys: pytest.CaptureFixture[str]) -> None:
    assert "takes all of" in _wrong_input(capsys, "estimate", "-m", MODEL, "--gpu-memory-gib", "24")


# --- files


def test_flags_override_the_file(estimator: StandInEstimator, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"model": MODEL, "gpu": "A40", "per_device_train_batch_size": 8, "quantization": "nf4"}))
    assert cli.run(["estimate", str(path), "-b", "2", "--quantization", "none"]) == 0
    job = estimator.jobs[-1]
    assert (job.gpu, job.per_device_train_batch_size, job.quantization) == ("A40", 2, None)


def test_yaml(estimator: StandInEstimator, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"model: {MODEL}\neval_strategy: no\nlengths:\n  histogram: {{79: 4000, 174: 9000}}\n")
    assert cli.run(["estimate", str(path)]) == 0
    job = estimator.jobs[-1]
    assert job.eval_strategy == "no"  # YAML reads a bare no as false
    assert job.lengths == Lengths(histogram={79: 4000, 174: 9000})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("job.json", '{"model": ', "is not valid JSON"),
        ("job.json", '{"model": "m", "lora_alpha": NaN}', "NaN is not a number"),
        ("job.json", "[1, 2]", "it holds list"),
        ("job.json", "[" * 100_000, "is not valid JSON"),
        ("job.json", b"\xff\xfe\x00", "is not a text file in UTF-8"),
        ("job.yaml", "model: [", "is not valid YAML"),
        ("job.yaml", "just words", "it holds str"),
        ("job.yaml", "1: 2", "field names that are not text"),
        ("job.toml", "model = 1", "a job file is .json, .yaml or .jsonl, not .toml"),
        ("job.json", '{"model": "m", "lora_rank": 8}', "no Job field matches 'lora_rank'; nearest: lora_r"),
        ("job.json", '{"model": "m", "num_gpus": 0}', "num_gpus"),
        ("job.json", '{"gpu": "A40"}', "no model is named: give a catalogue id"),
        ("job.json", "{}", "give a job file, or describe the job with flags"),
    ],
)
def test_damaged_files_are_wrong_input(
    name: str, content: str | bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    estimator: StandInEstimator,
) -> None:  # fmt: skip
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in _wrong_input(capsys, "estimate", str(path))


def test_missing_files_and_folders(estimator: StandInEstimator, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such file" in _wrong_input(capsys, "estimate", str(tmp_path / "job.json"))
    assert "no such file" in _wrong_input(capsys, "estimate", str(tmp_path / "jobs.jsonl"))
    assert "is a folder" in _wrong_input(capsys, "estimate", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["estimate"], "give a job file"),
        (["estimate", "-m", MODEL, "--nosuch", "1"], "No such option"),
        (["estimate", "-m", MODEL, "-b", "four"], "per_device_train_batch_size"),
        (["estimate", "-m", MODEL, "--num-gpus", "0"], "num_gpus"),
        (["estimate", "-m", MODEL, "--method", "dora"], "method"),
        (["estimate", "-m", MODEL, "--optim", "adamw"], "no optimizer matches 'adamw'"),
        (["estimate", "-m", MODEL, "--model-overrides", "x"], "--model-overrides is not valid JSON"),
        (["estimate", "-m", MODEL, "--lengths", "long"], "--lengths 'long' is not understood"),
        (["estimate", "-m", MODEL, "--usd-per-gpu-hour", "-1"], "positive number of dollars"),
        (["estimate", "-m", MODEL, "--budget-usd", "much"], "--budget-usd"),
        (["nosuch"], "No such command"),
        (["gpus", "zz"], "no GPU matches 'zz'"),
        (["models", "mixtrall"], "no model matches 'mixtrall'"),
        (["models", "nosuch"], "no model matches 'nosuch'; give a path to its config.json, or see them all: ftcost models"),
        (["prices", "A41"], "no GPU matches 'A41'"),
        (["prices", "--cloud", "runpodd"], "nearest: RunPod"),
        (["prices", "A40", "--tier", "reserved"], "no dated price"),
    ],
)
def test_wrong_input(
    arguments: list[str], message: str, estimator: StandInEstimator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in _wrong_input(capsys, *arguments)


# --- one job a line


def _lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_bad_line_gives_an_error_in_its_place(
    estimator: StandInEstimator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "jobs.jsonl"
    good = json.dumps({"model": MODEL, "gpu": "A40"})
    path.write_text("\n".join([good, "{", '{"model": "m", "gqu": "A40"}', "", "[]", good]) + "\n")
    assert cli.run(["estimate", str(path), "-b", "2"]) == 0
    first, second, third, fourth, fifth = _lines(capsys)
    assert first["job"]["gpu"] == fifth["job"]["gpu"] == "A40"
    assert "not valid JSON" in second["error"]
    assert second["line"] == 2
    assert "nearest: gpu" in third["error"]
    assert fourth["line"] == 5
    assert [job.per_device_train_batch_size for job in estimator.jobs] == [2, 2]


def test_jobs_from_stdin(
    estimator: StandInEstimator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(json.dumps({"model": MODEL, "gpu": gpu}) + "\n" for gpu in ("A40", "L40S"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert cli.run(["estimate", "-"]) == 0
    assert [each["job"]["gpu"] for each in _lines(capsys)] == ["A40", "L40S"]


@pytest.mark.parametrize("command", ["compare", "optimize"])
@pytest.mark.parametrize("first", ["{}", "bad"])
def test_only_estimate_reads_a_job_a_line(
    command: str, first: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f'{first}\n{{"model": "{MODEL}"}}\n'))
    said = "standard input holds a job a line, which only ftcost estimate reads; give one job"
    assert said in _wrong_input(capsys, command, "-")


def test_an_internal_error_on_one_line_keeps_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = _install(monkeypatch)

    def sometimes(job: Any) -> Any:
        if job["model"] == "bug":
            raise ZeroDivisionError("division by zero")
        return stand_in(job)

    monkeypatch.setattr(importlib.import_module("costmodel.estimation"), "estimate", sometimes)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f'{{"model": "bug"}}\n{{"model": "{MODEL}"}}\n'))
    assert cli.run(["estimate", "-"]) == 1
    first, second = _lines(capsys)
    assert "ZeroDivisionError" in first["error"]
    assert second["verdict"] == "fits"


def test_limits_go_with_a_single_job(estimator: StandInEstimator, capsys: pytest.CaptureFixture[str]) -> None:
    assert "single job" in _wrong_input(capsys, "estimate", "-", "--budget-usd", "3")


# --- answers and exit codes


def test_json_is_the_whole_answer(estimator: StandInEstimator, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["estimate", "-m", MODEL, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == ANSWER
    assert err == ""


def test_text_and_markdown(estimator: StandInEstimator, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["estimate", "-m", MODEL]) == 0
    assert capsys.readouterr().out.startswith(f"{MODEL}, qlora nf4, 1 x NVIDIA A40: fits\n\nSummary\n")
    assert cli.run(["estimate", "-m", MODEL, "--markdown"]) == 0
    assert capsys.readouterr().out.startswith(f"### {MODEL}")


def test_tight_is_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, verdict="tight")
    assert cli.run(["estimate", "-m", MODEL]) == 0


def test_does_not_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    memory = {"peak_device_bytes": int(52.1 * GIB)}
    _install(monkeypatch, verdict="does_not_fit", memory=memory, max_batch_size=3)
    assert cli.run(["estimate", "-m", MODEL, "--json", "--budget-usd", "1"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"] == "does_not_fit"
    assert err == (
        "ftcost: does not fit: needs 52.1 GiB, an NVIDIA A40 has 45.0: largest batch that fits is 3, "
        "smallest card that holds it is A100-PCIE-80GB (80.0 GiB)\n"
    )


@pytest.mark.parametrize(
    ("limits", "code", "message"),
    [
        (["--budget-usd", "9.24"], 0, ""),  # exactly the estimate
        (["--budget-usd", "9"], 4, "ftcost: over budget: $9.24 of $9.00\n"),
        (["--deadline-hours", "21"], 0, ""),
        (["--deadline-hours", "20"], 4, "ftcost: over the deadline: 21.00 h of 20.00 h\n"),
        (["--budget-usd", "10", "--deadline-hours", "20"], 4, "ftcost: over the deadline: 21.00 h of 20.00 h\n"),
    ],
)
def test_limits(
    limits: list[str], code: int, message: str, estimator: StandInEstimator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["estimate", "-m", MODEL, *limits]) == code
    out, err = capsys.readouterr()
    assert out.startswith(MODEL)
    assert err == message


def test_an_unknown_total_cannot_be_held_against_a_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _install(monkeypatch, total_usd=None, total_seconds=None)
    assert "--budget-usd needs" in _wrong_input(capsys, "estimate", "-m", MODEL, "--budget-usd", "5")
    assert "--deadline-hours needs" in _wrong_input(capsys, "estimate", "-m", MODEL, "--deadline-hours", "5")


def test_a_limit_without_a_total_names_only_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["estimate", "-m", MODEL, "-g", "A40", "--method", "qlora", "--seq-len", "512", "--lengths", "fixed:300"]
    message = _wrong_input(capsys, *line, "--budget-usd", "5")
    assert message == "ftcost: --budget-usd needs a total in dollars: give a price, num_samples or max_steps\n"
    message = _wrong_input(capsys, *line, "--num-samples", "10", "--budget-usd", "5")
    assert message == "ftcost: --budget-usd needs a total in dollars: give a price\n"


@pytest.mark.parametrize(
    ("streams", "line", "code"),
    [
        ("stdout", f"estimate -m {MODEL} -g T4 --method full --bf16 --seq-len 512", 3),
        ("stdout and stderr", f"estimate -m {MODEL} -g T4 --method full --bf16 --seq-len 512", 3),
        ("stdout and stderr", f"compare -m {MODEL} --gpus T4 --method full --bf16 --seq-len 512", 3),
        ("stderr", "estimate -m nothing-like-it -g T4", 2),
        ("stdout", f"estimate -m {MODEL} -g B200 --method qlora --seq-len 512", 0),
    ],
)
def test_the_exit_code_is_the_verdicts_whoever_reads(streams: str, line: str, code: int) -> None:
    """A pipe whose reader has gone (``| head``, ``| true``) costs the text, not the verdict."""
    reader, writer = os.pipe()
    os.close(reader)
    to = {name: writer if name in streams else subprocess.DEVNULL for name in ("stdout", "stderr")}
    try:
        done = subprocess.run([sys.executable, "-m", "costmodel.cli", *line.split()], check=False, timeout=60, **to)
    finally:
        os.close(writer)
    assert done.returncode == code


def test_warnings_of_a_file_are_one_line_in_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "llamafactory.yaml"
    path.write_text(
        "model_name_or_path: meta-llama/Llama-3.1-8B\nstage: sft\nfinetuning_type: lora\ntemplate: llama3\n"
        "cutoff_len: 512\nno_such_key: 1\nflash_attn: no_such_attention\n"
    )
    assert cli.run(["compare", str(path), "--gpus", "A40"]) == 0
    lines = [each for each in capsys.readouterr().err.splitlines() if "ftcost estimate" in each]
    assert len(lines) == 1
    assert re.search(rf"and \d+ more warnings?: ftcost estimate {path}\)$", lines[0])


def test_skypilot_without_anything_to_rent_is_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    line = "compare -m meta-llama/Llama-3.1-8B --method lora --dtype bfloat16 --max-length 512 --gpus L40S --cloud CoreWeave"
    assert cli.run([*line.split(), "--format", "skypilot"]) == 3
    out, err = capsys.readouterr()
    assert all(each.startswith("#") for each in out.splitlines())
    assert "ftcost: SkyPilot rents none of the offers that fit" in err


def test_the_command_line_advises_flags_and_python_names_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--gpu-memory-gib 24" in _wrong_input(capsys, "estimate", "-m", MODEL, "-g", "no such card")
    from costmodel.gpu_catalog import find_gpu

    with pytest.raises(CostModelError) as error:
        find_gpu("no such card")
    assert "--" not in str(error.value)
    assert "memory_bandwidth_bytes_per_second" in str(error.value)


def test_an_internal_error_is_one_line_and_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(job: Any) -> Any:
        raise KeyError("layers")

    monkeypatch.setattr(importlib.import_module("costmodel.estimation"), "estimate", broken)
    monkeypatch.delenv("FTCOST_DEBUG", raising=False)
    assert cli.run(["estimate", "-m", MODEL]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "ftcost: internal error: KeyError: 'layers' (FTCOST_DEBUG=1 shows where)\n"


# --- with the real estimate

# The example of the job's contract.
CONTRACT_JOB: dict[str, Any] = {
    "schema_version": 1,
    "model": MODEL,
    "model_overrides": {"num_experts_per_tok": 2},
    "gpu": "NVIDIA A40",
    "method": "qlora",
    "quantization": "nf4",
    "double_quant": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_target_modules": ["w1", "w2", "w3", "gate"],
    "dtype": "bfloat16",
    "bf16": True,
    "per_device_train_batch_size": 1,
    "gradient_checkpointing": True,
    "attn_implementation": "flash_attention_2",
    "experts_implementation": "eager",
    "optim": "adamw_torch",
    "max_length": 1024,
    "lengths": {"histogram": {"79": 4000, "174": 9000, "600": 2000}},
    "num_samples": 15000,
    "num_train_epochs": 10,
    "framework": "transformers",
    "framework_version": "4.40",
    "usd_per_gpu_hour": 0.79,
}


def test_the_contracts_job_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(CONTRACT_JOB))
    assert cli.run(["estimate", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(ANSWER) <= set(found)
    assert set(ANSWER["memory"]) <= set(found["memory"])
    assert found["num_steps"] == 150_000
    assert found["total_usd"] == pytest.approx(found["total_seconds"] / 3600 * 0.79)
    assert cli.run(["estimate", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"{MODEL}, qlora nf4, 1 x ")


def test_the_answers_job_gives_the_same_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(CONTRACT_JOB))
    assert cli.run(["estimate", str(path), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    path.write_text(json.dumps(first["job"]))
    assert cli.run(["estimate", str(path), "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert {**second, "assumed": []} == {**first, "assumed": []}


def test_a_full_mixtral_does_not_fit_a_t4(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"estimate -m {MODEL} -g T4 --method full --bf16 --seq-len 512"
    assert cli.run(line.split()) == 3
    assert capsys.readouterr().err.endswith(", a T4 has 15.0: not even a batch of 1 fits, no catalogued card holds it\n")


def test_an_answer_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(f"estimate -m {MODEL} --method qlora --seq-len 512".split()) == 0
    assert capsys.readouterr().out.startswith(f"{MODEL}, qlora nf4: no GPU named\n")


# --- compare and the catalogue


def test_compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    estimate_with(monkeypatch, StandInEstimator())
    assert cli.run(["compare", "-m", MODEL, "--gpus", "A40,L40S", "--tiers", "on_demand,spot", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["gpu"], each["price"]["cloud"], each["price"]["tier"]) for each in found[:2]] == [
        ("A40", "RunPod", "spot"),
        ("A40", "RunPod", "on_demand"),
    ]
    assert {each["gpu"] for each in found[2:]} == {"L40S"}
    assert found[0]["estimate"]["verdict"] == "fits"
    assert cli.run(["compare", "-m", MODEL, "--gpus", "A40"]) == 0
    assert capsys.readouterr().out.startswith("Same job, cheapest first")


def test_compare_where_nothing_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    estimate_with(monkeypatch, StandInEstimator(verdict="does_not_fit"))
    assert cli.run(["compare", "-m", MODEL, "--gpus", "A40"]) == 3
    sentence = "ftcost: fits on none of these GPUs: needs 34.0 GiB at least, smallest card that holds it is "
    assert capsys.readouterr().err.startswith(sentence)


def test_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["gpus", "a40", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [gpu["name"] for gpu in found] == ["A40", "RTX A4000"]
    assert found[0]["memory_bytes"] == 46_068 * 2**20
    assert cli.run(["gpus"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 83 + 2


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["models", "mixtral", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [model["model_id"] for model in found] == ["mistralai/Mixtral-8x22B-v0.1", "mistralai/Mixtral-8x7B-v0.1"]
    assert cli.run(["models"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 160 + 2


def test_prices(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["prices", "A40", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["cloud"], row["tier"], row["usd_per_gpu_hour"]) for row in found] == [
        ("RunPod", "spot", 0.28),
        ("RunPod", "on_demand", 0.44),
        ("Vast", "community", 0.67),
    ]
    assert cli.run(["prices", "A40", "--all"]) == 0
    assert "not chosen: host of 2 vCPU and 4 GiB is too small" in capsys.readouterr().out


def test_prices_of_an_ambiguous_name_are_those_of_all_its_products(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["prices", "H100", "--cloud", "lambda", "--json"]) == 0
    assert {row["gpu"] for row in json.loads(capsys.readouterr().out)} == {"H100 SXM", "H100 PCIe"}


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("ftcost ")
    assert cli.run(["estimate", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--per-device-train-batch-size" in shown
    assert "--budget-usd" in shown


def test_every_flag_has_a_line_of_help() -> None:
    assert set(cli_flags._HELP) == set(Job.model_fields)
    assert set(cli_flags._SHORT_FORMS) <= set(Job.model_fields)


def test_the_command_line_imports_nothing_heavy() -> None:
    code = (
        "import sys, costmodel.cli\n"
        "print(sorted({'torch', 'transformers', 'yaml', 'numpy', 'ftcost_callback', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_console_script_has_the_same_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from ftcost_callback.cli import main; main()", "gpus", "A40", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)[0]["name"] == "A40"


# --- what must never get through

_HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora-alpha", "1e400"], "lora_alpha: must be a finite number, got inf"),
        (["--lora-alpha", _HUGE], "lora_alpha: must be a valid number, got a whole number of about 400 digits"),
        (["--lora-r", _HUGE], "lora_r: must be less than or equal to 65536"),
        (["--num-gpus", _HUGE], "num_gpus: must be less than or equal to 1000000"),
        (["-b", "1000001"], "per_device_train_batch_size: must be less than or equal to 1000000"),
        (["--samples", "1000000000001"], "num_samples"),
        (["--save-steps", "inf"], "save_steps: must be a finite number"),
        (["--eval-steps", "nan"], "eval_steps: must be a finite number"),
        (["--epochs", "1e300"], "num_train_epochs"),
        (["--usd-per-gpu-hour", "1e308"], "usd_per_gpu_hour: must be a positive number of dollars, at most 10,000"),
        (["--usd-per-gpu-hour", "nan"], "usd_per_gpu_hour"),
        (["--lengths", "fixed:1e999"], "lengths.fixed"),
        (["--lengths", "79:inf"], "lengths.histogram.79"),
        (["--lengths", "79:-1"], "lengths: the count of length 79 must be from 0 to 1,000,000,000,000, got -1.0"),
        (["--lengths", "mean:5,max:3"], "ftcost: lengths: mean 5 is above max 3"),
        (["--budget-usd", "inf"], "--budget-usd must be a finite number, got inf"),
        (["--deadline-hours", "inf"], "--deadline-hours must be a finite number"),
        (
            ["--tier", "spot", "--interruptions-per-hour", "1e300"],
            "interruptions_per_hour must be a number >= 0, at most 3600",
        ),
        (
            ["--gpu-memory-gib", "40", "--gpu-bandwidth-gb-per-second", "inf", "--gpu-bf16-tflops", "100"],
            "--gpu-bandwidth-gb-per-second must be a finite number",
        ),
        (["--restart-seconds", "inf"], "--restart-seconds must be a finite number"),
        (
            ["--gpu-memory-gib", "inf", "--gpu-bandwidth-gb-per-second", "1000", "--gpu-bf16-tflops", "100"],
            "'--gpu-memory-gib': Input should be less than or equal to 1000000",
        ),
        (
            ["--gpu-memory-gib", "40", "--gpu-bandwidth-gb-per-second", "1e300", "--gpu-bf16-tflops", "100"],
            "gpu: memory_bandwidth_bytes_per_second",
        ),
    ],
)
def test_numbers_out_of_range_are_wrong_input(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], estimator: StandInEstimator
) -> None:
    assert message in _wrong_input(capsys, "estimate", "-m", MODEL, *arguments)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ('{"model": "m", "model": "n"}', "the key 'model' is there twice"),
        ('{"model": "m", "gpu": {"name": "x"}}', "ftcost: gpu: memory_bytes: Field required; memory_bandwidth"),
        ('{"model": "m", "gpu": 5}', "ftcost: gpu: must be text or a mapping that describes it, got 5\n"),
        ('{"model": 5}', "ftcost: model: must be text or a mapping, got 5\n"),
        ('{"model": "m", "lora_target_modules": [1]}', "lora_target_modules: must be text or a list of text, got [1]\n"),
        (
            '{"model": "m", "framework_version": 4.4}',
            "framework_version: 4.4 may be 4.4 or 4.40 where it is not text: quote",
        ),
        ('{"model": "m", "lora_alpha": 1e400}', "lora_alpha: must be a finite number"),
        ('{"model": "m", "optim": "\\u001b[31m"}', "no optimizer matches '\\x1b[31m'"),
        ('{"model": "m", "' + "x" * 5000 + '": 1}', "no Job field matches '" + "x" * 76 + "...\n"),
    ],
)
def test_faults_of_a_job_are_one_short_line(
    job: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], estimator: StandInEstimator
) -> None:
    path = tmp_path / "job.json"
    path.write_text(job)
    line = _wrong_input(capsys, "estimate", str(path))
    assert message in line
    assert len(line) < 500


@pytest.mark.parametrize(("written", "version"), [("5.24", "5.24"), ("5", "5"), ("5.0", "5.0"), ("'4.40'", "4.40")])
def test_a_version_may_be_a_number_in_yaml(written: str, version: str, tmp_path: Path, estimator: StandInEstimator) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"model: m\nframework_version: {written}\n")
    assert cli.run(["estimate", str(path), "--json"]) == 0
    assert Job.model_validate(estimator.jobs[-1]).framework_version == version


@pytest.mark.parametrize(
    ("text", "arguments", "code", "num_answers"),
    [
        pytest.param('{"model": "m"}\n{bad\n', [], 0, 2, id="mixed"),
        pytest.param('{"model": "m"}\n{bad\n', ["--strict"], 2, 2, id="mixed-strict"),
        pytest.param('{"model": "m"}\n', ["--strict"], 0, 1, id="good-strict"),
        pytest.param("{bad\n5\n", [], 2, 2, id="all-bad"),
        pytest.param("\n\n", [], 2, 0, id="no-job"),
        pytest.param('{\n  "model": "m",\n\n  "lora_r": 8\n}\n', [], 0, 1, id="one-job-over-lines"),
        pytest.param('{"model": "a\u2028b"}\n{"model": "m"}\n', [], 0, 2, id="only-a-line-feed-ends-a-line"),
        pytest.param('\ufeff{"model": "m"}\n', [], 0, 1, id="byte-order-mark"),
    ],
)
@pytest.mark.parametrize("from_file", [True, False])
def test_exit_codes_of_many_jobs(
    text: str, arguments: list[str], code: int, num_answers: int, from_file: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], estimator: StandInEstimator,
) -> None:  # fmt: skip
    path = tmp_path / "jobs.jsonl"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert cli.run(["estimate", str(path) if from_file else "-", *arguments]) == code
    assert len(capsys.readouterr().out.rstrip("\n").split("\n") if num_answers else []) == num_answers


@pytest.mark.parametrize("command", ["compare", "optimize"])
def test_one_job_on_standard_input(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {"model": "Qwen/Qwen2.5-0.5B", "method": "lora", "framework": "trl", "max_length": 512, "num_samples": 100}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(job | {"lengths": {"fixed": 100}}, indent=2)))
    assert cli.run([command, "-", "--gpus", "A40,A40,NVIDIA A40", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert command == "optimize" or [row["gpu"] for row in answer] == ["A40"] * len(
        {row["price"]["cloud"] for row in answer}
    )


@pytest.mark.parametrize("command", ["estimate", "compare", "optimize"])
def test_two_formats_are_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "give one format" in _wrong_input(capsys, command, "-m", MODEL, "--json", "--markdown")


def test_no_command_prints_the_help_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Usage: ftcost [OPTIONS] COMMAND")
    assert "\n  estimate " in err


def _in_a_shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f"{sys.executable} -m costmodel.cli {command}"],
        capture_output=True, text=True, check=False, encoding="ascii",
        env={**os.environ, "PYTHONUTF8": "0", **environment},
    )  # fmt: skip


@pytest.mark.skipif(os.name == "nt", reason="POSIX shell")
def test_streams_that_cannot_take_the_answer(tmp_path: Path) -> None:
    closed = _in_a_shell("gpus >&-")
    assert (closed.returncode, closed.stderr) == (
        2,
        "ftcost: standard output is closed: there is nowhere to write the answer\n",
    )
    path = tmp_path / "job.json"
    path.write_text('{"model": "mod\\u00e8le"}')
    narrow = _in_a_shell(f"estimate {path}", PYTHONIOENCODING="ascii")
    assert narrow.returncode == 2
    assert "no model matches 'mod\\xe8le'" in narrow.stderr
    if os.path.exists("/dev/full"):
        full = _in_a_shell("gpus >/dev/full")
        assert (full.returncode, full.stderr) == (2, "ftcost: cannot write the answer: No space left on device\n")


@pytest.mark.parametrize("limit", [[], ["--budget-usd", "1000"], ["--deadline-hours", "1000"]])
def test_a_spot_run_that_does_not_get_on_is_over_any_limit(
    limit: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.json"
    job = {"model": "Qwen/Qwen2.5-0.5B", "gpu": "A40", "method": "lora", "max_length": 512, "num_samples": 1000}
    job |= {"lengths": {"fixed": 100}, "tier": "spot", "usd_per_gpu_hour": 0.3}
    path.write_text(json.dumps(job))
    interrupted = ["--interruptions-per-hour", "3600"]
    assert cli.run(["estimate", str(path), "--json", *interrupted, *limit]) == (4 if limit else 0)
    out, err = capsys.readouterr()
    assert json.loads(out)["spot"]["expected_usd"] is None
    assert ("does not get on" in err) == bool(limit)
    assert cli.run(["estimate", str(path), *interrupted]) == 0
    assert "the run does not get on: interruptions come before the next checkpoint" in " ".join(
        capsys.readouterr().out.split()
    )


OWN_PRICE = {"model": "Qwen/Qwen2.5-0.5B", "gpu": "L4", "method": "lora", "max_length": 512, "lengths": {"fixed": 300}}
OWN_PRICE |= {"num_samples": 100, "max_steps": 50, "usd_per_gpu_hour": 0.75}


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_the_price_of_a_job_file_is_that_of_its_own_gpu(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As compare has it: a price says nothing of another card."""
    path = tmp_path / f"job{suffix}"
    path.write_text(json.dumps(OWN_PRICE))

    def answered(*flags: str) -> dict[str, Any]:
        assert cli.run(["estimate", str(path), *flags, *(["--json"] if suffix == ".json" else [])]) == 0
        return json.loads(capsys.readouterr().out)

    other = answered("-g", "H100 SXM")
    assert (other["price"], other["total_usd"]) == (None, None)
    assert "$0.75 for a GPU-hour, is of its own GPU and not used for another" in other["warnings"][0]
    for flags in ([], ["-g", "NVIDIA L4"], ["-g", "H100 SXM", "--usd-per-gpu-hour", "0.75"]):
        kept = answered(*flags)
        assert kept["price"]["usd_per_gpu_hour"] == 0.75
        assert not [warning for warning in kept["warnings"] if "its own GPU" in warning]
    looked_up = answered("-g", "H100 SXM", "--cloud", "runpod")
    assert looked_up["price"]["cloud"] == "RunPod"
    assert not [warning for warning in looked_up["warnings"] if "its own GPU" in warning]


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_epochs_that_are_asked_for_are_not_beaten_by_a_files_max_steps(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"job{suffix}"
    path.write_text(json.dumps(OWN_PRICE))
    for flags, num_steps in (([], 50), (["--epochs", "2"], 26), (["--epochs", "2", "--max-steps", "7"], 7)):
        assert cli.run(["estimate", str(path), *flags, *(["--json"] if suffix == ".json" else [])]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["num_steps"] == num_steps
        said = [warning for warning in answer["warnings"] if "is not used beside --num-train-epochs" in warning]
        assert len(said) == (flags == ["--epochs", "2"])
