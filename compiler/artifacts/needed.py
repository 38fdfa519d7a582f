"""Which files of runtime/ an artifact needs: those that its own files call, and what these import in turn.

What a module imports at its top it needs always. What it imports within a function it needs too, unless that
belongs to a part of OPTIONAL which the recipe does not ask for.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from recipec import runtime
from recipec.compiler.lowering.sources import COMPRESSIBLE
from recipec.runtime.model.families import ANY, FAMILIES
from recipec.runtime.training.objectives import OBJECTIVES

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program

ROOT = "runtime"
CALLED = re.compile(r"-m (runtime(?:\.\w+)+)|\bruntime/((?:[\w-]+/)*[\w-]+\.(?:py|sh))\b")
"""How a shell script, a manifest or a page calls a module or a script of runtime/."""

Asked = Callable[["Program"], Any]


def _families() -> Iterator[tuple[str, Asked]]:
    for name in (*FAMILIES, ANY):
        yield f"runtime.model.families.{name}", functools.partial(_is_of, name)


def _is_of(family: str, program: Program) -> bool:
    return program.family.name == family


def _other_files(program: Program) -> bool:
    """Whether data lies in other files than lines of text: in columns, in folders, or on the hub."""
    data = program.recipe.data
    texts = tuple(f"{ending}{packed}" for ending in COMPRESSIBLE for packed in ("", ".gz", ".zst"))
    return not all(source.path.lower().endswith(texts) for source in (*data.train, *data.eval))


def _has_pairs(program: Program) -> bool:
    return OBJECTIVES[program.recipe.train.objective].pairs


def _has_experts(program: Program) -> bool:
    return program.architecture.routing[0] > 0


def _by_kernel(program: Program) -> bool:
    return program.recipe.model.attention == "splash"


def _on_hosts(program: Program) -> bool:
    return program.accelerator.hosts > 1


OPTIONAL: Mapping[str, Asked] = {
    **dict(_families()),
    "runtime.model.attention": _by_kernel,
    "runtime.model.attention_blocks": _by_kernel,
    "runtime.backends.torchax.logits": lambda program: not program.family.tunix,
    "runtime.data.column_files": _other_files,
    "runtime.data.huggingface": _other_files,
    "runtime.data.transform": lambda program: program.recipe.data.transform,
    "runtime.model.delta": lambda program: getattr(program.architecture, "delta", None),
    "runtime.metrics.expert_shares": _has_experts,
    "runtime.model.balance": _has_experts,
    "runtime.model.experts": _has_experts,
    "runtime.model.mixture": lambda program: getattr(program.architecture, "experts", None),
    "runtime.model.gemma4_experts": lambda program: getattr(program.architecture, "expert_size", 0),
    "runtime.weights.mxfp4": lambda program: program.family.quantized,
    "runtime.merging.quantized": lambda program: program.recipe.merge.quantization,
    "runtime.hosts.group": _on_hosts,
    "runtime.hosts.local": _on_hosts,
    "runtime.checkpoints.full": lambda program: program.lora is None,
    "runtime.peft.exporting": lambda program: program.lora,
    "runtime.peft.importing": lambda program: program.lora,
    "runtime.checkpoints.local_saving": lambda program: program.recipe.checkpoint.local,
    "runtime.data.preferences": _has_pairs,
    "runtime.training.preference": _has_pairs,
    "runtime.model.quantize": lambda program: program.lora and program.lora.quantize,
    "runtime.model.eight_bits": lambda program: program.lora and program.lora.products,
    "runtime.metrics.remote": lambda program: "://" in program.recipe.checkpoint.directory,
    "runtime.metrics.wandb_log": lambda program: program.recipe.train.log.wandb_project,
}
"""Modules that an artifact has where its recipe asks for them, by name: what says whether a recipe does."""

STARTED = ("runtime.data.worker",)
"""Modules that others start in processes of their own, without importing them."""


@dataclass(frozen=True)
class Imports:
    """The names that a module imports, each by its full name, whether of a module or of what is in one."""

    top: frozenset[str]
    within: frozenset[str]


@functools.cache
def runtime_files() -> dict[str, bytes]:
    """The modules and scripts of runtime/ by path relative to it."""
    folder = Path(runtime.__file__).parent
    return {path: (folder / path).read_bytes() for path in modules(folder)}


def modules(folder: Path) -> list[str]:
    """Python modules and shell scripts below a folder, relative to it, sorted."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        within = PurePosixPath(Path(place).relative_to(folder).as_posix())
        found += [str(within / name) for name in names if name.endswith((".py", ".sh"))]
    return sorted(found)


def needed(program: Program, files: Mapping[str, bytes], there: Mapping[str, bytes]) -> list[str]:
    """The files of runtime/ that an artifact needs, by path relative to it, sorted.

    Args:
        files: the artifact's own.
        there: all files of runtime/, by path relative to it.
    """
    asked = [name for name, asks in OPTIONAL.items() if asks(program)]
    found: set[str] = set()
    waiting = [*STARTED, *asked, *_called(files)]
    passed_over = tuple(sorted(OPTIONAL.keys() - asked))
    while waiting:
        for path in _paths(waiting.pop(), there):
            if path not in found:
                found.add(path)
                waiting += _asks(path, there[path], passed_over)
    return sorted(found)


def _called(files: Mapping[str, bytes]) -> Iterator[str]:
    """What an artifact's own files call or import."""
    for path, content in files.items():
        if path.endswith(".py"):
            imports = imports_of(content, "")
            yield from imports.top | imports.within
        else:
            yield from _called_by(content)


def _called_by(content: bytes) -> Iterator[str]:
    for module, path in CALLED.findall(content.decode("utf-8", "replace")):
        yield module or path


def _asks(path: str, content: bytes, passed_over: Sequence[str]) -> Iterator[str]:
    """What a file of runtime/ imports or calls, but for parts that the recipe does not ask for."""
    if not path.endswith(".py"):
        yield from _called_by(content)
        return
    imports = imports_of(content, package_of(path))
    yield from imports.top
    yield from (name for name in imports.within if not f"{name}.".startswith(_inside(passed_over)))


def _inside(modules: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{module}." for module in modules)


def _paths(name: str, there: Mapping[str, bytes]) -> Iterator[str]:
    """The file of a module, or of the one that a name is in, with those of the packages around it."""
    if name in there:
        yield name
        return
    parts = name.split(".")
    if parts[0] != ROOT:
        return
    for count in range(len(parts) + 1):
        stem = "/".join(parts[1:count])
        for path in (f"{stem}.py", f"{stem}/__init__.py" if stem else "__init__.py"):
            if path in there:
                yield path


def package_of(path: str) -> str:
    """The package that relative imports of a file of runtime/ start from."""
    return ".".join((ROOT, *Path(path).parts[:-1]))


@functools.lru_cache(maxsize=1024)
def imports_of(content: bytes, package: str) -> Imports:
    """What a module imports of runtime/, but for what only types need. None of a file that is no Python."""
    top: set[str] = set()
    within: set[str] = set()
    try:
        waiting = [(ast.parse(content).body, top)]
    except (SyntaxError, ValueError):
        return Imports(frozenset(), frozenset())
    while waiting:
        body, names = waiting.pop()
        for statement in body:
            if isinstance(statement, ast.Import):
                names |= {alias.name for alias in statement.names}
            elif isinstance(statement, ast.ImportFrom):
                names |= {*_from(statement, package)}
            elif not _for_types(statement):
                inside = within if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) else names
                waiting += [(nested, inside) for nested in _bodies(statement)]
    ours = (frozenset(name for name in names if name.split(".")[0] == ROOT) for names in (top, within - top))
    return Imports(*ours)


def _from(statement: ast.ImportFrom, package: str) -> Iterator[str]:
    module = statement.module or ""
    if statement.level:
        above = package.split(".")
        module = ".".join([*above[: len(above) - statement.level + 1], *([module] if module else [])])
    yield module
    for alias in statement.names:
        yield f"{module}.{alias.name}"


def _for_types(statement: ast.stmt) -> bool:
    """Whether it is `if TYPE_CHECKING:`."""
    return (
        isinstance(statement, ast.If)
        and isinstance(statement.test, ast.Name)
        and statement.test.id == "TYPE_CHECKING"
    )


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The statements within a statement."""
    for field in ("body", "orelse", "finalbody"):
        yield getattr(statement, field, [])
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body
