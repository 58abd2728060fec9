"""The page docs/cpu_proof.md and its figures: pure functions of the rows that cpu_proof.py measures.

python benchmarks/cpu_proof_page.py RESULTS.json > docs/cpu_proof.md
"""

# ruff: noqa: E501 (rows of tables)
from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

STEADY = 0.05  # by which the reference may move in a steady row: the bar that it is held against
TARGET_UNCALIBRATED, TARGET_CALIBRATED = 0.20, 0.05


def share_within(errors: list[float], limit: float) -> str:
    inside = sum(abs(error) <= limit for error in errors)
    return f"{inside} of {len(errors)}"


# Of each error: its bar, its words, and the drift that it suffers from.
KINDS = {
    "uncalibrated_error": (TARGET_UNCALIBRATED, "uncalibrated", "drift_to_the_run"),
    "after_20_steps_error": (TARGET_CALIBRATED, "after 20 steps", "drift_after_20"),
    "projection_error": (TARGET_CALIBRATED, "projection at step 20", "drift_after_20"),
}


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By line of the table: all rows, the steady ones, those that repeat, all with the drift taken out; the noise floor."""
    found = {}
    for kind, (limit, label, drifted) in KINDS.items():
        measured = [row for row in rows if row[kind] is not None]
        steady = [row for row in measured if abs(row[drifted]) <= STEADY]
        found[label] = _figures([row[kind] for row in measured], limit)
        found[f"{label}, steady rows"] = _figures([row[kind] for row in steady], limit)
        if limit == TARGET_CALIBRATED:
            repeated = [row[kind] for row in measured if abs(row["repeat_error"]) <= limit]
            found[f"{label}, rows that repeat within {limit:.0%}"] = _figures(repeated, limit)
        found[f"{label}, drift taken out"] = _figures([(1 + row[kind]) * (1 + row[drifted]) - 1 for row in measured], limit)
    found["the same steps once more"] = _figures([row["repeat_error"] for row in rows], TARGET_CALIBRATED)
    return found


def _figures(errors: list[float], limit: float) -> dict[str, Any]:
    figures: dict[str, Any] = {"limit": limit, "within": share_within(errors, limit)}
    if errors:
        figures |= {
            "median_absolute": statistics.median(abs(error) for error in errors),
            "worst": max(errors, key=abs),
            "mean": statistics.mean(errors),
        }
    return figures


def markdown(answer: dict[str, Any]) -> str:
    """``answer``: what ``cpu_proof.py --json`` writes."""
    facts, found, calibration_steps = answer["machine"], answer["summary"], answer["calibration_steps"]
    lines = [
        "# Shown on a CPU",
        "",
        "<!-- made by benchmarks/cpu_proof.py --markdown: run it again, do not edit -->",
        "",
        "Small fine-tunings, predicted from [a probe](probe.md) of this processor and then run: a real `Trainer` with",
        f"`FTCostCallback`, {answer['steps']} steps each, lengths from half to the whole of what the row says. A probe is taken before every",
        "two runs and sees none of them; hand counts and constants were chosen on models of another shape (`--shapes choose`).",
        f"**Uncalibrated** is the prediction before the first step, **after {calibration_steps} steps** that of the steps from the",
        f"{calibration_steps + 1}st on, calibrated on those before; **projection** is what the callback then expected of the rest.",
        "",
        "The speed of this machine moves by itself, so it is measured beside: the same 1 ms of work around each probe, around",
        "each run and before each step. **Drift to the run** is how much slower that work was around the run than around the probe,",
        "**drift after 20** how much slower before the steps from 21 on than before the others. **Repeat** is what the last 15 steps took over the 15 before them, which held",
        "the very same batches: what no prediction can be better than. The rules stood in the script before the run: all rows are",
        f"in the figures; steady rows are those whose drift is at most {STEADY:.0%}, rows that repeat those whose repeat is within",
        'the bar (bursts of a few steps do not show in the drift); "drift taken out" multiplies the prediction by the drift.',
        "",
        f"{facts['processor']}, {answer['threads']} thread, torch {facts['torch']}, transformers {facts['transformers']}, "
        f"{answer['date']}. Seconds of the {'processor' if answer['clock'] == 'processor' else 'wall clock'}; load average "
        f"{facts['load_at_begin']:.1f} at the begin and {facts['load_at_end']:.1f} at the end, on {facts['processors']} processors.",
        "",
        "| | bar | within | median | worst | mean |",
        "|---|---|---|---|---|---|",
    ]
    for label, each in found.items():
        shown = (
            [f"{each['median_absolute']:.1%}", f"{each['worst']:+.1%}", f"{each['mean']:+.1%}"]
            if "worst" in each
            else ["-"] * 3
        )
        lines.append(f"| {label} | {each['limit']:.0%} | {each['within']} | {' | '.join(shown)} |")
    lines += [
        "",
        "| model | method | batch | length | measured ms | on the wall ms | predicted ms | uncalibrated | drift to the run | after 20 steps | projection | drift after 20 | repeat | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in answer["rows"]:
        projection = f"{row['projection_error']:+.1%}" if row["projection_error"] is not None else "-"
        lines.append(
            f"| {row['family']} | {row['method']} | {row['batch']} | {row['length']} | {row['measured_step_seconds'] * 1e3:.1f} "
            f"| {row['measured_wall_step_seconds'] * 1e3:.1f} | {row['predicted_step_seconds'] * 1e3:.1f} "
            f"| {row['uncalibrated_error']:+.1%} | {row['drift_to_the_run']:+.1%} | {row['after_20_steps_error']:+.1%} | {projection} "
            f"| {row['drift_after_20']:+.1%} | {row['repeat_error']:+.1%} | {row['load_average']:.1f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
