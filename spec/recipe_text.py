"""Emit the recipe.yaml of an artifact: the recipe as its user wrote it.

A recipe that is one file is copied unchanged, with its comments. A recipe that uses `extends` or `--set` is
written out again, without the defaults. The first line of recipe.yaml names the schema next to the artifacts,
instead of the schema that the user's file names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from recipec.spec import core_schema, tree
from recipec.spec.load import Loaded
from recipec.spec.schema import modeline

HEAD = modeline("../recipe.schema.json")
"""The first line, from which editors find the schema."""

LINE = 100
"""The width in columns up to which lists and mappings of plain values stay on one line."""

_MODELINE = re.compile(r"^#[ \t]*yaml-language-server[ \t]*:.*\n", re.MULTILINE)
_BARE = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*( [A-Za-z0-9_./-]+)*")
_OTHER_YAML = frozenset({"y", "n", "yes", "no", "on", "off"})
"""Texts that YAML 1.1 readers take for a truth value."""


def recipe_text(loaded: Loaded) -> str:
    """Return the text of recipe.yaml."""
    root = loaded.sources.root
    if root is None:
        return ""
    extends = root.entries.get("extends")
    if extends is None and all(node.place.kind == "file" for _, _, node in tree.walk(root)):
        text = loaded.path.read_bytes().decode("utf-8") if loaded.text is None else loaded.text
        text = text.replace("\r\n", "\n")
        text = text if text.endswith("\n") else f"{text}\n"
        return f"{HEAD}\n{_own_head(text)}"
    written = {key: value for key, value in loaded.raw.items() if key != "extends"}
    return f"{HEAD}\n# Made by recipec from a recipe with `extends` or `--set`.\n{to_yaml(written)}"


def _own_head(text: str) -> str:
    """Remove a modeline above the first key. A similar line further down belongs to the user and stays."""
    first = re.search(r"^[^#\s]", text, re.MULTILINE)
    end = first.start() if first else len(text)
    return _MODELINE.sub("", text[:end]) + text[end:]


def to_yaml(values: dict[str, Any]) -> str:
    """Write a mapping as block YAML, in its order; short values stay on one line."""
    return "".join(f"{line}\n" for line in block(values, 0))


def block(values: dict[str, Any], indent: int) -> Iterator[str]:
    """Yield the lines of a mapping's keys. Below the top level, a short mapping stays on one line."""
    for key, value in values.items():
        head = f"{' ' * indent}{_key(key)}:"
        line = f"{head} {_flow(value)}"
        if isinstance(value, dict) and value and (indent == 0 or len(line) > LINE):
            yield head
            yield from block(value, indent + 2)
        elif isinstance(value, list) and value and len(line) > LINE:
            yield head
            for item in value:
                yield f"{' ' * indent}  - {_flow(item)}"
        else:
            yield line


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        return _key(value)
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = json.dumps(value)
    # 1e-05 is a number in YAML 1.2, and text in YAML 1.1.
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text


def _key(text: str) -> str:
    """Return a text, quoted unless every YAML reader would read it back as the same text."""
    bare = _BARE.fullmatch(text) and text.lower() not in _OTHER_YAML
    if bare and isinstance(core_schema.scalar(text), str):
        return text
    return core_schema.quoted(text)
