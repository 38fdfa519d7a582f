"""The adapters of experts, as Tunix's arrays and as Hugging Face's.

PEFT has A [experts * rank, in] and B [out, rank * experts].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from .adapters import Adapter
    from .families.base import Parameter, Source

Pair = tuple["np.ndarray", "np.ndarray"]
"""A and B."""


def split(adapter: Adapter, a: np.ndarray, b: np.ndarray) -> Pair:
    """Return PEFT's A and B of an adapter's arrays."""
    count, rank = adapter.target.experts, adapter.rank
    low = a.reshape(count, -1, rank).swapaxes(1, 2)
    high = b.transpose(_outputs(adapter)).reshape(count, rank, -1)
    if adapter.target.swapped:
        low, high = high, low
    return low.reshape(count * rank, -1), high.transpose(2, 1, 0).reshape(-1, rank * count)


def shapes(adapter: Adapter) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of PEFT's A and B."""
    ranks = adapter.rank * adapter.target.experts
    low, high = math.prod(adapter.a_shape[1:-1]), math.prod(adapter.b_shape[2:])
    return ((ranks, high), (low, ranks)) if adapter.target.swapped else ((ranks, low), (high, ranks))


def join(adapter: Adapter, low: np.ndarray, high: np.ndarray) -> Pair:
    """Invert `split`."""
    import numpy as np  # the compiler, which has no numpy, imports this module

    outputs = _outputs(adapter)
    low = low.reshape(adapter.target.experts, adapter.rank, -1)
    high = high.reshape(-1, adapter.rank, adapter.target.experts).transpose(2, 1, 0)
    if adapter.target.swapped:
        low, high = high, low
    high = high.reshape([adapter.b_shape[axis] for axis in outputs]).transpose(np.argsort(outputs))
    low = low.swapaxes(1, 2).reshape(adapter.a_shape)
    return np.ascontiguousarray(low), np.ascontiguousarray(high)


def _outputs(adapter: Adapter) -> tuple[int, ...]:
    """Return the axes of the experts' B, with the outputs in Hugging Face's order."""
    rest = tuple(range(2, len(adapter.b_shape)))
    return 0, 1, *(rest[::-1] if adapter.target.alternate else rest)


def products(
    adapter: Adapter, parameter: Parameter, a: np.ndarray, b: np.ndarray
) -> Iterator[tuple[Source, np.ndarray, np.ndarray]]:
    """Yield A and B of each tensor that a weight of experts is made of: one expert's, or all experts'.

    Args:
        a, b: [experts, *in, rank] and [experts, rank, *out].
    """
    contract = adapter.target.contract
    rest = [axis for axis in range(1, len(parameter.shape)) if axis not in contract]
    for number, source in enumerate(parameter.sources):
        place = parameter.place(number)
        kept = [axis for axis, index in enumerate(place) if isinstance(index, slice)]
        at = dict(zip(kept, source.transpose, strict=True))  # the tensor's own axis of each of the weight's
        outputs = [axis for axis in rest if axis in at]
        low = a[place[0]]
        high = b[(place[0], slice(None), *(place[axis] for axis in rest))]
        first = high.ndim - len(outputs)
        order = [first + outputs.index(axis) for axis in sorted(outputs, key=at.__getitem__)]
        high = high.transpose(*range(first), *order).reshape(*high.shape[:first], -1)
        if min(map(at.__getitem__, outputs)) < min(at[axis] for axis in contract):
            low, high = low.swapaxes(-1, -2), high.swapaxes(-1, -2)
        else:  # [in, out]: (B A)^T = A^T B^T
            low, high = high, low
        yield source, low, high
