"""A step that does not fit the devices' memory: the way out, found by trying, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compiler.backends import Backend, diagnosed
from compiler.lower import lower
from compiler.plan.results import Estimate, Memory, Temporary
from compiler.plan.units import gib, percent
from compiler.plan.ways import Way, ladders
from compiler.program import Program
from compiler.wording import listing
from spec.diagnostics import Diagnostic
from spec.load import load

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
class Found:
    """What trying came to.

    Attributes:
        tried: what was compiled, in order; None for what could not be.
        way, estimate: the first that fits, None when none did.
    """

    tried: tuple[tuple[Way, Estimate | None], ...]
    way: Way | None = None
    estimate: Estimate | None = None


def find(
    program: Program,
    fits: Callable[[tuple[str, ...]], Estimate | None],
    most: int = 8,
    *,
    given: Sequence[str] = (),
    estimate: Estimate | None = None,
    backend: Backend = Backend.TUNIX,
) -> Found:
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
    tried: list[tuple[Way, Estimate | None]] = []

    def attempt(way: Way) -> Estimate | None:
        if len(tried) == most or not _accepted(program, (*given, *way.sets), backend):
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
        return Found(tuple(tried), *fitting)
    return Found(tuple(tried))


def hopeless(way: Way, estimate: Estimate) -> bool:
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


def diagnostic(program: Program, estimate: Estimate, found: Found | None = None) -> Diagnostic:
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


def _in_vain(found: Found) -> str:
    if not found.tried:
        return "no smaller micro-batch, no rematerialisation, no mesh and no larger slice is left to try"
    lines = ["nothing that was tried fits:"]
    for way, estimate in found.tried:
        outcome = "does not compile" if estimate is None else f"{gib(estimate.memory.used)} GiB"
        lines.append(f"  {', '.join(way.sets)}: {outcome}")
    return "\n".join([*lines, "`recipe plan --search` looks at more"])
