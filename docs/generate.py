"""Writes what is made from code: docs/metrics.md, docs/commands.md and the picture of an estimate.

python docs/generate.py            # write them
python docs/generate.py --check    # exit code 1 if a page is out of date
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

from typer import Context
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from costmodel import estimate
from costmodel.plots import estimate_svg
from ftcost_callback.cli import app
from ftcost_callback.metrics import BY_COST_PREFIX, COST_AXIS_KEY, METRICS, PREFIX, TIME_AXIS_KEY

DOCS = Path(__file__).parent
_NOTE = "<!-- made by docs/generate.py: change the code, not this page -->\n"


_TOKENS_OF_METRICS = """
## What MFU is

Model FLOPs of the tokens that were computed, padding inside, over the seconds of their steps and the device's dense peak
in the type of its matrix products. Attention counts the full square of a sequence. Not counted: recomputation (`hfu`
holds it), the gradient of frozen weights, experts that were not chosen, embedding look-ups. Under TRL's trainers that
compute logits at the supervised positions only, the head counts those only. Pauses and rollouts are no seconds of a step.
In the run record, `mfu` and `hfu` stand in the rows of `step` at which a report was made, for the steps since the report
before, and `mfu` of the run in the `summary`. How the FLOPs are counted: [Formulas](formulas.md#flops).

## Which tokens are counted

Those of the forwards of a step's own batches, in training mode and with gradients on, from the step's begin to the
optimizer's update. Not counted: evaluations, `generate`, forwards between two steps, and what `torch.export`,
`torch.jit.trace` or a transform of `torch.func` (`grad`, `vmap`) makes of the model.

* **Two forwards of one batch** (R-drop, contrastive losses, the second pass of SAM inside `optimizer.step`) are two: the
  tokens are what was computed, twice those of the data set. Tokens a second is then the speed of the machine, not of the
  data.
* **A step without a forward that was seen** (its batch was skipped, or its gradients come from `torch.func`) has no token
  count. Sums are over the other steps, and `num_uncounted_steps` of the summary says how many are left out. Such a step
  stands in the bill, and is left out of speeds and of the projection.
* **Padding** is known from an `attention_mask` of (rows, length), given by name or by position, or from the positions of
  packed rows. A mask of another shape (four dimensions, one for each kind of layer) says who attends to whom: computed
  tokens are counted, and the real ones are absent.
"""


def metrics_page() -> str:
    """Every figure a tracker may get, by section of its key."""
    sections: dict[str, list[str]] = defaultdict(list)
    for metric in METRICS:
        section = metric.key.removeprefix(PREFIX).split("/")[0]
        shown = "always" if metric.default else '`detail="full"`'
        sections[section].append(f"| `{metric.key}` | {metric.unit} | {_cell(metric.meaning)} | {shown} |\n")
    parts = [
        "# Metrics\n\n",
        _NOTE,
        "\nWhat a tracker is shown, at each log of the Trainer, on the axis `train/global_step`. Keys are a contract: more\n"
        "may come, none changes its name. What is not known is absent, never 0. [Trackers](trackers.md) says how they get\n"
        "there; [the run record](run_record.md) holds more than any tracker.\n",
    ]
    for section, rows in sections.items():
        parts += [f"\n## `{PREFIX}{section}/`\n\n", "| key | unit | meaning | shown |\n|---|---|---|---|\n", *rows]
    parts += [
        "\n## Not single figures\n\n",
        f"`{PREFIX}moe/load/layer_NN`: each expert's share of a layer's tokens, a histogram. `{BY_COST_PREFIX}loss` and\n"
        f"`{BY_COST_PREFIX}eval_loss`: the Trainer's losses once more, on the axis `{COST_AXIS_KEY}`, or `{TIME_AXIS_KEY}`\n"
        "where there is no price.\n",
        _TOKENS_OF_METRICS,
    ]
    return "".join(parts)


def commands_page() -> str:
    """Every command with its arguments and flags; the flags of the job, which several commands share, once at the end."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    context = Context(group, info_name="ftcost")
    commands: dict[str, TyperCommand] = dict(group.commands)
    take_the_job = [command for command in commands.values() if any(each.name == "model" for each in _options(command))]
    shared = set.intersection(*({_names(each) for each in _options(command)} for command in take_the_job))
    parts = [
        "# Commands\n\n",
        _NOTE,
        "\nEach command prints data to stdout and messages to stderr. [In CI](ci.md) lists the exit codes.\n",
    ]
    of_the_job: dict[str, str] = {}
    for name, command in commands.items():
        arguments = " ".join(
            name if each.required else f"[{name}]"
            for each in command.params
            if isinstance(each, TyperArgument)
            for name in [each.metavar or each.human_readable_name]
        )
        parts.append(
            f"\n## `ftcost {name}`\n\n{_paragraphs(command.help or '')}\n\n    ftcost {name} {arguments}".rstrip() + "\n"
        )
        own = []
        for option in _options(command):
            if command in take_the_job and _names(option) in shared:
                of_the_job.setdefault(_names(option), _row(option, context))
            else:
                own.append(_row(option, context))
        if own:
            parts += ["\n| flag | |\n|---|---|\n", *own]
        if command in take_the_job:
            parts.append("\nAnd the [flags of the job](#flags-of-the-job).\n")
    parts += [
        "\n## Flags of the job\n\n",
        "Each field of [the job](job.md) is a flag; a flag overrides the file.\n\n",
        "| flag | |\n|---|---|\n",
        *of_the_job.values(),
    ]
    return "".join(parts)


def _options(command: TyperCommand) -> list[TyperOption]:
    return [each for each in command.params if isinstance(each, TyperOption) and not each.hidden]


def _names(option: TyperOption) -> str:
    return " / ".join([", ".join(option.opts), *([", ".join(option.secondary_opts)] if option.secondary_opts else [])])


def _row(option: TyperOption, context: Context) -> str:
    names, text = option.get_help_record(context) or (_names(option), option.help or "")
    return f"| `{_cell(names)}` | {_cell(text)} |\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(each.split()) for each in text.split("\n\n"))


def estimate_picture() -> str:
    """The picture of the README: the job of examples/job.json on one card."""
    return estimate_svg(
        estimate(json.loads((DOCS.parent / "examples" / "job.json").read_text()), gpu="L40S", usd_per_gpu_hour=1.09)
    )


PAGES = {
    "metrics.md": metrics_page,
    "commands.md": commands_page,
    "images/estimate.svg": estimate_picture,
}


def main() -> int:
    stale = []
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(name)
    if stale:
        print(f"out of date: {', '.join(stale)}; run python docs/generate.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
