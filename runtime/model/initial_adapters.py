"""The first values of all adapters, for backends other than Tunix."""

from __future__ import annotations

from collections.abc import Sequence

from .adapters import Adapter, LoraSettings, Matrices
from .initial import initial_pair


def initial_adapters(adapters: Sequence[Adapter], settings: LoraSettings, seed: int) -> dict[str, Matrices]:
    """Return A and B of each projection in float32, in the layout of Adapter.split.

    Returns:
        By module name within the decoder ("layers.0.self_attn.q_proj").
    """
    out: dict[str, Matrices] = {}
    for adapter in adapters:
        out.update(adapter.split(*initial_pair(adapter, settings, seed)))
    return out
