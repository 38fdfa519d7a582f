"""The backends that a recipe can be built for besides Tunix: what each emits, refuses and needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from recipec.compiler.emitters.refused import check_torchax, check_trl
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic

if TYPE_CHECKING:
    from recipec.compiler.lowering.pins import Pins
    from recipec.compiler.lowering.program import Program

Files = dict[str, str]
"""Texts by path in the artifact."""


class Backend(str, Enum):  # noqa: UP042 (as compiler.cli.base.Format)
    """The software that trains a recipe: Tunix in train.py (in every artifact), TRL on GPUs, or TorchAX on
    TPUs."""

    TUNIX = "tunix"
    TRL = "trl"
    TORCHAX = "torchax"


@dataclass(frozen=True)
class Support:
    """What the compiler knows about a backend.

    Attributes:
        emit: returns its files of an artifact.
        check: yields what it cannot do of a recipe, and what it does differently from train.py.
        packages: returns its tested environment.
    """

    emit: Callable[[Program], Files]
    check: Callable[[Program], Iterator[Diagnostic]]
    packages: Callable[[Program], Pins]


def support(backend: Backend) -> Support | None:
    """Return the support of a backend; None for Tunix, which every artifact has."""
    if backend is Backend.TRL:
        from recipec.compiler.emitters import baseline
        from recipec.compiler.lowering import pins

        return Support(baseline.emit_baseline, check_trl, pins.trl)
    if backend is Backend.TORCHAX:
        from recipec.compiler.emitters import torchax

        return Support(torchax.emit_torchax, check_torchax, torchax.packages)
    return None


E0945 = Code(
    "E0945",
    "model that only TorchAX trains",
    cause="No family describes the model, so Tunix does not have it. Only transformers' own model can "
    "be trained.",
    cure="Use `recipe build --backend torchax`, and `--backend torchax` with other commands.",
)


def diagnosed(program: Program, backends: Sequence[Backend]) -> list[Diagnostic]:
    """Return what the backends cannot do of a recipe, or do differently; without positions in its file."""
    if not program.family.tunix and set(backends) != {Backend.TORCHAX}:
        message = f"no family describes `{program.recipe.model.id}`: only the TorchAX backend can train it"
        return [
            Diagnostic(
                E0945,
                message,
                "model.id",
                "recipe build --backend torchax, without other backends; also with other commands",
            )
        ]
    supported = filter(None, map(support, backends))
    return [found for how in supported for found in how.check(program)]


def files(program: Program, backends: Sequence[Backend]) -> Files:
    """Return the backends' files of an artifact. For a model that Tunix does not have, they replace Tunix's
    files."""
    if not program.family.tunix:
        from recipec.compiler.emitters import torchax

        return torchax.emit_alone(program)
    return {
        path: text
        for backend in backends
        if (how := support(backend))
        for path, text in how.emit(program).items()
    }


def packages(program: Program, backends: Sequence[Backend]) -> Mapping[str, Mapping[str, str]]:
    """Return the versions of each backend's packages, by the backend's name; the artifact itself lists
    Tunix's."""
    return {backend.value: how.packages(program).all for backend in backends if (how := support(backend))}


def others(names: Sequence[str]) -> tuple[Backend, ...]:
    """Return the backends besides Tunix among these names, in the order above, ignoring unknown names."""
    return tuple(backend for backend in Backend if backend.value in names and backend is not Backend.TUNIX)
