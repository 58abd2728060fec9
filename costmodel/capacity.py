"""Whether a job fits its card, and the largest batch and longest sequence that do: exact, by search on the monotone peak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from costmodel.defaults import ResolvedJob
from costmodel.described_job import DescribedJob
from costmodel.framework_defaults import offloads_activations, own_defaults
from costmodel.length_distribution import LengthDistribution
from costmodel.lengths import longest_batch, longest_sequence, row_multiple
from costmodel.memory import MemoryBreakdown, peak_device_bytes
from costmodel.model_spec import ModelSpec
from costmodel.workload import Batch

MAX_BATCH_SIZE: Final = 65_536
MAX_SEQUENCE_TOKENS: Final = 4_194_304


def largest_that_fits(peak: Callable[[int], int], capacity_bytes: int, upper: int) -> int:
    """The largest whole number ``n`` in 0..upper with ``peak(n) <= capacity_bytes``; ``peak`` must not decrease.

    The peak is nearly a straight line, so each step guesses from the line through the bracket before it halves.
    """
    low, low_peak = 1, peak(1)
    if low_peak > capacity_bytes:
        return 0
    high, high_peak = 2, 0
    while high <= upper and (high_peak := peak(high)) <= capacity_bytes:
        low, low_peak = high, high_peak
        high *= 8
    if high > upper:
        high, high_peak = upper, peak(upper)
        if high_peak <= capacity_bytes:
            return upper
    while high - low > 1:
        slope = (high_peak - low_peak) / (high - low)
        guess = low + int((capacity_bytes - low_peak) / slope) if slope > 0 else (low + high) // 2
        for candidate in (guess, guess + 1):  # on a straight line these two close the bracket
            if low < candidate < high:
                value = peak(candidate)
                if value <= capacity_bytes:
                    low, low_peak = candidate, value
                else:
                    high, high_peak = candidate, value
        if high - low > 1:
            middle = (low + high) // 2
            value = peak(middle)
            if value <= capacity_bytes:
                low, low_peak = middle, value
            else:
                high, high_peak = middle, value
    return low


def max_batch_size(
    model: ModelSpec,
    job: ResolvedJob,
    capacity_bytes: int,
    sequence_tokens: int,
    *,
    is_padded: bool,
    evaluation_is_padded: bool | None = None,
    on_cpu: bool = False,
    attended_tokens: int | None = None,
) -> int:
    """The largest ``per_device_train_batch_size`` whose longest batch fits; 0 when not even one sequence does.

    The evaluation's batch stays as it is: 0 as well when that alone does not fit. ``attended_tokens`` as in
    :func:`costmodel.lengths.longest_batch`.
    """
    evaluation = evaluation_batch(job, sequence_tokens, attended_tokens)

    def peak(size: int) -> int:
        return peak_device_bytes(
            model,
            job,
            longest_batch(job, size, sequence_tokens, attended_tokens),
            is_padded=is_padded and (size > 1 or job.packing),
            on_cpu=on_cpu,
            evaluation=evaluation,
            evaluation_is_padded=evaluation_is_padded,
        )

    return largest_that_fits(peak, capacity_bytes, MAX_BATCH_SIZE)


def evaluation_batch(job: ResolvedJob, sequence_tokens: int, attended_tokens: int | None = None) -> Batch | None:
    """The longest batch of an evaluation; ``None`` where the job has none."""
    if not job.evaluates:
        return None
    return longest_batch(job, job.per_device_eval_batch_size, sequence_tokens, attended_tokens)


def evaluation_fits(
    model: ModelSpec, job: ResolvedJob, evaluation: Batch, capacity_bytes: int, *, is_padded: bool, on_cpu: bool = False
) -> bool:
    """Whether the evaluation fits beside the smallest training batch: one token."""
    smallest = longest_batch(job, 1, 1)
    if peak_device_bytes(model, job, smallest, on_cpu=on_cpu) > capacity_bytes:
        return True  # nothing fits, and it is not the evaluation's fault
    both = peak_device_bytes(model, job, smallest, on_cpu=on_cpu, evaluation=evaluation, evaluation_is_padded=is_padded)
    return both <= capacity_bytes


def max_length_that_fits(
    model: ModelSpec,
    job: ResolvedJob,
    capacity_bytes: int,
    *,
    is_padded: bool,
    evaluation_is_padded: bool | None = None,
    on_cpu: bool = False,
    attended_tokens: int | None = None,
) -> int:
    """The longest padded sequence, in tokens, that fits at this job's batch sizes, of training and of evaluation.

    A multiple of ``pad_to_multiple_of`` where rows are padded to one, 0 where not even the first multiple fits.
    """
    multiple = row_multiple(job)

    def peak(num_multiples: int) -> int:
        tokens = num_multiples * multiple
        return peak_device_bytes(
            model,
            job,
            longest_batch(job, job.per_device_train_batch_size, tokens, attended_tokens),
            is_padded=is_padded,
            on_cpu=on_cpu,
            evaluation=evaluation_batch(job, tokens, attended_tokens),
            evaluation_is_padded=evaluation_is_padded,
        )

    return multiple * largest_that_fits(peak, capacity_bytes, max(1, MAX_SEQUENCE_TOKENS // multiple))


def share_of_batches_that_fit(dist: LengthDistribution, batch_size: int, longest_tokens_that_fit: int) -> float:
    """Chance that a random batch holds no sample longer than what fits: F(longest)^b."""
    if longest_tokens_that_fit >= dist.longest_tokens:
        return 1.0
    cumulative = sum(
        share for length, share in zip(dist.lengths, dist.shares, strict=False) if length <= longest_tokens_that_fit
    )
    return float(min(1.0, cumulative) ** batch_size)


def expected_step_that_does_not_fit(share_that_fits: float, micro_batches_per_step: int) -> float:
    """The mean optimizer step, counted from 1, at which the first batch comes that does not fit (samples in random order).

    A step goes through with ``share ** micro_batches``, so the first that does not is geometric.
    """
    return 1.0 / (1.0 - share_that_fits**micro_batches_per_step)


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a job fits its card, by how much, and what would."""

    verdict: str  # fits | tight | does_not_fit
    headroom_bytes: int
    share_of_batches: float | None
    max_batch_size: int
    max_length_tokens: int


def _accumulated_at(described: DescribedJob, batch_size: int) -> int:
    """Accumulation steps of the job at another micro-batch: litgpt's own follow it, where the job gives none."""
    job = described.job
    if "gradient_accumulation_steps" not in described.assumed or not batch_size:
        return job.gradient_accumulation_steps
    own = own_defaults(job.framework, is_peft=job.is_peft, lora_r=job.lora_r, num_gpus=job.num_gpus, batch_size=batch_size)
    return int(own.get("gradient_accumulation_steps", job.gradient_accumulation_steps))


def _offloads_at(described: DescribedJob, max_length: int) -> bool:
    """Whether the job offloads activations at another ``max_length``: Unsloth does at long ones, if the job says nothing."""
    job = described.job
    if described.parsed.activation_offloading is not None or not max_length:
        return job.activation_offloading
    return offloads_activations(job.framework, gradient_checkpointing=job.gradient_checkpointing, max_length=max_length)


def _stay_as_long(job: ResolvedJob, lengths: LengthDistribution | None) -> bool:
    """Whether longer rows would hold more documents, not longer ones: where none is cut, or the shortest one decides."""
    is_whole = lengths is not None and not lengths.share_cut
    return job.packing and job.padding_free and (is_whole or job.attends_across_documents)


def fit_of(described: DescribedJob, memory: MemoryBreakdown) -> Fit | None:
    """``None`` where no gpu is given."""
    model, job, gpu, lengths = described.model, described.job, described.gpu, described.lengths
    if gpu is None:
        return None
    capacity, on_cpu = gpu.memory_bytes, described.on_cpu
    loading = memory.load_device_bytes or 0
    high = memory.peak_device_bytes_high or memory.peak_device_bytes
    needed = max(memory.peak_device_bytes, loading)
    verdict = "does_not_fit" if needed > capacity else "tight" if max(high, loading) > capacity else "fits"
    if loading > capacity:  # no batch and no length would help
        return Fit(verdict, capacity - needed, 0.0 if lengths is not None else None, 0, 0)
    longest, attended = longest_sequence(job, lengths)

    def max_batch_of(job: ResolvedJob) -> int:
        return max_batch_size(
            model,
            job,
            capacity,
            longest,
            is_padded=described.mixes_lengths,
            evaluation_is_padded=described.evaluation_is_padded,
            on_cpu=on_cpu,
            attended_tokens=attended,
        )

    max_batch = max_batch_of(job)
    at_that_batch = _accumulated_at(described, max_batch)
    if (at_that_batch > 1) != (job.gradient_accumulation_steps > 1):  # whether gradients are held beside the next forward
        max_batch = max_batch_of(replace(job, gradient_accumulation_steps=at_that_batch))

    def max_length_of(job: ResolvedJob) -> int:
        return max_length_that_fits(
            model,
            job,
            capacity,
            is_padded=described.is_padded,
            evaluation_is_padded=described.evaluation_is_padded,
            on_cpu=on_cpu,
            attended_tokens=attended if attended < longest or _stay_as_long(job, lengths) else None,
        )

    longest_row = max_length = max_length_of(job)
    if (offloads := _offloads_at(described, max_length)) != job.activation_offloading:
        max_length = max_length_of(replace(job, activation_offloading=offloads))
    share = None
    if lengths is not None and not job.packing and job.padding != "max_length":
        share = share_of_batches_that_fit(lengths, job.per_device_train_batch_size, longest_row)
    elif lengths is not None:
        share = 0.0 if verdict == "does_not_fit" else 1.0
    return Fit(verdict, capacity - needed, share, max_batch, max_length)
