"""What is put around each decoder layer of transformers' model: recomputation, and how activations lie.

The layers compute what they did. transformers' own gradient checkpointing does nothing under jax.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import jax
import torch
import torchax

from runtime import sharding
from runtime.remat import POLICIES

ROWS = ("fsdp", None, "tp")
"""The sharding of hidden states [B, T, D], Tunix's own. Left to itself, XLA fills the step with all-to-alls;
with whole features, each device of tp computes all of the norms and of the adapters' A."""


def wrap(decoder: torch.nn.Module, remat: str) -> None:
    """Wraps every layer of a decoder (`model.model` of a causal LM), and its rotary embedding.

    Args:
        remat: the recipe's policy; "none" keeps every activation. "block" is "decoder" here.
    """
    for layer in decoder.layers:  # type: ignore[union-attr]
        layer.forward = _layer(layer.forward, remat)
    rotary = decoder.rotary_emb
    rotary.forward = _exactly(rotary.forward)  # type: ignore[union-attr]


def _layer(forward: Callable[..., Any], remat: str) -> Callable[..., Any]:
    def run(hidden: Any, *args: Any, **kwargs: Any) -> Any:
        env = torchax.default_env()
        shared = kwargs.get("shared_kv_states")

        def body(hidden: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
            # What a layer adds for later ones (Gemma 4's keys and values) has to leave as a result.
            held = UserDict(shared or {})
            more = kwargs if shared is None else {**kwargs, "shared_kv_states": held}
            out = forward(env.j2t_iso(hidden), *args, **more)
            added = {name: pair for name, pair in held.items() if shared.get(name) is not pair}  # type: ignore[union-attr]
            return env.t2j_iso(env.v2t_iso((out, added)))

        computed = body if remat == "none" else jax.checkpoint(body, policy=POLICIES[remat])
        placed = sharding.constrain(env.t2j_iso(env.v2t_iso(hidden)), ROWS)
        out, added = computed(placed)
        if shared is not None:
            shared.update(env.j2t_iso(added))
        return env.j2t_iso(sharding.constrain(out, ROWS))

    return run


def _exactly(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Rotary angles in float32 in earnest: a TPU multiplies float32 in bfloat16 unless it is told otherwise,
    and position 257 is none of bfloat16's numbers."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return forward(*args, **kwargs)

    return run
