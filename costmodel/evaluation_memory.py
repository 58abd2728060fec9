"""What one layer at work holds in a forward without gradients, as an evaluation makes it. Bytes for each token.

Nothing is kept for a backward, so a tensor lives until Python lets go of it: read off the forward of the real modules
(transformers 5.24, peft 0.21) and held against traces of them (``tests/tracing``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from costmodel.adapters import LayerAdapters
from costmodel.defaults import BITSANDBYTES, ResolvedJob
from costmodel.held_memory import ElementBytes
from costmodel.layer_kernels import Rows, activation_is_one_kernel, attention_is_masked
from costmodel.model_spec import Layer, Linear, ModelSpec
from costmodel.workload import attention_kernel

# Dense families whose layers hold what is counted here within 1 %: full, padded, with adapters under autocast (traced).
_FAMILIES: Final = frozenset(
    {"gemma", "gemma3_text", "glm", "glm4", "gpt_neox", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"}
    | {"starcoder2"}
)


@dataclass(frozen=True, slots=True)
class Work:
    """A moment of a layer at work: bytes for each token, for each (token, attended key), and whatever the batch."""

    per_token: float
    per_pair: float = 0.0
    fixed: float = 0.0


def moments_at_work(
    model: ModelSpec, layer: Layer, adapted: LayerAdapters, job: ResolvedJob, types: ElementBytes, rows: Rows
) -> tuple[Work, ...]:
    """The moments of a layer that may hold the most, the model's own input aside; none for a layer that was not read.

    The loop over the layers holds a layer's input, the layer its residual and what its norm made of it. The masks are of
    bools, one for each kind of layer.
    """
    is_read = model.family in _FAMILIES and not job.makes_own_masks and not any(each.dora for each in adapted.linears)
    if not is_read or attention_kernel(job, layer) != "fused" or not activation_is_one_kernel(model):
        return ()
    hidden = float(types.stream * model.hidden_size)
    moments = (
        *_of_attention(layer, adapted, job, types, rows, 2 * hidden),
        *_of_mlp(layer, adapted, job, types, 3 * hidden),
    )
    kinds = {each.attention.sliding_window: each for each, _ in model.layers}
    masks = float(sum(attention_is_masked(each, job, rows) for each in kinds.values()))
    return tuple(replace(each, per_pair=each.per_pair + masks) for each in moments)


def _of_attention(
    layer: Layer, adapted: LayerAdapters, job: ResolvedJob, types: ElementBytes, rows: Rows, held: float
) -> Iterator[Work]:
    attention, compute = layer.attention, float(types.compute)
    query, keys, output = attention.query_width, attention.kv_width, attention.output_width
    values = attention.num_kv_heads * (attention.value_dim or attention.head_dim)
    projected = 0.0
    for linear in layer.at("mixer_in", "mixer_inner"):
        yield from _of_linear(linear, adapted, job, types, types.stream, held + projected)
        projected += types.mlp * linear.out_features
    if any(norm.size == attention.head_dim for norm in layer.norms):  # of the queries: lifted to fp32, and normalised
        yield Work(held + types.mlp * query + 8.0 * query)
    # the rotation: the queries, their two products and a half turned around
    yield Work(held + compute * (4 * query + keys + values))
    taken = held + compute * (query + keys + values)
    is_masked = attention_is_masked(layer, job, rows)
    repeated = query + output if is_masked and attention.num_kv_heads != attention.num_heads else 0
    yield Work(taken + compute * (repeated + output), per_pair=2.0 if is_masked else 0.0)
    for linear in layer.at("mixer_out"):
        yield from _of_linear(linear, adapted, job, types, types.compute, taken + compute * output)


def _of_mlp(layer: Layer, adapted: LayerAdapters, job: ResolvedJob, types: ElementBytes, held: float) -> Iterator[Work]:
    into, wide = layer.at("mlp_in"), types.mlp * float(layer.mlp_width)
    is_fused = layer.is_gated and len(into) == 1  # one projection for both branches, which are views of it
    before = 0.0
    for linear in into:
        yield from _of_linear(linear, adapted, job, types, types.stream, held + before)
        before += types.mlp * linear.out_features
    # both branches, one of them activated, and their product; without a gate what the activation reads and makes
    yield Work(held + before + (2 * wide if is_fused else wide))
    for linear in layer.at("mlp_out"):
        kept = wide + (before if is_fused else 0.0)
        yield from _of_linear(linear, adapted, job, types, types.mlp, held + kept)


def _of_linear(
    linear: Linear, adapted: LayerAdapters, job: ResolvedJob, types: ElementBytes, input_bytes: int, held: float
) -> Iterator[Work]:
    """While one linear runs beside ``held`` bytes, its input among them, of ``input_bytes`` an element.

    peft lifts the input to the adapter's type, adds B's result, scaled, to the linear's own: at the scaling there are B's
    result and the scaled one, at the addition the scaled one and the sum, in the wider of the two types.
    """
    is_quantized = job.quantization in BITSANDBYTES
    result, casts = float(types.mlp * linear.out_features), types.autocast and input_bytes == 4
    copy = 2.0 * linear.in_features if casts else 0.0
    if is_quantized:  # the weight in the compute type; the product, which takes the input's type afterwards
        weight = float(types.compute * linear.in_features * linear.out_features)
        yield Work(held + copy + types.compute * linear.out_features, fixed=weight)
        if types.mlp != types.compute:
            yield Work(held + result + types.compute * linear.out_features)
    else:
        yield Work(held + copy + result)
    if linear.name not in {each.linear.name for each in adapted.linears}:
        return
    branch = 4.0 if not types.autocast and types.adapter == 4 else 2.0
    # peft's quantised layers leave the cast to autocast
    is_lifted = types.adapter == 4 and input_bytes == 2 and not (is_quantized and types.autocast)
    lifted = 4.0 * linear.in_features if is_lifted else 0.0
    if types.autocast and (is_lifted or input_bytes == 4):
        yield Work(held + result + lifted + 2.0 * linear.in_features)
    yield Work(held + result + lifted + (branch + max(branch, types.mlp)) * linear.out_features)
