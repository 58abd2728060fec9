"""What a job means whose framework is named and whose settings are not: the framework's own defaults."""

from __future__ import annotations

from typing import Any

import pytest

from costmodel.defaults import resolve
from costmodel.errors import CostModelError
from costmodel.estimation import estimate
from costmodel.framework_defaults import peft_targets
from costmodel.hf_config import model_spec_from_config
from costmodel.importers import import_config
from costmodel.model_catalog import find_model_config, list_models
from costmodel.report import does_not_fit_sentence
from costmodel.specs import parse_job
from costmodel.units import GIB, GIGA

LLAMA = "meta-llama/Llama-2-7b-hf"


def resolved(**fields: Any) -> Any:
    fields = {"model": LLAMA, "max_length": 1024, **fields}
    model = model_spec_from_config(find_model_config(fields["model"]), name=fields["model"])
    return resolve(parse_job(fields), model)[0]


def test_peft_targets_are_those_of_peft() -> None:
    """Of every catalogued family, and of the multimodal classes."""
    constants = pytest.importorskip("peft.utils.constants")
    table = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    families = {model_spec_from_config(find_model_config(each), name=each).family for each in list_models()}
    for family in families | {"gemma3", "gemma4", "llama4", "mistral3", "qwen3_5", "qwen3_5_moe"}:
        real = table.get(family)
        assert peft_targets(family) == (tuple(real) if isinstance(real, list) else real), family


@pytest.mark.parametrize(
    ("model", "targets", "trainable"),
    [
        # r 8: layers x 8 x (inputs + outputs) of each target
        ("tiiuae/falcon-7b", ("query_key_value",), 32 * 8 * (4544 + 4672)),
        ("openai-community/gpt2", ("c_attn",), 12 * 8 * (768 + 2304)),
        ("microsoft/phi-2", ("q_proj", "v_proj", "fc1", "fc2"), 32 * 8 * (2 * (2560 + 2560) + 2 * (2560 + 10_240))),
        (LLAMA, ("q_proj", "v_proj"), 4_194_304),
    ],
)
def test_lora_without_targets_is_pefts(model: str, targets: tuple[str, ...], trainable: int) -> None:
    answer = estimate(model=model, method="lora", max_length=512)
    assert tuple(answer.job["lora_target_modules"]) == targets
    assert answer.num_trainable_params == trainable


def test_families_without_pefts_default_are_asked_for_targets() -> None:
    words = r"peft has no default for phi3 .* give all-linear, or some of its linears: .*qkv"
    with pytest.raises(CostModelError, match=words):
        estimate(model="microsoft/Phi-3-mini-4k-instruct", method="lora", max_length=512)
    # LLaMA-Factory names its own
    assert estimate(
        model="microsoft/Phi-3-mini-4k-instruct", method="lora", framework="llamafactory"
    ).num_trainable_params == pytest.approx(12.6e6, rel=0.01)


def test_litgpt_is_neither_checkpointed_nor_prepared_by_peft() -> None:
    """Its resource table: Llama-2-7B, bnb.nf4, LoRA on query and value, 1,304 tokens took 14.14 GB allocated (litgpt 2023).

    With peft's defaults in place of litgpt's own (fp32 for what is not quantised, checkpointing) it came out at 6.1 GB.
    """
    answer = estimate(
        model=LLAMA,
        gpu="A100-SXM4-40GB",
        method="qlora",
        lora_target_modules=["q_proj", "v_proj"],
        per_device_train_batch_size=1,
        max_length=1304,
        framework="litgpt",
        framework_version="0.1",
    )
    assert answer.job["gradient_checkpointing"] is False
    assert answer.job["prepare_model_for_kbit_training"] is False
    assert answer.job["dtype"] == answer.job["adapter_dtype"] == "bfloat16"
    assert answer.memory.peak_allocated_bytes == pytest.approx(14.14 * GIGA, rel=0.06)


def test_litgpts_own_precision_is_mixed() -> None:
    job = resolved(framework="litgpt", method="lora")
    assert (job.dtype, job.autocast_dtype, job.adapter_dtype) == ("float32", "bfloat16", "float32")
    assert resolved(framework="litgpt", method="lora", dtype="bfloat16").autocast_dtype is None  # bf16-true


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_llamafactory_by_hand_is_llamafactory_from_its_file(method: str, tmp_path: Any) -> None:
    """The same job typed as fields and read from a YAML means the same settings."""
    text = f"stage: sft\nmodel_name_or_path: {LLAMA}\ntemplate: llama2\nbf16: true\n"
    text += f"finetuning_type: {'full' if method == 'full' else 'lora'}\n"
    text += "quantization_bit: 4\n" if method == "qlora" else ""
    path = tmp_path / "sft.yaml"
    path.write_text(text)
    from_file = estimate(import_config(path).job).job
    by_hand = estimate(model=LLAMA, method=method, bf16=True, framework="llamafactory").job
    assert {name for name in by_hand if by_hand[name] != from_file.get(name)} == set()


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
@pytest.mark.parametrize("model", [LLAMA, "mistralai/Mixtral-8x7B-v0.1"])
def test_axolotl_by_hand_is_axolotl_from_its_file(model: str, method: str, packing: bool, tmp_path: Any) -> None:
    text = f"base_model: {model}\n" + ("sample_packing: true\n" if packing else "")
    text += "" if method == "full" else f"adapter: {method}\nlora_target_modules: [q_proj, v_proj]\n"
    path = tmp_path / "axolotl.yaml"
    path.write_text(text)
    from_file = estimate(import_config(path).job).job
    targets = {} if method == "full" else {"lora_target_modules": ["q_proj", "v_proj"]}
    by_hand = estimate(model=model, method=method, packing=packing, framework="axolotl", **targets).job
    assert {name for name in by_hand if by_hand[name] != from_file.get(name)} == set()
    assert by_hand["save_strategy"] == "epoch"


def test_axolotl_computes_in_what_the_card_has() -> None:
    fields: dict[str, Any] = {"model": "meta-llama/Llama-3.2-3B", "method": "lora", "framework": "axolotl"}
    kinds = {gpu: estimate(fields, gpu=gpu).job for gpu in ("T4", "L4")}
    assert {gpu: (job["dtype"], job["fp16"], job["bf16"]) for gpu, job in kinds.items()} == {
        "T4": ("float16", True, False),
        "L4": ("bfloat16", False, True),
    }
    assert estimate(fields, gpu="L4", bf16=False).job["dtype"] == "float32"


def test_llamafactory_fits_the_card_it_is_measured_on() -> None:
    """Its benchmark with Unsloth: Llama-2-7B, bf16 LoRA r 8, batch 4, 1,024 tokens took 17 GB with FlashAttention 2.

    Checkpointing, which it turns on by itself, is what keeps it there: without, 34 GiB.
    """
    answer = estimate(
        model=LLAMA,
        gpu="A100-SXM4-40GB",
        method="lora",
        lora_r=8,
        bf16=True,
        per_device_train_batch_size=4,
        max_length=1024,
        attn_implementation="flash_attention_2",
        framework="llamafactory",
    )
    assert answer.job["gradient_checkpointing"] is True
    assert 14 * GIB < answer.memory.peak_reserved_bytes < 20 * GIB


def test_unsloth_checkpoints_and_lifts_nothing() -> None:
    job = resolved(framework="unsloth", method="qlora")
    assert job.gradient_checkpointing
    assert not job.prepare_model_for_kbit_training
    assert (job.dtype, job.autocast_dtype) == ("bfloat16", "bfloat16")
    assert (job.per_device_train_batch_size, job.gradient_accumulation_steps) == (4, 2)
    assert (job.lora_r, len(job.lora_target_modules)) == (16, 7)
    assert resolved(framework="unsloth", method="qlora", fp16=True).dtype == "float16"


def test_unsloth_fuses_the_loss_and_offloads_long_rows() -> None:
    """models/llama.py: unsloth_fused_ce_loss; models/_utils.py: "unsloth" checkpointing offloads from 512 tokens on."""
    job = resolved(framework="unsloth", method="qlora")
    assert (job.fused_loss, job.activation_offloading) == ("fused", True)
    assert not resolved(framework="unsloth", method="qlora", max_length=511).activation_offloading
    assert not resolved(framework="unsloth", method="qlora", gradient_checkpointing=False).activation_offloading
    for framework in ("transformers", "llamafactory", "litgpt"):
        plain = resolved(framework=framework, method="qlora", max_length=2048)
        assert (plain.fused_loss, plain.activation_offloading) == (None, False)


@pytest.mark.parametrize(
    ("gib", "length"), [(8, 2972), (12, 21_848), (16, 40_724), (24, 78_475), (40, 153_977), (48, 191_728), (80, 342_733)]
)
def test_unsloths_longest_contexts_are_inside_the_interval(gib: int, length: int) -> None:
    """Its README, Llama 3.1 8B, QLoRA r 32 on all linears, one row (accuracy/data/unsloth_readme.csv, rows 035 to 047).

    Without its own loss and its offloading the answer for 21,848 tokens was 55 GiB, and 28 at the low end.
    """
    memory = estimate(
        model="meta-llama/Llama-3.1-8B",
        framework="unsloth",
        method="qlora",
        lora_r=32,
        per_device_train_batch_size=1,
        max_length=length,
        attn_implementation="flash_attention_2",
    ).memory
    assert memory.peak_device_bytes_low is not None
    assert memory.peak_device_bytes_high is not None
    assert memory.peak_device_bytes_low < gib * GIB < memory.peak_device_bytes_high


def test_an_evaluation_under_unsloth_builds_no_logits() -> None:
    fields = {"model": "meta-llama/Llama-3.1-8B", "framework": "unsloth", "method": "qlora", "per_device_eval_batch_size": 8}
    fields |= {"per_device_train_batch_size": 1, "max_length": 2048, "eval_strategy": "epoch"}
    logits = 10 * 8 * 2048 * 128_256
    fused, stock = estimate(fields).memory, estimate(fields, fused_loss=None, framework="transformers", bf16=True).memory
    assert fused.peak_device_bytes < 12 * GIB
    assert stock.peak_device_bytes > logits


def test_unsloth_computes_in_what_the_card_has() -> None:
    """Its notebooks on a free T4 name no type: models/rl.py turns fp16 on where the card has no bf16."""
    fields: dict[str, Any] = {"model": "meta-llama/Llama-3.2-3B", "method": "qlora", "framework": "unsloth"}
    fields["lengths"] = {"fixed": 1024}
    answers = {gpu: estimate(fields, gpu=gpu) for gpu in ("T4", "L4")}
    kinds = {gpu: (each.job["dtype"], each.job["fp16"], each.job["bf16"]) for gpu, each in answers.items()}
    assert kinds == {"T4": ("float16", True, False), "L4": ("bfloat16", False, True)}
    assert all(each.step_seconds is not None for each in answers.values())
    assert estimate(fields, gpu="T4", bf16=True).step_seconds is None  # said


def test_litgpt_adapts_the_projection_that_a_family_has_fused() -> None:
    """finetune/lora.py: lora_query and lora_value are parts of ``attn.qkv``, whatever peft knows of the family."""
    fused = {"microsoft/Phi-3-mini-4k-instruct": "qkv_proj", "Qwen/Qwen-7B": "c_attn", "tiiuae/falcon-7b": "query_key_value"}
    for model, name in fused.items():
        assert resolved(framework="litgpt", model=model, method="lora").lora_target_modules == (name,)
    for framework, who in (("torchtune", "none is known for phi3"), ("trl", "peft has no default for phi3")):
        with pytest.raises(CostModelError, match=f"lora_target_modules is required: {who}"):
            resolved(framework=framework, model="microsoft/Phi-3-mini-4k-instruct", method="lora")


@pytest.mark.parametrize("framework", ["axolotl", "llamafactory", "litgpt", "unsloth"])
def test_what_is_said_goes_before_the_frameworks_own(framework: str) -> None:
    said = {
        "gradient_checkpointing": framework in ("litgpt", "axolotl"),
        "prepare_model_for_kbit_training": True,
        "dtype": "float16",
        "lora_r": 3,
        "lora_alpha": 5.0,
        "lora_dropout": 0.2,
        "lora_target_modules": ("o_proj",),
        "optim": "sgd",
        "per_device_train_batch_size": 7,
        "gradient_accumulation_steps": 3,
        "max_length": 777,
        "fused_loss": "chunked",
        "activation_offloading": framework != "unsloth",
    }
    job = resolved(framework=framework, method="qlora", **said)
    assert {name: getattr(job, name) for name in said} == said


@pytest.mark.parametrize(("num_gpus", "batch", "accumulation"), [(1, None, 16), (1, 4, 4), (4, None, 4), (4, 8, 1)])
def test_litgpt_accumulates_to_sixteen_samples_of_all_devices(num_gpus: int, batch: int | None, accumulation: int) -> None:
    job = resolved(framework="litgpt", max_length=512, num_gpus=num_gpus, per_device_train_batch_size=batch)
    assert (job.per_device_train_batch_size, job.gradient_accumulation_steps) == (batch or 1, accumulation)
    assert job.num_train_epochs == 5


def test_unsloth_quantises_the_scales_too() -> None:
    assert resolved(framework="unsloth", method="qlora").double_quant
    assert not resolved(framework="unsloth", method="qlora", double_quant=False).double_quant


def test_a_framework_without_a_length_is_named() -> None:
    with pytest.raises(CostModelError, match="max_length is required: litgpt has no default"):
        resolved(framework="litgpt", max_length=None)


@pytest.mark.parametrize(
    ("framework", "before", "after"),
    [("llamafactory", "0.9.4", "0.9.5"), ("axolotl", "0.13.2", "0.14.0"), ("trl", "0.24", "1.0")],
)
def test_a_framework_stands_on_the_transformers_that_it_pins(framework: str, before: str, after: str) -> None:
    """Mixtral in 4 bit: transformers 4 quantises each expert's linears, 5 leaves the stacks in 16 bit."""
    fields: dict[str, Any] = {"model": "mistralai/Mixtral-8x7B-v0.1", "method": "qlora", "framework": framework}
    fields |= {"dtype": "bfloat16", "prepare_model_for_kbit_training": False, "gpu": "RTX A6000", "max_length": 512}
    fields |= {"gradient_checkpointing": True, "per_device_train_batch_size": 1}
    old, new = (estimate(fields, framework_version=version) for version in (before, after))
    assert old.memory.weights_bytes < 27 * GIGA
    assert new.memory.weights_bytes > 85 * GIGA
    assert (old.verdict, new.verdict) == ("fits", "does_not_fit")
    assert f"with {framework} " in does_not_fit_sentence(new)
    assert "transformers 4" in does_not_fit_sentence(new)
    # a framework that names no version is taken as new
    assert estimate(fields).memory.weights_bytes == new.memory.weights_bytes


def test_an_older_stack_is_named_with_the_defaults() -> None:
    fields = {"model": LLAMA, "max_length": 512, "framework": "llamafactory"}
    assert estimate(fields, framework_version="0.9.3").defaults_of == (
        "llamafactory 0.9.5 over transformers 4 (for llamafactory 0.9.3)"
    )
