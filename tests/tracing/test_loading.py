"""The closed form of what loading holds, against real loads of small checkpoints by transformers, bitsandbytes and peft.

A load onto the CPU makes the tensors that one onto a card makes. What safetensors maps of the file stands for the host's
memory and is not counted: the files are in another type than is asked for, so that each tensor is made anew.
"""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import prepare_model_for_kbit_training
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GptOssConfig, LlamaConfig, Mxfp4Config, Qwen3MoeConfig

from costmodel.defaults import resolve
from costmodel.hf_config import model_spec_from_config
from costmodel.load_memory import load_peak_bytes
from costmodel.specs import parse_job

SHAPES = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
DENSE = {"hidden_size": 256, "intermediate_size": 1024, **SHAPES}
EXPERTS = {"hidden_size": 128, "num_experts_per_tok": 2, "head_dim": 32, **SHAPES}
LLAMA = LlamaConfig(tie_word_embeddings=False, **DENSE)
TIED_LLAMA = LlamaConfig(tie_word_embeddings=True, **{**DENSE, "vocab_size": 8192})
QWEN3_MOE = Qwen3MoeConfig(moe_intermediate_size=256, num_experts=8, tie_word_embeddings=False, **EXPERTS)
GPT_OSS = GptOssConfig(intermediate_size=256, num_local_experts=8, tie_word_embeddings=False, **EXPERTS)


class Live(TorchDispatchMode):
    """Bytes of the tensors alive, and the most there were; storages that a file is mapped into count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_now = self.peak_bytes = 0
        self._seen: dict[int, weakref.finalize[..., Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        is_mapped = function is torch.ops.aten.set_.source_Storage
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen:
                    self._begins(storage, 0 if is_mapped else storage.nbytes())
        return out

    def _begins(self, storage: torch.UntypedStorage, size: int) -> None:
        place = storage._cdata

        def ends() -> None:
            del self._seen[place]
            self.bytes_now -= size

        self._seen[place] = weakref.finalize(storage, ends)
        self.bytes_now += size
        self.peak_bytes = max(self.peak_bytes, self.bytes_now)


@pytest.fixture(autouse=True)
def in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatch mode sees its own thread alone."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")


def saved(config: Any, folder: Path) -> Path:
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def peak_of(load: Callable[[], Any]) -> int:
    gc.collect()
    with Live() as live:
        model = load()
    del model
    return live.peak_bytes


def closed_form(config: Any, quantization_config: dict[str, Any] | None = None, **fields: Any) -> int:
    described = config.to_dict() | ({"quantization_config": quantization_config} if quantization_config else {})
    model = model_spec_from_config(described, name="small")
    job = {"model": described, "method": "lora", "max_length": 8, "dtype": "bfloat16", **fields}
    peak = load_peak_bytes(model, resolve(parse_job(job), model)[0])
    assert peak is not None
    return peak


@pytest.mark.parametrize("config", [LLAMA, TIED_LLAMA, QWEN3_MOE], ids=["llama", "tied llama", "qwen3 moe"])
@pytest.mark.parametrize("how", ["bfloat16", "nf4", "nf4 double", "int8"])
def test_peak_of_loading(config: Any, how: str, tmp_path: Path) -> None:
    quantization, _, double = how.partition(" ")
    fields: dict[str, Any] = {"quantization": quantization, "double_quant": bool(double)} if how != "bfloat16" else {}
    settings = {
        "bfloat16": None,
        "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        "nf4 double": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        "int8": BitsAndBytesConfig(load_in_8bit=True),
    }[how]
    folder = saved(config, tmp_path)
    measured = peak_of(
        lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=settings)
    )
    expected = closed_form(config, framework="trl", prepare_model_for_kbit_training=False, **fields)
    assert expected == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_of_unpacking_mxfp4(dtype: str, tmp_path: Path) -> None:
    """The published gpt-oss, loaded to be trained. Its packed tensors cannot be in fp32, so what is mapped is added."""
    model = AutoModelForCausalLM.from_config(GPT_OSS, dtype=torch.float32)
    names = [name for name in model.state_dict() if "experts" not in name or "bias" in name]
    tensors = {name: model.state_dict()[name].to(torch.float16, copy=True) for name in names}
    packed_bytes = 0
    for name, value in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")) and "experts" in name:
            experts, width_in, width_out = value.shape
            tensors[f"{name}_blocks"] = torch.randint(0, 255, (experts, width_out, width_in // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full((experts, width_out, width_in // 32), 127, dtype=torch.uint8)
            packed_bytes = max(packed_bytes, value.numel() * 17 // 32)
    model.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    settings = Mxfp4Config(dequantize=True)
    measured = packed_bytes + peak_of(
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype), quantization_config=settings)
    )
    expected = closed_form(GPT_OSS, framework="trl", dtype=dtype, quantization_config=config["quantization_config"])
    assert expected == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("config", [LLAMA, TIED_LLAMA, QWEN3_MOE], ids=["llama", "tied llama", "qwen3 moe"])
def test_peak_of_lifting_what_is_not_quantised(config: Any, tmp_path: Path) -> None:
    folder = saved(config, tmp_path)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")

    def load() -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=settings)
        return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)

    measured = peak_of(load)
    expected = closed_form(config, quantization="nf4", prepare_model_for_kbit_training=True)
    assert expected == pytest.approx(measured, rel=0.01)
