"""Tokens routed to each expert of each layer, from the indices that the experts modules are really given.

transformers calls ``experts(hidden_states, top_k_index, top_k_weights)`` in nearly every MoE family; a pre-hook on
those modules sees the choice made, whatever the router returns (with a score bias the top-k of its logits is not the
choice). Inside the forward the index tensor is only kept; all layers are counted together, and those of several small
forwards with them: one concatenation, one scatter, no wait for the device.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from ftcost_callback.forward_window import TrainingForward, no_op_hook, no_op_reduction
from ftcost_callback.records import ExpertLoad, ExpertStatus

_INDEX_ARGUMENTS: Final = ("top_k_index", "router_indices")
_ROUTER_ATTRIBUTES: Final = ("gate", "router")
_COUNT_ATTRIBUTES: Final = ("num_experts", "total_experts")  # LongCat's experts: the real ones and those that do nothing
_NUM_EXPERTS_FIELDS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_CLASS: Final = re.compile(r"Experts|Router|MoE|Moe(?=[A-Z]|$)|SparseMLP|Top[12k]")
# Families whose experts run, but not as their indices say (NllbMoeExperts encodes an already encoded mask).
_UNSUPPORTED_CLASSES: Final = ("NllbMoeExperts",)
_MAX_PENDING_BYTES: Final = 16 * 2**20  # kept inside one forward
# Kept across forwards: where batches are small, steps are short, and counting some at once costs a fraction.
_MAX_HELD_BYTES: Final = 2 * 2**20
_MAX_HELD_FORWARDS: Final = 64

# The counter whose window is open, for the operator below: a compiled graph cannot carry a Python object.
_open_counter: ExpertLoadCounter | None = None


@torch.library.custom_op("ftcost::tap", mutates_args=())
def _tap(index: Tensor) -> Tensor:
    """Identity on the expert indices whose body runs inside a compiled graph, also in its recomputation."""
    counter = _open_counter
    if counter is not None:
        counter.guard(lambda: counter.seen(index, is_compiled=True))
    return index.clone()


@_tap.register_fake
def _(index: Tensor) -> Tensor:
    return torch.empty_like(index)


@dataclass(frozen=True, slots=True)
class ExpertSite:
    """One experts module. ``argument`` stands at ``position`` (without self) of its class's ``forward``."""

    layer_name: str
    module: nn.Module
    argument: str
    position: int
    num_experts: int


class ExpertsHook:
    """Forward pre-hook of an experts module. A copy of the model carries a no-op in its place."""

    def __init__(self, counter: ExpertLoadCounter, argument: str, position: int) -> None:
        self._counter = counter
        self._argument = argument
        self._position = position

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            if self._argument in kwargs:
                return args, {**kwargs, self._argument: _tap(kwargs[self._argument])}
            before, after = args[: self._position], args[self._position + 1 :]
            return (*before, _tap(args[self._position]), *after), kwargs
        if self._counter.is_open:
            self._counter.guard(lambda: self._counter.seen(self._index(args, kwargs)))
        return None

    def _index(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        index: Tensor = kwargs[self._argument] if self._argument in kwargs else args[self._position]
        return index

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return no_op_hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return no_op_reduction()


def find_expert_sites(model: nn.Module) -> list[ExpertSite]:
    """Every module whose class's ``forward`` takes the chosen experts, in the order of the model's modules."""
    modules = dict(model.named_modules())
    sites = []
    for name, module in modules.items():
        if type(module).__name__ in _UNSUPPORTED_CLASSES:
            continue
        parameters = list(inspect.signature(type(module).forward).parameters)[1:]
        argument = next((each for each in _INDEX_ARGUMENTS if each in parameters), None)
        if argument is None:
            continue
        num_experts = _num_experts(modules, name, module)
        if num_experts is not None:
            sites.append(ExpertSite(name, module, argument, parameters.index(argument), num_experts))
    return sites


def _num_experts(modules: dict[str, nn.Module], name: str, module: nn.Module) -> int | None:
    """From the live modules: the router's rows (under expert parallelism the experts module holds a share only)."""
    own = (getattr(module, attribute, None) for attribute in _COUNT_ATTRIBUTES)
    counts = [count for count in own if isinstance(count, int)]
    parent_name = name.rpartition(".")[0]
    while parent_name and type(modules[parent_name]).__module__.startswith("peft."):
        parent_name = parent_name.rpartition(".")[0]
    parent = modules.get(parent_name)
    for attribute in _ROUTER_ATTRIBUTES:
        weight = getattr(getattr(parent, attribute, None), "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            counts.append(weight.shape[0])
    return max(counts, default=None)


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


def _int(config: Any, field: str) -> int | None:
    value = getattr(config, field, None)
    return value if isinstance(value, int) else None


class ExpertLoadCounter:
    """Counts between two calls of :meth:`take`. Padding, evaluation and recomputation stay outside.

    ``attach`` sets the hooks; ``open_forward`` and ``close_forward`` belong to the forward window of the same model.
    ``guard`` calls what runs inside the user's forward, and must not raise.
    """

    def __init__(self, guard: Callable[[Callable[[], None]], Any] = lambda function: function()) -> None:
        self.guard = guard
        self._sites: list[ExpertSite] = []
        self._handles: list[Any] = []
        # (num_layers, 1 + most experts + 1): indices below 0, the experts, indices above them
        self._counts: Tensor | None = None
        self._ones: Tensor | None = None  # (1, experts per token)
        self._held: list[tuple[list[Tensor], Tensor | None]] = []  # whole forwards: each layer's indices, real tokens
        self._held_bytes = 0
        self._pending: list[Tensor] = []
        self._pending_bytes = 0
        self._may_hold = True
        self._are_alike = True  # the indices of the open forward have one shape
        self._held_kind: tuple[int, bool] | None = None
        self._num_seen = 0  # experts calls of the open forward
        self._real: Tensor | None = None
        self._num_expert_columns = 0
        self._num_experts_per_tok: int | None = None
        self._num_forwards = 0
        self._num_complete = 0
        self._odd_shape: str | None = None
        self._unsupported: str | None = None
        self.is_open = False

    @property
    def is_moe(self) -> bool:
        """False for a dense model: no hooks, no rows."""
        return bool(self._sites) or self._unsupported is not None

    @property
    def layer_names(self) -> list[str]:
        return [site.layer_name for site in self._sites]

    @property
    def num_hooks(self) -> int:
        return len(self._handles)

    def attach(self, model: nn.Module) -> None:
        self.detach()
        self._counts = self._ones = None
        self._held, self._held_bytes = [], 0
        self._unsupported = None
        self._reset()
        self._sites = find_expert_sites(model)
        if not self._sites:
            self._unsupported = moe_class_name(model)
            return
        self._num_expert_columns = max(site.num_experts for site in self._sites)
        self._handles = [
            site.module.register_forward_pre_hook(ExpertsHook(self, site.argument, site.position), with_kwargs=True)
            for site in self._sites
        ]

    def detach(self) -> None:
        self.close_window()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def open_forward(self, forward: TrainingForward) -> None:
        global _open_counter
        if not self._handles:
            return
        self._real, self._may_hold, self._are_alike = forward.real_tokens, True, True
        self._pending, self._pending_bytes, self._num_seen = [], 0, 0
        self.is_open = True
        _open_counter = self

    def seen(self, index: Tensor, *, is_compiled: bool = False) -> None:
        """An experts module was given ``index``, (tokens, experts per token).

        ``is_compiled``: the memory of a compiled graph, which its next call may write over.
        """
        if index.dim() != 2:
            index = index.reshape(-1, index.shape[-1])
        if self._pending and index.shape != self._pending[0].shape:
            self._are_alike = False
        self._pending.append(index)
        self._pending_bytes += index.numel() * 8
        self._may_hold &= not is_compiled
        if self._pending_bytes > _MAX_PENDING_BYTES:
            self._count_pending()

    def close_window(self) -> None:
        """Close without counting (the forward was broken off, or the hooks go)."""
        global _open_counter
        self.is_open = False
        self._pending, self._pending_bytes, self._real = [], 0, None
        if _open_counter is self:
            _open_counter = None

    def close_forward(self) -> None:
        """Count the forward that ends. Indices carry no gradient, so this is no part of the user's graph."""
        if not self.is_open:
            return
        try:
            if self._can_be_held():
                self._num_seen = len(self._pending)
                self._hold(self._pending)
            else:
                self._count_pending()
            self._num_forwards += 1
            self._num_complete += self._num_seen == len(self._sites)
        finally:
            self.close_window()

    def _can_be_held(self) -> bool:
        """The whole forward is here, small, and no view that keeps a larger tensor alive."""
        indices = self._pending
        return (
            len(indices) == len(self._sites)
            and self._may_hold
            and self._are_alike
            and self._pending_bytes <= _MAX_HELD_BYTES
            and indices[0].untyped_storage().nbytes() <= 2 * indices[0].nbytes
        )

    def _hold(self, indices: list[Tensor]) -> None:
        """Keep a whole forward, to be counted together with others like it."""
        real, top_k = self._fitting_real(indices[0]), indices[0].shape[1]
        kind = (top_k, real is None)
        if kind != self._held_kind:
            self._count_held()
            self._held_kind = kind
        self._held.append((indices, real))
        self._held_bytes += self._pending_bytes
        if self._held_bytes > _MAX_HELD_BYTES or len(self._held) >= _MAX_HELD_FORWARDS:
            self._count_held()

    def _count_held(self) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        if held:
            self._count(0, [indices for indices, _ in held], [real for _, real in held])

    def _count_pending(self) -> None:
        indices, first = self._pending, self._num_seen
        self._pending, self._pending_bytes = [], 0
        self._num_seen += len(indices)
        if not indices or self._num_seen > len(self._sites):
            return  # more calls than modules: the order no longer tells the layer; close_forward sees the mismatch
        if self._are_alike:
            self._count(first, [indices], [self._fitting_real(indices[0])])
        else:
            for offset, index in enumerate(indices):
                self._count(first + offset, [[index]], [self._fitting_real(index)])

    def _fitting_real(self, index: Tensor) -> Tensor | None:
        """Which of the tokens that chose are real; ``None``: all, or nobody can say."""
        real, num_tokens = self._real, index.shape[0]
        if real is None or real.numel() == num_tokens:
            return real
        self._odd_shape = (
            f"the experts were given {num_tokens} rows for a batch of {real.numel()} positions, so padding is counted"
        )
        return None

    def _count(self, first: int, forwards: list[list[Tensor]], reals: list[Tensor | None]) -> None:
        """Add what each of ``forwards`` gave to its layers, (tokens, experts per token) each, to the rows from ``first``
        on. Padding counts nothing; ``reals`` are all given or all ``None``.

        Few operators, whatever the number of layers and forwards: each costs the training thread some microseconds.
        """
        layers = list(zip(*forwards, strict=True))
        num_layers, num_experts, top_k = len(layers), self._num_expert_columns, forwards[0][0].shape[1]
        index = torch.cat([index for layer in layers for index in layer])  # layer by layer
        if index.dtype != torch.long:
            index = index.long()
        if self._counts is None:
            self._counts = torch.zeros(len(self._sites), num_experts + 2, dtype=torch.long, device=index.device)
        if self._ones is None or top_k != self._num_experts_per_tok:
            self._num_experts_per_tok = top_k
            self._ones = torch.ones(1, top_k, dtype=torch.long, device=index.device)
        # An index without an expert, scattered as it is, would write elsewhere or end a CUDA process.
        column = index.add_(1).clamp_(0, num_experts + 1).view(num_layers, -1)
        weights = self._ones[:, :1]
        if known := [real.reshape(-1) for real in reals if real is not None]:
            real = known[0] if len(known) == 1 else torch.cat(known)
            weights = (real.view(-1, 1) * self._ones).view(1, -1)
        rows = self._counts if num_layers == len(self._sites) else self._counts[first : first + num_layers]
        rows.scatter_add_(1, column, weights.expand_as(column))

    def take(self, global_step: int, *, num_non_padding_tokens: int | None = None) -> ExpertLoad | None:
        """The load since the last call; reads the device. ``None``: dense model, or no training forward since then.

        ``num_non_padding_tokens``: counted independently over the same forwards, to check the sums against.
        """
        if self._unsupported is not None:
            return self._not_recorded(
                global_step,
                f"{self._unsupported} does not show which experts it chose ({' or '.join(_INDEX_ARGUMENTS)})",
            )
        if not self._sites:
            return None
        if self._num_forwards == 0:
            return None
        self._count_held()
        if self._counts is None or self._num_complete == 0:
            reason = (
                f"{self._num_forwards} training forwards, and no complete pass over the {len(self._sites)} experts "
                f"modules ({type(self._sites[0].module).__name__}) was seen: compiled before the callback attached, "
                "a CUDA graph, or a replaced kernel"
            )
            self._reset()
            return self._not_recorded(global_step, reason)
        counts: list[list[int]] = self._counts.tolist()
        tokens = [row[1 : 1 + site.num_experts] for row, site in zip(counts, self._sites, strict=True)]
        num_without_expert = sum(sum(row) - sum(of_experts) for row, of_experts in zip(counts, tokens, strict=True))
        status, doubt = self._judgement(tokens, num_without_expert, num_non_padding_tokens)
        self._reset()
        return ExpertLoad(
            global_step=global_step,
            layer_names=self.layer_names,
            tokens_per_expert=tokens,
            num_experts_per_tok=self._num_experts_per_tok,
            status=status,
            reason=doubt,
        )

    def _judgement(
        self, tokens: list[list[int]], num_without_expert: int, num_non_padding_tokens: int | None
    ) -> tuple[ExpertStatus, str | None]:
        if self._num_complete < self._num_forwards:
            missed = self._num_forwards - self._num_complete
            return (
                "partial",
                f"{missed} of {self._num_forwards} training forwards did not call every experts module once",
            )
        if self._odd_shape is not None:
            return "partial", self._odd_shape
        if num_without_expert:
            return "partial", f"{num_without_expert} choices name no expert of the model and are left out"
        if num_non_padding_tokens is not None and self._num_experts_per_tok is not None:
            expected = num_non_padding_tokens * self._num_experts_per_tok
            wrong = [site.layer_name for site, row in zip(self._sites, tokens, strict=True) if sum(row) != expected]
            if wrong:
                return (
                    "partial",
                    f"{len(wrong)} layers do not sum to tokens x top-k = {expected}, the first is {wrong[0]}",
                )
        return "recorded", None

    def _not_recorded(self, global_step: int, reason: str) -> ExpertLoad:
        return ExpertLoad(global_step=global_step, status="not_recorded", reason=reason)

    def _reset(self) -> None:
        if self._counts is not None:
            self._counts.zero_()
        self._num_forwards = self._num_complete = 0
        self._odd_shape = None
