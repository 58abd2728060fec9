"""What every process of a training measures, the main one and the others: steps, tokens and expert load.

:class:`~ftcost_callback.live_run.LiveRun` is the main process's, :class:`~ftcost_callback.rank_run.RankRun` another's.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from ftcost_callback.boundary import Boundary
from ftcost_callback.forward_counters import ForwardCounters
from ftcost_callback.record_writer import RecordWriter
from ftcost_callback.recorder import StepRecorder
from ftcost_callback.records import PauseKind
from ftcost_callback.run_file import Ledger, write_ledger
from ftcost_callback.session_plan import Identity, Plan, Settings
from ftcost_callback.step_resolution import StepResolution
from ftcost_callback.training_watch import TrainingWatch
from ftcost_callback.wrapped_method import WrappedMethod

_log = logging.getLogger("ftcost_callback")

# Of transformers 5.24, which an exception may leave: an epoch with its backwards and optimizer steps, what follows the last
# one, and an evaluation before the first.
EPOCH: Final = "_run_epoch"
END: Final = "_finalize_training"
EVALUATION: Final = "_evaluate"
FLUSH_SECONDS: Final = 1.0  # a kill loses no more of the record than this


class ProcessRun:
    """For each step ``step_begins``, ``micro_batch_ends``, ``step_ends``; ``pause`` after each pause; ``end``.

    ``window_steps``, ``skip_first_steps``: of its :class:`StepRecorder`.
    """

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        plan: Plan,
        boundary: Boundary,
        *,
        output_dir: str | os.PathLike[str],
        clock: Callable[[], float],
        window_steps: int,
        skip_first_steps: int,
    ) -> None:
        self.identity = identity
        self._settings = settings
        self._plan = plan
        self._boundary = boundary
        self._clock = clock
        self._output_dir = Path(os.path.abspath(output_dir))  # the program may change its folder while it trains
        self.recorder = StepRecorder(clock, window_steps=window_steps, skip_first_steps=skip_first_steps)
        self.counters = ForwardCounters(boundary, self.epoch_failed)
        self.record = RecordWriter(boundary, clock)
        self._steps = StepResolution(self.recorder, self.counters, boundary, clock)
        self._watch: TrainingWatch | None = None
        self._epochs: dict[str, WrappedMethod] = {}
        self._is_removed: Callable[[], bool] = lambda: False
        self._tells_batches = False  # a Trainer says when a step's batches begin and end
        self._is_in_batch = True  # false outside a step's own forwards, where somebody may call the model for something else
        self._may_be_retried = False  # auto_find_batch_size begins again with a smaller batch

    # --- whether it still trains --------------------------------------------------------------------------------------

    def watch_training(self, trainer: Any, *, is_removed: Callable[[], bool] = lambda: False) -> None:
        """``trainer`` has a loop of its own, which an exception may leave without an event. ``is_removed``: whether it tells
        this run nothing any more."""
        self._is_removed = is_removed
        self._watch = TrainingWatch(trainer, self.left, closely=self._looks_closely)
        telling = functools.partial(
            _telling_of_errors, weakref.WeakMethod(self.epoch_left), weakref.WeakMethod(self.look_if_removed)
        )
        names = (EPOCH, END, EVALUATION) if self._plan.eval_on_start else (EPOCH, END)
        self._epochs = {name: WrappedMethod(trainer, name, telling) for name in names}
        self._may_be_retried = bool(getattr(getattr(trainer, "args", None), "auto_find_batch_size", False))
        self._tells_batches = True
        self._is_in_batch = False
        self.counters.window.accepts = self._accepts_forward

    def _accepts_forward(self) -> bool:
        """Whether a forward that begins now is one of a step's own. Nobody asks about the first after the step's begin."""
        if self.look_if_removed():
            return False
        if self._watch is not None and self._looks_closely():  # of another training, perhaps
            self._boundary.call("training watch", self._watch.look_closely)
        return self._is_in_batch

    def look_if_removed(self) -> bool:
        """Whether the Trainer tells us nothing any more; the run then ends here. Must not raise."""
        if self._is_removed():
            self._is_removed = lambda: False
            _log.warning(
                "ftcost: the callback was removed while training; its record ends at step %d", self._steps.last_step
            )
            self._boundary.call("end of the record", self.end)
            self.release()
            return True
        return False

    def holds_another(self, trainer: Any) -> bool:
        """Whether ``trainer`` begins inside this training."""
        return self._watch is not None and self._watch.holds_another(trainer)

    def epoch_begins(self) -> None:
        if (first := self._epochs.pop(EVALUATION, None)) is not None:
            first.undo()  # whoever goes on after a later one that failed has not left the epoch
        if self._watch is not None:
            self._boundary.call("training watch", self._watch.epoch_begins)

    def _looks_closely(self) -> bool:
        """Whether what is left open would disturb who trains on."""
        return False

    # --- one step -----------------------------------------------------------------------------------------------------

    def step_begins(self, *, awaits_batch: bool = False) -> None:
        """The batches of the next step have arrived; ``awaits_batch``: they are waited for until its first forward."""
        self._steps.begins(awaits_batch=awaits_batch)
        self._is_in_batch = self.counters.window.is_expected = True
        if self._watch is not None and not self._watch.is_following:
            self._boundary.call("training watch", self._watch.step_begins)

    def micro_batch_ends(self) -> None:
        """A micro-batch that is not the step's last has ended."""
        self._steps.micro_batch_ends()

    def waited_for_data(self, seconds: float) -> None:
        """For a batch that is not the first of its step."""
        self._steps.waited_for_data(seconds)

    @property
    def any_forward(self) -> bool:
        """Whether a part of the step that is being done has been tried."""
        return self._steps.any_forward

    @property
    def num_forwards(self) -> int:
        """Of the step that is being done, without those that failed."""
        return self.counters.num_forwards

    @property
    def in_step(self) -> bool:
        """Between the begin and the end of a step: what is logged there is the user's own affair."""
        return self._steps.in_step

    def labels_seen(self, labels: Sequence[Any]) -> None:
        """Those of the step's batches, for a model that is not given them."""
        self._boundary.call("token counter", lambda: self.counters.labels_seen(labels))

    def optimizer_begins(self) -> None:
        """The gradients are complete."""
        self._steps.phase_begins("optimizer")

    def optimizer_ends(self) -> None:
        self._batches_are_over()
        self._steps.phase_begins("other")

    def _batches_are_over(self) -> None:
        self._is_in_batch = not self._tells_batches
        self.counters.window.is_expected = False

    def rollout_begins(self) -> None:
        """What the step trains on is being generated, and then scored."""
        self._boundary.call("rollouts", self._steps.rollout_begins)

    def rollout_ends(self) -> None:
        self._boundary.call("rollouts", self._steps.rollout_ends)

    def evaluation_begins(self) -> None:
        """Of a Trainer's evaluation or prediction, also where nobody planned it: in another callback, or in a loss."""
        self._boundary.call("evaluations", self._steps.evaluation_begins)

    def evaluation_ends(self) -> None:
        self._boundary.call("evaluations", self._steps.evaluation_ends)

    def step_ends(self, global_step: int, *, pauses_to_come: frozenset[PauseKind] = frozenset()) -> bool:
        """The optimizer has stepped; ``pauses_to_come`` follow it. True: training should stop (and save)."""
        raise NotImplementedError

    def wait_for_steps(self) -> None:
        """A pause begins: the steps before it are over, or are waited for."""
        raise NotImplementedError

    def epoch_ends(self, pauses_to_come: frozenset[PauseKind]) -> None:
        """``pauses_to_come`` follow its last step, also where that step's end did not know it to be the last."""
        self.wait_for_steps()

    def pause(self, kind: PauseKind) -> None:
        """What passed since the last step or pause was a pause of this kind."""
        raise NotImplementedError

    # --- the end ------------------------------------------------------------------------------------------------------

    def save_ledger(self, checkpoint_dir: Path) -> None:
        """Beside the checkpoint just written."""
        raise NotImplementedError

    def _write_ledger(self, folder: Path, ledger: Callable[[], Ledger | None], *, rank: int = 0) -> None:
        """Beside the checkpoint just written; the record says as much as the ledger does."""

        def write() -> None:
            found = ledger() if folder.is_dir() else None
            if found is not None:
                write_ledger(folder, found, rank=rank)

        self.record.write_what_waits(global_step=self._steps.last_step)
        self.record.flush()
        self._boundary.call("checkpoint ledger", write)

    def plan_changes(self, max_steps: int) -> None:
        """Training will end elsewhere than was said at its start."""
        self._plan = dataclasses.replace(self._plan, max_steps=max_steps if max_steps > 0 else None)

    def epoch_failed(self, error: BaseException) -> None:
        """``error`` leaves a forward or the epoch, and goes on to whom it belongs. Must not raise."""

    def epoch_left(self, error: BaseException) -> None:
        """``error``, a keyboard's too, leaves the epoch, or what comes before or after them. Must not raise."""
        self.epoch_failed(error)
        self._breaks_off(error)
        self.record.unlock()

    def _breaks_off(self, error: BaseException) -> None:
        """Nobody may be heard of this run again. Must not raise."""

    def left(self) -> None:
        """Training was left without a word: nothing of ours stays in the process but the record, for ``abandon``."""
        raise NotImplementedError

    def _interpreter_exits(self) -> None:
        """Training never ended in order."""
        raise NotImplementedError

    def end(self) -> None:
        """In order."""
        raise NotImplementedError

    def release(self) -> None:
        """Hooks, thread and file are gone. May be called at any time, more than once."""
        atexit.unregister(self._interpreter_exits)
        self._is_removed = lambda: False  # a run that has ended does not end again
        if self._watch is not None:
            self._watch.close()
        self._let_go_of_epochs()
        for let_go in self._releases():
            try:
                let_go()
            except Exception:
                _log.debug("ftcost: letting go failed", exc_info=True)

    def _let_go_of_epochs(self) -> None:
        methods, self._epochs = self._epochs, {}
        for method in methods.values():
            method.undo()

    def _releases(self) -> list[Callable[[], None]]:
        """How to let go of each thing that is held."""
        return [self.counters.detach, self.record.close]


def _telling_of_errors(
    told: weakref.WeakMethod[Callable[[BaseException], None]],
    look: weakref.WeakMethod[Callable[[], bool]],
    method: Callable[..., Any],
) -> Callable[..., Any]:
    """No event is fired for an exception, and who catches it may let it go before anything of ours is called again."""

    @functools.wraps(method)
    def telling(*args: Any, **kwargs: Any) -> Any:
        try:
            result = method(*args, **kwargs)
        except BaseException as error:
            epoch_left = told()
            if epoch_left is not None:
                epoch_left(error)
            raise
        if (look_if_removed := look()) is not None:
            look_if_removed()
        return result

    return telling
