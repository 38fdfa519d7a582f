"""Dropout in PEFT's layers that drops what train.py's adapters do (runtime.lora)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import torch
import torchax

from runtime.lora import dropped


class RowDropout(torch.nn.Module):
    """In place of torch's dropout before a projection's A.

    Args:
        projection: "layers.0.self_attn.q_proj".
        rate: probability that an element is dropped.

    Attributes:
        salts: uint32[B] of the rows that are traced, None for no dropout.
    """

    def __init__(self, projection: str, rate: float) -> None:
        super().__init__()
        self.salts: jax.Array | None = None
        self._projection, self._rate = projection, rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, T, D] with elements dropped."""
        if self.salts is None:
            return x
        env = torchax.default_env()
        out = dropped(env.t2j_iso(env.v2t_iso(x)), self.salts, self._projection, self._rate)
        return env.j2t_iso(out)


def replace_dropout(module: torch.nn.Module, prefix: str) -> None:
    """Gives every adapted projection its own dropout.

    Args:
        module: with PEFT's layers.
        prefix: of the projections' names in it.
    """
    from peft.tuners.lora import LoraLayer

    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer):
            for adapter, dropout in layer.lora_dropout.items():
                if isinstance(dropout, torch.nn.Dropout):
                    layer.lora_dropout[adapter] = RowDropout(name.removeprefix(prefix), dropout.p)


@contextmanager
def drawing(module: torch.nn.Module, salts: jax.Array | None) -> Iterator[None]:
    """Dropout by the rows' salts while a module is traced."""
    places = [part for part in module.modules() if isinstance(part, RowDropout)]
    for place in places:
        place.salts = salts
    try:
        yield
    finally:
        for place in places:
            place.salts = None
