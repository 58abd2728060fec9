"""Where the seconds of profiled steps went: by layer type, operator and pass. Pure arithmetic on a trace.

Every operator of the trace belongs to one layer type. In the forward and in a recomputation that is the innermost
:data:`RANGE_PREFIX` range around it. In the backward it is the layer whose forward made the autograd node that runs:
torch gives both the same sequence number, and where several operators carry one number, the last to start made the node
(torch.autograd.profiler.emit_nvtx, "Forward-backward correlation"). A gradient's accumulation has no number; the engine
runs it directly after the node that made the gradient (its priority is the highest there is).

Seconds are an operator's own, without those inside it, so that they add up: on the CPU the processor's, Python between the
operators inside, on a GPU those of the kernels it launched.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

RANGE_PREFIX: Final = "ftcost::"
STEP_RANGE: Final = f"{RANGE_PREFIX}step"

LAYER_TYPES: Final = (
    "attention",
    "mixers",
    "mlp",
    "experts",
    "router",
    "norms",
    "embeddings",
    "head_and_loss",
    "adapters",
    "adapter_merge",
    "optimizer",
    "other",
)
IDLE: Final = "idle"  # a GPU that waits for the host: neither a layer's nor an operator's
HOST: Final = "host"

_NODE_PREFIX: Final = "autograd::engine::evaluate_function"
_ACCUMULATION: Final = "AccumulateGrad"
_OPTIMIZER_RANGES: Final = ("Optimizer.step#", "Optimizer.zero_grad#")  # put on by torch.optim itself

# Operator (or kernel) name -> what it is; the first that matches. Names of torch's own operators, of the libraries that
# transformers calls, and of their CUDA kernels.
_KINDS: Final = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("communication", r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast_$"),
        ("dequantisation", r"dequant"),
        ("fused_attention", r"scaled_dot_product|flash|efficient_attention|fmha|cudnn_attention|flex_attention"),
        ("scan", r"selective_scan|causal_conv1d|chunk_.*(delta|scan|rule)|ssd_|mamba"),
        (
            "matmul",
            r"(^|::|_)(mm|addmm|bmm|baddbmm|addbmm|matmul|linear|einsum|mv|addmv|dot)(_out)?$|(mm|bmm|linear)backward\d*$"
            r"|grouped_mm|_scaled_mm|gemm|gemv|cutlass|cublas|mkldnn_linear|wgrad|nvjet|triton_tem",
        ),
        ("convolution", r"conv"),
        ("softmax", r"softmax"),
        ("loss", r"nll_loss|cross_?entropy"),
        ("top_k", r"topk|(^|::)(arg)?sort$|radixsort|kthvalue"),
        ("norm", r"(layer|rms|group|batch)_?norm"),
        ("optimizer", r"_fused_(adam|sgd|adagrad)|adam|lion|multi_tensor_apply"),
        (
            HOST,  # views, allocation and reads: no arithmetic, only time in the host
            r"(^|::)(as_strided|view|_unsafe_view|_reshape_alias|reshape|t|numpy_t|transpose|permute|expand|unsqueeze|squeeze"
            r"|select|slice|narrow|chunk|split|split_with_sizes|unbind|detach|detach_|alias|resolve_conj|resolve_neg"
            r"|empty|empty_like|empty_strided|new_empty|resize_|resize_as_|set_|item|_local_scalar_dense|is_nonzero"
            r"|lift_fresh|result_type|unsafe_split|expand_as|view_as|diagonal|flatten|contiguous|unflatten|broadcast_to"
            r"|movedim|mT|tensor_split|record_stream|_version|is_same_size|set_data|real)$|^cuda|^hip",
        ),
        (
            "gather_scatter",
            r"index|gather|scatter|embedding|nonzero|one_hot|bincount|histc|masked_(select|scatter)|take|put|searchsorted",
        ),
        (
            "copy_and_cast",
            r"(^|::)(to|_to_copy|copy_|clone|cat|stack|type_as|_pin_memory|pad|constant_pad_nd|repeat|repeat_interleave)"
            r"|_like$|(^|::)(fill_|zero_|zeros|ones|full|arange|new_\w+)$|memcpy|memset|copy_kernel|CatArray",
        ),
        ("random", r"dropout|bernoulli|rand|normal_|uniform_"),
        (
            "reduction",
            r"(^|::|_)(sum|mean|norm|linalg_vector_norm|max|min|amax|amin|argmax|argmin|cumsum|std|var|any|all|logsumexp|prod"
            r"|aminmax|var_mean|std_mean)(_out)?$|reduce_kernel|triton_(red|per)",
        ),
        (
            "elementwise",
            r"(^|::|_)(r?add|r?sub|r?div|mul|neg|exp|log|pow|r?sqrt|rsqrt|sigmoid|tanh|silu|gelu|relu|softplus|abs|sign|clamp"
            r"|clamp_min|clamp_max|where|masked_fill|lerp|addcmul|addcdiv|sin|cos|square|reciprocal|maximum|minimum|eq|ne|lt|le|gt|ge"
            r"|logical_\w+|bitwise_\w+|isnan|isinf|isfinite|isin|floor|ceil|round|triu|tril|erf|softcap|floor_divide|remainder"
            r"|__\w+__|expm1|log1p|swiglu|rope|rotary)_?(backward)?\d*(_out)?$|_foreach_|elementwise|triton_poi",
        ),
    )
)


@dataclass(frozen=True, slots=True)
class TracedOp:
    """One operator, range or autograd node on one thread. ``parent``: its place in the same list, before this one."""

    name: str
    start: float  # seconds on the trace's clock
    end: float
    thread: int
    parent: int | None = None
    sequence_nr: int = -1
    forward_thread: int = 0  # of an autograd node: where its forward ran
    is_node: bool = False  # scope "backward": the node's function itself
    kernels: tuple[tuple[str, float], ...] = ()  # (name, seconds) it launched itself

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Cell:
    """Seconds a step in one layer type, kind of operator and pass."""

    layer_type: str
    operator: str
    phase: str  # forward, recompute, backward, optimizer, other
    seconds: float
    num_calls: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Means over the profiled steps. The cells sum to ``step_seconds``, and so does each of the tables."""

    num_steps: int
    step_seconds: float
    cells: tuple[Cell, ...]
    by_group_seconds: dict[str, float]  # under the names of the estimate's groups of a step
    top_operators: tuple[tuple[str, float, float], ...]  # (name, seconds a step, calls a step), the longest first

    @property
    def layer_type_seconds(self) -> dict[str, float]:
        return self._sums("layer_type")

    @property
    def operator_seconds(self) -> dict[str, float]:
        return self._sums("operator")

    @property
    def phase_seconds(self) -> dict[str, float]:
        return self._sums("phase")

    def _sums(self, name: str) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for cell in self.cells:
            sums[getattr(cell, name)] += cell.seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


@functools.lru_cache(maxsize=4096)
def operator_kind(name: str) -> str | None:
    """What an operator or a kernel does; ``None`` for one that no name of ours fits."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), None)


def breakdown(
    ops: Sequence[TracedOp],
    *,
    busy_seconds: float | None = None,
    num_top_operators: int = 25,
) -> Breakdown | None:
    """``ops``: the trace, each thread's operators by their start and after what they lie in. ``None`` without a whole step.

    ``busy_seconds``: of the GPU within the steps, which then counts; what the steps took beyond it is :data:`IDLE`. Without
    it the host's own time counts.
    """
    steps = [op for op in ops if op.name == STEP_RANGE]
    if not steps:
        return None
    return _Trace(ops, steps, busy_seconds).breakdown(num_top_operators)


class _Trace:
    """One pass over the operators in their order, so that what an operator lies in is known before it."""

    def __init__(self, ops: Sequence[TracedOp], steps: Sequence[TracedOp], busy_seconds: float | None) -> None:
        self._ops = ops
        self._steps = steps
        self._busy_seconds = busy_seconds
        self._layers: list[str | None] = [None] * len(ops)  # None: in no layer's range
        self._phases: list[str] = ["forward"] * len(ops)
        self._kinds: list[str | None] = [None] * len(ops)
        self._node_layers: dict[tuple[int, int], str | None] = {}  # (thread, sequence number) -> layer of the forward
        self._last_node: dict[int, str | None] = {}  # thread -> layer of the node that ran last
        self._last_backward_end = self._ends_of_backwards()

    def _ends_of_backwards(self) -> list[float]:
        """For each step, when its last autograd node ended; what follows is the optimizer's."""
        ends = [step.end for step in self._steps]
        nodes = [op for op in self._ops if op.name.startswith(_NODE_PREFIX)]
        for place, step in enumerate(self._steps):
            inside = [node.end for node in nodes if step.start <= node.start < step.end]
            ends[place] = max(inside, default=step.end)
        return ends

    def breakdown(self, num_top_operators: int) -> Breakdown:
        cells: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        groups: dict[str, float] = defaultdict(float)
        names: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        inner = [0.0] * len(self._ops)
        for op in self._ops:
            if op.parent is not None:
                inner[op.parent] += op.seconds
        thread = self._steps[0].thread
        is_device = self._busy_seconds is not None
        launched = 0.0
        for place, op in sorted(enumerate(self._ops), key=lambda pair: pair[1].start):
            self._place(place, op)
            step = self._step_of(op)
            if step is None:
                continue
            layer, phase = self._layers[place] or "other", self._phases[place]
            if is_device:
                parts = [(self._kernel_kind(place, name), name, seconds) for name, seconds in op.kernels]
            elif op.thread == thread:
                # An overlap of rounded times must not turn into negative seconds.
                parts = [(self._kinds[place] or "other", op.name, max(0.0, op.seconds - inner[place]))]
            else:
                parts = []
            for kind, name, seconds in parts:
                is_step = op.name == STEP_RANGE
                cell = cells[("other", HOST, "other") if is_step else (layer, kind, phase)]
                cell[0] += seconds
                cell[1] += not is_step
                groups[_group(layer, kind, op.name)] += seconds
                launched += seconds
                if kind != HOST or is_device:
                    names[name][0] += seconds
                    names[name][1] += 1
        total = sum(step.seconds for step in self._steps)
        if self._busy_seconds is not None:
            # Kernels of several streams run side by side: each counts its share of the time that any of them ran.
            busy = min(self._busy_seconds, total)
            scale = min(1.0, busy / launched) if launched > 0 else 0.0
            for values in (*cells.values(), *names.values()):
                values[0] *= scale
            groups = defaultdict(float, {name: seconds * scale for name, seconds in groups.items()})
            unlinked = busy - launched * scale
            if unlinked > 0:  # kernels that no operator launched (a CUDA graph's)
                cells[("other", "other", "other")][0] += unlinked
                groups["other"] += unlinked
            cells[(IDLE, IDLE, "other")][0] += total - busy
            groups[HOST] += total - busy
        count = len(self._steps)
        top = sorted(names.items(), key=lambda item: -item[1][0])[:num_top_operators]
        return Breakdown(
            num_steps=count,
            step_seconds=total / count,
            cells=tuple(
                Cell(*key, seconds=seconds / count, num_calls=calls / count)
                for key, (seconds, calls) in sorted(cells.items(), key=lambda item: -item[1][0])
                if seconds > 0
            ),
            by_group_seconds={
                name: seconds / count for name, seconds in sorted(groups.items(), key=lambda item: -item[1]) if seconds > 0
            },
            top_operators=tuple((name, seconds / count, calls / count) for name, (seconds, calls) in top if seconds > 0),
        )

    def _step_of(self, op: TracedOp) -> int | None:
        return next((place for place, step in enumerate(self._steps) if step.start <= op.start < step.end), None)

    def _place(self, place: int, op: TracedOp) -> None:
        """Layer, pass and kind of one operator, whose parent's are known."""
        parent = op.parent
        layer = self._layers[parent] if parent is not None else None
        phase = self._phases[parent] if parent is not None else "forward"
        if op.name.startswith(_NODE_PREFIX):
            layer, phase = self._layer_of_node(op), "backward"
            self._last_node[op.thread] = layer
        elif op.name.startswith(_OPTIMIZER_RANGES):
            layer, phase = "optimizer", "optimizer"
        elif op.name.startswith(RANGE_PREFIX) and op.name != STEP_RANGE:
            layer = op.name.removeprefix(RANGE_PREFIX)
            phase = "recompute" if phase in ("backward", "recompute") else phase
        elif self._is_top_level(op):
            step = self._step_of(op)
            if step is not None and op.start >= self._last_backward_end[step]:
                layer, phase = "optimizer", "optimizer"  # clipping, which torch gives no range
            elif operator_kind(op.name) in ("loss", "softmax"):
                layer = "head_and_loss"  # computed by the loop itself
        if op.sequence_nr >= 0 and not op.is_node and not op.name.startswith(_NODE_PREFIX):
            self._node_layers[op.thread, op.sequence_nr] = layer
        self._layers[place], self._phases[place] = layer, phase
        self._kinds[place] = self._kind(op, self._kinds[parent] if parent is not None else None)

    def _is_top_level(self, op: TracedOp) -> bool:
        return op.name != STEP_RANGE and (op.parent is None or self._ops[op.parent].name == STEP_RANGE)

    def _layer_of_node(self, op: TracedOp) -> str | None:
        if _ACCUMULATION in op.name:
            return self._last_node.get(op.thread)
        return self._node_layers.get((op.forward_thread, op.sequence_nr))

    @staticmethod
    def _kind(op: TracedOp, of_parent: str | None) -> str | None:
        if op.is_node or "::" not in op.name or op.name.startswith((_NODE_PREFIX, RANGE_PREFIX)):
            return HOST  # Python, or the engine, between operators
        return operator_kind(op.name) or of_parent

    def _kernel_kind(self, place: int, name: str) -> str:
        kind = self._kinds[place]
        return (kind if kind not in (None, HOST) else None) or operator_kind(name) or "other"


def _group(layer: str, kind: str, name: str) -> str:
    """The estimate's group of a step that this operator's time is part of."""
    if layer in ("optimizer", "adapters", "adapter_merge"):
        return layer
    if kind in (HOST, "dequantisation", "scan", "communication"):
        return kind
    if layer in ("head_and_loss", "router", "other"):
        return layer
    if layer == "attention":
        is_scores = kind in ("fused_attention", "softmax") or (kind == "matmul" and "bmm" in name)
        return "attention_scores" if is_scores else "attention_linears" if kind == "matmul" else "elementwise"
    if kind == "matmul":
        return {"mixers": "attention_linears", "mlp": "mlp", "experts": "experts"}.get(layer, "elementwise")
    return "elementwise"
