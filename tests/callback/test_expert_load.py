"""Expert counts of real MoE models, against tokens x top-k and against the rows the experts' matmuls really saw."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import LENGTHS, MOE_FACTORIES, TokenRows, pad_right, tiny_llama, tiny_mixtral, tiny_qwen3_moe

from ftcost_callback.expert_load import ArgumentHook, ExpertLoadCounter
from ftcost_callback.expert_sites import ExpertSite, find_expert_sites
from ftcost_callback.forward_window import ForwardWindow, TrainingForward
from ftcost_callback.records import ExpertLoad


def counter_on(model: Any) -> ExpertLoadCounter:
    counter = ExpertLoadCounter()
    counter.attach(model)
    ForwardWindow(counter.open_forward, counter.close_forward).attach(model)
    model.train()
    return counter


def batch(*places: int) -> dict[str, Any]:
    rows = TokenRows()
    return pad_right([rows[place] for place in places])


def taken(counter: ExpertLoadCounter, **check: Any) -> ExpertLoad:
    load = counter.take(1, **check)
    assert load is not None
    return load


REAL = sum(LENGTHS[:4])


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", sorted(MOE_FACTORIES))
def test_each_layer_sums_to_real_tokens_times_top_k(family: str, implementation: str) -> None:
    model = MOE_FACTORIES[family](experts_implementation=implementation)
    counter = counter_on(model)
    for places in ((0, 1), (2, 3)):
        model(**batch(*places)).loss.backward()
    load = taken(counter, num_non_padding_tokens=REAL)
    top_k = model.config.num_experts_per_tok
    assert (load.status, load.reason, load.num_experts_per_tok) == ("recorded", None, top_k)
    assert [sum(layer) for layer in load.tokens_per_expert] == [REAL * top_k] * 2
    assert (
        [len(layer) for layer in load.tokens_per_expert] == [model.config.num_local_experts] * 2
        if hasattr(model.config, "num_local_experts")
        else [model.config.num_experts] * 2
    )


class RowsPerExpert(torch.overrides.TorchFunctionMode):
    """Rows that enter each expert's first matmul in the eager loop, told by the expert's slice of the weight."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.rows = [[0] * weight.shape[0] for weight in weights]
        self._slices = {
            weight[expert].data_ptr(): (layer, expert)
            for layer, weight in enumerate(weights)
            for expert in range(weight.shape[0])
        }

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear and args[1].data_ptr() in self._slices:
            layer, expert = self._slices[args[1].data_ptr()]
            self.rows[layer][expert] += args[0].shape[0]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", sorted(MOE_FACTORIES))
def test_counts_are_the_rows_of_the_experts_matmuls(family: str) -> None:
    model = MOE_FACTORIES[family](experts_implementation="eager")
    counter = counter_on(model)
    inputs = {name: value for name, value in batch(3, 11).items() if name != "attention_mask"}
    with RowsPerExpert([site.module.gate_up_proj for site in find_expert_sites(model)]) as seen:
        model(**inputs)
    assert taken(counter).tokens_per_expert == seen.rows


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("family", sorted(MOE_FACTORIES))
def test_gradient_checkpointing_counts_each_token_once(family: str, use_reentrant: bool) -> None:
    model = MOE_FACTORIES[family]()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    counter = counter_on(model)
    model.enable_input_require_grads()
    model(**batch(0, 1, 2, 3)).loss.backward()
    load = taken(counter, num_non_padding_tokens=REAL)
    assert load.status == "recorded"
    assert [sum(layer) for layer in load.tokens_per_expert] == [REAL * model.config.num_experts_per_tok] * 2


def test_thirty_two_positions_eight_of_them_padding_top_two() -> None:
    model = tiny_mixtral()
    counter = counter_on(model)
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[:, 6:] = 0
    model(input_ids=torch.randint(1, 60, (4, 8)), attention_mask=mask)
    assert [sum(layer) for layer in taken(counter).tokens_per_expert] == [48, 48]


def test_evaluation_and_passes_without_gradients_are_not_counted() -> None:
    model = tiny_mixtral()
    counter = counter_on(model)
    with torch.no_grad():
        model(**batch(0, 1))
    model.eval()
    model(**batch(0, 1))
    assert counter.take(1) is None


def test_a_take_begins_anew() -> None:
    model = tiny_mixtral()
    counter = counter_on(model)
    model(**batch(0, 1))
    taken(counter)
    model(**batch(2))
    assert [sum(layer) for layer in taken(counter).tokens_per_expert] == [LENGTHS[2] * 2] * 2


def test_many_pending_indices_are_counted_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcost_callback.expert_load._MAX_PENDING_BYTES", 1)
    model = tiny_qwen3_moe(num_hidden_layers=3)
    counter = counter_on(model)
    model(**batch(0, 1))
    load = taken(counter, num_non_padding_tokens=sum(LENGTHS[:2]))
    assert load.status == "recorded"
    assert [sum(layer) for layer in load.tokens_per_expert] == [sum(LENGTHS[:2]) * 3] * 3


def indices(num_tokens: int, expert: int, num_layers: int = 3) -> list[torch.Tensor]:
    return [torch.full((num_tokens, 2), expert) for _ in range(num_layers)]


def pass_through(counter: ExpertLoadCounter, per_layer: list[torch.Tensor], **arguments: torch.Tensor) -> None:
    """A forward whose experts modules are given these indices."""
    counter.open_forward(TrainingForward(arguments))
    for place, index in enumerate(per_layer):
        counter.seen(index, place)
    counter.close_forward()


def three_layers(**changes: Any) -> ExpertLoadCounter:
    counter = ExpertLoadCounter()
    counter.attach(tiny_mixtral(num_hidden_layers=3, **changes))
    return counter


def test_small_forwards_are_counted_together_each_by_its_own_mask() -> None:
    counter = three_layers()
    for num_tokens, num_real, expert in ((8, 6, 0), (4, 4, 1), (12, 3, 0)):
        mask = torch.zeros(1, num_tokens, dtype=torch.long)
        mask[:, :num_real] = 1
        pass_through(counter, indices(num_tokens, expert), input_ids=mask, attention_mask=mask)
        mask.zero_()  # what a user does with his batch afterwards is his own affair
    pass_through(counter, indices(5, 3), input_ids=torch.ones(1, 5, dtype=torch.long))  # no mask: all are real
    assert len(counter._held) == 4  # with masks and without one
    load = taken(counter, num_non_padding_tokens=6 + 4 + 3 + 5)
    assert load.status == "recorded"
    assert load.tokens_per_expert == [[18, 8, 0, 10]] * 3


def test_what_waits_for_the_next_forward_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcost_callback.expert_load._MAX_HELD_BYTES", 1000)
    counter = three_layers()
    held = []
    for _ in range(20):
        pass_through(counter, indices(8, 1))  # 384 bytes
        held.append(sum(index.nbytes for forward, _ in counter._held for index in forward))
    pass_through(counter, indices(100, 1))  # too large to wait
    assert max(held) <= 1000
    assert len(set(held)) > 1
    assert [index for forward, _ in counter._held for index in forward if index.shape[0] == 100] == []
    assert taken(counter).tokens_per_expert == [[0, 2 * (20 * 8 + 100), 0, 0]] * 3


def test_a_hundred_layers_of_512_experts_stay_small() -> None:
    counter = ExpertLoadCounter()
    experts = torch.nn.Identity()
    counter._sites = [ExpertSite(f"layer.{place}", experts, experts, 512, "index") for place in range(100)]
    counter._reset()
    counter._handles, counter._num_expert_columns = [torch.nn.Identity()], 512
    for _ in range(3):
        pass_through(counter, [torch.randint(0, 512, (4096, 8)) for _ in range(100)])
        assert counter._held == counter._pending == []  # 26 MB a forward
    assert counter._counts is not None
    assert counter._counts.nbytes < 500_000
    assert [sum(layer) for layer in taken(counter).tokens_per_expert] == [3 * 4096 * 8] * 100


@pytest.mark.parametrize("is_compiled", [True, False])
def test_memory_that_others_may_write_over_or_that_is_a_part_of_more_is_not_kept(is_compiled: bool) -> None:
    counter = three_layers()
    counter.open_forward(TrainingForward({}))
    for place in range(3):
        index = torch.zeros(8, 2 if is_compiled else 64, dtype=torch.long)[:, :2]
        if is_compiled:
            counter.seen_in_graph([index])
        else:
            counter.seen(index, place)
    counter.close_forward()
    assert counter._held == []
    assert taken(counter).tokens_per_expert == [[16, 0, 0, 0]] * 3


def test_a_dense_model_has_no_hooks_and_no_rows() -> None:
    model = tiny_llama()
    counter = counter_on(model)
    model(**batch(0, 1))
    assert counter.num_hooks == 0
    assert not counter.is_moe
    assert counter.take(1) is None


def test_experts_that_are_never_called_are_not_recorded_rather_than_zero() -> None:
    model = tiny_mixtral()
    counter = ExpertLoadCounter()
    counter.attach(model)
    for site in find_expert_sites(model):
        site.module._forward_pre_hooks.clear()  # as a replaced kernel or a graph replay has it
    ForwardWindow(counter.open_forward, counter.close_forward).attach(model)
    model.train()
    model(**batch(0, 1))
    load = taken(counter)
    assert (load.status, load.tokens_per_expert) == ("not_recorded", [])
    assert load.reason is not None
    assert "MixtralExperts" in load.reason


def test_forwards_that_skip_a_layer_make_the_load_partial() -> None:
    model = tiny_mixtral()
    counter = counter_on(model)
    model(**batch(0, 1))
    find_expert_sites(model)[0].module._forward_pre_hooks.clear()
    model(**batch(0, 1))
    load = taken(counter)
    assert load.status == "partial"
    assert load.reason == "1 of 2 training forwards did not call every experts module once"


def test_a_sum_that_does_not_fit_the_tokens_makes_the_load_partial() -> None:
    model = tiny_mixtral()
    counter = counter_on(model)
    model(**batch(0, 1))
    load = taken(counter, num_non_padding_tokens=1000)
    assert load.status == "partial"
    assert load.reason is not None
    assert "tokens x top-k = 2000" in load.reason


def test_a_family_that_does_not_show_its_choice_is_named() -> None:
    class SecretiveExperts(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    model = torch.nn.Sequential(SecretiveExperts())
    model.config = SimpleNamespace(num_experts=4)  # type: ignore[assignment]
    counter = ExpertLoadCounter()
    counter.attach(model)
    load = counter.take(1)
    assert load is not None
    assert (load.status, load.tokens_per_expert) == ("not_recorded", [])
    assert load.reason == "SecretiveExperts does not show which experts it chose (top_k_index or router_indices)"


@pytest.mark.parametrize("wrong_index", [99, -1])
def test_indices_outside_the_experts_are_left_out_and_said(wrong_index: int) -> None:
    """Such an index inside a scatter would write elsewhere, or end a CUDA process."""
    model = tiny_mixtral()
    counter = counter_on(model)
    site = find_expert_sites(model)[0]
    hook = ArgumentHook(counter, site, 0)
    site.module._forward_pre_hooks.clear()
    site.module.register_forward_pre_hook(
        lambda module, args, kwargs: hook(module, (args[0], torch.full_like(args[1], wrong_index), args[2]), kwargs),
        with_kwargs=True,
    )
    model(**batch(0, 1))
    load = taken(counter)
    assert load.status == "partial"
    assert load.reason == f"{sum(LENGTHS[:2]) * 2} choices name no expert of the model and are left out"
    assert [sum(layer) for layer in load.tokens_per_expert] == [0, sum(LENGTHS[:2]) * 2]


@pytest.mark.parametrize("factory", MOE_FACTORIES.values(), ids=MOE_FACTORIES)
def test_a_copy_of_the_model_does_not_count(factory: Callable[..., Any]) -> None:
    model = factory()
    counter = counter_on(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.train()
        twin(**batch(0, 1))
    assert counter.take(1) is None
    counter.detach()
    assert all(not site.module._forward_pre_hooks for site in find_expert_sites(model))


def test_lora_on_the_fused_experts_counts_once() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        tiny_mixtral(),
        LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]),
    )
    counter = counter_on(model)
    model(**batch(0, 1)).loss.backward()
    load = taken(counter, num_non_padding_tokens=sum(LENGTHS[:2]))
    assert load.status == "recorded"
    assert [len(layer) for layer in load.tokens_per_expert] == [4, 4]


def graph_breaks_of_two_compiled_steps(model: Any) -> int:
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        compiled(**batch(0, 1)).loss.backward()
    return sum(torch._dynamo.utils.counters["graph_break"].values())


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_model_counts_and_keeps_its_graph_whole(checkpointing: bool) -> None:
    def compiled_model() -> Any:
        model = tiny_mixtral()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        return model

    without_us = graph_breaks_of_two_compiled_steps(compiled_model())
    model = compiled_model()
    counter = counter_on(model)
    assert graph_breaks_of_two_compiled_steps(model) == without_us
    load = taken(counter, num_non_padding_tokens=2 * sum(LENGTHS[:2]))
    assert load.status == "recorded", load.reason
