"""Tests of the search for the best configuration, with a fake compiler, and of what it tries."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipec.compiler.checks.train import E0501
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lower import Lowered, lower
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan import search as searching
from recipec.compiler.plan.depth import Part, Parts
from recipec.compiler.plan.first_estimate import MEMORY_ERROR, FirstParts
from recipec.compiler.plan.pool import Progress
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
from recipec.compiler.plan.schedule import Prices
from recipec.compiler.plan.search import (
    Objectives,
    SearchInterrupted,
    SearchOptions,
    received,
    variants,
)
from recipec.compiler.roofline.training_step import Bound
from recipec.compiler.roofline.training_step import bound as computed
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.load import load
from tests.plan.plans import RECIPES, lowered

RECIPE = RECIPES / "gemma4-31b-v5p8.yaml"
LENGTH = 3072
GIB = 2**30
PARTS = Parts(Part((0, 1, 2, 3), scheduled=True), Part((0, 1)))


BASE = lowered("gemma4-31b-v5p8")


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
        return Lowered(None, [Diagnostic(E0501, f"no multiple of {rows} rows")])
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
    monkeypatch.setattr(searching, "bound", bound)


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
        self.first: FirstParts | None = None
        self.cache: dict[Job, Compiled | Failed] = {}
        self.compiled: list[Job] = []
        self._sets: tuple[str, ...] = ()

    def search(
        self, program: Program | None = None, progress: Progress | None = None, **options: Any
    ) -> Search:
        """Search with this compiler, and with quick checks."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(searching, "load", lambda source, sets: (source, sets))
            patch.setattr(searching, "lower", lambda loaded, planning: settle(*loaded))
            patch.setattr(searching, "parts", lambda program: PARTS)
            patch.setattr(searching, "first_parts", lambda *_: self.first)
            patch.setattr(searching, "first_estimate", self.first_estimated)
            patch.setattr(searching, "compile_jobs", self.compile_jobs)
            patch.setattr(searching, "estimate", self.estimated)
            return searching.search(program or BASE, SearchOptions(**options), progress)

    def compile_jobs(
        self, work: Sequence[tuple[Program, Job]], progress: Any, *, on_done: Any = lambda *_: None
    ) -> list[Compiled | Failed]:
        results = []
        for index, (_, job) in enumerate(work):
            if job in self.cache:
                results.append(self.cache[job])
                on_done(index, self.cache[job], True)
                continue
            if self.stop_after is not None and len(self.compiled) >= self.stop_after:
                raise KeyboardInterrupt
            self.compiled.append(job)
            result = self.fails.get(job.sets) or self._result(job)
            if isinstance(result, Compiled):
                self.cache[job] = result
            results.append(result)
            on_done(index, result, False)
            if progress:
                progress((index + 1) / len(work), "compiling")
        return results

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
        assert [one.layers for one in compiled] == [len(part.layers) for part in PARTS.refined]
        sets = [*self.times][int(compiled[0].batch)]
        seconds, used = self.estimate(program, sets)
        return an_estimate(program, seconds, used)

    def first_estimated(
        self, program: Program, first: FirstParts, compiled: Mapping[Part, Compiled]
    ) -> Estimate:
        """Return a first estimate, as far from the plan as the errors allow."""
        sets = [*self.times][int(compiled[first.scheduled[0]].batch)]
        seconds, used = self.estimate(program, sets)
        draws = random.Random(str(sets))
        seconds *= 1 + first.error * draws.uniform(-0.9, 0.9)
        return an_estimate(program, seconds, used * (1 + MEMORY_ERROR * draws.uniform(-0.9, 0.9)))


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
    found = machine.search(most=1000)
    assert named(found) == best_of_all(machine, found)
    assert len(found.points) == len({point.sets for point in found.points})


@pytest.mark.parametrize("seed", range(4))
def test_first_estimates_save_compiles_and_keep_the_front(seed: int) -> None:
    machine, without = Machine(seed), Machine(seed)
    machine.first = FirstParts((Part((0,), scheduled=True),), (1.0,), None, Prices(), 0.1)
    found = machine.search(most=1000)
    assert named(found) == best_of_all(machine, found)
    without.times = dict(machine.times)
    without.search(most=1000)
    whole = [job for job in machine.compiled if job.layers != (0,)]
    assert len(whole) < 0.8 * len(without.compiled)


def test_pruned_configurations_are_not_compiled() -> None:
    """Compile no recomputing policies if nothing exceeds its bound.

    They are slower, and the fast policies are no larger.
    """
    machine = Machine()
    machine._random = SimpleNamespace(random=lambda: 0.0)  # type: ignore[assignment]
    found = machine.search(most=1000)
    pruned = [point for point in found.points if point.status == "pruned"]
    assert pruned
    assert len(machine.compiled) == 2 * sum(point.status == "compiled" for point in found.points)
    assert all(point.reason.startswith("even its bound is behind ") for point in pruned)


def test_search_compiles_the_recipe_first_then_the_lowest_bounds() -> None:
    machine = Machine()
    found = machine.search(most=6)
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
    machine.search(settled("data.max_length=3072"), sets=["data.max_length=3072"], most=2)
    assert [job.layers for job in machine.compiled] == [(0, 1, 2, 3), (0, 1)] * 2
    assert {job.recipe for job in machine.compiled} == {RECIPE.resolve()}
    assert machine.compiled[0].sets == ("data.max_length=3072",)
    assert machine.compiled[2].sets[0] == "data.max_length=3072" and len(machine.compiled[2].sets) > 1


def test_refused_configuration_quotes_the_diagnostic_of_the_checks() -> None:
    """Run the real checks on one configuration that passes and one that fails."""
    every = variants(BASE)
    wrong = replace(every[1], sets=("train.micro_batch_size=3",))
    jobs: list[Job] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching, "variants", lambda program, free_batch: [every[0], wrong])
        patch.setattr(searching, "compile_jobs", lambda work, *_, **__: jobs.extend(job for _, job in work))
        found = searching.search(BASE, SearchOptions(backend=Backend.TORCHAX))
    assert {job.sets for job in jobs} == {()} and {job.backend for job in jobs} == {Backend.TORCHAX}
    assert [(point.sets, point.status, point.reason) for point in found.points] == [
        (
            wrong.sets,
            "refused",
            "E0501: global_batch_size 4 is not a multiple of micro_batch_size 3 x fsdp 4 = 12 rows, one "
            "micro-batch over all data-parallel devices",
        )
    ]


def test_search_never_changes_fixed_keys() -> None:
    def changed(fixed: tuple[str, ...]) -> set[str]:
        found = Machine().search(most=1, free_batch=True, fixed=fixed)
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
    found = machine.search(most=5)
    failed = [point for point in found.points if point.status == "failed"]
    assert [(point.sets, point.reason) for point in failed] == [((), "the compile was killed")]
    assert found.baseline is None
    assert sum(point.status == "compiled" for point in found.points) == 4


def test_search_does_not_compile_if_the_memory_bound_is_too_large() -> None:
    """Refuse a step without compiling it, because two rows' attention probabilities are too large."""
    machine = Machine()
    sets = ["model.attention=dot", "train.global_batch_size=8", "remat.policy=none"]
    machine.times[tuple(sets)] = (1.0, 1.0)
    found = machine.search(settled(*sets), sets=sets, most=1)
    large = [point for point in found.points if point.status == "too large"]
    assert large and all(point.reason.startswith("it needs at least ") for point in large)
    assert not {job.sets[3:] for job in machine.compiled} & {point.sets for point in large}


def test_search_skips_larger_micro_batches_after_one_row_does_not_fit() -> None:
    machine = Machine()
    sets = ["mesh.axes={fsdp: 1, tp: 4}"]
    machine.times[("mesh.axes={fsdp: 1, tp: 4}",)] = (1.0, 5.0)
    found = machine.search(settled(*sets), sets=sets, most=1000)
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
    found = machine.search(most=3)
    assert next(point.status for point in found.points if not point.sets) == "too large"
    assert found.baseline is None


def test_interrupted_search_returns_partial_results_and_resumes() -> None:
    """Press Ctrl-C in the third batch.

    The second search compiles nothing again, and finds what an uninterrupted search finds.
    """
    machine = Machine(1)
    machine.stop_after = 19
    with pytest.raises(SearchInterrupted) as interrupted:
        machine.search(most=16)
    partial = interrupted.value.search
    assert sum(point.status == "compiled" for point in partial.points) == 9
    assert partial.baseline is not None and partial.front
    assert partial.notes and partial.notes[0].endswith("the search was interrupted before that.")
    before = list(machine.compiled)
    machine.stop_after = None
    found = machine.search(most=16)
    assert machine.compiled[: len(before)] == before
    assert len(set(machine.compiled)) == len(machine.compiled)
    whole = Machine(1)
    whole.times = dict(machine.times)
    once = whole.search(most=16)
    assert replace(found, seconds=0) == replace(once, seconds=0)


def test_point_rate_and_cost_count_only_real_tokens() -> None:
    """Compute with 4 rows of 900 real tokens, and 4 chips at US$ 4.20 an hour."""
    found = Machine(fixed={(): (1.2, 1.1)}).search(tokens_per_row=900, most=1)
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
    Machine().search(progress=lambda *what: said.append(what), most=8)
    shares = [share for share, _ in said]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1
    assert said[0][1] == "checking 1 of 145 configurations"
    assert said[-1][1] == "4 of at most 8 configurations, compiling"


def test_search_refuses_a_cpu_recipe() -> None:
    with pytest.raises(ArtifactError, match="is not a TPU"):
        searching.search(lowered("quickstart"), SearchOptions())


@pytest.mark.parametrize("seed", range(20))
def test_pareto_front_matches_brute_force(seed: int) -> None:
    source = random.Random(seed)
    points = [tuple(float(source.randrange(6)) for _ in range(3)) for _ in range(40)]
    expected = set()
    for i, a in enumerate(points):
        worse = any(
            all(b[k] <= a[k] for k in range(3)) and any(b[k] < a[k] for k in range(3)) for b in points
        )
        if not worse:
            expected.add(i)
    found = searching.front(points)
    assert set(found) == expected
    assert [points[i] for i in found] == sorted(points[i] for i in found)


@pytest.mark.parametrize(
    "kind, axes, expected",
    [
        ("all-gather", ("fsdp",), 75.0),
        ("all-reduce", ("fsdp",), 150.0),
        ("reduce-scatter", ("fsdp",), 300.0),
        ("all-to-all", ("tp",), 50.0),
        ("collective-permute", ("tp",), 100.0),
        ("all-gather", (), 87.5),
    ],
)
def test_received_bytes_depend_on_collective_kind_and_axes(
    kind: str, axes: tuple[str, ...], expected: float
) -> None:
    """Receive bytes on 4 x 2 devices, where each device ends with 100 bytes."""
    assert received(Collective(kind, axes, False, 1, 100.0), {"fsdp": 4, "tp": 2}) == expected


def shapes_of(found: Sequence[object]) -> list[tuple[dict[str, int], int, int]]:
    """Return the meshes and batches in order, each once."""
    every = [(dict(v.axes), v.micro_batch, v.global_batch) for v in found]  # type: ignore[attr-defined]
    return [one for i, one in enumerate(every) if one not in every[:i]]


def test_flagship_variants_cover_every_allowed_combination() -> None:
    """Limit tp to 4, as ten layers have 4 key/value heads, and keep the recipe's 4 rows."""
    found = variants(lowered("gemma4-31b-v5p8"))
    assert found[0].sets == ()
    assert shapes_of(found) == [
        ({"fsdp": 4, "tp": 1}, 1, 4),
        ({"fsdp": 2, "tp": 2}, 1, 4),
        ({"fsdp": 2, "tp": 2}, 2, 4),
        ({"fsdp": 1, "tp": 4}, 1, 4),
        ({"fsdp": 1, "tp": 4}, 2, 4),
        ({"fsdp": 1, "tp": 4}, 4, 4),
    ]
    policies = {"none", "block", "decoder", "save_attention", "save_dots", "offload_dots"}
    assert policies <= {v.remat for v in found}
    assert {v.attention for v in found} == {"dot", "splash"}
    assert {v.profile for v in found} == {"none", "auto"}
    assert [v.block for v in found if v.block] == [1024]  # of the recipe as written
    assert len(found) == 6 * len({v.remat for v in found}) * 2 * 2 + 1
    assert len({v.sets for v in found}) == len(found)


@pytest.mark.parametrize("sets", [(), ("remat.policy=auto", "model.attention=auto")])
def test_set_arguments_of_a_variant_reproduce_the_variant(sets: Sequence[str]) -> None:
    """Check that each variant's --set arguments give exactly that configuration, also where `auto` would
    choose otherwise for its mesh and batch."""
    base = lowered("llama31-8b-v6e8", *sets)
    assert variants(base)[0].sets == ()
    for variant in variants(base)[::17]:
        changed = lowered("llama31-8b-v6e8", *sets, *variant.sets)
        recipe = changed.recipe
        assert tuple(recipe.mesh.axes.items()) == variant.axes
        assert recipe.train.micro_batch_size == variant.micro_batch
        assert (recipe.remat.policy, recipe.model.attention) == (variant.remat, variant.attention)
        assert changed.micro_batch_rows * changed.accumulation_steps == recipe.train.global_batch_size
        assert recipe.train.global_batch_size == base.recipe.train.global_batch_size
        same = {"name", "data", "lora", "merge", "checkpoint", "serve"}
        assert recipe.model_dump(include=same) == base.recipe.model_dump(include=same)


def test_variants_include_indivisible_meshes_that_the_checks_refuse() -> None:
    base = lowered("gemma4-31b-v5p8", "mesh.axes={fsdp: 2, tp: 2}", "train.global_batch_size=2")
    refused = next(v for v in variants(base) if dict(v.axes) == {"fsdp": 4, "tp": 1})
    settled = lower(load(RECIPE, ["train.global_batch_size=2", *refused.sets]))
    assert settled.program is None
    assert [d.code for d in settled.diagnostics if d.severity == "error"] == ["E0501"]


def test_free_batch_variants_raise_rows_up_to_four_times() -> None:
    """Use multiples of a micro-batch over all devices, up to four times the recipe's rows."""
    found = variants(lowered("gemma4-31b-v5p8"), free_batch=True)
    assert shapes_of(found)[:4] == [
        ({"fsdp": 4, "tp": 1}, 1, 4),
        ({"fsdp": 4, "tp": 1}, 2, 8),
        ({"fsdp": 4, "tp": 1}, 4, 16),
        ({"fsdp": 2, "tp": 2}, 1, 4),
    ]
    assert all(v.global_batch % (v.micro_batch * dict(v.axes)["fsdp"]) == 0 for v in found)
    assert {v.global_batch for v in found} == {4, 8, 16}
    raised = next(v for v in found if v.global_batch == 8)
    assert "train.global_batch_size=8" in raised.sets


@pytest.mark.parametrize("rows, fsdp, expected", [(6, 4, 8), (1, 4, 4)])
def test_smallest_free_batch_is_a_multiple_of_the_fsdp_size(rows: int, fsdp: int, expected: int) -> None:
    base = lowered("gemma4-31b-v5p8", "mesh.axes={tp: 4}", f"train.global_batch_size={rows}")
    found = [v for v in variants(base, free_batch=True) if dict(v.axes)["fsdp"] == fsdp]
    assert min(v.global_batch for v in found) == expected


def test_single_key_value_head_allows_tensor_parallelism() -> None:
    """Replicate Gemma 3 270M's one key/value head, and split its 4 query heads."""
    base = lowered("gemma4-31b-v5p8", "model.id=google/gemma-3-270m-it", "serve=null")
    assert {dict(v.axes)["tp"] for v in variants(base)} == {1, 2, 4}


def test_cpu_variants_have_no_splash_kernel_and_no_offload() -> None:
    found = variants(lowered("quickstart"))
    assert {v.attention for v in found} == {"dot"}
    assert "offload_dots" not in {v.remat for v in found}


def test_variants_include_the_recipe_mesh() -> None:
    """Include tp 8, which does not divide all heads, because the recipe replicates these weights."""
    sets = ["mesh.accelerator=v5p-16", "mesh.axes={tp: 8}", "sharding.on_indivisible=replicate"]
    found = variants(lowered("gemma4-31b-v5p8", *sets))
    assert dict(found[0].axes) == {"fsdp": 1, "tp": 8}
    assert {dict(v.axes)["tp"] for v in found} == {1, 2, 4, 8}
    assert len({v.remat for v in found if dict(v.axes)["tp"] == 8}) > 1
