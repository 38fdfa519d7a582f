"""The files and the packages of the backends that a recipe can be built for besides Tunix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from recipec.compiler.emitters import baseline, torchax
from recipec.compiler.lowering import pins
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.pins import Pins
from recipec.compiler.lowering.program import Program


@dataclass(frozen=True)
class Support:
    """What a backend adds to an artifact.

    Attributes:
        emit: returns its files, by their paths in the artifact.
        packages: returns its tested environment.
    """

    emit: Callable[[Program], dict[str, str]]
    packages: Callable[[Program], Pins]


SUPPORT = {
    Backend.TRL: Support(baseline.emit_baseline, pins.trl),
    Backend.TORCHAX: Support(torchax.emit_torchax, torchax.packages),
}
"""The backends besides Tunix, which every artifact has."""


def files(program: Program, backends: Sequence[Backend]) -> dict[str, str]:
    """Return the backends' files of an artifact, by their paths. For a model that Tunix does not have, they
    replace Tunix's files."""
    if not program.family.tunix:
        return torchax.emit_alone(program)
    supported = [SUPPORT[backend] for backend in backends if backend in SUPPORT]
    return {path: text for backend in supported for path, text in backend.emit(program).items()}


def packages(program: Program, backends: Sequence[Backend]) -> Mapping[str, Mapping[str, str]]:
    """Return the versions of each backend's packages, by the backend's name; the artifact itself lists
    Tunix's."""
    return {
        backend.value: SUPPORT[backend].packages(program).all for backend in backends if backend in SUPPORT
    }
