"""The error that a command raises when it cannot do what the user asked."""

from __future__ import annotations


class ArtifactError(Exception):
    """A command cannot do what was asked, for example because of a folder, a file, a package or an option.

    Attributes:
        help: what the user can do about it, None where there is no advice.
    """

    def __init__(self, message: str, help: str | None = None) -> None:
        super().__init__(message)
        self.help = help
