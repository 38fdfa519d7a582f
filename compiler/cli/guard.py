"""How the command `recipe` ends: with sentences and an exit status, whatever happens.

What goes wrong in a way that no command foresees (a full disk, a reader that went away, a terminal that
cannot show a letter, a fault of the compiler's own) is dealt with here, once for all commands.
"""

from __future__ import annotations

import codecs
import errno
import gc
import io
import json
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TextIO

import typer

from recipec.compiler.errors import WAYS_OUT, ArtifactError
from recipec.runtime.errors import UserError
from recipec.spec.codes import Code
from recipec.spec.diagnostics import printable

E0000 = Code(
    "E0000",
    "internal error of the compiler",
    cause="The compiler failed unexpectedly. This is a bug in recipec.",
    cure="Run the command again with RECIPEC_TRACEBACK=1, and report the output together with the recipe.",
)

DONE, FAILED, MISUSED = 0, 1, 2
"""Exit statuses."""
INTERRUPTED = 128 + signal.SIGINT
UNREAD = 128 + signal.SIGPIPE
"""Exit status where the reader of the output went away, as of a program that the signal ends."""

PATHLIB = ("Symlink loop", "Could not determine home directory", "Can't determine home directory")
"""What pathlib says of paths that lead nowhere, as a RuntimeError."""


PLAINLY = {
    r"Value error, ": "",
    r"Input should be greater than or equal to (\S+)": r"it must be at least \1",
    r"Input should be less than or equal to (\S+)": r"it must be at most \1",
    r"Input should be a valid integer.*": "it must be a whole number",
    r"Input should be a valid number.*": "it must be a number",
}
"""Pydantic's wording of a wrong value on the command line, and ours."""


def guarded(command: Callable[[], object]) -> NoReturn:
    """Run the command line, and exit with its status.

    Args:
        command: the application, not standalone: it raises its usage errors and returns an exit status, or
            anything else for 0.

    Raises:
        SystemExit: always.
    """
    _open_streams()
    before = sys.stdout
    for ended in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ended) != signal.SIG_IGN:  # as nohup has it
            # Ended from outside, it takes its workers and temporary files along, as at Ctrl-C.
            signal.signal(ended, _leave)
    status = _status(command)
    if sys.stdout is not before:  # typer has met a broken pipe, hidden it and left with 1
        status = (
            UNREAD if _unread() else _failed(BrokenPipeError(errno.EPIPE, "a process ended unexpectedly"))
        )
    status = _delivered(status)
    gc.freeze()  # the system takes the memory back: Python need not look through it for garbage
    raise SystemExit(status)


def _leave(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)


def _status(command: Callable[[], object]) -> int:
    try:
        _demand_folder()
        status = command()
        return status if isinstance(status, int) else DONE
    except SystemExit as left:
        return _of_exit(left.code)
    except KeyboardInterrupt:
        return INTERRUPTED
    except typer.Abort as aborted:  # Ctrl-C or Ctrl-D where something was asked
        if isinstance(aborted.__context__, KeyboardInterrupt):
            return INTERRUPTED
        _tell("error: the input ended before all questions were answered")
        return FAILED
    except Exception as error:
        return _failed(error)


def _of_exit(code: object) -> int:
    """Return the exit status of a SystemExit, and print its code if that is a sentence."""
    if code is None:
        return DONE
    if isinstance(code, int):
        return code
    _tell(f"error: {code}")
    return FAILED


def _demand_folder() -> None:
    try:
        os.getcwd()
    except OSError:
        raise ArtifactError(
            "the current folder no longer exists", "change to another folder with cd"
        ) from None


def _failed(error: Exception) -> int:
    """Print what failed, and return the exit status. A bug of the compiler is reported as a bug."""
    shown = getattr(error, "show", None)  # a usage error of typer's, whose class it does not export
    if callable(shown) and isinstance(status := getattr(error, "exit_code", None), int):
        text = io.StringIO()
        shown(file=text)
        _tell(_plainly(text.getvalue().rstrip("\n")))
        return status
    if isinstance(error, ArtifactError | UserError):
        _tell(f"error: {error}", error.help)
    elif isinstance(error, BrokenPipeError) and _unread():
        return UNREAD
    elif isinstance(error, OSError):
        place = _place(error)
        _tell(
            f"error: {f'{place}: ' if place else ''}{error.strerror or error}", WAYS_OUT.get(error.errno or 0)
        )
    elif isinstance(error, RuntimeError) and str(error).startswith(PATHLIB):
        _tell(f"error: {error}", "check the path")
    elif isinstance(error, MemoryError):
        _tell("error: there is not enough memory")
    else:
        _internal_error(error)
    return FAILED


def _plainly(text: str) -> str:
    """Replace pydantic's wording in typer's message about a wrong argument."""
    for pattern, words in PLAINLY.items():
        text = re.sub(pattern, words, text)
    return text


def _internal_error(error: Exception) -> None:
    if os.environ.get("RECIPEC_TRACEBACK"):
        with suppress(OSError):
            traceback.print_exc()
    first = (str(error).splitlines() or [""])[0]
    _tell(
        f"error[{E0000}]: internal error of the compiler: {type(error).__name__}: {first}",
        "this is a bug in recipec, not in the recipe. Run the command again with\n"
        "          RECIPEC_TRACEBACK=1, and report the output together with the recipe",
    )


def _place(error: OSError) -> str:
    """Return the file of an error in one line, or ""."""
    if isinstance(error.filename, str | bytes):
        return os.fsdecode(error.filename).replace("\n", "\ufffd")
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return "stdout"
    return ""


def _tell(text: str, help: str | None = None) -> None:
    """Print to stderr, if it can be written."""
    with suppress(OSError, ValueError):
        print(printable(text if not help else f"{text}\n  = help: {help}"), file=sys.stderr, flush=True)


def _open_streams() -> None:
    """Open closed standard streams on /dev/null, and escape letters that stdout and stderr cannot encode.

    A file that is opened later would get the number of a closed stream (`recipe ... >&-`), and the output
    would be written into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (for good)
    codecs.register_error("recipec", _escape)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="recipec")


def _escape(error: UnicodeError) -> tuple[str, int]:
    """Escape letters as JSON does, so that JSON stays JSON."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _delivered(status: int) -> int:
    """Flush stdout and stderr, and return the exit status, or another one if that fails.

    Python's own flush at exit would print a traceback, and exit with 120.
    """
    for name in ("stdout", "stderr"):
        stream: TextIO = getattr(sys, name)
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            _silence(stream)
            if isinstance(error, BrokenPipeError):
                status = status or UNREAD
            elif status == DONE:
                _tell(f"error: {name}: {getattr(error, 'strerror', None) or error}")
                status = FAILED
    return status


def _silence(stream: TextIO) -> None:
    """Discard everything written from now on, also when Python closes the stream."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _unread() -> bool:
    """Return whether the reader of stdout or stderr has closed it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if any(event & select.POLLERR for _, event in poll.poll(0)):
                return True
    return False
