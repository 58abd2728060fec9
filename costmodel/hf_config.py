"""A ``config.json`` (plain mapping) -> :class:`ModelSpec`: every weight, by layer, with its name in transformers.

What differs between model families stands in one table, ``families.FAMILIES``. A ``model_type`` that is not in it is refused
by name: a family is exact or it is not there.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
from collections.abc import Mapping
from typing import Any, Final

from costmodel.arguments import must_be
from costmodel.blocks import Fields
from costmodel.data_files import DATA_FOLDER
from costmodel.errors import SHOWN_CHARACTERS, CostModelError, UnsupportedModelError, shown
from costmodel.families import ALIASES, FAMILIES
from costmodel.model_spec import Layer, ModelSpec
from costmodel.towers import language_model_config, nested_config, with_towers

_DTYPES: Final = {"float32", "bfloat16", "float16"}
MAX_LAYERS: Final = 10_000  # far above any model; a typo must not count for hours
_MAX_ROPE_FACTOR: Final = 10_000
_REQUIRED: Final = ("hidden_size", "num_hidden_layers")


def model_spec_from_config(config: Mapping[str, Any], *, name: str = "", load_towers: bool = True) -> ModelSpec:
    """The counted model of one ``config.json``; fields it leaves out are those of its config class.

    ``load_towers=False``: of a multimodal config the language model alone.

    Raises :class:`UnsupportedModelError` for a family that is not in :data:`FAMILIES`, :class:`CostModelError` for a
    config without the fields that fix its size or with one that is not a positive whole number.
    """
    if not isinstance(config, Mapping):
        raise must_be("the model config", "the mapping that a config.json holds (find_model_config reads one)", config)
    outer = nested_config(config)
    config = language_model_config(outer, is_whole=load_towers)
    model_type = config.get("model_type")
    if not model_type:
        raise CostModelError("the model config has no model_type; a Hugging Face config.json names it")
    known = ALIASES.get(str(model_type), str(model_type))
    family = FAMILIES.get(known)
    if family is None:
        nearest = difflib.get_close_matches(str(model_type)[:SHOWN_CHARACTERS], FAMILIES, n=3, cutoff=0.5)
        hint = f"nearest: {', '.join(nearest)}; " if nearest else ""
        raise UnsupportedModelError(
            f"model family {shown(model_type)} is not modelled yet; {hint}all that are: {', '.join(sorted(FAMILIES))}"
        )
    given = Fields(config, family.aliases, {})
    missing = [field for field in _REQUIRED if given.get(field) is None]
    if missing:
        raise CostModelError(f"the {model_type} config lacks {', '.join(missing)}, which fix the model's size")
    fields = Fields(config, family.aliases, _class_defaults().get(known, {}))
    if fields.size("num_hidden_layers") > MAX_LAYERS:
        raise CostModelError(
            f"the model config's num_hidden_layers is {fields.size('num_hidden_layers')}; at most {MAX_LAYERS} are counted"
        )
    outside = family.outside(fields)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    model = ModelSpec(
        name=name or str(config.get("_name_or_path") or model_type),
        family=known,
        hidden_size=fields.hidden_size,
        vocab_size=fields.size("vocab_size"),
        layers=_runs([family.layer(fields, index) for index in range(family.num_layers(fields))]),
        tied_embeddings=family.is_ever_tied and fields.flag("tie_word_embeddings"),
        hidden_act=str(fields.get("hidden_act") or "silu"),
        checkpoint_dtype=dtype if dtype in _DTYPES else None,
        norms=outside.norms,
        linears=outside.linears,
        weights=outside.weights,
        embedding_width=outside.embedding_width,
        head_bias=fields.flag(family.head_bias) if isinstance(family.head_bias, str) else family.head_bias,
        caps_logits=fields.get("final_logit_softcapping") is not None,
        residual_in_fp32=fields.flag("residual_in_fp32"),
        layers_path=family.layers_path,
        embedding_path=family.embedding_path,
        head_path=family.head_path,
        checkpoint_quantization=_quantization(config),
        activations_checked=family.activations_checked,
        max_position_embeddings=_num_positions(fields, config),
    )
    return with_towers(model, outer) if load_towers else model


@functools.lru_cache(maxsize=1)
def _class_defaults() -> dict[str, dict[str, Any]]:
    """Per family, what its config class fills in where a config.json leaves a field out (only what fixes a size)."""
    with open(os.path.join(DATA_FOLDER, "class_defaults.json"), encoding="utf-8") as file:
        defaults: dict[str, dict[str, Any]] = json.load(file)
    return defaults


def _num_positions(fields: Fields, config: Mapping[str, Any]) -> int | None:
    """The longest sequence of the config, after rope scaling where it scales."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
    longest = next((value for name in names if isinstance(value := fields.get(name), int) and value > 0), None)
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if longest is None or not isinstance(scaling, Mapping):
        return longest
    factor, before = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if not isinstance(factor, (int, float)) or not 1 <= factor <= _MAX_ROPE_FACTOR:
        return longest
    is_scaled_already = isinstance(before, int) and before < longest  # as Llama 3.1's is
    return longest if is_scaled_already else int(longest * factor)


def _quantization(config: Mapping[str, Any]) -> str | None:
    """How the published weights are packed, where it is a packing whose bytes are known."""
    given = config.get("quantization_config")
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    return method if method in {"mxfp4", "fp8"} else None


def _runs(layers: list[Layer]) -> tuple[tuple[Layer, int], ...]:
    runs: list[tuple[Layer, int]] = []
    for layer in layers:
        if runs and runs[-1][0] == layer:
            runs[-1] = (layer, runs[-1][1] + 1)
        else:
            runs.append((layer, 1))
    return tuple(runs)
