"""Tests of what `recipe new --github --pre-commit` writes into a repository."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from recipec.compiler import __version__
from recipec.compiler.cli.main import app
from recipec.compiler.errors import ArtifactError
from recipec.compiler.new import hooks

RECIPE = ("--model", "google/gemma-3-1b-it", "--accelerator", "v6e-1")

THEIRS = """\
# The team's hooks.
default_language_version:
    python: "3.11"   # as in CI
repos:
-   repo: https://github.com/pre-commit/pre-commit-hooks
    rev: v5.0.0      # pinned
    hooks:
    -   id: check-yaml
        args: ['--unsafe']
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / ".git").mkdir()
    (tmp_path / "team").mkdir()
    monkeypatch.chdir(tmp_path / "team")
    return tmp_path


def new(name: str, *words: str) -> Result:
    return CliRunner().invoke(app, ["new", name, *RECIPE, *words])


def test_workflow_matches_github_schema_and_checks_recipes(repository: Path) -> None:
    assert new("demo", "--github").exit_code == 0
    text = (repository / ".github/workflows/recipes.yml").read_text()
    # The package is on no index: its name would install whatever somebody else publishes there.
    assert 'pip install "${RECIPEC_PACKAGE:?' in text and "${{ vars.RECIPEC_PACKAGE }}\n" in text
    assert f"source of recipec {__version__} " in text
    assert "recipe check team/recipes/*.yaml\n" in text
    assert "recipe build team/recipes/*.yaml --check\n" in text
    place = files("check_jsonschema.builtin_schemas") / "vendor" / "github-workflows.json"
    schema = json.loads(place.read_text(encoding="utf-8"))
    # A YAML 1.2 reader, in which `on` is text.
    jsonschema.Draft7Validator(schema).validate(YAML(typ="safe").load(text))


def test_pre_commit_hooks_are_written_once(repository: Path) -> None:
    config = repository / ".pre-commit-config.yaml"
    assert new("demo", "--pre-commit").exit_code == 0
    text = config.read_text()
    assert text.startswith("# Hooks of") and "files: ^team/recipes/" in text
    result = new("other", "--pre-commit", "--github")
    assert result.exit_code == 0 and config.read_text() == text
    assert "extended" not in result.output


def test_existing_pre_commit_config_is_only_appended_to(repository: Path) -> None:
    config = repository / ".pre-commit-config.yaml"
    config.write_text(THEIRS)
    result = new("demo", "--pre-commit")
    assert result.exit_code == 0 and ".pre-commit-config.yaml: extended" in result.output
    text = config.read_text()
    assert text.startswith(THEIRS)
    assert text[len(THEIRS) :].startswith("-   repo: local\n    hooks:\n    -   id: recipe-check\n")
    assert [repo["repo"] for repo in YAML(typ="safe").load(text)["repos"]][1:] == ["local"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"repos: [", "is not YAML"),
        (b"repos: 3\n", "no list of `repos`"),
        (b"\xff\xfe\x00", "is not UTF-8"),
    ],
)
def test_broken_pre_commit_config_is_refused_and_unchanged(
    repository: Path, content: bytes, said: str
) -> None:
    config = repository / ".pre-commit-config.yaml"
    config.write_bytes(content)
    result = new("demo", "--pre-commit")
    assert result.exit_code == 1 and said in str(result.exception)
    assert config.read_bytes() == content and not (repository / "team/recipes").exists()


def test_existing_workflow_with_other_content_is_kept(repository: Path) -> None:
    workflow = repository / ".github/workflows/recipes.yml"
    workflow.parent.mkdir(parents=True)
    workflow.write_text("name: mine\n")
    result = new("demo", "--github")
    assert result.exit_code == 0 and "exists with other content" in result.output
    assert workflow.read_text() == "name: mine\n"


def test_workflow_refuses_folder_with_spaces_or_outside_repository(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="characters"):
        hooks.workflow(tmp_path / "my recipes" / "a.yaml", tmp_path)
    with pytest.raises(ArtifactError, match="outside"):
        hooks.workflow(tmp_path / "a.yaml", tmp_path / "inner")
    assert "recipe check a.yaml\n" in hooks.workflow(tmp_path / "a.yaml", tmp_path)
