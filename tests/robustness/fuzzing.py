"""Random recipes and command lines for any number of cases: nearly valid ones, and noise."""

from __future__ import annotations

import functools
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
import yaml
from examine import Case, examine
from inside import RECIPE, fill, recipe
from typer.main import get_command

from recipec.compiler.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
TEXTS = tuple(
    file.read_text(encoding="utf-8", errors="replace").replace("gemma-4-31B-it", "gemma-3-270m-it")
    for file in sorted((ROOT / "tests" / "golden").glob("*/recipe.yaml"))
    if file.stat().st_size < 3000
)
MORE = """
checkpoint: {directory: gs://bucket/run}
serve: {tensor_parallel_size: 4, extra_args: {seed: 1}, env: {A: b}}
"""
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 10**9, 10**30, 0.5, -0.0, 1e308, 1e-320),
    *("", " ", "x", "null", "~", "~nobodysuch/x", ".", "..", "../x", "/etc/passwd", "a/../../b", "a\0b"),
    *("a\nb", "\x1b[2J", "\u2028", "\u202e", "\ufeff", "ü", "日本", "🙂", "(a+)+$", "[", "\\", "%s"),
    *("{{ x }}", "$(x)", "`x`", '"""', "#", ": ", "&a", "*a", "!!int", "gs://", "hf://", "file:///x"),
    *("v5p-8", "v5p:0x0x0", "cpu-0", "cpu-999999999", "1e3", "0x10", "inf", "5GB", "-5GB", "9" * 400 + "GB"),
    *("recipec/tiny-gemma4", "no/such-model", "a/" * 2000, [], {}, [None], [[]], {"": ""}, {"a.b": 1}),
)
"""Values that replace expected ones."""
PIECES = (
    *(": ", "- ", "? ", ", ", "&a ", "*a", "!!python/object:os.system ", "<<: ", "{", "}", "[", "]"),
    *("|-\n", " #", "%YAML 1.1\n", "---\n", "...\n", "\t", "\n", "\r\n", "\0", "\x1b[31m", "\x85", "\u2028"),
    *("🙂", "1e999", ".inf", ".nan", "2001-01-01", "[" * 50, "{a: " * 40, "9" * 5000, "extends: base.yaml\n"),
    *("extends: recipe.yaml\n", "recipe: 2\n", '"\\ud800"', '"\\x1b[2J"', "hf_" + "a" * 30, "${env:TOKEN}"),
)
"""Pieces that are inserted into a recipe's text."""


def changed(draw: random.Random) -> bytes:
    """Return a recipe with up to three values replaced, removed or renamed, as YAML."""
    tree = yaml.safe_load(RECIPE + MORE)
    for _ in range(draw.randint(0, 3)):
        places = list(_places(tree))
        if not places:
            break
        inside, key = draw.choice(places)
        how = draw.choice(["odd", "odd", "remove", "rename"])
        if how == "odd":
            inside[key] = draw.choice(ODD)
        else:
            value = inside.pop(key)
            if how == "rename" and isinstance(inside, dict):
                inside[f"{key[:-1]}x"] = value
    return yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass")


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Return every key and index, with its mapping or list."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def tampered(draw: random.Random) -> bytes:
    """Return a recipe's text with pieces inserted, removed and repeated."""
    text = draw.choice(TEXTS)
    for _ in range(draw.randint(1, 4)):
        at, length = draw.randint(0, len(text)), draw.randint(1, 40)
        part = draw.choice([draw.choice(PIECES), "", text[at : at + length] * 2])
        text = text[:at] + part + text[at + draw.choice([0, length]) :]
    return text.encode("utf-8", "surrogatepass")


def setting(draw: random.Random) -> str:
    """Return an argument of `--set`."""
    paths = ("name", "train.steps", "lora.rank", "data.train[0].path", "mesh.axes.fsdp", "a[", "lora..rank")
    return f"{draw.choice(paths)}{draw.choice(['=', '=', ' = ', ''])}{draw.choice([*PIECES, *map(str, ODD)])}"


def fuzz_language(count: int, folder: Path, patch: pytest.MonkeyPatch) -> Counter[frozenset[str]]:
    """Try `count` recipes, and return how often each set of diagnostics occurred.

    Raises:
        AssertionError: an invariant does not hold for a recipe.
    """
    patch.chdir(folder)
    (folder / "train.jsonl").write_text('{"conversation": [1, 2]}\nnot json\n[]\n"x"\n')
    outcomes: Counter[frozenset[str]] = Counter()
    for seed in range(count):
        draw = random.Random(seed)
        made = draw.choice([changed, changed, tampered])(draw)
        base = tampered(draw) if draw.random() < 0.2 else None
        sets = tuple(setting(draw) for _ in range(draw.choice([0, 0, 0, 2])))
        case = Case(b"extends: base.yaml\n" + made if base else made, base, sets)
        outcomes[examine(folder, case)] += 1
    return outcomes


NOISE = (
    *("", "-", "--", "-x", "--wrong", "--set", "--set=", "-o", "=", "x", "ü", "\udcff", "\x1b[2J", "\n"),
    *("'", "*", "~nobodysuch", "..", "/", "0", "-1", "1e309", "nan", "9" * 40, "null", "--help", "--version"),
    *("-q", "--no-check", "--format=xml", "@good.yaml", "text", "json", "tunix", "trl", "v5e-8", "lora"),
    *("google/gemma-3-270m-it", "recipec/tiny-gemma4", "no/such"),
)
LEFT_OUT = ("web", "huge", "long path", "zero", "full")
"""Kinds of files that take long, or that a bug could delete."""


def fuzz_commands(count: int, folder: Path, patch: pytest.MonkeyPatch) -> Counter[tuple[str, int, bool]]:
    """Try `count` command lines, and count each command's exit statuses, at its work or before.

    Raises:
        AssertionError: one ended without a sentence and 0, 1 or 2, or wrote elsewhere.
    """
    patch.chdir(folder)
    for name in ("HOME", "XDG_CACHE_HOME", "RECIPEC_CACHE", "TMPDIR"):
        (folder / name.lower()).mkdir()
        patch.setenv(name, str(folder / name.lower()))
    patch.setattr("tempfile.tempdir", str(folder / "tmpdir"))
    kinds = fill(folder)
    files = ["good.yaml"] * 8 + [name for kind, name in kinds.items() if kind not in LEFT_OUT]
    tree = dict(_commands(_command(cli.app), ()))
    outcomes: Counter[tuple[str, int, bool]] = Counter()
    writes = Writes(folder)
    for seed in range(count):
        line = _line(random.Random(seed), tree, files)
        worked: list[str] = []
        (folder / "good.yaml").unlink(missing_ok=True)
        (folder / "good.yaml").write_text(RECIPE, encoding="utf-8")  # an earlier line may have replaced it
        writes.watching = True
        try:
            with without_work(worked):
                done = recipe(*line)
        finally:
            writes.watching = False
        assert not done.faults(), f"{line!a}: {done.faults()}: {done.err!a}"
        assert not writes.outside, f"{line!a}: {writes.outside}"
        assert os.getcwd() == str(folder)
        outcomes[line[0] if line else "", done.status, bool(worked)] += 1
    return outcomes


def _line(draw: random.Random, tree: dict[tuple[str, ...], list[str]], files: list[str]) -> list[str]:
    """Return a command with files, its own options, and noise."""

    def word() -> str:
        return draw.choice([draw.choice(files), draw.choice(NOISE), setting(draw)])

    name = draw.choice(sorted(tree)) if draw.random() < 0.95 else ()
    line = list(name)
    for _ in range(draw.randint(0, 4)):
        kind = draw.randint(0, 3)
        if kind < 2:
            line.append(draw.choice(files))
        elif kind == 2 and tree.get(name):
            line += [draw.choice(tree[name]), word()]
        else:
            line.append(word())
    return line


def _commands(group: Any, name: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield every command's words and its options."""
    context = typer.Context(group)
    for word in group.list_commands(context):
        command = group.get_command(context, word)
        if hasattr(command, "commands"):
            yield from _commands(command, (*name, word))
        else:
            options = [option for param in command.params for option in getattr(param, "opts", [])]
            yield (*name, word), [option for option in options if option.startswith("-")]


WORK = (
    *("compiler.plan.plan_session.run", "compiler.plan.plan_session.plan_run", "compiler.cli.diff.compare"),
    *("compiler.cli.rehearse.rehearsed", "compiler.cli.parity.compared"),
    *("compiler.cli.serve.started", "compiler.cli.serve.stopped", "compiler.cli.serve.verified"),
    *("compiler.cli.preview.previewed", "port.cli.plan", "compiler.lsp.language_server.make_server"),
    *("compiler.watch.watch.watch_lines", "compiler.watch.watch.watch_screen"),
)
"""Functions of recipec that train, compile, serve or do not end. Each ends the command."""


@contextmanager
def without_work(done: list[str]) -> Iterator[None]:
    """Replace the functions in WORK by stubs that add their name to `done` and end the command."""

    def instead(name: str) -> Any:
        def stub(*_: Any, **__: Any) -> Any:
            done.append(name)
            raise typer.Exit(0)

        return stub

    with ExitStack() as stack:
        stack.enter_context(mock.patch("typer.main.get_command", _command))
        for name in WORK:
            stack.enter_context(mock.patch(f"recipec.{name}", instead(name)))
        yield


@functools.cache
def _command(app: typer.Typer) -> Any:
    """Build the command once, because building takes a tenth of a second."""
    return get_command(app)


EVENTS = {"open", *(f"os.{name}" for name in ("mkdir", "remove", "rename", "rmdir", "chmod"))}


class Writes:
    """A record of what this process writes, creates or removes outside of a folder."""

    def __init__(self, folder: Path) -> None:
        self.inside = str(folder)
        self.outside: list[str] = []
        self.watching = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watching or event not in EVENTS:
            return
        if event == "open" and not (
            isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        ):
            return
        for path in arguments[:2] if event == "os.rename" else arguments[:1]:
            if isinstance(path, str | bytes | os.PathLike):
                real = os.path.abspath(os.fsdecode(path))
                if (
                    not real.startswith((self.inside, "/dev/null", "/proc/self"))
                    and "__pycache__" not in real
                ):
                    self.outside.append(f"{event} {real}")
