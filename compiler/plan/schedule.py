"""A compiled step as a schedule: plain values, read from its text by `hlo/schedule.py`, priced by
`prices.py`, run by `timeline.py`.

Every figure is in seconds at the full published rates of the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import ConfigDict, TypeAdapter


@dataclass(frozen=True)
class Transfer:
    """Data that moves beside the core, or while it waits.

    Attributes:
        kind: "all-gather" and so on; "copy" within the device's memory, "host" to or from the host's.
        name: the weight that it belongs to, and the operation.
        axes: of the mesh, that a collective runs over.
        over_dcn: whether it leaves the slice.
        bytes: that the device ends with.
        seconds: at full speed.
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
    """An operation of the core, whose price is still to be found.

    Attributes:
        key: what it computes, on which shapes, in which layouts and memories.
        alike: the same without the memories.
        products: the matrix products alone, "" where there are none.
        seconds: the longer one of its FLOPs and its bytes at full rates.
    """

    key: str
    alike: str
    products: str
    seconds: float


@dataclass(frozen=True)
class Work:
    """What the core does without a pause.

    Attributes:
        products: seconds of operations with matrix products.
        memory: of others, which HBM or the vector unit limit.
        kernels: of custom kernels.
        operations: that have no price yet: their numbers, and how often they run.
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
class Start:
    """The start of transfer number `transfer`, that goes by the number `mark`."""

    transfer: int
    mark: int


@dataclass(frozen=True)
class Wait:
    """The core waits for what was started under this number, if anything was."""

    mark: int


@dataclass(frozen=True)
class Exposed:
    """Transfer number `transfer`, for which the core waits from start to end."""

    transfer: int


@dataclass(frozen=True)
class Loop:
    """Steps that are run `times` times."""

    times: int
    body: tuple[Step, ...]


Step = Work | Start | Wait | Exposed | Loop


@dataclass(frozen=True)
class Schedule:
    """A step.

    Attributes:
        operations: by their numbers, until they are priced.
        uncounted_loops: of which the text does not tell how often they run; their bodies count once.
        costed: share of the core's seconds that rest on libtpu's own cycles, once it is priced.
    """

    __pydantic_config__ = ConfigDict(defer_build=True)  # few commands read or write it

    steps: tuple[Step, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    operations: tuple[Operation, ...] = ()
    uncounted_loops: int = 0
    costed: float = 1.0


SCHEDULE: TypeAdapter[Schedule] = TypeAdapter(Schedule)


def total(steps: Iterable[Step]) -> Work:
    """All work of steps, loops counted."""
    found = Work()
    for step in steps:
        if isinstance(step, Loop):
            found += total(step.body) * step.times
        elif isinstance(step, Work):
            found += step
    return found
