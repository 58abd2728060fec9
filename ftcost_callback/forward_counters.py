"""What is counted in the training forwards of a model: tokens and expert load, each switched off alone when it fails."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from ftcost_callback.boundary import Boundary
from ftcost_callback.expert_load import ExpertLoadCounter
from ftcost_callback.forward_window import ForwardWindow, TrainingForward
from ftcost_callback.recorder import Phase
from ftcost_callback.records import ExpertLoad, TokenCounts
from ftcost_callback.token_counter import PendingTokens, TokenCounter, label_rule

_log = logging.getLogger("ftcost_callback")

MAX_FAILURES: Final = 3


class ForwardCounters:
    """``attach`` to a model's outermost module, ``take_step`` at each optimizer step, ``take_experts`` at a report.

    ``on_error`` is given the error of a forward that failed; the error itself goes on to whom it belongs.
    """

    def __init__(self, boundary: Boundary, on_error: Callable[[BaseException], None]) -> None:
        self._boundary = boundary
        self.window = ForwardWindow(self._open_forward, self._close_forward, self._forward_failed)
        self._on_error = on_error
        self._tokens: TokenCounter | None = None
        self._experts: ExpertLoadCounter | None = None
        self._expert_tokens: int | None = 0  # non-padding, over the forwards since the experts were taken
        self._not_recorded_reason: str | None = None
        self._said_missing: set[str] = set()
        self._num_failures = 0  # of the token counter
        self.batch_shape: tuple[int, int] | None = None  # of the last training forward
        self.on_phase: Callable[[Phase], None] = lambda phase: None  # told what begins; must not raise
        self.on_failed: Callable[[], None] = lambda: None  # after each training forward that failed; must not raise

    def attach(self, model: Any, *, num_processes: int, expert_load: bool) -> None:
        self._tokens = TokenCounter(label_rule(model), use_num_items_in_batch=num_processes == 1)
        self._boundary.on_failure("token counter", self._drop_tokens)
        self.window.attach(model)
        if expert_load:
            self._boundary.on_failure("expert load", self._drop_experts)
            self._experts = self._boundary.call("expert load", lambda: self._attached_experts(model))

    def _attached_experts(self, model: Any) -> ExpertLoadCounter:
        experts = ExpertLoadCounter(functools.partial(self._boundary.failed, "expert load"))
        experts.attach(model)
        if experts.forced_by is not None:
            _log.warning("ftcost: routing is forced to be even (%s): the expert load is not the router's", experts.forced_by)
        return experts

    def _drop_tokens(self) -> None:
        self._tokens = None

    def _drop_experts(self) -> None:
        experts, self._experts = self._experts, None
        if experts is not None:
            experts.detach()

    def detach(self) -> None:
        """The hooks are gone. May be called more than once."""
        self.window.detach()
        self._drop_experts()

    def _open_forward(self, forward: TrainingForward) -> None:
        self.on_phase("forward")
        self.batch_shape = forward.batch_shape
        # In each forward and step the boundary is only called on an error: what it has switched off is None here.
        if self._tokens is not None:
            try:
                self._tokens.open_forward(forward)
            except Exception as error:
                self._not_counted(error)
        if self._experts is not None:
            try:
                self._experts.open_forward(forward)
            except Exception as error:
                self._boundary.failed("expert load", error)

    def _close_forward(self) -> None:
        if self._experts is not None:
            try:
                self._experts.close_forward()
            except Exception as error:
                self._boundary.failed("expert load", error)
        self.on_phase("backward")

    def _forward_failed(self, error: BaseException) -> None:
        """Its batch may be skipped: what the forward had counted goes."""
        self._on_error(error)
        if self._tokens is not None:
            self._tokens.drop_forward()
        if self._experts is not None:
            self._experts.close_window()
        self.on_failed()

    @property
    def num_forwards(self) -> int:
        """Training forwards since the last step, without those that failed."""
        return self._tokens.num_forwards if self._tokens is not None else 0

    def labels_seen(self, labels: Sequence[Any]) -> None:
        """The step's labels, for a model that is not given them."""
        if self._tokens is not None:
            self._tokens.labels_seen(labels)

    def take_step(self) -> PendingTokens:
        """The tokens since the last call, still on the device."""
        if self._tokens is not None:
            try:
                return self._tokens.take_step()
            except Exception as error:
                self._not_counted(error)
        return PendingTokens()

    def _not_counted(self, error: Exception) -> None:
        """Nothing is known of this step's tokens. An odd step costs no other; what fails on and on is switched off."""
        self._num_failures += 1
        if self._tokens is None or self._num_failures >= MAX_FAILURES:
            self._boundary.failed("token counter", error)
            return
        self._tokens.spoil()
        _log.warning(
            "ftcost: the tokens of one step are not known (%s: %s); training goes on",
            type(error).__name__,
            error,
            exc_info=error,
        )

    def read(self, pending: PendingTokens) -> TokenCounts | None:
        """The counts of a step that is over, in the order they were taken."""
        counts = self._boundary.call("token counter", pending.read)
        counts = counts if counts is not None else TokenCounts()
        shows_nothing, why_unknown = counts.shows_nothing, pending.why_unknown
        if shows_nothing or why_unknown is not None:
            self._note_missing_tokens(counts, why_unknown)
        if self._expert_tokens is not None and not shows_nothing:
            real = counts.num_non_padding_tokens
            self._expert_tokens = self._expert_tokens + real if real is not None else None
        return counts

    def _note_missing_tokens(self, counts: TokenCounts, why: str | None) -> None:
        if self._tokens is None:
            return
        if counts.shows_nothing and self._tokens.saw_forward:
            why = "no training forward of the model was seen in a step (its batch was skipped?); token counts leave it out"
        elif counts.shows_nothing:
            why = "no training forward of the model was seen (compiled before we attached?), so tokens are not counted"
        if why is not None and why not in self._said_missing:
            self._said_missing.add(why)
            _log.warning("ftcost: %s", why)

    def take_experts(self, global_step: int) -> ExpertLoad | None:
        """The load since the last call, for the record. ``None``: dense, nothing new, or said before why not."""
        if self._experts is None:
            return None
        expected, self._expert_tokens = self._expert_tokens, 0
        load = self._experts.take(global_step, num_non_padding_tokens=expected)
        if load is None or (load.status == "not_recorded" and load.reason == self._not_recorded_reason):
            return None
        if load.status == "not_recorded":
            self._not_recorded_reason = load.reason
            _log.warning("ftcost: expert load is not recorded: %s", load.reason)
        return load
