"""A step that runs out of memory: the error passes as it is, and the record says which term was over and what fits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TickingClock, TokenRows, num_hooks, tiny_llama, tiny_trainer

from ftcost_callback import FTCostCallback
from ftcost_callback.out_of_memory import Failure, explained, is_out_of_memory, parsed_message
from ftcost_callback.run_file import read_run
from ftcost_callback.training_watch import let_go_of_left_trainings

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.50 GiB of which 1.25 GiB is free. "
    "Including non-PyTorch memory, this process has 38.00 GiB memory in use. Of the allocated memory 36.50 GiB is "
    "allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)
GIB = 2**30
JOB: dict[str, Any] = {
    "model": "meta-llama/Llama-2-7b-hf", "gpu": "NVIDIA A100 40GB PCIe", "method": "lora", "dtype": "bfloat16",
    "gradient_checkpointing": True, "per_device_train_batch_size": 4, "max_length": 512, "lengths": {"fixed": 512},
}  # fmt: skip


def test_torch_s_message_is_read() -> None:
    assert parsed_message(MESSAGE) == {
        "requested_bytes": 2 * GIB,
        "capacity_bytes": round(39.5 * GIB),
        "free_bytes": round(1.25 * GIB),
        "process_bytes": 38 * GIB,
        "allocated_bytes": round(36.5 * GIB),
        "unallocated_bytes": GIB // 2,
    }
    assert parsed_message("CUDA error: out of memory") == {}


def test_what_is_out_of_memory_and_what_is_not() -> None:
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(None)


@pytest.mark.parametrize(
    ("message", "term", "ending"),
    [
        pytest.param(
            MESSAGE.replace("has 38.00 GiB memory", "has 20.00 GiB memory"),
            "other processes",
            "other processes hold 18.2 GiB of the GPU's 39.5 GiB; end them, or take another GPU",
            id="another-process",
        ),
        pytest.param(
            MESSAGE.replace("512.00 MiB is reserved", "8.00 GiB is reserved"),
            "fragmentation",
            "8.0 GiB are reserved in pieces too small for the 2.0 GiB asked for; "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets them grow together",
            id="fragments",
        ),
    ],
)
def test_causes_that_the_message_shows(message: str, term: str, ending: str) -> None:
    row = explained(Failure(global_step=7, message=message, batch_shape=(4, 512), job=JOB))
    assert row.term == term
    assert row.verdict == f"out of memory at step 7 with 4 x 512 tokens: {ending}"


def test_a_batch_that_the_estimate_knows_to_be_too_large() -> None:
    row = explained(Failure(global_step=7, message=MESSAGE, batch_shape=(256, 2048), job=JOB))
    assert row.term == "activations"
    assert row.predicted_peak_device_bytes is not None
    assert row.predicted_peak_device_bytes > 40 * GIB
    assert row.would_fit is not None
    assert 1 <= row.would_fit["per_device_train_batch_size"] < 256
    assert 1 <= row.would_fit["max_length"] < 2048
    assert row.verdict.endswith(
        f"per_device_train_batch_size={row.would_fit['per_device_train_batch_size']} or "
        f"max_length={row.would_fit['max_length']} would have fitted"
    )


def test_an_estimate_that_was_too_low_says_so() -> None:
    row = explained(Failure(global_step=7, message=MESSAGE, batch_shape=(4, 64), job=JOB))
    assert row.term == "not modelled"
    assert "which is too low here; 36.5 GiB were allocated; try per_device_train_batch_size=2" in row.verdict


def test_without_a_job_only_the_message_speaks() -> None:
    row = explained(Failure(global_step=1, message="CUDA out of memory"))
    assert (row.term, row.would_fit, row.capacity_bytes) == ("unknown", None, None)


SMALL_GPU = {
    "name": "small card", "vendor": "NVIDIA", "memory_bytes": 480 * 2**20, "memory_bandwidth_bytes_per_second": 1e11,
    "peak_bf16_flops_per_second": 1e13, "peak_fp32_flops_per_second": 1e12,
}  # fmt: skip


def test_the_error_passes_through_unchanged_and_the_record_explains_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama()
    thrown = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    def third_step_fails(module: Any, args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise thrown

    calls: list[int] = []
    model.lm_head.register_forward_pre_hook(third_step_fails)
    measuring = FTCostCallback(sinks=[], gpu=SMALL_GPU)
    measuring._clock = TickingClock()
    with pytest.raises(torch.cuda.OutOfMemoryError) as raised:
        tiny_trainer(tmp_path, [measuring], model=model).train()
    assert raised.value is thrown
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None
    record = read_run(tmp_path)
    assert [step.global_step for step in record.steps] == [1, 2]
    (row,) = record.out_of_memory
    assert (row.global_step, row.batch_size, row.batch_length) == (3, 2, 7)
    assert row.requested_bytes == 20 * 2**20
    assert row.capacity_bytes == 480 * 2**20
    assert sum("out of memory at step 3" in message for message in caplog.messages) == 1
    assert num_hooks(model) == 2  # until the next training, or the end of the process


@pytest.mark.parametrize("where", ["in a forward", "in the loop", "in a save", "in a step's evaluation"])
def test_memory_that_ran_out_in_no_step_is_not_held_against_one(tmp_path: Path, where: str) -> None:
    def fails(*arguments: Any, **named: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = tiny_llama()
    fields: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": TokenRows()}
    fields |= {"save_strategy": "steps", "save_steps": 2} if where == "in a save" else {}
    trainer = tiny_trainer(tmp_path, [FTCostCallback(sinks=[], gpu=SMALL_GPU)], model=model, **fields)
    if where == "in a forward":
        model.lm_head.register_forward_pre_hook(lambda module, args: None if module.training else fails())
    elif where == "in the loop":
        trainer.prediction_step = fails
    elif where == "in a save":
        trainer._save_optimizer_and_scheduler = fails
    else:
        trainer.prediction_step, compute_loss = fails, trainer.compute_loss
        trainer.compute_loss = lambda *a, **k: trainer.evaluate() if trainer.state.global_step else compute_loss(*a, **k)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        trainer.train()
    (row,) = read_run(tmp_path).out_of_memory
    what, steps = ("saving", 2) if where == "in a save" else ("evaluating", 1 if "step" in where else 2)
    assert row.verdict.startswith(f"out of memory while {what} after step {steps}: 2.0 GiB were asked for; ")
    assert "save_only_model" in row.verdict if what == "saving" else "per_device_eval_batch_size" in row.verdict
    assert (row.batch_size, row.would_fit, row.predicted_peak_device_bytes) == (None, None, None)


def test_a_loss_that_asks_another_model_to_predict_is_a_step(tmp_path: Path) -> None:
    class Teacher:
        def predict(self) -> None:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    trainer = tiny_trainer(tmp_path, [FTCostCallback(sinks=[], gpu=SMALL_GPU)])
    trainer.compute_loss = lambda *arguments, **named: Teacher().predict()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        trainer.train()
    (row,) = read_run(tmp_path).out_of_memory
    assert row.verdict.startswith("out of memory at step 1")


def test_a_retry_with_a_smaller_batch_is_in_the_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()

    def backward_fails(module: Any, args: Any, output: Any) -> None:
        if output.logits.shape[0] > 6:
            output.loss.register_hook(lambda gradient: _raise())

    def _raise() -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    model.register_forward_hook(backward_fails)
    measuring = FTCostCallback(sinks=[], predict=False)
    measuring._clock = TickingClock()
    tiny_trainer(
        tmp_path, [measuring], model=model, per_device_train_batch_size=8, auto_find_batch_size=True, max_steps=2
    ).train()
    rows = read_run(tmp_path).out_of_memory
    assert [(row.batch_size, row.retried_with) for row in rows] == [(8, 7), (7, 6)]
    assert {row.requested_bytes for row in rows} == {GIB}  # torch's message outlives the error
    assert rows[0].verdict.endswith("going on with a batch of 7")


@pytest.mark.parametrize("where", ["backward", "optimizer"])
def test_an_error_that_is_caught_is_explained_when_it_is_raised(tmp_path: Path, where: str) -> None:
    model = tiny_llama()
    thrown = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")

    def fails(*_: Any) -> None:
        raise thrown

    measuring = FTCostCallback(sinks=[], predict=False)
    measuring._clock = TickingClock()
    trainer = tiny_trainer(tmp_path, [measuring], model=model)
    if where == "backward":
        model.register_forward_hook(lambda module, args, output: output.loss.register_hook(fails) and None)
    else:
        trainer.create_optimizer()
        trainer.optimizer.register_step_pre_hook(fails)
    with pytest.raises(torch.cuda.OutOfMemoryError) as raised:
        trainer.train()
    assert raised.value is thrown
    (row,) = read_run(tmp_path).out_of_memory  # with no event in between
    assert (row.global_step, row.requested_bytes) == (1, 3 * GIB)
    del raised
    thrown.__traceback__ = None
    let_go_of_left_trainings()
    assert "_run_epoch" not in vars(trainer)
    assert len(read_run(tmp_path).out_of_memory) == 1


def test_a_search_for_a_batch_that_finds_none_is_explained(tmp_path: Path) -> None:
    model = tiny_llama()

    def fails(module: Any, args: Any) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    model.lm_head.register_forward_pre_hook(fails)
    measuring = FTCostCallback(sinks=[], predict=False)
    measuring._clock = TickingClock()
    trainer = tiny_trainer(tmp_path, [measuring], model=model, per_device_train_batch_size=2, auto_find_batch_size=True)
    with pytest.raises(RuntimeError, match="No executable batch size found"):
        trainer.train()
    measuring._run._interpreter_exits()  # type: ignore[union-attr]
    rows = read_run(tmp_path).out_of_memory
    assert [(row.batch_size, row.retried_with, row.requested_bytes) for row in rows] == [(2, 1, GIB), (1, None, GIB)]


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch
from tiny_runs import tiny_llama, tiny_trainer
from ftcost_callback import FTCostCallback

def backward_fails(module, args, output):
    output.loss.register_hook(lambda gradient: fail())

def fail():
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")

model = tiny_llama()
model.register_forward_hook(backward_fails)
tiny_trainer(Path({output!r}), [FTCostCallback(sinks=[], predict=False)], model=model).train()
"""


@pytest.mark.slow
def test_a_backward_that_ends_the_program_is_explained_at_its_exit(tmp_path: Path) -> None:
    code = PROGRAM.format(tests=str(Path(__file__).parent), output=str(tmp_path))
    ended = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB." in ended.stderr
    (row,) = read_run(tmp_path).out_of_memory
    assert (row.global_step, row.requested_bytes) == (1, 3 * GIB)
