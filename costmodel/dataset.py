"""How long a data set's samples are, and what that means for a job: padding, packing, cuts.

``read_dataset(path, tokenizer)`` counts once and remembers: the result is cached by the content of the file and of the
tokenizer. Without a tokenizer the lengths are estimated from characters, and say so.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections import Counter as Tally
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from costmodel.dataset_rows import Format, Sample, format_of, read_rows
from costmodel.defaults import ResolvedJob
from costmodel.errors import CostModelError
from costmodel.framework_defaults import default_max_length
from costmodel.importers import ImportedJob
from costmodel.length_distribution import distribution
from costmodel.lengths import batch_tokens, cut_at
from costmodel.packed_rows import joins_and_cuts
from costmodel.specs import Lengths
from costmodel.tokenizing import CHARACTERS_PER_TOKEN, TEMPLATE_TOKENS_PER_TURN, CharacterCounter, TokenizerCounter

CACHE_VARIABLE: Final = "FTCOST_CACHE_DIR"
# Exact up to this many distinct lengths; above, longer ones are rounded up.
MAX_DISTINCT_LENGTHS: Final = 512
MAX_BINS: Final = 2_000
# How far estimated lengths may be off: other languages, code and numbers hold 2.5 to 5 characters a token.
ESTIMATE_ERROR: Final = 0.25
_CACHE_VERSION: Final = 2
_SAMPLES_AT_ONCE: Final = 1_000
_CHARACTERS_AT_ONCE: Final = 4_000_000


@dataclass(frozen=True, slots=True)
class DatasetLengths:
    """Tokens of every sample of one file.

    ``histogram``: tokens -> samples. ``supervised_tokens``: tokens -> supervised tokens of all samples of that length,
    where prompts and completions are told apart. ``lengths_are_estimated``: from characters, not counted.
    """

    file: str
    format: str
    num_samples: int
    histogram: dict[int, int]
    supervised_tokens: dict[int, int] | None
    lengths_are_estimated: bool
    tokenizer: str | None
    num_skipped: int = 0
    num_template_failures: int = 0
    num_without_template: int = 0

    @property
    def lengths(self) -> Lengths:
        """For a job's ``lengths``."""
        return Lengths(histogram={length: float(count) for length, count in self.histogram.items()})

    @property
    def num_tokens(self) -> int:
        return sum(length * count for length, count in self.histogram.items())

    @property
    def mean_tokens(self) -> float:
        return self.num_tokens / self.num_samples

    @property
    def longest_tokens(self) -> int:
        return max(self.histogram)

    @property
    def supervised_fraction(self) -> float | None:
        """Share of the tokens that a loss on completions alone covers, before any cut."""
        return self.supervised_fraction_at(None)

    def supervised_fraction_at(self, max_length: int | None) -> float | None:
        """The same after a cut at ``max_length``, which takes the end of a sample, and so of its completion."""
        if self.supervised_tokens is None:
            return None
        kept = supervised = 0.0
        for length, count in self.histogram.items():
            over = max(0, length - max_length) if max_length else 0
            kept += (length - over) * count
            supervised += max(0.0, self.supervised_tokens.get(length, 0) - over * count)
        return min(1.0, supervised / kept) if kept and supervised else None

    def num_cut(self, max_length: int) -> int:
        """Samples longer than ``max_length``."""
        return sum(count for length, count in self.histogram.items() if length > max_length)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``: everything but the histogram, which is the job's ``lengths``."""
        return {
            "file": self.file,
            "format": self.format,
            "tokenizer": self.tokenizer,
            "lengths_are_estimated": self.lengths_are_estimated,
            "num_samples": self.num_samples,
            "num_skipped": self.num_skipped,
            "num_tokens": self.num_tokens,
            "mean_tokens": self.mean_tokens,
            "longest_tokens": self.longest_tokens,
            "supervised_fraction": self.supervised_fraction,
        }

    @property
    def sentence(self) -> str:
        """What was counted, in a line."""
        about = "about " if self.lengths_are_estimated else ""
        return (
            f"{self.file}: {self.num_samples:,} {self.format} samples, {about}{self.mean_tokens:,.0f} tokens on average, "
            f"the longest {self.longest_tokens:,}"
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Each asks for an action."""
        said = []
        if self.lengths_are_estimated:
            said.append(
                f"lengths are estimated from characters ({CHARACTERS_PER_TOKEN} a token, which holds for English text): "
                f"they, and times and dollars with them, may be off by {ESTIMATE_ERROR:.0%}; give --tokenizer PATH to count"
            )
        if self.num_skipped:
            said.append(
                f"{self.num_skipped} rows of {self.file} hold no {self.format} sample and are not counted; mend them"
            )
        if self.num_template_failures:
            said.append(
                f"the chat template refuses {self.num_template_failures} samples, which are counted turn by turn; training "
                "would stop there"
            )
        if self.num_without_template:
            said.append(
                f"{self.tokenizer} has no chat template: chats are counted turn by turn, with {TEMPLATE_TOKENS_PER_TURN} "
                "tokens a turn for its frame; give the folder of the tokenizer that will train"
            )
        return tuple(said)


def read_dataset(
    path: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] | None = None,
    *,
    progress: Callable[[float], None] | None = None,
    use_cache: bool = True,
) -> DatasetLengths:
    """The lengths of a JSONL, JSON, CSV, TSV or parquet file in any format of :mod:`costmodel.dataset_rows`.

    ``tokenizer``: a ``tokenizer.json`` or a folder that holds one (a model's); its chat template is applied. ``None``
    estimates from characters. ``progress`` is told the share that is done, 0 to 1. Raises :class:`CostModelError`.
    """
    where = os.fspath(path)
    counter = CharacterCounter() if tokenizer is None else TokenizerCounter(os.fspath(tokenizer))
    cached = _cache_file(where, counter.fingerprint) if use_cache and os.path.isfile(where) else None
    found = _load(cached, where, counter.name) if cached else None
    if found is None:
        found = _count(where, counter, progress)
        if cached:
            _store(cached, found)
    if progress is not None:
        progress(1.0)
    return found


def _count(
    path: str, counter: CharacterCounter | TokenizerCounter, progress: Callable[[float], None] | None
) -> DatasetLengths:
    lengths: Tally[int] = Tally()
    supervised: Tally[int] = Tally()
    is_told_apart = False
    form: Format | None = None
    skipped = 0
    batch: list[Sample] = []
    num_characters = 0

    def flush() -> None:
        nonlocal is_told_apart
        for count in counter.count(batch):
            lengths[count.num_tokens] += 1
            if count.num_supervised_tokens is not None:
                is_told_apart = True
                supervised[count.num_tokens] += count.num_supervised_tokens
        batch.clear()

    for row in read_rows(path, progress):
        if form is None:
            form = format_of(row, path)
        sample = form.read(row)
        if sample is None:
            skipped += 1
            continue
        batch.append(sample)
        num_characters += len(sample.text) + sum(len(str(turn["content"])) for turn in sample.messages or ())
        if len(batch) >= _SAMPLES_AT_ONCE or num_characters >= _CHARACTERS_AT_ONCE:
            flush()
            num_characters = 0
    flush()
    if not lengths or form is None:
        raise CostModelError(f"{path} holds no samples" + (f" of the format {form.name}" if form else ""))
    histogram, by_length = _binned(lengths, supervised)
    return DatasetLengths(
        file=path,
        format=form.name,
        num_samples=lengths.total(),
        histogram=histogram,
        supervised_tokens=by_length if is_told_apart else None,
        lengths_are_estimated=counter.name is None and form.name != "tokens",
        tokenizer=counter.name,
        num_skipped=skipped,
        num_template_failures=counter.num_template_failures,
        num_without_template=counter.num_without_template,
    )


def _binned(lengths: Mapping[int, int], supervised: Mapping[int, int]) -> tuple[dict[int, int], dict[int, int]]:
    """At most :data:`MAX_BINS` lengths: beyond :data:`MAX_DISTINCT_LENGTHS` of them each is rounded up."""
    precision_bits = 32
    if len(lengths) > MAX_DISTINCT_LENGTHS:
        precision_bits = 10
        while len({_rounded_up(length, precision_bits) for length in lengths}) > MAX_BINS:
            precision_bits -= 1
    binned: Tally[int] = Tally()
    by_length: Tally[int] = Tally()
    for length, count in lengths.items():
        binned[_rounded_up(length, precision_bits)] += count
        by_length[_rounded_up(length, precision_bits)] += supervised.get(length, 0)
    return dict(sorted(binned.items())), dict(sorted(by_length.items()))


def _rounded_up(length: int, precision_bits: int) -> int:
    step = 1 << max(0, length.bit_length() - precision_bits)
    return -(-length // step) * step


# --- cache ------------------------------------------------------------------------------------------------------------


def cache_folder() -> str:
    """``FTCOST_CACHE_DIR``, else the user's cache folder of the platform."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return named
    home = os.path.expanduser("~")
    if sys.platform == "win32":
        return os.path.join(os.environ.get("LOCALAPPDATA") or home, "ftcost", "cache")
    if sys.platform == "darwin":
        return os.path.join(home, "Library", "Caches", "ftcost")
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "ftcost")


def _cache_file(path: str, fingerprint: str) -> str | None:
    """Named by what the result depends on: the file's bytes, its kind, the tokenizer, and how this version counts."""
    digest = hashlib.sha256(f"{_CACHE_VERSION}\n{os.path.splitext(path)[1].lower()}\n{fingerprint}\n".encode())
    try:
        with open(path, "rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    except OSError:
        return None
    return os.path.join(cache_folder(), "dataset_lengths", f"{digest.hexdigest()}.json")


def _load(cached: str, path: str, tokenizer: str | None) -> DatasetLengths | None:
    """What was counted before; ``None`` if it was not, or if the file is not what was written."""
    try:
        with open(cached, encoding="utf-8") as file:
            value = json.load(file)
        histogram = {int(length): int(count) for length, count in value["histogram"].items()}
        supervised = value["supervised_tokens"]
        found = DatasetLengths(
            file=path,
            format=str(value["format"]),
            num_samples=int(value["num_samples"]),
            histogram=histogram,
            supervised_tokens=None if supervised is None else {int(key): int(count) for key, count in supervised.items()},
            lengths_are_estimated=bool(value["lengths_are_estimated"]),
            tokenizer=tokenizer,
            num_skipped=int(value["num_skipped"]),
            num_template_failures=int(value["num_template_failures"]),
            num_without_template=int(value["num_without_template"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    is_sound = histogram and min(histogram) > 0 and min(histogram.values()) > 0
    return found if is_sound and sum(histogram.values()) == found.num_samples else None


def _store(cached: str, found: DatasetLengths) -> None:
    """Written beside and moved into place; a cache that cannot be written is only slower."""
    try:
        os.makedirs(os.path.dirname(cached), exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=os.path.dirname(cached), suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({**asdict(found), "file": "", "tokenizer": ""}, file)
            os.replace(beside, cached)
        except OSError:
            os.unlink(beside)
    except OSError:
        pass


# --- a data set and a job ---------------------------------------------------------------------------------------------


def dataset_fields(
    dataset: DatasetLengths, fields: Mapping[str, Any], imported: ImportedJob | None = None
) -> dict[str, Any]:
    """The job fields that the data set decides, beside the ``fields`` already given, which win.

    ``imported`` adds what its tool does with a data set: keeps ``max_samples``, holds some out for evaluation, drops long
    samples, computes the loss on some of the tokens. Where no length is given, samples are cut where the framework cuts them
    by itself; where it cuts none, the longest is ``max_length``.
    """
    histogram = dict(dataset.histogram)
    max_length = fields.get("max_length") or default_max_length(fields.get("framework"))
    limit = max_length if isinstance(max_length, int) and max_length > 0 else None
    if imported is not None and imported.drops_long_samples and limit and (kept := _kept(histogram, limit)):
        histogram = kept
    decided: dict[str, Any] = {"lengths": {"histogram": histogram}}
    if limit is None:
        decided["max_length"] = max(histogram)
    num_train, num_eval = _split(sum(histogram.values()), imported)
    decided["num_samples"] = num_train
    if num_eval and (fields.get("eval_strategy") not in (None, "no") or fields.get("eval_on_start")):
        decided["num_eval_samples"] = num_eval
    fraction = _supervised(dataset, limit, imported, str(fields.get("framework") or ""))
    if fraction is not None:
        decided["supervised_fraction"] = fraction
    return {name: value for name, value in decided.items() if name == "lengths" or fields.get(name) is None}


def _kept(histogram: Mapping[int, int], limit: int) -> dict[int, int]:
    return {length: count for length, count in histogram.items() if length <= limit}


def _split(num_samples: int, imported: ImportedJob | None) -> tuple[int, int]:
    """(trained on, held out)."""
    if imported is not None and imported.max_samples:
        num_samples = min(num_samples, imported.max_samples * imported.num_datasets)
    split = (imported.eval_split if imported is not None else None) or 0
    held_out = int(split) if split >= 1 else round(num_samples * split)
    held_out = min(held_out, num_samples - 1)
    return num_samples - held_out, held_out


def _supervised(dataset: DatasetLengths, limit: int | None, imported: ImportedJob | None, framework: str) -> float | None:
    loss_on = imported.loss_on if imported is not None else ("by_format" if framework == "trl" else None)
    # TRL's rule: prompt-completion data sets are learned on the completion, all others on every token.
    if loss_on == "all" or (loss_on == "by_format" and dataset.format not in ("prompt_completion", "tokens")):
        return 1.0
    return dataset.supervised_fraction_at(limit)


@dataclass(frozen=True, slots=True)
class DatasetEffects:
    """What the lengths do to one job. Shares are of the tokens that it computes now."""

    batch_size: int
    max_length: int
    share_of_padding: float
    num_cut: int
    saved_by: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def dataset_effects(dataset: DatasetLengths, job: ResolvedJob) -> DatasetEffects:
    """Padding of the job as it is, and what grouping by length, padding-free batches and packing would save."""
    lengths = distribution(dataset.lengths, cut_at(job))

    def tokens_per_sample(changed: ResolvedJob) -> float:
        batch = batch_tokens(changed, lengths)
        return batch.expected.num_tokens / batch.num_samples

    now = batch_tokens(job, lengths)
    known = job.num_samples or dataset.num_samples
    alternatives: dict[str, ResolvedJob] = {}
    if not job.packing:
        if not job.padding_free:
            grouped = replace(
                job,
                padding="longest",
                train_sampling_strategy="group_by_length",
                num_samples=known,
            )
            alternatives["train_sampling_strategy group_by_length"] = grouped
            alternatives["padding_free"] = replace(job, padding_free=True)
        alternatives["packing"] = replace(job, packing=True, padding_free=True, num_samples=known)
    current = tokens_per_sample(job)
    return DatasetEffects(
        batch_size=job.per_device_train_batch_size,
        max_length=job.max_length,
        share_of_padding=max(0.0, 1.0 - now.num_non_padding_tokens / now.expected.num_tokens),
        num_cut=0 if joins_and_cuts(job) else dataset.num_cut(job.max_length),
        saved_by={name: max(0.0, 1.0 - tokens_per_sample(changed) / current) for name, changed in alternatives.items()},
    )
