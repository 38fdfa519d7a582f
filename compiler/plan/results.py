"""What planning finds out. Plain values, so that they can be cached, sent between processes and printed.

Bytes, FLOPs and seconds are those of one device and one micro-batch (forward, backward and the
optimizer's update), unless it is said otherwise. Nothing here was measured on a TPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import ConfigDict, TypeAdapter

from recipec.compiler.plan.prices import Prices
from recipec.compiler.plan.schedule import Schedule


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind over the same mesh axes.

    Attributes:
        kind: "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"; of a transfer
            between slices the compiler's own word for any other, or "transfer".
        axes: mesh axes that it runs over, () when its groups are those of no set of axes.
        over_dcn: whether a group has devices of several slices.
        count: how often a step runs it, loops counted.
        bytes: of the arrays that one device ends up with, all of `count` together.
    """

    kind: str
    axes: tuple[str, ...]
    over_dcn: bool
    count: int
    bytes: float


@dataclass(frozen=True)
class Kernel:
    """Custom kernels of one name, of which the compiler gives no cycles.

    Figures come from their shapes, of all `count` together.

    Attributes:
        name: as in the HLO, without numbers: "splash_mha_fwd_segmented_residuals".
        seconds: by `plan/kernels.py`.
    """

    name: str
    count: int
    flops: float
    bytes: float
    seconds: float


COPIES = ("copy", "host")
"""Kinds of transfers that are no collectives."""


@dataclass(frozen=True)
class Moved:
    """Transfers of one kind for one weight or operation.

    Attributes:
        kind: a collective's, "copy" within the device's memory, or "host".
        name: what they belong to: "layers.{}.mlp.up_proj.kernel"; "" where that is not known.
        axes, over_dcn: as of `Collective`.
        count, bytes: all of them together.
        seconds: that they take.
        exposed: of it, what the core does nothing but wait.
    """

    kind: str
    name: str
    axes: tuple[str, ...]
    over_dcn: bool
    count: float
    bytes: float
    seconds: float
    exposed: float


@dataclass(frozen=True)
class Span:
    """A stretch of the drawn timeline.

    Attributes:
        lane: "core", "kernel", "wait", "links", "memory", "host", or "loop" for turns that are not drawn.
        start, seconds: from the beginning of the step.
    """

    lane: str
    name: str
    start: float
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """A step as it is scheduled: estimates, seconds.

    Attributes:
        products: the core works on operations with matrix products.
        memory: on all others.
        kernels: on custom kernels.
        transfers: what moves beside it or while it waits, the longest waits first.
        spans: to be drawn.
    """

    products: float = 0.0
    memory: float = 0.0
    kernels: float = 0.0
    transfers: tuple[Moved, ...] = ()
    spans: tuple[Span, ...] = ()

    @property
    def exposed(self) -> float:
        """What the core waits for transfers."""
        return sum(one.exposed for one in self.transfers)

    def exposed_in(self, collectives: bool) -> float:
        """Of it, what it waits for collectives, or for copies within the device and to its host."""
        return sum(one.exposed for one in self.transfers if (one.kind not in COPIES) == collectives)

    @property
    def seconds(self) -> float:
        return self.products + self.memory + self.kernels + self.exposed


@dataclass(frozen=True)
class Temporary:
    """An array that is alive when the temporaries take most memory.

    Attributes:
        name: where it comes from, from the program's metadata: "layers.3.mlp / mul".
        shape: as in the HLO, without the layout: "bf16[1,3072,21504]".
        count: arrays of that name (layer numbers aside) and shape.
        bytes: of all of them, padded as they lie in memory.
    """

    name: str
    shape: str
    count: int
    bytes: float


@dataclass(frozen=True)
class OutOfMemory:
    """A compile that the compiler refused, because the program does not fit.

    Attributes:
        used, limit: bytes of HBM.
        largest: the allocations that the compiler lists.
    """

    used: float
    limit: float
    largest: tuple[Temporary, ...] = ()


@dataclass(frozen=True)
class Compiled:
    """A step with some or all of the model's layers, compiled to its schedule or to the end.

    Attributes:
        layers: decoder layers that it has.
        weights, adapters, optimizer, batch: bytes of the arguments by what they are, from their shapes.
        arguments: bytes as the compiler lays them out, padding included.
        temporaries, code: bytes. What was not compiled to the end has constants and outputs alone for code.
        flops, bytes: of matrix products; read and written by every operation. Loops are counted in full,
            kernels as nothing.
        schedule: of the step, from which its time follows; empty where the compiler refused it.
        prices: of its operations, of what was compiled to the end.
        instructions: of the module, those of fusions included.
        trace_seconds, compile_seconds: what it took on this machine.
        out_of_memory: set when the compiler refused; then figures from `arguments` on are 0.
    """

    __pydantic_config__ = ConfigDict(defer_build=True)  # few commands read or write it

    layers: int
    weights: float
    adapters: float
    optimizer: float
    batch: float
    arguments: float = 0.0
    temporaries: float = 0.0
    code: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)
    prices: Prices = field(default_factory=Prices)
    instructions: int = 0
    collectives: tuple[Collective, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    largest: tuple[Temporary, ...] = ()
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0
    out_of_memory: OutOfMemory | None = None


@dataclass(frozen=True)
class Memory:
    """HBM of one device, bytes.

    Attributes:
        weights, adapters, optimizer, batch, padding: arguments; padding is what their layout adds.
        temporaries: activations and everything else that lives within a step.
        code: the program itself.
        available: what the device has.
    """

    weights: float
    adapters: float
    optimizer: float
    batch: float
    padding: float
    temporaries: float
    code: float
    available: float

    @property
    def used(self) -> float:
        return (
            self.weights
            + self.adapters
            + self.optimizer
            + self.batch
            + self.padding
            + self.temporaries
            + self.code
        )

    @property
    def headroom(self) -> float:
        """Bytes that are left; below 0 when it does not fit."""
        return self.available - self.used

    @property
    def share(self) -> float:
        return self.used / self.available


@dataclass(frozen=True)
class Interval:
    """How far estimates were from published runs, each estimated by what the others gave.

    Attributes:
        low, high: measured over estimated time; a step is taken to be within these times its estimate.
        basis: what that rests on, a sentence.
    """

    low: float
    high: float
    basis: str

    def of(self, seconds: float) -> tuple[float, float]:
        """The interval of an estimated time, or of what is in proportion to it."""
        return self.low * seconds, self.high * seconds


@dataclass(frozen=True)
class Estimate:
    """A micro-batch's step of the whole model, on one device.

    Attributes:
        layers: of the model.
        compiled_layers: that were compiled to the end, as a tuple of one.
        memory: of one device.
        flops, bytes: of matrix products, and read and written; kernels are not among them.
        timeline: of the step.
        seconds: of the step, the sum of the timeline's parts, times what probes found beside such sums; 0
            where the compiler refused it.
        interval: what the time of published runs was beside such an estimate.
        peak_flops, bandwidth: of one device, FLOP/s in bfloat16 and bytes/s.
        model_flops: of the micro-batch on one device, from the model's shapes: what the algorithm needs,
            recomputation not counted.
        mfu: model_flops over what the device could do in `seconds`.
        rows, row_length: of a micro-batch over all devices; a preference has two rows.
        compile_seconds: of this machine, all compiles together.
    """

    layers: int
    compiled_layers: tuple[int, ...]
    memory: Memory
    flops: float
    bytes: float
    timeline: Timeline
    seconds: float
    interval: Interval
    peak_flops: float
    bandwidth: float
    model_flops: float
    mfu: float
    rows: int
    row_length: int
    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]
    largest: tuple[Temporary, ...]
    compile_seconds: float


@dataclass(frozen=True)
class RunLength:
    """The whole run.

    Attributes:
        source: "data" when the recipe's data was tokenized, "steps" when the recipe gives train.steps and
            the data is not at hand, "bound" when the lines of its data say how many steps there are at
            most, "unknown" otherwise.
        tokens_per_row: real ones, on average; max_length when it is not known.
        steps: optimizer steps, None when unknown. Of the source "bound" these, hours and usd are the most.
        micro_batches: of an optimizer step.
        hours, usd: None when unknown (no data and no train.steps, or no price).
        interval: of the step, and with it of hours and US$; tokens a second go the other way.
        usd_per_hour: of the training machine, None where the catalog and the recipe have no price.
        tokens_per_second: real tokens over all devices, from the estimated step.
        usd_per_million_tokens: of training, at the estimated step; None without a price.
        note: what this rests on, a sentence.
    """

    source: str
    tokens_per_row: float
    steps: int | None
    micro_batches: int
    hours: float | None
    usd: float | None
    interval: Interval
    usd_per_hour: float | None
    tokens_per_second: float
    usd_per_million_tokens: float | None
    note: str


@dataclass(frozen=True)
class Placement:
    """One group of the model's arrays with the same shape and sharding, for showing the mesh.

    Attributes:
        pattern: "layers.{}.mlp.up_proj.kernel", of `count` arrays.
        spec: mesh axis of each dimension, None for whole.
        bytes: of all of them on one device.
    """

    pattern: str
    shape: tuple[int, ...]
    spec: tuple[str | None, ...]
    count: int
    bytes: float


@dataclass(frozen=True)
class Plan:
    """A recipe, planned.

    Attributes:
        recipe: its name.
        model: its id.
        accelerator: described in a phrase.
        topology: as libtpu names it: "v5p:2x2x1".
        slices, devices, hosts: how many.
        axes: size of each mesh axis in order.
        placements: what lies where.
        backend: whose step was compiled: "tunix" for train.py's, or "torchax".
        settings: the values that a search varies, by path in the recipe: "remat.policy" -> "none".
        versions: of the packages that the estimate rests on.
        notes: sentences.
        cached: whether everything came from the cache.
        seconds: that planning took.
    """

    __pydantic_config__ = ConfigDict(defer_build=True)  # few commands read or write it

    recipe: str
    model: str
    accelerator: str
    topology: str
    slices: int
    devices: int
    hosts: int
    axes: dict[str, int]
    estimate: Estimate
    run: RunLength
    placements: tuple[Placement, ...]
    settings: dict[str, str]
    versions: dict[str, str]
    notes: tuple[str, ...] = ()
    cached: bool = False
    seconds: float = 0.0
    backend: str = "tunix"

    @property
    def script(self) -> str:
        """The generated script whose step it is."""
        return "train.py" if self.backend == "tunix" else f"train_{self.backend}.py"


@dataclass(frozen=True)
class Point:
    """One configuration that a search looked at.

    Attributes:
        sets: what it changes in the recipe, as --set takes it: "remat.policy=none".
        status: "compiled", "pruned" (by the bound), "too large" (does not fit), "refused" (by the checks),
            "failed".
        reason: why it was not compiled, or failed; "" when compiled.
        tokens: real ones of a micro-batch over all devices.
        seconds_per_token, memory, usd_per_million_tokens: estimates; None where not compiled.
        bound_seconds_per_token: the analytic lower bound; 0 where refused.
        exposed_seconds: of a step, what the device waits for collectives and copies; a part of
            `step_seconds`.
    """

    sets: tuple[str, ...]
    status: str
    reason: str
    tokens: float
    bound_seconds_per_token: float
    seconds_per_token: float | None = None
    step_seconds: float | None = None
    memory: Memory | None = None
    usd_per_million_tokens: float | None = None
    mfu: float | None = None
    exposed_seconds: float | None = None


@dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
        points: all, in the order in which they were looked at.
        front: indices of the Pareto-optimal ones (time a token, HBM, cost), fastest first.
        baseline: index of the recipe as it stands, None when it does not compile.
    """

    __pydantic_config__ = ConfigDict(defer_build=True)  # few commands read or write it

    points: tuple[Point, ...]
    front: tuple[int, ...]
    baseline: int | None
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default_factory=tuple)


COMPILED: TypeAdapter[Compiled] = TypeAdapter(Compiled)
"""To and from JSON: `COMPILED.validate_json(text)`, `COMPILED.dump_json(value)`."""
PLAN: TypeAdapter[Plan] = TypeAdapter(Plan)
SEARCH: TypeAdapter[Search] = TypeAdapter(Search)
