"""LoftQ: compute the error that quantization adds to the weights, with the run's own quantization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..checkpoints.full import hugging_face
from ..merging.arithmetic import host
from ..model.adapters import build_adapters
from ..model.loading import read_shards
from ..model.partition_rules import resolved
from ..model.quantize import Layout, dequantize, layouts, quantize
from ..settings import RunSettings
from ..weights.checkpoint import HFCheckpoint


def lost(base: HFCheckpoint, settings: RunSettings) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each projection's weight [out, in] minus the values of its quantized codes, in float32.

    The host computes this, one weight at a time, in the blocks of the run's own mesh.
    """
    lora, axes, dtype = settings.lora, settings.mesh.axes, np.dtype(jnp.dtype(settings.model.dtype))
    assert lora is not None and lora.quantize is not None
    parameters = resolved(base.family.parameters(base.architecture), settings.rules, axes)
    by_path = {parameter.path: parameter for parameter in parameters}
    how = layouts(base.family, base.architecture, parameters, lora.quantize, axes, lora.began)
    for adapter in build_adapters(base.family, base.architecture, lora):
        parameter = by_path[adapter.target.weight]
        whole = tuple((0, size) for size in parameter.shape)
        ((_, weight),) = read_shards(base, parameter, [whole], dtype)
        rest = weight.astype(np.float32) - stored(weight, how[parameter.path])
        for part in adapter.projections:
            number = part.slot if adapter.target.fused else 0
            yield part.name, hugging_face(rest[parameter.place(number)], parameter.sources[number])


def stored(weight: np.ndarray, how: Layout) -> np.ndarray:
    """Return the float32 numbers that a weight's codes and scales represent."""
    whole = (None,) * weight.ndim
    mesh = Mesh(np.array([host()]), ("host",))
    codes = quantize(jax.device_put(weight, host()), replace(how, spec=whole, scale_spec=whole), mesh)
    return np.asarray(dequantize(codes, jnp.float32))
