"""The steps before and after a tower's layers; each module computes one step of families/vision.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..families import vision
from ..layers import ACTIVATIONS, Einsum, Normalization


@dataclass(frozen=True)
class Patches:
    """Which patches belong together, and where they are.

    Attributes:
        images: int32[B, P], 1, 2, ... for the picture of a patch, 0 for padding; None if all patches of a row
            belong together.
        positions: int32[B, P, 2], the row and column of a patch in its picture.
    """

    images: jax.Array | None
    positions: jax.Array


class Positions(nnx.Module):
    """Add embeddings of places."""

    def __init__(self, step: vision.Positions, dtype: Any) -> None:
        self.step = step
        shape = (step.count, step.features)
        self.table = nnx.Param(jnp.zeros((2, *shape) if step.kind == "axes" else shape, dtype))

    def __call__(self, x: jax.Array, at: Patches) -> jax.Array:
        table = self.table.get_value()
        if self.step.kind == "order":
            return x + table
        if self.step.kind == "axes":
            added = table[0][at.positions[..., 1]] + table[1][at.positions[..., 0]]
            return x + (added if at.images is None else jnp.where(at.images[..., None] > 0, added, 0))
        return x + stretched(table, at, self.step.kind == "areas").astype(x.dtype)


class ClassToken(nnx.Module):
    """Add an embedding to each row, before or after its patches."""

    def __init__(self, step: vision.ClassToken, dtype: Any) -> None:
        self.first = step.first
        self.embedding = nnx.Param(jnp.zeros(step.features, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        token = jnp.broadcast_to(self.embedding.get_value(), (x.shape[0], 1, x.shape[2])).astype(x.dtype)
        return jnp.concatenate([token, x] if self.first else [x, token], axis=1)


class Rescale(nnx.Module):
    """Multiply by numbers and add numbers, in float32."""

    def __init__(self, step: vision.Rescale, dtype: Any) -> None:
        self.step = step
        self.bias = nnx.Param(jnp.zeros(step.features, dtype)) if step.name else None
        self.scale = nnx.Param(jnp.zeros(step.features, dtype)) if step.name else None

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32) * self.step.factor + self.step.shift
        if self.bias is not None and self.scale is not None:
            bias, scale = (parameter.get_value().astype(jnp.float32) for parameter in (self.bias, self.scale))
            wide = (wide - bias) * scale
        return wide.astype(x.dtype)


class Steps(nnx.Module):
    """A list of steps, one after the other; those with parameters are attributes by their names."""

    def __init__(self, steps: Sequence[vision.Step], dtype: Any) -> None:
        self.steps, self.dtype = tuple(steps), dtype
        for step in self.steps:
            if step.parameters(""):
                setattr(self, step.name, _module(step, dtype))

    def __call__(self, x: jax.Array, at: Patches) -> jax.Array:
        """Return [B, R, D] of [B, P, F]."""
        for step in self.steps:
            x = self.step(step, x, at)
        return x

    def step(self, step: vision.Step, x: jax.Array, at: Patches) -> jax.Array:
        if isinstance(step, vision.Positions):
            return getattr(self, step.name)(x, at)
        if isinstance(step, vision.Normalize) and not step.norm.weighted:
            return Normalization(step.norm, (step.features,), self.dtype)(x)
        if step.name:
            return getattr(self, step.name)(x.astype(self.dtype) if isinstance(step, vision.Linear) else x)
        return PLAIN[type(step)](step, x)


def _module(step: vision.Step, dtype: Any) -> nnx.Module:
    match step:
        case vision.Linear():
            shape = (step.inputs, step.outputs)
            return Einsum("BPI,IO->BPO", shape, dtype, "kernel", int(step.bias))
        case vision.Normalize():
            return Normalization(step.norm, (step.features,), dtype)
        case vision.Positions():
            return Positions(step, dtype)
        case vision.ClassToken():
            return ClassToken(step, dtype)
    assert isinstance(step, vision.Rescale)
    return Rescale(step, dtype)


def merged(step: vision.Merge, x: jax.Array) -> jax.Array:
    """Return [B, P / count, count * D]: the features of each block's patches."""
    rows, patches, features = x.shape
    x = x.reshape(rows, patches // step.count, step.count, features)
    if step.features_first:
        x = x.swapaxes(2, 3)
    return x.reshape(rows, patches // step.count, step.count * features)


def mean(step: vision.Mean, x: jax.Array) -> jax.Array:
    """Return [B, P / count, D]: the mean of each block's patches, in float32 sums."""
    rows, patches, features = x.shape
    wide = x.reshape(rows, patches // step.count, step.count, features).astype(jnp.float32)
    return jnp.mean(wide, axis=2).astype(x.dtype)


def tile_mean(step: vision.TileMean, x: jax.Array) -> jax.Array:
    """Return [B, P / size**2, D]: the mean of each square of a tile."""
    rows, patches, features = x.shape
    side = math.isqrt(patches) // step.size
    x = x.reshape(rows, side, step.size, side, step.size, features)
    return jnp.mean(x, axis=(2, 4)).reshape(rows, side * side, features)


def shuffled(step: vision.PixelShuffle, x: jax.Array) -> jax.Array:
    """Return [B, P * ratio**2, D / ratio**2]."""
    rows, patches, features = x.shape
    side, ratio = math.isqrt(patches), step.ratio
    half, wide = int(side * ratio), int(features / ratio)
    x = x.reshape(rows, side, half, wide).swapaxes(1, 2)
    x = x.reshape(rows, half, half, int(features / ratio**2)).swapaxes(1, 2)
    return x.reshape(rows, half * half, -1)


PLAIN: dict[type[vision.Step], Callable[[Any, jax.Array], jax.Array]] = {
    vision.Activate: lambda step, x: ACTIVATIONS[step.function](x),
    vision.Rescale: lambda step, x: Rescale(step, x.dtype)(x),
    vision.DropClassToken: lambda step, x: x[:, 1:] if step.first else x[:, :-1],
    vision.Merge: merged,
    vision.Mean: mean,
    vision.TileMean: tile_mean,
    vision.PixelShuffle: shuffled,
}
"""Steps without parameters."""


def stretched(table: jax.Array, at: Patches, areas: bool) -> jax.Array:
    """Return [B, P, D], a square grid of embeddings stretched over each picture with bilinear interpolation.

    Args:
        table: [S * S, D], the grid in the order of rows.
        areas: whether patches and embeddings are areas, rather than points from corner to corner.
    """
    side = math.isqrt(table.shape[0])
    place = grid_places(at, side, areas)
    low = jnp.floor(place).astype(jnp.int32)
    high = jnp.minimum(low + 1, side - 1)
    share = place - low
    (y0, x0), (y1, x1), (y, x) = (jnp.moveaxis(array, -1, 0) for array in (low, high, share))
    corners = (
        (y0, x0, (1 - y) * (1 - x)),
        (y0, x1, (1 - y) * x),
        (y1, x0, y * (1 - x)),
        (y1, x1, y * x),
    )
    wide = table.astype(jnp.float32)
    return sum(wide[row * side + column] * weight[..., None] for row, column, weight in corners)


def grid_places(at: Patches, side: int, areas: bool = False) -> jax.Array:
    """Return float32[B, P, 2], where each patch of its picture is in a grid with `side` places on a side.

    Args:
        areas: as for `stretched`.
    """
    assert at.images is not None
    most = at.images.shape[1] + 1

    def last(images: jax.Array, positions: jax.Array) -> jax.Array:
        return jax.ops.segment_max(positions, images, most)[images]

    lasts = jax.vmap(last)(at.images, at.positions)
    if areas:
        scale = side / (lasts + 1).astype(jnp.float32)
        return jnp.clip((at.positions + 0.5) * scale - 0.5, 0, side - 1)
    # As torch.linspace: from the end in the second half.
    step = (side - 1) / jnp.maximum(lasts, 1).astype(jnp.float32)
    front = at.positions * step
    back = (side - 1) - (lasts - at.positions) * step
    return jnp.where(at.positions < (lasts + 1) // 2, front, back)
