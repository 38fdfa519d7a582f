"""Tests of every command with bad files of every kind: one sentence, the right status, nothing written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from inside import READING, UNWRITABLE, WRITING, Done, recipe, without_privileges, words

QUICK = ("folder", "binary", "unreadable", "pipe", "zero", "esc\x1b[2J")
"""The kinds to try here. test_all_bad_files.py tries the others."""


def tried(line: str, kinds: dict[str, str], chosen: tuple[str, ...]) -> dict[str, Done]:
    """Run a command with each of the kinds."""
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
