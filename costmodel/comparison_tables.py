"""What compare and optimize found, as tables."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from costmodel.formats import format_gib, format_hours, format_usd
from costmodel.price_catalog import age_days, stale_price_warning
from costmodel.report import format_age, interval_text, setting_text, smallest_card
from costmodel.tables import Table

if TYPE_CHECKING:
    from costmodel.candidates import Candidate
    from costmodel.optimization import OptimizeResult
    from costmodel.specs import Price


def fits_nowhere_sentence(candidates: Sequence[Candidate]) -> str:
    """The least that the job needs on any of the GPUs it was compared on, and the smallest card that holds it."""
    answers = [each.estimate.to_dict() for each in candidates if each.estimate is not None]
    if not answers:
        return "fits on none of these GPUs"
    least = min(answers, key=lambda answer: answer["memory"]["peak_device_bytes"])
    needed = format_gib(least["memory"]["peak_device_bytes"])
    return f"fits on none of these GPUs: needs {needed} at least, {smallest_card(least)}"


def comparison_table(
    candidates: Sequence[Candidate],
    *,
    by: str = "usd",
    today: datetime.date | None = None,
    every_offer: bool = True,
    wide: bool = False,
) -> Table:
    """One line for each candidate, best first; ``*`` marks those that no other beats in both dollars and hours, ``x`` those
    that miss a limit of the search.

    Without ``every_offer``, the best offer of each GPU and tier, those on the front, and beside an old price that comes
    first the newest of the same GPU and tier. ``wide`` adds intervals, product, date and settings in words; without it a
    line holds 100 columns.
    """
    best: dict[tuple[str, str], Candidate] = {}
    for each in candidates:
        best.setdefault(_kind_of_offer(each), each)
    kept = {id(each) for each in best.values()}
    old = [each for each in best.values() if _is_old(each, today)]
    kept |= {id(newer) for each in old if (newer := _newest(candidates, each)) is not None}
    shown = [each for each in candidates if every_offer or each.on_pareto_front or id(each) in kept]
    order = "fastest first" if by == "time" else "cheapest first"
    if any(map(_missed, shown)):
        order += ", then what misses a limit"
    title = f"Same job, {order} (* = nothing is both cheaper and faster)"
    if unknown := _why_times_are_unknown(candidates):
        title = f"Same job, in no order of time or cost: both are unknown, {unknown}"
    if len(shown) < len(candidates):
        title += f"; {len(candidates) - len(shown)} more: --all, --wide"
    if not unknown and (rateless := [each for each in shown if each.fits and each.estimate and each.total_seconds is None]):
        gpus = ", ".join(dict.fromkeys(_short_gpu(each.gpu) for each in rateless))
        title += f"\nunknown: no rate for {_compute_type(rateless[0])}, which this job computes in, is known of {gpus}"
    for limit, word in _LIMITS.items():
        if late := [_short_gpu(each.gpu) for each in shown if limit in _missed(each)]:
            title += f"\nx = misses the {word}: {', '.join(late)}"
    if wide:
        return Table(title, tuple(_wide_row(each, today) for each in shown), _WIDE_COLUMNS, (3, 6))
    if any(_is_old(each, today) for each in shown):
        has_newer = any(_is_old(each, today) and _newest(shown, each) is not None for each in shown)
        title += "\n! = the price is older than 90 days"
        title += "; the newest of the same GPU stands below it" if has_newer else ""
    if any(each.fits and each.estimate and each.estimate.verdict == "tight" for each in shown):
        title += "\n~ = tight: only the upper end of the memory interval is over the card's"
    if (level := _common_interval(shown)) is not None:
        title += f"\n80 % of runs take {level[0]:.2f} to {level[1]:.2f} times these hours and dollars"
    title += "\nbatch: samples at once x accumulated, and whether activations are recomputed (ckpt)"
    return Table(title, tuple(_narrow_row(each, today) for each in shown), _NARROW_COLUMNS, (2, 3, 4, 6, 7))


def _why_times_are_unknown(candidates: Sequence[Candidate]) -> str:
    """What the job must say before its hours are known anywhere that it fits; ``""`` where some are."""
    fitting = [each for each in candidates if each.fits and each.estimate is not None]
    if not fitting or any(each.total_seconds is not None for each in fitting):
        return ""
    job = fitting[0].estimate.job if fitting[0].estimate else {}
    if not job.get("lengths"):
        return "as lengths are not given (--lengths mean:500,max:2048, a histogram, or --dataset)"
    if not (job.get("num_samples") or job.get("max_steps")):
        return "as the number of samples is not given (--samples and --epochs, or --max-steps)"
    return "as no rate of these GPUs is known for this job"


def _compute_type(each: Candidate) -> str:
    job = each.estimate.job if each.estimate else {}
    return "bfloat16" if job.get("bf16") else "float16" if job.get("fp16") else str(job.get("dtype") or "its type")


_LIMITS: Final = {"budget_usd": "budget", "deadline_hours": "deadline"}


def _missed(each: Candidate) -> tuple[str, ...]:
    """The limits that its total is over; none where the total is unknown or the card too small: the row says that."""
    totals = {"budget_usd": each.total_usd, "deadline_hours": each.total_seconds}
    return tuple(limit for limit in each.unmet if each.fits and totals[limit] is not None)


def _marks(each: Candidate) -> str:
    return ("*" if each.on_pareto_front else "") + ("x" if _missed(each) else "")


_NARROW_COLUMNS: Final = ("", "GPU", "time", "cost", "$/h", "offer", "age", "GiB", "batch")
_WIDE_COLUMNS: Final = ("", "GPU", "verdict", "peak", "time", "cost", "billed", "offer", "as of", "settings")


def _kind_of_offer(candidate: Candidate) -> tuple[str, str]:
    return candidate.gpu, candidate.price.tier if candidate.price else ""


def _is_old(candidate: Candidate, today: datetime.date | None) -> bool:
    return bool(candidate.price and today and stale_price_warning(candidate.price, today))


def _newest(candidates: Sequence[Candidate], than: Candidate) -> Candidate | None:
    """The offer of the same GPU and tier with the latest date, where one is later than this one's."""
    assert than.price is not None
    alike = [each for each in candidates if _kind_of_offer(each) == _kind_of_offer(than) and each.price is not None]
    newest = max(alike, key=lambda each: each.price.as_of if each.price else "", default=None)
    return newest if newest is not None and newest.price is not None and newest.price.as_of > than.price.as_of else None


def _common_interval(candidates: Sequence[Candidate]) -> tuple[float, float] | None:
    """(low, high) over the estimate that holds every candidate's interval of the total; ``None`` where none is known."""
    answers = [each.estimate.to_dict() for each in candidates if each.estimate is not None]
    ratios = [
        (answer["total_seconds_low"] / seconds, answer["total_seconds_high"] / seconds)
        for answer in answers
        if (seconds := answer.get("total_seconds")) and answer.get("total_seconds_high") is not None
    ]
    return (min(low for low, _ in ratios), max(high for _, high in ratios)) if ratios else None


def _narrow_row(each: Candidate, today: datetime.date | None) -> tuple[str, ...]:
    answer = each.estimate.to_dict() if each.estimate else {}
    job, memory, price = answer.get("job") or {}, answer.get("memory") or {}, each.price
    days = age_days(price.as_of, today) if price and today else None
    age = _short_age(days) if days is not None else price.as_of.partition(" ")[0] if price else ""
    size, accumulation = job.get("per_device_train_batch_size"), job.get("gradient_accumulation_steps") or 1
    return (
        _marks(each),
        _short_gpu(each.gpu),
        format_hours(each.total_seconds) if each.fits else "too small" if answer else "cannot run",
        format_usd(each.total_usd) if each.fits else "",
        format_usd(each.bill_usd_per_hour).removeprefix("$") if price else "",
        _short_offer(price) if price else "no price",
        age + ("!" if _is_old(each, today) else ""),
        _narrow_gib(memory["peak_device_bytes"], answer["verdict"]) if memory else "",
        (f"{size}x{accumulation}" if size else "") + (" ckpt" if job.get("gradient_checkpointing") else ""),
    )


def _short_age(days: int) -> str:
    return f"{days} d" if days < 1000 else f"{days / 365.25:.1f} y"


def _narrow_gib(num_bytes: float, verdict: str | None) -> str:
    return format_gib(num_bytes).removesuffix(" GiB") + ("~" if verdict == "tight" else "")


def _short_gpu(name: str) -> str:
    """Long names lose words from their middle, which their first and last tell apart."""
    first, *middle, last = name.split(" ") if " " in name else (name, "")
    while middle and len(name) > _GPU_CHARACTERS:
        middle.pop()
        name = " ".join([first, *middle, "..", last])
    return name


_GPU_CHARACTERS: Final = 22


def _short_offer(price: Price) -> str:
    """``Lambda``, ``AWS spot``; of a price given with the job, that it is."""
    if not price.cloud:
        return "your price"
    whole = f" x{price.gpus_per_instance}" if price.gpus_per_instance > 1 else ""
    tier = {"on_demand": "", "reserved": " reserv."}.get(price.tier, f" {price.tier}")
    return f"{price.cloud}{tier}{whole}"


def _wide_row(each: Candidate, today: datetime.date | None) -> tuple[str, ...]:
    answer = each.estimate.to_dict() if each.estimate else {}
    memory = answer.get("memory") or {}
    price = each.price
    offer = " ".join(part for part in (price.cloud, price.product, price.tier) if part) if price else "no price"
    time_text, cost_text = (
        interval_text(answer, "total_seconds", format_hours),
        interval_text(answer, "total_usd", format_usd),
    )
    if each.spot is not None:
        time_text = f"{format_hours(each.total_seconds)} with interruptions"
        cost_text = f"{format_usd(each.total_usd)} with interruptions"
    return (
        _marks(each),
        each.gpu,
        str(answer.get("verdict") or "error").replace("_", " "),
        format_gib(memory.get("peak_device_bytes")) if answer else "",
        time_text if answer else each.error,
        cost_text if answer else "",
        f"{format_usd(each.bill_usd_per_hour)}/h" if price else "",
        offer,
        f"{price.as_of}{format_age(price.as_of, today)}" if price else "",
        settings_text(each.settings),
    )


_SETTING_WORDS: dict[str, dict[Any, str]] = {
    "gradient_checkpointing": {True: "checkpointing on", False: "checkpointing off"},
    "packing": {True: "packing", False: "no packing"},
    "padding_free": {True: "padding-free", False: "padded"},
    "double_quant": {True: "double quantisation", False: "no double quantisation"},
    "quantization": {None: "unquantised"},
    "use_liger_kernel": {True: "Liger kernels"},
    "bf16": {True: "bf16 autocast"},
    "fp16": {True: "fp16 autocast"},
    "dtype": {"bfloat16": "bf16 weights", "float16": "fp16 weights"},
    "attn_implementation": {"flash_attention_2": "FlashAttention 2", "flash_attention_3": "FlashAttention 3"},
    "train_sampling_strategy": {"group_by_length": "grouped by length"},
}


def settings_text(settings: Mapping[str, Any]) -> str:
    """``{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}`` -> ``"batch 8 x 2"``; "" for none."""
    rest = dict(settings)
    parts = []
    if "per_device_train_batch_size" in rest:
        size, accumulation = rest.pop("per_device_train_batch_size"), rest.pop("gradient_accumulation_steps", None)
        parts.append(f"batch {size}" + (f" x {accumulation}" if accumulation else ""))
    for name, value in rest.items():
        word = _SETTING_WORDS.get(name, {}).get(value)
        parts.append(word or f"{name}={setting_text(value)}")
    return ", ".join(parts)


def optimization_tables(result: OptimizeResult, *, today: datetime.date | None = None) -> list[Table]:
    """Each change alone, the best combination beside the job as given, the fields to set, the other GPUs."""
    changes = tuple(
        (
            settings_text(change.settings),
            format_saving(change.saves_usd, format_usd),
            format_saving(change.saves_seconds, format_hours),
            format_saving(change.saves_bytes, format_gib),
            str(change.estimate.verdict or "").replace("_", " "),
            "; ".join(
                [
                    *(["pays only with the others of the best"] if change.only_with_others else []),
                    *([f"not done without --free {','.join(change.held)}"] if change.held else []),
                    *change.needs,
                ]
            ),
        )
        for change in result.changes
    )
    tables = []
    if changes:
        columns = ("change", "saves", "time", "memory", "", "note")
        tables.append(Table("Each change alone (- = costs more)", changes, columns, (1, 2, 3)))
    tables.append(_before_and_after(result, today))
    if result.best.settings and result.start.estimate is not None:
        before = result.start.estimate.job
        tables.append(
            Table(
                "Set",
                tuple(
                    (f"{name}: {setting_text(value)}", f"was {setting_text(before.get(name))}")
                    for name, value in result.best.settings.items()
                    if before.get(name) != value
                ),
            )
        )
    if result.others:
        tables.append(comparison_table([result.best, *result.others], by=result.ranked_by, today=today))
    return tables


def _before_and_after(result: OptimizeResult, today: datetime.date | None) -> Table:
    columns = ("", "as given", "best", "saves")
    start, best = result.start, result.best
    peaks = [each.estimate.memory.peak_device_bytes if each.estimate else None for each in (start, best)]
    rows = [
        (
            "verdict",
            *(str(each.estimate.verdict if each.estimate else each.error).replace("_", " ") for each in (start, best)),
            "",
        ),
        (
            "cost",
            format_usd(start.total_usd),
            format_usd(best.total_usd),
            format_saving(result.saves_usd, format_usd),
        ),
        (
            "time",
            format_hours(start.total_seconds),
            format_hours(best.total_seconds),
            format_saving(result.saves_seconds, format_hours),
        ),
        ("memory", format_gib(peaks[0]), format_gib(peaks[1]), format_saving(result.saves_bytes, format_gib)),
    ]
    if all(value is not None for value in result.effective_batch_size):
        rows.append(("samples per step", *(f"{value:.4g}" for value in result.effective_batch_size if value), ""))
    title = f"Best on {best.num_gpus} x {best.gpu}"
    price = best.price
    if price is not None:
        offer = " ".join(part for part in (price.cloud, price.product, price.tier) if part) if price.cloud else price.source
        dated = f", as of {price.as_of}{format_age(price.as_of, today)}" if price.as_of else ""
        title += f" at {format_usd(best.bill_usd_per_hour)}/h ({offer}{dated})"
    return Table(title, tuple(rows), columns, ())


def format_saving(saved: float | None, form: Callable[[Any], str]) -> str:
    """``"1.20 h"``, with a minus where it costs, ``""`` where it is not known."""
    if saved is None:
        return ""
    return f"-{form(-saved)}" if saved < 0 else form(saved)
