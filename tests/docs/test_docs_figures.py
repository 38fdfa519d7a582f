"""Tests that the pages' figures and counts are those of their source files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from recipec.compiler import __version__, catalog
from recipec.runtime.model.families import FAMILIES
from recipec.spec.language.mesh import Remat
from tests.docs.shell import ROOT

PINS = json.loads((ROOT / "compiler" / "data" / "pins.json").read_text(encoding="utf-8"))
NUMBERS = {3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine"}
BY_HAND = ("benchmarks.md", "comparison.md", "scale.md", "diagnostics.md")
"""Pages that state the versions and dates of their own figures."""


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def figure(name: str, pattern: str) -> float:
    """Return the number at the only place of a page that matches a pattern."""
    found = re.findall(pattern, re.sub(r"\s+", " ", text(name)))
    assert len(found) == 1, f"{name} has {len(found)} times {pattern}"
    return float(found[0].replace(",", ""))


def pinned() -> dict[str, set[str]]:
    """Return the pinned versions of each package, including those of serving and Cloud Storage."""
    found: dict[str, set[str]] = {}

    def look(value: Any) -> None:
        for key, below in value.items() if isinstance(value, dict) else ():
            if isinstance(below, str):
                found.setdefault(key, set()).add(below)
            look(below)

    look(PINS)
    return found


def test_start_page_states_the_recorded_plan() -> None:
    """Compare with the recorded plan, as `recipe plan` prints it. docs/recipes.md has the same source."""
    plan = json.loads(text("recipes/estimates.json"))["recipes"]["gemma4-31b-v5p8"]
    parts = {key: value for key, value in plan["memory"].items() if key != "available"}
    seconds, tokens = plan["seconds"], plan["tokens"]
    low, high = (factor * seconds for factor in plan["interval"])
    for page, rows in {
        "docs/start.md": {
            r"HBM of a device: [\d.]+ %; ([\d.]+) GiB of": round(sum(parts.values()) / 2**30, 1),
            r"base weights ([\d.]+) GiB": round(parts["weights"] / 2**30, 1),
            r"Step of a micro-batch: ([\d.,]+) ms": round(1000 * seconds),
            r"Step of a micro-batch: [\d.,]+ ms; ([\d.,]+) ms to": round(1000 * low),
            r"Step of a micro-batch: [\d.,]+ ms; [\d.,]+ ms to ([\d.,]+) ms": round(1000 * high),
            r"Tokens a second, at most: ([\d,]+);": round(tokens / seconds),
            r"Tokens a second, at most: [\d,]+; ([\d,]+) to": round(tokens / high),
            r"Tokens a second, at most: [\d,]+; [\d,]+ to ([\d,]+)": round(tokens / low),
        }
    }.items():
        for pattern, expected in rows.items():
            assert figure(page, pattern) == expected, (page, pattern)


@pytest.mark.parametrize(
    ("page", "pattern"),
    [
        ("docs/index.md", r"(\d+) ids in the catalog"),
        ("CHANGELOG.md", r"(\d+) models by their id"),
    ],
)
def test_stated_model_counts_match_the_catalog(page: str, pattern: str) -> None:
    real = [name for name in catalog.entries() if not name.startswith("recipec/")]
    assert figure(page, pattern) == len(real)


def test_stated_policy_and_family_counts_match_the_code() -> None:
    policies = NUMBERS[len(set(get_args(Remat.model_fields["policy"].annotation)) - {"auto"})]
    assert f"{policies} rematerialization policies" in text("docs/index.md")
    assert f"{policies} policies of rematerialization" in " ".join(text("CHANGELOG.md").split())
    families = NUMBERS.get(len(FAMILIES), str(len(FAMILIES)))
    assert f"| **{families} families** |" in text("docs/comparison.md")
    assert f"not of the {families} families" in text("docs/comparison.md")


def pages() -> list[Path]:
    return [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in BY_HAND]


NAMES = {"vllm": "vllm-tpu", "vllm-tpu": "vllm-tpu", "tpu-inference": "vllm-tpu", "orbax": "orbax-checkpoint"}
"""Packages by the pages' names for them: tpu-inference is released with vllm-tpu."""


def test_stated_wheel_names_have_the_current_version() -> None:
    found = [
        one
        for page in ("README.md", "docs/versions.md")
        for one in re.findall(r"recipec-([\d.]+)[-.]", text(page))
    ]
    assert len(found) > 2 and set(found) == {__version__}


def test_stated_package_versions_are_pinned() -> None:
    known = pinned()
    found = 0
    for page in pages():
        for name, version in re.findall(
            r"([A-Za-z][A-Za-z-]+) (\d+\.\d+\.\d+(?:\.\w+)*)", page.read_text("utf-8")
        ):
            package = NAMES.get(name.lower(), name.lower())
            if package in known:
                found += 1
                assert version in known[package], f"{page.name}: {name} {version}; pinned: {known[package]}"
    assert found > 12


def test_rows_of_tables_follow_their_heads() -> None:
    """A blank line within a table ends it, and the rows below are shown as text."""
    broken = []
    for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        for table in re.findall(r"(?:^\|.*\n)+", prose, re.M):
            rows = table.splitlines()
            if len(rows) < 2 or not re.fullmatch(r"\|[-:| ]+\|", rows[1]):
                broken.append(f"{path.name}: {rows[0][:60]}")
    assert not broken
