"""Fixtures with a base and a run that are merged once undisturbed, and with merges started like scripts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests.runtime.llama_bases import contents, write_base
from tests.runtime.merge_faults.merges import SHARDS, Outcome, Place, Run, start
from tests.runtime.runs import lora_section, save_run


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("place")
    base = write_base(root / "base")
    save_run(root / "run", HFCheckpoint.open(base), lora_section(), steps=(2, 4))
    assert start(base, root / "run", root / "whole") == 0
    whole = Place(base, root / "run", contents(root / "whole"), contents(root / "whole-adapter"))
    assert sum(name.endswith(".safetensors") for name in whole.merged) == SHARDS
    return whole


@pytest.fixture(autouse=True)
def durable_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync, because power does not fail here and waiting for the disk takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def run(place: Place, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a merge as a script does."""

    def run(output: Path | str, *argv: str, base: Path | str | None = None, **settings: Any) -> Outcome:
        capsys.readouterr()
        trained = settings.pop("checkpoint", place.run)
        status = start(base or place.base, trained, output, *argv, **settings)
        return Outcome(status, *capsys.readouterr())

    return run
