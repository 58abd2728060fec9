"""What a mixer or a feed-forward is made from: the fields of a config, and the parts that it gives.

A builder is a function of (fields, layer index); ``mixers`` and ``feed_forwards`` hold functions that make builders from the
settings that a family fixes, ``layers`` joins two of them, and ``families`` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from costmodel.errors import CostModelError, shown
from costmodel.model_spec import NO_ATTENTION, Attention, Experts, Linear, Norm, Scan, Weights


class Fields:
    """A config by the names of the Llama config, whatever its family calls them; class defaults fill what it leaves out."""

    __slots__ = ("_aliases", "_config", "_defaults", "model_type")

    def __init__(self, config: Mapping[str, Any], aliases: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
        self._config, self._aliases, self._defaults = config, aliases, defaults
        self.model_type = str(config.get("model_type"))

    def get(self, name: str) -> Any:
        for key in (self._aliases.get(name, name), name, *_SYNONYMS.get(name, ())):
            value: Any = self._config
            for part in key.split("."):  # "ffn_config.moe_top_k" is a field of a nested mapping
                value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
            if value is not _ABSENT:
                return value
        return self._defaults.get(name)

    def size(self, name: str) -> int:
        """A positive whole number. Raises :class:`CostModelError` where it is missing or something else."""
        value = self.optional_size(name)
        if value is None:
            raise CostModelError(f"the {self.model_type} config lacks {self._key(name)}, which fixes the model's size")
        return value

    def optional_size(self, name: str) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CostModelError(f"the model config's {self._key(name)} must be a positive whole number, got {shown(value)}")
        return value

    def count(self, name: str) -> int:
        """A whole number of things of which there may be none."""
        value = self.get(name)
        return 0 if not value else self.size(name)

    def flag(self, name: str) -> bool:
        return bool(self.get(name))

    def entry(self, name: str, layer: int) -> Any:
        """A field that holds one value (text or a number), or a list with one for each layer."""
        value = self.get(name)
        if isinstance(value, Sequence) and not isinstance(value, str):
            if layer >= len(value):
                raise CostModelError(
                    f"the model config's {self._key(name)} names {len(value)} layers of "
                    f"{self.size('num_hidden_layers')}; give one entry for each layer"
                )
            value = value[layer]
        if isinstance(value, (Mapping, list, tuple)):
            raise CostModelError(f"the model config's {self._key(name)} must hold one value a layer, got {shown(value)}")
        return value

    def without(self, name: str) -> Fields:
        """The same config without one field, for a family whose code does not read it."""
        config = {key: value for key, value in self._config.items() if key != name}
        return Fields(config, self._aliases, self._defaults)

    def _key(self, name: str) -> str:
        return self._aliases.get(name, name)

    @property
    def hidden_size(self) -> int:
        return self.size("hidden_size")


_ABSENT: Final = object()
_SYNONYMS: Final = {"num_experts": ("num_local_experts", "n_routed_experts")}  # the attribute maps of the config classes

Flag = bool | str
"""True, False, or the name of the config field that says so."""


def is_set(fields: Fields, flag: Flag) -> bool:
    return fields.flag(flag) if isinstance(flag, str) else flag


@dataclass(frozen=True, slots=True)
class Block:
    """A mixer or a feed-forward: its parts, to be joined into a layer."""

    linears: tuple[Linear, ...] = ()
    norms: tuple[Norm, ...] = ()
    weights: tuple[Weights, ...] = ()
    attention: Attention = NO_ATTENTION
    scan: Scan | None = None
    experts: Experts | None = None
    is_gated: bool = True
    last_linear: str = ""  # with which the block ends


Builder = Callable[[Fields, int], Block]


LAYER_KINDS: Final = {"mamba": "linear_attention", "attention": "full_attention"}  # older names for the same

Condition = Callable[[Fields, int], bool]
"""Of (fields, layer index): whether the layer is of a kind."""


def is_full_attention(*, interval: str = "", default_interval: int = 0) -> Condition:
    """Whether ``layer_types`` calls the layer full attention; without them every ``interval``-th layer is, or none."""

    def test(fields: Fields, layer: int) -> bool:
        named = fields.entry("layer_types", layer)
        if named is not None:
            return bool(LAYER_KINDS.get(named, named) == "full_attention")
        step = (fields.get(interval) if interval else None) or default_interval
        return bool(step) and (layer + 1) % step == 0

    return test


def where(condition: Condition, then: Builder, otherwise: Builder) -> Builder:
    """``then`` in the layers where ``condition`` holds, ``otherwise`` in the rest."""
    return lambda fields, layer: (then if condition(fields, layer) else otherwise)(fields, layer)
