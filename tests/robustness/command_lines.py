"""Command lines for fuzzing: real commands, options and values in any order, and noise."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import typer
from hypothesis import strategies as st
from recipe_texts import settings
from typer.main import get_command

from recipec.compiler.cli import main as cli

NOISE = (
    *("", "-", "--", "---", "-x", "-xyz", "--wrong", "--set", "--set=", "-o", "-o=", "=", "x", "ü", "🙂"),
    *("\udcff", "\x1b[2J", "\n", "a b", "'", '"', "*", "~", "~nobodysuch", ".", "..", "/", "0", "-1"),
    *("1e309", "nan", "9" * 40, "true", "null", "--help", "-h", "--version", "-q", "-v", "--quiet=1"),
    *("--no-check", "--format=xml", "@good.yaml"),
)
VALUES = (
    *("1", "0", "-1", "12", "0.5", "nan", "1e400"),
    *("text", "json", "markdown", "tunix", "trl", "v5e-8", "v9", "lora"),
)
MODELS = ("google/gemma-3-270m-it", "recipec/tiny-gemma4", "no/such", "")


def command_lines(files: list[str]) -> st.SearchStrategy[list[str]]:
    """Generate arguments of `recipe`: each command with its own options, and with others'.

    Args:
        files: names of good and bad files, used where files are expected and elsewhere.
    """
    tree = dict(_commands(_command(cli.app), ()))
    every = sorted({option for options in tree.values() for option in options})
    word = st.one_of(
        st.sampled_from(files),
        st.sampled_from(files),
        st.sampled_from(NOISE),
        st.sampled_from(VALUES),
        st.sampled_from(MODELS),
        settings(),
    )

    @st.composite
    def lines(draw: st.DrawFn) -> list[str]:
        if draw(st.integers(0, 19)) == 0:
            return draw(st.lists(word, max_size=4))
        name = draw(st.sampled_from(sorted(tree)))
        line = list(name)
        for _ in range(draw(st.integers(0, 4))):
            kind = draw(st.integers(0, 3))
            if kind < 2:
                line.append(draw(st.sampled_from(files)))
            elif kind == 2 and (own := tree[name]):
                line += [draw(st.sampled_from(own)), draw(word)]
            else:
                line.append(draw(st.one_of(word, st.sampled_from(every))))
        return line

    return lines()


def _commands(group: Any, name: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield every command's words and its options."""
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*name, word))
        else:
            options = [option for param in command.params for option in getattr(param, "opts", [])]
            yield (*name, word), [option for option in options if option.startswith("-")]


WORK = (
    *("plan.session.run", "plan.session.plan_run", "cli.plan.compare", "rehearse.rehearse.rehearse"),
    *("parity.run.parity", "explain.preview.preview", "serving.compose.up", "serving.compose.down"),
    *("serving.verify.verify", "port.plan.plan", "lsp.server.make_server"),
    *("watch.screen.watch_lines", "watch.screen.watch_screen"),
)
"""Functions of recipec.compiler that train, compile, serve or do not end. Each ends the command."""


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
            stack.enter_context(mock.patch(f"recipec.compiler.{name}", instead(name)))
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
