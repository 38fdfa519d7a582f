"""Fixtures that port a tiny tool's config in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from recipec.compiler.lowering.hardware import from_name
from recipec.port import dialects
from recipec.port.port import Asked, Ported, port
from tests.port import fake

Port = Callable[..., Ported]

CONFIG = """\
fake_model: Qwen/Qwen3-8B
fake_rank: 16
fake_rows: 8
sets:
  - path: hf://some/set
"""


@pytest.fixture
def faketune(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the tiny tool alone, without the real ones."""
    known = dialects.Known("fake", "fake_model", ("accelerate",), interpolates=True)
    monkeypatch.setattr(dialects, "KNOWN", {"fake": known})
    monkeypatch.setattr(dialects, "load", lambda name: fake)


@pytest.fixture
def ported(faketune: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Port:
    """Return a function that ports config.yaml with a text, and further files by their names."""
    monkeypatch.chdir(tmp_path)

    def made(
        text: str = CONFIG, files: dict[str, str] | None = None, machine: str = "v5p-8", **asked: object
    ) -> Ported:
        every = {"config.yaml": text, **(files or {})}
        for name, content in every.items():
            (tmp_path / name).write_text(content, encoding="utf-8")
        return port([Path(name) for name in every], Asked(from_name(machine), **asked))  # type: ignore[arg-type]

    return made
