"""What only a card can tell: the driver's answers, the event clock, waits for the device, peaks, a real lack of memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from run import clock
from tiny_runs import TokenRows, pad_right, tiny_llama, tiny_mixtral, tiny_trainer

from ftcost_callback import FTCostCallback
from ftcost_callback.gpu_sampler import GpuSampler, TorchDevice
from ftcost_callback.run_file import read_run
from ftcost_callback.sinks import InMemorySink

pytestmark = pytest.mark.gpu


def test_nvml_finds_torch_s_device_by_its_uuid(cuda: Any) -> None:
    import pynvml

    sampler = GpuSampler(TorchDevice.of(cuda))
    sampler.open()
    total = pynvml.nvmlDeviceGetMemoryInfo(sampler._handle).total
    sampler.close()
    assert total == pytest.approx(torch.cuda.get_device_properties(cuda).total_memory, rel=0.1)


def test_each_reading_is_there_or_said_to_be_missing(cuda: Any) -> None:
    sampler = GpuSampler(TorchDevice.of(cuda), period_seconds=0.1)
    sampler.open()
    sampler.start()
    matrix = torch.randn(4096, 4096, device=cuda)
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        torch.mm(matrix, matrix)
        torch.cuda.synchronize()
    sample = sampler.take_window()
    sampler.close()
    assert sample.num_samples is not None
    assert sample.num_samples >= 10
    for name, value in (("busy", sample.busy_fraction), ("memory", sample.memory_used_bytes), ("power", sample.power_watts)):
        assert value is not None or sampler.is_mig or any(name in note for note in sampler.notes)
    if sample.busy_fraction is not None:
        assert 0.5 < sample.busy_fraction <= 1


def test_the_event_clock_agrees_with_a_host_that_waits(cuda: Any) -> None:
    result = clock("cuda", tiny=False)
    assert result["total_ratio"] == pytest.approx(1.0, abs=0.05)
    assert result["largest_step_error"] < 0.1
    assert result["host_issued_all_after"] < sum(result["waited_seconds"])  # the host did run ahead


def on_gpu(output_dir: Path, callbacks: list[Any], model: Any, **arguments: Any) -> Any:
    return tiny_trainer(output_dir, callbacks, model=model, use_cpu=False, **arguments)


def test_no_wait_is_added_between_rows(cuda: Any, tmp_path: Path) -> None:
    """torch's own check throws where our hooks would wait for the device."""
    from ftcost_callback.expert_load import ExpertLoadCounter
    from ftcost_callback.forward_window import ForwardWindow
    from ftcost_callback.token_counter import TokenCounter

    model = tiny_mixtral().to(cuda)
    model.train()
    inputs = {name: value.to(cuda) for name, value in pad_right([TokenRows()[0], TokenRows()[1]]).items()}
    tokens, experts = TokenCounter("shifted"), ExpertLoadCounter()
    experts.attach(model)

    def without_waiting(function: Any, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            function(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def opens(forward: Any) -> None:
        without_waiting(tokens.open_forward, forward)
        without_waiting(experts.open_forward, forward)

    ForwardWindow(opens, lambda: without_waiting(experts.close_forward)).attach(model)
    model(**inputs)
    without_waiting(tokens.take_step)
    load = experts.take(1)
    assert load is not None
    assert load.status == "recorded"


def test_losses_are_those_without_us(cuda: Any, tmp_path: Path) -> None:
    def losses(callbacks: list[Any], folder: str) -> list[float]:
        torch.manual_seed(1)
        trainer = on_gpu(tmp_path / folder, callbacks, tiny_llama(), max_steps=8, bf16=True)
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    assert losses([FTCostCallback(sinks=[InMemorySink()])], "with") == losses([], "without")


def test_peaks_of_loading_and_of_steps_stand_apart(cuda: Any, tmp_path: Path) -> None:
    ballast = torch.empty(2**30, dtype=torch.uint8, device=cuda)
    del ballast  # a loading peak that no step reaches
    on_gpu(tmp_path, [FTCostCallback(sinks=[])], tiny_llama()).train()
    record = read_run(tmp_path)
    assert record.sessions[0].loading_peak_allocated_bytes is not None
    assert record.sessions[0].loading_peak_allocated_bytes >= 2**30
    assert record.summary is not None
    assert record.summary.peak_allocated_bytes is None


def test_tokens_are_those_of_the_data(cuda: Any, tmp_path: Path) -> None:
    from tiny_runs import LENGTHS, supervised_tokens

    on_gpu(tmp_path, [FTCostCallback(sinks=[])], tiny_llama(), max_steps=6).train()
    summary = read_run(tmp_path).summary
    assert summary is not None
    assert (summary.num_non_padding_tokens, summary.num_supervised_tokens) == (sum(LENGTHS), supervised_tokens())


def test_a_real_lack_of_memory_is_explained(cuda: Any, tmp_path: Path) -> None:
    model = tiny_llama()
    held: list[Any] = []

    def fill(module: Any, args: Any) -> None:
        free, _ = torch.cuda.mem_get_info()
        held.append(torch.empty(2 * free, dtype=torch.uint8, device=cuda))

    model.lm_head.register_forward_pre_hook(fill)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        on_gpu(tmp_path, [FTCostCallback(sinks=[])], model).train()
    (row,) = read_run(tmp_path).out_of_memory
    assert row.requested_bytes is not None
    assert row.capacity_bytes is not None
