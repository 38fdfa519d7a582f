"""The server's side of `worker.py`: one process, started again when it ends or takes too long."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import compiler
from compiler.lsp.worker import HEAD


class Unanswered(Exception):
    """There is no answer: it took too long, the process ended, or it failed."""


class Process:
    """A process that answers questions, one after another."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Starts it, before there is a question."""
        async with self._turn:
            await self._running()

    async def ask(self, seconds: float, name: str, *arguments: Any) -> Any:
        """The answer of a function of `analysis`.

        Args:
            seconds: that it may take, once its turn has come.

        Raises:
            Unanswered: with the reason.
        """
        # Were an answer left unread, because nobody waits for it any more, the next question would get it.
        return await asyncio.shield(self._ask(seconds, name, arguments))

    async def _ask(self, seconds: float, name: str, arguments: tuple[Any, ...]) -> Any:
        async with self._turn:
            process = await self._running()
            try:
                fine, answer = await asyncio.wait_for(_exchange(process, (name, arguments)), seconds)
            except TimeoutError:
                self.stop()
                raise Unanswered(f"{name} took more than {seconds:g} seconds") from None
            except (OSError, EOFError) as error:
                self.stop()
                raise Unanswered(f"the process that checks recipes ended ({error})") from None
        if not fine:
            raise Unanswered(f"{name} failed:\n{answer}")
        return answer

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "compiler.lsp.worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=_environment(os.environ),
            )
        return self._process

    def stop(self) -> None:
        """Ends it; the next question starts another."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
        self._process = None


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """With which the process finds this compiler, whatever lies in the working folder."""
    root = str(Path(compiler.__file__).parents[1])
    others = environ.get("PYTHONPATH", "")
    return {**environ, "PYTHONPATH": os.pathsep.join([root, others]) if others else root}


async def _exchange(process: asyncio.subprocess.Process, question: Any) -> tuple[bool, Any]:
    assert process.stdin is not None and process.stdout is not None
    packed = pickle.dumps(question)
    process.stdin.write(HEAD.pack(len(packed)) + packed)
    await process.stdin.drain()
    (length,) = HEAD.unpack(await process.stdout.readexactly(HEAD.size))
    fine, answer = pickle.loads(await process.stdout.readexactly(length))
    return fine, answer
