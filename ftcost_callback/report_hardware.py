"""The report's sections on the machine: memory against the card, GPU samples, expert load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from ftcost_callback.report_breakdown import balance_html
from ftcost_callback.report_figures import Figure, heat_figure, layer_label, load_figure, power_figure, use_figure
from ftcost_callback.report_markup import absent_html, chart_html, legend_html, range_text, section_html, table_html
from ftcost_callback.report_numbers import gib, percent
from ftcost_callback.report_run import ReportedRun, first_known, predicted_memory
from ftcost_callback.report_series import finite

MEMORY_NAMES: Final = {
    "weights_bytes": "Weights",
    "adapters_bytes": "Adapters",
    "gradients_bytes": "Gradients",
    "optimizer_bytes": "Optimizer",
    "activations_bytes": "Activations",
    "logits_bytes": "Logits",
    "temporary_bytes": "Temporary",
    "context_bytes": "Device context",
}


# Bits of nvmlClocksEventReasons that slow a card down. Source: nvml.h, "Clocks event reasons".
THROTTLE_NAMES: Final = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "temperature (driver)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


def memory_html(run: ReportedRun) -> str:
    prediction = run.before or run.tokens_seen
    memory = predicted_memory(prediction)
    parts = [(f"part-{place}", name, memory.get(key, 0.0)) for place, (key, name) in enumerate(MEMORY_NAMES.items(), 1)]
    parts = [part for part in parts if part[2] > 0]
    named = sum(num_bytes for _, _, num_bytes in parts)
    predicted = memory.get("peak_device_bytes") or named
    if parts and predicted > named:
        parts.append(("part-9", "Held, not in use", predicted - named))
    measured = [
        (text, num_bytes)
        for text, num_bytes in (
            ("Reserved", run.peak_bytes("peak_reserved_bytes")),
            ("Allocated", run.peak_bytes("peak_allocated_bytes")),
            ("Device, in use", max(run.series.measured("memory_used_bytes"), default=None)),
        )
        if num_bytes
    ]
    content = ""
    if parts or measured:
        content += _memory_gauge(run, memory, parts, measured)
    if not measured:
        said = run.reason("memory", "gpu", "nvml")
        content += absent_html(said or "Peak memory was not measured: torch keeps no peaks on this device.")
    if parts:
        rows = [
            [f'<span class="swatch {part}"></span>{name}', gib(num_bytes), percent(num_bytes / predicted)]
            for part, name, num_bytes in parts
        ]
        total = ["On the device", gib(predicted), percent(1.0)]
        content += table_html(["Predicted at the peak", "Size", "Share"], rows, total=total)
    elif measured:
        content += absent_html("There is no prediction in this record to split the peak by category.")
    memory_record = prediction.get("memory")
    phase = memory_record.get("peak_phase") if isinstance(memory_record, dict) else None
    expected = f", which expected it in the {escape(str(phase))} phase" if phase else ""
    explanation = f"Peak of the run against the prediction{expected}." if parts else ""
    return section_html("Memory", explanation, content)


def _memory_gauge(
    run: ReportedRun,
    memory: Mapping[str, float],
    parts: Sequence[tuple[str, str, float]],
    measured: Sequence[tuple[str, float]],
) -> str:
    """Bars on one scale: predicted by category with its interval, measured, and the card's capacity."""
    capacity = first_known(memory.get("capacity_bytes"), finite(run.series.session("device").get("memory_bytes")))
    low, high = memory.get("peak_device_bytes_low", 0.0), memory.get("peak_device_bytes_high", 0.0)
    named = sum(num_bytes for _, _, num_bytes in parts)
    full = 1.02 * max([capacity or 0.0, named, high, *(num_bytes for _, num_bytes in measured)])

    def at(num_bytes: float) -> str:
        return f"{100 * num_bytes / full:.2f}%"

    def row(text: str, segments: str, more: str) -> str:
        track = f'<div class="track"><div class="bar">{segments}</div>{more}{limit}</div>'
        return f'<div class="row"><div>{text}</div>{track}</div>'

    limit = f'<i class="limit" style="left:{at(capacity)}"></i>' if capacity else ""
    rows = ""
    if parts:
        segments = "".join(
            f'<i class="{part}" style="width:{at(num_bytes)}" title="{name}: {gib(num_bytes)}"></i>'
            for part, name, num_bytes in parts
        )
        span = f'title="{escape(range_text(low, high, gib))}"'
        interval = f'<i class="whisker" style="left:{at(low)};width:{at(high - low)}" {span}></i>' if high > low > 0 else ""
        rows += row("Predicted", segments, interval)
    for text, num_bytes in measured:
        inside = num_bytes > 0.5 * full
        place = f"right:{at(full - num_bytes)}" if inside else f"left:{at(num_bytes)}"
        label = f'<span class="value{" inside" if inside else ""}" style="{place}">{gib(num_bytes)}</span>'
        rows += row(text, f'<i class="part-1" style="width:{at(num_bytes)}"></i>', label)
    if capacity:
        mark = f'<span style="left:{at(capacity)}">capacity {gib(capacity)}</span>'
        rows += f'<div class="row"><div></div><div class="axis">{mark}</div></div>'
    return f'<div class="gauge">{rows}</div>'


def gpu_html(run: ReportedRun, figures: dict[str, Figure]) -> str:
    content = ""
    for name, title, found in (("use", "In use", use_figure(run)), ("power", "Power", power_figure(run))):
        if found is not None:
            figure, legend = found
            content += f"<h3>{title}, running median</h3>{legend_html(legend)}"
            content += chart_html(run, name, figure, figures, f"{title} of the GPU over steps", low=True)
    if not content:
        said = run.reason("gpu", "nvml", "nvidia")
        return section_html(
            "GPU", "", absent_html(said or "The record holds no GPU samples: no NVIDIA driver, or switched off.")
        )
    facts = []
    energy = first_known(run.series.summary_value("energy_joules"), run.series.total("energy_joules"))
    if energy:
        facts.append(f"Energy: {energy / 3.6e6:.3g} kWh.")
    throttled = [int(value) for value in run.series.measured("throttle_reasons")]
    for bit, name in THROTTLE_NAMES.items():
        slowed = sum(1 for value in throttled if value & bit)
        if slowed:
            facts.append(f"Slowed down by {name} in {percent(slowed / run.series.num_step_rows)} of the steps.")
    return section_html("GPU", " ".join(facts), content)


def experts_html(run: ReportedRun, figures: dict[str, Figure]) -> str:
    experts = run.series.experts
    reasons = "; ".join(experts.reasons)
    if not experts.frames:
        why = reasons or run.reason("expert", "router")
        if not why and finite(run.series.session("model").get("num_experts")) is None:
            why = "No expert loads in this record: the model is dense, or they were switched off."
        return section_html(
            "Expert load", "", absent_html(why or "The model has experts, but their loads were not recorded.")
        )
    figure = heat_figure(run)
    last = len(figure["frames"]) - 1
    slider = (
        f'<div class="slider needs-js"><label for="{run.id}-time">Time</label><input type="range" id="{run.id}-time" '
        f'min="0" max="{last}" value="{last}" step="1" data-chart="{run.id}-experts"><output></output></div>'
    )
    heat = "<h3>Tokens of each expert over the mean of its layer</h3>" + slider
    heat += chart_html(run, "experts", figure, figures, "Expert load by layer and expert")
    curves, legend = load_figure(run)
    curve = "<h3>Busiest expert over the mean of its layer</h3>" + legend_html(legend)
    curve += chart_html(run, "load", curves, figures, "Largest over mean expert load over steps")
    curve += "<h3>Most uneven layers at the end</h3>" + _uneven_layers(run)
    partial = absent_html(f"Partly recorded: {reasons}") if reasons else ""
    if run.series.experts.remark is not None:
        partial += absent_html(f"{run.series.experts.remark}.".capitalize())
    return section_html(
        "Expert load",
        "1 × is an even share. Where experts run side by side, the busiest one sets the pace.",
        f'{partial}{balance_html(run)}<div class="inner-columns"><div>{heat}</div><div>{curve}</div></div>',
    )


def _uneven_layers(run: ReportedRun) -> str:
    """The layers of the last frame with the largest load over their mean."""
    names, (_, _, tokens) = run.series.experts.layer_names, run.series.experts.frames[-1]
    layers = [(max(layer) * len(layer) / sum(layer), row, layer) for row, layer in enumerate(tokens) if sum(layer) > 0]
    rows = []
    for largest, row, layer in sorted(layers, key=lambda one: -one[0])[:5]:
        least = min(layer)
        rows.append(
            [
                escape(layer_label(names, row)),
                f"expert {layer.index(max(layer))}",
                f"{largest:.2f} ×",
                f"expert {layer.index(least)}",
                f"{least * len(layer) / sum(layer):.2f} ×",
            ]
        )
    return table_html(["Layer", "Busiest", "Load", "Idlest", "Load"], rows)
