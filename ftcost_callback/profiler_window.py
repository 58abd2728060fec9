"""A few training steps under ``torch.profiler``: where their seconds go, by layer type and operator.

Only from the first to the last of those steps are there hooks on the modules, which put named ranges into the trace. They
call no operator, read no tensor and leave the forward as it is. The trace is read from the profiler's own events in one
pass: torch's list of ``FunctionEvent`` takes forty times as long.

On the CPU this is run in the tests. On a GPU it is written from torch's documentation and has not been run yet.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from costmodel.errors import CostModelError
from ftcost_callback.forward_window import no_op_hook, no_op_reduction
from ftcost_callback.layer_kinds import layer_types
from ftcost_callback.profile_breakdown import RANGE_PREFIX, STEP_RANGE, Breakdown, TracedOp, breakdown
from ftcost_callback.records import Profile

_log = logging.getLogger("ftcost_callback")

_NANOSECONDS: Final = 1e-9


class _Range:
    """A named stretch of the trace. What torch's compiler puts around its own graphs: no operator, so that no dispatch mode
    of the user's (selective checkpointing) sees one."""

    def __init__(self, name: str) -> None:
        self._range = torch._C._profiler._RecordFunctionFast(name)

    def begin(self) -> None:
        self._range.__enter__()

    def end(self) -> None:
        self._range.__exit__(None, None, None)


class _RangeHook:
    """Base of the two hooks on a module. A copy of the model carries a no-op in its place."""

    def __init__(self, name: str, is_open: list[_Range]) -> None:
        self._name = name
        self._is_open = is_open  # of this module, the innermost last

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return no_op_hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return no_op_reduction()


class _BeginHook(_RangeHook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        opened = _Range(self._name)
        opened.begin()
        self._is_open.append(opened)


class _EndHook(_RangeHook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._is_open:
            self._is_open.pop().end()


class ProfilerWindow:
    """Told of each step's begin and end; profiles those from ``first_step`` to ``last_step``, both inside.

    Raises :class:`CostModelError` from :meth:`step_begins` where it cannot profile; the caller's boundary switches it off.
    """

    def __init__(self, model: nn.Module, first_step: int, last_step: int, *, device: torch.device) -> None:
        self._model = model
        self._first_step = first_step
        self._last_step = last_step
        self._device = device
        self._handles: list[Any] = []
        self._profiler: Any = None
        self._step_range: _Range | None = None
        self._num_steps = 0
        self._reason: str | None = None
        self.is_over = False

    @property
    def is_profiling(self) -> bool:
        return self._profiler is not None

    def step_begins(self, global_step: int) -> None:
        """The step that will be ``global_step`` begins, its batches at hand."""
        if self.is_over or global_step < self._first_step or self._step_range is not None:
            return
        if global_step > self._last_step:
            self.close()
            return
        if self._profiler is None:
            self._start()
        self._synchronize()
        self._step_range = _Range(STEP_RANGE)
        self._step_range.begin()

    def step_ends(self, global_step: int) -> Profile | None:
        """The row, when this was the last step; stopping and reading takes a while."""
        if self._profiler is None or self._step_range is None:
            return None
        self._synchronize()
        self._step_range.end()
        self._step_range = None
        self._num_steps += 1
        return self.finish(global_step) if global_step >= self._last_step else None

    def finish(self, global_step: int) -> Profile | None:
        """Stop now; ``None`` when no step was profiled."""
        profiler = self._profiler
        if profiler is None:
            return None
        self.close()
        if self._num_steps == 0:
            return None
        found = read_trace(profiler, self._device)
        return profile_row(found, global_step=global_step, reason=self._reason) if found is not None else None

    def close(self) -> None:
        """No hook and no profiler is left. May be called at any time, more than once."""
        self.is_over = True
        for handle in self._handles:
            handle.remove()
        self._handles = []
        profiler, self._profiler = self._profiler, None
        opened, self._step_range = self._step_range, None
        if opened is not None:
            opened.end()
        if profiler is not None:
            profiler.stop()

    def _start(self) -> None:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            raise CostModelError("another profiler is running; profile_steps needs torch.profiler for itself")
        if is_compiled(self._model):
            # A hook that is new to a compiled module is not called, and one that is traced would break its graph.
            self._reason = "the model is compiled: its kernels belong to no module, so layer types are not told apart"
        else:
            self._put_hooks()
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        self._profiler.start()

    def _put_hooks(self) -> None:
        for module, kind in layer_types(self._model).items():
            is_open: list[_Range] = []
            name = RANGE_PREFIX + kind
            # Ours is the first before and the last after, so that other hooks of the module lie inside its range.
            self._handles += [
                module.register_forward_pre_hook(_BeginHook(name, is_open), prepend=True),
                module.register_forward_hook(_EndHook(name, is_open), always_call=True),
            ]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def is_compiled(model: nn.Module) -> bool:
    """By ``torch.compile(model)``, ``model.compile()``, or of one of its modules."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )


def read_trace(profiler: Any, device: torch.device) -> Breakdown | None:
    """The breakdown of a profiler that was stopped."""
    results = profiler.profiler.kineto_results
    events = results.events() if results is not None else []
    host, on_device = [], []
    for event in events:
        if event.device_type() == torch.autograd.DeviceType.CPU:  # type: ignore[attr-defined]
            # A call of the CUDA runtime is linked to its operator; an operator is linked to nothing.
            if event.linked_correlation_id() == 0 and event.start_thread_id() == event.end_thread_id():
                host.append(event)
        elif not _is_annotation(event):
            on_device.append(event)
    if device.type != "cuda":
        return breakdown(traced_ops(host, {}))
    kernels: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for event in on_device:
        kernels[event.linked_correlation_id()].append((event.name(), event.duration_ns() * _NANOSECONDS))
    ops = traced_ops(host, kernels)
    busy = union_seconds(
        [(event.start_ns() * _NANOSECONDS, event.end_ns() * _NANOSECONDS) for event in on_device],
        [(op.start, op.end) for op in ops if op.name == STEP_RANGE],
    )
    return breakdown(ops, busy_seconds=busy)


def _is_annotation(event: Any) -> bool:
    """A named range that the profiler repeats on the GPU's side: no kernel."""
    told = getattr(event, "is_user_annotation", None)
    return bool(told()) if told is not None else False


def traced_ops(events: Iterable[Any], kernels: dict[int, list[tuple[str, float]]]) -> list[TracedOp]:
    """The profiler's host events as a list in which parents come first."""
    ops: list[TracedOp] = []
    open_ops: dict[int, list[int]] = defaultdict(list)  # thread -> what has begun and not ended, the innermost last
    for event in sorted(events, key=lambda each: (each.start_ns(), -each.end_ns())):
        thread, start, end = event.start_thread_id(), event.start_ns() * _NANOSECONDS, event.end_ns() * _NANOSECONDS
        stack = open_ops[thread]
        while stack and ops[stack[-1]].end <= start:
            stack.pop()
        parent = stack[-1] if stack else None
        ops.append(
            TracedOp(
                name=event.name(),
                start=start,
                end=end,
                thread=thread,
                parent=parent,
                sequence_nr=event.sequence_nr(),
                forward_thread=event.fwd_thread_id(),
                is_node=event.scope() == 1,  # at::RecordScope::BACKWARD_FUNCTION
                kernels=tuple(kernels.get(event.correlation_id(), ())),
            )
        )
        stack.append(len(ops) - 1)
    return ops


def union_seconds(intervals: Iterable[tuple[float, float]], within: Iterable[tuple[float, float]]) -> float:
    """Seconds inside ``within`` (which do not overlap) that at least one of ``intervals`` covers."""
    merged: list[list[float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return sum(max(0.0, min(end, upper) - max(start, lower)) for lower, upper in within for start, end in merged)


def profile_row(found: Breakdown, *, global_step: int, reason: str | None) -> Profile:
    """The record's row. Layer types that cannot be told are absent, with the reason."""
    knows_layers = reason is None
    return Profile(
        global_step=global_step,
        num_steps=found.num_steps,
        step_seconds=found.step_seconds,
        layer_type_seconds=found.layer_type_seconds if knows_layers else None,
        operator_seconds=found.operator_seconds,
        phase_seconds=found.phase_seconds,
        by_group_seconds=found.by_group_seconds if knows_layers else None,
        cells=[
            {
                "layer_type": cell.layer_type,
                "operator": cell.operator,
                "phase": cell.phase,
                "seconds": cell.seconds,
                "num_calls": cell.num_calls,
            }
            for cell in found.cells
        ]
        if knows_layers
        else None,
        top_operators=[
            {"name": name, "seconds": seconds, "num_calls": calls} for name, seconds, calls in found.top_operators
        ],
        reason=reason,
    )
