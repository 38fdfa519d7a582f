"""Tests of the search for the best configuration, with a fake compiler."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.lower import Lowered, lower
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.bound import Bound
from recipec.compiler.plan.bound import bound as computed
from recipec.compiler.plan.depth import Part
from recipec.compiler.plan.results import (
    Collective,
    Compiled,
    Estimate,
    Failed,
    Interval,
    Job,
    Memory,
    Moved,
    OutOfMemory,
    Search,
    Timeline,
)
from recipec.compiler.plan.search import Objectives, SearchInterrupted, SearchOptions, Tools, search, variants
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.load import load

RECIPE = Path(__file__).resolve().parent.parent.parent / "recipes" / "gemma4-31b-v5p8.yaml"
LENGTH = 3072
GIB = 2**30
PARTS = (Part((0, 1, 2, 3), scheduled=True), Part((0, 1)))


def _base() -> Program:
    found = lower(load(RECIPE), planning=True).program
    assert found is not None
    return found


BASE = _base()


def settle(source: Path, sets: Sequence[str]) -> Lowered:
    """Apply --set arguments as `lower` does, but faster and only to the sections that matter here."""
    recipe = BASE.recipe
    for argument in sets:
        path, _, value = argument.partition("=")
        section, key = path.split(".")
        numbers = [int(number) for number in re.findall(r"\d+", value)]
        new: Any = dict(zip(("fsdp", "tp"), numbers, strict=True)) if path == "mesh.axes" else value
        new = numbers[0] if value.isdigit() else new
        changed = getattr(recipe, section).model_copy(update={key: new})
        recipe = recipe.model_copy(update={section: changed})
    rows = recipe.train.micro_batch_size * recipe.mesh.axes["fsdp"]
    if recipe.train.global_batch_size % rows:
        return Lowered(None, [Diagnostic("E0501", f"no multiple of {rows} rows")])
    steps = recipe.train.global_batch_size // rows
    changes = {"data_parallel": recipe.mesh.axes["fsdp"], "accumulation_steps": steps}
    return Lowered(replace(BASE, recipe=recipe, **changes), [])


def settled(*sets: str) -> Program:
    found = settle(RECIPE, sets).program
    assert found is not None
    return found


BOUNDS: dict[str, Bound] = {}
"""The bounds by what they depend on here, because many searches have the same configurations."""


def bound(program: Program, length: int) -> Bound:
    key = repr((program.recipe.mesh, program.recipe.train, program.recipe.remat, program.recipe.model))
    if key not in BOUNDS:
        BOUNDS[key] = computed(program, length)
    return BOUNDS[key]


@pytest.fixture(autouse=True)
def _computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipec.compiler.plan.search.bound", bound)


class Machine:
    """A compiler with a table of made-up figures, which caches the results.

    Attributes:
        times: for each program, the factors of its time and memory over its bound.
        compiled: the jobs that were not in the cache, in order.
    """

    def __init__(
        self, seed: int = 0, fixed: dict[tuple[str, ...], tuple[float, float]] | None = None
    ) -> None:
        self._random = random.Random(seed)
        self.times: dict[tuple[str, ...], tuple[float, float]] = dict(fixed or {})
        self.fails: dict[tuple[str, ...], Failed] = {}
        self.refuses: set[tuple[str, ...]] = set()
        self.stop_after: int | None = None
        self.cache: dict[Job, Compiled | Failed] = {}
        self.compiled: list[Job] = []
        self._sets: tuple[str, ...] = ()

    def tools(self) -> Tools:
        return Tools(settle, lambda program: PARTS, self.compile_jobs, self.estimated)

    def compile_jobs(self, work: Sequence[tuple[Program, Job]], progress: Any, *, on_done: Any) -> object:
        for index, (_, job) in enumerate(work):
            if job in self.cache:
                on_done(index, self.cache[job], True)
                continue
            if self.stop_after is not None and len(self.compiled) >= self.stop_after:
                raise KeyboardInterrupt
            self.compiled.append(job)
            result = self.fails.get(job.sets) or self._result(job)
            if isinstance(result, Compiled):
                self.cache[job] = result
            on_done(index, result, False)
            if progress:
                progress((index + 1) / len(work), "compiling")
        return None

    def estimate(self, program: Program, sets: tuple[str, ...]) -> tuple[float, float]:
        """Return the seconds and bytes of a configuration, never below its bound."""
        least = bound(program, LENGTH)
        if sets not in self.times:
            self.times[sets] = (1 + self._random.random(), 1 + self._random.random())
        slower, larger = self.times[sets]
        return least.seconds * slower, least.memory_bytes * larger

    def _result(self, job: Job) -> Compiled:
        refused = OutOfMemory(100 * GIB, 95 * GIB) if job.sets in self.refuses else None
        # The estimate supplies the figures. `batch` identifies the compiled job.
        return Compiled(len(job.layers), 0, 0, 0, float(self._number(job.sets)), out_of_memory=refused)

    def _number(self, sets: tuple[str, ...]) -> int:
        names = [*self.times]
        if sets not in names:
            self.times[sets] = (1 + self._random.random(), 1 + self._random.random())
            names = [*self.times]
        return names.index(sets)

    def estimated(self, program: Program, compiled: Sequence[Compiled]) -> Estimate:
        assert [one.layers for one in compiled] == [len(part.layers) for part in PARTS]
        sets = [*self.times][int(compiled[0].batch)]
        seconds, used = self.estimate(program, sets)
        return an_estimate(program, seconds, used)


def an_estimate(program: Program, seconds: float, used: float) -> Estimate:
    waiting = Moved("all-gather", "", ("fsdp",), False, 2, 60e9, seconds, 0.25 * seconds)
    return Estimate(
        layers=60,
        compiled_layers=(2,),
        memory=Memory(used, 0, 0, 0, 0, 0, 0, program.accelerator.hbm_bytes_per_device),
        flops=0,
        bytes=0,
        timeline=Timeline(products=0.75 * seconds, transfers=(waiting,)),
        seconds=seconds,
        interval=Interval(0.9, 1.2, ""),
        peak_flops=459e12,
        bandwidth=0,
        model_flops=0,
        mfu=0.5,
        rows=program.micro_batch_rows,
        row_length=LENGTH,
        collectives=(Collective("all-gather", ("fsdp",), False, 2, 60e9),),
        kernels=(),
        largest=(),
        compile_seconds=0,
    )


def named(found: Search, indices: Sequence[int] | None = None) -> set[tuple[str, ...]]:
    return {found.points[i].sets for i in (found.front if indices is None else indices)}


def best_of_all(machine: Machine, found: Search) -> set[tuple[str, ...]]:
    """Return the front, by compiling everything that passes the checks and fits."""
    every: dict[tuple[str, ...], Objectives] = {}
    for point in found.points:
        if point.status == "refused":
            continue
        changed = settled(*point.sets)
        seconds, used = machine.estimate(changed, point.sets)
        if used <= changed.accelerator.hbm_bytes_per_device:
            token = seconds / (changed.micro_batch_rows * LENGTH)
            every[point.sets] = (token, used, token * 16.80 / 3600)
    return {
        sets
        for sets, mine in every.items()
        if not any(
            all(x <= y for x, y in zip(other, mine, strict=True)) and other != mine
            for other in every.values()
        )
    }


@pytest.mark.parametrize("seed", range(4))
def test_pruning_keeps_every_point_of_the_pareto_front(seed: int) -> None:
    machine = Machine(seed)
    found = search(BASE, SearchOptions(most=1000), tools=machine.tools())
    assert named(found) == best_of_all(machine, found)
    assert len(found.points) == len({point.sets for point in found.points})


def test_pruned_configurations_are_not_compiled() -> None:
    """Compile no recomputing policies if nothing exceeds its bound.

    They are slower, and the fast policies are no larger.
    """
    machine = Machine()
    machine._random = SimpleNamespace(random=lambda: 0.0)  # type: ignore[assignment]
    found = search(BASE, SearchOptions(most=1000), tools=machine.tools())
    pruned = [point for point in found.points if point.status == "pruned"]
    assert pruned
    assert len(machine.compiled) == 2 * sum(point.status == "compiled" for point in found.points)
    assert all(point.reason.startswith("even its bound is behind ") for point in pruned)


def test_front_is_sorted_by_time_and_baseline_is_the_recipe() -> None:
    found = search(BASE, SearchOptions(most=1000), tools=Machine(3).tools())
    times = [found.points[i].seconds_per_token for i in found.front]
    assert times == sorted(times)  # type: ignore[type-var]
    assert found.baseline is not None and found.points[found.baseline].sets == ()


def test_search_compiles_the_recipe_first_then_the_lowest_bounds() -> None:
    machine = Machine()
    found = search(BASE, SearchOptions(most=6), tools=machine.tools())
    order = list(dict.fromkeys(job.sets for job in machine.compiled))
    assert order[0] == () and len(order) == 6
    bounds = {point.sets: point.bound_seconds_per_token for point in found.points}
    others = [sets for sets in bounds if sets not in order]
    assert max(bounds[sets] for sets in order) <= min(bounds[sets] for sets in others)
    left = sum(point.reason.startswith("the search compiles") for point in found.points)
    assert found.notes == (
        f"{left} configurations could still be better: the search compiles at most 6, those with the lowest "
        "bounds first.",
    )


def test_compile_jobs_put_the_given_set_arguments_first() -> None:
    machine = Machine()
    search(
        settled("data.max_length=3072"),
        SearchOptions(["data.max_length=3072"], most=2),
        tools=machine.tools(),
    )
    assert [job.layers for job in machine.compiled] == [(0, 1, 2, 3), (0, 1)] * 2
    assert {job.recipe for job in machine.compiled} == {RECIPE.resolve()}
    assert machine.compiled[0].sets == ("data.max_length=3072",)
    assert machine.compiled[2].sets[0] == "data.max_length=3072" and len(machine.compiled[2].sets) > 1


def test_refused_configuration_quotes_the_diagnostic_of_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the real checks on one configuration that passes and one that fails."""
    every = variants(BASE)
    wrong = replace(every[1], sets=("train.micro_batch_size=3",))
    monkeypatch.setattr(
        "recipec.compiler.plan.search.variants", lambda program, free_batch: [every[0], wrong]
    )
    tools = replace(Machine().tools(), settle=Tools().settle)
    found = search(BASE, SearchOptions(), tools=tools)
    statuses = {point.sets: (point.status, point.reason) for point in found.points}
    assert statuses[()] == ("compiled", "")
    assert statuses[wrong.sets] == (
        "refused",
        "E0501: global_batch_size 4 is not a multiple of micro_batch_size 3 x fsdp 4 = 12 rows, one "
        "micro-batch over all data-parallel devices",
    )


def test_free_batch_search_refuses_no_configuration() -> None:
    sets = ["mesh.axes={fsdp: 2, tp: 2}", "train.global_batch_size=2"]
    found = search(settled(*sets), SearchOptions(sets, most=1, free_batch=True), tools=Machine().tools())
    assert not any(point.status == "refused" for point in found.points)


def test_search_never_changes_fixed_keys() -> None:
    def changed(fixed: tuple[str, ...]) -> set[str]:
        found = search(
            settled(), SearchOptions(most=1, free_batch=True, fixed=fixed), tools=Machine().tools()
        )
        return {argument.partition("=")[0] for point in found.points for argument in point.sets}

    every = changed(())
    assert {"model.attention", "mesh.axes"} <= every
    assert changed(("model.attention",)) == every - {"model.attention"}


def test_attention_block_variants_divide_the_row_length() -> None:
    def blocks(*sets: str) -> list[tuple[str, ...]]:
        every = variants(settled(*sets))
        return [one.sets for one in every if any("attention_block" in argument for argument in one.sets)]

    assert blocks() == [("model.attention_block=1024",)]  # 3,072 tokens; v5p's own blocks have 512
    wide = "model.attention_block=1024", "data.max_length=4096"
    assert blocks(*wide) == [("model.attention_block=512",), ("model.attention_block=2048",)]
    assert blocks("model.attention=dot") == []


def test_search_records_a_failed_compile_with_its_reason() -> None:
    machine = Machine()
    machine.fails[()] = Failed("the compile was killed", True)
    found = search(BASE, SearchOptions(most=5), tools=machine.tools())
    failed = [point for point in found.points if point.status == "failed"]
    assert [(point.sets, point.reason) for point in failed] == [((), "the compile was killed")]
    assert found.baseline is None
    assert sum(point.status == "compiled" for point in found.points) == 4


def test_search_does_not_compile_if_the_memory_bound_is_too_large() -> None:
    """Refuse a step without compiling it, because two rows' attention probabilities are too large."""
    machine = Machine()
    sets = ["model.attention=dot", "train.global_batch_size=8", "remat.policy=none"]
    machine.times[tuple(sets)] = (1.0, 1.0)
    found = search(settled(*sets), SearchOptions(sets, most=1), tools=machine.tools())
    large = [point for point in found.points if point.status == "too large"]
    assert large and all(point.reason.startswith("it needs at least ") for point in large)
    assert not {job.sets[3:] for job in machine.compiled} & {point.sets for point in large}


def test_search_skips_larger_micro_batches_after_one_row_does_not_fit() -> None:
    machine = Machine()
    sets = ["mesh.axes={fsdp: 1, tp: 4}"]
    machine.times[("mesh.axes={fsdp: 1, tp: 4}",)] = (1.0, 5.0)
    found = search(settled(*sets), SearchOptions(sets, most=1000), tools=machine.tools())
    by_sets = {point.sets: point for point in found.points}
    assert by_sets[()].status == "too large" and by_sets[()].reason.startswith("it needs ")
    larger = by_sets[("train.micro_batch_size=2",)]
    assert (larger.status, larger.reason) == ("too large", "1 row a device already do not fit")
    assert ("mesh.axes={fsdp: 1, tp: 4}", "train.micro_batch_size=2") not in {
        j.sets for j in machine.compiled
    }


def test_out_of_memory_refusal_is_reported_as_too_large() -> None:
    machine = Machine()
    machine.refuses.add(())
    found = search(BASE, SearchOptions(most=3), tools=machine.tools())
    assert next(point.status for point in found.points if not point.sets) == "too large"
    assert found.baseline is None


def test_interrupted_search_returns_partial_results_and_resumes() -> None:
    """Press Ctrl-C in the third batch.

    The second search compiles nothing again, and finds what an uninterrupted search finds.
    """
    machine = Machine(1)
    machine.stop_after = 19
    with pytest.raises(SearchInterrupted) as interrupted:
        search(BASE, SearchOptions(most=16), tools=machine.tools())
    partial = interrupted.value.found
    assert sum(point.status == "compiled" for point in partial.points) == 9
    assert partial.baseline is not None and partial.front
    assert partial.notes and partial.notes[0].endswith("the search was interrupted before that.")
    before = list(machine.compiled)
    machine.stop_after = None
    found = search(BASE, SearchOptions(most=16), tools=machine.tools())
    assert machine.compiled[: len(before)] == before
    assert len(set(machine.compiled)) == len(machine.compiled)
    whole = Machine(1)
    whole.times = dict(machine.times)
    once = search(BASE, SearchOptions(most=16), tools=whole.tools())
    assert replace(found, seconds=0) == replace(once, seconds=0)


def test_point_rate_and_cost_count_only_real_tokens() -> None:
    """Compute with 4 rows of 900 real tokens, and 4 chips at US$ 4.20 an hour."""
    found = search(
        BASE, SearchOptions(tokens_per_row=900, most=1), tools=Machine(fixed={(): (1.2, 1.1)}).tools()
    )
    assert found.baseline is not None
    point = found.points[found.baseline]
    seconds = 1.2 * bound(BASE, LENGTH).seconds
    assert point.tokens == 3600
    assert point.step_seconds == pytest.approx(seconds)
    assert point.seconds_per_token == pytest.approx(seconds / 3600)
    assert point.usd_per_million_tokens == pytest.approx(16.80 / 3600 * seconds / 3600 * 1e6)
    assert point.bound_seconds_per_token == pytest.approx(seconds / 1.2 / 3600)
    assert point.exposed_seconds == pytest.approx(seconds / 4)


def test_search_progress_rises_from_0_to_1() -> None:
    said: list[tuple[float, str]] = []
    search(BASE, SearchOptions(most=8), progress=lambda *what: said.append(what), tools=Machine().tools())
    shares = [share for share, _ in said]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1
    assert said[0][1] == "checking 1 of 145 configurations"
    assert said[-1][1] == "4 of at most 8 configurations, compiling"


def test_search_refuses_a_cpu_recipe() -> None:
    quickstart = lower(load(RECIPE.parent / "quickstart.yaml")).program
    assert quickstart is not None
    with pytest.raises(ArtifactError, match="is not a TPU"):
        search(quickstart, SearchOptions(), tools=Machine().tools())
