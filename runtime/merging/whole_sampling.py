"""Compute the expected values of tensors that training replaced, for sampling.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..checkpoints.full import embedding_of
from ..model.adapters import TOKEN_ROWS
from ..model.families.base import Parameter
from ..weights.checkpoint import HFCheckpoint
from .exactly import places

Read = Callable[[str], np.ndarray]
"""A parameter's Tunix array, by its path."""
Value = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, float]]
"""See `sampling.Expected.value`."""


def whole_values(
    base: HFCheckpoint, parameters: Sequence[Parameter], read: Read, numbers: tuple[int, ...]
) -> Iterator[tuple[str, Value, tuple[int, ...]]]:
    """Yield each replaced tensor's full name, its value, and the rows that are compared in any case.

    Args:
        numbers: the rows of the embedding that TOKEN_ROWS among the parameters replaces.
    """
    for parameter in parameters:
        if parameter.path == TOKEN_ROWS:
            yield embedding_of(base).full_name(base.prefix), _with_rows(read(TOKEN_ROWS), numbers), numbers
            continue
        for index, source in enumerate(parameter.sources):
            yield source.full_name(base.prefix), _replaced(read, parameter, index), ()


def _with_rows(trained: np.ndarray, numbers: Sequence[int]) -> Value:
    """Return the value of the embedding, of which training replaced some rows."""
    values = trained.astype(np.float64)

    def value(rows: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, float]:
        out = weight.copy()
        for number, row in zip(numbers, values, strict=True):
            out[rows == number] = row
        return out, 0.0

    return value


def _replaced(read: Read, parameter: Parameter, index: int) -> Value:
    source = parameter.sources[index]

    def value(rows: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, float]:
        array = read(parameter.path)[parameter.place(index)]
        width = math.prod(source.shape[1:])
        return array[places(source, rows[:, None] * width + np.arange(width))].astype(np.float64), 0.0

    return value
