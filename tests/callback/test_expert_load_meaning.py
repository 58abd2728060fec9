"""What expert load means, on real runs whose routing is forced, so that every figure is known beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TokenRows, priced_callback, tiny_mixtral, tiny_trainer

from costmodel.estimation import estimated_imbalance_seconds
from costmodel.gpu_catalog import find_gpu
from ftcost_callback.expert_balance import STRETCH_STEPS
from ftcost_callback.report_html import write_report
from ftcost_callback.run_file import RunRecord, read_run
from ftcost_callback.sinks.in_memory import InMemorySink

LENGTH = 8  # of every sample: two samples a step, no padding
TOKENS = 2 * LENGTH
FIRST_STEPS, ALL_STEPS = STRETCH_STEPS, 2 * STRETCH_STEPS

TWO_OF_FOUR = [TOKENS, TOKENS, 0, 0]
EVEN = [TOKENS // 2] * 4
LEANING = [TOKENS, TOKENS // 2, TOKENS // 2, 0]


class ForcedRouter(torch.nn.Module):
    """Chooses by a list of each step's pairs, dealt out to the tokens in turns; weights are even."""

    def __init__(self, router: Any, pairs: Any) -> None:
        super().__init__()
        self.weight, self.pairs = router.weight, pairs

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = states.reshape(-1, states.shape[-1])
        pairs = torch.tensor(self.pairs())
        index = pairs.repeat(len(flat) // len(pairs), 1)
        return flat @ self.weight.T, torch.full(index.shape, 0.5), index


def forced_run(folder: Path, *, sinks: tuple[Any, ...] = (), max_steps: int = ALL_STEPS, mark: bool = False) -> RunRecord:
    """Layer 0 uses two of its four experts, then (after the first stretch) all evenly; layer 1 the other way round, but
    leaning to one expert."""
    model = tiny_mixtral()
    trainer: Any = None

    def is_first() -> bool:
        return trainer.state.global_step < FIRST_STEPS

    first, second = (layer.mlp for layer in model.model.layers)
    two, even, leaning = [[0, 1]], [[0, 1], [2, 3]], [[0, 1], [0, 2]]
    first.gate = ForcedRouter(first.gate, lambda: two if is_first() else even)
    second.gate = ForcedRouter(second.gate, lambda: even if is_first() else leaning)
    if mark:
        model.config.moe_router_force_load_balancing = True
    callback = priced_callback(sinks=list(sinks))
    trainer = tiny_trainer(
        folder, [callback], model=model, train_dataset=TokenRows((LENGTH,) * 12), max_steps=max_steps, logging_steps=10
    )
    trainer.train()
    return read_run(folder)


def test_every_figure_of_a_forced_load_is_the_one_known_beforehand(tmp_path: Path) -> None:
    sink = InMemorySink()
    record = forced_run(tmp_path, sinks=(sink,))
    loads = record.expert_loads
    times_ten = [[10 * tokens for tokens in layer] for layer in (TWO_OF_FOUR, EVEN, LEANING)]
    two, even, leaning = times_ten
    assert [load.tokens_per_expert for load in loads] == [[two, even], [two, even], [even, leaning], [even, leaning]]
    assert {(load.status, load.reason) for load in loads} == {("recorded", None)}
    # Busiest over mean: 2 and 1 by layer in the first stretch, 1 and 2 in the second; two dead experts, then one.
    assert [load.load_max_over_mean for load in loads] == [1.5, 1.5, 1.5, 1.5]
    assert [load.worst_layer_load_max_over_mean for load in loads] == [2.0] * 4
    assert [(load.worst_layer or "")[:14] for load in loads] == ["model.layers.0"] * 2 + ["model.layers.1"] * 2
    assert [load.num_dead_experts for load in loads] == [2, 2, 1, 1]
    assert [load.load_max_over_mean_vs_first_steps for load in loads] == [None, None, None, 1.0]
    summary = record.summary
    assert summary is not None
    balance = summary.expert_balance
    assert balance is not None
    # Over the whole run: (48, 48, 16, 16) and (48, 32, 32, 16) of every 128.
    assert balance["load_max_over_mean"] == 1.5
    assert balance["load_cv"] == pytest.approx((0.5 + 0.125**0.5) / 2)
    assert (balance["num_dead_experts"], balance["vs_first_steps"]) == (0, 1.0)


def test_what_a_forced_load_costs_is_the_cost_models_figure_times_the_steps_and_the_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost model is asked once a stretch, with that stretch's counts; here it answers half a second or three."""
    asked: list[Any] = []

    def seconds(job: Any, load: Any, *others: Any) -> float:
        asked.append([list(layer) for layer in load])
        return 0.5 if load[0][2] == 0 else 3.0

    monkeypatch.setattr("costmodel.estimation.estimated_imbalance_seconds", seconds)
    sink = InMemorySink()
    summary = forced_run(tmp_path, sinks=(sink,)).summary
    assert summary is not None
    balance = summary.expert_balance
    assert balance is not None
    whole = [[[20 * tokens for tokens in layer] for layer in stretch] for stretch in ([TWO_OF_FOUR, EVEN], [EVEN, LEANING])]
    assert asked[1:] == whole  # the first answer is that of the first ten steps
    assert balance["imbalance_seconds"] == 20 * 0.5 + 20 * 3.0
    assert balance["imbalance_step_seconds"] == 70.0 / 40
    assert balance["imbalance_usd"] == pytest.approx(70.0)  # at a dollar a second
    assert [window.imbalance_usd for window in sink.windows] == pytest.approx([5.0, 10.0, 15.0, 70.0])


JOB: dict[str, Any] = {
    "model": "mistralai/Mixtral-8x7B-v0.1", "gpu": "NVIDIA A40", "method": "lora", "framework": "transformers",
    "max_length": 2048, "lengths": {"fixed": 2048}, "per_device_train_batch_size": 1, "experts_implementation": "grouped_mm",
}  # fmt: skip


def test_starved_experts_cost_at_most_what_their_weights_take_to_read() -> None:
    """One of eight gets nearly all: seven are read from memory for next to nothing, in the forward and in the backward.

    Where each expert is bound by arithmetic all the same, unevenness is free.
    """
    starved = estimated_imbalance_seconds(JOB, [[4082, 2, 2, 2, 2, 2, 2, 2]] * 32)
    leaning = estimated_imbalance_seconds(JOB, [[2297, *([257] * 7)]] * 32)
    bytes_per_pass = 32 * 7 * 3 * 4096 * 14336 * 2
    assert starved is not None
    assert 0 < starved < 2 * bytes_per_pass / (find_gpu("NVIDIA A40").memory_bandwidth_bytes_per_second or 0) * 1.5
    assert leaning == 0.0


def test_the_trend_of_a_load_that_becomes_less_even(tmp_path: Path) -> None:
    """Xia et al. 2024, section VI: tuning makes Mixtral less balanced."""
    model = tiny_mixtral(num_hidden_layers=1)
    trainer: Any = None
    block = model.model.layers[0].mlp
    block.gate = ForcedRouter(block.gate, lambda: [[0, 1], [2, 3]] if trainer.state.global_step < FIRST_STEPS else [[0, 1]])
    trainer = tiny_trainer(
        tmp_path, [priced_callback(sinks=[])], model=model, train_dataset=TokenRows((LENGTH,) * 12), max_steps=ALL_STEPS,
        logging_steps=10,
    )  # fmt: skip
    trainer.train()
    assert read_run(tmp_path).expert_loads[-1].load_max_over_mean_vs_first_steps == 2.0


def test_case_71_forced_routing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """https://github.com/pytorch/torchtitan/pull/1670: an even load that was forced is no even load of the router."""
    record = forced_run(tmp_path, max_steps=10, mark=True)
    (load,) = record.expert_loads
    said = "routing is forced to be even (moe_router_force_load_balancing): not what the router would choose"
    assert (load.status, load.reason) == ("recorded", said)
    assert "routing is forced to be even" in caplog.text
    write_report([tmp_path], tmp_path / "report.html")
    assert said[1:] in (tmp_path / "report.html").read_text()
