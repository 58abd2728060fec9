"""When a training runs out of memory: which term was over, and what would have fitted. Pure, but for the question to the
estimate and the look at what the Trainer was doing."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Literal

from costmodel.errors import CostModelError
from costmodel.units import GIB
from ftcost_callback.records import OutOfMemory, PauseKind
from ftcost_callback.training_watch import LOOP

_UNITS: Final = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_AMOUNT: Final = r"([\d.]+) (bytes|[KMGT]iB)"

# torch's message, c10/cuda/CUDACachingAllocator.cpp.
_MESSAGE_PARTS: Final = {
    "requested_bytes": re.compile(rf"Tried to allocate {_AMOUNT}"),
    "capacity_bytes": re.compile(rf"total capacity of {_AMOUNT}"),
    "free_bytes": re.compile(rf"of which {_AMOUNT} is free"),
    "process_bytes": re.compile(rf"this process has {_AMOUNT} memory in use"),
    "allocated_bytes": re.compile(rf"allocated memory {_AMOUNT} is allocated by PyTorch"),
    "unallocated_bytes": re.compile(rf"{_AMOUNT} is reserved by PyTorch but unallocated"),
}

_NOTICEABLE_SHARE: Final = 0.05  # of the card: what is less explains no failure
_TERMS: Final = {
    "weights": "weights_bytes",
    "adapters": "adapters_bytes",
    "gradients": "gradients_bytes",
    "optimizer states": "optimizer_bytes",
    "activations": "activations_bytes",
    "logits": "logits_bytes",
    "temporary buffers": "temporary_bytes",
}


def is_out_of_memory(error: BaseException | None) -> bool:
    """torch's own class, or the text by which accelerate knows it."""
    if error is None:
        return False
    return type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


# The Trainer's methods (transformers 5.24) that are no training step.
_ASIDE: Final[Mapping[str, Literal["eval", "save"]]] = {
    "evaluate": "eval",
    "predict": "eval",
    "evaluation_loop": "eval",
    "prediction_step": "eval",
    "_save_checkpoint": "save",
    "save_model": "save",
}


_PAUSE: Final = "_ftcost_pause"  # on an error, as its notes are: who survives it keeps nothing of it


def leaves_pause(error: BaseException, kind: PauseKind) -> None:
    """``error`` leaves what a loop of the user's own said to be no step."""
    if kind in ("eval", "save"):
        with contextlib.suppress(AttributeError, TypeError):
            setattr(error, _PAUSE, kind)


def left_aside(error: BaseException | None) -> Literal["eval", "save"] | None:
    """What the training loop was doing that is no step, by the frames that ``error`` has passed, and those it has still to
    pass where it is told of on its way. A loss may call a ``predict`` that is not the Trainer's."""
    said: Literal["eval", "save"] | None = getattr(error, _PAUSE, None)
    if said is not None:
        return said
    to_pass: list[FrameType] = []
    loop = None
    for frame, _ in traceback.walk_stack(None):
        if frame.f_code.co_name == LOOP:
            loop = frame
            break
        to_pass.append(frame)
    passed = [frame for frame, _ in traceback.walk_tb(error.__traceback__ if error is not None else None)]
    if loop is None:  # left behind, or the user's own
        to_pass = []
        place = next((place for place, frame in enumerate(passed) if frame.f_code.co_name == LOOP), None)
        if place is not None:
            loop, passed = passed[place], passed[place + 1 :]
    trainer = loop.f_locals.get("self") if loop is not None else None
    for frame in (*passed, *to_pass):
        kind = _ASIDE.get(frame.f_code.co_name)
        if kind is not None and (loop is None or frame.f_locals.get("self") is trainer):
            return kind
    return None


def parsed_message(text: str) -> dict[str, int]:
    """Bytes that torch's message names; what it does not say is absent."""
    found = {name: pattern.search(text) for name, pattern in _MESSAGE_PARTS.items()}
    return {name: round(float(match[1]) * _UNITS[match[2]]) for name, match in found.items() if match}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What is known about the step that failed."""

    global_step: int  # the one that was being done
    message: str = ""
    batch_shape: tuple[int, int] | None = None  # (rows, padded length) of its micro-batch
    job: Mapping[str, Any] | None = None
    retried_with: int | None = None  # auto_find_batch_size went on with this batch
    during: Literal["eval", "save"] | None = None  # after the step before, or in the middle of this one


def explained(failure: Failure) -> OutOfMemory:
    """The record of a failure. Asks the estimate about the batch that failed; without a job, the message alone speaks."""
    said = parsed_message(failure.message)
    if failure.during is not None and failure.retried_with is None:
        return _explained_aside(failure, said)
    answer = _answer(failure)
    memory = (answer or {}).get("memory") or {}
    capacity = said.get("capacity_bytes") or memory.get("capacity_bytes")
    term, why = _term_over(said, memory, capacity)
    fits = _would_fit(failure, answer)
    rows, length = failure.batch_shape if failure.batch_shape is not None else (None, None)
    batch = f" with {rows} x {length} tokens" if rows is not None else ""
    verdict = f"out of memory at step {failure.global_step}{batch}: {why}; {_way_out(failure, fits, term)}"
    return OutOfMemory(
        global_step=failure.global_step,
        batch_size=rows,
        batch_length=length,
        requested_bytes=said.get("requested_bytes"),
        allocated_bytes=said.get("allocated_bytes"),
        capacity_bytes=capacity,
        predicted_peak_device_bytes=memory.get("peak_device_bytes"),
        term=term,
        would_fit=fits or None,
        retried_with=failure.retried_with,
        verdict=verdict,
    )


def _explained_aside(failure: Failure, said: Mapping[str, int]) -> OutOfMemory:
    """Of an evaluation or a save, which the estimate of a training step says nothing about."""
    capacity, requested = said.get("capacity_bytes"), said.get("requested_bytes")
    term, why = _term_over(said, {}, capacity)
    if term == "unknown":
        why = f"{_gib(requested)} were asked for" if requested is not None else "torch does not say for what"
        if failure.during == "eval":
            way_out = (
                "a smaller per_device_eval_batch_size needs less, and prediction_loss_only=True or eval_accumulation_steps "
                "keep no predictions on the device"
            )
        else:
            way_out = "what is saved was copied on the device; save_only_model=True saves less"
    else:
        way_out = _way_out(failure, {}, term)
    what = "evaluating" if failure.during == "eval" else "saving"
    return OutOfMemory(
        global_step=failure.global_step,
        requested_bytes=requested,
        allocated_bytes=said.get("allocated_bytes"),
        capacity_bytes=capacity,
        term=term,
        verdict=f"out of memory while {what} after step {failure.global_step - 1}: {why}; {way_out}",
    )


def _answer(failure: Failure) -> dict[str, Any] | None:
    """The estimate of the job on batches like the one that failed."""
    from costmodel.estimation import estimate

    if failure.job is None:
        return None
    job = dict(failure.job)
    if failure.batch_shape is not None and not (job.get("packing") or job.get("padding_free")):
        rows, length = failure.batch_shape
        job |= {"per_device_train_batch_size": rows, "max_length": length, "lengths": {"fixed": length}}
    try:
        return estimate(job).to_dict()
    except CostModelError:
        return None


def _term_over(said: Mapping[str, int], memory: Mapping[str, Any], capacity: int | None) -> tuple[str, str]:
    """(name, sentence) of what took the memory."""
    if capacity is not None and {"free_bytes", "process_bytes"} <= said.keys():
        others = capacity - said["free_bytes"] - said["process_bytes"]
        if others > _NOTICEABLE_SHARE * capacity:
            return "other processes", f"other processes hold {_gib(others)} of the GPU's {_gib(capacity)}"
    unallocated, requested = said.get("unallocated_bytes", 0), said.get("requested_bytes", 0)
    if capacity is not None and unallocated > max(requested, _NOTICEABLE_SHARE * capacity):
        return "fragmentation", f"{_gib(unallocated)} are reserved in pieces too small for the {_gib(requested)} asked for"
    needed = memory.get("peak_device_bytes")
    if needed is None:
        return "unknown", "there is no estimate of this job's memory"
    largest = max(_TERMS, key=lambda term: memory.get(_TERMS[term]) or 0)
    share = f"{largest} are the largest part ({_gib(memory[_TERMS[largest]])})"
    if capacity is None:
        return largest, f"it needs {_gib(needed)} by the estimate, and {share}"
    if needed > capacity:
        return largest, f"it needs {_gib(needed)} of {_gib(capacity)} by the estimate, and {share}"
    allocated = said.get("allocated_bytes")
    held = f"; {_gib(allocated)} were allocated" if allocated is not None else ""
    return "not modelled", f"it needs {_gib(needed)} of {_gib(capacity)} by the estimate, which is too low here{held}"


def _would_fit(failure: Failure, answer: Mapping[str, Any] | None) -> dict[str, int]:
    """Settings that fit by the estimate, each on its own, where they are smaller than what failed."""
    if answer is None:
        return {}
    job = answer.get("job") or {}
    fits = {}
    for name, most in (
        ("per_device_train_batch_size", answer.get("max_batch_size")),
        ("max_length", answer.get("max_length_that_fits")),
    ):
        now = job.get(name)
        if most is not None and now is not None and 1 <= most < now:
            fits[name] = int(most)
    return fits


def _way_out(failure: Failure, fits: Mapping[str, int], term: str) -> str:
    if failure.retried_with is not None:
        return f"going on with a batch of {failure.retried_with}"
    if term == "other processes":
        return "end them, or take another GPU"
    if term == "fragmentation":
        return "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets them grow together"
    if fits:
        return " or ".join(f"{name}={value}" for name, value in fits.items()) + " would have fitted"
    job = failure.job or {}
    if not job.get("gradient_checkpointing"):
        return "gradient_checkpointing=True keeps fewer activations"
    rows = failure.batch_shape[0] if failure.batch_shape is not None else job.get("per_device_train_batch_size") or 1
    if rows > 1:
        return f"try per_device_train_batch_size={rows // 2} with twice the gradient_accumulation_steps"
    return "a quantised base, shorter sequences or a larger GPU is needed"


def _gib(amount: float) -> str:
    return f"{amount / GIB:.1f} GiB"
