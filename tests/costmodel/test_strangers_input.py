"""Files from strangers: sizes are bounded, nothing is run, a key counts once, and messages name the path as it was given."""

from __future__ import annotations

import functools
import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from costmodel import cli, cli_input
from costmodel.dataset import read_dataset
from costmodel.errors import CostModelError
from costmodel.estimation import estimate
from costmodel.importers import import_config, recognise
from costmodel.importers.reading import MAX_CONFIG_BYTES
from costmodel.model_catalog import find_model_config
from costmodel.price_catalog import MAX_PRICE_FILE_BYTES, prices_from
from costmodel.sharding import read_sharding
from costmodel.specs import parse_job
from costmodel.stored_calibrations import read_calibration
from costmodel.strict_json import MAX_BYTES

# What makes each importer take a YAML file for its own.
TOOLS: dict[str, str] = {
    "job": "model: m\ngpu: A40\n",
    "axolotl": "base_model: m\nadapter: lora\n",
    "llamafactory": "stage: sft\nmodel_name_or_path: m\ntemplate: default\n",
    "trl": "model_name_or_path: m\nper_device_train_batch_size: 1\nmax_length: 8\n",
    "wandb": "wandb_version: 1\n_wandb: {value: {}}\nper_device_train_batch_size: {value: 1}\nmodel_type: {value: llama}\n",
}
LAUGHS = "aa: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i) * 2}: &{chr(98 + i)} [" + ",".join([f"*{chr(97 + i)}"] * 10) + "]\n" for i in range(8)
)
DEEP = "deep: " + "[" * 20_000 + "]" * 20_000 + "\n"

POISON: dict[str, tuple[Callable[[Path], str], str]] = {
    "aliases of a billion values": (lambda _: LAUGHS, "stands for more than 200,000 values"),
    "an alias of itself": (lambda _: "loop: &a [*a]\n", "stands for more than 200,000 values|not valid YAML"),
    "deep nesting": (lambda _: DEEP, "is not valid YAML|stands for more than 200,000 values"),
    "a tag that would run code": (
        lambda folder: f"made: !!python/object/apply:pathlib.Path.touch [{folder}/made]\n",
        "is not valid YAML",
    ),
    "a key twice": (lambda _: "one: 1\ntwo: 2\none: 3\n", r"the key one is there twice, in lines \d and \d+: keep one"),
    "a key twice inside": (lambda _: "outer:\n  one: 1\n  one: 1\n", "the key one is there twice, in lines"),
    "too large": (lambda _: "#" * (MAX_CONFIG_BYTES + 1), "is larger than 10 MB"),
}


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("tool", TOOLS)
def test_poisoned_yaml_is_refused_by_every_importer(
    tool: str, poison: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.yaml").write_text(TOOLS[tool])
    assert recognise("good.yaml") == tool
    make, message = POISON[poison]
    Path("bad.yaml").write_text(TOOLS[tool] + make(tmp_path))
    with pytest.raises(CostModelError, match=message) as caught:
        import_config("bad.yaml")
    assert str(caught.value).startswith("bad.yaml")
    assert str(tmp_path) not in str(caught.value).replace(f"{tmp_path}/made", "")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("tool", TOOLS)
def test_aliases_and_merges_within_bounds_are_read(tool: str, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(TOOLS[tool] + "common: &c {x: 1, y: 2}\nother: {<<: *c, x: 3}\n")
    assert recognise(str(tmp_path / "good.yaml")) == tool


JSON_POISON: dict[str, tuple[str, str]] = {
    "deep nesting": ('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", "is not valid JSON|is not readable JSON"),
    "a key twice": ('{"model_type": "llama", "r": 1, "r": 2}', "the key 'r' is there twice"),
    "not a number": ('{"r": NaN}', "NaN is not a number"),
    "too large": (" " * (MAX_CONFIG_BYTES + 1), "is larger than 10 MB"),
}


@pytest.mark.parametrize("poison", JSON_POISON)
@pytest.mark.parametrize("name", ["adapter_config.json", "config.json"])
def test_poisoned_checkpoints_are_refused(name: str, poison: str, tmp_path: Path) -> None:
    text, message = JSON_POISON[poison]
    (tmp_path / name).write_text(text)
    with pytest.raises(CostModelError, match=message):
        import_config(tmp_path)


def test_the_log_of_a_long_run_does_not_make_its_checkpoint_unreadable(tmp_path: Path) -> None:
    entry = {"epoch": 0.1234567, "grad_norm": 1.23456789, "learning_rate": 1.2345e-05, "loss": 1.23456, "step": 1}
    state = {"max_steps": 60_000, "num_train_epochs": 3, "train_batch_size": 4, "log_history": [entry] * 100_000}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "m", "peft_type": "LORA", "r": 8}')
    assert (tmp_path / "trainer_state.json").stat().st_size > MAX_CONFIG_BYTES
    assert import_config(tmp_path).fields["max_steps"] == 60_000


@pytest.mark.parametrize("poison", ["deep nesting", "too large"])
def test_poisoned_model_configs_deepspeed_files_and_calibrations_are_refused(
    poison: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(JSON_POISON[poison][0])
    assert MAX_BYTES == MAX_CONFIG_BYTES
    with pytest.raises(CostModelError, match=r"^config\.json is not readable JSON"):
        find_model_config("config.json")
    with pytest.raises(CostModelError, match=r"^config\.json cannot be read as a calibration"):
        read_calibration("config.json")
    line = ["estimate", "-m", "meta-llama/Llama-2-7b-hf", "--seq-len", "8", "--num-gpus", "2", "--deepspeed", "config.json"]
    assert cli.run(line) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ftcost: deepspeed config 'config.json'")


def test_large_price_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    with path.open("wb") as file:
        file.truncate(MAX_PRICE_FILE_BYTES + 1)  # a hole: nothing is written
    with pytest.raises(CostModelError, match="is larger than 64 MiB"), prices_from(path):
        pass


def test_jobs_a_line_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "jobs.jsonl"
    with path.open("wb") as file:
        file.truncate(cli_input.MAX_JOBS_BYTES + 1)
    assert cli.run(["estimate", str(path)]) == 2
    assert "is larger than 256 MB; split it, or pipe it in (-)" in capsys.readouterr().err
    monkeypatch.setattr(cli_input, "MAX_LINE_CHARACTERS", 1_000_000)
    for arguments in (["estimate", "-"], ["compare", "-"], ["optimize", "-"]):
        for text in ("x" * 1_000_001, ("[" + " " * 9_999 + "\n") * 110):
            monkeypatch.setattr(sys, "stdin", io.StringIO(text))
            assert cli.run(arguments) == 2
            out, err = capsys.readouterr()
            assert err.startswith("ftcost: ")
            assert err.count("\n") == 1
            if arguments[0] != "estimate":
                assert "longer than 1 MB: not a job" in err
                assert out == ""


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.jsonl", '{"text": ' + "[" * 200_000 + "]" * 200_000 + "}\n", "is not valid JSON"),
        ("rows.json", "[" * 200_000 + "]" * 200_000, "is not valid JSON"),
    ],
)
def test_poisoned_data_sets_are_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(CostModelError, match=message):
        read_dataset(path, use_cache=False)


def test_a_data_set_larger_than_memory_is_refused_or_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from costmodel import dataset_rows

    monkeypatch.setattr(dataset_rows, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(dataset_rows, "MAX_JSON_BYTES", 1000)
    rows: list[dict[str, Any]] = [{"text": "x" * 500}, {"text": "x" * 2000}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(CostModelError, match="line 2 is larger than"):
        read_dataset(tmp_path / "rows.jsonl", use_cache=False)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    with pytest.raises(CostModelError, match=r"save it as \.jsonl"):
        read_dataset(tmp_path / "rows.json", use_cache=False)


@pytest.mark.parametrize("size", [[], {}, "large", -5, 0, 1e30, float("nan"), True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_bucket_of_deepspeed_is_a_number_of_elements(size: object, stage: int) -> None:
    config = {"zero_optimization": {"stage": stage, "reduce_bucket_size": size}}
    with pytest.raises(CostModelError, match="reduce_bucket_size"):
        read_sharding(None, config, 2)


@pytest.mark.parametrize(("size", "elements"), [("auto", 0), (None, 0), (2e8, 2e8), (500_000_000, 5e8)])
def test_a_bucket_of_deepspeed_that_is_one(size: object, elements: float) -> None:
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": size}}
    assert read_sharding(None, config, 2).bucket_elements == elements


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_gpus": True, "lora_r": False}, "num_gpus: must be a number, got True; lora_r: must be a number"),
        ({"schema_version": True}, "schema_version"),
        ({"usd_per_gpu_hour": True}, "usd_per_gpu_hour"),
        ({"lengths": {"fixed": True}}, "lengths.fixed"),
        ({"lengths": {"values": [5, True]}}, "lengths.values"),
        ({"lengths": {"histogram": {"5": True}}}, "lengths.histogram"),
        ({"gpu": {"name": "x", "memory_bytes": True, "memory_bandwidth_bytes_per_second": 1e12}}, "memory_bytes"),
        (
            {
                "gpu": {
                    "name": "x",
                    "memory_bytes": 2**34,
                    "memory_bandwidth_bytes_per_second": 1e12,
                    "peak_bf16_flops_per_second": True,
                }
            },
            "peak_bf16_flops_per_second",
        ),
    ],
)
def test_a_truth_value_is_no_number(fields: dict[str, object], words: str) -> None:
    with pytest.raises(CostModelError, match=words):
        parse_job({"model": "Qwen/Qwen2.5-0.5B", "max_length": 64, **fields})


@pytest.mark.parametrize("way", ["a file", "standard input"])
def test_a_line_that_is_not_text_costs_no_other_its_answer(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = b'{"model": "Qwen/Qwen2.5-0.5B", "max_length": 64}'
    data = b"\n".join([job, b'{"model": "\xff"}', job, b"\xff\xfe{\x00}\x00", job, b""])  # Latin-1; UTF-16
    name = "-"
    if way == "a file":
        name = str(tmp_path / "jobs.jsonl")
        Path(name).write_bytes(data)
    else:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="latin-1"))
    assert cli.run(["estimate", name]) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row.get("error") for row in rows] == [
        None,
        "line 2 is not text in UTF-8",
        None,
        "line 4 is not text in UTF-8",
        None,
    ]
    assert err == 'ftcost: 2 lines are not a job: see "error" in the answers\n'


def test_jobs_a_line_of_which_none_is_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    assert cli.run(["estimate", "-"]) == 2
    assert json.loads(capsys.readouterr().out) == {"error": "line 1 is not text in UTF-8", "line": 1}


@pytest.mark.parametrize("command", ["compare", "optimize"])
def test_standard_input_that_is_not_text_is_wrong_input(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    assert cli.run([command, "-"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "ftcost: standard input is not text in UTF-8\n")


CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "vocab_size": 100,
}
NOT_READ = ("time_step_limit", "torch_dtype", "architectures", "layer_types", "quantization_config", "text_config")


@pytest.mark.parametrize("name", [*NOT_READ, "max_position_embeddings", "sliding_window", "tie_word_embeddings"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, [0.0, math.inf], {"a": {"b": math.nan}}])
def test_an_infinity_in_a_config_is_text_in_the_answer(name: str, value: object) -> None:
    answer = estimate(model={**CONFIG, name: value}, max_length=64).to_dict()
    answer = json.loads(json.dumps(answer, allow_nan=False))
    words = json.dumps(answer["job"]["model"][name])
    assert "Infinity" in words or "NaN" in words
    again = estimate(answer["job"]).to_dict()
    assert (again["job"], again["memory"]) == (answer["job"], answer["memory"])


def test_an_infinity_where_a_size_is_read_is_refused() -> None:
    with pytest.raises(CostModelError, match="hidden_size must be a positive whole number, got 'Infinity'"):
        estimate(model=CONFIG | {"hidden_size": math.inf}, max_length=64)
    changed = estimate(model=CONFIG | {"rms_norm_eps": 1e-6}, model_overrides={"rms_norm_eps": math.inf}, max_length=64)
    assert changed.job["model_overrides"] == {"rms_norm_eps": "Infinity"}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"x", "model: a is of type bytes, which no JSON holds"),
        ([{1}], r"model: a\[0\] is of type set"),
        ({"b": object()}, r"model: a\.b is of type object"),
        ({(1, 2): 1}, "model: a has the key \\(1, 2\\), which is not text"),
        pytest.param(10**5000, "model: a is a whole number of about 5000 digits", id="long"),
        (functools.reduce(lambda inside, _: [inside], range(10_000), []), "nested more than 50 deep"),
    ],
)
def test_what_no_json_holds_is_refused_in_a_config(value: object, words: str) -> None:
    with pytest.raises(CostModelError, match=words):
        estimate(model={**CONFIG, "a": value}, max_length=64)


@pytest.mark.parametrize(
    ("family", "field", "value", "words"),
    [
        ("gemma2", "layer_types", {"a": 1}, "layer_types must hold one value a layer"),
        ("gemma2", "layer_types", [["sliding_attention"]] * 64, "layer_types must hold one value a layer"),
        ("granitemoehybrid", "layer_types", {"a": 1}, "layer_types must hold one value a layer"),
        ("nemotron_h", "layer_types", 5, "layer_types must name each layer, got 5"),
        ("ernie4_5_moe", "moe_layer_end_index", math.inf, "moe_layer_end_index must be a positive whole number"),
    ],
)
def test_what_names_no_layer_is_refused(family: str, field: str, value: object, words: str) -> None:
    tiny = json.loads((Path(__file__).parent / "tiny_configs.json").read_text())[family]
    with pytest.raises(CostModelError, match=words):
        estimate(model={**tiny, field: value}, max_length=64)


def test_keys_and_types_of_python_are_read_as_json_holds_them() -> None:
    answer = estimate(model={**CONFIG, "id2label": {0: "no"}, "layer_types": ("a", "b")}, max_length=64)
    assert answer.job["model"]["id2label"] == {"0": "no"}
    assert answer.job["model"]["layer_types"] == ["a", "b"]


@pytest.mark.parametrize("name", ["\ud800", "\0", "x" * 5000])
def test_a_calibration_of_an_impossible_name_is_refused(name: str) -> None:
    with pytest.raises(CostModelError, match="no calibration at"):
        estimate(model=CONFIG, max_length=64, calibration=name)
