"""Configurations of other tools: recognised, every key accounted for, gaps filled with the tool's own default."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from example_configs import axolotl as axolotl_examples
from example_configs import llamafactory as llamafactory_examples
from example_configs import trl as trl_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import cli
from costmodel.cli_input import read_job
from costmodel.errors import CostModelError
from costmodel.estimation import estimate
from costmodel.importers import axolotl, import_config, import_mapping, llamafactory, recognise, trl
from costmodel.importers.reading import MAX_CONFIG_BYTES, fsdp_words

EXAMPLES = {
    "axolotl": list(axolotl_examples.configs()),
    "llamafactory": list(llamafactory_examples.configs()),
    "trl": list(trl_examples.configs()),
}
EVERY_EXAMPLE = [
    pytest.param(tool, text, id=f"{tool}-{name}") for tool, examples in EXAMPLES.items() for name, text in examples
]


def _write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def _fields(tool_config: dict[str, Any], **ignored: Any) -> dict[str, Any]:
    return import_mapping(tool_config, "cfg.yaml").fields


# --- every example


def test_there_are_at_least_sixty_examples_a_tool() -> None:
    assert {tool: len({text for _, text in examples}) >= 60 for tool, examples in EXAMPLES.items()} == {
        "axolotl": True,
        "llamafactory": True,
        "trl": True,
    }


@pytest.mark.parametrize(("tool", "text"), EVERY_EXAMPLE)
def test_example_is_recognised_and_every_key_accounted_for(tool: str, text: str, tmp_path: Path) -> None:
    path = _write(tmp_path, "config.yaml", text)
    assert recognise(path) == tool
    imported = import_config(path)
    assert imported.unknown == ()
    num_keys = len({line.split(":")[0] for line in text.splitlines() if line and line[0] not in " #-"})
    assert len(imported.understood) + len(imported.harmless) == num_keys
    assert len({*imported.understood, *imported.harmless}) == num_keys
    assert set(imported.origins) == set(imported.read_fields)
    if imported.unmodelled:
        with pytest.raises(CostModelError, match="training with DPO is not modelled"):
            _ = imported.job
    else:
        assert imported.job.framework == tool
    assert bool(imported.unmodelled) == ("stage: dpo" in text)


@pytest.mark.parametrize(("tool", "text"), EVERY_EXAMPLE)
def test_example_can_be_estimated(tool: str, text: str, tmp_path: Path) -> None:
    """Only what the file cannot know comes on top: the GPU, the lengths, and a model from the catalogue."""
    fields = import_config(_write(tmp_path, "config.yaml", text)).read_fields  # of the trainings that are refused, too
    answer = estimate({**fields, "model": "meta-llama/Llama-3.1-8B", "gpu": "A40", "lengths": {"mean": 300, "max": 900}})
    assert answer.memory.peak_device_bytes > 10**9
    assert answer.step_seconds is not None


# --- what the files say is used, what they leave out takes the tool's default: whole jobs, checked by hand

AXOLOTL_QLORA = """\
base_model: NousResearch/Llama-2-7b-hf
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - {path: mhenrichsen/alpaca_2k_test, type: alpaca}
val_set_size: 0.05
sequence_len: 4096
sample_packing: true
flash_attention: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
evals_per_epoch: 4
saves_per_epoch: 1
optimizer: paged_adamw_32bit
gradient_checkpointing: true
"""


def test_axolotl_qlora(tmp_path: Path) -> None:
    imported = import_config(_write(tmp_path, "qlora.yml", AXOLOTL_QLORA))
    assert imported.fields == {
        "framework": "axolotl",
        "framework_version": "0.19.0",
        "model": "NousResearch/Llama-2-7b-hf",
        "bf16": True,  # auto
        "dtype": "bfloat16",
        "quantization": "nf4",
        "double_quant": True,
        "method": "qlora",
        "prepare_model_for_kbit_training": False,
        "lora_r": 32,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "lora_target_modules": "all-linear",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "per_device_eval_batch_size": 2,
        "num_train_epochs": 4,
        "optim": "paged_adamw_32bit",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "attn_implementation": "flash_attention_2",
        "max_length": 4096,
        "packing": True,
        "padding_free": True,
        "eval_strategy": "steps",
        "eval_steps": 1 / 16,  # a share of the run: 4 evaluations in each of 4 epochs
        "save_strategy": "steps",
        "save_steps": 1 / 4,
    }
    assert imported.assumed == (
        "framework_version",
        "bf16",
        "dtype",
        "double_quant",
        "prepare_model_for_kbit_training",
        "per_device_eval_batch_size",
        "gradient_checkpointing_kwargs",
        "padding_free",
    )
    assert (imported.eval_split, imported.drops_long_samples, imported.loss_on) == (0.05, True, "completion")
    assert imported.origins["per_device_train_batch_size"].text == f"micro_batch_size in {tmp_path}/qlora.yml"
    assert imported.origins["double_quant"].text == "default of axolotl 0.19.0 (loaders/model.py: bnb_4bit_use_double_quant)"


def test_axolotl_defaults() -> None:
    """utils/schemas of Axolotl 0.19.0: one sample of 512 tokens, one epoch, full fine-tuning in bf16."""
    assert _fields({"base_model": "m"}) == {
        "framework": "axolotl",
        "framework_version": "0.19.0",
        "model": "m",
        "bf16": True,
        "dtype": "bfloat16",
        "method": "full",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "per_device_eval_batch_size": 1,
        "num_train_epochs": 1.0,
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "max_length": 512,
        "packing": False,
        "pad_to_multiple_of": 64,
        "eval_strategy": "no",
        "save_strategy": "epoch",
    }


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        pytest.param({"bf16": "full"}, {"bf16": False, "dtype": "bfloat16"}, id="bf16-full-has-no-autocast"),
        pytest.param({"fp16": True}, {"fp16": True, "dtype": "float16", "bf16": None}, id="fp16"),
        pytest.param({"bf16": False}, {"bf16": False, "dtype": "float32"}, id="neither"),
        pytest.param({"bf16": None}, {"bf16": False, "dtype": "float32"}, id="bf16-null-is-not-auto"),
        pytest.param({"bfloat16": True}, {"bf16": True, "dtype": "bfloat16"}, id="bfloat16"),
        pytest.param({"batch_size": 32, "micro_batch_size": 4}, {"gradient_accumulation_steps": 8}, id="batch-size"),
        pytest.param({"sample_packing": True}, {"packing": True, "padding_free": False}, id="packed-without-flash"),
        pytest.param({"pad_to_sequence_len": True}, {"padding": "max_length", "pad_to_multiple_of": None}, id="padded"),
        pytest.param({"val_set_size": 0.1, "evals_per_epoch": 1}, {"eval_strategy": "no"}, id="one-evaluation-is-none"),
        pytest.param({"eval_steps": 50}, {"eval_strategy": "no", "eval_steps": None}, id="nothing-held-out"),
        pytest.param({"val_set_size": 200, "eval_steps": 50}, {"eval_steps": 50, "num_eval_samples": 200}, id="held-out"),
        pytest.param({"load_in_8bit": True, "adapter": "lora"}, {"quantization": "int8", "method": "qlora"}, id="8-bit"),
        pytest.param({"load_in_4bit": True, "adapter": "lora"}, {"quantization": None, "method": "lora"}, id="4-bit-lora"),
        pytest.param(
            {"adapter": "lora", "gradient_checkpointing": True, "activation_offloading": True},
            {"gradient_checkpointing": False, "activation_offloading": True},
            id="offloading-replaces-recomputing",
        ),
        pytest.param({"fsdp_config": {"offload_params": True}}, {"fsdp": "full_shard offload"}, id="fsdp-2"),
        pytest.param({"optimizer": "galore_adamw_8bit"}, {"optim": "adamw_8bit"}, id="nearest-optimizer"),
        pytest.param({"overrides_of_model_config": {"sliding_window": 512}}, {"model_overrides": {"sliding_window": 512}}),
    ],
)  # fmt: skip
def test_axolotl_keys(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    fields = _fields({"base_model": "m", **keys})
    assert {name: fields.get(name) for name in expected} == expected


def test_axolotl_lifts_the_stacked_experts_of_a_mixture() -> None:
    """peft's preparation lifts them to fp32; embeddings and norms, all there is in a dense model, are taken back."""
    quantised = {"adapter": "qlora", "load_in_4bit": True}
    assert _fields({"base_model": "mistralai/Mixtral-8x7B-v0.1", **quantised})["prepare_model_for_kbit_training"] is True
    assert _fields({"base_model": "meta-llama/Llama-3.1-8B", **quantised})["prepare_model_for_kbit_training"] is False


def test_llamafactory_defaults() -> None:
    """hparams of LLaMA-Factory 0.9.5: LoRA of rank 8 on every linear layer, 2,048 tokens, checkpointing on."""
    assert _fields({"stage": "sft", "model_name_or_path": "m", "dataset": "a,b", "template": "llama3"}) == {
        "framework": "llamafactory",
        "framework_version": "0.9.5",
        "model": "m",
        "method": "lora",
        "lora_r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "lora_target_modules": "all-linear",
        "bf16": False,
        "dtype": "bfloat16",
        "adapter_dtype": "float32",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "max_length": 2048,
        "packing": False,
        "padding_free": False,
        "pad_to_multiple_of": 8,
    }


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        pytest.param({"lora_rank": 64}, {"lora_r": 64, "lora_alpha": 128}, id="alpha-is-twice-the-rank"),
        pytest.param({"lora_target": "q_proj,v_proj"}, {"lora_target_modules": ("q_proj", "v_proj")}, id="targets"),
        pytest.param(
            {"quantization_bit": 4},
            {"method": "qlora", "quantization": "nf4", "double_quant": True, "prepare_model_for_kbit_training": False},
            id="4-bit",
        ),
        pytest.param({"quantization_bit": 8}, {"quantization": "int8", "double_quant": None}, id="8-bit"),
        pytest.param({"finetuning_type": "full", "bf16": True}, {"dtype": "float32", "bf16": True}, id="full-in-fp32"),
        pytest.param({"finetuning_type": "full", "pure_bf16": True}, {"dtype": "bfloat16", "bf16": False}, id="pure-bf16"),
        pytest.param(
            {"finetuning_type": "full", "bf16": True, "deepspeed": "ds_z2_config.json"},
            {"dtype": "bfloat16", "deepspeed": {"zero_optimization": {"stage": 2}}},
            id="deepspeed",
        ),
        pytest.param({"neat_packing": True}, {"packing": True, "padding_free": True}, id="neat-packing"),
        pytest.param({"packing": True}, {"packing": True, "padding_free": False}, id="packing-attends-across"),
        pytest.param({"stage": "pt"}, {"packing": True}, id="pre-training-packs"),
        pytest.param(
            {"disable_gradient_checkpointing": True, "gradient_checkpointing": True},
            {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": None},
            id="checkpointing-off",
        ),
        pytest.param({"flash_attn": "fa2"}, {"attn_implementation": "flash_attention_2"}, id="flash"),
        pytest.param({"flash_attn": False}, {"attn_implementation": "eager"}, id="yaml-reads-off-as-false"),
        pytest.param({"max_length": 20}, {"max_length": 2048}, id="max-length-is-of-generation"),
    ],
)
def test_llamafactory_keys(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    fields = _fields({"stage": "sft", "template": "default", "model_name_or_path": "m", **keys})
    assert {name: fields.get(name) for name in expected} == expected


@pytest.mark.parametrize("written", [None, True, False])
def test_llamafactory_trains_the_encoder_of_images_only_where_it_is_told_to(written: bool | None) -> None:
    keys = {"freeze_vision_tower": written} if written is not None else {}
    read = import_mapping({**_LLAMAFACTORY, **keys})
    said = "freeze_vision_tower: the encoder of images is counted as frozen"
    assert any(said in each for each in read.warnings) == (written is False)


def test_llamafactory_facts_for_a_data_set() -> None:
    imported = import_mapping(
        {"stage": "sft", "model_name_or_path": "m", "dataset": "a,b,c", "max_samples": 1000, "val_size": 0.1}
    )
    assert (imported.max_samples, imported.num_datasets, imported.eval_split) == (1000, 3, 0.1)
    assert import_mapping({"stage": "pt", "model_name_or_path": "m"}).loss_on == "all"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        pytest.param({}, {"method": "full", "dtype": "float32", "framework": "trl"}, id="full-in-fp32"),
        pytest.param(
            {"use_peft": True}, {"method": "lora", "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}, id="lora"
        ),
        pytest.param({"lora_r": 8}, {"method": "full", "lora_r": None}, id="lora-keys-without-use-peft-do-nothing"),
        pytest.param(
            {"use_peft": True, "load_in_4bit": True},
            {"method": "qlora", "quantization": "nf4", "double_quant": False, "dtype": "float32"},
            id="qlora",
        ),
        pytest.param({"load_in_8bit": True}, {"method": "qlora", "quantization": "int8"}, id="quantised-means-adapters"),
        pytest.param({"eval_strategy": "steps"}, {"eval_steps": 10}, id="eval-steps-follow-logging-steps"),
        pytest.param({"eval_strategy": "steps", "logging_steps": 25}, {"eval_steps": 25}, id="written-logging-steps"),
        pytest.param(
            {"eval_delay": 40, "eval_on_start": True, "dataloader_drop_last": True},
            {"eval_delay": 40, "eval_on_start": True, "dataloader_drop_last": True},
            id="what-moves-the-schedule",
        ),
        pytest.param({"dtype": "auto", "model_name_or_path": "Qwen/Qwen2.5-7B"}, {"dtype": "bfloat16"}, id="as-stored"),
        pytest.param({"model_init_kwargs": {"dtype": "float16"}, "dtype": "bf16"}, {"dtype": "float16"}, id="init-wins"),
        pytest.param({"packing": True}, {"packing": True, "padding_free": None}, id="packing"),
        pytest.param({"packing": True, "packing_strategy": "wrapped"}, {"padding_free": False}, id="wrapped-attends-across"),
        pytest.param({"max_seq_length": 300}, {"max_length": 300}, id="name-before-0.20"),
        pytest.param({"max_steps": -1, "pad_to_multiple_of": "auto"}, {"max_steps": None, "pad_to_multiple_of": None}),
        pytest.param({"gradient_checkpointing": True, "activation_checkpointing": False}, {"gradient_checkpointing": False}),
        pytest.param({"group_by_length": True}, {"train_sampling_strategy": "group_by_length"}, id="transformers-4"),
        pytest.param(
            {"accelerate_config": "zero3"}, {"deepspeed": {"zero_optimization": {"stage": 3}}, "num_gpus": 8}, id="profile"
        ),
        pytest.param({"accelerate_config": "fsdp2", "num_processes": 2}, {"num_gpus": 2, "fsdp": "full_shard auto_wrap"}),
        pytest.param({"torch_compile_mode": "max-autotune"}, {"torch_compile": True}, id="a-mode-compiles"),
        pytest.param({"fsdp_config": {"min_num_params": 1}}, {"fsdp": None}, id="fsdp-config-alone-is-idle"),
        pytest.param({"optim": "ao_adamw_8bit"}, {"optim": "adamw_torch_8bit"}, id="same-states"),
        pytest.param({"loss_type": "chunked_nll"}, {"loss_type": "nll"}, id="deprecated-alias"),
        pytest.param({"evaluation_strategy": False}, {"eval_strategy": "no"}, id="yaml-reads-no-as-false"),
    ],
)
def test_trl_keys(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    fields = _fields({"model_name_or_path": "m", **keys})
    assert {name: fields.get(name) for name in expected} == expected


def test_lora_keys_without_use_peft_are_said() -> None:
    warnings = import_mapping({"model_name_or_path": "m", "lora_r": 8}).warnings
    assert warnings == ("lora_r: without use_peft: true TRL trains the whole model and these do nothing",)


def test_plain_training_arguments_are_transformers(tmp_path: Path) -> None:
    path = _write(
        tmp_path, "args.json", json.dumps({"output_dir": "o", "per_device_train_batch_size": 4, "eval_strategy": "steps"})
    )
    imported = import_config(path)
    assert (imported.fields["framework"], imported.fields["eval_steps"]) == ("transformers", 500)
    with pytest.raises(CostModelError, match=r"args\.json names no model; give one"):
        _ = imported.job


def test_run_clm_blocks_are_packed() -> None:
    fields = _fields({"model_name_or_path": "m", "train_file": "a.txt", "block_size": 1024})
    assert (fields["framework"], fields["max_length"], fields["packing"], fields["padding_free"]) == (
        "transformers", 1024, True, False,
    )  # fmt: skip


# --- keys


@pytest.mark.parametrize(
    ("base", "key"),
    [
        ({"base_model": "m"}, "micro_batchsize"),
        ({"stage": "sft", "model_name_or_path": "m"}, "cutof_len"),
        ({"model_name_or_path": "m"}, "packin"),
    ],
)
def test_unknown_keys_are_listed_and_said(base: dict[str, Any], key: str) -> None:
    imported = import_mapping({**base, key: 3, "seed": 1}, "my.yaml")
    assert imported.unknown == (key,)
    assert imported.all_warnings[-1] == f"1 key of my.yaml is not known and not used: {key}"


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"base_model": "m", "dpo_beta": 0.1}, "dpo_beta: of preference and reinforcement learning, which only rl"),
        ({"base_model": "m", "unfrozen_parameters": ["lm_head"]}, "unfrozen_parameters: only these are trained"),
        ({"stage": "sft", "model_name_or_path": "m", "use_galore": True}, "use_galore: GaLore is not modelled"),
        ({"model_name_or_path": "m", "temperature": 0.7}, "temperature: of preference and reinforcement learning; not used"),
        ({"model_name_or_path": "m", "auto_find_batch_size": True}, "auto_find_batch_size: the batch may be halved"),
    ],
)
def test_what_is_not_modelled_is_said_only_when_switched_on(config: dict[str, Any], sentence: str) -> None:
    assert any(sentence in warning for warning in import_mapping(config).warnings)
    last = list(config)[-1]
    assert not any(sentence in warning for warning in import_mapping({**config, last: None}).warnings)


_AXOLOTL = {"base_model": "m", "sequence_len": 512, "micro_batch_size": 1}
_LLAMAFACTORY = {"model_name_or_path": "m", "finetuning_type": "lora"}
_TRL = {"model_name_or_path": "m", "dataset_name": "d", "max_length": 512}


@pytest.mark.parametrize(
    ("config", "keys", "training", "way_out"),
    [
        pytest.param(_AXOLOTL, {"rl": "dpo"}, "DPO", "leave out rl", id="axolotl-dpo"),
        pytest.param(_AXOLOTL, {"rl": "grpo", "trl": {"num_generations": 4}, "vllm": {"port": 1}}, "GRPO", "leave out rl"),
        pytest.param(_AXOLOTL, {"rl": "new_one"}, "new_one", "leave out rl", id="axolotl-unknown-here"),
        pytest.param(_AXOLOTL, {"reward_model": True}, "reward modelling", "leave out reward_model"),
        pytest.param(_LLAMAFACTORY, {"stage": "dpo", "pref_beta": 0.1}, "DPO", "set stage: sft", id="llamafactory-dpo"),
        pytest.param(_LLAMAFACTORY, {"stage": "dpo", "pref_loss": "orpo"}, "ORPO", "set stage: sft"),
        pytest.param(_LLAMAFACTORY, {"stage": "kto"}, "KTO", "set stage: sft"),
        pytest.param(_LLAMAFACTORY, {"stage": "ppo"}, "PPO", "set stage: sft"),
        pytest.param(_LLAMAFACTORY, {"stage": "rm"}, "reward modelling", "set stage: sft"),
        pytest.param(_TRL, {"beta": 0.1, "loss_type": "sigmoid"}, "DPO", "leave out loss_type, beta", id="trl-dpo"),
        pytest.param(_TRL, {"loss_type": ["sigmoid", "sft"]}, "DPO", "leave out loss_type"),
        pytest.param(_TRL, {"beta": 0.1, "desirable_weight": 1.0}, "KTO", "leave out desirable_weight, beta"),
        pytest.param(_TRL, {"num_generations": 8, "use_vllm": True}, "GRPO", "leave out num_generations, use_vllm"),
        pytest.param(_TRL, {"center_rewards_coefficient": 0.01}, "reward modelling", "leave out center_rewards"),
        pytest.param(
            _TRL, {"teacher_model_name_or_path": "t", "lmbda": 0.5}, "distillation", "leave out teacher_model_name"
        ),
        pytest.param(_TRL, {"cpo_alpha": 1.0}, "CPO", "leave out cpo_alpha"),
        pytest.param(_TRL, {"beta": 0.1}, "preferences or rewards", "leave out beta", id="trl-which-is-not-said"),
    ],
)
def test_what_is_no_fine_tuning_is_read_and_not_priced(
    config: dict[str, Any], keys: dict[str, Any], training: str, way_out: str
) -> None:
    imported = import_mapping({**config, **keys}, "my.yaml")
    assert set(imported.understood) | set(imported.harmless) == {*config, *keys}
    with pytest.raises(CostModelError) as refused:
        _ = imported.job
    said = str(refused.value)
    with pytest.raises(CostModelError, match="is not modelled"):  # nor are its fields, handed to an estimate
        estimate(imported.fields)
    assert said.startswith(f"my.yaml: training with {training} is not modelled (")
    assert "give its trainer an FTCostCallback" in said
    assert way_out in said
    as_sft = {**config, **({"stage": "sft"} if "stage" in keys else {})}  # what the way out says
    assert import_mapping(as_sft, "my.yaml").job.model == "m"


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"beta": 0.0, "num_generations": None, "sync_ref_model": False}, id="switched-off"),
        pytest.param({"loss_type": "dft"}, id="a-loss-of-sft"),
        pytest.param({"loss_type": "ForCausalLM"}, id="a-loss-of-transformers"),
    ],
)
def test_a_fine_tuning_is_not_taken_for_another_training(keys: dict[str, Any]) -> None:
    assert import_mapping({**_TRL, **keys}).job.model == "m"
    assert import_mapping({**_LLAMAFACTORY, "stage": "pt"}).job.packing is True
    assert import_mapping({**_AXOLOTL, "rl": "", "reward_model": False}).job.model == "m"


@pytest.mark.parametrize("loss_type", ["sigmoid", "grpo", "dpo", ""])
def test_a_loss_of_another_training_is_refused_in_a_job_as_in_a_file(loss_type: str) -> None:
    job = {"model": "Qwen/Qwen2.5-0.5B", "max_length": 64, "framework": "trl"}
    with pytest.raises(CostModelError, match=r"loss_type: '.*' is no loss of supervised fine-tuning.*DPO"):
        estimate(job, loss_type=loss_type)
    assert estimate(job, loss_type="ForCausalLM").num_params == 494_032_768


@pytest.mark.parametrize("command", ["estimate", "compare", "optimize"])
def test_no_command_prices_what_is_no_fine_tuning(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 512\nmicro_batch_size: 1\nrl: dpo\n"
    path = _write(tmp_path, "dpo.yml", text)
    told = [path, "-g", "L4", "--lengths", "fixed:300", "--samples", "100"]
    for form in ([], ["--json"]):
        assert cli.run([command, *told, *form]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert "training with DPO is not modelled (rl: dpo)" in line
    assert cli.run([command, _write(tmp_path, "sft.yml", text.replace("rl: dpo\n", "")), *told[1:]]) in (0, 3)


def test_a_recorded_config_of_wandb_says_its_training_too() -> None:
    """As transformers' WandbCallback writes them: every argument of the trainer, also those left at their default."""
    config = {"model_type": "llama", "hidden_size": 64, "per_device_train_batch_size": 1, "max_steps": 3}
    assert import_mapping(config).unmodelled == ""
    assert "training with KTO" in import_mapping({**config, "beta": 0.1, "desirable_weight": 1.0}).unmodelled
    assert "training with preferences or rewards" in import_mapping({**config, "disable_dropout": True}).unmodelled


def _dataclass_fields(module: str, *classes: str) -> set[str]:
    """The annotated names of a module's classes, from its source: importing it would load torch. No name: all classes."""
    package, _, rest = module.partition(".")
    root = importlib.util.find_spec(package)
    assert root is not None
    assert root.submodule_search_locations is not None
    path = Path(root.submodule_search_locations[0], *rest.split(".")).with_suffix(".py")
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)]
    statements = [statement for node in nodes if not classes or node.name in classes for statement in node.body]
    return {
        statement.target.id
        for statement in statements
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


@pytest.mark.parametrize(
    ("modules", "num_fields"),
    [
        pytest.param(
            ("transformers.training_args", "trl.trainer.sft_config", "trl.trainer.base_config", "trl.trainer.model_config"),
            130,
            id="trl",
        ),
        pytest.param(
            ("trl.trainer.dpo_config", "trl.trainer.kto_config", "trl.trainer.reward_config"), 20, id="preferences"
        ),
    ],
)
def test_every_field_of_the_installed_dataclasses_is_known(modules: tuple[str, ...], num_fields: int) -> None:
    fields = set().union(*(_dataclass_fields(module) for module in modules))
    assert len(fields) >= num_fields
    assert import_mapping({"model_name_or_path": "m", **dict.fromkeys(fields)}).unknown == ()


def test_every_field_of_the_installed_lora_config_is_known(tmp_path: Path) -> None:
    fields = _dataclass_fields("peft.tuners.lora.config", "LoraConfig") | _dataclass_fields(
        "peft.config", "PeftConfig", "PeftConfigMixin"
    )
    assert {"target_parameters", "base_model_name_or_path", "peft_version"} <= fields
    adapter = {**dict.fromkeys(fields), "peft_type": "LORA", "r": 8, "base_model_name_or_path": "m"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    assert import_config(tmp_path).unknown == ()


# --- recognising


@pytest.mark.parametrize(
    ("config", "tool"),
    [
        ({"model": "m", "gpu": "A40"}, "job"),
        ({"model": "m", "base_model": "m", "micro_batch_size": 1}, "axolotl"),
        ({"micro_batch_size": 1, "sequence_len": 512}, "axolotl"),
        ({"finetuning_type": "lora", "model_name_or_path": "m"}, "llamafactory"),
        ({"model_name_or_path": "m", "use_peft": True}, "trl"),
        ({"learning_rate": 1e-4, "warmup_ratio": 0.1}, "trl"),
        ({"model_type": {"value": "llama"}, "max_steps": {"value": 3}}, "wandb"),
        ({"_wandb": {}, "max_steps": 3}, "wandb"),
        ({"model_type": "llama", "per_device_train_batch_size": 3}, "wandb"),
        ({"per_device_train_batch_size": 3, "lora_r": 8}, "job"),
        ({"gpu": "A40", "lora_rnk": 8}, "job"),  # misspelt: the job's message names the nearest field
    ],
)
def test_recognise(config: dict[str, Any], tool: str) -> None:
    assert recognise(config) == tool


def test_what_no_tool_knows_is_refused() -> None:
    with pytest.raises(CostModelError, match="no known configuration has these keys: apples, pears"):
        recognise({"pears": 1, "apples": 2})


def test_axolotl_says_that_a_slice_of_a_data_set_is_trained_on() -> None:
    config: dict[str, Any] = {"base_model": "Qwen/Qwen2.5-7B", "datasets": [{"path": "a", "split": "train[:20%]"}]}
    said = "datasets: split train[:20%] takes a part of its data: give num_samples of that part"
    assert said in import_mapping(config).warnings
    config["datasets"] = [{"path": "a", "split": "train"}, {"path": "b"}, "c"]
    assert not any("split" in warning for warning in import_mapping(config).warnings)


@pytest.mark.parametrize(
    ("tool", "framework", "config"),
    [
        ("torchtune", "torchtune", {"model": {"_component_": "torchtune.models.llama3.qlora_llama3_8b"}, "batch_size": 2}),
        ("litgpt", "litgpt", {"checkpoint_dir": "checkpoints/x", "quantize": "bnb.nf4", "train": {"micro_batch_size": 2}}),
        ("AutoTrain", "trl", {"task": "llm-sft", "base_model": "x", "params": {"peft": True, "quantization": "int4"}}),
    ],
)
def test_a_file_of_a_tool_that_is_not_read_is_refused_by_name(tool: str, framework: str, config: dict[str, Any]) -> None:
    """AutoTrain's names a ``base_model``, as Axolotl's does: it was priced as full tuning at Axolotl's defaults."""
    with pytest.raises(CostModelError, match=f"a configuration of {tool} is not read: .* --framework {framework} "):
        recognise(config)


# --- checkpoints


def test_adapter_checkpoint(tmp_path: Path) -> None:
    adapter = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.1,
        "base_model_name_or_path": "meta-llama/Llama-3.1-8B",
        "target_modules": ["v_proj", "q_proj"],
    }
    state = {"train_batch_size": 4, "max_steps": 900, "num_train_epochs": 3, "eval_steps": 100, "save_steps": 300,
             "log_history": [{"loss": 1.0, "mean_token_accuracy": 0.5}, {"eval_loss": 2.0}]}  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    imported = import_config(tmp_path)
    assert imported.fields == {
        "per_device_train_batch_size": 4,
        "max_steps": 900,
        "num_train_epochs": 3,
        "eval_steps": 100,
        "save_steps": 300,
        "eval_strategy": "steps",
        "framework": "trl",
        "model": "meta-llama/Llama-3.1-8B",
        "lora_r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.1,
        "lora_target_modules": ("v_proj", "q_proj"),
        "method": "lora",
    }
    assert imported.job.max_steps == 900
    assert any("does not say whether its base was quantised" in warning for warning in imported.warnings)


def test_model_checkpoint(tmp_path: Path) -> None:
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "dtype": "bfloat16", "quantization_config": quantised})
    )
    assert import_config(tmp_path).fields == {
        "model": str(tmp_path), "dtype": "bfloat16", "quantization": "nf4", "double_quant": False,
    }  # fmt: skip


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "opened",))

    (tmp_path / "training_args.bin").write_bytes(pickle.dumps(Trap()))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    imported = import_config(tmp_path)
    assert not (tmp_path / "opened").exists()
    assert any("training_args.bin is a pickle and is not opened" in warning for warning in imported.warnings)


def test_a_training_on_a_processor_says_how_it_is_estimated() -> None:
    config = {"model_name_or_path": "m/m", "per_device_train_batch_size": 1, "max_length": 8, "use_cpu": True}
    (said,) = [warning for warning in import_mapping(config).warnings if warning.startswith("use_cpu: ")]
    assert said.endswith("the device that --gpu names; for this processor run ftcost probe, then give --gpu probe")


def test_folder_of_checkpoints_names_the_last(tmp_path: Path) -> None:
    for step in (500, 1000):
        (tmp_path / f"checkpoint-{step}").mkdir()
    with pytest.raises(CostModelError, match=r"is a folder; give one of its checkpoints, such as checkpoint-1000"):
        import_config(tmp_path)


def test_other_adapters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3", "base_model_name_or_path": "m"}')
    with pytest.raises(CostModelError, match="adapters of type IA3 are not modelled; only LoRA is"):
        import_config(tmp_path)


# --- W&B

WANDB_RUN = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "intermediate_size": 11008, "vocab_size": 32000, "torch_dtype": "float16", "max_length": 20,
    "transformers_version": "4.46.0", "use_cache": False,
    "_name_or_path": "/home/me/llama", "quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "num_train_epochs": 3, "max_steps": -1, "bf16": True,
    "fp16": False, "gradient_checkpointing": True, "optim": "paged_adamw_32bit", "output_dir": "out", "eval_strategy": "no",
    "peft_config": {"default": {"peft_type": "LORA", "r": 64, "lora_alpha": 16, "lora_dropout": 0.1,
                                "target_modules": ["q_proj", "v_proj"]}},
    "model/num_parameters": 6771970048,
}  # fmt: skip


@pytest.mark.parametrize("form", ["wrapped-yaml", "wrapped-json", "flat-json"])
def test_wandb_run(form: str, tmp_path: Path) -> None:
    wrapped = {name: {"desc": None, "value": value} for name, value in WANDB_RUN.items()} | {"wandb_version": 1}
    config = WANDB_RUN if form == "flat-json" else wrapped
    path = tmp_path / ("config.yaml" if form == "wrapped-yaml" else "config.json")
    path.write_text(json.dumps(config))  # JSON is YAML
    (tmp_path / "wandb-metadata.json").write_text(json.dumps({"gpu": "NVIDIA A40", "gpu_count": 2}))
    imported = import_config(path)
    assert (imported.tool, imported.unknown) == ("wandb", ())
    model = imported.fields["model"]
    assert (model["hidden_size"], "quantization_config" in model, "output_dir" in model) == (4096, False, False)
    expected = {
        "framework": "transformers",
        "framework_version": "4.46.0",
        "gpu": "NVIDIA A40",
        "num_gpus": 2,
        "method": "qlora",
        "quantization": "nf4",
        "lora_r": 64,
        "lora_target_modules": ("q_proj", "v_proj"),
        "dtype": "float16",
        "bf16": True,
        "per_device_train_batch_size": 2,
        "optim": "paged_adamw_32bit",
        "max_length": None,  # 20 is of generation
        "max_steps": None,
    }
    assert {name: imported.fields.get(name) for name in expected} == expected
    answer = estimate({**imported.fields, "max_length": 512, "lengths": {"fixed": 512}})
    assert answer.num_params == 6_738_415_616


def test_wandb_run_of_trl_takes_its_max_length() -> None:
    imported = import_mapping({**WANDB_RUN, "max_length": 2048, "packing": True, "dataset_text_field": "text"})
    assert (imported.fields["framework"], imported.fields["max_length"], imported.fields["packing"]) == ("trl", 2048, True)


def test_a_base_stored_in_a_way_that_is_not_modelled_is_said(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    imported = import_config(tmp_path)
    assert "quantization" not in imported.fields
    assert imported.warnings[0].startswith(
        "quantization_config: gptq in 8 bits is not modelled; the base is counted unquantised"
    )


def test_wandb_run_keeps_its_attention() -> None:
    imported = import_mapping({**WANDB_RUN, "_attn_implementation": "flash_attention_3"})
    assert imported.fields["attn_implementation"] == "flash_attention_3"


def test_keys_of_no_tool_are_answered_with_the_nearest_fields() -> None:
    with pytest.raises(CostModelError, match="these keys: modle; nearest fields of a job: model; known are"):
        import_mapping({"modle": "x"})


# --- safety


def test_yaml_tags_build_nothing(tmp_path: Path) -> None:
    text = f"base_model: !!python/object/apply:pathlib.Path.touch [{tmp_path}/made]\n"
    with pytest.raises(CostModelError, match="is not valid YAML"):
        import_config(_write(tmp_path, "bad.yaml", text))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [" + ",".join([f"*{chr(97 + i)}"] * 10) + "]\n" for i in range(8)
        ),
        "base_model: &a [*a]\n",
    ],
    ids=["a-billion", "itself"],
)  # fmt: skip
def test_yaml_that_stands_for_too_much_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(CostModelError, match=r"stands for more than 200,000 values|is not valid YAML"):
        import_config(_write(tmp_path, "bomb.yaml", text))


def test_large_files_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path, "large.yaml", "#" * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(CostModelError, match=r"large\.yaml is larger than 10 MB"):
        import_config(path)


def test_paths_in_messages_are_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("base_model: m\nmicro_batch_size: many\n")
    with pytest.raises(CostModelError) as caught:
        import_config("a.yaml")
    assert str(caught.value).startswith("a.yaml: micro_batch_size: must be a valid integer")
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"base_model": "m", "sample_packing": "perhaps"}, "c.yaml: sample_packing must be true or false, got 'perhaps'"),
        ({"base_model": "m", "max_steps": "many"}, "c.yaml: max_steps must be a number, got 'many'"),
        ({"stage": "sft", "model_name_or_path": "m", "cutoff_len": 0}, "c.yaml: cutoff_len: "),
        ({"model_name_or_path": "m", "eval_strategy": "weekly"}, "c.yaml: eval_strategy: "),
    ],
)
def test_wrong_values_name_the_key_that_was_written(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CostModelError) as caught:
        import_mapping(config, "c.yaml")
    assert str(caught.value).startswith(message)


KNOWN_KEYS = {
    "axolotl": sorted(axolotl.UNDERSTOOD | set(axolotl.NOT_MODELLED)),
    "llamafactory": sorted(llamafactory.UNDERSTOOD | set(llamafactory.NOT_MODELLED)),
    "trl": sorted(trl.UNDERSTOOD | set(trl.NOT_MODELLED)),
    "wandb": sorted(trl.UNDERSTOOD | {"peft_config", "quantization_config", "transformers_version", "torch_dtype"}),
}
BASES = {
    "axolotl": {"base_model": "m"},
    "llamafactory": {"stage": "sft", "model_name_or_path": "m"},
    "trl": {"model_name_or_path": "m"},
    "wandb": {"model_type": "llama", "hidden_size": 64, "per_device_train_batch_size": 2, "_wandb": {}},
}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(
        ["", "auto", "no", "steps", "fp32", "all-linear", "q_proj,v_proj", "x*", "4", "1e9", "-1", "zero3", "full"]
    ),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.sampled_from(["r", "stage", "dtype", "bits"]), values),
    max_leaves=4,
)  # fmt: skip


@pytest.mark.parametrize("tool", KNOWN_KEYS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_value_of_any_key_is_read_or_refused(tool: str, data: st.DataObject) -> None:
    """Never another error than the one that names the file and the key."""
    config = data.draw(st.dictionaries(st.sampled_from(KNOWN_KEYS[tool]), JSON_VALUES, max_size=4))
    try:
        imported = import_mapping({**BASES[tool], **config}, "c.yaml")
    except CostModelError as error:
        refusal: str | None = str(error)
    else:
        refusal = None
        assert set(imported.origins) == set(imported.read_fields)
    assert refusal is None or "c.yaml" in refusal


def test_deepspeed_file_beside_the_config_is_read(tmp_path: Path) -> None:
    zero = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    (tmp_path / "ds.json").write_text(json.dumps(zero))
    path = _write(tmp_path, "c.yaml", "base_model: m\ndeepspeed: ds.json\n")
    assert import_config(path).fields["deepspeed"] == zero


@pytest.mark.parametrize(
    ("fsdp", "config", "words"),
    [
        ("full_shard auto_wrap", None, "full_shard auto_wrap"),
        (["full_shard", "offload"], {}, "full_shard offload"),
        (True, {"reshard_after_forward": False}, "shard_grad_op"),
        (["auto_wrap"], {"fsdp_sharding_strategy": "HYBRID_SHARD"}, "hybrid_shard auto_wrap"),
        ("", {}, None),
        (None, None, None),
        (False, {"fsdp_offload_params": True}, "full_shard offload"),
    ],
)
def test_fsdp_in_one_spelling(fsdp: Any, config: Any, words: str | None) -> None:
    assert fsdp_words(fsdp, config) == words


# --- the command line


def test_estimate_explains_every_value(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("FTCOST_USD_PER_GPU_HOUR", "0.79")
    monkeypatch.chdir(tmp_path)
    _write(tmp_path, "q.yml", AXOLOTL_QLORA.replace("NousResearch/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf") + "sead: 1\n")
    line = "estimate q.yml -g A40 -b 1 --samples 2000 --lengths mean:250,max:900 --explain --json"
    assert cli.run(line.split()) == 0
    answer = json.loads(capsys.readouterr().out)
    values = answer["explain"]["values"]
    assert set(values) == {*answer["job"], "usd_per_gpu_hour"}
    assert values["per_device_train_batch_size"] == {"value": 1, "from": "flag --per-device-train-batch-size"}
    assert values["gradient_accumulation_steps"] == {"value": 4, "from": "gradient_accumulation_steps in q.yml"}
    assert values["double_quant"]["from"] == "default of axolotl 0.19.0 (loaders/model.py: bnb_4bit_use_double_quant)"
    assert values["torch_compile"]["from"] == "default of axolotl 0.19.0 over transformers 5.24"
    assert values["usd_per_gpu_hour"] == {"value": 0.79, "from": "environment variable FTCOST_USD_PER_GPU_HOUR"}
    assert answer["explain"]["keys"]["unknown"] == ["sead"]
    assert answer["warnings"][0] == "1 key of q.yml is not known and not used: sead"
    assert "double_quant" in answer["assumed"]


def test_explain_as_text_and_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    _write(tmp_path, "job.json", json.dumps({"model": "meta-llama/Llama-2-7b-hf", "max_length": 512, "gpu": "A40"}))
    assert cli.run(["estimate", "job.json", "--method", "lora", "--explain"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "max_length 512 max_length in job.json" in lines
    assert "method lora flag --method" in lines
    assert "Keys of job.json, read as job file" in lines
    assert cli.run(["estimate", "job.json", "--method", "lora", "--explain", "--markdown"]) == 0
    assert "| max_length | 512 | max_length in job.json |" in capsys.readouterr().out


def test_compare_reads_other_tools_and_says_what_it_did_not_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = AXOLOTL_QLORA.replace("NousResearch/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf") + "sead: 1\n"
    path = _write(tmp_path, "q.yml", text)
    assert cli.run(["compare", path, "--gpus", "A40", "--lengths", "fixed:300", "--samples", "100"]) == 0
    assert "is not known and not used: sead" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tool", "line", "message"),
    [
        ("axolotl", "fsdp: 7", "fsdp: must be true, false, words or a list of words, got 7"),
        ("axolotl", "fsdp_config: 3", "fsdp_config must be a mapping, got 3"),
        ("axolotl", "bf16: sometimes", "bf16 must be true or false, got 'sometimes'"),
        ("axolotl", "val_set_size: -3", "val_set_size must be at least 0, got -3"),
        ("axolotl", "val_set_size: .inf", "val_set_size must be a number, got inf"),
        ("axolotl", "model_config: 3", "model_config must be a mapping, got 3"),
        ("axolotl", "gradient_checkpointing_kwargs: 5", "gradient_checkpointing_kwargs must be a mapping, got 5"),
        ("axolotl", "bnb_config_kwargs: [1]", "bnb_config_kwargs must be a mapping"),
        ("trl", "gradient_checkpointing_kwargs: 5", "gradient_checkpointing_kwargs must be a mapping, got 5"),
        ("trl", "model_init_kwargs: 5", "model_init_kwargs must be a mapping, got 5"),
        ("trl", "eval_steps: -1", "eval_steps must be at least 0, got -1"),
        ("trl", "fsdp: 7", "fsdp: must be true, false, words"),
        ("trl", "fsdp_config: 7", "fsdp_config must be a mapping"),
        ("trl", "test_split_size: -0.1", "test_split_size must be at least 0"),
        ("trl", "{eval_strategy: steps, eval_steps: 0, logging_steps: 0}", "needs an eval_steps or logging_steps above 0"),
        ("llamafactory", "max_samples: -5", "max_samples must be at least 0, got -5"),
        ("llamafactory", "val_size: -5", "val_size must be at least 0"),
    ],
)
def test_nonsense_is_refused_with_its_key(tool: str, line: str, message: str) -> None:
    import yaml

    start = {
        "axolotl": {"base_model": "meta-llama/Llama-2-7b-hf", "adapter": "qlora", "micro_batch_size": 1},
        "trl": {"model_name_or_path": "meta-llama/Llama-2-7b-hf", "max_length": 512, "output_dir": "o"},
        "llamafactory": {"model_name_or_path": "meta-llama/Llama-2-7b-hf", "stage": "sft", "finetuning_type": "lora"},
    }[tool]
    with pytest.raises(CostModelError, match=f"the configuration: .*{re.escape(message)}"):
        import_mapping({**start, **yaml.safe_load(line)})


def test_a_limit_of_samples_is_offered_where_their_number_is_not_known(tmp_path) -> None:
    path = tmp_path / "lf.yaml"
    text = "model_name_or_path: meta-llama/Llama-2-7b-hf\nstage: sft\nfinetuning_type: lora\nmax_samples: 1000\n"
    path.write_text(text + "dataset: mine\n")
    offered = [each for each in read_job(str(path), {}).warnings if "--num-samples 1000 " in each]
    assert len(offered) == 1
    assert "takes 1,000 samples at most" in offered[0]
    path.write_text(text + "dataset: one,two\n")
    assert any("--num-samples 2000 " in each for each in read_job(str(path), {}).warnings)
    for flags in ({"num_samples": 500}, {"max_steps": 10}):
        assert not any("--num-samples" in each for each in read_job(str(path), flags).warnings)


def test_what_a_tool_does_with_a_data_set_waits_for_one() -> None:
    start = {"model_name_or_path": "meta-llama/Llama-2-7b-hf", "stage": "sft", "finetuning_type": "lora"}
    sentence = import_mapping({**start, "max_samples": 1000, "val_size": 0.1}, "lf.yaml").waits_for_dataset
    assert sentence is not None
    assert sentence.startswith("max_samples and val_size in lf.yaml: needs the data set itself (--dataset)")
    assert import_mapping(start, "lf.yaml").waits_for_dataset is None
    axolotl = {"base_model": "meta-llama/Llama-2-7b-hf", "micro_batch_size": 1, "val_set_size": 0.1}
    assert str(import_mapping(axolotl).waits_for_dataset).startswith("val_set_size in the configuration")


def test_mappings_may_be_json_text_as_on_a_command_line() -> None:
    config = {"model_name_or_path": "m/m", "max_length": 512, "gradient_checkpointing_kwargs": '{"use_reentrant": false}'}
    assert import_mapping(config).fields["gradient_checkpointing_kwargs"] == {"use_reentrant": False}


def test_no_eval_steps_means_logging_steps_as_in_the_trainer() -> None:
    # TrainingArguments.__post_init__, transformers 5.24: eval_steps of 0 falls back to logging_steps.
    config = {"model_name_or_path": "m/m", "max_length": 9, "eval_strategy": "steps", "eval_steps": 0, "logging_steps": 50}
    imported = import_mapping(config)
    assert imported.fields["eval_steps"] == 50
    assert any(warning.startswith("eval_steps: 0 counts as not said") for warning in imported.warnings)


def test_a_warning_that_quotes_the_file_is_one_line_for_a_terminal() -> None:
    text = "a\x1b[31m\nb" + "c" * 5000
    config = {"base_model": "meta-llama/Llama-2-7b-hf", "micro_batch_size": 1, "adapter": text}
    (warning,) = import_mapping(config).warnings
    assert warning.startswith("adapter: a\\x1b[31m bccc")
    assert len(warning) == 2000
    unmodelled = import_mapping({**config, "adapter": None, "rl": text}).unmodelled
    assert "(rl: a\\x1b[31m\\nbccc" in unmodelled
    assert unmodelled.isprintable()
    assert len(unmodelled) < 600
