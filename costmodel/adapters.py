"""Which weights a LoRA adapts, and how many parameters that trains: the rules of peft 0.21, counted exactly.

peft adapts ``nn.Linear`` modules (and ``Conv1D``) by name. transformers 5 stacks routed experts into parameters, and for the
families in :data:`REWRITTEN_FAMILIES` peft rewrites the old per-expert names to those parameters: the stack gets one adapter
an expert, its forward builds a merged copy of the whole stack.
Source: peft 0.21.2, ``utils/transformers_weight_conversion.py``, ``tuners/tuners_utils.py`` and ``tuners/lora/layer.py``
(``ParamWrapper``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from costmodel.defaults import ResolvedJob
from costmodel.errors import CostModelError, shown
from costmodel.framework_defaults import adapts_towers
from costmodel.model_spec import Experts, Layer, Linear, ModelSpec

REWRITTEN_FAMILIES: Final = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots1",
        "ernie4_5_moe",
        "flex_olmo",
        "glm4_moe",
        "glm4_moe_lite",
        "hunyuan_v1_moe",
        "minimax",
        "minimax_m2",
        "mixtral",
        "olmoe",
        "qwen3_moe",
        "qwen3_next",
    }
)
"""MoE families whose pre-v5 target names peft turns into ``target_parameters`` on transformers 5.

Source: ``_MODEL_TO_CONVERSION_PATTERN`` of transformers 5.24, the entries that lead to ``mixtral`` or ``qwen2_moe``.
"""

_MAMBA_FAMILIES: Final = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
"""Families whose fused kernels read ``out_proj`` themselves, so that peft refuses a LoRA on it."""


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
    saved_modules_params: int = 0  # lora_modules_to_save: full copies of embed_tokens, lm_head, norms ...
    outside: tuple[AdaptedLinear, ...] = ()  # outside the layers: projections, the head or the embedding where named
    idle_params: int = 0  # of adapters in encoders of images and sound: no row of text gives them a gradient

    @property
    def num_params(self) -> int:
        """What is updated: without ``idle_params``."""
        layers = sum(adapters.num_params * count for _, adapters, count in self.runs)
        return layers + self.saved_modules_params + sum(each.num_params for each in self.outside)


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
        adapts_towers(job.framework),
    )


@dataclass(frozen=True, slots=True)
class _Targets:
    """What ``lora_target_modules`` says: ``names`` by their end, ``pattern`` against the whole name; neither: all."""

    names: frozenset[str] | None = None
    pattern: re.Pattern[str] | None = None
    excluded: re.Pattern[str] | None = None  # modules_to_save are trained whole, never adapted

    @property
    def is_all_linear(self) -> bool:
        return self.names is None and self.pattern is None

    def match(self, full_name: str) -> bool:
        if self.excluded is not None and self.excluded.match(full_name):
            return False
        if self.pattern is not None:
            return self.pattern.fullmatch(full_name) is not None
        return self.names is None or _ends_with(full_name, self.names)


def _ends_with(full_name: str, targets: frozenset[str]) -> bool:
    """Whether a target is the name or a whole part of its end."""
    return any(full_name == target or full_name.endswith(f".{target}") for target in targets)


@lru_cache(maxsize=256)
def _plan(
    model: ModelSpec,
    is_peft: bool,
    r: int,
    target_modules: str | tuple[str, ...],
    target_parameters: tuple[str, ...],
    modules_to_save: tuple[str, ...],
    dora: bool,
    dropout: bool,
    fused_experts: bool,
    reaches_towers: bool,
) -> Adapters:
    if not is_peft:
        return Adapters(tuple((layer, LayerAdapters(), count) for layer, count in model.layers))
    targets = _targets(target_modules, modules_to_save)
    ranks = dict.fromkeys(target_parameters, r)
    if fused_experts and model.family in REWRITTEN_FAMILIES:
        targets, rewritten = _rewrite_expert_targets(model, targets, r)
        ranks |= rewritten

    # Only a pattern, or a name that spells a layer's number, can treat equal layers differently.
    spelled = (*(targets.names or ()), *ranks, *modules_to_save)
    varies = targets.pattern is not None or any(part.isdigit() for name in spelled for part in name.split("."))
    runs: list[tuple[Layer, LayerAdapters, int]] = []
    index = 0
    for layer, count in model.layers:
        for number in [1] * count if varies else [count]:
            adapters = _adapt_layer(layer, f"{model.layers_path}.{index}", targets, ranks, r, dora, fused_experts)
            if runs and runs[-1][:2] == (layer, adapters):
                runs[-1] = (layer, adapters, runs[-1][2] + number)
            else:
                runs.append((layer, adapters, number))
            index += number
    plan = Adapters(
        tuple(runs),
        _saved_params(model, modules_to_save),
        tuple(AdaptedLinear(each, r, dora) for each in _outside_linears(model, targets) if targets.match(each.name)),
        _adapted_in_towers(model, targets, r, dora) if reaches_towers else 0,
    )
    if model.family in _MAMBA_FAMILIES and any(a.linear.leaf == "out_proj" for _, each, _ in runs for a in each.linears):
        raise CostModelError(f"peft refuses a LoRA on out_proj of {model.family}; list the other linears as targets")
    if plan.num_params == 0:
        names = sorted({linear.leaf for layer, _ in model.layers for linear in layer.linears})
        raise CostModelError(
            f"no weight of {model.name} matches lora_target_modules {shown(target_modules)}; its linears: {', '.join(names)}"
        )
    if (dropout or dora) and any(adapters.parameters for _, adapters, _ in runs):
        setting = "set lora_dropout to 0" if dropout else "turn use_dora off"
        raise CostModelError(
            f"peft refuses {'lora_dropout' if dropout else 'use_dora'} on stacked experts (target_parameters); {setting} or "
            "target the attention linears only"
        )
    return plan


def _adapted_in_towers(model: ModelSpec, targets: _Targets, r: int, dora: bool) -> int:
    """Parameters of the adapters there. Raises :class:`CostModelError` for a module there that is no linear."""
    linears = [linear for tower in model.towers for linear in tower.linears()]
    if not targets.is_all_linear:
        held = [each.name.removesuffix(_HELD_LINEAR) for each in linears if each.name.endswith(_HELD_LINEAR)]
        tables = [
            name.removesuffix(".weight")
            for tower in model.towers
            for name in tower.weight_names()
            if name.endswith(".weight")
        ]
        named = next((module for module in (*held, *tables) if targets.match(module)), None)
        if named is not None:
            raise CostModelError(
                f"lora_target_modules names {named} too, which is no linear layer; give a pattern that leaves the encoders "
                r"out, such as .*language_model\..*\.(q_proj|v_proj), or all-linear"
            )
    return sum(AdaptedLinear(each, r, dora).num_params for each in linears if targets.match(each.name))


# Gemma 4's encoders clip what enters and leaves a linear, Llama 4's unfolds an image before it: modules of their own around
# it (transformers 5.24, Gemma4ClippableLinear, Llama4UnfoldConvolution), which peft refuses.
_HELD_LINEAR: Final = ".linear"


def _targets(target_modules: str | tuple[str, ...], modules_to_save: tuple[str, ...]) -> _Targets:
    excluded = None
    if modules_to_save:
        excluded = re.compile(rf"(^|.*\.)({'|'.join(re.escape(name) for name in modules_to_save)})($|\..*)")
    if not isinstance(target_modules, str):
        return _Targets(frozenset(target_modules), None, excluded)
    if target_modules.lower() == "all-linear":
        return _Targets(None, None, excluded)
    try:
        return _Targets(None, re.compile(target_modules), excluded)
    except re.error as error:
        raise CostModelError(f"lora_target_modules {shown(target_modules)} is not a regular expression: {error}") from None


def _adapt_layer(
    layer: Layer, path: str, targets: _Targets, ranks: dict[str, int], r: int, dora: bool, fused_experts: bool
) -> LayerAdapters:
    linears = tuple(AdaptedLinear(each, r, dora) for each in layer.linears if targets.match(f"{path}.{each.name}"))
    if not targets.is_all_linear:
        for module in _other_modules(layer, fused_experts):
            if targets.match(f"{path}.{module}"):
                raise CostModelError(
                    f"lora_target_modules names {path}.{module}, which is no linear layer; leave it out, or name its "
                    "weight in lora_target_parameters"
                )
    parameters = [
        AdaptedParameter(name, number, width_in, width_out, rank)
        for name, number, width_in, width_out in _parameters(layer, fused_experts)
        if (rank := _rank(f"{path}.{name}", ranks))
    ]
    experts = layer.experts
    if experts is None or experts_are_stacked(experts, fused_experts):
        return LayerAdapters(linears, parameters=tuple(parameters))
    if experts.router_params and experts.router_was_linear:
        router = _old_router(experts)
        if targets.match(f"{path}.{router.name}"):
            linears += (AdaptedLinear(router, r, dora),)
    expert_linears = tuple(
        AdaptedLinear(linear, r, dora) for linear in _expert_linears(experts) if targets.match(f"{path}.{linear.name}")
    )
    return LayerAdapters(linears, expert_linears, experts.num_experts if expert_linears else 0, tuple(parameters))


def _other_modules(layer: Layer, fused_experts: bool) -> Iterator[str]:
    """Modules of a layer that hold weights and are no linears: convolutions, stacked experts and their router."""
    for weights in layer.weights:
        if weights.name.endswith(".weight"):
            yield weights.name.rpartition(".")[0]
    for experts in layer.all_experts:
        if experts_are_stacked(experts, fused_experts):
            yield experts.path
            if experts.router_params:
                yield experts.router


def experts_are_stacked(experts: Experts, fused_experts: bool) -> bool:
    """Whether the experts are stacked parameters: in transformers 5, and in 4 where the family never had it otherwise."""
    return bool(experts.stacks) and (fused_experts or not experts.linear_names)


def _old_router(experts: Experts) -> Linear:
    """The router as transformers 4 names it, an ``nn.Linear`` beside the experts."""
    block, leaf = experts.linear_path.rpartition(".")[0], experts.router.rpartition(".")[2]
    return Linear(f"{block}.{leaf}", experts.hidden_size, experts.num_experts, place="router")


def _expert_linears(experts: Experts) -> Iterator[Linear]:
    """The linears of one expert, as transformers 4 names them: the last leads back to the hidden size."""
    hidden, width = experts.hidden_size, experts.intermediate_size
    for name in experts.linear_names:
        if name == experts.linear_names[-1]:
            yield Linear(f"{experts.linear_path}.0.{name}", width, hidden, place="mlp_out")
        else:
            yield Linear(f"{experts.linear_path}.0.{name}", hidden, width, place="mlp_in")


def _parameters(layer: Layer, fused_experts: bool) -> Iterator[tuple[str, int, int, int]]:
    """(name, matrices, in, out) of what ``target_parameters`` can name: stacks, routers, weights of linears."""
    for experts in layer.all_experts:
        if experts_are_stacked(experts, fused_experts):
            if experts.router_params:
                yield f"{experts.router}.weight", 1, experts.hidden_size, experts.num_experts
            for stack in experts.stacks:
                yield stack.name, stack.num_matrices, stack.in_features, stack.out_features
    for linear in layer.linears:
        yield f"{linear.name}.weight", 1, linear.in_features, linear.out_features


def _rank(full_name: str, ranks: dict[str, int]) -> int:
    return next((rank for target, rank in ranks.items() if _ends_with(full_name, frozenset({target}))), 0)


def _outside_linears(model: ModelSpec, targets: _Targets) -> Iterator[Linear]:
    """Linears outside the layers; ``all-linear`` leaves head and embedding out, a name or pattern may mean them."""
    yield from model.linears
    if not targets.is_all_linear:
        yield Linear(model.head_path, model.head_width, model.vocab_size)
        yield Linear(model.embedding_path, model.vocab_size, model.head_width)


def _rewrite_expert_targets(model: ModelSpec, targets: _Targets, r: int) -> tuple[_Targets, dict[str, int]]:
    """peft's rename of per-expert target names to stacked parameters: (targets left, {parameter: rank}).

    gate and up are one stacked parameter, so both must be targeted together and its rank is twice ``r``. The rename goes
    by leaf name: a dense MLP or a shared expert that shares those names loses its adapters too.
    """
    is_mixtral = model.family in {"minimax", "minimax_m2", "mixtral"}
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    renamed = {"gate": "gate.weight", gate: "gate_up_proj", up: "gate_up_proj", down: "down_proj"}
    if targets.names is not None:
        names = set(targets.names)
    else:
        names = set(renamed) if targets.is_all_linear else set()
        for index, layer in enumerate(_each_layer(model)):
            path = f"{model.layers_path}.{index}"
            names |= {linear.leaf for linear in layer.linears if targets.match(f"{path}.{linear.name}")}
            if layer.experts and not targets.is_all_linear:
                # a pattern may still spell the modules that transformers 5 no longer has
                old = {name: f"{layer.experts.path}.{name}" for name in (gate, up, down)}
                old["gate"] = layer.experts.router
                names |= {name for name, place in old.items() if targets.match(f"{path}.{place}")}
        names |= {each.name.rpartition(".")[2] for each in _outside_linears(model, targets) if targets.match(each.name)}
    ranks: dict[str, int] = {}
    left = set()
    fused_present = set()
    for name in names:
        old_name = next((key for key in renamed if name == key or name.endswith(f".{key}")), None)
        if old_name is None:
            left.add(name)
            continue
        if renamed[old_name] == "gate_up_proj":
            fused_present.add(old_name)
        ranks[renamed[old_name]] = r
    if fused_present and fused_present != {gate, up}:
        missing = ({gate, up} - fused_present).pop()
        raise CostModelError(
            f"peft cannot adapt {fused_present.pop()!r} of {model.family} without {missing!r}: transformers 5 keeps both "
            "in one stacked parameter; target both"
        )
    if "gate_up_proj" in ranks:
        ranks["gate_up_proj"] = 2 * r
    return _Targets(frozenset(left), None, targets.excluded), ranks


def _each_layer(model: ModelSpec) -> Iterator[Layer]:
    for layer, count in model.layers:
        for _ in range(count):
            yield layer


def _saved_params(model: ModelSpec, modules_to_save: tuple[str, ...]) -> int:
    """Parameters of the modules whose name ends like one of ``modules_to_save``: each is trained as a full copy.

    A tied head is a module of its own here: embedding and head become two copies.
    """
    if not modules_to_save:
        return 0
    total = 0
    found = set()
    parameters = list(model.parameters())
    if model.tied_embeddings:
        parameters.append((f"{model.head_path}.weight", model.embedding_params))
    for name, size in parameters:
        module = name.rpartition(".")[0]
        ends = [module[: match.start()] for match in re.finditer(r"\.", module)] + [module]
        matching = {saved for saved in modules_to_save if any(end.endswith(saved) for end in ends)}
        if matching:
            total += size
            found |= matching
    missing = [name for name in modules_to_save if name not in found]
    if missing:
        raise CostModelError(
            f"lora_modules_to_save {shown(missing[0])} names no module of {model.name}; examples: "
            f"{model.embedding_path.rpartition('.')[2]}, {model.head_path}"
        )
    return total
