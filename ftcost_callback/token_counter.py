"""Computed, non-padding and supervised tokens of each micro-batch: counted on the device, read when a row is written.

Nothing here waits for a device: shapes are known on the host, and what depends on values (the mask, the labels) stays
a tensor until :meth:`PendingTokens.read`.
"""

from __future__ import annotations

from typing import Any, Final, Literal

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
        read = dict(zip(self._names, (int(value) for value in self._values.tolist()), strict=True))
        return TokenCounts(
            num_tokens=self._on_host.num_tokens,
            num_non_padding_tokens=read.get("num_non_padding_tokens", self._on_host.num_non_padding_tokens),
            num_supervised_tokens=read.get("num_supervised_tokens", self._on_host.num_supervised_tokens),
            num_samples=read.get("num_samples", self._on_host.num_samples),
            longest_sequence_tokens=read.get("longest_sequence_tokens", self._on_host.longest_sequence_tokens),
            sum_squared_sequence_tokens=float(read["sum_squared_sequence_tokens"])
            if "sum_squared_sequence_tokens" in read
            else self._on_host.sum_squared_sequence_tokens,
        )


class _MicroBatch:
    """Counts of one forward: an int (known on the host), a 0-dim tensor (on the device), or ``None`` (not shown)."""

    __slots__ = ("longest", "non_padding", "samples", "squares", "supervised", "tokens")

    def __init__(self, forward: TrainingForward, rule: LabelRule) -> None:
        self.tokens: int | None = None
        self.non_padding: int | Tensor | None = None
        self.longest: int | Tensor | None = None
        self.squares: int | Tensor | None = None
        self.samples: int | Tensor | None = None
        self.supervised: int | Tensor | None = _supervised(forward, rule)
        if forward.batch_shape is None:
            self.samples = _rows_of_any_tensor(forward)
            self.supervised = None
            return
        rows, length = forward.batch_shape
        self.tokens = self.non_padding = rows * length
        self.samples, self.longest, self.squares = rows, length, rows * length * length
        if (real := forward.real_tokens) is not None:
            self.non_padding = real.sum()
        positions, starts = forward.packed_positions, forward.sequence_starts
        if positions is not None and starts is not None and real is not None:
            self.samples = starts.sum()
            self.longest = positions.max() + 1
            # Within a sequence of L tokens the positions p = 0 .. L-1 give sum(2p + 1) = L^2.
            self.squares = torch.where(real, 2 * positions + 1, 0).sum()


def _supervised(forward: TrainingForward, rule: LabelRule) -> Tensor | None:
    """Positions that enter the loss."""
    shifted = forward.tensor("shift_labels")
    if shifted is not None:
        return (shifted != IGNORED_LABEL).sum()
    labels = forward.tensor("labels")
    if labels is None or labels.dim() != 2 or labels.is_floating_point():
        return None
    if rule == "shifted":
        labels = labels[:, 1:]
    return (labels != IGNORED_LABEL).sum()


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
        self._micro_batches: list[_MicroBatch] = []
        self._num_items: Any = None
        self.saw_tokens = False
        self.saw_forward = False

    def open_forward(self, forward: TrainingForward) -> None:
        """Count one training forward. Called under ``no_grad``."""
        self.saw_forward = True
        self.saw_tokens = self.saw_tokens or forward.batch_shape is not None
        self._micro_batches.append(_MicroBatch(forward, self._rule))
        if self._use_num_items_in_batch:
            self._num_items = forward.arguments.get("num_items_in_batch", self._num_items)

    def drop(self) -> None:
        """Forget what was counted since the last step (a step that was broken off)."""
        self._micro_batches, self._num_items = [], None

    def take_step(self) -> PendingTokens:
        """The counts since the last call."""
        batches, num_items = self._micro_batches, self._num_items
        self.drop()
        if not batches:
            return PendingTokens(TokenCounts())
        supervised: list[Any] = [batch.supervised for batch in batches]
        if any(each is None for each in supervised) and num_items is not None:
            supervised = [num_items]  # of the whole optimizer step, given again with each micro-batch
        parts: dict[str, list[Any]] = {
            "num_tokens": [batch.tokens for batch in batches],
            "num_non_padding_tokens": [batch.non_padding for batch in batches],
            "num_supervised_tokens": supervised,
            "num_samples": [batch.samples for batch in batches],
            "longest_sequence_tokens": [batch.longest for batch in batches],
            "sum_squared_sequence_tokens": [batch.squares for batch in batches],
        }
        on_host: dict[str, Any] = {}
        on_device: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, values in parts.items():
                if any(value is None for value in values):
                    continue
                if any(isinstance(value, Tensor) for value in values):
                    on_device[name] = _combined_on_device(values, largest=name == "longest_sequence_tokens")
                else:
                    on_host[name] = max(values) if name == "longest_sequence_tokens" else sum(values)
            stacked = torch.stack(list(on_device.values())) if on_device else None
        return PendingTokens(TokenCounts(**on_host), tuple(on_device), stacked)


def _combined_on_device(values: list[Any], *, largest: bool) -> Tensor:
    """Sum (or maximum) of numbers and one-element tensors of one device, as a 0-dim int64 tensor."""
    tensors = [_whole_number(value) for value in values if isinstance(value, Tensor)]
    numbers = [int(value) for value in values if not isinstance(value, Tensor)]
    combined = tensors[0]
    for tensor in tensors[1:]:
        combined = torch.maximum(combined, tensor) if largest else combined + tensor
    if not numbers:
        return combined
    return combined.clamp(min=max(numbers)) if largest else combined + sum(numbers)


def _whole_number(value: Tensor) -> Tensor:
    # The Trainer's count comes as a float, and repeated for each replica.
    return value if value.dim() == 0 and value.dtype == torch.long else value.detach().reshape(-1)[0].long()
