"""The fitted and adopted constants, each with its unit, where it comes from and how well it is known."""

from __future__ import annotations

from typing import Final

from costmodel.units import MIB

CONSTANTS_VERSION: Final = "2026.11"

# --- memory -----------------------------------------------------------------------------------------------------------

# One workspace of cuBLAS (a memory snapshot shows it). Larger on Hopper (32 MiB is what NVIDIA recommends there).
CUBLAS_WORKSPACE_BYTES: Final = 8_519_680

# CUDA context, kernels and libraries of a torch process, outside torch's allocator. Public reports name 140 MiB (T4) to
# 650 MB; no measurement of ours yet, so the interval is wide.
CUDA_CONTEXT_BYTES: Final = 480 * MIB

# What the caching allocator holds beyond the allocated peak: holes between GB-sized loss tensors, and optimizer states
# created in the gaps of the first step. Replays of traced allocation logs: LoRA 3-7 %, LoRA checkpointed 4-16 %, full
# 4-22 %.
ALLOCATOR_OVERHEAD: Final[dict[str, float]] = {"lora": 0.05, "lora_checkpointed": 0.09, "full": 0.10}

# Positions whose logits exist at once: TRL 1.16 kernels/chunked_logprob.py; Liger's fused head sizes its chunks by
# hidden/vocab, a few hundred to two thousand positions.
LOSS_CHUNK_TOKENS: Final[dict[str, int]] = {"chunked": 2048, "fused": 1024}
