"""`recipe plan --search`: find the best configurations of a recipe by compiling candidates.

Each configuration gets a lower bound: from shapes, and for those with the lowest ones from schedules of a few
layers, which take seconds (`first_estimate.py`). The search compiles configurations with the lowest bounds
first. It skips a configuration if a compiled one is better than its bound.

The search varies mesh x micro-batch x rematerialization x attention x profile of flags, within what the
recipe allows. For the otherwise unchanged recipe it also varies the block size of the attention kernel. If
the recipe generates completions, each configuration gets the layout and the number of rows that generate
fastest by the estimate, and counts with update and generation together. Model, adapters, data and the rows of
an optimizer step stay the same. With `free_batch`, the search may raise the rows so that every device gets
some.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from recipec.compiler.lower import lower
from recipec.compiler.lowering.assumed_pictures import masks_pictures
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.facts import AUTO
from recipec.compiler.lowering.hardware import arranged
from recipec.compiler.lowering.libtpu import profiles
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.runtime_settings import attention_block
from recipec.compiler.lowering.sizes import tp_sizes
from recipec.compiler.pages.numbers import gib_number
from recipec.compiler.plan.depth import Part, parts
from recipec.compiler.plan.first_estimate import first_parts, memory_error
from recipec.compiler.plan.planner import OF_ROLLOUTS, check_target, estimate, first_estimate, job
from recipec.compiler.plan.pool import Progress, compile_jobs
from recipec.compiler.plan.results import Collective, Compiled, Estimate, Failed, Job, Point, Search
from recipec.compiler.plan.rollout_estimate import fastest_rollout, generation
from recipec.compiler.roofline.training_step import bound, rows
from recipec.compiler.wording import divisors, plural
from recipec.runtime.model.partition_rules import TOKENS, data_parallel
from recipec.spec.core_schema import flow
from recipec.spec.language.mesh import Remat
from recipec.spec.language.reinforcement import Rollout
from recipec.spec.load import load

MOST = 24
"""Configurations that are compiled at most."""
TOGETHER = 4
"""Configurations that are compiled together, before the rest is pruned by their results."""
INTERRUPTED = "the search was interrupted before that"


class SearchInterrupted(Exception):
    """A search that Ctrl-C ended.

    Attributes:
        search: the result so far. All finished compiles are in the cache.
    """

    def __init__(self, search: Search) -> None:
        super().__init__("the search was interrupted")
        self.search = search


@dataclass(frozen=True)
class SearchOptions:
    """The options of a search.

    Attributes:
        sets: the --set arguments of the command.
        tokens_per_row: real tokens of a row on average; data.max_length when None.
        most: configurations that are compiled at most.
        free_batch: whether the rows of an optimizer step may be raised.
        backend: the backend whose step is compiled.
        fixed: keys that the search does not vary.
    """

    sets: Sequence[str] = ()
    tokens_per_row: float | None = None
    most: int = MOST
    free_batch: bool = False
    backend: Backend = Backend.TUNIX
    fixed: Sequence[str] = ()


def search(program: Program, options: SearchOptions, progress: Progress | None = None) -> Search:
    """Search for the best configurations of a program.

    Raises:
        ArtifactError: when nothing can be compiled at all.
        SearchInterrupted: after Ctrl-C.
    """
    check_target(program)
    run, most = _RunningSearch(options, progress), options.most
    every = [
        variant
        for variant in variants(program, options.free_batch)
        if not any(argument.partition("=")[0] in options.fixed for argument in variant.sets)
    ]
    waiting = run.candidates(every, program.source)
    try:
        waiting = run.scheduled(waiting)
        while waiting and run.compiled < most:
            now = waiting[: min(TOGETHER, most - run.compiled)]
            run.compile(now)
            waiting = run.pruned(waiting[len(now) :])
    except KeyboardInterrupt:
        run.leave(waiting, INTERRUPTED)
        raise SearchInterrupted(run.result()) from None
    run.leave(waiting, f"the search compiles at most {most}, those with the lowest bounds first")
    return run.result()


@dataclass
class _RunningSearch:
    """The state of a running search.

    Attributes:
        points: the configurations whose outcome is known.
        reached: objectives of the configurations that fit, by the index of their point.
        large: configurations that were compiled and do not fit.
        compiled: how many configurations were compiled.
        rollouts: the fastest, by the mesh and the rows of an optimizer step.
    """

    options: SearchOptions
    progress: Progress | None
    points: list[Point] = field(default_factory=list)
    reached: dict[int, Objectives] = field(default_factory=dict)
    large: list[Candidate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compiled: int = 0
    rollouts: dict[tuple[str, int], Rollout] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def candidates(self, every: Sequence[Variant], source: Path) -> list[Candidate]:
        """Return the configurations to compile: the unchanged recipe first, then by their bounds."""
        out: list[Candidate] = []
        for number, variant in enumerate(every):
            if self.progress:
                self.progress(0.0, f"checking {number + 1} of {plural(len(every), 'configuration')}")
            settled = lower(load(source, [*self.options.sets, *variant.sets]), planning=True)
            if settled.program is None:
                error = next(d for d in settled.diagnostics if d.severity == "error")
                self.points.append(Point(variant.sets, "refused", f"{error.code}: {error.message}", 0.0, 0.0))
                continue
            for chosen, program in self._with_rollouts(variant, settled.program, source):
                self._add(Candidate.of(chosen, program, self.options.tokens_per_row), out)
        return _in_order(out)

    def scheduled(self, waiting: Sequence[Candidate]) -> list[Candidate]:
        """Return the configurations with the bounds that their first estimates give, the lowest first.

        As many are scheduled as may be compiled. The others keep their bounds, and come last.
        """
        now, later = waiting[: self.options.most], waiting[self.options.most :]
        firsts = [
            first_parts(candidate.program, parts(candidate.program), self.options.backend)
            for candidate in now
        ]
        quick = [
            (candidate, first) for candidate, first in zip(now, firsts, strict=True) if first and first.quick
        ]
        work = [self._job(candidate, part) for candidate, first in quick for part in first.scheduled]
        results = iter(compile_jobs(work, self._scheduling(len(quick))) if work else ())
        out = [candidate for candidate, first in zip(now, firsts, strict=True) if not (first and first.quick)]
        for candidate, first in quick:
            done = {part: next(results) for part in first.scheduled}
            scheduled = {part: result for part, result in done.items() if isinstance(result, Compiled)}
            if len(scheduled) < len(done):  # the compile of all layers will give the reason
                out.append(candidate)
                continue
            estimated = first_estimate(candidate.program, first, scheduled)
            tighter = candidate.tightened(estimated, first.error)
            if tighter.memory > estimated.memory.available:
                self.large.append(tighter)
                needed = _of(estimated.memory.used, estimated.memory.available)
                self._settle(tighter, "too large", f"it needs about {needed}", memory=estimated.memory)
            else:
                out.append(tighter)
        return [*_in_order(out), *later]

    def _with_rollouts(
        self, variant: Variant, program: Program, source: Path
    ) -> Iterator[tuple[Variant, Program]]:
        """Yield a configuration with the rollout that is the fastest by the estimate. If this is not the
        recipe's own, the unchanged recipe is also yielded."""
        if program.generated is None or {*OF_ROLLOUTS} & {*self.options.fixed}:
            yield variant, program
            return
        recipe = program.recipe
        # Nothing else that a search varies changes how completions are generated.
        varied = flow(recipe.mesh.axes), recipe.train.global_batch_size
        if varied not in self.rollouts:
            self.rollouts[varied] = fastest_rollout(program).recipe.rollout
        rollout = self.rollouts[varied]
        if rollout == recipe.rollout or not variant.sets:
            yield variant, program
        if rollout == recipe.rollout:
            return
        changed = (f"rollout.axes={flow(rollout.axes)}", f"rollout.rows={flow(rollout.rows)}")
        sets = (*variant.sets, *changed)
        settled = lower(load(source, [*self.options.sets, *sets]), planning=True).program
        if settled is not None:
            yield replace(variant, sets=sets), settled
        elif variant.sets:
            yield variant, program

    def _add(self, candidate: Candidate, out: list[Candidate]) -> None:
        """Add a candidate, unless its bound does not fit a device."""
        available = candidate.program.accelerator.hbm_bytes_per_device
        if candidate.memory > available:
            self._settle(candidate, "too large", f"it needs at least {_of(candidate.memory, available)}")
            return
        out.append(candidate)

    def compile(self, now: Sequence[Candidate]) -> None:
        """Compile these configurations, and record the finished ones, even after an interrupt."""
        work: list[tuple[Program, Job]] = []
        places: list[range] = []
        for candidate in now:
            jobs = [self._job(candidate, part) for part in parts(candidate.program).refined]
            places.append(range(len(work), len(work) + len(jobs)))
            work += jobs
        done: dict[int, Compiled | Failed] = {}
        try:
            compile_jobs(
                work,
                self._compiling(len(now)),
                on_done=lambda index, result, _: done.update({index: result}),
            )
        finally:
            for candidate, place in zip(now, places, strict=True):
                if all(index in done for index in place):
                    self.compiled += 1
                    self._judge(candidate, [done[index] for index in place])

    def _job(self, candidate: Candidate, part: Part) -> tuple[Program, Job]:
        sets = [*self.options.sets, *candidate.variant.sets]
        return job(candidate.program, sets, part, self.options.backend)

    def pruned(self, waiting: Sequence[Candidate]) -> list[Candidate]:
        """Return the configurations that can still be on the front and can still fit.

        A configuration is pruned when a compiled one dominates its bound. No configuration is better than its
        own bound, so a pruned one cannot be on the front, in any order of the compiles. The order (bound of
        time, then memory that is kept) decides how many are compiled, and which ones if `most` is reached.

        The bound of memory does not hold when the compiler itself recomputes activations to make a step fit.
        The search counts such a step as too large, although it might fit and run slowly.
        """
        out = []
        for candidate in waiting:
            better = next((i for i, got in self.reached.items() if dominates(got, candidate.lowest)), None)
            smaller = next((larger for larger in self.large if candidate.needs_more(larger)), None)
            if better is not None:
                self._settle(
                    candidate, "pruned", f"even its bound is behind {_named(self.points[better].sets)}"
                )
            elif smaller is not None:
                rows_of = plural(smaller.variant.micro_batch, "row")
                self._settle(candidate, "too large", f"{rows_of} a device already do not fit")
            else:
                out.append(candidate)
        return out

    def leave(self, waiting: Sequence[Candidate], reason: str) -> None:
        """Record configurations that will not be compiled as pruned, with this reason."""
        settled = {point.sets for point in self.points}
        left = [candidate for candidate in waiting if candidate.variant.sets not in settled]
        for candidate in left:
            self._settle(candidate, "pruned", reason)
        if left:
            self.notes.append(f"{plural(len(left), 'configuration')} could still be better: {reason}.")

    def result(self) -> Search:
        order = list(self.reached)
        best = [order[i] for i in front([self.reached[index] for index in order])]
        return Search(
            points=tuple(self.points),
            front=tuple(best),
            baseline=next((i for i in order if not self.points[i].sets), None),
            seconds=time.monotonic() - self.started,
            notes=tuple(self.notes),
        )

    def _judge(self, candidate: Candidate, results: Sequence[Compiled | Failed]) -> None:
        """Record the outcome of a configuration whose compiles are done."""
        failed = next((result for result in results if isinstance(result, Failed)), None)
        if failed is not None:
            self._settle(candidate, "failed", failed.message)
            return
        compiled = [result for result in results if isinstance(result, Compiled)]
        program = candidate.program
        estimated = estimate(program, compiled)
        refused = next((result for result in compiled if result.out_of_memory), None)
        used = max(estimated.memory.used, candidate.generates[1])
        if refused is not None or used > estimated.memory.available:
            needed = _of(used, estimated.memory.available)
            self.large.append(candidate)
            self._settle(candidate, "too large", f"it needs {needed}", memory=estimated.memory)
            return
        rolled = generation(program)
        update, further = program.accumulation_steps * estimated.seconds, 0.0
        if rolled is not None:
            further = sum(rolled.parts(update).values()) - update
        seconds = (update + further) / (candidate.tokens * program.accumulation_steps)
        price = program.usd_per_hour
        self.reached[len(self.points)] = _objectives(program, seconds, used)
        self._settle(
            candidate,
            "compiled",
            memory=estimated.memory,
            seconds_per_token=seconds,
            step_seconds=estimated.seconds,
            usd_per_million_tokens=None if price is None else price / 3600 * seconds * 1e6,
            mfu=estimated.mfu,
            exposed_seconds=estimated.timeline.exposed,
            generation_seconds=None if rolled is None else further,
            generation_memory=None if rolled is None else candidate.generates[1],
        )

    def _settle(self, candidate: Candidate, status: str, reason: str = "", **figures: Any) -> None:
        """Record the outcome of a configuration."""
        sets, tokens, least = candidate.variant.sets, candidate.tokens, candidate.lowest[0]
        self.points.append(Point(sets, status, reason, tokens, least, **figures))

    def _scheduling(self, count: int) -> Progress | None:
        """Return a callback that reports schedules of `count` configurations, before the compiles."""
        progress = self.progress
        if progress is None:
            return None
        return lambda share, text: progress(
            0.0, f"{plural(count, 'configuration')}, {share:.0%} scheduled, {text}"
        )

    def _compiling(self, count: int) -> Progress | None:
        """Return a callback that reports compiling `count` configurations as part of the whole search."""
        progress, before = self.progress, self.compiled
        if progress is None:
            return None
        return lambda share, text: progress(
            (before + share * count) / self.options.most,
            f"{before} of at most {self.options.most} configurations, {text}",
        )


def _in_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the unchanged recipe first, then configurations by their bounds.

    With equal bounds of time, the one that keeps most is likely the fastest: it recomputes least.
    """
    return sorted(
        candidates,
        key=lambda candidate: (candidate.variant.sets != (), candidate.lowest[0], -candidate.memory),
    )


def _named(sets: Sequence[str]) -> str:
    return ", ".join(sets) or "the recipe as it stands"


@dataclass(frozen=True)
class Candidate:
    """A configuration that can be compiled.

    Attributes:
        tokens: real tokens of a micro-batch over all devices.
        lowest: lower bounds of its objectives.
        generates: seconds of an optimizer step in which completions are generated, if everything overlaps,
            and bytes of a device meanwhile, by the estimate from shapes; 0 without generation.
    """

    variant: Variant
    program: Program
    tokens: float
    lowest: Objectives
    generates: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(cls, variant: Variant, program: Program, tokens_per_row: float | None) -> Candidate:
        """Return the candidate of a variant, with its bounds.

        Args:
            tokens_per_row: real tokens of a row on average; data.max_length when None.
        """
        length = program.recipe.data.max_length
        least = bound(program, length)
        tokens = rows(program) * (length if tokens_per_row is None else tokens_per_row)
        rolled, generates = generation(program), (0.0, 0.0)
        if rolled is not None:
            generates = rolled.bound_per_step, rolled.need.total
        seconds = (least.seconds + generates[0] / program.accumulation_steps) / tokens
        memory = max(least.memory_bytes, generates[1])
        return cls(variant, program, tokens, _objectives(program, seconds, memory), generates)

    @property
    def memory(self) -> float:
        """Bytes of HBM that a device needs at least."""
        return self.lowest[1]

    def tightened(self, estimated: Estimate, error: float) -> Candidate:
        """Return the candidate with the bounds of its first estimate, where they are higher.

        Args:
            error: the most by which the estimated seconds differ from those of a plan, as a share.
        """
        further = self.generates[0] / self.program.accumulation_steps
        seconds = (estimated.seconds * (1 - error) + further) / self.tokens
        memory = estimated.memory.used * (1 - memory_error(self.program))
        least = _objectives(self.program, seconds, memory)
        return replace(self, lowest=tuple(map(max, self.lowest, least)))

    def needs_more(self, other: Candidate) -> bool:
        """Return whether this is `other` with more rows on each device."""
        a, b = self.variant, other.variant
        same = (a.axes, a.remat, a.attention, a.profile) == (b.axes, b.remat, b.attention, b.profile)
        return same and a.block == b.block and a.micro_batch > b.micro_batch and self.memory >= other.memory


def _objectives(program: Program, seconds_per_token: float, memory: float) -> Objectives:
    """Return the objectives to minimize: seconds a token, bytes of HBM, and cost a token.

    The cost is in US$, or in device-seconds without a price.
    """
    price = program.usd_per_hour
    rate = program.accelerator.devices if price is None else price / 3600
    return seconds_per_token, memory, seconds_per_token * rate


Objectives = tuple[float, ...]
"""The objectives to minimize: seconds a token, bytes of HBM, and US$ (or device-seconds) a token."""


def dominates(a: Objectives, b: Objectives) -> bool:
    """Return whether `a` is no worse than `b` in any objective, and better in one."""
    return all(x <= y for x, y in zip(a, b, strict=True)) and a != b


def front(points: Sequence[Objectives]) -> list[int]:
    """Return the indices of the points that no other dominates, sorted by their objectives."""
    best = [i for i, point in enumerate(points) if not any(dominates(other, point) for other in points)]
    return sorted(best, key=lambda i: points[i])


MOST_RAISED = 4
"""The largest factor by which `free_batch` raises the rows of an optimizer step. One row for each device is
always allowed."""
BLOCKS = (512, 1024, 2048)
"""Tokens of a block of the attention kernel. Smaller blocks are slower on every chip, by the cost model."""
SAVED_ON_HOST = ("offload_dots",)
"""Policies that need host memory apart from the device's, which a CPU does not have."""


@dataclass(frozen=True)
class Variant:
    """One configuration.

    Attributes:
        axes: size of each mesh axis.
        micro_batch, global_batch: rows of one data-parallel device, and of an optimizer step.
        remat, attention, profile: as the recipe language names them.
        block: block size of splash attention; None for the accelerator's own.
        sets: the changes as --set arguments; () for the unchanged recipe.
    """

    axes: tuple[tuple[str, int], ...]
    micro_batch: int
    global_batch: int
    remat: str
    attention: str
    profile: str
    block: int | None
    sets: tuple[str, ...] = field(compare=False)


def variants(program: Program, free_batch: bool = False) -> list[Variant]:
    """Return every configuration to look at, the unchanged recipe first.

    If no number of rows fits a mesh, the list has one configuration of the mesh that the checks refuse, so
    that the search reports the reason.
    """
    train, recipe = program.recipe.train, program.recipe
    layout = dict(recipe.mesh.axes), train.micro_batch_size, train.global_batch_size
    candidates = [
        _variant(program, *layout),
        *(_variant(program, *layout, block=block) for block in _blocks(program)),
    ]
    kernel = program.family.flash_attention and program.accelerator.platform == "tpu"
    kernel = kernel and not masks_pictures(program)
    for axes in _meshes(program):
        for micro, batch in _batches(train.global_batch_size, data_parallel(axes), free_batch):
            for attention in ("dot", "splash") if kernel else ("dot",):
                for policy in _policies(program):
                    for profile in _profiles(program):
                        chosen = policy, attention, profile
                        candidates.append(_variant(program, axes, micro, batch, chosen))
    return list(dict.fromkeys(candidates))


def _variant(
    program: Program,
    axes: dict[str, int],
    micro: int,
    batch: int,
    chosen: tuple[str, str, str] | None = None,
    block: int | None = None,
) -> Variant:
    """Return a variant.

    Args:
        chosen: remat policy, attention and profile; the recipe's own when None.
        block: block size of splash attention; the recipe's own when None.
    """
    recipe = program.recipe
    block = block or recipe.model.attention_block
    recipe_values = recipe.remat.policy, recipe.model.attention, recipe.xla.profile
    policy, attention, profile = chosen or recipe_values
    wanted = {
        "mesh.axes": (axes, dict(recipe.mesh.axes)),
        "train.global_batch_size": (batch, recipe.train.global_batch_size),
        "train.micro_batch_size": (micro, recipe.train.micro_batch_size),
        "remat.policy": (policy, recipe.remat.policy),
        "model.attention": (attention, recipe.model.attention),
        "model.attention_block": (block, recipe.model.attention_block),
        "xla.profile": (profile, recipe.xla.profile),
    }
    changed = {path for path, (value, present) in wanted.items() if value != present}
    # With another mesh or batch, `auto` could mean another value than the variant's.
    changed |= {path for path in wanted if changed and path in program.automatic}
    sets = tuple(f"{path}={flow(value)}" for path, (value, _) in wanted.items() if path in changed)
    return Variant(tuple(axes.items()), micro, batch, policy, attention, profile, block, sets)


def _meshes(program: Program) -> Iterator[dict[str, int]]:
    """Yield the recipe's mesh, then each arrangement of the devices in which tp divides every layer's heads.

    A single key/value head is kept whole.
    """
    recipe_axes = dict(program.recipe.mesh.axes)
    yield recipe_axes
    slices = program.accelerator.slices
    devices = program.accelerator.devices // slices
    cp = recipe_axes.get(TOKENS, 1)
    for tp in tp_sizes(program.architecture, devices // cp):
        axes = arranged(slices, devices // cp // tp, tp, cp)
        if axes != recipe_axes:
            yield axes


def _batches(batch: int, shards: int, free: bool) -> Iterator[tuple[int, int]]:
    """Yield (rows of a device, rows of an optimizer step) over `shards` data-parallel devices."""
    if not free:
        # If the rows cannot be split over the mesh, yield one pair that the checks refuse.
        for micro in divisors(batch // shards) if batch % shards == 0 else [1]:
            yield micro, batch
        return
    micro = 1
    while micro == 1 or micro * shards <= MOST_RAISED * batch:
        yield micro, -(-batch // (micro * shards)) * micro * shards
        micro *= 2
    if batch % shards == 0:
        for micro in divisors(batch // shards):
            yield micro, batch


def _policies(program: Program) -> list[str]:
    every: tuple[str, ...] = get_args(Remat.model_fields["policy"].annotation)
    tpu = program.accelerator.platform == "tpu"
    return [name for name in every if name != AUTO and (tpu or name not in SAVED_ON_HOST)]


def _profiles(program: Program) -> list[str]:
    """Return the profiles to try: the recipe's own, the generation's if there is one, and "none"."""
    recipe_profile, generation = program.recipe.xla.profile, program.accelerator.generation
    profiles_to_try = [
        recipe_profile,
        *([generation] if recipe_profile != "auto" and generation in profiles() else []),
        "none",
    ]
    return list(dict.fromkeys(profiles_to_try))


def _blocks(program: Program) -> Iterator[int]:
    """Yield the block sizes of splash attention that divide a row's length, except the recipe's own."""
    present = attention_block(program)
    if program.recipe.model.attention == "splash":
        yield from (b for b in BLOCKS if program.recipe.data.max_length % b == 0 and b != present)


def received(collective: Collective, axes: Mapping[str, int]) -> float:
    """Return the bytes that a device gets from others in a collective over rings."""
    size = math.prod(axes[axis] for axis in collective.axes) if collective.axes else math.prod(axes.values())
    share = (size - 1) / size
    if collective.kind == "all-reduce":
        return 2 * share * collective.bytes
    if collective.kind == "reduce-scatter":
        return (size - 1) * collective.bytes
    if collective.kind == "collective-permute":
        return collective.bytes
    return share * collective.bytes


def _of(needed: float, available: float) -> str:
    return f"{gib_number(needed, 1)} GiB of {gib_number(available, 1)} GiB"
