"""A decoder-only language model as counted weights: plain records, no config keys and no torch.

``families`` builds them from a ``config.json``; everything downstream (adapters, FLOPs, memory, time) reads only these.
Names are the paths of transformers 5, so that the rules of peft can be applied to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from costmodel.units import BYTES_PER_ELEMENT

# Where a linear stands in its layer, in the order of execution. What it reads follows: ``mixer_in`` reads the layer's normed
# input, ``mlp_in``, ``router`` and ``mlp_gate`` the MLP's; the others read what their block computed. ``stem``: before the
# first layer.
Place = Literal[
    "stem", "mixer_in", "mixer_inner", "mixer_out", "router", "mlp_in", "mlp_out", "mlp_gate", "side_in", "side_out"
]


@dataclass(frozen=True, slots=True)
class Linear:
    """One ``nn.Linear`` (or ``Conv1D``). ``name`` is its path inside the decoder layer, ``place`` one of :data:`Place`."""

    name: str
    in_features: int
    out_features: int
    bias: bool = False
    place: Place = "mixer_in"
    differentiable: bool = True  # False: its output is a choice of indices, no gradient comes back

    @property
    def num_params(self) -> int:
        return self.in_features * self.out_features + (self.out_features if self.bias else 0)

    @property
    def leaf(self) -> str:
        """The last part of the name: what ``target_modules`` of a LoRA names."""
        return self.name.rpartition(".")[2]

    @property
    def is_mixer(self) -> bool:
        return self.place.startswith("mixer")


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm: ``size`` weights (0: none), applied to ``width`` elements of each token.

    ``kind``: ``rms`` (normalised in fp32, weighed in the stream's type), ``rms_fp32`` (weighed in fp32 too), ``rms_offset``
    (so, by weight + 1: Gemma), ``layer`` (one fused kernel), ``cohere`` (a layer norm in Python).
    """

    name: str
    size: int
    width: int
    kind: str = "rms"
    bias: bool = False
    reads_layer_input: bool = False

    @property
    def num_params(self) -> int:
        return self.size * (2 if self.bias else 1)


@dataclass(frozen=True, slots=True)
class Weights:
    """A parameter that is no linear, norm or expert: a convolution, a decay, an attention sink, a position table."""

    name: str
    num_params: int
    is_lookup: bool = False  # a table that is read, never multiplied
    is_trained: bool = True


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention. ``head_dim`` of queries and keys; ``sliding_window`` in tokens, ``None`` attends to everything.

    ``num_heads`` 0: the layer mixes tokens without softmax attention, or not at all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    value_dim: int | None = None  # where values are of another width than keys (latent attention)
    has_fused_kernel: bool = True  # False: transformers has no SDPA path for the family, it holds the score matrix
    index_width: int = 0  # elements of the queries that only choose which keys count (DeepSeek sparse attention)
    index_heads: int = 0
    score: str = "plain"  # softmax in fp32; "sinks": in the compute type, with one more column; "softcap": tanh before it
    has_output_gate: bool = False  # the result is multiplied by a sigmoid
    fused_extra_width: int = 0  # elements of a fused projection that the values, a view of it, keep alive
    copies_output: bool = False  # queries are laid out head by head, so the kernel's result is copied for the output linear

    def eager_score_bytes(self, compute_bytes: int) -> int:
        """Bytes that the eager form keeps for each head and pair of tokens."""
        softmax = 4 + (compute_bytes if compute_bytes != 4 else 0)
        return {"plain": softmax, "sinks": compute_bytes, "softcap": softmax + compute_bytes}[self.score]

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of the keys of one token (of the values as well, unless ``value_dim`` differs)."""
        return self.num_kv_heads * self.head_dim

    @property
    def output_width(self) -> int:
        return self.num_heads * (self.value_dim or self.head_dim)


NO_ATTENTION: Final = Attention(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Scan:
    """A recurrent or linear mixer: what it multiplies besides its linears, in the chunked form of transformers' torch code.

    Forward FLOPs of a token: a depthwise convolution, ``state_flops``, and ``chunk_flops`` for each token of its chunk. The
    backward takes twice that and ``solve_flops`` for each token of the chunk (the gradient of triangular solves, whose own
    FLOPs torch does not count).
    """

    kind: str  # mamba | mamba2 | gated_delta | lightning | short_conv
    channels: int  # elements of one token that go through the convolution or the recurrence
    conv_kernel: int = 0
    state_flops: int = 0
    chunk_flops: int = 0
    chunk: int = 0  # tokens
    solve_flops: int = 0

    @property
    def flops_per_token(self) -> int:
        """Forward FLOPs of a token whatever its chunk."""
        return 2 * self.channels * self.conv_kernel + self.state_flops


@dataclass(frozen=True, slots=True)
class Stack:
    """One stacked parameter of routed experts: ``num_matrices`` matrices of (in_features x out_features)."""

    name: str
    num_matrices: int
    in_features: int
    out_features: int

    @property
    def num_params(self) -> int:
        return self.num_matrices * self.in_features * self.out_features


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts: MLPs of ``intermediate_size``; each token visits ``num_experts_per_tok`` of them.

    transformers 5 keeps them as stacked parameters, transformers 4 (of most families) as ``nn.Linear`` of each expert, whose
    names are ``linear_names`` (gate, up, down) under ``linear_path``; empty: stacked in 4 as well.
    """

    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    intermediate_size: int
    linear_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    linear_path: str = "mlp.experts"
    path: str = "mlp.experts"
    router: str = "mlp.gate"  # the module of the router; its weight is (num_experts, router_features)
    router_features: int | None = None  # None: hidden_size; 0: the router is an nn.Linear among the layer's linears
    router_bias: bool = False
    router_in_fp32: bool = False  # the router casts its input and weight to fp32
    router_was_linear: bool = True  # transformers 4 kept the router as an nn.Linear
    stack_names: tuple[str, ...] = ("gate_up_proj", "down_proj")
    is_gated: bool = True
    bias: bool = False
    clamps: bool = False  # the gated product is clamped and shifted in Python (gpt-oss)
    runs_all: bool = False  # every token goes through every expert and is masked (Llama 4 in transformers)

    @property
    def num_matrices(self) -> int:
        """Matrices (hidden x intermediate) of one expert: gate, up, down, or up and down."""
        return 3 if self.is_gated else 2

    @property
    def params_per_expert(self) -> int:
        biases = (self.num_matrices - 1) * self.intermediate_size + self.hidden_size if self.bias else 0
        return self.num_matrices * self.hidden_size * self.intermediate_size + biases

    @property
    def router_features_or_hidden(self) -> int:
        return self.hidden_size if self.router_features is None else self.router_features

    @property
    def router_params(self) -> int:
        return self.num_experts * (self.router_features_or_hidden + (1 if self.router_bias else 0))

    @property
    def num_params(self) -> int:
        """Routed experts and router."""
        return self.num_experts * self.params_per_expert + self.router_params

    @property
    def inactive_params(self) -> int:
        """Weights of the experts that one token does not visit."""
        return (self.num_experts - self.num_experts_per_tok) * self.params_per_expert

    @property
    def num_experts_computed(self) -> int:
        """Experts whose product is computed for one token."""
        return self.num_experts if self.runs_all else self.num_experts_per_tok

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The stacked parameters, by the names and shapes of transformers 5."""
        hidden, width, number = self.hidden_size, self.intermediate_size, self.num_experts
        if not self.stack_names:
            return ()
        if len(self.stack_names) == 3:  # three flat matrices (DBRX)
            return tuple(Stack(f"{self.path}.{name}", 1, hidden, number * width) for name in self.stack_names)
        into, out = self.stack_names
        return (
            Stack(f"{self.path}.{into}", number, hidden, (self.num_matrices - 1) * width),
            Stack(f"{self.path}.{out}", number, width, hidden),
        )


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: its linears outside the routed experts, its norms, its attention, its experts if any."""

    linears: tuple[Linear, ...]
    norms: tuple[Norm, ...]
    attention: Attention
    experts: Experts | None = None
    weights: tuple[Weights, ...] = ()
    scan: Scan | None = None
    mixer_experts: Experts | None = None  # routed query and output projections (JetMoe)
    is_parallel: bool = False  # attention and MLP both start from the layer's input
    shares_input: bool = False  # and from one norm of it
    last_linear: str = ""  # the linear that ends the layer; "": something after it keeps a tensor for the backward
    has_dropout: bool = False  # the config sets a dropout after attention and MLP
    is_gated: bool = True  # the dense or shared MLP multiplies two branches

    @property
    def num_params(self) -> int:
        return (
            sum(linear.num_params for linear in self.linears)
            + sum(norm.num_params for norm in self.norms)
            + sum(weights.num_params for weights in self.weights)
            + sum(experts.num_params for experts in self.all_experts)
        )

    @property
    def all_experts(self) -> tuple[Experts, ...]:
        return tuple(each for each in (self.mixer_experts, self.experts) if each)

    @property
    def mlp_width(self) -> int:
        """Intermediate elements of the dense and shared MLPs for each token; 0 in a layer of routed experts alone."""
        return sum(linear.in_features for linear in self.linears if linear.place == "mlp_out")

    def linear(self, leaf: str) -> Linear | None:
        return next((each for each in self.linears if each.leaf == leaf), None)

    def at(self, *places: Place) -> tuple[Linear, ...]:
        return tuple(each for each in self.linears if each.place in places)

    def parameters(self) -> Iterator[tuple[str, int]]:
        """(path inside the layer, elements) of every parameter."""
        for linear in self.linears:
            yield f"{linear.name}.weight", linear.in_features * linear.out_features
            if linear.bias:
                yield f"{linear.name}.bias", linear.out_features
        for norm in self.norms:
            if norm.size:
                yield f"{norm.name}.weight", norm.size
            if norm.bias:
                yield f"{norm.name}.bias", norm.size
        for weights in self.weights:
            yield weights.name, weights.num_params
        for experts in self.all_experts:
            for stack in experts.stacks:
                yield stack.name, stack.num_params
                if experts.bias:
                    yield f"{stack.name}_bias", stack.num_matrices * stack.out_features
            if not experts.stacks:
                for number in range(experts.num_experts):
                    for name in experts.linear_names:
                        yield f"{experts.path}.{number}.{name}.weight", experts.hidden_size * experts.intermediate_size
            if experts.router_params:
                biases = experts.num_experts if experts.router_bias else 0
                yield f"{experts.router}.weight", experts.router_params - biases
                if biases:
                    yield f"{experts.router}.bias", biases


@dataclass(frozen=True, slots=True)
class Tower:
    """An encoder of images or sound beside a language model, and what leads from it there: no row of text reaches it."""

    layers_path: str
    layer: Layer
    num_layers: int
    outside: Layer  # everything else, by whole paths

    @property
    def num_params(self) -> int:
        return self.layer.num_params * self.num_layers + self.outside.num_params

    def counted_linears(self) -> Iterator[tuple[Linear, int]]:
        """(linear, how many of it); those of the layers by their names inside one."""
        for linear in self.layer.linears:
            yield linear, self.num_layers
        for linear in self.outside.linears:
            yield linear, 1

    def linears(self) -> Iterator[Linear]:
        """Every ``nn.Linear``, by its whole path."""
        for index in range(self.num_layers):
            for linear in self.layer.linears:
                yield replace(linear, name=f"{self.layers_path}.{index}.{linear.name}")
        yield from self.outside.linears

    def weight_names(self) -> Iterator[str]:
        """What is no linear and no norm, by its whole path."""
        for index in range(self.num_layers):
            for weights in self.layer.weights:
                yield f"{self.layers_path}.{index}.{weights.name}"
        for weights in self.outside.weights:
            yield weights.name

    def parameters(self) -> Iterator[tuple[str, int]]:
        """(whole path, elements) of every parameter."""
        for index in range(self.num_layers):
            for name, size in self.layer.parameters():
                yield f"{self.layers_path}.{index}.{name}", size
        yield from self.outside.parameters()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only language model as counted weights. ``layers`` are runs of equal layers: ((layer, how many), ...)."""

    name: str
    family: str
    hidden_size: int
    vocab_size: int
    layers: tuple[tuple[Layer, int], ...]
    tied_embeddings: bool
    hidden_act: str
    checkpoint_dtype: str | None  # what the config says the weights are stored in
    norms: tuple[Norm, ...] = ()  # outside the layers: the final one last
    linears: tuple[Linear, ...] = ()  # outside the layers, the head apart
    weights: tuple[Weights, ...] = ()  # outside the layers: position tables and the like
    embedding_width: int | None = None  # where it differs from hidden_size
    head_bias: bool = False
    caps_logits: bool = False  # a tanh between the head and the loss
    residual_in_fp32: bool = False  # the residual stream, whatever the type of the weights (Mamba)
    layers_path: str = "model.layers"
    embedding_path: str = "model.embed_tokens"
    head_path: str = "lm_head"
    checkpoint_quantization: str | None = None  # mxfp4 | fp8: how the published weights are packed
    activations_checked: bool = True  # False: activation bytes follow from the layers but were held against no trace
    max_position_embeddings: int | None = None  # the longest sequence that the positions were made for
    wrapper: str = ""  # model_type of the multimodal class that this is the language model of
    towers: tuple[Tower, ...] = ()  # what is loaded beside it; in no other figure of this record
    uncounted_towers: tuple[str, ...] = ()  # model_type of encoders that nothing is known of

    def __hash__(self) -> int:
        """Of a few fields only: specs are keys of many caches, and hashing every layer would cost more than it saves."""
        return hash((self.name, self.family, self.hidden_size, self.vocab_size, self.tied_embeddings))

    @property
    def num_layers(self) -> int:
        return sum(count for _, count in self.layers)

    @property
    def head_width(self) -> int:
        """Elements of each token that the output head reads."""
        return self.embedding_width or self.hidden_size

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.head_width

    @property
    def head_params(self) -> int:
        """Weights of the output head that are not already the embedding's."""
        return (0 if self.tied_embeddings else self.embedding_params) + (self.vocab_size if self.head_bias else 0)

    @property
    def outside_params(self) -> int:
        """Everything but the layers, the embedding and the head."""
        return Layer(self.linears, self.norms, NO_ATTENTION, weights=self.weights).num_params

    @property
    def tower_params(self) -> int:
        return sum(tower.num_params for tower in self.towers)

    @property
    def num_params(self) -> int:
        """All weights of the language model, a tied head counted once."""
        blocks = sum(layer.num_params * count for layer, count in self.layers)
        return self.embedding_params + self.head_params + blocks + self.outside_params

    @property
    def num_active_params(self) -> int:
        """Weights that multiply one token: routed top-k, shared, attention, norms, head; look-up tables are left out."""
        inactive = sum(experts.inactive_params * count for layer, count in self.layers for experts in layer.all_experts)
        lookup = sum(each.num_params for each in self.weights if each.is_lookup)
        return self.num_params - inactive - lookup - (0 if self.tied_embeddings else self.embedding_params)

    @property
    def is_moe(self) -> bool:
        return any(layer.experts for layer, _ in self.layers)

    @property
    def checkpoint_bytes(self) -> int | None:
        """Bytes of the published weights; ``None`` where the config names neither type nor a known packing.

        MXFP4 packs the routed experts (4 bit and one 8-bit scale for 32 weights), FP8 every linear of the layers (1 B and
        one fp32 scale for a block of 128 x 128); biases, norms, router, embedding and head stay in 16 bit.
        """
        width = BYTES_PER_ELEMENT.get(self.checkpoint_dtype or "")
        if self.checkpoint_quantization is None:
            return None if width is None else width * self.num_params
        packed = packed_bytes = 0
        for layer, count in self.layers:
            matrices = [
                (stack.in_features, stack.out_features, count * stack.num_matrices)
                for experts in layer.all_experts
                for stack in experts.stacks
            ]
            if self.checkpoint_quantization == "fp8":
                linears = layer.at("mixer_in", "mixer_inner", "mixer_out", "mlp_in", "mlp_out")
                matrices += [(each.in_features, each.out_features, count) for each in linears]
            for width_in, width_out, number in matrices:
                packed += number * width_in * width_out
                if self.checkpoint_quantization == "fp8":
                    blocks = -(-width_in // 128) * -(-width_out // 128)
                    packed_bytes += number * (width_in * width_out + 4 * blocks)
                else:
                    packed_bytes += number * width_in * width_out * 17 // 32
        return packed_bytes + (width or 2) * (self.num_params - packed)

    def parameters(self) -> Iterator[tuple[str, int]]:
        """(full name, elements) of every parameter, as ``named_parameters()`` of transformers 5 gives them."""
        yield f"{self.embedding_path}.weight", self.embedding_params
        index = 0
        for layer, count in self.layers:
            parameters = list(layer.parameters())
            for _ in range(count):
                for name, size in parameters:
                    yield f"{self.layers_path}.{index}.{name}", size
                index += 1
        outside = Layer(self.linears, self.norms, NO_ATTENTION, weights=self.weights)
        yield from outside.parameters()
        if not self.tied_embeddings:
            yield f"{self.head_path}.weight", self.embedding_params
        if self.head_bias:
            yield f"{self.head_path}.bias", self.vocab_size
