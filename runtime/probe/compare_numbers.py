"""Compare the miniature's numbers on a mesh with those of one CPU device in float32.

The miniature has random weights from a fixed seed, and one batch of random tokens. First gradients are
compared array by array, and B's also by element, because only B moves a LoRA model at first. Then the losses
of twenty steps are compared. One such failure is known: LoRA with all four chips of a v5p-8 on the data axis
learns differently than on other meshes (marin-community/marin, issue 4903).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh

from ..merging.verify import logits as logits_of
from ..model.families.family import parameter_path
from ..model.loading import Built, build
from ..model.sharding import Rows, arrange
from ..settings import RunSettings
from ..training.objective_losses import micro_batch_loss
from ..training.objectives import OBJECTIVES, further_arrays
from ..training.step import Step, fit_shardings, trained_type, update_rule
from ..training.trace import count_targets
from ..weights.checkpoint import HFCheckpoint

STEPS, LENGTH, LEARNING_RATE = 20, 64, 1e-3

TOLERANCES: Mapping[str, Mapping[str, float]] = {
    "float32": {"loss": 1e-5, "logits": 1e-4, "gradients": 1e-3, "elements": 1e-2, "losses": 1e-3},
    "bfloat16": {"loss": 2e-2, "logits": 5e-2, "gradients": 2e-1, "elements": 1.0, "losses": 1e-1},
}
"""The largest allowed differences: of the first loss by its share; of logits and gradients by the norm of the
difference over the norm, for the worst array; of an element of B's gradient by its array's root mean square;
of twenty losses by the share of their decrease. On virtual CPU devices a Qwen 3 of two layers and a Gemma 4
of six were within 5e-7, 3e-6, 1.5e-5 and 5e-6 in float32 (logits, gradients, elements, losses) and 1.5e-2,
8e-2, 4.5e-1 and 3e-2 in bfloat16 (2026-11-26). The margin is for a TPU's sums; none was tried."""

WORDS = {
    "loss": "the loss",
    "logits": "logits",
    "gradients": "gradients",
    "elements": "an element of B's gradient",
    "losses": "the losses of 20 steps",
}


@dataclass(frozen=True)
class Outcome:
    """The numbers that a miniature computes.

    Attributes:
        losses: the loss of each step.
        gradients: float32 gradients of the first step, by path.
        trained: the trained arrays after the last step, by path.
        logits: logits of all tokens before the first step; None if not requested.
        built: the model, with its trained arrays after the last step.
    """

    losses: tuple[float, ...]
    gradients: Mapping[str, np.ndarray]
    trained: Mapping[str, np.ndarray]
    logits: np.ndarray | None
    built: Built


@dataclass(frozen=True)
class Compared:
    """A miniature on a mesh compared with the CPU's.

    Attributes:
        where: "the recipe's mesh", "fsdp 2, tp 2", "another order of the devices".
        differences: differences by the keys of TOLERANCES.
    """

    where: str
    dtype: str
    differences: Mapping[str, float]

    @property
    def beyond(self) -> dict[str, float]:
        """Return the numbers outside their tolerance."""
        allowed = TOLERANCES[self.dtype]
        return {name: value for name, value in self.differences.items() if not value <= allowed[name]}

    @property
    def problem(self) -> str | None:
        """Return a sentence if a number is outside its tolerance."""
        if not self.beyond:
            return None
        allowed = TOLERANCES[self.dtype]
        parts = [
            f"{WORDS[name]} by {value:.1e} (allowed {allowed[name]:.0e})"
            for name, value in self.beyond.items()
        ]
        what = f"on {self.where} in {self.dtype} the miniature differs from the CPU's float32"
        return f"{what} in {', '.join(parts)}"


def reference_mesh(axes: Mapping[str, int]) -> Mesh:
    """Return a mesh of one CPU device of this process, with the recipe's axes."""
    return arrange(dict.fromkeys(axes, 1), jax.local_devices(backend="cpu")[:1])


def meshes(axes: Mapping[str, int], mesh: Mesh, heads: int) -> Iterator[tuple[str, Mesh]]:
    """Return the recipe's mesh, each other split of its devices over fsdp and tp, and the mesh with its
    devices in reverse order.

    Args:
        heads: a number that must be divisible by tp.
    """
    yield "the recipe's mesh", mesh
    devices = list(mesh.devices.flat)
    both = axes.get("fsdp", 1) * axes.get("tp", 1)
    for tp in (tp for tp in range(1, both + 1) if both % tp == 0 and heads % tp == 0):
        other = {**axes, "fsdp": both // tp, "tp": tp}
        if other["fsdp"] != axes.get("fsdp", 1):
            yield f"fsdp {other['fsdp']}, tp {tp}", arrange(other, devices)
    if len(devices) > 1:
        yield (
            "another order of the devices",
            Mesh(mesh.devices.ravel()[::-1].reshape(mesh.devices.shape), mesh.axis_names),
        )


def batch(settings: RunSettings, vocabulary: int) -> dict[str, np.ndarray]:
    """Return rows of two segments of random tokens and some padding; half of the tokens carry loss."""
    objective = OBJECTIVES[settings.train.objective]
    shape = (settings.mesh.devices * objective.rows, LENGTH)
    random, places = np.random.default_rng(0), np.broadcast_to(np.arange(LENGTH), shape)
    border, end = LENGTH // 2 + 5, LENGTH - 3
    second = (places >= border) & (not objective.format)
    arrays: dict[str, np.ndarray] = {
        "tokens": random.integers(3, vocabulary, shape).astype(np.int32),
        "positions": np.where(second, places - border, places).astype(np.int32),
        "segment_ids": np.where(places >= end, 0, 1 + second).astype(np.int32),
        "loss_mask": random.random(shape) < 0.5,
    }
    answers = objective.format and settings.train.grpo is None
    norm = shape[0] // objective.rows if answers else count_targets(arrays)
    if objective.format == "unpaired_preference":
        arrays["loss_mask"] = (places >= border) & (places < end)
    values = {
        "desirable": np.where(np.arange(shape[0]) % 2, -1, 1),
        "advantages": random.standard_normal(shape[0]),
        "weights": np.full(shape[0], 1 / norm),
        "old": np.full(shape, -math.log(vocabulary)),  # about that of a model of random weights
    }
    arrays |= {name: values[name].astype(np.float32) for name in further_arrays(settings.train)}
    return arrays | {"norm": np.asarray(norm, np.float32)}


def placed(rows: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Place a whole micro-batch: each process puts its own rows on its devices."""
    where = Rows.of(mesh, len(rows["tokens"]))
    return where.place(
        {name: value[list(where.here)] if value.ndim else value for name, value in rows.items()}
    )


class Kept(NamedTuple):
    """State of `keep_gradients`: the gradients of the last step."""

    kept_gradients: Any


def keep_gradients() -> optax.GradientTransformation:
    """Pass gradients through, and keep them in the state."""

    def begin(params: Any) -> Kept:
        return Kept(jax.tree.map(lambda array: jnp.zeros_like(array, jnp.float32), params))

    return optax.GradientTransformation(begin, lambda updates, state, params=None: (updates, Kept(updates)))


def outcome(
    base: HFCheckpoint,
    settings: RunSettings,
    optimizer: Callable[[Any], optax.GradientTransformation],
    mesh: Mesh,
    dtype: str,
    with_logits: bool = False,
) -> Outcome:
    """Train a miniature for STEPS steps of one micro-batch each.

    Args:
        settings: the run's settings, with the miniature's own LoRA.
        optimizer: makes the recipe's optimizer chain from a schedule.
        with_logits: whether to return logits; only for a mesh of one process.
    """
    # A number that is rounded to another code differs by far more than the types do.
    model = replace(settings.model, dtype=dtype, attention="dot", qat=None)
    if dtype == "float32":
        model = replace(model, quantized_matmul=None)  # eight-bit types are no float32
    with ExitStack() as stack:
        stack.enter_context(jax.default_device(mesh.local_devices[0]))
        stack.enter_context(mesh)
        if dtype == "float32":
            stack.enter_context(jax.default_matmul_precision("highest"))
        built = build(base, model, settings.lora, mesh, settings.rules, settings.train.seed)
        rows = batch(settings, base.architecture.vocab_size)
        seen = None
        if with_logits and not mesh.is_multi_process:
            seen = logits_of(
                built, {name: rows[name] for name in ("tokens", "positions", "segment_ids")}, mesh
            )
        rule = optax.chain(keep_gradients(), optimizer(optax.constant_schedule(LEARNING_RATE)))
        state: Any = nnx.Optimizer(built.model, update_rule(built, rule), wrt=trained_type(built))
        fit_shardings(state, mesh)
        step = Step(
            built, state, settings.train, mesh, functools.partial(micro_batch_loss, built, settings.train)
        )
        live, train = jax.device_put(step.live, step.shardings), step.jit()
        losses, gradients = [], dict[str, np.ndarray]()
        for number in range(STEPS):
            arguments = placed({**rows, "index": np.asarray(number, np.int32)}, mesh)
            live, loss, *_ = train(live, step.base, arguments)
            losses.append(loss)
            if not gradients:
                nnx.update(state, live[1])
                gradients = arrays(optax.tree_utils.tree_get(nnx.pure(state.opt_state), "kept_gradients"))
        nnx.update(built.model, live[0])
        trained = arrays(nnx.pure(nnx.state(built.model, trained_type(built))))
        return Outcome(tuple(float(fetch(loss)) for loss in losses), gradients, trained, seen, built)


def arrays(tree: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a state, whole and in float32, by path."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {parameter_path(path): fetch(leaf) for path, leaf in leaves}


def fetch(array: jax.Array) -> np.ndarray:
    """Return a whole array in float32, whichever processes hold it."""
    if not array.is_fully_addressable and not array.is_fully_replicated:
        array = process_allgather(array, tiled=True)
    return np.asarray(array, np.float32)


def compare(where: str, dtype: str, measured: Outcome, reference: Outcome) -> Compared:
    """Compare a miniature with the CPU's in float32."""
    first, fall = reference.losses[0], abs(reference.losses[0] - reference.losses[-1])
    # Arrays that are zero except for rounding (A's gradient while B is zero) are compared with the others.
    whole = math.sqrt(sum(float(np.sum(array**2)) for array in reference.gradients.values()))
    least = 1e-6 * whole
    worst = max(
        norm(measured.gradients[path] - array) / max(norm(array), least)
        for path, array in reference.gradients.items()
    )
    numbers = {"loss": abs(measured.losses[0] - first) / abs(first), "gradients": worst}
    high = [
        path
        for path in reference.gradients
        if path.endswith("lora_b") and norm(reference.gradients[path]) > least
    ]
    if high:
        numbers["elements"] = max(
            float(np.abs(measured.gradients[path] - reference.gradients[path]).max())
            / float(np.sqrt(np.mean(reference.gradients[path] ** 2)))
            for path in high
        )
    if measured.logits is not None and reference.logits is not None:
        numbers["logits"] = norm(measured.logits - reference.logits) / norm(reference.logits)
    apart = np.abs(np.subtract(measured.losses, reference.losses)).max()
    return Compared(where, dtype, numbers | {"losses": float(apart) / fall})


def norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.ravel()))
