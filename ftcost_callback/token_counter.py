"""Computed, non-padding and supervised tokens of each micro-batch: counted on the device, read when a row is written.

Nothing here waits for a device: shapes are known on the host, and what depends on values (the mask, the labels) stays
a tensor until :meth:`PendingTokens.read`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from ftcost_callback.forward_window import TrainingForward
from ftcost_callback.records import TokenCounts

IGNORED_LABEL: Final = -100

LabelRule = Literal["shifted", "as_is"]

# Models whose loss compares position i with label i; every other decoder compares position i with label i + 1.
_UNSHIFTED_HEADS: Final = ("ForMaskedLM", "ForTokenClassification")


def label_rule(model: Any) -> LabelRule:
    """Whether this model's loss shifts its labels by one position."""
    names = {type(each).__name__ for each in (model, _base_model(model))}
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) or any(name.endswith(_UNSHIFTED_HEADS) for name in names):
        return "as_is"
    return "shifted"


def _base_model(model: Any) -> Any:
    """The transformers model under a PEFT wrapper."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


_Count: TypeAlias = "int | Tensor | None"


def _larger(first: Any, second: Any) -> Any:
    if isinstance(first, Tensor):
        return first.clamp(min=second) if isinstance(second, int) else torch.maximum(first, second)
    return _larger(second, first) if isinstance(second, Tensor) else max(first, second)


# How the counts of two micro-batches become that of both.
_COUNTS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "num_tokens": operator.add,
    "num_non_padding_tokens": operator.add,
    "num_supervised_tokens": operator.add,
    "num_samples": operator.add,
    "longest_sequence_tokens": _larger,
    "sum_squared_sequence_tokens": operator.add,
}


class PendingTokens:
    """The counts of one optimizer step. On a GPU they are on their way to the host.

    ``on_device``: int64 values by name, in a tensor on the batch's device. ``on_host``: what needs no device.
    """

    def __init__(self, on_host: TokenCounts, names: tuple[str, ...] = (), on_device: Tensor | None = None) -> None:
        self._on_host = on_host
        self._names = names
        self._values = on_device
        if on_device is not None and on_device.device.type == "cuda":
            pinned = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            self._values = pinned.copy_(on_device, non_blocking=True)

    def read(self) -> TokenCounts:
        """The counts. On a GPU only after an event recorded behind the copy has passed."""
        if self._values is None:
            return self._on_host
        read = zip(self._names, self._values.tolist(), strict=True)
        return dataclasses.replace(self._on_host, **{name: int(value) for name, value in read})


class _MicroBatch:
    """Counts of one forward, or of several together: an int (known on the host), a 0-dim tensor (on the device), or
    ``None`` (not shown)."""

    __slots__ = tuple(_COUNTS)

    def __init__(self, forward: TrainingForward, rule: LabelRule) -> None:
        self.num_tokens: _Count = None
        self.num_non_padding_tokens: _Count = None
        self.num_supervised_tokens: _Count = None
        self.num_samples: _Count = None
        self.longest_sequence_tokens: _Count = None
        self.sum_squared_sequence_tokens: _Count = None
        if forward.batch_shape is None:
            self.num_samples = _rows_of_any_tensor(forward)
            return
        self.num_supervised_tokens = _supervised(forward, rule)
        rows, length = forward.batch_shape
        self.num_tokens = self.num_non_padding_tokens = rows * length
        self.num_samples, self.longest_sequence_tokens = rows, length
        self.sum_squared_sequence_tokens = rows * length * length
        if (mask := forward.padding_mask) is not None:
            self.num_non_padding_tokens = torch.count_nonzero(mask)
            return
        positions, starts, real = forward.packed_positions, forward.sequence_starts, forward.real_tokens
        if positions is not None and starts is not None and real is not None:
            self.num_non_padding_tokens = real.sum()
            self.num_samples = starts.sum()
            self.longest_sequence_tokens = positions.max() + 1
            # Within a sequence of L tokens the positions p = 0 .. L-1 give sum(2p + 1) = L^2.
            self.sum_squared_sequence_tokens = torch.where(real, 2 * positions + 1, 0).sum()

    def add(self, other: _MicroBatch) -> None:
        """Make this the counts of both; a count that one of them does not show is unknown."""
        for name, combine in _COUNTS.items():
            ours, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, None if ours is None or theirs is None else combine(ours, theirs))


def _supervised(forward: TrainingForward, rule: LabelRule) -> Tensor | None:
    """Positions that enter the loss."""
    shifted = forward.tensor("shift_labels")
    if shifted is not None:
        return torch.count_nonzero(shifted != IGNORED_LABEL)
    labels = forward.tensor("labels")
    if labels is None or labels.dim() != 2 or labels.is_floating_point():
        return None
    if rule == "shifted":
        labels = labels[:, 1:]
    return torch.count_nonzero(labels != IGNORED_LABEL)


def _rows_of_any_tensor(forward: TrainingForward) -> int | None:
    for value in forward.arguments.values():
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape[0]
    return None


class TokenCounter:
    """Sums the micro-batches of an optimizer step.

    ``use_num_items_in_batch``: where the labels never reach the model (label smoothing, ``compute_loss_func``), take
    the Trainer's own count of the step; right on one process only, since with several it is summed over all of them.
    """

    def __init__(self, rule: LabelRule, *, use_num_items_in_batch: bool = True) -> None:
        self._rule = rule
        self._use_num_items_in_batch = use_num_items_in_batch
        self._step: _MicroBatch | None = None  # the micro-batches since the last step
        self._num_items: Any = None
        self.saw_forward = False

    def open_forward(self, forward: TrainingForward) -> None:
        """Count one training forward. Only whole numbers are touched, which carry no gradient."""
        self.saw_forward = True
        counts = _MicroBatch(forward, self._rule)
        if self._step is None:
            self._step = counts
        else:
            self._step.add(counts)
        if self._use_num_items_in_batch:
            self._num_items = forward.arguments.get("num_items_in_batch", self._num_items)

    def drop(self) -> None:
        """Forget what was counted since the last step (a step that was broken off)."""
        self._step = self._num_items = None

    def take_step(self) -> PendingTokens:
        """The counts since the last call."""
        step, num_items = self._step, self._num_items
        self.drop()
        if step is None:
            return PendingTokens(TokenCounts())
        if step.num_supervised_tokens is None and num_items is not None:
            # Of the whole optimizer step, given again with each micro-batch.
            step.num_supervised_tokens = _whole_number(num_items)
        on_host: dict[str, Any] = {}
        on_device: dict[str, Tensor] = {}
        for name in _COUNTS:
            value = getattr(step, name)
            if isinstance(value, Tensor):
                on_device[name] = value
            else:
                on_host[name] = value
        stacked = torch.stack(tuple(on_device.values())) if on_device else None
        return PendingTokens(TokenCounts(**on_host), tuple(on_device), stacked)


def _whole_number(value: Any) -> Any:
    """The Trainer's count comes as a number, or as a float tensor, repeated for each replica."""
    return value.detach().reshape(-1)[0].long() if isinstance(value, Tensor) else int(value)
