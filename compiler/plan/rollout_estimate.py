"""Estimate the seconds in which a step's completions are generated, from shapes, without a compile.

The program of `runtime/model/decode.py` computes all prompts in one pass, and then a token of each row in
each pass of a loop. A pass reads

- the weights: a part that tp splits is read where it is. What fsdp splits is gathered over the links, written
  to memory and read again, in every pass;
- the cache: the filled slots of all rows, rounded up, and in layers with a window only those of the window;
- and sums activations over tp: after the embedding, and twice in each layer.

The loop runs until the longest completion has ended, so its passes are at most the longest length. Times
are at the rates that training reaches (`rates.py`). Memory and arithmetic overlap; links overlap with
neither. No rollout was measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from recipec.compiler.lowering.divided import resolve_specs
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.sizes import BYTES, tp_sizes
from recipec.compiler.plan import rates
from recipec.compiler.plan.results import Generation, Pass
from recipec.compiler.plan.torus import Torus, between_slices
from recipec.compiler.roofline.rollout import (
    axes_of,
    cache_bytes,
    cache_read_bytes,
    differs,
    rollout_need,
    slots_read,
    weights_bytes,
    with_layout,
)
from recipec.compiler.roofline.training_step import LOOKED_UP, STORED, model_flops, multiplies, shapes
from recipec.compiler.wording import divisors
from recipec.runtime.model.adapters import arrays_of
from recipec.runtime.model.families.family import EXPERTS, Parameter, arrays, matrices
from recipec.runtime.model.partition_rules import data_parallel, rows_at_once, shards
from recipec.runtime.training.objectives import compares

SPLIT = ("tp", "ep")
"""Mesh axes whose weights a device reads only its own part of. Those of other axes are gathered."""

SUMS = 2
"""All-reduces of a layer over tp: after attention, and after the feed-forward block."""

ACTIVATION_BYTES = 2

GAIN = 0.02
"""How much faster another rollout must be, by the estimate, to be preferred to the recipe's own."""


def generation(program: Program) -> Generation | None:
    """Return what a batch of completions costs; None for a run without any, on a CPU, and where a server
    generates them."""
    about, recipe = program.generated, program.recipe
    if about is None or recipe.rollout.engine == "vllm" or program.accelerator.platform != "tpu":
        return None
    axes = dict(axes_of(program))
    total, at_once = recipe.train.global_batch_size, _at_once(program, axes)
    handed = _handed_over(program, axes)
    return Generation(
        axes=axes,
        completions=total,
        prompts=total // about.group,
        iterations=about.iterations,
        share=about.share,
        rows=at_once,
        rounds=math.ceil(total / at_once),
        passes=about.completion - 1,  # the pass over the prompts computes the first token
        prefill=_pass(program, axes, about.prompt),
        decode=_pass(program, axes, 1),
        handed=handed,
        handing_seconds=_seconds(program, "all-gather", handed, axes, tuple(axes)),
        need=rollout_need(program),
        compares=compares(recipe.train),
        forward_share=_forward_flops(program) / model_flops(program, 1.0),
        alternative=_alternative(program, axes),
    )


def fastest_rollout(program: Program) -> Program:
    """Return a program with the `rollout.axes` and `rollout.rows` that generate a batch fastest.

    By the estimate, of layouts that fit the device's memory by calculation, each with the most rows that fit.
    Without one, or if none is faster than the program's own by `GAIN`, return the program itself.
    """
    recipe, available = program.recipe, program.accelerator.hbm_bytes_per_device
    baseline = generation(program)
    if baseline is None:
        return program
    best, least = program, baseline.seconds * (1 - GAIN) if baseline.need.total <= available else math.inf
    total = recipe.train.global_batch_size
    for axes in _layouts(program):
        for rows in sorted(divisors(total), reverse=True):
            # A whole batch is written as null, as by default.
            rollout = {"axes": axes, "rows": None if rows == total else rows}
            section = recipe.rollout.model_copy(update=rollout)
            changed = replace(program, recipe=recipe.model_copy(update={"rollout": section}))
            if rows % data_parallel(axes) == 0 and rollout_need(changed).total <= available:
                rolled = generation(changed)
                if rolled is not None and rolled.seconds < least:
                    best, least = changed, rolled.seconds
                break  # with fewer rows, the weights are read more often
    return best


def _layouts(program: Program) -> Iterator[dict[str, int]]:
    """Yield the layouts of rollouts on a program's devices: its own, and each size of tp."""
    program_axes = dict(axes_of(program))
    yield program_axes
    shared = {axis: size for axis, size in program.recipe.mesh.axes.items() if axis in ("dcn", "ep")}
    rest = program.accelerator.devices // math.prod(shared.values())
    for tp in tp_sizes(program.architecture, rest):
        axes = {**shared, "fsdp": rest // tp, "tp": tp}
        axes = {axis: axes[axis] for axis in ("dcn", "fsdp", "ep", "tp") if axis in axes}
        if axes != program_axes:
            yield axes


def _at_once(program: Program, axes: Mapping[str, int]) -> int:
    """Return the completions that are generated at once: a multiple of the devices that split rows."""
    recipe = program.recipe
    return rows_at_once(recipe.train.global_batch_size, recipe.rollout.rows, axes)


def _pass(program: Program, axes: Mapping[str, int], tokens: int) -> Pass:
    """Return a pass of so many tokens of each row: over the prompts, or of one token.

    A pass over the prompts writes the cache, and reads none of it.
    """
    a, accelerator, recipe = program.architecture, program.accelerator, program.recipe
    speed, tp = rates.reached(accelerator.generation), axes.get("tp", 1)
    here = _at_once(program, axes) / data_parallel(axes)
    read, gathered = _weights(program, axes, here * tokens)
    cache = cache_read_bytes(program, axes)
    if tokens > 1:
        cache = cache_bytes(program, axes) * tokens / recipe.data.max_length
    model = shapes(program, max(tokens, 2))
    flops = here * 2 * model.head / tp
    for number, layer in enumerate(model.layers):
        pairs = layer.pairs if tokens > 1 else slots_read(program, number)
        flops += here * (2 * layer.weights * tokens + 4 * layer.attended * pairs) / tp
    summed = here * tokens * a.hidden_size * ACTIVATION_BYTES if tp > 1 else 0.0
    sums = SUMS * a.num_layers + 1
    links = _seconds(program, "all-gather", gathered, axes, ("fsdp", "cp"))
    links += sums * _seconds(program, "all-reduce", summed, axes, ("tp",))
    return Pass(
        weights=read,
        gathered=gathered,
        cache=cache,
        summed=sums * summed,
        flops=flops,
        memory_seconds=(read + 2 * gathered + cache) / (accelerator.bandwidth_per_device * speed.memory),
        compute_seconds=flops / (accelerator.peak_flops_per_device * speed.products),
        link_seconds=links,
    )


def _weights(program: Program, axes: Mapping[str, int], tokens: float) -> tuple[float, float]:
    """Return the bytes of weights that a device reads from its own memory, and those that it gathers.

    Args:
        tokens: that it computes, spread evenly over the experts.
    """
    recipe, family, architecture = program.recipe, program.family, program.architecture
    parameters = resolve_specs(arrays(family, architecture), program.rules, axes, "replicate")
    quantized, size = STORED[recipe.model.quantization], BYTES[recipe.model.dtype]
    linear = matrices(family, architecture, parameters)
    tied = not any(parameter.path == "lm_head.w" for parameter in parameters)
    experts, chosen = architecture.routing
    local = gathered = 0.0

    def count(shape: tuple[int, ...], spec: tuple[str | None, ...], number: float) -> None:
        nonlocal local, gathered
        names = [name for name in spec if shards(name, axes) > 1]
        used = math.prod(shape) * number / math.prod(shards(name, axes) for name in names if name in SPLIT)
        if all(name in SPLIT for name in names):
            local += used
        else:
            gathered += used

    for parameter in parameters:
        if _looked_up(parameter, tied):
            continue
        stored = quantized if quantized is not None and parameter.path in linear else size
        if experts and EXPERTS.search(parameter.path):
            stored *= 1 - (1 - chosen / experts) ** (tokens * axes.get("ep", 1))
        count(parameter.shape, tuple(parameter.spec), stored)
    if program.lora is not None:
        for shape, spec in arrays_of(program.adapters).values():
            count(tuple(shape), tuple(spec), BYTES[program.lora.dtype])
    return local, gathered


def _looked_up(parameter: Parameter, tied: bool) -> bool:
    head = tied and parameter.path == LOOKED_UP[0]
    return not multiplies(parameter) or (parameter.path in LOOKED_UP and not head)


def _handed_over(program: Program, axes: Mapping[str, int]) -> float:
    """Return the bytes that a device gets when a batch begins: what is trained, in the rollout's layout."""
    if not differs(program, axes):
        return 0.0
    if program.lora is None:
        return weights_bytes(program, axes)
    size, total = BYTES[program.lora.dtype], 0.0
    for shape, spec in arrays_of(program.adapters).values():
        total += math.prod(shape) * size / math.prod(shards(name, axes) for name in spec)
    return total


def _seconds(
    program: Program, kind: str, size: float, axes: Mapping[str, int], over: tuple[str, ...]
) -> float:
    """Return the seconds of a collective that ends with `size` bytes on a device, over some mesh axes.

    Devices are assumed to be in the order of their chips, the last axis the closest.
    """
    accelerator = program.accelerator
    names, sizes = list(axes), list(axes.values())
    within = [name for name in over if axes.get(name, 1) > 1 and name != "dcn"]
    if not size:
        return 0.0
    torus = _torus(program)
    seconds = between_slices(torus, size) if "dcn" in over and axes.get("dcn", 1) > 1 else 0.0
    if within:
        group = []
        for place in itertools.product(*map(range, sizes)):
            if all(at == 0 for name, at in zip(names, place, strict=True) if name not in within):
                number = 0
                for at, count in zip(place, sizes, strict=True):
                    number = number * count + at
                group.append(number)
        seconds += torus.seconds(kind, size, group)[0]
    return seconds / rates.reached(accelerator.generation).links


def _torus(program: Program) -> Torus:
    accelerator = program.accelerator
    chips = itertools.product(*(range(int(size)) for size in (accelerator.topology or "").split("x")))
    cores = range(accelerator.devices_per_chip)
    return Torus.of(accelerator, [(*chip, core) for chip in chips for core in cores])


def _forward_flops(program: Program) -> float:
    """Return the FLOPs of a forward pass through the model, for each token of a row."""
    length = program.recipe.data.max_length
    model = shapes(program, length)
    flops = 2 * (model.head + model.outside)
    for layer in model.layers:
        flops += 2 * layer.weights + 4 * layer.attended * layer.pairs / length
    return flops


def _alternative(program: Program, axes: Mapping[str, int]) -> dict[str, int]:
    """Return the layout that gathers less and fits the memory; {} if there is none, or none is needed."""
    if not _weights(program, axes, 1.0)[1]:
        return {}
    section = program.recipe.rollout.model_copy(update={"axes": None})
    free = replace(program, recipe=program.recipe.model_copy(update={"rollout": section}))
    resolved = dict(axes_of(with_layout(free)))
    less = _weights(program, resolved, 1.0)[1] < _weights(program, axes, 1.0)[1]
    return resolved if less else {}
