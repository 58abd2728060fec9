"""Flags: one for each field of a job, generated from the fields, and the options that several commands share."""

from __future__ import annotations

import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Union

import typer

from costmodel.cli_run import say
from costmodel.errors import CostModelError, UnknownNameError, shown
from costmodel.specs import GpuSpec, Job, Lengths
from costmodel.strict_json import parse_json
from costmodel.units import GIB, GIGA, TERA

if TYPE_CHECKING:
    from costmodel.spot import SpotTerms

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
    "gpu": "One product by any of its names (see: ftcost gpus), or probe, probe:NAME: what ftcost probe stored.",
    "num_gpus": "GPUs of one data-parallel run.",
    "method": "What is trained.",
    "quantization": "How the base is stored.",
    "double_quant": "Quantise the scales of a 4-bit base too.",
    "prepare_model_for_kbit_training": "peft's fp32 upcast of everything unquantised.",
    "load_towers": "Load a multimodal model's encoders of images and sound too.",
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
    "gradient_checkpointing_kwargs": 'How to checkpoint, as JSON: {"use_reentrant": false}.',
    "attn_implementation": "Attention kernel.",
    "experts_implementation": "How the experts of a layer are computed.",
    "expert_imbalance": "Tokens of the busiest expert over the mean; 1 is even.",
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
    "dataloader_drop_last": "Leave out the samples of an epoch that do not fill a batch.",
    "num_train_epochs": "Passes over the training set.",
    "max_steps": "Optimizer steps, in place of epochs.",
    "eval_strategy": "When to evaluate.",
    "eval_steps": "Every so many steps; below 1, a share of the run.",
    "eval_delay": "Steps or epochs, as eval_strategy counts, before the first evaluation.",
    "eval_on_start": "One more evaluation before the first step.",
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


def described_gpu(
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


# --- options that several commands share ------------------------------------------------------------------------------


def _field_name(flag: str) -> str:
    """Lets people type TrainingArguments' own spelling: ``--per_device_train_batch_size``."""
    return flag.replace("_", "-")


COMMAND_SETTINGS: Final = {"token_normalize_func": _field_name, "help_option_names": ["--help", "-h"]}

File = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE",
        help="Job file (.json, .yaml, .jsonl: a job a line), - for stdin, another tool's config, or a recorded run.",
    ),
]


def finite(option: typer.CallbackParam, value: float | None) -> float | None:
    """``nan`` and ``inf`` are numbers to the parser, and nan passes every limit."""
    if value is not None and not math.isfinite(value):
        raise CostModelError(f"{option.opts[0]} must be a finite number, got {value}")
    return value


Json = Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]
GpuMemory = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory-gib",
        help="Describe a GPU that is not in the catalogue: its memory.",
        min=0.1,
        max=1e6,
        callback=finite,
    ),
]
GpuBandwidth = Annotated[
    float | None,
    typer.Option("--gpu-bandwidth-gb-per-second", help="The described GPU's memory bandwidth.", min=1, callback=finite),
]
GpuPeak = Annotated[
    float | None, typer.Option("--gpu-bf16-tflops", help="The described GPU's dense bf16 peak.", min=0.01, callback=finite)
]


def _use_price_file(context: typer.Context, path: str | None) -> str | None:
    """Puts the prices of ``--price-file`` in the place of the catalogue's until the command ends."""
    if path is not None:
        from costmodel.price_catalog import prices_from

        for refused in context.with_resource(prices_from(path)).refused:
            say(f"refused: {refused}")
    return path


PriceFile = Annotated[
    str | None,
    typer.Option(
        "--price-file",
        metavar="FILE",
        callback=_use_price_file,
        is_eager=True,
        help="CSV of your own prices (columns of the catalogue); no others are used.",
    ),
]
Interruptions = Annotated[
    float | None,
    typer.Option(
        "--interruptions-per-hour", help="Of a spot machine: counts lost work and restarts in.", min=0, callback=finite
    ),
]
Restart = Annotated[
    float | None,
    typer.Option(
        "--restart-seconds",
        help="From an interruption to the next step; default: the start-up time.",
        min=0,
        callback=finite,
    ),
]
Dataset = Annotated[
    str | None, typer.Option("--dataset", metavar="FILE", help="Count lengths: .jsonl, .json, .csv or .parquet.")
]
Tokenizer = Annotated[
    str | None, typer.Option("--tokenizer", metavar="PATH", help="A tokenizer.json or its folder, to count with.")
]
Plot = Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Also draw it: .svg, .html or .png.")]


def spot_terms(interruptions_per_hour: float | None, restart_seconds: float | None) -> SpotTerms | None:
    if interruptions_per_hour is None:
        if restart_seconds is not None:
            raise CostModelError("--restart-seconds goes with --interruptions-per-hour")
        return None
    from costmodel.spot import SpotTerms

    return SpotTerms(interruptions_per_hour, restart_seconds)


Gpus = Annotated[str | None, typer.Option("--gpus", metavar="A,B,...", help="Only these; default: all with a dated price.")]
Tiers = Annotated[
    str | None, typer.Option("--tiers", metavar="A,B,...", help="on_demand (default), spot, reserved, community.")
]


def one_format(form: str | None, as_json: bool, markdown: bool, known: tuple[str, ...]) -> str:
    """One format, from ``--format`` or its short forms ``--json`` and ``--markdown``. Two are refused."""
    asked = {*(["json"] if as_json else []), *(["markdown"] if markdown else []), *([form] if form else [])}
    if len(asked) > 1:
        raise CostModelError("give one format: --json, --markdown or --format")
    if form is None:
        return "json" if as_json else "markdown" if markdown else "table"
    if form not in known:
        raise UnknownNameError("format", form, known)
    return form


def split_names(text: str | None) -> list[str] | None:
    return [part.strip() for part in text.split(",") if part.strip()] if text else None
