"""Values that cannot be read: Jinja, the environment, tokens. OmegaConf's ${key} is resolved."""

from __future__ import annotations

import re
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from compiler.port.source import MISSING, Source, join
from compiler.port.yaml_tree import JINJA_HELP

_JINJA = re.compile(r"\{\{|\{%")
_BRACES = re.compile(r"\$\{([^{}]*)\}")
_VARIABLE = re.compile(r"\$\{[^{}]*\}?|(?<![\w$\\])\$[A-Z][A-Z0-9_]+")
_TEMPLATES = re.compile(r"template|jinja|format|prompt|regex|pattern", re.IGNORECASE)
"""Keys whose values may be Jinja, or hold `$`, and are meant literally."""

SECRET_HELP = "write what the key is for in its place; revoke the token if the file was shared"

MOST_STEPS = 100
"""References that one value is followed through."""


@dataclass(frozen=True)
class Refusal:
    """A value that cannot be read.

    Attributes:
        key: its path.
        value: as it stands in the file.
    """

    key: str
    value: Any
    code: str
    message: str
    help: str


@dataclass(frozen=True)
class Settled:
    """A file without references.

    Attributes:
        refusals: the values that were taken out of it.
        used: keys that others refer to.
    """

    source: Source
    refusals: list[Refusal]
    used: frozenset[str]


def settle(source: Source, interpolates: bool, kept: Collection[str] = ()) -> Settled:
    """Resolves the references of a file, or takes out the values that have them, and those with tokens.

    Args:
        interpolates: whether the tool reads `${key}` as the value of another key of the file, as OmegaConf.
        kept: paths of values that stay in the file as they stand.
    """
    settler = _Settler(source, interpolates, kept)
    data = settler.node(source.data, "")
    return Settled(replace(source, data=data), settler.refusals, frozenset(settler.used))


class _Unreadable(Exception):
    def __init__(self, code: str, message: str, help: str) -> None:
        super().__init__(message)
        self.code = code
        self.help = help


@dataclass
class _Settler:
    source: Source
    interpolates: bool
    kept: Collection[str] = ()
    refusals: list[Refusal] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def node(self, node: Any, path: str) -> Any:
        """The value without references; MISSING when it is refused."""
        if isinstance(node, dict):
            made = {key: self.node(value, join(path, key)) for key, value in node.items()}
            return {key: value for key, value in made.items() if value is not MISSING}
        if isinstance(node, list):
            kept = [self.node(item, f"{path}[{index}]") for index, item in enumerate(node)]
            return [item for item in kept if item is not MISSING]
        if not isinstance(node, str):
            return node
        try:
            return self.text(node, path)
        except _Unreadable as error:
            self.refusals.append(Refusal(path, node, error.code, str(error), error.help))
            return node if path in self.kept else MISSING

    def text(self, text: str, path: str) -> Any:
        if found := self.source.secrets.get(path):
            raise _Unreadable("E0702", f"`{path}` looks like {found}", SECRET_HELP)
        if _TEMPLATES.search(path):
            return text
        if sign := _JINJA.search(text):
            message = f"`{path}` is a Jinja template: what `{sign[0]}` starts is filled in elsewhere"
            raise _Unreadable("E1106", message, JINJA_HELP)
        value = self.resolved(text, path, 0) if self.interpolates else text
        if isinstance(value, str) and (variable := _VARIABLE.search(value)):
            raise _environment(path, variable[0])
        return value

    def resolved(self, text: str, path: str, steps: int) -> Any:
        """A text with its `${key}` filled in; a text that is one reference is the value itself."""
        if steps > MOST_STEPS:
            raise _Unreadable(
                "E1108", f"the references of `{path}` go round in a circle", "write the value out"
            )
        whole = _BRACES.fullmatch(text)
        if whole:
            return deepcopy(self.followed(whole[1], path, steps))
        for match in _BRACES.finditer(text):
            value = self.followed(match[1], path, steps)
            if isinstance(value, dict | list):
                message = f"`{match[0]}` in `{path}` stands for a section, and a text is made of it"
                raise _Unreadable("E1108", message, "write the value out")
            text = text.replace(match[0], _shown(value), 1)
        return text

    def followed(self, name: str, path: str, steps: int) -> Any:
        """What `${name}` in the value at a path stands for."""
        if ":" in name:
            raise _environment(path, f"${{{name}}}")
        target = _absolute(name.strip(), path)
        found = self.source.get(target)
        if found is MISSING:
            message = f"`${{{name}}}` in `{path}` names a key that the file has not"
            raise _Unreadable("E1108", message, "write the value out")
        self.used.add(target)
        return self.inner(found, target, steps + 1)

    def inner(self, node: Any, path: str, steps: int) -> Any:
        """A value that is referred to, with the references within it."""
        if isinstance(node, dict):
            return {key: self.inner(value, join(path, key), steps) for key, value in node.items()}
        if isinstance(node, list):
            return [self.inner(item, f"{path}[{index}]", steps) for index, item in enumerate(node)]
        return self.resolved(node, path, steps) if isinstance(node, str) else node


def _absolute(name: str, path: str) -> str:
    """OmegaConf's relative names start with a dot: `.b` is a sibling, `..b` a sibling of the section."""
    ups = len(name) - len(name.lstrip("."))
    if not ups:
        return name
    sections = path.split(".")[: -ups or None]
    return ".".join([*sections, name.lstrip(".")])


def _shown(value: Any) -> str:
    """A value within a text, as OmegaConf writes it."""
    return str(value)


def _environment(path: str, reference: str) -> _Unreadable:
    return _Unreadable(
        "E1107",
        f"`{path}` takes `{reference}` from the environment, which is not known here",
        f"write the value in its place: {path.rpartition('.')[2]}: ...",
    )
