"""``estimate(job)``: the one place that calls all the others, in the order a reader would ask."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from costmodel.capacity import (
    evaluation_batch,
    evaluation_fits,
    expected_step_that_does_not_fit,
    max_batch_size,
    max_length_that_fits,
    share_of_batches_that_fit,
)
from costmodel.catalog import find_gpu, find_model_config, find_price
from costmodel.cost import dollars, run_time, schedule
from costmodel.defaults import LATEST, ResolvedJob, defaults_source, resolve
from costmodel.errors import CostModelError
from costmodel.expert_load import ExpertLoad
from costmodel.formats import format_gib, format_seconds, format_usd
from costmodel.hf_config import ModelSpec, model_spec_from_config
from costmodel.job_warnings import job_warnings
from costmodel.lengths import (
    ASSUMED_LOG_SIGMA,
    BatchTokens,
    LengthDistribution,
    batch_tokens,
    distribution,
    longest_batch,
    longest_sequence,
)
from costmodel.memory import MemoryBreakdown, loss_bytes, peak_memory
from costmodel.specs import SCHEMA_VERSION, GpuSpec, Job, Lengths, Price, parse_gpu, parse_job
from costmodel.step_time import Factors, StepTime, imbalance_seconds, peak_flops_per_second, step_time
from costmodel.uncertainty import INTERVAL_LEVEL, memory_interval, nearest_runs, step_interval_factor
from costmodel.units import GIB
from costmodel.workload import Batch, hardware_flops, model_flops, num_trainable_params

if TYPE_CHECKING:
    from costmodel.calibration import Applied, MeasuredStep

PRICE_VARIABLE = "FTCOST_USD_PER_GPU_HOUR"


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
        """The JSON answer of the contract (``docs/answer.md``)."""
        answer: dict[str, Any] = {}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Price):
                value = value.model_dump()
            elif isinstance(value, (MemoryBreakdown, StepBreakdown)):
                value = {part.name: getattr(value, part.name) for part in dataclasses.fields(value)}
            elif isinstance(value, tuple):
                value = list(value)
            answer[each.name] = value
        return answer


def estimate(job: Job | Mapping[str, Any] | None = None, /, **fields: Any) -> Estimate:
    """Memory, step time, hours and dollars of one fine-tuning job.

    ``job`` is a :class:`Job` or a mapping with its fields; keyword fields come on top. Needs no GPU, no network, no torch.
    Raises :class:`CostModelError` for input that is wrong or not known, with the way out.
    """
    return _estimate(parse_job(_merged(job, fields)), None)


@dataclass(frozen=True, slots=True)
class TokensSeen:
    """What the micro-batches of a running job really held, on average; ``longest_tokens`` is the longest sequence so far."""

    num_sequences: float
    num_tokens: float
    num_non_padding_tokens: float
    sum_squared_sequence_tokens: float
    longest_tokens: int
    num_supervised_tokens: float | None = None


def estimate_from_tokens(job: Job | Mapping[str, Any], seen: TokensSeen) -> Estimate:
    """The estimate of a job on the micro-batches it was really fed, in place of ``lengths``.

    Raises :class:`CostModelError` as :func:`estimate` does.
    """
    return _estimate(parse_job(job), seen)


@dataclass(frozen=True, slots=True)
class _Described:
    """A job with everything looked up that it names, and the batch its step is made of."""

    parsed: Job
    model: ModelSpec
    gpu: GpuSpec | None
    job: ResolvedJob
    assumed: tuple[str, ...]
    lengths: LengthDistribution | None
    tokens: BatchTokens | None


def _described(parsed: Job, seen: TokensSeen | None) -> _Described:
    model = _model_spec(parsed)
    gpu = _gpu(parsed)
    if seen is not None and parsed.max_length is None:
        parsed = parsed.model_copy(update={"max_length": seen.longest_tokens})
    resolved, assumed = resolve(parsed, model)
    resolved = _first_equal(resolved)
    lengths = distribution(parsed.lengths, resolved.max_length) if parsed.lengths else None
    tokens = batch_tokens(resolved, lengths) if lengths else None
    if seen is not None:
        tokens = _tokens_seen(resolved, seen, tokens)
        lengths = lengths or distribution(Lengths(fixed=seen.longest_tokens), resolved.max_length)
    return _Described(parsed, model, gpu, resolved, assumed, lengths, tokens)


@functools.lru_cache(maxsize=256)
def _first_equal(job: ResolvedJob) -> ResolvedJob:
    """The first of equal jobs: the caches behind an estimate then find it by identity, without comparing every field."""
    return job


def measured_step(job: Job | Mapping[str, Any], seconds: float, source: str, seen: TokensSeen | None = None) -> MeasuredStep:
    """A measured optimizer step of ``job``, on the batches of its ``lengths`` or on those ``seen``, to calibrate with.

    Raises :class:`CostModelError` where the job lacks what a step time needs.
    """
    from costmodel.calibration import MeasuredStep

    described = _described(parse_job(job), seen)
    if described.gpu is None:
        raise CostModelError(f"{source}: no gpu is given, so there is no step time to calibrate")
    if described.tokens is None:
        raise CostModelError(f"{source}: lengths are not given, so the tokens of the measured step are not known")
    return MeasuredStep(described.model, described.job, described.gpu, described.tokens.expected, seconds, source)


def estimated_imbalance_seconds(
    job: Job | Mapping[str, Any], load: ExpertLoad, seen: TokensSeen | None = None, *, expert_ranks: int = 1
) -> float | None:
    """:func:`costmodel.step_time.imbalance_seconds` of ``job``, on the batches of its ``lengths`` or on those ``seen``.

    ``None`` without a gpu, without lengths, or where the device's rate is not known.
    """
    described = _described(parse_job(job), seen)
    if described.gpu is None or described.tokens is None:
        return None
    batch = described.tokens.expected
    return imbalance_seconds(described.model, described.job, described.gpu, batch, load, expert_ranks=expert_ranks)


def _estimate(parsed: Job, seen: TokensSeen | None) -> Estimate:
    described = _described(parsed, seen)
    parsed, model, gpu, resolved = described.parsed, described.model, described.gpu, described.job
    lengths, tokens = described.lengths, described.tokens
    warnings: list[str] = []
    memory = _memory(model, resolved, gpu, lengths, tokens)
    fit = _fit(model, resolved, gpu, lengths, tokens, memory)
    applied = None
    if parsed.calibration is not None and gpu and tokens:
        from costmodel.calibration import find_calibration  # a plain estimate starts faster without it

        applied = find_calibration(parsed.calibration, model, resolved, gpu, tokens.expected, warnings.append)
    elif parsed.calibration is not None:
        from costmodel.calibration import check_calibration

        check_calibration(parsed.calibration)
    factors = _factors(applied)
    step = step_time(model, resolved, gpu, tokens.expected, **factors) if gpu and tokens else None
    evidence: tuple[dict[str, Any], ...] = ()
    interval = None
    if gpu and step and tokens and not _on_cpu(gpu):
        evidence = nearest_runs(model, resolved, gpu, tokens.expected)
    if gpu and step:
        interval = step_interval_factor(model, resolved, gpu, step, distance=evidence[0]["distance"] if evidence else 0.0)
        interval = applied.interval_factor(interval) if applied else interval
    run = _run(model, resolved, gpu, lengths, tokens, step, factors)
    price = _price(parsed, gpu)
    _warn(warnings, parsed, resolved, model, gpu, lengths, tokens, step, fit, run)
    return _answer(described, memory, fit, step, interval, run, price, evidence, applied, tuple(warnings))


def _factors(applied: Applied | None) -> Factors:
    if applied is None:
        return {}
    return {"device_factor": applied.calibration.device_factor, "host_factor": applied.calibration.host_factor}


def _tokens_seen(job: ResolvedJob, seen: TokensSeen, planned: BatchTokens | None) -> BatchTokens:
    """The measured batch; the longest one by the data where that is known, since it may still come."""
    supervised = seen.num_supervised_tokens
    head = supervised if job.supervised_positions_only and supervised is not None else seen.num_tokens
    padding = max(0.0, seen.num_tokens - seen.num_non_padding_tokens)
    expected = Batch(seen.num_sequences, seen.num_tokens, seen.sum_squared_sequence_tokens, head, padding)
    longest = planned.longest if planned else longest_batch(job, job.per_device_train_batch_size, seen.longest_tokens)
    is_padded = seen.num_tokens > seen.num_non_padding_tokens
    return BatchTokens(
        expected=expected,
        num_non_padding_tokens=seen.num_non_padding_tokens,
        num_supervised_tokens=supervised,
        longest=longest,
        is_padded=planned.is_padded if planned else is_padded,
        num_samples=planned.num_samples if planned and job.packing else seen.num_sequences,
    )


# --- the steps of estimate() -----------------------------------------------------------------------------------------


def _merged(job: Job | Mapping[str, Any] | None, fields: Mapping[str, Any]) -> Job | Mapping[str, Any]:
    if job is None:
        return fields
    if not fields:
        return job
    if isinstance(job, Job):
        return {**job.model_dump(exclude_unset=True), **fields}
    if not isinstance(job, Mapping):
        raise CostModelError(
            f"a job is a mapping of its fields, got {type(job).__name__}; a file is read by `ftcost estimate FILE`"
        )
    return {**job, **fields}


def _model_spec(job: Job) -> ModelSpec:
    if isinstance(job.model, str) and not job.model_overrides:
        return _named_model_spec(job.model)
    config = dict(find_model_config(job.model))
    for name in job.model_overrides:
        if name not in config:
            raise CostModelError(
                f"model_overrides {name!r} is no field of the model's config; its fields: {', '.join(sorted(config))}"
            )
    return model_spec_from_config({**config, **job.model_overrides}, name=job.model if isinstance(job.model, str) else "")


@functools.lru_cache(maxsize=256)
def _catalogued_model_spec(name: str) -> ModelSpec:
    return model_spec_from_config(find_model_config(name), name=name)


def _named_model_spec(name: str) -> ModelSpec:
    # A path may change between calls; a catalogue entry does not.
    if os.path.exists(name):
        return model_spec_from_config(find_model_config(name), name=os.path.basename(os.path.normpath(name)))
    return _catalogued_model_spec(name)


def _gpu(job: Job) -> GpuSpec | None:
    if job.gpu is None:
        return None
    return find_gpu(job.gpu) if isinstance(job.gpu, str) else parse_gpu(job.gpu)


def _on_cpu(gpu: GpuSpec | None) -> bool:
    return gpu is not None and gpu.vendor == "CPU"


def _memory(
    model: ModelSpec,
    job: ResolvedJob,
    gpu: GpuSpec | None,
    lengths: LengthDistribution | None,
    tokens: BatchTokens | None,
) -> MemoryBreakdown:
    longest = longest_sequence(job, lengths)
    batch = tokens.longest if tokens else longest_batch(job, job.per_device_train_batch_size, *longest)
    padded = _is_padded(job, tokens)
    evaluation = evaluation_batch(job, *longest)
    memory = peak_memory(model, job, batch, is_padded=padded, on_cpu=_on_cpu(gpu), evaluation=evaluation)
    varies = lengths is not None and len(lengths.lengths) > 1 and not job.packing and job.padding != "max_length"
    low, high = memory_interval(
        model,
        job,
        memory,
        on_cpu=_on_cpu(gpu),
        varying_loss_bytes=loss_bytes(model, job, batch) if varies else 0.0,
        capacity_bytes=gpu.memory_bytes if gpu else None,
    )
    return replace(
        memory,
        peak_device_bytes_low=low,
        peak_device_bytes_high=high,
        capacity_bytes=gpu.memory_bytes if gpu else None,
    )


def _is_padded(job: ResolvedJob, tokens: BatchTokens | None) -> bool:
    """Whether a batch carries an attention mask: sequences of different length side by side."""
    several = job.per_device_train_batch_size > 1 and not (job.packing or job.padding_free)
    return several and (tokens.is_padded if tokens else True)


@dataclass(frozen=True, slots=True)
class _Fit:
    verdict: str
    headroom_bytes: int
    share_of_batches: float | None
    max_batch_size: int
    max_length: int


def _fit(
    model: ModelSpec,
    job: ResolvedJob,
    gpu: GpuSpec | None,
    lengths: LengthDistribution | None,
    tokens: BatchTokens | None,
    memory: MemoryBreakdown,
) -> _Fit | None:
    if gpu is None:
        return None
    capacity, on_cpu = gpu.memory_bytes, _on_cpu(gpu)
    high = memory.peak_device_bytes_high or memory.peak_device_bytes
    verdict = "does_not_fit" if memory.peak_device_bytes > capacity else "tight" if high > capacity else "fits"
    varies = not (job.packing or job.padding_free) and (tokens.is_padded if tokens else True)
    longest, attended = longest_sequence(job, lengths)
    max_batch = max_batch_size(model, job, capacity, longest, is_padded=varies, on_cpu=on_cpu, attended_tokens=attended)
    max_length = max_length_that_fits(
        model,
        job,
        capacity,
        is_padded=_is_padded(job, tokens),
        on_cpu=on_cpu,
        attended_tokens=attended if attended < longest else None,
    )
    share = None
    if lengths is not None and not job.packing and job.padding != "max_length":
        share = share_of_batches_that_fit(lengths, job.per_device_train_batch_size, max_length)
    elif lengths is not None:
        share = 0.0 if verdict == "does_not_fit" else 1.0
    return _Fit(verdict, capacity - memory.peak_device_bytes, share, max_batch, max_length)


@dataclass(frozen=True, slots=True)
class _Run:
    num_steps: int
    train_seconds: float
    eval_seconds: float | None
    save_seconds: float | None
    startup_seconds: float
    total_seconds: float  # of all that is known


def _run(
    model: ModelSpec,
    job: ResolvedJob,
    gpu: GpuSpec | None,
    lengths: LengthDistribution | None,
    tokens: BatchTokens | None,
    step: StepTime | None,
    factors: Factors,
) -> _Run | None:
    if gpu is None or lengths is None or tokens is None or step is None:
        return None
    counted = job.num_samples
    if counted is None and job.max_steps is None:
        return None
    plan = schedule(job, tokens)
    if plan is None:
        return None
    eval_seconds = None
    if plan.num_evaluations and plan.num_eval_batches:
        evaluated = batch_tokens(job, lengths, batch_size=job.per_device_eval_batch_size)
        timed = step_time(model, job, gpu, evaluated.expected, micro_batches=1.0, **factors)
        eval_seconds = timed.forward_seconds if timed else None
    times = run_time(model, job, plan, step, eval_seconds)
    return _Run(
        plan.num_steps,
        times.train_seconds,
        times.eval_seconds,
        times.save_seconds,
        times.startup_seconds,
        times.total_seconds,
    )


def _price(job: Job, gpu: GpuSpec | None) -> Price | None:
    """The job's own price, a catalogue row when a cloud or tier is named, the environment's; else none."""
    if job.usd_per_gpu_hour is not None:
        return Price(
            usd_per_gpu_hour=job.usd_per_gpu_hour,
            usd_per_instance_hour=job.usd_per_gpu_hour,
            gpu=gpu.name if gpu else "",
            tier=job.tier or "given",
            source="given with the job",
        )
    if job.cloud is not None or job.tier is not None:
        if gpu is None:
            raise CostModelError("a catalogue price needs a gpu; name one, or give usd_per_gpu_hour")
        return find_price(gpu, cloud=job.cloud, tier=job.tier, num_gpus=job.num_gpus)
    text = os.environ.get(PRICE_VARIABLE)
    if text:
        try:
            usd = float(text)
            source = f"environment variable {PRICE_VARIABLE}"
            return Price(usd_per_gpu_hour=usd, usd_per_instance_hour=usd, tier="given", source=source)
        except ValueError:
            raise CostModelError(f"{PRICE_VARIABLE} must be a positive number of dollars, got {text!r}") from None
    return None


def _warn(
    warnings: list[str],
    job: Job,
    resolved: ResolvedJob,
    model: ModelSpec,
    gpu: GpuSpec | None,
    lengths: LengthDistribution | None,
    tokens: BatchTokens | None,
    step: StepTime | None,
    fit: _Fit | None,
    run: _Run | None,
) -> None:
    """Each warning asks for an action."""
    if lengths is None:
        warnings.append(
            "lengths are not given: memory is for sequences of max_length; give lengths (a mean and max, a histogram or a "
            "data set) for time and money"
        )
    elif job.lengths is not None and job.lengths.mean is not None:
        warnings.append(
            f"only a mean length is given: a log-normal shape is assumed (sigma {ASSUMED_LOG_SIGMA}); give a histogram for "
            "the padding that your data really causes"
        )
    if lengths is not None and lengths.share_cut > 0:
        share = f"{lengths.share_cut:.1%}" if lengths.share_cut >= 0.001 else "fewer than 0.1%"
        warnings.append(f"{share} of the samples are longer than max_length {resolved.max_length} and are cut there")
    if gpu is None:
        warnings.append("no gpu is given: memory only; name one to learn whether it fits, how long and how much")
    elif tokens is not None and step is None:
        warnings.append(
            f"{gpu.name} has no known rate for {resolved.autocast_dtype or resolved.dtype}: no step time; use a type it "
            "supports (fp16 on Volta and Turing)"
        )
    if gpu is not None and gpu.memory_is_marketed:
        warnings.append(f"the capacity of {gpu.name} is its marketed size; the driver reports a little less")
    if lengths is not None and run is None and step is not None:
        warnings.append("num_samples (or max_steps) is not given: figures are for one step, totals are left out")
    warnings += _about_unknown_times(resolved, run)
    if gpu is not None and fit is not None and resolved.eval_strategy != "no":
        alone = evaluation_batch(resolved, *longest_sequence(resolved, lengths))
        if alone is not None and not evaluation_fits(model, resolved, alone, gpu.memory_bytes, on_cpu=_on_cpu(gpu)):
            warnings.append(
                f"the evaluation alone does not fit {gpu.name}, whatever the training batch: lower "
                f"per_device_eval_batch_size ({resolved.per_device_eval_batch_size})"
            )
    if fit is not None and fit.share_of_batches is not None and 0 < fit.share_of_batches < 1:
        micro_batches = resolved.gradient_accumulation_steps * resolved.num_gpus
        first = expected_step_that_does_not_fit(fit.share_of_batches, micro_batches)
        warnings.append(
            f"{1 - fit.share_of_batches:.2%} of the batches would not fit "
            f"(one in {1 / (1 - fit.share_of_batches):,.0f}): the job would run until one comes, about step {first:,.0f}; "
            f"cut samples at {fit.max_length} tokens"
            + (f" or use batch size {fit.max_batch_size}" if fit.max_batch_size else "")
        )
    if model.is_moe and resolved.fused_experts and resolved.quantization in {"nf4", "fp4", "int8"}:
        size = sum(
            layer.experts.num_experts * layer.experts.params_per_expert * count
            for layer, count in model.layers
            if layer.experts
        )
        kept = 4 if resolved.prepare_model_for_kbit_training else 2
        warnings.append(
            f"bitsandbytes does not quantise the stacked experts of transformers 5: {size * kept / GIB:.1f} GiB of expert "
            f"weights stay at {kept} bytes each"
            + (" (peft's prepare_model_for_kbit_training lifts them to fp32)" if kept == 4 else "")
        )
    if resolved.fused_experts and model.is_moe and step is not None and resolved.experts_implementation == "batched_mm":
        warnings.append(
            "experts_implementation batched_mm copies expert weights for each token: use grouped_mm for training"
        )
    warnings += job_warnings(job, resolved, model, gpu)


def _about_unknown_times(job: ResolvedJob, run: _Run | None) -> list[str]:
    """Why the seconds of evaluations or saves are null; the total then leaves them out."""
    by_epoch = "by epoch need num_samples: how many epochs max_steps makes is not known"
    found = []
    if job.eval_strategy != "no" and not job.num_eval_samples and (run is None or run.eval_seconds is None):
        found.append(
            "evaluations are scheduled but num_eval_samples is not given: eval_seconds is null and their time is not in the "
            "total; give num_eval_samples"
        )
    elif run is not None and run.eval_seconds is None:
        why = f"evaluations {by_epoch}" if job.eval_strategy == "epoch" else "the evaluation has no step time"
        found.append(f"{why}; eval_seconds is null and their time is not in the total")
    if run is not None and run.save_seconds is None:
        found.append(f"saves {by_epoch}; save_seconds is null and their time is not in the total")
    return found


def _answer(
    described: _Described,
    memory: MemoryBreakdown,
    fit: _Fit | None,
    step: StepTime | None,
    interval: float | None,
    run: _Run | None,
    price: Price | None,
    evidence: tuple[dict[str, Any], ...],
    applied: Applied | None,
    warnings: tuple[str, ...],
) -> Estimate:
    parsed, model, gpu, job, tokens = (
        described.parsed,
        described.model,
        described.gpu,
        described.job,
        described.tokens,
    )
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
    low = (total - fixed) / interval + fixed * 0.5 if run and total is not None and interval else None
    high = (total - fixed) * interval + fixed * 2.0 if run and total is not None and interval else None

    def usd(duration: float | None) -> float | None:
        return dollars(duration, price, job.num_gpus) if price and duration is not None else None

    resolved = _resolved_mapping(parsed, job, gpu)
    return Estimate(
        schema_version=SCHEMA_VERSION,
        version=ftcost_version(),
        job=resolved,
        assumed=tuple(name for name in described.assumed if name in resolved),
        defaults_of=defaults_source(job, parsed.framework_version),
        num_params=model.num_params,
        num_active_params=model.num_active_params,
        num_trainable_params=num_trainable_params(model, job),
        memory=memory,
        verdict=fit.verdict if fit else None,
        headroom_bytes=fit.headroom_bytes if fit else None,
        share_of_batches_that_fit=fit.share_of_batches if fit else None,
        max_batch_size=fit.max_batch_size if fit else None,
        max_length_that_fits=fit.max_length if fit else None,
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
        num_steps=run.num_steps if run else None,
        train_seconds=run.train_seconds if run else None,
        eval_seconds=run.eval_seconds if run else None,
        save_seconds=run.save_seconds if run else None,
        startup_seconds=run.startup_seconds if run else None,
        total_seconds=total,
        total_seconds_low=low,
        total_seconds_high=high,
        total_usd=usd(total),
        total_usd_low=usd(low),
        total_usd_high=usd(high),
        price=price,
        evidence=evidence,
        calibration=applied.to_dict() if applied else None,
        warnings=warnings,
    )


# Fields of a job that defaults fill.
_FILLED_FIELDS = tuple(each.name for each in dataclasses.fields(ResolvedJob) if each.name in Job.model_fields)


def _resolved_mapping(parsed: Job, job: ResolvedJob, gpu: GpuSpec | None) -> dict[str, Any]:
    """The job with every default filled, in the job's own field names: it can be estimated again as it is."""
    given = parsed.model_dump(exclude_none=True)
    filled = {name: value for name in _FILLED_FIELDS if (value := getattr(job, name)) is not None}
    for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "adapter_dtype"):
        if not job.is_peft:
            filled.pop(name, None)
    if parsed.framework_version is None and job.framework not in LATEST:
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


@functools.lru_cache(maxsize=1)
def ftcost_version() -> str:
    """The installed version of the package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ftcost")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+unknown"
