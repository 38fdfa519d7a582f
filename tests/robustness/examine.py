"""Invariants of any recipe: a program or diagnostics with places, reproducible, with Python that compiles."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from recipec.compiler.checks.backends import diagnosed
from recipec.compiler.emitters.emit import emit
from recipec.compiler.explain.explain import explain
from recipec.compiler.lower import Lowered, lower
from recipec.compiler.lowering.backend import Backend, others
from recipec.compiler.pages.text import write
from recipec.spec.diagnostics import Diagnostic, has_errors, render_json, render_text
from recipec.spec.load import Loaded, load
from recipec.spec.yaml_document import LINE_BREAK


class Case(NamedTuple):
    """A recipe's file, the file that it may extend, and `--set` arguments."""

    recipe: bytes
    base: bytes | None = None
    sets: tuple[str, ...] = ()


def examine(folder: Path, case: Case) -> frozenset[str]:
    """Load, lower and render a recipe in a folder, and check the result.

    Returns:
        The codes of the diagnostics, and "built" if there is a program.

    Raises:
        AssertionError: an invariant does not hold.
    """
    (folder / "recipe.yaml").write_bytes(case.recipe)
    if case.base is None:
        (folder / "base.yaml").unlink(missing_ok=True)
    else:
        (folder / "base.yaml").write_bytes(case.base)
    _loaded, lowered = both = _read(folder, case.sets)
    again = _read(folder, case.sets)
    assert render_json(lowered.diagnostics) == render_json(again[1].diagnostics), "not the same twice"
    _placed(lowered.diagnostics, folder)
    _showable(lowered.diagnostics)
    built = lowered.program is not None
    assert built != has_errors(lowered.diagnostics), "neither a program nor an error"
    if built:
        _emitted(*both)
        assert _files(again[1]) == _files(lowered), "not the same twice"
    return frozenset([*(d.code for d in lowered.diagnostics), *(["built"] if built else [])])


def _read(folder: Path, sets: tuple[str, ...]) -> tuple[Loaded, Lowered]:
    loaded = load(folder / "recipe.yaml", sets)
    return loaded, lower(loaded)


def _placed(diagnostics: list[Diagnostic], folder: Path) -> None:
    """Check that every error has a valid place and a help."""
    for found in diagnostics:
        span = found.span
        assert found.help or found.severity != "error", f"{found.code} has no help: {found.message}"
        if span is None:
            assert found.severity != "error", f"{found.code} has no place: {found.message}"
            continue
        assert span.line >= 1 and span.column >= 1 and span.length >= 0, found
        if span.file == "--set":
            continue
        file = Path(span.file)
        text = (file if file.is_absolute() else Path.cwd() / file).read_bytes().decode("utf-8", "replace")
        lines = LINE_BREAK.split(text)
        assert span.line <= len(lines), found
        assert span.column <= len(lines[span.line - 1]) + 1, found


def _showable(diagnostics: list[Diagnostic]) -> None:
    """Check that diagnostics can be printed, and cannot control a terminal."""
    shown = render_text(diagnostics)
    shown.encode("utf-8")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown), ascii(shown)
    json.dumps(render_json(diagnostics))


def _emitted(loaded: Loaded, lowered: Lowered) -> None:
    """Check that every emitted file can be read by its tool."""
    program = lowered.program
    assert program is not None
    write(explain(program, loaded, None)).encode("utf-8", "surrogatepass")
    backends = [
        backend.value for backend in Backend if not has_errors(diagnosed(program, others([backend.value])))
    ]
    for path, content in emit(program, others(backends)).items():
        text = content.decode("utf-8")
        if path.endswith(".py"):
            compile(text, path, "exec")
        elif path.endswith(".json"):
            json.loads(text)
    assert loaded.recipe is not None
    rebuilt = load(loaded.path.parent / "rebuilt.yaml", (), program.text)
    assert rebuilt.recipe == loaded.recipe.model_copy(update={"extends": None}), program.text


def _files(lowered: Lowered) -> Any:
    return emit(lowered.program) if lowered.program is not None else None
