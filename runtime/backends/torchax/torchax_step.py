"""The training step of transformers' model under torchax: one micro-batch, and the optimizer's update.

`runtime.backends.torchax.torchax_run` runs it. `recipe plan --backend torchax` compiles it for a TPU from
shapes alone, which the step and the model have as attributes:

    with mesh:
        model = abstract_model(config, MODEL, LORA, mesh, SHARDING_RULES)  # config.json's values
        step = Step(model, optimizer(learning_rate(steps)), TRAIN, accumulation, mesh)
        lowered = step.jit().lower(step.live, model.base, batch)

`step.live` is (trained arrays, the optimizer's state) and `model.base` the rest, dicts and trees of
jax.ShapeDtypeStruct with shardings over the mesh, whose devices may be described instead of present.
`batch` is a micro-batch as runtime.data makes it (loss.Batch): tokens, positions and segment_ids
int32[B, T], loss_mask bool[B, T] with rows over "fsdp", norm float32[] and index int32[]. For preference
pairs, B is two rows per pair; for single answers, there is desirable float32[B] too. Only the config sets
the number of layers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from ...metrics.run_report import Named
from ...model import sharding
from ...model.lora import row_salts
from ...settings import TrainSettings
from ...training.losses import Ask, Batch, Computed
from ...training.objective_losses import objective_loss
from ...training.step import TrainState, record_norm
from .hf_model import Arrays, HfModel


class Step:
    """The functions of a training step, for arrays or for shapes.

    Args:
        model: of `abstract_model`.
        optimizer: the recipe's chain.
        settings: of the run.
        accumulation: micro-batches per optimizer step; their gradients are averaged.
        mesh: set as the current mesh while a step is traced.

    Attributes:
        live: shapes of what a step changes, with shardings.
        settings, accumulation, mesh: as given.
    """

    def __init__(
        self,
        model: HfModel,
        optimizer: optax.GradientTransformation,
        settings: TrainSettings,
        accumulation: int,
        mesh: Mesh,
    ) -> None:
        self._model = model
        self.settings, self.accumulation, self.mesh = settings, accumulation, mesh
        rule = optax.chain(record_norm(), optimizer)
        if accumulation > 1:
            rule = optax.MultiSteps(rule, accumulation).gradient_transformation()
        self._rule = rule
        self.live: TrainState = (model.trained, _placed_state(rule, model.trained, mesh))
        self._shardings = jax.tree.map(lambda leaf: leaf.sharding, self.live)
        self._dtypes = jax.tree.map(lambda leaf: leaf.dtype, self.live)

    def start(self, trained: Arrays) -> TrainState:
        """Return the state that a run starts with.

        Args:
            trained: arrays on their devices.
        """
        state = jax.jit(self._rule.init, out_shardings=self._shardings[1])(trained)
        return trained, state

    def jit(self) -> Any:
        """Compile (live, base, batch) -> (live, loss, gradient norm of the last whole step, metrics).
        `live` is donated."""
        return jax.jit(self._train, donate_argnums=0, out_shardings=(self._shardings, None, None, None))

    def jit_evaluation(self) -> Any:
        """Compile (trained, base, batch) -> the loss without dropout."""
        return jax.jit(lambda trained, base, batch: self._loss(trained, base, batch, None)[0])

    def jit_gradients(self) -> Any:
        """Compile (trained, base, batch) -> the gradients of the micro-batch's loss in float32."""
        return jax.jit(lambda trained, base, batch: self._differentiate(trained, base, batch)[1])

    def _train(
        self, live: TrainState, base: Arrays, batch: Batch
    ) -> tuple[TrainState, jax.Array, jax.Array, Named]:
        trained, state = live
        (loss, more), gradients = self._differentiate(trained, base, batch)
        updates, state = self._rule.update(gradients, state, trained)
        new = (optax.apply_updates(trained, updates), state)
        norm = optax.tree_utils.tree_get(state, "recorded_norm")
        # An update from float32 gradients may come back in another dtype than a bfloat16 state has.
        return jax.tree.map(lambda array, dtype: array.astype(dtype), new, self._dtypes), loss, norm, more

    def _differentiate(
        self, trained: Arrays, base: Arrays, batch: Batch
    ) -> tuple[tuple[jax.Array, Named], Arrays]:
        """Return the micro-batch's loss with the objective's other numbers, and the gradients in float32."""
        salts = row_salts(self.settings.seed, batch["index"], len(batch["tokens"]))
        loss, gradients = jax.value_and_grad(self._loss, has_aux=True)(trained, base, batch, salts)
        return loss, jax.tree.map(lambda gradient: gradient.astype(jnp.float32), gradients)

    def _loss(
        self, trained: Arrays, base: Arrays, batch: Batch, salts: jax.Array | None
    ) -> tuple[jax.Array, Named]:
        model = trained, base, salts
        asked: Any = (({}, base, None), (jax.lax.stop_gradient(trained), base, salts))
        reference, still = (functools.partial(_asked, self._model, values) for values in asked)
        return objective_loss(self.settings, self._model, model, (reference, still), batch)


def _asked(forward: Computed, model: Any, ask: Ask) -> Any:
    return ask(forward, model)


def _placed_state(rule: optax.GradientTransformation, trained: Arrays, mesh: Mesh) -> Any:
    """Return shapes of the optimizer's state. What has a parameter's shape is sharded like the parameter."""
    whole = sharding.named(mesh, PartitionSpec())

    def like_parameter(leaf: Any, parameter: Any) -> jax.ShapeDtypeStruct:
        place = parameter.sharding if leaf.shape == parameter.shape else whole
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    def alone(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)

    state = jax.eval_shape(rule.init, trained)
    return optax.tree_utils.tree_map_params(rule, like_parameter, state, trained, transform_non_params=alone)
