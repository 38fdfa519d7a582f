"""The fields of a decoder's description; runtime/model/decoder.py computes the decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..rope import Rope
from .family import CHUNKED, FULL, HYBRID, LINEAR, NONE, Architecture

ACTIVATIONS = (
    *("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "gelu_new", "gelu_fast", "quick_gelu"),
    "xielu",
)
"""The activations of config.json that runtime/model/decoder.py supports."""


@dataclass(frozen=True)
class State:
    """What a layer carries from token to token of a row.

    Attributes:
        heads: each has a matrix of [width, head_dim].
        convolved: features of the convolution before it, which sees `taps` tokens, the token itself included.
    """

    heads: int
    head_dim: int
    width: int
    convolved: int
    taps: int


@dataclass(frozen=True)
class Norm:
    """A kind of normalization.

    Attributes:
        eps: added to the mean square, or to the variance.
        centered: whether the mean is subtracted (LayerNorm).
        bias: whether a bias is added.
        offset: added to the weight: 1 if checkpoints hold the difference from 1.
        wide: whether the weight is applied in float32, before the result is cast.
        weighted: whether there is a weight.
    """

    eps: float
    centered: bool = False
    bias: bool = False
    offset: float = 0.0
    wide: bool = False
    weighted: bool = True


@dataclass(frozen=True)
class Places:
    """Where a layer's norms are, by the names of their tensors; None for no norm there.

    Attributes:
        before_attention, before_mlp: applied to a block's input.
        after_attention, after_mlp: applied to its output, before it is added to the residual stream.
        before_experts, after_experts, after_dense: in a layer whose experts are computed next to its
            feed-forward block: applied to the experts' input, to their output, and to the block's output,
            before both outputs are added.
        parallel: whether both blocks read the layer's input, and are added together. Without a norm of its
            own, the feed-forward block reads the output of the norm before attention.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    parallel: bool = False
    before_experts: str | None = None
    after_experts: str | None = None
    after_dense: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        places = (
            *(self.before_attention, self.after_attention, self.before_mlp, self.after_mlp),
            *(self.before_experts, self.after_experts, self.after_dense),
        )
        return tuple(dict.fromkeys(name for name in places if name is not None))


AROUND = Places(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
"""Norms on each block's input and output."""

AFTER = Places(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
"""Norms only on each block's output."""


@dataclass(frozen=True)
class Delta:
    """The sizes of a gated delta net (runtime/model/mixers.py).

    Attributes:
        key_heads, value_heads: the first number divides the second.
        key_dim, value_dim: features of one such head.
        taps: tokens that its convolution sees, the token itself included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def features(self) -> int:
        """Return the features of queries, keys and values together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def of_key_head(self) -> tuple[int, int, int, int]:
        """Return the features of queries, keys, values and gates that belong to one key head."""
        values = self.value_heads // self.key_heads * self.value_dim
        return self.key_dim, self.key_dim, values, values


@dataclass(frozen=True)
class Mamba:
    """The sizes of a Mamba 2 mixer (runtime/model/mixers.py), or by `rank` of a Mamba 1 mixer.

    Attributes:
        heads, head_dim: of the state; `groups` divides the heads, and those of a group share b and c. In
            Mamba 1, each feature is a head.
        state: features of b and c.
        taps: tokens that its convolution sees, the token itself included.
        biases: what has a bias: "in" and "out" for the projections, "conv" for the convolution.
        shortest, longest: limits of a step; None for no limit, as JSON has no infinity.
        norm_parts: how many parts of the output are normalized, each by itself; 0 for no norm.
        gate_last: whether the gate multiplies after that norm.
        input_scale: factor of its input.
        scales: factors of the projected gate, x, b, c and step.
        closed: whether `out_proj` carries no LoRA: PEFT refuses it in families whose kernels read its weight
            without the adapter.
        rank: features that a token's steps are projected from in Mamba 1; 0 for Mamba 2.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int
    biases: tuple[str, ...] = ()
    shortest: float = 0.0
    longest: float | None = None
    norm_parts: int = 0
    gate_last: bool = False
    input_scale: float = 1.0
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    closed: bool = False
    rank: int = 0

    @property
    def inner(self) -> int:
        """Return the features of x, of the gate, and of the output."""
        return self.heads * self.head_dim

    @property
    def projected(self) -> tuple[int, int, int, int, int]:
        """Return the features of gate, x, b, c and step, in the order of Mamba 2's first projection."""
        return self.inner, self.inner, self.groups * self.state, self.groups * self.state, self.heads

    @property
    def convolved(self) -> int:
        """Return the features of x, b and c together; in Mamba 1 only those of x."""
        return self.inner if self.rank else sum(self.projected[1:4])

    @property
    def selected(self) -> dict[str, int]:
        """Return the features of step, b and c in Mamba 1, which one projection makes from x, by the names of
        their norms."""
        return {"dt_layernorm": self.rank, "b_layernorm": self.state, "c_layernorm": self.state}


@dataclass(frozen=True)
class Conv:
    """The sizes of a gated short convolution (runtime/model/mixers.py).

    Attributes:
        taps: tokens that it sees, the token itself included.
        bias: whether the convolution and both projections have biases.
    """

    taps: int
    bias: bool = False


@dataclass(frozen=True)
class Scales:
    """Factors within a layer (maximal update parametrization).

    Attributes:
        attention_input, attention_output: of attention.
        mamba_output: of the Mamba mixer.
        gate: of the feed-forward block's gate, before its activation.
        mlp_output: of the feed-forward block.
    """

    attention_input: float = 1.0
    attention_output: float = 1.0
    mamba_output: float = 1.0
    gate: float = 1.0
    mlp_output: float = 1.0


@dataclass(frozen=True)
class Latent:
    """The sizes of multi-head latent attention (https://arxiv.org/abs/2405.04434, section 2.1).

    A head's queries and keys are `plain` features followed by `turned` ones, which rotate. The turned
    features of a key are the same in all heads.

    Attributes:
        keys: features that a token's keys and values are compressed to.
        queries: features that its queries are compressed to; 0 if they are not compressed.
        plain, turned: features of a head's queries and keys that do not rotate, and that do.
        values: features of a head's values.
        eps: of the norms of compressed queries, keys and values.
    """

    keys: int
    queries: int
    plain: int
    turned: int
    values: int
    eps: float = 1e-6


@dataclass(frozen=True)
class Growth:
    """Queries at position p are multiplied by 1 + beta * log(1 + floor((p + shift) / length)).

    The source is Llama 4's temperature tuning (https://arxiv.org/abs/2501.19399).

    Attributes:
        unturned: whether this applies only in layers without rotation.
    """

    beta: float
    length: int
    shift: int = 0
    unturned: bool = False


@dataclass(frozen=True)
class ExpertTensors:
    """How a checkpoint names the experts of a layer, and how it stores them.

    Attributes:
        block: the module of the feed-forward block; "" for the layer itself.
        router: the module in it whose weight computes the scores.
        correction: the tensor in it that is added to the scores only for the choice.
        boxed: whether that tensor is [1, E], rather than [E].
        expert: the names of an expert's gate, up and down, or without a gate of up and down, with {} for its
            number.
        together: the names of all experts' gate and up, and of their down.
        apart: whether a tensor holds one expert (`expert`), rather than all experts (`together`).
        inputs_first: whether tensors of all experts are [E, in, out], rather than [E, out, in].
        alternate: whether gate and up alternate in the tensor that holds both.
        shared: the module of the expert that every token goes through.
        beside: whether that module is next to the block, rather than in it.
        held: the block's module in transformers' model, if checkpoints name it differently.
        swapped: whether PEFT takes these tensors' inputs for outputs: it recognizes [E, in, out] only by an
            attribute `is_transposed` of transformers' module.
        linear_router: whether transformers' router is a linear layer, rather than a parameter.
    """

    block: str = "mlp"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    boxed: bool = False
    expert: tuple[str, ...] = (
        "experts.{}.gate_proj.weight",
        "experts.{}.up_proj.weight",
        "experts.{}.down_proj.weight",
    )
    together: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    apart: bool = True
    inputs_first: bool = False
    alternate: bool = False
    shared: str = "shared_expert"
    beside: bool = False
    held: str = ""
    swapped: bool = False
    linear_router: bool = False

    @property
    def shared_module(self) -> str:
        """Return the name in a layer of the expert that every token goes through."""
        return self.shared if self.beside else self.within(self.shared)

    def within(self, name: str) -> str:
        """Return the name in a layer of what is in the block."""
        return f"{self.block}.{name}" if self.block else name


@dataclass(frozen=True)
class FullHeads:
    """The heads of FULL layers, if they differ from those of other layers.

    Attributes:
        kv_heads: of keys and values.
        head_dim: features of a head.
        keys_as_values: whether a token's projected keys, before their norm and rotation, are also its values,
            so that there is no projection of values.
    """

    kv_heads: int
    head_dim: int
    keys_as_values: bool = False


LATENT = ("fc1_latent_proj", "fc2_latent_proj")
"""The names of the projections to the features that experts read, and back."""


@dataclass(frozen=True)
class Experts:
    """The experts of a feed-forward block (runtime/model/experts.py).

    Attributes:
        count: experts of a layer.
        per_token: how many experts a token goes through.
        size: features within an expert.
        scores: how the router's logits become scores: "softmax" over all experts, "chosen" for a softmax over
            the chosen ones, or "sigmoid".
        normalized: whether the chosen experts' scores are divided by their sum, to which `eps` is added.
        scale: factor of the scores after that.
        groups, chosen_groups: experts are chosen from the groups whose best scores have the largest sums; 1
            and 1 for one group.
        summed: how many of a group's best scores are summed.
        balanced: whether transformers has a load-balancing loss for them; for sigmoids it has none.
        correction: whether a bias is added to the scores only for the choice.
        wide: whether the router computes in float32.
        on_inputs: whether an expert's input is multiplied by the score, rather than its output.
        biases: whether the router and the experts have biases.
        clamped: whether the experts are gpt-oss's: gate and up are limited, and 1 is added to up.
        latent: features that an expert reads and writes, to which and from which all tokens are projected
            (LATENT); 0 for the hidden size.
        shared: features of the expert that every token goes through; 0 for none.
        shared_gate: whether the shared expert's output is multiplied by its own gate.
        added: whether they are computed next to the feed-forward block, rather than in its place. Their
            router then reads the residual stream, divided by its root mean square and multiplied by a
            learned scale (`router_scale`), and an expert's score is multiplied by its learned scale
            (`per_expert_scale`).
        tensors: how a checkpoint stores the experts.
    """

    count: int
    per_token: int
    size: int
    scores: str = "softmax"
    normalized: bool = False
    eps: float = 1e-20
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    summed: int = 2
    balanced: bool = True
    correction: bool = False
    wide: bool = False
    on_inputs: bool = False
    biases: bool = False
    clamped: bool = False
    latent: int = 0
    shared: int = 0
    shared_gate: bool = False
    added: bool = False
    tensors: ExpertTensors = ExpertTensors()


@dataclass(frozen=True)
class DecoderArchitecture(Architecture):
    """The description of one model.

    Attributes:
        tied: whether the embedding serves as output head.
        norm: of every norm except the norms of queries and keys, which have no bias and, except for "each",
            no mean.
        places: of a layer's norms.
        ropes: the rotation of each kind of layer; LINEAR has none.
        turns: whether each layer rotates; () if all do.
        sliding_window: tokens that a token of a SLIDING layer sees, itself included.
        chunk: tokens of a chunk, counted from a sample's first; a token of a CHUNKED layer sees only its own
            chunk.
        delta, mamba, conv: of LINEAR layers; only one of them is there. `mamba` is also of HYBRID layers,
            where it reads the same input as attention, and both outputs are added.
        lone: whether a layer has one block: its attention or state, or in NONE layers the feed-forward block.
        latent: of attention; None for keys and values of their own in each head.
        full_heads: of FULL layers; None if all layers have heads of one size.
        kv_shared_layers: how many of the last layers have no keys and values of their own: they read those of
            the last layer before these that is of the same kind.
        value_norm: whether each head's values are divided by their root mean square.
        output_gate: whether the query projection also makes a gate, by whose sigmoid attention's output is
            multiplied; within a head, the gate's features come after the query's.
        gate_apart: whether that gate has a projection of its own instead, `gate_proj`.
        clip: the largest size of a projected query's, key's or value's feature; None for no limit.
        sinks: whether each head has its own extra logit, which takes a share of the softmax and adds nothing.
        qk_norm: "head" for norms of each head's queries and keys, "row" for one over all heads, "each" for a
            layer norm of its own for each head, "" for none.
        qk_normed_last: whether these norms follow the rotation.
        normed_turns: whether a head's queries and keys are divided by their root mean square after rotation,
            in layers that rotate.
        biases: what has a bias: "q", "k", "v", "o", "mlp", and "head" for the output head.
        gated: whether the feed-forward block, and each expert, multiplies by a gate.
        activation: one of ACTIVATIONS; "xielu" has learned parameters in each layer.
        experts: these replace the feed-forward block.
        routed: whether each layer has experts; () if all do.
        fused: which tensors hold several projections: "qkv" for one of all queries, keys and values, "groups"
            if each key head's queries, its key and its value follow each other in it, "gate_up"
            (gate_up_proj), and "delta": two tensors, by key head, instead of four for a gated delta net's
            input.
        attention_scale: factor of the scores.
        score_softcap: scores s become score_softcap * tanh(s / score_softcap); None for none.
        embedding_scale, residual_scale, logit_scale: factors of embeddings, of each block's output and of the
            logits.
        logit_softcap: logits are capped as scores are; None for none.
        scales: factors within a layer.
        wide_mlp: features within the feed-forward block of layers that share keys and values; 0 for as many
            as in other layers.
        per_layer_input: features of the input that each layer gets from the token itself, by an embedding of
            its own; 0 for none.
        layer_scalar: whether a layer's output is multiplied by a number of the checkpoint.
        embedding: the checkpoint's name of the embedding, if it is not that of the module; else "".
        longest: the most tokens of a sample whose tokens see all earlier ones, as computed here; None for
            any number.
        turned_axes: what each pair of a head's features turns by where there are pictures: 0 for time, 1 for
            the row, 2 for the column; () if all turn by the position.
        query_growth: how queries grow with their position; None if they do not.
        dropout: dropout and noise that config.json asks for within the model during training, by key; they
            are not applied.
    """

    BY_LAYER: ClassVar[tuple[str, ...]] = ("layer_types", "turns", "routed")

    tied: bool
    norm: Norm
    places: Places
    ropes: tuple[tuple[str, Rope], ...]
    attention_scale: float
    turns: tuple[bool, ...] = ()
    sliding_window: int | None = None
    chunk: int | None = None
    delta: Delta | None = None
    mamba: Mamba | None = None
    conv: Conv | None = None
    lone: bool = False
    latent: Latent | None = None
    full_heads: FullHeads | None = None
    kv_shared_layers: int = 0
    value_norm: bool = False
    output_gate: bool = False
    gate_apart: bool = False
    clip: float | None = None
    sinks: bool = False
    qk_norm: str = ""
    qk_normed_last: bool = False
    normed_turns: bool = False
    biases: tuple[str, ...] = ()
    gated: bool = True
    activation: str = "silu"
    experts: Experts | None = None
    routed: tuple[bool, ...] = ()
    fused: tuple[str, ...] = ()
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    scales: Scales = Scales()
    wide_mlp: int = 0
    per_layer_input: int = 0
    layer_scalar: bool = False
    embedding: str = ""
    longest: int | None = None
    turned_axes: tuple[int, ...] = ()
    query_growth: Growth | None = None
    score_softcap: float | None = None
    logit_softcap: float | None = None
    dropout: tuple[tuple[str, float], ...] = ()

    @property
    def state(self) -> State | None:
        """Return what a layer carries from token to token; None if no layer does."""
        if self.delta is not None:
            d = self.delta
            return State(d.value_heads, d.value_dim, d.key_dim, d.features, d.taps)
        if (m := self.mamba) is not None:
            return State(m.heads, m.head_dim, m.state, m.convolved, m.taps)
        if self.conv is not None:  # it carries no more than its past inputs
            return State(self.num_heads, self.head_dim, 0, self.hidden_size, self.conv.taps)
        return None

    def parts(self, layer: int) -> tuple[str, ...]:
        """Return the blocks of a layer: some of "attention", "delta", "mamba", "conv" and "mlp"."""
        kind = self.layer_types[layer]
        state = next((kind for kind in ("delta", "conv") if getattr(self, kind) is not None), "mamba")
        first = {LINEAR: (state,), HYBRID: (state, "attention"), NONE: ()}.get(kind, ("attention",))
        return first if self.lone and first else (*first, "mlp")

    def heads(self, layer: int) -> int:
        return self._heads(layer)[0]

    def kv_heads(self, layer: int) -> int:
        return self._heads(layer)[1]

    def _heads(self, layer: int) -> tuple[int, int]:
        """Return the heads of queries, and of keys and values. A Mamba mixer has one kind: its groups need
        not be split."""
        if "delta" in (parts := self.parts(layer)) and self.delta is not None:
            return self.delta.value_heads, self.delta.key_heads
        if self.mamba is not None and "mamba" in parts and "attention" not in parts:
            return self.mamba.heads, self.mamba.heads
        if self.full_heads is not None and self.layer_types[layer] == FULL:
            return self.num_heads, self.full_heads.kv_heads
        return self.num_heads, self.num_kv_heads

    def layer_head_dim(self, layer: int) -> int:
        """Return the features of a head of a layer's queries and keys."""
        return self.kind_head_dim(self.layer_types[layer])

    def kind_head_dim(self, kind: str) -> int:
        """Return the features of a head of queries and keys in layers of a kind."""
        return self.full_heads.head_dim if self.full_heads is not None and kind == FULL else self.head_dim

    def keys_as_values(self, layer: int) -> bool:
        """Return whether a layer's keys are also its values."""
        full = self.full_heads if self.layer_types[layer] == FULL else None
        return full is not None and full.keys_as_values

    @property
    def k_eq_v(self) -> bool:
        """Return whether keys are also values in some layers."""
        return any(self.keys_as_values(layer) for layer in range(self.num_layers))

    def shares_kv(self, layer: int) -> bool:
        """Return whether a layer reads the keys and values of an earlier one."""
        return layer >= self.num_layers - self.kv_shared_layers

    def kv_layer(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads."""
        if not self.shares_kv(layer):
            return layer
        kind, unshared = self.layer_types[layer], self.layer_types[: self.num_layers - self.kv_shared_layers]
        return max(i for i, other in enumerate(unshared) if other == kind)

    def projections(self, layer: int) -> str:
        """Return the letters of the projections that a layer has for itself: some of "qkv"."""
        if self.shares_kv(layer):
            return "q"
        return "qk" if self.keys_as_values(layer) else "qkv"

    def lends_kv(self, layer: int) -> bool:
        """Return whether a later layer reads the keys and values of a layer."""
        shared = range(self.num_layers - self.kv_shared_layers, self.num_layers)
        return any(self.kv_layer(i) == layer for i in shared)

    @property
    def delta_projections(self) -> dict[str, tuple[int, ...]]:
        """Return the output features of each projection of a gated delta net's input, by its name; by head if
        all heads have the same width. Letters stand for queries, keys, values, gates (z), and the inputs of
        beta and decay (b and a)."""
        delta = self.delta
        if delta is None:
            return {}
        keys, values = delta.key_heads, delta.value_heads
        if "delta" in self.fused:
            return {"in_proj_qkvz": (keys, sum(delta.of_key_head)), "in_proj_ba": (keys, 2 * values // keys)}
        return {
            "in_proj_qkv": (delta.features,),
            "in_proj_z": (values, delta.value_dim),
            "in_proj_b": (values,),
            "in_proj_a": (values,),
        }

    def query_width(self, layer: int) -> int:
        """Return the features that the query projection makes for a head, those of a gate included."""
        head_dim = self.layer_head_dim(layer)
        return 2 * head_dim if self.output_gate and not self.gate_apart else head_dim

    @property
    def latent_projections(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of latent attention's projections of queries, keys and values, by name: [in, out]
        for those that compress, else [in, heads, features]."""
        latent = self.latent
        if latent is None:
            return {}
        d, n, h = self.hidden_size, self.num_heads, self.head_dim
        queries = {"q_a_proj": (d, latent.queries), "q_b_proj": (latent.queries, n, h)}
        return {
            **(queries if latent.queries else {"q_proj": (d, n, h)}),
            "kv_a_proj_with_mqa": (d, latent.keys + latent.turned),
            "kv_b_proj": (latent.keys, n, latent.plain + latent.values),
        }

    @property
    def latent_norms(self) -> dict[str, int]:
        """Return the features of the norms of compressed queries, keys and values, by name."""
        shapes = self.latent_projections.items()
        return {name.replace("b_proj", "a_layernorm"): shape[0] for name, shape in shapes if "_b_" in name}

    def value_dim(self, layer: int) -> int:
        """Return the features of a head's values."""
        return self.layer_head_dim(layer) if self.latent is None else self.latent.values

    def turned_dim(self, kind: str) -> int:
        """Return the features of a head from which the rotation of a kind of layer takes its share."""
        return self.kind_head_dim(kind) if self.latent is None else self.latent.turned

    def window(self, layer: int) -> int | None:
        return self.chunk if self.layer_types[layer] == CHUNKED else super().window(layer)

    def rope(self, layer: int) -> Rope | None:
        """Return the rotation of a layer; None for a layer that does not rotate."""
        if self.turns and not self.turns[layer]:
            return None
        return dict(self.ropes).get(self.layer_types[layer])

    def experts_of(self, layer: int) -> Experts | None:
        """Return the experts of a layer; None if it has no feed-forward block, or one without experts."""
        has = "mlp" in self.parts(layer) and (not self.routed or self.routed[layer])
        return self.experts if has else None

    def replaced_by(self, layer: int) -> Experts | None:
        """Return the experts that replace a layer's feed-forward block; None if it has that block."""
        experts = self.experts_of(layer)
        return None if experts is None or experts.added else experts

    def mlp_features(self, layer: int) -> int:
        """Return the features within a layer's feed-forward block."""
        return self.wide_mlp if self.wide_mlp and self.shares_kv(layer) else self.intermediate_size

    @property
    def routing(self) -> tuple[int, int]:
        return (self.experts.count, self.experts.per_token) if self.experts is not None else (0, 0)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if self.experts_of(layer) is not None)

    @property
    def balanced(self) -> bool:
        """Return whether transformers has a load-balancing loss for these experts: it has none for sigmoids,
        and computes it from other choices than corrected ones."""
        experts = self.experts
        return (
            experts is not None
            and experts.balanced
            and experts.scores != "sigmoid"
            and not experts.correction
        )
