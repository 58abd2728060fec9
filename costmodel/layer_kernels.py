"""Which kernels compute a layer's activation, norms and attention, as far as they decide what memory holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from costmodel.defaults import ResolvedJob
from costmodel.model_spec import Layer, ModelSpec
from costmodel.workload import Batch, reaches_window

# Tensors as wide as the MLP that an activation keeps for its backward (what it reads and what its steps need), and whether
# the result is among them. Counted from activations.py of transformers 5.24, where gelu_new and gelu_fast are plain Python.
KEPT_BY_ACTIVATION: Final = {
    "gelu_new": (4, False),
    "gelu_accurate": (4, False),
    "gelu_fast": (7, False),
    "relu": (1, True),
    "relu2": (1, False),
    "quick_gelu": (2, False),
    "xielu": (4, False),
}


def activation_is_one_kernel(model: ModelSpec) -> bool:
    """Whether the activation reads one tensor and makes one, with none between."""
    return model.hidden_act == "relu" or model.hidden_act not in KEPT_BY_ACTIVATION


# Families whose norms and gated MLPs Liger 0.8 replaces (transformers/monkey_patch.py); of stacked experts, the norms.
_LIGER_FAMILIES: Final = frozenset(
    {"exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "hunyuan_v1_dense", "llama", "ministral", "mistral", "mixtral"}
    | {"olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"}
)


# Where it replaces those of queries and keys as well.
LIGER_HEAD_NORM_FAMILIES: Final = frozenset({"exaone4", "gemma3_text"})


def has_liger_norms(model: ModelSpec, job: ResolvedJob) -> bool:
    """Whether Liger computes the norms of hidden states and the products of gated MLPs."""
    return job.use_liger_kernel and model.family in _LIGER_FAMILIES


@dataclass(frozen=True, slots=True)
class Rows:
    """What decides which masks the rows of a batch need, whatever their number."""

    is_padded: bool = False  # they differ in length
    reached_window: int = 0  # the widest sliding window that they reach, in tokens


def rows_of(model: ModelSpec, batch: Batch, *, is_padded: bool) -> Rows:
    """``is_padded``: whether the sequences of ``batch`` differ in length."""
    windows = {layer.attention.sliding_window for layer, _ in model.layers} - {None}
    return Rows(is_padded, max((each for each in windows if each and reaches_window(batch.row_tokens, each)), default=0))


def attention_is_masked(layer: Layer, job: ResolvedJob, rows: Rows) -> bool:
    """Whether ``sdpa`` gets a mask: for a batch of unequal lengths, or for a window that the rows reach."""
    window = layer.attention.sliding_window
    reaches_window = window is not None and window <= rows.reached_window
    return job.attn_implementation == "sdpa" and ((rows.is_padded and job.framework != "litgpt") or reaches_window)
