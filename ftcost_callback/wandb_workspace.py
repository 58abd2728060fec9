"""A ready W&B workspace over the keys of :mod:`ftcost_callback.metrics`: what ``ftcost wandb-workspace`` saves.

Sections follow what one wants to know, not the keys' prefixes: cost, throughput, where the time goes, GPU, experts. W&B's
automatic sections group by the key up to its last slash (``ftcost/cost``, ``ftcost/moe/load``), which this asks for as
well, so that what the user logs beside stands in sections of its own.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from costmodel.errors import CostModelError, MissingExtraError
from ftcost_callback.metrics import BY_COST_PREFIX, COST_AXIS_KEY, METRICS, STEP_KEY, TIME_AXIS_KEY

NAME: Final = "ftcost: cost and speed"
_TITLES: Final = {metric.field: (metric.key, metric.unit) for metric in METRICS}

# Section -> panels: title, fields of a window, smallest and largest y that is always shown.
_SECTIONS: Final[tuple[tuple[str, tuple[tuple[str, tuple[str, ...], float | None], ...]], ...]] = (
    (
        "Cost",
        (
            (
                "Spent, projected and predicted",
                ("spent_usd", "projected_usd", "projected_usd_low", "projected_usd_high", "predicted_usd"),
                None,
            ),
            ("Per million supervised tokens", ("usd_per_million_supervised_tokens",), None),
            ("Time left", ("remaining_seconds",), None),
        ),
    ),
    (
        "Throughput, measured against predicted",
        (
            ("Step, measured over predicted (1 = on plan)", ("step_seconds_measured_over_predicted",), None),
            ("Tokens", ("non_padding_tokens_per_second", "tokens_per_second", "supervised_tokens_per_second"), None),
            ("Step and its parts", ("step_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds"), None),
            ("Share of the GPU's peak", ("mfu", "hfu"), 1.0),
        ),
    ),
    (
        "Where the time goes",
        (
            ("Waiting for data", ("data_wait_fraction",), 1.0),
            ("Evaluating, saving and other", ("eval_seconds", "save_seconds", "other_seconds"), None),
            ("Elapsed and projected", ("elapsed_seconds", "projected_total_seconds"), None),
        ),
    ),
    (
        "GPU",
        (
            ("A kernel ran; its cores were at work", ("busy_fraction", "sm_active_fraction"), 1.0),
            ("Memory", ("peak_allocated_bytes", "memory_used_bytes"), None),
            ("Power", ("power_watts",), None),
            ("Peak memory, measured over predicted (1 = on plan)", ("peak_memory_measured_over_predicted",), None),
        ),
    ),
    (
        "Experts",
        (
            (
                "Busiest expert over the mean (1 = balanced)",
                ("load_max_over_mean", "worst_layer_load_max_over_mean"),
                None,
            ),
            ("Against the first steps (above 1 = less even)", ("load_max_over_mean_vs_first_steps",), None),
            ("What the uneven load has cost", ("imbalance_usd",), None),
            ("Spread and entropy of the load", ("load_cv", "load_entropy"), None),
            ("Experts without a token", ("dead_expert_fraction",), 1.0),
        ),
    ),
)


def build_workspace(entity: str, project: str) -> Any:
    """The workspace, not saved. Asks the network nothing. Raises :class:`MissingExtraError` without wandb-workspaces."""
    try:
        # Its modules fill their names at run time, which a type checker does not see.
        reports: Any = importlib.import_module("wandb_workspaces.reports.v2")
        workspaces: Any = importlib.import_module("wandb_workspaces.workspaces")
    except ImportError:
        raise MissingExtraError("wandb-workspaces", "workspace", "a W&B workspace") from None

    def panel(title: str, fields: tuple[str, ...], most: float | None) -> Any:
        units = dict.fromkeys(_TITLES[field][1] for field in fields)
        return reports.LinePlot(
            title=title,
            x=STEP_KEY,
            y=[_TITLES[field][0] for field in fields],
            title_x="optimizer step",
            title_y=", ".join(units),
            range_y=(0.0 if most is not None else None, most),
            smoothing_factor=0.0,
        )

    def losses(title: str, x: str, title_x: str) -> Any:
        keys = [f"{BY_COST_PREFIX}loss", f"{BY_COST_PREFIX}eval_loss"]
        return reports.LinePlot(title=title, x=x, y=keys, title_x=title_x, title_y="loss", smoothing_factor=0.0)

    sections = [
        workspaces.Section(name=name, panels=[panel(*each) for each in panels], is_open=True) for name, panels in _SECTIONS
    ]
    sections[0].panels.append(losses("Loss against dollars", COST_AXIS_KEY, "USD spent"))
    sections[2].panels.append(losses("Loss against hours (runs without a price)", TIME_AXIS_KEY, "hours"))
    settings = workspaces.WorkspaceSettings(x_axis=STEP_KEY, group_by_prefix="last", remove_legends_from_panels=False)
    # W&B adds the rest itself: losses, and the experts' histograms of each layer.
    return workspaces.Workspace(
        entity=entity, project=project, name=NAME, sections=sections, settings=settings, auto_generate_panels=True
    )


def save_workspace(path: str) -> str:
    """Save it to ``ENTITY/PROJECT`` (one request to W&B). Returns its address. Raises :class:`CostModelError`."""
    entity, _, project = path.removeprefix("wandb:").strip("/").partition("/")
    if not entity or not project or "/" in project:
        raise CostModelError(f"{path!r} is no W&B project; give ENTITY/PROJECT")
    workspace = build_workspace(entity, project)
    try:
        workspace.save()
        return str(workspace.url)
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise CostModelError(
            f"W&B did not take the workspace for {entity}/{project}: {said}; is `wandb login` done?"
        ) from None
