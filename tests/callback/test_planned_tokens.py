"""The tokens of steps still to come, known beforehand where data set and order are."""

from __future__ import annotations

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
            if step >= 4:  # the fourth step tells the laws apart where its batch has but one row, at the latest
                assert plan.mean_to_come(step, 8) == sum(tokens[step:8]) / (8 - step)
        assert plan.mean_to_come(8, 8) is None


@pytest.mark.parametrize("wrong", [7, None])
def test_one_step_with_other_tokens_ends_the_certainty(wrong: int | None) -> None:
    plan = planned(loader_of(SequentialSampler(ROWS)))
    assert plan is not None
    plan.seen(1, 10)
    assert plan.mean_to_come(1, 8) == (16 + 18 + 1 + 10 + 16 + 18 + 1) / 7
    plan.seen(2, wrong)
    plan.seen(3, 18)
    assert plan.mean_to_come(3, 8) is None


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
    assert plan.mean_to_come(4, 8) == sum(tokens[4:]) / 4


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
        seen: list[tuple[int, float | None]] = []
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
    told = [(step, mean) for step, mean in first + second if step < 8]
    assert all(mean is not None for _, mean in told[1:])
    for step, mean in told:
        if mean is not None:
            assert mean == sum(last[each] for each in range(step + 1, 9)) / (8 - step)
