"""A decoder layer from a mixer and a feed-forward, with the norms around them; what stands outside the layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from costmodel.blocks import Block, Builder, Fields, Flag, is_set
from costmodel.model_spec import Layer, Linear, Norm, Weights


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of the hidden size around the blocks, by name; ``""``: none there."""

    before_mixer: str = "input_layernorm"
    before_mlp: str = "post_attention_layernorm"
    after_mixer: str = ""
    after_mlp: str = ""
    kind: str = "rms"
    bias: Flag = False


def layer_of(
    mixer: Builder,
    feed_forward: Builder | None,
    norms: Norms = Norms(),
    *,
    is_parallel: Flag = False,
) -> Callable[[Fields, int], Layer]:
    """A layer: norm, mixer, norm, feed-forward, with the norms in the order of execution."""

    def build(fields: Fields, layer: int) -> Layer:
        mixed = mixer(fields, layer)
        fed = feed_forward(fields, layer) if feed_forward else Block()
        hidden = fields.hidden_size
        bias = is_set(fields, norms.bias)

        parallel = is_set(fields, is_parallel)

        def norm(name: str, *, reads_input: bool = False) -> tuple[Norm, ...]:
            return (Norm(name, hidden, hidden, norms.kind, bias, reads_input),) if name else ()

        has_dropout = bool(fields.get("hidden_dropout"))
        mixer_out = next((each.name for each in mixed.linears if each.place == "mixer_out"), "")
        ends_with = fed.last_linear if feed_forward else mixer_out
        before, after = norm(norms.before_mixer, reads_input=True), norm(norms.after_mlp) if feed_forward else ()
        middle: tuple[Norm, ...] = ()
        if feed_forward:
            reads_input = parallel or not norms.before_mixer
            middle = (*norm(norms.after_mixer), *norm(norms.before_mlp, reads_input=reads_input))
        return Layer(
            linears=mixed.linears + fed.linears,
            norms=before + middle + mixed.norms + fed.norms + after,
            attention=mixed.attention,
            experts=fed.experts,
            weights=mixed.weights + fed.weights,
            scan=mixed.scan,
            mixer_experts=mixed.experts,
            is_parallel=parallel,
            shares_input=parallel and not norms.before_mlp,
            last_linear="" if after or has_dropout else ends_with,
            has_dropout=has_dropout,
            is_gated=fed.is_gated,
        )

    return build


@dataclass(frozen=True, slots=True)
class Outside:
    """What stands outside the layers besides embedding and head."""

    norms: tuple[Norm, ...] = ()
    linears: tuple[Linear, ...] = ()
    weights: tuple[Weights, ...] = ()
    embedding_width: int | None = None


def final_norm(name: str = "model.norm", kind: str = "rms", *, bias: Flag = False) -> Callable[[Fields], Outside]:
    def build(fields: Fields) -> Outside:
        return Outside((Norm(name, fields.hidden_size, fields.hidden_size, kind, is_set(fields, bias)),))

    return build
