"""Look-up of GPUs, models and data sets."""

from __future__ import annotations

import csv
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from costmodel import catalog
from costmodel.catalog import find_gpu, find_model_config, find_model_id, length_histogram, list_gpus, list_models
from costmodel.errors import AmbiguousNameError, CostModelError, UnknownNameError


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("NVIDIA A40", "A40"),
        ("a40", "A40"),
        ("  A40 48GB ", "A40"),
        ("H100 SXM", "H100 SXM"),
        ("h100-sxm5", "H100 SXM"),
        ("H100-80GB-HBM3", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("H100_PCIe", "H100 PCIe"),
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("RTX 4090 24 GB", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4090D", "RTX 4090 D"),
        ("3090ti", "RTX 3090 Ti"),
        ("NVIDIA L40S", "L40S"),
        ("L40", "L40"),
        ("l4", "L4"),
        ("A100-80GB SXM", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("A10", "A10"),
        ("A10G", "A10G"),
        ("Tesla T4", "T4"),
        ("a6000", "RTX A6000"),
        ("RTX6000Ada", "RTX 6000 Ada"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),  # the number is the CPU's memory
        ("HGX B200", "B200"),
        ("mi250x", "MI250X (per GCD)"),
    ],
)
def test_find_gpu_by_what_people_and_nvml_write(typed: str, name: str) -> None:
    assert find_gpu(typed).name == name


@pytest.mark.parametrize(
    ("typed", "candidates"),
    [
        ("A100", ["A100-PCIE-40GB", "A100-SXM4-40GB", "A100-PCIE-80GB", "A100-SXM4-80GB"]),
        ("A100 80GB", ["A100-PCIE-80GB", "A100-SXM4-80GB"]),
        ("nvidia h100", ["H100 PCIe", "H100 SXM", "H100 NVL"]),
        ("V100-32GB", ["V100-PCIE-32GB", "V100-SXM2-32GB"]),
        ("GH200", ["GH200 96GB", "GH200 144GB"]),
    ],
)
def test_a_name_of_several_products_is_refused_with_their_list(typed: str, candidates: list[str]) -> None:
    with pytest.raises(AmbiguousNameError) as caught:
        find_gpu(typed)
    assert caught.value.candidates == candidates
    assert all(candidate in str(caught.value) for candidate in candidates)


@pytest.mark.parametrize(
    "typed",
    ["RTX 9090", "RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "T4G", "H800", "RTX 3080 12GB", "", "rtx"],
)
def test_an_unknown_gpu_never_gets_another_ones_numbers(typed: str) -> None:
    with pytest.raises(UnknownNameError, match=r"or describe it: in a job, .gpu.*memory_bandwidth_bytes_per_second"):
        find_gpu(typed)


def test_an_unknown_gpu_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"nearest: .*RTX 4090"):
        find_gpu("RTX 4091")


def test_every_gpu_is_found_by_each_of_its_names() -> None:
    for gpu in list_gpus():
        assert find_gpu(gpu.name) == gpu
        for nvml_name in gpu.nvml_names:
            if gpu.name in ("RTX 3060 12GB", "RTX 3080 10GB", "RTX 4060 Ti 16GB"):
                continue  # NVML calls their sisters of another memory size the same
            assert find_gpu(nvml_name) == gpu
            assert find_gpu(nvml_name.replace(" ", "")) == gpu


@pytest.mark.parametrize(
    ("typed", "other"),
    [
        ("RTX 4070", "RTX 4070 Ti SUPER"),
        ("RTX 4070 Ti", "RTX 4070 Ti SUPER"),
        ("RTX 4070 SUPER", "RTX 4070 Ti SUPER"),
        ("NVIDIA GeForce RTX 4060", "RTX 4060 Ti 16GB"),
        ("RTX 5070", "RTX 5070 Ti"),
        ("RTX 2080", "RTX 2080 Ti"),
        ("Quadro 6000", "Quadro RTX 6000"),
    ],
)
def test_a_grade_that_is_left_out_is_never_filled_in(typed: str, other: str) -> None:
    with pytest.raises(UnknownNameError, match=f"{other} is another card; or describe it"):
        find_gpu(typed)


@pytest.mark.parametrize("typed", ["TITAN", "server", "10GB", "Max-Q", "HBM3e"])
def test_a_name_without_a_model_names_nothing(typed: str) -> None:
    with pytest.raises(UnknownNameError):
        find_gpu(typed)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("NVIDIA GeForce RTX 4060 Ti", "RTX 4060 Ti 16GB"),
        ("NVIDIAGeForceRTX4060Ti", "RTX 4060 Ti 16GB"),
        ("rtx 3060", "RTX 3060 12GB"),
        ("RTX 3080", "RTX 3080 10GB"),
    ],
)
def test_a_card_that_comes_in_two_sizes_needs_its_size(typed: str, name: str) -> None:
    with pytest.raises(AmbiguousNameError, match=f"choose one of: {name}; .*say the size") as caught:
        find_gpu(typed)
    assert caught.value.candidates == [name]
    assert find_gpu(name).name == name
    assert find_gpu(f"{typed} {name.split()[-1]}").name == name


def test_data_sheet_of_an_a40() -> None:
    # NVIDIA's data sheet (696 GB/s, 149.7 dense bf16 TFLOP/s); 46,068 MiB as the driver reports with ECC on.
    a40 = find_gpu("A40")
    assert a40.memory_bytes == 46_068 * 2**20
    assert a40.memory_is_marketed is False
    assert a40.memory_bandwidth_bytes_per_second == 696e9
    assert a40.peak_bf16_flops_per_second == pytest.approx(149.7e12)
    assert a40.l2_cache_bytes == 6 * 2**20


def test_links_between_the_gpus_of_a_machine_are_one_direction() -> None:
    # NVIDIA prints 900 GB/s (H100) and 600 GB/s (A100) for both directions together; PCIe 4.0 x16 carries 31.5 each way.
    assert find_gpu("H100 SXM").nvlink_bytes_per_second == 450e9
    assert find_gpu("A100-SXM4-80GB").nvlink_bytes_per_second == 300e9
    assert find_gpu("L40S").nvlink_bytes_per_second is None
    assert find_gpu("L40S").pcie_bytes_per_second == 31.5e9
    linked = {gpu.name for gpu in list_gpus() if gpu.nvlink_bytes_per_second or gpu.pcie_bytes_per_second}
    unknown = {gpu.name for gpu in list_gpus()} - linked
    assert unknown == {"A16 (per GPU)", "GH200 96GB", "GH200 144GB"}


def test_unknown_cells_are_none_and_not_zero() -> None:
    assert find_gpu("T4").peak_bf16_flops_per_second is None  # Turing has no bf16 matrix units
    assert find_gpu("Tesla P100-SXM2-16GB").memory_is_marketed is True
    assert find_gpu("MI300X").l2_cache_bytes is None


def test_dense_and_fp32_accumulate_peaks() -> None:
    # The figures that other tools copy wrongly: sparse, fp16-accumulate, or a sister's.
    assert find_gpu("A10G").peak_bf16_flops_per_second == 70e12
    assert find_gpu("RTX 3090").peak_bf16_flops_per_second == 71e12
    assert find_gpu("H100 SXM").peak_bf16_flops_per_second == 989e12
    assert find_gpu("RTX 5090").peak_bf16_flops_per_second == pytest.approx(209.5e12)


# --- models


def test_every_catalogued_config_loads_and_names_its_family() -> None:
    models = list_models()
    assert len(models) == 160
    for model_id in models:
        assert find_model_config(model_id)["model_type"] == catalog.model_facts(model_id).model_type


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


def test_aliases_name_catalogued_models_and_hide_none() -> None:
    with open(Path(catalog.DATA_FOLDER) / "models" / "aliases.csv", encoding="utf-8") as file:
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


# --- data sets


@pytest.mark.parametrize(
    # Xia et al. 2024, Table II and the histograms in the paper's repository.
    ("name", "num_samples", "mean", "longest"),
    [("commonsense_15k", 15_119, 99.89, 512), ("math_14k", 13_921, 187.26, 1470)],
)
def test_length_histograms_of_the_paper(name: str, num_samples: int, mean: float, longest: int) -> None:
    histogram = length_histogram(name)
    assert sum(histogram.values()) == num_samples
    assert max(histogram) == longest
    assert sum(length * count for length, count in histogram.items()) / num_samples == pytest.approx(mean, abs=0.005)


def test_data_set_names_are_forgiving_and_unknown_ones_refused() -> None:
    assert length_histogram("Math-14K") == length_histogram("MATH") == length_histogram("math_14k")
    with pytest.raises(UnknownNameError, match="known: commonsense_15k, math_14k"):
        length_histogram("alpaca")


def test_a_cache_that_no_sheet_says_is_that_of_its_generation() -> None:
    assert catalog.l2_cache_bytes(find_gpu("A40")) == 6 * 2**20
    assert catalog.l2_cache_bytes(find_gpu("B300")) == find_gpu("B200").l2_cache_bytes == 126 * 2**20
    assert catalog.l2_cache_bytes(find_gpu("GH200 96GB")) == find_gpu("H100 SXM").l2_cache_bytes
    assert catalog.l2_cache_bytes(find_gpu("RTX A5000")) == 6 * 2**20  # not the 40 MiB of an A100, which is Ampere too
    assert catalog.l2_cache_bytes(find_gpu("MI300X")) is None
