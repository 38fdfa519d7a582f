"""Time the recipe's own step on a few of the model's layers, with random weights in their real shapes, and
split the time by a profiler trace: the kind of each operation, and its duration.
"""

from __future__ import annotations

import functools
import gc
import math
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.profiler import ProfileData, ProfileOptions
from jax.sharding import Mesh

from ..errors import say
from ..model.loading import build
from ..model.random_weights import RandomCheckpoint
from ..settings import RunSettings
from ..training.objective_losses import micro_batch_loss
from ..training.objectives import OBJECTIVES, ROW, TOKEN, further_arrays
from ..training.step import Step, fit_shardings, trained_type, update_rule
from ..weights.checkpoint import HFCheckpoint
from .compare_numbers import placed
from .machine import memory

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
    patches: int = 0,
) -> Depth:
    """Compile and run the step with full rows.

    Args:
        config: config.json of the model with only these layers.
        layers: their numbers in the whole model.
        optimizer: makes the recipe's optimizer chain from a schedule.
        patches: of the pictures of a row; 0 for a recipe without pictures.
    """
    lora, train = settings.lora, settings.train
    if lora is not None and lora.layers is not None:
        lora = replace(lora, layers=tuple(new for new, old in enumerate(layers) if old in lora.layers))
    base: HFCheckpoint = RandomCheckpoint.of(config)
    if patches:
        base = base.seeing()
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
        rows = _rows(settings, base.architecture.vocab_size)
        if base.architecture.vision is not None:
            rows |= _pictures(base.architecture, patches, rows["positions"])
        arguments = placed(rows, mesh)
        begun = time.monotonic()
        compiled = step.jit().lower(live, step.base, arguments).compile()
        ready = time.monotonic()
        seconds, traced = _measured(compiled, live, step.base, arguments)
    sizes = compiled.memory_analysis()
    depth = Depth(
        len(layers),
        ready - begun,
        seconds,
        sizes.argument_size_in_bytes + sizes.temp_size_in_bytes,
        memory("peak_bytes_in_use"),
        traced,
    )
    del built, state, step, live, arguments, compiled
    gc.collect()  # a model's modules refer to each other, and hold its arrays
    return depth


def _measured(compiled: Any, live: Any, base: Any, arguments: Any) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step, and their parts; `live` is used up."""

    def run() -> float:
        nonlocal live
        start = time.perf_counter()
        live, loss, *_ = compiled(live, base, arguments)
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
    sizes = {ROW: shape[:1], TOKEN: shape}
    return {
        **{
            name: np.ones((*sizes[array.size], *array.more), array.dtype)
            for name, array in further_arrays(train).items()
        },
        "tokens": np.random.default_rng(0).integers(3, vocabulary, shape).astype(np.int32),
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "segment_ids": np.ones(shape, np.int32),
        "loss_mask": np.ones(shape, bool),
        "norm": np.asarray(shape[0] * (shape[1] - 1), np.float32),
        "index": np.asarray(0, np.int32),
    }


def _pictures(architecture: Any, patches: int, positions: np.ndarray) -> dict[str, np.ndarray]:
    """Return the pictures of rows that begin with their tokens.

    Args:
        architecture: of a model with a vision tower.
        patches: of a row.
        positions: int32[B, T], of the tokens.
    """
    vision, shape = architecture.vision, positions.shape
    place, count = np.arange(patches), patches // vision.patches_of_feature
    size = vision.patches or patches
    side = math.isqrt(size)
    token = np.arange(shape[1])
    stands = token < count
    arrays = {
        "patch_images": place // size + 1,
        "patch_positions": np.stack([place % size // side, place % size % side], axis=-1),
        "image_features": np.where(stands, token, -1),
        "image_ids": np.where(stands, token // (size // vision.patches_of_feature) + 1, 0),
    }
    pixels = np.random.default_rng(0).standard_normal((patches, vision.patch_features), np.float32)
    rows = {
        name: np.broadcast_to(array.astype(np.int32), (shape[0], *array.shape))
        for name, array in arrays.items()
    }
    if architecture.turned_axes:
        rows["rotary_positions"] = np.repeat(positions[..., None], 3, axis=-1)
    return {"patches": np.broadcast_to(pixels, (shape[0], *pixels.shape)), **rows}


TRACED = 3
"""Number of steps in a trace."""
PARTS = ("products", "other", "kernels", "collectives", "copies", "idle")
"""What a device does in a step: the parts of `recipe plan`, with waits for collectives and copies."""

COLLECTIVE = re.compile(r"all-|reduce-scatter|collective-|ragged-all-|send|recv")
COPY = re.compile(r"(?:copy|slice|async)-(?:start|update|done)")
PRODUCTS = ("dot", "ragged-dot", "convolution")
HEAD = re.compile(r"(?:ENTRY )?%?([\w.-]+) .*\{$")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = .*? ([a-z][\w-]*)\(%?([\w.-]*)")
CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.-]+)")
CHANNEL = re.compile(r"\bchannel_id=\d+")
TARGET = re.compile(r'custom_call_target="([^"]*)"')
START = "AsyncCollectiveStart"
TARGETS = {"tpu_custom_call": "kernels", START: "collectives", "AsyncCollectiveDone": "collectives"}
TPU = re.compile(r"/device:TPU:\d+")

Operation = tuple[float, float, str]
"""One run of an operation: start and end in nanoseconds, and its name."""


def parts(run: Callable[[], Any], text: str) -> dict[str, float]:
    """Trace steps, into a folder that is removed afterwards.

    Args:
        run: runs a step to its end.
        text: text of the compiled step.

    Returns:
        Seconds of a step by the keys of PARTS, the mean of this process's devices; empty if the trace has
        no operations.

    Raises:
        OSError, RuntimeError: tracing is not possible here.
    """
    options = ProfileOptions()
    options.python_tracer_level, options.enable_hlo_proto = 0, False
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            for _ in range(TRACED):
                run()
        finally:
            jax.profiler.stop_trace()
        files = list(Path(folder).glob("**/*.xplane.pb"))
        return summed(ProfileData.from_file(str(files[0])), kinds(text)) if files else {}


def summed(trace: ProfileData, kind: Mapping[str, str]) -> dict[str, float]:
    """Return the result of `parts` for a trace of TRACED steps.

    Args:
        kind: one of PARTS by the name of an operation; others count as `other`.
    """
    devices, seconds = _devices(trace), dict.fromkeys(PARTS, 0.0)
    for lines in devices:
        for name, taken in (timed for line in lines for timed in _alone(line)):
            seconds[kind.get(name, "other")] += taken
            seconds["idle"] -= taken
        every = [operation for line in lines for operation in line]
        seconds["idle"] += max(end for _, end, _ in every) - min(start for start, *_ in every)
    seconds["idle"] = max(0.0, seconds["idle"])  # a CPU's threads run some operations of a device in parallel
    return {part: taken / len(devices) / TRACED / 1e9 for part, taken in seconds.items() if devices}


def kinds(text: str) -> dict[str, str]:
    """Return one of PARTS for each operation of a compiled step. A fusion with a product is a product."""
    bodies = dict[str, list[tuple[str, str, str, str]]]()
    for line in text.splitlines():
        if head := HEAD.match(line):
            body = bodies.setdefault(head[1], [])
        elif bodies and (matched := INSTRUCTION.match(line)):
            body.append((matched[1], matched[2], matched[3], line))
    # A collective in parallel with others is in pieces, one in each of these: its start, others, its end.
    whole = ("".join(line for *_, line in body) for body in bodies.values())
    begun = {
        channel for instruction in whole if START in instruction for channel in CHANNEL.findall(instruction)
    }
    known = dict[str, str]()

    def kind(opcode: str, operand: str, line: str) -> str:
        if opcode in PRODUCTS:
            return "products"
        if opcode == "custom-call":
            return TARGETS.get("".join(TARGET.findall(line)), "other")
        if COLLECTIVE.match(opcode):
            return "other" if begun.intersection(CHANNEL.findall(line)) else "collectives"
        inner = {
            known.get(name, "") for called in CALLED.findall(line) for name, *_ in bodies.get(called, ())
        }
        inner |= {known.get(operand, "")} if opcode.startswith("async-") else set()
        alone = "copies" if COPY.match(opcode) else "other"
        return next((which for which in ("products", "kernels", "collectives") if which in inner), alone)

    for every in bodies.values():  # a called computation is printed before its caller
        for name, opcode, operand, line in every:
            known[name] = kind(opcode, operand, line)
    return known


def _devices(trace: ProfileData) -> list[list[list[Operation]]]:
    """Return the operations of each device, line by line. A TPU has a plane of its own, where an operation's
    name is its whole text. On a CPU's threads each operation names its device."""
    devices = defaultdict[Any, list[list[Operation]]](list)
    for plane in trace.planes:
        for line in plane.lines:
            threads = defaultdict[Any, list[Operation]](list)
            tpu = TPU.fullmatch(plane.name) and line.name == "XLA Ops"
            for event in line.events if tpu or plane.name == "/host:CPU" else ():
                told = {} if tpu else dict(event.stats)
                name = event.name.partition(" = ")[0].removeprefix("%") if tpu else told.get("hlo_op")
                if name:
                    threads[told.get("device_ordinal", plane.name)].append(
                        (event.start_ns, event.end_ns, name)
                    )
            for device, of_device in threads.items():
                devices[device].append(of_device)
    return list(devices.values())


def _alone(line: Iterable[Operation]) -> Iterator[tuple[str, float]]:
    """Return each operation's name and its own time, without the operations within it (as in a loop)."""
    open_: list[list[Any]] = []  # end, name, time
    for start, end, name in (
        *sorted(line, key=lambda operation: (operation[0], -operation[1])),
        (math.inf, math.inf, ""),
    ):
        while open_ and open_[-1][0] <= start:
            yield tuple(open_.pop()[1:])
        if open_:
            open_[-1][2] -= end - start
        open_.append([end, name, end - start])
