"""What one micro-batch makes the device do: FLOPs of forward, backward and recompute by operator group, and operators.

Conventions: a multiply-add is 2 FLOPs; attention counts the full square (a causal kernel does half of it, which
``step_time`` knows); a look-up table is 0 FLOPs; the head is a matmul whether it is tied or not. Exactly what
``torch.utils.flop_counter.FlopCounterMode`` counts on the real modules, once it knows ``_grouped_mm``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from costmodel.adapters import plan_adapters
from costmodel.defaults import BITSANDBYTES, ResolvedJob
from costmodel.hf_config import Layer, ModelSpec

GROUPS = ("attention_linears", "attention_scores", "mlp", "experts", "router", "adapters", "adapter_merge", "head")


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch as the device sees it.

    ``num_tokens`` is what is computed (padding included), ``num_attended_pairs`` the sum over sequences of length times
    length, ``num_head_tokens`` the positions that reach the output head.
    """

    num_sequences: float
    num_tokens: float
    num_attended_pairs: float
    num_head_tokens: float

    @property
    def context_tokens(self) -> float:
        """Keys that each token attends to, averaged over tokens (the full square)."""
        return self.num_attended_pairs / self.num_tokens

    @staticmethod
    def of(num_sequences: int, sequence_tokens: int, *, head_fraction: float = 1.0) -> Batch:
        """A batch of equally long sequences."""
        tokens = num_sequences * sequence_tokens
        return Batch(num_sequences, tokens, tokens * sequence_tokens, tokens * head_fraction)


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of one micro-batch by group of :data:`GROUPS`, in each pass."""

    forward: dict[str, float]
    backward: dict[str, float]
    recompute: dict[str, float]

    @property
    def forward_total(self) -> float:
        return sum(self.forward.values())

    @property
    def backward_total(self) -> float:
        return sum(self.backward.values())

    @property
    def recompute_total(self) -> float:
        return sum(self.recompute.values())


def num_trainable_params(model: ModelSpec, job: ResolvedJob) -> int:
    """Parameters the optimizer updates."""
    return plan_adapters(model, job).num_params if job.is_peft else model.num_params


def stream_dtype(job: ResolvedJob) -> str:
    """Type of the residual stream: that of the norms and the embedding, which peft's k-bit preparation lifts to fp32."""
    if job.prepare_model_for_kbit_training and job.quantization in BITSANDBYTES:
        return "float32"
    return job.dtype


def attention_kernel(job: ResolvedJob, layer: Layer) -> str:
    """Which attention runs: ``fused`` (flash or memory-efficient, no score matrix), ``math`` or ``eager`` (both hold it).

    ``sdpa`` on fp32 inputs has no fused kernel for grouped key/value heads and falls back to the matrix form.
    """
    if job.attn_implementation == "eager":
        return "eager"
    grouped = layer.attention.num_kv_heads != layer.attention.num_heads
    fp32_inputs = job.autocast_dtype is None and stream_dtype(job) == "float32"
    return "math" if job.attn_implementation == "sdpa" and fp32_inputs and grouped else "fused"


@dataclass(frozen=True, slots=True)
class _RunWork:
    """Per-token and per-pass FLOP coefficients of one run of equal layers."""

    count: int
    attention_linears: int  # FLOPs a token
    mlp: int
    experts: int
    router: int
    adapters: int
    adapters_dense_input: int  # adapter FLOPs a token whose input gradient layer 0 does not need
    attention_input_linears: int  # q, k, v: their input gradient is what the first layer skips
    query_width: int
    sliding_window: int | None
    is_fused_attention: bool
    merge_forward: int  # FLOPs a pass
    merge_backward: int
    skipped_in_recompute: int  # FLOPs a token after the last saved tensor
    trains_experts: bool  # the expert stack needs its full weight gradient (adapters on stacked parameters)


@lru_cache(maxsize=256)
def _run_work(model: ModelSpec, job: ResolvedJob) -> tuple[_RunWork, ...]:
    adapters = plan_adapters(model, job)
    runs = []
    for layer, adapted, count in adapters.runs:
        attention = [each for each in layer.linears if each.name.startswith("self_attn.")]
        inputs = [each for each in attention if each.leaf in {"q_proj", "k_proj", "v_proj"}]
        mlp = [each for each in layer.linears if not each.name.startswith("self_attn.")]
        experts = layer.experts
        adapter_flops = sum(2 * a.r * (a.linear.in_features + a.linear.out_features) for a in adapted.linears)
        if experts:
            adapter_flops += experts.num_experts_per_tok * sum(
                2 * a.r * (a.linear.in_features + a.linear.out_features) for a in adapted.expert_linears
            )
        input_adapters = sum(
            2 * a.r * a.linear.in_features for a in adapted.linears if a.linear.leaf in {"q_proj", "k_proj", "v_proj"}
        )
        down = next((each for each in mlp if each.leaf == "down_proj"), None)
        skipped = 0
        if down is not None and experts is None:
            adapted_down = next((a for a in adapted.linears if a.linear.name == down.name), None)
            if adapted_down is not None:
                skipped = (
                    2 * adapted_down.r * down.out_features
                )  # only B of the adapter comes after the last saved tensor
            else:
                skipped = 2 * down.in_features * down.out_features
        runs.append(
            _RunWork(
                count=count,
                attention_linears=sum(2 * each.in_features * each.out_features for each in attention),
                mlp=sum(2 * each.in_features * each.out_features for each in mlp),
                experts=2 * experts.num_experts_per_tok * experts.params_per_expert if experts else 0,
                router=2 * experts.router_params if experts else 0,
                adapters=adapter_flops,
                adapters_dense_input=input_adapters,
                attention_input_linears=sum(2 * each.in_features * each.out_features for each in inputs),
                query_width=layer.attention.query_width,
                sliding_window=layer.attention.sliding_window,
                is_fused_attention=attention_kernel(job, layer) == "fused",
                # A stack is merged when the adapter is registered and again when it is read; a single matrix once.
                merge_forward=sum((2 if p.num_matrices > 1 else 1) * p.merge_flops for p in adapted.parameters),
                merge_backward=sum(2 * p.merge_flops for p in adapted.parameters),
                skipped_in_recompute=skipped,
                trains_experts=any(each.num_matrices > 1 for each in adapted.parameters),
            )
        )
    return tuple(runs)


def flops(model: ModelSpec, job: ResolvedJob, batch: Batch) -> Flops:
    """FLOPs of one micro-batch. Source of the factors: ``docs/formulas.md``, section FLOPs.

    Forward of a weight is 2·in·out a token. Its backward is the input gradient (as much again) and, only if the weight is
    trained, the weight gradient (as much again). Attention's backward is 2.5 times its forward in a fused kernel (which
    computes the scores again) and 2 times otherwise. peft on stacked experts builds B·A twice in the forward, and needs the
    full weight gradient of the stack to reach A and B.
    """
    full = not job.is_peft
    tokens, context = batch.num_tokens, batch.context_tokens
    forward = dict.fromkeys(GROUPS, 0.0)
    backward = dict.fromkeys(GROUPS, 0.0)
    recompute = dict.fromkeys(GROUPS, 0.0)
    weight_passes = 2 if full else 1
    is_first_layer = True
    for run in _run_work(model, job):
        window = min(context, run.sliding_window) if run.sliding_window else context
        each_forward = {
            "attention_linears": run.attention_linears * tokens,
            "attention_scores": 4.0 * run.query_width * window * tokens,
            "mlp": run.mlp * tokens,
            "experts": run.experts * tokens,
            "router": run.router * tokens,
            "adapters": run.adapters * tokens,
            "adapter_merge": float(run.merge_forward),
        }
        each_backward = {
            "attention_linears": weight_passes * each_forward["attention_linears"],
            "attention_scores": (2.5 if run.is_fused_attention else 2.0) * each_forward["attention_scores"],
            "mlp": weight_passes * each_forward["mlp"],
            "experts": (2 if full or run.trains_experts else 1) * each_forward["experts"],
            "router": (2 if full or run.merge_backward else 1) * each_forward["router"],
            "adapters": 2 * each_forward["adapters"],
            "adapter_merge": float(run.merge_backward),
        }
        for group, value in each_forward.items():
            forward[group] += value * run.count
            backward[group] += each_backward[group] * run.count
            if job.gradient_checkpointing:
                recompute[group] += value * run.count
        if job.gradient_checkpointing and not job.reentrant_checkpointing and run.skipped_in_recompute:
            group = "mlp" if run.skipped_in_recompute > run.adapters else "adapters"
            recompute[group] -= run.skipped_in_recompute * tokens * run.count
        if is_first_layer:
            is_first_layer = False
            if not full and not job.gradient_checkpointing:
                # Nothing below the first layer is trained, so the gradient of its input is never computed.
                backward["attention_linears"] -= run.attention_input_linears * tokens
                backward["adapters"] -= run.adapters_dense_input * tokens
    head = 2.0 * model.hidden_size * model.vocab_size * batch.num_head_tokens
    trains_head = full or any(name.rpartition(".")[2] == "lm_head" for name in job.lora_modules_to_save)
    forward["head"] = head
    backward["head"] = head * (2 if trains_head else 1)
    return Flops(forward, backward, recompute)


def model_flops(model: ModelSpec, job: ResolvedJob, batch: Batch) -> float:
    """What the training needs in principle, the numerator of MFU: no recompute, no second look at the scores, no merges."""
    work = flops(model, job, batch)
    merges = work.forward["adapter_merge"] + work.backward["adapter_merge"]
    second_look = work.backward["attention_scores"] - 2 * work.forward["attention_scores"]
    return work.forward_total + work.backward_total - merges - second_look


def hardware_flops(model: ModelSpec, job: ResolvedJob, batch: Batch) -> float:
    """What the device really executes, the numerator of HFU."""
    work = flops(model, job, batch)
    return work.forward_total + work.backward_total + work.recompute_total


@dataclass(frozen=True, slots=True)
class Operators:
    """Operators that Python dispatches: for one micro-batch, and for one optimizer step."""

    forward: float
    recompute: float
    backward: float
    optimizer: float
    quantized_linear_calls: float  # calls into a 4- or 8-bit kernel library
    expert_visits: float  # experts that a Python loop visits one by one, forward passes
    expert_operators: float  # operators dispatched inside that loop, all passes


# Operators of one decoder layer, counted by tracing the real modules (transformers 5.24, peft 0.21): dense Llama, what
# query/key norms, stacked experts, an adapted linear and an adapted stack add. (forward, backward)
_LAYER_OPERATORS = (207, 477)
_QUERY_KEY_NORM_OPERATORS = (38, 90)
_STACKED_EXPERTS_OPERATORS = (61, 71)
_ADAPTED_LINEAR_OPERATORS = (30, 63)
_ADAPTED_PARAMETER_OPERATORS = (17, 29)
_AUTOCAST_OPERATORS_PER_ADAPTED_LINEAR = 14
_CHECKPOINT_OPERATORS_PER_LAYER = 30
_MODEL_OPERATORS = (79, 111)
_OPTIMIZER_OPERATORS = {"full": 54, "adapted_linear": 12}
# One expert of a Python loop: its own three linears, activation and scatter; with adapters three pairs more.
_EXPERT_OPERATORS = (30, 60)
_ADAPTED_EXPERT_OPERATORS = (3 * (30 + 14), 129)


def operators(model: ModelSpec, job: ResolvedJob, batch: Batch) -> Operators:
    """Operators dispatched from Python; the host floor of an eager step is their number times a cost each."""
    adapters = plan_adapters(model, job)
    forward, backward = (float(value) for value in _MODEL_OPERATORS)
    layers_forward = optimizer = quantized = visits = expert_operators = 0.0
    recomputes = 1 if job.gradient_checkpointing else 0
    passes = 2 + recomputes
    for layer, adapted, count in adapters.runs:
        each_forward, each_backward = (float(value) for value in _LAYER_OPERATORS)
        if any(norm.name.endswith(("q_norm", "k_norm")) for norm in layer.norms):
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
        if layer.experts and job.experts_implementation == "eager":
            hit = expected_experts_hit(layer.experts.num_experts, layer.experts.num_experts_per_tok, batch.num_tokens)
            visits += count * hit * (1 + recomputes)
            expert_forward = _EXPERT_OPERATORS[0] + (_ADAPTED_EXPERT_OPERATORS[0] if adapted.expert_linears else 0)
            expert_backward = _EXPERT_OPERATORS[1] + (_ADAPTED_EXPERT_OPERATORS[1] if adapted.expert_linears else 0)
            expert_operators += count * hit * (expert_forward * (1 + recomputes) + expert_backward)
            if job.quantization and not job.fused_experts:
                quantized += count * hit * 3 * passes
            optimizer += (
                count * _OPTIMIZER_OPERATORS["adapted_linear"] * adapted.num_experts * len(adapted.expert_linears)
            )
        elif layer.experts:
            each_forward += _STACKED_EXPERTS_OPERATORS[0]
            each_backward += _STACKED_EXPERTS_OPERATORS[1]
        quantized += count * num_quantized * passes
        layers_forward += count * each_forward
        backward += count * (each_backward + _CHECKPOINT_OPERATORS_PER_LAYER * recomputes)
    return Operators(
        forward=forward + layers_forward,
        recompute=1.05 * layers_forward * recomputes,
        backward=backward,
        optimizer=optimizer,
        quantized_linear_calls=quantized,
        expert_visits=visits,
        expert_operators=expert_operators,
    )


def expected_experts_hit(num_experts: int, num_experts_per_tok: int, num_tokens: float) -> float:
    """Experts that at least one token visits, if the router spreads tokens evenly: E·(1 − (1 − K/E)^T)."""
    return num_experts * (1.0 - (1.0 - num_experts_per_tok / num_experts) ** num_tokens)
