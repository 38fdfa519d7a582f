"""Tests of `recipe` with broken streams and folders, and of what may not reach a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from inside import RECIPE, recipe, without_privileges


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working folder with a recipe."""
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_commands_end_without_traceback_on_broken_streams_and_folders(folder: Path) -> None:
    command = f"{sys.executable} -m recipec.compiler.cli.main"
    script = f"""
        {command} explain recipe.yaml | head -1; echo "${{PIPESTATUS[0]}}"
        {command} explain recipe.yaml > /dev/full; echo "$?"
        {command} build recipe.yaml -o out <&- >&- 2>&-; echo "$?"
        mkdir gone; cd gone; rmdir ../gone
        {command} check {folder}/recipe.yaml; echo "$?"
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    first, status, *others = done.stdout.splitlines()
    assert first.startswith("recipe") and status in ("0", "141") and others == ["1", "0", "1"]
    assert done.stderr.count("No space left on device") == 1
    assert "error: the current folder no longer exists\n" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert recipe("build", "recipe.yaml", "-o", "out", "--check").status == 0


def test_read_only_folder_gives_an_error(folder: Path) -> None:
    locked = folder / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    new = ["new", "x", "--model", "google/gemma-3-270m-it", "--accelerator", "v5e-8", "-o", "locked/x.yaml"]
    for command in (["build", "recipe.yaml", "-o", "locked/more"], new):
        with without_privileges():
            done = recipe(*command)
        assert done.status == 1 and done.faults() == [] and "Permission denied" in done.err, done
    assert list(locked.iterdir()) == []


def test_control_characters_in_recipe_do_not_reach_the_terminal(folder: Path) -> None:
    evil = '"a\\e[2J\\a\\u009b31m\\u202eb"'
    more = f"merge: {{output: {evil}}}\nevaluate: {{prompts: {evil}}}\n"
    (folder / "evil.yaml").write_text(f"{RECIPE}{more}")
    (folder / "value.yaml").write_text(RECIPE.replace("name: example", f"name: {evil}"))
    for command in (
        ["check", "evil.yaml"],
        ["check", "value.yaml", "--format", "json"],
        ["explain", "evil.yaml"],
        ["diff", "recipe.yaml", "evil.yaml"],
        ["build", "evil.yaml", "-o", "out\x1b[2J"],
        ["pack", "\x1b[2J"],
        ["nosuch\x1b[2J"],
    ):
        assert "control characters" not in recipe(*command).faults(), command
