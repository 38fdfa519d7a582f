"""The arrays of a training step in another layout on the same devices, for generating text.

A decode step reads all weights for one token of each row. On a mesh that splits weights over fsdp it gathers
them for every token; over tp only activations move. With adapters, the base is placed in this layout once,
next to the step's own copy, and each step hands over only the adapters. Without, all weights are handed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ..errors import UserError
from ..model.decode import Completions, Generation, Prompts, jit_generate
from ..model.loading import Built, abstract_model, variables_of
from ..model.partition_rules import Rule, divisible
from ..model.sharding import Rows, arrange, named


class RolloutLayout:
    """Where rollouts compute.

    Args:
        built: the model that is trained.
        mesh: of the training step.
        axes: size of each axis of the rollouts' mesh.
        rules: sharding rules of the rollouts' mesh.

    Attributes:
        mesh: of the rollouts, on the training mesh's devices.

    Raises:
        UserError: when the axes need another number of devices.
    """

    def __init__(self, built: Built, mesh: Mesh, axes: Mapping[str, int], rules: Sequence[Rule] = ()) -> None:
        devices = math.prod(axes.values())
        if devices != mesh.size:
            raise UserError(
                f"rollout axes {dict(axes)} need {devices} devices, the mesh has {mesh.size}",
                "give axes whose sizes multiply to the devices of the mesh",
            )
        self.mesh = mesh if dict(axes) == dict(mesh.shape) else arrange(axes, mesh.devices.flatten().tolist())
        self._forward = built.forward
        about = built.forward
        shapes = abstract_model(about.family, about.architecture, about.settings, built.lora, axes, rules)
        self._specs = {
            path: tuple(variable.get_metadata()["out_sharding"])
            for path, variable in variables_of(shapes.model).items()
        }

    def place(self, state: nnx.State) -> nnx.State:
        """Return the arrays of a part of the model, such as `Step.live[0]` or `Step.base[0]`, in this layout.

        Arrays that have it already are not copied.
        """
        placed: nnx.State = jax.device_put(state, self.shardings(state))
        return placed

    def shardings(self, state: nnx.State) -> nnx.State:
        """Return the sharding of each array of a part of the model in this layout."""
        leaves, tree = jax.tree.flatten(state)
        specs = [
            self._specs[".".join(map(str, path))]
            for path, variable in state.flat_state()
            for _ in jax.tree.leaves(variable)
        ]
        layout = [
            named(self.mesh, divisible(leaf.shape, spec, self.mesh.shape))
            for leaf, spec in zip(leaves, specs, strict=True)
        ]
        shardings: nnx.State = jax.tree.unflatten(tree, layout)
        return shardings

    def jit_generate(
        self, merge: Callable[[Any, Any], Any], generation: Generation
    ) -> Callable[[Any, Any, Prompts], Completions]:
        """Compile (trained, base, prompts) -> Completions of arrays that `place` has returned.

        Args:
            merge: builds the model, such as `Step.merged`, without the reference.
        """
        run = jit_generate(self._forward, merge, self.mesh, generation)

        def called(trained: Any, base: Any, prompts: Prompts) -> Completions:
            with self.mesh:
                rows = Rows.of(self.mesh, len(prompts["tokens"]))
                here = {name: np.asarray(value)[list(rows.here)] for name, value in prompts.items()}
                return run(trained, base, rows.place(here))

        return called
