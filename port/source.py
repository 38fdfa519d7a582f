"""A ported file as a tree in which every key and value has its place.

The files are YAML and JSON of other tools, and are read as those tools read them: YAML 1.1 as in PyYAML, with
anchors, aliases and merge keys. (spec.yaml_document reads recipes themselves, and refuses these.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipec.spec.diagnostics import Span


class _Missing:
    """The value of a key that is not in the file. It differs from null, which is a value."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()


@dataclass(frozen=True)
class Script:
    """What a Python script says in addition to its keys.

    Attributes:
        objective: a key of OBJECTIVES.
        tool: the tool whose defaults apply, "Unsloth".
        defaults: the defaults that differ from those of TRL's command line.
        rows: what the script's functions make of the rows, as in meaning.scripts; None if rows are unchanged.
        rewards: the reward functions, as in meaning.scripts; None if the trainer takes none.
        arguments: the arguments that only the script's own lines read, with what becomes of each.
        taken: whether the script reads the file of arguments that is given with it.
    """

    objective: str
    tool: str
    defaults: Mapping[str, Any]
    rows: Any = None
    rewards: Any = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    taken: bool = False


@dataclass(frozen=True)
class Source:
    """A ported file.

    Attributes:
        path: the path as given on the command line.
        file: the name for messages.
        data: the content: dicts, lists and plain values.
        spans: the place of each value, by the path of its key ("datasets[0].path").
        keys: the place of each key itself, by the same path.
        older: the older name in the file, by the current name of a renamed key.
        secrets: by path, the kind of each value that looks like a token; `data` has stars in its place.
        unknown: by path, values that only a run of the script can determine, and what they depend on.
        shell: by path, the values of a command line that contain a value which the shell does not have.
        script: the rest of a Python script, None for other files.
    """

    path: Path
    file: str
    data: Any
    spans: Mapping[str, Span] = field(default_factory=dict)
    keys: Mapping[str, Span] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    shell: Mapping[str, str] = field(default_factory=dict)
    script: Script | None = None

    def get(self, key: str, default: Any = MISSING) -> Any:
        """Return the value at a path ("datasets[0].path"), or `default` if nothing is there."""
        return _find(self.data, key, default)

    def has(self, key: str) -> bool:
        """Return whether the key is in the file, even with the value null."""
        return self.get(key) is not MISSING

    def span(self, key: str) -> Span | None:
        """Return the place of a value. An empty null has the place of its key."""
        return self.spans.get(key) or self.keys.get(key)

    def place(self, key: str) -> Span:
        """Return the place of a value. A value that is not in the file has the place of its section."""
        above = key
        while above:
            span = self.keys.get(above) if above != key else self.span(key)
            if span is not None:
                return span
            above = above[: max(above.rfind("."), above.rfind("["), 0)]
        return self.top()

    def top(self) -> Span:
        """Return the place of the file's first key, or its first line."""
        return next(iter(self.keys.values()), None) or Span(self.file, 1, 1, "")

    def leaves(self) -> list[str]:
        """Return the paths of all values, in the order of the file.

        A list of plain values counts as one value, and so does an empty mapping. The values in lists of
        mappings or of lists are listed one by one.
        """
        return list(_leaves(self.data, ""))


@dataclass(frozen=True)
class Sources:
    """The files of one port, by the role that their content gives them.

    Attributes:
        main: the tool's own config.
        others: by role: "accelerate", "deepspeed", "dataset_info", "adapter_config".
    """

    main: Source
    others: Mapping[str, Source] = field(default_factory=dict)

    def all(self) -> list[Source]:
        """Return all files, the main one first."""
        return [self.main, *self.others.values()]


def parts(key: str) -> list[str | int]:
    """Split a path: "a.b[0].c" gives ["a", "b", 0, "c"]."""
    out: list[str | int] = []
    for piece in key.split("."):
        name, *indices = piece.split("[")
        if name:
            out.append(name)
        out += [int(index.rstrip("]")) for index in indices]
    return out


def _find(node: Any, key: str, default: Any) -> Any:
    """Return the value at a path below a node. A key itself may contain dots and brackets."""
    if not key:
        return node
    if isinstance(node, list) and (index := _INDEX.match(key)) and int(index[1]) < len(node):
        return _find(node[int(index[1])], key[index.end() :], default)
    if isinstance(node, dict):
        if key in node:
            return node[key]
        if "." not in key and "[" not in key:
            return default
        for name, value in node.items():
            if key.startswith((f"{name}.", f"{name}[")):
                inner = _find(value, key[len(name) :].removeprefix("."), MISSING)
                if inner is not MISSING:
                    return inner
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
    """Return the path of a key below a path, which is "" for the root."""
    return f"{path}.{key}" if path else key
