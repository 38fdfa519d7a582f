"""Run one `recipe plan`: the plan, the search and the serving plan if requested, and the diagnostics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.emitters.backends import Backend, diagnosed
from recipec.compiler.lowering.run_length import Statistics, statistics
from recipec.compiler.plan import alternative, budget, fit
from recipec.compiler.plan.planner import estimate_of, plan
from recipec.compiler.plan.pool import Progress
from recipec.compiler.plan.results import PLAN, SEARCH, Estimate, Plan, RunLength, Search
from recipec.compiler.plan.roofline.server import SERVING_PLAN, ServingPlan, plan_serving, promise
from recipec.spec.diagnostics import Diagnostic, render_json
from recipec.spec.load import locate

if TYPE_CHECKING:
    from recipec.compiler.lowering.lower import Lowered
    from recipec.compiler.lowering.program import Program
    from recipec.spec.load import Loaded


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command line.

    Attributes:
        sets: the --set arguments.
        exact: whether to compile all layers to the end.
        search: whether to search for better configurations.
        most: configurations that the search compiles at most.
        free_batch: whether the search may raise the global batch.
        model, data_dir: folders of the tokenizer and of the data; None for the recipe's own places.
        backend: the backend whose step is compiled.
    """

    sets: tuple[str, ...] = ()
    exact: bool = False
    search: bool = False
    most: int = 24
    free_batch: bool = False
    model: Path | None = None
    data_dir: Path | None = None
    backend: Backend = Backend.TUNIX


@dataclass(frozen=True)
class Planned:
    """The results of `recipe plan`.

    Attributes:
        search: None if no search was requested.
        serving: None without a `serve` section.
        diagnostics: with their places in the recipe. An error means that the plan fails.
    """

    plan: Plan
    search: Search | None
    serving: ServingPlan | None
    diagnostics: tuple[Diagnostic, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the results for --json."""
        return {
            "plan": PLAN.dump_python(self.plan, mode="json"),
            "search": None if self.search is None else SEARCH.dump_python(self.search, mode="json"),
            "serving": None if self.serving is None else SERVING_PLAN.dump_python(self.serving, mode="json"),
            "diagnostics": render_json(self.diagnostics),
        }


def run(loaded: Loaded, lowered: Lowered, asked: PlanOptions, progress: Progress | None = None) -> Planned:
    """Plan a recipe that its backend can train.

    Args:
        lowered: the lowered recipe, with a program.

    Raises:
        ArtifactError: when it cannot be compiled, or its data cannot be read.
        KeyboardInterrupt: after Ctrl-C; finished compiles are in the cache.
        compiler.plan.search.SearchInterrupted: after Ctrl-C during a search, with the result so far.
    """
    from recipec.compiler.plan.search import SearchOptions, search

    program = lowered.program
    assert program is not None
    counted = statistics(program, asked.model, asked.data_dir)
    made = plan(program, asked.sets, asked.exact, counted, progress, asked.backend)
    if any(one.code == alternative.CODE for one in lowered.diagnostics):
        made = replace(made, notes=(*made.notes, alternative.note(program, made, asked.sets, asked.exact)))
    found = [*diagnosed(program, (asked.backend,)), *_fit(program, asked, made.estimate, progress)]
    found += budget.check(program, made)
    tried = None
    if asked.search:
        per_row = counted.tokens_per_row if isinstance(counted, Statistics) else None
        options = SearchOptions(asked.sets, per_row, asked.most, asked.free_batch, asked.backend)
        tried = search(program, options, progress)
    serving = None if program.recipe.serve is None else plan_serving(program)
    promised = None if serving is None else promise(serving)
    found += [] if promised is None else [promised]
    return Planned(made, tried, serving, tuple(locate(found, loaded.sources)))


def plan_run(program: Program, asked: PlanOptions, progress: Progress | None = None) -> RunLength:
    """Return the length of a recipe's run, from its plan."""
    counted = statistics(program, asked.model, asked.data_dir)
    return plan(program, asked.sets, asked.exact, counted, progress, asked.backend).run


def _fit(
    program: Program, asked: PlanOptions, estimate: Estimate, progress: Progress | None
) -> Sequence[Diagnostic]:
    """Return the diagnostic of a step that does not fit, with a change that fits if one was found."""
    if estimate.memory.headroom >= 0:
        return []

    def fits(sets: tuple[str, ...]) -> Estimate | None:
        from recipec.compiler.lowering.lower import lower
        from recipec.spec.load import load

        every = (*asked.sets, *sets)
        changed = lower(load(program.source, every), planning=True).program
        if changed is None:
            return None
        return estimate_of(changed, every, progress, asked.backend)

    way_out = fit.find(program, fits, given=asked.sets, estimate=estimate, backend=asked.backend)
    return [fit.diagnostic(program, estimate, way_out)]
