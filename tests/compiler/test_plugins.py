"""Test commands of `recipe` that other packages add by an entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer
import typer.main

from recipec.compiler.cli import commands
from recipec.compiler.cli.main import app
from recipec.compiler.cli.parser import AllCommands
from recipec.compiler.errors import ArtifactError


def listed(monkeypatch: pytest.MonkeyPatch, **entry_points: str) -> typer.core.TyperGroup:
    """Return the command line with these added commands alone."""
    entries = {name: EntryPoint(name, value, commands.ENTRY_POINTS) for name, value in entry_points.items()}
    monkeypatch.setattr(commands, "plugins", lambda: entries)
    group = typer.main.get_command(app)
    assert isinstance(group, AllCommands)
    return group


def test_port_is_found_by_its_entry_point() -> None:
    assert commands.plugins()["port"].value == "recipec.port.options:port"


def test_added_command_comes_last_and_has_the_flags_of_all_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    group = listed(monkeypatch, other="recipec.port.options:port")
    context = typer.Context(group)
    assert group.list_commands(context)[-1] == "other" and "port" not in group.list_commands(context)
    command = group.get_command(context, "other")
    assert {"quiet", "verbose"} <= {parameter.name for parameter in command.params}
    assert group.get_command(context, "other") is command


def test_command_of_a_missing_package_is_one_error_and_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    group = listed(monkeypatch, gone="recipec.nowhere.cli:gone")
    context = typer.Context(group)
    assert "gone" not in group.list_commands(context)
    with pytest.raises(ArtifactError, match=r"`recipe gone` is in the module recipec\.nowhere\.cli"):
        group.get_command(context, "gone")


def test_entry_points_of_an_installation_without_a_checkout_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read the metadata of an installed distribution, where no pyproject.toml is."""
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{commands.ENTRY_POINTS}]\nother = other.cli:run\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(commands, "PROJECT", tmp_path / "pyproject.toml")
    commands.plugins.cache_clear()
    try:
        assert commands.plugins()["other"].module == "other.cli"
    finally:
        commands.plugins.cache_clear()
