"""The HTML report: what it says, what it leaves out, and that a browser draws it."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.errors import CostModelError, MissingExtraError
from ftcost_callback.live_prediction import UNDESCRIBED_CPU
from ftcost_callback.report_figures import cost_figure, heat_figure, load_figure, rate_figure
from ftcost_callback.report_html import render_report, write_report
from ftcost_callback.report_numbers import count, duration, gib, iso_time, percent, usd
from ftcost_callback.report_reading import read_series
from ftcost_callback.report_rows import summary_row, summary_text
from ftcost_callback.report_run import ReportedRun, savings
from ftcost_callback.report_series import MAX_FRAMES, totals
from ftcost_callback.report_thinning import MAX_POINTS, running_median, shorten, stretch_ends, thin_min_max

sys.path.insert(0, str(Path(__file__).parent))

from synthetic_run import (
    A40_USD_PER_HOUR,
    KILLED_AT,
    MOE_STEPS,
    RESUMED_FROM,
    Row,
    dense_run,
    long_run,
    moe_run,
    one_step_run,
    write_rows,
    write_truncated,
)

pytest.importorskip("plotly")


@pytest.fixture
def moe_file(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "out" / "_ftcost" / "run.jsonl", moe_run())


def reported(path: Path) -> ReportedRun:
    series = read_series(path)
    return ReportedRun(series, totals(series), "r0")


def own_part(page: str) -> str:
    """The page without plotly's own script."""
    own, num_found = re.subn(r'<script type="text/plain" id="plotly">[A-Za-z0-9+/=]*</script>', "", page)
    assert num_found == 1
    return own


def text_of(page: str) -> str:
    """What a reader sees: no markup, no scripts."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", own_part(page), flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body)))


def figures_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


# Numbers


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "$0"),
        (0.00041234, "$0.000412"),
        (0.0123456, "$0.0123"),
        (0.79, "$0.79"),
        (12.344, "$12.34"),
        (1234.4, "$1,234"),
    ],
)
def test_dollars_are_cents_or_three_digits_of_a_smaller_sum(value: float, shown: str) -> None:
    assert usd(value) == shown


def test_parts_of_one_whole_have_the_same_decimals() -> None:
    assert [usd(part, of=1.733) for part in (1.468, 0.0046, 1.733)] == ["$1.468", "$0.005", "$1.733"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 s"),
        (0.85, "850 ms"),
        (12.34, "12.3 s"),
        (59.97, "1 min 00 s"),
        (245.0, "4 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7897.2, "2 h 12 min"),
        (3 * 86400.0, "3 d 0 h"),
    ],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_other_numbers() -> None:
    assert (percent(0.0004), percent(0.153), percent(1.0), percent(0.0)) == ("< 0.1 %", "15.3 %", "100 %", "0 %")
    assert (count(1234.6), count(7.256)) == ("1,235", "7.26")
    assert (gib(2**30 * 35.94), gib(2**20 * 461)) == ("35.9 GiB", "461 MiB")
    assert iso_time("2026-08-17T09:00:00Z") == "2026-08-17 09:00 UTC"
    assert iso_time("last Tuesday") == "last Tuesday"


# Thinning


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(2, 60))
def test_thinning_keeps_the_extremes_the_order_and_the_limit(values: list[float], max_points: int) -> None:
    steps = [float(x) for x in range(len(values))]
    kept = thin_min_max(steps, values, max_points)
    assert len(kept) <= max_points
    assert {min(values), max(values)} <= {y for _, y in kept}
    assert kept == sorted(kept)
    assert set(kept) <= set(zip(steps, values, strict=True))


def test_running_median_ignores_a_single_outlier() -> None:
    for num_steps in (101, 50_000):
        steps, values = [float(x) for x in range(num_steps)], [1.0 if x != 50 else 900.0 for x in range(num_steps)]
        medians = running_median(steps, values)
        assert {y for _, y in medians} == {1.0}
        assert len(medians) == (num_steps if num_steps <= MAX_POINTS else MAX_POINTS // 2)


def test_stretch_ends_hold_the_last_place() -> None:
    assert stretch_ends(0) == []
    assert stretch_ends(3) == [0, 1, 2]
    assert stretch_ends(10, 3) == [2, 5, 9]
    assert shorten(3.0) == 3
    assert shorten(1.23456789) == 1.23457


# Reading


def test_buckets_sum_to_the_wall_time_and_are_the_summary_s(moe_file: Path) -> None:
    series = read_series(moe_file)
    sums = totals(series)
    assert sum(sums.bucket_seconds.values()) == pytest.approx(sums.wall_seconds, rel=1e-12)
    assert series.summary is not None
    assert sums.spent_usd == series.summary["spent_usd"]
    dollars = ReportedRun(series, sums, "r0").bucket_usd
    assert dollars["train"] == pytest.approx(sums.bucket_seconds["train"] / 3600 * A40_USD_PER_HOUR)
    assert sum(dollars.values()) == pytest.approx(series.summary["spent_usd"])


def test_a_run_without_summary_has_the_same_totals_from_its_rows(tmp_path: Path, moe_file: Path) -> None:
    killed = totals(read_series(write_rows(tmp_path / "killed.jsonl", moe_run(finished=False))))
    whole = totals(read_series(moe_file))
    assert not killed.finished
    for bucket in ("train", "data_wait", "eval", "save", "log", "startup"):
        assert killed.bucket_seconds[bucket] == pytest.approx(whole.bucket_seconds[bucket], rel=1e-9)
    assert killed.wasted_seconds == pytest.approx(whole.wasted_seconds, rel=1e-9)
    # The 21 s of "other" come after the last row, so nobody can know of them.
    assert killed.wall_seconds == pytest.approx(whole.wall_seconds - 21.0, rel=1e-9)
    assert killed.spent_usd == pytest.approx(killed.wall_seconds / 3600 * A40_USD_PER_HOUR, rel=1e-9)


def test_earlier_sessions_that_are_in_another_file_are_counted(tmp_path: Path) -> None:
    rows = [
        {
            "type": "session",
            "run_id": "a",
            "session_index": 1,
            "started_at": "2026-08-18T08:00:00Z",
            "startup_seconds": 10.0,
            "earlier_seconds": {"train_seconds": 100.0, "eval_seconds": 30.0, "data_wait_seconds": 5.0},
        },
        {"type": "step", "global_step": 51, "session_index": 1, "step_seconds": 2.0, "data_wait_seconds": 0.5},
    ]
    sums = totals(read_series(write_rows(tmp_path / "run.jsonl", rows)))
    assert sums.wall_seconds == 142.0
    assert sums.bucket_seconds == {
        "train": 96.5, "data_wait": 5.5, "rollout": 0.0, "eval": 30.0,
        "save": 0.0, "log": 0.0, "startup": 10.0, "other": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("where", ["out", "out/_ftcost", "out/_ftcost/run.jsonl"])
def test_a_run_is_named_by_its_file_its_folder_or_its_output_folder(tmp_path: Path, moe_file: Path, where: str) -> None:
    assert read_series(tmp_path / where).run_id == "moe-7f3a"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty"),
        (b"step,loss\n1,2.0\n", "2 lines, none of them"),
        (b'{"loss": 2.0}\n', "not a run record"),
        (b"\x00\xff\xfe\x00" * 50, "not a run record"),
        (b"[" * 100_000, "not a run record"),
    ],
)
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_bytes(content)
    with pytest.raises(CostModelError, match=said) as error:
        write_report([path], tmp_path / "out.html")
    assert "other.jsonl" in str(error.value)
    assert not (tmp_path / "out.html").exists()


def test_missing_paths_and_no_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CostModelError, match="nowhere: no such file"):
        write_report([tmp_path / "nowhere"], tmp_path / "out.html")
    with pytest.raises(CostModelError, match=r"holds no _ftcost/run\.jsonl"):
        write_report([tmp_path], tmp_path / "out.html")
    with pytest.raises(CostModelError, match="no run to report on"):
        write_report([], tmp_path / "out.html")
    with pytest.raises(CostModelError, match=r"cannot write .*page\.html: there is no folder .*new; make it first"):
        write_report([tmp_path], tmp_path / "new" / "page.html")
    assert not (tmp_path / "new").exists()


def test_a_truncated_record_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    num_steps = sum(row["type"] == "step" for row in list(moe_run())[:150])
    path = write_truncated(tmp_path / "run.jsonl", moe_run(), keep_rows=150)
    page = text_of(write_report([path], tmp_path / "out.html").read_text(encoding="utf-8"))
    assert "the last line is cut off, as after a kill" in page
    assert f"no summary yet (running or killed), step {num_steps} of {MOE_STEPS}" in page


def test_damaged_and_unknown_rows_are_left_out_and_said(tmp_path: Path) -> None:
    rows = list(moe_run())
    lines = [json.dumps(row) for row in rows]
    lines.insert(3, '{"type": "step", "global_step": 2,')
    lines.insert(9, '{"type": "weather", "degrees": 21}')
    lines.insert(12, '{"type": "step", "global_step": "ten", "step_seconds": NaN}')
    lines.insert(14, '{"type": "expert_load", "global_step": 3, "tokens_per_expert": [["a"]]}')
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    series = read_series(path)
    assert series.num_step_rows == sum(row["type"] == "step" for row in rows)
    remarks = "; ".join(series.remarks)
    assert "1 damaged lines were left out, the first is line 4" in remarks
    assert "rows of unknown type were left out: weather" in remarks
    assert "no global_step or step_seconds" in remarks
    assert "some expert loads were left out: expert_load counts that are no numbers" in remarks


@pytest.mark.parametrize("more", [[], ["", "[1, 2]", "{"]])
@pytest.mark.parametrize("num_before", [0, 1, 3, 5000])  # before the damage: in the same chunk, or in one of its own
def test_a_line_of_two_values_or_of_half_a_value_is_damaged_wherever_it_stands(
    tmp_path: Path, num_before: int, more: list[str]
) -> None:
    """Lines are parsed many at once; what is no JSON value by itself must not become one beside its neighbours."""
    good = [json.dumps({"type": "step", "global_step": step, "step_seconds": 0.5}) for step in range(1, num_before + 3)]
    broken = ['{"type": "step"}, {"type": "step"}', '{"type": "step", "x": [1', "2]}", *more]
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([*good[:num_before], *broken, *good[num_before:]]) + "\n", encoding="utf-8")
    series = read_series(path)
    assert list(series.columns["global_step"]) == [float(step) for step in range(1, num_before + 3)]
    assert f"{5 if more else 3} damaged lines were left out, the first is line {num_before + 1}" in series.remarks


def test_fields_that_come_and_go_keep_their_rows(tmp_path: Path) -> None:
    rows: list[Row] = [{"type": "step", "global_step": step, "step_seconds": 1.0} for step in range(1, 9)]
    rows[2]["mfu"], rows[5]["mfu"], rows[6]["mfu"] = 0.25, "fast", True
    rows[4]["num_steps"] = 4
    series = read_series(write_rows(tmp_path / "run.jsonl", rows))
    assert [place for place, value in enumerate(series.columns["mfu"]) if value == value] == [2, 6]
    assert list(series.columns["num_steps"]) == [1, 1, 1, 1, 4, 1, 1, 1]
    assert series.sums("step_seconds") == (11.0, 11.0)
    assert series.sums("step_seconds", left_out=[4]) == (7.0, 7.0)
    assert series.sums("mfu") == (1.25, 2.0)
    assert series.sums("hfu") is None


def test_a_record_whose_rows_name_no_session_is_one_session(tmp_path: Path) -> None:
    rows = ({"type": "step", "global_step": step, "step_seconds": 0.5} for step in range(1, 5001))
    run = reported(write_rows(tmp_path / "run.jsonl", rows))
    figure, _ = rate_figure(run, run.series.columns["step_seconds"], "step_seconds", with_pauses=True)
    assert all(len(trace["x"]) <= MAX_POINTS for trace in figure["data"])


def test_the_sessions_table_counts_the_steps_that_a_row_stands_for(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"type": "session", "run_id": "a", "session_index": 0, "started_at": "2026-08-18T08:00:00Z"},
        *({"type": "step", "global_step": step, "session_index": 0, "step_seconds": 2.0, "num_steps": 4} for step in (4, 8)),
    ]
    page = text_of(render_report([read_series(write_rows(tmp_path / "run.jsonl", rows))]))
    assert "2026-08-18 08:00 UTC – 8 16 s" in page  # noqa: RUF001 - the dash of what is not known


def test_values_of_a_wrong_type_are_not_measured(tmp_path: Path) -> None:
    """Nothing that another program may have written in a known field breaks the page or shows up as nan."""
    odd: list[Row] = [
        {"type": "session", "run_id": 7, "job": "mine", "device": [], "notes": "none", "versions": None, "budget": 3},
        {"type": "prediction", "basis": "before", "total_usd": "cheap", "memory": 5, "step": "slow", "warnings": 1},
        {"type": "step", "global_step": 1, "step_seconds": 1.0, "mfu": "high", "spent_usd": None},
        {"type": "pause", "kind": "nap", "global_step": 1, "seconds": 3},
        {"type": "pause", "kind": "eval", "global_step": None, "seconds": 3},
        {"type": "budget", "limit": "all"},
        {"type": "expert_load", "global_step": 1, "tokens_per_expert": [[0, 0]], "layer_names": ["a"]},
    ]
    page = render_report([read_series(write_rows(tmp_path / "run.jsonl", odd))])
    assert "nan" not in text_of(page).lower().split()
    assert "3 s" in text_of(page)


def test_only_the_latest_run_of_a_file_is_shown(tmp_path: Path) -> None:
    series = read_series(write_rows(tmp_path / "run.jsonl", [*moe_run(), *dense_run()]))
    assert series.run_id == "dense-02"
    assert series.num_step_rows == 180
    assert not series.experts.frames
    assert "the file holds 1 earlier run too (moe-7f3a); this is the latest" in series.remarks


# Expert load


def test_expert_frames_are_few_and_lose_no_token(moe_file: Path) -> None:
    experts = read_series(moe_file).experts
    rows = [row for row in moe_run() if row["type"] == "expert_load"]
    assert len(rows) == 63
    assert len(experts.frames) <= MAX_FRAMES
    counted = sum(sum(map(sum, tokens)) for _, _, tokens in experts.frames)
    assert counted == sum(sum(map(sum, row["tokens_per_expert"])) for row in rows)
    assert (experts.frames[0][0], experts.frames[-1][1]) == (10, MOE_STEPS)
    assert len(experts.global_step) == 63


def test_heat_map_shows_load_over_the_mean_of_the_layer(tmp_path: Path) -> None:
    load = {"type": "expert_load", "global_step": 10, "status": "recorded", "num_experts_per_tok": 2}
    load |= {"layer_names": ["model.layers.4.mlp", "model.layers.7.mlp"], "tokens_per_expert": [[30, 10], [0, 0]]}
    rows = [*one_step_run(), load]
    run = reported(write_rows(tmp_path / "run.jsonl", rows))
    figure = heat_figure(run)
    assert figure["frames"] == [
        {
            "z": [[1.5, 0.5], [None, None]],
            "label": "Only the tokens of the window that ended at step 10. Largest: 1.50 × in layer 4, expert 0.",
        }
    ]
    assert figure["layout"]["yaxis"]["ticktext"] == ["4", "7"]
    curves, _ = load_figure(run)
    assert [curve["y"] for curve in curves["data"]] == [[1.5], [1.5]]


def test_why_expert_load_is_absent_is_said(tmp_path: Path) -> None:
    row = {"type": "expert_load", "global_step": 5, "status": "not_recorded", "reason": "kernels replace the experts"}
    page = text_of(render_report([read_series(write_rows(tmp_path / "a.jsonl", [*one_step_run(), row]))]))
    assert "Expert load kernels replace the experts" in page
    page = text_of(render_report([read_series(write_rows(tmp_path / "b.jsonl", one_step_run()))]))
    assert "No expert loads in this record: the model is dense, or they were switched off." in page


# Savings


def test_savings_are_shares_of_the_record_with_the_largest_first(moe_file: Path) -> None:
    run = reported(moe_file)
    assert run.series.summary is not None
    summary = run.series.summary
    found = {saving.title: saving.seconds for saving in savings(run)}
    padding = 1 - summary["num_non_padding_tokens"] / summary["num_tokens"]
    computing = summary["train_seconds"] - summary["data_wait_seconds"]
    assert found["Compute less padding"] == pytest.approx(padding * computing)
    assert found["Feed the GPU sooner"] == summary["data_wait_seconds"]
    assert found["Lose fewer steps to an interruption"] == summary["wasted_seconds"]
    assert found["Evaluate less"] == summary["eval_seconds"]
    assert "Save less" not in found  # 0.9 % of the wall time
    assert list(found.values()) == sorted(found.values(), reverse=True)


# Charts


def test_cost_chart_holds_spent_projected_and_predicted(moe_file: Path) -> None:
    run = reported(moe_file)
    found = cost_figure(run)
    assert found is not None
    figure, legend = found
    by_name = {trace["name"]: trace for trace in figure["data"] if trace["name"]}
    assert set(by_name) == {"spent", "projected total", "predicted", "budget"}
    assert by_name["spent"]["y"][-1] == pytest.approx(run.totals.spent_usd, rel=1e-5)
    assert by_name["predicted"]["y"] == [pytest.approx(7000 / 3600 * A40_USD_PER_HOUR, rel=1e-5)] * 2
    assert by_name["budget"]["y"] == [1.5, 1.5]
    assert [text for _, _, text in legend] == [
        "spent", "projected total", "its band", "predicted before the run", "its interval", "budget $1.50",
    ]  # fmt: skip
    assert len(figure["layout"]["shapes"]) == 1


def two_prices(*, num_steps: int = 4, second_price: float = 7.2) -> list[dict[str, Any]]:
    """Six seconds at $3.60 an hour, two of them of starting up; then eighteen, ten of them so. Each step takes a second."""
    rows: list[dict[str, Any]] = []
    elapsed, spent = 0.0, 0.0
    for index, (price, startup, steps, predicted) in enumerate(((3.6, 2.0, 4, 20.0), (second_price, 10.0, 8, 30.0))):
        session = {"type": "session", "run_id": "r", "session_index": index, "startup_seconds": startup}
        session |= {"price": {"usd_per_gpu_hour": price}, "max_steps": 12 if index == 0 else 8 + num_steps}
        if index:
            session |= {"resumed_from_step": 4, "earlier_seconds": {"train_seconds": 4.0, "startup_seconds": 2.0}}
        dollars = predicted * price / 3600
        rows += [session, {"type": "prediction", "basis": "before", "total_seconds": predicted, "total_usd": dollars}]
        elapsed, spent = elapsed + startup, spent + startup * price / 3600
        for number in range(1, steps + 1):
            elapsed, spent = elapsed + 1.0, spent + price / 3600
            step = {"type": "step", "global_step": 4 * index + number, "session_index": index, "step_seconds": 1.0}
            rows.append({**step, "elapsed_seconds": elapsed, "spent_usd": spent})
    buckets = {"train_seconds": 12.0, "startup_seconds": 12.0, "eval_seconds": 0.0, "save_seconds": 0.0}
    summary = {"type": "summary", "global_step": 12, "wall_seconds": 24.0, "spent_usd": spent, "num_sessions": 2}
    return [*rows, {**summary, **buckets, "status": "finished"}]


def test_each_session_costs_what_its_own_price_makes(tmp_path: Path) -> None:
    run = reported(write_rows(tmp_path / "run.jsonl", two_prices()))
    assert run.totals.spent_usd == pytest.approx(0.006 + 0.036)
    assert [(each.begins_at, each.seconds, each.usd) for each in run.sessions] == [
        (0.0, 6.0, pytest.approx(0.006)),
        (6.0, 18.0, pytest.approx(0.036)),
    ]
    dollars = {name: cost for name, cost in run.bucket_usd.items() if cost}
    assert dollars == {"train": pytest.approx(0.004 + 0.016), "startup": pytest.approx(0.002 + 0.020)}


def test_what_a_killed_run_took_after_its_last_row_is_billed_at_the_last_price(tmp_path: Path) -> None:
    rows = [row | {"usd_per_hour": 7.2} if row.get("session_index") == 1 else row for row in two_prices()[:-1]]
    rows.append({"type": "pause", "kind": "eval", "global_step": 12, "seconds": 10.0})
    run = reported(write_rows(tmp_path / "run.jsonl", rows))
    assert (run.totals.wall_seconds, run.totals.spent_usd) == (34.0, pytest.approx(0.042 + 0.020))
    assert [each.usd for each in run.sessions] == [pytest.approx(0.006), pytest.approx(0.056)]


def test_a_run_that_was_killed_before_its_first_step_has_cost_its_start(tmp_path: Path) -> None:
    session = {"type": "session", "run_id": "r", "session_index": 0, "startup_seconds": 1800.0, "usd_per_hour": 2.0}
    row = summary_row(write_rows(tmp_path / "run.jsonl", [session | {"price": {"usd_per_gpu_hour": 2.0}}]))
    assert (row["wall_seconds"], row["spent_usd"]) == (1800.0, pytest.approx(1.0))


def without_price(rows: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """As a session of that index writes them that was given no price."""
    return [
        {name: value for name, value in row.items() if name not in ("price", "usd_per_hour", "spent_usd")}
        if row.get("session_index") == index or row["type"] == "summary"
        else row
        for row in rows
    ]


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_a_run_cost_is_not_known_where_its_last_session_has_no_price(is_killed: bool, tmp_path: Path) -> None:
    rows = without_price(two_prices(), 1)
    row = summary_row(write_rows(tmp_path / "run.jsonl", rows[:-1] if is_killed else rows))
    assert "spent_usd" not in row
    assert row["sessions"] == [
        {"seconds": 6.0, "usd_per_gpu_hour": 3.6, "spent_usd": pytest.approx(0.006)},
        {"seconds": 18.0},
    ]
    assert "the last session has no price: what the run cost is not known" in summary_text(row)


def test_what_had_no_price_counts_at_the_next_one(tmp_path: Path) -> None:
    """Three sessions of 6, 18 and 10 seconds, of which the last was killed before its first step."""
    earlier = {"train_seconds": 12.0, "startup_seconds": 12.0}
    third = {"type": "session", "run_id": "r", "session_index": 2, "startup_seconds": 10.0, "earlier_seconds": earlier}
    third |= {"usd_per_hour": 14.4, "price": {"usd_per_gpu_hour": 14.4}}
    file = write_rows(tmp_path / "run.jsonl", [*without_price(two_prices(), 1)[:-1], third])
    row = summary_row(file)
    assert row["spent_usd"] == pytest.approx(0.006 + (18.0 + 10.0) * 14.4 / 3600)
    assert [each["spent_usd"] for each in row["sessions"]] == [pytest.approx(each) for each in (0.006, 0.072, 0.04)]
    assert "projected_usd" not in row  # the last session has projected nothing


def test_a_killed_run_from_another_machine_has_all_that_came_before(tmp_path: Path) -> None:
    session, *steps = [row for row in two_prices() if row.get("session_index") == 1]
    session |= {"earlier_data_wait_seconds": 0.5, "earlier_wasted_seconds": 0.25, "earlier_tokens": {"num_tokens": 40}}
    row = summary_row(write_rows(tmp_path / "run.jsonl", [session, *(step | {"num_tokens": 10} for step in steps)]))
    assert (row["data_wait_seconds"], row["wasted_seconds"], row["num_tokens"]) == (0.5, 0.25, 120)
    assert row["wall_seconds"] == sum(each["seconds"] for each in row["sessions"]) == 24.0
    assert row["spent_usd"] == pytest.approx(0.042)
    assert row["is_one_rate"] is False  # though one price alone stands in this record


def test_a_run_at_two_prices_is_held_against_its_last_plan_in_time_alone(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "run.jsonl", two_prices())
    row = summary_row(file)
    assert row["total_measured_over_predicted"] == pytest.approx(24.0 / 30.0)
    assert (row["predicted_seconds"], row["usd_per_gpu_hour_paid"]) == (30.0, [3.6, 7.2])
    assert "predicted $0.0600 all at the last price, 30 s (took 0.80x the time)" in summary_text(row | {"mfu": 0.5})
    text = text_of(render_report([read_series(file)]))
    assert "final, at $3.60, then $7.20 per GPU hour" in text
    assert "Predicted at the last resume $0.0600 all at the last price" in text
    assert "of time: the price changed" in text
    assert "Whole run, cost $0.0420 $0.0600 – Whole run, time 24 s 30 s 0.80" in text  # noqa: RUF001
    assert "$3.60/h $0.0060" in text
    assert "$7.20/h $0.0360" in text


def test_a_run_at_one_price_is_held_against_its_last_plan_in_dollars(tmp_path: Path) -> None:
    row = summary_row(write_rows(tmp_path / "run.jsonl", two_prices(second_price=3.6)))
    assert row["total_measured_over_predicted"] == pytest.approx(24.0 / 30.0)
    assert "usd_per_gpu_hour_paid" not in row
    assert row["predicted_usd"] == pytest.approx(0.03)


def test_a_prediction_of_another_plan_is_not_held_against_the_run(tmp_path: Path) -> None:
    rows = two_prices(num_steps=40)
    rows = [row for place, row in enumerate(rows) if row["type"] != "prediction" or place < 3]  # the second has none
    row = summary_row(write_rows(tmp_path / "run.jsonl", rows))
    assert "predicted_seconds" not in row
    assert "total_measured_over_predicted" not in row


def test_a_resume_is_drawn_where_its_session_began(tmp_path: Path) -> None:
    found = cost_figure(reported(write_rows(tmp_path / "run.jsonl", two_prices())))
    assert found is not None
    assert [shape["x0"] for shape in found[0]["layout"]["shapes"]] == [6]


def test_what_came_before_the_record_has_its_own_price(tmp_path: Path) -> None:
    rows = two_prices()
    rows = rows[[row.get("session_index") for row in rows].index(1) :]  # the first session is on another machine
    run = reported(write_rows(tmp_path / "run.jsonl", rows))
    assert [(each.is_recorded, each.usd) for each in run.sessions] == [
        (False, pytest.approx(0.006)),
        (True, pytest.approx(0.036)),
    ]
    assert not run.compares_dollars
    assert sum(run.bucket_usd.values()) == pytest.approx(0.042)


def test_a_budget_far_above_the_curves_does_not_press_them_flat(tmp_path: Path) -> None:
    rows = [dict(row, budget={"usd": 200.0}) if row["type"] == "session" else row for row in moe_run()]
    found = cost_figure(reported(write_rows(tmp_path / "run.jsonl", rows)))
    assert found is not None
    figure, legend = found
    assert "budget" not in {trace["name"] for trace in figure["data"]}
    assert max(value for trace in figure["data"] for value in trace["y"] if value is not None) < 3.0
    assert legend[-1] == ("line", "--text", "budget $200.00, above this chart")


def test_cost_chart_of_a_run_without_price_shows_hours(tmp_path: Path) -> None:
    found = cost_figure(reported(write_rows(tmp_path / "run.jsonl", dense_run())))
    assert found is not None
    figure, _ = found
    assert figure["layout"]["xaxis"]["title"]["text"] == "step"
    assert figure["layout"]["yaxis"]["ticksuffix"] == " s"
    assert figure["data"][-1]["y"][0] == pytest.approx(14.8, abs=0.1)  # start-up and the first step


def test_speed_chart_marks_pauses_resume_and_repeated_steps(moe_file: Path) -> None:
    run = reported(moe_file)
    figure, _ = rate_figure(run, run.series.columns["step_seconds"], "step_seconds", with_pauses=True)
    by_name = {trace["name"]: trace for trace in figure["data"] if trace["name"]}
    assert by_name["eval"]["x"] == [100, 200, 300, 400, 500, 600]
    assert len(by_name["step"]["x"]) == MOE_STEPS + KILLED_AT - RESUMED_FROM
    kinds = {shape["type"]: shape for shape in figure["layout"]["shapes"]}
    assert kinds["line"]["x0"] == RESUMED_FROM
    assert (kinds["rect"]["x0"], kinds["rect"]["x1"]) == (RESUMED_FROM + 0.5, KILLED_AT + 0.5)
    # The two sessions are two curves: somewhere between them the median breaks.
    assert by_name["running median"]["y"].count(None) == 1


def test_a_long_record_stays_small(tmp_path: Path) -> None:
    num_steps = 20_000
    series = read_series(write_rows(tmp_path / "run.jsonl", long_run(num_steps)))
    page = render_report([series])
    figures = figures_of(page)
    for figure in figures.values():
        for trace in figure["data"]:
            assert len(trace["x"]) <= MAX_POINTS
    step_points = next(trace for trace in figures["r0-step"]["data"] if trace["name"] == "step")
    assert max(step_points["y"]) == pytest.approx(
        0.05 + 0.01 * (777 % 17) / 17 + 1.0, rel=1e-5
    )  # the outlier is still there
    assert len(own_part(page)) < 300_000
    assert totals(series).bucket_seconds["eval"] == 2.0 * num_steps / 1000


# The page


def test_headline_says_what_the_record_says(moe_file: Path, tmp_path: Path) -> None:
    page = text_of(write_report([moe_file], tmp_path / "out.html").read_text(encoding="utf-8"))
    for said in (
        "mistralai/Mixtral-8x7B-v0.1",
        "qlora nf4 · NVIDIA A40 · run moe-7f3a · 2 sessions · started 2026-08-17 09:00 UTC · finished at step 600",
        "Cost 13 % more than predicted: 30 steps ran twice, and data wait grew.",
        "Spent $1.73 final, at $0.79 per GPU hour",
        "Predicted before the run $1.54 80 % interval $1.15 – $1.92",  # noqa: RUF001
        "Total, measured over predicted 1.13 1.06 on the tokens really seen",
        "Peak memory, reserved 35.9 GiB predicted 35.0 GiB",
        "Evaluation 4 min 51 s 3.7 % $0.064",
        "hfu: gradient checkpointing of this model is not modelled",
        "80 % of $1.50 crossed at step 420 with $1.20 spent: warned",
        "transformers 5.24.0",
        "lengths.histogram 120 entries",
    ):
        assert said in page


@pytest.mark.parametrize("rows", [dense_run, one_step_run], ids=["dense", "one step"])
def test_absent_data_is_said_and_never_drawn(tmp_path: Path, rows: Any) -> None:
    page = render_report([read_series(write_rows(tmp_path / "run.jsonl", rows()))])
    shown = text_of(page)
    assert "There is no prediction in this record." in shown
    assert "no price" in shown
    assert "$" not in shown
    assert not {"nan", "none", "inf", "null"} & set(shown.lower().replace("none in the record", "").split())
    assert not {"r0-experts", "r0-use", "r0-power"} & set(figures_of(page))


def test_a_prediction_of_tokens_alone_says_why_nothing_else_is_predicted(tmp_path: Path) -> None:
    """As on a CPU: the record holds a prediction, without a time, dollars or memory. The price changed at the resume."""
    reason = "trained on a CPU: neither its memory nor its time is predicted"
    rows: list[dict[str, Any]] = []
    for index, price in enumerate((2.0, 1.2)):
        rows.append({"type": "session", "run_id": "r", "session_index": index, "schema_version": 1, "notes": [reason]})
        rows[-1] |= {
            "price": {"usd_per_gpu_hour": price, "usd_per_hour": price},
            "max_steps": 4,
            "resumed_from_step": index * 2,
        }
        rows.append({"type": "prediction", "basis": "before", "global_step": index * 2, "num_tokens_per_step": 100})
        for step in (1, 2):
            rows.append({"type": "step", "session_index": index, "global_step": index * 2 + step, "step_seconds": 2.0})
    rows.append({"type": "summary", "num_sessions": 2, "spent_usd": 0.01, "wall_seconds": 8.0, "status": "finished"})
    page = text_of(render_report([read_series(write_rows(tmp_path / "run.jsonl", rows))]))
    assert "Total, measured over predicted no prediction" in page
    assert "Predicted and measured Neither time nor memory was predicted: the notes below say why." in page
    assert page.count(reason) == 1
    assert "at the last price" not in page
    assert "not known yet" not in page


def test_rates_of_a_resumed_run_are_of_the_same_steps(tmp_path: Path) -> None:
    """A summary that holds the last session's rates, as older records do, does not stand beside the totals of all."""
    steps = [(0, 1, 9.0), (0, 2, 2.0), (0, 3, 2.0), (1, 4, 8.0), (1, 5, 1.0)]  # session, step, seconds
    rows: list[dict[str, Any]] = [{"type": "session", "run_id": "r", "session_index": 0, "schema_version": 1}]
    for session, number, seconds in steps:
        if number == 4:
            rows.append({"type": "session", "run_id": "r", "session_index": 1, "resumed_from_step": 3})
        rows.append({"type": "step", "session_index": session, "global_step": number, "step_seconds": seconds})
        rows[-1] |= {"num_tokens": 100, "num_non_padding_tokens": 60}
    summary = {"type": "summary", "num_sessions": 2, "step_seconds_mean": 1.0, "non_padding_tokens_per_second": 60.0}
    run = reported(write_rows(tmp_path / "old.jsonl", [*rows, summary]))
    assert run.steady_step_seconds == pytest.approx(5 / 3)
    assert run.tokens_per_second("num_tokens") == pytest.approx(60.0)
    assert run.tokens_per_second("num_non_padding_tokens") == pytest.approx(36.0)  # 40 % padding, as in the totals
    assert run.padding_share == pytest.approx(0.4)

    last = {**summary, "num_sessions_in_rates": 1, "tokens_per_second": 100.0}
    path = write_rows(tmp_path / "moved.jsonl", [*rows, last])
    run = reported(path)
    assert (run.tokens_per_second("num_tokens"), run.tokens_per_second("num_non_padding_tokens")) == (100.0, 60.0)
    assert "Step time, mean, last session 1 s" in text_of(render_report([read_series(path)]))


def test_the_job_table_names_the_model_s_sizes_and_the_card(tmp_path: Path) -> None:
    model = {"model_type": "mixtral", "hidden_size": 64, "num_local_experts": 8, **{f"other_{n}": n for n in range(30)}}
    gpu = {"name": "this CPU", **{f"rate_{n}": n for n in range(13)}}
    session = {"type": "session", "run_id": "r", "job": {"model": model, "gpu": gpu}, "device": {"kind": "cpu", "gpu": gpu}}
    page = text_of(render_report([read_series(write_rows(tmp_path / "run.jsonl", [session]))]))
    assert "model mixtral, hidden_size 64, num_local_experts 8" in page
    assert page.count("gpu this CPU") == 2
    assert "entries" not in page


def test_a_run_that_still_goes_is_told_apart_from_a_finished_one(tmp_path: Path) -> None:
    rows = [row for row in moe_run(finished=False) if row.get("global_step", 0) <= 400]
    page = text_of(render_report([read_series(write_rows(tmp_path / "run.jsonl", rows))]))
    assert "Spent so far" in page
    assert "Total, projected over predicted" in page
    assert "projected total $1.71 ($1.70 – $1.71)" in page  # noqa: RUF001
    assert "The run is heading for $1.71 against $1.54 predicted: 1.11 of the plan." in page


def test_names_from_the_record_are_escaped(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    rows = list(moe_run(model=evil))
    for row in rows:
        if row["type"] == "expert_load":
            row["layer_names"] = [f"{evil}{index}" for index in range(len(row["layer_names"]))]
        if row["type"] == "summary":
            row["verdict"] = evil
        if row["type"] == "session":
            row["run_id"] = evil
            row["notes"] = [evil]
            row["versions"] = {evil: evil}
            row["device"]["name"] = evil
    path = write_rows(tmp_path / "run.jsonl", rows)
    for page in (render_report([read_series(path)]), render_report([read_series(path), read_series(path)])):
        own = own_part(page)
        assert "<script>alert" not in own
        assert "<img" not in own
        # Beside plotly: the data and the page's own script.
        assert own.count("</script>") == 2
        assert html.escape(evil) in own


def test_the_page_needs_no_network_and_is_two_megabytes(moe_file: Path) -> None:
    page = render_report([read_series(moe_file)])
    assert len(page) < 2_300_000
    own = own_part(page)
    assert "http:" not in own
    assert "https:" not in own
    assert not re.search(r"\b(src|href)=", own)
    assert "default-src 'none'" in own


def test_the_same_record_gives_the_same_page(moe_file: Path) -> None:
    assert render_report([read_series(moe_file)]) == render_report([read_series(moe_file)])


def test_several_runs_stand_side_by_side(tmp_path: Path, moe_file: Path) -> None:
    dense = write_rows(tmp_path / "dense.jsonl", dense_run())
    page = render_report([read_series(moe_file), read_series(dense)])
    shown = text_of(page)
    assert "2 runs side by side" in shown
    assert "1. mistralai/Mixtral-8x7B-v0.1 moe-7f3a $1.73 $1.73 $1.54 1.13 2 h 12 min 600" in shown
    assert "2. Qwen/Qwen3-0.6B dense-02 – – – – 2 min 44 s 180" in shown  # noqa: RUF001
    assert page.count('role="tabpanel"') == 2
    assert {"r0-step", "r1-step"} <= set(figures_of(page))


def test_without_plotly_the_extra_is_named(moe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("plotly", "plotly.offline"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'ftcost[report]'")):
        write_report([moe_file], tmp_path / "out.html")


def test_a_place_that_cannot_be_written_is_named(moe_file: Path, tmp_path: Path) -> None:
    with pytest.raises(CostModelError, match=r"cannot write .*out\.html: there is no folder"):
        write_report([moe_file], moe_file / "out.html")
    with pytest.raises(CostModelError, match=r"cannot write .*: Is a directory"):
        write_report([moe_file], moe_file.parent)


def test_the_synthetic_run_is_the_same_each_time_and_its_buckets_sum() -> None:
    assert list(moe_run()) == list(moe_run())
    summary = list(moe_run())[-1]
    buckets = ("train", "eval", "save", "log", "startup", "other")
    assert math.fsum(summary[f"{name}_seconds"] for name in buckets) == pytest.approx(summary["wall_seconds"])


# In a browser

PROBE = """
<script>
window.faults = [];
addEventListener("error", (event) => faults.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => faults.push("policy: " + event.blockedURI));
for (const level of ["error", "warn"]) console[level] = (...all) => faults.push(level + ": " + all.join(" "));
</script>
"""

# Runs beside the page, which stands in a frame of the wanted width (a window is never narrower than 500 px).
WATCHER = """
<!doctype html><body style="margin:0"><iframe id="page" style="width:WIDTHpx;height:900px;border:0"></iframe>
<pre id="result"></pre><script id="source" type="text/plain">SOURCE</script><script>
const frame = document.getElementById("page");
const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
frame.addEventListener("load", async () => {
  for (let waited = 0; waited < 100 && !frame.contentWindow.Plotly; waited++) await wait(100);
  await wait(500);
  const inside = frame.contentWindow, page = frame.contentDocument, result = {};
  const visible = () => [...page.querySelectorAll(".chart")].filter((one) => one.offsetParent);
  const background = () => inside.getComputedStyle(page.body).backgroundColor;
  result.charts = visible().length;
  result.drawn = visible().filter((one) => one.querySelector(".main-svg")).length;
  result.pageWidth = page.documentElement.scrollWidth;
  result.widest = Math.max(...visible().map((one) => one.querySelector(".main-svg").getBoundingClientRect().right));
  const heat = page.getElementById("r0-experts"), slider = page.querySelector(".slider input");
  if (heat) {
    const cell = () => heat.data[0].z[31][5];
    result.last = cell();
    slider.value = 0;
    slider.dispatchEvent(new inside.Event("input"));
    result.first = cell();
    result.label = page.querySelector(".slider output").textContent;
    // The mouse, over the middle of the lowest cell of expert 5 of 8.
    const area = heat.querySelector(".nsewdrag"), box = area.getBoundingClientRect();
    const at = { clientX: box.left + (5.5 / 8) * box.width, clientY: box.bottom - 4, bubbles: true };
    area.dispatchEvent(new inside.MouseEvent("mousemove", at));
    await wait(500);
    result.hover = heat.querySelector(".hoverlayer").textContent;
  }
  const before = [background(), page.querySelector("#r0-step .xtick text").style.fill];
  page.getElementById("theme").click();
  result.theme = [before, [background(), page.querySelector("#r0-step .xtick text").style.fill]];
  const tabs = page.querySelectorAll(".tabs button");
  if (tabs.length) {
    tabs[1].click();
    result.second = visible().filter((one) => one.id.startsWith("r1-") && one.querySelector(".main-svg")).length;
    result.secondCharts = visible().length;
  }
  result.faults = inside.faults;
  document.getElementById("result").textContent = JSON.stringify(result);
});
frame.srcdoc = JSON.parse(document.getElementById("source").textContent);
</script></body>
"""


def in_browser(page: str, folder: Path, *, width: int, dark: bool = False) -> dict[str, Any]:
    """Load ``page`` in headless Chromium, use its slider, tabs and theme, and return what was seen."""
    browser = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    if browser is None:
        pytest.skip("needs Chromium")
    watched = page.replace("<style>", f"{PROBE}<style>", 1)
    source = json.dumps(watched).replace("<", "\\u003c")
    outer = WATCHER.replace("WIDTH", str(width)).replace("SOURCE", source)
    file = folder / "outer.html"
    file.write_text(outer, encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    flags += "--disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=15000 "
    flags += f"--window-size=1400,1000 --user-data-dir={folder / 'profile'} --dump-dom"
    dark_flag = ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [browser, *flags.split(), *dark_flag, file.as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    assert ":CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    assert found[1], "the page did not load"
    return dict(json.loads(html.unescape(found[1])))


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_browser_draws_every_chart_without_a_fault(moe_file: Path, tmp_path: Path, width: int, dark: bool) -> None:
    seen = in_browser(render_report([read_series(moe_file)]), tmp_path, width=width, dark=dark)
    assert seen["faults"] == []
    assert seen["charts"] == 7
    assert seen["drawn"] == 7
    assert seen["pageWidth"] <= width
    assert seen["widest"] <= width
    # The slider goes back to the first steps, before the load of expert 5 drifted.
    assert seen["last"] > 2.0 > 1.5 > seen["first"]
    assert seen["label"].startswith("Only the tokens of the windows that ended at steps 10 to 20.")
    assert seen["hover"] == f"model.layers.31.mlp.expertsexpert 5: {seen['first']:.2f} × the mean"
    (page_before, ticks_before), (page_after, ticks_after) = seen["theme"]
    light, night = "rgb(247, 247, 245)", "rgb(19, 21, 23)"
    assert (page_before, page_after) == ((night, light) if dark else (light, night))
    assert ticks_before != ticks_after


@pytest.mark.slow
def test_a_browser_draws_the_second_run_when_its_tab_is_opened(moe_file: Path, tmp_path: Path) -> None:
    dense = write_rows(tmp_path / "dense.jsonl", dense_run())
    one = write_rows(tmp_path / "one.jsonl", one_step_run())
    page = render_report([read_series(path) for path in (moe_file, dense, one)])
    seen = in_browser(page, tmp_path, width=1280)
    assert seen["faults"] == []
    assert (seen["charts"], seen["drawn"]) == (7, 7)
    assert (seen["second"], seen["secondCharts"]) == (3, 3)


def test_a_thinned_row_counts_for_the_steps_it_stands_for(tmp_path: Path) -> None:
    session = {"type": "session", "run_id": "r", "session_index": 0, "started_at": "2026-01-01T00:00:00+00:00"}
    single = {"type": "step", "global_step": 1, "session_index": 0, "step_seconds": 2.0, "num_tokens": 10}
    thinned = {"type": "step", "global_step": 5, "session_index": 0, "step_seconds": 3.0, "num_tokens": 20, "num_steps": 4}
    series = read_series(write_rows(tmp_path / "run.jsonl", [session, single, thinned]))
    assert series.total("step_seconds") == 2.0 + 4 * 3.0
    assert series.total("num_tokens") == 10 + 4 * 20


@pytest.mark.parametrize("value", ["1e308", "-1e308", "Infinity", "1" + "0" * 400])
def test_a_number_that_cannot_be_counted_with_breaks_no_page(tmp_path: Path, value: str) -> None:
    """In every field of one row of each type, in turn."""

    def spoiled(item: Any) -> Any:
        if isinstance(item, dict):
            return {name: spoiled(each) for name, each in item.items()}
        if isinstance(item, list):
            return [spoiled(each) for each in item]
        return "HERE" if isinstance(item, (int, float)) and not isinstance(item, bool) else item

    rows = list(moe_run())
    for kind in {row["type"] for row in rows}:
        place = next(at for at, row in enumerate(rows) if row["type"] == kind)
        lines = [json.dumps(spoiled(row) if at == place else row).replace('"HERE"', value) for at, row in enumerate(rows)]
        file = tmp_path / "run.jsonl"
        file.write_text("\n".join(lines), encoding="utf-8")
        words = set(text_of(render_report([read_series(file)])).lower().split())
        assert not {"nan", "inf", "$inf", "infinity"} & words


def test_why_a_cpu_is_not_predicted_is_said_once(tmp_path: Path) -> None:
    session, step = one_step_run()
    rows = [
        {**session, "notes": [UNDESCRIBED_CPU]},
        {"type": "prediction", "basis": "before", "global_step": 0, "warnings": [UNDESCRIBED_CPU]},
        step,
        {"type": "prediction", "basis": "tokens_seen", "global_step": 20, "warnings": [UNDESCRIBED_CPU]},
    ]
    page = text_of(render_report([read_series(write_rows(tmp_path / "run.jsonl", rows))]))
    assert page.count("trained on a CPU") == 1
    assert "The record holds no GPU samples" in page
