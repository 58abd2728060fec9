"""Fresh prices from the package gpuhunt (extra ``prices``), as a CSV with the columns of ``data/prices.csv``.

gpuhunt gives the price of a whole machine in dollars an hour. It names GPUs without their form ("A100", 80 GB), so an offer
whose machine does not say whether it is SXM or PCIe is left out and counted: one product's price never stands in for
another's. Read from gpuhunt 0.1.34.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import importlib
import io
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from costmodel.errors import CostModelError, MissingExtraError, first_line
from costmodel.gpu_catalog import find_gpu
from costmodel.price_catalog import PriceRow, price_row_from_cells
from costmodel.specs import GpuSpec
from costmodel.whole_file import write_whole

COLUMNS: Final = (
    *("cloud", "gpu", "product", "gpus_per_instance", "region", "tier", "usd_per_gpu_hour", "usd_per_instance_hour"),
    *("as_of", "source", "note", "rank"),
)

_CLOUDS: Final = {
    "aws": "AWS",
    "azure": "Azure",
    "cloudrift": "CloudRift",
    "crusoe": "Crusoe",
    "daytona": "Daytona",
    "digitalocean": "DigitalOcean",
    "gcp": "GCP",
    "hotaisle": "Hot Aisle",
    "jarvislabs": "JarvisLabs",
    "lambdalabs": "Lambda",
    "lium": "Lium",
    "nebius": "Nebius",
    "oci": "OCI",
    "runpod": "RunPod",
    "seeweb": "Seeweb",
    "vastai": "Vast",
    "verda": "Verda",
    "vultr": "Vultr",
}
_MARKETPLACES: Final = frozenset({"vastai", "lium"})  # machines of strangers

# Flags of offers that nobody can rent by the hour: GCP's calendar mode is a reservation in advance.
_NOT_BY_THE_HOUR: Final = frozenset({"gcp-dws-calendar-mode"})

# Machines whose name fixes the form of the GPU without spelling it. Source: the clouds' own pages of machine types.
_FORM_BY_MACHINE: Final = (
    ("aws", r"p3\.", "SXM2"),
    ("aws", r"p3dn\.", "SXM2"),
    ("aws", r"p4de?\.", "SXM4"),
    ("aws", r"p5(e|en)?\.", "SXM"),
    ("azure", r"Standard_NC\d+\w*_v3", "PCIE"),
    ("azure", r"Standard_NC\d+\w*_A100_v4", "PCIE"),
    ("azure", r"Standard_ND\d+\w*_(A100_)?v4", "SXM4"),
    ("azure", r"Standard_NC\d+\w*_H100_v5", "NVL"),
    ("azure", r"Standard_ND\d+\w*_(H100|H200)_v5", "SXM"),
    ("gcp", r"a2-", "SXM4"),
    ("gcp", r"a3-", "SXM"),
    ("gcp", r"g4-", "Server"),
    ("oci", r"BM\.GPU4\.", "SXM4"),
    ("oci", r"BM\.GPU\.A100", "SXM4"),
    ("oci", r"BM\.GPU\.H[12]00", "SXM"),
)
_FORM_IN_NAME: Final = re.compile(r"sxm\d?|pcie|nvl\b|nvlink|workstation|server|max-?q", re.IGNORECASE)
_MEMORY_TOLERANCE: Final = 0.08  # clouds round the size of one card differently (B300: 270 or 288)


@dataclass(frozen=True, slots=True)
class PriceUpdate:
    """Rows worth keeping (the cheapest region of each machine), and how many offers were left out for which reason."""

    rows: tuple[PriceRow, ...]
    left_out: tuple[tuple[str, int], ...]

    @property
    def clouds(self) -> tuple[str, ...]:
        return tuple(sorted({row.price.cloud for row in self.rows}))


@dataclass(frozen=True, slots=True)
class FetchedOffers:
    """What gpuhunt told: its ``CatalogItem`` records, its version, and the clouds whose catalogue it could not load."""

    offers: tuple[Any, ...]
    version: str
    not_loaded: tuple[str, ...] = ()


class _Listener(logging.Handler):
    """Takes what gpuhunt logs (a traceback for each cloud that does not answer), and remembers which clouds it was about."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.clouds: list[str] = []
        self.reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and record.args and "Failed to load" in str(record.msg):
            self.clouds.append(_CLOUDS.get(str(record.args[0]), str(record.args[0])))
        if record.exc_info and record.exc_info[1] is not None:
            self.reason = str(record.exc_info[1])


@contextlib.contextmanager
def _listening() -> Iterator[_Listener]:
    logger, listener = logging.getLogger("gpuhunt"), _Listener()
    propagated = logger.propagate
    logger.addHandler(listener)
    logger.propagate = False
    try:
        yield listener
    finally:
        logger.removeHandler(listener)
        logger.propagate = propagated


def fetch_offers() -> FetchedOffers:
    """Every GPU offer that gpuhunt knows.

    Needs the network, unless ``GPUHUNT_CATALOG_DIR`` (gpuhunt's own variable) names a folder of its catalogues. Raises
    :class:`MissingExtraError` without gpuhunt, :class:`CostModelError` where it cannot load its catalogue.
    """
    try:
        gpuhunt: Any = importlib.import_module("gpuhunt")
    except ImportError:
        raise MissingExtraError("gpuhunt", "prices", "ftcost prices --update") from None
    with _listening() as listener:
        try:
            folder = os.environ.get("GPUHUNT_CATALOG_DIR")
            if folder:
                # gpuhunt.query() loads from the network first and gives up without it, local catalogues or not.
                providers = sorted(name.removesuffix(".csv") for name in os.listdir(folder) if name.endswith(".csv"))
                offers = gpuhunt.Catalog(auto_reload=False).query(provider=providers, min_gpu_count=1)
            else:
                offers = _query_every_cloud(gpuhunt, listener)
        except Exception as error:  # whatever its providers and the network have to say
            text = first_line(error)[:300]
            why = f": {listener.reason}" if listener.reason and listener.reason not in text else ""
            raise CostModelError(f"gpuhunt gave no prices ({text}{why}); the prices you have stay as they are") from None
    from importlib.metadata import PackageNotFoundError, version

    try:
        told_by = version("gpuhunt")
    except PackageNotFoundError:
        told_by = ""
    return FetchedOffers(tuple(offers), told_by, tuple(dict.fromkeys(listener.clouds)))


def _query_every_cloud(gpuhunt: Any, listener: _Listener) -> list[Any]:
    """All at once; where one cloud's own interface does not answer, which ends gpuhunt's whole query, cloud by cloud."""
    try:
        return list(gpuhunt.query(min_gpu_count=1))
    except Exception as error:
        if type(error).__name__ == "GPUHuntError":  # not one catalogue could be loaded
            raise
        listener.reason = first_line(error)[:300]
    offers: list[Any] = []
    for provider, cloud in _CLOUDS.items():
        try:
            offers += gpuhunt.query(provider=provider, min_gpu_count=1)
        except ValueError:  # needs an account, which is not configured
            continue
        except Exception:
            listener.clouds.append(cloud)
    if not offers:
        raise CostModelError("no cloud answered")
    return offers


def rows_from_offers(offers: Iterable[Any], *, as_of: datetime.date, version: str = "") -> PriceUpdate:
    """gpuhunt's ``CatalogItem`` records -> price rows. Pure; the catalogue of GPUs decides which product is meant."""
    cheapest: dict[tuple[Any, ...], PriceRow] = {}
    left_out: Counter[str] = Counter()
    source = " ".join(part for part in ("gpuhunt", version) if part)
    for offer in offers:
        row_or_reason = _row(offer, as_of, source)
        if isinstance(row_or_reason, str):
            left_out[row_or_reason] += 1
            continue
        price = row_or_reason.price
        key = (price.cloud, price.gpu, price.product, price.gpus_per_instance, price.tier)
        if key not in cheapest or price.usd_per_instance_hour < cheapest[key].price.usd_per_instance_hour:
            cheapest[key] = row_or_reason
    order = sorted(cheapest.values(), key=lambda row: (row.price.cloud, row.price.gpu, row.price.tier, row.price.product))
    return PriceUpdate(tuple(order), tuple(left_out.most_common()))


def _row(offer: Any, as_of: datetime.date, source: str) -> PriceRow | str:
    """A price row, or the reason why this offer gives none."""
    count = int(offer.gpu_count or 0)
    if count < 1 or not offer.gpu_name:
        return "no GPU"
    if set(getattr(offer, "flags", None) or ()) & _NOT_BY_THE_HOUR:
        return "not for rent by the hour"
    gpu = gpu_of_offer(offer.provider, offer.instance_name, offer.gpu_name, offer.gpu_memory)
    if gpu is None:
        return f"which product {offer.gpu_name} is, is not said or not known"
    tier = "spot" if offer.spot else "community" if offer.provider in _MARKETPLACES else "on_demand"
    try:
        usd = float(offer.price)
        row = price_row_from_cells(
            {
                "cloud": _CLOUDS.get(offer.provider, offer.provider),
                "gpu": gpu.name,
                "product": str(offer.instance_name),
                "gpus_per_instance": str(count),
                "region": str(offer.location or ""),
                "tier": tier,
                "usd_per_gpu_hour": repr(usd / count),
                "usd_per_instance_hour": repr(usd),
                "as_of": as_of.isoformat(),
                "source": source,
                "note": "",
                "rank": "yes",
            }
        )
    except (TypeError, ValueError):  # no number, zero or less: a feed's way to say that it does not know
        return "no price"
    return "implausible price" if row.not_ranked_because else row


def gpu_of_offer(provider: str, machine: str, gpu_name: str, memory_gib: float | None) -> GpuSpec | None:
    """The one catalogued product an offer can mean: by its name, its memory, and the form its machine's name gives."""
    gpu_name = re.sub(r"^RTXPRO(\d+)$", r"RTX PRO \1 Blackwell", gpu_name)
    form = _FORM_IN_NAME.search(machine)
    forms = [form.group().replace("nvlink", "sxm")] if form else []
    forms += [word for cloud, pattern, word in _FORM_BY_MACHINE if cloud == provider and re.match(pattern, machine)]
    size = f" {memory_gib:g}GB" if memory_gib else ""
    tried = [f"{gpu_name}{size} {word}" for word in forms] + [f"{gpu_name} {word}" for word in forms]
    tried += [f"{gpu_name}{size}", gpu_name]
    for name in tried:
        try:
            gpu = find_gpu(name)
        except CostModelError:
            continue
        gib = gpu.memory_bytes / 2**30
        if memory_gib is None or abs(memory_gib - gib) <= _MEMORY_TOLERANCE * gib:
            return gpu
    return None


def csv_text(rows: Iterable[PriceRow]) -> str:
    """The rows as a price file."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        fields = row.price.model_dump()
        writer.writerow({**{name: fields[name] for name in COLUMNS if name != "rank"}, "rank": "yes"})
    return stream.getvalue()


def write_prices(path: str, rows: Iterable[PriceRow]) -> None:
    """Whole or not at all: a half-written price file would be read by the next command."""
    write_whole(path, csv_text(rows))
