"""The arrays that are trained whole next to adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .adapters import TOKEN_ROWS, LoraSettings
from .families.base import Parameter
from .frozen import Frozen, holders
from .whole import trained_whole


class Whole(nnx.LoRAParam[Any]):
    """A weight trained with the adapters, in their dtype; the model computes with it in its own dtype."""

    def get_value(self, **index: Any) -> Any:
        return super().get_value(**index).astype(self.get_metadata("computed_in"))


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
        if parameter.path == TOKEN_ROWS:
            from .token_rows import NUMBERS

            numbers = jax.ShapeDtypeStruct(parameter.shape[:1], jnp.int32)
            setattr(holder, NUMBERS, Frozen(numbers, out_sharding=(None,)))
        own = jnp.dtype(dtype if parameter.path == TOKEN_ROWS else getattr(holder, name).dtype)
        types = {"computed_in": own, "kept_in": shape.dtype}
        setattr(holder, name, Whole(shape, out_sharding=parameter.spec, **types))
    return whole
