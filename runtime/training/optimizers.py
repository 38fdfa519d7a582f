"""The optax transformations of train.py that optax itself does not have."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..model.families.base import parameter_path


class MasterWeights(NamedTuple):
    """State of `master_weights`.

    Attributes:
        master: the parameters in float32.
        inner: the state of the wrapped rule, whose moments are float32 too.
    """

    master: Any
    inner: Any


def master_weights(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Run a rule on a float32 copy of the parameters, and round the copy to the parameters at each step.

    A bfloat16 number has 8 bits of precision: an update below 1/512 of a weight leaves the weight as it was,
    however often it comes. On the copy such updates add up. On float32 parameters this is the rule itself.

    Args:
        rule: any optax rule; it sees the copy as its parameters, and float32 gradients.
    """

    def init(params: Any) -> MasterWeights:
        # A copy even of float32 parameters: both are donated to the training step.
        master = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
        return MasterWeights(master, rule.init(master))

    def update(updates: Any, state: MasterWeights, params: Any = None) -> tuple[Any, MasterWeights]:
        if params is None:
            raise ValueError("master_weights needs the parameters")
        changes, inner = rule.update(_float32(updates), state.inner, state.master)
        master = optax.apply_updates(state.master, changes)
        # The float32 difference of two numbers of the parameter's dtype: optax.apply_updates adds the
        # old parameter to it, and the sum is exactly the rounded copy.
        rounded = jax.tree.map(lambda new, old: new.astype(old.dtype), master, params)
        return optax.tree.sub(_float32(rounded), _float32(params)), MasterWeights(master, inner)

    return optax.GradientTransformation(init, update)


def faster_b(ratio: float) -> optax.GradientTransformation:
    """Multiply B's updates, as if its learning rate were `ratio` times A's: LoRA+ (Hayou et al. 2024).

    DoRA's magnitudes are scaled like B, as in PEFT. Put this last in a chain.
    """

    def faster(path: Any, update: jax.Array) -> jax.Array:
        return update * ratio if parameter_path(path).lower().endswith(("lora_b", "lora_m")) else update

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(faster, updates))


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)
