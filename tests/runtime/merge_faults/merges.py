"""A small base, a run of it, and merges of both, started like scripts."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.merging import merge
from recipec.runtime.merging.journal import JOURNAL
from recipec.runtime.merging.output_folder import OutputFolder
from recipec.runtime.settings import ModelSettings
from tests.runtime.llama_bases import contents

MODEL = ModelSettings(id="./base", family="llama")
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "adapter": True, "max_shard_size": "4KB"}
"""Three files of weights."""
SHARDS = 3


@dataclass(frozen=True)
class Place:
    """A base, a run of it with two checkpoints, and the output of an undisturbed merge."""

    base: Path
    run: Path
    merged: dict[str, bytes]
    adapter: dict[str, bytes]

    def expect(self, folder: Path) -> None:
        """Compare both folders of a merge byte for byte."""
        assert contents(folder) == self.merged
        assert contents(folder.with_name(f"{folder.name}-adapter")) == self.adapter


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    def refused(self, *words: str) -> None:
        """Check that the merge failed with one error and a help that contain these words."""
        assert self.status == 1, self
        assert self.err.startswith("error: ") and "\n  = help: " in self.err and "Traceback" not in self.err
        for word in words:
            assert word in self.err, (word, self.err)


Run = Callable[..., Outcome]


def start(base: Path | str, trained: Path, output: Path | str, *argv: str, **settings: Any) -> int:
    values = {"checkpoint": str(trained), "output": str(output), **SETTINGS, **settings}
    return merge.main(Path("/nowhere"), MODEL, argv=["--model", str(base), *argv], **values)


def times(folder: Path) -> dict[str, tuple[int, int]]:
    """Return values that change if a file is written again."""
    entries = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: (entry.st_ino, entry.st_mtime_ns) for name, entry in entries.items()}


def noted(folder: Path) -> set[str]:
    """Return the files that an unfinished folder's journal lists as complete."""
    journal = folder / JOURNAL
    return set(json.loads(journal.read_bytes())["files"]) if journal.exists() else set()


def interrupt(target: Path, run: Run, after: str, **settings: Any) -> Outcome:
    """Interrupt a merge with Ctrl-C's signal as soon as a file has its final name and is in the journal."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OutputFolder, "free", lambda self: None)
        create = OutputFolder.create

        def begin(self: OutputFolder, name: str) -> Any:
            if name != JOURNAL and (self.path / after).exists():
                signal.raise_signal(signal.SIGINT)
            return create(self, name)

        patched.setattr(OutputFolder, "create", begin)
        outcome = run(target, **settings)
    assert outcome.status == 130 and (target / JOURNAL).exists()
    assert "the same command continues" in outcome.err and "Traceback" not in outcome.err
    return outcome


def copy(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target, symlinks=True)
    return target
