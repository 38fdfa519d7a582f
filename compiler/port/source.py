"""A ported file as a tree whose every key and value knows its place.

The files are other tools' YAML and JSON, read as those tools read them: YAML 1.1 as PyYAML has it, with
anchors, aliases and merge keys. (Recipes themselves are read by spec.document, which refuses those.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipec.spec.diagnostics import Span


class _Missing:
    """What a key has that does not stand in the file; null is a value."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()


@dataclass(frozen=True)
class Script:
    """What a Python script says beside its keys.

    Attributes:
        objective: a key of OBJECTIVES.
        tool: whose defaults hold, "Unsloth".
        defaults: where they are not those of TRL's command line.
        rows: what its functions make of the rows, as meaning.scripts has it; None for rows as they are.
    """

    objective: str
    tool: str
    defaults: Mapping[str, Any]
    rows: Any = None


@dataclass(frozen=True)
class Source:
    """One file.

    Attributes:
        path: as given on the command line.
        file: the name to show.
        data: its content: dicts, lists and values.
        spans: of each value, by its key's path ("datasets[0].path").
        keys: of each key itself, by the same path.
        older: of the keys that the file has by an older name, that name.
        secrets: by path, the values that look like tokens, and what they look like; stars stand for them.
        unknown: by path, the values that are not known before a script runs, and what they depend on.
        script: of a Python script, None for other files.
    """

    path: Path
    file: str
    data: Any
    spans: Mapping[str, Span] = field(default_factory=dict)
    keys: Mapping[str, Span] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    script: Script | None = None

    def get(self, key: str, default: Any = MISSING) -> Any:
        """The value at a path, "datasets[0].path"; `default` where nothing stands there."""
        return _find(self.data, key, default)

    def has(self, key: str) -> bool:
        """Whether the key stands in the file, be it with null."""
        return self.get(key) is not MISSING

    def span(self, key: str) -> Span | None:
        """The place of a value; of a null that was left empty, its key's."""
        return self.spans.get(key) or self.keys.get(key)

    def place(self, key: str) -> Span:
        """The place of a value; of one that does not stand in the file, that of the section it belongs to."""
        above = key
        while above:
            span = self.keys.get(above) if above != key else self.span(key)
            if span is not None:
                return span
            above = above[: max(above.rfind("."), above.rfind("["), 0)]
        return self.top()

    def top(self) -> Span:
        """The file's first key, or its first line."""
        return next(iter(self.keys.values()), None) or Span(self.file, 1, 1, "")

    def leaves(self) -> list[str]:
        """Paths of all values, in the order of the file.

        A list of plain values is one; a list of mappings, or of lists, is gone into; an empty mapping is one.
        """
        return list(_leaves(self.data, ""))


@dataclass(frozen=True)
class Sources:
    """The files of one port, by the role that their content gives them.

    Attributes:
        main: the recipe proper.
        others: by role: "accelerate", "deepspeed", "dataset_info", "adapter_config".
    """

    main: Source
    others: Mapping[str, Source] = field(default_factory=dict)

    def all(self) -> list[Source]:
        """The main file first."""
        return [self.main, *self.others.values()]


def parts(key: str) -> list[str | int]:
    """ "a.b[0].c" as ["a", "b", 0, "c"]."""
    out: list[str | int] = []
    for piece in key.split("."):
        name, *indices = piece.split("[")
        if name:
            out.append(name)
        out += [int(index.rstrip("]")) for index in indices]
    return out


def _find(node: Any, key: str, default: Any) -> Any:
    """What stands at a path below a node; a key may itself have dots and brackets."""
    if not key:
        return node
    if isinstance(node, list) and (index := _INDEX.match(key)) and int(index[1]) < len(node):
        return _find(node[int(index[1])], key[index.end() :], default)
    if isinstance(node, dict):
        if key in node:
            return node[key]
        for name, value in node.items():
            if key.startswith((f"{name}.", f"{name}[")):
                found = _find(value, key[len(name) :].removeprefix("."), MISSING)
                if found is not MISSING:
                    return found
    return default


_INDEX = re.compile(r"\[(\d+)\]\.?")


def _leaves(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, join(path, key))
    elif isinstance(node, list) and any(isinstance(item, dict | list) for item in node):
        for index, item in enumerate(node):
            yield from _leaves(item, f"{path}[{index}]")
    elif path:
        yield path


def join(path: str, key: str) -> str:
    """The path of a key below a path, "" for the root."""
    return f"{path}.{key}" if path else key
