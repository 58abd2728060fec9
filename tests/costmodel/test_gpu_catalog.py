"""Looking up GPUs by the names that people and NVML use."""

from __future__ import annotations

import pytest

from costmodel.errors import AmbiguousNameError, UnknownNameError
from costmodel.gpu_catalog import find_gpu, l2_cache_bytes, list_gpus


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
            if gpu.name in ("RTX 3060 12GB", "RTX 3080 10GB", "RTX 4060 Ti 16GB", "RTX 5060 Ti 16GB"):
                continue  # NVML calls their sisters of another memory size the same
            assert find_gpu(nvml_name) == gpu
            assert find_gpu(nvml_name.replace(" ", "")) == gpu


@pytest.mark.parametrize(
    ("typed", "other"),
    [
        ("RTX 2080", "RTX 2080 Ti"),
        ("Quadro 6000", "Quadro RTX 6000"),
        ("RTX PRO 6000 Blackwell Q", "RTX PRO 6000 Blackwell Max-Q"),
    ],
)
def test_a_grade_that_is_left_out_is_never_filled_in(typed: str, other: str) -> None:
    with pytest.raises(UnknownNameError, match=f"{other} is another card; or describe it"):
        find_gpu(typed)


@pytest.mark.parametrize(
    "typed",
    ["RTX 4070", "RTX 4070 Ti", "RTX 4070 SUPER", "RTX 4070 Ti SUPER", "RTX 4060", "RTX 5070", "RTX 5070 Ti", "RTX 3080 Ti"],
)
def test_grades_of_one_number_are_cards_of_their_own(typed: str) -> None:
    assert find_gpu(f"NVIDIA GeForce {typed}").name == find_gpu(typed).name == typed


@pytest.mark.parametrize("typed", ["TITAN", "server", "10GB", "Max-Q", "HBM3e"])
def test_a_name_without_a_model_names_nothing(typed: str) -> None:
    with pytest.raises(UnknownNameError):
        find_gpu(typed)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("NVIDIA GeForce RTX 4060 Ti", "RTX 4060 Ti 16GB"),
        ("NVIDIAGeForceRTX4060Ti", "RTX 4060 Ti 16GB"),
        ("RTX 5060 Ti", "RTX 5060 Ti 16GB"),
        ("rtx 3060", "RTX 3060 12GB"),
        ("RTX 3080", "RTX 3080 10GB"),
    ],
)
def test_a_card_that_comes_in_two_sizes_needs_its_size(typed: str, name: str) -> None:
    with pytest.raises(
        AmbiguousNameError, match=f"of which only {name} is known here; say the size, or describe another: "
    ) as caught:
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


def test_a_cache_that_no_sheet_says_is_that_of_its_generation() -> None:
    assert l2_cache_bytes(find_gpu("A40")) == 6 * 2**20
    assert l2_cache_bytes(find_gpu("B300")) == find_gpu("B200").l2_cache_bytes == 126 * 2**20
    assert l2_cache_bytes(find_gpu("GH200 96GB")) == find_gpu("H100 SXM").l2_cache_bytes
    assert l2_cache_bytes(find_gpu("RTX A5000")) == 6 * 2**20  # not the 40 MiB of an A100, which is Ampere too
    assert l2_cache_bytes(find_gpu("MI300X")) is None


@pytest.mark.parametrize(
    ("name", "one", "number"),
    [("8xH100 SXM", "H100 SXM", 8), ("2x4090", "4090", 2), ("A40 x 4", "A40", 4), ("2 × L40S", "L40S", 2)],
)
def test_several_of_a_card_are_sent_to_num_gpus(name: str, one: str, number: int) -> None:
    with pytest.raises(UnknownNameError, match=f"give gpu '{one}' and num_gpus {number} "):
        find_gpu(name)
    assert find_gpu(one)
