"""Time the recipe's own step on a few of the model's layers, with random weights in their real shapes."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from ..errors import say
from ..model.loading import build
from ..model.random_weights import RandomCheckpoint
from ..settings import RunSettings
from ..training.objectives import OBJECTIVES
from ..training.step import Step, fit_shardings, micro_batch_loss, trained_type, update_rule
from .machine import memory
from .numbers import placed
from .parts import parts

WARM, TIMED = 2, 5


@dataclass(frozen=True)
class Depth:
    """A step of a few layers.

    Attributes:
        compile_seconds: seconds to compile the step.
        seconds: seconds of one micro-batch, the median of TIMED.
        compiled_bytes: device memory by the compiler's count: arguments and temporaries.
        peak_bytes: the device's peak of all steps so far; None if unknown.
        parts: the result of `parts.parts`; empty if tracing failed.
    """

    layers: int
    compile_seconds: float
    seconds: float
    compiled_bytes: int
    peak_bytes: int | None
    parts: Mapping[str, float]


def timed(
    config: Mapping[str, Any],
    layers: Sequence[int],
    settings: RunSettings,
    optimizer: Callable[[Any], optax.GradientTransformation],
    mesh: Mesh,
) -> Depth:
    """Compile and run the step with full rows.

    Args:
        config: config.json of the model with only these layers.
        layers: their numbers in the whole model.
        optimizer: makes the recipe's optimizer chain from a schedule.
    """
    lora, train = settings.lora, settings.train
    if lora is not None and lora.layers is not None:
        lora = replace(lora, layers=tuple(new for new, old in enumerate(layers) if old in lora.layers))
    base = RandomCheckpoint.of(config)
    with mesh:
        built = build(base, settings.model, lora, mesh, settings.rules, train.seed)
        rule: Any = update_rule(built, optimizer(optax.constant_schedule(1e-5)))
        accumulation = train.accumulation_steps(settings.mesh.data_parallel)
        if accumulation > 1:
            rule = optax.MultiSteps(rule, accumulation)
        state: Any = nnx.Optimizer(built.model, rule, wrt=trained_type(built))
        fit_shardings(state, mesh)
        step = Step(built, state, train, mesh, functools.partial(micro_batch_loss, built, train))
        live = jax.device_put(step.live, step.shardings)
        given = placed(_rows(settings, base.architecture.vocab_size), mesh)
        begun = time.monotonic()
        compiled = step.jit().lower(live, step.base, given).compile()
        ready = time.monotonic()
        seconds, traced = _measured(compiled, live, step.base, given)
    sizes = compiled.memory_analysis()
    found = Depth(
        len(layers),
        ready - begun,
        seconds,
        sizes.argument_size_in_bytes + sizes.temp_size_in_bytes,
        memory("peak_bytes_in_use"),
        traced,
    )
    del built, state, step, live, given, compiled
    gc.collect()  # a model's modules refer to each other, and hold its arrays
    return found


def _measured(compiled: Any, live: Any, base: Any, given: Any) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step, and their parts; `live` is used up."""

    def run() -> float:
        nonlocal live
        start = time.perf_counter()
        live, loss, *_ = compiled(live, base, given)
        jax.block_until_ready((live, loss))
        return time.perf_counter() - start

    taken = [run() for _ in range(WARM + TIMED)]
    try:
        return statistics.median(taken[WARM:]), parts(run, compiled.as_text())
    except (OSError, RuntimeError) as error:
        say(f"probe: no trace of the step: {error}")
        return statistics.median(taken[WARM:]), {}


def summary(depths: Sequence[Depth], settings: RunSettings, layers: int) -> dict[str, Any]:
    """Return the depths, the cost of a layer, of everything except layers, and of a step of the whole model;
    its parts are those of a micro-batch.

    The layers by which the two depths differ represent all layers that are in neither.

    Args:
        layers: number of layers of the whole model.
    """
    accumulation = settings.train.accumulation_steps(settings.mesh.data_parallel)
    few, more = depths[0], depths[-1]
    between = more.layers - few.layers
    share = (layers - few.layers) / between if between else 0.0

    def whole(first: Any, second: Any) -> Any:
        return None if first is None or second is None else first + share * (second - first)

    seconds = whole(few.seconds, more.seconds)
    layer = (more.seconds - few.seconds) / between if between else None
    return {
        "depths": [asdict(depth) for depth in depths],
        "layers": layers,
        "micro_batches": accumulation,
        **({"layer_seconds": layer, "outside_seconds": few.seconds - few.layers * layer} if layer else {}),
        "micro_batch_seconds": seconds,
        "step_seconds": seconds * accumulation,
        "compiled_bytes": whole(few.compiled_bytes, more.compiled_bytes),
        "peak_bytes": whole(few.peak_bytes, more.peak_bytes),
        "parts": {
            part: max(0.0, whole(taken, more.parts[part]))
            for part, taken in few.parts.items()
            if part in more.parts
        },
    }


def _rows(settings: RunSettings, vocabulary: int) -> dict[str, np.ndarray]:
    """Return a micro-batch of full rows, each one segment."""
    train = settings.train
    rows = train.micro_batch_size * settings.mesh.data_parallel * OBJECTIVES[train.objective].rows
    shape = (rows, settings.data.max_length)
    judged = OBJECTIVES[train.objective].format == "unpaired_preference"
    return {
        **({"desirable": np.ones(rows, np.float32)} if judged else {}),
        "tokens": np.random.default_rng(0).integers(3, vocabulary, shape).astype(np.int32),
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "segment_ids": np.ones(shape, np.int32),
        "loss_mask": np.ones(shape, bool),
        "norm": np.asarray(shape[0] * (shape[1] - 1), np.float32),
        "index": np.asarray(0, np.int32),
    }
