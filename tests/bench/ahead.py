"""A recipe's training step compiled ahead of time for its TPU: memory, and the compiler's estimate of time.

Nothing here is measured on a TPU. The step is compiled at two depths that are whole repeats of the layer
pattern, and extrapolated in a line to the model's own. The compiler's cost model counts Pallas kernels as
nothing; attention's is added from its shapes.

    python -m tests.bench.ahead RECIPE    one line of JSON
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
TOPOLOGY = "v5p:2x2x1"
MEAN_LENGTH, PACKED_SHARE = 922, 0.97
"""Tokens of the reference run's mean sample (arXiv 2605.25645), and how full packing leaves a row."""

KERNEL_PRODUCTS = 9
"""Matrix products of splash attention, forward and backward: 2 forward, 3 for dQ, 4 for dK and dV. Where a
layer is computed again whole, the forward ones count twice."""
KERNEL_EFFICIENCY = 0.5
"""Share of the chip's peak that the kernel is taken to reach."""


def estimate(name: str, depths: tuple[int, int] = (1, 2), **overrides: Any) -> dict[str, Any]:
    """Figures of one device for a micro-batch's forward and backward pass.

    Args:
        name: of a recipe in recipes/.
        depths: repeats of the layer pattern that are compiled.
        overrides: remat, attention and micro_batch_size in place of the recipe's.

    Returns:
        gib (arguments and temporaries), seconds (by the cost model), kernel_seconds (added), tokens (real
        ones of a micro-batch) and milliseconds_per_token.
    """
    program = _program(name)
    recipe, a = program.recipe, program.architecture
    pattern = _pattern(a.layer_types)
    micro = overrides.pop("micro_batch_size", recipe.train.micro_batch_size)
    found = []
    for repeats in depths:
        small = replace(a, layer_types=a.layer_types[: pattern * repeats])
        found.append((pattern * repeats, *_compile(program, small, micro, overrides)))
    (n1, *first), (n2, *second) = found
    memory, temporaries, seconds = (
        y1 + (y2 - y1) / (n2 - n1) * (a.num_layers - n1) for y1, y2 in zip(first, second, strict=True)
    )
    attention = overrides.get("attention", recipe.model.attention)
    again = 2 if overrides.get("remat", recipe.remat.policy) in ("decoder", "block") else 0
    kernel = _kernel_seconds(program, micro, KERNEL_PRODUCTS + again) if attention == "splash" else 0.0
    rows = micro * program.data_parallel
    tokens = rows * (recipe.data.max_length * PACKED_SHARE if recipe.data.packing else MEAN_LENGTH)
    return {
        "recipe": name,
        "compiled_layers": [n1, n2],
        "layers": a.num_layers,
        "argument_gib": memory / 2**30,
        "temporary_gib": temporaries / 2**30,
        "seconds": seconds,
        "kernel_seconds": kernel,
        "tokens": tokens,
        "milliseconds_per_token": 1000 * (seconds + kernel) / tokens,
    }


def _program(name: str) -> Any:
    from compiler.lower import lower
    from spec.load import load

    program = lower(load(ROOT / "recipes" / f"{name}.yaml")).program
    assert program is not None, name
    return program


def _pattern(layer_types: tuple[str, ...]) -> int:
    """Layers of the shortest run whose repetition is the whole pattern."""
    return next(
        n
        for n in range(1, len(layer_types) + 1)
        if all(kind == layer_types[i % n] for i, kind in enumerate(layer_types))
    )


def _compile(program: Any, architecture: Any, micro: int, overrides: dict[str, Any]) -> list[float]:
    """Bytes of arguments, bytes of temporaries and estimated seconds of one device."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from runtime.loss import batch_loss
    from runtime.model import abstract_model
    from runtime.settings import ModelSettings

    recipe, axes = program.recipe, dict(program.recipe.mesh.axes)
    settings = ModelSettings(
        id=recipe.model.id,
        family=program.family.name,
        dtype=recipe.model.dtype,
        attention=overrides.get("attention", recipe.model.attention),
        remat=overrides.get("remat", recipe.remat.policy),
    )
    length = recipe.data.max_length
    built = abstract_model(program.family, architecture, settings, program.lora, axes, program.rules)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY)
    mesh = Mesh(np.array(topology.devices).reshape(tuple(axes.values())), tuple(axes))
    graph, adapters, base = nnx.split(built.model, nnx.LoRAParam, ...)

    def placed(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec or PartitionSpec())
            ),
            tree,
            nnx.get_partition_spec(tree),
        )

    rows = micro * program.data_parallel
    by_row = NamedSharding(mesh, PartitionSpec("fsdp"))
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=by_row)
    mask = jax.ShapeDtypeStruct((rows, length), bool, sharding=by_row)
    norm = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    adapters, base = placed(adapters), placed(base)

    def step(adapters: Any, base: Any, *batch: Any) -> Any:
        loss = lambda a: batch_loss(built.forward, nnx.merge(graph, a, base), *batch)  # noqa: E731
        return jax.value_and_grad(loss)(adapters)

    with mesh:
        compiled = jax.jit(step).lower(adapters, base, ids, ids, ids, mask, norm).compile()
    moments = jax.eval_shape(optax.adam(1e-4).init, adapters)
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(moments)) / math.prod(
        axes.values()
    )
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis()
    return [memory.argument_size_in_bytes + state, memory.temp_size_in_bytes, cost["optimal_seconds"]]


def published(depths: tuple[int, int] = (6, 12)) -> dict[str, Any]:
    """The reference run's own step (arXiv 2605.25645), by Tunix alone: its stock LoRA and loss, float32
    computation on bfloat16 weights, tp 4, one padded sample of 3,072 tokens, layers recomputed whole. Its
    dropout, which the estimate does not notice, is left out."""
    found = [(layers, _compile_published(layers)) for layers in depths]
    (n1, first), (n2, second) = found
    seconds = first + (second - first) / (n2 - n1) * (60 - n1)
    return {
        "recipe": "as it was published",
        "compiled_layers": list(depths),
        "layers": 60,
        "seconds": seconds,
        "kernel_seconds": 0.0,
        "tokens": MEAN_LENGTH,
        "milliseconds_per_token": 1000 * seconds / MEAN_LENGTH,
    }


def _compile_published(layers: int) -> float:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import qwix
    from flax import nnx
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from tunix.models.gemma4 import model as gemma4
    from tunix.sft import peft_trainer

    from runtime.forward import attention_mask
    from runtime.sharding import constrain

    # On a TPU Tunix's activations are constrained; its helper does nothing where the backend is a CPU.
    gemma4.shard = constrain
    config = gemma4.ModelConfig.gemma4_31b()
    config.num_layers, config.dtype, config.param_dtype = layers, jnp.float32, jnp.bfloat16
    config.use_sliding_window_kv_cache = False
    provider = qwix.LoraProvider(
        module_path=".*(q_einsum|kv_einsum|attn_vec_einsum|gate_proj|up_proj|down_proj)",
        rank=64,
        alpha=64,
    )
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY)
    mesh = Mesh(np.array(topology.devices).reshape(1, 4), ("fsdp", "tp"))

    def make() -> Any:
        model = gemma4.Gemma4(config, rngs=nnx.Rngs(0))
        return qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(0), **model.get_model_input())

    model = nnx.eval_shape(make)
    model.config.remat_config = gemma4.RematConfig.DECODER
    graph, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)

    def placed(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec or PartitionSpec())
            ),
            tree,
            nnx.get_partition_spec(tree),
        )

    whole = NamedSharding(mesh, PartitionSpec())
    ids = jax.ShapeDtypeStruct((1, 3072), jnp.int32, sharding=whole)
    mask = jax.ShapeDtypeStruct((1, 3072), bool, sharding=whole)

    def step(adapters: Any, rest: Any, tokens: Any, positions: Any, segments: Any, mask: Any) -> Any:
        def loss(model: Any) -> Any:
            return peft_trainer._default_loss_fn(model, tokens, mask, positions, attention_mask(segments))

        wanted = nnx.DiffState(0, nnx.LoRAParam)
        return nnx.value_and_grad(loss, argnums=wanted)(nnx.merge(graph, adapters, rest))

    with mesh:
        lowered = jax.jit(step).lower(placed(adapters), placed(rest), ids, ids, ids, mask)
    return float(lowered.compile().cost_analysis()["optimal_seconds"])


def _kernel_seconds(program: Any, micro: int, products: int) -> float:
    """Seconds of all layers' attention kernels on one device, at KERNEL_EFFICIENCY of its peak."""
    a, length = program.architecture, program.recipe.data.max_length
    tp = program.recipe.mesh.axes["tp"]
    flops = 0.0
    for layer in range(a.num_layers):
        window = a.sliding_window if a.layer_types[layer] != "full_attention" else length
        seen = min(window, length)
        pairs = length * seen - seen * (seen - 1) / 2
        head_dim = a.layer_head_dim(layer)
        flops += products * 2 * pairs * head_dim * a.heads(layer) / tp
    return flops * micro / (program.accelerator.bf16_tflops * 1e12 * KERNEL_EFFICIENCY)


if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    sys.path.insert(0, os.environ.get("LIBTPU", ""))
    import jax

    # Of the compiler's efforts the lowest: a third of the time, for some per cent of either figure.
    jax.config.update("jax_exec_time_optimization_effort", -1.0)
    jax.config.update("jax_memory_fitting_effort", -1.0)
    given = dict(item.split("=") for item in sys.argv[2:])
    options: dict[str, Any] = {k: int(v) if v.isdigit() else v for k, v in given.items()}
    print(json.dumps(published() if sys.argv[1] == "published" else estimate(sys.argv[1], **options)))
