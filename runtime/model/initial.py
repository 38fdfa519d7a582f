"""The first values of adapters: the same for every backend, mesh and machine. Imports numpy only."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .adapters import Adapter, LoraSettings, Matrices

UNIFORM = {"peft": 1.0, "qwix": 6.0}
"""The square of the bound, times fan_in."""


def initial_pair(adapter: Adapter, settings: LoraSettings, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first values of A and B, float32 of `a_shape` and `b_shape`; one of the two is zero.

    A is uniform within 1/sqrt(fan_in) as in PEFT (kaiming_uniform with a = sqrt(5)), uniform within
    sqrt(6/fan_in) as in Qwix (he_uniform), or normal with deviation 1/rank as PEFT's gaussian. fan_in is that
    of a single expert. With zero_a B is drawn instead, within 1/sqrt(rank). The values depend only on the
    seed and the projection's name, not on the mesh or on the other trained weights.
    """
    if settings.init == "zero_a":
        parts = {}
        for part in adapter.projections:
            low, high, *_ = adapter.shapes(part)
            drawn = _uniform(random_for(seed, f"{part.name}.B"), high, part.rank**-0.5)
            parts[part.name] = np.zeros(low, np.float32), drawn
        a, b = replace(adapter, dora=False).join(parts)
        return a, b
    fan_in = int(np.prod(adapter.a_shape[adapter.target.stacked : -1]))
    blocks = []
    for part in adapter.blocks:
        random = random_for(seed, adapter.target.weight if adapter.shared else part.name)
        shape = (*adapter.a_shape[:-1], part.rank)
        if settings.init == "gaussian":
            blocks.append(random.standard_normal(shape, dtype=np.float32) / np.float32(part.rank))
        else:
            blocks.append(_uniform(random, shape, np.sqrt(UNIFORM[settings.init] / fan_in)))
    return np.concatenate(blocks, axis=-1), np.zeros(adapter.b_shape, np.float32)


def initial_adapters(adapters: Sequence[Adapter], settings: LoraSettings, seed: int) -> dict[str, Matrices]:
    """Return A and B of each projection ("layers.0.self_attn.q_proj"), as `Adapter.split` lays them out."""
    out: dict[str, Matrices] = {}
    for adapter in adapters:
        out.update(adapter.split(*initial_pair(adapter, settings, seed)))
    return out


def path_hash(path: str) -> int:
    """Hash a path to a number that is the same on every machine and Python version."""
    return zlib.crc32(path.encode())


def random_for(seed: int, name: str) -> np.random.Generator:
    """Return a generator of random numbers that depend only on the seed and a name."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, path_hash(name)])))


def _uniform(random: np.random.Generator, shape: Sequence[int], bound: float) -> np.ndarray:
    return (random.random(shape, dtype=np.float32) * 2.0 - 1.0) * np.float32(bound)
