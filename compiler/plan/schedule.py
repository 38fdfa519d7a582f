"""A compiled step as a schedule of plain values.

`hlo/schedule.py` reads it from the step's HLO text, `prices.py` adds the times of its operations, and
`timeline.py` runs it. Every figure is in seconds at the full published rates of the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

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
        operations: operations without a known time: (number, how often it runs).
    """

    products: float = 0.0
    memory: float = 0.0
    kernels: float = 0.0
    operations: tuple[tuple[int, int], ...] = ()

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
    """Steps that are run `times` times."""

    times: int
    body: tuple[Step, ...]


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


def total(steps: Iterable[Step]) -> Work:
    """Return all work of steps, with loops counted in full."""
    found = Work()
    for step in steps:
        if isinstance(step, Loop):
            found += total(step.body) * step.times
        elif isinstance(step, Work):
            found += step
    return found
