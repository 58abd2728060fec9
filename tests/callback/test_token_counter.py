"""Token counts of real model forwards, against counts done by hand."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tiny_runs import LENGTHS, TokenRows, pad_right, tiny_llama

from ftcost_callback.forward_window import ForwardWindow, TrainingForward
from ftcost_callback.records import TokenCounts
from ftcost_callback.token_counter import TokenCounter, label_rule


def counter_on(model: Any, **options: Any) -> tuple[TokenCounter, ForwardWindow]:
    counter = TokenCounter(label_rule(model), **options)
    window = ForwardWindow(counter.open_forward, lambda: None)
    window.attach(model)
    return counter, window


def batch(*places: int) -> dict[str, Any]:
    rows = TokenRows()
    return pad_right([rows[place] for place in places])


def counted(forward: dict[str, Any], rule: Any = "shifted", **options: Any) -> TokenCounts:
    counter = TokenCounter(rule, **options)
    counter.open_forward(TrainingForward(forward))
    return counter.take_step().read()


def test_two_samples_of_10_and_90_tokens() -> None:
    ids = torch.ones(2, 90, dtype=torch.long)
    mask = torch.ones(2, 90, dtype=torch.long)
    mask[0, 10:] = 0
    labels = torch.full((2, 90), -100)
    labels[0, 2:10] = 5
    labels[1, 50:] = 5
    assert counted({"input_ids": ids, "attention_mask": mask, "labels": labels}) == TokenCounts(
        num_tokens=180,
        num_non_padding_tokens=100,
        num_supervised_tokens=48,
        num_samples=2,
        longest_sequence_tokens=90,
        sum_squared_sequence_tokens=2.0 * 90 * 90,
    )


def test_the_micro_batches_of_an_accumulated_step_add_up() -> None:
    model = tiny_llama()
    counter, _ = counter_on(model)
    for places in ((0, 1), (2, 3)):
        model(**batch(*places)).loss.backward()
    counts = counter.take_step().read()
    assert counts.num_tokens == 2 * 9 + 2 * 12
    assert counts.num_non_padding_tokens == sum(LENGTHS[:4])
    assert counts.num_supervised_tokens == sum(length - 2 for length in LENGTHS[:4])
    assert (counts.num_samples, counts.longest_sequence_tokens) == (4, 12)
    assert counter.take_step().read() == TokenCounts()


def test_a_micro_batch_with_a_mask_and_one_without_add_up() -> None:
    ids, mask = torch.ones(2, 5, dtype=torch.long), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    for with_mask_first in (True, False):
        counter, _ = counter_on(model := tiny_llama())
        for with_mask in (with_mask_first, not with_mask_first, with_mask_first):
            masked = {"attention_mask": mask} if with_mask else {}
            model(input_ids=ids, labels=ids, **masked).loss.backward()
        counts = counter.take_step().read()
        assert counts.num_non_padding_tokens == (7 + 10 + 7 if with_mask_first else 10 + 7 + 10)
        assert (counts.num_tokens, counts.num_supervised_tokens) == (30, 24)


def test_what_is_written_over_a_batch_later_does_not_change_its_count() -> None:
    """Counts are read some steps later, when a loader may have filled the same memory again."""
    model = tiny_llama()
    counter, _ = counter_on(model)
    given = batch(0, 1)
    model(**given).loss.backward()
    pending = counter.take_step()
    given["labels"].fill_(-100)
    given["attention_mask"].fill_(0)
    counts = pending.read()
    assert counts.num_non_padding_tokens == sum(LENGTHS[:2])
    assert counts.num_supervised_tokens == sum(length - 2 for length in LENGTHS[:2])


def test_evaluation_and_second_passes_without_gradients_are_not_training() -> None:
    model = tiny_llama()
    counter, _ = counter_on(model)
    model(**batch(0, 1))
    with torch.no_grad():
        model(**batch(2, 3))  # TRL's second pass with label smoothing: in training mode, without gradients
    model.eval()
    model(**batch(4, 5))
    assert counter.take_step().read().num_non_padding_tokens == sum(LENGTHS[:2])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_counts_once(use_reentrant: bool) -> None:
    model = tiny_llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.train()
    counter, _ = counter_on(model)
    model(**batch(0, 1)).loss.backward()
    assert counter.take_step().read().num_tokens == 18


def test_labels_that_never_reach_the_model_are_taken_from_the_trainers_count() -> None:
    forward = {"input_ids": torch.ones(2, 8, dtype=torch.long), "num_items_in_batch": torch.tensor(9)}
    counter = TokenCounter("shifted")
    for _ in range(2):  # the same number, of the whole step, comes with each micro-batch
        counter.open_forward(TrainingForward(forward))
    assert counter.take_step().read().num_supervised_tokens == 9
    # With several processes that number is summed over all of them.
    assert counted(forward, use_num_items_in_batch=False).num_supervised_tokens is None
    # And without it the count is unknown, not zero.
    assert counted({"input_ids": forward["input_ids"]}).num_supervised_tokens is None


def test_a_padding_free_batch_shows_samples_lengths_and_trailing_padding() -> None:
    # Three samples of 3, 2 and 4 tokens, filled up with zeros to 12.
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 0, 0]])
    labels = torch.where(positions == 0, -100, 7)
    counts = counted({"input_ids": torch.ones(1, 12, dtype=torch.long), "position_ids": positions, "labels": labels})
    assert counts == TokenCounts(
        num_tokens=12,
        num_non_padding_tokens=9,
        num_supervised_tokens=6,
        num_samples=3,
        longest_sequence_tokens=4,
        sum_squared_sequence_tokens=9.0 + 4.0 + 16.0,
    )


@pytest.mark.parametrize("mask", [torch.zeros(2, 1, 4, 4), {"full_attention": torch.zeros(2, 1, 4, 4)}, torch.ones(2, 7)])
def test_a_mask_of_another_shape_says_nothing_about_padding(mask: Any) -> None:
    counts = counted({"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": mask})
    assert (counts.num_tokens, counts.num_samples, counts.num_non_padding_tokens) == (8, 2, None)


def test_positional_arguments_are_known_by_their_names() -> None:
    """The mask as the second one: padding is no token, also of a wrapper that passes on whatever it is given."""

    class Wrapper(torch.nn.Module):
        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    model, given = tiny_llama(), batch(0, 3)
    for outer in (model, Wrapper(model)):
        counter, window = counter_on(outer)
        outer(given["input_ids"], given["attention_mask"], labels=given["labels"])
        counts = counter.take_step().read()
        window.detach()
        assert counts.num_non_padding_tokens == LENGTHS[0] + LENGTHS[3] < counts.num_tokens
        assert counts.num_supervised_tokens == int((given["labels"][:, 1:] != -100).sum())


def test_what_is_traced_or_transformed_is_no_training_forward() -> None:
    """An exported program holds nothing of ours either."""
    model, ids = tiny_llama(), torch.ones(1, 4, dtype=torch.long)
    counter, _ = counter_on(model)
    weights = {name: each.detach() for name, each in model.named_parameters()}

    def loss(weights: Any, ids: Any) -> Any:
        return torch.func.functional_call(model, weights, (ids[None],), {"labels": ids[None]}).loss

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, ids.repeat(2, 1))
    assert gradients.keys() == weights.keys()
    torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
    assert counter.num_forwards == 0
    model(**batch(0))
    assert counter.take_step().read().num_tokens == LENGTHS[0]


def test_a_model_without_token_ids_counts_samples_only() -> None:
    assert counted({"pixel_values": torch.zeros(3, 3, 8, 8), "labels": torch.zeros(3, dtype=torch.long)}) == TokenCounts(
        num_samples=3
    )


def test_embeddings_in_place_of_ids() -> None:
    assert counted({"inputs_embeds": torch.zeros(2, 5, 32)}).num_tokens == 10


def test_an_encoder_decoder_computes_what_the_decoder_reads_too() -> None:
    class Config:
        is_encoder_decoder = True

    class Model(torch.nn.Module):
        config = Config()

    assert label_rule(Model()) == "decoder"
    assert label_rule(tiny_llama()) == "shifted"
    forward = {
        "input_ids": torch.ones(2, 4, dtype=torch.long),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
        "labels": torch.tensor([[4, 5, -100], [4, 5, 6]]),
    }
    assert counted(forward, "decoder") == TokenCounts(
        num_tokens=8 + 6,
        num_non_padding_tokens=7 + 5,
        num_supervised_tokens=5,
        num_samples=2,
        longest_sequence_tokens=4,
        sum_squared_sequence_tokens=2 * 16 + 2 * 9,
    )
    given = {name: value for name, value in forward.items() if name != "labels"}  # label smoothing takes the labels
    decoder = {"decoder_input_ids": torch.ones(2, 5, dtype=torch.long)}
    shown = counted({**given, **decoder}, "decoder")
    assert (shown.num_tokens, shown.num_non_padding_tokens, shown.longest_sequence_tokens) == (8 + 10, None, 5)
    assert counted(given, "decoder").num_tokens is None


def test_labels_of_a_masked_model_are_not_shifted() -> None:
    labels = torch.tensor([[4, 5, -100]])
    assert counted({"input_ids": torch.ones(1, 3, dtype=torch.long), "labels": labels}, "as_is").num_supervised_tokens == 2


def test_labels_that_are_shifted_already() -> None:
    forward = {"input_ids": torch.ones(1, 3, dtype=torch.long), "shift_labels": torch.tensor([[4, 5, -100]])}
    assert counted(forward).num_supervised_tokens == 2


def test_token_ids_given_by_position() -> None:
    model = tiny_llama()
    counter, _ = counter_on(model)
    model(torch.ones(2, 6, dtype=torch.long))
    assert counter.take_step().read().num_tokens == 12


def test_a_forward_that_fails_closes_its_window() -> None:
    model = tiny_llama()
    _, window = counter_on(model)
    with pytest.raises((RuntimeError, IndexError)):
        model(input_ids=torch.full((1, 3), 10**6))
    assert not window.is_open


def test_a_copy_of_the_model_does_not_count() -> None:
    model = tiny_llama()
    counter, window = counter_on(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.train()
        twin(**batch(0, 1))
    assert counter.take_step().read() == TokenCounts()
    window.detach()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_pickled_hook_needs_nothing_of_ours_to_load() -> None:
    model = tiny_llama()
    counter_on(model)
    assert b"ftcost" not in pickle.dumps(next(iter(model._forward_pre_hooks.values())))
    assert b"ftcost" not in pickle.dumps(next(iter(model._forward_hooks.values())))
