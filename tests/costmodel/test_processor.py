"""Steps on a probed processor: the curve, and the hand-counted bytes against those that real modules move."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from costmodel import processor
from costmodel.adapters import plan_adapters
from costmodel.defaults import resolve
from costmodel.hf_config import model_spec_from_config
from costmodel.operators import LAYER_OPERATORS, MODEL_OPERATORS
from costmodel.specs import parse_job
from costmodel.step_time import step_time
from costmodel.workload import Batch

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
SEQUENCES, TOKENS = 2, 128
# Not element-wise: products, attention, the loss, the embedding; `_unsafe_view` copies nothing.
OTHERS = ("mm", "scaled_dot", "softmax", "nll", "embedding", "_unsafe_view")


def test_the_curve_is_a_line_on_logarithmic_axes_and_flat_outside() -> None:
    curve = ((1.0, 100.0), (100.0, 1.0))
    assert processor.at(curve, 10.0) == pytest.approx(10.0)
    assert processor.at(curve, 0.1) == 100.0
    assert processor.at(curve, 1e6) == 1.0


def test_seconds_are_bytes_over_the_rate_at_the_size_of_the_tensor() -> None:
    curve = ((4000.0, 1000.0), (8000.0, 500.0))
    moved = [processor.Moved(100, 10, 8.0, 12.0), processor.Moved(100, 20, 4.0, 0.0)]  # 4,000 and 8,000 bytes a tensor
    assert processor.seconds(moved, curve) == (pytest.approx(8.0 + 16.0), pytest.approx(12.0))


def bytes_of_real_modules(model: Any) -> tuple[float, float]:
    """(forward, backward) bytes that element-wise operators of a step read and write, each operand and result once."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.phase = "forward"
            self.moved: dict[str, float] = defaultdict(float)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
            if not is_view and not any(part in str(func) for part in OTHERS):
                tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)]
                for each in tensors:  # an expanded tensor is read once
                    self.moved[self.phase] += min(each.numel() * each.element_size(), each.untyped_storage().nbytes())
            return out

    ids = torch.arange(SEQUENCES * TOKENS).reshape(SEQUENCES, TOKENS) % SIZES["vocab_size"]
    model.train()
    with Count() as count:
        loss = model(input_ids=ids, labels=ids).loss
        count.phase = "backward"
        loss.backward()
    return count.moved["forward"], count.moved["backward"]


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_bytes_counted_by_hand_are_those_of_the_real_modules(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    shapes: dict[str, dict[str, Any]] = {
        "llama": {"intermediate_size": 320},
        "mixtral": {"intermediate_size": 192, "num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen3_moe": {"intermediate_size": 320, "moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 3},
    }
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }[family]
    config = config_class(**SIZES, **shapes[family])
    forward, backward = bytes_of_real_modules(model_class(config))
    spec = model_spec_from_config(config.to_dict())
    tokens = SEQUENCES * TOKENS
    moved = []
    for layer, count in spec.layers:
        moved += count * processor.moved_by_layer(layer, tokens, spec.hidden_size, trains_norms=True)
        for experts in layer.all_experts:
            moved += count * processor.moved_by_experts(experts, tokens * experts.num_experts_computed)
            moved += count * processor.moved_by_expert_gradients(experts)
    last_norm = processor.moved_by_layer(spec.layers[0][0], tokens, spec.hidden_size, trains_norms=True)[0]
    counted = [
        sum(each.rows * each.width * getattr(each, phase) for each in [*moved, last_norm])
        for phase in ("forward", "backward")
    ]
    # a dense layer is counted operator by operator; routers and what sorts the tokens are not counted
    tolerance = 0.02 if family == "llama" else 0.06
    assert counted == pytest.approx([forward, backward], rel=tolerance)


DEVICE: dict[str, Any] = {
    "name": "Some CPU",
    "vendor": "CPU",
    "memory_bytes": 16 * 2**30,
    "memory_bandwidth_bytes_per_second": 20e9,
    "measured_fp32_matmul_flops_per_second": 80e9,
    "seconds_per_operator": 2e-6,
}
PROBED: dict[str, Any] = {
    "matmul_flops_per_second": 60e9,
    "matmul_half_size": 20.0,
    "elementwise_bytes_per_second": [[2**18, 40e9], [2**24, 20e9]],
    "attention_flops_per_second": [[64, 20e9], [1024, 40e9]],
    "loss_seconds_per_logit": [[2**19, 1.5e-9], [2**25, 6e-9]],
    "optimizer_seconds_per_parameter": 1e-9,
    "optimizer_seconds_per_tensor": 1e-5,
}


def seconds_on(probed: dict[str, Any] | None, **fields: Any) -> dict[str, float]:
    from costmodel.specs import parse_gpu

    job = parse_job(
        {
            "model": "Qwen/Qwen2.5-0.5B",
            "method": "full",
            "dtype": "float32",
            "max_length": 256,
            "attn_implementation": "sdpa",
            **fields,
        }
    )
    from costmodel.model_catalog import find_model_config

    model = model_spec_from_config(find_model_config("Qwen/Qwen2.5-0.5B"))
    resolved, _ = resolve(job, model)
    assert plan_adapters(model, resolved).runs
    step = step_time(model, resolved, parse_gpu({**DEVICE, "probed": probed}), Batch.of(1, 256))
    assert step is not None
    assert sum(step.by_group_seconds.values()) == pytest.approx(step.step_seconds)
    return step.by_group_seconds


@pytest.mark.parametrize(
    ("field", "slower", "group"),
    [
        pytest.param("matmul_flops_per_second", 30e9, "mlp", id="products"),
        pytest.param("elementwise_bytes_per_second", [[2**18, 20e9], [2**24, 10e9]], "elementwise", id="element-wise"),
        pytest.param("attention_flops_per_second", [[64, 10e9], [1024, 20e9]], "attention_scores", id="attention"),
        pytest.param("optimizer_seconds_per_parameter", 2e-9, "optimizer", id="optimizer"),
    ],
)
def test_each_probed_rate_moves_its_own_group(field: str, slower: Any, group: str) -> None:
    before, after = seconds_on(PROBED), seconds_on({**PROBED, field: slower})
    assert after[group] == pytest.approx(2.0 * before[group])


def test_a_dimension_of_a_product_costs_what_a_longer_one_would() -> None:
    """Qwen2.5-0.5B: 256 rows, 24 layers of three matrices of 896 x 4864, read once forward and twice backward."""
    wide, narrow = (seconds_on({**PROBED, "matmul_half_size": half})["mlp"] for half in (0.0, 20.0))
    assert wide == pytest.approx(24 * 3 * 3 * 2 * 256 * 896 * 4864 / 60e9)
    assert narrow == pytest.approx(24 * 3 * 3 * 2 * 276 * 916 * 4884 / 60e9)


def test_the_products_of_a_small_rank_take_longer_than_their_flops() -> None:
    lora = {"method": "lora", "lora_r": 8, "lora_target_modules": ["q_proj"]}
    wide, narrow = (seconds_on({**PROBED, "matmul_half_size": half}, **lora)["adapters"] for half in (0.0, 20.0))
    assert narrow / wide == pytest.approx((276 / 256) * (916 / 896) * (28 / 8))


def test_the_head_has_few_rows_too() -> None:
    wide, narrow = (seconds_on({**PROBED, "matmul_half_size": half})["head_and_loss"] for half in (0.0, 20.0))
    head = 3 * 2 * 256 * 896 * 151_936 / 60e9
    assert narrow - wide == pytest.approx(head * ((276 / 256) * (916 / 896) * (151_956 / 151_936) - 1))


def test_forward_and_backward_have_a_cost_of_dispatch_each() -> None:
    """In all as much as one figure for both, where the two mean the same."""
    both = {"forward_seconds_per_operator": 2e-6, "backward_seconds_per_operator": 2e-6}
    assert seconds_on({**PROBED, **both})["host"] == pytest.approx(seconds_on(PROBED)["host"])
    forward = seconds_on({**PROBED, **both, "forward_seconds_per_operator": 3e-6})["host"]
    number = MODEL_OPERATORS[0] + 24 * LAYER_OPERATORS[0]
    assert forward - seconds_on(PROBED)["host"] == pytest.approx(number * 1e-6)


def test_the_loss_is_by_the_size_of_its_logits() -> None:
    before = seconds_on(PROBED)["head_and_loss"]
    after = seconds_on({**PROBED, "loss_seconds_per_logit": [[2**19, 1.5e-9], [2**25, 7e-9]]})["head_and_loss"]
    assert after - before == pytest.approx(256 * 151_936 * 1e-9)  # 148 MiB: beyond the curve


def test_no_card_is_started_on_a_processor() -> None:
    """What the run adds before its first step: our own measured 16 s, and the weights at 1 GB/s."""
    from costmodel.estimation import estimate

    fields: dict[str, Any] = {"model": "Qwen/Qwen2.5-0.5B", "method": "full", "dtype": "float32", "max_length": 64}
    fields |= {"lengths": {"fixed": 64}, "max_steps": 10}
    answer, on_a_card = (estimate(fields, gpu=gpu) for gpu in ({**DEVICE, "probed": PROBED}, "A40"))
    assert answer.startup_seconds == pytest.approx(16.0 + 494_032_768 * 4 / 1e9)
    assert on_a_card.startup_seconds == pytest.approx(45.0 + 494_032_768 * 4 / 1e9)
