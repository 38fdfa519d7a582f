"""What the exact values of merged tensors are computed from: places in Tunix's arrays, and LoRA's scales."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from ..model.adapters import Adapter, LoraSettings
from ..model.families.base import Source

SINGLE_ROUNDING = 2.0**-24
"""Largest relative error of one operation in float32."""


def places(source: Source, elements: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the places of a Hugging Face tensor's elements in Tunix's array: an index for each axis.

    Args:
        elements: numbers of the elements in the order of the tensor's bytes.
    """
    along = np.unravel_index(elements, source.reshape)
    return tuple(along[axis] for axis in source.transpose)


def rank_scales(adapter: Adapter, settings: LoraSettings) -> np.ndarray:
    """Return the factor of each entry of an adapter's rank axis: alpha / rank of its projection, or alpha /
    sqrt(rank) with rsLoRA. float64[rank]."""
    out = np.zeros(adapter.rank)
    for part in adapter.projections:
        rank = settings.rank_of(part.name)
        out[part.block] = settings.alpha_of(part.name) / (math.sqrt(rank) if settings.rslora else rank)
    return out


def last_place(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the distance between adjacent numbers of a type, at some float64 values."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.where(values == 0, info.minexp, np.frexp(values)[1] - 1)
    return np.ldexp(1.0, np.maximum(exponent, info.minexp) - info.nmant)
