"""The arrays that are trained whole next to adapters, and those that training without LoRA freezes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .adapters import TOKEN_ROWS, LoraSettings
from .families.base import Parameter


class Frozen(nnx.Variable[Any]):
    """Arrays that are not trained: buffers, arrays that the checkpoint does not fill, and tokens' numbers."""


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
    from .whole import trained_whole

    whole = trained_whole(parameters, lora)
    for holder, name, parameter in _holders(model, whole):
        shape = jax.ShapeDtypeStruct(parameter.shape, jnp.dtype(lora.dtype))
        if parameter.path == TOKEN_ROWS:
            from .token_rows import NUMBERS

            numbers = jax.ShapeDtypeStruct(parameter.shape[:1], jnp.int32)
            setattr(holder, NUMBERS, Frozen(numbers, out_sharding=(None,)))
        own = jnp.dtype(dtype if parameter.path == TOKEN_ROWS else getattr(holder, name).dtype)
        types = {"computed_in": own, "kept_in": shape.dtype}
        setattr(holder, name, Whole(shape, out_sharding=parameter.spec, **types))
    return whole


def freeze(model: nnx.Module, parameters: Sequence[Parameter]) -> None:
    """Take variables that are not trained from those that are."""
    frozen = [parameter for parameter in parameters if not parameter.trainable]
    for holder, name, parameter in _holders(model, frozen):
        setattr(holder, name, Frozen(getattr(holder, name).get_raw_value(), out_sharding=parameter.spec))


def _holders(
    model: nnx.Module, parameters: Sequence[Parameter]
) -> Iterator[tuple[nnx.Module, str, Parameter]]:
    """Return the module that holds each parameter, and the parameter's name in it."""
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    for parameter in parameters:
        module, _, name = parameter.path.rpartition(".")
        yield modules[module], name, parameter
