"""Where the wall time of a run goes. Pure bookkeeping on an injected clock; knows no Trainer, no tensor, no file.

One mark moves through the session. Every interval between two marks goes to exactly one bucket, so the buckets sum to
the wall time by construction:

    start .. [data wait .. step] .. step .. pause(log) .. pause(eval) .. pause(save) .. step ... close

A step lasts from the mark before it (the previous step's end, or the end of the pause after it) to its own end: the
Trainer fetches the batches of a step *before* it says that the step begins, so begin-to-end would lose the data wait.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from ftcost_callback.projection import StepMoments, StepWindows
from ftcost_callback.records import PauseKind, TokenCounts

BUCKETS: Final = (
    "train_seconds",
    "eval_seconds",
    "save_seconds",
    "log_seconds",
    "startup_seconds",
    "other_seconds",
    "rollout_seconds",
)
TOKEN_FIELDS: Final = ("num_tokens", "num_non_padding_tokens", "num_supervised_tokens", "num_samples")
_KEPT_PAUSES: Final = 32  # of each kind, for the projection


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What the run took so far, over its sessions. The seven buckets sum to ``wall_seconds``."""

    train_seconds: float = 0.0  # of which data_wait_seconds
    eval_seconds: float = 0.0
    save_seconds: float = 0.0
    log_seconds: float = 0.0
    startup_seconds: float = 0.0
    other_seconds: float = 0.0
    rollout_seconds: float = 0.0  # generating and scoring what is trained on
    data_wait_seconds: float = 0.0
    wasted_seconds: float = 0.0  # steps that an earlier session had done already, part of train_seconds
    num_steps: int = 0  # executed, repeated ones included
    num_uncounted_steps: int = 0  # of them, those whose tokens nobody saw; the counts below are of the others
    num_tokens: int | None = 0  # None once a step did not show it, and where no step was counted
    num_non_padding_tokens: int | None = 0
    num_supervised_tokens: int | None = 0
    num_samples: int | None = 0

    @property
    def wall_seconds(self) -> float:
        """Sum of the seven buckets."""
        return sum(self.seconds.values())

    @property
    def seconds(self) -> dict[str, float]:
        """Bucket -> seconds."""
        return {bucket: getattr(self, bucket) for bucket in BUCKETS}

    @property
    def tokens(self) -> dict[str, int]:
        """The token counts that are known."""
        names = ("num_tokens", "num_non_padding_tokens", "num_supervised_tokens")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def plus(self, **amounts: float) -> Totals:
        """With ``amounts`` added to the named fields."""
        return dataclasses.replace(self, **{name: getattr(self, name) + amount for name, amount in amounts.items()})

    def plus_tokens(self, counts: TokenCounts, *, num_steps: int = 1) -> Totals:
        """With the tokens of ``num_steps`` steps that are counted in already. Steps that show nothing are left out of the
        counts; a count that is missing beside others is unknown from there on."""
        if counts.shows_nothing:
            return dataclasses.replace(self, num_uncounted_steps=self.num_uncounted_steps + num_steps)
        return dataclasses.replace(
            self,
            num_tokens=_sum(self.num_tokens, counts.num_tokens),
            num_non_padding_tokens=_sum(self.num_non_padding_tokens, counts.num_non_padding_tokens),
            num_supervised_tokens=_sum(self.num_supervised_tokens, counts.num_supervised_tokens),
            num_samples=_sum(self.num_samples, counts.num_samples),
        )

    def with_known_tokens(self) -> Totals:
        """Without token counts where no step was counted."""
        nothing = 0 < self.num_steps <= self.num_uncounted_steps
        if not nothing:
            return self
        return dataclasses.replace(
            self, num_tokens=None, num_non_padding_tokens=None, num_supervised_tokens=None, num_samples=None
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain mapping, for the ledger; unknown counts are left out."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Totals:
        """Inverse of :meth:`to_dict`. Unknown fields are ignored; a token count that is missing is unknown."""
        values: dict[str, Any] = {}
        for each in dataclasses.fields(cls):
            value = fields.get(each.name)
            if value is not None:
                values[each.name] = value
            elif each.name in TOKEN_FIELDS:
                values[each.name] = None
        return cls(**values)


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second


Phase = Literal["forward", "backward", "optimizer", "rollout", "eval", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Of one optimizer step, over its micro-batches. What is none of these (moving batches, say) is left out."""

    forward: float
    backward: float  # recomputation and gradient clipping inside
    optimizer: float

    @classmethod
    def of(cls, seconds: Mapping[Phase, float]) -> PhaseSeconds | None:
        """``None`` for a step whose forward or whose optimizer nobody saw."""
        if "forward" not in seconds or "optimizer" not in seconds:
            return None
        return cls(forward=seconds["forward"], backward=seconds.get("backward", 0.0), optimizer=seconds["optimizer"])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """One optimizer step. ``elapsed_seconds``: wall time of the run over all its sessions, at the step's end."""

    global_step: int
    step_seconds: float
    data_wait_seconds: float
    tokens: TokenCounts
    elapsed_seconds: float
    repeated: bool
    is_warm_up: bool  # or slowed by a profiler: left out of rates
    num_micro_batches: int = 1
    rollout_seconds: float = 0.0  # outside step_seconds
    eval_seconds: float = 0.0  # of an evaluation in the middle of the step: outside step_seconds, too
    phases: PhaseSeconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAggregate:
    """Sums over some steps, warm-up left out. Rates are ``None`` when nothing was measured."""

    num_steps: int = 0
    step_seconds_sum: float = 0.0
    data_wait_seconds_sum: float = 0.0
    num_micro_batches: int = 0
    num_tokens: int | None = 0
    num_non_padding_tokens: int | None = 0
    num_supervised_tokens: int | None = 0
    num_samples: int | None = 0
    sum_squared_sequence_tokens: float | None = 0.0
    longest_sequence_tokens: int | None = None
    phases: PhaseSeconds | None = None  # means of a step; None once a step did not show them

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step."""
        return self.step_seconds_sum / self.num_steps if self.num_steps else None

    @property
    def data_wait_seconds(self) -> float | None:
        """Mean seconds a step waited for its batches."""
        return self.data_wait_seconds_sum / self.num_steps if self.num_steps else None

    @property
    def data_wait_fraction(self) -> float | None:
        """Share of the step time, in [0, 1]."""
        return self.data_wait_seconds_sum / self.step_seconds_sum if self.step_seconds_sum > 0 else None

    def per_second(self, count: float | None) -> float | None:
        """``count`` (one of this aggregate's) over the seconds of its steps, pauses left out."""
        if count is None or not self.num_steps or self.step_seconds_sum <= 0:
            return None
        return count / self.step_seconds_sum

    def per_step(self, count: float | None) -> float | None:
        return count / self.num_steps if count is not None and self.num_steps else None

    def plus(self, other: StepAggregate) -> StepAggregate:
        """Both together; a count that one of them does not know is unknown."""
        if not (self.num_steps and other.num_steps):
            return self if self.num_steps else other
        sums: dict[str, Any] = {}
        for name in ("num_steps", "step_seconds_sum", "data_wait_seconds_sum", "num_micro_batches", *_AGGREGATE_COUNTS):
            mine, others = getattr(self, name), getattr(other, name)
            sums[name] = mine + others if mine is not None and others is not None else None
        longest = [each for each in (self.longest_sequence_tokens, other.longest_sequence_tokens) if each is not None]
        phases = None
        if self.phases is not None and other.phases is not None:
            share = self.num_steps / sums["num_steps"]
            phases = PhaseSeconds(
                forward=share * self.phases.forward + (1 - share) * other.phases.forward,
                backward=share * self.phases.backward + (1 - share) * other.phases.backward,
                optimizer=share * self.phases.optimizer + (1 - share) * other.phases.optimizer,
            )
        return StepAggregate(**sums, longest_sequence_tokens=max(longest, default=None), phases=phases)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> StepAggregate:
        """Inverse of ``dataclasses.asdict``; unknown fields are ignored."""
        known = {each.name: fields[each.name] for each in dataclasses.fields(cls) if each.name in fields}
        if known.get("phases") is not None:
            known["phases"] = PhaseSeconds(**known["phases"])
        return cls(**known)


_AGGREGATE_COUNTS: Final = (*TOKEN_FIELDS, "sum_squared_sequence_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast ``machine`` did its steps and pauses: the last ones, for the projection of the next session on the same
    machine, and all steps of the latest ``num_sessions`` on it, for the rates of the run."""

    machine: str
    step_seconds: tuple[float, ...] = ()  # oldest first
    num_tokens: tuple[int, ...] = ()  # of the same steps, or empty
    pause_seconds: Mapping[PauseKind, tuple[float, ...]] = field(default_factory=dict)  # oldest first
    steps: StepAggregate = field(default_factory=StepAggregate)
    num_sessions: int = 0  # in ``steps``

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any] | None) -> Pace | None:
        """Inverse of :meth:`to_dict`; ``None`` for what is absent."""
        if not fields or not (fields.get("step_seconds") or fields.get("steps")):
            return None
        seconds, tokens = tuple(fields.get("step_seconds") or ()), tuple(fields.get("num_tokens") or ())
        pauses = fields.get("pause_seconds") or {}
        return cls(
            machine=str(fields.get("machine", "")),
            step_seconds=tuple(map(float, seconds)),
            num_tokens=tokens if len(tokens) == len(seconds) else (),
            pause_seconds={kind: tuple(map(float, pauses[kind])) for kind in get_args(PauseKind) if pauses.get(kind)},
            steps=StepAggregate.from_dict(fields.get("steps") or {}),
            num_sessions=int(fields.get("num_sessions", 0)),
        )


class _TokenSums:
    """Running sums of a step's counts; one that a counted step does not show is unknown from there on."""

    __slots__ = TOKEN_FIELDS

    def __init__(self, start: Totals | None = None) -> None:
        if start is not None and 0 < start.num_steps <= start.num_uncounted_steps:
            start = None  # nothing was counted, and these sums are of what is
        self.num_tokens: int | None = start.num_tokens if start is not None else 0
        self.num_non_padding_tokens: int | None = start.num_non_padding_tokens if start is not None else 0
        self.num_supervised_tokens: int | None = start.num_supervised_tokens if start is not None else 0
        self.num_samples: int | None = start.num_samples if start is not None else 0

    def add(self, counts: TokenCounts) -> None:
        # As _sum, whose calls would be a dozen a step.
        tokens, real = counts.num_tokens, counts.num_non_padding_tokens
        supervised, samples = counts.num_supervised_tokens, counts.num_samples
        self.num_tokens = None if tokens is None or self.num_tokens is None else self.num_tokens + tokens
        self.num_non_padding_tokens = (
            None if real is None or self.num_non_padding_tokens is None else self.num_non_padding_tokens + real
        )
        self.num_supervised_tokens = (
            None if supervised is None or self.num_supervised_tokens is None else self.num_supervised_tokens + supervised
        )
        self.num_samples = None if samples is None or self.num_samples is None else self.num_samples + samples


class _StepSums:
    """The running form of a :class:`StepAggregate`: nothing is built anew for each step."""

    __slots__ = (
        "_data_wait_seconds",
        "_longest",
        "_num_micro_batches",
        "_phases",
        "_squares",
        "_step_seconds",
        "_tokens",
        "num_steps",
    )

    def __init__(self) -> None:
        self.num_steps = self._num_micro_batches = 0
        self._step_seconds = self._data_wait_seconds = 0.0
        self._tokens = _TokenSums()
        self._squares: float | None = 0.0
        self._longest: int | None = None
        self._phases: list[float] | None = [0.0, 0.0, 0.0]

    def add(
        self,
        step_seconds: float,
        data_wait_seconds: float,
        num_micro_batches: int,
        counts: TokenCounts,
        phases: PhaseSeconds | None = None,
    ) -> None:
        self.num_steps += 1
        self._num_micro_batches += num_micro_batches
        self._step_seconds += step_seconds
        self._data_wait_seconds += data_wait_seconds
        self._tokens.add(counts)
        squares, longest = counts.sum_squared_sequence_tokens, counts.longest_sequence_tokens
        self._squares = None if squares is None or self._squares is None else self._squares + squares
        if longest is not None and (self._longest is None or longest > self._longest):
            self._longest = longest
        if phases is None:
            self._phases = None
        elif self._phases is not None:
            self._phases[0] += phases.forward
            self._phases[1] += phases.backward
            self._phases[2] += phases.optimizer

    @property
    def aggregate(self) -> StepAggregate:
        tokens = self._tokens
        return StepAggregate(
            num_steps=self.num_steps,
            step_seconds_sum=self._step_seconds,
            data_wait_seconds_sum=self._data_wait_seconds,
            num_micro_batches=self._num_micro_batches,
            num_tokens=tokens.num_tokens,
            num_non_padding_tokens=tokens.num_non_padding_tokens,
            num_supervised_tokens=tokens.num_supervised_tokens,
            num_samples=tokens.num_samples,
            sum_squared_sequence_tokens=self._squares,
            longest_sequence_tokens=self._longest,
            phases=self._mean_phases(),
        )

    def _mean_phases(self) -> PhaseSeconds | None:
        if self._phases is None or not self.num_steps:
            return None
        forward, backward, optimizer = (seconds / self.num_steps for seconds in self._phases)
        return PhaseSeconds(forward=forward, backward=backward, optimizer=optimizer)


class StepRecorder:
    """Attributes a session's time to buckets, and keeps what speed and projection need, flat in memory.

    ``clock`` returns seconds on any monotonic axis. ``window_steps``: steps kept for "recent". ``skip_first_steps``:
    optimizer steps of this session left out of every rate (compilation, caches, workers); they stay in the bill.
    """

    def __init__(self, clock: Callable[[], float], *, window_steps: int = 50, skip_first_steps: int = 1) -> None:
        self._clock = clock
        self._skip_first_steps = skip_first_steps
        self._recent: deque[tuple[float, int | None]] = deque(maxlen=max(1, window_steps))
        self._pauses: dict[PauseKind, deque[tuple[int, float]]] = {}
        self._mark: float | None = None
        self._furthest_step = 0
        self._num_session_steps = self._num_uncounted_steps = 0
        self._any_counted = False  # a step of this session
        self._is_closed = False
        self._seconds = dict.fromkeys(BUCKETS, 0.0)
        self._data_wait_seconds = self._wasted_seconds = 0.0
        self._num_steps = 0
        self._tokens = _TokenSums()
        self._session = _StepSums()
        self._report = _StepSums()
        self.moments = StepMoments()
        self.windows = StepWindows()
        self.first_step_seconds: float | None = None

    def start(self, *, startup_seconds: float = 0.0, earlier: Totals | None = None, furthest_step: int = 0) -> None:
        """Begin a session. ``earlier``: totals of the sessions before it; ``furthest_step``: the last one they did."""
        earlier = earlier if earlier is not None else Totals()
        self._seconds = earlier.seconds
        self._seconds["startup_seconds"] += max(0.0, startup_seconds)
        self._data_wait_seconds, self._wasted_seconds = earlier.data_wait_seconds, earlier.wasted_seconds
        self._num_steps, self._num_uncounted_steps = earlier.num_steps, earlier.num_uncounted_steps
        self._tokens = _TokenSums(earlier)
        self._furthest_step = furthest_step
        self._mark = self._clock()

    @property
    def totals(self) -> Totals:
        """Over all sessions of the run, up to the mark."""
        return Totals(
            **self._seconds,
            data_wait_seconds=self._data_wait_seconds,
            wasted_seconds=self._wasted_seconds,
            num_steps=self._num_steps,
            num_tokens=self._tokens.num_tokens,
            num_non_padding_tokens=self._tokens.num_non_padding_tokens,
            num_supervised_tokens=self._tokens.num_supervised_tokens,
            num_samples=self._tokens.num_samples,
            num_uncounted_steps=self._num_uncounted_steps,
        ).with_known_tokens()

    @property
    def session(self) -> StepAggregate:
        """This session's steps, warm-up left out."""
        return self._session.aggregate

    @property
    def num_measured_steps(self) -> int:
        """Steps in :attr:`session`."""
        return self._session.num_steps

    @property
    def mark(self) -> float:
        """Clock time up to which everything is in a bucket."""
        if self._mark is None:
            raise RuntimeError("StepRecorder.start was not called")
        return self._mark

    def data_wait(self, since: float | None = None) -> float:
        """Seconds from ``since`` (default: the mark) to now. Call when the step's batches have arrived."""
        return max(0.0, self._clock() - (self.mark if since is None else since))

    def step(
        self,
        global_step: int,
        *,
        data_wait_seconds: float = 0.0,
        tokens: TokenCounts | None = None,
        ended_at: float | None = None,
        num_micro_batches: int = 1,
        rollout_seconds: float = 0.0,
        eval_seconds: float = 0.0,
        phases: PhaseSeconds | None = None,
        is_profiled: bool = False,
    ) -> StepTiming:
        """One optimizer step ends now, or ended at ``ended_at`` (clock time, when a device tells later).

        ``rollout_seconds`` of it went into generating what it trains on, ``eval_seconds`` into an evaluation that somebody
        did in its middle: no part of its training time. ``is_profiled``: a
        profiler slowed it down, so that it is left out of rates as warm-up is. So is a step whose forwards nobody saw (its
        batch was skipped), where those of other steps are seen.
        """
        counts = tokens if tokens is not None else TokenCounts()
        whole = self._advance(ended_at)
        evaluation = min(max(0.0, eval_seconds), whole)
        with_rollout = whole - evaluation
        rollout = min(max(0.0, rollout_seconds), with_rollout)
        seconds = with_rollout - rollout
        data_wait = min(max(0.0, data_wait_seconds), seconds)
        repeated = global_step <= self._furthest_step
        self._seconds["train_seconds"] += seconds
        self._seconds["rollout_seconds"] += rollout
        self._seconds["eval_seconds"] += evaluation
        self._data_wait_seconds += data_wait
        self._wasted_seconds += with_rollout if repeated else 0.0
        self._num_steps += 1
        is_uncounted = counts.shows_nothing
        if is_uncounted:
            self._num_uncounted_steps += 1
        else:
            self._tokens.add(counts)
            if not self._any_counted:
                self._any_counted = True
                self._forget_measured()  # the steps so far, of which no tokens are known
        self._num_session_steps += 1
        if self.first_step_seconds is None:
            self.first_step_seconds = seconds
        is_warm_up = self._num_session_steps <= self._skip_first_steps or is_profiled or (is_uncounted and self._any_counted)
        if not is_warm_up:
            self._recent.append((with_rollout, counts.num_tokens))
            self._session.add(seconds, data_wait, num_micro_batches, counts, phases)
            self._report.add(seconds, data_wait, num_micro_batches, counts, phases)
            self.moments = self.moments.add(with_rollout, counts.num_tokens)
            self.windows.add(with_rollout, counts.num_tokens)
        return StepTiming(
            global_step=global_step,
            step_seconds=seconds,
            data_wait_seconds=data_wait,
            tokens=counts,
            elapsed_seconds=self._wall_seconds,
            repeated=repeated,
            is_warm_up=is_warm_up,
            num_micro_batches=num_micro_batches,
            rollout_seconds=rollout,
            eval_seconds=evaluation,
            phases=phases,
        )

    def _forget_measured(self) -> None:
        self._recent.clear()
        self._session, self._report = _StepSums(), _StepSums()
        self.moments, self.windows = StepMoments(), StepWindows()

    def pause(self, kind: PauseKind, *, global_step: int = 0, ended_at: float | None = None) -> float:
        """What passed since the mark was a pause of this kind. Returns its seconds."""
        seconds = self._advance(ended_at)
        self._seconds[f"{kind}_seconds"] += seconds
        kept = self._pauses.setdefault(kind, deque(maxlen=_KEPT_PAUSES))
        if kept and kept[-1][0] == global_step:
            # Several evaluation sets at one step are one pause of the plan.
            kept[-1] = (global_step, kept[-1][1] + seconds)
        else:
            kept.append((global_step, seconds))
        return seconds

    def close(self) -> float:
        """The session ends: what is left goes to ``other``. Returns its seconds."""
        seconds = self._advance(None)
        self._seconds["other_seconds"] += seconds
        self._is_closed = True
        return seconds

    def take_report(self) -> StepAggregate:
        """The steps since the last call, warm-up left out."""
        report, self._report = self._report, _StepSums()
        return report.aggregate

    @property
    def elapsed_seconds(self) -> float:
        """Wall time of the run over all its sessions: now, or at the close."""
        if self._is_closed:
            return self._wall_seconds
        return self._wall_seconds + max(0.0, self._clock() - self.mark)

    @property
    def _wall_seconds(self) -> float:
        return sum(self._seconds.values())  # the buckets, in the order of Totals.wall_seconds

    @property
    def recent_step_seconds(self) -> tuple[float, ...]:
        """The last ``window_steps`` measured steps with their rollouts, oldest first: what a projection repeats."""
        return tuple(seconds for seconds, _ in self._recent)

    @property
    def recent_num_tokens(self) -> tuple[int, ...]:
        """Tokens of the same steps; empty when one did not show them."""
        tokens = tuple(count for _, count in self._recent if count is not None)
        return tokens if len(tokens) == len(self._recent) else ()

    @property
    def pause_seconds(self) -> dict[PauseKind, tuple[float, ...]]:
        """The last pauses of each kind in this session, oldest first."""
        return {kind: tuple(seconds for _, seconds in pauses) for kind, pauses in self._pauses.items()}

    def _advance(self, to: float | None) -> float:
        now, mark = self._clock() if to is None else to, self.mark
        seconds = max(0.0, now - mark)
        self._mark = mark + seconds
        return seconds
