"""Tests that artifacts' scripts pass mypy.

`make test` runs them last: mypy has then cached the runtime, and only checks the scripts.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from emitting import EVERYTHING, program_of, tool

from recipec.compiler.emitters.emit import emit

UNLIKE = ("gemma3-4b-full-v6e8", "qwen3-8b-dpo-v5e8")
"""Artifacts whose scripts differ most from LoRA's: one without adapters, and one of preferences."""


@pytest.mark.parametrize("which", ["unlike", pytest.param("all", marks=pytest.mark.nightly)])
def test_generated_scripts_pass_mypy(
    which: str, root: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Give mypy different names for scripts of the same name in different artifacts."""
    scripts = [*(root / "generated").glob("*/*.py")]
    if which == "all":
        scripts += request.getfixturevalue("variants").glob("*/*.py")
    for path in scripts:
        folder = path.parent.name
        if folder != "runtime" and (which == "all" or folder in UNLIKE):
            shutil.copy(path, tmp_path / f"script_{folder.replace('-', '_')}_{path.name}")
    for name, content in emit(program_of(tmp_path, EVERYTHING["lists"])).items():
        if name.endswith(".py") and "/" not in name:
            (tmp_path / f"script_with_lists_{name}").write_bytes(content)
    # In the repository, because its runtime/ equals the copies next to the scripts.
    scripts = sorted(tmp_path.glob("script_*.py"))
    assert len(scripts) >= 2 * (len(UNLIKE) + 1)
    assert tool("mypy", *scripts, cwd=root) == ""
