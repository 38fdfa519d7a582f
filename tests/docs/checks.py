"""The check of each kind of code block."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jinja2
import yaml
from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from recipec.compiler.lower import lower
from recipec.compiler.lowering.format_keys import FIELDS
from recipec.runtime.data.formats import PARSERS, parse_preference
from recipec.runtime.data.row_values import Malformed
from recipec.spec.diagnostics import render_text
from recipec.spec.language import Recipe
from recipec.spec.load import load
from tests.docs import running, shell
from tests.docs.blocks import Block

ROOT = shell.ROOT
COLUMNS = 100
"""The width of the terminal for the pages' commands."""

SHOWN = frozenset({"text", "diff", "elisp", "lua", "html", "css", "ini", "kdl"})
"""Languages of blocks that are only shown."""

WHOLE = """\
recipe: 1
name: whole
model: {id: google/gemma-4-31B-it}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
lora: {rank: 64}
data: {train: [gs://bucket/train.jsonl]}
train: {epochs: 1, global_batch_size: 8}
"""
"""The recipe around a fragment."""


def problems(block: Block, folder: Path) -> Iterator[str]:
    """Yield the problems of a block.

    Args:
        folder: the page's folder, where commands run and files are written.
    """
    if not block.language:
        yield "a block without a language"
        return
    check = CHECKS.get(block.language)
    if check is None and block.language not in SHOWN:
        yield f"`{block.language}` is no language that the pages use"
        return
    part, _, name = block.remark.rpartition(" ")
    if "/" in name and part in ("", "from"):
        yield from _of_file(block, name, whole=not part)
        return  # the repository's own tests check it
    if check is not None:
        yield from check(block, folder)


def _of_file(block: Block, name: str, whole: bool) -> Iterator[str]:
    path = ROOT / name
    if not path.is_file():
        yield f"there is no file {name}"
        return
    text = path.read_text(encoding="utf-8")
    if (block.text != text) if whole else (_dedented(block.text) not in _dedented(text)):
        yield f"it is not what {name} has"


def _dedented(text: str) -> str:
    return re.sub(r"^[ ]+", "", text, flags=re.M)


def _yaml(block: Block, folder: Path) -> Iterator[str]:
    """Compile a recipe, or a fragment within a recipe. Another program's file must have a title."""
    try:
        value = yaml.safe_load(block.text)
    except yaml.YAMLError as error:
        yield f"not YAML: {error}"
        return
    if value is None and block.text.startswith("#"):
        return  # a comment, such as the line that names the schema
    if isinstance(value, dict) and set(value) <= set(Recipe.model_fields):
        yield from _recipe(block, folder, value)
    elif not block.title or "recipe" in (value if isinstance(value, dict) else {}):
        names = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
        yield f"neither a recipe nor a part of one, and without a title: {names}"


def _recipe(block: Block, folder: Path, value: dict[str, Any]) -> Iterator[str]:
    path = folder / (block.title or "recipe.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text, encoding="utf-8")
    begins = set(value) <= {"recipe", "name"}
    if (begins or "recipe" not in value) and "extends" not in value:
        (folder / "whole.yaml").write_text(WHOLE, encoding="utf-8")
        path.write_text(f"extends: whole.yaml\n{block.text}", encoding="utf-8")
    lowered = lower(load(path))
    if (lowered.program is None) != (block.remark == "wrong"):
        errors = [one for one in lowered.diagnostics if one.severity == "error"]
        yield render_text(errors) or "it is said to be wrong, and compiles"


def _sh(block: Block, folder: Path) -> Iterator[str]:
    """Check that commands and options exist, and run commands that can run here."""
    made: list[str] = []
    found: list[str] = []
    for words in shell.commands(block.text):
        found += shell.problems(words, made)
        made += shell.written(words)
    yield from found or running.problems(block, folder)


def _console(block: Block, folder: Path) -> Iterator[str]:
    """Check commands after `$ ` and their output. A line `...` stands for any number of lines."""
    for command, shown in session(block.text):
        found = [problem for words in shell.commands(command) for problem in shell.problems(words)]
        yield from found
        if not found and block.remark != "slow":
            printed = run(command, folder)
            if not matches(shown, printed):
                yield f"`{command}` prints:\n{printed}"


def updated(block: Block, folder: Path) -> str:
    """Return a console block with the current output. An output with `...` stays unchanged."""
    out = ""
    for command, shown in session(block.text):
        printed = _trimmed(run(command, folder))
        keep = matches(shown, printed) or re.search(r"^ *\.\.\.$", shown, re.M)
        out += f"$ {command}\n" + (shown if keep else f"{printed}\n" if printed else "")
    return out


def session(text: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a console block, each with the lines below it."""
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        lines = part.splitlines(keepends=True)
        count = next((n for n, line in enumerate(lines) if not line.endswith("\\\n")), 0) + 1
        yield "".join(lines[:count]).rstrip("\n"), "".join(lines[count:])


def run(command: str, folder: Path) -> str:
    """Run a command in a page's folder, and return its diagnostics from stderr followed by its stdout."""
    ((*words,),) = shell.commands(command)
    if words[0] == "recipe":
        environment = {"COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
        done = CliRunner().invoke(app, words[1:], env=environment)
        failed = "" if done.exception is None or isinstance(done.exception, SystemExit) else done.exception
        return f"{done.stderr}{done.stdout}{failed and f'error: {failed}'}"
    if words[0] in ("cat", "ls", "head"):
        return subprocess.run(
            words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
        ).stdout
    raise AssertionError(f"`{command}` cannot be run here: mark its block by <!-- slow -->")


def matches(shown: str, printed: str) -> bool:
    """Return whether an output matches the shown one, in which a line `...` stands for any lines."""
    parts = [re.escape(part.strip("\n")) for part in re.split(r"^ *\.\.\.$", _trimmed(shown), flags=re.M)]
    return re.fullmatch(r"(?s:.*?)".join(parts), _trimmed(printed)) is not None


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


def _python(block: Block, folder: Path) -> Iterator[str]:
    """Check that the code compiles, and that its imports from this project exist. Write the reader's file."""
    try:
        tree = ast.parse(block.text)
    except SyntaxError as error:
        yield f"not Python: {error}"
        return
    if block.title and "/" not in block.title:
        (folder / block.title).write_text(block.text, encoding="utf-8")
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.partition(".")[0] in shell.OWN_FOLDERS
        ):
            names = _names(node.module)
            if names is None:
                yield f"there is no module {node.module}"
                continue
            yield from (f"{node.module} has no `{one.name}`" for one in node.names if one.name not in names)


def _names(module: str) -> set[str] | None:
    """Return the names in a module of this project, from its source, or None without such a module."""
    path = ROOT / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    below = {one.stem for one in path.iterdir()} if path.is_dir() else set()
    if not source.exists():
        return below or None
    tree = ast.parse(source.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {
                name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
            }
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {one.asname or one.name for one in node.names}
    return found | below


def _parsed(parse: Callable[[str], Any]) -> Callable[[Block, Path], Iterator[str]]:
    def check(block: Block, folder: Path) -> Iterator[str]:
        try:
            parse(block.text)
        except Exception as error:
            yield f"not {block.language}: {error}"

    return check


def _json_with_comments(text: str) -> None:
    json.loads(re.sub(r",(\s*[}\]])", r"\1", re.sub(r"^\s*//.*$", "", text, flags=re.M)))


def _samples(block: Block, folder: Path) -> Iterator[str]:
    """Check lines of JSON. In a file named after a data format, they must be samples of that format."""
    name = block.title.removesuffix(".jsonl")
    for number, line in enumerate(block.text.splitlines(), 1):
        try:
            sample = json.loads(line)
            if name == "preference":
                parse_preference("", sample, {})
            elif name in FIELDS:
                PARSERS[name]("", sample, {})
        except (ValueError, Malformed) as error:
            yield f"line {number} is not {name or 'jsonl'}: {error}"


CHECKS: dict[str, Callable[[Block, Path], Iterator[str]]] = {
    "yaml": _yaml,
    "sh": _sh,
    "console": _console,
    "python": _python,
    "json": _parsed(json.loads),
    "jsonl": _samples,
    "jsonc": _parsed(_json_with_comments),
    "toml": _parsed(tomllib.loads),
    "jinja": _parsed(jinja2.Environment().parse),
}


def steps(printed: str) -> dict[str, str]:
    """Return what each step of `make quickstart` prints, with # for numbers and ... for paths."""
    table = printed[printed.index("\nstep ") :]
    rows = re.findall(r"^(\w+) +(?:ok|failed) +[\d.]+(?:  (.*))?$", table, re.MULTILINE)
    return {name: re.sub(r"\d[\d,.e+-]*", "#", re.sub(r"\S*/\S*", "...", figure)) for name, figure in rows}
