"""What the backward of one layer holds at its worst moments. Bytes for each token.

Read off the traces of the real modules (``tests/tracing``).
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.adapters import LayerAdapters
from costmodel.defaults import ResolvedJob
from costmodel.held_memory import ElementBytes
from costmodel.layer_kernels import KEPT_BY_ACTIVATION, has_liger_norms
from costmodel.model_spec import Experts, Layer, ModelSpec


@dataclass(frozen=True, slots=True)
class Instant:
    """A moment in the backward of one layer: what the layer has let go by then, and what is held in addition.

    Bytes for each token, for each (token, attended key), and whatever the batch. ``done``: its finished gradients.
    """

    done: float = 0.0
    freed_per_token: float = 0.0
    freed_per_pair: float = 0.0
    extra_per_token: float = 0.0
    extra_per_pair: float = 0.0
    extra_fixed: float = 0.0


def feed_forward_instants(
    model: ModelSpec,
    layer: Layer,
    adapted: LayerAdapters,
    job: ResolvedJob,
    types: ElementBytes,
    copy_bytes: float,
    dense: float,
    holds_inputs: bool,
) -> tuple[Instant, ...]:
    """The moments of a layer's backward around its feed-forward (of a layer without one: around its mixer).

    ``dense``: bytes a token that the dense MLP keeps; ``copy_bytes``: those of an adapter's own copy of an input element.
    """
    if layer.experts:
        return _of_stacked_experts(layer.experts, adapted, job, types, float(types.stream * model.hidden_size))
    if not layer.mlp_width:
        return (_of_one_mixer(model, layer, job, types),)
    return _of_dense_mlp(model, layer, adapted, job, types, copy_bytes, dense, holds_inputs)


def _of_stacked_experts(
    experts: Experts, adapted: LayerAdapters, job: ResolvedJob, types: ElementBytes, hidden_bytes: float
) -> tuple[Instant, ...]:
    """``hidden_bytes``: of one hidden state of the stream."""
    full, hidden, compute = not job.is_peft, experts.hidden_size, types.compute
    weight_bytes = types.weights if full else 0
    stack_rows = 2.0 * experts.num_experts_per_tok
    down_params = experts.num_experts * experts.hidden_size * experts.intermediate_size
    stacks = [each.base_params for each in adapted.parameters if each.num_matrices > 1]
    if full:
        stacks = [2 * down_params, down_params]
    if stacks and job.experts_implementation == "eager" and job.fused_experts:
        # a loop that picks one expert of the stack after the other: each gives a gradient as large as the stack, most
        # of it zero (select_backward), beside what has been added up of each; an adapter's is of its merged copy
        through = stack_rows * (hidden + 4 * experts.intermediate_size) / experts.num_experts  # the first expert
        fixed = float(weight_bytes if full else compute) * (sum(stacks) + max(stacks))
        return (Instant(freed_per_token=through, extra_per_token=hidden_bytes, extra_fixed=fixed),)
    if full:  # gate_up: its gradient is being built, down's is done
        return (
            # the activation: the gradients of the product and of both branches
            Instant(
                done=float(weight_bytes * down_params),
                freed_per_token=stack_rows * (hidden + experts.intermediate_size),
                extra_per_token=3 * stack_rows * experts.intermediate_size + hidden_bytes,
            ),
            Instant(
                done=float(weight_bytes * down_params),
                freed_per_token=stack_rows * (hidden + 4 * experts.intermediate_size),
                extra_per_token=stack_rows * (2 * experts.intermediate_size + hidden) + hidden_bytes,
                extra_fixed=2.0 * weight_bytes * down_params,
            ),
        )
    adapts_down = any(stack.name == each.name for stack in experts.stacks[-1:] for each in adapted.parameters)
    if adapted.parameters and not adapts_down:
        # gate_up alone. The activation: the gradients of the product and of both branches. Then, all but its own input
        # let go, the full gradient of its merged stack.
        return (
            Instant(
                freed_per_token=stack_rows * hidden,
                extra_per_token=3 * stack_rows * experts.intermediate_size + hidden_bytes,
            ),
            Instant(
                freed_per_token=stack_rows * (hidden + 3 * experts.intermediate_size),
                extra_per_token=stack_rows * (2 * experts.intermediate_size + hidden) + hidden_bytes,
                extra_fixed=2.0 * compute * down_params,
            ),
            Instant(extra_per_token=3 * stack_rows * hidden + hidden_bytes),
        )
    if adapted.parameters:  # down: the full gradient of the merged stack, while all but its result is still there
        return (
            Instant(
                freed_per_token=stack_rows * hidden,
                extra_per_token=stack_rows * (hidden + experts.intermediate_size) + hidden_bytes,
                extra_fixed=compute * float(down_params),
            ),
            # the gradients of the experts' results before and after the routing weights, and of those weights
            Instant(extra_per_token=3 * stack_rows * hidden + hidden_bytes),
        )
    return (Instant(extra_per_token=stack_rows * (hidden + 2 * experts.intermediate_size) + 2 * hidden_bytes),)


def _of_one_mixer(model: ModelSpec, layer: Layer, job: ResolvedJob, types: ElementBytes) -> Instant:
    widest = max(layer.linears, key=lambda each: each.out_features, default=None)
    if widest is None:
        return Instant()
    weight_bytes = types.compute if job.quantization else 0
    if not job.is_peft:
        weight_bytes = types.weights
    return Instant(
        extra_per_token=2.0 * types.compute * widest.out_features + 2 * types.stream * model.hidden_size,
        extra_fixed=float(weight_bytes * widest.num_params),
    )


def _of_dense_mlp(
    model: ModelSpec,
    layer: Layer,
    adapted: LayerAdapters,
    job: ResolvedJob,
    types: ElementBytes,
    copy_bytes: float,
    dense: float,
    holds_inputs: bool,
) -> tuple[Instant, ...]:
    full, hidden, width = not job.is_peft, model.hidden_size, layer.mlp_width
    stream, mlp, compute = types.stream, types.mlp, types.compute
    weight_bytes = types.weights if full else 0
    down = max(layer.at("mlp_out"), key=lambda each: each.in_features)
    down_bytes = float(weight_bytes * down.in_features * down.out_features)
    adapted_by_name = {each.linear.name: each for each in adapted.linears}
    down_adapted, into_adapted = (
        down.name in adapted_by_name,
        [each for each in layer.at("mlp_in") if each.name in adapted_by_name],
    )
    holds_result = KEPT_BY_ACTIVATION.get(model.hidden_act, (1, False))[1]
    own_input = 0.0  # what down, or its A, keeps of its input
    if (full or down_adapted) and not (holds_result and not layer.is_gated):
        own_input = float((mlp if full or copy_bytes == 0.0 else copy_bytes) * width)
    if holds_inputs and copy_bytes != 0.0:
        own_input += mlp * width
    # the activation: down is through; the gradients of the product and of both branches, or before and after the activation
    is_liger = has_liger_norms(model, job)
    branches = 3.0 if layer.is_gated else 2.0
    if is_liger and layer.is_gated:
        branches = 1.0  # the branches' gradients take their own place
    moments = [Instant(done=down_bytes, freed_per_token=own_input, extra_per_token=branches * mlp * width + stream * hidden)]
    if full and not is_liger:  # the norm before the MLP: its weights are through; five fp32 copies of a hidden state
        through = float(weight_bytes * sum(each.in_features * each.out_features for each in layer.at("mlp_in", "mlp_out")))
        moments.append(
            Instant(done=through, freed_per_token=dense + 2 * stream * hidden, extra_per_token=(20.0 + stream) * hidden)
        )
    # results of A and B, and the gradients through them: in the adapters' own type without autocast
    branch = 4.0 if not types.autocast and types.adapter == 4 else 2.0
    if down_adapted:  # A's input gradient, before down's own
        moments.append(Instant(extra_per_token=branch * width + 2 * stream * hidden))
    if into_adapted and job.gradient_checkpointing:
        # the layer runs again: B's result and the scaled one, before down has its input; the residual and the MLP's input
        # are still at hand
        moments.append(
            Instant(freed_per_token=own_input, extra_per_token=2 * branch * width + (4.0 * stream + branch) * hidden)
        )
    if down_adapted and job.gradient_checkpointing and types.autocast and types.adapter == 4 and not job.quantization:
        # ... and peft lifts down's input to fp32, which autocast takes down again
        moments.append(Instant(extra_per_token=(mlp + 4.0) * width + 5.0 * stream * hidden))
    if job.quantization:  # down's weight in 16 bit (32 without autocast), the product with it, A's gradient
        # GPTQ's is kept with the layer; while it is unpacked, its codes are there in 32 and in 8 bit (auto-gptq 0.4, 0.5)
        per_weight = 4 + 1 - 2 if job.quantization == "gptq-int4" else compute
        moments.append(
            Instant(
                freed_per_token=own_input,
                extra_per_token=float(mlp + compute) * width + (compute + stream) * hidden,
                extra_fixed=float(per_weight * down.in_features * down.out_features),
            )
        )
    if any(adapted_by_name[each.name].dora for each in into_adapted):
        # a branch's scale: three gradients and a copy in the adapters' type, the branch and its gradient
        freed = own_input + 2 * mlp * width + (mlp + branch) * hidden
        moments.append(Instant(freed_per_token=freed, extra_per_token=(4 * branch + 2 * mlp) * width + stream * hidden))
    return tuple(moments)


def of_scores(layer: Layer, types: ElementBytes, *, full: bool, hidden_bytes: float, after_mlp: float) -> Instant:
    """Eager or matrix attention: the gradient of the scores before and after the softmax, in fp32; the 16-bit copy of the
    softmax is gone, and so is the MLP, ``after_mlp`` bytes a token.

    With sinks three score matrices in the compute type, when they are built and when they are undone.
    """
    heads, with_sinks = layer.attention.num_heads, layer.attention.score == "sinks"
    done = float(types.weights * sum(each.num_params for each in layer.linears if not each.is_mixer)) if full else 0.0
    return Instant(
        done=done,
        freed_per_token=after_mlp,
        freed_per_pair=float(types.compute * heads) if types.compute == 2 or with_sinks else 0.0,
        extra_per_token=hidden_bytes,
        extra_per_pair=float(3 * types.compute if with_sinks else 8) * heads,
    )
