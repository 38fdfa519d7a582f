"""Build the training step of a generated script, with shapes in place of arrays, and its topology.

This module imports jax. It imports torch only for the step of train_torchax.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import qwix
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from recipec.compiler.lowering.assumed_pictures import row_patches
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.hardware import Accelerator, generations
from recipec.compiler.lowering.optimization import hyperparameters, matrices, optimizer, schedule
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.run_length import warmup_steps
from recipec.compiler.miniature.fewer_layers import with_layers
from recipec.compiler.plan.depth import renumbered, shortened
from recipec.compiler.plan.results import Compiled
from recipec.compiler.python_text import source
from recipec.runtime.model.decode import jit_generate
from recipec.runtime.model.families.description import DecoderArchitecture
from recipec.runtime.model.families.family import parameter_path
from recipec.runtime.model.families.transformers import TransformersArchitecture
from recipec.runtime.model.loading import Built, abstract_model
from recipec.runtime.model.partition_rules import row_axes, rows_at_once
from recipec.runtime.model.quantize import Layout
from recipec.runtime.model.sharding import named
from recipec.runtime.settings import RunSettings
from recipec.runtime.training import optimizers
from recipec.runtime.training.objective_losses import micro_batch_loss
from recipec.runtime.training.objectives import OBJECTIVES, ROW, TOKEN, further_arrays, keeps_copy, stores
from recipec.runtime.training.rollout_layout import RolloutLayout
from recipec.runtime.training.rollouts import generation_of
from recipec.runtime.training.step import Step, fit_shardings, shardings_of, trained_type, update_rule

SCHEDULED_STEPS = 1000
"""Steps of the learning rate's schedule. The real number depends on the data, and a compile is the same."""


@dataclass(frozen=True)
class AbstractStep:
    """A step to lower.

    Attributes:
        step: the step of runtime.training.step, which train.py runs, or another backend's.
        arguments: arguments of `step.jit()`, as shapes with shardings.
        sizes: bytes of the arguments on one device, by kind.
    """

    step: Any
    arguments: tuple[Any, Any, Any]
    sizes: Compiled


def abstract_step(
    program: Program,
    layers: Sequence[int],
    settings: RunSettings,
    mesh: Mesh,
    backend: Backend = Backend.TUNIX,
) -> AbstractStep:
    """Build the step of a backend's script with some of the model's layers.

    Args:
        layers: indices of the layers to keep.
        settings: the program's run settings.
        mesh: the mesh that is in scope.

    Raises:
        UserError: when the backend's model is not what the runtime expects.
    """
    lora, train = renumbered(settings.lora, layers), settings.train
    rule = scheduled_optimizer(program)
    build = _torchax if backend is Backend.TORCHAX else _tunix
    step, (trained, state), base = build(program, layers, replace(settings, lora=lora), mesh, rule)
    batch = abstract_batch(
        train, settings.data.max_length, settings.mesh.data_parallel, mesh, program.recipe.rollout
    )
    batch |= abstract_pictures(program, batch["tokens"])
    sizes = Compiled(
        layers=len(layers),
        weights=device_bytes(base) + (device_bytes(trained) if lora is None else 0),
        adapters=0.0 if lora is None else device_bytes(trained),
        optimizer=device_bytes(state),
        batch=device_bytes(batch),
    )
    return AbstractStep(step, ((trained, state), base, batch), sizes)


def _tunix(
    program: Program, layers: Sequence[int], settings: RunSettings, mesh: Mesh, optimizer: Any
) -> tuple[Any, tuple[Any, Any], Any]:
    """Return the step of train.py, what it changes, and its base."""
    train = settings.train
    built = abstract_model(
        program.family,
        shortened(program.architecture, layers),
        settings.model,
        settings.lora,
        dict(mesh.shape),
        settings.rules,
    )
    accumulation = train.accumulation_steps(settings.mesh.data_parallel)
    rule = abstract_optimizer(built, optimizer, accumulation, mesh)
    built = replace(built, teacher=_teacher(program, settings, mesh))
    step = Step(built, rule, train, mesh, functools.partial(micro_batch_loss, built, train))
    trained, state = (
        placed(tree, sharding) for tree, sharding in zip(step.live, step.shardings, strict=True)
    )
    reference = trained if keeps_copy(train, settings.lora) else None
    if built.teacher is not None:
        reference = placed_base(step.base[1], built.teacher.quantized, mesh)
    return step, (trained, state), (placed_base(step.base[0], built.quantized, mesh), reference)


def abstract_generation(
    program: Program, layers: Sequence[int], settings: RunSettings, mesh: Mesh
) -> tuple[Any, tuple[Any, Any, Any], Mesh, Compiled]:
    """Build the program that generates a run's completions, with some of the model's layers.

    Args:
        layers, settings, mesh: as for `abstract_step`; the mesh is the training step's.

    Returns:
        The function to lower, its arguments, the mesh to lower it in, and the bytes of the arguments.
    """
    about, rollout = program.generated, program.recipe.rollout
    assert about is not None
    lora, axes = renumbered(settings.lora, layers), dict(rollout.axes or mesh.shape)
    built = abstract_model(
        program.family,
        shortened(program.architecture, layers),
        settings.model,
        lora,
        dict(mesh.shape),
        settings.rules,
    )
    layout = RolloutLayout(built, mesh, axes, settings.rules)
    graph, trained, base = nnx.split(built.model, trained_type(built), ...)
    trained, base = (placed(tree, layout.shardings(tree)) for tree in (trained, base))
    run = jit_generate(
        built.forward,
        lambda trained, base: nnx.merge(graph, trained, base),
        layout.mesh,
        generation_of(about, [0]),
    )
    count = rows_at_once(settings.train.global_batch_size, rollout.rows, axes)
    rows = NamedSharding(layout.mesh, PartitionSpec(row_axes(count, axes)))
    ids = jax.ShapeDtypeStruct((count, about.prompt), jnp.int32, sharding=rows)
    salts = jax.ShapeDtypeStruct((count,), jnp.uint32, sharding=rows)
    prompts = {"tokens": ids, "segment_ids": ids, "salts": salts}
    sizes = Compiled(
        layers=len(layers),
        weights=device_bytes(base) + (device_bytes(trained) if lora is None else 0),
        adapters=0.0 if lora is None else device_bytes(trained),
        optimizer=0.0,
        batch=device_bytes(prompts),
    )
    return run, (trained, base, prompts), layout.mesh, sizes


def _teacher(program: Program, settings: RunSettings, mesh: Mesh) -> Built | None:
    """Return the teacher with all its layers, None without one on the devices."""
    if program.teacher is None or settings.teacher is None or stores(settings.train):
        return None
    about = program.teacher
    return abstract_model(about.family, about.architecture, settings.teacher, None, dict(mesh.shape))


def _torchax(
    program: Program, layers: Sequence[int], settings: RunSettings, mesh: Mesh, optimizer: Any
) -> tuple[Any, tuple[Any, Any], Any]:
    """Return the same of train_torchax.py."""
    from recipec.runtime.backends.torchax.hf_model import abstract_model, with_reference
    from recipec.runtime.backends.torchax.torchax_step import Step

    train, architecture = settings.train, None
    if isinstance(program.architecture, TransformersArchitecture):
        architecture = program.architecture.shortened(layers)
        config = architecture.values
    else:
        config = with_layers(program.config, layers)
    model = abstract_model(config, settings.model, settings.lora, mesh, settings.rules, architecture)
    accumulation = train.accumulation_steps(settings.mesh.data_parallel)
    step = Step(model, optimizer, train, accumulation, mesh)
    if not keeps_copy(train, settings.lora):
        return step, step.live, model.base
    return step, step.live, with_reference(model, model.base, step.live[0])


def abstract_optimizer(
    built: Built, optimizer: optax.GradientTransformation, accumulation: int, mesh: Mesh
) -> nnx.Optimizer:
    """Make the optimizer of a model of shapes, as Tunix's trainer makes it for a model of arrays."""
    rule: Any = update_rule(built, optimizer)
    if accumulation > 1:
        rule = optax.MultiSteps(rule, accumulation)
    abstract = nnx.eval_shape(lambda model: nnx.Optimizer(model, rule, wrt=trained_type(built)), built.model)
    fit_shardings(abstract, mesh)
    return abstract


def scheduled_optimizer(program: Program) -> optax.GradientTransformation:
    """Build train.py's optimizer with its learning rate schedule, by evaluating the same expressions."""
    recipe = program.recipe
    names: dict[str, Any] = {
        "optax": optax,
        "scale_by_muon": optimizers.scale_by_muon,
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


def abstract_batch(
    train: Any, length: int, data_parallel: int, mesh: Mesh, rollout: Any = None
) -> dict[str, Any]:
    """Return the shapes of a micro-batch of runtime.data; a preference has two rows."""
    shape = (train.micro_batch_size * data_parallel * OBJECTIVES[train.objective].rows, length)
    rows = NamedSharding(mesh, PartitionSpec(row_axes(shape[0], dict(mesh.shape))))
    whole = NamedSharding(mesh, PartitionSpec())
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
    sizes = {ROW: shape[:1], TOKEN: shape}
    return {
        **{
            name: jax.ShapeDtypeStruct((*sizes[array.size], *array.more), array.dtype, sharding=rows)
            for name, array in further_arrays(train, rollout).items()
        },
        "tokens": ids,
        "positions": ids,
        "segment_ids": ids,
        "loss_mask": jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=rows),
        "norm": jax.ShapeDtypeStruct((), jnp.float32, sharding=whole),
        "index": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
    }


def abstract_pictures(program: Program, tokens: Any) -> dict[str, Any]:
    """Return the shapes of a micro-batch's pictures; {} without any.

    Args:
        tokens: of the micro-batch, int32[B, T].
    """
    architecture, patches = program.architecture, row_patches(program)
    vision = architecture.vision
    if vision is None or not patches:
        return {}
    rows = tokens.shape[0]
    shapes = {
        "patches": ((rows, patches, vision.patch_features), jnp.float32),
        "patch_images": ((rows, patches), jnp.int32),
        "patch_positions": ((rows, patches, 2), jnp.int32),
        "image_features": (tokens.shape, jnp.int32),
        "image_ids": (tokens.shape, jnp.int32),
    }
    if isinstance(architecture, DecoderArchitecture) and architecture.turned_axes:
        shapes["rotary_positions"] = ((*tokens.shape, 3), jnp.int32)
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=tokens.sharding)
        for name, (shape, dtype) in shapes.items()
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


@functools.cache
def devices(accelerator: Accelerator) -> Any:
    """Return the devices of all slices.

    Raises:
        Exception: when libtpu does not know the topology; jax raises several kinds.
    """
    name = f"{accelerator.generation}:{accelerator.topology}"
    more: dict[str, Any] = {}
    if config := generations()[accelerator.generation]["compiler"]["chip_config"]:
        more["chip_config_name"] = config
    if accelerator.slices > 1:
        more["num_slices"] = accelerator.slices
    if accelerator.chips == accelerator.slices:
        more["chips_per_host_bounds"] = (1, 1, 1)  # one chip on a host; libtpu assumes four chips on a host
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **more).devices


def places(devices: Iterable[Any], slices: int = 1) -> list[tuple[int, ...]]:
    """Return where the devices of the first slice are, in the order of the mesh, whose first axis is slices.

    Each place is the coordinates of the device's chip, and the device's number on the chip.
    """
    every = [(*device.coords, device.core_on_chip) for device in devices]
    return every[: len(every) // slices]
