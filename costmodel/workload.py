"""What one micro-batch makes the device do: FLOPs of forward, backward and recompute by operator group, and operators.

Conventions: a multiply-add is 2 FLOPs; attention counts the full square (a causal kernel does half of it, which
``device_time`` and :func:`hardware_flops` know); a look-up table is 0 FLOPs; the head is a matmul whether it is tied or not.
:func:`flops` is exactly what ``torch.utils.flop_counter.FlopCounterMode`` counts on the real modules, once it knows
``_grouped_mm``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from costmodel.adapters import LayerAdapters, plan_adapters
from costmodel.defaults import BITSANDBYTES, ResolvedJob
from costmodel.framework_defaults import adapts_towers
from costmodel.model_spec import Experts, Layer, Linear, ModelSpec

GROUPS = ("attention_linears", "attention_scores", "scan", "mlp", "experts", "router", "adapters", "adapter_merge", "head")


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch as the device sees it.

    ``num_tokens`` is what is computed (padding included), ``num_attended_pairs`` the sum over sequences of length times
    length (of a flattened row that is computed whole: its length times itself), ``num_head_tokens`` the positions that reach
    the output head, ``num_padding_tokens`` those of ``num_tokens`` that hold no sample, ``num_masked_pairs`` those of
    ``num_attended_pairs`` that join two documents: computed and masked.
    """

    num_sequences: float
    num_tokens: float
    num_attended_pairs: float
    num_head_tokens: float
    num_padding_tokens: float = 0.0
    num_masked_pairs: float = 0.0

    @property
    def context_tokens(self) -> float:
        """Keys that each token attends to, averaged over tokens (the full square)."""
        return self.num_attended_pairs / self.num_tokens

    @property
    def row_tokens(self) -> float:
        """Length of the rows that attention is given: of its sequences, or of one row that all were put into."""
        return self.num_tokens if self.num_masked_pairs else self.num_tokens / self.num_sequences

    @staticmethod
    def of(num_sequences: int, sequence_tokens: int) -> Batch:
        """A batch of equally long sequences."""
        tokens = num_sequences * sequence_tokens
        return Batch(num_sequences, tokens, tokens * sequence_tokens, tokens)


def skips_half(job: ResolvedJob, batch: Batch, window: int | None) -> bool:
    """Whether a fused causal kernel skips the upper half of the scores of a layer with this sliding window.

    ``sdpa`` under a mask (samples of different length side by side, or in one flattened row; a row that reaches the window)
    does not: transformers hands it the mask in place of ``is_causal``, and the memory-efficient kernel multiplies the whole
    square.
    """
    is_padded = batch.num_padding_tokens > 0 and batch.num_sequences > 1
    needs_mask = is_padded or (window is not None and reaches_window(batch.row_tokens, window))
    under_mask = needs_mask and job.attn_implementation == "sdpa" and not job.makes_own_masks
    return not (under_mask or batch.num_masked_pairs)


def reaches_window(row_tokens: float, window: int) -> bool:
    """Whether transformers makes a mask for a sliding window: a row as long as the window gets one too.

    Source: transformers 5.24, masking_utils.py (``_ignore_causal_mask_sdpa``).
    """
    return row_tokens >= window


def with_masked_pairs(job: ResolvedJob, batch: Batch) -> Batch:
    """A measured batch, whose pairs are those inside documents, with those that the job's kernel computes and masks."""
    whole = max(batch.num_attended_pairs, batch.num_tokens**2) if job.attends_across_documents else batch.num_attended_pairs
    return replace(batch, num_attended_pairs=whole, num_masked_pairs=whole - batch.num_attended_pairs)


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


def num_idle_params(model: ModelSpec, job: ResolvedJob) -> int:
    """Parameters that may be trained and are never reached: those in encoders of images and sound, or of adapters there."""
    if job.is_peft:
        return plan_adapters(model, job).idle_params
    return model.tower_params if adapts_towers(job.framework) else 0


def stream_dtype(job: ResolvedJob) -> str:
    """Type of the residual stream: that of the norms and the embedding, which peft's k-bit preparation lifts to fp32."""
    if job.prepare_model_for_kbit_training and job.quantization in BITSANDBYTES:
        return "float32"
    return job.dtype


def attention_kernel(job: ResolvedJob, layer: Layer) -> str:
    """Which attention runs: ``fused`` (flash or memory-efficient, no score matrix), ``math`` or ``eager`` (both hold it).

    Families without an ``sdpa`` path in transformers run ``eager`` in its place. ``sdpa`` on fp32 inputs
    has no fused kernel for grouped key/value heads and falls back to the matrix form.
    """
    if job.attn_implementation == "eager" or (job.attn_implementation == "sdpa" and not layer.attention.has_fused_kernel):
        return "eager"
    grouped = layer.attention.num_kv_heads != layer.attention.num_heads
    fp32_inputs = job.autocast_dtype is None and stream_dtype(job) == "float32"
    return "math" if job.attn_implementation == "sdpa" and fp32_inputs and grouped else "fused"


# The order of execution inside a layer; the mixing of tokens (attention, scan) stands between inner and output linears.
_STAGES = {
    "stem": 0,
    "mixer_in": 0,
    "mixer_inner": 1,
    "mixer_out": 3,
    "router": 4,
    "mlp_in": 4,
    "mlp_gate": 4,
    "mlp_out": 5,
    "side_in": 6,
    "side_out": 7,
}
_MIXING_STAGE = 2
_READ_DIRECTLY = {"dt_proj"}  # Mamba code multiplies by the weight itself: a LoRA beside it is registered but never run


@dataclass(frozen=True, slots=True)
class _Product:
    """Matrix products of one weight: FLOPs a token of its forward, of its weight gradient, and of its LoRA pair."""

    group: str
    branch: str  # mixer | mlp | experts | side: what it stands in
    stage: int
    forward: float
    weight_gradient: float  # 0 for a frozen weight
    adapter_in: float = 0.0  # A
    adapter_out: float = 0.0  # B
    differentiable: bool = True

    @property
    def is_trained(self) -> bool:
        return self.weight_gradient > 0 or self.adapter_in > 0


def _linear_product(linear: Linear, full: bool, r: int) -> _Product:
    group = "attention_linears" if linear.is_mixer else "router" if linear.place == "router" else "mlp"
    forward = 2.0 * linear.in_features * linear.out_features
    trained = full and linear.differentiable
    return _Product(
        group,
        "mixer" if linear.is_mixer else linear.place.partition("_")[0],
        _STAGES[linear.place],
        forward,
        forward if trained else 0.0,
        2.0 * r * linear.in_features,
        2.0 * r * linear.out_features,
        linear.differentiable,
    )


def _expert_products(experts: Experts, adapted: LayerAdapters, full: bool, branch: str) -> list[_Product]:
    """Router, the matrices into the experts and those out of them; a LoRA on a stack needs the stack's whole gradient."""
    in_stage, out_stage = (_STAGES[f"mixer_{way}" if branch == "mixer" else f"mlp_{way}"] for way in ("in", "out"))
    visits, matrix = experts.num_experts_computed, 2.0 * experts.hidden_size * experts.intermediate_size
    adapted_names = {parameter.name for parameter in adapted.parameters}
    rank: dict[str, int] = {
        each.linear.place: sum(a.r for a in adapted.expert_linears if a.linear.place == each.linear.place)
        for each in adapted.expert_linears
    }
    hidden, width = experts.hidden_size, experts.intermediate_size
    stacks = [stack.name for stack in experts.stacks]
    products = []
    for name_in, stage, forward, place, shape in (
        (stacks[:-1], in_stage, visits * (experts.num_matrices - 1) * matrix, "mlp_in", (hidden, width)),
        (stacks[-1:], out_stage, visits * matrix, "mlp_out", (width, hidden)),
    ):
        trained = full or any(name in adapted_names for name in name_in)
        into, out = (2.0 * visits * rank.get(place, 0) * features for features in shape)
        products.append(_Product("experts", branch, stage, forward, forward if trained else 0.0, into, out))
    if experts.router_params:
        forward = 2.0 * experts.router_features_or_hidden * experts.num_experts
        trained = full or f"{experts.router}.weight" in adapted_names
        products.append(_Product("router", branch, in_stage, forward, forward if trained else 0.0))
    return products


def _products(layer: Layer, adapted: LayerAdapters, full: bool) -> list[_Product]:
    ranks = {each.linear.name: each.r for each in adapted.linears}
    trained = {parameter.name for parameter in adapted.parameters}
    products = []
    for linear in layer.linears:
        product = _linear_product(linear, full, 0 if linear.leaf in _READ_DIRECTLY else ranks.get(linear.name, 0))
        if f"{linear.name}.weight" in trained:
            product = replace(product, weight_gradient=product.forward)
        products.append(product)
    known = {linear.name for linear in layer.linears}
    # a router that transformers 4 has as a linear of its own is counted with its experts; only its adapter is added here
    products += [
        replace(_linear_product(each.linear, False, each.r), forward=0.0)
        for each in adapted.linears
        if each.linear.name not in known
    ]
    if layer.mixer_experts:
        products += _expert_products(layer.mixer_experts, adapted, full, "mixer")
    if layer.experts:
        products += _expert_products(layer.experts, adapted, full, "experts")
    return products


def _has_gradient(products: list[_Product], branch: str, stage: int, needs_input: bool, is_parallel: bool) -> bool:
    """Whether a gradient flows back through what stands at ``stage`` of ``branch``: something before it is trained.

    Before it: the mixer (unless attention and MLP are parallel), and what comes earlier in its own branch.
    """

    def comes_before(each: _Product) -> bool:
        if each.branch == branch:
            return each.stage < stage
        return branch == "side" or (each.branch == "mixer" and not is_parallel)

    return needs_input or any(each.is_trained and comes_before(each) for each in products)


def _backward(products: list[_Product], needs_input: bool, is_parallel: bool) -> dict[str, float]:
    """Backward FLOPs a token by group. ``needs_input``: whether something below the layer is trained."""
    backward = dict.fromkeys(GROUPS, 0.0)
    for each in products:
        if not each.differentiable:
            continue
        through = _has_gradient(products, each.branch, each.stage, needs_input, is_parallel)
        backward[each.group] += each.weight_gradient + (each.forward if through else 0.0)
        backward["adapters"] += each.adapter_in + 2 * each.adapter_out + (each.adapter_in if through else 0.0)
    return backward


@dataclass(frozen=True, slots=True)
class _Work:
    """FLOP coefficients of all layers of a job: a token, a pass, and an attended pair by sliding window."""

    forward: dict[str, float]  # FLOPs a token
    backward: dict[str, float]
    recompute: dict[str, float]
    merge_forward: float  # FLOPs a pass
    merge_backward: float
    pairs: tuple[tuple[int | None, bool, float, float, float], ...]  # (window, fused, forward, backward, scores again)
    chunks: tuple[tuple[int, float, float], ...]  # (chunk, forward, backward) FLOPs of a token and token of its chunk
    masked: float  # FLOPs a token, forward and backward, of experts that the router masks


def _skipped_in_recompute(layer: Layer, adapted: LayerAdapters) -> tuple[str, float]:
    """(group, FLOPs a token) that re-running a layer leaves out: what comes after the last tensor its backward needs."""
    last = next((each for each in layer.linears if each.name == layer.last_linear), None)
    if last is None:
        return "mlp", 0.0
    pair = next((each for each in adapted.linears if each.linear.name == last.name), None)
    if pair is not None:  # the base product comes first, then A, whose result B needs
        return "adapters", 2.0 * pair.r * last.out_features
    return "attention_linears" if last.is_mixer else "mlp", 2.0 * last.in_features * last.out_features


def _embedding_passes_gradient(model: ModelSpec, job: ResolvedJob) -> bool:
    """Whether the embedding's result needs a gradient: it is trained, or checkpointing makes it need one."""
    if not job.is_peft or job.gradient_checkpointing:
        return True
    if any(model.embedding_path.endswith(name) for name in job.lora_modules_to_save):
        return True
    return any(each.linear.name == model.embedding_path for each in plan_adapters(model, job).outside)


def _trains_below(model: ModelSpec, job: ResolvedJob) -> bool:
    """Whether the first layer's input needs a gradient."""
    stem = any(each.linear.place == "stem" for each in plan_adapters(model, job).outside)
    return stem or _embedding_passes_gradient(model, job)


@lru_cache(maxsize=256)
def _work(model: ModelSpec, job: ResolvedJob) -> _Work:
    full = not job.is_peft
    forward, backward, recompute = (dict.fromkeys(GROUPS, 0.0) for _ in range(3))
    merge_forward = merge_backward = masked = 0.0
    pairs: dict[tuple[int | None, bool], list[float]] = {}
    chunks: dict[int, list[float]] = {}
    reached = _trains_below(model, job)
    for layer, adapted, count in plan_adapters(model, job).runs:
        products = _products(layer, adapted, full)
        each_forward = dict.fromkeys(GROUPS, 0.0)
        for product in products:
            each_forward[product.group] += product.forward
            each_forward["adapters"] += product.adapter_in + product.adapter_out
        if layer.scan:
            each_forward["scan"] += layer.scan.flops_per_token
        attention = layer.attention
        key_width, value_width = attention.query_width, attention.output_width
        pair_forward = 2.0 * (key_width + value_width + attention.index_width + attention.index_heads)
        is_fused = attention_kernel(job, layer) == "fused"
        # a fused kernel computes the scores again: 3 products as wide as the keys and 2 as the values, else 2 and 2
        pair_backward = 2.0 * ((3 if is_fused else 2) * key_width + 2 * value_width)
        trains = full or bool(adapted.num_params)
        # the first layer that trains anything gets no gradient for its input, unless something below it trains
        times = ((1, reached), (count - 1, True)) if trains and not reached else ((count, reached),)
        for number, needs_input in times:
            if not (trains or needs_input):
                continue
            each_backward = _backward(products, needs_input, layer.is_parallel)
            for group, value in each_backward.items():
                backward[group] += value * number
            if _has_gradient(products, "mixer", _MIXING_STAGE, needs_input, layer.is_parallel):
                backward["scan"] += 2.0 * each_forward["scan"] * number
                if layer.scan:
                    of_chunk = chunks.setdefault(layer.scan.chunk, [0.0, 0.0])
                    of_chunk[1] += (2.0 * layer.scan.chunk_flops + layer.scan.solve_flops) * number
                of_window = pairs.setdefault((attention.sliding_window, is_fused), [0.0, 0.0, 0.0])
                of_window[1] += pair_backward * number
                of_window[2] += (2.0 * key_width if is_fused else 0.0) * number
        reached = reached or trains
        pairs.setdefault((attention.sliding_window, is_fused), [0.0, 0.0, 0.0])[0] += pair_forward * count
        if layer.scan:
            chunks.setdefault(layer.scan.chunk, [0.0, 0.0])[0] += layer.scan.chunk_flops * count
        if layer.experts and layer.experts.runs_all:
            share = 1 - layer.experts.num_experts_per_tok / layer.experts.num_experts
            masked += count * share * (3 if full else 2) * each_forward["experts"]
        for group, value in each_forward.items():
            forward[group] += value * count
            if job.gradient_checkpointing:
                recompute[group] += value * count
        if job.gradient_checkpointing and not job.reentrant_checkpointing:
            group, skipped = _skipped_in_recompute(layer, adapted)
            recompute[group] -= skipped * count
        # A stack is merged when the adapter is registered and again when it is read; a single matrix once.
        merge_forward += count * sum((2 if p.num_matrices > 1 else 1) * p.merge_flops for p in adapted.parameters)
        merge_backward += count * sum(2 * p.merge_flops for p in adapted.parameters)
        # DoRA multiplies B and A out, by way of a unit matrix, for the norm of the weight (peft 0.21, dora.py)
        merge_forward += count * sum(
            2.0 * each.r * each.linear.in_features * (each.linear.in_features + each.linear.out_features)
            for each in adapted.linears
            if each.dora
        )
    for linear in model.linears:
        product = _linear_product(linear, full, 0)
        forward["mlp"] += product.forward
        passes_on = _embedding_passes_gradient(model, job) or linear.place == "side_out"
        backward["mlp"] += product.weight_gradient + (product.forward if passes_on else 0.0)
    return _Work(
        forward,
        backward,
        recompute,
        merge_forward,
        merge_backward,
        tuple((*which, values[0], values[1], values[2]) for which, values in pairs.items()),
        tuple((chunk, values[0], values[1]) for chunk, values in chunks.items() if chunk),
        masked,
    )


def _attended(batch: Batch, window: int | None) -> float:
    """(token, key) pairs that attention looks at."""
    return batch.num_tokens * (min(batch.context_tokens, window) if window else batch.context_tokens)


def _skips_outside_window(job: ResolvedJob) -> bool:
    """Whether the kernel leaves out what a sliding window masks: flash does, ``sdpa`` and ``eager`` multiply and mask."""
    return job.attn_implementation.startswith("flash")


def flops(model: ModelSpec, job: ResolvedJob, batch: Batch) -> Flops:
    """FLOPs of one micro-batch. Source of the factors: ``docs/formulas.md``, section FLOPs.

    Forward of a weight is 2·in·out a token. Its backward is the input gradient (as much again) and, only if the weight is
    trained, the weight gradient (as much again). Attention's backward is 2.5 times its forward in a fused kernel (which
    computes the scores again) and 2 times otherwise. peft on stacked experts builds B·A twice in the forward, and needs the
    full weight gradient of the stack to reach A and B.
    """
    tokens = batch.num_tokens
    work = _work(model, job)
    forward = {group: value * tokens for group, value in work.forward.items()}
    backward = {group: value * tokens for group, value in work.backward.items()}
    recompute = {group: value * tokens for group, value in work.recompute.items()}
    forward["adapter_merge"], backward["adapter_merge"] = work.merge_forward, work.merge_backward
    for window, _, pair_forward, pair_backward, _ in work.pairs:
        attended = _attended(batch, window if _skips_outside_window(job) else None)
        forward["attention_scores"] += pair_forward * attended
        backward["attention_scores"] += pair_backward * attended
    for chunk, chunk_forward, chunk_backward in work.chunks:
        inside = _attended(batch, chunk)
        forward["scan"] += chunk_forward * inside
        backward["scan"] += chunk_backward * inside
        recompute["scan"] += chunk_forward * inside if job.gradient_checkpointing else 0.0
    if job.gradient_checkpointing:
        recompute["attention_scores"], recompute["adapter_merge"] = forward["attention_scores"], work.merge_forward
    head = 2.0 * model.head_width * model.vocab_size * batch.num_head_tokens
    trains_head = not job.is_peft or any(model.head_path.endswith(name) for name in job.lora_modules_to_save)
    forward["head"] = head
    backward["head"] = head * (2 if trains_head else 1)
    for each in plan_adapters(model, job).outside:
        into, out = 2.0 * each.r * each.linear.in_features, 2.0 * each.r * each.linear.out_features
        is_last = each.linear.name == model.head_path or each.linear.place == "side_out"
        passes_on = is_last or _embedding_passes_gradient(model, job)
        if each.linear.name == model.embedding_path:
            into = 0.0  # a look-up
        rows = batch.num_head_tokens if each.linear.name == model.head_path else tokens
        forward["adapters"] += (into + out) * rows
        backward["adapters"] += ((2 if passes_on else 1) * into + 2 * out) * rows
    return Flops(forward, backward, recompute)


def model_flops(model: ModelSpec, job: ResolvedJob, batch: Batch) -> float:
    """What the training needs in principle, the numerator of MFU.

    No recompute, no second look at the scores, nothing outside a sliding window or between documents, no merges, no masked
    experts.
    """
    counted = flops(model, job, batch)
    work = _work(model, job)
    executed = counted.forward["attention_scores"] + counted.backward["attention_scores"]
    inside = replace(batch, num_attended_pairs=batch.num_attended_pairs - batch.num_masked_pairs)
    needed = sum((into + back - again) * _attended(inside, window) for window, _, into, back, again in work.pairs)
    left_out = work.merge_forward + work.merge_backward + work.masked * batch.num_tokens
    return counted.forward_total + counted.backward_total - executed + needed - left_out


def share_of_scores_computed(model: ModelSpec, job: ResolvedJob, batch: Batch) -> float:
    """Of the products of attention that :func:`flops` counts, the share that causal kernels compute, over all layers."""
    counted = computed = 0.0
    for window, _, pair_forward, _, _ in _work(model, job).pairs:
        products = pair_forward * _attended(batch, window if _skips_outside_window(job) else None)
        counted += products
        computed += products * (0.5 if skips_half(job, batch, window) else 1.0)
    return computed / counted if counted else 1.0


def hardware_flops(model: ModelSpec, job: ResolvedJob, batch: Batch) -> float:
    """What the device really executes, the numerator of HFU.

    A causal fused kernel skips half of the square of scores, as ``device_time`` takes it; the others multiply and mask.
    """
    counted = flops(model, job, batch)
    skipped = 0.0
    for window, is_fused, pair_forward, pair_backward, _ in _work(model, job).pairs:
        if is_fused and skips_half(job, batch, window):
            passes = pair_forward * (2 if job.gradient_checkpointing else 1) + pair_backward
            skipped += 0.5 * passes * _attended(batch, window if _skips_outside_window(job) else None)
    return counted.forward_total + counted.backward_total + counted.recompute_total - skipped


def expected_experts_hit(num_experts: int, num_experts_per_tok: int, num_tokens: float) -> float:
    """Experts that at least one token visits, if the router spreads tokens evenly: E·(1 − (1 − K/E)^T)."""
    missed: float = (1.0 - num_experts_per_tok / num_experts) ** num_tokens
    return num_experts * (1.0 - missed)
