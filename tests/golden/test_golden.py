"""The golden cases: every folder beside this file.

A case holds recipe.yaml with whatever it needs, and what is expected of it: stderr.txt, the text that
`recipe check` prints (with a backend or a notebook `recipe build`, which alone asks for one), or expected/, the tree that
`recipe build` writes (but for the wheel, which another test holds). command.txt holds further arguments, one a
line. `pytest --update` rewrites what is expected; of a new case without either it writes stderr.txt.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
from typer.testing import CliRunner

from recipec.compiler.cli.main import app

HERE = Path(__file__).parent
CASES = sorted(path.name for path in HERE.iterdir() if path.is_dir() and not path.name.startswith(("_", ".")))


def recipe(*arguments: str) -> tuple[int, str]:
    """Exit status and standard error of the command line, in this process."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return result.exit_code, result.stderr


def tree(folder: Path) -> dict[str, str]:
    """Every file of a folder of artifacts but the wheel, whose hashes are taken out of the others.

    So a change to runtime/ alone changes no case; tests/emit and generated/ hold the hashes.
    """
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".whl")
    named = {path.relative_to(folder).as_posix(): path.read_bytes().decode() for path in files}
    return {name: without_hashes(content) for name, content in named.items()}


def without_hashes(content: str) -> str:
    """The text of a file without the runtime's digests, and so without the digests of files that have them."""
    content = re.sub(r'("runtime": )\{[^{}]*\}', r'\1"..."', content)
    content = re.sub(r'("[\w/]*requirements-(?:train|trl|torchax)\.txt": )"[0-9a-f]{64}"', r'\1"..."', content)
    return re.sub(r"(\+|%2B)[0-9a-f]{12}\b", r"\1...", re.sub(r"#sha256=[0-9a-f]{64}", "#sha256=...", content))


@pytest.mark.parametrize("case", CASES)
def test_a_recipe_gives_the_expected_diagnostics_and_files(case: str, update: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = HERE / case
    monkeypatch.chdir(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))  # has no tokenizers
    extra = folder / "command.txt"
    arguments = extra.read_text().splitlines() if extra.exists() else []
    if (folder / "expected").is_dir():
        status, errors = recipe("build", "recipe.yaml", "-o", str(tmp_path), *arguments)
        assert status == 0, errors
        built = tree(tmp_path)
        if update:
            shutil.rmtree(folder / "expected")
            for name, content in built.items():
                target = folder / "expected" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.encode())
        expected = tree(folder / "expected")
        assert sorted(built) == sorted(expected)
        for name, content in built.items():
            assert content == expected[name], name
        return
    command = ["build", "-o", str(tmp_path)] if {"--backend", "--notebook"} & {*arguments} else ["check"]
    status, errors = recipe(*command, "recipe.yaml", *arguments)
    golden = folder / "stderr.txt"
    if update:
        golden.write_text(errors, encoding="utf-8")
    assert errors == golden.read_text(encoding="utf-8")
    assert status == (1 if "error[" in errors else 0)
