"""An answer as text, Markdown or JSON. Only here, in pictures and in :mod:`costmodel.formats` are numbers rounded.

Works on the answer's mapping (``Estimate.to_dict()``). Unknown is printed as "unknown", an interval as "(low to high)".
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TextIO

from costmodel.defaults import BITSANDBYTES
from costmodel.errors import CostModelError
from costmodel.formats import UNKNOWN, format_count, format_gib, format_percent, format_seconds, format_usd
from costmodel.framework_defaults import LAST_ON_TRANSFORMERS_4, is_not_modelled, transformers_major
from costmodel.price_catalog import age_days, smallest_gpu_that_holds
from costmodel.tables import (
    Table,
    escaped,
    list_as_text,
    table_as_markdown,
    table_as_text,
    table_for_rich,
    terminal_columns,
    wants_colour,
    wrapped,
)

if TYPE_CHECKING:
    from costmodel.answer import Estimate


def interval_text(answer: Mapping[str, Any], name: str, form: Callable[[Any], str]) -> str:
    """``"34.0 GiB (32.0 GiB to 36.0 GiB)"``."""
    low, high = answer.get(f"{name}_low"), answer.get(f"{name}_high")
    text = form(answer.get(name))
    return text if low is None or high is None else f"{text} ({form(low)} to {form(high)})"


def _seconds_interval(answer: Mapping[str, Any], name: str) -> str:
    """``"2.27 h (1.78 h to 2.89 h)"``: one unit for all three."""
    return interval_text(answer, name, functools.partial(format_seconds, like=answer.get(name)))


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
    parts = [wrapped(headline(answer), width), *(table_as_text(table) for table in _tables(answer, today))]
    parts += [list_as_text(title, lines, width) for title, lines in _lists(answer) if lines]
    return "\n\n".join(parts) + "\n"


def to_markdown(estimate: Estimate | Mapping[str, Any], *, today: datetime.date | None = None) -> str:
    """Markdown for an issue, a pull request or a model card."""
    answer = as_answer(estimate)
    parts = [f"### {escaped(headline(answer))}", *(table_as_markdown(table) for table in _tables(answer, today))]
    for title, lines in _lists(answer):
        if lines:
            parts.append("\n".join([f"**{title}**", "", *(f"- {escaped(line)}" for line in lines)]))
    return "\n\n".join(parts) + "\n"


def print_estimate(estimate: Estimate | Mapping[str, Any], stream: TextIO, *, today: datetime.date | None = None) -> None:
    """Coloured tables on a terminal, :func:`to_text` anywhere else."""
    if not wants_colour(stream):
        stream.write(to_text(estimate, today=today, width=terminal_columns(stream)))
        return
    from rich.console import Console
    from rich.text import Text

    answer = as_answer(estimate)
    console = Console(file=stream, highlight=False)
    colour = {"fits": "green", "tight": "yellow", "does_not_fit": "red"}.get(str(answer.get("verdict")), "white")
    console.print(Text(headline(answer), style=f"bold {colour}"))
    for table in _tables(answer, today):
        console.print(table_for_rich(table))
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
    vowels = "AEIO" if gpu[1:2].islower() else "AEFHILMNORSX8"  # by sound, a word or letters: an H100, a T4, a Radeon
    article = "an" if gpu[:1].upper() in vowels else "a"
    capacity = format_gib(memory["capacity_bytes"]).removesuffix(" GiB")
    loading = memory.get("load_device_bytes") or 0
    needed = max(memory["peak_device_bytes"], loading)
    does_not_load = loading > memory["capacity_bytes"]
    when = " while it is loaded" if does_not_load and needed == loading else ""
    sentence = f"does not fit: needs {format_gib(needed)}{when}, {article} {gpu} has {capacity}: "
    ways_out = []
    batch, length = answer.get("max_batch_size"), answer.get("max_length_that_fits")
    if does_not_load:
        ways_out.append("no batch size helps")
    elif batch:
        ways_out.append(f"largest batch that fits is {batch}")
    else:
        if batch == 0:
            ways_out.append("not even a batch of 1 fits")
        if length:
            ways_out.append(f"longest sequence that fits is {length} tokens")
    sentence += ", ".join([*ways_out, *_with_a_linear_for_each_expert(answer), smallest_card(answer)])
    stack = str(answer["job"].get("framework"))
    if is_not_modelled(stack):
        sentence += f"; counted as transformers: {stack} itself is not modelled and may need less"
    return sentence


def _with_a_linear_for_each_expert(answer: Mapping[str, Any]) -> Iterator[str]:
    """The older stack, where the job does not fit because its stacked experts stay at 16 bit and there it would."""
    own_defaults = {"dtype", "adapter_dtype", "optim"} & set(answer.get("assumed") or ()) | {
        "experts_implementation",
        "fused_loss",
    }
    job = {name: value for name, value in answer["job"].items() if name not in own_defaults}
    older = LAST_ON_TRANSFORMERS_4.get(str(job.get("framework")))
    is_moe = (answer.get("num_active_params") or 0) < (answer.get("num_params") or 0)
    if older is None or not is_moe or job.get("quantization") not in BITSANDBYTES:
        return
    version = job.get("framework_version")  # absent: the newest
    if version is not None and transformers_major(job["framework"], str(version)) < 5:
        return
    from costmodel.estimation import estimate  # only a job that does not fit needs it

    try:
        there = estimate({**job, "framework_version": older})
    except CostModelError:
        return  # it has settings that only the newer stack knows
    if there.verdict in ("fits", "tight"):
        yield (
            f"with {job['framework']} {older} it {'fits' if there.verdict == 'fits' else 'is tight'} "
            f"({format_gib(there.memory.peak_device_bytes)}: under transformers 4 each expert is a linear and quantised)"
        )


def smallest_card(answer: Mapping[str, Any]) -> str:
    """The smallest that holds the upper end of the interval; where none does, the smallest that holds the estimate."""
    job, memory = answer["job"], answer["memory"]
    peak, high = memory["peak_device_bytes"], memory.get("peak_device_bytes_high") or 0
    needs_bf16 = bool(job.get("bf16")) or job.get("dtype") == "bfloat16"
    card = smallest_gpu_that_holds(max(peak, high), needs_bf16=needs_bf16)
    if card is not None:
        return f"smallest card that holds it is {card.name} ({format_gib(card.memory_bytes)})"
    card = smallest_gpu_that_holds(peak, needs_bf16=needs_bf16)
    if card is not None:
        return f"smallest card that holds it is {card.name} ({format_gib(card.memory_bytes)}), and it is tight"
    return "no catalogued card holds it"


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
            interval_text(memory, "peak_device_bytes", format_gib)
            + (f" of {format_gib(memory['capacity_bytes'])}" if memory.get("capacity_bytes") else "")
            + (f", peak in {memory['peak_phase']}" if memory.get("peak_phase") else ""),
        ),
    ]
    if reason := _why_memory_may_be_far_off(answer):
        rows.append(("", reason))
    if (loading := memory.get("load_device_bytes")) is not None:
        rows.append(("while loading", format_gib(loading)))
    if answer.get("max_batch_size") is not None:
        length = answer.get("max_length_that_fits")
        rows.append(("largest that fits", _largest_text(answer["max_batch_size"], length)))
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
                f"{interval_text(answer, 'tokens_per_second', format_count)} tokens/s"
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
    rows.append(("total cost", interval_text(answer, "total_usd", format_usd)))
    if answer.get("spot"):
        rows.append(("with interruptions", _spot_text(answer["spot"])))
    rows.append(("price", _price_text(answer.get("price"), today)))
    if answer.get("calibration"):
        rows.append(("calibration", _calibration_text(answer["calibration"])))
    if answer.get("interval_level") is not None:
        rows.append(("intervals", f"{100 * answer['interval_level']:.0f} % of runs"))
    return rows


def _largest_text(batch_size: int, length: int | None) -> str:
    """``"batch 19, or 9,821 tokens"``: of a batch at the longest sequence, and of a sequence at the job's batch."""
    if batch_size:
        return f"batch {batch_size}" + (f", or {length:,} tokens" if length else "")
    return "no batch" + (f" at this length; {length:,} tokens a sequence at this batch" if length else "")


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
        return "the run does not get on: interruptions come before the next checkpoint"
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
    values = [f"{name}={setting_text(job.get(name))}" if name in job else str(name) for name in assumed]
    defaults_of = f" (defaults of {answer['defaults_of']})" if answer.get("defaults_of") else ""
    return [
        ("Warnings", [str(warning) for warning in answer.get("warnings") or []]),
        (f"Assumed{defaults_of}", [", ".join(values)] if values else []),
    ]


def setting_text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "+".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
