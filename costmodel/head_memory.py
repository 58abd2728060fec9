"""What a head and a loss hold that never build all the logits: TRL's, Liger's, and a plain loss in chunks.

In bytes, of one micro-batch. Read from TRL 1.15 and 1.16 (kernels/chunked_logprob.py, trainer/utils.py) and Liger 0.8
(ops/fused_linear_cross_entropy.py), and traced (``tests/tracing``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from costmodel.constants import LOSS_CHUNK_TOKENS
from costmodel.held_memory import ElementBytes
from costmodel.model_spec import ModelSpec

TRL_TILE: Final = (4096, 32_768)  # positions and words of the one tile that is multiplied out at a time
_BYTES_PER_CHUNKED_LOGIT: Final = 16.0  # a loss of plain operators, forward and backward (unslothai/unsloth#7203)


@dataclass(frozen=True, slots=True)
class FusedHead:
    """``kept_bytes`` wait for the backward; the others are there during the forward's end and the backward's beginning."""

    kept_bytes: float
    in_forward_bytes: float
    in_backward_bytes: float
    kept_gradient_bytes: float = 0.0  # of the head, already there at the end of the forward


def tiled_head(model: ModelSpec, types: ElementBytes, num_positions: float, gradient_bytes: float) -> FusedHead:
    """TRL: the positions that count are copied; the backward multiplies each tile again and adds gradients up in fp32.

    ``gradient_bytes``: of the head's weight, 0 where it is not trained.
    """
    hidden = model.hidden_size
    positions, words = min(num_positions, TRL_TILE[0]), min(model.vocab_size, TRL_TILE[1])
    tile = types.compute * positions * words
    in_forward = in_backward = tile
    if types.stream != types.compute:
        # slices of the positions and of the weight are cast; the forward names none of the weight's, so that one goes before
        # the next comes, as it does not with the backward's and with the positions'
        is_cut = num_positions > TRL_TILE[0]
        in_forward += types.compute * hidden * (positions * (2 if is_cut else 1) + words)
        in_backward += 2.0 * types.compute * hidden * (positions + words)
    kept = types.stream * hidden * num_positions
    # both gradients in fp32, and their copies in the type they are wanted in
    of_positions = (4.0 + (types.stream if types.stream != 4 else 0)) * hidden * num_positions
    of_weight = 0.0
    if gradient_bytes:
        in_fp32 = 4.0 * model.vocab_size * hidden
        of_weight = in_fp32 + (gradient_bytes if gradient_bytes != in_fp32 else 0.0)
    return FusedHead(kept, in_forward, in_backward + of_positions + of_weight)


def liger_head(model: ModelSpec, types: ElementBytes, num_positions: float, gradient_bytes: float) -> FusedHead:
    """Liger: the forward already makes the gradients, chunk by chunk; a chunk's logits hold about what its positions do."""
    hidden, words = model.hidden_size, model.vocab_size
    chunk = min(num_positions, float(next_power_of_two(-(-num_positions // -(-words // hidden)))))
    of_chunk = types.compute * chunk * (words + hidden)
    of_weight = (types.compute + 4.0) * words * hidden if gradient_bytes else 0.0  # a product, and lifted to fp32
    kept = types.stream * hidden * num_positions
    return FusedHead(kept, of_chunk + of_weight, 0.0, gradient_bytes)


def chunked_head(model: ModelSpec, types: ElementBytes, num_positions: float, gradient_bytes: float) -> FusedHead:
    """Plain operators on one chunk of positions after the other."""
    chunk = min(num_positions, LOSS_CHUNK_TOKENS)
    held = _BYTES_PER_CHUNKED_LOGIT * model.vocab_size * chunk + types.compute * model.hidden_size * num_positions
    return FusedHead(0.0, held, held + gradient_bytes)


def next_power_of_two(number: float) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << max(0, int(-(-number // 1)) - 1).bit_length()
