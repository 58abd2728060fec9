"""What joins the GPUs of one machine: the card's own links, or PCIe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from costmodel.specs import GpuSpec
from costmodel.units import GIGA

# PCIe x16 in one direction after line coding, by the generation that an architecture's cards have (PCI-SIG base
# specifications 3.0 to 5.0; data sheets).
_PCIE_BY_ARCHITECTURE: Final = {
    **dict.fromkeys(("Pascal", "Volta", "Turing"), 15.75 * GIGA),
    **dict.fromkeys(("Ampere", "Ada"), 31.5 * GIGA),
    **dict.fromkeys(("Hopper", "Blackwell"), 63.0 * GIGA),
}


@dataclass(frozen=True, slots=True)
class Link:
    """``bytes_per_second`` of one GPU in one direction, as the data sheet has it."""

    bytes_per_second: float
    is_pcie: bool
    is_assumed: bool = False  # PCIe x16 of the architecture's generation, the GPU's description says nothing


def link_of(gpu: GpuSpec) -> Link | None:
    """How this GPU reaches the others of its machine; ``None``: not known. Bridges that are sold apart are not counted."""
    if gpu.nvlink_bytes_per_second:
        return Link(gpu.nvlink_bytes_per_second, is_pcie=False)
    if gpu.pcie_bytes_per_second:
        return Link(gpu.pcie_bytes_per_second, is_pcie=True)
    assumed = _PCIE_BY_ARCHITECTURE.get(gpu.architecture) if gpu.vendor == "NVIDIA" else None
    return Link(assumed, is_pcie=True, is_assumed=True) if assumed else None
