"""Reads a ported file: YAML 1.1 or JSON, by its name; a name that says neither is YAML, of which JSON is
nearly a part."""

from __future__ import annotations

from pathlib import Path

from compiler.port import json_tree, yaml_tree
from compiler.port.source import Source
from compiler.port.tree import Tree
from spec.diagnostics import Diagnostic
from spec.document import Refused
from spec.load import display, read_text

MAX_BYTES = 1 << 20
"""The largest file that is read, well above any config: reading it takes seconds."""


def read(path: Path) -> tuple[Source | None, list[Diagnostic]]:
    """A file as a tree with places, None where there is none, and what was found on the way."""
    text, problem = read_text(path, "a config", MAX_BYTES, "a config's YAML or JSON file")
    if problem is not None:
        return None, [problem]
    tree = Tree(text, display(path))
    reader = json_tree if path.suffix.lower() == ".json" else yaml_tree
    try:
        data = reader.parse(tree)
    except Refused as refused:
        return None, [*tree.diagnostics, refused.diagnostic]
    return Source(Path(path), tree.file, data, tree.spans, tree.keys, tree.secrets), tree.diagnostics
