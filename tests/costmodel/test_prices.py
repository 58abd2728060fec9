"""Dated prices: which rows may be chosen, and what is billed."""

from __future__ import annotations

import datetime
import re
from collections import Counter

import pytest

from costmodel.catalog import (
    TIERS,
    bill_usd_per_hour,
    find_gpu,
    find_price,
    list_price_rows,
    list_prices,
    price_age_days,
    price_row_from_cells,
)
from costmodel.errors import CostModelError, UnknownNameError

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
    with pytest.raises(CostModelError, match=r"no dated reserved price for A40.*RunPod spot 0\.28.*--usd-per-gpu-hour"):
        find_price("A40", tier="reserved")
    with pytest.raises(CostModelError, match=r"known for this GPU .*: none"):
        find_price("P100-PCIE-16GB")


def test_unknown_cloud_and_tier() -> None:
    with pytest.raises(UnknownNameError, match="nearest: RunPod"):
        find_price("A40", cloud="runpodd")
    with pytest.raises(UnknownNameError, match="known: community, on_demand, reserved, spot"):
        find_price("A40", tier="preemptible")


def test_age_is_known_only_for_a_full_date() -> None:
    today = datetime.date(2026, 11, 9)
    price = find_price("A40", cloud="RunPod")
    assert price.as_of == "2026-08-19"
    assert price_age_days(price, today) == 82
    assert price_age_days(price.model_copy(update={"as_of": "2026 (catalog commit date not stored)"}), today) is None
    assert price_age_days(price.model_copy(update={"as_of": "2025-05"}), today) is None
