"""The error that a command raises when it cannot do what the user asked."""

from __future__ import annotations

import errno

WAYS_OUT = {
    errno.ENOSPC: "free disk space there, or name another place",
    errno.EDQUOT: "free disk space there, or name another place",
    errno.EFBIG: "it would be larger than this system or `ulimit -f` allows",
    errno.EACCES: "check its permissions, or name another place",
    errno.EPERM: "check its permissions, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "`ulimit -n` says how many files may be open at a time: raise it",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "name a file",
}
"""Helps for errors of the operating system."""


class ArtifactError(Exception):
    """A command cannot do what was asked, for example because of a folder, a file, a package or an option.

    Attributes:
        help: what the user can do about it, None where there is no advice.
    """

    def __init__(self, message: str, help: str | None = None) -> None:
        super().__init__(message)
        self.help = help
