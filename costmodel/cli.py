"""The pre-flight commands: ``estimate``, ``compare``, ``optimize``, ``gpus``, ``models``, ``prices``.

Data goes to stdout, messages to stderr. Exit codes: 0 fits or tight, 1 internal error, 2 wrong input (one line on
stderr, nothing on stdout), 3 does not fit, 4 over ``--budget-usd`` or ``--deadline-hours``. Every field of
:class:`costmodel.specs.Job` is a flag; the flags are generated from its fields.
"""

from __future__ import annotations

import copy
import datetime
import functools
import inspect
import io
import json
import math
import os
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TextIO, Union

import typer
from pydantic import ValidationError

from costmodel.errors import AmbiguousNameError, CostModelError, UnknownNameError, one_line, shown
from costmodel.specs import GpuSpec, Job, Lengths, validation_message
from costmodel.strict_json import parse_json
from costmodel.units import GIB, GIGA, SECONDS_PER_HOUR, TERA

if TYPE_CHECKING:
    from costmodel.dataset import DatasetEffects, DatasetLengths
    from costmodel.spot import SpotTerms

FITS, INTERNAL_ERROR, WRONG_INPUT, DOES_NOT_FIT, OVER_LIMIT, INTERRUPTED = 0, 1, 2, 3, 4, 130

app = typer.Typer(
    name="ftcost",
    help="What an LLM fine-tuning run will cost: memory, hours, dollars. No GPU, no network.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long flags off at 80 columns
)


# --- flags from the fields of a job -----------------------------------------------------------------------------------

_SHORT_FORMS: Final[dict[str, tuple[str, ...]]] = {
    "model": ("-m",),
    "gpu": ("-g",),
    "per_device_train_batch_size": ("-b",),
    "max_length": ("--seq-len",),
    "gradient_accumulation_steps": ("--accum",),
    "num_train_epochs": ("--epochs",),
    "num_samples": ("--samples",),
    "dtype": ("--torch-dtype",),
}

_HELP: Final[dict[str, str]] = {
    "schema_version": "Version of the job's format.",
    "model": "Catalogue id, path to a config.json or its folder, JSON config, or hub id.",
    "model_overrides": "Config fields to change, as JSON.",
    "gpu": "One product by any of its names (see: ftcost gpus).",
    "num_gpus": "GPUs of one data-parallel run.",
    "method": "What is trained.",
    "quantization": "How the base is stored.",
    "double_quant": "Quantise the scales of a 4-bit base too.",
    "prepare_model_for_kbit_training": "peft's fp32 upcast of everything unquantised.",
    "lora_r": "Rank of the adapters.",
    "lora_alpha": "Scale of the adapters (costs nothing).",
    "lora_dropout": "Above 0 it keeps a mask for each adapter.",
    "lora_target_modules": "Names separated by commas, a regex, or all-linear.",
    "lora_target_parameters": "Fused parameters that get adapters, separated by commas.",
    "lora_modules_to_save": "Modules trained in full, separated by commas.",
    "use_dora": "Weight-decomposed adapters.",
    "use_rslora": "Rank-stabilised scale (costs nothing).",
    "adapter_dtype": "What the adapters are stored in.",
    "dtype": "What the weights are loaded in.",
    "bf16": "Autocast to bfloat16.",
    "fp16": "Autocast to float16.",
    "per_device_train_batch_size": "Samples per GPU and micro-step.",
    "gradient_accumulation_steps": "Micro-steps per optimizer step.",
    "gradient_checkpointing": "Recompute activations in the backward pass.",
    "gradient_checkpointing_kwargs": "As JSON.",
    "attn_implementation": "Attention kernel.",
    "experts_implementation": "How the experts of a layer are computed.",
    "optim": "transformers' name of the optimizer.",
    "torch_compile": "Compile the model.",
    "use_liger_kernel": "Liger's fused kernels, loss included.",
    "fused_loss": "Compute the logits in chunks, or inside the loss.",
    "loss_type": "Decides which positions reach the head.",
    "use_cache": "Keep keys and values in the forward pass.",
    "logits_to_keep": "Compute only the last logits; 0 is all.",
    "activation_offloading": "Move saved activations to the host.",
    "fsdp": "FSDP options, as words or JSON.",
    "deepspeed": "DeepSpeed config: a path or JSON.",
    "max_length": "Longest sequence in tokens; longer samples are cut.",
    "packing": "Pack samples into rows of max_length.",
    "padding_free": "One row without padding for each batch.",
    "pad_to_multiple_of": "Round padded lengths up to this.",
    "train_sampling_strategy": "Order of the samples.",
    "padding": "To the longest sample of the batch, or to max_length.",
    "lengths": "79:4000,174:9000 or mean:187,max:1470 or fixed:1024 or dataset:math_14k or file:PATH or values:12,80.",
    "supervised_fraction": "Share of the tokens that enters the loss.",
    "num_samples": "Samples of the training set.",
    "num_train_epochs": "Passes over the training set.",
    "max_steps": "Optimizer steps, in place of epochs.",
    "eval_strategy": "When to evaluate.",
    "eval_steps": "Every so many steps; below 1, a share of the run.",
    "per_device_eval_batch_size": "Samples per GPU in evaluation.",
    "num_eval_samples": "Samples of the evaluation set.",
    "save_strategy": "When to write a checkpoint.",
    "save_steps": "Every so many steps; below 1, a share of the run.",
    "save_only_model": "Leave optimizer states out of checkpoints.",
    "framework": "Decides defaults and kernels.",
    "framework_version": "For example 4.40 or 5.24.",
    "calibration": "A file of ftcost calibrate, or auto: your own for this GPU and stack.",
    "usd_per_gpu_hour": "What you pay for one GPU for one hour.",
    "cloud": "Take the dated price of this cloud (see: ftcost prices).",
    "tier": "Kind of price.",
}

_NULL_WORDS: Final = frozenset({"none", "null"})


def _leaf_types(annotation: Any) -> set[Any]:
    """``str | tuple[str, ...] | None`` -> ``{str, tuple, NoneType}``; literals by their values."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return set().union(*(_leaf_types(part) for part in typing.get_args(annotation)))
    if typing.get_origin(annotation) is Literal:
        return set(typing.get_args(annotation))
    return {typing.get_origin(annotation) or annotation}


def _metavar(leaves: set[Any]) -> str:
    literals = [leaf for leaf in leaves if not isinstance(leaf, type)]
    if literals:
        return "|".join(sorted(map(str, literals)))
    if float in leaves:
        return "NUMBER"
    if int in leaves:
        return "INTEGER"
    if leaves & {tuple, list}:
        return "A,B,..."
    return "JSON" if leaves <= {dict, types.NoneType} else "TEXT"


@functools.cache
def _job_parameters() -> tuple[inspect.Parameter, ...]:
    """One keyword parameter, and so one flag, for each field of a job. ``None`` means "not given"."""
    parameters = []
    for name, field in Job.model_fields.items():
        leaves = _leaf_types(field.annotation)
        flag = name.replace("_", "-")
        text = _HELP.get(name, "")
        annotation: Any
        if bool in leaves:
            annotation = Annotated[bool | None, typer.Option(f"--{flag}/--no-{flag}", show_default=False, help=text)]
        else:
            option = typer.Option(
                f"--{flag}", *_SHORT_FORMS.get(name, ()), metavar=_metavar(leaves), show_default=False, help=text
            )
            annotation = Annotated[str | None, option]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return tuple(parameters)


def with_job_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``command(..., **flags)`` a flag for each field of a job, after its own parameters."""
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    parameters = [*own, *_job_parameters()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def job_fields_from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that were given on the command line, in the types a :class:`Job` reads. Not validated yet."""
    fields: dict[str, Any] = {}
    for name, value in flags.items():
        if value is not None:
            leaves = _leaf_types(Job.model_fields[name].annotation)
            fields[name] = _field_from_text(name, value, leaves) if isinstance(value, str) else value
    return fields


def _field_from_text(name: str, text: str, leaves: set[Any]) -> Any:
    text = text.strip()
    if types.NoneType in leaves and text.lower() in _NULL_WORDS:
        return None
    if Lengths in leaves:
        return lengths_from_text(text)
    if dict in leaves or GpuSpec in leaves:
        if text.startswith("{") or leaves <= {dict, types.NoneType}:
            return parse_json(text, f"--{name.replace('_', '-')}")
        return text
    if tuple in leaves:
        # peft takes a string as a regex over module paths; a plain name on the command line is a list of one.
        if str in leaves and (text == "all-linear" or any(character in text for character in "*+?()[]|\\^$")):
            return text
        return tuple(part for part in (part.strip() for part in text.split(",")) if part)
    if str not in leaves:
        return _number_or_text(text)
    return text


def _number_or_text(text: str) -> int | float | str:
    """A number where it is one; other text goes on to the job, whose message names the field."""
    for kind in (int, float):
        try:
            return kind(text.replace("_", ""))
        except ValueError:
            continue
    return text


def lengths_from_text(text: str) -> dict[str, Any]:
    """``"79:4000,174:9000"``, ``"mean:187,max:1470"``, ``"fixed:1024"`` ... -> the job's ``lengths`` mapping."""
    if text.startswith("{"):
        return dict(parse_json(text, "--lengths"))
    usage = (
        "use 79:4000,174:9000 (tokens:samples), mean:187,max:1470, fixed:1024, values:12,80, dataset:math_14k or file:PATH"
    )
    kind, colon, rest = text.partition(":")
    if colon and kind in ("dataset", "file"):
        return {kind: rest}
    if colon and kind == "values":
        return {"values": [_number_or_text(part.strip()) for part in rest.split(",")]}
    pairs = [pair.partition(":") for pair in text.split(",") if pair.strip()]
    if not pairs or not all(colon and value.strip() for _, colon, value in pairs):
        raise CostModelError(f"--lengths {shown(text)} is not understood; {usage}")
    named = {key.strip(): _number_or_text(value.strip()) for key, _, value in pairs}
    if set(named) <= {"fixed", "mean", "max"}:
        return named
    if all(key.isdigit() for key in named):
        if len(named) < len(pairs):
            raise CostModelError(f"--lengths {shown(text)} gives one length twice; {usage}")
        return {"histogram": {int(key): count for key, count in named.items()}}
    raise CostModelError(f"--lengths {shown(text)} is not understood; {usage}")


def _described_gpu(
    name: str | None, memory_gib: float | None, bandwidth_gb_per_second: float | None, bf16_tflops: float | None
) -> dict[str, Any] | None:
    """A GPU the catalogue does not have, from the three figures an estimate needs; ``None`` if none was given."""
    given = (memory_gib, bandwidth_gb_per_second, bf16_tflops)
    if all(value is None for value in given):
        return None
    if memory_gib is None or bandwidth_gb_per_second is None or bf16_tflops is None:
        raise CostModelError(
            "describing a GPU takes all of --gpu-memory-gib, --gpu-bandwidth-gb-per-second and --gpu-bf16-tflops"
        )
    return {
        "name": name or "described GPU",
        "memory_bytes": round(memory_gib * GIB),
        "memory_bandwidth_bytes_per_second": bandwidth_gb_per_second * GIGA,
        "peak_bf16_flops_per_second": bf16_tflops * TERA,
        "peak_fp16_flops_per_second": bf16_tflops * TERA,
        "source": "described by the user",
    }


# --- job files --------------------------------------------------------------------------------------------------------


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except FileNotFoundError:
        raise CostModelError(f"no such file: {path}") from None
    except IsADirectoryError:
        raise CostModelError(f"{path} is a folder; give a job file (.json, .yaml or .jsonl)") from None
    except UnicodeDecodeError:
        raise CostModelError(f"{path} is not a text file in UTF-8") from None
    except OSError as error:
        raise CostModelError(f"cannot read {path}: {error.strerror or error}") from None


def read_job_file(path: str, *, says_num_samples: bool = False) -> dict[str, Any]:
    """The fields of a job file, or of another tool's configuration, whose warnings go to stderr. Not validated yet.

    ``-`` is one job, or one configuration, on standard input.
    """
    from costmodel.importers import import_config, import_mapping

    if path == "-":
        from costmodel.importers.reading import mapping_in_text

        text = "".join(_standard_input()).removeprefix("\ufeff")
        is_yaml = not text.lstrip().startswith("{")
        imported = import_mapping(mapping_in_text(text, "standard input", is_yaml=is_yaml), "standard input")
    else:
        imported = import_config(path)
    for warning in imported.all_warnings:
        _say(warning)
    if says_num_samples and (waits := imported.waits_for_dataset):
        _say(waits)
    return imported.fields


def _as_job_mapping(job: Any, where: str) -> dict[str, Any]:
    if isinstance(job, dict) and all(isinstance(name, str) for name in job):
        return job
    kind = "field names that are not text" if isinstance(job, dict) else type(job).__name__
    raise CostModelError(f"{where} must hold one job, a mapping of field names to values; it holds {kind}")


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


def _dataset_effects(dataset: DatasetLengths, job: Mapping[str, Any]) -> DatasetEffects:
    """``job``: the answer's, with every default filled."""
    from costmodel.catalog import find_model_config
    from costmodel.dataset import dataset_effects
    from costmodel.defaults import resolve
    from costmodel.hf_config import model_spec_from_config
    from costmodel.specs import parse_job

    parsed = parse_job(job)
    return dataset_effects(dataset, resolve(parsed, model_spec_from_config(find_model_config(parsed.model)))[0])


# --- estimate ---------------------------------------------------------------------------------------------------------


def _field_name(flag: str) -> str:
    """Lets people type TrainingArguments' own spelling: ``--per_device_train_batch_size``."""
    return flag.replace("_", "-")


COMMAND_SETTINGS: Final = {"token_normalize_func": _field_name, "help_option_names": ["--help", "-h"]}

_File = Annotated[
    str | None,
    typer.Argument(
        metavar="[FILE]", help="Job file (.json, .yaml, .jsonl: a job a line), - for stdin, or another tool's config."
    ),
]


def _finite(option: typer.CallbackParam, value: float | None) -> float | None:
    """``nan`` and ``inf`` are numbers to the parser, and nan passes every limit."""
    if value is not None and not math.isfinite(value):
        raise CostModelError(f"{option.opts[0]} must be a finite number, got {value}")
    return value


_Json = Annotated[bool, typer.Option("--json", help="The whole answer as JSON.")]
_Markdown = Annotated[bool, typer.Option("--markdown", help="As Markdown.")]
_GpuMemory = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory-gib", help="Describe a GPU that is not in the catalogue.", min=0.1, max=1e6, callback=_finite
    ),
]
_GpuBandwidth = Annotated[
    float | None, typer.Option("--gpu-bandwidth-gb-per-second", help="Of its memory.", min=1, callback=_finite)
]
_GpuPeak = Annotated[
    float | None, typer.Option("--gpu-bf16-tflops", help="Its dense bf16 peak.", min=0.01, callback=_finite)
]


def _use_price_file(context: typer.Context, path: str | None) -> str | None:
    """Puts the prices of ``--price-file`` in the place of the catalogue's until the command ends."""
    if path is not None:
        from costmodel.catalog import prices_from

        for refused in context.with_resource(prices_from(path)).refused:
            _say(f"refused: {refused}")
    return path


_PriceFile = Annotated[
    str | None,
    typer.Option(
        "--price-file",
        metavar="FILE",
        callback=_use_price_file,
        is_eager=True,
        help="CSV of your own prices (columns of the catalogue); no others are used.",
    ),
]
_Interruptions = Annotated[
    float | None,
    typer.Option(
        "--interruptions-per-hour", help="Of a spot machine: counts lost work and restarts in.", min=0, callback=_finite
    ),
]
_Restart = Annotated[
    float | None,
    typer.Option(
        "--restart-seconds",
        help="From an interruption to the next step; default: the start-up time.",
        min=0,
        callback=_finite,
    ),
]
_Plot = Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Also draw it: .svg, .html or .png.")]


def _spot_terms(interruptions_per_hour: float | None, restart_seconds: float | None) -> SpotTerms | None:
    if interruptions_per_hour is None:
        if restart_seconds is not None:
            raise CostModelError("--restart-seconds goes with --interruptions-per-hour")
        return None
    from costmodel.spot import SpotTerms

    return SpotTerms(interruptions_per_hour, restart_seconds)


def _with_spot(answer: dict[str, Any], spot: SpotTerms | None = None) -> dict[str, Any]:
    """The answer with what interruptions add to a spot price, or with a warning that they are not in it."""
    from costmodel.spot import SPOT_WITHOUT_RATE, spot_run

    is_spot = answer["job"].get("tier") == "spot"
    if spot is not None and not is_spot:
        raise CostModelError("--interruptions-per-hour goes with --tier spot")
    if not (is_spot and answer.get("price")):
        return answer
    run = spot_run(answer, spot) if spot is not None else None
    warnings = (SPOT_WITHOUT_RATE,) if spot is None else run.warnings if run else ()
    return {**answer, "spot": run.to_dict() if run else None, "warnings": [*answer["warnings"], *warnings]}


def _stale_price(answer: Mapping[str, Any]) -> str | None:
    """A sentence where the answer's price is old. Not part of the answer, which is the same on every day."""
    from costmodel.catalog import stale_price_warning
    from costmodel.specs import Price

    price = answer.get("price")
    return stale_price_warning(Price.model_validate(price), _today()) if price else None


@app.command("estimate", context_settings=COMMAND_SETTINGS)
@with_job_flags
def estimate_command(
    file: _File = None,
    as_json: _Json = False,
    markdown: _Markdown = False,
    budget_usd: Annotated[
        float | None, typer.Option("--budget-usd", help="Exit code 4 if the run costs more.", min=0, callback=_finite)
    ] = None,
    deadline_hours: Annotated[
        float | None, typer.Option("--deadline-hours", help="Exit code 4 if the run takes longer.", min=0, callback=_finite)
    ] = None,
    gpu_memory_gib: _GpuMemory = None,
    gpu_bandwidth_gb_per_second: _GpuBandwidth = None,
    gpu_bf16_tflops: _GpuPeak = None,
    price_file: _PriceFile = None,
    interruptions_per_hour: _Interruptions = None,
    restart_seconds: _Restart = None,
    plot: _Plot = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", metavar="FILE", help="Count lengths: .jsonl, .json, .csv or .parquet.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="PATH", help="A tokenizer.json or its folder, to count with.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 2 if any line of a .jsonl or - is wrong.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show where each value came from.")] = False,
    **flags: Any,
) -> int:
    """Will it fit, how long will it take, what will it cost? Flags override the file.

    FILE is a job, an Axolotl, LLaMA-Factory or TRL config, a W&B run's config or a checkpoint folder.
    """
    _format(None, as_json, markdown, ())
    fields = job_fields_from_flags(flags)
    spot = _spot_terms(interruptions_per_hour, restart_seconds)
    gpu = _described_gpu(fields.get("gpu"), gpu_memory_gib, gpu_bandwidth_gb_per_second, gpu_bf16_tflops)
    if gpu is not None:
        fields["gpu"] = gpu
    if file is not None and (file == "-" or file.lower().endswith(".jsonl")):
        if budget_usd is not None or deadline_hours is not None or markdown or plot or spot or dataset or explain:
            raise CostModelError(
                "--budget-usd, --deadline-hours, --markdown, --plot, --interruptions-per-hour, --dataset and --explain go "
                "with a single job"
            )
        return _estimate_lines(file, fields, strict=strict)
    if strict:
        raise CostModelError("--strict goes with jobs of a .jsonl file or of -")
    if tokenizer is not None and dataset is None:
        raise CostModelError("--tokenizer goes with --dataset")
    if dataset is not None and "lengths" in fields:
        raise CostModelError("give --dataset or --lengths, not both")
    imported = None
    if file is not None:
        from costmodel.importers import import_config

        imported = import_config(file)
    job = {**(imported.fields if imported is not None else {}), **fields}
    if not job:
        raise CostModelError("give a job file, or describe the job with flags: --model, --gpu, ... (see --help)")

    from costmodel import report
    from costmodel.estimation import estimate

    counted, decided = None, dict[str, Any]()
    if dataset is not None:
        from costmodel.dataset import dataset_fields

        counted = _count_dataset(dataset, tokenizer, job.get("model"))
        decided = dataset_fields(counted, job, imported)
    answer = _with_spot(estimate({**job, **decided}).to_dict(), spot)
    said = [*(imported.all_warnings if imported else ()), *(counted.warnings if counted else ())]
    if imported is not None and counted is None and "num_samples" in job and (waits := imported.waits_for_dataset):
        said.append(waits)
    filled = [name for name in (imported.assumed if imported else ()) if name not in fields]
    answer |= {"warnings": [*said, *answer["warnings"]], "assumed": [*filled, *answer["assumed"]]}
    tables = []
    if counted is not None:
        from costmodel.explain import dataset_tables

        effects = _dataset_effects(counted, answer["job"])
        answer["dataset"] = counted.to_dict() | effects.to_dict()
        tables += dataset_tables(counted, effects)
    if explain:
        from costmodel.explain import explain as explained_values
        from costmodel.explain import explanation_tables, explanation_to_dict, sources

        values = explained_values(answer, sources(imported, fields, counted, decided))
        answer["explain"] = explanation_to_dict(values, imported)
        tables += explanation_tables(values, imported)
    excess = _over_limits(answer, budget_usd, deadline_hours)
    if plot is not None:
        from costmodel import plots

        plots.write_picture(plot, plots.estimate_svg(answer), title="ftcost estimate")
    if as_json:
        print(report.to_json(answer))
    elif markdown:
        print(report.to_markdown(answer, today=_today()), end="")
    else:
        report.print_estimate(answer, sys.stdout, today=_today())
    for table in () if as_json else tables:
        print()
        _show(table, markdown)
    if stale := _stale_price(answer):
        _say(stale)
    if answer["verdict"] == "does_not_fit":
        _say(report.does_not_fit_sentence(answer))
        return DOES_NOT_FIT
    for sentence in excess:
        _say(sentence)
    return OVER_LIMIT if excess else FITS


def _today() -> datetime.date:
    return datetime.date.today()


def _say(message: str, stream: TextIO | None = None) -> None:
    print(f"ftcost: {one_line(message)}", file=stream or sys.stderr)


_TOO_LARGE: Final = "a number of the job or of the model's config is too large to compute with"


def _over_limits(answer: Mapping[str, Any], budget_usd: float | None, deadline_hours: float | None) -> list[str]:
    """A sentence for each limit that the point estimate passes. An unknown total cannot be held against one."""
    from costmodel.report import format_seconds, format_usd

    excess = []
    spot = answer.get("spot") or {}
    if budget_usd is not None:
        usd = spot.get("expected_usd", answer["total_usd"])
        if usd is None:
            raise CostModelError(
                "--budget-usd needs a total in dollars: give a price, the lengths, and num_samples or max_steps"
            )
        if usd > budget_usd:
            excess.append(f"over budget: {format_usd(usd)} of {format_usd(budget_usd)}")
    if deadline_hours is not None:
        seconds = spot.get("expected_seconds", answer["total_seconds"])
        if seconds is None:
            raise CostModelError("--deadline-hours needs a total: give the lengths, and num_samples or max_steps")
        limit = deadline_hours * SECONDS_PER_HOUR
        if seconds > limit:
            excess.append(f"over the deadline: {format_seconds(seconds)} of {format_seconds(limit)}")
    return excess


def _estimate_lines(path: str, fields: Mapping[str, Any], *, strict: bool) -> int:
    """One JSON answer for each job, in order; ``{"error": ...}`` in the place of one that is wrong. Blank lines: none.

    Exit code 2 where no line is a job or, with ``strict``, where one is not.
    """
    from costmodel.estimation import estimate
    from costmodel.report import to_json

    num_wrong, num_answered, had_internal_error, stale = 0, 0, False, None
    # Only a line feed ends a line: JSON text may hold U+2028 and its like as they are.
    lines = _standard_input() if path == "-" else iter(_read_text(path).split("\n"))
    for number, line in _job_texts(lines):
        try:
            job = _as_job_mapping(parse_json(line, f"line {number}"), f"line {number}")
            answer = _with_spot(estimate({**job, **fields}).to_dict())
            stale = stale or _stale_price(answer)
            text = to_json(answer, indent=None)
            num_answered += 1
        except (CostModelError, ValidationError) as error:
            num_wrong += 1
            text = to_json({"error": _error_text(error), "line": number}, indent=None)
        except OverflowError:
            num_wrong += 1
            text = to_json({"error": _TOO_LARGE, "line": number}, indent=None)
        except Exception as error:  # a bug here must not cost the other answers
            had_internal_error = True
            text = to_json({"error": f"internal error: {error!r}", "line": number}, indent=None)
        sys.stdout.write(text + "\n")
    if not (num_wrong or num_answered or had_internal_error):
        raise CostModelError(f"{'standard input' if path == '-' else path} holds no job")
    if num_wrong:
        _say(f'{num_wrong} line{"s are" if num_wrong > 1 else " is"} not a job: see "error" in the answers')
    if stale:
        _say(stale)
    if had_internal_error:
        return INTERNAL_ERROR
    return WRONG_INPUT if num_wrong and (strict or not num_answered) else FITS


def _job_texts(lines: Iterator[str]) -> Iterator[tuple[int, str]]:
    """Number and text of each line that is not blank; all of the text where it is one object over several lines."""
    try:
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
    except UnicodeDecodeError:
        raise CostModelError("the input is not text in UTF-8") from None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _standard_input() -> Iterator[str]:
    if sys.stdin is None:
        raise CostModelError("standard input is closed; give a job file, or pipe one in")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8")  # as of files, whatever the terminal's is
    yield from sys.stdin


# --- compare and the catalogue ----------------------------------------------------------------------------------------


_Gpus = Annotated[str | None, typer.Option("--gpus", metavar="A,B,...", help="Only these; default: all with a dated price.")]
_Tiers = Annotated[
    str | None, typer.Option("--tiers", metavar="A,B,...", help="on_demand (default), spot, reserved, community.")
]
_FORMATS: Final = ("table", "markdown", "json", "skypilot")
_ROWS_SHOWN: Final = 25


@app.command("compare", context_settings=COMMAND_SETTINGS)
@with_job_flags
def compare_command(
    file: _File = None,
    gpus: _Gpus = None,
    tiers: _Tiers = None,
    by: Annotated[str, typer.Option("--by", metavar="usd|time", help="What to rank by.")] = "usd",
    as_is: Annotated[
        bool, typer.Option("--as-is", help="Keep micro-batch and checkpointing; default: each GPU's best at the same batch.")
    ] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Every cloud's offer, not only the cheapest of each GPU.")] = False,
    form: Annotated[
        str | None, typer.Option("--format", metavar="|".join(_FORMATS), help="skypilot: a task's resources: block.")
    ] = None,
    as_json: _Json = False,
    markdown: _Markdown = False,
    price_file: _PriceFile = None,
    interruptions_per_hour: _Interruptions = None,
    restart_seconds: _Restart = None,
    plot: _Plot = None,
    **flags: Any,
) -> int:
    """The same job on every GPU with a dated price: which fits, how long, how many dollars. Exit code 3 if none fits."""
    job, wanted_tiers = _job_and_tiers(file, flags, tiers)
    spot = _spot_terms(interruptions_per_hour, restart_seconds)
    if spot is not None and "spot" not in wanted_tiers:
        raise CostModelError("--interruptions-per-hour goes with --tiers spot")
    form = _format(form, as_json, markdown, _FORMATS)

    from costmodel import report
    from costmodel.search import compare

    candidates = compare(job, _split(gpus), wanted_tiers, by=by, as_is=as_is, spot=spot, today=_today())
    if plot is not None:
        from costmodel import plots

        plots.write_picture(plot, plots.comparison_svg(candidates), title="ftcost compare")
    if form == "json":
        print(report.to_json([candidate.to_dict() for candidate in candidates]))
    elif form == "skypilot":
        from costmodel.skypilot import resources_block

        print(resources_block(candidates if show_all else candidates[:_ROWS_SHOWN]), end="")
    else:
        every_offer = show_all or len(candidates) <= _ROWS_SHOWN
        table = report.comparison_table(candidates, by=by, today=_today(), every_offer=every_offer)
        _show(table, form == "markdown")
    _say_warnings(candidates)
    if any(candidate.fits for candidate in candidates):
        return FITS
    _say("fits on none of these GPUs")
    return DOES_NOT_FIT


def _job_and_tiers(file: str | None, flags: Mapping[str, Any], tiers: str | None) -> tuple[dict[str, Any], list[str]]:
    fields = job_fields_from_flags(flags)
    job = {**(read_job_file(file, says_num_samples="num_samples" in fields) if file is not None else {}), **fields}
    if not job:
        raise CostModelError("give a job file, or describe the job with flags: --model, ... (see --help)")
    return job, _split(tiers) or ([job["tier"]] if job.get("tier") else ["on_demand"])


def _format(form: str | None, as_json: bool, markdown: bool, known: tuple[str, ...]) -> str:
    """One format, from ``--format`` or its short forms ``--json`` and ``--markdown``. Two are refused."""
    asked = {*(["json"] if as_json else []), *(["markdown"] if markdown else []), *([form] if form else [])}
    if len(asked) > 1:
        raise CostModelError("give one format: --json, --markdown or --format")
    if form is None:
        return "json" if as_json else "markdown" if markdown else "table"
    if form not in known:
        raise UnknownNameError("format", form, known)
    return form


def _say_warnings(candidates: Iterable[Any]) -> None:
    """Each warning of any candidate once; those that every card or price has its own of in one line."""
    warnings = list(dict.fromkeys(warning for candidate in candidates for warning in candidate.warnings))
    together = {
        "the price of ": "{} of these prices are older than 90 days; {}",
        "the calibration": "{} of these answers do not use the calibration; {}",
        "calibration auto": "{} of these answers are not calibrated; {}",
    }
    for start, sentence in together.items():
        alike = [warning for warning in warnings if warning.startswith(start)]
        if len(alike) > 1:
            warnings = [warning for warning in warnings if warning not in alike] + [sentence.format(len(alike), alike[0])]
    for warning in warnings:
        _say(warning)


@app.command("optimize", context_settings=COMMAND_SETTINGS)
@with_job_flags
def optimize_command(
    file: _File = None,
    gpus: Annotated[
        str | None, typer.Option("--gpus", metavar="A,B,...", help="Default: the job's, else the best of compare.")
    ] = None,
    tiers: _Tiers = None,
    budget_usd: Annotated[
        float | None,
        typer.Option("--budget-usd", help="The fastest within it; exit code 4 if nothing is.", min=0, callback=_finite),
    ] = None,
    deadline_hours: Annotated[
        float | None,
        typer.Option(
            "--deadline-hours", help="The cheapest that keeps it; exit code 4 if nothing does.", min=0, callback=_finite
        ),
    ] = None,
    free: Annotated[
        str | None, typer.Option("--free", metavar="A,B,...|all", help="Fields of the job that may change though given.")
    ] = None,
    free_batch: Annotated[bool, typer.Option("--free-batch", help="The samples of a step may change too.")] = False,
    allow_quantization: Annotated[
        bool, typer.Option("--allow-quantization", help="How the base is stored may change too.")
    ] = False,
    as_json: _Json = False,
    markdown: _Markdown = False,
    price_file: _PriceFile = None,
    interruptions_per_hour: _Interruptions = None,
    restart_seconds: _Restart = None,
    **flags: Any,
) -> int:
    """Which settings make this job cheaper, each alone and together. What the job fixes stays, and so does its batch."""
    _format(None, as_json, markdown, ())
    job, wanted_tiers = _job_and_tiers(file, flags, tiers)
    spot = _spot_terms(interruptions_per_hour, restart_seconds)

    from costmodel import report
    from costmodel.search import optimize

    result = optimize(
        job,
        _split(gpus),
        wanted_tiers,
        budget_usd=budget_usd,
        deadline_hours=deadline_hours,
        free=_split(free) or (),
        free_batch=free_batch,
        allow_quantization=allow_quantization,
        spot=spot,
        today=_today(),
    )
    if as_json:
        print(report.to_json(result))
    else:
        for table in report.optimization_tables(result, today=_today()):
            _show(table, markdown)
            print()
    _say_warnings([result.best])
    if not result.best.fits:
        _say("nothing fits that keeps what the job fixes; try --free all, --allow-quantization or other --gpus")
        return DOES_NOT_FIT
    for limit, value in (("budget_usd", budget_usd), ("deadline_hours", deadline_hours)):
        if limit in result.unmet:
            _say(f"no settings keep --{limit.replace('_', '-')} {value:g}; these come nearest")
    return OVER_LIMIT if result.unmet else FITS


def _split(text: str | None) -> list[str] | None:
    return [part.strip() for part in text.split(",") if part.strip()] if text else None


def _show(table: Any, markdown: bool = False) -> None:
    from costmodel import report

    if markdown:
        print(report.table_to_markdown(table), end="")
    else:
        report.print_table(table, sys.stdout)


@app.command("gpus", context_settings=COMMAND_SETTINGS)
def gpus_command(
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="Only names that contain this.")] = None,
    as_json: _Json = False,
) -> int:
    """GPUs whose data sheet is known."""
    from costmodel.catalog import list_gpus
    from costmodel.report import Table

    gpus = list_gpus()
    shown = [gpu for gpu in gpus if _contains((gpu.name, gpu.vendor, gpu.architecture, *gpu.nvml_names), text)]
    if not shown:
        raise UnknownNameError("GPU", text, [gpu.name for gpu in gpus])
    if as_json:
        return _print_json([gpu.model_dump() for gpu in shown])
    rows = tuple(
        (
            gpu.name,
            gpu.architecture,
            f"{gpu.memory_bytes / GIB:.1f}" + ("*" if gpu.memory_is_marketed else ""),
            f"{gpu.memory_bandwidth_bytes_per_second / GIGA:,.0f}",
            f"{gpu.peak_bf16_flops_per_second / TERA:,.0f}" if gpu.peak_bf16_flops_per_second else "none",
            f"{gpu.tdp_watts:.0f}" if gpu.tdp_watts else "",
            "; ".join(gpu.nvml_names),
        )
        for gpu in shown
    )
    columns = ("GPU", "architecture", "GiB", "GB/s", "bf16 TFLOP/s", "watts", "NVML names")
    _show(Table("GPUs (* = marketed size; the driver reports less)", rows, columns, numeric=(2, 3, 4, 5)))
    return FITS


@app.command("models", context_settings=COMMAND_SETTINGS)
def models_command(
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="Only ids or families with this.")] = None,
    as_json: _Json = False,
) -> int:
    """Models whose config.json is in the catalogue. Others work too: give a path to theirs."""
    from costmodel.catalog import list_models, model_facts
    from costmodel.report import Table

    facts = [model_facts(model_id) for model_id in list_models()]
    shown = [fact for fact in facts if _contains((fact.model_id, fact.model_type), text)]
    if not shown:
        raise UnknownNameError("model", text, list_models(), way_out="or give a path to its config.json")
    if as_json:
        return _print_json(
            [
                {
                    "model_id": fact.model_id,
                    "model_type": fact.model_type,
                    "confidence": fact.confidence,
                    "source": fact.source,
                }
                for fact in shown
            ]
        )
    rows = tuple((fact.model_id, fact.model_type, fact.confidence) for fact in shown)
    _show(Table("Models", rows, ("model", "family", "confidence")))
    return FITS


@app.command("prices", context_settings=COMMAND_SETTINGS)
def prices_command(
    gpu: Annotated[str | None, typer.Argument(metavar="[GPU]", help="Only this GPU.")] = None,
    cloud: Annotated[str | None, typer.Option("--cloud", help="Only this cloud.")] = None,
    tier: Annotated[
        str | None, typer.Option("--tier", metavar="on_demand|spot|reserved|community", help="Only this tier.")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Also rows that are never chosen, with the reason.")] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Read today's from gpuhunt (extra prices) and keep them.")
    ] = False,
    as_json: _Json = False,
    price_file: _PriceFile = None,
) -> int:
    """Dated prices, cheapest first for each GPU. Storage, traffic and taxes are in none of them."""
    from costmodel.catalog import TIERS, find_cloud, list_gpus, list_price_rows, price_age_days, stale_price_warning
    from costmodel.report import Table, format_age

    if update:
        _update_prices()

    if tier is not None and tier not in TIERS:
        raise UnknownNameError("tier", tier, TIERS)
    names = _gpu_names(gpu) if gpu else {each.name for each in list_gpus()}
    wanted_cloud = find_cloud(cloud) if cloud else None
    shown = [
        row
        for row in list_price_rows()
        if row.price.gpu in names
        and wanted_cloud in (None, row.price.cloud)
        and tier in (None, row.price.tier)
        and (show_all or not row.not_ranked_because)
    ]
    shown.sort(key=lambda row: (row.price.gpu, row.price.usd_per_gpu_hour, row.price.cloud))
    today = _today()
    if as_json:
        return _print_json(
            [
                {
                    **row.price.model_dump(),
                    "age_days": price_age_days(row.price, today),
                    "not_ranked_because": row.not_ranked_because or None,
                }
                for row in shown
            ]
        )
    if not shown:
        raise CostModelError("no dated price for that; see: ftcost prices --all, or give it: --usd-per-gpu-hour")
    rows = tuple(
        (
            row.price.gpu,
            f"{row.price.usd_per_gpu_hour:.4g}",
            row.price.tier,
            row.price.cloud,
            row.price.product,
            row.price.region,
            f"{row.price.usd_per_instance_hour:.4g} for {row.price.gpus_per_instance}",
            f"{row.price.as_of}{format_age(row.price.as_of, today)}",
            f"not chosen: {row.not_ranked_because}" if row.not_ranked_because else row.price.note,
        )
        for row in shown
    )
    columns = ("GPU", "USD/GPU-h", "tier", "cloud", "product", "region", "machine USD/h", "as of", "note")
    _show(Table("Prices", rows, columns, numeric=(1,)))
    stale = [warning for row in shown if (warning := stale_price_warning(row.price, today))]
    if stale:
        _say(f"{len(stale)} of these {len(shown)} prices are older than 90 days: ftcost prices --update, or --price-file")
    return FITS


def _update_prices() -> None:
    """Reads today's prices into the user's configuration folder, from where they go before the built-in ones."""
    from costmodel import price_update
    from costmodel.catalog import updated_prices_path

    offers, version = price_update.fetch_offers()
    update = price_update.rows_from_offers(offers, as_of=_today(), version=version)
    if not update.rows:
        raise CostModelError("gpuhunt gave no price that can be used; the prices you have stay as they are")
    price_update.write_prices(updated_prices_path(), update.rows)
    _say(f"{len(update.rows)} prices of {_today()} from {', '.join(update.clouds)}")
    for reason, count in update.left_out:
        _say(f"left out {count}: {reason}")


def _gpu_names(name: str) -> set[str]:
    """Every product a name may mean: a list of prices need not choose one A100."""
    from costmodel.catalog import find_gpu

    try:
        return {find_gpu(name).name}
    except AmbiguousNameError as error:
        return set(error.candidates)


def _contains(names: Iterable[str], text: str | None) -> bool:
    return text is None or any(text.strip().lower() in name.lower() for name in names)


def _print_json(value: Any) -> int:
    from costmodel.report import to_json

    print(to_json(value))
    return FITS


# --- running ----------------------------------------------------------------------------------------------------------


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"ftcost {version('ftcost')}")
        except PackageNotFoundError:  # run from a source tree that was never installed
            print("ftcost (not installed)")
        raise typer.Exit()


@app.callback(context_settings={"help_option_names": ["--help", "-h"]})
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


def run(arguments: list[str] | None = None, *, application: typer.Typer = app, errors: TextIO | None = None) -> int:
    """The exit code of one command line. Errors are one line on stderr; ``FTCOST_DEBUG=1`` adds the traceback."""
    _prepare_streams()
    stream = errors or sys.stderr
    if sys.stdout is None:
        _say("standard output is closed: there is nowhere to write the answer", stream)
        return WRONG_INPUT
    try:
        code = _with_the_named_command(application, arguments)(args=arguments, prog_name="ftcost", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else FITS
    except (CostModelError, ValidationError) as error:
        _say(_error_text(error), stream)
        return WRONG_INPUT
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_is_gone()
    except OverflowError:
        _say(_TOO_LARGE, stream)
        return WRONG_INPUT
    except OSError as error:
        where = f" {error.filename}" if error.filename else " the answer"
        _say(f"cannot {'use' if error.filename else 'write'}{where}: {error.strerror or error}", stream)
        _reader_is_gone()
        return WRONG_INPUT
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # typer met it first
            return _reader_is_gone()
        raise
    except Exception as error:
        # Typer before 0.20 raises click's exceptions, later ones its own copies: both know how to print themselves.
        usage_message = getattr(error, "format_message", None)
        if usage_message is not None and type(error).__name__ == "NoArgsIsHelpError":  # the whole help, as it is
            print(usage_message(), file=stream)
            return WRONG_INPUT
        if usage_message is not None:
            _say(usage_message(), stream)
            return int(getattr(error, "exit_code", WRONG_INPUT))
        _say(f"internal error: {type(error).__name__}: {error} (FTCOST_DEBUG=1 shows where)", stream)
        if os.environ.get("FTCOST_DEBUG"):
            traceback.print_exc(file=stream)
        return INTERNAL_ERROR


def _error_text(error: Exception) -> str:
    return validation_message(error) if isinstance(error, ValidationError) else str(error)


def _prepare_streams() -> None:
    """Characters that a terminal's encoding lacks are escaped, not refused; a closed stderr takes messages in silence."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as the process


def _with_the_named_command(application: typer.Typer, arguments: list[str] | None) -> typer.Typer:
    """The application with only the command that the first argument names: the flags of the others take time to build."""
    first = next(iter(sys.argv[1:] if arguments is None else arguments), None)
    named = [command for command in application.registered_commands if command.name == first]
    if not named:
        return application
    alone = copy.copy(application)
    alone.registered_commands = named
    return alone


def _reader_is_gone() -> int:
    """``head`` or ``less`` has closed the pipe: nothing left to say, and nothing went wrong."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as the process
    os.dup2(sys.stdout.fileno(), 1)
    return FITS


def main() -> None:
    """``python -m costmodel.cli``."""
    sys.exit(run())


if __name__ == "__main__":
    main()
