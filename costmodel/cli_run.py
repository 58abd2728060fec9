"""One command line from its words to an exit code: the application, its errors, what every command prints with.

Exit codes: 0 fits or tight, 1 internal error, 2 wrong input (one line on stderr, nothing on stdout), 3 does not fit, 4 over
``--budget-usd`` or ``--deadline-hours``, 130 interrupted. Data goes to stdout, messages to stderr.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import io
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Annotated, Any, Final, TextIO

import typer
from pydantic import ValidationError

from costmodel.errors import CostModelError, one_line
from costmodel.specs import validation_message
from costmodel.version import ftcost_version

FITS, INTERNAL_ERROR, WRONG_INPUT, DOES_NOT_FIT, OVER_LIMIT, INTERRUPTED = 0, 1, 2, 3, 4, 130

app = typer.Typer(
    name="ftcost",
    help="What an LLM fine-tuning run will cost: memory, hours, dollars. No GPU, no network.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long flags off at 80 columns
)


# --- what commands print with -----------------------------------------------------------------------------------------


def today() -> datetime.date:
    return datetime.date.today()


def say(message: str, stream: TextIO | None = None) -> None:
    """A message that nobody reads any more is dropped: the exit code says the same."""
    try:
        print(f"ftcost: {one_line(message)}", file=stream or sys.stderr, flush=True)
    except BrokenPipeError:
        _stop_writing(2)


@contextlib.contextmanager
def while_read() -> Iterator[None]:
    """Around what prints an answer: where ``head`` or ``less`` closes the pipe the rest is dropped, and the command goes on.

    So the exit code is the verdict's, whatever became of the text.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _stop_writing(1)


TOO_LARGE: Final = "a number of the job or of the model's config is too large to compute with"


def show_table(table: Any, markdown: bool = False) -> None:
    from costmodel.tables import print_table, table_as_markdown

    if markdown:
        print(table_as_markdown(table))
    else:
        print_table(table, sys.stdout)


def print_json(value: Any) -> int:
    from costmodel.report import to_json

    print(to_json(value))
    return FITS


# --- running ----------------------------------------------------------------------------------------------------------


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ftcost {ftcost_version()}")
        raise typer.Exit()


@app.callback(context_settings={"help_option_names": ["--help", "-h"]})
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def run(arguments: list[str] | None = None, *, application: typer.Typer = app, errors: TextIO | None = None) -> int:
    """The exit code of one command line. Errors are one line on stderr; ``FTCOST_DEBUG=1`` adds the traceback."""
    _prepare_streams()
    stream = errors or sys.stderr
    if sys.stdout is None:
        say("standard output is closed: there is nowhere to write the answer", stream)
        return WRONG_INPUT
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] in ("--help", "-h"):
        application.info.epilog = f"ftcost {ftcost_version()}"
    try:
        code = _with_the_named_command(application, arguments)(args=arguments, prog_name="ftcost", standalone_mode=False)
        with while_read():
            pass  # what is still in the buffer
        return code if isinstance(code, int) else FITS
    except (CostModelError, ValidationError) as error:
        say(error_text(error, describes_gpus=words[:1] == ["estimate"]), stream)
        return WRONG_INPUT
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        _stop_writing(1)
        return FITS
    except OverflowError:
        say(TOO_LARGE, stream)
        return WRONG_INPUT
    except OSError as error:
        where = f" {error.filename}" if error.filename else " the answer"
        say(f"cannot {'use' if error.filename else 'write'}{where}: {error.strerror or error}", stream)
        _stop_writing(1)
        return WRONG_INPUT
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # typer met it first
            _stop_writing(1)
            return FITS
        raise
    except Exception as error:
        # Typer before 0.20 raises click's exceptions, later ones its own copies: both know how to print themselves.
        usage_message = getattr(error, "format_message", None)
        if usage_message is not None and type(error).__name__ == "NoArgsIsHelpError":  # the whole help, as it is
            print(usage_message(), file=stream)
            return WRONG_INPUT
        if usage_message is not None:
            say(usage_message(), stream)
            return int(getattr(error, "exit_code", WRONG_INPUT))
        say(f"internal error: {type(error).__name__}: {error} (FTCOST_DEBUG=1 shows where)", stream)
        if os.environ.get("FTCOST_DEBUG"):
            traceback.print_exc(file=stream)
        return INTERNAL_ERROR


def error_text(error: Exception, *, describes_gpus: bool = True) -> str:
    """The error's message; where it names fields of a job that are flags by other names, those.

    ``describes_gpus``: whether the command has flags that describe a GPU.
    """
    from costmodel.gpu_catalog import DESCRIBE_GPU
    from costmodel.price_catalog import GIVE_PRICE

    text = validation_message(error) if isinstance(error, ValidationError) else str(error)
    if describes_gpus:
        text = text.replace(DESCRIBE_GPU, f"{_DESCRIBE_GPU_FLAGS} ({DESCRIBE_GPU})")
    return text.replace(GIVE_PRICE, "or give the price: --usd-per-gpu-hour")


_DESCRIBE_GPU_FLAGS: Final = "--gpu-memory-gib 24 --gpu-bandwidth-gb-per-second 1000 --gpu-bf16-tflops 150"


def _prepare_streams() -> None:
    """Characters that a terminal's encoding lacks are escaped, not refused; a closed stderr takes messages in silence."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as the process


def _with_the_named_command(application: typer.Typer, arguments: list[str] | None) -> typer.Typer:
    """The application with only the command that the first argument names: the flags of the others take time to build."""
    first = next(iter(sys.argv[1:] if arguments is None else arguments), None)
    named = [command for command in application.registered_commands if command.name == first]
    if not named:
        return application
    alone = copy.copy(application)
    alone.registered_commands = named
    return alone


def _stop_writing(descriptor: int) -> None:
    """Standard output (1) or error (2) leads nowhere from here on, for what Python flushes at its end too."""
    nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as the process
    os.dup2(nowhere.fileno(), descriptor)
    if descriptor == 1:
        sys.stdout = nowhere
    else:
        sys.stderr = nowhere
