"""What a command cannot do, in words that its user can act on."""

from __future__ import annotations


class ArtifactError(Exception):
    """Something that a command cannot do as asked: a folder, a file, a package or an option is in the way.

    Attributes:
        help: what to do about it.
    """

    def __init__(self, message: str, help: str | None = None) -> None:
        super().__init__(message)
        self.help = help
