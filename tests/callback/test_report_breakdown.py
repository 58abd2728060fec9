from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from synthetic_run import moe_run, write_rows

from ftcost_callback.report_html import render_report
from ftcost_callback.report_reading import read_series
from ftcost_callback.report_rows import summary_row, summary_text

PROFILE = {
    "type": "profile",
    "global_step": 25,
    "num_steps": 6,
    "step_seconds": 2.0,
    "layer_type_seconds": {"experts": 1.2, "attention": 0.5, "idle": 0.3},
    "operator_seconds": {"matmul": 1.0, "dequantisation": 0.7, "idle": 0.3},
    "by_group_seconds": {"experts": 0.9, "host": 0.3, "a_new_group": 0.8},
}
PREDICTED = {"experts": 0.6, "host": 0.3, "router": 0.1}
BALANCE = {
    "load_max_over_mean": 1.5, "worst_layer": "model.<b>31", "worst_layer_load_max_over_mean": 2.25, "num_dead_experts": 3,
    "vs_first_steps": 1.2, "imbalance_seconds": 90.0, "imbalance_usd": 0.05,
}  # fmt: skip


def predicted_rows() -> list[dict[str, Any]]:
    rows = list(moe_run())
    for row in rows:
        if row["type"] == "prediction":
            row["step"] = row["step"] | {"by_group_seconds": PREDICTED}
    return rows


def page_of(tmp_path: Path, *more: dict[str, Any], **summary: Any) -> str:
    rows = [row | summary if row["type"] == "summary" else row for row in predicted_rows()]
    rows[-1:-1] = more
    page = render_report([read_series(write_rows(tmp_path / "run.jsonl", rows))])
    text = re.sub(r"<[^>]+>", " ", page[page.index("<main>") : page.index("</main>")])
    return re.sub(r"\s+", " ", text)


def test_a_profile_is_shown_beside_the_prediction_for_the_same_groups(tmp_path: Path) -> None:
    text = page_of(tmp_path, PROFILE)
    assert "Steps 20 to 25 under the profiler" in text
    assert "Layer type Time Share Experts 1.2 s 60.0 % Attention 500 ms 25.0 % The GPU waits for the host 300 ms" in text
    assert "Operator Time Share Matrix products 1 s 50.0 % Dequantisation 700 ms 35.0 %" in text
    shown = text[text.index("Group of the estimate") :]
    assert "expert products 900 ms 600 ms 1.50" in shown
    assert "a new group 800 ms" in shown
    assert "Python and kernel launches 300 ms 300 ms 1.00" in shown
    assert "router" in shown  # predicted, and not seen


def test_a_compiled_models_profile_says_why_it_has_no_layers(tmp_path: Path) -> None:
    profile = {name: value for name, value in PROFILE.items() if name not in ("layer_type_seconds", "by_group_seconds")}
    text = page_of(tmp_path, profile | {"reason": "the model is compiled"})
    assert "the model is compiled" in text
    assert "Layer type" not in text


def test_what_an_uneven_load_meant_is_said(tmp_path: Path) -> None:
    text = page_of(tmp_path, expert_balance=BALANCE)
    assert "2.25 × in the least even layer (model.&lt;b&gt;31)" in text
    assert "3 experts got no token." in text
    assert "less even than in the first steps (1.20 ×)" in text
    assert re.search(r"added about 1 min 30 s \(\$0.050*\) to this session", text)


def test_no_cost_of_imbalance_is_nothing_and_an_unknown_one_is_not_said(tmp_path: Path) -> None:
    assert "the uneven load added nothing" in page_of(tmp_path, expert_balance=BALANCE | {"imbalance_seconds": 0.0})
    assert "the uneven load added" not in page_of(tmp_path, expert_balance=BALANCE | {"imbalance_seconds": None})


def test_phases_are_shown_with_their_prediction(tmp_path: Path) -> None:
    text = page_of(tmp_path, forward_seconds_mean=0.5, backward_seconds_mean=1.25, optimizer_seconds_mean=0.25)
    assert "Forward 500 ms 3.1 s 0.16 Backward 1.25 s 7.6 s 0.16 Optimizer 250 ms" in text


def test_a_record_without_any_of_it_has_no_such_section(tmp_path: Path) -> None:
    assert "Inside a step" not in page_of(tmp_path)


def test_the_text_and_the_json_show_the_profile_too(tmp_path: Path) -> None:
    rows = predicted_rows()
    for row in rows:
        if row["type"] == "summary":
            row |= {"forward_seconds_mean": 0.5, "backward_seconds_mean": 1.25, "optimizer_seconds_mean": 0.25}
    rows[-1:-1] = [PROFILE]
    found = summary_row(write_rows(tmp_path / "run.jsonl", rows))
    assert found["profile"]["layer_type_seconds"] == PROFILE["layer_type_seconds"]
    assert found["profile"]["predicted_by_group_seconds"] == PREDICTED
    assert "type" not in found["profile"]
    lines = [re.sub(r"  +", " | ", line.strip()) for line in summary_text(found).splitlines()]
    assert "a step: forward 500 ms, backward 1.25 s, optimizer 250 ms" in lines
    assert any(line.startswith("Steps 20 to 25 under the profiler. Means of a step of 2 s;") for line in lines)
    assert "Experts | 1.2 s | 60.0 %" in lines
    assert "Matrix products | 1 s | 50.0 %" in lines
    assert "expert products | 900 ms | 600 ms | 1.50" in lines


def test_a_prediction_for_another_device_is_not_set_beside(tmp_path: Path) -> None:
    rows = predicted_rows()
    for row in rows:
        if row["type"] == "session":
            row["device"] = row["device"] | {"predicted_gpu": "NVIDIA A10"}
    rows[-1:-1] = [PROFILE]
    text = summary_text(summary_row(write_rows(tmp_path / "run.jsonl", rows)))
    assert "By operator" in text
    assert "Beside the prediction" not in text


def test_a_profile_without_its_steps_is_not_shown(tmp_path: Path) -> None:
    rows = list(moe_run())
    rows[-1:-1] = [{name: value for name, value in PROFILE.items() if name != "step_seconds"}]
    found = summary_row(write_rows(tmp_path / "run.jsonl", rows))
    assert "profile" not in found
    assert "profiler" not in summary_text(found)
