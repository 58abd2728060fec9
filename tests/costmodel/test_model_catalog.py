"""Looking up models: by catalogue id, by path, on the hub."""

from __future__ import annotations

import csv
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from costmodel.data_files import DATA_FOLDER
from costmodel.errors import AmbiguousNameError, CostModelError, UnknownNameError
from costmodel.model_catalog import find_model_config, find_model_id, list_models, model_facts, nearest_models


def test_every_catalogued_config_loads_and_names_its_family() -> None:
    models = list_models()
    assert len(models) == 160
    for model_id in models:
        assert find_model_config(model_id)["model_type"] == model_facts(model_id).model_type


def test_no_config_stores_a_parameter_count() -> None:
    assert not {"num_params", "total_params", "active_params"} & {
        field for model_id in list_models() for field in find_model_config(model_id)
    }


@pytest.mark.parametrize(
    ("typed", "model_id"),
    [
        ("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
        ("MISTRALAI/mixtral-8x7b-V0.1", "mistralai/Mixtral-8x7B-v0.1"),
        ("Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
        ("mistralai/Mixtral-8x7B", "mistralai/Mixtral-8x7B-v0.1"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("gpt2", "openai-community/gpt2"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("google/gemma-4-26B-A4B", "google/gemma-4-26B-A4B-it"),
        ("blackmamba-2.8b", "Zyphra/BlackMamba-2.8B"),
        ("Qwen/Qwen2", None),  # the only Qwen2 of the catalogue is the 57B one: not what was asked for
        ("BlackMamba", None),
        ("unsloth/Mixtral-8x7B-v0.1", None),  # another organisation may have changed anything
        # Its vocabulary is 32,768 where the base's is 32,000.
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", None),
    ],
)
def test_find_model_id(typed: str, model_id: str | None) -> None:
    assert find_model_id(typed) == model_id


def test_an_ambiguous_model_is_refused_with_the_list() -> None:
    with pytest.raises(AmbiguousNameError, match=r"Mistral-7B-v0\.1, mistralai/Mistral-7B-v0\.3"):
        find_model_config("Mistral-7B")


def test_an_unknown_model_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="nearest: Mixtral-8x7B"):
        find_model_config("mixtrl-8x7b")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("unsloth/Llama-3.1-8B-Instruct", ["meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3-8B"]),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", ["meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3-8B"]),
        ("unsloth/Qwen3-8B-bnb-4bit", ["Qwen/Qwen3-8B"]),
        ("someone/my-llama-3-8b-finetune", ["meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-3.1-8B"]),
        ("TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ", ["mistralai/Mixtral-8x7B-v0.1"]),
        ("unsloth/Qwen3-30B-A3B-GGUF", ["Qwen/Qwen3-30B-A3B"]),
        ("Qwen-1_8B-Chat-Int4", ["Qwen-1_8B"]),
        ("unsloth/gpt-oss-20b-unsloth-bnb-4bit", ["openai/gpt-oss-20b"]),
        ("lamma-3-8b", ["Meta-Llama-3-8B", "Llama-3.1-8B"]),
        ("phi-3-mini", ["Phi-3-mini-4k-instruct"]),
        ("phi3", ["Phi-3-medium-4k-instruct", "Phi-3-mini-4k-instruct"]),
        ("lmsys/vicuna-7b-v1.5", ["huggyllama/llama-7b", "meta-llama/Llama-2-7b-hf"]),
        ("WizardLM-13B", ["Llama-2-13b-hf"]),
    ],
)
def test_nearest_are_the_family_in_the_same_size(name: str, nearest: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnknownNameError, match="name the one of these that it is a copy or a tuning of") as refused:
        find_model_config(name)
    assert refused.value.nearest[: len(nearest)] == nearest
    assert len(refused.value.nearest) == (2 if "Mixtral" in name else 3)  # all of that family here


@pytest.mark.parametrize(
    ("name", "family"),
    [("mixtral", "Mixtral"), ("mistral", "Mistral"), ("dolly-v2-12b", "pythia"), ("alpaca-7b", "llama"), ("gemma", "gemma")],
)
def test_nearest_are_of_the_family_that_is_named(name: str, family: str) -> None:
    """A word that is a family's own is no misspelling of one that looks like it."""
    nearest = nearest_models(name)
    assert nearest
    assert all(each.lower().startswith(family.lower()) for each in nearest)


def test_another_family_has_none_near(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nearest_models("t5") == nearest_models("orca-mini") == []
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnknownNameError, match=r"no model matches 'acme/secret'; it is not in the catalogue") as refused:
        find_model_config("acme/secret")
    assert refused.value.nearest == []


def test_aliases_name_catalogued_models_and_hide_none() -> None:
    with open(Path(DATA_FOLDER) / "models" / "aliases.csv", encoding="utf-8") as file:
        aliases = {row["alias"]: row["model_id"] for row in csv.DictReader(file)}
    assert set(aliases.values()) <= set(list_models())
    assert not set(aliases) & set(list_models())


def test_a_mapping_is_taken_as_it_is_and_copied() -> None:
    config = {"model_type": "llama"}
    found = find_model_config(config)
    assert found == config
    assert found is not config


def test_config_from_a_file_or_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 8}), encoding="utf-8-sig")  # with a byte order mark
    assert find_model_config(str(path)) == find_model_config(tmp_path) == {"model_type": "llama", "hidden_size": 8}


def test_a_folder_without_a_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(CostModelError, match=r"holds no config\.json"):
        find_model_config(tmp_path)


def test_an_adapter_folder_points_to_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "mistralai/Mistral-7B-v0.1"}')
    with pytest.raises(CostModelError, match=r"LoRA adapter.*mistralai/Mistral-7B-v0\.1"):
        find_model_config(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1, 2]", "\xff", '"text"'])
def test_a_damaged_config_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(CostModelError) as caught:
        find_model_config(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_an_empty_name() -> None:
    with pytest.raises(CostModelError, match=r"no such file: nowhere/config\.json"):
        find_model_config("nowhere/config.json")
    with pytest.raises(CostModelError, match="empty string"):
        find_model_config(" ")


class _Response:
    def __init__(self, status: int, body: Any) -> None:
        self.status, self.body = status, body

    def raise_for_status(self) -> None:
        if self.status != 200:
            raise OSError(f"{self.status} Client Error")

    def json(self) -> Any:
        return self.body


def _install_hub(monkeypatch: pytest.MonkeyPatch, response: _Response, cached: str | None = None) -> list[str]:
    """A ``huggingface_hub`` that answers every request with ``response``; returns the list of requested URLs."""
    urls: list[str] = []

    class Session:
        def get(self, url: str, *, headers: dict[str, str], timeout: float) -> _Response:
            assert timeout <= 10
            urls.append(url)
            return response

    hub, utils = types.ModuleType("huggingface_hub"), types.ModuleType("huggingface_hub.utils")
    hub.hf_hub_url = lambda repo, file: f"hub://{repo}/{file}"  # type: ignore[attr-defined]
    hub.try_to_load_from_cache = lambda repo, file: cached  # type: ignore[attr-defined]
    utils.build_hf_headers = dict  # type: ignore[attr-defined]
    utils.get_session = Session  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", utils)
    return urls


def test_a_hub_id_asks_for_config_json_only(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = _install_hub(monkeypatch, _Response(200, {"model_type": "llama"}))
    assert find_model_config("someone/new-model") == {"model_type": "llama"}
    assert urls == ["hub://someone/new-model/config.json"]


def test_a_cached_config_needs_no_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "qwen2"}')
    urls = _install_hub(monkeypatch, _Response(500, None), cached=str(path))
    assert find_model_config("someone/new-model") == {"model_type": "qwen2"}
    assert urls == []


def test_a_hub_that_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _install_hub(monkeypatch, _Response(403, None))
    with pytest.raises(UnknownNameError, match=r"403 Client Error.*give a path to its config\.json"):
        find_model_config("someone/new-model")


def test_a_name_without_organisation_never_asks_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = _install_hub(monkeypatch, _Response(200, {}))
    with pytest.raises(UnknownNameError):
        find_model_config("mixtrl")
    assert urls == []


def test_without_the_hub_client_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnknownNameError, match="huggingface_hub is not installed"):
        find_model_config("someone/new-model")


def test_an_adapter_that_names_no_base_model_says_so(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": null}')
    with pytest.raises(CostModelError, match="give its base model, which it does not name"):
        find_model_config(tmp_path)
