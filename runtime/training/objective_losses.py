"""The losses of objectives other than the likelihood of texts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
from flax import nnx

from ..metrics.run_report import Named
from ..model.loading import Built
from ..model.lora import AdapterProvider
from ..settings import TrainSettings
from .loss import Ask, Asked, Batch, Computed, TokenLoss, batch_loss, likelihood
from .objectives import OBJECTIVES


def loss_of_built(
    built: Built, settings: TrainSettings, model: nnx.Module, inputs: Batch, before: nnx.Module | None = None
) -> tuple[jax.Array, Named]:
    """Compute the loss of a micro-batch by the recipe's objective, as `step.micro_batch_loss`."""
    provider = built.provider

    def reference(ask: Ask) -> Any:
        as_before = nullcontext() if provider is None else before_training(provider, before is not None)
        with as_before, _uncollected(built):
            return ask(built.forward, model if before is None else before)

    def still(ask: Ask) -> Any:
        graph, state = nnx.split(model)
        with _uncollected(built):
            return ask(built.forward, nnx.merge(graph, jax.lax.stop_gradient(state)))

    return objective_loss(settings, built.forward, model, (reference, still), inputs)


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
        asked: the model that training starts from, and `model` without a gradient.

    Returns:
        float32[], and the objective's metrics.
    """
    objective = OBJECTIVES[settings.objective]
    if objective.format:
        from .logps import logps_of, token_logps

        policy = functools.partial(token_logps, forward, model)
        reference, still = map(logps_of, asked)
        if objective.pairs:
            from .preference import preference_loss

            return preference_loss(policy, reference, inputs, settings)
        from .kto import kto_loss

        return kto_loss(policy, still, reference, inputs, settings)
    before = asked[0] if objective.refers(settings.loss_type) else None
    return batch_loss(forward, model, inputs, _token_loss(settings), before), {}


def _token_loss(settings: TrainSettings) -> TokenLoss:
    if OBJECTIVES[settings.objective].loss(settings.loss_type) is not None:
        from .token_losses import TOKEN_LOSSES

        return functools.partial(TOKEN_LOSSES[settings.loss_type], settings)
    return likelihood(settings)


def _uncollected(built: Built) -> AbstractContextManager[None]:
    """Do not record the loads of experts that are computed in this context."""
    if not built.forward.architecture.expert_layers:
        return nullcontext()
    from ..model.expert_load import uncollected

    return uncollected()
