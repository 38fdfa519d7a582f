"""Changes of a recipe that take less memory of a device, the smallest first.

What is trained stays the same: model, adapters, data and the rows of an optimizer step. The base weights are
quantised only when nothing gentler is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, combinations

from compiler.hardware import Accelerator, arranged, from_topology, generations
from compiler.program import Program
from compiler.wording import divisors, flow

LARGER_SLICES = 2
"""Slices beyond the recipe's own that are tried, the smallest first."""
RECOMPUTED = {
    "save_dots": "the backward pass computes norms, rotations and activation functions again",
    "save_attention": "the backward pass computes each layer again, but not its attention",
    "block": "the backward pass computes each attention and each feed-forward block again",
    "decoder": "the backward pass computes each layer again",
}
"""What each policy of remat costs, by how much is kept for the backward pass, the most first. offload_dots
needs the host's memory in place of the device's, and is left to whoever knows the host."""
ROUNDED = {"int8": "8", "nf4": "4"}
"""Bits of a base weight under each quantisation, the gentler first."""


@dataclass(frozen=True)
class Way:
    """A change of the recipe that takes less memory of a device.

    Attributes:
        sets: as --set takes it.
        cost: what comes of it beside, a sentence without capital and full stop.
        kept: the least share of the temporaries that may stay.
        arguments: whether weights and optimizer state take less, too.
    """

    sets: tuple[str, ...]
    cost: str
    kept: float = 0.0
    arguments: bool = False

    def __add__(self, other: Way) -> Way:
        return Way(
            self.sets + other.sets,
            f"{self.cost}; {other.cost}",
            self.kept * other.kept,
            self.arguments or other.arguments,
        )


def ways(program: Program) -> Iterator[Way]:
    """Changes of the recipe, the smallest first."""
    return chain.from_iterable(ladders(program))


def ladders(program: Program) -> Iterator[list[Way]]:
    """The ways, those together of which each takes less memory than the one before."""
    kinds = [list(kind(program)) for kind in (_micro_batches, _attention, _policies, _tensor_parallel)]
    yield from kinds
    yield list(_data_parallel(program))
    for first, second in combinations([kind[-1] for kind in kinds if kind], 2):
        yield [first + second]
    yield list(_quantized(program))
    yield list(_larger(program))


def _micro_batches(program: Program) -> Iterator[Way]:
    """Smaller micro-batches, of the same optimizer step: halved as often as it goes, at last one row."""
    train, size = program.recipe.train, program.recipe.train.micro_batch_size
    smaller = size
    for divisor in reversed(divisors(size)):
        if divisor == 1 < smaller or divisor * 2 <= smaller:
            smaller = divisor
            count = train.global_batch_size // (divisor * program.data_parallel)
            yield Way(
                (f"train.micro_batch_size={divisor}",),
                f"an optimizer step takes {count} micro-batches in place of {program.accumulation_steps}",
                divisor / size,
            )


def _attention(program: Program) -> Iterator[Way]:
    kernel = program.family.flash_attention and program.accelerator.platform == "tpu"
    if program.recipe.model.attention == "dot" and kernel:
        yield Way(
            ("model.attention=splash",),
            "attention is the TPU's fused kernel, which keeps no scores in memory and rounds otherwise",
        )


def _policies(program: Program) -> Iterator[Way]:
    """The policies that keep less than the recipe's."""
    order = list(RECOMPUTED)
    present = program.recipe.remat.policy
    if present == "offload_dots":
        present = "save_dots"
    for policy in order[order.index(present) + 1 :] if present in order else order:
        yield Way((f"remat.policy={policy}",), RECOMPUTED[policy])


def _tensor_parallel(program: Program) -> Iterator[Way]:
    """Larger tp, which splits the activations of a row over more devices."""
    axes = program.recipe.mesh.axes
    slices = program.accelerator.slices
    devices = program.accelerator.devices // slices
    for tp in _tp_sizes(program, devices):
        if tp > axes["tp"]:
            yield Way(
                (_axes(slices, devices // tp, tp),),
                f"{tp} devices share each row, and exchange activations in every layer",
                axes["tp"] / tp,
                arguments=True,
            )


def _data_parallel(program: Program) -> Iterator[Way]:
    """Smaller tp and larger fsdp, for what tp keeps whole on each device."""
    axes, train, slices = program.recipe.mesh.axes, program.recipe.train, program.accelerator.slices
    devices = program.accelerator.devices // slices
    for tp in reversed(_tp_sizes(program, devices)):
        fsdp = devices // tp
        if tp < axes["tp"] and train.global_batch_size % (train.micro_batch_size * fsdp * slices) == 0:
            yield Way(
                (_axes(slices, fsdp, tp),),
                f"{fsdp * slices} devices compute rows of their own, and gather each layer's weights",
                arguments=True,
            )


def _quantized(program: Program) -> Iterator[Way]:
    lora = program.recipe.lora
    if lora is None or lora.quantize == "nf4":
        return
    for kind, bits in ROUNDED.items():
        if kind != lora.quantize:
            cost = f"the base weights are rounded to {bits} bits while the adapters are trained"
            yield Way((f"lora.quantize={kind}",), cost, arguments=True)


def _larger(program: Program) -> Iterator[Way]:
    """Larger slices of the same generation, all of whose devices the rows of an optimizer step can use."""
    present = program.accelerator
    if present.platform != "tpu":
        return
    shapes = generations()[present.generation]["topologies"]
    for shape in shapes[shapes.index(present.topology) + 1 :][:LARGER_SLICES]:
        larger = from_topology(f"{present.generation}:{shape}")
        arrangement = _arranged(program, larger.devices)
        if arrangement is None:
            continue
        fsdp, tp, micro = arrangement
        sets = [_machine(program, larger), _axes(present.slices, fsdp, tp)]
        if micro != program.recipe.train.micro_batch_size:
            sets.append(f"train.micro_batch_size={micro}")
        yield Way(tuple(sets), _price(present, larger), arguments=True)


def _machine(program: Program, larger: Accelerator) -> str:
    if program.recipe.mesh.topology:
        return f"mesh.topology={larger.generation}:{larger.topology}"
    return f"mesh.accelerator={larger.name}"


def _price(present: Accelerator, larger: Accelerator) -> str:
    times = larger.chips * present.slices // present.chips
    several = f", on {larger.hosts * present.slices} hosts" if larger.hosts > 1 else ""
    return f"{times} times the chips have {times} times the price an hour{several}"


def _arranged(program: Program, devices: int) -> tuple[int, int, int] | None:
    """fsdp, tp and micro-batch that use so many devices of a slice, with as little tp above the recipe's as
    can be."""
    train, tp_now, slices = program.recipe.train, program.recipe.mesh.axes["tp"], program.accelerator.slices
    for tp in _tp_sizes(program, devices):
        fsdp = devices // tp
        for micro in reversed(divisors(train.micro_batch_size)):
            if tp >= tp_now and train.global_batch_size % (micro * fsdp * slices) == 0:
                return fsdp, tp, micro
    return None


def _axes(slices: int, fsdp: int, tp: int) -> str:
    return f"mesh.axes={flow(arranged(slices, fsdp, tp))}"


def _tp_sizes(program: Program, devices: int) -> list[int]:
    """The sizes of tp that divide the devices and the heads of every layer; one key/value head is kept whole
    on each device."""
    a = program.architecture
    layers = range(a.num_layers)
    counts = {a.heads(i) for i in layers} | {a.kv_heads(i) for i in layers} - {1}
    return [tp for tp in divisors(devices) if all(count % tp == 0 for count in counts)]
