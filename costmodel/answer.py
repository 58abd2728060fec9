"""The answer to a job: the record of the contract (``docs/answer.md``), and how it is put together from its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from costmodel.capacity import Fit
from costmodel.cost import RunTime, dollars, run_length
from costmodel.defaults import ResolvedJob, defaults_source
from costmodel.described_job import DescribedJob
from costmodel.device_rates import peak_flops_per_second
from costmodel.formats import format_gib, format_seconds, format_usd
from costmodel.framework_defaults import READ_VERSIONS
from costmodel.memory import MemoryBreakdown
from costmodel.specs import SCHEMA_VERSION, GpuSpec, Job, Price
from costmodel.step_time import StepTime
from costmodel.uncertainty import INTERVAL_LEVEL
from costmodel.version import ftcost_version
from costmodel.workload import Batch, hardware_flops, model_flops, num_idle_params, num_trainable_params

if TYPE_CHECKING:
    from costmodel.stored_calibrations import Applied

# Starting up and saving are rules of thumb: the band of a total halves and doubles them.
_FIXED_LOW: Final = 0.5
_FIXED_HIGH: Final = 2.0


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """Where one optimizer step goes. ``by_group_seconds`` sums to the step."""

    bound_by: str
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    by_group_seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The answer. Units stand in the names; what is not known is ``None``, never 0."""

    schema_version: int
    version: str
    job: dict[str, Any]
    assumed: tuple[str, ...]
    defaults_of: str
    num_params: int
    num_active_params: int
    num_trainable_params: int
    memory: MemoryBreakdown
    verdict: str | None
    headroom_bytes: int | None
    share_of_batches_that_fit: float | None
    max_batch_size: int | None
    max_length_that_fits: int | None
    interval_level: float
    step_seconds: float | None
    step_seconds_low: float | None
    step_seconds_high: float | None
    step: StepBreakdown | None
    num_tokens_per_step: float | None
    num_non_padding_tokens_per_step: float | None
    num_supervised_tokens_per_step: float | None
    tokens_per_second: float | None
    tokens_per_second_low: float | None
    tokens_per_second_high: float | None
    non_padding_tokens_per_second: float | None
    samples_per_second: float | None
    model_flops_per_step: float | None
    hardware_flops_per_step: float | None
    peak_flops_per_second: float | None
    mfu: float | None
    hfu: float | None
    num_steps: int | None
    train_seconds: float | None
    eval_seconds: float | None
    save_seconds: float | None
    startup_seconds: float | None
    total_seconds: float | None
    total_seconds_low: float | None
    total_seconds_high: float | None
    total_usd: float | None
    total_usd_low: float | None
    total_usd_high: float | None
    price: Price | None
    evidence: tuple[dict[str, Any], ...]
    calibration: dict[str, Any] | None
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        """The answer in a line, intervals aside; :func:`costmodel.report.to_text` is the whole of it."""
        return ", ".join(f"{name}: {value}" if name else value for name, value in self._facts())

    def _repr_html_(self) -> str:
        """The same as a small table, in a notebook."""
        import html  # its table of entities takes longer to load than an estimate to compute

        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name or 'job')}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self._facts()
        )
        return f"<table>{rows}</table>"

    def _facts(self) -> Iterator[tuple[str, str]]:
        model, gpu = self.job.get("model"), self.job.get("gpu")
        name = model.get("model_type", "config") if isinstance(model, Mapping) else model
        on = f" on {self.job.get('num_gpus', 1)} x {gpu['name'] if isinstance(gpu, Mapping) else gpu}" if gpu else ""
        how = " ".join(str(self.job[field]) for field in ("method", "quantization") if self.job.get(field))
        yield "", f"{name} {how}{on}"
        if self.verdict is not None:
            yield "verdict", self.verdict.replace("_", " ")
        capacity = self.memory.capacity_bytes
        of = f" of {format_gib(capacity)}" if capacity else ""
        yield "memory", f"{format_gib(self.memory.peak_device_bytes)}{of}"
        for label, seconds in (("step", self.step_seconds), ("total", self.total_seconds)):
            if seconds is not None:
                yield label, format_seconds(seconds)
        if self.total_usd is not None:
            yield "cost", format_usd(self.total_usd)

    def to_dict(self) -> dict[str, Any]:
        """The JSON answer of the contract (``docs/answer.md``): the caller's own, to change at will."""
        answer: dict[str, Any] = {}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Price):
                value = value.model_dump()
            elif isinstance(value, (MemoryBreakdown, StepBreakdown)):
                value = {part.name: getattr(value, part.name) for part in dataclasses.fields(value)}
            answer[each.name] = _copy(value)
        return answer


def _copy(value: Any) -> Any:
    """A JSON value of its own; a tuple becomes the list that JSON has for it."""
    if isinstance(value, dict):
        return {name: _copy(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(each) for each in value]
    return value


def _num_steps(described: DescribedJob) -> int | None:
    """Optimizer steps of a run whose time is not known; ``None`` also where how many samples a packed row holds is not."""
    job, tokens = described.job, described.tokens
    if tokens is None and job.packing:
        return None
    length = run_length(job, tokens.num_samples if tokens else job.per_device_train_batch_size)
    return length.num_steps if length else None


def answer_from(
    described: DescribedJob,
    memory: MemoryBreakdown,
    fit: Fit | None,
    step: StepTime | None,
    interval: float | None,
    run: RunTime | None,
    price: Price | None,
    evidence: tuple[dict[str, Any], ...],
    applied: Applied | None,
    warnings: tuple[str, ...],
) -> Estimate:
    """The record, from what each part found out. ``interval``: the factor of a step's; ``applied``: a calibration."""
    parsed, model, gpu, job = described.parsed, described.model, described.gpu, described.job
    tokens = described.tokens
    micro_batches = job.gradient_accumulation_steps * job.num_gpus
    per_step: Batch | None = tokens.expected if tokens else None
    seconds = step.step_seconds if step else None
    num_tokens = per_step.num_tokens * micro_batches if per_step else None
    real = tokens.num_non_padding_tokens * micro_batches if tokens else None
    supervised = tokens.num_supervised_tokens if tokens else None
    supervised = supervised * micro_batches if supervised is not None else None
    model_work = model_flops(model, job, per_step) * micro_batches if per_step else None
    hardware_work = hardware_flops(model, job, per_step) * micro_batches if per_step else None
    peak = peak_flops_per_second(gpu, job) if gpu else None

    def utilisation(work: float | None) -> float | None:
        return work / (seconds * peak * job.num_gpus) if work and seconds and peak else None

    def rate(amount: float | None, by: float | None = seconds) -> float | None:
        return amount / by if amount is not None and by else None

    total = run.total_seconds if run else None
    fixed = run.startup_seconds + (run.save_seconds or 0.0) if run else 0.0
    low = (total - fixed) / interval + fixed * _FIXED_LOW if run and total is not None and interval else None
    high = (total - fixed) * interval + fixed * _FIXED_HIGH if run and total is not None and interval else None

    resolved = _resolved_mapping(parsed, job, gpu)
    return Estimate(
        schema_version=SCHEMA_VERSION,
        version=ftcost_version(),
        job=resolved,
        assumed=tuple(name for name in described.assumed if name in resolved),
        defaults_of=defaults_source(job, parsed.framework_version),
        num_params=model.num_params + model.tower_params,
        num_active_params=model.num_active_params,
        num_trainable_params=num_trainable_params(model, job) + num_idle_params(model, job),
        memory=memory,
        verdict=fit.verdict if fit else None,
        headroom_bytes=fit.headroom_bytes if fit else None,
        share_of_batches_that_fit=fit.share_of_batches if fit else None,
        max_batch_size=fit.max_batch_size if fit else None,
        max_length_that_fits=fit.max_length_tokens if fit else None,
        interval_level=INTERVAL_LEVEL,
        step_seconds=seconds,
        step_seconds_low=seconds / interval if seconds and interval else None,
        step_seconds_high=seconds * interval if seconds and interval else None,
        step=StepBreakdown(
            step.bound_by, step.forward_seconds, step.backward_seconds, step.optimizer_seconds, step.by_group_seconds
        )
        if step
        else None,
        num_tokens_per_step=num_tokens,
        num_non_padding_tokens_per_step=real,
        num_supervised_tokens_per_step=supervised,
        tokens_per_second=rate(num_tokens),
        tokens_per_second_low=rate(num_tokens, seconds * interval if seconds and interval else None),
        tokens_per_second_high=rate(num_tokens, seconds / interval if seconds and interval else None),
        non_padding_tokens_per_second=rate(real),
        samples_per_second=rate(tokens.num_samples * micro_batches if tokens else None),
        model_flops_per_step=model_work,
        hardware_flops_per_step=hardware_work,
        peak_flops_per_second=peak,
        mfu=utilisation(model_work),
        hfu=utilisation(hardware_work),
        num_steps=run.num_steps if run else _num_steps(described),
        train_seconds=run.train_seconds if run else None,
        eval_seconds=run.eval_seconds if run else None,
        save_seconds=run.save_seconds if run else None,
        startup_seconds=run.startup_seconds if run else None,
        **_totals(total, low, high, price, job.num_gpus),
        price=price,
        evidence=evidence,
        calibration=applied.to_dict() if applied else None,
        warnings=warnings,
    )


def with_startup(estimate: Estimate, seconds: float) -> Estimate:
    """The same with a start-up that was measured, so that it has no band of its own."""
    assumed, price, num_gpus = estimate.startup_seconds, estimate.price, int(estimate.job["num_gpus"])
    if assumed is None:
        return estimate

    def changed(total: float | None, factor: float) -> float | None:
        return total - factor * assumed + seconds if total is not None else None

    total = changed(estimate.total_seconds, 1.0)
    low, high = changed(estimate.total_seconds_low, _FIXED_LOW), changed(estimate.total_seconds_high, _FIXED_HIGH)
    return dataclasses.replace(
        estimate,
        startup_seconds=seconds,
        **_totals(total, low, high, price, num_gpus),
    )


def _totals(
    total: float | None, low: float | None, high: float | None, price: Price | None, num_gpus: int
) -> dict[str, Any]:
    """The totals of an answer: these seconds, and what they cost; dollars are ``None`` without a price."""
    found: dict[str, Any] = {}
    for suffix, seconds in (("", total), ("_low", low), ("_high", high)):
        found[f"total_seconds{suffix}"] = seconds
        found[f"total_usd{suffix}"] = dollars(seconds, price, num_gpus) if price and seconds is not None else None
    return found


# Fields of a job that defaults fill.
_FILLED_FIELDS = tuple(each.name for each in dataclasses.fields(ResolvedJob) if each.name in Job.model_fields)


def _resolved_mapping(parsed: Job, job: ResolvedJob, gpu: GpuSpec | None) -> dict[str, Any]:
    """The job with every default filled, in the job's own field names: it can be estimated again as it is."""
    given = parsed.model_dump(exclude_none=True)
    filled = {name: value for name in _FILLED_FIELDS if (value := getattr(job, name)) is not None}
    for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "adapter_dtype"):
        if not job.is_peft:
            filled.pop(name, None)
    if parsed.framework_version is None and job.framework not in READ_VERSIONS:
        filled.pop("framework_version")  # transformers' own, not this framework's
    filled["bf16"] = job.autocast_dtype == "bfloat16"
    filled["fp16"] = job.autocast_dtype == "float16"
    for name in ("lora_target_parameters", "lora_modules_to_save"):
        if not filled.get(name):
            filled.pop(name, None)
    if not filled.get("logits_to_keep"):
        filled.pop("logits_to_keep", None)
    resolved = {**given, **filled}
    if gpu is not None and isinstance(parsed.gpu, str):
        resolved["gpu"] = gpu.name
    return {name: list(value) if isinstance(value, tuple) else value for name, value in resolved.items()}
