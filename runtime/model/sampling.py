"""Choose the next tokens from logits: the likeliest, or drawn with noise that depends only on a row's number.

The noise is a hash of the run's seed, the prompt, the sample and the token's number in the completion. So
neither the division into batches, nor the order of rows, nor the mesh changes what is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .lora import mix, random_bits

GOLDEN, OTHER = 0x9E3779B9, 0x85EBCA6B
"""Added to counters that begin at 0, which `mix` would leave 0."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, in the order and with the meaning of transformers' generate.

    Attributes:
        temperature: logits are divided by it; 0 for the likeliest token, without noise.
        top_k: only the likeliest this many tokens are drawn; 0 for all.
        top_p: only the likeliest tokens whose probabilities reach this sum; 1 for all.
        min_p: only tokens with at least this share of the likeliest one's probability; 0 for all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for values that no distribution has."""
        valid = self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1 and 0 <= self.min_p <= 1
        if not valid:
            raise ValueError(f"no such sampling: {self}")


GREEDY = Sampling(temperature=0.0)


def salts_of(seed: int, prompts: jax.Array, samples: jax.Array) -> jax.Array:
    """Return uint32[B]: the numbers that decide the noise of each row.

    Args:
        seed: of the run.
        prompts: int32[B], the number of each row's prompt in the run.
        samples: int32[B], the number of the completion among those of the prompt.
    """
    base = mix(jnp.uint32(seed & 0xFFFFFFFF) ^ jnp.uint32(GOLDEN))
    salts = mix(base ^ jnp.asarray(prompts).astype(jnp.uint32))
    return mix(salts ^ mix(jnp.asarray(samples).astype(jnp.uint32) + jnp.uint32(OTHER)))


def choose(
    logits: jax.Array, sampling: Sampling, salts: jax.Array, number: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Choose each row's next token.

    Args:
        logits: float32[B, V].
        salts: uint32[B], from `salts_of`.
        number: int32[], of the token in the completion, from 0.

    Returns:
        The tokens, int32[B], and their log-probabilities, float32[B]: of the softmax of the logits divided by
        the temperature (by 1 if it is 0), over the whole vocabulary. What top_k, top_p and min_p leave out
        still counts there, as in the log-probabilities that a training step computes.
    """
    divided = logits / sampling.temperature if sampling.temperature else logits
    ranked = divided
    if sampling.temperature:
        ranked = kept(divided, sampling) + gumbel(salts, number, logits.shape)
    tokens = jnp.argmax(ranked, axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(divided, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(divided, axis=-1)


def kept(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Return float32[B, V] with minus infinity for tokens that are not drawn. Tokens with the logit of the
    last one that is drawn are drawn too."""
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = _at_least(logits, jax.lax.top_k(logits, sampling.top_k)[0][:, -1:])
    if sampling.top_p < 1:
        ordered = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
        shares = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(shares, axis=-1) - shares
        drawn = (before < sampling.top_p).at[:, 0].set(True)
        logits = _at_least(logits, jnp.where(drawn, ordered, jnp.inf).min(-1, keepdims=True))
    if sampling.min_p > 0:
        logits = _at_least(logits, logits.max(-1, keepdims=True) + jnp.log(sampling.min_p))
    return logits


def _at_least(logits: jax.Array, least: jax.Array) -> jax.Array:
    return jnp.where(logits >= least, logits, -jnp.inf)


def gumbel(salts: jax.Array, number: jax.Array | int, shape: tuple[int, ...]) -> jax.Array:
    """Return float32 of `shape`, [B, V]: noise whose sum with logits is largest at a token drawn from their
    softmax."""
    of_token = mix(salts ^ mix(jnp.asarray(number).astype(jnp.uint32) + jnp.uint32(OTHER)))
    # Small values are exact to float32's last bit: they make the largest noise, which decides.
    uniform = (random_bits(of_token, shape).astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)))
