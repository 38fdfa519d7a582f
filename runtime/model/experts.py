"""Mixtures of experts: the block of a layer whose tokens go through a few of many experts.

A router scores the experts, each token goes through those with the highest scores, and their outputs are
summed. Which device computes which token is decided in expert_products.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .expert_load import note
from .expert_products import Activation, run
from .families.description import LATENT, Experts
from .layers import ACTIVATIONS, MLP, STREAM, Block, Config, Einsum, unit
from .lora import AdapterProvider, together
from .sharding import constrain

LIMIT, SLOPE = 7.0, 1.702
"""The limit and the slope of gpt-oss's experts, built into transformers' GptOssExperts."""


class Mixture(Block):
    """The experts of one layer, in place of its feed-forward block or next to it, and their router."""

    has_experts = True

    def __init__(self, config: Config, experts: Experts) -> None:
        d, dtype = config.architecture.hidden_size, config.dtype
        self.config = config
        self.described = experts
        self.router = Einsum("BTI,IO->BTO", (d, experts.count), dtype, "kernel", int(experts.biases))
        if experts.added:
            self.router_scale = nnx.Param(jnp.zeros(d, dtype))
            self.per_expert_scale = nnx.Param(jnp.zeros(experts.count, dtype))
        self.correction = nnx.Param(jnp.zeros(experts.count, jnp.float32)) if experts.correction else None
        self.experts = ExpertWeights(experts, experts.latent or d, config.architecture.gated, dtype)
        for name, sizes in zip(LATENT, ((d, experts.latent), (experts.latent, d)), strict=True):
            if experts.latent:
                setattr(self, name, Einsum("BTI,IO->BTO", sizes, dtype, "kernel"))
        if experts.shared:
            self.shared = MLP(config, experts.shared)
        if experts.shared_gate:
            self.shared_gate = Einsum("BTI,IO->BTO", (d, 1), dtype, "kernel")

    def block(self, x: jax.Array, stream: jax.Array | None = None) -> jax.Array:
        """Return [B, T, D], the weighted sum of each token's experts.

        Args:
            x: [B, T, D], their input.
            stream: [B, T, D], the residual stream, which the router reads if the experts are added.
        """
        e = self.described
        activation = ACTIVATIONS[self.config.architecture.activation]
        scored = x if stream is None else self.normed(stream)
        logits = self.router(scored.astype(jnp.float32) if e.wide else scored)
        correction = None if self.correction is None else self.correction.get_value()
        weights, choices = route(logits, e, correction)
        if e.added:
            weights = weights * self.per_expert_scale.get_value().astype(jnp.float32)[choices]
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

    def normed(self, stream: jax.Array) -> jax.Array:
        """Return what the router reads of the residual stream."""
        a = self.config.architecture
        normed = unit(stream.astype(jnp.float32), (-1,), a.norm.eps).astype(stream.dtype)
        return normed * self.router_scale.get_value() * jnp.asarray(a.hidden_size**-0.5, stream.dtype)


def route(
    logits: jax.Array, experts: Experts, correction: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return each token's experts and their weights. Of experts with equal scores the first is chosen.

    Args:
        logits: [B, T, E], the router's.
        correction: [E], added to the scores only for the choice.

    Returns:
        float32[B, T, K] and int32[B, T, K].
    """
    wide = logits.astype(jnp.float32)
    scores = wide
    if experts.scores == "softmax":
        scores = jax.nn.softmax(wide, axis=-1)
    elif experts.scores == "sigmoid":
        scores = jax.nn.sigmoid(wide)
    # If nothing is added to sigmoids, choose by the logits: the sigmoids of large logits are all 1.
    alone = correction is None and experts.groups == 1
    ranked = wide if experts.scores == "sigmoid" and alone else scores
    if correction is not None:
        ranked = ranked + correction.astype(jnp.float32)
    if experts.groups > 1:
        ranked = _within_groups(ranked, experts)
    choices = jax.lax.top_k(jax.lax.stop_gradient(ranked), experts.per_token)[1]
    weights = jnp.take_along_axis(scores, choices, axis=-1)
    if experts.scores == "chosen":
        weights = jax.nn.softmax(weights, axis=-1)
    if experts.normalized:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + experts.eps)
    return weights * experts.scale, choices


def _within_groups(ranked: jax.Array, experts: Experts) -> jax.Array:
    """Return the scores, with minus infinity outside the groups that experts are chosen from."""
    grouped = ranked.reshape(*ranked.shape[:-1], experts.groups, -1)
    best = jax.lax.top_k(grouped, min(experts.summed, grouped.shape[-1]))[0].sum(-1)
    chosen = jax.lax.top_k(best, experts.chosen_groups)[1]
    kept = jax.nn.one_hot(chosen, experts.groups, dtype=bool).any(-2)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(ranked.shape)


def clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Apply gpt-oss's activation."""
    gate = jnp.minimum(gate, LIMIT)
    return (jnp.clip(up, -LIMIT, LIMIT) + 1) * gate * jax.nn.sigmoid(gate * SLOPE)


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
        """Return the experts' input, and their arrays in the form that expert_products.run takes;
        quantized arrays are passed as stored."""
        names = ("gate_up", "down", "gate_up_bias", "down_bias")
        weights = {name: getattr(self, name).get_raw_value() for name in names if hasattr(self, name)}
        x, adapters = adapters_of(self, x)
        return x, weights | adapters


def adapters_of(module: Any, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return what `run` takes for the adapters of a module that holds experts; {} without adapters.

    B is multiplied by its scale. The adapters' gradients are split over the mesh at once, before the gradient
    of x is computed. Otherwise whole gradients of all layers would wait in memory for the optimizer.

    Args:
        x: the experts' input.

    Returns:
        x, to be used in place of the argument, and the arrays, [E, *in, R] and [E, R, *out].
    """
    provider: AdapterProvider | None = getattr(module, "adapters", None)
    if provider is None:
        return x, {}
    adapters = provider.experts.get(tuple(map(str, module.qwix_path)), ())
    provider.used |= {adapter.target.weight for adapter in adapters}
    weights = [adapter.target.weight.rpartition(".")[2] for adapter in adapters]
    pairs = (getattr(module, f"{weight}_lora_{matrix}").value for weight in weights for matrix in "ab")
    x, *arrays = together(x, *pairs)
    out: dict[str, jax.Array] = {}
    for name, adapter, a, b in zip(weights, adapters, arrays[::2], arrays[1::2], strict=True):
        a, b = constrain(a, adapter.a_spec), constrain(b, adapter.b_spec)
        out |= {f"{name}_lora_a": a, f"{name}_lora_b": b * jnp.asarray(adapter.scale, b.dtype)}
    return x, out
