"""The GPU's step clock on stand-in events: the arithmetic, not the driver."""

from __future__ import annotations

import pytest
from tiny_runs import FakeClock

from ftcost_callback.step_clock import CudaStepClock, HostStepClock


class Gpu:
    """A stream whose work ends ``behind`` seconds after the host issued it; events are stamped in milliseconds."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.behind = 0.0

    def event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.at = 0.0

    def record(self) -> None:
        self.at = self.gpu.clock.now + self.gpu.behind

    def query(self) -> bool:
        return self.gpu.clock.now >= self.at

    def synchronize(self) -> None:
        self.gpu.clock.now = max(self.gpu.clock.now, self.at)

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1000


def test_a_host_that_runs_ahead(fake_clock: FakeClock) -> None:
    gpu = Gpu(fake_clock)
    clock = CudaStepClock(gpu.event, fake_clock)
    begin = fake_clock.now
    gpu.behind = 2.0
    first = clock.mark()
    assert clock.ended_at(first, wait=False) is None
    fake_clock.pass_seconds(0.5)
    second = clock.mark()
    fake_clock.pass_seconds(1.6)
    assert clock.ended_at(first, wait=False) == pytest.approx(begin + 2.0)
    assert clock.ended_at(second, wait=False) is None
    assert clock.ended_at(second, wait=True) == pytest.approx(begin + 2.5)
    assert fake_clock.now == pytest.approx(begin + 2.5)


def test_an_end_lies_between_its_issue_and_now(fake_clock: FakeClock) -> None:
    gpu = Gpu(fake_clock)
    clock = CudaStepClock(gpu.event, fake_clock)
    event, issued_at = clock.mark()
    event.at = fake_clock.now - 5.0  # two clocks that drift
    assert clock.ended_at((event, issued_at), wait=False) == issued_at
    event, issued_at = clock.mark()
    fake_clock.pass_seconds(1.0)
    event.at = fake_clock.now
    clock._last_event.at = -1000.0
    assert clock.ended_at((event, issued_at), wait=False) == fake_clock.now


def test_the_host_clock_knows_at_once(fake_clock: FakeClock) -> None:
    clock = HostStepClock(fake_clock)
    mark = clock.mark()
    fake_clock.pass_seconds(3.0)
    assert clock.ended_at(mark, wait=False) == fake_clock.now - 3.0
