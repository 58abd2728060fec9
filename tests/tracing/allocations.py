"""Every allocation of a training step, and what it was for: a dispatch mode over real or fake tensors.

The log holds births and deaths of storages in order. It is read once the step is over, when it is known which tensors of
the forward lived on for the backward. Byte-equal to the CPU's own allocations (``test_traced_steps.py``).
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

CATEGORIES = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "temporary")

_IN_PLACE_OTHERWISE = frozenset({"add", "index_put", "scatter", "scatter_add", "index_add"})


def _grouped_product_flops(a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    """Rows of all groups times the width in and out; a weight gradient (both matrices flat) costs as much."""
    rows, inner = a.shape[-2:] if a.dim() == 2 and b.dim() == 3 else (a.shape[-2], a.shape[-1])
    return int(2 * rows * inner * b.shape[-1])


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest sum of living storages inside one window of the step, and what they were."""

    total_bytes: int
    by_category: dict[str, int]
    operator: str


@dataclass(slots=True)
class _Storage:
    nbytes: int
    category: str | None  # None: decided when the log is read
    born_in: str
    is_logits: bool


@dataclass(slots=True)
class _Event:
    kind: str  # birth | death | gradient | window | forward_ends (or a recompute)
    storage: int
    window: str
    operator: str


@dataclass
class AllocationLog(TorchDispatchMode):
    """Records while it is entered. ``logit_elements``: size of a tensor that holds a logit for each position and word.

    While a dispatch mode is active autograd does out of place what it otherwise does in place: it adds up gradients that
    meet in one tensor (input_buffer.cpp of torch), and for fake tensors it scatters them (FunctionsManual.cpp,
    ``areAnyTensorSubclassLike``). The result of such an operator is booked when the next one starts, and so takes the
    place of an operand that died meanwhile.
    """

    logit_elements: int = -1
    flops: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()
        self.window = self._last_pass = ""
        self._storages: list[_Storage] = []
        self._alive: dict[int, tuple[int, Any]] = {}  # address -> number, weak reference
        self._events: list[_Event] = []
        self._waiting: list[_Event] = []

    def add_static(self, tensor: torch.Tensor, category: str) -> None:
        """A tensor that was there before the step."""
        self._note(tensor, category, "", "static")

    def enter(self, window: str) -> None:
        """What comes from now on belongs to ``window``; so does what is there now."""
        self._flush()
        self.window = window
        self._events.append(_Event("window", -1, window, ""))

    def static_bytes(self) -> dict[str, int]:
        """Bytes that were there before the step, by category."""
        found: Counter[str] = Counter()
        for each in self._storages:
            if each.category is not None:
                found[each.category] += each.nbytes
        return dict(found)

    def mark_gradient(self, tensor: torch.Tensor) -> None:
        known = self._alive.get(tensor.untyped_storage()._cdata)
        if known is not None:
            self._flush()
            self._events.append(_Event("gradient", known[0], self.window, ""))

    def mark_end_of_forward(self) -> None:
        self._flush()
        self._events.append(_Event("forward_ends", -1, self.window, ""))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._flush()
        in_backward = torch._C._current_graph_task_id() != -1
        pass_ = self.window if self.window in {"optimizer", "evaluation"} else "forward"
        if in_backward:
            pass_ = "recompute" if torch.is_grad_enabled() else "backward"
        packet = func._overloadpacket
        if packet is not torch.ops.aten.detach:  # checkpointing detaches what it saves, without gradients
            if self._last_pass == "recompute" and pass_ != "recompute":
                self.mark_end_of_forward()
            self._last_pass = pass_
        result = func(*args, **(kwargs or {}))
        self.operators[pass_] += 1
        if packet in flop_registry:
            self.flops[pass_] += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        elif packet is torch.ops.aten._grouped_mm:
            self.flops[pass_] += _grouped_product_flops(*args, **(kwargs or {}))
        waits = pass_ == "backward" and packet.__name__ in _IN_PLACE_OTHERWISE
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, None, packet.__name__, pass_, waits=waits)
        return result

    def _note(self, tensor: torch.Tensor, category: str | None, operator: str, born_in: str, *, waits: bool = False) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._alive or not storage.nbytes():
            return
        number = len(self._storages)
        is_logits = tensor.numel() == self.logit_elements
        self._storages.append(_Storage(storage.nbytes(), category, born_in, is_logits))
        self._alive[address] = (number, weakref.ref(storage, lambda _: self._die(address, number)))
        event = _Event("birth", number, self.window, operator)
        (self._waiting if waits else self._events).append(event)

    def _die(self, address: int, number: int) -> None:
        if self._alive.get(address, (None,))[0] == number:
            del self._alive[address]
        if self._waiting and self._waiting[0].storage == number:
            self._flush()
        self._events.append(_Event("death", number, self.window, ""))

    def _flush(self) -> None:
        if self._waiting:
            self._events += self._waiting
            self._waiting = []

    def peaks(self) -> dict[str, Peak]:
        """The peak of each window."""
        self._flush()
        categories = self._categories()
        held = dict.fromkeys(CATEGORIES, 0)
        total, peaks = 0, {}
        for event in self._events:
            if event.kind == "forward_ends":
                continue
            if event.kind == "window":
                if event.window and total > peaks.get(event.window, Peak(-1, {}, "")).total_bytes:
                    peaks[event.window] = Peak(total, dict(held), "")
                continue
            size, category = self._storages[event.storage].nbytes, categories[event.storage]
            if event.kind == "gradient":
                held[category] -= size
                categories[event.storage] = "gradients"
                held["gradients"] += size
                continue
            sign = 1 if event.kind == "birth" else -1
            held[category] += sign * size
            total += sign * size
            if event.kind == "birth" and event.window and total > peaks.get(event.window, Peak(0, {}, "")).total_bytes:
                peaks[event.window] = Peak(total, dict(held), event.operator)
        return peaks

    def _categories(self) -> list[str]:
        alive: set[int] = set()
        survivors: set[int] = set()
        for event in self._events:
            if event.kind == "birth":
                alive.add(event.storage)
            elif event.kind == "death":
                alive.discard(event.storage)
            elif event.kind == "forward_ends":
                survivors |= alive
        return [self._category(number, storage, survivors) for number, storage in enumerate(self._storages)]

    def _category(self, number: int, storage: _Storage, survivors: set[int]) -> str:
        if storage.category is not None:
            return storage.category
        if storage.born_in in {"forward", "recompute"} and number in survivors:
            return "logits" if storage.is_logits else "activations"
        return "temporary"
