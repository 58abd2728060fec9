"""The recorder on hand-fed times: no Trainer, no wall clock."""

from __future__ import annotations

import sys
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import FakeClock

from ftcost_callback.recorder import PhaseSeconds, StepAggregate, StepRecorder, Totals
from ftcost_callback.records import TokenCounts

TOKENS = TokenCounts(num_tokens=100, num_non_padding_tokens=80, num_supervised_tokens=40, num_samples=4)


def started(clock: FakeClock, **settings: int) -> StepRecorder:
    recorder = StepRecorder(clock, **settings)
    recorder.start()
    return recorder


def do_step(recorder: StepRecorder, clock: FakeClock, global_step: int, seconds: float, *, data_wait: float = 0.0) -> None:
    clock.pass_seconds(data_wait)
    waited = recorder.data_wait()
    clock.pass_seconds(seconds - data_wait)
    recorder.step(global_step, data_wait_seconds=waited, tokens=TOKENS)


def test_a_step_lasts_from_end_to_end_and_holds_its_data_wait(fake_clock: FakeClock) -> None:
    recorder = started(fake_clock)
    fake_clock.pass_seconds(0.25)  # the Trainer fetches the batches before it says that the step begins
    waited = recorder.data_wait()
    fake_clock.pass_seconds(0.75)
    timing = recorder.step(1, data_wait_seconds=waited)
    assert (timing.step_seconds, timing.data_wait_seconds) == (1.0, 0.25)


def test_an_evaluation_between_two_steps_leaves_their_speed_alone(fake_clock: FakeClock) -> None:
    recorder = started(fake_clock, skip_first_steps=0)
    do_step(recorder, fake_clock, 1, 1.0)
    fake_clock.pass_seconds(60.0)
    assert recorder.pause("eval", global_step=1) == 60.0
    do_step(recorder, fake_clock, 2, 1.0)
    assert recorder.session.step_seconds == 1.0
    assert recorder.totals.eval_seconds == 60.0
    assert recorder.elapsed_seconds == 62.0
    assert recorder.totals.num_tokens == 200


def test_the_buckets_of_a_whole_session(fake_clock: FakeClock) -> None:
    recorder = StepRecorder(fake_clock)
    recorder.start(startup_seconds=240.0)
    do_step(recorder, fake_clock, 1, 40.0)
    do_step(recorder, fake_clock, 2, 2.0, data_wait=0.5)
    fake_clock.pass_seconds(0.5)
    recorder.pause("log", global_step=2)
    fake_clock.pass_seconds(30.0)
    recorder.pause("save", global_step=2)
    fake_clock.pass_seconds(3.0)
    assert recorder.close() == 3.0
    assert recorder.totals.seconds == {
        "train_seconds": 42.0,
        "eval_seconds": 0.0,
        "save_seconds": 30.0,
        "log_seconds": 0.5,
        "startup_seconds": 240.0,
        "other_seconds": 3.0,
        "rollout_seconds": 0.0,
    }
    assert recorder.totals.data_wait_seconds == 0.5
    assert recorder.totals.wall_seconds == 315.5


def test_a_rollout_is_a_bucket_of_its_own_and_what_a_projection_repeats(fake_clock: FakeClock) -> None:
    recorder = StepRecorder(fake_clock, skip_first_steps=0)
    recorder.start()
    fake_clock.pass_seconds(10.0)
    timing = recorder.step(1, data_wait_seconds=0.5, rollout_seconds=7.0)
    assert (timing.step_seconds, timing.rollout_seconds, timing.elapsed_seconds) == (3.0, 7.0, 10.0)
    assert (recorder.totals.train_seconds, recorder.totals.rollout_seconds) == (3.0, 7.0)
    assert recorder.totals.wall_seconds == 10.0
    assert recorder.session.step_seconds == 3.0
    assert recorder.recent_step_seconds == (10.0,)
    fake_clock.pass_seconds(1.0)
    assert recorder.step(2, rollout_seconds=5.0).step_seconds == 0.0  # never more than the step


def test_the_first_step_is_kept_apart_and_stays_in_the_bill(fake_clock: FakeClock) -> None:
    recorder = started(fake_clock)
    do_step(recorder, fake_clock, 1, 40.0)
    assert recorder.session.step_seconds is None
    for global_step in (2, 3, 4):
        do_step(recorder, fake_clock, global_step, 1.0)
    assert recorder.session.step_seconds == 1.0
    assert recorder.first_step_seconds == 40.0
    assert recorder.totals.train_seconds == 43.0


def test_skipped_steps_leave_steps_tokens_and_time_together(fake_clock: FakeClock) -> None:
    recorder = started(fake_clock, skip_first_steps=3)
    for global_step in range(1, 6):
        do_step(recorder, fake_clock, global_step, 2.0)
    steps = recorder.session
    assert (steps.num_steps, steps.num_tokens, steps.step_seconds_sum) == (2, 200, 4.0)
    assert steps.per_second(steps.num_tokens) == 50.0


def test_a_step_that_shows_nothing_costs_no_other_its_tokens(fake_clock: FakeClock) -> None:
    """Its batch was skipped: its time is in the bill, and the counts and rates are those of the others."""
    recorder = started(fake_clock)
    for step in (1, 2, 3, 4):
        fake_clock.pass_seconds(1.0 if step != 3 else 0.1)
        recorder.step(step, tokens=TOKENS if step != 3 else TokenCounts())
    totals, session = recorder.totals, recorder.session
    assert (totals.num_steps, totals.num_uncounted_steps, totals.num_tokens) == (4, 1, 300)
    assert totals.train_seconds == pytest.approx(3.1)
    assert (session.num_steps, session.per_second(session.num_tokens)) == (2, pytest.approx(100.0))
    assert recorder.moments.has_tokens
    assert Totals.from_dict(totals.to_dict()) == totals


def test_steps_before_the_first_that_is_counted_leave_the_rates(fake_clock: FakeClock) -> None:
    recorder = started(fake_clock)
    for step in (1, 2, 3, 4):
        fake_clock.pass_seconds(1.0)
        recorder.step(step, tokens=TOKENS if step > 2 else TokenCounts())
    assert recorder.totals.num_tokens == 200
    assert recorder.session.per_second(recorder.session.num_tokens) == pytest.approx(100.0)


def test_no_count_is_known_where_no_step_was_counted(fake_clock: FakeClock) -> None:
    recorder = started(fake_clock)
    for step in (1, 2, 3):
        fake_clock.pass_seconds(1.0)
        recorder.step(step)
    assert (recorder.totals.num_tokens, recorder.totals.num_uncounted_steps) == (None, 3)
    assert recorder.session.step_seconds == 1.0
    again = StepRecorder(fake_clock)
    again.start(earlier=recorder.totals)
    again.step(4, tokens=TOKENS)
    assert (again.totals.num_tokens, again.totals.num_uncounted_steps) == (100, 3)


def test_an_evaluation_inside_a_step_is_no_training(fake_clock: FakeClock) -> None:
    recorder = started(fake_clock)
    fake_clock.pass_seconds(5.0)
    timing = recorder.step(1, tokens=TOKENS, eval_seconds=4.0)
    assert (timing.step_seconds, timing.eval_seconds) == (1.0, 4.0)
    assert (recorder.totals.train_seconds, recorder.totals.eval_seconds) == (1.0, 4.0)


def test_a_resume_rates_this_session_and_totals_all(fake_clock: FakeClock) -> None:
    # 900 of 1,000 steps were done; this session does 10 in 10 s at 1,000 tokens each.
    recorder = StepRecorder(fake_clock, skip_first_steps=0)
    recorder.start(earlier=Totals(train_seconds=900.0, num_steps=900, num_tokens=900_000), furthest_step=900)
    for global_step in range(901, 911):
        fake_clock.pass_seconds(1.0)
        recorder.step(global_step, tokens=TokenCounts(num_tokens=1000))
    assert recorder.session.per_second(recorder.session.num_tokens) == 1000.0
    assert recorder.totals.num_tokens == 910_000
    assert recorder.elapsed_seconds == 910.0
    assert recorder.totals.wasted_seconds == 0.0


def test_steps_repeated_after_a_crash_are_waste(fake_clock: FakeClock) -> None:
    recorder = StepRecorder(fake_clock)
    recorder.start(earlier=Totals(train_seconds=740.0, num_steps=740), furthest_step=740)
    repeated = []
    for global_step in range(501, 751):
        fake_clock.pass_seconds(1.0)
        repeated.append(recorder.step(global_step).repeated)
    assert sum(repeated) == 240
    assert recorder.totals.wasted_seconds == 240.0
    assert recorder.totals.train_seconds == 990.0


def test_totals_travel_through_the_ledger() -> None:
    totals = Totals(train_seconds=1.5, eval_seconds=2.0, num_steps=3, num_tokens=7, num_supervised_tokens=None)
    assert Totals.from_dict(totals.to_dict()) == totals


def test_a_count_that_one_step_does_not_show_is_unknown_from_there_on(fake_clock: FakeClock) -> None:
    recorder = started(fake_clock)
    do_step(recorder, fake_clock, 1, 1.0)
    recorder.step(2, tokens=TokenCounts(num_tokens=100, num_non_padding_tokens=80))
    do_step(recorder, fake_clock, 3, 1.0)
    assert recorder.totals.num_tokens == 300
    assert recorder.totals.num_supervised_tokens is None


def test_a_report_covers_the_steps_since_the_last_one(fake_clock: FakeClock) -> None:
    recorder = started(fake_clock, skip_first_steps=1)
    do_step(recorder, fake_clock, 1, 9.0)
    assert recorder.take_report().step_seconds is None
    do_step(recorder, fake_clock, 2, 1.0)
    do_step(recorder, fake_clock, 3, 3.0, data_wait=1.0)
    report = recorder.take_report()
    assert (report.num_steps, report.step_seconds, report.data_wait_fraction) == (2, 2.0, 0.25)
    assert recorder.take_report().num_steps == 0


def test_two_evaluation_sets_at_one_step_are_one_pause_of_the_plan(fake_clock: FakeClock) -> None:
    recorder = started(fake_clock)
    for global_step, seconds in ((10, 2.0), (10, 3.0), (20, 6.0)):
        fake_clock.pass_seconds(seconds)
        recorder.pause("eval", global_step=global_step)
    assert recorder.pause_seconds["eval"] == (5.0, 6.0)


def test_a_step_end_told_late_moves_time_from_the_pause_to_the_step(fake_clock: FakeClock) -> None:
    recorder = started(fake_clock)
    issued = fake_clock.now
    fake_clock.pass_seconds(3.0)
    assert recorder.step(1, ended_at=issued + 2.0).step_seconds == 2.0
    assert recorder.pause("log") == 1.0


def test_time_never_runs_backwards(fake_clock: FakeClock) -> None:
    recorder = started(fake_clock)
    assert recorder.step(1, ended_at=fake_clock.now - 5.0).step_seconds == 0.0
    fake_clock.pass_seconds(1.0)
    assert recorder.close() == 1.0


Moment = tuple[Literal["step", "eval", "save", "log", "other"], float]


@given(
    startup=st.integers(0, 10_000),
    moments=st.lists(
        st.tuples(st.sampled_from(["step", "eval", "save", "log", "other"]), st.integers(0, 1000)), max_size=60
    ),
    tail=st.integers(0, 100),
)
def test_buckets_sum_to_the_wall_time(startup: int, moments: list[Moment], tail: int) -> None:
    clock = FakeClock(0.0)
    recorder = StepRecorder(clock)
    recorder.start(startup_seconds=startup)
    for place, (kind, seconds) in enumerate(moments):
        clock.pass_seconds(seconds)
        if kind == "step":
            recorder.step(place)
        else:
            recorder.pause(kind, global_step=place)
    clock.pass_seconds(tail)
    recorder.close()
    # Whole seconds: the sum is exact.
    assert recorder.totals.wall_seconds == startup + clock.now
    assert recorder.totals.data_wait_seconds <= recorder.totals.train_seconds


def _retained_bytes(recorder: StepRecorder) -> int:
    kept = [recorder.recent_step_seconds, recorder.recent_num_tokens, *recorder.pause_seconds.values()]
    assert all(kept)
    return sum(sys.getsizeof(each) for each in kept)


@pytest.mark.slow
def test_memory_is_flat_over_a_million_steps(fake_clock: FakeClock) -> None:
    import tracemalloc

    recorder = started(fake_clock, window_steps=50)
    for global_step in range(1, 1001):
        do_step(recorder, fake_clock, global_step, 0.5)
        recorder.pause("log", global_step=global_step)
    tracemalloc.start()
    before, retained_before = tracemalloc.get_traced_memory()[0], _retained_bytes(recorder)
    tracemalloc.stop()
    for global_step in range(1001, 1_000_001):
        fake_clock.pass_seconds(0.5)
        recorder.step(global_step, tokens=TOKENS)
        if global_step % 1000 == 0:
            recorder.pause("log", global_step=global_step)
            recorder.take_report()
    tracemalloc.start()
    recorder.step(1_000_001, tokens=TOKENS)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert _retained_bytes(recorder) == retained_before
    assert after - before < 100_000
    assert recorder.totals.num_steps == 1_000_001


def test_two_aggregates_together_are_sums_and_weighted_means() -> None:
    one = StepAggregate(
        num_steps=1, step_seconds_sum=2.0, num_tokens=10, num_non_padding_tokens=5, longest_sequence_tokens=7,
        phases=PhaseSeconds(forward=1.0, backward=0.5, optimizer=0.0),
    )  # fmt: skip
    three = StepAggregate(
        num_steps=3, step_seconds_sum=3.0, num_tokens=20, num_non_padding_tokens=None, longest_sequence_tokens=4,
        phases=PhaseSeconds(forward=0.2, backward=0.5, optimizer=0.4),
    )  # fmt: skip
    both = one.plus(three)
    assert (both.num_steps, both.step_seconds, both.per_second(both.num_tokens)) == (4, 1.25, 6.0)
    assert (both.num_non_padding_tokens, both.longest_sequence_tokens) == (None, 7)
    assert both.phases is not None
    assert (both.phases.forward, both.phases.backward, both.phases.optimizer) == pytest.approx((0.4, 0.5, 0.3))
    assert one.plus(StepAggregate()) == StepAggregate().plus(one) == one
