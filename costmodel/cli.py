"""The pre-flight commands: ``estimate``, ``compare`` and ``optimize``, beside those of :mod:`costmodel.cli_lists`.

Exit codes are those of :mod:`costmodel.cli_run`. Every field of :class:`costmodel.specs.Job` is a flag
(:mod:`costmodel.cli_flags`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from pydantic import ValidationError

from costmodel.cli_flags import (
    COMMAND_SETTINGS,
    Dataset,
    File,
    GpuBandwidth,
    GpuMemory,
    GpuPeak,
    Gpus,
    Interruptions,
    Json,
    Markdown,
    Plot,
    PriceFile,
    Restart,
    Tiers,
    Tokenizer,
    described_gpu,
    finite,
    job_fields_from_flags,
    one_format,
    split_names,
    spot_terms,
    with_job_flags,
)
from costmodel.cli_input import (
    JobInput,
    effects_of_dataset,
    holds_lines,
    job_beside,
    job_on_line,
    job_texts,
    read_job,
    read_text,
    standard_input,
)
from costmodel.cli_lists import gpus_command, models_command, prices_command
from costmodel.cli_run import (
    DOES_NOT_FIT,
    FITS,
    INTERNAL_ERROR,
    OVER_LIMIT,
    TOO_LARGE,
    WRONG_INPUT,
    app,
    error_text,
    run,
    say,
    show_table,
    today,
    while_read,
)
from costmodel.errors import CostModelError
from costmodel.units import SECONDS_PER_HOUR

if TYPE_CHECKING:
    from costmodel.spot import SpotTerms

__all__ = ["app", "main", "run"]


# --- estimate ---------------------------------------------------------------------------------------------------------


@app.command("estimate", context_settings=COMMAND_SETTINGS, short_help="Will it fit, how long, what will it cost?")
@with_job_flags
def estimate_command(
    file: File = None,
    as_json: Json = False,
    markdown: Markdown = False,
    budget_usd: Annotated[
        float | None, typer.Option("--budget-usd", help="Exit code 4 if the run costs more.", min=0, callback=finite)
    ] = None,
    deadline_hours: Annotated[
        float | None, typer.Option("--deadline-hours", help="Exit code 4 if the run takes longer.", min=0, callback=finite)
    ] = None,
    gpu_memory_gib: GpuMemory = None,
    gpu_bandwidth_gb_per_second: GpuBandwidth = None,
    gpu_bf16_tflops: GpuPeak = None,
    price_file: PriceFile = None,
    interruptions_per_hour: Interruptions = None,
    restart_seconds: Restart = None,
    plot: Plot = None,
    dataset: Dataset = None,
    tokenizer: Tokenizer = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 2 if any line of a .jsonl or - is wrong.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show where each value came from.")] = False,
    **flags: Any,
) -> int:
    """Will it fit, how long will it take, what will it cost? Flags override the file.

    FILE is a job, an Axolotl, LLaMA-Factory or TRL config, a W&B run's config, a checkpoint folder, or a recorded run (its
    output folder or run.jsonl): -g then asks what it would cost on another GPU.
    """
    one_format(None, as_json, markdown, ())
    fields = job_fields_from_flags(flags)
    spot = spot_terms(interruptions_per_hour, restart_seconds)
    gpu = described_gpu(fields.get("gpu"), gpu_memory_gib, gpu_bandwidth_gb_per_second, gpu_bf16_tflops)
    if gpu is not None:
        fields["gpu"] = gpu
    if file is not None and holds_lines(file):
        if budget_usd is not None or deadline_hours is not None or markdown or plot or spot or dataset or explain:
            raise CostModelError(
                "--budget-usd, --deadline-hours, --markdown, --plot, --interruptions-per-hour, --dataset and --explain go "
                "with a single job"
            )
        return _estimate_lines(file, fields, strict=strict)
    if strict:
        raise CostModelError("--strict goes with jobs of a .jsonl file or of -")
    told = read_job(file, fields, dataset, tokenizer)

    from costmodel import report
    from costmodel.estimation import estimate

    imported, counted = told.imported, told.dataset
    answer = _with_spot(estimate(told.fields).to_dict(), spot)
    answer |= {"warnings": [*told.warnings, *answer["warnings"]], "assumed": [*told.assumed, *answer["assumed"]]}
    tables = []
    if counted is not None:
        from costmodel.explain import dataset_tables

        effects = effects_of_dataset(counted, answer["job"])
        answer["dataset"] = counted.to_dict() | effects.to_dict()
        tables += dataset_tables(counted, effects)
    if explain:
        from costmodel.explain import explain as explained_values
        from costmodel.explain import explanation_tables, explanation_to_dict, sources

        values = explained_values(answer, sources(imported, fields, counted, told.decided))
        answer["explain"] = explanation_to_dict(values, imported)
        tables += explanation_tables(values, imported)
    excess = _over_limits(answer, budget_usd, deadline_hours)
    if plot is not None:
        from costmodel import plots

        plots.write_picture(plot, plots.estimate_svg(answer), title="ftcost estimate")
    with while_read():
        if as_json:
            print(report.to_json(answer))
        elif markdown:
            print(report.to_markdown(answer, today=today()), end="")
        else:
            report.print_estimate(answer, sys.stdout, today=today())
        for table in () if as_json else tables:
            print()
            show_table(table, markdown)
    if stale := _stale_price(answer):
        say(stale)
    if answer["verdict"] == "does_not_fit":
        say(report.does_not_fit_sentence(answer))
        return DOES_NOT_FIT
    for sentence in excess:
        say(sentence)
    return OVER_LIMIT if excess else FITS


def _with_spot(answer: dict[str, Any], spot: SpotTerms | None = None) -> dict[str, Any]:
    """The answer with what interruptions add to a spot price, or with a warning that they are not in it."""
    is_spot = answer["job"].get("tier") == "spot"
    if spot is not None and not is_spot:
        raise CostModelError("--interruptions-per-hour goes with --tier spot")
    if not (is_spot and answer.get("price")):
        return answer
    from costmodel.spot import SPOT_WITHOUT_RATE, spot_run

    run = spot_run(answer, spot) if spot is not None else None
    warnings = (SPOT_WITHOUT_RATE,) if spot is None else run.warnings if run else ()
    return {**answer, "spot": run.to_dict() if run else None, "warnings": [*answer["warnings"], *warnings]}


def _stale_price(answer: Mapping[str, Any]) -> str | None:
    """A sentence where the answer's price is old. Not part of the answer, which is the same on every day."""
    from costmodel.price_catalog import stale_price_warning
    from costmodel.specs import Price

    price = answer.get("price")
    return stale_price_warning(Price.model_validate(price), today()) if price else None


def _over_limits(answer: Mapping[str, Any], budget_usd: float | None, deadline_hours: float | None) -> list[str]:
    """A sentence for each limit that the point estimate passes. An unknown total cannot be held against one."""
    from costmodel.formats import format_hours, format_usd

    excess = []
    spot = answer.get("spot") or {}
    if spot and spot["expected_seconds"] is None and (budget_usd is not None or deadline_hours is not None):
        return ["over the limit: with these interruptions the run does not get on"]
    if budget_usd is not None:
        usd = spot.get("expected_usd", answer["total_usd"])
        if usd is None:
            raise CostModelError(f"--budget-usd needs a total in dollars: give {_missing_for_a_total(answer, 'a price')}")
        if usd > budget_usd:
            excess.append(f"over budget: {format_usd(usd)} of {format_usd(budget_usd)}")
    if deadline_hours is not None:
        seconds = spot.get("expected_seconds", answer["total_seconds"])
        if seconds is None:
            raise CostModelError(f"--deadline-hours needs a total: give {_missing_for_a_total(answer)}")
        limit = deadline_hours * SECONDS_PER_HOUR
        if seconds > limit:
            excess.append(f"over the deadline: {format_hours(seconds)} of {format_hours(limit)}")
    return excess


def _missing_for_a_total(answer: Mapping[str, Any], price: str = "") -> str:
    """What an answer without a total lacks, in words; ``price``: what to call a price, where one is needed."""
    job = answer["job"]
    missing = [] if job.get("gpu") else ["a gpu"]
    missing += [price] if price and not answer.get("price") else []
    missing += [] if job.get("lengths") else ["the lengths"]
    missing += [] if job.get("num_samples") or job.get("max_steps") else ["num_samples or max_steps"]
    return ", ".join(missing) or "a gpu with a known rate for this type"


def _estimate_lines(path: str, fields: Mapping[str, Any], *, strict: bool) -> int:
    """One JSON answer for each job, in order; ``{"error": ...}`` in the place of one that is wrong. Blank lines: none.

    Exit code 2 where no line is a job or, with ``strict``, where one is not.
    """
    from costmodel.estimation import estimate
    from costmodel.report import to_json

    num_wrong, num_answered, had_internal_error, stale = 0, 0, False, None
    # Only a line feed ends a line: JSON text may hold U+2028 and its like as they are.
    lines = standard_input() if path == "-" else iter(read_text(path).split("\n"))
    with while_read():
        for number, line in job_texts(lines):
            try:
                job, of_another = job_beside(job_on_line(number, line), f"line {number}", fields)
                answer = _with_spot(estimate(job).to_dict())
                answer["warnings"] = [*of_another, *answer["warnings"]]
                stale = stale or _stale_price(answer)
                text = to_json(answer, indent=None)
                num_answered += 1
            except (CostModelError, ValidationError) as error:
                num_wrong += 1
                text = to_json({"error": error_text(error), "line": number}, indent=None)
            except OverflowError:
                num_wrong += 1
                text = to_json({"error": TOO_LARGE, "line": number}, indent=None)
            except Exception as error:  # a bug here must not cost the other answers
                had_internal_error = True
                text = to_json({"error": f"internal error: {error!r}", "line": number}, indent=None)
            sys.stdout.write(text + "\n")
    if not (num_wrong or num_answered or had_internal_error):
        raise CostModelError(f"{'standard input' if path == '-' else path} holds no job")
    if num_wrong:
        say(f'{num_wrong} line{"s are" if num_wrong > 1 else " is"} not a job: see "error" in the answers')
    if stale:
        say(stale)
    if had_internal_error:
        return INTERNAL_ERROR
    return WRONG_INPUT if num_wrong and (strict or not num_answered) else FITS


# --- compare and optimize ---------------------------------------------------------------------------------------------

_FORMATS: Final = ("table", "markdown", "json", "skypilot")
_ROWS_SHOWN: Final = 25


@app.command("compare", context_settings=COMMAND_SETTINGS, short_help="The same job on every GPU with a price.")
@with_job_flags
def compare_command(
    file: File = None,
    gpus: Gpus = None,
    tiers: Tiers = None,
    by: Annotated[str, typer.Option("--by", metavar="usd|time", help="What to rank by.")] = "usd",
    as_is: Annotated[
        bool, typer.Option("--as-is", help="Keep micro-batch and checkpointing; default: each GPU's best at the same batch.")
    ] = False,
    wide: Annotated[bool, typer.Option("--wide", help="With intervals, products, dates and settings in words.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Every cloud's offer, not only the cheapest of each GPU.")] = False,
    form: Annotated[
        str | None, typer.Option("--format", metavar="|".join(_FORMATS), help="skypilot: a task's resources: block.")
    ] = None,
    as_json: Json = False,
    markdown: Markdown = False,
    price_file: PriceFile = None,
    interruptions_per_hour: Interruptions = None,
    restart_seconds: Restart = None,
    dataset: Dataset = None,
    tokenizer: Tokenizer = None,
    plot: Plot = None,
    **flags: Any,
) -> int:
    """The same job on every GPU with a dated price: which fits, how long, how many dollars. Exit code 3 if none fits."""
    told = _told_job(file, flags, dataset, tokenizer)
    job, wanted_tiers = told.fields, _wanted_tiers(told.fields, tiers)
    spot = spot_terms(interruptions_per_hour, restart_seconds)
    if spot is not None and "spot" not in wanted_tiers:
        raise CostModelError("--interruptions-per-hour goes with --tiers spot")
    form = one_format(form, as_json, markdown, _FORMATS)

    from costmodel import comparison_tables
    from costmodel.comparison import compare
    from costmodel.report import to_json

    candidates = compare(job, split_names(gpus), wanted_tiers, by=by, as_is=as_is, spot=spot, today=today())
    if plot is not None:
        from costmodel import plots

        plots.write_picture(plot, plots.comparison_svg(candidates), title="ftcost compare")
    with while_read():
        if form == "json":
            print(to_json([candidate.to_dict() for candidate in candidates]))
        elif form == "skypilot":
            from costmodel.skypilot import can_rent, resources_block

            candidates = candidates if show_all else candidates[:_ROWS_SHOWN]
            print(resources_block(candidates), end="")
        else:
            every_offer = show_all or len(candidates) <= _ROWS_SHOWN
            in_full = wide or form == "markdown"
            table = comparison_tables.comparison_table(
                candidates, by=by, today=today(), every_offer=every_offer, wide=in_full
            )
            show_table(table, form == "markdown")
            if not in_full:
                for reason in dict.fromkeys(f"{each.gpu} cannot run it: {each.error}" for each in candidates if each.error):
                    say(reason)
    _say_warnings(candidates)
    if not any(candidate.fits for candidate in candidates):
        say(comparison_tables.fits_nowhere_sentence(candidates))
        return DOES_NOT_FIT
    if form == "skypilot" and not any(map(can_rent, candidates)):
        say("SkyPilot rents none of the offers that fit: name other --gpus or --tiers, or leave out --cloud")
        return DOES_NOT_FIT
    return FITS


def _told_job(file: str | None, flags: Mapping[str, Any], dataset: str | None, tokenizer: str | None) -> JobInput:
    told = read_job(file, job_fields_from_flags(flags), dataset, tokenizer)
    if told.dataset is not None:
        say(told.dataset.sentence)
    if told.warnings:
        first, more = told.warnings[0], len(told.warnings) - 1
        others = f" (and {more} more warning{'s' if more > 1 else ''}: ftcost estimate {file})" if more else ""
        say(f"{first}{others}")
    return told


def _wanted_tiers(job: Mapping[str, Any], tiers: str | None) -> list[str]:
    return split_names(tiers) or ([job["tier"]] if job.get("tier") else ["on_demand"])


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
        say(warning)


@app.command("optimize", context_settings=COMMAND_SETTINGS, short_help="Which settings make the job cheaper.")
@with_job_flags
def optimize_command(
    file: File = None,
    gpus: Annotated[
        str | None, typer.Option("--gpus", metavar="A,B,...", help="Default: the job's, else the best of compare.")
    ] = None,
    tiers: Tiers = None,
    budget_usd: Annotated[
        float | None,
        typer.Option("--budget-usd", help="The fastest within it; exit code 4 if nothing is.", min=0, callback=finite),
    ] = None,
    deadline_hours: Annotated[
        float | None,
        typer.Option(
            "--deadline-hours", help="The cheapest that keeps it; exit code 4 if nothing does.", min=0, callback=finite
        ),
    ] = None,
    free: Annotated[
        str | None, typer.Option("--free", metavar="A,B,...|all", help="Fields of the job that may change though given.")
    ] = None,
    free_batch: Annotated[bool, typer.Option("--free-batch", help="The samples of a step may change too.")] = False,
    allow_quantization: Annotated[
        bool, typer.Option("--allow-quantization", help="How the base is stored may change too.")
    ] = False,
    as_json: Json = False,
    markdown: Markdown = False,
    price_file: PriceFile = None,
    interruptions_per_hour: Interruptions = None,
    restart_seconds: Restart = None,
    dataset: Dataset = None,
    tokenizer: Tokenizer = None,
    **flags: Any,
) -> int:
    """Which settings make this job cheaper, each alone and together. What the job fixes stays, and so does its batch."""
    one_format(None, as_json, markdown, ())
    told = _told_job(file, flags, dataset, tokenizer)
    job, wanted_tiers = told.fields, _wanted_tiers(told.fields, tiers)
    spot = spot_terms(interruptions_per_hour, restart_seconds)

    from costmodel import comparison_tables
    from costmodel.optimization import optimize
    from costmodel.report import to_json

    result = optimize(
        job,
        split_names(gpus),
        wanted_tiers,
        budget_usd=budget_usd,
        deadline_hours=deadline_hours,
        free=split_names(free) or (),
        free_batch=free_batch,
        allow_quantization=allow_quantization,
        not_given=told.assumed,
        spot=spot,
        today=today(),
    )
    with while_read():
        if as_json:
            print(to_json(result))
        else:
            for table in comparison_tables.optimization_tables(result, today=today()):
                show_table(table, markdown)
                print()
    _say_warnings([result.best])
    if not result.best.fits:
        say("nothing fits that keeps what the job fixes; try --free all, --allow-quantization or other --gpus")
        return DOES_NOT_FIT
    for limit, value in (("budget_usd", budget_usd), ("deadline_hours", deadline_hours)):
        if limit in result.unmet:
            say(f"no settings keep --{limit.replace('_', '-')} {value:g}; these come nearest")
    return OVER_LIMIT if result.unmet else FITS


for _name, _command in (("gpus", gpus_command), ("models", models_command), ("prices", prices_command)):
    app.command(_name, context_settings=COMMAND_SETTINGS)(_command)


def main() -> None:
    """``python -m costmodel.cli``."""
    sys.exit(run())


if __name__ == "__main__":
    main()
