"""Tokens routed to each expert of each layer, from the choices that ``expert_sites`` finds in a model.

Inside the forward what shows a choice is only kept; all layers are counted together, and those of several small forwards
with them: one concatenation, one scatter, no wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting

from ftcost_callback.expert_sites import (
    ExpertSite,
    as_it_is,
    find_expert_sites,
    forced_routing,
    moe_class_name,
    why_not_shown,
)
from ftcost_callback.forward_window import TrainingForward, no_op_hook, no_op_reduction
from ftcost_callback.records import ExpertLoad, ExpertStatus

_MAX_PENDING_BYTES: Final = 16 * 2**20  # kept inside one forward
# Kept across forwards: where batches are small, steps are short, and counting some at once costs a fraction.
_MAX_HELD_BYTES: Final = 2 * 2**20
_MAX_HELD_FORWARDS: Final = 64

# The counter whose window is open, for the operator below: a compiled graph cannot carry a Python object.
_open_counter: ExpertLoadCounter | None = None


@torch.library.custom_op("ftcost::tap", mutates_args=())
def _tap(carried: Tensor, shown: Sequence[Tensor]) -> Tensor:
    """Identity on ``carried``, which the model goes on with, so that no compiler leaves the operator out. Its body runs
    inside a compiled graph, also in its recomputation, and sees what shows the choice."""
    counter = _open_counter
    if counter is not None:
        try:
            counter.seen_in_graph([each.clone() for each in shown])  # a graph may use their memory again
        except Exception as error:
            counter.on_error(error)
    return carried.clone()


@_tap.register_fake
def _(carried: Tensor, shown: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(carried)


def _tap_setup(ctx: Any, inputs: tuple[Tensor, Sequence[Tensor]], output: Tensor) -> None:
    ctx.num_shown = len(inputs[1])


def _tap_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, list[None]]:
    return gradient, [None] * ctx.num_shown


_tap.register_autograd(_tap_backward, setup_context=_tap_setup)


class _SiteHook:
    """Base of the hooks on a site. A copy of the model carries a no-op in its place.

    They run in each layer of the user's forward: few calls, and nothing of theirs may be raised there.
    """

    def __init__(self, counter: ExpertLoadCounter, site: ExpertSite, place: int) -> None:
        self._counter = counter
        self._place = place

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return no_op_hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return no_op_reduction()


class ArgumentHook(_SiteHook):
    """Forward pre-hook of a module that is given the choice."""

    def __init__(self, counter: ExpertLoadCounter, site: ExpertSite, place: int) -> None:
        super().__init__(counter, site, place)
        self._name = site.argument
        self._position = site.position
        self._with_next = site.with_next

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_compiling():
            return None if is_exporting() else self._tapped(args, kwargs)  # an exported program is not ours
        counter = self._counter
        if counter.is_open:
            try:
                given = kwargs[self._name] if self._name in kwargs else args[self._position]
                counter.seen((given, args[self._position + 1]) if self._with_next else given, self._place)
            except Exception as error:
                counter.on_error(error)
        return None

    def _tapped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, position = self._name, self._position
        given = kwargs[name] if name in kwargs else args[position]
        tapped = _tap(given, [given, args[position + 1].detach()] if self._with_next else [given])
        if name in kwargs:
            return args, {**kwargs, name: tapped}
        return (*args[:position], tapped, *args[position + 1 :]), kwargs


class OutputHook(_SiteHook):
    """Forward hook of a router whose output shows the choice."""

    def __init__(self, counter: ExpertLoadCounter, site: ExpertSite, place: int) -> None:
        super().__init__(counter, site, place)
        self._shows_choice_in_graph = site.shows_choice_in_graph

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if is_compiling():
            return self._tapped(output) if self._shows_choice_in_graph and not is_exporting() else None
        if self._counter.is_open:
            try:
                self._counter.seen(output, self._place)
            except Exception as error:
                self._counter.on_error(error)
        return None

    def _tapped(self, output: tuple[Any, ...]) -> tuple[Any, ...]:
        """The first of the router's outputs is carried on: every model of these goes on with it."""
        first, *others = output
        return (_tap(first, [each.detach() for each in output if isinstance(each, Tensor)]), *others)


class ExpertRowsHook(_SiteHook):
    """Forward pre-hook of one of a site's experts: the rows it is given are known without waiting."""

    def __init__(self, counter: ExpertLoadCounter, site: ExpertSite, place: int, expert: int) -> None:
        super().__init__(counter, site, place)
        self._expert = expert

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not is_compiling() and self._counter.is_open and args:
            try:
                self._counter.expert_called(self._place, self._expert, args[0])
            except Exception as error:
                self._counter.on_error(error)


def _raise(error: Exception) -> None:
    raise error


class ExpertLoadCounter:
    """Counts between two calls of :meth:`take`. Padding, evaluation and recomputation stay outside.

    ``attach`` sets the hooks; ``open_forward`` and ``close_forward`` belong to the forward window of the same model.
    ``on_error`` is given what failed inside the user's forward, and must not raise there.
    """

    def __init__(self, on_error: Callable[[Exception], None] = _raise) -> None:
        self.on_error = on_error
        self._sites: list[ExpertSite] = []
        self._handles: list[Any] = []
        # (num_layers, 1 + most experts + 1): indices below 0, the experts, indices above them
        self._counts: Tensor | None = None
        self._ones: Tensor | None = None  # (1, experts per token)
        self._held: list[tuple[list[Tensor], Tensor | None]] = []  # whole forwards: each layer's indices, real tokens
        self._held_bytes = 0
        self._places: list[int] = []  # sites that were called, in order
        self._pending: list[Any] = []  # what shows the choice of each
        self._pending_bytes = 0
        self._may_hold = True
        self._called: set[int] = set()  # sites of the open forward
        self._num_in_graph = 0  # calls of the open forward that a compiled graph made, which does not know its site
        self._reals: tuple[Tensor | None, Tensor | None] = (None, None)  # real tokens: of the model, of its decoder
        self._num_calls: list[int] = []  # of each site
        self._rows_of_experts: dict[int, list[int]] = {}  # site -> rows that each expert was given, padding too
        self._expert_calls: list[tuple[int, int, int]] = []  # of the open forward: site, expert, rows
        self._all_rows: Tensor | None = None  # as _counts, padding counted
        self._num_expert_columns = 0
        self.forced_by: str | None = None  # what says that routing is forced to be even
        self._has_decoder = False
        self._is_mixed = False  # not counted all alike: by two masks, or with a check of the rows
        self._is_plain = True  # what shows a choice is the choice
        self._all_places: list[int] = []
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
        self._counts = self._ones = self._all_rows = None
        self._held, self._held_bytes = [], 0
        self._unsupported = None
        self._sites = find_expert_sites(model)
        self._reset()
        if not self._sites:
            self._unsupported = moe_class_name(model)
            return
        self._num_expert_columns = max(site.num_experts for site in self._sites)
        self.forced_by = forced_routing(model)
        self._has_decoder = any(site.is_decoder for site in self._sites)
        self._is_mixed = self._has_decoder or any(site.experts for site in self._sites)
        self._is_plain = all(site.to_index is as_it_is for site in self._sites)
        for place, site in enumerate(self._sites):
            if site.argument is not None:
                handle = site.hooked.register_forward_pre_hook(ArgumentHook(self, site, place), with_kwargs=True)
            else:
                handle = site.hooked.register_forward_hook(OutputHook(self, site, place))
            self._handles.append(handle)
            self._handles += [
                each.register_forward_pre_hook(ExpertRowsHook(self, site, place, expert))
                for expert, each in enumerate(site.experts)
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
        if self._pending:
            self.close_window()  # the forward before was broken off
        if forward.hides_padding:
            self._odd_shape = "attention_mask does not say what is padding, so padding is counted"
        of_decoder = forward.decoder_real_tokens if self._has_decoder else None
        self._reals, self._may_hold, self._num_in_graph = (forward.real_tokens, of_decoder), True, 0
        if self._called:
            self._called = set()
        self.is_open = True
        _open_counter = self

    def seen(self, shown: Any, place: int) -> None:
        """The site at ``place`` was called: ``shown`` is what its ``to_index`` reads. Nothing is computed here."""
        self._places.append(place)
        self._pending.append(shown)
        self._pending_bytes += shown.numel() * 8 if isinstance(shown, Tensor) else _num_bytes(shown)
        if self._pending_bytes > _MAX_PENDING_BYTES:
            self._count_pending()

    def seen_in_graph(self, shown: list[Tensor]) -> None:
        """A site was called inside a compiled graph, in the order of the sites."""
        place, self._num_in_graph = self._num_in_graph, self._num_in_graph + 1
        self._may_hold = False
        if place < len(self._sites):
            self.seen(shown[0] if len(shown) == 1 else tuple(shown), place)

    def expert_called(self, place: int, expert: int, hidden_states: Tensor) -> None:
        """An expert that is a module of its own was given rows."""
        self._expert_calls.append((place, expert, hidden_states.shape[:-1].numel()))

    def close_window(self) -> None:
        """Close without counting (the forward was broken off, or the hooks go)."""
        global _open_counter
        self.is_open = False
        self._places, self._pending, self._pending_bytes, self._reals = [], [], 0, (None, None)
        self._expert_calls = []
        if _open_counter is self:
            _open_counter = None

    def close_forward(self) -> None:
        """Count the forward that ends. Indices carry no gradient, so this is no part of the user's graph."""
        if not self.is_open:
            return
        try:
            self._num_forwards += 1
            for place, expert, num_rows in self._expert_calls:
                self._rows_of_experts[place][expert] += num_rows
            if self._may_hold and self._places == self._all_places and not (self._is_mixed or self._called):
                self._hold_or_count()
            else:
                self._count_pending()
            in_graph_is_odd = self._num_in_graph not in (0, len(self._sites))
            self._num_complete += len(self._called) == len(self._sites) and not in_graph_is_odd
        finally:
            self.close_window()

    def _hold_or_count(self) -> None:
        """Keep the whole forward, to be counted together with others: if it is small, and its indices are no views that
        keep larger tensors alive, which the first one kept shows for all (one code makes them).

        It runs in each forward, so whatever can wait is looked at when they are counted.
        """
        indices, num_bytes = self._pending, self._pending_bytes
        if not self._is_plain:
            indices = self._indices(self._places, indices)
            num_bytes = sum(index.nbytes for index in indices)
        if num_bytes > _MAX_HELD_BYTES or not (self._held or _owns_its_memory(indices[0])):
            self._count_indices(self._places, indices)
            return
        self._held.append((indices, self._reals[0]))
        self._held_bytes += num_bytes
        self._num_complete += 1
        if self._held_bytes > _MAX_HELD_BYTES or len(self._held) >= _MAX_HELD_FORWARDS:
            self._count_held()

    def _count_held(self) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        if not held:
            return
        self._num_calls = [calls + len(held) for calls in self._num_calls]
        # experts per token, whether padding is known -> forwards whose layers all chose for as many tokens
        alike: dict[tuple[int, bool], tuple[list[list[Tensor]], list[Tensor | None]]] = {}
        for indices, real_tokens in held:
            shapes = [index.shape for index in indices]
            shape = shapes[0]
            if len(shape) != 2 or shapes.count(shape) != len(shapes):
                indices = [_two_dimensional(index) for index in indices]
                for place, index in enumerate(indices):
                    self._count(place, [[index]], [self._fitting(real_tokens, index.shape[0])])
                continue
            real = self._fitting(real_tokens, shape[0])
            forwards, reals = alike.setdefault((shape[1], real is None), ([], []))
            forwards.append(indices)
            reals.append(real)
        for forwards, reals in alike.values():
            self._count(0, forwards, reals)

    def _indices(self, places: list[int], shown: list[Any]) -> list[Tensor]:
        """What was shown -> (tokens, experts per token) each."""
        return [_two_dimensional(self._sites[place].to_index(each)) for place, each in zip(places, shown, strict=True)]

    def _count_pending(self) -> None:
        places, shown = self._places, self._pending
        self._places, self._pending, self._pending_bytes = [], [], 0
        if not places:
            return
        self._count_indices(places, self._indices(places, shown))

    def _count_indices(self, places: list[int], indices: list[Tensor]) -> None:
        for place in places:
            self._num_calls[place] += 1
        self._called.update(places)
        indices = [_two_dimensional(index) for index in indices]
        alike = all(index.shape == indices[0].shape for index in indices) and not self._is_mixed
        if alike and places == list(range(places[0], places[0] + len(places))):
            self._count(places[0], [indices], [self._fitting_real(places[0], indices[0].shape[0])])
        else:
            for place, index in zip(places, indices, strict=True):
                self._count(place, [[index]], [self._fitting_real(place, index.shape[0])])

    def _fitting_real(self, place: int, num_tokens: int) -> Tensor | None:
        return self._fitting(self._reals[self._sites[place].is_decoder], num_tokens)

    def _fitting(self, real: Tensor | None, num_tokens: int) -> Tensor | None:
        """Which of the tokens that chose are real; ``None``: all, or nobody can say."""
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
        if self._sites[first].experts:
            if self._all_rows is None:
                self._all_rows = torch.zeros_like(self._counts)
            self._all_rows[first : first + num_layers].scatter_add_(1, column, weights.expand_as(column))
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
            return self._not_recorded(global_step, why_not_shown(self._unsupported))
        if not self._sites:
            return None
        if self._num_forwards == 0:
            return None
        self._count_held()
        if self._counts is None:
            reason = (
                f"{self._num_forwards} training forwards, and no complete pass over the {len(self._sites)} experts "
                f"modules ({type(self._sites[0].module).__name__}) was seen: compiled before the callback attached, "
                "a CUDA graph, or a replaced kernel"
            )
            if not all(site.shows_choice_in_graph for site in self._sites):
                reason += "; this family's choice cannot be read inside a compiled graph"
            self._reset()
            return self._not_recorded(global_step, reason)
        counts: list[list[int]] = self._counts.tolist()
        if (wrong := self._wrongly_read()) is not None:
            self._reset()
            return self._not_recorded(global_step, wrong)
        tokens = [row[1 : 1 + site.num_experts] for row, site in zip(counts, self._sites, strict=True)]
        num_without_expert = [sum(row) - sum(of_experts) for row, of_experts in zip(counts, tokens, strict=True)]
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

    def _wrongly_read(self) -> str | None:
        """Of experts that are modules of their own: whether each was given the rows that its gate chose it for."""
        if self._all_rows is None:
            return None
        chosen: list[list[int]] = self._all_rows.tolist()
        for place, rows in self._rows_of_experts.items():
            if chosen[place][1 : 1 + len(rows)] != rows:
                name = self._sites[place].layer_name
                return f"{name} does not run the {self._num_experts_per_tok} experts that its gate scores highest"
        return None

    def _judgement(
        self, tokens: list[list[int]], num_without_expert: list[int], num_non_padding_tokens: int | None
    ) -> tuple[ExpertStatus, str | None]:
        uncalled = [site.layer_name for site, calls in zip(self._sites, self._num_calls, strict=True) if calls == 0]
        if uncalled:
            return (
                "partial",
                f"{len(uncalled)} of {len(self._sites)} experts modules were not called, the first is {uncalled[0]}",
            )
        if self._num_complete < self._num_forwards:
            missed = self._num_forwards - self._num_complete
            return (
                "partial",
                f"{missed} of {self._num_forwards} training forwards did not call every experts module once",
            )
        if self._odd_shape is not None:
            return "partial", self._odd_shape
        num_dropped = sum(count for count, site in zip(num_without_expert, self._sites, strict=True) if site.drops_tokens)
        if num_strange := sum(num_without_expert) - num_dropped:
            return "partial", f"{num_strange} choices name no expert of the model and are left out"
        if num_non_padding_tokens is not None and self._num_experts_per_tok is not None:
            sums = [sum(row) + dropped for row, dropped in zip(tokens, num_without_expert, strict=True)]
            if (doubt := self._wrong_sums(sums, num_non_padding_tokens * self._num_experts_per_tok)) is not None:
                return "partial", doubt
        remarks = []
        if num_dropped:
            remarks.append(f"{num_dropped} choices were over an expert's capacity and dropped by the model")
        if self.forced_by is not None:
            remarks.append(f"routing is forced to be even ({self.forced_by}): not what the router would choose")
        return "recorded", "; ".join(remarks) or None

    def _wrong_sums(self, sums: list[int], expected: int) -> str | None:
        """``sums``: choices of each layer; a layer that runs several times in a forward has as many times more."""
        layers = list(zip(self._sites, sums, self._num_calls, strict=True))
        of_decoder = {sum_ * self._num_forwards // calls for site, sum_, calls in layers if site.is_decoder}
        of_others = {sum_ * self._num_forwards // calls for site, sum_, calls in layers if not site.is_decoder}
        if of_decoder and of_others:
            if len(of_decoder) == len(of_others) == 1 and of_decoder.pop() + of_others.pop() == expected:
                return None
            return f"the layers of encoder and decoder do not sum to tokens x top-k = {expected}"
        if of_decoder:
            return None  # the tokens of an encoder without experts are in ``expected`` too
        wrong = [site.layer_name for site, sum_, calls in layers if sum_ * self._num_forwards != expected * calls]
        if not wrong:
            return None
        return f"{len(wrong)} layers do not sum to tokens x top-k = {expected}, the first is {wrong[0]}"

    def _not_recorded(self, global_step: int, reason: str) -> ExpertLoad:
        return ExpertLoad(global_step=global_step, status="not_recorded", reason=reason)

    def _reset(self) -> None:
        if self._counts is not None:
            self._counts.zero_()
        if self._all_rows is not None:
            self._all_rows.zero_()
        self._num_calls, self._all_places = [0] * len(self._sites), list(range(len(self._sites)))
        self._rows_of_experts = {place: [0] * len(site.experts) for place, site in enumerate(self._sites) if site.experts}
        self._num_forwards = self._num_complete = 0
        self._odd_shape = None


def _owns_its_memory(index: Tensor) -> bool:
    return index.dim() == 2 and index.untyped_storage().nbytes() <= 2 * index.nbytes


def _two_dimensional(index: Tensor) -> Tensor:
    return index if index.dim() == 2 else index.reshape(-1, index.shape[-1])


def _num_bytes(shown: Any) -> int:
    """Of the tensors that are kept until the choice is read from them."""
    return sum(each.nbytes for each in shown if isinstance(each, Tensor)) if isinstance(shown, (tuple, list)) else 0
