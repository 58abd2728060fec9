"""A method that is wrapped on a user's object: he gets back what he had, and a copy of the object has none of ours."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import listed_rows, pad_right, tiny_llama, tiny_trainer
from transformers import TrainerCallback

from ftcost_callback import FTCostCallback
from ftcost_callback.process_run import EPOCH
from ftcost_callback.rollouts import METHOD
from ftcost_callback.wrapped_method import WrappedMethod


class Counting:
    def __init__(self) -> None:
        self.count = 0

    def more(self, by: int) -> int:
        """Adds."""
        self.count += by
        return self.count


def wrapping(seen: list[int]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(by: int) -> Any:
            seen.append(by)
            return method(by)

        return wrapped

    return wrap


def test_the_method_is_wrapped_and_put_back() -> None:
    counting, seen = Counting(), list[int]()
    method = WrappedMethod(counting, "more", wrapping(seen))
    assert counting.more(2) == 2
    assert counting.more.__doc__ == "Adds."
    method.undo()
    method.undo()
    assert counting.more(1) == 3
    assert seen == [2]
    assert vars(counting) == {"count": 3}


def test_what_the_user_had_put_on_the_object_is_put_back() -> None:
    counting, seen = Counting(), list[int]()
    mine = lambda by: -by  # noqa: E731
    counting.more = mine  # type: ignore[method-assign]
    method = WrappedMethod(counting, "more", wrapping(seen))
    assert counting.more(2) == -2
    method.undo()
    assert counting.more is mine
    assert seen == [2]


def test_what_another_has_put_there_since_stays() -> None:
    counting = Counting()
    method = WrappedMethod(counting, "more", wrapping([]))
    theirs = lambda by: 7  # noqa: E731
    counting.more = theirs  # type: ignore[method-assign]
    method.undo()
    assert counting.more is theirs


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_calls_its_own_method(copied: Callable[[Counting], Counting]) -> None:
    counting, seen = Counting(), list[int]()
    method = WrappedMethod(counting, "more", wrapping(seen))
    twin = copied(counting)
    assert twin.more(5) == 5
    assert (twin.count, counting.count, seen) == (5, 0, [])
    method.undo()
    assert twin.more(1) == 6


@pytest.mark.parametrize("name", [EPOCH, METHOD])
def test_a_trainers_own_method_survives_its_training(tmp_path: Path, name: str) -> None:
    trainer = tiny_trainer(
        tmp_path, [FTCostCallback(sinks=[], predict=False)], model=tiny_llama(), train_dataset=listed_rows(),
        data_collator=pad_right, max_steps=2,
    )  # fmt: skip
    calls = []

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return type(trainer)._run_epoch(trainer, *args, **kwargs)

    setattr(trainer, name, mine)
    for count in (1, 2):
        trainer.train()
        assert vars(trainer)[name] is mine
        assert len(calls) == (count if name == EPOCH else 0)


def test_a_copy_of_a_trainer_in_training_trains_itself(tmp_path: Path) -> None:
    copies: list[Any] = []

    class Copies(TrainerCallback):
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return self

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not copies:
                copies.append(copy.deepcopy(trainer))

    trainer = tiny_trainer(
        tmp_path, [Copies(), FTCostCallback(sinks=[], predict=False)], model=tiny_llama(), train_dataset=listed_rows(),
        data_collator=pad_right, max_steps=2,
    )  # fmt: skip
    trainer.train()
    twin, trained = copies[0], []
    for each in (trainer, twin):
        step = each.training_step
        each.training_step = functools.partial(lambda who, step, *args: (trained.append(who), step(*args))[1], each, step)
    twin.train()
    assert trained == [twin, twin]
