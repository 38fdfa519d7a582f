"""The optax transformations of train.py that optax itself does not have: master weights in float32, LoRA+,
and Muon.

Muon (Jordan et al. 2024; Liu et al. 2025) has orthogonalized momentum for matrices, and Adam for the rest.
optax.contrib.muon corrects the bias of its momentum, which makes other updates in a run's first steps than
the tools' Muon.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from ..model import sharding
from ..model.families.family import parameter_path


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


Axes = tuple[tuple[int, ...], tuple[int, ...]]
"""The axes of an array that are the inputs of a matrix, and those that are its outputs. Along the others,
several matrices are stacked."""

STEPS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of x, x^3 and x^5 in a Newton-Schulz step, which moves singular values from (0, 1] to about 1."""
RMS = 0.2
"""The root mean square of an orthogonalized update: about that of AdamW's (Liu et al., section 2.2)."""

AT_ONCE = 2
"""The number of arrays that are gathered at once."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class MuonState(NamedTuple):
    """State of `scale_by_muon`.

    Attributes:
        count: steps so far.
        mu: running sums of the matrices' gradients, and Adam's first moments of the other parameters.
        nu: Adam's second moments of the other parameters; one entry for matrices.
    """

    count: jax.Array
    mu: Any
    nu: Any


def scale_by_muon(
    matrices: Mapping[str, Axes],
    momentum: float,
    b1: float,
    b2: float,
    eps: float,
    dtype: DTypeLike = jnp.bfloat16,
) -> optax.GradientTransformation:
    """Return the rule without weight decay and learning rate, which follow it.

    As in the tools, eps is added to the root of Adam's second moment before its bias is corrected.

    Args:
        matrices: by the paths of parameters, with * for the number of a layer. Others have Adam's rule.
        momentum: decay of the sums; Nesterov's form adds the gradient again.
        dtype: of the Newton-Schulz steps.
    """

    def axes_of(path: Any) -> Axes | None:
        return matrices.get(NUMBER.sub("*", parameter_path(path)))

    def init(params: Any) -> MuonState:
        def second(path: Any, x: jax.Array) -> jax.Array:
            return jnp.zeros((1,) if axes_of(path) else x.shape, x.dtype)

        nu = jax.tree_util.tree_map_with_path(second, params)
        return MuonState(jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params), nu)

    def update(updates: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        count = optax.safe_increment(state.count)
        corrections = tuple(1 - b**count for b in (b1, b2))
        tokens: list[jax.Array] = []

        def one(path: Any, g: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, ...]:
            axes = axes_of(path)
            if axes is not None:
                mu = momentum * mu + g
                x = g + momentum * mu
                # An array waits for an earlier one: otherwise XLA gathers all matrices of the model at once.
                if len(tokens) >= AT_ONCE:
                    x = x + 0 * tokens[-AT_ONCE]
                step, token = orthogonalized(x, axes, dtype)
                tokens.append(token.astype(x.dtype))
                return step, mu, nu
            mu, nu = b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * g**2
            step = mu / (jnp.sqrt(nu) + eps) * jnp.sqrt(corrections[1]) / corrections[0]
            return step, mu, nu

        results = jax.tree_util.tree_map_with_path(one, updates, state.mu, state.nu)
        steps, mu, nu = jax.tree.transpose(jax.tree.structure(updates), jax.tree.structure((0,) * 3), results)
        return steps, MuonState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def orthogonalized(x: jax.Array, axes: Axes, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Orthogonalize each matrix of an array, and scale it to the RMS of a matrix of its size.

    Each device multiplies its own part of the longer side. An array that has several axes for a side is
    gathered before and after: XLA reshapes few of their shardings without copies on all devices.

    Returns:
        The array, and one number of the result.
    """
    inputs, outputs = axes
    stacked = tuple(axis for axis in range(x.ndim) if axis not in (*inputs, *outputs))
    order = (*stacked, *inputs, *outputs)
    sizes = [math.prod(x.shape[axis] for axis in some) for some in (stacked, inputs, outputs)]
    whole = _gathered if len(inputs) + len(outputs) > 2 else lambda x: x
    turned = whole(x.astype(dtype)).transpose(order)
    matrix, tall = turned.reshape(sizes), sizes[1] > sizes[2]
    matrices = whole(_newton_schulz(matrix.mT if tall else matrix))
    matrices = (matrices.mT if tall else matrices).reshape(turned.shape)
    back = matrices.transpose(sorted(range(x.ndim), key=order.__getitem__))
    return back.astype(x.dtype) * (RMS * math.sqrt(max(sizes[1:]))), matrices.ravel()[0]


def _gathered(x: jax.Array) -> jax.Array:
    return sharding.constrain_weight(x, (None,) * x.ndim)


def _newton_schulz(x: jax.Array) -> jax.Array:
    """Return [N, S, L] matrices with singular values of about 1, for S of at most L."""
    a, b, c = COEFFICIENTS
    x = sharding.constrain_weight(x, (None, None, "fsdp"))
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-7)
    for _ in range(STEPS):
        squared = x @ x.mT
        x = a * x + (b * squared + c * squared @ squared) @ x
    return x
