from __future__ import annotations

from ftcost_callback.budget import BudgetWatch


def crossed(watch: BudgetWatch, spent: float, **more: float) -> list[tuple[str, str]]:
    rows = watch.check(global_step=7, elapsed_seconds=spent * 1800.0, spent_usd=spent, **more)
    return [(row.threshold, row.action) for row in rows]


def test_each_threshold_is_said_once() -> None:
    watch = BudgetWatch(budget_usd=10.0)
    assert crossed(watch, 4.99) == []
    assert crossed(watch, 5.0) == [("50 %", "warned")]
    assert crossed(watch, 5.5) == []
    assert crossed(watch, 11.0) == [("80 %", "warned"), ("100 %", "warned")]
    assert crossed(watch, 12.0) == []


def test_the_projection_is_believed_from_twenty_steps_on_or_by_its_lower_end() -> None:
    assert crossed(BudgetWatch(budget_usd=10.0), 1.0, projected_usd=12.0, projected_usd_low=9.0) == []
    assert crossed(BudgetWatch(budget_usd=10.0), 1.0, projected_usd=12.0, projected_usd_low=10.5) == [
        ("projected", "warned")
    ]
    watch = BudgetWatch(budget_usd=10.0)
    more = {"projected_usd": 12.0, "projected_usd_low": 9.0, "num_measured_steps": 20}
    assert crossed(watch, 1.0, **more) == [("projected", "warned")]
    assert crossed(watch, 1.1, **more) == []


def test_stopping_at_the_budget() -> None:
    assert crossed(BudgetWatch(budget_usd=10.0, stop_at_budget=True), 10.0)[-1] == ("100 %", "stopped")


def test_hours_are_watched_without_a_price() -> None:
    watch = BudgetWatch(budget_hours=2.0)
    rows = watch.check(global_step=3, elapsed_seconds=3600.0, spent_usd=None)
    assert [(row.kind, row.threshold, row.spent, row.limit) for row in rows] == [("hours", "50 %", 1.0, 2.0)]


def test_a_resumed_run_says_nothing_twice_but_stops_again() -> None:
    watch = BudgetWatch(budget_usd=10.0, stop_at_budget=True)
    crossed(watch, 10.0)
    resumed = BudgetWatch(budget_usd=10.0, stop_at_budget=True, crossed=watch.crossed)
    assert crossed(resumed, 10.1) == [("100 %", "stopped")]
    raised = BudgetWatch(budget_usd=20.0, stop_at_budget=True, crossed=watch.crossed)
    assert crossed(raised, 10.1) == [("50 %", "warned")]
