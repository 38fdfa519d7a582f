"""Prices: the seconds of operations, from libtpu's own cycles.

libtpu first schedules a step. It then chooses the tiling of each operation while it generates code, which
takes most of a compile. The same operation has the same cycles anywhere in a program. So a plan compiles a
few layers to the end, and uses the times of their operations for the schedule of all layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from recipec.compiler.plan.schedule import Loop, Operation, Schedule, Step, Work, Worked


@dataclass(frozen=True)
class Prices:
    """Seconds of operations at full rates.

    Attributes:
        exact: seconds by an operation's `key`; None where libtpu gave no cycles.
        alike: mean seconds by `alike`, of operations that differ only in the memories of their arrays.
        products: mean seconds by `products`, of operations with the same matrix products.
        beside: ratio of libtpu's seconds to `Operation.seconds` (the longer of FLOPs and bytes at full
            rates), for operations with matrix products, and for all others.
    """

    exact: Mapping[str, float | None] = field(default_factory=dict)
    alike: Mapping[str, float] = field(default_factory=dict)
    products: Mapping[str, float] = field(default_factory=dict)
    beside: tuple[float, float] = (1.0, 1.0)

    def of(self, operation: Operation) -> tuple[float, bool]:
        """Return an operation's seconds, and whether they come from libtpu's cycles."""
        if operation.key in self.exact:
            found = self.exact[operation.key]
            return (operation.seconds, False) if found is None else (found, True)
        for prices, key in ((self.alike, operation.alike), (self.products, operation.products)):
            if key in prices:
                return prices[key], True
        return operation.seconds * self.beside[0 if operation.products else 1], False


def prices(found: Iterable[tuple[Operation, float | None]]) -> Prices:
    """Return the prices from the operations of a module that was compiled to the end.

    Args:
        found: each operation with its seconds by libtpu's cycles; None without cycles.
    """
    every = list(found)
    costed = [(operation, seconds) for operation, seconds in every if seconds is not None]
    return Prices(
        {operation.key: seconds for operation, seconds in every},
        _means((operation.alike, seconds) for operation, seconds in costed),
        _means((operation.products, seconds) for operation, seconds in costed if operation.products),
        (_beside(costed, lambda one: one.products != ""), _beside(costed, lambda one: one.products == "")),
    )


def _means(found: Iterable[tuple[str, float]]) -> dict[str, float]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for key, one in found:
        seconds[key].append(one)
    return {key: sum(each) / len(each) for key, each in seconds.items()}


def _beside(found: Iterable[tuple[Operation, float]], which: Callable[[Operation], bool]) -> float:
    pairs = [(seconds, one.seconds) for one, seconds in found if one.seconds and which(one)]
    return sum(seconds for seconds, _ in pairs) / sum(least for _, least in pairs) if pairs else 1.0


def priced(schedule: Schedule, by: Prices) -> Schedule:
    """Return a schedule in which each operation is replaced by its seconds."""
    seconds = [by.of(operation) for operation in schedule.operations]
    core = costed = 0.0
    worked: dict[tuple[str, bool], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

    def of(steps: tuple[Step, ...], times: int) -> tuple[Step, ...]:
        nonlocal core, costed
        out: list[Step] = []
        for step in steps:
            if isinstance(step, Loop):
                out.append(Loop(step.times, of(step.body, times * step.times)))
            elif isinstance(step, Work):
                products, memory = step.products, step.memory
                for number, count in step.operations:
                    each, known = seconds[number]
                    core += times * count * each
                    costed += times * count * each * known
                    kind = schedule.names[number], bool(schedule.operations[number].products)
                    runs, spent = worked[kind]
                    worked[kind] = runs + times * count, spent + times * count * each
                    if kind[1]:
                        products += count * each
                    else:
                        memory += count * each
                if products or memory or step.kernels:
                    out.append(Work(products, memory, step.kernels))
            else:
                out.append(step)
        return tuple(out)

    steps = of(schedule.steps, 1)
    return replace(
        schedule,
        steps=steps,
        operations=(),
        names=(),
        worked=tuple(Worked(*kind, *spent) for kind, spent in worked.items()),
        costed=costed / core if core else 1.0,
    )
