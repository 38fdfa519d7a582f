"""Rotary position embeddings at the frequencies that a checkpoint was trained with.

All kinds of transformers' modeling_rope_utils for text. Frequencies are
rounded where transformers rounds them: at position 131,071, a frequency's last bit is 0.008 radians.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax
    import numpy as np

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@dataclass(frozen=True)
class Rope:
    """The `rope_parameters` of a config.json.

    Attributes:
        theta: base frequency.
        kind: one of KINDS. "linear" divides all frequencies by `factor`. "llama3" and "yarn" divide the
            frequencies that turned too seldom in training. "longrope" divides each by its own number.
            "dynamic" raises the base for a batch that is longer than the model was trained for.
            "proportional" turns only the share of pairs with the highest frequencies, paired over the whole
            head, and divides their frequencies by `factor`.
        factor: by how much the context was extended; 1.0 for "default" and "longrope".
        low, high: for "llama3" and "yarn": a frequency that turns less than `low` times within `original`
            tokens is divided by `factor`; one that turns more than `high` times stays; those between are
            interpolated. For "llama3" the two may be equal. Their names in transformers are
            low_freq_factor and high_freq_factor, or beta_slow and beta_fast.
        original: the context length, in tokens, before it was extended; for all kinds but "default" and
            "linear".
        attention: factor of sines and cosines; for "yarn" and "longrope".
        truncate: for "yarn": whether the interpolated range begins and ends at whole features.
        short, long: for "longrope": the divisor of each frequency in a batch of at most `original`
            tokens, and in a longer one.
        share: the share of a head's features that turns: its first ones, or for "proportional" the first
            ones of each half; the rest pass unchanged.
        interleaved: whether a pair is two neighboring features, rather than one from each half.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 1.0
    original: float = 1.0
    attention: float = 1.0
    truncate: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    share: float = 1.0
    interleaved: bool = False

    def turned(self, head_dim: int) -> int:
        """Return the number of a head's features that turn, for "proportional" with those that turn by 0."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.share)

    def exponents(self, head_dim: int) -> np.ndarray:
        """Return float32[turned / 2] from 0 to almost 1: the default frequencies are theta to minus these."""
        import numpy as np

        turned = self.turned(head_dim)
        return np.arange(0, turned, 2, dtype=np.float32) / np.float32(turned)

    def frequencies(self, head_dim: int, long: bool = False) -> np.ndarray:
        """Return the radians a token of each pair of features: float32[turned / 2].

        Args:
            long: for "longrope": the frequencies of a batch longer than `original`. For "dynamic", `sin_cos`
                derives its frequencies from these.
        """
        import numpy as np

        factor = np.float32(self.factor)
        powers = (self.theta ** self.exponents(head_dim).astype(np.float64)).astype(np.float32)
        plain = 1 / powers
        if self.kind == "linear":
            return plain / factor
        if self.kind == "proportional":
            still = np.arange(len(plain)) >= int(self.share * head_dim // 2)
            return np.where(still, np.float32(0), plain / factor)
        if self.kind == "longrope":
            return 1 / (np.array(self.long if long else self.short, np.float32) * powers)
        if self.kind == "llama3":
            # How many wavelengths fit into the original context decides how much of a frequency is kept.
            turns = np.float32(self.original) / (np.float32(2 * math.pi) / plain)
            low, width = np.float32(self.low), np.float32(self.high - self.low)
            kept = np.clip((turns - low) / width, 0, 1) if width else (turns >= low).astype(np.float32)
            return (1 - kept) * plain / factor + kept * plain
        if self.kind == "yarn":
            kept = self._kept_by_yarn(head_dim)
            return 1 / (factor * powers) * (1 - kept) + plain * kept
        return plain

    def _kept_by_yarn(self, head_dim: int) -> np.ndarray:
        """Return how much of each frequency is kept: it falls linearly from 1 to 0 over the features between
        `high` and `low` turns (https://arxiv.org/abs/2309.00071, section 3.2)."""
        import numpy as np

        turned = self.turned(head_dim)

        def feature(turns: float) -> float:
            """Return which pair of features turns this often within the original context."""
            return turned * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        first, last = feature(self.high), feature(self.low)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # The last pair is turned / 2 - 1, but transformers and the paper's authors bound the range by this.
        first, last = max(first, 0), min(last, turned - 1)
        width = last - first or 0.001
        pairs = np.arange(turned // 2, dtype=np.float32)
        return np.float32(1) - np.clip((pairs - np.float32(first)) / np.float32(width), 0, 1)


def sin_cos(
    rope: Rope,
    positions: jax.Array,
    head_dim: int,
    tokens: int | None = None,
    axes: Sequence[int] = (),
) -> tuple[jax.Array, jax.Array]:
    """Return sines and cosines of angles, times the attention factor: two of float32[B, T, turned / 2].

    "dynamic" and "longrope" depend on the longest position of the whole batch, as in transformers; in packed
    rows the longest segment counts. Call this where all of the batch's positions are available: within
    `shard_map` each shard would have its own frequencies. No state is kept from batch to batch. In
    transformers, the frequencies of "dynamic" stay at those of the longest batch that a process has seen,
    until a batch fits the original context.

    Args:
        positions: int32[B, T], or with axes int32[B, T, A]. Angles are computed in float32: bfloat16 cannot
            tell 257 from 256.
        tokens: how many tokens the longest sequence has; None to count those of the batch.
        axes: for each pair of features, by which of A positions it turns; () for one position of a token.
    """
    import jax.numpy as jnp
    import numpy as np

    frequencies = rope.frequencies(head_dim)
    if rope.kind in ("dynamic", "longrope"):
        longest = jnp.float32(tokens) if tokens else jnp.max(positions).astype(jnp.float32) + 1
    if rope.kind == "longrope":
        frequencies = jnp.where(longest > rope.original, rope.frequencies(head_dim, long=True), frequencies)
    if rope.kind == "dynamic":
        # The new base is theta * growth ** (turned / (turned - 2)): the lowest frequency falls by growth.
        growth = 1 + rope.factor * jnp.maximum(longest - rope.original, 0) / rope.original
        turned = rope.turned(head_dim)
        frequencies = frequencies / growth ** (rope.exponents(head_dim) * (turned / (turned - 2)))
    places = positions.astype(jnp.float32)
    if axes:  # chosen by a mask: libtpu generates code for a gather from the last axis for many minutes
        chosen = np.array(axes) == np.arange(places.shape[-1])[:, None]
        place = sum(jnp.where(mask, places[..., i, None], 0) for i, mask in enumerate(chosen))
    else:
        place = places[..., None]
    angles = place * frequencies
    return jnp.sin(angles) * rope.attention, jnp.cos(angles) * rope.attention


def rotate(x: jax.Array, sin: jax.Array, cos: jax.Array, interleaved: bool = False) -> jax.Array:
    """Rotate the first features of each head in float32; the rest pass unchanged.

    Args:
        x: [B, T, N, H].
        sin, cos: float32[B, T, turned / 2], as from `sin_cos`.
        interleaved: whether a pair is two neighboring features, rather than one from each half.

    Returns:
        [B, T, N, H], in the dtype of x.
    """
    import jax.numpy as jnp

    turned = 2 * sin.shape[-1]
    sin, cos = sin[:, :, None], cos[:, :, None]
    part = x[..., :turned].astype(jnp.float32)
    if interleaved:
        first, second = part[..., 0::2], part[..., 1::2]
    else:
        first, second = jnp.split(part, 2, axis=-1)
    pair = [first * cos - second * sin, second * cos + first * sin]
    part = jnp.stack(pair, axis=-1).reshape(part.shape) if interleaved else jnp.concatenate(pair, axis=-1)
    part = part.astype(x.dtype)
    return part if turned == x.shape[-1] else jnp.concatenate([part, x[..., turned:]], axis=-1)
