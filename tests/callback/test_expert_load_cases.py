"""Expert load where a count could be silently wrong: shared and identity experts, families that hide their choice, hooks
that come after the compiler, and models with very many experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_runs import LENGTHS, TokenRows, pad_right, tiny_mixtral
from torch import nn

from ftcost_callback.expert_load import ExpertLoadCounter
from ftcost_callback.forward_window import ForwardWindow
from ftcost_callback.records import ExpertLoad

REAL = sum(LENGTHS[:4])
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


def batch(*places: int) -> dict[str, Any]:
    rows = TokenRows()
    return pad_right([rows[place] for place in places])


def counted(model: nn.Module, **check: Any) -> ExpertLoad:
    """The load of one training forward and backward over the first four rows."""
    counter = ExpertLoadCounter()
    counter.attach(model)
    ForwardWindow(counter.open_forward, counter.close_forward).attach(model)
    model.train()
    model(**batch(0, 1, 2, 3)).loss.backward()
    load = counter.take(1, **check)
    assert load is not None
    return load


def with_shared_experts(family: str) -> Any:
    if family == "qwen2_moe":
        from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

        return Qwen2MoeForCausalLM(
            Qwen2MoeConfig(
                **SIZES, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24
            )
        )
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **SIZES, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2, moe_intermediate_size=16, n_group=1,
            topk_group=1, first_k_dense_replace=0, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4,
            v_head_dim=8,
        )
    )  # fmt: skip


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_shared_experts_are_no_part_of_the_load(family: str) -> None:
    """They see every token and are never chosen. DeepSeek's choice is made with a bias that its logits do not show."""
    load = counted(with_shared_experts(family), num_non_padding_tokens=REAL)
    assert (load.status, load.reason, load.num_experts_per_tok) == ("recorded", None, 2)
    assert [len(layer) for layer in load.tokens_per_expert] == [6, 6]
    assert [sum(layer) for layer in load.tokens_per_expert] == [2 * REAL] * 2


def test_identity_experts_count_as_the_choices_they_are() -> None:
    """LongCat sends some tokens through experts that compute nothing: 4 real ones, 2 of them identity behind those."""
    from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

    fields = {name: value for name, value in SIZES.items() if name not in {"num_hidden_layers", "intermediate_size"}}
    model = LongcatFlashForCausalLM(
        LongcatFlashConfig(
            **fields, num_layers=1, num_hidden_layers=2, ffn_hidden_size=32, expert_ffn_hidden_size=16, n_routed_experts=4,
            zero_expert_num=2, moe_topk=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4,
            v_head_dim=8, head_dim=4,
        )
    )  # fmt: skip
    load = counted(model, num_non_padding_tokens=REAL)
    assert (load.status, load.reason) == ("recorded", None)
    assert [len(layer) for layer in load.tokens_per_expert] == [6]
    assert [sum(layer) for layer in load.tokens_per_expert] == [2 * REAL]


def test_nllb_moe_is_not_recorded_since_its_experts_do_not_run_as_its_router_says() -> None:
    from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

    model = NllbMoeForConditionalGeneration(
        NllbMoeConfig(
            vocab_size=64, d_model=16, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
            encoder_attention_heads=2, decoder_attention_heads=2, num_experts=4, encoder_sparse_step=1,
            decoder_sparse_step=1, max_position_embeddings=64, pad_token_id=0,
        )
    )  # fmt: skip
    load = counted(model)
    assert (load.status, load.tokens_per_expert) == ("not_recorded", [])
    assert "NllbMoe" in (load.reason or "")


@pytest.mark.slow
def test_hooks_that_come_after_the_first_compiled_call_are_not_recorded_rather_than_zero() -> None:
    """A compiled graph does not look at its modules' hooks again: they stay silent without an error."""
    torch._dynamo.reset()
    model = tiny_mixtral(num_hidden_layers=1)
    model.train()
    compiled = torch.compile(model, backend="eager")
    compiled(**batch(0, 1)).loss.backward()
    counter = ExpertLoadCounter()
    counter.attach(model)
    ForwardWindow(counter.open_forward, counter.close_forward).attach(model)
    compiled(**batch(0, 1)).loss.backward()
    load = counter.take(1)
    torch._dynamo.reset()
    assert load is not None
    assert (load.status, load.tokens_per_expert) == ("not_recorded", [])
    assert "compiled before the callback attached" in (load.reason or "")


@pytest.mark.slow
def test_a_compiled_model_with_recomputation_has_as_many_graphs_and_the_same_gradients() -> None:
    """A hook that writes into a tensor ends the user's backward here: "modified by an inplace operation"."""

    def trained(*, measured: bool) -> tuple[int, list[torch.Tensor]]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = tiny_mixtral(num_hidden_layers=1)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        if measured:
            counter = ExpertLoadCounter()
            counter.attach(model)
            ForwardWindow(counter.open_forward, counter.close_forward).attach(model)
        torch.compile(model, backend="aot_eager")(**batch(0, 1)).loss.backward()
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        torch._dynamo.reset()
        return graphs, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    graphs, gradients = trained(measured=True)
    graphs_alone, gradients_alone = trained(measured=False)
    assert graphs == graphs_alone
    assert len(gradients) == len(gradients_alone) > 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, gradients_alone, strict=True))


class ManyExperts(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
        return hidden_states


class ManyLayers(nn.Module):
    """100 layers of 512 experts, 8 chosen for each token: the choices of one batch are 13 MB, of a long one far more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ManyExperts(512) for _ in range(100))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        states = torch.zeros(input_ids.numel(), 1)
        index = (input_ids.reshape(-1, 1) * 8 + torch.arange(8)) % 512
        for layer in self.layers:
            states = layer(states, index.clone())
        return states


def kept_bytes(counter: ExpertLoadCounter) -> int:
    """Of every tensor that the counter holds."""
    found: dict[int, torch.Tensor] = {}

    def look_into(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value
        elif isinstance(value, (list, tuple)):
            for each in value:
                look_into(each)

    look_into(list(vars(counter).values()))
    return sum(each.untyped_storage().nbytes() for each in found.values())


def test_memory_is_bounded_for_a_hundred_layers_of_512_experts() -> None:
    model = ManyLayers()
    counter = ExpertLoadCounter()
    counter.attach(model)
    window = ForwardWindow(counter.open_forward, counter.close_forward)
    window.attach(model)
    model.train()
    most = 0

    def look(*arguments: Any) -> None:
        nonlocal most
        most = max(most, kept_bytes(counter))

    for layer in model.layers:
        layer.register_forward_hook(look)
    tokens = torch.arange(8192).reshape(1, -1)  # 52 MB of choices over the layers
    after = []
    for _ in range(3):
        model(input_ids=tokens)
        after.append(kept_bytes(counter))
    assert most < 24 * 2**20  # 16 MiB that wait to be counted, and one layer more
    assert after[0] == after[1] == after[2] < 2 * 2**20
    load = counter.take(1)
    assert load is not None
    assert load.status == "recorded"
    assert [sum(layer) for layer in load.tokens_per_expert] == [3 * 8192 * 8] * 100
    assert {max(layer) for layer in load.tokens_per_expert} == {3 * 8192 * 8 // 512}
