"""What is known about GPUs, prices, models and data sets: look-up by any name a person or NVML uses.

Everything is read lazily from ``costmodel/data`` (see ``SOURCES.md`` there) and cached. A name that fits no entry or
several is an error that lists the nearest ones: one product's numbers never stand in for another's.
"""

from __future__ import annotations

import contextlib
import contextvars
import csv
import datetime
import functools
import importlib
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from costmodel.errors import AmbiguousNameError, CostModelError, UnknownNameError
from costmodel.probes import config_folder
from costmodel.specs import GpuSpec, Price
from costmodel.strict_json import read_json_text
from costmodel.units import GIB, GIGA, MIB, TERA

DATA_FOLDER: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")

TIERS: Final = ("on_demand", "spot", "reserved", "community")

# Price feeds write 0.0 or 0.01 for "unknown"; the cheapest real row of the catalogue is a V100 at 0.106.
MIN_PLAUSIBLE_USD_PER_GPU_HOUR: Final = 0.02
MAX_PLAUSIBLE_USD_PER_GPU_HOUR: Final = 200.0

STALE_PRICE_DAYS: Final = 90
PRICE_FILE_VARIABLE: Final = "FTCOST_PRICE_FILE"
MAX_PRICE_FILE_BYTES: Final = 64 * MIB

HUB_TIMEOUT_SECONDS: Final = 5.0

# Ways out by the names of a job's fields; the command line says its flags (costmodel/cli_run.py).
DESCRIBE_GPU: Final = (
    'in a job, "gpu": {"name", "memory_bytes", "memory_bandwidth_bytes_per_second", "peak_bf16_flops_per_second"}'
)
GIVE_PRICE: Final = "or give the price: usd_per_gpu_hour"


def _read_table(*path: str) -> list[dict[str, str]]:
    with open(os.path.join(DATA_FOLDER, *path), encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# --- GPUs -------------------------------------------------------------------------------------------------------------

# Words that say nothing about which product is meant.
_NOISE_WORDS: Final = frozenset(
    {"nvidia", "amd", "geforce", "tesla", "instinct", "gpu", "gpus", "tensor", "core", "accelerator"}
    | {"generation", "edition", "per", "oam"}
)
# Words that make another, mostly larger, product of the one they follow: never filled in.
_GRADE_WORDS: Final = frozenset({"ti", "super", "d", "max", "q", "titan", "quadro"})
_VENDOR_PREFIX: Final = re.compile(r"^(?:nvidia|amd)?(?:geforce|tesla|instinct)?")


def _run_together(name: str) -> str:
    """``"NVIDIA GeForce RTX 4090"`` -> ``"rtx4090"``."""
    return _VENDOR_PREFIX.sub("", re.sub(r"[^a-z0-9]+", "", name.lower()))


def _says_a_model(word: str) -> bool:
    """Whether a word tells products apart at all: ``"h100"`` does; ``"80gb"``, ``"sxm5"`` and ``"server"`` do not."""
    return any(character.isdigit() for character in word) and not re.fullmatch(r"\d+gb|sxm\d*|hbm\d+e?", word)


def _gpu_words(name: str) -> tuple[str, ...]:
    """``"A100-80G SXM"`` -> ``("a100", "80gb", "sxm")``: lower case, one spelling of sizes, without noise words."""
    text = name.lower().replace("_", " ")
    text = re.sub(r"\b(\d+)\s*(?:gib|gb|g)\b", r"\1gb", text)
    text = re.sub(r"\brtx(?=[a\d])", "rtx ", text)
    return tuple(word for word in re.split(r"[^a-z0-9]+", text) if word and word not in _NOISE_WORDS)


@dataclass(frozen=True, slots=True)
class _GpuEntry:
    """A row of ``gpus.csv`` with the words of each of its names."""

    row: dict[str, str]
    spellings: tuple[tuple[str, ...], ...]
    optional_words: frozenset[str]  # true of this product, but may be left out: its memory size, "rtx"
    needed_words: frozenset[str]  # without these another product is meant
    run_together: frozenset[str]  # each name without spaces, hyphens and vendor

    @property
    def name(self) -> str:
        return self.row["name"]

    def is_named(self, words: tuple[str, ...]) -> bool:
        """One of the product's names, word for word (in any order, or run together)."""
        wanted = self._needed(words)
        return any(
            set(wanted) == set(spelling) or "".join(wanted) == "".join(spelling)
            for spelling in map(self._needed, self.spellings)
        )

    def fits(self, words: tuple[str, ...]) -> bool:
        """Nothing in ``words`` speaks against this product."""
        return set(words) <= self.optional_words.union(*self.spellings)

    def needs_size(self, name: str) -> bool:
        """Cards of two sizes share all of the product's names but the one with the size, and ``name`` is none with it."""
        size = f"{self.row['marketed_memory_gb']}gb"
        with_size = [spelling for spelling in self.spellings if any(re.fullmatch(r"\d+gb", word) for word in spelling)]
        return with_size == [_gpu_words(self.name)] and size in with_size[0] and size not in "".join(_gpu_words(name))

    def _needed(self, words: tuple[str, ...]) -> list[str]:
        return [word for word in words if word not in self.optional_words]


def _split_names(cell: str) -> list[str]:
    return [name.strip() for name in cell.split(";") if name.strip()]


@functools.cache
def _gpu_entries() -> tuple[_GpuEntry, ...]:
    entries = []
    for row in _read_table("gpus.csv"):
        names = [row["name"], *_split_names(row["nvml_names"]), *_split_names(row["also_called"])]
        needed = _GRADE_WORDS & set(_gpu_words(row["name"]))
        if needed & {"titan", "quadro"}:  # the cards of these names without "RTX" are other ones
            needed |= {"rtx"}
        optional = {f"{row['marketed_memory_gb']}gb"} | ({"rtx"} if "RTX" in row["name"] else set())
        entries.append(
            _GpuEntry(
                row=row,
                spellings=tuple(_gpu_words(name) for name in names),
                optional_words=frozenset(optional - needed),
                needed_words=frozenset(needed),
                run_together=frozenset(_run_together(name) for name in names),
            )
        )
    return tuple(entries)


def _number(cell: str, scale: float = 1.0) -> float | None:
    return float(cell) * scale if cell else None


@functools.cache
def _gpu_spec(name: str) -> GpuSpec:
    (row,) = (entry.row for entry in _gpu_entries() if entry.name == name)
    reported_mib, l2_cache_mib = _number(row["reported_memory_mib"]), _number(row["l2_cache_mib"])
    return GpuSpec(
        name=row["name"],
        nvml_names=tuple(_split_names(row["nvml_names"])),
        vendor=row["vendor"],
        architecture=row["architecture"],
        compute_capability=row["compute_capability"],
        memory_bytes=int(reported_mib * MIB if reported_mib else float(row["marketed_memory_gb"]) * GIB),
        memory_is_marketed=not reported_mib,
        memory_bandwidth_bytes_per_second=float(row["memory_bandwidth_gb_per_second"]) * GIGA,
        peak_bf16_flops_per_second=_number(row["peak_bf16_tflops"], TERA),
        peak_fp16_flops_per_second=_number(row["peak_fp16_tflops"], TERA),
        peak_fp32_flops_per_second=_number(row["peak_fp32_tflops"], TERA),
        peak_tf32_flops_per_second=_number(row["peak_tf32_tflops"], TERA),
        peak_fp8_flops_per_second=_number(row["peak_fp8_tflops"], TERA),
        tdp_watts=_number(row["tdp_watts"]),
        l2_cache_bytes=int(l2_cache_mib * MIB) if l2_cache_mib else None,
        nvlink_bytes_per_second=_number(row["nvlink_gb_per_second"], GIGA),
        pcie_bytes_per_second=_number(row["pcie_gb_per_second"], GIGA),
        measured_bf16_matmul_flops_per_second=_number(row["measured_bf16_matmul_tflops"], TERA),
        source=row["source"],
        notes=row["notes"],
    )


@functools.cache
def _l2_caches() -> Mapping[str, tuple[int, ...]]:
    """Major compute capability -> the known cache sizes, small ones first. 8.6, 8.9 are generations of their own."""
    found: dict[str, list[int]] = {}
    for gpu in list_gpus():
        if gpu.l2_cache_bytes is not None:
            found.setdefault(_generation(gpu), []).append(gpu.l2_cache_bytes)
    return {generation: tuple(sorted(sizes)) for generation, sizes in found.items()}


def _generation(gpu: GpuSpec) -> str:
    """``8.6`` and ``8.9`` differ in their caches; ``10.0`` and ``10.3`` (B200 and B300) are one die and its revision."""
    capability = gpu.compute_capability
    return capability.partition(".")[0] if gpu.vendor == "NVIDIA" and capability.startswith("10.") else capability


def l2_cache_bytes(gpu: GpuSpec) -> int | None:
    """The card's second-level cache; else the middle one of its generation's known ones; ``None``: none known.

    Assumed, so that a card is not slower than its like only because its sheet is shorter.
    """
    if gpu.l2_cache_bytes is not None or not gpu.compute_capability:
        return gpu.l2_cache_bytes
    known = _l2_caches().get(_generation(gpu), ())
    return known[len(known) // 2] if known else None


def list_gpus() -> tuple[GpuSpec, ...]:
    """Every catalogued GPU, in the order of the table."""
    return tuple(_gpu_spec(entry.name) for entry in _gpu_entries())


@functools.lru_cache(maxsize=1024)
def find_gpu(name: str) -> GpuSpec:
    """The one product called ``name``: its catalogue name, what NVML prints, or what people type.

    Case, spaces, hyphens and the vendor's name do not matter. Raises :class:`AmbiguousNameError` where several
    products fit ("A100"), :class:`UnknownNameError` where none does.
    """
    words = _gpu_words(name)
    entries = _gpu_entries()
    matches = [entry for entry in entries if entry.is_named(words)] if set(words) - {"rtx"} else []
    if not matches:
        matches = [entry for entry in entries if _run_together(name) in entry.run_together]
    way_out = f"or describe it: {DESCRIBE_GPU}"
    if not matches and any(map(_says_a_model, words)):
        matches = [entry for entry in entries if entry.fits(words)]
        if matches and not any(entry.needed_words <= set(words) for entry in matches):
            way_out = f"{', '.join(entry.name for entry in matches)} is another card; {way_out}"
            matches = []
    if not matches:
        raise UnknownNameError("GPU", name, [entry.name for entry in entries], way_out=way_out)
    if len(matches) > 1:
        raise AmbiguousNameError("GPU", name, [entry.name for entry in matches])
    if matches[0].needs_size(name):
        raise AmbiguousNameError(
            "GPU", name, [matches[0].name], way_out="cards of other memory sizes carry this name, so say the size"
        )
    return _gpu_spec(matches[0].name)


def smallest_gpu_that_holds(num_bytes: float, *, vendor: str = "NVIDIA", needs_bf16: bool = False) -> GpuSpec | None:
    """The card with the least memory that is enough, of those with a dated price if any has one; of equal ones the cheapest.

    Cards of one marketed size differ by a few hundred MiB: within 2 % they count as equal. ``None`` where no catalogued
    card of this vendor (with a bf16 peak, if that is needed) has as much.
    """
    usd_by_gpu: dict[str, float] = {}
    for price in list_prices():
        usd_by_gpu[price.gpu] = min(price.usd_per_gpu_hour, usd_by_gpu.get(price.gpu, math.inf))
    enough = [
        gpu
        for gpu in list_gpus()
        if gpu.memory_bytes >= num_bytes and gpu.vendor == vendor and (gpu.peak_bf16_flops_per_second or not needs_bf16)
    ]
    enough = [gpu for gpu in enough if gpu.name in usd_by_gpu] or enough
    smallest = min((gpu.memory_bytes for gpu in enough), default=0)
    equal = [gpu for gpu in enough if gpu.memory_bytes <= 1.02 * smallest]
    return min(equal, key=lambda gpu: (usd_by_gpu.get(gpu.name, math.inf), gpu.memory_bytes, gpu.name), default=None)


# --- prices -----------------------------------------------------------------------------------------------------------

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
    return PriceTable(tuple(price_row_from_cells(cells) for cells in _read_table("prices.csv")))


def _file_key(path: str) -> tuple[str, int, int]:
    """Path, time and size: what decides whether a file that was read before must be read again."""
    status = os.stat(path)
    return path, status.st_mtime_ns, status.st_size


def _table_in_file(path: str) -> PriceTable:
    try:
        key = _file_key(path)
    except OSError:
        raise CostModelError(f"no such price file: {path}") from None
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
        raise CostModelError(f"the price file {path} is not readable CSV: {_first_line(error)}") from None
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
        count = int(filled.get("gpus_per_instance") or 1)
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
    return float(cell) if cell else None


def list_price_rows() -> tuple[PriceRow, ...]:
    """Every dated price in use, with those that are never ranked and why."""
    return price_table().rows


def list_prices() -> tuple[Price, ...]:
    """Every dated price that may be ranked: a whole machine, sold today, not replaced by a later row."""
    return price_table().ranked


def find_cloud(name: str) -> str:
    """The catalogue's spelling of a cloud's name; :class:`UnknownNameError` if it has no prices here."""
    clouds = sorted({row.price.cloud for row in list_price_rows()})
    wanted = _bare(name)
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
    if tier is not None and tier not in TIERS:
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


def age_days(as_of: str, today: datetime.date) -> int | None:
    """Days since ``as_of``; ``None`` where it is no full date (feeds also say "2026" or "2025-05")."""
    try:
        return (today - datetime.date.fromisoformat(as_of)).days
    except ValueError:
        return None


def price_age_days(price: Price, today: datetime.date) -> int | None:
    """Days since the price was read; ``None`` where the source gives no full date."""
    return age_days(price.as_of, today)


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


# --- models -----------------------------------------------------------------------------------------------------------

# What may follow a name without changing which model is meant: "Mixtral-8x7B" is "Mixtral-8x7B-v0.1".
_RELEASE_SUFFIX: Final = re.compile(r"-(hf|base|it|pt|v\d+(\.\d+)*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Where a catalogued config comes from. ``confidence``: "high" where its size equals a published tensor count."""

    model_id: str
    model_type: str
    confidence: str
    source: str


@functools.cache
def _model_rows() -> dict[str, dict[str, str]]:
    return {row["model_id"]: row for row in _read_table("models", "index.csv")}


@functools.cache
def _model_ids_by_lower_name() -> dict[str, str]:
    """Lower-case id, or alias -> catalogue id."""
    names = {row["alias"].lower(): row["model_id"] for row in _read_table("models", "aliases.csv")}
    names.update((model_id.lower(), model_id) for model_id in _model_rows())
    return names


def list_models() -> tuple[str, ...]:
    """Ids of all catalogued models, sorted."""
    return tuple(_model_rows())


def model_facts(model_id: str) -> ModelFacts:
    """Family and source of a catalogued model, by its exact id."""
    row = _model_rows()[model_id]
    return ModelFacts(model_id, row["model_type"], row["confidence"], row["source"])


def find_model_id(name: str) -> str | None:
    """The catalogue id that ``name`` means, ``None`` if none does.

    Case does not matter; the organisation and a release suffix (``-hf``, ``-v0.1``) may be left out where that leaves
    one model. Raises :class:`AmbiguousNameError` where it leaves several.
    """
    wanted = name.strip().strip("/").lower()
    names = _model_ids_by_lower_name()
    if wanted in names:
        return names[wanted]
    has_organisation = "/" in wanted
    exact, released = set(), set()
    for known, model_id in names.items():
        candidate = known if has_organisation else known.rpartition("/")[2]
        if candidate == wanted:
            exact.add(model_id)
        elif candidate.startswith(wanted) and _RELEASE_SUFFIX.fullmatch(candidate, len(wanted)):
            released.add(model_id)
    matches = exact or released
    if len(matches) > 1:
        raise AmbiguousNameError("model", name, sorted(matches))
    return matches.pop() if matches else None


def find_model_config(model: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The ``config.json`` mapping of a model. Data only: nothing is executed.

    ``model`` is a mapping (copied), a path to a ``config.json`` or a folder that holds one, a catalogue id, or, only if
    ``huggingface_hub`` is installed and can reach it (or has it cached), a hub id. Raises :class:`CostModelError`.
    """
    if isinstance(model, Mapping):
        return dict(model)
    name = os.fspath(model).strip()
    if not name:
        raise CostModelError("the model is an empty string; give an id, a path to a config.json, or a config mapping")
    path = os.path.expanduser(name)
    if name.lower().endswith(".json") or os.path.isfile(path) or os.path.isfile(os.path.join(path, "config.json")):
        return _config_from_path(path)
    model_id = find_model_id(name)
    if model_id is not None:
        return _read_json_object(os.path.join(DATA_FOLDER, "models", _model_rows()[model_id]["file"]))
    if os.path.isdir(path):
        return _config_from_path(path)
    return _config_from_hub(name)


def _config_from_path(path: str) -> dict[str, Any]:
    if os.path.isdir(path):
        config_path = os.path.join(path, "config.json")
        adapter_path = os.path.join(path, "adapter_config.json")
        if not os.path.isfile(config_path) and os.path.isfile(adapter_path):
            base = _read_json_object(adapter_path).get("base_model_name_or_path")
            raise CostModelError(f"{path} holds a LoRA adapter, not a model; give its base model: {base}")
        if not os.path.isfile(config_path):
            raise CostModelError(f"the folder {path} holds no config.json")
        path = config_path
    if not os.path.isfile(path):
        raise CostModelError(f"no such file: {path}")
    return _read_json_object(path)


def _read_json_object(path: str) -> dict[str, Any]:
    try:
        value = json.loads(read_json_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CostModelError(f"{path} is not readable JSON: {_first_line(error)}") from None
    if not isinstance(value, dict):
        raise CostModelError(f"{path} is not a config: it holds a {type(value).__name__}, not an object")
    return value


def _config_from_hub(name: str) -> dict[str, Any]:
    """``config.json`` of a hub repository, by the installed ``huggingface_hub``: that one file, never code."""
    reason = "it is not in the catalogue"
    if re.fullmatch(r"[\w.\-]+/[\w.\-]+", name):
        try:
            from huggingface_hub import hf_hub_url, try_to_load_from_cache

            # Both are exported at run time only, which a type checker cannot see.
            hub_utils: Any = importlib.import_module("huggingface_hub.utils")
        except ImportError:
            reason += ", and huggingface_hub is not installed to ask the hub"
        else:
            cached = try_to_load_from_cache(name, "config.json")
            if isinstance(cached, str):
                return _read_json_object(cached)
            try:
                # One request: the client's own download retries for half a minute where there is no network.
                response = hub_utils.get_session().get(
                    hf_hub_url(name, "config.json"),
                    headers=hub_utils.build_hf_headers(),
                    timeout=HUB_TIMEOUT_SECONDS,
                )
                response.raise_for_status()
                config = response.json()
            except Exception as error:  # whatever the network, the hub or its client has to say
                reason += f", and the hub gave none ({_first_line(error)})"
            else:
                if isinstance(config, dict):
                    return config
                reason += ", and the hub's config.json is not an object"
    raise UnknownNameError("model", name, _known_like(name), way_out=f"{reason}; give a path to its config.json")


def _known_like(name: str) -> list[str]:
    """Ids to compare a misspelt name with: whole ones, or bare ones for a name without organisation."""
    if "/" in name:
        return list(list_models())
    return [model_id.rpartition("/")[2] for model_id in list_models()]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# --- data sets --------------------------------------------------------------------------------------------------------

_DATASET_ALIASES: Final = {"cs": "commonsense_15k", "math": "math_14k"}


def list_length_datasets() -> tuple[str, ...]:
    """Data sets whose distribution of lengths is known."""
    return tuple(sorted(file.removesuffix(".csv") for file in os.listdir(os.path.join(DATA_FOLDER, "lengths"))))


@functools.cache
def length_histogram(dataset_name: str) -> Mapping[int, float]:
    """Tokens per sample -> number of samples, of a catalogued data set. Raises :class:`UnknownNameError`."""
    known = list_length_datasets()
    wanted = re.sub(r"[\s-]+", "_", dataset_name.strip().lower())
    wanted = _DATASET_ALIASES.get(wanted, wanted)
    for name in known:
        if wanted in (name, name.replace("_", "")):
            rows = _read_table("lengths", f"{name}.csv")
            return MappingProxyType({int(row["length_tokens"]): float(row["num_samples"]) for row in rows})
    raise UnknownNameError("data set", dataset_name, known, way_out="or give a histogram, the lengths, or a file of lengths")
