"""The loss of a micro-batch by the recipe's objective, and the metrics that are logged with it.

Texts to write have the losses of losses.py. Preferences have those of preference_losses.py: pairs of answers,
or single answers that are each desirable or not, as TRL's KTOTrainer computes them. Experts add a load-
balancing loss.

Row 2i of a micro-batch of pairs holds a prompt with the chosen answer, row 2i + 1 the same prompt with the
rejected one. A row of single answers holds a prompt with an answer. The loss mask covers the answers. The
reference model is the model that training starts from: the base without adapters if they are fresh, else a
copy of the adapters of lora.start_from, as in TRL with PEFT.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..metrics.run_report import EXPERT_TOKENS, Named
from ..model.expert_load import Collected, uncollected
from ..model.loading import Built
from ..model.lora import AdapterProvider
from ..reinforcement.loss_types import LOSS_TYPES, LossSettings
from ..reinforcement.policy_loss import Completions, policy_loss
from ..sections import Grpo
from ..settings import TrainSettings
from .losses import (
    TOKEN_LOSSES,
    Ask,
    Asked,
    Batch,
    Computed,
    Logps,
    TokenLoss,
    batch_loss,
    likelihood,
    logps_of,
    predicted,
    tempered_logps,
    token_logps,
)
from .objectives import LIKELIEST, OBJECTIVES, stores
from .preference_losses import Functions, mismatched, pair_loss, unpaired_losses


def micro_batch_loss(
    built: Built,
    settings: TrainSettings,
    model: nnx.Module,
    inputs: Batch,
    before: nnx.Module | None = None,
) -> tuple[jax.Array, Named]:
    """Compute the loss that a run of train.py minimizes.

    Args:
        before: the teacher, or the model that training starts from; None where it is the model without its
            adapters, or where the objective does not use it.
    """
    forward = built.forward.of(inputs)

    def still(ask: Ask) -> Any:
        graph, state = nnx.split(model)
        with _uncollected(built):
            return ask(forward, nnx.merge(graph, jax.lax.stop_gradient(state)))

    reference = reference_of(built, forward, model, before)
    return objective_loss(settings, forward, model, (reference, still), inputs)


def reference_of(built: Built, forward: Computed, model: nnx.Module, before: nnx.Module | None) -> Asked:
    """Return what computes the teacher, or the model that training starts from.

    Args:
        forward: how the latter is computed.
        before: as for `micro_batch_loss`.
    """
    provider = built.provider

    def reference(ask: Ask) -> Any:
        if built.teacher is not None:
            with _uncollected(built):
                return ask(built.teacher.forward, before)
        as_before = nullcontext() if provider is None else before_training(provider, before is not None)
        with as_before, _uncollected(built):
            return ask(forward, model if before is None else before)

    return reference


def _uncollected(built: Built) -> AbstractContextManager[None]:
    """Do not record the loads of experts that are computed in this context."""
    if not built.forward.architecture.expert_layers:
        return nullcontext()
    return uncollected()


@contextmanager
def before_training(provider: AdapterProvider, kept: bool) -> Iterator[None]:
    """Compute the model that training started from: no dropout, and no deltas unless `kept`.

    Args:
        kept: whether that model had deltas; they are the deltas of the model that is computed.
    """
    before = provider.linear, provider.experts, provider.salts
    provider.salts = None
    if not kept:
        provider.linear, provider.experts = {}, {}
    try:
        yield
    finally:
        provider.linear, provider.experts, provider.salts = before


def objective_loss(
    settings: TrainSettings, forward: Computed, model: Any, asked: tuple[Asked, Asked], inputs: Batch
) -> tuple[jax.Array, Named]:
    """Compute the loss of a micro-batch by the recipe's objective, for a model of any backend.

    Args:
        forward: how `model` is computed.
        asked: the teacher or the model that training starts from, and `model` without a gradient.

    Returns:
        float32[], and the objective's metrics.
    """
    objective = OBJECTIVES[settings.objective]
    if settings.grpo is not None:
        return reinforced_loss(settings.grpo, forward, model, asked[0], inputs)
    if objective.format:
        policy = functools.partial(token_logps, forward, model)
        reference, still = map(logps_of, asked)
        if objective.pairs:
            return preference_loss(policy, reference, inputs, settings)
        return kto_loss(policy, still, reference, inputs, settings)
    if stores(settings):
        known = [inputs[name] for name in LIKELIEST]
        return batch_loss(forward, model, inputs, _token_loss(settings), known=known), {}
    before = asked[0] if objective.refers(settings.loss_type) or objective.teacher else None
    return batch_loss(forward, model, inputs, _token_loss(settings), before), {}


def _token_loss(settings: TrainSettings) -> TokenLoss:
    name = OBJECTIVES[settings.objective].loss(settings.loss_type)
    return likelihood(settings) if name is None else functools.partial(TOKEN_LOSSES[name], settings)


PAIR_METRICS = ("rewards_chosen", "rewards_rejected", "rewards_margin", "rewards_accuracy")
"""Metrics that are logged with the loss: beta times the log-probability of an answer (minus the reference's,
if there is a reference; else its mean over tokens, if the loss uses the mean), and how often the chosen
answer's value is the larger one."""

FUNCTIONS = Functions(jnp.exp, jnp.log1p, jax.nn.relu, jax.nn.sigmoid, jax.nn.log_sigmoid)


def preference_loss(
    policy: Logps, reference: Logps, inputs: Batch, train: TrainSettings
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss of a micro-batch of pairs, and its metrics.

    Each pair's loss is divided by `norm`, so that a step's mean is over its pairs. A pair without targets,
    which fills up a last batch, does not count.

    Args:
        policy: the model that is trained.
        reference: the model that training started from; it runs only if the objective has a reference.
        inputs: B = 2 P rows; norm is the average number of pairs in the step's micro-batches.
        train: settings whose objective takes pairs.
    """
    objective, loss = OBJECTIVES[train.objective], pair_loss(train)
    compared = objective.refers(train.loss_type)
    rows = [inputs[name] for name in ("tokens", "positions", "segment_ids")]
    targets = predicted(inputs["loss_mask"], inputs["segment_ids"])
    lengths = targets.sum(-1)
    real = (lengths.reshape(-1, 2) > 0).all(1)
    norm = jnp.where(inputs["norm"] > 0, inputs["norm"], 1.0)

    def mean(values: jax.Array) -> jax.Array:
        """Average float32[P], one value per pair."""
        return jnp.where(real, values, 0.0).sum() / norm

    logps = policy(*rows)
    sums = summed(logps, targets)
    if compared:
        sums -= summed(jax.lax.stop_gradient(reference(*rows)), targets)
    worth = sums / jnp.maximum(lengths, 1) if loss.mean else sums
    total = mean(loss.of(FUNCTIONS, worth[0::2], worth[1::2], train))
    if objective.likelihood:
        # As in TRL, the mean is over the micro-batch's tokens.
        segment_ids = inputs["segment_ids"]
        learned = targets if objective.likelihood == "answer" else predicted(segment_ids > 0, segment_ids)
        learned = learned[0::2] & real[:, None]
        nll = -summed(logps[0::2], learned).sum() / jnp.maximum(learned.sum(), 1)
        total += train.cpo_alpha * nll * real.sum() / norm
    rewards = train.beta * (sums if compared else worth)
    chosen, rejected = rewards[0::2], rewards[1::2]
    accuracy = (chosen > rejected).astype(jnp.float32)
    values = (chosen, rejected, chosen - rejected, accuracy)
    return total, {name: mean(value) for name, value in zip(PAIR_METRICS, values, strict=True)}


def summed(logps: jax.Array, targets: jax.Array) -> jax.Array:
    """Return float32[B]: the log-probabilities of each row's targets, summed."""
    return jnp.where(targets, logps, 0.0).sum(-1)


ANSWER_METRICS = ("kl", "rewards_chosen", "rewards_rejected", "rewards_margin")
"""Metrics that are logged with the loss: the estimated distance from the reference, in nats an answer; beta
times the log-probability of an answer minus the reference's, as the mean over a step's desirable answers
and as the mean over its undesirable ones. A mean is 0 if the step has no answer of that kind."""


def kto_loss(
    policy: Logps, still: Logps, reference: Logps, inputs: Batch, train: TrainSettings
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss of a micro-batch of answers, and its metrics.

    Each answer's loss is divided by `norm`, so that a step's mean is over its answers. A row without targets,
    which fills up a last batch, does not count. The distance from the reference is a mean over the whole
    micro-batch, as TRL averages it over its processes, and has no gradient.

    Args:
        policy: the model that is trained.
        still: the same model without a gradient.
        reference: the model that training started from.
        inputs: includes `desirable` float32[B], above 0 for desirable answers, below 0 for undesirable
            ones and 0 for rows without an answer; its size is the answer's share of its kind's metrics.
        train: settings whose objective takes single answers.
    """

    def gains_of(model: Logps, rows: Any) -> tuple[jax.Array, jax.Array]:
        """Return float32[B], log-probabilities minus the reference's, and which rows have an answer."""
        arrays = [rows[name] for name in ("tokens", "positions", "segment_ids")]
        targets = predicted(rows["loss_mask"], rows["segment_ids"])
        before = jax.lax.stop_gradient(summed(reference(*arrays), targets))
        return summed(model(*arrays), targets) - before, targets.any(1)

    gains, real = gains_of(policy, inputs)
    kl = jnp.float32(0)
    if train.loss_type in OBJECTIVES[train.objective].mismatched:
        others, some = gains_of(still, mismatched(jnp, inputs, train.micro_batch_size))
        distance = jnp.where(some, others, 0.0).sum() / jnp.maximum(some.sum(), 1)
        kl = jnp.maximum(jax.lax.stop_gradient(distance), 0.0)
    sides, shares = jnp.sign(inputs["desirable"]), jnp.abs(inputs["desirable"])
    norm = jnp.where(inputs["norm"] > 0, inputs["norm"], 1.0)
    answer_losses = unpaired_losses(jax.nn.sigmoid, gains, sides, kl, train)
    total = jnp.where(real, answer_losses, 0.0).sum() / norm
    rewards = train.beta * shares * jnp.where(real, gains, 0.0)
    chosen, rejected = (jnp.where(sides == side, rewards, 0.0).sum() for side in (1, -1))
    return total, dict(zip(ANSWER_METRICS, (kl, chosen, rejected, chosen - rejected), strict=True))


def reinforced_loss(
    grpo: Grpo, forward: Computed, model: Any, reference: Asked, inputs: Batch
) -> tuple[jax.Array, Named]:
    """Return the loss of a micro-batch of completions, and its metrics.

    Args:
        reference: the model that training started from; it runs only if the divergence from it is part of the
            loss.
        inputs: a prompt with its completion in each row, whose trained tokens the loss mask covers. Also
            `advantages` float32[B] and `weights` float32[B], those of each row's trained tokens; with several
            iterations `old` float32[B, T], log-probabilities under the policy that sampled, at the token
            before; with a server that generates `correction` float32[B, T], factors at the same places. norm
            is the average number of trained tokens in the step's micro-batches. The weights are those of the
            step times the number of its micro-batches, because a step takes their mean.
    """
    rows = [inputs[name] for name in ("tokens", "positions", "segment_ids")]
    mask = predicted(inputs["loss_mask"], inputs["segment_ids"])
    logps, entropy = tempered_logps(forward, model, rows, grpo.temperature)
    before = None
    if grpo.beta and not LOSS_TYPES[grpo.loss].penalizes_reward:
        before = jax.lax.stop_gradient(
            reference(lambda forward, model: tempered_logps(forward, model, rows, grpo.temperature)[0])
        )
    batch = Completions(
        mask=mask,
        segment_ids=inputs["segment_ids"],
        advantages=jnp.broadcast_to(inputs["advantages"][:, None], mask.shape),
        weights=jnp.broadcast_to(inputs["weights"][:, None], mask.shape),
        tokens=inputs["norm"],
        old=inputs.get("old"),
        reference=before,
        correction=inputs.get("correction"),
    )
    return policy_loss(loss_settings(grpo), logps, batch, entropy)


def loss_settings(grpo: Grpo) -> LossSettings:
    """Return the settings of the policy's loss."""
    names = ("epsilon", "epsilon_high", "kl", "kl_bias_correction", "ratio")
    beta = 0.0 if LOSS_TYPES[grpo.loss].penalizes_reward else grpo.beta
    return LossSettings(grpo.loss, beta=beta, **{name: getattr(grpo, name) for name in names})


def balanced(loss: jax.Array, more: Named, loads: Collected, coefficient: float) -> tuple[jax.Array, Named]:
    """Add the load-balancing loss to a micro-batch's loss, and the experts' loads to its metrics.

    Args:
        loads: of the experts in the forward pass.
        coefficient: of the load-balancing loss, 0 for none.
    """
    more = {**more, EXPERT_TOKENS: loads.tokens()}
    if not coefficient:
        return loss, more
    auxiliary = loads.loss()
    return loss + coefficient * auxiliary, {**more, "aux_loss": auxiliary}
