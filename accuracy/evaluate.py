# ruff: noqa: E501 - the lines of a document are as long as in the document
"""Predicted against measured, step time and memory, of every usable public run.

    python accuracy/evaluate.py            tables on the terminal, with the shipped constants
    python accuracy/evaluate.py --write    also docs/accuracy.md, its pictures, and the package's evidence.csv

The leave-one-out errors come from ``fit.json``, which ``fit.py`` writes.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from calibration_sweeps import calibration_section
from fit import FREE, current_constants, log_error, predict
from log_errors import percent, quantile, summary, weighted_quantile
from memory_errors import known, memory_errors
from memory_report import memory_scatter, memory_section
from runs import Run, all_runs, decisions
from several_gpus import several_gpus_section
from svg import Mark, chart

from costmodel import constants as c
from costmodel.uncertainty import job_kind

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
Errors = Mapping[str, float]  # run id -> log(predicted / measured)
REGIMES = tuple(c.STEP_INTERVAL)


def table(runs: Sequence[Run], errors: Errors, key: Callable[[Run], str], name: str) -> list[str]:
    lines = [f"| {name} | n | median % | p90 % | within 20 % | bias % |", "|---|---|---|---|---|---|"]
    groups: dict[str, list[float]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(errors[run.run_id])
    return lines + [f"| {group} | {summary(values)} |" for group, values in groups.items()]


def dense_or_moe(run: Run) -> str:
    return "mixture of experts" if run.is_moe else "dense"


def regime(run: Run) -> str:
    return predict(run).regime


# --- intervals -------------------------------------------------------------------------------------------------------------


def interval_widths(runs: Sequence[Run], errors: Errors, share: float = 0.8) -> dict[str, float]:
    """Half width of the log by regime: the quantile of the errors, each source weighing the same within a regime.

    A regime of fewer than two sources takes at least the quantile of all errors: one says nothing of how they differ.
    """
    of_all = quantile([abs(errors[run.run_id]) for run in runs], share)
    widths = dict.fromkeys(REGIMES, of_all)
    for name in REGIMES:
        some = [run for run in runs if regime(run) == name]
        counts = Counter(run.source for run in some)
        if some:
            width = weighted_quantile([(abs(errors[run.run_id]), 1.0 / counts[run.source]) for run in some], share)
            widths[name] = width if len(counts) > 1 else max(width, of_all)
    return widths


def covered(runs: Sequence[Run], errors: Errors, widths: Mapping[str, float]) -> dict[str, bool]:
    return {run.run_id: abs(errors[run.run_id]) <= widths[regime(run)] for run in runs}


def nested_widths(runs: Sequence[Run], errors: Errors, *, widened: bool = False) -> dict[str, float]:
    """Half width of each run's interval from the other sources alone.

    ``widened``: as the answer does where a stack, a card or a family's loop over experts is unknown, here where no other
    source has it.
    """
    result: dict[str, float] = {}
    for source in sorted({run.source for run in runs}):
        others = [run for run in runs if run.source != source]
        widths = interval_widths(others, errors)
        stacks = {run.job.framework for run in others} - {"other"}
        cards = {run.gpu.name for run in others}
        loops = {run.model.family for run in others if loops_over_experts(run)}
        for run in runs:
            if run.source != source:
                continue
            width = widths[regime(run)]
            own_kernels = run.job.torch_compile or run.job.use_liger_kernel
            own_loop = loops_over_experts(run) and run.model.family not in loops
            if widened and (run.job.framework not in stacks or own_kernels or own_loop):
                width *= c.UNKNOWN_STACK_FACTOR
            if widened and run.gpu.name not in cards:
                width *= c.UNMEASURED_CARD_FACTOR
            result[run.run_id] = width
    return result


def loops_over_experts(run: Run) -> bool:
    return predict(run).expert_loop_seconds > 0


def nested_coverage(runs: Sequence[Run], errors: Errors, *, widened: bool = False) -> dict[str, bool]:
    """Whether each run lies in the interval that the other sources alone give it."""
    widths = nested_widths(runs, errors, widened=widened)
    return {run.run_id: abs(errors[run.run_id]) <= widths[run.run_id] for run in runs}


# --- the document ----------------------------------------------------------------------------------------------------------


def left_out(report: Mapping[str, object], which: str) -> dict[str, float]:
    section = report[which]
    assert isinstance(section, dict)
    return {run_id: float(entry["log_error"]) for run_id, entry in section.items()}


def constants_table(report: Mapping[str, object]) -> list[str]:
    """Shipped, fitted now, and the range over the fits with one source, card or series left out."""
    lines = [
        "| constant | shipped | fitted | range over leave-outs that still witness it | factor |",
        "|---|---|---|---|---|",
    ]
    fitted = report["fitted"]
    assert isinstance(fitted, dict)
    shipped = current_constants()
    for name, (neutral, _, _) in FREE.items():
        values = []
        for which in ("source", "card", "series"):
            section = report[f"{which}_constants"]
            assert isinstance(section, dict)
            values += [each[name] for each in section.values() if each[name] != neutral]
        low, high = min(values), max(values)
        lines.append(f"| {name} | {shipped[name]:.3g} | {fitted[name]:.3g} | {low:.3g} to {high:.3g} | {high / low:.2f} |")
    return lines


def scatter(runs: Sequence[Run], errors: Errors, title: str) -> str:
    groups: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        assert run.seconds is not None
        groups.setdefault(run.source, []).append((run.seconds, run.seconds * math.exp(errors[run.run_id])))
    marks = [Mark(source, points) for source, points in groups.items()]
    return chart(
        title,
        "measured, seconds a micro-batch",
        "predicted, its source left out",
        marks,
        is_log=True,
        diagonal_bands=(1.2,),
    )


def document(runs: Sequence[Run], report: Mapping[str, object]) -> str:
    shipped = {run.run_id: log_error(run) for run in runs}
    by_source, by_card, by_series = (left_out(report, which) for which in ("source", "card", "series"))
    widths = interval_widths(runs, by_source)
    nested = nested_coverage(runs, by_source)
    paper = [run for run in runs if run.source.startswith("paper")]
    unused = sum(row["time"] == "no" and row["memory"] == "no" for row in decisions().values())
    lines = [
        "# Accuracy",
        "",
        "Written by `python accuracy/evaluate.py --write` after `python accuracy/fit.py`; every number below is computed. Errors",
        "are in percent of the measured value; the bias is the median of the signed errors.",
        "",
        f"{len(decisions())} public rows are in `accuracy/data`; `accuracy/rows.csv` says which are used and why not ({unused} are",
        f"not). {len(runs)} runs have a step time: the rows with a known configuration, and the points of arXiv:2408.04693.",
        "What other tools say for the same runs: [benchmarks](benchmarks.md#errors-on-the-same-public-runs).",
        "",
        "## Step time",
        "",
        "A whole source left out: the constants are fitted without any run of it. This is the number to believe.",
        "",
        *table(runs, by_source, dense_or_moe, "source left out"),
        "",
        *table(runs, by_source, lambda run: run.group, "class, source left out"),
        "",
        "![predicted against measured](accuracy.svg)",
        "",
        "By regime (what binds: device, host, or both), source left out:",
        "",
        *table(runs, by_source, regime, "regime"),
        "",
        "A whole card left out:",
        "",
        *table(runs, by_card, dense_or_moe, "card left out"),
        "",
        *table(runs, by_card, lambda run: run.gpu.name, "card"),
        "",
        "Each series of the paper left out (its other series stay):",
        "",
        *table(paper, by_series, lambda run: run.series, "series left out"),
        "",
        "With the shipped constants, in sample:",
        "",
        *table(runs, shipped, dense_or_moe, "in sample"),
        "",
        *table(runs, shipped, lambda run: run.group, "class"),
        "",
        "### The bars, met or not",
        "",
        *bars(runs, by_source, by_series, nested),
        "",
        "### What is not explained",
        "",
        *OPEN,
        "",
        "### Constants",
        "",
        "Fitted with equal weight for each class (a class of fewer than three runs weighs less), on the log error, with a loss",
        "that grows linearly. A constant that the left-out runs alone witness stays at a neutral value, which is what a user of",
        "an unknown stack gets.",
        "",
        *constants_table(report),
        "",
        "The form was chosen while looking at these rows, so even the leave-one-out errors are a little kind. What was decided by",
        "looking: which kernels of an adapter cast (read from peft's source), that NF4 costs instructions rather than bytes (from",
        "the kernel times of an A40; it then fits the A100 without a constant), that litgpt's host and device take turns, that a 4-bit",
        "call is 25 operators, the share of the cache (0.1), the neutral value for GPTQ (16.5 bytes, counted from its unpacking code",
        "after a first guess of 10 had left these rows 23 % low), that a class of one or two runs weighs less, that every operator",
        "of an expert loop costs the same multiple (two fitted seconds a visit stood there before), the 35 tokens of the prompt,",
        "that padding is what slows BlackMamba down, and that GeForce cards run 8 % above their data sheet.",
        "",
        "### Intervals",
        "",
        "80 % intervals, half width of the log by regime, from the errors with the source left out:",
        "",
        "| regime | from the residuals | shipped |",
        "|---|---|---|",
        *(f"| {name} | {width:.3f} | {c.STEP_INTERVAL[name]:.2f} |" for name, width in widths.items()),
        "",
        "Coverage of left-out runs, and the mean half width. Nested: the width comes from the other sources alone. Widened: as",
        "the answer does for a stack or a card that nothing else has measured. Shipped: the widths of the table above.",
        "",
        "| | n | nested | nested, widened | shipped |",
        "|---|---|---|---|---|",
        *coverage_rows(runs, by_source),
        "",
        *COVERAGE_NOTES,
        "",
        "### Calibrated on two batches",
        "",
        *calibration_section(runs),
        "",
        "### Several GPUs",
        "",
        *several_gpus_section(),
        "",
        *memory_section(all_runs()),
    ]
    return "\n".join(lines)


OPEN = [
    "- **Padding in BlackMamba.** On samples of different lengths the paper's BlackMamba takes up to 45 % longer than its own",
    "  128-token profile at the same number of computed tokens. The excess is the same function of the padding tokens in both",
    "  data sets (0.10 to 0.15 ms each with two experts a token, little or none with eight), as if padding went through seven of the",
    "  eight experts. `EXPERTS_OF_PADDING` says so for this family alone; why it is so is not known. With all of BlackMamba left",
    "  out the model does not know it: those runs come out about 15 % too fast.",
    "- **The prompt.** The paper's histograms hold samples of 42 tokens and more, too short for the prompt of the data sets'",
    "  authors; 35 tokens are added to each. Without them Mixtral's series come out about 4 % faster; whether the paper's runs had",
    "  this prompt is not printed.",
    "- **Python expert loops.** An operator inside one costs twice what others do, in both loops that were measured (each",
    "  predicts the other). Another loop may wait more or less often.",
    "- **GPTQ.** One source; without it the bytes of a dequantisation are counted from the unpacking code.",
    "- **A stack nobody measured** is a factor of its own on the host time (litgpt of 2023: 1.25).",
    "- **Cards that nobody measured.** What a lower power limit leaves of a card's rate (the root of the watts), the two thirds of",
    "  its peak that a V100 reaches and the 25 TFLOP/s of a T4 are adopted, not fitted, and no run here checks them. Tables of a V100",
    "  and of a T4 print no lengths: taken as full rows, two runs of a V100 come out 13 to 20 % too fast; with Alpaca's mean length, a",
    "  T4 comes out 1.9 times too fast (2.6 with its 4-bit kernel at the data sheet's clock instead of the clock of its matrix rate).",
    "- **bitsandbytes from 0.48 on** has a faster 4-bit kernel. Its instructions were counted, its time was never measured.",
    "- Many small experts (transformers 5 grouped products on a B200) have no row with a known batch; at batch 2 the model is",
    "  about 30 % below the published steps, at batch 4 about 10 % off on both sides.",
]
COVERAGE_NOTES = [
    "A regime that only one other source has takes at least the quantile of all errors: one source says nothing of how sources",
    "differ. Grouped products of stacked experts (transformers 5) have no run at all: their interval is widened as for a stack that",
    "nobody measured.",
    "",
    "A source with a stack of its own is where intervals fail: litgpt's host is a quarter slower than any other, so without it its",
    "runs come out fast, all on one side. What the answer adds for a stack that nobody measured covers part of that; a measured step of",
    "one's own (`ftcost calibrate`) is the way out.",
]


def bars(runs: Sequence[Run], by_source: Errors, by_series: Errors, nested: Mapping[str, bool]) -> list[str]:
    """The goals set before fitting, with what was reached."""
    dense = [abs(percent(by_source[run.run_id])) for run in runs if not run.is_moe]
    experts = [abs(percent(by_source[run.run_id])) for run in runs if run.is_moe]
    within = sum(error <= 20 for error in dense) / len(dense)
    coverage = sum(nested.values()) / len(nested)
    lines = [
        "| bar | reached | met |",
        "|---|---|---|",
        _bar("dense, source left out: median at most 6 %", statistics.median(dense), 6.0, "%"),
        f"| dense, source left out: 90 % within 20 % | {100 * within:.0f} % | {_yes(within >= 0.9)} |",
        _bar("mixture of experts, source left out: median at most 10 %", statistics.median(experts), 10.0, "%"),
    ]
    from costmodel import xia2024

    for series in xia2024.throughput_series():
        name = f"{series.model} {series.dataset} {series.gpu}"
        ours = [abs(percent(by_series[run.run_id])) for run in runs if run.series == name]
        if not ours:
            continue
        theirs = 100 * xia2024.mean_absolute_relative_error(
            series.points, series.coefficients, xia2024.samples_per_second_as_coded
        )
        lines.append(_bar(f"{name} left out: median at most 10 %", statistics.median(ours), 10.0, "%"))
        mean = statistics.mean(ours)
        lines.append(
            f"| {name} left out: mean below Eq. 2's own fitted error ({theirs:.1f} %) | {mean:.1f} % | {_yes(mean < theirs)} |"
        )
    as_answered = sum(nested_coverage(runs, by_source, widened=True).values()) / len(runs)
    for name, share in (("", coverage), (", widened as the answer does", as_answered)):
        lines.append(
            f"| 80 % intervals cover 70 to 90 % of left-out runs{name} | {100 * share:.0f} % | {_yes(0.7 <= share <= 0.9)} |"
        )
    return lines


def _yes(is_met: bool) -> str:
    return "yes" if is_met else "**no**"


def _bar(name: str, value: float, limit: float, unit: str) -> str:
    return f"| {name} | {value:.1f} {unit} | {_yes(value <= limit)} |"


def coverage_rows(runs: Sequence[Run], errors: Errors) -> list[str]:
    """Coverage and mean half width by source and by regime: nested, nested and widened, and with the shipped widths."""
    variants = [
        nested_widths(runs, errors),
        nested_widths(runs, errors, widened=True),
        {run.run_id: c.STEP_INTERVAL[regime(run)] for run in runs},
    ]

    def row(name: str, some: Sequence[Run]) -> str:
        cells = []
        for widths in variants:
            inside = sum(abs(errors[run.run_id]) <= widths[run.run_id] for run in some) / len(some)
            width = statistics.mean(widths[run.run_id] for run in some)
            cells.append(f"{100 * inside:.0f} % (±{percent(width):.0f} %)")
        return f"| {name} | {len(some)} | {' | '.join(cells)} |"

    lines = [row("all", runs)]
    for source in dict.fromkeys(run.source for run in runs):
        lines.append(row(source, [run for run in runs if run.source == source]))
    for name in dict.fromkeys(regime(run) for run in runs):
        lines.append(row(name, [run for run in runs if regime(run) == name]))
    return lines


EVIDENCE_COLUMNS = [
    *("run", "model", "kind", "is_moe", "is_checkpointed", "gpu", "framework"),
    *("active_params", "tokens", "measured_seconds", "estimated_seconds"),
]


def write_evidence(runs: Sequence[Run], errors: Errors) -> None:
    """The package's table of measured runs, with our estimate made without the run's source."""
    path = ROOT / "costmodel" / "data" / "evidence.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(EVIDENCE_COLUMNS)
        for run in runs:
            assert run.seconds is not None
            measured = run.seconds * run.job.gradient_accumulation_steps
            writer.writerow(
                [
                    run.run_id,
                    run.model.name,
                    job_kind(run.job),
                    "yes" if run.is_moe else "no",
                    "yes" if run.job.gradient_checkpointing else "no",
                    run.gpu.name,
                    run.job.framework,
                    run.model.num_active_params,
                    round(run.batch.num_tokens),
                    f"{measured:.4g}",
                    f"{measured * math.exp(errors[run.run_id]):.4g}",
                ]
            )


FRONT_PAGE_REGIMES = (  # what binds a step, in words, and the regimes of uncertainty.py that it stands for
    ("dense, bound by the GPU", ("device",)),
    ("dense, bound by Python, or by both (small batches, short samples)", ("mixed", "host")),
    ("mixture of experts, all", ("moe_device", "moe_mixed", "moe_host")),
)


def front_page(runs: Sequence[Run], by_source: Errors, memory_rows: Sequence[tuple[Run, str, float]]) -> str:
    """The table of README.md: errors by regime, a whole source left out."""
    lines = ["| what, against public measured runs | runs | median error | nine of ten within |", "|---|---|---|---|"]
    for name, regimes in FRONT_PAGE_REGIMES:
        some = [abs(percent(by_source[run.run_id])) for run in runs if regime(run) in regimes]
        lines.append(f"| step time, {name} | {len(some)} | {statistics.median(some):.1f} % | {quantile(some, 0.9):.0f} % |")
    worst = [percent(by_source[run.run_id]) for run in runs if regime(run) == "moe_device"]
    size = [abs(error) for error in worst]
    lines.append(
        f"| ... of them bound by the GPU ({sum(error < 0 for error in worst)} of {len(worst)} predicted too short, not explained) "
        f"| {len(worst)} | {statistics.median(size):.1f} % | {quantile(size, 0.9):.0f} % |"
    )
    for name, some_rows in (("configuration known", known(memory_rows)), ("any", memory_rows)):
        errors = [abs(percent(log_ratio)) for _, _, log_ratio in some_rows]
        lines.append(
            f"| memory, {name} | {len(errors)} | {statistics.median(errors):.1f} % | {quantile(errors, 0.9):.0f} % |"
        )
    return "\n".join(lines) + "\n"


def with_front_page(readme: str, table_text: str) -> str:
    """README.md with the table between its two marks replaced."""
    begin, end = "<!-- accuracy: written by accuracy/evaluate.py -->\n", "<!-- end of accuracy -->"
    before, _, rest = readme.partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise SystemExit("README.md has lost the marks of its accuracy table")
    return before + begin + table_text + end + after


def main() -> None:
    report = json.loads((FOLDER / "fit.json").read_text(encoding="utf-8"))
    runs = [run for run in all_runs() if run.seconds is not None]
    text = document(runs, report)
    print(text)
    if "--write" in sys.argv:
        by_source = left_out(report, "source")
        (ROOT / "docs" / "accuracy.md").write_text(text, encoding="utf-8")
        picture = scatter(runs, by_source, "Step time: predicted against measured, the run's source left out (dotted: 20 %)")
        (ROOT / "docs" / "accuracy.svg").write_text(picture, encoding="utf-8")
        (ROOT / "docs" / "accuracy_memory.svg").write_text(memory_scatter(all_runs()), encoding="utf-8")
        write_evidence(runs, by_source)
        readme = ROOT / "README.md"
        table_text = front_page(runs, by_source, memory_errors(all_runs()))
        readme.write_text(with_front_page(readme.read_text(encoding="utf-8"), table_text), encoding="utf-8")


if __name__ == "__main__":
    main()
