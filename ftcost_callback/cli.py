"""The console script ``ftcost``: the pre-flight commands of :mod:`costmodel.cli` and those that read run records.

A command here imports what it needs inside itself, so that ``ftcost estimate`` stays fast.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from costmodel.cli import FITS, app, run
from costmodel.errors import CostModelError

__all__ = ["app", "main"]

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("report")
def report_command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="A run.jsonl, its _ftcost folder, or the output_dir of a run."),
    ],
    html: Annotated[
        Path | None, typer.Option("--html", "--out", metavar="FILE", help="Write one self-contained page (extra report).")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
    as_json: _Json = False,
) -> int:
    """What recorded runs cost, where the time went, and how that compares with the prediction. Several: side by side."""
    from ftcost_callback.report_rows import summary_row, summary_text

    if open_page and html is None:
        raise CostModelError("--open needs the page to show: give --html FILE")
    rows = [summary_row(each) for each in runs]
    if html is not None:
        from ftcost_callback.report_html import write_report

        html = write_report(runs, html).resolve()
    if as_json:
        from costmodel.report import to_json

        print(to_json(rows))
    elif html is None:
        print("\n".join(summary_text(row) for row in rows))
    if html is not None:
        print(f"ftcost: wrote {html}", file=sys.stderr)
        if open_page:
            import webbrowser

            if not webbrowser.open(html.as_uri()):
                print(f"ftcost: no browser could be started; open {html}", file=sys.stderr)
    return FITS


@app.command("wandb-workspace")
def wandb_workspace_command(
    project: Annotated[str, typer.Argument(metavar="ENTITY/PROJECT", help="Where the runs are.")],
) -> int:
    """Save a W&B workspace with the figures of FTCostCallback: cost, throughput, time, GPU, experts (extra workspace).

    Some of its charts need FTCostCallback(detail="full").
    """
    from ftcost_callback.wandb_workspace import save_workspace

    print(save_workspace(project))
    return FITS


# `calibrate` is added here, with @app.command("calibrate"); it can read W&B runs with wandb_reader.read_wandb_run.


def main() -> None:
    """Entry point of the console script; the exit code is that of :func:`costmodel.cli.run`."""
    sys.exit(run(application=app))
