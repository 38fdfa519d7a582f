"""A compiled step as a schedule of plain values, and the prices of its operations from libtpu's own cycles.

`hlo/read_schedule.py` reads both from the step's HLO text, and `timeline.py` runs the schedule. Every figure
is in seconds at the full published rates of the device.

libtpu first schedules a step. It then chooses the tiling of each operation while it generates code, which
takes most of a compile. The same operation has the same cycles anywhere in a program. So a plan compiles a
few layers to the end, and uses the times of their operations for the schedule of all layers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from pydantic import ConfigDict, TypeAdapter


@dataclass(frozen=True)
class Transfer:
    """Data that moves while the core computes or waits.

    Attributes:
        kind: "all-gather" and so on; "copy" within the device's memory, "host" to or from the host's.
        name: the weight that it belongs to, and the operation.
        axes: mesh axes that a collective runs over.
        over_dcn: whether it leaves the slice.
        bytes: bytes that the device ends with.
        seconds: its time at full speed.
        along: what it occupies: "0", "1", ... for dimensions of the torus, "dcn", "hbm" or "host".
    """

    kind: str
    name: str
    axes: tuple[str, ...]
    over_dcn: bool
    bytes: float
    seconds: float
    along: tuple[str, ...]


@dataclass(frozen=True)
class Operation:
    """An operation of the core, whose time is not known yet.

    Attributes:
        key: digest of what it computes, and of the shapes, layouts and memories.
        alike: the same digest without the memories.
        products: digest of its matrix products alone, "" without any.
        seconds: the longer of the times of its FLOPs and of its bytes, at full rates.
    """

    key: str
    alike: str
    products: str
    seconds: float


@dataclass(frozen=True)
class Work:
    """Work that the core does without a pause.

    Attributes:
        products: seconds of operations with matrix products.
        memory: seconds of other operations, which HBM or the vector unit limits.
        kernels: seconds of custom kernels.
        operations: operations without a known time: (number, how often it runs; on average, in a branch).
    """

    products: float = 0.0
    memory: float = 0.0
    kernels: float = 0.0
    operations: tuple[tuple[int, float], ...] = ()

    def __add__(self, other: Work) -> Work:
        operations = self.operations or other.operations
        if self.operations and other.operations:
            operations = tuple((Counter(dict(self.operations)) + Counter(dict(other.operations))).items())
        return Work(
            self.products + other.products,
            self.memory + other.memory,
            self.kernels + other.kernels,
            operations,
        )

    def __mul__(self, times: float) -> Work:
        return Work(times * self.products, times * self.memory, times * self.kernels)


@dataclass(frozen=True)
class Worked:
    """Operations of one name.

    Attributes:
        name: the weight that they read, and what they do: "layers.{}.mlp.up_proj.kernel / dot_general".
        products: whether they have matrix products.
        count, seconds: for all of them together.
    """

    name: str
    products: bool
    count: float
    seconds: float


@dataclass(frozen=True)
class Start:
    """The start of transfer number `transfer`. `Wait` refers to this start by the number `mark`."""

    transfer: int
    mark: int


@dataclass(frozen=True)
class Wait:
    """The core waits for the transfer that was started with this mark, if there is one."""

    mark: int


@dataclass(frozen=True)
class Exposed:
    """Transfer number `transfer`, for whose whole time the core waits."""

    transfer: int


@dataclass(frozen=True)
class Loop:
    """Steps that are run `times` times. If the text gives no number, `counted` is False and `times` is 1."""

    times: int
    body: tuple[Step, ...]
    counted: bool = True


Step = Work | Start | Wait | Exposed | Loop


@dataclass(frozen=True)
class Schedule:
    """The schedule of a training step.

    Attributes:
        operations, names: the operations by number, and their names; () once their times are filled in.
        worked: the core's work by name, once the times are filled in.
        uncounted_loops: loops whose number of turns the text does not give; their bodies count once.
        costed: share of the core's seconds that come from libtpu's own cycles, once the times are filled in.
    """

    __pydantic_config__ = ConfigDict(defer_build=True)  # few commands read or write it

    steps: tuple[Step, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    operations: tuple[Operation, ...] = ()
    names: tuple[str, ...] = ()
    worked: tuple[Worked, ...] = ()
    uncounted_loops: int = 0
    costed: float = 1.0


SCHEDULE: TypeAdapter[Schedule] = TypeAdapter(Schedule)


@dataclass(frozen=True)
class Prices:
    """Seconds of operations at full rates.

    Attributes:
        exact: seconds by an operation's `key`; None where libtpu gave no cycles.
        alike: mean seconds by `alike`, of operations that differ only in the memories of their arrays.
        products: mean seconds by `products`, of operations with the same matrix products.
        ratio: ratio of libtpu's seconds to `Operation.seconds` (the longer of FLOPs and bytes at full
            rates), for operations with matrix products, and for all others.
    """

    exact: Mapping[str, float | None] = field(default_factory=dict)
    alike: Mapping[str, float] = field(default_factory=dict)
    products: Mapping[str, float] = field(default_factory=dict)
    ratio: tuple[float, float] = (1.0, 1.0)

    def of(self, operation: Operation) -> tuple[float, bool]:
        """Return an operation's seconds, and whether they come from libtpu's cycles."""
        if operation.key in self.exact:
            seconds = self.exact[operation.key]
            return (operation.seconds, False) if seconds is None else (seconds, True)
        for prices, key in ((self.alike, operation.alike), (self.products, operation.products)):
            if key in prices:
                return prices[key], True
        return operation.seconds * self.ratio[0 if operation.products else 1], False


def prices(operations: Iterable[tuple[Operation, float | None]]) -> Prices:
    """Return the prices from the operations of a module that was compiled to the end.

    Args:
        operations: each operation with its seconds by libtpu's cycles; None without cycles.
    """
    every = list(operations)
    costed = [(operation, seconds) for operation, seconds in every if seconds is not None]
    return Prices(
        {operation.key: seconds for operation, seconds in every},
        _means((operation.alike, seconds) for operation, seconds in costed),
        _means((operation.products, seconds) for operation, seconds in costed if operation.products),
        (
            _ratio(costed, lambda operation: operation.products != ""),
            _ratio(costed, lambda operation: operation.products == ""),
        ),
    )


def _means(samples: Iterable[tuple[str, float]]) -> dict[str, float]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for key, sample in samples:
        seconds[key].append(sample)
    return {key: sum(times) / len(times) for key, times in seconds.items()}


def _ratio(operations: Iterable[tuple[Operation, float]], which: Callable[[Operation], bool]) -> float:
    pairs = [
        (seconds, operation.seconds)
        for operation, seconds in operations
        if operation.seconds and which(operation)
    ]
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
                out.append(replace(step, body=of(step.body, times * step.times)))
            elif isinstance(step, Work):
                products, memory = step.products, step.memory
                for number, count in step.operations:
                    duration, known = seconds[number]
                    core += times * count * duration
                    costed += times * count * duration * known
                    kind = schedule.names[number], bool(schedule.operations[number].products)
                    runs, spent = worked[kind]
                    worked[kind] = runs + times * count, spent + times * count * duration
                    if kind[1]:
                        products += count * duration
                    else:
                        memory += count * duration
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


def with_turns(schedule: Schedule, turns: int) -> Schedule:
    """Return a schedule whose outermost loops without a known number of turns have `turns` turns."""
    steps = (
        replace(step, times=turns) if isinstance(step, Loop) and not step.counted else step
        for step in schedule.steps
    )
    return replace(schedule, steps=tuple(steps))
