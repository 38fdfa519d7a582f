"""Read and check the recipe of a command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recipec.compiler.cli.arguments.shared_arguments import Format
from recipec.compiler.cli.printing import fail
from recipec.compiler.lower import Lowered, lower
from recipec.compiler.lowering.program import Program
from recipec.compiler.terminal import doing
from recipec.runtime.untrusted import TooLong, limit
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.load import Loaded, display, load
from recipec.spec.origins import Sources
from recipec.spec.secrets import Concealer

CHECK_SECONDS = 60.0
"""Most seconds for reading and checking one recipe; one or two are usual."""


def read(path: Path, sets: Sequence[str] | None, planning: bool = False) -> tuple[Loaded, Lowered]:
    """Load and lower a recipe.

    Args:
        planning: whether to accept features that only a plan supports.
    """
    try:
        with limit(CHECK_SECONDS):
            with doing(f"reading {path}"):
                loaded = load(path, sets or ())
            with doing(f"checking {path}"):
                lowered = lower(loaded, planning)
    except TooLong:
        loaded, lowered = _unending(path)
    return loaded, lowered


E0042 = Code(
    "E0042",
    "check takes too long",
    cause="The checks of a recipe are stopped after a minute. A regular expression such as `(a+)+b` "
    "can take almost forever. It may be in lora.targets, rank_pattern, sharding.rules or "
    "evaluate.prompts.",
    cure="Rewrite the expression without a repetition inside a repetition.",
)


def _unending(path: Path) -> tuple[Loaded, Lowered]:
    """Return the diagnostic about a recipe whose checks did not finish in time, and no program."""
    problem = Diagnostic(
        E0042,
        f"the checks of {display(path)} did not finish within {CHECK_SECONDS:g} s",
        help="look for a regular expression with a repetition inside a repetition, such as (a+)+b",
    )
    return Loaded(path, None, [problem], Sources(None, Concealer(None))), Lowered(None, [problem])


def read_program(
    path: Path, sets: Sequence[str] | None, format: Format = "text", planning: bool = False
) -> tuple[Loaded, Lowered, Program]:
    """Load and lower a recipe, and end the command with its diagnostics if it has no program."""
    loaded, lowered = read(path, sets, planning)
    if lowered.program is None:
        fail(lowered.diagnostics, format)
    return loaded, lowered, lowered.program
