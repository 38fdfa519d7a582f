"""The load-balancing loss of experts, as part of a run's loss."""

from __future__ import annotations

import jax

from ..metrics.run_report import EXPERT_TOKENS, Named
from ..model.expert_load import Collected


def balanced(loss: jax.Array, more: Named, found: Collected, coefficient: float) -> tuple[jax.Array, Named]:
    """Add the load-balancing loss to a micro-batch's loss, and the experts' loads to its metrics.

    Args:
        found: the loads of the forward pass.
        coefficient: of the load-balancing loss, 0 for none.
    """
    more = {**more, EXPERT_TOKENS: found.tokens()}
    if not coefficient:
        return loss, more
    auxiliary = found.loss()
    return loss + coefficient * auxiliary, {**more, "aux_loss": auxiliary}
