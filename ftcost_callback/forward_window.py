"""The training forwards of a model, seen from its outermost module: opens before each one, closes after it.

Everything that is counted per micro-batch hangs on this window. It opens only for a forward in training mode with
gradients on, so evaluation, ``generate`` and second passes under ``no_grad`` stay outside; and what gradient
checkpointing computes again runs in the backward, when the window is closed.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from sys import exc_info
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling

# Not public (torch 2.13): whether torch.compile looks at the functions that are called now, and which it shall pass over.
_frames: Final[Any] = torch._C._dynamo.eval_frame
_compiler_at_work: Final[Callable[[], Any]] = getattr(_frames, "get_eval_frame_callback", lambda: None)
_can_be_told: Final = hasattr(_frames, "get_eval_frame_callback") and hasattr(_frames, "skip_code")

# What transformers calls the images, films and sounds of a batch.
_NOT_TEXT: Final = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
_IGNORED_LABEL: Final = -100  # where a label is padding


class TrainingForward:
    """The keyword arguments of one training forward, read without touching them.

    ``batch_shape``: (rows, padded length) of the tokens, or ``None`` for a model that is not given tokens.
    ``padding_mask``: (rows, length), 0 where a token is padding; ``None`` without such a mask. ``hides_padding``: there is a
    mask, but of another shape (four dimensions say who attends to whom), so nobody can say which tokens are padding.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments
        ids = arguments.get("input_ids")
        self.batch_shape = shape = _first_two(ids.shape, 2) if isinstance(ids, Tensor) else self._shape_of_embeddings()
        mask = arguments.get("attention_mask")
        self.padding_mask: Tensor | None = (
            mask if shape is not None and isinstance(mask, Tensor) and mask.shape == shape else None
        )
        self.hides_padding = mask is not None and self.padding_mask is None and shape is not None
        self._not_padding: Tensor | None = None

    def tensor(self, name: str) -> Tensor | None:
        value = self.arguments.get(name)
        return value if isinstance(value, Tensor) else None

    def _shape_of_embeddings(self) -> tuple[int, int] | None:
        embeddings = self.tensor("inputs_embeds")
        return _first_two(embeddings.shape, 3) if embeddings is not None else None

    @property
    def shows_more_than_text(self) -> bool:
        """Whether encoders of images or sound work in it."""
        return any(self.arguments.get(name) is not None for name in _NOT_TEXT)

    @property
    def why_no_shape(self) -> str:
        """Why ``batch_shape`` is ``None``."""
        for name, wanted in (("input_ids", "(rows, length)"), ("inputs_embeds", "(rows, length, width)")):
            value = self.tensor(name)
            if value is not None:
                return f"{name} has the shape {tuple(value.shape)} and not {wanted}"
        return "the model is not given input_ids"

    @cached_property
    def sequence_starts(self) -> Tensor | None:
        """(rows, length) bool: where a packed sequence begins. ``None`` unless positions are given without a mask.

        A position 0 that is not followed by a 1 is padding (TRL fills up flattened batches with zeros).
        """
        positions = self._packed_positions
        if positions is None:
            return None
        followed_by_one = torch.zeros_like(positions, dtype=torch.bool)
        followed_by_one[:, :-1] = positions[:, 1:] == 1
        return (positions == 0) & followed_by_one

    @property
    def real_tokens(self) -> Tensor | None:
        """(rows, length) bool, true where a token is no padding. ``None``: nothing says that any token is padding."""
        if self._not_padding is not None:
            return self._not_padding
        if self.padding_mask is not None:
            self._not_padding = self.padding_mask != 0
            return self._not_padding
        return self._real_by_positions if self.tensor("attention_mask") is None else None

    @cached_property
    def _real_by_positions(self) -> Tensor | None:
        starts = self.sequence_starts
        positions = self._packed_positions
        return None if starts is None or positions is None else (positions != 0) | starts

    @cached_property
    def decoder_real_tokens(self) -> Tensor | None:
        """(rows, length of the target) bool, of an encoder-decoder's decoder. ``None``: nothing says what is padding."""
        labels, mask = self.tensor("labels"), self.tensor("decoder_attention_mask")
        if labels is not None and labels.dim() == 2:
            return labels != _IGNORED_LABEL
        return mask != 0 if mask is not None and mask.dim() == 2 else None

    @property
    def packed_positions(self) -> Tensor | None:
        """(rows, length) positions within each packed sequence."""
        return self._packed_positions

    @cached_property
    def _packed_positions(self) -> Tensor | None:
        positions = self.tensor("position_ids")
        if positions is None or self.arguments.get("attention_mask") is not None:
            return None
        return positions if tuple(positions.shape) == self.batch_shape else None


def _first_two(shape: torch.Size, num_dimensions: int) -> tuple[int, int] | None:
    return (shape[0], shape[1]) if len(shape) == num_dimensions else None


_Hook = TypeVar("_Hook", bound=Callable[..., None])
_not_compiled: Final[Callable[[_Hook], _Hook]] = torch.compiler.disable


def _never_compiled(hook: _Hook) -> _Hook:
    """``torch.compiler.disable`` of this function's own frame, at no cost where nothing is compiled."""
    if not _can_be_told:
        return _not_compiled(hook)
    _frames.skip_code(hook.__code__)
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    return hook


class _RootHook:
    """Base of the hooks on the outermost module. A copy of the model carries a no-op in its place.

    They run in each forward, mostly with nothing of theirs in the processor's caches, where each function that is entered
    costs some microseconds. So ``torch.compiler.disable`` stands around what they do only where a compiler is at work.
    """

    def __init__(self, window: ForwardWindow) -> None:
        self._window = window

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return no_op_hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return no_op_reduction()


class _OpenHook(_RootHook):
    @_never_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training or not is_grad_enabled() or is_compiling() or _is_jit_traced() or _is_transformed():
            return
        opens = self._window.opens
        if _compiler_at_work() is None:
            opens(args, kwargs)
        else:
            _not_compiled(opens)(args, kwargs)


class _CloseHook(_RootHook):
    @_never_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._window.is_open:
            return
        error, closes = exc_info()[1] if output is None else None, self._window.closes
        if _compiler_at_work() is None:
            closes(error)
        else:
            _not_compiled(closes)(error)


# A program is made of the forward (torch.jit.trace; torch.export counts as compiling), or it runs under a transform of
# torch.func: its tensors have no values, or stand for many.
_is_jit_traced: Final[Callable[[], bool]] = torch._C._is_tracing
_is_transformed: Final[Callable[[], Any]] = torch._C._functorch.peek_interpreter_stack


# Wrappers whose forward passes on whatever it is given, and where they keep the model.
_INNER: Final = ("module", "_orig_mod", "base_model", "model")


def positional_names(model: nn.Module) -> tuple[str, ...]:
    """What the forward of ``model`` calls its positional arguments, in order; of the model inside for a wrapper."""
    found: nn.Module | None = model
    while found is not None:
        try:
            parameters = inspect.signature(found.forward).parameters.values()
        except (TypeError, ValueError):
            return ()
        names = tuple([each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)])
        if names:
            return names
        inner = (getattr(found, name, None) for name in _INNER)
        found = next((each for each in inner if isinstance(each, nn.Module) and each is not found), None)
    return ()


def no_op_reduction() -> tuple[Any, ...]:
    """How a hook is pickled: as a method of the standard library that takes anything and returns None.

    So a model saved whole while it trains can be loaded where this package is not installed.
    """
    return (getattr, (contextlib.nullcontext(), "__exit__"))


def no_op_hook() -> Any:
    return contextlib.nullcontext().__exit__


def _are_indices(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point()


class ForwardWindow:
    """``on_open(forward)`` before and ``on_close()`` after each training forward of ``model``; ``on_error(error)`` in place
    of the latter for one that failed, whose error goes on to whom it belongs. None of them may raise."""

    def __init__(
        self,
        on_open: Callable[[TrainingForward], None],
        on_close: Callable[[], None],
        on_error: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._on_open = on_open
        self._on_close = on_close
        self._on_error = on_error
        self._handles: list[Any] = []
        self._positional: tuple[str, ...] = ()
        self.is_open = False
        self.is_expected = False
        """The next forward is one of training for sure; ``accepts`` is not asked."""
        self.accepts: Callable[[], bool] = lambda: True
        """Whether a forward that begins now is one of training. Must not raise."""

    def attach(self, model: nn.Module) -> None:
        self.detach()
        self._positional = positional_names(model)
        self._handles = [
            model.register_forward_pre_hook(_OpenHook(self), with_kwargs=True),
            model.register_forward_hook(_CloseHook(self), always_call=True),
        ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.is_open = self.is_expected = False

    def opens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.is_expected:
            self.is_expected = False
        elif not self.accepts():
            return
        if args:
            kwargs = {**dict(zip(self._positional, args, strict=False)), **kwargs}
            if "input_ids" not in kwargs and "inputs_embeds" not in kwargs and _are_indices(args[0]):
                kwargs["input_ids"] = args[0]
        self.is_open = True
        self._on_open(TrainingForward(kwargs))

    def closes(self, error: BaseException | None) -> None:
        self.is_open = False
        if error is None:
            self._on_close()
        else:
            self._on_error(error)
