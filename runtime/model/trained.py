"""The arrays of a model that are trained whole, those that are frozen, and rows of the embedding.

Which arrays of a model a recipe trains is decided in selection.py.

Rows of the embedding that lora.trainable_tokens trains are PEFT's trainable_token_indices. The embedding is
frozen. Next to it are the trained rows [N, D] and their numbers. While a model is computed, they take the
place of the embedding's own rows, also in a head that is the embedding. No gradient of the whole embedding is
computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..weights.checkpoint import HFCheckpoint
from .adapters import EMBEDDING, TOKEN_ROWS, LoraSettings
from .families.family import Parameter
from .selection import trained_whole

EMBEDDER, _, TABLE = EMBEDDING.rpartition(".")
ROWS, NUMBERS = TOKEN_ROWS.rpartition(".")[2], f"{TABLE}_numbers"
"""The path of the embedder, and its attributes: the embedding, its trained rows, and these rows' numbers."""


class Frozen(nnx.Variable[Any]):
    """Arrays that are not trained: buffers, arrays that the checkpoint does not fill, and tokens' numbers."""


class Whole(nnx.LoRAParam[Any]):
    """A weight trained with the adapters, in their dtype; the model computes with it in its own dtype."""

    def get_value(self, **index: Any) -> Any:
        return super().get_value(**index).astype(self.get_metadata("computed_in"))


def freeze(model: nnx.Module, parameters: Sequence[Parameter]) -> None:
    """Take variables that are not trained from those that are."""
    frozen = [parameter for parameter in parameters if not parameter.trainable]
    for holder, name, parameter in holders(model, frozen):
        setattr(holder, name, Frozen(getattr(holder, name).get_raw_value(), out_sharding=parameter.spec))


def attach_whole(
    model: nnx.Module, parameters: Sequence[Parameter], lora: LoraSettings, dtype: str
) -> tuple[Parameter, ...]:
    """Make what is trained next to adapters trained variables, and return it.

    Args:
        model: with shapes for values.
        dtype: of the model.
    """
    whole = trained_whole(parameters, lora)
    for holder, name, parameter in holders(model, whole):
        shape = jax.ShapeDtypeStruct(parameter.shape, jnp.dtype(lora.dtype))
        if name == ROWS:
            numbers = jax.ShapeDtypeStruct(parameter.shape[:1], jnp.int32)
            setattr(holder, NUMBERS, Frozen(numbers, out_sharding=(None,)))
        computed_in = jnp.dtype(dtype if name == ROWS else getattr(holder, name).dtype)
        types = {"computed_in": computed_in, "kept_in": shape.dtype}
        setattr(holder, name, Whole(shape, out_sharding=parameter.spec, **types))
    return whole


def holders(
    model: nnx.Module, parameters: Sequence[Parameter]
) -> Iterator[tuple[nnx.Module, str, Parameter]]:
    """Yield the module that holds each parameter, and the parameter's name in it."""
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    for parameter in parameters:
        module, _, name = parameter.path.rpartition(".")
        yield modules[module], name, parameter


def trained_rows(embedder: Any) -> tuple[jax.Array, jax.Array] | None:
    """Return the trained rows of an embedder and their numbers, None if it has none."""
    if not hasattr(embedder, ROWS):
        return None
    return getattr(embedder, ROWS).get_value(), getattr(embedder, NUMBERS).get_value()


def first_rows(base: HFCheckpoint, embedding: Parameter, lora: LoraSettings) -> dict[str, np.ndarray]:
    """Return the rows and their numbers as training begins, by their paths: the rows are the base's own."""
    numbers = np.asarray(lora.trainable_tokens, np.int32)
    (source,) = embedding.sources
    rows = [base.read_rows(source, number, number + 1) for number in numbers.tolist()]
    values = np.concatenate(rows).astype(jnp.dtype(lora.dtype))
    return {TOKEN_ROWS: values, f"{EMBEDDER}.{NUMBERS}": numbers}
