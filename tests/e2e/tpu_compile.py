"""Compile splash attention for TPUs ahead of time, and print the results as one line of JSON.

test_tpu_compile.py runs this in a new process, because libtpu must be found before jax is imported.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from recipec.runtime.model.attention import Scores, splash
from recipec.runtime.model.remat import POLICIES

ROWS, LENGTH = 8, 3072
MESHES = {
    "v5p:2x2x1, fsdp 4": ("v5p:2x2x1", {"fsdp": 4, "tp": 1}),
    "v6e:2x4, fsdp 4 x tp 2": ("v6e:2x4", {"fsdp": 4, "tp": 2}),
}
KERNELS = {
    # name: query heads, key/value heads, head size, the scores' settings
    "Gemma 4 31B, local": (32, 16, 256, Scores(1024)),
    "Gemma 4 31B, global": (32, 4, 512, Scores()),
    "Gemma 4 E2B, local": (8, 1, 256, Scores(512)),
    "Gemma 2 27B, local": (32, 16, 128, Scores(2048, 50.0)),
    "Llama 3.1 8B": (32, 8, 128, Scores()),
    "Qwen 2.5 0.5B": (14, 2, 64, Scores()),
    "gpt-oss, local": (64, 8, 64, Scores(128, sinks=np.zeros(64, np.float32))),
}


def mesh_of(topology: str, axes: dict[str, int]) -> Mesh:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    grid = np.array(devices).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def operands(mesh: Mesh, heads: int, kv_heads: int, size: int) -> tuple[Any, ...]:
    """Return abstract q, k, v and output gradient in bfloat16, and segment ids."""
    tp = mesh.shape["tp"]

    def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        split = "tp" if len(sizes) == 4 and sizes[2] % tp == 0 else None
        spec = PartitionSpec("fsdp", None, split) if len(sizes) == 4 else PartitionSpec("fsdp")
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    q, k = shape(ROWS, LENGTH, heads, size), shape(ROWS, LENGTH, kv_heads, size)
    return q, k, k, q, shape(ROWS, LENGTH, dtype=jnp.int32)


def kernel(mesh: Mesh, heads: int, kv_heads: int, size: int, how: Scores) -> dict[str, Any]:
    def both(q: Any, k: Any, v: Any, upstream: Any, ids: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: splash(q, k, v, ids, how, mesh), q, k, v)
        return out, pull(upstream)

    split = mesh.shape["tp"] if heads % mesh.shape["tp"] == 0 else 1
    scores = ROWS // mesh.shape["fsdp"] * heads // split * LENGTH**2 * 2
    try:
        program = jax.jit(both).lower(*operands(mesh, heads, kv_heads, size)).compile()
    except Exception as error:  # the test reports any compiler error
        return {"error": str(error)[:500]}
    return {
        "error": None,
        "custom_calls": program.as_text().count("tpu_custom_call"),
        "temporaries": program.memory_analysis().temp_size_in_bytes,
        "scores": scores,
    }


def recomputed(mesh: Mesh, policy: str) -> int:
    """Count the kernels of a recomputed layer under a rematerialization policy."""
    q, k, _, _, ids = operands(mesh, 8, 4, 128)

    @jax.jit
    def step(q: Any, k: Any, ids: Any) -> Any:
        def layer(q: Any, k: Any) -> Any:
            return jnp.sin(splash(jnp.sin(q), jnp.sin(k), jnp.cos(k), ids, mesh=mesh))

        layer = jax.checkpoint(layer, policy=POLICIES[policy])
        return jax.value_and_grad(lambda q, k: layer(q, k).astype(jnp.float32).sum(), argnums=(0, 1))(q, k)

    return step.lower(q, k, ids).compile().as_text().count("tpu_custom_call")


def main() -> None:
    meshes = {name: mesh_of(*which) for name, which in MESHES.items()}
    kernels = {
        f"{model}, {name}": kernel(mesh, *sizes)
        for model, sizes in KERNELS.items()
        for name, mesh in meshes.items()
    }
    mesh = next(iter(meshes.values()))
    policies = {policy: recomputed(mesh, policy) for policy in ("decoder", "save_attention")}
    print(json.dumps({"kernels": kernels, "recomputed": policies}))


if __name__ == "__main__":
    main()
