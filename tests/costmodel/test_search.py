"""The same job on other GPUs. The estimate is stood in for: only choice, price and order are under test."""

from __future__ import annotations

from typing import Any

import pytest
from sample_answer import StandInEstimate, StandInEstimator, answer

from costmodel import report, search
from costmodel.catalog import find_gpu, list_prices
from costmodel.errors import CostModelError, UnknownNameError
from costmodel.specs import Job, parse_job

JOB = {"model": "mistralai/Mistral-7B-v0.1", "num_samples": 1000}


class TableEstimator:
    """GPU name -> verdict, dollars, seconds; remembers the jobs."""

    def __init__(self, table: dict[str, tuple[str, float | None, float | None]]) -> None:
        self.table = table
        self.jobs: list[Job] = []

    def __call__(self, job: Any) -> StandInEstimate:
        job = parse_job(job)
        self.jobs.append(job)
        verdict, usd, seconds = self.table[job.gpu]  # type: ignore[index]
        if verdict == "error":
            raise CostModelError("this GPU has no bf16 peak")
        return StandInEstimate(answer(verdict=verdict, total_usd=usd, total_seconds=seconds))


def test_fitting_first_by_dollars_with_the_pareto_front(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "A40": ("fits", 10.0, 7200.0),
        "L40S": ("tight", 12.0, 3600.0),
        "H100 SXM": ("fits", 15.0, 4000.0),  # dearer and slower than the L40S
        "T4": ("does_not_fit", 1.0, 100.0),
        "H200 SXM": ("fits", 30.0, 1800.0),
        "V100-SXM2-16GB": ("error", None, None),
    }
    monkeypatch.setattr(search, "estimate", TableEstimator(table))
    found = search.compare(JOB, gpus=list(table))
    assert [each.gpu for each in found] == ["A40", "L40S", "H100 SXM", "H200 SXM", "T4", "V100-SXM2-16GB"]
    assert [each.on_pareto_front for each in found] == [True, True, False, True, False, False]
    assert [each.fits for each in found] == [True, True, True, True, False, False]
    assert found[-1].error == "this GPU has no bf16 peak"
    assert found[-1].to_dict()["estimate"] is None


def test_every_gpu_with_an_on_demand_price_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = StandInEstimator()
    monkeypatch.setattr(search, "estimate", estimator)
    found = search.compare(JOB)
    assert {each.gpu for each in found} == {price.gpu for price in list_prices() if price.tier == "on_demand"}
    assert len(found) == len({each.gpu for each in found})
    for each, job in zip(sorted(found, key=lambda c: c.gpu), sorted(estimator.jobs, key=lambda j: str(j.gpu)), strict=True):
        assert each.price is not None
        assert (job.gpu, job.cloud, job.tier) == (each.price.gpu, each.price.cloud, "on_demand")


def test_the_whole_machine_is_billed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "estimate", StandInEstimator())
    (found,) = search.compare({**JOB, "cloud": "AWS"}, gpus=["A100-SXM4-40GB"])
    assert found.bill_usd_per_hour == 21.9576
    assert found.price is not None
    assert found.price.gpus_per_instance == 8


def test_each_tier_is_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "estimate", StandInEstimator())
    found = search.compare(JOB, gpus=["A40"], tiers=["on_demand", "spot"])
    assert {(each.price.tier, each.price.usd_per_gpu_hour) for each in found if each.price} == {
        ("on_demand", 0.44),
        ("spot", 0.28),
    }


def test_a_named_gpu_without_a_price_is_compared_in_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = StandInEstimator(total_usd=None)
    monkeypatch.setattr(search, "estimate", estimator)
    (found,) = search.compare(JOB, gpus=["P100-PCIE-16GB"])
    assert found.price is None
    assert found.bill_usd_per_hour is None
    assert estimator.jobs[0].cloud is None


def test_a_described_gpu_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = StandInEstimator()
    monkeypatch.setattr(search, "estimate", estimator)
    mine = find_gpu("A40").model_copy(update={"name": "my card"})
    (found,) = search.compare(JOB, gpus=[mine])
    assert found.gpu == "my card"
    assert estimator.jobs[0].gpu == mine


def test_the_given_price_is_that_of_the_jobs_own_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = StandInEstimator()
    monkeypatch.setattr(search, "estimate", estimator)
    search.compare({**JOB, "gpu": "NVIDIA A40", "usd_per_gpu_hour": 0.79}, gpus=["A40", "L40S"])
    prices = {str(job.gpu): job.usd_per_gpu_hour for job in estimator.jobs}
    assert prices == {"A40": 0.79, "L40S": None}


def test_unknown_totals_are_ordered_by_the_bill_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "estimate", StandInEstimator(total_usd=None, total_seconds=None))
    found = search.compare(JOB, gpus=["H100 SXM", "A40", "L40S"])
    bills = [each.bill_usd_per_hour for each in found]
    assert bills == sorted(bills, key=lambda bill: bill or 0)
    assert not any(each.on_pareto_front for each in found)


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "estimate", TableEstimator({"A40": ("error", None, None)}))
    with pytest.raises(CostModelError, match="no bf16 peak"):
        search.compare(JOB, gpus=["A40"])
    with pytest.raises(UnknownNameError, match="no GPU matches"):
        search.compare(JOB, gpus=["A41"])
    with pytest.raises(UnknownNameError, match="no cloud matches"):
        search.compare({**JOB, "cloud": "nosuch"})
    with pytest.raises(UnknownNameError, match="no tier matches"):
        search.compare(JOB, gpus=["A40"], tiers=["preemptible"])
    with pytest.raises(CostModelError, match="no GPU has a dated reserved price at AWS"):
        search.compare({**JOB, "cloud": "AWS"}, tiers=["reserved"])
    with pytest.raises(CostModelError, match="no Job field"):
        search.compare({**JOB, "lora_rank": 8})


def test_table_of_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"A40": ("fits", 10.0, 7200.0), "V100-SXM2-16GB": ("error", None, None)}
    monkeypatch.setattr(search, "estimate", TableEstimator(table))
    shown = report.comparison_table(search.compare({**JOB, "cloud": "RunPod"}, gpus=list(table)))
    assert shown.rows[0][:3] == ("*", "A40", "fits")
    assert shown.rows[0][6:] == ("$0.44/h", "RunPod Secure A40 on_demand", "2026-08-19")
    assert shown.rows[1][1:5] == ("V100-SXM2-16GB", "error", "", "this GPU has no bf16 peak")
