"""Tests of every command with bad files of every kind: one sentence, the right status, nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from inside import READING, RECIPE, UNWRITABLE, WRITING, Done, recipe, without_privileges, words

QUICK = ("folder", "binary", "unreadable", "pipe", "zero", "esc\x1b[2J")
"""The kinds to try in `make test`; `make nightly` tries the others."""


def tried(line: str, kinds: dict[str, str], chosen: tuple[str, ...]) -> dict[str, Done]:
    with without_privileges():
        return {kind: recipe(*words(line, kinds[kind])) for kind in chosen}


def faults(done: dict[str, Done]) -> str:
    """Describe the errors, kind by kind."""
    return "\n".join(
        f"{kind!a}: {found.faults()}: {found.err[-600:]!a}" for kind, found in done.items() if found.faults()
    )


def entries(folder: Path = Path()) -> set[str]:
    """Return everything in the working folder, with its size."""
    found = set()
    for place, folders, files in os.walk(folder):
        found |= {os.path.join(place, name) for name in folders}
        found |= {
            f"{os.path.join(place, name)} {os.lstat(os.path.join(place, name)).st_size}" for name in files
        }
    return found


@pytest.mark.parametrize("line", READING)
def test_bad_input_file_causes_no_traceback_and_no_new_files(line: str, kinds: dict[str, str]) -> None:
    before = entries()
    done = tried(line, kinds, QUICK)
    assert not faults(done), faults(done)
    assert {entry for entry in entries() if not entry.startswith(("./home", "./made"))} == before


@pytest.mark.parametrize("line", WRITING)
def test_unwritable_output_gives_an_error_without_traceback(line: str, kinds: dict[str, str]) -> None:
    before = entries()
    done = tried(line, kinds, UNWRITABLE)
    assert not faults(done), faults(done)
    may_be_a_folder = {"folder"} if "build" in line or "new" in line else set()
    assert {kind for kind, found in done.items() if not found.status} <= may_be_a_folder
    assert {entry for entry in before if not entry.startswith("./folder")} <= entries()


@pytest.mark.nightly
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


@pytest.mark.nightly
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
