"""The golden cases: every folder next to this file.

A case has recipe.yaml with the files that it needs, and the expected result: stderr.txt, the text that
`recipe check` prints (`recipe build`, for a backend or a notebook), or expected/, the tree that `recipe
build` writes without the wheel. command.txt has further arguments, one per line. `pytest --update` rewrites
the expected result. A new case without either gets stderr.txt.
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
    """Run the command line in this process and return its exit status and standard error."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return result.exit_code, result.stderr


def tree(folder: Path) -> dict[str, str]:
    """Read every file of a folder of artifacts except the wheel, without the hashes of the wheel.

    So a change to runtime/ alone changes no case. tests/emit compares the hashes with generated/.
    """
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".whl")
    named = {path.relative_to(folder).as_posix(): path.read_bytes().decode() for path in files}
    return {name: without_hashes(content) for name, content in named.items()}


def without_hashes(content: str) -> str:
    """Remove from a file's text the runtime's digests, and the digests of files that contain them."""
    content = re.sub(r'("runtime": )\{[^{}]*\}', r'\1"..."', content)
    content = re.sub(
        r'("[\w/]*requirements-(?:train|trl|torchax)\.txt": )"[0-9a-f]{64}"', r'\1"..."', content
    )
    return re.sub(
        r"(\+|%2B)[0-9a-f]{12}\b", r"\1...", re.sub(r"#sha256=[0-9a-f]{64}", "#sha256=...", content)
    )


@pytest.mark.parametrize("case", CASES)
def test_a_recipe_gives_the_expected_diagnostics_and_files(
    case: str, update: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
