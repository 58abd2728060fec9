# ruff: noqa: E501 - the lines of a document are as long as in the document
"""docs/paper.md: what Xia et al. 2024 measured, what their formulas say, and what ours say, side by side.

    python accuracy/build_paper.py

Ours are the shipped constants; nothing is fitted here.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from paper_points import PAPER_DATASETS, PROMPT_TOKENS, paper_max_batch, paper_run
from runs import Run
from svg import COLOURS, Mark, chart

from costmodel import xia2024
from costmodel.step_time import StepTime, step_time
from costmodel.xia2024 import DENSE, SPARSE, Series

DOCS = Path(__file__).parent.parent / "docs"
DENSITIES = {DENSE: "dense", SPARSE: "sparse"}
CARDS = {"A40": "A40", "A100-40GB": "A100-SXM4-40GB", "A100-80GB": "A100-SXM4-80GB", "H100-80GB": "H100 PCIe"}
GPU_MEMORY_GB = {"A40": 48, "A100-40GB": 40, "A100-80GB": 80, "H100-80GB": 80}


def our_step(run: Run | None) -> StepTime | None:
    return step_time(run.model, run.job, run.gpu, run.batch) if run else None


def our_seconds(model: str, density: str, gpu: str, batch_size: int, dataset: str) -> float | None:
    step = our_step(paper_run(model, density, CARDS[gpu], batch_size, dataset, None))
    return step.step_seconds if step else None


def cell(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


# --- sections --------------------------------------------------------------------------------------------------------------


def throughput_section() -> list[str]:
    lines = [
        "## Throughput (Figs. 14 and 15)",
        "",
        "Samples a second. *Coded*: Eq. 2 as the paper's script computes it, with its published coefficients. *Printed*:",
        "Eq. 2 as the paper prints it, fitted to the same points. *Ours*: the shipped constants, padded lengths from the data",
        f"set's histogram and {PROMPT_TOKENS} tokens of prompt. Errors are the mean of the absolute relative error.",
        "",
        "| series | points | coded % | printed % | ours % |",
        "|---|---|---|---|---|",
    ]
    details: list[str] = []
    for series in xia2024.throughput_series():
        printed = xia2024.fit_as_printed(series.points, series.coefficients.c3)
        theirs = xia2024.mean_absolute_relative_error(
            series.points, series.coefficients, xia2024.samples_per_second_as_coded
        )
        other = xia2024.mean_absolute_relative_error(series.points, printed, xia2024.samples_per_second_as_printed)
        rows, errors = series_rows(series)
        mean = cell(100 * statistics.mean(errors), 1) if errors else "not modelled"
        name = f"{series.model} {series.dataset} {series.gpu}"
        lines.append(f"| {name} | {len(series.points)} | {100 * theirs:.1f} | {100 * other:.1f} | {mean} |")
        picture = f"paper-{series.model}-{series.dataset}-{series.gpu}.svg".lower()
        (DOCS / picture).write_text(series_chart(series), encoding="utf-8")
        details += ["", f"### {name}", "", f"![{name}]({picture})", ""]
        details += ["| density | batch | measured | coded | ours | ours / measured |", "|---|---|---|---|---|---|", *rows]
    return [*lines, *details]


def series_rows(series: Series) -> tuple[list[str], list[float]]:
    rows, errors = [], []
    for point in series.points:
        density = DENSITIES[point.sparsity]
        coded = xia2024.samples_per_second_as_coded(point.batch_size, point.sparsity, series.coefficients)
        seconds = our_seconds(series.model, density, series.gpu, point.batch_size, series.dataset)
        ours = point.batch_size / seconds if seconds else None
        ratio = ours / point.samples_per_second if ours else None
        if ratio:
            errors.append(abs(ratio - 1))
        measured = f"{point.samples_per_second:.3f}"
        rows.append(f"| {density} | {point.batch_size} | {measured} | {coded:.3f} | {cell(ours, 3)} | {cell(ratio)} |")
    return rows, errors


def series_chart(series: Series) -> str:
    marks = []
    for index, (sparsity, density) in enumerate(DENSITIES.items()):
        points = [point for point in series.points if point.sparsity == sparsity]
        if not points:
            continue
        colour = COLOURS[index]
        sizes = range(1, max(point.batch_size for point in points) + 1)
        marks.append(Mark(f"{density}, measured", [(p.batch_size, p.samples_per_second) for p in points], colour=colour))
        coded = [(b, xia2024.samples_per_second_as_coded(b, sparsity, series.coefficients)) for b in sizes]
        marks.append(Mark(f"{density}, Eq. 2", coded, True, "5 4", colour))
        ours = [(b, our_seconds(series.model, density, series.gpu, b, series.dataset)) for b in sizes]
        line = [(float(b), b / seconds) for b, seconds in ours if seconds]
        if line:
            marks.append(Mark(f"{density}, ours", line, True, "", colour))
    title = f"{series.model}, {PAPER_DATASETS[series.dataset][0]}, {series.gpu}"
    return chart(title, "batch size", "samples a second", marks)


def max_batch_section() -> list[str]:
    lines = [
        "## Largest batch (Fig. 8, Fig. 13, Table IV)",
        "",
        "Mixtral QLoRA. Eq. 1 with C0 = 62, C1 = 0.89, a model of 23.35 GB and the longest sample after the cut (512 or",
        "1,024 tokens), floored. *Measured*: the largest batch of the measured series, or Fig. 13's ground truth. *Ours*: the",
        "largest batch whose peak fits in what the driver reports.",
        "",
        "| data | card | density | measured | Eq. 1 | ours |",
        "|---|---|---|---|---|---|",
    ]
    seen = set()
    for row in xia2024.paper_table("max_batch"):
        if row["model"] != "Mixtral" or row["kind"] not in {"measured_series", "ground_truth_fig13"}:
            continue
        for gpu in row["gpu"].split(" / "):
            key = (row["dataset"], gpu, row["density"])
            if key in seen:
                continue
            seen.add(key)
            tokens = int(row["seq_len_max_after_cutoff_1024"])
            sparsity = DENSE if row["density"] == "dense" else SPARSE
            eq1 = math.floor(xia2024.max_batch_size(GPU_MEMORY_GB[gpu], xia2024.MIXTRAL_MODEL_MEMORY_GB, tokens, sparsity))
            ours = paper_max_batch("Mixtral", row["density"], CARDS[gpu], tokens)
            lines.append(
                f"| {row['dataset']} | {gpu} | {row['density']} | {row['max_batch']} | {eq1} | {'' if ours is None else ours} |"
            )
    return lines


def cost_section() -> list[str]:
    lines = [
        "## Cost (Table IV)",
        "",
        "Ten epochs of what the table takes for 15,000 samples, at the paper's price. *Recomputed* uses its formula and the",
        "measured rate; *ours* the same samples and price with our step time at the same batch.",
        "",
        "| card | batch | USD/h | printed samples/s | printed USD | recomputed USD | our samples/s | our USD |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in xia2024.paper_table("cost"):
        if row["source"] != "Table IV":
            continue
        size, price = int(row["max_batch"]), float(row["price_usd_per_hour_cudo"])
        gpu = {"A40": "A40", "A100": "A100-80GB", "H100": "H100-80GB"}[row["gpu"]]
        seconds = our_seconds("Mixtral", "sparse", gpu, size, "MATH")
        ours = size / seconds if seconds else None
        lines.append(
            f"| {row['gpu']} {row['gpu_mem_gb']} GB | {size} | {price} | {row['throughput_qps_printed']} | {row['cost_usd_printed']} | "
            f"{row['cost_recomputed_15000_queries']} | {cell(ours)} | "
            f"{cell(xia2024.training_usd(15_000, 10, ours, price)) if ours else ''} |"
        )
    return lines


def stage_section() -> list[str]:
    lines = [
        "## Where a step goes (Fig. 4: 128-token sequences, A40)",
        "",
        "Seconds. The recompute stands in the backward.",
        "",
        "| model | density | batch | forward | ours | backward | ours | optimizer | ours | total | ours |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    stages: dict[tuple[str, str, int], dict[str, float]] = {}
    for row in xia2024.paper_table("latency_breakdown"):
        if row["level"] == "stage":
            key = (row["model"], row["density"], int(row["batch_size"]))
            stages.setdefault(key, {})[row["component"]] = float(row["value"])
    for (model, density, size), measured in stages.items():
        step = our_step(paper_run(model, density, "A40", size, "128 tokens", None))
        cells = [
            f"{measured[name]:.2f} | {cell(getattr(step, f'{name}_seconds') if step else None)}"
            for name in ("forward", "backward", "optimizer")
        ]
        total = f"{sum(measured.values()):.2f} | {cell(step.step_seconds if step else None)}"
        lines.append(f"| {model} | {density} | {size} | {' | '.join(cells)} | {total} |")
    return lines


NOTES = [
    "## What does not agree inside the paper",
    "",
    "- **Eq. 2 is printed as C2 · ln(batch / (sparsity · C3)) + C4 and computed as C2 · ln(batch) / (sparsity · C3) + C4.** The",
    "  figures and coefficients are those of the second. In the first C3 cannot be told from C4; fitted to the same points its",
    "  RMSE is 1.2 to 5.4 times as large.",
    "- **The stated RMSE is not that of the fit.** The scoring line leaves C3 out for dense points. By the fit's own form",
    "  BlackMamba on commonsense_15k has 1.06 instead of 0.79, on math_14k 0.56 instead of 0.42, Mixtral 0.055 instead of 0.047;",
    "  series with one dense point (batch 1, where the logarithm is zero) are unchanged.",
    "- **Relative errors of Eq. 2** are 6.1, 4.7 and 5.6 % on average for Mixtral (largest 17 %), 13.6 and 7.5 % for BlackMamba",
    "  (largest 69 %).",
    "- **C3 is set by hand** (1.8 and 2.5); it only rescales C2.",
    "- **Eq. 1 needs the longest sample after the cut (512, 1,024 tokens)**; with the medians of Table II (79, 174) it gives 58 and",
    "  26 for the sparse A40 bars of 8 and 3 or 4.",
    "- **Eq. 1 misses the 80 GB cards**: 20 against 27, 10 against 17, 3 against 5. The projection for 100 GB is printed rounded",
    "  (27.9 as 28), that for 120 GB floored (35.2 as 35).",
    "- **Fig. 8's labels are below the measured series**: Mixtral math_14k sparse 3 and 4, BlackMamba math_14k 2 and 3, 8 and 10.",
    "- **Table IV's costs are for 15,000 samples**, not the 13,921 of math_14k nor the 1,300 of GSM8K that its caption names.",
    "- **The OpenOrca figure of 3,460 USD is for 2.9 million samples**; for the 2 million of the conclusion it is 2,381 USD.",
    "- **The throughput series are slower than the profile.** Set against Fig. 4's 128-token steps at the same number of computed",
    "  tokens, Mixtral's series take as long as if every sample were 30 to 50 tokens longer than in the histogram (the histogram's",
    "  shortest samples leave no room for a prompt; we add 35). BlackMamba's take up to 45 % longer still, by 0.10 to 0.15 ms for",
    "  each padding token of both data sets with two active experts and hardly with eight; the cause is not known.",
    "- The H100 of Table IV is not named more closely; ours is the PCIe card. Its 80 GB A100 is taken as SXM.",
    "- Fig. 15's data are called commonsense in one script, math in another, GSM8K in the caption.",
    "- Table I heads the number of experts (8) as number of MoE layers.",
    "",
]


def document() -> str:
    return "\n".join(
        [
            "# The paper beside this model",
            "",
            "Xia et al., *Understanding the Performance and Estimating the Cost of LLM Fine-Tuning*, IISWC 2024, arXiv:2408.04693.",
            "Written by `python accuracy/build_paper.py`; every number is computed from `costmodel/data/paper` and the shipped model.",
            "Their formulas stand in `costmodel/xia2024.py` and are checked to the printed digits by",
            "`tests/costmodel/test_xia2024.py`; our errors with each series left out of the fit are in [Accuracy](accuracy.md).",
            "",
            *throughput_section(),
            "",
            *max_batch_section(),
            "",
            *cost_section(),
            "",
            *stage_section(),
            "",
            *NOTES,
        ]
    )


if __name__ == "__main__":
    (DOCS / "paper.md").write_text(document(), encoding="utf-8")
