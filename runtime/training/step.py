"""The training step: one micro-batch forward and backward, and the optimizer's update.

`runtime.training.trainer` runs it; `recipe plan` compiles the same functions for a TPU from shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from ..metrics.run_report import Named
from ..model import sharding
from ..model.expert_load import Collected, collected
from ..model.loading import Built
from ..model.lora import row_salts
from ..model.noise import noisy_embeddings
from ..settings import TrainSettings
from .losses import Batch
from .objective_losses import balanced

TrainState = tuple[Any, Any]
"""The state that a step changes: the trained arrays and the optimizer's state."""


Loss = Callable[[nnx.Module, Batch, nnx.Module | None], tuple[jax.Array, Named]]
"""(model, micro-batch, the teacher or the model that training starts from) -> the loss, and the objective's
metrics. The third is None where it is the model without its adapters, or where the objective does not use
it."""


class GradientNorm(NamedTuple):
    """State of `record_norm`: the norm of the last step's gradient, float32[]."""

    recorded_norm: jax.Array


def record_norm() -> optax.GradientTransformation:
    """Pass gradients through, and keep their global norm in the state."""

    def update(updates: Any, state: GradientNorm, params: Any = None) -> tuple[Any, GradientNorm]:
        return updates, GradientNorm(optax.global_norm(updates).astype(jnp.float32))

    return optax.GradientTransformation(lambda params: GradientNorm(jnp.zeros([], jnp.float32)), update)


def update_rule(built: Built, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the recipe's chain, after the norm of the gradient."""
    # A checkpoint numbers the states of a chain. Earlier versions had a transformation without a state first.
    return optax.chain(optax.identity(), record_norm(), optimizer)


def trained_type(built: Built) -> type[nnx.Variable]:
    """Return the type of the model's variables that are trained."""
    return nnx.Param if built.provider is None else nnx.LoRAParam


class Step:
    """The functions of a training step, for arrays or for shapes.

    The functions take and return the trained arrays and the optimizer's state, and only take the rest of the
    model. Tunix's own step returns the whole model: a second copy of the base weights on the devices.

    Args:
        built: the model.
        optimizer: of that model.
        settings: of the run.
        mesh: in scope while a step is traced.
        loss: computes the loss of a micro-batch; `objective_losses.micro_batch_loss`, except in tests.
        reference: the trained arrays as training starts, if `keeps_copy` says so; else None.

    Attributes:
        live: the trained arrays and the optimizer's state.
        base: the arrays that a step only reads, and the reference's or the teacher's.
        shardings: of `live`.
    """

    def __init__(
        self,
        built: Built,
        optimizer: nnx.Optimizer,
        settings: TrainSettings,
        mesh: Mesh,
        loss: Loss,
        reference: Any = None,
    ) -> None:
        self._provider = built.provider
        self._seed, self._balance = settings.seed, settings.router_aux_loss_coef
        self._loss = loss
        self._noise, self._forward = settings.neftune_noise_alpha, built.forward
        self._experts = bool(built.forward.architecture.expert_layers)
        self._trained = trained_type(built)
        self._model_graph, trained, rest = nnx.split(built.model, self._trained, ...)
        self._teacher_graph = None
        if built.teacher is not None:
            self._teacher_graph, reference = nnx.split(built.teacher.model)
        self.base = (rest, reference)
        self._optimizer_graph, state = nnx.split(optimizer)
        self.live: TrainState = (trained, state)
        self.shardings = (shardings_of(trained, mesh), shardings_of(state, mesh))
        self._dtypes = jax.tree.map(lambda array: array.dtype, self.live)

    def jit(self) -> Any:
        """Compile (live, base, batch) -> (live, loss, norm of the last whole step's gradient, metrics).
        `live` is donated."""
        return jax.jit(self._train, donate_argnums=0, out_shardings=(self.shardings, None, None, None))

    def jit_evaluation(self) -> Any:
        """Compile (trained, base, batch) -> the loss without dropout."""
        return jax.jit(self._evaluate)

    def jit_gradients(self) -> Any:
        """Compile (trained, base, batch) -> the gradients of the micro-batch's loss in float32: the gradients
        that the training step uses, and does not return."""
        return jax.jit(self._gradients_of)

    def merged(self, trained: Any, base: Any) -> nnx.Module:
        """Build the model from its arrays."""
        return nnx.merge(self._model_graph, trained, base[0])

    def _train(
        self, live: TrainState, base: Any, batch: Batch
    ) -> tuple[TrainState, jax.Array, jax.Array, Named]:
        model, before = self.models(live[0], base)
        optimizer = nnx.merge(self._optimizer_graph, live[1])
        (loss, more), gradients = self._differentiate(model, before, batch)
        optimizer.update(model, gradients)
        norm = optax.tree_utils.tree_get(nnx.pure(optimizer.opt_state), "recorded_norm")
        # A rule that takes float32 gradients may return another dtype than a bfloat16 state's.
        new = (nnx.state(model, self._trained), nnx.state(optimizer))
        return jax.tree.map(lambda array, dtype: array.astype(dtype), new, self._dtypes), loss, norm, more

    def _evaluate(self, trained: Any, base: Any, batch: Batch) -> jax.Array:
        model, before = self.models(trained, base)
        return self._loss(model, batch, before)[0]

    def models(self, trained: Any, base: Any) -> tuple[nnx.Module, nnx.Module | None]:
        """Return the model, and the teacher, or the model that training starts from if a copy is kept."""
        rest, reference = base
        before = None
        if self._teacher_graph is not None:
            before = nnx.merge(self._teacher_graph, reference)
        elif reference is not None:
            before = nnx.merge(self._model_graph, reference, rest)
        return nnx.merge(self._model_graph, trained, rest), before

    def _gradients_of(self, trained: Any, base: Any, batch: Batch) -> Any:
        return self._differentiate(*self.models(trained, base), batch)[1]

    def _differentiate(
        self, model: nnx.Module, before: nnx.Module | None, inputs: Batch
    ) -> tuple[tuple[jax.Array, Named], Any]:
        """Return the micro-batch's loss with the objective's metrics, and its gradients in float32."""
        provider = self._provider

        def loss_of(model: nnx.Module) -> tuple[jax.Array, Named]:
            training: AbstractContextManager[None] = nullcontext()
            if provider is not None:
                training = provider.training(self._seed, inputs["index"], len(inputs["tokens"]))
            with training, self._noisy(inputs), self._collected(inputs["segment_ids"]) as loads:
                loss, more = self._loss(model, inputs, before)
            if loads is None:
                return loss, more
            return balanced(loss, more, loads, self._balance)

        wanted = nnx.DiffState(0, self._trained)
        loss, gradients = nnx.value_and_grad(loss_of, argnums=wanted, has_aux=True)(model)
        return loss, jax.tree.map(lambda gradient: gradient.astype(jnp.float32), gradients)

    def _noisy(self, inputs: Batch) -> AbstractContextManager[Any]:
        """Add the recipe's noise to embeddings that are traced in this context."""
        if self._noise is None:
            return nullcontext()
        salts = row_salts(self._seed, inputs["index"], len(inputs["tokens"]))
        # transformers' embedding scales its own output in some families.
        a: Any = self._forward.architecture
        scale = a.embedding_scale if self._forward.family.scaled_embedding else 1.0
        return noisy_embeddings(self._noise, salts, scale)

    def _collected(self, segment_ids: jax.Array) -> AbstractContextManager[Collected | None]:
        """Record the loads of experts that are traced in this context; None for a model without experts."""
        if not self._experts:
            return nullcontext()
        return collected(segment_ids, self._balance > 0)


def shardings_of(state: Any, mesh: Mesh) -> Any:
    """Return the sharding of each array of a state, from its variables' metadata."""
    return jax.tree.map(
        lambda spec: sharding.named(mesh, spec),
        nnx.get_partition_spec(state),
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )


def fit_shardings(optimizer: nnx.Optimizer, mesh: Mesh) -> None:
    """Correct the shardings that flax copies from the parameters to states of other shapes, and the types of
    the states of modules that are trained whole: flax uses the type in which the model computes them.

    Factored moments have fewer dimensions than their parameter, and placeholders have one entry.
    optax.MultiSteps accumulates gradients in float32.
    """
    for path, node in nnx.iter_graph(optimizer):
        if not isinstance(node, nnx.Variable) or "out_sharding" not in node.get_metadata():
            continue
        value, metadata = node.get_raw_value(), node.get_metadata()
        if "kept_in" in metadata and value.dtype == metadata["computed_in"]:
            kept = jnp.dtype(jnp.float32) if "acc_grads" in path else metadata["kept_in"]
            shapes = isinstance(value, jax.ShapeDtypeStruct)
            node.set_raw_value(value.update(dtype=kept) if shapes else value.astype(kept))
        shape = value.shape
        spec = tuple(node.get_metadata()["out_sharding"] or ())
        fits = len(shape) == len(spec)
        node.set_metadata(
            out_sharding=sharding.divisible(shape, spec, mesh.shape) if fits else (None,) * len(shape)
        )
