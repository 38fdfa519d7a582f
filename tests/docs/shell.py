"""Checks of the pages' command lines with the real parser, without running them."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
import tomllib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from typer.main import get_command

from recipec.compiler.cli.main import app

ROOT = Path(__file__).resolve().parents[2]

OTHERS = {"cat", "cd", "cp", "curl", "docker", "export", "gcloud", "git", "head", "kubectl", "ls", "mkdir"}
OTHERS |= {"pipx", "pre-commit", "sed", "sky", "source", "ssh", "tar", "tensorboard", "uv", "wandb"}
"""Programs that a page may name besides this project's own."""

OWN_FOLDERS = (
    *("recipec", "recipes", "scripts", "spec", "compiler", "port", "templates", "runtime", "tests"),
    "docs",
)
SCRIPTS = {
    "train.py": ("training/script_arguments.py", "settings.py", "training/session.py"),
    "merge.py": ("merging/merge.py",),
    "probe.py": ("probe/probe.py",),
    "train_trl.py": ("training/script_arguments.py", "backends/backend_arguments.py", "backends/trl"),
    "train_torchax.py": (
        "training/script_arguments.py",
        "backends/backend_arguments.py",
        "training/session.py",
    ),
}
"""Scripts of an artifact, and the files of runtime/ that read their options."""

_SEPARATORS = frozenset({"|", "||", "&&", ";", "&"})
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.S)
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*|.*[\[\]|<>].*|\.\.\.")
"""A word that the reader replaces."""


class Words(list[str]):
    """The words of a command.

    Attributes:
        into: the file that its output goes to, or "".
    """

    into = ""


def commands(text: str) -> Iterator[Words]:
    """Yield the commands of a shell script, with pipes and lists split."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words = Words()
        redirected = ""
        for token in lexer:
            if token in _SEPARATORS:
                yield from [words] if words else []
                words, redirected = Words(), ""
            elif set(token) <= set("<>&"):
                redirected = token
            elif redirected:
                words.into = token if redirected == ">" else words.into
                redirected = ""
            else:
                words.append(token)
        yield from [words] if words else []


def problems(words: Sequence[str], made: Collection[str] = ()) -> Iterator[str]:
    """Yield the problems of a command.

    Args:
        made: files that earlier commands have written.
    """
    words = list(words)
    while words and _ASSIGNMENT.fullmatch(words[0]):
        words.pop(0)
    if not words:
        return
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    yield from _missing_files(words, made)
    if program == "recipe":
        yield from recipe(arguments)
    elif program == "make":
        yield from (f"`make {name}`: no such target" for name in arguments if _is_no_target(name))
    elif re.fullmatch(r"python(3(\.\d+)?)?", Path(program).name):
        yield from _python(arguments)
    elif program == "pip":
        yield from _pip(arguments)
    elif program.endswith((".sh", "/bin/python")) or program in OTHERS:
        return
    else:
        yield f"`{program}` is no program that the pages may name"


@functools.cache
def _command() -> Any:
    return get_command(app)


def recipe(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the real parser's errors about `recipe ARGUMENTS`, without running anything."""
    command = _command()
    context = None
    rest = list(arguments)
    name = "recipe"
    try:
        while True:
            with contextlib.redirect_stdout(io.StringIO()):  # --help prints
                context = command.make_context(name, rest, parent=context)
            if not hasattr(command, "resolve_command"):
                return
            left = [*context._protected_args, *context.args]
            if not left:
                return
            found, command, rest = command.resolve_command(context, left)
            name = found or ""
    except Exception as error:  # the parser's own errors, whose names depend on typer
        if getattr(error, "exit_code", 1):
            message = str(getattr(error, "message", None) or error).partition("\n")[0]
            yield f"`recipe {shlex.join(arguments)}`: {message}"


def mentioned(text: str) -> Iterator[str]:
    """Yield the problems of a command in running text, or of a usage: `recipe plan RECIPE [--json]`."""
    words = re.split(r"[\s\[\]|]+", text)[1:]
    command = _command()
    context = command.make_context("recipe", [], resilient_parsing=True)
    for word in words:
        if not hasattr(command, "get_command") or not word or word.startswith("-"):
            break
        subcommand = command.get_command(context, word)
        if subcommand is None:
            if not PLACEHOLDER.fullmatch(word):
                yield f"`{text}`: `recipe` has no command `{word}`"
            return
        command = subcommand
    known = {name for parameter in command.get_params(context) for name in parameter.opts}
    for word in words:
        option = re.match(r"--?[a-z][a-z-]*", word)
        if option and option[0] not in known:
            yield f"`{text}`: no option `{option[0]}`"


def written(words: Sequence[str]) -> list[str]:
    """Return the files that a command writes and that later commands may name."""
    words = [word for word in words if not word.startswith("-")]
    new = len(words) > 2 and words[0].endswith("recipe") and words[1] == "new"
    return [f"recipes/{words[2]}.yaml"] if new else []


def _missing_files(words: Sequence[str], made: Collection[str]) -> Iterator[str]:
    for word in words:
        if word in made:
            continue
        ours = word.partition("/")[0] in OWN_FOLDERS and "/" in word and not re.search(r"[*A-Z{$]", word)
        if ours and not (ROOT / word.partition("::")[0]).exists():
            yield f"there is no file {word}"


def _is_no_target(name: str) -> bool:
    if name.startswith("-") or "=" in name:
        return False
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return not re.search(rf"^{re.escape(name)}:", makefile, re.M)


def _python(arguments: Sequence[str]) -> Iterator[str]:
    if not arguments or arguments[0] == "-c":
        return
    if arguments[0] == "-m":
        module = arguments[1]
        ours = module.partition(".")[0] in OWN_FOLDERS
        path = ROOT / module.replace(".", "/")
        if ours and not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            yield f"there is no module {module}"
        return
    script = Path(arguments[0]).name
    if script not in SCRIPTS:
        if not (ROOT / arguments[0]).exists():
            yield f"there is no script {arguments[0]}"
        return
    known = script_options(script)
    for word in arguments[1:]:
        option = re.match(r"--[a-z-]+", word)
        if option and option[0] not in known:
            yield f"{script} has no option {option[0]}"


def script_options(script: str) -> set[str]:
    """Return the options of an artifact's script, from the source that reads them."""
    folder = ROOT / "runtime"
    files = [folder / name for name in SCRIPTS[script]]
    sources = [one for file in files for one in (file.rglob("*.py") if file.is_dir() else [file])]
    text = "".join(file.read_text(encoding="utf-8") for file in sources)
    return set(re.findall(r'"(--[a-z-]+)"', text))


def _pip(arguments: Sequence[str]) -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in arguments:
        named = re.search(r"\[([a-z,]+)\]", word)
        for extra in named[1].split(",") if named and word.startswith((".", "recipec", "dist/")) else ():
            if extra not in project["optional-dependencies"]:
                yield f"`{word}`: there is no extra `{extra}`"
