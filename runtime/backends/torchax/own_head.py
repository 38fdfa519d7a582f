"""The logits of a model of transformers, computed from final hidden states by the model's own code.

The model's own forward pass runs without the decoder, so its multipliers, caps and biases all apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import torch
import torchax
from transformers.modeling_outputs import BaseModelOutputWithPast

from ...model.forward import Head


@dataclass(frozen=True, kw_only=True)
class OwnHead(Head):
    """An output head that calls the model's own code after the decoder.

    Attributes:
        module: the causal language model.
        name: the head weight's name in the module.
        rest: other arrays outside the decoder, by their names.
    """

    module: torch.nn.Module
    name: str
    rest: Mapping[str, jax.Array]

    def logits(self, hidden: jax.Array, weight: jax.Array) -> jax.Array:
        """Return logits float32[B, T, V] from hidden [B, T, D]; the weight is sharded for this product."""
        env = torchax.default_env()
        own = env.j2t_iso({**self.rest, self.name: weight})
        given = env.j2t_iso(hidden)

        def decoded(*_: Any, **__: Any) -> BaseModelOutputWithPast:
            return BaseModelOutputWithPast(last_hidden_state=given)

        decoder: Any = self.module.model
        with mock.patch.object(decoder, "forward", decoded), env, torch.no_grad():
            out = torch.func.functional_call(
                self.module, own, (), {"inputs_embeds": given, "use_cache": False}
            )
            logits: jax.Array = env.t2j_iso(env.v2t_iso(out.logits))
        return logits.astype(jnp.float32)
