"""Every family of mixtures of experts in the installed transformers: two training steps of a tiny random model, whose
counts must be those of a reference that knows nothing of our hooks, or the reason why there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_families import (
    CHOOSES_BY_CHANCE,
    FAMILIES,
    batch_of,
    called,
    counts_of,
    folders_with_experts,
    loss_of,
    reference_of,
    tiny_model,
)
from tiny_runs import LENGTHS, TokenRows, pad_right
from torch import nn

from ftcost_callback import FTCostCallback
from ftcost_callback.expert_load import ExpertLoadCounter
from ftcost_callback.forward_window import ForwardWindow
from ftcost_callback.records import ExpertLoad
from ftcost_callback.run_file import read_run

NOT_RECORDED = {
    "nllb_moe": "NllbMoeExperts does not run the experts that its router chose, so the router's choice is no load",
}


def test_every_folder_with_experts_is_tried() -> None:
    assert folders_with_experts() == sorted(FAMILIES)
    assert len(FAMILIES) - len(NOT_RECORDED) >= 70


@pytest.mark.slow
def test_sites_stand_in_the_order_in_which_a_forward_comes_to_them() -> None:
    """A compiled graph does not say which site calls."""
    for folder in FAMILIES:
        model = tiny_model(folder)
        counter = ExpertLoadCounter()
        counter.attach(model)
        called_places: list[int] = []
        counter.seen = lambda shown, place, called_places=called_places: called_places.append(place)  # type: ignore[method-assign]
        ForwardWindow(counter.open_forward, counter.close_forward).attach(model)
        model.train()
        model(**batch_of(folder, model, seed=1).inputs)
        assert called_places == sorted(called_places), folder


def two_steps(folder: str, model: Any) -> list[tuple[ExpertLoad | None, dict[str, list[int]]]]:
    """What was recorded and what the experts were really given, of two steps between which the weights change."""
    counter = ExpertLoadCounter()
    counter.attach(model)
    ForwardWindow(counter.open_forward, counter.close_forward).attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    steps = []
    for step in (1, 2):
        batch = batch_of(folder, model, step)
        if folder in CHOOSES_BY_CHANCE:
            with reference_of(folder, model) as reference:
                output = model(**batch.inputs)
            expected = called(reference)
        else:
            expected = counts_of(folder, model, batch.rows) if folder not in NOT_RECORDED else {}
            output = model(**batch.inputs)
        loss_of(output).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append((counter.take(step, num_non_padding_tokens=batch.num_non_padding_tokens), expected))
    return steps


SHOWN_DIFFERENTLY = {
    "doge", "ernie4_5_vl_moe", "inkling", "jetmoe", "llama4", "longcat_flash", "mixtral", "nllb_moe", "switch_transformers",
    "zaya",
}  # fmt: skip
"""Those that the quick tests try; the others are read in one and the same way."""


@pytest.mark.parametrize(
    "folder",
    [pytest.param(folder, marks=() if folder in SHOWN_DIFFERENTLY else pytest.mark.slow) for folder in sorted(FAMILIES)],
)
def test_the_load_is_what_the_experts_were_given(folder: str) -> None:
    family = FAMILIES[folder]
    for load, expected in two_steps(folder, tiny_model(folder)):
        assert load is not None
        if folder in NOT_RECORDED:
            assert (load.status, load.reason, load.tokens_per_expert) == ("not_recorded", NOT_RECORDED[folder], [])
            continue
        counted = dict(zip(load.layer_names, load.tokens_per_expert, strict=True))
        assert {name: tokens for name, tokens in counted.items() if sum(tokens)} == expected
        assert len(expected) == family.num_sites
        assert load.num_experts_per_tok == family.top_k
        assert load.status == ("partial" if family.doubt else "recorded"), load.reason
        assert (load.reason or "").startswith(family.doubt)
        if not family.doubt:
            assert load.reason is None


# --- what is done differently in some families ------------------------------------------------------------------------


def counted(folder: str, model: Any, *, num_forwards: int = 1) -> ExpertLoad:
    """The load of a training forward and backward."""
    counter = ExpertLoadCounter()
    counter.attach(model)
    ForwardWindow(counter.open_forward, counter.close_forward).attach(model)
    batch = batch_of(folder, model, seed=1)
    for _ in range(num_forwards):
        loss_of(model(**batch.inputs)).backward()
    load = counter.take(1, num_non_padding_tokens=num_forwards * batch.num_non_padding_tokens)
    assert load is not None
    counter.detach()
    return load


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("folder", ["llama4", "switch_transformers", "doge", "zaya", "inkling2_loop"])
def test_recomputation_counts_each_token_once(folder: str, use_reentrant: bool) -> None:
    model = tiny_model(folder)
    without = counted(folder, model)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    load = counted(folder, model)
    assert load.status == "recorded"
    assert load.tokens_per_expert == without.tokens_per_expert


def test_layers_that_run_several_times_in_a_forward_have_as_many_times_the_tokens() -> None:
    loop = {"loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_num_passes": 3, "n_layers_per_attn_res_block": 1}
    model = tiny_model("inkling2_loop", **loop)
    load = counted("inkling2_loop", model)
    assert (load.status, load.reason) == ("recorded", None)
    assert [sum(layer) for layer in load.tokens_per_expert] == [14 * 2, 3 * 14 * 2]


def test_tokens_over_an_experts_capacity_are_dropped_by_the_model_and_said() -> None:
    model = tiny_model("switch_transformers", expert_capacity=1)  # of each sequence
    batch = batch_of("switch_transformers", model, seed=1)
    expected = counts_of("switch_transformers", model, batch.rows)
    load = counted("switch_transformers", model)
    counts = dict(zip(load.layer_names, load.tokens_per_expert, strict=True))
    assert counts == expected
    dropped = 3 * 14 - sum(map(sum, load.tokens_per_expert))
    assert dropped > 0
    assert (load.status, load.reason) == (
        "recorded", f"{dropped} choices were over an expert's capacity and dropped by the model",
    )  # fmt: skip


@pytest.mark.slow
def test_encoder_and_decoder_in_a_real_trainer_that_generates_in_its_evaluation(tmp_path: Path) -> None:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=4, logging_steps=2, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, eval_strategy="steps", eval_steps=2, predict_with_generate=True,
        generation_max_length=5, train_sampling_strategy="sequential",
    )  # fmt: skip
    rows = TokenRows()
    Seq2SeqTrainer(
        model=tiny_model("switch_transformers"), args=arguments, train_dataset=rows, eval_dataset=rows,
        data_collator=pad_right, callbacks=[FTCostCallback(sinks=[])],
    ).train()  # fmt: skip
    loads = read_run(tmp_path).expert_loads
    assert {(load.status, load.reason) for load in loads} == {("recorded", None)}
    for load, lengths in zip(loads, (LENGTHS[:4], LENGTHS[4:8]), strict=True):
        of_encoder, of_decoder = sum(lengths), sum(length - 2 for length in lengths)  # the first two labels are left out
        assert [sum(layer) for layer in load.tokens_per_expert] == [of_encoder, of_encoder, of_decoder]


def test_the_experts_of_nllb_do_not_run_as_their_router_chose() -> None:
    """The reason given: only experts 0 and 1 are ever given rows, whatever is chosen."""
    model = tiny_model("nllb_moe", encoder_sparse_step=1, decoder_sparse_step=1)
    chosen: set[int] = set()
    ran: set[int] = set()
    for module in model.modules():
        if type(module).__name__ == "NllbMoeTop2Router":
            module.register_forward_hook(lambda _, args, output: chosen.update(output[0].nonzero()[:, -1].tolist()))
        if type(module).__name__ == "NllbMoeExperts":
            for name, expert in module.items():
                if not name.startswith("expert_"):
                    continue
                number = int(name.rpartition("_")[2])
                expert.register_forward_hook(lambda _, args, output, number=number: ran.add(number))
    model(**batch_of("nllb_moe", model, seed=1).inputs)
    assert ran == {0, 1}
    assert chosen - ran


def test_a_decoder_whose_tokens_are_counted_nowhere_else_is_partial() -> None:
    model = tiny_model("diffusion_gemma")
    counter = ExpertLoadCounter()
    counter.attach(model)
    ForwardWindow(counter.open_forward, counter.close_forward).attach(model)
    batch = batch_of("diffusion_gemma", model, seed=1)
    model(**batch.inputs)
    load = counter.take(1, num_non_padding_tokens=18)  # input_ids
    assert load is not None
    assert (load.status, load.reason) == ("partial", "the layers of encoder and decoder do not sum to tokens x top-k = 36")
    assert [sum(layer) for layer in load.tokens_per_expert] == [36, 36, 32, 32]


def test_a_token_that_skips_the_experts_is_none_of_the_first_experts() -> None:
    model = tiny_model("zaya")
    for name, buffer in model.named_buffers():
        if name.endswith("balancing_biases"):
            buffer[-1] = 2.0  # so every token skips
    assert counted("zaya", model).tokens_per_expert == [[0, 0, 0, 0, 14]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["llama4", "jetmoe", "zaya", "switch_transformers"])
def test_a_choice_inside_a_compiled_graph_is_counted_and_disturbs_nothing(folder: str) -> None:
    """The counts of the reference, no further break of the graph, and the user's gradients to the last bit."""
    small = {"num_layers": 1, "num_decoder_layers": 1, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}

    def trained(*, measured: bool) -> tuple[int, list[torch.Tensor], ExpertLoad | None, dict[str, list[int]]]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = tiny_model(folder, **(small if folder == "switch_transformers" else {}))
        batch = batch_of(folder, model, seed=1)
        expected = counts_of(folder, model, batch.rows)
        counter = ExpertLoadCounter()
        if measured:
            counter.attach(model)
            ForwardWindow(counter.open_forward, counter.close_forward).attach(model)
        loss_of(torch.compile(model, backend="aot_eager")(**batch.inputs)).backward()
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        torch._dynamo.reset()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return breaks, gradients, counter.take(1, num_non_padding_tokens=batch.num_non_padding_tokens), expected

    breaks, gradients, load, expected = trained(measured=True)
    breaks_alone, gradients_alone, *_ = trained(measured=False)
    assert load is not None
    assert (load.status, load.reason) == ("recorded", None)
    counted_tokens = dict(zip(load.layer_names, load.tokens_per_expert, strict=True))
    assert {name: tokens for name, tokens in counted_tokens.items() if sum(tokens)} == expected
    assert breaks == breaks_alone
    assert breaks == 0 or folder != "llama4"  # the others break their own graph
    assert len(gradients) == len(gradients_alone) > 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, gradients_alone, strict=True))


# --- blocks with a module for each expert, as in transformers 4 -------------------------------------------------------


class ListBlock(nn.Module):
    """``scores`` for the choice: the gate's own, or others. ``returns_choice``: the gate gives the experts themselves."""

    def __init__(self, *, bias: torch.Tensor | None = None, returns_choice: bool = False) -> None:
        super().__init__()
        self.top_k = 2
        self.bias = bias
        self.gate: nn.Module = Gate() if returns_choice else nn.Linear(8, 5, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.rows = [0] * 5

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        flat = states.reshape(-1, 8)
        chosen = self.gate(flat)
        if isinstance(chosen, tuple):
            index, weights = chosen
        else:
            scores = chosen.softmax(dim=-1) + (self.bias if self.bias is not None else 0.0)
            weights, index = scores.topk(self.top_k, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = (index == number).nonzero(as_tuple=True)
            self.rows[number] += len(token)
            out = out.index_add(0, token, expert(flat[token]) * weights[token, place, None])
        return out.view_as(states)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 8))

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, index = (states @ self.weight.T).sigmoid().topk(2, dim=-1)
        return index, weights


class ListModel(nn.Module):
    def __init__(self, **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(ListBlock(**changes) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        states = self.embed(input_ids)
        for layer in self.layers:
            states = states + layer(states)
        return states.sum()


def counted_in_blocks(model: ListModel, *, padded: bool) -> ExpertLoad:
    counter = ExpertLoadCounter()
    counter.attach(model)
    ForwardWindow(counter.open_forward, counter.close_forward).attach(model)
    ids = torch.arange(1, 17).reshape(2, 8)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0 if padded else 1
    for _ in range(2):
        model(input_ids=ids, attention_mask=mask).backward()
    load = counter.take(1, num_non_padding_tokens=2 * int(mask.sum()))
    assert load is not None
    return load


@pytest.mark.parametrize("returns_choice", [False, True])
def test_blocks_with_a_module_for_each_expert(returns_choice: bool) -> None:
    model = ListModel(returns_choice=returns_choice)
    load = counted_in_blocks(model, padded=False)
    assert (load.status, load.reason, load.num_experts_per_tok) == ("recorded", None, 2)
    assert load.layer_names == ["layers.0.experts", "layers.1.experts"]
    assert load.tokens_per_expert == [layer.rows for layer in model.layers]
    without_padding = counted_in_blocks(ListModel(returns_choice=returns_choice), padded=True)
    assert without_padding.status == "recorded"
    assert [sum(layer) for layer in without_padding.tokens_per_expert] == [2 * 13 * 2] * 2


@pytest.mark.slow
def test_a_compiled_block_with_a_module_for_each_expert_is_not_recorded() -> None:
    """What would check the choice, the rows of each expert, is not seen there."""
    torch._dynamo.reset()
    model = ListModel()
    counter = ExpertLoadCounter()
    counter.attach(model)
    ForwardWindow(counter.open_forward, counter.close_forward).attach(model)
    torch.compile(model, backend="aot_eager")(torch.arange(1, 17).reshape(2, 8)).backward()
    load = counter.take(1, num_non_padding_tokens=16)
    torch._dynamo.reset()
    assert load is not None
    assert (load.status, load.tokens_per_expert) == ("not_recorded", [])


def test_a_block_that_does_not_run_what_its_gate_scores_highest_is_not_recorded() -> None:
    load = counted_in_blocks(ListModel(bias=torch.tensor([0.0, 0.0, 9.0, 9.0, 0.0])), padded=True)
    assert (load.status, load.tokens_per_expert) == ("not_recorded", [])
    assert load.reason == "layers.0.experts does not run the 2 experts that its gate scores highest"
