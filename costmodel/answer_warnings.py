"""What the figures of an answer ask the reader to do: one warning each, with the way out."""

from __future__ import annotations

from collections.abc import Iterator

from costmodel.capacity import Fit, evaluation_batch, evaluation_fits, expected_step_that_does_not_fit
from costmodel.cost import RunTime
from costmodel.defaults import BITSANDBYTES, ResolvedJob
from costmodel.described_job import DescribedJob
from costmodel.job_warnings import job_warnings
from costmodel.length_distribution import ASSUMED_LOG_SIGMA
from costmodel.lengths import longest_sequence
from costmodel.memory import MemoryBreakdown
from costmodel.slowest_gpu import waits_where_lengths_differ
from costmodel.step_time import StepTime
from costmodel.units import GIB


def answer_warnings(
    described: DescribedJob, memory: MemoryBreakdown, step: StepTime | None, fit: Fit | None, run: RunTime | None
) -> list[str]:
    """What follows from the figures, then what follows from the job alone."""
    return [
        *_about_lengths(described),
        *_about_the_gpu(described, step),
        *_about_unknown_times(described, step, run),
        *_about_fitting(described, memory, fit),
        *_about_masked_attention(described),
        *_about_experts(described, step),
        *_about_towers(described),
        *job_warnings(described.parsed, described.job, described.model, described.gpu),
    ]


def _about_lengths(described: DescribedJob) -> Iterator[str]:
    job, resolved, lengths = described.parsed, described.job, described.lengths
    if lengths is None:
        yield (
            "lengths are not given: memory is for sequences of max_length; give lengths (a mean and max, a histogram or a "
            "data set) for time and money"
        )
    elif job.lengths is not None and job.lengths.mean is not None:
        yield (
            f"only a mean length is given: a log-normal shape is assumed (sigma {ASSUMED_LOG_SIGMA}); give a histogram for "
            "the padding that your data really causes"
        )
    if job.lengths is None and described.tokens is not None and waits_where_lengths_differ(resolved):
        yield (
            f"the spread of lengths is not given: no wait of {resolved.num_gpus} GPUs for the one with most tokens is in "
            "the time; give lengths (a mean and max, a histogram or a data set)"
        )
    if lengths is not None and lengths.share_cut > 0:
        share = f"{lengths.share_cut:.1%}" if lengths.share_cut >= 0.001 else "fewer than 0.1%"
        yield f"{share} of the samples are longer than max_length {resolved.max_length} and are cut there"


def _about_the_gpu(described: DescribedJob, step: StepTime | None) -> Iterator[str]:
    resolved, gpu = described.job, described.gpu
    if gpu is None:
        yield "no gpu is given: memory only; name one to learn whether it fits, how long and how much"
        return
    if described.tokens is not None and step is None:
        yield (
            f"{gpu.name} has no known rate for {resolved.autocast_dtype or resolved.dtype}: no step time; use a type it "
            "supports (fp16 on Volta and Turing)"
        )
    if gpu.memory_is_marketed:
        yield f"the capacity of {gpu.name} is its marketed size; the driver reports a little less"


def _about_fitting(described: DescribedJob, memory: MemoryBreakdown, fit: Fit | None) -> Iterator[str]:
    resolved, gpu, loading = described.job, described.gpu, memory.load_device_bytes
    if loading is not None and loading > memory.peak_device_bytes:
        yield (
            f"loading the weights onto the card needs more than training does: {loading / GIB:.1f} GiB for a moment against "
            f"{memory.peak_device_bytes / GIB:.1f}"
        )
    if gpu is None or fit is None:
        return
    evaluation = evaluation_batch(resolved, *longest_sequence(resolved, described.lengths))
    if evaluation is not None and not evaluation_fits(
        described.model,
        resolved,
        evaluation,
        gpu.memory_bytes,
        is_padded=described.evaluation_is_padded,
        on_cpu=described.on_cpu,
    ):
        yield (
            f"the evaluation alone does not fit {gpu.name}, whatever the training batch: lower "
            f"per_device_eval_batch_size ({resolved.per_device_eval_batch_size})"
        )
    if fit.share_of_batches is not None and 0 < fit.share_of_batches < 1:
        micro_batches = resolved.gradient_accumulation_steps * resolved.num_gpus
        first = expected_step_that_does_not_fit(fit.share_of_batches, micro_batches)
        yield (
            f"{1 - fit.share_of_batches:.2%} of the batches would not fit "
            f"(one in {1 / (1 - fit.share_of_batches):,.0f}): the job would run until one comes, about step {first:,.0f}; "
            f"cut samples at {fit.max_length_tokens} tokens"
            + (f" or use batch size {fit.max_batch_size}" if fit.max_batch_size else "")
        )


def _about_masked_attention(described: DescribedJob) -> Iterator[str]:
    resolved, tokens = described.job, described.tokens
    if resolved.attends_across_documents and tokens is not None and tokens.expected.num_masked_pairs:
        masked = tokens.expected.num_masked_pairs / tokens.expected.num_attended_pairs
        yield (
            f"rows without padding under attn_implementation {resolved.attn_implementation}: attention is computed over the "
            f"whole micro-batch of {tokens.expected.num_tokens:,.0f} tokens and {masked:.0%} of it is masked; "
            "flash_attention_2 keeps the samples apart"
        )


def _about_experts(described: DescribedJob, step: StepTime | None) -> Iterator[str]:
    resolved, model = described.job, described.model
    if not (model.is_moe and resolved.fused_experts):
        return
    if resolved.quantization in BITSANDBYTES:
        size = sum(
            layer.experts.num_experts * layer.experts.params_per_expert * count
            for layer, count in model.layers
            if layer.experts
        )
        kept = 4 if resolved.prepare_model_for_kbit_training else 2
        yield (
            f"bitsandbytes does not quantise the stacked experts of transformers 5: {size * kept / GIB:.1f} GiB of expert "
            f"weights stay at {kept} bytes each"
            + (" (peft's prepare_model_for_kbit_training lifts them to fp32)" if kept == 4 else "")
        )
    if step is not None and resolved.experts_implementation == "batched_mm":
        yield "experts_implementation batched_mm copies expert weights for each token: use grouped_mm for training"


def _about_towers(described: DescribedJob) -> Iterator[str]:
    """Encoders of images and sound: what of them is counted."""
    model = described.model
    if model.towers:
        size = f"{model.tower_params / 1e6:,.0f} million" if model.tower_params >= 1e6 else f"{model.tower_params:,}"
        yield (
            f"{size} weights of {model.wrapper} encode images and sound: they are loaded too, and rows of text never reach "
            "them (load_towers false leaves them out); rows with images or sound cost more than is counted here"
        )
    if model.towers and _stops_at_unused_weights(described.job):
        yield (
            f"on several GPUs torch stops at weights that have no gradient, as those of {model.wrapper} beside its language "
            "model with rows of text: set ddp_find_unused_parameters true, or load the language model alone"
        )
    if model.uncounted_towers:
        yield (
            f"the weights of {' and '.join(model.uncounted_towers)}, which {model.wrapper} has beside its language model, "
            "are not counted: memory is low by them, and by adapters there"
        )


def _stops_at_unused_weights(job: ResolvedJob) -> bool:
    """Whether the Trainer does not look for them (5.24, trainer.py): checkpointing and no peft. TRL looks for them."""
    is_plain = job.num_gpus > 1 and job.sharding.stage == 0
    return is_plain and job.framework == "transformers" and not job.is_peft and job.gradient_checkpointing


def _about_unknown_times(described: DescribedJob, step: StepTime | None, run: RunTime | None) -> Iterator[str]:
    """Why there are no totals, or the seconds of evaluations or saves are null; the total then leaves them out."""
    job, by_epoch = described.job, "by epoch need num_samples: how many epochs max_steps makes is not known"
    if described.lengths is not None and run is None and step is not None:
        yield "num_samples (or max_steps) is not given: figures are for one step, totals are left out"
    if job.evaluates and not job.num_eval_samples and (run is None or run.eval_seconds is None):
        yield (
            "evaluations are scheduled but num_eval_samples is not given: eval_seconds is null and their time is not in the "
            "total; give num_eval_samples"
        )
    elif run is not None and run.eval_seconds is None:
        why = f"evaluations {by_epoch}" if job.eval_strategy == "epoch" else "the evaluation has no step time"
        yield f"{why}; eval_seconds is null and their time is not in the total"
    if run is not None and run.save_seconds is None:
        yield f"saves {by_epoch}; save_seconds is null and their time is not in the total"
