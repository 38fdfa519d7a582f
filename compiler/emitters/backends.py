"""The backends that a recipe can be built for besides Tunix: what each emits, refuses and needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING

from recipec.runtime.model.families.base import text_config
from recipec.runtime.model.families.description import DecoderArchitecture
from recipec.runtime.training.objectives import keeps_copy
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

        return Support(baseline.emit_baseline, baseline.check, pins.trl)
    if backend is Backend.TORCHAX:
        from recipec.compiler.emitters import torchax

        return Support(torchax.emit_torchax, torchax.check, torchax.packages)
    return None


def diagnosed(program: Program, backends: Sequence[Backend]) -> list[Diagnostic]:
    """Return what the backends cannot do of a recipe, or do differently; without positions in its file."""
    if not program.family.tunix and set(backends) != {Backend.TORCHAX}:
        from recipec.spec.diagnostics import Diagnostic

        message = f"no family describes `{program.recipe.model.id}`: only the TorchAX backend can train it"
        return [
            Diagnostic(
                "E0945",
                message,
                "model.id",
                "recipe build --backend torchax, without other backends; also with other commands",
            )
        ]
    return [found for backend in backends for found in _of(backend, program)]


def check_vocabulary(program: Program, backend: str) -> Iterator[Diagnostic]:
    """Refuse a recipe that adds rows to the embedding."""
    if program.recipe.model.vocab_size is not None:
        yield Diagnostic(
            "E0971",
            f"--backend {backend} adds no rows to the embedding",
            "model.vocab_size",
            f"remove the line, or build without --backend {backend}",
        )


def check_reference(program: Program, backend: str) -> Iterator[Diagnostic]:
    """Refuse a recipe whose objective compares with the adapter that it starts from."""
    lora = program.lora
    if lora is not None and lora.start_from is not None and keeps_copy(program.recipe.train, lora):
        yield Diagnostic(
            "E0970",
            f"--backend {backend} compares with the base, and {program.recipe.train.objective} here with the "
            "adapter that it starts from",
            "lora.start_from",
            f"remove the line, or build without --backend {backend}",
        )


UNSUPPORTED = {
    Backend.TORCHAX: ("E0955", ("train.early_stopping", "train.samples", "checkpoint.keep_best")),
    Backend.TRL: ("E0956", ("train.samples", "checkpoint.keep_best")),
}
"""Per backend, a diagnostic code and the settings that need evaluations which the backend does not do."""


def _of(backend: Backend, program: Program) -> Iterator[Diagnostic]:
    how = support(backend)
    if how is None:
        return
    yield from how.check(program)
    yield from check_reference(program, backend.value)
    yield from check_vocabulary(program, backend.value)
    code, paths = UNSUPPORTED[backend]
    for path in (path for path in paths if attrgetter(path)(program.recipe)):
        yield Diagnostic(
            code,
            f"--backend {backend.value} has no {path.rpartition('.')[2]}",
            path,
            f"remove the line, or build without --backend {backend.value}",
            at_key=True,
        )
    yield from _wrong_state(backend, program)
    if program.recipe.data.packing and (why := _goes_on(program)):
        yield Diagnostic(
            "E0937",
            f"--backend {backend.value}: transformers' {why}",
            "data.packing",
            f"packing: false, or build without --backend {backend.value}",
        )


def _wrong_state(backend: Backend, program: Program) -> Iterator[Diagnostic]:
    """Refuse rows of more than one chunk, if transformers' torch code carries the state wrongly."""
    if not (chunk := program.family.chunk_in_torch):
        return
    chunk = text_config(program.config).get("chunk_size") or chunk
    if program.architecture.stateful and program.recipe.data.max_length > chunk:
        yield Diagnostic(
            "E0957",
            f"--backend {backend.value}: transformers' torch code of {program.family.title} carries the "
            f"state of a Mamba mixer wrongly beyond {chunk} tokens",
            "data.max_length",
            f"max_length: {chunk}, or build without --backend {backend.value}",
        )


def _goes_on(program: Program) -> str:
    """Return the part of a model whose state transformers carries across samples of a row, or ""."""
    a, length = program.architecture, program.recipe.data.max_length
    if a.stateful:
        kinds = {"delta": "gated delta nets", "conv": "short convolutions"}
        what = next((kinds[one] for one in kinds if getattr(a, one, None)), "Mamba mixers")
        return f"{what} in torch ignore the borders between samples of a row"
    if not isinstance(a, DecoderArchitecture):
        return ""
    if a.chunk is not None and a.chunk < length:
        return f"chunks of {a.chunk:,} tokens start at a row's first token, not at each sample's"
    if a.query_growth is not None and a.query_growth.unturned and a.query_growth.length <= length:
        return "query scaling follows the position in the row, not in the sample"
    return ""


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
