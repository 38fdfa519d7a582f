"""`--set KEY=VALUE` of a port: a key of the main file, as the tools' own command lines give it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from compiler.port import yaml_tree
from compiler.port.source import Source, Sources, join, parts
from compiler.port.tree import Tree, conceal
from spec.diagnostics import Diagnostic, Span
from spec.document import Refused

_ARGUMENT = re.compile(r"([A-Za-z_][\w.\[\]-]*)=(.*)")


def apply(sources: Sources, arguments: Sequence[str]) -> tuple[Sources, list[Diagnostic]]:
    """The files with the arguments' values in the main one, and what was wrong with them."""
    found: list[Diagnostic] = []
    main = sources.main
    for number, argument in enumerate(arguments, 1):
        try:
            main = _applied(main, argument, number)
        except Refused as refused:
            found.append(refused.diagnostic)
    return replace(sources, main=main), found


def _applied(main: Source, argument: str, number: int) -> Source:
    span = Span("--set", number, 1, conceal(argument), max(1, len(argument)))
    match = _ARGUMENT.fullmatch(argument)
    if match is None:
        help = "--set learning_rate=1e-4"
        raise Refused(Diagnostic("E0030", "a --set argument is KEY=VALUE", "", help, span))
    key, text = conceal(match[1]), match[2].strip()
    tree = Tree(text, "--set")
    value = None if text in ("", "null", "~") else yaml_tree.parse(tree)
    data = deepcopy(main.data)
    _put(data, parts(key), value, Diagnostic("E0031", f"`{key}` leads nowhere", key, "set its section", span))
    below = (f"{key}.", f"{key}[")
    spans = {known: place for known, place in main.spans.items() if not known.startswith(below)}
    secrets = {known: what for known, what in main.secrets.items() if not f"{known}.".startswith(below)}
    for path, what in tree.secrets.items():
        secrets[f"{key}{path}" if path[:1] in ("", "[") else join(key, path)] = what
    keys = {**main.keys, key: span}
    return replace(main, data=data, spans={**spans, key: span}, keys=keys, secrets=secrets)


def _put(node: Any, way: Sequence[str | int], value: Any, nowhere: Diagnostic) -> None:
    first, *rest = way
    if isinstance(first, int):
        if not isinstance(node, list) or first >= len(node):
            raise Refused(nowhere)
    elif not isinstance(node, dict):
        raise Refused(nowhere)
    elif rest and node.get(first) is None:
        node[first] = {}
    if rest:
        _put(node[first], rest, value, nowhere)
    else:
        node[first] = value
