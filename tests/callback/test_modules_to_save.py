"""Experts that PEFT trains as a copy (``modules_to_save``): the copy is a layer, and what it stands for is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import listed_rows, pad_right, tiny_mixtral, tiny_trainer

from ftcost_callback import FTCostCallback
from ftcost_callback.expert_sites import find_expert_sites
from ftcost_callback.run_file import read_run

peft = pytest.importorskip("peft")


def adapted(*modules_to_save: str) -> Any:
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=list(modules_to_save) or None, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(tiny_mixtral(), config)


@pytest.mark.parametrize("saved", ["experts", "mlp", "gate"])
def test_each_layer_is_counted_once_and_whole(tmp_path: Path, saved: str) -> None:
    trainer = tiny_trainer(
        tmp_path, [FTCostCallback(sinks=[], predict=False)], model=adapted(saved), train_dataset=listed_rows(),
        data_collator=pad_right, max_steps=3, logging_steps=1,
    )  # fmt: skip
    trainer.train()
    record = read_run(tmp_path)
    expected = 2 * sum(step.num_non_padding_tokens or 0 for step in record.steps)
    assert {load.status for load in record.expert_loads} == {"recorded"}
    assert {len(load.layer_names or ()) for load in record.expert_loads} == {2}
    for layer in range(2):
        assert sum(sum((load.tokens_per_expert or [])[layer]) for load in record.expert_loads) == expected


def test_the_part_that_runs_is_the_site() -> None:
    model = adapted("experts")
    copies = [f"base_model.model.model.layers.{layer}.mlp.experts.modules_to_save.default" for layer in (0, 1)]
    assert [site.layer_name for site in find_expert_sites(model)] == copies
    assert {site.num_experts for site in find_expert_sites(model)} == {4}
    with model.disable_adapter():
        originals = [f"base_model.model.model.layers.{layer}.mlp.experts.original_module" for layer in (0, 1)]
        assert [site.layer_name for site in find_expert_sites(model)] == originals
