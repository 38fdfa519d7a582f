"""Read experts in MXFP4, the format of gpt-oss: each pair of tensors becomes the tensor it represents.

X_blocks, uint8[E, out, in / 32, 16], holds two four-bit numbers in a byte, the low bits first. X_scales,
uint8[E, out, in / 32], holds the power of two that 32 numbers share. The formats are E2M1 and E8M0 of OCP's
Microscaling Formats 1.0. The pair represents X, bfloat16[E, in, out], in the name and the layout that
transformers and vLLM read from unquantized checkpoints. The values equal those of transformers'
integrations/mxfp4.py to the bit.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .agreement import Kind, Stored
from .headers import Tensor, View
from .packed import Format, One, Packed, Shape, Unpaired

if TYPE_CHECKING:
    import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
"""Number of values that share a scale."""
STRIPE = 8
"""Groups that are decoded at a time: the data to transpose stays in a core's cache."""
BIAS = 127
"""The bias of a scale's exponent."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values by the lower three bits of a number; the fourth bit is the sign."""


class Mxfp4(Format):
    """MXFP4, with the names and the layout of gpt-oss."""

    def unpacked(
        self, tensors: Mapping[str, One], represented: Callable[[One, One, Shape], One]
    ) -> dict[str, One]:
        out = {}
        for name, tensor in tensors.items():
            if name.endswith(SCALES):
                stem = name.removesuffix(SCALES)
                if stem + BLOCKS not in tensors:
                    raise Unpaired(Kind.MISSING, tensor, f"{name} has no {stem}{BLOCKS}")
            elif name.endswith(BLOCKS):
                stem = name.removesuffix(BLOCKS)
                scales = tensors.get(stem + SCALES)
                if scales is None:
                    raise Unpaired(Kind.MISSING, tensor, f"{name} has no {stem}{SCALES}")
                if stem in tensors:
                    raise Unpaired(Kind.MISSING, tensor, f"{name} encodes {stem}, which is also in the file")
                _check(stem, tensor, scales)
                experts, outputs, groups, _ = tensor.shape
                out[stem] = represented(tensor, scales, (experts, groups * GROUP, outputs))
            else:
                out[name] = tensor
        return out

    def packed(self, codes: Tensor, scales: Tensor, shape: Shape) -> Experts:
        return Experts.of(codes, scales, shape)


def _check(stem: str, blocks: Stored, scales: Stored) -> None:
    for name, one in ((stem + BLOCKS, blocks), (stem + SCALES, scales)):
        if one.dtype != "U8":
            raise Unpaired(Kind.TYPE, one, f"{name} has type {one.dtype}, expected U8")
    if len(blocks.shape) != 4 or blocks.shape[3] != GROUP // 2:
        expected = f"three sizes and {GROUP // 2}"
        text = f"{stem}{BLOCKS} has shape {list(blocks.shape)}, expected {expected}"
        raise Unpaired(Kind.SHAPE, blocks, text)
    if scales.shape != blocks.shape[:3]:
        text = f"{stem}{SCALES} has shape {list(scales.shape)}, expected {list(blocks.shape[:3])}"
        raise Unpaired(Kind.SHAPE, scales, f"{text} as {stem}{BLOCKS} has")


@dataclass(frozen=True)
class Experts(Packed):
    """The tensor that a pair of blocks and scales represents: bfloat16[experts, in, out]."""

    form = "MXFP4"

    @property
    def block(self) -> int:
        """Return the bytes of one expert."""
        return 2 * self.shape[1] * self.shape[2]

    def bytes_of(self, view: View, start: int, end: int) -> memoryview:
        import numpy as np

        _, inputs, outputs = self.shape
        first, last = start // (2 * outputs), -(-end // (2 * outputs))
        out = np.empty((last - first, outputs), np.uint16)

        def expert(number: int) -> None:
            low, high = max(first, number * inputs), min(last, (number + 1) * inputs)
            self._decode(view, number, low - number * inputs, out[low - first : high - first])

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy releases Python's lock
            list(pool.map(expert, range(first // inputs, -(-last // inputs))))
        skipped = start - 2 * outputs * first
        return out.reshape(-1).view(np.uint8).data[skipped : skipped + end - start].toreadonly()

    def _decode(self, view: View, expert: int, low: int, out: np.ndarray) -> None:
        """Decode inputs of an expert, from number `low` on, into the bits of [inputs, out]."""
        blocks, scales = (self._expert(view, one, expert) for one in self.stored)
        high = low + len(out)
        for group in range(low // GROUP, -(-high // GROUP), STRIPE):
            part = slice(group, group + STRIPE)
            values = decoded(blocks[:, part], scales[:, part]).T
            at = group * GROUP
            stop = min(high, at + len(values))
            out[max(at, low) - low : stop - low] = values[max(0, low - at) : stop - at]

    def _expert(self, view: View, tensor: Tensor, expert: int) -> np.ndarray:
        """Return one expert's part of blocks or scales."""
        import numpy as np

        size = math.prod(tensor.shape[1:])
        data = tensor.bytes_of(view, expert * size, (expert + 1) * size)
        return np.frombuffer(data, np.uint8).reshape(tensor.shape[1:])


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decode numbers in MXFP4 to the bits of bfloat16.

    Args:
        blocks: uint8[..., G, 16].
        scales: uint8[..., G].

    Returns:
        uint16[..., 32 G].
    """
    import numpy as np

    pairs = np.take(_table(), (scales[..., None].astype(np.uint16) << 8) | blocks)
    return pairs.view(np.uint16).reshape(*scales.shape[:-1], -1)


@functools.cache
def _table() -> np.ndarray:
    """Return uint32[65536]: the bits of each byte's two numbers, the first one lower, by scale and byte."""
    import ml_dtypes
    import numpy as np

    numbers = np.array([*MAGNITUDES, *(-value for value in MAGNITUDES)])
    values = np.ldexp(numbers, np.arange(256)[:, None] - BIAS)
    with np.errstate(over="ignore"):  # overflow of the last two scales, which no weight uses
        bits = values.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    byte = np.arange(256)
    return (bits[:, byte & 15] | bits[:, byte >> 4] << 16).reshape(-1)
