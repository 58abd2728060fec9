"""Which weights a LoRA adapts, and how many parameters that trains: the rules of peft 0.21, counted exactly.

peft adapts ``nn.Linear`` modules by name. transformers 5 stacks routed experts into parameters, and for the families in
:data:`REWRITTEN_FAMILIES` peft rewrites the old per-expert names to those parameters: the stack gets one adapter an
expert, its forward builds a merged copy of the whole stack.
Source: peft 0.21.2, ``utils/transformers_weight_conversion.py`` and ``tuners/lora/layer.py`` (``ParamWrapper``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from costmodel.defaults import ResolvedJob
from costmodel.errors import CostModelError
from costmodel.hf_config import Experts, Layer, Linear, ModelSpec

REWRITTEN_FAMILIES: Final = frozenset({"mixtral", "qwen3_moe", "olmoe"})
"""MoE families whose pre-v5 target names peft turns into ``target_parameters`` on transformers 5."""


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A LoRA pair beside one ``nn.Linear``: A is (r, in_features), B is (out_features, r)."""

    linear: Linear
    r: int
    dora: bool = False

    @property
    def num_params(self) -> int:
        pair = self.r * (self.linear.in_features + self.linear.out_features)
        return pair + (self.linear.out_features if self.dora else 0)


@dataclass(frozen=True, slots=True)
class AdaptedParameter:
    """A LoRA on a stacked parameter of ``num_matrices`` matrices (in_features x out_features each)."""

    name: str
    num_matrices: int
    in_features: int
    out_features: int
    r: int

    @property
    def num_params(self) -> int:
        return self.num_matrices * self.r * (self.in_features + self.out_features)

    @property
    def merge_flops(self) -> int:
        """FLOPs of building B·A for every matrix once: 2 · E · r · in · out."""
        return 2 * self.num_matrices * self.r * self.in_features * self.out_features

    @property
    def base_params(self) -> int:
        return self.num_matrices * self.in_features * self.out_features


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """What is adapted in one layer: its linears, the linears of each expert (transformers 4), stacked parameters (5)."""

    linears: tuple[AdaptedLinear, ...] = ()
    expert_linears: tuple[AdaptedLinear, ...] = ()  # one of each kind; every expert has its own
    num_experts: int = 0
    parameters: tuple[AdaptedParameter, ...] = ()

    @property
    def num_params(self) -> int:
        return (
            sum(each.num_params for each in self.linears)
            + self.num_experts * sum(each.num_params for each in self.expert_linears)
            + sum(each.num_params for each in self.parameters)
        )


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model, aligned with runs of equal (layer, adapters), plus fully trained copies."""

    runs: tuple[tuple[Layer, LayerAdapters, int], ...]
    saved_modules_params: int = 0  # lora_modules_to_save: full copies of embed_tokens / lm_head

    @property
    def num_params(self) -> int:
        return sum(adapters.num_params * count for _, adapters, count in self.runs) + self.saved_modules_params


def plan_adapters(model: ModelSpec, job: ResolvedJob) -> Adapters:
    """The adapters this job trains. For ``method="full"`` every layer comes back without any.

    Raises :class:`CostModelError` when no target matches, or peft itself would refuse the targets.
    """
    return _plan(
        model,
        job.is_peft,
        job.lora_r,
        job.lora_target_modules,
        job.lora_target_parameters,
        job.lora_modules_to_save,
        job.use_dora,
        job.lora_dropout > 0,
        job.fused_experts,
    )


@lru_cache(maxsize=256)
def _plan(
    model: ModelSpec,
    is_peft: bool,
    r: int,
    targets: str | tuple[str, ...],
    target_parameters: tuple[str, ...],
    modules_to_save: tuple[str, ...],
    dora: bool,
    dropout: bool,
    fused_experts: bool,
) -> Adapters:
    if not is_peft:
        return Adapters(tuple((layer, LayerAdapters(), count) for layer, count in model.layers))
    rewritten: dict[str, int] = {}
    if fused_experts and model.is_moe and model.family in REWRITTEN_FAMILIES:
        targets, rewritten = _rewrite_expert_targets(model, targets, r)
    parameter_ranks = dict.fromkeys(target_parameters, r) | rewritten

    matches = _matcher(targets)
    runs: list[tuple[Layer, LayerAdapters, int]] = []
    index = 0
    for layer, count in model.layers:
        for _ in range(count):
            adapters = _adapt_layer(layer, index, matches, parameter_ranks, r, dora, fused_experts)
            if runs and runs[-1][:2] == (layer, adapters):
                runs[-1] = (layer, adapters, runs[-1][2] + 1)
            else:
                runs.append((layer, adapters, 1))
            index += 1
    saved = sum(_saved_module_params(model, name) for name in modules_to_save)
    plan = Adapters(tuple(runs), saved)
    if plan.num_params == 0:
        names = sorted({linear.leaf for layer, _ in model.layers for linear in layer.linears})
        raise CostModelError(
            f"no weight of {model.name} matches lora_target_modules {targets!r}; its linears: {', '.join(names)}"
        )
    if dropout and any(adapters.parameters for _, adapters, _ in runs):
        raise CostModelError(
            "peft refuses lora_dropout on stacked experts (target_parameters); set lora_dropout to 0 or target the "
            "attention linears only"
        )
    return plan


def _matcher(targets: str | tuple[str, ...]) -> re.Pattern[str] | frozenset[str] | None:
    """``None`` is all-linear, a pattern a regex over full module names, a set the names themselves."""
    if isinstance(targets, str):
        if targets == "all-linear":
            return None
        try:
            return re.compile(targets)
        except re.error as error:
            raise CostModelError(f"lora_target_modules {targets!r} is not a regular expression: {error}") from None
    return frozenset(targets)


def _is_target(name: str, layer_index: int, matches: re.Pattern[str] | frozenset[str] | None) -> bool:
    if matches is None:
        return True
    full_name = f"model.layers.{layer_index}.{name}"
    if isinstance(matches, re.Pattern):
        return matches.fullmatch(full_name) is not None
    return any(full_name == target or full_name.endswith(f".{target}") for target in matches)


def _adapt_layer(
    layer: Layer,
    index: int,
    matches: re.Pattern[str] | frozenset[str] | None,
    parameter_ranks: dict[str, int],
    r: int,
    dora: bool,
    fused_experts: bool,
) -> LayerAdapters:
    linears = tuple(AdaptedLinear(each, r, dora) for each in layer.linears if _is_target(each.name, index, matches))
    experts = layer.experts
    if experts is None:
        return LayerAdapters(linears)
    if fused_experts:
        stacked = tuple(
            AdaptedParameter(name, number, width_in, width_out, rank)
            for name, number, width_in, width_out in _stacked_parameters(experts)
            if (rank := _parameter_rank(name, index, parameter_ranks))
        )
        return LayerAdapters(linears, parameters=stacked)
    block = "block_sparse_moe" if experts.linear_names[0] == "w1" else "mlp"
    router = Linear(f"{block}.gate", experts.hidden_size, experts.num_experts)
    if _is_target(router.name, index, matches):
        linears += (AdaptedLinear(router, r, dora),)
    gate, up, down = experts.linear_names
    shapes = (
        (gate, experts.hidden_size, experts.intermediate_size),
        (up, experts.hidden_size, experts.intermediate_size),
        (down, experts.intermediate_size, experts.hidden_size),
    )
    expert_linears = tuple(
        AdaptedLinear(Linear(f"{block}.experts.0.{name}", width_in, width_out), r, dora)
        for name, width_in, width_out in shapes
        if _is_target(f"{block}.experts.0.{name}", index, matches)
    )
    return LayerAdapters(linears, expert_linears, experts.num_experts if expert_linears else 0)


def _stacked_parameters(experts: Experts) -> tuple[tuple[str, int, int, int], ...]:
    """(name, number of matrices, in, out) of the parameters of a transformers 5 MoE block."""
    return (
        ("mlp.gate.weight", 1, experts.hidden_size, experts.num_experts),
        ("mlp.experts.gate_up_proj", experts.num_experts, experts.hidden_size, 2 * experts.intermediate_size),
        ("mlp.experts.down_proj", experts.num_experts, experts.intermediate_size, experts.hidden_size),
    )


def _parameter_rank(name: str, index: int, ranks: dict[str, int]) -> int:
    full_name = f"model.layers.{index}.{name}"
    for target, rank in ranks.items():
        if full_name == target or full_name.endswith(f".{target}"):
            return rank
    return 0


def _rewrite_expert_targets(
    model: ModelSpec, targets: str | tuple[str, ...], r: int
) -> tuple[str | tuple[str, ...], dict[str, int]]:
    """peft's rename of per-expert target names to stacked parameters: (targets left, {parameter: rank}).

    gate and up are one stacked parameter, so both must be targeted together and its rank is twice ``r``. The rename goes
    by leaf name: a dense MLP that shares those names loses its adapters too.
    """
    experts = next(layer.experts for layer, _ in model.layers if layer.experts)
    gate, up, down = experts.linear_names
    renamed = {"gate": "gate.weight", gate: "gate_up_proj", up: "gate_up_proj", down: "down_proj"}
    if isinstance(targets, str):
        leaves = {linear.leaf for layer, _ in model.layers for linear in layer.linears}
        if targets == "all-linear":
            names = leaves | set(renamed)
        else:
            matches = _matcher(targets)
            names = {
                linear.leaf
                for index, layer in enumerate(_each_layer(model))
                for linear in layer.linears
                if _is_target(linear.name, index, matches)
            }
            names |= {
                old
                for index, layer in enumerate(_each_layer(model))
                if layer.experts
                for old, place in (("gate", "mlp"), (gate, "mlp.experts"), (up, "mlp.experts"), (down, "mlp.experts"))
                if _is_target(f"{place}.{old}", index, matches)
            }
    else:
        names = set(targets)
    ranks: dict[str, int] = {}
    left = set()
    fused_present = set()
    for name in names:
        old = next((key for key in renamed if name == key or name.endswith(f".{key}")), None)
        if old is None:
            left.add(name)
            continue
        if renamed[old] == "gate_up_proj":
            fused_present.add(old)
        ranks[renamed[old]] = r
    if fused_present and fused_present != {gate, up}:
        missing = ({gate, up} - fused_present).pop()
        raise CostModelError(
            f"peft cannot adapt {fused_present.pop()!r} of {model.family} without {missing!r}: transformers 5 keeps both "
            "in one stacked parameter; target both"
        )
    if "gate_up_proj" in ranks:
        ranks["gate_up_proj"] = 2 * r
    return tuple(sorted(left)), ranks


def _each_layer(model: ModelSpec) -> list[Layer]:
    return [layer for layer, count in model.layers for _ in range(count)]


def _saved_module_params(model: ModelSpec, name: str) -> int:
    leaf = name.rpartition(".")[2]
    if leaf in {"embed_tokens", "lm_head"}:
        return model.embedding_params
    raise CostModelError(f"lora_modules_to_save {name!r} is not modelled; known: embed_tokens, lm_head")
