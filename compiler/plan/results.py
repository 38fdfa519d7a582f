"""The results of planning, as plain values that can be cached, sent between processes and printed.

Bytes, FLOPs and seconds are for one device and one micro-batch (forward, backward and the optimizer's
update), unless a field says otherwise. Nothing here is measured on a TPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from recipec.compiler.lowering.backend import Backend
from recipec.compiler.plan.schedule import Prices, Schedule, Worked
from recipec.compiler.roofline.rollout import RolloutNeed


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind over the same mesh axes.

    Attributes:
        kind: "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute". A transfer
            between slices may have another word of the compiler, or "transfer".
        axes: mesh axes that it runs over, () when its groups match no set of axes.
        over_dcn: whether a group has devices of several slices.
        count: how often a step runs it, with loops counted in full.
        bytes: bytes of the arrays that one device ends up with, for all `count` together.
    """

    kind: str
    axes: tuple[str, ...]
    over_dcn: bool
    count: int
    bytes: float


@dataclass(frozen=True)
class Kernel:
    """All custom kernels of one name.

    The compiler gives no cycles for them, so the figures come from their shapes. They are for all `count`
    together.

    Attributes:
        name: as in the HLO, without numbers: "splash_mha_fwd_segmented_residuals".
        seconds: estimated by `plan/kernels.py`.
    """

    name: str
    count: int
    flops: float
    bytes: float
    seconds: float


COPIES = ("copy", "host")
"""Kinds of transfers that are not collectives."""


@dataclass(frozen=True)
class Moved:
    """Transfers of one kind for one weight or operation.

    Attributes:
        kind: a kind of `Collective`, "copy" within the device's memory, or "host".
        name: the weight or operation: "layers.{}.mlp.up_proj.kernel"; "" where it is not known.
        axes, over_dcn: as in `Collective`.
        count, bytes: for all of them together.
        seconds: time of the transfers.
        exposed: the part of `seconds` in which the core only waits.
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
        start: seconds from the beginning of the step.
    """

    lane: str
    name: str
    start: float
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """The estimated time of a step, in seconds, by what the core does.

    Attributes:
        products: the core works on operations with matrix products.
        memory: the core works on other operations.
        kernels: the core works on custom kernels.
        transfers: transfers that run while the core works or waits, the longest waits first.
        spans: stretches to draw.
        operations: the core's work without kernels by name, the longest first, and only these.
    """

    products: float = 0.0
    memory: float = 0.0
    kernels: float = 0.0
    transfers: tuple[Moved, ...] = ()
    spans: tuple[Span, ...] = ()
    operations: tuple[Worked, ...] = ()

    @property
    def exposed(self) -> float:
        """Seconds that the core waits for transfers."""
        return sum(transfer.exposed for transfer in self.transfers)

    def exposed_in(self, collectives: bool) -> float:
        """Return the exposed seconds of collectives, or of copies within the device and to its host."""
        return sum(
            transfer.exposed for transfer in self.transfers if (transfer.kind not in COPIES) == collectives
        )

    @property
    def seconds(self) -> float:
        return self.products + self.memory + self.kernels + self.exposed

    @property
    def parts(self) -> dict[str, float]:
        """The parts by name, which add up to `seconds`."""
        return {
            "matrix products": self.products,
            "other operations": self.memory,
            "custom kernels": self.kernels,
            "exposed collectives": self.exposed_in(True),
            "exposed copies": self.exposed_in(False),
        }


@dataclass(frozen=True)
class Temporary:
    """Arrays of one name and shape that are alive when the temporaries take most memory.

    Attributes:
        name: their origin, from the program's metadata: "layers.3.mlp / mul".
        shape: as in the HLO, without the layout: "bf16[1,3072,21504]".
        count: number of arrays with this name (ignoring layer numbers) and shape.
        bytes: bytes of all of them, with the padding of their layout.
    """

    name: str
    shape: str
    count: int
    bytes: float


@dataclass(frozen=True)
class OutOfMemory:
    """The compiler's refusal of a program that does not fit.

    Attributes:
        used, limit: bytes of HBM that the program needs, and that it may use.
        largest: the allocations that the compiler lists.
    """

    used: float
    limit: float
    largest: tuple[Temporary, ...] = ()


@dataclass(frozen=True)
class Compiled:
    """A step with some or all of the model's layers, compiled to its schedule or to the end.

    Attributes:
        layers: number of decoder layers.
        weights, adapters, optimizer, batch: bytes of each kind of arguments, from their shapes.
        arguments: bytes of all arguments as the compiler lays them out, padding included.
        temporaries, code: bytes. If only the schedule was compiled, `code` has just constants and outputs.
        flops, bytes: FLOPs of matrix products; bytes that all operations read and write. Loops are counted
            in full, custom kernels as 0.
        schedule: the step's schedule, which gives its time; empty where the compiler refused it.
        prices: times of the operations that were compiled to the end.
        instructions: instructions of the module, including those in fusions.
        trace_seconds, compile_seconds: time of tracing and compiling on this machine.
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
        weights, adapters, optimizer, batch, padding: the arguments, and the padding of their layout.
        temporaries: activations and everything else that lives only within a step.
        code: the program itself.
        available: bytes that the device has.
        rollout: frozen weights in the layout of rollouts, which stay while a step runs.
    """

    weights: float
    adapters: float
    optimizer: float
    batch: float
    padding: float
    temporaries: float
    code: float
    available: float
    rollout: float = 0.0

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
            + self.rollout
        )

    @property
    def headroom(self) -> float:
        """Bytes that are free; below 0 when the program does not fit."""
        return self.available - self.used

    @property
    def share(self) -> float:
        return self.used / self.available


@dataclass(frozen=True)
class Interval:
    """The error interval of estimates, from published runs, each estimated by rates fitted to the others.

    Attributes:
        low, high: measured over estimated time; a step's time is expected between these times its estimate.
        basis: a sentence about the runs that it comes from.
    """

    low: float
    high: float
    basis: str

    def of(self, seconds: float) -> tuple[float, float]:
        """Return the interval of an estimated time, or of a figure proportional to it."""
        return self.low * seconds, self.high * seconds


@dataclass(frozen=True)
class Estimate:
    """The estimate of one micro-batch's step of the whole model, on one device.

    Attributes:
        compiled_layers: number of layers that were compiled to the end, as a tuple of one; () if none were.
        flops, bytes: FLOPs of matrix products; bytes read and written. Custom kernels are not included.
        seconds: time of the step: the sum of the timeline's parts, times the factor of probes (see
            `calibration.py`); 0 where the compiler refused it.
        interval: the error interval of `seconds`, from published runs.
        peak_flops, bandwidth: of one device, FLOP/s in bfloat16 and bytes/s.
        model_flops: FLOPs that the algorithm needs for the micro-batch on one device, from the model's
            shapes, without recomputation.
        mfu: model_flops over the FLOPs that the device could do in `seconds`.
        rows, row_length: of a micro-batch over all devices; a preference has two rows.
        compile_seconds: time of all compiles on this machine.
        scheduled_layers: layers of the schedules that a first estimate foretells all layers from; () where
            all layers were scheduled.
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
    scheduled_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pass:
    """One pass of the program that generates completions, on one device: over the prompts, or of one token.

    Attributes:
        weights: bytes of weights that it reads from its own memory.
        gathered: bytes of weights that it gathers from other devices.
        cache: bytes of keys and values that it reads, or writes for prompts.
        summed: bytes of activations that all-reduces sum, and of a compiled pass those of all collectives
            that do not gather weights.
        flops: of matrix products and attention.
        memory_seconds, compute_seconds, link_seconds: the time of each alone, by calculation.
        compiled: seconds of the compiled pass; None where it was not compiled.
        waits: the part of `compiled` in which the device waits for transfers.
    """

    weights: float
    gathered: float
    cache: float
    summed: float
    flops: float
    memory_seconds: float
    compute_seconds: float
    link_seconds: float
    compiled: float | None = None
    waits: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the time of the compiled pass, or the estimate, in which links wait for the rest."""
        if self.compiled is not None:
            return self.compiled
        return max(self.memory_seconds, self.compute_seconds) + self.link_seconds

    @property
    def bound(self) -> float:
        """Return the time if everything overlaps."""
        if self.compiled is not None:
            return self.compiled - self.waits
        return max(self.memory_seconds, self.compute_seconds, self.link_seconds)


@dataclass(frozen=True)
class Generation:
    """The generation of a batch of completions, which one or more optimizer steps train on.

    Attributes:
        axes: size of each mesh axis of the rollout.
        completions, prompts: of a batch.
        iterations: optimizer steps on a batch.
        share: of the optimizer steps that train on completions; the others' cost nothing here.
        rows, rounds: completions that are generated at once, and how often.
        passes: passes of one token, at most: the loop ends with its longest completion.
        prefill, decode: the pass over the prompts, and a pass of one token.
        handed, handing_seconds: bytes that a device gets of what is trained when a batch begins, and seconds.
        need: the memory of one device while it generates.
        compares: whether a step also runs the reference, the model before training.
        forward_share: FLOPs of a forward pass over those of a step.
        alternative: the layout that gathers fewer weights and fits the memory; empty if this is the best.
        compiled_layers: layers of the compiles from which passes and memory were taken; () for estimates from
            shapes.
        collectives: of a compiled pass of one token.
        estimated: the same estimated from shapes; None if this is the estimate.
    """

    axes: dict[str, int]
    completions: int
    prompts: int
    iterations: int
    share: float
    rows: int
    rounds: int
    passes: int
    prefill: Pass
    decode: Pass
    handed: float
    handing_seconds: float
    need: RolloutNeed
    compares: bool
    forward_share: float
    alternative: dict[str, int]
    compiled_layers: tuple[int, ...] = ()
    collectives: tuple[Collective, ...] = ()
    estimated: Generation | None = None

    def parts(self, update: float) -> dict[str, float]:
        """Return the seconds of an optimizer step by part; of a share of the steps, the mean over all.

        Args:
            update: seconds of the compiled step, with all of its micro-batches.
        """
        reference = update * self.forward_share * self.compares
        before = update * self.forward_share * (self.iterations > 1)
        rolled = {
            "handing over": self.handing_seconds,
            "prompts": self.rounds * self.prefill.seconds,
            "tokens": self.rounds * self.passes * self.decode.seconds,
            "log-probabilities before": before,
        }
        return {
            **{name: seconds * self.share / self.iterations for name, seconds in rolled.items()},
            "reference": reference,
            "update": update - reference,
        }

    @property
    def seconds(self) -> float:
        """Return the seconds in which a batch is generated."""
        return self.handing_seconds + self.rounds * (self.prefill.seconds + self.passes * self.decode.seconds)

    @property
    def seconds_per_step(self) -> float:
        """Return the seconds of generation in an optimizer step, on average."""
        return self.seconds * self.share / self.iterations

    @property
    def bound(self) -> float:
        """Return `seconds` if everything within a pass overlaps."""
        return self.handing_seconds + self.rounds * (self.prefill.bound + self.passes * self.decode.bound)

    @property
    def bound_per_step(self) -> float:
        """Return `seconds_per_step` if everything within a pass overlaps."""
        return self.bound * self.share / self.iterations


@dataclass(frozen=True)
class RunLength:
    """The whole run.

    Attributes:
        source: "data" when the recipe's data was tokenized; "steps" when the recipe gives train.steps and
            the data is not available; "bound" when the number of lines of the data gives an upper bound of
            the steps; "unknown" otherwise.
        tokens_per_row: real tokens of a row on average; max_length when unknown.
        steps: optimizer steps, None when unknown. With source "bound", steps, hours and usd are upper bounds.
        micro_batches: micro-batches of an optimizer step.
        hours, usd: None when unknown (no data and no train.steps, or no price).
        interval: the error interval of the step's time, hours and US$. Tokens a second vary inversely.
        usd_per_hour: price of the training machine, None where the catalog and the recipe have none.
        tokens_per_second: real tokens over all devices, from the estimated step.
        usd_per_million_tokens: cost of training, from the estimated step; None without a price.
        note: a sentence about where the figures come from.
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
    """A group of the model's arrays with the same shape and sharding, for display.

    Attributes:
        pattern: the name of the `count` arrays: "layers.{}.mlp.up_proj.kernel".
        spec: mesh axis of each dimension; None for a dimension that is not sharded.
        bytes: bytes of all of them on one device.
    """

    pattern: str
    shape: tuple[int, ...]
    spec: tuple[str | None, ...]
    count: int
    bytes: float


@dataclass(frozen=True)
class Plan:
    """The plan of a recipe.

    Attributes:
        accelerator: a phrase that describes the accelerator.
        topology: as libtpu names it: "v5p:2x2x1".
        axes: size of each mesh axis in order.
        placements: the model's arrays with their shardings.
        backend: the backend whose step was compiled: "tunix" for train.py's, or "torchax".
        settings: the values that a search varies, by path in the recipe: "remat.policy" -> "none".
        versions: versions of the packages that the estimate depends on.
        cached: whether all results came from the cache.
        generation: of completions; None where the objective has none.
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
    generation: Generation | None = None

    @property
    def script(self) -> str:
        """The generated script whose step was compiled."""
        return "train.py" if self.backend == "tunix" else f"train_{self.backend}.py"


@dataclass(frozen=True)
class Point:
    """One configuration that a search looked at.

    Attributes:
        sets: its changes of the recipe as --set arguments: "remat.policy=none".
        status: "compiled", "pruned" (by the bound), "too large" (does not fit), "refused" (by the checks),
            "failed".
        reason: why it was not compiled, or failed; "" when compiled.
        tokens: real tokens of a micro-batch over all devices.
        seconds_per_token, memory, usd_per_million_tokens: estimates; None where not compiled.
        bound_seconds_per_token: the analytic lower bound; 0 where refused.
        exposed_seconds: the part of `step_seconds` in which the device waits for collectives and copies.
        generation_seconds: of an optimizer step, in addition to its micro-batches; counted in
            `seconds_per_token`. None without generation.
        generation_memory: bytes of a device while it generates.
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
    generation_seconds: float | None = None
    generation_memory: float | None = None


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
        points: all configurations, in the order in which the search recorded them.
        front: indices of the Pareto-optimal points (time a token, HBM, cost), fastest first.
        baseline: index of the unchanged recipe; None when it does not compile or does not fit.
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


@dataclass(frozen=True)
class Job:
    """One compile.

    Attributes:
        recipe: absolute path of the recipe's file.
        sets: the --set arguments.
        layers: indices of the model's layers that are compiled, in ascending order.
        backend: the backend whose step is compiled: train.py's, or train_torchax.py's.
        scheduled: whether the compile stops after the schedule, before code is generated.
        generates: whether the program that generates completions is compiled, instead of the step.
    """

    __pydantic_config__ = ConfigDict(defer_build=True)  # few commands read or write it

    recipe: Path
    sets: tuple[str, ...]
    layers: tuple[int, ...]
    backend: Backend = Backend.TUNIX
    scheduled: bool = False
    generates: bool = False


@dataclass(frozen=True)
class Failed:
    """A job that gave no result.

    Attributes:
        message: one sentence.
        killed: whether the process was killed, as the kernel does when memory runs out.
        help: how to solve the problem; "" where no help is known.
        flag: the libtpu flag whose value libtpu refuses; "" for another reason.
    """

    __pydantic_config__ = ConfigDict(defer_build=True)  # few commands read or write it

    message: str
    killed: bool = False
    help: str = ""
    flag: str = ""


JOB: TypeAdapter[Job] = TypeAdapter(Job)
RESULT: TypeAdapter[Compiled | Failed] = TypeAdapter(Compiled | Failed)
"""What a worker prints."""
