"""Read weights in FP8, as DeepSeek, Qwen, MiniMax and Mistral publish them.

X, F8_E4M3[..., out, in], holds codes. X_scale_inv holds the numbers that its blocks are multiplied by:
float[..., ceil(out / rows), ceil(in / columns)] with config.json's `weight_block_size: [rows, columns]`, or
one number for the whole matrix if that is null. Both represent X in bfloat16. The values equal those of
transformers' integrations/finegrained_fp8.py to the bit. It takes all blocks of a matrix as equal in size;
here the last ones may be smaller. An `activation_scale` next to X serves products in FP8, and is left out.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..model.families.base import UnsupportedCheckpoint
from .agreement import Kind, Stored
from .headers import FLOATING, Tensor, View
from .packed import Format, One, Packed, Shape, Unpaired

if TYPE_CHECKING:
    import numpy as np

CODES = "F8_E4M3"
SCALE = "_scale_inv"
ACTIVATION = "activation_scale"
BLOCK = (128, 128)
"""The block if config.json gives none, as in transformers."""
AT_ONCE = 1 << 18
"""The most codes that are decoded at a time."""

Size = tuple[int, int]


@dataclass(frozen=True)
class Fp8(Format):
    """FP8 with a scale for each block.

    Attributes:
        block: rows and columns of a block; None for one scale in a matrix.
    """

    block: Size | None

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Fp8:
        """Return the format that a `quantization_config` describes.

        Raises:
            UnsupportedCheckpoint: when its weight_block_size is wrong.
        """
        size = described.get("weight_block_size", BLOCK)
        if size is None:
            return cls(None)
        if not isinstance(size, list | tuple) or [type(n) is int and n > 0 for n in size] != [True, True]:
            raise UnsupportedCheckpoint(
                f"config.json: weight_block_size is {size!r}, neither two sizes nor null", "weight_block_size"
            )
        return cls((size[0], size[1]))

    def unpacked(
        self, tensors: Mapping[str, One], represented: Callable[[One, One, Shape], One]
    ) -> dict[str, One]:
        out = {}
        for name, tensor in tensors.items():
            if name.endswith((SCALE, ACTIVATION)):
                weight = _scaled(name)
                if weight not in tensors:
                    raise Unpaired(Kind.MISSING, tensor, f"{name} has no {weight}")
                if tensors[weight].dtype != CODES:
                    text = f"{weight} has type {tensors[weight].dtype}, expected {CODES} as it has a scale"
                    raise Unpaired(Kind.TYPE, tensors[weight], text)
            elif tensor.dtype == CODES:
                scales = tensors.get(name + SCALE)
                if scales is None:
                    raise Unpaired(Kind.MISSING, tensor, f"{name} has type {CODES} and no {name}{SCALE}")
                if scales.dtype not in FLOATING:
                    text = f"{name}{SCALE} has type {scales.dtype}, which is not a float type"
                    raise Unpaired(Kind.TYPE, scales, text)
                self._check(name, tensor, scales)
                out[name] = represented(tensor, scales, tensor.shape)
            else:
                out[name] = tensor
        if tensors and not any(tensor.dtype == CODES for tensor in tensors.values()):
            name, tensor = next(iter(tensors.items()))
            text = f"{name} has type {tensor.dtype}, and no tensor has {CODES}, which config.json names"
            raise Unpaired(Kind.TYPE, tensor, text)
        return out

    def packed(self, codes: Tensor, scales: Tensor, shape: Shape) -> Blocks:
        return Blocks.of(codes, scales, shape, block_size=self.block or (shape[-2], shape[-1]))

    def _check(self, name: str, codes: Stored, scales: Stored) -> None:
        if len(codes.shape) < 2:
            text = f"{name} has shape {list(codes.shape)}, and {CODES} is read only for matrices"
            raise Unpaired(Kind.SHAPE, codes, text)
        (*front, rows, columns), block = codes.shape, "null"
        grids: tuple[Shape, ...] = (), (1,), (*front, 1, 1)
        if self.block is not None:
            grids = ((*front, -(-rows // self.block[0]), -(-columns // self.block[1])),)
            block = str(list(self.block))
        if scales.shape not in grids:
            text = f"{name}{SCALE} has shape {list(scales.shape)}, expected {list(grids[0])}"
            text = f"{text} for {list(codes.shape)} and weight_block_size {block}"
            raise Unpaired(Kind.SHAPE, scales, text)


def _scaled(name: str) -> str:
    """Return the name of the weight that a scale belongs to."""
    if name.endswith(SCALE):
        return name.removesuffix(SCALE)
    stem = name.removesuffix(ACTIVATION)
    return stem + "weight" if stem.endswith(".") else stem.removesuffix("_")


@dataclass(frozen=True)
class Blocks(Packed):
    """The tensor that codes and the scales of their blocks represent.

    Attributes:
        block_size: rows and columns of a block.
    """

    form = "FP8"
    block_size: Size

    def bytes_of(self, view: View, start: int, end: int) -> memoryview:
        import numpy as np

        rows, columns = self.shape[-2:]
        first, last = start // (2 * columns), -(-end // (2 * columns))
        out = np.empty((last - first, columns), np.uint16)
        tables = self._tables(view)
        # Where the codes of a column begin in its row of blocks' table.
        at = np.arange(columns, dtype=np.intp) // self.block_size[1] * 256

        def decode(part: tuple[int, int]) -> None:
            low, high = part
            codes = np.frombuffer(self.codes.bytes_of(view, low * columns, high * columns), np.uint8)
            matrix, row = divmod(low, rows)
            table = tables(matrix, row // self.block_size[0])
            np.take(table, codes.reshape(-1, columns) + at, out=out[low - first : high - first], mode="clip")

        parts = list(self._parts(first, last))
        if len(parts) < 3:
            for part in parts:
                decode(part)
        else:
            with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy releases Python's lock
                list(pool.map(decode, parts))
        skipped = start - 2 * columns * first
        return out.reshape(-1).view(np.uint8).data[skipped : skipped + end - start].toreadonly()

    def _parts(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield pieces of the rows of all matrices, each within one row of blocks."""
        rows, height = self.shape[-2], self.block_size[0]
        step = max(1, AT_ONCE // self.shape[-1])
        while first < last:
            matrix, row = divmod(first, rows)
            stop = min((row // height + 1) * height, rows) + matrix * rows
            yield first, min(stop, first + step, last)
            first = min(stop, first + step, last)

    def _tables(self, view: View) -> Callable[[int, int], np.ndarray]:
        """Return a function of a matrix and a row of its blocks: uint16[256 blocks], each code's bits."""
        import ml_dtypes
        import numpy as np

        from .safetensors_files import DTYPES

        (rows, columns), (height, width) = self.shape[-2:], self.block_size
        data = np.frombuffer(self.scales.bytes_of(view, 0, self.scales.size), DTYPES[self.scales.dtype])
        grid = data.astype(np.float32).reshape(-1, -(-rows // height), -(-columns // width))

        def table(matrix: int, block: int) -> np.ndarray:
            scales = grid[matrix % len(grid), block]
            with np.errstate(all="ignore"):  # the merge reports values that are not finite
                return (scales[:, None] * _values()).astype(ml_dtypes.bfloat16).view(np.uint16).reshape(-1)

        return table


@functools.cache
def _values() -> np.ndarray:
    """Return float32[256]: the number of each code."""
    import ml_dtypes
    import numpy as np

    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
