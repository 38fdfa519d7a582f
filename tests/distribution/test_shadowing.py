"""Tests of working folders with the same names as recipec's packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipec.compiler.plan import pool


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """Make a folder with packages of the same names as recipec's."""
    for name in ("recipec", "spec", "compiler", "port", "templates", "runtime"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('{name} of the working folder')\n")
    return tmp_path


def test_plan_worker_ignores_packages_in_working_folder(crowded: Path) -> None:
    """Start a worker without a job: it fails on its input."""
    command = [sys.executable, *pool.WORKER, str(os.getpid())]
    done = subprocess.run(command, cwd=crowded, input="", capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "of the working folder" not in done.stderr and "validation error for Job" in done.stderr


def test_started_python_modules_always_get_the_safe_path_flag(root: Path) -> None:
    """Forbid `-m`, which puts the working folder first on the path unless -P is given."""
    module = re.compile(r'"-m", "(recipec|runtime)\.')
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for package in ("compiler", "port", "runtime")
        for path in (root / package).rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if module.search(line)
    ]
    assert found and [line for line in found if '"-P", "-m"' not in line] == []
