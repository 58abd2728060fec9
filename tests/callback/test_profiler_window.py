"""``torch.profiler`` over real steps of tiny models on the CPU. The GPU's side of a trace is in test_profile_breakdown."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import MOE_FACTORIES, TokenRows, num_hooks, pad_right, tiny_llama, tiny_mixtral, tiny_trainer

from costmodel.errors import CostModelError
from ftcost_callback import FTCostCallback
from ftcost_callback.comparison import Comparison, Measured
from ftcost_callback.profiler_window import ProfilerWindow, union_seconds
from ftcost_callback.records import Profile
from ftcost_callback.run_file import read_run
from ftcost_callback.sinks import InMemorySink

BATCH_ROWS = 4
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train_step(model: Any, optimizer: Any) -> None:
    rows = TokenRows()
    model(**pad_right([rows[place] for place in range(BATCH_ROWS)])).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def profiled(model: Any, *, num_steps: int = 1) -> Profile:
    """The row of ``num_steps`` steps, from the second on: the first fills caches and makes the optimizer's states."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    window = ProfilerWindow(model, 2, 1 + num_steps, device=CPU)
    row = None
    for step in range(1, 3 + num_steps):
        window.step_begins(step)
        train_step(model, optimizer)
        row = window.step_ends(step) or row
    assert not window.is_profiling
    assert row is not None
    return row


def calls(row: Profile, operator: str, phase: str) -> dict[str, float]:
    """Layer type -> calls of operators of that kind in that pass, a step."""
    found: dict[str, float] = {}
    for cell in row.cells or ():
        if (cell["operator"], cell["phase"]) == (operator, phase):
            found[cell["layer_type"]] = found.get(cell["layer_type"], 0) + cell["num_calls"]
    return found


def test_every_table_sums_to_the_step() -> None:
    row = profiled(tiny_mixtral(), num_steps=3)
    assert (row.global_step, row.num_steps) == (4, 3)
    for table in (row.layer_type_seconds, row.operator_seconds, row.phase_seconds, row.by_group_seconds):
        assert table is not None
        assert sum(table.values()) == pytest.approx(row.step_seconds, rel=1e-6)
        assert min(table.values()) >= 0
    assert set(row.layer_type_seconds or ()) == {
        "attention", "experts", "router", "norms", "embeddings", "head_and_loss", "optimizer", "other",
    }  # fmt: skip
    assert set(row.phase_seconds or ()) == {"forward", "backward", "optimizer", "other"}
    assert {"attention_linears", "attention_scores", "experts", "router", "head_and_loss", "optimizer"} <= set(
        row.by_group_seconds or ()
    )


# Calls of matrix products are counted on the host, where each linear layer is an aten::linear, a matmul and an mm.
LINEAR = 3


@pytest.mark.parametrize("family", MOE_FACTORIES)
def test_products_are_those_of_the_modules_forward_and_backward(family: str) -> None:
    layers = 2
    row = profiled(MOE_FACTORIES[family]())
    forward, backward = calls(row, "matmul", "forward"), calls(row, "matmul", "backward")
    assert set(forward) == set(backward) == {"attention", "experts", "router", "head_and_loss"}
    assert forward["attention"] == LINEAR * 4 * layers
    assert forward["router"] == LINEAR * layers
    assert forward["head_and_loss"] == LINEAR
    # The gradient of the input and of the weight: two mm each.
    assert (backward["attention"], backward["router"], backward["head_and_loss"]) == (2 * 4 * layers, 2 * layers, 2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_is_a_pass_of_its_own(use_reentrant: bool) -> None:
    model = tiny_mixtral()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    row = profiled(model)
    forward, recompute = calls(row, "matmul", "forward"), calls(row, "matmul", "recompute")
    assert set(recompute) == {"attention", "experts", "router"}
    # Without reentry it stops at the last tensor the backward needs, which comes after these.
    assert (recompute["attention"], recompute["router"]) == (forward["attention"], forward["router"])
    assert calls(row, "matmul", "backward")["attention"] == 2 * 4 * 2


def test_adapters_are_told_apart_from_what_they_adapt() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    row = profiled(model)
    forward = calls(row, "matmul", "forward")
    assert forward["adapters"] == LINEAR * 2 * 2 * 2  # A and B, of two linears, in two layers
    assert forward["attention"] == LINEAR * 4 * 2
    assert forward["mlp"] == LINEAR * 3 * 2


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},  # no module around its MLP, and a forward that jumps over one
    "gemma2": {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba": {},
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_no_product_of_another_family_is_left_over(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(shape | FAMILIES[family])))
    row = profiled(model)
    for operator in ("matmul", "fused_attention", "convolution", "softmax", "norm", "top_k", "loss"):
        for phase in ("forward", "backward"):
            assert "other" not in calls(row, operator, phase), operator


def test_nothing_is_left_on_the_model_and_training_is_the_same() -> None:
    def trained(*, with_profiler: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = tiny_mixtral()
        if with_profiler:
            profiled(model)
            assert num_hooks(model) == 0
            assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        else:
            optimizer = torch.optim.AdamW(model.train().parameters())
            for _ in range(3):
                train_step(model, optimizer)
        return dict(model.state_dict())

    plain, measured = trained(with_profiler=False), trained(with_profiler=True)
    assert all(torch.equal(plain[name], measured[name]) for name in plain)


def test_a_copy_of_the_model_made_meanwhile_carries_no_hook_that_acts() -> None:
    model = tiny_llama()
    window = ProfilerWindow(model, 1, 1, device=CPU)
    window.step_begins(1)
    try:
        twin = copy.deepcopy(model)
        twin(**pad_right([TokenRows()[0]]))
        twin(**pad_right([TokenRows()[0]]))
    finally:
        window.close()


def test_another_profiler_is_left_alone() -> None:
    window = ProfilerWindow(tiny_llama(), 1, 1, device=CPU)
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(CostModelError, match="another profiler is running"),
    ):
        window.step_begins(1)


def test_a_compiled_model_has_operators_but_no_layers() -> None:
    model = tiny_llama()
    model._compiled_call_impl = model._call_impl  # what Module.compile() leaves, without waiting for a compiler
    row = profiled(model)
    assert row.reason is not None
    assert "compiled" in row.reason
    assert (row.layer_type_seconds, row.cells, row.by_group_seconds) == (None, None, None)
    assert sum((row.operator_seconds or {}).values()) == pytest.approx(row.step_seconds, rel=1e-6)


def test_overlapping_kernels_are_counted_once_and_only_within_steps() -> None:
    assert union_seconds([(0, 2), (1, 3), (1, 2), (5, 9)], [(0.5, 4), (6, 7)]) == 3.5
    assert union_seconds([], [(0, 1)]) == 0


# In a Trainer


def test_profiled_steps_are_in_the_record_and_left_out_of_speed(tmp_path: Path) -> None:
    sink = InMemorySink()
    callback = FTCostCallback(sinks=[sink], predict=False, profile_steps=(3, 4))
    tiny_trainer(tmp_path, [callback], model=tiny_mixtral(), max_steps=6).train()
    record = read_run(tmp_path)
    assert [step.is_profiled for step in record.steps] == [None, None, True, True, None, None]
    assert sum(window.num_steps for window in sink.windows) == 3  # 2, 5 and 6
    mine = record.profiles
    assert [(row.global_step, row.num_steps) for row in mine] == [(4, 2)]
    assert sum((mine[0].layer_type_seconds or {}).values()) == pytest.approx(mine[0].step_seconds, rel=1e-6)
    summary = record.summary
    assert summary is not None
    kept = [record.steps[place].step_seconds for place in (1, 4, 5)]
    assert summary.step_seconds_mean == pytest.approx(sum(kept) / 3)


def test_the_verdict_knows_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Measured] = []
    monkeypatch.setattr(
        "ftcost_callback.live_report.compare", lambda estimate, measured: held.append(measured) or Comparison()
    )
    tiny_trainer(tmp_path, [FTCostCallback(sinks=[], predict=False, profile_steps=(3, 4))], max_steps=6).train()
    (row,) = read_run(tmp_path).profiles
    assert row.by_group_seconds
    assert held[0].profiled_group_seconds is None  # the report of step 2
    assert held[-1].profiled_group_seconds == row.by_group_seconds


def test_training_that_ends_inside_the_window_still_has_its_row(tmp_path: Path) -> None:
    callback = FTCostCallback(sinks=[], predict=False, profile_steps=(3, 20))
    tiny_trainer(tmp_path, [callback], max_steps=4).train()
    assert [(row.global_step, row.num_steps) for row in read_run(tmp_path).profiles] == [(4, 2)]
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def test_a_profiler_that_fails_is_said_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no trace")

    monkeypatch.setattr("ftcost_callback.profiler_window.read_trace", broken)
    callback = FTCostCallback(sinks=[], predict=False, profile_steps=(2, 2))
    with caplog.at_level(logging.WARNING, logger="ftcost_callback"):
        trainer = tiny_trainer(tmp_path, [callback], max_steps=4)
        trainer.train()
    record = read_run(tmp_path)
    assert len(record.steps) == 4
    assert record.profiles == []
    assert [message for message in caplog.messages if "profiler switched off" in message]
    assert not any(module._forward_pre_hooks for module in trainer.model.modules())


@pytest.mark.parametrize("steps", [(3,), (4, 3), (0, 2), "20", (1, 2000), (1.5, 3)])
def test_steps_that_are_no_window_are_refused(steps: Any) -> None:
    with pytest.raises(CostModelError, match=r"such as \(20, 25\)"):
        FTCostCallback(profile_steps=steps)


def test_a_number_stands_for_the_steps_after_the_warm_up() -> None:
    assert FTCostCallback(profile_steps=3, skip_first_steps=2)._settings.profile_steps == (3, 5)


def test_the_row_is_as_documented() -> None:
    fields = {field.name for field in dataclasses.fields(Profile)}
    document = (Path(__file__).parents[2] / "docs" / "run_record.md").read_text()
    assert [name for name in sorted(fields) if f"`{name}`" not in document] == []
