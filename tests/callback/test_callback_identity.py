"""The run with the callback is bit for bit the run without it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tiny_runs import TokenRows, pad_right, tiny_llama, tiny_mixtral, tiny_olmoe, tiny_qwen3_moe, tiny_trainer
from torch.utils._python_dispatch import TorchDispatchMode

from ftcost_callback import FTCostCallback
from ftcost_callback.expert_load import ExpertLoadCounter
from ftcost_callback.forward_window import ForwardWindow
from ftcost_callback.sinks import InMemorySink
from ftcost_callback.token_counter import TokenCounter


def trained(output_dir: Path, callbacks: list[Any], factory: Any, **changes: Any) -> dict[str, Any]:
    """Losses, weights, optimizer state and random states at the end of a run with every source of chance on."""
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(3)
    model = factory(attention_dropout=0.2)
    trainer = tiny_trainer(
        output_dir, callbacks, model=model,
        **({
            "max_steps": 6, "gradient_accumulation_steps": 2, "train_sampling_strategy": "random",
            "dataloader_num_workers": 2, "bf16": True, "gradient_checkpointing": True,
            "eval_strategy": "steps", "eval_steps": 3, "eval_dataset": TokenRows(),
            "save_strategy": "steps", "save_steps": 3, "neftune_noise_alpha": 5.0,
        } | changes),
    )  # fmt: skip
    trainer.train()
    return {
        "losses": [
            {key: value for key, value in row.items() if key in {"loss", "grad_norm", "eval_loss", "step"}}
            for row in trainer.state.log_history
        ],
        "weights": {name: value.clone() for name, value in trainer.model.state_dict().items()},
        "random": (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()),
        "files": sorted(path.name for path in (output_dir / "checkpoint-3").iterdir()),
        "forwards": (len(model._forward_hooks), len(model._forward_pre_hooks)),
    }


@pytest.mark.parametrize(
    "factory",
    [tiny_llama, *(pytest.param(each, marks=pytest.mark.slow) for each in (tiny_mixtral, tiny_qwen3_moe, tiny_olmoe))],
)
def test_losses_weights_and_random_states_are_bit_identical(tmp_path: Path, factory: Any) -> None:
    without = trained(tmp_path / "without", [], factory)
    measuring = FTCostCallback(
        usd_per_gpu_hour=2.0,
        budget_usd=1e-9,
        sinks=[InMemorySink()],
        wandb_every="step",
        detail="full",
        profile_steps=(2, 3),
    )
    with_us = trained(tmp_path / "with", [measuring], factory)
    assert with_us["losses"] == without["losses"]
    assert with_us["weights"].keys() == without["weights"].keys()
    assert all(torch.equal(with_us["weights"][name], value) for name, value in without["weights"].items())
    assert with_us["random"][:2] == without["random"][:2]
    assert torch.equal(with_us["random"][2], without["random"][2])
    assert with_us["forwards"] == without["forwards"]
    assert [name for name in with_us["files"] if name != "ftcost_ledger.json"] == without["files"]
    assert "ftcost_ledger.json" in with_us["files"]


class HostReads(TorchDispatchMode):
    """Operators that wait for a device when it is a GPU."""

    WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "bincount", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.num_operators = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operators += 1
        name = function.overloadpacket.__name__
        if name in self.WAITING:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


def test_nothing_between_rows_waits_for_the_device() -> None:
    model = tiny_mixtral()
    model.train()
    inputs = pad_right([TokenRows()[0], TokenRows()[1]])

    def operators() -> HostReads:
        with HostReads() as reads:
            model(**inputs)
        return reads

    without = operators()
    tokens, experts = TokenCounter("shifted"), ExpertLoadCounter()
    experts.attach(model)

    def open_forward(forward: Any) -> None:
        tokens.open_forward(forward)
        experts.open_forward(forward)

    ForwardWindow(open_forward, experts.close_forward).attach(model)
    with_us = operators()
    with HostReads() as reads:
        tokens.take_step()
    assert with_us.seen == without.seen
    assert reads.seen == []
    # A few operators a micro-batch, however deep the model is.
    assert with_us.num_operators - without.num_operators < 40


def test_a_whole_training_adds_no_host_read(tmp_path: Path) -> None:
    def reads(callbacks: list[Any]) -> dict[str, int]:
        trainer = tiny_trainer(tmp_path, callbacks, model=tiny_mixtral(), max_steps=8, logging_steps=4)
        with HostReads() as spy:
            trainer.train()
        return {name: spy.seen.count(name) for name in set(spy.seen)}

    assert reads([FTCostCallback(sinks=[InMemorySink()], budget_usd=1.0, usd_per_gpu_hour=1.0)]) == reads([])
