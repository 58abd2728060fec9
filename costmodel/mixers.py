"""Builders of what mixes the tokens of a sequence: attention, latent attention, state-space and linear-attention layers.

Source: ``modeling_*.py`` of transformers 5.24.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from costmodel.blocks import Block, Builder, Fields, Flag, is_set
from costmodel.errors import CostModelError
from costmodel.model_spec import Attention, Experts, Linear, Norm, Scan, Weights

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


def sliding_by_kind(full_every: int = 0) -> Callable[[Fields, int], int | None]:
    """By ``layer_types``; without them every ``full_every``-th layer attends to everything (0: all do)."""

    def window(fields: Fields, layer: int) -> int | None:
        kind = fields.entry("layer_types", layer)
        if kind is None:
            slides = full_every > 0 and (layer + 1) % full_every != 0
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
