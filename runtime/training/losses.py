"""The losses of tokens: next-token cross-entropy over the tokens that the loss mask selects, and other losses
that train.loss_type names.

The logits of a whole batch are the largest array of a training step: [B, T, V] in float32, and several times
as much with the arrays of their gradient. This module computes them for one chunk of T at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..model import sharding
from ..model.attention import collect, deal
from ..model.forward import Head
from ..model.partition_rules import TOKENS
from ..settings import TrainSettings
from .divergence import divergence, likeliest, same_vocabulary

Batch = dict[str, Any]
"""tokens, positions and segment_ids int32[B, T], loss_mask bool[B, T], norm float32[], index int32[]."""

LOGITS_BYTES = 256 * 2**20
"""The most bytes that a chunk's float32 logits take on one device. With Gemma's 262,144 tokens these are 256
positions (times tp): about as many as a product with the head's weight needs to be bound by arithmetic
instead of by reading that weight (a v5p does 166 bfloat16 operations for each byte it reads). More positions
would not be faster, and two to three arrays of this size are alive at once."""
LEAST_CHUNKS = 8
"""The least number of chunks where logits are split: it saves memory in a small batch too."""
SMALL_BYTES = 32 * 2**20
"""Logits that take no more than this are computed at once."""


Arrays = tuple[jax.Array, ...]
"""The arrays of a head: its weight, and its bias if it has one."""
Ask = Callable[["Computed", Any], Any]
"""(how some model is computed, the model) -> anything."""
Asked = Callable[[Ask], Any]
"""A model that answers an `Ask`."""
TokenLoss = Callable[..., jax.Array]
"""(logits float32[B, T, V], targets int32[B, T]) -> float32[B, T], the loss of each target. With a reference,
its logits are the third argument."""


class Computed(Protocol):
    """How a model is computed: runtime.model.forward's class in train.py, or another backend's class."""

    @property
    def dealt(self) -> bool:
        """Whether the model takes and returns tokens in the order of `attention.deal`."""

    def hidden(
        self, model: Any, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array, /
    ) -> jax.Array:
        """Return [B, T, D], the hidden states after the final norm."""

    def head(self, model: Any, /) -> Head:
        """Return the head that turns hidden states into logits."""


@dataclass(frozen=True)
class Penalties:
    """Terms that are added to a target's negative log-likelihood, as `train` of a recipe sets them.

    Attributes:
        label_smoothing: share of a target that is spread evenly over the vocabulary (Szegedy et al. 2016).
        z_loss: weight of the squared logsumexp of the logits (Chowdhery et al. 2022, section 5).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0


PLAIN = Penalties()


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def token_nll(logits: jax.Array, targets: jax.Array, penalties: Penalties = PLAIN) -> jax.Array:
    """Return the negative log-likelihood of each target in float32: logsumexp minus the target's logit. With
    penalties, (1 - label_smoothing) of that logit, label_smoothing of the mean one, and z_loss * logsumexp^2.

    The logit is picked by a comparison with an iota, which needs neither a one-hot array nor a gather over a
    vocabulary that is split over devices. The gradient, softmax - one-hot, is written out, so that it needs
    only the logits: jax would keep their exponentials as well.

    Args:
        logits: [B, T, V].
        targets: int32[B, T].
    """
    return _token_nll(logits, targets, penalties)[0]


def _token_nll(
    logits: jax.Array, targets: jax.Array, penalties: Penalties
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    wide = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(wide, axis=-1)
    loss = total - jnp.where(_is_target(logits, targets), wide, 0.0).sum(-1)
    if smoothing := penalties.label_smoothing:
        loss = (1 - smoothing) * loss + smoothing * (total - wide.mean(-1))
    if penalties.z_loss:
        loss = loss + penalties.z_loss * total**2
    return loss, (logits, targets, total)


def _token_nll_gradient(
    penalties: Penalties, residuals: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, None]:
    logits, targets, total = residuals
    softmax = jnp.exp(logits.astype(jnp.float32) - total[..., None])
    wanted = _is_target(logits, targets)
    if smoothing := penalties.label_smoothing:
        wanted = (1 - smoothing) * wanted + smoothing / logits.shape[-1]
    if penalties.z_loss:
        softmax = softmax * (1 + 2 * penalties.z_loss * total[..., None])
    return (cotangent[..., None] * (softmax - wanted)).astype(logits.dtype), None


token_nll.defvjp(_token_nll, _token_nll_gradient)


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == targets[..., None]


def likelihood(settings: TrainSettings) -> TokenLoss:
    """Return the negative log-likelihood of each target, with the penalties that the recipe sets."""
    penalties = Penalties(settings.label_smoothing, settings.z_loss)
    return lambda logits, targets: token_nll(logits, targets, penalties)


def batch_loss(
    forward: Computed,
    model: Any,
    batch: Batch,
    token_loss: TokenLoss = token_nll,
    reference: Asked | None = None,
    known: Sequence[jax.Array] = (),
) -> jax.Array:
    """Return the summed loss of a micro-batch's targets over its `norm`.

    Token t is predicted at t - 1, and only from within its own segment. A micro-batch without targets
    has loss 0.

    Args:
        token_loss: of each target; their negative log-likelihood by default.
        reference: a model whose logits the loss needs too, without a gradient.
        known: further arguments of the loss, [B, T, ...], instead of a reference.
    """
    tokens, segment_ids = batch["tokens"], batch["segment_ids"]
    counted = predicted(batch["loss_mask"], segment_ids)
    rows = (tokens, batch["positions"], segment_ids)
    hidden = _states(forward, model, rows, forward.dealt)
    labels = (jnp.roll(tokens, -1, axis=1), counted)
    targets, counted = dealt(labels) if forward.dealt else labels
    head = forward.head(model)
    scanned: tuple[jax.Array, ...] = (targets, counted, *(dealt(known) if forward.dealt else known))
    fixed: Arrays = ()
    other = head
    if reference is not None:
        states, other = reference(
            lambda other, model: (_states(other, model, rows, forward.dealt), other.head(model))
        )
        scanned, fixed = (*scanned, jax.lax.stop_gradient(states)), other.arrays

    def loss_of(
        arrays: Arrays, fixed: Arrays, x: jax.Array, targets: jax.Array, *rest: jax.Array
    ) -> jax.Array:
        counted, *before = rest
        if reference is not None:
            before = [chunk_logits(other, other.placed(fixed), state) for state in before]
        return jnp.where(counted, token_loss(chunk_logits(head, arrays, x), targets, *before), 0.0)

    return _summed(loss_of, head, hidden, scanned, fixed, batch["norm"])


def _states(forward: Computed, model: Any, rows: Sequence[jax.Array], as_dealt: bool) -> jax.Array:
    """Return a model's final hidden states [B, T, D].

    Args:
        rows: tokens, positions and segment_ids in the rows' own order.
        as_dealt: whether the states are returned in the order of `attention.deal`.
    """
    states = forward.hidden(model, *(dealt(rows) if forward.dealt else rows))
    if forward.dealt == as_dealt:
        return states
    return deal(states) if as_dealt else collect(states, rows[0].shape[1])


@dataclass(frozen=True)
class Chunks:
    """A row in `count` chunks. The row's tokens are split over `parts` devices. Each device puts `size` of
    its `length` tokens into each chunk; padding fills up the last chunk."""

    length: int
    count: int
    size: int
    parts: int

    @classmethod
    def of(cls, shape: Sequence[int], vocabulary: int) -> Chunks:
        """Choose chunks whose logits fit LOGITS_BYTES on each device of the mesh in scope.

        Args:
            shape: of the hidden states, [B, T, D].
        """
        parts = sharding.parts(shape[1], TOKENS)
        rows, length = shape[0] // sharding.row_parts(shape[0]), shape[1] // parts
        position = 4 * rows * vocabulary // sharding.parts(vocabulary, "tp")
        limit = min(LOGITS_BYTES, max(SMALL_BYTES, position * length // LEAST_CHUNKS))
        count = -(-length // max(1, limit // position))
        # Chunks as even as possible: padding costs as much as real positions.
        return cls(length, count, -(-length // count), parts)

    def split(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Split [B, T, ...] into [count, B, parts * size, ...], with zeros at the end."""

        def one(x: jax.Array) -> jax.Array:
            rows, _, *rest = x.shape
            padding = self.count * self.size - self.length
            x = x.reshape(rows, self.parts, self.length, *rest)
            x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), *((0, 0) for _ in rest)))
            x = jnp.moveaxis(x.reshape(rows, self.parts, self.count, self.size, *rest), 2, 0)
            return x.reshape(self.count, rows, self.parts * self.size, *rest)

        return tuple(map(one, arrays))

    def join(self, x: jax.Array) -> jax.Array:
        """Join [count, B, parts * size, ...] to [B, T, ...]."""
        _, rows, _, *rest = x.shape
        x = jnp.moveaxis(x.reshape(self.count, rows, self.parts, self.size, *rest), 0, 2)
        x = x.reshape(rows, self.parts, self.count * self.size, *rest)[:, :, : self.length]
        return x.reshape(rows, self.parts * self.length, *rest)


def dealt(rows: Sequence[jax.Array]) -> Iterator[jax.Array]:
    """Return arrays of rows in the order of `attention.deal`."""
    return map(deal, rows)


def predicted(mask: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Return bool[B, T]: whether the token after each one is masked and belongs to the same segment."""
    within = segment_ids[:, 1:] == segment_ids[:, :-1]
    return jnp.pad(mask[:, 1:] & within, ((0, 0), (0, 1)))


def chunk_logits(head: Head, arrays: Arrays, x: jax.Array) -> jax.Array:
    """Return float32[B, size, V] of a chunk: x [B, size, D]; `arrays` as `head.placed`."""
    x = sharding.constrain(x, ("fsdp", None, None))
    return sharding.constrain(head.logits(x, *arrays), ("fsdp", None, "tp"))


def _summed(
    loss_of: Callable[..., jax.Array],
    head: Head,
    hidden: jax.Array,
    scanned: tuple[jax.Array, ...],
    fixed: Arrays,
    norm: jax.Array,
) -> jax.Array:
    """Return float32[], the losses of the counted targets, summed and divided by `norm`; 0 for norm 0.

    If a gradient is needed, each chunk's gradient is computed together with its loss, while its logits exist.
    Otherwise the logits would have to be computed again.

    Args:
        loss_of: (the head's arrays, `fixed`, hidden states, *scanned) of a chunk -> float32[B, size].
        hidden: [B, T, D], the final hidden states.
        scanned: [B, T, ...], what else is split into chunks, without a gradient.
        fixed: what each chunk needs whole, without a gradient.
        norm: float32[].
    """
    chunks = Chunks.of(hidden.shape, head.vocab_size)

    @jax.custom_vjp
    def total(
        hidden: jax.Array, weights: Arrays, scanned: tuple[jax.Array, ...], fixed: Arrays, norm: jax.Array
    ) -> jax.Array:
        placed = head.placed(weights)

        def body(_: None, xs: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
            return None, loss_of(placed, fixed, *xs)

        _, losses = jax.lax.scan(body, None, chunks.split(hidden, *scanned))
        return _divided(chunks.join(losses).sum(), norm)

    def run(hidden: Any, weights: Any, *rest: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        placed = head.placed([leaf.value for leaf in weights])
        scanned, fixed, norm = jax.tree.map(lambda leaf: leaf.value, rest)
        seed = _divided(jnp.float32(1.0), norm)

        def body(dw: Any, xs: tuple[jax.Array, ...]) -> tuple[Any, tuple[jax.Array, jax.Array]]:
            x, *rest = xs
            losses, pull = jax.vjp(lambda x, weights: loss_of(weights, fixed, x, *rest), x, placed)
            dx, chunk_dw = pull(jnp.full_like(losses, seed))
            # Dropped, and not computed, when the head is frozen.
            summed = [
                d if d is None else d + c.astype(jnp.float32) for d, c in zip(dw, chunk_dw, strict=True)
            ]
            return summed, (losses, dx)

        start = [jnp.zeros(leaf.value.shape, jnp.float32) if leaf.perturbed else None for leaf in weights]
        dw, (losses, dx) = jax.lax.scan(body, start, chunks.split(hidden.value, *scanned))
        of_own = tuple(d if d is None else d.astype(p.dtype) for d, p in zip(dw, placed, strict=True))
        return _divided(chunks.join(losses).sum(), norm), (chunks.join(dx), of_own)

    def pull(gradients: tuple[Any, Any], cotangent: jax.Array) -> tuple[Any, ...]:
        def scaled(g: Any) -> Any:
            return None if g is None else (cotangent * g.astype(jnp.float32)).astype(g.dtype)

        of_hidden, of_own = gradients
        return scaled(of_hidden), tuple(map(scaled, of_own)), None, None, None

    total.defvjp(run, pull, symbolic_zeros=True)
    return total(hidden, head.arrays, scanned, fixed, norm)


def _divided(total: jax.Array, norm: jax.Array) -> jax.Array:
    return jnp.where(norm > 0, total / jnp.where(norm > 0, norm, 1.0), 0.0)


Logps = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(tokens, positions, segment_ids) -> the log-probability of each next token: `token_logps` of some model."""


def logps_of(asked: Asked) -> Logps:
    """Return the log-probabilities of a model that answers."""
    return lambda *rows: asked(lambda forward, model: token_logps(forward, model, *rows))


def token_logps(
    forward: Computed, model: Any, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    """Compute the log-probability of each next token.

    Returns:
        float32[B, T]: at t the log-probability of tokens[:, t + 1] given the earlier tokens of its
            segment; 0 at the last position and where a segment or the row's tokens end.
    """
    (nll,) = _of_tokens(forward, model, (tokens, positions, segment_ids), lambda *chunk: (token_nll(*chunk),))
    return jnp.where(predicted(segment_ids > 0, segment_ids), -nll, 0.0)


def tempered_logps(
    forward: Computed, model: Any, rows: Sequence[jax.Array], temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Compute the log-probability of each next token in the distribution at a temperature, and the entropy of
    that distribution, which has no gradient.

    Args:
        rows: tokens, positions and segment_ids, int32[B, T].
        temperature: above 0.

    Returns:
        float32[B, T] each, at the places of `token_logps`; the entropies in nats.
    """

    def of_chunk(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        divided = logits / temperature
        logs = jax.nn.log_softmax(jax.lax.stop_gradient(divided), axis=-1)
        return token_nll(divided, targets), -(jnp.exp(logs) * logs).sum(-1)

    nll, entropy = _of_tokens(forward, model, rows, of_chunk)
    there = predicted(rows[2] > 0, rows[2])
    return jnp.where(there, -nll, 0.0), jnp.where(there, jax.lax.stop_gradient(entropy), 0.0)


def top_logps(
    forward: Computed, model: Any, rows: Sequence[jax.Array], count: int, about: tuple[float, int]
) -> tuple[jax.Array, jax.Array]:
    """Compute the likeliest next tokens, and their log-probabilities with that of all others together.

    Args:
        rows: tokens, positions and segment_ids, int32[B, T].
        count: of the likeliest tokens, K.
        about: the temperature, and the number of tokens that have a probability.

    Returns:
        int32[B, T, K] and float32[B, T, K + 1], at the places of `token_logps`; arbitrary where those are 0.
    """
    temperature, vocabulary = about

    def of_chunk(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        divided = logits[..., :vocabulary] / temperature
        tokens = jax.lax.top_k(divided, count)[1].astype(jnp.int32)
        return tokens, likeliest(divided, tokens)

    tokens, logps = _of_tokens(forward, model, rows, of_chunk)
    return tokens, logps


def _of_tokens(
    forward: Computed,
    model: Any,
    rows: Sequence[jax.Array],
    of_chunk: Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]],
) -> tuple[jax.Array, ...]:
    """Compute values of each position from its logits, a chunk at a time.

    Args:
        rows: tokens, positions and segment_ids, int32[B, T].
        of_chunk: (logits float32[B, size, V], next tokens int32[B, size]) -> values float32[B, size].

    Returns:
        float32[B, T] each; arbitrary where a segment or the row's tokens end.
    """
    tokens = rows[0]
    rows = (*rows, jnp.roll(tokens, -1, axis=1))
    *inputs, targets = dealt(rows) if forward.dealt else rows
    hidden = forward.hidden(model, *inputs)
    head = forward.head(model)
    chunks = Chunks.of(hidden.shape, head.vocab_size)
    dtype = head.weight.dtype
    # In float32, so that the gradients of a trained head are summed over chunks in float32.
    arrays = tuple(array.astype(jnp.float32) for array in head.placed(head.arrays))

    # prevent_cse is off: a scan's iterations share nothing that recomputing could be merged with.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def values_of(weights: Arrays, x: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
        return of_chunk(chunk_logits(head, tuple(array.astype(dtype) for array in weights), x), targets)

    def body(_: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, ...]]:
        return None, values_of(arrays, *xs)

    _, values = jax.lax.scan(body, None, chunks.split(hidden, targets))
    joined = map(chunks.join, values)
    return tuple(collect(value, tokens.shape[1]) if forward.dealt else value for value in joined)


def _dft(_: TrainSettings, logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Weight a target by its own probability, which has no gradient (Wu et al. 2025, eq. 9)."""
    nll = token_nll(logits, targets)
    return nll * jax.lax.stop_gradient(jnp.exp(-nll))


def _eaft(train: TrainSettings, logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Weight a target by the entropy of the likeliest tokens, which has no gradient, as LLaMA-Factory does.
    eaft_entropy is the 3 by which it divides the entropy of 20 tokens."""
    entropy = top_entropy(jax.lax.stop_gradient(logits), train.eaft_top_k)
    return token_nll(logits, targets) * (entropy / train.eaft_entropy) ** train.eaft_alpha


def _asft(train: TrainSettings, logits: jax.Array, targets: jax.Array, before: jax.Array) -> jax.Array:
    """Add the KL divergence of the model before training to `_dft`, as LLaMA-Factory does.

    Args:
        before: logits of the model that training starts from.
    """
    reference, model = jax.nn.log_softmax(before, axis=-1), jax.nn.log_softmax(logits, axis=-1)
    divergence = (jnp.exp(reference) * (reference - model)).sum(-1)
    return _dft(train, logits, targets) + train.asft_alpha * divergence


def _distill(train: TrainSettings, logits: jax.Array, targets: jax.Array, *teacher: jax.Array) -> jax.Array:
    """Return the divergence from the teacher's next tokens, whatever the target.

    Args:
        teacher: its logits, or the arrays of `objectives.LIKELIEST`: the divergence is then between the
            probabilities of these tokens, and of all others together. It is never above that of all tokens.
    """
    assert train.distill is not None
    beta, temperature = train.distill.beta, train.distill.temperature
    if train.distill.stored is None:
        return divergence(*same_vocabulary(logits, *teacher), beta, temperature)
    tokens, logps = teacher
    return divergence(likeliest(logits / temperature, tokens), logps, beta, 1.0)


TOKEN_LOSSES: dict[str, Callable[..., jax.Array]] = {
    **{"dft": _dft, "eaft": _eaft, "asft": _asft},
    "divergence": _distill,
}
"""Losses by train.loss_type, or an objective's only one: (settings, logits float32[B, T, V], targets
int32[B, T]) -> float32[B, T]. Those with a reference (`Objective.reference`) or a teacher also get its
logits."""


def top_entropy(logits: jax.Array, count: int) -> jax.Array:
    """Return float32[B, T], the entropy of the `count` largest logits' softmax, or of all if there are fewer.

    Each device first finds the largest of its own part of the vocabulary, so that logits that tp splits stay
    where they are. XLA would gather them for a top_k of the whole.
    """
    mesh = sharding.mesh_in_scope()
    axes = (None,) * 3 if mesh is None else sharding.activation_axes(logits, ("fsdp", None, "tp"), mesh)
    rows, tokens, split = axes

    def entropy(part: jax.Array) -> jax.Array:
        largest = _largest(part.astype(jnp.float32), count)
        if split is not None:
            largest = _largest(jax.lax.all_gather(largest, split, axis=2, tiled=True), count)
        logps = jax.nn.log_softmax(largest, axis=-1)
        return -(jnp.exp(logps) * logps).sum(-1)

    if mesh is not None:
        places = {"in_specs": PartitionSpec(*axes), "out_specs": PartitionSpec(rows, tokens)}
        entropy = jax.shard_map(entropy, mesh=mesh, check_vma=False, **places)
    return entropy(logits)


def _largest(logits: jax.Array, count: int) -> jax.Array:
    return jax.lax.top_k(logits, min(count, logits.shape[-1]))[0]
