"""What data parallelism sends between the GPUs of one machine, and how long that keeps a link busy.

A ring over N GPUs sends (N - 1) / N of a tensor for an all-gather or a reduce-scatter, and twice that for an all-reduce.
Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 7; Li et al. 2020, arXiv:2006.15704 (DDP's buckets and overlap);
Zhao et al. 2023, arXiv:2304.11277 (FSDP). Leaves out: several machines, start-up time of a collective, contention with the
kernels beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from costmodel import constants as c
from costmodel.defaults import ResolvedJob
from costmodel.held_memory import held_bytes, trained_parameter_bytes
from costmodel.links import link_of
from costmodel.model_spec import ModelSpec
from costmodel.specs import GpuSpec
from costmodel.units import BYTES_PER_ELEMENT
from costmodel.workload import num_trainable_params, stream_dtype

DDP_BUCKET_BYTES: Final = 25 * 2**20  # DistributedDataParallel's bucket_cap_mb


@dataclass(frozen=True, slots=True)
class Communication:
    """Seconds that the link is busy beside each pass, and the piece of them that nothing can hide.

    ``forward`` and ``backward`` are of each micro-batch, ``last_backward`` is of the last one of an optimizer step.
    """

    forward_seconds: float
    backward_seconds: float
    last_backward_seconds: float
    first_piece_share: float  # of a pass: gathered before it can start, or reduced after it has ended


def communication(model: ModelSpec, job: ResolvedJob, gpu: GpuSpec) -> Communication | None:
    """The communication of one GPU of ``job``; ``None`` on one GPU, or where the link is not known.

    DDP all-reduces the gradients of what is trained, in their type, once a step. ZeRO-1 and 2 reduce-scatter them and gather
    the trained weights again; FSDP's ``shard_grad_op`` gathers all weights. ZeRO-3 and ``full_shard`` gather all weights
    for the forward and once more for the backward of every micro-batch, and reduce-scatter the gradients.
    """
    link, number, sharding = link_of(gpu), job.num_gpus, job.sharding
    if number == 1 or link is None or gpu.vendor == "CPU":
        return None
    rate = link.bytes_per_second * (c.PCIE_EFFICIENCY if link.is_pcie else c.NVLINK_EFFICIENCY)
    once = (number - 1) / number / rate  # seconds a byte of an all-gather or a reduce-scatter
    if not sharding.stage:
        gradients = trained_parameter_bytes(model, job)
        return Communication(0.0, 0.0, 2 * gradients * once, min(1.0, DDP_BUCKET_BYTES / gradients) if gradients else 1.0)
    width = BYTES_PER_ELEMENT[job.autocast_dtype or stream_dtype(job)]
    trained = width * num_trainable_params(model, job)
    weights = held_bytes(model, job).weights_bytes if job.quantization else width * model.num_params
    piece = 1.0 / model.num_layers if sharding.wraps_layers else 1.0
    if sharding.stage == 3:
        return Communication(weights * once, (weights + trained) * once, 0.0, piece)
    is_fsdp = sharding.by == "fsdp"
    # DeepSpeed's stage 2 keeps only its own gradients, so it reduces those of every micro-batch
    every = trained if sharding.stage == 2 and not is_fsdp else 0.0
    return Communication((weights if is_fsdp else trained) * once, every * once, (trained - every) * once, piece)


def exposed_seconds(link_seconds: float, pass_seconds: float, first_piece_share: float) -> float:
    """What a pass takes longer: what does not fit beside it, and at least the piece that nothing runs beside."""
    return max(link_seconds - pass_seconds, link_seconds * first_piece_share)
