"""Test whole ports, one of each dialect: each folder of examples/ has a tool's files and the expected result.

command.txt has the arguments, one a line. expected/ has the recipe, its report, and the files next to it.
`pytest --update` writes expected/ again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from recipec.compiler.artifacts.artifact import SCHEMA
from recipec.compiler.cli.main import app
from tests.port.test_port_core import keys

HERE = Path(__file__).parent / "examples"
EXAMPLES = sorted(path.name for path in HERE.iterdir() if path.is_dir())


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy an example's files to a folder of its name."""
    copy = tmp_path / request.param
    shutil.copytree(HERE / request.param, copy, ignore=shutil.ignore_patterns("expected", "command.txt"))
    monkeypatch.chdir(copy)
    return copy


def port(example: str, *arguments: str) -> tuple[int, str, str]:
    """Port an example, and return the exit status, stdout and stderr."""
    command = (HERE / example / "command.txt").read_text().splitlines()
    result = CliRunner().invoke(app, ["port", *command, *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("folder", EXAMPLES, indirect=True)
def test_an_example_becomes_the_expected_recipe_and_report(folder: Path, update: bool) -> None:
    before = set(folder.iterdir())
    status, printed, errors = port(
        folder.name, "-o", "recipe.yaml", "--report", "report.md", "--format", "json"
    )
    assert status == 0, errors
    assert CliRunner().invoke(app, ["check", "recipe.yaml"]).exit_code == 0
    made = {path.name: path.read_text() for path in sorted(set(folder.iterdir()) - before)}
    assert made.pop(SCHEMA).startswith("{")
    golden = HERE / folder.name / "expected"
    if update:
        shutil.rmtree(golden, ignore_errors=True)
        golden.mkdir()
        for name, text in made.items():
            (golden / name).write_text(text)
    assert made == {path.name: path.read_text() for path in sorted(golden.iterdir())}
    _count(folder, json.loads(printed))


def _count(folder: Path, told: dict[str, Any]) -> None:
    """Check that the report has every key of every file once, at its line, with a verdict."""
    for name in told["files"]:
        text = (folder / name).read_text()
        data = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
        expected = keys(data)
        rows = [row for row in told["keys"] if row["file"] == name]
        assert sorted(row["key"] for row in rows) == sorted(expected), name
        for row in rows:
            last = row["key"].rpartition(".")[2].partition("[")[0]
            assert last in text.splitlines()[row["line"] - 1], row
    assert sum(told["counts"].values()) == len(told["keys"])
    assert all(row["note"] for row in told["keys"] if row["verdict"] != "exact")


ODD = (None, True, -1, 0, 1e300, "", "x", "a,b", [], {}, [1], [{"a": 1}], {"a": {"b": 1}})


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("folder", EXAMPLES, indirect=True)
def test_odd_values_end_in_diagnostics(folder: Path, turn: int) -> None:
    """Replace every value of the main file at once, and check that each one is reported.

    `make test` tries every other odd value, in turn with the examples.
    """
    main = (HERE / folder.name / "command.txt").read_text().splitlines()[0]
    text = (folder / main).read_text()
    data = json.loads(text) if main.endswith(".json") else yaml.safe_load(text)
    for odd in ODD[(EXAMPLES.index(folder.name) + turn) % 2 :: 2]:
        (folder / main).write_text(json.dumps(_with(data, odd)))
        status, printed, errors = port(folder.name, "--partial", "--format", "json", "--devices", "1")
        told = json.loads(errors if status == 0 else printed)
        assert status == 1 or told["recipe"], odd
        assert any(d["severity"] == "error" for d in told["diagnostics"]), odd


def _with(data: Any, odd: Any) -> Any:
    """Return the same keys with another value; sections keep theirs."""
    if isinstance(data, dict):
        return {key: _with(value, odd) for key, value in data.items()}
    if isinstance(data, list) and any(isinstance(item, dict | list) for item in data):
        return [_with(item, odd) for item in data]
    return odd
