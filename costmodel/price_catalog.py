"""What is known about prices: dated offers of clouds, the user's own file in their place, what a machine costs.

Read lazily and cached. A cloud or tier that fits no entry is an error that lists the nearest ones.
"""

from __future__ import annotations

import contextlib
import contextvars
import csv
import datetime
import functools
import io
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, get_args

from costmodel.arguments import as_text, must_be, plain_digits
from costmodel.data_files import read_table
from costmodel.errors import CostModelError, UnknownNameError, first_line, short_path
from costmodel.gpu_catalog import find_gpu, list_gpus
from costmodel.probes import config_folder
from costmodel.specs import MAX_GPUS, GpuSpec, Price, Tier
from costmodel.units import MIB

TIERS: Final[tuple[str, ...]] = get_args(Tier)

# Price feeds write 0.0 or 0.01 for "unknown"; the cheapest real row of the catalogue is a V100 at 0.106.
MIN_PLAUSIBLE_USD_PER_GPU_HOUR: Final = 0.02
MAX_PLAUSIBLE_USD_PER_GPU_HOUR: Final = 200.0

STALE_PRICE_DAYS: Final = 90
PRICE_FILE_VARIABLE: Final = "FTCOST_PRICE_FILE"
MAX_PRICE_FILE_BYTES: Final = 64 * MIB
GIVE_PRICE: Final = "or give the price: usd_per_gpu_hour"

_CLOUD_ALIASES: Final = {
    "amazon": "AWS",
    "ec2": "AWS",
    "google": "GCP",
    "googlecloud": "GCP",
    "gce": "GCP",
    "microsoft": "Azure",
    "lambdalabs": "Lambda",
    "lambdacloud": "Lambda",
    "vast.ai": "Vast",
    "vastai": "Vast",
}


@dataclass(frozen=True, slots=True)
class PriceRow:
    """A dated price. ``not_ranked_because`` is empty where the row may be chosen as somebody's cheapest."""

    price: Price
    not_ranked_because: str = ""


def price_row_from_cells(cells: Mapping[str, str]) -> PriceRow:
    """A row of ``prices.csv``. A price outside what any GPU costs means "unknown" in the feeds: never ranked.

    Raises :class:`CostModelError` for a price of zero or less, which is no price at all.
    """
    usd_per_gpu_hour = float(cells["usd_per_gpu_hour"])
    if not (math.isfinite(usd_per_gpu_hour) and usd_per_gpu_hour > 0):
        raise CostModelError(
            f"{cells['cloud']} {cells['gpu']} {cells['tier']}: a price of {usd_per_gpu_hour} means unknown, not free"
        )
    price = Price(
        usd_per_gpu_hour=usd_per_gpu_hour,
        usd_per_instance_hour=float(cells["usd_per_instance_hour"]),
        gpus_per_instance=int(cells["gpus_per_instance"]),
        gpu=cells["gpu"],
        cloud=cells["cloud"],
        product=cells["product"],
        region=cells["region"],
        tier=cells["tier"],
        source=cells["source"],
        as_of=cells["as_of"],
        note=cells["note"],
    )
    reason = "" if cells["rank"] == "yes" else cells["rank"].removeprefix("no: ")
    if not MIN_PLAUSIBLE_USD_PER_GPU_HOUR <= usd_per_gpu_hour <= MAX_PLAUSIBLE_USD_PER_GPU_HOUR:
        reason = f"implausible: {usd_per_gpu_hour:g} USD per GPU-hour"
    return PriceRow(price, reason)


@dataclass(frozen=True, slots=True)
class PriceTable:
    """The prices in use. ``refused`` says for each line of a file that was left out where it stands and why."""

    rows: tuple[PriceRow, ...]
    refused: tuple[str, ...] = ()

    @property
    def ranked(self) -> tuple[Price, ...]:
        return tuple(row.price for row in self.rows if not row.not_ranked_because)


_price_file: Final[contextvars.ContextVar[str | None]] = contextvars.ContextVar("price_file", default=None)


@contextlib.contextmanager
def prices_from(path: str | os.PathLike[str]) -> Iterator[PriceTable]:
    """Inside the block, the prices of this CSV and no others: what you can rent is what your file lists."""
    table = _table_in_file(os.fspath(path))
    token = _price_file.set(os.fspath(path))
    try:
        yield table
    finally:
        _price_file.reset(token)


def price_table() -> PriceTable:
    """The prices in use: those of :func:`prices_from` or ``FTCOST_PRICE_FILE`` alone, else the built-in ones.

    Of the built-in ones, an offer (cloud, GPU, tier) that ``ftcost prices --update`` has read since is replaced.
    """
    path = _price_file.get() or os.environ.get(PRICE_FILE_VARIABLE)
    if path:
        return _table_in_file(path)
    updated = updated_prices_path()
    return _with_updates(*_file_key(updated)) if os.path.isfile(updated) else _built_in_table()


def updated_prices_path() -> str:
    """What ``ftcost prices --update`` writes."""
    return os.path.join(config_folder(), "prices.csv")


@functools.cache
def _built_in_table() -> PriceTable:
    return PriceTable(tuple(price_row_from_cells(cells) for cells in read_table("prices.csv")))


def _file_key(path: str) -> tuple[str, int, int]:
    """Path, time and size: what decides whether a file that was read before must be read again."""
    status = os.stat(path)
    return path, status.st_mtime_ns, status.st_size


def _table_in_file(path: str) -> PriceTable:
    try:
        key = _file_key(path)
    except OSError:
        raise CostModelError(f"no such price file: {short_path(path)}") from None
    return _read_price_file(*key)


@functools.lru_cache(maxsize=8)
def _with_updates(path: str, modified_ns: int, num_bytes: int) -> PriceTable:
    """The built-in prices, with the offers of the updated file in their place where those are not older."""
    updated, built_in = _read_price_file(path, modified_ns, num_bytes), _built_in_table()
    newest = _newest_dates(built_in)
    newest_update = _newest_dates(updated)
    taken = {offer for offer, as_of in newest_update.items() if as_of >= newest.get(offer, "")}
    rows = [row for row in built_in.rows if _offer(row.price) not in taken]
    rows += [row for row in updated.rows if _offer(row.price) in taken]
    return PriceTable(tuple(rows), updated.refused)


def _newest_dates(table: PriceTable) -> dict[tuple[str, str, str], str]:
    dates: dict[tuple[str, str, str], str] = {}
    for price in table.ranked:
        dates[_offer(price)] = max(price.as_of, dates.get(_offer(price), ""))
    return dates


def _offer(price: Price) -> tuple[str, str, str]:
    return price.cloud, price.gpu, price.tier


@functools.lru_cache(maxsize=8)
def _read_price_file(path: str, modified_ns: int, num_bytes: int) -> PriceTable:
    """A CSV with the columns of ``prices.csv``; a line that cannot be a price is refused with its reason."""
    if num_bytes > MAX_PRICE_FILE_BYTES:
        raise CostModelError(f"the price file {path} is larger than {MAX_PRICE_FILE_BYTES // MIB} MiB")
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(io.StringIO(file.read()))
            lines = [(reader.line_num, cells) for cells in reader]
            columns = reader.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CostModelError(f"the price file {path} is not readable CSV: {first_line(error)}") from None
    missing = [name for name in ("cloud", "gpu", "tier") if name not in columns]
    if not {"usd_per_gpu_hour", "usd_per_instance_hour"} & set(columns):
        missing.append("usd_per_gpu_hour or usd_per_instance_hour")
    if missing:
        raise CostModelError(
            f"the price file {path} has no column {', '.join(missing)}; its columns are those of ftcost prices: "
            "cloud, gpu, tier, usd_per_gpu_hour, and if you like product, gpus_per_instance, region, "
            "usd_per_instance_hour, as_of, source, note"
        )
    rows, refused = [], []
    for number, cells in lines:
        try:
            row = _row_of_user(cells)
        except CostModelError as error:
            refused.append(f"{path} line {number}: {error}")
            continue
        if row.not_ranked_because:
            refused.append(f"{path} line {number}: {row.not_ranked_because}")
        else:
            rows.append(row)
    if not rows:
        raise CostModelError(f"the price file {path} holds no usable price" + "".join(f"; {each}" for each in refused[:3]))
    return PriceTable(tuple(rows), tuple(refused))


def _row_of_user(cells: Mapping[str, str | None]) -> PriceRow:
    """A line of a person's own file: what may be left out is filled, what cannot be right is refused."""
    filled = {name: (value or "").strip() for name, value in cells.items() if isinstance(name, str)}
    where = " ".join(filled.get(name, "") for name in ("cloud", "gpu", "tier"))
    if not filled["cloud"]:
        raise CostModelError(f"{where}: no cloud is named")
    if filled["tier"] not in TIERS:
        raise UnknownNameError("tier", filled["tier"], TIERS)
    try:
        count = int(plain_digits(filled.get("gpus_per_instance") or "1"))
        per_gpu, per_machine = _dollars(filled.get("usd_per_gpu_hour")), _dollars(filled.get("usd_per_instance_hour"))
    except ValueError as error:
        raise CostModelError(f"{where}: {error}") from None
    if count < 1:
        raise CostModelError(f"{where}: a machine holds at least one GPU, not {count}")
    if per_gpu is None and per_machine is None:
        raise CostModelError(f"{where}: no price")
    if per_gpu is not None and per_machine is not None and abs(per_gpu * count - per_machine) > 0.01 * abs(per_machine):
        raise CostModelError(f"{where}: {per_machine:g} for the machine is not {count} x {per_gpu:g}")
    per_machine = per_machine if per_machine is not None else (per_gpu or 0.0) * count
    return price_row_from_cells(
        {
            "gpu": find_gpu(filled["gpu"]).name,
            "cloud": filled["cloud"],
            "tier": filled["tier"],
            "usd_per_gpu_hour": str(per_gpu if per_gpu is not None else per_machine / count),
            "usd_per_instance_hour": str(per_machine),
            "gpus_per_instance": str(count),
            "source": filled.get("source") or "own price file",
            "rank": filled.get("rank") or "yes",
            **{name: filled.get(name, "") for name in ("product", "region", "as_of", "note")},
        }
    )


def _dollars(cell: str | None) -> float | None:
    return float(plain_digits(cell)) if cell else None


def list_price_rows() -> tuple[PriceRow, ...]:
    """Every dated price in use, with those that are never ranked and why."""
    return price_table().rows


def list_prices() -> tuple[Price, ...]:
    """Every dated price that may be ranked: a whole machine, sold today, not replaced by a later row."""
    return price_table().ranked


def find_cloud(name: str) -> str:
    """The catalogue's spelling of a cloud's name; :class:`UnknownNameError` if it has no prices here."""
    clouds = sorted({row.price.cloud for row in list_price_rows()})
    wanted = _bare(as_text(name, "cloud", 'text such as "AWS"'))
    for cloud in clouds:
        if _bare(cloud) == wanted:
            return cloud
    if wanted in _CLOUD_ALIASES:
        return _CLOUD_ALIASES[wanted]
    raise UnknownNameError("cloud", name, clouds, way_out=GIVE_PRICE)


def _bare(cloud: str) -> str:
    return cloud.lower().replace(" ", "").replace("-", "")


def bill_usd_per_hour(price: Price, num_gpus: int = 1) -> float:
    """What ``num_gpus`` GPUs cost for an hour: whole machines, however few of their GPUs are used."""
    return math.ceil(num_gpus / price.gpus_per_instance) * price.usd_per_instance_hour


def find_price(gpu: str | GpuSpec, *, cloud: str | None = None, tier: str | None = "on_demand", num_gpus: int = 1) -> Price:
    """The cheapest dated price of ``num_gpus`` of this GPU, by what is billed: whole machines.

    A job on several GPUs wants one machine, so a cloud's smaller machines count only where it has none that is large
    enough. ``tier=None`` means "not said": on demand or, where ``cloud`` is given and sells none, its community tier.
    Raises :class:`CostModelError` with the prices that do exist.
    """
    gpu_name = gpu.name if isinstance(gpu, GpuSpec) else find_gpu(gpu).name
    cloud = find_cloud(cloud) if cloud else None
    if isinstance(num_gpus, bool) or not isinstance(num_gpus, int) or not 1 <= num_gpus <= MAX_GPUS:
        raise must_be("num_gpus", f"a whole number from 1 to {MAX_GPUS:,}", num_gpus)
    if tier is not None and (not isinstance(tier, str) or tier not in TIERS):
        raise UnknownNameError("tier", tier, TIERS)
    of_gpu = [price for price in list_prices() if price.gpu == gpu_name]
    for wanted_tier in (tier,) if tier else ("on_demand", "community") if cloud else ("on_demand",):
        offers = [price for price in of_gpu if price.tier == wanted_tier and cloud in (None, price.cloud)]
        large_enough = {price.cloud for price in offers if price.gpus_per_instance >= num_gpus}
        offers = [price for price in offers if price.gpus_per_instance >= num_gpus or price.cloud not in large_enough]
        if offers:
            return min(offers, key=lambda price: (bill_usd_per_hour(price, num_gpus), price.cloud, price.region))
    wanted = f"{tier or 'on_demand'} price for {gpu_name}" + (f" at {cloud}" if cloud else "")
    known = sorted({(price.usd_per_gpu_hour, price.cloud, price.tier) for price in of_gpu})
    listing = ", ".join(f"{cloud_name} {tier_name} {usd:g}" for usd, cloud_name, tier_name in known) or "none"
    raise CostModelError(f"no dated {wanted}; known for this GPU (USD per GPU-hour): {listing}; {GIVE_PRICE}")


def smallest_gpu_that_holds(num_bytes: float, *, needs_bf16: bool = False) -> GpuSpec | None:
    """NVIDIA's card with the least memory that is enough, of those with a dated price if any has; of equal ones the cheaper.

    Cards of one marketed size differ by a few hundred MiB: within 2 % they count as equal. ``None`` where no catalogued
    one (with a bf16 peak, if that is needed) has as much.
    """
    usd_by_gpu: dict[str, float] = {}
    for price in list_prices():
        usd_by_gpu[price.gpu] = min(price.usd_per_gpu_hour, usd_by_gpu.get(price.gpu, math.inf))
    enough = [
        gpu
        for gpu in list_gpus()
        if gpu.memory_bytes >= num_bytes and gpu.vendor == "NVIDIA" and (gpu.peak_bf16_flops_per_second or not needs_bf16)
    ]
    enough = [gpu for gpu in enough if gpu.name in usd_by_gpu] or enough
    smallest = min((gpu.memory_bytes for gpu in enough), default=0)
    equal = [gpu for gpu in enough if gpu.memory_bytes <= 1.02 * smallest]
    return min(equal, key=lambda gpu: (usd_by_gpu.get(gpu.name, math.inf), gpu.memory_bytes, gpu.name), default=None)


def age_days(as_of: str, today: datetime.date) -> int | None:
    """Days since ``as_of``; ``None`` where it is no full date (feeds also say "2026" or "2025-05")."""
    try:
        return (today - datetime.date.fromisoformat(as_of)).days
    except ValueError:
        return None


def stale_price_warning(price: Price, today: datetime.date) -> str | None:
    """A sentence for a price that is older than 90 days, ``None`` for a younger one or one without a date.

    Of a date that names only a month or a year, its last day counts: the price is at least that old.
    """
    days, at_least = age_days(price.as_of, today), ""
    if days is None:
        match = re.match(r"(\d{4})(?:-(\d\d))?(?!\d)", price.as_of)
        if not match or not 1 <= int(match[2] or 12) <= 12:
            return None
        year, month = int(match[1]), int(match[2] or 12)
        end = datetime.date(year + month // 12, month % 12 + 1, 1)
        days, at_least = (today - end).days + 1, "at least "
    if days <= STALE_PRICE_DAYS:
        return None
    offer = " ".join(part for part in (price.cloud, price.gpu, price.tier) if part)
    return f"the price of {offer} is {at_least}{days} days old: check it, or run ftcost prices --update"
