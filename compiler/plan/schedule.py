"""A compiled step as a schedule: plain values, read from its text by `hlo/schedule.py`, run by `timeline.py`.

Every figure is in seconds at the full published rates of the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import TypeAdapter


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
class Work:
    """What the core does without a pause: seconds of operations with matrix products, of others, which HBM or
    the vector unit limit, and of custom kernels."""

    products: float = 0.0
    memory: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.products + other.products, self.memory + other.memory, self.kernels + other.kernels)

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
        uncounted_loops: of which the text does not tell how often they run; their bodies count once.
        costed: share of the core's seconds that rest on libtpu's own cycles.
    """

    steps: tuple[Step, ...] = ()
    transfers: tuple[Transfer, ...] = ()
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
