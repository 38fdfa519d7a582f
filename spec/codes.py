"""The codes of diagnostics.

A module declares the codes that it gives, above the first function that gives them. A code that several
modules give is declared in the lowest of them. `python -m scripts.docs` writes docs/diagnostics.md from the
declarations.
"""

from __future__ import annotations

import re

SEVERITIES = {"E": "error", "W": "warning", "N": "note"}


class Code(str):
    """A diagnostic's code, such as E0203. Its letter is the severity, and its first two digits are the group.

    Attributes:
        heading: in lower case, without a full stop.
        cause, cure: sentences. All three are Markdown.
    """

    heading: str
    cause: str
    cure: str

    def __new__(cls, code: str, heading: str, cause: str, cure: str) -> Code:
        self = super().__new__(cls, code)
        self.heading, self.cause, self.cure = heading, cause, cure
        return self

    def __getnewargs__(self) -> tuple[str, str, str, str]:  # type: ignore[override]
        """Return the arguments with which pickle and copy make the code again."""
        return str(self), self.heading, self.cause, self.cure

    @property
    def severity(self) -> str:
        """error, warning or note."""
        return SEVERITIES[self[0]]

    @property
    def group(self) -> str:
        """The two digits that codes about one part of a recipe share."""
        return self[1:3]

    @property
    def anchor(self) -> str:
        """The anchor of the code's heading in docs/diagnostics.md, as Markdown readers derive it."""
        words = re.sub(r"[^\w\s-]", "", f"{self}: {self.heading}".lower())
        return re.sub(r"[-\s]+", "-", words).strip("-")
