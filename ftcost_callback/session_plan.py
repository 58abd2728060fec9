"""What is settled when a session begins: the callback's settings, which run it belongs to, what the Trainer will do."""

from __future__ import annotations

import importlib.metadata
import math
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from costmodel.framework_defaults import evaluates_at_the_end
from costmodel.specs import Price
from ftcost_callback.live_model import parallel_size
from ftcost_callback.projection import PausePlan, num_remaining_pauses
from ftcost_callback.recorder import Pace, Totals
from ftcost_callback.records import PauseKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of callback and monitor, checked. Their defaults are these (a test holds the signatures to it)."""

    price: Price | None = None  # given; a cloud's is looked up when the device is known
    cloud: str | None = None
    tier: str | None = None
    budget_usd: float | None = None
    budget_hours: float | None = None
    stop_at_budget: bool = False
    window_steps: int = 50
    skip_first_steps: int = 1
    predict: bool = True
    calibration: Any = None
    dry_run_steps: int | None = None
    profile_steps: tuple[int, int] | None = None  # the first and the last, both inside
    sample_period_seconds: float = 0.5
    expert_load: bool = True
    wandb_every: Literal["log", "step"] = "log"
    peak_flops_per_second: float | None = None
    gpu: str | Mapping[str, Any] | None = None  # catalogue name or described device, in place of the recognised one

    def budget_row(self) -> dict[str, Any] | None:
        """For the session row; ``None`` without a budget."""
        if self.budget_usd is None and self.budget_hours is None:
            return None
        return {"usd": self.budget_usd, "hours": self.budget_hours, "stop_at_budget": self.stop_at_budget}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which run this session belongs to, and what came before it."""

    run_id: str
    session_index: int = 0
    resumed_from_step: int | None = None
    earlier: Totals | None = None
    earlier_spent_usd: float | None = None
    earlier_spent_seconds: float | None = None  # of the run, that those dollars are for: later ones had no price
    earlier_energy_joules: float | None = None
    furthest_step: int = 0
    crossed_thresholds: tuple[str, ...] = ()
    earlier_pace: Pace | None = None  # of the session before
    notes: tuple[str, ...] = ()


def new_run_id() -> str:
    """From the operating system's entropy: Python's and torch's random states stay as they are."""
    return uuid.uuid4().hex[:12]


def num_machines(num_processes: int) -> int:
    """Machines of a launch, by what torchrun and ``accelerate launch`` tell each process; 1 where nobody says."""
    try:
        on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    except ValueError:
        return 1
    return math.ceil(num_processes / on_this_machine) if 0 < on_this_machine <= num_processes else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the training will do. Strategies are transformers' names: "no" (or not known), "steps", "epoch"."""

    max_steps: int | None = None
    steps_per_epoch: int | None = None
    epochs_per_step: float | None = None  # of a whole step: the last one of an epoch may be of fewer batches
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_delay: float = 0.0  # in what eval_strategy counts
    eval_on_start: bool = False
    evaluates_at_the_end: bool = True
    save_strategy: str = "no"
    save_steps: float | None = None
    logging_strategy: str = "no"
    logging_steps: float | None = None
    dataloader_num_workers: int | None = None
    num_processes: int = 1
    num_devices: int = 1
    num_machines: int = 1  # the devices are spread over; each is billed whole
    tensor_parallel_size: int = 1  # processes that are given the same batch
    is_data_parallel: bool = False  # torch's DataParallel: hooks would run in several threads

    @classmethod
    def of(cls, args: Any, state: Any, *, train_dataloader: Any = None, tensor_parallel_size: int = 1) -> Plan:
        """From a Trainer's arguments, state and loader, at the start of a session."""
        num_batches = _num_batches(train_dataloader, args)
        accumulation = args.gradient_accumulation_steps
        return cls(
            max_steps=state.max_steps if state.max_steps and state.max_steps > 0 else None,
            steps_per_epoch=math.ceil(num_batches / accumulation) if num_batches else None,
            epochs_per_step=min(1.0, accumulation / num_batches) if num_batches else None,
            eval_strategy=_strategy(args.eval_strategy),
            eval_steps=state.eval_steps,
            eval_delay=float(getattr(args, "eval_delay", None) or 0.0),
            eval_on_start=bool(getattr(args, "eval_on_start", False)),
            evaluates_at_the_end=evaluates_at_the_end("transformers", importlib.metadata.version("transformers")),
            save_strategy=_strategy(args.save_strategy),
            save_steps=state.save_steps,
            logging_strategy=_strategy(args.logging_strategy),
            logging_steps=state.logging_steps,
            dataloader_num_workers=args.dataloader_num_workers,
            num_processes=args.world_size,
            num_devices=args.world_size * max(1, args.n_gpu),
            num_machines=num_machines(args.world_size),
            tensor_parallel_size=tensor_parallel_size,
            is_data_parallel=args.n_gpu > 1,
        )

    @property
    def pauses_by_epoch(self) -> frozenset[PauseKind]:
        """What comes when an epoch ends, which the Trainer says only then."""
        strategies: tuple[tuple[PauseKind, str], ...] = (
            ("log", self.logging_strategy),
            ("eval", self.eval_strategy),
            ("save", self.save_strategy),
        )
        return frozenset(kind for kind, strategy in strategies if strategy == "epoch")

    @property
    def devices_per_machine(self) -> int:
        return math.ceil(self.num_devices / self.num_machines)

    @property
    def num_replicas(self) -> int:
        """Processes that are each given a batch of their own."""
        return max(1, self.num_processes // max(1, self.tensor_parallel_size))

    def num_remaining(self, kind: PauseKind, steps_done: int) -> int:
        """How many pauses of this kind come after ``steps_done``."""
        strategy, every = {
            "eval": (self.eval_strategy, self.eval_steps),
            "save": (self.save_strategy, self.save_steps),
            "log": (self.logging_strategy, self.logging_steps),
        }.get(kind, ("no", None))
        return num_remaining_pauses(
            strategy,
            every_steps=every,
            steps_done=steps_done,
            max_steps=self.max_steps,
            steps_per_epoch=self.steps_per_epoch,
            epochs_per_step=self.epochs_per_step,
            also_at_the_end=self.evaluates_at_the_end if kind == "eval" else kind == "save",
            delay=self.eval_delay if kind == "eval" else 0.0,
        )

    def pause_plan(
        self,
        kind: PauseKind,
        *,
        steps_done: int,
        is_pending: bool,
        measured_seconds: Iterable[float],
        predicted_total_seconds: float | None,
    ) -> PausePlan:
        """``is_pending``: the pause of the step just done is still to come. The prediction is for all of its kind."""
        num_planned = self.num_remaining(kind, 0) + (kind == "eval" and self.eval_on_start)
        return PausePlan(
            kind=kind,
            num_remaining=self.num_remaining(kind, steps_done) + is_pending,
            measured_seconds=tuple(measured_seconds),
            predicted_seconds=predicted_total_seconds / num_planned if predicted_total_seconds and num_planned else None,
        )


def _num_batches(loader: Any, args: Any) -> int | None:
    """Of an epoch, on one process; ``None`` for data without a length.

    Source: transformers 5.24 ``Trainer.set_initial_training_values``, whose loader has one for each of the processes that
    share a sequence.
    """
    try:
        return len(loader) * parallel_size(None, args, "sp_size") or None
    except (TypeError, AttributeError, NotImplementedError):
        return None


def _strategy(value: Any) -> str:
    return str(getattr(value, "value", value))
