"""Multimodal models: the encoders of images and sound ("towers") beside a language model, and what leads from them to it.

Rows of text never reach them: they are loaded, and adapted where a target names them, and that is all they do here. Names
and sizes are those of transformers 5.24 (``modeling_*.py``, ``configuration_*.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from costmodel.blocks import Fields
from costmodel.model_spec import NO_ATTENTION, Layer, Linear, ModelSpec, Norm, Tower, Weights

TOWER_CONFIGS: Final = ("vision_config", "audio_config")
"""Fields of a multimodal config that describe an encoder each. Some have others beside them (``qformer_config``)."""

TOWER_MODULES: Final = frozenset({"vision_tower", "visual", "vision_model", "audio_tower"})
"""Modules of a loaded model that hold one."""

TOWER_PARTS: Final = TOWER_MODULES | {"multi_modal_projector", "embed_vision", "embed_audio"}
"""The same, and those that lead from one to the language model."""


def _linears(names: str, in_features: int, out_features: int, *, bias: bool = False) -> tuple[Linear, ...]:
    """One for each of ``names``, which spaces part."""
    return tuple(Linear(name, in_features, out_features, bias) for name in names.split())


def _norms(names: str, size: int, *, bias: bool = False) -> tuple[Norm, ...]:
    return tuple(Norm(name, size, size, bias=bias) for name in names.split())


def _siglip(fields: Fields, text_hidden: int) -> Tower:
    hidden, inner, patch = fields.size("hidden_size"), fields.size("intermediate_size"), fields.size("patch_size")
    layer = Layer(
        (
            *_linears("self_attn.k_proj self_attn.v_proj self_attn.q_proj self_attn.out_proj", hidden, hidden, bias=True),
            *_linears("mlp.fc1", hidden, inner, bias=True),
            *_linears("mlp.fc2", inner, hidden, bias=True),
        ),
        _norms("layer_norm1 layer_norm2", hidden, bias=True),
        NO_ATTENTION,
    )
    tower = "model.vision_tower"
    weights = [
        Weights(f"{tower}.embeddings.patch_embedding.weight", hidden * fields.size("num_channels") * patch * patch),
        Weights(f"{tower}.embeddings.patch_embedding.bias", hidden),
        Weights(f"{tower}.embeddings.position_embedding.weight", (fields.size("image_size") // patch) ** 2 * hidden),
        Weights("model.multi_modal_projector.mm_input_projection_weight", hidden * text_hidden),
    ]
    linears: tuple[Linear, ...] = ()
    norms = (
        *_norms(f"{tower}.post_layernorm", hidden, bias=True),
        *_norms("model.multi_modal_projector.mm_soft_emb_norm", hidden),
    )
    if fields.flag("vision_use_head"):
        head = f"{tower}.head"
        weights += [
            Weights(f"{head}.probe", hidden),
            Weights(f"{head}.attention.in_proj_weight", 3 * hidden * hidden),
            Weights(f"{head}.attention.in_proj_bias", 3 * hidden),
        ]
        linears = (
            *_linears(f"{head}.attention.out_proj", hidden, hidden, bias=True),
            *_linears(f"{head}.mlp.fc1", hidden, inner, bias=True),
            *_linears(f"{head}.mlp.fc2", inner, hidden, bias=True),
        )
        norms += _norms(f"{head}.layernorm", hidden, bias=True)
    outside = Layer(linears, norms, NO_ATTENTION, weights=tuple(weights))
    return Tower(f"{tower}.encoder.layers", layer, fields.size("num_hidden_layers"), outside)


def _gemma4_vision(fields: Fields, text_hidden: int) -> Tower:
    hidden, inner, head_dim = fields.size("hidden_size"), fields.size("intermediate_size"), fields.size("head_dim")
    queries, keys = fields.size("num_attention_heads") * head_dim, fields.size("num_key_value_heads") * head_dim
    bias = fields.flag("attention_bias")
    layer = Layer(
        (
            *_linears("self_attn.q_proj.linear", hidden, queries, bias=bias),
            *_linears("self_attn.k_proj.linear self_attn.v_proj.linear", hidden, keys, bias=bias),
            *_linears("self_attn.o_proj.linear", queries, hidden, bias=bias),
            *_linears("mlp.gate_proj.linear mlp.up_proj.linear", hidden, inner),
            *_linears("mlp.down_proj.linear", inner, hidden),
        ),
        (
            *_norms("self_attn.q_norm self_attn.k_norm", head_dim),
            *_norms("input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm", hidden),
        ),
        NO_ATTENTION,
    )
    patches = "model.vision_tower.patch_embedder"
    outside = Layer(
        (
            *_linears(f"{patches}.input_proj", 3 * fields.size("patch_size") ** 2, hidden),
            *_linears("model.embed_vision.embedding_projection", hidden, text_hidden),
        ),
        (),
        NO_ATTENTION,
        weights=(Weights(f"{patches}.position_embedding_table", 2 * fields.size("position_embedding_size") * hidden),),
    )
    return Tower("model.vision_tower.encoder.layers", layer, fields.size("num_hidden_layers"), outside)


def _gemma4_audio(fields: Fields, text_hidden: int) -> Tower:
    hidden, kernel, width = fields.size("hidden_size"), fields.size("conv_kernel_size"), fields.size("output_proj_dims")
    first, second = fields.get("subsampling_conv_channels")
    feed_forwards = ("feed_forward1", "feed_forward2")
    layer = Layer(
        (
            *(linear for each in feed_forwards for linear in _linears(f"{each}.ffw_layer_1.linear", hidden, 4 * hidden)),
            *(linear for each in feed_forwards for linear in _linears(f"{each}.ffw_layer_2.linear", 4 * hidden, hidden)),
            *_linears("self_attn.q_proj.linear self_attn.k_proj.linear self_attn.v_proj.linear", hidden, hidden),
            *_linears("self_attn.post.linear self_attn.relative_k_proj lconv1d.linear_end.linear", hidden, hidden),
            *_linears("lconv1d.linear_start.linear", hidden, 2 * hidden),
        ),
        (
            *(norm for each in feed_forwards for norm in _norms(f"{each}.pre_layer_norm {each}.post_layer_norm", hidden)),
            *_norms("lconv1d.pre_layer_norm lconv1d.conv_norm norm_pre_attn norm_post_attn norm_out", hidden),
        ),
        NO_ATTENTION,
        weights=(
            Weights("self_attn.per_dim_scale", hidden // fields.size("num_attention_heads")),
            Weights("lconv1d.depthwise_conv1d.weight", hidden * kernel),
        ),
    )
    convolutions = "model.audio_tower.subsample_conv_projection"
    outside = Layer(
        (
            # first stands for the bands of the spectrogram too, of which two convolutions of stride 2 leave a quarter
            *_linears(f"{convolutions}.input_proj_linear", first // 4 * second, hidden),
            *_linears("model.audio_tower.output_proj", hidden, width, bias=True),
            *_linears("model.embed_audio.embedding_projection", width, text_hidden),
        ),
        (*_norms(f"{convolutions}.layer0.norm", first), *_norms(f"{convolutions}.layer1.norm", second)),
        NO_ATTENTION,
        weights=(
            Weights(f"{convolutions}.layer0.conv.weight", first * 9),
            Weights(f"{convolutions}.layer1.conv.weight", second * first * 9),
        ),
    )
    return Tower("model.audio_tower.layers", layer, fields.size("num_hidden_layers"), outside)


def _qwen_vision(fields: Fields, text_hidden: int) -> Tower:
    hidden, inner, merge = fields.size("hidden_size"), fields.size("intermediate_size"), fields.size("spatial_merge_size")
    merged = hidden * merge * merge
    layer = Layer(
        (
            *_linears("attn.qkv", hidden, 3 * hidden, bias=True),
            *_linears("attn.proj", hidden, hidden, bias=True),
            *_linears("mlp.linear_fc1", hidden, inner, bias=True),
            *_linears("mlp.linear_fc2", inner, hidden, bias=True),
        ),
        _norms("norm1 norm2", hidden, bias=True),
        NO_ATTENTION,
    )
    patch = fields.size("in_channels") * fields.size("temporal_patch_size") * fields.size("patch_size") ** 2
    outside = Layer(
        (
            *_linears("model.visual.merger.linear_fc1", merged, merged, bias=True),
            *_linears(
                "model.visual.merger.linear_fc2", merged, fields.optional_size("out_hidden_size") or text_hidden, bias=True
            ),
        ),
        _norms("model.visual.merger.norm", hidden, bias=True),
        NO_ATTENTION,
        weights=(
            Weights("model.visual.patch_embed.proj.weight", hidden * patch),
            Weights("model.visual.patch_embed.proj.bias", hidden),
            Weights("model.visual.pos_embed.weight", fields.size("num_position_embeddings") * hidden),
        ),
    )
    return Tower("model.visual.blocks", layer, fields.size("depth"), outside)


def _qwen3_vl_vision(fields: Fields, text_hidden: int) -> Tower:
    """As Qwen3.5's, and mergers whose outputs are added to the first layers of the language model."""
    tower = _qwen_vision(fields, text_hidden)
    merged = fields.size("hidden_size") * fields.size("spatial_merge_size") ** 2
    out = fields.optional_size("out_hidden_size") or text_hidden
    paths = [f"model.visual.deepstack_merger_list.{index}" for index, _ in enumerate(fields.get("deepstack_visual_indexes"))]
    linears = [
        each
        for path in paths
        for each in (
            Linear(f"{path}.linear_fc1", merged, merged, bias=True),
            Linear(f"{path}.linear_fc2", merged, out, bias=True),
        )
    ]
    norms = [norm for path in paths for norm in _norms(f"{path}.norm", merged, bias=True)]
    outside = tower.outside
    outside = dataclasses.replace(outside, linears=(*outside.linears, *linears), norms=(*outside.norms, *norms))
    return dataclasses.replace(tower, outside=outside)


def _qwen2_5_vl_vision(fields: Fields, text_hidden: int) -> Tower:
    hidden, inner, merge = fields.size("hidden_size"), fields.size("intermediate_size"), fields.size("spatial_merge_size")
    merged = hidden * merge * merge
    layer = Layer(
        (
            *_linears("attn.qkv", hidden, 3 * hidden, bias=True),
            *_linears("attn.proj", hidden, hidden, bias=True),
            *_linears("mlp.gate_proj mlp.up_proj", hidden, inner, bias=True),
            *_linears("mlp.down_proj", inner, hidden, bias=True),
        ),
        _norms("norm1 norm2", hidden),
        NO_ATTENTION,
    )
    patch = fields.size("in_channels") * fields.size("temporal_patch_size") * fields.size("patch_size") ** 2
    out = fields.optional_size("out_hidden_size") or text_hidden
    outside = Layer(
        (
            *_linears("model.visual.merger.mlp.0", merged, merged, bias=True),
            *_linears("model.visual.merger.mlp.2", merged, out, bias=True),
        ),
        _norms("model.visual.merger.ln_q", hidden),
        NO_ATTENTION,
        weights=(Weights("model.visual.patch_embed.proj.weight", hidden * patch),),
    )
    return Tower("model.visual.blocks", layer, fields.size("depth"), outside)


def _llama4_vision(fields: Fields, text_hidden: int) -> Tower:
    hidden, inner = fields.size("hidden_size"), fields.size("intermediate_size")
    layer = Layer(
        (
            *_linears("self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj", hidden, hidden, bias=True),
            *_linears("mlp.fc1", hidden, inner, bias=True),
            *_linears("mlp.fc2", inner, hidden, bias=True),
        ),
        _norms("input_layernorm post_attention_layernorm", hidden, bias=True),
        NO_ATTENTION,
    )
    patch, shuffled = fields.size("patch_size"), fields.size("projector_output_dim")
    outside = Layer(
        (
            *_linears("vision_model.patch_embedding.linear", fields.size("num_channels") * patch * patch, hidden),
            *_linears("vision_model.vision_adapter.mlp.fc1", inner, fields.size("projector_input_dim")),
            *_linears("vision_model.vision_adapter.mlp.fc2", shuffled, shuffled),
            *_linears("multi_modal_projector.linear_1", fields.size("vision_output_dim"), text_hidden),
        ),
        _norms("vision_model.layernorm_pre vision_model.layernorm_post", hidden, bias=True),
        NO_ATTENTION,
        weights=(
            Weights("vision_model.class_embedding", hidden),
            Weights("vision_model.positional_embedding_vlm", ((fields.size("image_size") // patch) ** 2 + 1) * hidden),
        ),
    )
    return Tower("vision_model.model.layers", layer, fields.size("num_hidden_layers"), outside)


def _pixtral(fields: Fields, text_hidden: int) -> Tower:
    hidden, inner = fields.size("hidden_size"), fields.size("intermediate_size")
    layer = Layer(
        (
            *_linears("attention.k_proj attention.v_proj attention.q_proj attention.o_proj", hidden, hidden),
            *_linears("feed_forward.gate_proj feed_forward.up_proj", hidden, inner),
            *_linears("feed_forward.down_proj", inner, hidden),
        ),
        _norms("attention_norm ffn_norm", hidden),
        NO_ATTENTION,
    )
    tower, projector = "model.vision_tower", "model.multi_modal_projector"
    merge = fields.size("spatial_merge_size")
    bias = fields.flag("multimodal_projector_bias")
    outside = Layer(
        (
            *_linears(f"{projector}.patch_merger.merging_layer", hidden * merge * merge, hidden),
            *_linears(f"{projector}.linear_1", hidden, text_hidden, bias=bias),
            *_linears(f"{projector}.linear_2", text_hidden, text_hidden, bias=bias),
        ),
        (*_norms(f"{tower}.ln_pre", hidden), *_norms(f"{projector}.norm", hidden)),
        NO_ATTENTION,
        weights=(
            Weights(f"{tower}.patch_conv.weight", hidden * fields.size("num_channels") * fields.size("patch_size") ** 2),
        ),
    )
    return Tower(f"{tower}.transformer.layers", layer, fields.size("num_hidden_layers"), outside)


@dataclass(frozen=True, slots=True)
class _Encoder:
    """How an encoder is counted, and what its config class fills in where a ``config.json`` leaves a size out."""

    build: Callable[[Fields, int], Tower]
    defaults: Mapping[str, Any]
    only: str | None = None  # model_type of the one that is counted, where the wrapper takes others


_QWEN_VISION: Final = _Encoder(
    _qwen_vision,
    {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "in_channels": 3, "patch_size": 16,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304, "out_hidden_size": 3584,
    },
)  # fmt: skip
_QWEN3_VL_VISION: Final = _Encoder(_qwen3_vl_vision, {**_QWEN_VISION.defaults, "deepstack_visual_indexes": (8, 16, 24)})
_COUNTED: Final[Mapping[str, Mapping[str, _Encoder]]] = {
    "gemma3": {
        "vision_config": _Encoder(
            _siglip,
            {
                "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_channels": 3,
                "image_size": 224, "patch_size": 16, "vision_use_head": True,
            },
            only="siglip_vision_model",
        ),
    },
    "gemma4": {
        "vision_config": _Encoder(
            _gemma4_vision,
            {
                "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
                "num_key_value_heads": 12, "head_dim": 64, "patch_size": 16, "position_embedding_size": 10240,
            },
        ),
        "audio_config": _Encoder(
            _gemma4_audio,
            {
                "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "conv_kernel_size": 5,
                "subsampling_conv_channels": (128, 32), "output_proj_dims": 1536,
            },
        ),
    },
    "qwen2_5_vl": {
        "vision_config": _Encoder(
            _qwen2_5_vl_vision,
            {
                "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "in_channels": 3, "patch_size": 14,
                "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 3584,
            },
        ),
    },
    "qwen3_5": {"vision_config": _QWEN_VISION},
    "qwen3_5_moe": {"vision_config": _QWEN_VISION},
    "qwen3_vl": {"vision_config": _QWEN3_VL_VISION},
    "qwen3_vl_moe": {"vision_config": _QWEN3_VL_VISION},
    "llama4": {
        "vision_config": _Encoder(
            _llama4_vision,
            {
                "hidden_size": 768, "intermediate_size": 5632, "num_hidden_layers": 34, "num_channels": 3,
                "image_size": 448, "patch_size": 14, "vision_output_dim": 7680, "projector_input_dim": 4096,
                "projector_output_dim": 4096,
            },
        ),
    },
    "mistral3": {
        "vision_config": _Encoder(
            _pixtral,
            {
                "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_channels": 3,
                "patch_size": 16, "spatial_merge_size": 2, "multimodal_projector_bias": False,
            },
            only="pixtral",
        ),
    },
}  # fmt: skip


_PROJECTOR_FIELDS: Final = ("spatial_merge_size", "multimodal_projector_bias")  # in the wrapper's own config


_HOLDS_CAUSAL_LM: Final = frozenset({"llama4"})
"""Multimodal classes around a whole causal language model, which follows its own config; others have the head themselves."""


_FLAT: Final = {"qwen2_5_vl": "qwen2_5_vl_text"}
"""Multimodal configs that were published with the fields of their language model beside ``vision_config``, and its type."""


def nested_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``config`` with its language model under ``text_config``, as its class makes it of one that was published without."""
    text_type = _FLAT.get(str(config.get("model_type")))
    if text_type is None:
        return config
    text = config.get("text_config")
    if isinstance(text, Mapping):  # a tie is read from either (transformers 5.24, configuration_qwen2_5_vl.py)
        return {**config, "tie_word_embeddings": bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))}
    towers = {name: value for name, value in config.items() if name in TOWER_CONFIGS}
    flat = {name: value for name, value in config.items() if name not in towers}
    return {**flat, **towers, "text_config": {**flat, "model_type": text_type}}


def language_model_config(config: Mapping[str, Any], *, is_whole: bool) -> Mapping[str, Any]:
    """The language model's own config where a multimodal one nests it.

    ``is_whole``: as the multimodal class has it, which owns the head and ties it as its own config says.
    """
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return config
    merged = {**config, **nested}
    tied = config.get("tie_word_embeddings")
    if is_whole and tied is not None and config.get("model_type") not in _HOLDS_CAUSAL_LM:
        merged["tie_word_embeddings"] = tied
    return merged


def tower_configs(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The configs of encoders in a multimodal ``config``, by their fields; none where it nests no language model.

    That of any other model in there is one too: something to load that is not the language model.
    """
    if not isinstance(config.get("text_config"), Mapping):
        return {}
    nested = {name: value for name, value in config.items() if isinstance(value, Mapping) and name != "text_config"}
    return {
        name: value
        for name, value in nested.items()
        if name in TOWER_CONFIGS or (name.endswith("_config") and "model_type" in value)
    }


def counts_towers(config: Mapping[str, Any]) -> bool:
    """Whether some encoder of a multimodal ``config`` is counted for its wrapper."""
    return not tower_configs(config).keys().isdisjoint(_COUNTED.get(str(config.get("model_type")), {}))


def with_towers(language_model: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """The whole multimodal model of ``config``: its language model by the names it has in there, and its encoders.

    Without ``text_config`` and a config of an encoder the language model comes back as it is. Encoders that are not known
    are named in ``uncounted_towers``.
    """
    given = tower_configs(config)
    if not given:
        return language_model
    wrapper = str(config.get("model_type"))
    counted = _COUNTED.get(wrapper, {})
    towers, uncounted = [], []
    for name, of_encoder in given.items():
        encoder, kind = counted.get(name), of_encoder.get("model_type")
        if encoder is None or (encoder.only is not None and (kind or encoder.only) != encoder.only):
            uncounted.append(str(kind or name))
            continue
        projector = {field: config[field] for field in _PROJECTOR_FIELDS if field in config}
        fields = Fields({**projector, **of_encoder, "model_type": name}, {}, encoder.defaults)
        towers.append(encoder.build(fields, language_model.hidden_size))
    return dataclasses.replace(
        _wrapped(language_model, wrapper), wrapper=wrapper, towers=tuple(towers), uncounted_towers=tuple(uncounted)
    )


def _wrapped(model: ModelSpec, wrapper: str) -> ModelSpec:
    """By the paths that it has inside the multimodal class."""

    def path(name: str) -> str:
        if wrapper in _HOLDS_CAUSAL_LM:
            return f"language_model.{name}"
        return f"model.language_{name}" if name.startswith("model.") else name

    def renamed(parts: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(dataclasses.replace(each, name=path(each.name)) for each in parts)

    return dataclasses.replace(
        model,
        norms=renamed(model.norms),
        linears=renamed(model.linears),
        weights=renamed(model.weights),
        layers_path=path(model.layers_path),
        embedding_path=path(model.embedding_path),
        head_path=path(model.head_path),
    )
