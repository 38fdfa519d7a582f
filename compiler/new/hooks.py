"""Files that run the checks of a repository's recipes: a GitHub Actions workflow, and pre-commit hooks."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from recipec.compiler import __version__
from recipec.compiler.errors import ArtifactError
from recipec.compiler.render import render

WORKFLOW = Path(".github", "workflows", "recipes.yml")
PRE_COMMIT = Path(".pre-commit-config.yaml")
HEAD = "# Hooks of https://pre-commit.com: `pre-commit install` has them run before each commit.\n"


def root(folder: Path) -> Path:
    """Return the git repository that contains a folder; the working folder if none does."""
    here = folder.resolve()
    for parent in (here, *here.parents):
        if (parent / ".git").exists():
            return parent
    return Path.cwd()


def workflow(recipe: Path, top: Path) -> str:
    """Return the workflow's text.

    Args:
        recipe: the new recipe, below `top`.
        top: the repository's folder.
    """
    return render("new/recipes.yml", recipes=_shell_pattern(recipe, top), version=__version__)


def pre_commit(recipe: Path, top: Path, present: str | None) -> str | None:
    """Return the text of the hooks' file with the recipes' hooks added; None if it has them already.

    Args:
        present: the file's text, None if the file does not exist.

    Raises:
        ArtifactError: when the text is not a configuration of pre-commit.
    """
    hooks = list(_hooks(recipe, top))
    yaml = _yaml(present or "")
    config: Any = {"repos": []} if present is None else _read(yaml, present)
    there = {hook.get("id") for repo in config["repos"] for hook in repo.get("hooks") or ()}
    missing = [hook for hook in hooks if hook["id"] not in there]
    if not missing:
        return None
    config["repos"].append({"repo": "local", "hooks": missing})
    text = io.StringIO()
    yaml.dump(config, text)
    return f"{'' if present else HEAD}{text.getvalue()}"


def _hooks(recipe: Path, top: Path) -> Iterator[dict[str, Any]]:
    folder = _inside(recipe, top).parent.as_posix()
    if folder == ".":
        recipes, either = f"^{re.escape(recipe.name)}$", f"^({re.escape(recipe.name)}$|generated/)"
    else:
        recipes = rf"^{re.escape(folder)}/[^/]+\.ya?ml$"
        either = f"^({re.escape(folder)}|generated)/"
    yield {
        "id": "recipe-check",
        "name": "recipe check",
        "entry": "recipe check",
        "language": "system",
        "files": recipes,
        "require_serial": True,
    }
    # The shell finds the recipes, because the hook also compares an edited artifact with its recipe.
    yield {
        "id": "recipe-build-check",
        "name": "recipe build --check",
        "entry": f"sh -c 'recipe build {_shell_pattern(recipe, top)} --check'",
        "language": "system",
        "files": either,
        "pass_filenames": False,
    }


def _shell_pattern(recipe: Path, top: Path) -> str:
    """Return a shell pattern for the recipes: all in the new one's folder; at the top, only the new one."""
    inside = _inside(recipe, top)
    folder = inside.parent.as_posix()
    if re.search(r"[^\w./-]", folder):
        raise ArtifactError(
            f"the folder {folder} has characters that a workflow's shell treats specially",
            "choose a folder of letters, digits and ._- with -o",
        )
    return inside.name if folder == "." else f"{folder}/*{recipe.suffix}"


def _inside(recipe: Path, top: Path) -> Path:
    try:
        return recipe.resolve().relative_to(top.resolve())
    except ValueError:
        raise ArtifactError(
            f"{recipe} is outside of {top}, where its checks would run", "choose a folder in it with -o"
        ) from None


def _yaml(text: str) -> Any:
    """Create a YAML reader and writer that keeps comments, quotes and the text's own indentation."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    inner = re.search(r"^[\w-]+:[^\S\n]*\n( +)[\w-]+:", text, re.M)
    match = re.search(r"^( *)-( +)repo:", text, re.M)
    offset = len(match[1]) if match else 2
    yaml.indent(
        mapping=len(inner[1]) if inner else 2,
        sequence=offset + 1 + (len(match[2]) if match else 1),
        offset=offset,
    )
    yaml.explicit_start = bool(re.search(r"^---\s*$", text, re.M))
    return yaml


def _read(yaml: Any, text: str) -> Any:
    help = "correct it, or leave --pre-commit out"
    try:
        config = yaml.load(text)
    except YAMLError as error:
        place = getattr(error, "problem_mark", None)
        where = f":{place.line + 1}:{place.column + 1}" if place is not None else ""
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise ArtifactError(f"{PRE_COMMIT}{where} is not YAML: {problem}", help) from None
    repos = config.get("repos") if isinstance(config, dict) else None
    listed = repos if isinstance(repos, list) and all(isinstance(repo, dict) for repo in repos) else None
    if listed is None or not all(
        isinstance(hook, dict) for repo in listed for hook in repo.get("hooks") or ()
    ):
        raise ArtifactError(f"{PRE_COMMIT} has no list of `repos` with hooks", help)
    return config
