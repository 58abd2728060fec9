"""Which part of a language model a module is: attention, experts, router, norm and so on, by its class and its name."""

from __future__ import annotations

import re
from typing import Final

from torch import nn

from ftcost_callback.expert_sites import find_expert_sites

_ADAPTER_NAMES: Final = re.compile(r"^lora_|^ia3_|^vera_")  # peft's containers, in which the adapters' modules lie
_NOT_A_PART: Final = re.compile(r"(Layer|Block|Model|Stack|Encoder|Decoder|ForCausalLM|ForConditionalGeneration)$")
_CLASSES: Final = (
    ("norms", re.compile(r"Norm")),
    ("attention", re.compile(r"Rotary|RoPE", re.IGNORECASE)),
    ("embeddings", re.compile(r"Embedding")),
    ("mixers", re.compile(r"Mamba|Mixer|DeltaNet|DeltaAttention|LinearAttention|Recurrent|ShortConv|SSM|RWKV|Conv1d")),
    ("experts", re.compile(r"Experts")),
    ("router", re.compile(r"Router|TopK|MoEGate|MoeGate|TopkGate")),
    ("attention", re.compile(r"Attention|^MLA|MultiheadAttn")),
    ("mlp", re.compile(r"MLP|Mlp|FeedForward|FFN")),
)
_NAMES: Final = {
    "self_attn": "attention",
    "attn": "attention",
    "attention": "attention",
    "self_attention": "attention",
    "mamba": "mixers",
    "linear_attn": "mixers",
    "mlp": "mlp",
    "feed_forward": "mlp",
    "ffn": "mlp",
    "fc1": "mlp",
    "fc2": "mlp",
    "shared_expert": "mlp",
    "shared_experts": "mlp",
}
_ROUTER_NAMES: Final = ("gate", "router")


def layer_types(model: nn.Module) -> dict[nn.Module, str]:
    """The modules that begin a part of the model, and which: a module that is absent belongs to what it lies in.

    ``"adapter_merge"`` is peft's merging of LoRA into a stack of experts; ``"other"`` the frame of the model around its
    layers and of a layer around its parts. Of the module with the output head, what is left is the loss.
    """
    modules = dict(model.named_modules())
    experts = {id(modules[part]) for site in find_expert_sites(model) for part in site.parameter_modules}
    found: dict[nn.Module, str] = {}
    for name, module in modules.items():
        kind = "experts" if id(module) in experts else _layer_type(name, module, modules)
        if kind is None and _is_frame(name, modules, found):
            kind = "other"
        if kind is not None:
            found[module] = kind
    for owner, head in _heads(modules):
        found[head] = "head_and_loss"
        found[owner] = "head_and_loss"
        for child in owner.children():
            if child is not head:
                found.setdefault(child, "other")
    return found


def _is_frame(name: str, modules: dict[str, nn.Module], found: dict[nn.Module, str]) -> bool:
    """One of the model's layers, which is in no part of another."""
    parents = name.split(".")[:-1]
    if not isinstance(modules.get(".".join(parents)), nn.ModuleList):
        return False
    around = (modules.get(".".join(parents[:depth])) for depth in range(1, len(parents)))
    return all(found.get(each, "other") == "other" for each in around if each is not None)


def _layer_type(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> str | None:
    parents, _, last = name.rpartition(".")
    if any(_ADAPTER_NAMES.match(part) for part in name.split(".")):
        return "adapters"
    class_name = type(module).__name__
    if type(module).__module__.startswith("peft."):
        return "adapter_merge" if class_name == "ParamWrapper" else None
    if isinstance(module, nn.Embedding):
        return "embeddings"
    parent = modules.get(parents)
    if isinstance(getattr(module, "experts", None), nn.Module):
        return "router"  # the block around router and experts: choosing, sending and gathering
    if last in _ROUTER_NAMES and isinstance(getattr(parent, "experts", None), nn.Module):
        return "router"
    if ".experts." in f".{parents}." or last == "experts":
        return "experts"  # one module for each expert
    if not _NOT_A_PART.search(class_name):
        for kind, pattern in _CLASSES:
            if pattern.search(class_name):
                return kind
    return _NAMES.get(last)


def _heads(modules: dict[str, nn.Module]) -> list[tuple[nn.Module, nn.Module]]:
    """(module that computes the loss, its output head)."""
    heads = []
    for module in modules.values():
        get_head = getattr(type(module), "get_output_embeddings", None)
        if get_head is None:
            continue
        head = module.get_output_embeddings()  # type: ignore[operator]
        if isinstance(head, nn.Module) and head in set(module.children()):
            heads.append((module, head))
    return heads
