"""Opens the W&B run before transformers' ``WandbCallback`` does, so that W&B cannot end training.

Only on request (``wandb_guard=True``). ``WandbCallback`` raises out of ``trainer.train()`` when there is no key, a wrong
one, no server, or when the client's own process dies; a run that is open already it takes as it is. The run opened here
has the project, the name and every ``WANDB_*`` variable that it would have had, waits for nothing longer than the limits
below, and is kept offline where the server does not answer. Left to ``WandbCallback``: the runs of a hyperparameter
search, which it closes and opens itself.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_log = logging.getLogger("ftcost_callback")

LIMITS: Final[dict[str, Any]] = {
    "init_timeout": 30,
    "login_timeout": 30,  # nobody may sit at the terminal that is asked for a key
    "finish_timeout": 300,  # the default waits for a dead server for ever, on a machine that is paid by the hour
    "x_transaction_log_flush_interval": 1.0,  # a killed process loses a second of rows, not fifteen
    "x_graphql_retry_max": 4,
    "x_graphql_retry_wait_max_seconds": 10,
    "x_graphql_timeout_seconds": 20,
}
"""Settings of the client; one that the environment sets (``WANDB_INIT_TIMEOUT=...``) is left as it is there."""


def open_run_or_offline(args: Any) -> bool:
    """Open ``wandb.run`` as ``WandbCallback`` would, offline if that fails. False: nothing was to be opened."""
    if "wandb" not in (args.report_to or ()):
        return False
    import wandb

    if wandb.run is not None:
        return False
    fields: dict[str, Any] = {"project": os.environ.get("WANDB_PROJECT", "huggingface"), "settings": _settings(wandb)}
    if args.run_name is not None:
        fields["name"] = args.run_name
    try:
        run = wandb.init(**fields)
    except Exception as error:
        run = _open_without_server(wandb, fields, error)
    _never_raise(run, wandb)
    return True


def _open_without_server(wandb: Any, fields: dict[str, Any], reason: Exception) -> Any:
    why = f"{type(reason).__name__}: {' '.join(str(reason).split())}"
    try:
        run = _init_offline(wandb, fields)
    except Exception as error:
        _log.warning("ftcost: W&B can be used neither online (%s) nor offline (%s); nothing goes there", why, error)
        return wandb.init(**fields, mode="disabled")
    folder = Path(run.dir).parent
    _log.warning(
        "ftcost: W&B cannot be reached (%s); the run is kept offline, send it later with: wandb sync %s",
        why,
        shlex.quote(str(folder)),
    )
    return run


def _init_offline(wandb: Any, fields: dict[str, Any]) -> Any:
    try:
        return wandb.init(**fields, mode="offline")
    except Exception:
        # A run with an id of its own (WANDB_RUN_ID) is still held by the attempt that failed: begin with a new client.
        wandb.teardown()
        return wandb.init(**fields, mode="offline")


def _settings(wandb: Any) -> Any:
    known = getattr(wandb.Settings, "model_fields", None) or getattr(wandb.Settings, "__dataclass_fields__", {})
    return wandb.Settings(**{name: value for name, value in LIMITS.items() if name in known and not _is_set(name)})


def _is_set(name: str) -> bool:
    """Whether the user has set this in the environment; private ones have two spellings there."""
    public = name.removeprefix("x_").upper()
    spellings = [f"WANDB__{public}", f"WANDB_X_{public}"] if name.startswith("x_") else [f"WANDB_{public}"]
    if name == "x_graphql_timeout_seconds":
        spellings.append("WANDB_HTTP_TIMEOUT")
    return any(os.environ.get(each) for each in spellings)


def _never_raise(run: Any, wandb: Any) -> None:
    """Rows are given up, and that is said once, when the client's own process has died: every call raises then."""
    has_died = False

    def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_or_give_up(*arguments: Any, **named: Any) -> Any:
            nonlocal has_died
            if has_died:
                return None
            try:
                return call(*arguments, **named)
            except (TypeError, ValueError, wandb.errors.UsageError):
                raise  # the caller's own mistake
            except Exception as error:
                has_died = True
                _log.warning(
                    "ftcost: W&B takes no more rows (%s: %s); training goes on, and what was written before is in %s",
                    type(error).__name__,
                    error,
                    Path(run.dir).parent,
                )
                return None

        return call_or_give_up

    if run.disabled:
        return
    run.log = wandb.log = guarded(run.log)  # the second is what WandbCallback calls
    # And this is behind summary[key] = value, as an attribute of its own is behind setting one there.
    object.__setattr__(run.summary, "update", guarded(run.summary.update))
    run.finish = guarded(run.finish)
