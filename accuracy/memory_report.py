# ruff: noqa: E501 - the lines of a document are as long as in the document
"""Memory: predicted against measured, like with like; verdicts; the memory half of ``docs/accuracy.md``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from log_errors import percent, quantile, summary, weighted_quantile
from paper_points import paper_max_batch
from runs import FOLDER, Run, chosen_rows_of, model_of, read_rows
from svg import Mark, chart

from costmodel import constants as c
from costmodel import xia2024
from costmodel.capacity import max_batch_size
from costmodel.catalog import find_gpu, find_model_config
from costmodel.defaults import resolve
from costmodel.errors import CostModelError
from costmodel.hf_config import model_spec_from_config
from costmodel.lengths import longest_batch
from costmodel.memory import MemoryBreakdown, job_class, loss_bytes, peak_device_bytes, peak_memory
from costmodel.specs import parse_job
from costmodel.units import GIB

# Sources left out of the bar, each with its reason; every figure is also given with them.
NOT_KNOWN: dict[str, str] = {
    "qwen1": "what the figure measures is not stated, and the model's own remote code ran",
    "ms_swift": "batches differ in length, and the order in which lengths came decides what the allocator keeps",
}
VARIABLE_LENGTHS = frozenset({"ms_swift"})


# --- errors ----------------------------------------------------------------------------------------------------------------


def run_memory(run: Run) -> MemoryBreakdown:
    """Our memory of a run on its longest batch."""
    assert run.longest is not None
    return peak_memory(
        run.model,
        run.job,
        run.longest,
        is_padded=run.is_padded,
        keeps_logits=run.keeps_logits,
        loss_in_fp32=run.loss_in_fp32,
    )


@cache
def replayed_holes(job_class: str, share: float) -> float:
    """A quantile of the replays whose lengths crowd near the limit, as those of ms_swift do: longer samples were dropped."""
    rows = read_rows(FOLDER / "replays.csv")
    return quantile(
        (float(row["holes_per_loss"]) for row in rows if row["class"] == job_class and row["lengths"] == "bulk"), share
    )


def holes_bytes(run: Run, share: float | None) -> float:
    """Blocks of lengths that came before, for a run whose batches differ in length: a quantile of the replays, or none."""
    assert run.longest is not None
    if share is None or run.source not in VARIABLE_LENGTHS:
        return 0.0
    return max(0.0, replayed_holes(job_class(run.job), share)) * loss_bytes(run.model, run.job, run.longest)


def with_memory(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run.memory is not None and run.longest is not None]


def shown_bytes(run: Run, holes: float | None = 0.5) -> float:
    """What we say that a run's own figure is: torch allocated, torch reserved, or, where it is not said, the device's.

    Cached blocks grow no further than the card.
    """
    assert run.memory is not None
    peak = run_memory(run)
    if run.memory[0] == "allocated":
        return float(peak.peak_allocated_bytes)
    if run.memory[0] == "reserved":
        room = max(peak.peak_reserved_bytes, run.gpu.memory_bytes - c.CUDA_CONTEXT_BYTES)
        return min(peak.peak_reserved_bytes + holes_bytes(run, holes), room)
    return float(peak.peak_device_bytes)


def memory_errors(runs: Sequence[Run], holes: float | None = 0.5) -> list[tuple[Run, str, float]]:
    """(run, what was measured, log error) of every run with a memory figure, like with like."""
    result = []
    for run in with_memory(runs):
        assert run.memory is not None
        kind, gib = run.memory
        result.append((run, kind, math.log(shown_bytes(run, holes) / GIB / gib)))
    return result


def known(rows: Sequence[tuple[Run, str, float]]) -> list[tuple[Run, str, float]]:
    """The rows of the bar: confidence A or B with a known configuration."""
    return [row for row in rows if row[0].source not in NOT_KNOWN]


def memory_table(rows: Sequence[tuple[Run, str, float]], name: str, key: Callable[[Run], str]) -> list[str]:
    lines = [
        f"| {name} | basis | n | median % | p90 % | within 20 % | bias % | within 12 % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[float]] = {}
    for run, kind, error in rows:
        groups.setdefault((key(run), "not said" if kind == "other" else kind), []).append(error)
    for (group, kind), values in groups.items():
        lines.append(f"| {group} | {kind} | {summary(values)} | {100 * within(values, 12):.0f} |")
    return lines


def within(errors: Sequence[float], limit_percent: float) -> float:
    return sum(abs(percent(error)) <= limit_percent for error in errors) / len(errors)


# --- intervals -------------------------------------------------------------------------------------------------------------


def interval_class(run: Run) -> str:
    if run.source in NOT_KNOWN and run.source not in VARIABLE_LENGTHS:
        return "unread"
    return "quantised" if run.job.quantization else "plain"


def is_covered(run: Run, low_share: float, high_share: float) -> bool:
    """Whether the measured figure lies between the ends for its own basis."""
    assert run.memory is not None
    kind, gib = run.memory
    peak = run_memory(run)
    measured = gib * GIB
    if kind == "allocated":
        return peak.peak_allocated_bytes * low_share <= measured <= peak.peak_allocated_bytes * high_share
    low, high = peak.peak_reserved_bytes * low_share, peak.peak_reserved_bytes * high_share
    if kind == "other":  # torch's figure or the driver's
        high += c.CUDA_CONTEXT_INTERVAL_BYTES[1]
    if run.source in VARIABLE_LENGTHS:
        assert run.longest is not None
        holes = c.VARIABLE_LENGTH_HOLES[job_class(run.job)] * loss_bytes(run.model, run.job, run.longest)
        high = max(high, min(high + holes, run.gpu.memory_bytes))
    return low <= measured <= high


def quantiles_by_source(rows: Sequence[tuple[Run, float]], share: float) -> float:
    counts: dict[str, int] = {}
    for run, _ in rows:
        counts[run.source] = counts.get(run.source, 0) + 1
    return weighted_quantile([(value, 1.0 / counts[run.source]) for run, value in rows], share)


def residual_interval(runs: Sequence[Run]) -> tuple[float, float]:
    """(10 %, 90 %) of measured over predicted, each source weighing the same."""
    ratios = [(run, math.exp(-error)) for run, _, error in memory_errors(runs, holes=None)]
    return quantiles_by_source(ratios, 0.1), quantiles_by_source(ratios, 0.9)


def nested_memory_coverage(runs: Sequence[Run]) -> dict[str, bool]:
    """Each source against an interval that the other sources of fixed length alone give.

    Variable lengths take their holes from replays, and their width from the sources of fixed length.
    """
    fixed = [run for run in with_memory(runs) if run.source not in VARIABLE_LENGTHS]
    result = {}
    for source in dict.fromkeys(run.source for run in with_memory(runs)):
        low, high = residual_interval([run for run in fixed if run.source != source])
        result.update({run.run_id: is_covered(run, low, high) for run in with_memory(runs) if run.source == source})
    return result


def shipped_memory_coverage(runs: Sequence[Run]) -> dict[str, bool]:
    return {run.run_id: is_covered(run, *c.MEMORY_INTERVAL[interval_class(run)]) for run in with_memory(runs)}


def coverage_without_unread(runs: Sequence[Run]) -> float:
    nested = nested_memory_coverage(runs)
    some = [run for run in with_memory(runs) if interval_class(run) != "unread"]
    return sum(nested[run.run_id] for run in some) / len(some)


def coverage_table(runs: Sequence[Run]) -> list[str]:
    nested, shipped = nested_memory_coverage(runs), shipped_memory_coverage(runs)
    lines = ["| | n | left out | shipped |", "|---|---|---|---|"]

    def row(name: str, some: Sequence[Run]) -> str:
        shares = [100 * sum(flags[run.run_id] for run in some) / len(some) for flags in (nested, shipped)]
        return f"| {name} | {len(some)} | {shares[0]:.0f} % | {shares[1]:.0f} % |"

    all_of_them = with_memory(runs)
    for source in dict.fromkeys(run.source for run in all_of_them):
        lines.append(row(source, [run for run in all_of_them if run.source == source]))
    lines.append(row("all rows", all_of_them))
    shares = [source_weighted_share(all_of_them, flags) for flags in (nested, shipped)]
    lines.append(
        f"| each source weighing the same | {len(all_of_them)} | {100 * shares[0]:.0f} % | {100 * shares[1]:.0f} % |"
    )
    return lines


def source_weighted_share(runs: Sequence[Run], flags: Mapping[str, bool]) -> float:
    by_source: dict[str, list[bool]] = {}
    for run in runs:
        by_source.setdefault(run.source, []).append(flags[run.run_id])
    return statistics.mean(sum(each) / len(each) for each in by_source.values())


# --- verdicts --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One stated outcome: a run that went through or ran out of memory, or a largest batch and the next one."""

    name: str
    source: str
    fits: bool
    we_say_fits: bool

    @property
    def is_right(self) -> bool:
        return self.fits is self.we_say_fits


# arXiv:2408.04693, figures 8, 13, 14, 15 and Table IV: (model, density, card, tokens, largest batch).
PAPER_LARGEST = (
    ("Mixtral", "sparse", "A40", 512, 8),
    ("Mixtral", "dense", "A40", 512, 2),
    ("Mixtral", "sparse", "A40", 1024, 4),
    ("Mixtral", "dense", "A40", 1024, 1),
    ("Mixtral", "sparse", "A100-SXM4-40GB", 1024, 3),
    ("Mixtral", "dense", "A100-SXM4-40GB", 1024, 1),
    ("Mixtral", "sparse", "A100-SXM4-80GB", 1024, 17),
    ("Mixtral", "dense", "A100-SXM4-80GB", 1024, 5),
    ("Mixtral", "sparse", "H100 SXM", 1024, 17),
    ("Mixtral", "dense", "H100 SXM", 1024, 5),
    ("Mixtral", "sparse", "A100-SXM4-40GB", 512, 6),
    ("Mixtral", "sparse", "A100-SXM4-80GB", 512, 27),
    ("Mixtral", "sparse", "A40", 128, 32),
    ("Mixtral", "dense", "A40", 128, 10),
    ("BlackMamba", "sparse", "A40", 512, 20),
    ("BlackMamba", "dense", "A40", 512, 6),
    ("BlackMamba", "sparse", "A40", 1024, 10),
    ("BlackMamba", "dense", "A40", 1024, 3),
    ("BlackMamba", "sparse", "A40", 128, 84),
    ("BlackMamba", "dense", "A40", 128, 30),
)


def run_verdicts(runs: Sequence[Run]) -> list[Verdict]:
    """Every run with a memory figure went through."""
    return [
        Verdict(run.run_id, run.source, True, run_memory(run).peak_device_bytes <= run.gpu.memory_bytes)
        for run in with_memory(runs)
    ]


def litgpt_oom_verdicts(runs: Sequence[Run]) -> list[Verdict]:
    """litgpt's rows that ran out of memory: Llama 2 at a larger batch of a run that is there; Falcon 40B at batch one."""
    verdicts = []
    templates = {(run.model.name, run.job.quantization): run for run in runs if run.source == "litgpt"}
    for row in chosen_rows_of("litgpt_resource_tables", lambda each: each["outcome"] == "oom" and each["n_gpus"] == "1"):
        if row["row_id"] == "litgpt_resource_tables-037":
            continue  # the card is not named
        template = templates[("meta-llama/Llama-2-7b-hf", "nf4" if row["method"] == "qlora" else None)]
        job = replace(
            template.job,
            per_device_train_batch_size=int(row["micro_batch"]),
            double_quant=row["weight_precision"] == "nf4-dq",
            max_length=int(row["seq_len_max"]),
        )
        if "llama" in row["model_id"]:
            model = templates[(row["model_id"], None)].model
        else:
            model = model_spec_from_config(find_model_config(row["model_id"]), name=row["model_id"])
            job = replace(job, lora_target_modules=("query_key_value",))
        batch = longest_batch(job, job.per_device_train_batch_size, job.max_length)
        needed = peak_device_bytes(model, job, batch, is_padded=False)
        verdicts.append(Verdict(row["row_id"], "litgpt", False, needed <= find_gpu(row["gpu"]).memory_bytes))
    return verdicts


def h2o_verdicts() -> list[Verdict]:
    """H2O LLM Studio on one card: Llama 2 at 512 tokens, batch two, LoRA r 4 on the linears, checkpointed, mixed precision."""
    verdicts = []
    for row in chosen_rows_of("h2o_llmstudio", lambda each: each["n_gpus"] == "1"):
        size = row["model_id"].rpartition("-")[2]
        name = f"meta-llama/Llama-2-{size}-hf"
        try:
            model = model_of(name)
        except CostModelError:
            continue
        fields = {
            "model": name,
            "method": row["method"],
            "dtype": "bfloat16",
            "bf16": True,
            "lora_r": 4,
            "lora_target_modules": "all-linear",
            "per_device_train_batch_size": int(row["micro_batch"]),
            "gradient_checkpointing": True,
            "max_length": 512,
            "lengths": {"fixed": 512},
            "framework": "transformers",
            "framework_version": "4.32",
        }
        if row["method"] == "qlora":
            fields["quantization"] = "nf4"
        job, _ = resolve(parse_job(fields), model)
        largest = max_batch_size(
            model, job, find_gpu(row["gpu"].replace("A100-80GB", "A100-SXM4-80GB")).memory_bytes, 512, is_padded=True
        )
        verdicts.append(Verdict(row["row_id"], "h2o_llmstudio", row["outcome"] == "ok", largest >= int(row["micro_batch"])))
    return verdicts


def paper_verdicts() -> list[Verdict]:
    """The largest batch fits, the next one does not."""
    verdicts = []
    for model, density, gpu, tokens, largest in PAPER_LARGEST:
        ours = paper_max_batch(model, density, gpu, tokens)
        if ours is None:
            continue
        name = f"{model} {density} {gpu} {tokens} tokens"
        source = f"paper {model}"
        verdicts.append(Verdict(f"{name}, batch {largest}", source, True, ours >= largest))
        verdicts.append(Verdict(f"{name}, batch {largest + 1}", source, False, ours >= largest + 1))
    return verdicts


def all_verdicts(runs: Sequence[Run]) -> list[Verdict]:
    return [*run_verdicts(runs), *litgpt_oom_verdicts(runs), *h2o_verdicts(), *paper_verdicts()]


def share_right(verdicts: Sequence[Verdict]) -> float:
    return sum(each.is_right for each in verdicts) / len(verdicts)


def verdict_table(verdicts: Sequence[Verdict]) -> list[str]:
    lines = ["| source | stated: fits | right | stated: does not fit | right |", "|---|---|---|---|---|"]

    def row(name: str, some: Sequence[Verdict]) -> str:
        fit, not_fit = [each for each in some if each.fits], [each for each in some if not each.fits]
        return (
            f"| {name} | {len(fit)} | {sum(v.is_right for v in fit)} | {len(not_fit)} | {sum(v.is_right for v in not_fit)} |"
        )

    for source in dict.fromkeys(each.source for each in verdicts):
        lines.append(row(source, [each for each in verdicts if each.source == source]))
    lines.append(row("all", verdicts))
    return lines


def largest_batch_table() -> list[str]:
    """Eq. 1 of the paper beside ours, and what the four readings of the settings that it does not print would give."""
    lines = ["| model, density | card | tokens | measured | Eq. 1 | ours |", "|---|---|---|---|---|---|"]
    marketed = {"A40": 48, "A100-SXM4-40GB": 40, "A100-SXM4-80GB": 80, "H100 SXM": 80}
    for model, density, gpu, tokens, largest in PAPER_LARGEST:
        eq1 = ""
        if model == "Mixtral":
            sparsity = xia2024.DENSE if density == "dense" else xia2024.SPARSE
            eq1 = str(math.floor(xia2024.max_batch_size(marketed[gpu], xia2024.MIXTRAL_MODEL_MEMORY_GB, tokens, sparsity)))
        ours = paper_max_batch(model, density, gpu, tokens)
        lines.append(f"| {model} {density} | {gpu} | {tokens} | {largest} | {eq1} | {'' if ours is None else ours} |")
    return lines


def mean_log_error_of_largest(**changes: object) -> float:
    """Of the fourteen Mixtral batches, for one reading of the settings."""
    errors = []
    for model, density, gpu, tokens, largest in PAPER_LARGEST:
        if model == "Mixtral":
            ours = paper_max_batch(model, density, gpu, tokens, **changes)
            errors.append(abs(math.log(max(ours or 0, 0.5) / largest)))
    return statistics.mean(errors)


def readings_table() -> list[str]:
    lines = ["| hidden states | checkpointing | mean of the log errors |", "|---|---|---|"]
    for prepares, stream in ((False, "16 bit"), (True, "fp32 (peft's k-bit preparation)")):
        for reenters, name in ((False, "does not re-enter"), (True, "re-enters")):
            error = mean_log_error_of_largest(
                prepare_model_for_kbit_training=prepares, gradient_checkpointing_kwargs={"use_reentrant": reenters}
            )
            lines.append(f"| {stream} | {name} | {error:.2f} |")
    return lines


# --- the document ----------------------------------------------------------------------------------------------------------


def bar_table(rows: Sequence[tuple[Run, str, float]]) -> list[str]:
    lines = ["| rows | n | median at most 5 % | 90 % within 12 % |", "|---|---|---|---|"]
    choices = {
        "known configuration": known(rows),
        "... and variable lengths": [row for row in rows if row[0].source != "qwen1"],
        "... and basis not stated: all": list(rows),
    }
    for name, some in choices.items():
        errors = [error for _, _, error in some]
        middle, share = statistics.median(abs(percent(error)) for error in errors), within(errors, 12)
        lines.append(
            f"| {name} | {len(errors)} | {middle:.1f} % ({'met' if middle <= 5 else '**not met**'}) | "
            f"{100 * share:.0f} % ({'met' if share >= 0.9 else '**not met**'}) |"
        )
    return lines


def memory_scatter(runs: Sequence[Run]) -> str:
    """The picture of predicted against measured, a mark a row."""
    points: dict[str, list[tuple[float, float]]] = {}
    for run, _, error in memory_errors(runs):
        assert run.memory is not None
        points.setdefault(run.source, []).append((run.memory[1], run.memory[1] * math.exp(error)))
    return chart(
        "Peak memory: predicted against measured (dotted: 12 %)",
        "measured, GiB",
        "predicted, GiB",
        [Mark(source, some) for source, some in points.items()],
        is_log=True,
        diagonal_bands=(1.12,),
    )


def memory_section(runs: Sequence[Run]) -> list[str]:
    """The lines of the document's memory half."""
    rows = memory_errors(runs)
    needed = [row for row in memory_errors(runs, holes=None) if row[0].source in VARIABLE_LENGTHS]
    verdicts = all_verdicts(runs)
    wrong = [each for each in verdicts if not each.is_right]
    by_hand = read_rows_left_out()
    return [
        "## Memory",
        "",
        "Like with like: allocated against allocated, reserved against reserved; a figure without a stated basis is held against",
        "what the card shows. Nothing is fitted on these rows but the longest sample of the peft rows (656 tokens, from one of",
        "them): tensors are counted, and the shares for the allocator come from replays of allocation logs (`accuracy/replays.csv`).",
        "",
        *memory_table(rows, "class", lambda run: run.group),
        "",
        "By card:",
        "",
        *memory_table(rows, "card", lambda run: run.gpu.name),
        "",
        "![memory: predicted against measured](accuracy_memory.svg)",
        "",
        "The bar, on rows of confidence A and B:",
        "",
        *bar_table(rows),
        "",
        "Left out of the first line, and why:",
        "",
        *(
            f"- **{source}** ({sum(run.source == source for run, _, _ in rows)} rows): {reason}."
            for source, reason in NOT_KNOWN.items()
        ),
        "",
        "Rows without a usable memory figure, by reason as `accuracy/rows.csv` gives it for time and memory together:",
        "",
        *(f"- {count}: {reason}" for reason, count in by_hand),
        "",
        "### What the figures are made of",
        "",
        "- **bitsandbytes before 0.44** (September 2024) keeps the input of every 4-bit linear until its backward; 0.44 and later keep",
        "  none (`autograd/_functions.py` of 0.41.1, 0.42.0, 0.43.1 against 0.44.1 and 0.50.2). It explains what litgpt's QLoRA rows hold",
        "  over its LoRA rows. With checkpointing that does not re-enter these inputs are out of reach of its hooks and stay for",
        "  **every** layer; with checkpointing that re-enters they do not.",
        "- **litgpt**: the values are a view of one projection and keep all of it, the fused adapter's convolution keeps its result",
        "  (`index_copy`), adapters drop out by default, head and loss run in chunks of 128 in bf16 (read and traced: litgpt 0.2.0).",
        "- **fsdp_qlora**: transformers 4.38 returns fp32 logits, and the loop holds them through the backward.",
        "- **GPTQ** (auto-gptq 0.4 and 0.5): a plain matmul with the unpacked weight, which autograd keeps: a layer's weights in 16",
        "  bit under checkpointing, all of them without. Qwen's Q-LoRA is taken to go through DeepSpeed (its own script; not printed",
        "  beside the table): fp16 without autocast (the loss too),",
        "  fp32 masters, two gradient buckets of 0.4 GB.",
        "- **The allocator**: gaps are a share of what comes and goes, not of the weights. Replays: 10 % for LoRA, 30 % for LoRA with",
        "  checkpointing, 17 % for full tuning.",
        "- **Variable lengths** (ms_swift): the allocator keeps blocks that the next length does not fit into. The replays of",
        "  checkpointed LoRA hold between nothing and five times the loss's bytes more, by the order of the lengths and by how",
        f"  many are near the limit ({replayed_holes('lora_checkpointed', 0.5):.1f} in the median where many are, as in these rows; {replayed_holes('full', 0.5):.1f} in full tuning). That is luck, so",
        "  the predicted peak is what the job needs, the interval's high end includes such blocks, and the verdict does not, since",
        "  the allocator gives them back when the card is full. The table above adds that median; without it:",
        "",
        *memory_table(needed, "class, without cached blocks", lambda run: run.group),
        "",
        "- **Not explained: Qwen 1.** About 2 GiB at 1.8B to 5 GiB at 14B over the tensors, at every length, bf16 and GPTQ alike; it",
        "  grows with the adapters. The basis of the figures is not stated; a CUDA context with flash-attention's kernels is part of it.",
        "",
        "### CUDA context",
        "",
        f"One constant, {c.CUDA_CONTEXT_BYTES // 2**20} MiB: no public row gives both torch's figure and the driver's, so neither the card nor the",
        "version can be told apart. Others' figures: 141 MiB (fitcheck, a T4 process), 500 MiB (fitcheck's default), 650 MB (gpu_poor),",
        "1,000 MiB (vram-calculator), 1.4 GiB for all overhead (Unsloth). The interval takes 140 MiB to 1.4 GiB.",
        "",
        "### Interval",
        "",
        "80 % interval of what is reserved, as a share: "
        + "; ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in c.MEMORY_INTERVAL.items())
        + ".",
        "*Left out*: the ends come from the other sources of fixed length, each weighing the same. Variable lengths take their high",
        "end from replays, of which none was fitted on a measured run. Without qwen1, whose class no other source witnesses, "
        f"{100 * coverage_without_unread(runs):.0f} % of the rows lie inside the interval that was made without their source.",
        "",
        *coverage_table(runs),
        "",
        "### Verdicts",
        "",
        f"{100 * share_right(verdicts):.0f} % of {len(verdicts)} stated outcomes are right. A largest batch counts twice: it fits, the next one does not; so a",
        f"batch that is off by one is half wrong. Without the paper's batches: {100 * share_right([v for v in verdicts if not v.source.startswith('paper')]):.0f} %, but most of those",
        "rows went through with room to spare, and only eight ran out of memory.",
        "",
        *verdict_table(verdicts),
        "",
        "Wrong: " + "; ".join(each.name for each in wrong) + ".",
        "",
        "### Largest batches of arXiv:2408.04693",
        "",
        "Eq. 1 (C0 = 62, C1 = 0.89, 23.35 GB), floored, and ours, from tensors alone: no factor was fitted on these.",
        "",
        *largest_batch_table(),
        "",
        "Two settings are not printed in the paper. The four readings, mean of the absolute log errors over the fourteen Mixtral batches:",
        "",
        *readings_table(),
        "",
        "Only the first comes near, and it needs no factor where an earlier version carried 3.9: in 16-bit hidden states and",
        "checkpointing that does not re-enter, every layer holds the inputs of its 4-bit linears, two bytes for each of a routed",
        "row's 14,336 + 4,096 elements. That the paper ran so is inferred from this table, not stated. The share for the allocator",
        "is that of a run without checkpointing, since what a layer leaves behind is kept as there; with 0, 0.1 and 0.2 the mean",
        "error stayed between 0.11 and 0.17 when it was chosen. Reading its settings as",
        "transformers' own defaults of that time (the last line) gives batches two to four times too large.",
        "",
    ]


def read_rows_left_out() -> list[tuple[str, int]]:
    """Reasons of ``rows.csv`` for rows without memory, with their counts, the most frequent first."""
    counts: dict[str, int] = {}
    for row in read_rows(FOLDER / "rows.csv"):
        if row["memory"] == "no" and row["reason"]:
            counts[row["reason"]] = counts.get(row["reason"], 0) + 1
    return sorted(counts.items(), key=lambda entry: -entry[1])
