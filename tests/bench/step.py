"""Measure the compiled training step's memory against Tunix's own loss, without training and weights.

python -m tests.bench.step [FSDP TP DTYPE]    one line of JSON
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tests.bench.placing import batch, placed

VOCABULARY = 262_144
ROWS, LENGTH = 8, 512
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG = {
    "model_type": "gemma4_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "global_head_dim": 64,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "sliding_window": 128,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "final_logit_softcapping": 30.0,
}
"""A Gemma 4 with a full vocabulary and small layers."""


def measure_temporaries(
    axes: Mapping[str, int] | None = None, dtype: str = "float32", mesh: Any = None
) -> dict[str, int]:
    """Return the bytes of temporaries on one device of the compiled LoRA step, by loss.

    Both steps differ only in the loss: forward, backward with one recomputation a layer, AdamW.

    Args:
        axes: of a mesh of 8 virtual devices; {"fsdp": 8, "tp": 1} for None.
        dtype: the model's. A CPU multiplies bfloat16 by making float32 copies of the operands, including the
            head's weight. No TPU or GPU does this.
        mesh: a mesh of other devices to compile for, in place of the virtual ones.

    Returns:
        {"tunix": ..., "recipec": ...}.
    """
    import jax
    from tunix.sft import peft_trainer

    from recipec.runtime.model.sharding import start_mesh
    from recipec.runtime.settings import MeshSettings
    from recipec.runtime.training.losses import batch_loss

    mesh = mesh or start_mesh(MeshSettings("cpu", 8, dict(axes or {"fsdp": 8, "tp": 1})))
    built = _abstract(dict(mesh.shape), dtype)

    def tunix(model: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        def logits(tokens: jax.Array, positions: jax.Array, cache: None, mask: None) -> Any:
            return built.forward.logits(model, tokens, positions, batch["segment_ids"]), cache

        arguments = batch["tokens"], batch["loss_mask"], batch["positions"], None
        return peft_trainer._default_loss_fn(logits, *arguments)

    def recipec(model: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        return batch_loss(built.forward, model, batch)

    found = {}
    for loss in (tunix, recipec):
        with mesh:
            compiled = _step(built, mesh, loss).compile()
        found[loss.__name__] = compiled.memory_analysis().temp_size_in_bytes
    return found


def _abstract(axes: Mapping[str, int], dtype: str) -> Any:
    from recipec.runtime.model.adapters import LoraSettings
    from recipec.runtime.model.families import family_of
    from recipec.runtime.model.loading import abstract_model
    from recipec.runtime.settings import ModelSettings

    family = family_of(CONFIG)
    settings = ModelSettings(id="none", family=family.name, dtype=dtype)
    lora = LoraSettings(rank=8, alpha=16.0, targets=TARGETS, dropout=0.0)
    return abstract_model(family, family.architecture(CONFIG), settings, lora, axes)


def _step(built: Any, mesh: Any, loss: Callable[..., Any]) -> Any:
    """Lower a step: AdamW on the adapters, with the batch's rows over fsdp."""
    import jax
    import optax
    from flax import nnx

    graph, adapters, base = nnx.split(built.model, nnx.LoRAParam, ...)
    optimizer = optax.adamw(1e-4)

    def step(adapters: Any, base: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda a: loss(nnx.merge(graph, a, base), batch))(adapters)
        updates, state = optimizer.update(gradients, state, adapters)
        return optax.apply_updates(adapters, updates), state, value

    adapters, base = placed(adapters, mesh), placed(base, mesh)
    state = jax.eval_shape(optimizer.init, adapters)
    return jax.jit(step, donate_argnums=(0, 2)).lower(adapters, base, state, batch(ROWS, LENGTH, mesh))


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    fsdp, tp, dtype = sys.argv[1:] or ("8", "1", "float32")
    print(json.dumps(measure_temporaries({"fsdp": int(fsdp), "tp": int(tp)}, dtype)))
