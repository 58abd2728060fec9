# ruff: noqa: RUF001 - dashes between numbers and the multiplication sign are meant
"""A run record as one self-contained HTML page, or several runs side by side.

The page opens from disk with no network: style, script and plotly.js (compressed: 2 MB in place of 5) stand inside, and
its content policy forbids loading anything else. Every name that comes from a record is escaped. What was not measured is
said, never drawn.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from costmodel.errors import CostModelError, MissingExtraError
from ftcost_callback.report_figures import Figure
from ftcost_callback.report_markup import range_html, section_html, short_path, table_html
from ftcost_callback.report_numbers import count, duration, gib, percent, usd
from ftcost_callback.report_reading import read_series
from ftcost_callback.report_run import ReportedRun, first_known, plan_ratio
from ftcost_callback.report_sections import run_html
from ftcost_callback.report_series import RunSeries, finite, totals


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Read the records ``runs`` (files or output folders) and write the page to ``out``, which is returned.

    Raises :class:`CostModelError` when there is nothing to show, a record cannot be read, or ``out`` cannot be written.
    """
    if not runs:
        raise CostModelError("no run to report on; give a run.jsonl or the output folder of a run")
    out = Path(out)
    if not out.parent.is_dir():
        raise CostModelError(f"cannot write {out}: there is no folder {out.parent}; make it first")
    page = render_report([read_series(path) for path in runs])
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise CostModelError(f"cannot write {out}: {error.strerror or error}") from None
    return out


def render_report(records: Sequence[RunSeries]) -> str:
    """The page for these runs. Raises :class:`MissingExtraError` when plotly is not installed."""
    plotly_js = _packed_plotly_js()
    figures: dict[str, Figure] = {}
    runs = [ReportedRun(record, totals(record), f"r{index}") for index, record in enumerate(records)]
    parts = [run_html(run, figures) for run in runs]
    if len(runs) == 1:
        body = f"<main>{parts[0]}</main>"
    else:
        body = f"<main>{_comparison_html(runs)}{_tabs_html(runs)}{_panels_html(runs, parts)}</main>"
    assets = resources.files("ftcost_callback") / "report_assets"
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    # "<" never stands in the data block, so that no name can close it.
    data = json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:\">",
            f"<title>{escape(title)} · ftcost report</title>",
            f"<style>{(assets / 'report.css').read_text(encoding='utf-8')}</style></head><body>",
            '<div class="page-head"><div class="brand">ftcost <span>run report</span></div>'
            '<button id="theme" class="needs-js" type="button" title="Light or dark">Dark</button></div>',
            body,
            f"<footer>Made from {escape(', '.join(short_path(run.series.path) for run in runs))}. "
            "Measured over predicted: 1.00 is on plan. The page needs no network.</footer>",
            f'<script type="text/plain" id="plotly">{plotly_js}</script>',
            f'<script type="application/json" id="figures">{data}</script>',
            f"<script>{(assets / 'report.js').read_text(encoding='utf-8')}</script>",
            "</body></html>\n",
        )
    )


def _packed_plotly_js() -> str:
    """plotly.js with its licence, gzip in base64, which the page's script unpacks. The package has no smaller build."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise MissingExtraError("plotly", "report", "the HTML report") from None
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), compresslevel=6, mtime=0)).decode("ascii")


def _comparison_html(runs: Sequence[ReportedRun]) -> str:
    head = ["Run", "Spent", "Final or projected", "Predicted", "Over predicted", "Wall time"]
    head += ["Steps", "Step time", "Tokens/s", "MFU", "Peak memory", "Device"]
    rows = [_comparison_row(number, run) for number, run in enumerate(runs, start=1)]
    explanation = "Tokens per second leave padding out. A dash: not measured in that run."
    return f"<h1>{len(runs)} runs side by side</h1>" + section_html("Comparison", explanation, table_html(head, rows))


def _comparison_row(number: int, run: ReportedRun) -> list[str]:
    predicted, (ratio, _) = finite(run.before.get("total_usd")), plan_ratio(run)
    tokens_per_second = run.tokens_per_second("num_non_padding_tokens")
    peak_bytes = first_known(run.peak_bytes("peak_reserved_bytes"), run.peak_bytes("peak_allocated_bytes"))
    device = run.series.session("device").get("name") or run.series.session("job").get("gpu")
    figures: list[tuple[float | None, Callable[[float], str]]] = [
        (run.totals.spent_usd, usd),
        (run.final_usd, usd),
        (predicted, usd),
        (ratio, "{:.2f}".format),
        (run.totals.wall_seconds, duration),
        (run.num_steps_done, "{:,}".format),
        (run.steady_step_seconds, duration),
        (tokens_per_second, count),
        (run.mfu, percent),
        (peak_bytes, gib),
    ]
    name = escape(run.name) + range_html(run.series.run_id or short_path(run.series.path))
    cells = [escape(text(value)) if value is not None else "–" for value, text in figures]
    return [f"{number}. {name}", *cells, escape(str(device)) if device else "–"]


def _tabs_html(runs: Sequence[ReportedRun]) -> str:
    buttons = ""
    for number, run in enumerate(runs, start=1):
        name = " · ".join(part for part in (f"{number}. {run.name}", run.series.run_id) if part)
        buttons += (
            f'<button type="button" role="tab" id="{run.id}-tab" aria-controls="{run.id}" '
            f'aria-selected="{str(number == 1).lower()}">{escape(name)}</button>'
        )
    return f'<div class="tabs needs-js" role="tablist" aria-label="Runs">{buttons}</div>'


def _panels_html(runs: Sequence[ReportedRun], parts: Sequence[str]) -> str:
    return "".join(
        f'<div id="{run.id}" role="tabpanel" aria-labelledby="{run.id}-tab">{part}</div>'
        for run, part in zip(runs, parts, strict=True)
    )
