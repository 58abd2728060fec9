"""The pieces that decoder layers are made of: mixers, feed-forwards, the norms around them, from the fields of a config.

A builder takes the settings that a family fixes and gives a function of (fields, layer index). ``families`` joins them.
Source: ``modeling_*.py`` of transformers 5.24.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from costmodel.errors import CostModelError
from costmodel.model_spec import NO_ATTENTION, Attention, Experts, Layer, Linear, Norm, Scan, Weights


class Fields:
    """A config by the names of the Llama config, whatever its family calls them; class defaults fill what it leaves out."""

    __slots__ = ("_aliases", "_config", "_defaults", "model_type")

    def __init__(self, config: Mapping[str, Any], aliases: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
        self._config, self._aliases, self._defaults = config, aliases, defaults
        self.model_type = str(config.get("model_type"))

    def get(self, name: str) -> Any:
        for key in (self._aliases.get(name, name), name, *_SYNONYMS.get(name, ())):
            value: Any = self._config
            for part in key.split("."):  # "ffn_config.moe_top_k" is a field of a nested mapping
                value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
            if value is not _ABSENT:
                return value
        return self._defaults.get(name)

    def size(self, name: str) -> int:
        """A positive whole number. Raises :class:`CostModelError` where it is missing or something else."""
        value = self.optional_size(name)
        if value is None:
            raise CostModelError(f"the {self.model_type} config lacks {self._key(name)}, which fixes the model's size")
        return value

    def optional_size(self, name: str) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CostModelError(f"the model config's {self._key(name)} must be a positive whole number, got {value!r}")
        return value

    def count(self, name: str) -> int:
        """A whole number of things of which there may be none."""
        value = self.get(name)
        return 0 if not value else self.size(name)

    def flag(self, name: str) -> bool:
        return bool(self.get(name))

    def entry(self, name: str, layer: int) -> Any:
        """A field that holds one value, or a list with one for each layer."""
        value = self.get(name)
        if not isinstance(value, Sequence) or isinstance(value, str):
            return value
        if layer >= len(value):
            raise CostModelError(
                f"the model config's {self._key(name)} names {len(value)} layers of "
                f"{self.size('num_hidden_layers')}; give one entry for each layer"
            )
        return value[layer]

    def without(self, name: str) -> Fields:
        """The same config without one field, for a family whose code does not read it."""
        config = {key: value for key, value in self._config.items() if key != name}
        return Fields(config, self._aliases, self._defaults)

    def _key(self, name: str) -> str:
        return self._aliases.get(name, name)

    @property
    def hidden_size(self) -> int:
        return self.size("hidden_size")


_ABSENT: Final = object()
_SYNONYMS: Final = {"num_experts": ("num_local_experts", "n_routed_experts")}  # the attribute maps of the config classes

Flag = bool | str
"""True, False, or the name of the config field that says so."""


def is_set(fields: Fields, flag: Flag) -> bool:
    return fields.flag(flag) if isinstance(flag, str) else flag


@dataclass(frozen=True, slots=True)
class Block:
    """A mixer or a feed-forward: its parts, to be joined into a layer."""

    linears: tuple[Linear, ...] = ()
    norms: tuple[Norm, ...] = ()
    weights: tuple[Weights, ...] = ()
    attention: Attention = NO_ATTENTION
    scan: Scan | None = None
    experts: Experts | None = None
    is_gated: bool = True
    last_linear: str = ""  # with which the block ends


Builder = Callable[[Fields, int], Block]


# --- mixers ----------------------------------------------------------------------------------------------------------


# Config classes that ask for it even where head_dim is given (their validate_architecture, transformers 5.24).
_DIVISIBLE_FAMILIES: Final = frozenset(
    {"llama", "gpt_neox", "deepseek_v2", "arcee", "cwm", "exaone", "gemma2", "gemma3_text", "vaultgemma"}
)


# The default sizes of its config class do not divide; its modules round the head width down.
_ROUNDING_FAMILIES: Final = frozenset({"glm4_moe"})


def head_counts(fields: Fields) -> tuple[int, int, int]:
    """(query heads, key/value heads, head width)."""
    heads = fields.size("num_attention_heads")
    kv_heads = fields.optional_size("num_key_value_heads") or heads
    if heads % kv_heads:
        raise CostModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = fields.optional_size("head_dim")
    must_divide = fields.model_type in _DIVISIBLE_FAMILIES or (
        head_dim is None and (fields.model_type not in _ROUNDING_FAMILIES or fields.hidden_size < heads)
    )
    if fields.hidden_size % heads and must_divide:
        raise CostModelError(
            f"hidden_size {fields.hidden_size} is not a multiple of num_attention_heads {heads}; change both together"
        )
    return heads, kv_heads, head_dim or fields.hidden_size // heads


def no_window(fields: Fields, layer: int) -> int | None:
    return None


def window_everywhere(fields: Fields, layer: int) -> int | None:
    return fields.optional_size("sliding_window")


def sliding_by_kind(full_every: int = 0, *, full_first: bool = False) -> Callable[[Fields, int], int | None]:
    """By ``layer_types``; without them every ``full_every``-th layer attends to everything (0: all do)."""

    def window(fields: Fields, layer: int) -> int | None:
        kind = fields.entry("layer_types", layer)
        if kind is None:
            slides = full_every > 0 and bool((layer if full_first else layer + 1) % full_every)
        else:
            slides = kind in {"sliding_attention", "chunked_attention"}
        return fields.optional_size("sliding_window") if slides else None

    return window


def qwen_window(fields: Fields, layer: int) -> int | None:
    """Qwen slides only when ``use_sliding_window`` says so, and then from ``max_window_layers`` on."""
    if not fields.flag("use_sliding_window"):
        return None
    kind = fields.entry("layer_types", layer)
    slides = kind == "sliding_attention" if kind else layer >= fields.count("max_window_layers")
    return fields.optional_size("sliding_window") if slides else None


def attention_block(
    *,
    path: str = "self_attn",
    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    bias: Flag = False,
    output_bias: Flag | None = None,
    norms: tuple[str, str] = ("q_norm", "k_norm"),
    norm: str = "",  # "": none; "head": over one head; "full": over all heads; "hidden": over hidden_size
    norm_flag: Flag = True,
    norm_kind: str = "rms",
    window: Callable[[Fields, int], int | None] = no_window,
    has_output_gate: bool = False,
    has_fused_kernel: bool = True,
    has_positions: bool = True,
    score: str = "plain",
    copies_output: bool = False,
    extra: Callable[[Fields, int], tuple[Weights, ...]] = lambda fields, layer: (),
) -> Builder:
    """Grouped-query attention. Two ``names`` are a fused query-key-value projection and the output.

    ``has_positions``: queries and keys are rotated; False for ALiBi and learned positions.
    """

    def build(fields: Fields, layer: int) -> Block:
        heads, kv_heads, head_dim = head_counts(fields)
        hidden, query, kv = fields.hidden_size, heads * head_dim, kv_heads * head_dim
        has_bias = is_set(fields, bias)
        in_widths = (query + 2 * kv,) if len(names) == 2 else (query * (2 if has_output_gate else 1), kv, kv)
        linears = [
            Linear(f"{path}.{name}", hidden, width, has_bias) for name, width in zip(names[:-1], in_widths, strict=True)
        ]
        out_bias = has_bias if output_bias is None else is_set(fields, output_bias)
        linears.append(Linear(f"{path}.{names[-1]}", query, hidden, out_bias, "mixer_out"))
        inner = []
        if norm and is_set(fields, norm_flag):
            widths = (hidden, hidden // heads * kv_heads) if norm == "hidden" else (query, kv)
            for name, width in zip(norms, widths, strict=True):
                inner.append(Norm(f"{path}.{name}", head_dim if norm == "head" else width, width, norm_kind))
        return Block(
            tuple(linears),
            tuple(inner),
            extra(fields, layer),
            Attention(
                heads,
                kv_heads,
                head_dim,
                window(fields, layer),
                has_fused_kernel=has_fused_kernel,
                score=score,
                has_output_gate=has_output_gate,
                # rotated queries and keys are new tensors, values stay a view of the fused projection
                fused_extra_width=query + kv if len(names) == 2 and has_positions else 0,
                copies_output=copies_output,
            ),
        )

    return build


def latent_attention_block(*, is_indexed: bool = False) -> Builder:
    """Multi-head latent attention: queries and keys/values through low-rank projections (DeepSeek V2 and V3)."""

    def build(fields: Fields, layer: int) -> Block:
        path, hidden, heads = "self_attn", fields.hidden_size, fields.size("num_attention_heads")
        nope, rope, value = (fields.size(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        q_rank, kv_rank = fields.optional_size("q_lora_rank"), fields.size("kv_lora_rank")
        has_bias = fields.flag("attention_bias")
        query = heads * (nope + rope)
        linears, norms = [], []
        if q_rank is None:
            linears.append(Linear(f"{path}.q_proj", hidden, query))
        else:
            linears.append(Linear(f"{path}.q_a_proj", hidden, q_rank, has_bias))
            norms.append(Norm(f"{path}.q_a_layernorm", q_rank, q_rank))
            linears.append(Linear(f"{path}.q_b_proj", q_rank, query, False, "mixer_inner"))
        linears.append(Linear(f"{path}.kv_a_proj_with_mqa", hidden, kv_rank + rope, has_bias))
        norms.append(Norm(f"{path}.kv_a_layernorm", kv_rank, kv_rank))
        linears.append(Linear(f"{path}.kv_b_proj", kv_rank, heads * (nope + value), False, "mixer_inner"))
        linears.append(Linear(f"{path}.o_proj", heads * value, hidden, has_bias, "mixer_out"))
        attention = Attention(heads, heads, nope + rope, value_dim=value, fused_extra_width=heads * nope)
        if is_indexed:
            index_heads, index_dim = fields.size("index_n_heads"), fields.size("index_head_dim")
            assert q_rank is not None
            linears += [
                Linear(f"{path}.indexer.wq_b", q_rank, index_heads * index_dim, False, "mixer_inner", False),
                Linear(f"{path}.indexer.wk", hidden, index_dim, False, "mixer_in", False),
                Linear(f"{path}.indexer.weights_proj", hidden, index_heads, False, "mixer_in", False),
            ]
            norms.append(Norm(f"{path}.indexer.k_norm", index_dim, index_dim, "layer", True))
            attention = replace(attention, index_width=index_heads * index_dim, index_heads=index_heads)
        return Block(tuple(linears), tuple(norms), attention=attention)

    return build


def _time_step_rank(fields: Fields) -> int:
    rank = fields.get("time_step_rank")
    return math.ceil(fields.hidden_size / 16) if rank in (None, "auto") else fields.size("time_step_rank")


def mamba_block(*, path: str = "mixer", has_inner_norms: bool = False) -> Builder:
    """A selective state-space mixer (Mamba): gate and stream in one projection, a short convolution, a scan."""

    def build(fields: Fields, layer: int) -> Block:
        hidden, state, rank = fields.hidden_size, fields.size("state_size"), _time_step_rank(fields)
        width = fields.optional_size("mixer_width") or fields.size("expand") * hidden
        kernel, has_bias = fields.size("conv_kernel"), fields.flag("use_bias")
        linears = (
            Linear(f"{path}.in_proj", hidden, 2 * width, has_bias),
            Linear(f"{path}.x_proj", width, rank + 2 * state, False, "mixer_inner"),
            Linear(f"{path}.dt_proj", rank, width, True, "mixer_inner"),
            Linear(f"{path}.out_proj", width, hidden, has_bias, "mixer_out"),
        )
        norms: tuple[Norm, ...] = ()
        if has_inner_norms:
            norms = tuple(
                Norm(f"{path}.{name}_layernorm", size, size) for name, size in (("dt", rank), ("b", state), ("c", state))
            )
        weights = (
            Weights(f"{path}.A_log", width * state),
            Weights(f"{path}.D", width),
            *_convolution(f"{path}.conv1d", width, kernel, fields.flag("use_conv_bias")),
        )
        scan = Scan("mamba", width, kernel, state_flops=2 * width * state)
        return Block(linears, norms, weights, scan=scan)

    return build


def mamba2_block(*, path: str = "mixer") -> Builder:
    """Mamba 2: heads with one decay each, keys and queries shared by groups of heads, the scan in chunks."""

    def build(fields: Fields, layer: int) -> Block:
        hidden, heads, state = fields.hidden_size, fields.size("mamba_num_heads"), fields.size("state_size")
        groups, kernel = fields.size("mamba_n_groups"), fields.size("conv_kernel")
        head_dim = fields.get("mamba_head_dim")
        if head_dim in (None, "auto"):
            width = fields.size("expand") * hidden
            head_dim = width // heads
        else:
            width = heads * fields.size("mamba_head_dim")
        channels, has_bias = width + 2 * groups * state, fields.flag("use_bias")
        linears = (
            Linear(f"{path}.in_proj", hidden, width + channels + heads, has_bias),
            Linear(f"{path}.out_proj", width, hidden, has_bias, "mixer_out"),
        )
        weights = (
            *(Weights(f"{path}.{name}", heads) for name in ("dt_bias", "A_log", "D")),
            *_convolution(f"{path}.conv1d", channels, kernel, fields.flag("use_conv_bias")),
        )
        scan = Scan(
            "mamba2",
            channels,
            kernel,
            state_flops=2 * heads * 2 * state * head_dim,  # states of a chunk in and out
            chunk_flops=2 * heads * (state + head_dim),  # C·B, times the values
            chunk=fields.size("chunk_size"),
        )
        return Block(linears, (Norm(f"{path}.norm", width, width),), weights, scan=scan)

    return build


def _convolution(path: str, channels: int, kernel: int, has_bias: bool) -> tuple[Weights, ...]:
    bias = (Weights(f"{path}.bias", channels),) if has_bias else ()
    return (Weights(f"{path}.weight", channels * kernel), *bias)


_DELTA_CHUNK: Final = 64  # tokens of a chunk of the gated delta rule, fixed in transformers


def _delta_rule(heads: int, key_dim: int, value_dim: int, channels: int, kernel: int, *, solves: bool) -> Scan:
    """The chunked gated delta rule.

    In the chunk: keys by keys, queries by keys, and those scores by the values; across chunks: the state read by keys and by
    queries, and updated. ``solves``: the code solves triangular systems for values and keys (instead of a loop).
    """
    return Scan(
        "gated_delta",
        channels,
        kernel,
        state_flops=2 * heads * 3 * key_dim * value_dim,
        chunk_flops=2 * heads * (2 * key_dim + value_dim),
        chunk=_DELTA_CHUNK,
        solve_flops=2 * heads * (key_dim + value_dim) if solves else 0,
    )


def gated_delta_block(*, names: Mapping[str, Callable[[int, int, int], int]]) -> Builder:
    """Gated delta net (Qwen3-Next, Qwen3.5). ``names``: projections by (keys, values, value heads) -> width."""

    def build(fields: Fields, layer: int) -> Block:
        path, hidden = "linear_attn", fields.hidden_size
        key_heads, value_heads = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
        key_dim, value_dim = fields.size("linear_key_head_dim"), fields.size("linear_value_head_dim")
        keys, values, kernel = key_heads * key_dim, value_heads * value_dim, fields.size("linear_conv_kernel_dim")
        linears = [Linear(f"{path}.{name}", hidden, width(keys, values, value_heads)) for name, width in names.items()]
        linears.append(Linear(f"{path}.out_proj", values, hidden, False, "mixer_out"))
        channels = 2 * keys + values
        weights = (
            *(Weights(f"{path}.{name}", value_heads) for name in ("dt_bias", "A_log")),
            *_convolution(f"{path}.conv1d", channels, kernel, False),
        )
        scan = _delta_rule(value_heads, key_dim, value_dim, channels, kernel, solves=True)
        return Block(tuple(linears), (Norm(f"{path}.norm", value_dim, values),), weights, scan=scan)

    return build


QWEN3_NEXT_PROJECTIONS: Final[dict[str, Callable[[int, int, int], int]]] = {
    "in_proj_qkvz": lambda keys, values, heads: 2 * keys + 2 * values,
    "in_proj_ba": lambda keys, values, heads: 2 * heads,
}
QWEN3_5_PROJECTIONS: Final[dict[str, Callable[[int, int, int], int]]] = {
    "in_proj_qkv": lambda keys, values, heads: 2 * keys + values,
    "in_proj_z": lambda keys, values, heads: values,
    "in_proj_b": lambda keys, values, heads: heads,
    "in_proj_a": lambda keys, values, heads: heads,
}


def kimi_delta_block(fields: Fields, layer: int) -> Block:
    """Kimi delta attention: a gated delta net with a decay for each channel, through a low-rank gate."""
    path, hidden = "self_attn", fields.hidden_size
    heads, head_dim, kernel = (fields.size(f"linear_{name}") for name in ("num_heads", "head_dim", "conv_kernel_dim"))
    width = heads * head_dim
    linears = (
        *(Linear(f"{path}.{name}_proj", hidden, width) for name in "qkv"),
        Linear(f"{path}.forget_gate.f_a_proj", hidden, head_dim),
        Linear(f"{path}.forget_gate.f_b_proj", head_dim, width, False, "mixer_inner"),
        Linear(f"{path}.b_proj", hidden, heads),
        Linear(f"{path}.g_a_proj", hidden, head_dim),
        Linear(f"{path}.g_b_proj", head_dim, width, False, "mixer_inner"),
        Linear(f"{path}.o_proj", width, hidden, False, "mixer_out"),
    )
    weights = (
        Weights(f"{path}.forget_gate.dt_bias", width),
        Weights(f"{path}.forget_gate.A_log", heads),
        *_convolution(f"{path}.conv1d", 3 * width, kernel, False),
    )
    scan = _delta_rule(heads, head_dim, head_dim, 3 * width, kernel, solves=False)
    return Block(linears, (Norm(f"{path}.o_norm", head_dim, width),), weights, scan=scan)


def lightning_block(fields: Fields, layer: int) -> Block:
    """Lightning attention (MiniMax): linear attention in blocks, with an output gate."""
    path, hidden = "self_attn", fields.hidden_size
    heads, _, head_dim = head_counts(fields)
    width = heads * head_dim
    linears = (
        Linear(f"{path}.qkv_proj", hidden, 3 * width),
        Linear(f"{path}.output_gate", hidden, width),
        Linear(f"{path}.out_proj", width, hidden, False, "mixer_out"),
    )
    scan = Scan(
        "lightning",
        width,
        state_flops=2 * heads * 2 * head_dim * head_dim,
        chunk_flops=2 * heads * 2 * head_dim,
        chunk=fields.size("block_size"),
    )
    return Block(linears, (Norm(f"{path}.norm", width, width),), scan=scan)


def short_conv_block(fields: Fields, layer: int) -> Block:
    """A gated short convolution (LFM2)."""
    hidden, kernel, has_bias = fields.hidden_size, fields.size("conv_L_cache"), fields.flag("conv_bias")
    linears = (
        Linear("conv.in_proj", hidden, 3 * hidden, has_bias),
        Linear("conv.out_proj", hidden, hidden, has_bias, "mixer_out"),
    )
    weights = _convolution("conv.conv", hidden, kernel, has_bias)
    return Block(linears, (), weights, scan=Scan("short_conv", hidden, kernel))


def routed_attention_block(fields: Fields, layer: int) -> Block:
    """Mixture of attention heads (JetMoe): query and output projections are routed experts, keys and values are shared."""
    path, hidden = "self_attention", fields.hidden_size
    kv_heads, head_dim = fields.size("num_key_value_heads"), fields.size("head_dim")
    number, top_k, width = fields.size("num_experts"), fields.size("num_experts_per_tok"), kv_heads * head_dim
    linears = (
        Linear(f"{path}.experts.router.layer", hidden, number, False, "mixer_in"),
        Linear(f"{path}.kv_proj", hidden, 2 * width),
    )
    experts = Experts(
        number,
        top_k,
        hidden,
        width,
        linear_names=(),
        path=f"{path}.experts",
        router_features=0,
        stack_names=("input_linear.weight", "output_linear.weight"),
        is_gated=False,
    )
    weights = (Weights(f"{path}.experts.bias", hidden),)
    return Block(linears, (), weights, Attention(kv_heads * top_k, kv_heads * top_k, head_dim), experts=experts)


def by_kind(full: Builder, other: Builder, is_full: Callable[[Fields, int], bool]) -> Builder:
    return lambda fields, layer: (full if is_full(fields, layer) else other)(fields, layer)


def kind_is(
    kind: str, *, interval: str = "", default_interval: int = 0, otherwise: bool = False
) -> Callable[[Fields, int], bool]:
    """Whether ``layer_types`` calls the layer ``kind``; without them every ``interval``-th layer is."""

    def test(fields: Fields, layer: int) -> bool:
        named = fields.entry("layer_types", layer)
        if named is not None:
            return bool(LAYER_KINDS.get(named, named) == kind)
        step = (fields.get(interval) if interval else None) or default_interval
        return (layer + 1) % step == 0 if step else otherwise

    return test


LAYER_KINDS: Final = {"mamba": "linear_attention", "attention": "full_attention"}  # older names for the same


# --- feed-forwards ---------------------------------------------------------------------------------------------------


def gated_mlp(
    path: str = "mlp",
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    *,
    width: str | Callable[[Fields, int], int] = "intermediate_size",
    bias: Flag = False,
) -> Builder:
    """A gated MLP. Two ``names``: gate and up are one projection."""

    def build(fields: Fields, layer: int) -> Block:
        hidden, has_bias = fields.hidden_size, is_set(fields, bias)
        inner = fields.size(width) if isinstance(width, str) else width(fields, layer)
        each = 2 * inner if len(names) == 2 else inner
        into = [Linear(f"{path}.{name}", hidden, each, has_bias, "mlp_in") for name in names[:-1]]
        out = Linear(f"{path}.{names[-1]}", inner, hidden, has_bias, "mlp_out")
        return Block((*into, out), last_linear=out.name)

    return build


def plain_mlp(
    path: str,
    names: tuple[str, str],
    *,
    width: str | Callable[[Fields, int], int] = "intermediate_size",
    bias: Flag = True,
    extra: tuple[Weights, ...] = (),
) -> Builder:
    """An MLP of two linears with an activation between."""

    def build(fields: Fields, layer: int) -> Block:
        hidden, has_bias = fields.hidden_size, is_set(fields, bias)
        inner = fields.size(width) if isinstance(width, str) else width(fields, layer)
        prefix = f"{path}." if path else ""
        linears = (
            Linear(f"{prefix}{names[0]}", hidden, inner, has_bias, "mlp_in"),
            Linear(f"{prefix}{names[1]}", inner, hidden, has_bias, "mlp_out"),
        )
        return Block(linears, (), extra, is_gated=False, last_linear=linears[-1].name)

    return build


def four_hidden(fields: Fields, layer: int) -> int:
    return fields.optional_size("intermediate_size") or 4 * fields.hidden_size


@dataclass(frozen=True, slots=True)
class Shared:
    """Experts that every token visits beside the routed ones, as one MLP."""

    width: Callable[[Fields], int]
    name: str = "shared_experts"
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    has_gate: bool = False  # its output is weighted by a linear of one row
    is_gated: bool = True
    bias: Flag = False
    comes_last: bool = False  # computed after the routed experts


def shared_count(fields: Fields) -> int:
    return fields.size("moe_intermediate_size") * fields.count("n_shared_experts")


def shared_width(fields: Fields) -> int:
    return fields.count("shared_intermediate_size")


def routed_experts(
    *,
    path: str = "mlp",
    experts_path: str = "",
    width: str = "moe_intermediate_size",
    linear_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    linear_path: str = "mlp.experts",
    router: str = "gate",
    router_is_linear: bool = False,
    router_bias: bool = False,
    router_in_fp32: bool = False,
    router_was_linear: bool = True,
    stack_names: tuple[str, ...] = ("gate_up_proj", "down_proj"),
    bias: bool = False,
    is_gated: bool = True,
    clamps: bool = False,
    runs_all: bool = False,
    shared: Shared | None = None,
    extra: Callable[[Fields], tuple[Weights, ...]] = lambda fields: (),
    latent: str = "",
) -> Builder:
    """Routed experts under ``path``, with their router and shared experts."""

    def build(fields: Fields, layer: int) -> Block:
        hidden, number = fields.hidden_size, _entry_size(fields, "num_experts", layer)
        top_k = _entry_size(fields, "num_experts_per_tok", layer)
        if top_k > number:
            raise CostModelError(f"num_experts_per_tok {top_k} is above the {number} experts there are")
        latent_size = fields.optional_size(latent) if latent else None
        linears: list[Linear] = []
        if router_is_linear:
            linears.append(Linear(f"{path}.{router}", hidden, number, False, "router"))
        if latent_size:
            linears.append(Linear(f"{path}.fc1_latent_proj", hidden, latent_size, fields.flag("mlp_bias"), "mlp_in"))
            linears.append(Linear(f"{path}.fc2_latent_proj", latent_size, hidden, fields.flag("mlp_bias"), "mlp_out"))
        if shared and shared.width(fields):
            place = f"{path}.{shared.name}"
            inner, has_bias = shared.width(fields), is_set(fields, shared.bias)
            into = shared.names[:-1]
            each = 2 * inner if shared.is_gated and len(into) == 1 else inner
            linears += [Linear(f"{place}.{name}", hidden, each, has_bias, "mlp_in") for name in into]
            linears.append(Linear(f"{place}.{shared.names[-1]}", inner, hidden, has_bias, "mlp_out"))
            if shared.has_gate:
                linears.append(Linear(f"{place}_gate", hidden, 1, False, "mlp_gate"))
        experts = Experts(
            number,
            top_k,
            latent_size or hidden,
            _entry_size(fields, width, layer),
            linear_names,
            linear_path,
            experts_path or f"{path}.experts",
            f"{path}.{router}",
            0 if router_is_linear else hidden,
            router_bias,
            router_in_fp32,
            router_was_linear,
            stack_names,
            is_gated,
            bias,
            clamps,
            runs_all,
        )
        last = f"{path}.{shared.name}.{shared.names[-1]}" if shared and shared.comes_last and shared.width(fields) else ""
        return Block(tuple(linears), (), extra(fields), experts=experts, is_gated=is_gated, last_linear=last)

    return build


def _entry_size(fields: Fields, name: str, layer: int) -> int:
    value = fields.get(name)
    if not isinstance(value, list):
        return fields.size(name)
    entry = fields.entry(name, layer)
    if isinstance(entry, bool) or not isinstance(entry, int) or entry < 1:
        raise CostModelError(f"the model config's {name} must hold positive whole numbers, got {entry!r}")
    return entry


def where(is_routed: Callable[[Fields, int], bool], routed: Builder, dense: Builder) -> Builder:
    return lambda fields, layer: (routed if is_routed(fields, layer) else dense)(fields, layer)


def after_dense_prefix(fields: Fields, layer: int) -> bool:
    kind = fields.entry("mlp_layer_types", layer)
    return kind == "sparse" if kind else layer >= fields.count("first_k_dense_replace")


def sparse_step(fields: Fields, layer: int) -> bool:
    only_dense = layer in (fields.get("mlp_only_layers") or [])
    return not only_dense and fields.count("num_experts") > 0 and (layer + 1) % fields.size("decoder_sparse_step") == 0


# --- layers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of the hidden size around the blocks, by name; ``""``: none there."""

    before_mixer: str = "input_layernorm"
    before_mlp: str = "post_attention_layernorm"
    after_mixer: str = ""
    after_mlp: str = ""
    kind: str = "rms"
    bias: Flag = False


def layer_of(
    mixer: Builder,
    feed_forward: Builder | None,
    norms: Norms = Norms(),
    *,
    is_parallel: Flag = False,
) -> Callable[[Fields, int], Layer]:
    """A layer: norm, mixer, norm, feed-forward, with the norms in the order of execution."""

    def build(fields: Fields, layer: int) -> Layer:
        mixed = mixer(fields, layer)
        fed = feed_forward(fields, layer) if feed_forward else Block()
        hidden = fields.hidden_size
        bias = is_set(fields, norms.bias)

        parallel = is_set(fields, is_parallel)

        def norm(name: str, *, reads_input: bool = False) -> tuple[Norm, ...]:
            return (Norm(name, hidden, hidden, norms.kind, bias, reads_input),) if name else ()

        has_dropout = bool(fields.get("hidden_dropout"))
        mixer_out = next((each.name for each in mixed.linears if each.place == "mixer_out"), "")
        ends_with = fed.last_linear if feed_forward else mixer_out
        before, after = norm(norms.before_mixer, reads_input=True), norm(norms.after_mlp) if feed_forward else ()
        middle: tuple[Norm, ...] = ()
        if feed_forward:
            reads_input = parallel or not norms.before_mixer
            middle = (*norm(norms.after_mixer), *norm(norms.before_mlp, reads_input=reads_input))
        return Layer(
            linears=mixed.linears + fed.linears,
            norms=before + middle + mixed.norms + fed.norms + after,
            attention=mixed.attention,
            experts=fed.experts,
            weights=mixed.weights + fed.weights,
            scan=mixed.scan,
            mixer_experts=mixed.experts,
            is_parallel=parallel,
            shares_input=parallel and not norms.before_mlp,
            last_linear="" if after or has_dropout else ends_with,
            has_dropout=has_dropout,
            is_gated=fed.is_gated,
        )

    return build


@dataclass(frozen=True, slots=True)
class Outside:
    """What stands outside the layers besides embedding and head."""

    norms: tuple[Norm, ...] = ()
    linears: tuple[Linear, ...] = ()
    weights: tuple[Weights, ...] = ()
    embedding_width: int | None = None


def final_norm(name: str = "model.norm", kind: str = "rms", *, bias: Flag = False) -> Callable[[Fields], Outside]:
    def build(fields: Fields) -> Outside:
        return Outside((Norm(name, fields.hidden_size, fields.hidden_size, kind, is_set(fields, bias)),))

    return build
