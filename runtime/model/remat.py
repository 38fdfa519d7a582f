"""What the forward pass keeps for the backward pass, and what the backward pass recomputes.

Recomputed are attention and feed-forward block each from its input ("block"), or each layer from its input.
Of a layer, some policies except named values: these are kept on the device, or sent to the host's memory and
fetched again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import jax
from flax import nnx

from .expert_load import through

ATTENTION = "attention"
"""Name of each attention's output before its output projection. Splash attention's kernel gives this name
to the values that it keeps for its backward pass (output and logsumexp)."""
PROJECTION = "projection"
"""Name of each projection's output, the sum of its weight's product and its adapter's delta, and of the
adapter's product with A."""

Policy = Callable[..., Any]
Out = TypeVar("Out")

POLICIES: dict[str, Policy | None] = {
    **dict.fromkeys(("none", "block", "decoder")),
    "save_attention": jax.checkpoint_policies.save_only_these_names(ATTENTION),
    "save_dots": jax.checkpoint_policies.save_only_these_names(ATTENTION, PROJECTION),
    "offload_dots": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(),
        names_which_can_be_offloaded=(ATTENTION, PROJECTION),
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""Policies by the recipe's name; None keeps nothing but the input. save_dots keeps the output of each
projection and of each attention. No product with a weight is computed twice, and no weight is gathered again
for it. Norms, rotations, activation functions and, with attention dot, the scores are computed again. A
projection keeps one array, or none if the backward pass does not need it, as before a sum with the residual
stream. offload_dots sends the same values to the host; on a CPU, which has no other memory, it equals
save_dots. The experts' products have no name: they are computed again."""

OF_LAYERS = tuple(name for name in POLICIES if name not in ("none", "block"))
"""The policies that recompute whole layers."""


def recomputed(
    block: Callable[..., Out], experts: bool = False, policy: Policy | None = None
) -> Callable[..., Out]:
    """Apply nnx.remat to a module's block; the result also accepts keyword arguments.

    Args:
        experts: whether the block has experts, whose loads then leave it (expert_load.py).
        policy: of jax.checkpoint: what is kept for the backward pass.
    """
    again: Callable[..., Any] = partial(nnx.remat, policy=policy, graph_updates=False)
    if experts:
        again = partial(through, again)
    signature, transformed = inspect.signature(block), again(block)

    def call(*args: Any, **kwargs: Any) -> Out:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return cast(Out, transformed(*bound.args))

    return call
