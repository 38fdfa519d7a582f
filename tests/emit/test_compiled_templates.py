"""Templates that are kept compiled: never another text, whatever becomes of what is kept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jinja2 import Environment, FileSystemLoader

from recipec.compiler.emitters.compiled_templates import CompiledTemplates


@pytest.fixture(autouse=True)
def bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


def said(folder: Path) -> str:
    environment = Environment(loader=FileSystemLoader(folder), bytecode_cache=CompiledTemplates(folder))
    return environment.get_template("a.j2").render(name="b")


def kept(folder: Path) -> list[Path]:
    return list((folder / "__pycache__").iterdir())


def test_what_is_kept_is_used_until_the_template_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.j2").write_text("one {{ name }}")
    assert said(tmp_path) == "one b"
    (file,) = kept(tmp_path)
    with monkeypatch.context() as without:
        without.setattr(Environment, "compile", None)
        assert said(tmp_path) == "one b"
    (tmp_path / "a.j2").write_text("two {{ name }}")
    assert said(tmp_path) == "two b" and kept(tmp_path) == [file]


@pytest.mark.parametrize("damage", [b"", b"another file", None])
def test_a_damaged_file_is_compiled_again(damage: bytes | None, tmp_path: Path) -> None:
    (tmp_path / "a.j2").write_text("one {{ name }}")
    said(tmp_path)
    (file,) = kept(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] if damage is None else damage)
    assert said(tmp_path) == "one b"
    assert kept(tmp_path) == [file] and file.read_bytes() == whole


def test_where_nothing_can_be_kept_templates_are_filled_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.j2").write_text("one {{ name }}")
    (tmp_path / "__pycache__").write_text("in the way")
    assert said(tmp_path) == "one b"
    (tmp_path / "__pycache__").unlink()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert said(tmp_path) == "one b" and not (tmp_path / "__pycache__").exists()
