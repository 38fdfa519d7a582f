"""Compile the published program ahead of time for a v5p-8, by Tunix only, as a baseline.

Nothing here is measured on a TPU. The reference run's own step (arXiv 2605.25645) has Tunix's stock LoRA and
loss, float32 computation on bfloat16 weights, tp 4, one padded sample of 3,072 tokens, and full recomputation
of layers. Its dropout is left out.

python -m tests.bench.published OUT

The script writes scheduled-6.txt and scheduled-12.txt to OUT, for 6 and 12 of the 60 layers, and facts.json,
as scripts/published_runs.py does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.bench.placing import batch, placed

TOPOLOGY = "v5p:2x2x1"
DEPTHS, LAYERS = (6, 12), 60
ROW = 3072

FACTS = {
    "row": "v5p-8-gemma4-31b-lora",
    "run": "Gemma 4 31B, LoRA of rank 64",
    "step_s": 1.21,
    "rows_per_device": 0.25,
    "length": ROW,
    "source": "arXiv 2605.25645",
    "measured_with": "Tunix",
    "lora": True,
    "settings": {"compile_topology": "v5p-8"},
    "flags": [],
    "dropped": {},
    "mesh": {"fsdp": 1, "tp": 4},
    "layers": LAYERS,
}


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for layers in map(int, sys.argv[2:] or DEPTHS):
        text, mesh = _compile(layers)
        (out / f"scheduled-{layers}.txt").write_text(text)
    facts = FACTS | {
        "versions": {name: version(name) for name in ("jax", "jaxlib", "libtpu", "flax", "optax")},
        "coordinates": [list(device.coords) for device in mesh.devices.flat],
    }
    (out / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


def _compile(layers: int) -> tuple[str, Any]:
    """Return the scheduled module of this many layers, and the mesh."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import qwix
    from flax import nnx
    from jax.experimental import topologies
    from jax.sharding import Mesh
    from tunix.models.gemma4 import model as gemma4
    from tunix.sft import peft_trainer

    from recipec.runtime.model.layers import attention_mask
    from recipec.runtime.model.sharding import constrain

    # On a TPU, Tunix constrains its activations. On a CPU backend, its helper does nothing.
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
    return lowered.compile().as_text(), mesh


if __name__ == "__main__":
    main()
