"""What is known: the commands ``gpus``, ``models`` and ``prices``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final

import typer

from costmodel.cli_flags import Json, PriceFile
from costmodel.cli_run import FITS, print_json, say, show_table, today
from costmodel.errors import AmbiguousNameError, CostModelError, UnknownNameError
from costmodel.units import GIB, GIGA, TERA

_ALL_GPUS: Final = "ftcost gpus lists all"


def gpus_command(
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="Only names that contain this.")] = None,
    as_json: Json = False,
) -> int:
    """GPUs whose data sheet is known."""
    from costmodel.gpu_catalog import list_gpus
    from costmodel.tables import Table

    gpus = list_gpus()
    shown = [gpu for gpu in gpus if _contains((gpu.name, gpu.vendor, gpu.architecture, *gpu.nvml_names), text)]
    if not shown:
        raise UnknownNameError("GPU", text, [gpu.name for gpu in gpus], way_out=_ALL_GPUS)
    if as_json:
        return print_json([gpu.model_dump() for gpu in shown])
    rows = tuple(
        (
            gpu.name,
            gpu.architecture,
            f"{gpu.memory_bytes / GIB:.1f}" + ("*" if gpu.memory_is_marketed else ""),
            f"{gpu.memory_bandwidth_bytes_per_second / GIGA:,.0f}",
            f"{gpu.peak_bf16_flops_per_second / TERA:,.0f}" if gpu.peak_bf16_flops_per_second else "none",
            f"{gpu.tdp_watts:.0f}" if gpu.tdp_watts else "",
            "; ".join(gpu.nvml_names),
        )
        for gpu in shown
    )
    columns = ("GPU", "architecture", "GiB", "GB/s", "bf16 TFLOP/s", "watts", "NVML names")
    show_table(Table("GPUs (* = marketed size; the driver reports less)", rows, columns, numeric=(2, 3, 4, 5)))
    return FITS


def models_command(
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="Only ids or families with this.")] = None,
    as_json: Json = False,
) -> int:
    """Models whose config.json is in the catalogue. Others work too: give a path to theirs."""
    from costmodel.model_catalog import list_models, model_facts, nearest_models
    from costmodel.tables import Table

    facts = [model_facts(model_id) for model_id in list_models()]
    shown = [fact for fact in facts if _contains((fact.model_id, fact.model_type), text)]
    if not shown:
        nearest = nearest_models(text or "")
        way_out = "give a path to its config.json, or see them all: ftcost models"
        raise UnknownNameError("model", text, list_models(), way_out, nearest)
    if as_json:
        return print_json(
            [
                {
                    "model_id": fact.model_id,
                    "model_type": fact.model_type,
                    "confidence": fact.confidence,
                    "source": fact.source,
                }
                for fact in shown
            ]
        )
    rows = tuple((fact.model_id, fact.model_type, fact.confidence) for fact in shown)
    show_table(Table("Models", rows, ("model", "family", "confidence")))
    return FITS


def prices_command(
    gpu: Annotated[str | None, typer.Argument(metavar="GPU", help="Only this GPU.")] = None,
    cloud: Annotated[str | None, typer.Option("--cloud", help="Only this cloud.")] = None,
    tier: Annotated[
        str | None, typer.Option("--tier", metavar="on_demand|spot|reserved|community", help="Only this tier.")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Also rows that are never chosen, with the reason.")] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Read today's from gpuhunt (extra prices) and keep them.")
    ] = False,
    as_json: Json = False,
    price_file: PriceFile = None,
) -> int:
    """Dated prices, cheapest first for each GPU. Storage, traffic and taxes are in none of them."""
    from costmodel.gpu_catalog import list_gpus
    from costmodel.price_catalog import TIERS, age_days, find_cloud, list_price_rows, stale_price_warning
    from costmodel.report import format_age
    from costmodel.tables import Table

    if update:
        _update_prices()

    if tier is not None and tier not in TIERS:
        raise UnknownNameError("tier", tier, TIERS)
    names = _gpu_names(gpu) if gpu else {each.name for each in list_gpus()}
    wanted_cloud = find_cloud(cloud) if cloud else None
    shown = [
        row
        for row in list_price_rows()
        if row.price.gpu in names
        and wanted_cloud in (None, row.price.cloud)
        and tier in (None, row.price.tier)
        and (show_all or not row.not_ranked_because)
    ]
    shown.sort(key=lambda row: (row.price.gpu, row.price.usd_per_gpu_hour, row.price.cloud))
    day = today()
    if as_json:
        return print_json(
            [
                {
                    **row.price.model_dump(),
                    "age_days": age_days(row.price.as_of, day),
                    "not_ranked_because": row.not_ranked_because or None,
                }
                for row in shown
            ]
        )
    if not shown:
        raise CostModelError("no dated price for that; see: ftcost prices --all, or give it: --usd-per-gpu-hour")
    rows = tuple(
        (
            row.price.gpu,
            f"{row.price.usd_per_gpu_hour:.4g}",
            row.price.tier,
            row.price.cloud,
            row.price.product,
            row.price.region,
            f"{row.price.usd_per_instance_hour:.4g} for {row.price.gpus_per_instance}",
            f"{row.price.as_of}{format_age(row.price.as_of, day)}",
            f"not chosen: {row.not_ranked_because}" if row.not_ranked_because else row.price.note,
        )
        for row in shown
    )
    columns = ("GPU", "USD/GPU-h", "tier", "cloud", "product", "region", "machine USD/h", "as of", "note")
    show_table(Table("Prices", rows, columns, numeric=(1,)))
    stale = [warning for row in shown if (warning := stale_price_warning(row.price, day))]
    if stale:
        say(f"{len(stale)} of these {len(shown)} prices are older than 90 days: ftcost prices --update, or --price-file")
    return FITS


def _update_prices() -> None:
    """Reads today's prices into the user's configuration folder, from where they go before the built-in ones."""
    from costmodel import price_update
    from costmodel.price_catalog import updated_prices_path

    fetched = price_update.fetch_offers()
    update = price_update.rows_from_offers(fetched.offers, as_of=today(), version=fetched.version)
    if not update.rows:
        raise CostModelError("gpuhunt gave no price that can be used; the prices you have stay as they are")
    price_update.write_prices(updated_prices_path(), update.rows)
    say(f"{len(update.rows)} prices of {today()} from {', '.join(update.clouds)}")
    if fetched.not_loaded:
        say(f"not loaded, prices stay as they were: {', '.join(fetched.not_loaded)}")
    for reason, count in update.left_out:
        say(f"left out {count}: {reason}")


def _gpu_names(name: str) -> set[str]:
    """Every product a name may mean: a list of prices need not choose one A100."""
    from costmodel.gpu_catalog import find_gpu, list_gpus

    try:
        return {find_gpu(name).name}
    except AmbiguousNameError as error:
        return set(error.candidates)
    except UnknownNameError:
        raise UnknownNameError("GPU", name, [gpu.name for gpu in list_gpus()], way_out=_ALL_GPUS) from None


def _contains(names: Iterable[str], text: str | None) -> bool:
    return text is None or any(text.strip().lower() in name.lower() for name in names)
