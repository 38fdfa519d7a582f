"""The `train.log` section: where a run's numbers go."""

from __future__ import annotations

import re
from collections.abc import Iterator

from compiler.facts import Facts
from spec.diagnostics import Diagnostic

PATH = "train.log.wandb_project"
REFUSED = "/\\#?%:"
"""Letters that Weights & Biases has no place for in a project's name."""
LONGEST = 128
KEY = re.compile(r"(?:\w+-)?(?=[A-Za-z]*\d)[A-Za-z0-9]{40,}|wandb_v\d+_\w{20,}")
"""A key of Weights & Biases: 40 letters and digits or more, behind a prefix for a server of one's own."""


def check(facts: Facts) -> Iterator[Diagnostic]:
    project = facts.recipe.train.log.wandb_project
    if project is None:
        return
    if KEY.fullmatch(project):
        yield Diagnostic(
            "E1226",
            "this looks like a key of Weights & Biases, and would be written into the artifact",
            PATH,
            "name the project here; `wandb login` or WANDB_API_KEY give the run its key; revoke this one",
        )
        return
    entity, slash, name = project.partition("/")
    refused = [letter for letter in REFUSED if letter in project]
    if slash and name and not any(letter in name for letter in REFUSED):
        yield Diagnostic(
            "E1225",
            f"`{project}` names an entity too, and a project's name has no slash",
            PATH,
            f"wandb_project: {name}, and WANDB_ENTITY={entity} in the environment of the run",
        )
    elif refused:
        yield Diagnostic(
            "E1225",
            f"Weights & Biases takes no {' '.join(refused)} in a project's name",
            PATH,
            "letters, digits, hyphens and underscores are safe",
        )
    elif len(project) > LONGEST:
        yield Diagnostic(
            "E1225",
            f"a project's name of {len(project)} letters, and Weights & Biases takes {LONGEST}",
            PATH,
            "a shorter one",
        )
