"""A job with everything looked up that it names: model, GPU, defaults, lengths, and the batch its step is made of."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from costmodel.defaults import ResolvedJob, resolve
from costmodel.errors import CostModelError, shown
from costmodel.gpu_catalog import find_gpu
from costmodel.hf_config import model_spec_from_config
from costmodel.length_distribution import LengthDistribution, distribution
from costmodel.lengths import BatchTokens, batch_tokens, cut_at, longest_batch
from costmodel.model_catalog import find_model_config, find_towers
from costmodel.model_spec import ModelSpec
from costmodel.specs import GpuSpec, Job, Lengths, parse_gpu
from costmodel.workload import Batch, with_masked_pairs


@dataclass(frozen=True, slots=True)
class TokensSeen:
    """What the micro-batches of a running job really held, on average; ``longest_tokens`` is the longest sequence so far."""

    num_sequences: float
    num_tokens: float
    num_non_padding_tokens: float
    sum_squared_sequence_tokens: float
    longest_tokens: int
    num_supervised_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class DescribedJob:
    """A job with everything looked up that it names, and the batch its step is made of."""

    parsed: Job
    model: ModelSpec
    gpu: GpuSpec | None
    job: ResolvedJob
    assumed: tuple[str, ...]
    lengths: LengthDistribution | None
    tokens: BatchTokens | None

    @property
    def on_cpu(self) -> bool:
        return self.gpu is not None and self.gpu.vendor == "CPU"

    @property
    def mixes_lengths(self) -> bool:
        """Whether a batch of several would carry a mask: for lengths that differ, or for documents of one flattened row."""
        if self.job.packing or self.job.padding_free:
            return self.job.attends_across_documents
        return self.tokens.is_padded if self.tokens else True

    @property
    def is_padded(self) -> bool:
        """Whether a batch carries an attention mask."""
        return (self.job.per_device_train_batch_size > 1 or self.job.packing) and self.mixes_lengths

    @property
    def evaluation_is_padded(self) -> bool:
        """The same of a batch of an evaluation."""
        return (self.job.per_device_eval_batch_size > 1 or self.job.packing) and self.mixes_lengths


def describe(parsed: Job, seen: TokensSeen | None = None) -> DescribedJob:
    """Raises :class:`CostModelError` for a name that nothing here knows, or a value that its model or framework refuses."""
    model = model_of(parsed)
    gpu = _gpu(parsed)
    if seen is not None and parsed.max_length is None:
        parsed = parsed.model_copy(update={"max_length": seen.longest_tokens})
    has_bf16 = gpu is None or gpu.vendor == "CPU" or gpu.peak_bf16_flops_per_second is not None
    resolved, assumed = resolve(parsed, model, has_bf16=has_bf16)
    if model.wrapper and not resolved.load_towers:
        model = model_of(parsed, load_towers=False)
    resolved = _first_equal(resolved)
    lengths = distribution(parsed.lengths, cut_at(resolved)) if parsed.lengths else None
    tokens = batch_tokens(resolved, lengths) if lengths else None
    if seen is not None:
        tokens = _tokens_seen(resolved, seen, tokens)
        lengths = lengths or distribution(Lengths(fixed=seen.longest_tokens), resolved.max_length)
    return DescribedJob(parsed, model, gpu, resolved, assumed, lengths, tokens)


@functools.lru_cache(maxsize=256)
def _first_equal(job: ResolvedJob) -> ResolvedJob:
    """The first of equal jobs: the caches behind an estimate then find it by identity, without comparing every field."""
    return job


def _tokens_seen(job: ResolvedJob, seen: TokensSeen, planned: BatchTokens | None) -> BatchTokens:
    """The measured batch; the longest one by the data where that is known, since it may still come."""
    supervised = seen.num_supervised_tokens
    head = supervised if job.supervised_positions_only and supervised is not None else seen.num_tokens
    padding = max(0.0, seen.num_tokens - seen.num_non_padding_tokens)
    measured = Batch(seen.num_sequences, seen.num_tokens, seen.sum_squared_sequence_tokens, head, padding)
    longest = planned.longest if planned else longest_batch(job, job.per_device_train_batch_size, seen.longest_tokens)
    is_padded = seen.num_tokens > seen.num_non_padding_tokens
    return BatchTokens(
        expected=with_masked_pairs(job, measured),
        num_non_padding_tokens=seen.num_non_padding_tokens,
        num_supervised_tokens=supervised,
        longest=longest,
        is_padded=planned.is_padded if planned else is_padded,
        num_samples=planned.num_samples if planned and job.packing else seen.num_sequences,
    )


def model_of(job: Job, *, load_towers: bool = True) -> ModelSpec:
    """The job's model; ``load_towers=False``: of a multimodal one the language model alone.

    Raises :class:`CostModelError` for a model that is not known, or ``model_overrides`` that its config does not have.
    """
    if isinstance(job.model, str) and not job.model_overrides:
        return _named_model_spec(job.model, load_towers)
    name = job.model if isinstance(job.model, str) else ""
    return _spec(overridden_config(find_model_config(job.model), job.model_overrides), name, load_towers)


def overridden_config(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with ``overrides`` where their fields stand: in it, in the language model's that it nests, or in both.

    Raises :class:`CostModelError` for a field that neither has.
    """
    nested = config.get("text_config")
    of_text: Mapping[str, Any] = nested if isinstance(nested, Mapping) else {}
    for name in overrides:
        if name not in config and name not in of_text:
            fields = ", ".join(sorted({*config, *of_text}))
            raise CostModelError(f"model_overrides {shown(name)} is no field of the model's config; its fields: {fields}")
    inner = {name: value for name, value in overrides.items() if name in of_text and "text_config" not in overrides}
    changed = {**config, **{name: value for name, value in overrides.items() if name in config}}
    return {**changed, "text_config": {**of_text, **inner}} if inner else changed


def _spec(config: Mapping[str, Any], name: str, load_towers: bool) -> ModelSpec:
    """``name``: as the job gives it; the catalogue keeps the towers of its multimodal models apart."""
    towers = None if not name or os.path.exists(name) else find_towers(name)
    if towers is not None:
        config = {**towers, "text_config": config}
    return model_spec_from_config(config, name=name, load_towers=load_towers)


@functools.lru_cache(maxsize=256)
def _catalogued_model_spec(name: str, load_towers: bool) -> ModelSpec:
    return _spec(find_model_config(name), name, load_towers)


def _named_model_spec(name: str, load_towers: bool) -> ModelSpec:
    # A path may change between calls; a catalogue entry does not.
    if os.path.exists(name):
        return model_spec_from_config(
            find_model_config(name), name=os.path.basename(os.path.normpath(name)), load_towers=load_towers
        )
    return _catalogued_model_spec(name, load_towers)


def _gpu(job: Job) -> GpuSpec | None:
    if job.gpu is None:
        return None
    return find_gpu(job.gpu) if isinstance(job.gpu, str) else parse_gpu(job.gpu)
