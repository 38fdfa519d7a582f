"""The first values of adapters that are computed from the base model's weights (runtime.model.initial), and
the base without them. Imports no jax: the other backends use it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ..checkpoints.trained_weights import Delta
from ..merging.arithmetic import in_memory
from ..model.adapters import LoraSettings, Matrices, build_adapters
from ..model.families.family import Source
from ..model.initial import Start, first_values
from ..progress import Progress
from ..weights.checkpoint import HFCheckpoint


def computed(base: HFCheckpoint, lora: LoraSettings, seed: int) -> Start:
    """Compute the first values of PiSSA's or OLoRA's adapters, one projection after the other."""

    def weights() -> Iterator[tuple[str, np.ndarray]]:
        for name, source in sources(base, lora).items():
            yield name, base.read(source.full_name(base.prefix))
            base.release(source.full_name(base.prefix))

    return values_of(lora, weights(), seed)


def values_of(lora: LoraSettings, weights: Iterator[tuple[str, np.ndarray]], seed: int) -> Start:
    """Return the first values of each projection's adapter.

    Args:
        weights: each projection's name and the matrix [out, in] that its adapter approximates.
    """
    out: Start = {}
    with Progress("computing the adapters' first values", None) as progress:
        for name, weight in weights:
            out[name] = first_values(lora, name, weight, seed)
            progress.advance(1)
    return out


def residual(base: HFCheckpoint, lora: LoraSettings, start: Mapping[str, Matrices]) -> HFCheckpoint:
    """Return the base minus what its adapters start with: W - scale * B A, computed in float32 as it is read.
    With LoftQ return the base itself, which is quantized as in any other run."""
    if lora.init == "loftq":
        return base
    changes = {
        source.full_name(base.prefix): Delta(start[name][0], -start[name][1], lora.scale_of(name))
        for name, source in sources(base, lora).items()
    }
    return in_memory(base, changes, "float32")


def sources(base: HFCheckpoint, lora: LoraSettings) -> dict[str, Source]:
    """Return the tensor [out, in] of each projection that carries an adapter, by the projection's name."""
    parameters = {p.path: p for p in base.family.parameters(base.architecture)}
    return {
        adapter.name: parameters[adapter.target.weight].sources[0]
        for adapter in build_adapters(base.family, base.architecture, lora)
    }
