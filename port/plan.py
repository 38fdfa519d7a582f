"""`recipe port --plan`: of the meshes that pass the checks, choose the one with the fastest compiled step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from recipec.compiler.lower import lower
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.results import Point, Search
from recipec.compiler.wording import plural
from recipec.port.ledger import Ledger, Verdict
from recipec.port.mesh import MICRO
from recipec.port.port import Asked, Ported, finish, in_place
from recipec.port.read import Tree, parse_yaml
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.load import load

MOST = 12
"""The most configurations that are compiled."""
FIXED = ("model.attention", "train.global_batch_size")
"""Values that the port takes from its source. The search may not change them."""


@dataclass(frozen=True)
class Choice:
    """A configuration as its `--set` arguments, and the reason for choosing it."""

    sets: tuple[str, ...]
    note: str


W1118 = Code(
    "W1118",
    "no configuration fits",
    cause="With `--plan`, every configuration that was compiled needs more memory than the accelerator has.",
    cure="Use a larger `--accelerator`. `recipe plan` shows what takes the memory.",
)


def plan(ported: Ported, asked: Asked, search: Callable[[Program], Search]) -> None:
    """Put the best configuration into a port's recipe.

    Args:
        search: searches the configurations of a program whose recipe is in a file.

    Raises:
        ArtifactError: nothing can be compiled.
    """
    assert ported.ledger is not None
    folder = asked.place.parent
    # The search reads the recipe again, and paths in it are relative to its folder, so write it there.
    with (
        in_place(ported.ledger.files, folder, asked.force),
        NamedTemporaryFile("w", suffix=".yaml", prefix=".port-", dir=folder, encoding="utf-8") as file,
    ):
        file.write(ported.text)
        file.flush()
        program = lower(load(Path(file.name)), planning=True).program
        if program is None:
            return
        searched = search(program)
    choice = best(searched.points)
    if choice is None:
        message = "no compiled configuration fits the memory; the mesh is the choice of the checks"
        help = "ask for a larger --accelerator; `recipe plan` shows what takes the memory"
        ported.ledger.diagnostics.append(Diagnostic(W1118, message, "mesh.axes", help))
    else:
        _take(ported.ledger, choice)
    finish(ported, asked)


def best(points: Iterable[Point]) -> Choice | None:
    """Return the fastest configuration that fits, or None if none fits."""
    compiled = [point for point in points if point.seconds_per_token is not None]
    if not compiled:
        return None
    fastest = min(compiled, key=lambda point: point.seconds_per_token or 0.0)
    count = plural(len(compiled), "compiled configuration")
    return Choice(fastest.sets, f"the fastest of {count}, by estimate")


def _take(ledger: Ledger, choice: Choice) -> None:
    """Apply the choice to the ledger. The mesh's comment always gives the reason."""
    changes = {"mesh.axes": ledger.value("mesh.axes")}
    for argument in choice.sets:
        path, _, text = argument.partition("=")
        changes[path] = parse_yaml(Tree(text, "--plan"))
    for path, value in changes.items():
        if path == MICRO:
            ledger.amend(MICRO, Verdict.EXACT, f"{value} instead of {ledger.value(MICRO)}: {choice.note}")
        ledger.set(path, value, choice.note)
