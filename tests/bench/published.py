"""The published program compiled ahead of time for a v5p-8, by Tunix alone: what this project is held against.

Nothing here is measured on a TPU. The reference run's own step (arXiv 2605.25645): Tunix's stock LoRA and
loss, float32 computation on bfloat16 weights, tp 4, one padded sample of 3,072 tokens, layers recomputed
whole. Its dropout, which the estimate does not notice, is left out.

    python -m tests.bench.published    one line of JSON; in the environment of tests.tpu_environment
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tests.bench.placing import batch, placed

TOPOLOGY = "v5p:2x2x1"
DEPTHS, LAYERS = (6, 12), 60
ROW = 3072

Figures = tuple[float, float, float]
"""Of a compiled step on one device: bytes of arguments and of temporaries, estimated seconds."""


def main() -> None:
    import jax

    # The lowest of the compiler's efforts, as `recipe plan` has it.
    jax.config.update("jax_exec_time_optimization_effort", -1.0)
    jax.config.update("jax_memory_fitting_effort", -1.0)
    first, second = (_compile(depth) for depth in DEPTHS)
    arguments, temporaries, seconds = (
        y1 + (y2 - y1) / (DEPTHS[1] - DEPTHS[0]) * (LAYERS - DEPTHS[0])
        for y1, y2 in zip(first, second, strict=True)
    )
    print(json.dumps({"gib": (arguments + temporaries) / 2**30, "seconds": seconds}))


def _compile(layers: int) -> Figures:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import qwix
    from flax import nnx
    from jax.experimental import topologies
    from jax.sharding import Mesh
    from tunix.models.gemma4 import model as gemma4
    from tunix.sft import peft_trainer

    from recipec.runtime.model.forward import attention_mask
    from recipec.runtime.model.sharding import constrain

    # On a TPU Tunix's activations are constrained; its helper does nothing where the backend is a CPU.
    gemma4.shard = constrain
    config = gemma4.ModelConfig.gemma4_31b()
    config.num_layers, config.dtype, config.param_dtype = layers, jnp.float32, jnp.bfloat16
    config.use_sliding_window_kv_cache = False
    names = ".*(q_einsum|kv_einsum|attn_vec_einsum|gate_proj|up_proj|down_proj)"
    provider = qwix.LoraProvider(module_path=names, rank=64, alpha=64)

    def make() -> Any:
        model = gemma4.Gemma4(config, rngs=nnx.Rngs(0))
        return qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(0), **model.get_model_input())

    model = nnx.eval_shape(make)
    model.config.remat_config = gemma4.RematConfig.DECODER
    graph, adapters, base = nnx.split(model, nnx.LoRAParam, ...)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    mesh = Mesh(np.array(devices).reshape(1, 4), ("fsdp", "tp"))

    def step(adapters: Any, base: Any, batch: Mapping[str, Any]) -> Any:
        def loss(model: Any) -> Any:
            mask = attention_mask(batch["segment_ids"])
            arguments = batch["tokens"], batch["loss_mask"], batch["positions"], mask
            return peft_trainer._default_loss_fn(model, *arguments)

        wanted = nnx.DiffState(0, nnx.LoRAParam)
        return nnx.value_and_grad(loss, argnums=wanted)(nnx.merge(graph, adapters, base))

    with mesh:
        lowered = jax.jit(step).lower(placed(adapters, mesh), placed(base, mesh), batch(1, ROW, mesh))
    # AdamW's state, split as the adapters are, counts among the arguments.
    moments = 2 * sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(adapters))
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes + moments / mesh.size
    return arguments, memory.temp_size_in_bytes, compiled.cost_analysis()["optimal_seconds"]


if __name__ == "__main__":
    main()
