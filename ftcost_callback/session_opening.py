"""What is found out when a session begins: the job, the device, the prediction, the price, the limits."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from costmodel.errors import CostModelError
from costmodel.specs import Price
from ftcost_callback.boundary import Boundary
from ftcost_callback.budget import BudgetWatch
from ftcost_callback.comparison import not_comparable
from ftcost_callback.live_flops import ATTENTION_CONVENTION, FlopsCounter
from ftcost_callback.live_prediction import LivePrediction
from ftcost_callback.peak_memory import PeakMemory
from ftcost_callback.planned_tokens import PlannedTokens
from ftcost_callback.records import Session
from ftcost_callback.session_plan import Identity, Plan, Settings
from ftcost_callback.spending import Spending

_log = logging.getLogger("ftcost_callback")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The training that a session measures: plain objects, whoever trains.

    ``device``: a ``torch.device``. ``steps_done``: optimizer steps of the run before this session. ``read_job``: the job
    mapping of :func:`costmodel.estimate`, read from the live objects; raises :class:`CostModelError` for what is not
    modelled; ``None``: nobody can say, so nothing is predicted.
    """

    model: Any
    device: Any
    steps_done: int = 0
    forwards_are_micro_batches: bool = False  # nobody says when a micro-batch ends
    read_job: Callable[[], Mapping[str, Any]] | None = None
    plan_tokens: Callable[[], PlannedTokens | None] = lambda: None  # of the steps to come, where their order is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A session, and what its reports rest on."""

    session: Session
    job: dict[str, Any] | None
    machine: str | None  # two sessions with the same one may share a pace
    predicted_gpu: str | None  # the card that gpu= names, where that is not the device that trains
    prediction: LivePrediction
    planned_tokens: PlannedTokens | None
    flops: FlopsCounter | None
    peak_flops_per_second: float | None
    spending: Spending
    budget: BudgetWatch
    unwatched: list[str]  # those of the session's notes that say what of the budget is not watched


def open_session(
    training: Training,
    settings: Settings,
    identity: Identity,
    plan: Plan,
    boundary: Boundary,
    peaks: PeakMemory,
    *,
    startup_seconds: float,
    started_at: float,
    notes: list[str],
) -> Opened:
    """``started_at``: epoch seconds, where the bill begins. ``notes``: what is not measured, and why, so far."""
    call = boundary.call
    model = call("model facts", lambda: _trainer_adapter().model_facts(training.model))
    job = call("job", lambda: read_job(training, settings, notes))
    device = call("device facts", lambda: read_device(training, settings, job, notes)) or {}
    peak_flops_per_second = device.get("peak_flops_per_second")
    flops = call("FLOPs", lambda: flops_counter(job)) if peak_flops_per_second is not None else None
    prediction = LivePrediction(settings, job, on_cpu=training.device.type == "cpu")
    call("prediction", lambda: prediction.predict(training.steps_done, notes))
    predicted_gpu = call("device facts", lambda: another_gpu(settings.gpu, device))
    if predicted_gpu is not None:
        device = {**device, "predicted_gpu": predicted_gpu}
        if settings.predict:
            notes.append(f"{not_comparable(predicted_gpu)}; leave gpu= out to predict for the device that trains")
    found = call("price", lambda: find_price(settings, plan, job, notes))
    price, usd_per_hour = found if found is not None else (None, None)
    num_notes = len(notes)
    budget = watch_budget(settings, identity, plan, notes, has_price=usd_per_hour is not None)
    unwatched = notes[num_notes:]
    earlier = identity.earlier
    session = Session(
        run_id=identity.run_id,
        session_index=identity.session_index,
        resumed_from_step=identity.resumed_from_step,
        started_at=datetime.datetime.fromtimestamp(started_at, datetime.timezone.utc).isoformat(),
        startup_seconds=startup_seconds,
        earlier_seconds=earlier.seconds if earlier is not None else None,
        earlier_tokens=earlier.tokens if earlier is not None else None,
        earlier_num_steps=earlier.num_steps if earlier is not None else None,
        earlier_num_uncounted_steps=(earlier.num_uncounted_steps or None) if earlier is not None else None,
        earlier_data_wait_seconds=earlier.data_wait_seconds if earlier is not None else None,
        earlier_wasted_seconds=earlier.wasted_seconds if earlier is not None else None,
        max_steps=plan.max_steps,
        num_processes=plan.num_processes if plan.num_processes > 1 else None,
        tensor_parallel_size=plan.tensor_parallel_size if plan.tensor_parallel_size > 1 else None,
        loading_peak_allocated_bytes=peaks.loading_allocated_bytes,
        loading_peak_reserved_bytes=peaks.loading_reserved_bytes,
        job=job,
        model=model,
        device=device or None,
        price=price.model_dump() if price is not None else None,
        usd_per_hour=usd_per_hour,
        budget=settings.budget_row(),
        versions=call("versions", lambda: _trainer_adapter().versions()),
        notes=notes or None,
    )
    return Opened(
        session=session,
        job=job,
        machine=f"{plan.num_devices} x {device.get('name', device['kind'])}" if device else None,
        predicted_gpu=predicted_gpu,
        prediction=prediction,
        planned_tokens=call("planned tokens", training.plan_tokens),
        flops=flops,
        peak_flops_per_second=peak_flops_per_second,
        spending=Spending(
            usd_per_hour, earlier_seconds=identity.earlier_spent_seconds, earlier_usd=identity.earlier_spent_usd,
        ),
        budget=budget,
        unwatched=unwatched,
    )  # fmt: skip


def read_job(training: Training, settings: Settings, notes: list[str]) -> dict[str, Any] | None:
    if training.read_job is None:
        return None
    try:
        job = dict(training.read_job())
    except CostModelError as refusal:
        notes.append(f"no prediction: {refusal}")
        return None
    if settings.price is not None:
        job["usd_per_gpu_hour"] = settings.price.usd_per_gpu_hour
    elif settings.cloud is not None:
        job["cloud"] = settings.cloud
        if settings.tier is not None:
            job["tier"] = settings.tier
    return job


def read_device(training: Training, settings: Settings, job: Mapping[str, Any] | None, notes: list[str]) -> dict[str, Any]:
    """The device's facts, with the peak that MFU is held against."""
    dtype = None
    if job is not None:  # the type its matrix products run in decides the peak
        autocast = "bfloat16" if job.get("bf16") else "float16" if job.get("fp16") else None
        dtype = autocast or job.get("dtype")
    facts = dict(_trainer_adapter().device_facts(training.device, gpu=settings.gpu, dtype=dtype))
    if another_gpu(settings.gpu, facts) is not None:  # MFU is held against the device that trains, not the one predicted for
        own = _trainer_adapter().device_facts(training.device, dtype=dtype)
        facts |= {name: own.get(name) for name in ("peak_flops_per_second", "peak_source")}
    if settings.peak_flops_per_second is not None:
        facts |= {"peak_flops_per_second": settings.peak_flops_per_second, "peak_source": "given"}
    facts = {name: value for name, value in facts.items() if value is not None}
    if facts.get("peak_flops_per_second") is not None:
        facts["attention_convention"] = ATTENTION_CONVENTION
    elif training.device.type == "cuda":
        name = facts.get("name", "this device")
        notes.append(f"no MFU: the peak of {name} is not known; give it as peak_flops_per_second= or gpu=")
    return facts


def another_gpu(predicted: str | Mapping[str, Any] | None, device: Mapping[str, Any]) -> str | None:
    """The card that is named, where the device that trains is known to be another one; ``None`` for a described device."""
    from costmodel.gpu_catalog import find_gpu

    if not isinstance(predicted, str):
        return None
    if device.get("kind") == "cpu":
        return predicted
    try:
        return predicted if find_gpu(predicted) != find_gpu(str(device.get("name"))) else None
    except CostModelError:
        return None  # a name that fits no card, or more than one


def flops_counter(job: Mapping[str, Any] | None) -> FlopsCounter | None:
    if job is None:
        return None
    try:
        return FlopsCounter(job)
    except CostModelError:
        return None  # said already, by the prediction


def find_price(
    settings: Settings, plan: Plan, job: Mapping[str, Any] | None, notes: list[str]
) -> tuple[Price, float] | None:
    """(price, dollars an hour of the whole job); ``None`` without one."""
    from costmodel.price_catalog import bill_usd_per_hour
    from costmodel.price_catalog import find_price as find_in_catalog

    price = settings.price
    if price is None and settings.cloud is not None:
        gpu = job.get("gpu") if job is not None else None
        try:
            if gpu is None:
                raise CostModelError("the training device is no GPU of the catalogue")
            price = find_in_catalog(gpu, cloud=settings.cloud, tier=settings.tier, num_gpus=plan.devices_per_machine)
        except CostModelError as refusal:
            notes.append(f"no price: {refusal}")
            return None
    if price is None:
        return None
    return price, plan.num_machines * bill_usd_per_hour(price, plan.devices_per_machine)


def watch_budget(settings: Settings, identity: Identity, plan: Plan, notes: list[str], *, has_price: bool) -> BudgetWatch:
    budget_usd = settings.budget_usd
    if budget_usd is not None and not has_price:
        notes.append("budget_usd is not watched: there is no price; give usd_per_gpu_hour or cloud")
        budget_usd = None
    stop = settings.stop_at_budget
    if stop and plan.num_processes > 1:
        # The processes' clocks differ: one would stop a step before the others, which then wait for it for ever.
        notes.append("stop_at_budget only warns with several processes, which would not stop at the same step")
        stop = False
    return BudgetWatch(
        budget_usd=budget_usd, budget_hours=settings.budget_hours, stop_at_budget=stop, crossed=identity.crossed_thresholds
    )


def _trainer_adapter() -> Any:
    from ftcost_callback import trainer_adapter

    return trainer_adapter
