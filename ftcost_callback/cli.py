"""The console script ``ftcost``: the pre-flight commands of :mod:`costmodel.cli` and those that read run records.

A command here imports what it needs inside itself, so that ``ftcost estimate`` stays fast.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from costmodel.cli import app, run
from costmodel.cli_flags import COMMAND_SETTINGS, finite, job_fields_from_flags, with_job_flags
from costmodel.cli_run import FITS, WRONG_INPUT, say
from costmodel.errors import CostModelError

__all__ = ["app", "main"]

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="A run.jsonl, its _ftcost folder, a run's output_dir, or a checkpoint in it."),
]


@app.command("report", short_help="What recorded runs cost, as text or a page.")
def report_command(
    runs: _Runs,
    html: Annotated[
        Path | None, typer.Option("--html", "--out", metavar="FILE", help="Write one self-contained page (extra report).")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
    as_json: _Json = False,
) -> int:
    """What recorded runs cost, where the time went, and how that compares with the prediction. Several: side by side.

    A run that cannot be read does not cost the others: it is said at the end, with exit code 2.
    """
    from ftcost_callback.report_rows import summary_row, summary_text

    if open_page and html is None:
        raise CostModelError("--open needs the page to show: give --html FILE")
    read: list[Path] = []
    rows, unread = [], []
    for path in runs:
        try:
            rows.append(summary_row(path))
            read.append(path)
        except CostModelError as error:
            unread.append(str(error))
    if not rows:
        raise CostModelError("; ".join(unread))
    if html is not None:
        from ftcost_callback.report_html import write_report

        html = write_report(read, html).resolve()
    if as_json:
        from costmodel.report import to_json

        print(to_json(rows))
    elif html is None:
        print("\n".join(map(summary_text, rows)))
    if html is not None:
        print(f"ftcost: wrote {html}", file=sys.stderr)
        if open_page:
            import webbrowser

            if not webbrowser.open(html.as_uri()):
                print(f"ftcost: no browser could be started; open {html}", file=sys.stderr)
    for sentence in unread:
        say(sentence)
    return WRONG_INPUT if unread else FITS


@app.command("wandb-workspace", short_help="Save a W&B workspace with the live figures.")
def wandb_workspace_command(
    project: Annotated[str, typer.Argument(metavar="ENTITY/PROJECT", help="Where the runs are.")],
) -> int:
    """Save a W&B workspace with the figures of FTCostCallback: cost, throughput, time, GPU, experts (extra workspace).

    Some of its charts need FTCostCallback(detail="full").
    """
    from ftcost_callback.wandb_workspace import save_workspace

    print(save_workspace(project))
    return FITS


@app.command("calibrate", context_settings=COMMAND_SETTINGS, short_help="Fit the model to measured steps.")
@with_job_flags
def calibrate_command(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="A run.jsonl or the output_dir of a run, a batch sweep (.csv, .json), or wandb:ENTITY/PROJECT[/RUN].",
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FILE", help="Where to write it; default: where --calibration auto finds it."),
    ] = None,
    as_json: _Json = False,
    **flags: Any,
) -> int:
    """Fit the model to measured steps: a small file for --calibration. Flags override what was recorded of the job."""
    import datetime

    from costmodel import stored_calibrations
    from costmodel.calibration import fit
    from costmodel.version import ftcost_version
    from ftcost_callback.calibrating import measured_steps

    steps = measured_steps(runs, job_fields_from_flags(flags))
    fitted = fit(steps, created_on=datetime.date.today().isoformat(), ftcost_version=ftcost_version())
    path = out or stored_calibrations.default_path(fitted)
    stored_calibrations.write_calibration(path, fitted)
    if as_json:
        from costmodel.report import to_json

        print(to_json({"file": path, **fitted.to_dict()}))
    else:
        print(fitted.sentence())
    print(f"ftcost: wrote {path}; use it with --calibration {'auto' if out is None else path}", file=sys.stderr)
    return FITS


@app.command("probe", short_help="Measure the device at hand, for --gpu probe.")
def probe_command(
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="cpu|cuda|cuda:N", help="What to measure; default: the first card, else the CPU."),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", help="About how long to measure.", min=1, max=600, callback=finite)
    ] = 20.0,
    threads: Annotated[
        int | None,
        typer.Option("--threads", help="Threads of the CPU, as the training will have them; default: torch's.", min=1),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Where to write it; default: where --gpu probe finds it.")
    ] = None,
    as_json: _Json = False,
) -> int:
    """Measure the device at hand, in under a minute: products, bandwidth, cost per operator and more, for --gpu probe."""
    import datetime

    from costmodel import probes
    from ftcost_callback.probe import probe, summary

    found = probe(device, seconds=seconds, num_threads=threads)
    path = out or probes.default_path(found["name"])
    probes.write_probe(path, found, created_on=datetime.date.today().isoformat())
    if as_json:
        from costmodel.report import to_json

        print(to_json({"file": path, "device": found}))
    else:
        print(summary(found))
    print(f"ftcost: wrote {path}; use it with --gpu probe{f':{path}' if out is not None else ''}", file=sys.stderr)
    return FITS


@app.command("contribute", short_help="Make an anonymous row of a measured run.")
def contribute_command(
    runs: _Runs,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the rows as CSV, to add to the project.")
    ] = None,
) -> int:
    """Make an anonymous row of a measured run, in the columns of the accuracy data, and show it. Nothing is sent.

    Paths, names, data set, prices and dates stay out; so does the model's name, unless the catalogue has it.
    """
    from ftcost_callback.contributing import as_csv, contributed_row
    from ftcost_callback.run_file import read_run

    rows = [contributed_row(read_run(each)) for each in runs]
    print("\n\n".join("\n".join(f"{name:24}{value}" for name, value in row.items() if value) for row in rows))
    if out is None:
        print("ftcost: this is all that a row holds, and nothing was sent; --out FILE writes it as CSV", file=sys.stderr)
    else:
        out.write_text(as_csv(rows), encoding="utf-8")
        print(f"ftcost: wrote {out}; nothing was sent. To share it: docs/contributing_a_run.md", file=sys.stderr)
    return FITS


def main() -> None:
    """Entry point of the console script; the exit code is that of :func:`costmodel.cli_run.run`."""
    sys.exit(run(application=app))
