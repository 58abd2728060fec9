"""Projection: golden arithmetic by hand, replays of simulated runs, and what the band must do."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcost_callback.planned_tokens import PlannedTokens
from ftcost_callback.projection import (
    PausePlan,
    Projection,
    ProjectionInput,
    StepMoments,
    StepWindows,
    num_remaining_pauses,
    project,
)

BATCH_SIZE = 4


def moments_of(seconds: list[float], tokens: list[float] | None = None) -> StepMoments:
    moments = StepMoments()
    for index, each in enumerate(seconds):
        moments = moments.add(each, tokens[index] if tokens is not None else None)
    return moments


def windows_of(seconds: list[float], tokens: list[float]) -> tuple[tuple[float, float], ...]:
    windows = StepWindows()
    for each, count in zip(seconds, tokens, strict=True):
        windows.add(each, count)
    return windows.means


def width(projection: Projection) -> float:
    assert projection.projected_total_seconds_high is not None
    assert projection.projected_total_seconds_low is not None
    return projection.projected_total_seconds_high - projection.projected_total_seconds_low


# --- a simulated run ------------------------------------------------------------------------------------------------


@dataclass
class SimulatedRun:
    """Step seconds and tokens of every step, evaluations each 50 and saves each 100 steps, resumed at 40 %."""

    step_seconds: list[float]
    step_tokens: list[float]
    expected_tokens_per_step: float
    eval_seconds: list[float]
    save_seconds: list[float]
    predicted_eval_seconds: float
    predicted_save_seconds: float
    startup_seconds: float = 30.0
    eval_every: int = 50
    save_every: int = 100

    @property
    def resume_at(self) -> int:
        return int(0.4 * len(self.step_seconds))

    def is_first_of_a_session(self, index: int) -> bool:
        return index in (0, self.resume_at)

    def wall(self, steps: int) -> float:
        """Wall seconds after ``steps`` steps, their pauses inside."""
        sessions = 1 + (steps > self.resume_at)
        return (
            sessions * self.startup_seconds
            + sum(self.step_seconds[:steps])
            + sum(self.eval_seconds[: steps // self.eval_every])
            + sum(self.save_seconds[: steps // self.save_every])
        )

    @property
    def total_seconds(self) -> float:
        return self.wall(len(self.step_seconds))

    def known_after(self, steps: int, *, expected: bool = True, ledger: bool = False) -> ProjectionInput:
        """What a callback knows after ``steps`` steps, in the session that did the last of them.

        ``ledger``: with the last 50 steps of the session before, as the checkpoint holds them.
        """
        session_start = self.resume_at if steps > self.resume_at else 0
        measured = [i for i in range(session_start, steps) if not self.is_first_of_a_session(i)]
        seconds = [self.step_seconds[i] for i in measured]
        tokens = [self.step_tokens[i] for i in measured]
        max_steps = len(self.step_seconds)

        def plan(kind: str, every: int, durations: list[float], predicted: float) -> PausePlan:
            done_here = durations[session_start // every : steps // every]
            left = num_remaining_pauses("steps", every_steps=every, steps_done=steps, max_steps=max_steps)
            return PausePlan(
                kind=kind,  # type: ignore[arg-type]
                num_remaining=left,
                measured_seconds=tuple(done_here),
                predicted_seconds=predicted,
            )

        return ProjectionInput(
            steps_done=steps,
            max_steps=max_steps,
            # The second start-up is not foreseen before the resume.
            elapsed_seconds=self.wall(steps),
            moments=moments_of(seconds, tokens),
            recent_step_seconds=tuple(seconds[-50:]),
            recent_num_tokens=tuple(tokens[-50:]),
            window_means=windows_of(seconds, tokens),
            earlier_step_seconds=tuple(self.step_seconds[session_start - 50 : session_start]) if ledger else (),
            earlier_num_tokens=tuple(self.step_tokens[session_start - 50 : session_start]) if ledger else (),
            expected_tokens_per_step=self.expected_tokens_per_step if expected else None,
            pauses=(
                plan("eval", self.eval_every, self.eval_seconds, self.predicted_eval_seconds),
                plan("save", self.save_every, self.save_seconds, self.predicted_save_seconds),
            ),
            usd_per_hour=2.0,
            predicted_total_seconds=1.2 * self.total_seconds,
            predicted_total_seconds_low=0.9 * self.total_seconds,
            predicted_total_seconds_high=1.5 * self.total_seconds,
            predicted_startup_seconds=25.0,
        )

    def total_as_foreseen_after(self, steps: int) -> float:
        """The end that could be foreseen: without the second start-up and slow first step while they lie ahead."""
        if steps > self.resume_at:
            return self.total_seconds
        slow = self.step_seconds[self.resume_at] - usual_seconds(self.step_tokens[self.resume_at])
        return self.total_seconds - self.startup_seconds - slow


def usual_seconds(tokens: float) -> float:
    """A host-bound part, a linear part, and attention."""
    return 0.15 + 4e-4 * tokens + 3e-8 * tokens * tokens / BATCH_SIZE


def simulate(seed: int, *, order: str = "random", max_steps: int = 2000, promise_error: float = 0.005) -> SimulatedRun:
    """One epoch of log-normal lengths (cut at 2,048), padded to the longest of each batch of four."""
    chance = random.Random(seed)
    lengths = [max(16, min(2048, int(chance.lognormvariate(5.5, 0.7)))) for _ in range(max_steps * BATCH_SIZE)]
    if order == "ascending":
        lengths.sort()
    batches = [lengths[i : i + BATCH_SIZE] for i in range(0, len(lengths), BATCH_SIZE)]
    tokens = [float(BATCH_SIZE * max(batch)) for batch in batches]
    seconds = [usual_seconds(each) * chance.gauss(1.0, 0.03) for each in tokens]
    for first in (0, int(0.4 * max_steps)):
        seconds[first] *= 30
    # What the lengths promise: other batches of the same samples, and an error of the promise itself.
    shuffled = random.Random(seed + 1_000_000)
    promised = statistics.fmean(BATCH_SIZE * max(shuffled.sample(lengths, BATCH_SIZE)) for _ in range(8000))
    if order == "ascending":
        promised = statistics.fmean(tokens)
    return SimulatedRun(
        step_seconds=seconds,
        step_tokens=tokens,
        expected_tokens_per_step=promised * chance.gauss(1.0, promise_error),
        eval_seconds=[4.0 * chance.gauss(1.0, 0.03) for _ in range(max_steps // 50)],
        save_seconds=[2.0 * chance.gauss(1.0, 0.15) for _ in range(max_steps // 100)],
        predicted_eval_seconds=4.0 * chance.gauss(1.0, 0.1),
        predicted_save_seconds=2.0 * chance.gauss(1.0, 0.2),
    )


NUM_REPLAYS = 60


@pytest.fixture(scope="module")
def replays() -> list[SimulatedRun]:
    return [simulate(seed) for seed in range(NUM_REPLAYS)]


def errors_and_coverage(replays: list[SimulatedRun], steps: int, *, expected: bool = True) -> tuple[list[float], float]:
    """Sorted |projected / final - 1| and the share of replays whose end lies in the band."""
    errors, inside = [], 0
    for run in replays:
        projection = project(run.known_after(steps, expected=expected))
        end = run.total_as_foreseen_after(steps)
        assert projection.projected_total_seconds is not None
        assert projection.projected_total_seconds_low is not None
        assert projection.projected_total_seconds_high is not None
        errors.append(abs(projection.projected_total_seconds / end - 1))
        inside += projection.projected_total_seconds_low <= end <= projection.projected_total_seconds_high
    return sorted(errors), inside / len(replays)


def test_after_20_measured_steps_in_random_order_the_projection_is_within_2_percent(
    replays: list[SimulatedRun],
) -> None:
    errors, coverage = errors_and_coverage(replays, 21)  # the first of the 21 is slow and left out
    assert errors[len(errors) // 2] < 0.0115  # median
    assert errors[int(0.8 * len(errors))] < 0.02
    assert errors[-1] < 0.04
    assert coverage >= 0.8


def error_of_one_who_knows_the_steps(run: SimulatedRun, measured: range) -> float:
    """Of a projection by the true law of a step and every length still to come: unknown are how fast this machine is, which
    the measured steps tell, and the pauses, none of which has been measured yet."""
    speed = sum(run.step_seconds[i] for i in measured) / sum(usual_seconds(run.step_tokens[i]) for i in measured)
    known = run.known_after(measured.stop)
    left = speed * sum(usual_seconds(tokens) for tokens in run.step_tokens[measured.stop :])
    pauses = sum(plan.num_remaining * (plan.predicted_seconds or 0.0) for plan in known.pauses)
    return (run.wall(measured.stop) + left + pauses) / run.total_as_foreseen_after(measured.stop) - 1


def test_what_is_missing_to_2_percent_everywhere_is_not_to_be_had_from_20_steps(replays: list[SimulatedRun]) -> None:
    """Steps of equal tokens differ by 3 %, which leaves 3 % / sqrt(20) = 0.7 % of their mean open, and predicted pauses of
    6 + 1 % of the time are off by 10 and 20 %: 0.9 % together, of which one run in forty exceeds 2 %."""
    ours = [project(run.known_after(21)).projected_total_seconds or 0.0 for run in replays]
    errors = [end / run.total_as_foreseen_after(21) - 1 for end, run in zip(ours, replays, strict=True)]
    best = [error_of_one_who_knows_the_steps(run, range(1, 21)) for run in replays]
    assert 0.008 < statistics.pstdev(best) < 0.013
    assert statistics.pstdev(errors) < 1.35 * statistics.pstdev(best)


@pytest.mark.parametrize("steps", [2, 6, 50, 100, 799, 802, 821, 1200, 1600, 1999])
def test_the_band_covers_80_percent_of_the_ends(replays: list[SimulatedRun], steps: int) -> None:
    _, coverage = errors_and_coverage(replays, steps)
    # 60 replays: a true coverage of 80 % shows at least 72 % in 94 of 100 tries.
    assert coverage >= 0.72


def test_without_expected_tokens_the_band_still_covers_the_end(replays: list[SimulatedRun]) -> None:
    errors, coverage = errors_and_coverage(replays, 21, expected=False)
    assert coverage >= 0.72
    assert errors[len(errors) // 2] < 0.08  # twenty steps hold 10 % more or fewer tokens than the average


def test_the_band_narrows_with_steps(replays: list[SimulatedRun]) -> None:
    run = replays[0]
    widths = [width(project(run.known_after(steps))) for steps in (3, 6, 21, 100, 300, 795)]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.15 * widths[0]
    assert width(project(run.known_after(2000))) == 0.0


def test_a_resume_projects_from_its_own_steps_and_the_whole_elapsed_time(replays: list[SimulatedRun]) -> None:
    errors, _ = errors_and_coverage(replays, 821)  # 20 measured steps after the resume at 800
    assert errors[len(errors) // 2] < 0.01
    before_any_step_here = project(replays[0].known_after(801))
    assert before_any_step_here.basis == "predicted"


@pytest.mark.parametrize("own_steps", [0, 1, 2, 3, 5, 10, 19, 20])
def test_right_after_a_resume_the_rates_of_the_session_before_hold_the_projection(
    replays: list[SimulatedRun], own_steps: int
) -> None:
    errors, inside = [], 0
    for run in replays:
        projection = project(run.known_after(801 + own_steps, ledger=True))  # the 801st is slow and left out
        assert projection.basis == "measured"
        assert projection.projected_total_seconds is not None
        errors.append(abs(projection.projected_total_seconds / run.total_seconds - 1))
        assert projection.projected_total_seconds_low is not None
        assert projection.projected_total_seconds_high is not None
        inside += projection.projected_total_seconds_low <= run.total_seconds <= projection.projected_total_seconds_high
    errors.sort()
    # Without them the median error is 14 % before the first own step, 2.7 % after one and 0.9 % after five.
    assert errors[len(errors) // 2] < 0.008
    assert errors[int(0.8 * len(errors))] < 0.013
    assert errors[-1] < 0.025
    assert inside / len(replays) >= 0.72


def test_another_speed_after_the_resume_overrules_the_session_before() -> None:
    known = ProjectionInput(
        steps_done=14, max_steps=1014, elapsed_seconds=100.0, moments=moments_of([2.0, 2.1, 1.9, 2.0]),
        recent_step_seconds=(2.0, 2.1, 1.9, 2.0), earlier_step_seconds=(1.0, 1.1, 0.9, 1.0, 1.0),
    )  # fmt: skip
    assert project(known).projected_total_seconds == pytest.approx(100.0 + 1000 * 2.0)
    # Two steps may be an accident: they are averaged in.
    two = replace(known, moments=moments_of([2.0, 2.0]), recent_step_seconds=(2.0, 2.0))
    assert project(two).projected_total_seconds == pytest.approx(100.0 + 1000 * 9.0 / 7)


def test_twenty_own_steps_need_no_session_before(replays: list[SimulatedRun]) -> None:
    run = replays[0]
    assert project(run.known_after(822, ledger=True)) == project(run.known_after(822))


def test_the_slow_first_step_is_in_the_bill_but_not_in_the_rate() -> None:
    known = ProjectionInput(
        steps_done=11, max_steps=101, elapsed_seconds=40.0 + 10.0, moments=moments_of([1.0] * 10), usd_per_hour=3600.0
    )
    projection = project(known)
    assert projection.projected_total_seconds == pytest.approx(50.0 + 90.0)
    assert projection.projected_usd == pytest.approx(140.0)
    assert projection.remaining_seconds == pytest.approx(90.0)


def test_resume_at_900_of_1000_has_90_seconds_left() -> None:
    """https://github.com/hiyouga/LlamaFactory/issues/7415: the session has run 10 steps of 1 s."""
    known = ProjectionInput(steps_done=910, max_steps=1000, elapsed_seconds=2000.0, moments=moments_of([1.0] * 10))
    assert project(known).remaining_seconds == pytest.approx(90.0)


# --- lengths that are not in random order ---------------------------------------------------------------------------


def test_growing_lengths_are_noticed_and_the_expected_tokens_decide() -> None:
    for seed in range(5):
        run = simulate(seed, order="ascending")
        projection = project(run.known_after(60))
        end = run.total_as_foreseen_after(60)
        assert any("growing" in note for note in projection.notes)
        assert projection.projected_total_seconds == pytest.approx(end, rel=0.12)
        assert projection.projected_total_seconds_high is not None
        assert projection.projected_total_seconds_high >= end
        # A run in random order says much less than a quarter of this after as many steps.
        assert width(projection) > 4 * 0.25 * width(project(simulate(seed).known_after(60)))


def test_growing_lengths_without_expected_tokens_widen_the_band_upwards() -> None:
    tokens = [1000.0 + 20.0 * index for index in range(40)]
    seconds = [each / 1000 for each in tokens]
    known = ProjectionInput(
        steps_done=41, max_steps=141, elapsed_seconds=60.0, moments=moments_of(seconds, tokens),
        recent_step_seconds=tuple(seconds), recent_num_tokens=tuple(tokens),
    )  # fmt: skip
    projection = project(known)
    assert projection.projected_total_seconds_low is not None
    assert projection.projected_total_seconds_high is not None
    stays = 60.0 + 100 * 1.78
    goes_on = 60.0 + 100 * (1.78 + 0.02 * 50.5)
    assert projection.projected_total_seconds_low < stays
    assert projection.projected_total_seconds_high > goes_on
    assert "sequences are growing" in projection.notes


def test_steps_that_get_slower_without_token_counts_are_noticed() -> None:
    seconds = [1.0 + 0.02 * index for index in range(40)]
    projection = project(ProjectionInput(steps_done=41, max_steps=141, elapsed_seconds=60.0, moments=moments_of(seconds)))
    assert projection.notes == ("steps are getting slower",)
    assert projection.projected_total_seconds_high is not None
    assert projection.projected_total_seconds_high > 60.0 + 100 * (1.78 + 1.01)


def test_throttling_moves_the_projection_to_the_recent_speed() -> None:
    chance = random.Random(5)
    seconds = [chance.gauss(1.0, 0.02) for _ in range(400)] + [chance.gauss(1.5, 0.02) for _ in range(50)]
    known = ProjectionInput(
        steps_done=451, max_steps=951, elapsed_seconds=500.0, moments=moments_of(seconds),
        recent_step_seconds=tuple(seconds[-50:]),
    )  # fmt: skip
    projection = project(known)
    assert projection.notes[0] in {"steps became slower", "steps are getting slower"}
    assert projection.projected_total_seconds == pytest.approx(500.0 + 500 * 1.5, rel=0.12)


def test_lengths_that_were_not_what_was_promised_are_overruled_by_the_steps() -> None:
    known = ProjectionInput(
        steps_done=201, max_steps=1001, elapsed_seconds=200.0, moments=moments_of([1.0] * 200, [2048.0] * 200),
        expected_tokens_per_step=1000.0,
    )  # fmt: skip
    assert project(known).projected_total_seconds == pytest.approx(1000.0)


# --- before any step, pauses, money ---------------------------------------------------------------------------------


def test_before_any_step_the_prediction_speaks_with_its_own_band() -> None:
    known = ProjectionInput(
        steps_done=0, max_steps=100, elapsed_seconds=10.0, usd_per_hour=1.8, predicted_startup_seconds=60.0,
        predicted_total_seconds=1060.0, predicted_total_seconds_low=860.0, predicted_total_seconds_high=1460.0,
    )  # fmt: skip
    assert project(known) == Projection(
        projected_total_seconds=1060.0,
        projected_total_seconds_low=860.0,
        projected_total_seconds_high=1460.0,
        remaining_seconds=1050.0,
        projected_usd=pytest.approx(0.53),
        projected_usd_low=pytest.approx(0.43),
        projected_usd_high=pytest.approx(0.73),
        basis="predicted",
        notes=("no step measured yet",),
    )


def test_nothing_known_is_none_and_no_end_is_none() -> None:
    nothing = project(ProjectionInput(steps_done=0, max_steps=100, elapsed_seconds=1.0, usd_per_hour=1.0))
    assert nothing == Projection()
    endless = project(ProjectionInput(steps_done=5, max_steps=None, elapsed_seconds=9.0, moments=moments_of([1.0] * 5)))
    assert endless.projected_total_seconds is None


def test_no_price_no_dollars() -> None:
    known = ProjectionInput(steps_done=10, max_steps=100, elapsed_seconds=10.0, moments=moments_of([1.0] * 9))
    projection = project(known)
    assert projection.projected_total_seconds is not None
    assert (projection.projected_usd, projection.projected_usd_low, projection.projected_usd_high) == (None, None, None)


def test_dollars_spent_at_another_price_are_kept() -> None:
    known = ProjectionInput(
        steps_done=50, max_steps=100, elapsed_seconds=3600.0, moments=moments_of([2.0] * 9),
        spent_usd=10.0, usd_per_hour=36.0,
    )  # fmt: skip
    assert project(known).projected_usd == pytest.approx(10.0 + 100 * 36 / 3600)


def test_a_measured_pause_replaces_the_predicted_one() -> None:
    known = ProjectionInput(
        steps_done=20, max_steps=120, elapsed_seconds=100.0, moments=moments_of([1.0] * 19),
        pauses=(PausePlan(kind="eval", num_remaining=2, predicted_seconds=30.0),),
    )  # fmt: skip
    predicted = project(known)
    assert predicted.projected_total_seconds == pytest.approx(100 + 100 + 60)
    measured = project(replace(known, pauses=(replace(known.pauses[0], measured_seconds=(50.0, 54.0)),)))
    assert measured.projected_total_seconds == pytest.approx(100 + 100 + 104)
    assert width(measured) < width(predicted)


def test_an_unmeasured_evaluation_is_scaled_by_how_far_steps_are_off() -> None:
    known = ProjectionInput(
        steps_done=20, max_steps=120, elapsed_seconds=100.0, moments=moments_of([1.5] * 19), predicted_step_seconds=1.0,
        pauses=(PausePlan(kind="eval", num_remaining=2, predicted_seconds=30.0),),
    )  # fmt: skip
    assert project(known).projected_total_seconds == pytest.approx(100 + 150 + 90)


def test_a_pause_of_unknown_length_widens_the_upper_end_only_and_says_so() -> None:
    known = ProjectionInput(
        steps_done=20, max_steps=120, elapsed_seconds=100.0, moments=moments_of([1.0] * 19),
        pauses=(PausePlan(kind="save", num_remaining=3),),
    )  # fmt: skip
    with_save, without = project(known), project(replace(known, pauses=()))
    assert with_save.projected_total_seconds == without.projected_total_seconds
    assert with_save.projected_total_seconds_low == without.projected_total_seconds_low
    assert with_save.projected_total_seconds_high is not None
    assert without.projected_total_seconds_high is not None
    assert with_save.projected_total_seconds_high == pytest.approx(without.projected_total_seconds_high + 30.0)
    assert with_save.notes == ("no save pause measured yet",)


@pytest.mark.parametrize(
    ("strategy", "every", "done", "max_steps", "per_epoch", "at_end", "left"),
    [
        # DefaultFlowCallback, transformers 5.24: multiples, and the last step as well.
        ("steps", 50, 0, 200, None, True, 4),
        ("steps", 50, 50, 210, None, True, 4),
        ("steps", 50, 50, 210, None, False, 3),
        ("steps", 0.25, 0, 210, None, True, 4),  # every 53rd: 53, 106, 159 and the end
        ("steps", 500, 0, 100, None, True, 1),
        ("epoch", None, 0, 30, 10, True, 3),
        ("epoch", None, 10, 25, 10, True, 2),  # the unfinished epoch ends too
        ("no", 50, 0, 200, None, True, 0),
        ("best", 50, 0, 200, None, True, 0),
        ("steps", 50, 200, 200, None, True, 0),
        ("steps", 50, 0, None, None, True, 0),
    ],
)
def test_pauses_still_scheduled(
    strategy: str, every: float | None, done: int, max_steps: int | None, per_epoch: int | None, at_end: bool, left: int
) -> None:
    assert left == num_remaining_pauses(
        strategy,
        every_steps=every,
        steps_done=done,
        max_steps=max_steps,
        steps_per_epoch=per_epoch,
        also_at_the_end=at_end,
    )


# --- the running sums -----------------------------------------------------------------------------------------------


def test_moments_equal_the_sums_over_all_steps() -> None:
    chance = random.Random(3)
    seconds = [chance.uniform(0.5, 2.0) for _ in range(57)]
    tokens = [chance.uniform(500, 4000) for _ in range(57)]
    moments = moments_of(seconds, tokens)
    mean_s, mean_t, mean_i = statistics.fmean(seconds), statistics.fmean(tokens), 28.0
    assert moments.count == 57
    assert moments.mean_seconds == pytest.approx(mean_s)
    assert moments.mean_tokens == pytest.approx(mean_t)
    assert moments.seconds_squares == pytest.approx(sum((s - mean_s) ** 2 for s in seconds))
    assert moments.tokens_squares == pytest.approx(sum((t - mean_t) ** 2 for t in tokens))
    assert moments.seconds_by_tokens == pytest.approx(
        sum((s - mean_s) * (t - mean_t) for s, t in zip(seconds, tokens, strict=True))
    )
    assert moments.seconds_by_index == pytest.approx(sum((s - mean_s) * (i - mean_i) for i, s in enumerate(seconds)))
    assert moments.tokens_by_index == pytest.approx(sum((t - mean_t) * (i - mean_i) for i, t in enumerate(tokens)))
    assert moments.index_squares == pytest.approx(sum((i - mean_i) ** 2 for i in range(57)))


def test_a_step_that_was_not_measured_is_left_out() -> None:
    assert StepMoments().add(float("nan"), 10).count == 0
    assert StepMoments().add(1.0, None).has_tokens is False


@settings(deadline=None, max_examples=300)
@given(
    seconds=st.lists(st.floats(0, 1e4), max_size=30),
    tokens=st.lists(st.floats(0, 1e7), min_size=30, max_size=30),
    with_tokens=st.booleans(),
    expected=st.none() | st.floats(0, 1e7),
    done=st.integers(0, 200),
    max_steps=st.integers(0, 200),
    elapsed=st.floats(0, 1e7),
    predicted=st.none() | st.floats(0, 1e7),
    price=st.none() | st.floats(0, 1e3),
    pauses=st.lists(st.floats(0, 1e4), max_size=3),
    pauses_left=st.integers(0, 10),
)
def test_never_nan_never_below_what_was_spent_and_low_to_high_in_order(
    seconds: list[float], tokens: list[float], with_tokens: bool, expected: float | None, done: int, max_steps: int,
    elapsed: float, predicted: float | None, price: float | None, pauses: list[float], pauses_left: int,
) -> None:  # fmt: skip
    known = ProjectionInput(
        steps_done=done,
        max_steps=max_steps,
        elapsed_seconds=elapsed,
        moments=moments_of(seconds, tokens if with_tokens else None),
        recent_step_seconds=tuple(seconds[-20:]),
        recent_num_tokens=tuple(tokens[: len(seconds)][-20:]) if with_tokens else (),
        window_means=windows_of(seconds, tokens[: len(seconds)]) if with_tokens else (),
        expected_tokens_per_step=expected,
        pauses=(PausePlan(kind="eval", num_remaining=pauses_left, measured_seconds=tuple(pauses)),),
        usd_per_hour=price,
        predicted_total_seconds=predicted,
        predicted_total_seconds_low=predicted,
        predicted_total_seconds_high=predicted,
    )
    projection = project(known)
    total = projection.projected_total_seconds
    low, high = projection.projected_total_seconds_low, projection.projected_total_seconds_high
    assert (total is None) == (low is None) == (high is None)
    if total is not None and low is not None and high is not None:
        assert math.isfinite(low)
        assert math.isfinite(high)
        assert elapsed <= low <= total <= high
    if price is None:
        assert projection.projected_usd is None
    elif total is not None:
        assert projection.projected_usd == pytest.approx(total * price / 3600)


def drifting(seed: int, *, spread: float = 0.05, over_steps: int = 60) -> SimulatedRun:
    """A machine whose own speed wanders by 5 %, and has forgotten where it was after some 60 steps."""
    run, chance = simulate(seed), random.Random(seed + 5)
    keep, now, factors = math.exp(-1 / over_steps), chance.gauss(0.0, spread), []
    for _ in run.step_seconds:
        factors.append(math.exp(now))
        now = keep * now + math.sqrt(1 - keep**2) * chance.gauss(0.0, spread)
    seconds = [each * factor for each, factor in zip(run.step_seconds, factors, strict=True)]
    return replace(run, step_seconds=seconds)


def test_a_speed_that_drifts_widens_the_band_and_one_that_does_not_leaves_it(replays: list[SimulatedRun]) -> None:
    wandering = [drifting(seed) for seed in range(NUM_REPLAYS)]
    for steps in (200, 400, 795):
        _, coverage = errors_and_coverage(wandering, steps)
        assert coverage >= 0.65  # without the windows 47 to 57 %
        factors = []
        for run in replays:
            known = run.known_after(steps)
            factors.append(width(project(known)) / width(project(replace(known, window_means=()))))
        assert statistics.median(factors) < 1.1
        assert max(factors) < 2.5
    narrow = [width(project(wandering[0].known_after(steps))) for steps in (21, 795, 1600, 1990)]
    assert narrow == sorted(narrow, reverse=True)


def test_known_tokens_of_the_rest_bring_19_of_20_within_2_percent(replays: list[SimulatedRun]) -> None:
    """As close as one who knows the law of a step as well (above): what is left is the machine's speed and the pauses."""
    errors = []
    for run in replays:
        left = run.step_tokens[21:]
        known = replace(run.known_after(21), tokens_per_step_to_come=statistics.fmean(left))
        projection = project(known)
        assert projection.projected_total_seconds is not None
        errors.append(projection.projected_total_seconds / run.total_as_foreseen_after(21) - 1)
    best = [error_of_one_who_knows_the_steps(run, range(1, 21)) for run in replays]
    assert statistics.pstdev(errors) < 1.12 * statistics.pstdev(best)
    assert sum(abs(error) < 0.02 for error in errors) >= 0.9 * len(errors)


def test_what_21_steps_have_shown_of_the_collator_brings_as_many_within_2_percent(replays: list[SimulatedRun]) -> None:
    """The rest's longest rows have not been seen, and might be cut: that is in the band, and not in the value."""
    errors, inside, wider = [], 0, []
    for seed, run in enumerate(replays):
        chance = random.Random(seed)  # as in ``simulate``
        lengths = [
            max(16, min(2048, int(chance.lognormvariate(5.5, 0.7)))) for _ in range(len(run.step_tokens) * BATCH_SIZE)
        ]
        starts = range(0, len(lengths) + 1, BATCH_SIZE)
        plan = PlannedTokens(lengths, starts, BATCH_SIZE, max_length=None)
        for step in range(1, 22):
            plan.seen(step, round(run.step_tokens[step - 1]))
        to_come = plan.mean_to_come(21, len(run.step_tokens))
        assert to_come is not None
        assert to_come[0] == pytest.approx(statistics.fmean(run.step_tokens[21:]))
        certain = replace(run.known_after(21), tokens_per_step_to_come=to_come[0])
        projection = project(replace(certain, tokens_to_come_spread=to_come[1]))
        end = run.total_as_foreseen_after(21)
        assert projection.projected_total_seconds is not None
        assert projection.projected_total_seconds_low is not None
        assert projection.projected_total_seconds_high is not None
        errors.append(abs(projection.projected_total_seconds / end - 1))
        inside += projection.projected_total_seconds_low <= end <= projection.projected_total_seconds_high
        wider.append(width(projection) / width(project(certain)))
    assert sum(error < 0.02 for error in errors) >= 0.9 * len(errors)
    assert inside >= 0.9 * len(replays)
    assert min(wider) >= 1
    assert max(wider) > 1.2


def test_windows_hold_every_step_once_and_stay_few() -> None:
    for count in (7, 32, 200, 5000):
        means = windows_of([float(step) for step in range(count)], [2.0 * step for step in range(count)])
        assert len(means) < 32
        size = round(means[1][0] - means[0][0]) if len(means) > 1 else 1
        assert [seconds for seconds, _ in means] == [place * size + (size - 1) / 2 for place in range(len(means))]
        assert count - size < len(means) * size <= count
        assert all(tokens == 2 * seconds for seconds, tokens in means)
