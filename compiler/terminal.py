"""The terminal output of `recipe`: verbosity, colors, and the message after Ctrl-C.

Errors and requested results are always printed. --quiet omits warnings, notes, progress and the list of
written files. --verbose adds what the command is doing. --notes prints the notes on a recipe in full.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from recipec.runtime import progress
from recipec.runtime.progress import Progress
from recipec.spec.diagnostics import printable

if TYPE_CHECKING:
    from rich.console import Console

NOTHING = "nothing was written"
INTERRUPTED = 130
Item = TypeVar("Item")

log = logging.getLogger("recipe")
"""The logger for --verbose: what the command is doing."""


@dataclass
class Manner:
    """The output settings of one run of the command.

    Attributes:
        quiet, verbose, notes: the flags of the same names; quiet is set without the others.
        kept: a clause for the message after Ctrl-C that says what is already on disk, or a function that
            returns it; None where the command prints this message itself.
        started: when the run began, by time.monotonic.
    """

    quiet: bool = False
    verbose: bool = False
    notes: bool = False
    kept: str | Callable[[], str] | None = NOTHING
    started: float = 0.0


manner = Manner()


class Commands(TyperGroup):
    """The commands of `recipe`. Each takes --quiet and --verbose, and Ctrl-C prints what was kept.

    Those that check a recipe, which have --set, also take --notes.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        add_flags(self)

    def make_context(self, *args: Any, **settings: Any) -> Any:
        _begin()
        return super().make_context(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            kept = manner.kept() if callable(manner.kept) else manner.kept
            if kept is not None:
                say(f"\ninterrupted: {kept}")
            raise typer.Exit(INTERRUPTED) from None
        finally:
            log.info("%.2f s in all", time.monotonic() - manner.started)
            _unlog()


def on_ctrl_c(kept: str | Callable[[], str] | None) -> None:
    """Set what the message after Ctrl-C says from now on (see Manner.kept)."""
    manner.kept = kept


def say(text: str) -> None:
    """Print to stderr what the user has to read, even with --quiet."""
    print(printable(text), file=sys.stderr)


def note(text: str) -> None:
    """Print a note to stderr, unless --quiet is set."""
    if not manner.quiet:
        say(text)


def tell(text: str) -> None:
    """Print to stdout what was done, unless --quiet is set. Requested results use `result` instead."""
    if not manner.quiet:
        result(text)


def result(text: str, end: str = "\n") -> None:
    """Print a requested result to stdout, without characters that could control a terminal: recipes and file
    names may contain any character."""
    print(printable(text), end=end)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Log, with --verbose, how long a block took."""
    start = time.monotonic()
    yield
    log.info("%s: %.2f s", what, time.monotonic() - start)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay signals that would end the command until the block ends.

    The block must be short. It moves files, either all of them or none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: seen.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) not in (signal.SIG_IGN, None)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if seen:
        signal.raise_signal(seen[0])


def color(stream: Any) -> bool:
    """Return whether a stream takes colors.

    NO_COLOR switches them off (https://no-color.org). FORCE_COLOR switches them on, also in pipes
    (https://force-color.org). Otherwise only a terminal has colors.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def console(stream: Any = None, width: int | None = None) -> Console:
    """Return a rich console that uses colors where `color` allows them, and writes no other escape codes into
    pipes.

    Args:
        stream: stdout if None.
        width: columns where the stream is not a terminal; if None, COLUMNS and rich decide.
    """
    from rich.console import Console

    stream = stream or sys.stdout
    terminal, colored = bool(stream.isatty()), color(stream)
    return Console(
        file=stream,
        highlight=False,
        force_terminal=terminal,
        no_color=not colored,
        color_system="standard" if colored and not terminal else "auto",
        width=None if terminal else width,
    )


def columns(stream: Any = None) -> int | None:
    """Return the columns of a stream, of stdout if None; None if it is not a terminal."""
    stream = stream or sys.stdout
    return console(stream).width if stream.isatty() else None


def _begin() -> None:
    manner.__init__()  # type: ignore[misc]
    manner.started = time.monotonic()
    progress.silent = False
    _unlog()


def add_flags(command: Any) -> None:
    """Give the flags of verbosity to a command, or to a group and all of its commands."""
    _extend(command, _flags())


def _extend(command: Any, flags: list[Any]) -> None:
    checks = any("--set" in param.opts for param in command.params)
    command.params.extend(flag for flag in flags if checks or flag.name != "notes")
    for inner in getattr(command, "commands", {}).values():
        _extend(inner, flags)


def _flags() -> list[Any]:
    """Return the flags, as typer derives them from a function."""
    app = typer.Typer()

    @app.command()
    def flags(
        quiet: Annotated[
            bool,
            typer.Option("-q", "--quiet", help="Print only errors.", callback=_quiet, expose_value=False),
        ] = False,
        verbose: Annotated[
            bool,
            typer.Option(
                "-v",
                "--verbose",
                help="Print what the command is doing.",
                callback=_verbose,
                expose_value=False,
            ),
        ] = False,
        notes: Annotated[
            bool,
            typer.Option("--notes", help="Print notes in full.", callback=_notes, expose_value=False),
        ] = False,
    ) -> None: ...

    params = typer.main.get_command(app).params
    return [param for param in params if param.name in ("quiet", "verbose", "notes")]


def _quiet(value: bool) -> None:
    if not value:
        return
    manner.quiet = True
    _refuse_silence("--verbose", manner.verbose)
    _refuse_silence("--notes", manner.notes)
    progress.silent = True


def _verbose(value: bool) -> None:
    if not value:
        return
    manner.verbose = True
    _refuse_silence("--verbose", manner.verbose)
    if not any(isinstance(handler, _Stderr) for handler in logging.getLogger().handlers):
        logging.getLogger().addHandler(_Stderr())
        logging.getLogger().setLevel(logging.INFO)


def _notes(value: bool) -> None:
    manner.notes = manner.notes or value
    _refuse_silence("--notes", manner.notes)


def _refuse_silence(flag: str, value: bool) -> None:
    if manner.quiet and value:
        raise typer.BadParameter("one of the two", param_hint=f"--quiet and {flag}")


class _Stderr(logging.Handler):
    """Print log lines with the time since the start. A closed terminal does not stop the command."""

    def emit(self, record: logging.LogRecord) -> None:
        passed = time.monotonic() - manner.started
        for line in record.getMessage().splitlines():
            print(f"{passed:8.2f} s  {record.name}: {printable(line)}", file=sys.stderr)

    def handleError(self, record: logging.LogRecord) -> None: ...


def _unlog() -> None:
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _Stderr)]:
        root.removeHandler(handler)
        root.setLevel(logging.WARNING)


def each(label: str, items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items; each counts as done when the next one is requested."""
    with Progress(label, len(items)) as progress:
        for item in items:
            yield item
            progress.advance(1)
