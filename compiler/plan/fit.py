"""A step that does not fit the devices' memory: the way out, found by trying, and what is said of it.

Changes of the recipe that take less memory are tried, the smallest first. What is trained stays the same:
model, adapters, data and the rows of an optimizer step. The base weights are quantized only when nothing
gentler is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

from recipec.compiler.emitters.backends import Backend, diagnosed
from recipec.compiler.lowering import libtpu
from recipec.compiler.lowering.hardware import Accelerator, arranged, from_topology, generations
from recipec.compiler.lowering.lower import lower
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.sizes import tp_sizes
from recipec.compiler.plan.results import Estimate, Memory, Temporary
from recipec.compiler.plan.units import gib, percent
from recipec.compiler.wording import divisors, flow, listing
from recipec.runtime.model.partition_rules import TOKENS
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.load import load

HEADROOM = 0.02
"""Share of the memory that has to stay free: the figures are the compiler's, and rounded."""
PARTS = {
    "temporaries": "temporaries",
    "weights": "base weights",
    "adapters": "adapters",
    "optimizer": "optimizer state",
    "batch": "the batch",
    "padding": "padding",
    "code": "the program",
}
"""Fields of Memory in words."""
NAMED_PARTS = 3
NAMED_ARRAYS = 4
PATH = "train.micro_batch_size"
"""What is pointed at where no change of the recipe is known to help."""


@dataclass(frozen=True)
class FitResult:
    """What trying came to.

    Attributes:
        tried: what was compiled, in order; None for what could not be.
        way, estimate: the first that fits, None when none did.
    """

    tried: tuple[tuple[MemoryReduction, Estimate | None], ...]
    way: MemoryReduction | None = None
    estimate: Estimate | None = None


def find(
    program: Program,
    fits: Callable[[tuple[str, ...]], Estimate | None],
    most: int = 8,
    *,
    given: Sequence[str] = (),
    estimate: Estimate | None = None,
    backend: Backend = Backend.TUNIX,
) -> FitResult:
    """The smallest change of the recipe with which the step fits.

    Of each ladder the last rung is tried first: when that does not fit, none of it does. When it does, the
    first one that fits is looked for by halves.

    Args:
        program: does not fit.
        fits: compiles the recipe with a way's `sets` on top of `given`; None when it cannot be compiled.
        most: that are compiled. What the checks refuse is not.
        given: what --set changed in the recipe.
        estimate: of the program as it stands. What cannot fit by it is not compiled.
        backend: whose step it is.
    """
    tried: list[tuple[MemoryReduction, Estimate | None]] = []

    def attempt(way: MemoryReduction) -> Estimate | None:
        if len(tried) == most or not _accepted(program, (*given, *way.sets), backend):
            return None
        tried.append((way, fits(way.sets)))
        return tried[-1][1]

    for ladder in _ladders(program):
        rungs = [way for way in ladder if estimate is None or not hopeless(way, estimate)]
        last = None
        while rungs and last is None:
            way = rungs.pop()
            last = attempt(way)
        if last is None or not _enough(last):
            continue
        fitting = way, last
        first, end = 0, len(rungs)
        while first < end:
            middle = (first + end) // 2
            milder = attempt(rungs[middle])
            if milder is not None and _enough(milder):
                fitting, end = (rungs[middle], milder), middle
            else:
                first = middle + 1
        return FitResult(tuple(tried), *fitting)
    return FitResult(tuple(tried))


def hopeless(way: MemoryReduction, estimate: Estimate) -> bool:
    """Whether a way cannot save enough, whatever the compiler makes of it.

    Nothing is concluded from a step that the compiler refused (there is no time then): it asks for more
    than a step takes that it lays out.
    """
    memory = estimate.memory
    if estimate.seconds <= 0:
        return False
    arguments = 0.0 if way.arguments else memory.used - memory.temporaries
    return arguments + way.kept * memory.temporaries > (1 - HEADROOM) * memory.available


def _accepted(program: Program, sets: Sequence[str], backend: Backend) -> bool:
    changed = lower(load(program.source, sets), planning=True).program
    return changed is not None and all(d.severity != "error" for d in diagnosed(changed, (backend,)))


def _enough(estimate: Estimate) -> bool:
    return estimate.memory.headroom >= HEADROOM * estimate.memory.available


def diagnostic(program: Program, estimate: Estimate, found: FitResult | None = None) -> Diagnostic:
    """E1001, of a program that does not fit.

    Args:
        estimate: of the program.
        found: what trying came to; None when nothing was tried.
    """
    memory = estimate.memory
    message = (
        f"the step needs {gib(memory.used)} GiB of each device's memory, and a device of "
        f"{program.accelerator.name} has {gib(memory.available)} GiB: {_parts(memory)}"
    )
    if estimate.largest:
        message += f"; the largest temporaries are {listing(map(_array, estimate.largest[:NAMED_ARRAYS]))}"
    if found is None:
        return Diagnostic("E1001", message, PATH, "`recipe plan --search` looks for what fits")
    if found.way is None or found.estimate is None:
        return Diagnostic("E1001", message, PATH, _in_vain(found))
    path = found.way.sets[0].partition("=")[0]
    lines = [*yaml_lines(found.way.sets), _compared(estimate, found.estimate), f"with this, {found.way.cost}"]
    return Diagnostic("E1001", message, path, "\n".join(lines))


def warning(program: Program, memory: Memory) -> Diagnostic | None:
    """W1007, of a program that was planned before; None where it fits."""
    if memory.headroom >= 0:
        return None
    profile = libtpu.profile(program.recipe)
    flags = "" if profile == "none" else f" with the flags of profile {profile}"
    message = (
        f"by an earlier plan the step{flags} needs {gib(memory.used)} GiB of each device's memory, "
        f"and a device of {program.accelerator.name} has {gib(memory.available)} GiB"
    )
    path = PATH if profile == "none" else "xla.profile"
    return Diagnostic("W1007", message, path, f"`recipe plan {program.source}` looks for what fits")


def yaml_lines(sets: Sequence[str]) -> list[str]:
    """--set arguments as the recipe's lines, each section once."""
    sections: dict[str, list[str]] = {}
    for argument in sets:
        path, _, value = argument.partition("=")
        section, _, key = path.partition(".")
        sections.setdefault(section, []).append(f"  {key}: {value}")
    return [line for section, keys in sections.items() for line in (f"{section}:", *keys)]


def _parts(memory: Memory) -> str:
    sizes = {words: getattr(memory, name) for name, words in PARTS.items()}
    largest = sorted(sizes, key=lambda words: -sizes[words])[:NAMED_PARTS]
    return listing(f"{gib(sizes[words])} GiB of {words}" for words in largest if sizes[words] > 0)


def _array(array: Temporary) -> str:
    count = f"{array.count} x " if array.count > 1 else ""
    return f"`{array.name}` ({count}{array.shape}, {gib(array.bytes)} GiB)"


def _compared(before: Estimate, after: Estimate) -> str:
    memory = after.memory
    words = (
        f"estimated: {gib(memory.used)} of {gib(memory.available)} GiB, "
        f"{percent(memory.headroom / memory.available)} free"
    )
    present, changed = _seconds_per_token(before), _seconds_per_token(after)
    return f"{words}; {changed / present:.2f} times the time a token" if present and changed else words


def _seconds_per_token(estimate: Estimate) -> float:
    """Of a micro-batch, padding counted as tokens; 0 when it is not known."""
    tokens = estimate.rows * estimate.row_length
    return estimate.seconds / tokens if tokens else 0.0


def _in_vain(found: FitResult) -> str:
    if not found.tried:
        return "no smaller micro-batch, no rematerialization, no mesh and no larger slice is left to try"
    lines = ["nothing that was tried fits:"]
    for way, estimate in found.tried:
        outcome = "does not compile" if estimate is None else f"{gib(estimate.memory.used)} GiB"
        lines.append(f"  {', '.join(way.sets)}: {outcome}")
    return "\n".join([*lines, "`recipe plan --search` looks at more"])


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
"""Bits of a base weight under each quantization, the gentler first."""


@dataclass(frozen=True)
class MemoryReduction:
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

    def __add__(self, other: MemoryReduction) -> MemoryReduction:
        return MemoryReduction(
            self.sets + other.sets,
            f"{self.cost}; {other.cost}",
            self.kept * other.kept,
            self.arguments or other.arguments,
        )


def reductions(program: Program) -> Iterator[MemoryReduction]:
    """Changes of the recipe, the smallest first."""
    return chain.from_iterable(_ladders(program))


def _ladders(program: Program) -> Iterator[list[MemoryReduction]]:
    """The ways, those together of which each takes less memory than the one before."""
    of = (_profile, _micro_batches, _attention, _policies, _tensor_parallel)
    kinds = [list(kind(program)) for kind in of]
    yield from kinds
    yield list(_data_parallel(program))
    for first, second in combinations([kind[-1] for kind in kinds if kind], 2):
        yield [first + second]
    yield list(_quantized(program))
    yield list(_larger(program))


def _profile(program: Program) -> Iterator[MemoryReduction]:
    """The compiler's defaults, which drop gathered weights at once."""
    if libtpu.profile(program.recipe) != "none":
        yield MemoryReduction(("xla.profile=none",), "products wait for the gathers of their weights")


def _micro_batches(program: Program) -> Iterator[MemoryReduction]:
    """Smaller micro-batches, of the same optimizer step: halved as often as it goes, at last one row."""
    train, size = program.recipe.train, program.recipe.train.micro_batch_size
    smaller = size
    for divisor in reversed(divisors(size)):
        if divisor == 1 < smaller or divisor * 2 <= smaller:
            smaller = divisor
            count = train.global_batch_size // (divisor * program.data_parallel)
            yield MemoryReduction(
                (f"train.micro_batch_size={divisor}",),
                f"an optimizer step takes {count} micro-batches in place of {program.accumulation_steps}",
                divisor / size,
            )


def _attention(program: Program) -> Iterator[MemoryReduction]:
    kernel = program.family.flash_attention and program.accelerator.platform == "tpu"
    if program.recipe.model.attention == "dot" and kernel:
        yield MemoryReduction(
            ("model.attention=splash",),
            "attention is the TPU's fused kernel, which keeps no scores in memory and rounds otherwise",
        )


def _policies(program: Program) -> Iterator[MemoryReduction]:
    """The policies that keep less than the recipe's."""
    order = list(RECOMPUTED)
    present = program.recipe.remat.policy
    if present == "offload_dots":
        present = "save_dots"
    for policy in order[order.index(present) + 1 :] if present in order else order:
        yield MemoryReduction((f"remat.policy={policy}",), RECOMPUTED[policy])


def _tensor_parallel(program: Program) -> Iterator[MemoryReduction]:
    """Larger tp, which splits the activations of a row over more devices."""
    axes = program.recipe.mesh.axes
    devices = program.accelerator.devices // program.accelerator.slices // _cp(program)
    for tp in tp_sizes(program.architecture, devices):
        if tp > axes["tp"]:
            yield MemoryReduction(
                (_axes(program, devices // tp, tp),),
                f"{tp} devices share each row, and exchange activations in every layer",
                axes["tp"] / tp,
                arguments=True,
            )


def _data_parallel(program: Program) -> Iterator[MemoryReduction]:
    """Smaller tp and larger fsdp, for what tp keeps whole on each device."""
    axes, train, slices = program.recipe.mesh.axes, program.recipe.train, program.accelerator.slices
    devices = program.accelerator.devices // slices // _cp(program)
    for tp in reversed(tp_sizes(program.architecture, devices)):
        fsdp = devices // tp
        if tp < axes["tp"] and train.global_batch_size % (train.micro_batch_size * fsdp * slices) == 0:
            yield MemoryReduction(
                (_axes(program, fsdp, tp),),
                f"{fsdp * slices} devices compute rows of their own, and gather each layer's weights",
                arguments=True,
            )


def _quantized(program: Program) -> Iterator[MemoryReduction]:
    lora = program.recipe.lora
    if lora is None or lora.quantize == "nf4" or lora.products:
        return
    for kind, bits in ROUNDED.items():
        if kind != lora.quantize:
            cost = f"the base weights are rounded to {bits} bits while the adapters are trained"
            yield MemoryReduction((f"lora.quantize={kind}",), cost, arguments=True)


def _larger(program: Program) -> Iterator[MemoryReduction]:
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
        sets = [_machine(program, larger), _axes(program, fsdp, tp)]
        if micro != program.recipe.train.micro_batch_size:
            sets.append(f"train.micro_batch_size={micro}")
        yield MemoryReduction(tuple(sets), _price(present, larger), arguments=True)


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
    for tp in tp_sizes(program.architecture, devices // _cp(program)):
        fsdp = devices // _cp(program) // tp
        for micro in reversed(divisors(train.micro_batch_size)):
            if tp >= tp_now and train.global_batch_size % (micro * fsdp * slices) == 0:
                return fsdp, tp, micro
    return None


def _axes(program: Program, fsdp: int, tp: int) -> str:
    return f"mesh.axes={flow(arranged(program.accelerator.slices, fsdp, tp, _cp(program)))}"


def _cp(program: Program) -> int:
    return program.recipe.mesh.axes.get(TOKENS, 1)
