"""The record of a very long run stays bounded, and loses no token."""

from __future__ import annotations

import math
from pathlib import Path

from tiny_runs import FakeClock

from ftcost_callback.boundary import Boundary
from ftcost_callback.record_writer import ExpertThinner, RecordWriter
from ftcost_callback.records import ExpertLoad


def load(step: int, counts: list[list[int]], **fields: object) -> ExpertLoad:
    names = [f"layers.{row}" for row in range(len(counts))]
    return ExpertLoad(
        global_step=step,
        layer_names=names,
        tokens_per_expert=counts,
        num_experts_per_tok=2,
        **fields,  # type: ignore[arg-type]
    )


def test_a_run_that_reports_seldom_keeps_every_row() -> None:
    thinner = ExpertThinner(full_counts=40)
    loads = [load(step, [[1, 2], [3, 4]]) for step in range(10)]
    assert [thinner.add(each) for each in loads] == loads
    assert thinner.take() is None


def test_rows_beyond_hold_the_sums_of_more_and_more_of_them() -> None:
    thinner = ExpertThinner(full_counts=16)  # four rows
    written = [row for step in range(1, 20) if (row := thinner.add(load(step, [[step, 0], [0, 1]]))) is not None]
    rest = thinner.take()
    assert rest is not None
    assert [row.global_step for row in (*written, rest)] == [1, 2, 3, 4, 6, 8, 12, 16, 19]
    assert [row.tokens_per_expert[1][1] for row in (*written, rest)] == [1, 1, 1, 1, 2, 2, 4, 4, 3]
    assert sum(row.tokens_per_expert[0][0] for row in (*written, rest)) == sum(range(1, 20))


def test_a_sum_says_what_its_own_counts_mean_and_keeps_a_doubt() -> None:
    thinner = ExpertThinner(full_counts=4)
    assert all(thinner.add(load(step, [[9, 9]], load_max_over_mean=1.0)) is not None for step in (0, 1))
    assert thinner.add(load(2, [[8, 0]], load_max_over_mean=2.0, num_dead_experts=1, status="partial", reason="why")) is None
    row = thinner.add(load(3, [[0, 4]], load_max_over_mean=2.0, num_dead_experts=1, load_max_over_mean_vs_first_steps=1.5))
    assert row is not None
    assert (row.tokens_per_expert, row.status, row.reason) == ([[8, 4]], "partial", "why")
    assert (row.load_max_over_mean, row.num_dead_experts, row.load_max_over_mean_vs_first_steps) == (8 / 6, 0, 1.5)


def test_why_nothing_is_counted_is_said_at_once() -> None:
    thinner = ExpertThinner(full_counts=0)
    said = ExpertLoad(global_step=3, status="not_recorded", reason="a replaced kernel")
    assert thinner.add(said) is said


def test_very_many_reports_stay_bounded() -> None:
    num_loads, full = 100_000, 80
    thinner = ExpertThinner(full_counts=full)
    one = load(1, [[1]])
    written = [row for _ in range(num_loads) if (row := thinner.add(one)) is not None]
    rest = thinner.take()
    assert sum(row.tokens_per_expert[0][0] for row in (*written, *([rest] if rest is not None else []))) == num_loads
    # Each doubling of the run adds half of the first rows: a million reports of any model are below 10 times those.
    assert len(written) <= full * (1 + math.log2(num_loads / full) / 2)
    assert 1 + math.log2(1_000_000) / 2 < 11


def test_what_waits_is_written_with_the_ledger(tmp_path: Path) -> None:
    writer = RecordWriter(Boundary(), FakeClock())
    writer.open(tmp_path)
    writer._experts = ExpertThinner(full_counts=0)
    for step in (1, 2):
        writer.write_experts(load(step, [[1, 1]]))
    writer.write_what_waits(global_step=2)
    writer.close()
    lines = (tmp_path / "_ftcost" / "run.jsonl").read_text().splitlines()
    assert ['"global_step": 1' in lines[0], '"global_step": 2' in lines[1], len(lines)] == [True, True, 2]
