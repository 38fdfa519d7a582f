"""Build the training step of a generated train_torchax.py, with shapes as arrays. Imports jax and torch."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh

from recipec.compiler.lowering.fewer_layers import with_layers
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.abstract import AbstractStep, abstract_batch, device_bytes, scheduled_optimizer
from recipec.compiler.plan.depth import renumbered
from recipec.compiler.plan.results import Compiled
from recipec.runtime.backends.torchax.model import abstract_model, with_reference
from recipec.runtime.backends.torchax.step import Step
from recipec.runtime.model.families.transformers import TransformersArchitecture
from recipec.runtime.settings import RunSettings
from recipec.runtime.training.objectives import keeps_copy


def abstract_torchax_step(
    program: Program, layers: Sequence[int], settings: RunSettings, mesh: Mesh
) -> AbstractStep:
    """Build the step of a program's train_torchax.py with some of the model's layers.

    Args:
        layers: indices of the layers to keep.
        settings: the program's run settings.
        mesh: the mesh that is in scope.

    Raises:
        UserError: when transformers' model is not what the runtime expects.
    """
    lora, train = renumbered(settings.lora, layers), settings.train
    config, architecture = program.config, None
    if isinstance(program.architecture, TransformersArchitecture):
        architecture = program.architecture.shortened(layers)
        config = architecture.values
    else:
        config = with_layers(config, layers)
    model = abstract_model(config, settings.model, lora, mesh, settings.rules, architecture)
    data_parallel = settings.mesh.data_parallel
    rule = scheduled_optimizer(program)
    step = Step(model, rule, train, train.accumulation_steps(data_parallel), mesh)
    trained, state = step.live
    base = model.base
    if keeps_copy(train, lora):
        base = with_reference(model, base, trained)
    batch = abstract_batch(train, settings.data.max_length, data_parallel, mesh)
    sizes = Compiled(
        layers=len(layers),
        weights=device_bytes(base) + (device_bytes(trained) if lora is None else 0),
        adapters=0.0 if lora is None else device_bytes(trained),
        optimizer=device_bytes(state),
        batch=device_bytes(batch),
    )
    return AbstractStep(step, (step.live, base, batch), sizes)
