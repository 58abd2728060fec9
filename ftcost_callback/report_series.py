"""One run as the report holds it: columns of numbers, pauses, expert-load frames, and the totals of them.

A record of a million steps is never held as rows: each step is one number in each column (8 bytes), and expert loads
are added up into at most a few dozen frames while they are read.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise
from operator import mul
from pathlib import Path
from typing import Any, Final

from costmodel.units import SECONDS_PER_HOUR
from ftcost_callback.records import MAX_NUMBER

MAX_FRAME_CELLS: Final = 250_000
"""Cells of all expert-load frames of one run together, at about five characters each."""

MAX_FRAMES: Final = 60

NOT_MEASURED: Final = math.nan
"""Inside a column only: whatever reads one turns it into ``None`` or leaves it out."""

STEP_COLUMNS: Final = (
    "global_step",
    "session_index",
    "num_steps",
    "step_seconds",
    "data_wait_seconds",
    "rollout_seconds",
    "num_tokens",
    "num_non_padding_tokens",
    "num_supervised_tokens",
    "forward_seconds",
    "backward_seconds",
    "optimizer_seconds",
    "is_profiled",
    "repeated",
    "busy_fraction",
    "sm_active_fraction",
    "memory_used_bytes",
    "power_watts",
    "energy_joules",
    "throttle_reasons",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "mfu",
    "hfu",
    "elapsed_seconds",
    "spent_usd",
    "projected_total_usd",
    "projected_total_usd_low",
    "projected_total_usd_high",
    "projected_total_seconds",
    "projected_total_seconds_low",
    "projected_total_seconds_high",
)

PAUSE_KINDS: Final = ("eval", "save", "log", "other")
DRAWN_PAUSE_KINDS: Final = ("eval", "save")


def finite(value: object) -> float | None:
    """``value`` as a float, or ``None`` when it is no finite number, or one so large that sums of it are not."""
    if isinstance(value, (int, float)) and -MAX_NUMBER < value < MAX_NUMBER:
        return float(value)
    return None


def is_complete(values: Sequence[float]) -> bool:
    """Whether each of these finite numbers was measured."""
    return not math.isnan(sum(values))


def pairs_of(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    """The points where both are measured."""
    return [(a, b) for a, b in zip(x, y, strict=True) if a == a and b == b]


@dataclass
class ExpertFrames:
    """Expert loads over time, added up into at most ``MAX_FRAMES`` frames of equally many rows."""

    layer_names: list[str] = field(default_factory=list)
    frames: list[tuple[int, int, list[list[float]]]] = field(default_factory=list)  # first step, last step, tokens
    reasons: list[str] = field(default_factory=list)  # why loads are partial or missing
    remark: str | None = None  # what to know about a load that is whole, by its last row
    global_step: array[float] = field(default_factory=lambda: array("d"))
    mean_max_over_mean: array[float] = field(default_factory=lambda: array("d"))  # mean over layers
    worst_max_over_mean: array[float] = field(default_factory=lambda: array("d"))  # the worst layer
    _rows_per_frame: int = 1
    _rows_in_last: int = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Take one ``expert_load`` row. Raises ``ValueError`` when its fields do not have the contract's shape."""
        status, reason = row.get("status", "recorded"), row.get("reason")
        if status != "recorded":
            said = str(reason or f"status {status}, no reason in the record")
            if said not in self.reasons:
                self.reasons.append(said)
        elif reason:
            self.remark = str(reason)
        matrix = _matrix(row.get("tokens_per_expert"))
        step = finite(row.get("global_step"))
        if status == "not_recorded" or not matrix or step is None:
            return
        ratios = [max(layer) * len(layer) / sum(layer) for layer in matrix if sum(layer) > 0]
        if not ratios:
            return
        if not self.frames:
            names = row.get("layer_names") or []
            self.layer_names = [str(name) for name in names] if len(names) == len(matrix) else []
            self.layer_names = self.layer_names or [f"layer {index}" for index in range(len(matrix))]
        elif [len(layer) for layer in matrix] != [len(layer) for layer in self.frames[0][2]]:
            raise ValueError("expert_load rows of different shapes")
        self.global_step.append(step)
        self.mean_max_over_mean.append(statistics.fmean(ratios))
        self.worst_max_over_mean.append(max(ratios))
        self._merge(int(step), matrix)

    def _merge(self, step: int, matrix: list[list[float]]) -> None:
        if self.frames and self._rows_in_last < self._rows_per_frame:
            first, _, tokens = self.frames[-1]
            self.frames[-1] = (first, step, _sum(tokens, matrix))
            self._rows_in_last += 1
            return
        self.frames.append((step, step, matrix))
        self._rows_in_last = 1
        cells = sum(len(layer) for layer in matrix)
        limit = max(2, min(MAX_FRAMES, MAX_FRAME_CELLS // max(1, cells)))
        if len(self.frames) > limit:
            pairs = [self.frames[index : index + 2] for index in range(0, len(self.frames), 2)]
            self._rows_in_last += self._rows_per_frame if len(pairs[-1]) == 2 else 0
            self._rows_per_frame *= 2
            self.frames = [
                (pair[0][0], pair[-1][1], _sum(pair[0][2], pair[1][2]) if len(pair) == 2 else pair[0][2]) for pair in pairs
            ]


def _matrix(value: object) -> list[list[float]]:
    if not isinstance(value, list) or not all(isinstance(layer, list) for layer in value):
        return []
    matrix = [[finite(tokens) for tokens in layer] for layer in value]
    if any(tokens is None or tokens < 0 for layer in matrix for tokens in layer):
        raise ValueError("expert_load counts that are no numbers")
    return [[float(tokens or 0) for tokens in layer] for layer in matrix if layer]


def _sum(left: list[list[float]], right: list[list[float]]) -> list[list[float]]:
    return [[a + b for a, b in zip(one, other, strict=True)] for one, other in zip(left, right, strict=True)]


@dataclass
class RunSeries:
    """One run, all its sessions that this file holds."""

    path: Path
    run_id: str | None = None
    sessions: list[dict[str, Any]] = field(default_factory=list)
    predictions: list[dict[str, Any]] = field(default_factory=list)
    predicted_in: list[int] = field(default_factory=list)  # for each prediction: sessions that had begun by then
    budgets: list[dict[str, Any]] = field(default_factory=list)
    profiles: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    columns: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in STEP_COLUMNS})
    pause_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PAUSE_KINDS, 0.0))
    pauses: dict[str, list[tuple[int, float]]] = field(  # kind -> (global_step, seconds)
        default_factory=lambda: {kind: [] for kind in DRAWN_PAUSE_KINDS}
    )
    experts: ExpertFrames = field(default_factory=ExpertFrames)
    remarks: list[str] = field(default_factory=list)  # what of the file could not be read
    session_starts: list[int] = field(default_factory=list)  # places in the columns
    absent: array[float] = field(default_factory=lambda: array("d"))  # the one column of all that no row had

    @property
    def num_step_rows(self) -> int:
        return len(self.columns["global_step"])

    @property
    def has_rows(self) -> bool:
        return bool(self.num_step_rows or self.sessions or self.predictions or self.summary)

    def session(self, name: str) -> dict[str, Any]:
        """The latest session's mapping of that name, empty when no session has it."""
        for session in reversed(self.sessions):
            if isinstance(session.get(name), dict) and session[name]:
                return dict(session[name])
        return {}

    def session_value(self, name: str) -> Any:
        return next((one[name] for one in reversed(self.sessions) if one.get(name) is not None), None)

    def add_prediction(self, row: dict[str, Any]) -> None:
        self.predictions.append(row)
        self.predicted_in.append(len(self.sessions))

    def prediction(self, basis: str) -> dict[str, Any]:
        """The latest of that basis that is of the run as it was planned last; empty when there is none.

        A session predicts the whole run. One that planned other steps, or trained on another device, predicted another run
        than the last session's.
        """
        planned = self._plan_of(len(self.sessions))
        row: dict[str, Any]
        for row, session in zip(reversed(self.predictions), reversed(self.predicted_in), strict=True):
            differs = any(
                one is not None and other is not None and one != other
                for one, other in zip(self._plan_of(session), planned, strict=True)
            )
            if row.get("basis") == basis and not differs:
                return row
        return {}

    def _plan_of(self, number: int) -> tuple[Any, Any]:
        """(steps, device) of the session of that number, from 1 on."""
        session = self.sessions[number - 1] if 0 < number <= len(self.sessions) else {}
        device = session.get("device")
        return finite(session.get("max_steps")), device.get("name") if isinstance(device, dict) else None

    def measured(self, name: str) -> list[float]:
        """The measured values of one column, in file order."""
        column = self.columns[name]
        return [] if column is self.absent else [value for value in column if value == value]

    def num_tokens(self, name: str) -> float | None:
        """Of that kind, over all steps: what the record's rows hold, and what the sessions before its first had counted."""
        counted = self.total(name)
        earlier = self.sessions[0].get("earlier_tokens") if self.sessions else None
        if counted is None or not isinstance(earlier, dict):
            return counted
        before = finite(earlier.get(name))
        return counted + before if before is not None else None

    def last(self, name: str) -> float | None:
        return next((value for value in reversed(self.columns[name]) if value == value), None)

    @property
    def last_session_start(self) -> int | None:
        """The place of the last session's first row; ``None`` where it has none."""
        if not self.session_starts:
            return None
        of_rows = self.columns["session_index"][self.session_starts[-1]]
        number = finite(self.sessions[-1].get("session_index")) if self.sessions else None
        return self.session_starts[-1] if number is None or of_rows != of_rows or of_rows == number else None

    def projected(self, name: str) -> float | None:
        """As the last session projected it: those before may have had another plan, or another price."""
        start = self.last_session_start
        column = self.columns[name]
        if start is None or column is self.absent:
            return None
        return next((value for value in reversed(column[start:]) if value == value), None)

    def total(self, name: str) -> float | None:
        """Sum over the steps; a row of a very long run stands for ``num_steps`` of them, with their mean."""
        sums = self.sums(name)
        return sums[0] if sums is not None else None

    def sums(self, name: str, left_out: Iterable[int] = ()) -> tuple[float, float] | None:
        """(sum over the steps, number of steps) of the rows that know it, those at the places ``left_out`` aside."""
        column, counts = self.columns[name], self.columns["num_steps"]
        if column is self.absent:
            return None
        if places := list(left_out):
            kept = bytearray(b"\1") * len(column)
            for place in places:
                kept[place] = 0
            column, counts = array("d", compress(column, kept)), array("d", compress(counts, kept))
        if not is_complete(column):
            known = [value == value for value in column]
            column, counts = array("d", compress(column, known)), array("d", compress(counts, known))
        return (math.fsum(map(mul, column, counts)), math.fsum(counts)) if column else None

    def sessions_rows(self) -> Iterator[tuple[int, int]]:
        """(first place, place after the last) in the columns, for each session that has step rows."""
        yield from pairwise([*self.session_starts, self.num_step_rows])

    def summary_value(self, name: str) -> float | None:
        """The summary's figure of that name."""
        return finite((self.summary or {}).get(name))


@dataclass(frozen=True)
class Totals:
    """Seconds of a run over all its sessions; the buckets sum to ``wall_seconds``. ``spent_usd`` None: no price."""

    wall_seconds: float
    bucket_seconds: dict[str, float]  # train (data_wait left out), data_wait, rollout, eval, save, log, startup, other
    wasted_seconds: float
    spent_usd: float | None
    finished: bool


def totals(run: RunSeries) -> Totals:
    """From the summary; for a run that has none (killed, still going) from its rows."""
    train = run.total("step_seconds") or 0.0
    seconds = {
        "train": train,
        "data_wait": run.total("data_wait_seconds") or 0.0,
        **run.pause_seconds,
        "rollout": run.total("rollout_seconds") or 0.0,
        "startup": sum(finite(session.get("startup_seconds")) or 0.0 for session in run.sessions),
    }
    first = run.sessions[0] if run.sessions else {}
    for name, value in seconds_before(first).items():
        if name in seconds:
            seconds[name] += value
    seconds["data_wait"] += finite(first.get("earlier_data_wait_seconds")) or 0.0
    wall = max(run.last("elapsed_seconds") or 0.0, sum(seconds.values()) - seconds["data_wait"])
    wasted = finite(first.get("earlier_wasted_seconds")) or 0.0
    if run.measured("repeated"):
        is_first_time = [place for place, repeated in enumerate(run.columns["repeated"]) if repeated != 1]
        for name in ("step_seconds", "rollout_seconds"):
            sums = run.sums(name, is_first_time)
            wasted += sums[0] if sums is not None else 0.0
    spent = _spent_usd(run, wall)
    if run.summary is not None:
        wall = run.summary_value("wall_seconds") or wall
        seconds = {name: _or(run.summary_value(f"{name}_seconds"), value) for name, value in seconds.items()}
        wasted = _or(run.summary_value("wasted_seconds"), wasted)
        spent = run.summary_value("spent_usd") if run.summary_value("spent_usd") is not None else spent
    seconds["train"] = max(0.0, seconds["train"] - seconds["data_wait"])
    # Whatever no row accounts for is billed as well: it is "other", so that the buckets sum to the wall time.
    rest = wall - (sum(seconds.values()) - seconds["other"])
    seconds["other"] = rest if rest > 1e-9 * wall else 0.0  # below that it is rounding
    order = ("train", "data_wait", "rollout", "eval", "save", "log", "startup", "other")
    finished = run.summary is not None and run.summary.get("status", "finished") == "finished"
    return Totals(wall, {name: seconds[name] for name in order}, wasted, spent, finished)


def _spent_usd(run: RunSeries, wall_seconds: float) -> float | None:
    """By the last row that says, and what came after it at the price of each session; ``None`` where the last has none."""
    rates = usd_per_hour_of_sessions(run)
    points = spent_points(run, 0, run.num_step_rows)
    elapsed, spent = points[-1] if points else (0.0, 0.0)
    begins = [sum(seconds_before(session).values()) for session in run.sessions]
    if not rates or rates[-1] is None:
        start = run.last_session_start
        if not elapsed or start is None or not spent_points(run, start, run.num_step_rows):
            return None
        return spent + (wall_seconds - elapsed) * spent / elapsed  # of an older record
    if not points and begins[0]:
        return None  # what came before this record is said by a row alone
    for ends_at, rate in zip([*begins[1:], wall_seconds], rates, strict=True):
        if ends_at > elapsed and rate is not None:
            spent += (ends_at - elapsed) / SECONDS_PER_HOUR * rate
            elapsed = ends_at
    return spent


def seconds_before(session: Mapping[str, Any]) -> dict[str, float]:
    """Seconds that the sessions before took, by bucket; empty where the row does not say."""
    earlier = session.get("earlier_seconds")
    if not isinstance(earlier, dict):
        return {}
    return {str(name).removesuffix("_seconds"): finite(value) or 0.0 for name, value in earlier.items()}


def price_of(session: Mapping[str, Any]) -> float | None:
    """Dollars an hour of one GPU."""
    price = session.get("price")
    return finite(price.get("usd_per_gpu_hour")) if isinstance(price, dict) else None


def usd_per_hour_of_sessions(run: RunSeries) -> list[float | None]:
    """Of the whole job in each session; of older records by their step rows. What had no price counts at the next one's."""
    by_rows: dict[float, float] = {}
    for start, end in run.sessions_rows():
        points = spent_points(run, start, end)
        if points and (seconds := points[-1][0] - points[0][0]) > 0:
            by_rows[run.columns["session_index"][start]] = (points[-1][1] - points[0][1]) / seconds * SECONDS_PER_HOUR
    rates: list[float | None] = []
    for place, session in enumerate(run.sessions):
        said, number = finite(session.get("usd_per_hour")), finite(session.get("session_index"))
        price, job = price_of(session), session.get("job")
        num_gpus = finite(job.get("num_gpus")) if isinstance(job, dict) else None
        at_price = price * (num_gpus or 1.0) if price is not None else None
        rates.append(said if said is not None else by_rows.get(float(place) if number is None else number, at_price))
    for place in reversed(range(len(rates) - 1)):
        rates[place] = rates[place + 1] if rates[place] is None else rates[place]
    return rates


def spent_points(run: RunSeries, start: int, end: int) -> list[tuple[float, float]]:
    """(elapsed seconds, dollars spent) of the first and the last of these rows that say both."""
    elapsed, spent = run.columns["elapsed_seconds"], run.columns["spent_usd"]

    def is_known(place: int) -> bool:
        return elapsed[place] == elapsed[place] and spent[place] == spent[place]

    ends = (next(filter(is_known, order), None) for order in (range(start, end), range(end - 1, start - 1, -1)))
    return [(elapsed[place], spent[place]) for place in ends if place is not None]


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
