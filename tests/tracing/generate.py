"""Regenerates ``tests/golden/traced_steps.jsonl``: ``python tests/tracing/generate.py [--only PART_OF_A_NAME]``.

Needs torch, transformers and peft in the versions that the rows name, no GPU and no weights; some seconds a case. Each
case runs in a process of its own, ended after :data:`SECONDS`. Some rows name trl, and some what has to be installed beside:
``pip install --no-deps triton einops liger-kernel`` and ``MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps mamba-ssm``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cases import CASES, Case

from costmodel.model_catalog import find_model_config

GOLDEN = Path(__file__).parents[1] / "golden" / "traced_steps.jsonl"
SECONDS = 300


def trace(case: Case) -> dict[str, Any]:
    """The row of one case, traced now. Raises ``RuntimeError`` with what the process said, ``TimeoutExpired``."""
    given = {"config": find_model_config(case.job["model"]), "case": case.as_dict()}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    program = Path(__file__).with_name("fake_step.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"tracing {case.name!r} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def read_golden() -> dict[str, dict[str, Any]]:
    """The committed rows by name."""
    rows = [json.loads(line) for line in GOLDEN.read_text().splitlines()] if GOLDEN.exists() else []
    return {row["name"]: row for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="trace the cases whose name holds this, keep the other rows")
    only = parser.parse_args().only
    rows = read_golden()
    for case in CASES:
        if only in case.name:
            row = rows[case.name] = trace(case)
            print(f"{case.name}: {row['peak_allocated_bytes'] / 2**30:.3f} GiB in {row['peak_phase']}", flush=True)
    known = [rows[case.name] for case in CASES if case.name in rows]
    GOLDEN.write_text("".join(json.dumps(row) + "\n" for row in known))


if __name__ == "__main__":
    main()
