"""One training step of the real modules (transformers, peft) on fake CPU tensors: shapes and types, no numbers.

Run as a program it reads one case (``cases.Case``) as JSON from standard input and prints the traced row. It belongs in a
process of its own: an exception inside a dispatch mode during the backward ends the process.

A fake tensor has no values, so some choices of a run on a GPU are made here: which attention kernel ``sdpa`` takes, a
dropout that keeps a mask of one byte, no mask for sequences of one length, adapters that are moved without swapping tensors.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from allocations import CATEGORIES, AllocationLog, Peak
from silent_kernels import fuse_kernels, kernels_that_do_nothing, library_versions
from torch._subclasses.fake_tensor import FakeTensorMode

_TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_NOT_FOR_THE_CLASS = {"model_type", "architectures", "quantization_config", "torch_dtype", "dtype"}
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {  # as the Trainer makes them on a GPU
    "sgd": lambda trained: torch.optim.SGD(trained, lr=1e-4, foreach=True),
    "adagrad": lambda trained: torch.optim.Adagrad(trained, lr=1e-4, foreach=True),
    "rmsprop": lambda trained: torch.optim.RMSprop(trained, lr=1e-4, foreach=True),
    "adafactor": lambda trained: transformers.optimization.Adafactor(
        trained, lr=1e-4, scale_parameter=False, relative_step=False
    ),
}
_LISTS_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")


# --- what a fake tensor cannot decide --------------------------------------------------------------------------------


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The kernel of a GPU: flash without a mask, memory-efficient with one, the matrix form for grouped fp32 heads."""
    aten = torch.ops.aten
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))
    is_half = query.dtype != torch.float32
    same_width = query.shape[-1] == value.shape[-1]
    if attn_mask is None and is_half and same_width and query.shape[-1] <= 256:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if query.shape[1] != key.shape[1]:
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]


def _dropout(tensor: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return torch.native_dropout(tensor, p, True)[0] if training and p > 0 else tensor


def _apply_without_swapping(module: torch.nn.Module, convert: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
    if recurse:
        for child in module.children():
            _apply_without_swapping(child, convert)
    for name, each in list(module._parameters.items()):
        if each is not None:
            with torch.no_grad():
                converted = convert(each)
            if converted is not each:
                module._parameters[name] = torch.nn.Parameter(converted, each.requires_grad)
    for name, each in list(module._buffers.items()):
        if each is not None:
            module._buffers[name] = convert(each)
    return module


class _MambaInner(torch.autograd.Function):
    """What ``MambaInnerFn`` of mamba_ssm 2.2.4 holds (selective_scan_interface.py, checkpoint_lvl 1), without its numbers.

    The convolution's result and the time steps are computed again in the backward; one fp32 pair of states is kept for
    each chunk of 2,048 tokens.
    """

    @staticmethod
    def forward(ctx: Any, xz: Any, *weights: Any) -> Any:
        _, _, x_proj, dt_proj, out_proj, decays, *_ = weights
        with torch.enable_grad():  # by which a recompute is told from a backward; nothing here needs a gradient
            xz, size, length = xz.detach().contiguous(), xz.shape[0], xz.shape[2]
            width, state = decays.shape
            convolved = xz.new_empty(size, width, length)
            x_dbl = torch.nn.functional.linear(convolved.transpose(1, 2).reshape(-1, width), x_proj.detach())
            delta = dt_proj.detach() @ x_dbl[:, : dt_proj.shape[1]].t()
            keys, queries = (xz.new_empty(size, 1, state, length) for _ in range(2))
            out, gated = torch.empty_like(convolved), torch.empty_like(convolved)
            intermediates = xz.new_empty(size, width, -(-length // 2048), 2 * state, dtype=torch.float32)
            ctx.save_for_backward(xz, x_dbl, keys, queries, intermediates, out, *weights)
            del convolved, delta
            return torch.nn.functional.linear(gated.transpose(1, 2), out_proj.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        xz, x_dbl, keys, queries, _, out, conv, conv_bias, x_proj, dt_proj, out_proj, *scan = ctx.saved_tensors
        rank = dt_proj.shape[1]
        convolved = torch.empty_like(out)
        delta = dt_proj @ x_dbl[:, :rank].t()
        dxz = torch.empty_like(xz)
        flat = gradient.reshape(-1, gradient.shape[-1]).t()
        of_y = out_proj.t() @ flat
        of_convolved, of_delta, gated = (torch.empty_like(out) for _ in range(3))
        of_keys, of_queries = torch.empty_like(keys), torch.empty_like(queries)
        of_scan = [torch.empty_like(each) for each in scan]
        of_out_proj = flat @ gated.transpose(1, 2).reshape(flat.shape[1], -1)
        of_x_dbl = torch.empty_like(x_dbl)
        flat_delta = of_delta.transpose(0, 1).reshape(of_delta.shape[1], -1)
        of_dt_proj = flat_delta @ x_dbl[:, :rank]
        of_rank = flat_delta.t() @ dt_proj
        of_x_proj = of_x_dbl.t() @ convolved.transpose(1, 2).reshape(-1, x_proj.shape[1])
        of_u = x_proj.t() @ of_x_dbl.t()
        del of_y, delta, of_convolved, of_keys, of_queries, of_rank, of_u
        of_conv = (torch.empty_like(conv), torch.empty_like(conv_bias))
        return dxz, *of_conv, of_x_proj, of_dt_proj, of_out_proj, *of_scan


def _mamba_inner(xz: Any, *weights: Any, delta_bias: Any, **_: Any) -> Any:
    """In the place of ``mamba_inner_fn``: five weights, the output's bias, the decays, two that depend on the input, D."""
    *of_linears, _bias, decays, _keys, _queries, skip = weights
    return _MambaInner.apply(xz, *of_linears, decays, skip, delta_bias)


@contextlib.contextmanager
def gpu_choices() -> Iterator[None]:
    """The choices above, in place of the library's, for the length of a ``with`` block."""
    from transformers import masking_utils
    from transformers.models.mamba import modeling_mamba

    replaced = [
        (torch.nn.functional, "scaled_dot_product_attention", _attention),
        (torch.nn.functional, "dropout", _dropout),
        (torch.nn.Module, "_apply", _apply_without_swapping),
        (FakeTensorMode, "__deepcopy__", lambda mode, memo: mode),  # a copied module stays in the same mode
        (modeling_mamba, "mamba_inner_fn", _mamba_inner),
        (masking_utils, "is_tracing", lambda tensor=None: False),  # fake tensors would otherwise always get a mask
        (masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
        (masking_utils, "fast_all", lambda mask: False),  # a mask is only ever given to a padded batch
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            if hasattr(owner, name):
                stack.callback(setattr, owner, name, getattr(owner, name))
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, value)
        yield


# --- 4-bit linears ---------------------------------------------------------------------------------------------------


class _FourBitProduct(torch.autograd.Function):
    """What bitsandbytes' ``MatMul4Bit`` holds: nothing of the input; the weight in 16 bit while it is used."""

    @staticmethod
    def forward(ctx: Any, rows: Any, packed: Any, shape: tuple[int, int]) -> Any:
        ctx.packed, ctx.shape = packed, shape
        with torch.enable_grad():  # by which a recompute is told from a backward; nothing here needs a gradient
            return rows.detach() @ packed.new_empty(shape, dtype=rows.dtype).t()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient @ ctx.packed.new_empty(ctx.shape, dtype=gradient.dtype), None, None


class FourBitLinear(torch.nn.Linear):
    """Stands in for ``bitsandbytes.nn.Linear4bit``, which cannot hold a fake tensor: same storage, types and products."""

    def __init__(self, linear: torch.nn.Linear, *, double_quant: bool) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        count = self.in_features * self.out_features
        self.weight = torch.nn.Parameter(torch.empty(count // 2, 1, dtype=torch.uint8), requires_grad=False)
        self.scales = [torch.empty(count // 64, dtype=torch.uint8 if double_quant else torch.float32)]
        if double_quant:
            self.scales.append(torch.empty(count // 64 // 256, dtype=torch.float32))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        compute = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else rows.dtype
        product = _FourBitProduct.apply(rows.to(compute), self.weight, (self.out_features, self.in_features))
        if self.bias is not None:
            product = product + self.bias.to(product.dtype)
        return product.to(rows.dtype)


def _quantize(model: torch.nn.Module, double_quant: bool) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is torch.nn.Linear and name != "lm_head":
                setattr(module, name, FourBitLinear(child, double_quant=double_quant))


# --- the step --------------------------------------------------------------------------------------------------------


def build_model(config: Mapping[str, Any], job: Mapping[str, Any], *, num_layers: int | None = None) -> Any:
    """The model of a job as its run would hold it: loaded, quantised, adapted, checkpointed. Weights as they come."""
    transformers.logging.set_verbosity_error()
    fields = {name: value for name, value in config.items() if name not in _NOT_FOR_THE_CLASS}
    if num_layers is not None:
        fields["num_hidden_layers"] = num_layers
        fields |= {name: fields[name][:num_layers] for name in _LISTS_BY_LAYER if isinstance(fields.get(name), list)}
    settings = transformers.CONFIG_MAPPING[config["model_type"]](**fields)
    settings.use_cache = bool(job.get("use_cache"))
    if any("expert" in name for name in fields):
        settings._experts_implementation = "grouped_mm"
    has_sdpa = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]._supports_sdpa
    attention = job.get("attn_implementation", "sdpa" if has_sdpa else "eager")
    model = transformers.AutoModelForCausalLM.from_config(
        settings, dtype=_TYPES[job["dtype"]], attn_implementation=attention
    )
    fuse_kernels(model, job)
    if job.get("quantization"):
        _quantize(model, bool(job.get("double_quant")))
    if job["method"] != "full":
        model = _adapt(model, job)
    if job["gradient_checkpointing"]:
        kwargs = job.get("gradient_checkpointing_kwargs", {"use_reentrant": False})
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        if job["method"] != "full":
            model.enable_input_require_grads()
    return model.train()


def _adapt(model: Any, job: Mapping[str, Any]) -> Any:
    import peft

    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if job.get("prepare_model_for_kbit_training") and parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32)
    targets = job["lora_target_modules"]
    lora = peft.LoraConfig(
        r=job["lora_r"],
        lora_alpha=job.get("lora_alpha", 8),
        lora_dropout=job.get("lora_dropout", 0.0),
        target_modules=targets if isinstance(targets, str) else list(targets),
        modules_to_save=list(job.get("lora_modules_to_save", ())) or None,
        use_dora=bool(job.get("use_dora")),
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model, lora, autocast_adapter_dtype=job.get("adapter_dtype", "float32") == "float32")
    if job.get("quantization") and job.get("bf16"):  # peft's own 4-bit layer leaves the cast to autocast
        for module in adapted.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False
    return adapted


def make_optimizer(model: torch.nn.Module, job: Mapping[str, Any]) -> torch.optim.Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    name = job.get("optim", "adamw_torch_fused")
    if name in _OPTIMIZERS:
        return _OPTIMIZERS[name](trained)
    return torch.optim.AdamW(trained, lr=1e-4, **({"fused": True} if name.endswith("fused") else {"foreach": True}))


@dataclass(frozen=True, slots=True)
class StepTrace:
    """What one step allocated. ``windows``: forward, loss, one for each layer's backward, embedding, optimizer."""

    windows: dict[str, Peak]
    static: dict[str, int]
    num_params: int
    num_trainable_params: int
    flops: dict[str, int]
    operators: dict[str, int]


def watch(model: Any, optimizer: torch.optim.Optimizer, log: AllocationLog) -> Callable[[], None]:
    """Books weights, adapters and states with ``log`` and moves its window with the backward. Returns what undoes it."""
    is_peft = hasattr(model, "peft_config")
    for each in (*model.parameters(), *model.buffers()):
        log.add_static(each, "adapters" if is_peft and each.requires_grad else "weights")
    for module in model.modules():
        for scale in getattr(module, "scales", ()):
            log.add_static(scale, "weights")
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                log.add_static(value, "optimizer")

    def enters(window: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            log.enter(window)

        return note

    def marks(window: str) -> Callable[..., None]:
        def hook(_: Any, __: Any, output: Any) -> None:
            node = (output[0] if isinstance(output, tuple) else output).grad_fn
            if node is not None and torch._C._current_graph_task_id() == -1:
                node.register_prehook(enters(window))

        return hook

    handles = [layer.register_forward_hook(marks(f"layer {index}")) for index, layer in enumerate(decoder_layers(model))]
    handles.append(model.get_input_embeddings().register_forward_hook(marks("embedding")))
    handles += [
        each.register_post_accumulate_grad_hook(lambda parameter: log.mark_gradient(parameter.grad))
        for each in model.parameters()
        if each.requires_grad
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def decoder_layers(model: Any) -> Any:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    for name in ("model", "backbone", "transformer"):
        inner = getattr(inner, name, inner)
    return inner.layers if hasattr(inner, "layers") else inner.h


def create_states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Takes a first optimizer step, so that the traced one is in the steady state."""
    for each in model.parameters():
        if each.requires_grad:
            each.grad = torch.zeros_like(each)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def trace_step(config: Mapping[str, Any], case: Mapping[str, Any], num_layers: int) -> StepTrace:
    """Traces the step of a bare loop, with ``num_layers`` of the model's layers."""
    job = case["job"]
    asks = {"fused_lm_head": True} if job.get("framework") == "trl" else {}  # as SFTTrainer.compute_loss does
    with FakeTensorMode(), gpu_choices(), kernels_that_do_nothing(job, config["model_type"]):
        model = build_model(config, job, num_layers=num_layers)
        optimizer = make_optimizer(model, job)
        create_states(model, optimizer)
        size, length = job["per_device_train_batch_size"], job["max_length"]
        log = AllocationLog(logit_elements=size * length * config["vocab_size"])
        undo = watch(model, optimizer, log)
        autocast = torch.autocast("cpu", torch.bfloat16) if job.get("bf16") else contextlib.nullcontext()
        with log:
            for micro_batch in range(job.get("gradient_accumulation_steps", 1)):
                tokens = torch.zeros(size, length, dtype=torch.int64)
                masks = {"attention_mask": torch.ones_like(tokens)} if case["is_padded"] else {}
                log.enter("forward")
                with autocast:
                    outputs = model(input_ids=tokens, labels=tokens, **masks, **asks)
                loss = outputs.loss
                if not case["keeps_logits"] and not job.get("use_cache"):
                    del outputs
                log.mark_end_of_forward()
                log.enter("loss")
                loss.backward()
                del loss, micro_batch
            log.enter("optimizer")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if case["has_evaluation"]:
                log.enter("evaluation")
                model.eval()
                with torch.no_grad(), autocast:
                    model(input_ids=tokens, labels=tokens, **masks, **asks)
        undo()
        return StepTrace(
            log.peaks(),
            log.static_bytes(),
            _num_params(model),
            sum(each.numel() for each in model.parameters() if each.requires_grad),
            dict(log.flops),
            dict(log.operators),
        )


def _num_params(model: torch.nn.Module) -> int:
    """Parameters of the model itself, adapters apart; a packed weight counts as many as it stands for."""
    is_peft = hasattr(model, "peft_config")
    packed = {id(each.weight): each for each in model.modules() if isinstance(each, FourBitLinear)}
    return sum(
        packed[id(each)].in_features * packed[id(each)].out_features if id(each) in packed else each.numel()
        for each in model.parameters()
        if not (is_peft and each.requires_grad)
    )


# --- from shallow stacks to the whole model --------------------------------------------------------------------------


def extrapolate(config: Mapping[str, Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """The row of the whole model from two shallow ones.

    Every moment of a stack of equal layers is linear in its depth, as long as it is the same moment: the backward of the
    layer third from the top, say. So each moment is extrapolated, and the largest taken.
    """
    shallow, deeper = case["depths"]
    period, depth = deeper - shallow, config["num_hidden_layers"]
    assert (depth - shallow) % period == 0, f"{case['name']}: {depth} layers are not {shallow} and whole periods of {period}"
    traces = [trace_step(config, case, layers) for layers in (shallow, deeper)]

    def at_full_depth(small: float, large: float) -> int:
        return round(small + (large - small) * (depth - shallow) / period)

    def moment(window: str) -> tuple[str, Peak, Peak]:
        if not window.startswith("layer"):
            return window, traces[0].windows[window], traces[1].windows[window]
        index = int(window.split()[1])
        from_top = index > shallow // 2
        return "backward", traces[0].windows[window], traces[1].windows[f"layer {index + period if from_top else index}"]

    windows: dict[str, dict[str, Any]] = {}
    for window in traces[0].windows:
        name, small, large = moment(window)
        total = at_full_depth(small.total_bytes, large.total_bytes)
        if total > windows.get(name, {"allocated": -1})["allocated"]:
            parts = {each: at_full_depth(small.by_category[each], large.by_category[each]) for each in CATEGORIES}
            windows[name] = {"allocated": total, **parts, "operator": large.operator}

    step = {name: each for name, each in windows.items() if name != "evaluation"}
    phase = max(step, key=lambda name: step[name]["allocated"])

    def both(name: str) -> tuple[Any, Any]:
        return getattr(traces[0], name), getattr(traces[1], name)

    def counts(name: str) -> dict[str, int]:
        small, large = both(name)
        return {key: at_full_depth(small[key], large.get(key, 0)) for key in small}

    import peft

    micro_batches, flops = case["job"].get("gradient_accumulation_steps", 1), counts("flops")
    return {
        "name": case["name"],
        "job": case["job"],
        "is_padded": case["is_padded"],
        "keeps_logits": case["keeps_logits"],
        "depths": case["depths"],
        "peak_allocated_bytes": step[phase]["allocated"],
        "peak_phase": phase,
        "peak_operator": step[phase]["operator"],
        "static_bytes": counts("static"),
        "phases": windows,
        **{f"{name}_flops": flops.get(name, 0) // micro_batches for name in ("forward", "backward", "recompute")},
        "operators": counts("operators"),
        "num_params": at_full_depth(*both("num_params")),
        "num_trainable_params": at_full_depth(*both("num_trainable_params")),
        "versions": {each.__name__: each.__version__ for each in (torch, transformers, peft)}
        | library_versions(case["job"], config["model_type"]),
    }


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(json.dumps(extrapolate(given["config"], given["case"])))
