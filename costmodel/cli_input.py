"""What the commands read: a job file or another tool's configuration, jobs a line, standard input, a data set."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from costmodel.errors import CostModelError, one_line, shown
from costmodel.strict_json import job_mapping, parse_json

if TYPE_CHECKING:
    from costmodel.dataset import DatasetEffects, DatasetLengths
    from costmodel.importers import ImportedJob

# --- job files --------------------------------------------------------------------------------------------------------


MAX_JOBS_BYTES: Final = 256 * 1000 * 1000
MAX_LINE_CHARACTERS: Final = 10 * 1000 * 1000
_KEEP_BYTES: Final = "surrogateescape"  # one line that is not UTF-8 must not cost the answers to the others


def read_text(path: str) -> str:
    """The text of a file of jobs, one a line; what is not UTF-8 comes as surrogates, which :func:`job_on_line` refuses.

    Raises :class:`CostModelError` with the path as it was given.
    """
    try:
        if os.path.getsize(path) > MAX_JOBS_BYTES:
            raise CostModelError(f"{path} is larger than {MAX_JOBS_BYTES // 1_000_000} MB; split it, or pipe it in (-)")
        with open(path, encoding="utf-8-sig", errors=_KEEP_BYTES) as file:
            return file.read()
    except FileNotFoundError:
        raise CostModelError(f"no such file: {path}") from None
    except IsADirectoryError:
        raise CostModelError(f"{path} is a folder; give a job file (.json, .yaml or .jsonl)") from None
    except OSError as error:
        raise CostModelError(f"cannot read {path}: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class JobInput:
    """What a command was told of one job: ``fields``, not validated yet, and the parts they come from.

    ``flags`` win over the file; ``decided`` by a counted data set. ``warnings`` are of the file and the data set.
    """

    fields: dict[str, Any]
    flags: Mapping[str, Any]
    decided: Mapping[str, Any]
    imported: ImportedJob | None
    dataset: DatasetLengths | None
    warnings: tuple[str, ...]

    @property
    def assumed(self) -> tuple[str, ...]:
        """Fields that nobody gave: the default of the tool whose configuration it is."""
        names = self.imported.assumed if self.imported is not None else ()
        return tuple(name for name in names if name not in self.flags and name not in self.decided)


# What a file says of its data set, and a data set that is counted says better.
_COUNTED: Final = ("num_samples", "supervised_fraction")


def read_job(
    file: str | None, flags: Mapping[str, Any], dataset: str | None = None, tokenizer: str | None = None
) -> JobInput:
    """The job of a file (or of another tool's configuration; ``-``: on standard input), flags and a data set to count."""
    if tokenizer is not None and dataset is None:
        raise CostModelError("--tokenizer goes with --dataset")
    if dataset is not None and "lengths" in flags:
        raise CostModelError("give --dataset or --lengths, not both")
    imported, of_another = _imported_beside(file, flags, dataset) if file is not None else (None, ())
    if imported is not None:
        imported.require_modelled()
    fields = {**(imported.fields if imported is not None else {}), **flags}
    if not fields:
        raise CostModelError("give a job file, or describe the job with flags: --model, ... (see --help)")
    warnings = list(of_another)
    counted, decided = None, dict[str, Any]()
    if dataset is not None:
        from costmodel.dataset import dataset_fields

        counted = _count_dataset(dataset, tokenizer, fields.get("model"))
        of_the_file = {name for name in _COUNTED if name in fields and name not in flags}
        decided = dataset_fields(counted, {name: fields[name] for name in fields if name not in of_the_file}, imported)
        warnings += counted.warnings
        if "num_samples" in of_the_file and fields["num_samples"] not in (None, decided["num_samples"]):
            warnings.append(
                f"num_samples {shown(fields['num_samples'])} of {file} is not used: {dataset} gives "
                f"{decided['num_samples']}; to keep it, give --num-samples"
            )
    elif imported is not None and "num_samples" in fields and (waits := imported.waits_for_dataset):
        warnings.append(waits)
    elif imported is not None and not fields.get("num_samples") and not fields.get("max_steps"):
        warnings += [most] if (most := imported.most_samples) else []
    said = imported.all_warnings if imported is not None else ()
    # "lengths: what is to be said of the file's", where something else decides the lengths
    said = tuple(each for each in said if each.partition(":")[0] not in {*flags, *decided})
    return JobInput({**fields, **decided}, flags, decided, imported, counted, (*said, *warnings))


def _imported_beside(path: str, flags: Mapping[str, Any], dataset: str | None) -> tuple[ImportedJob, list[str]]:
    """The file's job without what says nothing beside ``flags`` (a price, of its own GPU) or beside another data set (the
    number of its samples); warnings of that."""
    imported = _imported(path)
    given = {**flags, "dataset": dataset, "lengths": dataset} if dataset is not None else flags
    kept, warnings = _fields_beside(imported.fields, imported.tied, imported.where, flags, given)
    if len(kept) == len(imported.fields):
        return imported, []
    origins = {name: origin for name, origin in imported.origins.items() if name in kept}
    return replace(imported, read_fields=kept, origins=origins), warnings


def job_beside(job: Mapping[str, Any], where: str, flags: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """``job`` with ``flags`` on top, without what then says nothing; warnings of that. ``where``: its name in them."""
    if not flags.keys() & {"gpu", "num_train_epochs"}:
        return {**job, **flags}, []
    from costmodel.importers import ties_of_job

    kept, warnings = _fields_beside(job, ties_of_job(job), where, flags, flags)
    return {**kept, **flags}, warnings


def _fields_beside(
    fields: Mapping[str, Any], tied: Mapping[str, str], where: str, flags: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    dropped = {
        name
        for name, owner in tied.items()
        if owner in given and name not in flags and not _is_same(owner, given[owner], fields.get(owner))
    }
    warnings = []
    if "usd_per_gpu_hour" in dropped and not flags.keys() & {"cloud", "tier"} and fields.get("cloud") is None:
        warnings.append(
            f"the price in {where}, ${fields['usd_per_gpu_hour']} for a GPU-hour, is of its own GPU and not used for "
            "another: give --usd-per-gpu-hour, or --cloud and --tier"
        )
    if flags.get("num_train_epochs") is not None and "max_steps" not in flags and fields.get("max_steps") not in (None, -1):
        dropped.add("max_steps")  # which would beat the epochs that are asked for
        warnings.append(
            f"max_steps {shown(fields['max_steps'])} of {where} is not used beside --num-train-epochs; "
            "to keep it, give --max-steps"
        )
    return {name: value for name, value in fields.items() if name not in dropped}, list(map(one_line, warnings))


def _is_same(field: str, given: Any, recorded: Any) -> bool:
    if field != "gpu":
        return bool(given == recorded)
    from costmodel.gpu_catalog import find_gpu

    one, other = (each["name"] if isinstance(each, Mapping) and "name" in each else each for each in (given, recorded))
    if one == other or not (isinstance(one, str) and isinstance(other, str)):
        return bool(one == other)
    try:
        return find_gpu(one) == find_gpu(other)
    except CostModelError:
        return False  # what the estimate says of the name is the message to show


def _imported(path: str) -> ImportedJob:
    from costmodel.importers import import_config, import_mapping

    if path != "-":
        return import_config(path)
    from costmodel.importers.reading import mapping_in_text

    text = _all_of_standard_input().removeprefix("\ufeff")
    try:
        mapping = mapping_in_text(text, "standard input", is_yaml=not text.lstrip().startswith("{"))
    except CostModelError:
        lines = [line for line in text.split("\n") if line.strip()]
        if len(lines) > 1 and any(_is_json(line) and line.lstrip().startswith("{") for line in lines):
            raise CostModelError(
                "standard input holds a job a line, which only ftcost estimate reads; give one job"
            ) from None
        raise
    return import_mapping(mapping, "standard input")


def _all_of_standard_input() -> str:
    lines, num_characters = [], 0
    for line in standard_input():
        lines.append(line)
        num_characters += len(line)
        if num_characters > MAX_LINE_CHARACTERS:
            raise CostModelError(f"standard input is longer than {MAX_LINE_CHARACTERS // 1_000_000} MB: not a job")
    text = "".join(lines)
    if not _is_utf8(text):
        raise CostModelError("standard input is not text in UTF-8")
    return text


# --- data sets --------------------------------------------------------------------------------------------------------


def _count_dataset(path: str, tokenizer: str | None, model: Any) -> DatasetLengths:
    """The data set's lengths; by the tokenizer in the model's own folder if none is named. A bar on a terminal's stderr."""
    from costmodel.dataset import read_dataset

    if tokenizer is None and isinstance(model, str) and os.path.isfile(os.path.join(model, "tokenizer.json")):
        tokenizer = model
    if not sys.stderr.isatty():
        return read_dataset(path, tokenizer)
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("counting tokens", total=1.0)
        return read_dataset(path, tokenizer, progress=lambda share: bar.update(task, completed=share))


def effects_of_dataset(dataset: DatasetLengths, job: Mapping[str, Any]) -> DatasetEffects:
    """``job``: the answer's, with every default filled."""
    from costmodel.dataset import dataset_effects
    from costmodel.described_job import describe
    from costmodel.specs import parse_job

    return dataset_effects(dataset, describe(parse_job(job)).job)


# --- one job a line ---------------------------------------------------------------------------------------------------


def holds_lines(path: str) -> bool:
    """Whether ``path`` is standard input or a file of one job a line; a run record is one job."""
    if path == "-":
        return True
    if not path.lower().endswith(".jsonl"):
        return False
    from costmodel.importers.run_record import find_record

    return find_record(path) is None


def job_texts(lines: Iterator[str]) -> Iterator[tuple[int, str]]:
    """Number and text of each line that is not blank; all of the text where it is one object over several lines."""
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    for number, line in numbered:
        if number == 1:
            line = line.removeprefix("\ufeff")
        # The first line decides: a feeder that waits for each answer is never read ahead of.
        if line.lstrip().startswith("{") and not _is_json(line):
            rest = list(numbered)
            whole = "\n".join([line, *(text for _, text in rest)])
            yield from [(number, whole)] if _is_json(whole) else [(number, line), *rest]
        else:
            yield number, line
        break
    yield from numbered


def job_on_line(number: int, line: str) -> dict[str, Any]:
    """The job of one line, as :func:`job_texts` gives it. Raises :class:`CostModelError` where it holds none."""
    where = f"line {number}"
    if not _is_utf8(line):
        raise CostModelError(f"{where} is not text in UTF-8")
    return job_mapping(parse_json(line, where), where)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # it holds a surrogate, which stands for a byte that was none
        return False
    return True


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def standard_input() -> Iterator[str]:
    """The lines of standard input; what is not UTF-8 in them comes as surrogates."""
    if sys.stdin is None:
        raise CostModelError("standard input is closed; give a job file, or pipe one in")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors=_KEEP_BYTES)  # as of files, whatever the terminal's is
    for number, line in enumerate(iter(lambda: sys.stdin.readline(MAX_LINE_CHARACTERS + 1), ""), start=1):
        if len(line) > MAX_LINE_CHARACTERS:
            raise CostModelError(f"line {number} is longer than {MAX_LINE_CHARACTERS // 1_000_000} MB: not a job")
        yield line
