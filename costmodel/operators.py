"""How many operators Python dispatches in a step: what the host's part of the step time is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from costmodel.adapters import plan_adapters
from costmodel.defaults import ResolvedJob
from costmodel.model_spec import ModelSpec
from costmodel.workload import Batch, expected_experts_hit


@dataclass(frozen=True, slots=True)
class Operators:
    """Operators that Python dispatches: for one micro-batch, and for one optimizer step."""

    forward: float
    recompute: float
    backward: float
    optimizer: float
    quantized_linear_calls: float  # calls into a 4- or 8-bit kernel library, outside a loop over experts
    loop_forward: float  # inside a Python loop over experts, one forward pass
    loop_backward: float
    loop_quantized_calls: float  # calls into such a library inside that loop, each pass


# Operators of one decoder layer, counted by tracing the real modules (transformers 5.24, peft 0.21): dense Llama, what
# query/key norms, stacked experts, an adapted linear and an adapted stack add. (forward, backward)
LAYER_OPERATORS: Final = (207, 477)
_QUERY_KEY_NORM_OPERATORS: Final = (38, 90)
_QUERY_KEY_NORMS: Final = ("q_norm", "k_norm", "query_layernorm", "key_layernorm", "q_layernorm", "k_layernorm")
_STACKED_EXPERTS_OPERATORS: Final = (61, 71)
_ADAPTED_LINEAR_OPERATORS: Final = (30, 63)
_ADAPTED_PARAMETER_OPERATORS: Final = (17, 29)
_AUTOCAST_OPERATORS_PER_ADAPTED_LINEAR: Final = 14
_CHECKPOINT_OPERATORS_PER_LAYER: Final = 30
MODEL_OPERATORS: Final = (79, 111)
_OPTIMIZER_OPERATORS: Final = {"full": 54, "adapted_linear": 12}
# One expert of a Python loop: its own three linears, activation and scatter; with adapters three pairs more.
_EXPERT_OPERATORS: Final = (30, 60)
_ADAPTED_EXPERT_OPERATORS: Final = (3 * (30 + 14), 129)


def operators(model: ModelSpec, job: ResolvedJob, batch: Batch) -> Operators:
    """Operators dispatched from Python; the host floor of an eager step is their number times a cost each."""
    adapters = plan_adapters(model, job)
    forward, backward = (float(value) for value in MODEL_OPERATORS)
    layers_forward = optimizer = quantized = visits = loop_forward = loop_backward = 0.0
    recomputes = 1 if job.gradient_checkpointing else 0
    passes = 2 + recomputes
    for layer, adapted, count in adapters.runs:
        each_forward, each_backward = (float(value) for value in LAYER_OPERATORS)
        if any(norm.name.endswith(_QUERY_KEY_NORMS) for norm in layer.norms):
            each_forward += _QUERY_KEY_NORM_OPERATORS[0]
            each_backward += _QUERY_KEY_NORM_OPERATORS[1]
        num_adapted = len(adapted.linears)
        each_forward += _ADAPTED_LINEAR_OPERATORS[0] * num_adapted
        each_backward += _ADAPTED_LINEAR_OPERATORS[1] * num_adapted
        each_forward += _ADAPTED_PARAMETER_OPERATORS[0] * len(adapted.parameters)
        each_backward += _ADAPTED_PARAMETER_OPERATORS[1] * len(adapted.parameters)
        if job.autocast_dtype:
            each_forward += _AUTOCAST_OPERATORS_PER_ADAPTED_LINEAR * num_adapted
        num_quantized = len(layer.linears) if job.quantization else 0
        optimizer += count * (
            _OPTIMIZER_OPERATORS["adapted_linear"] * (num_adapted + len(adapted.parameters))
            if job.is_peft
            else _OPTIMIZER_OPERATORS["full"]
        )
        for experts in layer.all_experts:
            if job.experts_implementation != "eager" or experts.runs_all:  # those that run all are one batched product
                each_forward += _STACKED_EXPERTS_OPERATORS[0]
                each_backward += _STACKED_EXPERTS_OPERATORS[1]
                continue
            hit = expected_experts_hit(experts.num_experts, experts.num_experts_per_tok, batch.num_tokens)
            visits += count * hit
            expert_forward = _EXPERT_OPERATORS[0] + (_ADAPTED_EXPERT_OPERATORS[0] if adapted.expert_linears else 0)
            expert_backward = _EXPERT_OPERATORS[1] + (_ADAPTED_EXPERT_OPERATORS[1] if adapted.expert_linears else 0)
            loop_forward += count * hit * expert_forward
            loop_backward += count * hit * expert_backward
        optimizer += count * _OPTIMIZER_OPERATORS["adapted_linear"] * adapted.num_experts * len(adapted.expert_linears)
        quantized += count * num_quantized * passes
        layers_forward += count * each_forward
        backward += count * (each_backward + _CHECKPOINT_OPERATORS_PER_LAYER * recomputes)
    return Operators(
        forward=forward + layers_forward,
        recompute=1.05 * layers_forward * recomputes,
        backward=backward,
        optimizer=optimizer,
        quantized_linear_calls=quantized,
        loop_forward=loop_forward,
        loop_backward=loop_backward,
        loop_quantized_calls=3 * visits if job.quantization and not job.fused_experts else 0.0,
    )
