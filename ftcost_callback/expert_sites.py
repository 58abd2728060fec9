"""Where a model chooses its experts, and how the choice is read there: one row of a load for each such place.

transformers calls ``experts(hidden_states, top_k_index, top_k_weights)`` in nearly every MoE family: the choice is that
argument, whatever the router returns (with a score bias the top-k of its logits is not the choice). The families that do
otherwise are in ``_BY_CLASS``, and blocks with one module for each expert, as in transformers 4, are told by their parts.

Nothing is computed inside the user's forward, where selective recomputation counts the operators: what was read is made
into expert numbers when the forward is over.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

_INDEX_ARGUMENTS: Final = ("top_k_index", "router_indices")
_ROUTER_ATTRIBUTES: Final = ("gate", "router")
_COUNT_ATTRIBUTES: Final = ("num_experts", "total_experts")  # LongCat's experts: the real ones and those that do nothing
_TOP_K_ATTRIBUTES: Final = ("top_k", "num_experts_per_tok", "moe_k", "moe_topk", "k")
_NUM_EXPERTS_FIELDS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_CLASS: Final = re.compile(r"Experts|Router|MoE|Moe(?=[A-Z]|$)|SparseMLP|Top[12k]")
# Families whose experts run, but not as their indices say (NllbMoeExperts encodes an already encoded mask).
# How benchmarks say that tokens are dealt out evenly whatever the router scores: torchtitan's (pull 1670), Megatron's and
# NeMo's names, on the config, a block or its router.
_FORCED_ATTRIBUTES: Final = (
    "force_load_balance",
    "debug_force_load_balance",
    "_debug_force_load_balance",
    "moe_router_force_load_balancing",
    "fake_balanced_gate",
)
_UNSUPPORTED_CLASSES: Final = ("NllbMoeExperts",)

ToIndex = Callable[[Any], Tensor]
"""What was read -> (tokens, experts per token) expert numbers; a number that is no expert's stands for none."""


def as_it_is(index: Tensor) -> Tensor:
    return index


@dataclass(frozen=True, slots=True)
class ExpertSite:
    """One row of the load. ``module`` holds the experts; ``hooked`` is the module whose call shows the choice:

    as the argument ``argument`` at ``position`` (without self) of its ``forward``, with ``with_next`` as a pair with the
    argument behind that; or, where ``argument`` is ``None``, as its output.
    """

    layer_name: str
    module: nn.Module
    hooked: nn.Module
    num_experts: int
    argument: str | None = None
    position: int = 0
    with_next: bool = False
    to_index: ToIndex = as_it_is
    drops_tokens: bool = False  # the model leaves out what is over an expert's capacity
    is_decoder: bool = False  # of an encoder-decoder model: sees the target's tokens
    experts: tuple[nn.Module, ...] = ()  # one each, whose rows tell whether the choice was read rightly
    parameter_modules: tuple[str, ...] = ()  # names of the modules that hold the experts' weights

    @property
    def shows_choice_in_graph(self) -> bool:
        """Whether an operator on the module's way can show the choice inside a compiled graph. Not that of experts which are
        modules of their own: the rows they are given, which the choice is checked by, are not seen there."""
        return not self.experts


def find_expert_sites(model: nn.Module) -> list[ExpertSite]:
    """Every place where experts are chosen and the choice can be seen, in the order in which a forward comes to them: inside
    a compiled graph nothing else tells one from another."""
    modules = dict(model.named_modules())
    unused = tuple(f"{part}." for name, module in modules.items() for part in _unused_parts(name, module))
    if unused:
        modules = {name: module for name, module in modules.items() if not f"{name}.".startswith(unused)}
    config = getattr(model, "config", None)
    sites = _in_order_of_calls(
        [site for name, module in modules.items() for site in _sites_of(modules, name, module, config)]
    )
    parts = [site.layer_name.split(".") for site in sites]
    if getattr(config, "is_encoder_decoder", False) or any("encoder" in each for each in parts):
        sites = [dataclasses.replace(site, is_decoder="decoder" in each) for site, each in zip(sites, parts, strict=True)]
    return sites


def _in_order_of_calls(sites: list[ExpertSite]) -> list[ExpertSite]:
    """Modules are made in the order of their calls; but JetMoE's layers make their attention last, and call it first."""
    ordered = list(sites)
    for place, (site, following) in enumerate(itertools.pairwise(sites)):
        layer = following.layer_name.removesuffix(".self_attention.experts")
        if layer != following.layer_name and site.layer_name == f"{layer}.mlp":
            ordered[place : place + 2] = following, site
    return ordered


def _unused_parts(name: str, module: Any) -> list[str]:
    """Names of what PEFT keeps and does not run: of a module in ``modules_to_save`` it trains a copy for each adapter, and
    runs that of the first active one, or without one what was there before."""
    if type(module).__name__ != "ModulesToSaveWrapper":
        return []
    adapters = module.active_adapters
    runs_copy = not module.disable_adapters and adapters and adapters[0] in module.modules_to_save
    active = f"{name}.modules_to_save.{adapters[0]}" if runs_copy else f"{name}.original_module"
    parts = [f"{name}.original_module", *(f"{name}.modules_to_save.{adapter}" for adapter in module.modules_to_save)]
    return [part for part in parts if part != active]


def _sites_of(modules: dict[str, nn.Module], name: str, module: nn.Module, config: Any) -> Iterator[ExpertSite]:
    class_name = type(module).__name__
    if class_name in _UNSUPPORTED_CLASSES:
        return
    if (of_class := _BY_CLASS.get(class_name)) is not None:
        yield of_class(name, module)
        return
    parameters = list(inspect.signature(type(module).forward).parameters)[1:]
    argument = next((each for each in _INDEX_ARGUMENTS if each in parameters), None)
    if argument is not None:
        num_experts = _num_experts(modules, name, module)
        if num_experts is not None:
            position = parameters.index(argument)
            yield ExpertSite(name, module, module, num_experts, argument, position, parameter_modules=(name,))
    elif isinstance(getattr(module, "experts", None), nn.ModuleList):
        yield from _list_of_experts(name, module, config)


def _num_experts(modules: dict[str, nn.Module], name: str, module: nn.Module) -> int | None:
    """From the live modules: the router's (under expert parallelism the experts module holds a share only)."""
    own = (getattr(module, attribute, None) for attribute in _COUNT_ATTRIBUTES)
    counts = [count for count in own if isinstance(count, int)]
    parent_name = name.rpartition(".")[0]
    while parent_name and (
        type(modules[parent_name]).__module__.startswith("peft.") or isinstance(modules[parent_name], nn.ModuleDict)
    ):
        parent_name = parent_name.rpartition(".")[0]
    parent = modules.get(parent_name)
    for attribute in _ROUTER_ATTRIBUTES:
        router = getattr(parent, attribute, None)
        said, weight = getattr(router, "num_experts", None), getattr(router, "weight", None)
        if isinstance(said, int):
            counts.append(said)  # Inkling's router weighs its shared experts too
        elif isinstance(weight, Tensor) and weight.dim() == 2:
            counts.append(weight.shape[0])
    return max(counts, default=None)


# --- families that show their choice in another way -------------------------------------------------------------------


def _switch(name: str, module: Any) -> ExpertSite:
    """One expert for each token, as a row with a single 1, or with none where the expert's capacity was used up."""
    num_experts: int = module.num_experts

    def to_index(encoded: Tensor) -> Tensor:
        flat = encoded.reshape(-1, num_experts)
        return torch.where(flat.any(dim=-1), flat.argmax(dim=-1), num_experts).unsqueeze(-1)

    return ExpertSite(
        name, module, module, num_experts, "selected_experts", 1, to_index=to_index, drops_tokens=True,
        parameter_modules=(name,),
    )  # fmt: skip


def _zaya(name: str, module: Any) -> ExpertSite:
    """A token that skips the experts is given to expert 0 with the weight 0: it gets a column of its own, the last."""
    num_experts: int = module.num_experts

    def to_index(pair: tuple[Tensor, Tensor]) -> Tensor:
        index, weights = pair
        return index.masked_fill(weights == 0, num_experts)

    return ExpertSite(
        name, module, module, num_experts + 1, "top_k_index", 1, with_next=True, to_index=to_index, parameter_modules=(name,)
    )


def _llama4(name: str, module: Any) -> ExpertSite:
    """Every expert computes every token; the scores of those that a token did not choose are 0."""
    top_k: int = module.top_k
    experts = f"{name}.experts"
    return ExpertSite(
        experts, module.experts, module.router, module.num_experts,
        to_index=lambda output: _largest(output[1], top_k), parameter_modules=(experts,),
    )  # fmt: skip


def _jetmoe(name: str, module: Any) -> ExpertSite:
    """Of the feed-forward layer and of the attention: the router sorts the choices, and returns its logits last."""
    top_k: int = module.router.top_k
    weights = (f"{name}.input_linear", f"{name}.output_linear")
    return ExpertSite(
        name, module.input_linear, module.router, module.router.num_experts,
        to_index=lambda output: _largest(output[-1], top_k), parameter_modules=weights,
    )  # fmt: skip


def _doge(name: str, module: Any) -> ExpertSite:
    """Experts are rows of two embeddings."""
    weights = (f"{name}.down_embed", f"{name}.up_embed")
    embedding = module.down_embed
    return ExpertSite(name, embedding, embedding, module.num_experts, "input", 0, parameter_modules=weights)


_BY_CLASS: Final[dict[str, Callable[[str, Any], ExpertSite]]] = {
    "SwitchTransformersExperts": _switch,
    "ZayaExperts": _zaya,
    "Llama4TextMoe": _llama4,
    "JetMoeMoE": _jetmoe,
    "JetMoeMoA": _jetmoe,
    "DogeCDMoE": _doge,
}


def _list_of_experts(name: str, block: Any, config: Any) -> Iterator[ExpertSite]:
    """A block as in transformers 4: a module for each expert, and a gate that returns logits, or the choice itself.

    Whether the experts run as the gate says is checked by the rows that each is given.
    """
    experts = tuple(block.experts)
    router = next((found for each in _ROUTER_ATTRIBUTES if isinstance(found := getattr(block, each, None), nn.Module)), None)
    top_k = _top_k(block, router, config)
    if router is None or top_k is None or len(experts) < 2:
        return
    num_experts, of_experts = len(experts), f"{name}.experts"

    def to_index(output: Any) -> Tensor:
        tensors = [each for each in (output if isinstance(output, tuple) else (output,)) if isinstance(each, Tensor)]
        for each in tensors:
            if not each.is_floating_point() and each.shape[-1] == top_k:
                return each
        logits = next(each for each in tensors if each.shape[-1] == num_experts)
        return _largest(logits, top_k)

    yield ExpertSite(
        of_experts, block.experts, router, num_experts, to_index=to_index, experts=experts, parameter_modules=(of_experts,)
    )


def _top_k(block: Any, router: Any, config: Any) -> int | None:
    texts = (config, getattr(config, "text_config", None))
    values = (getattr(owner, attribute, None) for owner in (block, router, *texts) for attribute in _TOP_K_ATTRIBUTES)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def _largest(scores: Tensor, top_k: int) -> Tensor:
    return scores.detach().reshape(-1, scores.shape[-1]).topk(top_k, dim=-1).indices


def forced_routing(model: nn.Module) -> str | None:
    """What says that routing is forced to be even, as in a benchmark; ``None``: nothing does."""
    config = getattr(model, "config", None)
    for owner in (config, getattr(config, "text_config", None), *model.modules()):
        if type(owner).__name__ == "FakeBalancedGate":
            return "FakeBalancedGate"
        for name in _FORCED_ATTRIBUTES:
            if getattr(owner, name, None) is True:
                return name
    return None


# --- models without such a place --------------------------------------------------------------------------------------


def moe_class_name(model: nn.Module) -> str | None:
    """Class of a module that looks like experts or a router, in a model whose config has experts; dense: ``None``."""
    configs = [getattr(model, "config", None)]
    configs += [getattr(configs[0], name, None) for name in ("text_config", "ffn_config")]
    most = max((count for config in configs for field in _NUM_EXPERTS_FIELDS if (count := _int(config, field))), default=0)
    if most <= 1:
        return None
    names = {type(module).__name__ for module in model.modules() if module is not model}
    looks_like = sorted(name for name in names if _EXPERTS_CLASS.search(name) and "Decoder" not in name)
    return next((name for name in looks_like if "Expert" in name), looks_like[0] if looks_like else type(model).__name__)


def why_not_shown(class_name: str) -> str:
    """Why a model with experts has no load: for the record's ``reason``."""
    if class_name in _UNSUPPORTED_CLASSES:
        return f"{class_name} does not run the experts that its router chose, so the router's choice is no load"
    return f"{class_name} does not show which experts it chose ({' or '.join(_INDEX_ARGUMENTS)})"


def _int(config: Any, field: str) -> int | None:
    value = getattr(config, field, None)
    return value if isinstance(value, int) else None
