"""Expected padded tokens of a batch, against exact enumeration and simulation."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterable

import pytest

from costmodel.defaults import resolve
from costmodel.errors import CostModelError, UnknownNameError
from costmodel.hf_config import model_spec_from_config
from costmodel.length_datasets import length_histogram
from costmodel.length_distribution import distribution, expected_maximum
from costmodel.lengths import batch_tokens, cut_at
from costmodel.specs import Lengths, parse_job

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}


def _job(**fields):
    model = model_spec_from_config(CONFIG)
    return resolve(parse_job({"model": CONFIG, "max_length": 1024, **fields}), model)[0]


def test_expected_longest_of_three_equals_enumeration() -> None:
    dist = distribution(Lengths(values=(3, 5, 5, 9)), 100)
    draws = list(itertools.product((3, 5, 5, 9), repeat=3))
    mean, square = expected_maximum(dist, 3)
    assert mean == pytest.approx(sum(max(draw) for draw in draws) / len(draws))
    assert square == pytest.approx(sum(max(draw) ** 2 for draw in draws) / len(draws))


def test_padding_to_a_multiple_rounds_each_batch_up() -> None:
    dist = distribution(Lengths(values=(10, 90)), 1024)
    tokens = batch_tokens(_job(per_device_train_batch_size=2, pad_to_multiple_of=8), dist)
    # longest of two: 10 -> 16 with chance 1/4, 90 -> 96 with 3/4
    assert tokens.expected.num_tokens == pytest.approx(2 * (16 / 4 + 96 * 3 / 4))
    assert tokens.num_non_padding_tokens == pytest.approx(100)
    assert tokens.longest.num_tokens == 2 * 96
    assert tokens.is_padded


def test_padding_of_the_papers_math_set_against_simulation() -> None:
    dist = distribution(Lengths(dataset="math_14k"), 1024)
    job = _job(per_device_train_batch_size=4, pad_to_multiple_of=8)
    expected = batch_tokens(job, dist).expected.num_tokens
    random_source = random.Random(0)
    draws = random_source.choices(dist.lengths, dist.shares, k=4 * 20_000)
    padded = [-(-length // 8) * 8 for length in draws]
    simulated = sum(4 * max(padded[i : i + 4]) for i in range(0, len(padded), 4)) / 20_000
    assert expected == pytest.approx(simulated, rel=0.01)
    # medians and means as the paper's histogram has them
    assert dist.mean_tokens == pytest.approx(187.26, abs=0.3)


def test_grouping_by_length_saves_padding_and_packing_all_of_it() -> None:
    dist = distribution(Lengths(dataset="commonsense_15k"), 1024)
    random_order = batch_tokens(_job(per_device_train_batch_size=8), dist)
    grouped = batch_tokens(_job(per_device_train_batch_size=8, train_sampling_strategy="group_by_length"), dist)
    free = batch_tokens(_job(per_device_train_batch_size=8, padding_free=True), dist)
    assert free.expected.num_tokens == pytest.approx(8 * dist.mean_tokens)
    assert free.expected.num_tokens < grouped.expected.num_tokens < 0.7 * random_order.expected.num_tokens
    flash = {"attn_implementation": "flash_attention_2"}
    packed = batch_tokens(_job(per_device_train_batch_size=2, packing=True, **flash), dist)
    assert packed.num_samples > 18  # two rows of 1,024 hold about twenty samples of 100 tokens
    assert packed.expected.num_attended_pairs < packed.expected.num_tokens * 400  # attention stays inside each document
    assert packed.expected.num_masked_pairs == packed.longest.num_masked_pairs == 0


def _log_normal_lengths(num_samples: int, mean: int, longest: int) -> list[int]:
    source = random.Random(4)
    return [max(1, min(longest, round(mean * source.lognormvariate(-0.125, 0.5)))) for _ in range(num_samples)]


GROUPED = {
    "natural": [min(2048, round(60 * 1.004**index)) for index in range(1000)],
    "five": [100, 200, 200, 300, 1024],
    "rare": [100] * 99 + [2048],
    "one-long": [100] * 39 + [2048],
    "one-long-of-many": [*_log_normal_lengths(1999, 200, 800), 2048],
    "ten": _log_normal_lengths(10, 200, 2048),
    "thirty-three": _log_normal_lengths(33, 200, 2048),
    "two-hundred": _log_normal_lengths(200, 200, 2048),
}


@pytest.mark.parametrize("batch_size", [2, 4, 16])
@pytest.mark.parametrize("accumulation", [1, 8])
@pytest.mark.parametrize("data", ["one-long", "one-long-of-many", "ten", "thirty-three", "two-hundred", "natural"])
def test_the_samples_themselves_grouped_by_length_equal_the_sampler_of_transformers(
    data: str, batch_size: int, accumulation: int
) -> None:
    """Each sample comes once, so that the only long one of a small data set is surely in a batch."""
    num_samples = len(GROUPED[data])
    _check_grouping(itertools.repeat(GROUPED[data], max(40, 80_000 // num_samples)), data, batch_size, accumulation, 0.005)


@pytest.mark.parametrize(
    ("data", "num_samples", "batch_size", "accumulation"),
    [
        # a group is a batch and a megabatch three of them, so much is padded; the longest two of all swap their batches
        pytest.param("natural", 200, 16, 1, id="small-data"),
        pytest.param("five", 200, 4, 8, id="one-group-a-megabatch"),
        pytest.param("five", 12, 4, 2, id="two-megabatches"),
        pytest.param("five", 10, 16, 1, id="less-than-a-batch"),
        pytest.param("natural", 2000, 16, 1, id="megabatches-of-31"),
        pytest.param("natural", 5000, 4, 8, id="accumulation"),
        pytest.param("rare", 5000, 4, 8, id="accumulation-rare-long-ones"),
        pytest.param("rare", 5000, 16, 1, id="rare-long-ones"),
    ],
)
def test_drawn_samples_grouped_by_length_equal_the_sampler_of_transformers(
    data: str, num_samples: int, batch_size: int, accumulation: int
) -> None:
    source = random.Random(0)
    drawn = (source.choices(GROUPED[data], k=num_samples) for _ in range(max(16, 160_000 // num_samples)))
    _check_grouping(drawn, data, batch_size, accumulation, 0.01)


def _check_grouping(data_sets: Iterable[list[int]], data: str, batch_size: int, accumulation: int, tolerance: float) -> None:
    """Padding and attention of the named lengths against the sampler's own orders of each of ``data_sets``."""
    torch = pytest.importorskip("torch")
    sampler = pytest.importorskip("transformers.trainer_pt_utils")
    generator = torch.Generator().manual_seed(0)
    padded = real = square = num_samples = 0
    for lengths in data_sets:
        num_samples = len(lengths)
        order = sampler.get_length_grouped_indices(lengths, batch_size * accumulation, generator=generator)
        for start in range(0, num_samples, batch_size):
            batch = [lengths[index] for index in order[start : start + batch_size]]
            padded += max(batch) * len(batch)
            square += max(batch) ** 2 * len(batch)
            real += sum(batch)
    job = _job(
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        num_samples=num_samples,
        train_sampling_strategy="group_by_length",
        max_length=2048,
    )
    expected = batch_tokens(job, distribution(Lengths(values=tuple(GROUPED[data])), 2048))
    assert expected.expected.num_tokens / expected.num_non_padding_tokens == pytest.approx(padded / real, rel=tolerance)
    assert expected.expected.num_attended_pairs / expected.expected.num_tokens == pytest.approx(
        square / padded, rel=tolerance
    )


def test_an_evaluation_is_grouped_by_its_own_batches_and_samples() -> None:
    """Half of 10 and half of 30 tokens: sorted by the thousands hardly a batch is mixed, four of them are one batch."""
    dist = distribution(Lengths(values=(10, 30)), 1024)
    fields = {"train_sampling_strategy": "group_by_length", "per_device_eval_batch_size": 4}
    job = _job(
        per_device_train_batch_size=4, gradient_accumulation_steps=64, num_samples=10**6, num_eval_samples=4, **fields
    )
    trained, evaluated = batch_tokens(job, dist), batch_tokens(job, dist, evaluates=True)
    assert trained.expected.num_tokens == pytest.approx(4 * 20, rel=0.001)
    assert evaluated.expected.num_tokens == pytest.approx(4 * (30 - 20 / 2**4))  # one batch: the longest of four


FLASH = {"attn_implementation": "flash_attention_2", "packing": True}


@pytest.mark.slow  # imports trl
def test_packed_rows_are_as_many_as_trl_makes() -> None:
    datasets = pytest.importorskip("datasets")
    pack_dataset = pytest.importorskip("trl.data_utils").pack_dataset
    source = random.Random(4)
    for lengths, max_length in (
        ([700] * 2000, 1024),  # one sample a row, 68 % filled
        (_log_normal_lengths(4000, 700, 4096), 1024),
        (_log_normal_lengths(4000, 1500, 6000), 2048),
        (_log_normal_lengths(4000, 300, 3000), 2048),
        ([source.randint(1, 1500) for _ in range(3000)], 2048),
        ([source.choice((400, 900)) for _ in range(3000)], 1400),
        ([40] * 64, 512),  # fewer than are packed at a time
        (_log_normal_lengths(4000, 200, 4000), 65_536),  # a thousand samples are three rows and a bit
    ):
        plain = datasets.Dataset.from_dict({"input_ids": [[5] * length for length in lengths]})
        rows = len(pack_dataset(plain, max_length, "bfd"))
        job = _job(max_length=max_length, framework="trl", per_device_train_batch_size=2, num_samples=len(lengths), **FLASH)
        packed = batch_tokens(job, distribution(Lengths(values=tuple(lengths)), max_length))
        assert 2 * len(lengths) / packed.num_samples == pytest.approx(rows, rel=0.02)
        real = 2 * sum(min(length, max_length) for length in lengths) / rows
        assert packed.num_non_padding_tokens == packed.expected.num_tokens == pytest.approx(real, rel=0.02)
        squares = 2 * sum(min(length, max_length) ** 2 for length in lengths) / rows
        inside = packed.expected.num_attended_pairs - packed.expected.num_masked_pairs
        assert inside == pytest.approx(squares, rel=0.02)


def test_one_length_fills_a_packed_row_with_whole_samples_only() -> None:
    dist = distribution(Lengths(fixed=300), 1024)
    packed = batch_tokens(_job(per_device_train_batch_size=2, supervised_fraction=0.5, num_samples=999, **FLASH), dist)
    assert packed.num_samples == 2 * 3
    assert packed.expected.num_tokens == packed.num_non_padding_tokens == 2 * 900
    assert packed.num_supervised_tokens == 900
    assert packed.expected.num_attended_pairs == 6 * 300**2


def test_wrapped_rows_are_full_and_nothing_is_cut_off() -> None:
    job = _job(framework="trl", packing=True, padding_free=False, per_device_train_batch_size=2)
    assert cut_at(job) > 3000
    wrapped = batch_tokens(job, distribution(Lengths(fixed=3000), cut_at(job)))
    assert wrapped.expected.num_tokens == wrapped.num_non_padding_tokens == wrapped.longest.num_tokens == 2 * 1024
    assert wrapped.num_samples == pytest.approx(2 * 1024 / 3000)
    assert wrapped.expected.num_attended_pairs == 2 * 1024**2


@pytest.mark.parametrize(
    ("framework", "num_samples", "num_computed"),
    [
        pytest.param("trl", 4, 4 * 400, id="trl-computes-the-samples"),
        pytest.param("llamafactory", 4, 2 * 1024, id="llamafactory-pads-each-row"),
        pytest.param("axolotl", 5, 2 * 1024, id="axolotl-packs-the-batch-as-one-row"),
        pytest.param("torchtune", 4, 2 * 1024, id="torchtune-pads-each-row"),
    ],
)
def test_rows_are_packed_and_padded_as_the_framework_does(framework: str, num_samples: int, num_computed: int) -> None:
    dist = distribution(Lengths(fixed=400), 1024)
    packed = batch_tokens(_job(framework=framework, per_device_train_batch_size=2, num_samples=1000, **FLASH), dist)
    assert packed.num_samples == num_samples
    assert packed.num_non_padding_tokens == num_samples * 400
    assert packed.expected.num_tokens == num_computed


def test_samples_packed_as_they_come_against_simulation() -> None:
    """Torchtune closes a row with the first sample that does not fit."""
    lengths = range(1, 1001)
    source, rows, room = random.Random(7), 0, 0
    for length in source.choices(lengths, k=100_000):
        if length > room:
            rows, room = rows + 1, 1024
        room -= length
    packed = batch_tokens(_job(framework="torchtune", **FLASH), distribution(Lengths(values=tuple(lengths)), 1024))
    assert packed.num_samples / 8 == pytest.approx(100_000 / rows, rel=0.02)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_without_a_kernel_of_variable_length_a_flattened_batch_is_computed_whole(attention: str) -> None:
    dist = distribution(Lengths(histogram={100: 3, 500: 1}), 1024)
    fields = {"per_device_train_batch_size": 4, "attn_implementation": attention}
    packed = batch_tokens(_job(packing=True, **fields), dist)
    assert packed.expected.num_attended_pairs == packed.expected.num_tokens**2
    kept_apart = batch_tokens(_job(packing=True, **{**fields, "attn_implementation": "flash_attention_2"}), dist)
    inside = packed.expected.num_attended_pairs - packed.expected.num_masked_pairs
    assert inside == pytest.approx(kept_apart.expected.num_attended_pairs)
    assert packed.longest.num_attended_pairs == (4 * 1024) ** 2
    free = batch_tokens(_job(padding_free=True, **fields), dist)
    draws = itertools.product([100, 100, 100, 500], repeat=4)
    assert free.expected.num_attended_pairs == pytest.approx(statistics.mean(sum(draw) ** 2 for draw in draws))
    alone = batch_tokens(_job(padding_free=True, **{**fields, "per_device_train_batch_size": 1}), dist)
    assert alone.expected.num_masked_pairs == 0


def test_samples_above_the_limit_are_cut_and_counted() -> None:
    dist = distribution(Lengths(histogram={100: 3, 5000: 1}), 1024)
    assert dist.longest_tokens == 1024
    assert dist.share_cut == 0.25


def test_a_mean_alone_uses_the_stated_shape() -> None:
    dist = distribution(Lengths(mean=200, max=1000), 1024)
    assert dist.mean_tokens == pytest.approx(200, rel=0.01)
    assert dist.longest_tokens <= 1000


def test_supervised_positions_reach_the_head_only_under_trl() -> None:
    dist = distribution(Lengths(fixed=100), 1024)
    plain = batch_tokens(_job(per_device_train_batch_size=2, supervised_fraction=0.25), dist)
    trl = batch_tokens(_job(per_device_train_batch_size=2, supervised_fraction=0.25, framework="trl"), dist)
    assert plain.expected.num_head_tokens == 200
    assert trl.expected.num_head_tokens == 50
    assert trl.num_supervised_tokens == plain.num_supervised_tokens == 50


def test_logits_to_keep_bounds_the_positions_that_reach_the_head() -> None:
    dist = distribution(Lengths(fixed=100), 1024)
    assert batch_tokens(_job(per_device_train_batch_size=2, logits_to_keep=8), dist).longest.num_head_tokens == 16
    assert batch_tokens(_job(per_device_train_batch_size=2, logits_to_keep=500), dist).longest.num_head_tokens == 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("12\nabc\n", "whole number of tokens a line", id="words"),
        pytest.param("", "no lengths", id="empty"),
        pytest.param("0\n5\n", "at least 1 token, got 0", id="zero"),
        pytest.param("{broken", "whole number of tokens a line", id="damaged-json"),
    ],
)
def test_a_bad_lengths_file_says_what_it_must_hold(tmp_path, content: str, message: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(content)
    with pytest.raises(CostModelError, match=message):
        distribution(Lengths(file=str(path)), 1024)


def test_lengths_files_in_three_forms_agree(tmp_path) -> None:
    forms = {"a.txt": "5\n5\n7\n", "b.json": "[5, 5, 7]", "c.json": '{"5": 2, "7": 1}', "mark.txt": "\ufeff5\r\n5\r\n7"}
    for name, content in forms.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    found = {distribution(Lengths(file=str(tmp_path / name)), 1024) for name in forms}
    assert found == {distribution(Lengths(histogram={5: 2, 7: 1}), 1024)}


def test_the_longest_sample_that_is_named_with_a_mean_decides_the_longest_batch() -> None:
    """The assumed shape ends far below 1,304 for a mean of 130; the sample of that length still comes."""
    dist = distribution(Lengths(mean=130, max=1304), 2048)
    assert dist.longest_tokens == 1304
    assert dist.shares[-1] < 2e-4
    assert dist.mean_tokens == pytest.approx(130, rel=0.01)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"5": NaN}', "whole number of tokens a line"),
        ('{"5": 1e999}', "count of length 5 must be from 0 to 1,000,000,000,000, got inf"),
        ('{"5": -1}', "count of length 5 must be from 0"),
        ('{"5": 0}', "the histogram holds no samples"),
        ('{"0": 3}', "at least 1 token, got 0"),
        ('{"5": 1, "5": 2}', "JSON mapping length: count"),
        ('{"5": true}', "JSON mapping length: count"),
        ("[5.9, 7]", "a JSON list"),
        ("[true]", "a JSON list"),
        ("[10000000000]", "at most 1,000,000,000 tokens"),
        ("[" * 100_000, "a JSON list"),
    ],
)
def test_a_lengths_file_is_checked_like_lengths_in_a_job(tmp_path, content: str, message: str) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(content)
    with pytest.raises(CostModelError, match=message):
        distribution(Lengths(file=str(path)), 128)


def test_a_length_that_no_sample_has_is_left_out_of_a_file_as_of_a_job(tmp_path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text('{"5": 3, "100": 0, "7": 1}')
    counts = {5: 3.0, 100: 0.0, 7: 1.0}
    assert distribution(Lengths(file=str(path)), 128) == distribution(Lengths(histogram=counts), 128)
    assert distribution(Lengths(file=str(path)), 128).longest_tokens == 7


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
