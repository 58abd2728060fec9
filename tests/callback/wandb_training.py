"""A training with W&B online, in a process of its own: what the failure tests start and look at.

``python wandb_training.py FOLDER STEPS [EVENT=STEP ...] [unguarded]``: EVENT is printed when STEP has ended (0: before the
first), and the training goes on when a line comes back on stdin. At the end one JSON line: whether ``train()`` returned,
and how long ``finish()`` took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


def main(folder: Path, num_steps: int, events: dict[int, str], *, is_guarded: bool) -> None:
    import wandb
    from tiny_runs import tiny_trainer
    from transformers import TrainerCallback

    from ftcost_callback import FTCostCallback

    class Events(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.on_step_end(args, state, control)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in events:
                print(events[state.global_step], flush=True)
                sys.stdin.readline()

    measuring = FTCostCallback(predict=False, usd_per_gpu_hour=1.0, budget_usd=1e-9, wandb_guard=is_guarded)
    callbacks = [measuring, Events()]
    trainer = tiny_trainer(folder / "out", callbacks, max_steps=num_steps, report_to=["wandb"])
    run = wandb.run  # of the guard
    mode = None if run is None else "offline" if run.offline else "disabled" if run.disabled else "online"
    trainer.train()
    began = time.monotonic()
    wandb.finish()
    print(json.dumps({"mode": mode, "trained": trainer.state.global_step, "finish_seconds": time.monotonic() - began}))


if __name__ == "__main__":
    pairs = [each.split("=") for each in sys.argv[3:] if "=" in each]
    events = {int(step): name for name, step in pairs}
    main(Path(sys.argv[1]), int(sys.argv[2]), events, is_guarded="unguarded" not in sys.argv)
