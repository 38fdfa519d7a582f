"""A recipe's training step compiled ahead of time for its TPU: memory, and the compiler's estimate of time.

Nothing here is measured on a TPU. A step is compiled at two depths that are whole repeats of the layer
pattern, and extrapolated in a line to the model's own. The compiler's cost model counts Pallas kernels as
nothing; attention's is added from its shapes.

    python -m tests.bench.ahead RECIPE|published    one line of JSON; in the environment of tests.tpu_environment
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench.placing import batch, placed

ROOT = Path(__file__).resolve().parent.parent.parent
TOPOLOGY = "v5p:2x2x1"
MEAN_LENGTH, PACKED_SHARE = 922, 0.97
"""Tokens of the reference run's mean sample (arXiv 2605.25645), and how full packing is taken to leave a row."""

KERNEL_PRODUCTS = 9
"""Matrix products of splash attention, forward and backward: 2 forward, 3 for dQ, 4 for dK and dV. Where a
layer is computed again whole, the forward ones count twice."""
KERNEL_EFFICIENCY = 0.5
"""Share of the chip's peak that the kernel is taken to reach."""

Figures = tuple[float, float, float]
"""Of a compiled step on one device: bytes of arguments and of temporaries, estimated seconds."""


def estimate(name: str) -> dict[str, Any]:
    """Figures of one device for a micro-batch's forward and backward pass, of a recipe in recipes/."""
    from compiler.lower import lower
    from compiler.miniature_config import period
    from spec.load import load

    program = lower(load(ROOT / "recipes" / f"{name}.yaml")).program
    assert program is not None, name
    recipe, a = program.recipe, program.architecture
    pattern = len(period(a.layer_types))

    def compiled(layers: int) -> Figures:
        return _compile(program, replace(a, layer_types=a.layer_types[:layers]))

    tokens_a_row = recipe.data.max_length * PACKED_SHARE if recipe.data.packing else MEAN_LENGTH
    kernels = _kernel_seconds(program) if recipe.model.attention == "splash" else 0.0
    depths = (pattern, 2 * pattern)
    return _extrapolated(compiled, depths, a.num_layers, kernels, program.micro_batch_rows * tokens_a_row)


def published() -> dict[str, Any]:
    """The reference run's own step (arXiv 2605.25645), by Tunix alone: its stock LoRA and loss, float32
    computation on bfloat16 weights, tp 4, one padded sample of 3,072 tokens, layers recomputed whole. Its
    dropout, which the estimate does not notice, is left out."""
    return _extrapolated(_compile_published, (6, 12), 60, 0.0, MEAN_LENGTH)


def _extrapolated(
    compiled: Callable[[int], Figures], depths: tuple[int, int], layers: int, kernels: float, tokens: float
) -> dict[str, Any]:
    """The figures at a model's depth, in a line through those at two smaller ones.

    Args:
        kernels: seconds that the cost model does not count.
        tokens: real ones of the micro-batch.
    """
    first, second = (compiled(depth) for depth in depths)
    arguments, temporaries, seconds = (
        y1 + (y2 - y1) / (depths[1] - depths[0]) * (layers - depths[0])
        for y1, y2 in zip(first, second, strict=True)
    )
    return {
        "compiled_layers": depths,
        "layers": layers,
        "gib": (arguments + temporaries) / 2**30,
        "seconds": seconds,
        "kernel_seconds": kernels,
        "tokens": tokens,
        "milliseconds_per_token": 1000 * (seconds + kernels) / tokens,
    }


def _compile(program: Any, architecture: Any) -> Figures:
    import jax
    from flax import nnx

    from runtime.loss import batch_loss
    from runtime.model import abstract_model
    from runtime.settings import ModelSettings

    recipe, axes = program.recipe, dict(program.recipe.mesh.axes)
    settings = ModelSettings(
        id=recipe.model.id,
        family=program.family.name,
        dtype=recipe.model.dtype,
        attention=recipe.model.attention,
        remat=recipe.remat.policy,
    )
    built = abstract_model(program.family, architecture, settings, program.lora, axes, program.rules)
    mesh = _mesh(axes)
    graph, adapters, base = nnx.split(built.model, nnx.LoRAParam, ...)

    def step(adapters: Any, base: Any, batch: Mapping[str, Any]) -> Any:
        def loss(model: Any) -> Any:
            return batch_loss(built.forward, model, **batch)

        wanted = nnx.DiffState(0, nnx.LoRAParam)
        return nnx.value_and_grad(loss, argnums=wanted)(nnx.merge(graph, adapters, base))

    rows = batch(program.micro_batch_rows, recipe.data.max_length, mesh)
    with mesh:
        lowered = jax.jit(step).lower(placed(adapters, mesh), placed(base, mesh), rows)
    return _figures(lowered, adapters, mesh)


def _compile_published(layers: int) -> Figures:
    import jax
    import jax.numpy as jnp
    import qwix
    from flax import nnx
    from tunix.models.gemma4 import model as gemma4
    from tunix.sft import peft_trainer

    from runtime.forward import attention_mask
    from runtime.sharding import constrain

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
    mesh = _mesh({"fsdp": 1, "tp": 4})

    def step(adapters: Any, base: Any, batch: Mapping[str, Any]) -> Any:
        def loss(model: Any) -> Any:
            mask = attention_mask(batch["segment_ids"])
            arguments = batch["tokens"], batch["loss_mask"], batch["positions"], mask
            return peft_trainer._default_loss_fn(model, *arguments)

        wanted = nnx.DiffState(0, nnx.LoRAParam)
        return nnx.value_and_grad(loss, argnums=wanted)(nnx.merge(graph, adapters, base))

    with mesh:
        lowered = jax.jit(step).lower(placed(adapters, mesh), placed(base, mesh), batch(1, 3072, mesh))
    return _figures(lowered, adapters, mesh)


def _mesh(axes: Mapping[str, int]) -> Any:
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def _figures(lowered: Any, adapters: Any, mesh: Any) -> Figures:
    """Of a lowered step; AdamW's state, split as the adapters are, counts among the arguments."""
    import jax

    moments = 2 * sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(adapters))
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes + moments / mesh.size
    return arguments, memory.temp_size_in_bytes, compiled.cost_analysis()["optimal_seconds"]


def _kernel_seconds(program: Any) -> float:
    """Seconds of all layers' attention kernels on one device, at KERNEL_EFFICIENCY of its peak."""
    recipe, a = program.recipe, program.architecture
    length = recipe.data.max_length
    products = KERNEL_PRODUCTS + (2 if recipe.remat.policy in ("decoder", "block") else 0)
    flops = 0.0
    for layer in range(a.num_layers):
        seen = min(a.sliding_window, length) if a.layer_types[layer] != "full_attention" else length
        pairs = length * seen - seen * (seen - 1) / 2
        flops += products * 2 * pairs * a.layer_head_dim(layer) * a.heads(layer)
    rows = recipe.train.micro_batch_size
    return (
        flops * rows / recipe.mesh.axes["tp"] / (program.accelerator.bf16_tflops * 1e12 * KERNEL_EFFICIENCY)
    )


def main(name: str) -> None:
    import jax

    # Of the compiler's efforts the lowest: a third of the time, for some per cent of either figure.
    jax.config.update("jax_exec_time_optimization_effort", -1.0)
    jax.config.update("jax_memory_fitting_effort", -1.0)
    print(json.dumps(published() if name == "published" else estimate(name)))


if __name__ == "__main__":
    main(sys.argv[1])
