"""What ranks wait for: the one with most tokens, against simulation."""

from __future__ import annotations

import random
from typing import Any

import pytest

from costmodel import estimate
from costmodel.answer import Estimate
from costmodel.described_job import TokensSeen
from costmodel.estimation import estimate_from_tokens
from costmodel.length_distribution import LengthDistribution, distribution
from costmodel.slowest_gpu import most_over_mean
from costmodel.specs import Lengths

JOB = {
    "model": "meta-llama/Llama-3.1-8B",
    "gpu": "A100-SXM4-80GB",
    "method": "lora",
    "dtype": "bfloat16",
    "bf16": True,
    "framework": "trl",
    "gradient_checkpointing": True,
    "per_device_train_batch_size": 1,
    "max_length": 2048,
    "lengths": {"mean": 500, "max": 2048},
}
ASSUMED_SHAPE = distribution(Lengths(mean=500, max=2048), 2048)
TWO_LENGTHS = distribution(Lengths(histogram={100: 9, 2000: 1}), 2048)
GROUP = "waiting_for_slowest_gpu"


def simulated(
    dist: LengthDistribution, longest_of: int, num_draws: int, num_ranks: int, repeats: int = 3000
) -> tuple[float, float]:
    """(tokens, pairs) of the rank with most tokens over those of the mean rank."""
    chance = random.Random(0)
    most_tokens = most_pairs = all_tokens = all_pairs = 0
    for _ in range(repeats):
        drawn = chance.choices(dist.lengths, dist.shares, k=longest_of * num_draws * num_ranks)
        rows = [max(drawn[i : i + longest_of]) for i in range(0, len(drawn), longest_of)]
        ranks = [rows[i : i + num_draws] for i in range(0, len(rows), num_draws)]
        slowest = max(ranks, key=sum)
        most_tokens += sum(slowest)
        most_pairs += sum(row * row for row in slowest)
        all_tokens += sum(rows)
        all_pairs += sum(row * row for row in rows)
    return num_ranks * most_tokens / all_tokens, num_ranks * most_pairs / all_pairs


@pytest.mark.parametrize(
    ("dist", "longest_of", "num_draws", "num_ranks"),
    [
        (ASSUMED_SHAPE, 1, 1, 2),
        (ASSUMED_SHAPE, 1, 1, 8),
        (ASSUMED_SHAPE, 4, 1, 8),
        (ASSUMED_SHAPE, 1, 4, 8),
        (ASSUMED_SHAPE, 2, 16, 2),
        (ASSUMED_SHAPE, 1, 16, 8),
        (TWO_LENGTHS, 1, 1, 4),
        (TWO_LENGTHS, 1, 16, 8),
    ],
)
def test_tokens_of_the_slowest_rank_against_simulation(
    dist: LengthDistribution, longest_of: int, num_draws: int, num_ranks: int
) -> None:
    tokens, pairs = most_over_mean(dist, longest_of, num_draws, num_ranks)
    tokens_seen, pairs_seen = simulated(dist, longest_of, num_draws, num_ranks)
    assert tokens == pytest.approx(tokens_seen, rel=0.02)
    assert pairs == pytest.approx(pairs_seen, rel=0.06)


def test_no_rank_holds_more_than_the_longest_samples() -> None:
    tokens, _ = most_over_mean(distribution(Lengths(histogram={100: 1, 101: 1}), 2048), 1, 2, 1024)
    assert 1.0 < tokens <= 101 / 100.5


def predicted(**fields: Any) -> Estimate:
    answer = estimate({**JOB, **fields})
    assert answer.step is not None
    assert answer.step_seconds is not None
    assert sum(answer.step.by_group_seconds.values()) == pytest.approx(answer.step_seconds)
    passes = answer.step.forward_seconds + answer.step.backward_seconds + answer.step.optimizer_seconds
    assert passes == pytest.approx(answer.step_seconds)
    return answer


def waited(**fields: Any) -> float:
    """Seconds of a step that wait for the slowest GPU."""
    answer = predicted(**fields)
    assert answer.step is not None
    return answer.step.by_group_seconds.get(GROUP, 0.0)


def test_a_step_of_several_gpus_lasts_as_long_as_its_longest_batch() -> None:
    one, two, eight = (predicted(per_device_train_batch_size=4, num_gpus=n) for n in (1, 2, 8))
    assert one.step is not None
    assert GROUP not in one.step.by_group_seconds
    # bound by the device, so nearly as the tokens: 1.19 and 1.60 times
    assert two.step_seconds == pytest.approx(1.19 * one.step_seconds, rel=0.04)
    assert eight.step_seconds == pytest.approx(1.60 * one.step_seconds, rel=0.04)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_gpus": 1},
        {"lengths": {"fixed": 500}},
        {"padding": "max_length"},
        {"train_sampling_strategy": "group_by_length"},
        {"packing": True, "attn_implementation": "flash_attention_2"},
    ],
)
def test_nobody_waits_where_batches_are_alike(fields: dict[str, Any]) -> None:
    assert waited(**{"num_gpus": 8, **fields}) == 0.0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, True),
        ({"num_gpus": 1}, False),
        ({"padding": "max_length"}, False),
        ({"lengths": {"mean": 500, "max": 2048}}, False),
    ],
)
def test_a_wait_that_is_not_known_is_said(fields: dict[str, Any], says: bool) -> None:
    """A run's own tokens give the mean of a step and no spread: without lengths nobody waits in the figures."""
    job = {key: value for key, value in JOB.items() if key != "lengths"} | {"num_gpus": 8, **fields}
    answer = estimate_from_tokens(job, TokensSeen(1, 500, 500, 500 * 500, 2048))
    assert answer.step is not None
    assert ("lengths" in fields) is (answer.step.by_group_seconds.get(GROUP, 0.0) > 0)
    assert any("no wait of 8 GPUs for the one with most tokens" in each for each in answer.warnings) is says


def test_accumulated_batches_even_out_unless_the_ranks_meet_in_each() -> None:
    accumulated = {"num_gpus": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 16}
    plain, first = waited(**accumulated), waited(**accumulated, deepspeed={"zero_optimization": {"stage": 1}})
    sharded = waited(**accumulated, fsdp="full_shard")
    assert first == pytest.approx(plain, rel=0.02)
    assert sharded > 3 * plain


def test_flattened_batches_of_more_samples_differ_less() -> None:
    flattened = {"num_gpus": 8, "padding_free": True, "attn_implementation": "flash_attention_2"}
    few, many = (
        waited(**flattened, per_device_train_batch_size=size)
        / predicted(**flattened, per_device_train_batch_size=size).step_seconds
        for size in (2, 16)
    )
    assert 0.0 < many < few


def test_an_evaluation_waits_too() -> None:
    evaluated = {"num_samples": 8000, "num_train_epochs": 1, "eval_strategy": "epoch", "num_eval_samples": 8000}
    one, eight = (predicted(**evaluated, num_gpus=n).eval_seconds for n in (1, 8))
    assert one is not None
    assert eight is not None
    assert eight > 1.2 * one / 8
