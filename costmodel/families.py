"""The model families: what the modelling code of each ``model_type`` builds from its config.

One table, :data:`FAMILIES`: a mixer (attention, latent attention, Mamba ...) and a feed-forward (gated, plain, routed) for
each layer, the norms around them, and the names outside the layers. A family that is not in it is refused by name.

Source: ``configuration_*.py`` and ``modeling_*.py`` of transformers 5.24; for remote-code families (Baichuan, BlackMamba,
DeepSeek-MoE, InternLM2, Qwen 1) their published files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from costmodel.blocks import (
    LAYER_KINDS,
    QWEN3_5_PROJECTIONS,
    QWEN3_NEXT_PROJECTIONS,
    Block,
    Builder,
    Fields,
    Flag,
    Norms,
    Outside,
    Shared,
    after_dense_prefix,
    attention_block,
    by_kind,
    final_norm,
    four_hidden,
    gated_delta_block,
    gated_mlp,
    head_counts,
    kimi_delta_block,
    kind_is,
    latent_attention_block,
    layer_of,
    lightning_block,
    mamba2_block,
    mamba_block,
    plain_mlp,
    qwen_window,
    routed_attention_block,
    routed_experts,
    shared_count,
    shared_width,
    short_conv_block,
    sliding_by_kind,
    sparse_step,
    where,
    window_everywhere,
)
from costmodel.errors import CostModelError
from costmodel.model_spec import Attention, Experts, Layer, Linear, Norm, Weights

_MODEL_NORM: Final = final_norm()


# --- families whose layers need more than the pieces above -------------------------------------------------------------


def _falcon_layer(fields: Fields, layer: int) -> Layer:
    """Falcon: fused projection with 1, some or all key/value heads; one, two or sequential norms."""
    is_new, is_parallel = fields.flag("new_decoder_architecture"), fields.flag("parallel_attn")
    heads, hidden = fields.size("num_attention_heads"), fields.hidden_size
    head_dim = hidden // heads
    kv_heads = (fields.optional_size("num_kv_heads") or heads) if is_new else 1 if fields.flag("multi_query") else heads
    bias = fields.flag("bias")
    linears = (
        Linear("self_attention.query_key_value", hidden, (heads + 2 * kv_heads) * head_dim, bias),
        Linear("self_attention.dense", hidden, hidden, bias, "mixer_out"),
    )
    # keys and values are repeated for each query head before the kernel sees them; a single head is broadcast instead, which
    # no fused SDPA kernel takes
    has_kernel = is_new or kv_heads == heads
    attention = Block(linears, attention=Attention(heads, heads, head_dim, has_fused_kernel=has_kernel, copies_output=True))
    two_norms = (fields.get("num_ln_in_parallel_attn") or (2 if is_new else 1)) == 2
    if not is_parallel:
        names = ("input_layernorm", "post_attention_layernorm")
    elif two_norms:
        names = ("ln_attn", "ln_mlp")
    else:
        names = ("input_layernorm", "")
    norms = Norms(*names, kind="layer", bias=True)
    mlp = plain_mlp("mlp", ("dense_h_to_4h", "dense_4h_to_h"), width=four_hidden, bias="bias")
    return layer_of(lambda fields, layer: attention, mlp, norms, is_parallel=is_parallel or is_new)(fields, layer)


def _opt_layer(fields: Fields, layer: int) -> Layer:
    affine, hidden = fields.flag("layer_norm_elementwise_affine"), fields.hidden_size
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    built = layer_of(
        attention_block(names=names, bias="enable_bias"),
        plain_mlp("", ("fc1", "fc2"), width="intermediate_size", bias="enable_bias"),
    )(fields, layer)
    norms = (_layer_norm("self_attn_layer_norm", hidden, affine), _layer_norm("final_layer_norm", hidden, affine))
    return replace(built, norms=norms, last_linear=built.last_linear if fields.flag("do_layer_norm_before") else "")


def _layer_norm(name: str, size: int, is_affine: bool = True) -> Norm:
    return Norm(name, size if is_affine else 0, size, "layer", is_affine)


def _opt_outside(fields: Fields) -> Outside:
    hidden, width = fields.hidden_size, fields.optional_size("word_embed_proj_dim") or fields.hidden_size
    path = "model.decoder"
    linears: tuple[Linear, ...] = ()
    if width != hidden:
        linears = (
            Linear(f"{path}.project_in", width, hidden, place="stem"),
            Linear(f"{path}.project_out", hidden, width, place="side_out"),
        )
    has_norm = fields.flag("do_layer_norm_before") and not fields.flag("_remove_final_layer_norm")
    norm = _layer_norm(f"{path}.final_layer_norm", hidden, fields.flag("layer_norm_elementwise_affine"))
    # OPT keeps two positions more than it uses
    table = Weights(f"{path}.embed_positions.weight", (fields.size("max_position_embeddings") + 2) * hidden, is_lookup=True)
    return Outside((norm,) if has_norm else (), linears, (table,), width if width != hidden else None)


def _gpt2_outside(fields: Fields) -> Outside:
    hidden = fields.hidden_size
    table = Weights("transformer.wpe.weight", fields.size("max_position_embeddings") * hidden, is_lookup=True)
    return Outside((_layer_norm("transformer.ln_f", hidden),), weights=(table,))


def _bloom_outside(fields: Fields) -> Outside:
    names = ("transformer.word_embeddings_layernorm", "transformer.ln_f")
    return Outside(tuple(_layer_norm(name, fields.hidden_size) for name in names))


def _stablelm_layer(fields: Fields, layer: int) -> Layer:
    fields = fields.without("head_dim")
    is_parallel = fields.flag("use_parallel_residual")
    second = "" if is_parallel else "post_attention_layernorm"
    built = layer_of(
        attention_block(bias="use_qkv_bias", output_bias=False, copies_output=True),
        gated_mlp(),
        Norms(before_mlp=second, kind="layer", bias=True),
        is_parallel=is_parallel,
    )(fields, layer)
    if not fields.flag("qk_layernorm"):
        return built
    attention = built.attention  # one norm without bias for each head
    per_head = tuple(
        Norm(f"self_attn.{which}_layernorm.norms.{head}", attention.head_dim, attention.head_dim, "layer")
        for which, heads in (("q", attention.num_heads), ("k", attention.num_kv_heads))
        for head in range(heads)
    )
    return replace(built, norms=built.norms + per_head)


def _phi_attention(fields: Fields, layer: int) -> Block:
    built = attention_block(names=("q_proj", "k_proj", "v_proj", "dense"), bias=True, copies_output=True)(fields, layer)
    if not fields.flag("qk_layernorm"):
        return built
    attention = built.attention
    widths = {"q": attention.query_width, "k": attention.kv_width}
    norms = tuple(
        Norm(f"self_attn.{which}_layernorm", attention.head_dim, width, "layer", True) for which, width in widths.items()
    )
    return replace(built, norms=norms)


def _gpt_bigcode_layer(fields: Fields, layer: int) -> Layer:
    """GPT-BigCode (StarCoder): GPT-2 with one key/value head for all query heads."""
    heads = fields.size("num_attention_heads")
    hidden, kv_heads = fields.hidden_size, 1 if fields.flag("multi_query") else heads
    head_dim = hidden // heads
    linears = (
        Linear("attn.c_attn", hidden, (heads + 2 * kv_heads) * head_dim, True),
        Linear("attn.c_proj", hidden, hidden, True, "mixer_out"),
    )
    attention = Block(linears, attention=Attention(heads, kv_heads, head_dim))
    mlp = plain_mlp("mlp", ("c_fc", "c_proj"), width=four_hidden)
    return layer_of(lambda fields, layer: attention, mlp, Norms("ln_1", "ln_2", kind="layer", bias=True))(fields, layer)


def _gemma4_layer(fields: Fields, layer: int) -> Layer:
    """Gemma 4: wider heads in full layers, values that are the keys, layers that borrow keys and values, routed experts
    beside the MLP, a small input of its own for each layer."""
    hidden, number = fields.hidden_size, fields.size("num_hidden_layers")
    named = fields.entry("layer_types", layer)
    is_full = layer == number - 1 or (named == "full_attention" if named else (layer + 1) % 6 == 0)
    heads, kv_heads, head_dim = head_counts(fields)
    if is_full:
        head_dim = fields.optional_size("global_head_dim") or head_dim
        if fields.flag("attention_k_eq_v"):
            kv_heads = fields.optional_size("num_global_key_value_heads") or kv_heads
    borrows = layer >= number - fields.count("num_kv_shared_layers")
    bias = fields.flag("attention_bias")
    path, query, kv = "self_attn", heads * head_dim, kv_heads * head_dim
    linears = [Linear(f"{path}.q_proj", hidden, query, bias)]
    inner = [Norm(f"{path}.q_norm", head_dim, query, "rms_fp32")]
    if not borrows:
        linears.append(Linear(f"{path}.k_proj", hidden, kv, bias))
        inner += [Norm(f"{path}.k_norm", head_dim, kv, "rms_fp32"), Norm(f"{path}.v_norm", 0, kv, "rms_fp32")]
        if not (fields.flag("attention_k_eq_v") and is_full):
            linears.append(Linear(f"{path}.v_proj", hidden, kv, bias))
    linears.append(Linear(f"{path}.o_proj", query, hidden, bias, "mixer_out"))
    window = None if is_full else fields.optional_size("sliding_window")
    width = fields.size("intermediate_size") * (2 if borrows and fields.flag("use_double_wide_mlp") else 1)
    linears += gated_mlp(width=lambda fields, layer: width)(fields, layer).linears
    names = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    weights: tuple[Weights, ...] = ()
    experts = None
    if fields.flag("enable_moe_block"):
        routed = routed_experts(
            path="router", experts_path="experts", router="proj", router_is_linear=True, linear_names=()
        )(fields, layer)
        experts = routed.experts
        assert experts is not None
        linears += routed.linears
        weights = (Weights("router.scale", hidden), Weights("router.per_expert_scale", experts.num_experts))
        names += ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"]
    extra_width = fields.count("hidden_size_per_layer_input")
    if extra_width:
        linears.append(Linear("per_layer_input_gate", hidden, extra_width, False, "side_in"))
        linears.append(Linear("per_layer_projection", extra_width, hidden, False, "side_out"))
        names.append("post_per_layer_input_norm")
    norms = tuple(Norm(name, hidden, hidden, "rms_fp32", False, name == names[0]) for name in names)
    attention = Attention(heads, kv_heads, head_dim, window)
    return Layer(tuple(linears), norms + tuple(inner), attention, experts, weights)


def _gemma4_outside(fields: Fields) -> Outside:
    hidden, width = fields.hidden_size, fields.count("hidden_size_per_layer_input")
    final = Norm("model.norm", hidden, hidden)
    if not width:
        return Outside((final,))
    all_layers = fields.size("num_hidden_layers") * width
    table = Weights(
        "model.embed_tokens_per_layer.weight", fields.size("vocab_size_per_layer_input") * all_layers, is_lookup=True
    )
    return Outside(
        (Norm("model.per_layer_projection_norm", width, all_layers), final),
        (Linear("model.per_layer_model_projection", hidden, all_layers, place="side_in"),),
        (table,),
    )


_NEMOTRON_DEFAULT: Final = ("linear_attention", "moe", "full_attention", "mlp")  # of the config class
_NEMOTRON_KINDS: Final = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _nemotron_kind(fields: Fields, layer: int) -> str:
    named = fields.entry("layer_types", layer) or fields.entry("layers_block_type", layer)
    pattern = fields.get("hybrid_override_pattern")
    if named is None and isinstance(pattern, str):
        if layer >= len(pattern):
            raise CostModelError(f"hybrid_override_pattern names {len(pattern)} layers, num_hidden_layers more")
        named = _NEMOTRON_KINDS.get(pattern[layer])
    kind = str(named or _NEMOTRON_DEFAULT[layer])
    return LAYER_KINDS.get(kind, kind)


def _nemotron_num_layers(fields: Fields) -> int:
    """The pattern counts, whatever num_hidden_layers says."""
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        named = fields.get(name)
        if named:
            return len(named)
    return len(_NEMOTRON_DEFAULT)


def _nemotron_layer(fields: Fields, layer: int) -> Layer:
    """Nemotron-H: each layer is one norm and one block, be it Mamba 2, attention, an MLP or routed experts."""
    kind = _nemotron_kind(fields, layer)
    if kind not in _NEMOTRON_BLOCKS:
        raise CostModelError(f"layer {layer} of the nemotron_h config is {kind!r}; known: {', '.join(_NEMOTRON_BLOCKS)}")
    build, feeds = _NEMOTRON_BLOCKS[kind]
    if feeds:
        return layer_of(lambda fields, layer: Block(), build, Norms("", "norm"))(fields, layer)
    return layer_of(build, None, Norms("norm", ""))(fields, layer)


_NEMOTRON_BLOCKS: Final[dict[str, tuple[Builder, bool]]] = {
    "linear_attention": (mamba2_block(), False),
    "full_attention": (attention_block(path="mixer"), False),
    "mlp": (plain_mlp("mixer", ("up_proj", "down_proj"), bias="mlp_bias"), True),
    "moe": (
        routed_experts(
            path="mixer",
            stack_names=("up_proj", "down_proj"),
            linear_names=("up_proj", "down_proj"),
            linear_path="mixer.experts",
            is_gated=False,
            latent="moe_latent_size",
            shared=Shared(
                lambda fields: fields.count("moe_shared_expert_intermediate_size"),
                names=("up_proj", "down_proj"),
                is_gated=False,
                bias="mlp_bias",
                comes_last=True,
            ),
        ),
        True,
    ),
}


def _granite_hybrid_feed_forward(fields: Fields, layer: int) -> Block:
    """Granite 4: a shared MLP in every layer, routed experts beside it where there are any."""
    routed = _GRANITE_ROUTED(fields, layer) if fields.count("num_experts") else Block()
    if not shared_width(fields):
        return routed
    names = ("input_linear", "output_linear")
    mlp = gated_mlp("shared_mlp", names, width=lambda fields, layer: shared_width(fields))(fields, layer)
    return replace(routed, linears=routed.linears + mlp.linears, last_linear=mlp.last_linear)


_GRANITE_ROUTED: Final = routed_experts(path="block_sparse_moe", width="intermediate_size", linear_names=(), router="router")


def _periodic(period: str, offset: str) -> Callable[[Fields, int], bool]:
    return lambda fields, layer: layer % fields.size(period) == fields.count(offset)


def _ernie_routed(fields: Fields, layer: int) -> bool:
    end = fields.get("moe_layer_end_index")
    last = fields.size("num_hidden_layers") - 1 if end in (None, -1) else end
    return (layer + 1) % fields.size("moe_layer_interval") == 0 and fields.count("moe_layer_start_index") <= layer <= last


def _llama4_routed(fields: Fields, layer: int) -> bool:
    listed = fields.get("moe_layers")
    return layer in listed if listed is not None else (layer + 1) % fields.size("interleave_moe_layer_step") == 0


def _after_first_layer(fields: Fields, layer: int) -> bool:
    kind = fields.entry("mlp_layer_types", layer)
    return bool(kind == "sparse") if kind else layer > 0


def _kimi_is_full(fields: Fields, layer: int) -> bool:
    named = fields.entry("layer_types", layer)
    if named is not None:
        return bool(named == "full_attention")
    listed = fields.get("linear_attn_config.full_attn_layers")
    return layer + 1 in listed if listed is not None else layer > 0 and layer % 4 == 0


def _minimax_is_full(fields: Fields, layer: int) -> bool:
    named = fields.entry("layer_types", layer)
    return layer % 2 == 0 if named is None else bool(named == "full_attention")


def _blackmamba_layer(fields: Fields, layer: int) -> Layer:
    """BlackMamba: Mamba blocks ("r") alternate with routed gated MLPs (their number of experts), each under one norm."""
    kind = str(fields.entry("mamba_moe_layers", layer))
    if kind == "r":
        return layer_of(mamba_block(), None, Norms("norm", ""))(fields, layer)
    if not kind.isdigit():
        raise CostModelError(f"layer {layer} of the blackmamba config is {kind!r}: neither 'r' nor a number of experts")
    hidden = fields.hidden_size
    experts = Experts(
        int(kind),
        fields.size("num_experts_per_tok"),
        hidden,
        fields.size("intermediate_size"),
        ("linear_fc1_gate", "linear_fc1_up", "linear_fc2"),
        "mixer.experts",
        "mixer.experts",
        "mixer.router",
        router_bias=True,
        stack_names=(),
    )
    return layer_of(lambda fields, layer: Block(), lambda fields, layer: Block(experts=experts), Norms("", "norm"))(
        fields, layer
    )


@dataclass(frozen=True, slots=True)
class Family:
    """What the modelling code of one ``model_type`` fixes."""

    layer: Callable[[Fields, int], Layer]
    aliases: Mapping[str, str] = field(default_factory=dict)  # name here -> name in this family's config
    outside: Callable[[Fields], Outside] = _MODEL_NORM
    layers_path: str = "model.layers"
    embedding_path: str = "model.embed_tokens"
    head_path: str = "lm_head"
    head_bias: Flag = False
    is_ever_tied: bool = True  # False: the code keeps a head of its own whatever tie_word_embeddings says
    num_layers: Callable[[Fields], int] = lambda fields: fields.size("num_hidden_layers")
    activations_checked: bool = True  # False: activation bytes follow from the layers, held against no real module


# --- the table ---------------------------------------------------------------------------------------------------------

_LLAMA: Final = layer_of(attention_block(bias="attention_bias"), gated_mlp(bias="mlp_bias"))
_SANDWICH: Final = Norms(
    "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
)
_LAYER_NORMS: Final = Norms(kind="layer", bias=True)
_MIXTRAL: Final = routed_experts(
    width="intermediate_size", linear_names=("w1", "w3", "w2"), linear_path="block_sparse_moe.experts"
)
_DEEPSEEK: Final = routed_experts(router_in_fp32=True, router_was_linear=False, shared=Shared(shared_count, comes_last=True))
_QWEN_SHARED: Final = Shared(lambda fields: fields.count("shared_expert_intermediate_size"), "shared_expert", has_gate=True)
_QWEN_ROUTED: Final = routed_experts(shared=_QWEN_SHARED)
_FULL: Final = kind_is("full_attention")
_QWEN3_NEXT_FULL: Final = kind_is("full_attention", interval="full_attention_interval", default_interval=4)
_GATED_ATTENTION: Final = attention_block(bias="attention_bias", norm="head", norm_kind="rms_offset", has_output_gate=True)
_OFFSET: Final = Norms(kind="rms_offset")
_MAMBA_ALIASES: Final = {
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "use_bias": "mamba_proj_bias",
    "use_conv_bias": "mamba_conv_bias",
    "time_step_rank": "mamba_dt_rank",
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "chunk_size": "mamba_chunk_size",
}
_GPT2_ALIASES: Final = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "hidden_dropout": "resid_pdrop",
}

FAMILIES: Final[dict[str, Family]] = {
    "apertus": Family(
        layer_of(
            attention_block(bias="attention_bias", norm="head"),
            plain_mlp(
                "mlp",
                ("up_proj", "down_proj"),
                bias=False,
                extra=(Weights("mlp.act_fn.alpha_p", 1), Weights("mlp.act_fn.alpha_n", 1)),
            ),
            Norms("attention_layernorm", "feedforward_layernorm"),
        ),
        activations_checked=False,
    ),
    "arcee": Family(
        layer_of(attention_block(bias="attention_bias"), plain_mlp("mlp", ("up_proj", "down_proj"), bias="mlp_bias"))
    ),
    "baichuan": Family(layer_of(attention_block(names=("W_pack", "o_proj")), gated_mlp()), activations_checked=False),
    "blackmamba": Family(
        _blackmamba_layer,
        {
            "num_hidden_layers": "num_layers",
            "num_experts_per_tok": "topk",
            "intermediate_size": "ffn_hidden_size",
            "conv_kernel": "conv_dimension",
            "expand": "expansion_factor",
            "use_bias": "bias",
        },
        outside=final_norm("norm_f", "layer", bias=True),
        layers_path="decoder.layers",
        embedding_path="embedding",
        activations_checked=False,
    ),
    "bloom": Family(
        layer_of(
            attention_block(
                path="self_attention",
                names=("query_key_value", "dense"),
                bias=True,
                has_positions=False,
                has_fused_kernel=False,
            ),
            plain_mlp("mlp", ("dense_h_to_4h", "dense_4h_to_h"), width=lambda fields, layer: 4 * fields.hidden_size),
            _LAYER_NORMS,
        ),
        {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        outside=_bloom_outside,
        layers_path="transformer.h",
        embedding_path="transformer.word_embeddings",
    ),
    "cohere": Family(
        layer_of(
            attention_block(bias="attention_bias", norm="full", norm_flag="use_qk_norm", norm_kind="cohere"),
            gated_mlp(),
            Norms(before_mlp="", kind="cohere"),
            is_parallel=True,
        ),
        outside=final_norm(kind="cohere"),
    ),
    "cohere2": Family(
        layer_of(
            attention_block(bias="attention_bias", window=sliding_by_kind(4)),
            gated_mlp(),
            Norms(before_mlp="", kind="cohere"),
            is_parallel=True,
        ),
        outside=final_norm(kind="cohere"),
    ),
    "dbrx": Family(
        layer_of(
            attention_block(path="norm_attn_norm.attn", names=("Wqkv", "out_proj")),
            routed_experts(
                path="ffn",
                width="intermediate_size",
                linear_names=(),
                router="router.layer",
                router_is_linear=True,
                stack_names=("mlp.w1", "mlp.v1", "mlp.w2"),
            ),
            Norms("norm_attn_norm.norm_1", "norm_attn_norm.norm_2", kind="layer"),
        ),
        {
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "num_key_value_heads": "attn_config.kv_n_heads",
            "intermediate_size": "ffn_config.ffn_hidden_size",
            "num_experts": "ffn_config.moe_num_experts",
            "num_experts_per_tok": "ffn_config.moe_top_k",
        },
        outside=final_norm("transformer.norm_f", "layer"),
        layers_path="transformer.blocks",
        embedding_path="transformer.wte",
        activations_checked=False,
    ),
    "deepseek": Family(
        layer_of(
            attention_block(bias="attention_bias"),
            where(
                after_dense_prefix,
                routed_experts(stack_names=(), router_was_linear=False, shared=Shared(shared_count, comes_last=True)),
                gated_mlp(),
            ),
        ),
        {"num_experts": "n_routed_experts"},
        activations_checked=False,
    ),
    "deepseek_v2": Family(
        layer_of(
            latent_attention_block(),
            where(
                after_dense_prefix,
                routed_experts(
                    router_in_fp32=True,
                    router_was_linear=False,
                    shared=Shared(shared_count, comes_last=True, bias="mlp_bias"),
                ),
                gated_mlp(bias="mlp_bias"),
            ),
        ),
        {"num_experts": "n_routed_experts"},
    ),
    "deepseek_v3": Family(
        layer_of(latent_attention_block(), where(after_dense_prefix, _DEEPSEEK, gated_mlp())),
        {"num_experts": "n_routed_experts"},
    ),
    "deepseek_v32": Family(
        layer_of(latent_attention_block(is_indexed=True), where(after_dense_prefix, _DEEPSEEK, gated_mlp())),
        {"num_experts": "n_routed_experts"},
        activations_checked=False,
    ),
    "dots1": Family(
        layer_of(
            attention_block(bias="attention_bias", norm="head", window=sliding_by_kind()),
            where(after_dense_prefix, _DEEPSEEK, gated_mlp()),
        ),
        {"num_experts": "n_routed_experts"},
    ),
    "ernie4_5": Family(layer_of(attention_block(bias="use_bias"), gated_mlp(bias="use_bias"))),
    "ernie4_5_moe": Family(
        layer_of(
            attention_block(bias="use_bias"),
            where(
                _ernie_routed,
                routed_experts(
                    router_in_fp32=True,
                    shared=Shared(
                        lambda fields: fields.size("moe_intermediate_size") * fields.count("moe_num_shared_experts"),
                        bias="use_bias",
                    ),
                    extra=lambda fields: (
                        Weights("mlp.gate.moe_statics.e_score_correction_bias", fields.size("num_experts"), False, False),
                    ),
                ),
                gated_mlp(bias="use_bias"),
            ),
        ),
        {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        head_bias="use_bias",
    ),
    "exaone4": Family(
        layer_of(
            attention_block(norm="head", window=sliding_by_kind(4)),
            gated_mlp(),
            Norms("", "", "post_attention_layernorm", "post_feedforward_layernorm"),
        ),
    ),
    "falcon": Family(
        _falcon_layer,
        {"intermediate_size": "ffn_hidden_size", "hidden_act": "activation"},
        outside=final_norm("transformer.ln_f", "layer", bias=True),
        layers_path="transformer.h",
        embedding_path="transformer.word_embeddings",
        activations_checked=False,
    ),
    "falcon_mamba": Family(
        layer_of(mamba_block(), None, Norms("norm", "")),
        {"mixer_width": "intermediate_size"},
        outside=final_norm("backbone.norm_f"),
        layers_path="backbone.layers",
        embedding_path="backbone.embeddings",
        activations_checked=False,
    ),
    "gemma": Family(
        layer_of(attention_block(bias="attention_bias"), gated_mlp(), _OFFSET), outside=final_norm(kind="rms_offset")
    ),
    "gemma2": Family(
        layer_of(
            attention_block(bias="attention_bias", window=sliding_by_kind(2), has_fused_kernel=False, score="softcap"),
            gated_mlp(),
            replace(_SANDWICH, kind="rms_offset"),
        ),
        {"hidden_act": "hidden_activation"},
        outside=final_norm(kind="rms_offset"),
    ),
    "gemma3_text": Family(
        layer_of(
            attention_block(bias="attention_bias", norm="head", norm_kind="rms_offset", window=sliding_by_kind(6)),
            gated_mlp(),
            replace(_SANDWICH, kind="rms_offset"),
        ),
        {"hidden_act": "hidden_activation"},
        outside=final_norm(kind="rms_offset"),
    ),
    "gemma4_text": Family(
        _gemma4_layer,
        {"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
        outside=_gemma4_outside,
        activations_checked=False,
    ),
    "glm": Family(
        layer_of(
            attention_block(bias="attention_bias", output_bias=False, copies_output=True),
            gated_mlp(names=("gate_up_proj", "down_proj")),
        ),
    ),
    "glm4": Family(
        layer_of(
            attention_block(bias="attention_bias", output_bias=False, copies_output=True),
            gated_mlp(names=("gate_up_proj", "down_proj")),
            Norms(after_mixer="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
        ),
    ),
    "glm4_moe": Family(
        layer_of(
            attention_block(
                bias="attention_bias", output_bias=False, norm="head", norm_flag="use_qk_norm", copies_output=True
            ),
            where(after_dense_prefix, _DEEPSEEK, gated_mlp()),
        ),
        {"num_experts": "n_routed_experts"},
    ),
    "glm4_moe_lite": Family(
        layer_of(latent_attention_block(), where(_after_first_layer, _DEEPSEEK, gated_mlp())),
        {"num_experts": "n_routed_experts"},
    ),
    "gpt2": Family(
        layer_of(
            attention_block(path="attn", names=("c_attn", "c_proj"), bias=True, has_positions=False),
            plain_mlp("mlp", ("c_fc", "c_proj"), width=four_hidden),
            Norms("ln_1", "ln_2", kind="layer", bias=True),
        ),
        _GPT2_ALIASES,
        outside=_gpt2_outside,
        layers_path="transformer.h",
        embedding_path="transformer.wte",
    ),
    "gpt_bigcode": Family(
        _gpt_bigcode_layer,
        _GPT2_ALIASES,
        outside=_gpt2_outside,
        layers_path="transformer.h",
        embedding_path="transformer.wte",
        activations_checked=False,
    ),
    "gpt_neox": Family(
        layer_of(
            attention_block(path="attention", names=("query_key_value", "dense"), bias="attention_bias", copies_output=True),
            plain_mlp("mlp", ("dense_h_to_4h", "dense_4h_to_h")),
            _LAYER_NORMS,
            is_parallel="use_parallel_residual",
        ),
        outside=final_norm("gpt_neox.final_layer_norm", "layer", bias=True),
        layers_path="gpt_neox.layers",
        embedding_path="gpt_neox.embed_in",
    ),
    "gpt_oss": Family(
        layer_of(
            attention_block(
                bias="attention_bias",
                window=sliding_by_kind(2),
                has_fused_kernel=False,
                score="sinks",
                extra=lambda fields, layer: (Weights("self_attn.sinks", fields.size("num_attention_heads")),),
            ),
            routed_experts(
                width="intermediate_size", linear_names=(), router="router", router_bias=True, bias=True, clamps=True
            ),
            Norms(kind="rms_fp32"),
        ),
        {"num_experts": "num_local_experts"},
    ),
    "gptj": Family(
        layer_of(
            attention_block(path="attn", names=("q_proj", "k_proj", "v_proj", "out_proj")),
            plain_mlp("mlp", ("fc_in", "fc_out"), width=four_hidden),
            Norms("ln_1", "", kind="layer", bias=True),
            is_parallel=True,
        ),
        _GPT2_ALIASES,
        outside=final_norm("transformer.ln_f", "layer", bias=True),
        layers_path="transformer.h",
        embedding_path="transformer.wte",
        head_bias=True,
    ),
    "granite": Family(_LLAMA),
    "granitemoe": Family(
        layer_of(attention_block(bias="attention_bias"), _GRANITE_ROUTED), {"num_experts": "num_local_experts"}
    ),
    "granitemoehybrid": Family(
        layer_of(
            by_kind(attention_block(bias="attention_bias"), mamba2_block(path="mamba"), _FULL),
            _granite_hybrid_feed_forward,
        ),
        {"num_experts": "num_local_experts", **_MAMBA_ALIASES},
        activations_checked=False,
    ),
    "granitemoeshared": Family(
        layer_of(attention_block(bias="attention_bias"), _granite_hybrid_feed_forward),
        {"num_experts": "num_local_experts"},
    ),
    "helium": Family(_LLAMA),
    "hunyuan_v1_dense": Family(
        layer_of(
            attention_block(
                bias="attention_bias", norm="head", norms=("query_layernorm", "key_layernorm"), copies_output=True
            ),
            gated_mlp(),
        )
    ),
    "hunyuan_v1_moe": Family(
        layer_of(
            attention_block(
                bias="attention_bias", norm="head", norms=("query_layernorm", "key_layernorm"), copies_output=True
            ),
            routed_experts(
                width="intermediate_size",
                router="gate.wg",
                router_is_linear=True,
                shared=Shared(lambda fields: fields.size("intermediate_size"), "shared_mlp"),
            ),
        ),
        {"num_experts_per_tok": "moe_topk"},
    ),
    "internlm2": Family(
        layer_of(
            attention_block(path="attention", names=("wqkv", "wo"), bias="bias"),
            gated_mlp("feed_forward", ("w1", "w3", "w2")),
            Norms("attention_norm", "ffn_norm"),
        ),
        embedding_path="model.tok_embeddings",
        head_path="output",
        activations_checked=False,
    ),
    "jamba": Family(
        layer_of(
            by_kind(
                attention_block(),
                mamba_block(path="mamba", has_inner_norms=True),
                _periodic("attn_layer_period", "attn_layer_offset"),
            ),
            where(
                lambda fields, layer: (
                    fields.size("num_experts") > 1 and _periodic("expert_layer_period", "expert_layer_offset")(fields, layer)
                ),
                routed_experts(
                    path="feed_forward", width="intermediate_size", linear_path="feed_forward.experts", router="router"
                ),
                gated_mlp("feed_forward"),
            ),
            Norms("input_layernorm", "pre_ff_layernorm"),
        ),
        _MAMBA_ALIASES,
        outside=final_norm("model.final_layernorm"),
        activations_checked=False,
    ),
    "jetmoe": Family(
        layer_of(
            routed_attention_block,
            routed_experts(
                width="intermediate_size",
                linear_names=(),
                router="router.layer",
                router_is_linear=True,
                experts_path="mlp",
                stack_names=("input_linear.weight", "output_linear.weight"),
                extra=lambda fields: (Weights("mlp.bias", fields.hidden_size),),
            ),
        ),
        {"head_dim": "kv_channels", "num_experts": "num_local_experts", "hidden_act": "activation_function"},
        activations_checked=False,
    ),
    "kimi_linear": Family(
        layer_of(
            by_kind(latent_attention_block(), kimi_delta_block, _kimi_is_full),
            where(after_dense_prefix, _DEEPSEEK, gated_mlp()),
        ),
        {
            "num_experts_per_tok": "num_experts_per_token",
            "n_shared_experts": "num_shared_experts",
            "linear_num_heads": "linear_attn_config.num_heads",
            "linear_head_dim": "linear_attn_config.head_dim",
            "linear_conv_kernel_dim": "linear_attn_config.short_conv_kernel_size",
        },
        is_ever_tied=False,
        activations_checked=False,
    ),
    "lfm2_moe": Family(
        layer_of(
            by_kind(
                attention_block(
                    names=("q_proj", "k_proj", "v_proj", "out_proj"), norm="head", norms=("q_layernorm", "k_layernorm")
                ),
                short_conv_block,
                _FULL,
            ),
            where(
                lambda fields, layer: layer >= fields.count("num_dense_layers"),
                routed_experts(path="feed_forward", linear_names=("w1", "w3", "w2"), linear_path="feed_forward.experts"),
                gated_mlp("feed_forward", ("w1", "w3", "w2")),
            ),
            Norms("operator_norm", "ffn_norm"),
        ),
        outside=final_norm("model.embedding_norm"),
        activations_checked=False,
    ),
    "llama": Family(_LLAMA),
    "llama4_text": Family(
        layer_of(
            attention_block(bias="attention_bias", window=sliding_by_kind(4)),
            where(
                _llama4_routed,
                routed_experts(
                    path="feed_forward",
                    width="intermediate_size",
                    linear_names=(),
                    router="router",
                    router_is_linear=True,
                    runs_all=True,
                    shared=Shared(lambda fields: fields.size("intermediate_size"), "shared_expert", comes_last=True),
                ),
                gated_mlp("feed_forward", width="intermediate_size_mlp"),
            ),
        ),
        {"num_experts": "num_local_experts", "sliding_window": "attention_chunk_size"},
    ),
    "mamba": Family(
        layer_of(mamba_block(), None, Norms("norm", "")),
        {"mixer_width": "intermediate_size"},
        outside=final_norm("backbone.norm_f"),
        layers_path="backbone.layers",
        embedding_path="backbone.embeddings",
        activations_checked=False,
    ),
    "mamba2": Family(
        layer_of(mamba2_block(), None, Norms("norm", "")),
        {"mamba_num_heads": "num_heads", "mamba_head_dim": "head_dim", "mamba_n_groups": "n_groups"},
        outside=final_norm("backbone.norm_f"),
        layers_path="backbone.layers",
        embedding_path="backbone.embeddings",
        activations_checked=False,
    ),
    "minimax": Family(
        layer_of(
            by_kind(
                attention_block(window=window_everywhere),
                lightning_block,
                _minimax_is_full,
            ),
            _MIXTRAL,
        ),
        {"num_experts": "num_local_experts"},
        activations_checked=False,
    ),
    "minimax_m2": Family(
        layer_of(attention_block(norm="full", copies_output=True), _MIXTRAL), {"num_experts": "num_local_experts"}
    ),
    "ministral": Family(layer_of(attention_block(window=sliding_by_kind()), gated_mlp())),
    "ministral3": Family(layer_of(attention_block(window=window_everywhere), gated_mlp())),
    "mistral": Family(layer_of(attention_block(window=window_everywhere), gated_mlp())),
    "mixtral": Family(
        layer_of(attention_block(window=window_everywhere), _MIXTRAL),
        {"num_experts": "num_local_experts"},
    ),
    "mpt": Family(
        layer_of(
            attention_block(path="attn", names=("Wqkv", "out_proj"), has_positions=False, has_fused_kernel=False),
            plain_mlp("ffn", ("up_proj", "down_proj"), width=lambda fields, layer: 4 * fields.hidden_size, bias=False),
            Norms("norm_1", "norm_2", kind="layer"),
        ),
        {
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "hidden_dropout": "attn_config.attn_pdrop",
        },
        outside=final_norm("transformer.norm_f", "layer"),
        layers_path="transformer.blocks",
        embedding_path="transformer.wte",
    ),
    "nemotron": Family(
        layer_of(
            attention_block(bias="attention_bias", copies_output=True),
            plain_mlp("mlp", ("up_proj", "down_proj"), bias="mlp_bias"),
            _LAYER_NORMS,
        ),
        outside=final_norm(kind="layer", bias=True),
        activations_checked=False,
    ),
    "nemotron_h": Family(
        _nemotron_layer,
        {
            "num_experts": "n_routed_experts",
            "state_size": "ssm_state_size",
            "mamba_n_groups": "n_groups",
            "hidden_act": "mlp_hidden_act",
        },
        outside=final_norm("model.norm_f"),
        embedding_path="model.embeddings",
        is_ever_tied=False,
        num_layers=_nemotron_num_layers,
        activations_checked=False,
    ),
    "olmo2": Family(
        layer_of(
            attention_block(bias="attention_bias", norm="full", norm_kind="rms_fp32"),
            gated_mlp(),
            Norms("", "", "post_attention_layernorm", "post_feedforward_layernorm", kind="rms_fp32"),
        ),
    ),
    "olmo3": Family(
        layer_of(
            attention_block(bias="attention_bias", norm="full", norm_kind="rms_fp32", window=sliding_by_kind(4)),
            gated_mlp(),
            Norms("", "", "post_attention_layernorm", "post_feedforward_layernorm", kind="rms_fp32"),
        ),
    ),
    "olmoe": Family(
        layer_of(attention_block(bias="attention_bias", norm="hidden"), routed_experts(width="intermediate_size")),
    ),
    "opt": Family(
        _opt_layer,
        {"intermediate_size": "ffn_dim", "hidden_act": "activation_function", "hidden_dropout": "dropout"},
        outside=_opt_outside,
        layers_path="model.decoder.layers",
        embedding_path="model.decoder.embed_tokens",
    ),
    "phi": Family(
        layer_of(
            _phi_attention,
            plain_mlp("mlp", ("fc1", "fc2")),
            Norms(before_mlp="", kind="layer", bias=True),
            is_parallel=True,
        ),
        {"hidden_dropout": "resid_pdrop"},
        outside=final_norm("model.final_layernorm", "layer", bias=True),
        head_bias=True,
    ),
    "phi3": Family(
        layer_of(
            attention_block(names=("qkv_proj", "o_proj"), window=window_everywhere, copies_output=True),
            gated_mlp(names=("gate_up_proj", "down_proj")),
        ),
        {"hidden_dropout": "resid_pdrop"},
    ),
    "phimoe": Family(
        layer_of(
            attention_block(bias="attention_bias", window=window_everywhere),
            routed_experts(
                width="intermediate_size",
                linear_names=("w1", "w3", "w2"),
                linear_path="block_sparse_moe.experts",
                router="router",
                router_is_linear=True,
            ),
            _LAYER_NORMS,
        ),
        {"num_experts": "num_local_experts"},
        outside=final_norm(kind="layer", bias=True),
        head_bias="lm_head_bias",
    ),
    "qwen": Family(
        layer_of(
            attention_block(path="attn", names=("c_attn", "c_proj"), bias=True, output_bias=False),
            gated_mlp("mlp", ("w1", "w2", "c_proj"), width=lambda fields, layer: fields.size("intermediate_size") // 2),
            Norms("ln_1", "ln_2"),
        ),
        {"head_dim": "kv_channels"},
        outside=final_norm("transformer.ln_f"),
        layers_path="transformer.h",
        embedding_path="transformer.wte",
        activations_checked=False,
    ),
    "qwen2": Family(layer_of(attention_block(bias=True, output_bias=False, window=qwen_window), gated_mlp())),
    "qwen2_moe": Family(
        layer_of(
            attention_block(bias="qkv_bias", output_bias=False, window=qwen_window),
            where(sparse_step, _QWEN_ROUTED, gated_mlp()),
        ),
    ),
    "qwen3": Family(layer_of(attention_block(bias="attention_bias", norm="head", window=qwen_window), gated_mlp())),
    "qwen3_5_moe_text": Family(
        layer_of(
            by_kind(_GATED_ATTENTION, gated_delta_block(names=QWEN3_5_PROJECTIONS), _QWEN3_NEXT_FULL), _QWEN_ROUTED, _OFFSET
        ),
        outside=final_norm(kind="rms_offset"),
        activations_checked=False,
    ),
    "qwen3_5_text": Family(
        layer_of(
            by_kind(_GATED_ATTENTION, gated_delta_block(names=QWEN3_5_PROJECTIONS), _QWEN3_NEXT_FULL), gated_mlp(), _OFFSET
        ),
        outside=final_norm(kind="rms_offset"),
        activations_checked=False,
    ),
    "qwen3_moe": Family(
        layer_of(
            attention_block(bias="attention_bias", norm="head", window=qwen_window),
            where(sparse_step, routed_experts(), gated_mlp()),
        ),
    ),
    "qwen3_next": Family(
        layer_of(
            by_kind(_GATED_ATTENTION, gated_delta_block(names=QWEN3_NEXT_PROJECTIONS), _QWEN3_NEXT_FULL),
            where(sparse_step, _QWEN_ROUTED, gated_mlp()),
            _OFFSET,
        ),
        outside=final_norm(kind="rms_offset"),
        activations_checked=False,
    ),
    "seed_oss": Family(
        layer_of(attention_block(bias="attention_bias", output_bias="attention_out_bias"), gated_mlp(bias="mlp_bias"))
    ),
    "smollm3": Family(layer_of(attention_block(bias="attention_bias", window=qwen_window), gated_mlp(bias="mlp_bias"))),
    "stablelm": Family(_stablelm_layer, outside=final_norm(kind="layer", bias=True)),
    "starcoder2": Family(
        layer_of(
            attention_block(bias="use_bias", window=window_everywhere),
            plain_mlp("mlp", ("c_fc", "c_proj"), bias="use_bias"),
            _LAYER_NORMS,
        ),
        {"hidden_dropout": "residual_dropout"},
        outside=final_norm(kind="layer", bias=True),
    ),
}
"""The model families that are counted exactly, by ``model_type``."""

ALIASES: Final = {
    "kimi_k2": "deepseek_v3",  # its own name, the code and config class of DeepSeek V3
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""``model_type`` of a multimodal wrapper or a renamed copy -> the family that counts its language model."""
