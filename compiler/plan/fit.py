"""Find a change of the recipe with which a step fits the devices' memory, and report it.

Changes that take less memory are compiled, the smallest change first. Model, adapters, data and the rows of
an optimizer step stay the same. The base weights are quantized only after the milder changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from recipec.compiler.checks.backends import diagnosed
from recipec.compiler.lower import lower
from recipec.compiler.lowering import libtpu
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.hardware import Accelerator, arranged, from_topology, generations
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.sizes import tp_sizes
from recipec.compiler.pages.numbers import gib_number, percent, plain
from recipec.compiler.plan.results import Estimate, Memory, Temporary
from recipec.compiler.wording import divisors, listing
from recipec.runtime.model.partition_rules import TOKENS
from recipec.spec.codes import Code
from recipec.spec.core_schema import flow
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.load import load

HEADROOM = 0.02
"""Share of the memory that must stay free, because the compiler's figures are rounded."""
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
"""The key that a diagnostic points at when no change of the recipe is known to help."""


@dataclass(frozen=True)
class FitResult:
    """The changes that were tried, and the one that fits.

    Attributes:
        tried: the compiled changes in order, with their estimates; None for a change that does not compile.
        way, estimate: the smallest change that fits, and its estimate; None when none fits.
    """

    tried: tuple[tuple[MemoryReduction, Estimate | None], ...]
    way: MemoryReduction | None = None
    estimate: Estimate | None = None


def find(
    program: Program,
    fits: Callable[[tuple[str, ...]], Estimate | None],
    most: int = 8,
    *,
    overrides: Sequence[str] = (),
    estimate: Estimate | None = None,
    backend: Backend = Backend.TUNIX,
) -> FitResult:
    """Find the smallest change of the recipe with which the step fits.

    A ladder is a list of changes, each of which takes less memory than the one before. The last change of a
    ladder is tried first. If it does not fit, the whole ladder is skipped. If it fits, a binary search finds
    the first change of the ladder that fits.

    Args:
        program: the program that does not fit.
        fits: compiles the recipe with a change's `sets` on top of `overrides`; None when it cannot be
            compiled.
        most: changes that are compiled at most. Changes that the checks refuse do not count.
        overrides: the --set arguments of the command.
        estimate: estimate of the unchanged program. Changes that cannot fit by it are not compiled.
        backend: the backend whose step is compiled.
    """
    tried: list[tuple[MemoryReduction, Estimate | None]] = []

    def attempt(way: MemoryReduction) -> Estimate | None:
        if len(tried) == most or not _accepted(program, (*overrides, *way.sets), backend):
            return None
        tried.append((way, fits(way.sets)))
        return tried[-1][1]

    for ladder in ladders(program):
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
    """Return whether a change cannot save enough memory, even in the best case.

    Return False for an estimate of a step that the compiler refused, which has no time: the memory in a
    refusal is more than a step takes once the compiler lays it out.
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


E1001 = Code(
    "E1001",
    "the step does not fit",
    cause="By the compiler's result, the training step needs more memory than each device has.",
    cure="Use the change in the help, which was compiled and fits. `recipe plan --search` tries more.",
)


def diagnostic(program: Program, estimate: Estimate, fit: FitResult | None = None) -> Diagnostic:
    """Return diagnostic E1001 for a program that does not fit.

    Args:
        estimate: the program's estimate.
        fit: the result of `find`; None when nothing was tried.
    """
    memory = estimate.memory
    message = (
        f"the step needs {gib_number(memory.used)} GiB of each device's memory, and a device of "
        f"{program.accelerator.name} has {gib_number(memory.available)} GiB: {_parts(memory)}"
    )
    if estimate.largest:
        message += f"; the largest temporaries are {listing(map(_array, estimate.largest[:NAMED_ARRAYS]))}"
    if fit is None:
        return Diagnostic(
            E1001, message, PATH, "`recipe plan --search` searches for a configuration that fits"
        )
    if fit.way is None or fit.estimate is None:
        return Diagnostic(E1001, message, PATH, _in_vain(fit))
    path = fit.way.sets[0].partition("=")[0]
    lines = [*yaml_lines(fit.way.sets), _compared(estimate, fit.estimate), f"with this, {fit.way.cost}"]
    return Diagnostic(E1001, message, path, "\n".join(lines))


W1007 = Code(
    "W1007",
    "step did not fit when it was planned",
    cause="`recipe plan` compiled this step before, on this machine and with these versions. The step "
    "needs more memory than each device has. Flags that overlap weight gathers with computation "
    "keep more gathered weights in memory.",
    cure="`recipe plan` looks for a change that fits. Without the flags of `xla.profile` a step takes "
    "less memory.",
)


def warning(program: Program, memory: Memory) -> Diagnostic | None:
    """Return warning W1007 for a program that was planned before and does not fit, or None if it fits."""
    if memory.headroom >= 0:
        return None
    profile = libtpu.profile(program.recipe)
    flags = "" if profile == "none" else f" with the flags of profile {profile}"
    message = (
        f"by an earlier plan the step{flags} needs {gib_number(memory.used)} GiB of each device's memory, "
        f"and a device of {program.accelerator.name} has {gib_number(memory.available)} GiB"
    )
    path = PATH if profile == "none" else "xla.profile"
    return Diagnostic(W1007, message, path, f"`recipe plan {program.source}` suggests a change that fits")


def yaml_lines(sets: Sequence[str]) -> list[str]:
    """Return --set arguments as lines of a recipe, each section once."""
    sections: dict[str, list[str]] = {}
    for argument in sets:
        path, _, value = argument.partition("=")
        section, _, key = path.partition(".")
        sections.setdefault(section, []).append(f"  {key}: {value}")
    return [line for section, keys in sections.items() for line in (f"{section}:", *keys)]


def _parts(memory: Memory) -> str:
    sizes = {words: getattr(memory, name) for name, words in PARTS.items()}
    largest = sorted(sizes, key=lambda words: -sizes[words])[:NAMED_PARTS]
    return listing(f"{gib_number(sizes[words])} GiB of {words}" for words in largest if sizes[words] > 0)


def _array(array: Temporary) -> str:
    count = f"{array.count} x " if array.count > 1 else ""
    return f"`{array.name}` ({count}{array.shape}, {gib_number(array.bytes)} GiB)"


def _compared(before: Estimate, after: Estimate) -> str:
    memory = after.memory
    words = (
        f"estimated: {gib_number(memory.used)} of {gib_number(memory.available)} GiB, "
        f"{plain(percent(memory.headroom / memory.available))} free"
    )
    present, changed = _seconds_per_token(before), _seconds_per_token(after)
    return f"{words}; {changed / present:.2f} times the time a token" if present and changed else words


def _seconds_per_token(estimate: Estimate) -> float:
    """Return the seconds per token of a micro-batch, padding included; 0 when unknown."""
    tokens = estimate.rows * estimate.row_length
    return estimate.seconds / tokens if tokens else 0.0


def _in_vain(fit: FitResult) -> str:
    if not fit.tried:
        return "no smaller micro-batch, rematerialization, mesh or larger slice is left to try"
    lines = ["nothing that was tried fits:"]
    for way, estimate in fit.tried:
        outcome = "does not compile" if estimate is None else f"{gib_number(estimate.memory.used)} GiB"
        lines.append(f"  {', '.join(way.sets)}: {outcome}")
    return "\n".join([*lines, "`recipe plan --search` tries more"])


LARGER_SLICES = 2
"""How many larger slices than the recipe's own are tried, the smallest first."""
RECOMPUTED = {
    "save_dots": "the backward pass computes norms, rotations and activation functions again",
    "save_attention": "the backward pass computes each layer again, but not its attention",
    "block": "the backward pass computes each attention and each feed-forward block again",
    "decoder": "the backward pass computes each layer again",
}
"""The cost of each remat policy, sorted by how much it keeps for the backward pass, the most first.
offload_dots is not tried, because it needs the host's memory, whose size is not known here."""
ROUNDED = {"int8": "8", "nf4": "4"}
"""Bits of a base weight under each quantization, the milder one first."""


@dataclass(frozen=True)
class MemoryReduction:
    """A change of the recipe that takes less memory of a device.

    Attributes:
        sets: the change as --set arguments.
        cost: the price of the change, a sentence without capital and full stop.
        kept: lower bound of the share of the temporaries that remains.
        arguments: whether weights and optimizer state also take less.
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


def ladders(program: Program) -> Iterator[list[MemoryReduction]]:
    """Yield the changes as ladders: in a ladder, each change takes less memory than the one before."""
    of = (_profile, _micro_batches, _attention, _policies, _tensor_parallel)
    kinds = [list(kind(program)) for kind in of]
    yield from kinds
    yield list(_data_parallel(program))
    for first, second in combinations([kind[-1] for kind in kinds if kind], 2):
        yield [first + second]
    yield list(_quantized(program))
    yield list(_larger(program))


def _profile(program: Program) -> Iterator[MemoryReduction]:
    """Yield the compiler's default flags, with which gathered weights are freed at once."""
    if libtpu.profile(program.recipe) != "none":
        yield MemoryReduction(("xla.profile=none",), "products wait for the gathers of their weights")


def _micro_batches(program: Program) -> Iterator[MemoryReduction]:
    """Yield smaller micro-batches for the same optimizer step: each at most half the last, down to 1 row."""
    train, size = program.recipe.train, program.recipe.train.micro_batch_size
    smaller = size
    for divisor in reversed(divisors(size)):
        if divisor == 1 < smaller or divisor * 2 <= smaller:
            smaller = divisor
            count = train.global_batch_size // (divisor * program.data_parallel)
            yield MemoryReduction(
                (f"train.micro_batch_size={divisor}",),
                f"an optimizer step takes {count} micro-batches instead of {program.accumulation_steps}",
                divisor / size,
            )


def _attention(program: Program) -> Iterator[MemoryReduction]:
    kernel = program.family.flash_attention and program.accelerator.platform == "tpu"
    if program.recipe.model.attention == "dot" and kernel:
        yield MemoryReduction(
            ("model.attention=splash",),
            "attention is the TPU's fused kernel, which keeps no scores in memory and rounds differently",
        )


def _policies(program: Program) -> Iterator[MemoryReduction]:
    """Yield the remat policies that keep less than the recipe's."""
    order = list(RECOMPUTED)
    present = program.recipe.remat.policy
    if present == "offload_dots":
        present = "save_dots"
    for policy in order[order.index(present) + 1 :] if present in order else order:
        yield MemoryReduction((f"remat.policy={policy}",), RECOMPUTED[policy])


def _tensor_parallel(program: Program) -> Iterator[MemoryReduction]:
    """Yield meshes with larger tp, which splits the activations of a row over more devices."""
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
    """Yield meshes with smaller tp and larger fsdp, which also shards arrays that tp keeps whole."""
    axes, train, slices = program.recipe.mesh.axes, program.recipe.train, program.accelerator.slices
    devices = program.accelerator.devices // slices // _cp(program)
    for tp in reversed(tp_sizes(program.architecture, devices)):
        fsdp = devices // tp
        if tp < axes["tp"] and train.global_batch_size % (train.micro_batch_size * fsdp * slices) == 0:
            yield MemoryReduction(
                (_axes(program, fsdp, tp),),
                f"{fsdp * slices} devices compute different rows, and gather each layer's weights",
                arguments=True,
            )


def _quantized(program: Program) -> Iterator[MemoryReduction]:
    recipe, model = program.recipe, program.recipe.model
    settled = model.quantization == "nf4" or model.quantized_matmul is not None
    if recipe.lora is None or settled or recipe.train.qat is not None:
        return
    for kind, bits in ROUNDED.items():
        if kind != model.quantization:
            cost = f"the base weights are rounded to {bits} bits while the adapters are trained"
            yield MemoryReduction((f"model.quantization={kind}",), cost, arguments=True)


def _larger(program: Program) -> Iterator[MemoryReduction]:
    """Yield larger slices of the same generation whose devices can all get rows of an optimizer step."""
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
    """Return fsdp, tp and micro-batch for `devices` devices of a slice, or None.

    tp is the smallest that is at least the recipe's.
    """
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
