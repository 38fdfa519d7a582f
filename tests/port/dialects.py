"""Run a dialect alone, without the core, and return its findings and the recipe's values."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from recipec.port import dialects
from recipec.port.ledger import Finding, Ledger, Verdict
from recipec.port.read import read
from recipec.port.source import Source, Sources

KEYS = Path(__file__).parent / "keys"


@functools.cache
def table(dialect: str) -> dict[str, Any]:
    """Return a table of keys/, which nobody changes."""
    text = (KEYS / f"{dialect}.yaml").read_text(encoding="utf-8")
    made: dict[str, Any] = yaml.load(text, yaml.CSafeLoader)
    return made


def base(dialect: str) -> dict[str, Any]:
    """Return the run of a table of keys/."""
    return copy.deepcopy(table(dialect)["base"])  # type: ignore[no-any-return]


def beside(dialect: str) -> dict[str, Any]:
    """Return the other files of the run of a table of keys/, by role."""
    return copy.deepcopy(table(dialect).get("beside", {}))  # type: ignore[no-any-return]


def source(folder: Path, name: str, content: str | Mapping[str, Any]) -> Source:
    """Write a file into the folder and read it: a text unchanged, a mapping as YAML or JSON."""
    path = folder / name
    if not isinstance(content, str):
        content = json.dumps(content) if name.endswith(".json") else yaml.safe_dump(dict(content))
    path.write_text(content, encoding="utf-8")
    found, problems = read(path)
    assert found is not None, problems
    return found


def ported(
    dialect: str,
    folder: Path,
    content: str | Mapping[str, Any],
    name: str = "config.yaml",
    devices: int | None = None,
    script: str | None = None,
    **others: Mapping[str, Any],
) -> Ledger:
    """Return what a dialect makes of a file, and of other files by their role."""
    files = {role: source(folder, f"{role}.json", each) for role, each in others.items()}
    ledger = Ledger(Sources(source(folder, name, content), files), devices, script=script)
    dialects.apply(dialects.load(dialect), ledger)
    return ledger


def finding(ledger: Ledger, key: str) -> Finding:
    found = [each for each in ledger.findings if each.key == key]
    assert len(found) == 1, (key, found)
    return found[0]


def verdict(ledger: Ledger, key: str) -> Verdict:
    """Return how a key was carried over."""
    return finding(ledger, key).verdict


def values(ledger: Ledger, *paths: str) -> list[Any]:
    """Return the recipe's values."""
    return [ledger.value(path) for path in paths]


def codes(ledger: Ledger) -> list[tuple[str, str]]:
    """Return the code and key of each diagnostic."""
    return [(diagnostic.code, diagnostic.path) for diagnostic in ledger.diagnostics]


def spoken(ledger: Ledger) -> None:
    """Check that the report has every key of every file once."""
    for each in ledger.sources.all():
        assert ledger.unread(each) == []
        said = [found.key for found in ledger.findings if found.file == each.file]
        assert len(said) == len(set(said)), sorted(key for key in said if said.count(key) > 1)


SAMPLES: Mapping[str, Any] = {"dict": {}, "list": [], "float": 0.5, "int": 1, "bool": False, "str": "x"}


def samples(keys: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return a value for each key of a tool: its default, or a value of its type."""
    made: dict[str, Any] = {}
    for key, entry in keys.items():
        default = entry[1] if len(entry) > 1 else None
        if default is None or (isinstance(default, dict) and "is" in default):
            default = next((SAMPLES[kind] for kind in SAMPLES if kind in entry[0].lower()), "x")
        made[key] = default
    return made


def unspoken(ledger: Ledger, keys: Iterable[str]) -> list[str]:
    """Return the keys of the main file that the report leaves out."""
    missing = set(ledger.unread(ledger.sources.main))
    return sorted(key for key in keys if any(each == key or each.startswith(f"{key}.") for each in missing))
