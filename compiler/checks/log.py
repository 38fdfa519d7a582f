"""The `train.log` section: where a run's numbers go."""

from __future__ import annotations

import re
from collections.abc import Iterator

from compiler.facts import Facts
from compiler.wording import flow
from spec.diagnostics import Diagnostic
from spec.secrets import WANDB_KEY

PATH = "train.log.wandb_project"
REFUSED = "/\\#?%:"
"""Letters that Weights & Biases has no place for in a project's name."""
LONGEST = 128


def check(facts: Facts) -> Iterator[Diagnostic]:
    project = facts.recipe.train.log.wandb_project
    if project is None:
        return
    if WANDB_KEY.fullmatch(project):
        yield Diagnostic(
            "E1226",
            "this looks like a key of Weights & Biases, and would be written into the artifact",
            PATH,
            "wandb_project: my-project; `wandb login` or WANDB_API_KEY give the run its key: revoke this one",
        )
        return
    entity, slash, name = project.partition("/")
    refused = [letter for letter in REFUSED if letter in project]
    if slash and name and not any(letter in name for letter in REFUSED):
        yield Diagnostic(
            "E1225",
            f"`{project}` names an entity too, and a project's name has no slash",
            PATH,
            f"wandb_project: {flow(name)}, and WANDB_ENTITY={entity} in the environment of the run",
        )
    elif refused:
        yield Diagnostic(
            "E1225",
            f"Weights & Biases takes no {' '.join(refused)} in a project's name",
            PATH,
            f"wandb_project: {_allowed(project)}",
        )
    elif len(project) > LONGEST:
        yield Diagnostic(
            "E1225",
            f"a project's name of {len(project)} letters, and Weights & Biases takes {LONGEST}",
            PATH,
            f"wandb_project: {flow(project[:LONGEST].rstrip())}",
        )


def _allowed(project: str) -> str:
    """A project's name with hyphens in place of what Weights & Biases refuses."""
    name = re.sub(rf"[{re.escape(REFUSED)}]+", "-", project).strip("- ")
    return flow(name) if name else "my-project"
