"""Two factors on the step time, fitted to measured steps. :mod:`costmodel.stored_calibrations` keeps and finds them.

    step = what grows with the tokens * device_factor, under and beside what does not * host_factor

``device_factor`` is on the device time that grows with the tokens; ``host_factor`` on what a step takes however few they
are: dispatch, expert loops, and the device's optimizer, dequantisation and adapter merges
(:func:`costmodel.step_time.step_time`).
Used only where a job asks for it (``calibration``), and always named in the answer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from costmodel import constants as c
from costmodel.defaults import ResolvedJob
from costmodel.device_rates import compute_dtype
from costmodel.errors import CostModelError
from costmodel.model_spec import ModelSpec
from costmodel.specs import GpuSpec
from costmodel.step_time import step_time
from costmodel.uncertainty import job_kind
from costmodel.workload import Batch

SCHEMA_VERSION: Final = 1

# How much the share of the step that follows the tokens must differ between the smallest and the largest batch before two
# factors can be told apart. Neighbouring small batches differ by 0.02 to 0.12 in the series of the paper and of Qwen 1, and
# lead to errors of 7 to 38 %; the smallest with a middle one by 0.15 to 0.89.
MIN_SHARE_DIFFERENCE: Final = 0.13
# ... and how much larger it must be: twice the batch is a neighbour (Qwen 1 at 256 and 512 tokens leads to 8 %).
MIN_TOKENS_RATIO: Final = 2.5
# What the fit takes for granted: a measured step is good to 2 % (and to what its like scatter by), a factor within 30 % of 1
# unless the steps say otherwise.
_STEP_SIGMA: Final = 0.02
# The standard deviation of log(device_factor / host_factor) beyond which two factors are not told apart: what two steps that
# differ by MIN_SHARE_DIFFERENCE give, each good to _STEP_SIGMA.
_MAX_RATIO_SIGMA: Final = math.sqrt(2.0) * _STEP_SIGMA / MIN_SHARE_DIFFERENCE
_FACTOR_SIGMA: Final = 0.3
_SAME_BATCH: Final = 1.1  # ratio of tokens below which two batches are one
_SMALLEST_ERROR: Final = 0.03  # another day, another machine of the same kind
_MAX_LEFT_OUT: Final = 8  # steps that are left out in turn, evenly chosen
_NORMAL_80: Final = 1.28  # standard deviations that hold 80 % of a normal distribution
_MAX_SIZE_RATIO: Final = 2.0  # of active parameters, between the calibrated models and a model that the error holds for


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One measured optimizer step, or the typical one of several alike. Steps of one ``source`` come from one run."""

    model: ModelSpec
    job: ResolvedJob
    gpu: GpuSpec
    batch: Batch  # one micro-batch
    seconds: float
    source: str
    scatter: float = 0.0  # standard error of ``seconds``, as a share, by the scatter of the steps it stands for
    slowest: Batch | None = None  # of the GPU that the others wait for

    @property
    def sigma(self) -> float:
        """How well ``seconds`` is known, as a share: no better than the model's own form, and no better than it scatters."""
        return math.hypot(_STEP_SIGMA, self.scatter)

    def predicted_seconds(self, device_factor: float = 1.0, host_factor: float = 1.0) -> float:
        """Raises :class:`CostModelError` where the card has no rate for the job's type."""
        step = step_time(
            self.model,
            self.job,
            self.gpu,
            self.batch,
            device_factor=device_factor,
            host_factor=host_factor,
            slowest=self.slowest,
        )
        if step is None:
            raise CostModelError(f"{self.gpu.name} has no known rate for {compute_dtype(self.job)}: nothing to calibrate")
        return step.step_seconds


@dataclass(frozen=True, slots=True)
class Style:
    """What must be the same for factors to carry over: the card, and how the step is executed on it."""

    gpu: str
    framework: str
    framework_major_version: int
    kind: str  # full, lora, or what the base under the adapters is quantised to
    compute_dtype: str
    experts: str | None  # how a mixture of experts runs its experts; None: a dense model
    torch_compile: bool
    use_liger_kernel: bool

    @staticmethod
    def of(model: ModelSpec, job: ResolvedJob, gpu: GpuSpec) -> Style:
        return Style(
            gpu=gpu.name,
            framework=job.framework,
            framework_major_version=job.major_version,
            kind=job_kind(job),
            compute_dtype=compute_dtype(job),
            experts=job.experts_implementation if model.is_moe else None,
            torch_compile=job.torch_compile,
            use_liger_kernel=job.use_liger_kernel,
        )

    def differences(self, other: Style) -> list[str]:
        """``gpu A40 against L40S`` for each field that differs."""
        return [
            f"{each.name} {ours} against {theirs}"
            for each in dataclasses.fields(self)
            if (ours := getattr(self, each.name)) != (theirs := getattr(other, each.name))
        ]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted factors and what they were fitted on. ``num_factors`` 1: one factor for all, and no error of its own."""

    device_factor: float
    host_factor: float
    num_factors: int
    error: float | None  # 80 % of the steps inside the range are expected within this share of the estimate
    residual: float  # root mean square of the fitted steps' own errors, as a share
    num_steps: int  # measured steps or groups of alike steps that were fitted
    num_runs: int
    num_tokens_low: float  # of a micro-batch, padding included
    num_tokens_high: float
    num_sequences_low: float
    num_sequences_high: float
    style: Style
    model_family: str
    models: tuple[str, ...]
    num_active_params_low: int
    num_active_params_high: int
    sources: tuple[str, ...]
    framework_version: str
    constants_version: str
    ftcost_version: str
    created_on: str  # ISO 8601 date

    def to_dict(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        return {"schema_version": SCHEMA_VERSION, **{k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}}

    def sentence(self) -> str:
        """What was found, for a person."""
        style, size = self.style, f"{self.num_tokens_low:,.0f} to {self.num_tokens_high:,.0f} tokens a micro-batch"
        of = f"{', '.join(self.models)} on {style.gpu}, {style.framework} {self.framework_version}, {style.kind}"
        if self.num_factors == 1:
            if self.num_tokens_high >= MIN_TOKENS_RATIO * self.num_tokens_low:
                why = (
                    "they do not tell host and device apart (all bound by the same thing, or scattered too much), so one "
                    "factor holds for everything between them; outside it may not"
                )
            else:
                why = (
                    "one batch cannot tell host and device apart, so one factor for everything: measure the smallest batch "
                    "and a middle one for both"
                )
            return (
                f"{of}: the step takes {self.device_factor:.2f} times the estimate ({size}); {why}. "
                "Intervals stay as they were."
            )
        return (
            f"{of}: what grows with the tokens takes {self.device_factor:.2f} times the estimate, the rest of the step "
            f"{self.host_factor:.2f} times ({size}, {self.num_steps} measured). Inside that range 80 % of the steps are "
            f"expected within {self.error:.0%}."
        )

    def covers(self, model: ModelSpec, batch: Batch) -> bool:
        """Whether ``error`` is about such a batch of such a model."""
        is_inside = self.num_tokens_low / _SAME_BATCH <= batch.num_tokens <= self.num_tokens_high * _SAME_BATCH
        is_of_size = (
            self.num_active_params_low / _MAX_SIZE_RATIO
            <= model.num_active_params
            <= self.num_active_params_high * _MAX_SIZE_RATIO
        )
        return is_inside and is_of_size and model.family == self.model_family


def fit(steps: Sequence[MeasuredStep], *, created_on: str, ftcost_version: str) -> Calibration:
    """Factors of steps measured in one style. Two where the batches differ enough, else one on everything.

    Raises :class:`CostModelError` for steps of different styles, and for neighbouring batches (it says which to measure).
    """
    if not steps:
        raise CostModelError("no measured step to calibrate on")
    first = Style.of(steps[0].model, steps[0].job, steps[0].gpu)
    for step in steps:
        if differences := first.differences(Style.of(step.model, step.job, step.gpu)):
            raise CostModelError(
                f"{steps[0].source} and {step.source} were not run alike ({'; '.join(differences)}); calibrate them apart"
            )
        if step.model.family != steps[0].model.family:
            raise CostModelError(
                f"{steps[0].source} and {step.source} trained different families ({steps[0].model.family}, "
                f"{step.model.family}); calibrate them apart"
            )
    num_factors = 2 if _can_tell_apart(steps) else 1
    device, host = _fitted(steps, num_factors)
    tokens = [step.batch.num_tokens for step in steps]
    sequences = [step.batch.num_sequences for step in steps]
    sizes = [step.model.num_active_params for step in steps]
    errors = [_log_error(step, device, host) for step in steps]
    residual = math.sqrt(sum(error * error for error in errors) / len(errors))
    return Calibration(
        device_factor=device,
        host_factor=host,
        num_factors=num_factors,
        error=_error(steps, residual, (device, host)) if num_factors == 2 else None,
        residual=residual,
        num_steps=len(steps),
        num_runs=len({step.source for step in steps}),
        num_tokens_low=min(tokens),
        num_tokens_high=max(tokens),
        num_sequences_low=min(sequences),
        num_sequences_high=max(sequences),
        style=first,
        model_family=steps[0].model.family,
        models=tuple(dict.fromkeys(step.model.name or step.model.family for step in steps)),
        num_active_params_low=min(sizes),
        num_active_params_high=max(sizes),
        sources=tuple(dict.fromkeys(step.source for step in steps)),
        framework_version=steps[0].job.framework_version,
        constants_version=c.CONSTANTS_VERSION,
        ftcost_version=ftcost_version,
        created_on=created_on,
    )


def token_share(step: MeasuredStep) -> float:
    """How much of the step follows its tokens: d log(seconds) / d log(device_factor), in 0..1."""
    small = 1e-3
    return math.log(step.predicted_seconds(1 + small) / step.predicted_seconds()) / math.log1p(small)


def _can_tell_apart(steps: Sequence[MeasuredStep]) -> bool:
    """Whether the steps determine two factors. Raises for neighbouring batches, which determine neither."""
    ordered = sorted(steps, key=lambda step: step.batch.num_tokens)
    small, large = ordered[0], ordered[-1]
    ratio = large.batch.num_tokens / small.batch.num_tokens
    shares = [token_share(step) for step in ordered]
    differs = max(shares) - min(shares) >= MIN_SHARE_DIFFERENCE
    if ratio >= MIN_TOKENS_RATIO:
        # Far apart, and yet bound alike from end to end, or scattered too much: one factor, the other would be noise.
        return differs and _ratio_sigma(ordered, shares) <= _MAX_RATIO_SIGMA
    if len({step.source for step in steps}) == 1 or ratio <= _SAME_BATCH:
        return False
    raise CostModelError(
        f"{small.batch.num_tokens:.0f} and {large.batch.num_tokens:.0f} tokens a micro-batch are neighbours: a line through "
        f"them says little of any other batch; {_batch_to_measure(small, large, min(shares))}, or give one of them alone "
        "for a single factor"
    )


def _ratio_sigma(steps: Sequence[MeasuredStep], shares: Sequence[float]) -> float:
    """Standard deviation of log(device_factor / host_factor), had the steps alone to say: that of a line's slope.

    A step's log error is log(host) + its share of tokens · log(device / host), give or take its ``sigma``.
    """
    weights = [1.0 / step.sigma**2 for step in steps]
    mean = sum(weight * share for weight, share in zip(weights, shares, strict=True)) / sum(weights)
    spread = sum(weight * (share - mean) ** 2 for weight, share in zip(weights, shares, strict=True))
    return 1.0 / math.sqrt(spread) if spread else math.inf


def _batch_to_measure(small: MeasuredStep, large: MeasuredStep, share: float) -> str:
    """Advice: the smallest multiple of the larger batch that is far enough from the smaller one, whose share is given."""
    for times in (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64):
        batch = Batch(*(times * value for value in dataclasses.astuple(large.batch)))
        is_larger = batch.num_tokens >= MIN_TOKENS_RATIO * small.batch.num_tokens
        if is_larger and token_share(dataclasses.replace(large, batch=batch)) - share >= 1.5 * MIN_SHARE_DIFFERENCE:
            return (
                f"measure the smallest batch and one of at least {batch.num_tokens:.0f} tokens "
                f"({times:g} times the larger of these)"
            )
    return "measure the smallest batch and the largest that fits"


def _log_error(step: MeasuredStep, device: float, host: float) -> float:
    return math.log(step.predicted_seconds(device, host) / step.seconds)


def _fitted(steps: Sequence[MeasuredStep], num_factors: int, start: tuple[float, float] = (1.0, 1.0)) -> tuple[float, float]:
    """(device_factor, host_factor): least squares on the log errors in units of ``sigma``, each factor held loosely at 1.

    Two unknowns and a smooth, monotone model: Newton's method with the step halved until the cost falls.
    """
    if num_factors == 1:  # by their mean, as two are: a bill is the sum of the steps
        factor = math.exp(-sum(_log_error(step, 1.0, 1.0) for step in steps) / len(steps))
        return factor, factor

    def errors(x: float, y: float) -> list[float]:
        return [_log_error(step, math.exp(x), math.exp(y)) / step.sigma for step in steps]

    def cost(values: Sequence[float], x: float, y: float) -> float:
        return sum(value * value for value in values) + (x * x + y * y) / _FACTOR_SIGMA**2

    x, y = math.log(start[0]), math.log(start[1])
    small = 1e-5
    now = errors(x, y)
    for _ in range(50):
        slopes_x = [(up - value) / small for up, value in zip(errors(x + small, y), now, strict=True)]
        slopes_y = [(up - value) / small for up, value in zip(errors(x, y + small), now, strict=True)]
        held = 1 / _FACTOR_SIGMA**2
        xx = held + sum(a * a for a in slopes_x)
        yy = held + sum(b * b for b in slopes_y)
        xy = sum(a * b for a, b in zip(slopes_x, slopes_y, strict=True))
        to_x = -held * x - sum(a * value for a, value in zip(slopes_x, now, strict=True))
        to_y = -held * y - sum(b * value for b, value in zip(slopes_y, now, strict=True))
        determinant = xx * yy - xy * xy
        move_x, move_y = (yy * to_x - xy * to_y) / determinant, (xx * to_y - xy * to_x) / determinant
        scale, before = 1.0, cost(now, x, y)
        while scale > 1e-6:
            there = errors(x + scale * move_x, y + scale * move_y)
            if cost(there, x + scale * move_x, y + scale * move_y) < before:
                x, y, now = x + scale * move_x, y + scale * move_y, there
                break
            scale /= 2
        if scale <= 1e-6 or scale * max(abs(move_x), abs(move_y)) < 1e-4:
            break
    return math.exp(x), math.exp(y)


def _error(steps: Sequence[MeasuredStep], residual: float, start: tuple[float, float]) -> float:
    """What a step in between misses by, 80 % of the time: by what the fit leaves over, by how well the steps themselves are
    known, and with each step left out in turn.

    Fewer than five steps cannot say: then no less than two batches miss by in the measured series.
    """
    ordered = sorted(steps, key=lambda step: step.batch.num_tokens)
    left_over = _NORMAL_80 * residual * math.sqrt(len(steps) / (len(steps) - 2)) if len(steps) > 2 else 0.0
    left_over = max(left_over, _NORMAL_80 * math.sqrt(sum(step.scatter**2 for step in steps) / len(steps)))
    if len(ordered) < 5:
        return max(c.CALIBRATED_STEP_INTERVAL, left_over)
    missed = []
    for place in range(1, len(ordered) - 1, max(1, len(ordered) // _MAX_LEFT_OUT)):
        others = ordered[:place] + ordered[place + 1 :]
        missed.append(abs(_log_error(ordered[place], *_fitted(others, 2, start))))
    return max(_SMALLEST_ERROR, left_over, _quantile(missed, 0.8))


def _quantile(values: Sequence[float], share: float) -> float:
    """Linear between the ordered values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
