"""Arguments of the public functions: what cannot be one is refused by name, with the way out, in a message of one line."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_answer import LLAMA

from costmodel import compare, estimate, find_gpu, find_model_config, find_price, model_spec_from_config, optimize
from costmodel.errors import CostModelError, UnknownNameError
from costmodel.price_catalog import prices_from
from costmodel.spot import SpotTerms

JOB: dict[str, Any] = {**LLAMA, "gpu": "L40S"}
LONG = "a" * 100_000
NO_TEXT = [None, 5, -1.5, b"L4", [], {}, {"a"}, ("L4",), object(), math.nan, datetime.date(2026, 1, 1), find_gpu, ...]


def test_one_name_is_a_list_of_one() -> None:
    assert compare(JOB, gpus="L4", tiers="spot") == compare(JOB, gpus=["L4"], tiers=["spot"])
    assert compare(JOB, gpus=find_gpu("L4")) == compare(JOB, gpus=["L4"])
    assert optimize(JOB, free="optim", not_given="optim") == optimize(JOB, free=["optim"], not_given=("optim",))


def test_a_moment_is_its_day() -> None:
    found = compare(JOB, "L40S", today=datetime.datetime(2026, 12, 1, 23, 59))
    assert found == compare(JOB, "L40S", today=datetime.date(2026, 12, 1)) != compare(JOB, "L40S")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gpus": 5}, r'gpus must be a list of names such as \["L4", "H100 SXM"\], got 5'),
        ({"gpus": {"name": "x"}}, "gpus must be a list of names"),
        ({"gpus": [None]}, "name of a GPU must be text .*, got None"),
        ({"gpus": []}, "gpus is empty; leave it out"),
        ({"tiers": 5}, r'tiers must be a list of names such as \["on_demand", "spot"\], got 5'),
        ({"tiers": []}, "tiers is empty; leave it out"),
        ({"tiers": [["spot"]]}, "no tier matches"),
        ({"today": "2026-12-01"}, "today must be a datetime.date, got '2026-12-01'"),
        ({"spot": 3}, r"spot must be a costmodel.spot.SpotTerms\(interruptions_per_hour=...\), got 3"),
        ({"spot": {}}, "spot must be"),
    ],
)
@pytest.mark.parametrize("function", [compare, optimize])
def test_wrong_arguments_of_both_searches(function: Callable[..., Any], fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CostModelError, match=words):
        function(JOB, **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"as_is": "no"}, "as_is must be True or False, got 'no'"),
        ({"by": 3}, "no order matches 3; known: time, usd"),
        ({"by": ["usd"]}, "no order matches"),
    ],
)
def test_wrong_arguments_of_compare(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CostModelError, match=words):
        compare(JOB, **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        *(({"budget_usd": bad}, "budget_usd must be a positive number of dollars") for bad in ("x", -1, 0, True, math.nan)),
        *(({"deadline_hours": bad}, "deadline_hours must be a positive number") for bad in ("1", 0, math.inf, 10**400)),
        ({"free": 3}, r'free must be a list of names such as \["optim"\], got 3'),
        ({"free": "zz"}, "no Job field matches 'zz'; free names fields of the job"),
        ({"free": [["optim"]]}, "no Job field matches"),
        ({"not_given": 3}, "not_given must be a list of names"),
        ({"not_given": ["all"]}, "no Job field matches 'all'.*; not_given names fields of the job"),
        ({"free_batch": 3}, "free_batch must be True or False, got 3"),
        ({"allow_quantization": "no"}, "allow_quantization must be True or False"),
    ],
)
def test_wrong_arguments_of_optimize(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CostModelError, match=words):
        optimize(JOB, **fields)


@pytest.mark.parametrize("value", NO_TEXT, ids=lambda value: type(value).__name__)
def test_what_is_no_name(value: Any) -> None:
    with pytest.raises(CostModelError, match='the name of a GPU must be text such as "L40S", got'):
        find_gpu(value)
    with pytest.raises(CostModelError, match='the name of a GPU must be text such as "L40S", got'):
        find_price(value)
    if value:
        with pytest.raises(CostModelError, match='cloud must be text such as "AWS", got'):
            find_price("L40S", cloud=value)
    if value is not None:
        with pytest.raises(UnknownNameError, match="no tier matches"):
            find_price("L40S", tier=value)


@pytest.mark.parametrize(
    "value", [each for each in [*NO_TEXT, "llama"] if not isinstance(each, dict)], ids=lambda value: type(value).__name__
)
def test_what_is_no_config(value: Any) -> None:
    with pytest.raises(CostModelError, match=r"the model config must be the mapping that a config\.json holds"):
        model_spec_from_config(value)
    if not isinstance(value, str):
        with pytest.raises(CostModelError, match=r"the model must be an id, a path to a config\.json, or a config mapping"):
            find_model_config(value)


@pytest.mark.parametrize("num_gpus", [0, -1, "x", math.nan, True, 2.5, 10**400])
def test_what_is_no_number_of_gpus(num_gpus: Any) -> None:
    with pytest.raises(CostModelError, match="num_gpus must be a whole number from 1 to 1,000,000, got"):
        find_price("L40S", num_gpus=num_gpus)


@pytest.mark.parametrize("value", ["x", None, True, -1, math.nan, [1]])
def test_what_is_no_rate_of_interruptions(value: Any) -> None:
    with pytest.raises(CostModelError, match="interruptions_per_hour must be a number >= 0, at most 3600, got"):
        SpotTerms(value)


CONFIG = find_model_config("meta-llama/Llama-3.1-8B")
ONE_LONG = [
    *({name: LONG} for name in (*JOB, "deepspeed", "framework_version", "fsdp", "calibration", "cloud", "optim")),
    {"model": f"{LONG}.json"},
    {"model": {"model_type": LONG}},
    {"model": {**CONFIG, "hidden_size": LONG}},
    {"model_overrides": {LONG: 1}},
    {"lengths": {"file": LONG}},
    {"lengths": {"dataset": LONG}},
    {"deepspeed": f"{LONG}.json"},
    {"deepspeed": "{" + LONG},
    {"gpu": f"probe:{LONG}"},
    {"gpu": f"probe:{LONG}.json"},
    {LONG: 1},
]


@pytest.mark.parametrize("fields", ONE_LONG, ids=lambda fields: str(*fields)[:20])
def test_a_long_value_makes_no_long_message(fields: dict[str, Any]) -> None:
    with pytest.raises(CostModelError) as caught:
        estimate({**JOB, **fields})
    assert len(str(caught.value)) < 1500


def test_a_file_of_a_long_name_makes_no_long_message() -> None:
    with pytest.raises(CostModelError) as caught, prices_from(LONG):
        pass
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("usd", ["1e9", "1_0", "0", "nan", "cheap"])
def test_a_price_of_the_environment_is_within_bounds(usd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCOST_USD_PER_GPU_HOUR", usd)
    words = f"FTCOST_USD_PER_GPU_HOUR must be a positive number of dollars, at most 10,000, got '{usd}'"
    with pytest.raises(CostModelError, match=words):
        estimate(JOB)


def test_an_underscore_is_in_no_number(tmp_path: Path) -> None:
    """Python reads "1_0" as 10."""
    with pytest.raises(CostModelError, match="num_samples: must be a number, got '1_0'"):
        estimate({**JOB, "num_samples": "1_0"})
    for text in ("100\n1_0\n", json.dumps({"1_0": 3})):
        (tmp_path / "lengths").write_text(text)
        with pytest.raises(CostModelError, match="must hold one whole number of tokens a line"):
            estimate({**JOB, "lengths": {"file": str(tmp_path / "lengths")}})
    (tmp_path / "prices.csv").write_text("cloud,gpu,tier,usd_per_gpu_hour\nMine,L40S,on_demand,1_0\nMine,L4,on_demand,1\n")
    with prices_from(tmp_path / "prices.csv") as table:
        assert len(table.rows) == 1
        assert "'1_0' is not a number" in table.refused[0]


def test_an_answer_given_out_is_the_callers_own() -> None:
    """Whatever is changed in it, the next one is as it was."""
    answer = estimate({**JOB, "lengths": {"values": [100, 200]}, "model": CONFIG})
    before = json.dumps(answer.to_dict())

    def spoil(value: Any) -> None:
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, (dict, list)):
                spoil(each)
        value.clear()

    spoil(answer.to_dict())
    assert json.dumps(answer.to_dict()) == before
    candidate = compare(JOB, "L40S", "spot", spot=SpotTerms(0.1))[0]
    before = json.dumps(candidate.to_dict())
    spoil(candidate.to_dict())
    assert json.dumps(candidate.to_dict()) == before
