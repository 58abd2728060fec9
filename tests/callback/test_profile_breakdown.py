from __future__ import annotations

import pytest

from ftcost_callback.profile_breakdown import STEP_RANGE, Breakdown, Cell, TracedOp, breakdown, operator_kind

NODE = "autograd::engine::evaluate_function: "


def op(name: str, start: float, end: float, parent: int | None = 0, *, sequence_nr: int = -1, **more: object) -> TracedOp:
    return TracedOp(name, start, end, more.pop("thread", 1), parent, sequence_nr, **more)  # type: ignore[arg-type]


def broken_down(*ops: TracedOp, busy_seconds: float | None = None) -> Breakdown:
    found = breakdown(ops, busy_seconds=busy_seconds)
    assert found is not None
    for table in (found.layer_type_seconds, found.operator_seconds, found.phase_seconds, found.by_group_seconds):
        assert sum(table.values()) == pytest.approx(found.step_seconds)
    return found


def cells(found: Breakdown) -> dict[tuple[str, str, str], float]:
    return {(cell.layer_type, cell.operator, cell.phase): pytest.approx(cell.seconds) for cell in found.cells}


ONE_STEP = (
    op(STEP_RANGE, 0, 20, None),  # 0
    op("ftcost::attention", 1, 6),  # 1
    op("aten::linear", 2, 5, 1, sequence_nr=7),  # 2
    op("aten::addmm", 3, 5, 2, sequence_nr=7),  # 3
    op("ftcost::experts", 6, 9),  # 4
    op("aten::view", 6, 7, 4, sequence_nr=8),  # 5: makes no node, and carries the number of the next
    op("aten::_grouped_mm", 7, 9, 4, sequence_nr=8),  # 6
    op(NODE + "GroupedMmBackward0", 10, 13, sequence_nr=8, forward_thread=1),  # 7
    op("GroupedMmBackward0", 10, 13, 7, sequence_nr=8, forward_thread=1, is_node=True),  # 8
    op("aten::_grouped_mm", 10, 12.5, 8),  # 9
    op(NODE + "torch::autograd::AccumulateGrad", 13, 14),  # 10
    op("aten::add_", 13, 14, 10),  # 11
    op(NODE + "AddmmBackward0", 14, 16, sequence_nr=7, forward_thread=1),  # 12
    op("aten::mm", 14, 16, 12),  # 13
    op("aten::_foreach_norm", 16, 17),  # 14: clipping
    op("Optimizer.step#AdamW.step", 17, 19),  # 15
    op("aten::lerp_", 17, 18.5, 15),  # 16
)


def test_a_step_by_layer_operator_and_pass() -> None:
    found = broken_down(*ONE_STEP)
    assert (found.num_steps, found.step_seconds) == (1, 20)
    assert cells(found) == {
        ("attention", "host", "forward"): 2,  # the range itself, from 1 to 2 and 5 to 6
        ("attention", "matmul", "forward"): 3,
        ("experts", "host", "forward"): 1,  # the view
        ("experts", "matmul", "forward"): 2,
        ("experts", "host", "backward"): 0.5,  # the node around its operator
        ("experts", "matmul", "backward"): 2.5,
        ("experts", "elementwise", "backward"): 1,  # the gradient of the experts' weight
        ("attention", "matmul", "backward"): 2,
        ("optimizer", "reduction", "optimizer"): 1,
        ("optimizer", "elementwise", "optimizer"): 1.5,
        ("optimizer", "host", "optimizer"): 0.5,
        ("other", "host", "other"): 3,  # between 0 and 1, 9 and 10, 19 and 20
    }
    assert found.by_group_seconds == pytest.approx(
        {"attention_linears": 5, "experts": 4.5, "elementwise": 1, "optimizer": 3, "host": 6.5}
    )
    assert found.top_operators[0] == ("aten::_grouped_mm", 4.5, 2)


def test_recomputation_inside_the_backward_belongs_to_the_layer_that_is_run_again() -> None:
    found = broken_down(
        op(STEP_RANGE, 0, 10, None),
        op("ftcost::mlp", 0, 2),
        op("aten::mm", 0, 2, 1, sequence_nr=3),
        op(NODE + "CheckpointFunctionBackward", 2, 10, sequence_nr=4, forward_thread=1),  # 3
        op("ftcost::mlp", 2, 5, 3),  # 4
        op("aten::mm", 2, 5, 4, sequence_nr=9),
        op(NODE + "MmBackward0", 5, 10, 3, sequence_nr=9, forward_thread=1),  # 6
        op("aten::mm", 5, 10, 6),
    )
    assert cells(found) == {
        ("mlp", "matmul", "forward"): 2,
        ("mlp", "matmul", "recompute"): 3,
        ("mlp", "matmul", "backward"): 5,
    }


def test_seconds_are_means_over_the_steps_and_what_lies_between_them_is_left_out() -> None:
    found = broken_down(
        op(STEP_RANGE, 0, 4, None),
        op("ftcost::norms", 0, 4),
        op("aten::mul", 4, 9, None),  # an evaluation between the steps
        op(STEP_RANGE, 10, 12, None),
        op("ftcost::norms", 10, 12, 3),
    )
    assert (found.num_steps, found.step_seconds) == (2, 3)
    assert found.cells == (Cell("norms", "host", "forward", seconds=3, num_calls=1),)


def test_a_loss_that_the_loop_computes_belongs_to_the_head() -> None:
    found = broken_down(op(STEP_RANGE, 0, 3, None), op("aten::cross_entropy_loss", 0, 2), op("aten::mul", 2, 3))
    assert found.layer_type_seconds == {"head_and_loss": 2, "other": 1}


def test_other_threads_of_the_cpu_do_not_count() -> None:
    found = broken_down(op(STEP_RANGE, 0, 3, None), op("aten::stack", 0, 2, None, thread=2))
    assert found.layer_type_seconds == {"other": 3}


# On a GPU the kernels count, wherever the host launched them from.


def test_on_a_gpu_kernels_belong_to_the_operator_that_launched_them() -> None:
    found = broken_down(
        op(STEP_RANGE, 0, 10, None),
        op("ftcost::attention", 0, 1),
        op("aten::mm", 0, 0.1, 1, sequence_nr=1, kernels=(("ampere_bf16_gemm", 2.0),)),
        # The backward runs in a thread of its own.
        op(NODE + "MmBackward0", 2, 3, None, sequence_nr=1, forward_thread=1, thread=5, kernels=()),
        op("aten::mm", 2, 2.5, 3, thread=5, kernels=(("ampere_bf16_gemm", 4.0),)),
        busy_seconds=6.0,
    )
    assert found.layer_type_seconds == {"attention": 6, "idle": 4}
    assert found.phase_seconds == {"backward": 4, "other": 4, "forward": 2}
    assert found.by_group_seconds == {"attention_linears": 6, "host": 4}
    assert found.top_operators == (("ampere_bf16_gemm", 6.0, 2),)


def test_kernels_that_run_side_by_side_share_the_time() -> None:
    kernels = (("ncclDevKernel_AllReduce", 4.0),)
    found = broken_down(
        op(STEP_RANGE, 0, 10, None),
        op("ftcost::mlp", 0, 1),
        op("aten::mm", 0, 1, 1, kernels=(("gemm", 4.0),)),
        op("c10d::allreduce_", 1, 2, 0, kernels=kernels),
        busy_seconds=4.0,
    )
    assert found.operator_seconds == {"idle": 6, "matmul": 2, "communication": 2}


def test_kernels_that_no_operator_launched_are_other() -> None:
    found = broken_down(op(STEP_RANGE, 0, 10, None), op("aten::mm", 0, 1, 0, kernels=(("gemm", 1.0),)), busy_seconds=5.0)
    assert found.operator_seconds == {"idle": 5, "other": 4, "matmul": 1}


def test_without_a_whole_step_there_is_nothing() -> None:
    assert breakdown([op("aten::mm", 0, 1, None)]) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "matmul"),
        ("aten::baddbmm", "matmul"),
        ("aten::_grouped_mm", "matmul"),
        ("bitsandbytes::dequantize_4bit", "dequantisation"),
        ("kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>", "dequantisation"),
        ("bitsandbytes::gemv_4bit", "matmul"),
        ("aten::_softmax_backward_data", "softmax"),
        ("aten::_log_softmax", "softmax"),
        ("aten::nll_loss_forward", "loss"),
        ("aten::topk", "top_k"),
        ("aten::_scaled_dot_product_flash_attention", "fused_attention"),
        ("flash_attn::_flash_attn_varlen_forward", "fused_attention"),
        ("aten::silu_backward", "elementwise"),
        ("aten::add_", "elementwise"),
        ("aten::masked_fill_", "elementwise"),
        ("aten::rsqrt", "elementwise"),
        ("aten::index_add_", "gather_scatter"),
        ("aten::embedding_dense_backward", "gather_scatter"),
        ("aten::_to_copy", "copy_and_cast"),
        ("aten::cat", "copy_and_cast"),
        ("Memcpy HtoD (Pageable -> Device)", "copy_and_cast"),
        ("aten::zeros_like", "copy_and_cast"),
        ("aten::empty_like", "host"),
        ("aten::transpose", "host"),
        ("aten::item", "host"),
        ("aten::_foreach_norm", "reduction"),
        ("aten::linalg_vector_norm", "reduction"),
        ("aten::native_layer_norm", "norm"),
        ("aten::native_dropout", "random"),
        ("aten::conv1d", "convolution"),
        ("triton_poi_fused_mul_silu_3", "elementwise"),
        ("aten::_fused_adamw_", "optimizer"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("a_library::of_its_own", None),
    ],
)
def test_operator_kinds(name: str, kind: str | None) -> None:
    assert operator_kind(name) == kind
