"""Tests of every command with the kinds of bad files that test_bad_files.py omits, and in other locales."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from inside import READING, RECIPE
from test_bad_files import QUICK, faults, tried

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("line", READING)
def test_remaining_bad_input_files_cause_no_traceback(line: str, kinds: dict[str, str]) -> None:
    done = tried(line, kinds, tuple(kind for kind in kinds if kind not in (*QUICK, "web")))
    assert not faults(done), faults(done)


LOCALES = (
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "POSIX"},
    {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "nowhere_NO.ISO-8859-1", "PYTHONUTF8": "0"},
)


@pytest.mark.parametrize("locale", LOCALES)
def test_commands_work_in_locales_without_utf8(locale: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "grün 🙂.yaml").write_text(RECIPE.replace("rank: 8}", "rank: -8}  # größer"), "utf-8")
    (tmp_path / "good.yaml").write_text(f"# größer 🙂\n{RECIPE}", "utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    for command, status in (
        (["check", "grün 🙂.yaml"], 1),
        (["build", "good.yaml", "-o", "grün"], 0),
        (["explain", "good.yaml"], 0),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "recipec.compiler.cli.main", *command],
            cwd=tmp_path,
            env={**environment, **locale, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            capture_output=True,
            timeout=120,
        )
        assert done.returncode == status and b"Traceback" not in done.stderr and b"E0000" not in done.stderr
    built = (tmp_path / "grün" / "example" / "recipe.yaml").read_text("utf-8")
    assert "größer 🙂" in built
