"""What the trackers that take more than scalars are given, as plain values: config, summary, expert histograms."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ftcost_callback.metrics import EXPERT_HISTOGRAM_KEY, PREFIX, Detail
from ftcost_callback.records import ExpertLoad, Session, Summary

MAX_HISTOGRAM_LAYERS: Final[dict[Detail, int]] = {"default": 16, "full": 64}
"""Histograms of one row, evenly spread over the layers: 128 experts are 2.5 KB a layer."""
MAX_HISTOGRAM_BINS: Final = 512  # more are refused by wandb.Histogram and trackio.Histogram
_MAX_CONFIG_ENTRIES: Final = 64  # of one list or mapping; a histogram of lengths has thousands

Histogram = tuple[list[float], list[int]]
"""(share of the tokens in each bin, edges of the bins in expert numbers)."""


def session_config(session: Session) -> dict[str, Any]:
    """What a run is and what it runs on, without what is not known."""
    config = {
        "run_id": session.run_id,
        "session_index": session.session_index,
        "started_at": session.started_at,
        "max_steps": session.max_steps,
        "model": session.model,
        "device": session.device,
        "price": session.price,
        "budget": session.budget,
        "versions": session.versions,
        "job": session.job,
    }
    return {name: value for name, value in config.items() if value is not None}


def bounded(value: Any) -> Any:
    """A copy for a tracker's config.

    A job's ``lengths`` of many entries become their mean and maximum, so that the job stays one that can be estimated;
    any other mapping or list that is too long to be read becomes a note of its length.
    """
    if isinstance(value, Mapping):
        if len(value) > _MAX_CONFIG_ENTRIES:
            return f"({len(value)} entries)"
        return {
            str(key): _bounded_lengths(item) if key == "lengths" else bounded(item)
            for key, item in value.items()
            if item is not None
        }
    if isinstance(value, (list, tuple)):
        return f"({len(value)} entries)" if len(value) > _MAX_CONFIG_ENTRIES else [bounded(item) for item in value]
    return value


def _bounded_lengths(lengths: Any) -> Any:
    if not isinstance(lengths, Mapping):
        return bounded(lengths)
    values, histogram = lengths.get("values"), lengths.get("histogram")
    if isinstance(values, Sequence) and len(values) > _MAX_CONFIG_ENTRIES:
        return {"mean": math.fsum(values) / len(values), "max": max(values)}
    if isinstance(histogram, Mapping) and len(histogram) > _MAX_CONFIG_ENTRIES:
        counted = [(float(length), float(count)) for length, count in histogram.items()]
        mean = math.fsum(length * count for length, count in counted) / math.fsum(count for _, count in counted)
        return {"mean": mean, "max": round(max(length for length, _ in counted))}
    return bounded(lengths)


def summary_values(summary: Summary) -> dict[str, Any]:
    """``ftcost/summary/<field>`` -> value; nested fields joined by slashes."""
    return {f"{PREFIX}summary/{name}": value for name, value in _flat(summary.to_row()) if name != "type"}


def closing_values(summary: Summary) -> dict[str, float]:
    """What the bill's own keys come to at the end, for a tracker that shows the last value of each: the last report is from
    before the last evaluation and the last save."""
    if summary.spent_usd is None:
        return {}
    names = ("projected_usd", "projected_usd_low", "projected_usd_high") if summary.status == "finished" else ()
    return {f"{PREFIX}cost/{name}": summary.spent_usd for name in ("spent_usd", *names)}


def expert_histograms(load: Any, detail: Detail) -> dict[str, Histogram]:
    """Key -> histogram of the share of tokens by expert, one for each shown layer; empty without an expert load."""
    if not isinstance(load, ExpertLoad) or load.status == "not_recorded":
        return {}
    names = _layer_labels(load.layer_names, len(load.tokens_per_expert))
    histograms: dict[str, Histogram] = {}
    for index in _evenly_spread(len(load.tokens_per_expert), MAX_HISTOGRAM_LAYERS[detail]):
        tokens = load.tokens_per_expert[index]
        total = sum(tokens)
        if total <= 0:
            continue
        per_bin = -(-len(tokens) // MAX_HISTOGRAM_BINS)
        edges = [*range(0, len(tokens), per_bin), len(tokens)]
        shares = [sum(tokens[start : start + per_bin]) / total for start in edges[:-1]]
        histograms[EXPERT_HISTOGRAM_KEY.format(layer=names[index])] = (shares, edges)
    return histograms


def _layer_labels(names: Sequence[str], count: int) -> list[str]:
    """``layer_07`` from the layer's number where that tells the layers apart, else the module's name."""
    if len(names) != count:
        return [f"layer_{index:02d}" for index in range(count)]
    numbers = [match.group(1) if (match := re.search(r"\.(\d+)(?:\.|$)", name)) else None for name in names]
    if None in numbers or len(set(numbers)) != count:
        return list(names)
    return [f"layer_{int(number or 0):02d}" for number in numbers]


def _evenly_spread(count: int, most: int) -> list[int]:
    """Indices of at most ``most`` of ``count`` items, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            flat += _flat(value, f"{prefix}{name}/")
        else:
            flat.append((prefix + name, value))
    return flat
