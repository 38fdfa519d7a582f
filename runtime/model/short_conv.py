"""LFM2's gated short convolution: a convolution over a token and a few earlier ones, between two gates.

Of a token's three projections b, c and x (https://arxiv.org/abs/2511.23404), the output is that of a last
projection of c * conv(b * x). A segment starts with zeros, wherever it begins in a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from . import layers
from .layers import STREAM, Block, Config, Einsum
from .sharding import constrain
from .states import causal_conv


class ShortConv(Block):
    """The convolution of one layer."""

    def __init__(self, config: Config) -> None:
        a, dtype = config.architecture, config.dtype
        assert a.conv is not None
        self.config = config
        d, bias = a.hidden_size, a.conv.bias
        self.in_proj = Einsum("BTD,DCF->BTCF", (d, 3, d), dtype, "kernel", 2 * bias)
        self.conv1d = nnx.Param(jnp.zeros((d, a.conv.taps), dtype))
        self.conv1d_bias = nnx.Param(jnp.zeros(d, dtype)) if bias else None
        self.out_proj = Einsum("BTI,IO->BTO", (d, d), dtype, "kernel", int(bias))

    def block(self, x: jax.Array) -> jax.Array:
        b, c, x = jnp.moveaxis(self.in_proj(x), 2, 0)
        bias = None if self.conv1d_bias is None else self.conv1d_bias.get_value()
        convolved = causal_conv(b * x, self.conv1d.get_value(), layers.segments(), bias)
        return constrain(self.out_proj(constrain(c * convolved, STREAM)), STREAM)
