"""A tiny random model of each family of mixtures of experts in the installed transformers, and what its experts really do.

``FAMILIES`` is by folder of ``transformers.models``. The reference counts know nothing of our hooks: rows that enter each
expert's first product, told by the memory of the expert's slice of the weights, or what the family's own router says.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# Fields that a config takes only where its class has them.
_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "d_model": 32, "intermediate_size": 48, "d_ff": 32, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "shared_intermediate_size": 16, "num_hidden_layers": 2, "num_layers": 2,
    "n_layers": 2, "num_decoder_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "num_heads": 4, "n_heads": 4,
    "head_dim": 8, "d_kv": 8, "max_position_embeddings": 128, "max_seq_len": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "use_cache": False, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2, "moe_top_k": 2, "moe_k": 2, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "depth": 2, "out_hidden_size": 32,
    "projection_intermediate_size": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """``changes``: of the config. ``class_name``: the model, if it is not the folder's ``...ForCausalLM``."""

    changes: dict[str, Any] = field(default_factory=dict)
    class_name: str | None = None
    top_k: int = 2
    num_sites: int = 2  # experts modules that the batch reaches
    doubt: str = ""  # why a load of text alone is partial


_FULL = ["full_attention"] * 2
_SPARSE = ["sparse"] * 2
_TEXT = "text_config"
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def _rope(sections: list[int], **fields: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **fields}


FAMILIES: dict[str, Family] = {
    "afmoe": Family({"num_dense_layers": 0}),
    "aria": Family(),
    "axk1": Family({"mlp_layer_types": _SPARSE}),
    "axk2": Family({"mlp_layer_types": _SPARSE}),
    "bailing_hybrid": Family(),
    "beam": Family({"mlp_layer_types": _SPARSE}),
    "cohere2_moe": Family(),
    "dbrx": Family(
        {
            "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 16, "hidden_size": 32},
        }
    ),
    "deepseek_ocr2": Family({_TEXT: {"mlp_layer_types": _SPARSE}}),
    "deepseek_v2": Family(),
    "deepseek_v3": Family(),
    "deepseek_v32": Family(),
    "deepseek_v4": Family(),
    "diffusion_gemma": Family(
        {_TEXT: {"top_k_experts": 2, "layer_types": _FULL}, "canvas_length": 8},
        "DiffusionGemmaForBlockDiffusion",
        num_sites=4,
    ),
    "doge": Family({"is_moe": True, "num_experts": 16}),
    "dots1": Family({"layer_types": _FULL}),
    "dots3_note": Family({"mlp_layer_types": _SPARSE}),
    "ernie4_5_moe": Family({"moe_layer_start_index": 0}),
    "ernie4_5_vl_moe": Family(
        {_TEXT: {"moe_intermediate_size": [16, 16], "mlp_layer_types": _SPARSE, "rope_parameters": _rope([1, 1, 2])}},
        doubt="2 of 4 experts modules were not called",
    ),
    "exaone_moe": Family(),
    "flex_olmo": Family(),
    "flint": Family({"mlp_only_layers": []}),
    "gemma4": Family(
        {
            "enable_moe_block": True,
            "top_k_experts": 2,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 8,
            "global_head_dim": 8,
            "layer_types": _FULL,
        }
    ),
    "glm4_moe": Family(),
    "glm4_moe_lite": Family({"mlp_layer_types": _SPARSE}),
    "glm4v_moe": Family({_TEXT: {"rope_parameters": _rope([1, 1, 2], partial_rotary_factor=1.0)}}),
    "glm5_next": Family(
        {
            _TEXT: {
                "qk_rope_head_dim": 0,
                "linear_head_dim": 8,
                "linear_num_heads": 4,
                "layer_types": ["linear_attention", "indexed_attention"],
                "mlp_layer_types": _SPARSE,
            }
        }
    ),
    "glm_moe_dsa": Family(),
    "gpt_oss": Family(),
    "granitemoe": Family(),
    "granitemoe_swa": Family(),
    "granitemoehybrid": Family({"layer_types": ["attention"] * 2, "mamba_n_heads": 4}),
    "granitemoeshared": Family(),
    "hunyuan_v1_moe": Family(),
    "hy_v3": Family({"mlp_layer_types": _SPARSE}),
    "hy_v4": Family({"mlp_layer_types": _SPARSE}),
    "hy_v4_vl": Family({_TEXT: {"rope_parameters": _rope([2, 1, 1]), "mlp_layer_types": _SPARSE}}),
    "inkling": Family(),
    "inkling2": Family(),
    "inkling2_loop": Family(),
    "jamba": Family(num_sites=1),
    "jetmoe": Family(num_sites=4),  # in the attention too
    "kimi_linear": Family({"mlp_layer_types": _SPARSE, "layer_types": _FULL}),
    "kolibri1": Family(),
    "laguna": Family({"mlp_layer_types": _SPARSE}),
    "lara_mini": Family(),
    "lfm2_moe": Family({"layer_types": _FULL, "num_dense_layers": 0}),
    "llama4": Family(),
    "longcat_flash": Family(
        {"zero_expert_num": 2, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "num_layers": 1}, num_sites=1
    ),
    "mellum": Family(),
    "mimo_v2_flash": Family({"mlp_layer_types": _SPARSE, "layer_types": _FULL}),
    "minimax": Family(),
    "minimax_m2": Family(),
    "minimax_m3_vl": Family(),
    "mistral4": Family(),
    "mistral_large4": Family({"vision_config": _PIXTRAL}),
    "mixtral": Family(),
    "muse_spark": Family({"audio_config": {"num_hidden_layers": 4, "out_hidden_size": 32}, _TEXT: {"moe_hidden_size": 16}}),
    "nemotron_h": Family({"layers_block_type": ["moe", "full_attention"]}, num_sites=1),
    "nllb_moe": Family(),
    "olmoe": Family(),
    "openai_privacy_filter": Family(class_name="OpenAIPrivacyFilterForTokenClassification"),
    "phimoe": Family(),
    "qwen2_moe": Family(),
    "qwen3_5_moe": Family(),
    "qwen3_moe": Family(),
    "qwen3_next": Family(),
    "qwen3_omni_moe": Family(
        {
            "vision_start_token_id": 63,
            "audio_config": {"encoder_attention_heads": 4, "encoder_layers": 1, "encoder_ffn_dim": 16},
        },
        "Qwen3OmniMoeThinkerForConditionalGeneration",
    ),
    "qwen3_vl_moe": Family(),
    "qwen4_exp": Family(),
    "solar_open": Family(),
    "step3p7": Family({_TEXT: {"sliding_window": 8, "layer_types": _FULL, "mlp_layer_types": _SPARSE}}),
    "switch_transformers": Family(
        {
            "decoder_start_token_id": 0,
            "num_sparse_encoder_layers": 2,
            "num_sparse_decoder_layers": 1,
            "router_jitter_noise": 0.0,
            "dropout_rate": 0.0,
        },
        top_k=1,
        num_sites=3,
    ),
    "unlimited_ocr": Family({_TEXT: {"mlp_layer_types": _SPARSE}}),
    "zaya": Family({"num_experts_per_tok": 1}, top_k=1),
}


def folders_with_experts() -> list[str]:
    """Folders of the installed transformers whose modelling file has a class of experts."""
    import transformers

    files = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    marks = re.compile(r"^class \w*Experts\w*\(|^class \w*CDMoE\(", re.MULTILINE)
    return sorted({path.parent.name for path in files if marks.search(path.read_text())})


def tiny_model(folder: str, **changes: Any) -> Any:
    """In training mode, its experts in transformers' loop over them."""
    family = FAMILIES[folder]
    torch.manual_seed(0)
    model_class = _model_class(folder, family.class_name)
    config = model_class.config_class(**_fields(model_class.config_class, family.changes | changes))
    config._experts_implementation = "eager"
    return model_class(config).train()


def _model_class(folder: str, class_name: str | None) -> Any:
    for file in sorted((Path(_models_folder()) / folder).glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{folder}.{file.stem}")
        names = [class_name] if class_name else sorted(name for name in vars(module) if name.endswith("ForCausalLM"))
        names += sorted(name for name in vars(module) if name.endswith("ForConditionalGeneration"))
        for name in names:
            if getattr(vars(module).get(name), "__module__", None) == module.__name__:
                return vars(module)[name]
    raise LookupError(folder)


def _models_folder() -> Path:
    import transformers

    return Path(transformers.__file__).parent / "models"


def _fields(config_class: Any, changes: dict[str, Any]) -> dict[str, Any]:
    names = inspect.signature(config_class.__init__).parameters
    fields = {name: value for name, value in _SIZES.items() if name in names}
    for name, sub_class in (getattr(config_class, "sub_configs", None) or {}).items():
        if sub_class.__name__ != "AutoConfig":
            fields[name] = _fields(sub_class, changes.get(name, {}))
    return fields | {name: value for name, value in changes.items() if name not in fields or not isinstance(value, dict)}


# --- batches ----------------------------------------------------------------------------------------------------------

_UNPADDED = {"doge", "diffusion_gemma", "phimoe"}
"""Their choice for a token depends on the whole batch, on what comes after it, or on chance: a row alone would choose
otherwise."""

CHOOSES_BY_CHANCE = {"phimoe"}
"""In training; so the reference looks at the very forward that is recorded."""


@dataclass(frozen=True)
class Batch:
    """``inputs`` of a training forward; ``rows``: the same sequences, each alone and without padding."""

    inputs: dict[str, Any]
    rows: list[dict[str, Any]]
    num_non_padding_tokens: int


def batch_of(folder: str, model: Any, seed: int) -> Batch:
    """Two sequences, the second of them padded where the family's routing lets a sequence be looked at alone."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (2, 9), generator=generator)
    lengths = (9, 9) if folder in _UNPADDED else (9, 5)
    mask = torch.tensor([[1] * length + [0] * (9 - length) for length in lengths])
    ids = ids.masked_fill(mask == 0, 0)
    labels = ids.masked_fill(mask == 0, -100)
    if folder == "openai_privacy_filter":
        labels = labels.clamp(max=1)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    count = sum(lengths)
    if folder == "diffusion_gemma":  # has no loss of its own
        inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :8]}
        return Batch(inputs, [inputs], 2 * (9 + 8))
    if folder in _UNPADDED:
        return Batch(inputs, [inputs], count)
    rows = [
        {name: value[row : row + 1, :length] for name, value in inputs.items() if name != "attention_mask"}
        for row, length in enumerate(lengths)
    ]
    return Batch(inputs, rows, 2 * count if model.config.is_encoder_decoder else count)


def loss_of(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    return loss if loss is not None else output.logits.float().square().mean()


# --- what the experts did ---------------------------------------------------------------------------------------------

Counts = dict[str, list[int]]
"""Name of the layer's experts -> tokens of each."""


def reference_of(folder: str, model: Any) -> Any:
    """A context in which forwards add to its ``counts``."""
    return _REFERENCES.get(folder, _Products)(model)


def counts_of(folder: str, model: Any, rows: list[dict[str, Any]]) -> Counts:
    """What each expert was given in these forwards, which carry no gradient."""
    with torch.no_grad(), reference_of(folder, model) as reference:
        for row in rows:
            model(**row)
    return called(reference)


def called(reference: Any) -> Counts:
    return {name: counts for name, counts in reference.counts.items() if sum(counts)}


class _Reference:
    """Hooks of the test's own on the modules of one class."""

    def __init__(self, model: Any) -> None:
        self.counts: Counts = {}
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            self.attach(name, module)

    def attach(self, name: str, module: Any) -> None:
        raise NotImplementedError

    def on_call(self, module: Any, function: Callable[[Any, Any], None]) -> None:
        """``function(args, output)`` after each call."""
        self._handles.append(module.register_forward_hook(lambda _, args, output: function(args, output)))

    def add(self, name: str, index: torch.Tensor, num_experts: int) -> None:
        counted = torch.bincount(index.reshape(-1), minlength=num_experts).tolist()
        self.counts[name] = [old + new for old, new in zip(self.counts.get(name, [0] * num_experts), counted, strict=True)]

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()


class _Products(torch.overrides.TorchFunctionMode):
    """Rows that enter the products with each expert's weights, in a loop over the experts."""

    _FUNCTIONS = (torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._rows: dict[str, dict[str, list[int]]] = {}  # layer -> weight -> rows of each expert
        self._slices: dict[int, tuple[str, str, int]] = {}
        for name, module in model.named_modules():
            if not re.search(r"Experts$", type(module).__name__) or type(module).__name__ == "InklingSharedExperts":
                continue
            num_experts = getattr(module, "num_experts", None) or next(module.parameters()).shape[0]
            self._rows[name] = {}
            for weight_name, weight in module.named_parameters():
                if weight.numel() % num_experts == 0 and weight.dim() > 1:
                    self._rows[name][weight_name] = [0] * num_experts
                    step = weight.numel() // num_experts * weight.element_size()
                    for expert in range(num_experts):
                        self._slices[weight.data_ptr() + expert * step] = (name, weight_name, expert)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self._FUNCTIONS and (place := self._slices.get(args[1].data_ptr())) is not None:
            name, weight_name, expert = place
            self._rows[name][weight_name][expert] += args[0].shape[:-1].numel()
        return function(*args, **(kwargs or {}))

    @property
    def counts(self) -> Counts:
        return {
            name: [max(counts) for counts in zip(*of_weights.values(), strict=True)]
            for name, of_weights in self._rows.items()
        }


class _IdentityToo(_Products):
    """LongCat: of the experts that compute nothing there is no product, so theirs are the router's own numbers."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._model = model
        self._chosen: Counts = {}

    def __enter__(self) -> Any:
        class Chosen(_Reference):
            def attach(self, name: str, module: Any) -> None:
                if type(module).__name__ == "LongcatFlashTopkRouter":
                    experts = f"{name.rpartition('.')[0]}.experts"
                    self.on_call(module, lambda args, output: self.add(experts, output[2], 6))

        self._router = Chosen(self._model)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._router.__exit__()
        super().__exit__(*error)

    @property
    def counts(self) -> Counts:
        real = super().counts
        return {name: real[name][:4] + self._router.counts[name][4:] for name in real}


class _RowsOfModules(_Reference):
    """A module for each expert (switch)."""

    def attach(self, name: str, module: Any) -> None:
        if type(module).__name__ != "SwitchTransformersExperts":
            return
        self.counts[name] = [0] * len(module)
        for expert in range(len(module)):
            self.on_call(module[f"expert_{expert}"], lambda args, _, expert=expert: self._rows(name, expert, args[0]))

    def _rows(self, name: str, expert: int, states: torch.Tensor) -> None:
        self.counts[name][expert] += states.shape[:-1].numel()


class _SortedRows(_Reference):
    """JetMoe's experts are given how many rows are whose."""

    def attach(self, name: str, module: Any) -> None:
        if type(module).__name__ == "JetMoeParallelExperts" and name.endswith("input_linear"):
            self.on_call(module, lambda args, _: self._sizes(name.rpartition(".")[0], args[1]))

    def _sizes(self, name: str, sizes: list[int]) -> None:
        self.counts[name] = [old + new for old, new in zip(self.counts.get(name, [0] * len(sizes)), sizes, strict=True)]


class _RowsLookedUp(_Reference):
    """Doge's experts are rows of embeddings; what is looked up in the second of them."""

    def attach(self, name: str, module: Any) -> None:
        if name.endswith(".up_embed"):
            self.on_call(module, lambda args, _: self.add(name.rpartition(".")[0], args[0], module.num_embeddings))


class _ScoresAboveZero(_Reference):
    """Llama 4: every expert computes every token, those that were not chosen with the score 0."""

    def attach(self, name: str, module: Any) -> None:
        if type(module).__name__ == "Llama4Router":
            experts = f"{name.rpartition('.')[0]}.experts"
            self.on_call(module, lambda _, output: self.add(experts, (output[0] > 0).nonzero()[:, 1], module.num_experts))


class _RoutersNumbers(_Reference):
    """DiffusionGemma: encoder and decoder share their weights, so whose product it is cannot be told."""

    def attach(self, name: str, module: Any) -> None:
        if type(module).__name__ == "DiffusionGemmaTextRouter":
            experts = f"{name.rpartition('.')[0]}.experts"
            self.on_call(module, lambda _, output: self.add(experts, output[2], 4))


class _WithSkipped(_Reference):
    """Zaya: chosen by probability and bias, the last class being to skip the experts."""

    def attach(self, name: str, module: Any) -> None:
        if type(module).__name__ == "ZayaRouter":
            experts = f"{name.rpartition('.')[0]}.experts"
            self.on_call(module, lambda _, output: self.add(experts, self._choice(module, output[0]), 5))

    @staticmethod
    def _choice(router: Any, logits: torch.Tensor) -> torch.Tensor:
        return (logits.softmax(dim=-1).float() + router.balancing_biases).argmax(dim=-1)


_REFERENCES: dict[str, Any] = {
    "switch_transformers": _RowsOfModules,
    "jetmoe": _SortedRows,
    "doge": _RowsLookedUp,
    "llama4": _ScoresAboveZero,
    "zaya": _WithSkipped,
    "diffusion_gemma": _RoutersNumbers,
    "longcat_flash": _IdentityToo,
}
