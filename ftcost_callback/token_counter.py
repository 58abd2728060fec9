"""Computed, non-padding and supervised tokens of each micro-batch: counted on the device, read when a row is written.

Nothing here waits for a device: shapes are known on the host, and what depends on values (the mask, the labels) stays
a tensor until :meth:`PendingTokens.read`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from ftcost_callback.forward_window import TrainingForward
from ftcost_callback.records import TokenCounts

IGNORED_LABEL: Final = -100

LabelRule = Literal["shifted", "as_is", "decoder"]

# Models whose loss compares position i with label i; every other decoder compares position i with label i + 1.
_UNSHIFTED_HEADS: Final = ("ForMaskedLM", "ForTokenClassification")


def label_rule(model: Any) -> LabelRule:
    """Whether this model's loss shifts its labels by one position; or they are what a decoder of its own reads."""
    names = {type(each).__name__ for each in (model, _base_model(model))}
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return "decoder"
    if any(name.endswith(_UNSHIFTED_HEADS) for name in names):
        return "as_is"
    return "shifted"


def _base_model(model: Any) -> Any:
    """The transformers model under a PEFT wrapper."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


class _Trues:
    """As many as values of these tensors are true. Counted when the step ends, on a processor when it is read: some steps
    together, where each costs a fraction of what it would in the middle of its forward.

    ``skips_first``: the first column of (rows, length) does not count.
    """

    __slots__ = ("_skips_first", "tensors")

    def __init__(self, *tensors: Tensor, skips_first: bool = False) -> None:
        self.tensors = tensors
        self._skips_first = skips_first

    @property
    def is_cpu(self) -> bool:
        return self.tensors[0].is_cpu

    @property
    def is_cuda(self) -> bool:
        return self.tensors[0].is_cuda

    def plus(self, other: _Trues) -> _Trues | Tensor:
        if self._skips_first == other._skips_first:
            return _Trues(*self.tensors, *other.tensors, skips_first=self._skips_first)
        return self.count() + other.count()

    def number(self) -> int:
        """Of a processor's memory: few and light calls, since this is done for each step."""
        number = 0
        for each in self.tensors:
            values = each.numpy()
            number += (values[:, 1:] if self._skips_first else values).tobytes().count(1)
        return number

    def count(self) -> Tensor:
        """0-dim, on the device."""
        tensors = [each[:, 1:] for each in self.tensors] if self._skips_first else self.tensors
        if len(tensors) == 1:
            return torch.count_nonzero(tensors[0])
        return torch.stack([torch.count_nonzero(each) for each in tensors]).sum()


_Count: TypeAlias = "int | Tensor | _Trues | None"


def _counted(count: Any) -> Any:
    return count.count() if isinstance(count, _Trues) else count


def _number(count: Any) -> Any:
    """Read from a processor's memory, where it is a tensor."""
    if isinstance(count, _Trues):
        return count.number()
    return count.tolist() if isinstance(count, Tensor) else count  # int() would be one more operator


def _sum(first: Any, second: Any) -> Any:
    if isinstance(first, _Trues) and isinstance(second, _Trues):
        return first.plus(second)
    return _counted(first) + _counted(second)


def _larger(first: Any, second: Any) -> Any:
    if isinstance(first, Tensor):
        return first.clamp(min=second) if isinstance(second, int) else torch.maximum(first, second)
    return _larger(second, first) if isinstance(second, Tensor) else max(first, second)


# How the counts of two micro-batches become that of both.
_COUNTS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "num_tokens": _sum,
    "num_non_padding_tokens": _sum,
    "num_supervised_tokens": _sum,
    "num_samples": _sum,
    "longest_sequence_tokens": _larger,
    "sum_squared_sequence_tokens": _sum,
}


class PendingTokens:
    """The counts of one optimizer step. On a GPU they are on their way to the host.

    ``counts``: numbers, or whole numbers in tensors; ``None``: nothing was seen.
    """

    def __init__(self, counts: _MicroBatch | None = None) -> None:
        self._counts = counts
        self._on_gpu: tuple[str, ...] = ()
        if counts is None:
            return
        supervised, real = counts.num_supervised_tokens, counts.num_non_padding_tokens
        if (supervised is None or isinstance(supervised, int) or supervised.is_cpu) and (
            real is None or isinstance(real, int) or real.is_cpu
        ):
            return  # on the host, and so are the others, which come from the tensors of these
        known: dict[str, Any] = {name: _counted(getattr(counts, name)) for name in _COUNTS}  # may be read much later
        for name, count in known.items():
            setattr(counts, name, count)
        self._on_gpu = tuple([name for name, count in known.items() if isinstance(count, Tensor) and count.is_cuda])
        if self._on_gpu:
            stacked = torch.stack([known[name] for name in self._on_gpu])
            pinned = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            self._copied = pinned.copy_(stacked, non_blocking=True)

    @property
    def why_unknown(self) -> str | None:
        """Why a count is not known, or not all of the work, in words."""
        return self._counts.why_unknown if self._counts is not None else None

    def read(self) -> TokenCounts:
        """The counts. On a GPU only after an event recorded behind the copy has passed."""
        counts = self._counts
        if counts is None:
            return TokenCounts()
        if self._on_gpu:
            for name, value in zip(self._on_gpu, self._copied.tolist(), strict=True):
                setattr(counts, name, value)
            self._on_gpu = ()
        numbers = [count if type(count) is int else _number(count) for count in counts.all]
        return TokenCounts(**dict(zip(_COUNTS, numbers, strict=True)))


class _MicroBatch:
    """Counts of one forward, or of several together: an int (known on the host), a 0-dim tensor (on the device), true
    values that are still to be counted, or ``None`` (not shown)."""

    __slots__ = (*_COUNTS, "why_unknown")

    def __init__(self, forward: TrainingForward, rule: LabelRule) -> None:
        self.num_tokens: _Count = None
        self.num_non_padding_tokens: _Count = None
        self.num_supervised_tokens: _Count = None
        self.num_samples: _Count = None
        self.longest_sequence_tokens: _Count = None
        self.sum_squared_sequence_tokens: _Count = None
        self.why_unknown: str | None = None
        if forward.batch_shape is None:
            self.why_unknown = f"{forward.why_no_shape}, so samples are counted and tokens are not"
            self.num_samples = _rows_of_any_tensor(forward)
            return
        self.num_supervised_tokens = _supervised(forward.arguments, rule)
        rows, length = forward.batch_shape
        self.num_tokens = self.num_non_padding_tokens = rows * length
        self.num_samples, self.longest_sequence_tokens = rows, length
        self.sum_squared_sequence_tokens = rows * length * length
        if forward.padding_mask is not None and (real := forward.real_tokens) is not None:
            self.num_non_padding_tokens = _Trues(real)
        if forward.shows_more_than_text:
            self.why_unknown = (
                "batches hold images or sound: the tokens that stand for them are counted, what the encoders do is not, so "
                "MFU is low by it, and so is the prediction"
            )
        if forward.hides_padding:
            self.num_non_padding_tokens = None
            self.why_unknown = (
                "attention_mask is no mask of (rows, length), which alone says what is padding, so computed tokens are "
                "counted and real ones are not"
            )
        if rule == "decoder":
            self._add_decoder(forward)
        if forward.padding_mask is not None or rule == "decoder":
            return
        positions, starts, real = forward.packed_positions, forward.sequence_starts, forward.real_tokens
        if positions is not None and starts is not None and real is not None:
            self.num_non_padding_tokens = real.sum()
            self.num_samples = starts.sum()
            self.longest_sequence_tokens = positions.max() + 1
            # Within a sequence of L tokens the positions p = 0 .. L-1 give sum(2p + 1) = L^2.
            self.sum_squared_sequence_tokens = torch.where(real, 2 * positions + 1, 0).sum()

    @property
    def all(self) -> tuple[_Count, ...]:
        """In the order of ``_COUNTS``."""
        return (
            self.num_tokens,
            self.num_non_padding_tokens,
            self.num_supervised_tokens,
            self.num_samples,
            self.longest_sequence_tokens,
            self.sum_squared_sequence_tokens,
        )

    def _add_decoder(self, forward: TrainingForward) -> None:
        """What the decoder computes: its own input, or the labels that the model makes it from."""
        labels, given = forward.tensor("labels"), forward.tensor("decoder_input_ids")
        sequence = given if given is not None else labels
        if sequence is None or sequence.dim() != 2:
            self.num_tokens = self.num_non_padding_tokens = self.sum_squared_sequence_tokens = None
            return
        rows, length = sequence.shape
        mask = labels != IGNORED_LABEL if labels is not None else forward.tensor("decoder_attention_mask")
        real = _Trues(mask != 0) if mask is not None else None
        encoder: Any = (self.num_tokens, self.num_non_padding_tokens, self.sum_squared_sequence_tokens)
        self.num_tokens = encoder[0] + rows * length
        self.num_non_padding_tokens = _sum(encoder[1], real) if real is not None and encoder[1] is not None else None
        self.sum_squared_sequence_tokens = encoder[2] + rows * length * length
        self.longest_sequence_tokens = _larger(self.longest_sequence_tokens, length)

    def add(self, other: _MicroBatch) -> None:
        """Make this the counts of both; a count that one of them does not show is unknown."""
        self.why_unknown = self.why_unknown or other.why_unknown
        for name, combine in _COUNTS.items():
            ours, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, None if ours is None or theirs is None else combine(ours, theirs))


def _supervised(arguments: Mapping[str, Any], rule: LabelRule) -> _Trues | None:
    """Positions that enter the loss."""
    shifted = arguments.get("shift_labels")
    if isinstance(shifted, Tensor):
        return _Trues(shifted != IGNORED_LABEL)
    labels = arguments.get("labels")
    return _supervised_by(labels, rule) if isinstance(labels, Tensor) else None


def _supervised_by(labels: Tensor, rule: LabelRule) -> _Trues | None:
    if labels.dim() != 2 or labels.is_floating_point():
        return None
    return _Trues(labels != IGNORED_LABEL, skips_first=rule == "shifted")


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
        self._step: _MicroBatch | None = None  # the micro-batches since the last step, without the latest
        self._latest: _MicroBatch | None = None  # which may still fail
        self._num_items: Any = None
        self._labels: Sequence[Tensor] = ()
        self._is_spoilt = False
        self.saw_forward = False
        self.num_forwards = 0  # since the last step, without those that failed

    def open_forward(self, forward: TrainingForward) -> None:
        """Count one training forward. Only whole numbers are touched, which carry no gradient."""
        self.saw_forward = True
        self.num_forwards += 1
        if self._latest is not None:
            self._add_latest()
        self._latest = _MicroBatch(forward, self._rule)
        if self._use_num_items_in_batch:
            self._num_items = forward.arguments.get("num_items_in_batch", self._num_items)

    def _add_latest(self) -> None:
        latest, self._latest = self._latest, None
        if self._step is None:
            self._step = latest
        elif latest is not None:
            self._step.add(latest)

    def drop_forward(self) -> None:
        """The forward opened last failed: forget what was counted of it."""
        self._latest = None
        self.num_forwards = max(0, self.num_forwards - 1)

    def spoil(self) -> None:
        """A forward of this step could not be counted: nothing is known of the step's tokens."""
        self._is_spoilt = True

    def labels_seen(self, labels: Sequence[Tensor]) -> None:
        """Those of all micro-batches since the last step: for a model whose loss is computed outside it."""
        self._labels = labels

    def drop(self) -> None:
        """Forget what was counted since the last step (a step that was broken off)."""
        self._step = self._latest = self._num_items = None
        self._labels, self.num_forwards, self._is_spoilt = (), 0, False

    def take_step(self) -> PendingTokens:
        """The counts since the last call."""
        if self._latest is not None:
            self._add_latest()
        step, num_items, labels = self._step, self._num_items, self._labels
        is_spoilt = self._is_spoilt
        self.drop()
        if step is None or is_spoilt:
            return PendingTokens()
        if step.num_supervised_tokens is None and num_items is not None:
            # Of the whole optimizer step, given again with each micro-batch.
            step.num_supervised_tokens = _whole_number(num_items)
        if step.num_supervised_tokens is None and labels:
            step.num_supervised_tokens = _sum_over(_supervised_by(each, self._rule) for each in labels)
        return PendingTokens(step)


def _sum_over(counts: Iterable[_Trues | None]) -> _Count:
    """A batch that was not moved to the GPU yet is counted on the host."""
    total: _Count = None
    for count in counts:
        if count is None:
            return None
        known = count if count.is_cuda else int(count.count())
        total = known if total is None else _sum(total, known)
    return total


def _whole_number(value: Any) -> Any:
    """The Trainer's count comes as a number, or as a float tensor, repeated for each replica."""
    return value.detach().reshape(-1)[0].long() if isinstance(value, Tensor) else int(value)
