"""Tests of what `recipe serve` reads from an artifact's folder, and of its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.artifacts.artifact import LOCK
from recipec.compiler.deployment.served_artifact import open_artifact
from recipec.compiler.errors import ArtifactError
from tests.deployment.up_artifact import ROOT, build

PATTERNS = 'lora={rank: 16, rank_pattern: {"q_proj": 8, "gate_proj": 4}}'


def test_open_artifact_returns_the_values_of_the_lock(tmp_path: Path) -> None:
    folder = build(tmp_path, PATTERNS, "serve.host=0.0.0.0", name="other")
    found = open_artifact(folder)
    assert (found.name, found.family, found.accelerator.name) == ("other", "gemma4", "v6e-8")
    assert found.folder == folder.resolve() and found.notes == ()
    assert found.container.entrypoint[:2] == ("vllm", "serve") and found.container.api_key
    assert found.recipe.lora is not None
    # The first matching pattern counts, so that their order is kept.
    assert list(found.recipe.lora.rank_pattern.items()) == [("q_proj", 8), ("gate_proj", 4)]


def test_edited_files_and_other_compiler_version_give_notes(tmp_path: Path) -> None:
    folder = build(tmp_path)
    (folder / "serve/Dockerfile").write_text("FROM scratch\n")
    (folder / "serve/serve.sh").unlink()
    lock = json.loads((folder / LOCK).read_text())
    (folder / LOCK).write_text(json.dumps(lock | {"runtime": "0" * 64}))
    assert open_artifact(folder).notes == (
        f"{folder}/serve/Dockerfile was edited after it was built",
        f"{folder}/serve/serve.sh is missing since it was built",
        f"{folder} was built by another version of recipec: recipe build RECIPE updates it",
    )


AGAIN = "build it again: recipe build RECIPE"

LOCKS: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str]] = {
    "another layout": (
        lambda lock: lock | {"lock": 9, "compiler": "recipec 8.1"},
        "LOCK was written by recipec 8.1, with layout 9: this version reads 1",
        AGAIN,
    ),
    "no layout": (lambda lock: {}, "LOCK is not the lock of an artifact", AGAIN),
    "no recipe": (
        lambda lock: lock | {"recipe": None},
        "LOCK holds a recipe that this version does not read (recipe: Input should be a valid dictionary or "
        "instance of Recipe)",
        AGAIN,
    ),
    "another language": (
        lambda lock: lock | {"recipe": lock["recipe"] | {"lora": {"rank_pattern": [[1]], "rank": "high"}}},
        "LOCK holds a recipe that this version does not read (lora.rank: Input should be a valid integer)",
        AGAIN,
    ),
    "another accelerator": (
        lambda lock: lock | {"recipe": lock["recipe"] | {"serve": {"accelerator": "v9-8"}}},
        "LOCK: unknown accelerator `v9-8`",
        "did you mean `v4-8`? known are v4-N, v5e-N (v5litepod-N), v5p-N, v6e-N, tpu7x-N and cpu-N",
    ),
    "no server": (
        lambda lock: lock | {"recipe": lock["recipe"] | {"serve": None}},
        "FOLDER cannot be served: its recipe has no serve section",
        "give the recipe one (`serve: {accelerator: v6e-8}`), and build it again",
    ),
}


@pytest.mark.parametrize("case", LOCKS)
def test_invalid_locks_give_one_sentence_errors(case: str, tmp_path: Path) -> None:
    change, expected, help = LOCKS[case]
    folder = build(tmp_path)
    path = folder / LOCK
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ArtifactError) as caught:
        open_artifact(folder)
    assert str(caught.value) == expected.replace("LOCK", str(path)).replace("FOLDER", str(folder))
    assert caught.value.help == help


def test_folders_without_an_artifact_give_one_sentence_errors(tmp_path: Path) -> None:
    folder = build(tmp_path)
    (tmp_path / "empty").mkdir()
    name = "name a folder that `recipe build` wrote, for example generated/NAME"
    for asked, message, help in [
        (
            folder.parent / "simple",
            f"there is no artifact {folder.parent}/simple",
            f"{folder.parent} has sample",
        ),
        (tmp_path / "none", f"there is no artifact {tmp_path}/none", "build one first: recipe build RECIPE"),
        (tmp_path / "empty", f"{tmp_path}/empty is not an artifact: it has no {LOCK}", name),
        (
            folder.parent,
            f"{folder.parent} is not an artifact: it has no {LOCK}",
            f"name one of them: {folder}",
        ),
        (folder / LOCK, f"{folder / LOCK} is not an artifact: it has no {LOCK}", name),
    ]:
        with pytest.raises(ArtifactError) as caught:
            open_artifact(asked)
        assert (str(caught.value), caught.value.help) == (message, help)
    (folder / LOCK).write_text("{")
    with pytest.raises(ArtifactError, match=r"cannot be read .Expecting property name"):
        open_artifact(folder)


def test_cli_error_is_one_sentence_and_cli_imports_no_heavy_package(tmp_path: Path) -> None:
    """Print sentences on stderr, exit with 1, and import heavy packages only when they are needed."""
    script = (
        "import sys\nfrom recipec.compiler.cli import main as cli\n"
        "heavy = {'requests', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\ncli.main()\n"
    )
    command = [sys.executable, "-c", script, "serve", "down", str(tmp_path / "none")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: there is no artifact {tmp_path}/none\n  = help: build one first: recipe build RECIPE\n"
    )
