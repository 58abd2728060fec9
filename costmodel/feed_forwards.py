"""Builders of what follows the mixer: gated and plain MLPs, routed experts with their router and shared experts.

Source: ``modeling_*.py`` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from costmodel.blocks import Block, Builder, Fields, Flag, is_set
from costmodel.errors import CostModelError, shown
from costmodel.model_spec import Experts, Linear, Weights


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
        raise CostModelError(f"the model config's {name} must hold positive whole numbers, got {shown(entry)}")
    return entry


def after_dense_prefix(fields: Fields, layer: int) -> bool:
    kind = fields.entry("mlp_layer_types", layer)
    return kind == "sparse" if kind else layer >= fields.count("first_k_dense_replace")


def sparse_step(fields: Fields, layer: int) -> bool:
    only_dense = layer in (fields.get("mlp_only_layers") or [])
    return not only_dense and fields.count("num_experts") > 0 and (layer + 1) % fields.size("decoder_sparse_step") == 0
