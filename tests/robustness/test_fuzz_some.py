"""Fuzz tests of recipes and command lines: valid, nearly valid and broken; and of what they have found."""

from __future__ import annotations

from pathlib import Path

import pytest
from examine import Case, examine
from fuzzing import fuzz_commands, fuzz_language
from inside import RECIPE

MANY = pytest.mark.nightly


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=MANY)])
def test_no_recipe_ends_in_a_traceback(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = fuzz_language(count, tmp_path, monkeypatch)
    assert len(outcomes) > min(count // 6, 50)
    assert sum(times for kind, times in outcomes.items() if "built" in kind) >= 3


@pytest.mark.parametrize("count", [40, pytest.param(3000, marks=MANY)])
def test_no_command_line_ends_in_a_traceback(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = fuzz_commands(count, tmp_path, monkeypatch)
    assert {status for _, status, _ in outcomes} == {0, 1, 2}


FOUND = {
    "a line separator in a key": (RECIPE.replace("name: example", "na\u2028me: example").encode(), "E0101"),
    "a next line in a value": (RECIPE.replace("name: ", "name: \x85").encode(), "built"),
    "bytes after a carriage return": (b"recipe: 1\n\r\xab\xc6\xf6", "E0004"),
    "a section within another": (RECIPE.replace("axes: {fsdp: 8}", "lora: {rank: 1}").encode(), "E0101"),
    "a name that is too long": (f"extends: {'n' * 300}.yaml\n{RECIPE}".encode(), "E0021"),
    "a link that goes round in a circle": (f"extends: loop.yaml\n{RECIPE}".encode(), "E0021"),
}
"""Cases that once had a place outside of the file, or an error without a place."""


@pytest.mark.parametrize("kind", FOUND)
def test_past_fuzzing_failures_stay_fixed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    recipe, code = FOUND[kind]
    assert any(found.startswith(code) for found in examine(tmp_path, Case(recipe)))
