"""The merge rule: W + scale * B @ A in float32, cast once, a block of rows at a time; in a tensor that holds
all experts, a row is an expert. DoRA scales each row, which is one output, to its magnitude.

JAX's CPU backend does the product, the sum and the cast in one pass. NumPy would pass over the memory three
times, at a third of the speed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from ..checkpoints.trained_weights import Delta, ReplacedTensor
from ..model.families.family import Source
from ..weights.checkpoint import HFCheckpoint

Change: TypeAlias = "Delta | ReplacedTensor"
"""The change of a tensor by training."""

BLOCK_ELEMENTS = 1 << 21
"""Elements of a weight per block: 8 MiB in float32, so that a block stays in a core's cache between the
product and the cast."""


def row_blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Split the rows of a tensor, in order, into blocks of about BLOCK_ELEMENTS.

    A scalar or a tensor without elements is one block.
    """
    if not shape or 0 in shape:
        yield slice(None)
        return
    columns = int(np.prod(shape[1:]))
    rows = max(1, BLOCK_ELEMENTS // columns)
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))


def changer(change: Change, dtype: np.dtype) -> Callable[[Callable[[slice], np.ndarray], slice], np.ndarray]:
    """Return a function that computes rows of the changed tensor in type `dtype`.

    Its arguments are a function that returns rows of the base's tensor, called when they are needed, and the
    range of wanted rows.
    """
    if not isinstance(change, Delta):
        return change.changer(dtype)
    import jax

    add, device = _kernel(dtype), host()
    low: Any = np.ascontiguousarray(change.a, np.float32)
    if whole := low.ndim == 2:
        low = jax.device_put(low, device)
    high = np.ascontiguousarray(change.b, np.float32) * np.float32(change.scale)
    lengths = () if change.magnitude is None else (np.asarray(change.magnitude, np.float32)[:, None],)

    def merged(base: Callable[[slice], np.ndarray], rows: slice) -> np.ndarray:
        right = low if whole else jax.device_put(low[rows], device)
        left = (base(rows), high[rows], *(length[rows] for length in lengths))
        weight, outer, *magnitude = (jax.device_put(part, device) for part in left)
        return np.asarray(add(weight, outer, right, *magnitude))

    return merged


def changed_blocks(weight: np.ndarray, change: Change, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield a changed tensor, which the base has as `weight`, in blocks of rows."""
    changed = changer(change, dtype)
    for rows in row_blocks(change.shape):
        yield changed(weight.__getitem__, rows)


@dataclass(frozen=True)
class InMemory(HFCheckpoint):
    """A checkpoint that changes weights when they are read, as a merge to `dtype` changes them."""

    changes: Mapping[str, Change] | None = None
    dtype: str = "float32"

    def read(self, name: str) -> np.ndarray:
        weight = super().read(name)
        change = (self.changes or {}).get(name)
        if change is None:
            return weight
        return np.concatenate(list(changed_blocks(weight, change, np.dtype(self.dtype))))

    def read_rows(self, source: Source, start: int, stop: int) -> np.ndarray:
        return self.read(source.full_name(self.prefix)).reshape(source.reshape)[start:stop]


def in_memory(base: HFCheckpoint, changes: Mapping[str, Change], dtype: str) -> InMemory:
    """Return `base` with changes, by full tensor names, applied in memory."""
    values = {field.name: getattr(base, field.name) for field in fields(HFCheckpoint)}
    return InMemory(**values, changes=changes, dtype=dtype)


def is_finite(values: np.ndarray) -> bool:
    """Return whether no element is an infinity or NaN; integers are always finite.

    Infinities and NaN have larger bits than the type's largest value. The check takes two passes without a
    temporary array, at memory speed.
    """
    largest = _largest_bits(values.dtype)
    if largest is None:
        return True
    signed, sign = values.view(largest.dtype), np.iinfo(largest.dtype).min
    unsigned = values.view(f"u{values.itemsize}")
    highest = int(largest)
    return bool(signed.max(initial=sign) <= highest and unsigned.max(initial=0) <= highest - int(sign))


@functools.cache
def _largest_bits(dtype: np.dtype) -> np.ndarray | None:
    """Return the bits of a type's largest value as an integer; None if all values of the type are finite."""
    try:
        largest = ml_dtypes.finfo(dtype).max
    except ValueError:
        return None
    return np.asarray(largest, dtype).view(f"i{dtype.itemsize}")


def use_host_only() -> None:
    """Let jax use the CPU alone, unless JAX_PLATFORMS says otherwise: no TPU is occupied or needed.

    Call this before jax is asked for devices.
    """
    import jax

    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")


@functools.cache
def host() -> Any:
    """Return the device for work on weights: the host's CPU, even if there are accelerators."""
    import jax

    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names only the accelerator
        return jax.devices()[0]


@functools.cache
def _kernel(dtype: np.dtype) -> Callable[..., Any]:
    """Return the compiled rule for a type."""
    import jax
    import jax.numpy as jnp

    def add(weight: Any, high: Any, low: Any, magnitude: Any = None) -> Any:
        out = weight.astype(jnp.float32) + jnp.matmul(high, low, precision="highest")
        if magnitude is not None:
            out = out * (magnitude / jnp.linalg.norm(out, axis=-1, keepdims=True))
        return out.astype(dtype)

    compiled: Callable[..., Any] = jax.jit(add)
    return compiled
