"""Three trainings that report to trackio, in a process of their own: trackio reads ``TRACKIO_DIR`` when it is imported.

``python trackio_training.py FOLDER``: "own" (our sink opens a run), "shared" (beside transformers' callback), "logs"
(no sink of ours, by ``attach``), each in an output folder and, for the last two, a project of that name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


def main(folder: Path) -> None:
    import torch
    from tiny_runs import listed_rows, priced_callback, tiny_mixtral, tiny_trainer

    from ftcost_callback import attach
    from ftcost_callback.sinks import InMemorySink, TrackioSink

    for name, sinks, report_to in (
        ("own", [TrackioSink("own")], "none"),
        ("shared", [TrackioSink()], "trackio"),
        ("logs", [InMemorySink()], "trackio"),
    ):
        torch.manual_seed(0)
        fields: dict[str, Any] = {"max_steps": 6, "logging_steps": 2, "train_dataset": listed_rows(), "project": name}
        trainer = tiny_trainer(folder / name, [], model=tiny_mixtral(), report_to=report_to, **fields)
        attach(trainer, priced_callback(budget_usd=0.001, sinks=sinks))
        if name == "own":  # nobody listens there; a run of our own stays here, where the Trainer's would follow
            os.environ["TRACKIO_SERVER_URL"] = "http://127.0.0.1:9/?write_token=x"
        trainer.train()
        os.environ.pop("TRACKIO_SERVER_URL", None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
