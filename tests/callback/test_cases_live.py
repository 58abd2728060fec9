"""Public reports of wrong live figures as cases: which test holds each, and those that stand here.

The number is the case's in the list of reports that this project keeps; the link is where the wrong behaviour was
reported or repaired.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import LENGTHS, TickingClock, tiny_mixtral, tiny_trainer

from costmodel.gpu_catalog import find_gpu
from costmodel.price_catalog import bill_usd_per_hour
from costmodel.specs import Price
from ftcost_callback import FTCostCallback
from ftcost_callback.live_flops import FlopsCounter
from ftcost_callback.peak_memory import PeakMemory
from ftcost_callback.recorder import StepAggregate, StepRecorder
from ftcost_callback.records import GpuSample
from ftcost_callback.run_file import read_run
from ftcost_callback.sinks import InMemorySink

FOLDER = Path(__file__).parent

HELD_BY = {
    "1": "test_recorder.test_a_resume_rates_this_session_and_totals_all",
    "2": "test_projection.test_resume_at_900_of_1000_has_90_seconds_left",
    "3": "test_callback_tokens.test_an_epoch_with_accumulation",
    "5": "test_token_counter.test_two_samples_of_10_and_90_tokens",
    "6": "test_recorder.test_an_evaluation_between_two_steps_leaves_their_speed_alone",
    "7": "test_callback_clock.test_every_second_is_in_one_bucket",
    "9": "test_callback_clock.test_the_step_time_holds_the_data_wait_and_no_pause",
    "10": "test_recorder.test_the_first_step_is_kept_apart_and_stays_in_the_bill",
    "11": "test_recorder.test_skipped_steps_leave_steps_tokens_and_time_together",
    "14": "test_callback_tokens.test_settings_that_hide_or_repeat_the_labels",
    "15": "test_trainer_adapter.test_a_large_dataset_is_sampled_evenly",
    "16": "test_callback_tokens.test_a_model_without_token_ids_has_samples_and_one_note",
    "18": "test_recorder.test_time_never_runs_backwards",
    "19": "test_live_flops.test_lora_leaves_out_the_gradients_of_frozen_weights",
    "20": "test_live_flops.test_a_mixture_counts_the_experts_that_are_chosen",
    "22": "test_live_flops.test_an_unknown_device_has_no_mfu",
    "26": "test_live_flops.test_the_peak_is_that_of_the_type_the_products_run_in",
    "28": "test_live_flops.test_full_fine_tuning",
    "30": "test_live_flops.test_checkpointing_raises_hfu_by_a_third_and_leaves_the_flops_of_mfu",
    "31": "test_live_flops.test_accumulation_counts_all_micro_batches_over_all_their_time",
    "33": "test_live_flops.test_full_fine_tuning",
    "35": "test_wandb_trainer.test_evaluations_saves_a_resume_and_others_logging_lose_and_move_nothing",
    "36": "test_wandb_trainer.test_evaluations_saves_a_resume_and_others_logging_lose_and_move_nothing",
    "38": "test_wandb_guard.test_without_the_guard_or_a_report_nothing_is_opened",
    "39": "test_callback_lifecycle.test_given_twice_the_second_does_nothing_and_says_so",
    "41": "test_gpu_sampler.test_the_card_that_torch_trains_on_is_read_whatever_is_visible",
    "42": "test_gpu_sampler.test_the_card_that_torch_trains_on_is_read_whatever_is_visible",
    "43": "test_gpu_sampler.test_a_mig_slice_has_its_memory_and_no_utilisation",
    "45": "test_gpu_sampler.test_case_45_every_error_code_leaves_the_other_readings_or_ends_the_sampling",
    "46": "test_gpu_sampler.test_no_driver_is_one_note",
    "47": "test_gpu_sampler.test_the_card_that_torch_trains_on_is_read_whatever_is_visible",
    "51": "test_gpu_sampler.test_case_51_what_was_never_read_is_absent_and_not_zero",
    "55": "test_callback_lifecycle.test_given_as_a_class",
    "56": "test_callback_lifecycle.test_a_resume_goes_on_with_the_run",
    "59": "test_expert_load.test_gradient_checkpointing_counts_each_token_once",
    "60": "test_expert_load.test_thirty_two_positions_eight_of_them_padding_top_two",
    "62": "test_expert_load.test_experts_that_are_never_called_are_not_recorded_rather_than_zero",
    "63": "test_expert_load.test_each_layer_sums_to_real_tokens_times_top_k",
    "64": "test_expert_load.test_a_dense_model_has_no_hooks_and_no_rows",
    "65": "test_wandb_sink.test_more_experts_than_a_histogram_holds_are_summed_in_bins",
    "66": "test_expert_balance.test_a_uniform_load_of_128_experts",
    "69": "test_expert_load.test_a_family_that_does_not_show_its_choice_is_named",
    "71": "test_expert_load_meaning.test_case_71_forced_routing_is_said",
}


@pytest.mark.parametrize("case", HELD_BY, ids=lambda case: f"case-{case}")
def test_the_case_is_held_by_a_test(case: str) -> None:
    module, _, name = HELD_BY[case].partition(".")
    tree = ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def callback(**settings: Any) -> FTCostCallback:
    measuring = FTCostCallback(**({"sinks": [], "predict": False} | settings))
    measuring._clock = TickingClock()
    return measuring


# Of torch.distributed and of accelerate; asking for one's own rank waits for nobody.
_WAITING_FOR_OTHERS = {
    "all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast", "broadcast_object_list",
    "gather_for_metrics", "gather_object", "init_process_group", "monitored_barrier", "new_group", "recv", "reduce_scatter",
    "scatter_object_list", "send", "wait_for_everyone",
}  # fmt: skip


def test_case_13_and_18b_nothing_of_ours_waits_for_another_process() -> None:
    """https://github.com/huggingface/transformers/issues/28791: no collective, so nothing can hang."""
    package = FOLDER.parent.parent / "ftcost_callback"
    for file in package.rglob("*.py"):
        names = {
            node.attr for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute)
        }
        assert not names & _WAITING_FOR_OTHERS, file


def test_case_13_with_several_processes_the_trainers_own_sum_is_not_taken_for_ours() -> None:
    """https://github.com/huggingface/trl/issues/7100: that sum is over all processes; ours is of this one, or unknown."""
    import torch

    from ftcost_callback.forward_window import TrainingForward
    from ftcost_callback.token_counter import TokenCounter

    forward = {"input_ids": torch.ones(2, 8, dtype=torch.long), "num_items_in_batch": torch.tensor(132)}
    counter = TokenCounter("shifted", use_num_items_in_batch=False)
    counter.open_forward(TrainingForward(forward))
    counts = counter.take_step().read()
    assert (counts.num_tokens, counts.num_supervised_tokens) == (16, None)


def test_case_18a_log_interval_and_accumulation_need_not_divide_each_other(tmp_path: Path) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/19461"""
    sink = InMemorySink()
    tiny_trainer(tmp_path, [callback(sinks=[sink])], max_steps=23, logging_steps=10, gradient_accumulation_steps=4).train()
    assert [window.global_step for window in sink.windows] == [10, 20, 23]
    assert [window.num_steps for window in sink.windows] == [9, 10, 3]


@pytest.mark.parametrize(
    ("name", "bf16_flops_per_second"),
    [
        # NVIDIA's data sheets, dense: half of the sparse figure that they print (case 25).
        pytest.param("NVIDIA H200", 989.5e12, id="case-21"),
        pytest.param("NVIDIA A100-SXM4-80GB", 312e12, id="case-23"),
        pytest.param("nvidia l40s", 362.05e12, id="case-27"),
    ],
)
def test_the_denominator_is_the_card_s_own(name: str, bf16_flops_per_second: float) -> None:
    assert find_gpu(name).peak_bf16_flops_per_second == pytest.approx(bf16_flops_per_second, rel=0.002)


def test_case_34_a_4_bit_base_is_multiplied_in_the_compute_type() -> None:
    """torchtitan leaves MFU out when quantised; the products are those of bf16 all the same."""
    steps = StepAggregate(
        num_steps=1,
        step_seconds_sum=1.0,
        num_micro_batches=1,
        num_tokens=128,
        num_samples=2,
        sum_squared_sequence_tokens=8192.0,
    )
    job = {
        "model": tiny_mixtral().config.to_dict(),
        "max_length": 64,
        "method": "lora",
        "bf16": True,
        "gradient_checkpointing": True,
    }
    counts = [FlopsCounter({**job, **storage}).per_second(steps) for storage in ({}, {"quantization": "nf4"})]
    assert counts[0] is not None
    assert counts[0] == counts[1]


def test_case_49_the_peak_is_kept_and_belongs_to_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/MakazhanAlpamys/Soup/issues/650: memory between steps is no peak, and the counter is global."""
    mark = [0]
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: mark[0])
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda device: mark[0] + 1)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda *args: pytest.fail("it is the process's, not ours"))
    peaks = PeakMemory("cuda:0")
    for high, told in ((9, peaks.loading_ends), (9, peaks.step_ends)):
        mark[0] = high
        told()
    assert (peaks.loading_allocated_bytes, peaks.allocated_bytes) == (9, None)  # the steps stayed below the loading
    for high, told in ((14, peaks.step_ends), (20, peaks.pause_ends), (20, peaks.step_ends)):
        mark[0] = high
        told()
    assert (peaks.allocated_bytes, peaks.reserved_bytes) == (14, 15)  # 20 was an evaluation's


def test_case_46a_an_import_starts_nothing() -> None:
    """https://github.com/huggingface/transformers/issues/13231"""
    code = (
        "import socket, sys, threading\n"
        "def refuse(*args, **kwargs): raise SystemExit('a connection was opened')\n"
        "socket.socket.connect = refuse\n"
        "import ftcost_callback\n"
        "from ftcost_callback import FTCostCallback\n"
        "FTCostCallback()\n"
        "print(sorted(thread.name for thread in threading.enumerate() if 'ftcost' in thread.name))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == "[]"


def test_case_48_busy_all_the_time_and_a_low_mfu_stand_side_by_side() -> None:
    """https://github.com/sillsdev/silnlp/issues/505"""
    from ftcost_callback.metrics import METRICS, window_metrics
    from ftcost_callback.records import Window

    shown = window_metrics(Window(global_step=1, mfu=0.08, busy_fraction=1.0))
    assert shown == {"ftcost/speed/mfu": 0.08, "ftcost/gpu/busy_fraction": 1.0}
    assert not any("efficiency" in metric.key for metric in METRICS)
    assert GpuSample().busy_fraction is None


def test_case_52_steps_pauses_and_start_up_are_all_in_the_bill() -> None:
    """https://github.com/mosaicml/examples/pull/93: $2.00 an hour, 30 min of steps, 6 of pauses, 4 of start-up."""
    now = [0.0]
    recorder = StepRecorder(lambda: now[0])
    recorder.start(startup_seconds=240.0)
    for step in range(1, 31):
        now[0] += 60.0
        recorder.step(step)
    now[0] += 360.0
    recorder.pause("eval", global_step=30)
    assert recorder.totals.seconds == {
        "train_seconds": 1800.0, "eval_seconds": 360.0, "save_seconds": 0.0, "log_seconds": 0.0,
        "startup_seconds": 240.0, "other_seconds": 0.0, "rollout_seconds": 0.0,
    }  # fmt: skip
    assert recorder.elapsed_seconds / 3600 * 2.0 == pytest.approx(1.3333, abs=1e-4)


def test_case_54_what_is_paid_counts_and_each_machine_once() -> None:
    """https://github.com/memosstilvi/emr-cost-calculator/issues/3: bid 0.37, paid 0.20 for 8 of 10 h and 0.37 for 2."""
    paid = [(8.0, 0.20), (2.0, 0.37)]
    total = sum(
        hours * bill_usd_per_hour(Price(usd_per_gpu_hour=usd, usd_per_instance_hour=usd, source="given"), 4)
        for hours, usd in paid
    )
    assert total == pytest.approx(9.36)


def test_case_58_the_bill_can_be_read_while_the_run_goes_on_and_after_it(tmp_path: Path) -> None:
    """https://github.com/thinking-machines-lab/tinker-cookbook/issues/551"""
    from test_callback_lifecycle import At

    read: list[float | None] = []
    at_3 = At(3, lambda: read.append(read_run(tmp_path).spent_usd))
    tiny_trainer(tmp_path, [callback(usd_per_gpu_hour=2.0), at_3], max_steps=4).train()
    after = read_run(tmp_path).spent_usd
    assert read[0] is not None
    assert after is not None
    assert 0 < read[0] < after


def test_case_68_router_logits_are_never_switched_on(tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/pull/48131"""
    model = tiny_mixtral()
    assert model.config.output_router_logits is False
    tiny_trainer(tmp_path, [callback()], model=model, max_steps=2).train()
    assert model.config.output_router_logits is False


@pytest.mark.slow
def test_an_encoder_decoder_in_a_real_trainer(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
        )
    )
    tiny_trainer(tmp_path, [callback()], model=model, max_steps=6).train()
    record = read_run(tmp_path)
    # Encoder and decoder both compute. The labels are taken as they are: the decoder shifts its own input, and of the
    # labels (here with the first two masked) those that are real are its tokens.
    decoded = sum(max(0, length - 2) for length in LENGTHS)
    assert sum(step.num_non_padding_tokens or 0 for step in record.steps) == sum(LENGTHS) + decoded
    assert sum(step.num_supervised_tokens or 0 for step in record.steps) == sum(max(0, length - 2) for length in LENGTHS)
