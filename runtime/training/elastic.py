"""Convert optimizer state, so that a run can continue with another number of micro-batches per step.

optax.MultiSteps wraps the state of the recipe's chain where an optimizer step has several micro-batches.
Between steps its own fields are known (no gradient, and the step's count), so checkpoints keep only the state
inside it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx


class Kept(nnx.Module):
    """The part of an nnx.Optimizer's state that checkpoints keep; its variables are the optimizer's own."""

    def __init__(self, optimizer: nnx.Optimizer) -> None:
        self.opt_state = nnx.data(between_steps(optimizer.opt_state))


def between_steps(state: Any) -> Any:
    """Return the state of the recipe's chain, whether or not optax.MultiSteps wraps it."""
    return state.inner_opt_state if isinstance(state, optax.MultiStepsState) else state


def set_step(optimizer: nnx.Optimizer, step: int, accumulation: int) -> None:
    """Set the counts of an optimizer whose chain was restored from a checkpoint.

    Args:
        step: optimizer steps that are done.
        accumulation: micro-batches of each later step.
    """
    optimizer.step.set_value(jnp.asarray(step * accumulation, jnp.uint32))
    if isinstance(optimizer.opt_state, optax.MultiStepsState):
        optimizer.opt_state.gradient_step.set_value(jnp.asarray(step, jnp.int32))
