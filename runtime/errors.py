"""Errors that a user can act on, and how a script reports them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

PASSING = 75
"""The exit status where nothing has to be mended, and what started the script may start it again: EX_TEMPFAIL
of sysexits.h. Another process of the run is gone, or a store did not answer for long."""


UNREADABLE = "is it a file that this account may read, on a disk that works?"
"""The help where the operating system reads a file no further."""


class UserError(Exception):
    """Something that the user can put right: a file, a flag, a device.

    Attributes:
        message: one sentence that names the thing.
        help: what to do about it, or None.
        exit_status: of a script that it ends: 1, or PASSING.
    """

    def __init__(self, message: str, help: str | None = None, exit_status: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.help = help
        self.exit_status = exit_status


class Spoiled(UserError):
    """An input that is damaged, or holds no usable numbers: nothing that was made of it counts."""


def report(error: UserError) -> None:
    """Writes an error to stderr, in the form of the compiler's diagnostics."""
    say(f"error: {printable(error.message)}")
    if error.help:
        say(f"  = help: {printable(error.help)}")


def say(text: str, out: TextIO | None = None) -> None:
    """Writes a line to stderr, or to `out`, in one piece.

    print() writes the line's end by itself, and what another thread says may come between.
    """
    stream = out or sys.stderr
    if stream is not None:
        stream.write(f"{text}\n")
        stream.flush()


def printable(text: str) -> str:
    """The text without what could steer a terminal: names of files may hold anything."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def guarded(main: Callable[[], int]) -> int:
    """Runs a script's main function; a UserError becomes a message and its exit status.

    So does a module of the runtime that is asked for and not there: an artifact has what its recipe needs.
    """
    try:
        return main()
    except UserError as error:
        report(error)
        return error.exit_status
    except ModuleNotFoundError as error:
        name = error.name or ""
        if not name.startswith(f"{__package__}."):
            raise
        missing = f"{name.replace('.', '/')}.py"
        help = "use the artifact that this is from, or ask for it in the recipe and build that again"
        report(UserError(f"this needs {missing}, which the recipe of this artifact does not ask for", help))
        return 1
