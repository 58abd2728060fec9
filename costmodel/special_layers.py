"""Layers of the families that need more than a mixer, a feed-forward and norms from the shelf.

Source: ``modeling_*.py`` of transformers 5.24; for BlackMamba its published files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from costmodel.blocks import LAYER_KINDS, Block, Builder, Fields
from costmodel.errors import CostModelError, shown
from costmodel.feed_forwards import Shared, four_hidden, gated_mlp, plain_mlp, routed_experts, shared_width
from costmodel.layers import Norms, Outside, layer_of
from costmodel.mixers import attention_block, head_counts, mamba2_block, mamba_block
from costmodel.model_spec import Attention, Experts, Layer, Linear, Norm, Weights


def falcon_layer(fields: Fields, layer: int) -> Layer:
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


def opt_layer(fields: Fields, layer: int) -> Layer:
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


def opt_outside(fields: Fields) -> Outside:
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


def gpt2_outside(fields: Fields) -> Outside:
    hidden = fields.hidden_size
    table = Weights("transformer.wpe.weight", fields.size("max_position_embeddings") * hidden, is_lookup=True)
    return Outside((_layer_norm("transformer.ln_f", hidden),), weights=(table,))


def bloom_outside(fields: Fields) -> Outside:
    names = ("transformer.word_embeddings_layernorm", "transformer.ln_f")
    return Outside(tuple(_layer_norm(name, fields.hidden_size) for name in names))


def stablelm_layer(fields: Fields, layer: int) -> Layer:
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


def phi_attention(fields: Fields, layer: int) -> Block:
    built = attention_block(names=("q_proj", "k_proj", "v_proj", "dense"), bias=True, copies_output=True)(fields, layer)
    if not fields.flag("qk_layernorm"):
        return built
    attention = built.attention
    widths = {"q": attention.query_width, "k": attention.kv_width}
    norms = tuple(
        Norm(f"self_attn.{which}_layernorm", attention.head_dim, width, "layer", True) for which, width in widths.items()
    )
    return replace(built, norms=norms)


def gpt_bigcode_layer(fields: Fields, layer: int) -> Layer:
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


def gemma4_layer(fields: Fields, layer: int) -> Layer:
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


def gemma4_outside(fields: Fields) -> Outside:
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


def nemotron_num_layers(fields: Fields) -> int:
    """The pattern counts, whatever num_hidden_layers says."""
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        named = fields.get(name)
        if named:
            if not isinstance(named, (str, list, tuple)):
                raise CostModelError(f"the nemotron_h config's {name} must name each layer, got {shown(named)}")
            return len(named)
    return len(_NEMOTRON_DEFAULT)


def nemotron_layer(fields: Fields, layer: int) -> Layer:
    """Nemotron-H: each layer is one norm and one block, be it Mamba 2, attention, an MLP or routed experts."""
    kind = _nemotron_kind(fields, layer)
    if kind not in _NEMOTRON_BLOCKS:
        raise CostModelError(
            f"layer {layer} of the nemotron_h config is {shown(kind)}; known: {', '.join(_NEMOTRON_BLOCKS)}"
        )
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


def granite_hybrid_feed_forward(fields: Fields, layer: int) -> Block:
    """Granite 4: a shared MLP in every layer, routed experts beside it where there are any."""
    routed = GRANITE_ROUTED(fields, layer) if fields.count("num_experts") else Block()
    if not shared_width(fields):
        return routed
    names = ("input_linear", "output_linear")
    mlp = gated_mlp("shared_mlp", names, width=lambda fields, layer: shared_width(fields))(fields, layer)
    return replace(routed, linears=routed.linears + mlp.linears, last_linear=mlp.last_linear)


GRANITE_ROUTED: Final = routed_experts(path="block_sparse_moe", width="intermediate_size", linear_names=(), router="router")


def periodic(period: str, offset: str) -> Callable[[Fields, int], bool]:
    return lambda fields, layer: layer % fields.size(period) == fields.count(offset)


def ernie_routed(fields: Fields, layer: int) -> bool:
    to_the_end = fields.get("moe_layer_end_index") in (None, -1)
    last = fields.size("num_hidden_layers") - 1 if to_the_end else fields.count("moe_layer_end_index")
    return (layer + 1) % fields.size("moe_layer_interval") == 0 and fields.count("moe_layer_start_index") <= layer <= last


def llama4_routed(fields: Fields, layer: int) -> bool:
    listed = fields.get("moe_layers")
    return layer in listed if listed is not None else (layer + 1) % fields.size("interleave_moe_layer_step") == 0


def after_first_layer(fields: Fields, layer: int) -> bool:
    kind = fields.entry("mlp_layer_types", layer)
    return bool(kind == "sparse") if kind else layer > 0


def kimi_is_full(fields: Fields, layer: int) -> bool:
    named = fields.entry("layer_types", layer)
    if named is not None:
        return bool(named == "full_attention")
    listed = fields.get("linear_attn_config.full_attn_layers")
    return layer + 1 in listed if listed is not None else layer > 0 and layer % 4 == 0


def minimax_is_full(fields: Fields, layer: int) -> bool:
    named = fields.entry("layer_types", layer)
    return layer % 2 == 0 if named is None else bool(named == "full_attention")


def blackmamba_layer(fields: Fields, layer: int) -> Layer:
    """BlackMamba: Mamba blocks ("r") alternate with routed gated MLPs (their number of experts), each under one norm."""
    kind = str(fields.entry("mamba_moe_layers", layer))
    if kind == "r":
        return layer_of(mamba_block(), None, Norms("norm", ""))(fields, layer)
    if not kind.isdigit():
        raise CostModelError(f"layer {layer} of the blackmamba config is {shown(kind)}: neither 'r' nor a number of experts")
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
