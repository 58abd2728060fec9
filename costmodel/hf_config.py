"""A ``config.json`` (plain mapping) -> :class:`ModelSpec`: every weight of the model, by layer, with its name in transformers.

One table, :data:`FAMILIES`, holds what differs between model families. A ``model_type`` that is not in it is refused by
name: a family is exact or it is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from costmodel.errors import CostModelError, UnsupportedModelError

_DTYPES: Final = {"float32", "bfloat16", "float16"}


@dataclass(frozen=True, slots=True)
class Linear:
    """One ``nn.Linear`` of a layer. ``name`` is its path inside the decoder layer, as transformers spells it."""

    name: str
    in_features: int
    out_features: int
    bias: bool = False

    @property
    def num_params(self) -> int:
        return self.in_features * self.out_features + (self.out_features if self.bias else 0)

    @property
    def leaf(self) -> str:
        """The last part of the name: what ``target_modules`` of a LoRA names."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm: ``size`` weights, applied to ``width`` elements of each token."""

    name: str
    size: int
    width: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention with grouped key/value heads. ``sliding_window`` in tokens; ``None`` attends to everything."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts: gated MLPs of ``intermediate_size``; each token visits ``num_experts_per_tok`` of them.

    transformers 5 keeps them as two stacked parameters, transformers 4 as three ``nn.Linear`` an expert, whose names are
    ``linear_names`` (gate, up, down). The router is one matrix (num_experts, hidden_size), named ``gate`` in both.
    """

    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    intermediate_size: int
    linear_names: tuple[str, str, str]

    @property
    def params_per_expert(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def router_params(self) -> int:
        return self.num_experts * self.hidden_size

    @property
    def num_params(self) -> int:
        """Routed experts and router."""
        return self.num_experts * self.params_per_expert + self.router_params

    @property
    def inactive_params(self) -> int:
        """Weights of the experts that one token does not visit."""
        return (self.num_experts - self.num_experts_per_tok) * self.params_per_expert


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: its linears outside the routed experts, its norms, its attention, its experts if any."""

    linears: tuple[Linear, ...]
    norms: tuple[Norm, ...]
    attention: Attention
    experts: Experts | None = None

    @property
    def num_params(self) -> int:
        return (
            sum(linear.num_params for linear in self.linears)
            + sum(norm.size for norm in self.norms)
            + (self.experts.num_params if self.experts else 0)
        )

    @property
    def mlp_width(self) -> int:
        """Intermediate elements of the dense MLP for each token; 0 in a layer of routed experts alone."""
        return sum(linear.out_features for linear in self.linears if linear.leaf == "up_proj")

    def linear(self, leaf: str) -> Linear | None:
        return next((each for each in self.linears if each.leaf == leaf), None)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only language model as counted weights. ``layers`` are runs of equal layers: ((layer, how many), ...)."""

    name: str
    family: str
    hidden_size: int
    vocab_size: int
    layers: tuple[tuple[Layer, int], ...]
    tied_embeddings: bool
    hidden_act: str
    checkpoint_dtype: str | None  # what the config says the weights are stored in

    @property
    def num_layers(self) -> int:
        return sum(count for _, count in self.layers)

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def head_params(self) -> int:
        """Weights of the output head that are not already the embedding's."""
        return 0 if self.tied_embeddings else self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All weights, a tied head counted once."""
        blocks = sum(layer.num_params * count for layer, count in self.layers)
        return self.embedding_params + self.head_params + blocks + self.hidden_size

    @property
    def num_active_params(self) -> int:
        """Weights that multiply one token: routed top-k, shared, attention, norms, head; a look-up table is left out."""
        inactive = sum(layer.experts.inactive_params * count for layer, count in self.layers if layer.experts)
        lookup = 0 if self.tied_embeddings else self.embedding_params
        return self.num_params - inactive - lookup

    @property
    def is_moe(self) -> bool:
        return any(layer.experts for layer, _ in self.layers)


@dataclass(frozen=True, slots=True)
class _Family:
    """What the modelling code of one ``model_type`` fixes. Defaults are those of its config class, transformers 5.24."""

    default_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qkv_bias: bool | None = None  # None: the config's attention_bias
    output_bias: bool | None = None
    mlp_bias_key: str | None = None
    query_key_norm: str = ""  # "head": over head_dim; "full": over all heads
    sliding_window: Callable[[Mapping[str, Any], int], int | None] = lambda config, layer: None
    experts: Callable[[Mapping[str, Any], int], Experts | None] = lambda config, layer: None


def _whole_window(config: Mapping[str, Any], layer: int) -> int | None:
    return config.get("sliding_window")


def _mistral_window(config: Mapping[str, Any], layer: int) -> int | None:
    return config.get("sliding_window", 4096)


def _qwen_window(config: Mapping[str, Any], layer: int) -> int | None:
    """Qwen slides only when ``use_sliding_window`` says so, and then only from ``max_window_layers`` on."""
    if not config.get("use_sliding_window", False):
        return None
    layer_types = config.get("layer_types")
    slides = layer_types[layer] == "sliding_attention" if layer_types else layer >= config.get("max_window_layers", 28)
    return config.get("sliding_window", 4096) if slides else None


def _mixtral_experts(config: Mapping[str, Any], layer: int) -> Experts:
    return Experts(
        num_experts=config.get("num_local_experts", 8),
        num_experts_per_tok=config.get("num_experts_per_tok", 2),
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        linear_names=("w1", "w3", "w2"),
    )


def _qwen3_moe_experts(config: Mapping[str, Any], layer: int) -> Experts | None:
    num_experts = config.get("num_experts", config.get("num_local_experts", 128))
    sparse_step = config.get("decoder_sparse_step", 1)
    if layer in (config.get("mlp_only_layers") or []) or num_experts == 0 or (layer + 1) % sparse_step:
        return None
    return Experts(
        num_experts=num_experts,
        num_experts_per_tok=config.get("num_experts_per_tok", 8),
        hidden_size=config["hidden_size"],
        intermediate_size=config.get("moe_intermediate_size", 768),
        linear_names=("gate_proj", "up_proj", "down_proj"),
    )


def _olmoe_experts(config: Mapping[str, Any], layer: int) -> Experts:
    return Experts(
        num_experts=config.get("num_experts", 64),
        num_experts_per_tok=config.get("num_experts_per_tok", 8),
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        linear_names=("gate_proj", "up_proj", "down_proj"),
    )


FAMILIES: Final[dict[str, _Family]] = {
    "llama": _Family(mlp_bias_key="mlp_bias"),
    "mistral": _Family(default_kv_heads=8, qkv_bias=False, output_bias=False, sliding_window=_mistral_window),
    "qwen2": _Family(default_kv_heads=32, qkv_bias=True, output_bias=False, sliding_window=_qwen_window),
    "qwen3": _Family(default_kv_heads=32, head_dim=128, query_key_norm="head", sliding_window=_qwen_window),
    "mixtral": _Family(
        default_kv_heads=8, qkv_bias=False, output_bias=False, sliding_window=_whole_window, experts=_mixtral_experts
    ),
    "qwen3_moe": _Family(
        default_kv_heads=4, query_key_norm="head", sliding_window=_qwen_window, experts=_qwen3_moe_experts
    ),
    "olmoe": _Family(query_key_norm="full", experts=_olmoe_experts),
}
"""The model families that are counted exactly, by ``model_type``."""

_REQUIRED: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def model_spec_from_config(config: Mapping[str, Any], *, name: str = "") -> ModelSpec:
    """The counted model of one ``config.json``.

    Raises :class:`UnsupportedModelError` for a family that is not in :data:`FAMILIES`, :class:`CostModelError` for a
    config without the fields that fix its size or with one that is not a positive whole number.
    """
    config = _text_config(config)
    model_type = config.get("model_type")
    if not model_type:
        raise CostModelError("the model config has no model_type; a Hugging Face config.json names it")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise UnsupportedModelError(
            f"model family {model_type!r} is not modelled yet; the families that are: {', '.join(sorted(FAMILIES))}"
        )
    missing = [field for field in _REQUIRED if config.get(field) is None]
    if missing:
        raise CostModelError(f"the {model_type} config lacks {', '.join(missing)}, which fix the model's size")
    for field in (*_REQUIRED, "num_key_value_heads", "head_dim", "num_experts_per_tok"):
        value = config.get(field)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise CostModelError(f"the model config's {field} must be a positive whole number, got {value!r}")
    layers = _runs([_layer(config, family, index) for index in range(config["num_hidden_layers"])])
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return ModelSpec(
        name=name or str(config.get("_name_or_path") or model_type),
        family=str(model_type),
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        layers=layers,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        hidden_act=str(config.get("hidden_act", "silu")),
        checkpoint_dtype=dtype if dtype in _DTYPES else None,
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's own config where a multimodal one nests it."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else config


def _layer(config: Mapping[str, Any], family: _Family, index: int) -> Layer:
    hidden = config["hidden_size"]
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or family.head_dim or hidden // num_heads
    num_kv_heads = config["num_key_value_heads"] if config.get("num_key_value_heads") else family.default_kv_heads
    if "num_key_value_heads" in config and config["num_key_value_heads"] is None:
        num_kv_heads = None  # an explicit null means "as many as query heads" in every family here
    attention = Attention(num_heads, num_kv_heads or num_heads, head_dim, family.sliding_window(config, index))
    if attention.num_heads % attention.num_kv_heads:
        raise CostModelError(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {attention.num_kv_heads}"
        )
    attention_bias = bool(config.get("attention_bias", False))
    qkv_bias = attention_bias if family.qkv_bias is None else family.qkv_bias
    output_bias = attention_bias if family.output_bias is None else family.output_bias
    linears = [
        Linear("self_attn.q_proj", hidden, attention.query_width, qkv_bias),
        Linear("self_attn.k_proj", hidden, attention.kv_width, qkv_bias),
        Linear("self_attn.v_proj", hidden, attention.kv_width, qkv_bias),
        Linear("self_attn.o_proj", attention.query_width, hidden, output_bias),
    ]
    norms = [Norm("input_layernorm", hidden, hidden), Norm("post_attention_layernorm", hidden, hidden)]
    if family.query_key_norm:
        per_head = family.query_key_norm == "head"
        for which, width in (("q", attention.query_width), ("k", attention.kv_width)):
            norms.append(Norm(f"self_attn.{which}_norm", head_dim if per_head else width, width))
    experts = family.experts(config, index)
    if experts is None:
        width = config["intermediate_size"]
        bias = bool(config.get(family.mlp_bias_key, False)) if family.mlp_bias_key else False
        linears += [
            Linear("mlp.gate_proj", hidden, width, bias),
            Linear("mlp.up_proj", hidden, width, bias),
            Linear("mlp.down_proj", width, hidden, bias),
        ]
    elif experts.num_experts_per_tok > experts.num_experts:
        raise CostModelError(
            f"num_experts_per_tok {experts.num_experts_per_tok} is above the {experts.num_experts} experts there are"
        )
    return Layer(tuple(linears), tuple(norms), attention, experts)


def _runs(layers: list[Layer]) -> tuple[tuple[Layer, int], ...]:
    runs: list[tuple[Layer, int]] = []
    for layer in layers:
        if runs and runs[-1][0] == layer:
            runs[-1] = (layer, runs[-1][1] + 1)
        else:
            runs.append((layer, 1))
    return tuple(runs)


def with_num_layers(spec: ModelSpec, layers: tuple[tuple[Layer, int], ...]) -> ModelSpec:
    """The same model with other layer runs (tests and traces of shallow stacks)."""
    return replace(spec, layers=layers)
