"""A test of what a new key of the language takes: its field, and no other change by hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SEED = "    seed: int = field("
KEY = """\
    warmth: float = field(
        "An example of a key.", 0.5, unit="none (a factor)", ge=0
    )
"""
PROGRAM = """
import json
from pathlib import Path
from recipec.compiler.lower import lower
from recipec.compiler.emitters.emit import emit
from recipec.compiler.plan import identity
from recipec.compiler import store
from recipec.spec.load import load
for sets in (), ("train.warmth=0.75",):
    program = lower(load(Path("recipes/quickstart.yaml"), sets), planning=True).program
    script = emit(program)["train.py"].decode()
    print(json.dumps(["warmth=0.75" in script, store.key(identity.step(program))]))
"""


def test_new_key_of_train_reaches_schema_script_and_plan_from_its_field(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Add a key to a copy of the packages: nothing else is edited."""
    for name in ("spec", "compiler", "runtime", "templates", "scripts", "recipes", "docs"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "recipec").mkdir()
    shutil.copy(root / "recipec" / "__init__.py", tmp_path / "recipec")
    for link in (root / "recipec").iterdir():
        if link.is_symlink():
            (tmp_path / "recipec" / link.name).symlink_to(tmp_path / link.name)
    section = tmp_path / "spec" / "language" / "train.py"
    text = section.read_text(encoding="utf-8")
    assert text.count(SEED) == 1
    section.write_text(text.replace(SEED, KEY + SEED), encoding="utf-8")

    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert '"warmth": {' in run("-m", "recipec.spec.schema")
    run("-m", "scripts.docs.sections")
    plain, changed = run("-c", PROGRAM).splitlines()
    assert plain.startswith("[false, ") and changed.startswith("[true, ")
    assert plain != changed
    monkeypatch.chdir(root)
    exec(PROGRAM.replace('(), ("train.warmth=0.75",)', "((),)"), {})
    assert capsys.readouterr().out.strip() == plain, "the default of a new key renames plans"
