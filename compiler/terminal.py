"""How `recipe` speaks: how much (--quiet, --verbose), in which colors, and what it says at Ctrl-C.

Errors and results that were asked for are always printed. Notes, progress and what was written are not
with --quiet; --verbose adds what is being done.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from rich.console import Console

NOTHING = "nothing was written"
INTERRUPTED = 130

log = logging.getLogger("recipe")
"""What is being done, for --verbose."""


@dataclass
class Manner:
    """How one run of the command speaks.

    Attributes:
        quiet, verbose: as the flags say; never both.
        kept: what Ctrl-C says of what is there, a clause or a function that gives it; None where the command
            says it by itself.
        started: when it began, of time.monotonic.
    """

    quiet: bool = False
    verbose: bool = False
    kept: str | Callable[[], str] | None = NOTHING
    started: float = 0.0


manner = Manner()


class Commands(TyperGroup):
    """The commands of `recipe`: each takes --quiet and --verbose, and says at Ctrl-C what was kept."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _add_flags(self)

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
    """Says what Ctrl-C says from here on, as Manner.kept."""
    manner.kept = kept


def say(text: str) -> None:
    """Prints to stderr what has to be read."""
    from recipec.spec.diagnostics import printable

    print(printable(text), file=sys.stderr)


def note(text: str) -> None:
    """Prints to stderr what is good to know."""
    if not manner.quiet:
        say(text)


def tell(text: str) -> None:
    """Prints to stdout what was done; what was asked for is printed anyway."""
    if not manner.quiet:
        result(text)


def result(text: str, end: str = "\n") -> None:
    """Prints to stdout what was asked for, without what could steer a terminal: recipes and names of files
    may hold anything."""
    from recipec.spec.diagnostics import printable

    print(printable(text), end=end)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Says with --verbose what took how long."""
    start = time.monotonic()
    yield
    log.info("%s: %.2f s", what, time.monotonic() - start)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Signals that end a command take effect at the end of the block, which is short: files are moved all or
    none."""
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
    """Whether a stream takes colors: NO_COLOR has none (https://no-color.org), FORCE_COLOR has them in pipes
    too (https://force-color.org), and otherwise a terminal has them."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def console(stream: Any = None, width: int | None = None) -> Console:
    """A console of rich's that takes colors where `color` says so, and escapes nothing else into pipes.

    Args:
        stream: stdout, when it is None.
        width: columns where the stream is no terminal; None leaves it to COLUMNS and to rich.
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


def _begin() -> None:
    from recipec.runtime import progress

    manner.__init__()  # type: ignore[misc]
    manner.started = time.monotonic()
    progress.silent = False
    _unlog()


def _add_flags(group: TyperGroup) -> None:
    flags = _flags()
    group.params.extend(flags)
    for command in group.commands.values():
        if isinstance(command, TyperGroup):
            _add_flags(command)
        else:
            command.params.extend(flags)


def _flags() -> list[Any]:
    """The two flags, as typer makes them of a function."""
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
    ) -> None: ...

    return [param for param in typer.main.get_command(app).params if param.name in ("quiet", "verbose")]


def _quiet(given: bool) -> None:
    if not given:
        return
    from recipec.runtime import progress

    _refuse_both(manner.verbose)
    manner.quiet = True
    progress.silent = True


def _verbose(given: bool) -> None:
    if not given:
        return
    _refuse_both(manner.quiet)
    manner.verbose = True
    if not any(isinstance(handler, _Stderr) for handler in logging.getLogger().handlers):
        logging.getLogger().addHandler(_Stderr())
        logging.getLogger().setLevel(logging.INFO)


def _refuse_both(other: bool) -> None:
    if other:
        raise typer.BadParameter("one of the two", param_hint="--quiet and --verbose")


class _Stderr(logging.Handler):
    """Library's and own lines with the time since the start; a terminal that is gone stops nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        from recipec.spec.diagnostics import printable

        passed = time.monotonic() - manner.started
        for line in record.getMessage().splitlines():
            print(f"{passed:8.2f} s  {record.name}: {printable(line)}", file=sys.stderr)

    def handleError(self, record: logging.LogRecord) -> None: ...


def _unlog() -> None:
    root = logging.getLogger()
    for handler in [one for one in root.handlers if isinstance(one, _Stderr)]:
        root.removeHandler(handler)
        root.setLevel(logging.WARNING)
