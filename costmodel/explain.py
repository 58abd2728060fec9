"""Where each value of a job came from, which keys of a file were used, and what a data set looks like: as tables.

The sources, in the order in which they win: a flag, the data set that was counted, a key of the file, the default of the
tool whose file it is, the default of the framework, the environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from costmodel.formats import format_count, format_percent
from costmodel.specs import Job
from costmodel.tables import Table

if TYPE_CHECKING:
    from costmodel.dataset import DatasetEffects, DatasetLengths
    from costmodel.importers import ImportedJob

_BAR_WIDTH: Final = 40
_NUM_BARS: Final = 12
_VALUE_WIDTH: Final = 60


@dataclass(frozen=True, slots=True)
class Explained:
    """One field of the resolved job: its value, and in words where it came from."""

    field: str
    value: Any
    source: str


def sources(
    imported: ImportedJob | None,
    flags: Iterable[str] = (),
    dataset: DatasetLengths | None = None,
    dataset_decided: Iterable[str] = (),
) -> dict[str, str]:
    """Job field -> where it came from, for every field that something decided before the framework's defaults."""
    found = {name: origin.text for name, origin in imported.origins.items()} if imported is not None else {}
    if dataset is not None:
        how = "estimated from the characters of" if dataset.lengths_are_estimated else "counted in"
        found.update(dict.fromkeys(dataset_decided, f"{how} {dataset.file}"))
    found.update({name: f"flag --{name.replace('_', '-')}" for name in flags})
    return found


def explain(answer: Mapping[str, Any], given: Mapping[str, str]) -> list[Explained]:
    """Every field of the answer's resolved job, then the price, with its source. ``given``: from :func:`sources`."""
    assumed, framework = set(answer.get("assumed") or ()), answer.get("defaults_of") or "the framework"
    explained = []
    for field, value in answer["job"].items():
        if field in given:
            source = given[field]
        elif field in assumed:
            source = f"default of {framework}"
        elif field in Job.model_fields and value == Job.model_fields[field].get_default(call_default_factory=True):
            source = "not given"
        else:
            source = "follows from the others"
        explained.append(Explained(field, value, source))
    price = answer.get("price")
    if price and "usd_per_gpu_hour" not in answer["job"]:
        source = str(price.get("source") or "the catalogue of dated prices")
        explained.append(Explained("usd_per_gpu_hour", price["usd_per_gpu_hour"], source))
    return explained


def explanation_to_dict(explained: Iterable[Explained], imported: ImportedJob | None) -> dict[str, Any]:
    """For ``--json``: ``{"values": {field: {"value", "from"}}, "tool", "keys": {"understood", "harmless", "unknown"}}``."""
    return {
        "values": {each.field: {"value": each.value, "from": each.source} for each in explained},
        "tool": imported.tool if imported is not None else None,
        "keys": {
            "understood": list(imported.understood) if imported is not None else [],
            "harmless": list(imported.harmless) if imported is not None else [],
            "unknown": list(imported.unknown) if imported is not None else [],
        },
    }


def explanation_tables(explained: Iterable[Explained], imported: ImportedJob | None) -> list[Table]:
    """The values with their sources; for a file, how its keys were classed."""
    rows = tuple((each.field, value_text(each.field, each.value), each.source) for each in explained)
    tables = [Table("Where each value came from", rows, ("field", "value", "from"))]
    if imported is not None:
        classes = (("understood", imported.understood), ("harmless", imported.harmless), ("unknown", imported.unknown))
        keys = tuple((name, f"{len(listed)}", ", ".join(listed)) for name, listed in classes)
        kind = "job file" if imported.tool == "job" else imported.tool
        tables.append(Table(f"Keys of {imported.where}, read as {kind}", keys, ("class", "keys", ""), numeric=(1,)))
    return tables


def value_text(field: str, value: Any) -> str:
    """A value on one line; long ones by what they are."""
    if field == "lengths" and isinstance(value, Mapping) and isinstance(value.get("histogram"), Mapping):
        lengths = [int(length) for length in value["histogram"]]
        return f"{len(lengths):,} lengths, {min(lengths):,} to {max(lengths):,} tokens"
    if field == "model" and isinstance(value, Mapping):
        return f"inline {value.get('model_type', 'config')}"
    if field == "gpu" and isinstance(value, Mapping):
        return str(value.get("name", "described GPU"))
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    return text if len(text) <= _VALUE_WIDTH else text[: _VALUE_WIDTH - 3] + "..."


# --- data sets --------------------------------------------------------------------------------------------------------


def dataset_tables(dataset: DatasetLengths, effects: DatasetEffects) -> list[Table]:
    """What a data set's lengths are and do, and their picture."""
    how = "estimated from characters" if dataset.lengths_are_estimated else f"counted with {dataset.tokenizer}"
    if dataset.format == "tokens":
        how = "counted: tokenised already"
    cut_share = effects.num_cut / dataset.num_samples
    rows = [
        ("samples", f"{dataset.num_samples:,} ({dataset.format})"),
        ("tokens", f"{format_count(dataset.num_tokens)}, {how}"),
        ("a sample", f"{format_count(dataset.mean_tokens)} tokens on average, at most {dataset.longest_tokens:,}"),
        ("cut or dropped", f"{effects.num_cut:,} above {effects.max_length:,} tokens ({format_percent(cut_share)})"),
        ("padding", f"{format_percent(effects.share_of_padding)} of the tokens at batch size {effects.batch_size}"),
    ]
    if dataset.supervised_fraction is not None:
        rows.insert(3, ("in completions", format_percent(dataset.supervised_fraction)))
    rows += [(f"with {name}", f"{format_percent(saved)} fewer tokens") for name, saved in effects.saved_by.items()]
    return [Table(f"Data set {dataset.file}", tuple(rows)), length_picture(dataset.histogram)]


def length_picture(histogram: Mapping[int, float], num_bars: int = _NUM_BARS) -> Table:
    """Bars of equal width in tokens; the last one holds everything above the 99th percentile as well."""
    total, seen, high = sum(histogram.values()), 0.0, 1
    for length in sorted(histogram):
        seen, high = seen + histogram[length], length
        if seen >= 0.99 * total:
            break
    width = _round_width(high / num_bars)
    counts = [0.0] * max(1, min(num_bars, -(-high // width)))
    for length, count in histogram.items():
        counts[min((length - 1) // width, len(counts) - 1)] += count
    most = max(counts)
    rows = []
    for index, count in enumerate(counts):
        last = index == len(counts) - 1 and max(histogram) > (index + 1) * width
        label = f"{index * width + 1:,} or more" if last else f"{index * width + 1:,} to {(index + 1) * width:,}"
        # A bar that is not empty shows.
        bar = "#" * max(1 if count else 0, round(_BAR_WIDTH * count / most))
        rows.append((label, f"{count:,.0f}", format_percent(count / total), bar))
    return Table("Lengths", tuple(rows), ("tokens", "samples", "share", ""), numeric=(0, 1, 2))


def _round_width(width: float) -> int:
    """The next of 1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100 ... : widths that people read."""
    powers_of_two = [1 << power for power in range(31)]
    decimals = [step * unit for unit in (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000) for step in (1, 2, 5)]
    return next(candidate for candidate in sorted({*powers_of_two, *decimals}) if candidate >= width)
