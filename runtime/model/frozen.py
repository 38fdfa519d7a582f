"""The arrays of a model that training does not change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flax import nnx

from .families.base import Parameter


class Frozen(nnx.Variable[Any]):
    """Arrays that are not trained: buffers, arrays that the checkpoint does not fill, and tokens' numbers."""


def freeze(model: nnx.Module, parameters: Sequence[Parameter]) -> None:
    """Take variables that are not trained from those that are."""
    frozen = [parameter for parameter in parameters if not parameter.trainable]
    for holder, name, parameter in holders(model, frozen):
        setattr(holder, name, Frozen(getattr(holder, name).get_raw_value(), out_sharding=parameter.spec))


def holders(
    model: nnx.Module, parameters: Sequence[Parameter]
) -> Iterator[tuple[nnx.Module, str, Parameter]]:
    """Return the module that holds each parameter, and the parameter's name in it."""
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    for parameter in parameters:
        module, _, name = parameter.path.rpartition(".")
        yield modules[module], name, parameter
