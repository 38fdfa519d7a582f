"""How many slots of the cache attention reads in a pass of one token. This module imports no jax."""

from __future__ import annotations

import functools

BLOCK, MOST_SIZES = 128, 8
"""Attention reads the slots that are filled, rounded up: to a multiple of BLOCK slots after the prompt's, so
that there are at most MOST_SIZES numbers of slots. Each of them is compiled."""


def sizes_read(prompts: int, slots: int, reach: int | None = None) -> tuple[int, ...]:
    """Return the numbers of slots that attention is compiled for, ascending. A pass takes the first that is
    not below the filled slots, else the last.

    Args:
        prompts: the slots of prompts, which are always read.
        slots: all slots of a row.
        reach: how many of a row's latest tokens a token sees at most, itself included; None for all.
    """
    step = BLOCK * -(-(slots - prompts) // (BLOCK * MOST_SIZES))
    most = slots if reach is None else min(reach, slots)
    return *(size for size in range(prompts + step, slots, step) if size < most), most


@functools.lru_cache(maxsize=256)
def mean_read(prompts: int, slots: int, reach: int | None = None) -> float:
    """Return the slots that a pass reads on average, while a row is completed. The arguments are those of
    `sizes_read`."""
    sizes, passes = sizes_read(prompts, slots, reach), range(prompts + 2, slots + 1)
    read = [next((size for size in sizes if size >= filled), sizes[-1]) for filled in passes]
    return sum(read) / len(read) if read else float(sizes[-1])
