"""Turn a loaded recipe into a program: resolve its meaning, and check it against the model and the hardware.
One pass finds all errors, as far as the recipe can be understood."""

from __future__ import annotations

from dataclasses import dataclass

from recipec.compiler.checks import run_checks
from recipec.compiler.checks.launch import E1301, E1302
from recipec.compiler.checks.server_cache import E0634
from recipec.compiler.lowering.divided import resolve_specs
from recipec.compiler.lowering.facts import Facts, gather
from recipec.compiler.lowering.program import Program
from recipec.runtime.model.adapters import placed
from recipec.runtime.model.selection import train_only
from recipec.spec.diagnostics import Diagnostic, has_errors, in_order
from recipec.spec.load import Loaded, locate
from recipec.spec.recipe_text import recipe_text

LASTING_GROUPS = ("02", "03", "06", "08")
"""Groups of diagnostic codes that are the same on every machine, whatever data lies next to the recipe."""


@dataclass(frozen=True)
class Lowered:
    """The outcome of lowering.

    Attributes:
        program: None when any diagnostic is an error.
        diagnostics: of loading and of lowering, with their places, in the order of the file.
    """

    program: Program | None
    diagnostics: list[Diagnostic]


PLANNED = (E0634, E1301, E1302)
"""Errors of recipes that cannot run but can be planned: a server whose plan shows that it does not fit, and
checkpoints that not all hosts can reach."""


def lower(loaded: Loaded, planning: bool = False) -> Lowered:
    """Check a recipe and build its program.

    Args:
        planning: whether the program is only for planning, which some errors do not prevent.
    """
    recipe = loaded.recipe or loaded.tentative
    if recipe is None:
        return Lowered(None, list(loaded.diagnostics))
    facts, problems = gather(recipe, loaded.path)
    problems += [d for d in run_checks(facts) if not (planning and d.code in PLANNED)]
    diagnostics = in_order([*loaded.diagnostics, *locate(loaded.credible(problems), loaded.sources)])
    if has_errors(diagnostics):
        return Lowered(None, diagnostics)
    notes = tuple(d for d in problems if d.code[1:3] in LASTING_GROUPS)
    return Lowered(_program(facts, recipe_text(loaded), notes), diagnostics)


def _program(facts: Facts, text: str, notes: tuple[Diagnostic, ...]) -> Program:
    recipe = facts.recipe
    assert facts.model is not None and facts.accelerator is not None
    family, architecture = facts.model.family, facts.model.architecture
    on_indivisible = "replicate" if facts.replicates else "error"
    resolved = resolve_specs(facts.defaults, facts.rules, facts.axes, on_indivisible)
    parameters = train_only(resolved, recipe.train.trainable_modules)
    specs = {parameter.path: parameter.spec for parameter in parameters}
    adapters = [placed(adapter, specs[adapter.target.weight]) for adapter in facts.adapters or ()]
    return Program(
        recipe=recipe,
        source=facts.source,
        family=family,
        architecture=architecture,
        config=facts.model.config,
        model_origin=facts.model.origin,
        accelerator=facts.accelerator,
        serve_accelerator=facts.serve_accelerator,
        data_parallel=facts.data_parallel,
        accumulation_steps=recipe.train.global_batch_size
        // (recipe.train.micro_batch_size * facts.data_parallel),
        parameters=parameters,
        lora=facts.lora,
        adapters=tuple(adapters),
        rules=facts.rules,
        text=text,
        notes=notes,
    )
