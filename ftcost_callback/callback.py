"""``FTCostCallback``: maps the Trainer's events onto a :class:`LiveRun`. No arithmetic; one error boundary.

The order of events is the Trainer's (transformers 5.24): the batches of a step are fetched before ``on_step_begin``;
``on_step_end`` comes before ``on_log``, the evaluation with its own ``on_log`` and ``on_evaluate``, and ``on_save``.
No event is fired for an exception, and ``auto_find_batch_size`` begins again without an end.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import inspect
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from transformers import TrainerCallback

from costmodel.errors import CostModelError
from costmodel.specs import GpuSpec
from ftcost_callback import trainer_adapter
from ftcost_callback.arguments import (
    BillingStart,
    checked_settings,
    default_sinks,
    given_folder,
    given_sinks,
    process_age_seconds,
)
from ftcost_callback.boundary import Boundary
from ftcost_callback.dry_run import put_longest_first
from ftcost_callback.live_model import parallel_size
from ftcost_callback.live_run import LiveRun
from ftcost_callback.planned_tokens import planned_tokens
from ftcost_callback.rank_run import RankRun
from ftcost_callback.records import PauseKind
from ftcost_callback.resuming import identity_after, rank_identity_after, with_tokens_of_ranks_gone, with_unsaved_tail
from ftcost_callback.rollouts import EVALUATIONS, MethodWatch
from ftcost_callback.run_file import read_ledger, run_file_path
from ftcost_callback.session_opening import Training
from ftcost_callback.session_plan import Identity, Plan, new_run_id
from ftcost_callback.sinks.base import Sink
from ftcost_callback.sinks.routes import tell_who_else_writes, trackers_without_figures
from ftcost_callback.training_watch import let_go_of_left_trainings
from ftcost_callback.wandb_guard import open_run_or_offline

_log = logging.getLogger("ftcost_callback")

_CALLBACK: Final = "callback"  # the part that is everything

# Which callback measures a model: a second one in the same training does nothing.
_owners: weakref.WeakKeyDictionary[Any, FTCostCallback] = weakref.WeakKeyDictionary()

_Event = TypeVar("_Event", bound=Callable[..., None])


def _guarded(event: _Event) -> _Event:
    """The boundary: whatever fails in an event of ours, training goes on as if we were not there."""

    @functools.wraps(event)
    def guarded(self: FTCostCallback, *args: Any, **kwargs: Any) -> None:
        if _CALLBACK in self._boundary.off:
            return
        if self._inner_state is not None and any(each is self._inner_state for each in args[1:2]):
            return  # of a training inside the one that is measured
        try:
            event(self, *args, **kwargs)
        except Exception as error:
            self._boundary.failed(_CALLBACK, error)

    return guarded  # type: ignore[return-value]


def _telling(name: str) -> Callable[..., None]:
    """An event of each step, which only tells the run: ``_guarded``, with as few calls as can be."""

    def event(self: FTCostCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self._run  # None once the boundary has switched everything off
        if run is None or state is self._inner_state:
            return
        try:
            getattr(run, name)()
        except Exception as error:
            self._boundary.failed(_CALLBACK, error)

    return event


class FTCostCallback(TrainerCallback):
    """Measures what a training run costs, and holds it against the estimate.

    ``usd_per_gpu_hour``, or ``cloud`` with ``tier``: the price; without one (nor ``FTCOST_USD_PER_GPU_HOUR``), hours
    only. ``budget_usd``, ``budget_hours``: warn at 50, 80 and 100 % and when the projection exceeds it;
    ``stop_at_budget``: save and stop at 100 %. ``billing_started_at``: when the machine's bill began (ISO 8601, epoch
    seconds or ``datetime``; also ``FTCOST_BILLING_STARTED_AT``); default: the start of this process.
    ``window_steps``: steps that count as recent. ``skip_first_steps``: steps of each session left out of rates.
    ``dry_run_steps``: train so many steps (20, say) with the longest batch first, print peak memory and the whole run's
    projected total, and stop. ``profile_steps``: (first, last), such as
    (20, 25): put those steps under ``torch.profiler`` and record where their seconds go, by layer type and operator; they
    are left out of speed and projection. ``wandb_every``: "log" or "step". ``gpu``: a catalogue name, or a
    described device (``"probe"``: what ``ftcost probe`` stored), in place of what is recognised. ``output_dir``: where
    ``_ftcost/run.jsonl`` goes, if not the Trainer's. ``wandb_guard``: open the W&B run ourselves, offline if its server
    cannot be reached, so that this cannot end training. ``sinks``: in place of console and W&B.
    ``detail``: "default", about a dozen keys in a tracker, or "full", all of them. ``predict``: whether to estimate the job
    and compare. ``calibration``: a file of ``ftcost calibrate``, its content, or "auto". ``expert_load``: count the tokens
    of each expert. ``peak_flops_per_second``: the device's dense peak for the MFU, where its card is not known.
    ``sample_period_seconds``: between two looks at the GPU.

    Raises :class:`CostModelError` for a wrong argument; after construction it never raises.
    """

    def __init__(
        self,
        usd_per_gpu_hour: float | None = None,
        *,
        cloud: str | None = None,
        tier: Literal["on_demand", "spot", "reserved", "community"] | None = None,
        budget_usd: float | None = None,
        budget_hours: float | None = None,
        stop_at_budget: bool = False,
        billing_started_at: str | float | datetime.datetime | None = None,
        window_steps: int = 50,
        skip_first_steps: int = 1,
        predict: bool = True,
        calibration: Any = None,
        dry_run_steps: int | None = None,
        profile_steps: tuple[int, int] | int | None = None,
        sample_period_seconds: float = 0.5,
        expert_load: bool = True,
        sinks: Sequence[Sink] | None = None,
        wandb_every: Literal["log", "step"] = "log",
        wandb_guard: bool = False,
        detail: Literal["default", "full"] = "default",
        peak_flops_per_second: float | None = None,
        gpu: str | Mapping[str, Any] | GpuSpec | None = None,
        output_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        given = locals()  # the arguments by name
        self._settings = checked_settings(given)
        self._billing = BillingStart(billing_started_at)
        self._sinks: list[Sink] = given_sinks(sinks) if sinks is not None else default_sinks(detail)
        self._wandb_guard = wandb_guard
        self._output_dir = given_folder(output_dir) if output_dir is not None else None
        self._clock: Callable[[], float] = time.monotonic
        self._wall_clock: Callable[[], float] = time.time
        self._boundary = Boundary()
        self._run: LiveRun | RankRun | None = None
        self._wrapped: list[MethodWatch] = []
        self._state: Any = None  # of the training this callback is in
        self._inner_state: Any = None  # of a training inside this one, which is not measured
        self._begun_at_step = 0
        self._max_steps: int | None = None  # by the Trainer's state, which others may change while it trains
        self._by_epoch: frozenset[PauseKind] = frozenset()  # what follows each epoch's last step
        self._train_batch_size: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy, made while training or not, begins with no training of its own."""
        at_rest: dict[str, Any] = {
            "_run": None,
            "_wrapped": [],
            "_state": None,
            "_inner_state": None,
            "_begun_at_step": 0,
            "_train_batch_size": None,
        }
        return vars(self) | at_rest | {"_boundary": Boundary()}

    @property
    def sinks(self) -> list[Sink]:
        """Where reports go, from the next training on."""
        return self._sinks

    def report_last_steps(self) -> None:
        """The Trainer makes its last log: the report of the steps since the one before belongs to it. Must not raise."""
        run = self._run
        if isinstance(run, LiveRun) and not run.in_step:
            self._boundary.call("report", run.report_last_steps)

    @_guarded
    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        let_go_of_left_trainings()
        # Before on_train_begin, where transformers' own W&B callback comes first.
        if self._wandb_guard and args.process_index == 0:
            self._boundary.call("W&B guard", lambda: open_run_or_offline(args))

    # --- begin and end ------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_inside_another():
            self._inner_state = state
            _log.warning(
                "ftcost: this callback measures the training around this one; give the inner one a callback of its own"
            )
            return
        # What failed in an earlier training is tried again.
        self._boundary = Boundary()
        self._boundary.on_failure(_CALLBACK, self._release)
        self._begin(args, state, **kwargs)

    def _is_inside_another(self) -> bool:
        run = self._run
        return run is not None and bool(self._boundary.call("nested training", lambda: run.holds_another(_trainer())))

    @_guarded
    def _begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        let_go_of_left_trainings()
        shrunk = (
            args.auto_find_batch_size
            and self._train_batch_size is not None
            and state.train_batch_size != self._train_batch_size
        )
        before, self._run = self._run, None
        self._unwrap()
        same_run = before.abandon(retried_with=state.train_batch_size if shrunk else None) if before is not None else None
        self._state, self._begun_at_step, self._max_steps = state, state.global_step, state.max_steps
        model = kwargs["model"]
        owner = _owners.get(model)
        if owner is not None and owner is not self and owner._state is state:
            _log.warning("ftcost: there are two FTCostCallbacks in this training; this one does nothing")
            return
        order_note = None
        if self._settings.dry_run_steps is not None:  # on every process, so that their batches belong together
            order_note = self._order_batches(args, state, kwargs.get("train_dataloader"))
        if args.process_index == 0 and not state.is_world_process_zero:
            return  # several processes have this index (SageMaker's model parallelism), and one of them is the main one
        if owner is not None and owner is not self:
            owner._release()  # left over from a training that was broken off
        _owners[model] = self
        output_dir = self._output_dir if self._output_dir is not None else _folder_of_training(args)
        self._train_batch_size = state.train_batch_size
        plan = Plan.of(
            args,
            state,
            train_dataloader=kwargs.get("train_dataloader"),
            tensor_parallel_size=parallel_size(model, args, "tp_size"),
        )
        self._by_epoch = plan.pauses_by_epoch
        if not state.is_world_process_zero:
            identity = same_run if same_run is not None and shrunk else _rank_identity(args, state, output_dir)
            now = self._wall_clock()
            self._run = rank_run = RankRun(
                self._settings,
                identity,
                plan,
                self._boundary,
                rank=args.process_index,
                output_dir=output_dir,
                process_started_at=now - process_age_seconds(now),
                clock=self._clock,
            )
            rank_run.begin(Training(model=model, device=args.device, steps_done=state.global_step))
            self._watch_trainer(rank_run)
            return
        identity = same_run if same_run is not None and shrunk else self._identity(args, state, output_dir)
        now = self._wall_clock()
        startup_seconds, started_at = (0.0, now) if identity is same_run else self._billing.seconds_until(now)
        if missing := trackers_without_figures(args.report_to, self._sinks):
            note = f"{', '.join(missing)}: no figures of ours; ftcost_callback.attach(trainer) brings the main ones there"
            identity = dataclasses.replace(identity, notes=(*identity.notes, note))
        if (order := trainer_adapter.unmodelled_order(args)) is not None:
            identity = dataclasses.replace(identity, notes=(*identity.notes, order))
        callbacks = getattr(getattr(_trainer(), "callback_handler", None), "callbacks", ())
        self._boundary.call("other trackers", lambda: tell_who_else_writes(self._sinks, callbacks, self))
        self._run = live_run = LiveRun(
            self._settings,
            identity,
            plan,
            self._boundary,
            sinks=self._sinks,
            output_dir=output_dir,
            clock=self._clock,
            order_note=order_note,
        )
        loader, gpu = kwargs.get("train_dataloader"), self._settings.gpu
        accumulation, num_processes = args.gradient_accumulation_steps, args.world_size
        training = Training(
            model=model,
            device=args.device,
            steps_done=state.global_step,
            plan_tokens=lambda: planned_tokens(
                loader, accumulation=accumulation, max_steps=plan.max_steps, num_processes=num_processes
            ),
            read_job=lambda: trainer_adapter.job_from_objects(
                model=model,
                args=args,
                state=state,
                optimizer=kwargs.get("optimizer"),
                train_dataset=getattr(loader, "dataset", None),
                eval_dataset=_eval_dataset(),
                processing_class=kwargs.get("processing_class"),
                data_collator=getattr(loader, "collate_fn", None),
                gpu=gpu,
            ),
        )
        live_run.begin(training, startup_seconds=startup_seconds, started_at=started_at)
        self._watch_trainer(live_run)

    def _watch_trainer(self, run: LiveRun | RankRun) -> None:
        """Whether it still trains and tells us so, and where it does something else than that."""
        trainer = _trainer()
        if trainer is None:
            return
        self._boundary.call("training watch", lambda: run.watch_training(trainer, is_removed=_removal_of(self, trainer)))
        rollouts = MethodWatch(run.rollout_begins, run.rollout_ends)
        evaluations = MethodWatch(run.evaluation_begins, run.evaluation_ends, EVALUATIONS)
        self._wrapped = [rollouts, evaluations]
        self._boundary.call("rollouts", lambda: rollouts.attach(trainer))
        self._boundary.call("evaluations", lambda: evaluations.attach(trainer))

    def _unwrap(self) -> None:
        wrapped, self._wrapped = self._wrapped, []
        for each in wrapped:
            each.detach()

    def _order_batches(self, args: Any, state: Any, loader: Any) -> str | None:
        try:
            return put_longest_first(
                loader,
                accumulation=args.gradient_accumulation_steps,
                num_processes=args.world_size,
                resumes=state.global_step > 0,
            )
        except Exception as error:
            self._boundary.failed("order of the dry run", error)
            return "the batches come in their usual order"

    @_guarded
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run, self._run = self._run, None
        self._unwrap()
        self._state = self._train_batch_size = None
        if run is not None:
            self._look_at_max_steps(run, state)
            try:
                run.end()
            finally:
                run.release()

    def _release(self) -> None:
        run, self._run = self._run, None
        self._unwrap()
        if run is not None:
            run.release()

    def _identity(self, args: Any, state: Any, output_dir: str | os.PathLike[str]) -> Identity:
        """Which run this is: the one whose checkpoint is resumed, or a new one."""
        if state.global_step == 0:
            return Identity(run_id=new_run_id())
        why = "whose checkpoint holds no ledger of ours"
        for folder in _checkpoint_candidates(args, state):
            try:
                ledger = read_ledger(folder)
            except CostModelError as error:
                why = str(error)
                continue
            if ledger is None or ledger.global_step != state.global_step:
                continue
            identity = identity_after(ledger, from_step=state.global_step)
            identity = with_unsaved_tail(identity, run_file_path(output_dir))
            return with_tokens_of_ranks_gone(identity, folder, num_processes=args.world_size)
        note = f"resumed from step {state.global_step}, {why}: time, tokens and dollars begin here"
        _log.warning("ftcost: %s", note)
        return Identity(run_id=new_run_id(), resumed_from_step=state.global_step, notes=(note,))

    @_guarded
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run is not None:
            self._run.epoch_begins()

    # --- steps --------------------------------------------------------------------------------------------------------

    on_step_begin = _telling("step_begins")
    on_substep_end = _telling("micro_batch_ends")
    on_pre_optimizer_step = _telling("optimizer_begins")
    on_optimizer_step = _telling("optimizer_ends")

    @_guarded
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Every process counts the same steps, so a dry run stops them all at one.
        dry_run_steps = self._settings.dry_run_steps
        if dry_run_steps is not None and state.global_step - self._begun_at_step >= dry_run_steps:
            control.should_training_stop = True
        run = self._run
        if run is None:
            return
        if state.max_steps != self._max_steps:
            self._look_at_max_steps(run, state)
        to_come = _pauses_to_come(control)
        if self._by_epoch:
            to_come |= _pauses_of_epoch(self._by_epoch, args, state, control)
        if run.step_ends(state.global_step, pauses_to_come=to_come):
            control.should_save = control.should_training_stop = True

    def _look_at_max_steps(self, run: LiveRun | RankRun, state: Any) -> None:
        if state.max_steps != self._max_steps:
            self._max_steps = state.max_steps
            run.plan_changes(state.max_steps)

    @_guarded
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run is not None and (to_come := _pauses_to_come(control)):
            self._run.epoch_ends(to_come)

    # --- pauses -------------------------------------------------------------------------------------------------------

    @_guarded
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        # An evaluation and the end of training log their "*_runtime": those belong to the pause they end.
        ends_something_else = any(key.endswith("_runtime") for key in logs or ())
        if self._run is None or self._run.in_step:
            return
        self._run.trainer_logged(logs or {})
        if not ends_something_else:
            self._run.pause("log")

    @_guarded
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run is not None and not self._run.in_step:
            self._run.pause("eval")

    @_guarded
    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if self._run is not None and not self._run.in_step:
            self._run.pause("eval")

    @_guarded
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run is not None and not self._run.in_step:
            self._run.pause("save")
            self._run.save_ledger(Path(_folder_of_training(args)) / f"checkpoint-{state.global_step}")


_NO_PAUSES: Final[frozenset[PauseKind]] = frozenset()


def _pauses_to_come(control: Any) -> frozenset[PauseKind]:
    if not (control.should_log or control.should_evaluate or control.should_save):
        return _NO_PAUSES
    flags: tuple[tuple[PauseKind, bool], ...] = (
        ("log", control.should_log),
        ("eval", control.should_evaluate),
        ("save", control.should_save),
    )
    return frozenset(kind for kind, is_set in flags if is_set)


def _pauses_of_epoch(by_epoch: frozenset[PauseKind], args: Any, state: Any, control: Any) -> frozenset[PauseKind]:
    """Those of ``by_epoch`` that follow the step just done: it is the last of its epoch, or of the training."""
    epoch = state.epoch if state.epoch is not None else 0.5
    if not (control.should_training_stop or control.should_epoch_stop or epoch % 1 == 0):
        return frozenset()
    return by_epoch if args.eval_delay <= epoch else by_epoch - {"eval"}


def _training_loop_locals() -> Mapping[str, Any]:
    """The local variables of the Trainer's own training loop, which hands its callbacks neither itself nor its arguments."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_inner_training_loop":
        frame = frame.f_back
    return frame.f_locals if frame is not None else {}


def _eval_dataset() -> Any:
    """What the Trainer will evaluate on. Its loader, which callbacks are handed, is only made at the first evaluation."""
    return getattr(_trainer(), "eval_dataset", None)


def _trainer() -> Any:
    """The Trainer whose training loop this is."""
    return _training_loop_locals().get("self")


def _removal_of(callback: FTCostCallback, trainer: Any) -> Callable[[], bool]:
    """Whether ``callback`` is no longer among those of ``trainer``, and has let go of it; for one that was never among them,
    and is told in another way, never."""
    ours, its = weakref.ref(callback), weakref.ref(trainer)

    def is_removed() -> bool:
        callback, trainer = ours(), its()
        if callback is None or trainer is None:
            return False
        if any(each is callback for each in trainer.callback_handler.callbacks):
            return False
        callback._unwrap()
        callback._run = callback._state = None
        return True

    is_among_them = any(each is callback for each in trainer.callback_handler.callbacks)
    return is_removed if is_among_them else lambda: False


def _folder_of_training(args: Any) -> str:
    """Where the Trainer puts its checkpoints: ``output_dir``, or a trial's own folder in a hyperparameter search."""
    folder = args.output_dir
    if (trial := _training_loop_locals().get("trial")) is not None:
        try:
            folder = _trainer()._get_output_dir(trial)
        except Exception:  # not public, and it asks the search's own library
            _log.debug("ftcost: the trial's own folder is not known", exc_info=True)
    return str(folder or "trainer_output")


def _checkpoint_candidates(args: Any, state: Any) -> list[Path]:
    """Folders the Trainer may have resumed from, the surest first.

    The path given to ``train(resume_from_checkpoint=...)`` is kept only in the training loop's own frame; without it, totals
    would not survive a move of the checkpoint to another folder.
    """
    candidates: list[Any] = [_training_loop_locals().get("resume_from_checkpoint")]
    candidates += [args.resume_from_checkpoint, Path(_folder_of_training(args)) / f"checkpoint-{state.global_step}"]
    return [Path(each) for each in candidates if isinstance(each, (str, os.PathLike)) and str(each)]


def _rank_identity(args: Any, state: Any, output_dir: str | os.PathLike[str]) -> Identity:
    """What this process, which is not the main one, had counted before; which run it was is read from the main record."""
    rank = args.process_index
    for folder in _checkpoint_candidates(args, state) if state.global_step else ():
        try:
            ledger = read_ledger(folder, rank=rank)
        except CostModelError:
            continue
        if ledger is None or ledger.global_step != state.global_step:
            continue
        return rank_identity_after(ledger, rank, run_file_path(output_dir))
    return Identity(run_id="")
