"""`recipe lsp`."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, BinaryIO, cast

import typer

from recipec.compiler.cli.arguments.editors import LspArguments
from recipec.compiler.cli.guard import DONE, FAILED
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lsp.frames import Frames
from recipec.compiler.packages import install
from recipec.compiler.terminal import say


def lsp(args: LspArguments) -> None:
    """Run `recipe lsp`."""
    if find_spec("pygls") is None:
        raise ArtifactError("recipe lsp needs pygls, which is not installed", install("lsp"))
    from recipec.compiler.lsp.language_server import make_server

    if sys.stdin.isatty():
        say("note: waiting for an editor on stdin; editors start this command themselves")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines("%(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.ERROR)
    server = make_server()
    with _signals(), _stdout() as stdout:
        server.start_io(cast(BinaryIO, Frames(sys.stdin.buffer)), stdout)
    if not server.asked_to_end:
        say("error: the editor closed the connection without ending the session")
        raise typer.Exit(FAILED)
    raise typer.Exit(DONE)


LONGEST = 300
"""Letters of a line in the log."""


class _Lines(logging.Formatter):
    """A line for each message; where a fault is looked for, with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        if os.environ.get("RECIPEC_TRACEBACK"):
            return super().format(record)
        # pygls writes some tracebacks into the text itself.
        text, _, more = record.getMessage().partition("\n")
        error = record.exc_info[1] if record.exc_info else sys.exc_info()[1] if more else None
        line = f"{record.name}: {text}" + (f": {error!r}" if error is not None else "")
        return line.replace("\n", " ")[:LONGEST]


class _Channel(io.FileIO):
    """The stream to the editor. Once it cannot be written there is nobody to serve."""

    def write(self, data: Any) -> int:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[super().write(rest) or 0 :]
            return len(data)
        except OSError as error:
            say(f"error: cannot write to the editor: {error.strerror}")
            os._exit(FAILED)


@contextmanager
def _stdout() -> Iterator[BinaryIO]:
    """Yield the stream to the editor, and redirect everything that is printed to stderr."""
    sys.stdout.flush()
    try:
        number = sys.stdout.fileno()
        errors = sys.stderr.fileno()
    except (OSError, ValueError):  # no file: there is nothing to keep apart
        yield sys.stdout.buffer
        return
    kept = os.dup(number)
    os.dup2(errors, number)
    try:
        with _Channel(kept, "wb", closefd=False) as stream:
            yield cast(BinaryIO, stream)
    finally:
        os.dup2(kept, number)
        os.close(kept)


@contextmanager
def _signals() -> Iterator[None]:
    """End the process at once on a signal, because its thread that reads stdin cannot be interrupted."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda number, frame: os._exit(128 + number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
