"""Dated prices: which rows may be chosen, and what is billed."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import io
import json
import logging
import re
import sys
import types
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from costmodel import cli, cli_lists
from costmodel.comparison import compare
from costmodel.errors import CostModelError, MissingExtraError, UnknownNameError
from costmodel.gpu_catalog import find_gpu
from costmodel.price_catalog import (
    TIERS,
    age_days,
    bill_usd_per_hour,
    find_price,
    list_price_rows,
    list_prices,
    price_row_from_cells,
    prices_from,
    smallest_gpu_that_holds,
    stale_price_warning,
    updated_prices_path,
)
from costmodel.price_update import csv_text, fetch_offers, gpu_of_offer, rows_from_offers, write_prices

CELLS = {
    "cloud": "Mithril",
    "gpu": "B200",
    "product": "p",
    "gpus_per_instance": "1",
    "region": "",
    "tier": "on_demand",
    "usd_per_gpu_hour": "3.45",
    "usd_per_instance_hour": "3.45",
    "as_of": "2026-03-22",
    "source": "s",
    "note": "",
    "rank": "yes",
}


def test_every_row_names_a_catalogued_gpu_and_a_tier() -> None:
    assert len(list_price_rows()) == 204
    for row in list_price_rows():
        assert find_gpu(row.price.gpu).name == row.price.gpu
        assert row.price.tier in TIERS


def test_machine_and_gpu_price_agree() -> None:
    for row in list_price_rows():
        price = row.price
        assert price.usd_per_gpu_hour * price.gpus_per_instance == pytest.approx(price.usd_per_instance_hour, rel=0.003)


def test_rows_that_are_never_chosen() -> None:
    reasons = Counter(row.not_ranked_because.split(";")[0].split(" by the price")[0] for row in list_price_rows())
    assert reasons["host part only"] == 4
    assert reasons["GPU part only"] == 1
    assert reasons["serverless"] == 10
    assert reasons["superseded"] == 12
    assert reasons["host of 2 vCPU and 4 GiB is too small to load a model"] == 8
    assert len(list_prices()) == reasons[""] == 204 - 37


def test_no_ranked_row_is_older_than_another_of_the_same_offer() -> None:
    dated = re.compile(r"\d{4}-\d\d-\d\d")
    newest: dict[tuple[object, ...], set[str]] = {}
    for price in list_prices():
        if dated.fullmatch(price.as_of):
            offer = (price.cloud, price.gpu, price.product, price.region, price.tier)
            newest.setdefault(offer, set()).add(price.as_of)
    assert {offer: dates for offer, dates in newest.items() if len(dates) > 1} == {}


def test_gcp_a100_is_the_whole_machine() -> None:
    # skypilot-catalog#31: that feed lists host and GPU apart; a price is only whole with both.
    price = find_price("A100-SXM4-40GB", cloud="gcp")
    assert price.usd_per_gpu_hour == 3.673
    assert "host only" not in price.product


def test_runpod_a40_by_tier() -> None:
    # skypilot#4914: spot 0.28, on demand 0.44 (0.49 was wrong).
    assert find_price("A40", cloud="RunPod", tier="spot").usd_per_gpu_hour == 0.28
    assert find_price("A40", cloud="runpod").usd_per_gpu_hour == 0.44


def test_v100_is_chosen_for_each_tier_apart() -> None:
    # skypilot#3111.
    assert find_price("V100-SXM2-16GB", cloud="GCP", tier="spot").usd_per_gpu_hour == 1.037
    assert find_price("V100-SXM2-16GB", cloud="GCP", tier="on_demand").usd_per_gpu_hour == 2.953


def test_mithril_b200() -> None:
    # skypilot#9156: 3.45, not the 0.01 of a broken feed.
    assert find_price("B200", cloud="Mithril").usd_per_gpu_hour == 3.45


@pytest.mark.parametrize("usd", ["0.01", "500"])
def test_an_absurd_price_is_never_ranked(usd: str) -> None:
    row = price_row_from_cells({**CELLS, "usd_per_gpu_hour": usd, "usd_per_instance_hour": usd})
    assert row.not_ranked_because.startswith("implausible")


@pytest.mark.parametrize("usd", ["0.0", "-1", "nan", "inf"])
def test_zero_is_unknown_and_not_free(usd: str) -> None:
    # gpuhunt#36.
    with pytest.raises(CostModelError, match="means unknown, not free"):
        price_row_from_cells({**CELLS, "usd_per_gpu_hour": usd})


def test_the_catalogue_holds_no_absurd_price() -> None:
    assert not [row for row in list_price_rows() if row.not_ranked_because.startswith("implausible")]


def test_superseded_prices_are_not_chosen() -> None:
    assert find_price("H100 SXM", cloud="AWS").usd_per_instance_hour == 55.04  # 98.32 before June 2025
    assert find_price("H100 SXM", cloud="RunPod").usd_per_gpu_hour == 3.99  # 3.29, then 3.49, before
    assert find_price("H100 SXM", cloud="Lambda").usd_per_gpu_hour == 4.29


def test_a_machine_of_eight_costs_a_machine_of_eight() -> None:
    price = find_price("A100-SXM4-40GB", cloud="AWS")
    assert (price.gpus_per_instance, price.usd_per_instance_hour) == (8, 21.9576)
    assert bill_usd_per_hour(price, 1) == bill_usd_per_hour(price, 8) == 21.9576
    assert bill_usd_per_hour(price, 9) == 2 * 21.9576


def test_the_cheapest_is_by_the_bill_and_not_by_the_gpu() -> None:
    # Lambda: a machine of eight is 3.99 a GPU, a machine of one 4.29.
    assert find_price("H100 SXM", cloud="Lambda", num_gpus=1).usd_per_instance_hour == 4.29
    assert find_price("H100 SXM", cloud="Lambda", num_gpus=4).usd_per_instance_hour == 16.36
    assert find_price("H100 SXM", cloud="Lambda", num_gpus=8).usd_per_instance_hour == 31.92


def test_several_gpus_want_one_machine() -> None:
    # AWS: eight g5.xlarge (8.05 an hour) are no machine of eight; g5.48xlarge is.
    assert find_price("A10G", cloud="AWS", num_gpus=8).product == "g5.48xlarge"
    assert find_price("A40", cloud="RunPod", num_gpus=2).usd_per_gpu_hour == 0.44


def test_the_cheapest_over_all_clouds() -> None:
    for num_gpus in (1, 8):
        best = find_price("H100 SXM", num_gpus=num_gpus)
        for price in list_prices():
            if price.gpu == "H100 SXM" and price.tier == "on_demand" and price.gpus_per_instance >= num_gpus:
                assert bill_usd_per_hour(best, num_gpus) <= bill_usd_per_hour(price, num_gpus)


def test_an_unsaid_tier_is_on_demand_or_the_clouds_only_one() -> None:
    assert find_price("A40", tier=None).tier == "on_demand"
    assert find_price("A40", cloud="vast.ai", tier=None).tier == "community"
    with pytest.raises(CostModelError, match="no dated on_demand price for A40 at Vast"):
        find_price("A40", cloud="vast")


def test_no_price_lists_what_exists() -> None:
    with pytest.raises(
        CostModelError, match=r"no dated reserved price for A40.*RunPod spot 0\.28.*give the price: usd_per_gpu_hour"
    ):
        find_price("A40", tier="reserved")
    with pytest.raises(CostModelError, match=r"known for this GPU .*: none"):
        find_price("P100-PCIE-16GB")


def test_a_cloud_that_is_like_none_gets_the_list_and_a_slip_the_nearest() -> None:
    with pytest.raises(
        UnknownNameError, match=r"no cloud matches 'nowhere'; known: AWS, .*, OpenRelay, .*; or give the price"
    ):
        find_price("A40", cloud="nowhere")
    with pytest.raises(UnknownNameError, match="nearest: Hyperstack;"):
        find_price("A40", cloud="hyperstck")


def test_unknown_cloud_and_tier() -> None:
    with pytest.raises(UnknownNameError, match="nearest: RunPod"):
        find_price("A40", cloud="runpodd")
    with pytest.raises(UnknownNameError, match="known: community, on_demand, reserved, spot"):
        find_price("A40", tier="preemptible")


def test_age_is_known_only_for_a_full_date() -> None:
    today = datetime.date(2026, 11, 9)
    price = find_price("A40", cloud="RunPod")
    assert price.as_of == "2026-08-19"
    assert age_days(price.as_of, today) == 82
    assert age_days("2026 (catalog commit date not stored)", today) is None
    assert age_days("2025-05", today) is None


# --- age


@pytest.mark.parametrize(
    ("as_of", "today", "said"),
    [
        ("2026-08-19", "2026-11-17", None),  # 90 days
        ("2026-08-19", "2026-11-18", "is 91 days old"),
        ("2025-05", "2025-08-29", None),  # at least 90 days: its last day counts
        ("2025-05", "2025-08-30", "is at least 91 days old"),
        ("2025-12", "2026-11-09", "is at least 313 days old"),
        ("2026 (catalog commit date not stored)", "2026-11-30", None),
        ("2024", "2026-11-30", "is at least 699 days old"),
        ("", "2026-11-30", None),
    ],
)
def test_a_price_older_than_90_days_is_said(as_of: str, today: str, said: str | None) -> None:
    price = find_price("A40", cloud="RunPod").model_copy(update={"as_of": as_of})
    warning = stale_price_warning(price, datetime.date.fromisoformat(today))
    if said is None:
        assert warning is None
    else:
        assert warning == f"the price of RunPod A40 on_demand {said}: check it, or run ftcost prices --update"


def test_the_commands_say_how_old_a_price_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for module in (cli, cli_lists):
        monkeypatch.setattr(module, "today", lambda: datetime.date(2026, 11, 30))
    flags = ["-m", "meta-llama/Llama-2-7b-hf", "--method", "lora", "--bf16", "--framework", "trl", "-b", "1"]
    flags += ["--lengths", "dataset:math_14k", "--samples", "1000", "--cloud", "RunPod"]
    sentence = "ftcost: the price of RunPod A40 on_demand is 103 days old: check it, or run ftcost prices --update\n"
    assert cli.run(["estimate", *flags, "-g", "A40"]) == 0
    assert capsys.readouterr().err == sentence
    assert cli.run(["compare", *flags, "--gpus", "A40"]) == 0
    assert capsys.readouterr().err == sentence
    assert cli.run(["prices", "A40", "--cloud", "RunPod"]) == 0
    assert "older than 90 days" in capsys.readouterr().err


# --- a file of one's own

OWN = """\
cloud,gpu,tier,usd_per_gpu_hour,gpus_per_instance,as_of
our cluster,nvidia a40,on_demand,0.2,4,2026-11-01
"""


def _own(tmp_path: Path, text: str) -> str:
    path = tmp_path / "own.csv"
    path.write_text(text)
    return str(path)


def test_own_prices_are_the_only_ones(tmp_path: Path) -> None:
    with prices_from(_own(tmp_path, OWN)) as table:
        assert table.refused == ()
        (price,) = list_prices()
        assert (price.gpu, price.gpus_per_instance, price.usd_per_instance_hour) == ("A40", 4, 0.8)
        assert find_price("A40") == price
        assert bill_usd_per_hour(price, 1) == 0.8
        with pytest.raises(CostModelError, match=r"known for this GPU .*: none"):
            find_price("H100 SXM")
    assert find_price("A40").cloud == "RunPod"


def test_own_prices_by_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCOST_PRICE_FILE", _own(tmp_path, OWN))
    assert [price.cloud for price in list_prices()] == ["our cluster"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("c,A40,on_demand,0.0,1,", "a price of 0.0 means unknown, not free"),
        ("c,A40,on_demand,0.01,1,", "implausible: 0.01 USD per GPU-hour"),
        ("c,A40,on_demand,nan,1,", "means unknown, not free"),
        ("c,A40,on_demand,500,1,", "implausible: 500 USD per GPU-hour"),
        ("c,A40,on_demand,cheap,1,", "could not convert string to float"),
        ("c,A40,on_demand,,1,", "no price"),
        ("c,A40,on_demand,0.5,0,", "a machine holds at least one GPU"),
        ("c,A40,sometimes,0.5,1,", "no tier matches 'sometimes'"),
        ("c,A100,on_demand,1.5,1,", "names more than one GPU"),
        ("c,A41,on_demand,1.5,1,", "no GPU matches 'A41'"),
        (",A40,on_demand,1.5,1,", "no cloud is named"),
    ],
)
def test_a_line_that_cannot_be_a_price_is_refused_with_its_reason(tmp_path: Path, line: str, reason: str) -> None:
    path = _own(tmp_path, OWN + line + "\n")
    with prices_from(path) as table:
        assert len(table.rows) == 1
        (refused,) = table.refused
    assert refused.startswith(f"{path} line 3: ")
    assert reason in refused


def test_machine_and_gpu_price_of_a_line_must_agree(tmp_path: Path) -> None:
    header = "cloud,gpu,tier,usd_per_gpu_hour,usd_per_instance_hour,gpus_per_instance\n"
    with prices_from(_own(tmp_path, header + "c,A40,spot,0.5,4,8\nc,A40,spot,0.5,5,8\nc,L4,spot,,8,4\n")) as table:
        assert [row.price.usd_per_gpu_hour for row in table.rows] == [0.5, 2.0]
        assert table.refused[0].endswith("5 for the machine is not 8 x 0.5")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cloud,gpu\nc,A40\n", "has no column tier, usd_per_gpu_hour or usd_per_instance_hour"),
        ("", r"has no column cloud, gpu, tier"),
        ("cloud,gpu,tier,usd_per_gpu_hour\nc,A40,spot,0\n", r"holds no usable price; .* means unknown, not free"),
        ("cloud,gpu,tier,usd_per_gpu_hour\n\xff", "holds no usable price"),
    ],
)
def test_a_file_without_prices_is_wrong_input(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CostModelError, match=message), prices_from(_own(tmp_path, text)):
        pass


def test_a_missing_file_is_named_as_given() -> None:
    with pytest.raises(CostModelError, match=r"no such price file: nowhere\.csv$"), prices_from("nowhere.csv"):
        pass


def test_price_file_of_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _own(tmp_path, OWN + "c,A40,on_demand,0.0,1,\n")
    assert cli.run(["prices", "--price-file", path, "--json"]) == 0
    out, err = capsys.readouterr()
    assert [row["cloud"] for row in json.loads(out)] == ["our cluster"]
    assert err == f"ftcost: refused: {path} line 3: c A40 on_demand: a price of 0.0 means unknown, not free\n"
    flags = ["-m", "meta-llama/Llama-2-7b-hf", "--method", "lora", "--bf16", "--framework", "trl", "-b", "1", "-g", "A40"]
    assert cli.run(["estimate", *flags, "--cloud", "our cluster", "--price-file", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["price"]["usd_per_instance_hour"] == 0.8
    assert cli.run(["prices", "A40", "--json"]) == 0  # the file is forgotten with its command
    assert "RunPod" in {row["cloud"] for row in json.loads(capsys.readouterr().out)}
    assert cli.run(["compare", *flags, "--price-file", "nowhere.csv"]) == 2


# --- gpuhunt


@dataclass
class CatalogItem:
    """The fields of gpuhunt 0.1.34's ``CatalogItem`` (``gpuhunt/_internal/models.py``)."""

    provider: str
    instance_name: str
    location: str
    price: float
    cpu: int
    memory: float
    gpu_count: int
    gpu_name: str | None
    gpu_memory: float | None
    spot: bool
    disk_size: float | None
    gpu_vendor: Any = None
    flags: list[str] = field(default_factory=list)
    provider_data: dict[str, Any] = field(default_factory=dict)


def _item(provider: str, machine: str, gpu: str | None, gib: float | None, price: float, **others: Any) -> CatalogItem:
    fields: dict[str, Any] = {"location": "r1", "cpu": 8, "memory": 64.0, "gpu_count": 1, "spot": False, "disk_size": None}
    return CatalogItem(provider, machine, price=price, gpu_name=gpu, gpu_memory=gib, **{**fields, **others})


TODAY = datetime.date(2026, 11, 30)
OFFERS = [
    _item("aws", "p4d.24xlarge", "A100", 40, 21.9576, gpu_count=8),
    _item("aws", "p4d.24xlarge", "A100", 40, 19.22, gpu_count=8, location="r2"),
    _item("aws", "p4d.24xlarge", "A100", 40, 8.0, gpu_count=8, spot=True),
    _item("aws", "p5.48xlarge", "H100", 80, 0.0, gpu_count=8),  # a capacity block: unknown, not free
    _item("runpod", "NVIDIA A100 80GB PCIe", "A100", 80, 1.64),
    _item("runpod", "NVIDIA A40", "A40", 48, 0.4),
    _item("vastai", "12345", "RTX4090", 24, 0.35),
    _item("vastai", "12346", "A100", 80, 0.9),  # SXM or PCIe: not said
    _item("gcp", "a3-highgpu-8g", "H100", 80, 70.0, gpu_count=8, flags=["gcp-dws-calendar-mode"]),
    _item("lambdalabs", "gpu_1x_b200", "B200", 180, 0.01),
    _item("aws", "m5.large", None, None, 0.1, gpu_count=0),
]


def test_gpuhunts_offers_become_dated_rows() -> None:
    update = rows_from_offers(OFFERS, as_of=TODAY, version="0.1.34")
    found = {
        (row.price.cloud, row.price.gpu, row.price.tier): (row.price.usd_per_instance_hour, row.price.gpus_per_instance)
        for row in update.rows
    }
    assert found == {
        ("AWS", "A100-SXM4-40GB", "on_demand"): (19.22, 8),  # its cheapest region
        ("AWS", "A100-SXM4-40GB", "spot"): (8.0, 8),
        ("RunPod", "A100-PCIE-80GB", "on_demand"): (1.64, 1),
        ("RunPod", "A40", "on_demand"): (0.4, 1),
        ("Vast", "RTX 4090", "community"): (0.35, 1),
    }
    assert {row.price.as_of for row in update.rows} == {"2026-11-30"}
    assert {row.price.source for row in update.rows} == {"gpuhunt 0.1.34"}
    assert dict(update.left_out) == {
        "no price": 1,
        "which product A100 is, is not said or not known": 1,
        "not for rent by the hour": 1,
        "implausible price": 1,
        "no GPU": 1,
    }
    assert update.clouds == ("AWS", "RunPod", "Vast")


@pytest.mark.parametrize(
    ("provider", "machine", "gpu", "gib", "product"),
    [
        ("aws", "p4de.24xlarge", "A100", 80, "A100-SXM4-80GB"),
        ("aws", "p5.48xlarge", "H100", 80, "H100 SXM"),
        ("aws", "p5en.48xlarge", "H200", 141, "H200 SXM"),
        ("aws", "p3.2xlarge", "V100", 16, "V100-SXM2-16GB"),
        ("aws", "g5.xlarge", "A10G", 24, "A10G"),
        ("azure", "Standard_NC24ads_A100_v4", "A100", 80, "A100-PCIE-80GB"),
        ("azure", "Standard_ND96asr_v4", "A100", 40, "A100-SXM4-40GB"),
        ("azure", "Standard_ND96amsr_A100_v4", "A100", 80, "A100-SXM4-80GB"),
        ("azure", "Standard_NC40ads_H100_v5", "H100NVL", 94, "H100 NVL"),
        ("gcp", "a2-ultragpu-1g", "A100", 80, "A100-SXM4-80GB"),
        ("gcp", "a3-highgpu-8g", "H100", 80, "H100 SXM"),
        ("gcp", "g4-standard-48", "RTXPRO6000", 96, "RTX PRO 6000 Blackwell Server"),
        ("lambdalabs", "gpu_1x_h100_pcie", "H100", 80, "H100 PCIe"),
        ("lambdalabs", "gpu_8x_h100_sxm5", "H100", 80, "H100 SXM"),
        ("runpod", "NVIDIA H100 80GB HBM3", "H100", 80, None),
        ("runpod", "NVIDIA RTX 6000 Ada Generation", "RTX6000Ada", 48, "RTX 6000 Ada"),
        ("runpod", "NVIDIA RTX A6000", "A6000", 48, "RTX A6000"),
        ("nebius", "gpu-l40s-a 1gpu-8vcpu-32gb", "L40S", 48, "L40S"),
        ("lambdalabs", "gpu_1x_gh200", "GH200", 96, "GH200 96GB"),
        ("vastai", "1", "H100", 80, None),
        ("vastai", "1", "V100", 16, None),
        ("vastai", "1", "L4", 48, None),  # no L4 has 48 GB
        ("vastai", "1", "RTX2070", 8, None),  # not in the catalogue
    ],
)
def test_which_product_an_offer_means(provider: str, machine: str, gpu: str, gib: float, product: str | None) -> None:
    found = gpu_of_offer(provider, machine, gpu, gib)
    assert (found.name if found else None) == product


def _install_gpuhunt(monkeypatch: pytest.MonkeyPatch, offers: list[CatalogItem] | Exception) -> list[dict[str, Any]]:
    """A stand-in for the package: ``gpuhunt.query`` with keyword filters, as in 0.1.34."""
    asked: list[dict[str, Any]] = []

    def query(**filters: Any) -> list[CatalogItem]:
        asked.append(filters)
        if isinstance(offers, Exception):
            raise offers
        return [item for item in offers if item.gpu_count >= filters["min_gpu_count"]]  # its other filters: not used here

    class Catalog:
        def __init__(self, auto_reload: bool = True) -> None:
            assert not auto_reload  # would ask the network

        def query(self, **filters: Any) -> list[CatalogItem]:
            return query(**filters)

    module = types.ModuleType("gpuhunt")
    module.query = query  # type: ignore[attr-defined]
    module.Catalog = Catalog  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gpuhunt", module)
    return asked


def test_update_goes_before_the_built_in_prices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for module in (cli, cli_lists):
        monkeypatch.setattr(module, "today", lambda: TODAY)
    asked = _install_gpuhunt(monkeypatch, OFFERS)
    before = {price.gpu for price in list_prices()}
    assert find_price("A40", cloud="RunPod").usd_per_gpu_hour == 0.44
    assert cli.run(["prices", "A40", "--update", "--json"]) == 0
    out, err = capsys.readouterr()
    assert asked == [{"min_gpu_count": 1}]
    assert "5 prices of 2026-11-30 from AWS, RunPod, Vast" in err
    assert "left out 1: which product A100 is, is not said or not known" in err
    updated = [row for row in json.loads(out) if row["cloud"] == "RunPod" and row["tier"] == "on_demand"]
    assert [(row["usd_per_gpu_hour"], row["age_days"]) for row in updated] == [(0.4, 0)]
    # what the update does not know stays
    assert find_price("A40", cloud="RunPod").usd_per_gpu_hour == 0.4
    assert find_price("A40", cloud="RunPod", tier="spot").usd_per_gpu_hour == 0.28
    assert {price.gpu for price in list_prices()} == before
    (p4d,) = compare(
        {"model": "meta-llama/Llama-2-7b-hf", "cloud": "AWS", "method": "lora", "framework": "trl"}, ["A100-SXM4-40GB"]
    )
    assert p4d.bill_usd_per_hour == 19.22


def test_a_local_catalogue_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "runpod.csv").touch()
    (tmp_path / "aws.csv").touch()
    (tmp_path / "notes.txt").touch()
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(tmp_path))
    asked = _install_gpuhunt(monkeypatch, OFFERS)
    assert list(fetch_offers().offers) == [offer for offer in OFFERS if offer.gpu_count]
    assert asked == [{"provider": ["aws", "runpod"], "min_gpu_count": 1}]


def test_an_update_older_than_the_built_in_prices_gives_way() -> None:
    write_prices(updated_prices_path(), rows_from_offers(OFFERS, as_of=datetime.date(2026, 8, 1)).rows)
    assert find_price("A40", cloud="RunPod").usd_per_gpu_hour == 0.44
    assert find_price("A100-SXM4-40GB", cloud="AWS", tier="spot").usd_per_instance_hour == 8.0  # not built in


def test_a_cloud_that_does_not_answer_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """gpuhunt 0.1.34 ends the whole query with the error of one online provider, and logs catalogues that fail to load."""
    _install_gpuhunt(monkeypatch, OFFERS)
    logger = logging.getLogger("gpuhunt._internal.catalog")

    def query(provider: str | None = None, **filters: Any) -> list[CatalogItem]:
        if provider is None:
            try:
                raise OSError("HTTP Error 404")
            except OSError:
                logger.exception("Failed to load %s catalog. Keeping the previously loaded catalog, if any.", "gcp")
        if provider in (None, "vastai"):
            raise OSError("console.vast.ai does not answer")
        if provider in ("crusoe", "vultr"):
            raise ValueError(f"Provider is not loaded: {provider}")
        return [offer for offer in OFFERS if offer.provider == provider]

    monkeypatch.setattr(sys.modules["gpuhunt"], "query", query)
    assert cli.run(["prices", "A40", "--update", "--json"]) == 0
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "not loaded, prices stay as they were: GCP, Vast\n" in err
    assert " from AWS, RunPod\n" in err


def test_the_real_gpuhunt_reads_a_local_catalogue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpuhunt = pytest.importorskip("gpuhunt", reason="gpuhunt (extra prices) is not installed")
    header = [field.name for field in dataclasses.fields(gpuhunt.CatalogItem) if field.name != "provider"]
    machine = dict(zip(header, [""] * len(header), strict=True)) | {
        "instance_name": "p4d.24xlarge",
        "location": "us-east-1",
        "price": "21.96",
        "cpu": "96",
        "memory": "1152",
        "gpu_count": "8",
        "gpu_name": "A100",
        "gpu_memory": "40",
        "spot": "False",
        "gpu_vendor": "nvidia",
        "cpu_arch": "x86",
        "provider_data": "{}",
    }
    with (tmp_path / "aws.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, header)
        writer.writeheader()
        writer.writerow(machine)
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(tmp_path))
    fetched = fetch_offers()
    (row,) = rows_from_offers(fetched.offers, as_of=TODAY, version=fetched.version).rows
    assert (row.price.gpu, row.price.gpus_per_instance, row.price.usd_per_instance_hour) == ("A100-SXM4-40GB", 8, 21.96)
    assert row.price.source == f"gpuhunt {fetched.version}"


def test_without_gpuhunt_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ftcost\[prices\]'"):
        fetch_offers()


@pytest.mark.parametrize("offers", [OSError("no network\nat all"), [_item("aws", "x", "A40", 48, 0.0)]])
def test_a_failed_update_changes_nothing(
    offers: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _install_gpuhunt(monkeypatch, offers)
    assert cli.run(["prices", "--update"]) == 2
    assert "the prices you have stay as they are" in capsys.readouterr().err
    assert not Path(updated_prices_path()).exists()


def test_csv_reads_back_as_it_was_written(tmp_path: Path) -> None:
    rows = rows_from_offers(OFFERS, as_of=TODAY, version="0.1.34").rows
    assert next(csv.reader(io.StringIO(csv_text(rows))))[:3] == ["cloud", "gpu", "product"]
    with prices_from(_own(tmp_path, csv_text(rows))) as table:
        assert table.rows == rows
        assert table.refused == ()


# --- the smallest card


@pytest.mark.parametrize(
    ("gib", "needs_bf16", "card"),
    [
        (52.1, True, "A100-PCIE-80GB"),
        (42, True, "A40"),
        (14, False, "T4"),
        (14, True, "RTX 4060 Ti 16GB"),  # a T4 has no bf16
        (170, True, "B200"),
        (400, True, None),
    ],
)
def test_smallest_card_with_a_price_that_holds_it(gib: float, needs_bf16: bool, card: str | None) -> None:
    found = smallest_gpu_that_holds(gib * 2**30, needs_bf16=needs_bf16)
    assert (found.name if found else None) == card
    if found:
        assert found.memory_bytes >= gib * 2**30
