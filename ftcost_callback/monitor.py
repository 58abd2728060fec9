"""``FTCostMonitor``: what :class:`FTCostCallback` measures, for a training loop of your own (plain torch, accelerate).

    with FTCostMonitor(model, optimizer, num_steps=1000, usd_per_gpu_hour=2.10) as monitor:
        for batch in monitor.watch(loader):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor.step(batch):  # the budget is spent
                break

The same recorder, run record, prediction and sinks. Tokens, micro-batches and expert load are seen in the model's own
forwards, so with gradient accumulation ``step`` still comes once for each ``optimizer.step()``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal, TypeVar

import torch
from torch import nn

from costmodel.errors import CostModelError
from costmodel.specs import GpuSpec
from ftcost_callback.arguments import (
    BillingStart,
    checked_settings,
    default_sinks,
    given_folder,
    given_sinks,
    is_whole,
    process_age_seconds,
)
from ftcost_callback.boundary import Boundary
from ftcost_callback.live_run import LiveRun
from ftcost_callback.out_of_memory import leaves_pause
from ftcost_callback.planned_tokens import planned_tokens
from ftcost_callback.rank_run import RankRun
from ftcost_callback.records import PauseKind, is_number
from ftcost_callback.resuming import loop_identity, loop_rank_identity
from ftcost_callback.run_file import read_ledger, run_file_path
from ftcost_callback.session_opening import Training
from ftcost_callback.session_plan import Plan, num_machines
from ftcost_callback.sinks.base import Sink
from ftcost_callback.training_watch import let_go_of_left_trainings

_log = logging.getLogger("ftcost_callback")

_MONITOR: Final = "monitor"  # the part that is everything
_PAUSES: Final = ("eval", "save", "log", "other")
_PRECISIONS: Final = ("no", "bf16", "fp16")

_Batch = TypeVar("_Batch")


class FTCostMonitor:
    """A context around a training loop; ``step`` after each optimizer step, ``pause`` around what is no training.

    ``optimizer``: one, or several; with it the optimizer's own time is told apart, and the prediction knows its memory.
    ``num_steps``: optimizer steps that will be done, or ``num_epochs`` over ``train_loader``; without either nothing is
    projected. ``train_loader``: read for batch size, lengths and padding, never iterated. ``batch_size``: rows of a
    micro-batch, if it is not the loader's. ``gradient_accumulation_steps``: micro-batches of a step. ``mixed_precision``:
    "bf16" or "fp16" under autocast. ``accelerator``: accelerate's, which knows the last two. ``max_length``: tokens a sample
    is cut at. ``eval_every``, ``save_every``: steps between evaluations and checkpoints that ``pause`` will be put around,
    for the projection. ``report_every_steps``: between reports to console and trackers.

    ``start_step``: steps done before, by an earlier process: the run that is recorded in ``output_dir`` goes on with another
    session, its time, tokens and dollars on board. ``resume_from``: where that record is not at hand, the checkpoint's
    folder, in which :meth:`save_ledger` left what the run had taken; it knows its step.

    All else as in :class:`FTCostCallback`. Raises :class:`CostModelError` for a wrong argument; after construction it only
    raises where it is entered a second time before it was left, and the loop's own exceptions pass through it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        num_steps: int | None = None,
        num_epochs: float | None = None,
        train_loader: Any = None,
        batch_size: int | None = None,
        gradient_accumulation_steps: int | None = None,
        mixed_precision: Literal["no", "bf16", "fp16"] | None = None,
        accelerator: Any = None,
        max_length: int | None = None,
        eval_every: int | None = None,
        save_every: int | None = None,
        report_every_steps: int = 10,
        start_step: int = 0,
        resume_from: str | os.PathLike[str] | None = None,
        usd_per_gpu_hour: float | None = None,
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
        profile_steps: tuple[int, int] | int | None = None,
        sample_period_seconds: float = 0.5,
        expert_load: bool = True,
        sinks: Sequence[Sink] | None = None,
        wandb_every: Literal["log", "step"] = "log",
        detail: Literal["default", "full"] = "default",
        peak_flops_per_second: float | None = None,
        gpu: str | Mapping[str, Any] | GpuSpec | None = None,
        output_dir: str | os.PathLike[str] = "trainer_output",
    ) -> None:
        given = locals()  # the arguments by name
        for name, value in (
            ("num_steps", num_steps),
            ("batch_size", batch_size),
            ("gradient_accumulation_steps", gradient_accumulation_steps),
            ("max_length", max_length),
            ("eval_every", eval_every),
            ("save_every", save_every),
            ("report_every_steps", report_every_steps),
        ):
            if value is not None and not is_whole(value, at_least=1):
                raise CostModelError(f"{name} must be a whole number from 1 on, got {value!r}")
        if num_epochs is not None and not (is_number(num_epochs) and num_epochs > 0):
            raise CostModelError(f"num_epochs must be a number above 0, got {num_epochs!r}")
        if not is_whole(start_step, at_least=0):
            raise CostModelError(f"start_step must be a whole number from 0 on, got {start_step!r}")
        self._resume_from = given_folder(resume_from, "resume_from") if resume_from is not None else None
        if self._resume_from is not None:
            start_step = _step_of_ledger(self._resume_from, start_step)
        if mixed_precision is not None and mixed_precision not in _PRECISIONS:
            raise CostModelError(f"mixed_precision must be one of {', '.join(_PRECISIONS)}, got {mixed_precision!r}")
        if not isinstance(model, nn.Module):
            raise CostModelError(f"model must be a torch module, got {type(model).__name__}")
        if accelerator is not None and not hasattr(accelerator, "process_index"):
            raise CostModelError(
                f"accelerator must be accelerate's Accelerator, got {accelerator!r}; leave it out without one"
            )
        self._settings = checked_settings(given)
        self._billing = BillingStart(billing_started_at)
        self._loop = _Loop(
            model=model,
            optimizers=_optimizers(optimizer),
            train_loader=train_loader,
            accelerator=accelerator,
            num_steps=num_steps,
            num_epochs=num_epochs,
            batch_size=batch_size,
            accumulation=gradient_accumulation_steps,
            mixed_precision=mixed_precision,
            max_length=max_length,
        )
        self._eval_every, self._save_every = eval_every, save_every
        self._report_every_steps = report_every_steps
        self._start_step = start_step
        self._sinks = given_sinks(sinks) if sinks is not None else default_sinks(detail)
        self._output_dir = given_folder(output_dir)
        self._clock: Callable[[], float] = time.monotonic
        self._wall_clock: Callable[[], float] = time.time
        self._boundary = Boundary()
        self._run: LiveRun | RankRun | None = None
        self._max_steps: int | None = None  # that training is taken to end at
        self._handles: list[Any] = []
        # Of the batches since the last step, where a loader is watched: their labels, and the forwards done before each.
        self._drawn: list[tuple[Any, int]] = []
        self._is_watching = False
        self._said_pause_in_step = self._is_entered = False
        self.global_step = start_step
        self.should_stop = False
        """The budget is spent (``stop_at_budget``): save and leave the loop."""

    def __enter__(self) -> FTCostMonitor:
        if self._run is not None:
            raise CostModelError("this monitor measures a loop already; leave its context first, or make another monitor")
        self._boundary = Boundary()
        self._boundary.on_failure(_MONITOR, self._release)
        self.global_step, self.should_stop = self._start_step, False
        self._is_entered = True
        self._boundary.call(_MONITOR, self._begin)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Writes the summary, whatever ended the loop; an exception goes on."""
        self._boundary.call(_MONITOR, lambda: self._end(error))
        self._release()

    def _begin(self) -> None:
        let_go_of_left_trainings()
        loop = self._loop
        apart = loop.launched_apart
        rank, world_size = apart if apart is not None else loop.rank_and_world_size
        self._max_steps = loop.max_steps
        if self._max_steps is not None and self._start_step > self._max_steps:
            self._ends_elsewhere(self._start_step)
        plan = Plan(
            max_steps=self._max_steps,
            eval_strategy="steps" if self._eval_every else "no",
            eval_steps=self._eval_every,
            save_strategy="steps" if self._save_every else "no",
            save_steps=self._save_every,
            logging_strategy="steps",
            logging_steps=self._report_every_steps,
            dataloader_num_workers=getattr(loop.train_loader, "num_workers", None),
            num_processes=world_size,
            num_devices=world_size,
            num_machines=num_machines(world_size),
            is_data_parallel=isinstance(loop.model, nn.DataParallel),
        )
        training = Training(
            model=loop.model,
            device=loop.device,
            steps_done=self._start_step,
            read_job=lambda: loop.job(gpu=self._settings.gpu),
            plan_tokens=lambda: planned_tokens(
                loop.train_loader,
                accumulation=loop.accumulation_steps,
                max_steps=plan.max_steps,
                num_processes=world_size,
                max_length=loop.max_length,
            ),
            forwards_are_micro_batches=True,
        )
        now = self._wall_clock()
        if rank != 0:
            self._run = rank_run = RankRun(
                self._settings,
                loop_rank_identity(
                    self._output_dir, rank=rank, from_step=self._start_step, checkpoint_dir=self._resume_from
                ),
                plan,
                self._boundary,
                rank=rank,
                output_dir=self._output_dir,
                process_started_at=now - process_age_seconds(now),
                clock=self._clock,
            )
            rank_run.begin(training)
        else:
            identity = loop_identity(
                self._output_dir,
                from_step=self._start_step,
                checkpoint_dir=self._resume_from,
                num_processes=world_size,
            )
            if apart is not None:
                identity = dataclasses.replace(identity, notes=(*identity.notes, _launched_apart_note(world_size)))
            self._run = live_run = LiveRun(
                self._settings,
                identity,
                plan,
                self._boundary,
                sinks=self._sinks,
                output_dir=self._output_dir,
                clock=self._clock,
            )
            startup_seconds, started_at = self._billing.seconds_until(now)
            live_run.begin(training, startup_seconds=startup_seconds, started_at=started_at)
            self.should_stop = live_run.is_over_budget
        self._boundary.call("optimizer hooks", self._watch_optimizers)
        self._next_step()

    def _watch_optimizers(self) -> None:
        for optimizer in self._loop.optimizers:
            inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
            if isinstance(inner, torch.optim.Optimizer):
                self._handles += [
                    inner.register_step_pre_hook(self._optimizer_begins),
                    inner.register_step_post_hook(self._optimizer_ends),
                ]

    def _optimizer_begins(self, *_: Any) -> None:
        run = self._run
        if run is not None:
            self._boundary.call(_MONITOR, run.optimizer_begins)

    def _optimizer_ends(self, *_: Any) -> None:
        run = self._run
        if run is not None:
            self._boundary.call(_MONITOR, run.optimizer_ends)

    def _next_step(self) -> None:
        """Where no loader is watched, a step begins when the one before it is over, and waits for its batch."""
        if self._run is not None and not self._is_watching:
            self._run.step_begins(awaits_batch=True)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def step(self, batch: Any = None) -> bool:
        """The optimizer has stepped. True: the budget is spent, leave the loop (:attr:`should_stop` stays true).

        ``batch``: the step's batch. Only its labels are read, for a model that is not given them; with several micro-batches
        :meth:`watch` the loader instead.
        """
        self.global_step += 1
        if not self._is_entered:
            self._is_entered = True
            _log.warning("ftcost: step() outside of the context measures nothing; put the loop inside `with monitor:`")
        self._boundary.call(_MONITOR, lambda: self._step_ends(batch))
        return self.should_stop

    def _step_ends(self, batch: Any) -> None:
        run = self._run
        if run is None:
            return
        drawn, self._drawn = self._drawn, []
        labels = _labels_of_used(drawn, run.num_forwards)
        if not self._is_watching and batch is not None and self._loop.accumulation_steps == 1:
            labels = [found for found in (_labels_of(batch),) if found is not None]
        if labels:
            run.labels_seen(labels)
        if not run.in_step:  # the loader is watched, and gave no batch
            run.step_begins()
        if self._max_steps is not None and self.global_step > self._max_steps:
            self._ends_elsewhere(self.global_step)
            run.plan_changes(0)
        to_come = self._pauses_to_come()
        self.should_stop = run.step_ends(self.global_step, pauses_to_come=to_come) or self.should_stop
        if "log" in to_come:
            run.pause("log")
        self._next_step()

    def _ends_elsewhere(self, step: int) -> None:
        """The plan does not hold: nobody knows where the loop ends, so that nothing is projected any more."""
        _log.warning(
            "ftcost: step %d is beyond the %d steps that num_steps or num_epochs make (of the whole run, those before "
            "start_step inside): nothing is projected; give the steps or epochs of the whole run",
            step,
            self._max_steps,
        )
        self._max_steps = None

    def _pauses_to_come(self) -> frozenset[PauseKind]:
        """What follows this step, by the loop's own word."""
        schedule: tuple[tuple[PauseKind, int | None], ...] = (
            ("log", self._report_every_steps),
            ("eval", self._eval_every),
            ("save", self._save_every),
        )
        return frozenset(kind for kind, every in schedule if every is not None and self.global_step % every == 0)

    def watch(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """The loader's batches, as they come; the time that the loop waits for them is told apart.

        Without it, what passes from one step's end to the next forward counts as waiting for data.
        """
        self._is_watching = True
        batches = iter(loader)
        try:
            while True:
                self._boundary.call(_MONITOR, self._fetch_begins)
                asked_at = self._clock()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                self._boundary.call(_MONITOR, functools.partial(self._fetched, batch, self._clock() - asked_at))
                yield batch
        finally:
            self._is_watching = False

    def _fetch_begins(self) -> None:
        if self._run is not None and self._run.in_step:
            self._run.micro_batch_ends()

    def _fetched(self, batch: Any, seconds: float) -> None:
        if self._run is None:
            return
        if self._run.in_step and self._run_has_forwards:
            self._run.waited_for_data(seconds)
        else:
            self._run.step_begins()
        labels = _labels_of(batch)
        if labels is not None:
            self._drawn.append((labels, self._run.num_forwards))

    @property
    def _run_has_forwards(self) -> bool:
        """Whether a part of the next step has been done."""
        return self._run is not None and self._run.in_step and self._run.any_forward

    @contextlib.contextmanager
    def pause(self, kind: PauseKind = "other") -> Iterator[None]:
        """``with monitor.pause("eval"):`` around what is no training: "eval", "save", "log" or "other".

        It is billed, and left out of speed. Raises :class:`CostModelError` for another kind.
        """
        if kind not in _PAUSES:
            raise CostModelError(f"pause takes one of {', '.join(_PAUSES)}, got {kind!r}")
        self._boundary.call(_MONITOR, self._pause_begins)
        try:
            yield
        except BaseException as error:
            leaves_pause(error, kind)
            raise
        finally:
            self._boundary.call(_MONITOR, lambda: self._pause_ends(kind))

    def _pause_begins(self) -> None:
        if self._run is not None and not self._run_has_forwards:
            self._run.pause("other")  # what the loop did since its last step

    def _pause_ends(self, kind: PauseKind) -> None:
        if self._run is None:
            return
        if self._run_has_forwards:
            if not self._said_pause_in_step:
                self._said_pause_in_step = True
                _log.warning("ftcost: a pause between a forward and its step() counts as a part of that step")
            return
        self._run.pause(kind)
        if kind == "save":
            self._run.save_ledger(self._own_folder)
        self._next_step()

    def save_ledger(self, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Beside the checkpoint just written: what the run has taken, for ``resume_from=`` on another machine.

        On every process. It is not needed where ``output_dir`` stays at hand.
        """
        folder = Path(given_folder(checkpoint_dir, "checkpoint_dir"))
        if not folder.is_dir():
            _log.warning("ftcost: there is no folder %s, so no ledger is written; save the checkpoint first", folder)
        elif (run := self._run) is not None:
            self._boundary.call(_MONITOR, lambda: run.save_ledger(folder))

    @property
    def _own_folder(self) -> Path:
        return run_file_path(self._output_dir).parent

    # --- the end ------------------------------------------------------------------------------------------------------

    def _end(self, error: BaseException | None) -> None:
        run = self._run
        if run is None:
            return
        if isinstance(run, LiveRun):
            if error is not None:
                run.failed(error)
            run.end(error=error)
        else:
            run.end()
        run.save_ledger(self._own_folder)

    def _release(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        run, self._run = self._run, None
        if run is not None:
            run.release()


# --- what the loop trains ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loop:
    """The live objects of a loop, and what its owner says of it."""

    model: nn.Module
    optimizers: tuple[Any, ...]
    train_loader: Any
    accelerator: Any
    num_steps: int | None
    num_epochs: float | None
    batch_size: int | None
    accumulation: int | None
    mixed_precision: str | None
    max_length: int | None

    @property
    def device(self) -> torch.device:
        if self.accelerator is not None:
            return torch.device(self.accelerator.device)
        parameter = next(self.model.parameters(), None)
        return parameter.device if parameter is not None else torch.device("cpu")

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        if self.accelerator is not None:
            return int(self.accelerator.process_index), int(self.accelerator.num_processes)
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return 0, 1

    @property
    def launched_apart(self) -> tuple[int, int] | None:
        """(Rank, processes) of torch's launcher, where nothing joins the processes: each trains a model of its own."""
        if self.rank_and_world_size[1] > 1:
            return None
        try:  # a cluster sets the other two for machines; the third is torchrun's and accelerate's
            rank, world_size, _ = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        except (KeyError, ValueError):
            return None
        return (rank, world_size) if 0 <= rank < world_size and world_size > 1 else None

    @property
    def accumulation_steps(self) -> int:
        if self.accumulation is not None:
            return self.accumulation
        return int(getattr(self.accelerator, "gradient_accumulation_steps", 1) or 1)

    @property
    def max_steps(self) -> int | None:
        if self.num_steps is not None:
            return self.num_steps
        try:
            num_batches = len(self.train_loader)
        except TypeError:
            return None  # no loader, or data without a length
        if self.num_epochs is None:
            return None
        # The last, shorter group of each epoch is a step too, as in accelerate's accumulate().
        return math.ceil(self.num_epochs * math.ceil(num_batches / self.accumulation_steps))

    @property
    def rows(self) -> int | None:
        if self.batch_size is not None:
            return self.batch_size
        for holder in (self.train_loader, getattr(self.train_loader, "batch_sampler", None)):
            size = getattr(holder, "batch_size", None)
            if isinstance(size, int):
                return size
        return None

    def job(self, *, gpu: Any) -> Mapping[str, Any]:
        """Raises :class:`CostModelError` where something that decides the cost is not known."""
        from ftcost_callback.trainer_adapter import job_from_objects

        rows, max_steps = self.rows, self.max_steps
        if rows is None:
            raise CostModelError("the batch size is not known; give train_loader= or batch_size=")
        precision = self.mixed_precision or getattr(self.accelerator, "mixed_precision", None)
        _, world_size = self.rank_and_world_size
        arguments = SimpleNamespace(  # what the adapter reads of TrainingArguments
            device=self.device,
            world_size=world_size,
            n_gpu=1,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=self.accumulation_steps,
            bf16=precision == "bf16",
            fp16=precision == "fp16",
            torch_compile=any(getattr(each, "_compiled_call_impl", None) is not None for each in self.model.modules())
            or type(self.model).__name__ == "OptimizedModule",
            optim="adamw_torch",
            eval_strategy="no",
            save_strategy="no",
            save_only_model=False,
            max_steps=max_steps or -1,
            num_train_epochs=self.num_epochs or 1.0,
            max_length=self.max_length,
            dataloader_drop_last=bool(getattr(self.train_loader, "drop_last", False)),
        )
        job = dict(
            job_from_objects(
                model=self.model,
                args=arguments,
                optimizer=self.optimizers[0] if self.optimizers else None,
                train_dataset=getattr(self.train_loader, "dataset", None),
                data_collator=getattr(self.train_loader, "collate_fn", None),
                gpu=gpu,
                framework="transformers",
            )
        )
        if not self.optimizers:
            del job["optim"]  # the framework's default, which the answer then names
        if max_steps is None and self.num_epochs is None:
            del job["num_train_epochs"]
        return job


def _launched_apart_note(num_processes: int) -> str:
    return (
        f"{num_processes} processes were launched (WORLD_SIZE) and nothing joins them: each trains a model of its own on "
        "all of the data, and counts in a file of its own; prepare the model with accelerate or wrap it in "
        "DistributedDataParallel (on a CPU, accelerate joins them with ACCELERATE_USE_CPU=true)"
    )


def _step_of_ledger(folder: str | os.PathLike[str], start_step: int) -> int:
    """Raises :class:`CostModelError` where there is none, or it is of another step."""
    ledger = read_ledger(folder)
    if ledger is None:
        raise CostModelError(
            f"resume_from: there is no ledger of ours in {folder} (monitor.save_ledger writes one beside a checkpoint); "
            "give start_step= instead to go on with the run recorded in output_dir"
        )
    if start_step not in (0, ledger.global_step):
        raise CostModelError(
            f"start_step is {start_step}, and the ledger in {folder} is of step {ledger.global_step}; leave one of them out"
        )
    return ledger.global_step


def _optimizers(given: Any) -> tuple[Any, ...]:
    return () if given is None else tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _labels_of_used(drawn: Sequence[tuple[Any, int]], num_forwards: int) -> list[Any]:
    """Without those of batches that the loop skipped: more were drawn than forwards done, and none was done before the next
    was drawn. Empty where the batches were drawn ahead, so that nobody can say which were used."""
    if len(drawn) <= num_forwards:
        return [labels for labels, _ in drawn]
    done_after = [done for _, done in drawn[1:]] + [num_forwards]
    used = [labels for (labels, done), after in zip(drawn, done_after, strict=True) if after > done]
    return used if len(used) == num_forwards else []


def _labels_of(batch: Any) -> Any:
    """The labels of a batch that is a mapping; ``None`` for any other."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None and not isinstance(batch, Mapping) and hasattr(batch, "data") and isinstance(batch.data, Mapping):
        labels = batch.data.get("labels")  # transformers' BatchEncoding
    return labels if isinstance(labels, torch.Tensor) else None
