"""Memory against measured rows, verdicts, the interval's coverage, the replayed allocator: what docs/accuracy.md states."""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from costmodel import constants

ROOT = Path(__file__).parent.parent
ACCURACY = ROOT / "accuracy"
MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def _accuracy_on_the_path() -> Iterator[None]:
    sys.path.insert(0, str(ACCURACY))
    yield
    sys.path.remove(str(ACCURACY))


@pytest.fixture(scope="module")
def runs() -> list[Any]:
    from runs import all_runs

    return list(all_runs())


def errors_of(rows: list[Any]) -> list[float]:
    from log_errors import percent

    return [abs(percent(error)) for _, _, error in rows]


def test_known_configurations_meet_the_bar(runs: list[Any]) -> None:
    """Rows of confidence A and B whose configuration is known: median at most 5 %, 90 % within 12 %."""
    from memory_errors import known, memory_errors

    rows = known(memory_errors(runs))
    assert {run.source for run, _, _ in rows} == {"peft", "litgpt", "fsdp_qlora"}
    errors = errors_of(rows)
    assert len(errors) == 25
    assert statistics.median(errors) <= 5.0
    assert sum(error <= 12.0 for error in errors) >= 0.9 * len(errors)
    assert max(errors) <= 5.0  # as reached


def test_no_source_is_left_out_without_a_reason(runs: list[Any]) -> None:
    from memory_errors import NOT_KNOWN, VARIABLE_LENGTHS, memory_errors

    assert set(NOT_KNOWN) == {"qwen1", "ms_swift"}
    assert set(NOT_KNOWN) >= VARIABLE_LENGTHS
    assert len(memory_errors(runs)) == 126


@pytest.mark.parametrize(
    ("group", "median", "share_within_12"),
    [
        # not met: the best reached. Variable lengths: the order in which they came decides, 0.7 to 5 times the loss
        pytest.param("ms_swift LoRA", 5.0, 0.7, id="ms_swift-lora"),
        pytest.param("ms_swift QLoRA", 5.0, 0.9, id="ms_swift-qlora"),
        pytest.param("ms_swift full", 6.0, 0.65, id="ms_swift-full"),
        # not met: what these figures measure is not stated
        pytest.param("qwen1 LoRA", 5.0, 0.85, id="qwen1-lora"),
        pytest.param("qwen1 GPTQ", 6.5, 0.8, id="qwen1-gptq"),
    ],
)
def test_classes_that_miss_the_bar_stay_where_they_are(
    runs: list[Any], group: str, median: float, share_within_12: float
) -> None:
    from memory_errors import memory_errors

    errors = errors_of([row for row in memory_errors(runs) if row[0].group == group])
    assert statistics.median(errors) <= median
    assert sum(error <= 12.0 for error in errors) >= share_within_12 * len(errors)


def test_what_is_needed_is_never_far_above_what_was_reserved(runs: list[Any]) -> None:
    """Cached blocks only add: without them no row of variable lengths is more than a tenth below ours."""
    from memory_errors import VARIABLE_LENGTHS, memory_errors

    rows = [error for run, _, error in memory_errors(runs, holes=None) if run.source in VARIABLE_LENGTHS]
    assert max(rows) <= 0.1


def test_the_interval_covers_70_to_90_percent_of_left_out_rows(runs: list[Any]) -> None:
    """The ends come from the other sources of fixed length."""
    from memory_errors import with_memory
    from memory_intervals import nested_memory_coverage, shipped_memory_coverage

    nested, shipped = nested_memory_coverage(runs), shipped_memory_coverage(runs)
    assert 0.7 <= sum(nested.values()) / len(nested) <= 0.9
    some = [run for run in with_memory(runs) if run.source != "qwen1"]  # its figures do not say what they measure
    assert sum(nested[run.run_id] for run in some) / len(some) >= 0.7
    assert 0.7 <= sum(shipped.values()) / len(shipped) <= 0.95


def test_verdicts(runs: list[Any]) -> None:
    """Public rows: all right. The paper's batches count twice, so one that is off by one is half wrong."""
    from memory_verdicts import all_verdicts, share_right

    verdicts = all_verdicts(runs)
    public = [each for each in verdicts if not each.source.startswith("paper")]
    assert share_right(public) >= 0.97
    assert sum(not each.fits for each in public) == 8
    # of all, 97 % is not met: 0.91 is the best reached, and 24 of the 40 verdicts on the paper's batches
    assert share_right(verdicts) >= 0.90
    paper = [each for each in verdicts if each.source.startswith("paper")]
    assert len(paper) == 40
    assert share_right(paper) >= 0.6


def test_largest_batches_of_the_paper_need_no_factor() -> None:
    from memory_verdicts import PAPER_LARGEST, mean_log_error_of_largest
    from paper_points import PAPER_MEMORY_FIELDS, paper_max_batch

    assert mean_log_error_of_largest() <= 0.17
    # the reading that transformers' defaults of the time would suggest is far off
    defaults = {"prepare_model_for_kbit_training": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    assert set(defaults) == set(PAPER_MEMORY_FIELDS)
    assert mean_log_error_of_largest(**defaults) >= 0.9
    for model, density, gpu, tokens, largest in PAPER_LARGEST:
        ours = paper_max_batch(model, density, gpu, tokens)
        assert ours is not None
        assert abs(ours - largest) <= max(1, 0.35 * largest), (model, density, gpu, tokens)


def test_the_document_states_the_computed_errors(runs: list[Any]) -> None:
    from memory_errors import known, memory_errors

    errors = errors_of(known(memory_errors(runs)))
    text = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert f"| known configuration | {len(errors)} | {statistics.median(errors):.1f} % (met) |" in text


# --- Qwen 1's own stack, traced and replayed ---------------------------------------------------------------------------


def test_tensors_are_those_of_a_trace_of_qwens_own_stack(runs: list[Any]) -> None:
    from memory_report import qwen_replays

    rows = qwen_replays(runs)
    assert len(rows) == 59
    off = [abs(row.ours / row.allocated - 1) for row in rows]
    assert max(off) <= 0.03
    assert statistics.median(off) <= 0.005


def test_only_as_decimal_gigabytes_the_rest_of_qwens_figures_does_not_grow_with_the_model(runs: list[Any]) -> None:
    from memory_report import qwen_replays

    rows = [row for row in qwen_replays(runs) if row.method == "GPTQ"]
    rest: dict[str, tuple[float, float]] = {}
    for model in ("Qwen/Qwen-1_8B", "Qwen/Qwen-72B"):
        some = [row for row in rows if row.model == model]
        decimal = statistics.median(row.printed * 1e9 / 2**30 - row.reserved for row in some)
        rest[model] = (decimal, statistics.median(row.printed - row.reserved for row in some))
    (small, small_binary), (large, large_binary) = rest.values()
    assert 1.0 <= small <= large <= small + 1.0  # GiB
    assert large_binary >= small_binary + 4.0


def test_gptqs_share_for_the_allocator_is_that_of_its_replays() -> None:
    with open(ACCURACY / "qwen_replays.csv", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == "GPTQ"]
    shares = []
    for row in rows:
        static, allocated, reserved = (float(row[f"{name}_gib"]) for name in ("static", "allocated", "reserved"))
        shares.append((reserved - allocated) / (allocated - static))
    assert pytest.approx(statistics.median(shares), abs=0.02) == constants.GPTQ_ALLOCATOR_OVERHEAD


# --- the replayed allocator ------------------------------------------------------------------------------------------------


def test_allocator_rounds_as_torch_does() -> None:
    from allocator import CachingAllocator

    for size, allocated, reserved in (
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # no more than 1 MiB would remain: not split
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
    ):
        allocator = CachingAllocator()
        allocator.allocate("a", size)
        assert (allocator.allocated, allocator.reserved) == (allocated, reserved), size


def test_allocator_splits_merges_and_gives_back() -> None:
    from allocator import CachingAllocator

    allocator = CachingAllocator()
    for name in "abcd":
        allocator.allocate(name, 5 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.free("b")
    allocator.free("c")  # merges with b's place
    allocator.allocate("e", 9 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.allocate("f", 40 * MIB)
    allocator.free("f")
    allocator.empty_cache()
    assert (allocator.reserved, allocator.most_reserved) == (20 * MIB, 60 * MIB)
    # a block that grows by a little each time finds no place: each length leaves one behind
    growing = CachingAllocator()
    for step in range(10):
        growing.allocate("logits", (100 + 4 * step) * MIB)
        growing.free("logits")
    assert growing.reserved == sum(100 + 4 * step for step in range(10)) * MIB


def test_shipped_shares_are_those_of_the_replays() -> None:
    from log_errors import quantile

    with open(ACCURACY / "replays.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24 * (3 + 2 * 4)
    gaps: dict[str, list[float]] = {}
    holes: dict[str, list[float]] = {}
    for row in rows:
        name, of_class = ("gap_share", gaps) if row["gap_share"] else ("holes_per_loss", holes)
        of_class.setdefault(row["class"], []).append(float(row[name]))
    assert set(gaps) == set(holes) == set(constants.ALLOCATOR_OVERHEAD) == set(constants.VARIABLE_LENGTH_HOLES)
    for name, share in constants.ALLOCATOR_OVERHEAD.items():
        assert share == pytest.approx(statistics.median(gaps[name]), abs=0.02), name
    for name, high in constants.VARIABLE_LENGTH_HOLES.items():
        assert high == pytest.approx(quantile(holes[name], 0.9), abs=0.15), name
