"""The projection replayed on real runs (``tests/golden/recorded_runs.json``, made by ``record_runs.py``).

They ran on a shared CPU whose other users took a varying share of it, so that steps of equal tokens differ by far more than
on a machine of one's own: what twenty such steps can tell is computed beside each error.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import FakeClock

from ftcost_callback.projection import Projection, ProjectionInput, project
from ftcost_callback.recorder import Pace, StepRecorder
from ftcost_callback.records import PauseKind, TokenCounts
from ftcost_callback.session_plan import Plan

RECORDED = json.loads((Path(__file__).parents[1] / "golden" / "recorded_runs.json").read_text(encoding="utf-8"))
PLAN = Plan(
    max_steps=RECORDED["plan"]["max_steps"],
    eval_strategy="steps", eval_steps=RECORDED["plan"]["eval_steps"],
    save_strategy="steps", save_steps=RECORDED["plan"]["save_steps"],
    logging_strategy="steps", logging_steps=RECORDED["plan"]["logging_steps"],
)  # fmt: skip
KINDS: tuple[PauseKind, ...] = ("eval", "save", "log")
MEASURED_STEPS = 20


@dataclass(frozen=True)
class Moment:
    """After one executed step and what was done behind it."""

    session: int
    num_measured_steps: int  # of this session
    projection: Projection
    elapsed_seconds: float
    noise: float  # standard error of a mean of so many steps, over the mean, at equal tokens


def name_of(run: dict[str, Any]) -> str:
    return f"{run['model']}-{run['order']}-{run['seed']}-{run['clock']}"


def replay(run: dict[str, Any]) -> Iterator[Moment]:
    """The run's rows through recorder and projection, as the callback hands them on."""
    clock, totals, pace, furthest = FakeClock(0.0), None, None, 0
    sessions = split_sessions(run)
    for session, rows in enumerate(sessions):
        recorder = StepRecorder(clock)
        recorder.start(startup_seconds=run["startup_seconds"][session], earlier=totals, furthest_step=furthest)
        for row in rows:
            clock.pass_seconds(row["seconds"])
            if row["kind"] != "step":
                recorder.pause(row["kind"], global_step=row["global_step"])
                continue
            recorder.step(row["global_step"], tokens=TokenCounts(num_tokens=row["num_tokens"]))
            if recorder.num_measured_steps:
                known = known_now(run, recorder, row["global_step"], pace, run["processor_wait_fraction"][session])
                yield Moment(session, recorder.num_measured_steps, project(known), known.elapsed_seconds, noise(recorder))
        furthest = max(furthest, rows[-1]["global_step"])
        pace = Pace(machine="same", step_seconds=recorder.recent_step_seconds, num_tokens=recorder.recent_num_tokens)
        recorder.close()
        totals = recorder.totals


def split_sessions(run: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Steps and pauses in the order they happened, by session."""
    steps = [
        {"kind": "step", "global_step": step, "seconds": seconds, "num_tokens": tokens}
        for step, seconds, tokens in zip(run["global_steps"], run["step_seconds"], run["num_tokens"], strict=True)
    ]
    sessions: list[list[dict[str, Any]]] = [[], []]
    resumed_at = next(
        place for place in range(1, len(steps)) if steps[place]["global_step"] <= steps[place - 1]["global_step"]
    )
    pauses = [[{"kind": k, "global_step": g, "seconds": s} for k, g, s in each] for each in run["pauses"]]
    for session, own in enumerate((steps[:resumed_at], steps[resumed_at:])):
        waiting = list(pauses[session])
        for step in own:
            while waiting and waiting[0]["global_step"] < step["global_step"]:
                sessions[session].append(waiting.pop(0))
            sessions[session].append(step)
        sessions[session] += waiting
    return sessions


def known_now(
    run: dict[str, Any], recorder: StepRecorder, step: int, pace: Pace | None, waited: float | None
) -> ProjectionInput:
    to_come = {
        kind
        for kind in KINDS
        if step % RECORDED["plan"][{"eval": "eval_steps", "save": "save_steps", "log": "logging_steps"}[kind]] == 0
    }
    return ProjectionInput(
        steps_done=step,
        max_steps=PLAN.max_steps,
        elapsed_seconds=recorder.elapsed_seconds,
        moments=recorder.moments,
        recent_step_seconds=recorder.recent_step_seconds,
        recent_num_tokens=recorder.recent_num_tokens,
        window_means=recorder.windows.means,
        earlier_step_seconds=pace.step_seconds if pace is not None else (),
        earlier_num_tokens=pace.num_tokens if pace is not None else (),
        expected_tokens_per_step=run["expected_tokens_per_step"],
        processor_wait_fraction=waited,
        pauses=tuple(
            PLAN.pause_plan(
                kind, steps_done=step, is_pending=kind in to_come, measured_seconds=recorder.pause_seconds.get(kind, ()),
                predicted_total_seconds=None,
            )
            for kind in KINDS
        ),
    )  # fmt: skip


def noise(recorder: StepRecorder) -> float:
    moments = recorder.moments
    slope = moments.seconds_by_tokens / moments.tokens_squares if moments.tokens_squares else 0.0
    residual = max(0.0, moments.seconds_squares - slope * moments.seconds_by_tokens)
    return math.sqrt(residual / max(1, moments.count - 2) / moments.count) / moments.mean_seconds


def foreseeable_total(run: dict[str, Any], session: int) -> float:
    """What the run took, without what no projection can know before it happens: the interruption and its repeated steps."""
    if session == 1:
        return float(run["total_seconds"])
    first, second = split_sessions(run)
    done = first[-1]["global_step"]
    rest = [row["seconds"] for row in second if row["global_step"] > done]
    return float(run["startup_seconds"][0] + sum(row["seconds"] for row in first) + sum(rest))


def moments_at(measured: int, order: str, clock: str) -> list[tuple[str, float, bool, float, Moment]]:
    """(run, error of the remaining time's projection over the whole, inside the band, noise, moment)."""
    found = []
    for run in RECORDED["runs"]:
        if (run["order"], run["clock"]) != (order, clock):
            continue
        for moment in replay(run):
            if moment.num_measured_steps == measured:
                end, made = foreseeable_total(run, moment.session), moment.projection
                assert made.projected_total_seconds is not None
                assert made.projected_total_seconds_low is not None
                assert made.projected_total_seconds_high is not None
                inside = made.projected_total_seconds_low <= end <= made.projected_total_seconds_high
                found.append((name_of(run), made.projected_total_seconds / end - 1, inside, moment.noise, moment))
    return found


def test_the_rows_replayed_are_the_run() -> None:
    for run in RECORDED["runs"]:
        last = list(replay(run))[-1]
        assert last.session == 1
        assert last.elapsed_seconds == pytest.approx(run["total_seconds"], rel=0.03)  # all but what followed the last step
        assert last.projection.projected_total_seconds == pytest.approx(run["total_seconds"], rel=0.03)


def test_after_20_steps_in_random_order_most_bands_hold_the_end() -> None:
    """On processors that others use too the speed itself changes, so that 2 % is far from met: half of the projections are
    within 5 %, the worst within 12 %. The band is to say so."""
    moments = [each for clock in ("processor", "wall") for each in moments_at(MEASURED_STEPS, "random", clock)]
    assert len(moments) == 12
    errors = sorted(abs(error) for _, error, _, _, _ in moments)
    assert statistics.median(errors) < 0.055
    assert errors[-1] < 0.12
    assert sum(inside for _, _, inside, _, _ in moments) / len(moments) >= 0.8


def test_others_on_the_processor_widen_the_band_and_are_named() -> None:
    for _, _, inside, _, moment in moments_at(MEASURED_STEPS, "random", "wall"):
        assert inside
        assert any(note.startswith("others take the processor ") for note in moment.projection.notes)


@pytest.mark.parametrize("clock", ["processor", "wall"])
def test_growing_lengths_are_said_and_the_band_is_wide(clock: str) -> None:
    for _, _, inside, _, moment in moments_at(MEASURED_STEPS, "growing", clock):
        assert inside
        made = moment.projection
        assert any("sequences are growing" in note for note in made.notes)
        assert made.projected_total_seconds is not None
        assert made.projected_total_seconds_low is not None
        assert made.projected_total_seconds_high is not None
        assert made.projected_total_seconds_high - made.projected_total_seconds_low > 0.5 * made.projected_total_seconds
