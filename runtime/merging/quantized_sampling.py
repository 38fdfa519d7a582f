"""The numbers that quantized tensors of a merged folder represent, and how exact these can be."""

from __future__ import annotations

import numpy as np

from ..errors import UserError
from .exactly import last_place
from .merged_files import AGAIN, SCALE, MergedFiles, Rows


def decoded(
    merged: MergedFiles, name: str, rows: Rows, stored: np.ndarray, exact: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what rows of a quantized tensor represent, the step of its quantization at each element, and the
    largest difference that the quantization may cause.

    Args:
        stored, exact: the rows in the tensor's own type, and their float64 values before quantization.
    """
    scale = _scales(merged, name, rows)
    integers = stored.dtype == np.int8
    unit = scale * (np.ones_like(exact) if integers else last_place(exact / scale, stored.dtype))
    # The encoder first divides by the scale in float32, which may give the other neighbor.
    return stored.astype(np.float64) * scale, unit, unit * (0.5 + 2.0**-8) + np.abs(exact) * 2.0**-20


def _scales(merged: MergedFiles, name: str, rows: Rows) -> np.ndarray:
    """Return the scale of each given row of a quantized tensor: float64[rows, 1] or [1, 1]."""
    shape = merged.tensors[name + SCALE].shape
    every = np.arange(shape[0]) if shape else np.zeros(1, np.int64)
    scales = merged.rows(name + SCALE, every).astype(np.float64).reshape(-1, 1)
    if len(scales) not in (1, merged.tensors[name].shape[0]):
        raise UserError(
            f"{merged.path(name + SCALE)}: {name + SCALE} has shape {list(shape)}, neither one scale nor "
            f"one for each of {merged.tensors[name].shape[0]} rows",
            AGAIN,
        )
    return scales if len(scales) == 1 else scales[rows]
