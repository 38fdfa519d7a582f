"""The process that checks and explains, and what goes to it and comes back.

A recipe can take long to check, by its size or by a regular expression in it, and the server goes on
answering meanwhile.
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
    """A recipe as the editor has it.

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
    """A repair: what it does, in words, and the text to put in place of a range."""

    title: str
    start: Position
    end: Position
    text: str


@dataclass(frozen=True)
class Checked:
    """What a check gave.

    Attributes:
        diagnostics: in the order of `recipe check`, each with its repair.
        extends: the place of what the recipe extends, in its own text.
        bases: absolute paths of the files that it extends.
    """

    diagnostics: list[tuple[Diagnostic, Fix | None]] = field(default_factory=list)
    extends: Span | None = None
    bases: frozenset[str] = frozenset()


class Process:
    """A process that answers one question after another; started again when it ended or took too long.

    Args:
        tell: takes a sentence where there is no answer.

    Attributes:
        seconds: that an answer may take, once its turn has come.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self.seconds = 30.0
        self._pool: ProcessPoolExecutor | None = None
        self._turn = asyncio.Lock()

    async def ask(self, name: str, *arguments: object) -> Any:
        """What a function of `checking.py` gives there, or None."""
        # Whoever asks may have gone before the answer is there; the next one's time begins after it.
        return await asyncio.shield(self._ask(name, arguments))

    async def _ask(self, name: str, arguments: tuple[object, ...]) -> Any:
        async with self._turn:
            if self._pool is None:
                os.environ["PYTHONSAFEPATH"] = "1"  # nothing is imported from the folder that one is in
                self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _end_with_server)
            try:
                made = asyncio.get_running_loop().run_in_executor(self._pool, _answer, name, arguments)
                return await asyncio.wait_for(made, self.seconds)
            except TimeoutError:
                self._tell(f"{name} took more than {self.seconds:g} seconds")
            except BrokenProcessPool:
                self._tell("the process that checks recipes ended, and is started again")
            except Exception as error:  # a fault of the compiler's own
                self._tell(f"{name} failed: {error!r}")
            self.stop()

    def stop(self) -> None:
        """Ends it; the next question starts another."""
        if self._pool is not None:
            for child in multiprocessing.active_children():
                child.kill()
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def _answer(name: str, arguments: tuple[object, ...]) -> object:
    """In the process: the compiler is imported there alone, which the server does not wait for."""
    return getattr(importlib.import_module("recipec.compiler.lsp.checking"), name)(*arguments)


def _end_with_server() -> None:
    """Ends this process once the server has, however that ended."""
    server = multiprocessing.parent_process()
    assert server is not None

    def wait() -> None:
        server.join()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
