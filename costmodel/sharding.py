"""What ``fsdp`` and ``deepspeed`` split over the GPUs: a ZeRO stage, read from either.

ZeRO-1 splits the optimizer's states, ZeRO-2 the gradients too, ZeRO-3 (FSDP's ``full_shard``) the weights as well.
Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5; Zhao et al. 2023, arXiv:2304.11277.
Leaves out: offloading to the host, tensor and pipeline parallelism. Its communication: ``communication.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from costmodel.errors import PATH_CHARACTERS, CostModelError, UnknownNameError, shown
from costmodel.strict_json import read_json_text

# `sharding_strategy` in words (TrainingArguments.fsdp) and as torch's numbers. A hybrid splits inside one machine.
_STAGE_OF_STRATEGY: Final[Mapping[str, int]] = {
    "full_shard": 3,
    "shard_grad_op": 2,
    "no_shard": 0,
    "hybrid_shard": 3,
    "hybrid_shard_zero2": 2,
}
_STRATEGY_OF_NUMBER: Final[Mapping[str, str]] = {
    str(number): name for number, name in enumerate(_STAGE_OF_STRATEGY, start=1)
}
_OTHER_WORDS: Final = ("auto_wrap", "offload", "true")
# More elements than any model has weights; DeepSpeed's default is 5e8.
MAX_BUCKET_ELEMENTS: Final = 10**13
_NOT_SET: Final = frozenset({"", "none", "false", "no"})


@dataclass(frozen=True, slots=True)
class Sharding:
    """A ZeRO stage over ``num_gpus``; stage 0 is plain data parallelism."""

    stage: int = 0
    num_gpus: int = 1
    offloads: bool = False  # states or weights to the host, which is not modelled
    wraps_layers: bool = True  # gathers one layer at a time; without it the whole model at once
    by: str = ""  # the field that asks for it
    bucket_elements: int = 0  # of the buffers in which DeepSpeed's stage 2 collects gradients

    @property
    def is_active(self) -> bool:
        return self.stage > 0 and self.num_gpus > 1

    @property
    def keeps_masters(self) -> bool:
        """Whether 16-bit weights get fp32 masters and states: DeepSpeed makes them on one GPU too."""
        return self.is_active or (self.stage > 0 and self.by == "deepspeed")

    def parts(self, from_stage: int) -> int:
        """Into how many parts is split what ``from_stage`` and the stages above it split."""
        return self.num_gpus if self.stage >= from_stage else 1


def read_sharding(
    fsdp: str | Mapping[str, Any] | None, deepspeed: str | Mapping[str, Any] | None, num_gpus: int
) -> Sharding:
    """The sharding that the job's ``fsdp`` or ``deepspeed`` asks for.

    Raises :class:`CostModelError` for both at once, for words that are none of ``TrainingArguments.fsdp``'s, for a
    DeepSpeed config that cannot be read.
    """
    uses_fsdp = bool(fsdp) and str(fsdp).strip().lower() not in _NOT_SET
    uses_deepspeed = bool(deepspeed) and str(deepspeed).strip().lower() not in _NOT_SET
    if uses_fsdp and uses_deepspeed:
        raise CostModelError("fsdp and deepspeed are both given; a run is sharded by one of them, leave the other out")
    if uses_fsdp:
        assert fsdp is not None
        return _of_fsdp(fsdp, num_gpus)
    if uses_deepspeed:
        assert deepspeed is not None
        return _of_deepspeed(deepspeed, num_gpus)
    return Sharding(num_gpus=num_gpus)


def _of_fsdp(value: str | Mapping[str, Any], num_gpus: int) -> Sharding:
    if isinstance(value, Mapping):
        options = {str(name).removeprefix("fsdp_"): setting for name, setting in value.items()}
        strategy = str(options.get("sharding_strategy") or "").lower()
        strategy = _STRATEGY_OF_NUMBER.get(strategy, strategy)
        keeps_gathered = str(options.get("reshard_after_forward")).lower() in {"false", "shard_grad_op"}
        if not strategy:
            strategy = "shard_grad_op" if keeps_gathered else "full_shard"
        if strategy not in _STAGE_OF_STRATEGY:
            raise UnknownNameError("fsdp sharding_strategy", strategy, _STAGE_OF_STRATEGY)
        offloads = str(options.get("offload_params")).lower() == "true"
        wraps = str(options.get("auto_wrap_policy")).upper() != "NO_WRAP"
        return Sharding(_STAGE_OF_STRATEGY[strategy], num_gpus, offloads, wraps, "fsdp")
    words = value.lower().replace(",", " ").split()
    for word in words:
        if word not in _STAGE_OF_STRATEGY and word not in _OTHER_WORDS:
            raise UnknownNameError("fsdp option", word, (*_STAGE_OF_STRATEGY, *_OTHER_WORDS))
    stage = next((_STAGE_OF_STRATEGY[word] for word in words if word in _STAGE_OF_STRATEGY), 3)
    return Sharding(stage, num_gpus, "offload" in words, by="fsdp")


def _of_deepspeed(value: str | Mapping[str, Any], num_gpus: int) -> Sharding:
    config = _deepspeed_config(value) if isinstance(value, str) else value
    zero = config.get("zero_optimization") or {}
    if not isinstance(zero, Mapping):
        raise CostModelError('deepspeed: zero_optimization must be a mapping such as {"stage": 3}')
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise CostModelError(f"deepspeed: zero_optimization.stage must be 0, 1, 2 or 3, got {shown(stage)}")
    devices = [
        part.get("device") for name in ("offload_optimizer", "offload_param") if isinstance(part := zero.get(name), Mapping)
    ]
    offloads = any(device not in (None, "none") for device in devices)
    return Sharding(int(stage), num_gpus, offloads, by="deepspeed", bucket_elements=_bucket_elements(zero, int(stage)))


def _bucket_elements(zero: Mapping[str, Any], stage: int) -> int:
    """``reduce_bucket_size`` of stage 2, twice where communication overlaps (DeepSpeed's documented options).

    "auto", which transformers fills with the square of the hidden size, is left out.
    """
    size = zero.get("reduce_bucket_size", 5e8)
    if size is None or size == "auto":
        return 0
    is_number = isinstance(size, (int, float)) and not isinstance(size, bool)
    if not (is_number and 1 <= size <= MAX_BUCKET_ELEMENTS):  # nan is in no range
        raise CostModelError(
            "deepspeed: zero_optimization.reduce_bucket_size must be a number of elements from 1 to "
            f'{MAX_BUCKET_ELEMENTS:g}, or "auto", got {shown(size)}'
        )
    return int(size) * (2 if zero.get("overlap_comm") else 1) if stage == 2 else 0


def _deepspeed_config(text: str) -> Mapping[str, Any]:
    """A DeepSpeed config from its JSON text or from the path of a JSON file."""
    where = "deepspeed"
    if not text.lstrip().startswith("{"):
        where = f"deepspeed config {shown(text, PATH_CHARACTERS)}"
        try:
            text = read_json_text(text)
        except (OSError, UnicodeDecodeError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise CostModelError(
                f"{where} cannot be read: {reason}; give the path of a JSON file or the config itself"
            ) from None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CostModelError(f"{where} is not JSON: {error}") from None
    if not isinstance(config, Mapping):
        raise CostModelError(f"{where} must hold a JSON object, got {type(config).__name__}")
    return config
