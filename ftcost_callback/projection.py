"""Seconds and dollars to the end of the run, with a band. Pure arithmetic on frozen records: no clock, no Trainer.

    total = elapsed + remaining steps x (mean step at the tokens still to come) + pauses still scheduled

The mean step is corrected for the tokens seen so far: with lengths in random order, twenty steps hold a few per cent
more or fewer tokens than the run's average, and the slope of seconds on tokens is measured in the same twenty steps.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from costmodel.units import SECONDS_PER_HOUR
from ftcost_callback.records import PauseKind

INTERVAL_LEVEL: Final = 0.8
_NORMAL_QUANTILE: Final = 1.2816  # two-sided 80 %

# What is believed before the measurements say otherwise; each weighs as much as one measured step or pause.
_PRIOR_STEP_SPREAD: Final = 0.2  # standard deviation of a step over its mean, at equal tokens
_PRIOR_TOKEN_SPREAD: Final = 0.5  # random lengths padded to the longest of a small batch
_PRIOR_TOKEN_ELASTICITY: Final = 0.7  # relative change of a step's seconds for a relative change of its tokens
_PRIOR_ELASTICITY_SPREAD: Final = 0.35  # of that belief
_LEAST_STEP_NOISE: Final = 0.05  # of steps at equal tokens, over their mean: what a belief is weighed against
_PRIOR_PAUSE_SPREAD: Final = 0.25
_PREDICTED_PAUSE_SPREAD: Final = 0.35

_ENOUGH_OWN_STEPS: Final = 20  # from here on a session speaks for itself
_MIN_STEPS_TO_DISAGREE: Final = 3

_DRIFT_SPREAD: Final = 0.005  # clocks, heat and neighbours move the rest of a run by about this much
_EXTRAPOLATION_SPREAD: Final = 0.15  # of a correction that leaves the range of tokens seen (attention is not linear)
_MAX_EXTRAPOLATION_SPREAD: Final = 0.8
_NOTABLE_WAIT: Final = 0.05  # waiting for a processor below this share of the time is left to the measured noise
_UNMEASURED_PAUSE_STEPS: Final = 10.0  # the band's upper end takes an unknown pause as this many steps

_SHORTEST_STEP_SECONDS: Final = 1e-9  # below it nothing was measured, and squares lose their digits
_MAX_WINDOWS: Final = 32
_QUARTERS: Final = 4
_MIN_WINDOWS_IN_QUARTER: Final = 2

_MIN_STEPS_FOR_TREND: Final = 8
_TREND_T: Final = 4.5  # |t| of a slope over the step index: one false alarm in 1e5 looks
_MIN_STEPS_FOR_SHIFT: Final = 10
_SHIFT_Z: Final = 5.0
_SHIFT_SHARE: Final = 0.03  # a change of speed below 3 % is left to the mean
_DISAGREEMENT_Z: Final = 5.0  # lengths are skewed: few steps miss their mean by more than a normal sample would
_MAX_EXTRAPOLATION: Final = 4.0  # nothing still to come is believed to differ from what is known by more


@dataclass(frozen=True, slots=True)
class StepMoments:
    """Means and centred sums over the measured steps of this session (skipped first steps left out): flat in memory.

    ``moments = StepMoments()``, then after each step ``moments = moments.add(step_seconds, num_tokens)``. A step whose
    tokens are not known switches the token part off (``has_tokens``).
    """

    count: int = 0
    mean_seconds: float = 0.0
    mean_tokens: float = 0.0
    seconds_squares: float = 0.0  # sum of (seconds - mean)^2, and so on below
    tokens_squares: float = 0.0
    seconds_by_tokens: float = 0.0
    seconds_by_index: float = 0.0
    tokens_by_index: float = 0.0
    has_tokens: bool = True

    def add(self, step_seconds: float, num_tokens: float | None = None) -> StepMoments:
        """With one more step. A step that is no finite number is left out: it was not measured."""
        if not math.isfinite(step_seconds) or step_seconds < 0:
            return self
        has_tokens = self.has_tokens and num_tokens is not None and math.isfinite(num_tokens)
        tokens = float(num_tokens) if has_tokens and num_tokens is not None else 0.0
        count = self.count + 1
        from_mean_seconds = step_seconds - self.mean_seconds
        from_mean_tokens = tokens - self.mean_tokens if has_tokens else 0.0
        from_mean_index = self.count / 2  # indices 0 .. count-1 have the mean (count-1)/2
        mean_seconds = self.mean_seconds + from_mean_seconds / count
        mean_tokens = self.mean_tokens + from_mean_tokens / count
        still_from_mean_tokens = tokens - mean_tokens if has_tokens else 0.0
        keep = 1.0 - 1.0 / count
        return StepMoments(
            count=count,
            mean_seconds=mean_seconds,
            mean_tokens=mean_tokens,
            seconds_squares=self.seconds_squares + from_mean_seconds * (step_seconds - mean_seconds),
            tokens_squares=self.tokens_squares + from_mean_tokens * still_from_mean_tokens,
            seconds_by_tokens=self.seconds_by_tokens + from_mean_seconds * still_from_mean_tokens,
            # The newest index lies (count)/2 + 1/2 above the mean of those before it.
            seconds_by_index=self.seconds_by_index + keep * from_mean_seconds * (from_mean_index + 0.5),
            tokens_by_index=self.tokens_by_index + keep * from_mean_tokens * (from_mean_index + 0.5),
            has_tokens=has_tokens,
        )

    @property
    def index_squares(self) -> float:
        """Sum of (index - mean index)^2 of the indices 0 .. count-1."""
        return self.count * (self.count**2 - 1) / 12


class StepWindows:
    """Seconds and tokens over windows of equally many measured steps, for how the speed itself drifts. Flat in memory:
    when there are ``_MAX_WINDOWS``, neighbours are joined."""

    def __init__(self) -> None:
        self._windows: list[tuple[float, float]] = []
        self._size = 1
        self._seconds = self._tokens = 0.0
        self._count = 0

    def add(self, step_seconds: float, num_tokens: float | None) -> None:
        self._seconds += step_seconds
        self._tokens += num_tokens or 0.0  # where tokens are not counted, no seconds are put down to them either
        self._count += 1
        if self._count == self._size:
            self._windows.append((self._seconds / self._size, self._tokens / self._size))
            self._seconds, self._tokens, self._count = 0.0, 0.0, 0
        if len(self._windows) == _MAX_WINDOWS:
            pairs = zip(self._windows[::2], self._windows[1::2], strict=True)
            self._windows = [((a[0] + b[0]) / 2, (a[1] + b[1]) / 2) for a, b in pairs]
            self._size *= 2

    @property
    def means(self) -> tuple[tuple[float, float], ...]:
        """(seconds, tokens) of a step, window by window, oldest first."""
        return tuple(self._windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PausePlan:
    """One kind of pause: what it took so far and how often it still comes."""

    kind: PauseKind
    num_remaining: int = 0
    measured_seconds: tuple[float, ...] = ()  # this session's, oldest first; the last few dozen are enough
    predicted_seconds: float | None = None  # of ONE such pause, by the estimate; used until one has been measured


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionInput:
    """What is known now. ``None``: not known."""

    steps_done: int  # of the run, over all its sessions (the Trainer's global_step)
    max_steps: int | None
    elapsed_seconds: float  # wall time of the run over all its sessions, start-up and pauses inside
    moments: StepMoments = StepMoments()
    recent_step_seconds: tuple[float, ...] = ()  # the last measured steps of this session, oldest first
    recent_num_tokens: tuple[float, ...] = ()  # the same steps' tokens, or empty
    window_means: tuple[tuple[float, float], ...] = ()  # (seconds, tokens) of a step, over the session (StepWindows)
    # The last steps of the session before, on this machine: they count until there are as many of this session.
    earlier_step_seconds: tuple[float, ...] = ()
    earlier_num_tokens: tuple[float, ...] = ()
    # Over the whole run, from the lengths known before it began (the prediction whose basis is "before"): never from
    # the tokens seen, which the moments already hold.
    expected_tokens_per_step: float | None = None
    expected_tokens_relative_error: float = 0.01
    # Of the steps behind ``steps_done``: data set and order are known, and have given the tokens seen so far.
    tokens_per_step_to_come: float | None = None
    tokens_to_come_spread: float = 0.0  # by how many of them it may be off
    pauses: tuple[PausePlan, ...] = ()
    spent_usd: float | None = None  # so far, when earlier sessions had another price; else elapsed x usd_per_hour
    usd_per_hour: float | None = None  # of the whole job (all its GPUs)
    predicted_total_seconds: float | None = None
    predicted_total_seconds_low: float | None = None
    predicted_total_seconds_high: float | None = None
    predicted_startup_seconds: float | None = None  # part of predicted_total_seconds
    # Share of the time that the training thread waited for a processor that others used: theirs to take or to leave.
    processor_wait_fraction: float | None = None
    predicted_step_seconds: float | None = None  # when steps differ from it, evaluations not yet measured will as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """All ``None`` when neither a step has been measured nor a prediction given, or when the end is not known."""

    projected_total_seconds: float | None = None
    projected_total_seconds_low: float | None = None
    projected_total_seconds_high: float | None = None
    remaining_seconds: float | None = None
    projected_usd: float | None = None
    projected_usd_low: float | None = None
    projected_usd_high: float | None = None
    basis: Literal["measured", "predicted", "none"] = "none"
    notes: tuple[str, ...] = ()  # what makes it uncertain


@dataclass(frozen=True, slots=True)
class _Remaining:
    """Seconds from now to the end."""

    seconds: float
    low: float
    high: float
    basis: Literal["measured", "predicted"]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Mean:
    """A mean over the steps still to come, with its standard deviation."""

    value: float
    spread: float
    note: str | None = None


def project(known: ProjectionInput) -> Projection:
    """The whole run's seconds and dollars, with an 80 % band. Dollars are ``None`` without a price."""
    if known.max_steps is None or known.max_steps <= 0:
        return Projection(notes=("the number of steps is not known",))
    remaining_steps = max(0, known.max_steps - known.steps_done)
    remaining_share = remaining_steps / known.max_steps
    known = _with_earlier_steps(known)
    if known.moments.count > 0:
        remaining = _from_measured_steps(known, remaining_steps)
    elif known.predicted_total_seconds is not None:
        remaining = _from_prediction(known, known.predicted_total_seconds, remaining_share)
    else:
        return Projection()
    return _in_total(known, remaining)


def _with_earlier_steps(known: ProjectionInput) -> ProjectionInput:
    """Steps of the session before, in front of the few of this one, unless these show another speed."""
    own, num_own = known.moments, known.moments.count
    if not known.earlier_step_seconds or num_own >= _ENOUGH_OWN_STEPS or len(known.recent_step_seconds) < num_own:
        return known
    seconds = (*known.earlier_step_seconds, *known.recent_step_seconds)
    has_tokens = len(known.earlier_num_tokens) == len(known.earlier_step_seconds) and (
        num_own == 0 or (own.has_tokens and len(known.recent_num_tokens) == num_own)
    )
    tokens = (*known.earlier_num_tokens, *known.recent_num_tokens) if has_tokens else ()
    earlier, both = StepMoments(), StepMoments()
    for place, each in enumerate(seconds):
        both = both.add(each, tokens[place] if has_tokens else None)
        if place < len(known.earlier_step_seconds):
            earlier = both
    if num_own >= _MIN_STEPS_TO_DISAGREE:
        per_token = _seconds_per_token(earlier) if has_tokens and earlier.mean_tokens >= 1 else 0.0
        shift = own.mean_seconds - earlier.mean_seconds - per_token * (own.mean_tokens - earlier.mean_tokens)
        explained = per_token * (2 * earlier.seconds_by_tokens - per_token * earlier.tokens_squares)
        variance = max(0.0, earlier.seconds_squares - explained) / earlier.count + (_SHIFT_SHARE * earlier.mean_seconds) ** 2
        if abs(shift) > _SHIFT_Z * math.sqrt(variance / num_own):
            return known
    # Two sessions side by side are no trend.
    both = replace(both, seconds_by_index=0.0, tokens_by_index=0.0)
    return replace(known, moments=both, recent_step_seconds=seconds, recent_num_tokens=tokens)


def _in_total(known: ProjectionInput, remaining: _Remaining) -> Projection:
    spent_usd: float | None = None
    usd_per_second: float | None = None
    if known.usd_per_hour is not None:
        usd_per_second = known.usd_per_hour / SECONDS_PER_HOUR
        spent_usd = known.spent_usd if known.spent_usd is not None else known.elapsed_seconds * usd_per_second

    def usd(seconds: float) -> float | None:
        return None if spent_usd is None or usd_per_second is None else spent_usd + seconds * usd_per_second

    return Projection(
        projected_total_seconds=known.elapsed_seconds + remaining.seconds,
        projected_total_seconds_low=known.elapsed_seconds + remaining.low,
        projected_total_seconds_high=known.elapsed_seconds + remaining.high,
        remaining_seconds=remaining.seconds,
        projected_usd=usd(remaining.seconds),
        projected_usd_low=usd(remaining.low),
        projected_usd_high=usd(remaining.high),
        basis=remaining.basis,
        notes=remaining.notes,
    )


def _from_prediction(known: ProjectionInput, predicted_total_seconds: float, remaining_share: float) -> _Remaining:
    """The prediction's time per step for the steps that remain, until one has been measured here."""
    startup = known.predicted_startup_seconds or 0.0
    startup_left = max(0.0, startup - known.elapsed_seconds) if known.steps_done == 0 else 0.0

    def left(total_seconds: float) -> float:
        return startup_left + max(0.0, total_seconds - startup) * remaining_share

    low, high = known.predicted_total_seconds_low, known.predicted_total_seconds_high
    seconds = left(predicted_total_seconds)
    return _Remaining(
        seconds,
        min(seconds, left(low)) if low is not None else seconds,
        max(seconds, left(high)) if high is not None else seconds,
        basis="predicted",
        notes=("no step measured yet",),
    )


def _from_measured_steps(known: ProjectionInput, remaining_steps: int) -> _Remaining:
    step = _step_seconds_to_come(known, remaining_steps)
    seconds = remaining_steps * step.value
    variance = (remaining_steps * step.spread) ** 2 + (_DRIFT_SPREAD * seconds) ** 2
    unmeasured_seconds = 0.0
    notes = [step.note] if step.note else []
    waiting = known.processor_wait_fraction or 0.0
    if waiting >= _NOTABLE_WAIT:
        variance += (waiting * seconds / 2) ** 2
        notes.append(f"others take the processor {waiting:.0%} of the time, which may change")
    for plan in known.pauses:
        if plan.num_remaining <= 0:
            continue
        pause = _pause_seconds(plan, known)
        if pause is None:
            unmeasured_seconds += plan.num_remaining * _UNMEASURED_PAUSE_STEPS * step.value
            notes.append(f"no {plan.kind} pause measured yet")
        else:
            seconds += plan.num_remaining * pause.value
            variance += (plan.num_remaining * pause.spread) ** 2
    half_width = _student_quantile(known.moments.count + 1) * math.sqrt(variance)
    return _Remaining(
        seconds,
        max(0.0, seconds - half_width),
        seconds + half_width + unmeasured_seconds,
        basis="measured",
        notes=tuple(notes),
    )


def _pause_seconds(plan: PausePlan, known: ProjectionInput) -> _Mean | None:
    """Mean of the pauses still to come of one kind; the spread is that of the mean of ``num_remaining`` of them."""
    measured = [seconds for seconds in plan.measured_seconds if math.isfinite(seconds) and seconds >= 0]
    if measured:
        mean = sum(measured) / len(measured)
        squares = sum((seconds - mean) ** 2 for seconds in measured) + (_PRIOR_PAUSE_SPREAD * mean) ** 2
        variance = squares / len(measured)
        return _Mean(mean, math.sqrt(variance / len(measured) + variance / plan.num_remaining))
    if plan.predicted_seconds is not None:
        seconds = plan.predicted_seconds
        if plan.kind == "eval" and known.predicted_step_seconds is not None and known.predicted_step_seconds > 0:
            ratio = known.moments.mean_seconds / known.predicted_step_seconds
            seconds *= min(max(ratio, 1 / _MAX_EXTRAPOLATION), _MAX_EXTRAPOLATION)
        return _Mean(seconds, _PREDICTED_PAUSE_SPREAD * seconds)
    return None


def _step_seconds_to_come(known: ProjectionInput, remaining_steps: int) -> _Mean:
    """Mean seconds of the steps still to come."""
    moments = known.moments
    mean = moments.mean_seconds
    if moments.has_tokens and moments.mean_tokens >= 1:
        seconds_per_token = _seconds_per_token(moments)
        tokens = _tokens_to_come(known, remaining_steps)
        more_tokens = tokens.value - moments.mean_tokens
        correction = seconds_per_token * more_tokens
        unsure = _elasticity(moments)[1] * mean * more_tokens / moments.mean_tokens
        token_variance = (seconds_per_token * tokens.spread) ** 2 + unsure**2
        if tokens.note is not None:
            # The further ahead of what was seen, the less is known of the law; far ahead the band holds "stays as it is".
            share = _EXTRAPOLATION_SPREAD * max(1.0, abs(more_tokens) / moments.mean_tokens)
            token_variance += (min(share, _MAX_EXTRAPOLATION_SPREAD) * correction) ** 2
        note = tokens.note
    else:
        seconds_per_token = 0.0
        correction, token_variance, note = _trend_of_seconds(moments, remaining_steps)

    # Residuals around the line through the means; the belief counts as one more step.
    explained = seconds_per_token * (2 * moments.seconds_by_tokens - seconds_per_token * moments.tokens_squares)
    squares = max(0.0, moments.seconds_squares - explained)
    step_variance = (squares + (_PRIOR_STEP_SPREAD * mean) ** 2) / moments.count
    independent_steps = moments.count / _correlation_factor(known, seconds_per_token)
    variance = step_variance / independent_steps
    if remaining_steps > 0:
        variance += step_variance / remaining_steps
    variance = max(variance, _drift_variance(known, seconds_per_token)) + token_variance

    shift = 0.0 if note is not None else _recent_shift(known, seconds_per_token, math.sqrt(step_variance))
    if shift:
        note = "steps became slower" if shift > 0 else "steps became faster"
        variance += (shift / 2) ** 2  # it may stay or go back
    # A correction never takes more than three quarters of what was measured.
    return _Mean(max(mean / _MAX_EXTRAPOLATION, mean + correction + shift), math.sqrt(variance), note)


def _seconds_per_token(moments: StepMoments) -> float:
    """Slope of seconds on tokens, drawn towards the believed elasticity while few or equal steps were seen."""
    return _elasticity(moments)[0] * moments.mean_seconds / moments.mean_tokens


def _elasticity(moments: StepMoments) -> tuple[float, float]:
    """(relative change of a step's seconds for a relative change of its tokens, its standard deviation)."""
    if moments.mean_seconds < _SHORTEST_STEP_SECONDS:
        return 0.0, 0.0
    spread = moments.tokens_squares / moments.mean_tokens**2
    together = moments.seconds_by_tokens / (moments.mean_tokens * moments.mean_seconds)
    explained = together**2 / spread if spread > 0 else 0.0
    residual = max(0.0, moments.seconds_squares / moments.mean_seconds**2 - explained) / max(1, moments.count - 2)
    noise = max(_LEAST_STEP_NOISE**2, residual)
    weight = noise / _PRIOR_ELASTICITY_SPREAD**2  # of the belief, in the measurements' own unit
    return max(0.0, (together + weight * _PRIOR_TOKEN_ELASTICITY) / (spread + weight)), math.sqrt(noise / (spread + weight))


def _tokens_to_come(known: ProjectionInput, remaining_steps: int) -> _Mean:
    """Mean tokens of a step still to come: known, from the steps seen, from what the lengths promised, or from both."""
    moments = known.moments
    seen = moments.mean_tokens
    expected = known.expected_tokens_per_step
    trend = _trend(moments, moments.tokens_by_index, moments.tokens_squares)
    direction = "growing" if trend is not None and trend > 0 else "shrinking"
    if known.tokens_per_step_to_come is not None:
        to_come, spread = known.tokens_per_step_to_come, known.tokens_to_come_spread
        within = f" within {spread / to_come:.1%}" if spread >= 0.0005 * to_come else ""
        note = f"sequences are {direction}; the tokens of the rest are known{within}" if trend is not None else None
        return _Mean(to_come, spread, note)
    if trend is not None:
        now = seen + trend * (moments.count - 1) / 2
        if expected is not None and expected >= 1 and remaining_steps > 0:
            # What the lengths promised for the run, less what has been used up.
            total_steps = known.steps_done + remaining_steps
            left = (expected * total_steps - seen * known.steps_done) / remaining_steps
            value = min(max(left, expected / _MAX_EXTRAPOLATION), expected * _MAX_EXTRAPOLATION)
            spread = known.expected_tokens_relative_error * expected * total_steps / remaining_steps
            return _Mean(value, spread, f"sequences are {direction}; the rest by the expected tokens per step")
        ahead = now + trend * remaining_steps / 2
        ahead = min(max(ahead, now / _MAX_EXTRAPOLATION), now * _MAX_EXTRAPOLATION)
        # Half way between "stays where it is now" and "goes on like this", and the band holds both.
        return _Mean((now + ahead) / 2, abs(ahead - now) / 2, f"sequences are {direction}")

    # The mean of the steps seen, and of as many more as remain.
    variance = (moments.tokens_squares + (_PRIOR_TOKEN_SPREAD * seen) ** 2) / moments.count
    seen_variance = variance / moments.count
    ahead_variance = variance / remaining_steps if remaining_steps > 0 else 0.0
    if expected is None or expected < 1:
        return _Mean(seen, math.sqrt(seen_variance + ahead_variance))
    expected_variance = (known.expected_tokens_relative_error * expected) ** 2
    if abs(seen - expected) > _DISAGREEMENT_Z * math.sqrt(seen_variance + expected_variance):
        return _Mean(seen, math.sqrt(seen_variance + ahead_variance))  # the lengths were not what was promised
    weight = seen_variance / (seen_variance + expected_variance)  # of what was promised
    both_variance = weight * expected_variance
    return _Mean(weight * expected + (1 - weight) * seen, math.sqrt(both_variance + ahead_variance))


def _trend_of_seconds(moments: StepMoments, remaining_steps: int) -> tuple[float, float, str | None]:
    """(correction of the mean step, its variance, note) where tokens are not known."""
    trend = _trend(moments, moments.seconds_by_index, moments.seconds_squares)
    if trend is None:
        return 0.0, 0.0, None
    now = moments.mean_seconds + trend * (moments.count - 1) / 2
    ahead = min(max(now + trend * remaining_steps / 2, now / _MAX_EXTRAPOLATION), now * _MAX_EXTRAPOLATION)
    note = "steps are getting slower" if trend > 0 else "steps are getting faster"
    return (now + ahead) / 2 - moments.mean_seconds, ((ahead - now) / 2) ** 2, note


def _trend(moments: StepMoments, by_index: float, squares: float) -> float | None:
    """Change per step, if the steps seen leave no doubt that there is one."""
    if moments.count < _MIN_STEPS_FOR_TREND or squares <= 0:
        return None
    correlation = by_index / math.sqrt(moments.index_squares * squares)
    unexplained = max(1e-12, 1 - correlation**2)
    if abs(correlation) * math.sqrt((moments.count - 2) / unexplained) < _TREND_T:
        return None
    return by_index / moments.index_squares


def _recent_residuals(known: ProjectionInput, seconds_per_token: float) -> list[float]:
    """Seconds of the recent steps less what the line through all steps says for their tokens."""
    moments = known.moments
    tokens = known.recent_num_tokens
    if len(tokens) != len(known.recent_step_seconds) or not moments.has_tokens:
        return [seconds - moments.mean_seconds for seconds in known.recent_step_seconds]
    return [
        seconds - moments.mean_seconds - seconds_per_token * (num_tokens - moments.mean_tokens)
        for seconds, num_tokens in zip(known.recent_step_seconds, tokens, strict=True)
    ]


def _recent_shift(known: ProjectionInput, seconds_per_token: float, step_spread: float) -> float:
    """By how many seconds the recent steps differ from all, where chance does not explain it (heat, a neighbour)."""
    residuals = _recent_residuals(known, seconds_per_token)
    num_recent, count = len(residuals), known.moments.count
    if num_recent < _MIN_STEPS_FOR_SHIFT or count <= num_recent:
        return 0.0
    shift = sum(residuals) / num_recent
    by_chance = step_spread * math.sqrt(1 / num_recent - 1 / count)
    if abs(shift) < _SHIFT_Z * by_chance or abs(shift) < _SHIFT_SHARE * known.moments.mean_seconds:
        return 0.0
    return shift


def _correlation_factor(known: ProjectionInput, seconds_per_token: float) -> float:
    """How many measured steps count as one, because neighbours resemble each other: (1 + r) / (1 - r), r = lag-1."""
    residuals = _recent_residuals(known, seconds_per_token)
    squares = sum(residual**2 for residual in residuals)
    if len(residuals) < _MIN_STEPS_FOR_SHIFT or squares <= 0:
        return 1.0
    together = sum(first * second for first, second in itertools.pairwise(residuals))
    correlation = min(0.8, max(0.0, together / squares))
    return (1 + correlation) / (1 - correlation)


def _drift_variance(known: ProjectionInput, seconds_per_token: float) -> float:
    """Of the mean of the steps to come around that of the steps seen, by the means of the session's four quarters.

    Where steps differ by chance alone, quarters differ by as much as single steps let expect, and this falls with their
    number. Where the machine's own speed drifts, quarters differ by more, and the rest may differ from all of them alike:
    the mean of four has a quarter of their variance, and so has the rest's.
    """
    size = len(known.window_means) // _QUARTERS
    if size < _MIN_WINDOWS_IN_QUARTER:
        return 0.0
    at_equal_tokens = [seconds - seconds_per_token * tokens for seconds, tokens in known.window_means[-_QUARTERS * size :]]
    means = [sum(at_equal_tokens[place * size :][:size]) / size for place in range(_QUARTERS)]
    mean = sum(means) / _QUARTERS
    variance = 2 * sum((each - mean) ** 2 for each in means) / (_QUARTERS - 1) / _QUARTERS
    return variance * (_student_quantile(_QUARTERS - 1) / _NORMAL_QUANTILE) ** 2  # four values tell a variance badly


def _student_quantile(degrees_of_freedom: int) -> float:
    """Two-sided 80 % quantile of Student's t. Source: Cornish-Fisher expansion, Abramowitz and Stegun 26.7.5."""
    z, n = _NORMAL_QUANTILE, degrees_of_freedom
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


def num_remaining_pauses(
    strategy: str,
    *,
    every_steps: float | None,
    steps_done: int,
    max_steps: int | None,
    steps_per_epoch: int | None = None,
    epochs_per_step: float | None = None,
    also_at_the_end: bool = True,
    delay: float = 0.0,
) -> int:
    """How often a pause with this ``*_strategy`` ("no", "steps", "epoch") still comes after ``steps_done``.

    ``every_steps`` below 1 is a fraction of ``max_steps``, as in ``TrainingArguments``. With "steps" the Trainer also
    evaluates (transformers 5.4) and saves at the last step (it does not log: ``also_at_the_end=False``). ``delay``: none
    before so many steps or epochs, whichever the strategy counts. The pause of the step just done is not counted; add 1
    while it is pending. "best" saves when it must: 0, since nobody knows.
    """
    if max_steps is None or steps_done >= max_steps:
        return 0
    if strategy == "epoch" and not steps_per_epoch:
        return int(delay <= 1)  # at the end, and nobody knows how often before
    if strategy == "epoch" and steps_per_epoch:
        epochs, steps_left = divmod(max_steps, steps_per_epoch)
        done = max(steps_done // steps_per_epoch, math.ceil(delay) - 1)
        ends_at = epochs + steps_left * (epochs_per_step if epochs_per_step is not None else 1 / steps_per_epoch)
        return max(0, epochs - done) + (steps_left > 0 and delay <= ends_at)  # a part of an epoch ends one too
    if strategy == "steps" and every_steps is not None and every_steps > 0:
        every = math.ceil(every_steps * max_steps) if every_steps < 1 else int(every_steps)
        at_the_end = also_at_the_end and max_steps % every != 0 and delay <= max_steps
        return max(0, max_steps // every - max(steps_done // every, math.ceil(delay / every) - 1)) + at_the_end
    return 0
