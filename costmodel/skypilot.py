"""Candidates of ``compare`` as the ``resources:`` block of a SkyPilot task: text, one choice an entry, best first.

Names of clouds and accelerators are those of SkyPilot 0.14 (``sky/clouds``, ``sky/utils/gpu_names.py``, its fetchers for
RunPod and Lambda). A candidate that SkyPilot cannot rent is a comment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from costmodel.comparison_tables import settings_text
from costmodel.formats import format_seconds, format_usd

if TYPE_CHECKING:
    from costmodel.candidates import Candidate

_CLOUDS: Final = {
    "AWS": "aws",
    "Azure": "azure",
    "CUDO": "cudo",
    "DigitalOcean": "do",
    "GCP": "gcp",
    "Lambda": "lambda",
    "Mithril": "mithril",
    "Nebius": "nebius",
    "OCI": "oci",
    "RunPod": "runpod",
    "Seeweb": "seeweb",
    "Vast": "vast",
    "Verda": "verda",
}

_ACCELERATORS: Final = {
    "P100-PCIE-16GB": "P100",
    "V100-PCIE-16GB": "V100",
    "V100-SXM2-16GB": "V100",
    "V100-PCIE-32GB": "V100-32GB",
    "V100-SXM2-32GB": "V100-32GB",
    "T4": "T4",
    "Quadro RTX 6000": "RTX6000",
    "A10": "A10",
    "A10G": "A10G",
    "A30": "A30",
    "A40": "A40",
    "A100-PCIE-40GB": "A100",
    "A100-SXM4-40GB": "A100",
    "A100-PCIE-80GB": "A100-80GB",
    "A100-SXM4-80GB": "A100-80GB",
    "RTX 3090": "RTX3090",
    "RTX A4000": "RTXA4000",
    "RTX A5000": "RTXA5000",
    "RTX A6000": "RTXA6000",
    "L4": "L4",
    "L40": "L40",
    "L40S": "L40S",
    "RTX 4090": "RTX4090",
    "RTX 5090": "RTX5090",
    "RTX 6000 Ada": "RTX6000-Ada",
    "H100 PCIe": "H100",
    "H100 SXM": "H100",
    "H100 NVL": "H100",
    "H200 SXM": "H200",
    "GH200 96GB": "GH200",
    "B200": "B200",
    "B300": "B300",
    "MI300X": "MI300X",
    "RTX PRO 6000 Blackwell Server": "RTXPRO6000",
}
# Where one cloud's catalogue tells apart what the others call by one name.
_ACCELERATORS_OF_CLOUD: Final = {
    ("RunPod", "A100-SXM4-80GB"): "A100-80GB-SXM",
    ("RunPod", "H100 SXM"): "H100-SXM",
    ("RunPod", "H100 NVL"): "H100-NVL",
    ("RunPod", "H200 SXM"): "H200-SXM",
    ("Lambda", "RTX A6000"): "A6000",
}
# Clouds whose product is SkyPilot's instance type.
_NAMED_MACHINES: Final = frozenset({"AWS", "Azure"})


def resources_block(candidates: Sequence[Candidate]) -> str:
    """The block for a task's YAML; its comments hold the estimates. Candidates that do not fit are left out."""
    lines = [
        "# Best first. Time and dollars are estimates of ftcost compare; a machine of several GPUs is billed whole.",
        "resources:",
        "  ordered:",
    ]
    entries = [(each, _infra(each), _accelerator(each)) for each in candidates if each.fits and each.price is not None]
    for each, infra, accelerator in entries:
        assert each.price is not None
        if infra is None or accelerator is None:
            lines.append(f"    # not on SkyPilot: {each.gpu} at {each.price.cloud}, {_estimate_text(each)}")
            continue
        lines.append(f"    - infra: {infra}  # {_estimate_text(each)}")
        num_gpus = max(each.num_gpus, each.price.gpus_per_instance)
        lines.append(f"      accelerators: {accelerator}:{num_gpus}")
        if each.price.cloud in _NAMED_MACHINES:
            lines.append(f"      instance_type: {each.price.product}")
        lines.append(f"      use_spot: {'true' if each.price.tier == 'spot' else 'false'}")
        if each.settings:
            lines.append(f"      # set: {settings_text(each.settings)}")
    if not any(map(can_rent, candidates)):  # an empty block would let SkyPilot take any machine: no block at all
        comments = [line.strip() for line in lines[3:]]
        return "\n".join(["# SkyPilot rents no offer that fits, so there is no resources: block.", *comments]) + "\n"
    return "\n".join(lines) + "\n"


def can_rent(candidate: Candidate) -> bool:
    """Whether it fits and SkyPilot knows its cloud and card."""
    return candidate.fits and candidate.price is not None and bool(_infra(candidate) and _accelerator(candidate))


def _infra(candidate: Candidate) -> str | None:
    """``cloud`` or ``cloud/region``; ``None`` where SkyPilot does not know the cloud."""
    assert candidate.price is not None
    cloud, region = _CLOUDS.get(candidate.price.cloud), candidate.price.region.partition(" ")[0]
    if cloud is None:
        return None
    # Elsewhere the catalogue's region is the cloud's own word, not always SkyPilot's.
    return f"{cloud}/{region}" if cloud in ("aws", "azure", "gcp") and re.fullmatch(r"[a-z0-9-]+", region) else cloud


def _accelerator(candidate: Candidate) -> str | None:
    assert candidate.price is not None
    return _ACCELERATORS_OF_CLOUD.get((candidate.price.cloud, candidate.gpu), _ACCELERATORS.get(candidate.gpu))


def _estimate_text(candidate: Candidate) -> str:
    assert candidate.price is not None
    dated = f" as of {candidate.price.as_of}" if candidate.price.as_of else ""
    return (
        f"{format_usd(candidate.total_usd)}, {format_seconds(candidate.total_seconds)}; "
        f"{format_usd(candidate.bill_usd_per_hour)}/h{dated}"
    )
