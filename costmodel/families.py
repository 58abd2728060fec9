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

from costmodel.blocks import Fields, Flag, is_full_attention, where
from costmodel.feed_forwards import (
    Shared,
    after_dense_prefix,
    four_hidden,
    gated_mlp,
    plain_mlp,
    routed_experts,
    shared_count,
    sparse_step,
)
from costmodel.layers import Norms, Outside, final_norm, layer_of
from costmodel.mixers import (
    QWEN3_5_PROJECTIONS,
    QWEN3_NEXT_PROJECTIONS,
    attention_block,
    gated_delta_block,
    kimi_delta_block,
    latent_attention_block,
    lightning_block,
    mamba2_block,
    mamba_block,
    qwen_window,
    routed_attention_block,
    short_conv_block,
    sliding_by_kind,
    window_everywhere,
)
from costmodel.model_spec import Layer, Weights
from costmodel.special_layers import (
    GRANITE_ROUTED,
    after_first_layer,
    blackmamba_layer,
    bloom_outside,
    ernie_routed,
    falcon_layer,
    gemma4_layer,
    gemma4_outside,
    gpt2_outside,
    gpt_bigcode_layer,
    granite_hybrid_feed_forward,
    kimi_is_full,
    llama4_routed,
    minimax_is_full,
    nemotron_layer,
    nemotron_num_layers,
    opt_layer,
    opt_outside,
    periodic,
    phi_attention,
    stablelm_layer,
)

_MODEL_NORM: Final = final_norm()


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
_FULL: Final = is_full_attention()
_QWEN3_NEXT_FULL: Final = is_full_attention(interval="full_attention_interval", default_interval=4)
_GATED_ATTENTION: Final = attention_block(bias="attention_bias", norm="head", norm_kind="rms_offset", has_output_gate=True)
_QWEN3_5_MIXER: Final = where(_QWEN3_NEXT_FULL, _GATED_ATTENTION, gated_delta_block(names=QWEN3_5_PROJECTIONS))
_GLM_ATTENTION: Final = attention_block(bias="attention_bias", output_bias=False, copies_output=True)
_HUNYUAN_ATTENTION: Final = attention_block(
    bias="attention_bias", norm="head", norms=("query_layernorm", "key_layernorm"), copies_output=True
)
_WINDOW_ATTENTION: Final = attention_block(window=window_everywhere)
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

_MAMBA: Final = Family(
    layer_of(mamba_block(), None, Norms("norm", "")),
    {"mixer_width": "intermediate_size"},
    outside=final_norm("backbone.norm_f"),
    layers_path="backbone.layers",
    embedding_path="backbone.embeddings",
    activations_checked=False,
)

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
        blackmamba_layer,
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
        outside=bloom_outside,
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
                ernie_routed,
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
        falcon_layer,
        {"intermediate_size": "ffn_hidden_size", "hidden_act": "activation"},
        outside=final_norm("transformer.ln_f", "layer", bias=True),
        layers_path="transformer.h",
        embedding_path="transformer.word_embeddings",
        activations_checked=False,
    ),
    "falcon_mamba": _MAMBA,
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
        gemma4_layer,
        {"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
        outside=gemma4_outside,
        activations_checked=False,
    ),
    "glm": Family(
        layer_of(
            _GLM_ATTENTION,
            gated_mlp(names=("gate_up_proj", "down_proj")),
        ),
    ),
    "glm4": Family(
        layer_of(
            _GLM_ATTENTION,
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
        layer_of(latent_attention_block(), where(after_first_layer, _DEEPSEEK, gated_mlp())),
        {"num_experts": "n_routed_experts"},
    ),
    "gpt2": Family(
        layer_of(
            attention_block(path="attn", names=("c_attn", "c_proj"), bias=True, has_positions=False),
            plain_mlp("mlp", ("c_fc", "c_proj"), width=four_hidden),
            Norms("ln_1", "ln_2", kind="layer", bias=True),
        ),
        _GPT2_ALIASES,
        outside=gpt2_outside,
        layers_path="transformer.h",
        embedding_path="transformer.wte",
    ),
    "gpt_bigcode": Family(
        gpt_bigcode_layer,
        _GPT2_ALIASES,
        outside=gpt2_outside,
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
        layer_of(attention_block(bias="attention_bias"), GRANITE_ROUTED), {"num_experts": "num_local_experts"}
    ),
    "granitemoehybrid": Family(
        layer_of(
            where(_FULL, attention_block(bias="attention_bias"), mamba2_block(path="mamba")),
            granite_hybrid_feed_forward,
        ),
        {"num_experts": "num_local_experts", **_MAMBA_ALIASES},
        activations_checked=False,
    ),
    "granitemoeshared": Family(
        layer_of(attention_block(bias="attention_bias"), granite_hybrid_feed_forward),
        {"num_experts": "num_local_experts"},
    ),
    "helium": Family(_LLAMA),
    "hunyuan_v1_dense": Family(
        layer_of(
            _HUNYUAN_ATTENTION,
            gated_mlp(),
        )
    ),
    "hunyuan_v1_moe": Family(
        layer_of(
            _HUNYUAN_ATTENTION,
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
            where(
                periodic("attn_layer_period", "attn_layer_offset"),
                attention_block(),
                mamba_block(path="mamba", has_inner_norms=True),
            ),
            where(
                lambda fields, layer: (
                    fields.size("num_experts") > 1 and periodic("expert_layer_period", "expert_layer_offset")(fields, layer)
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
            where(kimi_is_full, latent_attention_block(), kimi_delta_block),
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
            where(
                _FULL,
                attention_block(
                    names=("q_proj", "k_proj", "v_proj", "out_proj"), norm="head", norms=("q_layernorm", "k_layernorm")
                ),
                short_conv_block,
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
                llama4_routed,
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
    "mamba": _MAMBA,
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
            where(minimax_is_full, _WINDOW_ATTENTION, lightning_block),
            _MIXTRAL,
        ),
        {"num_experts": "num_local_experts"},
        activations_checked=False,
    ),
    "minimax_m2": Family(
        layer_of(attention_block(norm="full", copies_output=True), _MIXTRAL), {"num_experts": "num_local_experts"}
    ),
    "ministral": Family(layer_of(attention_block(window=sliding_by_kind()), gated_mlp())),
    "ministral3": Family(layer_of(_WINDOW_ATTENTION, gated_mlp())),
    "mistral": Family(layer_of(_WINDOW_ATTENTION, gated_mlp())),
    "mixtral": Family(
        layer_of(_WINDOW_ATTENTION, _MIXTRAL),
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
        nemotron_layer,
        {
            "num_experts": "n_routed_experts",
            "state_size": "ssm_state_size",
            "mamba_n_groups": "n_groups",
            "hidden_act": "mlp_hidden_act",
        },
        outside=final_norm("model.norm_f"),
        embedding_path="model.embeddings",
        is_ever_tied=False,
        num_layers=nemotron_num_layers,
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
        opt_layer,
        {"intermediate_size": "ffn_dim", "hidden_act": "activation_function", "hidden_dropout": "dropout"},
        outside=opt_outside,
        layers_path="model.decoder.layers",
        embedding_path="model.decoder.embed_tokens",
    ),
    "phi": Family(
        layer_of(
            phi_attention,
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
    "qwen2_5_vl_text": Family(
        layer_of(attention_block(bias=True, output_bias=False, window=qwen_window), gated_mlp()), activations_checked=False
    ),
    "qwen2_moe": Family(
        layer_of(
            attention_block(bias="qkv_bias", output_bias=False, window=qwen_window),
            where(sparse_step, _QWEN_ROUTED, gated_mlp()),
        ),
    ),
    "qwen3": Family(layer_of(attention_block(bias="attention_bias", norm="head", window=qwen_window), gated_mlp())),
    "qwen3_5_moe_text": Family(
        layer_of(_QWEN3_5_MIXER, _QWEN_ROUTED, _OFFSET),
        outside=final_norm(kind="rms_offset"),
        activations_checked=False,
    ),
    "qwen3_5_text": Family(
        layer_of(_QWEN3_5_MIXER, gated_mlp(), _OFFSET),
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
            where(_QWEN3_NEXT_FULL, _GATED_ATTENTION, gated_delta_block(names=QWEN3_NEXT_PROJECTIONS)),
            where(sparse_step, _QWEN_ROUTED, gated_mlp()),
            _OFFSET,
        ),
        outside=final_norm(kind="rms_offset"),
        activations_checked=False,
    ),
    "qwen3_vl_moe_text": Family(
        layer_of(
            attention_block(bias="attention_bias", norm="head"),
            where(sparse_step, routed_experts(), gated_mlp()),
        ),
        activations_checked=False,
    ),
    "qwen3_vl_text": Family(
        layer_of(attention_block(bias="attention_bias", norm="head"), gated_mlp()), activations_checked=False
    ),
    "seed_oss": Family(
        layer_of(attention_block(bias="attention_bias", output_bias="attention_out_bias"), gated_mlp(bias="mlp_bias"))
    ),
    "smollm3": Family(layer_of(attention_block(bias="attention_bias", window=qwen_window), gated_mlp(bias="mlp_bias"))),
    "stablelm": Family(stablelm_layer, outside=final_norm(kind="layer", bias=True)),
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
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
"""``model_type`` of a multimodal wrapper or a renamed copy -> the family that counts its language model."""
