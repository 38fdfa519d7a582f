"""The experts of a layer of the decoder (decoder.py), which replace its feed-forward block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .balance import note
from .experts import Activation, adapters_of, clamped, route, run
from .families.description import LATENT, Experts
from .layers import ACTIVATIONS, MLP, STREAM, Block, Config, Einsum
from .sharding import constrain


class ExpertWeights(nnx.Module):
    """The weights of a layer's experts."""

    def __init__(self, experts: Experts, hidden: int, gated: bool, dtype: Any) -> None:
        e, f = experts.count, experts.size
        self.gate_up = nnx.Param(jnp.zeros((e, hidden, 2 if gated else 1, f), dtype))
        self.down = nnx.Param(jnp.zeros((e, f, hidden), dtype))
        if experts.biases:
            self.gate_up_bias = nnx.Param(jnp.zeros((e, 2, f), dtype))
            self.down_bias = nnx.Param(jnp.zeros((e, hidden), dtype))

    def arrays(self, x: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        """Return the experts' input, and their arrays in the form that runtime.model.experts.run takes;
        quantized arrays are passed as stored."""
        names = ("gate_up", "down", "gate_up_bias", "down_bias")
        own = {name: getattr(self, name).get_raw_value() for name in names if hasattr(self, name)}
        x, adapters = adapters_of(self, x)
        return x, own | adapters


class Mixture(Block):
    """The experts of one layer, which replace its feed-forward block."""

    has_experts = True

    def __init__(self, config: Config, experts: Experts) -> None:
        d, dtype = config.architecture.hidden_size, config.dtype
        self.config = config
        self.described = experts
        self.router = Einsum("BTI,IO->BTO", (d, experts.count), dtype, "kernel", int(experts.biases))
        self.correction = nnx.Param(jnp.zeros(experts.count, jnp.float32)) if experts.correction else None
        self.experts = ExpertWeights(experts, experts.latent or d, config.architecture.gated, dtype)
        for name, sizes in zip(LATENT, ((d, experts.latent), (experts.latent, d)), strict=True):
            if experts.latent:
                setattr(self, name, Einsum("BTI,IO->BTO", sizes, dtype, "kernel"))
        if experts.shared:
            self.shared = MLP(config, experts.shared)
        if experts.shared_gate:
            self.shared_gate = Einsum("BTI,IO->BTO", (d, 1), dtype, "kernel")

    def block(self, x: jax.Array) -> jax.Array:
        e = self.described
        activation = ACTIVATIONS[self.config.architecture.activation]
        logits = self.router(x.astype(jnp.float32) if e.wide else x)
        correction = None if self.correction is None else self.correction.get_value()
        weights, choices = route(logits, e, correction)
        note(logits, choices)
        features: Activation = clamped
        if not e.clamped:
            features = (
                (lambda gate, up: activation(gate) * up) if self.config.architecture.gated else activation
            )
        into, out_of = (getattr(self, name, None) for name in LATENT)
        read, arrays = self.experts.arrays(x if into is None else into(x))
        out = run(read, weights, choices, arrays, features, e.on_inputs)
        if out_of is not None:
            out = out_of(out)
        if e.shared:
            shared = self.shared(x)
            out = out + (jax.nn.sigmoid(self.shared_gate(x)) * shared if e.shared_gate else shared)
        return constrain(out, STREAM)
