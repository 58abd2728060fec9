"""The tokens of steps still to come, known beforehand where data set and order are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import listed_rows, pad_right, tiny_llama, tiny_trainer
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from transformers import TrainerCallback

from ftcost_callback import FTCostCallback
from ftcost_callback.planned_tokens import PlannedTokens, planned_tokens
from ftcost_callback.run_file import read_run

ROWS = [{"input_ids": [1] * length} for length in (5, 3, 8, 2, 9, 4, 1)]


def loader_of(sampler: Any, *, batch_size: int = 2, drop_last: bool = False, rows: Any = ROWS) -> Any:
    return DataLoader(rows, batch_sampler=BatchSampler(sampler, batch_size, drop_last), collate_fn=list)


def planned(loader: Any, **changes: Any) -> PlannedTokens | None:
    return planned_tokens(loader, **({"accumulation": 1, "max_steps": 8, "num_processes": 1} | changes))


@pytest.mark.parametrize(
    ("drop_last", "accumulation", "padded", "flat"),
    [
        (False, 1, [10, 16, 18, 1] * 2, [8, 10, 13, 1] * 2),
        (True, 1, [10, 16, 18] * 3, [8, 10, 13] * 3),
        (False, 3, [10 + 16 + 18, 1] * 4, [8 + 10 + 13, 1] * 4),  # the shorter last group is a step of its own
    ],
)
def test_each_step_of_each_epoch(drop_last: bool, accumulation: int, padded: list[int], flat: list[int]) -> None:
    for tokens in (padded, flat):
        plan = planned(loader_of(SequentialSampler(ROWS), drop_last=drop_last), accumulation=accumulation)
        assert plan is not None
        assert plan.mean_to_come(0, 8) is None  # nothing seen yet says which law it is
        for step in range(1, 8):
            plan.seen(step, tokens[step - 1])
            if step >= 4:  # each row has been seen
                assert plan.mean_to_come(step, 8) == (sum(tokens[step:8]) / (8 - step), 0)
        assert plan.mean_to_come(8, 8) is None


@pytest.mark.parametrize("wrong", [7, None])
def test_one_step_with_other_tokens_ends_the_certainty(wrong: int | None) -> None:
    plan = planned(loader_of(SequentialSampler(ROWS)))
    assert plan is not None
    for step, tokens in enumerate((10, 16, 18, 1), start=1):
        plan.seen(step, tokens)
    assert plan.mean_to_come(4, 8) == ((10 + 16 + 18 + 1) / 4, 0)
    plan.seen(5, wrong)
    plan.seen(6, 16)
    assert plan.mean_to_come(6, 8) is None


def of_lengths(lengths: Sequence[int], *, max_length: int | None = None, rows: int = 2) -> PlannedTokens:
    """One epoch in the data set's order, each step a micro-batch of ``rows``."""
    return PlannedTokens(lengths, range(0, len(lengths) + 1, rows), rows, max_length=max_length)


def told(plan: PlannedTokens, tokens: Sequence[int]) -> list[tuple[float, float] | None]:
    """What is said after each step but the last."""
    says = []
    for step, of_step in enumerate(tokens[:-1], start=1):
        plan.seen(step, of_step)
        says.append(plan.mean_to_come(step, len(tokens)))
    return says


def padded(lengths: Sequence[int], *, at_most: int = 10**9, multiple: int = 1, at_least: int = 0) -> list[int]:
    longest = [min(max(pair), at_most) for pair in zip(lengths[::2], lengths[1::2], strict=True)]
    return [2 * max(at_least, -(-each // multiple) * multiple) for each in longest]


COLLATORS: list[Any] = [
    pytest.param([4] * 20 + [60] * 80, {"at_most": 16}, id="cuts the long rows at the end"),
    pytest.param([4] * 8 + [40] * 8, {"at_most": 16}, id="cuts, a short run"),
    pytest.param([4] * 60 + [100] * 100, {"at_most": 16}, id="cuts after many steps"),
    pytest.param([8, 16, 8, 16, 9, 17, 3, 5] * 2, {"multiple": 8}, id="pads to a multiple that the first rows are"),
    pytest.param([64, 128, 32, 96, 16, 80] + [9, 5] * 20, {"multiple": 16}, id="pads to 16"),
    pytest.param([100] * 20 + [7] * 60, {"at_least": 100}, id="pads all to the longest, which comes first"),
    pytest.param([100] * 20 + [7] * 60, {}, id="pads to the batch's longest, short ones last"),
    pytest.param([4] * 80 + [100] * 80, {}, id="cuts nothing, long ones last"),
    pytest.param([8] * 22 + [30] * 2, {}, id="one long row"),
    pytest.param([30 + 7 * place % 41 for place in range(200)], {"at_most": 69}, id="cuts a few"),
]


@pytest.mark.parametrize(("lengths", "collator"), COLLATORS)
def test_what_is_said_holds_whatever_the_collator_does(lengths: list[int], collator: dict[str, int]) -> None:
    tokens = padded(lengths, **collator)
    for step, says in enumerate(told(of_lengths(lengths), tokens), start=1):
        if says is not None:
            mean, off = says
            assert abs(mean - sum(tokens[step:]) / (len(tokens) - step)) <= off + 1e-9
            assert off <= 0.1 * mean


def test_nothing_is_said_of_rows_longer_or_shorter_than_those_seen() -> None:
    for lengths in ([4] * 20 + [60] * 80, [100] * 20 + [7] * 80):
        assert told(of_lengths(lengths), padded(lengths))[:10] == [None] * 10


def test_once_the_longest_and_the_shortest_were_seen_the_rest_is_certain() -> None:
    lengths = [4, 5, 60, 3, 9, 8] + [4, 20] * 30
    tokens = padded(lengths)
    says = told(of_lengths(lengths), tokens)
    assert says[:2] == [None, None]
    assert says[2:] == [(sum(tokens[step:]) / (33 - step), 0) for step in range(3, 33)]


def test_a_known_max_length_is_a_part_of_the_law() -> None:
    """As ``FTCostMonitor(max_length=16)`` says, over a collator that cuts there."""
    lengths = [4, 3] * 10 + [60] * 80
    tokens = padded(lengths, at_most=16)
    says = told(of_lengths(lengths, max_length=16), tokens)
    assert says[2:] == [(sum(tokens[step:]) / (50 - step), 0) for step in range(3, 50)]


def test_even_lengths_leave_a_small_range() -> None:
    """Padding to a multiple of 2 would give the same tokens so far, and hardly others."""
    lengths = [100, 40, 160, 20, 300, 300, 18, 16] + [101, 99] * 20
    tokens = padded(lengths)
    says = told(of_lengths(lengths), tokens)
    assert says[3] == (pytest.approx(202), pytest.approx(2))  # 102 in place of 101
    assert says[4] == (pytest.approx(202), 0)


def test_accelerates_order_is_drawn_beside_it_and_no_random_state_moves() -> None:
    from accelerate.data_loader import SeedableRandomSampler

    sampler = SeedableRandomSampler(ROWS, data_seed=11)
    before = torch.get_rng_state()
    plan = planned(loader_of(sampler), max_steps=8)
    assert torch.equal(torch.get_rng_state(), before)
    assert plan is not None
    orders = [list(sampler), list(sampler)]  # each epoch has its own
    assert orders[0] != orders[1]
    lengths = [[len(ROWS[row]["input_ids"]) for row in order] for order in orders]
    tokens = [len(each) * max(each) for order in lengths for each in (order[0:2], order[2:4], order[4:6], order[6:])]
    for step in range(1, 5):
        plan.seen(step, tokens[step - 1])
    assert plan.mean_to_come(4, 8) == (sum(tokens[4:]) / 4, pytest.approx(0, abs=1))


class Described(list[Any]):
    """A list whose rows are no mappings."""


@pytest.mark.parametrize(
    ("loader", "changes"),
    [
        pytest.param(loader_of(RandomSampler(ROWS)), {}, id="an order that nobody knows"),
        pytest.param(loader_of(SequentialSampler(ROWS)), {"num_processes": 2}, id="several processes"),
        pytest.param(loader_of(SequentialSampler(ROWS)), {"max_steps": None}, id="no end"),
        pytest.param(loader_of(SequentialSampler(ROWS)), {"max_steps": 2_000_000}, id="too many rows"),
        pytest.param(loader_of(SequentialSampler([1, 2]), rows=Described([1, 2])), {}, id="rows that are not read"),
        pytest.param(loader_of(SequentialSampler(ROWS[:1]), drop_last=True, rows=ROWS[:1]), {}, id="no batch"),
        pytest.param(None, {}, id="no loader"),
    ],
)
def test_what_is_not_known_is_not_guessed(loader: Any, changes: dict[str, Any]) -> None:
    assert planned(loader, **changes) is None


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_trainers_steps_are_foreseen(tmp_path: Path, accumulation: int) -> None:
    """Shuffled, over two epochs and more, stopped and resumed: after each step, what is still to come was known."""

    def trained(max_steps: int, **resume: Any) -> Any:
        measuring = FTCostCallback(sinks=[], predict=False)
        seen: list[tuple[int, tuple[float, float] | None]] = []
        trainer = tiny_trainer(
            tmp_path, [measuring], model=tiny_llama(), train_dataset=listed_rows(), data_collator=pad_right,
            max_steps=8, logging_steps=1, save_strategy="steps", save_steps=3, gradient_accumulation_steps=accumulation,
        )  # fmt: skip

        class Ask(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                plan = measuring._run._report._opened.planned_tokens  # type: ignore[union-attr]
                seen.append((state.global_step, plan.mean_to_come(state.global_step, 8)))
                control.should_training_stop |= state.global_step == max_steps

        trainer.add_callback(Ask())
        trainer.train(**resume)
        return seen

    first = trained(4)
    second = trained(8, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    last: dict[int, int] = {step.global_step: step.num_tokens or 0 for step in read_run(tmp_path).steps}
    assert sorted(last) == list(range(1, 9))
    said = [(step, says) for step, says in first + second if step < 8]
    assert [step for step, says in said if says is not None]  # once enough has been seen
    for step, says in said:
        if says is not None:
            mean, off = says
            assert abs(mean - sum(last[each] for each in range(step + 1, 9)) / (8 - step)) <= off + 1e-9
