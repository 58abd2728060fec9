"""Measurements against the estimate: measured over predicted by term, and one sentence to act on. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

ON_PLAN_SHARE: Final = 0.1  # within 10 % of the prediction there is nothing to act on
WAIT_SHARE: Final = 0.05  # of a step; below it, waiting for data is no cause
_WORTHWHILE_SHARE: Final = 0.1  # of a step; below it, waiting for data is not worth a change
_MIN_CAUSE_SHARE: Final = 0.3  # of the excess; what explains less is not named as its cause
_MOST_OF_IT: Final = 0.5
_ONE_TERM_RATIO: Final = 3.0  # a step further off than this is no matter of one term of the estimate
_OF_ANY_DEVICE: Final = frozenset({"num_tokens_per_step", "num_non_padding_tokens_per_step"})
_TOP_GROUP_SHARE: Final = 0.3  # of the predicted step; below it, no single term stands out

# The answer's groups of a step, in words.
GROUP_NAMES: Final = {
    "attention_linears": "the attention projections",
    "attention_scores": "attention scores",
    "mlp": "the MLP products",
    "experts": "the expert products",
    "expert_loop": "the Python loop over experts",
    "expert_imbalance": "the uneven load of the experts",
    "router": "the router",
    "scan": "the scans of Mamba and linear attention",
    "elementwise": "element-wise kernels",
    "adapters": "the LoRA adapters",
    "adapter_merge": "merging LoRA into the expert stacks",
    "head_and_loss": "the head and the loss",
    "dequantisation": "dequantising the weights",
    "optimizer": "the optimizer",
    "communication": "communication between the GPUs",
    "waiting_for_slowest_gpu": "waiting for the GPU with the longest batches",
    "host": "Python and kernel launches",
}

# NVML's clock event reasons (nvml.h): what slowed the clocks, and what to do about it.
_THROTTLE_CAUSES: Final = (
    (0x08 | 0x40, "the GPU slowed down for heat or power (hardware slowdown); check its cooling and power supply"),
    (0x20, "the GPU lowered its clocks for heat; check its cooling"),
    (0x80, "the power brake lowered the GPU's clocks; ask the machine's owner"),
    (0x04, "the GPU ran at its power cap; raise the limit (nvidia-smi -pl) or expect this speed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the steps so far (warm-up left out) showed. ``None``: not measured."""

    num_steps: int = 0
    step_seconds: float | None = None  # mean
    data_wait_seconds: float | None = None  # mean, part of step_seconds
    num_tokens_per_step: float | None = None
    num_non_padding_tokens_per_step: float | None = None
    tokens_per_second: float | None = None
    non_padding_tokens_per_second: float | None = None
    peak_allocated_bytes: int | None = None  # torch's, over training steps
    peak_reserved_bytes: int | None = None
    load_max_over_mean: float | None = None  # expert load, mean over layers
    imbalance_step_seconds: float | None = None  # what that uneven load adds to a step, by the cost model
    throttle_reasons: int | None = None  # NVML bit mask, OR over the steps
    busy_fraction: float | None = None  # of the GPU
    processor_wait_fraction: float | None = None  # of the time, the training thread waited for a processor
    mfu: float | None = None
    dataloader_num_workers: int | None = None
    median_step_seconds: float | None = None  # at the tokens of the mean step
    predicted_gpu: str | None = None  # the card that was predicted for, where it is not the device that trained
    profiled_group_seconds: Mapping[str, float] | None = None  # of profiled steps, by the estimate's groups; its cost inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """``ratios``: term -> measured / predicted, 1.00 = on plan; only terms that both sides know.

    Terms are the answer's names (``step_seconds``, ``num_tokens_per_step``, ``peak_allocated_bytes``, ...), and
    ``step_seconds_without_data_wait``, which tells a slow loader from slow training.
    """

    ratios: dict[str, float] = field(default_factory=dict)
    verdict: str | None = None


def compare(estimate: Mapping[str, Any] | None, measured: Measured) -> Comparison:
    """Ratios and verdict. ``estimate``: the answer's mapping (``Estimate.to_dict()``); ``None``: no prediction."""
    ratios = _ratios(estimate, measured) if estimate is not None else {}
    if measured.predicted_gpu is not None:
        ratios = {name: ratio for name, ratio in ratios.items() if name in _OF_ANY_DEVICE}
    return Comparison(ratios=ratios, verdict=_verdict(estimate, measured, ratios))


def not_comparable(gpu: str) -> str:
    """Said in place of ratios and a verdict on speed."""
    return f"the prediction is for {gpu}, which is not the device that trains: time and memory are not comparable"


def _ratios(estimate: Mapping[str, Any], measured: Measured) -> dict[str, float]:
    memory = estimate.get("memory") or {}
    without_wait: float | None = None
    if measured.step_seconds is not None and measured.data_wait_seconds is not None:
        without_wait = measured.step_seconds - measured.data_wait_seconds
    terms: tuple[tuple[str, float | None, Any], ...] = (
        ("step_seconds", measured.step_seconds, estimate.get("step_seconds")),
        ("step_seconds_without_data_wait", without_wait, estimate.get("step_seconds")),
        ("num_tokens_per_step", measured.num_tokens_per_step, estimate.get("num_tokens_per_step")),
        (
            "num_non_padding_tokens_per_step",
            measured.num_non_padding_tokens_per_step,
            estimate.get("num_non_padding_tokens_per_step"),
        ),
        ("tokens_per_second", measured.tokens_per_second, estimate.get("tokens_per_second")),
        (
            "non_padding_tokens_per_second",
            measured.non_padding_tokens_per_second,
            estimate.get("non_padding_tokens_per_second"),
        ),
        ("mfu", measured.mfu, estimate.get("mfu")),
        # Like with like: torch's allocated bytes against allocated, reserved against reserved.
        ("peak_allocated_bytes", measured.peak_allocated_bytes, memory.get("peak_allocated_bytes")),
        ("peak_reserved_bytes", measured.peak_reserved_bytes, memory.get("peak_reserved_bytes")),
    )
    return {name: ratio for name, value, predicted in terms if (ratio := _ratio(value, predicted)) is not None}


def _ratio(value: float | None, predicted: Any) -> float | None:
    if value is None or predicted is None or not float(predicted) > 0 or not math.isfinite(float(predicted)):
        return None
    ratio = float(value) / float(predicted)
    return ratio if math.isfinite(ratio) else None


def _verdict(estimate: Mapping[str, Any] | None, measured: Measured, ratios: Mapping[str, float]) -> str | None:
    if estimate is not None and measured.predicted_gpu is not None:
        return not_comparable(measured.predicted_gpu)
    step = ratios.get("step_seconds")
    if estimate is None or step is None or measured.step_seconds is None:
        share = _wait_share(measured)
        return _waits_for_data(measured, share, "each step") if share >= _WORTHWHILE_SHARE else None
    if step > 1 + ON_PLAN_SHARE:
        cause = _cause_of_slowness(estimate, measured, ratios)
    elif step < 1 - ON_PLAN_SHARE:
        cause = _cause_of_speed(estimate, measured, ratios)
    else:
        return _memory_verdict(ratios) or f"step {step:.2f}x the prediction: on plan"
    return f"step {step:.2f}x the prediction: {cause}"


@dataclass(frozen=True, slots=True)
class _Cause:
    """``seconds`` of a step that it explains, at most; ``text``: what it is and what to do."""

    seconds: float
    text: str


def _cause_of_slowness(estimate: Mapping[str, Any], measured: Measured, ratios: Mapping[str, float]) -> str:
    """The measured cause that explains most of the seconds above the prediction; without one, the term most likely off."""
    assert measured.step_seconds is not None
    predicted = float(estimate["step_seconds"])
    excess = measured.step_seconds - predicted
    causes = [
        cause
        for cause in (
            _data_wait(measured),
            _more_tokens(predicted, ratios),
            _busy_machine(measured),
            _idle_gpu(estimate, measured),
            _uneven_experts(measured),
        )
        if cause is not None and cause.seconds >= _MIN_CAUSE_SHARE * excess
    ]
    most = max(causes, key=lambda cause: cause.seconds, default=None)
    throttled = _throttled(measured)
    # A throttled GPU slows everything that runs on it, by what nothing else explains.
    if throttled is not None and (most is None or excess - most.seconds > most.seconds):
        return throttled
    if most is None:
        return _on_plan_by_median(estimate, measured) or _least_sure_term(estimate, measured)
    # In factors, since what takes a share of the time slows everything else by one.
    ratio, without = measured.step_seconds / predicted, max(0.0, measured.step_seconds - most.seconds) / predicted
    if without <= 1 + ON_PLAN_SHARE:
        return most.text
    explained = f"{most.text}; that explains {ratio / without:.2f}x of it"
    others = [cause for cause in causes if cause is not most]
    if others:
        return f"{explained}; of the rest ({without:.2f}x): {max(others, key=lambda cause: cause.seconds).text}"
    slowest = _slowest_group(estimate, measured, slowed_by=1.0 if most == _data_wait(measured) else ratio / without)
    if slowest is not None:
        return f"{explained}, and most of the rest ({without:.2f}x) is {slowest.text}"
    return f"{explained}, the rest ({without:.2f}x) is not explained by anything measured"


def _data_wait(measured: Measured) -> _Cause | None:
    share = _wait_share(measured)
    if not share or measured.data_wait_seconds is None:
        return None
    return _Cause(measured.data_wait_seconds, _waits_for_data(measured, share, "it"))


def _more_tokens(predicted_seconds: float, ratios: Mapping[str, float]) -> _Cause | None:
    more = ratios.get("num_tokens_per_step", 1.0) - 1.0
    if more <= 0:
        return None
    return _Cause(  # a step's time is near proportional to its tokens
        more / (1 + more) * ratios["step_seconds"] * predicted_seconds,
        f"steps hold {more:.0%} more tokens than expected; give the data set's real lengths, or expect this cost",
    )


def _busy_machine(measured: Measured) -> _Cause | None:
    """Only on the kernel's own count: a thread that could have run and had no processor."""
    share = measured.processor_wait_fraction
    if share is None or share < WAIT_SHARE or measured.step_seconds is None:
        return None
    text = (
        f"the training thread waited {share:.0%} of the time for a processor that others used; "
        "free the machine or give the job more cores"
    )
    return _Cause(share * measured.step_seconds, text)


def _idle_gpu(estimate: Mapping[str, Any], measured: Measured) -> _Cause | None:
    """Seconds that the GPU waited for the host beyond those predicted."""
    if measured.busy_fraction is None or measured.step_seconds is None:
        return None
    idle = (1 - measured.busy_fraction) * measured.step_seconds
    more = idle - _groups(estimate).get("host", 0.0) - (measured.data_wait_seconds or 0.0)
    if more <= 0:
        return None
    advice = _host_advice(estimate)
    return _Cause(more, f"the GPU idles {1 - measured.busy_fraction:.0%} of the time waiting for the host; {advice}")


def _uneven_experts(measured: Measured) -> _Cause | None:
    """What the cost model says an uneven load adds: the products are the same in sum, so it is often next to nothing."""
    uneven, seconds = measured.load_max_over_mean, measured.imbalance_step_seconds
    if uneven is None or not seconds:
        return None
    return _Cause(
        seconds,
        f"the busiest expert gets {uneven:.1f}x the average tokens, which adds {seconds:.2g} s to each step; a larger "
        "router_aux_loss_coef, where the model has one, evens the load out",
    )


def _throttled(measured: Measured) -> str | None:
    reasons = measured.throttle_reasons or 0
    return next((cause for bits, cause in _THROTTLE_CAUSES if reasons & bits), None)


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    text: str


def _slowest_group(estimate: Mapping[str, Any], measured: Measured, *, slowed_by: float = 1.0) -> _Group | None:
    """By the profiled steps, the group that is longest beyond its prediction, if that is most of what is to be explained.

    ``slowed_by``: the factor by which something else slows every group. The profiler costs time itself, so its seconds count
    as shares of the steps without it.
    """
    profiled, predicted = measured.profiled_group_seconds or {}, _groups(estimate)
    total = math.fsum(profiled.values())
    if not predicted or not total > 0 or measured.step_seconds is None:
        return None
    step = measured.step_seconds - (measured.data_wait_seconds or 0.0)
    rest = step - slowed_by * float(estimate["step_seconds"])
    seconds = {name: step * each / total for name, each in profiled.items()}
    excess = {name: each - slowed_by * predicted.get(name, 0.0) for name, each in seconds.items()}
    name = max(excess, key=lambda each: excess[each])
    if rest <= 0 or excess[name] < _MOST_OF_IT * rest:
        return None
    beside = f"{predicted[name]:.2g} s predicted" if predicted.get(name) else "none predicted"
    return _Group(name, f"{GROUP_NAMES.get(name, name)}, by the profile {seconds[name]:.2g} s of each step with {beside}")


def _least_sure_term(estimate: Mapping[str, Any], measured: Measured) -> str:
    """Nothing measured explains it: which term of the estimate it most likely is."""
    groups, predicted = _groups(estimate), float(estimate["step_seconds"])
    high = estimate.get("step_seconds_high")
    within = ""
    if high is not None and measured.step_seconds is not None and measured.step_seconds <= float(high):
        within = f"inside the estimate's own band (up to {float(high) / predicted:.2f}x), "
    name = max(groups, key=lambda each: groups[each], default=None)
    share = groups[name] / predicted if name is not None else 0.0
    calibrate = _calibrate_advice(estimate, measured)
    slowest = _slowest_group(estimate, measured)
    if slowest is not None:
        return f"{within}most of the excess is {slowest.text}; {_kernel_advice(estimate, slowest.name) or calibrate}"
    if measured.step_seconds is not None and measured.step_seconds > _ONE_TERM_RATIO * predicted:
        return (
            "nothing measured explains it, and it is too much for one term of the estimate; look for other work on the "
            "machine before `ftcost calibrate`"
        )
    if not groups:
        return f"{within}training itself is slower than modelled; {calibrate}"
    if measured.busy_fraction is not None and name == "host":
        # The GPU was busy after all, so it is not the host that was underestimated.
        others = {each: seconds for each, seconds in groups.items() if each != "host"}
        name = max(others, key=lambda each: others[each], default=None)
        share = others[name] / predicted if name is not None else 0.0
    if measured.profiled_group_seconds:
        return f"{within}training is slower than modelled, no one part of it alone by the profile; {calibrate}"
    if name is None or share < _TOP_GROUP_SHARE:
        unknown = "which part of it was not measured (profile_steps= shows it)"
        return f"{within}training is slower than modelled, {unknown}; {calibrate}"
    advice = _kernel_advice(estimate, name) or calibrate
    return f"{within}most likely {GROUP_NAMES.get(name, name)} ({share:.0%} of the predicted step); {advice}"


def _kernel_advice(estimate: Mapping[str, Any], group: str) -> str | None:
    """A setting that is not on yet and lightens ``group``."""
    if group == "attention_scores" and _job(estimate, "attn_implementation") == "eager":
        return "attn_implementation='sdpa' keeps the score matrix out of memory"
    if group == "head_and_loss" and not _job(estimate, "use_liger_kernel") and not _job(estimate, "fused_loss"):
        return "use_liger_kernel=True fuses the head with the loss"
    if group == "dequantisation":
        return "a larger per_device_train_batch_size dequantises less often"
    if group == "expert_loop" and _job(estimate, "experts_implementation") == "eager":
        return "experts_implementation='grouped_mm' removes it"
    return _host_advice(estimate) if group == "host" else None


def _host_advice(estimate: Mapping[str, Any]) -> str:
    larger = "a larger per_device_train_batch_size gives it more work for each launch"
    return larger if _job(estimate, "torch_compile") else f"{larger}, torch_compile=True fewer launches"


def _groups(estimate: Mapping[str, Any]) -> dict[str, float]:
    groups = (estimate.get("step") or {}).get("by_group_seconds") or {}
    return {str(name): float(seconds) for name, seconds in groups.items()}


def _job(estimate: Mapping[str, Any], name: str) -> Any:
    """A setting of the predicted job, every default filled in."""
    return (estimate.get("job") or {}).get(name)


def _on_plan_by_median(estimate: Mapping[str, Any], measured: Measured) -> str | None:
    """Where the mean is off and the typical step is not: a few long steps, most of which `ftcost calibrate` leaves out."""
    median = _ratio(measured.median_step_seconds, estimate["step_seconds"])
    if median is None or abs(median - 1) > ON_PLAN_SHARE:
        return None
    return f"the median step is on plan ({median:.2f}x), so it is single steps that differ and not the model of the time"


def _calibrate_advice(estimate: Mapping[str, Any], measured: Measured) -> str:
    """Says so where single long steps, which `ftcost calibrate` leaves out, move the mean."""
    median, mean = (
        _ratio(seconds, estimate["step_seconds"]) for seconds in (measured.median_step_seconds, measured.step_seconds)
    )
    by_median = ""
    if median is not None and mean is not None and abs(median / mean - 1) > ON_PLAN_SHARE:
        by_median = f", which leaves out steps of over twice the typical (the median is {median:.2f}x),"
    return f"`ftcost calibrate` on this run{by_median} makes the next estimate closer"


def _cause_of_speed(estimate: Mapping[str, Any], measured: Measured, ratios: Mapping[str, float]) -> str:
    fewer_tokens = 1.0 - ratios.get("num_tokens_per_step", 1.0)
    on_plan = _on_plan_by_median(estimate, measured)
    faster = f"faster than modelled; {_calibrate_advice(estimate, measured)}"
    if fewer_tokens <= ON_PLAN_SHARE / 2:
        return on_plan or faster
    said = f"steps hold {fewer_tokens:.0%} fewer tokens than expected"
    rest = ratios["step_seconds"] / (1 - fewer_tokens)  # as if the time went with the tokens
    if rest >= 1 - ON_PLAN_SHARE or on_plan:
        return said
    return f"{said}; that explains {1 - fewer_tokens:.2f}x of it, the rest ({rest:.2f}x) is {faster}"


def _memory_verdict(ratios: Mapping[str, float]) -> str | None:
    peak = ratios.get("peak_allocated_bytes")
    if peak is None or peak <= 1 + ON_PLAN_SHARE:
        return None
    return f"peak memory {peak:.2f}x the prediction, speed on plan; keep that much free before raising the batch size"


def _wait_share(measured: Measured) -> float:
    """Share of the step spent waiting for data; 0.0 where it is no cause or not known."""
    if not measured.step_seconds or measured.data_wait_seconds is None:
        return 0.0
    share = measured.data_wait_seconds / measured.step_seconds
    return share if share >= WAIT_SHARE else 0.0


def _waits_for_data(measured: Measured, share: float, of: str) -> str:
    """With advice where the wait is long enough to act on."""
    said = f"{share:.0%} of {of} is waiting for data"
    if share < _WORTHWHILE_SHARE:
        return said
    workers = measured.dataloader_num_workers
    if workers:
        return f"{said}; raise dataloader_num_workers (now {workers}) or prepare the data before training"
    return f"{said}; raise dataloader_num_workers"
