"""Tests of the cache of compiled templates: it never changes a text, whatever happens to the cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jinja2 import Environment

from recipec.compiler.emitters import render


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use a template folder with only a.j2."""
    (tmp_path / "a.j2").write_text("one {{ name }}")
    monkeypatch.setattr(render, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    yield tmp_path
    render._environment.cache_clear()


def said() -> str:
    """Render as a new process would."""
    render._environment.cache_clear()
    return render.render("a", name="b")


def kept(folder: Path) -> list[Path]:
    return list((folder / "__pycache__").iterdir())


def test_template_cache_is_used_until_the_template_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said() == "one b"
    (file,) = kept(folder)
    with monkeypatch.context() as without:
        without.setattr(Environment, "compile", None)
        assert said() == "one b"
    (folder / "a.j2").write_text("two {{ name }}")
    assert said() == "two b" and kept(folder) == [file]


@pytest.mark.parametrize("damage", [b"", b"another file", None])
def test_damaged_template_cache_file_is_recompiled(damage: bytes | None, folder: Path) -> None:
    said()
    (file,) = kept(folder)
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] if damage is None else damage)
    assert said() == "one b"
    assert kept(folder) == [file] and file.read_bytes() == whole


def test_templates_render_when_cache_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "__pycache__").write_text("in the way")
    assert said() == "one b"
    (folder / "__pycache__").unlink()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert said() == "one b" and not (folder / "__pycache__").exists()
