"""The merge rule: W + scale * B @ A, in float32, cast once, a block of rows at a time; of a tensor that holds
all experts, rows are experts. With DoRA each row, which is one output, is scaled to its magnitude.

JAX's CPU backend does the product, the sum and the cast in one pass; NumPy would go over the memory once
for each, at a third of the speed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np

from ..checkpoints.adapter_reader import Delta

if TYPE_CHECKING:
    from ..checkpoints.full import ReplacedTensor

Change: TypeAlias = "Delta | ReplacedTensor"
"""What training did to a tensor."""

BLOCK_ELEMENTS = 1 << 21
"""Elements of a weight that are worked on at a time: 8 MiB in float32, so that a block stays in a core's
cache between the product and the cast."""


def row_blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """The rows of a tensor in order, in blocks of about BLOCK_ELEMENTS.

    A scalar, and a tensor without elements, is one block.
    """
    if not shape or 0 in shape:
        yield slice(None)
        return
    columns = int(np.prod(shape[1:]))
    rows = max(1, BLOCK_ELEMENTS // columns)
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))


def changer(change: Change, dtype: np.dtype) -> Callable[[Callable[[slice], np.ndarray], slice], np.ndarray]:
    """A function that gives rows of the changed tensor, of type `dtype`.

    Its arguments are a function that gives rows of the base's tensor, called where they are needed, and which
    rows are wanted.
    """
    if not isinstance(change, Delta):
        trained = change.read()
        return lambda _, rows: np.ascontiguousarray(trained[rows].astype(dtype, copy=False))
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
    """A changed tensor, in blocks of rows.

    Args:
        weight: the base's.
    """
    changed = changer(change, dtype)
    for rows in row_blocks(change.shape):
        yield changed(weight.__getitem__, rows)


def is_finite(values: np.ndarray) -> bool:
    """Whether no element is an infinity or NaN; whole numbers are finite, whatever their type.

    Bits above those of the type's largest value are neither's: two passes without an array of their own, at
    the pace of the memory.
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
    """The bits of a type's largest value, as a whole number; None of a type that has no other numbers."""
    try:
        largest = ml_dtypes.finfo(dtype).max
    except ValueError:
        return None
    return np.asarray(largest, dtype).view(f"i{dtype.itemsize}")


@functools.cache
def host() -> Any:
    """The device that weights are worked on: the host, whatever else there is."""
    import jax

    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names the accelerator alone
        return jax.devices()[0]


@functools.cache
def _kernel(dtype: np.dtype) -> Callable[..., Any]:
    """The compiled rule for a type."""
    import jax
    import jax.numpy as jnp

    def add(weight: Any, high: Any, low: Any, magnitude: Any = None) -> Any:
        out = weight.astype(jnp.float32) + jnp.matmul(high, low, precision="highest")
        if magnitude is not None:
            out = out * (magnitude / jnp.linalg.norm(out, axis=-1, keepdims=True))
        return out.astype(dtype)

    compiled: Callable[..., Any] = jax.jit(add)
    return compiled
