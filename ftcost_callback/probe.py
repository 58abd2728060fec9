"""Measures the device at hand: a description for the estimate that rests on no data sheet. ``ftcost probe`` stores it.

from ftcost_callback.probe import probe_cpu
estimate_trainer(trainer, gpu=probe_cpu())

The median of the repeats counts: what this machine usually does, its neighbours included, as a step of the run will meet
them. Each rate is of work as a training step has it: operands come from memory as often as they do there.

On a CPU this is run in the tests. The part for CUDA is written from torch's documentation and has not been run yet.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import operator
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from costmodel.errors import CostModelError
from ftcost_callback.host_load import ProcessorWait
from ftcost_callback.live_device import device_facts, versions

_MATMUL_SIZE: Final = 1024  # 2.1 GFLOP: large enough for every core, small enough to repeat
_CUDA_MATMUL_SIZE: Final = 8192  # 1.1 TFLOP
_MANY_ROWS: Final = 1024
_PRODUCT_WIDTH: Final = 512
_SMALL_PRODUCTS: Final = ((16, 512), (64, 512), (192, 128))  # (rows, width): few rows, narrow weights
_LARGEST_HALF_SIZE: Final = 4096.0
_PRODUCT_BYTES: Final = 96 * 2**20  # of operands, beyond most caches
_COPY_BYTES: Final = 2**28  # far beyond any cache
_MIB: Final = 2**20
# Bytes of one tensor. glibc takes what is larger than 32 MiB fresh from the system each time (mallopt(3), M_MMAP_THRESHOLD),
# and the page faults of that cost more than the arithmetic.
_ELEMENTWISE_BYTES: Final = (_MIB // 4, _MIB, 4 * _MIB, 12 * _MIB, 30 * _MIB, 40 * _MIB)
_REUSED_BYTES: Final = 32 * _MIB
_KEPT_BYTES: Final = 192 * _MIB  # of results that are kept for the backward
_MOST_KEPT: Final = 48
_ATTENTION_TOKENS: Final = (64, 256, 1024)
_ATTENTION_HEADS: Final = 8
_ATTENTION_HEAD_DIM: Final = 64
_ATTENTION_UNITS: Final = 3.5  # products of a forward (2) and of a backward that computes the scores again (5), in forwards
_LOSS_VOCABULARY: Final = 2048
_LOSS_TOKENS: Final = (64, 512, 2048, 5120)  # 0.5 to 40 MiB of logits
_OPTIMIZER_TENSORS: Final = 16
_OPTIMIZER_ELEMENTS: Final = 2**19  # of each: 128 MiB of parameters, gradients and states, beyond most caches
_SMALL_TENSORS: Final = 64
_QUANTIZED_SIZE: Final = 2048
_FEWEST_REPEATS: Final = 3
_LAYERS: Final = 4  # of a tiny model
_LINEAR_BYTES: Final = _MIB  # of a small linear's weight, about what a core's own cache holds
_SMALL: Final = 8
_BUSY: Final = 0.05  # share of the probe that waited for a processor, from which it is said
# Shares of the time.
_SHARES: Final = {
    "fp32": 0.12,
    "bf16": 0.12,
    "products": 0.12,
    "copy": 0.1,
    "elementwise": 0.16,
    "attention": 0.12,
    "loss": 0.12,
    "optimizer": 0.06,
    "operator": 0.08,
    "dequantisation": 0.02,
}

_Clock = Callable[[], float]
_Say = Callable[[str], None]


def probe(
    device: str | None = None, *, seconds: float = 20.0, num_threads: int | None = None, say: _Say | None = None
) -> dict[str, Any]:
    """A ``GpuSpec`` mapping of ``device`` ("cpu", "cuda", "cuda:1"; default: the first card, else the CPU).

    Raises :class:`CostModelError` for a device that is not there or is of another kind.
    """
    import torch

    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    if kind == "cpu":
        return probe_cpu(seconds=seconds, num_threads=num_threads, say=say)
    if kind != "cuda":
        raise CostModelError(f"no device {name!r} can be probed: give cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise CostModelError(f"no CUDA device is seen here, so {name} cannot be probed; --device cpu probes the processor")
    return probe_cuda(name, seconds=seconds, say=say)


def probe_cpu(
    *,
    seconds: float = 20.0,
    num_threads: int | None = None,
    clock: _Clock = time.perf_counter,
    say: _Say | None = None,
) -> dict[str, Any]:
    """A ``GpuSpec`` mapping of this CPU: matmul rates, memory bandwidth, seconds to dispatch an operator, and ``probed``.

    Takes about ``seconds``, with ``num_threads`` (default: as torch is set), which is put back; no random number is drawn.
    The spec has no data-sheet peak, so there is no MFU on it. ``clock=time.process_time`` measures the processor's time in
    place of the clock on the wall: with one thread the two are the same on a quiet machine. ``say`` is given a line for each
    stage (default: stderr).
    """
    import torch

    say = say if say is not None else _to_stderr
    threads_before = torch.get_num_threads()
    facts = device_facts("cpu")
    name = facts.get("name", "CPU")
    waited = ProcessorWait()
    try:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        threads = torch.get_num_threads()
        say(f"ftcost: probing {name} with {threads} threads, about {seconds:.0f} s")
        bench = _Bench(torch.device("cpu"), seconds, clock, say)
        fp32 = bench.matmul_rate(torch.float32, "fp32", _MATMUL_SIZE)
        bf16 = bench.matmul_rate(torch.bfloat16, "bf16", _MATMUL_SIZE)
        bandwidth = bench.copy_rate(_COPY_BYTES)
        probed = bench.rates()
        per_operator = None
        if (by_pass := bench.seconds_per_operator_by_pass()) is not None:
            probed["forward_seconds_per_operator"], probed["backward_seconds_per_operator"] = by_pass
            counted = _counted_operators()
            per_operator = sum(map(operator.mul, by_pass, counted)) / sum(counted)
        probed["dequantisation_seconds_per_weight"] = bench.dequantisation()
    finally:
        torch.set_num_threads(threads_before)
    say(_rates_line(fp32, bf16, bandwidth, per_operator))
    _say_if_busy(waited, say)
    return _present(
        {
            "name": f"{name} ({threads} threads)",
            "vendor": "CPU",
            "memory_bytes": facts.get("memory_bytes"),
            "memory_bandwidth_bytes_per_second": bandwidth,
            "measured_fp32_matmul_flops_per_second": fp32,
            "measured_bf16_matmul_flops_per_second": bf16,
            "seconds_per_operator": per_operator,
            "source": _source(),
            "probed": _present(probed),
        }
    )


def probe_cuda(device: str = "cuda", *, seconds: float = 20.0, say: _Say | None = None) -> dict[str, Any]:
    """A ``GpuSpec`` mapping of a CUDA device; the card's data sheet is taken where the catalogue recognises it.

    Written from torch's documentation; not run on a card yet. The context is what the driver counts as used beyond torch's
    own reservations, so other processes on the card are in it: probe a card that nobody else uses.
    """
    import torch

    from costmodel.gpu_catalog import find_gpu

    say = say if say is not None else _to_stderr
    where = torch.device(device)
    facts = device_facts(where)
    say(f"ftcost: probing {facts['name']}, about {seconds:.0f} s")

    def clock() -> float:
        torch.cuda.synchronize(where)
        return time.perf_counter()

    bench = _Bench(where, seconds, clock, say)
    granularity = bench.allocation_granularity()
    tf32_before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        fp32 = bench.matmul_rate(torch.float32, "fp32", _CUDA_MATMUL_SIZE // 2)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32_before
    has_bf16 = facts["compute_capability"] >= "8"
    bf16 = bench.matmul_rate(torch.bfloat16, "bf16", _CUDA_MATMUL_SIZE) if has_bf16 else None
    bandwidth = bench.copy_rate(4 * _COPY_BYTES)
    per_operator = bench.seconds_per_operator()
    probed = {
        "dequantisation_seconds_per_weight": bench.dequantisation(),
        "allocation_granularity_bytes": granularity,
        "context_bytes": bench.context_bytes(),
    }
    say(_rates_line(fp32, bf16, bandwidth, per_operator))
    known = facts.get("gpu")
    sheet = find_gpu(known).model_dump(exclude_none=True) if isinstance(known, str) else {}
    return _present(
        {
            **sheet,
            "name": facts["name"],
            "memory_bytes": facts["memory_bytes"],
            "compute_capability": facts["compute_capability"],
            "memory_bandwidth_bytes_per_second": bandwidth,
            "measured_fp32_matmul_flops_per_second": fp32,
            "measured_bf16_matmul_flops_per_second": bf16,
            "seconds_per_operator": per_operator,
            "source": _source(),
            "probed": _present(probed),
        }
    )


@dataclass(slots=True)
class _Bench:
    """One device, the seconds there are for it, and the measurements."""

    device: Any
    seconds: float
    clock: _Clock
    say: _Say

    def usual_seconds(self, work: Callable[[], Any], share: float, *, between: Callable[[], Any] | None = None) -> float:
        """Median seconds of one ``work()``, repeated until the share of the time is used; the first one warms up.

        ``between`` is done before each and not timed.
        """
        start = self.clock()
        work()
        taken: list[float] = []
        while len(taken) < (_FEWEST_REPEATS if self.seconds else 1) or self.clock() - start < share * self.seconds:
            if between is not None:
                between()
            before = self.clock()
            work()
            taken.append(self.clock() - before)
        return max(statistics.median(taken), 1e-9)

    def full(self, *shape: int, value: float = 0.5, **how: Any) -> Any:
        import torch

        return torch.full(shape, value, device=self.device, **how)

    def matmul_rate(self, dtype: Any, stage: str, size: int) -> float | None:
        """FLOP/s of a square matrix product; ``None`` where the device has none for ``dtype``."""
        import torch

        self.say(f"ftcost: matrix products in {stage}")
        left, right = self.full(size, size, dtype=dtype), self.full(size, size, value=0.25, dtype=dtype)
        out = torch.empty_like(left)
        with torch.no_grad():
            try:
                taken = self.usual_seconds(lambda: torch.mm(left, right, out=out), _SHARES[stage])
            except RuntimeError:
                return None
        return 2.0 * size**3 / taken

    def copy_rate(self, num_bytes: int) -> float:
        """Bytes read and written each second by a copy that no cache holds."""
        import torch

        self.say("ftcost: memory bandwidth")
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2.0 * num_bytes / self.usual_seconds(lambda: target.copy_(source), _SHARES["copy"])

    def rates(self) -> dict[str, Any]:
        """What a step on a CPU has beside large products."""
        self.say("ftcost: small products, element-wise operators")
        rate, half_size = self.products()
        elementwise = [(size, self.elementwise_rate(size)) for size in _ELEMENTWISE_BYTES]
        self.say("ftcost: attention, loss, optimizer")
        attention = [(tokens, self.attention_rate(tokens)) for tokens in _ATTENTION_TOKENS]
        loss = [(4 * tokens * _LOSS_VOCABULARY, self.loss_seconds_per_logit(tokens)) for tokens in _LOSS_TOKENS]
        return {
            "matmul_flops_per_second": rate,
            "matmul_half_size": half_size,
            "elementwise_bytes_per_second": elementwise,
            "attention_flops_per_second": attention,
            "loss_seconds_per_logit": loss,
            "optimizer_seconds_per_parameter": self.optimizer_seconds(_OPTIMIZER_TENSORS, _OPTIMIZER_ELEMENTS)
            / (_OPTIMIZER_TENSORS * _OPTIMIZER_ELEMENTS),
            "optimizer_seconds_per_tensor": self.optimizer_seconds(_SMALL_TENSORS, _SMALL) / _SMALL_TENSORS,
        }

    def products(self) -> tuple[float, float]:
        """(FLOP/s that fp32 products approach, size h of a dimension at which half of it is reached).

        Each product has operands that no cache holds, as layer after layer does: forward, both gradients. A dimension D is
        taken to cost what D + h would; h is the mean of what few rows and what narrow weights give.
        """
        import torch

        def seconds(rows: int, width: int) -> float:
            number = max(3, _PRODUCT_BYTES // (4 * width * (width + 2 * rows)))
            weights = [self.full(width, width) for _ in range(number)]
            inputs = [self.full(rows, width) for _ in range(number)]
            outputs = [self.full(rows, width) for _ in range(number)]

            def work() -> None:
                for weight, given, out in zip(weights, inputs, outputs, strict=True):
                    torch.mm(given, weight.t(), out=out)
                for weight, given, out in zip(weights, inputs, outputs, strict=True):
                    torch.mm(out, weight, out=given)
                for weight, given, out in zip(weights, inputs, outputs, strict=True):
                    torch.mm(out.t(), given, out=weight)
                    given.fill_(0.5)  # else the numbers grow without bound

            return self.usual_seconds(work, _SHARES["products"] / (1 + len(_SMALL_PRODUCTS))) / (3 * number)

        with torch.no_grad():
            large = (_MANY_ROWS, _PRODUCT_WIDTH)
            of_large = seconds(*large)
            halves = [_half_size(seconds(*small) / of_large, small, large) for small in _SMALL_PRODUCTS]
        half = sum(halves) / len(halves)
        return _padded_flops(large, half) / of_large, half

    def elementwise_rate(self, num_bytes: int) -> float:
        """Bytes each second of a chain of products of tensors of ``num_bytes``: read one result, read an operand, write."""
        import torch

        number = min(_MOST_KEPT, max(4, _KEPT_BYTES // num_bytes))
        operands = [self.full(num_bytes // 4) for _ in range(number)]
        results = [torch.empty_like(each) for each in operands]
        is_fresh = num_bytes > _REUSED_BYTES

        def work() -> None:
            hidden = operands[0]
            kept = []
            for operand, result in zip(operands, results, strict=True):
                hidden = hidden * operand if is_fresh else torch.mul(hidden, operand, out=result)
                kept.append(hidden)

        with torch.no_grad():
            taken = self.usual_seconds(work, _SHARES["elementwise"] / len(_ELEMENTWISE_BYTES))
        return 3.0 * num_bytes * number / taken

    def attention_rate(self, tokens: int) -> float:
        """FLOP/s of causal attention, forward and backward, of the half of the square that it needs."""
        import torch

        sequences = max(1, 512 // tokens)
        shape = (sequences, _ATTENTION_HEADS, tokens, _ATTENTION_HEAD_DIM)
        query, key, value = (self.full(*shape, requires_grad=True) for _ in range(3))
        gradient = self.full(*shape)

        def work() -> None:
            query.grad = key.grad = value.grad = None
            torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).backward(gradient)  # type: ignore[no-untyped-call]

        with torch.enable_grad():
            taken = self.usual_seconds(work, _SHARES["attention"] / len(_ATTENTION_TOKENS))
        forward = 4.0 * sequences * _ATTENTION_HEADS * _ATTENTION_HEAD_DIM * tokens**2 / 2
        return _ATTENTION_UNITS * forward / taken

    def loss_seconds_per_logit(self, tokens: int) -> float:
        """Seconds of a logit, written by its product, in the loss and in its gradient."""
        import torch

        labels = torch.arange(tokens, device=self.device) % _LOSS_VOCABULARY

        def work() -> None:
            logits = self.full(tokens, _LOSS_VOCABULARY, requires_grad=True)  # fresh, as the head's product writes them
            torch.nn.functional.cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]

        with torch.enable_grad():
            taken = self.usual_seconds(work, _SHARES["loss"] / len(_LOSS_TOKENS))
        return taken / (tokens * _LOSS_VOCABULARY)

    def optimizer_seconds(self, num_tensors: int, num_elements: int) -> float:
        """Seconds of a step of ``num_tensors`` fp32 tensors: the gradients' norm, the clipping, and fused AdamW."""
        import torch

        weights = [torch.nn.Parameter(self.full(num_elements)) for _ in range(num_tensors)]
        for each in weights:
            each.grad = self.full(num_elements, value=1e-3)
        optimizer = torch.optim.AdamW(weights, lr=1e-6, fused=True)

        def work() -> None:
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()

        return self.usual_seconds(work, _SHARES["optimizer"] / 2)

    def seconds_per_operator(self) -> float | None:
        """Seconds of one operator of a decoder layer whose arithmetic is next to nothing; ``None`` without transformers.

        Forward and backward of transformers' own Llama, over the operators that the time model counts for it.
        """
        import torch

        made = self._tiny_model()
        if made is None:
            return None
        model, ids = made
        large = self.full(_MATMUL_SIZE, _MATMUL_SIZE)
        with torch.enable_grad():
            taken = self.usual_seconds(
                lambda: model(input_ids=ids, labels=ids).loss.backward(),
                _SHARES["operator"],
                between=lambda: torch.mm(large, large),  # a step's own products put other things into the caches
            )
        return taken / sum(_counted_operators())

    def seconds_per_operator_by_pass(self) -> tuple[float, float] | None:
        """The same (of the forward, which Python dispatches; of the backward, which autograd does), on a CPU.

        Before each linear the caches are filled with something else, as the products of a step do; that is not counted.
        """
        import torch

        made = self._tiny_model()
        if made is None:
            return None
        model, ids = made
        large, operands = self.full(_MATMUL_SIZE, _MATMUL_SIZE), self.full(_LINEAR_BYTES // 4)
        hidden = 0.0
        forwards: list[float] = []
        backwards: list[float] = []

        def fill_caches(*_: Any) -> None:
            nonlocal hidden
            before = self.clock()
            operands.mul_(1.0)
            hidden += self.clock() - before

        def work() -> None:
            nonlocal hidden
            hidden, before = 0.0, self.clock()
            loss = model(input_ids=ids, labels=ids).loss
            between = self.clock()
            forwards.append(between - before - hidden)
            loss.backward()
            backwards.append(self.clock() - between)

        for each in model.modules():
            if isinstance(each, torch.nn.Linear):
                each.register_forward_pre_hook(fill_caches)
        with torch.enable_grad():
            self.usual_seconds(work, _SHARES["operator"], between=lambda: torch.mm(large, large))
        of_forward, of_backward = _counted_operators()
        return statistics.median(forwards[1:]) / of_forward, statistics.median(backwards[1:]) / of_backward

    def _tiny_model(self) -> tuple[Any, Any] | None:
        """(Llama whose arithmetic is next to nothing, token ids); ``None`` without transformers."""
        import torch

        self.say("ftcost: cost of an operator")
        try:
            from transformers import LlamaConfig, LlamaForCausalLM
        except ImportError:
            return None

        config = LlamaConfig(
            vocab_size=_SMALL, hidden_size=_SMALL, intermediate_size=_SMALL, num_hidden_layers=_LAYERS,
            num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=_SMALL, pad_token_id=0,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            model = LlamaForCausalLM(config).to(self.device)
        return model, torch.zeros(1, _SMALL // 2, dtype=torch.long, device=self.device)

    def dequantisation(self) -> dict[str, float] | None:
        """Seconds of a weight from NF4 codes to bf16; ``None`` where bitsandbytes is not installed or refuses."""
        import torch

        try:
            with _quiet("bitsandbytes.backends.cpu.ops"):  # asks for a kernel of another operation than the one measured
                from bitsandbytes import functional
        except ImportError:
            return None
        self.say("ftcost: dequantisation of NF4")
        try:
            codes, state = functional.quantize_4bit(
                self.full(_QUANTIZED_SIZE, _QUANTIZED_SIZE, dtype=torch.bfloat16), quant_type="nf4"
            )
            taken = self.usual_seconds(lambda: functional.dequantize_4bit(codes, state), _SHARES["dequantisation"])
        except (RuntimeError, NotImplementedError, ValueError):
            return None
        return {"nf4": taken / _QUANTIZED_SIZE**2}

    def allocation_granularity(self) -> int:
        """Bytes that torch's allocator counts for an allocation of one byte (CUDA)."""
        import torch

        before = torch.cuda.memory_allocated(self.device)
        held = torch.empty(1, dtype=torch.uint8, device=self.device)
        after = torch.cuda.memory_allocated(self.device)
        del held
        return int(after - before)

    def context_bytes(self) -> int:
        """Bytes of the card in use beyond what torch has reserved, after products and kernels were loaded (CUDA)."""
        import torch

        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free - torch.cuda.memory_reserved(self.device))


@contextlib.contextmanager
def _quiet(logger_name: str) -> Iterator[None]:
    """Errors alone are shown of that logger."""
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _counted_operators() -> tuple[int, int]:
    """(forward, backward) operators that the time model counts for the tiny model."""
    from costmodel.operators import LAYER_OPERATORS, MODEL_OPERATORS

    of_forward, of_backward = (
        of_model + _LAYERS * of_layer for of_model, of_layer in zip(MODEL_OPERATORS, LAYER_OPERATORS, strict=True)
    )
    return of_forward, of_backward


def _padded_flops(shape: tuple[int, int], half: float) -> float:
    """FLOPs of (rows x width) · (width x width), each dimension longer by ``half``."""
    rows, width = shape
    return 2.0 * (rows + half) * (width + half) ** 2


def _half_size(ratio: float, small: tuple[int, int], large: tuple[int, int]) -> float:
    """The ``half`` at which the seconds of ``small`` are ``ratio`` times those of ``large``; 0 where it takes even less."""
    low, high = 0.0, _LARGEST_HALF_SIZE  # the ratio of the padded FLOPs grows with it
    for _ in range(60):
        middle = (low + high) / 2
        if _padded_flops(small, middle) / _padded_flops(large, middle) < ratio:
            low = middle
        else:
            high = middle
    return low


def summary(spec: Mapping[str, Any]) -> str:
    """What was measured, in a few lines."""
    probed = spec.get("probed", {})
    lines = [spec["name"]]
    for label, value, unit, scale in (
        ("matrix products, fp32", spec.get("measured_fp32_matmul_flops_per_second"), "GFLOP/s", 1e-9),
        ("matrix products, bf16", spec.get("measured_bf16_matmul_flops_per_second"), "GFLOP/s", 1e-9),
        ("products in a step approach, fp32", probed.get("matmul_flops_per_second"), "GFLOP/s", 1e-9),
        ("memory bandwidth", spec.get("memory_bandwidth_bytes_per_second"), "GB/s", 1e-9),
        ("an operator", spec.get("seconds_per_operator"), "us", 1e6),
        ("NF4 to bf16", probed.get("dequantisation_seconds_per_weight", {}).get("nf4"), "ns a weight", 1e9),
        ("optimizer, clipping inside", probed.get("optimizer_seconds_per_parameter"), "ns a parameter", 1e9),
        ("allocations are multiples of", probed.get("allocation_granularity_bytes"), "bytes", 1),
        ("context", probed.get("context_bytes"), "MiB", 2**-20),
    ):
        if value is not None:
            lines.append(f"  {label:34}{value * scale:>10.4g} {unit}")
    return "\n".join(lines)


def _source() -> str:
    return f"ftcost probe of {datetime.date.today().isoformat()}, torch {versions().get('torch', '')}"


def _say_if_busy(waited: ProcessorWait, say: _Say) -> None:
    share = waited.fraction()
    if share is not None and share > _BUSY:
        say(f"ftcost: others used the processor for {share:.0%} of the probe; on a quiet machine it tells more")


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _giga(rate: float | None) -> str:
    return "no" if rate is None else f"{rate / 1e9:.1f}"


def _rates_line(fp32: float | None, bf16: float | None, bandwidth: float, per_operator: float | None) -> str:
    operator = "unknown" if per_operator is None else f"{per_operator * 1e6:.2f}"
    rates = f"{_giga(fp32)} GFLOP/s in fp32, {_giga(bf16)} in bf16, {bandwidth / 1e9:.1f} GB/s"
    return f"ftcost: {rates}, {operator} us an operator"


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
