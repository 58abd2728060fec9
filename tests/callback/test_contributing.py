"""``ftcost contribute``: a row of the accuracy data from a run record, without what names its owner."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from costmodel.errors import CostModelError
from costmodel.units import GIB
from ftcost_callback.contributing import COLUMNS, as_csv, contributed_row
from ftcost_callback.run_file import read_run

DATA = Path(__file__).parents[2] / "accuracy" / "data"
SECRETS = ("acme", "/home/", "secret", "ourbox", "customer")


def write_run(folder: Path, *, model: object = "meta-llama/Llama-2-7b-hf", num_steps: int = 40, **changes: Any) -> Path:
    """A record of a LoRA run on an L40S: 2 s a step of which 0.5 s waits for data, 8 samples of 100 real tokens."""
    session: dict[str, Any] = {
        "type": "session", "run_id": "acme-run", "session_index": 0, "started_at": "2026-11-30T10:00:00+00:00",
        "startup_seconds": 50.0, "max_steps": num_steps,
        "job": {
            "model": model, "gpu": "L40S", "num_gpus": 2, "method": "lora", "lora_r": 16, "lora_target_modules": ["q_proj"],
            "dtype": "bfloat16", "bf16": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1,
            "gradient_checkpointing": True, "max_length": 512, "optim": "adamw_torch_fused", "framework": "trl",
            "lengths": {"file": "/home/acme/customer.json"},
        },
        "model": {"num_params": 7_000_000_000, "num_active_params": 6_900_000_000, "num_trainable_params": 4_200_000},
        "device": {"kind": "cuda", "name": "NVIDIA L40S", "uuid": "GPU-secret", "memory_bytes": 45 * GIB, "host": "ourbox"},
        "price": {"usd_per_gpu_hour": 1.23, "source": "acme contract"},
        "versions": {"ftcost": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
        "notes": ["read from /home/acme"],
    }  # fmt: skip
    session["model"] = changes.pop("model_facts", session["model"])
    rows: list[dict[str, Any]] = [session | changes]
    for step in range(1, num_steps + 1):
        rows.append(
            {
                "type": "step", "global_step": step, "session_index": 0, "step_seconds": 60.0 if step == 1 else 2.0,
                "data_wait_seconds": 0.5, "num_tokens": 1200, "num_non_padding_tokens": 800, "num_samples": 8,
                "peak_allocated_bytes": 20 * GIB, "peak_reserved_bytes": 22 * GIB, "memory_used_bytes": 23 * GIB,
            }
        )  # fmt: skip
    record = folder / "run.jsonl"
    record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return record


def test_the_row_holds_what_was_measured(tmp_path: Path) -> None:
    row = contributed_row(read_run(write_run(tmp_path)))
    assert row["model_id"] == "meta-llama/Llama-2-7b-hf"
    assert (row["gpu"], row["n_gpus"], row["gpu_mem_gb"]) == ("NVIDIA L40S", "2", "45.0")
    assert float(row["s_per_step"]) == 1.5  # data wait off, first steps out
    assert float(row["tokens_per_s"]) == 800 / 2.0 / 2  # real tokens over the whole step, each GPU
    assert float(row["avg_tokens_per_sample"]) == 100
    assert (row["peak_alloc_gib"], row["peak_reserved_gib"], row["peak_device_gib"]) == ("20.0", "22.0", "23.0")
    assert (row["compute_precision"], row["grad_checkpointing"], row["is_moe"]) == ("bf16 autocast", "yes", "no")
    assert "150.0 computed tokens a sample" in row["notes"]


def test_nothing_that_names_the_owner_is_in_it(tmp_path: Path) -> None:
    private = {
        "_name_or_path": "acme/secret-model",
        "model_type": "llama",
        "hidden_size": 64,
        "architectures": ["AcmeModel"],
    }
    row = contributed_row(read_run(write_run(tmp_path, model=private)))
    text = as_csv([row]).lower()
    assert [word for word in SECRETS if word in text] == []
    assert row["model_id"] == ""
    assert '"hidden_size":64' in row["notes"]  # the model is given by its numbers
    assert (row["cost_usd"], row["price_usd_per_h"], row["dataset"]) == ("", "", "")


@pytest.mark.parametrize(
    ("model", "is_moe"),
    [
        ("EleutherAI/pythia-410m", "no"),  # an eighth of it is a look-up table, which is no active parameter
        ("mistralai/Mixtral-8x7B-v0.1", "yes"),
        ({"model_type": "unheard_of", "hidden_size": 64}, ""),  # not known, so not said
    ],
)
def test_whether_it_is_a_mixture_of_experts_is_read_from_the_config(model: object, is_moe: str, tmp_path: Path) -> None:
    counts = {"num_params": 405_000_000, "num_active_params": 354_000_000, "num_trainable_params": 1_000_000}
    assert contributed_row(read_run(write_run(tmp_path, model_facts=counts, model=model)))["is_moe"] == is_moe


def test_columns_are_those_of_the_accuracy_data() -> None:
    for path in DATA.glob("*.csv"):
        with path.open(encoding="utf-8") as file:
            assert next(csv.reader(file)) == list(COLUMNS), path.name


def test_runs_that_are_of_no_use_to_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CostModelError, match="CPU"):
        contributed_row(read_run(write_run(tmp_path, device={"kind": "cpu", "name": "a laptop"})))
    with pytest.raises(CostModelError, match="at least 10"):
        contributed_row(read_run(write_run(tmp_path, num_steps=6)))
    with pytest.raises(CostModelError, match="without its job"):
        contributed_row(read_run(write_run(tmp_path, job=None)))


def test_a_run_that_ran_out_of_memory_is_a_row_without_speed(tmp_path: Path) -> None:
    record = write_run(tmp_path, num_steps=3)
    with record.open("a") as file:
        file.write(
            json.dumps(
                {
                    "type": "out_of_memory",
                    "global_step": 4,
                    "batch_size": 4,
                    "batch_length": 512,
                    "term": "logits",
                    "verdict": ".",
                }
            )
            + "\n"
        )
    row = contributed_row(read_run(record))
    assert (row["outcome"], row["s_per_step"], row["peak_alloc_gib"]) == ("oom", "", "20.0")
    assert "ran out at step 4 with 4 rows of 512 tokens" in row["notes"]


def test_the_command_shows_and_writes_and_sends_nothing(tmp_path: Path) -> None:
    record, out = write_run(tmp_path), tmp_path / "row.csv"
    script = "import sys; from ftcost_callback.cli import main; sys.argv = ['ftcost'] + sys.argv[1:]; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "contribute", str(record), "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "s_per_step              1.5" in done.stdout
    assert "nothing was sent" in done.stderr
    with out.open() as file:
        (row,) = csv.DictReader(file)
    assert row["s_per_step"] == "1.5"
