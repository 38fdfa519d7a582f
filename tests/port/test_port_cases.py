"""Test the cases of `recipe port`: every folder of cases/ has files and the expected diagnostics.

command.txt has the arguments, one a line. Without it all files of the folder are ported to recipe.yaml.
stderr.txt has the output. `pytest --update` writes it again.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli.main import app

HERE = Path(__file__).parent / "cases"
CASES = sorted(path.name for path in HERE.iterdir() if path.is_dir())


@pytest.mark.parametrize("case", CASES)
def test_a_config_ends_in_the_expected_diagnostics(
    case: str, update: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, golden = HERE / case, HERE / case / "stderr.txt"
    command = folder / "command.txt"
    inputs = [path.name for path in sorted(folder.iterdir()) if path not in (command, golden)]
    for name in inputs:
        copy = shutil.copytree if (folder / name).is_dir() else shutil.copy
        copy(folder / name, tmp_path / name)
    arguments = command.read_text().splitlines() if command.exists() else [*inputs, "-o", "recipe.yaml"]
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["port", *arguments], catch_exceptions=False)
    if update:
        golden.write_text(result.stderr, encoding="utf-8")
    assert result.stderr == golden.read_text(encoding="utf-8")
    failed = "error[" in result.stderr and "--partial" not in arguments
    assert result.exit_code == (1 if failed else 0)
    assert (tmp_path / "recipe.yaml").exists() is not failed
