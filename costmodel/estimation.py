"""``estimate(job)``: the one place that calls all the others, in the order a reader would ask."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from costmodel.answer import Estimate, answer_from
from costmodel.answer_warnings import answer_warnings
from costmodel.arguments import must_be, plain_digits
from costmodel.capacity import evaluation_batch, fit_of
from costmodel.cost import RunTime, run_time, schedule
from costmodel.described_job import DescribedJob, TokensSeen, describe
from costmodel.errors import CostModelError
from costmodel.expert_load import ExpertLoad
from costmodel.lengths import batch_tokens, longest_batch, longest_sequence
from costmodel.memory import MemoryBreakdown, loss_bytes, peak_memory
from costmodel.price_catalog import find_price
from costmodel.slowest_gpu import slowest_batch
from costmodel.specs import MAX_USD_PER_GPU_HOUR, GpuSpec, Job, Price, parse_job
from costmodel.step_time import Factors, StepTime, imbalance_seconds, step_time
from costmodel.uncertainty import memory_interval, nearest_runs, step_interval_factor
from costmodel.workload import Batch

if TYPE_CHECKING:
    from costmodel.calibration import MeasuredStep
    from costmodel.stored_calibrations import Applied

PRICE_VARIABLE: Final = "FTCOST_USD_PER_GPU_HOUR"


def estimate(job: Job | Mapping[str, Any] | None = None, /, **fields: Any) -> Estimate:
    """Memory, step time, hours and dollars of one fine-tuning job.

    ``job`` is a :class:`Job` or a mapping with its fields; keyword fields come on top. Needs no GPU, no network, no torch.
    Raises :class:`CostModelError` for input that is wrong or not known, with the way out.
    """
    return _estimate(parse_job(merged_job(job, fields)), None)


def estimate_from_tokens(job: Job | Mapping[str, Any], seen: TokensSeen) -> Estimate:
    """The estimate of a job on the micro-batches it was really fed, in place of ``lengths``.

    Raises :class:`CostModelError` as :func:`estimate` does.
    """
    return _estimate(parse_job(job), seen)


def measured_step(job: Job | Mapping[str, Any], seconds: float, source: str, seen: TokensSeen | None = None) -> MeasuredStep:
    """A measured optimizer step of ``job``, on the batches of its ``lengths`` or on those ``seen``, to calibrate with.

    Raises :class:`CostModelError` where the job lacks what a step time needs.
    """
    from costmodel.calibration import MeasuredStep

    described = describe(parse_job(job), seen)
    if described.gpu is None:
        raise CostModelError(f"{source}: no gpu is given, so there is no step time to calibrate")
    if described.tokens is None:
        raise CostModelError(f"{source}: lengths are not given, so the tokens of the measured step are not known")
    batch, slowest = described.tokens.expected, _slowest(described)
    return MeasuredStep(described.model, described.job, described.gpu, batch, seconds, source, slowest=slowest)


def estimated_imbalance_seconds(
    job: Job | Mapping[str, Any], load: ExpertLoad, seen: TokensSeen | None = None, *, expert_ranks: int = 1
) -> float | None:
    """:func:`costmodel.step_time.imbalance_seconds` of ``job``, on the batches of its ``lengths`` or on those ``seen``.

    ``None`` without a gpu, without lengths, or where the device's rate is not known.
    """
    described = describe(parse_job(job), seen)
    if described.gpu is None or described.tokens is None:
        return None
    batch = described.tokens.expected
    return imbalance_seconds(described.model, described.job, described.gpu, batch, load, expert_ranks=expert_ranks)


def _estimate(parsed: Job, seen: TokensSeen | None) -> Estimate:
    described = describe(parsed, seen)
    model, gpu, job, tokens = described.model, described.gpu, described.job, described.tokens
    memory = _memory(described)
    fit = fit_of(described, memory)
    warnings: list[str] = []
    applied = _calibration(described, warnings)
    factors = _factors(applied)
    step, interval = None, None
    evidence: tuple[dict[str, Any], ...] = ()
    if gpu and tokens:
        step = step_time(model, job, gpu, tokens.expected, slowest=_slowest(described), **factors)
        if step and not described.on_cpu:
            evidence = nearest_runs(model, job, gpu, tokens.expected)
    if gpu and step:
        interval = step_interval_factor(model, job, gpu, step, distance=evidence[0]["distance"] if evidence else 0.0)
        interval = applied.interval_factor(interval) if applied else interval
    run = _run(described, step, factors)
    price = _price(described.parsed, gpu)
    warnings += answer_warnings(described, memory, step, fit, run)
    return answer_from(described, memory, fit, step, interval, run, price, evidence, applied, tuple(warnings))


def _calibration(described: DescribedJob, warnings: list[str]) -> Applied | None:
    """What the job's calibration says of it; ``warnings`` gets why it is not used. Read only where there is one."""
    given, gpu, tokens = described.parsed.calibration, described.gpu, described.tokens
    if given is None:
        return None
    from costmodel.stored_calibrations import (  # a plain estimate starts faster without it
        check_calibration,
        find_calibration,
    )

    if gpu and tokens:
        return find_calibration(given, described.model, described.job, gpu, tokens.expected, warnings.append)
    check_calibration(given)
    return None


def _factors(applied: Applied | None) -> Factors:
    if applied is None:
        return {}
    return {"device_factor": applied.calibration.device_factor, "host_factor": applied.calibration.host_factor}


def _slowest(described: DescribedJob) -> Batch | None:
    """The batch of the GPU that the others wait for; ``None`` where they wait for none."""
    job, lengths, tokens = described.job, described.lengths, described.tokens
    if lengths is None or tokens is None:
        return None
    return slowest_batch(job, lengths, tokens.expected, job.gradient_accumulation_steps)


def merged_job(job: Job | Mapping[str, Any] | None, fields: Mapping[str, Any]) -> Job | Mapping[str, Any]:
    """``job`` with keyword ``fields`` on top, not yet parsed."""
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


def _memory(described: DescribedJob) -> MemoryBreakdown:
    model, job, lengths, tokens = described.model, described.job, described.lengths, described.tokens
    longest = longest_sequence(job, lengths)
    batch = tokens.longest if tokens else longest_batch(job, job.per_device_train_batch_size, *longest)
    evaluation, on_cpu = evaluation_batch(job, *longest), described.on_cpu
    memory = peak_memory(
        model,
        job,
        batch,
        is_padded=described.is_padded,
        on_cpu=on_cpu,
        evaluation=evaluation,
        evaluation_is_padded=described.evaluation_is_padded,
    )
    varies = lengths is not None and len(lengths.lengths) > 1 and not job.packing and job.padding != "max_length"
    capacity = described.gpu.memory_bytes if described.gpu else None
    low, high = memory_interval(
        model,
        job,
        memory,
        on_cpu=on_cpu,
        varying_loss_bytes=loss_bytes(model, job, batch) if varies else 0.0,
        capacity_bytes=capacity,
    )
    return replace(memory, peak_device_bytes_low=low, peak_device_bytes_high=high, capacity_bytes=capacity)


def _run(described: DescribedJob, step: StepTime | None, factors: Factors) -> RunTime | None:
    model, job, gpu, lengths, tokens = described.model, described.job, described.gpu, described.lengths, described.tokens
    if gpu is None or lengths is None or tokens is None or step is None:
        return None
    evaluated = batch_tokens(job, lengths, evaluates=True) if job.evaluates and job.num_eval_samples else None
    plan = schedule(job, tokens, evaluated)
    if plan is None:
        return None
    eval_seconds = None
    if evaluated is not None and plan.num_evaluations:
        # the ranks gather the loss of each evaluated batch
        in_turn = replace(job, per_device_train_batch_size=job.per_device_eval_batch_size)
        slowest = slowest_batch(in_turn, lengths, evaluated.expected, 1)
        timed = step_time(model, job, gpu, evaluated.expected, micro_batches=1.0, slowest=slowest, **factors)
        eval_seconds = timed.forward_seconds if timed else None
    return run_time(model, job, plan, step, eval_seconds, on_cpu=gpu.vendor == "CPU")


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
            usd = float(plain_digits(text))
            source = f"environment variable {PRICE_VARIABLE}"
            return Price(usd_per_gpu_hour=usd, usd_per_instance_hour=usd, tier="given", source=source)
        except ValueError:
            raise must_be(
                PRICE_VARIABLE, f"a positive number of dollars, at most {MAX_USD_PER_GPU_HOUR:,.0f}", text
            ) from None
    return None
