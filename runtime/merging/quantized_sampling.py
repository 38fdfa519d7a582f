"""The numbers that quantized tensors of a merged folder represent, and how exact these can be."""

from __future__ import annotations

import numpy as np

from .exactly import last_place
from .merged_files import SCALE, MergedFiles, Rows


def decoded(
    merged: MergedFiles, name: str, rows: Rows, stored: np.ndarray, exact: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what rows of a quantized tensor represent, the step of its quantization at each element, and the
    largest difference that the quantization may cause.

    Args:
        stored, exact: the rows in the tensor's own type, and their float64 values before quantization.
    """
    scale = merged.rows(name + SCALE, rows).astype(np.float64)
    integers = stored.dtype == np.int8
    unit = scale * (np.ones_like(exact) if integers else last_place(exact / scale, stored.dtype))
    # The encoder first divides by the scale in float32, which may give the other neighbor.
    return stored.astype(np.float64) * scale, unit, unit * (0.5 + 2.0**-8) + np.abs(exact) * 2.0**-20
