"""The same job on other GPUs. Where the estimate is stood in for, only choice, price and order are under test."""

from __future__ import annotations

import datetime
import io
from typing import Any

import pytest
import yaml
from sample_answer import LLAMA, StandInEstimate, StandInEstimator, answer, estimate_with

from costmodel import comparison_tables, formats, tables
from costmodel.comparison import compare
from costmodel.errors import CostModelError, UnknownNameError
from costmodel.gpu_catalog import find_gpu, list_gpus
from costmodel.optimization import optimize
from costmodel.price_catalog import list_prices
from costmodel.skypilot import can_rent, resources_block
from costmodel.specs import Job, parse_job
from costmodel.spot import SpotTerms

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
    estimate_with(monkeypatch, TableEstimator(table))
    found = compare(JOB, gpus=list(table), as_is=True)
    assert list(dict.fromkeys(each.gpu for each in found)) == ["A40", "L40S", "H100 SXM", "H200 SXM", "T4", "V100-SXM2-16GB"]
    assert {each.gpu for each in found if each.on_pareto_front} == {"A40", "L40S", "H200 SXM"}
    assert {each.gpu for each in found if not each.fits} == {"T4", "V100-SXM2-16GB"}
    by_time = compare(JOB, gpus=list(table), as_is=True, by="time")
    fastest_first = list(dict.fromkeys(each.gpu for each in by_time))
    assert fastest_first == ["H200 SXM", "L40S", "H100 SXM", "A40", "T4", "V100-SXM2-16GB"]
    assert found[-1].error == "this GPU has no bf16 peak"
    assert found[-1].to_dict()["estimate"] is None


def test_every_gpu_with_an_on_demand_price_is_tried_at_each_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = StandInEstimator()
    estimate_with(monkeypatch, estimator)
    found = compare(JOB, as_is=True)
    offers = [(each.gpu, each.price.cloud) for each in found if each.price]
    assert len(offers) == len(found) == len(set(offers))
    assert set(offers) == {(price.gpu, price.cloud) for price in list_prices() if price.tier == "on_demand"}
    assert {(job.gpu, job.cloud) for job in estimator.jobs} == set(offers)
    assert {job.tier for job in estimator.jobs} == {"on_demand"}


def test_the_whole_machine_is_billed(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate_with(monkeypatch, StandInEstimator())
    (found,) = compare({**JOB, "cloud": "AWS"}, gpus=["A100-SXM4-40GB"])
    assert found.bill_usd_per_hour == 21.9576
    assert found.price is not None
    assert found.price.gpus_per_instance == 8


def test_each_tier_is_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate_with(monkeypatch, StandInEstimator())
    found = compare({**JOB, "cloud": "RunPod"}, gpus=["A40"], tiers=["on_demand", "spot"])
    assert {(each.price.tier, each.price.usd_per_gpu_hour) for each in found if each.price} == {
        ("on_demand", 0.44),
        ("spot", 0.28),
    }


def test_a_named_gpu_without_a_price_is_compared_in_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = StandInEstimator(total_usd=None)
    estimate_with(monkeypatch, estimator)
    (found,) = compare(JOB, gpus=["P100-PCIE-16GB"])
    assert found.price is None
    assert found.bill_usd_per_hour is None
    assert estimator.jobs[0].cloud is None


def test_a_described_gpu_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = StandInEstimator()
    estimate_with(monkeypatch, estimator)
    mine = find_gpu("A40").model_copy(update={"name": "my card"})
    (found,) = compare(JOB, gpus=[mine])
    assert found.gpu == "my card"
    assert estimator.jobs[0].gpu == mine


def test_the_given_price_is_that_of_the_jobs_own_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = StandInEstimator()
    estimate_with(monkeypatch, estimator)
    compare({**JOB, "gpu": "NVIDIA A40", "usd_per_gpu_hour": 0.79}, gpus=["A40", "L40S"], as_is=True)
    prices = {str(job.gpu): job.usd_per_gpu_hour for job in estimator.jobs}
    assert prices == {"A40": 0.79, "L40S": None}


def test_unknown_totals_are_ordered_by_the_bill_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate_with(monkeypatch, StandInEstimator(total_usd=None, total_seconds=None))
    found = compare(JOB, gpus=["H100 SXM", "A40", "L40S"])
    bills = [each.bill_usd_per_hour for each in found]
    assert bills == sorted(bills, key=lambda bill: bill or 0)
    assert not any(each.on_pareto_front for each in found)


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate_with(monkeypatch, TableEstimator({"A40": ("error", None, None)}))
    with pytest.raises(CostModelError, match="no bf16 peak"):
        compare(JOB, gpus=["A40"])
    with pytest.raises(UnknownNameError, match="no GPU matches"):
        compare(JOB, gpus=["A41"])
    with pytest.raises(UnknownNameError, match="no cloud matches"):
        compare({**JOB, "cloud": "nosuch"})
    with pytest.raises(UnknownNameError, match="no tier matches"):
        compare(JOB, gpus=["A40"], tiers=["preemptible"])
    with pytest.raises(CostModelError, match="no GPU has a dated reserved price at AWS"):
        compare({**JOB, "cloud": "AWS"}, tiers=["reserved"])
    with pytest.raises(UnknownNameError, match="no order matches 'price'"):
        compare(JOB, by="price")
    with pytest.raises(CostModelError, match="no Job field"):
        compare({**JOB, "lora_rank": 8})


def test_table_of_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"A40": ("fits", 10.0, 7200.0), "V100-SXM2-16GB": ("error", None, None)}
    estimate_with(monkeypatch, TableEstimator(table))
    found = compare({**JOB, "cloud": "RunPod"}, gpus=list(table))
    narrow = comparison_tables.comparison_table(found)
    assert narrow.rows[0][:6] == ("*", "A40", "2.00 h", "$10.00", "0.44", "RunPod")
    assert narrow.rows[1][1:4] == ("V100-SXM2-16GB", "cannot run", "")
    shown = comparison_tables.comparison_table(found, wide=True)
    assert shown.rows[0][:3] == ("*", "A40", "fits")
    assert shown.rows[0][6:] == ("$0.44/h", "RunPod Secure A40 on_demand", "2026-08-19", "")
    assert shown.rows[1][1:5] == ("V100-SXM2-16GB", "error", "", "this GPU has no bf16 peak")


# --- with the real estimate


def test_a_machine_of_eight_costs_a_machine_of_eight() -> None:
    # AWS rents this GPU only as p4d.24xlarge, eight of them at 21.9576 an hour.
    (found,) = compare({**LLAMA, "cloud": "AWS"}, gpus=["A100-SXM4-40GB"])
    assert found.price is not None
    assert found.price.product == "p4d.24xlarge"
    assert found.total_seconds is not None
    assert found.total_usd == pytest.approx(found.total_seconds / 3600 * 21.9576)
    (eight,) = compare({**LLAMA, "cloud": "AWS", "num_gpus": 8}, gpus=["A100-SXM4-40GB"])
    assert eight.bill_usd_per_hour == 21.9576
    assert eight.total_seconds is not None
    assert eight.total_usd == pytest.approx(eight.total_seconds / 3600 * 21.9576)


def test_each_gpu_at_its_own_best_settings() -> None:
    gpus = ["A40", "H100 SXM", "B200"]
    own = {each.gpu: each for each in compare(LLAMA, gpus) if each.on_pareto_front or each.gpu in gpus}
    as_is = {each.gpu: each for each in compare(LLAMA, gpus, as_is=True)}
    for gpu in gpus:
        best, given = own[gpu].estimate, as_is[gpu].estimate
        assert best is not None
        assert given is not None
        assert as_is[gpu].settings == {}
        assert best.total_seconds is not None
        assert given.total_seconds is not None
        assert best.total_seconds <= given.total_seconds
        assert best.verdict == "fits"
        assert best.job["per_device_train_batch_size"] * best.job["gradient_accumulation_steps"] == 16
    # 80 GB hold the activations of this model, 45 GiB do not.
    assert own["H100 SXM"].settings["gradient_checkpointing"] is False
    assert "gradient_checkpointing" not in own["A40"].settings


def test_a_job_that_does_not_fit_as_it_is_may_fit_with_a_smaller_micro_batch() -> None:
    job = {**LLAMA, "per_device_train_batch_size": 64, "gradient_accumulation_steps": 1}
    (given,) = compare({**job, "cloud": "RunPod"}, ["A40"], as_is=True)
    (own,) = compare({**job, "cloud": "RunPod"}, ["A40"])
    assert (given.fits, own.fits) == (False, True)
    assert own.settings["per_device_train_batch_size"] * own.settings["gradient_accumulation_steps"] == 64


def test_spot_with_interruptions_is_ranked_by_what_is_expected() -> None:
    job = {**LLAMA, "cloud": "RunPod"}
    (plain,) = compare(job, ["A40"], ["spot"])
    (interrupted,) = compare(job, ["A40"], ["spot"], spot=SpotTerms(0.5, restart_seconds=600))
    assert plain.spot is None
    assert any("lost work" in warning for warning in plain.warnings)
    assert interrupted.spot is not None
    assert interrupted.warnings == ()
    assert plain.total_usd is not None
    assert plain.total_seconds is not None
    assert interrupted.total_usd == pytest.approx(plain.total_usd * interrupted.total_seconds / plain.total_seconds)
    lost = interrupted.spot.num_interruptions * (interrupted.spot.save_interval_seconds / 2 + 600)
    assert interrupted.total_seconds == pytest.approx(plain.total_seconds + lost, rel=0.02)  # where they are rare


def _table_lines(table: tables.Table) -> list[str]:
    stream = io.StringIO()
    tables.print_table(table, stream)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("tiers", [["on_demand"], ["spot", "community", "reserved"]])
def test_the_table_holds_100_columns_and_wide_says_the_rest(tiers: list[str]) -> None:
    found = compare({**LLAMA, "lengths": {"dataset": "math_14k"}, "num_samples": 1_500_000}, None, tiers)
    day = datetime.date(2026, 11, 30)
    for every_offer in (True, False):
        lines = _table_lines(comparison_tables.comparison_table(found, today=day, every_offer=every_offer))
        assert max(map(len, lines)) <= 100
        assert any(line.startswith("80 % of runs take ") for line in lines)
    wide = comparison_tables.comparison_table(found, today=day, wide=True)
    assert wide.columns[-1] == "settings"
    assert "checkpointing off" in " ".join(row[-1] for row in wide.rows)
    low, high = comparison_tables._common_interval(found)  # type: ignore[misc]
    for each in found:
        if each.estimate and each.estimate.total_seconds:
            assert low <= each.estimate.total_seconds_low / each.estimate.total_seconds <= 1  # type: ignore[operator]
            assert 1 <= each.estimate.total_seconds_high / each.estimate.total_seconds <= high  # type: ignore[operator]


def test_long_names_stay_apart() -> None:
    names = {gpu.name for gpu in list_gpus()}
    assert len({comparison_tables._short_gpu(name) for name in names}) == len(names)
    assert max(len(comparison_tables._short_gpu(name)) for name in names) <= 22
    assert comparison_tables._short_gpu("RTX PRO 6000 Blackwell Server") == "RTX PRO 6000 .. Server"


def test_beside_an_old_price_that_comes_first_stands_the_newest() -> None:
    day = datetime.date(2026, 11, 30)
    found = compare(LLAMA, ["B200", "A40"])
    first = next(each for each in found if each.gpu == "B200")
    assert first.price is not None
    assert first.price.as_of == "2026-03-22"  # cheap, but from spring
    table = comparison_tables.comparison_table(found, today=day, every_offer=False)
    ages = [row[6] for row in table.rows if row[1] == "B200"]
    assert ages == ["253 d!", "66 d"]
    assert "! = the price is older than 90 days" in table.title
    fresh = comparison_tables.comparison_table(found, today=datetime.date(2026, 4, 1), every_offer=False)
    assert [row[1] for row in fresh.rows].count("B200") == 1
    assert "!" not in fresh.title


def test_the_nvl_card_is_as_its_data_sheet_and_says_what_is_not_measured() -> None:
    """3.9 against 3.35 TB/s, 835 against 989 TFLOP/s, 400 against 700 W: NVIDIA's data sheets of H100."""
    nvl, sxm = find_gpu("H100 NVL"), find_gpu("H100 SXM")
    assert (nvl.memory_bandwidth_bytes_per_second, sxm.memory_bandwidth_bytes_per_second) == (3.9e12, 3.35e12)
    assert (nvl.peak_bf16_flops_per_second, sxm.peak_bf16_flops_per_second) == (835.5e12, 989e12)
    assert (nvl.tdp_watts, sxm.tdp_watts) == (400, 700)
    assert sxm.measured_bf16_matmul_flops_per_second is not None
    assert nvl.measured_bf16_matmul_flops_per_second is None
    assert "nobody measured" in nvl.notes


def test_old_prices_are_said() -> None:
    job = {**LLAMA, "cloud": "RunPod"}
    (fresh,) = compare(job, ["A40"], today=datetime.date(2026, 11, 9))
    (stale,) = compare(job, ["A40"], today=datetime.date(2026, 11, 30))
    assert fresh.warnings == ()
    assert stale.warnings == ("the price of RunPod A40 on_demand is 103 days old: check it, or run ftcost prices --update",)


def test_skypilot_block_is_yaml_that_skypilot_reads() -> None:
    found = compare(LLAMA, ["A40", "A100-SXM4-40GB", "L40S"], ["on_demand", "spot"])
    text = resources_block(found)
    ordered = yaml.safe_load(text)["resources"]["ordered"]
    # The fields and clouds that SkyPilot 0.14 takes (sky/utils/schemas.py, sky/clouds).
    assert {name for entry in ordered for name in entry} <= {"infra", "accelerators", "instance_type", "use_spot"}
    known = {"aws", "gcp", "lambda", "runpod", "azure", "cudo", "nebius", "mithril", "verda", "vast", "do"}
    assert {entry["infra"].split("/")[0] for entry in ordered} <= known
    p4d = {"infra": "aws/us-east-1", "accelerators": "A100:8", "instance_type": "p4d.24xlarge", "use_spot": False}
    assert p4d in ordered
    assert {"infra": "runpod", "accelerators": "A40:1", "use_spot": True} in ordered
    assert "# not on SkyPilot: L40S at CoreWeave" in text
    assert len(ordered) + text.count("not on SkyPilot") == len([each for each in found if each.fits])


def test_skypilot_block_without_anything_that_fits() -> None:
    """An empty block would let SkyPilot take any machine, so there is none."""
    found = compare({**LLAMA, "cloud": "AWS"}, ["T4"])
    assert not any(map(can_rent, found))
    assert yaml.safe_load(resources_block(found)) is None
    fits = compare({**LLAMA, "cloud": "CoreWeave"}, ["L40S"])
    assert fits[0].fits
    assert not can_rent(fits[0])
    text = resources_block(fits)
    assert yaml.safe_load(text) is None
    assert "# not on SkyPilot: L40S at CoreWeave" in text


def test_what_is_too_small_is_shown_where_it_comes_closest() -> None:
    job = {**LLAMA, "gradient_checkpointing": False, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    (own,) = compare({**job, "cloud": "AWS"}, ["T4"], as_is=True)[:1]
    (closest,) = compare({**job, "cloud": "AWS"}, ["T4"])[:1]
    assert own.estimate is not None
    assert closest.estimate is not None
    assert not closest.fits
    assert closest.estimate.memory.peak_device_bytes < 0.9 * own.estimate.memory.peak_device_bytes
    assert closest.estimate.job["gradient_checkpointing"] is True
    assert closest.settings["per_device_train_batch_size"] == 1
    assert closest.settings["gradient_accumulation_steps"] == 16


def test_an_order_that_is_not_known_is_not_claimed() -> None:
    job = {"model": "meta-llama/Llama-2-7b-hf", "method": "lora", "dtype": "bfloat16", "bf16": True, "max_length": 1024}
    for fields, title in (
        ({}, "Same job, in no order of time or cost: both are unknown, as lengths are not given (--lengths "),
        ({"lengths": {"fixed": 512}}, "Same job, in no order of time or cost: both are unknown, as the number of samples "),
        ({"lengths": {"fixed": 512}, "num_samples": 100, "num_train_epochs": 1}, "Same job, cheapest first (* = nothing "),
    ):
        table = comparison_tables.comparison_table(compare({**job, **fields}, gpus=["A40", "L40S"]))
        assert table.title.startswith(title)


def test_a_card_without_a_rate_for_the_type_is_named_in_the_title() -> None:
    job: dict[str, Any] = {
        "model": "meta-llama/Llama-3.2-1B",
        "method": "lora",
        "max_length": 256,
        "lengths": {"fixed": 256},
    }
    job |= {"num_samples": 100, "num_train_epochs": 1}
    said = "unknown: no rate for bfloat16, which this job computes in, is known of T4"
    for types, expected in (({"bf16": True}, True), ({"fp16": True}, False)):
        title = comparison_tables.comparison_table(compare({**job, **types}, gpus=["L40S", "T4"])).title
        assert (said in title.splitlines()) is expected


def test_what_a_notebook_shows_of_a_search_is_a_line_for_each_candidate() -> None:
    job: dict[str, Any] = {
        "model": "meta-llama/Llama-3.2-1B",
        "method": "lora",
        "max_length": 256,
        "lengths": {"fixed": 256},
    }
    job |= {"num_samples": 10_000, "num_train_epochs": 1, "bf16": True}
    found = compare(job, gpus=["L40S", "T4"])
    shown = repr(found[0])
    assert shown.startswith("<Candidate 1 x L40S at RunPod on_demand: fits, ")
    assert shown.endswith(f", {formats.format_usd(found[0].total_usd)}>")
    assert len(max(map(repr, found), key=len)) < 300
    best = optimize(job, gpus=["L40S"])
    lines = repr(best).splitlines()
    assert lines[0] == "<OptimizeResult"
    assert lines[2].startswith("best: <Candidate 1 x L40S at RunPod on_demand: fits, ")
    assert len(lines) == 3 + len(best.changes) + len(best.others)


def test_a_job_is_given_as_estimate_takes_it() -> None:
    """A mapping, its fields as keywords, or both; a misspelled argument is named."""
    fields: dict[str, Any] = {
        "model": "meta-llama/Llama-3.2-1B",
        "method": "lora",
        "max_length": 256,
        "lengths": {"fixed": 256},
        "num_samples": 1000,
    }
    by_mapping = compare({**fields, "lora_r": 4}, gpus=["L40S", "T4"], as_is=True)
    assert compare(**fields, lora_r=4, gpus=["L40S", "T4"], as_is=True) == by_mapping
    assert compare({**fields, "lora_r": 8}, ["L40S", "T4"], lora_r=4, as_is=True) == by_mapping
    best = optimize({**fields, "lora_r": 4}, gpus=["L40S"]).best.estimate
    assert optimize(**fields, lora_r=4, gpus=["L40S"]).best.estimate == best
    for call in (compare, optimize):
        with pytest.raises(CostModelError, match="no Job field matches 'gpuss'; nearest: gpu"):
            call(**fields, gpuss=["L40S"])
        with pytest.raises(CostModelError, match="no model is named"):
            call()
