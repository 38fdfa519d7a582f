"""Turn a loaded recipe into a program: resolve its meaning, and check it against the model and the hardware.
One pass finds all errors, as far as the recipe can be understood."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from recipec.compiler.checks import run_checks
from recipec.compiler.checks.launch import E1301, E1302
from recipec.compiler.checks.server_cache import E0634
from recipec.compiler.lowering.divided import resolve_specs
from recipec.compiler.lowering.facts import AUTO, Facts, gather
from recipec.compiler.lowering.program import Program
from recipec.compiler.pages.numbers import gib_number, memory_size
from recipec.compiler.roofline.remat_policy import choose, with_policy
from recipec.compiler.roofline.rollout import axes_of, rollout_need, with_layout
from recipec.compiler.wording import divisors, listing
from recipec.runtime.model.adapters import placed
from recipec.runtime.model.partition_rules import DATA
from recipec.runtime.model.selection import train_only
from recipec.spec.codes import Code
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
    program, more = _recomputing(with_layout(_program(facts, recipe_text(loaded))), facts)
    more += _generating(program, facts)
    notes = tuple(d for d in [*problems, *more] if d.code[1:3] in LASTING_GROUPS)
    diagnostics = in_order([*diagnostics, *locate(more, loaded.sources)])
    return Lowered(replace(program, notes=notes), diagnostics)


N0228 = Code(
    "N0228",
    "no policy that surely fits",
    cause="`remat.policy: auto` takes the fastest policy whose step fits the devices' memory, even by the "
    "upper bound of the estimate. None does, so it took decoder, which needs the least memory.",
    cure="Run `recipe plan`, which has the compiler's figure. Or use a smaller micro_batch_size or "
    "max_length.",
)


def _recomputing(program: Program, facts: Facts) -> tuple[Program, list[Diagnostic]]:
    """Resolve `remat.policy: auto`."""
    if program.recipe.remat.policy != AUTO:
        return program, []
    choice = choose(program)
    automatic = {**program.automatic, "remat.policy": choice.reason}
    program = replace(with_policy(program, choice.policy), automatic=automatic)
    if choice.sure:
        return program, []
    needed, available = choice.needs[choice.policy], program.accelerator.hbm_bytes_per_device
    message = (
        f"no remat.policy surely fits: by calculation, a step with {choice.policy} needs "
        f"{gib_number(needed.total, 1)} to {gib_number(needed.most, 1)} GiB of each device's "
        f"{memory_size(available)} GiB"
    )
    place = facts.first_given("remat.policy", "mesh.accelerator", "mesh.topology")
    help = "recipe plan has the compiler's figure, and finds a change with which the step fits"
    return program, [Diagnostic(N0228, message, place, help)]


W0545 = Code(
    "W0545",
    "rollouts that may not fit",
    cause="While a device generates, it holds the state of training, the weights in the layout of the "
    "rollout, and keys and values of all completions that are generated at once. By calculation this is more "
    "than the device's memory.",
    cure="Generate fewer completions at once with `rollout.rows`, or use shorter ones.",
)


def _generating(program: Program, facts: Facts) -> list[Diagnostic]:
    """Check the memory of rollouts, by an estimate."""
    recipe, available = program.recipe, program.accelerator.hbm_bytes_per_device
    if program.generated is None or recipe.rollout.engine == "vllm" or not available:
        return []
    needed = rollout_need(program)
    if needed.total <= available:
        return []
    parts = [
        f"{gib_number(size, 1)} GiB of {what}"
        for what, size in (
            ("state", needed.state),
            ("weights in their layout", needed.weights),
            ("keys and values", needed.cache),
            ("logits and prompts", needed.work),
        )
        if size
    ]
    message = (
        f"by calculation, rollouts need {gib_number(needed.total, 1)} GiB of each device's "
        f"{memory_size(available)} GiB: {listing(parts)}"
    )
    rows, share = recipe.rollout.rows or recipe.train.global_batch_size, needed.cache + needed.work
    room = (available - needed.state - needed.weights) / share * rows
    parallel = math.prod(axes_of(program).get(axis, 1) for axis in DATA)
    fitting = [n for n in divisors(recipe.train.global_batch_size) if n <= room and n % parallel == 0]
    help = f"rollout: {{rows: {fitting[-1]}}}" if fitting else "shorter completions, or more devices"
    answer_length = "train.distill.max_completion_length"
    place = facts.first_given(
        "rollout.rows", "train.grpo.max_completion_length", answer_length, "train.objective"
    )
    return [Diagnostic(W0545, message, place, help)]


def _program(facts: Facts, text: str) -> Program:
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
        automatic=facts.automatic,
        teacher=facts.teacher,
        multimodal={} if architecture.vision is None else facts.model.multimodal,
    )
