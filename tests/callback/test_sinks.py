"""The fan-out keeps failures apart; the console says what a person needs; memory keeps everything."""

from __future__ import annotations

import dataclasses
import io
import re
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny_trainer

from ftcost_callback import FTCostCallback
from ftcost_callback.live_prediction import UNDESCRIBED_CPU
from ftcost_callback.records import Budget, Prediction, Session, Summary, Window
from ftcost_callback.sinks import ConsoleSink, FanOut, InMemorySink, Sink
from ftcost_callback.sinks.base import MAX_FAILURES
from ftcost_callback.sinks.console import dollars, duration, prediction_line, summary_lines, window_line

SESSION = Session(run_id="r1", session_index=0, started_at="2026-08-17T10:00:00Z", notes=["no GPU sensor: no driver"])
PREDICTION = Prediction(
    basis="before",
    estimate={
        "total_usd": 6.65,
        "total_usd_low": 5.9,
        "total_usd_high": 7.41,
        "total_seconds": 11400.0,
        "total_seconds_low": None,
        "total_seconds_high": None,
        "step_seconds": 0.4213,
        "verdict": "does_not_fit",
        "memory": {"peak_device_bytes": 47 * 2**30, "capacity_bytes": 44 * 2**30},
    },
)
WINDOW = Window(
    global_step=120,
    max_steps=1000,
    spent_usd=1.234,
    projected_usd=10.2,
    projected_usd_low=9.8,
    projected_usd_high=10.6,
    remaining_seconds=11520.0,
    non_padding_tokens_per_second=12345.6,
    mfu=0.4123,
    data_wait_fraction=0.02,
    step_seconds_measured_over_predicted=1.04,
)
BUDGET = Budget(threshold="80 %", kind="usd", limit=40.0, spent=32.1, global_step=500, action="warned")
SUMMARY = Summary(
    global_step=1000,
    num_sessions=2,
    wall_seconds=4000.0,
    train_seconds=3500.0,
    data_wait_seconds=350.0,
    eval_seconds=400.0,
    save_seconds=60.0,
    log_seconds=1.0,
    startup_seconds=39.0,
    other_seconds=0.0,
    spent_usd=2.333,
    num_non_padding_tokens=1_234_567,
    non_padding_tokens_per_second=353.0,
    mfu=0.4,
    peak_allocated_bytes=3 * 2**29,
    verdict="step 1.04x the prediction: on plan",
)


class FailingSink:
    """Fails in the named methods; counts its calls."""

    def __init__(self, *methods: str) -> None:
        self.methods = methods
        self.calls: list[str] = []

    def _called(self, method: str) -> None:
        self.calls.append(method)
        if method in self.methods:
            raise ConnectionResetError(f"{method} went wrong")

    def open(self, session: Session, prediction: Prediction | None) -> None:
        self._called("open")

    def prediction(self, prediction: Prediction) -> None:
        self._called("prediction")

    def log(self, window: Window, extra: Mapping[str, Any]) -> None:
        self._called("log")

    def alert(self, budget: Budget) -> None:
        self._called("alert")

    def close(self, summary: Summary) -> None:
        self._called("close")


def call_everything(sink: Any) -> None:
    sink.open(SESSION, PREDICTION)
    sink.prediction(PREDICTION)
    for _ in range(5):
        sink.log(WINDOW, {"expert_load": None})
    sink.alert(BUDGET)
    sink.close(SUMMARY)


def test_every_call_reaches_every_sink() -> None:
    first, second = InMemorySink(), InMemorySink()
    call_everything(FanOut([first, second]))
    for sink in (first, second):
        assert isinstance(sink, Sink)
        assert sink.session is SESSION
        assert sink.predictions == [PREDICTION, PREDICTION]
        assert sink.windows == [WINDOW] * 5
        assert sink.extras == [{"expert_load": None}] * 5
        assert sink.budgets == [BUDGET]
        assert sink.summary is SUMMARY


@pytest.mark.parametrize("method", ["open", "prediction", "log", "alert", "close"])
def test_one_sinks_failure_does_not_reach_the_others_or_the_caller(method: str) -> None:
    said: list[str] = []
    failing, good = FailingSink(method), InMemorySink()
    call_everything(FanOut([failing, good], warn=said.append))
    assert (len(good.predictions), len(good.windows), len(good.budgets), len(good.summaries)) == (2, 5, 1, 1)
    assert said[0] == f"ftcost: FailingSink.{method} failed (ConnectionResetError: {method} went wrong); training goes on"


def test_a_sink_is_switched_off_after_three_failures_and_warned_about_once() -> None:
    said: list[str] = []
    failing = FailingSink("log")
    fan_out = FanOut([failing], warn=said.append)
    call_everything(fan_out)
    assert failing.calls == ["open", "prediction"] + ["log"] * MAX_FAILURES
    assert fan_out.active == []
    assert len(said) == 2
    assert said[1] == "ftcost: FailingSink is switched off for this run"


def test_a_sink_that_cannot_open_is_switched_off_at_once() -> None:
    failing = FailingSink("open")
    call_everything(FanOut([failing], warn=lambda message: None))
    assert failing.calls == ["open"]


def test_the_console_from_start_to_end() -> None:
    stream = io.StringIO()
    call_everything(ConsoleSink(stream))
    lines = stream.getvalue().splitlines()
    assert all(line.startswith("ftcost: ") for line in lines)
    text = [line.removeprefix("ftcost: ") for line in lines]
    assert text[0] == ("predicted: $6.65 ($5.90 to $7.41), 3 h 10 min, 0.421 s a step, peak 47.0 of 44.0 GiB (does not fit)")
    assert text[1] == "no GPU sensor: no driver"
    assert text[3] == (
        "step 120/1000: $1.23 of $10.20 ($9.80 to $10.60), 3 h 12 min left, 12,346 tokens/s without padding, "
        "MFU 41.2%, step 1.04x predicted"
    )
    assert text[8] == "budget $40.00: 80 % used ($32.10 spent at step 500)"
    assert text[9:] == [
        "finished at step 1000: $2.33, 1 h 07 min in 2 sessions",
        "training 58 min 20 s, evaluating 6 min 40 s, saving 1 min 00 s, of the training 5 min 50 s waiting for data",
        "1,234,567 tokens without padding, 353 tokens/s, MFU 40.0%, peak 1.50 GiB allocated",
        "step 1.04x the prediction: on plan",
    ]


def notebook(monkeypatch: pytest.MonkeyPatch, *, is_kernel: bool) -> list[tuple[str, str]]:
    """An IPython, in a kernel or in a terminal; returns what it is made to show: (place, text)."""
    shown: list[tuple[str, str]] = []

    class Handle:
        def __init__(self, place: int) -> None:
            self.place = f"place {place}"

        def update(self, content: dict[str, str], *, raw: bool) -> None:
            shown.append((self.place, content["text/plain"]))

    def display(content: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        handle = Handle(len({place for place, _ in shown}) + 1)
        handle.update(content, raw=raw)
        return handle

    ipython, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    config = {"IPKernelApp": {}} if is_kernel else {}
    ipython.get_ipython = lambda: types.SimpleNamespace(config=config)  # type: ignore[attr-defined]
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return shown


def test_in_a_notebook_the_live_line_is_written_over_in_one_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = notebook(monkeypatch, is_kernel=True)
    sink = ConsoleSink()
    for steps in ((120, 240), (10,)):  # two trainings, a place for each
        sink.open(SESSION, PREDICTION)
        for step in steps:
            sink.log(dataclasses.replace(WINDOW, global_step=step), {})
        sink.close(SUMMARY)
    assert [(place, text.partition(":")[2].partition(":")[0]) for place, text in shown] == [
        ("place 1", " step 120/1000"),
        ("place 1", " step 240/1000"),
        ("place 2", " step 10/1000"),
    ]
    printed = capsys.readouterr()
    assert printed.err == ""  # a notebook shows that in red
    assert printed.out.splitlines()[0].startswith("ftcost: predicted: $6.65")
    assert printed.out.count("ftcost: finished at step 1000") == 2
    assert "step 120/1000" not in printed.out


def test_ipython_in_a_terminal_is_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = notebook(monkeypatch, is_kernel=False)
    ConsoleSink().log(WINDOW, {})
    assert shown == []
    assert capsys.readouterr().err.startswith("ftcost: step 120/1000")


def test_with_the_trainers_progress_bar_each_line_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tiny_trainer(tmp_path, [FTCostCallback(usd_per_gpu_hour=2.0, predict=False)], disable_tqdm=False)
    assert "ProgressCallback" in [type(each).__name__ for each in made.callback_handler.callbacks]
    made.train()
    shown = capsys.readouterr().err
    assert "4/4" in shown  # the bar
    lines = re.findall(r"(.?)(ftcost: [^\r\n]*)(.)", shown, flags=re.DOTALL)
    assert [line for _, line, _ in lines if ": step " in line] != []
    assert {before for before, _, _ in lines} <= {"\r", "\n"}  # the bar was wiped away first
    assert {after for _, _, after in lines} == {"\n"}
    assert "\x1b" not in "".join(line for _, line, _ in lines)  # no colour


def test_without_a_price_the_console_counts_hours() -> None:
    window = Window(
        global_step=5,
        elapsed_seconds=42.0,
        projected_total_seconds=4200.0,
        tokens_per_second=99.6,
        data_wait_fraction=0.31,
    )
    assert window_line(window) == "step 5: 42 s of 1 h 10 min, 100 tokens/s, 31% waiting for data"
    assert window_line(Window(global_step=1)) is None


def test_a_prediction_of_nothing_says_what_is_missing_once() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    answer = {"total_usd": None, "memory": None, "job": {"gpu": None}, "warnings": ["long samples are cut", UNDESCRIBED_CPU]}
    sink.open(dataclasses.replace(SESSION, notes=[UNDESCRIBED_CPU]), Prediction(basis="before", estimate=answer))
    sink.prediction(Prediction(basis="tokens_seen", estimate=answer))
    assert stream.getvalue() == f"ftcost: not predicted: {UNDESCRIBED_CPU}\n"
    sink.prediction(Prediction(basis="tokens_seen", estimate={"job": {"gpu": "A40"}, "warnings": ["no lengths are known"]}))
    assert stream.getvalue().endswith("ftcost: not predicted on the tokens seen: no lengths are known\n")


def test_a_calibration_is_named_and_why_it_is_not_used_is_said_once() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    why = "calibration auto: none in /home/me/calibrations was measured on A40"
    answer = {"step_seconds": 0.5, "job": {"gpu": "A40"}, "warnings": ["samples are cut", why], "calibration": None}
    sink.open(dataclasses.replace(SESSION, notes=None), Prediction(basis="before", estimate=answer))
    sink.prediction(Prediction(basis="tokens_seen", estimate=answer))
    sink.prediction(Prediction(basis="tokens_seen", estimate={**answer, "warnings": [], "calibration": {"file": "f"}}))
    assert stream.getvalue().splitlines() == [
        "ftcost: predicted: 0.5 s a step",
        f"ftcost: {why}",
        "ftcost: predicted on the tokens seen: 0.5 s a step",
        "ftcost: predicted on the tokens seen, calibrated: 0.5 s a step",
    ]


def test_small_memory_is_said_in_mib() -> None:
    memory = {"peak_device_bytes": 12 * 2**20, "capacity_bytes": 47 * 2**29}
    line = prediction_line(Prediction(basis="before", estimate={"memory": memory, "verdict": "fits"}))
    assert line == "predicted: peak 12 MiB of 23.5 GiB (fits)"
    small = dataclasses.replace(SUMMARY, peak_allocated_bytes=12 * 2**20)
    assert any(line.endswith("peak 12 MiB allocated") for line in summary_lines(small))


def test_what_was_done_twice_is_a_part_of_the_training() -> None:
    wasted = dataclasses.replace(SUMMARY, data_wait_seconds=0.0, wasted_seconds=90.0)
    assert summary_lines(wasted)[1].endswith("of the training 1 min 30 s done twice or lost")


@pytest.mark.parametrize(
    ("num_sessions_in_rates", "shown"),
    [(3, ""), (None, ""), (1, " (this session)"), (2, " (the last 2 sessions)")],
)
def test_rates_of_some_sessions_are_labelled(num_sessions_in_rates: int | None, shown: str) -> None:
    summary = dataclasses.replace(SUMMARY, num_sessions=3, num_sessions_in_rates=num_sessions_in_rates)
    assert any(line.endswith(f"353 tokens/s{shown}") or f"353 tokens/s{shown}, " in line for line in summary_lines(summary))


def test_budget_lines() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    sink.alert(
        Budget(threshold="projected", kind="usd", limit=40.0, spent=3.0, projected=47.5, global_step=9, action="warned")
    )
    sink.alert(  # more digits where the two would read the same
        Budget(
            threshold="projected", kind="usd", limit=0.012, spent=0.003, projected=0.012041, global_step=9, action="warned"
        )
    )  # fmt: skip
    sink.alert(Budget(threshold="100 %", kind="hours", limit=2.0, spent=2.01, global_step=9, action="stopped"))
    assert stream.getvalue().splitlines() == [
        "ftcost: budget $40.00: the run is heading for $47.50 ($3.00 spent at step 9)",
        "ftcost: budget $0.012: the run is heading for $0.012041 ($0.003 spent at step 9)",
        "ftcost: budget 2 h: 100 % used (2.01 h spent at step 9); saving and stopping",
    ]


def test_with_a_progress_bar_the_line_stands_above_it() -> None:
    from tqdm.auto import tqdm

    stream = io.StringIO()
    with tqdm(total=10, file=stream) as bar:
        bar.update(1)
        ConsoleSink(stream).log(Window(global_step=1, mfu=0.5), {})
        bar.update(1)
    # tqdm clears its bar (carriage return), writes the line, and draws the bar again.
    assert "\rftcost: step 1: MFU 50.0%\n" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 s"), (0.04213, "0.0421 s"), (9.99, "9.99 s"), (59.4, "59 s"), (59.6, "1 min 00 s"),
        (3599.6, "1 h 00 min"), (3600.0, "1 h 00 min"), (18420.0, "5 h 07 min"), (360000.0, "100 h 00 min"),
    ],
)  # fmt: skip
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("usd", "shown"),
    [(0.0, "$0.00"), (0.01234, "$0.0123"), (2e-6, "$2.0e-06"), (1.005, "$1.00"), (1234.5, "$1,234.50")],
)
def test_dollars(usd: float, shown: str) -> None:
    assert dollars(usd) == shown


def test_importing_the_sinks_imports_neither_wandb_nor_torch() -> None:
    code = (
        "import sys; from ftcost_callback.sinks import ConsoleSink, InMemorySink, WandbSink; "
        "print([name for name in ('wandb', 'torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
