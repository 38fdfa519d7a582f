"""The description of a vision tower with its projector; runtime/model/vision/ computes it.

A tower turns the patches of a picture into features, and the projector makes of them what takes the place of
the embeddings of the picture's tokens. Together they are an embedder, attention layers, a pooler and a
projector. All but the layers are lists of steps. towers.py reads descriptions from config.json. The arrays
follow from a description, and the Hugging Face tensors that they are made of. Nothing here imports jax or
numpy.

The names of a tower's tensors do not follow the prefix of the language model's: transformers saves and loads
the same checkpoint under several.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from .description import Norm, Places
from .family import LoraTarget, Parameter, Source, Spec, plain

PLAIN = Norm(1e-6)

PATH = "vision"
"""The path of the tower and its projector in the model."""
PROJECTING = (f"{PATH}.projector.", f"{PATH}.deepstack.")
"""What the paths of the projector's arrays begin with, and of those that project for further layers."""


@dataclass(frozen=True)
class Step:
    """A part of an embedder, pooler or projector.

    Attributes:
        name: of its module here; "" for a step without parameters.
        source: of the module, or of the tensor, in transformers' model.
    """

    name: str = ""
    source: str = ""

    def parameters(self, path: str) -> list[Parameter]:
        """Return the arrays of the step, whose module has this path."""
        return []

    def targets(self, path: str) -> list[LoraTarget]:
        """Return the weights of the step that can carry LoRA; the argument is that of `parameters`."""
        return []


@dataclass(frozen=True)
class Linear(Step):
    """A dense layer, or a convolution whose stride is its kernel.

    Attributes:
        inputs, outputs: features.
        bias: whether there is a bias.
        kernel: the shape of a convolution's kernel with its channels, in the tensor's order; () for a dense
            layer.
        inputs_first: whether the tensor is [in, out].
        tensor: the tensor's name in its module.
    """

    inputs: int = 0
    outputs: int = 0
    bias: bool = False
    kernel: tuple[int, ...] = ()
    inputs_first: bool = False
    tensor: str = ".weight"

    def parameters(self, path: str) -> list[Parameter]:
        shape, name = (self.inputs, self.outputs), f"{self.source}{self.tensor}"
        if self.inputs_first:
            source = plain(name, shape)
        else:
            stored = (self.outputs, *(self.kernel or (self.inputs,)))
            source = Source(name, stored, (self.outputs, self.inputs), (1, 0))
        out = [Parameter(f"{path}.kernel", shape, ("fsdp", "tp"), (source,))]
        return [*out, _vector(f"{path}.bias", f"{self.source}.bias", self.outputs)] if self.bias else out

    def targets(self, path: str) -> list[LoraTarget]:
        if self.kernel or self.tensor != ".weight":
            return []  # a convolution, or no linear layer of transformers
        return [LoraTarget(None, f"{path}.kernel", (0,), self.source)]


@dataclass(frozen=True)
class Normalize(Step):
    """A normalization of all features."""

    features: int = 0
    norm: Norm = PLAIN

    def parameters(self, path: str) -> list[Parameter]:
        return _norm(self.norm, path, self.source, self.features)


@dataclass(frozen=True)
class Activate(Step):
    """An activation function, one of description.ACTIVATIONS."""

    function: str = "gelu"


@dataclass(frozen=True)
class Rescale(Step):
    """Multiply by a factor and add a number, in float32.

    Attributes:
        factor, shift: x becomes x * factor + shift.
        source: "", or the start of the names of two tensors: x becomes (x * factor - bias) * scale.
        features: of those tensors.
    """

    factor: float = 1.0
    shift: float = 0.0
    features: int = 0

    def parameters(self, path: str) -> list[Parameter]:
        names = ("bias", "scale") if self.name else ()
        return [_vector(f"{path}.{name}", f"{self.source}_{name}", self.features) for name in names]


@dataclass(frozen=True)
class Positions(Step):
    """Learned embeddings of places, which are added to the patches.

    Attributes:
        kind: "order" for an embedding of each patch of a tile by its number; "axes" for a sum of embeddings
            of x and y; "grid" for a square grid of embeddings that is stretched over each picture, with
            bilinear interpolation: the first and the last patch have the first and the last embedding;
            "areas" for the same, where both are squares of equal areas, and the centers of a patch and of an
            embedding are compared.
        count: embeddings of the table, of each axis for "axes".
        features: of an embedding.
        axis: for "axes": the axis of the tensor that tells x from y.
    """

    kind: str = "order"
    count: int = 0
    features: int = 0
    axis: int = 0

    def parameters(self, path: str) -> list[Parameter]:
        shape: tuple[int, ...] = (self.count, self.features)
        if self.kind != "axes":
            return [Parameter(f"{path}.table", shape, (None, "tp"), (plain(self.source, shape),))]
        shape = (2, *shape)
        stored = (shape[1], 2, shape[2]) if self.axis else shape
        order = (1, 0, 2) if self.axis else (0, 1, 2)
        return [
            Parameter(
                f"{path}.table", shape, (None, None, "tp"), (Source(self.source, stored, stored, order),)
            )
        ]


@dataclass(frozen=True)
class ClassToken(Step):
    """A learned embedding that is added to each tile's patches as a further place.

    Attributes:
        features: of the embedding.
        first: whether it comes before the patches, rather than after them.
    """

    features: int = 0
    first: bool = False

    def parameters(self, path: str) -> list[Parameter]:
        return [_vector(f"{path}.embedding", self.source, self.features)]


@dataclass(frozen=True)
class DropClassToken(Step):
    """Remove the place of the class token of each tile.

    Attributes:
        first: as in ClassToken.
    """

    first: bool = False


@dataclass(frozen=True)
class Merge(Step):
    """Join the features of the patches of a block, which follow each other.

    Attributes:
        count: patches of a block.
        features_first: whether each feature of all patches follows that of the feature before it.
    """

    count: int = 4
    features_first: bool = False


@dataclass(frozen=True)
class Mean(Step):
    """Average the patches of a block, which follow each other.

    Attributes:
        count: patches of a block.
    """

    count: int = 9


@dataclass(frozen=True)
class TileMean(Step):
    """Average the patches of a square within a tile, whose patches are in the order of rows.

    Attributes:
        size: patches of a side of the square.
    """

    size: int = 4


@dataclass(frozen=True)
class PixelShuffle(Step):
    """Join squares of a tile, whose patches are in the order of rows, as Llama 4's tower does.

    Attributes:
        ratio: of a side after and before.
    """

    ratio: float = 0.5


@dataclass(frozen=True)
class Turning:
    """How the heads of a tower rotate with the place of a patch.

    Attributes:
        theta: base frequency.
        axes: "yx" or "xy": the order of the axes' angles.
        alternating: whether the axes share one series of frequencies in turns, rather than having the same
            frequencies.
        pairs: which features rotate together: "halves" for one of each half of a head, "parts" for one of
            each half of an axis' part of a head, "neighbors" for two that follow each other.
        first: the number of the first patch along an axis.
    """

    theta: float
    axes: str = "yx"
    alternating: bool = False
    pairs: str = "halves"
    first: int = 0


@dataclass(frozen=True)
class LayerNames:
    """The names of a layer's modules in transformers' model.

    Attributes:
        layers: the list of layers.
        attention, mlp: a layer's modules.
        qkv: the projection that makes queries, keys and values together.
        out: the last projection of attention.
        gated, plain: the projections of a feed-forward block with and without a gate.
        inner: the module within a projection that has its weight.
    """

    layers: str
    attention: str = "self_attn"
    mlp: str = "mlp"
    qkv: str = "qkv"
    out: str = "o_proj"
    gated: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    plain: tuple[str, str] = ("fc1", "fc2")
    inner: str = ""


CLIPS = ("input_min", "input_max", "output_min", "output_max")
"""The bounds of a projection's inputs and outputs, if it is clipped."""


@dataclass(frozen=True)
class VisionLayers:
    """The attention layers of a tower. All patches of a picture or tile see each other.

    Attributes:
        count: of layers.
        hidden_size: features of a patch between layers.
        intermediate_size: features within a feed-forward block.
        num_heads, num_kv_heads, head_dim: of attention.
        norm: of each layer's norms.
        places: where these norms are.
        names: of transformers' modules.
        activation: of the feed-forward block.
        scale: factor of the scores.
        gated: whether the feed-forward block has a gate.
        biases: what has a bias: some of "q", "k", "v", "o" and "mlp".
        fused: whether queries, keys and values have one projection.
        qk_norm: whether each head's queries and keys are normalized before they rotate.
        value_norm: whether each head's values are normalized, without a weight.
        clipped: whether inputs and outputs of projections are bounded by numbers of the checkpoint.
        turning: how heads rotate; None if they do not.
        window: patches of a side of the square that a patch sees; 0 for the whole picture.
        full: the layers that see the whole picture nevertheless.
    """

    count: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: Norm
    places: Places
    names: LayerNames
    activation: str
    scale: float
    gated: bool = False
    biases: tuple[str, ...] = ()
    fused: bool = False
    qk_norm: bool = False
    value_norm: bool = False
    clipped: bool = False
    turning: Turning | None = None
    window: int = 0
    full: tuple[int, ...] = ()

    def projections(self) -> dict[str, tuple[int, int]]:
        """Return inputs and outputs of each projection of a feed-forward block, by its name here."""
        d, f = self.hidden_size, self.intermediate_size
        if self.gated:
            return {"gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}
        return {"fc1": (d, f), "fc2": (f, d)}

    def parameters(self, layer: int, path: str) -> list[Parameter]:
        """Return the arrays of a layer, whose module has this path."""
        names = self.names
        module = f"{names.layers}.{layer}"
        out = []
        for name in self.places.names:
            out += _norm(self.norm, f"{path}.{name}", f"{module}.{name}", self.hidden_size)
        out += self._attention(f"{path}.attn", f"{module}.{names.attention}")
        called = names.gated if self.gated else names.plain
        for (name, sizes), hf in zip(self.projections().items(), called, strict=True):
            out += self._dense(f"{path}.mlp.{name}", f"{module}.{names.mlp}.{hf}", *sizes)
        return out

    def targets(self, layer: int, path: str) -> list[LoraTarget]:
        """Return the weights of a layer that can carry LoRA; the arguments are those of `parameters`."""
        names = self.names
        module = f"{names.layers}.{layer}"
        attention = [("qkv", names.qkv)] if self.fused else [(f"{x}_proj", f"{x}_proj") for x in "qkv"]
        attended, fed = f"{module}.{names.attention}", f"{module}.{names.mlp}"
        weights: list[tuple[str, tuple[int, ...], str]] = [
            (f"attn.{name}.w", (0,), f"{attended}.{hf}") for name, hf in attention
        ]
        weights.append(("attn.o_proj.w", (0, 1), f"{attended}.{names.out}"))
        called = names.gated if self.gated else names.plain
        for name, hf in zip(self.projections(), called, strict=True):
            weights.append((f"mlp.{name}.kernel", (0,), f"{fed}.{hf}"))
        return [
            LoraTarget(None, f"{path}.{weight}", contract, f"{name}{names.inner}", inner=names.inner)
            for weight, contract, name in weights
        ]

    def _attention(self, path: str, module: str) -> list[Parameter]:
        d, n, k, h = self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim
        out = []
        if self.fused:
            name, shape = f"{module}.{self.names.qkv}", (d, 3, n, h)
            source = Source(f"{name}.weight", (3 * n * h, d), (3, n, h, d), (3, 0, 1, 2))
            out.append(Parameter(f"{path}.qkv.w", shape, ("fsdp", None, "tp", None), (source,)))
            if "q" in self.biases:
                bias = Source(f"{name}.bias", (3 * n * h,), (3, n, h), (0, 1, 2))
                out.append(Parameter(f"{path}.qkv.bias", (3, n, h), (None, "tp", None), (bias,)))
        for letter, heads in {} if self.fused else {"q": n, "k": k, "v": k}.items():
            here, name = f"{path}.{letter}_proj", f"{module}.{letter}_proj"
            source = Source(f"{name}{self.names.inner}.weight", (heads * h, d), (heads, h, d), (2, 0, 1))
            out.append(Parameter(f"{here}.w", (d, heads, h), ("fsdp", "tp", None), (source,)))
            if letter in self.biases:
                bias = Source(f"{name}{self.names.inner}.bias", (heads * h,), (heads, h), (0, 1))
                out.append(Parameter(f"{here}.bias", (heads, h), ("tp", None), (bias,)))
            out += self._clips(here, name)
        name = f"{module}.{self.names.out}"
        source = Source(f"{name}{self.names.inner}.weight", (d, n * h), (d, n, h), (1, 2, 0))
        out.append(Parameter(f"{path}.o_proj.w", (n, h, d), ("tp", None, "fsdp"), (source,)))
        if "o" in self.biases:
            out.append(_vector(f"{path}.o_proj.bias", f"{name}{self.names.inner}.bias", d))
        out += self._clips(f"{path}.o_proj", name)
        for letter in "qk" if self.qk_norm else "":
            name = f"{letter}_norm"
            out.append(
                Parameter(f"{path}.{name}.w", (h,), (None,), (plain(f"{module}.{name}.weight", (h,)),))
            )
        return out

    def _dense(self, path: str, name: str, inputs: int, outputs: int) -> list[Parameter]:
        held = f"{name}{self.names.inner}"
        source = Source(f"{held}.weight", (outputs, inputs), (outputs, inputs), (1, 0))
        into: Spec = ("fsdp", "tp") if outputs != self.hidden_size else ("tp", "fsdp")
        out = [Parameter(f"{path}.kernel", (inputs, outputs), into, (source,))]
        if "mlp" in self.biases:
            out.append(_vector(f"{path}.bias", f"{held}.bias", outputs))
        return [*out, *self._clips(path, name)]

    def _clips(self, path: str, name: str) -> list[Parameter]:
        bounds = CLIPS if self.clipped else ()
        return [
            Parameter(
                f"{path}.{bound}", (1,), (None,), (Source(f"{name}.{bound}", (), (1,), (0,)),), buffer=True
            )
            for bound in bounds
        ]


@dataclass(frozen=True, kw_only=True)
class VisionArchitecture:
    """The description of a checkpoint's vision tower and projector.

    Attributes:
        kind: the tower's name in messages.
        prefixes: what the names of its tensors begin with, by the parts that a checkpoint may name apart:
            "vision_tower": "model.vision_tower.".
        holder: what transformers' model puts before the names of these parts.
        patch_features: the numbers of a patch: its pixels' channels, in the order of the first weight.
        text_size: features of the projector's output, the hidden size of the language model.
        embedder: from patches to what the first layer reads.
        layers: None for a projector of patches without attention.
        pooler: from the last layer to the projector.
        projector: to the language model's features.
        deepstack: layers whose output is projected too, with the steps of each: the first layers of the
            language model add one such list of features each.
        patches: of a picture or tile, if all have as many; else None.
        patches_of_feature: how many patches become a feature, which takes the place of a token. If pictures
            differ in size, the patches of a feature follow each other.
        both_ways: kinds of layers of the language model in which the tokens of one picture see each other,
            whatever their order.
        within_window: whether they see no further back than the layer's window.
        padding: the token whose per-layer inputs a picture's tokens have in the language model.
    """

    kind: str
    prefixes: tuple[tuple[str, str], ...] = ()
    holder: str = "model."
    patch_features: int
    text_size: int
    embedder: tuple[Step, ...]
    layers: VisionLayers | None
    pooler: tuple[Step, ...] = ()
    projector: tuple[Step, ...]
    deepstack: tuple[tuple[int, tuple[Step, ...]], ...] = ()
    patches: int | None = None
    patches_of_feature: int = 1
    both_ways: tuple[str, ...] = ()
    within_window: bool = False
    padding: int = 0

    def parameters(self) -> list[Parameter]:
        """Return the arrays of tower and projector, with their default shardings."""
        out = [p for path, step in self._steps() for p in step.parameters(path)]
        if (layers := self.layers) is not None:
            for layer in range(layers.count):
                out += layers.parameters(layer, f"layers.{layer}")
        return [self._placed(parameter) for parameter in out]

    def targets(self) -> list[LoraTarget]:
        """Return the weights of tower and projector that can carry LoRA: all linear layers of transformers'
        model. The convolution that embeds patches is none."""
        out = [target for path, step in self._steps() for target in step.targets(path)]
        if (layers := self.layers) is not None:
            for layer in range(layers.count):
                out += layers.targets(layer, f"layers.{layer}")
        return [replace(target, weight=f"{PATH}.{target.weight}") for target in out]

    def _steps(self) -> Iterator[tuple[str, Step]]:
        """Yield all steps, each with the path of its module in the tower."""
        lists = {"embedder": self.embedder, "pooler": self.pooler, "projector": self.projector}
        lists |= {f"deepstack.{i}": steps for i, (_, steps) in enumerate(self.deepstack)}
        for name, steps in lists.items():
            for step in steps:
                yield f"{name}.{step.name}", step

    def frozen(self) -> list[Parameter]:
        """Return `parameters`, none of which is trained."""
        return [replace(parameter, frozen=True) for parameter in self.parameters()]

    def in_transformers(self) -> VisionArchitecture:
        """Return the description with the names of tensors in transformers' model."""
        return replace(self, prefixes=())

    def full_name(self, name: str) -> str:
        """Return a tensor's name in the checkpoint, from its name in transformers' model."""
        first, _, rest = name.partition(".")
        return dict(self.prefixes).get(first, f"{self.holder}{first}.") + rest

    def _placed(self, parameter: Parameter) -> Parameter:
        """Return an array of the tower with its path in the model, and its tensors with their full names."""
        sources = tuple(
            replace(source, name=self.full_name(source.name), outside=True) for source in parameter.sources
        )
        return replace(parameter, path=f"{PATH}.{parameter.path}", sources=sources)


def _vector(path: str, name: str, size: int) -> Parameter:
    return Parameter(path, (size,), ("tp",), (plain(name, (size,)),))


def _norm(norm: Norm, path: str, name: str, size: int) -> list[Parameter]:
    out = [_vector(f"{path}.w", f"{name}.weight", size)] if norm.weighted else []
    return [*out, _vector(f"{path}.bias", f"{name}.bias", size)] if norm.bias else out


def prefixes_of(
    tensors: Iterable[str], candidates: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[str, str], ...]:
    """Return what the names of a checkpoint's parts begin with.

    Args:
        tensors: names of all its tensors; empty if they are not known.
        candidates: of each part, the beginnings that occur, the longest of those with the same start first.
            The last one is taken if the tensors show none.
    """
    names = tuple(tensors)
    return tuple(
        (part, next((start for start in starts if any(n.startswith(start) for n in names)), starts[-1]))
        for part, starts in candidates.items()
    )
