"""An answer as text, Markdown or JSON. Only here, in pictures and in :mod:`costmodel.formats` are numbers rounded.

Works on the answer's mapping (``Estimate.to_dict()``). Unknown is printed as "unknown", an interval as "(low to high)".
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TextIO

from costmodel.catalog import age_days, smallest_gpu_that_holds, stale_price_warning
from costmodel.defaults import is_not_modelled
from costmodel.errors import CostModelError
from costmodel.formats import UNKNOWN, format_count, format_gib, format_hours, format_percent, format_seconds, format_usd

if TYPE_CHECKING:
    from costmodel.estimation import Estimate
    from costmodel.search import Candidate, OptimizeResult
    from costmodel.specs import Price


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table of finished text. ``columns`` is empty for a list of name and value."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    columns: tuple[str, ...] = ()
    numeric: tuple[int, ...] = ()  # columns to align right


# --- numbers ----------------------------------------------------------------------------------------------------------


def _interval(answer: Mapping[str, Any], name: str, form: Callable[[Any], str]) -> str:
    """``"34.0 GiB (32.0 GiB to 36.0 GiB)"``."""
    low, high = answer.get(f"{name}_low"), answer.get(f"{name}_high")
    text = form(answer.get(name))
    return text if low is None or high is None else f"{text} ({form(low)} to {form(high)})"


def _seconds_interval(answer: Mapping[str, Any], name: str) -> str:
    """``"2.27 h (1.78 h to 2.89 h)"``: one unit for all three."""
    return _interval(answer, name, functools.partial(format_seconds, like=answer.get(name)))


# --- JSON -------------------------------------------------------------------------------------------------------------


def as_answer(estimate: Estimate | Mapping[str, Any]) -> dict[str, Any]:
    """The contract's mapping, unrounded."""
    return dict(estimate) if isinstance(estimate, Mapping) else estimate.to_dict()


def to_json(value: Any, *, indent: int | None = 2) -> str:
    """JSON text without nan or infinity. Raises :class:`CostModelError` for an answer that holds one."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    try:
        return json.dumps(value, indent=indent, allow_nan=False, default=_plain)
    except ValueError:
        message = "no JSON holds this answer: a number of the job or of the model's config is out of range"
        raise CostModelError(message) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"not a JSON value: {value!r}")


# --- one estimate -----------------------------------------------------------------------------------------------------

MEMORY_TERMS = (
    ("weights_bytes", "weights"),
    ("adapters_bytes", "adapters"),
    ("gradients_bytes", "gradients"),
    ("optimizer_bytes", "optimizer states"),
    ("activations_bytes", "activations"),
    ("logits_bytes", "logits and loss"),
    ("temporary_bytes", "temporary buffers"),
    ("context_bytes", "CUDA context and libraries"),
)


def to_text(estimate: Estimate | Mapping[str, Any], *, today: datetime.date | None = None, width: int | None = None) -> str:
    """Plain text for a terminal without colour. ``today`` gives the price an age; ``width`` columns wrap sentences."""
    answer = as_answer(estimate)
    parts = [_wrapped(headline(answer), width), *(_table_as_text(table) for table in _tables(answer, today))]
    parts += [_list_as_text(title, lines, width) for title, lines in _lists(answer) if lines]
    return "\n\n".join(parts) + "\n"


def to_markdown(estimate: Estimate | Mapping[str, Any], *, today: datetime.date | None = None) -> str:
    """Markdown for an issue, a pull request or a model card."""
    answer = as_answer(estimate)
    parts = [f"### {_escaped(headline(answer))}", *(_table_as_markdown(table) for table in _tables(answer, today))]
    for title, lines in _lists(answer):
        if lines:
            parts.append("\n".join([f"**{title}**", "", *(f"- {_escaped(line)}" for line in lines)]))
    return "\n\n".join(parts) + "\n"


def print_estimate(estimate: Estimate | Mapping[str, Any], stream: TextIO, *, today: datetime.date | None = None) -> None:
    """Coloured tables on a terminal, :func:`to_text` anywhere else."""
    if not _wants_colour(stream):
        stream.write(to_text(estimate, today=today, width=_columns(stream)))
        return
    from rich.console import Console
    from rich.text import Text

    answer = as_answer(estimate)
    console = Console(file=stream, highlight=False)
    colour = {"fits": "green", "tight": "yellow", "does_not_fit": "red"}.get(str(answer.get("verdict")), "white")
    console.print(Text(headline(answer), style=f"bold {colour}"))
    for table in _tables(answer, today):
        console.print(_table_for_rich(table))
    for title, lines in _lists(answer):
        if lines:
            console.print(Text(title, style="bold yellow" if title == "Warnings" else "bold"))
            for line in lines:
                console.print(Text(f"  {line}"))


def does_not_fit_sentence(estimate: Estimate | Mapping[str, Any]) -> str:
    """What it needs, what the card has, and the ways out: a smaller batch or sequence, the smallest card that holds it."""
    answer = as_answer(estimate)
    memory = answer["memory"]
    gpu = gpu_name(answer)
    article = "an" if gpu[:1].upper() in "AEFHILMNORSX8" else "a"  # by sound: an H100, an L4, a T4
    capacity = format_gib(memory["capacity_bytes"]).removesuffix(" GiB")
    sentence = f"does not fit: needs {format_gib(memory['peak_device_bytes'])}, {article} {gpu} has {capacity}: "
    ways_out = []
    batch, length = answer.get("max_batch_size"), answer.get("max_length_that_fits")
    if batch:
        ways_out.append(f"largest batch that fits is {batch}")
    else:
        if batch == 0:
            ways_out.append("not even a batch of 1 fits")
        if length:
            ways_out.append(f"longest sequence that fits is {length} tokens")
    sentence += ", ".join([*ways_out, _smallest_card(answer)])
    stack = str(answer["job"].get("framework"))
    if is_not_modelled(stack):
        sentence += f"; counted as transformers: {stack} itself is not modelled and may need less"
    return sentence


def _smallest_card(answer: Mapping[str, Any]) -> str:
    job, peak = answer["job"], answer["memory"]["peak_device_bytes"]
    card = smallest_gpu_that_holds(peak, needs_bf16=bool(job.get("bf16")) or job.get("dtype") == "bfloat16")
    if card is None:
        return "no catalogued card holds it"
    return f"smallest card that holds it is {card.name} ({format_gib(card.memory_bytes)})"


def fits_nowhere_sentence(candidates: Sequence[Candidate]) -> str:
    """The least that the job needs on any of the GPUs it was compared on, and the smallest card that holds it."""
    answers = [each.estimate.to_dict() for each in candidates if each.estimate is not None]
    if not answers:
        return "fits on none of these GPUs"
    least = min(answers, key=lambda answer: answer["memory"]["peak_device_bytes"])
    needed = format_gib(least["memory"]["peak_device_bytes"])
    return f"fits on none of these GPUs: needs {needed} at least, {_smallest_card(least)}"


def gpu_name(answer: Mapping[str, Any]) -> str:
    gpu = answer["job"].get("gpu")
    return str(gpu.get("name", "GPU") if isinstance(gpu, Mapping) else gpu or "GPU")


def _model_name(answer: Mapping[str, Any]) -> str:
    model = answer["job"].get("model")
    return f"inline {model.get('model_type', 'config')}" if isinstance(model, Mapping) else str(model)


def headline(answer: Mapping[str, Any]) -> str:
    job = answer["job"]
    method = " ".join(str(job[name]) for name in ("method", "quantization") if job.get(name))
    what = ", ".join(part for part in (_model_name(answer), method) if part)
    if not job.get("gpu"):
        return f"{what}: no GPU named"
    verdict = str(answer.get("verdict") or UNKNOWN).replace("_", " ")
    stack = job.get("framework")
    counted_as = f", counted as transformers: {stack} itself is not modelled" if stack and is_not_modelled(stack) else ""
    return f"{what}, {job.get('num_gpus', 1)} x {gpu_name(answer)}: {verdict}{counted_as}"


def _tables(answer: Mapping[str, Any], today: datetime.date | None) -> list[Table]:
    return [
        Table("Summary", tuple(_summary_rows(answer, today))),
        *_memory_table(answer),
        *_time_table(answer),
        *_evidence_table(answer),
    ]


def _summary_rows(answer: Mapping[str, Any], today: datetime.date | None) -> list[tuple[str, str]]:
    memory, step, job = answer.get("memory") or {}, answer.get("step") or {}, answer["job"]
    rows = [
        (
            "parameters",
            f"{format_count(answer.get('num_params'))} (head included), "
            f"{format_count(answer.get('num_active_params'))} active, "
            f"{format_count(answer.get('num_trainable_params'))} trained",
        ),
        (
            "batch",
            f"{job.get('per_device_train_batch_size') or UNKNOWN} per GPU x "
            f"{job.get('gradient_accumulation_steps') or 1} accumulated, at most {job.get('max_length') or UNKNOWN} tokens",
        ),
        (
            "memory",
            _interval(memory, "peak_device_bytes", format_gib)
            + (f" of {format_gib(memory['capacity_bytes'])}" if memory.get("capacity_bytes") else "")
            + (f", peak in {memory['peak_phase']}" if memory.get("peak_phase") else ""),
        ),
    ]
    if reason := _why_memory_may_be_far_off(answer):
        rows.append(("", reason))
    if answer.get("max_batch_size") is not None:
        length = answer.get("max_length_that_fits")
        largest = f"batch {answer['max_batch_size']}" if answer["max_batch_size"] else "not even a batch of 1"
        rows.append(("largest that fits", largest + (f", or {length:,} tokens" if length else "")))
    share = answer.get("share_of_batches_that_fit")
    if share is not None and share < 1:
        rows.append(("batches that fit", format_percent(share)))
    rows.append(
        (
            "step",
            _seconds_interval(answer, "step_seconds")
            + (f", bound by {str(step['bound_by']).replace('_', ' ')}" if step.get("bound_by") else ""),
        )
    )
    if answer.get("tokens_per_second") is not None:
        non_padding = answer.get("non_padding_tokens_per_second")
        rows.append(
            (
                "throughput",
                f"{_interval(answer, 'tokens_per_second', format_count)} tokens/s"
                + (f", {format_count(non_padding)} without padding" if non_padding is not None else "")
                + (f", MFU {format_percent(answer['mfu'])}" if answer.get("mfu") is not None else ""),
            )
        )
    steps = answer.get("num_steps")
    rows.append(
        (
            "total time",
            _seconds_interval(answer, "total_seconds") + (f", {steps:,} steps" if steps is not None else ""),
        )
    )
    rows.append(("total cost", _interval(answer, "total_usd", format_usd)))
    if answer.get("spot"):
        rows.append(("with interruptions", _spot_text(answer["spot"])))
    rows.append(("price", _price_text(answer.get("price"), today)))
    if answer.get("calibration"):
        rows.append(("calibration", _calibration_text(answer["calibration"])))
    if answer.get("interval_level") is not None:
        rows.append(("intervals", f"{100 * answer['interval_level']:.0f} % of runs"))
    return rows


def _why_memory_may_be_far_off(answer: Mapping[str, Any]) -> str:
    """What makes an interval of the memory wide, where an end of it is far from the estimate; else ``""``."""
    memory, job = answer.get("memory") or {}, answer["job"]
    peak, low, high = (memory.get(f"peak_device_bytes{end}") for end in ("", "_low", "_high"))
    if not peak or low is None or high is None:
        return ""
    if low < _FAR_BELOW * peak and is_not_modelled(str(job.get("framework"))):
        return f"low end: what {job['framework']}'s own kernels may save"
    if high > _FAR_ABOVE * peak and job.get("lengths") and not job.get("packing") and job.get("padding") != "max_length":
        return "high end: batches of varying length may leave holes in torch's cache (given back when the card is full)"
    return ""


_FAR_BELOW: Final = 0.85
_FAR_ABOVE: Final = 1.25


def _calibration_text(used: Mapping[str, Any]) -> str:
    """``"a40.json of 2026-09-30: device x 1.12, host x 0.94; the batch is outside the measured ones"``."""
    factors = f"device x {used['device_factor']:.2f}, host x {used['host_factor']:.2f}"
    if used["num_factors"] == 1:
        factors = f"everything x {used['device_factor']:.2f}"
    inside = "" if used["is_inside_range"] else "; this job is outside what was measured"
    return f"{used['file'] or 'given with the job'}, of {used['created_on']}: {factors}{inside}"


def _spot_text(spot: Mapping[str, Any]) -> str:
    """``"$3.20, 7.9 h: 0.40 interruptions, 6 min of work lost and 2 min of restarts"``."""
    if spot["expected_seconds"] is None:
        return "no bound: interruptions come before the loss of the last one is made up"
    return (
        f"{format_usd(spot['expected_usd'])}, {format_seconds(spot['expected_seconds'])}: "
        f"{spot['num_interruptions']:.2f} interruptions expected, {format_seconds(spot['lost_seconds'])} of work lost and "
        f"{format_seconds(spot['restarting_seconds'])} of restarts"
    )


def _price_text(price: Mapping[str, Any] | None, today: datetime.date | None) -> str:
    if not price:
        return "not given: hours only (--usd-per-gpu-hour, or --cloud and --tier)"
    text = f"{format_usd(price['usd_per_gpu_hour'])} per GPU-hour"
    if price.get("gpus_per_instance", 1) > 1:
        text += (
            f", rented as a machine of {price['gpus_per_instance']} at {format_usd(price['usd_per_instance_hour'])} per hour"
        )
    # The tier says something about a cloud's offer, nothing about a price that the user gave.
    offer = ("cloud", "product", "tier") if price.get("cloud") else ()
    where = " ".join(str(price[name]) for name in offer if price.get(name))
    source = ", ".join(part for part in (where, str(price.get("source") or "")) if part)
    if source:
        text += f"; {source}"
    if price.get("as_of"):
        text += f", as of {price['as_of']}{format_age(str(price['as_of']), today)}"
    return text


def format_age(as_of: str, today: datetime.date | None) -> str:
    """``" (84 days old)"``, or nothing where the day is not known."""
    days = age_days(as_of, today) if today else None
    return "" if days is None else f" ({days} day{'' if days == 1 else 's'} old)"


def _memory_table(answer: Mapping[str, Any]) -> list[Table]:
    memory = answer.get("memory") or {}
    peak = memory.get("peak_device_bytes")
    terms = [(label, memory[name]) for name, label in MEMORY_TERMS if memory.get(name)]
    if not terms:
        return []
    if (unused := (memory.get("peak_reserved_bytes") or 0) - (memory.get("peak_allocated_bytes") or 0)) > 0:
        terms.append(("reserved, not in use", unused))
    terms.sort(key=lambda term: -term[1])
    rows = [(label, format_gib(size), format_percent(size / peak) if peak else "") for label, size in terms]
    rows += [
        (label, format_gib(memory[name]), "")
        for name, label in (
            ("peak_allocated_bytes", "peak allocated (torch)"),
            ("peak_reserved_bytes", "peak reserved (torch)"),
            ("peak_device_bytes", "peak on the device"),
        )
        if memory.get(name) is not None
    ]
    return [Table("Memory, largest first", tuple(rows), ("", "size", "of peak"), numeric=(1, 2))]


def _time_table(answer: Mapping[str, Any]) -> list[Table]:
    step = answer.get("step") or {}
    total = answer.get("step_seconds")
    rows: list[tuple[str, ...]] = []

    def add(label: str, seconds: float | None) -> None:
        if seconds:
            rows.append((label, format_seconds(seconds), format_percent(seconds / total) if total else ""))

    for name in ("forward", "backward", "optimizer"):
        add(name, step.get(f"{name}_seconds"))
    groups = step.get("by_group_seconds") or {}
    for name, seconds in sorted(groups.items(), key=lambda item: -(item[1] or 0)):
        add(f"of which {str(name).replace('_', ' ')}", seconds)
    tables = [Table("One step", tuple(rows), ("", "time", "of step"), numeric=(1, 2))] if rows else []
    whole = [
        (label, format_seconds(answer[name]))
        for name, label in (
            ("train_seconds", "training"),
            ("eval_seconds", "evaluation"),
            ("save_seconds", "checkpoints"),
            ("startup_seconds", "start-up"),
        )
        if answer.get(name)
    ]
    if len(whole) > 1:
        tables.append(Table("The whole run", tuple(whole), ("", "time"), numeric=(1,)))
    return tables


def _evidence_table(answer: Mapping[str, Any]) -> list[Table]:
    rows = tuple(
        (
            str(item.get("run", "")),
            ", ".join(str(item[name]) for name in ("model", "kind", "gpu") if item.get(name)),
            format_seconds(item.get("measured")),
            format_seconds(item.get("estimated"), like=item.get("measured")),
            f"{item['distance']:.2f}" if item.get("distance") is not None else UNKNOWN,
        )
        for item in answer.get("evidence") or ()
    )
    columns = ("run", "what", "measured", "estimated", "distance")
    title = (
        "Nearest measured runs: time of an optimizer step there, and as estimated\n"
        "distance: 0 is alike; 1 a factor of four in parameters or tokens, another method, or another card and stack"
    )
    return [Table(title, rows, columns, numeric=(2, 3, 4))] if rows else []


def _lists(answer: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    job, assumed = answer["job"], answer.get("assumed") or []
    values = [f"{name}={_value_text(job.get(name))}" if name in job else str(name) for name in assumed]
    defaults_of = f" (defaults of {answer['defaults_of']})" if answer.get("defaults_of") else ""
    return [
        ("Warnings", [str(warning) for warning in answer.get("warnings") or []]),
        (f"Assumed{defaults_of}", [", ".join(values)] if values else []),
    ]


def _value_text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "+".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


# --- several ----------------------------------------------------------------------------------------------------------


def comparison_table(
    candidates: Sequence[Candidate],
    *,
    by: str = "usd",
    today: datetime.date | None = None,
    every_offer: bool = True,
    wide: bool = False,
) -> Table:
    """One line for each candidate, best first; ``*`` marks those that no other beats in both dollars and hours.

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
    title = f"Same job, {order} (* = nothing is both cheaper and faster)"
    if len(shown) < len(candidates):
        title += f"; {len(candidates) - len(shown)} more: --all, --wide"
    if wide:
        return Table(title, tuple(_wide_row(each, today) for each in shown), _WIDE_COLUMNS, (3, 6))
    if any(_is_old(each, today) for each in shown):
        title += "\n! = the price is older than 90 days; the newest of the same GPU stands below it"
    if any(each.fits and each.estimate and each.estimate.verdict == "tight" for each in shown):
        title += "\n~ = tight: only the upper end of the memory interval is over the card's"
    if (level := _common_interval(shown)) is not None:
        title += f"\n80 % of runs take {level[0]:.2f} to {level[1]:.2f} times these hours and dollars"
    title += "\nbatch: samples at once x accumulated, and whether activations are recomputed (ckpt)"
    return Table(title, tuple(_narrow_row(each, today) for each in shown), _NARROW_COLUMNS, (2, 3, 4, 6, 7))


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
        "*" if each.on_pareto_front else "",
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
    time_text, cost_text = _interval(answer, "total_seconds", format_hours), _interval(answer, "total_usd", format_usd)
    if each.spot is not None:
        time_text = f"{format_hours(each.total_seconds)} with interruptions"
        cost_text = f"{format_usd(each.total_usd)} with interruptions"
    return (
        "*" if each.on_pareto_front else "",
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
        parts.append(word or f"{name}={_value_text(value)}")
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
                    (f"{name}: {_value_text(value)}", f"was {_value_text(before.get(name))}")
                    for name, value in result.best.settings.items()
                    if before.get(name) != value
                ),
            )
        )
    if result.others:
        tables.append(comparison_table(result.others, today=today))
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


def print_table(table: Table, stream: TextIO) -> None:
    """A rich table on a terminal, aligned text anywhere else."""
    if not _wants_colour(stream):
        stream.write(_table_as_text(table) + "\n")
        return
    from rich.console import Console

    Console(file=stream, highlight=False).print(_table_for_rich(table))


def table_to_markdown(table: Table) -> str:
    return _table_as_markdown(table) + "\n"


# --- layout -----------------------------------------------------------------------------------------------------------


def _table_as_text(table: Table) -> str:
    lines = [table.columns, *table.rows] if table.columns else list(table.rows)
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))] if lines else []
    text = [table.title]
    for line in lines:
        cells = [
            cell.rjust(width) if index in table.numeric else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(text)


def _list_as_text(title: str, lines: Sequence[str], width: int | None = None) -> str:
    return "\n".join([_wrapped(title, width), *(_wrapped(f"  - {line}", width, indent="    ") for line in lines)])


def _wrapped(text: str, width: int | None, indent: str = "") -> str:
    """Broken between words; a word that is longer than the line (a path, a list of modules) stays whole."""
    if width is None or len(text) <= width:
        return text
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _columns(stream: TextIO) -> int | None:
    """The width of the terminal, or what COLUMNS says; ``None`` for a file or pipe, whose lines nobody breaks."""
    if not (stream.isatty() or os.environ.get("COLUMNS")):
        return None
    return max(_MIN_COLUMNS, shutil.get_terminal_size().columns)


_MIN_COLUMNS: Final = 20


def _table_as_markdown(table: Table) -> str:
    num_columns = len(table.columns or table.rows[0])
    columns = table.columns or ("",) * num_columns
    rule = ["---:" if index in table.numeric else "---" for index in range(num_columns)]
    lines = [f"**{_escaped(table.title)}**", ""]
    lines += ["| " + " | ".join(map(_escaped, line)) + " |" for line in (columns, rule, *table.rows)]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _table_for_rich(table: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(
        title=Text(table.title), title_justify="left", box=box.SIMPLE_HEAD, show_header=bool(table.columns), padding=0
    )
    for index in range(len(table.columns or table.rows[0])):
        header = table.columns[index] if table.columns else ""
        shown.add_column(header, justify="right" if index in table.numeric else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown


def _wants_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
