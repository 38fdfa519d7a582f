"""What the forward pass keeps for the backward pass, by policies that Tunix does not have.

They recompute each layer from its input, except for named values: these are kept on the device, or sent to
the host's memory and fetched again. recomputed.py has Tunix's own policies.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ..settings import ModelSettings
from .recomputed import OF_TUNIX, PROJECTION

ATTENTION = "attention"
"""Name of each attention's output before its output projection. Splash attention's kernel gives this name
to the values that it keeps for its backward pass (output and logsumexp)."""
OUTPUT_PROJECTION = "BTNH,NHD->BTD"
"""The einsum of the output projection, in every Tunix model."""

Policy = Callable[..., Any]
Out = TypeVar("Out")

POLICIES: dict[str, Policy | None] = {
    **dict.fromkeys(OF_TUNIX),
    "save_attention": jax.checkpoint_policies.save_only_these_names(ATTENTION),
    "save_dots": jax.checkpoint_policies.save_only_these_names(ATTENTION, PROJECTION),
    "offload_dots": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(),
        names_which_can_be_offloaded=(ATTENTION, PROJECTION),
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""Policies by the recipe's name. None leaves recomputation to Tunix. save_dots keeps the output of each
projection and of each attention. No product with a weight is computed twice, and no weight is gathered again
for it. Norms, rotations, activation functions and, with attention dot, the scores are computed again. A
projection keeps one array, or none if the backward pass does not need it, as before a sum with the residual
stream. offload_dots sends the same values to the host; on a CPU, which has no other memory, it equals
save_dots. The experts' products have no name: they are computed again."""


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
        from .expert_load import through

        again = partial(through, again)
    signature, transformed = inspect.signature(block), again(block)

    def call(*args: Any, **kwargs: Any) -> Out:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return cast(Out, transformed(*bound.args))

    return call


def replacements(module: Any, settings: ModelSettings, experts: bool) -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, attribute, value) of everything to replace in a Tunix model's module while it is traced.

    Args:
        settings: with a policy that is not Tunix's own.
        experts: whether layers have experts.
    """
    policy = POLICIES[settings.remat]
    yield module.DecoderLayer, "__call__", recomputed(module.DecoderLayer.block, experts, policy)
    projection, dense = module.Einsum.__call__, nnx.Linear.__call__

    def einsum(self: Any, x: jax.Array) -> jax.Array:
        if settings.attention == "dot" and self.einsum_str == OUTPUT_PROJECTION:
            x = checkpoint_name(x, ATTENTION)
        return checkpoint_name(projection(self, x), PROJECTION)

    def linear(self: Any, *args: Any, **kwargs: Any) -> jax.Array:
        return checkpoint_name(dense(self, *args, **kwargs), PROJECTION)

    yield module.Einsum, "__call__", einsum
    yield nnx.Linear, "__call__", linear
