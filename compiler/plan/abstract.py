"""Build the training step of a generated train.py, with shapes in place of arrays. Imports jax."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
import qwix
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from recipec.compiler.emitters.python_text import source
from recipec.compiler.lowering.optimization import hyperparameters, matrices, optimizer, schedule
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.run_length import warmup_steps
from recipec.compiler.plan.depth import renumbered, shortened
from recipec.compiler.plan.results import Compiled
from recipec.runtime.model.families.base import parameter_path
from recipec.runtime.model.loading import Built, abstract_model
from recipec.runtime.model.partition_rules import row_axes
from recipec.runtime.model.quantize import Layout
from recipec.runtime.model.sharding import named
from recipec.runtime.settings import RunSettings
from recipec.runtime.training import muon, optimizers
from recipec.runtime.training.objectives import OBJECTIVES, keeps_copy
from recipec.runtime.training.step import (
    Step,
    fit_shardings,
    micro_batch_loss,
    shardings_of,
    trained_type,
    update_rule,
)

SCHEDULED_STEPS = 1000
"""Steps of the learning rate's schedule. The real number depends on the data, and a compile is the same."""


class Jitted(Protocol):
    """The interface of a backend's step."""

    def jit(self) -> Any: ...


@dataclass(frozen=True)
class AbstractStep:
    """A step to lower.

    Attributes:
        step: the step of runtime.training.step, which train.py runs, or another backend's.
        arguments: arguments of `step.jit()`, as shapes with shardings.
        sizes: bytes of the arguments on one device, by kind.
    """

    step: Jitted
    arguments: tuple[Any, Any, Any]
    sizes: Compiled


def abstract_step(program: Program, layers: Sequence[int], settings: RunSettings, mesh: Mesh) -> AbstractStep:
    """Build the step of a program's train.py with some of the model's layers.

    Args:
        layers: indices of the layers to keep.
        settings: the program's run settings.
        mesh: the mesh that is in scope.

    Raises:
        UserError: when Tunix's model is not what the runtime expects.
    """
    lora, train = renumbered(settings.lora, layers), settings.train
    built = abstract_model(
        program.family,
        shortened(program.architecture, layers),
        settings.model,
        lora,
        dict(mesh.shape),
        settings.rules,
    )
    accumulation = train.accumulation_steps(settings.mesh.data_parallel)
    rule = abstract_optimizer(built, scheduled_optimizer(program), accumulation, mesh)
    loss = functools.partial(micro_batch_loss, built, train)
    step = Step(built, rule, train, mesh, loss)
    trained, state = (
        placed(tree, sharding) for tree, sharding in zip(step.live, step.shardings, strict=True)
    )
    reference = trained if keeps_copy(train, lora) else None
    base = (placed_base(step.base[0], built.quantized, mesh), reference)
    batch = abstract_batch(train, settings.data.max_length, settings.mesh.data_parallel, mesh)
    sizes = Compiled(
        layers=len(layers),
        weights=device_bytes(base) + (device_bytes(trained) if lora is None else 0),
        adapters=0.0 if lora is None else device_bytes(trained),
        optimizer=device_bytes(state),
        batch=device_bytes(batch),
    )
    return AbstractStep(step, ((trained, state), base, batch), sizes)


def abstract_optimizer(
    built: Built, optimizer: optax.GradientTransformation, accumulation: int, mesh: Mesh
) -> nnx.Optimizer:
    """Make the optimizer of a model of shapes, as Tunix's trainer makes it for a model of arrays.

    Args:
        built: from `runtime.model.loading.abstract_model`.
        optimizer: the recipe's chain.
        accumulation: micro-batches of an optimizer step.
    """
    rule: Any = update_rule(built, optimizer)
    if accumulation > 1:
        rule = optax.MultiSteps(rule, accumulation)
    made = nnx.eval_shape(lambda model: nnx.Optimizer(model, rule, wrt=trained_type(built)), built.model)
    fit_shardings(made, mesh)
    return made


def scheduled_optimizer(program: Program) -> optax.GradientTransformation:
    """Build train.py's optimizer with its learning rate schedule, by evaluating the same expressions."""
    recipe = program.recipe
    names: dict[str, Any] = {
        "optax": optax,
        "scale_by_muon": muon.scale_by_muon,
        "MATRICES": matrices(program.parameters),
        "faster_b": optimizers.faster_b,
        "master_weights": optimizers.master_weights,
        "LORA": recipe.lora,
        "steps": SCHEDULED_STEPS,
        "warmup": warmup_steps(recipe, SCHEDULED_STEPS),
        **hyperparameters(recipe.train),
    }
    names["schedule"] = eval(source(schedule(recipe.train)), names)
    rule: optax.GradientTransformation = eval(source(optimizer(recipe)), names)
    return rule


def abstract_batch(train: Any, length: int, data_parallel: int, mesh: Mesh) -> dict[str, Any]:
    """Return the shapes of a micro-batch of runtime.data; a preference has two rows."""
    shape = (train.micro_batch_size * data_parallel * OBJECTIVES[train.objective].rows, length)
    rows = NamedSharding(mesh, PartitionSpec(row_axes(shape[0], dict(mesh.shape))))
    whole = NamedSharding(mesh, PartitionSpec())
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
    judged = OBJECTIVES[train.objective].format == "unpaired_preference"
    each = jax.ShapeDtypeStruct(shape[:1], jnp.float32, sharding=rows)
    return {
        **({"desirable": each} if judged else {}),
        "tokens": ids,
        "positions": ids,
        "segment_ids": ids,
        "loss_mask": jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=rows),
        "norm": jax.ShapeDtypeStruct((), jnp.float32, sharding=whole),
        "index": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
    }


def placed(tree: Any, shardings: Any) -> Any:
    """Return a tree of shapes, each with its sharding."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def placed_base(state: Any, quantized: Mapping[str, Layout], mesh: Mesh) -> Any:
    """Add shardings to the state of a model that is not trained.

    A quantized weight has codes and scales, each with its own sharding.

    Args:
        quantized: the layouts of `runtime.model.loading.Built`.
    """

    def one(path: Any, leaf: Any, sharding: NamedSharding) -> Any:
        if not isinstance(leaf, qwix.QArray):
            return placed(leaf, sharding)
        layout = quantized[parameter_path(path)]
        codes, scales = (named(mesh, spec) for spec in (layout.spec, layout.scale_spec))
        return replace(leaf, qvalue=placed(leaf.qvalue, codes), scale=placed(leaf.scale, scales))

    return jax.tree_util.tree_map_with_path(
        one, state, shardings_of(state, mesh), is_leaf=lambda node: isinstance(node, qwix.QArray)
    )


def device_bytes(tree: Any) -> float:
    """Return the bytes of a tree's arrays on one device, without the padding of their layout."""
    return float(
        sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * _bits(leaf.dtype) / 8
            for leaf in jax.tree.leaves(tree)
        )
    )


def _bits(dtype: Any) -> int:
    name = jnp.dtype(dtype).name
    return 4 if name in ("int4", "uint4") else jnp.dtype(dtype).itemsize * 8
