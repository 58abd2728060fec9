"""An answer as text, Markdown and JSON. The figures are those of ``sample_answer`` and were turned into text by hand."""

from __future__ import annotations

import datetime
import io
import json
import math

import pytest
from sample_answer import ANSWER, GIB, answer

from costmodel import estimate, formats, report

TODAY = datetime.date(2026, 11, 9)

EXPECTED_TEXT = """\
mistralai/Mixtral-8x7B-v0.1, qlora nf4, 1 x NVIDIA A40: fits

Summary
  parameters         46.70 B (head included), 12.88 B active, 4.19 M trained
  batch              4 per GPU x 1 accumulated, at most 1024 tokens
  memory             34.0 GiB (32.0 GiB to 36.0 GiB) of 45.0 GiB, peak in backward
  largest that fits  batch 6, or 1,536 tokens
  step               2 s (1.5 s to 2.75 s), bound by expert loop
  throughput         400 (290 to 533) tokens/s, 300 without padding, MFU 12.3 %
  total time         21 h (15.8 h to 28.9 h), 37,500 steps
  total cost         $9.24 ($6.93 to $12.71)
  price              $0.44 per GPU-hour; RunPod Secure A40 on_demand, a feed, as of 2026-08-19 (82 days old)
  intervals          80 % of runs

Memory, largest first
                                  size  of peak
  weights                     24.0 GiB   70.6 %
  activations                 6.00 GiB   17.6 %
  optimizer states            1.00 GiB    2.9 %
  logits and loss             1.00 GiB    2.9 %
  adapters                    0.50 GiB    1.5 %
  gradients                   0.50 GiB    1.5 %
  temporary buffers           0.50 GiB    1.5 %
  CUDA context and libraries  0.50 GiB    1.5 %
  reserved, not in use        0.50 GiB    1.5 %
  peak allocated (torch)      33.0 GiB
  peak reserved (torch)       33.5 GiB
  peak on the device          34.0 GiB

One step
                        time  of step
  forward             500 ms   25.0 %
  backward             1.4 s   70.0 %
  optimizer           100 ms    5.0 %
  of which experts     1.2 s   60.0 %
  of which attention  300 ms   15.0 %

The whole run
                   time
  training       20.8 h
  checkpoints  8.33 min
  start-up         90 s

Nearest measured runs: time of an optimizer step there, and as estimated
distance: 0 is alike; 1 a factor of four in parameters or tokens, another method, or another card and stack
  run                what               measured  estimated  distance
  paper A40 batch 4  Mixtral, nf4, A40    2.12 s        2 s      0.10

Warnings
  - lengths above max_length are cut: 12 samples

Assumed (defaults of transformers 4.40)
  - optim=adamw_torch, lora_target_modules=q_proj+v_proj
"""


def test_text() -> None:
    assert report.to_text(ANSWER, today=TODAY) == EXPECTED_TEXT


def test_print_on_something_that_is_no_terminal_is_the_text() -> None:
    stream = io.StringIO()
    report.print_estimate(ANSWER, stream, today=TODAY)
    assert stream.getvalue() == EXPECTED_TEXT


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_same_words_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = _Terminal()
    report.print_estimate(ANSWER, stream, today=TODAY)
    shown = stream.getvalue()
    assert "\x1b[" in shown
    for words in ("34.0 GiB (32.0 GiB to 36.0 GiB)", "$9.24 ($6.93 to $12.71)", "12 samples", "optim=adamw_torch"):
        assert words in shown


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = _Terminal()
    report.print_estimate(ANSWER, stream, today=TODAY)
    assert stream.getvalue() == EXPECTED_TEXT


def test_text_is_ascii_for_any_terminal() -> None:
    assert report.to_text(ANSWER, today=TODAY).isascii()


def test_markdown() -> None:
    text = report.to_markdown(answer(warnings=["a | b"]), today=TODAY)
    assert text.startswith(
        "### mistralai/Mixtral-8x7B-v0.1, qlora nf4, 1 x NVIDIA A40: fits\n\n**Summary**\n\n|  |  |\n| --- | --- |\n"
    )
    assert "| weights | 24.0 GiB | 70.6 % |\n" in text
    assert "|  | size | of peak |\n| --- | ---: | ---: |\n" in text
    assert "- a \\| b\n" in text


def test_json_is_not_rounded_and_keeps_null() -> None:
    assert json.loads(report.to_json(ANSWER)) == ANSWER
    assert "\n" not in report.to_json(ANSWER, indent=None)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_json_never_holds_nan_or_infinity(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        report.to_json(answer(step_seconds=value))


def test_unknown_totals_are_said_and_not_zero() -> None:
    text = report.to_text(
        answer(
            total_seconds=None,
            total_seconds_low=None,
            total_seconds_high=None,
            total_usd=None,
            total_usd_low=None,
            total_usd_high=None,
            num_steps=None,
            price=None,
        )
    )
    assert "  total time         unknown\n  total cost         unknown\n" in text
    assert "price              not given: hours only" in text


def test_a_rented_machine_shows_its_whole_price() -> None:
    text = report.to_text(
        answer(price={"usd_per_gpu_hour": 6.88, "usd_per_instance_hour": 55.04, "gpus_per_instance": 8, "as_of": "2026"})
    )
    assert "$6.88 per GPU-hour, rented as a machine of 8 at $55.04 per hour" in text
    assert "as of 2026\n" in text


def test_some_batches_do_not_fit() -> None:
    assert "batches that fit   97.5 %" in report.to_text(answer(share_of_batches_that_fit=0.975))


@pytest.mark.parametrize(
    ("gpu", "max_batch_size", "max_length", "sentence"),
    [
        (
            "A40",
            3,
            700,
            "does not fit: needs 52.1 GiB, an A40 has 45.0: largest batch that fits is 3, "
            "smallest card that holds it is A100-PCIE-80GB (80.0 GiB)",
        ),
        (
            "T4",
            0,
            256,
            "does not fit: needs 52.1 GiB, a T4 has 45.0: not even a batch of 1 fits, "
            "longest sequence that fits is 256 tokens, smallest card that holds it is A100-PCIE-80GB (80.0 GiB)",
        ),
        (
            "H100 SXM",
            None,
            None,
            "does not fit: needs 52.1 GiB, an H100 SXM has 45.0: smallest card that holds it is A100-PCIE-80GB (80.0 GiB)",
        ),
    ],
)
def test_does_not_fit_sentence(gpu: str, max_batch_size: int | None, max_length: int | None, sentence: str) -> None:
    values = answer(
        job={"gpu": gpu},
        memory={"peak_device_bytes": int(52.1 * GIB), "capacity_bytes": 45 * GIB},
        max_batch_size=max_batch_size,
        max_length_that_fits=max_length,
    )
    assert report.does_not_fit_sentence(values) == sentence


@pytest.mark.parametrize(
    ("gpu", "named"), [("H100 SXM", "an H100"), ("T4", "a T4"), ("MyCard", "a MyCard"), ("Atlas", "an Atlas")]
)
def test_a_card_has_the_article_of_its_sound(gpu: str, named: str) -> None:
    values = answer(job={"gpu": gpu}, memory={"capacity_bytes": GIB})
    assert f", {named} " in report.does_not_fit_sentence(values)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"),
        (0.0123, "12.3 ms"),
        (1.5, "1.5 s"),
        (600, "10 min"),
        (86_760, "24.1 h"),
        (4_500_000, "1,250 h"),
        (0, "0 ms"),
    ],
)
def test_format_seconds(seconds: float | None, text: str) -> None:
    assert formats.format_seconds(seconds) == text


def test_an_interval_has_one_unit() -> None:
    text = report.to_text(answer(total_seconds=7_800.0, total_seconds_low=6_900.0, total_seconds_high=9_000.0))
    assert "total time         2.17 h (1.92 h to 2.5 h)," in text


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (None, "unknown"),
        (0.01234, "$0.0123"),
        (3.456, "$3.46"),
        (1234.5, "$1,234"),
        (0, "$0.00"),
        (0.5, "$0.50"),
        (0.708, "$0.708"),
    ],
)
def test_format_usd(usd: float | None, text: str) -> None:
    assert formats.format_usd(usd) == text


@pytest.mark.parametrize(
    ("count", "text"),
    # Qwen3-8B: 8.19 B in 10^9, not 7.63 "B" in 2^30.
    [(None, "unknown"), (8_190_735_360, "8.19 B"), (124_439_808, "124.44 M"), (9_999, "9,999"), (12.345, "12.3")],
)
def test_format_count(count: float | None, text: str) -> None:
    assert formats.format_count(count) == text


@pytest.mark.parametrize(
    ("size", "text"), [(None, "unknown"), (45 * GIB, "45.0 GiB"), (GIB // 2, "0.50 GiB"), (1200 * GIB, "1,200.0 GiB")]
)
def test_format_gib(size: int | None, text: str) -> None:
    assert formats.format_gib(size) == text


def test_age() -> None:
    assert report.format_age("2026-11-08", TODAY) == " (1 day old)"
    assert report.format_age("2026-08-17", TODAY) == " (84 days old)"
    assert report.format_age("2026", TODAY) == ""
    assert report.format_age("2026-08-17", None) == ""


def test_sentences_keep_to_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {**ANSWER, "warnings": ["a warning that says more than fits into forty columns of a terminal"]}
    monkeypatch.setenv("COLUMNS", "40")
    stream = io.StringIO()
    report.print_estimate(answer, stream)
    text = stream.getvalue()
    assert "\n  - a warning that says more than fits\n    into forty columns of a terminal\n" in text
    lists = text[text.index("Warnings") :].splitlines()
    assert max(map(len, lists)) <= 40
    monkeypatch.delenv("COLUMNS")
    piped = io.StringIO()
    report.print_estimate(answer, piped)
    assert "  - a warning that says more than fits into forty columns of a terminal\n" in piped.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "unknown"), (0.0, "0.00 h"), (14_112.0, "3.92 h"), (360.0, "0.10 h"), (72.0, "0.020 h"), (0.9, "0.00025 h")],
)
def test_format_hours(seconds: float | None, text: str) -> None:
    assert formats.format_hours(seconds) == text


def test_a_stack_that_is_not_modelled_is_said_with_the_verdict() -> None:
    unsloth = answer(job={"framework": "unsloth"}, memory={"peak_device_bytes_low": 20 * GIB})
    assert report.headline(unsloth).endswith(": fits, counted as transformers: unsloth itself is not modelled")
    assert "low end: what unsloth's own kernels may save" in report.to_text(unsloth)
    sentence = report.does_not_fit_sentence({**unsloth, "verdict": "does_not_fit"})
    assert sentence.endswith("; counted as transformers: unsloth itself is not modelled and may need less")
    assert "not modelled" not in report.to_text(answer(job={"framework": "trl"}))


def test_a_far_high_end_has_its_reason() -> None:
    far = answer(job={"lengths": {"mean": 300, "max": 2000}}, memory={"peak_device_bytes_high": 44 * GIB})
    reason = "high end: batches of varying length may leave holes"
    assert reason in report.to_text(far)
    assert reason not in report.to_text(answer(job={"lengths": {"mean": 300, "max": 2000}}))
    assert reason not in report.to_text({**far, "job": {**far["job"], "packing": True}})


@pytest.mark.parametrize(
    ("high", "sentence"),
    [
        (23.9, "smallest card that holds it is RTX A5000 (24.0 GiB)"),
        (24.5, "smallest card that holds it is RTX 5090 (31.8 GiB)"),
        (500, "smallest card that holds it is RTX A5000 (24.0 GiB), and it is tight"),
    ],
)
def test_the_smallest_card_holds_the_upper_end_too(high: float, sentence: str) -> None:
    memory = {"peak_device_bytes": 23.8 * GIB, "peak_device_bytes_high": high * GIB}
    assert report.smallest_card(answer(job={"bf16": True}, memory=memory)) == sentence


@pytest.mark.parametrize(
    ("max_batch_size", "max_length", "line"),
    [
        (19, 9821, "batch 19, or 9,821 tokens"),
        (0, 87135, "no batch at this length; 87,135 tokens a sequence at this batch"),
        (0, 0, "no batch\n"),
    ],
)
def test_the_largest_that_fits_in_words(max_batch_size: int, max_length: int, line: str) -> None:
    text = report.to_text(answer(max_batch_size=max_batch_size, max_length_that_fits=max_length))
    assert f"largest that fits  {line}" in text


@pytest.mark.parametrize(
    ("framework", "older"), [("transformers", "4.57"), ("trl", "0.24"), ("axolotl", "0.13"), ("unsloth", None)]
)
def test_stacked_experts_that_stay_16_bit_have_an_older_stack_as_a_way_out(framework: str, older: str | None) -> None:
    job = {
        "model": "mistralai/Mixtral-8x7B-v0.1",
        "gpu": "A40",
        "method": "qlora",
        "bf16": True,
        "gradient_checkpointing": True,
        "per_device_train_batch_size": 1,
        "max_length": 1024,
        "framework": framework,
    }
    sentence = report.does_not_fit_sentence(estimate(job))
    assert ("under transformers 4 each expert is a linear" in sentence) == (older is not None)
    if older is None:
        return
    there = estimate({**job, "framework_version": older})
    assert there.verdict == "fits"
    assert f"with {framework} {older} it fits ({there.memory.peak_device_bytes / GIB:.1f} GiB: " in sentence
    on_a_small_card = report.does_not_fit_sentence(estimate({**job, "gpu": "RTX 4060 Ti 16GB"}))
    assert "under transformers 4" not in on_a_small_card
