"""The interface of a format in which a checkpoint stores weights quantized.

The compiler also reads lists of tensors with it, so this does not import numpy.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from .agreement import Fault, Kind, Stored
from .checkpoint_files import AGAIN
from .headers import Tensor

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
    def of(cls, codes: Tensor, scales: Tensor, shape: Shape, **own: Any) -> Self:
        return cls(codes.file, "BF16", shape, codes.start, codes.end, codes, scales, **own)

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
