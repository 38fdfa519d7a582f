"""The formats in which a checkpoint may store its weights quantized, by its config.json: FP8 and MXFP4. Each
pair of codes and scales represents a tensor in bfloat16.

FP8, as DeepSeek, Qwen, MiniMax and Mistral publish it: X, F8_E4M3[..., out, in], holds codes. X_scale_inv
holds the numbers that its blocks are multiplied by: float[..., ceil(out / rows), ceil(in / columns)] with
config.json's `weight_block_size: [rows, columns]`, or one number for the whole matrix if that is null. The
values equal those of transformers' integrations/finegrained_fp8.py to the bit. It takes all blocks of a
matrix as equal in size; here the last ones may be smaller. An `activation_scale` next to X serves products in
FP8, and is left out.

MXFP4, of the experts of gpt-oss: X_blocks, uint8[E, out, in / 32, 16], holds two four-bit numbers in a byte,
the low bits first. X_scales, uint8[E, out, in / 32], holds the power of two that 32 numbers share. The
formats are E2M1 and E8M0 of OCP's Microscaling Formats 1.0. The pair represents X, bfloat16[E, in, out], in
the name and the layout that transformers and vLLM read from unquantized checkpoints. The values equal those
of transformers' integrations/mxfp4.py to the bit.

The compiler also reads lists of tensors with this module, so numpy is imported only where codes are decoded.
"""

from __future__ import annotations

import functools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ..errors import UserError
from ..model.families.family import Family, UnsupportedCheckpoint
from ..progress import readable_size
from .agreement import QUANTIZATION, Fault, Kind, Stored
from .files import AGAIN, Files
from .headers import FLOATING, Tensor, View, numpy_type

if TYPE_CHECKING:
    import numpy as np

    from .checkpoint import HFCheckpoint

One = TypeVar("One", bound=Stored)
Shape = tuple[int, ...]


class Unpaired(ValueError):
    """Codes or scales that do not form a tensor; `fault` says why."""

    def __init__(self, kind: Kind, tensor: Stored, text: str) -> None:
        super().__init__(text)
        self.fault = Fault(kind, text.partition(" ")[0], tensor.file, text, AGAIN)


@dataclass(frozen=True)
class Packed(Tensor):
    """The tensor that codes and their scales represent, in bfloat16.

    Attributes:
        start, end: place of the codes in their file.
        codes, scales: the stored tensors.
    """

    codes: Tensor
    scales: Tensor

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, shape: Shape, **fields: Any) -> Self:
        return cls(codes.file, "BF16", shape, codes.start, codes.end, codes, scales, **fields)

    @property
    def size(self) -> int:
        return 2 * math.prod(self.shape)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        return self.codes, self.scales


class Format(ABC):
    """A format of quantized weights."""

    @abstractmethod
    def unpacked(
        self, tensors: Mapping[str, One], represented: Callable[[One, One, Shape], One]
    ) -> dict[str, One]:
        """Return a checkpoint's tensors; codes with scales become the tensor that they represent.

        Args:
            represented: makes this tensor from the codes, the scales and its shape.

        Raises:
            Unpaired: when codes or scales are missing, or do not fit.
        """

    @abstractmethod
    def packed(self, codes: Tensor, scales: Tensor, shape: Shape) -> Packed:
        """Return a represented tensor that can be read."""


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

        (rows, columns), (height, width) = self.shape[-2:], self.block_size
        data = np.frombuffer(self.scales.bytes_of(view, 0, self.scales.size), numpy_type(self.scales.dtype))
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
    for name, tensor in ((stem + BLOCKS, blocks), (stem + SCALES, scales)):
        if tensor.dtype != "U8":
            raise Unpaired(Kind.TYPE, tensor, f"{name} has type {tensor.dtype}, expected U8")
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
        blocks, scales = (self._expert(view, packed, expert) for packed in self.stored)
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


def format_of(family: Family, config: Mapping[str, Any]) -> Format | None:
    """Return the format that a config.json names; None if it names none that the family reads.

    Raises:
        UnsupportedCheckpoint: a value of the format is wrong.
    """
    described = config.get(QUANTIZATION)
    if described is None or not family.reads(described):
        return None
    if described["quant_method"] == "mxfp4":
        return Mxfp4()
    return Fp8.of(described)


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without the description of stored quantization."""
    return {key: value for key, value in config.items() if key != QUANTIZATION}


def read_unpacked(store: Files, form: Format, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors, with quantized ones as the tensors that they represent.

    Raises:
        UserError: when codes or scales are missing, or do not fit.
    """
    try:
        return form.unpacked(tensors, form.packed)
    except Unpaired as error:
        fault = error.fault
        where = store.name if fault.file is None else store.path(fault.file)
        raise UserError(f"{where}: {fault.text}", fault.help or AGAIN) from error


def sentence(checkpoint: HFCheckpoint) -> str:
    """Return a sentence about the tensors that are stored quantized, of which there is at least one."""
    packed = [checkpoint.tensors[name] for name in checkpoint.dequantized]
    held = sum(part.size for tensor in packed for part in tensor.stored)
    size = sum(tensor.size for tensor in packed)
    return (
        f"{len(packed)} tensors of the checkpoint are stored in {packed[0].form}, in "
        f"{readable_size(held)}; they are read as bfloat16, which takes {readable_size(size)}"
    )
