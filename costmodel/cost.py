"""From one step to the run: steps, evaluations, saves, start-up -> seconds -> dollars."""

from __future__ import annotations

import math
from dataclasses import dataclass

from costmodel import constants as c
from costmodel.defaults import ResolvedJob
from costmodel.errors import CostModelError
from costmodel.framework_defaults import evaluates_at_the_end, transformers_major
from costmodel.held_memory import held_bytes
from costmodel.lengths import BatchTokens
from costmodel.model_spec import ModelSpec
from costmodel.price_catalog import bill_usd_per_hour
from costmodel.specs import Price
from costmodel.step_time import StepTime
from costmodel.units import SECONDS_PER_HOUR


@dataclass(frozen=True, slots=True)
class RunLength:
    """``num_epochs`` ``None``: unknown, and so is what happens once an epoch."""

    num_steps: int
    num_micro_batches: float  # on one GPU
    num_epochs: float | None


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often each thing happens in the run."""

    num_steps: int
    num_micro_batches: float  # on one GPU
    num_evaluations: int | None
    num_eval_batches: int | None  # of one evaluation
    num_saves: int | None


@dataclass(frozen=True, slots=True)
class RunTime:
    """Seconds of the whole run by what they are spent on; ``None`` where it is not known how often that happens."""

    num_steps: int
    train_seconds: float
    eval_seconds: float | None
    save_seconds: float | None
    startup_seconds: float

    @property
    def total_seconds(self) -> float:
        """Of all that is known."""
        return self.train_seconds + (self.eval_seconds or 0.0) + (self.save_seconds or 0.0) + self.startup_seconds


def schedule(job: ResolvedJob, tokens: BatchTokens, evaluated: BatchTokens | None = None) -> Schedule | None:
    """Steps, evaluations and saves of the run; ``None`` when neither ``num_samples`` nor ``max_steps`` is known.

    ``evaluated``: a batch of an evaluation, whose packed rows hold several samples each; not needed without packing.

    transformers 5 makes a last, partial accumulation group of what an epoch leaves over; 4 dropped it.
    Raises :class:`CostModelError` where ``dataloader_drop_last`` leaves no batch: the Trainer refuses or makes no step.
    Source: transformers 5.24 ``Trainer.set_initial_training_values``; ``DefaultFlowCallback`` for evaluations and saves.
    """
    length = run_length(job, tokens.num_samples)
    if length is None:
        return None
    steps, epochs = length.num_steps, length.num_epochs
    eval_every = job.eval_steps if job.eval_steps is not None else 500
    num_evaluations = num_pauses(
        job.eval_strategy,
        eval_every,
        steps,
        epochs,
        delay=job.eval_delay,
        also_at_the_end=evaluates_at_the_end(job.framework, job.framework_version),
    )
    if job.eval_on_start and num_evaluations is not None:
        num_evaluations += 1
    num_saves = num_pauses(job.save_strategy, job.save_steps, steps, epochs, also_at_the_end=True)
    if job.save_strategy == "best":
        num_saves = num_evaluations  # at most: one for each evaluation
    eval_batches = None
    if job.num_eval_samples is not None:
        samples_per_batch = evaluated.num_samples if evaluated is not None else job.per_device_eval_batch_size
        eval_batches = math.ceil(job.num_eval_samples / (samples_per_batch * job.num_gpus) - 1e-9)
    return Schedule(steps, length.num_micro_batches, num_evaluations, eval_batches, num_saves)


def run_length(job: ResolvedJob, samples_per_batch: float) -> RunLength | None:
    """How long the run is, ``samples_per_batch`` being those of one GPU's micro-batch. As :func:`schedule` otherwise."""
    accumulation = job.gradient_accumulation_steps
    if job.num_samples is None:
        if job.max_steps is None:
            return None
        return RunLength(job.max_steps, float(job.max_steps * accumulation), None)
    of_all = samples_per_batch * job.num_gpus
    batches = job.num_samples / of_all
    whole = math.floor(batches + 1e-9) if job.dataloader_drop_last else math.ceil(batches - 1e-9)
    if job.dataloader_drop_last and not whole:
        raise CostModelError(
            f"dataloader_drop_last leaves nothing to train on: the {job.num_samples:,} samples do not fill one batch of "
            f"{of_all:,.0f} over all GPUs; give more samples or a smaller batch, or leave it out"
        )
    batches_per_epoch = max(1, whole)
    keeps_partial_group = transformers_major(job.framework, job.framework_version) >= 5
    per_epoch = math.ceil(batches_per_epoch / accumulation) if keeps_partial_group else batches_per_epoch // accumulation
    per_epoch = max(1, per_epoch)
    steps = job.max_steps if job.max_steps is not None else math.ceil(job.num_train_epochs * per_epoch)
    # steps are whole: only the last one of an epoch may be of fewer batches
    of_epoch = batches_per_epoch if keeps_partial_group else min(batches_per_epoch, per_epoch * accumulation)
    whole_epochs, steps_left = divmod(steps, per_epoch)
    micro_batches = float(whole_epochs * of_epoch + steps_left * accumulation)
    return RunLength(steps, micro_batches, whole_epochs + steps_left * accumulation / of_epoch)


def steps_between(setting: float, num_steps: int) -> int:
    """A step count, or below 1 a share of the run (transformers' ``eval_steps`` and ``save_steps``)."""
    return max(1, math.ceil(setting * num_steps) if setting < 1 else int(setting))


def num_pauses(
    strategy: str, setting: float, num_steps: int, epochs: float | None, *, delay: float = 0.0, also_at_the_end: bool
) -> int | None:
    """How often a strategy ("no", "steps", "epoch") strikes in the run; ``None`` by epoch where epochs are not known.

    ``delay``: none before so many steps or epochs, whichever the strategy counts (``eval_delay``). ``also_at_the_end``: with
    "steps" at the last step too, whatever its number.
    """
    if strategy == "steps":
        every = steps_between(setting, num_steps)
        before = max(0, math.ceil(delay / every) - 1)
        at_the_end = also_at_the_end and num_steps % every != 0 and delay <= num_steps
        return max(0, num_steps // every - before) + at_the_end
    if strategy == "epoch":
        if epochs is None:
            return None
        whole = max(0, math.floor(epochs) - max(0, math.ceil(delay) - 1))
        return whole + (epochs > math.floor(epochs) and delay <= epochs)  # a part of an epoch ends one too
    return 0


def save_bytes(model: ModelSpec, job: ResolvedJob) -> int:
    """Bytes of one checkpoint: what is trained, and unless ``save_only_model`` the optimizer's states."""
    held = held_bytes(model, job)
    weights = held.adapters_bytes if job.is_peft else held.weights_bytes
    return weights + (0 if job.save_only_model else held.optimizer_bytes)


def run_time(
    model: ModelSpec,
    job: ResolvedJob,
    plan: Schedule,
    step: StepTime,
    eval_batch_seconds: float | None,
    *,
    on_cpu: bool = False,
) -> RunTime:
    """Seconds of the run. ``eval_batch_seconds``: one forward over a batch of evaluation, where there is one."""
    started = c.CPU_STARTUP_SECONDS if on_cpu else c.STARTUP_SECONDS
    accumulation = job.gradient_accumulation_steps
    micro_seconds = (step.step_seconds - step.optimizer_seconds) / accumulation
    train = plan.num_micro_batches * micro_seconds + plan.num_steps * step.optimizer_seconds
    # kernels are chosen and the allocator grows in the first micro-batch and the first optimizer step
    train += (c.FIRST_STEP_FACTOR - 1) * (micro_seconds + step.optimizer_seconds) if plan.num_steps else 0.0
    if job.torch_compile:
        train += c.COMPILE_SECONDS
    return RunTime(
        num_steps=plan.num_steps,
        train_seconds=train,
        eval_seconds=_eval_seconds(plan, eval_batch_seconds),
        save_seconds=None if plan.num_saves is None else plan.num_saves * save_bytes(model, job) / c.SAVE_BYTES_PER_SECOND,
        startup_seconds=started + held_bytes(model, job).weights_bytes / c.LOAD_BYTES_PER_SECOND,
    )


def _eval_seconds(plan: Schedule, batch_seconds: float | None) -> float | None:
    if plan.num_evaluations == 0:
        return 0.0
    if plan.num_evaluations is None or plan.num_eval_batches is None or batch_seconds is None:
        return None
    return plan.num_evaluations * plan.num_eval_batches * batch_seconds


def dollars(seconds: float, price: Price, num_gpus: int) -> float:
    """What the machines cost for that long: whole machines, whatever share of their GPUs the job uses."""
    return seconds / SECONDS_PER_HOUR * bill_usd_per_hour(price, num_gpus)
