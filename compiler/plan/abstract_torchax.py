"""The training step of a generated train_torchax.py with shapes for arrays. Imports jax and torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.abstract import SCHEDULED_STEPS, AbstractStep, abstract_batch, device_bytes
from recipec.compiler.plan.depth import renumbered, shortened
from recipec.compiler.plan.hf_config import hf_config
from recipec.compiler.plan.results import Compiled
from recipec.runtime.backends.torchax.model import abstract_model
from recipec.runtime.backends.torchax.step import Step


def abstract_torchax_step(
    program: Program, layers: Sequence[int], script: Mapping[str, Any], mesh: Mesh
) -> AbstractStep:
    """The step of a program's train_torchax.py with some of the model's layers.

    Args:
        script: what train_torchax.py states: its constants, `learning_rate` and `optimizer`.
        mesh: in scope.

    Raises:
        UserError: when transformers' model is not what the runtime expects.
    """
    lora, train = renumbered(script.get("LORA"), layers), script["TRAIN"]
    config = hf_config(shortened(program.architecture, layers))
    model = abstract_model(config, script["MODEL"], lora, mesh, script.get("SHARDING_RULES", ()))
    data_parallel = script["MESH"].data_parallel
    rule = script["optimizer"](script["learning_rate"](SCHEDULED_STEPS))
    step = Step(model, rule, train, train.accumulation_steps(data_parallel), mesh)
    trained, state = step.live
    batch = abstract_batch(train, script["DATA"].max_length, data_parallel, mesh)
    sizes = Compiled(
        layers=len(layers),
        weights=device_bytes(model.base) + (device_bytes(trained) if lora is None else 0),
        adapters=0.0 if lora is None else device_bytes(trained),
        optimizer=device_bytes(state),
        batch=device_bytes(batch),
    )
    return AbstractStep(step, (step.live, model.base, batch), sizes)
