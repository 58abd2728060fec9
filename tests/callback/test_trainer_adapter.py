"""Real Trainers, real adapters, real data sets -> the job, the counts and the device."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset as TorchDataset

from costmodel.errors import CostModelError
from costmodel.gpu_catalog import find_gpu
from costmodel.specs import parse_job
from ftcost_callback.dataset_lengths import dataset_lengths, num_documents, row_lengths
from ftcost_callback.live_device import recognise_gpu
from ftcost_callback.live_model import logical_numel, method_fields, quantization_fields, weights_dtype_fields
from ftcost_callback.trainer_adapter import device_facts, estimate_trainer, job_from_objects, model_facts, versions

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ROWS = [{"input_ids": [1] * length, "labels": [-100] * 4 + [1] * (length - 4)} for length in range(5, 25)]


def llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | changes))


def mixtral(**changes: Any) -> Any:
    config = transformers.MixtralConfig(**SMALL | {"num_local_experts": 8, "num_experts_per_tok": 2} | changes)
    return transformers.MixtralForCausalLM(config)


def arguments(tmp_path: Path, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(**fields | changes)


def sft_trainer(tmp_path: Path, rows: Any, *, eval_rows: Any = None, peft_config: Any = None, **changes: Any) -> Any:
    """TRL's trainer of a tiny model, with one row a batch."""
    trl = pytest.importorskip("trl")
    fields: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 1,
        "packing": True,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "num_train_epochs": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return trl.SFTTrainer(
        model=llama(),
        args=trl.SFTConfig(**fields | changes),
        train_dataset=rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<unk>": 1, "<eos>": 2} | {f"w{index}": index + 3 for index in range(60)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )


# --- the job ----------------------------------------------------------------------------------------------------------


def test_full_fine_tuning_with_a_plain_trainer(tmp_path: Path) -> None:
    args = arguments(
        tmp_path,
        max_steps=-1,
        num_train_epochs=2,
        gradient_accumulation_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=5,
        save_strategy="steps",
        save_steps=7,
        bf16=True,
    )
    trainer = transformers.Trainer(model=llama(), args=args, train_dataset=ROWS, eval_dataset=ROWS[:6])
    job = job_from_objects(
        model=trainer.model,
        args=args,
        state=trainer.state,
        train_dataset=trainer.train_dataset,
        eval_dataset=trainer.eval_dataset,
    )
    config = job.pop("model")
    assert (config["model_type"], config["hidden_size"]) == ("llama", 32)
    assert job == {
        "num_gpus": 1,
        "method": "full",
        "dtype": "float32",
        "framework": "transformers",
        "framework_version": transformers.__version__,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "bf16": True,
        "fp16": False,
        "attn_implementation": "sdpa",
        "torch_compile": False,
        "use_liger_kernel": False,
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 5,
        "num_eval_samples": 6,
        "save_strategy": "steps",
        "save_steps": 7,
        "save_only_model": False,
        "num_train_epochs": 2.0,
        "max_length": 24,
        "train_sampling_strategy": "random",
        "lengths": {"histogram": dict.fromkeys(range(5, 25), 1)},
        "num_samples": 20,
        "supervised_fraction": pytest.approx((290 - 80) / 290),
    }
    parse_job({"model": config, **job})


def test_lora_on_experts_with_checkpointing_and_the_live_optimizer(tmp_path: Path) -> None:
    model = peft.get_peft_model(
        mixtral(),
        peft.LoraConfig(
            r=4,
            lora_alpha=12,
            lora_dropout=0.0,
            use_rslora=True,
            target_modules=["v_proj", "q_proj"],
            target_parameters=["mlp.experts.gate_up_proj"],
            modules_to_save=["lm_head"],
        ),
    )
    model.set_attn_implementation("eager")
    args = arguments(
        tmp_path,
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": False},
        train_sampling_strategy="group_by_length",
    )
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=ROWS,
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer(), pad_to_multiple_of=8),
    )
    trainer.optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # reading must not go through deprecated names
        job = job_from_objects(
            model=trainer.model,
            args=args,
            optimizer=trainer.optimizer,
            state=trainer.state,
            train_dataset=ROWS,
            data_collator=trainer.data_collator,
        )
    expected = {
        "method": "lora",
        "lora_r": 4,
        "lora_alpha": 12,
        "lora_dropout": 0.0,
        "use_dora": False,
        "use_rslora": True,
        "lora_target_modules": ["q_proj", "v_proj"],
        "lora_target_parameters": ["mlp.experts.gate_up_proj"],
        "lora_modules_to_save": ["lm_head"],
        "adapter_dtype": "float32",
        "attn_implementation": "eager",
        "experts_implementation": "grouped_mm",
        "optim": "adamw_torch",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "train_sampling_strategy": "group_by_length",
        "padding": "longest",
        "pad_to_multiple_of": 8,
        "max_steps": 3,
    }
    assert {name: job.get(name) for name in expected} == expected
    parse_job(job)


def test_checkpointing_and_batch_are_those_of_the_running_training(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Look(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **live: Any) -> None:
            seen.append(
                job_from_objects(
                    model=live["model"],
                    args=args,
                    optimizer=live["optimizer"],
                    state=state,
                    train_dataset=live["train_dataloader"].dataset,
                )
            )

    args = arguments(tmp_path, max_steps=1, activation_checkpointing=True)
    model = llama()
    transformers.Trainer(model=model, args=args, train_dataset=ROWS[:1] * 8, callbacks=[Look()]).train()
    (job,) = seen
    assert job["optim"] == "adamw_torch_fused"
    assert job["gradient_checkpointing"] is True
    assert job["gradient_checkpointing_kwargs"] in ({"use_reentrant": False}, {"use_reentrant": True}, None)
    args.per_device_train_batch_size = 99  # what auto_find_batch_size leaves behind
    live = job_from_objects(model=model, args=args, state=SimpleNamespace(train_batch_size=5))
    assert live["per_device_train_batch_size"] == 5


def test_an_sft_trainer_with_packing_and_lora(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(
        [
            {"prompt": "w1 w2 w3", "completion": " " + " ".join(f"w{index}" for index in range(length))}
            for length in range(4, 34)
        ]
    )
    trainer = sft_trainer(tmp_path, rows, max_length=64, peft_config=peft.LoraConfig(r=8, target_modules="all-linear"))
    job = job_from_objects(
        model=trainer.model,
        args=trainer.args,
        state=trainer.state,
        train_dataset=trainer.train_dataset,
        data_collator=trainer.data_collator,
    )
    assert job["framework"] == "trl"
    assert (job["packing"], job["padding_free"], job["max_length"], job["loss_type"]) == (True, True, 64, "nll")
    assert job["gradient_checkpointing"] is True  # TRL's default
    assert job["lora_target_modules"] == [
        *("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"),
        *("self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj"),
    ]
    # Documents, not packed rows: 3 prompt words + the completion + the end.
    assert job["num_samples"] == 30
    assert job["lengths"]["histogram"] == dict.fromkeys(range(8, 38), 1)
    words = sum(range(4, 34))
    assert job["supervised_fraction"] == pytest.approx((words + 30) / (words + 30 + 90))
    estimate = estimate_trainer(trainer, gpu="NVIDIA A40", usd_per_gpu_hour=0.79)
    assert estimate.num_trainable_params == model_facts(trainer.model)["num_trainable_params"]


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
@pytest.mark.parametrize("tokens", [range(20, 21), range(4, 60)], ids=["one-length", "mixed"])
def test_the_packed_rows_of_a_trainer_are_predicted(tokens: range, strategy: str, tmp_path: Path) -> None:
    """Samples of 20 tokens fill rows of 50 to 40, not to the brim; rows that are cut anywhere are full."""
    source = random.Random(1)
    rows = datasets.Dataset.from_dict({"input_ids": [[5] * source.choice(tokens) for _ in range(100)]})
    evaluation = {"eval_strategy": "epoch", "per_device_eval_batch_size": 1}
    trainer = sft_trainer(tmp_path, rows, eval_rows={"a": rows}, max_length=50, packing_strategy=strategy, **evaluation)
    packed = [len(row) for row in trainer.train_dataset["input_ids"]]
    answer = estimate_trainer(trainer, gpu="NVIDIA A40")
    assert answer.num_steps == pytest.approx(len(packed), rel=0.02)
    assert answer.num_tokens_per_step == pytest.approx(sum(packed) / len(packed), rel=0.02)
    job = job_from_objects(
        model=trainer.model, args=trainer.args, train_dataset=trainer.train_dataset, eval_dataset=trainer.eval_dataset
    )
    assert job["num_eval_samples"] == job["num_samples"] == (100 if strategy == "bfd" else len(packed))


def test_the_estimate_of_a_trainer(tmp_path: Path) -> None:
    trainer = transformers.Trainer(model=mixtral(), args=arguments(tmp_path), train_dataset=ROWS)
    answer = estimate_trainer(trainer, gpu="NVIDIA A40", usd_per_gpu_hour=0.79).to_dict()
    facts = model_facts(trainer.model)
    assert answer["num_params"] == facts["num_params"]
    assert answer["num_active_params"] == facts["num_active_params"]
    assert answer["num_trainable_params"] == facts["num_trainable_params"]
    assert answer["num_steps"] == 3
    assert answer["total_usd"] > 0
    without_a_gpu = estimate_trainer(trainer).to_dict()
    assert without_a_gpu["step_seconds"] is None
    assert without_a_gpu["memory"]["weights_bytes"] == answer["memory"]["weights_bytes"]


def test_what_is_not_modelled_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    half_frozen = llama()
    half_frozen.model.requires_grad_(False)
    with pytest.raises(CostModelError, match="of the weights are frozen and there is no adapter"):
        job_from_objects(model=half_frozen, args=args)
    with pytest.raises(CostModelError, match="adapters of type IA3 are not modelled"):
        method_fields(peft.get_peft_model(llama(), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])))
    with pytest.raises(CostModelError, match="optimizer Adamax is not modelled"):
        job_from_objects(model=llama(), args=args, optimizer=torch.optim.Adamax([nn.Parameter(torch.zeros(1))]))
    with pytest.raises(CostModelError, match="Linear has no Hugging Face config"):
        job_from_objects(model=nn.Linear(2, 2), args=args)


@pytest.mark.parametrize(("kind", "name"), [("AdamW8bit", "adamw_torch_8bit"), ("AdamW4bit", "adamw_torch_4bit")])
def test_torchaos_optimizers_by_their_class(kind: str, name: str, tmp_path: Path) -> None:
    """As a user brings them: the arguments then name another one. torchao itself is not installed here."""
    optimizer = type(kind, (torch.optim.AdamW,), {"__module__": "torchao.optim.adam"})([nn.Parameter(torch.zeros(1))])
    args = arguments(tmp_path, optim="adamw_torch_fused")
    assert job_from_objects(model=llama(), args=args, optimizer=optimizer, gpu="L4")["optim"] == name


def test_a_loss_of_ones_own_is_no_training_of_another_kind(tmp_path: Path) -> None:
    """Arguments of a user's own class may have a loss_type of any name; the job knows those of fine-tuning."""
    args = arguments(tmp_path)
    for loss, told in (("focal", None), ("dft", "dft"), (["sigmoid"], None)):
        args.loss_type = loss
        assert job_from_objects(model=llama(), args=args, gpu="L4").get("loss_type") == told


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (None, {}),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
            {"quantization": "nf4", "double_quant": True},
        ),
        (transformers.BitsAndBytesConfig(load_in_8bit=True), {"quantization": "int8"}),
        (transformers.BitsAndBytesConfig(load_in_4bit=True), {"quantization": "fp4", "double_quant": False}),
        ({"quant_method": "gptq", "bits": 4}, {"quantization": "gptq-int4"}),
        ({"quant_method": "awq", "bits": 4}, {"quantization": "awq-int4"}),
        (transformers.Mxfp4Config(), {"quantization": "mxfp4"}),
        (transformers.Mxfp4Config(dequantize=True), {}),
    ],
)  # fmt: skip
def test_quantisation(config: Any, fields: dict[str, Any]) -> None:
    model = SimpleNamespace(config=SimpleNamespace(quantization_config=config))
    assert quantization_fields(model) == fields


def test_unknown_quantisation_is_refused() -> None:
    model = SimpleNamespace(config=SimpleNamespace(quantization_config={"quant_method": "hqq"}))
    with pytest.raises(CostModelError, match="quantised with hqq is not modelled"):
        quantization_fields(model)


def test_peft_s_fp32_upcast_is_told_from_an_fp32_model() -> None:
    model = llama(dtype="bfloat16")
    model.config.quantization_config = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert weights_dtype_fields(model.to(torch.float32)) == {
        "dtype": "bfloat16",
        "prepare_model_for_kbit_training": True,
    }
    model.config.dtype = "float32"
    assert weights_dtype_fields(model) == {"dtype": "float32", "prepare_model_for_kbit_training": False}


# --- counts -----------------------------------------------------------------------------------------------------------


class Params4bit(nn.Parameter):
    """bitsandbytes' class as far as counting goes: two weights a byte, the true shape in the quantisation state."""


def packed_linear(rows: int, columns: int, storage: torch.dtype, *, with_state: bool) -> nn.Module:
    module = nn.Module()
    storage_elements = rows * columns // 2 // torch.empty((), dtype=storage).element_size()
    weight = Params4bit(torch.zeros(storage_elements, 1, dtype=storage), requires_grad=False)
    weight.bnb_quantized = True  # type: ignore[attr-defined]
    if with_state:
        weight.quant_state = SimpleNamespace(shape=(rows, columns))  # type: ignore[attr-defined]
    module.weight = weight
    return module


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("with_state", [True, False])
def test_four_bit_weights_count_by_their_true_shape(storage: torch.dtype, with_state: bool) -> None:
    module = packed_linear(64, 32, storage, with_state=with_state)
    assert logical_numel(module.weight) == 64 * 32
    assert model_facts(module)["num_params"] == 64 * 32


def test_sharded_and_packed_buffer_weights() -> None:
    parameter = nn.Parameter(torch.zeros(0))
    parameter.ds_numel = 4096  # type: ignore[attr-defined]
    assert logical_numel(parameter) == 4096
    gptq = nn.Module()
    gptq.config = SimpleNamespace(quantization_config={"quant_method": "gptq", "bits": 4})  # type: ignore[assignment]
    gptq.register_buffer("qweight", torch.zeros(4, 32, dtype=torch.int32))  # 8 weights a number
    assert model_facts(gptq)["num_params"] == 4 * 32 * 8


def test_active_parameters_of_a_mixture_by_direct_sum() -> None:
    model = mixtral()
    expert = 2 * (3 * 32 * 64)  # two layers, one expert: gate, up, down
    everything = sum(parameter.numel() for parameter in model.parameters())
    assert model_facts(model) == {
        "class": "MixtralForCausalLM",
        "model_type": "mixtral",
        "num_params": everything,
        "num_trainable_params": everything,
        "num_active_params": everything - 6 * expert - 128 * 32,  # 2 of 8 experts, no look-up table
    }
    tied = mixtral(tie_word_embeddings=True)
    tied_params = everything - 128 * 32
    assert model_facts(tied)["num_params"] == tied_params
    assert model_facts(tied)["num_active_params"] == tied_params - 6 * expert


def test_active_parameters_count_routed_adapters_by_their_share() -> None:
    model = peft.get_peft_model(
        mixtral(), peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    )
    facts = model_facts(model)
    attention_adapters = 2 * 4 * (32 + 32)
    expert_adapters = 2 * 8 * 4 * (32 + 128)  # two layers, r for each of 8 experts
    assert facts["num_trainable_params"] == attention_adapters + expert_adapters
    assert (
        facts["num_active_params"] == model_facts(mixtral())["num_active_params"] + attention_adapters + expert_adapters // 4
    )


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_lengths_of_a_dataset_and_of_a_list_agree() -> None:
    from_list = dataset_lengths(ROWS)
    assert from_list is not None
    assert from_list == dataset_lengths(datasets.Dataset.from_list(ROWS))
    assert from_list == dataset_lengths(datasets.Dataset.from_list(ROWS).shuffle(seed=1))
    assert (from_list.num_samples, from_list.longest_tokens) == (20, 24)


def test_a_large_dataset_is_sampled_evenly() -> None:
    rows = datasets.Dataset.from_dict({"input_ids": [[0] * (1 + index % 10) for index in range(5000)]})
    found = dataset_lengths(rows, max_rows=1003)
    assert found is not None
    assert sum(found.histogram.values()) == 1003
    assert found.num_samples == 5000
    assert found.supervised_fraction is None
    mean = sum(length * count for length, count in found.histogram.items()) / 1003
    assert mean == pytest.approx(5.5, rel=0.02)


def test_what_would_run_somebody_s_code_is_not_read() -> None:
    class Touchy(TorchDataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 7

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("must not be called")

    assert dataset_lengths(Touchy()) is None
    assert num_documents(Touchy()) == 7
    assert num_documents({"a": Touchy(), "b": ROWS}) == 27
    tokenised_on_the_fly = datasets.Dataset.from_list(ROWS)
    tokenised_on_the_fly.set_transform(lambda batch: 1 / 0)
    assert dataset_lengths(tokenised_on_the_fly) is None
    streamed = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    assert dataset_lengths(streamed) is None
    assert num_documents(streamed) is None
    assert dataset_lengths([{"pixel_values": 1}]) is None
    assert dataset_lengths([]) is None


class LazyRows(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("must not be called")


class LazyRow(dict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        raise AssertionError("must not be called")

    get = __getitem__  # type: ignore[assignment]


class LazyMapping(Mapping[str, Any]):
    def __getitem__(self, name: str) -> Any:
        raise AssertionError("must not be called")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("must not be called")

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize("rows", [LazyRows(ROWS), [LazyRow(ROWS[0])], [LazyMapping()], (LazyMapping(),)])
def test_a_list_or_row_of_the_users_own_kind_is_not_read(rows: Any) -> None:
    assert dataset_lengths(rows) is None
    assert row_lengths(rows) is None
    assert num_documents(rows) == len(rows)


def test_a_tuple_of_rows_is_read_as_a_list_is() -> None:
    assert dataset_lengths(tuple(ROWS)) == dataset_lengths(ROWS)
    assert row_lengths(tuple(ROWS)) == {place: len(row["input_ids"]) for place, row in enumerate(ROWS)}


def test_reading_touches_no_random_state(tmp_path: Path) -> None:
    model, args = mixtral(), arguments(tmp_path)
    rows = datasets.Dataset.from_list(ROWS)
    before = (random.getstate(), torch.random.get_rng_state(), numpy.random.get_state())
    job_from_objects(model=model, args=args, train_dataset=rows)
    model_facts(model)
    device_facts("cpu")
    after = (random.getstate(), torch.random.get_rng_state(), numpy.random.get_state())
    assert before[0] == after[0]
    assert torch.equal(before[1], after[1])
    assert all(numpy.array_equal(first, second) for first, second in zip(before[2], after[2], strict=True))


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "memory_gib", "capability", "product"),
    [
        # What NVML and torch print for each card.
        ("NVIDIA A40", 44.43, "8.6", "NVIDIA A40"),
        ("NVIDIA A100-SXM4-80GB", 79.15, "8.0", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-40GB", 39.39, "8.0", "NVIDIA A100-SXM4-40GB"),
        ("NVIDIA L40S", 44.4, "8.9", "NVIDIA L40S"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.75, "8.0", None),  # a slice is no A100
        ("NVIDIA A40", 44.43, "9.0", None),  # cannot be
        ("Some GPU 9000", 80.0, "8.0", None),
    ],
)
def test_a_device_is_recognised_by_name_memory_and_capability(
    name: str, memory_gib: float, capability: str, product: str | None
) -> None:
    spec = recognise_gpu(name, int(memory_gib * 2**30), capability)
    assert (spec.name if spec is not None else None) == (find_gpu(product).name if product is not None else None)


def test_a_cpu_has_a_name_and_no_peak() -> None:
    facts = device_facts("cpu")
    assert facts["kind"] == "cpu"
    assert facts["memory_bytes"] > 2**28
    assert "gpu" not in facts
    assert "peak_flops_per_second" not in facts


def test_a_described_device_is_passed_through() -> None:
    spec = {
        "name": "my CPU",
        "memory_bytes": 2**33,
        "memory_bandwidth_bytes_per_second": 2e10,
        "peak_fp32_flops_per_second": 1e11,
    }
    facts = device_facts("cpu", gpu=spec, dtype="float32")
    assert facts["gpu"]["name"] == "my CPU"
    assert facts["peak_flops_per_second"] == 1e11
    assert facts["peak_source"] == "my CPU, dense float32"
    assert "peak_flops_per_second" not in device_facts("cpu", gpu=spec)  # no bf16 peak is known


def test_a_cuda_device_of_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="NVIDIA A40", total_memory=int(44.43 * 2**30), major=8, minor=6, uuid="00000000-1111-2222-3333-444444444444"
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    facts = device_facts("cuda:0")
    assert facts["gpu"] == find_gpu("A40").name
    assert facts["compute_capability"] == "8.6"
    assert facts["uuid"] == "00000000-1111-2222-3333-444444444444"
    assert facts["peak_flops_per_second"] == find_gpu("A40").peak_bf16_flops_per_second
    assert device_facts("cuda:0", dtype="float32")["peak_flops_per_second"] == find_gpu("A40").peak_fp32_flops_per_second
    properties.name = "NVIDIA Z9"
    assert "peak_flops_per_second" not in device_facts("cuda:0")


def test_versions_name_what_is_installed() -> None:
    found = versions()
    assert found["torch"] == torch.__version__
    assert found["transformers"] == transformers.__version__
    assert "ftcost" in found
