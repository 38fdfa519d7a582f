"""What a shell completes: `recipe --install-completion` puts it there, for bash, zsh, fish and PowerShell.

Each function takes what was typed so far. Where one has nothing to offer, the shell completes files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Words = list[str]
Described = list[tuple[str, str]]
"""Words with what zsh, fish and PowerShell say of each."""


def recipes(incomplete: str) -> Words:
    """Recipes beside what was typed, and one folder further down."""
    return [name for name in _near(incomplete) if name.endswith((".yaml", ".yml"))]


def accelerators(incomplete: str) -> Described:
    """Machines that a recipe can name."""
    from recipec.compiler.lowering.hardware import from_name, known_names

    names = [name for name in known_names() if name.startswith(incomplete)]
    return [(name, from_name(name).describe().partition(": ")[2]) for name in names]


def servers(incomplete: str) -> Described:
    """The same for `recipe new --serve`."""
    tpus = [(name, said) for name, said in accelerators(incomplete) if not name.startswith("cpu")]
    return [*tpus, ("none", "no server")] if "none".startswith(incomplete) else tpus


def models(incomplete: str) -> Words:
    """Ids of the catalog that can be trained."""
    from recipec.compiler.lowering.catalog import entries

    return [name for name in entries() if name.startswith(incomplete)]


def keys(incomplete: str) -> Described:
    """Sections and keys of the language, by their dotted paths."""
    return [(path, said) for path, said, _ in _fields() if path.startswith(incomplete)]


def sets(incomplete: str) -> Described:
    """Keys for --set, and after a `=` the values of those that have a few."""
    path, given, start = incomplete.partition("=")
    if not given:
        return [(f"{key}=", said) for key, said, section in _fields() if key.startswith(path) and not section]
    return [(f"{path}={value}", "") for value in _values(path) if value.startswith(start)]


def artifacts(incomplete: str, ctx: Any = None) -> Words:
    """Names of the artifacts in `generated`, or in the folder that --from names."""
    from recipec.compiler.artifacts.artifact import artifacts_in

    folder = (ctx.params.get("folder") if ctx is not None else None) or Path("generated")
    with suppress(OSError):
        return [name for name in artifacts_in(Path(folder)) if name.startswith(incomplete)]
    return []


def artifact_folders(incomplete: str) -> Words:
    """Folders of artifacts, where they usually lie and beside what was typed."""
    from recipec.compiler.artifacts.artifact import LOCK

    found = {f"generated/{name}" for name in artifacts("")}
    found |= {name for name in _near(incomplete) if Path(name, LOCK).is_file()}
    return sorted(name for name in found if name.startswith(incomplete))


def trained_folders(incomplete: str) -> Words:
    """Folders of trained models and of artifacts beside what was typed."""
    marks = ("config.json", "adapter_config.json")
    found = {name for name in _near(incomplete) if any(Path(name, mark).is_file() for mark in marks)}
    return sorted(found.union(artifact_folders(incomplete)))


def _near(incomplete: str) -> Iterator[str]:
    """Files and folders that begin as typed, with what is in those folders: no more than two levels."""
    typed, start = (incomplete.rpartition("/")[0::2]) if "/" in incomplete else ("", incomplete)
    folder = f"{typed}/" if typed or incomplete.startswith("/") else ""
    for entry in _entries(Path(folder or ".")):
        if not entry.name.startswith(start) or (entry.name.startswith(".") and not start):
            continue
        yield f"{folder}{entry.name}"
        if entry.is_dir():
            inside = (inner.name for inner in _entries(entry) if not inner.name.startswith("."))
            yield from (f"{folder}{entry.name}/{name}" for name in inside)


def _entries(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(folder.iterdir())
    return []


def _fields() -> Iterator[tuple[str, str, bool]]:
    """Paths of the language with the first sentence of what each means, and whether it is a section."""
    from recipec.spec.language import Recipe

    yield from _of_section(Recipe, "")


def _of_section(kind: Any, before: str) -> Iterator[tuple[str, str, bool]]:
    for name, field in kind.model_fields.items():
        section = _section(field.annotation)
        said = (field.description or "").partition(". ")[0].rstrip(".")
        yield f"{before}{name}", said, section is not None
        if section is not None:
            yield from _of_section(section, f"{before}{name}.")


def _section(annotation: Any) -> Any:
    """The section that a field holds, None for a plain value or a list."""
    from recipec.spec.language.base import Section

    for kind in (annotation, *getattr(annotation, "__args__", ())):
        listed = getattr(annotation, "__origin__", None) is list
        if isinstance(kind, type) and issubclass(kind, Section) and not listed:
            return kind
    return None


def _values(path: str) -> Words:
    """What a key can be, where that is one of a few words."""
    from recipec.spec.schema import json_schema

    if path in ("mesh.accelerator", "serve.accelerator"):
        return [name for name, _ in accelerators("")]
    if path == "model.id":
        return models("")
    whole = json_schema()
    node: Any = whole
    for name in path.split("."):
        node = _resolved(node.get("properties", {}).get(name, {}), whole)
    return [*map(str, _choices(node))]


def _resolved(node: Any, whole: Any) -> Any:
    """A part of the schema with its reference, or that of its first alternative, followed."""
    references = [part["$ref"] for part in (node, *node.get("anyOf", ())) if "$ref" in part]
    return whole["$defs"][references[0].rpartition("/")[2]] if references else node


def _choices(node: Any) -> Iterator[Any]:
    if node.get("type") == "boolean":
        yield from ("true", "false")
    yield from node.get("enum", ())
    if "const" in node:
        yield "null" if node["const"] is None else node["const"]
    if node.get("type") == "null":
        yield "null"
    for part in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _choices(part)
