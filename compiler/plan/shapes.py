"""A model's matrix products, and the sizes of their results, from the shapes of its weights.

Weights are counted for the whole model. A product with n weights takes 2 n FLOPs a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from recipec.compiler.lowering.program import Program
from recipec.compiler.wording import split_layer
from recipec.runtime.model.families import Architecture
from recipec.runtime.model.families.base import CHUNKED, EXPERTS, Parameter

LOOKED_UP = ("embedder.input_embedding", "embedder.per_layer_input_embedding")
"""Embeddings, which are looked up and not multiplied. The first is also the output head if the model has no
other."""
HEAD = "lm_head"
AFTER = (HEAD, "final_norm")
"""Beginnings of the names of arrays behind the last layer."""

VECTORS = ("bias", "norm.w")
"""Ends of the names of biases and norms. These arrays have two dimensions for several heads or experts."""
OUTPUT = "self_attn.o_proj"
DOWN = "mlp.down_proj"
"""Attention's output projection and the down projection, whatever a family's names for them."""


@dataclass
class Layer:
    """One decoder layer, per token.

    Attributes:
        weights: numbers in its matrices; of experts, only those that a token is routed to.
        trained: the part of `weights` that is trained itself, without adapters.
        tails: the part of `weights` in attention's output projection and in the down projection, by
            projection.
        products: numbers in the results of the matrices that can carry LoRA, by projection.
        attended: numbers in its queries, all heads together.
        pairs: query-key pairs of a row under the causal mask and the layer's window.
    """

    weights: float = 0.0
    trained: float = 0.0
    tails: dict[str, float] = field(default_factory=dict)
    products: dict[str, float] = field(default_factory=dict)
    attended: float = 0.0
    pairs: float = 0.0


@dataclass(frozen=True)
class Shapes:
    """The sizes of a model's matrix products.

    Attributes:
        layers: the layers in order.
        head: numbers in the output head.
        outside: numbers in matrices before the layers.
        trained: the parts of `head` and of `outside` that are trained themselves.
        first_trained: index of the first layer that is trained, where the backward pass ends.
    """

    layers: tuple[Layer, ...]
    head: float
    outside: float
    trained: tuple[float, float]
    first_trained: int


def shapes(program: Program, row_length: int) -> Shapes:
    """Return the sizes of the matrix products of a program's model.

    Args:
        row_length: tokens of a row, padding included.
    """
    a = program.architecture
    layers = tuple(Layer() for _ in range(a.num_layers))
    head = float(a.vocab_size * a.hidden_size)
    outside = trained_head = trained_outside = 0.0
    for parameter in program.parameters:
        path, number = split_layer(parameter.path)
        trained = program.lora is None and parameter.trainable
        if trained and path in (LOOKED_UP[0], f"{HEAD}.w"):
            trained_head = head  # the embedding comes first, and is the head where there is no other
        elif path == f"{HEAD}.w":
            trained_head = 0.0
        # The model does not read arrays without sources, so they are in no product.
        if not multiplies(parameter) or not parameter.sources or path in LOOKED_UP or path.startswith(HEAD):
            continue
        size = float(math.prod(parameter.shape))
        if number is None:
            outside += size
            trained_outside += size * trained
        else:
            layers[number].weights += size * _used_share(program, path)
            layers[number].trained += size * _used_share(program, path) * trained
    by_path = {parameter.path: parameter.shape for parameter in program.parameters}
    family = program.family
    names, feed_forward = family.names, family.feed_forward(a)
    common = {f"{names.attention}.{names.out}": OUTPUT}
    common |= {f"{feed_forward}.{name}": DOWN for name in ("down_proj", names.plain[1])}
    for target in family.lora_targets(a):
        layer, shape = layers[target.layer], by_path[target.weight]
        inputs = math.prod(shape[axis] for axis in target.contract)
        name = "+".join(target.projections)
        name = common.get(name, name)
        layer.products[name] = math.prod(shape) / inputs
        if name in (OUTPUT, DOWN):
            layer.tails[name] = float(math.prod(shape))
        if name == OUTPUT:
            layer.attended = float(inputs)
    for number, layer in enumerate(layers):
        layer.pairs = seen_pairs(a, number, row_length)
    return Shapes(layers, head, outside, (trained_head, trained_outside), _first_trained(program))


def multiplies(parameter: Parameter) -> bool:
    """Return whether an array is a factor of matrix products. Norms and biases are not."""
    return len(parameter.shape) > 1 and not parameter.path.endswith(VECTORS)


def seen_pairs(architecture: Architecture, layer: int, length: float) -> float:
    """Return the query-key pairs of a layer with attention by scores, in a row of one text."""
    chunked = architecture.layer_types[layer] == CHUNKED
    return (chunked_pairs if chunked else causal_pairs)(length, architecture.window(layer))


def causal_pairs(length: float, window: int | None) -> float:
    """Return the query-key pairs of a row of one text, where each token sees the last `window` tokens,
    itself included."""
    seen = min(window or length, length)
    return length * seen - seen * (seen - 1) / 2


def chunked_pairs(length: float, chunk: int | None) -> float:
    """Return the same as `causal_pairs` where each token sees only its own chunk."""
    whole, rest = divmod(length, chunk or length)
    return whole * causal_pairs(chunk or length, None) + causal_pairs(rest, None)


def _used_share(program: Program, path: str) -> float:
    """Return the share of a matrix that a token is multiplied with."""
    experts, used = program.architecture.routing
    return used / experts if EXPERTS.search(path) else 1.0


def _first_trained(program: Program) -> int:
    if program.lora is not None:
        return min((adapter.target.layer for adapter in program.adapters), default=0)
    places = (split_layer(parameter.path) for parameter in program.parameters if parameter.trainable)
    last = program.architecture.num_layers
    return min((last if path.startswith(AFTER) else number or 0 for path, number in places), default=0)
