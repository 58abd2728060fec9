"""Device memory while the weights are loaded, before the first step: what is there already, and the tensor at work.

transformers 5.24 loads one tensor after the other in the order of their names (``core_model_loading.py``): each comes to the
card in the type it is loaded in, and is quantised, joined or unpacked there, so for a moment more is held than in the end.
peft's preparation for 4- and 8-bit training then lifts what was not quantised to fp32, in the order of the modules.
A ``Trainer`` gives back what loading reserved before its first step: this peak stands apart from the step's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from costmodel.adapters import experts_are_stacked
from costmodel.defaults import BITSANDBYTES, ResolvedJob
from costmodel.framework_defaults import OWN_KERNEL_FRAMEWORKS
from costmodel.held_memory import element_bytes, quantized_element_bytes
from costmodel.model_spec import NO_ATTENTION, Experts, Layer, ModelSpec, Tower

# Bytes of an element beside its quantised form while that is made (bitsandbytes 0.50): the tensor as it was loaded, and for
# double quantisation the fp32 scale of 64 elements twice, for int8 a copy in fp16.
_BESIDE_DOUBLE_QUANTISED: Final = 2 * 4 / 64
_BESIDE_INT8: Final = 2.0
# Bytes of an element beside its new form while MXFP4 is unpacked (transformers 5.24, integrations/mxfp4.py): throughout,
# what was packed, and the scale of 32 elements in int32; for the part at work, an int32 place and a value for every second
# element; at the end, the whole once more, transposed.
_BESIDE_UNPACKED: Final = 0.5 + 1 / 32 + 4 / 32
_ELEMENTS_UNPACKED_AT_ONCE: Final = 32_768 * 1024 * 32


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One parameter: its bytes once it is there, and those beside them while it is made ready."""

    name: str
    kept_bytes: float
    beside_bytes: float = 0.0
    is_quantised: bool = False


@dataclass(frozen=True, slots=True)
class _Load:
    """What of a job decides how its weights are loaded: few jobs differ in it."""

    quantization: str | None
    double_quant: bool
    fused_experts: bool
    loaded_bytes: int  # of an element
    ready_bytes: int  # once what is not quantised was lifted

    @property
    def is_bitsandbytes(self) -> bool:
        return self.quantization in BITSANDBYTES


def load_peak_bytes(model: ModelSpec, job: ResolvedJob) -> int | None:
    """Most bytes of tensors on the card until the model is ready to train; ``None`` where it is not made ready there.

    bitsandbytes quantises on the card, and TRL loads onto it in a single process. Others load on the host and move what is
    ready, so nothing is held beside the weights; frameworks with loaders of their own were not read.
    """
    quantises = job.quantization in BITSANDBYTES
    loads_there = quantises or (job.framework == "trl" and job.num_gpus == 1 and job.quantization is None)
    if job.framework in OWN_KERNEL_FRAMEWORKS or job.sharding.parts(3) > 1 or not loads_there:
        return None
    types = element_bytes(job)
    ready = types.stream if quantises else types.weights
    return _load_peak_bytes(model, _Load(job.quantization, job.double_quant, job.fused_experts, types.weights, ready))


@lru_cache(maxsize=512)
def _load_peak_bytes(model: ModelSpec, load: _Load) -> int:
    peak = _peak(_in_order_of_names(model, load), 0.0)
    if load.ready_bytes > load.loaded_bytes:
        loaded = sum(each.kept_bytes for each in _in_order_of_names(model, load))
        peak = max(peak, _peak(_lifted(model, load), loaded))
    return int(peak)


def _peak(tensors: Iterable[_Tensor], held: float) -> float:
    peak = held
    for each in tensors:
        held += each.kept_bytes
        peak = max(peak, held + each.beside_bytes)
    return peak


def _in_order_of_names(model: ModelSpec, load: _Load) -> Iterator[_Tensor]:
    """As the weights are loaded. A head comes before the layers, a layer's attention often after its MLP."""

    def order(each: _Tensor) -> list[str]:
        return each.name.split(".")

    outside, first = sorted(_outside(model, load), key=order), f"{model.layers_path}.0".split(".")
    yield from (each for each in outside if order(each) < first)
    for layer, count in model.layers:
        yield from _equal_layers(sorted(_tensors(layer, model, load), key=order), count)
    yield from (each for each in outside if order(each) > first)


def _lifted(model: ModelSpec, load: _Load) -> Iterator[_Tensor]:
    """What lifting adds in the order of the modules, the head last: of each parameter, the old form beside the new."""

    def lifted(tensors: Iterable[_Tensor]) -> list[_Tensor]:
        rest = [each for each in tensors if not each.is_quantised]
        return [_Tensor(each.name, (factor - 1) * each.kept_bytes, each.kept_bytes) for each in rest]

    factor = load.ready_bytes / load.loaded_bytes

    outside = lifted(_outside(model, load))
    is_head = f"{model.head_path}.weight"
    yield from (each for each in outside if each.name != is_head)
    for layer, count in model.layers:
        yield from _equal_layers(lifted(_tensors(layer, model, load)), count)
    yield from (each for each in outside if each.name == is_head)


def _equal_layers(tensors: Sequence[_Tensor], count: int) -> Iterator[_Tensor]:
    """``count`` layers, one after the other: only the last can hold the peak, so those before it are one tensor."""
    yield _Tensor("", (count - 1) * sum(each.kept_bytes for each in tensors))
    yield from tensors


def _outside(model: ModelSpec, load: _Load) -> list[_Tensor]:
    """Embedding, head and what else is in no layer. bitsandbytes leaves embedding and head as they are."""
    width = load.loaded_bytes
    found = [(f"{model.embedding_path}.weight", model.embedding_params), (f"{model.head_path}.weight", model.head_params)]
    rest = Layer(model.linears, model.norms, NO_ATTENTION, weights=model.weights)
    of_towers = [tensor for tower in model.towers for tensor in _of_tower(tower, model, load)]
    return [_Tensor(name, width * size) for name, size in found if size] + list(_tensors(rest, model, load)) + of_towers


def _of_tower(tower: Tower, model: ModelSpec, load: _Load) -> Iterator[_Tensor]:
    """An encoder of images or sound."""
    of_layer = list(_tensors(tower.layer, model, load))
    for index in range(tower.num_layers):
        for each in of_layer:
            yield replace(each, name=f"{tower.layers_path}.{index}.{each.name}")
    yield from _tensors(tower.outside, model, load)


def _tensors(layer: Layer, model: ModelSpec, load: _Load) -> Iterator[_Tensor]:
    """The parameters of a layer, by their names inside it."""
    linears = {f"{each.name}.weight" for each in layer.linears}
    for experts in layer.all_experts:
        if not experts_are_stacked(experts, load.fused_experts):
            paths = [f"{experts.path}.{number}" for number in range(experts.num_experts)]
            linears |= {f"{path}.{leaf}.weight" for path in paths for leaf in experts.linear_names}
            linears |= {f"{experts.router}.weight"} if experts.router_was_linear else set()
    stacks = {stack.name: (experts, stack.num_matrices) for experts in layer.all_experts for stack in experts.stacks}
    for name, size in layer.parameters():
        plain = _Tensor(name, float(load.loaded_bytes * size))
        if name in stacks:
            yield _stack(plain, size, *stacks[name], model, load)
        elif load.is_bitsandbytes and name in linears:
            yield _quantised(name, size, size, load)
        else:
            yield plain


def _stack(plain: _Tensor, size: int, experts: Experts, num_matrices: int, model: ModelSpec, load: _Load) -> _Tensor:
    """The experts of a layer: in transformers 5 joined from those of the file, or unpacked; before it, one after another."""
    if not experts_are_stacked(experts, load.fused_experts):
        if load.is_bitsandbytes:
            return _quantised(plain.name, size, size // num_matrices, load)
        return plain
    if model.checkpoint_quantization == "mxfp4" and load.quantization is None:
        of_part = (4 + load.loaded_bytes) / 2 * min(size, _ELEMENTS_UNPACKED_AT_ONCE)
        return _Tensor(plain.name, plain.kept_bytes, _BESIDE_UNPACKED * size + max(of_part, plain.kept_bytes))
    return _Tensor(plain.name, plain.kept_bytes, plain.kept_bytes if experts.linear_names else 0.0)


def _quantised(name: str, num_elements: int, num_at_once: int, load: _Load) -> _Tensor:
    beside = float(load.loaded_bytes)
    if load.quantization == "int8":
        beside += _BESIDE_INT8
    elif load.double_quant:
        beside += _BESIDE_DOUBLE_QUANTISED
    return _Tensor(
        name,
        quantized_element_bytes(load.quantization, double_quant=load.double_quant) * num_elements,
        beside * num_at_once,
        is_quantised=True,
    )
