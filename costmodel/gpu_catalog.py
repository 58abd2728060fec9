"""What is known about GPUs: look-up by any name that a person types or NVML prints.

Read lazily and cached. A name that fits no entry or several is an error that lists the nearest ones: one product's numbers
never stand in for another's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from costmodel.arguments import as_text
from costmodel.data_files import read_table
from costmodel.errors import AmbiguousNameError, UnknownNameError
from costmodel.specs import GpuSpec
from costmodel.units import GIB, GIGA, MIB, TERA

# Ways out by the names of a job's fields; the command line says its flags (costmodel/cli_run.py).
DESCRIBE_GPU: Final = (
    'in a job, "gpu": {"name", "memory_bytes", "memory_bandwidth_bytes_per_second", "peak_bf16_flops_per_second"}'
)

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
    for row in read_table("gpus.csv"):
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


def find_gpu(name: str) -> GpuSpec:
    """The one product called ``name``: its catalogue name, what NVML prints, or what people type.

    Case, spaces, hyphens and the vendor's name do not matter. Raises :class:`AmbiguousNameError` where several
    products fit ("A100"), :class:`UnknownNameError` where none does.
    """
    return _find_gpu(as_text(name, "the name of a GPU", 'text such as "L40S"'))


# "8xH100 SXM", "2 x 4090", "A40 x4": what people write for several
_SEVERAL: Final = re.compile(
    r"\s*(?:(?P<first>\d{1,3})\s*[x×*]\s*(?P<one>\S.*?)|(?P<other>\S.*?)\s*[x×*]\s*(?P<last>\d{1,3}))\s*", re.IGNORECASE
)


@functools.lru_cache(maxsize=1024)
def _find_gpu(name: str) -> GpuSpec:
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
    if not matches and (several := _SEVERAL.fullmatch(name)):
        number, one = several["first"] or several["last"], several["one"] or several["other"]
        way_out = f"for {number} of them give gpu {one!r} and num_gpus {number} (-g {one!r} --num-gpus {number})"
    if not matches:
        raise UnknownNameError("GPU", name, [entry.name for entry in entries], way_out=way_out)
    if len(matches) > 1:
        raise AmbiguousNameError("GPU", name, [entry.name for entry in matches])
    if matches[0].needs_size(name):
        raise AmbiguousNameError(
            "GPU", name, [matches[0].name], way_out=f"say the size, or describe another: {DESCRIBE_GPU}"
        )
    return _gpu_spec(matches[0].name)
