"""Opens the W&B run before transformers' ``WandbCallback`` does, so that a dead server cannot end training.

Only on request (``wandb_guard=True``). ``WandbCallback`` raises out of ``trainer.train()`` when there is no key, a wrong
one, or no server; a run that is open already it takes as it is.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any, Final

_log = logging.getLogger("ftcost_callback")

_SETTINGS: Final[dict[str, Any]] = {
    "init_timeout": 30,
    "finish_timeout": 300,  # the default waits for a dead server for ever, on a machine that is paid by the hour
    "x_transaction_log_flush_interval": 1.0,  # a killed process loses a second of rows, not fifteen
    "x_graphql_retry_max": 4,
    "x_graphql_retry_wait_max_seconds": 10,
}


def open_run_or_offline(args: Any) -> bool:
    """Open ``wandb.run`` as ``WandbCallback`` would, offline if that fails. False: nothing was to be opened."""
    if "wandb" not in (args.report_to or ()):
        return False
    import wandb

    if wandb.run is not None:
        return False
    known = _field_names(wandb.Settings)
    settings = wandb.Settings(**{name: value for name, value in _SETTINGS.items() if name in known})
    fields = {"project": os.environ.get("WANDB_PROJECT", "huggingface"), "name": args.run_name, "settings": settings}
    try:
        wandb.init(**fields)
    except Exception as error:
        _log.warning(
            "ftcost: W&B cannot be reached (%s: %s); the run is kept offline, send it later with `wandb sync`",
            type(error).__name__,
            error,
        )
        wandb.init(**fields, mode="offline")
    return True


def _field_names(settings_type: Any) -> set[str]:
    if dataclasses.is_dataclass(settings_type):
        return {each.name for each in dataclasses.fields(settings_type)}
    return set(getattr(settings_type, "model_fields", ()))
