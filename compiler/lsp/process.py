"""The process that checks and explains, and the data exchanged with it.

Checking a recipe can take long, because of its size or of a regular expression in it. The server stays
responsive meanwhile.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

from recipec.spec.diagnostics import Diagnostic, Span

Position = tuple[int, int]
"""Line and column, from 0; a column is a character."""


@dataclass(frozen=True)
class EditorDocument:
    """A recipe as the editor holds it.

    Attributes:
        path: absolute.
        text: its content.
        unsaved: contents of other open documents, by absolute path.
    """

    path: str
    text: str
    unsaved: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Fix:
    """A repair: a description, and the text that replaces a range."""

    title: str
    start: Position
    end: Position
    text: str


@dataclass(frozen=True)
class Checked:
    """The result of a check.

    Attributes:
        diagnostics: in the order of `recipe check`, each with its repair.
        extends: position of the `extends` value in the recipe's own text.
        bases: absolute paths of the files that it extends.
    """

    diagnostics: list[tuple[Diagnostic, Fix | None]] = field(default_factory=list)
    extends: Span | None = None
    bases: frozenset[str] = frozenset()


class Process:
    """A process that answers one question after another. It is restarted if it ended or took too long.

    Args:
        tell: called with a sentence if there is no answer.

    Attributes:
        seconds: how long an answer may take, once its turn has come.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self.seconds = 30.0
        self._pool: ProcessPoolExecutor | None = None
        self._turn = asyncio.Lock()

    async def ask(self, name: str, *arguments: object) -> Any:
        """Return the result of a function of `checking.py` in the process, or None."""
        # The caller may stop waiting before the answer arrives. The next question's time starts after it.
        return await asyncio.shield(self._ask(name, arguments))

    async def _ask(self, name: str, arguments: tuple[object, ...]) -> Any:
        async with self._turn:
            if self._pool is None:
                os.environ["PYTHONSAFEPATH"] = "1"  # import nothing from the working folder
                self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _end_with_server)
            try:
                future = asyncio.get_running_loop().run_in_executor(self._pool, _answer, name, arguments)
                return await asyncio.wait_for(future, self.seconds)
            except TimeoutError:
                self._tell(f"{name} took more than {self.seconds:g} seconds")
            except BrokenProcessPool:
                self._tell("the process that checks recipes ended, and is started again")
            except Exception as error:  # a bug of the compiler
                self._tell(f"{name} failed: {error!r}")
            self.stop()

    def stop(self) -> None:
        """End the process; the next question starts another."""
        if self._pool is not None:
            for child in multiprocessing.active_children():
                child.kill()
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def _answer(name: str, arguments: tuple[object, ...]) -> object:
    """Answer a question. Runs in the process, so that the server need not import the compiler."""
    return getattr(importlib.import_module("recipec.compiler.lsp.checking"), name)(*arguments)


def _end_with_server() -> None:
    """End this process once the server has ended, for whatever reason."""
    server = multiprocessing.parent_process()
    assert server is not None

    def wait() -> None:
        server.join()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
