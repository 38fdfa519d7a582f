"""The divergence of a student's next tokens from a teacher's: the loss of the objective distill.

With beta 0 it is the forward KL divergence, of the student from the teacher; with 1 the reverse one. Between
them it is the generalized Jensen-Shannon divergence (Agarwal et al. 2024, eq. 1), as TRL's GKDTrainer
computes it: `beta * KL(teacher, mixture) + (1 - beta) * KL(student, mixture)`, where the mixture has the
share beta of the teacher's probabilities.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from ..model import sharding


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def divergence(student: jax.Array, teacher: jax.Array, beta: float, temperature: float) -> jax.Array:
    """Return float32[B, T], the divergence at each token in nats.

    The gradient by the student's logits is written out, so that it needs only the two arrays of logits. The
    teacher's have no gradient.

    Args:
        student, teacher: logits, float32[B, T, V].
        beta: from 0, the forward KL divergence, to 1, the reverse one.
        temperature: both models' logits are divided by it.
    """
    return _terms(student, teacher, beta, temperature)[0]


def _terms(
    student: jax.Array, teacher: jax.Array, beta: float, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Return the divergence, and its gradient by the student's logits."""
    log_shares, log_others = (
        jax.nn.log_softmax(logits / temperature, axis=-1) for logits in (student, teacher)
    )
    shares, others = jnp.exp(log_shares), jnp.exp(log_others)
    if beta == 0:
        return (others * (log_others - log_shares)).sum(-1), (shares - others) / temperature
    mixture = log_others
    if beta < 1:
        mixture = jnp.logaddexp(log_shares + math.log1p(-beta), log_others + math.log(beta))
    # Of the reverse KL divergence, beta is 1 and the mixture the teacher, whose own term is 0.
    lead = log_shares - mixture
    of_student, share = (shares * lead).sum(-1), 1 - beta if beta < 1 else 1.0
    loss = share * of_student
    if beta < 1:
        loss = loss + beta * (others * (log_others - mixture)).sum(-1)
    return loss, share / temperature * shares * (lead - of_student[..., None])


def _forward(
    student: jax.Array, teacher: jax.Array, beta: float, temperature: float
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _terms(student, teacher, beta, temperature)[0], (student, teacher)


def _backward(
    beta: float, temperature: float, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, None]:
    student, teacher = residuals
    gradient = _terms(student, teacher, beta, temperature)[1]
    return (cotangent[..., None] * gradient).astype(student.dtype), None


divergence.defvjp(_forward, _backward)


def likeliest(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return float32[B, T, K + 1]: the log-probabilities of K different tokens, and of all others together.

    Args:
        logits: float32[B, T, V], with V above K.
        tokens: int32[B, T, K].
    """
    logps = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logps, tokens, axis=-1)
    others = jnp.put_along_axis(logps, tokens, -jnp.inf, axis=-1, inplace=False)
    return jnp.concatenate([chosen, jax.nn.logsumexp(others, axis=-1, keepdims=True)], axis=-1)


def same_vocabulary(student: jax.Array, teacher: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the logits of the rows that both heads have.

    Two models of one tokenizer may have different numbers of rows behind its last token, which are never
    targets. The further rows of the larger head get no probability.
    """
    rows = min(student.shape[-1], teacher.shape[-1])
    if student.shape == teacher.shape:
        return student, teacher
    kept = (sharding.constrain(logits[..., :rows], ("fsdp", None, "tp")) for logits in (student, teacher))
    return next(kept), next(kept)
