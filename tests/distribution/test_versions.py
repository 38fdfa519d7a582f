"""Tests that recipec's version is in one place, and of the texts about versions."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from packaging.version import Version

from recipec.compiler import __version__, packages
from recipec.compiler.emitters.lock import compiler_name
from recipec.spec import versions
from tests.compiler.commands import recipe

ENTRY = re.compile(r"^## \[(?P<version>[^]]+)\] - (?P<date>unreleased|\d{4}-\d{2}-\d{2})$", re.M)
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}


def test_version_is_defined_in_one_place(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"] and "version" not in project["project"]
    assert ProjectMetadata(str(root), PluginManager()).version == __version__
    assert str(Version(__version__)) == __version__
    literals = [
        path.relative_to(root).as_posix()
        for package in ("spec", "compiler", "port", "templates", "runtime")
        for path in (root / package).rglob("*.py")
        if f'{__version__}"' in path.read_text(encoding="utf-8")
    ]
    assert literals == ["compiler/__init__.py"]


def test_version_command_and_compiler_name_state_the_version() -> None:
    assert recipe("--version") == (0, f"recipec {__version__}\n", "")
    assert compiler_name() == f"recipec {__version__}"


def test_changelog_starts_with_current_version_and_is_ordered(root: Path) -> None:
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = [match["version"] for match in ENTRY.finditer(text)]
    assert entries[0] == __version__
    assert entries == sorted(entries, key=Version, reverse=True) and len({*entries}) == len(entries)
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert len(headings) == len(entries), "every heading of the second level is a version with its date"
    assert {*re.findall(r"^### (.+)$", text, re.M)} <= KINDS
    assert f"reads version {versions.VERSION} of the language" in text


def test_changelog_mentions_every_command(root: Path) -> None:
    from recipec.compiler.cli.main import app

    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    names = [
        command.name or (command.callback and command.callback.__name__)
        for command in app.registered_commands
    ]
    names += [group.name for group in app.registered_groups]
    assert [name for name in names if name and f"`recipe {name}" not in text] == []


def test_versions_page_states_the_language_version(root: Path) -> None:
    text = (root / "docs" / "versions.md").read_text(encoding="utf-8")
    assert f"`recipe: {versions.VERSION}` promises what the recipe means" in text
    assert "[E0108](diagnostics.md)" in text


def test_extended_recipe_of_newer_version_gives_e0108(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("recipe: 7\nunheard_of: {key: 1}\n")
    (tmp_path / "top.yaml").write_text("recipe: 1\nextends: base.yaml\nname: later\n")
    assert recipe("check", "top.yaml") == (
        1,
        "",
        "error[E0108]: this file is of version 7 of the language: this compiler reads version 1\n"
        " --> base.yaml:1:9\n"
        "  |\n"
        "1 | recipe: 7\n"
        "  |         ^\n"
        f"  = help: {versions.UPDATE}\n"
        "\n"
        "1 error\n",
    )


@pytest.mark.parametrize("value", ["one", "1.0", ""])
def test_invalid_recipe_version_gives_e0108(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(f"recipe: {value}\nname: x\n")
    status, _, said = recipe("check", "a.yaml")
    assert status == 1 and "error[E0108]: this compiler reads version 1 of the language\n" in said
    assert "= help: recipe: 1\n" in said


def test_set_cannot_change_the_recipe_version(root: Path) -> None:
    status, _, said = recipe("check", root / "recipes" / "quickstart.yaml", "--set", "recipe=2")
    assert status == 1 and said.startswith(
        "error[E0108]: `recipe` is set to 2: this compiler reads version 1 of the language\n --> --set:1:8\n"
    )
    assert "= help: leave it out: a file says its own version\n" in said


def test_changelog_mentions_every_extra(root: Path) -> None:
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    assert {name for name in extras if f"`{name}`" not in text} <= {"dev", "docs"}


EXTRAS = (
    re.compile(r"(?:\.|recipec|\.whl)\[([a-z,]+)\]"),
    re.compile(r"[Ee]xtras? (?:are |add the rest: )?((?:`[a-z]+`[^`.]*)+)"),
)
"""Where a text names extras: `pip install '.[train,plan]'`, or in prose."""


def test_texts_name_only_extras_that_exist(root: Path) -> None:
    """A name that pip does not know installs nothing, with a warning."""
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = [root / "README.md", root / "CONTRIBUTING.md", root / "Makefile", *(root / "docs").glob("*.md")]
    files += [
        *(root / "templates").rglob("*.j2"),
        *(root / "compiler").rglob("*.py"),
        *(root / "port").rglob("*.py"),
    ]
    named = {
        (path.name, name)
        for path in files
        for pattern in EXTRAS
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
        for name in re.findall(
            r"[a-z]+", match[1] if "`" not in match[1] else ",".join(re.findall("`(.+?)`", match[1]))
        )
    }
    assert {file for file, _ in named} >= {"README.md", "Makefile", "start.md", "versions.md", "planning.md"}
    assert {(file, name) for file, name in named if name not in extras["optional-dependencies"]} == set()


def test_pages_and_makefile_name_the_same_extras_as_pyproject(root: Path) -> None:
    def text(name: str) -> str:
        return (root / name).read_text(encoding="utf-8")

    project = tomllib.loads(text("pyproject.toml"))["project"]["optional-dependencies"]
    readme = re.search(r"^The extras are (.+?)\. `make", text("README.md"), re.M | re.S)
    makefile = re.search(r"--editable '\.\[([a-z,]+,dev)\]'", text("Makefile"))
    table = text("docs/versions.md").partition("| Extra | For |\n|---|---|\n")[2].partition("\n\n")[0]
    dependencies = text("docs/architecture.md").partition("\n## Dependencies\n")[2]
    headings = re.findall(r"^.+:$", dependencies.partition("Written by hand")[0], re.M)
    assert readme and makefile
    users = {*project} - {"docs", "dev"}
    assert {*re.findall(r"`([a-z]+)` \(", readme[1])} == users
    assert {*makefile[1].split(",")} == {*project}
    assert {*re.findall(r"^\| `([a-z]+)` \|", table, re.M)} == users
    assert {*re.findall(r"`([a-z]+)`(?=[,)])", " ".join(headings))} == {*project}


def test_build_backend_pin_equals_installed_hatchling(root: Path) -> None:
    wanted = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    assert wanted == [f"hatchling=={metadata.version('hatchling')}"], (
        "the wheel's bytes name the backend's version"
    )


@pytest.mark.parametrize(
    ("marker", "command"),
    [
        ("clone/pyproject.toml", "env/bin/python -m pip install -e 'clone[train,plan]'"),
        ("env/pipx_metadata.json", "pipx runpip env install 'recipec[train,plan]'"),
        ("env/uv-receipt.toml", "uv pip install --python env/bin/python 'recipec[train,plan]'"),
        ("env/pyvenv.cfg", "env/bin/python -m pip install 'recipec[train,plan]'"),
    ],
)
def test_install_hint_matches_how_recipec_was_installed(
    marker: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / marker).parent.mkdir()
    (tmp_path / marker).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(packages, "ROOT", tmp_path / "clone")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "bin" / "python"))
    assert packages.install("train", "plan") == command
