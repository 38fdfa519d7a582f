"""Rotary embeddings by time, row and column (M-RoPE, https://arxiv.org/abs/2409.12191)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .description import DecoderArchitecture
from .family import MOST, UnsupportedCheckpoint, section

SECTIONS = "mrope_section"


def by_axes(
    a: DecoderArchitecture, config: Mapping[str, Any], default: tuple[int, int, int] | None = None
) -> DecoderArchitecture:
    """Return a description with `turned_axes`.

    config.json gives the number of pairs of features that turn by time, row and column. Qwen 2.5 VL has those
    of time first, then those of the row. With a default, as in later models, the axes take turns instead,
    until the row and the column have theirs; all other pairs turn by time.

    Args:
        config: the text part of a config.json.
        default: the numbers if config.json gives none; None if such a model has no pictures.

    Raises:
        UnsupportedCheckpoint: when it gives something else.
    """
    pairs = max((rope.turned(a.head_dim) for _, rope in a.ropes), default=0) // 2
    scaling = section(config, "rope_scaling") or section(config, "rope_parameters")
    sizes = scaling.get(SECTIONS) or default
    if sizes is None:
        return a
    known = isinstance(sizes, list | tuple) and len(sizes) == 3
    if not known or not all(isinstance(count, int) and 0 <= count <= MOST for count in sizes):
        raise UnsupportedCheckpoint(
            f"config.json: {SECTIONS} is {sizes!r}, not three numbers of pairs of features",
            SECTIONS,
        )
    if default is None:
        if sum(sizes) != pairs:
            raise UnsupportedCheckpoint(
                f"config.json: {SECTIONS} has {sum(sizes)} pairs of features, and {pairs} of a head turn",
                SECTIONS,
            )
        axes = [axis for axis, count in enumerate(sizes) for _ in range(count)]
    else:
        axes = [0] * pairs
        for axis in (1, 2):
            for pair in range(axis, min(3 * sizes[axis], pairs), 3):
                axes[pair] = axis
    return replace(a, turned_axes=tuple(axes))
