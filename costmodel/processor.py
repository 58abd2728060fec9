"""What a training step takes on a probed processor beside its products: the rates of the probe on bytes counted by hand.

A CPU keeps small tensors in its caches and takes very large ones fresh from the system, so one bandwidth says little: the
element-wise rate is a curve over the size of a tensor. The bytes are those of Llama-like layers in fp32, where the casts of
16-bit training fall away (transformers 5.24 and peft 0.21, each operator's operands and results). ``docs/formulas.md`` says
what they were checked against.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from costmodel.adapters import AdaptedLinear
from costmodel.model_spec import Experts, Layer

# Bytes moved for each element of the tensor, (forward, backward), in fp32.
_NORM = (28.0, 76.0)  # RMSNorm in Python: square, mean, scale, weight
_NORM_WEIGHT_GRADIENT = 16.0
_LAYER_NORM = (8.0, 16.0)  # one kernel
_RESIDUAL = (12.0, 12.0)
_FAN_IN = 12.0  # the gradient of an input that several linears read is added up, for each beyond the first
_ROTATION = (44.0, 68.0)
_GATED_ACTIVATION = (20.0, 36.0)
_ACTIVATION = (8.0, 12.0)
_KEPT_KEYS = (8.0, 0.0)  # use_cache: keys and values are put behind an empty cache
_EXPERT_GRADIENT = (0.0, 8.0)  # of each weight into the experts: the experts' gradients are put into one tensor
_EXPERT_ROW = (28.0, 66.0)  # gather, weight, scatter, sum over the experts of a token
_ADAPTER_OUT = (20.0, 8.0)  # scaled, added
_ADAPTER_IN = (0.0, 12.0)  # the input's gradient is added to the base's
_DROPOUT = (9.0, 13.0)


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of ``rows`` rows that operators on tensors ``width`` wide move, (forward, backward), for each element."""

    rows: float
    width: float
    forward: float
    backward: float


def at(curve: Sequence[tuple[float, float]], size: float) -> float:
    """The curve at ``size``: a line on logarithmic axes between two measured sizes, the nearest one outside."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (small, low), (large, high) in itertools.pairwise(curve):
        if size <= large:
            share = math.log(size / small) / math.log(large / small)
            return low * math.exp(share * math.log(high / low))
    return curve[-1][1]


def narrow_factor(half_size: float, *sizes: float) -> float:
    """How much longer a product of these dimensions takes than its FLOPs at the rate that large ones approach.

    A dimension D costs what D + ``half_size`` would: blocks are cut for registers and caches, and the last stay part empty.
    """
    return math.prod(1.0 + half_size / size for size in sizes if size > 0)


def seconds(moved: Iterable[Moved], curve: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds of the forward and of the backward, by the curve's rate for a tensor of each size."""
    forward = backward = 0.0
    for each in moved:
        elements = each.rows * each.width
        if elements:
            rate = at(curve, 4.0 * elements)
            forward += elements * each.forward / rate
            backward += elements * each.backward / rate
    return forward, backward


def moved_by_layer(
    layer: Layer, tokens: float, hidden_size: int, *, trains_norms: bool, keeps_keys: bool = True
) -> list[Moved]:
    """Element-wise work of one layer outside experts and adapters."""
    attention = layer.attention
    has_mixer = bool(attention.num_heads or layer.scan)
    has_feed_forward = bool(layer.mlp_width or layer.experts)
    extra = _NORM_WEIGHT_GRADIENT if trains_norms else 0.0
    moved = []
    for norm in layer.norms:
        into, back = _LAYER_NORM if norm.kind == "layer" else _NORM
        moved.append(Moved(tokens, norm.width, into, back + extra))
    moved += [Moved(tokens, hidden_size, *_RESIDUAL)] * (has_mixer + has_feed_forward)
    readers = 2.0 * bool(attention.num_heads) + float(layer.is_gated and bool(layer.mlp_width))
    moved.append(Moved(tokens, hidden_size, 0.0, _FAN_IN * readers))
    moved += [Moved(tokens, width, *_ROTATION) for width in (attention.query_width, attention.kv_width)]
    if keeps_keys:
        moved += [Moved(tokens, attention.kv_width, *_KEPT_KEYS)] * 2
    if layer.scan:
        moved.append(Moved(tokens, layer.scan.channels, 48.0, 96.0))
    moved.append(Moved(tokens, layer.mlp_width, *(_GATED_ACTIVATION if layer.is_gated else _ACTIVATION)))
    return moved


def moved_by_experts(experts: Experts, rows: float) -> list[Moved]:
    """Element-wise work of routed experts on ``rows`` rows in one tensor, a row being a token in one of its experts."""
    activation = _GATED_ACTIVATION if experts.is_gated else _ACTIVATION
    return [Moved(rows, experts.intermediate_size, *activation), Moved(rows, experts.hidden_size, *_EXPERT_ROW)]


def moved_by_expert_gradients(experts: Experts) -> list[Moved]:
    """What a grouped product adds to its backward where the experts' weights are trained."""
    width = experts.hidden_size * experts.intermediate_size * (experts.num_matrices - 1)
    return [Moved(experts.num_experts, width, *_EXPERT_GRADIENT)]


def moved_by_adapters(adapted: Iterable[AdaptedLinear], rows: float, *, has_dropout: bool) -> list[Moved]:
    """What LoRA pairs move beside their products."""
    moved = []
    for each in adapted:
        moved.append(Moved(rows, each.linear.out_features, *_ADAPTER_OUT))
        moved.append(Moved(rows, each.linear.in_features, *_ADAPTER_IN))
        if has_dropout:
            moved.append(Moved(rows, each.linear.in_features, *_DROPOUT))
    return moved
