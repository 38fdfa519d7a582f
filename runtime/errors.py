"""Errors that a user can act on, and how scripts report them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

PASSING = 75
"""The exit status if nothing has to be fixed and the script may be started again: EX_TEMPFAIL of sysexits.h.
Another process of the run ended, or a store did not answer for a long time."""

UNREADABLE = "check that this account may read the file, and that the disk works"
"""The help if the operating system fails to read a file further."""


class UserError(Exception):
    """A problem that the user can fix: a file, a flag, a device.

    Attributes:
        message: one sentence that names the problem.
        help: what to do about it, or None.
        exit_status: the exit status of a script that it ends: 1, or PASSING.
    """

    def __init__(self, message: str, help: str | None = None, exit_status: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.help = help
        self.exit_status = exit_status


class Spoiled(UserError):
    """A damaged input, or one without usable numbers: everything made from it is invalid."""


def report(error: UserError) -> None:
    """Write an error to stderr, in the form of the compiler's diagnostics."""
    say(f"error: {printable(error.message)}")
    if error.help:
        say(f"  = help: {printable(error.help)}")


def say(text: str, out: TextIO | None = None) -> None:
    """Write a line to stderr, or to `out`, in one piece.

    print() writes the line's end separately, so another thread's output may come in between.
    """
    stream = out or sys.stderr
    if stream is not None:
        stream.write(f"{text}\n")
        stream.flush()


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def printable(text: str) -> str:
    """Return the text without terminal control characters: file names may contain anything."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def guarded(main: Callable[[], int]) -> int:
    """Run a script's main function; turn a UserError into a message and its exit status."""
    try:
        return main()
    except UserError as error:
        report(error)
        return error.exit_status
